"""Messages from all ranks, combined into one output in the order of ranks."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .exchange import await_round, count, counts, raise_round, slot_at
from .flags import COUNTERS, DEAD, at, element, greatest, pick, tell
from .move import aligned, chunk_of, copy_tail, lanes_left

# What is done with two elements, and with the last result.
SUM = tl.constexpr(0)
AVG = tl.constexpr(1)
PRODUCT = tl.constexpr(2)
MIN = tl.constexpr(3)
MAX = tl.constexpr(4)
BAND = tl.constexpr(5)
BOR = tl.constexpr(6)
BXOR = tl.constexpr(7)


@triton.jit
def combine(a, b, OP: tl.constexpr):
    """Return what comes of two elements."""
    if OP == SUM or OP == AVG:
        return a + b
    elif OP == PRODUCT:
        return a * b
    elif OP == MIN:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == MAX:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == BAND:
        return a & b
    elif OP == BOR:
        return a | b
    else:
        return a ^ b


@triton.jit
def finish(result, world: tl.constexpr, ELEMENT: tl.constexpr, ACCUMULATOR: tl.constexpr, OP: tl.constexpr):
    """Return the results [n] as they are stored."""
    if OP == AVG:
        if ACCUMULATOR == tl.float32:
            result = tl.div_rn(result, tl.full(result.shape, world, tl.float32))  # `/` is not rounded correctly
        elif ACCUMULATOR.is_floating():
            result = result / world
        else:  # towards zero, whatever `//` does with negative numbers here; the least one has no opposite
            down = result // world
            result = down + ((result < 0) & (result - down * world > 0)).to(ACCUMULATOR)
    return result.to(ELEMENT)


@triton.jit
def combine_block(
    own_source,
    own_target,
    slots,
    numbers,
    landing,
    start,
    count,
    slot_bytes,
    lane,
    cta,
    rank,
    ctas,
    world: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    ELEMENT: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OP: tl.constexpr,
):
    """Combine up to BLOCK elements from number `start` on, of `count`."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    index = tl.arange(0, BLOCK)
    mask = index < lanes_left(count, start, BLOCK)
    result = tl.full([BLOCK], 0, ACCUMULATOR)
    for peer in tl.static_range(world):
        place = slots + slot_at(landing, peer, cta, ctas, element(numbers, lane, peer), slot_bytes)
        source = tl.where(rank == peer, own_source, place) + start * SIZE
        value = tl.load(aligned(source, ELEMENT, WORD) + index, mask=mask).to(ACCUMULATOR)
        if peer == 0:
            result = value
        else:
            result = combine(result, value, OP)
    tl.store(
        aligned(own_target + start * SIZE, ELEMENT, WORD) + index,
        finish(result, world, ELEMENT, ACCUMULATOR, OP),
        mask=mask,
    )


@triton.jit
def copy_block(source, target, n, start, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Copy up to BLOCK bytes of n from byte ``start`` on, a multiple of BLOCK."""
    LANE: tl.constexpr = min(WORD, 8)
    TYPE: tl.constexpr = tl.core.get_int_dtype(LANE * 8, signed=True)
    lane = tl.arange(0, BLOCK // LANE)
    mask = lane < lanes_left(n // WORD * (WORD // LANE), start // LANE, BLOCK // LANE)
    value = tl.load(aligned(source + start, TYPE, WORD) + lane, mask=mask)
    tl.store(aligned(target + start, TYPE, WORD) + lane, value, mask=mask)


@triton.jit
def reduce(
    bases,  # as for exchange, but:
    sends,
    send_bytes,
    send_shares,
    own_source,
    own_target,
    own_bytes,  # this rank's operand: as long as what it receives from each peer; 0 when it receives nothing
    own_share,
    rounds,
    flags,
    landing,
    slot_bytes,
    counters,
    words,
    rank,
    ctas,
    limit_ns,
    done,
    number,
    world: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,  # lanes of a copy, of 8 bytes
    WORD: tl.constexpr,  # not less than the size of an element
    CREDITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ELEMENT: tl.constexpr,  # dtype in memory
    ACCUMULATOR: tl.constexpr,  # dtype in which elements are combined, rounded once at the end
    OP: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Send messages as ``exchange`` does, and combine what comes from all ranks into one output."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    others = (lane < world) & (lane != rank)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0

    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    STEP: tl.constexpr = max(BLOCK * 8 // LANES, 128)  # bytes of each operand in one block
    out_bytes, out_share = pick(send_bytes, lane, world), pick(send_shares, lane, world)
    sent, taken = counts(counters, lane, others, world, CREDITS)
    sent_now, taken_now = sent, taken
    lag = tl.minimum(rounds, 2)
    slots = pick(bases, rank, world)

    for i in range(0, rounds + lag):
        j = i - lag
        _, all_out = chunk_of(out_bytes, out_share, cta, i, slot_bytes, CHUNKS)
        first_in, n_in = chunk_of(own_bytes, own_share, cta, j, slot_bytes, CHUNKS)
        alive, sending, taking = await_round(
            *(
                i,
                j,
                rounds,
                sent,
                taken,
                all_out,
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
            ),
            *(alive, world, CREDITS, POLLS, PLATFORM),
        )
        if alive:
            source, target = own_source + first_in, own_target + first_in
            whole = n_in // 16 * (16 // SIZE)
            for start in range(0, tl.maximum(greatest(all_out), n_in), STEP):
                for k in range(1, world):
                    peer = (rank + k) % world
                    nbytes, share = pick(send_bytes, peer, world), pick(send_shares, peer, world)
                    first, n = chunk_of(nbytes, share, cta, i, slot_bytes, CHUNKS)
                    place = slot_at(landing, rank, cta, ctas, element(sent + i, lane, peer), slot_bytes)
                    copy_block(pick(sends, peer, world) + first, pick(bases, peer, world) + place, n, start, STEP, WORD)
                combine_block(
                    *(source, target, slots, taken + j, landing, start // SIZE, whole, slot_bytes, lane, cta, rank),
                    *(ctas, world, STEP // SIZE, WORD, ELEMENT, ACCUMULATOR, OP),
                )
            for k in range(1, world):
                peer = (rank + k) % world
                nbytes, share = pick(send_bytes, peer, world), pick(send_shares, peer, world)
                first, n = chunk_of(nbytes, share, cta, i, slot_bytes, CHUNKS)
                place = slot_at(landing, rank, cta, ctas, element(sent + i, lane, peer), slot_bytes)
                copy_tail(pick(sends, peer, world) + first, pick(bases, peer, world) + place, n, WORD)
            if whole < n_in // SIZE:
                combine_block(
                    *(source, target, slots, taken + j, landing, whole, n_in // SIZE, slot_bytes, lane, cta, rank),
                    *(ctas, world, 16, SIZE, ELEMENT, ACCUMULATOR, OP),
                )
            raise_round(*(i, sent, taken, j, bases, flags, lane, sending, taking, cta, rank, world, CREDITS, PLATFORM))
        sent_now += sending.to(tl.int32)
        taken_now += taking.to(tl.int32)
    count(counters, sent_now, taken_now, sent + rounds.to(tl.int32), lane, others, world, CREDITS)
    tell(done, number, counters, cta, world, PLATFORM)
