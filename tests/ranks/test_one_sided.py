"""The one-sided context between ranks: every form of put, order, threads, deadlines, dead ranks, and how ranks meet."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def environment(**variables):
    """Set environment variables, and put everything back as it was."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def context(heap_size=32 << 20, engines=("sdma",)):
    from iris_pg.context import iris

    return iris(heap_size=heap_size, engines=engines, device="cpu")


def data(rank, iteration, numel):
    """int64 [numel] that depends on rank, iteration and position."""
    return torch.arange(numel) * 8191 + rank * 1_000_003 + iteration * 31


# Put ------------------------------------------------------------------------------------------------------------------

KINDS = ["plain", "signal", "wait", "both"]
FORMS = list(itertools.product(KINDS, [torch.int32, torch.int64], [False, True], [0, 1], [False, True]))


def puts_in_every_form(rank, world):
    numel = 517
    with context() as ctx:
        source, inbox = ctx.empty(numel, dtype=torch.int64), ctx.zeros(len(FORMS), numel, dtype=torch.int64)
        nothing = source[:0]
        for i, (kind, dtype, async_op, channel, to_self) in enumerate(FORMS):
            to, sender = (rank, rank) if to_self else ((rank + 1) % world, (rank - 1) % world)
            go, arrived = ctx.zeros(3, dtype=dtype), ctx.full((3,), 7, dtype=dtype)
            source.copy_(data(rank, i, numel))
            keywords = dict(async_op=async_op, channel=channel)
            if kind in ("wait", "both"):
                keywords |= dict(wait_flag=go[1], wait_value=5)
            if kind in ("signal", "both"):
                keywords |= dict(signal_flag=arrived[1], signal_value=i + 1)
            if "wait_flag" in keywords and not async_op:  # whoever is put to says go beforehand
                ctx.put(nothing, sender, signal_flag=go[1], signal_value=5)
            ctx.put(source, to, inbox[i], **keywords)
            if "wait_flag" in keywords and async_op:
                ctx.barrier()
                assert not inbox[i].any() and arrived.tolist() == [7, 7, 7], f"{FORMS[i]}: it did not wait"
                ctx.barrier()
                ctx.put(nothing, sender, signal_flag=go[1], signal_value=6, channel=2)
            ctx.quiet(to, channel) if i % 2 else ctx.quiet(channel=channel)
            ctx.barrier()
            assert torch.equal(inbox[i], data(sender, i, numel)), f"{FORMS[i]} from rank {sender}"
            assert arrived.tolist() == [7, 7 + (i + 1) * ("signal_flag" in keywords), 7], FORMS[i]
        for i in range(len(FORMS)):  # and nothing has touched what was there
            sender = rank if FORMS[i][-1] else (rank - 1) % world
            assert torch.equal(inbox[i], data(sender, i, numel))


@pytest.mark.parametrize("world", [2, 3])
def test_put_in_every_form(ranks, world):
    ranks(world).run(puts_in_every_form)


def puts_tiles(rank, world):
    """Tiles of odd sizes, at odd places, of one rank's matrix into another's, then several at once and an empty one."""
    with context() as ctx:
        a, b = ctx.empty(40, 30, dtype=torch.int64), ctx.zeros(40, 30, dtype=torch.int64)
        arrived = ctx.zeros(1, dtype=torch.int32)
        places = [(0, 0, 5, 7), (5, 0, 1, 30), (6, 3, 20, 1), (26, 11, 14, 19), (30, 0, 0, 4), (6, 5, 19, 24)]
        expected = torch.zeros(40, 30, dtype=torch.int64)
        for i, at_once in enumerate((False, True)):
            a.copy_(data(rank, i, 1200).view(40, 30))
            theirs = data((rank - 1) % world, i, 1200).view(40, 30)
            for r, c, height, width in places:
                expected[r : r + height, c : c + width] = theirs[r : r + height, c : c + width]
            to = (rank + 1) % world
            src = [a.data_ptr() + 8 * (30 * r + c) for r, c, *_ in places]
            shift = ctx.heap.translate(b.data_ptr(), rank, to) - a.data_ptr()
            dst = [address + shift for address in src]
            flag = ctx.heap.translate(arrived.data_ptr(), rank, to)
            if at_once:
                heights, widths = [p[2] for p in places], [p[3] for p in places]
                pitches = [30] * len(places)
                ctx.put_tiles(src, to, dst, 8, heights, widths, pitches, pitches, signal_flag=flag, signal_value=6)
            else:
                for s, d, place in zip(src, dst, places, strict=True):
                    ctx.put_tile(s, to, d, 8, *place[2:], 30, 30, signal_flag=flag, async_op=True)
            # Whoever is put to waits with a put of nothing.
            ctx.put(a[:0], rank, wait_flag=arrived, wait_value=6 * (i + 1), channel=3)
            assert torch.equal(b, expected)
            ctx.quiet()
            ctx.barrier()
        with pytest.raises(ValueError, match="put_tile: .*not all in to_rank's heap"):
            ctx.put_tile(a.data_ptr(), to, b.data_ptr(), 8, 1, 1, 0, 0)


