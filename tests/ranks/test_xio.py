"""Collectives and one-sided transfers through rocm-xio's adapter, both signatures of it, between CPU ranks; a stand-in
for the library writes real packets, and the software copy engine executes them, in hostile mode too.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

SIGNATURES = ("old", "new")
CASES = [(2, "old", None), (2, "new", 1), (4, "new", None), (4, "old", 2), (8, "old", None), (8, "new", 3)]


def data(rank, iteration, numel):
    """int64 [numel] that depends on rank, iteration and position."""
    return torch.arange(numel) * 8191 + rank * 1_000_003 + iteration * 31


# Collectives ----------------------------------------------------------------------------------------------------------

SIZES = [0, 1, 5, 1021, 70_001]
DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]


def gathers(rank, world, signature, seed):
    """All forms: in place or not, in the heap or not, synchronous or not; several dtypes, odd sizes; against Gloo."""
    from xio_ranks import over_xio

    gloo = dist.new_group(backend="gloo")
    forms = list(itertools.product([False, True], repeat=3))
    with over_xio(signature, seed) as fake:
        heap = dist.group.WORLD.transport.heap
        for i, (numel, dtype) in enumerate(itertools.product(SIZES, DTYPES)):
            nbytes = numel * dtype.itemsize
            generator = torch.Generator().manual_seed(1009 * rank + i)
            mine = torch.randint(2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
            expected = torch.empty(world * nbytes, dtype=torch.uint8)
            dist.all_gather_into_tensor(expected, mine, group=gloo)
            in_heap = heap.empty(max(world * nbytes, 1), dtype=torch.uint8)
            for k in range(2):
                in_place, heaped, asynchronous = forms[(2 * i + 3 * k) % len(forms)]
                flat = in_heap[: world * nbytes] if heaped else torch.empty(world * nbytes, dtype=torch.uint8)
                flat.fill_(0xA5)
                own = flat[rank * nbytes : (rank + 1) * nbytes]
                source = own.copy_(mine) if in_place else mine.clone()
                target = flat.view(dtype)
                work = dist.all_gather_into_tensor(target, source.view(dtype), async_op=asynchronous)
                if asynchronous:
                    work.wait()
                form = (numel, dtype, in_place, heaped, asynchronous)
                assert torch.equal(flat, expected), form
                assert in_place or torch.equal(source, mine), form
            heap.free(in_heap)
        used = {name for name, _ in fake.called}
    assert {"put", "signal"} <= used and (world == 1 or "wait_flag_then_put" in used)
    return True


@pytest.mark.parametrize(("world", "signature", "seed"), CASES)
def test_all_gather_is_what_gloo_gathers(ranks, world, signature, seed):
    assert all(ranks(world).run(gathers, signature, seed, timeout_s=100))


def other_operations(rank, world, signature, seed):
    """Broadcast, scatter, gather, all-to-all (uneven, with empty parts), barrier; each against Gloo."""
    from xio_ranks import over_xio

    gloo = dist.new_group(backend="gloo")
    with over_xio(signature, seed):
        for i in range(6):
            n, root = (1, 77, 4099)[i % 3], i % world
            mine, theirs = data(rank, i, n), data(rank, i, n)
            dist.broadcast(mine, root)
            dist.broadcast(theirs, root, group=gloo)
            assert torch.equal(mine, theirs)
            parts = [data(rank, i + p, n) for p in range(world)] if rank == root else None
            got, wanted = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
            dist.scatter(got, parts, root)
            dist.scatter(wanted, parts, root, group=gloo)
            assert torch.equal(got, wanted)
            into = [torch.zeros(n, dtype=torch.int64) for _ in range(world)] if rank == root else None
            dist.gather(data(rank, i, n), into, root)
            if rank == root:
                assert all(torch.equal(into[p], data(p, i, n)) for p in range(world))
            split = [(rank + p + i) % 3 * n for p in range(world)]
            sizes = [(p + rank + i) % 3 * n for p in range(world)]
            out, source = torch.zeros(sum(sizes), dtype=torch.int64), data(rank, i, sum(split))
            dist.all_to_all_single(out, source, sizes, split)
            for p, part in enumerate(out.split(sizes)):
                start = sum((p + q + i) % 3 * n for q in range(rank))
                assert torch.equal(part, data(p, i, start + sizes[p])[start:]), (i, p)
            dist.barrier()


@pytest.mark.parametrize(("world", "signature", "seed"), [(2, "old", None), (4, "new", 4)])
def test_other_operations(ranks, world, signature, seed):
    ranks(world).run(other_operations, signature, seed, timeout_s=100)


def changes_inputs_at_once(rank, world, signature, seed):
    """An input is written again as soon as the operation is over, while a peer is late."""
    from xio_ranks import over_xio

    with over_xio(signature, seed):
        heap = dist.group.WORLD.transport.heap
        n = 1500
        outputs = torch.zeros(world, n, dtype=torch.int64), heap.empty(world, n, dtype=torch.int64)
        mine = torch.zeros(n, dtype=torch.int64)
        for i in range(60):
            mine.copy_(data(rank, i, n))
            if i % world == rank:
                time.sleep(2e-3)
            out = outputs[i % 2]
            dist.all_gather_into_tensor(out.view(-1), mine)
            mine.fill_(-1)
            for p in range(world):
                assert torch.equal(out[p], data(p, i, n)), (i, p)


@pytest.mark.parametrize(("world", "signature", "seed"), [(2, "new", 5), (3, "old", None)])
def test_inputs_may_change_when_the_operation_is_over(ranks, world, signature, seed):
    ranks(world).run(changes_inputs_at_once, signature, seed, timeout_s=60)


# One-sided transfers --------------------------------------------------------------------------------------------------


class over_library:  # noqa: N801
    """A one-sided context whose transfers go through the library's stand-in."""

    def __init__(self, signature, seed=None, timeout_s=60.0):
        self._arguments = signature, seed, timeout_s

    def __enter__(self):
        from fake_xio import FakeXio
        from iris_pg.context import iris
        from iris_pg.copy_engine.xio import Library
        from iris_pg.copy_engine.xio_channels import XioChannels
        from xio_ranks import devices, words_of

        signature, seed, timeout_s = self._arguments
        self.fake = FakeXio(signature, seed=seed)
        self.context = ctx = iris(heap_size=32 << 20)
        self._memory, words = words_of(ctx.num_ranks)
        ctx._channels = XioChannels(Library(self.fake.module), ctx.heap, devices(ctx.num_ranks), words, timeout_s)
        ctx.fake = self.fake
        return ctx

    def __exit__(self, *exception):
        try:
            if exception[0] is None:
                self.context.quiet()
                self.context.barrier()  # nobody's heap goes while a peer writes into it
            self.context.close()
        finally:
            self.fake.stop()


