"""What differs between the GPUs that a kernel is compiled for, the interpreter, and Gluon: clocks, fences, loads past
the caches, and what packets look like. Called while a kernel is compiled.
"""

# mypy: ignore-errors

from __future__ import annotations

import time

import triton.language as tl
from triton.language.core import constexpr

from iris_pg.copy_engine.generations import GFX942, Generation, generation_of
from iris_pg.device.function import builtin

_PAUSE_S = 20e-6  # of a wait in the interpreter, so that the engine's thread runs


def _is_hip(semantic) -> bool:
    return semantic is not None and semantic.builder.options.backend_name == "hip"


def _generation(semantic) -> Generation:
    """Whose packets are written: the GPU's, where it takes them itself; else what software takes."""
    return generation_of(semantic.builder.options.arch) if _is_hip(semantic) else GFX942


@builtin
def clock_ns(_semantic=None):
    """Return the time in nanoseconds, int64; every lane reads a time of its own."""
    if _semantic is None:
        return time.monotonic_ns()
    if _is_hip(_semantic):
        ticks = tl.extra.hip.memrealtime(_semantic=_semantic)  # of 100 MHz
        return _semantic.mul(ticks, _semantic.to_tensor(10), True)
    return tl.extra.cuda.globaltimer(_semantic=_semantic)


@builtin
def fence(word, _semantic=None):
    """Let everything before it, of this CTA up to the last barrier too, be seen by the whole system before what
    follows.

    Args:
        word: pointer to a word of this GPU's memory that is only accessed atomically.
    """
    if _semantic is None:
        tl.atomic_add(word, 0, sem="acq_rel", scope="sys")
    elif _is_hip(_semantic):
        # LLVM AMDGPU memory model: waits for this wave's stores, writes the L2 back, and invalidates it.
        tl.atomic_add(word, 0, sem="acq_rel", scope="sys", _semantic=_semantic)
    else:
        text, constraints = "fence.acq_rel.sys; mov.u32 $0, 0;", "=r,~{memory}"
        tl.inline_asm_elementwise(text, constraints, [], tl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def load_past_caches(pointer, _semantic=None):
    """Return a word that others write, as it is in memory; every lane reads it at a time of its own."""
    if _semantic is None:
        time.sleep(_PAUSE_S)
        return tl.load(pointer, volatile=True)
    modifier = ".cv" if _is_hip(_semantic) else ""  # there, volatile alone may read from a cache
    return tl.load(pointer, cache_modifier=modifier, volatile=True, _semantic=_semantic)


@builtin
def publish(pointer, value, word, _semantic=None):
    """Write a 64-bit word that others read, after everything before it; one lane does.

    It is a store: the word may be a doorbell, or memory of the host for which this GPU has no atomics.

    Args:
        word: as for :func:`fence`.
    """
    if _semantic is None:
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")
        return
    fence(word, _semantic=_semantic)
    tl.store(pointer, value, cache_modifier=".wt", _semantic=_semantic)


@builtin
def index_along(pointers, axis, _semantic=None):
    """Return the index of each element of a block along an axis, in a shape that broadcasts to the block's."""
    axis = getattr(axis, "value", axis)
    shape = [int(getattr(n, "value", n)) for n in pointers.type.shape]
    others = [other for other in range(len(shape)) if other != axis]
    if _semantic is None:
        index = tl.arange(0, shape[axis])
    elif hasattr(pointers.type, "layout"):  # Gluon
        from triton.experimental.gluon.language import SliceLayout

        layout = pointers.type.layout
        for other in reversed(others):
            layout = SliceLayout(other, layout)
        index = _semantic.arange(0, shape[axis], layout)
    else:
        index = _semantic.arange(0, shape[axis])
    for other in others:
        index = tl.expand_dims(index, other) if _semantic is None else _semantic.expand_dims(index, other)
    return index


@builtin
def most_bytes(_semantic=None):
    """Return how many bytes one COPY_LINEAR of a split copy moves."""
    return constexpr(_generation(_semantic).split_bytes)


@builtin
def has_sub_window(_semantic=None):
    """Return whether there is a packet that copies a window of a matrix."""
    return constexpr(_generation(_semantic).has_sub_window)


@builtin
def fence_header(_semantic=None):
    """Return DW0 of FENCE."""
    return constexpr(_generation(_semantic).fence_header)
