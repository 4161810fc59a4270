"""Messages from all ranks, combined into one output in the order of ranks."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .exchange import await_round, count, counts, raise_round, slot_at
from .flags import COUNTERS, DEAD, at, element, greatest, pick
from .move import aligned, chunk_of, copy_tail, rounds_of

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
        else:  # towards zero, whatever `//` does with negative numbers here
            result = tl.where(result < 0, -(-result // world), result // world)
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
    index = start + tl.arange(0, BLOCK)
    mask = index < count
    result = tl.full([BLOCK], 0, ACCUMULATOR)
    for peer in tl.static_range(world):
        place = slots + slot_at(landing, peer, cta, ctas, element(numbers, lane, peer), slot_bytes)
        source = tl.where(rank == peer, own_source, place)
        value = tl.load(aligned(source, ELEMENT, WORD) + index, mask=mask).to(ACCUMULATOR)
        if peer == 0:
            result = value
        else:
            result = combine(result, value, OP)
    tl.store(aligned(own_target, ELEMENT, WORD) + index, finish(result, world, ELEMENT, ACCUMULATOR, OP), mask=mask)


@triton.jit
def copy_block(source, target, n, start, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Copy up to BLOCK bytes of n from byte ``start`` on, a multiple of BLOCK."""
    LANE: tl.constexpr = min(WORD, 8)
    TYPE: tl.constexpr = tl.core.get_int_dtype(LANE * 8, signed=True)
    index = start // LANE + tl.arange(0, BLOCK // LANE)
    mask = index < n // WORD * (WORD // LANE)
    value = tl.load(aligned(source, TYPE, WORD) + index, mask=mask)
    tl.store(aligned(target, TYPE, WORD) + index, value, mask=mask)


@triton.jit
def reduce(
    bases,  # as for exchange, but:
    sends,
    send_bytes,
    own_source,
    own_target,
    own_bytes,  # this rank's operand: as long as what it receives from each peer; 0 when it receives nothing
    longest,
    flags,
    landing,
    slot_bytes,
    counters,
    words,
    rank,
    ctas,
    least,
    limit_ns,
    world: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,  # lanes of a copy, of 8 bytes
    WORD: tl.constexpr,  # not less than the size of an element
    CREDITS: tl.constexpr,
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
    out_bytes, in_bytes = pick(send_bytes, lane, world), own_bytes + lane * 0
    sent, taken = counts(counters, lane, others, world, CREDITS)
    rounds = rounds_of(longest, ctas, least, slot_bytes)
    lag = tl.minimum(rounds, 2)
    slots = pick(bases, rank, world)

    for i in range(0, rounds + lag):
        j = i - lag
        alive, sending, taking = await_round(
            *(i, j, rounds, sent, taken, out_bytes, in_bytes, bases, flags, slot_bytes, lane, others, cta, counters),
            *(words, rank, ctas, least, limit_ns, alive, world, CREDITS, POLLS, PLATFORM),
        )
        if alive:
            _, n_out = chunk_of(out_bytes, cta, i, ctas, least, slot_bytes)
            first_in, n_in = chunk_of(own_bytes, cta, j, ctas, least, slot_bytes)
            source, target = own_source + first_in, own_target + first_in
            whole = n_in // 16 * (16 // SIZE)
            for start in range(0, tl.maximum(greatest(n_out), n_in), STEP):
                for k in range(1, world):
                    peer = (rank + k) % world
                    first, n = chunk_of(pick(send_bytes, peer, world), cta, i, ctas, least, slot_bytes)
                    place = slot_at(landing, rank, cta, ctas, element(sent + i, lane, peer), slot_bytes)
                    copy_block(pick(sends, peer, world) + first, pick(bases, peer, world) + place, n, start, STEP, WORD)
                combine_block(
                    *(source, target, slots, taken + j, landing, start // SIZE, whole, slot_bytes, lane, cta, rank),
                    *(ctas, world, STEP // SIZE, WORD, ELEMENT, ACCUMULATOR, OP),
                )
            for k in range(1, world):
                peer = (rank + k) % world
                first, n = chunk_of(pick(send_bytes, peer, world), cta, i, ctas, least, slot_bytes)
                place = slot_at(landing, rank, cta, ctas, element(sent + i, lane, peer), slot_bytes)
                copy_tail(pick(sends, peer, world) + first, pick(bases, peer, world) + place, n, WORD)
            if whole < n_in // SIZE:
                combine_block(
                    *(source, target, slots, taken + j, landing, whole, n_in // SIZE, slot_bytes, lane, cta, rank),
                    *(ctas, world, 16, SIZE, ELEMENT, ACCUMULATOR, OP),
                )
            raise_round(i, sent, taken, j, bases, flags, lane, sending, taking, cta, rank, world, CREDITS)
    count(
        *(counters, sent, taken, out_bytes, in_bytes, cta, ctas, least, slot_bytes, rounds, lane, others),
        *(world, CREDITS),
    )
