"""platforms/cuda.py with a driver that only takes notes: what it is asked for, and what its errors become."""
# ruff: noqa: N802  (names of the driver)

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
import torch

from iris_pg.errors import UnsupportedError
from iris_pg.platforms import cuda


class Driver:
    """The part of cuda.bindings.driver that is used here, for GPUs with given UUIDs."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self, uuids=(), reachable=True, status=0):
        self.uuids, self.reachable, self.status, self.calls = uuids, reachable, status, []
        self.mode = "global"

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
