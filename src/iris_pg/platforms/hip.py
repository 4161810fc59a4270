"""The HIP platform, for AMD GPUs: the interface of platforms/cuda.py, by the runtime that torch has loaded.

What streams do is in hip_streams.py. Ranks may share a GPU, and each may see GPUs under numbers of its own
(ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES): what identifies one is its PCI address.

Where the runtime can export VMM memory, a segment is a file descriptor of it, mapped where the heap wants it. Where it
cannot, a heap is one piece of fine-grained memory (as SDMA engines and flags need) behind an IPC handle: a descriptor
then holds the handle, the heap is all there from the start, and a base is where HIP has put it.

Nothing here has been run on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from iris_pg.errors import DriverError, HeapExhaustedError, UnsupportedError
from iris_pg.platforms import hip_runtime as h
from iris_pg.platforms.cuda import view
from iris_pg.platforms.cuda_streams import FlagOp, Launch
from iris_pg.platforms.hip_streams import Calls, Event, check, copy, copy_2d, flags, on, stream_handle, write

_PCI_BYTES = 64  # room for "0000:0c:00.0"
_vmm_lock = threading.Lock()  # the runtime has mixed up imports and mappings of threads (mori, vmmProcessLock)
_IPC = struct.Struct("<8sQQQ64s")  # magic, process, address there, nbytes, handle
_MAGIC = b"iris_ipc"
_DESCRIPTOR_BY_VALUE = (7, 1)  # from here on an import takes a descriptor; before, its address (torch, ROCm part)

# Devices --------------------------------------------------------------------------------------------------------------


def initialise(device: torch.device) -> None:
    """Make the GPU's context, and make it this thread's.

    Raises:
        UnsupportedError: the runtime is missing or too old. DriverError: it has no such device, or fails.
    """
    h.runtime()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()


def uuid(device: torch.device) -> str:
    """Return what identifies a GPU to every process of the machine: its PCI address."""
    return pci_address(device.index)


def pci_address(number: int) -> str:
    """Return the PCI address of a GPU that this process sees under a number, as ``0000:0c:00.0``."""
    text = ctypes.create_string_buffer(_PCI_BYTES)
    h.call("hipDeviceGetPCIBusId", text, _PCI_BYTES, number)
    return text.value.decode().lower()


def number_of(address: str) -> int | None:
    """Return under which number this process sees the GPU with a PCI address, or None."""
    return next((n for n in range(h.number("hipGetDeviceCount")) if pci_address(n) == address), None)


def can_reach(device: torch.device, peer_uuid: str) -> bool:
    """Return whether ``device`` can access the memory of a peer's GPU; True also when this process does not see it, as
    the runtime says so when memory is mapped.
    """
    other = number_of(peer_uuid)
    return other is None or other == device.index or bool(h.number("hipDeviceCanAccessPeer", device.index, other))


def enable_peers(device: torch.device) -> None:
    """Let ``device`` access the memory of each GPU that this process sees and that it can reach. Without this, copies
    go by the host.
    """
    with torch.cuda.device(device):
        for other in range(h.number("hipGetDeviceCount")):
            if other != device.index and h.number("hipDeviceCanAccessPeer", device.index, other):
                try:
                    h.call("hipDeviceEnablePeerAccess", other, 0)
                except DriverError as error:
                    if error.status != h.PEER_ACCESS_ALREADY_ENABLED:
                        raise


# Memory ---------------------------------------------------------------------------------------------------------------


class DeviceMemory:
    """Shared memory on one GPU: what a symmetric heap is made of.

    Attributes:
        page: granularity of mappings, in bytes.
        place: identifies the GPU; ranks with the same place share its memory.
        grows: whether more can be mapped behind what is mapped. Else a heap is all there from the start.
    """

    def __init__(self, device: torch.device) -> None:
        initialise(device)
        enable_peers(device)
        self.device = device
        self.place = uuid(device)
        here = h.Location(h.DEVICE, device.index)
        self._properties = h.AllocationProperties(h.PINNED, h.POSIX_FILE_DESCRIPTOR, here)
        self._access = h.AccessDescription(here, h.READ_WRITE)
        self.page = h.number("hipMemGetAllocationGranularity", ctypes.byref(self._properties), h.MINIMUM)
        self.grows = self._can_export()

    def _can_export(self) -> bool:
        """Return whether VMM memory can be exported, by doing so."""
        try:
            os.close(self.create_segment(self.page, exporting=True))
        except DriverError as error:
            if error.status not in (h.NOT_SUPPORTED, h.INVALID_VALUE):
                raise
            return False
        return True

    def available_bytes(self) -> int:
        """Return how much memory the GPU has left."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def create_segment(self, nbytes: int, exporting: bool = False) -> int:
        """Return a file descriptor of ``nbytes`` (whole pages) of the GPU's memory, uninitialised.

        Args:
            exporting: it is a trial, whose errors are the driver's.

        Raises:
            HeapExhaustedError: the GPU has no room. DriverError: in a trial, what the driver refuses.
        """
        with torch.cuda.device(self.device):
            try:
                if not exporting and not self.grows:
                    return _ipc_segment(nbytes)
                with _vmm_lock:
                    handle = h.pointer("hipMemCreate", nbytes, ctypes.byref(self._properties), 0)
                    try:
                        fd = ctypes.c_int(-1)
                        h.call("hipMemExportToShareableHandle", ctypes.byref(fd), handle, h.POSIX_FILE_DESCRIPTOR, 0)
                        return fd.value
                    finally:
                        h.call("hipMemRelease", handle)
            except DriverError as error:
                if exporting:
                    raise
                raise HeapExhaustedError(
                    f"{self.device} has no {nbytes} bytes of memory left, it has {self.available_bytes()} ({error}); "
                    "free memory, torch.cuda.empty_cache() for instance, or use fewer or smaller heap tensors"
                ) from None

    def reserve(self, nbytes: int) -> DeviceRange:
        """Return a range of address space of ``nbytes`` (whole pages)."""
        return (DeviceRange if self.grows else IpcRange)(self, nbytes)

    def map(self, address: int, fd: int, nbytes: int) -> None:
        """Map the segment ``fd`` of any GPU at ``address``, for this one to read and write."""
        with torch.cuda.device(self.device), _vmm_lock:
            if h.version() >= _DESCRIPTOR_BY_VALUE:
                given: Any = ctypes.c_void_p(fd)
            else:
                given = ctypes.byref(ctypes.c_int(fd))
            handle = h.pointer("hipMemImportFromShareableHandle", given, h.POSIX_FILE_DESCRIPTOR)
            try:
                h.call("hipMemMap", address, nbytes, 0, handle, 0)
                try:
                    h.call("hipMemSetAccess", address, nbytes, ctypes.byref(self._access), 1)
                except DriverError as error:
                    h.call("hipMemUnmap", address, nbytes)
                    raise UnsupportedError(
                        f"{self.device} cannot access the memory of a peer's GPU ({error}); an iris group needs GPUs "
                        "with peer access (xGMI, or PCIe with a large BAR; see `rocm-smi --showtopo`); use another "
                        "backend for them"
                    ) from None
            finally:
                h.call("hipMemRelease", handle)


