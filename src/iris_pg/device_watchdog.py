"""What looks after operations on CUDA tensors while no host waits for them: who is late, dead, or in another operation
is named, and streams that would wait for ever are released.

A thread looks at words in host memory that GPUs write, and calls no driver. When an operation fails, so does the group:
the error is logged, peers are told, every later call and ``wait`` raises, and what streams wait for is written, so that
they come to an end. What released operations have moved is not to be used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from iris_pg.device_copies import Prepared
from iris_pg.device_exchanges import PreparedBoth, PreparedExchanges
from iris_pg.device_page import DevicePage
from iris_pg.device_work import Begun, Lane
from iris_pg.errors import DeadlineError, IrisError, MismatchError, PeerLostError, where
from iris_pg.kernels.device import DeviceKernels
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Program, Take
from iris_pg.watch import Watch, text_of

_LOOK_S = 0.05  # between two looks
_PATIENCE_S = 0.3  # from which an operation is looked into that does not end
_GRACE_S = 1.0  # what a rank that has left did before it left may still be on its way
_RELEASE_S = 10.0  # longest time that streams get to come to an end

log = logging.getLogger("iris_pg")


class Captured:
    """Operations in graphs. A captured operation writes its number into a word when it begins and 0 when it ends, so
    that one which is replayed in vain can be told. Kernels do not, as such writes take longer than a small operation:
    they say themselves for whom they wait.

    Args:
        running: returns the word.
        word: its address as the GPU sees it.
    """

    def __init__(self, running: Callable[[], int], word: int) -> None:
        self._running, self._word = running, word
        self.all: list[tuple[Any, Program]] = []  # (key, program), by number - 1
        self.number = 0  # that runs
        self.moved_at = time.monotonic()

    def launch(
        self,
        key: Any,
        prepared: Prepared | PreparedExchanges | PreparedBoth,
        stream: Any,
        after: Callable[[], Any] | None,
    ) -> None:
        """Put an operation on a stream (its handle) that is being captured, and what ``after`` does behind it."""
        if isinstance(prepared, PreparedExchanges):
            return prepared.launch(stream, None, after)
        self.all.append((key, prepared.program))
        gpu.write(self._word, len(self.all))(stream)
        prepared.launch(stream, None, after)
        gpu.write(self._word, 0)(stream)

    def oldest(self) -> Begun | None:
        """Return the operation that a replayed graph is in, and has been since ``moved_at``, as far as can be seen."""
        number = self._running()
        if number != self.number or not number:
            self.number, self.moved_at = number, time.monotonic()
        if not 0 < number <= len(self.all):
            return None
        key, program = self.all[number - 1]
        return Begun(number, key, program, None)


class Watchdog:
    """The thread of one group.

    Args:
        watch: what ranks tell each other.
        page: the flags.
        lanes: lanes of operations; the first is that of collectives, others are messages and the like.
        captured: operations in graphs.
        lock: of the lanes.
        kernels: those of the cu engine, if it is there; they have flags of their own, and give up by themselves, too.
        timeout_s: deadline of an operation, since it began or the one before it ended, whichever is later.
        name: of the thread.
    """

    def __init__(
        self,
        watch: Watch,
        page: DevicePage,
        lanes: list[Lane],
        captured: Captured,
        lock: threading.RLock,
        kernels: DeviceKernels | None,
        timeout_s: float,
        name: str,
    ) -> None:
        self._watch, self._page, self._lanes, self._captured, self._lock = watch, page, lanes, captured, lock
        self._kernels = kernels
        self.timeout_s = timeout_s
        self._waits: tuple[int, ...] = ()  # of kernels, and since when they are these
        self._waits_since = 0.0
        self._lost_at: dict[int, float] = {}  # rank -> when it was first seen to be gone
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if self._watch.failure:
                if self._kernels:
                    self._kernels.abort()
                self.release(lambda: not any(self._under_way()))
                return
            try:
                if self._watch.hears_failure():
                    sequence, key = self._watch.current()
                    self._watch.check_failed(text_of(key), self._watch.where(sequence, key), self._watch.absent)
                if self._kernels:
                    self._kernels.check()
                for lane, begun in self._under_way():
                    self._look(lane, begun)
                if self._kernels:
                    self._look_at_kernels(self._kernels)
            except IrisError as error:
                log.error("%s", error)
                self._watch.give_up(error)

    def _under_way(self) -> Iterator[tuple[Lane | Captured, Begun]]:
        with self._lock:
            lanes: list[Lane | Captured] = [*self._lanes, self._captured]
            found = [(lane, lane.oldest()) for lane in lanes]
        for lane, begun in found:
            if begun:
                yield lane, begun

    def _look(self, lane: Lane | Captured, begun: Begun) -> None:
        """Raise when an operation will not end, or has not in time."""
        stalled = time.monotonic() - lane.moved_at
        if stalled < _PATIENCE_S:
            return
        watch = self._watch
        is_numbered = lane is self._lanes[0]
        sequence, key = watch.current() if is_numbered else (None, begun.what)
        place = where(group=watch.links.group, rank=watch.rank, op=key[0], seq=sequence)
        watch.check_failed(text_of(key), place, lambda: watch.absent() if is_numbered else "")
        if sequence is not None:
            watch.say(sequence, key)
            watch.compare(sequence, key)
        lost = self._lost()
        writers = {step.writer for step in begun.program.steps if isinstance(step, Take)}
        for rank in sorted(lost & (writers or lost)):  # kernels have no steps, and wait for all ranks
            if isinstance(lane, Lane) and lane.has_done(rank, begun.number):
                continue
            watch.culprit = rank
            raise PeerLostError(
                f"{text_of(key)}: rank {rank} has died, or has left the group, before its part was done {place}"
            )
        for step in begun.program.steps:
            # A rank that is ahead may have signalled what this one has taken before.
            if isinstance(step, Take) and (sequence is None or watch.begun(step.writer) <= sequence):
                seen = self._page.load(step.flag.offset)
                if lane is not self._captured and seen not in (0, step.tag):
                    raise MismatchError(
                        f"ranks are in different operations: rank {watch.rank} is in {text_of(key)} and rank "
                        f"{step.writer} in another, or with other sizes or dtypes {place}"
                    )
        if stalled > self.timeout_s:
            if is_numbered:
                raise DeadlineError(watch.late(self._waits_for(begun)))
            raise DeadlineError(
                f"{text_of(key)}: Timed out waiting; waiting for rank {self._waits_for(begun)} "
                f"{'in a replayed graph ' if lane is self._captured else ''}{place}"
            )

    def _look_at_kernels(self, kernels: DeviceKernels) -> None:
        """Raise when a kernel waits in vain, or too long: one in a replayed graph, as for others :meth:`_look` does."""
        now, waits = time.monotonic(), kernels.waits
        if waits != self._waits or not waits:
            self._waits, self._waits_since = waits, now
        if not waits or now - self._waits_since < _PATIENCE_S:
            return
        waiting = kernels.waiting
        what, place = "a kernel of a replayed graph", where(group=self._watch.links.group, rank=self._watch.rank)
        if lost := sorted(self._lost() & set(waiting)):
            raise PeerLostError(f"{what}: rank {lost[0]} has died, or has left the group, before its part {place}")
        if now - self._waits_since > self.timeout_s:
            raise DeadlineError(f"{what}: Timed out waiting; waiting for rank {waiting[0]} {place}")

    def _waits_for(self, begun: Begun) -> int | None:
        """Return the rank that a kernel waits for, or else the one whose flag is the first that is not there."""
        if self._kernels and (waiting := self._kernels.waiting):
            return waiting[0]
        steps, rank = begun.program.steps, self._watch.rank
        takes = (step for step in steps if isinstance(step, Take) and step.writer != rank)
        return next((step.writer for step in takes if self._page.load(step.flag.offset) == 0), None)

    def _lost(self) -> set[int]:
        """Return the ranks that have been gone for a while."""
        now = time.monotonic()
        for rank in self._watch.links.lost():
            self._lost_at.setdefault(rank, now)
        return {rank for rank, since in self._lost_at.items() if now - since > _GRACE_S}

    def release(self, is_over: Callable[[], bool]) -> bool:
        """Write what streams wait for until ``is_over``, for at most a few seconds; return whether it is."""
        deadline = time.monotonic() + _RELEASE_S
        if self._kernels and not is_over():
            self._kernels.abort()
        while not is_over():
            if time.monotonic() > deadline:
                return False
            programs = [begun.program for _, begun in self._under_way()]
            # Of a graph, operations that do not run any more are seen as if they did: they lack nothing.
            for program in (*programs, *(program for _, program in self._captured.all)):
                for step in program.steps:
                    if isinstance(step, Take) and self._page.load(step.flag.offset) != step.tag:
                        self._page.store(step.flag.offset, step.tag)
                time.sleep(0)
            time.sleep(1e-3)
        return True

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _RELEASE_S)


__all__ = ["Captured", "Watchdog"]
