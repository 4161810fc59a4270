"""Messages between two ranks of a group: send, recv and recv from any rank, for CPU tensors.

Guaranteed, as by MPI: messages of one rank to another with the same tag are received in the order in which they were
sent; different tags match independently; receives may be begun before or after the sends; a message of 0 bytes is a
message. A receive takes the first message that matches, and a message the first receive. Sizes must match to the byte;
dtypes need not, they are only told in messages. A message of another size ends its receive with an error and is
dropped; nothing else is harmed.

A send is done when all its bytes are in the receiver's slots (mailbox.py), so a message that fits one slot does not
wait for its receive. When a receive needs what lies behind other messages, or a peer has filled all its slots with
small ones, those move to memory of this process until they are received. A larger message waits in its sender.

The host matches messages, in both engines; the bytes are always moved by a software copy engine, in a queue of its own,
so messages and collectives do not wait for each other. Whoever waits for a message makes all of them progress. A thread
does so when nobody waits; it is started by the first operation that is not done at once, and sleeps when none is left.

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
from iris_pg.mailbox import Header, Inbox, Outbox, slot_bytes
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.cpu import usable_cores
from iris_pg.work import IrisWork

_RING_BYTES = 16 << 10  # of packets; a batch has at most MAIL_SLOTS parts of 3 or 4 packets
_LARGEST_TAG = (1 << 31) - 1  # torch's tags are C ints
_KEPT_BYTES = 64 << 20  # most bytes of messages that are kept only to let their senders go on

# How a wait goes on, in seconds: it spins, yields, then sleeps. See copy_engine/patience.py.
_SPIN_S, _YIELD_S, _SLEEP_S, _LOOK_S = 100e-6, 2e-3, 500e-6, 2e-3
_TURNS = 400  # looks at a flag a spin, about 1 us
# The thread's pauses in seconds: the shortest, the longest, those from which it has to be woken, and how long it looks
# for more after the last operation has ended.
_NAP_S, _LONGEST_NAP_S, _LIGHT_NAP_S, _LINGER_S = 20e-6, 5e-3, 1e-3, 20e-3

_WORD = 0xFFFFFFFF

_dtypes: dict[torch.dtype, bytes] = {}  # in words


def _in_words(dtype: torch.dtype) -> bytes:
    words = _dtypes[dtype] = str(dtype).removeprefix("torch.").encode()[:32]
    return words


class MailWork(IrisWork):
    """One message being sent or received.

    Attributes:
        peer: the other rank; None while any will do.
        tag: of the message.
        nbytes: size of the tensor.
        address: where its bytes lie, in a row.
        source: the rank that a received message came from.
        since: ``time.monotonic()`` at which someone began to wait for it; its deadline counts from then.
    """

    def __init__(self, mail: Mail, op: str, peer: int | None, tag: int, tensor: torch.Tensor) -> None:
        super().__init__([tensor], drive=mail.wait)
        self._mail, self.op, self.peer, self.tag = mail, op, peer, tag
        self.keep = tensor
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.dtype = _dtypes.get(tensor.dtype) or _in_words(tensor.dtype)
        self.source = peer if op == "recv" else None
        self.number = 0  # in the order of calls
        self.moved = 0  # bytes
        self.moved_at = 0.0  # time.monotonic() when bytes moved last
        self.since: float | None = None

    def _await(self, timeout_s: float) -> None:
        self._mail.wait(self, timeout_s)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list that holds the tensor."""
        self.since = self.since or time.monotonic()
        return super().get_future()

    def source_rank(self) -> int:
        """Return the rank in the group that the message came from, when it has arrived.

        Raises:
            ArgumentError: it is being sent, or has not arrived.
        """
        if self.source is None:
            raise ArgumentError(
                f"source_rank: {self.words()} has no source"
                + ("; ask the work of a recv" if self.op == "send" else " before a message has arrived; wait() first")
            )
        return self.source

    _source_rank = source_rank

    def ended_within(self, timeout_s: float) -> bool:
        """Return whether it has ended after waiting at most ``timeout_s`` seconds for another thread to see to it."""
        assert self._lock is not None
        with self._lock:
            if self._done:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout_s)

    def words(self) -> str:
        """Return what it is in words, for messages."""
        if self.op == "send":
            return f"send to rank {self.peer}, tag {self.tag}, {self.nbytes} bytes"
        return f"recv from {'any rank' if self.peer is None else f'rank {self.peer}'}, tag {self.tag}"


