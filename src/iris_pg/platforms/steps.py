"""Steps that compiled code works through (``advance`` in platforms/atomics.py): calls of functions, and waits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

STEP_WORDS = 5  # of a step: a function and four arguments; or 0, the address of a word, and what it has to be at least
AT, COUNT, _TABLE, STATUS = range(4)  # words of a lane


class Steps:
    """Steps in a row, and how far they are.

    Args:
        steps: five integers each.

    Attributes:
        words: of all steps.
        lane: number of the next step, how many there are, where they are, and what a call has failed with.
        address: of the lane.
    """

    __slots__ = ("address", "lane", "words")

    def __init__(self, steps: Iterable[Sequence[int]]) -> None:
        flat = [word for step in steps for word in step]
        self.words = (ctypes.c_uint64 * len(flat))(*flat)
        self.lane = (ctypes.c_uint64 * 4)(0, len(flat) // STEP_WORDS, ctypes.addressof(self.words), 0)
        self.address = ctypes.addressof(self.lane)

    @property
    def at(self) -> int:
        """How many steps are done."""
        return self.lane[AT]

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or one has failed."""
        return self.lane[AT] >= self.lane[COUNT]

    @property
    def status(self) -> int:
        """What a call has failed with, or 0."""
        return self.lane[STATUS]


__all__ = ["AT", "COUNT", "STATUS", "STEP_WORDS", "Steps"]
