"""DTensor, tensor and sequence parallelism, device meshes and distributed checkpoints over iris; compared with gloo."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from iris_pg import Options
from training import FEATURES, batch, differences, forget_meshes, mesh_of, model


def redistributes(rank, world):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    rows, columns, whole, sum_, largest = Shard(0), Shard(1), Replicate(), Partial(), Partial("max")
    moves = [(rows, whole), (rows, columns), (columns, rows), (whole, columns), (sum_, whole), (sum_, rows)]
    moves += [(largest, columns), (Partial("avg"), whole)]
    numbers = torch.arange(5 * 7, dtype=torch.float32).view(5, 7)  # no dimension is a multiple of the number of ranks
    results = {}
    for backend in ("iris", "gloo"):
        mesh = mesh_of(backend, (world,), ("x",))
        results[backend] = {}
        for here, there in moves:
            if here == Partial("avg") and backend == "gloo":  # which has no AVG
                results[backend]["avg"] = numbers * (world + 1) / 2
                continue
            if isinstance(here, Partial):
                tensor = DTensor.from_local(numbers * (rank + 1), mesh, [here])
            else:
                tensor = distribute_tensor(numbers, mesh, [here])
            name = "avg" if here == Partial("avg") else f"{here} to {there}"
            results[backend][name] = tensor.redistribute(mesh, [there]).to_local()
        weight = distribute_tensor(torch.ones(7, 6), mesh, [columns]).requires_grad_()
        (distribute_tensor(numbers, mesh, [rows]) @ weight).sum().backward()
        results[backend]["gradient"] = weight.grad.full_tensor()
    forget_meshes()
    return differences(results["iris"], results["gloo"])


@pytest.mark.parametrize("world", [2, 3])
def test_dtensor(ranks, world):
    assert ranks(world).run(redistributes) == [{}] * world


class Layer(nn.Module):
    """A transformer's layer [batch, sequence, FEATURES], whose norms may see a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
        self.q, self.k, self.v, self.o = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x):
        h = self.norm_1(x)
        q, k, v = (part(h).unflatten(-1, (-1, 3)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attention.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


def parallel(net, mesh):
    """Shard the weights over ``mesh``, and between them the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    sequence = Shard(1)
    column, row = tp.ColwiseParallel(input_layouts=sequence), tp.RowwiseParallel(output_layouts=sequence)
    for layer in net:
        plan = dict.fromkeys(("q", "k", "v", "up"), column) | dict.fromkeys(("o", "down"), row)
        tp.parallelize_module(layer, mesh, plan | dict.fromkeys(("norm_1", "norm_2"), tp.SequenceParallel()))
    ends = dict(input_layouts=Replicate(), desired_input_layouts=sequence, use_local_output=True)
    tp.parallelize_module(net, mesh, tp.PrepareModuleInput(**ends))
    tp.parallelize_module(
        net, mesh, tp.PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=Replicate())
    )
    return net


def trains_in_parallel(rank, world, compiles):
    results = {}
    for backend in ("iris", "gloo"):
        torch.manual_seed(0)
        net = parallel(nn.Sequential(Layer()), mesh_of(backend, (world,), ("x",)))
        is_compiled = compiles and backend == "iris"
        call = torch.compile(net, backend="aot_eager", fullgraph=True) if is_compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(step))
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[backend] = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
    forget_meshes()
    return differences(results["iris"], results["gloo"])


def test_tensor_and_sequence_parallel(ranks):
    assert ranks(2).run(trains_in_parallel, False) == [{}, {}]


def trains_compiled_and_ends(rank, world):
    assert trains_in_parallel(rank, world, True) == {}
    dist.barrier()
    os._exit(0)


def test_tensor_and_sequence_parallel_compiled_into_one_graph(mortal_ranks):
    """In processes that end: torch keeps the meshes of a graph, and so their groups, also after a reset."""
    mortal_ranks(2).run(trains_compiled_and_ends, may_die=(0, 1), timeout_s=110)


def uses_meshes(rank, world):
    mesh = dist.init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("rows", "columns"),
        backend_override={"columns": ("iris", Options("sdma", 1 << 20))},
    )
    assert mesh.get_group("rows").options is dist.group.WORLD.options
    assert mesh.get_group("columns").options.heap_bytes == 1 << 20
    line = dist.init_device_mesh("cpu", (world,))
    assert line.get_group() is dist.group.WORLD
    flat = mesh._flatten("both")
    sums = []
    for group in (mesh.get_group("rows"), mesh.get_group("columns"), flat.get_group(), line.get_group()):
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    forget_meshes()
    return sums


def test_device_meshes(ranks):
    assert ranks(4).run(uses_meshes) == [[2, 1, 6, 6], [4, 1, 6, 6], [2, 5, 6, 6], [4, 5, 6, 6]]


def checkpoints(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as of
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (world,))

    def trained(start):
        net = model()
        for parameter in net.parameters():
            parameter.data.add_(start)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        x, y = batch(rank, 0)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return net, optimizer

    def numbers(net, optimizer):
        full = of.StateDictOptions(full_state_dict=True)
        weights, state = of.get_state_dict(net, optimizer, options=full)
        moments = {f"{name}.{what}": t for name, each in state["state"].items() for what, t in each.items()}
        return weights | moments

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
        assert not differences(numbers(*first), numbers(*second))
    third, _ = trained(2.0)
    weights = of.get_model_state_dict(first[0], options=of.StateDictOptions(full_state_dict=True))
    from_one = of.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    of.set_model_state_dict(third, weights if rank == 0 else {}, options=from_one)
    both = [{name: t.full_tensor() for name, t in net.state_dict().items()} for net in (first[0], third)]
    assert not differences(*both)
    forget_meshes()


def test_checkpoints(ranks, tmp_path):
    ranks(2).run(checkpoints, str(tmp_path), timeout_s=90)
