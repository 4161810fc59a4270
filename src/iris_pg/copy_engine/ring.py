"""A ring of copy-engine packets in memory: how producers write it and what a consumer may read.

Indices are 64-bit byte counts that only grow; the place in the buffer is ``index mod size``. A producer reserves with
one compare-and-swap on ``cached_wptr``, writes its packets, and commits in the order of reservations: ``wptr``, then
the doorbell, then ``committed_wptr``. A consumer reads up to the doorbell, never to ``wptr``, and publishes ``rptr``.
Packets never straddle the end of the buffer: the rest is filled with NOPs. The ring is never completely full:
``end - rptr < size``.

Producers may be several threads here, and kernels that were given :attr:`Ring.context` (device/sdma.py); they see the
same words. What else kernels need lies behind ``committed_wptr``: see :class:`Line` and :class:`Answers`. A ring whose
``cached_wptr`` has bit 63 is dead: nobody reserves in it any more.
Source for the protocol: AMD ROCr ``core/runtime/amd_blit_sdma.cpp`` (AcquireWriteAddress, ReleaseWriteAddress).
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from iris_pg.copy_engine.packets import pad
from iris_pg.errors import ArgumentError, QueueError
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import RING_FULL, atomics

_LINE = 64  # bytes between two indices: the producer's and the consumer's lie in different cache lines
_ADDRESS = struct.Struct("<Q")
DEAD = 1 << 63


class Patch(NamedTuple):
    """An address to be filled in: at ``at`` bytes into the packets, binding number ``binding`` plus ``addend``."""

    at: int
    binding: int
    addend: int


class Context(NamedTuple):
    """Addresses that a producer needs, in the order of the device context: six 64-bit words a queue."""

    queue_buffer: int
    rptr: int
    wptr: int
    doorbell: int
    cached_wptr: int
    committed_wptr: int


class Line(IntEnum):
    """64-bit words from ``committed_wptr`` on, by number: what producers that are kernels share. Only kernels of one
    GPU, or threads of one process, access them, so atomics work on them.
    """

    COMMITTED = 0
    RING_BYTES = 1
    LIMIT_NS = 2  # deadline of every wait
    ANSWERS = 3  # address of the answers
    READ = 4  # the greatest rptr that any of them has seen
    LANDED = 5  # the greatest index that any of them has seen in the answers
    FENCES = 6  # how many there were


class Answers(IntEnum):
    """32-bit words that the engine and kernels write for each other and for the host; none is accessed atomically."""

    LANDED = 0  # 64 bits: index up to which packets have landed; the engine writes it for a quiet
    ERROR = 2  # a RingError: a kernel has given up


class RingError(IntEnum):
    """Why a kernel has given up a ring."""

    FULL = 1
    STALLED = 2
    NOT_LANDED = 3
    NO_FLAG = 4


TOLD = {
    RingError.FULL: "found no room in the ring before the deadline: the engine does not go on",
    RingError.STALLED: "waited in vain for a producer that reserved room before it and did not commit",
    RingError.NOT_LANDED: "waited in vain for its transfers to land",
    RingError.NO_FLAG: "waited in vain for a flag from that rank",
}


def line_of(nbytes: int, limit_s: float, answers: int) -> dict[Line, int]:
    """Return the words of a ring's :class:`Line` that do not start at 0."""
    return {Line.RING_BYTES: nbytes, Line.LIMIT_NS: min(int(limit_s * 1e9), (1 << 62)), Line.ANSWERS: answers}


