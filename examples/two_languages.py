"""One kernel in Triton and in Gluon: they differ in the decorator, in how the context is made, and in the layout.

    torchrun --nproc-per-node 2 examples/two_languages.py

Each program puts its part of a tensor to the next rank through the copy engine, adds 1 to a flag there behind it, and
waits until it has landed. Gluon has no interpreter, so on a machine without a GPU only the Triton kernel runs.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_pg import DeviceContext, Iris, iris
from iris_pg.device.gluon import DeviceContext as GluonContext

ON_GPU = torch.cuda.is_available()
PROGRAMS, BLOCK = 4, 256


@triton.jit
def pass_on(context, engine, source, inbox, flag, rank: tl.constexpr, world: tl.constexpr, BLOCK: tl.constexpr):
    """Put a part of the source to the next rank; Triton."""
    ctx = DeviceContext.initialize(context, rank, world)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    peer = (rank + 1) % world
    ctx.put(source + i, inbox + i, peer, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(flag, 1, peer, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.quiet(peer, engine)


@gluon.jit
def pass_on_gluon(context, engine, source, inbox, flag, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """Put a part of the source to the next rank; Gluon."""
    ctx = GluonContext.initialize(context)
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    ctx.put(source + i, inbox + i, peer, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(flag, 1, peer, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.quiet(peer, engine)


def part_of(rank: int, language: str) -> torch.Tensor:
    """Return what a rank sends."""
    return torch.arange(PROGRAMS * BLOCK) * (rank + 1) + len(language)


def run(ctx: Iris, language: str) -> None:
    """Pass everything on once, and check it."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    source = ctx.zeros(PROGRAMS * BLOCK, dtype=torch.int64).copy_(part_of(rank, language))
    inbox, flag = ctx.zeros(PROGRAMS * BLOCK, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
    arguments = (ctx.get_device_context(), ctx.get_copy_engine_ctx(), source, inbox, flag)
    if language == "Triton":
        pass_on[(PROGRAMS,)](*arguments, rank=rank, world=world, BLOCK=BLOCK)
    else:
        layout = gl.BlockedLayout([1], [64 if torch.version.hip else 32], [4], [0])
        pass_on_gluon[(PROGRAMS,)](*arguments, BLOCK=BLOCK, LAYOUT=layout)
    if ON_GPU:
        torch.cuda.synchronize()
    ctx.barrier()
    assert torch.equal(inbox.cpu(), part_of((rank - 1) % world, language)), f"{language}: rank {rank} got other bytes"
    assert flag.item() == PROGRAMS
    if rank == 0:
        print(f"{language}: {inbox.nbytes} bytes passed on by {PROGRAMS} programs", flush=True)


def main() -> None:
    """Run one rank."""
    if ON_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    with iris(heap_size=16 << 20, engines=("sdma",), device="cuda" if ON_GPU else "cpu") as ctx:
        for language in ("Triton", "Gluon") if ON_GPU else ("Triton",):
            run(ctx, language)
        if ctx.cur_rank == 0:
            print("ok", flush=True)


if __name__ == "__main__":
    main()
