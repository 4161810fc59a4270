"""An all-gather and a matrix product that starts on rows as they arrive.

    torchrun --nproc-per-node 2 examples/gather_gemm.py [size]

Rank r has rows r * M / W ... of A, and computes A B for all of A. Sequential: gather A, then multiply. Overlapped: copy
engines bring the rows of A in batches (a triggered plan), and each tile waits only for the batch that it reads, own
rows first. On a machine without a GPU the kernel runs in Triton's interpreter.
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
def multiply(
    a, b, c, plan, engine, epoch, rank, world, mine, N, K, batch_rows, AWAIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one tile of c = a b, a [world * mine, K] and b [K, N]; await the rows of a that it reads when AWAIT."""
    of_rank = (mine // BLOCK) * (N // BLOCK)  # tiles that read the rows of one rank
    owner = (rank + tl.program_id(0) // of_rank) % world  # this rank's first, then as they come
    tile = tl.program_id(0) % of_rank
    row, column = tile // (N // BLOCK), tile % (N // BLOCK)
    if AWAIT:
        if owner != rank:
            triggered.await_batch(plan, engine, row * BLOCK // batch_rows, owner, epoch)
    rows, columns = owner * mine + row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, K, BLOCK):
        left = tl.load(a + rows[:, None] * K + k + depth[None, :])
        total += tl.dot(left, tl.load(b + (k + depth[:, None]) * N + columns[None, :]))
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))


def run(ctx: Iris, size: int) -> None:
    """Gather and compute in both ways, check, and print the times."""
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.heap.device
    dtype = torch.float16 if ON_GPU else torch.float32
    mine = size // world
    generator = torch.Generator().manual_seed(1)
    whole_a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    a, c = ctx.zeros(size, size, dtype=dtype), torch.empty(size, size, dtype=dtype, device=device)
    part = a[rank * mine : (rank + 1) * mine]
    peers = [(rank + hop) % world for hop in range(1, world)]
    batch = max(mine // BATCHES // BLOCK, 1) * BLOCK  # rows
    batches = [part[i : i + batch] for i in range(0, mine, batch)]
    plan = ctx.triggered([[Send(rows, peer) for peer in peers] for rows in batches])
    engine, grid = ctx.get_copy_engine_ctx(), ((size // BLOCK) ** 2,)

    def wait_for_gpu() -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    def compute(epoch: int, awaits: bool) -> None:
        sizes = (rank, world, mine, size, size, batch)
        multiply[grid](a, b, c, plan.device, engine, epoch, *sizes, AWAIT=awaits, BLOCK=BLOCK)
        wait_for_gpu()

    def sequential() -> None:
        for peer in peers:
            ctx.put(part, peer, async_op=True)
        ctx.quiet()
        ctx.barrier()
        compute(0, awaits=False)

    def overlapped() -> None:
        epoch = plan.arm()
        for number in range(len(batches)):
            plan.publish(number)
        compute(epoch, awaits=True)
        plan.wait()

    expected = whole_a.float() @ b.float()
    for name, work in (("sequential", sequential), ("overlapped", overlapped)):
        times = []
        for _ in range(ROUNDS):
            a.zero_()
            part.copy_(whole_a[rank * mine : (rank + 1) * mine])
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
