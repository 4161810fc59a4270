"""The CUDA platform: memory that processes share, through ``cuda.bindings.driver``; what a stream is told to do is in
cuda_streams.py.

The only code beside that one that calls the driver. The package is imported when a CUDA device is first used, so a
machine without GPUs does not need it. Every return code is checked; what is not success is a :class:`DriverError` that
names the call.

Memory is VMM memory (``cuMemCreate``) that travels as a file descriptor. Ranks may share a GPU, and each may see GPUs
under numbers of its own (CUDA_VISIBLE_DEVICES): what identifies one is its UUID.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from iris_pg.errors import DriverError, HeapExhaustedError, UnsupportedError
from iris_pg.platforms.cuda_streams import (
    Calls,
    Event,
    FlagOp,
    Launch,
    copy,
    copy_2d,
    flags,
    on,
    stream_handle,
    write,
)


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"CUDA tensors need the package cuda-bindings, which cannot be imported ({error}); install iris-pg[cuda]"
        ) from None
    call_with(driver, "cuInit", 0)
    return driver


def call_with(driver: Any, name: str, *arguments: Any) -> Any:
    """Call function ``name`` of ``driver`` and return what it gives besides its status.

    Raises:
        DriverError: any other status than success.
    """
    status, *values = getattr(driver, name)(*arguments)
    if status:
        raise _error(driver, name, status)
    return values[0] if len(values) == 1 else values


def _call(name: str, *arguments: Any) -> Any:
    return call_with(_driver(), name, *arguments)


def _error(driver: Any, name: str, status: Any) -> DriverError:
    _, text = driver.cuGetErrorString(status)
    words = text.decode() if isinstance(text, bytes) else str(text)
    return DriverError(f"{name} failed: {getattr(status, 'name', status)} ({words})", int(status))


# Devices --------------------------------------------------------------------------------------------------------------


def initialise(device: torch.device) -> None:
    """Make the GPU's context, and make it this thread's.

    Raises:
        UnsupportedError: cuda-bindings is missing. DriverError: the driver has no such device, or fails.
    """
    _driver()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()


def uuid(device: torch.device) -> str:
    """Return what identifies a GPU to every process of the machine."""
    number = _call("cuDeviceGet", device.index)
    return bytes(_call("cuDeviceGetUuid", number).bytes).hex()


def can_reach(device: torch.device, peer_uuid: str) -> bool:
    """Return whether ``device`` can access the memory of a peer's GPU; True also when this process does not see it, as
    the driver says so when memory is mapped.
    """
    mine = _call("cuDeviceGet", device.index)
    for number in range(_call("cuDeviceGetCount")):
        other = _call("cuDeviceGet", number)
        if bytes(_call("cuDeviceGetUuid", other).bytes).hex() == peer_uuid:
            return int(other) == int(mine) or bool(_call("cuDeviceCanAccessPeer", mine, other))
    return True


def has_atomics(device: torch.device, peer_uuid: str) -> bool:
    """Return whether ``device`` can do atomic operations on the memory of a peer's GPU; True also when this process
    does not see it, as then nobody says.
    """
    mine = _call("cuDeviceGet", device.index)
    attribute = _driver().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    for number in range(_call("cuDeviceGetCount")):
        other = _call("cuDeviceGet", number)
        if int(other) != int(mine) and bytes(_call("cuDeviceGetUuid", other).bytes).hex() == peer_uuid:
            return bool(_call("cuDeviceGetP2PAttribute", attribute, mine, other))
    return True


# Memory ---------------------------------------------------------------------------------------------------------------


class DeviceMemory:
    """Shared memory on one GPU: what a symmetric heap is made of.

    Attributes:
        page: granularity of mappings, in bytes.
        place: identifies the GPU; ranks with the same place share its memory.
        grows: more can be mapped behind what is mapped.
    """

    grows = True

    def __init__(self, device: torch.device) -> None:
        initialise(device)
        driver = self._driver = _driver()
        self.device = device
        self.place = uuid(device)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = int(_call("cuDeviceGet", device.index))
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = self._kind
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page = int(_call("cuMemGetAllocationGranularity", self._properties, least))
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = self._properties.location.type
        self._access.location.id = self._properties.location.id
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def available_bytes(self) -> int:
        """Return how much memory the GPU has left."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def create_segment(self, nbytes: int) -> int:
        """Return a file descriptor of ``nbytes`` (whole pages) of the GPU's memory, uninitialised.

        Raises:
            HeapExhaustedError: the GPU has no room.
        """
        with torch.cuda.device(self.device):
            try:
                handle = _call("cuMemCreate", nbytes, self._properties, 0)
            except DriverError as error:
                raise HeapExhaustedError(
                    f"{self.device} has no {nbytes} bytes of memory left, it has {self.available_bytes()} ({error}); "
                    "free memory, torch.cuda.empty_cache() for instance, or use fewer or smaller heap tensors"
                ) from None
            try:
                return int(_call("cuMemExportToShareableHandle", handle, self._kind, 0))
            finally:
                _call("cuMemRelease", handle)

    def reserve(self, nbytes: int) -> DeviceRange:
        """Return a range of address space of ``nbytes`` (whole pages)."""
        return DeviceRange(self, nbytes)

    def map(self, address: int, fd: int, nbytes: int) -> None:
        """Map the segment ``fd`` of any GPU at ``address``, for this one to read and write."""
        with torch.cuda.device(self.device):
            handle = _call("cuMemImportFromShareableHandle", fd, self._kind)
            try:
                _call("cuMemMap", address, nbytes, 0, handle, 0)
                try:
                    _call("cuMemSetAccess", address, nbytes, [self._access], 1)
                except DriverError as error:
                    _call("cuMemUnmap", address, nbytes)
                    raise UnsupportedError(
                        f"{self.device} cannot access the memory of a peer's GPU ({error}); an iris group needs GPUs "
                        "with peer access (NVLink, or PCIe peer to peer; see `nvidia-smi topo -p2p rw`); use another "
                        "backend for them"
                    ) from None
            finally:
                _call("cuMemRelease", handle)


