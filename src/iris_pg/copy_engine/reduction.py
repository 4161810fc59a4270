"""Reductions on a CPU: what a :class:`iris_pg.program.Reduce` does, on addresses of this process.

NumPy does the arithmetic, as calling it costs a third of calling torch; torch converts what NumPy does not know. The
result depends neither on where operands lie nor on which rank computes it: operands come in one order, and the loops
give each element the same bits at any alignment. Long ones run without the GIL.

A training loop repeats its addresses, so the calls that make up a reduction are kept, and made again only when they are
new. What is kept are views that own no memory and are used only while a reduction with these very addresses runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from iris_pg.errors import ArgumentError
from iris_pg.reduce_ops import check

_KEPT = 1024  # reductions a thread, then all are forgotten
_BLOCK_BYTES = 256 << 10  # of what is accumulated at a time, so that it stays in the second-level cache

_Calls: TypeAlias = tuple[Callable[[], Any], ...]
_Array: TypeAlias = np.ndarray[Any, Any]

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}  # of bool, np.add and np.maximum are "or", np.multiply and np.minimum are "and"

# What torch can do to 16-bit elements in one step, with one rounding from float32.
_PAIRS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

_REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_ACCUMULATORS = {
    "float16": "float32",
    "bfloat16": "float32",
    "float8_e4m3fn": "float32",
    "float8_e5m2": "float32",
    "float8_e4m3fnuz": "float32",
    "float8_e5m2fnuz": "float32",
    "complex32": "complex64",
}  # element types that NumPy lacks, or does not accumulate as it should


class _Local(threading.local):
    """What each thread has of its own: one reduction at a time uses the scratch memory."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str, int, tuple[int, ...], int], _Calls] = {}
        self.scratch = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(2)]


_local = _Local()


def reduce_bytes(op: str, dtype: str, dst: int, sources: Sequence[int], nbytes: int) -> None:
    """Set each element at ``dst`` to ``op`` over those at ``sources``, in the order given.

    Args:
        op, dtype: as in :class:`iris_pg.program.Reduce`.
        dst, sources: addresses in this process; ``dst`` may be some of ``sources``, and overlaps none in part.
        nbytes: bytes of the result, and of each operand; whole elements.

    Raises:
        ArgumentError: ``op`` does not take ``dtype``, ``nbytes`` is not whole elements, or there is less than two
            sources. Nothing has been written.
    """
    key = op, dtype, dst, tuple(sources), nbytes
    calls = _local.calls.get(key)
    if calls is None:
        if len(_local.calls) >= _KEPT:
            _local.calls.clear()
        calls = _local.calls[key] = _prepare(*key)
    _run(calls)


@np.errstate(all="ignore")  # an infinity or a NaN is a result like any other
def _run(calls: _Calls) -> None:
    for call in calls:
        call()


def _prepare(op: str, dtype: str, dst: int, sources: tuple[int, ...], nbytes: int) -> _Calls:
    check(op, dtype)
    if op not in _UFUNCS:
        raise ArgumentError(f"reduce: op={op!r}; it takes {', '.join(_UFUNCS)}; scale the operands first, and use sum")
    if len(sources) < 2:
        raise ArgumentError(f"reduce: {len(sources)} sources; it takes two or more; copy one")
    itemsize = getattr(torch, dtype).itemsize
    if nbytes % itemsize or nbytes < 1:
        raise ArgumentError(
            f"reduce: nbytes={nbytes} of {dtype}; it takes whole elements of {itemsize} bytes; correct it"
        )
    if op in ("sum", "avg"):
        dtype = _REAL.get(dtype, dtype)
    calls = _in_own_type
    if dtype in _ACCUMULATORS:
        is_pair = len(sources) == 2 and op in _PAIRS and dtype in ("float16", "bfloat16")
        calls = _in_one_step if is_pair else _in_wider_type
    with torch.inference_mode(False):  # else its views could not be written outside of inference mode
        return tuple(calls(op, dtype, dst, sources, nbytes))


def _in_own_type(op: str, dtype: str, dst: int, sources: tuple[int, ...], nbytes: int) -> Iterator[Callable[[], Any]]:
    ufunc, element = _UFUNCS[op], np.dtype(dtype)
    for start in range(0, nbytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, nbytes - start)
        into, *operands = (_array(address + start, size, element) for address in (dst, *sources))
        # A source that is read after the first step must still be there.
        total = _local.scratch[0][:size].view(element) if dst in sources[2:] else into
        yield from _accumulate(ufunc, operands, total, total if op == "avg" else into)
        if op == "avg":
            yield _division(total, len(sources), into)


def _in_wider_type(op: str, dtype: str, dst: int, sources: tuple[int, ...], nbytes: int) -> Iterator[Callable[[], Any]]:
    element, wide = getattr(torch, dtype), np.dtype(_ACCUMULATORS[dtype])
    block = _BLOCK_BYTES // wide.itemsize * element.itemsize
    for start in range(0, nbytes, block):
        size = min(block, nbytes - start)
        into, *operands = (_tensor(address + start, size, element) for address in (dst, *sources))
        total, operand = (memory.view(wide)[: into.numel()] for memory in _local.scratch)
        yield partial(torch.from_numpy(total).copy_, operands[0])
        for other in operands[1:]:
            yield partial(torch.from_numpy(operand).copy_, other)
            yield partial(_UFUNCS[op], total, operand, out=total)
        if op == "avg":
            yield _division(total, len(sources), total)
        yield partial(into.copy_, torch.from_numpy(total))


def _in_one_step(op: str, dtype: str, dst: int, sources: tuple[int, ...], nbytes: int) -> Iterator[Callable[[], Any]]:
    element = getattr(torch, dtype)
    first, second, into = (_tensor(address, nbytes, element) for address in (*sources, dst))
    yield partial(_PAIRS[op], first, second, out=into)


def _accumulate(ufunc: np.ufunc, operands: list[_Array], total: _Array, last: _Array) -> Iterator[Callable[[], Any]]:
    """Yield the steps that accumulate ``operands`` in ``total``, the last one with its result in ``last``."""
    before = operands[0]
    for operand in operands[1:-1]:
        yield partial(ufunc, before, operand, out=total)
        before = total
    yield partial(ufunc, before, operands[-1], out=last)


def _division(total: _Array, count: int, into: _Array) -> Callable[[], Any]:
    """Return the step that divides by ``count``; what is left of integers is dropped."""
    if total.dtype.kind == "f":
        return partial(np.divide, total, total.dtype.type(count), out=into)
    if total.dtype.kind == "u":
        return partial(np.floor_divide, total, np.uint64(count), out=into, casting="unsafe")
    dividend, quotient = torch.from_numpy(total), torch.from_numpy(into)
    return lambda: quotient.copy_(torch.div(dividend.long(), count, rounding_mode="trunc"))


def _array(address: int, nbytes: int, element: np.dtype[Any]) -> _Array:
    return np.frombuffer(_memory(address, nbytes), element)


def _tensor(address: int, nbytes: int, element: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(_memory(address, nbytes), dtype=element)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))
