"""A GPU for processes that have none: its streams are threads and its memory is the host's.

:func:`pretend` replaces, in this process, what platforms/cuda.py and torch.cuda give to the transport for CUDA tensors.
Tensors stay CPU tensors; the default group hands them to that transport. What differs from a GPU: memory is not freed
in the order of streams, so a synchronous call waits for its stream here; nothing can be captured; futures do not know
streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time

import torch
import torch.distributed as dist

from iris_pg import device_messages, device_transport, device_work, process_group
from iris_pg.copy_engine import stream as stream_engine
from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.operations import base, exchanges, gathers, reductions, rooted
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.cpu import HostMemory
from iris_pg.platforms.gpu import platform as cuda

DEVICE = torch.device("cuda", 0)
repeated: list[tuple] = []  # keys of operations that were known from a call before


class Stream:
    """A thread that does one thing after another."""

    all: dict[int, Stream] = {}
    current: Stream

    def __init__(self, device=None, priority=0):
        self.cuda_stream = len(Stream.all) + 1
        self.device = DEVICE
        self._todo: queue.Queue = queue.Queue()
        Stream.all[self.cuda_stream] = self
        threading.Thread(target=self._loop, name="fake stream", daemon=True).start()

    def _loop(self):
        while (todo := self._todo.get()) is not None:
            todo()

    def submit(self, todo):
        self._todo.put(todo)

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        self.submit(event.now.wait)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().now.wait()


class Event:
    """What a stream sets when it comes to it; who waits for it waits for what was recorded last."""

    def __init__(self):
        self.now = threading.Event()

    def record(self, stream):
        self.now = now = threading.Event()
        stream.submit(now.set)

    def query(self):
        return self.now.is_set()


class Memory(HostMemory):
    """The host's memory as that of a GPU."""

    device = DEVICE

    def __init__(self, device):
        self.place = "the fake GPU"


class Calls:
    """As :class:`iris_pg.platforms.cuda_streams.Calls`."""

    def __init__(self, launches, ops=(), mark=None):
        self._launches, self._mark = [*launches, *flags(ops)], mark

    def __call__(self, raw):
        for launch in self._launches:
            launch(raw)

    def marked(self, raw, value):
        self(raw)
        self.mark(raw, value)

    def mark(self, raw, value):
        write(self._mark, value)(raw)


def flags(ops):
    return [lambda raw: Stream.all[raw].submit(lambda: _obey(ops))] if ops else []


def _obey(ops):
    words = atomics()
    for op in ops:
        if op.waits:
            turns = 0
            while words.load32(op.address) != op.value:
                turns += 1
                time.sleep(0 if turns < 100 else 1e-4)
        else:
            words.store32(op.address, op.value)


def on(raw, launch):
    return lambda _: launch(raw)


class Order:
    """As :class:`iris_pg.platforms.cuda_streams.Event`."""

    def __init__(self):
        self._event = Event()

    def record(self, raw):
        self._event.record(Stream.all[raw])

    def wait(self, raw):
        Stream.all[raw].wait_event(self._event)


def write(address, value):
    return lambda raw: Stream.all[raw].submit(lambda: atomics().store32(address, value))


def copy(dst, src, nbytes):
    return lambda raw: Stream.all[raw].submit(lambda: ctypes.memmove(dst, src, nbytes))


def reduction(device, ctas, op, dtype, dst, sources, nbytes):
    return lambda raw: Stream.all[raw].submit(lambda: reduce_bytes(op, dtype, dst, sources, nbytes))


def place(tensor):
    """As :func:`iris_pg.operations.base.place`, of CPU tensors."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return (tensor.data_ptr(), tensor.numel(), tensor.dtype) if is_plain and base._is_dense(tensor) else None


@contextlib.contextmanager
def current(stream):
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def synchronize(device=None):
    for stream in list(Stream.all.values()):
        stream.synchronize()


@contextlib.contextmanager
def pretend():
    """Have a GPU, and a default group that uses it, which is destroyed at the end."""
    Stream.current = Stream()
    changes = [
        (cuda, dict(DeviceMemory=Memory, Calls=Calls, copy=copy, flags=flags, on=on, write=write)),
        (cuda, dict(Event=Order, can_reach=lambda device, uuid: True, stream_handle=lambda raw: raw)),
        (cuda, dict(register=lambda address, nbytes: address, unregister=lambda address: None)),
        (stream_engine, dict(reduction=reduction)),
        (device_work, dict(stream_of=lambda device, raw: Stream.all[raw])),
        (device_transport, dict(stream_of=lambda device, raw: Stream.all[raw])),
        *(
            (module, dict(raw_stream=lambda device: Stream.current.cuda_stream))
            for module in (device_work, device_transport, device_messages, process_group)
        ),
        *((module, dict(place=place)) for module in (gathers, reductions, rooted, exchanges)),
        (torch.cuda, dict(Stream=Stream, Event=Event, stream=current, device=lambda device: contextlib.nullcontext())),
        (torch.cuda, dict(current_stream=lambda device=None: Stream.current, synchronize=synchronize)),
        (torch.cuda, dict(is_current_stream_capturing=lambda: False, current_device=lambda: 0)),
        (torch._C, dict(_cuda_getDevice=lambda: 0, _cuda_isCurrentStreamCapturing=lambda: False)),
    ]
    missing = object()
    before = [(owner, name, getattr(owner, name, missing)) for owner, names in changes for name in names]
    for owner, names in changes:
        for name, value in names.items():
            setattr(owner, name, value)
    group = dist.group.WORLD
    _use(group)
    try:
        yield
    except BaseException:
        group.abort()
        raise
    finally:
        dist.destroy_process_group()
        for owner, name, value in before:
            delattr(owner, name) if value is missing else setattr(owner, name, value)
        for stream in Stream.all.values():
            stream.submit(None)
        Stream.all.clear()
        repeated.clear()


def _use(group):
    """Let a group of CPU tensors move them by its transport for the fake GPU, until its end."""

    def run(device, *given):
        *given, after, seen = given if len(given) == 10 else (*given, None)

        def behind():
            Stream.current.submit(after)

        return done(type(group)._run(group, DEVICE, *given, behind if after else None, seen), given[6])

    def repeat(known, outputs, asynchronous, keep):
        repeated.append(known[1].key)
        return done(type(group)._repeat(group, known, outputs, asynchronous, keep), asynchronous)

    def done(work, asynchronous):
        if not asynchronous:
            Stream.current.synchronize()
        return work

    def send(tensors, dst, tag=0):
        return group._on(DEVICE).send(tensors[0], dst, tag, tensors)

    def recv(tensors, src, tag=0):
        return group._on(DEVICE).recv(tensors[0], src, tag, tensors, None)

    on = group._on
    group._on = lambda device: on(DEVICE if device.type == "cpu" else device)
    group._run, group._repeat, group.send, group.recv = run, repeat, send, recv
    group._offset = lambda tensor, nbytes: group._on(DEVICE).tensors.offset_of(tensor.data_ptr(), nbytes)
    group._barrier_device = lambda opts: DEVICE
