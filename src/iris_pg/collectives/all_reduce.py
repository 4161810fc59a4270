"""all_reduce: one result, for all ranks.

Small tensors take one step (:func:`one_shot`), large ones two (:func:`two_phases`); two ranks that push take one step
at any size (:func:`exchange`), as that moves no more between them. In all, the operands of an element are reduced at
once and in the order of ranks, and all ranks get the same bits.

Bytes: of n bytes each rank has to read 2 * (world - 1) / world * n from its peers, half of it operands, half results.
``two_phases`` reads no more, and writes 2 * n: into its slots for peers, its results, and its output. ``one_shot``
reads (world - 1) * n and writes 2 * n, but waits for its peers once and not twice. ``exchange`` writes n into its
peer's slots, and n into its output.
"""

from __future__ import annotations

from iris_pg.collectives.flow import Fold
from iris_pg.collectives.reduce_scatter import alone, collect, release, slot_of, stage, total
from iris_pg.collectives.setting import Setting
from iris_pg.flags import CREDIT, LINE
from iris_pg.program import Copy, Program, Reduce, Signal, Step, Take


def all_reduce(s: Setting, fold: Fold) -> Program:
    """Return the program for a tensor of any size."""
    if s.world == 1:
        return alone(s, fold)
    if not fold.operands:
        return Program(s.rank, s.world, (), fold.name)
    if s.pushes and s.world == 2:
        return exchange(s, fold)
    # What one_shot reads grows with the world, as slots for pairs get smaller. On a core of a server both take as long
    # for 256 KiB of 4 ranks, and for 100 KiB of 8.
    is_small = fold.operands[0].nbytes <= min(s.chunk_bytes, 2 * s.pair_bytes)
    return (one_shot if is_small else two_phases)(s, fold)


def one_shot(s: Setting, fold: Fold) -> Program:
    """Every rank stages its operand once for all, and reduces all of them. The operand fits in a slot."""
    (operand,) = fold.operands
    assert fold.result
    slot, n = slot_of(s, 0), operand.nbytes
    steps: list[Step] = [Take(s.flag(s.rank, s.page.free(slot, p)), p, CREDIT) for p in s.peers]
    steps.append(Copy(s.staging(s.rank, slot), operand.here, n))
    steps += [Signal(s.flag(p, s.page.ready(slot, s.rank)), s.tag) for p in s.peers]
    steps += [Take(s.flag(s.rank, s.page.ready(slot, p)), p, s.tag) for p in s.peers]
    # Its own operand from its slot too, which is in the cache: in place, the result is then none of the sources.
    sources = tuple(s.staging(p, slot) for p in range(s.world))
    steps.append(Reduce(fold.result, sources, n, fold.dtype, fold.op))
    steps += [Signal(s.flag(p, s.page.free(slot, s.rank)), CREDIT) for p in s.peers]
    return Program(s.rank, s.world, tuple(steps), fold.name)


def exchange(s: Setting, fold: Fold) -> Program:
    """Each of two ranks pushes its operand to the other, chunk by chunk, and reduces what it gets with its own.

    A chunk of the output is written after its operand has been sent, which in place is overwritten: as that happens in
    another lane, a rank signals itself as it does its peer.
    """
    (operand,) = fold.operands
    here, result = operand.here, fold.result
    assert result
    (peer,) = s.peers
    pieces, lane, steps = s.pieces(operand.nbytes, LINE), s.receiving, list[Step]()

    def send(chunk: int) -> None:
        if chunk < len(pieces):
            slot, (start, length) = slot_of(s, chunk), pieces[chunk]
            steps.extend(Take(s.flag(s.rank, s.page.drained(slot, p)), p, CREDIT) for p in (peer, s.rank))
            steps.append(Copy(s.pair(s.rank, slot, peer), here + start, length))
            steps.extend(Signal(s.flag(p, s.page.filled(slot, s.rank)), s.tag) for p in (peer, s.rank))

    send(0)
    for chunk, (start, length) in enumerate(pieces):
        send(chunk + 1)
        slot = slot_of(s, chunk)
        steps.extend(Take(s.flag(s.rank, s.page.filled(slot, p)), p, s.tag, lane) for p in (peer, s.rank))
        steps.append(total(s, slot, fold, here + start, result + start, length))
        steps.extend(Signal(s.flag(p, s.page.drained(slot, s.rank)), CREDIT, lane) for p in (peer, s.rank))
    return Program(s.rank, s.world, tuple(steps), fold.name)


def two_phases(s: Setting, fold: Fold) -> Program:
    """Each rank reduces a segment, as in reduce_scatter, and stages it once for all.

    Both phases go through a tensor chunk by chunk, the second one chunk behind the first. In place, a chunk of the
    output is written after its operand has been staged (1 comes before 3), or reduced (in 2).
    """
    (operand,) = fold.operands
    here, result, n = operand.here, fold.result, operand.nbytes
    assert result
    lane = s.receiving
    steps: list[Step] = []
    segment = -(-n // (s.world * LINE)) * LINE  # whole lines, so whole elements; the last ones may be shorter, or empty
    most = min(s.pair_bytes, s.chunk_bytes)  # a piece of operands goes through one slot, of results through the other
    pieces = [
        [(p * segment + start, length) for start, length in s.pieces(max(min(segment, n - p * segment), 0), LINE, most)]
        for p in range(s.world)
    ]

    def scatter(chunk: int) -> None:  # 1: stage operands for whoever reduces them
        for p in s.peers:
            if chunk < len(pieces[p]):
                start, length = pieces[p][chunk]
                steps.extend(stage(s, slot_of(s, chunk), p, here + start, length))

    def reduce(chunk: int) -> None:  # 2: reduce a piece of the own segment into the slot that peers read
        if chunk < len(pieces[s.rank]):
            slot, (start, length) = slot_of(s, chunk), pieces[s.rank][chunk]
            staged = s.staging(s.rank, slot)
            steps.extend(Take(s.flag(s.rank, s.page.free(slot, p)), p, CREDIT, lane) for p in s.peers)
            steps.extend(collect(s, slot))
            steps.append(total(s, slot, fold, here + start, staged, length))
            steps.extend(Signal(s.flag(p, s.page.ready(slot, s.rank)), s.tag, lane) for p in s.peers)
            steps.extend(release(s, slot))
            steps.append(Copy(result + start, staged, length, lane))

    def gather(chunk: int) -> None:  # 3: pull what peers have reduced
        slot = slot_of(s, chunk)
        for p in s.peers:
            if 0 <= chunk < len(pieces[p]):
                start, length = pieces[p][chunk]
                steps.append(Take(s.flag(s.rank, s.page.ready(slot, p)), p, s.tag, lane))
                steps.append(Copy(result + start, s.staging(p, slot), length, lane))
                steps.append(Signal(s.flag(p, s.page.free(slot, s.rank)), CREDIT, lane))

    scatter(0)
    for chunk in range(max(map(len, pieces)) + 1):
        scatter(chunk + 1)
        reduce(chunk)
        gather(chunk - 1)
    return Program(s.rank, s.world, tuple(steps), fold.name)
