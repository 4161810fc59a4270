"""The Work of an operation: when it is done, what it holds until then, and its future."""

from __future__ import annotations

import copy
import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from iris_pg.errors import DeadlineError, IrisError


class IrisWork(Work):  # type: ignore[misc]
    """One operation on CPU tensors, under way or done.

    It keeps the operation's tensors alive until the bytes have moved. torch calls ``wait`` and ``get_future`` from C++,
    and everything else only from Python. Its methods may be called from any thread.

    Args:
        outputs: what ``result()`` and the future give.
        drive: called by ``wait`` to execute the operation in the waiting thread; None when it is done already.
    """

    def __init__(self, outputs: list[Any], drive: Callable[[IrisWork], None] | None = None) -> None:
        super().__init__()
        self._outputs, self._drive = outputs, drive
        self._done = drive is None
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock() if drive else None
        self._event: threading.Event | None = None
        self.after: Callable[[], None] | None = None  # runs when the bytes have moved, before anyone is told
        self.end = 0  # index in the queue at which it is done
        self.keep: Any = None  # tensors that the operation reads or writes

    def finished(self, error: BaseException | None) -> None:
        """Called once by the engine when the last packet has been executed, or the operation has failed."""
        assert self._lock is not None
        if error is None and self.after:
            try:
                self.after()
            except BaseException as raised:
                error = raised
        with self._lock:
            # Let go of tensors first: whoever sees that the work is done may count on nobody else holding them.
            self._drive = self.keep = self.after = None
            self._error, self._done = error, True
            future, event = self._future, self._event
        if event:
            event.set()
        if future:
            self._resolve(future)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return True when the operation is done; its outputs may be read and its inputs reused.

        Raises:
            DeadlineError: not within ``timeout`` (none when zero), or the group's deadline passed.
            PeerLostError, MismatchError: what ended the operation.
        """
        if not self._done:
            self._await(timeout.total_seconds() if timeout else 0.0)
        if self._error:
            raise copy.copy(self._error).with_traceback(self._error.__traceback__)
        return True

    def _await(self, timeout_s: float) -> None:
        assert self._lock is not None
        drive = self._drive
        if not timeout_s and drive:
            try:
                drive(self)
            except IrisError:
                if not self._done:
                    raise
        with self._lock:
            if self._done:
                return
            event = self._event = self._event or threading.Event()
        if not event.wait(timeout_s or None):
            raise DeadlineError(f"the operation was not done within the {timeout_s} s given to wait()")

    def synchronize(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as ``wait``: CPU tensors have no stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not. Does not block."""
        return self._done

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """Return what ended the operation, if it failed."""
        return self._error

    def of(self, outputs: list[Any]) -> IrisWork:
        """Make this the work of several operations, of which it is the last, with all their outputs; returns itself."""
        self._outputs = outputs
        return self

    def result(self) -> list[Any]:
        """Return the output tensors; wait first."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of output tensors."""
        if self._lock is None:
            future = self._future = self._future or torch.futures.Future()
            if not future.done():
                self._resolve(future)
            return future
        with self._lock:
            fresh = self._future is None
            future = self._future = self._future or torch.futures.Future()
            done = self._done
        if fresh and done:
            self._resolve(future)
        return future

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        if self._error:
            # A copy, without the frames it was raised in. They lead back to this work, and so to the future, and no
            # garbage collector sees through a future.
            future.set_exception(copy.copy(self._error))  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)


class Together(IrisWork):
    """The work of several operations, done when all are, in whatever order they end.

    Args:
        works: at least one.
        outputs: what ``result()`` and the future give.
    """

    def __init__(self, works: list[IrisWork], outputs: list[Any]) -> None:
        super().__init__(outputs)
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for each; ``timeout`` is for each. Raises what ended the first that failed."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what ended the first that failed, if one has."""
        return next((error for work in self._works if (error := work.exception())), None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of output tensors."""
        done = torch.futures.collect_all([work.get_future() for work in self._works])
        return done.then(lambda each: ([future.value() for future in each.value()], self._outputs)[1])
