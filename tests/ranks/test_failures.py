"""What goes wrong with ranks: late ones, dead ones. Every other rank is told, by name, and in time."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import rank_pool
from calls import gather, told
from iris_pg.errors import ClosedError, DeadlineError, PeerLostError

ENGINES = ["sdma", "cu"]


# Late ranks -----------------------------------------------------------------------------------------------------------


def sleeps_past_the_deadline(rank, world, asynchronous):
    dist.barrier()
    if rank == 1:
        rank_pool.current_store.wait(["seen by 0", "seen by 2"])
    else:
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
    first = told(lambda: gather(8, asynchronous=asynchronous))
    rank_pool.current_store.set(f"seen by {rank}", "")
    return first, told(lambda: gather(8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_misses_the_deadline_is_named(ranks, asynchronous, engine):
    for rank, (first, then) in enumerate(
        ranks(3).run(sleeps_past_the_deadline, asynchronous, options=dict(engine=engine), group_timeout_s=20)
    ):
        kind, text, seconds = first
        if rank == 1:  # it is the late one: its own call ends with what the others say, or does what is left to do
            assert kind in (DeadlineError.__name__, PeerLostError.__name__, ""), first
        else:
            assert kind == DeadlineError.__name__, first
            assert "rank 1" in text, text
            assert 0.9 < seconds < 10, seconds  # of 20
            assert then[0] == ClosedError.__name__
            assert "has failed before" in then[1]
            assert "rank 1" in then[1]


def is_late(rank, world):
    for i in range(2):
        if rank == i:
            time.sleep(1.5)
        gather(8)
    if rank == 1:
        time.sleep(0.5)
    dist.group.WORLD.transport.heap.empty(100)


def test_a_rank_that_is_late_but_in_time_is_waited_for(ranks):
    ranks(2).run(is_late, group_timeout_s=10)


def has_its_own_timeout(rank, world):
    group = dist.group.WORLD
    group.set_timeout(datetime.timedelta(seconds=0.5))
    if rank == 0:
        said = told(lambda: gather(8))
        rank_pool.current_store.set("seen", "")
        return said
    rank_pool.current_store.wait(["seen"])


def test_set_timeout(ranks):
    (kind, text, seconds), _ = ranks(2).run(has_its_own_timeout, group_timeout_s=20)
    assert kind == DeadlineError.__name__
    assert "rank 1 has not begun it" in text
    assert 0.4 < seconds < 10  # of 20


def comes_too_late(rank, world):
    def init():
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=20 if rank == 2 else 1),
        )

    if rank == 2:
        rank_pool.current_store.wait(["seen by 0", "seen by 1"])
        return None
    said = told(init)
    rank_pool.current_store.set(f"seen by {rank}", "")
    return said


def test_a_rank_that_does_not_come_to_set_up_is_named_by_all(ranks):
    for kind, text, seconds in ranks(3).run(comes_too_late, init=None)[:2]:
        assert kind == DeadlineError.__name__, text
        assert "rank 2 did not start within 1 s" in text, text
        assert 0.9 < seconds < 10  # of 20


def tries_again(rank, world):
    """Rank 1 misses the first try; all three meet in the next."""

    def init(timeout_s):
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    if rank != 1:
        rank_pool.current_store.set(f"here {rank}", "")
        rank_pool.current_store.wait(["here 0", "here 2"])  # else one might come to the next try of the other
        kind, text, _ = told(lambda: init(0.5))
        assert kind == DeadlineError.__name__, text
        rank_pool.current_store.set(f"gave up {rank}", "")
        dist.distributed_c10d._world.group_count = 0
    rank_pool.current_store.wait(["gave up 0", "gave up 2"])  # else one might fail with the other's first try
    init(20)
    gather(8)


def test_a_group_can_be_made_after_a_try_that_failed(ranks):
    ranks(3).run(tries_again, init=None)


# Dead ranks -----------------------------------------------------------------------------------------------------------


def dies_before_its_first_call(rank, world, doomed, engine):
    if rank == doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    first = told(lambda: gather(8))
    return first, told(dist.barrier)


def dies_in_a_loop(rank, world, doomed, engine):
    if rank == doomed:
        # From another process: a thread in here may wait for long for the GIL, which the interpreter hardly lets go of.
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])

    def loop():
        for _ in range(100_000):
            gather(1_000_000 if engine == "sdma" else 100)

    return told(loop), told(dist.barrier)


def dies_with_work_outstanding(rank, world, doomed, engine):
    if rank == doomed:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    outputs = [torch.zeros(world * 8, dtype=torch.int32) for _ in range(10)]
    works = [dist.all_gather_into_tensor(o, torch.ones(8, dtype=torch.int32), async_op=True) for o in outputs]
    said = [told(work.wait) for work in works]
    assert all(work.is_completed() and not work.is_success() for work in works)
    assert all(kind == PeerLostError.__name__ for kind, _, _ in said)
    return said[0], told(dist.barrier)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("dies", "doomed"),
    [(dies_before_its_first_call, 1), (dies_in_a_loop, 0), (dies_in_a_loop, 2), (dies_with_work_outstanding, 1)],
)
def test_a_rank_that_is_killed_is_named_by_all_others(mortal_ranks, dies, doomed, engine):
    results = mortal_ranks(3).run(
        dies, doomed, engine, options=dict(engine=engine), may_die=[doomed], group_timeout_s=20
    )
    for result in (r for rank, r in enumerate(results) if rank != doomed):
        (kind, text, seconds), (then, then_text, _) = result
        assert kind == PeerLostError.__name__, text
        assert f"rank {doomed} " in text, text
        assert seconds < 10, seconds
        assert then == ClosedError.__name__
        assert f"rank {doomed} " in then_text


def dies_in_set_up(rank, world, doomed, when):
    from iris_pg.memory.sharing import Links

    if rank == doomed:

        def die(*args, **keywords):
            os.kill(os.getpid(), signal.SIGKILL)

        # Its card is published, then it dials; then the group agrees on options, and makes its heap, in exchanges.
        count = iter(range(2))
        if when == "before its card is published":
            die()
        elif when == "after its card is published":
            Links._dial = die
        elif when == "when it has connected":
            Links.exchange = die
        else:
            exchange = Links.exchange
            Links.exchange = lambda *args, **keywords: die() if next(count) == 1 else exchange(*args, **keywords)

    def init():
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=2 if when.startswith("before") else 20),
        )

    said = told(init)
    if rank == doomed:
        die()  # it was to die before; in no case may it live on with methods replaced
    return said


@pytest.mark.parametrize(
    ("when", "doomed"),
    [
        ("before its card is published", 0),
        ("before its card is published", 2),
        ("after its card is published", 0),
        ("after its card is published", 1),
        ("after its card is published", 2),
        ("when it has connected", 1),
        ("between options and heap", 2),
    ],
)
def test_a_rank_that_is_killed_in_set_up_is_named_by_all_others(mortal_ranks, when, doomed):
    results = mortal_ranks(3).run(dies_in_set_up, doomed, when, init=None, may_die=[doomed])
    for kind, text, seconds in (r for rank, r in enumerate(results) if rank != doomed):
        if when.startswith("before"):
            assert kind == DeadlineError.__name__, text
            assert f"rank {doomed} did not start" in text, text
            assert 1.9 < seconds < 10
        else:
            assert kind == PeerLostError.__name__, text
            assert f"rank {doomed} died" in text, text
            assert seconds < 10, seconds  # of 20


def meets_after_all_that(rank, world):
    gather(8)


def test_survivors_make_a_new_group(mortal_ranks):
    mortal_ranks(3).run(meets_after_all_that)
