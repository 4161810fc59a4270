"""platforms/cuda_streams.py with functions that only take notes in the driver's place, called by compiled code."""
# ruff: noqa: N802  (names of the driver)

from __future__ import annotations

import ctypes
import gc
import struct

import pytest

from iris_pg.errors import DriverError
from iris_pg.platforms import cuda_streams as streams
from iris_pg.platforms.cuda_streams import Call, FlagOp

STREAM, SECOND = 0x77, 0x88
NAMES = (
    *("cuMemcpyDtoDAsync_v2", "cuMemcpy2DAsync_v2", "cuStreamBatchMemOp_v2", "cuStreamWriteValue32_v2"),
    *("cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy_v2", "cuLaunchKernelEx"),
)


class Driver:
    """What it has been told: (name, arguments), with what arguments point to in their place."""

    def __init__(self):
        self.told, self.statuses, self.events = [], {}, 0
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)
        self.functions = {name: kind(lambda *arguments, name=name: self._take(name, arguments)) for name in NAMES}

    def address_of(self, name):
        return ctypes.cast(self.functions[name], ctypes.c_void_p).value

    def _take(self, name, arguments):
        if name == "cuStreamBatchMemOp_v2":
            stream, count, at, _ = arguments
            words = struct.unpack(f"<{6 * count}Q", ctypes.string_at(at, 48 * count))
            assert not any(words[4::6]) and not any(words[5::6])
            arguments = stream, [words[6 * i : 6 * i + 4] for i in range(count)]
        elif name == "cuLaunchKernelEx":
            at, function, parameters, extra = arguments
            *sizes, stream, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(at, 52))
            assert (attributes, count, extra) == (0, 0, 0)
            arguments = tuple(sizes), stream, function, parameters
        elif name == "cuMemcpy2DAsync_v2":
            arguments = struct.unpack("<16Q", ctypes.string_at(arguments[0], 128)), arguments[1]
        elif name == "cuEventCreate":
            self.events += 1
            ctypes.c_uint64.from_address(arguments[0]).value = 0x500 + self.events
            arguments = arguments[1:2]
        self.told.append((name, *arguments))
        return self.statuses.get(name, 0)

    def taken(self):
        told, self.told = self.told, []
        return told


class Library:
    """What says what a status means."""

    @staticmethod
    def cuGetErrorName(status, into):
        into._obj.value = b"CUDA_ERROR_%d" % status

    @staticmethod
    def cuGetErrorString(status, into):
        into._obj.value = b"out of luck"


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(streams, "address_of", made.address_of)
    monkeypatch.setattr(streams, "_function", made.functions.__getitem__)
    monkeypatch.setattr(streams, "_library", Library)
    return made


def write_of(op):
    return (1, op.address, op.value, 1) if op.waits else (2, op.address, op.value, 0)


def test_calls_are_made_in_order_on_the_stream_given(driver):
    calls = streams.Calls(
        [
            streams.copy(1 << 40, 2 << 40, 3),
            streams.copy_2d(0x100, 0x200, 8, 3, 16, 32),
            *streams.flags([FlagOp(True, 0x1000, 5), FlagOp(False, 0x1000, 0)]),
            streams.on(SECOND, streams.copy(4, 5, 6)),
            streams.write(0x2000, 9),
        ]
    )
    for stream in (STREAM, STREAM, 0x99, 0):
        calls(stream)
        assert driver.taken() == [
            ("cuMemcpyDtoDAsync_v2", 1 << 40, 2 << 40, 3, stream),
            # x, y, memory (2: of a device), host, device, array, pitch: of the source, of the target; width, rows
            ("cuMemcpy2DAsync_v2", (0, 0, 2, 0, 0x200, 0, 32, 0, 0, 2, 0, 0x100, 0, 16, 8, 3), stream),
            ("cuStreamBatchMemOp_v2", stream, [(1, 0x1000, 5, 1), (2, 0x1000, 0, 0)]),
            ("cuMemcpyDtoDAsync_v2", 4, 5, 6, SECOND),
            ("cuStreamWriteValue32_v2", stream, 0x2000, 9, 0),
        ]


