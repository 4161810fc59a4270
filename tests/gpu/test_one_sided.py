"""Puts between heaps on GPUs: every form of them, their order, what waits, and what fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import time

import pytest
import torch
from device_data import use_device

from iris_pg.collective_api import Config
from iris_pg.context import iris
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
N = 517
KINDS = ["plain", "signal", "wait", "both"]
FORMS = list(itertools.product(KINDS, [torch.int32, torch.int64], [False, True], [0, 1], [False, True]))
CYCLES = 20_000_000  # of the GPU's clock: about 10 ms


def context(rank, heap_size=64 << 20):
    return iris(heap_size=heap_size, engines=("sdma",), device=use_device(rank))


def data(rank, iteration, numel):
    return torch.arange(numel, device="cuda") * 8191 + rank * 1_000_003 + iteration * 31


def puts_in_every_form(rank, world):
    with context(rank) as ctx:
        source, inbox = ctx.empty(N, dtype=torch.int64), ctx.zeros(len(FORMS), N, dtype=torch.int64)
        nothing = source[:0]
        for i, (kind, dtype, async_op, channel, to_self) in enumerate(FORMS):
            to, sender = (rank, rank) if to_self else ((rank + 1) % world, (rank - 1) % world)
            go, arrived = ctx.zeros(3, dtype=dtype), ctx.full((3,), 7, dtype=dtype)
            source.copy_(data(rank, i, N))
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
            assert torch.equal(inbox[i], data(sender, i, N)), f"{FORMS[i]} from rank {sender}"
            assert arrived.tolist() == [7, 7 + (i + 1) * ("signal_flag" in keywords), 7], FORMS[i]
            ctx.barrier()
        assert ctx.get_copy_engine_ctx().shape == (world, 6)


def puts_tiles(rank, world):
    with context(rank) as ctx:
        a, b = ctx.empty(40, 30, dtype=torch.int64), ctx.zeros(40, 30, dtype=torch.int64)
        arrived = ctx.zeros(1, dtype=torch.int32)
        places = [(0, 0, 5, 7), (5, 0, 1, 30), (6, 3, 20, 1), (26, 11, 14, 19), (30, 0, 0, 4), (6, 5, 19, 24)]
        expected = torch.zeros(40, 30, dtype=torch.int64, device="cuda")
        to = (rank + 1) % world
        for i, at_once in enumerate((False, True)):
            a.copy_(data(rank, i, 1200).view(40, 30))
            theirs = data((rank - 1) % world, i, 1200).view(40, 30)
            for r, c, height, width in places:
                expected[r : r + height, c : c + width] = theirs[r : r + height, c : c + width]
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
            ctx.put(a[:0], rank, wait_flag=arrived, wait_value=6 * (i + 1), channel=3)
            assert torch.equal(b, expected), at_once
            ctx.quiet()
            ctx.barrier()


def a_put_follows_the_current_stream(rank, world):
    """What a stream is still to write is put, and the next kernel after a put does not change what arrives."""
    with context(rank) as ctx:
        source, inbox = ctx.zeros(1 << 20, dtype=torch.int64), ctx.zeros(1 << 20, dtype=torch.int64)
        arrived = ctx.zeros(1, dtype=torch.int64)
        to, sender = (rank + 1) % world, (rank - 1) % world
        for i in range(8):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(CYCLES)
                source.copy_(data(rank, i, 1 << 20))
                ctx.put(source, to, inbox, signal_flag=arrived, async_op=i % 2 == 0)
                ctx.quiet(to)
                source.fill_(-1)
            ctx.put(source[:0], rank, wait_flag=arrived, wait_value=i + 1, channel=4)
            assert torch.equal(inbox, data(sender, i, 1 << 20)), i
            ctx.barrier()


def all_ranks_add_to_one_flag(rank, world, rounds):
    with context(rank) as ctx:
        for dtype in (torch.int32, torch.int64):
            flag = ctx.zeros(1, dtype=dtype)
            for i in range(rounds):
                ctx.put(flag[:0], i % world, signal_flag=flag, signal_value=rank + 1, async_op=True, channel=i % 3)
            for channel in range(3):
                ctx.quiet(channel=channel)
            ctx.barrier()
            each = sum(range(1, world + 1))
            assert flag.item() == each * len(range(rank, rounds, world)), dtype


def large_puts_arrive(rank, world):
    with context(rank, 1 << 30) as ctx:
        n = (96 << 20) + 3
        source, inbox = ctx.empty(n, dtype=torch.int32), ctx.empty(n, dtype=torch.int32)
        source.copy_((torch.arange(n, device="cuda") * 7 + rank).int())
        ctx.put(source, (rank + 1) % world, inbox)
        ctx.barrier()
        assert torch.equal(inbox, (torch.arange(n, device="cuda") * 7 + (rank - 1) % world).int())
        ctx.barrier()


def a_wait_in_vain_ends(rank, world):
    os.environ["IRIS_PG_TIMEOUT"] = "1"
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, "IRIS_PG_TIMEOUT")
        ctx = stack.enter_context(context(rank))
        source, inbox = ctx.ones(8, dtype=torch.int32), ctx.zeros(8, dtype=torch.int32)
        flag = ctx.full((1,), 3, dtype=torch.int32)
        to = (rank + 1) % world
        start = time.monotonic()
        ctx.put(source, to, inbox, wait_flag=flag, wait_value=2**32 - 1, async_op=True)  # unsigned
        ctx.put(source, to, inbox, async_op=True)  # behind it
        with pytest.raises(
            DeadlineError, match=r"waits for a flag of rank ., at byte .*: it has been 3, and not >= 429"
        ):
            ctx.quiet()
        assert 0.9 < time.monotonic() - start < 4
        with pytest.raises(ClosedError, match="has failed before and takes nothing more"):
            ctx.put(source, to, inbox)
        ctx.barrier()
        assert not inbox.any(), "nothing moves after a wait in vain"
        ctx.barrier()  # and no rank goes on before the others have looked
        ctx.put(source, to, inbox, channel=1)
        ctx.barrier()
        assert inbox.all()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="while a graph is captured"):
            with torch.cuda.graph(graph):
                ctx.put(source, to, inbox, channel=1)
        with pytest.raises(ArgumentError, match="channel=8; it takes 0..7"):
            ctx.put(source, to, inbox, channel=8)
        with pytest.raises(UnsupportedError, match="from_tensor is on cpu; the context's heap is on cuda"):
            ctx.put(torch.ones(3), to)
        ctx.barrier()


def collects(rank, world):
    """ctx.ccl on tensors of the context's heap and others, with both engines."""
    device = use_device(rank)
    with iris(heap_size=64 << 20) as ctx:
        assert ctx.heap.device == device  # the current GPU, where there is one
        for i, engine in enumerate(("sdma", "cu", "auto")):
            config = Config(engine=engine, comm_sms=8)
            for numel in (5, 40_000):
                mine = (torch.arange(numel, device=device) * 7 + 31 * rank + i) % 13
                every = [(torch.arange(numel, device=device) * 7 + 31 * p + i) % 13 for p in range(world)]
                for new in (ctx.empty, lambda *size, dtype: torch.empty(*size, dtype=dtype, device=device)):
                    out = new(world * numel, dtype=mine.dtype)
                    ctx.ccl.all_gather(out, mine, config=config)
                    assert torch.equal(out, torch.cat(every)), (engine, numel)
                    out = new(numel, dtype=mine.dtype)
                    ctx.ccl.all_reduce(out, mine, config=config)
                    assert torch.equal(out, sum(every)), (engine, numel)
                    ctx.ccl.broadcast(out, mine, src=world - 1, config=config)
                    assert torch.equal(out, every[-1]), (engine, numel)
                    wide = torch.cat([mine + p for p in range(world)])
                    ctx.ccl.reduce_scatter(out, wide, config=config)
                    assert torch.equal(out, sum(every) + world * rank), (engine, numel)
        with pytest.raises(ArgumentError, match="a tensor on cpu|on one device"):
            ctx.ccl.all_reduce(torch.ones(3), torch.ones(3), config=config)
        ctx.barrier()


@pytest.mark.parametrize("world", [1, 2])
def test_collectives_of_a_context(ranks, world):
    ranks(world).run(collects, timeout_s=80)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("function", [puts_in_every_form, puts_tiles], ids=lambda f: f.__name__)
def test_puts(ranks, function, world):
    ranks(world).run(function, timeout_s=90)


@pytest.mark.parametrize(
    "function", [a_put_follows_the_current_stream, large_puts_arrive, a_wait_in_vain_ends], ids=lambda f: f.__name__
)
def test_puts_of_two_ranks(ranks, function):
    ranks(2).run(function, timeout_s=60)


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_add_to_one_flag(ranks, world):
    ranks(world).run(all_ranks_add_to_one_flag, 60, timeout_s=60)
