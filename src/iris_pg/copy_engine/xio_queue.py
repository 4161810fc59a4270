"""One queue of rocm-xio: what it has been told and how far it is, with a deadline on every wait.

The library waits for room in a ring, and for the end of what is in it, without a deadline. So a queue here never holds
more than half of a ring, and learns how far it is from a word in memory: after some calls the engine adds 1 to it. What
the engine has added is also the proof that everything before has landed; that a read pointer has moved on is not.

The word, a few bytes of scratch and those of the first check lie in memory that the host and the engine both see.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from iris_pg.copy_engine.calls import Call, Increase, Invocation, invocations
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.xio import CHECK_BYTES, Library, check, describe
from iris_pg.errors import DeadlineError, IrisError, QueueError
from iris_pg.flags import LINE
from iris_pg.platforms.atomics import atomics

_FULL = 0xFFFFFFFF
_SCRATCH, _CHECK = LINE, 2 * LINE
WORDS_BYTES = 2 * LINE + CHECK_BYTES
"""Of memory that one queue takes."""


class Words(NamedTuple):
    """Where a queue's words are, as the host and as the engine sees them; :data:`WORDS_BYTES`, zeros at first."""

    host: int
    device: int


class XioQueue:
    """The queue from this rank's GPU to another, or to itself. From any thread.

    Args:
        library: rocm-xio.
        src_device, dst_device: the GPUs, as the library counts them.
        words: memory of the queue.
        timeout_s: deadline of every wait.
        name: for messages, and for who else would like to have the queue.
        watch: called now and then while the host waits; raises when waiting is in vain.

    Attributes:
        fault: what has made the queue unusable.

    Raises:
        UnsupportedError: the queue is in use, or the library does not do what it says. DeadlineError: it does nothing.
    """

    def __init__(
        self,
        library: Library,
        src_device: int,
        dst_device: int,
        words: Words,
        timeout_s: float,
        name: str,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._library, self._devices, self._words, self.name = library, (src_device, dst_device), words, name
        self._room = library.ring_bytes // 2
        self._mark_bytes = library.ring_bytes // 8
        self._lock = threading.RLock()
        self._told = 0  # marks
        self._marks: deque[tuple[int, int]] = deque()  # (number of a mark, bytes of packets up to it since the last)
        self._held = self._unmarked = 0  # bytes of packets in the ring; those behind the last mark
        self._calls: deque[tuple[int, Invocation]] = deque()  # not known to be done, and the mark behind each
        self.fault: IrisError | None = None
        self._load = atomics().load32
        self._patience = Patience(timeout_s, check=lambda *_: watch and watch(), describe=lambda _: self._late())
        self.channel = library.acquire(src_device, dst_device, name)
        at = words.host + _CHECK, words.device + _CHECK
        try:
            check(self.submit, lambda: self.wait(self._told), *at)
        except BaseException:
            self.close()
            raise

    def submit(self, calls: Iterable[Call]) -> int:
        """Put calls into the queue, in their order and with no other thread's in between; return what to wait for.

        Raises:
            DeadlineError: the ring stayed full, with a dump of the queue. QueueError: the library refuses a call.
            And what made the queue fail before.
        """
        with self._lock:
            if self.fault:
                raise self.fault
            try:
                for asked in invocations(calls, self._words.device + _SCRATCH):
                    if self._unmarked + asked.nbytes > self._mark_bytes:
                        self._mark()
                    while self._held + asked.nbytes > self._room:
                        self._until(self._marks[0][0])
                    self._tell(asked)
                if self._unmarked:
                    self._mark()
            except IrisError as error:
                raise self._fail(error) from None
            return self._told

    def wait(self, end: int) -> None:
        """Return when everything has landed that was submitted up to ``end``.

        Raises:
            DeadlineError: with a dump of the queue, which takes nothing more. And what made it fail before.
        """
        if self.fault:
            raise self.fault
        try:
            self._until(end)
        except IrisError as error:
            raise self._fail(error) from None

    @property
    def told(self) -> int:
        """What to wait for so that all is done that has been submitted so far."""
        return self._told

    @property
    def done(self) -> int:
        """How much of :attr:`told` is done."""
        return self._told - ((self._told - self._load(self._words.host)) & _FULL)

    def close(self, patience_s: float = 1.0) -> bool:
        """Give the queue back when it comes to its end; return whether it did. Else the engine may still use memory
        that calls name, and the queue belongs to this one for good.
        """
        patience = Patience(patience_s)
        told = self._told
        try:
            patience.wait(self._words.host, _FULL, told & _FULL, (1 << 31) - 1, told & _FULL)
        except DeadlineError:
            return False
        self._library.release(*self._devices)
        return True

    # ------------------------------------------------------------------------------------------------------------------

    def _tell(self, asked: Invocation) -> None:
        self._library.call(*self._devices, self.channel, asked)
        self._calls.append((self._told + 1, asked))
        self._held += asked.nbytes
        self._unmarked += asked.nbytes

    def _mark(self) -> None:
        for asked in invocations([Increase(self._words.device, 1)], 0):
            self._tell(asked)
        self._told += 1
        self._marks.append((self._told, self._unmarked))
        self._unmarked = 0
        self._forget(self.done)

    def _until(self, end: int) -> None:
        self._patience.wait(self._words.host, _FULL, end & _FULL, (1 << 31) - 1, end & _FULL)
        with self._lock:
            self._forget(max(end, self.done))

    def _forget(self, done: int) -> None:
        while self._marks and self._marks[0][0] <= done:
            self._held -= self._marks.popleft()[1]
        while self._calls and self._calls[0][0] <= done:
            self._calls.popleft()

    def _fail(self, error: IrisError) -> IrisError:
        if self.fault is None:
            if isinstance(error, (DeadlineError, QueueError)):
                error = type(error)(f"{error}\n{self.dump()}")
            self.fault = error
        return self.fault

    def _late(self) -> str:
        return f"the queue {self.name}: how far it is"

    def dump(self) -> str:
        """Return the queue in words: how far it is, and what it does next."""
        src, dst = self._devices
        done = self.done
        waiting = [asked for mark, asked in list(self._calls) if mark > done]
        lines = [
            f"queue {self.name}: GPU {src} to GPU {dst}, channel {self.channel}; {done} of {self._told} marks reached, "
            f"{self._held} bytes of packets in a ring of {self._library.ring_bytes}, {len(waiting)} calls not known to "
            "be done, of which one is the next:"
        ]
        return "\n".join([*lines, *(f"  {describe(asked)}" for asked in waiting[:5])])


__all__ = ["WORDS_BYTES", "Words", "XioQueue"]
