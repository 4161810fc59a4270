"""Messages between two ranks of a group: send, recv and recv from any rank, for CPU tensors.

Guaranteed, as by MPI: messages of one rank to another with the same tag are received in the order in which they were
sent; different tags match independently; receives may be begun before or after the sends; a message of 0 bytes is a
message. A message goes to the first receive that matches, and a receive takes the first message that matches. Sizes
must match to the byte; dtypes need not, they are only told in errors. A message of another size ends its receive with
an error and is dropped; nothing else is harmed.

A send is done when all its bytes are in the receiver's slots (mailbox.py), so a message that fits one slot does not
wait for its receive. When a receive may be for what lies behind other messages, or a peer has filled all its slots with
small ones, those move to memory of this process until they are received. A larger message waits in its sender.

The host matches messages, in groups of both engines; the bytes are always moved by a software copy engine, in a queue
of its own, so messages and collectives do not wait for each other. Whoever waits for a message makes all of them
progress. A thread does so when nobody waits; it is started by the first operation that is not done at once, and sleeps
when none is left.

Callers must not assume that a send which is done was received, nor that messages to different ranks stay in order.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from iris_pg.copy_engine import packets
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.translate import Batch
from iris_pg.errors import ArgumentError, DeadlineError, MismatchError, PeerLostError, where
from iris_pg.flags import CREDIT, MAIL_SLOTS
from iris_pg.mailbox import Arrival, Header, MailWork, Peer, slot_bytes
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.cpu import usable_cores

_RING_BYTES = 16 << 10  # of packets; a batch has at most MAIL_SLOTS parts of 3 or 4 packets
_LARGEST_TAG = (1 << 31) - 1  # torch's tags are C ints
_KEPT_BYTES = 64 << 20  # most bytes of messages that are kept only to let their senders go on

# How a wait goes on, in seconds: it spins, yields, then sleeps, as in copy_engine/patience.py.
_SPIN_S, _YIELD_S, _SLEEP_S = 100e-6, 2e-3, 500e-6
_TURNS = 400  # looks at a flag a spin, about 1 us
_LOOK_S = 2e-3  # between two looks at deadlines, and at peers that nothing here waits for
# The thread's pauses in seconds: the shortest and the longest; the longest from which nobody need wake it, also taken
# while others make progress; and how long it takes those after the last operation has ended.
_NAP_S, _LONGEST_NAP_S, _LIGHT_NAP_S, _LINGER_S = 20e-6, 5e-3, 1e-3, 20e-3


class Mail:
    """The messages of one rank of a group.

    Args:
        heap: its area "mail", of :func:`iris_pg.mailbox.area_bytes`, holds the slots.
        chunk_bytes: see ``IRIS_PG_CHUNK_BYTES``; slots are as large, or smaller.
        timeout_s: how long a wait may last: for a send since bytes last left for its receiver, for a receive since its
            own bytes last arrived. A work that nobody waits for, nor for its future, has no deadline.
        check_open: raises when the group takes no new operation.
        check: given an operation in words and what is known of it, raises when the group has failed, here or elsewhere.
        give_up: told what failed the group, and the rank that is gone if that is why.
        hostile_seed: see ``IRIS_PG_HOSTILE_SEED``.
    """

    def __init__(
        self,
        heap: SymmetricHeap,
        chunk_bytes: int,
        timeout_s: float,
        check_open: Callable[[], None],
        check: Callable[[str, str], None],
        give_up: Callable[[BaseException, int | None], None],
        hostile_seed: int | None = None,
    ) -> None:
        self.rank, self.world, self.timeout_s = heap.rank, heap.world, timeout_s
        self.slot_bytes = slot_bytes(chunk_bytes, heap.world)
        self._links, self._check_open, self._check, self._give_up = heap.links, check_open, check, give_up
        hostile = None if hostile_seed is None else random.Random(f"{hostile_seed}/{heap.rank}/mail")
        ring = Ring(_RING_BYTES, f"{self._links.group}/{heap.rank}/mail")
        self._queue: Queue | None = Queue(ring, Patience(timeout_s, heap.world), hostile)
        self._peers = {p: Peer(heap, p, self.slot_bytes) for p in range(heap.world) if p != heap.rank}
        self._order = deque(self._peers.values())  # the first is looked at first
        self._receives: list[MailWork] = []  # from any rank, without a message yet, in the order of calls
        self._batch: list[MailWork] = []  # those that end when the packets being executed have been
        self._numbers = itertools.count()
        self._kept = 0  # bytes of unexpected messages
        self._pending = 0  # operations that have not ended
        self._ended: deque[tuple[MailWork, BaseException | None]] = deque()  # to be told so
        self._fault: BaseException | None = None
        self._looked = 0.0  # time.monotonic() of the last look
        self._waiting = 0  # threads in wait()
        self._lock = threading.Lock()  # of everything above; never held while waiting for a peer
        self._spin_s = _SPIN_S if heap.world <= usable_cores() else 0.0
        self._spin = atomics().spin32
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_napping = self._stop = self._is_fork = False

    # Operations -------------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MailWork:
        """Begin to send contiguous ``tensor`` [any shape] to rank ``dst``; it may be written again when the work is
        done.

        Raises:
            ArgumentError: a tag out of range, or a message to this rank itself. ClosedError: the group has failed.
        """
        self._check_arguments("send", "to", dst, tag)
        work = MailWork("send", dst, tag, tensor, self.wait)
        with self._lock:
            self._begin(work)
            peer = self._peers[dst]
            peer.sends.append(work)
            if len(peer.sends) == 1:
                self._guarded(self._fill, peer)
        return self._begun(work)

    def recv(
        self, tensor: torch.Tensor, src: int | None, tag: int, after: Callable[[], None] | None = None
    ) -> MailWork:
        """Begin to receive a message from rank ``src``, or from any rank, into contiguous ``tensor`` [any shape].

        ``after`` runs when the message has arrived, before anyone is told.

        Raises:
            ArgumentError: a tag out of range, or this rank itself. ClosedError: the group has failed.
        """
        self._check_arguments("recv", "from", src, tag)
        work = MailWork("recv", src, tag, tensor, self.wait)
        assert work.completion
        work.completion.after = after
        with self._lock:
            self._begin(work)
            if arrival := self._find(work):
                self._guarded(self._attach, work, arrival)
            else:
                (self._receives if src is None else self._peers[src].receives).append(work)
                for peer in list(self._order) if src is None else (self._peers[src],):
                    if work.source is None or src is not None:
                        self._guarded(self._empty, peer)
        return self._begun(work)

    def _check_arguments(self, op: str, direction: str, peer: int | None, tag: int) -> None:
        self._check_open()
        if not 0 <= tag <= _LARGEST_TAG:
            raise ArgumentError(f"{op}: tag={tag}; it takes 0..{_LARGEST_TAG}{self._where(op)}")
        if peer == self.rank or self.world == 1:
            raise ArgumentError(
                f"{op}: a message {direction} this rank itself, {self.rank}; messages are between two ranks; copy the "
                f"tensor (tensor.copy_) instead{self._where(op)}"
            )

    def _begin(self, work: MailWork) -> None:
        if self._fault:
            raise self._fault
        work.number = next(self._numbers)
        self._pending += 1

    def _begun(self, work: MailWork) -> MailWork:
        self._tell()
        if not work.is_completed():
            if self._thread is None:
                self._start()
            elif self._is_napping:
                self._wake.set()
        return work

    # Progress; all of this under the lock -----------------------------------------------------------------------------

    def _progress(self, everyone: bool) -> bool:
        """Move what can be moved now; return whether anything was. ``everyone``: look at peers that no operation here
        waits for, too, since they may wait for room.
        """
        moved = False
        self._order.rotate(1)
        for peer in list(self._order):
            if peer.sends:
                moved |= self._guarded(self._fill, peer)
            if everyone or peer.receives or peer.arriving or self._receives:
                moved |= self._guarded(self._empty, peer)
        return moved

    def _guarded(self, step: Callable[..., bool], *arguments: Any) -> bool:
        """Take a step. When something goes wrong in it slots are left half filled, so everything has failed then."""
        if self._fault:
            return False
        try:
            return step(*arguments)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True

    def _fill(self, peer: Peer) -> bool:
        """Put as many parts into slots as have room."""
        made, left = peer.fill()
        if made:
            self._execute(made, left)
            peer.sent_at = time.monotonic()
        return bool(made)

    def _empty(self, peer: Peer) -> bool:
        """Take as many parts from slots as are there and wanted."""
        made, whole = peer.empty(self._match)
        if made:
            self._execute(made, [a.receive for a in whole if a.receive and a.buffer is None])
            for arrival in whole:
                if arrival.receive and arrival.buffer is not None:
                    self._deliver(peer, arrival, arrival.receive)
        return bool(made)

    def _execute(self, made: list[bytes], ending: list[MailWork]) -> None:
        """Execute packets, then end the operations whose last they were."""
        assert self._queue
        self._batch = ending
        self._queue.drive(self._queue.submit([Batch(bytearray().join(made))]))
        self._batch = []
        for work in ending:
            self._end(work)

    def _match(self, peer: Peer, header: Header, is_first: bool) -> Arrival | None:
        """Return where a message that begins goes, or None when it stays in its slot. See :meth:`Peer.empty`."""
        number = next(self._numbers)
        both = (peer.receives, self._receives)
        found = [work for works in both if (work := next((w for w in works if w.tag == header.tag), None))]
        if found:
            work = min(found, key=lambda w: w.number)
            (self._receives if work.peer is None else peer.receives).remove(work)
            work.source = peer.rank
            if work.nbytes == header.nbytes:
                return Arrival(header, number, work)
            self._refuse(work, header)
            return Arrival(header, number)  # to nowhere
        may_hide = peer.receives or self._receives  # one of them may be for what lies behind
        if not may_hide:
            # No slot is being emptied, so the flags say what they hold.
            is_stuck = is_first and header.nbytes <= self.slot_bytes and peer.inbox.is_full
            if not is_stuck or self._kept + header.nbytes > _KEPT_BYTES:
                return None
        arrival = Arrival(header, number)
        arrival.keep()
        self._kept += header.nbytes
        peer.unexpected.append(arrival)
        return arrival

    def _find(self, work: MailWork) -> Arrival | None:
        """Return the first unexpected message for a receive."""
        peers = self._peers.values() if work.peer is None else (self._peers[work.peer],)
        found = [(a.number, p, a) for p in peers for a in p.unexpected if a.header.tag == work.tag and not a.receive]
        if not found:
            return None
        _, peer, arrival = min(found, key=lambda f: f[0])
        work.source = peer.rank
        return arrival

    def _attach(self, work: MailWork, arrival: Arrival) -> bool:
        """Give a receive the unexpected message that was found for it."""
        assert work.source is not None
        peer = self._peers[work.source]
        if work.nbytes != arrival.header.nbytes:
            self._release(peer, arrival)  # what has not arrived of it yet still goes to its buffer
            self._refuse(work, arrival.header)
        elif arrival.is_whole:
            self._deliver(peer, arrival, work)
        else:
            arrival.receive, work.moved = work, arrival.moved
        return True

    def _deliver(self, peer: Peer, arrival: Arrival, work: MailWork) -> None:
        """Give a receive the bytes of its message, which were kept, and end it."""
        assert arrival.buffer is not None
        self._release(peer, arrival)
        if work.nbytes:
            copy = packets.copy_linear_split(dst=work.address, src=arrival.buffer.data_ptr(), nbytes=work.nbytes)
            self._execute(copy, [work])
        else:
            self._end(work)

    def _release(self, peer: Peer, arrival: Arrival) -> None:
        peer.unexpected.remove(arrival)
        self._kept -= arrival.header.nbytes

    def _refuse(self, work: MailWork, header: Header) -> None:
        theirs = header.dtype.rstrip(b"\0").decode(errors="replace")
        error = MismatchError(
            f"{work.words()}: the message of rank {work.source} has {header.nbytes} bytes ({theirs}) and the tensor "
            f"here {work.nbytes} bytes ({work.dtype.decode()}); both must have the same number of bytes; the message "
            f"was dropped, others are not affected{self._where(work.op)}"
        )
        self._end(work, error)

    def _end(self, work: MailWork, error: BaseException | None = None) -> None:
        self._pending -= 1
        self._ended.append((work, error))

    def _works(self) -> Iterator[MailWork]:
        """Yield every operation that has not ended."""
        yield from self._batch
        yield from self._receives
        for peer in self._peers.values():
            yield from peer.works()

    def _fail(self, error: BaseException, culprit: int | None = None) -> None:
        """End all operations with ``error``, and the group. The slots are not touched again."""
        if self._fault is None:
            self._fault = error
            self._give_up(error, culprit)
            for work in list(self._works()):
                self._end(work, error)
            self._batch, self._receives, self._kept = [], [], 0
            self._order.clear()
            self._peers = {}  # with their views of the heap

    # Waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, work: MailWork, timeout_s: float) -> None:
        """Make progress here until ``work`` has ended, for at most ``timeout_s`` seconds; 0 leaves it to the deadline.

        Raises:
            DeadlineError: ``timeout_s`` has passed; the message may still come. (The deadline ends the work instead.)
        """
        start = last = time.monotonic()
        work.since = work.since or start
        self._count_waiting(1)
        try:
            while not work.is_completed():
                moved = self._turn(work)
                now = time.monotonic()
                waited = now - last
                if moved:
                    last = now
                elif timeout_s and now - start > timeout_s and not work.is_completed():
                    raise DeadlineError(
                        f"{work.words()} was not done within the {timeout_s} s given to wait(){self._where(work.op)}"
                    )
                elif waited > _YIELD_S:
                    time.sleep(min(waited / 20, _SLEEP_S))
                elif waited > self._spin_s:
                    os.sched_yield()
        finally:
            self._count_waiting(-1)

    def _count_waiting(self, more: int) -> None:
        with self._lock:
            self._waiting += more

    def _turn(self, work: MailWork) -> bool:
        """Make progress for a thread that waits; return whether there was any."""
        if not self._lock.acquire(blocking=False):
            return work.ended_within(_LIGHT_NAP_S)  # another thread makes progress, for this operation too
        try:
            if self._fault:
                if self._is_fork:
                    raise self._fault
                return False  # another thread is about to tell
            moved = self._progress(everyone=work.op == "send")
            if not moved:
                if time.monotonic() - self._looked > _LOOK_S:
                    moved = self._progress(everyone=True)
                    self._look(time.monotonic())
                elif at := self._flag(work):
                    moved = self._spin(at, 0xFFFFFFFF, CREDIT, 0, _TURNS) > 0
            return moved
        finally:
            self._lock.release()
            self._tell()

    def _flag(self, work: MailWork) -> int | None:
        """Return the address of the flag that an operation waits for, if it is a single one."""
        rank = work.peer if work.source is None else work.source
        if rank is None:
            return None
        return self._peers[rank].outbox.room_at if work.op == "send" else self._peers[rank].inbox.filled_at

    def _tell(self) -> None:
        """Tell the works that have ended. Not under the lock: a future's callback may send the next message."""
        while self._ended:
            try:
                work, error = self._ended.popleft()
            except IndexError:
                return  # another thread was faster
            work.finished(error)

    # The thread that makes progress when nobody waits -----------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop:
                name = f"iris_pg {self._links.group} mail"
                self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        quiet_since = time.monotonic()
        while not self._stop:
            quiet = time.monotonic() - quiet_since
            nap: float | None = _LIGHT_NAP_S
            if self._pending and not self._waiting:
                if self._step():
                    quiet_since = time.monotonic()
                    continue
                nap = min(max(quiet / 20, _NAP_S), _LONGEST_NAP_S)
            elif not self._pending and quiet > _LINGER_S:
                nap = None
            # Who begins an operation counts it, then looks whether this thread naps, and wakes it. This thread says
            # that it naps, then looks at the count. So one of the two sees the other.
            self._is_napping = nap is None or nap > _LIGHT_NAP_S
            if (nap is not None or not (self._pending or self._stop)) and self._wake.wait(nap):
                self._wake.clear()
                quiet_since = time.monotonic()
            self._is_napping = False

    def _step(self) -> bool:
        """Make progress for the thread; return whether there was any."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._fault:
                return False
            moved = self._progress(everyone=True)
            if not moved and time.monotonic() - self._looked > _LOOK_S:
                self._look(time.monotonic())
            return moved
        finally:
            self._lock.release()
            self._tell()

    def close(self, error: BaseException) -> None:
        """End all operations with ``error`` and stop the thread; the heap may go then. Idempotent."""
        with self._lock:
            self._fail(error)
            self._queue = None  # and with it its ring, though torch may keep the group for long
        self._stop = True
        self._wake.set()
        self._tell()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def forget(self, error: BaseException) -> None:
        """In a forked child: let go of what is shared with the parent; every wait ends with ``error``."""
        self._is_fork, self._fault = True, error
        self._lock = threading.Lock()  # whoever held it lives in the parent
        self._thread = None

    # When a wait takes long -------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """End operations whose peer is gone; end all when the group has failed, or one was waited for too long."""
        self._looked = now
        first = min(self._works(), key=lambda w: (w.since is None, w.number), default=None)
        if first is None or self._fault:
            return
        try:
            what = f"{first.words()}, when another operation failed"
            self._check(what, where(group=self._links.group, rank=self.rank, op=first.op))
        except BaseException as error:
            return self._fail(error)
        lost = self._links.lost()
        while lost and self._progress(everyone=False):
            pass  # what they sent before they went is there
        for work in list(self._works()) if lost else []:
            rank = work.peer if work.source is None else work.source
            if rank is None and len(lost) == self.world - 1:
                rank = lost[0]
            if rank in lost and not self._fault:
                self._lose(work, rank)
        for work in self._works():
            moved_at = self._peers[work.peer].sent_at if work.op == "send" and work.peer is not None else work.moved_at
            if work.since is not None and now - max(work.since, moved_at) > self.timeout_s:
                return self._fail(DeadlineError(self._late(work, lost)))

    def _lose(self, work: MailWork, rank: int) -> None:
        """End an operation that ``rank`` will not do its part of. Nothing else ends if nobody waits for it."""
        before = f"more than {work.moved} of {work.nbytes} bytes had moved" if work.moved else "its part was done"
        error = PeerLostError(
            f"{work.words()}: rank {rank} has died, or has left the group, before {before}{self._where(work.op)}"
        )
        if work.since is not None:
            return self._fail(error, rank)
        self._peers[rank].forget(work)
        if work in self._receives:
            self._receives.remove(work)
        self._end(work, error)

    def _late(self, work: MailWork, lost: list[int]) -> str:
        """Return that an operation is late, and who keeps it waiting, in words."""
        rank = work.peer if work.source is None else work.source
        peers = self._peers.values() if rank is None else [self._peers[rank]]
        if work.op == "send":
            ahead = [w for p in peers for w in p.sends if w.number < work.number]
            first = f" of tag {ahead[0].tag}, which is before it in line" if ahead else ""
            head = ahead[0] if ahead else work
            who = f"rank {rank} has taken {head.moved} of {head.nbytes} bytes{first}; it has to receive them"
        else:
            who = "no rank has sent a" if rank is None else f"rank {rank} has sent no"
            who += " message with that tag"
            if work.moved_at:
                who = f"rank {rank} has sent {work.moved} of {work.nbytes} bytes"
            if tags := sorted({a.header.tag for p in peers for a in p.unexpected if not a.receive}):
                who += f"; there are messages with tags {', '.join(map(str, tags))}, which no recv was called for"
        gone = "".join(f"; rank {r} is gone" for r in lost)
        return f"{work.words()}: Timed out waiting: {who}{gone}{self._where(work.op)}"

    def _where(self, op: str) -> str:
        return " " + where(group=self._links.group, rank=self.rank, op=op)

    def explain(self) -> str:
        """Return how messages move, in words."""
        return (
            f"messages  send and recv are matched by the host, in groups of both engines, and moved by a software copy "
            f"engine, through {MAIL_SLOTS} slots of {self.slot_bytes} bytes for each pair of ranks"
        )
