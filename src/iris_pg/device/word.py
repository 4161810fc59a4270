"""An atomic operation on one word as a kernel of one warp: for streams, which have none."""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from iris_pg.copy_engine.packets import AtomicOp

OPERATIONS = ("SWAP", "CMPSWAP", "ADD", "SUB", "SMIN", "UMIN", "SMAX", "UMAX", "AND", "OR", "XOR")
SWAP, CMPSWAP, ADD, SUB, SMIN, UMIN, SMAX, UMAX, AND, OR, XOR = (tl.constexpr(int(AtomicOp[op])) for op in OPERATIONS)


@triton.jit
def atomic_word(address, operand, compare, op, TYPE: tl.constexpr, UNSIGNED: tl.constexpr):
    """Do an operation, by its number, on a word; all at system scope. One kernel does every operation: it has to be
    loaded before it is needed, as loading one may wait for kernels that run, and one of these may wait for this.
    """
    pointer = address.to(tl.pointer_type(TYPE))
    value = operand.to(TYPE)
    if op == SWAP:
        tl.atomic_xchg(pointer, value, sem="acq_rel", scope="sys")
    elif op == CMPSWAP:
        tl.atomic_cas(pointer, compare.to(TYPE), value, sem="acq_rel", scope="sys")
    elif op == ADD:
        tl.atomic_add(pointer, value, sem="acq_rel", scope="sys")
    elif op == SUB:
        tl.atomic_add(pointer, -value, sem="acq_rel", scope="sys")
    elif op == AND:
        tl.atomic_and(pointer, value, sem="acq_rel", scope="sys")
    elif op == OR:
        tl.atomic_or(pointer, value, sem="acq_rel", scope="sys")
    elif op == XOR:
        tl.atomic_xor(pointer, value, sem="acq_rel", scope="sys")
    elif op == SMIN:
        tl.atomic_min(pointer, value, sem="acq_rel", scope="sys")
    elif op == SMAX:
        tl.atomic_max(pointer, value, sem="acq_rel", scope="sys")
    elif op == UMIN:
        tl.atomic_min(address.to(tl.pointer_type(UNSIGNED)), value.to(UNSIGNED), sem="acq_rel", scope="sys")
    elif op == UMAX:
        tl.atomic_max(address.to(tl.pointer_type(UNSIGNED)), value.to(UNSIGNED), sem="acq_rel", scope="sys")


def source_of(width_bytes: int) -> dict[str, object]:
    """Return the arguments of Triton's ASTSource for words of a width."""
    signed, unsigned = {4: (tl.int32, tl.uint32), 8: (tl.int64, tl.uint64)}[width_bytes]
    types = dict(address="i64", operand="i64", compare="i64", op="i32", TYPE="constexpr", UNSIGNED="constexpr")
    return dict(fn=atomic_word, signature=types, constexprs=dict(TYPE=signed, UNSIGNED=unsigned))


@functools.cache
def launcher(device: torch.device, width_bytes: int):
    """Return what launches an operation on ``device``, the current one, on words of a width: (operation by name,
    address, operand, compare, stream handle). It is loaded.

    The launcher raises ValueError for an operation that is not in ``OPERATIONS``.
    """
    from triton.compiler import ASTSource

    source = source_of(width_bytes)
    kernel = triton.compile(ASTSource(**source), options=dict(num_warps=1))
    kernel._init_handles()
    run, constants = kernel[1, 1, 1], tuple(source["constexprs"].values())

    def launch(op: str, address: int, operand: int, compare: int, stream: int) -> None:
        if op not in OPERATIONS:
            raise ValueError(f"{op} is not one of {', '.join(OPERATIONS)}")
        run(_signed(address), _signed(operand), _signed(compare), int(AtomicOp[op]), *constants, stream=stream)

    return launch


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
