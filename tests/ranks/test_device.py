"""What kernels call to reach other ranks, in the interpreter, between processes: against what torch computes."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch

import device_kernels as k
import host_proxy

SIZE = 64  # elements of a block
TYPES = (
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
)


by_proxy = False  # whether contexts in this process have a proxy's queues and not the software engine's
device = "cpu"  # where the heaps of contexts in this process are


@contextlib.contextmanager
def context(**variables):
    from iris_pg.context import iris

    before = dict(os.environ)
    os.environ.update(variables)
    try:
        engines = () if by_proxy and device == "cpu" else ("sdma",)
        made = iris(heap_size=16 << 20, engines=engines, device=device)
        if not engines:
            host_proxy.install(made)
    finally:
        os.environ.clear()
        os.environ.update(before)
    with made as ctx:
        yield ctx


def over_a_proxy(rank, world, name, *arguments, on="cpu"):
    """Run a function of this module on contexts that have a proxy's queues."""
    global by_proxy, device
    by_proxy, device = True, on
    try:
        globals()[name](rank, world, *arguments)
    finally:
        by_proxy, device = False, "cpu"


def on_a_gpu(rank, world, name, *arguments):
    """The same on the GPU that all ranks share, or each its own."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    over_a_proxy(rank, world, name, *arguments, on="cuda")


def data(dtype, rank, iteration, numel=SIZE):
    """[numel] of any dtype that depends on rank, iteration and position: bytes, so that every bit counts."""
    if dtype == torch.bool:
        return (torch.arange(numel) * (rank + 3) + iteration) % 3 == 0
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype.is_floating_point:  # no NaN, whose bits may change on the way through a register
        raw &= 0x3B
    return raw.view(dtype)


def same(a, b):
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))


def mask(kind, rank, numel=SIZE):
    """int8 [numel]."""
    i = torch.arange(numel)
    return {
        "all": i >= 0,
        "none": i < 0,
        "prefix": i < 37,
        "run": (i >= 5) & (i < 37 + rank),
        "one": i == 9 + rank,
        "holes": i % 3 != 1,
        "ends": (i == 0) | (i == numel - 1),
    }[kind].to(torch.int8)


MASKS = ("all", "none", "prefix", "run", "one", "holes", "ends")


def local(shape, dtype):
    """Zeros that are not in the heap."""
    return torch.zeros(shape, dtype=dtype, device=device)


def kept(tensor, keep):
    """The elements that a mask keeps, and zeros."""
    columns = tensor.view(torch.uint8).view(SIZE, -1).T
    return torch.where(keep, columns, 0).T.contiguous().view(tensor.dtype).view(-1)


# Memory ---------------------------------------------------------------------------------------------------------------


def moves_everything(rank, world):
    with context() as ctx:
        bases = ctx.get_heap_bases()
        to, frm = (rank + 1) % world, (rank - 1) % world
        types = list(enumerate(TYPES))
        for i, dtype in types if world == 2 or k.FULL else types[world - 3 :: world]:
            kind = MASKS[i % len(MASKS)]
            keep, theirs = mask(kind, rank).bool(), mask(kind, frm).bool()
            source, inbox = ctx.empty(SIZE, dtype=dtype), ctx.zeros(2 * SIZE, dtype=dtype)
            copied = ctx.zeros(2 * SIZE, dtype=dtype)
            source.copy_(data(dtype, rank, i))
            fetched, first = local(3 * SIZE, dtype), local(1, dtype)
            ctx.barrier()
            k.run(
                k.moves, *(source, mask(kind, rank).to(device), inbox, fetched, copied, first, rank, to, bases), N=SIZE
            )
            ctx.barrier()

            mine, upper, lower = data(dtype, rank, i), data(dtype, to, i), data(dtype, frm, i)
            # What it has stored it had loaded from this rank.
            assert same(inbox, torch.cat([kept(lower, theirs), kept(mine, theirs)])), (dtype, kind)
            assert same(fetched, kept(upper, keep).repeat(3)), (dtype, kind)
            assert same(copied[:SIZE], kept(upper, keep)) and same(copied[SIZE:], kept(lower, theirs)), (dtype, kind)
            assert same(source, mine) and same(first, upper[:1])
            ctx.barrier()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_load_store_copy_get_put(ranks, world):
    ranks(world).run(moves_everything)


def does_atomics(rank, world):
    """Every atomic on a peer's words, with what was there before; then all ranks on one counter."""
    with context() as ctx:
        bases, to, frm = ctx.get_heap_bases(), (rank + 1) % world, (rank - 1) % world
        n = 4
        for i, dtype in enumerate((torch.int32, torch.int64)):
            words, before = ctx.empty(9, n, dtype=dtype), data(dtype, rank, i, 9 * n).view(9, n)
            words.copy_(before)
            val, old = data(dtype, rank, 10 + i, n), local((9, n), dtype)
            before, theirs = data(dtype, to, i, 9 * n).view(9, n), data(dtype, frm, 10 + i, n)
            # The last operation compares: at even places with what is there, where the sender knows it.
            even = torch.arange(n) % 2 == 0
            words[8] = torch.where(even, theirs, theirs + 9).to(device)
            ctx.barrier()
            k.run(k.atomics, words, old, rank, to, bases, val.to(device), N=n)
            ctx.barrier()
            start, words, old = data(dtype, rank, i, 9 * n).view(9, n), words.cpu(), old.cpu()
            kept = torch.arange(n) != 1
            for row, change in enumerate(
                (
                    lambda a, b: a + b,
                    lambda a, b: a - b,
                    lambda a, b: b,
                    lambda a, b: a ^ b,
                    lambda a, b: a & b,
                    lambda a, b: a | b,
                    torch.minimum,
                    torch.maximum,
                )
            ):
                assert torch.equal(words[row], torch.where(kept, change(start[row], theirs), start[row])), row
                assert torch.equal(old[row], torch.where(kept, before[row], 0)), row
            assert torch.equal(words[8], torch.where(even, theirs + 7, theirs + 9))
            assert torch.equal(old[8], torch.where(even, val, val + 9))
        counter = ctx.zeros(1, dtype=torch.int32)
        k.run(k.counts, counter, rank, 0, bases, 50)
        ctx.barrier()
        assert counter.item() == (50 * world if rank == 0 else 0)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_atomics(ranks, world):
    ranks(world).run(does_atomics)


