"""How an operation under way ends: when it is done, what it holds until then, and its future."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch


class Completion:
    """What the thread that executes an operation tells, and those who wait for it are told. From any thread.

    The executing thread holds this and not the work. So when an operation is seen to be done, the caller has the last
    references to its tensors; otherwise they would go at a time that depends on how threads are scheduled, and with
    them, on one rank earlier than on another, blocks of the heap that ranks use in the same order.

    Args:
        drive: executes the operation in the calling thread.

    Attributes:
        done: whether the operation has ended, well or not.
        error: what ended it, if it failed.
        keep: tensors that it reads or writes.
        after: runs when the bytes have moved, before anyone is told.
    """

    __slots__ = ("_event", "_future", "_lock", "_outputs", "after", "done", "drive", "error", "keep")

    def __init__(self, drive: Callable[..., None]) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.drive: Callable[..., None] | None = drive
        self.keep: Any = None
        self.after: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._outputs: list[Any] = []  # of the future

    def finished(self, error: BaseException | None) -> Callable[[], None] | None:
        """Tell, once, that the last packet has been executed, or that the operation has failed.

        Returns:
            What runs the callbacks of the future, if it has one. They are the user's and may start operations, so the
            caller calls it when it holds no lock.
        """
        if error is None and self.after:
            try:
                self.after()
            except BaseException as raised:
                error = raised
        with self._lock:
            self.drive = self.keep = self.after = None
            self.error, self.done = error, True
            event, future, outputs = self._event, self._future, self._outputs
            self._outputs = []
        if future:
            if event:
                event.set()
            return functools.partial(_resolve, future, outputs, error)
        del outputs
        if event:
            event.set()
        return None

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether the operation has ended, after at most ``timeout_s`` seconds (None: any number)."""
        with self._lock:
            if self.done:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout_s)

    def future(self, outputs: list[Any]) -> torch.futures.Future[Any]:
        """Return the future of ``outputs``, the same at every call."""
        with self._lock:
            is_new, has_ended = self._future is None, self.done
            future = self._future = self._future or torch.futures.Future()
            if is_new and not has_ended:
                self._outputs = outputs
        if is_new and has_ended:
            _resolve(future, outputs, self.error)
        return future


def _resolve(future: torch.futures.Future[Any], outputs: list[Any], error: BaseException | None) -> None:
    if error:
        # A copy, without the frames it was raised in. They lead back to the work, and so to the future, and no garbage
        # collector sees through a future.
        future.set_exception(copy.copy(error))  # type: ignore[arg-type]
    else:
        future.set_result(outputs)
