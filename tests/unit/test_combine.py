"""The kernel of the stream engine's reductions, compiled for every kind of GPU, and run in Triton's interpreter."""

from __future__ import annotations

import ctypes
import mmap
import re

import pytest
import torch

from iris_pg.copy_engine import combine
from iris_pg.kernels.loader import kernels

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


class Fenced:
    """Memory with a page on each side that nobody may touch: an access beyond it ends the process."""

    def __init__(self, nbytes, at_the_end):
        page = mmap.PAGESIZE
        room = -(-nbytes // page) * page
        self._map = mmap.mmap(-1, room + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for fence in (start, start + page + room):
            if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(fence), page, 0):  # PROT_NONE
                raise OSError(ctypes.get_errno(), "mprotect")
        self.address = start + page + (room - nbytes if at_the_end else 0)

    def tensor(self, dtype, numel):
        nbytes = numel * dtype.itemsize
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(self.address), dtype=dtype)


@pytest.fixture
def interpreted(monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    kernels(interpreted=True)  # which mends the interpreter
    for name in ("_pointer", "_part"):
        monkeypatch.setattr(combine, name, InterpretedFunction(getattr(combine, name).fn))
    return InterpretedFunction(combine._combine.fn)


REFERENCE = dict(sum=torch.sum, avg=lambda t, dim: t.sum(dim) / t.size(dim), product=torch.prod, max=torch.amax)


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize("case", ["float32 sum", "float16 avg", "int64 product", "int32 max"])
def test_it_combines_and_stays_within_its_operands(interpreted, case, at_the_end):
    dtype, op = case.split()
    kind, count, (element, wide) = getattr(torch, dtype), 3, combine.TYPES[dtype]
    size = combine.BLOCK_BYTES // kind.itemsize
    constants = dict(COUNT=count, ELEMENT=element, WIDE=wide, OP=combine.OPS[op], WORD=kind.itemsize, SIZE=size)
    for numel, ctas in ((1, 1), (size - 1, 1), (size, 1), (size + 1, 2), (3 * size + 5, 2)):
        memory = [Fenced(numel * kind.itemsize, at_the_end) for _ in range(count + 1)]
        into, *operands = [m.tensor(kind, numel) for m in memory]
        for i, operand in enumerate(operands):
            operand.copy_((torch.arange(numel) * 7 + 31 * i) % 13 - 5)
        interpreted[(ctas,)](memory[0].address, tuple(m.address for m in memory[1:]), numel, **constants)
        stacked = torch.stack(operands).to(torch.float32 if kind.is_floating_point else kind)
        assert torch.equal(into, REFERENCE[op](stacked, 0).to(kind)), (numel, ctas)