# The copy engine ------------------------------------------------------------------------------------------------------


def written(ctx, peer):
    """How many bytes of packets were put into the queue to a rank."""
    if by_proxy:
        return ctx._channels.kernels.queues[peer][0].ring.doorbell()
    return ctx._channels._queues[peer, 0].ring.committed()


def state(ctx):
    """Every queue that kernels of this rank write into, in words."""
    if by_proxy:
        queues = [(queue, producers.error()) for queue, producers, _ in ctx._channels.kernels.queues]
    else:
        queues = [(queue, queue.ring.error()) for queue in ctx._channels._queues.values()]
    return "\n".join(f"{queue.dump()}; {error}; {queue.fault}" for queue, error in queues)


def puts_blocks(rank, world):
    """Every mask, type and order; and how many packets each takes."""
    with context() as ctx:
        bases, engine = ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
        assert engine.shape == (world, 6) and engine.dtype == torch.uint64
        to, frm = (rank + 1) % world, (rank - 1) % world
        cases = [(dtype, "run", False) for dtype in TYPES] + [(torch.int16, kind, False) for kind in MASKS]
        cases += [(torch.int32, "prefix", True), (torch.int32, "all", True)]
        landed = local(1, torch.int32)
        for i, (dtype, kind, is_reversed) in enumerate(cases):
            theirs = mask(kind, frm).bool()
            source, inbox = ctx.empty(SIZE, dtype=dtype), ctx.zeros(SIZE + 2, dtype=dtype)
            source.copy_(data(dtype, rank, i))
            ctx.barrier()
            before = written(ctx, to)
            k.run(
                *(k.put_1d, source, inbox[1:], mask(kind, rank).to(device), rank, to, bases, engine),
                N=SIZE,
                REVERSED=is_reversed,
            )
            packets = (written(ctx, to) - before) // 28
            k.run(k.waits, to, engine, landed)
            assert landed.item() == 1
            ctx.barrier()
            assert same(inbox[1:-1], kept(data(dtype, frm, i), theirs)), (dtype, kind)
            inbox = inbox.cpu()
            assert not inbox.view(torch.uint8)[: dtype.itemsize].any()
            assert not inbox.view(torch.uint8)[-dtype.itemsize :].any()
            # In order, and with elements in a run: one packet. Else the kernel itself copies.
            assert packets == (kind in ("all", "prefix", "run", "one") and not is_reversed), (kind, packets)
            ctx.barrier()


