"""What a queue of the software engine asks of the host beside it: a NOP that carries what to do, and a TRAP that asks.

TRAP is how an engine asks for attention: it interrupts the host, with a number. The numbers here mean that the payload
of the NOP before it, which the engine skips, says what to do. Addresses in it are patched like those of a packet. A
GPU's queue has no such host: there reductions are kernels, and every memory is mapped.

====== ====== =====================================================================
number asks   why no packet does it
====== ====== =====================================================================
REDUCE add    copy engines move bytes
PULL   read   the memory of another process is not mapped here, so it has no address
====== ====== =====================================================================
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iris_pg import reduce_ops
from iris_pg.copy_engine import packets
from iris_pg.errors import PacketError

REDUCE, PULL = 1, 2  # context of the TRAP
_OPS = tuple(reduce_ops.DTYPES)
_DTYPES = reduce_ops.DTYPES["sum"]
_REDUCE = struct.Struct("<4I2Q")  # op, dtype, number of sources, 0, nbytes, dst; then an address for each source
_PULL = struct.Struct("<2I4Q")  # rank, 0, nbytes, offer, offset, dst
_HEADER_BYTES = 4  # of a NOP
DST_OFFSET = _HEADER_BYTES + _REDUCE.size - 8  # bytes from the start of the NOP, where addresses are patched in
SOURCES_OFFSET = _HEADER_BYTES + _REDUCE.size
PULL_DST_OFFSET = _HEADER_BYTES + _PULL.size - 8


class Reduction(NamedTuple):
    """What a REDUCE trap asks for; as in :class:`iris_pg.program.Reduce`, with addresses."""

    op: str
    dtype: str
    dst: int
    sources: tuple[int, ...]
    nbytes: int

    def request(self) -> bytes:
        """Return the two packets that ask for it."""
        head = (_OPS.index(self.op), _DTYPES.index(self.dtype), len(self.sources), 0)
        payload = _REDUCE.pack(*head, self.nbytes, self.dst)
        return _asking(REDUCE, payload + struct.pack(f"<{len(self.sources)}Q", *self.sources))


class Pull(NamedTuple):
    """What a PULL trap asks for: ``nbytes`` to ``dst`` from ``offset`` bytes after the address in the memory of
    ``rank`` that the 64-bit word at ``offer`` holds.
    """

    rank: int
    dst: int
    offer: int
    offset: int
    nbytes: int

    def request(self) -> bytes:
        """Return the two packets that ask for it."""
        return _asking(PULL, _PULL.pack(self.rank, 0, self.nbytes, self.offer, self.offset, self.dst))


def _asking(number: int, payload: bytes) -> bytes:
    return packets.nop(1 + len(payload) // 4)[:_HEADER_BYTES] + payload + packets.trap(number)


def requested(number: int, payload: bytes | memoryview) -> Reduction | Pull:
    """Return what TRAP ``number`` after a NOP with this payload asks for.

    Raises:
        PacketError: it is not what the two classes write.
    """
    try:
        if number == PULL:
            rank, zero, nbytes, offer, offset, dst = _PULL.unpack(payload)
            if zero or not nbytes:
                raise ValueError
            return Pull(rank, dst, offer, offset, nbytes)
        op, dtype, count, zero, nbytes, dst = _REDUCE.unpack_from(payload)
        sources = struct.unpack_from(f"<{count}Q", payload, _REDUCE.size)
        if zero or len(payload) != _REDUCE.size + 8 * count or count < 2 or not nbytes:
            raise ValueError
        return Reduction(_OPS[op], _DTYPES[dtype], dst, sources, nbytes)
    except (struct.error, IndexError, ValueError):
        raise PacketError(
            f"TRAP {number} after a NOP whose payload asks for nothing: {bytes(payload).hex(' ', 4)}"
        ) from None
