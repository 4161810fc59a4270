"""Messages straight into outputs, or out of inputs, that lie in the symmetric heap.

Each owner of such memory first says that it may be used: what was launched there before is done with it. Each user says
at the end that it has written, or read.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from .flags import (
    ADMITTED,
    COUNTERS,
    DEAD,
    DONE,
    ENTER,
    ENTERED,
    GOT,
    WROTE,
    at,
    await_all,
    flags_here,
    flags_there,
    pick,
    raise_all,
    tell,
)
from .move import copy, copy_to_all, part_of


@triton.jit
def zero_copy(
    bases,  # as for exchange, but:
    here,  # addresses [world] of what this rank sends to each peer, or of where what it reads goes
    nbytes_used,  # bytes [world] that this rank writes or reads
    shares_used,
    places,  # addresses [world] of the same in the peers' outputs, or in their inputs
    nbytes_lent,  # bytes [world] that peers write or read here
    shares_lent,
    own_source,
    own_target,
    own_bytes,
    own_share,
    flags,
    counters,
    words,
    rank,
    limit_ns,
    done,
    number,
    world: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
    TO_ALL: tl.constexpr,  # the same is written to every peer, and is the own part if there is one
    PULLS: tl.constexpr,  # reads out of inputs
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Write messages into the peers' outputs, or read them out of their inputs."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    others = (lane < world) & (lane != rank)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0

    _, n_used = part_of(pick(nbytes_used, lane, world), pick(shares_used, lane, world), cta)
    _, n_lent = part_of(pick(nbytes_lent, lane, world), pick(shares_lent, lane, world), cta)
    using, lending = others & (n_used > 0), others & (n_lent > 0)
    entered = tl.load(counters + ENTERED * world + lane, mask=lending, other=0) + 1
    got = tl.load(counters + GOT * world + lane, mask=lending, other=0) + 1
    admitted = tl.load(counters + ADMITTED * world + lane, mask=using, other=0) + 1
    used = tl.load(counters + WROTE * world + lane, mask=using, other=0) + 1

    raise_all(flags_there(bases, flags, cta, ENTER, lane, rank, world), entered, lending & alive, PLATFORM)
    if not TO_ALL:
        first, n = part_of(own_bytes, own_share, cta)
        copy(own_source + first, own_target + first, n, BLOCK, WORD)
    enter = flags_here(bases, flags, cta, ENTER, lane, rank, world)
    alive = await_all(*(enter, admitted, using, lane, cta, counters, words, 0, limit_ns, alive, world, POLLS, PLATFORM))
    if alive:
        if TO_ALL:
            peer = (rank + 1) % world
            first, n = part_of(pick(nbytes_used, peer, world), pick(shares_used, peer, world), cta)
            source = pick(here, peer, world) + first
            copy_to_all(source, places, first, own_target + first, own_bytes > 0, n, rank, world, BLOCK, WORD)
        else:
            for k in range(1, world):
                peer = (rank + k) % world
                first, n = part_of(pick(nbytes_used, peer, world), pick(shares_used, peer, world), cta)
                at_here, at_peer = pick(here, peer, world) + first, pick(places, peer, world) + first
                if PULLS:
                    copy(at_peer, at_here, n, BLOCK, WORD)
                else:
                    copy(at_here, at_peer, n, BLOCK, WORD)
        raise_all(flags_there(bases, flags, cta, DONE, lane, rank, world), used, using, PLATFORM)
    finished = flags_here(bases, flags, cta, DONE, lane, rank, world)
    await_all(*(finished, got, lending, lane, cta, counters, words, 1, limit_ns, alive, world, POLLS, PLATFORM))

    tl.store(counters + ENTERED * world + lane, entered, mask=lending)
    tl.store(counters + GOT * world + lane, got, mask=lending)
    tl.store(counters + ADMITTED * world + lane, admitted, mask=using)
    tl.store(counters + WROTE * world + lane, used, mask=using)
    tell(done, number, counters, cta, world, PLATFORM)
