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

import torch

from iris_pg.completion import Completion
from iris_pg.errors import ClosedError, DeadlineError, PeerLostError
from iris_pg.kernels.launch import Exchange, Launches, Limits, Message, area_bytes, reduction_types
from iris_pg.kernels.loader import interpret, kernels
from iris_pg.platforms.atomics import atomics

# The interpreter's cost is per operation, so few of many lanes; and its flags are as fast as words.
_LIMITS = Limits(
    ctas=1,
    least_bytes=16,
    words_bytes=1 << 12,
    push_bytes=0,
    push_ctas=1,
    direct=(16384, 1),
    direct_own=(16384, 1),
    slots=((1 << 62, (16384, 1)),),
    reduce_lanes=16384,
    fits=True,
    chunks=1,
    polls=1,
    platform="INTERPRETED",
)


@dataclass
class Job:
    """An exchange in the engine's queue, and how it ended."""

    exchanges: Sequence[Exchange]
    pending: Completion | None
    ended: Callable[[], None] | None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


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
        self.timeout_s, self.check, self.late, self.on_fault, self.name = timeout_s, check, late, on_fault, name
        self._kernels = kernels(interpreted=True)
        self._counters = torch.zeros(self._kernels.COUNTERS.value * world, dtype=torch.int32)
        self._words = torch.zeros(self._kernels.WAITING.value + 1, dtype=torch.int32)
        self._launches = Launches(
            *(rank, world, bases, flags, landing, slot_bytes, self._counters.data_ptr(), self._words.data_ptr()),
            _LIMITS,
        )
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._watchdog: threading.Thread | None = None
        self._running = threading.Event()
        self._closed = False
        self.fault: BaseException | None = None
        self.submitted = 0
        self.completed = 0

    def submit(
        self,
        exchanges: Exchange | Sequence[Exchange],
        pending: Completion | None = None,
        ended: Callable[[], None] | None = None,
    ) -> Job:
        """Execute launches after those before them, on the engine's thread; ``pending`` is told when all are done.
        Before that ``ended`` is called, if they ended well; what it raises makes the engine failed.
        """
        if self.fault:
            raise self.fault
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)
            self._watchdog = threading.Thread(target=self._watch, name=f"{self.name} watchdog", daemon=True)
            self._thread.start()
            self._watchdog.start()
        job = Job([exchanges] if isinstance(exchanges, Exchange) else exchanges, pending, ended)
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
        atomics().store32(self._words.data_ptr() + 4 * self._kernels.ABORT.value, 1)

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
                if job.ended and self.fault is None:
                    job.ended()
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
        for launch in self._launches.of(exchange, limit_ns=0):
            interpret(getattr(self._kernels, launch.kernel), *launch.arguments, **launch.constants)

    def _watch(self) -> None:
        load = atomics().load32
        waiting_at = self._words.data_ptr() + 4 * self._kernels.WAITING.value
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
            peer = (waiting[0] & 0xFFFF) - 1
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


__all__ = ["Exchange", "Job", "KernelEngine", "Message", "area_bytes", "reduction_types"]
