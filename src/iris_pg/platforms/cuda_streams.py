"""The CUDA platform's streams: what one is told to do, as calls of the driver that compiled code makes, one after
another, without Python in between.

A call of the driver takes a microsecond or two; from Python, among all that a program does, three to ten. An operation
of copy engines is up to fifty of them. So they are put into a table once (:class:`Calls`), and each time the operation
is performed the table is worked through as a whole (``advance`` in platforms/atomics.py), without the GIL: the driver
may keep a call waiting, and whoever could help is another thread.

Source: cuda.h, for the layout of what is passed by address.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from iris_pg.errors import DriverError
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.steps import AT, COUNT, STATUS, STEP_WORDS, Steps

_MOST_OPS = 255  # of one cuStreamBatchMemOp: its count is less than 256
_WAIT, _WRITE, _EQUAL = 1, 2, 1  # CU_STREAM_MEM_OP_WAIT_VALUE_32, ..._WRITE_VALUE_32, CU_STREAM_WAIT_VALUE_EQ
_OP_WORDS = 6  # 64-bit words of CUstreamBatchMemOpParams: operation, address, value, flags, and two more
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING
_CONFIG_STREAM = 4  # 64-bit word of CUlaunchConfig that is the stream
_ARGUMENTS = STEP_WORDS - 1

Launch = Callable[[int], None]
"""Tells a stream (``stream_handle``) to do one thing; returns at once."""


class FlagOp(NamedTuple):
    """One access of a stream to a 32-bit flag.

    Args:
        waits: wait until the flag is ``value``; else write it, after all that the stream did before.
        address: as the GPU sees it.
    """

    waits: bool
    address: int
    value: int


def stream_handle(stream: int) -> int:
    """Return torch's handle of a stream (``stream.cuda_stream``) as the functions here take it: as it is."""
    return stream


# Calls ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def address_of(name: str) -> int:
    """Return where a function of the driver is."""
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0


@functools.cache
def _function(name: str) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * _ARGUMENTS)(address_of(name))


def _check(name: str, status: int) -> None:
    if status:
        kind, text = ctypes.c_char_p(b"unknown"), ctypes.c_char_p(b"unknown")
        _library().cuGetErrorName(status, ctypes.byref(kind))
        _library().cuGetErrorString(status, ctypes.byref(text))
        said = f"{(kind.value or b'').decode()} ({(text.value or b'').decode()})"
        raise DriverError(f"{name.removesuffix('_v2')} failed: {said}", status)


class Call:
    """One call of the driver for a stream; it can be made, or be put into :class:`Calls`.

    Args:
        name: of the function.
        arguments: integers, four at most. A function that takes fewer does not look at the rest.
        stream: number of the argument that the stream is; None when it is among the arguments, or in ``config``.
        config: what the first argument is to point to; the stream is in its word :data:`_CONFIG_STREAM`.
        keep: what has to stay as long as the call is used.
    """

    __slots__ = ("arguments", "config", "keep", "name", "stream")

    def __init__(
        self, name: str, *arguments: int, stream: int | None, config: Sequence[int] = (), keep: Any = None
    ) -> None:
        if len(arguments) > _ARGUMENTS:
            raise ValueError(f"{name}: {len(arguments)} arguments")
        self.name, self.stream, self.config, self.keep = name, stream, config, keep
        self.arguments = [*arguments, *[0] * (_ARGUMENTS - len(arguments))]

    def on(self, stream: int) -> Call:
        """Return the same for one stream, whatever stream it is given."""
        arguments, keep = list(self.arguments), self.keep
        if self.stream is not None:
            arguments[self.stream] = stream
        elif self.config:
            config = (ctypes.c_uint64 * len(self.config))(*self.config)
            config[_CONFIG_STREAM] = stream
            arguments[0], keep = ctypes.addressof(config), (config, keep)
        return Call(self.name, *arguments, stream=None, keep=keep)

    @property
    def words(self) -> tuple[int, ...]:
        """The address of the function, and the arguments: a step of ``advance``."""
        return address_of(self.name), *self.arguments

    def __call__(self, stream: int) -> None:
        """Make the call.

        Raises:
            DriverError: the driver does not take it.
        """
        call = self.on(stream)  # it keeps what its arguments point to
        _check(self.name, _function(self.name)(*call.arguments))


