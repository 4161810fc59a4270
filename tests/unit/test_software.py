"""The software copy engine: what each packet does, and what happens when one is bad, waits for ever, or comes at a bad
time.
"""

import ctypes
import os
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_pg.copy_engine import packets, trap
from iris_pg.copy_engine.packets import AtomicOp, PollFunc
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.copy_engine.translate import Batch, encode
from iris_pg.errors import DeadlineError, MismatchError, PacketError, PeerLostError, QueueError
from iris_pg.program import Add, Copy, Copy2D, Program, Ref, Signal, Take, Wait


class Memory:
    """Bytes with an address."""

    def __init__(self, nbytes, seed=None):
        self.bytes = np.zeros(nbytes, dtype=np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, nbytes)
        self.address = self.bytes.ctypes.data

    def word(self, offset=0, width=4):
        return int.from_bytes(self.bytes[offset : offset + width].tobytes(), "little")

    def set_word(self, value, offset=0, width=4):
        self.bytes[offset : offset + width] = np.frombuffer(value.to_bytes(width, "little"), dtype=np.uint8)


class Told:
    """A pending operation that remembers how it ended."""

    def __init__(self, then=None, callbacks=None):
        self.done, self.error, self.then, self.callbacks = threading.Event(), None, then, callbacks
        self.times = 0

    def finished(self, error):
        self.error = error
        self.times += 1
        if self.then:
            self.then()
        self.done.set()
        return self.callbacks


def new_queue(timeout_s=5.0, check=None, nbytes=1 << 16, **keywords):
    return Queue(Ring(nbytes, "test"), Patience(timeout_s, check=check), **keywords)


def batches(*some_packets):
    return [Batch(bytearray(b"".join(some_packets)))]


@pytest.fixture(params=["decoded", "traced", "advanced"])
def run(request):
    """Return ``run(*packets)``: execute them inline; the way they are when they are new, or seen often; or as a thread
    does.
    """

    def run(*some_packets, queue=None):
        queue = queue or new_queue()
        if request.param == "traced":  # the second time that a run of packets is seen, its decoded form is kept
            words = b"".join(some_packets)
            for _ in range(2):
                queue._traces.find(words)
        end = queue.submit(batches(*some_packets))
        if request.param == "advanced":
            assert queue.advance()
        else:
            queue.drive(end)
        assert queue.done == queue.ring.retired() == end
        return queue

    return run


# What each packet does ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 3, 4, 31, 4096, 32 << 10, (32 << 10) + 1, 1_000_003])
@pytest.mark.parametrize(("dst_at", "src_at"), [(0, 0), (1, 2), (64, 3)])
def test_copy_linear(run, nbytes, dst_at, src_at):
    source, target = Memory(nbytes + 64, seed=nbytes), Memory(nbytes + 128)
    run(packets.copy_linear(dst=target.address + dst_at, src=source.address + src_at, nbytes=nbytes))
    assert np.array_equal(target.bytes[dst_at : dst_at + nbytes], source.bytes[src_at : src_at + nbytes])
    assert not target.bytes[:dst_at].any()
    assert not target.bytes[dst_at + nbytes :].any()


@settings(max_examples=60)
@given(data=st.data())
def test_copy_window_is_what_numpy_slices(data):
    draw = data.draw
    width, rows, slices = (draw(st.integers(1, n)) for n in (9, 5, 3))
    sides = []
    for seed in (1, None):
        x, y, z = (draw(st.integers(0, n)) for n in (4, 3, 2))
        shape = tuple(n + at + draw(st.integers(0, 2)) for n, at in ((slices, z), (rows, y), (width, x)))
        memory = Memory(int(np.prod(shape)), seed)
        sides.append((memory, memory.bytes.reshape(shape), x, y, z))
    (source, source_view, *source_at), (target, target_view, *target_at) = sides
    queue = new_queue()
    queue.drive(
        queue.submit(
            batches(
                packets.copy_sub_window(
                    dst=target.address,
                    src=source.address,
                    width_bytes=width,
                    n_rows=rows,
                    n_slices=slices,
                    dst_pitch_bytes=target_view.shape[2],
                    src_pitch_bytes=source_view.shape[2],
                    dst_slice_pitch_bytes=target_view.shape[1] * target_view.shape[2],
                    src_slice_pitch_bytes=source_view.shape[1] * source_view.shape[2],
                    **dict(zip(("dst_x", "dst_y", "dst_z"), target_at, strict=True)),
                    **dict(zip(("src_x", "src_y", "src_z"), source_at, strict=True)),
                )
            )
        )
    )
    expected = np.zeros_like(target_view)

    def window(x, y, z):
        return np.s_[z : z + slices, y : y + rows, x : x + width]

    expected[window(*target_at)] = source_view[window(*source_at)]
    assert np.array_equal(target_view, expected)


