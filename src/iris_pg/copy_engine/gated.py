"""Transfers of one stream behind gates, carried out by compiled code: a table of driver calls, and of words of the
host's memory to wait for between them.

A thread in Python would do each with the interpreter's lock, which the host's other threads want too: on a machine with
32 cores it gave a batch to its stream within 10 to 100 us of its gate. This way it takes two driver calls, about 5 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from iris_pg.copy_engine.calls import Call, Count, Linear, Poll
from iris_pg.errors import UnsupportedError
from iris_pg.platforms import cuda_streams
from iris_pg.platforms.atomics import atomics

_AT, _COUNT, _TABLE, _STATUS = range(4)  # words of a lane


class Gated:
    """Calls for a stream, and the gates that let them go, in order.

    Args:
        calls: polls of words in memory of the host, linear copies and counts.
        stream: torch's handle of the stream.

    Raises:
        UnsupportedError: another call.
    """

    def __init__(self, calls: Sequence[Call], stream: int) -> None:
        steps = [_step(call, stream) for call in calls]
        self._table = (ctypes.c_uint64 * (5 * len(steps)))(*(word for step in steps for word in step))
        self._lane = (ctypes.c_uint64 * 4)(0, len(steps), ctypes.addressof(self._table), 0)
        self.address = ctypes.addressof(self._lane)

    @property
    def at(self) -> int:
        """How many steps are done."""
        return self._lane[_AT]

    @property
    def is_over(self) -> bool:
        """Whether all steps are done, or one has failed."""
        return self._lane[_AT] >= self._lane[_COUNT]

    @property
    def status(self) -> int:
        """What a driver call has failed with, or 0."""
        return self._lane[_STATUS]

    def gate(self) -> Poll:
        """Return the gate that it waits for."""
        _, flag, value, *_ = self._table[5 * self.at : 5 * self.at + 5]
        return Poll(flag, value, in_host=True)


def _step(call: Call, stream: int) -> tuple[int, ...]:
    match call:
        case Poll(flag, value, True):
            return 0, flag, value, 0, 0
        case Linear(dst, src, nbytes):
            return cuda_streams.copy(dst, src, nbytes).on(stream).words
        case Count(flag, value):
            return cuda_streams.write(flag, value).on(stream).words
    raise UnsupportedError(f"{call} behind a gate; a plan has linear copies")


def advance(gated: Sequence[Gated], turns: int) -> None:
    """Carry out what is let go, without the GIL, until all is done, or for ``turns`` looks at all gates nothing was.
    Only one thread does.
    """
    lanes = (ctypes.c_uint64 * len(gated))(*(one.address for one in gated))
    atomics().advance(ctypes.addressof(lanes), len(gated), turns)


__all__ = ["Gated", "advance"]