def test_tiles(ranks):
    ranks(3).run(puts_tiles)


def signals_after_copies(rank, world, nbytes):
    with context() as ctx:
        source, inbox = ctx.empty(nbytes // 8, dtype=torch.int64), ctx.zeros(nbytes // 8, dtype=torch.int64)
        ready, taken = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
        to, sender = (rank + 1) % world, (rank - 1) % world
        for i in range(1, 61):
            source.copy_(data(rank, i, source.numel()))
            ctx.put(source, to, inbox, taken, i - 1, ready, async_op=True)
            while ready.item() < i:
                time.sleep(0)
            assert torch.equal(inbox, data(sender, i, inbox.numel())), (
                f"round {i}: the signal was there before its copy"
            )
            ctx.put(source[:0], sender, signal_flag=taken, channel=1)
            ctx.quiet()


def signals_under_a_seed(rank, world, variables):
    with environment(**variables):
        for nbytes in (64, 48 << 10):
            signals_after_copies(rank, world, nbytes)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_signal_is_never_seen_before_its_copy(ranks, seed):
    ranks(2).run(signals_under_a_seed, {} if seed is None else {"IRIS_PG_HOSTILE_SEED": str(seed)})


# Threads --------------------------------------------------------------------------------------------------------------


def four_threads_put_and_wait(rank, world):
    n_threads, rounds, n_tiles = (
        4,
        12,
        1500,
    )  # 120 KB of packets a round and thread: the 1 MiB ring goes round, and is full
    with context() as ctx:
        source = ctx.empty(n_threads, n_tiles, dtype=torch.int32)
        inbox = ctx.zeros(n_threads, n_tiles, dtype=torch.int32)
        arrived = ctx.zeros(n_threads, dtype=torch.int32)
        to, failures = (rank + 1) % world, []
        there = ctx.heap.translate(inbox.data_ptr(), rank, to) - inbox.data_ptr()

        def one(k):
            src, dst = source[k].data_ptr(), inbox[k].data_ptr() + there
            ones, zeros = [1] * n_tiles, [0] * n_tiles
            for i in range(rounds):
                source[k].copy_(data(rank, i, n_tiles) + k)
                ctx.put_tiles(
                    [src + 4 * j for j in range(n_tiles)],
                    to,
                    [dst + 4 * j for j in range(n_tiles)],
                    *(4, ones, ones, zeros, zeros),
                    signal_flag=arrived[k].data_ptr() + there,
                    async_op=(i + k) % 3 > 0,
                )
                ctx.quiet(to if k % 2 else None)

        def safely(k):
            try:
                one(k)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=safely, args=(k,)) for k in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        ctx.barrier()
        assert arrived.tolist() == [rounds] * n_threads
        expected = data((rank - 1) % world, rounds - 1, n_tiles)
        for k in range(n_threads):
            assert torch.equal(inbox[k], (expected + k).int())


def test_four_threads_put_and_wait(ranks):
    ranks(2).run(four_threads_put_and_wait)


# What goes wrong ------------------------------------------------------------------------------------------------------


def waits_in_vain(rank, world):
    from iris_pg.errors import ClosedError, DeadlineError

    with context() as ctx:
        t, flag = ctx.zeros(8), ctx.zeros(1, dtype=torch.int32)
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(
                DeadlineError, match=r"(?s)a transfer to rank 1 on channel 0 waits.*rank=0\].*PollRegMem"
            ):
                ctx.put(t, 1, wait_flag=flag, wait_value=1)
            assert 2.9 < time.monotonic() - start < 15
            with pytest.raises(ClosedError, match="the queue to rank 1 on channel 0 has failed before"):
                ctx.put(t, 1)
            ctx.put(t, 0)
            ctx.quiet(0)
        else:
            time.sleep(0.1)


def test_a_wait_in_vain_ends_at_the_groups_timeout(ranks):
    ranks(2).run(waits_in_vain, group_timeout_s=3)


def is_killed(rank, world):
    from iris_pg.errors import DeadlineError, PeerLostError

    with context() as ctx:
        t, flags = ctx.arange(1 << 16), ctx.zeros(2, dtype=torch.int32)
        ctx.barrier()
        if rank == 1:
            ctx.put(t[:0], 0, signal_flag=flags[0])
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.put(t[:0], 0, wait_flag=flags[0], wait_value=1)
        while 1 not in ctx.heap.links.lost():
            time.sleep(0.001)
        for i in range(20):
            t.copy_(data(0, i, t.numel()))
            ctx.put(t, 1, signal_flag=flags[1], async_op=i % 2 > 0)
        ctx.quiet()
        offset = t.data_ptr() - ctx.heap.base
        theirs = ctx.heap.bytes_at(1, offset, t.nbytes).view(torch.int64)
        assert torch.equal(theirs, data(0, 19, t.numel()))
        del theirs
        with pytest.raises(PeerLostError, match="barrier: rank 1 died"):
            ctx.barrier()
        with pytest.raises(DeadlineError, match="rank 1 is gone"):
            ctx.put(t, 0, wait_flag=flags[0], wait_value=2)


