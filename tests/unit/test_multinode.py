"""Plans of groups that span hosts, run for all ranks in one process: what arrives, what crosses, and how it grows."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import defaultdict, deque
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.errors import DeadlineError, MismatchError, UnsupportedError
from iris_pg.multinode import folds, moves
from iris_pg.multinode.arithmetic import combine, combine_by_torch, finish
from iris_pg.multinode.discovery import discover
from iris_pg.multinode.failures import Failures
from iris_pg.multinode.hosts import Hosts
from iris_pg.multinode.plan import Await, Combine, Copy, Exchange, Expect, Finish, Plan, Span, Widen, Within
from iris_pg.platforms.cpu import usable_cores
from iris_pg.reduce_ops import DTYPES, wider

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
LAYOUTS = ["ab", "abc", "baab", "abbcccbc", *(["aab", "aabbcc"] if FULL else [])]


def hosts_of(letters: str) -> Hosts:
    return Hosts.of(letters, letters)


class Ranks:
    """All ranks of a group in one process: each carries out its plan up to a step that must wait for others."""

    def __init__(self, hosts: Hosts, plans: list[Plan], memory: list[dict[str, torch.Tensor]]) -> None:
        self.hosts, self.plans, self.memory = hosts, plans, memory
        for rank, plan in enumerate(plans):
            memory[rank] |= {name: torch.full((n,), 0xEE, dtype=torch.uint8) for name, n in plan.temporaries.items()}
        self.wire: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.owed: list[dict[int, deque]] = [{} for _ in plans]  # exchange -> what is to arrive
        self.at = [0] * len(plans)
        self.meetings: list[dict[int, Flow | Fold]] = [{} for _ in hosts.members]  # index -> what it waits in

    def bytes_at(self, rank: int, span: Span) -> torch.Tensor:
        found = self.memory[rank][span.buffer][span.offset : span.offset + span.nbytes]
        assert found.numel() == span.nbytes, f"rank {rank}: {span} is not within its buffer"
        return found

    def elements(self, rank: int, span: Span, dtype: str) -> torch.Tensor:
        return self.bytes_at(rank, span).view(getattr(torch, dtype))

    def run(self) -> None:
        """Carry out everything; fails where nobody can go on."""
        while any(at < len(plan.steps) for at, plan in zip(self.at, self.plans, strict=True)):
            moved = [self.step(rank) for rank in range(len(self.plans)) if self.at[rank] < len(self.plans[rank].steps)]
            assert any(moved), (
                f"deadlock at {[plan.steps[at:][:1] for at, plan in zip(self.at, self.plans, strict=True)]}"
            )
        assert not any(self.wire.values()), "bytes were sent that nobody took"
        assert not any(self.owed), "an exchange was not awaited"
        assert not any(self.meetings)

    def step(self, rank: int) -> bool:
        step = self.plans[rank].steps[self.at[rank]]
        if isinstance(step, Within):
            return self.within(rank, step)
        if isinstance(step, Await):
            arriving = self.owed[rank][step.number]
            while arriving and self.wire[arriving[0][0], rank]:
                peer, span = arriving.popleft()
                sent = self.wire[peer, rank].popleft()
                assert sent.numel() == span.nbytes, f"rank {rank} takes {span.nbytes} of {sent.numel()} from {peer}"
                self.bytes_at(rank, span).copy_(sent)
            if arriving:
                return False
            del self.owed[rank][step.number]
        elif isinstance(step, Expect):
            self.spoil(rank, step.receives)
        elif isinstance(step, Exchange):
            self.spoil(rank, step.receives)
            self.owed[rank][step.number] = deque(step.receives)
            for peer, span in step.sends:
                assert self.hosts.places[peer][0] != self.hosts.places[rank][0]
                self.wire[rank, peer].append(self.bytes_at(rank, span).clone())
        elif isinstance(step, Copy):
            self.bytes_at(rank, step.into).copy_(self.bytes_at(rank, step.source))
        elif isinstance(step, Widen):
            self.elements(rank, step.into, step.wide).copy_(self.elements(rank, step.source, step.dtype))
        elif isinstance(step, Combine):
            sources = [self.elements(rank, s, step.dtype) for s in step.sources]
            combine_by_torch(step.op, self.elements(rank, step.into, step.dtype), sources)
        elif isinstance(step, Finish):
            finish(
                self.elements(rank, step.into, step.dtype), self.elements(rank, step.source, step.wide), step.divisor
            )
        self.at[rank] += 1
        return True

    def spoil(self, rank: int, receives) -> None:
        """Write to what may be written to from now on, also while it is being sent or reduced."""
        for _, span in receives:
            self.bytes_at(rank, span).fill_(0xEE)

    def within(self, rank: int, step: Within) -> bool:
        """An operation of one host happens when all its ranks have come to it."""
        host, index = self.hosts.places[rank]
        ranks, waiting = self.hosts.members[host], self.meetings[host]
        waiting[index] = step.flow
        if len(waiting) < len(ranks):
            return False
        flows = [waiting[k] for k in range(len(ranks))]
        assert len({flow.name for flow in flows}) == 1
        if isinstance(flows[0], Fold):
            self.fold(ranks, flows)
        else:
            self.move(ranks, flows)
        waiting.clear()
        for p in ranks:
            self.at[p] += 1
        return True

    def move(self, ranks, flows) -> None:
        sent = {(k, part.peer): part for k, flow in enumerate(flows) for part in flow.sends}
        received = {(part.peer, k): part for k, flow in enumerate(flows) for part in flow.receives}
        assert sent.keys() == received.keys()
        data = {key: self.part(ranks[key[0]], part).clone() for key, part in sent.items()}
        for (source, k), part in received.items():
            self.part(ranks[k], part).copy_(data[source, k])

    def fold(self, ranks, folds_) -> None:
        results = []
        for k, fold in enumerate(folds_):
            parts = [next(q for q in f.operands if f.to_all or q.peer == k) for f in folds_ if fold.result]
            operands = [
                self.part(p, part).view(getattr(torch, fold.dtype)) for p, part in zip(ranks, parts, strict=False)
            ]
            if fold.result:
                total = torch.empty_like(operands[0])
                combine_by_torch(fold.op, total, operands)
                results.append((ranks[k], Span(fold.result.buffer, fold.result.offset, total.nbytes), total))
        for rank, span, total in results:
            self.bytes_at(rank, span).copy_(total.view(torch.uint8))

    def part(self, rank: int, part) -> torch.Tensor:
        return self.bytes_at(rank, Span(part.here.buffer, part.here.offset, part.nbytes))


def random_bytes(n: int, *salt: int) -> torch.Tensor:
    return torch.randint(256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(hash(salt)))


def crossed(hosts: Hosts, plans: list[Plan]) -> dict[tuple[int, int], int]:
    """Return bytes by (source host, destination host)."""
    found: dict[tuple[int, int], int] = defaultdict(int)
    for rank, plan in enumerate(plans):
        for step in plan.steps:
            if isinstance(step, Exchange):
                for peer, span in step.sends:
                    found[hosts.places[rank][0], hosts.places[peer][0]] += span.nbytes
    return found


# Moves ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["small pieces", "usual pieces"])
def pieces(request, monkeypatch):
    if request.param == "small pieces":  # many of them, and nothing counts as small
        monkeypatch.setattr(moves, "PIECE_BYTES", 64)
        monkeypatch.setattr(moves, "PACKED_BYTES", 0)
        monkeypatch.setattr(moves, "WHOLE_BYTES", 0)
        monkeypatch.setattr(folds, "PIECE_BYTES", 128)
        monkeypatch.setattr(folds, "IN_PLACE_BYTES", 128)
        monkeypatch.setattr(folds, "SLICE_BYTES", 8)
        monkeypatch.setattr(folds, "CROWDED_PIECE_BYTES", 200)
        monkeypatch.setattr(folds, "CROWDED_SLICE_BYTES", 24)
        monkeypatch.setattr(folds, "AT_ONCE_BYTES", 0)
        monkeypatch.setattr(folds, "WHOLE_BYTES", 0)
        monkeypatch.setattr(folds, "DIRECT_BYTES", 8)


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("sizes", ["same", "different"])
def test_all_gather(letters, sizes, pieces):
    hosts = hosts_of(letters)
    world = hosts.world
    n = [100 if sizes == "same" else 37 * (p % 4) for p in range(world)]
    starts = [sum(n[:p]) for p in range(world + 1)]
    parts = [Span("out", starts[p], n[p]) for p in range(world)]
    data = [random_bytes(n[p], p) for p in range(world)]
    memory = [{"in": data[p].clone(), "out": torch.zeros(starts[-1], dtype=torch.uint8)} for p in range(world)]
    plans = [moves.all_gather(hosts, p, "all_gather", Span("in", 0, n[p]), parts) for p in range(world)]
    Ranks(hosts, plans, memory).run()
    for p in range(world):
        assert torch.equal(memory[p]["out"], torch.cat(data)), p
    for source, ranks in enumerate(hosts.members):
        for to in range(hosts.count):  # the least possible
            assert crossed(hosts, plans)[source, to] == (sum(n[p] for p in ranks) if to != source else 0)


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("n", [1, 1000])
def test_broadcast(letters, n, pieces):
    hosts = hosts_of(letters)
    for root in range(hosts.world):
        data = random_bytes(n, root)
        memory = [{"t": data.clone() if p == root else torch.zeros(n, dtype=torch.uint8)} for p in range(hosts.world)]
        plans = [moves.broadcast(hosts, p, "broadcast", root, Span("t", 0, n)) for p in range(hosts.world)]
        Ranks(hosts, plans, memory).run()
        assert all(torch.equal(m["t"], data) for m in memory), root
        into = defaultdict(int)
        for (_, to), nbytes in crossed(hosts, plans).items():
            into[to] += nbytes
        home = hosts.places[root][0]
        assert into == {h: n for h in range(hosts.count) if h != home}  # once to every other host


@pytest.mark.parametrize("letters", LAYOUTS)
def test_barrier_tells_every_host_of_every_other(letters):
    hosts = hosts_of(letters)
    plans = [moves.barrier(hosts, p) for p in range(hosts.world)]
    Ranks(hosts, plans, [{} for _ in plans]).run()
    known = {h: {h} for h in range(hosts.count)}
    for turn in range(max(plan.exchanges for plan in plans)):
        before = {h: set(who) for h, who in known.items()}
        for h, ranks in enumerate(hosts.members):
            (exchange,) = [s for s in plans[ranks[0]].steps if isinstance(s, Exchange) and s.number == turn]
            for peer, _ in exchange.receives:
                known[h] |= before[hosts.places[peer][0]]
    assert all(who == set(range(hosts.count)) for who in known.values())
    assert all(not plans[p].steps for ranks in hosts.members for p in ranks[1:])


# Reductions -----------------------------------------------------------------------------------------------------------


def operand(n: int, dtype: str, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-9, 10, (n,), generator=generator).to(getattr(torch, dtype))


def expected(op: str, operands: list[torch.Tensor]) -> torch.Tensor:
    wide = [t.to(getattr(torch, wider(str(t.dtype)[6:]))) for t in operands]
    total = torch.empty_like(wide[0])
    combine("sum" if op == "avg" else op, total, wide)
    result = torch.empty_like(operands[0])
    finish(result, total, len(operands) if op == "avg" else 1)
    return result


KINDS = [("sum", "float32"), ("avg", "bfloat16"), ("avg", "int32")]
KINDS += [("max", "int64"), ("sum", "float8_e5m2"), ("avg", "float32")] if FULL else []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().view(torch.uint8)


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("n", "is_roomy"), [(1, False), (1, True), (40, False), (333, False), (341, True)])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce(letters, kind, n, is_roomy, in_place, pieces):
    (op, dtype), hosts = kind, replace(hosts_of(letters), is_roomy=is_roomy)
    data = [operand(n, dtype, p) for p in range(hosts.world)]
    memory = [{"in": as_bytes(t), "out": torch.zeros(t.nbytes, dtype=torch.uint8)} for t in data]
    source = Span("in", 0, data[0].nbytes)
    result = source if in_place else source._replace(buffer="out")
    plans = [folds.all_reduce(hosts, p, "all_reduce", op, dtype, source, result) for p in range(hosts.world)]
    Ranks(hosts, plans, memory).run()
    wanted = as_bytes(expected(op, data))
    assert all(torch.equal(m[result.buffer], wanted) for m in memory)  # small integers: exact in any order
    wide, total = getattr(torch, wider(dtype)).itemsize * n, sum(crossed(hosts, plans).values())
    is_tiny = wide <= folds.WHOLE_BYTES and (is_roomy or n >= max(map(len, hosts.members)))
    if is_tiny:  # to every rank
        assert total == hosts.world * (hosts.count - 1) * wide
    elif hosts.count == 2 or folds.AT_ONCE_BYTES:  # whole, where they are small
        assert total == hosts.count * (hosts.count - 1) * wide
    else:  # the least possible: partial sums to where they are added up, and results, not widened, from there
        assert total == (hosts.count - 1) * (wide + data[0].nbytes)


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 333])
def test_reduce(letters, kind, n, pieces):
    (op, dtype), hosts = kind, hosts_of(letters)
    data = [operand(n, dtype, p) for p in range(hosts.world)]
    wanted, source = as_bytes(expected(op, data)), Span("in", 0, data[0].nbytes)
    for root in range(hosts.world):
        memory = [{"in": as_bytes(t)} for t in data]
        plans = [
            folds.reduce(hosts, p, "reduce", op, dtype, root, source, source if p == root else None)
            for p in range(hosts.world)
        ]
        Ranks(hosts, plans, memory).run()
        for p in range(hosts.world):
            assert torch.equal(memory[p]["in"], wanted if p == root else as_bytes(data[p])), (root, p)
        home, wide = hosts.places[root][0], getattr(torch, wider(dtype)).itemsize * n
        assert crossed(hosts, plans) == {(h, home): wide for h in range(hosts.count) if h != home}


@pytest.mark.parametrize("letters", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", ["same", "different"])
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(letters, kind, sizes, in_place, pieces):
    (op, dtype), hosts = kind, hosts_of(letters)
    world, item = hosts.world, getattr(torch, dtype).itemsize
    n = [51 if sizes == "same" else 29 * (p % 3) for p in range(world)]
    starts = [sum(n[:p]) * item for p in range(world)]
    spans = {p: Span("in", starts[p], n[p] * item) for p in range(world) if n[p]}
    data = [operand(sum(n), dtype, p) for p in range(world)]
    memory = [{"in": as_bytes(t), "out": torch.zeros(max(n) * item, dtype=torch.uint8)} for t in data]
    results = [spans.get(p) if in_place else Span("out", 0, n[p] * item) if n[p] else None for p in range(world)]
    plans = [folds.reduce_scatter(hosts, p, "reduce_scatter", op, dtype, spans, results[p]) for p in range(world)]
    ranks = Ranks(hosts, plans, memory)
    ranks.run()
    wanted = as_bytes(expected(op, data))
    for p in range(world):
        if n[p]:
            assert torch.equal(ranks.bytes_at(p, results[p]), wanted[starts[p] :][: n[p] * item]), p
    wide = getattr(torch, wider(dtype)).itemsize
    for a in range(hosts.count):
        for b, theirs in enumerate(hosts.members):
            assert crossed(hosts, plans)[a, b] == (sum(n[p] for p in theirs) * wide if a != b else 0)


@pytest.mark.parametrize("op", [op for op in DTYPES if op not in ("avg", "premul_sum")])
def test_partial_results_are_combined_on_a_gpu_as_on_a_cpu(op):
    for dtype in DTYPES[op]:
        if dtype != wider(dtype):
            continue  # plans widen these first
        element = getattr(torch, dtype)
        size = 64 * element.itemsize
        raw = [random_bytes(size, k) % 2 if dtype == "bool" else random_bytes(size, k) for k in range(3)]
        if element.is_floating_point or element.is_complex:
            operands = [torch.randn(64, generator=torch.Generator().manual_seed(k)).to(element) for k in range(3)]
        else:
            operands = [t.view(element) for t in raw]
        ours, theirs = torch.empty_like(operands[0]), torch.empty_like(operands[0])
        combine(op, ours, operands)
        combine_by_torch(op, theirs, operands)
        same = torch.allclose(ours, theirs) if op == "product" and element.is_complex else torch.equal(ours, theirs)
        assert same, (op, dtype)


def test_an_average_of_integers_drops_the_fraction():
    for dtype, values in {torch.int32: [-7, 7, 5], torch.uint8: [250, 7, 5]}.items():
        into = torch.empty(3, dtype=dtype)
        finish(into, torch.tensor(values, dtype=dtype), 2)
        assert into.tolist() == [int(v / 2) for v in values]
    large = torch.tensor([2**64 - 2], dtype=torch.uint64)
    finish(large, large.clone(), 2)
    assert large.tolist() == [2**63 - 1]
    with pytest.raises(UnsupportedError, match="AVG of torch.uint64"):
        finish(torch.empty(1, dtype=torch.uint64, device="meta"), torch.empty(1, dtype=torch.uint64, device="meta"), 2)


# Set-up ---------------------------------------------------------------------------------------------------------------


def discover_all(world, identities, *, timeout_s=20.0, absent=(), agreed=None, store=None):
    """Discover with one thread for each rank; return by rank what was found, or raised."""
    store = store or dist.HashStore()
    found = {}

    def one(rank):
        try:
            values = dict(x=1) if agreed is None else dict(x=agreed[rank])
            arguments = dict(group="g", timeout_s=timeout_s, host=identities[rank], agreed=values)
            found[rank] = discover(store, rank, world, **arguments)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
    return found


def test_ranks_find_their_hosts():
    found = discover_all(5, "abbac")
    assert {d.hosts.members for d in found.values()} == {((0, 3), (1, 2), (4,))}
    assert {d.hosts.names for d in found.values()} == {("a", "b", "c")}
    assert len({d.token for d in found.values()}) == 1


def test_hosts_are_roomy_where_all_ranks_have_two_cores_for_each_neighbour():
    assert Hosts.of("aab", "aab", [4, 4, 2]).is_roomy
    assert not Hosts.of("aab", "aab", [4, 4, 1]).is_roomy
    assert not Hosts.of("aab", "aab", [4, 3, 2]).is_roomy


def test_a_store_is_used_again_also_by_ranks_that_have_tried_less_often():
    store = dist.HashStore()
    late = discover_all(3, "abc", absent=(2,), timeout_s=0.3, store=store)
    assert all(isinstance(late[rank], DeadlineError) and "rank 2 did not start" in str(late[rank]) for rank in (0, 1))
    first, second = discover_all(3, "abc", store=store), discover_all(3, "aab", store=store)
    assert {d.hosts.count for d in first.values()} == {3}
    assert {d.hosts.count for d in second.values()} == {2}
    assert first[0].token != second[0].token


def test_nobody_is_waited_for_in_a_try_that_it_gave_up():
    """Rank 2 came too late for the first try of rank 0, joined its second, and gave that up before rank 1 came."""
    store = dist.HashStore()
    late = discover_all(3, "abc", absent=(1, 2), timeout_s=0.1, store=store)
    assert "ranks 1, 2 did not start" in str(late[0])
    found = {}

    def first():
        found.update(discover_all(3, "abc", absent=(1, 2), store=store))

    thread = threading.Thread(target=first)
    thread.start()
    late = discover_all(3, "abc", absent=(0, 1), timeout_s=0.3, store=store)
    assert "rank 0 did not start within 0.3 s" in str(late[2])
    found.update(discover_all(3, "abc", absent=(0,), store=store))
    thread.join(30)
    assert {d.hosts.count for d in found.values()} == {3}, found
    assert len({d.token for d in found.values()}) == 1


def test_who_gave_up_is_named_with_who_did_not_come():
    store = dist.HashStore()
    store.add("hosts/number of rank 1", 1)
    store.set("hosts/1", json.dumps(dict(host="b", name="b", cores=1, agreed=dict(x=1), number=1)))
    store.set("hosts/verdict 1", json.dumps(dict(gave_up=1)))
    found = discover_all(4, "abcd", absent=(1, 2), timeout_s=0.3, store=store)
    for error in found.values():
        assert "ranks 1, 2 did not start within 0.3 s" in str(error)


def test_the_first_rank_may_be_the_one_that_is_late():
    started = time.monotonic()
    late = discover_all(2, "ab", absent=(0,), timeout_s=0.3)
    assert isinstance(late[1], DeadlineError) and "rank 0 did not start" in str(late[1])
    assert time.monotonic() - started < 5


def test_ranks_that_differ_in_what_must_be_the_same_are_named():
    found = discover_all(3, "abb", agreed=[1, 1, 2])
    assert all(isinstance(error, MismatchError) and "rank 2 with {'x': 2}" in str(error) for error in found.values())


# Many ranks -----------------------------------------------------------------------------------------------------------


class CountingStore:
    """A store in memory that counts what goes through it."""

    def __init__(self) -> None:
        self.values, self.calls, self.nbytes = {}, 0, 0

    def add(self, key, amount):
        self.calls += 1
        self.values[key] = str(int(self.values.get(key, 0)) + amount).encode()
        return int(self.values[key])

    def set(self, key, value):
        self.calls, self.nbytes = self.calls + 1, self.nbytes + len(value)
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        self.calls, self.nbytes = self.calls + 1, self.nbytes + len(self.values[key])
        return self.values[key]

    def multi_get(self, keys):
        self.calls += 1
        self.nbytes += sum(len(self.values[key]) for key in keys)
        return [self.values[key] for key in keys]

    def check(self, keys):
        self.calls += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        assert not expected
        if key not in self.values:
            self.set(key, desired)
        return self.values[key]


def test_set_up_of_512_ranks_takes_a_few_calls_of_the_store_from_each():
    """The ranks come one after another, rank 0 last, and then all read what it has published."""
    world, store = 512, CountingStore()

    def identity(rank):
        return f"{rank // 8:032x}"

    common = dict(group="g", timeout_s=20.0, agreed=dict(inter_host="auto"))
    for rank in range(1, world):  # what each leaves there before it begins to wait
        number = store.add(f"hosts/number of rank {rank}", 1)
        card = dict(host=identity(rank), name=f"node{rank // 8}", cores=16, agreed=common["agreed"], number=number)
        store.set(f"hosts/{rank}", json.dumps(card))
    started = time.monotonic()
    calls = store.calls
    found = discover(store, 0, world, host=identity(0), **common)
    assert store.calls - calls < 10
    assert time.monotonic() - started < 2
    assert found.hosts.count == world // 8
    assert found.hosts.members[3] == tuple(range(24, 32))
    assert found.hosts.is_roomy == (usable_cores() >= 16)
    published = len(store.values["hosts/verdict 1"])
    assert published < 8 * world  # bytes that each rank reads


def test_plans_of_512_ranks_fit_together_and_reach_few_peers():
    hosts = Hosts.of([str(rank // 8) for rank in range(512)], [str(rank // 8) for rank in range(512)])
    n = 16
    parts = [Span("out", p * n, n) for p in range(hosts.world)]
    gathers = [moves.all_gather(hosts, p, "all_gather", Span("in", 0, n), parts) for p in range(hosts.world)]
    data = [random_bytes(n, p) for p in range(hosts.world)]
    memory = [{"in": t.clone(), "out": torch.zeros(n * hosts.world, dtype=torch.uint8)} for t in data]
    if FULL:
        Ranks(hosts, gathers, memory).run()
        assert all(torch.equal(m["out"], torch.cat(data)) for m in memory)
    span = Span("in", 0, 4096)
    reduces = [folds.all_reduce(hosts, p, "all_reduce", "sum", "float32", span, span) for p in range(hosts.world)]
    values = [torch.full((1024,), float(p % 5)) for p in range(hosts.world)]
    memory = [{"in": as_bytes(t)} for t in values]
    Ranks(hosts, reduces, memory).run()
    assert all(torch.equal(m["in"].view(torch.float32), sum(values)) for m in memory)
    for p in random.Random(0).sample(range(hosts.world), 32):
        for plan in (gathers[p], reduces[p]):
            exchanges = [step for step in plan.steps if isinstance(step, Exchange)]
            peers = {peer for step in exchanges for peer, _ in (*step.sends, *step.receives)}
            assert peers == set(hosts.peers(p)) and len(peers) == hosts.count - 1  # connections: one to each other host


def test_a_rank_that_is_late_because_of_another_is_not_blamed_alone():
    """Ranks 0 and 3 wait for 1, which waits for 2; 4 and 5 wait for each other, and 6 for one that is dead."""
    failures, told = Failures(dist.HashStore(), "a group"), {}

    def wait_in_vain(rank, late):
        told[rank] = failures.tell(rank, f"rank {late} is late", "all_reduce", 1, late)

    threads = [
        threading.Thread(target=wait_in_vain, args=pair) for pair in ((0, 1), (3, 1), (1, 2), (4, 5), (5, 4), (6, 7))
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert {rank: told[rank].behind for rank in told} == {0: (2,), 3: (2,), 1: (), 4: (), 5: (), 6: ()}
    assert told[0].first is None and all(told[rank].first["rank"] == 0 for rank in (1, 3, 4, 5, 6))
