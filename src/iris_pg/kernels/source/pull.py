"""Messages straight out of inputs that lie in the symmetric heap.

Each sender first says that its input may be read: what was launched there before has written it. Each receiver says at
the end that it has read.
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
from .move import copy, part_of


@triton.jit
def pull(
    bases,  # as for push, but:
    send_bytes,
    send_shares,
    places,  # addresses [world] of what is for this rank in the peers' inputs
    receives,
    receive_bytes,
    receive_shares,
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
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Read messages out of the peers' inputs."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    others = (lane < world) & (lane != rank)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0

    out_bytes, in_bytes = pick(send_bytes, lane, world), pick(receive_bytes, lane, world)
    _, n_out = part_of(out_bytes, pick(send_shares, lane, world), cta)
    _, n_in = part_of(in_bytes, pick(receive_shares, lane, world), cta)
    lending, reading = others & (n_out > 0), others & (n_in > 0)
    entered = tl.load(counters + ENTERED * world + lane, mask=lending, other=0) + 1
    got = tl.load(counters + GOT * world + lane, mask=lending, other=0) + 1
    admitted = tl.load(counters + ADMITTED * world + lane, mask=reading, other=0) + 1
    read = tl.load(counters + WROTE * world + lane, mask=reading, other=0) + 1

    raise_all(flags_there(bases, flags, cta, ENTER, lane, rank, world), entered, lending & alive, PLATFORM)
    first, n = part_of(own_bytes, own_share, cta)
    copy(own_source + first, own_target + first, n, BLOCK, WORD)
    enter = flags_here(bases, flags, cta, ENTER, lane, rank, world)
    alive = await_all(
        *(enter, admitted, reading, lane, cta, counters, words, 0, limit_ns, alive, world, POLLS, PLATFORM)
    )
    if alive:
        for k in range(1, world):
            peer = (rank + k) % world
            nbytes = pick(receive_bytes, peer, world)
            first, n = part_of(nbytes, pick(receive_shares, peer, world), cta)
            copy(pick(places, peer, world) + first, pick(receives, peer, world) + first, n, BLOCK, WORD)
        raise_all(flags_there(bases, flags, cta, DONE, lane, rank, world), read, reading, PLATFORM)
    finished = flags_here(bases, flags, cta, DONE, lane, rank, world)
    await_all(*(finished, got, lending, lane, cta, counters, words, 1, limit_ns, alive, world, POLLS, PLATFORM))

    tl.store(counters + ENTERED * world + lane, entered, mask=lending)
    tl.store(counters + GOT * world + lane, got, mask=lending)
    tl.store(counters + ADMITTED * world + lane, admitted, mask=reading)
    tl.store(counters + WROTE * world + lane, read, mask=reading)
    tell(done, number, counters, cta, world, PLATFORM)
