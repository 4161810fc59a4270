"""Which plan an operation becomes."""

from __future__ import annotations

from typing import Any

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.multinode import folds, moves
from iris_pg.multinode.hosts import Hosts
from iris_pg.multinode.plan import Plan, Span
from iris_pg.program import Ref


def plan_of(hosts: Hosts, rank: int, flow: Flow | Fold) -> Plan:
    """Return this rank's plan for its side of an operation."""
    return _of_fold(hosts, rank, flow) if isinstance(flow, Fold) else _of_flow(hosts, rank, flow)


def _span(ref: Ref, nbytes: int) -> Span:
    return Span(ref.buffer, ref.offset, nbytes)


def _of_fold(hosts: Hosts, rank: int, fold: Fold) -> Plan:
    name, elements = fold.name, (fold.op, fold.dtype)
    operands = {part.peer: _span(part.here, part.nbytes) for part in fold.operands}
    if fold.to_all:
        assert fold.result
        source = operands[rank]
        return folds.all_reduce(hosts, rank, name, *elements, source, _span(fold.result, source.nbytes))
    result = _span(fold.result, operands[rank].nbytes) if fold.result else None
    if name == "reduce":
        ((root, source),) = operands.items()
        return folds.reduce(hosts, rank, name, *elements, root, source, result)
    return folds.reduce_scatter(hosts, rank, name, *elements, operands, result)


def _of_flow(hosts: Hosts, rank: int, flow: Flow) -> Plan:
    name, own = flow.name, flow.own
    sends = {part.peer: _span(part.here, part.nbytes) for part in flow.sends}
    receives = {part.peer: _span(part.here, part.nbytes) for part in flow.receives}
    copy: Any = own and (_span(own.dst, own.nbytes), _span(own.src, own.nbytes))
    if not flow.to_all:
        # Only the root of a gather receives, and only that of a scatter sends.
        root = (
            next(iter(sends), rank) if name == "gather" else next(iter(receives), rank) if name == "scatter" else rank
        )
        takes_part = hosts.places[root][0] == hosts.places[rank][0]
        return moves.pairwise(hosts, rank, name, sends, receives, copy, takes_part)
    if name == "broadcast":
        (root, tensor), *_ = receives.items() or [(rank, next(iter(sends.values())))]
        return moves.broadcast(hosts, rank, name, root, tensor)
    mine = next(iter(sends.values()), Span("in", 0, 0))
    parts = {**receives, rank: copy[0] if copy else mine}
    return moves.all_gather(hosts, rank, name, mine, [parts.get(p, Span("in", 0, 0)) for p in range(hosts.world)])


__all__ = ["plan_of"]
