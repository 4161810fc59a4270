"""The works of operations on CUDA tensors, and the lanes in which they follow each other.

A work's ``wait`` makes the current stream wait, and never the host; only a barrier's waits on the host. What an
operation reads and writes is kept until it has been waited for, or is seen to be done.
"""

from __future__ import annotations

import copy
import datetime
import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris_pg.errors import DeadlineError
from iris_pg.program import Program
from iris_pg.work import IrisWork, Work

_POLL_S = 200e-6  # seconds between two looks, when the host waits


def raw_stream(device: torch.device) -> int:
    """Return the handle of the current stream, as ``torch.cuda.current_stream(device).cuda_stream`` does, in a tenth of
    its time.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index))


@functools.lru_cache(maxsize=1024)
def stream_of(device: torch.device, raw: int) -> torch.cuda.Stream:
    """Return the stream with a handle."""
    return torch.cuda.ExternalStream(raw, device) if raw else torch.cuda.default_stream(device)


class Held:
    """What an operation reads and writes, until its work lets go of it, or its lane does.

    A lane holds this and not the work, whose outputs are the caller's: when those go must not depend on when a lane is
    looked at, as blocks of the heap are handed out again in the order in which tensors go.
    """

    __slots__ = ("tensors",)

    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors


class End:
    """An event behind an operation. Events are made once and used again when nothing holds this any more: who has been
    told to wait for one waits for what it stood for then.

    Args:
        stream: on which it is recorded now.
        free: events that nothing uses.
    """

    __slots__ = ("_free", "event")

    def __init__(self, stream: torch.cuda.Stream, free: list[torch.cuda.Event]) -> None:
        self.event, self._free = free.pop() if free else torch.cuda.Event(), free
        self.event.record(stream)

    def __del__(self) -> None:
        self._free.append(self.event)


class StreamWork(IrisWork):
    """One operation on a stream.

    Args:
        outputs: what ``result()`` and the future give.
        device, raw: the GPU, and the handle of the stream that it runs on.
        end: recorded behind it; None when it runs on the stream that was current, and need not be waited for there.
        failure: returns what the group has failed with, if it has.
        held: tensors that it reads or writes; None when they need not be held.
        blocks: ``wait`` waits on the host as well.
        is_in_line: what the group has begun before it is done when it is.
    """

    def __init__(
        self,
        outputs: list[Any],
        device: torch.device,
        raw: int,
        end: End | None,
        failure: Callable[[], BaseException | None],
        held: Held | None = None,
        blocks: bool = False,
        is_in_line: bool = True,
    ) -> None:
        Work.__init__(self)  # and nothing that is for CPU tensors: every operation makes one
        self._device, self._raw, self._end, self._failed_with = device, raw, end, failure
        self._held, self._blocks, self.is_in_line = held, blocks, is_in_line
        self._results = outputs

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Let the current stream wait for the operation; returns True at once. A barrier's returns when it is done.

        Raises:
            DeadlineError: a barrier was not done within ``timeout`` (none when zero).
            PeerLostError, MismatchError, DeadlineError, ClosedError: what the group has failed with.
        """
        self._raise_failure()
        current = raw_stream(self._device)
        if self._end is not None:
            stream_of(self._device, current).wait_event(self._end.event)
        elif current != self._raw:
            stream_of(self._device, current).wait_event(stream_of(self._device, self._raw).record_event())
        if self._held:
            self._held.tensors = None
        if self._blocks:
            self._wait_on_host(timeout.total_seconds() if timeout else 0.0)
        return True

    def _wait_on_host(self, timeout_s: float) -> None:
        event = self._event_behind()
        start = time.monotonic()
        while not event.query():
            waited = time.monotonic() - start
            if timeout_s and waited > timeout_s:
                raise DeadlineError(f"the operation was not done within the {timeout_s} s given to wait()")
            time.sleep(0 if waited < 1e-3 else _POLL_S)
        self._raise_failure()

    def _event_behind(self) -> torch.cuda.Event:
        if self._end is None:
            self._end = End(stream_of(self._device, self._raw), [])
        return self._end.event

    def _raise_failure(self) -> None:
        error = self._failed_with()
        if error is not None:
            raise copy.copy(error).with_traceback(error.__traceback__)

    def synchronize(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not. Does not block."""
        return self._failed_with() is not None or self._event_behind().query()

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._failed_with() is None and self._event_behind().query()

    def must_be_waited_for(self) -> bool:
        """Return True: streams have to be told, also when the operation is done by now."""
        return True

    def exception(self) -> BaseException | None:
        """Return what the group has failed with, if it has."""
        return self._failed_with()

    def of(self, outputs: list[Any]) -> StreamWork:
        """Make this the work of several operations, of which it is the last, with all their outputs; returns itself."""
        self._results = outputs
        return self

    def result(self) -> list[Any]:
        """Return the output tensors; wait first."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of output tensors. It is complete, in the sense of CUDA: who waits for it, and a
        callback, has its streams wait for the operation.
        """
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._device])
            if error := self._failed_with():
                self._future.set_exception(copy.copy(error))  # type: ignore[arg-type]
            else:
                with torch.cuda.stream(stream_of(self._device, self._raw)):
                    self._future.set_result(self._results)
        return self._future


class Begun(NamedTuple):
    """An operation that may not be done: its number, what it is, its program, and what it holds."""

    number: int
    what: tuple[Any, ...]
    program: Program
    held: Held | None


class Lane:
    """Operations that are done in the order in which they were begun, numbered from 1. The GPU writes the number of
    each into a word that the host reads, so looking needs no call of the driver, not even while a graph is captured.

    Args:
        word: returns the word.
        peer_word: returns the word of the lane at a peer in which it does its part.

    Attributes:
        count: number of operations begun.
        moved_at: time.monotonic() when the oldest that is not done was begun, or became the oldest.
    """

    def __init__(self, word: Callable[[], int], peer_word: Callable[[int], int]) -> None:
        self._word, self._peer_word = word, peer_word
        self.count = 0
        self._begun: deque[tuple[int, tuple[Any, ...], Program, Held | None]] = deque()
        self.moved_at = time.monotonic()

    def __len__(self) -> int:
        """Return how many operations are not known to be done."""
        return len(self._begun)

    @property
    def done(self) -> int:
        """Number of operations that are done."""
        return self.count - ((self.count - self._word()) & 0xFFFFFFFF)

    @property
    def next(self) -> int:
        """What the GPU writes behind the operation that is begun next."""
        return (self.count + 1) & 0xFFFFFFFF

    def add(self, what: tuple[Any, ...], program: Program, held: Held | None) -> None:
        """Note that an operation has been put on a stream, behind which :attr:`next` will be written."""
        self.count += 1
        if not self._begun:
            self.moved_at = time.monotonic()
        self._begun.append((self.count, what, program, held))

    def has_done(self, peer: int, number: int) -> bool:
        """Return whether ``peer`` has done its part of an operation."""
        return (self._peer_word(peer) - number) & 0xFFFFFFFF < 1 << 31

    def oldest(self) -> Begun | None:
        """Return the oldest operation that is not done; lets go of the tensors of those that are."""
        done = self.done
        while self._begun:
            number, _, _, held = first = self._begun[0]
            if number > done:
                return Begun(*first)
            self._begun.popleft()
            if held:
                held.tensors = None
            self.moved_at = time.monotonic()
        return None

    def drop(self) -> None:
        """Forget everything."""
        self._begun.clear()


__all__ = ["Begun", "End", "Held", "Lane", "StreamWork", "raw_stream", "stream_of"]
