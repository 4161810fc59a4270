"""What every two ranks tell each other about the sizes of the messages between them, for the cu engine on a CPU.

In a gather, scatter or all-to-all only the two ranks of a message know how long it is, so the key that all ranks
compare says nothing of it, and neither do the kernels' flags, which are counters. So each rank tells each peer in its
control page, for its last HISTORY operations, how many bytes it sends to it and expects from it, nothing too; and a
checksum of all such pairs of numbers so far, which is the same on both ranks as long as they agree. Being of all so
far, a checksum tells of operations whose own words are gone.
"""

from __future__ import annotations

import struct
import zlib

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.flags import HISTORY
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics

_Told = tuple[int, int, int]  # the checksum, bytes sent to the peer, bytes expected from it
_BOTH = struct.Struct("<QQ")


class Sizes:
    """One rank's side of what is told.

    Args:
        heap: its control pages are read and written; they lie in memory of the host.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap, self._rank, self._world = heap, heap.rank, heap.world
        self._checksums = [0] * self._world
        self._own: dict[int, list[_Told]] = {}  # sequence number -> by peer: the last HISTORY, and all in flight
        ops = atomics()
        self._load64, self._store64 = ops.load64, ops.store64

    def tell(self, sequence: int, flow: Flow | Fold, oldest: int) -> None:
        """Tell the peers the sizes of operation ``sequence``. Calls come in the order of operations, one at a time,
        each before a byte of its operation moves.

        Args:
            oldest: number of the first operation that is not done.
        """
        sends, expects = [0] * self._world, [0] * self._world
        if isinstance(flow, Flow):  # what a reduction moves follows from its key
            for part in flow.sends:
                sends[part.peer] = part.nbytes
            for part in flow.receives:
                expects[part.peer] = part.nbytes
        self._own[sequence] = own = []
        for peer, (sent, expected) in enumerate(zip(sends, expects, strict=True)):
            upward = (sent, expected) if self._rank < peer else (expected, sent)  # the same numbers on both ranks
            checksum = self._checksums[peer] = zlib.crc32(_BOTH.pack(*upward), self._checksums[peer])
            own.append((checksum, sent, expected))
            at = self._heap.base + self._heap.control.sizes(peer, sequence)
            self._store64(at, 0)  # nobody takes numbers of two operations for one
            self._store64(at + 8, sent)
            self._store64(at + 16, expected)
            self._store64(at, (sequence & 0xFFFFFFFF) << 32 | checksum)
        while len(self._own) > HISTORY and (first := next(iter(self._own))) < oldest:
            del self._own[first]

    def difference(self, peer: int, sequence: int) -> str | None:
        """Return in words how this rank and ``peer`` differ in the sizes of the operations up to ``sequence``; None
        when they do not, or one of them does not tell.
        """
        own = self._own.get(sequence)
        theirs = self._told(peer, sequence)
        if peer == self._rank or not own or not theirs or own[peer][0] == theirs[0]:
            return None
        _, sent, expected = own[peer]
        _, sent_there, expected_there = theirs
        if sent != expected_there:
            return f"rank {self._rank} sends {sent} bytes to rank {peer}, which expects {expected_there}"
        if expected != sent_there:
            return f"rank {self._rank} expects {expected} bytes from rank {peer}, which sends {sent_there}"
        return f"rank {self._rank} and rank {peer} do so in an operation before seq {sequence}"

    def _told(self, peer: int, sequence: int) -> _Told | None:
        """Return what ``peer`` tells this rank about operation ``sequence``, if it still does."""
        at = self._heap.bases[peer] + self._heap.control.sizes(self._rank, sequence)
        word = self._load64(at)
        told = word & 0xFFFFFFFF, self._load64(at + 8), self._load64(at + 16)
        return told if word >> 32 == sequence & 0xFFFFFFFF and self._load64(at) == word else None
