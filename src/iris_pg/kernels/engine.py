"""The cu engine on a CPU: launches the exchange kernels in Triton's interpreter, one after another, on a thread of its
own.

A launch waits inside the kernel, so a watchdog looks after it: when a peer is lost, is in another operation, or the
deadline passes, it sets the abort word, the kernel returns, and the operation ends with the error. It is slow
(milliseconds a launch) and meant for semantics.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from iris_pg.completion import Completion
from iris_pg.errors import ClosedError, DeadlineError, PeerLostError, UnsupportedError
from iris_pg.kernels.launch import interpret, kernels
from iris_pg.platforms.atomics import atomics

_BLOCK = 16384  # lanes; the interpreter's cost is per operation, so few large ones


@dataclass(frozen=True)
class Message:
    """``nbytes`` to or from one peer, at an address here; for a push, ``place`` is its address in the peer's output."""

    peer: int
    address: int
    nbytes: int
    place: int = 0


@dataclass
class Exchange:
    """One launch of one rank: what it sends, receives, and copies within itself (source, target, nbytes).

    With ``reduction`` (op, dtype) what it receives from all peers is as long as its own part, and all is combined into
    the target.
    """

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    own: tuple[int, int, int] = (0, 0, 0)
    zero_copy: bool = False
    reduction: tuple[str, str] | None = None


@dataclass
class Job:
    """An exchange in the engine's queue, and how it ended."""

    exchanges: Sequence[Exchange]
    pending: Completion | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


def area_bytes(world: int, slot_bytes: int) -> dict[str, int]:
    """Return name -> nbytes of the areas of the heap that the engine needs."""
    k = kernels(interpreted=True)
    return {
        "cu_flags": k.FLAGS.value * world * k.LINE.value,
        "cu_landing": 2 * world * slot_bytes,
    }


