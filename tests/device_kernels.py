"""Kernels that the tests of the device side run, in the interpreter and compiled, and what runs them."""

from __future__ import annotations

import functools
import os
import time

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

import iris_pg as iris
from iris_pg.device import sdma, triggered
from iris_pg.device.context import DeviceContext
from iris_pg.kernels.loader import _mend_interpreter, interpret

FULL = os.environ.get("IRIS_PG_TEST_FULL") == "1"
_mend_interpreter()


def run(kernel, *arguments, **constants):
    """Run a kernel until it has ended: in the interpreter, or compiled where its tensors are on a GPU."""
    if not any(isinstance(argument, torch.Tensor) and argument.is_cuda for argument in arguments):
        return interpret(InterpretedFunction(kernel), *arguments, **constants)
    torch.cuda.set_device(next(a.device for a in arguments if isinstance(a, torch.Tensor) and a.is_cuda))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _compiled(kernel)[(1,)](*arguments, **constants)
    while not stream.query():  # without a call that blocks: other threads of the process launch too
        time.sleep(1e-4)
    return None


@functools.cache
def _compiled(kernel):
    return triton.jit(kernel)


# Memory ---------------------------------------------------------------------------------------------------------------


def moves(source, kept, inbox, fetched, copied, holes, rank, peer, bases, N: tl.constexpr):
    """Move [N] elements in every way, where ``kept`` is not 0."""
    i = tl.arange(0, N)
    mask = tl.load(kept + i) != 0
    iris.put(source + i, inbox + i, rank, peer, bases, mask=mask)
    value = iris.load(source + i, rank, peer, bases, mask=mask)
    tl.store(fetched + i, value, mask=mask)
    iris.store(inbox + N + i, value, rank, peer, bases, mask=mask)
    iris.get(source + i, fetched + N + i, rank, peer, bases, mask=mask)
    iris.get(source + i, fetched + 2 * N + i, peer, rank, bases, mask=mask)
    iris.copy(source + i, copied + i, peer, rank, rank, bases, mask=mask)
    iris.copy(source + i, copied + N + i, rank, peer, rank, bases, mask=mask)
    tl.store(holes, iris.load(source, rank, peer, bases))


