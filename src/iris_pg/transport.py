"""What moves bytes between the ranks of one group: the heap, the engine, and the operations built on them, for CPU
tensors.

An operation is given to :meth:`Transport.run` as a key and a builder. The program of a key is built, encoded and cached
the first time; afterwards a call writes its packets into the ring, fills in the tensors' addresses, and executes them.

The transport knows what every rank should be doing: operations are numbered, and each carries a tag made from its key.
When a wait takes long it says in its control page what it waits in, and looks at what the others say, so a rank that is
late, dead, or in another operation is named. A group that has failed stays failed.
"""

from __future__ import annotations

import atexit
import os
import random
import threading
import weakref
import zlib
from collections import OrderedDict, deque
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
from iris_pg.errors import ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError, where
from iris_pg.flags import DESCRIPTION_BYTES, HISTORY, SLOTS
from iris_pg.kernels.engine import Exchange, KernelEngine, area_bytes
from iris_pg.launches import launches
from iris_pg.mail import Mail
from iris_pg.mailbox import area_bytes as mail_bytes
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.options import Options
from iris_pg.planner import engine_for
from iris_pg.platforms.atomics import atomics
from iris_pg.program import Program, Ref
from iris_pg.work import IrisWork

_RING_BYTES = 4 << 20
_CACHE_BYTES = 32 << 20  # of encoded programs
_TAGS = 4096  # most tags that are kept
_LONGEST = DESCRIPTION_BYTES - 16  # most characters of a text that peers read
_LOST, _OTHER, _LATE = 1, 2, 3  # why a rank gave up, in its peers' failure words