class Calls:
    """What a stream is told, one thing after another, again and again. One thread at a time does so.

    Args:
        launches: calls of the driver, and others that are called with the stream.
        ops: flags that the stream accesses behind them.
        mark: address of a word that it writes behind all, when :meth:`marked` is called.
    """

    __slots__ = ("_before", "_mark", "_number", "_ops", "_table", "_unmarked")

    def __init__(self, launches: Iterable[Launch], ops: Sequence[FlagOp] = (), mark: int | None = None) -> None:
        self._before: list[_Table | Launch] = []  # what ends with something that is no call of the driver
        calls: list[Call] = []
        for launch in launches:
            if isinstance(launch, Call):
                calls.append(launch)
            else:
                self._before += [_Table(calls), launch] if calls else [launch]
                calls = []
        self._mark = mark
        calls += flags([*ops, FlagOp(False, mark, 0)] if mark is not None else ops)
        self._table = _Table(calls)
        if mark is not None:
            # The last call accesses flags, of which the last one is the mark: without it it has one less, or is none.
            _, count, parameters, _ = calls[-1].arguments
            self._number = ctypes.c_uint64.from_address(parameters + 8 * (_OP_WORDS * (count - 1) + 2))
            self._ops, self._unmarked = count, len(calls) - (count == 1)

    def __call__(self, stream: int) -> None:
        """Let ``stream`` do it, without the mark.

        Raises:
            DriverError: the driver does not take a call. Those before it have been made.
        """
        for part in self._before:
            part(stream)
        if self._mark is None:
            self._table(stream)
        else:
            self._table.words[-3] = self._ops - 1
            self._table(stream, self._unmarked)

    def marked(self, stream: int, value: int) -> None:
        """Let ``stream`` do it, and write ``value`` into the word. Raises as above."""
        for part in self._before:
            part(stream)
        self._number.value, self._table.words[-3] = value, self._ops
        self._table(stream)

    def mark(self, stream: int, value: int) -> None:
        """Let ``stream`` write ``value`` into the word."""
        assert self._mark is not None
        write(self._mark, value)(stream)


class _Table(Steps):
    """Calls, as compiled code reads them."""

    __slots__ = ("_advance", "_calls", "_lanes", "_lanes_at", "_stream", "_streams")

    def __init__(self, calls: Sequence[Call]) -> None:
        # A call whose stream is elsewhere has a place of its own for it here.
        self._calls = [call.on(0) if call.config else call for call in calls]
        super().__init__(call.words for call in self._calls)
        self._advance, self._lanes = atomics().advance, ctypes.c_uint64(self.address)
        self._lanes_at = ctypes.addressof(self._lanes)
        self._stream = -1  # that the calls are for now
        places = []
        for i, (given, call) in enumerate(zip(calls, self._calls, strict=True)):
            if given.stream is not None:
                places.append(ctypes.addressof(self.words) + 8 * (STEP_WORDS * i + 1 + given.stream))
            elif given.config:
                places.append(call.arguments[0] + 8 * _CONFIG_STREAM)
        self._streams = [ctypes.c_uint64.from_address(place) for place in places]

    def __call__(self, stream: int, count: int | None = None) -> None:
        """Make the calls, or the first ``count`` of them, for a stream."""
        if stream != self._stream:
            for word in self._streams:
                word.value = stream
            self._stream = stream
        lane = self.lane
        lane[AT], lane[COUNT] = 0, len(self._calls) if count is None else count
        self._advance(self._lanes_at, 1, 0)
        if lane[STATUS]:
            status, lane[STATUS] = lane[STATUS], 0
            _check(self._calls[lane[AT]].name, status)


# What a stream can be told --------------------------------------------------------------------------------------------


def copy(dst: int, src: int, nbytes: int) -> Call:
    """Return what copies ``nbytes`` from ``src`` to ``dst``, addresses of device memory: between two GPUs by a copy
    engine, within one as the driver likes (on H200s at 2 TB/s, but behind a kernel that fills the GPU; so, too, with
    cuMemcpyBatchAsync and its hint to overlap).
    """
    return Call("cuMemcpyDtoDAsync_v2", dst, src, nbytes, stream=3)


