"""The kernel that combines operands on a GPU, element by element. One operand may lie in each rank's memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from iris_pg.platforms.compiled import KernelLaunch
from iris_pg.platforms.gpu import platform as gpu

BLOCK_BYTES = 1 << 15  # of each operand that a CTA has on the way at a time; so few CTAs read fast
_WARPS = 16
_WORD = 16  # bytes; the widest access

TYPES: dict[str, tuple[Any, Any]] = {
    "float32": (tl.float32, tl.float32),
    "float64": (tl.float64, tl.float64),
    "float16": (tl.float16, tl.float32),
    "bfloat16": (tl.bfloat16, tl.float32),
    "int32": (tl.int32, tl.int32),
    "int64": (tl.int64, tl.int64),
}
"""Element type -> what it is in memory, and in what it is combined."""

OPS: dict[str, int] = {"sum": 0, "avg": 1, "product": 2, "min": 3, "max": 4}


def _pointer(address, ELEMENT: tl.constexpr, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    # The hint is on the operation that makes the pointer; elsewhere it would be lost.
    return tl.multiple_of(tl.cast(address, tl.int64).to(tl.pointer_type(ELEMENT)), WORD)


# Made by hand, and not by triton.jit: that one makes something else where Triton's interpreter is on.
_pointer = JITFunction(_pointer)


def _part(  # type: ignore[no-untyped-def]
    dst,
    sources,
    index,
    mask,
    COUNT: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    OP: tl.constexpr,
    WORD: tl.constexpr,
):
    total = tl.load(_pointer(sources[0], ELEMENT, WORD) + index, mask=mask).to(WIDE)
    for i in tl.static_range(1, COUNT):
        other = tl.load(_pointer(sources[i], ELEMENT, WORD) + index, mask=mask).to(WIDE)
        if OP < 2:
            total = total + other
        elif OP == 2:
            total = total * other
        elif OP == 3:
            total = tl.minimum(total, other, propagate_nan=tl.PropagateNan.ALL)
        else:
            total = tl.maximum(total, other, propagate_nan=tl.PropagateNan.ALL)
    if OP == 1:
        if WIDE == tl.float32:
            total = tl.div_rn(total, tl.full(total.shape, COUNT, tl.float32))  # `/` is not rounded correctly
        else:
            total = total / COUNT
    tl.store(_pointer(dst, ELEMENT, WORD) + index, total.to(ELEMENT), mask=mask)


_part = JITFunction(_part)


def _combine(  # type: ignore[no-untyped-def]
    dst,
    sources,
    numel,
    COUNT: tl.constexpr,
    ELEMENT: tl.constexpr,
    WIDE: tl.constexpr,
    OP: tl.constexpr,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
):
    first, step = tl.program_id(0).to(tl.int64) * SIZE, tl.num_programs(0).to(tl.int64) * SIZE
    for start in range(first, numel, step):
        index = start + tl.arange(0, SIZE)
        if start + SIZE <= numel:  # without a mask, so that accesses are wide
            _part(dst, sources, index, None, COUNT, ELEMENT, WIDE, OP, WORD)
        else:
            _part(dst, sources, index, index < numel, COUNT, ELEMENT, WIDE, OP, WORD)


_combine = JITFunction(_combine)


def source_of(count: int, dtype: str, op: str, word: int) -> Any:
    """Return the kernel for ``count`` operands as Triton's compiler takes it.

    Args:
        dtype, op: of :data:`TYPES` and :data:`OPS`.
        word: what all addresses are multiples of, in bytes.
    """
    from triton.compiler import ASTSource

    element, wide = TYPES[dtype]
    size = BLOCK_BYTES // (element.primitive_bitwidth // 8)
    constants = dict(COUNT=count, ELEMENT=element, WIDE=wide, OP=OPS[op], WORD=word, SIZE=size)
    signature = dict(dst="i64", sources=("i64",) * count, numel="i64") | dict.fromkeys(constants, "constexpr")
    return ASTSource(fn=_combine, signature=signature, constexprs=constants)


def combine(
    device: torch.device, ctas: int, op: str, dtype: str, dst: int, sources: Sequence[int], nbytes: int
) -> gpu.Launch:
    """Return what combines the elements at ``sources``, in their order, into ``dst``, which may be one of them, with at
    most ``ctas`` CTAs.

    The kernel is compiled and loaded here, if it is new, also while a graph is captured.
    """
    size = TYPES[dtype][0].primitive_bitwidth // 8
    word = _WORD if all(address % _WORD == 0 for address in (dst, *sources)) else size
    numel = nbytes // size
    kernel = _loaded(device, len(sources), dtype, op, word)
    return KernelLaunch(kernel, min(-(-nbytes // BLOCK_BYTES), ctas), (dst, tuple(sources), numel)).call


@functools.cache
def _loaded(device: torch.device, count: int, dtype: str, op: str, word: int) -> Any:
    source = source_of(count, dtype, op, word)
    with torch.cuda.device(device), gpu.outside_of_capture():
        kernel = triton.compile(source, options=dict(num_warps=_WARPS))
        kernel._init_handles()
    return kernel


__all__ = ["BLOCK_BYTES", "OPS", "TYPES", "combine", "source_of"]
