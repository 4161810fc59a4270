"""The Work of an operation: what torch and the user hold of it."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from iris_pg.completion import Completion
from iris_pg.errors import DeadlineError, IrisError


class IrisWork(Work):  # type: ignore[misc]
    """One operation on CPU tensors, under way or done.

    It keeps the operation's tensors alive until the bytes have moved. torch calls ``wait`` and ``get_future`` from C++,
    and everything else only from Python. Its methods may be called from any thread.

    Args:
        outputs: what ``result()`` and the future give.
        drive: called by ``wait`` with this work, to execute the operation in the waiting thread; None when it is done
            already.
    """

    completion: Completion | None = None
    end = 0  # index in the queue at which it is done
    _future: torch.futures.Future[Any] | None = None  # of one that was done from the start

    def __init__(self, outputs: list[Any], drive: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._outputs = outputs
        if drive is not None:
            self.completion = Completion(drive)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return True when the operation is done; its outputs may be read and its inputs reused.

        Raises:
            DeadlineError: not within ``timeout`` (none when zero), or the group's deadline passed.
            PeerLostError, MismatchError: what ended the operation.
        """
        if completion := self.completion:
            if not completion.done:
                self._await(completion, timeout.total_seconds() if timeout else 0.0)
            if completion.error:
                raise copy.copy(completion.error).with_traceback(completion.error.__traceback__)
        return True

    def _await(self, completion: Completion, timeout_s: float) -> None:
        drive = completion.drive
        if not timeout_s and drive:
            try:
                drive(self)
            except IrisError:
                if not completion.done:
                    raise
        if not completion.wait(timeout_s or None):
            raise DeadlineError(f"the operation was not done within the {timeout_s} s given to wait()")

    def synchronize(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as ``wait``: CPU tensors have no stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not. Does not block."""
        return self.completion is None or self.completion.done

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.completion is None or (self.completion.done and self.completion.error is None)

    def must_be_waited_for(self) -> bool:
        """Return whether ``wait`` would do anything, or raise."""
        return not self.is_success()

    def exception(self) -> BaseException | None:
        """Return what ended the operation, if it failed."""
        return self.completion.error if self.completion else None

    def of(self, outputs: list[Any]) -> IrisWork:
        """Make this the work of several operations, of which it is the last, with all their outputs; returns itself."""
        self._outputs = outputs
        return self

    def result(self) -> list[Any]:
        """Return the output tensors; wait first."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list of output tensors."""
        if self.completion:
            return self.completion.future(self._outputs)
        if self._future is None:
            self._future = torch.futures.Future()
            self._future.set_result(self._outputs)
        return self._future


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
