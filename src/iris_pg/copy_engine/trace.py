"""Packets that were decoded before: the same dwords need not be decoded again, and most of them can run without Python.

A training loop submits the same packets over and over. The second time that a run of dwords is read from a ring its
decoded form is kept; from then on the run is carried out by one native call
(:class:`iris_pg.platforms.atomics.Atomics`, ``execute``), which hands back to Python what it does not know, and every
wait that is not over soon.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from iris_pg.copy_engine import decoded as d
from iris_pg.copy_engine.decoder import decode
from iris_pg.copy_engine.trap import PULL, REDUCE, Pull, Reduction, requested
from iris_pg.platforms.atomics import AWAIT, COPY, OTHER, READ, STORE, STORE64, WITH

LONGEST = 4096  # bytes of a run
_KEPT = 1024  # runs, then all are forgotten
_FULL_MASK = 0xFFFFFFFF


class Trace:
    """A decoded run of packets.

    Attributes:
        packets: the packets, without NOPs; a Pull twice, as its native form has two parts.
        starts: where each begins, in bytes from the start of the run.
        operations: address of the native form, four 64-bit words for each of them.
        nbytes: length of the run.
    """

    def __init__(self, words: bytes, pids: Sequence[int], halved_bytes: int | None) -> None:
        self.packets: list[d.Packet | Reduction | Pull] = []
        self.starts: list[int] = []
        self.nbytes = len(words)
        self._words = array("Q")
        at = nop = 0  # nop: where the last NOP began
        while at < len(words):
            decoded = decode(words, at, len(words))
            packet: d.Packet | Reduction | Pull = decoded
            if type(packet) is d.Trap and packet.context in (REDUCE, PULL):
                packet = requested(packet.context, words[nop + 4 : at])
            if type(packet) is d.Nop:
                nop = at
            else:
                parts = _native(packet, pids, halved_bytes)
                self._words.extend(parts)
                for _ in range(0, len(parts), 4):
                    self.packets.append(packet)
                    self.starts.append(at)
            at += decoded.size_bytes
        self.operations = self._words.buffer_info()[0]


def _native(packet: d.Packet | Reduction | Pull, pids: Sequence[int], halved_bytes: int | None) -> tuple[int, ...]:
    match packet:
        case d.CopyLinear(dst, src, nbytes):
            return COPY, dst, src, nbytes
        case d.Fence(address, value):
            return STORE, address, value, 0
        case d.PollRegMem(address, reference, mask, d.Comparison.EQUAL) if mask == _FULL_MASK and not packet.gives_up:
            return AWAIT, address, reference, 0
        case d.Atomic(address=address, op=d.Operation.SWAP, operand=operand, width_bytes=8):
            return STORE64, address, operand, 0
        case Pull(rank, dst, offer, offset, nbytes) if rank < len(pids) and nbytes < (halved_bytes or nbytes + 1):
            return READ, dst, offer, nbytes, WITH, pids[rank], offset, 0
    return OTHER, 0, 0, 0


class Traces:
    """The runs seen by one queue.

    Args:
        pids: of the processes whose memory a native operation may read, by rank.
        halved_bytes: size from which on it may not, if any.
    """

    def __init__(self, pids: Sequence[int] = (), halved_bytes: int | None = None) -> None:
        self._pids, self._halved_bytes = pids, halved_bytes
        self._known: dict[bytes, Trace | None] = {}

    def find(self, words: bytes) -> Trace | None:
        """Return the trace of a run of whole packets, or None the first time that it is seen.

        Raises:
            PacketError: a bad packet among them.
        """
        trace = self._known.get(words)
        if trace is None:
            if words not in self._known:
                if len(self._known) >= _KEPT:
                    self._known.clear()
                self._known[words] = None
                return None
            trace = self._known[words] = Trace(words, self._pids, self._halved_bytes)
        return trace