def test_pull(run):
    """The address is what the word beside the flag holds when the trap is reached."""
    source, target, offer = Memory(200, seed=1), Memory(200), Memory(8)
    reads = []

    def read(rank, dst, src, nbytes):
        reads.append((rank, nbytes))
        ctypes.memmove(dst, src, nbytes)

    queue = new_queue(read=read)
    asked = trap.Pull(3, target.address + 5, offer.address, 7, 100)
    run(packets.atomic(offer.address, AtomicOp.SWAP, source.address, width_bytes=8), asked.request(), queue=queue)
    assert reads == [(3, 100)]
    assert target.bytes[5:105].tobytes() == source.bytes[7:107].tobytes()
    assert not target.bytes[:5].any() and not target.bytes[105:].any()
    target.bytes[:] = 0  # and again, by a native call if it was seen often
    for _ in range(3):
        run(asked.request(), packets.nop(1), queue=(native := new_queue(read=read, pids=[0, 0, 0, os.getpid()])))
    assert native.fault is None
    assert target.bytes[5:105].tobytes() == source.bytes[7:107].tobytes()
    offer.set_word(4096, width=8)  # nothing lies there, so the native call hands it back
    with pytest.raises(ZeroDivisionError):
        run(asked.request(), queue=new_queue(read=lambda *_: 1 // 0, pids=[0, 0, 0, os.getpid()]))
    with pytest.raises(PacketError, match="reads no other process"):
        run(asked.request(), queue=new_queue())


@pytest.mark.parametrize("number", [trap.REDUCE, trap.PULL])
def test_a_trap_that_asks_for_nothing_is_an_error(run, number):
    with pytest.raises(PacketError, match="asks for nothing"):
        run(packets.nop(4), packets.trap(number))


def test_fence(run):
    memory = Memory(16)
    run(packets.fence(memory.address + 4, 0xDEADBEEF), packets.fence(memory.address + 8, 0))
    assert [memory.word(at) for at in (0, 4, 8, 12)] == [0, 0xDEADBEEF, 0, 0]


@pytest.mark.parametrize(("unit", "value"), [(1, 0xAB), (4, 0x01020304)])
@pytest.mark.parametrize("nbytes", [4, 8, 4096, 1 << 20])
def test_const_fill(run, unit, value, nbytes):
    memory = Memory(nbytes + 16)
    run(packets.const_fill(memory.address + 8, value, nbytes, unit_bytes=unit))
    assert memory.bytes[8 : 8 + nbytes].tobytes() == value.to_bytes(unit, "little") * (nbytes // unit)
    assert not memory.bytes[:8].any()
    assert not memory.bytes[8 + nbytes :].any()


def test_const_fill_of_odd_bytes(run):
    memory = Memory(16)
    run(packets.const_fill(memory.address + 3, 7, 5, unit_bytes=1))
    assert memory.bytes.tolist() == [0] * 3 + [7] * 5 + [0] * 8


def test_timestamps_grow_at_100_mhz(run):
    memory = Memory(16)
    queue = run(packets.timestamp(memory.address))
    time.sleep(0.02)
    run(packets.timestamp(memory.address + 8), queue=queue)
    assert 0.015 < (memory.word(8, 8) - memory.word(0, 8)) / 100e6 < 5


def test_traps_and_nops(run):
    contexts = []
    run(
        packets.nop(1),
        packets.trap(5),
        packets.pad(400),
        packets.trap(0xFFFFFFF),
        queue=new_queue(on_trap=contexts.append),
    )
    run(packets.trap(6))  # nobody listens
    assert contexts == [5, 0xFFFFFFF]


def signed(value, width):
    return value - (1 << 8 * width) if value >> (8 * width - 1) else value


ATOMICS = {
    AtomicOp.SWAP: lambda old, x, w: x,
    AtomicOp.ADD: lambda old, x, w: old + x,
    AtomicOp.SUB: lambda old, x, w: old - x,
    AtomicOp.SMIN: lambda old, x, w: min(signed(old, w), signed(x, w)),
    AtomicOp.UMIN: lambda old, x, w: min(old, x),
    AtomicOp.SMAX: lambda old, x, w: max(signed(old, w), signed(x, w)),
    AtomicOp.UMAX: lambda old, x, w: max(old, x),
    AtomicOp.AND: lambda old, x, w: old & x,
    AtomicOp.OR: lambda old, x, w: old | x,
    AtomicOp.XOR: lambda old, x, w: old ^ x,
    AtomicOp.INC: lambda old, x, w: 0 if old >= x else old + 1,
    AtomicOp.DEC: lambda old, x, w: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("op", list(AtomicOp), ids=lambda op: op.name)
def test_atomics_against_pythons_arithmetic(op, width, returns):
    top = (1 << 8 * width) - 1
    edges = [0, 1, 2, top // 2, top // 2 + 1, top - 1, top]
    rng = random.Random(op * width)
    cases = [(a, b) for a in edges for b in edges] + [(rng.randint(0, top), rng.randint(0, top)) for _ in range(30)]
    memory = Memory(width * (len(cases) + 1))
    queue, expected = new_queue(), []
    for i, (old, operand) in enumerate(cases):
        memory.set_word(old, i * width, width)
        keywords = {}
        if op == AtomicOp.CMPSWAP:
            compare = old if i % 2 else (old ^ 1)
            keywords["compare"] = compare
            expected.append(operand if compare == old else old)
        else:
            expected.append(ATOMICS[op](old, operand, width) & top)
        end = queue.submit(
            batches(
                packets.atomic(memory.address + i * width, op, operand, width_bytes=width, returns=returns, **keywords)
            )
        )
    queue.drive(end)
    assert [memory.word(i * width, width) for i in range(len(cases))] == expected
    assert memory.word(len(cases) * width, width) == 0


COMPARISONS = {
    PollFunc.ALWAYS: lambda a, b: True,
    PollFunc.LESS: lambda a, b: a < b,
    PollFunc.LESS_EQUAL: lambda a, b: a <= b,
    PollFunc.EQUAL: lambda a, b: a == b,
    PollFunc.NOT_EQUAL: lambda a, b: a != b,
    PollFunc.GREATER_EQUAL: lambda a, b: a >= b,
    PollFunc.GREATER: lambda a, b: a > b,
}
TOP = 0xFFFFFFFF


@pytest.mark.parametrize("func", list(PollFunc), ids=lambda func: func.name)
def test_polls_compare_unsigned_words_under_a_mask(func):
    memory, marker = Memory(8), Memory(8)
    words = [0, 1, 2, TOP // 2, TOP // 2 + 1, TOP - 1, TOP]
    for word, reference, mask in ((w, r, m) for w in words for r in words for m in (TOP, 0xFF, 0)):
        if func == PollFunc.LESS and reference == 0 or func == PollFunc.GREATER and reference == TOP:
            continue  # never satisfied: an error, see below
        memory.set_word(word)
        marker.set_word(0)
        queue = new_queue(timeout_s=1)
        end = queue.submit(
            batches(packets.poll_regmem(memory.address, reference, mask, func), packets.fence(marker.address, 1))
        )
        passes = COMPARISONS[func](word & mask, reference)
        assert queue.advance() == passes
        assert (queue.done == end) == passes == marker.word()
        if passes:  # and the same when the caller waits
            queue.drive(queue.submit(batches(packets.poll_regmem(memory.address, reference, mask, func))))


@pytest.mark.parametrize(("func", "reference"), [(PollFunc.LESS, 0), (PollFunc.GREATER, TOP)])
def test_a_poll_that_nothing_satisfies(func, reference):
    queue, memory = new_queue(), Memory(8)
    with pytest.raises(PacketError, match="can never be satisfied"):
        queue.drive(queue.submit(batches(packets.poll_regmem(memory.address, reference, func=func))))


def test_a_poll_that_counts_its_reads_gives_up(run):
    memory, marker = Memory(8), Memory(8)
    poll = packets.poll_regmem(memory.address, 7, func=PollFunc.EQUAL, retry_count=50)
    run(poll, packets.fence(marker.address, 1))
    assert marker.word() == 1


def test_a_poll_waits_until_its_word_changes():
    queue, memory, marker = new_queue(), Memory(8), Memory(8)
    end = queue.submit(
        batches(packets.poll_regmem(memory.address, 7, func=PollFunc.EQUAL), packets.fence(marker.address, 1))
    )
    threading.Timer(0.05, memory.set_word, (7,)).start()
    start = time.monotonic()
    queue.drive(end)
    assert time.monotonic() - start > 0.03
    assert marker.word() == 1


def test_a_compare_and_swap_loop_waits_until_it_succeeds():
    for use_thread in (False, True):
        queue, memory = new_queue(), Memory(8)
        memory.set_word(3)
        end = queue.submit(batches(packets.atomic(memory.address, AtomicOp.CMPSWAP, 9, compare=4, loop=True)))
        assert not queue.advance()
        threading.Timer(0.05, memory.set_word, (4,)).start()
        if use_thread:
            deadline = time.monotonic() + 5
            while not queue.advance():
                assert time.monotonic() < deadline
        else:
            queue.drive(end)
        assert memory.word() == 9


# Programs -------------------------------------------------------------------------------------------------------------


def test_a_program_becomes_packets_that_do_it():
    a, b, flags = Memory(4096, seed=1), Memory(4096), Memory(64)
    flags.set_word(5, 8)
    addresses = {"flags": flags.address, "a": a.address}
    program = Program(
        0,
        1,
        (
            Copy(Ref(0, "b", 3), Ref(0, "a", 5), 1000),
            Copy2D(Ref(0, "b", 2048), Ref(0, "a", 10), 7, 5, 16, 32),
            Signal(Ref(0, "flags", 0), 77),
            Take(Ref(0, "flags", 8), 0, 5),
            Add(Ref(0, "flags", 16), 3, 8),
            Wait(Ref(0, "flags", 16), 2),
        ),
    )
    made = encode(program, lambda ref: addresses[ref.buffer] + ref.offset, {"b": 0}, 4096)
    queue = new_queue()
    for _ in range(3):
        b.bytes[:] = 0
        flags.set_word(5, 8)
        queue.drive(queue.submit(made, [b.address]))
        expected = np.zeros(4096, dtype=np.uint8)
        expected[3:1003] = a.bytes[5:1005]
        for row in range(5):
            expected[2048 + 16 * row : 2055 + 16 * row] = a.bytes[10 + 32 * row : 17 + 32 * row]
        assert np.array_equal(b.bytes, expected)
        assert (flags.word(0), flags.word(8)) == (77, 0)
    assert flags.word(16, 8) == 9


def test_a_long_program_is_cut_into_batches_that_fit():
    source, target = Memory(4000, seed=3), Memory(4000)
    steps = tuple(Copy(Ref(0, "b", i), Ref(0, "a", i), 1) for i in range(4000))
    made = encode(Program(0, 1, steps), lambda ref: 0, {"a": 0, "b": 1}, 1024)
    assert len(made) > 100
    assert all(0 < len(batch.packets) <= 1024 for batch in made)
    queue = new_queue(nbytes=4096)
    queue.drive(queue.submit(made, [source.address, target.address]))
    assert np.array_equal(source.bytes, target.bytes)


@pytest.mark.parametrize("seed", range(8))
def test_hostile_mode_gives_the_same_bytes(seed):
    memories = {}
    for hostile in (None, random.Random(seed)):
        memory, at = Memory(1 << 16, seed=seed), random.Random(seed)
        made = []
        for _ in range(60):
            n = at.choice([1, 2, 3, 100, 5000])
            source, target = at.randrange(0, 30_000 - n), at.randrange(32_000, (1 << 16) - n)
            if at.random() < 0.5:
                source, target = target, source
            made.append(packets.copy_linear(dst=memory.address + target, src=memory.address + source, nbytes=n))
            if at.random() < 0.3:
                made.append(packets.const_fill(memory.address + at.randrange(8000) * 4, at.getrandbits(32), 16))
        queue = new_queue(hostile=hostile)
        queue.drive(queue.submit([Batch(bytearray(p)) for p in made]))
        memories[hostile is None] = memory.bytes.copy()
    assert np.array_equal(memories[True], memories[False])


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_bad_packet_ends_the_queue(seen_before):
    told = []
    queue = new_queue(on_fault=told.append)
    memory, before, after = Memory(64), Told(), Told()
    good = packets.fence(memory.address, 1)
    bad = bytearray(packets.fence(memory.address + 4, 2))
    bad[3] = 0x80  # a reserved bit
    if seen_before:
        queue._traces.find(good + bad + good)
    queue.submit(batches(good), pending=before)
    end = queue.submit(batches(good, bytes(bad), good), pending=after)
    with pytest.raises(
        PacketError, match=r"FENCE packet .*DW0 has bit 31 (?s:.*)\nring test: size 65536, rptr 16, doorbell 64"
    ):
        queue.drive(end)
    assert memory.word(4) == 0
    assert before.error is None
    assert type(after.error) is PacketError
    assert queue.fault is after.error
    assert told == [queue.fault]
    for call in (lambda: queue.submit(batches(good)), lambda: queue.drive(end), lambda: queue.drive(end)):
        with pytest.raises(PacketError, match="DW0 has bit 31"):
            call()
    assert not queue.advance()
    assert queue.done == 32, "what lay before it was done"
    assert (before.times, after.times) == (1, 1)


def test_a_poll_past_its_deadline_ends_the_queue():
    queue, memory, told = new_queue(timeout_s=0.2), Memory(8), Told()
    end = queue.submit(batches(packets.poll_regmem(memory.address, 5, func=PollFunc.EQUAL)), pending=told)
    start = time.monotonic()
    with pytest.raises(
        DeadlineError, match=r"is late: it holds 0x0 and not 0x5 after 0\.\d s\nring test(?s:.*)0: PollRegMem\("
    ) as caught:
        queue.drive(end)
    assert 0.15 < time.monotonic() - start < 2
    assert type(told.error) is DeadlineError
    memory.set_word(5)
    with pytest.raises(DeadlineError):
        queue.submit(batches(packets.nop(1)))
    assert "is late" in str(caught.value)


@pytest.mark.parametrize("kind", [PeerLostError, MismatchError])
@pytest.mark.parametrize("waits", [True, False])
def test_a_check_can_end_a_wait(kind, waits):
    seen = []

    def check(address, expected, found):
        seen.append((address, expected, found))
        if len(seen) == 3:
            raise kind("no use waiting")

    queue, memory = new_queue(timeout_s=20, check=check), Memory(8)
    memory.set_word(1)
    end = queue.submit(batches(packets.poll_regmem(memory.address, 5, func=PollFunc.EQUAL)))
    start = time.monotonic()
    with pytest.raises(kind, match="no use waiting"):
        if waits:
            queue.drive(end)
        else:
            while time.monotonic() < start + 10:
                queue.advance()
    assert time.monotonic() - start < 5
    assert seen == [(memory.address, 5, 1)] * 3


def test_a_stalled_loop_has_a_deadline_on_the_thread_too():
    queue, memory, told = new_queue(timeout_s=0.2), Memory(8), Told()
    memory.set_word(3)
    queue.submit(batches(packets.atomic(memory.address, AtomicOp.CMPSWAP, 9, compare=4, loop=True)), pending=told)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="compare-and-swap"):
        while time.monotonic() < start + 3:
            queue.advance()
    assert type(told.error) is DeadlineError


def test_waiting_for_what_was_never_submitted():
    queue = new_queue()
    end = queue.submit(batches(packets.nop(2)))
    with pytest.raises(QueueError, match=f"waiting for index {end + 4}, which was never submitted\nring test"):
        queue.drive(end + 4)


def test_a_queue_that_is_failed_from_outside():
    queue, told = new_queue(), Told()
    queue.submit(batches(packets.nop(2)), pending=told)
    error = PeerLostError("gone")
    queue.close(error)
    assert told.error is error
    with pytest.raises(PeerLostError):
        queue.submit(batches(packets.nop(1)))
    late = Told()
    with pytest.raises(PeerLostError):
        queue.submit(batches(packets.nop(1)), pending=late)


# Who is told when -----------------------------------------------------------------------------------------------------


def test_pending_operations_are_told_in_order_and_once():
    queue, order = new_queue(), []
    pending = [Told(then=lambda i=i: order.append(i)) for i in range(10)]
    ends = [queue.submit(batches(packets.nop(1 + i)) if i % 3 else [], pending=p) for i, p in enumerate(pending)]
    queue.drive(max(ends))
    assert order == list(range(10))
    assert all(p.times == 1 and p.error is None for p in pending)


def test_nothing_to_do_is_done_at_once():
    queue, told = new_queue(), Told()
    assert queue.submit([], pending=told) == 0
    assert told.times == 1


def test_whoever_is_told_may_submit_more():
    queue, last = new_queue(), Told()
    memory = Memory(8)

    def more():
        queue.drive(queue.submit(batches(packets.fence(memory.address, 3)), pending=last))

    end = queue.submit(batches(packets.fence(memory.address, 1)), pending=Told(callbacks=more))
    queue.drive(end)
    assert last.times == 1
    assert memory.word() == 3


@pytest.mark.timeout(60)
def test_callbacks_run_without_a_lock_and_not_within_a_submission():
    """A callback wants what a submitter holds, who waits for room: none may wait for the other, and what a callback
    submits may not lie between two batches of one operation.
    """
    queue, order = new_queue(timeout_s=20, nbytes=1 << 12), threading.RLock()  # of operations, as a group has it
    thread = EngineThread([queue], keep_looking=False, name="test engine")
    log, inside, count = [], [], 300

    def callbacks():
        with order:
            log.append(bool(inside))

    try:
        for _ in range(count):
            with order:
                inside.append(1)
                queue.submit(batches(*[packets.nop(60)] * 4) * 3, pending=Told(callbacks=callbacks))
                inside.pop()
            thread.wake()
        deadline = time.monotonic() + 20
        while len(log) < count and time.monotonic() < deadline:
            time.sleep(1e-3)
    finally:
        thread.close()
    assert log == [False] * count


def test_callbacks_run_before_what_comes_next_is_waited_for():
    """What comes next may wait for something that a callback does."""
    queue, memory = new_queue(), Memory(8)
    poll = packets.poll_regmem(memory.address, 1, 0xFFFFFFFF, PollFunc.EQUAL)
    queue.submit(batches(packets.nop(1)), pending=Told(callbacks=lambda: memory.set_word(1)))
    queue.drive(queue.submit(batches(poll)))


@pytest.mark.timeout(60)
def test_an_operation_that_ends_while_it_is_submitted_is_told():
    """The engine's thread may be past the end of a submission before the submitter has said who waits for it."""
    queue = new_queue(timeout_s=20)
    thread = EngineThread([queue], keep_looking=True, name="test engine")
    thread.wake()
    try:
        for _ in range(1000):
            told = Told()
            queue.submit(batches(packets.nop(1)), pending=told)
            assert told.done.wait(10), "nobody was told"
            assert told.times == 1
    finally:
        thread.close()


def test_several_threads_drive_one_queue():
    queue, memory = new_queue(nbytes=1 << 14), Memory(8)
    failures = []

    def work(number):
        try:
            for _ in range(200):
                told = Told()
                end = queue.submit(batches(packets.atomic(memory.address, AtomicOp.ADD, 1)), pending=told)
                queue.drive(end)
                assert told.done.wait(10)
                assert told.times == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert memory.word() == 800


# The thread -----------------------------------------------------------------------------------------------------------


def test_the_thread_starts_when_it_is_needed_and_stops():
    queue, told = new_queue(), Told()
    thread = EngineThread([queue], keep_looking=False, name="test engine")
    assert "test engine" not in [t.name for t in threading.enumerate()]
    thread.close()
    thread = EngineThread([queue], keep_looking=False, name="test engine")
    queue.submit(batches(packets.nop(1)), pending=told)
    thread.wake()
    assert told.done.wait(10)
    assert "test engine" in [t.name for t in threading.enumerate()]
    time.sleep(0.05)  # idle
    later = Told()
    queue.submit(batches(packets.nop(1)), pending=later)
    thread.wake()
    assert later.done.wait(10)
    thread.close()
    thread.close()
    assert "test engine" not in [t.name for t in threading.enumerate()]


def test_a_thread_that_is_about_to_sleep_stops_too():
    """Whoever stops it says so, and wakes it, between its look for work and its sleep."""

    class Quiet:
        fault = hostile = None

        @property
        def idle(self):
            thread._stop = True
            thread._wake.set()
            return True

    thread = EngineThread([Quiet()], keep_looking=False, name="test engine")
    thread.wake()
    thread._thread.join(10)
    assert not thread._thread.is_alive()


def test_a_producer_without_wake_is_seen_by_a_thread_that_keeps_looking():
    queue, told = new_queue(), Told()
    thread = EngineThread([queue], keep_looking=True, name="test engine")
    thread.wake()
    time.sleep(0.05)
    queue.submit(batches(packets.nop(1)), pending=told)
    assert told.done.wait(10)
    thread.close()


@pytest.mark.parametrize("hostile", [None, random.Random(1)])
def test_a_queue_that_waits_does_not_hold_up_another(hostile):
    memory, counter = Memory(8), Memory(8)
    blocked, free = new_queue(timeout_s=20, hostile=hostile), new_queue(timeout_s=20, hostile=hostile)
    thread = EngineThread([blocked, free], keep_looking=False, name="test engine")
    one, others = Told(), [Told() for _ in range(50)]
    blocked.submit(batches(packets.poll_regmem(memory.address, 1, func=PollFunc.EQUAL)), pending=one)
    thread.wake()
    for told in others:
        free.submit(batches(packets.atomic(counter.address, AtomicOp.ADD, 2)), pending=told)
        thread.wake()
        assert told.done.wait(10)
    assert counter.word() == 100
    assert not one.done.is_set()
    memory.set_word(1)
    assert one.done.wait(10)
    thread.close()


def test_a_queue_that_fails_does_not_end_the_thread():
    memory, told, other = Memory(8), Told(), Told()
    failing, fine = new_queue(timeout_s=0.1), new_queue()
    thread = EngineThread([failing, fine], keep_looking=False, name="test engine")
    failing.submit(batches(packets.poll_regmem(memory.address, 1, func=PollFunc.EQUAL)), pending=told)
    thread.wake()
    assert told.done.wait(10)
    assert type(told.error) is DeadlineError
    fine.submit(batches(packets.nop(1)), pending=other)
    thread.wake()
    assert other.done.wait(10)
    assert other.error is None
    thread.close()


def test_large_copies_run_without_the_gil():
    source, target = Memory(32 << 20), Memory(32 << 20)
    queue, told, turns = new_queue(), Told(), 0
    thread = EngineThread([queue], keep_looking=False, name="test engine")
    queue.submit(
        batches(*[packets.copy_linear(dst=target.address, src=source.address, nbytes=32 << 20)] * 20), pending=told
    )
    thread.wake()
    while not told.done.is_set():
        turns += 1
        time.sleep(0)
    thread.close()
    assert turns > 20, f"this thread got {turns} turns during the copies"


def test_memory_at_any_address_can_be_named():
    buffer = ctypes.create_string_buffer(b"hello, engine", 16)
    target = Memory(16)
    queue = new_queue()
    queue.drive(queue.submit(batches(packets.copy_linear(dst=target.address, src=ctypes.addressof(buffer), nbytes=13))))
    assert target.bytes[:13].tobytes() == b"hello, engine"
