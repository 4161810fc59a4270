"""The work of a message between hosts."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch

from iris_pg.work import IrisWork


class WireWork(IrisWork):
    """A message to or from a rank of another host.

    Whoever waits for it finishes it. A thread does where nobody waits: for a future, for a wait with a deadline of its
    own, and for whoever only asks whether it is done.

    Args:
        outputs: what ``result()`` and the future give.
        peer: the other rank.
        keep: tensors that it reads or writes.
        finish: returns when it is done; raises what ended it.
    """

    def __init__(self, outputs: list[Any], peer: int, keep: Any, finish: Callable[[], None]) -> None:
        super().__init__(outputs, drive=self._drive)
        assert self.completion
        self.completion.keep = keep
        self._peer, self._finish = peer, finish
        self._finishing, self._lock = False, threading.Lock()

    def _drive(self, work: IrisWork) -> None:
        with self._lock:
            if self._finishing:
                return  # by another thread, which tells the completion
            self._finishing = True
        error: BaseException | None = None
        try:
            self._finish()
        except BaseException as raised:
            error = raised
        assert self.completion
        if tell := self.completion.finished(error):
            tell()

    def _finish_aside(self) -> None:
        if not self._finishing:
            threading.Thread(target=self._drive, args=(self,), name="iris_pg message", daemon=True).start()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """See :meth:`IrisWork.wait`."""
        if timeout:
            self._finish_aside()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """See :meth:`IrisWork.is_completed`."""
        self._finish_aside()
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """See :meth:`IrisWork.get_future`."""
        future = super().get_future()
        self._finish_aside()
        return future

    def source_rank(self) -> int:
        """Return the other rank."""
        return self._peer

    _source_rank = source_rank


__all__ = ["WireWork"]
