"""Plans of operations that reduce: first within each host, then between hosts, where partial results meet.

16-bit and 8-bit floats are widened before anything is added, travel between hosts as they were added up, and are
rounded once. Partial results are combined in the order of hosts, by one rank for each element or in the same way by
several, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from iris_pg.collectives.flow import Flow, Part
from iris_pg.multinode.hosts import Hosts
from iris_pg.multinode.plan import (
    PIECE_BYTES,
    Await,
    Combine,
    Expect,
    Finish,
    Plan,
    Span,
    Step,
    Widen,
    Within,
    copied,
    folded_by_all,
    folded_within,
    gathered_within,
)
from iris_pg.reduce_ops import wider

WHOLE_BYTES = 1 << 10
"""All-reduces of up to this size, which fit in a packet, are reduced whole by every rank: one wait fewer within the
host. But where cores are few ranks without a part of it had better stay away from the wire.
"""

AT_ONCE_BYTES = 32 << 10
"""All-reduces of parts up to this size cross once, whole, and each host adds them all up."""

IN_PLACE_BYTES = 16 << 20
"""Size of a piece of an all-reduce that needs no temporary memory: the fewer pieces, the less ranks wait."""

SLICE_BYTES = 2 << 20
"""Of a rank's part of a piece, what crosses in one message: it is combined while others are on their way."""

CROWDED_PIECE_BYTES, CROWDED_SLICE_BYTES = 64 << 20, 8 << 20
"""The same where cores are few, and nothing runs beside anything: then what takes the least CPU time is the fastest."""

DIRECT_BYTES = 64 << 10
"""Operands of at least this size are read where they are; smaller ones are packed, for one operation in the host."""


class _Elements:
    """What is done to the elements of one operation."""

    def __init__(self, op: str, dtype: str, world: int) -> None:
        self.dtype, self.wide = dtype, wider(dtype)
        self.op = "sum" if op == "avg" else op
        self.divisor = world if op == "avg" else 1
        self.size, self.wide_size = getattr(torch, self.dtype).itemsize, getattr(torch, self.wide).itemsize
        self.is_converted = self.wide != self.dtype
        self.is_finished = self.is_converted or self.divisor > 1

    def widened(self, into: Span, source: Span) -> list[Step]:
        if not self.is_converted:
            return copied(into, source)
        return [Widen(into, source, self.dtype, self.wide)] if source.nbytes else []

    def combined(self, plan: Plan, name: str, sources: Sequence[Span], into: Span) -> list[Step]:
        """Return the steps that put the result of partial results, one of each host, in its place."""
        if not into.nbytes:
            return []
        if not self.is_finished:
            return [Combine(into, tuple(sources), self.op, self.dtype)]
        total = plan.temporary(name, sources[0].nbytes) if self.is_converted else into
        return [
            Combine(total, tuple(sources), self.op, self.wide),
            Finish(into, total, self.wide, self.dtype, self.divisor),
        ]


class _Shards:
    """How a piece of elements is divided among the ranks of each host, in the same way on all: into as many shards as
    the largest host has ranks, of which a rank of a smaller host has several, one after another.
    """

    def __init__(self, hosts: Hosts, numel: int) -> None:
        self.hosts, self.numel, self.count = hosts, numel, max(map(len, hosts.members))

    def bound(self, shard: int) -> int:
        """Return the first element of a shard."""
        return self.numel * shard // self.count

    def holder(self, host: int, shard: int) -> int:
        """Return the index on a host of the rank that has a shard."""
        return shard * len(self.hosts.members[host]) // self.count

    def peer(self, host: int, shard: int) -> int:
        """Return the rank of a host that has a shard."""
        return self.hosts.members[host][self.holder(host, shard)]

    def of(self, host: int, index: int) -> list[int]:
        """Return the shards of a rank."""
        return [shard for shard in range(self.count) if self.holder(host, shard) == index]

    def range_of(self, host: int, index: int) -> tuple[int, int]:
        """Return the first element, and the number of elements, of all shards of a rank."""
        mine = self.of(host, index)
        start = self.bound(mine[0])
        return start, self.bound(mine[-1] + 1) - start


