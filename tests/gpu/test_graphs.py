"""Operations in CUDA graphs: replays with changing data, mixed with eager calls."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from device_data import use_device, values

from iris_pg import device_copies
from iris_pg.errors import UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
NUMEL = 1003


def operations(rank, world, x, new):
    """Return (name, call, what should come given the inputs of all ranks); ``x`` [world * NUMEL] is the input."""
    part, others = x[:NUMEL], [p for p in range(world) if p != rank]
    parts = list(x.chunk(world))
    right, left = (rank + 1) % world, (rank - 1) % world

    def gather_into(out, asynchronous):
        work = dist.all_gather_into_tensor(out, part, async_op=asynchronous)
        return work.wait() if asynchronous else None

    def reduced(out, call):
        out.copy_(x)
        call(out)

    def ring(out):
        works = [dist.isend(part, right), dist.irecv(out[:NUMEL], left)]
        for work in works:
            work.wait()

    def first_parts(xs):
        return torch.cat([p[:NUMEL] for p in xs])

    def summed(xs):
        return sum(xs)

    def own(xs):
        return sum(xs)[rank * NUMEL : (rank + 1) * NUMEL]

    def exchanged(xs):
        return torch.cat([p[rank * NUMEL : (rank + 1) * NUMEL] for p in xs])

    n = world * NUMEL
    table = [
        ("all_gather", new(n), lambda o: gather_into(o, False), first_parts),
        ("all_gather async", new(n), lambda o: gather_into(o, True), first_parts),
        ("all_gather heap", new(n, True), lambda o: gather_into(o, False), first_parts),
        ("all_gather list", new(n), lambda o: dist.all_gather(list(o.chunk(world)), part), first_parts),
        ("all_reduce", new(n), lambda o: reduced(o, dist.all_reduce), summed),
        ("broadcast", new(n), lambda o: reduced(o, lambda t: dist.broadcast(t, world - 1)), lambda xs: xs[-1]),
        ("broadcast heap", new(n, True), lambda o: reduced(o, lambda t: dist.broadcast(t, 0)), lambda xs: xs[0]),
        ("reduce", new(n), lambda o: reduced(o, lambda t: dist.reduce(t, 0)), lambda xs: sum(xs) if not rank else x),
        ("reduce_scatter", new(NUMEL), lambda o: dist.reduce_scatter_tensor(o, x), own),
        ("reduce_scatter list", new(NUMEL), lambda o: dist.reduce_scatter(o, parts), own),
        ("all_to_all_single", new(n), lambda o: dist.all_to_all_single(o, x), exchanged),
        ("all_to_all", new(n), lambda o: dist.all_to_all(list(o.chunk(world)), parts), exchanged),
        (
            "scatter",
            new(NUMEL),
            lambda o: dist.scatter(o, parts if not rank else None),
            lambda xs: xs[0].chunk(world)[rank],
        ),
        (
            "gather",
            new(n),
            lambda o: dist.gather(part, list(o.chunk(world)) if not rank else None),
            lambda xs: first_parts(xs) if not rank else None,
        ),
        ("barrier", new(1), lambda o: dist.barrier(async_op=True).wait(), lambda xs: None),
    ]
    return table + ([("ring", new(NUMEL), ring, lambda xs: xs[left][:NUMEL])] if others else [])


def replays_give_what_eager_calls_give(rank, world, replays):
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")

    def new(numel, in_heap=False):
        return heap.empty(numel, dtype=torch.float32) if in_heap else torch.empty(numel, device="cuda")

    x = torch.zeros(world * NUMEL, device="cuda")
    table = operations(rank, world, x, new)

    def run():
        for _, out, call, _ in table:
            call(out)

    def check(i, how):
        xs = [values(p, world * NUMEL, torch.float32, i) for p in range(world)]
        for name, out, _, expected in table:
            should = expected(xs)
            assert should is None or torch.equal(out, should), (name, how, i)
            out.fill_(-1)

    x.copy_(values(rank, world * NUMEL, torch.float32, 0))
    run()
    check(0, "eager")
    graph = torch.cuda.CUDAGraph()
    pending = torch.ones(NUMEL, device="cuda")
    work = dist.all_reduce(pending, async_op=True)  # under way while the capture begins
    with torch.cuda.graph(graph):
        run()
        run()
    work.wait()
    assert pending[0].item() == world
    chance, shared = random.Random(rank), random.Random(0)
    for i in range(1, replays):
        x.copy_(values(rank, world * NUMEL, torch.float32, i))
        if chance.random() < 0.2:
            time.sleep(chance.random() * 3e-3)
        if chance.random() < 0.3:
            torch.cuda._sleep(int(chance.random() * 2e6))
        how = shared.choice(["replay", "replay", "eager"])
        graph.replay() if how == "replay" else run()
        check(i, how)
    dist.barrier()


def replays_in_rounds(rank, world, replays):
    """The same with two lanes from the first byte on, which in a graph are rounds (copy_engine/rounds.py)."""
    before, device_copies._LANES_FROM = device_copies._LANES_FROM, 0
    try:
        replays_give_what_eager_calls_give(rank, world, replays)
    finally:
        device_copies._LANES_FROM = before


def a_first_call_under_capture_says_what_to_do(rank, world):
    use_device(rank)
    group = dist.new_group()
    x = torch.ones(8, device="cuda")
    with pytest.raises(UnsupportedError, match="before the capture call any collective"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group)
    assert x[0].item() == world
    # New sizes and types under capture are no problem.
    graph, y = torch.cuda.CUDAGraph(), torch.ones(77, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):
        dist.all_reduce(y, group=group)
    graph.replay()
    assert y.float().sum().item() == 77 * world
    dist.barrier(group)


def a_thousand_replays(rank, world):
    """The operations of a training step in one graph, replayed with other inputs among eager calls; a rank is late
    now and then, on its host or on its GPU. Inputs change on the stream, so the hosts run ahead.
    """
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")
    x, eager = torch.zeros(world * NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    gathered = heap.empty(world * NUMEL, dtype=torch.float32)
    total, mine = torch.zeros(world * NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step():
        dist.all_gather_into_tensor(gathered, x[:NUMEL])
        dist.reduce_scatter_tensor(mine, x)
        total.copy_(x)
        dist.all_reduce(total)

    step()
    graph = torch.cuda.CUDAGraph()
    outstanding = torch.ones(1 << 22, device="cuda")
    torch.cuda._sleep(50_000_000 * (rank == 0))
    works = [dist.all_reduce(outstanding, async_op=True) for _ in range(3)]  # not done when the capture begins
    with torch.cuda.graph(graph):
        step()
    for work in works:
        work.wait()
    assert outstanding[-1].item() == world**3
    chance, shared = random.Random(rank), random.Random(0)
    for i in range(1000):
        xs = [values(p, world * NUMEL, torch.float32, i) for p in range(world)]
        x.copy_(xs[rank])
        if chance.random() < 0.01:
            time.sleep(chance.random() * 5e-3)
        if chance.random() < 0.02:
            torch.cuda._sleep(int(chance.random() * 4e6))
        graph.replay()
        summed = sum(xs)
        wrong += (gathered != torch.cat([p[:NUMEL] for p in xs])).sum()
        wrong += (mine != summed[rank * NUMEL : (rank + 1) * NUMEL]).sum() + (total != summed).sum()
        if shared.random() < 0.3:
            eager.fill_(rank + i)
            dist.all_reduce(eager, async_op=shared.random() < 0.5)
            torch.cuda.synchronize()
            wrong += (eager != sum(p + i for p in range(world))).sum()
        for out in (gathered, mine, total):
            out.fill_(-1)
    assert wrong.item() == 0
    dist.barrier()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["sdma", "cu", "auto"])
def test_a_thousand_replays(ranks, engine):
    ranks(2).run(a_thousand_replays, options=dict(engine=engine), timeout_s=150, group_timeout_s=60)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("engine", "world", "replays"),
    [
        *(("sdma", 1, 20), ("sdma", 2, 40), ("sdma", 4, 6), ("sdma", 8, 3)),
        *(("cu", 1, 20), ("cu", 2, 40), ("cu", 4, 3), ("cu", 8, 2)),
        *(("auto", 1, 20), ("auto", 2, 40), ("auto", 4, 3)),
    ],
)
def test_replays_give_what_eager_calls_give(ranks, engine, world, replays):
    ranks(world).run(replays_give_what_eager_calls_give, replays, options=dict(engine=engine), timeout_s=120)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("world", "replays"), [(2, 20), (4, 4)])
def test_replays_in_rounds(ranks, world, replays):
    options = dict(engine="sdma", device_chunk_bytes=1024 * world)  # 2 KiB a pair: several chunks of each part
    ranks(world).run(replays_in_rounds, replays, options=options, timeout_s=120)


@pytest.mark.parametrize("engine", ["sdma", "cu"])
def test_a_first_call_under_capture_says_what_to_do(ranks, engine):
    ranks(2).run(a_first_call_under_capture_says_what_to_do, options=dict(engine=engine), timeout_s=60)
