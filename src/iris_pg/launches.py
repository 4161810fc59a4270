"""Operations as launches of the cu engine: pure, but for the check that its kernels know the reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.kernels.launch import Exchange, Message, reduction_types
from iris_pg.program import Ref

_ONE_SHOT = 1 << 14  # bytes; right for CPUs
_SHARE = 16  # bytes; a rank's part of an all_reduce is a multiple, so whole elements of every dtype


def launches(
    rank: int, world: int, flow: Flow | Fold, address: Callable[[Ref], int], one_shot_bytes: int = _ONE_SHOT
) -> list[Exchange]:
    """Return what this rank launches for an operation, in order.

    Args:
        address: Ref -> address in this process.
        one_shot_bytes: up to which every rank reduces all of an all_reduce, in one launch and not two; the same on all
            ranks.

    Raises:
        UnsupportedError: a reduction that the kernels do not have.
    """
    if isinstance(flow, Fold):
        return _folds(rank, world, flow, address, one_shot_bytes)

    def messages(parts: Sequence[Part]) -> list[Message]:
        return [
            Message(p.peer, address(p.here), p.nbytes, address(p.there) if p.there else 0) for p in parts if p.nbytes
        ]

    sends, receives = messages(flow.sends), messages(flow.receives)
    own = (address(flow.own.src), address(flow.own.dst), flow.own.nbytes) if flow.own else (0, 0, 0)
    is_known = flow.to_all or flow.name == "barrier"  # else only the two ranks of a message know its size
    symmetric = is_known and len(sends) == len(receives) == world - 1
    return [Exchange(sends, receives, own, flow.zero_copy, flow.pulls, symmetric=symmetric, is_known=is_known)]


def _folds(rank: int, world: int, fold: Fold, address: Callable[[Ref], int], one_shot_bytes: int) -> list[Exchange]:
    reduction = (fold.op, fold.dtype)
    reduction_types(*reduction)
    peers = [(rank + k) % world for k in range(1, world)]
    result = address(fold.result) if fold.result else 0
    if not fold.to_all:
        parts = {part.peer: (address(part.here), part.nbytes) for part in fold.operands}
        mine, n = parts.get(rank, (0, 0))
        sends = [Message(p, *parts[p]) for p in peers if p in parts]
        receives = [Message(p, 0, n) for p in peers if n]
        symmetric = len(parts) == world
        return [Exchange(sends, receives, (mine, result, n), reduction=reduction, symmetric=symmetric)]
    (operand,) = fold.operands
    here, n = address(operand.here), operand.nbytes
    if n <= one_shot_bytes or world == 1:
        return [
            Exchange(
                [Message(p, here, n) for p in peers],
                [Message(p, 0, n) for p in peers],
                (here, result, n),
                reduction=reduction,
                symmetric=True,
            )
        ]
    segment = -(-n // (world * _SHARE)) * _SHARE
    sizes = [max(min(segment, n - p * segment), 0) for p in range(world)]
    at = rank * segment
    scatter = Exchange(
        [Message(p, here + p * segment, sizes[p]) for p in peers if sizes[p]],
        [Message(p, 0, sizes[rank]) for p in peers if sizes[rank]],
        (here + at, result + at, sizes[rank]),
        reduction=reduction,
        symmetric=True,
    )
    gather = Exchange(
        [Message(p, result + at, sizes[rank]) for p in peers if sizes[rank]],
        [Message(p, result + p * segment, sizes[p]) for p in peers if sizes[p]],
        symmetric=True,
    )
    return [scatter, gather]