def all_reduce(hosts: Hosts, rank: int, name: str, op: str, dtype: str, source: Span, result: Span) -> Plan:
    """Return the plan that reduces every rank's ``source`` into every rank's ``result``, which may be the same."""
    plan, e = Plan(), _Elements(op, dtype, hosts.world)
    is_whole = 0 < source.nbytes // e.size * e.wide_size <= WHOLE_BYTES
    if is_whole and (hosts.is_roomy or source.nbytes // e.size >= max(map(len, hosts.members))):
        return _all_reduce_whole(plan, hosts, rank, name, e, source, result)
    # With many hosts pieces are larger, so that what each exchanges with each is not too small.
    least = AT_ONCE_BYTES * hosts.count * max(map(len, hosts.members))
    usual, slice_bytes = PIECE_BYTES if e.is_converted else IN_PLACE_BYTES, SLICE_BYTES
    has_neighbours = min(map(len, hosts.members)) > 1  # whose operands lie where what arrives may go
    if hosts.count == 2 and has_neighbours and not e.is_converted and not hosts.is_roomy:
        usual, slice_bytes = CROWDED_PIECE_BYTES, CROWDED_SLICE_BYTES
    numel, step = source.nbytes // e.size, max(usual, least) // e.wide_size
    pieces: list[list[list[Step]]] = []
    for c, first in enumerate(range(0, numel, step)):
        shards = _Shards(hosts, min(step, numel - first))
        operand, into = (span.part(first * e.size, shards.numel * e.size) for span in (source, result))
        pieces.append(_all_reduce_piece(plan, rank, name, e, shards, operand, into, c % 2, slice_bytes))
    plan.in_turn(pieces)
    return plan


def _all_reduce_whole(plan: Plan, hosts: Hosts, rank: int, name: str, e: _Elements, source: Span, result: Span) -> Plan:
    """Return the plan of a small one: every rank has its host's partial result, and gets those of other hosts from its
    counterparts.
    """
    (host, index), nbytes = hosts.places[rank], source.nbytes // e.size * e.wide_size
    steps, partial = list[Step](), source
    if e.is_converted:
        wide = plan.temporary("wide", nbytes)
        steps += e.widened(wide, source)
        partial = wide
    if len(hosts.members[host]) > 1:
        operand, partial = partial, plan.temporary("partial", nbytes) if e.is_converted else result
        steps += folded_by_all(name, e.op, e.wide, index, operand, partial)
    others = hosts.others(host)
    room = plan.temporary("arrived", len(others) * nbytes)
    places = {other: room.part(k * nbytes, nbytes) for k, other in enumerate(others)}
    exchange = plan.exchange(
        [(p, partial) for p in _by_host(hosts, others, hosts.lanes(host)[index])],
        [(hosts.counterpart(other, index), place) for other, place in places.items()],
    )
    sources = [partial if h == host else places[h] for h in range(hosts.count)]
    plan.steps += [Expect(exchange.number, exchange.receives), *steps, exchange, Await(exchange.number)]
    plan.steps += e.combined(plan, "total", sources, result)
    return plan


def _all_reduce_piece(
    plan: Plan,
    rank: int,
    name: str,
    e: _Elements,
    shards: _Shards,
    operand: Span,
    into: Span,
    turn: int,
    slice_bytes: int,
) -> list[list[Step]]:
    """Return the stages of one piece: reduce within the host; combine with other hosts; gather within the host.

    Args:
        turn: of the temporary buffers; those of the piece before are still in use.
        slice_bytes: least size of what crosses in one message, of a large shard.
    """
    hosts = shards.hosts
    (host, index), others = hosts.places[rank], hosts.others(hosts.places[rank][0])
    size, mine = len(hosts.members[host]), shards.of(host, index)
    start, count = shards.range_of(host, index)
    at_once = hosts.count == 2 or shards.numel * e.wide_size <= AT_ONCE_BYTES * shards.count

    # Large shards cross in slices: one is combined while others are on their way.
    slices = max(shards.numel // shards.count * e.wide_size // slice_bytes, 1) if at_once else 1

    def cut(shard: int, part: int, k: int) -> tuple[int, int]:
        """Return the elements, from the first of this rank on, of a slice of a host's part of a shard."""
        bounds = shards.bound(shard) - start, shards.bound(shard + 1) - start
        return _part(bounds, k, slices) if at_once else _part(bounds, part, hosts.count)

    def result_of(begin: int, end: int) -> Span:
        return _elements(into, e.size, start + begin, start + end)

    # Buffers of its own would pass through the caches for nothing, where elements are not widened. So partial results
    # are where the result will be, and what arrives goes where peers have read their operands.
    place = None if size == 1 or e.is_converted else into.part(start * e.size, count * e.size)
    reduced, partial = _reduced_within(plan, hosts, rank, name, e, shards, operand, turn, place)
    bounds = [cut(shard, host, k) for k in range(slices) for shard in mine]
    nbytes = len(others) * sum(b - a for a, b in bounds) * e.wide_size
    beside = max(into.part(0, start * e.size), into.part((start + count) * e.size, into.nbytes), key=lambda s: s.nbytes)
    is_beside = place is not None and AT_ONCE_BYTES < nbytes <= beside.nbytes
    room = beside if is_beside else plan.temporary(f"arrived{turn}", nbytes)

    expected, exchanged = list[Step](), list[Step]()
    stages: list[list[Step]] = [[], [], []]
    arrived = 0  # bytes
    for k in range(slices):
        results, arriving = list[tuple[int, Span]](), list[tuple[int, Span]]()  # of the second exchange
        sends, receives = list[tuple[int, Span]](), list[tuple[int, Span]]()
        combined = list[Step]()
        for shard in mine:
            done = result_of(*cut(shard, host, k))
            operands = {host: _elements(partial, e.wide_size, *cut(shard, host, k))}
            for other in others:
                peer = shards.peer(other, shard)
                operands[other] = room.part(arrived, operands[host].nbytes)
                arrived += operands[host].nbytes
                sends.append((peer, _elements(partial, e.wide_size, *cut(shard, other, k))))
                receives.append((peer, operands[other]))
                results.append((peer, done))
                arriving.append((peer, result_of(*cut(shard, other, k))))
            combined += e.combined(plan, f"total{turn}", [operands[h] for h in range(hosts.count)], done)
        exchange = plan.exchange(sends, receives)
        expected += [] if is_beside else [Expect(exchange.number, exchange.receives)]
        exchanged.append(exchange)
        stages[1] += [Await(exchange.number), *combined]
        if not at_once:
            second = plan.exchange(results, arriving)
            stages[1].append(second)
            stages[2].append(Await(second.number))
    if size > 1:
        ranges = [shards.range_of(host, k) for k in range(size)]
        stages[2] += gathered_within(name, index, [_elements(into, e.size, a, a + n) for a, n in ranges])
    stages[0] = [*expected, *reduced, *exchanged]
    return stages


def reduce(
    hosts: Hosts, rank: int, name: str, op: str, dtype: str, root: int, source: Span, result: Span | None
) -> Plan:
    """Return the plan that reduces every rank's ``source`` into the root's ``result``, which may be the same."""
    plan, e, (host, index) = Plan(), _Elements(op, dtype, hosts.world), hosts.places[rank]
    home, root_index = hosts.places[root]
    pieces: list[list[list[Step]]] = []
    # The root's host has room for a piece of every other.
    numel, step = source.nbytes // e.size, max(2 * PIECE_BYTES // hosts.count, DIRECT_BYTES) // e.wide_size
    for c, first in enumerate(range(0, numel, step)):
        shards, turn = _Shards(hosts, min(step, numel - first)), c % 3
        operand = source.part(first * e.size, shards.numel * e.size)
        reduced, partial = _reduced_within(plan, hosts, rank, name, e, shards, operand, turn)
        start, count = shards.range_of(host, index)
        shard_spans = {
            s: _elements(partial, e.wide_size, shards.bound(s) - start, shards.bound(s + 1) - start)
            for s in shards.of(host, index)
        }
        if host != home:
            exchange = plan.exchange([(shards.peer(home, s), span) for s, span in shard_spans.items()], [])
            pieces.append([[*reduced, exchange], [Await(exchange.number)], []])
            continue
        into = result.part(first * e.size, shards.numel * e.size) if result else None
        ranges = [shards.range_of(host, k) for k in range(len(hosts.members[host]))]
        if into:
            done = _elements(into, e.size, start, start + count)
        else:
            done = plan.temporary(f"done{turn}", count * e.size)
        room = plan.temporary(f"arrived{turn}", hosts.count * partial.nbytes)
        receives: list[tuple[int, Span]] = []
        combined: list[Step] = []
        for s, span in shard_spans.items():
            begin, end = shards.bound(s) - start, shards.bound(s + 1) - start
            operands = {host: span}
            for other in hosts.others(host):
                place = _elements(room.part(other * partial.nbytes, partial.nbytes), e.wide_size, begin, end)
                receives.append((shards.peer(other, s), place))
                operands[other] = place
            ordered = [operands[h] for h in range(hosts.count)]
            combined += e.combined(plan, f"total{turn}", ordered, _elements(done, e.size, begin, end))
        exchange = plan.exchange([], receives)
        gathered: list[Step] = []
        if into and len(ranges) > 1:
            parts = [
                Part(k, n * e.size, _elements(into, e.size, begin, begin + n).ref(index))
                for k, (begin, n) in enumerate(ranges)
                if k != index and n
            ]
            gathered.append(Within(Flow(name, (), tuple(parts))))
        elif len(ranges) > 1:
            sends = (Part(root_index, done.nbytes, done.ref(index)),) if count else ()
            gathered.append(Within(Flow(name, sends)))
        pieces.append([[*reduced, exchange], [Await(exchange.number), *combined], gathered])
    plan.in_turn(pieces)
    return plan


def reduce_scatter(
    hosts: Hosts, rank: int, name: str, op: str, dtype: str, operands: Mapping[int, Span], result: Span | None
) -> Plan:
    """Return the plan that reduces ``operands`` of all ranks, and gives each rank the result of its own.

    Args:
        operands: by rank that gets the result; not of ranks that get nothing.
        result: where this rank's own goes: anywhere, or where its operand of it is.
    """
    plan, e, (host, index) = Plan(), _Elements(op, dtype, hosts.world), hosts.places[rank]
    size, others = len(hosts.members[host]), hosts.others(host)
    lanes = [[p for p in lane if p in operands] for lane in hosts.lanes(host)]
    longest = max(span.nbytes for span in operands.values())
    room = max(PIECE_BYTES, hosts.world * DIRECT_BYTES) // hosts.world
    step = room // e.wide_size * e.size  # bytes of each operand in one piece
    pieces: list[list[list[Step]]] = []
    for c, first in enumerate(range(0, longest, step)):
        cuts = {p: span.part(first, step) for p, span in operands.items()}
        turn, steps = c % 2, list[Step]()
        wide = {p: span.nbytes // e.size * e.wide_size for p, span in cuts.items()}
        partials: dict[int, Span] = {}
        if size == 1 and not e.is_converted:
            partials = cuts
        else:
            packed, spans, end = dict[int, Span](), [], 0
            for lane in lanes:
                begin = end
                for p in lane:
                    packed[p] = Span(f"pack{turn}", end, wide[p])
                    end += wide[p]
                spans.append(Span(f"pack{turn}", begin, end - begin))
            is_direct = not e.is_converted and max(wide.values()) >= DIRECT_BYTES
            if not is_direct:
                plan.temporary(f"pack{turn}", end)
                for p in packed:
                    steps += e.widened(packed[p], cuts[p])
            if size == 1:
                partials = packed
            else:
                mine = plan.temporary(f"partial{turn}", spans[index].nbytes)
                partials = {p: mine.part(packed[p].offset - spans[index].offset, wide[p]) for p in lanes[index]}
                if is_direct:
                    for row in range(max(map(len, lanes))):
                        these = [cuts[lane[row]] if row < len(lane) else Span("", 0, 0) for lane in lanes]
                        into = partials[lanes[index][row]] if row < len(lanes[index]) else Span("", 0, 0)
                        steps += folded_within(name, e.op, e.wide, index, these, into)
                else:
                    steps += folded_within(name, e.op, e.wide, index, spans, mine)
        own = wide.get(rank, 0)
        arrived = plan.temporary(f"arrived{turn}", hosts.count * own)
        places = {other: arrived.part(other * own, own) for other in others}
        exchange = plan.exchange(
            [(p, partials[p]) for p in _by_host(hosts, others, lanes[index])],
            [(hosts.counterpart(other, index), place) for other, place in places.items()],
        )
        finished: list[Step] = [Await(exchange.number)]
        if own and result:
            sources = [partials[rank] if h == host else places[h] for h in range(hosts.count)]
            finished += e.combined(plan, f"total{turn}", sources, result.part(first, step))
        pieces.append([[*steps, exchange], finished])
    plan.in_turn(pieces)
    return plan


def _by_host(hosts: Hosts, others: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` that are on ``others``, in the order of these."""
    turn = {other: k for k, other in enumerate(others)}
    return sorted((p for p in ranks if hosts.places[p][0] in turn), key=lambda p: turn[hosts.places[p][0]])


def _part(bounds: tuple[int, int], part: int, count: int) -> tuple[int, int]:
    """Return the bounds of one of ``count`` parts of a range, about equal."""
    begin, end = bounds
    return begin + (end - begin) * part // count, begin + (end - begin) * (part + 1) // count


def _elements(span: Span, itemsize: int, begin: int, end: int) -> Span:
    return span.part(begin * itemsize, (end - begin) * itemsize)


def _reduced_within(
    plan: Plan,
    hosts: Hosts,
    rank: int,
    name: str,
    e: _Elements,
    shards: _Shards,
    operand: Span,
    turn: int,
    place: Span | None = None,
) -> tuple[list[Step], Span]:
    """Return the steps after which this rank has the partial result of its host of its shards, and where it is.

    Args:
        place: where it may go, instead of a temporary buffer.
    """
    host, index = hosts.places[rank]
    size, steps = len(hosts.members[host]), list[Step]()
    if e.is_converted:
        wide = plan.temporary(f"wide{turn}", shards.numel * e.wide_size)
        steps += e.widened(wide, operand)
        operand = wide
    if size == 1:
        return steps, operand
    ranges = [shards.range_of(host, k) for k in range(size)]
    operands = [_elements(operand, e.wide_size, begin, begin + count) for begin, count in ranges]
    partial = place or plan.temporary(f"partial{turn}", operands[index].nbytes)
    return [*steps, *folded_within(name, e.op, e.wide, index, operands, partial)], partial
