"""The software copy engine: executes the SDMA packets of a ring on a CPU.

It decodes the very dwords that packets.py, or a device-side producer, wrote; it stops at the doorbell; it honours
polls; packets of one queue run in order. Whoever needs a packet done drives the queue: the caller of a synchronous
operation executes it inline, and a thread, started on first need, executes what was submitted asynchronously. Copies of
more than 32 KiB run without the GIL.

Every poll has a deadline. A bad packet, an unsatisfied poll or a stalled ring is an error with a dump of the queue, and
the queue stays failed: its later submissions raise the same.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from iris_pg.completion import Completion
from iris_pg.copy_engine import decoded as d
from iris_pg.copy_engine.decoder import decode
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.copy_engine.ring import Ring
from iris_pg.copy_engine.trace import LONGEST, Trace, Traces
from iris_pg.copy_engine.translate import Batch
from iris_pg.copy_engine.trap import PULL, REDUCE, Pull, Reduction, requested
from iris_pg.errors import DeadlineError, IrisError, PacketError, QueueError
from iris_pg.platforms.atomics import atomics

_SHORT = 32 << 10  # bytes; a copy that takes less time than giving the GIL away and back
_FULL = 0xFFFFFFFF
_LONGEST_ANNEX = 4 + 32 + 8 * 1024  # bytes of a NOP that asks for a reduction of 1024 sources
_RMW = {
    d.Operation.SWAP: "xchg",
    d.Operation.ADD: "add",
    d.Operation.SUB: "sub",
    d.Operation.SMIN: "min",
    d.Operation.UMIN: "umin",
    d.Operation.SMAX: "max",
    d.Operation.UMAX: "umax",
    d.Operation.AND: "and",
    d.Operation.OR: "or",
    d.Operation.XOR: "xor",
    d.Operation.INC: "uinc_wrap",  # 0 when old >= operand, else old + 1: what LLVM calls uinc_wrap
    d.Operation.DEC: "udec_wrap",  # operand when old is 0 or > operand, else old - 1
}
_memmove_address = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_move_arguments = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
_move_with_gil = ctypes.PYFUNCTYPE(*_move_arguments)(_memmove_address)
_move_without_gil = ctypes.CFUNCTYPE(*_move_arguments)(_memmove_address)


def move(dst: int, src: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes between two addresses."""
    (_move_with_gil if nbytes <= _SHORT else _move_without_gil)(dst, src, nbytes)


