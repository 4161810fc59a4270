"""The CPU platform: anonymous shared memory and address space, through libc.

Owns every call to the operating system for memory. Nothing here has a name in a file system, so nothing can be left
behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

import torch

from iris_pg.errors import HeapExhaustedError

PAGE = mmap.PAGESIZE

# From <sys/mman.h> and <linux/fcntl.h>; Python's mmap module can map, but not at a chosen address.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x1, 0x2, 0x4
# Kind of control group in /proc/self/cgroup (version 2, version 1): where it is mounted, its limit, what is used of it.
_MEMORY_GROUPS = (
    ("", "/sys/fs/cgroup", "memory.max", "memory.current"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def page_up(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def available_bytes() -> int:
    """Return how much memory may still be taken: of the machine's, or less where a control group (a container) limits
    it. The kernel itself does not refuse what it does not have: it kills a process when it runs out.
    """
    with open("/proc/meminfo") as lines:
        available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with open("/proc/self/cgroup") as lines:
        groups = [line.rstrip("\n").split(":", 2)[1:] for line in lines]
    for controllers, path in groups:
        for controller, mount, limit, used in _MEMORY_GROUPS:
            if controller == controllers:
                parts = path.strip("/").split("/")
                for depth in range(len(parts) + 1):  # a limit may lie in any group above; unseen ones are not there
                    left = _left_in_group("/".join([mount, *parts[:depth]]), limit, used)
                    available = min(available, left if left is not None else available)
    return max(available, 0)


def _left_in_group(folder: str, limit: str, used: str) -> int | None:
    """Return how many bytes a control group may still take, or None when it is not there or has no limit."""
    try:
        with open(f"{folder}/{limit}") as most, open(f"{folder}/{used}") as now, open(f"{folder}/memory.stat") as lines:
            cache = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
            return int(most.read()) - int(now.read()) + cache
    except (OSError, ValueError):  # no such group; or its limit is "max"
        return None


def create_segment(nbytes: int) -> int:
    """Return a file descriptor of ``nbytes`` (whole pages) of zeroed shared memory, reserved now and sealed against
    resizing.

    Raises:
        HeapExhaustedError: the machine has no room; found now, not as a SIGBUS at the first touch.
    """
    room = available_bytes()
    if nbytes > room:
        raise HeapExhaustedError(
            f"the machine has no {nbytes} bytes of shared memory left, it has {room}; free memory, or use fewer or "
            "smaller heap tensors"
        )
    fd = os.memfd_create("iris_pg", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EINVAL):
            raise HeapExhaustedError(
                f"the machine has no {nbytes} bytes of shared memory left ({error.strerror}); "
                "free memory, or use fewer or smaller heap tensors"
            ) from None
        raise
    return fd


class Reservation:
    """A range of address space into which segments are mapped; unmapped when closed and no tensor views it any more.

    Args:
        nbytes: size in bytes, whole pages. Nothing is committed.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, nbytes, 0, flags, -1, 0)
        if address in (None, _MAP_FAILED):
            raise HeapExhaustedError(
                f"cannot reserve {nbytes} bytes of address space ({os.strerror(ctypes.get_errno())}); "
                "lower heap_bytes, or raise the limit (ulimit -v)"
            )
        self.address: int = address
        self.nbytes = nbytes
        self._unmap = weakref.finalize(self, _libc.munmap, address, nbytes)
        self._unmap.atexit = False  # at exit the kernel unmaps; a tensor may still be in use by then

    def map(self, fd: int, offset: int, nbytes: int) -> None:
        """Map the segment ``fd`` at ``offset`` bytes into the range, readable and writable, shared."""
        flags, access = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(self.address + offset, nbytes, access, flags, fd, 0)
        if address != self.address + offset:
            raise HeapExhaustedError(f"cannot map {nbytes} bytes ({os.strerror(ctypes.get_errno())})")

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] over the range; it keeps the mapping alive."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = (ctypes.c_char * nbytes).from_address(self.address + offset)
        memory.owner = self  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)


class HostMemory:
    """Shared memory of the machine: what a symmetric heap for CPU tensors is made of.

    Attributes:
        page: granularity of mappings, in bytes.
        place: the same on all ranks, which share the machine's memory.
    """

    page = PAGE
    place = "the machine"
    device = torch.device("cpu")
    grows = True

    def available_bytes(self) -> int:
        """As :func:`available_bytes`."""
        return available_bytes()

    def create_segment(self, nbytes: int) -> int:
        """As :func:`create_segment`."""
        return create_segment(nbytes)

    def reserve(self, nbytes: int) -> Reservation:
        """Return a range of address space of ``nbytes`` (whole pages)."""
        return Reservation(nbytes)


def private_memory(nbytes: int) -> Reservation:
    """Return zeroed memory of this process alone, page aligned (rings live here)."""
    fd = os.memfd_create("iris_pg_private", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        reservation = Reservation(nbytes)
        reservation.map(fd, 0, nbytes)
    finally:
        os.close(fd)
    return reservation


def read_error(pid: int, address: int) -> int:
    """Return the error number with which a byte in the memory of another process cannot be read; 0 when it can."""
    byte = ctypes.create_string_buffer(1)
    here, there = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1), (ctypes.c_size_t * 2)(address, 1)
    got = _libc.process_vm_readv(pid, here, 1, there, 1, 0)
    return 0 if got == 1 else ctypes.get_errno()


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))
