"""Encode AMD SDMA packets: pure functions from numbers to the little-endian dwords of one packet.

Writes every packet that this package puts into a ring, for the generations of hardware in generations.py.
Guarantees that no packet leaves here with a zero size (stored minus one, it would encode as the *largest* size), a
misaligned address, or a value that spills out of its field. Does no I/O and keeps no state. Called by the rings, by the
engines that write packets, and by code that patches addresses into them afterwards (``*_OFFSET`` in layout.py).

The layouts are in layout.py, with their sources. The decoder of the software engine is written separately and shares
nothing with either.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from struct import error as StructError
from typing import NoReturn

from iris_pg.copy_engine.generations import GFX942, Generation
from iris_pg.copy_engine.layout import FIELD, NOP_MAX_DWORDS, POLL_FOREVER, header, largest
from iris_pg.errors import ArgumentError, PacketError, UnsupportedError


class PollFunc(IntEnum):
    """How POLL_REGMEM compares ``memory & mask`` with the reference, as unsigned 32-bit numbers (no wrap-around).

    Source: ``SDMA_PKT_POLL_REGMEM_HEADER_func``.
    """

    ALWAYS = 0
    LESS = 1
    LESS_EQUAL = 2
    EQUAL = 3
    NOT_EQUAL = 4
    GREATER_EQUAL = 5
    GREATER = 6


class AtomicOp(IntEnum):
    """Atomic operations, as the code of their 32-bit form that returns the old value.

    Source: amdgpu ``TC_OP_ATOMIC_*_RTN_32``. The other forms add ``ATOMIC_64_BIT`` and ``ATOMIC_NO_RETURN``.
    """

    SWAP = 7
    CMPSWAP = 8
    ADD = 15
    SUB = 16
    SMIN = 17
    UMIN = 18
    SMAX = 19
    UMAX = 20
    AND = 21
    OR = 22
    XOR = 23
    INC = 24
    DEC = 25


ATOMIC_64_BIT = 0x20  # TC_OP_ATOMIC_ADD_RTN_64 - TC_OP_ATOMIC_ADD_RTN_32


ATOMIC_NO_RETURN = 0x40  # TC_OP_ATOMIC_ADD_32 - TC_OP_ATOMIC_ADD_RTN_32
_FILLSIZE = {1: 0, 4: 2}  # bytes per fill unit -> SDMA_PKT_CONSTANT_FILL_HEADER_fillsize

# Each tests everything in one expression and leaves the explaining to _refuse, so that the good case costs about 1 us.

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1

_pack_header = Struct("<I").pack
_pack_copy_linear = Struct("<IIIQQ").pack
_pack_sub_window = Struct("<IQIIIIQQIIIIQIII").pack
_pack_fence = Struct("<IQI").pack
_pack_trap = Struct("<II").pack
_pack_poll = Struct("<IQIII").pack
_pack_atomic = Struct("<IQQQI").pack
_pack_const_fill = Struct("<IQII").pack
_pack_timestamp = Struct("<IQ").pack

_COPY_LINEAR = header("COPY_LINEAR")
_SUB_WINDOW = header("SUB_WINDOW")
_TRAP = header("TRAP")
_POLL = header("POLL_REGMEM", mem_poll=1)
_ATOMIC = header("ATOMIC")
_TIMESTAMP = header("TIMESTAMP")
_CONST_FILL = {unit_bytes: header("CONST_FILL", fillsize=code) for unit_bytes, code in _FILLSIZE.items()}

_FUNC_SHIFT = FIELD["POLL_REGMEM", "func"].low
_RETRY_SHIFT = FIELD["POLL_REGMEM", "retry_count"].low
_OPERATION_SHIFT = FIELD["ATOMIC", "operation"].low
_LOOP_SHIFT = FIELD["ATOMIC", "loop"].low
_COUNT_SHIFT = FIELD["NOP", "count"].low

_MAX_FUNC = max(PollFunc)
_MAX_INTERVAL = largest("POLL_REGMEM", "interval")
_MAX_LOOP_INTERVAL = largest("ATOMIC", "interval")
_MAX_CONTEXT = largest("TRAP", "context")
_MAX_EXTENT = largest("SUB_WINDOW", "width_bytes")  # also rows, slices, pitches
_MAX_SLICE_PITCH = largest("SUB_WINDOW", "dst_slice_pitch_bytes")
_ATOMIC_OPS = frozenset(AtomicOp)


def _refuse(packet: str, *rules: tuple[str, int, int, int, int]) -> NoReturn:
    """Raise PacketError for the first rule ``(field, value, smallest, largest, alignment)`` that does not hold."""
    for field, value, low, high, alignment in rules:
        if not low <= value <= high:
            raise PacketError(f"{packet} {field} is {value} ({value:#x}); allowed is {low}..{high} ({high:#x})")
        if value % alignment:
            raise PacketError(f"{packet} {field} is {value:#x}; it must be a multiple of {alignment} bytes")
    raise PacketError(f"{packet} refused: {', '.join(f'{field}={value}' for field, value, *_ in rules)}")


def nop(n_dwords: int) -> bytes:
    """Return one NOP of ``n_dwords`` dwords in total, 1..16384: a header and zeros that the engine skips.

    Raises PacketError outside that range; ``pad`` takes any size.
    """
    if not 0 < n_dwords <= NOP_MAX_DWORDS:
        _refuse("NOP", ("n_dwords", n_dwords, 1, NOP_MAX_DWORDS, 1))
    return _pack_header((n_dwords - 1) << _COUNT_SHIFT) + bytes(4 * (n_dwords - 1))


def pad(n_bytes: int) -> bytes:
    """Return ``n_bytes`` bytes of NOPs, as few as possible: one up to 64 KiB, because the count has only 14 bits.

    Raises PacketError if ``n_bytes`` is not a positive multiple of 4.
    """
    if n_bytes <= 0 or n_bytes & 3:
        _refuse("NOP", ("n_bytes", n_bytes, 4, _U64, 4))
    n_full, rest = divmod(n_bytes // 4, NOP_MAX_DWORDS)
    return nop(NOP_MAX_DWORDS) * n_full + (nop(rest) if rest else b"")


def copy_linear(*, dst: int, src: int, nbytes: int, generation: Generation = GFX942) -> bytes:
    """Return one COPY_LINEAR of ``nbytes`` bytes. Keywords only: APIs disagree on which of dst and src comes first.

    Any byte address and size is legal; multiples of 4 are the fast path, of 32 the best. Overlapping ranges are not
    defined. Raises PacketError for a null address, a range past 2**64, or ``nbytes`` outside 1..max_linear_bytes
    (1 GiB; 4 MiB on gfx908).
    """
    last = _U64 - nbytes + 1
    if not (0 < nbytes <= generation.max_linear_bytes and 0 < src <= last and 0 < dst <= last):
        longest = generation.max_linear_bytes
        _refuse("COPY_LINEAR", ("nbytes", nbytes, 1, longest, 1), ("src", src, 1, last, 1), ("dst", dst, 1, last, 1))
    return _pack_copy_linear(_COPY_LINEAR, nbytes - 1, 0, src, dst)


def copy_linear_split(*, dst: int, src: int, nbytes: int, generation: Generation = GFX942) -> list[bytes]:
    """Return the packets of a linear copy of any size >= 1 byte.

    All but the last copy ``generation.split_bytes`` (0x3fffffe0; 0x3fffe0 on gfx908), a multiple of 32, so that every
    packet has the alignment of the first. Raises PacketError as ``copy_linear`` does.
    """
    last = _U64 - nbytes + 1
    if not (0 < nbytes and 0 < src <= last and 0 < dst <= last):
        _refuse("COPY_LINEAR", ("nbytes", nbytes, 1, _U64, 1), ("src", src, 1, last, 1), ("dst", dst, 1, last, 1))
    step = generation.split_bytes
    return [
        _pack_copy_linear(_COPY_LINEAR, min(step, nbytes - at) - 1, 0, src + at, dst + at)
        for at in range(0, nbytes, step)
    ]


def copy_sub_window(
    *,
    dst: int,
    src: int,
    width_bytes: int,
    n_rows: int,
    n_slices: int = 1,
    dst_pitch_bytes: int = 0,
    src_pitch_bytes: int = 0,
    dst_slice_pitch_bytes: int = 0,
    src_slice_pitch_bytes: int = 0,
    dst_x: int = 0,
    dst_y: int = 0,
    dst_z: int = 0,
    src_x: int = 0,
    src_y: int = 0,
    src_z: int = 0,
    generation: Generation = GFX942,
) -> bytes:
    """Return one large sub-window copy: ``n_slices`` slices of ``n_rows`` rows of ``width_bytes`` bytes.

    The first byte of a side is ``base + x + y * pitch_bytes + z * slice_pitch_bytes``; x is in bytes, y in rows, z in
    slices. A pitch of 0 means contiguous: rows ``width_bytes`` apart, slices ``n_rows`` rows apart. With one slice, at
    z = 0, the slice pitch is not used and 0 is stored as 1, which is what rocm-xio writes for a tile.

    Raises PacketError for a zero extent, a null base, a field out of range, a pitch shorter than a row, or a window
    that passes 2**64; UnsupportedError on a generation without the packet.
    """
    if not generation.has_sub_window:
        raise UnsupportedError(
            f"{generation.name} has no large sub-window copy (sub-op 36); use one copy_linear per row instead"
        )
    dst_pitch = dst_pitch_bytes or width_bytes
    src_pitch = src_pitch_bytes or width_bytes
    dst_slice = dst_slice_pitch_bytes or (1 if n_slices == 1 and not dst_z else dst_pitch * n_rows)
    src_slice = src_slice_pitch_bytes or (1 if n_slices == 1 and not src_z else src_pitch * n_rows)
    least_pitch = 1 if n_rows == 1 else width_bytes
    dst_span = dst_x + width_bytes + (dst_y + n_rows - 1) * dst_pitch + (dst_z + n_slices - 1) * dst_slice
    src_span = src_x + width_bytes + (src_y + n_rows - 1) * src_pitch + (src_z + n_slices - 1) * src_slice
    if (
        min(dst_pitch, src_pitch) >= least_pitch
        and max(dst_slice, src_slice) <= _MAX_SLICE_PITCH
        and 0 < dst <= _U64 - dst_span + 1
        and 0 < src <= _U64 - src_span + 1
    ):
        try:  # pack itself refuses whatever does not fit 32 bits; a zero has become -1 here
            return _pack_sub_window(
                *(_SUB_WINDOW, src, src_x, src_y, src_z, src_pitch - 1, src_slice - 1),
                *(dst, dst_x, dst_y, dst_z, dst_pitch - 1, dst_slice - 1),
                *(width_bytes - 1, n_rows - 1, n_slices - 1),
            )
        except StructError:
            pass
    _refuse(
        "SUB_WINDOW",
        ("width_bytes", width_bytes, 1, _MAX_EXTENT, 1),
        ("n_rows", n_rows, 1, _MAX_EXTENT, 1),
        ("n_slices", n_slices, 1, _MAX_EXTENT, 1),
        ("dst_pitch_bytes", dst_pitch, least_pitch, _MAX_EXTENT, 1),
        ("src_pitch_bytes", src_pitch, least_pitch, _MAX_EXTENT, 1),
        ("dst_slice_pitch_bytes", dst_slice, 1, _MAX_SLICE_PITCH, 1),
        ("src_slice_pitch_bytes", src_slice, 1, _MAX_SLICE_PITCH, 1),
        ("dst_x", dst_x, 0, _U32, 1),
        ("dst_y", dst_y, 0, _U32, 1),
        ("dst_z", dst_z, 0, _U32, 1),
        ("src_x", src_x, 0, _U32, 1),
        ("src_y", src_y, 0, _U32, 1),
        ("src_z", src_z, 0, _U32, 1),
        ("dst", dst, 1, _U64 - dst_span + 1, 1),
        ("src", src, 1, _U64 - src_span + 1, 1),
    )


def poll_regmem(
    address: int,
    reference: int,
    mask: int = _U32,
    func: PollFunc = PollFunc.GREATER_EQUAL,
    interval: int = 10,
    retry_count: int = POLL_FOREVER,
) -> bytes:
    """Return one POLL_REGMEM on memory: wait until ``(u32 at address & mask) func reference``.

    ``interval`` is the pause between reads, 0..0xffff in the engine's own unit; ``retry_count`` the reads before the
    engine gives up and goes on, 0xfff meaning for ever. Raises PacketError for a null or not 4-byte-aligned address, or
    a field out of range.
    """
    if not (
        0 < address <= _U64
        and not address & 3
        and 0 <= reference <= _U32
        and 0 <= mask <= _U32
        and 0 <= func <= _MAX_FUNC
        and 0 <= interval <= _MAX_INTERVAL
        and 0 <= retry_count <= POLL_FOREVER
    ):
        _refuse(
            "POLL_REGMEM",
            ("address", address, 1, _U64, 4),
            ("reference", reference, 0, _U32, 1),
            ("mask", mask, 0, _U32, 1),
            ("func", func, 0, _MAX_FUNC, 1),
            ("interval", interval, 0, _MAX_INTERVAL, 1),
            ("retry_count", retry_count, 0, POLL_FOREVER, 1),
        )
    return _pack_poll(_POLL | func << _FUNC_SHIFT, address, reference, mask, interval | retry_count << _RETRY_SHIFT)


def atomic(
    address: int,
    op: AtomicOp,
    operand: int,
    compare: int = 0,
    width_bytes: int = 4,
    returns: bool = False,
    loop: bool = False,
    interval: int = 0,
) -> bytes:
    """Return one ATOMIC on the ``width_bytes`` (4 or 8) bytes at ``address``.

    ``operand`` and ``compare`` are unsigned and fit the width: write ``-1 & 0xffffffff`` to subtract one. ``compare``,
    ``loop`` (repeat until the comparison succeeds) and ``interval`` (pause between tries, 0..0x1fff in the engine's own
    unit) belong to CMPSWAP. ``returns`` only picks the returning form of the operation: the engine drops the old value.

    Raises ArgumentError for an operation or width that does not exist, or arguments that the operation ignores;
    PacketError for a null address, one that is not a multiple of ``width_bytes``, or a field out of range.
    """
    if op not in _ATOMIC_OPS or (width_bytes != 4 and width_bytes != 8):
        raise ArgumentError(
            f"atomic op={op!r} width_bytes={width_bytes} does not exist; op is an AtomicOp, width_bytes is 4 or 8"
        )
    if (loop or compare or interval) and (op != AtomicOp.CMPSWAP or interval and not loop):
        raise ArgumentError(
            f"atomic {AtomicOp(op).name} ignores compare={compare} loop={loop} interval={interval}; only CMPSWAP "
            "compares and loops, and interval needs loop=True"
        )
    limit = _U64 if width_bytes == 8 else _U32
    if not (
        0 < address <= _U64
        and not address & (width_bytes - 1)
        and 0 <= operand <= limit
        and 0 <= compare <= limit
        and 0 <= interval <= _MAX_LOOP_INTERVAL
    ):
        _refuse(
            "ATOMIC",
            ("address", address, 1, _U64, width_bytes),
            ("operand", operand, 0, limit, 1),
            ("compare", compare, 0, limit, 1),
            ("interval", interval, 0, _MAX_LOOP_INTERVAL, 1),
        )
    operation = op + (ATOMIC_64_BIT if width_bytes == 8 else 0) + (0 if returns else ATOMIC_NO_RETURN)
    header = _ATOMIC | operation << _OPERATION_SHIFT | (1 << _LOOP_SHIFT if loop else 0)
    return _pack_atomic(header, address, operand, compare, interval)


def fence(address: int, value: int, generation: Generation = GFX942) -> bytes:
    """Return one FENCE: store the 32-bit ``value`` at ``address`` after the copies before it on the queue have landed.

    Raises PacketError for a null or not 4-byte-aligned address, or a value over 32 bits.
    """
    if not (0 < address <= _U64 and not address & 3 and 0 <= value <= _U32):
        _refuse("FENCE", ("address", address, 1, _U64, 4), ("value", value, 0, _U32, 1))
    return _pack_fence(generation.fence_header, address, value)


def const_fill(address: int, value: int, nbytes: int, *, unit_bytes: int = 4, generation: Generation = GFX942) -> bytes:
    """Return one CONST_FILL of ``nbytes`` bytes with a dword (``unit_bytes=4``) or a byte (``unit_bytes=1``).

    The count is in bytes for both units. A byte is stored in all four lanes of the data dword, so that the bytes
    written do not depend on whether an engine reads the low lane or the whole dword. Raises ArgumentError for another
    unit; PacketError for an address or size that is zero or no multiple of the unit, a value over the unit, or a size
    over ``generation.max_fill_bytes``.
    """
    if unit_bytes not in _CONST_FILL:
        raise ArgumentError(f"const_fill unit_bytes={unit_bytes} does not exist; it is 1 or 4")
    limit = _U32 if unit_bytes == 4 else 0xFF
    if not (
        0 < nbytes <= generation.max_fill_bytes
        and 0 < address <= _U64 - nbytes + 1
        and not (address | nbytes) & (unit_bytes - 1)
        and 0 <= value <= limit
    ):
        _refuse(
            "CONST_FILL",
            ("nbytes", nbytes, 1, generation.max_fill_bytes, unit_bytes),
            ("address", address, 1, _U64 - nbytes + 1, unit_bytes),
            ("value", value, 0, limit, 1),
        )
    lanes = value if unit_bytes == 4 else value * 0x01010101
    return _pack_const_fill(_CONST_FILL[unit_bytes], address, lanes, nbytes - 1)


def trap(context: int) -> bytes:
    """Return one TRAP: an interrupt that carries the 28-bit ``context``. Raises PacketError if it does not fit."""
    if not 0 <= context <= _MAX_CONTEXT:
        _refuse("TRAP", ("context", context, 0, _MAX_CONTEXT, 1))
    return _pack_trap(_TRAP, context)


def timestamp(address: int) -> bytes:
    """Return one TIMESTAMP: store the 64-bit global clock (all engines share it) at ``address``.

    Raises PacketError for a null or not 8-byte-aligned address. ROCr uses only 32-byte-aligned ones.
    """
    if not 0 < address <= _U64 or address & 7:
        _refuse("TIMESTAMP", ("address", address, 1, _U64, 8))
    return _pack_timestamp(_TIMESTAMP, address)