class Queue:
    """One ring and what executes it.

    Args:
        ring: where packets are written.
        patience: how polls wait.
        hostile: seeded generator; when given, copies are split and reordered and packets delayed at random.
        on_trap: called with the context of a TRAP packet.
        read: (rank, dst, src, nbytes) -> copies from the memory of another rank's process, for PULL traps.
        pids: of these processes, by rank; what is seen often then needs no ``read`` unless it fails.
        halved_bytes: size from which on it needs ``read`` all the same, if any.
        on_fault: called once, with what made the queue failed.
    """

    def __init__(
        self,
        ring: Ring,
        patience: Patience,
        hostile: random.Random | None = None,
        on_trap: Callable[[int], None] | None = None,
        on_fault: Callable[[BaseException], None] | None = None,
        read: Callable[[int, int, int, int], None] | None = None,
        pids: Sequence[int] = (),
        halved_bytes: int | None = None,
    ) -> None:
        self.ring, self.patience, self.hostile, self.on_trap, self._read = ring, patience, hostile, on_trap, read
        self._on_fault = on_fault
        self.fault: BaseException | None = None
        self._at = 0  # index of the next packet to execute; only moves under the lock
        self._lock = threading.RLock()  # re-entrant: a finalizer that closes the queue may run anywhere
        self._pending: deque[tuple[int, Completion]] = deque()
        self._callbacks: deque[Callable[[], None]] = deque()  # of what has ended, to be called without any lock
        self._stalled_at, self._stalled_since, self._looked = -1, 0.0, 0.0  # the poll at which advance() last stopped
        self._mask = ring.nbytes - 1
        self._annex = b""  # payload of the last NOP; a copy, as the next packet may be executed after it is overwritten
        ops = atomics()
        self._load32, self._store32, self._rmw, self._copy_rows = ops.load32, ops.store32, ops.rmw, ops.copy_rows
        self._load64 = ops.load64
        self._cas, self._spin = {4: ops.cas32, 8: ops.cas64}, ops.spin32
        self._store64, self._native = ops.store64, ops.execute
        self._traces = Traces(pids, halved_bytes)
        self._execute: dict[type, Callable[..., bool]] = {
            d.CopyLinear: self._copy,
            d.CopySubWindow: self._copy_window,
            d.Fence: self._fence,
            d.PollRegMem: self._poll,
            d.Atomic: self._atomic,
            d.ConstFill: self._fill,
            d.Trap: self._trap,
            Reduction: self._reduce,
            Pull: self._pull,
            d.Timestamp: self._timestamp,
        }

    # Producers --------------------------------------------------------------------------------------------------------

    def submit(self, batches: Sequence[Batch], bindings: Sequence[int] = (), pending: Completion | None = None) -> int:
        """Write the batches into the ring and return the index of their end; ``pending`` is told when it is reached.

        A ring without room is drained inline. Raises what the queue failed with, if it has.
        """
        end = 0
        for batch in batches:
            if self.fault:
                raise self.fault
            deadline = time.monotonic() + self.patience.timeout_s
            end = self.ring.submit(batch.packets, batch.patches, bindings, deadline=deadline, make_room=self._make_room)
        if pending:
            self._pending.append((end, pending))
            self._settle()
        return end

    def _make_room(self, until: int) -> None:
        until = min(until, self.ring.doorbell())
        if self._at < until:
            self._step(until)  # and no callbacks: the submitter's operation lies in the ring in part
        else:
            # Another producer may have reserved what lies before and not committed it yet, or another thread has
            # executed it and not retired it yet; the ring looks again.
            time.sleep(20e-6)

    def _settle(self) -> None:
        """Tell what is pending and over, after it was added or the lock was given back.

        1. A submitter adds to `_pending` after it has rung the doorbell, so its packets may have been executed before.
        2. So it looks here. 3. If it does not get the lock, whoever holds it looks here after giving it back, and so
        sees the addition.
        """
        while self._pending and (self.fault or self._pending[0][0] <= self._at):
            if not self._lock.acquire(blocking=False):
                return
            try:
                if self.fault:
                    self.fail(self.fault)
                elif self._pending and self._pending[0][0] <= self._at:
                    self._end_first(None)
            finally:
                self._lock.release()

    def _end_first(self, error: BaseException | None) -> None:
        callbacks = self._pending.popleft()[1].finished(error)
        if callbacks:
            self._callbacks.append(callbacks)

    def _call(self) -> None:
        """Run the callbacks of operations that have ended. They are the user's: they may start operations here and in
        other groups, and wait for them.
        """
        while self._callbacks:
            try:
                callbacks = self._callbacks.popleft()
            except IndexError:
                return  # another thread was faster
            callbacks()

    # The consumer -----------------------------------------------------------------------------------------------------

    def drive(self, until: int) -> None:
        """Execute packets here until everything before index ``until`` is done.

        Raises:
            DeadlineError, PeerLostError, MismatchError: from a poll. QueueError, PacketError: with a dump of the queue.
        """
        self._call()
        while self._at < until:
            self._step(until)
            self._call()
        if self.fault and self.ring.retired() < until:
            raise self.fault

    def _step(self, until: int) -> None:
        """Execute packets before ``until``: all, or up to where callbacks are to be called."""
        if not self._lock.acquire(timeout=1.0):
            return  # another thread is executing; its own waits have deadlines
        try:
            if self.fault:
                raise self.fault
            if self._at < until and not self._run(until, wait=True):
                raise QueueError(f"waiting for index {until}, which was never submitted\n{self.dump()}")
        finally:
            self._lock.release()
            self._settle()

    def advance(self) -> bool:
        """Execute what can be executed now, without waiting at a poll; return whether anything was. For the engine's
        thread.
        """
        self._call()
        if not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._at
            if not self.fault:
                self._run(self.ring.doorbell(), wait=False)
            return self._at != before
        finally:
            self._lock.release()
            self._settle()
            self._call()

    def fail(self, error: BaseException) -> None:
        """Make the queue failed: every pending operation ends with ``error``, and later ones raise it."""
        if self.fault is None:
            self.fault = error
            self.ring.refuse()
            if self._on_fault:
                self._on_fault(error)
        while self._pending:
            self._end_first(self.fault)

    def close(self, error: BaseException) -> None:
        """Fail the queue and return when no thread executes its packets any more, so the memory they name may go.

        A poll that waits for long must be ended by the ``check`` of the queue's patience.
        """
        with self._lock:
            self.fail(error)
        self._call()

    @property
    def done(self) -> int:
        """Index before which every packet has been executed."""
        return self._at

    @property
    def idle(self) -> bool:
        """Whether everything up to the doorbell has been executed, and whoever waited for it was told."""
        return self._at >= self.ring.doorbell() and not self._callbacks

    def _run(self, until: int, wait: bool) -> bool:
        """Execute up to ``until``, or to where callbacks are to be called; return False when the doorbell, or (with
        ``wait`` False) a poll, stopped it before.
        """
        view, mask, size, execute = self.ring.view, self._mask, self.ring.nbytes, self._execute
        nop = d.Nop
        doorbell = self.ring.doorbell()
        stop = min(until, doorbell)
        at = retired = self._at
        try:
            while at < stop:
                if at - retired > size >> 3:  # a producer may wait for room
                    self.ring.retire(at)
                    retired = at
                place = at & mask
                if wait and (trace := self._trace(at, place, stop)):
                    self._follow(trace, at)
                    at = self._told()
                    if self._callbacks:
                        return True
                    continue
                packet: Any = decode(view, place, min(size, place + doorbell - at))
                kind, length = type(packet), packet.size_bytes
                if kind is nop:
                    self._annex = bytes(view[place + 4 : place + min(length, _LONGEST_ANNEX)])
                else:
                    if kind is d.Trap and packet.context in (REDUCE, PULL):
                        packet = requested(packet.context, self._annex)
                        kind = type(packet)
                    if self.hostile:
                        self._delay()
                    if not execute[kind](packet, wait):
                        return False
                self._at = at = at + length
                if self._pending:
                    at = self._told()
                    if self._callbacks:
                        return True
            return at >= until
        except IrisError as error:
            if isinstance(error, (PacketError, QueueError, DeadlineError)):
                error = type(error)(f"{error}\n{self.dump()}")
            self.fail(error)
            raise error from None
        finally:
            self.ring.retire(self._at)

    def _told(self) -> int:
        """Tell whoever waits for what has been executed, and return how far the queue is then."""
        while self._pending and self._pending[0][0] <= self._at:
            self.ring.retire(self._at)
            self._end_first(None)
        return self._at

    def _trace(self, at: int, place: int, stop: int) -> Trace | None:
        """Return the trace of what lies between ``at`` and the first index at which someone is told, if it is known."""
        if self._pending and at < self._pending[0][0] < stop:
            stop = self._pending[0][0]
        n = min(stop - at, self.ring.nbytes - place)
        if self.hostile or n > LONGEST:
            return None
        try:
            return self._traces.find(self.ring.view[place : place + n].tobytes())
        except PacketError:  # a bad packet, or the part of one where `stop` is not the end of a submission
            return None  # one by one, then, up to the bad one

    def _follow(self, trace: Trace, at: int) -> None:
        i, count, turns = 0, len(trace.packets), self.patience.turns
        while (i := self._native(trace.operations, i, count, turns)) < count:
            self._at = at + trace.starts[i]
            packet = trace.packets[i]
            self._execute[type(packet)](packet, True)
            i += 1
        self._at = at + trace.nbytes

    # Packets ----------------------------------------------------------------------------------------------------------

    def _copy(self, p: d.CopyLinear, wait: bool) -> bool:
        if self.hostile and p.nbytes > 1:
            for start, stop in self._pieces(p.nbytes):
                move(p.dst + start, p.src + start, stop - start)
        elif p.nbytes <= _SHORT:
            _move_with_gil(p.dst, p.src, p.nbytes)
        else:
            _move_without_gil(p.dst, p.src, p.nbytes)
        return True

    def _copy_window(self, p: d.CopySubWindow, wait: bool) -> bool:
        for z in range(p.n_slices):
            self._copy_rows(
                p.dst + (p.dst_z + z) * p.dst_slice_pitch_bytes + p.dst_y * p.dst_pitch_bytes + p.dst_x,
                p.dst_pitch_bytes,
                p.src + (p.src_z + z) * p.src_slice_pitch_bytes + p.src_y * p.src_pitch_bytes + p.src_x,
                p.src_pitch_bytes,
                p.width_bytes,
                p.n_rows,
            )
        return True

    def _fence(self, p: d.Fence, wait: bool) -> bool:
        self._store32(p.address, p.value)
        return True

    def _poll(self, p: d.PollRegMem, wait: bool) -> bool:
        ref = p.reference
        match p.func:
            case d.Comparison.EQUAL:
                low, span = ref, 0
            case d.Comparison.GREATER_EQUAL:
                low, span = ref, _FULL - ref
            case d.Comparison.ALWAYS:
                return True
            case d.Comparison.LESS if ref:
                low, span = 0, ref - 1
            case d.Comparison.LESS_EQUAL:
                low, span = 0, ref
            case d.Comparison.NOT_EQUAL:
                low, span = (ref + 1) & _FULL, _FULL - 1
            case d.Comparison.GREATER if ref < _FULL:
                low, span = ref + 1, _FULL - ref - 1
            case _:
                raise PacketError(f"{p} can never be satisfied")
        if ((self._load32(p.address) & p.mask) - low) & _FULL <= span:
            return True
        if p.gives_up:
            self._spin(p.address, p.mask, low, span, p.retry_count)
            return True
        if wait:
            self.patience.wait(p.address, p.mask, low, span, ref)
            return True
        now = time.monotonic()
        if self._stalled_at != self._at:
            self._stalled_at, self._stalled_since, self._looked = self._at, now, now
        elif now - self._looked > self.patience.CHECK_S:
            self._looked = now
            self.patience.look(p.address, ref, now - self._stalled_since)
        return False

    def _atomic(self, p: d.Atomic, wait: bool) -> bool:
        if p.op == d.Operation.CMPSWAP:
            old = self._cas[p.width_bytes](p.address, p.compare, p.operand)
            return not (p.loop and old != p.compare) or self._again(p, wait)
        self._rmw[_RMW[p.op], p.width_bytes](p.address, p.operand)
        return True

    def _again(self, p: d.Atomic, wait: bool) -> bool:
        since = time.monotonic()
        if not wait and self._stalled_at == self._at:
            since = self._stalled_since
        elif not wait:
            self._stalled_at, self._stalled_since = self._at, since
        while True:
            if time.monotonic() - since > self.patience.timeout_s:
                raise DeadlineError(f"ATOMIC compare-and-swap at {p.address:#x} never saw {p.compare:#x}")
            if not wait:
                return False
            if self._cas[p.width_bytes](p.address, p.compare, p.operand) == p.compare:
                return True
            time.sleep(20e-6)

    def _fill(self, p: d.ConstFill, wait: bool) -> bool:
        if p.unit_bytes == 1:
            ctypes.memset(p.address, p.value & 0xFF, p.nbytes)
        else:
            _fill_dwords(p.address, p.value, p.nbytes)
        return True

    def _trap(self, p: d.Trap, wait: bool) -> bool:
        if self.on_trap:
            self.on_trap(p.context)
        return True

    def _reduce(self, r: Reduction, wait: bool) -> bool:
        reduce_bytes(r.op, r.dtype, r.dst, r.sources, r.nbytes)
        return True

    def _pull(self, p: Pull, wait: bool) -> bool:
        if self._read is None:
            raise PacketError(f"{p}: this queue reads no other process")
        src = self._load64(p.offer) + p.offset
        for start, stop in self._pieces(p.nbytes) if self.hostile and p.nbytes > 1 else ((0, p.nbytes),):
            self._read(p.rank, p.dst + start, src + start, stop - start)
        return True

    def _timestamp(self, p: d.Timestamp, wait: bool) -> bool:
        self._store64(p.address, time.monotonic_ns() // 10)  # the GPU's reference clock counts at 100 MHz
        return True

    # Hostile mode -----------------------------------------------------------------------------------------------------

    def _delay(self) -> None:
        assert self.hostile
        draw = self.hostile.random()
        if draw < 0.05:
            time.sleep(draw / 50)
        elif draw < 0.3:
            os.sched_yield()

    def _pieces(self, nbytes: int) -> list[tuple[int, int]]:
        assert self.hostile
        cuts = sorted({0, nbytes, *(self.hostile.randrange(nbytes) for _ in range(3))})
        pieces = list(zip(cuts, cuts[1:], strict=False))
        self.hostile.shuffle(pieces)
        return pieces

    def dump(self) -> str:
        """Return the queue in words: indices, and the packets from the next one on."""
        lines = [self.ring.dump() + f", executing at {self._at}"]
        at, doorbell = self._at, self.ring.doorbell()
        while at < doorbell and len(lines) < 6:
            place = at & self._mask
            try:
                packet = decode(self.ring.view, place, min(self.ring.nbytes, place + doorbell - at))
            except PacketError as error:
                lines.append(f"  {at}: {error}")
                break
            lines.append(f"  {at}: {packet}")
            at += packet.size_bytes
        return "\n".join(lines)


def _fill_dwords(address: int, value: int, nbytes: int) -> None:
    import numpy

    memory = memoryview((ctypes.c_char * nbytes).from_address(address))
    numpy.frombuffer(memory, dtype="<u4")[:] = value