def reduction_types(op: str, dtype: str) -> tuple[Any, Any, Any, int]:
    """Return (element, accumulator, number of the operation, element size in bytes) for a reduction in a kernel.

    Complex numbers are added as pairs of real ones; bool is 0 or 1 of a byte.

    Raises:
        UnsupportedError: a reduction that the kernels do not have.
    """
    import triton.language as tl

    k = kernels(interpreted=True)
    if dtype == "bool":
        op, dtype = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op), "uint8"
    real = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype, dtype)
    elements = {
        "float16": tl.float16,
        "bfloat16": tl.bfloat16,
        "float32": tl.float32,
        "float64": tl.float64,
        **{f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }
    if real not in elements or (real != dtype and op not in ("sum", "avg")):
        raise UnsupportedError(f'{op} of {dtype} is not in the cu engine\'s kernels; use a group with engine="sdma"')
    element = elements[real]
    accumulator = tl.float32 if real in ("float16", "bfloat16") else element
    return element, accumulator, getattr(k, op.upper()).value, element.primitive_bitwidth // 8


class KernelEngine:
    """Runs exchanges in order.

    Args:
        rank, world, bases: as in the heap.
        flags, landing: offsets in a segment of the engine's areas.
        slot_bytes: size of a landing slot.
        timeout_s: deadline of one wait.
        check: called now and then with the rank that a launch waits for; raises when waiting is in vain.
        late: returns the message of a deadline, given the rank waited for.
        on_fault: called once, with what made the engine failed.
        name: of the thread.
    """

    _LOOK_S = 2e-3

    def __init__(
        self,
        rank: int,
        world: int,
        bases: Sequence[int],
        flags: int,
        landing: int,
        slot_bytes: int,
        timeout_s: float,
        check: Callable[[int], None],
        late: Callable[[int], str],
        on_fault: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self.rank, self.world, self.bases, self.flags, self.landing = rank, world, bases, flags, landing
        self.slot_bytes, self.timeout_s, self.check, self.late, self.on_fault = (
            slot_bytes,
            timeout_s,
            check,
            late,
            on_fault,
        )
        self.name = name
        self._kernels = kernels(interpreted=True)
        columns, counters = self._kernels.COLUMNS.value, self._kernels.COUNTERS.value
        self._table = torch.zeros(world, columns, dtype=torch.int64)
        self._counters = torch.zeros(counters * world, dtype=torch.int32)
        self._words = torch.zeros(2, dtype=torch.int32)  # abort, waiting
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._watchdog: threading.Thread | None = None
        self._running = threading.Event()
        self._closed = False
        self.fault: BaseException | None = None
        self.submitted = 0
        self.completed = 0

    def submit(self, exchanges: Exchange | Sequence[Exchange], pending: Completion | None = None) -> Job:
        """Execute launches after those before them, on the engine's thread; ``pending`` is told when all are done."""
        if self.fault:
            raise self.fault
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self._watchdog = threading.Thread(target=self._watch, name=f"{self.name} watchdog", daemon=True)
            self._thread.start()
            self._watchdog.start()
        job = Job([exchanges] if isinstance(exchanges, Exchange) else exchanges, pending)
        self.submitted += 1
        self._jobs.put(job)
        return job

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done; raise what ended it. The watchdog sees to it that it ends."""
        self.help(job.done.is_set)
        job.done.wait()
        if job.error:
            raise job.error

    def help(self, is_done: Callable[[], bool]) -> None:
        """On the engine's own thread, where a future's callback may wait for an operation: execute until it is done."""
        if threading.current_thread() is self._thread:
            while not is_done() and self._step():
                pass
            if not is_done():
                raise self.fault or ClosedError("the cu engine was closed")

    def close(self) -> None:
        """Abort what runs and stop the threads. Idempotent."""
        self._closed = True
        self._abort()
        self._running.set()
        self._jobs.put(None)
        for thread in (self._thread, self._watchdog):
            if thread and thread is not threading.current_thread():
                thread.join(timeout=10)

    def _abort(self) -> None:
        atomics().store32(self._words.data_ptr(), 1)

    def fail(self, error: BaseException) -> None:
        """Make the engine failed: what runs is aborted, and later operations raise ``error``."""
        if self.fault is None:
            self.fault = error
            self.on_fault(error)
        self._abort()

    def _loop(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Execute the next job; return False when the engine is being closed."""
        job = self._jobs.get()
        if job is None:
            self._jobs.put(None)  # a callback may have asked, within a step of the loop
            return False
        if self.fault is None:
            try:
                self._running.set()
                for exchange in job.exchanges:
                    self._launch(exchange)
            except BaseException as error:
                self.fail(error)
            finally:
                if not self._closed:
                    self._running.clear()
        job.error = self.fault
        self.completed += 1
        callbacks = job.pending.finished(job.error) if job.pending else None
        job.done.set()
        if callbacks:
            callbacks()
        return True

    def _launch(self, exchange: Exchange) -> None:
        rows: list[list[int]] = [[0] * self._table.size(1) for _ in range(self.world)]
        addresses = list(exchange.own)
        both = 2 * self.slot_bytes
        for peer, row in enumerate(rows):
            row[4:7] = (
                self.bases[peer] + self.landing + self.rank * both,
                self.bases[self.rank] + self.landing + peer * both,
                self.bases[peer],
            )
        for m in exchange.sends:
            rows[m.peer][0:2] = m.address, m.nbytes
            if exchange.zero_copy:
                rows[m.peer][4] = m.place
            addresses += [m.address, m.place]
        for m in exchange.receives:
            rows[m.peer][2:4] = m.address, m.nbytes
            addresses.append(m.address)
        self._table.copy_(torch.tensor(rows, dtype=torch.int64))
        longest = max([exchange.own[2], *(m.nbytes for m in (*exchange.sends, *exchange.receives))])
        word = 8 if all(a % 8 == 0 for a in (addresses[0], addresses[1], *addresses[3:])) else 1
        lanes = max(16, min(_BLOCK, 1 << (longest // word).bit_length()))
        words = self._words.data_ptr()
        if exchange.reduction:
            kernel = self._kernels.reduce
            element, accumulator, op, size = reduction_types(*exchange.reduction)
            lanes = max(16, min(_BLOCK, 1 << (longest // size).bit_length()))
            how: dict[str, Any] = dict(ELEMENT=element, ACCUMULATOR=accumulator, OP=op)
        else:
            kernel = self._kernels.push if exchange.zero_copy else self._kernels.exchange
            how = dict(WORD=word)
        interpret(
            kernel,
            self._table.data_ptr(),
            *exchange.own,
            self.bases[self.rank],
            self.flags,
            self._counters.data_ptr(),
            words,
            words + 4,
            self.rank,
            world=self.world,
            slot_bytes=self.slot_bytes,
            BLOCK=lanes,
            **how,
        )

    def _watch(self) -> None:
        load = atomics().load32
        waiting_at = self._words.data_ptr() + 4
        since, last = time.monotonic(), (0, 0)
        while not self._closed:
            self._running.wait()
            time.sleep(self._LOOK_S)
            now = time.monotonic()
            waiting = (load(waiting_at), int(self._counters.sum()))
            if waiting != last:
                since, last = now, waiting
            if not waiting[0] or self.fault or not self._running.is_set():
                since = now
                continue
            peer = waiting[0] - 1
            try:
                try:
                    self.check(peer)
                except PeerLostError:
                    time.sleep(0.1)  # it may have done its part before it went; then the kernel goes on
                    if (load(waiting_at), int(self._counters.sum())) != last:
                        continue
                    raise
                if now - since > self.timeout_s:
                    raise DeadlineError(self.late(peer))
            except BaseException as error:
                self.fail(error)