@pytest.mark.parametrize("world", [2, 4, 8] if k.FULL else [2])
def test_put_of_a_block_through_the_copy_engine(ranks, world):
    ranks(world).run(puts_blocks)


def puts_tiles(rank, world):
    rows, columns, pitch, to_pitch = 8, 16, 40, 24
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tiles = {
        "all": (r >= 0) & (c >= 0),
        "none": (r < 0) & (c < 0),
        "corner": (r < 5) & (c < 3),
        "inside": (r > 1) & (r < 7) & (c > 3) & (c < 11),
        "row": (r == 3) & (c >= 2),
        "column": (r >= 1) & (c == 15),
        "one": (r == 7) & (c == 0),
        "rows": (r % 2 == 0) & (c >= 0),
        "stairs": c <= r,
        "hole": (r != 4) | (c != 4),
    }
    windows = {"all", "corner", "inside", "row", "column", "one"}
    with context() as ctx:
        bases, engine = ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
        to, frm = (rank + 1) % world, (rank - 1) % world
        landed = local(1, torch.int32)
        types = [torch.float16] * len(tiles) + [torch.bool, torch.float8_e5m2, torch.float64]
        for i, (kind, dtype) in enumerate(zip([*tiles, "inside", "corner", "rows"], types, strict=True)):
            source, inbox = ctx.empty(rows, pitch, dtype=dtype), ctx.zeros(rows + 1, to_pitch, dtype=dtype)
            source.copy_(data(dtype, rank, i, rows * pitch).view(rows, pitch))
            ctx.barrier()
            before = written(ctx, to)
            k.run(
                *(
                    k.put_2d,
                    source,
                    inbox,
                    tiles[kind].to(device, torch.int8),
                    pitch,
                    to_pitch,
                    rank,
                    to,
                    bases,
                    engine,
                ),
                ROWS=rows,
                COLUMNS=columns,
            )
            packets = (written(ctx, to) - before) // 80
            k.run(k.waits, to, engine, landed)
            ctx.barrier()
            theirs = data(dtype, frm, i, rows * pitch).view(rows, pitch)[:, :columns]
            expected = torch.zeros(rows + 1, to_pitch, dtype=dtype)
            for row in range(rows):
                for column in range(columns):
                    if tiles[kind][row, column]:
                        expected[row, column] = theirs[row, column]
            assert same(inbox, expected), (kind, dtype)
            assert packets == (kind in windows), (kind, packets)
            ctx.barrier()
        # One element, by a pointer that is no block.
        one, there = ctx.full((1,), 7 + rank, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
        for keep in (0, 1):
            k.run(k.put_one, one, there, torch.tensor([keep], dtype=torch.int8, device=device), rank, to, bases, engine)
            k.run(k.waits, to, engine, landed)
            ctx.barrier()
            assert there.item() == (7 + frm) * keep
            ctx.barrier()


def test_put_of_a_tile_through_the_copy_engine(ranks):
    ranks(2).run(puts_tiles)


def signals_behind_puts(rank, world, seed):
    """Two kernels and the host put and signal at once; the engine waits for the peer's go in between."""
    rounds, producers = 6, 2
    with context(IRIS_PG_HOSTILE_SEED=str(seed)) as ctx:
        bases, engine = ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
        to, frm = (rank + 1) % world, (rank - 1) % world
        source = ctx.empty(producers, rounds, SIZE, dtype=torch.int64)
        inbox = ctx.zeros(producers, rounds, SIZE, dtype=torch.int64)
        flags, go = ctx.zeros(producers, 8, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
        source.copy_(data(torch.int64, rank, seed, source.numel()).view_as(source))
        expected = data(torch.int64, frm, seed, source.numel()).view_as(source)
        ctx.barrier()
        failed = []

        def kernel(i):
            try:
                arguments = (source[i], inbox[i], flags[i], go, rounds, rank, to, bases, engine)
                k.run(k.put_and_signal, *arguments, N=SIZE)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=kernel, args=(i,)) for i in range(producers)]
        for thread in threads:
            thread.start()
        seen = [0] * producers
        while min(seen) < rounds:
            assert not failed, failed
            for i in range(producers):
                arrived = int(flags[i, 0])
                for j in range(seen[i], arrived):
                    assert torch.equal(inbox[i, j].cpu(), expected[i, j]), "the signal was there before its copy"
                seen[i] = arrived
            # Each engine polls go >= k for round k, in the order in which packets were put: let all go, one by one.
            ctx.put(go[:0], frm, signal_flag=go, channel=1)
        for thread in threads:
            thread.join(timeout=30)
        ctx.quiet()
        ctx.barrier()
        assert torch.equal(inbox.cpu(), expected) and flags[:, 0].tolist() == [rounds] * producers and not failed


