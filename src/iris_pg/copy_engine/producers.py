"""What kernels that write into a queue of a GPU share, where the queue itself is a driver's: how far it is reserved and
committed, in memory of that GPU, and the answers, in memory of the host that the GPU and its copy engines write.

It lives as long as the process, as the queue does: who comes next goes on where the last one stopped.
"""

from __future__ import annotations

import torch

from iris_pg.copy_engine.ring import TOLD, Answers, Context, RingError, line_of
from iris_pg.platforms.atomics import atomics

_CACHED, _LINE = 0, 8  # words; a cache line apart


class Producers:
    """The words of one queue.

    Args:
        queue: the queue as its driver describes it.
        nbytes: size of its ring.
        device: whose kernels write into it.
        begun: index at which the next packet goes.
    """

    def __init__(self, queue: Context, nbytes: int, device: torch.device, begun: int) -> None:
        self._nbytes = nbytes
        self._words = torch.zeros(16, dtype=torch.int64, device=device)
        self._words[_CACHED] = self._words[_LINE] = begun
        self._answers = torch.zeros(8, dtype=torch.int64, pin_memory=device.type != "cpu")
        base = self._words.data_ptr()
        self.context = queue._replace(cached_wptr=base + 8 * _CACHED, committed_wptr=base + 8 * _LINE)

    @property
    def answers(self) -> int:
        """Address of the answers."""
        return self._answers.data_ptr()

    def limit(self, limit_s: float) -> None:
        """Set the deadline of kernels that are launched from now on, in seconds."""
        for word, value in line_of(self._nbytes, limit_s, self._answers.data_ptr()).items():
            self._words[_LINE + word] = value

    @property
    def cached_wptr(self) -> int:
        """Address of how far the queue is reserved."""
        return self.context.cached_wptr

    def error(self) -> str | None:
        """Return why a kernel has given up the queue, in words, if one has."""
        code = atomics().load32(self._answers.data_ptr() + 4 * Answers.ERROR)
        return f"a kernel {TOLD[RingError(code)]}" if code else None


__all__ = ["Producers"]
