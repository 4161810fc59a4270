"""Messages straight into outputs that lie in the symmetric heap.

Each receiver first says that its output may be written: what was launched there before is done with it. Each sender
says at the end that it has written.
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
def push(
    bases,  # as for exchange, but:
    sends,
    send_bytes,
    send_shares,
    places,  # addresses [world] of where this rank's messages go in the peers' outputs
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
    TO_ALL: tl.constexpr,
    POLLS: tl.constexpr,
    PLATFORM: tl.constexpr,
):
    """Write messages into the peers' outputs."""
    cta = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    others = (lane < world) & (lane != rank)
    counters = at(counters, tl.int32) + cta * COUNTERS * world
    words = at(words, tl.int32)
    alive = tl.load(counters + DEAD * world) == 0

    out_bytes, in_bytes = pick(send_bytes, lane, world), pick(receive_bytes, lane, world)
    _, n_out = part_of(out_bytes, pick(send_shares, lane, world), cta)
    _, n_in = part_of(in_bytes, pick(receive_shares, lane, world), cta)
    writing, written = others & (n_out > 0), others & (n_in > 0)
    entered = tl.load(counters + ENTERED * world + lane, mask=written, other=0) + 1
    got = tl.load(counters + GOT * world + lane, mask=written, other=0) + 1
    admitted = tl.load(counters + ADMITTED * world + lane, mask=writing, other=0) + 1
    wrote = tl.load(counters + WROTE * world + lane, mask=writing, other=0) + 1

    raise_all(flags_there(bases, flags, cta, ENTER, lane, rank, world), entered, written & alive, PLATFORM)
    if not TO_ALL:
        first, n = part_of(own_bytes, own_share, cta)
        copy(own_source + first, own_target + first, n, BLOCK, WORD)
    enter = flags_here(bases, flags, cta, ENTER, lane, rank, world)
    alive = await_all(
        *(enter, admitted, writing, lane, cta, counters, words, 0, limit_ns, alive, world, POLLS, PLATFORM)
    )
    if alive:
        if TO_ALL:
            peer = (rank + 1) % world
            nbytes = pick(send_bytes, peer, world)
            first, n = part_of(nbytes, pick(send_shares, peer, world), cta)
            source = pick(sends, peer, world) + first
            copy_to_all(source, places, first, own_target + first, own_bytes > 0, n, rank, world, BLOCK, WORD)
        else:
            for k in range(1, world):
                peer = (rank + k) % world
                nbytes = pick(send_bytes, peer, world)
                first, n = part_of(nbytes, pick(send_shares, peer, world), cta)
                copy(pick(sends, peer, world) + first, pick(places, peer, world) + first, n, BLOCK, WORD)
        raise_all(flags_there(bases, flags, cta, DONE, lane, rank, world), wrote, writing, PLATFORM)
    finished = flags_here(bases, flags, cta, DONE, lane, rank, world)
    await_all(*(finished, got, written, lane, cta, counters, words, 1, limit_ns, alive, world, POLLS, PLATFORM))

    tl.store(counters + ENTERED * world + lane, entered, mask=written)
    tl.store(counters + GOT * world + lane, got, mask=written)
    tl.store(counters + ADMITTED * world + lane, admitted, mask=writing)
    tl.store(counters + WROTE * world + lane, wrote, mask=writing)
    tell(done, number, counters, cta, world, PLATFORM)
