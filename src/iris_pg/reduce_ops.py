"""torch's reduction operations: what each one does to elements, and which element types it takes.

Pure; collectives call :func:`reduction` before any byte moves.

What an operation does is the same for every engine:

- bool: SUM and MAX are "or", PRODUCT and MIN are "and", bitwise operations are themselves.
- integers wrap around. AVG divides the wrapped sum and drops the fraction (toward zero), as NCCL does.
- 16-bit and 8-bit floating point is accumulated in float32, complex32 in complex64, and rounded once.
- AVG divides the sum before it is rounded, where NCCL multiplies each operand by 1/world and rounds that.
- MIN and MAX of a NaN and anything are NaN, as in ``torch.minimum``; NCCL takes the other one.
- PREMUL_SUM multiplies each rank's operand by that rank's factor, rounds, and adds. NCCL can do that to integers, but
  torch lets it only have floating point, and so does this.

``dist.all_reduce`` and its like hand complex tensors over as real ones with twice the elements, and refuse PRODUCT.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from iris_pg.errors import ArgumentError

_FLOATS = ("float32", "float64", "float16", "bfloat16")
_FLOATS_8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_COMPLEX = ("complex64", "complex128", "complex32")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_BOOL = ("bool",)

DTYPES: dict[str, tuple[str, ...]] = {
    "sum": _FLOATS + _FLOATS_8 + _COMPLEX + _INTEGERS + _BOOL,
    "avg": _FLOATS + _FLOATS_8 + _COMPLEX + _INTEGERS,
    "product": _FLOATS + _FLOATS_8 + _COMPLEX + _INTEGERS + _BOOL,
    "min": _FLOATS + _FLOATS_8 + _INTEGERS + _BOOL,
    "max": _FLOATS + _FLOATS_8 + _INTEGERS + _BOOL,
    "band": _INTEGERS + _BOOL,
    "bor": _INTEGERS + _BOOL,
    "bxor": _INTEGERS + _BOOL,
    "premul_sum": _FLOATS + _FLOATS_8 + _COMPLEX,
}
"""Operation -> the element types that it takes, by their torch names."""


_WIDER = {getattr(torch, name): torch.float32 for name in (*_FLOATS_8, "float16", "bfloat16")}
_WIDER[torch.complex32] = torch.complex64


def wider(dtype: str) -> str:
    """Return the element type, by its torch name, in which elements of ``dtype`` are accumulated."""
    element = getattr(torch, dtype)
    return str(_WIDER.get(element, element)).removeprefix("torch.")


@dataclass(frozen=True)
class Reduction:
    """An operation on elements.

    Args:
        op: as in :class:`iris_pg.program.Reduce`. Of "avg" the division is part.
        dtype: element type, as in :class:`iris_pg.program.Reduce`.
        pre_scale: what this rank multiplies its operand by first (PREMUL_SUM), or None.
    """

    op: str
    dtype: str
    pre_scale: float | complex | None = None

    def scaled(self, operand: torch.Tensor) -> torch.Tensor:
        """Return ``operand * pre_scale`` in new memory, each element rounded once; or ``operand`` itself where there is
        nothing to multiply by. A single rank scales too.
        """
        if self.pre_scale is None:
            return operand
        with torch.no_grad():
            return (operand.to(_WIDER.get(operand.dtype, operand.dtype)) * self.pre_scale).to(operand.dtype)


def reduction(collective: str, op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return what ``op`` does to elements of ``dtype``.

    Args:
        collective: its name, for messages.
        op: ``ReduceOp.SUM`` and the like, or what ``torch.distributed._make_nccl_premul_sum`` returns.

    Raises:
        ArgumentError: ``op`` does not take ``dtype``; or is PREMUL_SUM without a factor, or with a complex one for real
            elements.
    """
    # A ReduceOp pickles as (RedOpType, factor or None), in every release of torch; its attribute `factor` is newer. A
    # RedOpType says that it is an instance of both classes.
    state: Any = (op, None) if isinstance(op, ReduceOp.RedOpType) else op.__getstate__()
    kind, factor = state
    plain = _by_kind(collective, kind, dtype)
    if plain.op != "premul_sum":
        return plain
    if factor is None:
        raise ArgumentError(
            f"{collective}: ReduceOp.PREMUL_SUM has no factor; it multiplies by one; make it with "
            "torch.distributed._make_nccl_premul_sum(factor)"
        )
    value = factor.item() if isinstance(factor, torch.Tensor) else factor
    if isinstance(value, complex) and not dtype.is_complex:
        raise ArgumentError(
            f"{collective}: ReduceOp.PREMUL_SUM has the factor {value} for {dtype}; it takes a real one; pass a float"
        )
    return Reduction("sum", plain.dtype, value)


@functools.lru_cache(maxsize=4096)
def _by_kind(collective: str, kind: ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return a reduction by torch's name of it, "premul_sum" too; kept, as the names of enumerations take long."""
    name, element = kind.name.lower(), str(dtype).removeprefix("torch.")
    check(name, element, collective)
    return Reduction(name, element)


def check(op: str, dtype: str, collective: str = "reduce") -> None:
    """Raise ArgumentError unless ``op``, a key of :data:`DTYPES`, takes elements of ``dtype``."""
    taken = DTYPES.get(op)
    if taken is None:
        raise ArgumentError(f"{collective}: op={op!r}; it takes {', '.join(DTYPES)}; pass one of these")
    if dtype not in taken:
        others = ", ".join(name.upper() for name, dtypes in DTYPES.items() if dtype in dtypes)
        raise ArgumentError(
            f"{collective}: ReduceOp.{op.upper()} of torch.{dtype}; it takes {', '.join(taken)}; convert the tensor"
            + (f", or use {others}" if others else "")
        )
