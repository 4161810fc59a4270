"""The conformance table (tests/table): every collective on both engines, and Gloo held to the same results."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from iris_pg.errors import ArgumentError, UnsupportedError
from table.call import Row
from table.operations import OPERATIONS
from table.reductions import OPERATIONS as REDUCTIONS
from table.reductions import TAKEN
from table.runner import gloo_takes, groups_of, mistakes
from table.sample import CU_LACKS, GROUPS, everything, kinds, sampled
from table.values import REDUCED

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
WORLDS = [1, 2, 3, 4, 8]
ENGINES = ["sdma", "cu"]


# (engine, ranks) -> rows of each operation, where not a whole sample: more ranks than a CI machine has cores take
# turns, and the cu engine is an interpreter on CPUs.
FEWER = {("sdma", 8): 5, ("cu", 1): 4, ("cu", 2): 8, ("cu", 3): 2, ("cu", 4): 1, ("cu", 8): 1}


def rows(engine: str, world: int) -> list[Row]:
    """Return what is run."""
    if FULL and (engine == "sdma" or world <= 2):
        return list(everything(engine))
    chosen = list(sampled(engine, world, None if FULL else FEWER.get((engine, world))))
    return chosen[::4] if (engine, world) == ("cu", 8) else chosen


def runs_the_table(rank, world, engine):
    return mistakes(rows(engine, world), groups_of(world, "iris"), groups_of(world, "gloo"))


@pytest.mark.timeout(7200 if FULL else 180)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_table(ranks, engine, world):
    """Tensors outside the heap are read directly in groups of 3 and 8 ranks, and staged in others."""
    options = dict(engine=engine, direct_bytes=1 if world in (3, 8) else 0)
    for said in ranks(world).run(runs_the_table, engine, options=options, timeout_s=7000 if FULL else 120):
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
    assert sum(map(gloo_takes, sample)) > 100


def reduces_what_is_refused(rank, world, refused, kind):
    """Return what was raised by each reduction, which must come before anything moves: the group works after it."""
    said = []
    for op, dtype in refused:
        tensor, opts = torch.ones(4, dtype=torch.uint8).to(getattr(torch, dtype)), dist.AllreduceOptions()
        opts.reduceOp = REDUCTIONS[op]
        try:
            dist.group.WORLD.allreduce([tensor], opts)
            said.append(f"{op} of {dtype} was not refused")
        except kind as error:
            if f"{op.removeprefix('premul_')} of" not in str(error).lower() or dtype not in str(error):
                said.append(f"{op} of {dtype}: {error}")
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [world] * 3
    return said


ALL = {(op, dtype) for op in REDUCTIONS for dtype in REDUCED}
REFUSED = sorted(ALL - {(op, dtype) for op, dtypes in TAKEN.items() for dtype in dtypes})


@pytest.mark.parametrize(
    ("engine", "refused", "kind"),
    [("sdma", REFUSED, ArgumentError), ("cu", REFUSED, ArgumentError), ("cu", sorted(CU_LACKS), UnsupportedError)],
)
def test_all_other_reductions_are_refused(ranks, engine, refused, kind):
    assert ranks(2).run(reduces_what_is_refused, refused, kind, options=dict(engine=engine)) == [[], []]
