"""What reductions should give: integers by numpy, which wraps around, floating point in 64 bits with a tolerance."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from table.values import COMPLEX, FLOATS, FLOATS_8, INTEGERS

FACTOR = 0.375
"""What PREMUL_SUM multiplies by; of few bits, so that also the narrowest types multiply by just this."""

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "premul_sum": dist._make_nccl_premul_sum(FACTOR),
}

_NUMBERS = (*INTEGERS, *FLOATS, *FLOATS_8)
TAKEN = {
    "sum": (*_NUMBERS, *COMPLEX, "bool"),
    "avg": (*_NUMBERS, *COMPLEX),
    "product": (*_NUMBERS, *COMPLEX, "bool"),
    "min": (*_NUMBERS, "bool"),
    "max": (*_NUMBERS, "bool"),
    "band": (*INTEGERS, "bool"),
    "bor": (*INTEGERS, "bool"),
    "bxor": (*INTEGERS, "bool"),
    "premul_sum": (*FLOATS, *FLOATS_8, *COMPLEX),
}
"""Reduction -> element types that it takes; it refuses all others."""

NARROW = {getattr(torch, name) for name in (*FLOATS_8, "float16", "bfloat16")}
"""Floating-point types that are accumulated in float32."""

_EXACT = {"min", "max", "band", "bor", "bxor"}


def _integers(op: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    fold = {
        "sum": np.add,
        "avg": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    with np.errstate(over="ignore"):
        total = functools.reduce(fold, operands)
    if op != "avg":
        return total
    toward_zero = [int(v) // len(operands) if v >= 0 else -(-int(v) // len(operands)) for v in total.reshape(-1)]
    return np.array(toward_zero, dtype=total.dtype).reshape(total.shape)


def mistake(op: str, operands: Sequence[torch.Tensor], actual: torch.Tensor, rounds_each: bool = False) -> str:
    """Return what is wrong with ``actual`` as the reduction of ``operands``, in words; nothing when it is right.

    Args:
        op: a key of :data:`OPERATIONS`.
        operands: one of each rank, in their order.
        rounds_each: narrow types may be rounded after each operand, as Gloo does, and not once at the end.
    """
    dtype, world = actual.dtype, len(operands)
    if not actual.numel():
        return ""
    if dtype == torch.bool:
        fold = {"sum": torch.logical_or, "max": torch.logical_or, "bor": torch.logical_or, "bxor": torch.logical_xor}
        wanted = functools.reduce(fold.get(op, torch.logical_and), operands)
        return _differ(actual != wanted, actual, wanted)
    if not (dtype.is_floating_point or dtype.is_complex):
        result = _integers(op, [o.contiguous().numpy() for o in operands])
        wrong = torch.from_numpy(np.array(actual.contiguous().numpy() != result))
        return _differ(wrong, actual, torch.from_numpy(np.array(result)))
    wide = [o.to(torch.complex128 if dtype.is_complex else torch.float64) for o in operands]
    wide = [FACTOR * o for o in wide] if op == "premul_sum" else wide
    fold = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    wanted, bound = functools.reduce(fold, wide), functools.reduce(fold, [o.abs() for o in wide])
    if op == "avg":
        wanted, bound = wanted / world, bound / world
    # Each of `world` steps may round what it adds up, at most `bound`; then the result is rounded to its own type, as
    # is each operand of PREMUL_SUM.
    step = 0.0 if op in _EXACT else torch.finfo(torch.float32 if dtype in NARROW and not rounds_each else dtype).eps
    if dtype == torch.complex32:
        step = torch.finfo(torch.float16 if rounds_each else torch.float32).eps
    own = 0.0 if op in _EXACT else torch.finfo(dtype).eps
    allowed = (world + 2) * step * bound + own * wanted.abs()
    if op == "premul_sum":
        allowed += own * bound
    if op not in _EXACT:
        allowed += (1 + world * (op == "premul_sum")) * torch.finfo(dtype).smallest_normal * own
    got = actual.to(wanted.dtype)
    return _differ(~((got - wanted).abs() <= allowed) & ~(got.isnan() & wanted.isnan()), got, wanted)


def _differ(wrong: torch.Tensor, actual: torch.Tensor, wanted: torch.Tensor) -> str:
    if not bool(wrong.any()):
        return ""
    at = int(wrong.reshape(-1).nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} are wrong, the first at element {at}: "
        f"{actual.reshape(-1)[at].item()} and not {wanted.reshape(-1)[at].item()}"
    )
