"""DistributedDataParallel, ZeroRedundancyOptimizer and FSDP1: what they train over iris is what they train over gloo.

Two ranks: a sum of two operands has one order, so the results are the same to the bit.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer  # here: it keeps the default group of when it is imported
from torch.nn.parallel import DistributedDataParallel

from training import FEATURES, Block, batch, differences, model

HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "builtin allreduce": dist.BuiltinCommHookType.ALLREDUCE,
    "builtin fp16": dist.BuiltinCommHookType.FP16_COMPRESS,
}


class Branches(nn.Module):
    """A model of which a rank may leave a part out, with a parameter that nobody uses and buffers to broadcast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = Block(), Block(), nn.Linear(2, 2)
        self.statistics = nn.BatchNorm1d(FEATURES)

    def forward(self, x, leave_out):
        x = self.statistics(self.first(x))
        return x if leave_out else self.second(x)


def trains_ddp(rank, group, *, hook=None, zero=None, joins=False, no_sync=False, leave_out=False, static=False, **keys):
    net = model() if static else Branches()
    net = DistributedDataParallel(
        net, process_group=group, static_graph=static, find_unused_parameters=not static, **keys
    )
    if isinstance(hook, str) and hook.startswith("builtin"):
        net._register_builtin_comm_hook(HOOKS[hook])
    elif hook:
        net.register_comm_hook(group, HOOKS[hook])
    if zero is None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.Adam, process_group=group, parameters_as_bucket_view=zero == "views", lr=0.01
        )
    members = [net] if zero is None else [net, optimizer]
    with Join(members) if joins else contextlib.nullcontext():
        for step in range(3 + 2 * rank * joins):
            x, y = batch(rank, step)
            arguments = () if static else (leave_out and (rank + step) % 2 == 0,)
            with net.no_sync() if no_sync and step != 1 else contextlib.nullcontext():
                nn.functional.mse_loss(net(x, *arguments), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in net.module.state_dict().items()}


def compares(rank, world, train, keys):
    gloo = dist.new_group(backend="gloo")
    return differences(train(rank, dist.group.WORLD, **keys), train(rank, gloo, **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        dict(no_sync=True),
        dict(leave_out=True),
        dict(static=True),
        dict(joins=True),
        dict(gradient_as_bucket_view=True, bucket_cap_mb=0.001),
        dict(hook="allreduce"),
        dict(hook="fp16"),
        dict(hook="builtin allreduce"),
        dict(zero="copies"),
        dict(zero="views", joins=True),
    ],
    ids=str,
)
def test_ddp(ranks, keys):
    assert ranks(2).run(compares, trains_ddp, keys) == [{}, {}]


def uses_a_hook_that_torch_keeps_to_itself(rank, world):
    with pytest.raises(RuntimeError, match="should return TensorList"):
        trains_ddp(rank, dist.group.WORLD, hook="builtin fp16")


def test_the_builtin_fp16_hook_takes_only_futures_made_in_cpp(ranks):
    """It refuses the list of tensors of a future that Python has made; `fp16_compress_hook` does the same and works."""
    ranks(2).run(uses_a_hook_that_torch_keeps_to_itself)


def trains_fsdp1(rank, group, strategy, mixed):
    from torch.distributed.fsdp import (
        FullStateDictConfig,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
        StateDictType,
    )
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    net = FullyShardedDataParallel(
        model(),
        process_group=group,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if mixed else None,
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(2):
        x, y = batch(rank, step)
        nn.functional.mse_loss(net(x).float(), y).backward()
        net.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    full = FullStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, full):
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(ranks, strategy, mixed):
    assert ranks(2).run(compares, trains_fsdp1, dict(strategy=strategy, mixed=mixed)) == [{}, {}]
