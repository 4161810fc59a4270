"""Messages between tensors anywhere, through landing slots at the receiver.

Round i of a CTA: it sends chunk i of every message and copies out chunk i - 2 of those that come to it, in one loop, so
that the link and the memory are busy at once. Chunk s goes into slot s mod 4 of its sender and CTA. When may a slot be
written again?

* ``CREDITS``: when the receiver has raised DRAINED for what was in it. Any pattern of messages.
* Else every rank takes part with every other, in the same number of rounds, and no rank reports back. Before a rank
  sends s it has waited for chunk s - 2 of every peer, whose flag the peer raised after copying out s - 4.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .flags import (
    ARRIVED,
    COUNTERS,
    DEAD,
    DRAINED,
    ROUND,
    ROUNDS,
    SENT,
    TAKEN,
    at,
    await_all,
    element,
    flags_here,
    flags_there,
    pick,
    raise_all,
    tell,
)
from .move import chunk_of, copy_both

SLOTS = tl.constexpr(4)


@triton.jit
def slot_at(landing, sender, cta, ctas, number, slot_bytes):
    """Return the offset in a segment of the slot of a CTA of `sender` for its chunk `number`."""
    return landing + ((sender * ctas + cta) * SLOTS + (number & (SLOTS - 1))) * slot_bytes


@triton.jit
def exchange(
    bases,  # addresses [world] at which the segments are mapped here
    sends,  # addresses [world] of what this rank sends to each peer
    send_bytes,  # [world]; 0 for no message
    send_shares,  # [world]; bytes of each message that a CTA moves, multiples of 16; its two ranks give the same
    receives,  # addresses [world] of where each peer's message goes
    receive_bytes,  # [world]
    receive_shares,  # [world]
    own_source,
    own_target,
    own_bytes,  # this rank's own part; 0 for none
    own_share,
    rounds,  # most chunks of a share of any of these
    flags,  # offset in a segment of the flags
    landing,  # offset in a segment of the slots
    slot_bytes,  # of a slot, a multiple of 16
    counters,  # address of int32 [ctas, COUNTERS, world]
    words,  # address of int32 [WAITING + ctas]
    rank,
    ctas,  # most CTAs of a launch
    limit_ns,  # deadline of one wait
    done,  # address of the host's word that says how many operations are done, or 0
    number,  # to be written there
    world: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, 2 or more, not less than world
    BLOCK: tl.constexpr,  # lanes of a copy
    WORD: tl.constexpr,  # 1, 2, 4 or 16: all addresses are multiples of it
    TO_ALL: tl.constexpr,  # the own part is what goes to every peer
    CREDITS: tl.constexpr,
    CHUNKS: tl.constexpr,  # into how many a CTA's share of a message is cut
    POLLS: tl.constexpr,  # polls of a flag between looks at the clock
    PLATFORM: tl.constexpr,
):
    """Move messages between tensors anywhere."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    others = (lane < world) & (lane != rank)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0

    out_bytes, out_share = pick(send_bytes, lane, world), pick(send_shares, lane, world)
    in_bytes, in_share = pick(receive_bytes, lane, world), pick(receive_shares, lane, world)
    sent, taken = counts(counters, lane, others, world, CREDITS)
    sent_now, taken_now = sent, taken
    lag = tl.minimum(rounds, 2)
    mine = pick(bases, rank, world)

    for i in range(0, rounds + lag):
        j = i - lag
        _, all_out = chunk_of(out_bytes, out_share, cta, i, slot_bytes, CHUNKS)
        _, all_in = chunk_of(in_bytes, in_share, cta, j, slot_bytes, CHUNKS)
        alive, sending, taking = await_round(
            *(
                i,
                j,
                rounds,
                sent,
                taken,
                all_out,
                all_in,
                bases,
                flags,
                lane,
                others,
                cta,
                counters,
                words,
                rank,
                limit_ns,
            ),
            *(alive, world, CREDITS, POLLS, PLATFORM),
        )
        if alive:
            for k in range(0 if world == 1 else 1, world):
                peer = (rank + k) % world
                nbytes, share = pick(send_bytes, peer, world), pick(send_shares, peer, world)
                first, n = chunk_of(nbytes, share, cta, i, slot_bytes, CHUNKS)
                there = slot_at(landing, rank, cta, ctas, element(sent + i, lane, peer), slot_bytes)
                nbytes, share = pick(receive_bytes, peer, world), pick(receive_shares, peer, world)
                first_in, n_in = chunk_of(nbytes, share, cta, j, slot_bytes, CHUNKS)
                here = slot_at(landing, peer, cta, ctas, element(taken + j, lane, peer), slot_bytes)
                first_own, n_own = chunk_of(own_bytes, own_share, cta, i, slot_bytes, CHUNKS)
                copy_both(
                    *(pick(sends, peer, world) + first, pick(bases, peer, world) + there),
                    *(own_source + first_own, own_target + first_own, tl.where(k <= 1, n_own, 0), n),
                    *(mine + here, pick(receives, peer, world) + first_in, n_in, BLOCK, WORD, TO_ALL),
                )
            raise_round(*(i, sent, taken, j, bases, flags, lane, sending, taking, cta, rank, world, CREDITS, PLATFORM))
        sent_now += sending.to(tl.int32)
        taken_now += taking.to(tl.int32)
    count(counters, sent_now, taken_now, sent + rounds.to(tl.int32), lane, others, world, CREDITS)
    tell(done, number, counters, cta, world, PLATFORM)


