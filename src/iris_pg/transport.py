"""What moves bytes between the ranks of one group: the heap, the engine, and the operations built on them, for CPU
tensors.

An operation is given to :meth:`Transport.run` as a key and a builder. The program of a key is built, encoded and cached
the first time; afterwards a call writes its packets into the ring, fills in the tensors' addresses, and executes them.

Mailboxes carry a tag made from the operation's key, so a rank in another operation is noticed; watch.py names it. The
flags of the cu engine are counters, so there watch.py compares at the end of every operation.
"""

from __future__ import annotations

import atexit
import os
import random
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.copy_engine.translate import Batch, encode
from iris_pg.errors import ClosedError, MismatchError, where
from iris_pg.flags import SLOTS
from iris_pg.kernels.engine import Exchange, KernelEngine, area_bytes
from iris_pg.launches import launches
from iris_pg.mail import Mail
from iris_pg.mailbox import area_bytes as mail_bytes
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.neighbours import Neighbours
from iris_pg.memory.sharing import Links
from iris_pg.options import Options
from iris_pg.planner import engine_for
from iris_pg.program import Program, Ref
from iris_pg.watch import Key, Watch, tag_of
from iris_pg.work import IrisWork

_RING_BYTES = 4 << 20
_CACHE_BYTES = 32 << 20  # of memory for encoded programs
_PULLED_BYTES = 1 << 20  # pulled from all peers at a time to be reduced: about what a core's cache holds

BARRIER: Key = ("barrier",)

_open_transports: weakref.WeakSet[Transport] = weakref.WeakSet()


