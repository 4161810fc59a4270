"""Functional collectives: eager, and compiled into one graph. They call the group from C++."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def numbers(rank: int, n: int = 12) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 100 * rank


def uses_functional_collectives(rank, world):
    group = dist.group.WORLD
    expected = torch.cat([numbers(p) for p in range(world)])
    output = funcol.all_gather_tensor(numbers(rank), gather_dim=0, group=group)
    assert torch.equal(output + 0, expected)
    columns = funcol.all_gather_tensor(numbers(rank).view(3, 4), gather_dim=1, group=group)
    assert torch.equal(columns + 0, torch.cat([numbers(p).view(3, 4) for p in range(world)], 1))
    if torch.__version__ >= (2, 13):  # torch itself refuses a tensor that is not contiguous before
        transposed = funcol.all_gather_tensor(numbers(rank).view(3, 4).t(), gather_dim=0, group=group)
        assert torch.equal(transposed + 0, torch.cat([numbers(p).view(3, 4).t() for p in range(world)]))
    pieces = funcol.all_gather_into_tensor_coalesced([numbers(rank), numbers(rank, 5), numbers(rank, 0)], group=group)
    for piece, n in zip(pieces, (12, 5, 0), strict=True):
        assert torch.equal(piece + 0, torch.cat([numbers(p, n) for p in range(world)]))
    assert torch.equal(funcol.broadcast(numbers(rank), world - 1, group=group) + 0, numbers(world - 1))
    # Not waited for by hand, and freed at once.
    for _ in range(20):
        raw = torch.ops._c10d_functional.all_gather_into_tensor(numbers(rank), world, group.group_name)
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(raw), expected)
        del raw
    wrapped = funcol.all_gather_tensor_autograd(numbers(rank), gather_dim=0, group=group)
    assert torch.equal(wrapped + 0, expected)


@pytest.mark.parametrize("options", [None, dict(chunk_bytes=256, hostile_seed=2)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_eager(ranks, world, options):
    ranks(world).run(uses_functional_collectives, options=options)


def compiles(rank, world, backend):
    warnings.simplefilter("ignore")
    group = dist.group.WORLD
    expected = torch.cat([numbers(p) for p in range(world)])

    def functional(x):
        y = funcol.all_gather_tensor(x * 2, gather_dim=0, group=group)
        return y.sin() + 1

    def in_place(x):
        output = x.new_empty(world * x.numel())
        dist.all_gather_into_tensor(output, x * 3)
        return output + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for function, result in ((functional, (expected * 2).sin() + 1), (in_place, expected * 3 + 1)):
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(3):
            assert torch.allclose(compiled(numbers(rank)), result)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, torch._dynamo.utils.counters
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_into_one_graph(ranks, backend):
    ranks(2).run(compiles, backend, timeout_s=110)
