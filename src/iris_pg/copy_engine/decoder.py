"""Decode AMD SDMA packets: from the little-endian dwords of a ring to one small object per packet.

This is the reading side, as the engine sees a packet (SDMA 4.4.2, gfx942). It is written from the field definitions
alone and shares no table, constant or enumeration with the encoder, so that each catches the other's mistakes. It is
strict: an unknown opcode, a bit that this engine does not act on, a null or misaligned address, a range past the end
of the address space or a packet past the end of what was submitted raises PacketError with the field and the dwords.
Called by the software copy engine once per packet, and by queue dumps.

Sources: amdgpu ``vega10_sdma_pkt_open.h`` (``SDMA_PKT_*``), with the 30-bit counts of ``sdma_v4_4_2.c``;
``sdma_v6_0_0_pkt_open.h`` ``SDMA_PKT_COPY_LINEAR_SUBWIN_LARGE``; operation codes ``TC_OP_ATOMIC_*``.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, TypeAlias

from iris_pg.copy_engine.decoded import (
    Atomic,
    Comparison,
    ConstFill,
    CopyLinear,
    CopySubWindow,
    Fence,
    Nop,
    Operation,
    Packet,
    PollRegMem,
    Timestamp,
    Trap,
)
from iris_pg.errors import PacketError

Words: TypeAlias = bytes | bytearray | memoryview

# --- Which bits are acted on -----------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A kind of packet: which bits of each dword this engine acts on, and the names of known bits that it does not."""

    name: str
    size_bytes: int
    live: tuple[int, ...]  # one mask per dword; every other bit must be zero
    dead: tuple[tuple[int, int, str], ...] = ()  # (dword, mask, name)

    def must_be_zero(self, dword: int) -> int:
        """Return the bits of a dword that this engine refuses when they are set."""
        return ~self.live[dword] & _ALL


_ALL = 0xFFFFFFFF
_OPCODE = 0x0000FFFF  # DW0: op in bits 7:0, sub_op in bits 15:8
_COUNT = 0x3FFFFFFF  # bytes minus one
_TMZ = (0, 1 << 18, "tmz")

_NOP = _Kind("NOP", 4, (_OPCODE | 0x3FFF0000,))
_COPY_LINEAR = _Kind(
    "COPY_LINEAR",
    28,
    (_OPCODE, _COUNT, 0, _ALL, _ALL, _ALL, _ALL),
    (
        (0, 1 << 16, "encrypt"),
        _TMZ,
        (0, 1 << 25, "backwards"),
        (0, 1 << 27, "broadcast"),
        (0, 1 << 28, "npd"),
        (2, 3 << 16, "dst_sw"),
        (2, 1 << 22, "dst_ha"),
        (2, 3 << 24, "src_sw"),
        (2, 1 << 30, "src_ha"),
    ),
)
_SUB_WINDOW = _Kind(
    "COPY_LINEAR_SUBWIN_LARGE",
    80,
    (_OPCODE, *[_ALL] * 7, 0xFFFF, *[_ALL] * 7, 0xFFFF, *[_ALL] * 3),
    (_TMZ, (16, 3 << 16, "dst_sw"), (16, 3 << 24, "src_sw")),
)
_FENCE = _Kind("FENCE", 16, (_OPCODE, _ALL, _ALL, _ALL), ((0, 7 << 16, "mtype"),))
_TRAP = _Kind("TRAP", 8, (_OPCODE, 0x0FFFFFFF))
_POLL = _Kind(
    "POLL_REGMEM",
    24,
    (_OPCODE | 0xF0000000, _ALL, _ALL, _ALL, _ALL, 0x0FFFFFFF),
    ((0, 1 << 26, "hdp_flush"), (5, 3 << 28, "scope")),
)
_ATOMIC = _Kind("ATOMIC", 32, (_OPCODE | 0xFE010000, *[_ALL] * 6, 0x1FFF), (_TMZ,))
_CONST_FILL = _Kind("CONST_FILL", 20, (_OPCODE | 0xC0000000, _ALL, _ALL, _ALL, _COUNT), ((0, 3 << 16, "sw"),))
_TIMESTAMP = _Kind("TIMESTAMP", 12, (_OPCODE, _ALL, _ALL))

_NOP_ZERO = _NOP.must_be_zero(0)
_POLL_ZERO, _POLL_DW5_ZERO = _POLL.must_be_zero(0), _POLL.must_be_zero(5)
_ATOMIC_ZERO, _ATOMIC_DW7_ZERO = _ATOMIC.must_be_zero(0), _ATOMIC.must_be_zero(7)
_FILL_ZERO, _FILL_DW4_ZERO = _CONST_FILL.must_be_zero(0), _CONST_FILL.must_be_zero(4)
_TRAP_DW1_ZERO = _TRAP.must_be_zero(1)
_MEM_POLL = 1 << 31
_LOOP = 1 << 16

