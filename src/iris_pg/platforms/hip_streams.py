"""The HIP platform's streams: what one is told to do, and a trial of it; the interface is that of platforms/cuda.py.

What is not certain from the documentation is tried when a group is made, by moving bytes and looking at them
(:func:`check`). Nothing here has been run on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from iris_pg.errors import UnsupportedError
from iris_pg.platforms import hip_runtime as h
from iris_pg.platforms.cuda import view
from iris_pg.platforms.cuda_streams import FlagOp, Launch


def stream_handle(stream: int) -> Any:
    """Return torch's handle of a stream (``stream.cuda_stream``) as the runtime's functions take it."""
    return stream


def copy(dst: int, src: int, nbytes: int) -> Launch:
    """Return what copies ``nbytes`` from ``src`` to ``dst``, addresses of device memory, by a copy engine."""
    function = h.runtime().hipMemcpyAsync

    def launch(stream: Any) -> None:
        status = function(dst, src, nbytes, h.DEVICE_TO_DEVICE_NO_CU, stream)
        if status:
            raise h.error("hipMemcpyAsync", status)

    return launch


def copy_2d(dst: int, src: int, width_bytes: int, rows: int, dst_pitch_bytes: int, src_pitch_bytes: int) -> Launch:
    """Return what copies ``rows`` rows of ``width_bytes``, ``pitch`` bytes apart, in memory of GPUs."""
    function = h.runtime().hipMemcpy2DAsync
    what = dst, dst_pitch_bytes, src, src_pitch_bytes, width_bytes, rows, h.DEVICE_TO_DEVICE_NO_CU

    def launch(stream: Any) -> None:
        status = function(*what, stream)
        if status:
            raise h.error("hipMemcpy2DAsync", status)

    return launch


class Calls:
    """What a stream is told, one thing after another, and a word that it may write behind it.

    Args:
        launches: what it is told.
        ops: flags that it accesses behind them.
        mark: address of the word.
    """

    def __init__(self, launches: Iterable[Launch], ops: Sequence[FlagOp] = (), mark: int | None = None) -> None:
        self._launches, self._mark = [*launches, *flags(ops)], mark

    def __call__(self, stream: Any) -> None:
        """Let ``stream`` do it, without the mark."""
        for launch in self._launches:
            launch(stream)

    def marked(self, stream: Any, value: int) -> None:
        """Let ``stream`` do it, and write ``value`` into the word."""
        self(stream)
        self.mark(stream, value)

    def mark(self, stream: Any, value: int) -> None:
        """Let ``stream`` write ``value`` into the word."""
        assert self._mark is not None
        write(self._mark, value)(stream)


def flags(ops: Sequence[FlagOp]) -> list[Launch]:
    """Return what accesses flags one after another, a call each: batches of them have been wrong in graphs that are
    replayed (ROCm/rocm-systems #9334).
    """
    return [_wait(op.address, op.value) if op.waits else write(op.address, op.value) for op in ops]


def _wait(address: int, value: int) -> Launch:
    return lambda stream: h.call("hipStreamWaitValue32", stream, address, value, h.EQUAL, h.ALL_BITS)


def write(address: int, value: int) -> Launch:
    """Return what writes a 32-bit word, after all that the stream did before."""
    return lambda stream: h.call("hipStreamWriteValue32", stream, address, value, 0)


def on(stream: Any, launch: Launch) -> Launch:
    """Return what does the same on one stream, whatever stream it is given."""
    return lambda _: launch(stream)


class Event:
    """As :class:`iris_pg.platforms.cuda.Event`."""

    def __init__(self) -> None:
        self._event = h.pointer("hipEventCreateWithFlags", h.DISABLE_TIMING)
        end = weakref.finalize(self, _destroy_event, self._event, os.getpid())
        end.atexit = False

    def record(self, stream: Any) -> None:
        """Let it stand for all that ``stream`` has been told."""
        h.call("hipEventRecord", self._event, stream)

    def wait(self, stream: Any) -> None:
        """Let ``stream`` wait for it."""
        h.call("hipStreamWaitEvent", stream, self._event, 0)


def _destroy_event(event: int, process: int) -> None:
    if os.getpid() == process:
        h.call("hipEventDestroy", event)


# Does it do what it says? ---------------------------------------------------------------------------------------------

CHECKED_BYTES = (64, 8 << 10, 64 << 10)  # below and above 16 KiB, where copies without compute units have differed


def check(
    device: torch.device,
    stream: int,
    here: tuple[int, int],
    there: int,
    flag: tuple[int, int],
    settle: Callable[[], None],
    most: int = max(CHECKED_BYTES),
) -> None:
    """Try what a stream is told in an operation, by moving bytes and looking at them: copies by a copy engine that
    are skipped or do not reach a peer, and waits and writes of flags that have no effect, are errors then.

    Args:
        device, stream: the GPU, and a stream of it.
        here: addresses of two places in this rank's memory, in which the largest of :data:`CHECKED_BYTES` fits.
        there: address of such a place in a peer's memory, where nobody else writes. It may be the second of ``here``.
        flag: address of a 32-bit word, as the host and as the GPU sees it.
        settle: returns when the stream, and the current one, have done everything, or raises.
        most: bytes of each place, when it is less.

    Raises:
        UnsupportedError: saying what does not work.
    """
    if not h.number("hipDeviceGetAttribute", h.CAN_USE_STREAM_WAIT_VALUE, device.index):
        raise UnsupportedError(f"{device} has no stream memory operations (hipStreamWaitValue32); use engine='cu'")
    source, back = here
    host, on_gpu = flag
    word = ctypes.c_uint32.from_address(host)
    for turn, nbytes in enumerate((min(n, most) for n in CHECKED_BYTES), 1):
        pattern = torch.arange(nbytes // 4, dtype=torch.int32, device=device) * 40503 + turn
        view(device, source, nbytes, torch.int32).copy_(pattern)
        view(device, back, nbytes, torch.int32).zero_()
        settle()
        word.value = 0
        calls: list[Launch] = [
            *flags([FlagOp(False, on_gpu, turn), FlagOp(True, on_gpu, turn)]),
            copy(there, source, nbytes),
            *([copy(back, there, nbytes)] if there != back else []),
            *flags([FlagOp(False, on_gpu, 1000 + turn)]),
        ]
        for launch in calls:
            launch(stream)
        settle()
        if word.value != 1000 + turn:
            raise UnsupportedError(
                f"{device}: hipStreamWriteValue32 left {word.value} in host memory and not {1000 + turn}; streams "
                "cannot carry flags here; use engine='cu', or another version of ROCm"
            )
        if not torch.equal(view(device, back, nbytes, torch.int32), pattern):
            raise UnsupportedError(
                f"{device}: a copy of {nbytes} bytes with hipMemcpyDeviceToDeviceNoCU, to a peer's memory and back, "
                "did not give what was copied (it may have been skipped: ROCm/rocm-systems #11318); use engine='cu', "
                "or another version of ROCm"
            )


__all__ = ["CHECKED_BYTES", "Calls", "Event", "check", "copy", "copy_2d", "flags", "on", "stream_handle", "write"]