def puts_in_every_form(rank, world, signature, seed):
    numel = 517
    forms = list(itertools.product([False, True], [False, True], [torch.int32, torch.int64], [False, True]))
    with over_library(signature, seed) as ctx:
        source = ctx.empty(numel, dtype=torch.int64)
        inbox = ctx.zeros(len(forms), 2, numel, dtype=torch.int64)
        nothing = source[:0]
        for i, (waits, signals, dtype, async_op) in enumerate(forms):
            for k, step in enumerate((0, 1)):
                to, sender = (rank + step) % world, (rank - step) % world
                go, arrived = ctx.zeros(3, dtype=dtype), ctx.full((3,), 7, dtype=dtype)
                source.copy_(data(rank, i, numel))
                keywords = dict(async_op=async_op)
                if waits:
                    keywords |= dict(wait_flag=go[1], wait_value=5)
                    ctx.put(nothing, sender, signal_flag=go[1], signal_value=6)
                if signals:
                    keywords |= dict(signal_flag=arrived[1], signal_value=i + 1)
                ctx.put(source, to, inbox[i, k], **keywords)
                ctx.quiet(to) if i % 2 else ctx.quiet()
                ctx.barrier()
                assert torch.equal(inbox[i, k], data(sender, i, numel)), (forms[i], sender)
                assert arrived.tolist() == [7, 7 + (i + 1) * signals, 7], forms[i]
        with pytest.raises(ValueError, match="channel=1; on AMD GPUs it is 0"):
            ctx.put(source, rank, channel=1)
        context = ctx.get_copy_engine_ctx()
        assert context.shape == (world, 6) and len(set(context[:, 3].tolist())) == world


@pytest.mark.parametrize(("world", "signature", "seed"), CASES)
def test_puts_in_every_form(ranks, world, signature, seed):
    ranks(world).run(puts_in_every_form, signature, seed, timeout_s=100)


