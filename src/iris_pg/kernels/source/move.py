"""Parts of messages, and how a CTA copies them.

How much of a message each CTA moves, its share, comes from the host: a division in a kernel costs as much as a flag.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .flags import at, pick

CHUNK = tl.constexpr(1 << 17)  # least bytes of a chunk, unless a share is shorter


@triton.jit
def part_of(nbytes, share, cta):
    """Return the start and length of what a CTA moves of a message."""
    first = tl.minimum(cta * share, nbytes)
    return first, tl.minimum(nbytes - first, share)


@triton.jit
def chunk_of(nbytes, share, cta, i, slot_bytes, CHUNKS: tl.constexpr):
    """Return the start and length of chunk i of what a CTA moves of a message; the length is 0 where there is none.
    A share is cut into CHUNKS, into fewer where they would be short, and into more where they do not fit a slot.
    """
    cut = tl.minimum(tl.maximum((share + CHUNKS * 16 - 1) // (CHUNKS * 16) * 16, CHUNK), slot_bytes)
    first = tl.minimum(cta * share + i * cut, nbytes)
    n = tl.minimum(tl.minimum((cta + 1) * share, nbytes) - first, cut)
    return first, tl.where(i < 0, 0, tl.maximum(n, 0))


@triton.jit
def aligned(address, TYPE: tl.constexpr, WORD: tl.constexpr):
    """Return a pointer to TYPE whose address is a multiple of WORD, so that accesses can be that wide."""
    # The hint is on the operation that makes the pointer; on a call of another function it would be lost.
    return tl.multiple_of(tl.cast(address, tl.int64).to(tl.pointer_type(TYPE)), WORD)


@triton.jit
def lanes_left(count, start, BLOCK: tl.constexpr):
    """Return how many of a block's lanes, from number `start` of `count` on, have something to do; 32 bits."""
    return tl.minimum(count - start, BLOCK).to(tl.int32)


@triton.jit
def copy_tail(source, target, n, WORD: tl.constexpr):
    """Copy the last n mod WORD of n bytes."""
    done = n // WORD * WORD
    if done < n:
        byte = tl.arange(0, 16)
        mask = done + byte < n
        tl.store(at(target + done, tl.int8) + byte, tl.load(at(source + done, tl.int8) + byte, mask=mask), mask=mask)


@triton.jit
def copy(source, target, n, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Copy n bytes between two addresses that are multiples of WORD; a lane moves up to 8, two together 16."""
    LANE: tl.constexpr = min(WORD, 8)
    TYPE: tl.constexpr = tl.core.get_int_dtype(LANE * 8, signed=True)
    lane = tl.arange(0, BLOCK)
    count = n // WORD * (WORD // LANE)
    for start in range(0, count, BLOCK):
        mask = lane < lanes_left(count, start, BLOCK)
        value = tl.load(aligned(source + start * LANE, TYPE, WORD) + lane, mask=mask)
        tl.store(aligned(target + start * LANE, TYPE, WORD) + lane, value, mask=mask)
    copy_tail(source, target, n, WORD)


@triton.jit
def copy_to_all(
    source,
    places,
    offset,
    own,
    has_own,
    n,
    rank,
    world: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
):
    """Copy n bytes to `offset` of every peer's place, and to `own` where `has_own`; reads them once."""
    LANE: tl.constexpr = min(WORD, 8)
    TYPE: tl.constexpr = tl.core.get_int_dtype(LANE * 8, signed=True)
    lane = tl.arange(0, BLOCK)
    count = n // WORD * (WORD // LANE)
    for start in range(0, count, BLOCK):
        mask = lane < lanes_left(count, start, BLOCK)
        value = tl.load(aligned(source + start * LANE, TYPE, WORD) + lane, mask=mask)
        for k in tl.static_range(1, world):
            place = pick(places, (rank + k) % world, world) + offset
            tl.store(aligned(place + start * LANE, TYPE, WORD) + lane, value, mask=mask)
        tl.store(aligned(own + start * LANE, TYPE, WORD) + lane, value, mask=mask & has_own)
    done = n // WORD * WORD
    if done < n:
        byte = tl.arange(0, 16)
        mask = done + byte < n
        value = tl.load(at(source + done, tl.int8) + byte, mask=mask)
        for k in tl.static_range(1, world):
            place = pick(places, (rank + k) % world, world) + offset
            tl.store(at(place + done, tl.int8) + byte, value, mask=mask)
        tl.store(at(own + done, tl.int8) + byte, value, mask=mask & has_own)


@triton.jit
def copy_both(
    source,
    target,
    own_source,
    own_target,
    n_own,
    n,
    source_in,
    target_in,
    n_in,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    SAME: tl.constexpr,
):
    """Copy n bytes of a message that goes, n_in of one that came, and n_own within this rank; loads of all are issued
    together. ``SAME``: the own bytes are those that go, n_own is n or 0.
    """
    LANE: tl.constexpr = min(WORD, 8)
    TYPE: tl.constexpr = tl.core.get_int_dtype(LANE * 8, signed=True)
    PER_WORD: tl.constexpr = WORD // LANE
    lane = tl.arange(0, BLOCK)
    count, count_in, count_own = n // WORD * PER_WORD, n_in // WORD * PER_WORD, n_own // WORD * PER_WORD
    for start in range(0, tl.maximum(tl.maximum(count, count_in), count_own), BLOCK):
        at_byte = start * LANE
        mask = lane < lanes_left(count, start, BLOCK)
        mask_in = lane < lanes_left(count_in, start, BLOCK)
        mask_own = lane < lanes_left(count_own, start, BLOCK)
        value = tl.load(aligned(source + at_byte, TYPE, WORD) + lane, mask=mask)
        value_in = tl.load(aligned(source_in + at_byte, TYPE, WORD) + lane, mask=mask_in)
        if SAME:
            value_own = value
        else:
            value_own = tl.load(aligned(own_source + at_byte, TYPE, WORD) + lane, mask=mask_own)
        tl.store(aligned(target + at_byte, TYPE, WORD) + lane, value, mask=mask)
        tl.store(aligned(target_in + at_byte, TYPE, WORD) + lane, value_in, mask=mask_in)
        tl.store(aligned(own_target + at_byte, TYPE, WORD) + lane, value_own, mask=mask_own)
    copy_tail(source, target, n, WORD)
    copy_tail(source_in, target_in, n_in, WORD)
    copy_tail(own_source, own_target, n_own, WORD)