class Transport:
    """Operations on CPU tensors for one group.

    Args:
        links: the group's links.
        options: the group's options.
        timeout_s: deadline of every wait.
        tensors: the heap of the user's tensors, when it is not the transport's own.
    """

    def __init__(self, links: Links, options: Options, timeout_s: float, tensors: SymmetricHeap | None = None) -> None:
        self.links, self.rank, self.world = links, links.rank, links.world
        self.chunk_bytes = options.chunk_bytes
        self.pair_bytes = max(256, 2 * options.chunk_bytes // max(self.world, 1) // 256 * 256)
        self.piece_bytes = max(4096, _PULLED_BYTES // max(self.world, 1) // 256 * 256)
        self.engine, self.reason = engine_for(options.engine, "cpu")
        areas = dict(scratch=8 * (self.world + 1), mail=mail_bytes(self.chunk_bytes, self.world))
        if self.engine == "cu":
            areas |= area_bytes(self.world, self.chunk_bytes)
        else:
            areas |= dict(staging=SLOTS * self.chunk_bytes, pairs=SLOTS * (self.world - 1) * self.pair_bytes)
            areas |= dict(pulled=self.world * self.piece_bytes)
        self.heap = SymmetricHeap(links, options.heap_bytes, areas)
        self.tensors = tensors or self.heap
        self._neighbours = None
        self.direct_bytes = options.direct_bytes if self.engine == "sdma" and self.world > 1 else 0
        if self.direct_bytes:
            self._neighbours = Neighbours(links)
            self.direct_bytes *= self._neighbours.is_readable
        self.watch = watch = Watch(self.heap, self._done, tells_sizes=self.engine == "cu")
        self._is_fork = False
        self._lock = threading.RLock()  # operations are numbered and submitted in one order
        self._programs: OrderedDict[tuple[Key, Any, int], list[Batch]] = OrderedDict()
        self._programs_bytes = 0
        self._barriers = 0
        told = (watch.check_open, watch.check_failed, watch.give_up)
        self.mail = Mail(self.heap, self.chunk_bytes, timeout_s, *told, options.hostile_seed)
        _open_transports.add(self)
        name = f"iris_pg {links.group}"
        self.queue: Queue | None = None
        self._thread: EngineThread | None = None
        self._kernels: KernelEngine | None = None
        if self.engine == "cu":
            where_ = (self.heap.areas["cu_flags"], self.heap.areas["cu_landing"], self.chunk_bytes)
            self._kernels = KernelEngine(
                self.rank,
                self.world,
                self.heap.bases,
                *where_,
                timeout_s,
                watch.check_peer,
                watch.late,
                watch.give_up,
                name,
            )
        else:
            hostile = None if options.hostile_seed is None else random.Random(f"{options.hostile_seed}/{self.rank}")
            patience = Patience(timeout_s, self.world, watch.check, watch.describe)
            ring, neighbours = Ring(_RING_BYTES, f"{links.group}/{self.rank}"), self._neighbours
            reading: dict[str, Any] = {}
            if neighbours:
                reading = dict(read=self._read, pids=neighbours.pids, halved_bytes=neighbours.halved_bytes)
            self.queue = Queue(ring, patience, hostile, on_fault=watch.give_up, **reading)
            self._thread = EngineThread([self.queue], keep_looking=False, name=name)

    # Operations -------------------------------------------------------------------------------------------------------

    def run(
        self,
        key: Key,
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str] = (),
        addresses: Sequence[int] = (),
        work: IrisWork | None = None,
        program: Callable[[Setting, Any], Program] | None = None,
    ) -> int:
        """Execute an operation: inline when ``work`` is None, else on the engine's thread or in ``work.wait``.

        Args:
            key: what the operation is, equal on all ranks; its text is shown to users.
            local: what else this rank's program depends on.
            flow: given ``(key, local)``, returns this rank's side of the operation; called when they are new.
            names: the flow's buffers whose addresses are given per call.
            addresses: one for each name.
            work: told when the operation is done.
            program: given ``local``, builds the program for a copy engine, when it is not what ``flow`` says.

        Returns:
            The operation's sequence number.

        Raises:
            ClosedError: the group has failed or was closed before. And, when ``work`` is None, what ends the operation.
        """
        watch, completion = self.watch, work.completion if work else None
        with self._lock:
            sequence = watch.begin(key)
            if key == BARRIER:
                local, self._barriers = self._barriers % 2, self._barriers + 1
            queue, thread = self.queue, self._thread  # close() takes them away
            if self._kernels:
                assert watch.sizes
                made = flow(key, local)
                exchanges = self._launches(made, names, addresses)
                watch.sizes.tell(sequence, made, oldest=watch.current()[0])
                watch.submitting(key)
                watch.submitted(self._kernels.submitted + 1)
                job = self._kernels.submit(exchanges, completion, lambda: watch.ended(sequence, key))
            else:
                assert queue
                slot = sequence % SLOTS
                batches = self._programs.get((key, local, slot))
                if batches is None:
                    batches = self._encode(key, local, slot, flow, program, names)
                watch.submitting(key)
                end = queue.submit(batches, addresses, completion)
                watch.submitted(end)
        if self._kernels:
            if work is None:
                self._kernels.wait(job)
        elif work is None:
            assert queue
            queue.drive(end)
        else:
            assert thread
            work.end = end
            thread.wake()
        return sequence

    def barrier(self, work: IrisWork | None = None) -> None:
        """Return, or end ``work``, when every rank has entered."""

        def flow(key: Key, round_: int) -> Flow:
            here = Ref(self.rank, "scratch", 0)
            peers = [(self.rank + k) % self.world for k in range(1, self.world)]
            receives = tuple(Part(p, 8, here + 8 * (p + 1)) for p in peers)
            return Flow("barrier", tuple(Part(p, 8, here) for p in peers), receives)

        sequence = self.run(BARRIER, None, flow, work=work, program=barrier)
        if work is None and self.queue:  # the other engine compares at the end of every operation
            try:
                self.watch.compare(sequence, BARRIER)
            except MismatchError as error:
                self.watch.give_up(error)
                raise

    def drive_work(self, work: IrisWork) -> None:
        """Help to execute ``work`` in this thread."""
        if self._is_fork and self.watch.failure:
            raise self.watch.failure
        if queue := self.queue:
            queue.drive(work.end)
        elif kernels := self._kernels:
            kernels.help(work.is_completed)

    def _done(self) -> int:
        engine = self.queue or self._kernels
        return 0 if engine is None else engine.done if isinstance(engine, Queue) else engine.completed

    def _read(self, rank: int, dst: int, src: int, nbytes: int) -> None:
        """Copy from the memory of ``rank``'s process."""
        assert self._neighbours
        if not self._neighbours.read(rank, dst, src, nbytes):
            self.watch.lose(rank)

    @property
    def sequence(self) -> int:
        """Number of operations begun."""
        return self.watch.sequence

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of later waits."""
        self.mail.timeout_s = timeout_s
        if self.queue:
            self.queue.patience.timeout_s = timeout_s
        if self._kernels:
            self._kernels.timeout_s = timeout_s

    def yield_for(self, seconds: float) -> None:
        """Set for how long waits yield their core before they sleep: less where other work needs the cores."""
        if self.queue:
            self.queue.patience.yield_s = seconds

    def _encode(
        self,
        key: Key,
        local: Any,
        slot: int,
        flow: Callable[[Key, Any], Flow | Fold],
        program: Callable[[Setting, Any], Program] | None,
        names: Sequence[str],
    ) -> list[Batch]:
        setting = Setting(
            self.rank,
            self.world,
            self.heap.control,
            tag=tag_of(key),
            chunk_bytes=self.chunk_bytes,
            pair_bytes=self.pair_bytes,
            first_slot=slot,
            direct_bytes=self.direct_bytes,
            piece_bytes=self.piece_bytes,
        )
        bindings = {name: number for number, name in enumerate(names)}
        made = program(setting, local) if program else build(setting, flow(key, local))
        assert self.queue
        batches = encode(made, self._address, bindings, self.queue.ring.largest_batch)
        self._programs[key, local, slot] = batches
        self._programs_bytes += sum(b.memory_bytes for b in batches)
        while self._programs_bytes > _CACHE_BYTES and len(self._programs) > 1:
            _, old = self._programs.popitem(last=False)
            self._programs_bytes -= sum(b.memory_bytes for b in old)
        return batches

    def _address(self, ref: Ref) -> int:
        if ref.buffer == "heap":
            return self.tensors.bases[ref.rank] + ref.offset
        start = 0 if ref.buffer == "flags" else self.heap.areas[ref.buffer]
        return self.heap.bases[ref.rank] + start + ref.offset

    def _launches(self, flow: Flow | Fold, names: Sequence[str], addresses: Sequence[int]) -> list[Exchange]:
        bound = dict(zip(names, addresses, strict=True))

        def address(ref: Ref) -> int:
            return bound[ref.buffer] + ref.offset if ref.buffer in bound else self._address(ref)

        return launches(self.rank, self.world, flow, address)

    def explain(self) -> str:
        """Return what was chosen for CPU tensors, and why, in words."""
        return "\n".join(
            (
                f"group {self.links.group}: rank {self.rank} of {self.world}, CPU tensors",
                f"  engine    {self.engine} ({self.reason})",
                f"  heap      {self.heap.limit_bytes} bytes a rank for tensors; peers write outputs and read inputs "
                "in it directly (zero copy)",
                f"  elsewhere {self._elsewhere()}",
                f"  {self.mail.explain()}",
            )
        )

    def _elsewhere(self) -> str:
        staged = f"through staging slots of {self.chunk_bytes} bytes"
        if self.direct_bytes:
            return f"{staged}; from {self.direct_bytes} bytes on read directly out of the sender's process"
        why = self._neighbours.reason if self._neighbours else "not asked for"
        return f"{staged}; none is read directly out of the sender's process: {why}"

    def close(self, why: str = "closed") -> None:
        """Stop the engine's thread and drop the heap; pending operations end with ClosedError. Idempotent."""
        watch = self.watch
        watch.failure = failure = watch.failure or ClosedError(
            f"the group was closed ({why}) {where(group=self.links.group, rank=self.rank)}"
        )
        if not self._is_fork:
            # Whoever waits at a poll sees the failure and leaves, also the lock. What it protects may go then.
            queue, thread = self.queue, self._thread  # another thread may close the group at the same time
            if queue and thread:
                queue.close(failure)
                thread.close()
            if self._neighbours:
                self._neighbours.close()
            if self._kernels:
                self._kernels.fail(failure)
                self._kernels.close()
            self.mail.close(failure)
        locked = self._lock.acquire(timeout=10)  # a callback may close the group, while another thread waits for it
        self.queue = self._thread = None  # and with them their ring, though torch may keep the group for long
        self.heap.close()
        if locked:
            self._lock.release()

    def _forget(self) -> None:
        """In a forked child, which shares the segments and the ring with its parent: touch neither, wait for none."""
        self._is_fork = True
        self._lock = threading.RLock()  # whoever held it lives in the parent
        self.watch.failure = failure = ClosedError(
            "this process is a fork of the one that created the group, and cannot use it; make a group of its own "
            f"{where(group=self.links.group, rank=self.rank)}"
        )
        self.mail.forget(failure)


def _after_fork_in_child() -> None:
    for transport in list(_open_transports):
        transport._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    """Stop every thread before the interpreter ends: until Python 3.14 it ends a daemon thread that wants the GIL by
    unwinding its stack, and a C++ frame in there (a future's, a tensor's) then aborts the process.
    """
    for transport in list(_open_transports):
        transport.close("the process ends")