class DeviceRange:
    """A range of a GPU's address space into which segments are mapped; unmapped when closed and no tensor views it any
    more.

    Args:
        nbytes: size in bytes, whole pages. Nothing is committed.
    """

    address: int

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory, self.nbytes = memory, nbytes
        with torch.cuda.device(memory.device):
            self.address = h.pointer("hipMemAddressReserve", nbytes, 0, None, 0)
        self._mapped: list[tuple[int, int]] = []
        end = weakref.finalize(self, _unmap, memory.device, self.address, nbytes, self._mapped, os.getpid())
        end.atexit = False  # at exit the runtime unmaps; a tensor may still be in use by then

    def map(self, fd: int, offset: int, nbytes: int) -> None:
        """Map the segment ``fd`` at ``offset`` bytes into the range."""
        self._memory.map(self.address + offset, fd, nbytes)
        self._mapped.append((self.address + offset, nbytes))

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] over the range, which lies on this GPU; it keeps the mapping alive."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._memory.device)
        return over(self._memory.device, self.address + offset, nbytes, self)


class IpcRange(DeviceRange):
    """One piece of memory behind an IPC handle. It has an address when it is mapped, once."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self._memory, self.nbytes = memory, nbytes
        self.address = 0

    def map(self, fd: int, offset: int, nbytes: int) -> None:
        """Open the segment ``fd``: this process's own memory, or another's."""
        magic, process, there, size, handle = _IPC.unpack(os.pread(fd, _IPC.size, 0))
        if magic != _MAGIC or offset or self.address or nbytes != size:
            raise UnsupportedError(
                f"a segment of {size} bytes at {offset} of a heap behind IPC handles; ranks of a group use one version "
                "of ROCm, and such a heap is mapped once, as a whole"
            )
        device = self._memory.device
        is_own = process == os.getpid()
        with torch.cuda.device(device):
            if is_own:
                self.address = there
            else:
                opened = h.IpcHandle.from_buffer_copy(handle)
                self.address = h.pointer("hipIpcOpenMemHandle", opened, h.LAZY_PEER_ACCESS)
        end = weakref.finalize(self, _let_go, device, self.address, is_own, os.getpid())
        end.atexit = False


def _ipc_segment(nbytes: int) -> int:
    """Return a descriptor of a file that says where fine-grained memory is; it belongs to the range that maps it."""
    address = h.pointer("hipExtMallocWithFlags", nbytes, h.FINE_GRAINED)
    handle = h.IpcHandle()
    h.call("hipIpcGetMemHandle", ctypes.byref(handle), address)
    fd = os.memfd_create("iris_pg_ipc", os.MFD_CLOEXEC)
    os.write(fd, _IPC.pack(_MAGIC, os.getpid(), address, nbytes, bytes(handle)))
    return fd


def over(device: torch.device, address: int, nbytes: int, owner: object) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] at an address of ``device``; it and every tensor over its storage keep ``owner``.

    Torch keeps the Python object of a storage for as long as the storage, and with it what it refers to. Its
    ``__cuda_array_interface__`` would have HIP say on which GPU an address is, of which peers' memory is not.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    storage.iris_pg_owner = owner  # type: ignore[attr-defined]
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def _unmap(device: torch.device, address: int, nbytes: int, mapped: list[tuple[int, int]], process: int) -> None:
    if os.getpid() != process:
        return  # a fork: the context is its parent's
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # unmapping does not wait for what still uses the memory
        with _vmm_lock:
            for start, size in mapped:
                h.call("hipMemUnmap", start, size)
            h.call("hipMemAddressFree", address, nbytes)


def _let_go(device: torch.device, address: int, is_own: bool, process: int) -> None:
    if os.getpid() == process:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            h.call("hipFree" if is_own else "hipIpcCloseMemHandle", address)


# Host memory ----------------------------------------------------------------------------------------------------------


def register(address: int, nbytes: int) -> int:
    """Let every GPU of this process access host memory (whole pages), and return its address there.

    It is coherent, as flags must be: registered memory is fine-grained unless it is asked to be coarse.

    Raises:
        DriverError: the machine does not let so much memory be locked, or the range is registered already.
    """
    h.call("hipHostRegister", address, nbytes, h.PORTABLE_AND_MAPPED)
    return h.pointer("hipHostGetDevicePointer", address, 0)


def unregister(address: int) -> None:
    """Undo :func:`register`, once no GPU uses the memory any more."""
    h.call("hipHostUnregister", address)


@contextlib.contextmanager
def outside_of_capture() -> Iterator[None]:
    """Let this thread do what a graph cannot hold, loading kernels for instance, while it captures one; nothing that is
    done here becomes part of it.
    """
    mode = ctypes.c_int(h.CAPTURE_RELAXED)
    h.call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        h.call("hipThreadExchangeStreamCaptureMode", ctypes.byref(mode))


__all__ = [
    "Calls",
    "DeviceMemory",
    "DeviceRange",
    "Event",
    "FlagOp",
    "IpcRange",
    "Launch",
    "can_reach",
    "check",
    "copy",
    "copy_2d",
    "enable_peers",
    "flags",
    "initialise",
    "number_of",
    "on",
    "outside_of_capture",
    "over",
    "pci_address",
    "register",
    "stream_handle",
    "unregister",
    "uuid",
    "view",
    "write",
]
