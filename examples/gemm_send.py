"""A matrix product whose rows are sent while it still computes: the copy engine puts a batch of rows to all peers as
soon as its last tile is written.

    torchrun --nproc-per-node 2 examples/gemm_send.py [size]

Rank r computes rows r * M / W ... of C = A B, and every rank ends with all of C. Sequential: compute, then put
everything. Overlapped: a triggered plan is armed with a transfer for each batch and peer, and the kernel publishes
the batches. On a machine without a GPU the kernel runs in Triton's interpreter.
"""

import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

from iris_pg import Iris, iris
from iris_pg.device import triggered
from iris_pg.triggered import Send

ON_GPU = torch.cuda.is_available()
BLOCK, ROUNDS, BATCHES = (128 if ON_GPU else 16), 5, 8


@triton.jit
def multiply(a, b, c, plan, epoch, M, N, K, batch_rows, PUBLISH: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one tile of c [M, N] = a [M, K] b [K, N]; say so when PUBLISH. A batch is ``batch_rows`` rows of c."""
    row, column = tl.program_id(0) // (N // BLOCK), tl.program_id(0) % (N // BLOCK)
    rows, columns = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + rows[:, None] * K + k + depth[None, :])
        total += tl.dot(left, tl.load(b + (k + depth[:, None]) * N + columns[None, :]))
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))
    if PUBLISH:
        triggered.publish(plan, row * BLOCK // batch_rows, (batch_rows // BLOCK) * (N // BLOCK), epoch)


def run(ctx: Iris, size: int) -> None:
    """Compute and send in both ways, check, and print the times."""
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.heap.device
    dtype = torch.float16 if ON_GPU else torch.float32
    mine = size // world
    generator = torch.Generator().manual_seed(1)
    whole_a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    a = whole_a[rank * mine : (rank + 1) * mine].contiguous()
    c = ctx.zeros(size, size, dtype=dtype)
    part, grid = c[rank * mine : (rank + 1) * mine], ((mine // BLOCK) * (size // BLOCK),)
    peers = [(rank + hop) % world for hop in range(1, world)]
    batch = max(mine // BATCHES // BLOCK, 1) * BLOCK  # rows
    batches = [part[i : i + batch] for i in range(0, mine, batch)]
    plan = ctx.triggered([[Send(rows, peer) for peer in peers] for rows in batches])

    def wait_for_gpu() -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    def sequential() -> None:
        multiply[grid](a, b, part, plan.device, 0, mine, size, size, batch, PUBLISH=False, BLOCK=BLOCK)
        wait_for_gpu()
        for peer in peers:
            ctx.put(part, peer, async_op=True)
        ctx.quiet()
        ctx.barrier()  # peers have put theirs

    def overlapped() -> None:
        epoch = plan.arm()
        multiply[grid](a, b, part, plan.device, epoch, mine, size, size, batch, PUBLISH=True, BLOCK=BLOCK)
        plan.wait()
        wait_for_gpu()
        ctx.barrier()

    expected = whole_a.float() @ b.float()
    for name, work in (("sequential", sequential), ("overlapped", overlapped)):
        times = []
        for _ in range(ROUNDS):
            c.zero_()
            wait_for_gpu()
            ctx.barrier()
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
            error = ((c.float() - expected).norm() / expected.norm()).item()
            assert error < 1e-2, f"{name} on rank {rank}: off by {error}"
            ctx.barrier()
        if rank == 0:
            print(f"{name}: {min(times) * 1e3:.2f} ms", flush=True)
    plan.close()


def main() -> None:
    """Run one rank."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else (4096 if ON_GPU else 64)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    heap_size = max(4 * size * size, 1 << 20) + (16 << 20)
    with iris(heap_size=heap_size, engines=("sdma",), device="cuda" if ON_GPU else "cpu") as ctx:
        run(ctx, size)
        if ctx.cur_rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
