"""A matrix product whose rows are sent while it still computes: the copy engine puts a batch of rows to all peers as
soon as its last tile is written.

    torchrun --nproc-per-node 2 examples/gemm_send.py [size [depth]]

Rank r computes rows r * M / W ... of C [M, M] = A [M, K] B [K, M], and every rank ends with all of C. Sequential:
compute, then an all-gather by the copy engine on the same stream. Overlapped: the kernel publishes batches of rows, for
each of which a triggered plan has a transfer to each peer; the host arms the plan while the kernel begins. A time is
that of one of ten epochs in a row, with all that they take. On a machine without a GPU the kernel runs in Triton's
interpreter.
"""

import contextlib
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
from iris_pg.triggered import Send

ON_GPU = torch.cuda.is_available()
TILE = (128, 256, 64) if ON_GPU else (16, 16, 16)  # of C, rows and columns; and how deep one step is
OPTIONS = dict(num_warps=8, num_stages=2 if torch.version.hip else 4) if ON_GPU else {}
BATCHES = 8
ROUNDS, EPOCHS = (5, 10) if ON_GPU else (1, 2)


@triton.jit
def multiply(
    a,
    b,
    c,
    plan,
    epoch,
    N,
    K,
    batch_rows,
    PUBLISH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute one tile of c [M, N] = a [M, K] b [K, N]; say so when PUBLISH. The tiles of a batch, which is
    ``batch_rows`` rows of c, come one after another.
    """
    down = batch_rows // TILE_M
    in_batch = down * (N // TILE_N)
    batch, tile = tl.program_id(0) // in_batch, tl.program_id(0) % in_batch
    rows = batch * batch_rows + (tile % down) * TILE_M + tl.arange(0, TILE_M)
    columns = (tile // down) * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, TILE_K)
    left, right = a + rows[:, None] * K + depth[None, :], b + depth[:, None] * N + columns[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for _ in range(0, K, TILE_K):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += TILE_K
        right += TILE_K * N
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))
    if PUBLISH:
        triggered.publish(plan, batch, in_batch, epoch)


def run(ctx: Iris, size: int, depth: int) -> None:
    """Compute and send in both ways, check, and print the times."""
    rank, world, device = ctx.cur_rank, ctx.num_ranks, ctx.heap.device
    dtype = torch.float16 if ON_GPU else torch.float32
    mine = size // world
    if mine % TILE[0] or size % TILE[1] or depth % TILE[2]:
        raise SystemExit(f"size {size}: a multiple of {world} * {TILE[0]} and {TILE[1]}, depth {depth} of {TILE[2]}")
    generator = torch.Generator(device).manual_seed(1)
    whole_a = torch.randn(size, depth, generator=generator, device=device).to(dtype)
    b = torch.randn(depth, size, generator=generator, device=device).to(dtype)
    a = [sign * whole_a[rank * mine : (rank + 1) * mine] for sign in (1, -1)]  # of even epochs, and of odd ones
    c = ctx.zeros(size, size, dtype=dtype)
    part, tiles = c[rank * mine : (rank + 1) * mine], mine // TILE[0]
    batch = mine // max(n for n in range(1, BATCHES + 1) if tiles % n == 0)  # rows
    peers = [(rank + hop) % world for hop in range(1, world)]
    plan = ctx.triggered([[Send(rows, peer) for peer in peers] for rows in part.split(batch)])
    grid = (tiles * (size // TILE[1]),)
    beside = torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext()
    config = Config(engine="sdma")

    def compute(epoch: int, publishes: bool) -> None:
        arguments = (a[epoch % 2], b, part, plan.device, epoch, size, depth, batch)
        multiply[grid](*arguments, publishes, *TILE, **OPTIONS)

    def wait_for_gpu() -> None:
        if ON_GPU:
            torch.cuda.synchronize()

    def alone(epoch: int) -> None:
        compute(epoch, publishes=False)
        wait_for_gpu()

    def send(epoch: int) -> None:
        ctx.ccl.all_gather(c, part, config=config)
        wait_for_gpu()

    def sequential(epoch: int) -> None:
        compute(epoch, publishes=False)
        send(epoch)

    def overlapped(epoch: int) -> None:
        # What is published before it is armed goes when it is armed. A transfer follows what the current stream was
        # told before, so the kernel, which it must not follow, is on another stream.
        compute(plan.epoch + 1, publishes=True)
        start = time.perf_counter()
        with beside:
            plan.arm()
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
    for work in (alone, send, sequential, overlapped):
        if work in (sequential, overlapped):
            for epoch in (1, 2):
                c.zero_()
                wait_for_gpu()
                ctx.barrier()
                work(epoch)
                sign = 1 if (plan.epoch if work is overlapped else epoch) % 2 == 0 else -1
                error = ((sign * c.float() - expected).norm() / expected.norm()).item()
                assert error < 1e-2, f"{work.__name__} on rank {rank}, epoch {epoch}: off by {error}"
                ctx.barrier()
        times[work.__name__] = seconds(work)
    if rank == 0:
        flops = 2 * mine * size * depth / times["alone"] / 1e12
        print(f"multiply alone: {times['alone'] * 1e3:.3f} ms, {flops:.0f} TFLOP/s")
        print(f"send alone: {times['send'] * 1e3:.3f} ms")
        for name in ("sequential", "overlapped"):
            print(f"{name}: {times[name] * 1e3:.3f} ms", flush=True)
        print(f"arming, while it computes: {statistics.median(arming) * 1e3:.3f} ms", flush=True)
    ctx.barrier()
    plan.close()


def main() -> None:
    """Run one rank."""
    size, depth = ([int(argument) for argument in sys.argv[1:]] * 2 or [4096 if ON_GPU else 64] * 2)[:2]
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    heap_size = max(4 * size * size, 1 << 20) + (16 << 20)
    with iris(heap_size=heap_size, engines=("sdma",), device="cuda" if ON_GPU else "cpu") as ctx:
        run(ctx, size, depth)
        if ctx.cur_rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
