"""A proxy's GPU for processes that have none: streams are threads that move bytes of the host, late."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from types import SimpleNamespace

from iris_pg.copy_engine.channels import Channels
from iris_pg.options import Options
from iris_pg.platforms.atomics import atomics
from iris_pg.proxy_channels import KernelPuts, KernelQueues

RMW = dict(SWAP="xchg", ADD="add", SUB="sub", SMIN="min", UMIN="umin", SMAX="max", UMAX="umax", AND="and", OR="or")


class HostStream:
    """A thread that does one thing after another, at random times when ``seed`` is given."""

    def __init__(self, seed=None):
        self._random = None if seed is None else random.Random(seed)
        self._todo = queue.SimpleQueue()
        self.told = []
        threading.Thread(target=self._loop, name="stream of a proxy", daemon=True).start()

    def _loop(self):
        while (todo := self._todo.get()) is not None:
            if self._random and self._random.random() < 0.2:
                time.sleep(self._random.random() / 200)
            todo()

    def _tell(self, name, do):
        self.told.append(name)
        self._todo.put(do)

    def stop(self):
        self._todo.put(None)

    def copy(self, dst, src, nbytes):
        self._tell("copy", lambda: ctypes.memmove(dst, src, nbytes))

    def copy_2d(self, dst, src, width_bytes, rows, dst_pitch, src_pitch):
        copy_rows = atomics().copy_rows
        self._tell("copy_2d", lambda: copy_rows(dst, dst_pitch, src, src_pitch, width_bytes, rows))

    def fill(self, dst, value, unit_bytes, nbytes):
        data = value.to_bytes(unit_bytes, "little") * (nbytes // unit_bytes)
        self._tell("fill", lambda: ctypes.memmove(dst, data, nbytes))

    def write(self, address, value, width_bytes):
        store = {4: atomics().store32, 8: atomics().store64}[width_bytes]
        self._tell("write", lambda: store(address, value))

    def atomic(self, op, address, operand, compare, width_bytes):
        if op == "CMPSWAP":
            cas = {4: atomics().cas32, 8: atomics().cas64}[width_bytes]
            return self._tell(op, lambda: cas(address, compare, operand))
        change = atomics().rmw[RMW[op], width_bytes]
        self._tell(op, lambda: change(address, operand))

    def read(self, address):
        return atomics().load32(address)

    def synchronize(self):
        done = threading.Event()
        self._todo.put(done.set)
        assert done.wait(30)


class HostPlatform:
    """What ProxyChannels needs of a GPU."""

    def __init__(self, seed=None):
        self.seed, self.streams, self.registered = seed, [], 0

    def begin(self):
        pass

    def stream(self):
        self.streams.append(HostStream(None if self.seed is None else f"{self.seed}/{len(self.streams)}"))
        return self.streams[-1]

    def register(self, address, nbytes):
        self.registered += 1

        def close():
            self.registered -= 1

        return SimpleNamespace(shift=0, close=close)


class HostChannels(KernelPuts, Channels):
    """The software engine for what the host puts, a proxy's queues for kernels."""

    def __init__(self, heap, platform, timeout_s):
        super().__init__(heap, timeout_s)
        self.platform, self.kernels = platform, KernelQueues(heap, platform, timeout_s)

    def close(self, error):
        super().close(error)
        assert self.platform.registered == 0
        for stream in self.platform.streams:
            stream.stop()


def install(ctx):
    """Give a context without an engine such queues; they go with it."""
    ctx._channels = HostChannels(ctx.heap, HostPlatform(seed=ctx.cur_rank), Options().timeout_s or 20.0)
