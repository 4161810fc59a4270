"""Flags between CTAs of different ranks: raise them, wait for them, give up."""

# mypy: ignore-errors

import time

import triton
import triton.language as tl

# tl.max and tl.sum themselves are compiled, and cannot be called from the interpreter; it knows these by name.
from triton.language.standard import _elementwise_max, _sum_combine

# Numbers of this rank alone, int32 [ctas, COUNTERS, world]. The last four have one value for all peers, and the very
# last one for all CTAs: how many of a launch have ended.
SENT = tl.constexpr(0)
TAKEN = tl.constexpr(1)
ENTERED = tl.constexpr(2)
ADMITTED = tl.constexpr(3)
WROTE = tl.constexpr(4)
GOT = tl.constexpr(5)
PAIRS = tl.constexpr(6)
ROUNDS = tl.constexpr(7)
WORDS = tl.constexpr(8)
DEAD = tl.constexpr(9)
ENDED = tl.constexpr(10)
COUNTERS = tl.constexpr(11)

# Flags in the heap that peers write, uint32 [ctas, FLAGS, world (the writer)], a cache line each.
ARRIVED = tl.constexpr(0)
DRAINED = tl.constexpr(1)
ENTER = tl.constexpr(2)
DONE = tl.constexpr(3)
ROUND = tl.constexpr(4)
FLAGS = tl.constexpr(5)
LINE = tl.constexpr(64)  # bytes

# Words shared with the host, int32.
ABORT = tl.constexpr(0)  # the host ends all waits
ERROR = tl.constexpr(1)  # 1 + the peer for which a CTA has waited in vain
WAITING = tl.constexpr(2)  # [ctas]: 1 + the peer for which a CTA has waited for some time, and the round << 16; or 0

# Where the time comes from.
INTERPRETED = tl.constexpr(0)  # the host watches the deadline
CUDA = tl.constexpr(1)
HIP = tl.constexpr(2)


@triton.jit
def pick(values, i, world: tl.constexpr):
    """Return values[i] of a tuple [world]; with a tensor of numbers i, a tensor. Out of range it is values[0]."""
    result = tl.cast(values[0], tl.int64) + i * 0
    for p in tl.static_range(1, world):
        result = tl.where(i == p, tl.cast(values[p], tl.int64), result)
    return result


@triton.jit
def element(vector, lane, i):
    """Return vector[i]."""
    return tl.reduce(tl.where(lane == i, vector, 0), 0, _sum_combine)


@triton.jit
def greatest(vector):
    """Return the greatest element."""
    return tl.reduce(vector, 0, _elementwise_max)


@triton.jit
def at(address, TYPE: tl.constexpr):
    """Return a pointer to TYPE; an address that is small may come as a 32-bit number."""
    return tl.cast(address, tl.int64).to(tl.pointer_type(TYPE))


@triton.jit
def flags_here(bases, flags, cta, which: tl.constexpr, lane, rank, world: tl.constexpr):
    """Return pointers [lanes] to the flags that the peers raise for this CTA."""
    return at(pick(bases, rank, world) + flags + ((cta * FLAGS + which) * world + lane) * LINE, tl.int32)


@triton.jit
def flags_there(bases, flags, cta, which: tl.constexpr, lane, rank, world: tl.constexpr):
    """Return pointers [lanes] to this CTA's flag at each peer."""
    return at(pick(bases, lane, world) + flags + ((cta * FLAGS + which) * world + rank) * LINE, tl.int32)


@triton.jit
def gather_stores(PLATFORM: tl.constexpr):
    """Come behind everything that this CTA has stored: a release after this is one of all of it."""
    if PLATFORM == HIP:  # a barrier there does not wait for stores, and a release for those of its own wave only
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def raise_all(there, values, mask, PLATFORM: tl.constexpr):
    """Write flags at peers, after everything that this CTA has stored."""
    gather_stores(PLATFORM)
    tl.atomic_xchg(there, values, mask=mask, sem="release", scope="sys")


@triton.jit
def await_all(
    here,
    targets,
    mask,
    lane,
    cta,
    counters,
    words,
    mark,
    limit_ns,
    alive,
    world: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Return once every flag has reached its target: whether this CTA is alive (1) or gave up waiting (0)."""
    mask = mask & alive
    seen = tl.atomic_add(here, targets * 0, mask=mask, sem="acquire", scope="sys")
    late = greatest(tl.where(mask & (targets - seen > 0), lane + 1, 0))
    polls = 0
    began = tl.full([], 0, tl.int64)
    while alive & (late > 0):
        polls += 1
        if polls % POLLS == 0:
            alive, began = look(late, cta, counters, words, mark, began, limit_ns, world, PLATFORM)
        seen = tl.atomic_add(here, targets * 0, mask=mask, sem="acquire", scope="sys")
        late = greatest(tl.where(mask & (targets - seen > 0), lane + 1, 0))
    if polls >= POLLS:
        tl.store(words + WAITING + cta, 0)
    tl.debug_barrier()
    return alive & (late == 0)


@triton.jit
def tell(done, number, counters, cta, world: tl.constexpr, PLATFORM: tl.constexpr):
    """Write ``number`` into the host's word at ``done``, unless that is 0, once every CTA of a launch has come here."""
    if done != 0:
        gather_stores(PLATFORM)
        ended = counters - cta * COUNTERS * world + ENDED * world
        SCOPE: tl.constexpr = "sys" if PLATFORM == HIP else "gpu"
        if tl.atomic_add(ended, 1, sem="acq_rel", scope=SCOPE) == tl.num_programs(0) - 1:
            tl.store(ended, 0)
            tl.store(at(done, tl.int32), number.to(tl.int32))


def pause():
    """Leave the core to others, in the interpreter: the peer waited for may be waiting for this very core."""
    time.sleep(2e-3)


pause.__triton_builtin__ = True  # the compiler, which never comes to the call, lets it stand


@triton.jit
def look(late, cta, counters, words, mark, began, limit_ns, world: tl.constexpr, PLATFORM: tl.constexpr):
    """Tell the host for whom this CTA waits; return whether to go on, and when the wait began."""
    tl.store(words + WAITING + cta, (mark & 0x7FFF) * 65536 + late)
    alive = tl.load(words + ABORT, volatile=True) == 0
    if PLATFORM == INTERPRETED:
        pause()
    else:
        if PLATFORM == CUDA:
            now = tl.extra.cuda.globaltimer().to(tl.int64)
        else:
            # In ticks of 100 MHz. Triton's memrealtime waits for a counter that is not that of this instruction.
            now = 10 * tl.inline_asm_elementwise(
                "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
            )
        began = tl.where(began == 0, now, began)
        is_over = now - began > limit_ns
        tl.store(words + ERROR, late, mask=is_over)
        alive = alive & (is_over == 0)
    # Every lane has read the clock and the word at a time of its own, and barriers need them to agree. A store of one
    # number is done by one lane, an atomic by one and its result given to all.
    tl.store(counters + DEAD * world, 1, mask=alive == 0)
    return tl.atomic_add(counters + DEAD * world, 0, sem="relaxed", scope="gpu") == 0, began
