"""What differs between generations of AMD's SDMA engines: limits of sizes, and fields that exist or do not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from iris_pg.copy_engine.layout import header
from iris_pg.errors import UnsupportedError

_MTYPE_UNCACHED = 3  # SDMA_PKT_FENCE_HEADER_MTYPE(0x3) in sdma_v5_0_ring_emit_fence and later
_SCOPE_SYSTEM = 3  # ROCr SDMA_MEMORY_SCOPE_SYS
_SPLIT_SLACK = 32  # a full packet is this much shorter than the limit, so that chunks keep a 32-byte alignment


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
        return header("FENCE", mtype=mtype, scope=_SCOPE_SYSTEM if self.fence_has_scope else 0)


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
