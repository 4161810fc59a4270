"""Train a small transformer with FSDP2, its buffers in the symmetric heap, and compare the losses with those over
another backend.

torchrun --nproc-per-node 2 examples/train_fsdp2.py --compare gloo
torchrun --nnodes 2 --nproc-per-node 2 ... examples/train_fsdp2.py --replicas 2    # shards within hosts, HSDP
"""

import argparse
import gc

import text
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = text.arguments(__doc__)
parser.add_argument("--heap", action=argparse.BooleanOptionalAction, default=True, help="of backend iris: zero copy")
parser.add_argument(
    "--replicas", type=int, default=1, help="how often there is each parameter: once in so many parts of the ranks"
)
args = parser.parse_args()
device = text.start(args)
curves = {}
for backend, group in text.groups(args).items():
    model = text.Transformer().to(device)
    if args.replicas == 1:
        mesh = DeviceMesh.from_group(group, device.type)
    else:
        names = ("replicas", "shards")
        shape = (args.replicas, dist.get_world_size() // args.replicas)
        mesh = init_device_mesh(
            device.type, shape, mesh_dim_names=names, backend_override=dict.fromkeys(names, backend)
        )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        if backend == "iris" and args.heap:
            module.set_allocate_memory_from_process_group_for_comm(True)
        if backend == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # it cannot average
    if backend == "iris":
        pool = mesh.get_group(mesh.ndim - 1).pool
    curves[backend] = text.Curve().train(model, group, args.steps, device)
text.report(curves)
if dist.get_rank() == 0 and args.backend == "iris" and args.heap:
    print(f"buffers in the heap: {pool.blocks} blocks, {pool.nbytes / 2**20:.1f} MiB a rank")
gc.collect()
dist.destroy_process_group()
gc.collect()  # what else holds a gloo group lets go: its threads abort the process when they outlive the interpreter