@pytest.mark.parametrize("seed", [1, 2, 3] if k.FULL else [1])
def test_a_signal_of_a_kernel_is_never_seen_before_its_copy(ranks, seed):
    ranks(2).run(signals_behind_puts, seed)


def adds_and_swaps(rank, world):
    with context() as ctx:
        bases, engine = ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
        landed = local(1, torch.int32)
        for dtype, big in ((torch.int32, (1 << 31) - 5), (torch.int64, (1 << 62) + (1 << 33) + 3)):
            flag, word = ctx.zeros(1, dtype=dtype), ctx.full((1,), big, dtype=dtype)
            for value in (1, -7, big):
                k.run(k.signals, flag, value, rank, 0, bases, engine)
            k.run(k.swaps, word, big, rank + 1, rank, (rank + 1) % world, bases, engine)
            k.run(k.swaps, word, big, 99, rank, (rank + 1) % world, bases, engine)  # too late
            for peer in range(world):
                k.run(k.waits, peer, engine, landed)
                assert landed.item() == 1
            ctx.barrier()
            bits = 8 * dtype.itemsize
            total = (world * (big - 6) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))
            assert flag.item() == (total if rank == 0 else 0)
            assert word.item() == (rank - 1) % world + 1
            ctx.barrier()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_atomics_of_the_copy_engine(ranks, world):
    ranks(world).run(adds_and_swaps)


def gives_up(rank, world):
    """A kernel that gives a queue up is an error of the host's next call, there and only there."""
    from iris_pg.errors import ClosedError, QueueError
    from iris_pg.platforms.atomics import atomics

    with context(IRIS_PG_TIMEOUT="3") as ctx:
        engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
        landed, flag = local(1, torch.int32), ctx.zeros(1, dtype=torch.int32)
        if by_proxy:  # a producer that died before it committed
            ctx._channels.kernels.queues[0][1]._words[0] += 28
        else:
            atomics().rmw["add", 8](engine[0, 4].item(), 28)
        k.run(k.signals, flag, 1, rank, 0, bases, engine)
        k.run(k.waits, 0, engine, landed)
        assert landed.item() == 0
        with pytest.raises(QueueError, match="kernel waited in vain for a producer"):
            ctx.quiet(0)
        with pytest.raises(QueueError if by_proxy else ClosedError, match="kernel waited in vain for a producer"):
            ctx.put(flag, 0)
        if not by_proxy:
            ctx.put(flag, 0, channel=1)
        ctx.barrier()  # the flag that was put is still 0
        if world > 1:
            k.run(k.signals, flag, 1, rank, 1, bases, engine)
            k.run(k.waits, 1, engine, landed)
            assert landed.item() == 1
        ctx.barrier()
        assert flag.item() == (world if rank == 1 else 0)


def test_a_queue_that_a_kernel_has_given_up(ranks):
    ranks(2).run(gives_up)


def uses_a_context(rank, world):
    with context() as ctx:
        source, inbox = ctx.empty(SIZE, dtype=torch.int32), ctx.zeros(5, SIZE, dtype=torch.int32)
        source.copy_(data(torch.int32, rank, 0))
        words, landed = ctx.full((11,), 5, dtype=torch.int32), local(1, torch.int32)
        ctx.barrier()
        arguments = (ctx.get_device_context(), source, inbox, words, ctx.get_copy_engine_ctx(), landed)
        k.run(k.through_context, *arguments, rank=rank, world=world, N=SIZE)
        ctx.barrier()
        lower, mine, upper = (data(torch.int32, r % world, 0) for r in (rank - 1, rank, rank + 1))
        assert landed.item() == 1
        for row, expected in enumerate((lower, mine, lower, upper, lower)):
            assert torch.equal(inbox[row].cpu(), expected), row
        v = (rank - 1) % world + 1
        assert words.tolist() == [5 + v, 5 - v, v, 5 ^ v, 5 & v, 5 | v, min(5, v), max(5, v), v, 5 + v, v]


