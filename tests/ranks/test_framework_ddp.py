import copy, contextlib, warnings, functools
import pytest, torch, torch.nn as nn, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32); self.b = nn.Linear(32, 32); self.unused = nn.Linear(8, 8); self.c = nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32)
    def forward(self, x, skip=False):
        y = torch.relu(self.a(x))
        if not skip: y = torch.relu(self.norm(self.b(y)))
        return self.c(y)

def batch(rank, step):
    g = torch.Generator().manual_seed(100*rank+step)
    return torch.randn(8, 16, generator=g), torch.randn(8, 4, generator=g)

def train(rank, group, steps=3, hook=None, opt="sgd", joins=False, no_sync=False, skip=False, **kw):
    torch.manual_seed(0)
    m = Net()
    m = DDP(m, process_group=group, **kw)
    if hook == "builtin":
        m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook == "builtin16":
        m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif hook:
        m.register_comm_hook(group, hook)
    o = torch.optim.SGD(m.parameters(), lr=0.1) if opt == "sgd" else ZeroRedundancyOptimizer(m.parameters(), torch.optim.Adam, process_group=group, lr=0.01, **({} if opt=="zero" else dict(parameters_as_bucket_view=True)))
    n = steps + (rank if joins else 0)
    cm = Join([m] + ([o] if opt != "sgd" else [])) if joins else contextlib.nullcontext()
    with cm:
      for s in range(n):
        x, y = batch(rank, s)
        with (m.no_sync() if no_sync and s % 2 == 0 else contextlib.nullcontext()):
            nn.functional.mse_loss(m(x, skip and (rank + s) % 2 == 0), y).backward()
        o.step(); o.zero_grad()
    return [p.detach().clone() for p in m.module.state_dict().values()]

def go(rank, world, kw):
    g = dist.new_group(backend="gloo")
    a = train(rank, dist.group.WORLD, **kw)
    b = train(rank, g, **kw)
    for x, y in zip(a, b):
        assert torch.equal(x, y), (x - y).abs().max()

CASES = dict(
  plain=dict(find_unused_parameters=True), no_sync=dict(no_sync=True, find_unused_parameters=True), skip=dict(skip=True, find_unused_parameters=True),
  static=dict(static_graph=True), join=dict(joins=True, find_unused_parameters=True), view=dict(gradient_as_bucket_view=True, find_unused_parameters=True),
  small=dict(bucket_cap_mb=0.001, find_unused_parameters=True),
  h1=dict(hook=default_hooks.allreduce_hook, find_unused_parameters=True), h2=dict(hook=default_hooks.fp16_compress_hook, find_unused_parameters=True), h3=dict(hook="builtin", find_unused_parameters=True), h4=dict(hook="builtin16", find_unused_parameters=True),
  zero=dict(opt="zero", find_unused_parameters=True), zerov=dict(opt="zerov", find_unused_parameters=True), zj=dict(opt="zero", joins=True, find_unused_parameters=True))
@pytest.mark.parametrize("c", CASES)
def test_ddp(ranks, c):
    ranks(2).run(go, CASES[c])
