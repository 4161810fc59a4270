"""The HIP runtime that torch uses, through ctypes: signatures, structures and constants of what is called.

It is the very library that torch has loaded, found by its name in this process: a second copy, which a binding that
loads ``libamdhip64.so`` by itself may find, has devices and streams of its own. hip-python is not used for that reason,
and because it lacks what is needed: its ``hipMemAllocationProp`` has no ``requestedHandleTypes``, and its
``hipThreadExchangeStreamCaptureMode`` takes no mode (10.0).

Source of every signature and number: HIP's ``hip_runtime_api.h``, which keeps them within a major version.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_ulonglong, c_void_p
from typing import Any

import torch

from iris_pg.errors import DriverError, UnsupportedError

_LIBRARY = "libamdhip64.so"

# hipError_t
NOT_SUPPORTED, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED = 801, 1, 704
# hipMemAllocationType, hipMemAllocationHandleType, hipMemLocationType, hipMemAccessFlags, ..Granularity_flags
PINNED, POSIX_FILE_DESCRIPTOR, DEVICE, READ_WRITE, MINIMUM = 1, 1, 1, 3, 0
# hipMemcpyKind: by a copy engine, never by a kernel
DEVICE_TO_DEVICE_NO_CU = 1024
# hipStreamWaitValue*: equal, under a mask
EQUAL, ALL_BITS = 1, 0xFFFFFFFF
# hipHostRegisterPortable | hipHostRegisterMapped
PORTABLE_AND_MAPPED = 3
DISABLE_TIMING = 2  # hipEventDisableTiming
FINE_GRAINED = 1  # hipDeviceMallocFinegrained
LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess
CAPTURE_RELAXED = 2  # hipStreamCaptureModeRelaxed
CAN_USE_STREAM_WAIT_VALUE = 10013  # hipDeviceAttributeCanUseStreamWaitValue


class Location(Structure):
    """hipMemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(Structure):
    """hipMemAllocationProp; the last fields are its allocFlags."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
    ]


class AccessDescription(Structure):
    """hipMemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class IpcHandle(Structure):
    """hipIpcMemHandle_t; goes by value."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


_OUT_P, _OUT_I, _OUT_S = POINTER(c_void_p), POINTER(c_int), POINTER(c_size_t)
FUNCTIONS: dict[str, tuple[Any, ...]] = dict(
    hipDeviceCanAccessPeer=(_OUT_I, c_int, c_int),
    hipDeviceEnablePeerAccess=(c_int, c_uint),
    hipDeviceGetAttribute=(_OUT_I, c_int, c_int),
    hipDeviceGetPCIBusId=(c_char_p, c_int, c_int),
    hipEventCreateWithFlags=(_OUT_P, c_uint),
    hipEventDestroy=(c_void_p,),
    hipEventRecord=(c_void_p, c_void_p),
    hipExtMallocWithFlags=(_OUT_P, c_size_t, c_uint),
    hipFree=(c_void_p,),
    hipGetDeviceCount=(_OUT_I,),
    hipHostGetDevicePointer=(_OUT_P, c_void_p, c_uint),
    hipHostRegister=(c_void_p, c_size_t, c_uint),
    hipHostUnregister=(c_void_p,),
    hipIpcCloseMemHandle=(c_void_p,),
    hipIpcGetMemHandle=(POINTER(IpcHandle), c_void_p),
    hipIpcOpenMemHandle=(_OUT_P, IpcHandle, c_uint),
    hipMemAddressFree=(c_void_p, c_size_t),
    hipMemAddressReserve=(_OUT_P, c_size_t, c_size_t, c_void_p, c_ulonglong),
    hipMemCreate=(_OUT_P, c_size_t, POINTER(AllocationProperties), c_ulonglong),
    hipMemExportToShareableHandle=(c_void_p, c_void_p, c_int, c_ulonglong),
    hipMemGetAllocationGranularity=(_OUT_S, POINTER(AllocationProperties), c_int),
    hipMemImportFromShareableHandle=(_OUT_P, c_void_p, c_int),
    hipMemMap=(c_void_p, c_size_t, c_size_t, c_void_p, c_ulonglong),
    hipMemRelease=(c_void_p,),
    hipMemSetAccess=(c_void_p, c_size_t, POINTER(AccessDescription), c_size_t),
    hipMemUnmap=(c_void_p, c_size_t),
    hipMemcpy2DAsync=(c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t, c_int, c_void_p),
    hipMemcpyAsync=(c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    hipStreamWaitEvent=(c_void_p, c_void_p, c_uint),
    hipStreamWaitValue32=(c_void_p, c_void_p, c_uint32, c_uint, c_uint32),
    hipStreamWriteValue32=(c_void_p, c_void_p, c_uint32, c_uint),
    hipThreadExchangeStreamCaptureMode=(_OUT_I,),
)
"""Name -> types of the arguments of each function that is called; all return a hipError_t."""


@functools.cache
def runtime() -> Any:
    """Return the library.

    Raises:
        UnsupportedError: torch has not loaded one, or it lacks a function.
    """
    path = _loaded()
    if path is None:
        raise UnsupportedError(
            f"AMD GPUs need {_LIBRARY}, and this process has none loaded; install a torch that is built for ROCm"
        )
    library = ctypes.CDLL(path)
    for name, types in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise UnsupportedError(f"{path} has no {name}: it is of an older ROCm; use one from 6.2 on") from None
        function.argtypes, function.restype = types, c_int
    for name in ("hipGetErrorName", "hipGetErrorString"):
        getattr(library, name).argtypes, getattr(library, name).restype = (c_int,), c_char_p
    return library


def _loaded() -> str | None:
    """Return the path of the library that is loaded."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if _LIBRARY in path.rpartition("/")[2]:
                return path
    return None


def call(name: str, *arguments: Any) -> None:
    """Call a function.

    Raises:
        DriverError: any other status than success.
    """
    status = getattr(runtime(), name)(*arguments)
    if status:
        raise error(name, status)


def error(name: str, status: int) -> DriverError:
    """Return the error that says that a function has failed."""
    library = runtime()
    words = (library.hipGetErrorName(status), library.hipGetErrorString(status))
    short, long = (word.decode(errors="replace") if isinstance(word, bytes) else str(word) for word in words)
    return DriverError(f"{name} failed: {short} ({long})", int(status))


def pointer(name: str, *arguments: Any) -> int:
    """Call a function whose first argument is a pointer that it gives, and return that."""
    out = c_void_p()
    call(name, ctypes.byref(out), *arguments)
    return out.value or 0


def number(name: str, *arguments: Any) -> int:
    """Call a function whose first argument is a number that it gives, and return that."""
    out = (c_size_t if FUNCTIONS[name][0] is _OUT_S else c_int)()
    call(name, ctypes.byref(out), *arguments)
    return int(out.value)


@functools.cache
def version() -> tuple[int, int]:
    """Return (major, minor) of the HIP that torch is built for."""
    major, minor = (torch.version.hip or "0.0").split(".")[:2]
    return int(major), int(minor)
