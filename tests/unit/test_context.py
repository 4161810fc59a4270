"""The one-sided context with one rank: its tensors, what it refuses, and transfers from a rank to itself."""

from __future__ import annotations

import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from iris_pg import arguments
from iris_pg.context import iris
from iris_pg.copy_engine import decoder, packets
from iris_pg.copy_engine.one_sided import Encoder
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Context, Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.tile import Tile
from iris_pg.copy_engine.translate import Batch
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, HeapExhaustedError, OptionError, UnsupportedError
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import atomics

MIB = 1 << 20


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "IRIS_PG_TIMEOUT", "IRIS_PG_HOSTILE_SEED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ctx(alone):
    with iris(heap_size=64 * MIB, engines=("sdma",)) as ctx:
        yield ctx


def until(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


# Making and closing ---------------------------------------------------------------------------------------------------


def test_without_an_engine_transfers_say_how_to_get_one():
    with iris(heap_size=MIB) as ctx:
        assert ctx.get_copy_engine_ctx() is None
        t = ctx.zeros(4)
        tile = (t.data_ptr(), 0, t.data_ptr(), 4, 1, 4, 0, 0)
        tiles = ([t.data_ptr()], 0, [t.data_ptr()], 4, [1], [4], [0], [0])
        calls = [lambda: ctx.put(t, 0), lambda: ctx.put_tile(*tile), lambda: ctx.put_tiles(*tiles), lambda: ctx.quiet()]
        for call in calls:
            with pytest.raises(UnsupportedError, match=r'no copy engine; make it with iris\(engines=\("sdma",\)\)'):
                call()


@pytest.mark.parametrize("engines", [("cu",), ("sdma", "auto"), "sdma", [None]])
def test_an_unknown_engine_is_told_with_the_known_ones(engines):
    with pytest.raises(OptionError, match=r"\('sdma',\) has all of them"):
        iris(engines=engines)


@pytest.mark.parametrize("heap_size", [0, -1, 1.5])
def test_a_heap_size_is_a_positive_number(heap_size):
    with pytest.raises(OptionError, match="positive number of bytes"):
        iris(heap_size=heap_size)


def test_half_an_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(OptionError, match="RANK, MASTER_ADDR.* not set .*torchrun"):
        iris()


def test_a_closed_context_says_so_and_its_tensors_stay():
    threads = threading.active_count()
    ctx = iris(heap_size=MIB, engines=["sdma"])
    t = ctx.arange(10)
    assert threading.active_count() == threads + 1
    ctx.close()
    ctx.close()
    assert threading.active_count() == threads
    assert t.tolist() == list(range(10))
    calls = [lambda: ctx.put(t, 0), ctx.quiet, ctx.barrier, ctx.get_copy_engine_ctx, lambda: ctx.zeros(1)]
    for call in [*calls, lambda: ctx.broadcast(1, 0)]:
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_what_device_code_gets(ctx):
    assert (ctx.cur_rank, ctx.num_ranks, ctx.get_rank(), ctx.get_num_ranks()) == (0, 1, 0, 1)
    bases, context, queues = ctx.get_heap_bases(), ctx.get_device_context(), ctx.get_copy_engine_ctx()
    assert bases.dtype == queues.dtype == torch.uint64 and context.dtype == torch.int64
    assert bases.tolist() == ctx.heap.bases and context.tolist() == [0, 1, *ctx.heap.bases]
    assert queues.shape == (1, 6) and len(set(queues[0].tolist())) == 6


# Tensors --------------------------------------------------------------------------------------------------------------

FACTORIES = [
    ("zeros", (2, 3), {}),
    ("zeros", ((2, 3),), dict(dtype=torch.float8_e4m3fn)),
    ("ones", (2, 3), dict(dtype=torch.bfloat16)),
    ("full", ((2, 3), 7), {}),
    ("full", ((2, 3), True), {}),
    ("full", ((3,), 1.5), {}),
    ("full", ([2], 1j), {}),
    ("arange", (5,), {}),
    ("arange", (2, 9, 3), dict(dtype=torch.int32)),
    ("arange", (0, 1, 0.25), {}),
    ("rand", (2, 3), {}),
    ("randn", (torch.Size([4]),), dict(dtype=torch.float64)),
    ("randint", (10, (5,)), {}),
    ("randint", (-3, 4, (2, 2)), dict(dtype=torch.int8)),
    ("zeros_like", (torch.ones(2, 3).t(),), {}),
    ("ones_like", (torch.ones(2, dtype=torch.int16),), {}),
    ("full_like", (torch.ones(2), 4), {}),
    ("rand_like", (torch.ones(2, dtype=torch.float64),), {}),
    ("randn_like", (torch.ones(2),), dict(dtype=torch.float16)),
    ("randint_like", (torch.ones(5), 10), {}),
    ("randint_like", (torch.ones(5, dtype=torch.int64), -5, 5), {}),
]


@pytest.mark.parametrize(("name", "args", "keywords"), FACTORIES, ids=str)
def test_factories_make_what_torch_makes(ctx, name, args, keywords):
    for _ in range(2):
        torch.manual_seed(7)
        made = getattr(ctx, name)(*args, **keywords)
        torch.manual_seed(7)
        expected = getattr(torch, name)(*args, **keywords)
        assert made.dtype == expected.dtype and made.shape == expected.shape
        assert made.is_contiguous() and ctx.heap.is_symmetric(made)
        assert torch.equal(made.view(torch.uint8), expected.contiguous().view(torch.uint8))
        made.view(torch.uint8).fill_(0xA5)
        ctx.heap.free(made)  # so the second round gets memory that is not zero


def test_factories_take_a_generator(ctx):
    a, b = (
        ctx.rand(5, generator=torch.Generator().manual_seed(3)),
        ctx.rand(5, generator=torch.Generator().manual_seed(3)),
    )
    assert torch.equal(a, b)


def test_a_factory_that_fails_keeps_nothing(ctx):
    used = ctx.heap._allocator.used_bytes
    with pytest.raises(RuntimeError):
        ctx.rand(5, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="no size"):
        ctx.randint(3, 5)
    with pytest.raises(HeapExhaustedError, match="heap_size="):
        ctx.empty(1 << 40)
    assert ctx.heap._allocator.used_bytes == used


def test_a_tensor_without_elements_is_symmetric_and_can_be_freed(ctx):
    t = ctx.zeros(0, 3)
    assert ctx.heap.is_symmetric(t) and not ctx.heap.is_symmetric(torch.zeros(0, 3))
    ctx.heap.free(t)


def test_broadcast_of_one_rank_gives_the_value_itself(ctx):
    value = [1, "two", torch.arange(3)]
    assert ctx.broadcast(value, 0) is value
    with pytest.raises(ArgumentError, match="does not pickle"):
        ctx.broadcast(lambda: 0, 0)
    with pytest.raises(ArgumentError, match=r"src=1 is not a rank .* 0\.\.0"):
        ctx.broadcast(1, 1)


# Put ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.int64, torch.complex128], ids=str
)
def test_put_copies_every_byte_and_no_more(ctx, dtype):
    for n, at in itertools.product((1, 3, 1021), (0, 5)):
        source, target = ctx.randint(256, (4096 * dtype.itemsize,), dtype=torch.uint8), ctx.zeros(4096, dtype=dtype)
        source = source.view(dtype)
        ctx.put(source[at : at + n], 0, target[2 * at : 2 * at + n])
        size = dtype.itemsize
        expected = torch.zeros(4096 * size, dtype=torch.uint8)
        expected[2 * at * size : (2 * at + n) * size] = source.view(torch.uint8)[at * size : (at + n) * size]
        assert torch.equal(target.view(torch.uint8), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("numel", [0, 5])
def test_a_signal_is_added(ctx, dtype, numel):
    t, flag = ctx.zeros(8), ctx.full((3,), 5, dtype=dtype)
    for value, total in [(1, 6), (-7, -1), (2, 1), (2**31 - 2, 2**31 - 1)]:
        ctx.put(t[:numel], 0, signal_flag=flag[1], signal_value=value)
        assert flag.tolist() == [5, total, 5]
    ctx.put(t[:numel], 0, signal_flag=flag[1:2])
    assert flag.tolist() == [5, 2**31 if dtype == torch.int64 else -(2**31), 5]  # carries, or wraps


def test_a_wait_compares_32_bits_unsigned(ctx):
    t = ctx.zeros(4)
    for value, waited in [(0, 0), (1, 1), (5, 4), (-1, 2**32 - 1), (-1, 0), (2**31, 2**31)]:
        flag = ctx.full((1,), value, dtype=torch.int64)
        ctx.put(t, 0, wait_flag=flag, wait_value=waited)
    flag.fill_(2**32)  # its low half is 0
    ctx.put(t, 0, wait_flag=flag, wait_value=1, async_op=True)
    time.sleep(0.02)
    assert not ctx._channels._queues[0, 0].idle
    flag.fill_(1)
    ctx.quiet()


def test_put_onto_itself_changes_nothing_and_signals(ctx):
    t, flag = ctx.arange(100), ctx.zeros(1, dtype=torch.int32)
    ctx.put(t, 0, signal_flag=flag)
    ctx.put(t, 0, t, signal_flag=flag)
    assert t.tolist() == list(range(100)) and flag.item() == 2


def wrong_puts(ctx):
    t, other, flag = ctx.arange(64).float(), ctx.zeros(64), ctx.zeros(2, dtype=torch.int32)
    t = ctx.zeros_like(t)
    yield "not in this rank's heap.*ctx.zeros", (torch.zeros(4), 0), {}
    yield "not in this rank's heap", (t, 0, torch.zeros(64)), {}
    yield "to_tensor has 63 elements", (t, 0, other[:63]), {}
    yield "to_tensor has 64 elements of torch.int32", (t, 0, other.view(torch.int32)), {}
    yield r"not contiguous.*\.contiguous\(\)", (t[::2], 0), {}
    yield r"not contiguous", (t[:32], 0, t.view(32, 2)[:, 1]), {}
    yield "from_tensor is list", ([1], 0), {}
    yield "overlap in part", (t[:32], 0, t[1:33]), {}
    yield "overlap in part", (t[1:33], 0, t[:32]), {}
    yield r"to_rank=1 is not a rank.*0\.\.0", (t, 1), {}
    yield "to_rank=-1 is not a rank", (t, -1), {}
    yield "to_rank=None is not a rank", (t, None), {}
    yield r"channel=8; it takes 0\.\.7", (t, 0), dict(channel=8)
    yield "channel=-1", (t, 0), dict(channel=-1)
    yield "wait_value without wait_flag", (t, 0), dict(wait_value=1)
    yield "wait_flag without wait_value", (t, 0), dict(wait_flag=flag[0])
    yield "wait_flag has 2 elements", (t, 0), dict(wait_flag=flag, wait_value=1)
    yield "wait_flag has 1 elements of torch.float32", (t, 0), dict(wait_flag=other[0], wait_value=1)
    yield "signal_flag has 1 elements of torch.int16", (t, 0), dict(signal_flag=flag.view(torch.int16)[0])
    yield "signal_flag is not in this rank's heap", (t, 0), dict(signal_flag=torch.zeros(1, dtype=torch.int32))
    yield "signal_value=3 without signal_flag", (t, 0), dict(signal_value=3)
    yield "wait_value=-1; it takes 0..", (t, 0), dict(wait_flag=flag[0], wait_value=-1)
    yield "wait_value=4294967296; it takes 0..", (t, 0), dict(wait_flag=flag[0], wait_value=2**32)
    yield "wait_value is float", (t, 0), dict(wait_flag=flag[0], wait_value=1.0)
    yield "signal_value=4294967296 does not fit the 32 bits", (t, 0), dict(signal_flag=flag[0], signal_value=2**32)
    yield "conjugate", (ctx.zeros(4, dtype=torch.complex64).conj(), 0), {}


def test_a_wrong_put_is_an_argument_error_and_moves_nothing(ctx):
    for message, args, keywords in wrong_puts(ctx):
        with pytest.raises(ArgumentError, match=f"put: .*{message}") as raised:
            ctx.put(*args, **keywords)
        if "is list" not in message:
            assert "[group=iris/0 rank=0]" in str(raised.value), raised.value
    assert all(queue.ring.committed() == 0 for queue in ctx._channels._queues.values())


def test_a_put_of_a_tensor_elsewhere_is_unsupported(ctx, monkeypatch):
    with pytest.raises(UnsupportedError, match="from_tensor is on meta"):
        ctx.put(torch.empty(3, device="meta"), 0)
    monkeypatch.setattr(arguments, "check_tensor", lambda *_: None)  # as it is for a tensor on a GPU
    with pytest.raises(UnsupportedError, match="heap is of CPU memory"):
        ctx.put(torch.empty(3, device="meta"), 0)


class Elsewhere:
    """As much of a heap as Encoder needs, over address space that is never touched: two ranks, 8 GiB each."""

    def __init__(self):
        self.nbytes = 8 << 30
        self.memory = cpu.Reservation(2 * self.nbytes)
        self.device = torch.device("cpu")
        self.rank, self.base, self.links = 0, self.memory.address, SimpleNamespace(group="g")
        self.bases = [self.base, self.base + self.nbytes]

    def offset_of(self, address, nbytes):
        offset = address - self.base
        return offset if 0 <= offset <= self.nbytes - nbytes else None


@pytest.mark.parametrize("nbytes", [2**30 - 33, 2**30 - 32, 2**30 - 31, 2**30, 2**30 + 1, 2**31, 2**32, 2**32 + 5])
def test_a_large_put_is_split_without_a_gap(nbytes):
    heap = Elsewhere()
    tensor = heap.memory.tensor(0, heap.nbytes)
    at = 64
    (call,) = Encoder(heap).put("put", tensor[64 : 64 + nbytes], 1, tensor[640 : 640 + nbytes])
    for packet in call.packets():
        copy = decoder.decode(packet, 0, len(packet))
        assert (copy.src, copy.dst) == (heap.bases[0] + at, heap.bases[1] + at + 576)
        assert copy.nbytes <= 0x3FFFFFE0
        at += copy.nbytes
    assert at == 64 + nbytes


@pytest.mark.slow
def test_a_put_of_more_than_1_gib():
    n = (1 << 30) + 4099
    with iris(heap_size=(2 << 30) + 64 * MIB, engines=("sdma",)) as ctx:
        source, target, flag = (
            ctx.empty(n, dtype=torch.uint8),
            ctx.empty(n, dtype=torch.uint8),
            ctx.zeros(1, dtype=torch.int32),
        )
        numbers = source[: n // 8 * 8].view(torch.int64)
        torch.arange(numbers.numel(), out=numbers)  # every 8 bytes differ, so a piece in the wrong place shows
        source[-3:] = 7
        ctx.put(source, 0, target, signal_flag=flag)
        assert flag.item() == 1 and torch.equal(source, target)
        del source, target, numbers


# Tiles ----------------------------------------------------------------------------------------------------------------


def test_tiles_land_where_they_should(ctx):
    draw = random.Random(0)
    for data_size, (height, width) in itertools.product((1, 2, 4, 8, 16, 3), ((1, 1), (1, 7), (5, 1), (4, 6), (3, 33))):
        source, target = ctx.randint(256, (8192,), dtype=torch.uint8), ctx.zeros(8192, dtype=torch.uint8)
        src_stride, dst_stride = (draw.choice([0, width, width + 1, width + draw.randrange(9)]) for _ in range(2))
        src, dst, flag = draw.randrange(100), draw.randrange(100), ctx.zeros(1, dtype=torch.int32)
        ctx.put_tile(
            *(source.data_ptr() + src, 0, target.data_ptr() + dst, data_size, height, width, src_stride, dst_stride),
            signal_flag=flag.data_ptr(),
        )
        expected = torch.zeros_like(target)
        for row in range(height):
            s, d = src + row * (src_stride or width) * data_size, dst + row * (dst_stride or width) * data_size
            expected[d : d + width * data_size] = source[s : s + width * data_size]
        assert torch.equal(target, expected) and flag.item() == 1


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("addresses", [(1, 1), None], ids=["no address", "address"])
def test_an_empty_tile_copies_nothing_waits_and_signals(ctx, size, addresses):
    t, flags = ctx.arange(64), ctx.zeros(2, dtype=torch.int64)
    wait, signal = flags[0].data_ptr(), flags[1].data_ptr()
    src, dst = addresses or (t.data_ptr(), t[32:].data_ptr())
    ctx.put_tile(src, 0, dst, 8, *size, 4, 4, wait, 1, signal, 3, async_op=True)
    time.sleep(0.01)
    assert flags.tolist() == [0, 0]
    flags[0] = 1
    ctx.quiet()
    ctx.put_tiles([src] * 2, 0, [dst] * 2, 8, [size[0]] * 2, [size[1]] * 2, [4] * 2, [4] * 2, flags[0], 1, signal)
    ctx.put_tiles([], 0, [], 8, [], [], [], [], signal_flag=signal)
    assert flags.tolist() == [1, 5] and t.tolist() == list(range(64))


def test_wrong_tiles_are_argument_errors_and_move_nothing(ctx):
    t = ctx.zeros(1024)
    a, b = t.data_ptr(), t.data_ptr() + 2048
    whole = ctx.heap.offset_of(a, 4)
    outside = a - whole + ctx.heap._mapped
    for message, args, keywords in [
        ("height -1", (a, 0, b, 4, -1, 4, 4, 4), {}),
        ("data_size 0", (a, 0, b, 0, 1, 4, 4, 4), {}),
        ("src_stride 3 is less than the width 4", (a, 0, b, 4, 2, 4, 3, 4), {}),
        ("dst_stride 3 is less than the width 4", (a, 0, b, 4, 2, 4, 4, 3), {}),
        ("not all in this rank's heap", (outside - 8, 0, b, 4, 2, 2, 2, 2), {}),
        ("not all in this rank's heap", (4096, 0, b, 4, 2, 2, 2, 2), {}),
        ("not all in to_rank's heap.*translate", (a, 0, outside - 8, 4, 2, 2, 2, 2), {}),
        ("overlap in part", (a, 0, a + 4, 4, 2, 4, 8, 8), {}),
        ("overlap in part", (a, 0, a, 4, 2, 4, 4, 8), {}),
        (
            "wait_flag=0x.* not the address of a 32-bit word",
            (a, 0, b, 4, 1, 1, 0, 0),
            dict(wait_flag=a + 1, wait_value=1),
        ),
        ("signal_flag=0x.* not the address of a 32-bit word", (a, 0, b, 4, 1, 1, 0, 0), dict(signal_flag=outside)),
        ("signal_flag is str", (a, 0, b, 4, 1, 1, 0, 0), dict(signal_flag="x")),
        ("interpreted as an integer", (a, 0, b, 4, 1.5, 1, 0, 0), {}),
        ("to_rank=3", (a, 3, b, 4, 1, 1, 0, 0), {}),
    ]:
        with pytest.raises(ArgumentError, match=f"^put_tile: .*{message}"):
            ctx.put_tile(*args, **keywords)
    with pytest.raises(ArgumentError, match=r"put_tiles: .*different lengths: 2 global_addrs, 1 dst_addrs"):
        ctx.put_tiles([a, a], 0, [b], 4, [1], [1], [0], [0])
    with pytest.raises(ArgumentError, match=r"put_tiles: tile 1: .*not all in this rank's heap"):
        ctx.put_tiles([a, 8], 0, [b, b], 4, [1, 1], [1, 1], [0, 0], [0, 0])
    assert ctx._channels._queues[0, 0].ring.committed() == 0


def test_more_tiles_than_the_ring_holds(ctx):
    n = 15000  # 1.2 MB of packets; the ring has 1 MiB
    source, target, flag = (
        ctx.arange(n, dtype=torch.int32),
        ctx.zeros(n, dtype=torch.int32),
        ctx.zeros(1, dtype=torch.int32),
    )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).tolist()
    src, dst = source.data_ptr(), target.data_ptr()
    for async_op in (False, True):
        target.zero_()
        ctx.put_tiles(
            [src + 4 * i for i in range(n)],
            0,
            [dst + 4 * i for i in order],
            *(4, [1] * n, [1] * n, [0] * n, [0] * n),
            signal_flag=flag.data_ptr(),
            async_op=async_op,
        )
        ctx.quiet()
        assert torch.equal(target[order], source) and flag.item() == 1 + async_op


def test_overlap_of_tiles_is_found_exactly():
    draw = random.Random(2)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        width, rows = draw.randint(1, 5), draw.randint(1, 4)
        tile = Tile(
            dst=100 + draw.randint(-30, 30),
            src=100,
            rows=rows,
            width_bytes=width,
            dst_pitch_bytes=width + draw.choice([0, 1, 4, 7]),
            src_pitch_bytes=width + draw.choice([0, 1, 4, 7]),
        )
        a = {tile.src + i * tile.src_pitch_bytes + j for i in range(rows) for j in range(width)}
        b = {tile.dst + i * tile.dst_pitch_bytes + j for i in range(rows) for j in range(width)}
        assert tile.overlaps() == bool(a & b), tile
        seen[tile.overlaps()] += 1
    assert min(seen.values()) > 500


# The engine -----------------------------------------------------------------------------------------------------------


def test_a_transfer_that_waits_for_another_channel(ctx):
    t, u, flag = ctx.arange(8), ctx.zeros(8, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
    for i in range(1, 20):
        u.zero_()
        ctx.put(t, 0, u, wait_flag=flag, wait_value=i, async_op=True)
        ctx.put(t[:0], 0, signal_flag=flag, async_op=True, channel=1)
        ctx.quiet(0)
        assert torch.equal(t, u)
    ctx.quiet(channel=7)  # never used


def test_device_code_puts_by_itself(ctx):
    """What a kernel does with a row of the copy-engine context: nobody in this process knows of the submission."""
    source, target = ctx.arange(64), ctx.zeros(64, dtype=torch.int64)
    queue = Context(*ctx.get_copy_engine_ctx()[0].tolist())
    ops = atomics()
    for _ in range(3):
        target.zero_()
        packet = packets.copy_linear(dst=target.data_ptr(), src=source.data_ptr(), nbytes=512)
        base = ops.load64(queue.cached_wptr)
        end = base + len(packet)
        assert ops.cas64(queue.cached_wptr, base, end) == base
        for i in range(0, len(packet), 4):
            ops.store32(queue.queue_buffer + base + i, int.from_bytes(packet[i : i + 4], "little"))
        for index in (queue.wptr, queue.doorbell, queue.committed_wptr):
            ops.store64(index, end)
        until(lambda end=end: ops.load64(queue.rptr) >= end)
        assert torch.equal(source, target)
        ctx.put(source, 0, target)  # and the host goes on after it
    ctx.quiet()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_wait_in_vain_ends_at_the_deadline(monkeypatch, async_op):
    monkeypatch.setenv("IRIS_PG_TIMEOUT", "0.3")
    with iris(heap_size=MIB, engines=("sdma",)) as ctx:
        t, u, flag = ctx.arange(4), ctx.zeros(4, dtype=torch.int64), ctx.zeros(4, dtype=torch.int32)
        start = time.monotonic()
        with pytest.raises(
            DeadlineError, match=r"(?s)rank 0 on channel 0 waits .*group=iris/0 rank=0\].* 0x5 .*PollRegMem"
        ):
            ctx.put(t, 0, u, wait_flag=flag[2], wait_value=5, async_op=async_op)
            ctx.quiet()
        assert time.monotonic() - start < 5
        with pytest.raises(DeadlineError):
            ctx.quiet()
        with pytest.raises(ClosedError, match="(?s)put: .*has failed before.*another channel.*PollRegMem"):
            ctx.put(t, 0, u)
        ctx.put(t, 0, u, channel=1)
        ctx.quiet(channel=1)
        assert torch.equal(t, u)


def test_close_ends_a_put_that_waits():
    ctx = iris(heap_size=MIB, engines=("sdma",))
    t, flag = ctx.arange(4), ctx.zeros(1, dtype=torch.int32)
    ctx.put(t, 0, wait_flag=flag, wait_value=1, async_op=True, channel=1)
    raised = []

    def wait():
        try:
            ctx.put(t, 0, wait_flag=flag, wait_value=1)
        except ClosedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: not ctx._channels._queues[0, 0].idle)
    start = time.monotonic()
    ctx.close()
    thread.join(5)
    assert time.monotonic() - start < 2
    assert len(raised) == 1 and "the context was closed" in raised[0]


class Told:
    def __init__(self):
        self.errors = []

    def finished(self, error):
        self.errors.append(error)


def test_a_queue_tells_what_was_over_before_it_was_known():
    """An operation may have been executed, or its queue have failed, before submit() notes who is to be told."""
    ring = Ring(4096)
    queue = Queue(ring, Patience(1.0))
    submit, nothing = ring.submit, Batch(bytearray(packets.nop(1)))
    early, empty, late = Told(), Told(), Told()

    def and_execute(*args, **keywords):
        end = submit(*args, **keywords)
        queue.drive(end)
        return end

    ring.submit = and_execute
    queue.submit([nothing], pending=early)
    queue.submit([], pending=empty)
    assert early.errors == empty.errors == [None]

    def and_fail(*args, **keywords):
        end = submit(*args, **keywords)
        queue.fail(error)
        return end

    ring.submit, error = and_fail, ClosedError("over")
    queue.submit([nothing], pending=late)
    assert late.errors == [error]
