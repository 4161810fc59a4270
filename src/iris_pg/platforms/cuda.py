"""The CUDA platform: memory that processes share, and what a stream is told to do, through ``cuda.bindings.driver``.

The only code that calls the driver. The package is imported when a CUDA device is first used, so a machine without GPUs
does not need it. Every return code is checked; what is not success is a :class:`DriverError` that names the call.

Memory is VMM memory (``cuMemCreate``) that travels as a file descriptor. Ranks may share a GPU, and each may see GPUs
under numbers of its own (CUDA_VISIBLE_DEVICES): what identifies one is its UUID.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from iris_pg.errors import DriverError, HeapExhaustedError, UnsupportedError

_MOST_OPS = 255  # of one cuStreamBatchMemOp: its count is less than 256 (cuda.h)

Launch = Callable[[Any], None]
"""Tells a stream (``stream_handle``) to do one thing; returns at once."""


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


# Streams --------------------------------------------------------------------------------------------------------------


class FlagOp(NamedTuple):
    """One access of a stream to a 32-bit flag.

    Args:
        waits: wait until the flag is ``value``; else write it, after all that the stream did before.
        address: as the GPU sees it.
    """

    waits: bool
    address: int
    value: int


def stream_handle(stream: int) -> Any:
    """Return torch's handle of a stream (``stream.cuda_stream``) as the driver's functions take it."""
    return _driver().CUstream(stream)


def copy(dst: int, src: int, nbytes: int) -> Launch:
    """Return what copies ``nbytes`` from ``src`` to ``dst``, addresses of device memory: between two GPUs by a copy
    engine, within one as the driver likes (on H200s at 2 TB/s, but behind a kernel that fills the GPU; so, too, with
    cuMemcpyBatchAsync and its hint to overlap).
    """
    driver = _driver()
    function, to, from_ = driver.cuMemcpyDtoDAsync, driver.CUdeviceptr(dst), driver.CUdeviceptr(src)

    def launch(stream: Any) -> None:
        status = function(to, from_, nbytes, stream)[0]
        if status:
            raise _error(driver, "cuMemcpyDtoDAsync", status)

    return launch


def copy_2d(dst: int, src: int, width_bytes: int, rows: int, dst_pitch_bytes: int, src_pitch_bytes: int) -> Launch:
    """Return what copies ``rows`` rows of ``width_bytes``, ``pitch`` bytes apart, in memory of GPUs."""
    driver = _driver()
    what = driver.CUDA_MEMCPY2D()
    what.srcMemoryType = what.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    what.srcDevice, what.dstDevice = driver.CUdeviceptr(src), driver.CUdeviceptr(dst)
    what.srcPitch, what.dstPitch = src_pitch_bytes, dst_pitch_bytes
    what.WidthInBytes, what.Height = width_bytes, rows

    def launch(stream: Any) -> None:
        status = driver.cuMemcpy2DAsync(what, stream)[0]
        if status:
            raise _error(driver, "cuMemcpy2DAsync", status)

    return launch


class FlagCalls:
    """What makes a stream access flags one after another, in as few calls as the driver takes them.

    Args:
        ops: the accesses.
        mark: address of a word to write behind them, when :meth:`marked` is called.
    """

    def __init__(self, ops: Sequence[FlagOp], mark: int | None = None) -> None:
        driver = _driver()
        self._batch, self._word = driver.cuStreamBatchMemOp, driver.cuuint32_t
        self._plain = [_parameters(ops[i : i + _MOST_OPS]) for i in range(0, len(ops), _MOST_OPS)]
        if mark is not None:
            last = self._last = _parameters([FlagOp(False, mark, 0)])
            joins = bool(self._plain) and len(self._plain[-1]) < _MOST_OPS
            self._marked = [*self._plain[:-1], self._plain[-1] + last] if joins else [*self._plain, last]

    def __call__(self, stream: Any) -> None:
        """Access the flags."""
        self._launch(self._plain, stream)

    def marked(self, stream: Any, value: int) -> None:
        """Access the flags, then write ``value`` into the word."""
        self._last[0].writeValue.value = self._word(value)
        self._launch(self._marked, stream)

    def mark(self, stream: Any, value: int) -> None:
        """Write ``value`` into the word."""
        self._last[0].writeValue.value = self._word(value)
        self._launch([self._last], stream)

    def _launch(self, batches: list[list[Any]], stream: Any) -> None:
        for batch in batches:
            status = self._batch(stream, len(batch), batch, 0)[0]
            if status:
                raise _error(_driver(), "cuStreamBatchMemOp", status)


def _parameters(ops: Sequence[FlagOp]) -> list[Any]:
    driver = _driver()
    kinds = driver.CUstreamBatchMemOpType
    equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)

    def parameter(op: FlagOp) -> Any:
        made = driver.CUstreamBatchMemOpParams()
        field = made.waitValue if op.waits else made.writeValue
        field.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32 if op.waits else kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
        field.address, field.value = driver.CUdeviceptr(op.address), driver.cuuint32_t(op.value)
        field.flags = equal if op.waits else 0
        return made

    return [parameter(op) for op in ops]


class Event:
    """What a stream has come to, for others to wait for. It may be recorded again: who has been told to wait, waits for
    what it stood for then.
    """

    def __init__(self) -> None:
        untimed = int(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._event = _call("cuEventCreate", untimed)
        end = weakref.finalize(self, _destroy_event, self._event, os.getpid())
        end.atexit = False

    def record(self, stream: Any) -> None:
        """Let it stand for all that ``stream`` has been told."""
        _call("cuEventRecord", self._event, stream)

    def wait(self, stream: Any) -> None:
        """Let ``stream`` wait for it."""
        _call("cuStreamWaitEvent", stream, self._event, 0)


def _destroy_event(event: Any, process: int) -> None:
    if os.getpid() == process:
        _call("cuEventDestroy", event)


def write(stream: Any, address: int, value: int) -> None:
    """Let a stream write a 32-bit word, after all that it did before."""
    driver = _driver()
    status = driver.cuStreamWriteValue32(stream, address, value, 0)[0]
    if status:
        raise _error(driver, "cuStreamWriteValue32", status)


__all__ = [
    "DeviceMemory",
    "DeviceRange",
    "Event",
    "FlagCalls",
    "FlagOp",
    "Launch",
    "can_reach",
    "copy",
    "copy_2d",
    "has_atomics",
    "initialise",
    "outside_of_capture",
    "register",
    "stream_handle",
    "unregister",
    "uuid",
    "view",
    "write",
]
