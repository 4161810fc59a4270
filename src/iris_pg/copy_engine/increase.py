"""The kernel that adds to a flag on a GPU: one thread, and an atomic addition that every GPU and host sees as one.

A stream has no atomic operation, so a stream that signals launches this. It begins when all that the stream did before
has landed, and several ranks may add to one flag.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from iris_pg.platforms.compiled import KernelLaunch
from iris_pg.platforms.gpu import platform as gpu


def _increase(flag, value, WORD: tl.constexpr):  # type: ignore[no-untyped-def]
    # Both at least 64 bits wide as arguments; what is added wraps around at the width of the flag.
    pointer = tl.cast(flag, tl.int64).to(tl.pointer_type(WORD))
    tl.atomic_add(pointer, tl.cast(value, tl.int64).to(WORD), sem="acq_rel", scope="sys")


# Made by hand, and not by triton.jit: that one makes something else where Triton's interpreter is on.
_increase = JITFunction(_increase)


def source_of(bits: int) -> Any:
    """Return the kernel for flags of 32 or 64 bits as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    signature = dict(flag="i64", value="i64", WORD="constexpr")
    return ASTSource(fn=_increase, signature=signature, constexprs=dict(WORD=tl.int64 if bits == 64 else tl.int32))


def increase(device: torch.device, flag: int, value: int, bits: int) -> gpu.Launch:
    """Return what adds ``value``, modulo 2^bits, to the flag at an address that ``device`` can access."""
    signed = value - (1 << 64) if value >= 1 << 63 else value
    return KernelLaunch(_loaded(device, bits), 1, (flag, signed)).call


@functools.cache
def _loaded(device: torch.device, bits: int) -> Any:
    with torch.cuda.device(device), gpu.outside_of_capture():
        kernel = triton.compile(source_of(bits), options=dict(num_warps=1))
        kernel._init_handles()
    return kernel


__all__ = ["increase", "source_of"]
