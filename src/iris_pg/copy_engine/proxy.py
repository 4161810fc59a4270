"""A copy engine for GPUs that take no packets from user space: a thread of the host reads packets out of rings and
tells streams to do what they say. The bytes are moved by the GPU's copy engines; no multiprocessor moves any.

A queue is a ring and a stream. Packets are begun in order, and a stream does one thing after another. So a read pointer
that has moved on says that packets were begun, not that they have landed; what a kernel waits for in a quiet is written
by the stream. A poll is the thread's: it looks at the word now and then, and begins what follows once it holds. So no
stream ever waits, every poll has its deadline, and what is on a stream comes to an end.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Protocol

from iris_pg.copy_engine import decoded as d
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import DEAD, Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.errors import IrisError, PacketError
from iris_pg.platforms.atomics import atomics


class Stream(Protocol):
    """What a queue tells its stream. All but the last two return at once."""

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy bytes."""

    def copy_2d(self, dst: int, src: int, width_bytes: int, rows: int, dst_pitch: int, src_pitch: int) -> None:
        """Copy rows, a pitch apart."""

    def fill(self, dst: int, value: int, unit_bytes: int, nbytes: int) -> None:
        """Fill with bytes or 32-bit words."""

    def write(self, address: int, value: int, width_bytes: int) -> None:
        """Write a word of 4 or 8 bytes, after all that was told before has landed."""

    def atomic(self, op: str, address: int, operand: int, compare: int, width_bytes: int) -> None:
        """Do an atomic operation, an AtomicOp by name, after all that was told before has landed."""

    def read(self, address: int) -> int:
        """Return a 32-bit word of the GPU's memory as it is now; beside the stream, not behind it."""

    def synchronize(self) -> None:
        """Return when all has been done that was told."""


class Platform(Protocol):
    """What a proxy needs of the GPU."""

    def begin(self) -> None:
        """Make the GPU's context the calling thread's."""

    def stream(self) -> Stream:
        """Return a stream of its own."""

    def register(self, address: int, nbytes: int) -> Any:
        """Let the GPU see memory of the host; its ``shift`` is what to add to an address, ``close()`` ends it."""


class ProxyQueue(Queue):
    """A ring that kernels write into, and the stream that does what it says. Only a :class:`ProxyThread` executes it.

    Args:
        ring: where packets are written, in memory of the host that the GPU sees.
        patience: how polls wait.
        stream: the stream.
        cached_wptr: address, as the GPU sees it, of how far kernels have reserved.
        answers: address of what a quiet waits for, which is memory of the host.
    """

    def __init__(self, ring: Ring, patience: Patience, stream: Stream, cached_wptr: int, answers: int) -> None:
        super().__init__(ring, patience)
        self.stream, self._cached_wptr, self._answers = stream, cached_wptr, answers
        self._execute = {
            d.CopyLinear: self._begin_copy,
            d.CopySubWindow: self._begin_window,
            d.Fence: self._begin_fence,
            d.PollRegMem: self._look_at,
            d.Atomic: self._begin_atomic,
            d.ConstFill: self._begin_fill,
            d.Trap: self._refuse,
            d.Timestamp: self._refuse,
        }

    def fail(self, error: BaseException) -> None:
        """As in :class:`Queue`; kernels that wait for the queue go on too."""
        if self.fault is None:
            self.stream.write(self._cached_wptr, DEAD, 8)
        super().fail(error)

    def _begin_copy(self, p: d.CopyLinear, wait: bool) -> bool:
        self.stream.copy(p.dst, p.src, p.nbytes)
        return True

    def _begin_window(self, p: d.CopySubWindow, wait: bool) -> bool:
        for z in range(p.n_slices):
            self.stream.copy_2d(
                p.dst + (p.dst_z + z) * p.dst_slice_pitch_bytes + p.dst_y * p.dst_pitch_bytes + p.dst_x,
                p.src + (p.src_z + z) * p.src_slice_pitch_bytes + p.src_y * p.src_pitch_bytes + p.src_x,
                *(p.width_bytes, p.n_rows, p.dst_pitch_bytes, p.src_pitch_bytes),
            )
        return True

    def _begin_fence(self, p: d.Fence, wait: bool) -> bool:
        self.stream.write(p.address, p.value, 4)
        return True

    def _begin_fill(self, p: d.ConstFill, wait: bool) -> bool:
        self.stream.fill(p.address, p.value & 0xFF if p.unit_bytes == 1 else p.value, p.unit_bytes, p.nbytes)
        return True

    def _begin_atomic(self, p: d.Atomic, wait: bool) -> bool:
        if p.loop:
            raise PacketError(f"{p}: a stream does not repeat an operation until it succeeds")
        if p.op == d.Operation.SWAP and p.address == self._answers:
            self.stream.write(p.address, p.operand, p.width_bytes)  # of one writer: no atomic is needed
        else:
            self.stream.atomic(p.op.name, p.address, p.operand, p.compare, p.width_bytes)
        return True

    def _refuse(self, p: d.Trap | d.Timestamp, wait: bool) -> bool:
        raise PacketError(f"{p}: a stream has no such operation")

    def _look_at(self, p: d.PollRegMem, wait: bool) -> bool:
        if p.gives_up:
            raise PacketError(f"{p}: polls of a proxy do not give up")
        seen = self.stream.read(p.address) & p.mask
        holds = {
            d.Comparison.ALWAYS: True,
            d.Comparison.LESS: seen < p.reference,
            d.Comparison.LESS_EQUAL: seen <= p.reference,
            d.Comparison.EQUAL: seen == p.reference,
            d.Comparison.NOT_EQUAL: seen != p.reference,
            d.Comparison.GREATER_EQUAL: seen >= p.reference,
            d.Comparison.GREATER: seen > p.reference,
        }[p.func]
        if holds:
            return True
        now = time.monotonic()
        if self._stalled_at != self._at:
            self._stalled_at, self._stalled_since = self._at, now
        self.patience.give_up(p.address, p.reference, seen, now - self._stalled_since)
        return False


