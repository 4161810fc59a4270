"""Reductions in a queue of the software engine: a NOP that carries what to do, and a TRAP that asks for it.

No SDMA packet adds. TRAP is how an engine asks for attention: it interrupts the host, with a number. Number REDUCE
means that the payload of the NOP before it, which the engine skips, says what to reduce. Addresses in it are patched
like those of a packet. A GPU's queue has no such host beside it; reductions are kernels there.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iris_pg import reduce_ops
from iris_pg.copy_engine import packets
from iris_pg.errors import PacketError

REDUCE = 1  # context of the TRAP
_OPS = tuple(reduce_ops.DTYPES)
_DTYPES = reduce_ops.DTYPES["sum"]
_HEAD = struct.Struct("<4I2Q")  # op, dtype, number of sources, 0, nbytes, dst; then an address for each source
_HEADER_BYTES = 4  # of a NOP
DST_OFFSET = _HEADER_BYTES + _HEAD.size - 8  # bytes from the start of the NOP, where addresses are patched in
SOURCES_OFFSET = _HEADER_BYTES + _HEAD.size


class Reduction(NamedTuple):
    """What a REDUCE trap asks for; as in :class:`iris_pg.program.Reduce`, with addresses."""

    op: str
    dtype: str
    dst: int
    sources: tuple[int, ...]
    nbytes: int


def request(reduction: Reduction) -> bytes:
    """Return the two packets that ask for a reduction."""
    head = (_OPS.index(reduction.op), _DTYPES.index(reduction.dtype), len(reduction.sources), 0)
    payload = _HEAD.pack(*head, reduction.nbytes, reduction.dst)
    payload += struct.pack(f"<{len(reduction.sources)}Q", *reduction.sources)
    header = packets.nop(1 + len(payload) // 4)[:_HEADER_BYTES]
    return header + payload + packets.trap(REDUCE)


def requested(payload: bytes | memoryview) -> Reduction:
    """Return what the payload of a NOP asks for.

    Raises:
        PacketError: it is not what :func:`request` writes.
    """
    try:
        op, dtype, count, zero, nbytes, dst = _HEAD.unpack_from(payload)
        sources = struct.unpack_from(f"<{count}Q", payload, _HEAD.size)
        if zero or len(payload) != _HEAD.size + 8 * count or count < 2 or not nbytes:
            raise ValueError
        return Reduction(_OPS[op], _DTYPES[dtype], dst, sources, nbytes)
    except (struct.error, IndexError, ValueError):
        raise PacketError(
            f"TRAP {REDUCE} after a NOP whose payload asks for no reduction: {bytes(payload).hex(' ', 4)}"
        ) from None
