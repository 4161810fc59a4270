"""Small messages, in words that carry their own flag.

A word is 8 bytes, written and read at once: 4 bytes of the message, and the number of the launch. The receiver polls
the words themselves, so the sender needs no fence and no flag of its own, and what a message takes is one way across
the link. It is twice the bytes: for small messages.

There are two slots, for even and odd launches: a rank that has had the words of launch e from its peer knows that the
peer has read those of e - 1, and may write e + 1. So words go both ways, from each CTA at least one, also where a
message goes one way only.

* Between all ranks: every rank sends as much to every other, and all count launches together.
* ``IN_PAIRS``: any pattern of messages; the two ranks of a pair know how much goes each way, and count their launches.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .flags import COUNTERS, DEAD, HIP, PAIRS, WAITING, WORDS, at, greatest, look, pick, tell
from .move import aligned
from .reduce import combine, finish


@triton.jit
def words_in(n, WORD: tl.constexpr):
    """Return how many 32-bit words hold n bytes, a multiple of WORD; so that it shows that accesses can be wide."""
    return n // WORD * (WORD // 4) if WORD >= 4 else (n + 3) // 4


@triton.jit
def load_words(source, n, lane, WORD: tl.constexpr):
    """Return n bytes at an address as 32-bit words [lanes], the last filled up with zeros."""
    if WORD >= 4:
        return tl.load(aligned(source, tl.int32, WORD) + lane, mask=lane < n // WORD * (WORD // 4), other=0)
    else:
        word = lane * 0
        for b in tl.static_range(4):
            byte = tl.load(at(source, tl.uint8) + lane * 4 + b, mask=lane * 4 + b < n, other=0)
            word = word | (byte.to(tl.int32) << (8 * b))
        return word


@triton.jit
def store_words(target, word, n, lane, WORD: tl.constexpr):
    """Store the first n bytes of 32-bit words [lanes]."""
    if WORD >= 4:
        tl.store(aligned(target, tl.int32, WORD) + lane, word, mask=lane < n // WORD * (WORD // 4))
    else:
        for b in tl.static_range(4):
            tl.store(at(target, tl.uint8) + lane * 4 + b, (word >> (8 * b)).to(tl.uint8), mask=lane * 4 + b < n)


@triton.jit
def send_words(word, place, epoch, lane, used):
    """Write words [lanes] with their flag."""
    packed = (epoch.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    tl.store(aligned(place, tl.int64, 16) + lane, packed, mask=used, cache_modifier=".wt")


@triton.jit
def await_words(
    place,
    epoch,
    lane,
    used,
    peer,
    cta,
    counters,
    words,
    limit_ns,
    alive,
    world: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Return a peer's words [lanes] once all have come, and whether this CTA is alive or gave up waiting."""
    used = used & alive
    pointer = aligned(place, tl.int64, 16) + lane
    CACHE: tl.constexpr = ".cv" if PLATFORM == HIP else ""  # there, volatile alone may read from a cache
    packed = tl.load(pointer, mask=used, other=0, volatile=True, cache_modifier=CACHE)
    late = greatest((used & ((packed >> 32).to(tl.int32) != epoch)).to(tl.int32))
    polls = 0
    began = tl.full([], 0, tl.int64)
    while alive & (late > 0):
        polls += 1
        if polls % POLLS == 0:
            alive, began = look(peer + 1, cta, counters, words, epoch, began, limit_ns, world, PLATFORM)
        packed = tl.load(pointer, mask=used, other=0, volatile=True, cache_modifier=CACHE)
        late = greatest((used & ((packed >> 32).to(tl.int32) != epoch)).to(tl.int32))
    if polls >= POLLS:
        tl.store(words + WAITING + cta, 0)
    return packed.to(tl.int32), alive & (late == 0)


