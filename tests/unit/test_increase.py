"""The kernel that adds to a flag, compiled for every kind of GPU; no GPU is needed."""

from __future__ import annotations

import re

import pytest

from iris_pg.copy_engine import increase


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(("backend", "arch", "width"), [("cuda", 90, 32), ("hip", "gfx942", 64)])
def test_one_atomic_addition_of_the_whole_system(backend, arch, width, bits):
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(backend, arch, width)
    made = triton.compile(increase.source_of(bits), target=target, options=dict(num_warps=1))
    text = made.asm["ptx" if backend == "cuda" else "amdgcn"]
    if backend == "cuda":
        found = re.findall(r"atom\S*", text)
        assert found == [f"atom.global.sys.acq_rel.add.{'u64' if bits == 64 else 'u32'}"], found
    else:
        assert len(re.findall(r"atomic_add\S*", text)) == 1
        assert ("_x2" in text) == (bits == 64)
