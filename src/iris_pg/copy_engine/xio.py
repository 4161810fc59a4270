"""rocm-xio, AMD's library that writes packets into SDMA queues from user space: ``xio.sdma_ep``, in either signature.

Two signatures have been published. The older one takes a source before its destination, and a ``Tile``; the newer one
takes a destination first, and addresses in place of a tile. A positional call would copy backwards with one of them, so
every argument goes by keyword, and :func:`check` looks at what has been moved before a queue is used.

The library is a singleton: a process has one queue for each pair of GPUs. So a queue belongs to one group or context
at a time (:meth:`Library.acquire`); behind a wait of one, operations of another could wait for each other for ever. The
library is never shut down: that frees no queue, and the runtime's own end may stall on it.

Sources: ROCm/rocm-xio, the Python package of its endpoint ``sdma_ep`` and its examples, which call it by keyword;
ROCm/iris, which calls the older signature, and makes its tiles. Devices are HIP's, as this process numbers them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from iris_pg.copy_engine.calls import EMPTY, Call, Increase, Invocation, Linear, Poll
from iris_pg.copy_engine.producers import Producers
from iris_pg.copy_engine.tile import Tile
from iris_pg.errors import IrisError, QueueError, UnsupportedError
from iris_pg.platforms.atomics import atomics

MODULE = "xio.sdma_ep"
CALLED = ("init", "create_host_queue", "put", "put_tile", "wait_flag_then_put", "signal")
INSTALL = (
    "it is not on PyPI, so the extra iris-pg[rocm] does not bring it: build ROCm/rocm-xio from its sources with its "
    "Python package, for the ROCm that this torch is built for, and check it with `python -c 'import xio.sdma_ep'`"
)
_RING_BYTES = 1 << 20  # the smallest ring of any version; one that does not tell its size has at least that


@functools.cache
def load() -> Library:
    """Import the library and return it.

    Raises:
        UnsupportedError: it is not installed, or is no version that is known here.
    """
    return Library(find())


def find() -> Any:
    """Import the library's module and return it; nothing is started.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise UnsupportedError(
            f"SDMA user queues need {MODULE}, which cannot be imported ({error}); {INSTALL}"
        ) from None