class ProxyThread:
    """The thread that executes queues: it spins while there is something to do, and for a while after, so that a packet
    is begun within microseconds; then it looks only now and then.

    Args:
        platform: whose ``begin()`` is called in the thread first, to make the GPU's context current.
        name: of the thread.
    """

    _SPIN_S, _NAP_S, _LONGEST_NAP_S = 5e-3, 20e-6, 1e-3
    # Looks without the GIL before Python runs again, about 100 us: another thread that wants the GIL takes a while to
    # wake, and does not get it if this one has it again by then.
    _TURNS = 1 << 16

    def __init__(self, platform: Platform, name: str) -> None:
        self._begin = platform.begin
        self._queues: list[ProxyQueue] = []
        self._lock = threading.Lock()
        self._words = self._seen = (ctypes.c_uint64 * 0)()
        self._stop = False
        self._await = atomics().await_change
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def add(self, queue: ProxyQueue) -> None:
        """Execute ``queue`` too; starts the thread the first time."""
        with self._lock:
            self._queues = [*self._queues, queue]
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        self._stop = True
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _loop(self) -> None:
        self._begin()
        busy_at, nap = time.monotonic(), self._NAP_S
        while not self._stop:
            queues = self._queues
            ran = waits = False
            for queue in queues:
                if queue.idle or queue.fault:
                    continue
                try:
                    ran |= queue.advance()
                except IrisError:
                    pass  # the queue keeps it as its fault
                waits |= not queue.idle
            if ran:
                busy_at, nap = time.monotonic(), self._NAP_S
            elif waits:  # for a poll, or for whoever holds the queue's lock
                time.sleep(0)
            elif self._changed(queues):
                continue
            elif time.monotonic() - busy_at > self._SPIN_S:
                time.sleep(nap)
                nap = min(2 * nap, self._LONGEST_NAP_S)

    def _changed(self, queues: list[ProxyQueue]) -> bool:
        """Wait a moment for a doorbell; return whether one was rung."""
        if len(self._words) != len(queues):
            self._words = (ctypes.c_uint64 * len(queues))(*(queue.ring.context.doorbell for queue in queues))
            self._seen = (ctypes.c_uint64 * len(queues))()
        for i, queue in enumerate(queues):
            self._seen[i] = queue.ring.doorbell() if queue.fault else queue.done
        words, seen = ctypes.addressof(self._words), ctypes.addressof(self._seen)
        return self._await(words, seen, len(queues), self._TURNS // len(queues)) < len(queues)


__all__ = ["Platform", "ProxyQueue", "ProxyThread", "Stream"]
