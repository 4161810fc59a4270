"""The control page: where every flag of a group lies at the start of each rank's segment, and what each one means.

Pure arithmetic. A flag has a cache line of its own, since two ranks write and read it at full speed.

======== ============================ =========================== ================================================
name     lies at                      written by                  meaning
======== ============================ =========================== ================================================
ready    the reader, per slot         the producer of the slot    the producer's staging slot is filled
free     the producer, per slot       a reader of the slot        that reader is done with the slot; starts at 1
filled   the reader, per slot         the producer                the slot from that producer to this reader is filled
drained  the producer, per slot       the reader                  that slot may be filled again; starts at 1
enter    who writes or reads          the owner of memory         the owner's output may be overwritten (zero copy), or
                                                                  its input read (direct); beside it, where that is
done     the owner                    who wrote or read           its part of the output has arrived, or it has read
reduced  who reads                    the owner of a result       the owner's part of a result is there and may be read
barrier  each rank, two rounds        each peer                   the peer has reached the barrier
mailed   the receiver, per slot       the sender                  the slot for messages between them holds a part of one
emptied  the sender, per slot         the receiver                it holds none any more; starts at 0, as the slot does
======== ============================ =========================== ================================================
"""

from __future__ import annotations

LINE = 64  # bytes
OFFER = 8  # bytes from a mailbox to the address that is offered in it
SLOTS = 2  # staging slots a producer; two let the next operation begin before the last one is drained
MAIL_SLOTS = 2  # slots for messages from one rank to another
CREDIT = 1  # the tag of a flag that gives a slot back

_KINDS = (
    ("ready", SLOTS),
    ("free", SLOTS),
    ("filled", SLOTS),
    ("drained", SLOTS),
    ("enter", 1),
    ("done", 1),
    ("reduced", 1),
    ("barrier", 2),
    ("mailed", MAIL_SLOTS),
    ("emptied", MAIL_SLOTS),
)
DESCRIPTION_BYTES = 256
HISTORY = 32  # operations of which a rank tells
_SIZES_BYTES = 3 * 8  # that a rank tells a peer about the sizes of one operation


class ControlPage:
    """Offsets in bytes from the start of a rank's segment, for a group of ``world`` ranks.

    Attributes:
        sequence: uint64, the sequence number of the last operation this rank has begun.
        failure: uint64 x world, ``failure(p)`` is written by rank p when it gives up: the lost rank + 1.
        history: uint64 x HISTORY, word s mod HISTORY: the low half of sequence number s, and in the low half of the
            word a digest of the operations 1..s.
        sizes: uint64 x 3 x HISTORY x world, ``sizes(p, s)`` is for rank p: the low half of s, and in the low half of
            the word a checksum of the sizes that this rank and p have told each other in the operations 1..s; bytes
            that this rank sends to p in operation s; bytes that it expects from p.
        description: what this rank waits for: uint64 sequence number, uint32 length, UTF-8 text.
        nbytes: size of the page, a multiple of 4096.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._start: dict[str, int] = {}
        at = 0
        for kind, rows in _KINDS:
            self._start[kind] = at
            at += rows * world * LINE
        self.sequence, at = at, at + LINE
        self._failure, at = at, at + world * LINE
        self.history, at = at, at + 8 * HISTORY
        self._sizes, at = at, at + world * HISTORY * _SIZES_BYTES
        self.description, at = at, at + DESCRIPTION_BYTES
        self.nbytes = -(-at // 4096) * 4096

    def ready(self, slot: int, producer: int) -> int:
        """Offset, at a reader, of the mailbox in which ``producer`` says that its slot is filled."""
        return self._start["ready"] + (slot * self.world + producer) * LINE

    def free(self, slot: int, reader: int) -> int:
        """Offset, at a producer, of the mailbox in which ``reader`` gives the slot back."""
        return self._start["free"] + (slot * self.world + reader) * LINE

    def filled(self, slot: int, producer: int) -> int:
        """Offset, at a reader, of the mailbox in which ``producer`` says that its slot for this reader is filled."""
        return self._start["filled"] + (slot * self.world + producer) * LINE

    def drained(self, slot: int, reader: int) -> int:
        """Offset, at a producer, of the mailbox in which ``reader`` gives back the slot that is for it alone."""
        return self._start["drained"] + (slot * self.world + reader) * LINE

    def enter(self, owner: int) -> int:
        """Offset, at a writer or reader, of the mailbox in which ``owner`` lets its memory be written or read."""
        return self._start["enter"] + owner * LINE

    def done(self, user: int) -> int:
        """Offset, at the owner of memory, of the mailbox in which ``user`` says that it has written or read it."""
        return self._start["done"] + user * LINE

    def reduced(self, owner: int) -> int:
        """Offset, at a reader, of the mailbox in which ``owner`` says that its part of a result may be read."""
        return self._start["reduced"] + owner * LINE

    def barrier(self, round_: int, peer: int) -> int:
        """Offset of the mailbox in which ``peer`` says that it has reached round ``round_`` (0 or 1)."""
        return self._start["barrier"] + (round_ * self.world + peer) * LINE

    def mailed(self, slot: int, sender: int) -> int:
        """Offset, at a receiver, of the mailbox in which ``sender`` says that its slot holds a part of a message."""
        return self._start["mailed"] + (slot * self.world + sender) * LINE

    def emptied(self, slot: int, receiver: int) -> int:
        """Offset, at a sender, of the mailbox in which ``receiver`` says that it has emptied the slot."""
        return self._start["emptied"] + (slot * self.world + receiver) * LINE

    def failure(self, peer: int) -> int:
        """Offset of the word in which ``peer`` says that it has given up."""
        return self._failure + peer * LINE

    def sizes(self, peer: int, sequence: int) -> int:
        """Offset of what the page's rank tells ``peer`` about the sizes of operation ``sequence``."""
        return self._sizes + (peer * HISTORY + sequence % HISTORY) * _SIZES_BYTES

    def initial(self) -> dict[int, int]:
        """Return offset -> value of every flag that does not start at 0: the credits."""
        slots_and_readers = [(slot, reader) for slot in range(SLOTS) for reader in range(self.world)]
        return {offset(*at): CREDIT for at in slots_and_readers for offset in (self.free, self.drained)}

    def name(self, offset: int) -> tuple[str, int] | None:
        """Return (flag in words, the rank that writes it) for an offset in the page, or None when no flag lies
        there.
        """
        for kind, rows in _KINDS:
            index, rest = divmod(offset - self._start[kind], LINE)
            if rest == 0 and 0 <= index < rows * self.world:
                row, peer = divmod(index, self.world)
                return f"{kind}[{row}] from rank {peer}" if rows > 1 else f"{kind} from rank {peer}", peer
        return None
