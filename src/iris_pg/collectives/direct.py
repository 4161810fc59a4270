"""Programs for tensors in memory of their process alone, which peers read directly: nothing is staged.

The owner of an input offers it: it says where it is (enter), and afterwards waits until each reader has read (done).
So unlike a staged operation it ends only when its peers have come, and takes one handshake more; large tensors gain,
since writing a slot that others have in their caches costs more than reading it.

Bytes: each reader of n bytes reads n out of the owner's memory and writes them, which is the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.collectives.setting import Setting, chunks
from iris_pg.flags import CREDIT, LINE
from iris_pg.program import Offer, Program, Pull, Reduce, Ref, Signal, Step, Take


def offers(s: Setting, parts: Iterable[Part]) -> Iterator[Step]:
    """Let each part's peer read it."""
    return (Offer(s.flag(part.peer, s.page.enter(s.rank)), s.tag, src=part.here) for part in parts)


def pulls(s: Setting, parts: Iterable[Part]) -> Iterator[Step]:
    """Read what each part's peer offers."""
    for part in parts:
        flag = s.flag(s.rank, s.page.enter(part.peer))
        yield Take(flag, part.peer, s.tag)
        yield Pull(part.here, flag, part.peer, part.nbytes)
        yield Signal(s.flag(part.peer, s.page.done(s.rank)), s.tag)


def pair_offers(s: Setting, parts: Iterable[Part]) -> Iterator[Step]:
    """Let each part's peer read it, when only the two know how long it is.

    The mailbox is that of a staged message, and the tag depends on the size: so two ranks that do not agree on it find
    out, whatever each would do.
    """
    for part in parts:
        yield Take(s.flag(s.rank, s.page.drained(s.first_slot, part.peer)), part.peer, CREDIT)
        yield Offer(s.flag(part.peer, s.page.filled(s.first_slot, s.rank)), s.tag_of(part.nbytes), src=part.here)


def pair_pulls(s: Setting, parts: Iterable[Part]) -> Iterator[Step]:
    """Read what each part's peer offers by :func:`pair_offers`."""
    for part in parts:
        flag = s.flag(s.rank, s.page.filled(s.first_slot, part.peer))
        yield Take(flag, part.peer, s.tag_of(part.nbytes))
        yield Pull(part.here, flag, part.peer, part.nbytes)
        yield Signal(s.flag(part.peer, s.page.drained(s.first_slot, s.rank)), CREDIT)
        yield Signal(s.flag(part.peer, s.page.done(s.rank)), s.tag)


def until_read(s: Setting, peers: Iterable[int]) -> Iterator[Step]:
    """Wait until these peers have read what was offered to them."""
    return (Take(s.flag(s.rank, s.page.done(p)), p, s.tag) for p in peers)


def spread(s: Setting, flow: Flow) -> Program:
    """Each sender's bytes are read by all its peers: all_gather (every rank sends), broadcast (the root sends)."""
    steps: list[Step] = list(offers(s, flow.sends))
    if flow.own:
        steps.append(flow.own)  # while peers are on their way
    steps += pulls(s, flow.receives)
    steps += until_read(s, (part.peer for part in flow.sends))
    return Program(s.rank, s.world, tuple(steps), flow.name)


def reduce_scatter(s: Setting, fold: Fold) -> Program:
    """Each rank that gets a result pulls its operands from all peers, piece by piece, and reduces them."""
    operands = {part.peer: part for part in fold.operands}
    read = [operands[p] for p in s.peers if p in operands]
    steps: list[Step] = list(offers(s, read))
    if fold.result and s.rank in operands:
        mine = operands[s.rank]
        steps += _reduced(s, fold, mine.here, fold.result, mine.nbytes)
        steps += (Signal(s.flag(p, s.page.done(s.rank)), s.tag) for p in s.peers)
    steps += until_read(s, (part.peer for part in read))
    return Program(s.rank, s.world, tuple(steps), fold.name)


def all_reduce(s: Setting, fold: Fold) -> Program:
    """Each rank reduces a segment, as in reduce_scatter, and lets its peers read the result.

    In place, the operand of segment p is overwritten when rank p has reduced it (reduced), so after p has read it.

    Bytes: each rank reads (world - 1) / world * n of operands and as many of results, which is the lower bound.
    """
    (operand,) = fold.operands
    here, result, n = operand.here, fold.result, operand.nbytes
    assert result
    segment = -(-n // (s.world * LINE)) * LINE  # whole lines, so whole elements; the last ones may be shorter, or empty
    parts = {p: Part(p, min(segment, n - p * segment), here + p * segment) for p in range(s.world) if n > p * segment}
    reducing = [p for p in s.peers if p in parts]
    steps: list[Step] = list(offers(s, (parts[p] for p in reducing)))
    if mine := parts.get(s.rank):
        at = result + s.rank * segment
        steps += _reduced(s, fold, mine.here, at, mine.nbytes)
        steps += (Offer(s.flag(p, s.page.reduced(s.rank)), s.tag, src=at) for p in s.peers)
    for p in reducing:
        flag = s.flag(s.rank, s.page.reduced(p))
        steps.append(Take(flag, p, s.tag))
        steps.append(Pull(result + p * segment, flag, p, parts[p].nbytes))
        steps.append(Signal(s.flag(p, s.page.done(s.rank)), s.tag))
    if mine:
        steps += until_read(s, s.peers)
    return Program(s.rank, s.world, tuple(steps), fold.name)


def _reduced(s: Setting, fold: Fold, own: Ref, into: Ref, nbytes: int) -> Iterator[Step]:
    """Reduce ``nbytes`` that all peers offer, and ``own``, in the order of ranks."""
    flags = {p: s.flag(s.rank, s.page.enter(p)) for p in s.peers}
    for p in s.peers:
        yield Take(flags[p], p, s.tag)
    for start, length in chunks(nbytes, s.piece_bytes // LINE * LINE):
        for p in s.peers:
            yield Pull(s.pulled(p), flags[p], p, length, start)
        sources = tuple(own + start if p == s.rank else s.pulled(p) for p in range(s.world))
        yield Reduce(into + start, sources, length, fold.dtype, fold.op)
