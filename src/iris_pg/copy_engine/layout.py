"""The layouts of AMD SDMA packets, as tables: what packets.py writes, and where addresses are patched in afterwards.

Sources: the amdgpu kernel headers ``vega10_sdma_pkt_open.h`` (SDMA 4.x, also used by ``sdma_v4_4_2.c``),
``navi10_sdma_pkt_open.h``, ``sdma_v6_0_0_pkt_open.h``, ``sdma_v7_1_0_pkt_open.h``, and ROCr ``sdma_registers.h``.
The decoder of the software engine is written separately and shares nothing with this file.
"""

from __future__ import annotations

from dataclasses import dataclass


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

FIELD = {(f.packet, f.name): f for f in FIELDS}


def field_table() -> str:
    """Return the layouts as a Markdown table, for the documentation."""
    rows = ["| packet | op, sub_op | dword | bits | field | stored | source |", "|---|---|---|---|---|---|---|"]
    for f in FIELDS:
        layout, stored = LAYOUTS[f.packet], "value - 1" if f.minus_one else "value"
        at = f"{f.dword} | {f.high}:{f.low} | {f.name} | {stored}"
        rows.append(f"| {f.packet} | {layout.op}, {layout.sub_op} | {at} | SDMA_PKT_{f.source} |")
    return "\n".join(rows)


def size_of(packet: str) -> int:
    """Return the length of a packet in bytes."""
    return 4 * LAYOUTS[packet].n_dwords


def offset_of(packet: str, field: str) -> int:
    """Return where the dword in which a field begins lies, in bytes from the start of its packet."""
    return 4 * FIELD[packet, field].dword


def largest(packet: str, field: str) -> int:
    """Return the largest value of a field."""
    return FIELD[packet, field].max_value


def header(packet: str, **values: int) -> int:
    """Return DW0: opcode, sub-opcode, and the given DW0 fields."""
    dword = LAYOUTS[packet].op | LAYOUTS[packet].sub_op << 8
    for name, value in values.items():
        dword |= value << FIELD[packet, name].low
    return dword


# Lengths in bytes.
COPY_LINEAR_BYTES = size_of("COPY_LINEAR")
SUB_WINDOW_BYTES = size_of("SUB_WINDOW")
FENCE_BYTES = size_of("FENCE")
TRAP_BYTES = size_of("TRAP")
POLL_BYTES = size_of("POLL_REGMEM")
ATOMIC_BYTES = size_of("ATOMIC")
CONST_FILL_BYTES = size_of("CONST_FILL")
TIMESTAMP_BYTES = size_of("TIMESTAMP")

# Byte offsets, from the start of a packet, of what a template gets patched with. Addresses are 64-bit, sizes and values
# 32-bit, all little-endian. Remember that a patched size is stored minus one.
COPY_LINEAR_NBYTES_OFFSET = offset_of("COPY_LINEAR", "nbytes")
COPY_LINEAR_SRC_OFFSET = offset_of("COPY_LINEAR", "src")
COPY_LINEAR_DST_OFFSET = offset_of("COPY_LINEAR", "dst")
SUB_WINDOW_SRC_OFFSET = offset_of("SUB_WINDOW", "src")
SUB_WINDOW_DST_OFFSET = offset_of("SUB_WINDOW", "dst")
FENCE_ADDRESS_OFFSET = offset_of("FENCE", "address")
FENCE_VALUE_OFFSET = offset_of("FENCE", "value")
POLL_ADDRESS_OFFSET = offset_of("POLL_REGMEM", "address")
POLL_REFERENCE_OFFSET = offset_of("POLL_REGMEM", "reference")
ATOMIC_ADDRESS_OFFSET = offset_of("ATOMIC", "address")
ATOMIC_OPERAND_OFFSET = offset_of("ATOMIC", "operand")
CONST_FILL_ADDRESS_OFFSET = offset_of("CONST_FILL", "address")
TIMESTAMP_ADDRESS_OFFSET = offset_of("TIMESTAMP", "address")

NOP_MAX_DWORDS = 1 + largest("NOP", "count")  # 16384 dwords, 64 KiB
POLL_FOREVER = largest("POLL_REGMEM", "retry_count")  # 0xfff: the engine never gives up
