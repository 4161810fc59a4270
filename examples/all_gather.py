"""One all-gather over backend "iris": plain torch.distributed, apart from ``pg_options``.

torchrun --nproc-per-node 2 examples/all_gather.py --engine sdma --size 1048576 --iterations 20 --heap
torchrun --nproc-per-node 8 examples/all_gather.py --device cuda --against nccl --heap  # a GPU for each rank
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
parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: GPUs of either maker (%(default)s)")
parser.add_argument("--against", metavar="BACKEND", help="another backend, gloo or nccl (RCCL too), timed beside it")
args = parser.parse_args()
torch.set_num_threads(1)  # the ranks share this machine's cores

device = torch.device("cpu")
if args.device == "cuda":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("iris", pg_options=iris_pg.Options(engine=args.engine))
rank, world = dist.get_rank(), dist.get_world_size()
all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name since, and before, torch 2.13


def data(rank: int) -> torch.Tensor:
    """Bytes that depend on rank and position, so that one in the wrong place is seen."""
    return ((torch.arange(args.size, device=device) * 7 + 31 * rank) % 251).to(torch.uint8)


def microseconds(group: dist.ProcessGroup | None = None) -> float:
    """Return the time of a call; what it gathers is checked before."""
    output.fill_(255)
    all_gather(output, input, group=group)
    for p, part in enumerate(output.chunk(world)):
        assert torch.equal(part, data(p)), f"rank {rank} got wrong bytes from rank {p}"
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(args.iterations):
        all_gather(output, input, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / args.iterations * 1e6


input = data(rank)
if args.heap:  # the same call on every rank, so the tensor lies at the same place of every rank's heap
    output = dist.group.WORLD.heap_on(device).empty(world * args.size, dtype=torch.uint8)
else:
    output = torch.empty(world * args.size, dtype=torch.uint8, device=device)

us = microseconds()
other_us = microseconds(dist.new_group(backend=args.against)) if args.against else None

if rank == 0:
    received = (world - 1) * args.size
    print(f"{world} ranks, {args.size} bytes from each: {us:.1f} us a call, {received / us / 1e3:.3f} GB/s a rank")
    if other_us:
        print(f"{args.against}: {other_us:.1f} us a call")
    print(iris_pg.explain())
if "TORCHELASTIC_RUN_ID" not in os.environ:
    print("hint: start it with torchrun")
dist.destroy_process_group()