def atomics(words, old, rank, peer, bases, val, N: tl.constexpr):
    """Do each atomic on a word [N] of its own at a peer; what was there goes to old [9]."""
    i = tl.arange(0, N)
    value = tl.load(val + i)
    kept = i != 1
    tl.store(old + 0 * N + i, iris.atomic_add(words + 0 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 1 * N + i, iris.atomic_sub(words + 1 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 2 * N + i, iris.atomic_xchg(words + 2 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 3 * N + i, iris.atomic_xor(words + 3 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 4 * N + i, iris.atomic_and(words + 4 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 5 * N + i, iris.atomic_or(words + 5 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 6 * N + i, iris.atomic_min(words + 6 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    tl.store(old + 7 * N + i, iris.atomic_max(words + 7 * N + i, value, rank, peer, bases, mask=kept), mask=kept)
    expected = tl.where(i % 2 == 0, value, value + 1)
    tl.store(old + 8 * N + i, iris.atomic_cas(words + 8 * N + i, expected, value + 7, rank, peer, bases))


def counts(counter, rank, peer, bases, times):
    """Add 1 to a peer's counter, ``times`` times."""
    for _ in range(0, times):
        iris.atomic_add(counter, 1, rank, peer, bases, sem="relaxed")


# The copy engine ------------------------------------------------------------------------------------------------------


def put_1d(source, inbox, kept, rank, peer, bases, ctx, N: tl.constexpr, REVERSED: tl.constexpr):
    """Put [N] elements through the copy engine, from the last to the first when REVERSED."""
    i = tl.arange(0, N)
    if REVERSED:
        i = N - 1 - i
    mask = tl.load(kept + i) != 0
    iris.put(
        *(source + i, inbox + i, rank, peer, bases),
        mask=mask,
        copy_engine_ctx=ctx,
        use_copy_engine=True,
        contiguous_copy=True,
    )


def put_2d(source, inbox, kept, pitch, to_pitch, rank, peer, bases, ctx, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Put a [ROWS, COLUMNS] tile through the copy engine."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    mask = tl.load(kept + r * COLUMNS + c) != 0
    iris.put(
        *(source + r * pitch + c, inbox + r * to_pitch + c, rank, peer, bases),
        mask=mask,
        copy_engine_ctx=ctx,
        from_row_stride=pitch,
        to_row_stride=to_pitch,
        use_copy_engine=True,
        contiguous_copy=True,
        from_base_ptr=source,
        to_base_ptr=inbox,
    )


def put_one(source, inbox, kept, rank, peer, bases, ctx):
    """Put one element through the copy engine."""
    iris.put(
        *(source, inbox, rank, peer, bases),
        mask=tl.load(kept) != 0,
        copy_engine_ctx=ctx,
        use_copy_engine=True,
        contiguous_copy=True,
    )


def signals(flag, value, rank, peer, bases, ctx):
    """Add to a peer's flag through the copy engine."""
    iris.atomic_add(flag, value, rank, peer, bases, copy_engine_ctx=ctx, use_copy_engine=True)


def swaps(word, expected, value, rank, peer, bases, ctx):
    """Compare and swap a peer's word through the copy engine."""
    iris.atomic_cas(word, expected, value, rank, peer, bases, copy_engine_ctx=ctx, use_copy_engine=True)


def waits(peer, ctx, landed):
    """Wait until the queue to a rank has landed."""
    tl.store(landed, iris.quiet(peer, ctx))


def put_and_signal(source, inbox, flag, go, rounds, rank, peer, bases, ctx, N: tl.constexpr):
    """Put [rounds, N] elements to a peer, and add to its flag behind each; the engine waits for the peer's go."""
    i = tl.arange(0, N)
    for k in range(0, rounds):
        sdma.poll(ctx, peer, go.to(tl.int64), k)
        iris.put(
            *(source + k * N + i, inbox + k * N + i, rank, peer, bases),
            copy_engine_ctx=ctx,
            use_copy_engine=True,
            contiguous_copy=True,
        )
        iris.atomic_add(flag, 1, rank, peer, bases, copy_engine_ctx=ctx, use_copy_engine=True)


# Packets --------------------------------------------------------------------------------------------------------------


def packet_copy(ctx, dst, src, nbytes, done):
    """Write the packets of a linear copy."""
    tl.store(done, sdma.copy_linear(ctx, 0, dst, src, nbytes))


def packet_window(ctx, dst, src, rows, width, dst_pitch, src_pitch, done):
    """Write the packet of a window."""
    tl.store(done, sdma.copy_window(ctx, 0, dst, src, rows, width, dst_pitch, src_pitch))


def packet_atomic(ctx, address, operand, compare, done, OP: tl.constexpr, WIDE: tl.constexpr):
    """Write the packet of an atomic."""
    tl.store(done, sdma.atomic(ctx, 0, address, OP, operand, compare, WIDE))


def packet_poll(ctx, address, reference, done):
    """Write the packet of a poll."""
    tl.store(done, sdma.poll(ctx, 0, address, reference))


def packet_fence(ctx, address, value, done):
    """Write the packet of a fence."""
    tl.store(done, sdma.fence(ctx, 0, address, value))


def packet_quiet(ctx, done):
    """Write the packet of a quiet and wait."""
    tl.store(done, sdma.quiet(ctx, 0))


def produce(ctx, row, source, target, flag, first, count, N: tl.constexpr):
    """Copy ``count`` pieces of N bytes, from number ``first`` on, add 1 to the flag behind each, and wait for all."""
    for k in range(0, count):
        at = (first + k) * N
        sdma.copy_linear(ctx, row, target.to(tl.int64) + at, source.to(tl.int64) + at, N)
        sdma.atomic(ctx, row, flag.to(tl.int64), sdma.ADD, 1, 0, True)
        if k % 8 == 7:
            sdma.quiet(ctx, row)


# The context --------------------------------------------------------------------------------------------------------


def through_context(
    context, source, inbox, words, engine, landed, rank: tl.constexpr, world: tl.constexpr, N: tl.constexpr
):
    """What each method of a DeviceContext does, between this rank and the next."""
    ctx = DeviceContext.initialize(context, rank, world)
    i = tl.arange(0, N)
    peer = (ctx.rank + 1) % ctx.world_size
    ctx.put(source + i, inbox + i, peer)
    ctx.store(inbox + N + i, ctx.load(source + i, peer), peer)
    ctx.copy(source + i, inbox + 2 * N + i, rank, peer)
    ctx.get(source + i, inbox + 3 * N + i, peer)
    ctx.put(source + i, inbox + 4 * N + i, peer, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(words + 0, rank + 1, peer)
    ctx.atomic_sub(words + 1, rank + 1, peer)
    ctx.atomic_xchg(words + 2, rank + 1, peer)
    ctx.atomic_xor(words + 3, rank + 1, peer)
    ctx.atomic_and(words + 4, rank + 1, peer)
    ctx.atomic_or(words + 5, rank + 1, peer)
    ctx.atomic_min(words + 6, rank + 1, peer)
    ctx.atomic_max(words + 7, rank + 1, peer)
    ctx.atomic_cas(words + 8, 5, rank + 1, peer)
    ctx.atomic_add(words + 9, rank + 1, peer, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.atomic_cas(words + 10, 5, rank + 1, peer, copy_engine_ctx=engine, use_copy_engine=True)
    tl.store(landed, ctx.quiet(peer, engine))


# Triggered plans ------------------------------------------------------------------------------------------------------


def computes(plan, engine, source, inbox, result, epoch, rank, world, BATCHES: tl.constexpr, N: tl.constexpr):
    """Write batch after batch [N] of the source and publish it; then read what each rank has sent, as it arrives."""
    i = tl.arange(0, N)
    for batch in range(0, BATCHES):
        tl.store(source + batch * N + i, (i + 1000 * batch + 10 * epoch).to(tl.int64) * (rank + 1))
        triggered.publish(plan, batch, 1, epoch)
    for batch in range(0, BATCHES):
        for k in range(1, world):
            peer = (rank + k) % world
            if triggered.await_batch(plan, engine, batch, peer, epoch) != 0:
                at = (peer * BATCHES + batch) * N
                tl.store(result + at + i, tl.load(inbox + at + i, volatile=True))
