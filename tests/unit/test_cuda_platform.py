"""platforms/cuda.py with a driver that only takes notes: what it is asked for, and what its errors become."""
# ruff: noqa: N802  (names of the driver)

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
import torch

from iris_pg.errors import DriverError, UnsupportedError
from iris_pg.platforms import cuda
from iris_pg.platforms.cuda import FlagOp

KINDS = SimpleNamespace(CU_STREAM_MEM_OP_WAIT_VALUE_32="wait", CU_STREAM_MEM_OP_WRITE_VALUE_32="write")


class Parameters:
    """A CUstreamBatchMemOpParams."""

    def __init__(self):
        self.waitValue, self.writeValue = SimpleNamespace(), SimpleNamespace()

    def told(self):
        fields = vars(self.waitValue) or vars(self.writeValue)
        return fields["operation"], fields["address"], fields["value"]


class Driver:
    """The part of cuda.bindings.driver that is used here, for GPUs with given UUIDs."""

    CUstreamBatchMemOpType = KINDS
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstreamBatchMemOpParams = Parameters
    CUdeviceptr = cuuint32_t = staticmethod(int)

    def __init__(self, uuids=(), reachable=True, status=0):
        self.uuids, self.reachable, self.status, self.calls = uuids, reachable, status, []
        self.mode = "global"

    def cuStreamBatchMemOp(self, stream, count, batch, flags):
        assert count == len(batch)
        self.calls.append([parameters.told() for parameters in batch])
        return (self.status,)

    def cuMemcpyDtoDAsync(self, dst, src, nbytes, stream):
        self.calls.append((dst, src, nbytes, stream))
        return (self.status,)

    def cuGetErrorString(self, status):
        return 0, b"out of luck"

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetCount(self):
        return 0, len(self.uuids)

    def cuDeviceGetUuid(self, device):
        return 0, SimpleNamespace(bytes=bytes.fromhex(self.uuids[device]))

    def cuDeviceCanAccessPeer(self, device, peer):
        return 0, self.reachable

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, before = mode, self.mode
        return 0, before


@pytest.fixture
def driver(monkeypatch):
    """Return ``driver(...)``, which puts a :class:`Driver` in place."""

    def make(**keys):
        made = Driver(**keys)
        monkeypatch.setattr(cuda, "_driver", lambda: made)
        return made

    return make


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def no_cuda(name, *arguments, **keys):
        if name.startswith("cuda"):
            raise ImportError("No module named 'cuda'")
        return real(name, *arguments, **keys)

    monkeypatch.setattr(builtins, "__import__", no_cuda)
    with pytest.raises(UnsupportedError, match=r"install iris-pg\[cuda\]"):
        cuda._driver.__wrapped__()


def test_an_error_names_the_call(driver):
    driver(status=2)
    with pytest.raises(DriverError, match="cuMemcpyDtoDAsync failed: 2 .out of luck.") as caught:
        cuda.copy(1, 2, 3)("stream")
    assert caught.value.status == 2
    with pytest.raises(DriverError, match="cuStreamBatchMemOp failed"):
        cuda.FlagCalls([FlagOp(True, 1, 2)])("stream")


def test_flags_are_as_few_calls_as_the_driver_takes(driver):
    made = driver()
    ops = [FlagOp(i % 2 == 0, 1000 + i, i) for i in range(300)]
    cuda.FlagCalls(ops)("stream")
    assert [len(batch) for batch in made.calls] == [255, 45]
    told = [op for batch in made.calls for op in batch]
    assert told == [("wait" if op.waits else "write", op.address, op.value) for op in ops]


@pytest.mark.parametrize(("count", "batches"), [(0, [1]), (3, [4]), (254, [255]), (255, [255, 1]), (256, [255, 2])])
def test_a_mark_comes_behind_all_flags(driver, count, batches):
    made = driver()
    calls = cuda.FlagCalls([FlagOp(True, i, 7) for i in range(count)], mark=5000)
    for number in (8, 9):
        made.calls.clear()
        calls.marked("stream", number)
        assert [len(batch) for batch in made.calls] == batches
        assert made.calls[-1][-1] == ("write", 5000, number)
    made.calls.clear()
    calls("stream")
    assert sum(map(len, made.calls)) == count  # not marked
    made.calls.clear()
    calls.mark("stream", 11)
    assert made.calls == [[("write", 5000, 11)]]


def test_gpus_are_told_apart_by_uuid(driver):
    """Each process may see them under numbers of its own."""
    one, two, three = ("01" * 16, "02" * 16, "03" * 16)
    device = torch.device("cuda", 0)
    driver(uuids=(two, one), reachable=False)
    assert cuda.uuid(device) == two
    assert cuda.can_reach(device, two)  # itself
    assert not cuda.can_reach(device, one)
    assert cuda.can_reach(device, three)  # it is not seen here, so the driver says so when memory is mapped
    driver(uuids=(two, one), reachable=True)
    assert cuda.can_reach(device, one)


def test_what_is_outside_of_a_capture_puts_the_mode_back(driver):
    made = driver()
    with pytest.raises(ValueError), cuda.outside_of_capture():
        assert made.mode == "relaxed"
        raise ValueError
    assert made.mode == "global"
