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

Used by mail.py, which decides what goes where; one thread at a time.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iris_pg.copy_engine import packets
from iris_pg.errors import QueueError
from iris_pg.flags import CREDIT, MAIL_SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics

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
