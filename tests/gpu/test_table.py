"""The conformance table (tests/table) on CUDA tensors: results computed on the CPU, with Gloo held to them too."""

from __future__ import annotations

import pytest
import torch
from device_data import use_device

from table.call import Row
from table.operations import OPERATIONS
from table.runner import groups_of, mistakes
from table.sample import sampled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
# (engine, ranks) -> rows of each operation; None is a whole sample. Each new element type and reduction of the cu
# engine is compiled, and where ranks share a GPU a kernel that waits keeps it from the rank that it waits for.
ROWS = {
    ("sdma", 1): 12,
    ("sdma", 2): None,
    ("sdma", 4): 10,
    ("sdma", 8): 4,
    ("cu", 1): 12,
    ("cu", 2): 12,
    ("cu", 4): 4,
    ("cu", 8): 2,
}


def rows(engine: str, world: int) -> list[Row]:
    """Return what is run. A CUDA tensor is received from a rank that is named, as with NCCL."""
    return [row for row in sampled(engine, world, ROWS[engine, world]) if row.operation != "recv_from_any"]


def runs_the_table(rank, world, engine):
    device = use_device(rank)
    made = rows(engine, world)
    wrong = mistakes(made, groups_of(world, "iris"), groups_of(world, "gloo"), device)
    torch.cuda.synchronize()
    return len(made), wrong


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "world"), ROWS)
def test_the_table_on_gpus(ranks, engine, world, capsys):
    options = dict(engine=engine, device_chunk_bytes=1 << 16)
    said = ranks(world).run(runs_the_table, engine, options=options, timeout_s=200, group_timeout_s=30)
    counts, wrong = zip(*said, strict=True)
    with capsys.disabled():
        print(f"\ntable: {engine}, {world} ranks: {counts[0]} rows of {len(OPERATIONS) - 1} operations")
    assert not any(wrong), "\n".join(text for texts in wrong for text in texts)
