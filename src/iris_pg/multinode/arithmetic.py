"""What plans do to elements: conversion, and the reduction of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.errors import UnsupportedError

Tensor = torch.Tensor

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_OPS = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OF_BOOL = {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "bor": torch.logical_or,
    "bxor": torch.logical_xor,
    "product": torch.logical_and,
    "min": torch.logical_and,
    "band": torch.logical_and,
}


def combine(op: str, into: Tensor, sources: Sequence[Tensor]) -> None:
    """Set ``into`` [n] to ``op`` over ``sources`` [n], at least two, in their order; it may be one of them."""
    if into.device.type == "cpu":
        dtype = str(into.dtype).removeprefix("torch.")
        reduce_bytes(op, dtype, into.data_ptr(), [s.data_ptr() for s in sources], into.nbytes)
    else:
        combine_by_torch(op, into, sources)


def combine_by_torch(op: str, into: Tensor, sources: Sequence[Tensor]) -> None:
    """As :func:`combine`, on the current stream of any device."""
    dtype = into.dtype
    function: Any = _OF_BOOL[op] if dtype == torch.bool else _OPS[op]
    lowest = 0
    if dtype in _SIGNED:  # torch lacks these operations of them; two's complement has the same bits
        into, *sources = (t.view(_SIGNED[dtype]) for t in (into, *sources))
        lowest = torch.iinfo(_SIGNED[dtype]).min if op in ("min", "max") else 0
    total = sources[0] ^ lowest if lowest else sources[0]  # in the order of signed integers
    for source in sources[1:]:
        total = function(total, source ^ lowest if lowest else source)
    into.copy_(total ^ lowest if lowest else total)


def finish(into: Tensor, source: Tensor, divisor: int) -> None:
    """Set ``into`` [n] to ``source`` [n], divided by ``divisor``; of integers the fraction is dropped."""
    if divisor == 1:
        into.copy_(source)
    elif source.dtype.is_floating_point or source.dtype.is_complex:
        torch.div(source, divisor, out=into) if into.dtype == source.dtype else into.copy_(source / divisor)
    elif source.dtype != torch.uint64:
        into.copy_(torch.div(source.long(), divisor, rounding_mode="trunc"))
    elif source.device.type == "cpu":
        into.numpy()[...] = source.numpy() // divisor
    else:
        raise UnsupportedError("ReduceOp.AVG of torch.uint64 on a GPU; use SUM, and divide on the CPU")
