"""One all-gather over backend "iris": plain torch.distributed, apart from ``pg_options``.

torchrun --nproc-per-node 2 examples/all_gather.py --engine sdma --size 1048576 --iterations 20 --heap
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import iris_pg

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--engine", choices=("auto", "cu", "sdma"), default="auto", help="Triton kernels or copy engine")
parser.add_argument("--size", type=int, default=1 << 20, metavar="BYTES", help="bytes from each rank (%(default)s)")
parser.add_argument("--iterations", type=int, default=10, help="calls that are timed (%(default)s)")
parser.add_argument("--heap", action="store_true", help="gather into a tensor in the symmetric heap: zero copy")
args = parser.parse_args()
torch.set_num_threads(1)  # the ranks share this machine's cores

dist.init_process_group("iris", pg_options=iris_pg.Options(engine=args.engine))
rank, world = dist.get_rank(), dist.get_world_size()
all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name since, and before, torch 2.13

input = torch.full((args.size,), rank + 1, dtype=torch.uint8)
if args.heap:  # the same call on every rank, so the tensor lies at the same place of every rank's heap
    output = dist.group.WORLD.heap.empty(world * args.size, dtype=torch.uint8)
else:
    output = torch.empty(world * args.size, dtype=torch.uint8)

all_gather(output, input)
for p, part in enumerate(output.chunk(world)):
    assert (part == p + 1).all(), f"rank {rank} got wrong bytes from rank {p}"

dist.barrier()
start = time.perf_counter()
for _ in range(args.iterations):
    all_gather(output, input)
us = (time.perf_counter() - start) / args.iterations * 1e6

if rank == 0:
    received = (world - 1) * args.size
    print(f"{world} ranks, {args.size} bytes from each: {us:.1f} us a call, {received / us / 1e3:.3f} GB/s a rank")
    print(iris_pg.explain())
if "TORCHELASTIC_RUN_ID" not in os.environ:
    print("hint: start it with torchrun")
dist.destroy_process_group()
