"""Triggered plans: batches that a kernel lets go while it computes, epochs, order of queues, and what fails."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
import torch

import device_kernels as k
import host_proxy

N, BATCHES = 32, 3
by_proxy, device = False, "cpu"


@contextlib.contextmanager
def context(**variables):
    from iris_pg.context import iris

    before = dict(os.environ)
    os.environ.update(variables)
    try:
        engines = () if by_proxy and device == "cpu" else ("sdma",)
        made = iris(heap_size=16 << 20, engines=engines, device=device)
        if not engines:
            host_proxy.install(made)
    finally:
        os.environ.clear()
        os.environ.update(before)
    with made as ctx:
        yield ctx


def on_a_gpu(rank, world):
    global by_proxy, device
    torch.cuda.set_device(rank % torch.cuda.device_count())
    by_proxy, device = True, "cuda"
    try:
        lets_batches_go(rank, world)
    finally:
        by_proxy, device = False, "cpu"


def over_a_proxy(rank, world):
    global by_proxy
    by_proxy = True
    try:
        lets_batches_go(rank, world)
    finally:
        by_proxy = False


def batch_of(rank, batch, epoch):
    return (torch.arange(N) + 1000 * batch + 10 * epoch) * (rank + 1)


def sends(ctx, source, inbox):
    """What rank r sends: batch b of its source to [r, b] of every other's inbox."""
    from iris_pg.triggered import Send

    rank, world = ctx.cur_rank, ctx.num_ranks
    peers = [(rank + hop) % world for hop in range(1, world)]
    return [[Send(source[b], peer, inbox[rank, b]) for peer in peers] for b in range(BATCHES)]


def lets_batches_go(rank, world):
    with context() as ctx:
        source = ctx.zeros(BATCHES, N, dtype=torch.int64)
        inbox = ctx.zeros(world, BATCHES, N, dtype=torch.int64)
        plan = ctx.triggered(sends(ctx, source, inbox))
        digests = [ctx.broadcast(plan.digest, r) for r in range(world)]
        assert len(set(digests)) == 1
        for epoch in range(1, 4):
            ctx.barrier()  # what is sent now overwrites what peers have read
            assert plan.arm() == epoch
            result = torch.zeros(world, BATCHES, N, dtype=torch.int64, device=device)
            time.sleep(0.01 * ((rank + epoch) % 2))
            arguments = (plan.device, ctx.get_copy_engine_ctx(), source, inbox, result, epoch, rank, world)
            k.run(k.computes, *arguments, BATCHES=BATCHES, N=N)
            plan.wait()
            assert plan.state.value == "idle" and all(plan.arrived(b) for b in range(BATCHES))
            expected = torch.stack(
                [torch.stack([batch_of(r, b, epoch) * (r != rank) for b in range(BATCHES)]) for r in range(world)]
            )
            assert torch.equal(inbox.cpu(), expected) and torch.equal(result.cpu(), expected)
        plan.close()


@pytest.mark.parametrize("world", [1, 2, 4] if k.FULL else [2, 4])
def test_a_kernel_lets_batches_go(ranks, world):
    ranks(world).run(lets_batches_go)


def test_a_kernel_lets_batches_go_over_a_proxy(ranks):
    ranks(2).run(over_a_proxy)