class DeviceRange:
    """A range of a GPU's address space into which segments are mapped; unmapped when closed and no tensor views it any
    more.

    Args:
        nbytes: size in bytes, whole pages. Nothing is committed.
    """

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory = memory
        with torch.cuda.device(memory.device):
            self.address = int(_call("cuMemAddressReserve", nbytes, 0, 0, 0))
        self.nbytes = nbytes
        self._mapped: list[tuple[int, int]] = []
        end = weakref.finalize(self, _unmap, memory.device, self.address, nbytes, self._mapped, os.getpid())
        end.atexit = False  # at exit the driver unmaps; a tensor may still be in use by then

    def map(self, fd: int, offset: int, nbytes: int) -> None:
        """Map the segment ``fd`` at ``offset`` bytes into the range."""
        self._memory.map(self.address + offset, fd, nbytes)
        self._mapped.append((self.address + offset, nbytes))

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] over the range, which lies on this GPU; it keeps the mapping alive."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        memory = _Bytes(self, self.address + offset, nbytes)
        return torch.as_tensor(memory, device=self._memory.device)


class _Bytes:
    """Bytes of a range as ``__cuda_array_interface__``; a tensor made from this keeps it, and so the range."""

    def __init__(self, owner: DeviceRange, address: int, nbytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = dict(
            shape=(nbytes,), typestr="|u1", data=(address, False), strides=None, version=3
        )


def _unmap(device: torch.device, address: int, nbytes: int, mapped: list[tuple[int, int]], process: int) -> None:
    if os.getpid() != process:
        return  # a fork: the context is its parent's
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # unmapping does not wait for what still uses the memory
        for start, size in mapped:
            _call("cuMemUnmap", start, size)
        _call("cuMemAddressFree", address, nbytes)


def view(device: torch.device, address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of ``dtype`` over ``nbytes`` at an address that ``device`` can access, a peer's memory too. It
    owns nothing: use it only while the memory is mapped.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (nbytes // dtype.itemsize,), (1,))


def register(address: int, nbytes: int) -> int:
    """Let every GPU of this process access host memory (whole pages), and return its address there.

    Raises:
        DriverError: the machine does not let so much memory be locked, or the range is registered already.
    """
    driver = _driver()
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    _call("cuMemHostRegister", address, nbytes, flags)
    return int(_call("cuMemHostGetDevicePointer", address, 0))


def unregister(address: int) -> None:
    """Undo :func:`register`, once no GPU uses the memory any more."""
    _call("cuMemHostUnregister", address)


@contextlib.contextmanager
def outside_of_capture() -> Iterator[None]:
    """Let this thread do what a graph cannot hold, loading kernels for instance, while it captures one; nothing that is
    done here becomes part of it.
    """
    driver = _driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", before)


__all__ = [
    "DeviceMemory",
    "DeviceRange",
    "Calls",
    "Event",
    "FlagOp",
    "Launch",
    "can_reach",
    "copy",
    "copy_2d",
    "flags",
    "has_atomics",
    "initialise",
    "on",
    "outside_of_capture",
    "register",
    "stream_handle",
    "unregister",
    "uuid",
    "view",
    "write",
]