class Ring:
    """A ring of ``nbytes`` (a power of two, at least 4096) in this process's memory.

    Args:
        nbytes: size of the buffer in bytes.
        name: for messages.
        limit_s: deadline of waits in kernels that write into it, in seconds.

    Attributes:
        address, memory_bytes: of its memory, whole pages: indices and buffer.
    """

    def __init__(self, nbytes: int, name: str = "queue", limit_s: float = 600.0) -> None:
        if nbytes < 4096 or nbytes & (nbytes - 1):
            raise ArgumentError(f"a ring of {nbytes} bytes; its size is a power of two, at least 4096")
        self.nbytes, self.name = nbytes, name
        self.largest_batch = nbytes // 4  # bytes; so that two batches and a pad always fit
        control = cpu.page_up(6 * _LINE)
        self._memory = cpu.private_memory(control + nbytes)
        self.address, self.memory_bytes = self._memory.address, control + nbytes
        base = self.address
        self.context = Context(base + control, *(base + i * _LINE for i in range(5)))
        self.view = memoryview((ctypes.c_char * nbytes).from_address(base + control)).cast("B")
        ops = atomics()
        self._load, self._store, self._reserve, self._commit = ops.load64, ops.store64, ops.reserve, ops.commit
        self._reserve_at = (self.context.cached_wptr, self.context.rptr, nbytes)
        self._commit_at = (self.context.wptr, self.context.doorbell, self.context.committed_wptr)
        self.answers = base + 5 * _LINE
        self._die = ops.rmw["or", 8]
        for word, value in line_of(nbytes, limit_s, self.answers).items():
            self._store(self.context.committed_wptr + 8 * word, value)

    # The consumer's side ----------------------------------------------------------------------------------------------

    def doorbell(self) -> int:
        """Return the index up to which a consumer may read."""
        return self._load(self.context.doorbell)

    def retire(self, index: int) -> None:
        """Publish that everything before ``index`` has been executed."""
        self._store(self.context.rptr, index)

    def retired(self) -> int:
        """Return the index up to which packets have been executed. Compare with >=: others may have submitted more."""
        return self._load(self.context.rptr)

    def committed(self) -> int:
        """Return the index up to which packets have been committed."""
        return self._load(self.context.committed_wptr)

    def error(self) -> str | None:
        """Return why a kernel has given up the ring, in words, if one has."""
        code = self._load(self.answers + 4 * Answers.ERROR) & 0xFFFFFFFF
        return f"a kernel {TOLD[RingError(code)]}\n{self.dump()}" if code else None

    def refuse(self) -> None:
        """Let nobody reserve any more; kernels that wait for the ring go on."""
        self._die(self.context.cached_wptr, DEAD)

    @property
    def is_dead(self) -> bool:
        """Whether :meth:`refuse` was called, or a kernel has given up."""
        return bool(self._load(self.context.cached_wptr) & DEAD)

    # The producer's side ----------------------------------------------------------------------------------------------

    def submit(
        self,
        packets: bytes | bytearray,
        patches: Sequence[Patch] = (),
        bindings: Sequence[int] = (),
        *,
        deadline: float,
        make_room: Callable[[int], None] | None = None,
    ) -> int:
        """Write whole packets, ring the doorbell and return the index of their end.

        Args:
            packets: encoded packets, at most :attr:`largest_batch` bytes.
            patches: addresses to be written into them.
            bindings: what the patches refer to.
            deadline: ``time.monotonic()`` after which a full ring or a stalled producer is an error.
            make_room: called while the ring is full, with the index that must be retired first; without it, wait.

        Raises:
            QueueError: the ring stayed full, or an earlier producer never committed; with a dump of the indices.
        """
        n = len(packets)
        if n == 0 or n % 4 or n > self.largest_batch:
            raise ArgumentError(f"{n} bytes of packets; a batch is whole dwords, at most {self.largest_batch} bytes")
        view, size = self.view, self.nbytes
        while (base := self._reserve(*self._reserve_at, n)) == RING_FULL:
            self._await_room(n, deadline, make_room)
        at = base & (size - 1)
        start = base
        if at + n > size:  # packets do not straddle the end of the buffer
            view[at:] = pad(size - at)
            start, at = base + size - at, 0
        view[at : at + n] = packets
        for patch, binding, addend in patches:
            _ADDRESS.pack_into(view, at + patch, bindings[binding] + addend)
        # 1. The packets are written. 2. wptr, then the doorbell, with release order: who sees the doorbell sees the
        # packets. 3. committed_wptr last, so the next producer rings after this one.
        end = start + n
        while not self._commit(*self._commit_at, base, end):
            if time.monotonic() > deadline:
                raise QueueError(f"a producer before index {base} reserved room and did not commit\n{self.dump()}")
            time.sleep(0)
        return end

    def _await_room(self, n: int, deadline: float, make_room: Callable[[int], None] | None) -> None:
        if time.monotonic() > deadline:
            raise QueueError(f"the ring is full: no room for {n} bytes before the deadline\n{self.dump()}")
        if make_room:
            base = self._load(self.context.cached_wptr)
            at = base & (self.nbytes - 1)
            end = base + n + (self.nbytes - at if at + n > self.nbytes else 0)
            make_room(end - self.nbytes + 1)
        else:
            time.sleep(20e-6)
        if self.is_dead:
            raise QueueError(f"the ring takes nothing more: {self.error() or self.dump()}")

    def dump(self) -> str:
        """Return the indices of the ring in words, for messages."""
        load, c = self._load, self.context
        return (
            f"ring {self.name}: size {self.nbytes}, rptr {load(c.rptr)}, doorbell {load(c.doorbell)}, wptr "
            f"{load(c.wptr)}, "
            f"committed {load(c.committed_wptr)}, reserved {load(c.cached_wptr)}"
        )
