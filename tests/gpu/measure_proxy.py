"""What a put costs that a kernel asks for: through the proxy, and by the kernel itself.

    torchrun --nproc-per-node 2 tests/gpu/measure_proxy.py

Rank 0 puts to rank 1, on another GPU where there is one. A time is that of one kernel by its GPU's clock, from before
the put until it has landed (``quiet``), or until the kernel's own stores are out; the median of several.
"""

import os

import torch
import triton
import triton.language as tl

from iris_pg import Iris, atomic_add, iris, put, quiet
from iris_pg.device import sdma
from iris_pg.device.target import clock_ns, gather_stores

REPEATS = 20


@triton.jit
def by_proxy(took, ctx, peer, dst, src, nbytes, repeats):
    """Put through the copy engine, again and again; note how long each took."""
    for k in range(repeats):
        began = clock_ns()
        sdma.copy_linear(ctx, peer, dst, src, nbytes)
        sdma.quiet(ctx, peer)
        tl.store(took + k, clock_ns() - began)


@triton.jit
def by_proxy_signal(took, ctx, flag, peer, bases, rank, repeats):
    """The same for an atomic addition."""
    for k in range(repeats):
        began = clock_ns()
        atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=ctx, use_copy_engine=True)
        quiet(peer, ctx)
        tl.store(took + k, clock_ns() - began)


@triton.jit
def by_kernel(took, source, inbox, peer, bases, rank, nbytes, repeats, BLOCK: tl.constexpr):
    """The same by loads and stores of one CTA."""
    i = tl.arange(0, BLOCK)
    for k in range(repeats):
        began = clock_ns()
        for start in range(0, nbytes // 16, BLOCK):
            lane = (start + i[:, None]) * 2 + tl.arange(0, 2)[None, :]
            mask = (start + i[:, None] < nbytes // 16) & (lane >= 0)
            put(source + lane, inbox + lane, rank, peer, bases, mask=mask)
        gather_stores()
        tl.store(took + k, clock_ns() - began)


def median(took: torch.Tensor) -> float:
    """Return the median in microseconds, without the first two."""
    return took[2:].double().median().item() / 1e3


def run(ctx: Iris) -> None:
    """Measure on rank 0."""
    rank, peer, bases, engine = ctx.cur_rank, ctx.num_ranks - 1, ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
    most = 256 << 20
    source, inbox = ctx.zeros(most // 8, dtype=torch.int64), ctx.zeros(most // 8, dtype=torch.int64)
    flag = ctx.zeros(1, dtype=torch.int32)
    took = torch.zeros(REPEATS, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    ctx.barrier()
    if rank == 0:
        by_proxy_signal[(1,)](took, engine, flag, peer, bases, rank, REPEATS)
        torch.cuda.synchronize()
        print(f"signal by the proxy: {median(took):.1f} us", flush=True)
        print("bytes, us by the proxy (GB/s), us by one CTA", flush=True)
        dst = ctx.heap.translate(inbox.data_ptr(), rank, peer)
        for nbytes in (8, 4096, 65536, 1 << 20, 16 << 20, 256 << 20):
            by_proxy[(1,)](took, engine, peer, dst, source.data_ptr(), nbytes, REPEATS)
            torch.cuda.synchronize()
            proxy = median(took)
            told = f"{nbytes:>10}  {proxy:10.1f} ({nbytes / proxy / 1e3:7.2f})"
            if nbytes <= 16 << 20:
                by_kernel[(1,)](took, source, inbox, peer, bases, rank, nbytes, REPEATS, BLOCK=1024, num_warps=8)
                torch.cuda.synchronize()
                told += f"  {median(took):10.1f}"
            print(told, flush=True)
    ctx.barrier()


def main() -> None:
    """Run one rank."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    with iris(heap_size=640 << 20, engines=("sdma",), device="cuda") as ctx:
        run(ctx)


if __name__ == "__main__":
    main()