class _Arrival:
    """A message whose first part has been taken from a slot, and where its bytes go."""

    __slots__ = ("address", "buffer", "header", "moved", "number", "receive")

    def __init__(self, header: Header, number: int) -> None:
        self.header, self.number = header, number
        self.receive: MailWork | None = None
        self.buffer: torch.Tensor | None = None  # uint8 [nbytes], while no receive has been found
        self.address: int | None = None  # None drops the bytes
        self.moved = 0  # bytes


class _Peer:
    """All messages to and from one rank."""

    __slots__ = ("arriving", "inbox", "outbox", "rank", "receives", "sends", "sent_at", "unexpected")

    def __init__(self, heap: SymmetricHeap, rank: int, slot_bytes: int) -> None:
        self.rank = rank
        self.outbox, self.inbox = Outbox(heap, rank, slot_bytes), Inbox(heap, rank, slot_bytes)
        self.sends: deque[MailWork] = deque()  # in the order in which they leave
        self.sent_at = 0.0  # time.monotonic() when bytes left last
        self.receives: list[MailWork] = []  # from this rank only, in the order of calls
        self.arriving: _Arrival | None = None
        self.unexpected: list[_Arrival] = []  # in the order of sending; the last may still be arriving


class Mail:
    """The messages of one rank of a group.

    Args:
        heap: its area "mail", of :func:`iris_pg.mailbox.area_bytes`, holds the slots.
        chunk_bytes: see ``IRIS_PG_CHUNK_BYTES``; slots are as large, or smaller.
        timeout_s: deadline of every wait: for a send since bytes last left for its receiver, for a receive since its
            own bytes last arrived.
        check_open: raises when the group takes no new operation.
        check: given an operation in words and what is known of it, raises when the group has failed here or elsewhere.
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
        self._queue = Queue(ring, Patience(timeout_s, heap.world), hostile)
        self._peers = {p: _Peer(heap, p, self.slot_bytes) for p in range(heap.world) if p != heap.rank}
        self._order = deque(self._peers.values())  # the next to look at first
        self._receives: list[MailWork] = []  # from any rank, in the order of calls
        self._numbers = itertools.count()
        self._kept = 0  # bytes in unexpected messages
        self._batch: list[MailWork] = []  # those that end when the packets being executed have been
        self._pending = 0  # operations that have not ended
        self._ended: deque[tuple[MailWork, BaseException | None]] = deque()  # to be told, without the lock
        self._fault: BaseException | None = None
        self._lock = threading.Lock()  # of everything above; never held while waiting
        self._looked = 0.0
        self._spin_s = _SPIN_S if heap.world <= usable_cores() else 0.0
        self._spin = atomics().spin32
        self._waiting = 0  # threads in wait()
        self._thread: threading.Thread | None = None
        self._signal = threading.Event()
        self._is_napping = self._stop = self._is_fork = False

    # Operations -------------------------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> MailWork:
        """Begin to send contiguous ``tensor`` [any shape] to rank ``dst``; it may be written again when the work is
        done.

        Raises:
            ArgumentError: a tag out of range, or a message to this rank itself. ClosedError: the group has failed.
        """
        self._check_arguments("send", "to", dst, tag)
        work = MailWork(self, "send", dst, tag, tensor)
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
        work = MailWork(self, "recv", src, tag, tensor)
        work.after = after
        with self._lock:
            self._begin(work)
            if arrival := self._find(work):
                self._guarded(self._attach, work, arrival)
            else:
                (self._receives if src is None else self._peers[src].receives).append(work)
                for peer in self._order if src is None else (self._peers[src],):
                    if not (self._fault or work.moved_at):
                        self._guarded(self._empty, peer)
        return self._begun(work)

    def _check_arguments(self, op: str, direction: str, peer: int | None, tag: int) -> None:
        self._check_open()
        if not 0 <= tag <= _LARGEST_TAG:
            raise ArgumentError(f"{op}: tag={tag}; it takes 0..{_LARGEST_TAG}{self._where(op)}")
        if peer == self.rank or self.world == 1:
            raise ArgumentError(
                f"{op}: a message {direction} this rank itself, {self.rank}; messages are between two ranks; copy the "
                f"tensor (tensor.copy_){self._where(op)}"
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
                self._signal.set()
        return work

    # Progress; all of this under the lock -----------------------------------------------------------------------------

    def _progress(self, everyone: bool) -> bool:
        """Move what can be moved now; return whether anything was. ``everyone``: look at peers that no operation here
        waits for, too: they may be waiting for room.
        """
        moved = False
        self._order.rotate(1)
        for peer in self._order:
            if peer.sends:
                moved |= self._guarded(self._fill, peer)
            if everyone or peer.receives or peer.arriving or self._receives:
                moved |= self._guarded(self._empty, peer)
            if self._fault:
                return True
        return moved

    def _guarded(self, step: Callable[..., bool], *arguments: Any) -> bool:
        """Take a step. Slots are half filled when something goes wrong in it, so then everything has failed."""
        try:
            return step(*arguments)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True

    def _execute(self, made: list[bytes], ending: list[MailWork]) -> None:
        """Execute packets, then end the operations whose last they were."""
        self._batch = ending
        self._queue.drive(self._queue.submit([Batch(bytearray().join(made))]))
        self._batch = []
        for work in ending:
            self._end(work)

    def _fill(self, peer: _Peer) -> bool:
        """Put as many parts into slots as have room."""
        made: list[bytes] = []
        left = []
        for _ in range(MAIL_SLOTS):  # no slot twice in one batch
            if not peer.sends or not peer.outbox.has_room:
                break
            work = peer.sends[0]
            begins = None if work.moved else (work.nbytes, work.tag, work.dtype)
            n = min(self.slot_bytes, work.nbytes - work.moved)
            made.append(peer.outbox.put(work.address + work.moved, n, begins))
            work.moved += n
            if work.moved == work.nbytes:
                left.append(peer.sends.popleft())
        if made:
            self._execute(made, left)
            peer.sent_at = time.monotonic()
        return bool(made)

    def _empty(self, peer: _Peer) -> bool:
        """Take as many parts from slots as are there and wanted."""
        made: list[bytes] = []
        arrived: list[MailWork] = []  # in their tensors
        kept: list[_Arrival] = []  # in memory from which their receives are still to be given them
        for _ in range(MAIL_SLOTS):
            if not peer.inbox.is_filled:
                break
            arrival, begins = peer.arriving, peer.arriving is None
            if arrival is None:
                arrival = self._match(peer, peer.inbox.header(), alone=not made)
                if arrival is None:
                    break
            n = min(self.slot_bytes, arrival.header.nbytes - arrival.moved)
            made.append(peer.inbox.take(arrival.address and arrival.address + arrival.moved, n, begins))
            arrival.moved += n
            whole = arrival.moved == arrival.header.nbytes
            peer.arriving = None if whole else arrival
            if work := arrival.receive:
                work.moved, work.moved_at = arrival.moved, time.monotonic()
                if whole and arrival.buffer is None:
                    arrived.append(work)
                elif whole:
                    kept.append(arrival)
        if made:
            self._execute(made, arrived)
            for arrival in kept:
                self._deliver(peer, arrival)
        return bool(made)

    def _match(self, peer: _Peer, header: Header, alone: bool) -> _Arrival | None:
        """Return where the message that comes next from ``peer`` goes, or None when it stays in its slot.

        ``alone``: no part has been taken in this batch, so the flags say what the slots hold.
        """
        arrival = _Arrival(header, next(self._numbers))
        matching = [
            work
            for works in (peer.receives, self._receives)
            if (work := next((w for w in works if w.tag == header.tag), None))
        ]
        if matching:
            work = min(matching, key=lambda w: w.number)
            (self._receives if work.peer is None else peer.receives).remove(work)
            work.source = peer.rank
            if work.nbytes == header.nbytes:
                arrival.receive, arrival.address = work, work.address
            else:
                self._refuse(work, header)
            return arrival
        hides = peer.receives or self._receives  # one of them may be for a message behind this one
        crowds = alone and header.nbytes <= min(self.slot_bytes, _KEPT_BYTES - self._kept) and peer.inbox.is_full
        if not hides and not crowds:
            return None
        arrival.buffer = torch.empty(header.nbytes, dtype=torch.uint8)
        arrival.address = arrival.buffer.data_ptr()
        self._kept += header.nbytes
        peer.unexpected.append(arrival)
        return arrival

    def _find(self, work: MailWork) -> _Arrival | None:
        """Return the first unexpected message for a receive."""
        peers = self._peers.values() if work.peer is None else (self._peers[work.peer],)
        found = [(a.number, p, a) for p in peers for a in p.unexpected if a.header.tag == work.tag and not a.receive]
        if not found:
            return None
        _, peer, arrival = min(found, key=lambda f: f[0])
        work.source = peer.rank
        return arrival

    def _attach(self, work: MailWork, arrival: _Arrival) -> bool:
        """Give a receive the unexpected message that was found for it."""
        assert work.source is not None
        peer = self._peers[work.source]
        if work.nbytes != arrival.header.nbytes:
            self._release(peer, arrival)  # what has not arrived of it yet still goes to its buffer
            self._refuse(work, arrival.header)
        else:
            arrival.receive, work.moved = work, arrival.moved
            if arrival.moved == arrival.header.nbytes:
                self._deliver(peer, arrival)
        return True

    def _deliver(self, peer: _Peer, arrival: _Arrival) -> None:
        """Give a receive the bytes of its message, all of which were kept, and end it."""
        work, buffer = arrival.receive, arrival.buffer
        assert work is not None and buffer is not None
        self._release(peer, arrival)
        if work.nbytes:
            copy = packets.copy_linear_split(dst=work.address, src=buffer.data_ptr(), nbytes=work.nbytes)
            self._execute(copy, [work])
        else:
            self._end(work)

    def _release(self, peer: _Peer, arrival: _Arrival) -> None:
        peer.unexpected.remove(arrival)
        self._kept -= arrival.header.nbytes

    def _refuse(self, work: MailWork, header: Header) -> None:
        dtype = header.dtype.rstrip(b"\0").decode(errors="replace")
        self._end(
            work,
            MismatchError(
                f"{work.words()}: the message of rank {work.source} has {header.nbytes} bytes ({dtype}) and the tensor "
                f"here {work.nbytes} bytes ({work.dtype.decode()}); both must have the same number of bytes; the "
                f"message was dropped, others are not affected{self._where(work.op)}"
            ),
        )

    def _end(self, work: MailWork, error: BaseException | None = None) -> None:
        self._pending -= 1
        self._ended.append((work, error))

    def _works(self) -> Iterator[MailWork]:
        """Yield every operation that has not ended."""
        yield from self._batch
        yield from self._receives
        for peer in self._peers.values():
            yield from peer.sends
            yield from peer.receives
            yield from (a.receive for a in peer.unexpected if a.receive)
            if peer.arriving and peer.arriving.receive and peer.arriving not in peer.unexpected:
                yield peer.arriving.receive

    def _fail(self, error: BaseException, culprit: int | None = None) -> None:
        """End all operations with ``error``, and the group."""
        if self._fault:
            return
        self._fault = error
        self._give_up(error, culprit)
        for work in list(self._works()):
            self._end(work, error)
        self._drop()

    def _drop(self) -> None:
        """Forget all messages."""
        self._batch = []
        self._receives.clear()
        for peer in self._peers.values():
            peer.sends.clear()
            peer.receives.clear()
            peer.unexpected.clear()
            peer.arriving = None
        self._kept = 0

    def _tell(self) -> None:
        """Tell those whose operations have ended. Without the lock: a future's callback may send the next message."""
        while self._ended:
            try:
                work, error = self._ended.popleft()
            except IndexError:
                return
            work.finished(error)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, work: IrisWork, timeout_s: float = 0.0) -> None:
        """Make progress here until ``work`` has ended, for at most ``timeout_s`` seconds, 0 being no limit of its own.

        Raises:
            DeadlineError: ``timeout_s`` has passed. The group's own deadline ends the work instead.
        """
        assert isinstance(work, MailWork)
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
        """Make progress for a waiting thread; return whether there was any."""
        if not self._lock.acquire(blocking=False):
            return work.ended_within(_LIGHT_NAP_S)  # another thread makes progress, for this operation too
        try:
            if self._fault:
                if self._is_fork:
                    raise self._fault
                return False  # another thread is about to end it
            moved = self._progress(everyone=work.op == "send")
            if not moved and not self._ended:
                if time.monotonic() - self._looked > _LOOK_S:
                    moved = self._progress(everyone=True)
                    self._look(time.monotonic())
                elif at := self._flag(work):
                    moved = self._spin(at, _WORD, CREDIT, 0, _TURNS) > 0
        finally:
            self._lock.release()
            self._tell()
        return moved

    def _flag(self, work: MailWork) -> int | None:
        """Return the address of the flag for which an operation waits, if it is a single one."""
        if work.op == "send":
            return self._peers[work.peer].outbox.room_at if work.peer is not None else None
        return None if work.source is None else self._peers[work.source].inbox.filled_at

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
            # 1. Who begins an operation counts it, then looks whether this thread naps, and wakes it. 2. This thread
            # says that it naps, then looks at the count. So an operation is seen by one or the other.
            self._is_napping = nap is None or nap > _LIGHT_NAP_S
            if (nap is not None or not self._pending) and self._signal.wait(nap):
                self._signal.clear()
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
        finally:
            self._lock.release()
            self._tell()
        return moved

    def close(self, error: BaseException) -> None:
        """End all operations with ``error`` and stop the thread; the heap may go then. Idempotent."""
        self._stop = True
        self._signal.set()
        with self._lock:
            self._fail(error)
            self._peers = {}  # they hold views of the heap
            self._order.clear()
        self._tell()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def forget(self, error: BaseException) -> None:
        """In a forked child: touch nothing that is shared with the parent, and wait for nothing."""
        self._is_fork, self._fault = True, error
        self._lock = threading.Lock()  # whoever held it lives in the parent
        self._thread, self._waiting = None, 0

    # When a wait takes long -------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """End operations whose peer is gone; end all when the group has failed, or one was waited for too long."""
        self._looked = now
        works = sorted(self._works(), key=lambda w: (w.since is None, w.number))
        if not works or self._fault:
            return
        try:
            self._check(works[0].words(), self._where(works[0].op))
        except BaseException as error:
            self._fail(error)
            return
        lost = self._links.lost()
        while lost and self._progress(everyone=False):  # what they sent before they went is there
            if self._fault:
                return
        for work in list(self._works()) if lost else []:
            rank = work.peer if work.source is None else work.source
            if rank in lost:
                self._lose(work, rank)
            elif rank is None and len(lost) == self.world - 1:
                self._lose(work, lost[0])
        for work in self._works():
            if work.since is not None and now - max(work.since, self._moved_at(work)) > self.timeout_s:
                self._fail(DeadlineError(self._late(work, lost)))
                return

    def _moved_at(self, work: MailWork) -> float:
        return work.moved_at if work.op == "recv" or work.peer is None else self._peers[work.peer].sent_at

    def _lose(self, work: MailWork, rank: int) -> None:
        """End an operation that ``rank`` will not do its part of. The group goes on if nobody waits for it."""
        done = f"{work.moved} bytes of it were there" if work.moved else "its part was done"
        error = PeerLostError(
            f"{work.words()}: rank {rank} has died, or has left the group, before {done}{self._where(work.op)}"
        )
        if work.since is not None:
            return self._fail(error, rank)
        peer = self._peers[rank]
        arrivals = [a for a in (peer.arriving, *peer.unexpected) if a and a.receive is work]
        for arrival in arrivals:  # the rest of it will not come
            arrival.receive = arrival.address = None
        for works in (peer.sends, peer.receives, self._receives):
            if work in works:
                works.remove(work)  # type: ignore[attr-defined]
        self._end(work, error)

    def _late(self, work: MailWork, lost: list[int]) -> str:
        """Return that an operation is late, and who keeps it waiting, in words."""
        rank = work.peer if work.source is None else work.source
        if rank is None:
            tags = {t for p in self._peers.values() for t in self._other_tags(p)}
            who = "no rank has sent a message with that tag"
        elif work.op == "send":
            tags = set()
            ahead = [w for w in self._peers[rank].sends if w.number < work.number]
            who = f"rank {rank} has taken {work.moved} of {work.nbytes} bytes, and must receive them"
            if ahead:
                who = f"rank {rank} must first receive {len(ahead)} before it, the next being tag {ahead[0].tag}"
        else:
            tags = self._other_tags(self._peers[rank])
            who = f"rank {rank} has sent no message with that tag"
            if work.moved or work.moved_at:
                who = f"rank {rank} has sent {work.moved} of {work.nbytes} bytes"
        others = f"; messages with tags {sorted(tags)} wait for a recv" if tags else ""
        gone = "".join(f"; rank {r} is gone" for r in lost)
        return f"{work.words()}, was not done in time: {who}{others}{gone}{self._where(work.op)}"

    @staticmethod
    def _other_tags(peer: _Peer) -> set[int]:
        return {a.header.tag for a in peer.unexpected if not a.receive}

    def _where(self, op: str) -> str:
        return " " + where(group=self._links.group, rank=self.rank, op=op)

    def explain(self) -> str:
        """Return how messages move, in words."""
        return (
            f"messages  send and recv are matched by the host and moved by a software copy engine, in either engine's "
            f"groups, through {MAIL_SLOTS} slots of {self.slot_bytes} bytes for each pair of ranks"
        )
