"""What goes wrong between ranks: different calls, late ranks, dead ranks. Every rank is told, by name, and in time."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

import rank_pool
from iris_pg.errors import ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError

ENGINES = ["sdma", "cu"]


def told(call) -> tuple[str, str, float]:
    """Return (kind, text, seconds) of the IrisError that ``call`` ends with."""
    start = time.monotonic()
    try:
        call()
    except IrisError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


# Different calls ------------------------------------------------------------------------------------------------------


def gather(n: int, dtype: torch.dtype = torch.int32, asynchronous: bool = False):
    output = torch.zeros(dist.get_world_size() * n, dtype=dtype)
    work = dist.all_gather_into_tensor(output, torch.ones(n, dtype=dtype), async_op=asynchronous)
    if work:
        work.wait()


def gather_list(sizes):
    dist.all_gather([torch.zeros(n) for n in sizes], torch.zeros(sizes[dist.get_rank()]))


def gather_to(root, size_of_rank, asynchronous=False):
    rank = dist.get_rank()
    into = [torch.zeros(size_of_rank(root, p)) for p in range(dist.get_world_size())] if rank == root else None
    work = dist.gather(torch.zeros(size_of_rank(rank, rank)), into, dst=root, async_op=asynchronous)
    if work:
        work.wait()


def scatter_from(root, size_of_rank):
    rank = dist.get_rank()
    parts = [torch.zeros(size_of_rank(root, p)) for p in range(dist.get_world_size())] if rank == root else None
    dist.scatter(torch.zeros(size_of_rank(rank, rank)), parts, src=root)


def swap(size_of):
    """``size_of[source][target]`` elements go from source to target, as this rank thinks."""
    rank = dist.get_rank()
    dist.all_to_all([torch.zeros(row[rank]) for row in size_of], [torch.zeros(n) for n in size_of[rank]])


def heap_gather(n):
    world = dist.get_world_size()
    output = dist.group.WORLD.transport.heap.empty(world * n)  # all ranks allocate, and one does not use it
    dist.all_gather_into_tensor(output if dist.get_rank() else torch.zeros(world * n), torch.zeros(n))


# What rank 1 (of 3) does and what the others do.
DIFFERENT = {
    "sizes": (lambda: gather(9), lambda: gather(8)),
    "sizes, many chunks": (lambda: gather(1000), lambda: gather(3000)),
    "sizes, asynchronous": (lambda: gather(9, asynchronous=True), lambda: gather(8, asynchronous=True)),
    "dtypes": (lambda: gather(8, torch.float32), lambda: gather(8)),
    "operations": (lambda: gather(8), lambda: dist.broadcast(torch.zeros(8), 0)),
    "a barrier": (dist.barrier, lambda: gather(8)),
    "a barrier, asynchronous": (lambda: dist.barrier(async_op=True).wait(), lambda: gather(8)),
    "order": (lambda: (gather(8), gather(9)), lambda: (gather(9), gather(8))),
    "roots": (lambda: dist.broadcast(torch.zeros(8), 1), lambda: dist.broadcast(torch.zeros(8), 0)),
    "roots of gather": (lambda: gather_to(1, lambda me, p: 8), lambda: gather_to(0, lambda me, p: 8)),
    "one operation left out": (dist.barrier, lambda: (gather(8), dist.barrier())),
    "lists": (lambda: gather_list([8, 8, 9]), lambda: gather_list([8, 8, 8])),
    "nothing to gather": (lambda: gather(0), lambda: gather(8)),
    "heap and not heap": (lambda: heap_gather(8), lambda: heap_gather(8)),
    # The root expects less than rank 1 sends, or sends another size than rank 1 expects.
    "sizes of gather": (
        lambda: gather_to(0, lambda me, p: 8),
        lambda: gather_to(0, lambda me, p: 7 if me == 0 and p == 1 else 8),
    ),
    "sizes of gather, chunks": (
        lambda: gather_to(0, lambda me, p: 800),
        lambda: gather_to(0, lambda me, p: 70 if me == 0 and p == 1 else 800),
    ),
    "sizes of scatter": (
        lambda: scatter_from(0, lambda me, p: 8),
        lambda: scatter_from(0, lambda me, p: 9 if me == 0 and p == 1 else 8),
    ),
    "nothing sent to gather": (
        lambda: gather_to(0, lambda me, p: 0),
        lambda: gather_to(0, lambda me, p: 8),
    ),
    "nothing expected by gather": (
        lambda: gather_to(0, lambda me, p: 8),
        lambda: gather_to(0, lambda me, p: 0 if me == 0 and p == 1 else 8),
    ),
    "sizes of gather, asynchronous": (
        lambda: gather_to(0, lambda me, p: 8, asynchronous=True),
        lambda: gather_to(0, lambda me, p: 7 if me == 0 and p == 1 else 8, asynchronous=True),
    ),
    # Both ranks send to each other; one of the two expects another size than comes.
    "sizes of all_to_all": (lambda: swap([[4, 4, 4]] * 3), lambda: swap([[4, 4, 4], [4, 4, 5], [4, 4, 4]])),
}


def calls_differently(rank, world, case, engine):
    def all_of_it():
        DIFFERENT[case][rank != 1]()
        dist.barrier()  # a rank whose own part needed nobody is told here

    kind, text, seconds = told(all_of_it)
    return kind, text, seconds, told(dist.barrier)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_call_differently_are_all_told(ranks, case, engine):
    options = dict(engine=engine, chunk_bytes=1024)
    for rank, (kind, text, seconds, then) in enumerate(
        ranks(3).run(calls_differently, case, engine, options=options, group_timeout_s=20)
    ):
        assert kind == MismatchError.__name__, (rank, kind, text)
        assert re.search(r"rank \d", text), text
        assert "different operations" in text, text
        assert re.search(rf"\[group=\w+ rank={rank} op=\w+ seq=\d+\]", text), text
        assert seconds < 5, text
        assert then[0] == ClosedError.__name__, then
        assert "has failed before" in then[1]
        assert then[2] < 1


def sees_another_size(rank, world):
    return told(lambda: gather_to(0, lambda me, p: 7 if me == 0 and p == 1 else 8))


def test_who_sends_and_who_expects_what_is_said(ranks):
    """By the cu engine, where ranks tell each other more than a tag."""
    (kind, text, _), *_ = ranks(3).run(sees_another_size, options=dict(engine="cu"), group_timeout_s=20)
    assert kind == MismatchError.__name__
    assert "they disagree on the size of a message: rank 0 expects 28 bytes from rank 1, which sends 32;" in text, text
    assert "in gather torch.float32 to rank 0 [" in text, text


def reduces_another_dtype(rank, world, asynchronous):
    tensor = torch.ones(8, dtype=torch.int32 if rank == 1 else torch.float32)
    work = dist.all_reduce(tensor, async_op=asynchronous)
    if work:
        work.wait()


def fails_and_tries_again(rank, world, asynchronous):
    first = told(lambda: reduces_another_dtype(rank, world, asynchronous))
    return first, [told(lambda: gather(8)), told(lambda: gather(8, asynchronous=True)), told(dist.barrier)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_another_dtype_of_the_same_size_is_told_by_the_operation_itself(ranks, asynchronous, engine):
    """As many bytes come, so no wait lasts; and every later call says what the group failed with."""
    for (kind, text, seconds), later in ranks(3).run(
        fails_and_tries_again, asynchronous, options=dict(engine=engine), group_timeout_s=20
    ):
        assert kind == MismatchError.__name__, text
        assert "different operations" in text and re.search(r"rank \d", text), text
        assert seconds < 5, text
        for then, then_text, then_seconds in later:
            assert then == ClosedError.__name__, then_text
            assert "has failed before" in then_text and "different operations" in then_text, then_text
            assert then_seconds < 1


MANY = 40  # operations in flight: more than those of which ranks tell


def begins_many(rank, world, wrong, what):
    """Rank 1 waits for each operation, where the others begin all at once. Number ``wrong`` is another one there."""

    def begin(i):
        is_wrong = i == wrong and rank == 1
        if what == "dtypes":
            tensor = torch.ones(8, dtype=torch.int32 if is_wrong else torch.float32)
            return dist.all_reduce(tensor, async_op=True)
        rows = [[2 + (p + q + i) % 3 for q in range(world)] for p in range(world)]
        if is_wrong and what == "sizes":
            rows[2][1] += 1
        if i == wrong and what == "nothing":
            rows[2][1] = 3 if rank == 1 else 0  # it waits for what nobody sends
        outs, ins = [torch.zeros(row[rank]) for row in rows], [torch.zeros(n) for n in rows[rank]]
        return dist.all_to_all(outs, ins, async_op=True)

    def all_of_it():
        works = []
        for i in range(MANY):
            works.append(begin(i))
            if rank == 1:
                works[-1].wait()
        for work in works:
            work.wait()
        dist.barrier()

    return told(all_of_it), told(dist.barrier)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["dtypes", "sizes", "nothing"])
@pytest.mark.parametrize("wrong", [0, MANY - 1])
def test_a_mismatch_among_many_operations_in_flight_is_told(ranks, wrong, what, engine):
    for (kind, text, _), (then, _, _) in ranks(3).run(
        begins_many, wrong, what, options=dict(engine=engine), group_timeout_s=20
    ):
        assert kind in (MismatchError.__name__, ClosedError.__name__), text  # closed: while it still began some
        assert "different operations" in text, text
        assert then == ClosedError.__name__


def exchanges_many(rank, world):
    """Sizes that change, nothing sometimes, and many in flight: no rank finds a difference that there is not."""
    for asynchronous in (False, True):
        works = []
        for i in range(MANY if asynchronous else 10):
            rows = [[(p + 2 * q + i) % 4 for q in range(world)] for p in range(world)]
            ins = [torch.full((n,), 100 * i + 10 * rank + q) for q, n in enumerate(rows[rank])]
            outs = [torch.zeros(row[rank], dtype=torch.int64) for row in rows]
            work = dist.all_to_all(outs, ins, async_op=asynchronous)
            works.append((i, rows, outs, work))
        for i, rows, outs, work in works:
            if work:
                work.wait()
            assert [t.tolist() for t in outs] == [[100 * i + 10 * p + rank] * rows[p][rank] for p in range(world)]
    dist.barrier()


def test_sizes_that_agree_are_taken_to_agree(ranks):
    ranks(3).run(exchanges_many, options=dict(engine="cu"))


def allocates_differently(rank, world):
    heap = dist.group.WORLD.transport.heap
    kept = heap.empty(100)
    said = [told(lambda: heap.empty(1000 + rank)), told(lambda: heap.empty(1000) if rank else dist.barrier())]
    del kept
    return said


def test_ranks_that_allocate_differently_are_all_told(ranks):
    for (kind, text, seconds), (second_kind, _, _) in ranks(3).run(allocates_differently, group_timeout_s=2):
        assert kind == MismatchError.__name__
        assert all(f"rank {p}: {{'nbytes': {4 * (1000 + p)}" in text for p in range(3)), text
        assert seconds < 1
        assert second_kind, "a rank that allocates alone, while another is in a barrier, waits for ever"


def waits_with_a_long_key(rank, world):
    """The words for an operation may be longer than the place for them; that must not make it look different."""
    sizes = [1_000_000_007 * 10**9 + p for p in range(40)]
    group = dist.group.WORLD
    if rank == 2:
        time.sleep(0.3)  # so that the other two wait, and look at each other
    from iris_pg.collectives.flow import Flow, Part
    from iris_pg.program import Ref

    here, there = torch.full((8,), rank, dtype=torch.uint8), torch.zeros(world * 8, dtype=torch.uint8)
    peers = [p for p in range(world) if p != rank]

    def flow(key, local):
        sends = tuple(Part(p, 8, Ref(rank, "in", 0)) for p in peers)
        return Flow("test", sends, tuple(Part(p, 8, Ref(rank, "out", 8 * p)) for p in peers), to_all=True)

    key = ("test", tuple(sizes), "bytes")
    assert len(str(key)) > 600
    group.transport.run(key, None, flow, ("in", "out"), (here.data_ptr(), there.data_ptr()))
    assert there.view(world, 8)[:, 7].tolist() == [0 if p == rank else p for p in range(world)]


def test_an_operation_whose_name_is_very_long(ranks):
    ranks(3).run(waits_with_a_long_key)


# Late ranks -----------------------------------------------------------------------------------------------------------


def sleeps_past_the_deadline(rank, world, asynchronous):
    dist.barrier()
    if rank == 1:
        time.sleep(3)
    first = told(lambda: gather(8, asynchronous=asynchronous))
    return first, told(lambda: gather(8))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_misses_the_deadline_is_named(ranks, asynchronous, engine):
    for rank, (first, then) in enumerate(
        ranks(3).run(sleeps_past_the_deadline, asynchronous, options=dict(engine=engine), group_timeout_s=1)
    ):
        kind, text, seconds = first
        if rank == 1:  # it is the late one: its own call ends with what the others say, or does what is left to do
            assert kind in (DeadlineError.__name__, PeerLostError.__name__, ""), first
        else:
            assert kind == DeadlineError.__name__, first
            assert "rank 1" in text, text
            assert 0.9 < seconds < 2.5, seconds
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
        return told(lambda: gather(8))
    time.sleep(1.5)


def test_set_timeout(ranks):
    (kind, text, seconds), _ = ranks(2).run(has_its_own_timeout)
    assert kind == DeadlineError.__name__
    assert "rank 1 has not begun it" in text
    assert 0.4 < seconds < 1.4


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
        assert "rank 2 did not start within 1.0 s" in text, text
        assert 0.9 < seconds < 3


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
        assert told(lambda: init(0.5))[0] == DeadlineError.__name__
        dist.distributed_c10d._world.group_count = 0
    else:
        time.sleep(1)
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
            assert 1.9 < seconds < 5
        else:
            assert kind == PeerLostError.__name__, text
            assert f"rank {doomed} died" in text, text
            assert seconds < 5, seconds


def meets_after_all_that(rank, world):
    gather(8)


def test_survivors_make_a_new_group(mortal_ranks):
    mortal_ranks(3).run(meets_after_all_that)
