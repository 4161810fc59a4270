"""The cu engine: what its kernels compile to for GPUs, and what they do in the interpreter, ranks being threads
here.
"""

import re

import pytest
import torch

from iris_pg.errors import DeadlineError
from iris_pg.kernels.engine import Exchange, KernelEngine, Message, area_bytes
from iris_pg.kernels.launch import kernels

SLOT = 256


@pytest.mark.parametrize("name", ["exchange", "push"])
@pytest.mark.parametrize("backend,arch,width", [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)])
def test_flags_are_released_and_acquired_at_system_scope(name, backend, arch, width):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernels(interpreted=False), name)
    constants = {"world": 4, "slot_bytes": 65536, "BLOCK": 4096, "WORD": 8}
    signature = {a: "constexpr" if a in constants else "i32" if a == "rank" else "i64" for a in function.arg_names}
    source = ASTSource(function, signature=signature, constexprs=constants)
    asm = triton.compile(source, target=GPUTarget(backend, arch, width)).asm
    if backend == "cuda":
        atomics = re.findall(r"(?:atom|ld|st)\.[\w.]*(?:acquire|release)[\w.]*", asm["ptx"])
        assert atomics and all(".sys." in a for a in atomics), atomics
        assert any("acquire" in a for a in atomics) and any("release" in a for a in atomics)
    else:
        # LLVM AMDGPU memory model, gfx942: system scope is sc0 and sc1 on the write-back and on the invalidation.
        lines = [line.strip() for line in asm["amdgcn"].splitlines()]
        for instruction in ("buffer_wbl2", "buffer_inv"):
            found = [line for line in lines if line.startswith(instruction)]
            assert found and all("sc0 sc1" in line for line in found), found


class Group:
    """KernelEngines of several ranks in one process, over ordinary memory."""

    def __init__(self, world, timeout_s=20.0, check=lambda peer: None):
        areas = area_bytes(world, SLOT)
        self.segments = [torch.zeros(sum(areas.values()) + 4096, dtype=torch.uint8) for _ in range(world)]
        self.bases = [s.data_ptr() for s in self.segments]
        self.faults = []
        self.engines = [
            KernelEngine(
                r,
                world,
                self.bases,
                0,
                areas["cu_flags"],
                SLOT,
                timeout_s,
                check,
                lambda peer: f"waiting for rank {peer}",
                self.faults.append,
                f"test {r}",
            )
            for r in range(world)
        ]

    def run(self, exchanges):
        jobs = [e.submit(x, None) for e, x in zip(self.engines, exchanges, strict=True)]
        for engine, job in zip(self.engines, jobs, strict=True):
            engine.wait(job)

    def close(self):
        for engine in self.engines:
            engine.close()


def data(rank, n, iteration=0):
    return (torch.arange(n, dtype=torch.int64) * 7 + rank * 31 + iteration * 13).to(torch.uint8)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchange_gathers_through_slots(world):
    group = Group(world)
    try:
        for iteration, n in enumerate([1, 7, 8, SLOT, SLOT + 1, 3 * SLOT + 5]):
            inputs = [data(r, n, iteration) for r in range(world)]
            outputs = [torch.zeros(world * n, dtype=torch.uint8) for _ in range(world)]

            def exchange(r, inputs=inputs, outputs=outputs, n=n):
                peers = [p for p in range(world) if p != r]
                at = outputs[r].data_ptr()
                return Exchange(
                    [Message(p, inputs[r].data_ptr(), n) for p in peers],
                    [Message(p, at + p * n, n) for p in peers],
                    (inputs[r].data_ptr(), at + r * n, n),
                )

            group.run([exchange(r) for r in range(world)])
            for output in outputs:
                assert torch.equal(output, torch.cat(inputs))
    finally:
        group.close()


def test_exchange_moves_messages_of_different_sizes():
    """Every pair has its own number of chunks, some none, as in a gather or an uneven all-to-all."""
    world, group = 3, Group(3)
    sizes = [[0, 700, 3], [0, 0, SLOT], [5, 0, 0]]  # [from][to]
    try:
        for iteration in range(3):
            sent = [[data(s * 3 + r, sizes[s][r], iteration) for r in range(world)] for s in range(world)]
            got = [[torch.zeros(sizes[s][r], dtype=torch.uint8) for s in range(world)] for r in range(world)]
            group.run(
                [
                    Exchange(
                        [Message(p, sent[r][p].data_ptr(), sizes[r][p]) for p in range(world) if sizes[r][p]],
                        [Message(p, got[r][p].data_ptr(), sizes[p][r]) for p in range(world) if sizes[p][r]],
                    )
                    for r in range(world)
                ]
            )
            for s in range(world):
                for r in range(world):
                    assert torch.equal(got[r][s], sent[s][r])
    finally:
        group.close()


def test_push_writes_outputs_directly():
    world, n, group = 2, 501, Group(2)
    outputs = [torch.zeros(world * n, dtype=torch.uint8) for _ in range(world)]
    try:
        for iteration in range(4):
            inputs = [data(r, n, iteration) for r in range(world)]
            group.run(
                [
                    Exchange(
                        [Message(1 - r, inputs[r].data_ptr(), n, outputs[1 - r].data_ptr() + r * n)],
                        [Message(1 - r, outputs[r].data_ptr() + (1 - r) * n, n)],
                        (inputs[r].data_ptr(), outputs[r].data_ptr() + r * n, n),
                        zero_copy=True,
                    )
                    for r in range(world)
                ]
            )
            for output in outputs:
                assert torch.equal(output, torch.cat(inputs))
    finally:
        group.close()


def test_a_late_peer_is_named_at_the_deadline():
    group = Group(2, timeout_s=0.3)
    into = torch.zeros(8, dtype=torch.uint8)
    try:
        job = group.engines[0].submit(Exchange(receives=[Message(1, into.data_ptr(), 8)]), None)
        with pytest.raises(DeadlineError, match="waiting for rank 1"):
            group.engines[0].wait(job)
        assert isinstance(group.faults[0], DeadlineError)
        with pytest.raises(DeadlineError):
            group.engines[0].submit(Exchange(), None)
    finally:
        group.close()


def test_triton_is_left_as_it_was():
    """A launch makes triton.language interpretable; afterwards its functions are the old ones."""
    import triton.language as tl

    before = tl.load
    group = Group(2)
    try:
        group.run([Exchange(), Exchange()])
    finally:
        group.close()
    assert tl.load is before
