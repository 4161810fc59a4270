"""Plans of operations that move: each byte crosses once to every host that needs it, and is spread within the host.

Every rank of a host sends and receives, so all network cards of a host take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iris_pg.collectives.flow import Flow, Part
from iris_pg.multinode.hosts import Hosts
from iris_pg.multinode.plan import PIECE_BYTES, Await, Plan, Span, Step, Within, copied, gathered_within

PACKED_BYTES = 256 << 10
"""All-gathers of up to this size in all are one operation within the host, at the price of a copy."""

WHOLE_BYTES = 64 << 10
"""A broadcast of up to this size crosses from one rank of the root's host; a larger one from all, each with a part."""

_EMPTY = Span("", 0, 0)


def all_gather(hosts: Hosts, rank: int, name: str, mine: Span, parts: Sequence[Span]) -> Plan:
    """Return the plan by which every rank's ``mine`` arrives at ``parts[rank]`` of all.

    Args:
        parts: by rank, of any sizes; this rank's own may be ``mine``.
    """
    plan, (host, index) = Plan(), hosts.places[rank]
    ranks = hosts.members[host]
    targets = [hosts.counterpart(other, index) for other in hosts.others(host)]
    lanes = hosts.lanes(host)
    if len(ranks) > 1 and sum(part.nbytes for part in parts) <= PACKED_BYTES:
        packed, lane_spans, end = dict[int, Span](), [], 0
        for lane in lanes:
            start = end
            for p in lane:
                packed[p] = Span("pack", end, parts[p].nbytes)
                end += parts[p].nbytes
            lane_spans.append(Span("pack", start, end - start))
        plan.temporary("pack", end)
        exchange = plan.exchange([(p, mine) for p in targets], [(p, packed[p]) for p in lanes[index] if p != rank])
        steps: list[Step] = [exchange, *copied(packed[rank], mine), Await(exchange.number)]
        steps += gathered_within(name, index, lane_spans)
        for run in _runs([(parts[p], packed[p]) for lane in lanes for p in lane if p != rank or parts[p] != mine]):
            steps += copied(*run)
        plan.steps = steps
        return plan
    count = max(-(-max(part.nbytes for part in parts) // PIECE_BYTES), 1)
    pieces = [[part.part(c * PIECE_BYTES, PIECE_BYTES) for part in parts] for c in range(count)]
    exchanges = [
        plan.exchange(
            [(p, mine.part(c * PIECE_BYTES, PIECE_BYTES)) for p in targets],
            [(p, piece[p]) for p in lanes[index] if p not in ranks],
        )
        for c, piece in enumerate(pieces)
    ]
    plan.steps += [*exchanges, *copied(parts[rank], mine)]
    if len(ranks) > 1:
        plan.steps += gathered_within(name, index, [parts[p] for p in ranks])
    for exchange, piece in zip(exchanges, pieces, strict=True):
        plan.steps.append(Await(exchange.number))
        if len(ranks) > 1:
            for other in hosts.others(host):
                theirs = hosts.members[other]
                for start in range(0, len(theirs), len(ranks)):
                    arrived = [piece[p] for p in theirs[start : start + len(ranks)]]
                    arrived += [_EMPTY] * (len(ranks) - len(arrived))
                    plan.steps += gathered_within(name, index, arrived)
    return plan


def _runs(moves: Sequence[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Return copies, each (into, source), with those joined that follow on from each other on both sides."""
    runs: list[tuple[Span, Span]] = []
    for into, source in moves:
        if runs:
            a, b = runs[-1]
            if (a.buffer, a.offset + a.nbytes, b.offset + b.nbytes) == (into.buffer, into.offset, source.offset):
                runs[-1] = a._replace(nbytes=a.nbytes + into.nbytes), b._replace(nbytes=b.nbytes + source.nbytes)
                continue
        runs.append((into, source))
    return runs


def broadcast(hosts: Hosts, rank: int, name: str, root: int, tensor: Span) -> Plan:
    """Return the plan by which the root's ``tensor`` arrives at that of every rank, from host to host by a binomial
    tree.
    """
    plan, (host, index), (first, root_index) = Plan(), hosts.places[rank], hosts.places[root]
    ranks, turn = hosts.members[host], (host - first) % hosts.count
    parents, children = _tree(turn, hosts.count)
    sources, targets = ([(first + v) % hosts.count for v in turns] for turns in (parents, children))
    shares = min(map(len, hosts.members)) if tensor.nbytes > WHOLE_BYTES else 1
    holders = range(shares) if shares > 1 else range(root_index % len(ranks), root_index % len(ranks) + 1)

    def peer(other: int) -> int:
        return hosts.counterpart(other, index if shares > 1 else root_index)

    count = max(-(-tensor.nbytes // PIECE_BYTES), 1)
    pieces = [tensor.part(c * PIECE_BYTES, PIECE_BYTES) for c in range(count)]
    parts = []  # by piece, what each rank of the host deals with
    for piece in pieces:
        share = -(-piece.nbytes // shares)
        parts.append(
            [piece.part((k - holders[0]) * share, share) if k in holders else _EMPTY for k in range(len(ranks))]
        )
    arrivals = [plan.exchange([], [(peer(h), part[index]) for h in sources]) for part in parts]
    plan.steps += [arrival for arrival in arrivals if arrival.receives]
    for piece, part, arrival in zip(pieces, parts, arrivals, strict=True):
        departure = plan.exchange([(peer(h), part[index]) for h in targets], [])
        if host == first:
            whole = [piece if k == root_index else _EMPTY for k in range(len(ranks))]
            # Small ones leave at once; of large ones the other ranks send parts that they have to get first.
            spread = _broadcast_within(name, index, root_index, whole, piece)
            plan.steps += [departure, *spread] if shares == 1 else [*spread, departure]
        else:
            if arrival.receives:
                plan.steps.append(Await(arrival.number))
            plan.steps.append(departure)
            if shares == 1:
                plan.steps += _broadcast_within(name, index, holders[0], part, piece)
            elif len(ranks) > 1:
                plan.steps += gathered_within(name, index, part)
    sent = [step.number for step in plan.steps if isinstance(step, type(departure)) and step.sends]
    plan.steps = [step for step in plan.steps if not isinstance(step, type(departure)) or step.sends or step.receives]
    plan.steps += [Await(number) for number in sent]
    return plan


def _tree(turn: int, count: int) -> tuple[list[int], list[int]]:
    """Return the parent, of which the root of a binomial tree has none, and the children, the largest subtree first."""
    step, children = 1, []
    while step <= turn:
        step *= 2
    while turn + step < count:
        children.append(turn + step)
        step *= 2
    return [turn - (1 << (turn.bit_length() - 1))] if turn else [], children


def _broadcast_within(name: str, index: int, root: int, parts: Sequence[Span], piece: Span) -> list[Step]:
    if len(parts) == 1:
        return []
    peers = [(index + k) % len(parts) for k in range(1, len(parts))]
    if index == root:
        return [Within(Flow(name, tuple(Part(p, piece.nbytes, piece.ref(index)) for p in peers), to_all=True))]
    return [Within(Flow(name, (), (Part(root, piece.nbytes, piece.ref(index)),), to_all=True))]


def pairwise(
    hosts: Hosts,
    rank: int,
    name: str,
    sends: Mapping[int, Span],
    receives: Mapping[int, Span],
    own: tuple[Span, Span] | None,
    takes_part: bool,
) -> Plan:
    """Return the plan of an operation in which each rank sends something else to each: straight to it.

    Args:
        sends, receives: by rank; of no bytes is a message too, within a host.
        own: (into, source) within this rank.
        takes_part: whether the ranks of this host have anything for each other.
    """
    plan, (host, index) = Plan(), hosts.places[rank]
    ranks = hosts.members[host]
    far = [p for other in hosts.others(host) for p in _rotated(hosts.members[other], index)]
    exchange = plan.exchange(
        [(p, sends[p]) for p in far if p in sends], [(p, receives[p]) for p in far if p in receives]
    )
    plan.steps.append(exchange)
    if own:
        plan.steps += copied(*own)
    if len(ranks) > 1 and takes_part:
        peers = [(index + k) % len(ranks) for k in range(1, len(ranks))]
        plan.steps.append(
            Within(
                Flow(
                    name,
                    tuple(
                        Part(k, sends[ranks[k]].nbytes, sends[ranks[k]].ref(index)) for k in peers if ranks[k] in sends
                    ),
                    tuple(
                        Part(k, receives[ranks[k]].nbytes, receives[ranks[k]].ref(index))
                        for k in peers
                        if ranks[k] in receives
                    ),
                )
            )
        )
    plan.steps.append(Await(exchange.number))
    return plan


def _rotated(ranks: Sequence[int], start: int) -> list[int]:
    start %= len(ranks)
    return [*ranks[start:], *ranks[:start]]


def barrier(hosts: Hosts, rank: int) -> Plan:
    """Return the plan by which the hosts' first ranks learn that all others have come: by dissemination, in a number of
    rounds that is the logarithm of the number of hosts. The ranks of each host meet before it and after it.
    """
    plan, (host, index) = Plan(), hosts.places[rank]
    step = 1
    while step < hosts.count and index == 0:
        to, source = hosts.members[(host + step) % hosts.count][0], hosts.members[(host - step) % hosts.count][0]
        sent, arrived = plan.temporary("sent", 1), plan.temporary(f"arrived{step}", 1)
        exchange = plan.exchange([(to, sent)], [(source, arrived)])
        plan.steps += [exchange, Await(exchange.number)]
        step *= 2
    return plan