@triton.jit
def share_of(nbytes, first, is_active, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Return how many bytes of a message, from `first` on, are a CTA's, and how many 32-bit words it sends for them: a
    few for none, and as many whatever the WORD of either rank.
    """
    n = tl.minimum(tl.maximum(nbytes - first, 0), BLOCK * 4)
    return n, words_in(tl.where(is_active, tl.maximum(n, 16), 0), WORD)


@triton.jit
def exchange_words(
    bases,  # as for exchange, but:
    sends,
    send_bytes,  # IN_PAIRS; else [world], and all of them and the own part, unless that is 0, are as long
    receives,
    receive_bytes,
    own_source,
    own_target,
    own_bytes,
    landing,  # offset in a segment of the slots
    slot_bytes,  # of a slot: as many words of 8 bytes as there are lanes
    counters,
    words,
    rank,
    ctas,
    limit_ns,
    done,
    number,
    world: tl.constexpr,
    BLOCK: tl.constexpr,  # lanes; a CTA's share of a message is a word for each
    WORD: tl.constexpr,  # all addresses and sizes are multiples of it
    TO_ALL: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Move small messages."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0
    COUNTER: tl.constexpr = PAIRS if IN_PAIRS else WORDS
    epoch = tl.load(counters + COUNTER * world) + 1  # of all ranks, or of rank 0

    first = cta * BLOCK * 4
    for k in tl.static_range(1, world):
        peer = (rank + k) % world
        nbytes = pick(send_bytes, peer, world)
        is_active = tl.maximum(nbytes, pick(receive_bytes, peer, world)) > first
        if IN_PAIRS:
            epoch = tl.load(counters + COUNTER * world + peer) + 1
        n, count = share_of(nbytes, first, is_active, BLOCK, WORD)
        if k == 1 or not TO_ALL:
            word = load_words(pick(sends, peer, world) + first, n, lane, WORD)
        place = pick(bases, peer, world) + landing + ((rank * ctas + cta) * 2 + (epoch & 1)) * slot_bytes
        send_words(word, place, epoch, lane, (lane < count) & alive)
    if own_bytes > first:
        n = tl.minimum(own_bytes - first, BLOCK * 4)
        store_words(own_target + first, load_words(own_source + first, n, lane, WORD), n, lane, WORD)
    for k in tl.static_range(1, world):
        peer = (rank + k) % world
        nbytes = pick(receive_bytes, peer, world)
        is_active = tl.maximum(nbytes, pick(send_bytes, peer, world)) > first
        if IN_PAIRS:
            epoch = tl.load(counters + COUNTER * world + peer) + 1
        n, count = share_of(nbytes, first, is_active, BLOCK, WORD)
        place = pick(bases, rank, world) + landing + ((peer * ctas + cta) * 2 + (epoch & 1)) * slot_bytes
        word, alive = await_words(
            *(place, epoch, lane, lane < count, peer, cta, counters, words, limit_ns, alive, world, POLLS, PLATFORM)
        )
        store_words(pick(receives, peer, world) + first, word, tl.where(alive, n, 0), lane, WORD)
        if IN_PAIRS:
            tl.store(counters + COUNTER * world + peer, epoch, mask=is_active)
    if not IN_PAIRS:
        tl.store(counters + COUNTER * world, epoch)
    tell(done, number, counters, cta, world, PLATFORM)


@triton.jit
def elements_of(word, BLOCK: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the elements in 32-bit words [BLOCK], in their order."""
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    if SIZE == 4:
        return word.to(ELEMENT, bitcast=True)
    elif SIZE == 2:
        halves = tl.join(word.to(tl.int16), (word >> 16).to(tl.int16))
        return tl.reshape(halves, [BLOCK * 2]).to(ELEMENT, bitcast=True)
    elif SIZE == 1:
        even = tl.join(word.to(tl.int8), (word >> 16).to(tl.int8))
        odd = tl.join((word >> 8).to(tl.int8), (word >> 24).to(tl.int8))
        return tl.reshape(tl.join(even, odd), [BLOCK * 4]).to(ELEMENT, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(word, [BLOCK // 2, 2]))
        return ((high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)).to(ELEMENT, bitcast=True)


@triton.jit
def reduce_words(
    bases,  # as for exchange_words and reduce
    sends,
    nbytes,  # of every message and of the own part
    own_source,
    own_target,
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
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,  # not less than the size of an element
    TO_ALL: tl.constexpr,
    ELEMENT: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    OP: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Combine small operands of all ranks into one output."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0
    epoch = tl.load(counters + WORDS * world) + 1

    first = cta * BLOCK * 4
    n = tl.minimum(nbytes - first, BLOCK * 4)
    used = lane < words_in(n, WORD)
    own = load_words(own_source + first, n, lane, WORD)
    for k in tl.static_range(1, world):
        peer = (rank + k) % world
        word = own
        if not TO_ALL:
            word = load_words(pick(sends, peer, world) + first, n, lane, WORD)
        place = pick(bases, peer, world) + landing + ((rank * ctas + cta) * 2 + (epoch & 1)) * slot_bytes
        send_words(word, place, epoch, lane, used & alive)

    for peer in tl.static_range(world):
        place = pick(bases, rank, world) + landing + ((peer * ctas + cta) * 2 + (epoch & 1)) * slot_bytes
        theirs = used & (rank != peer)
        word, alive = await_words(
            *(place, epoch, lane, theirs, peer, cta, counters, words, limit_ns, alive, world, POLLS, PLATFORM)
        )
        value = elements_of(tl.where(rank == peer, own, word), BLOCK, ELEMENT).to(ACCUMULATOR)
        if peer == 0:
            result = value
        else:
            result = combine(result, value, OP)
    SIZE: tl.constexpr = ELEMENT.primitive_bitwidth // 8
    index = tl.arange(0, BLOCK * 4 // SIZE)
    count = tl.where(alive, n, 0) // WORD * (WORD // SIZE)
    result = finish(result, world, ELEMENT, ACCUMULATOR, OP)
    tl.store(aligned(own_target + first, ELEMENT, WORD) + index, result, mask=index < count)
    tl.store(counters + WORDS * world, epoch)
    tell(done, number, counters, cta, world, PLATFORM)