@triton.jit
def counts(counters, lane, others, world: tl.constexpr, CREDITS: tl.constexpr):
    """Return how many chunks went to and came from each peer so far [lanes]."""
    if CREDITS:
        sent = tl.load(counters + SENT * world + lane, mask=others, other=0)
        taken = tl.load(counters + TAKEN * world + lane, mask=others, other=0)
    else:
        sent = tl.load(counters + ROUNDS * world) + lane * 0
        taken = sent
    return sent, taken


@triton.jit
def await_round(
    i,
    j,
    rounds,
    sent,
    taken,
    n,  # bytes [lanes] that go and come in this round
    n_in,
    bases,
    flags,
    lane,
    others,
    cta,
    counters,
    words,
    rank,
    limit_ns,
    alive,
    world: tl.constexpr,
    CREDITS: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Wait until chunk i may be sent and chunk j has come; return whether alive, and to and from whom they go."""
    sending, taking = others & (i < rounds), others & (j >= 0)
    if CREDITS:
        sending, taking = sending & (n > 0), taking & (n_in > 0)
        if i < rounds:
            drained = flags_here(bases, flags, cta, DRAINED, lane, rank, world)
            target = sent + i - (SLOTS - 1)
            alive = await_all(
                *(drained, target, sending, lane, cta, counters, words, i, limit_ns, alive, world, POLLS, PLATFORM)
            )
    if j >= 0:
        arrived = flags_here(bases, flags, cta, ARRIVED if CREDITS else ROUND, lane, rank, world)
        target = taken + j + 1
        alive = await_all(
            *(arrived, target, taking, lane, cta, counters, words, i, limit_ns, alive, world, POLLS, PLATFORM)
        )
    return alive, sending, taking


@triton.jit
def raise_round(
    i,
    sent,
    taken,
    j,
    bases,
    flags,
    lane,
    sending,
    taking,
    cta,
    rank,
    world: tl.constexpr,
    CREDITS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Say that chunk i has been sent and chunk j copied out."""
    there = flags_there(bases, flags, cta, ARRIVED if CREDITS else ROUND, lane, rank, world)
    raise_all(there, sent + i + 1, sending, PLATFORM)
    if CREDITS:
        if j >= 0:
            raise_all(flags_there(bases, flags, cta, DRAINED, lane, rank, world), taken + j + 1, taking, PLATFORM)


@triton.jit
def count(counters, sent, taken, round_number, lane, others, world: tl.constexpr, CREDITS: tl.constexpr):
    """Remember how many chunks went to and came from each peer."""
    if CREDITS:
        tl.store(counters + SENT * world + lane, sent, mask=others)
        tl.store(counters + TAKEN * world + lane, taken, mask=others)
    else:
        tl.store(counters + ROUNDS * world + lane, round_number, mask=lane == 0)
