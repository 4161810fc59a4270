"""torch's own users of process groups, on CUDA tensors: they train what one process trains on all ranks' data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_data import use_device
from torch import nn

import rank_pool
from training import FEATURES, batch, differences, forget_meshes, model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
STEPS = 4
# By the driver, by cuBLAS, by Inductor, each for as long as the process.
HELD = ["thread", "nvidia", "anon_inode", "child", "pipe", "descriptor of /", "/sem."]


def step_of(net, rank, step, optimizer):
    x, y = (t.cuda() for t in batch(rank, step))
    nn.functional.mse_loss(net(x).float(), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def alone(world):
    """Return the parameters that one process trains on the data of all ranks."""
    net = model().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in range(world)]
        x, y = (torch.cat([part[i] for part in parts]).cuda() for i in range(2))
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def check(ours, world, tolerance=1e-5):
    theirs = alone(world)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def trains_ddp(rank, world, hook, keys):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    device = use_device(rank)
    net = nn.parallel.DistributedDataParallel(model().cuda(), device_ids=[device.index], bucket_cap_mb=0.01, **keys)
    if hook:
        net.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        step_of(net, rank, step, optimizer)
    check(net.module.state_dict(), world, 1e-2 if hook == "fp16_compress_hook" else 1e-5)


def trains_fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = use_device(rank)
    net = FullyShardedDataParallel(model().cuda(), device_id=device, use_orig_params=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        step_of(net, rank, step, optimizer)
    with FullyShardedDataParallel.summon_full_params(net):
        check({name.replace("_fsdp_wrapped_module.", ""): t for name, t in net.named_parameters()}, world)
    forget_meshes()


def trains_fsdp2(rank, world, allocates, param_dtype):
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    use_device(rank)
    mesh = dist.init_device_mesh("cuda", (world,))
    net = model().cuda()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    if allocates:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        step_of(net, rank, step, optimizer)
    pool = dist.group.WORLD._device_pool if allocates else None
    assert pool is None or pool.blocks > 0
    check({name: t.full_tensor() for name, t in net.state_dict().items()}, world, 1e-5 if param_dtype is None else 3e-2)
    forget_meshes()


def trains_hsdp(rank, world):
    """Shards within pairs of ranks, replicas across them."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    use_device(rank)
    mesh = dist.init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("replicas", "shards"))
    net = model().cuda()
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        step_of(net, rank, step, optimizer)
    check({name: t.full_tensor() for name, t in net.state_dict().items()}, world)
    forget_meshes()


class TwoLayers(nn.Module):
    """[..., FEATURES] -> [..., FEATURES], whose weights can be sharded."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trains_tensor_parallel(rank, world):
    """Columns and rows of weights over the ranks, and the sequence between them; every rank has the whole batch."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    use_device(rank)
    mesh = dist.init_device_mesh("cuda", (world,))

    def trained(is_parallel):
        torch.manual_seed(0)
        net = nn.Sequential(TwoLayers(), TwoLayers()).cuda()
        if is_parallel:
            column = tp.ColwiseParallel(input_layouts=Shard(0))
            plan = {"up": column, "down": tp.RowwiseParallel(output_layouts=Shard(0))}
            for layer in net:
                tp.parallelize_module(layer, mesh, plan)
            whole = dict(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True)
            tp.parallelize_module(net, mesh, tp.PrepareModuleInput(**whole))
            ends = tp.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
            tp.parallelize_module(net, mesh, ends)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(STEPS):
            x, y = (t.cuda() for t in batch(0, step))
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: t.full_tensor() if is_parallel else t for name, t in net.state_dict().items()}

    ours, theirs = trained(True), trained(False)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
    forget_meshes()