def copy_2d(dst: int, src: int, width_bytes: int, rows: int, dst_pitch_bytes: int, src_pitch_bytes: int) -> Call:
    """Return what copies ``rows`` rows of ``width_bytes``, ``pitch`` bytes apart, in memory of GPUs."""
    device = 2  # CU_MEMORYTYPE_DEVICE
    # CUDA_MEMCPY2D. Of the source, and then of the target: x, y, kind of memory, address in the host, on the device,
    # array, pitch.
    source, target = (0, 0, device, 0, src, 0, src_pitch_bytes), (0, 0, device, 0, dst, 0, dst_pitch_bytes)
    what = (ctypes.c_uint64 * 16)(*source, *target, width_bytes, rows)
    return Call("cuMemcpy2DAsync_v2", ctypes.addressof(what), stream=1, keep=what)


def flags(ops: Sequence[FlagOp]) -> list[Call]:
    """Return what accesses flags one after another, in as few calls as the driver takes them."""
    return [_batch(ops[i : i + _MOST_OPS]) for i in range(0, len(ops), _MOST_OPS)]


def _batch(ops: Sequence[FlagOp]) -> Call:
    parameters = (ctypes.c_uint64 * (_OP_WORDS * len(ops)))()
    for i, op in enumerate(ops):
        kind, how = (_WAIT, _EQUAL) if op.waits else (_WRITE, 0)
        parameters[_OP_WORDS * i : _OP_WORDS * i + 4] = [kind, op.address, op.value, how]
    return Call("cuStreamBatchMemOp_v2", 0, len(ops), ctypes.addressof(parameters), stream=0, keep=parameters)


def kernel(function: int, ctas: int, threads: int, shared_bytes: int, parameters: int, keep: Any) -> Call:
    """Return what launches a kernel with a grid of one dimension.

    Args:
        function: its handle, loaded for the device that is current when the call is made.
        ctas, threads: of the grid, and of a CTA.
        shared_bytes: of memory that a CTA's threads share.
        parameters: address of the addresses of its arguments.
        keep: what they are in.
    """
    # CUlaunchConfig: dimensions of the grid and of a block, and shared memory, of 32 bits; the stream; no attributes.
    config = ctas | 1 << 32, 1 | threads << 32, 1 | 1 << 32, shared_bytes, 0, 0, 0
    return Call("cuLaunchKernelEx", 0, function, parameters, stream=None, config=config, keep=keep)


class Event:
    """What a stream has come to, for others to wait for. It may be recorded again: who has been told to wait, waits for
    what it stood for then.
    """

    def __init__(self) -> None:
        event = ctypes.c_uint64()
        _check("cuEventCreate", _function("cuEventCreate")(ctypes.addressof(event), _UNTIMED, 0, 0))
        self._event = event.value
        end = weakref.finalize(self, _destroy_event, self._event, os.getpid())
        end.atexit = False

    @property
    def record(self) -> Call:
        """What lets it stand for all that a stream has been told."""
        return Call("cuEventRecord", self._event, 0, stream=1, keep=self)

    @property
    def wait(self) -> Call:
        """What lets a stream wait for it."""
        return Call("cuStreamWaitEvent", 0, self._event, stream=0, keep=self)


def _destroy_event(event: int, process: int) -> None:
    if os.getpid() == process:
        _check("cuEventDestroy", _function("cuEventDestroy_v2")(event, 0, 0, 0))


def write(address: int, value: int) -> Call:
    """Return what writes a 32-bit word, after all that the stream did before."""
    return Call("cuStreamWriteValue32_v2", 0, address, value, stream=0)


def on(stream: int, launch: Launch) -> Launch:
    """Return what does the same on one stream, whatever stream it is given."""
    return launch.on(stream) if isinstance(launch, Call) else lambda _: launch(stream)


__all__ = [
    "Call",
    "Calls",
    "Event",
    "FlagOp",
    "Launch",
    "address_of",
    "copy",
    "copy_2d",
    "flags",
    "kernel",
    "on",
    "stream_handle",
    "write",
]
