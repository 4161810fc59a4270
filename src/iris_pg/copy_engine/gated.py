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
from iris_pg.platforms.steps import STEP_WORDS, Steps


class Gated(Steps):
    """Calls for a stream, and the gates that let them go, in order.

    Args:
        calls: polls of words in memory of the host, linear copies and counts.
        stream: torch's handle of the stream.

    Raises:
        UnsupportedError: another call.
    """

    __slots__ = ()

    def __init__(self, calls: Sequence[Call], stream: int) -> None:
        super().__init__(_step(call, stream) for call in calls)

    def gate(self) -> Poll:
        """Return the gate that it waits for."""
        _, flag, value, *_ = self.words[STEP_WORDS * self.at : STEP_WORDS * self.at + STEP_WORDS]
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
