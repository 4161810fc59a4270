"""FSDP2 over iris: it trains what it trains over gloo, in one dimension and two, with its buffers in the heap."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from iris_pg.errors import ArgumentError
from iris_pg.integrations import HeapAllGather, HeapReduceScatter
from training import batch, differences, forget_meshes, mesh_of, model


def averages(module, mesh):
    """What FSDP2 does by itself."""


def sums(module, mesh):
    module.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM


def allocates(module, mesh):
    module.set_allocate_memory_from_process_group_for_comm(True)


def gathers_ahead(module, mesh):
    allocates(module, mesh)
    module._set_unshard_async_op(True)


def divides(module, mesh):
    module.set_gradient_divide_factor(3.0)


def divides_sums(module, mesh):
    sums(module, mesh)
    divides(module, mesh)


def customizes(module, mesh):
    module.set_custom_all_gather(HeapAllGather(mesh.get_group()))
    module.set_custom_reduce_scatter(HeapReduceScatter(mesh.get_group()))


def parts(net):
    """Return the modules of ``net`` that FSDP2 shards."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def trains(rank, mesh, prepare, steps=3, after_step=None, param=None, reduce=None, reshard=True):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = model()
    for module in (*net, net):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    for module in parts(net):
        prepare(module, mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(rank, step)
        nn.functional.mse_loss(net(x).float(), y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if after_step:
            after_step()
    return {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}


def compares(rank, world, shape, prepare, prepare_gloo, keys):
    names = ("replicas", "shards")[-len(shape) :]
    ours = trains(rank, mesh_of("iris", shape, names), prepare, **keys)
    theirs = trains(rank, mesh_of("gloo", shape, names), prepare_gloo, **keys)
    forget_meshes()
    return differences(ours, theirs)


BF16 = dict(param=torch.bfloat16)


@pytest.mark.parametrize(
    ("prepare", "keys"),
    [
        (averages, {}),
        (allocates, {}),
        (allocates, BF16 | dict(reduce=torch.float32)),
        (allocates, BF16 | dict(reshard=False)),
        (gathers_ahead, dict(reduce=torch.float16)),
        (customizes, BF16),
    ],
    ids=["plain", "in the heap", "bf16, reduced in fp32", "bf16, kept", "async, reduced in fp16", "custom objects"],
)
def test_one_dimension(ranks, prepare, keys):
    assert ranks(2).run(compares, (2,), prepare, sums, keys) == [{}, {}]


@pytest.mark.parametrize("options", [dict(engine="cu"), dict(hostile_seed=3, chunk_bytes=1024)], ids=str)
def test_with_options_of_the_default_group(ranks, options):
    """The mesh's group takes them, too."""
    assert ranks(2).run(compares, (2,), gathers_ahead, sums, dict(steps=2), options=options) == [{}, {}]


def test_a_divide_factor_is_a_factor_of_the_sum(ranks):
    """PREMUL_SUM rounds a third of each operand; over gloo, a third of the sum is rounded."""
    for unequal in ranks(2).run(compares, (2,), divides, divides_sums, {}):
        assert max(unequal.values(), default=0) < 64 * torch.finfo(torch.float32).eps


def test_two_dimensions(ranks):
    assert ranks(4).run(compares, (2, 2), allocates, sums, {}, timeout_s=90) == [{}] * 4


# In the heap ----------------------------------------------------------------------------------------------------------


def counts(group):
    """Return a counter of what ``group`` does from now on: operation, and whether peers write the output directly."""
    counter, run = Counter(), group.transport.run

    def counted(key, *args, **keys):
        counter[key[0], any(isinstance(part, tuple) and part[0] == "zero copy at" for part in key)] += 1
        return run(key, *args, **keys)

    group.transport.run = counted
    return counter


def trains_in_the_heap(rank, world):
    mesh = mesh_of("iris", (world,), ("x",))
    group = mesh.get_group()
    counter, held = counts(group), []

    def after_step():
        held.append((group.pool.blocks, group.pool.nbytes, group.heap._allocator.used_bytes))

    trains(rank, mesh, allocates, steps=5, after_step=after_step)
    # Two blocks, of which the second stays as it is for the backward pass, and the root, which has no parameters.
    steps = Counter({name: n // 5 for name, n in counter.items() if name[0] != "barrier"})
    again = trains(rank, mesh, allocates, steps=1, after_step=after_step)
    forget_meshes()
    assert again
    return held, dict(steps)


def test_all_gathers_are_zero_copy_and_memory_stays_flat(ranks):
    for held, steps in ranks(2).run(trains_in_the_heap):
        assert steps["all_gather_into_tensor", True] >= 3
        assert ("reduce_scatter_tensor", False) in steps
        assert held[1:] == [held[1]] * 5  # from the second step on, and in another model of the same sizes
        blocks, nbytes, used = held[1]
        assert 0 < blocks <= 12
        assert nbytes == used


def shares_nothing(rank, world):
    with pytest.raises(ArgumentError, match="HeapAllGather: ProcessGroup is not a group of backend iris"):
        HeapAllGather(dist.new_group(backend="gloo"))


def test_custom_objects_take_groups_of_this_backend(ranks):
    ranks(2).run(shares_nothing)
