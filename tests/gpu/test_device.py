"""The device side on a GPU, compiled, between processes: what tests/ranks/test_device.py does in the interpreter, with
the proxy's queues on NVIDIA GPUs; and Gluon, which has no interpreter.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_pg.device.gluon import DeviceContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device"),
]

RANKS = Path(__file__).parents[1] / "ranks"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"ranks_{name}", RANKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device, triggered = _load("test_device"), _load("test_triggered")


def on_a_gpu(rank, world, name, *arguments):
    device.on_a_gpu(rank, world, name, *arguments)


def plans_on_a_gpu(rank, world):
    triggered.on_a_gpu(rank, world)


CASES = [
    (2, "moves_everything"),
    (2, "does_atomics"),
    (2, "puts_blocks"),
    (2, "puts_tiles"),
    (2, "signals_behind_puts", 1),
    (4, "adds_and_swaps"),
    (2, "gives_up"),
    (2, "uses_a_context"),
    (2, "gathers", ("triton", "gluon")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_in_triton(ranks, case):
    world, *arguments = case
    ranks(world).run(on_a_gpu, *arguments, timeout_s=100)


def test_triggered_plans(ranks):
    ranks(2).run(plans_on_a_gpu, timeout_s=100)


@gluon.jit
def through_context(context, source, inbox, words, engine, landed, N: gl.constexpr, layout: gl.constexpr):
    """What tests/device_kernels.py does in Triton."""
    ctx = DeviceContext.initialize(context)
    i = gl.arange(0, N, layout=layout)
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    v = ctx.cur_rank + 1
    ctx.put(source + i, inbox + i, peer)
    ctx.store(inbox + N + i, ctx.load(source + i, peer), peer)
    ctx.copy(source + i, inbox + 2 * N + i, ctx.cur_rank, peer)
    ctx.get(source + i, inbox + 3 * N + i, peer)
    ctx.put(source + i, inbox + 4 * N + i, peer, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(words + 0, v, peer)
    ctx.atomic_sub(words + 1, v, peer)
    ctx.atomic_xchg(words + 2, v, peer)
    ctx.atomic_xor(words + 3, v, peer)
    ctx.atomic_and(words + 4, v, peer)
    ctx.atomic_or(words + 5, v, peer)
    ctx.atomic_min(words + 6, v, peer)
    ctx.atomic_max(words + 7, v, peer)
    ctx.atomic_cas(words + 8, 5, v, peer)
    ctx.atomic_add(words + 9, v, peer, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.atomic_cas(words + 10, 5, v, peer, copy_engine_ctx=engine, use_copy_engine=True)
    gl.store(landed, ctx.quiet(peer, engine))


def in_gluon(rank, world):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    device.over_a_proxy(rank, world, "uses_a_gluon_context", on="cuda")


def uses_a_gluon_context(rank, world):
    size = device.SIZE
    with device.context() as ctx:
        source, inbox = ctx.empty(size, dtype=torch.int32), ctx.zeros(5, size, dtype=torch.int32)
        source.copy_(device.data(torch.int32, rank, 0))
        words, landed = ctx.full((11,), 5, dtype=torch.int32), device.local(1, torch.int32)
        torch.cuda.synchronize()
        ctx.barrier()
        layout = gl.BlockedLayout([1], [64 if torch.version.hip else 32], [4], [0])
        arguments = (ctx.get_device_context(), source, inbox, words, ctx.get_copy_engine_ctx(), landed)
        through_context[(1,)](*arguments, N=size, layout=layout)
        torch.cuda.synchronize()
        ctx.barrier()
        lower, mine, upper = (device.data(torch.int32, r % world, 0) for r in (rank - 1, rank, rank + 1))
        assert landed.item() == 1
        for row, expected in enumerate((lower, mine, lower, upper, lower)):
            assert torch.equal(inbox[row].cpu(), expected), row
        v = (rank - 1) % world + 1
        assert words.tolist() == [5 + v, 5 - v, v, 5 ^ v, 5 & v, 5 | v, min(5, v), max(5, v), v, 5 + v, v]


device.uses_a_gluon_context = uses_a_gluon_context


@pytest.mark.parametrize("world", [1, 2])
def test_in_gluon(ranks, world):
    ranks(world).run(in_gluon, timeout_s=100)
