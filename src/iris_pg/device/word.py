"""An atomic operation on one word as a kernel of one warp: for streams, which have none."""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

OPERATIONS = ("SWAP", "CMPSWAP", "ADD", "SUB", "SMIN", "UMIN", "SMAX", "UMAX", "AND", "OR", "XOR")


@triton.jit
def atomic_word(address, operand, compare, OP: tl.constexpr, TYPE: tl.constexpr):
    """Do an operation, by name, on a word of TYPE; all at system scope."""
    pointer = address.to(tl.pointer_type(TYPE))
    value = operand.to(TYPE)
    if OP == "SWAP":
        tl.atomic_xchg(pointer, value, sem="acq_rel", scope="sys")
    elif OP == "CMPSWAP":
        tl.atomic_cas(pointer, compare.to(TYPE), value, sem="acq_rel", scope="sys")
    elif OP == "ADD":
        tl.atomic_add(pointer, value, sem="acq_rel", scope="sys")
    elif OP == "SUB":
        tl.atomic_add(pointer, -value, sem="acq_rel", scope="sys")
    elif OP == "AND":
        tl.atomic_and(pointer, value, sem="acq_rel", scope="sys")
    elif OP == "OR":
        tl.atomic_or(pointer, value, sem="acq_rel", scope="sys")
    elif OP == "XOR":
        tl.atomic_xor(pointer, value, sem="acq_rel", scope="sys")
    elif OP == "SMIN" or OP == "UMIN":
        tl.atomic_min(pointer, value, sem="acq_rel", scope="sys")
    else:
        tl.static_assert(OP == "SMAX" or OP == "UMAX")
        tl.atomic_max(pointer, value, sem="acq_rel", scope="sys")


def source_of(op: str, width_bytes: int) -> dict[str, object]:
    """Return the arguments of Triton's ASTSource for an operation."""
    kinds = {4: (tl.int32, tl.uint32), 8: (tl.int64, tl.uint64)}[width_bytes]
    constants = dict(OP=op, TYPE=kinds[op.startswith("U")])
    types = dict(address="i64", operand="i64", compare="i64", OP="constexpr", TYPE="constexpr")
    return dict(fn=atomic_word, signature=types, constexprs=constants)


@functools.cache
def launcher(device: torch.device, op: str, width_bytes: int):
    """Return what launches an operation on ``device``, the current one: (address, operand, compare, stream handle)."""
    from triton.compiler import ASTSource

    source = source_of(op, width_bytes)
    kernel = triton.compile(ASTSource(**source), options=dict(num_warps=1))
    kernel._init_handles()
    run, constants = kernel[1, 1, 1], tuple(source["constexprs"].values())

    def launch(address: int, operand: int, compare: int, stream: int) -> None:
        run(_signed(address), _signed(operand), _signed(compare), *constants, stream=stream)

    return launch


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
