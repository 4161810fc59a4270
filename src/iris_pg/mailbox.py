"""Mailboxes: the slots through which the messages of one rank reach another, and the packets that fill and empty them.

Each ordered pair of ranks has MAIL_SLOTS slots in the receiver's segment, used in turn, and two flags for each slot:
``mailed`` at the receiver and ``emptied`` at the sender. A message is one or more parts, each as large as a slot but
the last; a message of 0 bytes is one part. The first part's slot begins with a header, so parts of different messages
follow each other in the order in which the messages were sent, and a receiver learns from the slots alone what comes.

The host looks at the flags, because it has to match messages before it knows where they go; the packets made here
therefore hold no POLL_REGMEM, and a copy engine that executes them never waits::

    sender    (host saw emptied == 1)  FENCE emptied = 0   COPY header, bytes -> slot   FENCE mailed = 1 at the receiver
    receiver  (host saw mailed == 1)   FENCE mailed = 0    COPY slot -> tensor          FENCE emptied = 1 at the sender

Flags are mailboxes with one writer and one reader. ``emptied`` is not looked at before a slot has been used once.

Beside the slots this file holds what is in them, or about to be: messages being sent or received (:class:`MailWork`),
messages whose receive has not been found (:class:`Arrival`), and all of these with one peer (:class:`Peer`). mail.py
decides which message goes where. Works may be used from any thread, the rest from one at a time.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from iris_pg.completion import Completion
from iris_pg.copy_engine import packets
from iris_pg.errors import ArgumentError, QueueError
from iris_pg.flags import CREDIT, MAIL_SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics
from iris_pg.work import IrisWork

_HEADER = struct.Struct("<QQq32s")  # sequence number in the channel, nbytes, tag, dtype in words
_HEADER_BYTES = 64
_SMALLEST = 16 << 10  # bytes of a slot, however many ranks share a chunk's worth


class Header(NamedTuple):
    """What a message says of itself: its number in the channel, its size in bytes, its tag and its dtype in ASCII."""

    sequence: int
    nbytes: int
    tag: int
    dtype: bytes


def slot_bytes(chunk_bytes: int, world: int) -> int:
    """Return the size of a slot: all slots of a rank together take about as much as four chunks."""
    return min(chunk_bytes, max(_SMALLEST, 2 * chunk_bytes // max(world, 1) // 256 * 256))


def area_bytes(chunk_bytes: int, world: int) -> int:
    """Return the size of the heap's "mail" area: the slots of each peer, then headers of messages to each peer."""
    return (world - 1) * MAIL_SLOTS * (2 * _HEADER_BYTES + slot_bytes(chunk_bytes, world))


def _place(rank: int, peer: int, world: int) -> int:
    """Return the place of ``peer`` among the peers of ``rank``, the next rank being the first."""
    return (peer - rank - 1) % world