# Operation code -> what it means. The four columns are RTN_32, RTN_64, 32 and 64 of TC_OP_ATOMIC_<name>.
_OPERATIONS: dict[int, tuple[Operation, int, bool]] = {}
for _name, _codes in {
    "SWAP": (0x07, 0x27, 0x47, 0x67),
    "CMPSWAP": (0x08, 0x28, 0x48, 0x68),
    "ADD": (0x0F, 0x2F, 0x4F, 0x6F),
    "SUB": (0x10, 0x30, 0x50, 0x70),
    "SMIN": (0x11, 0x31, 0x51, 0x71),
    "UMIN": (0x12, 0x32, 0x52, 0x72),
    "SMAX": (0x13, 0x33, 0x53, 0x73),
    "UMAX": (0x14, 0x34, 0x54, 0x74),
    "AND": (0x15, 0x35, 0x55, 0x75),
    "OR": (0x16, 0x36, 0x56, 0x76),
    "XOR": (0x17, 0x37, 0x57, 0x77),
    "INC": (0x18, 0x38, 0x58, 0x78),
    "DEC": (0x19, 0x39, 0x59, 0x79),
}.items():
    for _code, _width, _returns in zip(_codes, (4, 8, 4, 8), (True, True, False, False), strict=True):
        _OPERATIONS[_code] = (Operation[_name], _width, _returns)

_COMPARISONS = tuple(Comparison)  # indexed by func; 7 does not exist
_FILL_UNITS = {0: 1, 2: 4}  # CONSTANT_FILL_HEADER_fillsize -> bytes

# Names of the opcodes by number, for messages (SDMA_OP_*); 3 does not exist.
_OPCODE_NAMES = (
    *("NOP", "COPY", "WRITE", None, "INDIRECT", "FENCE", "TRAP", "SEM", "POLL_REGMEM", "COND_EXE", "ATOMIC"),
    *("CONST_FILL", "PTEPDE", "TIMESTAMP", "SRBM_WRITE", "PRE_EXE", "DUMMY_TRAP"),
)

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1

# --- Decoding --------------------------------------------------------------------------------------------------------
# Each decoder tests everything in one expression and calls _fault, which looks for the reason, only when that fails.

_unpack_dword = Struct("<I").unpack_from
_unpack_opcode = Struct("<H").unpack_from
_unpack_copy_linear = Struct("<IIIQQ").unpack_from
_unpack_sub_window = Struct("<IQIIIIQQIIIIQIII").unpack_from
_unpack_fence = Struct("<IQI").unpack_from
_unpack_trap = Struct("<II").unpack_from
_unpack_poll = Struct("<IQIII").unpack_from
_unpack_atomic = Struct("<IQQQI").unpack_from
_unpack_const_fill = Struct("<IQII").unpack_from
_unpack_timestamp = Struct("<IQ").unpack_from


def _fault(words: Words, offset: int, end: int, kind: _Kind, *rules: tuple[bool, str]) -> PacketError:
    """Return the error of a refused packet: past the end, else a dead bit, else the first rule that does not hold."""
    last = min(end, len(words), offset + kind.size_bytes)
    dwords = [_unpack_dword(words, at)[0] for at in range(offset, last - 3, 4)]
    why = next((text for holds, text in rules if not holds), "refused")
    for number, dword in enumerate(dwords):
        if wrong := dword & kind.must_be_zero(number):
            bit = wrong & -wrong
            name = next((name for at, mask, name in kind.dead if at == number and mask & bit), "reserved")
            why = f"DW{number} has bit {bit.bit_length() - 1} ({name}) set; it must be zero for this engine"
            break
    if offset + kind.size_bytes > end:
        why = f"is {kind.size_bytes} bytes long, but only {end - offset} are left before the end at {end:#x}"
    text = " ".join(f"{dword:08x}" for dword in dwords)
    return PacketError(f"SDMA {kind.name} packet at byte {offset:#x}: {why} [dwords {text}]")


def _nop(words: Words, offset: int, end: int) -> Nop:
    (header,) = _unpack_dword(words, offset)
    n_dwords = 1 + (header >> 16 & 0x3FFF)
    # A count must not carry the reader past what was submitted: it would read stale packets, or never stop.
    if header & _NOP_ZERO or offset + 4 * n_dwords > end:
        left = f"count skips to {offset + 4 * n_dwords:#x}, past the end at {end:#x}"
        raise _fault(words, offset, end, _NOP, (offset + 4 * n_dwords <= end, left))
    return Nop(n_dwords)


