"""Programs for tensors anywhere in memory: bytes go through staging slots that every rank of the group maps.

A sender copies a chunk of its tensor into a slot of its own segment and says so; readers pull it from there and give
the slot back. Two slots let a sender fill one while readers drain the other, and let the next operation begin before
the last one is drained.

Bytes: the sender of n bytes writes n, and each reader writes n. Between two ordinary tensors of different processes
that is one copy more than the lower bound, a direct read of the other's memory.
"""

from __future__ import annotations

from collections.abc import Callable

from iris_pg.collectives import direct
from iris_pg.collectives.flow import Flow
from iris_pg.collectives.setting import Setting, chunks
from iris_pg.flags import CREDIT, SLOTS
from iris_pg.program import Copy, Program, Ref, Signal, Step, Take


def spread(s: Setting, flow: Flow) -> Program:
    """Each sender stages its bytes once, for all its peers: all_gather (every rank sends), broadcast (the root
    sends).
    """
    steps: list[Step] = []
    sent = list(chunks(flow.sends[0].nbytes, s.chunk_bytes)) if flow.sends else []
    source = flow.sends[0].here if flow.sends else None
    received = {part.peer: (part.here, list(chunks(part.nbytes, s.chunk_bytes))) for part in flow.receives}
    own = list(chunks(flow.own.nbytes, s.chunk_bytes)) if flow.own else []

    def produce(chunk: int) -> None:
        slot = (s.first_slot + chunk) % SLOTS
        if source and chunk < len(sent):
            start, length = sent[chunk]
            for p in s.peers:
                steps.append(Take(s.flag(s.rank, s.page.free(slot, p)), p, CREDIT))
            steps.append(Copy(Ref(s.rank, "staging", slot * s.chunk_bytes), source + start, length))
            for p in s.peers:
                steps.append(Signal(s.flag(p, s.page.ready(slot, s.rank)), s.tag))
        if flow.own and chunk < len(own):  # here, while the chunk is in the cache and peers are at work
            start, length = own[chunk]
            steps.append(Copy(flow.own.dst + start, flow.own.src + start, length))

    def consume(chunk: int) -> None:
        slot = (s.first_slot + chunk) % SLOTS
        for p in s.peers:
            target, pieces = received.get(p, (None, []))
            if target and chunk < len(pieces):
                start, length = pieces[chunk]
                steps.append(Take(s.flag(s.rank, s.page.ready(slot, p)), p, s.tag))
                steps.append(Copy(target + start, Ref(p, "staging", slot * s.chunk_bytes), length))
                steps.append(Signal(s.flag(p, s.page.free(slot, s.rank)), CREDIT))

    _one_ahead(produce, consume, max(map(len, (sent, own, *(pieces for _, pieces in received.values())))))
    return Program(s.rank, s.world, tuple(steps), flow.name)


def pairwise(s: Setting, flow: Flow) -> Program:
    """Each pair of ranks has slots of its own, so a rank need not know of messages between others: gather, scatter. All
    operations where writers push, which cannot write to all readers at once.

    A message of 0 bytes is signalled all the same, and the signals of every message depend on its size: so two ranks
    that do not agree on the size find out. Large messages are read directly and go by no slot.
    """
    large_sends, large_receives = (
        [part for part in parts if s.is_direct(part.nbytes)] for parts in (flow.sends, flow.receives)
    )
    lane = s.receiving
    steps: list[Step] = list(direct.pair_offers(s, large_sends))
    own = s.pieces(flow.own.nbytes) if flow.own and s.pushes else []
    if flow.own and not own:
        steps.append(flow.own)
    sends = {p.peer: (p.here, _pieces(s, p.nbytes)) for p in flow.sends if not s.is_direct(p.nbytes)}
    receives = {p.peer: (p.here, _pieces(s, p.nbytes)) for p in flow.receives if not s.is_direct(p.nbytes)}
    tag_to = {part.peer: s.tag_of(part.nbytes) for part in flow.sends}
    tag_from = {part.peer: s.tag_of(part.nbytes) for part in flow.receives}

    def produce(chunk: int) -> None:
        slot = (s.first_slot + chunk) % SLOTS
        for p in s.peers:
            source, pieces = sends.get(p, (None, []))
            if source and chunk < len(pieces):
                start, length = pieces[chunk]
                steps.append(Take(s.flag(s.rank, s.page.drained(slot, p)), p, CREDIT))
                if length:
                    steps.append(Copy(s.pair(s.rank, slot, p), source + start, length))
                steps.append(Signal(s.flag(p, s.page.filled(slot, s.rank)), tag_to[p]))

    def consume(chunk: int) -> None:
        slot = (s.first_slot + chunk) % SLOTS
        if flow.own and chunk < len(own):  # while the chunk comes; no writer waits for more than a chunk of it
            start, length = own[chunk]
            steps.append(Copy(flow.own.dst + start, flow.own.src + start, length, lane))
        for p in s.peers:
            target, pieces = receives.get(p, (None, []))
            if target and chunk < len(pieces):
                start, length = pieces[chunk]
                steps.append(Take(s.flag(s.rank, s.page.filled(slot, p)), p, tag_from[p], lane))
                if length:
                    steps.append(Copy(target + start, s.pair(p, slot, s.rank), length, lane))
                steps.append(Signal(s.flag(p, s.page.drained(slot, s.rank)), CREDIT, lane))

    counts = [len(pieces) for _, pieces in (*sends.values(), *receives.values())]
    _one_ahead(produce, consume, max([*counts, len(own)], default=0))
    steps += direct.pair_pulls(s, large_receives)
    steps += direct.until_read(s, (part.peer for part in large_sends))
    return Program(s.rank, s.world, tuple(steps), flow.name)


def _pieces(s: Setting, nbytes: int) -> list[tuple[int, int]]:
    return s.pieces(nbytes) or [(0, 0)]


def _one_ahead(produce: Callable[[int], None], consume: Callable[[int], None], count: int) -> None:
    """Produce one chunk ahead of what is consumed, so that peers need not wait for this rank to drain theirs first."""
    produce(0)
    for chunk in range(count):
        produce(chunk + 1)
        consume(chunk)