def test_what_is_no_call_of_the_driver_keeps_its_place(driver):
    other = []
    calls = streams.Calls([other.append, streams.copy(1, 2, 3), streams.on(SECOND, other.append)], (), 0x5000)
    calls.marked(STREAM, 7)
    assert [name for name, *_ in driver.taken()] == ["cuMemcpyDtoDAsync_v2", "cuStreamBatchMemOp_v2"]
    assert other == [STREAM, SECOND]
    calls(STREAM)
    assert [name for name, *_ in driver.taken()] == ["cuMemcpyDtoDAsync_v2"]


@pytest.mark.parametrize("count", [0, 1, 3, 254, 255, 256, 510])
def test_flags_are_few_calls_and_the_mark_comes_behind_them(driver, count):
    ops = [FlagOp(i % 2 == 0, 1000 + i, i) for i in range(count)]
    calls = streams.Calls([], ops, 5000)
    for number in (8, None, 9, (1 << 32) - 1, None):
        calls(STREAM) if number is None else calls.marked(STREAM, number)
        batches = [told for name, _, told in driver.taken()]
        assert all(len(batch) == 255 for batch in batches[:-1]) and all(batches)
        should = [write_of(op) for op in ops] + ([] if number is None else [(2, 5000, number, 0)])
        assert [op for batch in batches for op in batch] == should
    calls.mark(STREAM, 11)
    assert driver.taken() == [("cuStreamWriteValue32_v2", STREAM, 5000, 11, 0)]
    streams.Calls([], ops)(STREAM)
    assert [op for _, _, batch in driver.taken() for op in batch] == [write_of(op) for op in ops]


def test_a_call_that_fails_is_named_and_the_next_ones_are_not_made(driver):
    calls = streams.Calls([streams.write(8, 1), streams.copy(1, 2, 3), streams.copy_2d(1, 2, 3, 4, 5, 6)], (), 0x5000)
    driver.statuses["cuMemcpyDtoDAsync_v2"] = 700
    for _ in range(2):
        with pytest.raises(DriverError, match=r"cuMemcpyDtoDAsync failed: CUDA_ERROR_700 .out of luck.") as caught:
            calls.marked(STREAM, 1)
        assert caught.value.status == 700 and len(driver.taken()) == 2
    with pytest.raises(DriverError, match="cuMemcpyDtoDAsync failed"):
        streams.copy(1, 2, 3)(STREAM)
    driver.statuses.clear()
    driver.taken()
    calls.marked(STREAM, 1)
    assert len(driver.taken()) == 4


def test_an_event_lasts_as_long_as_calls_of_it(driver):
    event = streams.Event()
    assert driver.taken() == [("cuEventCreate", 2)]
    event.record(STREAM)
    calls = streams.Calls([event.record, streams.on(SECOND, event.wait)])
    del event
    gc.collect()
    calls(STREAM)
    record = ("cuEventRecord", 0x501, STREAM, 0, 0)
    assert driver.taken() == [record, record, ("cuStreamWaitEvent", SECOND, 0x501, 0, 0)]
    del calls
    gc.collect()
    assert driver.taken() == [("cuEventDestroy_v2", 0x501, 0, 0, 0)]


def test_a_kernel_is_launched_on_the_stream_given(driver):
    launches = [streams.kernel(0x400 + i, 16, 512, 1024, 0x600, None) for i in range(2)]
    calls = streams.Calls([launches[0], streams.on(SECOND, launches[1])])
    for stream in (STREAM, 0x99):
        calls(stream)
        launches[0](stream)
        first = ("cuLaunchKernelEx", (16, 1, 1, 512, 1, 1, 1024), stream, 0x400, 0x600)
        assert driver.taken() == [first, (*first[:2], SECOND, 0x401, 0x600), first]


def test_more_than_four_arguments_are_refused():
    with pytest.raises(ValueError, match="five: 5 arguments"):
        Call("five", 1, 2, 3, 4, 5, stream=0)
