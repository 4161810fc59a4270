"""The kernel of the stream engine's reductions, compiled for every kind of GPU; no GPU is needed."""

from __future__ import annotations

import re

import pytest

from iris_pg.copy_engine import combine

GPUS = [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)]
KERNELS = [(2, "bfloat16", "sum", 16), (8, "float32", "avg", 16), (3, "float16", "max", 2), (4, "float32", "sum", 4)]


@pytest.mark.parametrize(("backend", "arch", "width"), GPUS)
@pytest.mark.parametrize(("count", "dtype", "op", "word"), KERNELS)
def test_it_compiles(backend, arch, width, count, dtype, op, word):
    import triton
    from triton.backends.compiler import GPUTarget

    source = combine.source_of(count, dtype, op, word)
    target = GPUTarget(backend, arch, width)
    made = triton.compile(source, target=target, options=dict(num_warps=combine._WARPS))
    text = made.asm["ptx" if backend == "cuda" else "amdgcn"]
    assert ("st.global" if backend == "cuda" else "store") in text and made.asm[
        "cubin" if backend == "cuda" else "hsaco"
    ]
    assert combine._WARPS * width <= 1024, "threads of a block"
    if backend == "cuda":
        wide = re.findall(r"(?:ld|st)\.global\.v(\d)\.b(?:32|64)", text)
        assert len(wide) >= count + 1 if word == 16 else not wide, "16 bytes at a time, where all addresses allow it"
