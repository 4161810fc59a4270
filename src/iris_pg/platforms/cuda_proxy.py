"""A CUDA stream that a copy-engine proxy tells what to do; see copy_engine/proxy.py."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from iris_pg.errors import UnsupportedError
from iris_pg.platforms import cuda
from iris_pg.platforms.atomics import atomics


class ProxyStream:
    """A stream of ``device``, the current one, of the highest priority: what it does is short, and kernels wait for it.

    Args:
        device: a CUDA device.
        launchers: width of a word in bytes -> what launches an atomic operation.
    """

    def __init__(self, device: torch.device, launchers: Mapping[int, Any]) -> None:
        self._driver = cuda._driver()
        self._launchers = launchers
        self._torch = torch.cuda.Stream(device, priority=-8)  # torch takes the nearest that there is
        self._stream = cuda.stream_handle(self._torch.cuda_stream)
        self._beside = torch.cuda.Stream(device, priority=-8)
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._load = atomics().load32

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy bytes."""
        cuda.copy(dst, src, nbytes)(self._stream)

    def copy_2d(self, dst: int, src: int, width_bytes: int, rows: int, dst_pitch: int, src_pitch: int) -> None:
        """Copy rows, a pitch apart; one by one where a pitch is more than the driver takes."""
        cuda.copy_2d(dst, src, width_bytes, rows, dst_pitch, src_pitch)(self._stream)

    def fill(self, dst: int, value: int, unit_bytes: int, nbytes: int) -> None:
        """Fill with bytes or 32-bit words."""
        name = {1: "cuMemsetD8Async", 4: "cuMemsetD32Async"}[unit_bytes]
        cuda._call(name, self._driver.CUdeviceptr(dst), value, nbytes // unit_bytes, self._stream)

    def write(self, address: int, value: int, width_bytes: int) -> None:
        """Write a word, after all that was told before has landed."""
        name = {4: "cuStreamWriteValue32", 8: "cuStreamWriteValue64"}[width_bytes]
        cuda._call(name, self._stream, self._driver.CUdeviceptr(address), value, 0)

    def atomic(self, op: str, address: int, operand: int, compare: int, width_bytes: int) -> None:
        """Launch a kernel of one warp.

        Raises:
            UnsupportedError: there is no such operation.
        """
        try:
            self._launchers[width_bytes](op, address, operand, compare, self._torch.cuda_stream)
        except ValueError as error:
            raise UnsupportedError(f"a stream has no atomic {op}: {error}") from None

    def read(self, address: int) -> int:
        """Return a 32-bit word of the GPU's memory as it is now."""
        at = self._word.data_ptr()
        beside = cuda.stream_handle(self._beside.cuda_stream)
        cuda._call("cuMemcpyDtoHAsync", at, self._driver.CUdeviceptr(address), 4, beside)
        cuda._call("cuStreamSynchronize", beside)
        return self._load(at)

    def synchronize(self) -> None:
        """Return when all has been done that was told."""
        cuda._call("cuStreamSynchronize", self._stream)


class Registered:
    """Host memory that the GPU sees, until :meth:`close`.

    Args:
        address, nbytes: of it, whole pages.

    Attributes:
        shift: what to add to an address of the host's to get the GPU's.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.shift = cuda.register(address, nbytes) - address
        self._end = weakref.finalize(self, _unregister, address, os.getpid())
        self._end.atexit = False

    def close(self) -> None:
        """Take it from the GPU. Idempotent."""
        self._end()


def _unregister(address: int, process: int) -> None:
    if os.getpid() == process:
        cuda.unregister(address)


__all__ = ["ProxyStream", "Registered"]