class Library:
    """``xio.sdma_ep``.

    Args:
        module: the module.

    Attributes:
        ring_bytes: size of a queue's ring.
        kernels: what kernels share of the queue from one GPU to another.

    Raises:
        UnsupportedError: it lacks a function that is called here. QueueError: it does not start.
    """

    def __init__(self, module: Any) -> None:
        missing = [name for name in CALLED if not hasattr(module, name)]
        if missing:
            raise UnsupportedError(
                f"{MODULE} has no {', '.join(missing)}: it is a version of rocm-xio that is not known here; {INSTALL}"
            )
        self._module = module
        self._tile = getattr(module, "Tile", None)  # of the older signature alone
        self.ring_bytes = int(getattr(module, "SDMA_QUEUE_SIZE", _RING_BYTES))
        self._lock = threading.Lock()
        self._owners: dict[tuple[int, int], str] = {}
        self.kernels: dict[tuple[int, int], Producers] = {}
        _succeed("init", module.init())

    def acquire(self, src_device: int, dst_device: int, owner: str) -> int:
        """Return the channel of the queue from one GPU to another, which is then the owner's until it is released.

        Args:
            src_device, dst_device: numbers of GPUs, as HIP counts them in this process.

        Raises:
            UnsupportedError: it belongs to another.
        """
        with self._lock:
            other = self._owners.get((src_device, dst_device))
            if other is not None:
                raise UnsupportedError(
                    f"the SDMA queue from GPU {src_device} to GPU {dst_device} belongs to {other}: rocm-xio has one "
                    "for each pair of GPUs in a process, and two users of one could wait for each other; close the "
                    "other group or context first, or do without engines=('sdma',)"
                )
            channel = self._module.create_host_queue(src_device=src_device, dst_device=dst_device)
            self._owners[src_device, dst_device] = owner
            return int(channel)

    def owner(self, src_device: int, dst_device: int) -> str | None:
        """Return to whom a queue belongs, if to anyone."""
        with self._lock:
            return self._owners.get((src_device, dst_device))

    def release(self, src_device: int, dst_device: int) -> None:
        """Take a queue back in which nothing waits."""
        with self._lock:
            del self._owners[src_device, dst_device]

    def call(self, src_device: int, dst_device: int, channel: int, asked: Invocation) -> None:
        """Make one call of :func:`iris_pg.copy_engine.calls.invocations`, in the signature that the library has.

        Raises:
            QueueError: the library refuses it.
        """
        arguments = asked.arguments
        if asked.name == "put_tile" and self._tile:
            arguments = self._with_tile(arguments)
        queue = dict(src_device=src_device, dst_device=dst_device, channel_idx=channel)
        try:
            status = getattr(self._module, asked.name)(**queue, **arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise QueueError(f"{MODULE} refuses {describe(asked)}: {type(error).__name__}: {error}") from error
        _succeed(describe(asked), status)

    def device_context(self, src_device: int, dst_device: int) -> tuple[int, ...]:
        """Return the addresses that kernels need to write into the queue: six words, as in
        :class:`iris_pg.copy_engine.ring.Context`.
        """
        pair = dict(src_device=src_device, dst_device=dst_device)
        self._module.create_queue(**pair)
        context = self._module.get_queue_device_ctx(**pair)
        names = ("queue_buf", "rptr", "wptr", "doorbell", "cached_wptr", "committed_wptr")
        return tuple(int(getattr(context, name)) for name in names)

    def _with_tile(self, a: dict[str, Any]) -> dict[str, Any]:
        assert self._tile
        # One block of the matrix, at its start; its elements are bytes, so strides count bytes.
        tile = self._tile()
        tile.pid_m = tile.pid_n = 0
        tile.block_m, tile.block_n = a["tile_height"], a["tile_width"]
        tile.data, tile.elem_size, tile.src_stride = _capsule(a["global_addr"]), 1, a["src_stride"]
        return dict(tile=tile, dst_ptr=a["dst_addr"], dst_stride=a["dst_stride"])


def describe(asked: Invocation) -> str:
    """Return a call in words."""
    told = (f"{k}={v:#x}" if k in _ADDRESSES else f"{k}={v}" for k, v in asked.arguments.items())
    return f"{asked.name}({', '.join(told)})"


_ADDRESSES = ("dst", "src", "flag_ptr", "dst_addr", "global_addr")


def _succeed(what: str, status: Any) -> None:
    """Raise when a status is there and is not 0."""
    if isinstance(status, int) and not isinstance(status, bool) and status != 0:
        raise QueueError(f"{MODULE}: {what} failed with status {status}; see its log, and docs/amd.md")


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p


_CAPSULE = b"nb_handle"  # as nanobind, with which the library is bound, names a capsule of a ``void *``


def _capsule(address: int) -> Any:
    """Return an address as the older signature's ``void *``."""
    return _new_capsule(address, _CAPSULE, None)


# Does it do what it says? ---------------------------------------------------------------------------------------------

CHECK_BYTES = 128
"""Of memory that :func:`check` writes."""

_PATIENCE_S = 0.01  # for an engine that does not wait to show it; a thousand times what a copy of 4 bytes takes


def check(submit: Callable[[list[Call]], object], settle: Callable[[], None], host: int, device: int) -> None:
    """Move a few bytes through a queue and look at them, so that a version that swaps arguments, ignores one, or counts
    otherwise is an error before it has moved anybody's data.

    Args:
        submit: gives calls to the queue.
        settle: returns when the queue has done them.
        host, device: address of the memory, as the host and the engine see it.

    Raises:
        UnsupportedError: the library does something else than it was asked for.
    """
    ops = atomics()
    load, store = ops.load32, ops.store32

    def expect(what: str, *words: tuple[int, int]) -> None:
        for at, value in words:
            if (seen := load(host + at)) != value:
                raise UnsupportedError(
                    f"{MODULE}: {what}: the word at byte {at} holds {seen:#x} and not {value:#x}; this version of "
                    f"rocm-xio cannot be used; {INSTALL}"
                )

    ctypes.memset(host, 0, CHECK_BYTES)
    try:
        store(host, 0x11111111)
        store(host + 4, 0x22222222)
        submit([Linear(device + 4, device, 4)])
        settle()
        if load(host) == 0x22222222:
            expect("put copies from its destination to its source: the two are swapped", (0, 0x11111111))
        expect("put does not copy", (0, 0x11111111), (4, 0x11111111))

        for at, value in ((8, 1), (12, 7), (16, EMPTY), (20, 7)):
            store(host + at, value)
        submit([Increase(device + 8, EMPTY), Increase(device + 16, 2, 64)])
        settle()
        expect("signal does not add what it was given, to as many bits", (8, 0), (12, 7), (16, 1), (20, 8))

        submit([Poll(device + 24, 2), Linear(device + 28, device, 4)])
        time.sleep(_PATIENCE_S)
        expect("wait_flag_then_put does not wait", (28, 0))
        store(host + 24, 3)
        settle()
        expect("wait_flag_then_put does not copy once the flag is greater", (24, 3), (28, 0x11111111), (0, 0x11111111))

        ctypes.memmove(host + 32, bytes(range(1, 33)), 32)
        submit([Tile(device + 64, device + 32, 2, 4, 12, 16)])
        settle()
        expect("put_tile copies another rectangle", (64, 0x04030201), (68, 0), (72, 0), (76, 0x14131211), (80, 0))
        expect("put_tile writes its source", (32, 0x04030201), (48, 0x14131211))
    except IrisError:
        store(host + 24, 3)  # nothing may go on waiting
        raise


__all__ = ["CHECK_BYTES", "INSTALL", "MODULE", "Library", "check", "describe", "find", "load"]
