"""Reductions on a GPU: what a :class:`iris_pg.program.Reduce` does, on addresses that the GPU can access.

One kernel (combine.py) reads the operands of the types that are added all the time from where they are, a peer's memory
too, and writes the result. For other types torch's kernels do it step by step. Both give what reduction.py gives on a
CPU: operands come in one order, narrow floats are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from iris_pg.copy_engine import combine
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.reduce_ops import check

_BLOCK_BYTES = 64 << 20  # of what is accumulated at a time, since the accumulator takes memory

_WIDER = {
    "float16": torch.float32,
    "bfloat16": torch.float32,
    "float8_e4m3fn": torch.float32,
    "float8_e5m2": torch.float32,
    "float8_e4m3fnuz": torch.float32,
    "float8_e5m2fnuz": torch.float32,
    "complex32": torch.complex64,
}
_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}  # torch adds none of these on a GPU
_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OF_BOOL = {"sum": torch.bitwise_or, "max": torch.bitwise_or, "product": torch.bitwise_and, "min": torch.bitwise_and}


def reduction(
    device: torch.device, ctas: int, op: str, dtype: str, dst: int, sources: tuple[int, ...], nbytes: int
) -> gpu.Launch:
    """Return what sets each element at ``dst`` to ``op`` over those at ``sources``, in the order given, on a stream.

    Args:
        ctas: most CTAs of the one kernel; torch's kernels, for other types, take as many as they like.
        op, dtype: as in :class:`iris_pg.program.Reduce`.
        dst, sources: addresses; ``dst`` may be some of ``sources``, and overlaps none in part.
        nbytes: bytes of the result, and of each operand; whole elements.

    Raises:
        ArgumentError: ``op`` does not take ``dtype``.
    """
    check(op, dtype)
    if op in ("sum", "avg"):
        dtype = _REAL.get(dtype, dtype)
    if op in combine.OPS and dtype in combine.TYPES and (op != "avg" or dtype.startswith(("float", "bfloat"))):
        return combine.combine(device, ctas, op, dtype, dst, sources, nbytes)
    element = _SIGNED.get(dtype, getattr(torch, dtype))
    step = (_OPS | _OF_BOOL if dtype == "bool" else _OPS)[op]
    is_flipped = dtype in _SIGNED and op in ("min", "max")  # unsigned order, from signed comparisons
    blocks = [
        (tuple(address + start for address in (dst, *sources)), min(_BLOCK_BYTES, nbytes - start))
        for start in range(0, nbytes, _BLOCK_BYTES)
    ]

    def launch(stream: Any) -> None:
        on = torch.cuda.ExternalStream(int(stream), device) if int(stream) else torch.cuda.default_stream(device)
        with torch.inference_mode(), torch.cuda.stream(on):
            for addresses, size in blocks:
                into, first, *others = (gpu.view(device, address, size, element) for address in addresses)
                wide = _WIDER.get(dtype, element)
                flip = torch.iinfo(wide).min if is_flipped else 0
                total = first ^ flip if is_flipped else first.to(wide, copy=True)
                for other in others:
                    step(total, other ^ flip if is_flipped else other.to(wide), out=total)
                if op == "avg":
                    total = _divided(total, len(sources), dtype)
                into.copy_(total ^ flip if is_flipped else total)

    return launch


def _divided(total: torch.Tensor, count: int, dtype: str) -> torch.Tensor:
    """Return ``total / count``; what is left of integers is dropped."""
    if total.is_floating_point():
        return total.div_(torch.full((), count, dtype=total.dtype, device=total.device))
    if dtype == "uint64":
        # Signed division of half the number, and what is missing: the remainder is less than 2 * count.
        half = (total >> 1) & torch.iinfo(torch.int64).max
        quotient = torch.div(half, count, rounding_mode="floor") * 2
        return quotient + (total - quotient * count >= count)
    if dtype in _SIGNED:
        total = total.to(torch.int64) & (2 ** (8 * total.element_size()) - 1)
    return torch.div(total.to(torch.int64), count, rounding_mode="trunc")


__all__ = ["reduction"]