def _copy_linear(words: Words, offset: int, end: int) -> CopyLinear:
    header, count, parameter, src, dst = _unpack_copy_linear(words, offset)
    if (
        header != 0x1
        or parameter
        or count > _COUNT
        or not 0 < src <= _U64 - count
        or not 0 < dst <= _U64 - count
        or offset + 28 > end
    ):
        raise _fault(
            *(words, offset, end, _COPY_LINEAR),
            (0 < src <= _U64 - count, f"src {src:#x} is null, or {count + 1} bytes from it pass 2**64"),
            (0 < dst <= _U64 - count, f"dst {dst:#x} is null, or {count + 1} bytes from it pass 2**64"),
        )
    return CopyLinear(dst, src, count + 1)


def _sub_window(words: Words, offset: int, end: int) -> CopySubWindow:
    # The upper 16 bits of the two slice pitches are other fields; they must be zero, so they are tested as one number.
    header, *sides = _unpack_sub_window(words, offset)
    src, src_x, src_y, src_z, src_pitch, src_slice, dst, dst_x, dst_y, dst_z, dst_pitch, dst_slice = sides[:12]
    width, rows, slices = sides[12:]
    src_last = src + src_x + width + (src_y + rows) * (src_pitch + 1) + (src_z + slices) * (src_slice + 1)
    dst_last = dst + dst_x + width + (dst_y + rows) * (dst_pitch + 1) + (dst_z + slices) * (dst_slice + 1)
    if (
        header != 0x2401
        or (src_slice | dst_slice) >> 48
        or not src
        or not dst
        or src_last > _U64
        or dst_last > _U64
        or offset + 80 > end
    ):
        raise _fault(
            *(words, offset, end, _SUB_WINDOW),
            (0 < src and src_last <= _U64, f"src {src:#x} is null, or its window passes 2**64"),
            (0 < dst and dst_last <= _U64, f"dst {dst:#x} is null, or its window passes 2**64"),
        )
    return CopySubWindow(
        *(dst, src, width + 1, rows + 1, slices + 1),
        *(dst_pitch + 1, src_pitch + 1, dst_slice + 1, src_slice + 1),
        *(dst_x, dst_y, dst_z, src_x, src_y, src_z),
    )


def _fence(words: Words, offset: int, end: int) -> Fence:
    header, address, value = _unpack_fence(words, offset)
    if header != 0x5 or not address or address & 3 or offset + 16 > end:
        rule = (address > 0 and not address & 3, f"address {address:#x} is null or no multiple of 4")
        raise _fault(words, offset, end, _FENCE, rule)
    return Fence(address, value)


def _trap(words: Words, offset: int, end: int) -> Trap:
    header, context = _unpack_trap(words, offset)
    if header != 0x6 or context & _TRAP_DW1_ZERO or offset + 8 > end:
        raise _fault(words, offset, end, _TRAP)
    return Trap(context)


def _poll(words: Words, offset: int, end: int) -> PollRegMem:
    header, address, reference, mask, timing = _unpack_poll(words, offset)
    func = header >> 28 & 7
    if (
        header & _POLL_ZERO
        or header < _MEM_POLL
        or func > 6
        or timing & _POLL_DW5_ZERO
        or not address
        or address & 3
        or offset + 24 > end
    ):
        raise _fault(
            *(words, offset, end, _POLL),
            (header >= _MEM_POLL, "DW0 mem_poll is 0: this engine has no registers to poll, only memory"),
            (func <= 6, f"DW0 func is {func}; allowed is 0..6"),
            (address > 0 and not address & 3, f"address {address:#x} is null or no multiple of 4"),
        )
    return PollRegMem(address, reference, mask, _COMPARISONS[func], timing & 0xFFFF, timing >> 16)


def _atomic(words: Words, offset: int, end: int) -> Atomic:
    header, address, operand, compare, interval = _unpack_atomic(words, offset)
    op, width, returns = _OPERATIONS.get(header >> 25, (None, 4, False))
    if (
        header & _ATOMIC_ZERO
        or op is None
        or interval & _ATOMIC_DW7_ZERO
        or (header & _LOOP and op is not Operation.CMPSWAP)
        or not address
        or address & (width - 1)
        or (width == 4 and (operand | compare) > _U32)
        or offset + 32 > end
    ):
        raise _fault(
            *(words, offset, end, _ATOMIC),
            (op is not None, f"DW0 operation {header >> 25} does not exist"),
            (not header & _LOOP or op is Operation.CMPSWAP, "DW0 loop is set, but only CMPSWAP has a comparison"),
            (address > 0 and not address & (width - 1), f"address {address:#x} is null or no multiple of {width}"),
            (width == 8 or (operand | compare) <= _U32, f"data {operand:#x} or {compare:#x} is over 32 bits"),
        )
    return Atomic(address, op, operand, compare, width, returns, header & _LOOP != 0, interval)


