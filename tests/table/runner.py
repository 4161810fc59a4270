"""Runs rows of the conformance table in the processes of ranks."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist

from table.call import CPU, Call, Row
from table.operations import OPERATIONS
from table.sample import GROUPS
from table.values import FLOATS, Form

MOST_MISTAKES = 5

Groups = dict[str, tuple[dist.ProcessGroup, list[int]]]


def groups_of(world: int, backend: str) -> Groups:
    """Make every group of :data:`table.sample.GROUPS`, on all ranks; return those of this rank, with their members."""
    # Torch 2.11 sorts the ranks of every group.
    unsorted = dict(sort_ranks=False) if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    made = {name: dist.new_group(members(world), backend=backend, **unsorted) for name, members in GROUPS.items()}
    return {
        name: (group, dist.get_process_group_ranks(group))
        for name, group in made.items()
        if group != dist.GroupMember.NON_GROUP_MEMBER
    }


def world_only() -> Groups:
    """Return the default group alone."""
    return {"world": (dist.group.WORLD, list(range(dist.get_world_size())))}


def mistakes(rows: Iterable[Row], groups: Groups, gloo: Groups | None = None, device: torch.device = CPU) -> list[str]:
    """Run rows of the groups that this rank is in; return what is wrong, with the row, at most a few.

    Args:
        gloo: groups of Gloo, which is held to the same results where it takes the operation.
        device: where the tensors are; those of Gloo are on the CPU.

    Raises:
        AssertionError: a call raised; the message holds the row.
    """
    warnings.simplefilter("ignore")  # torch's, about dtypes that it calls experimental
    said: list[str] = []
    for row in rows:
        if row.group not in groups:
            continue
        runs = [("iris", row, groups)]
        if gloo and gloo_takes(row):
            # Some of Gloo's works have no future.
            form = Form(row.form.shape, "contiguous")
            runs.append(("gloo", dataclasses.replace(row, form=form, asynchronous=False), gloo))
        for backend, called, of_backend in runs:
            is_gloo = backend == "gloo"
            call = Call(called, *of_backend[row.group], rounds_each=is_gloo, device=CPU if is_gloo else device)
            try:
                OPERATIONS[row.operation].call(call)
            except Exception as error:
                raise AssertionError(f"{backend}: {called}; before it: {said[:MOST_MISTAKES]}") from error
            if text := call.mistake():
                said.append(f"{backend}: {called}: {text}")
    return said[:MOST_MISTAKES]  # but all rows have run: the others wait for this rank


def gloo_takes(row: Row) -> bool:
    """Return whether Gloo can do a row, with contiguous tensors: of one dimension or more, and not empty."""
    return (
        row.dtype in OPERATIONS[row.operation].gloo
        and row.reduction not in ("avg", "premul_sum")
        and not (row.reduction in ("min", "max") and row.dtype in FLOATS)  # of a NaN: Gloo takes the other operand
        and bool(row.form.shape)
        and math.prod(row.form.shape) > 0
    )
