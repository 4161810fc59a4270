"""The ring: a state machine against a model, several producers, and what happens when one of them stops."""

import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from iris_pg.copy_engine import packets
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Patch, Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.copy_engine.translate import Batch
from iris_pg.errors import ArgumentError, DeadlineError, QueueError
from iris_pg.platforms.atomics import atomics

SIZE = 4096
FIRST = 1000  # contexts of TRAPs from here on; low ones have a meaning


def batch(context: int, n_dwords: int = 2) -> bytes:
    """A TRAP, which the consumer reports, and NOPs up to ``n_dwords`` in total."""
    return packets.trap(FIRST + context) + (packets.pad(4 * (n_dwords - 2)) if n_dwords > 2 else b"")


def new_queue(nbytes=SIZE, timeout_s=5.0, **keywords):
    """Return a queue and the list in which the contexts of its TRAP packets appear as they are executed."""
    executed = []
    on_trap = lambda context: executed.append(context - FIRST)  # noqa: E731
    queue = Queue(Ring(nbytes, "test"), Patience(timeout_s), on_trap=on_trap, **keywords)
    return queue, executed


class RingMachine(RuleBasedStateMachine):
    """Submits and executes in any order; the model is a list of (context, start, end)."""

    @initialize()
    def make(self):
        self.queue, self.executed = new_queue()
        self.ring = self.queue.ring
        self.submitted = []
        self.end = 0  # of everything submitted
        self.done = 0  # of everything executed

    def place(self, nbytes):
        """Return (start, end) of the next submission, pads included."""
        left = SIZE - self.end % SIZE
        start = self.end if nbytes <= left else self.end + left
        return start, start + nbytes

    @rule(n_dwords=st.one_of(st.integers(2, 40), st.integers(2, SIZE // 16), st.sampled_from([2, 3, SIZE // 16])))
    def submit(self, n_dwords):
        start, end = self.place(4 * n_dwords)
        context = len(self.submitted)
        if end - self.done >= SIZE:  # strict: a ring that is completely full looks empty
            before = self.ring.dump()
            with pytest.raises(
                QueueError, match=r"the ring is full: no room for \d+ bytes(?s:.*)ring test: size 4096, rptr"
            ):
                self.ring.submit(batch(context, n_dwords), deadline=time.monotonic() - 1)
            assert self.ring.dump() == before, "a submission that failed has moved an index"
            return
        assert self.ring.submit(batch(context, n_dwords), deadline=time.monotonic() + 5) == end
        self.submitted.append((context, start, end))
        self.end = end

    @precondition(lambda self: self.done < self.end)
    @rule(share=st.floats(0.01, 1))
    def execute_up_to(self, share):
        index = self.done + max(4, int((self.end - self.done) * share) // 4 * 4)
        self.queue.drive(index)
        assert index <= self.queue.done <= self.end
        self.done = self.queue.done

    @rule()
    def execute_what_there_is(self):
        ran = self.queue.advance()
        assert ran == (self.done < self.end)
        self.done = self.end

    @rule(nbytes=st.sampled_from([0, 2, 6, SIZE // 4 + 4, SIZE]))
    def submit_nonsense(self, nbytes):
        with pytest.raises(ArgumentError, match=f"{nbytes} bytes of packets; a batch is whole dwords, at most 1024"):
            self.ring.submit(bytes(nbytes), deadline=time.monotonic() + 5)

    @invariant()
    def indices_are_those_of_the_model(self):
        if not hasattr(self, "ring"):
            return
        assert self.ring.doorbell() == self.ring.committed() == self.end
        assert self.ring.retired() == self.queue.done == self.done
        assert self.queue.idle == (self.done == self.end)
        # A TRAP is the first packet of its batch.
        assert self.executed == [context for context, start, _ in self.submitted if start < self.done]


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_pads_fill_the_rest_of_the_buffer():
    for first in range(2, 60, 7):
        queue, executed = new_queue()
        ring = queue.ring
        for i in range(3):
            ring.submit(batch(i, 256), deadline=time.monotonic() + 5)
        queue.drive(ring.doorbell())
        ring.submit(batch(3, 256 - first), deadline=time.monotonic() + 5)
        end = ring.submit(batch(4, first + 1), deadline=time.monotonic() + 5)
        assert end == SIZE + 4 * (first + 1), "it begins at the start of the buffer"
        queue.drive(end)
        assert executed == [0, 1, 2, 3, 4]


def test_a_pad_of_more_than_one_nop():
    """A NOP has 14 bits for its length: the end of a large ring needs several."""
    queue, executed = new_queue(1 << 20)
    ring = queue.ring
    for i in range(3):
        ring.submit(batch(i, 1 << 16), deadline=time.monotonic() + 5)
    queue.drive(ring.doorbell())
    ring.submit(batch(3, (1 << 16) - 40_000), deadline=time.monotonic() + 5)
    end = ring.submit(batch(4, 1 << 16), deadline=time.monotonic() + 5)
    assert end == (1 << 20) + (1 << 18)
    queue.drive(end)
    assert executed == [0, 1, 2, 3, 4]


def test_patches_are_addresses_plus_addends():
    ring = Ring(SIZE)
    ring.submit(bytes(64), [Patch(8, 1, 5), Patch(24, 0, 0)], [0x1000, 0x2000_0000_0000], deadline=time.monotonic() + 5)
    words = bytes(ring.view[:64])
    assert int.from_bytes(words[8:16], "little") == 0x2000_0000_0005
    assert int.from_bytes(words[24:32], "little") == 0x1000
    assert not any(words[:8] + words[16:24] + words[32:])


@pytest.mark.parametrize("nbytes", [0, 100, 2048, 5000, -4096])
def test_a_ring_has_a_power_of_two(nbytes):
    with pytest.raises(ArgumentError, match="power of two, at least 4096"):
        Ring(nbytes)


def test_the_context_is_where_the_indices_are():
    ring, ops = Ring(SIZE), atomics()
    ring.submit(batch(1, 8), deadline=time.monotonic() + 5)
    assert bytes(ring.view[:8]) == packets.trap(FIRST + 1)
    assert ops.load32(ring.context.queue_buffer) == 6, "the first packet is a TRAP"
    words = [ops.load64(address) for address in ring.context[1:]]
    assert words == [0, 32, 32, 32, 32]  # rptr, wptr, doorbell, cached_wptr, committed_wptr
    ring.retire(32)
    assert ops.load64(ring.context.rptr) == 32
    assert len({address // 64 for address in ring.context[1:]}) == 5, "each index has a cache line of its own"


def test_nothing_runs_before_the_doorbell():
    """The write index alone is no permission: packets behind it may not be there yet."""
    queue, executed = new_queue(timeout_s=0.1)
    ring, ops = queue.ring, atomics()
    ring.submit(batch(1), deadline=time.monotonic() + 5)
    queue.drive(8)
    ring.view[8:16] = packets.trap(FIRST + 2)
    for index in (ring.context.cached_wptr, ring.context.wptr, ring.context.committed_wptr):
        ops.store64(index, 16)
        assert not queue.advance()
    with pytest.raises(
        QueueError, match=r"waiting for index 16, which was never submitted\nring test: .*doorbell 8, wptr 16"
    ):
        queue.drive(16)
    assert executed == [1]
    ops.store64(ring.context.doorbell, 16)
    queue.drive(16)
    assert executed == [1, 2]


def test_a_producer_that_stops_between_reserving_and_committing():
    ring = Ring(SIZE, "stalled")
    atomics().store64(ring.context.cached_wptr, 64)  # someone reserved 64 bytes, and never comes back
    start = time.monotonic()
    with pytest.raises(
        QueueError, match=r"a producer before index 64 reserved .* did not commit\nring stalled: .*reserved 72"
    ):
        ring.submit(batch(1), deadline=start + 0.1)
    assert 0.09 < time.monotonic() - start < 2
    assert ring.doorbell() == 0


def test_a_full_ring_with_a_stopped_engine():
    ring = Ring(SIZE, "full")
    for i in range(3):
        ring.submit(batch(i, 256), deadline=time.monotonic() + 5)
    start = time.monotonic()
    with pytest.raises(
        QueueError, match=r"the ring is full: no room for 1024 bytes before the deadline\nring full: size 4096, rptr 0"
    ):
        ring.submit(batch(3, 256), deadline=start + 0.1)
    assert 0.09 < time.monotonic() - start < 2
    # A consumer that comes to life in time is enough.
    threading.Timer(0.05, ring.retire, (1024,)).start()
    ring.submit(batch(3, 255), deadline=time.monotonic() + 5)


def test_a_full_ring_is_drained_by_the_submitter():
    queue, executed = new_queue()
    ends = [queue.submit([Batch(bytearray(batch(i, 100)))]) for i in range(100)]
    queue.drive(ends[-1])
    assert executed == list(range(100))
    many = [Batch(bytearray(batch(i, 200))) for i in range(100, 130)]
    queue.drive(queue.submit(many))
    assert executed == list(range(130))


def test_a_full_ring_whose_first_packet_waits_for_ever():
    queue, executed = new_queue(timeout_s=0.2)
    word = queue.ring.context.queue_buffer + SIZE - 64  # any memory that stays 0
    queue.submit([Batch(bytearray(packets.poll_regmem(word, 1, func=packets.PollFunc.EQUAL)))])
    with pytest.raises((QueueError, DeadlineError), match="ring test"):
        for i in range(10):
            queue.submit([Batch(bytearray(batch(i, 200)))])
    assert executed == []


@pytest.mark.parametrize("hostile_yields", [False, True])
def test_several_producers(hostile_yields):
    queue, executed = new_queue(1 << 13, timeout_s=30)
    n_threads, n_each = 4, 150
    thread = EngineThread([queue], keep_looking=True, name="test engine")
    thread.wake()
    failures = []

    def produce(number):
        try:
            for i in range(n_each):
                queue.ring.submit(batch(number << 16 | i, 2 + (i * 7 + number) % 50), deadline=time.monotonic() + 30)
                if hostile_yields and i % 5 == number:
                    time.sleep(0)
        except BaseException as error:
            failures.append(error)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(n_threads)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(60)
    end = queue.ring.committed()
    queue.drive(end)
    thread.close()
    assert not failures, failures
    assert queue.done == end == queue.ring.retired()
    for number in range(n_threads):
        assert [c & 0xFFFF for c in executed if c >> 16 == number] == list(range(n_each)), "in order, each once"
    assert len(executed) == n_threads * n_each


def test_several_producers_that_drain_the_ring_themselves():
    """Nobody else executes: whoever finds the ring full does, and may meet what another has reserved and not
    written.
    """
    queue, executed = new_queue(timeout_s=30)
    failures = []

    def produce(number):
        try:
            for i in range(150):
                queue.submit([Batch(bytearray(batch(number << 16 | i, 2 + (i * 7 + number) % 50)))])
        except BaseException as error:
            failures.append(error)

    producers = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
    for producer in producers:
        producer.start()
    for producer in producers:
        producer.join(60)
    assert not failures, failures
    queue.drive(queue.ring.doorbell())
    for number in range(4):
        assert [c & 0xFFFF for c in executed if c >> 16 == number] == list(range(150))
