"""Packets that kernels write, in the interpreter: byte for byte against packets.py, several producers on one ring, and
what happens when a queue does not go on.
"""

import random
import threading
import time

import pytest
import torch

import device_kernels as k
from iris_pg.copy_engine import packets
from iris_pg.copy_engine.generations import GFX942
from iris_pg.copy_engine.packets import AtomicOp
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Answers, Ring, RingError
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.device import sdma
from iris_pg.errors import QueueError
from iris_pg.platforms.atomics import atomics


class Device:
    """A ring and what a kernel needs to write into it."""

    def __init__(self, nbytes=1 << 16, limit_s=20.0):
        self.ring = Ring(nbytes, "ring of a test", limit_s)
        self.ctx = torch.tensor([self.ring.context], dtype=torch.uint64)
        self.done = torch.full((1,), -1, dtype=torch.int32)

    def written(self):
        """All that was committed."""
        return bytes(self.ring.view[: self.ring.committed()])


def high(base):
    """An address that no memory has, as an int64."""
    return (base << 40) + 0x1234567


COPIES = [1, 4, 4096, (1 << 30) - 33, (1 << 30) - 32, (1 << 30) - 31, 1 << 30, (1 << 30) + 1, 1 << 32, (5 << 30) + 7]


@pytest.mark.parametrize("nbytes", COPIES)
def test_a_linear_copy_is_the_packets_of_the_encoder(nbytes):
    d = Device()
    k.run(k.packet_copy, d.ctx, high(3), high(5), nbytes, d.done)
    expected = packets.copy_linear_split(dst=high(3), src=high(5), nbytes=nbytes)
    assert d.written() == b"".join(expected) and d.done.item() == 1
    assert len(expected) == -(-nbytes // GFX942.split_bytes)


def test_nothing_to_copy_is_no_packet():
    d = Device()
    k.run(k.packet_copy, d.ctx, high(3), high(5), 0, d.done)
    k.run(k.packet_window, d.ctx, high(3), high(5), 0, 7, 8, 8, d.done)
    k.run(k.packet_window, d.ctx, high(3), high(5), 7, 0, 8, 8, d.done)
    assert d.written() == b"" and d.done.item() == 1 and d.ring.doorbell() == 0


@pytest.mark.parametrize(
    "rows,width,dst_pitch,src_pitch", [(1, 1, 1, 1), (3, 5, 7, 5), (1 << 20, 4096, 1 << 31, (1 << 32) - 1)]
)
def test_a_window_is_the_packet_of_the_encoder(rows, width, dst_pitch, src_pitch):
    d = Device()
    k.run(k.packet_window, d.ctx, high(3), high(5), rows, width, dst_pitch, src_pitch, d.done)
    assert d.written() == packets.copy_sub_window(
        dst=high(3),
        src=high(5),
        n_rows=rows,
        width_bytes=width,
        dst_pitch_bytes=dst_pitch,
        src_pitch_bytes=src_pitch,
    )


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("op", AtomicOp)
def test_an_atomic_is_the_packet_of_the_encoder(op, wide):
    d = Device()
    operand, compare = (-5, (1 << 40) + 9) if wide else (-5, 9)
    compare = compare if op == AtomicOp.CMPSWAP else 0
    k.run(k.packet_atomic, d.ctx, 0x7F0000001238, operand, compare, d.done, OP=int(op), WIDE=wide)
    limit = (1 << (64 if wide else 32)) - 1
    expected = packets.atomic(0x7F0000001238, op, operand & limit, compare, width_bytes=8 if wide else 4)
    assert d.written() == expected


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_polls_and_fences_are_the_packets_of_the_encoder(value):
    d = Device()
    k.run(k.packet_poll, d.ctx, 0x7F0000001234, value, d.done)
    k.run(k.packet_fence, d.ctx, 0x7F0000001238, value, d.done)
    assert d.written() == packets.poll_regmem(0x7F0000001234, value) + packets.fence(0x7F0000001238, value)


def test_what_does_not_fit_before_the_end_of_the_ring_is_padded_by_one_nop():
    """Every length of padding that packets of 28, 80, 32, 24 and 16 bytes can leave."""
    d = Device(4096)
    view, rest = d.ring.view, random.Random(5)
    for at in range(4096 - 76, 4096, 4):
        base = d.ring.committed()
        atomics().store64(d.ring.context.rptr, base)  # as if all before had been executed
        skip = (at - base) % 4096
        d.ring.submit(packets.pad(skip) if skip <= d.ring.largest_batch else packets.nop(1), deadline=time.monotonic())
        while d.ring.committed() % 4096 != at:
            atomics().store64(d.ring.context.rptr, d.ring.committed())
            left = min((at - d.ring.committed()) % 4096, d.ring.largest_batch)
            d.ring.submit(packets.pad(left), deadline=time.monotonic())
        atomics().store64(d.ring.context.rptr, d.ring.committed())
        view[at:] = bytes(rest.randbytes(4096 - at))
        k.run(k.packet_window, d.ctx, high(3), high(5), 2, 3, 4, 5, d.done)
        assert bytes(view[at:]) == packets.pad(4096 - at)
        assert bytes(view[:80]) == packets.copy_sub_window(
            dst=high(3), src=high(5), n_rows=2, width_bytes=3, dst_pitch_bytes=4, src_pitch_bytes=5
        )
        assert d.ring.committed() % 4096 == 80 and d.ring.doorbell() == d.ring.committed()


# Several producers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3] if k.FULL else [1])
def test_producers_share_a_ring_that_is_too_small_for_them(seed):
    """Kernels in several threads, and the host, against an engine that delays and splits."""
    d, kernels, pieces, nbytes = Device(4096), 3, 24, 64
    queue = Queue(d.ring, Patience(20), random.Random(seed))
    engine = EngineThread([queue], keep_looking=True, name="engine of a test")
    engine.wake()
    source = torch.randint(0, 255, ((kernels + 1) * pieces * nbytes,), dtype=torch.uint8)
    target, flags = torch.zeros_like(source), torch.zeros(kernels + 1, dtype=torch.int64)
    failed = []

    def kernel(i):
        try:
            k.run(k.produce, d.ctx, 0, source, target, flags[i:], i * pieces, pieces, N=nbytes)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=kernel, args=(i,)) for i in range(kernels)]
    for thread in threads:
        thread.start()
    for i in range(kernels * pieces, (kernels + 1) * pieces):
        at = i * nbytes
        copy = packets.copy_linear(dst=target.data_ptr() + at, src=source.data_ptr() + at, nbytes=nbytes)
        signal = packets.atomic(flags[kernels:].data_ptr(), AtomicOp.ADD, 1, width_bytes=8)
        end = d.ring.submit(copy + signal, deadline=time.monotonic() + 20)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    queue.drive(end)
    queue.drive(d.ring.committed())
    engine.close()
    assert not failed and queue.fault is None
    assert torch.equal(target, source) and flags.tolist() == [pieces] * (kernels + 1)