def puts_tiles(rank, world, signature, seed):
    """Tiles of odd sizes and places, one by one and several at once, more of them than a ring holds, and empty ones."""
    with over_library(signature, seed) as ctx:
        a, b = ctx.empty(40, 30, dtype=torch.int64), ctx.zeros(40, 30, dtype=torch.int64)
        arrived = ctx.zeros(1, dtype=torch.int32)
        places = [(0, 0, 5, 7), (5, 0, 1, 30), (6, 3, 20, 1), (26, 11, 14, 19), (30, 0, 0, 4), (6, 5, 19, 24)]
        to, sender = (rank + 1) % world, (rank - 1) % world
        shift = ctx.heap.translate(b.data_ptr(), rank, to) - a.data_ptr()
        flag = ctx.heap.translate(arrived.data_ptr(), rank, to)
        expected = torch.zeros(40, 30, dtype=torch.int64)
        for i, at_once in enumerate((False, True)):
            a.copy_(data(rank, i, 1200).view(40, 30))
            theirs = data(sender, i, 1200).view(40, 30)
            for r, c, height, width in places:
                expected[r : r + height, c : c + width] = theirs[r : r + height, c : c + width]
            src = [a.data_ptr() + 8 * (30 * r + c) for r, c, *_ in places]
            if at_once:
                heights, widths, pitches = [p[2] for p in places], [p[3] for p in places], [30] * len(places)
                dst = [s + shift for s in src]
                ctx.put_tiles(src, to, dst, 8, heights, widths, pitches, pitches, signal_flag=flag, signal_value=6)
            else:
                for s, place in zip(src, places, strict=True):
                    ctx.put_tile(s, to, s + shift, 8, *place[2:], 30, 30, signal_flag=flag, async_op=True)
            ctx.put(a[:0], rank, wait_flag=arrived, wait_value=6 * (i + 1))
            assert torch.equal(b, expected)
            ctx.quiet()
            ctx.barrier()


@pytest.mark.parametrize(("world", "signature", "seed"), [(2, "old", 6), (3, "new", None)])
def test_tiles(ranks, world, signature, seed):
    ranks(world).run(puts_tiles, signature, seed, timeout_s=60)


def signals_after_copies(rank, world, signature, seed):
    with over_library(signature, seed) as ctx:
        for nbytes in (64, 48 << 10):
            n = nbytes // 8
            source, inbox = ctx.empty(n, dtype=torch.int64), ctx.zeros(n, dtype=torch.int64)
            ready, taken = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
            to, sender = (rank + 1) % world, (rank - 1) % world
            for i in range(1, 41):
                source.copy_(data(rank, i, n))
                ctx.put(source, to, inbox, signal_flag=ready, async_op=True)
                while ready.item() < i:
                    time.sleep(0)
                assert torch.equal(inbox, data(sender, i, n)), f"round {i}: the signal was there before its copy"
                ctx.put(source[:0], sender, signal_flag=taken)
                while taken.item() < i:
                    time.sleep(0)
                ctx.quiet()


@pytest.mark.parametrize(("signature", "seed"), list(itertools.product(SIGNATURES, [None, 7])))
def test_a_signal_is_never_seen_before_its_copy(ranks, signature, seed):
    ranks(2).run(signals_after_copies, signature, seed, timeout_s=60)


def waits_in_vain(rank, world, signature):
    from iris_pg.errors import ClosedError, DeadlineError

    with over_library(signature, timeout_s=0.5) as ctx:
        t, flag = ctx.zeros(8), ctx.zeros(1, dtype=torch.int32)
        if rank == 0:
            with pytest.raises(DeadlineError, match=r"(?s)the queue iris/.*0->1.*wait_flag_then_put\(flag_ptr="):
                ctx.put(t, 1, wait_flag=flag, wait_value=1)
            with pytest.raises(ClosedError, match="the queue to rank 1 has failed before"):
                ctx.put(t, 1)
            with pytest.raises(DeadlineError):
                ctx._channels.check(1, 0)
            ctx._channels.check(0, 0)
            ctx.put(t, 0)
            ctx.put(t[:0], 0, signal_flag=flag)  # and lets the engine go on, so that its memory may go
            for queue in ctx._channels._queues:
                queue.fault = None
        ctx.barrier()


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_wait_in_vain_is_a_deadline_with_a_dump(ranks, signature):
    ranks(2).run(waits_in_vain, signature, timeout_s=60)