class Outbox:
    """This rank's end of the slots to ``peer``.

    Attributes:
        sequence: number of messages begun.
    """

    def __init__(self, heap: SymmetricHeap, peer: int, slot_bytes: int) -> None:
        rank, page, area = heap.rank, heap.control, heap.areas["mail"]
        slots, pitch = range(MAIL_SLOTS), _HEADER_BYTES + slot_bytes
        self.peer, self.sequence = peer, 0
        self._load = atomics().load32
        self._slot, self._parts = 0, 0
        self._emptied_at = [heap.base + page.emptied(s, peer) for s in slots]
        self._slots_at = [
            heap.bases[peer] + area + (_place(peer, rank, heap.world) * MAIL_SLOTS + s) * pitch for s in slots
        ]
        headers = area + (heap.world - 1) * MAIL_SLOTS * pitch
        headers += _place(rank, peer, heap.world) * MAIL_SLOTS * _HEADER_BYTES
        self._headers_at = [heap.base + headers + s * _HEADER_BYTES for s in slots]
        self._headers = heap.bytes_at(rank, headers, MAIL_SLOTS * _HEADER_BYTES).numpy().data
        self._take = [packets.fence(at, 0) for at in self._emptied_at]
        self._signal = [packets.fence(heap.bases[peer] + page.mailed(s, rank), CREDIT) for s in slots]
        self._copy_header = [
            packets.copy_linear(dst=slot, src=header, nbytes=_HEADER_BYTES)
            for slot, header in zip(self._slots_at, self._headers_at, strict=True)
        ]

    @property
    def has_room(self) -> bool:
        """Whether the next slot may be filled. Execute what :meth:`put` returned before asking about the same slot."""
        return self._parts < MAIL_SLOTS or self._load(self._emptied_at[self._slot]) == CREDIT

    @property
    def room_at(self) -> int:
        """Address of the flag that holds 1 when the next slot has been emptied."""
        return self._emptied_at[self._slot]

    def put(self, address: int, nbytes: int, begins: tuple[int, int, bytes] | None = None) -> bytes:
        """Return the packets that put ``nbytes`` bytes at ``address`` into the next slot, which has room.

        Args:
            address, nbytes: the part; no bytes in a message of 0 bytes.
            begins: nbytes, tag and dtype of the message whose first part this is; None for another part.
        """
        s = self._slot
        self._slot, self._parts = (s + 1) % MAIL_SLOTS, self._parts + 1
        made = self._take[s]
        if begins:
            self.sequence += 1
            # The header of the slot's message before this one has left: its part has been executed, and the slot read.
            _HEADER.pack_into(self._headers, s * _HEADER_BYTES, self.sequence, *begins)
            made += self._copy_header[s]
        if nbytes:
            made += packets.copy_linear(dst=self._slots_at[s] + _HEADER_BYTES, src=address, nbytes=nbytes)
        return made + self._signal[s]


class Inbox:
    """This rank's end of the slots from ``peer``.

    Attributes:
        sequence: number of messages whose header has been read.
    """

    def __init__(self, heap: SymmetricHeap, peer: int, slot_bytes: int) -> None:
        rank, page, area = heap.rank, heap.control, heap.areas["mail"]
        slots, pitch = range(MAIL_SLOTS), _HEADER_BYTES + slot_bytes
        self.peer, self.sequence = peer, 0
        self._load = atomics().load32
        self._slot = 0
        first = area + _place(rank, peer, heap.world) * MAIL_SLOTS * pitch
        self._mailed_at = [heap.base + page.mailed(s, peer) for s in slots]
        self._slots_at = [heap.base + first + s * pitch for s in slots]
        self._headers = [heap.bytes_at(rank, first + s * pitch, _HEADER_BYTES).numpy().data for s in slots]
        self._take = [packets.fence(at, 0) for at in self._mailed_at]
        self._signal = [packets.fence(heap.bases[peer] + page.emptied(s, rank), CREDIT) for s in slots]

    @property
    def is_filled(self) -> bool:
        """Whether the next slot holds a part. Execute what :meth:`take` returned before asking about the same slot."""
        return self._load(self._mailed_at[self._slot]) == CREDIT

    @property
    def is_full(self) -> bool:
        """Whether all slots hold parts, so that the sender may be waiting for room."""
        return all(self._load(at) == CREDIT for at in self._mailed_at)

    @property
    def filled_at(self) -> int:
        """Address of the flag that holds 1 when the next slot is filled."""
        return self._mailed_at[self._slot]

    def header(self) -> Header:
        """Return the header in the next slot, which is filled and begins a message. May be called again.

        Raises:
            QueueError: it is not the header that comes next; the channel is broken.
        """
        header = Header._make(_HEADER.unpack_from(self._headers[self._slot]))
        if header.sequence != self.sequence + 1:
            raise QueueError(
                f"the slots from rank {self.peer} hold message {header.sequence} where message {self.sequence + 1} "
                "comes next: something has overwritten the group's memory"
            )
        return header

    def take(self, address: int | None, nbytes: int, begins: bool) -> bytes:
        """Return the packets that move the ``nbytes`` bytes of the next slot, which is filled, to ``address``.

        Args:
            address: None drops the bytes.
            nbytes: of the part.
            begins: whether it is the first part of a message.
        """
        s = self._slot
        self._slot = (s + 1) % MAIL_SLOTS
        self.sequence += begins
        made = self._take[s]
        if nbytes and address is not None:
            made += packets.copy_linear(dst=address, src=self._slots_at[s] + _HEADER_BYTES, nbytes=nbytes)
        return made + self._signal[s]


