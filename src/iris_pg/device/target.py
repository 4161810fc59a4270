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

# How AMD GPUs read their clock, and wait for the answer: scalar memory and messages count with LGKM, or KM.
_CLOCKS = {
    "gfx9": "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
    "gfx11": "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_waitcnt lgkmcnt(0)",
    "gfx12": "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\ns_wait_kmcnt 0",
}

# How their waves wait until what they have stored has got as far as the L2.
_DRAINS = {
    "gfx9": "s_waitcnt vmcnt(0)",
    "gfx11": "s_waitcnt_vscnt null, 0x0",
    "gfx12": "s_wait_storecnt 0x0",
}


def _is_hip(semantic) -> bool:
    return semantic is not None and semantic.builder.options.backend_name == "hip"


def _of_arch(texts: dict[str, str], semantic) -> str:
    arch = semantic.builder.options.arch
    return next((text for prefix, text in texts.items() if arch.startswith(prefix)), texts["gfx9"])


def _generation(semantic) -> Generation:
    """Whose packets are written: the GPU's, where it takes them itself; else what software takes."""
    return generation_of(semantic.builder.options.arch) if _is_hip(semantic) else GFX942


@builtin
def clock_ns(_semantic=None):
    """Return the time in nanoseconds, int64; every lane reads a time of its own."""
    if _semantic is None:
        return time.monotonic_ns()
    if not _is_hip(_semantic):
        return tl.extra.cuda.globaltimer(_semantic=_semantic)
    read = _of_arch(_CLOCKS, _semantic)
    ticks = tl.inline_asm_elementwise(read, "=s", [], tl.int64, is_pure=False, pack=1, _semantic=_semantic)
    return _semantic.mul(ticks, _semantic.to_tensor(10), True)  # ticks of 100 MHz


@builtin
def pause(_semantic=None):
    """Do nothing for a moment, in a wait; in the interpreter others need the core."""
    if _semantic is None:
        time.sleep(_PAUSE_S)


@builtin
def gather_stores(_semantic=None):
    """Let all that the CTA's lanes have stored be before what any of them does next.

    On AMD GPUs a barrier alone does not wait for the stores of the waves, and the release after it waits for those of
    one wave only: so each waits for its own first.
    """
    if _is_hip(_semantic):
        text = _of_arch(_DRAINS, _semantic) + "\nv_mov_b32 $0, 0"
        tl.inline_asm_elementwise(text, "=v,~{memory}", [], tl.int32, is_pure=False, pack=1, _semantic=_semantic)
    if _semantic is not None:
        tl.debug_barrier(_semantic=_semantic)


@builtin
def fence(word, _semantic=None):
    """Let everything before it, of this CTA up to the last barrier too, be seen by the whole system before what
    follows.

    Args:
        word: pointer to a word of this GPU's memory that counts fences.
    """
    if _semantic is None:
        tl.atomic_add(word, 1, sem="acq_rel", scope="sys")
    elif _is_hip(_semantic):
        # LLVM AMDGPU memory model: waits for this wave's stores, writes the L2 back, and invalidates it. It has to
        # change the word: of an addition of 0 LLVM makes a load, which releases nothing.
        tl.atomic_add(word, 1, sem="acq_rel", scope="sys", _semantic=_semantic)
    else:
        text, constraints = "fence.acq_rel.sys; mov.u32 $0, 0;", "=r,~{memory}"
        tl.inline_asm_elementwise(text, constraints, [], tl.int32, is_pure=False, pack=1, _semantic=_semantic)


@builtin
def load_past_caches(pointer, _semantic=None):
    """Return a word that others write, as it is in memory; every lane reads it at a time of its own."""
    if _semantic is None:
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
