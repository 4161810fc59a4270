"""Collectives of a one-sided context, through both engines, in its heap and outside of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rank_pool
from iris_pg import iris
from iris_pg.collective_api import Config
from iris_pg.errors import ArgumentError, ClosedError, MismatchError, OptionError, UnsupportedError

ENGINES = {"sdma": Config(engine="sdma"), "cu": Config(engine="cu", comm_sms=4), "auto": None}


def numbers(rank: int, n: int) -> torch.Tensor:
    return (torch.arange(n) % 100).to(torch.float32) + 7 * rank


def collects(rank, world, engine, n, in_heap):
    config = ENGINES[engine]
    with iris(heap_size=8 << 20, device="cpu") as ctx:

        def place(tensor):
            return ctx.empty(tensor.size()).copy_(tensor) if in_heap else tensor

        free = ctx.heap.allocate(256)
        for i in range(2):
            mine, whole = place(numbers(rank + i, n)), place(torch.zeros(world * n))
            everyone = torch.cat([numbers(p + i, n) for p in range(world)])
            total = everyone.view(world, n).sum(0)
            ctx.ccl.all_gather(whole, mine, config=config)
            assert torch.equal(whole, everyone)
            result = place(torch.zeros(n))
            ctx.ccl.all_reduce(result, mine, config=config)
            assert torch.equal(result, total)
            assert torch.equal(mine, numbers(rank + i, n))
            ctx.ccl.all_reduce(result, mine, dist.ReduceOp.MAX, config=config)
            assert torch.equal(result, numbers(world - 1 + i, n))
            ctx.ccl.all_reduce(mine, mine, config=config)
            assert torch.equal(mine, total)
            whole.copy_(numbers(rank + i, world * n))
            ctx.ccl.reduce_scatter(result, whole, config=config)
            parts = torch.stack([numbers(p + i, world * n) for p in range(world)])
            assert torch.equal(result, parts.sum(0).view(world, n)[rank])
            received = place(torch.zeros(world * n))
            ctx.ccl.all_to_all(received, whole, config=config)
            assert torch.equal(received, parts.view(world, world, n)[:, rank].flatten())
            ctx.ccl.broadcast(result, mine, src=world - 1, config=config)
            assert torch.equal(result, total)
            work = ctx.ccl.all_gather(received, result, async_op=True, config=config)
            assert work.wait()
            assert torch.equal(received, total.repeat(world))
        # Engines take nothing of the context's heap.
        ctx.heap.free(free)
        text = ctx.ccl.explain()
        assert f"engine    {'sdma' if engine == 'auto' else engine}" in text
    with pytest.raises(ClosedError):
        ctx.ccl.all_gather(whole, result)


@pytest.mark.parametrize("in_heap", [True, False])
@pytest.mark.parametrize(("engine", "n"), [("sdma", 1000), ("auto", 60_000), ("cu", 100)])
def test_collectives(ranks, engine, n, in_heap):
    ranks(2).run(collects, engine, n, in_heap, timeout_s=90)


def test_among_three_ranks(ranks):
    ranks(3).run(collects, "sdma", 60, True)


def mixes_engines(rank, world):
    """Engines alternate over the same tensors, beside puts; and the variants of ROCm Iris's name them."""
    with iris(heap_size=1 << 20, engines=("sdma",), device="cpu") as ctx:
        mine, whole, landed = ctx.empty(64), ctx.zeros(world * 64), ctx.zeros(64)
        flag = ctx.zeros(1, dtype=torch.int32)
        for i in range(6):
            mine.copy_(numbers(rank + i, 64))
            config = Config(all_gather_variant=("sdma", "persistent", None)[i % 3])
            ctx.ccl.all_gather(whole, mine, config=config)
            assert torch.equal(whole, torch.cat([numbers(p + i, 64) for p in range(world)]))
            ctx.put(mine, (rank + 1) % world, landed, signal_flag=flag)
            ctx.put(mine[:0], to_rank=rank, wait_flag=flag, wait_value=i + 1)
            assert torch.equal(landed, numbers((rank - 1) % world + i, 64))
            ctx.barrier()
        engines = sorted(ctx.ccl._engines)
    return engines


def test_engines_side_by_side(ranks):
    assert ranks(2).run(mixes_engines) == [["cu", "sdma"]] * 2


def asks_for_what_is_not_there(rank, world):
    with iris(heap_size=1 << 20, device="cpu") as ctx:
        a, b = torch.zeros(4), torch.zeros(4 * world)
        for error, text, call in (
            (UnsupportedError, "all_gather: group=", lambda: ctx.ccl.all_gather(b, a, group=dist.group.WORLD)),
            (ArgumentError, "config is dict; it takes", lambda: ctx.ccl.all_gather(b, a, config={})),
            (ArgumentError, "all_reduce: the output is", lambda: ctx.ccl.all_reduce(b, a)),
            (ArgumentError, "broadcast: src=9 is not a rank", lambda: ctx.ccl.broadcast(a, a, src=9)),
            (ArgumentError, "all_gather_into_tensor: output of size", lambda: ctx.ccl.all_gather(a, a)),
        ):
            with pytest.raises(error, match=text):
                call()
        with pytest.raises(MismatchError, match="ranks are in different operations"):
            ctx.ccl.all_gather(b, a) if rank == 0 else ctx.ccl.all_reduce(a, a)
        with pytest.raises(ClosedError, match="the group has failed before"):
            ctx.ccl.all_gather(b, a)


def test_errors(ranks):
    ranks(2).run(asks_for_what_is_not_there)


def is_alone(rank, world):
    with iris(heap_size=1 << 20, device="cpu") as ctx:
        assert ctx.ccl.explain() == "no collective has been called"
    with pytest.raises(ClosedError):
        ctx.ccl.all_gather(torch.zeros(1), torch.zeros(1))
    return rank_pool.shared_mappings()["mapping of /memfd:iris_pg"]


def test_a_context_that_never_collects_makes_nothing(ranks):
    assert ranks(1).run(is_alone, init=None) == [0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(engine="warp"), "engine='warp' is not known; it is one of 'auto', 'cu', 'sdma'"),
        (dict(comm_sms=0), "comm_sms=0; it takes a positive number"),
        (dict(all_gather_variant="ring"), "all_gather_variant='ring' is not known; it is one of 'sdma', 'persistent'"),
        (dict(all_gather_variant="sdma", engine="cu"), "all_gather_variant='sdma' with engine='cu'; it is of engine"),
    ],
)
def test_configs_that_are_not_valid(keys, message):
    with pytest.raises(OptionError, match=message):
        Config(**keys)


def test_a_variant_is_another_name_of_an_engine():
    assert Config(all_gather_variant="sdma").engine_of("all_gather") == "sdma"
    assert Config(all_gather_variant="sdma").engine_of("all_reduce") == "auto"
    assert Config(engine="sdma", all_gather_variant="sdma").engine_of("all_gather") == "sdma"
