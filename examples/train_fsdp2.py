"""Train a small transformer with FSDP2, its buffers in the symmetric heap, and compare the losses with those over
another backend.

torchrun --nproc-per-node 2 examples/train_fsdp2.py --compare gloo
"""

import argparse
import gc

import text
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

parser = text.arguments(__doc__)
parser.add_argument("--heap", action=argparse.BooleanOptionalAction, default=True, help="of backend iris: zero copy")
args = parser.parse_args()
device = text.start(args)
curves = {}
for backend, group in text.groups(args).items():
    model = text.Transformer().to(device)
    mesh = DeviceMesh.from_group(group, device.type)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        if backend == "iris" and args.heap:
            module.set_allocate_memory_from_process_group_for_comm(True)
        if backend == "gloo":
            module.set_force_sum_reduction_for_comms(True)  # it cannot average
    curves[backend] = text.Curve().train(model, group, args.steps, device)
text.report(curves)
if dist.get_rank() == 0 and args.backend == "iris" and args.heap:
    pool = dist.group.WORLD.pool
    print(f"buffers in the heap: {pool.blocks} blocks, {pool.nbytes / 2**20:.1f} MiB a rank")
gc.collect()
dist.destroy_process_group()
gc.collect()  # what else holds a gloo group lets go: its threads abort the process when they outlive the interpreter