def _const_fill(words: Words, offset: int, end: int) -> ConstFill:
    header, address, value, count = _unpack_const_fill(words, offset)
    unit = _FILL_UNITS.get(header >> 30, 0)
    # The count is in bytes, minus one, for dwords too; the engine ignores its low two bits then. The kernel and Mesa
    # write nbytes - 1 and ROCr nbytes - 4: both are read, a count that means neither is not.
    nbytes = (count | 3) + 1 if unit == 4 else count + 1
    is_whole = unit != 4 or count & 3 in (0, 3)
    is_byte = unit != 1 or value == (value & 0xFF) * 0x01010101  # else it depends on the engine which lane is used
    if (
        header & _FILL_ZERO
        or not unit
        or count & _FILL_DW4_ZERO
        or not is_whole
        or not is_byte
        or not 0 < address <= _U64 - nbytes + 1
        or address & (unit - 1)
        or offset + 20 > end
    ):
        in_range = 0 < address <= _U64 - nbytes + 1 and not address & (unit - 1)
        raise _fault(
            *(words, offset, end, _CONST_FILL),
            (unit > 0, f"DW0 fillsize {header >> 30} does not exist; allowed is 0 (byte) and 2 (dword)"),
            (is_whole, f"DW4 count {count} is not a whole number of dwords"),
            (is_byte, f"DW3 value {value:#010x} of a byte fill must hold the byte in all four lanes"),
            (in_range, f"address {address:#x} is null, no multiple of {unit}, or {nbytes} bytes from it pass 2**64"),
        )
    return ConstFill(address, value if unit == 4 else value & 0xFF, nbytes, unit)


def _timestamp(words: Words, offset: int, end: int) -> Timestamp:
    header, address = _unpack_timestamp(words, offset)
    if header != 0x20D or not address or address & 7 or offset + 12 > end:
        rule = (address > 0 and not address & 7, f"address {address:#x} is null or no multiple of 8")
        raise _fault(words, offset, end, _TIMESTAMP, rule)
    return Timestamp(address)


# DW0[15:0] (sub_op << 8 | op) -> how to read the packet.
_DECODERS: dict[int, tuple[_Kind, Callable[[Words, int, int], Packet]]] = {
    0x0000: (_NOP, _nop),
    0x0001: (_COPY_LINEAR, _copy_linear),
    0x2401: (_SUB_WINDOW, _sub_window),
    0x0005: (_FENCE, _fence),
    0x0006: (_TRAP, _trap),
    0x0008: (_POLL, _poll),
    0x000A: (_ATOMIC, _atomic),
    0x000B: (_CONST_FILL, _const_fill),
    0x020D: (_TIMESTAMP, _timestamp),
}
_READ = {code: reader for code, (_, reader) in _DECODERS.items()}


def decode(words: Words, offset: int = 0, end: int | None = None) -> Packet:
    """Return the packet that starts at byte ``offset`` of ``words``.

    Args:
        words: contiguous bytes of the ring (a memoryview must have format ``B``).
        offset: where the packet starts, in bytes, a multiple of 4.
        end: first byte that was not submitted (doorbell, or end of the ring); by default ``len(words)``. The packet
            must end at or before it, a NOP with all that it skips.

    Raises PacketError for anything that is not a well-formed packet of this engine. Takes about 1 us.
    """
    if end is None:
        end = len(words)
    if offset & 3 or not 0 <= offset <= end - 4 or end > len(words):
        raise PacketError(
            f"no SDMA packet can start at byte {offset:#x} of {len(words):#x} with the end at {end:#x}; offset must be "
            "a multiple of 4 with at least 4 bytes left"
        )
    (code,) = _unpack_opcode(words, offset)
    read = _READ.get(code)
    if read is None:
        raise _unknown(words, offset, code)
    try:
        return read(words, offset, end)
    except StructError:  # the packet goes on past the buffer itself
        raise _fault(words, offset, end, _DECODERS[code][0]) from None


def _unknown(words: Words, offset: int, code: int) -> PacketError:
    op, sub_op = code & 0xFF, code >> 8
    name = _OPCODE_NAMES[op] if op < len(_OPCODE_NAMES) else None
    what = f"({name}) is not done by this engine" if name else "does not exist"
    (dword,) = _unpack_dword(words, offset)
    return PacketError(f"SDMA packet at byte {offset:#x}: op {op} sub_op {sub_op} {what} [dwords {dword:08x}]")
