"""Parts of messages, and how a CTA copies them."""

# mypy: ignore-errors

import triton
import triton.language as tl

from .flags import at, pick

# Least bytes of a chunk, unless a message is shorter; and into how many a CTA's share is cut before they get longer.
CHUNK = tl.constexpr(1 << 16)
CHUNKS = tl.constexpr(4)


@triton.jit
def share_of(nbytes, ctas, least):
    """Return the bytes of a message that each of at most `ctas` CTAs moves, a multiple of 16 and at least `least`."""
    return tl.maximum((nbytes + ctas * 16 - 1) // (ctas * 16) * 16, least)


@triton.jit
def part_of(nbytes, cta, ctas, least):
    """Return the start and length of what a CTA moves of a message."""
    share = share_of(nbytes, ctas, least)
    first = tl.minimum(cta * share, nbytes)
    return first, tl.minimum(nbytes - first, share)


@triton.jit
def cut_of(share, slot_bytes):
    """Return the bytes of the chunks into which a CTA cuts its share of a message; both its ranks do so alike."""
    return tl.minimum(tl.maximum((share + CHUNKS * 16 - 1) // (CHUNKS * 16) * 16, CHUNK), slot_bytes)


@triton.jit
def rounds_of(longest, ctas, least, slot_bytes):
    """Return in how many chunks a CTA moves its share of the longest message; of others it has no more."""
    share = share_of(longest, ctas, least)
    cut = cut_of(share, slot_bytes)
    return (tl.minimum(share, longest) + cut - 1) // cut


@triton.jit
def chunk_of(nbytes, cta, i, ctas, least, slot_bytes):
    """Return the start and length of chunk i of what a CTA moves of a message; the length is 0 where there is none."""
    share = share_of(nbytes, ctas, least)
    cut = cut_of(share, slot_bytes)
    first = tl.minimum(cta * share + i * cut, nbytes)
    n = tl.minimum(tl.minimum((cta + 1) * share, nbytes) - first, cut)
    return first, tl.where(i < 0, 0, tl.maximum(n, 0))


@triton.jit
def chunks_of(nbytes, cta, ctas, least, slot_bytes):
    """Return how many chunks of a message a CTA moves."""
    share = share_of(nbytes, ctas, least)
    cut = cut_of(share, slot_bytes)
    return ((tl.maximum(tl.minimum((cta + 1) * share, nbytes) - cta * share, 0) + cut - 1) // cut).to(tl.int32)


@triton.jit
def aligned(address, TYPE: tl.constexpr, WORD: tl.constexpr):
    """Return a pointer to TYPE whose address is a multiple of WORD, so that accesses can be that wide."""
    # The hint is on the operation that makes the pointer; on a call of another function it would be lost.
    return tl.multiple_of(tl.cast(address, tl.int64).to(tl.pointer_type(TYPE)), WORD)


@triton.jit
def copy_tail(source, target, n, WORD: tl.constexpr):
    """Copy the last n mod WORD of n bytes."""
    done = n // WORD * WORD
    if done < n:
        byte = tl.arange(0, 16)
        mask = done + byte < n
        tl.store(at(target + done, tl.int8) + byte, tl.load(at(source + done, tl.int8) + byte, mask=mask), mask=mask)


@triton.jit
def copy_three(
    source_a,
    target_a,
    n_a,
    source_b,
    target_b,
    n_b,
    source_c,
    target_c,
    n_c,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
):
    """Copy three times n bytes between addresses that are multiples of WORD; the loads of all are issued together."""
    TYPE: tl.constexpr = tl.core.get_int_dtype(min(WORD, 8) * 8, signed=True)
    PER_WORD: tl.constexpr = WORD // min(WORD, 8)
    lane = tl.arange(0, BLOCK)
    count_a, count_b, count_c = n_a // WORD * PER_WORD, n_b // WORD * PER_WORD, n_c // WORD * PER_WORD
    for start in range(0, tl.maximum(tl.maximum(count_a, count_b), count_c), BLOCK):
        mask_a, mask_b, mask_c = start + lane < count_a, start + lane < count_b, start + lane < count_c
        a = tl.load(aligned(source_a, TYPE, WORD) + start + lane, mask=mask_a)
        b = tl.load(aligned(source_b, TYPE, WORD) + start + lane, mask=mask_b)
        c = tl.load(aligned(source_c, TYPE, WORD) + start + lane, mask=mask_c)
        tl.store(aligned(target_a, TYPE, WORD) + start + lane, a, mask=mask_a)
        tl.store(aligned(target_b, TYPE, WORD) + start + lane, b, mask=mask_b)
        tl.store(aligned(target_c, TYPE, WORD) + start + lane, c, mask=mask_c)
    copy_tail(source_a, target_a, n_a, WORD)
    copy_tail(source_b, target_b, n_b, WORD)
    copy_tail(source_c, target_c, n_c, WORD)


@triton.jit
def copy(source, target, n, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Copy n bytes between two addresses that are multiples of WORD."""
    TYPE: tl.constexpr = tl.core.get_int_dtype(min(WORD, 8) * 8, signed=True)
    lane = tl.arange(0, BLOCK)
    count = n // WORD * (WORD // min(WORD, 8))
    for start in range(0, count, BLOCK):
        mask = start + lane < count
        value = tl.load(aligned(source, TYPE, WORD) + start + lane, mask=mask)
        tl.store(aligned(target, TYPE, WORD) + start + lane, value, mask=mask)
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
    TYPE: tl.constexpr = tl.core.get_int_dtype(min(WORD, 8) * 8, signed=True)
    lane = tl.arange(0, BLOCK)
    count = n // WORD * (WORD // min(WORD, 8))
    for start in range(0, count, BLOCK):
        mask = start + lane < count
        value = tl.load(aligned(source, TYPE, WORD) + start + lane, mask=mask)
        for k in tl.static_range(1, world):
            place = pick(places, (rank + k) % world, world) + offset
            tl.store(aligned(place, TYPE, WORD) + start + lane, value, mask=mask)
        tl.store(aligned(own, TYPE, WORD) + start + lane, value, mask=mask & has_own)
    done = n // WORD * WORD
    if done < n:
        byte = tl.arange(0, 16)
        mask = done + byte < n
        value = tl.load(at(source + done, tl.int8) + byte, mask=mask)
        for k in tl.static_range(1, world):
            place = pick(places, (rank + k) % world, world) + offset
            tl.store(at(place + done, tl.int8) + byte, value, mask=mask)
        tl.store(at(own + done, tl.int8) + byte, value, mask=mask & has_own)
