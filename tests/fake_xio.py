"""A stand-in for rocm-xio's ``xio.sdma_ep``, in both published signatures, on the software copy engine: its calls write
real packets into real rings, which a thread executes. No GPU, and no library.

What it has of the library's manners: sizes above the field of a packet lose their high bits; a size of 0 is an error; a
ring that is full is waited for without end (here: an error after some seconds); a queue is made once for each pair of
devices; a signal adds, and a wait compares the low 32 bits for >=.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

from iris_pg.copy_engine import packets
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.copy_engine.translate import Batch

SIGNATURES = ("old", "new")
FAULTS = ("swapped", "swapped wait", "plain signal", "no wait", "tile in elements", "writes nothing")


class Tile:
    """Of the older signature."""

    pid_m = pid_n = block_m = block_n = elem_size = src_stride = 0
    data: Any = None

    def source(self):
        """Return where it is, its rows, its width and its pitch in bytes."""
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        pitch = self.src_stride or self.block_n * self.elem_size
        start = self.pid_m * self.block_m * pitch + self.pid_n * self.block_n * self.elem_size
        return pointer(self.data, b"nb_handle") + start, self.block_m, self.block_n * self.elem_size, pitch


class FakeXio:
    """The state of one library.

    Args:
        signature: of :data:`SIGNATURES`.
        ring_bytes: size of a ring.
        seed: of a hostile engine, if given.
        fault: what is wrong with it, of :data:`FAULTS`.

    Attributes:
        module: what takes the place of ``xio.sdma_ep``.
        called: (function, arguments) of every call.
        most: most bytes of packets that a ring has held.
    """

    def __init__(self, signature="new", ring_bytes=1 << 20, seed=None, fault=""):
        self.signature, self._ring_bytes, self._seed, self.fault = signature, ring_bytes, seed, fault
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.most = 0
        self.queues: dict[tuple[int, int], Queue] = {}
        self._lock = threading.Lock()
        self._thread: EngineThread | None = None
        self.module = SimpleNamespace(
            SDMA_QUEUE_SIZE=ring_bytes,
            init=lambda: 0,
            shutdown=lambda: 0,
            create_queue=lambda src_device, dst_device: self._create(src_device, dst_device, "kernels"),
            create_host_queue=self._create,
            get_queue_device_ctx=self._context,
            signal=self._signal,
        )
        old = signature == "old"
        if old:
            self.module.Tile = Tile
        for name in ("put", "put_tile", "wait_flag_then_put"):
            setattr(self.module, name, getattr(self, f"_{name}_{signature}"))

    def stop(self):
        """Stop the engine; nothing of it uses any memory afterwards."""
        if self._thread:
            self._thread._stop = True
        for queue in self.queues.values():
            queue.close(RuntimeError("the fake was stopped"))
        if self._thread:
            self._thread.close()

    # What both signatures have ----------------------------------------------------------------------------------------

    def _create(self, src_device, dst_device, *kernels):
        with self._lock:
            pair = src_device, dst_device, *kernels
            if pair not in self.queues:
                name = f"xio {pair}"
                hostile = None if self._seed is None else random.Random(f"{self._seed}/{pair}")
                self.queues[pair] = queue = Queue(Ring(self._ring_bytes, name), Patience(1000.0, 1000), hostile)
                if self._thread:
                    self._thread.add(queue)
                else:
                    self._thread = EngineThread([queue], keep_looking=True, name=name)
                    self._thread.wake()
            return 0

    def _context(self, src_device, dst_device):
        c = self.queues[src_device, dst_device, "kernels"].ring.context
        return SimpleNamespace(
            queue_buf=c.queue_buffer,
            rptr=c.rptr,
            wptr=c.wptr,
            doorbell=c.doorbell,
            cached_wptr=c.cached_wptr,
            committed_wptr=c.committed_wptr,
        )

    def _signal(self, src_device, dst_device, channel_idx, flag_ptr, value=1, flag_bits=32):
        self._note("signal", flag_ptr=flag_ptr, value=value, flag_bits=flag_bits)
        if self.fault == "plain signal":
            value, flag_bits = 1, 32
        packet = packets.atomic(flag_ptr, packets.AtomicOp.ADD, value, width_bytes=flag_bits // 8)
        return self._write(src_device, dst_device, channel_idx, packet)

    # The older one ----------------------------------------------------------------------------------------------------

    def _put_old(self, src_device, dst_device, channel_idx, src, dst, size):
        return self._put(src_device, dst_device, channel_idx, dst, src, size)

    def _wait_flag_then_put_old(
        self, src_device, dst_device, channel_idx, flag_ptr, expected_value, src, dst, size, flag_bits=32
    ):
        return self._wait_put(src_device, dst_device, channel_idx, flag_ptr, expected_value, dst, src, size, flag_bits)

    def _put_tile_old(self, src_device, dst_device, channel_idx, tile, dst_ptr, dst_stride):
        src, rows, width_bytes, pitch = tile.source()
        place = dst_ptr, src, rows, width_bytes, dst_stride, pitch
        return self._window(src_device, dst_device, channel_idx, *place)

    # The newer one ----------------------------------------------------------------------------------------------------

    def _put_new(self, src_device, dst_device, channel_idx, dst, src, size):
        return self._put(src_device, dst_device, channel_idx, dst, src, size)

    def _wait_flag_then_put_new(
        self, src_device, dst_device, channel_idx, flag_ptr, expected_value, dst, src, size, flag_bits=32
    ):
        return self._wait_put(src_device, dst_device, channel_idx, flag_ptr, expected_value, dst, src, size, flag_bits)

    def _put_tile_new(
        self,
        src_device,
        dst_device,
        channel_idx,
        dst_addr,
        global_addr,
        data_size,
        tile_height,
        tile_width,
        dst_stride,
        src_stride,
    ):
        n = data_size * (4 if self.fault == "tile in elements" else 1)
        place = dst_addr, global_addr, tile_height, tile_width * data_size, dst_stride * n, src_stride * n
        return self._window(src_device, dst_device, channel_idx, *place)

    # Packets ----------------------------------------------------------------------------------------------------------

    def _put(self, src_device, dst_device, channel, dst, src, size):
        self._note("put", dst=dst, src=src, size=size)
        if self.fault == "swapped":
            dst, src = src, dst
        return self._write(src_device, dst_device, channel, self._copy(dst, src, size))

    def _wait_put(self, src_device, dst_device, channel, flag, expected, dst, src, size, flag_bits):
        assert flag_bits in (32, 64)
        self._note("wait_flag_then_put", flag_ptr=flag, expected_value=expected, dst=dst, src=src, size=size)
        if self.fault == "swapped wait":
            dst, src = src, dst
        poll = b"" if self.fault == "no wait" else packets.poll_regmem(flag, expected & 0xFFFFFFFF)
        status = self._write(src_device, dst_device, channel, poll + self._copy(dst, src, size))
        if self.fault == "no wait":  # it is done at once, however busy the machine is
            ring, deadline = self.queues[src_device, dst_device].ring, time.monotonic() + 20
            while ring.retired() < ring.committed():
                assert time.monotonic() < deadline
                time.sleep(1e-4)
        return status

    def _window(self, src_device, dst_device, channel, dst, src, rows, width_bytes, dst_pitch, src_pitch):
        self._note("put_tile", dst=dst, src=src, rows=rows, width_bytes=width_bytes)
        pitches = dict(dst_pitch_bytes=dst_pitch, src_pitch_bytes=src_pitch)
        packet = packets.copy_sub_window(dst=dst, src=src, width_bytes=width_bytes, n_rows=rows, **pitches)
        return self._write(src_device, dst_device, channel, packet)

    def _copy(self, dst, src, size):
        if not 0 < size <= 1 << 32:
            raise ValueError(f"size {size}")
        return packets.copy_linear(dst=dst, src=src, nbytes=((size - 1) & 0x3FFFFFFF) + 1)

    def _write(self, src_device, dst_device, channel, packet):
        assert channel == 0
        if self.fault == "writes nothing":
            return 0
        queue = self.queues[src_device, dst_device]
        ring = queue.ring
        if queue.fault:
            raise RuntimeError(str(queue.fault))
        ring.submit(Batch(bytearray(packet)).packets, deadline=time.monotonic() + 20)
        self.most = max(self.most, ring.committed() - ring.retired())
        assert self._thread
        self._thread.wake()
        return 0

    def _note(self, name, **arguments):
        if len(self.called) < 100_000:
            self.called.append((name, arguments))
