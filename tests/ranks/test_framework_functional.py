"""Functional collectives and torch's own calls in one compiled graph, and under fake tensors; compared with gloo."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from iris_pg.errors import ArgumentError
from training import forget_meshes


def numbers(rank: int, n: int = 12) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) * (rank + 1) + rank


def functions(group):
    """Return functions of a tensor [12], each with collectives between other operations."""
    world = group.size()

    def into(op, x, *args, size=None):
        output = x.new_empty(size or x.size())
        op(output, x, *args, group=group)
        return output + 1

    def in_place(op, x, *args):
        x = x * 2
        op(x, *args, group=group)
        return x + 1

    def chained(x):
        total = funcol.all_reduce(x.sin(), "sum", group)
        parts = funcol.reduce_scatter_tensor(total * 2, "sum", 0, group)
        return funcol.all_gather_tensor(parts, 0, group) + x.sum()

    rows = [1 + rank for rank in range(world)]  # of each rank, for every rank
    sent = [rows[group.rank()]] * world
    return {
        "all_reduce": lambda x: funcol.all_reduce(x * 2, "sum", group) + 1,
        "all_reduce max": lambda x: funcol.all_reduce(x * -1, "max", group) + 1,
        "all_reduce_coalesced": lambda x: sum(funcol.all_reduce_coalesced([x * 2, x + 1], "sum", group)),
        "all_gather_tensor": lambda x: funcol.all_gather_tensor(x * 2, 0, group) + 1,
        "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x.view(2, 6) * 2, "sum", 1, group) + 1,
        "all_to_all_single": lambda x: funcol.all_to_all_single(x * 2, None, None, group) + 1,
        "all_to_all_single uneven": lambda x: funcol.all_to_all_single(x[: sum(sent)], rows, sent, group) + 1,
        "broadcast": lambda x: funcol.broadcast(x * 2, world - 1, group) + 1,
        "chained": chained,
        "dist.all_reduce": lambda x: in_place(dist.all_reduce, x),
        "dist.all_gather_into_tensor": lambda x: into(dist.all_gather_into_tensor, x, size=world * 12),
        "dist.reduce_scatter_tensor": lambda x: into(dist.reduce_scatter_tensor, x, size=12 // world),
        "dist.all_to_all_single": lambda x: into(dist.all_to_all_single, x),
    }


def runs_functions(rank, world):
    gloo = dist.new_group(backend="gloo")
    expected = {name: function(numbers(rank)) + 0 for name, function in functions(gloo).items()}
    for name, function in functions(dist.group.WORLD).items():
        for _ in range(2):
            assert torch.equal(function(numbers(rank)) + 0, expected[name]), name


@pytest.mark.parametrize("world", [2, 3])
def test_eager(ranks, world):
    ranks(world).run(runs_functions)


def compiles_functions(rank, world, backend):
    warnings.simplefilter("ignore")
    for name, function in functions(dist.group.WORLD).items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(numbers(rank)), function(numbers(rank)) + 0), name
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, name
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_into_one_graph(ranks, backend):
    ranks(2).run(compiles_functions, backend, timeout_s=110)


def differentiates(rank, world):
    group, gloo = dist.group.WORLD, dist.new_group(backend="gloo")

    def gradient(group):
        x = numbers(rank).requires_grad_()
        y = funcol.all_gather_tensor_autograd(x.square(), 0, group) * 2
        z = funcol.reduce_scatter_tensor_autograd(y + 0, "sum", 0, group) + 0
        (funcol.all_to_all_single_autograd(z, None, None, group) + 0).square().sum().backward()
        return x.grad

    assert torch.equal(gradient(group), gradient(gloo))


def test_gradients(ranks):
    ranks(2).run(differentiates)


# Tensors without memory -----------------------------------------------------------------------------------------------


def calls_with_fakes(rank, world):
    group = dist.group.WORLD
    before = group.transport.sequence
    with FakeTensorMode():
        tensor, whole = torch.ones(4), torch.ones(world * 4)
        rows = [torch.ones(4) for _ in range(world)]
        assert isinstance(tensor, FakeTensor)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.all_gather(rows, tensor)
        dist.all_gather_into_tensor(whole, tensor)
        dist.reduce_scatter(tensor, rows)
        dist.reduce_scatter_tensor(tensor, whole)
        dist.all_to_all(rows, list(rows))
        dist.all_to_all_single(whole, whole)
        dist.gather(tensor, rows if rank == 0 else None, 0)
        dist.scatter(tensor, rows if rank == 0 else None, 0)
        dist.send(tensor, 1 - rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        assert work.get_future().wait() == [tensor]
        assert (funcol.all_gather_tensor(tensor, 0, group) + 0).shape == (world * 4,)
        made = group.allocate_tensor(8, dtype=torch.float32, device=torch.device("cpu"))
        assert isinstance(made, FakeTensor)
    fake = FakeTensorMode().from_tensor(torch.ones(4))
    dist.all_reduce(fake)  # also where no mode is active
    assert group.transport.sequence == before
    assert "pool" not in vars(group)


def test_fake_tensors_move_nothing(ranks):
    ranks(2).run(calls_with_fakes)


def calls_with_subclasses(rank, world):
    from torch.distributed.tensor import DTensor, Replicate

    total = sum(numbers(p) for p in range(world))
    waiting = funcol.all_reduce(numbers(rank), "sum", dist.group.WORLD)
    assert isinstance(waiting, funcol.AsyncCollectiveTensor)
    gathered = torch.empty(world * 12)
    dist.all_gather_into_tensor(gathered, waiting)
    assert torch.equal(gathered, total.repeat(world))
    waiting = funcol.all_reduce(numbers(rank), "sum", dist.group.WORLD)
    dist.all_reduce(waiting)
    assert torch.equal(waiting + 0, total * world)
    parameter = torch.nn.Parameter(numbers(rank))
    dist.broadcast(parameter, 1)
    assert torch.equal(parameter.detach(), numbers(1))

    class Named(torch.Tensor):
        pass

    named = numbers(rank).as_subclass(Named)
    dist.all_reduce(named)
    assert torch.equal(named.as_subclass(torch.Tensor), total)
    tensor = DTensor.from_local(numbers(rank), dist.init_device_mesh("cpu", (world,)), [Replicate()])
    with pytest.raises(ArgumentError, match=r"all_reduce: a tensor is a DTensor.*pass tensor\.to_local\(\)"):
        dist.all_reduce(tensor)
    forget_meshes()


def test_tensors_of_other_classes(ranks):
    ranks(2).run(calls_with_subclasses)