Key = tuple[Any, ...]
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
        self.engine, self.reason = engine_for(options.engine, "cpu")
        areas = dict(scratch=8 * (self.world + 1), mail=mail_bytes(self.chunk_bytes, self.world))
        if self.engine == "cu":
            areas |= area_bytes(self.world, self.chunk_bytes)
        else:
            areas |= dict(staging=SLOTS * self.chunk_bytes, pairs=SLOTS * self.world * self.pair_bytes)
        self.heap = SymmetricHeap(links, options.heap_bytes, areas)
        self.tensors = tensors or self.heap
        self.failure: BaseException | None = None
        self._is_fork = False
        self._lock = threading.RLock()  # operations are numbered and submitted in one order
        self._sequence = 0
        self._digest = 0  # of all operations so far
        self._tags: dict[Key, int] = {}
        self._culprit: int | None = None  # the rank that is gone, if that is why the group failed
        self._in_flight: deque[tuple[int, int, Key]] = deque()  # (end index, sequence number, key)
        self._programs: OrderedDict[tuple[Key, Any, int], list[Batch]] = OrderedDict()
        self._programs_bytes = 0
        self._barriers = 0
        ops = atomics()
        self._load64, self._store64, self._load32 = ops.load64, ops.store64, ops.load32
        self._page = self.heap.control
        self._sequence_at = self.heap.base + self._page.sequence
        told = (self._check_open, self._check_failed, self._give_up)
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
                self._check_peer,
                self._late,
                self._give_up,
                name,
            )
        else:
            hostile = None if options.hostile_seed is None else random.Random(f"{options.hostile_seed}/{self.rank}")
            patience = Patience(timeout_s, self.world, self._check, self._describe)
            self.queue = Queue(
                Ring(_RING_BYTES, f"{links.group}/{self.rank}"), patience, hostile, on_fault=self._give_up
            )
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
        completion = work.completion if work else None
        with self._lock:
            self._check_open()
            self._sequence = sequence = self._sequence + 1
            self._note(sequence, key)
            if key == BARRIER:
                local, self._barriers = self._barriers % 2, self._barriers + 1
            in_flight, done = self._in_flight, self._done
            while in_flight and in_flight[0][0] <= done:
                in_flight.popleft()
            queue, thread = self.queue, self._thread  # close() takes them away
            if self._kernels:
                in_flight.append((self._kernels.submitted + 1, sequence, key))
                job = self._kernels.submit(self._launches(flow(key, local), names, addresses), completion)
            else:
                assert queue
                slot = sequence % SLOTS
                batches = self._programs.get((key, local, slot))
                if batches is None:
                    batches = self._encode(key, local, slot, flow, program, names)
                in_flight.append((1 << 63, sequence, key))
                end = queue.submit(batches, addresses, completion)
                in_flight[-1] = (end, sequence, key)
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
        if work is None:
            try:
                self._compare(sequence, BARRIER)
            except MismatchError as error:
                self._give_up(error)
                raise

    def drive_work(self, work: IrisWork) -> None:
        """Help to execute ``work`` in this thread."""
        if self._is_fork and self.failure:
            raise self.failure
        if queue := self.queue:
            queue.drive(work.end)
        elif kernels := self._kernels:
            kernels.help(work.is_completed)

    @property
    def _done(self) -> int:
        engine = self.queue or self._kernels
        return 0 if engine is None else engine.done if isinstance(engine, Queue) else engine.completed

    @property
    def sequence(self) -> int:
        """Number of operations begun."""
        return self._sequence

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of later waits."""
        self.mail.timeout_s = timeout_s
        if self.queue:
            self.queue.patience.timeout_s = timeout_s
        if self._kernels:
            self._kernels.timeout_s = timeout_s

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
            self._page,
            tag=_tag(key),
            chunk_bytes=self.chunk_bytes,
            pair_bytes=self.pair_bytes,
            first_slot=slot,
        )
        bindings = {name: number for number, name in enumerate(names)}
        made = program(setting, local) if program else build(setting, flow(key, local))
        assert self.queue
        batches = encode(made, self._address, bindings, self.queue.ring.largest_batch)
        self._programs[key, local, slot] = batches
        self._programs_bytes += sum(len(b.packets) for b in batches)
        while self._programs_bytes > _CACHE_BYTES and len(self._programs) > 1:
            _, old = self._programs.popitem(last=False)
            self._programs_bytes -= sum(len(b.packets) for b in old)
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

    # When a wait takes long -------------------------------------------------------------------------------------------

    def _current(self) -> tuple[int, Key]:
        for end, sequence, key in list(self._in_flight):
            if end > self._done:
                return sequence, key
        return self._sequence, ("nothing",)

    def _describe(self, address: int) -> str:
        flag = self._page.name(address - self.heap.base)
        return self._late(flag[1] if flag else None) + f"; {flag[0] if flag else f'flag at {address:#x}'}"

    def _late(self, writer: int | None) -> str:
        """Return that the current operation is late, and who keeps it waiting, in words."""
        sequence, key = self._current()
        return f"{_text(key)}: Timed out waiting{self._absent(writer)} {self._where(sequence, key)}"

    def _absent(self, writer: int | None) -> str:
        sequence, _ = self._current()
        late = [p for p in range(self.world) if p != self.rank and self._begun(p) < sequence]
        slow = f"; waiting for rank {writer}" if writer is not None and not late else ""
        return "".join(f"; rank {p} has not begun it (its last is seq {self._begun(p)})" for p in late) + slow

    def _begun(self, peer: int) -> int:
        return self._load64(self.heap.bases[peer] + self._page.sequence)

    def _note(self, sequence: int, key: Key) -> None:
        """Tell the peers that this rank begins operation ``sequence``, and what it was asked for so far."""
        tag = self._tags.get(key)
        if tag is None:
            if len(self._tags) >= _TAGS:
                self._tags.clear()
            tag = self._tags[key] = _tag(key)
        self._digest = digest = (self._digest * 0x9E3779B1 + tag) & 0xFFFFFFFF  # so that the order counts
        at = self.heap.base + self._page.history + 8 * (sequence % HISTORY)
        self._store64(at, (sequence & 0xFFFFFFFF) << 32 | digest)
        self._store64(self._sequence_at, sequence)

    def _noted(self, peer: int, sequence: int) -> int | None:
        """Return a digest of what ``peer`` was asked for up to operation ``sequence``, if it still tells."""
        word = self._load64(self.heap.bases[peer] + self._page.history + 8 * (sequence % HISTORY))
        return word & 0xFFFFFFFF if word >> 32 == sequence & 0xFFFFFFFF else None

    def _compare(self, sequence: int, key: Key) -> None:
        """Raise when a peer's operations up to ``sequence`` were not those of this rank."""
        for peer in range(self.world):
            last = min(sequence, self._begun(peer))  # that both have begun
            mine, theirs = self._noted(self.rank, last), self._noted(peer, last)
            if last and None not in (mine, theirs) and mine != theirs:
                said = self._said(peer)
                other = said[1] if said and said[0] == sequence else "another"
                if said and said[1] == _text(key):
                    other = "the same, but in different ones before"
                raise MismatchError(
                    f"ranks are in different operations: rank {self.rank} in {_text(key)}, rank {peer} in {other}; "
                    "every rank calls the same operations with the same sizes and dtypes in the same order "
                    f"{self._where(sequence, key)}"
                )

    def _check(self, address: int, expected: int, seen: int) -> None:
        """Raise when the flag at ``address`` will never hold what is waited for."""
        flag = self._page.name(address - self.heap.base)
        writer = flag[1] if flag else self.rank
        self._check_peer(writer, lambda: self._load32(address) == expected)
        if seen not in (0, expected):
            sequence, key = self._current()
            raise MismatchError(
                f"ranks are in different operations: rank {self.rank} is in {_text(key)} and rank {writer} in another, "
                "or with "
                f"other sizes or dtypes {self._where(sequence, key)}"
            )

    def _check_peer(self, writer: int, arrived: Callable[[], bool] = lambda: False) -> None:
        """Raise when waiting for ``writer`` is in vain. ``arrived``: whether it had done its part before it went."""
        if self.failure:
            raise self.failure
        sequence, key = self._current()
        self._say(sequence, key)
        self._check_failed(_text(key), self._where(sequence, key), lambda: self._absent(writer))
        if writer in self.links.lost() and not arrived():
            self._culprit = writer
            raise PeerLostError(
                f"{_text(key)}: rank {writer} has died, or has left the group, before its part was done "
                f"{self._where(sequence, key)}"
            )
        self._compare(sequence, key)

    def _check_failed(self, what: str, where_: str, absent: Callable[[], str] = str) -> None:
        """Raise when the group has failed here, or a peer says that it has; the error begins with ``what``."""
        if self.failure:
            raise self.failure
        for peer in range(self.world):
            word = self._load64(self.heap.base + self._page.failure(peer))
            if word:
                code, rank = word >> 32, (word & 0xFFFFFFFF) - 1
                why = {
                    _LOST: f"rank {rank} is gone",
                    _OTHER: "ranks are in different operations",
                    _LATE: f"it Timed out waiting{absent()}",
                }
                kind = {_LOST: PeerLostError, _OTHER: MismatchError, _LATE: DeadlineError}[code]
                self._culprit = rank
                raise kind(f"{what}: {why[code]}, says rank {peer} {where_}")

    def _say(self, sequence: int, key: Key) -> None:
        text = _text(key).encode("ascii", errors="replace")
        at = self._page.description
        view = self.heap.bytes_at(self.rank, at, DESCRIPTION_BYTES).numpy()
        if self._load64(self.heap.base + at) == sequence:
            return
        self._store64(self.heap.base + at, 0)
        self._store64(self.heap.base + at + 8, len(text))
        view[16 : 16 + len(text)] = memoryview(text)
        self._store64(self.heap.base + at, sequence)

    def _said(self, peer: int) -> tuple[int, str] | None:
        at = self._page.description
        sequence = self._load64(self.heap.bases[peer] + at)
        if peer == self.rank or not sequence:
            return None
        n = min(self._load64(self.heap.bases[peer] + at + 8), DESCRIPTION_BYTES - 16)
        text = self.heap.bytes_at(peer, at + 16, DESCRIPTION_BYTES - 16).numpy()[:n].tobytes().decode(errors="replace")
        return (sequence, text) if self._load64(self.heap.bases[peer] + at) == sequence else None

    def _give_up(self, error: BaseException, culprit: int | None = None) -> None:
        """Remember the first failure and tell the peers, so that they need not wait for this rank."""
        if self.failure is None and not isinstance(error, ClosedError):
            self.failure = error
            self._culprit = self._culprit if culprit is None else culprit
            code = _LOST if isinstance(error, PeerLostError) else _OTHER if isinstance(error, MismatchError) else _LATE
            word = (code << 32) | ((self.rank if self._culprit is None else self._culprit) + 1)
            if not self.links.closed:
                for peer in range(self.world):
                    if peer != self.rank:
                        self._store64(self.heap.bases[peer] + self._page.failure(self.rank), word)

    def _check_open(self) -> None:
        if self.failure:
            raise self._failed_before()

    def _failed_before(self) -> IrisError:
        return ClosedError(
            f"the group has failed before and cannot be used; destroy it and make a new one. It failed with: "
            f"{self.failure} "
            f"{where(group=self.links.group, rank=self.rank)}"
        )

    def _where(self, sequence: int, key: Key) -> str:
        return where(group=self.links.group, rank=self.rank, op=key[0], seq=sequence)

    def explain(self) -> str:
        """Return what was chosen for CPU tensors, and why, in words."""
        return "\n".join(
            (
                f"group {self.links.group}: rank {self.rank} of {self.world}, CPU tensors",
                f"  engine    {self.engine} ({self.reason})",
                f"  heap      {self.heap.limit_bytes} bytes a rank for tensors; outputs in it are written by peers "
                "directly (zero copy)",
                f"  elsewhere through staging slots of {self.chunk_bytes} bytes",
                f"  {self.mail.explain()}",
            )
        )

    def close(self, why: str = "closed") -> None:
        """Stop the engine's thread and drop the heap; pending operations end with ClosedError. Idempotent."""
        if self.failure is None:
            self.failure = ClosedError(f"the group was closed ({why}) {where(group=self.links.group, rank=self.rank)}")
        if not self._is_fork:
            # Whoever waits at a poll sees the failure and leaves, also the lock. What it protects may go then.
            if self.queue and self._thread:
                self.queue.close(self.failure)
                self._thread.close()
            if self._kernels:
                self._kernels.fail(self.failure)
                self._kernels.close()
            self.mail.close(self.failure)
        locked = self._lock.acquire(timeout=10)  # a callback may close the group, while another thread waits for it
        self.queue = self._thread = None  # and with them their ring, though torch may keep the group for long
        self.heap.close()
        if locked:
            self._lock.release()

    def _forget(self) -> None:
        """In a forked child, which shares the segments and the ring with its parent: touch neither, wait for none."""
        self._is_fork = True
        self._lock = threading.RLock()  # whoever held it lives in the parent
        self.failure = ClosedError(
            "this process is a fork of the one that created the group, and cannot use it; make a group of its own "
            f"{where(group=self.links.group, rank=self.rank)}"
        )
        self.mail.forget(self.failure)


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


def _tag(key: Key) -> int:
    return zlib.crc32(repr(key).encode()) | 2  # never 0 (empty) and never 1 (a credit)


def _text(key: Key) -> str:
    """Return the key of an operation in words."""
    parts = (" ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in key if part is not None)
    text = " ".join(parts)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