def keeps_order(rank, world):
    from iris_pg.errors import ArgumentError, ClosedError, MismatchError
    from iris_pg.triggered import Send

    with context() as ctx:
        peer = (rank + 1) % world
        a, b = ctx.zeros(N, dtype=torch.int64), ctx.zeros(N, dtype=torch.int64)
        a.copy_(batch_of(rank, 0, 0))
        first = ctx.triggered([[Send(a, peer, b)]], channel=3)
        second = ctx.triggered([[Send(a, peer, b)]], channel=3)
        other = ctx.triggered([[Send(a, peer, b)]], channel=4)
        with pytest.raises(ArgumentError, match=r"wait\(\) of a plan that is idle"):
            first.wait()
        first.arm()
        for call in (
            lambda: second.arm(),
            lambda: ctx.put(a, peer, b, channel=3),
            lambda: ctx.quiet(peer, channel=3),
            lambda: ctx.quiet(channel=3),
        ):
            with pytest.raises(ArgumentError, match=f"armed on channel 3 to rank {peer}, and what is behind it"):
                call()
        with pytest.raises(ArgumentError, match="epoch 1 is armed and has not ended"):
            first.arm()
        other.arm()  # on another channel, and it overtakes
        other.publish(0)
        other.wait()
        assert torch.equal(b, batch_of((rank - 1) % world, 0, 0)) and not first.arrived(0)
        ctx.barrier()
        with pytest.raises(ArgumentError, match=r"publish\(1\) of a plan of 1 batches"):
            first.publish(1)
        first.publish(0)
        first.wait()
        second.arm()
        ctx.barrier()
        second.abort()
        second.abort()
        with pytest.raises(ClosedError, match="the plan is aborted and arms no more"):
            second.arm()
        ctx.put(a, peer, b, channel=3)  # the channel is free again
        for plan in (first, second, other):
            plan.close()
            plan.close()
        with pytest.raises(MismatchError, match=r"rank . has . batches on channel 3, this rank"):
            ctx.triggered([[Send(a, peer, b)]] * (1 + rank), channel=3)
        with pytest.raises(
            ArgumentError if rank else MismatchError, match="not in this rank's heap|rank 1 has no plan"
        ):
            ctx.triggered([[Send(torch.zeros(4) if rank else b, peer)]])
        with pytest.raises(ArgumentError, match="at most 524288, half a ring, are armed at once"):
            ctx.triggered([[Send(a, peer, b)]] * 8000)


def test_plans_that_share_a_queue_keep_their_order(ranks):
    ranks(2).run(keeps_order)


def is_late(rank, world):
    from iris_pg.errors import ClosedError, DeadlineError
    from iris_pg.triggered import Send

    with context(IRIS_PG_TIMEOUT="5") as ctx:
        peer = (rank + 1) % world
        a, b = ctx.zeros(N, dtype=torch.int64), ctx.zeros(N, dtype=torch.int64)
        plan = ctx.triggered([[Send(a, peer, b)], []])
        plan.arm()
        if rank == 0:
            with pytest.raises(DeadlineError, match=r"batches \[0\] were not published on this rank"):
                plan.wait(timeout_s=0.3)
            assert plan.state.value == "failed"
            with pytest.raises(ClosedError, match="is failed"):
                plan.arm()
            ctx.barrier()
            ctx.barrier()
        else:
            plan.publish(0)
            ctx.barrier()
            plan.wait()  # the late one's transfers were let go, so that queues come to an end
            assert plan.state.value == "idle"
            ctx.barrier()  # a context that is closed drops what its engine has not done


def test_a_batch_that_is_not_published_is_named(ranks):
    ranks(2).run(is_late)


def fails_in_a_queue(rank, world):
    from iris_pg.errors import DeadlineError, QueueError
    from iris_pg.triggered import Send

    with context() as ctx:
        peer = (rank + 1) % world
        a, b = ctx.zeros(N, dtype=torch.int64), ctx.zeros(N, dtype=torch.int64)
        for error, text in ((QueueError("the wire is cut"), "^the wire is cut"), (DeadlineError("late"), "late$")):
            channel = 1 if isinstance(error, QueueError) else 2
            plan = ctx.triggered([[Send(a, peer, b)]], channel=channel)
            plan.arm()
            if rank == 0:
                ctx._channels._queues[peer, channel].fail(error)
                start = time.monotonic()
                with pytest.raises(type(error), match=text) as caught:
                    plan.wait(timeout_s=60)
                assert time.monotonic() - start < 30 and plan.state.value == "failed"
                if channel == 2:
                    assert "batches [0] were not published on this rank" in str(caught.value)
            else:
                plan.abort()
            ctx.barrier()


def test_a_queue_that_has_failed_ends_a_wait_at_once(ranks):
    ranks(2).run(fails_in_a_queue)