# Messages -------------------------------------------------------------------------------------------------------------

_dtypes: dict[torch.dtype, bytes] = {}  # in words


def _in_words(dtype: torch.dtype) -> bytes:
    words = _dtypes[dtype] = str(dtype).removeprefix("torch.").encode()[:32]
    return words


class MailWork(IrisWork):
    """One message being sent or received.

    Args:
        op: "send" or "recv".
        peer: the other rank; None while any will do.
        tag: of the message.
        tensor: its memory, contiguous; kept until the work is done.
        drive: waits for this work, at most so many seconds (0: as long as it takes).

    Attributes:
        address, nbytes: where the bytes lie, and how many.
        source: the rank that a received message comes from, once it is known.
        since: ``time.monotonic()`` at which someone began to wait for it; its deadline counts from then.
    """

    def __init__(
        self, op: str, peer: int | None, tag: int, tensor: torch.Tensor, drive: Callable[[MailWork, float], None]
    ) -> None:
        super().__init__([tensor], drive=_ended)  # _await() does what it is for
        assert self.completion
        self.completion.keep = tensor
        self.op, self.peer, self.tag = op, peer, tag
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.dtype = _dtypes.get(tensor.dtype) or _in_words(tensor.dtype)
        self.source = peer if op == "recv" else None
        self.number = 0  # in the order of calls
        self.moved = 0  # bytes
        self.moved_at = 0.0  # time.monotonic() when bytes moved last
        self.since: float | None = None
        self._wait_for = drive

    def _await(self, completion: Completion, timeout_s: float) -> None:
        self._wait_for(self, timeout_s)
        completion.wait(None)  # it may be ending in another thread, which is still copying to the user's output

    def finished(self, error: BaseException | None) -> None:
        """See :meth:`Completion.finished`; called without a lock, and runs the future's callbacks. Afterwards the work
        does not hold the group's memory.
        """
        assert self.completion
        self._wait_for = _ended
        if callbacks := self.completion.finished(error):
            callbacks()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the list that holds the tensor."""
        self.since = self.since or time.monotonic()
        return super().get_future()

    def source_rank(self) -> int:
        """Return the rank in the group that the message came from, once it has arrived.

        Raises:
            ArgumentError: it is being sent, or nothing has arrived.
        """
        if self.source is None:
            raise ArgumentError(
                f"source_rank: {self.words()} has no source"
                + ("; ask the work of a recv" if self.op == "send" else " before a message has arrived; wait() first")
            )
        return self.source

    _source_rank = source_rank

    def ended_within(self, timeout_s: float) -> bool:
        """Return whether it has ended, after at most ``timeout_s`` seconds in which another thread may see to it."""
        assert self.completion
        return self.completion.wait(timeout_s)

    def words(self) -> str:
        """Return what it is in words, for messages."""
        if self.op == "send":
            return f"send to rank {self.peer}, tag {self.tag}, {self.nbytes} bytes"
        return f"recv from {'any rank' if self.peer is None else f'rank {self.peer}'}, tag {self.tag}"


def _ended(work: IrisWork, timeout_s: float = 0.0) -> None:
    """Wait for a work that has ended."""


class Arrival:
    """A message of which the first part has been taken from a slot, or is about to be.

    Attributes:
        number: in the order in which this rank's messages begin to arrive.
        receive: the work it is for, once found.
        address: where its bytes go: the work's tensor, ``buffer``, or nowhere when None.
        buffer: uint8 [nbytes], for a message that no receive was found for when it came.
        moved: bytes that have been taken.
    """

    __slots__ = ("address", "buffer", "header", "moved", "number", "receive")

    def __init__(self, header: Header, number: int, receive: MailWork | None = None) -> None:
        self.header, self.number, self.receive = header, number, receive
        self.address = receive.address if receive else None
        self.buffer: torch.Tensor | None = None
        self.moved = 0

    def keep(self) -> None:
        """Let the bytes go to memory of this process until they are received."""
        self.buffer = torch.empty(self.header.nbytes, dtype=torch.uint8)
        self.address = self.buffer.data_ptr()

    @property
    def is_whole(self) -> bool:
        """Whether all of it has been taken."""
        return self.moved == self.header.nbytes


class Peer:
    """All messages between this rank and ``rank`` that have not ended.

    Attributes:
        sends: in the order in which they leave.
        sent_at: ``time.monotonic()`` when bytes left last.
        receives: from this rank and no other, without a message yet, in the order of calls.
        arriving: the message of which some parts are still to come.
        unexpected: messages being kept, in the order in which they were sent; the last may be ``arriving``.
    """

    def __init__(self, heap: SymmetricHeap, rank: int, slot_bytes: int) -> None:
        self.rank, self.slot_bytes = rank, slot_bytes
        self.outbox, self.inbox = Outbox(heap, rank, slot_bytes), Inbox(heap, rank, slot_bytes)
        self.sends: deque[MailWork] = deque()
        self.sent_at = 0.0
        self.receives: list[MailWork] = []
        self.arriving: Arrival | None = None
        self.unexpected: list[Arrival] = []

    def fill(self) -> tuple[list[bytes], list[MailWork]]:
        """Return the packets that fill the slots that have room, and the sends that are done with them."""
        made: list[bytes] = []
        left: list[MailWork] = []
        while self.sends and len(made) < MAIL_SLOTS and self.outbox.has_room:  # no slot twice in one batch
            work = self.sends[0]
            n = min(self.slot_bytes, work.nbytes - work.moved)
            begins = None if work.moved else (work.nbytes, work.tag, work.dtype)
            made.append(self.outbox.put(work.address + work.moved, n, begins))
            work.moved += n
            if work.moved == work.nbytes:
                left.append(self.sends.popleft())
        return made, left

    def empty(self, match: Callable[[Peer, Header, bool], Arrival | None]) -> tuple[list[bytes], list[Arrival]]:
        """Return the packets that empty the slots whose parts are wanted, and the messages that are whole with them.

        Args:
            match: given a message that begins, and whether no slot before it is being emptied, returns where it goes;
                None leaves it in its slot.
        """
        made: list[bytes] = []
        whole: list[Arrival] = []
        while len(made) < MAIL_SLOTS and self.inbox.is_filled:
            arrival, begins = self.arriving, self.arriving is None
            if arrival is None:
                arrival = self.arriving = match(self, self.inbox.header(), not made)
                if arrival is None:
                    break
            n = min(self.slot_bytes, arrival.header.nbytes - arrival.moved)
            address = None if arrival.address is None else arrival.address + arrival.moved
            made.append(self.inbox.take(address, n, begins))
            arrival.moved += n
            if arrival.receive:
                arrival.receive.moved, arrival.receive.moved_at = arrival.moved, time.monotonic()
            if arrival.is_whole:
                whole.append(arrival)
                self.arriving = None
        return made, whole

    def works(self) -> Iterator[MailWork]:
        """Yield the works that have not ended."""
        yield from self.sends
        yield from self.receives
        yield from (a.receive for a in self.unexpected if a.receive)
        if self.arriving and self.arriving.receive and self.arriving not in self.unexpected:
            yield self.arriving.receive

    def forget(self, work: MailWork) -> None:
        """Leave out a work that ends before its time; what still arrives of its message is dropped."""
        for works in (self.sends, self.receives):
            if work in works:
                works.remove(work)
        for arrival in (self.arriving, *self.unexpected):
            if arrival and arrival.receive is work:
                arrival.receive = arrival.address = None