def checkpoints(rank, world, folder):
    """A sharded model and its optimizer are saved, also while training could go on, and loaded into others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of
    from torch.distributed.fsdp import fully_shard

    use_device(rank)
    mesh = dist.init_device_mesh("cuda", (world,))

    def trained(start):
        net = model().cuda()
        for parameter in net.parameters():
            parameter.data.add_(start)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        step_of(net, rank, 0, optimizer)
        return net, optimizer

    def numbers(net, optimizer):
        weights, state = of.get_state_dict(net, optimizer, options=of.StateDictOptions(full_state_dict=True))
        return weights | {f"{n}.{what}": t for n, each in state["state"].items() for what, t in each.items()}

    first = trained(0.0)
    saved = dict(zip(("weights", "state"), of.get_state_dict(*first), strict=True))
    dcp.save(saved, checkpoint_id=f"{folder}/now")
    dcp.async_save(saved, checkpoint_id=f"{folder}/later").result()
    for when in ("now", "later"):
        second = trained(1.0)
        assert differences(numbers(*first), numbers(*second))
        into = dict(zip(("weights", "state"), of.get_state_dict(*second), strict=True))
        dcp.load(into, checkpoint_id=f"{folder}/{when}")
        of.set_state_dict(*second, model_state_dict=into["weights"], optim_state_dict=into["state"])
        assert not differences(numbers(*first), numbers(*second)), when
    forget_meshes()


def shards_tensors(rank, world):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    use_device(rank)
    mesh = dist.init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    a, b = torch.randn(12, 10, device="cuda"), torch.randn(10, 6, device="cuda")
    split, columns = distribute_tensor(a, mesh, [Shard(1)]), distribute_tensor(b, mesh, [Shard(0)])
    product = (split @ columns).redistribute(mesh, [Replicate()]).to_local()
    torch.testing.assert_close(product, a @ b)
    moved = distribute_tensor(a, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert torch.equal(moved.full_tensor(), a)
    forget_meshes()


def compiles(rank, world, backend):
    import torch._inductor.config
    import torch.distributed._functional_collectives as funcol

    use_device(rank)
    torch._inductor.config.compile_threads = 1  # else processes that compile stay
    name = dist.group.WORLD.group_name

    @torch.compile(fullgraph=True, backend=backend)
    def function(x):
        total = funcol.all_reduce(x * 2, "sum", name)
        gathered = funcol.all_gather_tensor(total + 1, 0, name)
        return funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, name)

    for i in range(3):
        x = torch.arange(6.0, device="cuda") + rank + i
        total = 2 * sum(torch.arange(6.0, device="cuda") + p + i for p in range(world))
        assert torch.equal(function(x), (total + 1) * 3 * world), i
    torch._dynamo.reset()


def compiles_into_cuda_graphs(rank, world, engine):
    """torch.compile(mode="reduce-overhead") replays CUDA graphs, collectives included."""
    import torch._inductor.config
    import torch.distributed._functional_collectives as funcol
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    use_device(rank)
    torch._inductor.config.compile_threads = 1  # else processes that compile stay
    name = dist.group.WORLD.group_name
    dist.all_reduce(torch.ones(1, device="cuda"))
    captured, keys = dist.group.WORLD._device_transport._captured, []
    launch = captured.launch
    captured.launch = lambda key, *rest: (keys.append(key), launch(key, *rest))[1]

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def function(x):
        total = funcol.all_reduce(x * 2, "sum", name)
        gathered = funcol.all_gather_tensor(total + 1, 0, name)
        return funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, name)

    for i in range(12):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.arange(6.0, device="cuda") + rank + i
        total = 2 * sum(torch.arange(6.0, device="cuda") + p + i for p in range(world))
        assert torch.equal(function(x), (total + 1) * 3 * world), i
    reset_cudagraph_trees()
    torch._dynamo.reset()
    assert len(keys) >= 3, f"captured: {keys}"


def binds_a_device(rank, world):
    """device_id makes the group's transport at once, and those of the groups that are split off it."""
    device = use_device(rank)
    dist.init_process_group("iris", store=rank_pool.current_store, rank=rank, world_size=world, device_id=device)
    assert dist.group.WORLD.bound_device_id == device and dist.group.WORLD._device_transport is not None
    mesh = dist.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("a", "b"))
    x = torch.full((3,), rank + 1.0, device=device)
    dist.all_reduce(x, group=mesh.get_group("a"))
    other = (rank + world // 2) % world
    assert x.tolist() == [rank + other + 2.0] * 3
    dist.barrier()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": p} for p in range(world)]
    cpu = torch.full((3,), rank + 1)
    dist.all_reduce(cpu)  # of CPU tensors, in the same group
    assert cpu.tolist() == [world * (world + 1) // 2] * 3
    dist.destroy_process_group()


CASES = [
    (trains_ddp, None, dict(gradient_as_bucket_view=True)),
    (trains_ddp, None, dict(static_graph=True)),
    (trains_ddp, "allreduce_hook", {}),
    (trains_ddp, "fp16_compress_hook", {}),
    (trains_fsdp1,),
    (trains_fsdp2, False, None),
    (trains_fsdp2, True, None),
    (trains_fsdp2, True, torch.bfloat16),
    (shards_tensors,),
    (trains_tensor_parallel,),
    (compiles, "aot_eager"),
    (compiles, "inductor"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join([c[0].__name__, *map(str, c[1:])]))
def test_frameworks(ranks, case):
    # Libraries that a test loads first (cuBLAS, Inductor's workers) stay for as long as the process.
    ranks(2).run(*case, options=dict(engine="sdma"), timeout_s=100, may_hold=HELD)


@pytest.mark.parametrize("engine", ["sdma", "cu", "auto"])
def test_torch_compile_into_cuda_graphs(ranks, engine):
    ranks(2).run(compiles_into_cuda_graphs, engine, options=dict(engine=engine), timeout_s=100, may_hold=HELD)


def test_hsdp(ranks):
    ranks(4).run(trains_hsdp, options=dict(engine="sdma"), timeout_s=90, may_hold=HELD)


def test_checkpoints(ranks, tmp_path):
    ranks(2).run(checkpoints, str(tmp_path), options=dict(engine="sdma"), timeout_s=90, may_hold=HELD)


def test_a_group_bound_to_a_device(ranks):
    ranks(4).run(binds_a_device, init=None, timeout_s=60, may_hold=HELD)
