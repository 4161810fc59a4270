"""A stand-in for the HIP runtime that records its calls: names, order, arguments, in tests without a GPU.

Arguments have to fit the types that platforms/hip_runtime.py declares. Copies and accesses of flags happen at once, in
the memory of the process, in the order in which streams are told; what a function gives is a number of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from iris_pg.platforms import hip_runtime as h

BUSES = ["0000:0C:00.0", "0000:22:00.0"]
PAGE = 2 << 20
STRUCTURES = {
    h.AllocationProperties: lambda p: ("prop", p.type, p.requested_handle_types, p.location.type, p.location.id),
    h.AccessDescription: lambda a: ("access", a.location.type, a.location.id, a.flags),
    h.IpcHandle: lambda i: ("handle", bytes(i)[:8].decode().rstrip("\0")),
}


class FakeHip:
    """The runtime.

    Args:
        exports: whether VMM memory can be exported.
        skips: a copy of fewer bytes is not done, as if it had been skipped.

    Attributes:
        calls: (name, arguments) of every call; what a function gives through a pointer is left out.
        does: function -> what it does.
        statuses: function -> what it returns, and it does nothing.
    """

    def __init__(self, exports=True, skips=0):
        self.exports, self.skips = exports, skips
        self.calls: list[tuple] = []
        self.statuses: dict[str, int] = {}
        gives = ("hipMemCreate", "hipMemImportFromShareableHandle", "hipMemAddressReserve", "hipExtMallocWithFlags")
        self.does = dict.fromkeys((*gives, "hipIpcOpenMemHandle", "hipEventCreateWithFlags"), self._give)
        self.does |= dict(
            hipGetDeviceCount=self._get_device_count,
            hipDeviceCanAccessPeer=self._device_can_access_peer,
            hipDeviceGetAttribute=self._device_get_attribute,
            hipDeviceGetPCIBusId=self._device_get_pci_bus_id,
            hipMemGetAllocationGranularity=self._mem_get_allocation_granularity,
            hipMemExportToShareableHandle=self._mem_export_to_shareable_handle,
            hipIpcGetMemHandle=self._ipc_get_mem_handle,
            hipHostGetDevicePointer=self._host_get_device_pointer,
            hipThreadExchangeStreamCaptureMode=self._thread_exchange_stream_capture_mode,
            hipMemcpyAsync=self._memcpy_async,
            hipStreamWriteValue32=self._stream_write_value,
            hipStreamWaitValue32=self._stream_wait_value,
        )
        self._next = 0x7000_0000_0000
        self._mode = 0

    def __getattr__(self, name):
        if name in ("hipGetErrorName", "hipGetErrorString"):
            return lambda status: f"hipError{status}".encode()
        types = h.FUNCTIONS[name]

        def call(*arguments):
            assert len(arguments) == len(types), f"{name} takes {len(types)} arguments"
            for argument, type_ in zip(arguments, types, strict=True):
                type_.from_param(argument)  # raises what ctypes would
            status = self.statuses.get(name, 0)
            handler = self.does.get(name)
            if not status and handler:
                status = handler(*arguments) or 0
            outs = (
                1 if types[0] in (h._OUT_P, h._OUT_I, h._OUT_S) and name != "hipThreadExchangeStreamCaptureMode" else 0
            )
            self.calls.append((name, *(_plain(a) for a in arguments[outs:])))
            return status

        return call

    def taken(self):
        """Return the calls so far, and forget them."""
        calls, self.calls = self.calls, []
        return calls

    # What functions do ------------------------------------------------------------------------------------------------

    def _get_device_count(self, out):
        out._obj.value = len(BUSES)

    def _device_can_access_peer(self, out, device, peer):
        out._obj.value = int(device != peer)

    def _device_get_attribute(self, out, attribute, device):
        out._obj.value = 1

    def _device_get_pci_bus_id(self, text, nbytes, device):
        text.value = BUSES[device].encode()

    def _mem_get_allocation_granularity(self, out, properties, option):
        out._obj.value = PAGE

    def _give(self, out, *_):
        self._next += 0x1_0000_0000
        out._obj.value = self._next

    def _mem_export_to_shareable_handle(self, out, handle, kind, flags):
        if not self.exports:
            return h.NOT_SUPPORTED
        out._obj.value = os.memfd_create("fake", os.MFD_CLOEXEC)

    def _ipc_get_mem_handle(self, out, address):
        ctypes.memmove(ctypes.addressof(out._obj), b"ipc", 3)

    def _host_get_device_pointer(self, out, address, flags):
        out._obj.value = address

    def _thread_exchange_stream_capture_mode(self, mode):
        mode._obj.value, self._mode = self._mode, mode._obj.value

    def _memcpy_async(self, dst, src, nbytes, kind, stream):
        if nbytes >= self.skips and _is_real(dst):
            ctypes.memmove(dst, src, nbytes)

    def _stream_write_value(self, stream, address, value, flags):
        if _is_real(address):
            ctypes.c_uint32.from_address(address).value = value

    def _stream_wait_value(self, stream, address, value, flags, mask):
        if _is_real(address):
            seen = ctypes.c_uint32.from_address(address).value & mask
            assert seen == value, f"a wait for {value} that would never end: the flag holds {seen}"


real: list[tuple[int, int]] = []
"""Memory that may be written: (address, bytes)."""


def _is_real(address):
    return any(start <= address < start + nbytes for start, nbytes in real)


def _plain(argument):
    if hasattr(argument, "_obj"):
        argument = argument._obj
    if isinstance(argument, ctypes.Array):
        return "text"
    if isinstance(argument, ctypes.Structure):
        return STRUCTURES[type(argument)](argument)
    return argument.value if isinstance(argument, ctypes._SimpleCData) else argument


@contextlib.contextmanager
def installed(monkeypatch, version="7.2.0", **keywords):
    """Within it the HIP platform calls a stand-in, which is given; torch's own calls do nothing."""
    import torch

    fake = FakeHip(**keywords)
    monkeypatch.setattr(h, "runtime", lambda: fake)
    monkeypatch.setattr(torch.version, "hip", version)
    h.version.cache_clear()

    class Stream:
        cuda_stream = 0x77

        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: fake.calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (64 << 30, 64 << 30))
    try:
        yield fake
    finally:
        h.version.cache_clear()