# What does not go on --------------------------------------------------------------------------------------------------


def test_a_ring_without_an_engine_is_given_up_at_its_deadline():
    d = Device(4096, limit_s=0.3)
    began = time.monotonic()
    for _ in range(200):
        k.run(k.packet_copy, d.ctx, high(3), high(5), 8, d.done)
        if d.done.item() != 1:
            break
    assert d.done.item() == 0 and 0.2 < time.monotonic() - began < 15
    assert d.ring.committed() == 4096 // 28 * 28 and d.ring.is_dead
    assert "no room in the ring before the deadline" in d.ring.error()
    with pytest.raises(QueueError, match="takes nothing more: a kernel found no room"):
        d.ring.submit(packets.nop(1), deadline=time.monotonic() + 5)
    for kernel, arguments in ((k.packet_copy, (1, 1, 1)), (k.packet_fence, (8, 1)), (k.packet_quiet, ())):
        d.done.fill_(-1)
        k.run(kernel, d.ctx, *arguments, d.done)
        assert d.done.item() == 0  # at once, and nothing is written


def test_a_producer_that_never_commits_does_not_hang_the_next():
    d = Device(limit_s=0.3)
    atomics().reserve(d.ring.context.cached_wptr, d.ring.context.rptr, d.ring.nbytes, 28)
    k.run(k.packet_copy, d.ctx, high(3), high(5), 8, d.done)
    assert d.done.item() == 0 and d.ring.doorbell() == 0
    assert "a producer that reserved room before it" in d.ring.error()


def test_quiet_gives_up_when_nothing_lands():
    d = Device(limit_s=0.3)
    k.run(k.packet_quiet, d.ctx, d.done)
    assert d.done.item() == 0 and "for its transfers to land" in d.ring.error()
    assert d.written() == packets.atomic(d.ring.answers, AtomicOp.SWAP, 32, width_bytes=8)


def test_a_queue_that_fails_lets_kernels_go_on():
    """The host fails while a kernel waits: the kernel ends long before its own deadline."""
    d = Device(limit_s=60)
    queue = Queue(d.ring, Patience(20))
    thread = threading.Thread(target=k.run, args=(k.packet_quiet, d.ctx, d.done))
    thread.start()
    time.sleep(0.2)
    queue.fail(QueueError("as a test"))
    thread.join(timeout=10)
    assert not thread.is_alive() and d.done.item() == 0
    assert d.ring.error() is None  # it was not the kernel that gave up


def test_every_error_of_a_kernel_has_words():
    for code in RingError:
        d = Device()
        atomics().store32(d.ring.answers + 4 * Answers.ERROR, code)
        assert d.ring.error()


def test_constants_are_of_one_table():
    """What kernels use is what the encoder uses, not typed twice."""
    assert sdma.COPY_BYTES.value == len(packets.copy_linear(dst=4, src=4, nbytes=4))
    assert sdma.WINDOW_BYTES.value == len(packets.copy_sub_window(dst=4, src=4, width_bytes=1, n_rows=1))
