"""Ranks that call differently: other operations, sizes, dtypes, order. Every rank is told, by name, and at once."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

from calls import gather, told
from iris_pg.errors import ClosedError, MismatchError

ENGINES = ["sdma", "cu"]


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
        assert seconds < 10, text  # of 20
        assert then[0] == ClosedError.__name__, then
        assert "has failed before" in then[1]
        assert then[2] < 10


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
        assert seconds < 10, text  # of 20
        for then, then_text, then_seconds in later:
            assert then == ClosedError.__name__, then_text
            assert "has failed before" in then_text and "different operations" in then_text, then_text
            assert then_seconds < 10


MANY = 36  # operations in flight: more than those of which ranks tell


def begins_many(rank, world, wrong, what):
    """Rank 1 waits for each operation, where rank 0 begins all at once. Number ``wrong`` is another one there."""

    def begin(i):
        is_wrong = i == wrong and rank == 1
        if what == "dtypes":
            tensor = torch.ones(8, dtype=torch.int32 if is_wrong else torch.float32)
            return dist.all_reduce(tensor, async_op=True)
        rows = [[2 + (p + q + i) % 3 for q in range(world)] for p in range(world)]
        if is_wrong and what == "sizes":
            rows[0][1] += 1
        if i == wrong and what == "nothing":
            rows[0][1] = 3 if rank == 1 else 0  # it waits for what nobody sends
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
    for (kind, text, _), (then, _, _) in ranks(2).run(
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
    ranks(2).run(exchanges_many, options=dict(engine="cu"))


def allocates_differently(rank, world):
    heap = dist.group.WORLD.transport.heap
    kept = heap.empty(100)
    said = [told(lambda: heap.empty(1000 + rank)), told(lambda: heap.empty(1000) if rank else dist.barrier())]
    del kept
    return said


def test_ranks_that_allocate_differently_are_all_told(ranks):
    for (kind, text, seconds), (second_kind, _, _) in ranks(3).run(allocates_differently, group_timeout_s=5):
        assert kind == MismatchError.__name__
        assert all(f"rank {p}: {{'nbytes': {4 * (1000 + p)}" in text for p in range(3)), text
        assert seconds < 4  # of 5
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