@pytest.mark.parametrize("world", [1, 2, 4, 8] if k.FULL else [2, 4, 8])
def test_a_device_context(ranks, world):
    ranks(world).run(uses_a_context)


# Collectives ----------------------------------------------------------------------------------------------------------


def gathers(rank, world, languages=("triton",)):
    """An all-gather that a kernel drives, of several sizes, in place too, again and again, with ranks that are late."""
    from iris_pg.collective_api import Config
    from iris_pg.errors import ArgumentError, QueueError

    with context() as ctx:
        config = Config(engine="sdma", all_gather_variant="kernel_puts")
        for i, (dtype, numel) in enumerate([(torch.int64, 64), (torch.uint8, 1), (torch.int16, 1003), (torch.int8, 0)]):
            output, input = ctx.zeros(world * numel, dtype=dtype), local(numel, dtype)
            for j, language in enumerate([*languages] * 3):
                mine = output[rank * numel : (rank + 1) * numel] if j == 2 else input
                mine.copy_(data(dtype, rank, 10 * i + j, numel))
                if device != "cpu":
                    torch.cuda.synchronize()
                if (rank + j) % 3 == 0:
                    time.sleep(0.02)
                try:
                    if language == "triton":
                        ctx.ccl.all_gather(output, mine, config=config)
                    else:
                        ctx.ccl._kernel_gather(output, mine, language)
                    ctx.ccl._kernel_gather.check()
                except QueueError as error:
                    raise AssertionError(f"{dtype}, {numel}, {j}: {error}\n{state(ctx)}") from error
                expected = torch.cat([data(dtype, r, 10 * i + j, numel) for r in range(world)])
                assert torch.equal(output.cpu(), expected), (dtype, numel, j)
        for output, input in (
            (local(world * 4, torch.int8), local(4, torch.int8)),
            (ctx.zeros(4 * world + 1, dtype=torch.int8), local(4, torch.int8)),
            (ctx.zeros(4 * world, dtype=torch.int8), local(4, torch.uint8)),
        ):
            with pytest.raises(ArgumentError, match="all_gather: "):
                ctx.ccl.all_gather(output, input, config=config)
        ctx.barrier()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_an_all_gather_driven_by_a_kernel(ranks, world):
    ranks(world).run(gathers)


def gathers_alone(rank, world):
    from iris_pg.collective_api import Config
    from iris_pg.errors import QueueError

    with context(IRIS_PG_TIMEOUT="1.5") as ctx:
        output, input = ctx.zeros(world * 8), ctx.ones(8)
        ctx.ccl.all_gather(output, input, config=Config(all_gather_variant="kernel_puts"))
        if rank == 0:
            with pytest.raises(QueueError, match="a kernel waited in vain for a peer"):
                ctx.ccl.all_gather(output, input, config=Config(all_gather_variant="kernel_puts"))
            with pytest.raises(QueueError, match="for a flag from that rank"):
                ctx.quiet()
        else:
            time.sleep(3.5)


def test_an_all_gather_without_a_peer_is_an_error(ranks):
    ranks(2).run(gathers_alone)


# By a proxy -----------------------------------------------------------------------------------------------------------


OVER_A_PROXY = [
    (2, "puts_blocks"),
    (2, "puts_tiles"),
    (2, "signals_behind_puts", 1),
    (2, "adds_and_swaps"),
    (2, "gives_up"),
    (2, "uses_a_context"),
    (2, "gathers"),
]


@pytest.mark.parametrize("case", OVER_A_PROXY, ids=lambda case: case[1])
def test_over_a_proxy(ranks, case):
    """The same through the queues that kernels have on GPUs whose copy engines take no packets."""
    world, *arguments = case
    ranks(world).run(over_a_proxy, *arguments)
