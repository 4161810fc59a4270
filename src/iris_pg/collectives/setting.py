"""What every program of one operation shares."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from iris_pg.flags import LINE, ControlPage
from iris_pg.program import Ref


@dataclass(frozen=True)
class Setting:
    """The group, and how it moves this operation.

    Args:
        rank, world: this rank and the number of ranks.
        page: where the flags lie.
        tag: what the operation's mailboxes carry, so that a rank in another operation is noticed.
        chunk_bytes: size of a staging slot that all ranks read.
        pair_bytes: size of a staging slot that one rank reads.
        first_slot: the slot of the first chunk; the same on all ranks.
        direct_bytes: tensors from this size on are read by their readers directly; 0: none are.
        piece_bytes: size of the places in a rank's own memory to which it pulls what it is about to reduce.
        tapered_from: a last piece of more bytes is cut into smaller and smaller ones, so that little is left to be
            handled when all has come, and one of less goes with the one before; 0: pieces fill their slots.
        taper: into shares of these sizes.
        pushes: slots for pairs lie at their readers, into which writers push; else at the writers, from which readers
            pull. For engines that write a peer's memory faster than they read it, and run lanes side by side: what a
            rank receives is then handled in a lane of its own, beside what it sends.
    """

    rank: int
    world: int
    page: ControlPage
    tag: int = 1
    chunk_bytes: int = 1 << 18
    pair_bytes: int = 1 << 16
    first_slot: int = 0
    direct_bytes: int = 0
    piece_bytes: int = 1 << 17
    tapered_from: int = 0
    taper: tuple[int, ...] = (3, 1)
    pushes: bool = False

    @property
    def peers(self) -> list[int]:
        """The other ranks, in the order in which this rank visits them: (rank + k) mod world."""
        return [(self.rank + k) % self.world for k in range(1, self.world)]

    @property
    def receiving(self) -> int:
        """The lane of what a rank receives; it sends in lane 0."""
        return 1 if self.pushes else 0

    def tag_of(self, nbytes: int) -> int:
        """The tag of a message of ``nbytes``, when only its two ranks know how long it is."""
        return zlib.crc32(nbytes.to_bytes(8, "little"), self.tag) | 2  # neither empty nor a credit

    def pieces(self, nbytes: int, unit: int = 1, most: int | None = None) -> list[tuple[int, int]]:
        """Return (start, length) of each piece in which a message of ``nbytes`` goes through slots for pairs: multiples
        of ``unit`` bytes but for the last, and of ``most`` bytes at most, a slot when None.
        """
        most = (self.pair_bytes if most is None else most) // unit * unit
        made = list(chunks(nbytes, most))
        if not made or not 0 < self.tapered_from < most:
            return made
        start, length = made.pop()
        if made and length <= self.tapered_from:  # little follows a whole slot: what is tapered is both
            start, whole_slot = made.pop()
            length += whole_slot
        if length <= self.tapered_from:
            return [*made, (start, length)]
        whole = sum(self.taper)
        line = LINE if length > 2 * whole * LINE else unit  # aligned memory moves faster
        before = 0
        for shares in itertools.accumulate(self.taper):
            end = min(-(-shares * length // (whole * line)) * line, length, before + most)
            if before < end:
                made.append((start + before, end - before))
            before = end
        return made

    def is_direct(self, nbytes: int) -> bool:
        """Whether a tensor of so many bytes is read directly."""
        return 0 < self.direct_bytes <= nbytes

    def flag(self, rank: int, offset: int) -> Ref:
        """The flag at ``offset`` of ``rank``'s control page."""
        return Ref(rank, "flags", offset)

    def staging(self, rank: int, slot: int) -> Ref:
        """The staging slot of ``rank`` that all ranks read."""
        return Ref(rank, "staging", slot * self.chunk_bytes)

    def pair(self, rank: int, slot: int, reader: int) -> Ref:
        """The staging slot that ``rank`` writes and ``reader`` reads."""
        at, other = (reader, rank) if self.pushes else (rank, reader)
        place = (other - at - 1) % self.world  # a rank has none for itself
        return Ref(at, "pairs", (slot * (self.world - 1) + place) * self.pair_bytes)

    def pulled(self, peer: int) -> Ref:
        """The place in this rank's own memory for a piece of ``peer``'s operand."""
        return Ref(self.rank, "pulled", peer * self.piece_bytes)


def chunks(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each chunk of ``nbytes``."""
    for start in range(0, nbytes, size):
        yield start, min(size, nbytes - start)
