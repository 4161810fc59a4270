"""Groups of CPU ranks whose bytes move through copy_engine/xio.py and a stand-in for rocm-xio, for tests."""

from __future__ import annotations

import contextlib
import queue
import threading
from types import SimpleNamespace

from fake_xio import FakeXio
from iris_pg.collectives.build import build
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.calls import lower, over_queues
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.xio import Library
from iris_pg.copy_engine.xio_queue import WORDS_BYTES, Words, XioQueue
from iris_pg.errors import IrisError
from iris_pg.flags import LINE
from iris_pg.options import Options
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import atomics
from iris_pg.program import Signal, Take
from iris_pg.transport import Transport

WORDS = -(-WORDS_BYTES // LINE) * LINE


def devices(world):
    """The GPU of each rank, as a library may count them: neither ranks nor in their order."""
    return [5 + 3 * rank % 8 for rank in range(world)]


def words_of(world):
    """Return memory for the words of queues to all ranks, and where each is."""
    memory = cpu.private_memory(cpu.page_up(WORDS * world))
    return memory, [Words(memory.address + WORDS * p, memory.address + WORDS * p) for p in range(world)]


class XioTransport(Transport):
    """What Transport is, with programs over the queues of a library; a thread is the stream."""

    def __init__(self, links, options, timeout_s, fake):
        super().__init__(links, options, timeout_s)
        self._thread.close()  # of the software engine, whose queue nobody uses
        self.queue = Stream(self, fake, timeout_s)
        self._thread = SimpleNamespace(wake=lambda: None, close=self.queue.stop)

    def _encode(self, key, local, slot, flow, program, names):
        from iris_pg.watch import tag_of

        sizes = dict(chunk_bytes=self.chunk_bytes, pair_bytes=self.pair_bytes, piece_bytes=self.piece_bytes)
        setting = Setting(
            self.rank, self.world, self.heap.control, tag=tag_of(key), first_slot=slot, pushes=True, **sizes
        )
        made = program(setting, local) if program else build(setting, flow(key, local))
        batches = self._programs[key, local, slot] = [over_queues(made), names]
        return batches


class Stream:
    """Lane 0 of programs, on a thread, and the queues to all ranks."""

    def __init__(self, transport, fake, timeout_s):
        self._transport, self._fake = transport, fake
        self._memory, words = words_of(transport.world)
        self._mailboxes = cpu.private_memory(cpu.page_up(2 * LINE * transport.world))
        library, gpus = Library(fake.module), devices(transport.world)
        group = f"{transport.links.group}/{transport.rank}"
        self.queues = [
            XioQueue(library, gpus[transport.rank], gpus[p], words[p], timeout_s, f"{group}->{p}")
            for p in range(transport.world)
        ]
        self.patience = Patience(timeout_s, 1000)
        self.ring = SimpleNamespace(largest_batch=0)
        self._todo: queue.Queue = queue.Queue()
        self._told, self.completed = 0, 0
        self._moved = threading.Condition()
        self._fault = None
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, made, addresses, completion):
        program, names = made
        bound = dict(zip(names, addresses, strict=True))

        def address(ref):
            if ref.buffer == "queues":
                return self._mailboxes.address + ref.offset
            return bound[ref.buffer] + ref.offset if ref.buffer in bound else self._transport._address(ref)

        calls: dict[int, list] = {}
        for number, call in lower(program, address):
            calls.setdefault(number, []).append(call)
        for number, of_queue in calls.items():
            self.queues[number].submit(of_queue)
        self._told += 1
        self._todo.put(([step for step in program.steps if step.lane == 0], address, completion))
        return self._told

    def drive(self, end):
        with self._moved:
            self._moved.wait_for(lambda: self.completed >= end or self._fault, self.patience.timeout_s + 5)
        if self.completed < end:
            raise self._fault

    def close(self, error):
        self._fault = self._fault or error

    def stop(self):
        self._todo.put(None)
        self._thread.join()
        assert all(q.close(5) for q in self.queues)
        self._fake.stop()

    def _loop(self):
        store = atomics().store32
        while (job := self._todo.get()) is not None:
            steps, address, completion = job
            error = None
            try:
                for step in steps:
                    at = address(step.flag)
                    if isinstance(step, Signal):
                        store(at, 1)
                    else:
                        assert isinstance(step, Take)
                        self.patience.wait(at, 0xFFFFFFFF, 1, 0, 1)
                        store(at, 0)
            except IrisError as raised:
                error = self._fault = raised
            with self._moved:
                self.completed += 1
                self._moved.notify_all()
            if completion and (callbacks := completion.finished(error)):
                callbacks()


@contextlib.contextmanager
def over_xio(signature, seed=None):
    """Within it the default group's operations on CPU tensors go through the library's stand-in, which is given."""
    import torch.distributed as dist

    group = dist.group.WORLD
    before, fake = group.transport, FakeXio(signature, seed=seed)
    options = Options(chunk_bytes=before.chunk_bytes, direct_bytes=0)
    group.transport = transport = XioTransport(group.links, options, before.queue.patience.timeout_s, fake)
    try:
        yield fake
        group.transport.barrier()
    finally:
        group.transport = before
        transport.close()
