"""Programs in which each result goes to one rank: reduce_scatter, and reduce, where only the root gets one.

A rank stages its operand of a peer's result in the slot from it to that peer. The peer reduces out of the slots of all
ranks at once, its own operand from where it is, in the order of ranks. So the bits of a result do not depend on which
rank gets it.

Bytes: for a result of n bytes each peer writes n, and the rank that gets it reads world * n and writes n. The lower
bound, where it could read the operands themselves, is the same without what peers write, which they do at one time.
"""

from __future__ import annotations

from collections.abc import Iterator

from iris_pg.collectives.flow import Fold
from iris_pg.collectives.setting import Setting
from iris_pg.flags import CREDIT, LINE, SLOTS
from iris_pg.program import Copy, Program, Reduce, Ref, Signal, Step, Take


def reduce_scatter(s: Setting, fold: Fold) -> Program:
    """Each rank that gets a result reduces it from the operands that its peers stage for it."""
    if s.world == 1:
        return alone(s, fold)
    steps: list[Step] = []
    operands = {part.peer: part.here for part in fold.operands}
    # Whole lines, so that elements of any size are whole.
    pieces = {part.peer: s.pieces(part.nbytes, LINE) for part in fold.operands}

    def produce(chunk: int) -> None:
        for p in s.peers:
            if chunk < len(pieces.get(p, ())):
                start, length = pieces[p][chunk]
                steps.extend(stage(s, slot_of(s, chunk), p, operands[p] + start, length))

    def consume(chunk: int) -> None:
        if fold.result and chunk < len(pieces[s.rank]):
            start, length = pieces[s.rank][chunk]
            slot = slot_of(s, chunk)
            steps.extend(collect(s, slot))
            steps.append(total(s, slot, fold, operands[s.rank] + start, fold.result + start, length))
            steps.extend(release(s, slot))

    produce(0)
    for chunk in range(max(map(len, pieces.values()), default=0)):
        produce(chunk + 1)  # one ahead, so that peers need not wait for this rank to reduce
        consume(chunk)
    return Program(s.rank, s.world, tuple(steps), fold.name)


def alone(s: Setting, fold: Fold) -> Program:
    """The only rank's operand is the result."""
    steps = [
        Copy(fold.result, part.here, part.nbytes) for part in fold.operands if fold.result not in (None, part.here)
    ]
    return Program(s.rank, s.world, tuple(steps), fold.name)


def slot_of(s: Setting, chunk: int) -> int:
    """The slot through which a chunk goes."""
    return (s.first_slot + chunk) % SLOTS


def stage(s: Setting, slot: int, peer: int, source: Ref, nbytes: int) -> Iterator[Step]:
    """Put ``nbytes`` of ``source`` into the slot from this rank to ``peer``."""
    yield Take(s.flag(s.rank, s.page.drained(slot, peer)), peer, CREDIT)
    yield Copy(s.pair(s.rank, slot, peer), source, nbytes)
    yield Signal(s.flag(peer, s.page.filled(slot, s.rank)), s.tag)


def collect(s: Setting, slot: int) -> Iterator[Step]:
    """Wait until every peer's slot for this rank is filled."""
    return (Take(s.flag(s.rank, s.page.filled(slot, p)), p, s.tag, s.receiving) for p in s.peers)


def total(s: Setting, slot: int, fold: Fold, own: Ref, into: Ref, nbytes: int) -> Reduce:
    """The reduction of every peer's slot for this rank and of ``own``, in the order of ranks."""
    sources = (own if p == s.rank else s.pair(p, slot, s.rank) for p in range(s.world))
    return Reduce(into, tuple(sources), nbytes, fold.dtype, fold.op, s.receiving)


def release(s: Setting, slot: int) -> Iterator[Step]:
    """Give every peer its slot for this rank back."""
    return (Signal(s.flag(p, s.page.drained(slot, s.rank)), CREDIT, s.receiving) for p in s.peers)
