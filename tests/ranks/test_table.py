"""The conformance table (tests/table): every collective on both engines, and Gloo held to the same results."""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from iris_pg.errors import ArgumentError, UnsupportedError
from table.operations import OPERATIONS, Call, Row
from table.reductions import OPERATIONS as REDUCTIONS
from table.reductions import TAKEN
from table.sample import CU_LACKS, GROUPS, everything, kinds, sampled
from table.values import FORMS, REDUCED, Form

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
WORLDS = [1, 2, 3, 4, 8]
ENGINES = ["sdma", "cu"]
MOST_MISTAKES = 5


def rows(engine: str, world: int) -> list[Row]:
    """Return what is run: a sample by default; on many ranks a small one, where the interpreter is slow."""
    if FULL and (engine == "sdma" or world <= 2):
        return list(everything(engine))
    return list(sampled(engine, world, {4: 4, 8: 1}.get(world) if engine == "cu" else None))


def groups_of(world: int, backend: str) -> dict[str, tuple[dist.ProcessGroup, list[int]]]:
    """Make every group, on all ranks; return those of this rank, with their members in order."""
    # Torch 2.11 sorts the ranks of every group.
    unsorted = dict(sort_ranks=False) if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made = {name: dist.new_group(members(world), backend=backend, **unsorted) for name, members in GROUPS.items()}
    return {
        name: (group, dist.get_process_group_ranks(group))
        for name, group in made.items()
        if group != dist.GroupMember.NON_GROUP_MEMBER
    }


def runs_the_table(rank, world, engine):
    """Return the mistakes, with their rows; stop where the group has failed."""
    warnings.simplefilter("ignore")  # torch's, about dtypes that it calls experimental
    groups, gloo = groups_of(world, "iris"), groups_of(world, "gloo")
    said, begun = [], time.monotonic()
    for row in rows(engine, world):
        if row.group not in groups or len(said) >= MOST_MISTAKES:
            continue
        operation = OPERATIONS[row.operation]
        runs = [("iris", row, groups)]
        if row.dtype in operation.gloo and row.reduction not in ("avg", "premul_sum") and all(row.form.shape or [0]):
            # Gloo takes contiguous tensors of one dimension or more, with elements; some of its works have no future.
            form = Form(row.form.shape, "contiguous")
            runs.append(("gloo", dataclasses.replace(row, form=form, asynchronous=False), gloo))
        for backend, called, of_backend in runs:
            call = Call(called, *of_backend[row.group], rounds_each=backend == "gloo")
            try:
                operation.call(call)
            except Exception as error:
                raise AssertionError(f"{backend}: {called}; before it: {said}") from error
            if text := call.mistake():
                said.append(f"{backend}: {called}: {text}")
    return said, time.monotonic() - begun


@pytest.mark.timeout(7200 if FULL else 150)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_table(ranks, engine, world):
    for said, _ in ranks(world).run(runs_the_table, engine, options=dict(engine=engine), timeout_s=7000 if FULL else 90):
        assert not said, "\n".join(said)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_sample_holds_every_pair(engine, world):
    sample = list(sampled(engine, world))
    for name, operation in OPERATIONS.items():
        of_it = [row for row in sample if row.operation == name]
        taken = kinds(operation, engine)
        assert {row.dtype for row in of_it} == {dtype for dtype, _ in taken}, name
        assert {row.form for row in of_it} == set(operation.forms), name
        assert {row.group for row in of_it} == set(GROUPS), name
        assert {row.asynchronous for row in of_it} == {False, True}, name
        assert {row.reduction for row in of_it} == {op for _, op in taken}, name
    pairs = {(row.reduction, row.dtype) for row in sample if row.reduction}
    lacks = CU_LACKS if engine == "cu" else set()
    assert pairs == {(op, dtype) for op, dtypes in TAKEN.items() for dtype in dtypes} - lacks