def test_the_memory_of_a_killed_rank_stays(mortal_ranks):
    mortal_ranks(2).run(is_killed, may_die=[1], group_timeout_s=3)


# The ranks ------------------------------------------------------------------------------------------------------------


def broadcasts(rank, world):
    from iris_pg.errors import ArgumentError, MismatchError

    with context(engines=()) as ctx:
        large = {"text": "x" * (3 << 20), "tensor": torch.arange(5)}
        got = ctx.broadcast(large if rank == 1 else "ignored", 1)
        assert got["text"] == large["text"] and torch.equal(got["tensor"], large["tensor"])
        heap_tensor = ctx.arange(1000)
        heap_tensor += rank
        got = ctx.broadcast(heap_tensor[10:20], 0)
        assert got.tolist() == list(range(10, 20)) and ctx.heap.is_symmetric(got) == (rank == 0)
        assert ctx.broadcast(None, 2) is None
        with pytest.raises(ArgumentError, match="rank 2's value does not pickle"):
            ctx.broadcast((lambda: 0) if rank == 2 else 0, 2)
        with pytest.raises(MismatchError, match=r"gave src=\[0, 1, 1\]"):
            ctx.broadcast(0, min(rank, 1))


def test_broadcast(ranks):
    ranks(3).run(broadcasts)


def has_several_contexts(rank, world):
    from iris_pg.errors import MismatchError

    default = dist.group.WORLD
    for i in range(3):
        with context() as a, context(engines=()) as b:
            x, y = a.full((4,), rank + i), b.zeros(4)
            a.put(x, (rank + 1) % world, a.zeros(4, dtype=torch.int64))
            with pytest.raises(ValueError, match="not in this rank's heap"):
                a.put(y, 0)
            a.barrier()
            b.barrier()
    assert dist.group.WORLD is default
    with context() as ctx, pytest.raises(MismatchError, match=r"different things \(rank 0: .*24.*; rank 1: .*28"):
        ctx.zeros(6 + rank)


def test_several_contexts_in_one_group(ranks):
    ranks(2).run(has_several_contexts)


def fills_late(rank, world):
    with context() as ctx:
        ctx.heap.free(ctx.ones(64))  # so the next one reuses memory that is not zero

        def fill(t):
            time.sleep(0.2 * rank)
            t.zero_()

        t = ctx._filled("zeros", fill, (64,), torch.float32)
        if rank == 0:
            ctx.put(t.fill_(3), 1)
        ctx.barrier()
        assert t.tolist() == [3.0] * 64


def test_a_slow_factory_does_not_overwrite_what_a_fast_rank_has_put(ranks):
    ranks(2).run(fills_late)


def launched(rank, world, port):
    """What torchrun sets; and a store without libuv, which keeps two descriptors for the life of the process."""
    variables = dict(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, USE_LIBUV=0)
    return {name: str(value) for name, value in variables.items()}


def meets_by_environment(rank, world, port):
    """A context before there is a group, one beside a group made later from the same variables, and one after it."""
    from iris_pg import rendezvous

    with environment(**launched(rank, world, port), IRIS_PG_TIMEOUT="20"):
        try:
            for group in (False, True, False):
                if group:
                    dist.init_process_group("gloo")
                with context() as ctx:
                    assert (ctx.get_rank(), ctx.get_num_ranks()) == (rank, world)
                    t = ctx.full((8,), rank)
                    ctx.put(t, (rank + 1) % world, ctx.zeros(8, dtype=torch.int64))
                    ctx.barrier()
                if group:
                    total = torch.ones(1)
                    dist.all_reduce(total)
                    assert total.item() == world
                    dist.destroy_process_group()
                assert not dist.is_initialized()
        finally:
            rendezvous._from_environment.cache_clear()


def test_the_environment_is_enough(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks(2).run(meets_by_environment, port, init=None)


def comes_alone(rank, world, port):
    from iris_pg import rendezvous
    from iris_pg.errors import DeadlineError

    with environment(**launched(rank, 2, port), IRIS_PG_TIMEOUT="1"):
        try:
            with pytest.raises(DeadlineError, match="not all of 2 ranks came"):
                context()
        finally:
            rendezvous._from_environment.cache_clear()


def test_a_rank_that_does_not_come_is_an_error(ranks):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks(1).run(comes_alone, port, init=None)


@pytest.mark.parametrize("example", ["one_sided_put", "tiles"])
def test_examples(example):
    variables = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "src"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / f"{example}.py")], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and lines[-1] == "ok", done.stdout
