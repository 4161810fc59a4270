"""An all-gather and a matrix product that starts on rows as they arrive.

    torchrun --nproc-per-node 2 examples/gather_gemm.py [size [depth]]

Rank r has rows r * M / W ... of A [M, K], and computes A B [K, M] for all of A. Sequential: an all-gather of A by the
copy engine, then the product on the same stream. Overlapped: copy engines bring the rows of A in batches (a triggered
plan), and each tile waits only for the batch that it reads, own rows first; the host arms the plan of the next epoch
while the kernel of this one runs. A time is that of one of ten epochs in a row, with all that they take. On a machine
without a GPU the kernel runs in Triton's interpreter.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl

from iris_pg import Iris, iris
from iris_pg.collective_api import Config
from iris_pg.device import triggered
from iris_pg.triggered import Send, State

ON_GPU = torch.cuda.is_available()
TILE = (128, 256, 64) if ON_GPU else (16, 16, 16)  # of A B, rows and columns; and how deep one step is
OPTIONS = dict(num_warps=8, num_stages=2 if torch.version.hip else 4) if ON_GPU else {}
BATCHES = 8
CHANNELS = (
    (0, 0) if torch.version.hip else (6, 7)
)  # of the two plans; on AMD GPUs there is one, so one is armed at once
ROUNDS, EPOCHS = (5, 10) if ON_GPU else (1, 2)


@triton.jit
def multiply(
    a,
    b,
    c,
    plan,
    engine,
    epoch,
    rank,
    world,
    mine,
    N,
    K,
    batch_rows,
    AWAIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute one tile of c = a b, a [world * mine, K] and b [K, N]; await the rows of a that it reads when AWAIT."""
    down = batch_rows // TILE_M
    in_batch = down * (N // TILE_N)
    batches = mine // batch_rows
    batch, tile = tl.program_id(0) // in_batch, tl.program_id(0) % in_batch
    owner, batch = (rank + batch // batches) % world, batch % batches  # this rank's first, then as they come
    if AWAIT:
        if tl.program_id(0) < batches:  # all that is sent is there already: the first programs let it go
            triggered.publish(plan, tl.program_id(0), 1, epoch)
        if owner != rank:
            triggered.await_batch(plan, engine, batch, owner, epoch)
    rows = owner * mine + batch * batch_rows + (tile % down) * TILE_M + tl.arange(0, TILE_M)
    columns = (tile // down) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    left, right = a + rows[:, None] * K + depth[None, :], b + depth[:, None] * N + columns[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for _ in range(0, K, TILE_K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += TILE_K
        right += TILE_K * N
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))


def run(ctx: Iris, size: int, depth: int) -> None:
    """Gather and compute in both ways, check, and print the times."""
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.heap.device
    dtype = torch.float16 if ON_GPU else torch.float32
    mine = size // world
    if mine % TILE[0] or size % TILE[1] or depth % TILE[2]:
        raise SystemExit(f"size {size}: a multiple of {world} * {TILE[0]} and {TILE[1]}, depth {depth} of {TILE[2]}")
    generator = torch.Generator(device).manual_seed(1)
    whole_a = torch.randn(size, depth, generator=generator, device=device).to(dtype)
    b = torch.randn(depth, size, generator=generator, device=device).to(dtype)
    c, tiles = torch.empty(size, size, dtype=dtype, device=device), mine // TILE[0]
    batch = mine // max(n for n in range(1, BATCHES + 1) if tiles % n == 0)  # rows
    peers = [(rank + hop) % world for hop in range(1, world)]
    # Two A's, of even epochs and of odd ones: a peer that is done with an epoch sends for the next while this rank may
    # still read what it sent before.
    inputs, plans = [ctx.zeros(size, depth, dtype=dtype) for _ in range(2)], []
    parts = [a[rank * mine : (rank + 1) * mine] for a in inputs]
    for part, channel in zip(parts, CHANNELS, strict=True):
        batches = [[Send(rows, peer) for peer in peers] for rows in part.split(batch)]
        plans.append(ctx.triggered(batches, channel=channel))
    engine, grid, config = ctx.get_copy_engine_ctx(), ((size // TILE[0]) * (size // TILE[1]),), Config(engine="sdma")

    def compute(epoch: int, awaits: bool) -> None:
        plan, sizes = plans[epoch % 2], (rank, world, mine, size, depth, batch)
        arguments = (inputs[epoch % 2], b, c, plan.device, engine, plan.epoch, *sizes)
        multiply[grid](*arguments, awaits, *TILE, **OPTIONS)

    def wait_for_gpu() -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    def alone(epoch: int) -> None:
        compute(epoch, awaits=False)
        wait_for_gpu()

    def gather(epoch: int) -> None:
        ctx.ccl.all_gather(inputs[epoch % 2], parts[epoch % 2], config=config)
        wait_for_gpu()

    def sequential(epoch: int) -> None:
        ctx.ccl.all_gather(inputs[epoch % 2], parts[epoch % 2], config=config)
        alone(epoch)

    def overlapped(epoch: int) -> None:
        plan, ahead = plans[epoch % 2], plans[(epoch + 1) % 2]
        if plan.state is State.IDLE:
            plan.arm()
        compute(epoch, awaits=True)
        if CHANNELS[0] != CHANNELS[1]:
            start = time.perf_counter()
            ahead.arm()
            arming.append(time.perf_counter() - start)
        plan.wait()
        wait_for_gpu()

    def seconds(work: Callable[[int], None]) -> float:
        """Return how long an epoch takes, the median of several rounds."""
        took = []
        for _ in range(1 + ROUNDS):
            wait_for_gpu()
            ctx.barrier()
            start = time.perf_counter()
            for epoch in range(EPOCHS):
                work(epoch)
            took.append((time.perf_counter() - start) / EPOCHS)
        return statistics.median(took[1:])

    expected = whole_a.float() @ b.float()
    times, arming = {}, []
    for work in (alone, gather, sequential, overlapped):
        if work in (sequential, overlapped):
            for epoch in range(4):
                sign = 1 if epoch < 2 else -1  # so that what was sent two epochs ago would be seen
                inputs[epoch % 2].zero_()
                parts[epoch % 2].copy_(whole_a[rank * mine : (rank + 1) * mine]).mul_(sign)
                wait_for_gpu()
                ctx.barrier()
                work(epoch)
                error = ((sign * c.float() - expected).norm() / expected.norm()).item()
                assert error < 1e-2, f"{work.__name__} on rank {rank}, epoch {epoch}: off by {error}"
        times[work.__name__] = seconds(work)
    if rank == 0:
        flops = 2 * size * size * depth / times["alone"] / 1e12
        print(f"multiply alone: {times['alone'] * 1e3:.3f} ms, {flops:.0f} TFLOP/s")
        print(f"gather alone: {times['gather'] * 1e3:.3f} ms")
        for name in ("sequential", "overlapped"):
            print(f"{name}: {times[name] * 1e3:.3f} ms", flush=True)
        if arming:
            print(f"arming, while it computes: {statistics.median(arming) * 1e3:.3f} ms", flush=True)
    ctx.barrier()
    for plan in plans:
        plan.close()


def main() -> None:
    """Run one rank."""
    size, depth = ([int(argument) for argument in sys.argv[1:]] * 2 or [4096 if ON_GPU else 64] * 2)[:2]
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    heap_size = max(8 * size * depth, 1 << 20) + (16 << 20)
    with iris(heap_size=heap_size, engines=("sdma",), device="cuda" if ON_GPU else "cpu") as ctx:
        run(ctx, size, depth)
        if ctx.cur_rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
