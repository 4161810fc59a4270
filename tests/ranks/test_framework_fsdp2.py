import contextlib, functools, os
import pytest, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh, DeviceMesh

class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, 4 * d); self.down = nn.Linear(4 * d, d); self.norm = nn.LayerNorm(d)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def net(d=13, n=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(d) for _ in range(n)])

def batch(rank, step, d=13):
    g = torch.Generator().manual_seed(100*rank+step)
    return torch.randn(4, d, generator=g), torch.randn(4, d, generator=g)

def fsdp1(rank, group, strategy, mp=False, clip=False):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision, StateDictType, FullStateDictConfig
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    kw = dict(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) if mp else {}
    m = FSDP(net(), process_group=group, sharding_strategy=getattr(ShardingStrategy, strategy), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu"), **kw)
    o = torch.optim.Adam(m.parameters(), lr=0.01)
    for s in range(3):
        x, y = batch(rank, s)
        nn.functional.mse_loss(m(x).float(), y).backward()
        if clip: m.clip_grad_norm_(0.5)
        o.step(); o.zero_grad()
    with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        return {k: v.clone() for k, v in m.state_dict().items()}

def go1(rank, world, strategy, mp, clip):
    g = dist.new_group(backend="gloo")
    a = fsdp1(rank, dist.group.WORLD, strategy, mp, clip); b = fsdp1(rank, g, strategy, mp, clip)
    for k in a:
        assert torch.equal(a[k], b[k]), (k, (a[k] - b[k]).abs().max())

@pytest.mark.parametrize("mp,clip", [(False, False), (True, True)])
@pytest.mark.parametrize("s", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1(ranks, s, mp, clip):
    ranks(2).run(go1, s, mp, clip)

def fsdp2(rank, mesh, steps=3, setup=None, mp=None, dtype=None, hsdp=False, reshard=True, opt=True):
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, FSDPModule
    m = net()
    if dtype: m = m.to(dtype)
    kw = dict(mp_policy=MixedPrecisionPolicy(**mp)) if mp else {}
    for b in m: fully_shard(b, mesh=mesh, reshard_after_forward=reshard, **kw)
    fully_shard(m, mesh=mesh, reshard_after_forward=reshard, **kw)
    for x in m.modules():
        if isinstance(x, FSDPModule) and setup: setup(x, mesh)
    o = torch.optim.Adam(m.parameters(), lr=0.01)
    for s in range(steps):
        x, y = batch(rank, s)
        nn.functional.mse_loss(m(x).float(), y).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        o.step(); o.zero_grad()
    return {k: v.full_tensor().clone() for k, v in m.state_dict().items()}

def meshes(world, shape, names, pg_backend):
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={n: pg_backend for n in names})

def force_sum(m, mesh): m.set_force_sum_reduction_for_comms(True)
def heap(m, mesh): m.set_allocate_memory_from_process_group_for_comm(True)
def divide(m, mesh): m.set_gradient_divide_factor(3.0)
def divide_sum(m, mesh): m.set_gradient_divide_factor(3.0); m.set_force_sum_reduction_for_comms(True)

CASES2 = dict(plain=(None, force_sum, {}), heap=(heap, force_sum, {}), divide=(divide, divide_sum, {}),
   bf16=(None, force_sum, dict(mp=dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))),
   bf16r=(None, force_sum, dict(mp=dict(param_dtype=torch.bfloat16))), heapbf=(heap, force_sum, dict(mp=dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))), noreshard=(heap, force_sum, dict(reshard=False)))

def go2(rank, world, case):
    a, b, kw = CASES2[case]
    ma = meshes(world, (world,), ("x",), "iris"); mb = meshes(world, (world,), ("x",), "gloo")
    x = fsdp2(rank, ma, setup=a, **kw); y = fsdp2(rank, mb, setup=b, **kw)
    bad = {k: (x[k] - y[k]).abs().max().item() for k in x if not torch.equal(x[k], y[k])}
    g = ma.get_group()
    return bad, getattr(g, "pool").blocks, g.pool.nbytes
@pytest.mark.parametrize("c", CASES2)
def test_fsdp2(ranks, c):
    print(ranks(2).run(go2, c))

def go3(rank, world):
    ma = meshes(world, (2, 2), ("r", "s"), "iris"); mb = meshes(world, (2, 2), ("r", "s"), "gloo")
    x = fsdp2(rank, ma, setup=heap); y = fsdp2(rank, mb, setup=force_sum)
    bad = {k: (x[k] - y[k]).abs().max().item() for k in x if not torch.equal(x[k], y[k])}
    return bad
def test_hsdp(ranks):
    print(ranks(4).run(go3))
