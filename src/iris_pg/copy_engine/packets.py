"""Encode AMD SDMA packets: pure functions from numbers to the little-endian dwords of one packet.

Owns the byte layout of every packet this package writes into a ring, and the differences between hardware generations.
Guarantees that no packet leaves here with a zero size (stored minus one, it would encode as the *largest* size), a
misaligned address, or a value that spills out of its field. Does no I/O and keeps no state. Called by the rings, by the
engines that write packets, and by code that prepares templates and patches addresses in place (``*_OFFSET`` below).

Sources: layouts from the amdgpu kernel headers ``vega10_sdma_pkt_open.h`` (SDMA 4.x, also used by ``sdma_v4_4_2.c``),
``navi10_sdma_pkt_open.h``, ``sdma_v6_0_0_pkt_open.h``, ``sdma_v7_1_0_pkt_open.h`` and from ROCr ``sdma_registers.h``.
The decoder of the software engine is written separately and shares nothing with this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from struct import Struct
from struct import error as StructError
from typing import NoReturn

from iris_pg.errors import ArgumentError, PacketError, UnsupportedError

# --- The layout tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """One kind of packet: opcode (DW0[7:0]), sub-opcode (DW0[15:8]) and length; NOP is the shortest form."""

    name: str
    op: int
    sub_op: int
    n_dwords: int
    source: str  # op and sub-op symbols


@dataclass(frozen=True)
class Field:
    """One field of a packet: bits ``high..low`` counted from bit 0 of ``dword`` (a 64-bit field spans two dwords)."""

    packet: str
    name: str
    dword: int
    high: int
    low: int
    source: str  # symbol, without the prefix SDMA_PKT_
    minus_one: bool = False  # the value minus one is stored

    @property
    def n_bits(self) -> int:
        """Width in bits."""
        return self.high - self.low + 1

    @property
    def max_value(self) -> int:
        """Largest value the field can hold, after undoing "minus one"."""
        return (1 << self.n_bits) - 1 + self.minus_one


LAYOUTS: dict[str, Layout] = {
    row.name: row
    for row in (
        Layout("NOP", 0, 0, 1, "SDMA_OP_NOP"),
        Layout("COPY_LINEAR", 1, 0, 7, "SDMA_OP_COPY, SDMA_SUBOP_COPY_LINEAR"),
        Layout("SUB_WINDOW", 1, 36, 20, "SDMA_OP_COPY, SDMA_SUBOP_COPY_LINEAR_SUB_WIND_LARGE"),
        Layout("FENCE", 5, 0, 4, "SDMA_OP_FENCE"),
        Layout("TRAP", 6, 0, 2, "SDMA_OP_TRAP"),
        Layout("POLL_REGMEM", 8, 0, 6, "SDMA_OP_POLL_REGMEM"),
        Layout("ATOMIC", 10, 0, 8, "SDMA_OP_ATOMIC"),
        Layout("CONST_FILL", 11, 0, 5, "SDMA_OP_CONST_FILL"),
        Layout("TIMESTAMP", 13, 2, 3, "SDMA_OP_TIMESTAMP, SDMA_SUBOP_TIMESTAMP_GET_GLOBAL"),
    )
}

# Bits that no row names are written as zero. The count of a NOP is the number of dwords that *follow* the header, so a
# NOP of N dwords in total stores N - 1, yet the field is not "minus one".
FIELDS: tuple[Field, ...] = (
    Field("NOP", "count", 0, 29, 16, "NOP_HEADER_count"),
    Field("COPY_LINEAR", "nbytes", 1, 29, 0, "COPY_LINEAR_COUNT_count", minus_one=True),  # 22 bits before SDMA 4.4
    Field("COPY_LINEAR", "src", 3, 63, 0, "COPY_LINEAR_SRC_ADDR_LO_src_addr_31_0"),
    Field("COPY_LINEAR", "dst", 5, 63, 0, "COPY_LINEAR_DST_ADDR_LO_dst_addr_31_0"),
    Field("SUB_WINDOW", "src", 1, 63, 0, "COPY_LINEAR_SUBWIN_LARGE_SRC_ADDR_LO_src_addr_31_0"),
    Field("SUB_WINDOW", "src_x", 3, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_3_src_x"),
    Field("SUB_WINDOW", "src_y", 4, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_4_src_y"),
    Field("SUB_WINDOW", "src_z", 5, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_5_src_z"),
    Field("SUB_WINDOW", "src_pitch_bytes", 6, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_6_src_pitch", minus_one=True),
    Field("SUB_WINDOW", "src_slice_pitch_bytes", 7, 47, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_7_src_slice_pitch", True),
    Field("SUB_WINDOW", "dst", 9, 63, 0, "COPY_LINEAR_SUBWIN_LARGE_DST_ADDR_LO_dst_addr_31_0"),
    Field("SUB_WINDOW", "dst_x", 11, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_11_dst_x"),
    Field("SUB_WINDOW", "dst_y", 12, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_12_dst_y"),
    Field("SUB_WINDOW", "dst_z", 13, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_13_dst_z"),
    Field("SUB_WINDOW", "dst_pitch_bytes", 14, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_14_dst_pitch", minus_one=True),
    Field("SUB_WINDOW", "dst_slice_pitch_bytes", 15, 47, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_15_dst_slice_pitch", True),
    Field("SUB_WINDOW", "width_bytes", 17, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_17_rect_x", minus_one=True),
    Field("SUB_WINDOW", "n_rows", 18, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_18_rect_y", minus_one=True),
    Field("SUB_WINDOW", "n_slices", 19, 31, 0, "COPY_LINEAR_SUBWIN_LARGE_DW_19_rect_z", minus_one=True),
    Field("FENCE", "mtype", 0, 18, 16, "FENCE_HEADER_mtype"),  # SDMA 5.0 on; two bits, [17:16], from gfx12 on
    Field("FENCE", "scope", 0, 25, 24, "FENCE_GFX12 HEADER_UNION.scope (ROCr)"),  # gfx1250
    Field("FENCE", "address", 1, 63, 0, "FENCE_ADDR_LO_addr_31_0"),
    Field("FENCE", "value", 3, 31, 0, "FENCE_DATA_data"),
    Field("TRAP", "context", 1, 27, 0, "TRAP_INT_CONTEXT_int_context"),
    Field("POLL_REGMEM", "func", 0, 30, 28, "POLL_REGMEM_HEADER_func"),
    Field("POLL_REGMEM", "mem_poll", 0, 31, 31, "POLL_REGMEM_HEADER_mem_poll"),
    Field("POLL_REGMEM", "address", 1, 63, 0, "POLL_REGMEM_ADDR_LO_addr_31_0"),
    Field("POLL_REGMEM", "reference", 3, 31, 0, "POLL_REGMEM_VALUE_value"),
    Field("POLL_REGMEM", "mask", 4, 31, 0, "POLL_REGMEM_MASK_mask"),
    Field("POLL_REGMEM", "interval", 5, 15, 0, "POLL_REGMEM_DW5_interval"),
    Field("POLL_REGMEM", "retry_count", 5, 27, 16, "POLL_REGMEM_DW5_retry_count"),
    Field("ATOMIC", "loop", 0, 16, 16, "ATOMIC_HEADER_loop"),
    Field("ATOMIC", "operation", 0, 31, 25, "ATOMIC_HEADER_atomic_op"),
    Field("ATOMIC", "address", 1, 63, 0, "ATOMIC_ADDR_LO_addr_31_0"),
    Field("ATOMIC", "operand", 3, 63, 0, "ATOMIC_SRC_DATA_LO_src_data_31_0"),
    Field("ATOMIC", "compare", 5, 63, 0, "ATOMIC_CMP_DATA_LO_cmp_data_31_0"),
    Field("ATOMIC", "interval", 7, 12, 0, "ATOMIC_LOOP_INTERVAL_loop_interval"),
    Field("CONST_FILL", "fillsize", 0, 31, 30, "CONSTANT_FILL_HEADER_fillsize"),
    Field("CONST_FILL", "address", 1, 63, 0, "CONSTANT_FILL_DST_ADDR_LO_dst_addr_31_0"),
    Field("CONST_FILL", "value", 3, 31, 0, "CONSTANT_FILL_DATA_src_data_31_0"),
    Field("CONST_FILL", "nbytes", 4, 29, 0, "CONSTANT_FILL_COUNT_count", minus_one=True),  # 22 bits on older ones
    Field("TIMESTAMP", "address", 1, 63, 0, "TIMESTAMP_GET_GLOBAL_WRITE_ADDR_LO_write_addr_31_3"),
)

_FIELD = {(f.packet, f.name): f for f in FIELDS}


def field_table() -> str:
    """Return the layouts as a Markdown table, for the documentation."""
    rows = ["| packet | op, sub_op | dword | bits | field | stored | source |", "|---|---|---|---|---|---|---|"]
    for f in FIELDS:
        layout, stored = LAYOUTS[f.packet], "value - 1" if f.minus_one else "value"
        at = f"{f.dword} | {f.high}:{f.low} | {f.name} | {stored}"
        rows.append(f"| {f.packet} | {layout.op}, {layout.sub_op} | {at} | SDMA_PKT_{f.source} |")
    return "\n".join(rows)


def _size(packet: str) -> int:
    return 4 * LAYOUTS[packet].n_dwords


def _offset(packet: str, field: str) -> int:
    return 4 * _FIELD[packet, field].dword


def _max(packet: str, field: str) -> int:
    return _FIELD[packet, field].max_value


def _header(packet: str, **values: int) -> int:
    """Return DW0: opcode, sub-opcode, and the given DW0 fields."""
    dword = LAYOUTS[packet].op | LAYOUTS[packet].sub_op << 8
    for name, value in values.items():
        dword |= value << _FIELD[packet, name].low
    return dword


# Lengths in bytes.
COPY_LINEAR_BYTES = _size("COPY_LINEAR")
SUB_WINDOW_BYTES = _size("SUB_WINDOW")
FENCE_BYTES = _size("FENCE")
TRAP_BYTES = _size("TRAP")
POLL_BYTES = _size("POLL_REGMEM")
ATOMIC_BYTES = _size("ATOMIC")
CONST_FILL_BYTES = _size("CONST_FILL")
TIMESTAMP_BYTES = _size("TIMESTAMP")

# Byte offsets, from the start of a packet, of what a template gets patched with. Addresses are 64-bit, sizes and values
# 32-bit, all little-endian. Remember that a patched size is stored minus one.
COPY_LINEAR_NBYTES_OFFSET = _offset("COPY_LINEAR", "nbytes")
COPY_LINEAR_SRC_OFFSET = _offset("COPY_LINEAR", "src")
COPY_LINEAR_DST_OFFSET = _offset("COPY_LINEAR", "dst")
SUB_WINDOW_SRC_OFFSET = _offset("SUB_WINDOW", "src")
SUB_WINDOW_DST_OFFSET = _offset("SUB_WINDOW", "dst")
FENCE_ADDRESS_OFFSET = _offset("FENCE", "address")
FENCE_VALUE_OFFSET = _offset("FENCE", "value")
POLL_ADDRESS_OFFSET = _offset("POLL_REGMEM", "address")
POLL_REFERENCE_OFFSET = _offset("POLL_REGMEM", "reference")
ATOMIC_ADDRESS_OFFSET = _offset("ATOMIC", "address")
ATOMIC_OPERAND_OFFSET = _offset("ATOMIC", "operand")
CONST_FILL_ADDRESS_OFFSET = _offset("CONST_FILL", "address")
TIMESTAMP_ADDRESS_OFFSET = _offset("TIMESTAMP", "address")

NOP_MAX_DWORDS = 1 + _max("NOP", "count")  # 16384 dwords, 64 KiB
POLL_FOREVER = _max("POLL_REGMEM", "retry_count")  # 0xfff: the engine never gives up


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
_MTYPE_UNCACHED = 3  # SDMA_PKT_FENCE_HEADER_MTYPE(0x3) in sdma_v5_0_ring_emit_fence and later
_SCOPE_SYSTEM = 3  # ROCr SDMA_MEMORY_SCOPE_SYS
_SPLIT_SLACK = 32  # a full packet is this much shorter than the limit, so that chunks keep a 32-byte alignment


# --- Generations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """What differs between hardware generations for the packets above. One row of ``GENERATIONS``."""

    name: str  # prefix of the names of the architectures: gfx125 stands for gfx1250 and gfx1251
    sdma: str  # version of the SDMA block
    linear_count_bits: int  # COPY_LINEAR nbytes
    fill_count_bits: int  # CONST_FILL nbytes
    fence_mtype_bits: int  # 0: FENCE has no mtype field; else it must ask for an uncached write
    fence_has_scope: bool
    has_sub_window: bool  # the 20-dword sub-window copy (sub-op 36)
    min_submit_bytes: int  # shorter submissions must be padded with NOPs
    poll_can_return_early: bool  # POLL_REGMEM can pass before its condition holds: poll twice
    source: str

    @cached_property
    def max_linear_bytes(self) -> int:
        """Largest COPY_LINEAR, in bytes."""
        return 1 << self.linear_count_bits

    @cached_property
    def max_fill_bytes(self) -> int:
        """Largest CONST_FILL, in bytes."""
        return 1 << self.fill_count_bits

    @cached_property
    def split_bytes(self) -> int:
        """Bytes per packet of a copy that is split: 0x3fffffe0 or 0x3fffe0 (ROCr ``kMaxSize_``)."""
        return self.max_linear_bytes - _SPLIT_SLACK

    @cached_property
    def fence_header(self) -> int:
        """DW0 of FENCE."""
        mtype = _MTYPE_UNCACHED if self.fence_mtype_bits else 0
        return _header("FENCE", mtype=mtype, scope=_SCOPE_SYSTEM if self.fence_has_scope else 0)


# Columns as in Generation. The count widths are SDMA_PKT_COPY_LINEAR_COUNT_count_mask, overridden by copy_max_bytes and
# fill_max_bytes where a driver reuses an older header (sdma_v4_0.c for 4.4, sdma_v4_4_2.c).
GENERATIONS: dict[str, Generation] = {
    row.name: row
    for row in (
        Generation("gfx908", "4.2", 22, 22, 0, False, False, 256, True, "vega10_sdma_pkt_open.h"),
        Generation("gfx90a", "4.4", 30, 30, 0, False, False, 0, False, "sdma_v4_0.c sdma_v4_4_buffer_funcs"),
        Generation("gfx942", "4.4.2", 30, 30, 0, False, True, 0, False, "sdma_v4_4_2.c; rocm-xio for sub-op 36"),
        Generation("gfx950", "4.4.5", 30, 30, 0, False, True, 0, False, "sdma_v4_4_2.c; rocm-xio for sub-op 36"),
        Generation("gfx10", "5.x", 30, 22, 3, False, False, 0, False, "navi10_sdma_pkt_open.h"),
        Generation("gfx11", "6.x", 30, 30, 3, False, True, 0, False, "sdma_v6_0_0_pkt_open.h"),
        Generation("gfx12", "7.0", 30, 30, 2, False, True, 0, False, "sdma_v7_0.c; ROCr SDMA_PKT_FENCE_GFX12"),
        Generation("gfx125", "7.1", 30, 30, 2, True, True, 0, False, "sdma_v7_1_0_pkt_open.h; ROCr scope fields"),
    )
}
GFX942 = GENERATIONS["gfx942"]  # what the software engine implements


def generation_of(arch: str) -> Generation:
    """Return the row for an architecture name such as ``gfx942:sramecc+:xnack-``.

    Raises UnsupportedError if no row covers it.
    """
    target = arch.partition(":")[0]
    known = [row for row in GENERATIONS.values() if target.startswith(row.name)]
    if not known:
        raise UnsupportedError(f"no SDMA packet layouts for {arch!r}; known are {', '.join(GENERATIONS)}")
    return max(known, key=lambda row: len(row.name))


# --- Encoders --------------------------------------------------------------------------------------------------------
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

_COPY_LINEAR = _header("COPY_LINEAR")
_SUB_WINDOW = _header("SUB_WINDOW")
_TRAP = _header("TRAP")
_POLL = _header("POLL_REGMEM", mem_poll=1)
_ATOMIC = _header("ATOMIC")
_TIMESTAMP = _header("TIMESTAMP")
_CONST_FILL = {unit_bytes: _header("CONST_FILL", fillsize=code) for unit_bytes, code in _FILLSIZE.items()}

_FUNC_SHIFT = _FIELD["POLL_REGMEM", "func"].low
_RETRY_SHIFT = _FIELD["POLL_REGMEM", "retry_count"].low
_OPERATION_SHIFT = _FIELD["ATOMIC", "operation"].low
_LOOP_SHIFT = _FIELD["ATOMIC", "loop"].low
_COUNT_SHIFT = _FIELD["NOP", "count"].low

_MAX_FUNC = max(PollFunc)
_MAX_INTERVAL = _max("POLL_REGMEM", "interval")
_MAX_LOOP_INTERVAL = _max("ATOMIC", "interval")
_MAX_CONTEXT = _max("TRAP", "context")
_MAX_EXTENT = _max("SUB_WINDOW", "width_bytes")  # also rows, slices, pitches
_MAX_SLICE_PITCH = _max("SUB_WINDOW", "dst_slice_pitch_bytes")
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
