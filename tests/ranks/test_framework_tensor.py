"""DTensor, tensor and sequence parallelism, device meshes, and distributed checkpoints."""

from __future__ import annotations
import warnings
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training import FEATURES, batch, differences, forget_meshes, mesh_of, model
from iris_pg import Options


def redistributes(rank, world):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    results = {}
    for backend in ("iris", "gloo"):
        mesh = mesh_of(backend, (world,), ("x",))
        whole = torch.arange(5 * 7, dtype=torch.float32).view(5, 7)
        for i, (here, there) in enumerate([(Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Partial(), Replicate()), (Partial(), Shard(0)), (Partial("avg"), Replicate()), (Partial("max"), Shard(1)) ]):
            if backend == "gloo" and here == Partial("avg"):
                 results[backend, i] = results["iris", i]; continue
            local = DTensor.from_local(whole * (rank + 1), mesh, [here]) if isinstance(here, Partial) else distribute_tensor(whole, mesh, [here])
            results[backend, i] = local.redistribute(mesh, [there]).to_local()
            if here == Partial("avg"): assert torch.equal(results[backend, i], whole * (world + 1) / 2)
        results[backend, "grad"] = None
        w = distribute_tensor(torch.ones(7, 6), mesh, [Shard(1)]).requires_grad_()
        x = distribute_tensor(whole, mesh, [Shard(0)])
        (x @ w).sum().backward()
        results[backend, "grad"] = w.grad.full_tensor()
    for (backend, i), t in results.items():
        assert torch.equal(t, results["gloo", i]), (i, t, results["gloo", i])
    forget_meshes()

@pytest.mark.parametrize("world", [2, 3])
def test_redistribute(ranks, world):
    ranks(world).run(redistributes)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)
        self.norm2 = nn.LayerNorm(FEATURES)
    def forward(self, x):
        b, s, _ = x.shape
        def heads(t): return t.view(b, t.shape[1], -1, 3).transpose(1, 2)
        h = self.norm(x)
        y = nn.functional.scaled_dot_product_attention(heads(self.q(h)), heads(self.k(h)), heads(self.v(h)))
        x = x + self.o(y.transpose(1, 2).reshape(b, y.shape[2], -1))
        return x + self.down(torch.relu(self.up(self.norm2(x))))

def tensor_parallel(rank, world, compiled=False):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module
    outs = {}
    for backend in ("iris", "gloo"):
        mesh = mesh_of(backend, (world,), ("tp",))
        torch.manual_seed(0)
        net = nn.Sequential(Attention(), Attention())
        for block in net:
            parallelize_module(block, mesh, {
                "norm": SequenceParallel(), "norm2": SequenceParallel(),
                "q": ColwiseParallel(input_layouts=Shard(1)), "k": ColwiseParallel(input_layouts=Shard(1)), "v": ColwiseParallel(input_layouts=Shard(1)),
                "o": RowwiseParallel(output_layouts=Shard(1)),
                "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))})
        parallelize_module(net, mesh, PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)))
        parallelize_module(net, mesh, PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)))
        f = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(step))
            out = f(x)
            out.square().mean().backward()
            optimizer.step(); optimizer.zero_grad()
        outs[backend] = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()} | dict(out=out.detach())
    forget_meshes()
    torch._dynamo.reset()
    return differences(outs["iris"], outs["gloo"])

@pytest.mark.parametrize("compiled", [False, True])
def test_tp(ranks, compiled):
    assert ranks(2).run(tensor_parallel, compiled, timeout_s=110) == [{}, {}]

def checkpoints(rank, world, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict, StateDictOptions
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    def make(seed):
        torch.manual_seed(seed)
        net = model(); 
        for p in net.parameters(): p.data.add_(seed)
        fully_shard(net, mesh=mesh)
        opt = torch.optim.Adam(net.parameters(), lr=0.01)
        x, y = batch(rank, 0)
        nn.functional.mse_loss(net(x), y).backward(); opt.step(); opt.zero_grad()
        return net, opt
    net, opt = make(0)
    m, o = get_state_dict(net, opt)
    before = {k: v.full_tensor().clone() for k, v in m.items()}
    dcp.save(dict(m=m, o=o), checkpoint_id=path + "/a")
    fut = dcp.async_save(dict(m=m, o=o), checkpoint_id=path + "/b")
    fut.result()
    for which in "ab":
        other, oopt = make(1)
        m2, o2 = get_state_dict(other, oopt)
        dcp.load(dict(m=m2, o=o2), checkpoint_id=f"{path}/{which}")
        set_state_dict(other, oopt, model_state_dict=m2, optim_state_dict=o2)
        after = {k: v.full_tensor() for k, v in other.state_dict().items()}
        assert not differences(before, after)
    full = get_state_dict(net, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    other, oopt = make(2)
    set_state_dict(other, oopt, model_state_dict=full[0] if rank == 0 else {}, optim_state_dict=full[1] if rank == 0 else {}, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert not differences(before, {k: v.full_tensor() for k, v in other.state_dict().items()})
    forget_meshes()

def test_checkpoints(ranks, tmp_path):
    ranks(2).run(checkpoints, str(tmp_path), timeout_s=100)

def uses_meshes(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"b": ("iris", Options(chunk_bytes=512))})
    assert mesh["a"].get_group().options is dist.group.WORLD.options
    assert mesh["b"].get_group().options.chunk_bytes == 512
    for name, peers in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
        t = torch.full((3,), float(rank)); dist.all_reduce(t, group=mesh[name].get_group())
        assert t.tolist() == [float(sum(peers))] * 3
    flat = mesh["a", "b"]._flatten("ab")
    t = torch.full((3,), float(rank)); dist.all_reduce(t, group=flat.get_group()); assert t.tolist() == [6.0] * 3
    assert DeviceMesh.from_group(dist.group.WORLD, "cpu").size() == 4
    forget_meshes()
def test_meshes(ranks):
    ranks(4).run(uses_meshes)
