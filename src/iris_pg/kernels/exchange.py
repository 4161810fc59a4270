"""Triton kernels of the cu engine: each rank sends bytes to any of its peers and receives bytes from any of them, in
one launch.

``exchange`` works on tensors anywhere: a program (CTA) writes a chunk of a message into the receiver's landing slot,
the receiver copies it out. ``push`` writes straight into outputs that lie in the symmetric heap. Both serve every
operation: an all-gather sends the same bytes to all peers, a broadcast receives from one, and so on.

What both rely on:

* Flags are counters in the symmetric heap, one per (CTA, pair of ranks) and direction, written by one rank and read by
  one. The numbers of messages so far live in memory of this rank (device-resident epochs), so nothing about a launch
  depends on how many went before, and a replayed launch is right too. They wrap: comparisons look at the sign of a
  32-bit difference.
* Order: all stores of a CTA, a CTA barrier, then a release at system scope on the flag. A waiter acquires at system
scope, then a CTA barrier.
* Every CTA moves its own share of every message and waits only for the same CTA of its peers; the grid is never larger
  than what can be resident at once, so a waiting CTA cannot keep another one from starting.
* ``abort`` ends every wait: a watchdog on the host writes it. ``waiting`` holds 1 + the peer that a CTA waits for.

:mod:`iris_pg.kernels.launch` loads this file once to be compiled for a GPU and once to be interpreted on a CPU; import
it from nowhere else.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

# A row of the table for each peer, in 64-bit words.
SEND = tl.constexpr(0)  # address of what this rank sends to the peer
SEND_BYTES = tl.constexpr(1)
RECEIVE = tl.constexpr(2)  # address of where the peer's bytes go here
RECEIVE_BYTES = tl.constexpr(3)
PEER_PLACE = tl.constexpr(
    4
)  # exchange: this rank's landing slots at the peer; push: this rank's part of the peer's output
MY_PLACE = tl.constexpr(5)  # exchange: the peer's landing slots here
PEER_BASE = tl.constexpr(6)  # the peer's segment
COLUMNS = tl.constexpr(8)

# For each CTA and peer: numbers of this rank alone, and flags in the heap that the peer writes.
SENT = tl.constexpr(0)
TAKEN = tl.constexpr(1)
ENTERED = tl.constexpr(2)
ADMITTED = tl.constexpr(3)
WROTE = tl.constexpr(4)
GOT = tl.constexpr(5)
COUNTERS = tl.constexpr(6)
ARRIVED = tl.constexpr(0)
DRAINED = tl.constexpr(1)
ENTER = tl.constexpr(2)
DONE = tl.constexpr(3)
FLAGS = tl.constexpr(4)
LINE = tl.constexpr(64)  # bytes between flags


@triton.jit
def _move(source, target, n, BLOCK: tl.constexpr, WORD: tl.constexpr):
    """Copy n bytes between two addresses that are multiples of WORD."""
    lane = tl.arange(0, BLOCK)
    if WORD == 8:
        for at in range(0, n // 8, BLOCK):
            mask = at + lane < n // 8
            value = tl.load(source.to(tl.pointer_type(tl.int64)) + at + lane, mask=mask)
            tl.store(target.to(tl.pointer_type(tl.int64)) + at + lane, value, mask=mask)
        done = (n // 8) * 8
        mask = done + lane < n
        value = tl.load((source + done).to(tl.pointer_type(tl.int8)) + lane, mask=mask)
        tl.store((target + done).to(tl.pointer_type(tl.int8)) + lane, value, mask=mask)
    else:
        for at in range(0, n, BLOCK):
            mask = at + lane < n
            value = tl.load(source.to(tl.pointer_type(tl.int8)) + at + lane, mask=mask)
            tl.store(target.to(tl.pointer_type(tl.int8)) + at + lane, value, mask=mask)


@triton.jit
def _await(flag, target, abort, waiting, peer):
    """Return once the counter at address `flag` has reached `target`, whether it did (1) or `abort` ended the wait
    (0).
    """
    pointer = flag.to(tl.pointer_type(tl.int32))
    waiting_ptr = waiting.to(tl.pointer_type(tl.int32))
    alive = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) == 0
    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    tl.store(waiting_ptr, peer + 1)
    while (target - seen > 0) & alive:
        alive = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) == 0
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    tl.store(waiting_ptr, 0)
    tl.debug_barrier()
    return target - seen <= 0


@triton.jit
def _raise(flag, value):
    """Write a counter at a peer, after everything that this CTA has stored."""
    tl.debug_barrier()
    tl.atomic_xchg(flag.to(tl.pointer_type(tl.int32)), value, sem="release", scope="sys")


@triton.jit
def _share(nbytes, cta, ctas):
    """Return the bytes of a message that each CTA moves, a multiple of 16."""
    return ((nbytes + ctas * 16 - 1) // (ctas * 16)) * 16


@triton.jit
def exchange(
    table,  # address of int64 [world, COLUMNS]
    own_source,
    own_target,
    own_bytes,  # this rank's own part
    my_base,  # address of this rank's segment
    flags,  # offset in a segment of uint32 [ctas, FLAGS, world], a cache line each
    counters,  # address of int32 [ctas, COUNTERS, world]
    abort,  # address of int32
    waiting,  # address of int32 [ctas]
    rank,
    world: tl.constexpr,
    slot_bytes: tl.constexpr,  # of one CTA's landing slot, a multiple of 16; two for each CTA and sender
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,  # bytes moved by a lane: 8 when every address is a multiple of 8, else 1
):
    """Move messages between tensors anywhere, through landing slots."""
    cta = tl.program_id(0).to(tl.int64)
    ctas = tl.num_programs(0).to(tl.int64)
    abort = tl.cast(abort, tl.int64)  # a small address arrives as a 32-bit number
    rows = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64))
    count = tl.cast(counters, tl.int64).to(tl.pointer_type(tl.int32)) + cta * COUNTERS * world
    cta_flags = flags + cta * FLAGS * world * LINE

    share = _share(own_bytes, cta, ctas)
    first = tl.minimum(cta * share, own_bytes)
    _move(own_source + first, own_target + first, tl.minimum(own_bytes - first, share), BLOCK, WORD)

    longest = own_bytes * 0
    for peer in range(0, world):
        if peer != rank:
            longest = tl.maximum(longest, tl.load(rows + peer * COLUMNS + SEND_BYTES))
            longest = tl.maximum(longest, tl.load(rows + peer * COLUMNS + RECEIVE_BYTES))
    rounds = (_share(longest, cta, ctas) + slot_bytes - 1) // slot_bytes

    alive = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) == 0
    for i in range(0, rounds):
        for k in range(1, world):
            peer = (rank + k) % world
            row = rows + peer * COLUMNS
            nbytes = tl.load(row + SEND_BYTES)
            share = _share(nbytes, cta, ctas)
            first = tl.minimum(cta * share + i * slot_bytes, nbytes)
            n = tl.minimum(tl.minimum((cta + 1) * share, nbytes) - first, slot_bytes)
            if alive & (n > 0):
                # Two slots: the chunk before the last one must have been copied out.
                sent = tl.load(count + SENT * world + peer)
                drained = my_base + cta_flags + (DRAINED * world + peer) * LINE
                alive = _await(drained, sent - 1, abort, waiting + cta * 4, peer)
                if alive:
                    place = tl.load(row + PEER_PLACE) + (cta * 2 + (sent & 1)) * slot_bytes
                    _move(tl.load(row + SEND) + first, place, n, BLOCK, WORD)
                    _raise(tl.load(row + PEER_BASE) + cta_flags + (ARRIVED * world + rank) * LINE, sent + 1)
                    tl.store(count + SENT * world + peer, sent + 1)
        for k in range(1, world):
            peer = (rank + k) % world
            row = rows + peer * COLUMNS
            nbytes = tl.load(row + RECEIVE_BYTES)
            share = _share(nbytes, cta, ctas)
            first = tl.minimum(cta * share + i * slot_bytes, nbytes)
            n = tl.minimum(tl.minimum((cta + 1) * share, nbytes) - first, slot_bytes)
            if alive & (n > 0):
                taken = tl.load(count + TAKEN * world + peer)
                arrived = my_base + cta_flags + (ARRIVED * world + peer) * LINE
                alive = _await(arrived, taken + 1, abort, waiting + cta * 4, peer)
                if alive:
                    place = tl.load(row + MY_PLACE) + (cta * 2 + (taken & 1)) * slot_bytes
                    _move(place, tl.load(row + RECEIVE) + first, n, BLOCK, WORD)
                    _raise(tl.load(row + PEER_BASE) + cta_flags + (DRAINED * world + rank) * LINE, taken + 1)
                    tl.store(count + TAKEN * world + peer, taken + 1)


@triton.jit
def push(
    table,
    own_source,
    own_target,
    own_bytes,
    my_base,
    flags,
    counters,
    abort,
    waiting,
    rank,
    world: tl.constexpr,
    slot_bytes: tl.constexpr,  # not used: there are no slots
    BLOCK: tl.constexpr,
    WORD: tl.constexpr,
):
    """Write messages straight into the peers' outputs; arguments as for ``exchange``."""
    cta = tl.program_id(0).to(tl.int64)
    ctas = tl.num_programs(0).to(tl.int64)
    abort = tl.cast(abort, tl.int64)  # a small address arrives as a 32-bit number
    rows = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64))
    count = tl.cast(counters, tl.int64).to(tl.pointer_type(tl.int32)) + cta * COUNTERS * world
    cta_flags = flags + cta * FLAGS * world * LINE

    # Let every rank that writes into this rank's output begin.
    for k in range(1, world):
        peer = (rank + k) % world
        row = rows + peer * COLUMNS
        if tl.load(row + RECEIVE_BYTES) > 0:
            entered = tl.load(count + ENTERED * world + peer) + 1
            _raise(tl.load(row + PEER_BASE) + cta_flags + (ENTER * world + rank) * LINE, entered)
            tl.store(count + ENTERED * world + peer, entered)

    share = _share(own_bytes, cta, ctas)
    first = tl.minimum(cta * share, own_bytes)
    _move(own_source + first, own_target + first, tl.minimum(own_bytes - first, share), BLOCK, WORD)

    alive = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) == 0
    for k in range(1, world):
        peer = (rank + k) % world
        row = rows + peer * COLUMNS
        nbytes = tl.load(row + SEND_BYTES)
        if alive & (nbytes > 0):
            admitted = tl.load(count + ADMITTED * world + peer) + 1
            enter = my_base + cta_flags + (ENTER * world + peer) * LINE
            alive = _await(enter, admitted, abort, waiting + cta * 4, peer)
            tl.store(count + ADMITTED * world + peer, admitted)
            if alive:
                share = _share(nbytes, cta, ctas)
                first = tl.minimum(cta * share, nbytes)
                n = tl.minimum(nbytes - first, share)
                _move(tl.load(row + SEND) + first, tl.load(row + PEER_PLACE) + first, n, BLOCK, WORD)
                wrote = tl.load(count + WROTE * world + peer) + 1
                _raise(tl.load(row + PEER_BASE) + cta_flags + (DONE * world + rank) * LINE, wrote)
                tl.store(count + WROTE * world + peer, wrote)
    for k in range(1, world):
        peer = (rank + k) % world
        if alive & (tl.load(rows + peer * COLUMNS + RECEIVE_BYTES) > 0):
            got = tl.load(count + GOT * world + peer) + 1
            done = my_base + cta_flags + (DONE * world + peer) * LINE
            alive = _await(done, got, abort, waiting + cta * 4, peer)
            tl.store(count + GOT * world + peer, got)


# What reduce() does with two elements, and with the last result.
SUM = tl.constexpr(0)
AVG = tl.constexpr(1)
PRODUCT = tl.constexpr(2)
MIN = tl.constexpr(3)
MAX = tl.constexpr(4)
BAND = tl.constexpr(5)
BOR = tl.constexpr(6)
BXOR = tl.constexpr(7)


@triton.jit
def _combine(a, b, OP: tl.constexpr):
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
def reduce(
    table,
    own_source,
    own_target,
    own_bytes,  # this rank's operand: as long as what it receives from each peer; 0 when it receives nothing
    my_base,
    flags,
    counters,
    abort,
    waiting,
    rank,
    world: tl.constexpr,
    slot_bytes: tl.constexpr,
    BLOCK: tl.constexpr,  # elements
    ELEMENT: tl.constexpr,  # dtype in memory
    ACCUMULATOR: tl.constexpr,  # dtype in which elements are combined, rounded once at the end
    OP: tl.constexpr,
):
    """Send messages as ``exchange`` does, and combine what comes from all ranks, in the order of ranks, into one
    output.
    """
    cta = tl.program_id(0).to(tl.int64)
    ctas = tl.num_programs(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    size = ELEMENT.primitive_bitwidth // 8
    abort = tl.cast(abort, tl.int64)  # a small address arrives as a 32-bit number
    rows = tl.cast(table, tl.int64).to(tl.pointer_type(tl.int64))
    count = tl.cast(counters, tl.int64).to(tl.pointer_type(tl.int32)) + cta * COUNTERS * world
    cta_flags = flags + cta * FLAGS * world * LINE

    longest = own_bytes
    for peer in range(0, world):
        if peer != rank:
            longest = tl.maximum(longest, tl.load(rows + peer * COLUMNS + SEND_BYTES))
    rounds = (_share(longest, cta, ctas) + slot_bytes - 1) // slot_bytes

    alive = tl.load(abort.to(tl.pointer_type(tl.int32)), volatile=True) == 0
    for i in range(0, rounds):
        for k in range(1, world):
            peer = (rank + k) % world
            row = rows + peer * COLUMNS
            nbytes = tl.load(row + SEND_BYTES)
            share = _share(nbytes, cta, ctas)
            first = tl.minimum(cta * share + i * slot_bytes, nbytes)
            n = tl.minimum(tl.minimum((cta + 1) * share, nbytes) - first, slot_bytes)
            if alive & (n > 0):
                sent = tl.load(count + SENT * world + peer)
                drained = my_base + cta_flags + (DRAINED * world + peer) * LINE
                alive = _await(drained, sent - 1, abort, waiting + cta * 4, peer)
                if alive:
                    place = tl.load(row + PEER_PLACE) + (cta * 2 + (sent & 1)) * slot_bytes
                    _move(tl.load(row + SEND) + first, place, n, BLOCK, 1)
                    _raise(tl.load(row + PEER_BASE) + cta_flags + (ARRIVED * world + rank) * LINE, sent + 1)
                    tl.store(count + SENT * world + peer, sent + 1)
        share = _share(own_bytes, cta, ctas)
        first = tl.minimum(cta * share + i * slot_bytes, own_bytes)
        n = tl.minimum(tl.minimum((cta + 1) * share, own_bytes) - first, slot_bytes)
        if n > 0:
            for k in range(1, world):
                peer = (rank + k) % world
                if alive:
                    taken = tl.load(count + TAKEN * world + peer)
                    arrived = my_base + cta_flags + (ARRIVED * world + peer) * LINE
                    alive = _await(arrived, taken + 1, abort, waiting + cta * 4, peer)
            if alive:
                for at in range(0, n // size, BLOCK):
                    mask = at + lane < n // size
                    result = tl.full([BLOCK], 0, ACCUMULATOR)
                    for peer in range(0, world):
                        source = own_source + first
                        if peer != rank:
                            taken = tl.load(count + TAKEN * world + peer)
                            source = tl.load(rows + peer * COLUMNS + MY_PLACE) + (cta * 2 + (taken & 1)) * slot_bytes
                        value = tl.load(source.to(tl.pointer_type(ELEMENT)) + at + lane, mask=mask).to(ACCUMULATOR)
                        if peer == 0:
                            result = value
                        else:
                            result = _combine(result, value, OP)
                    if OP == AVG:
                        if ACCUMULATOR.is_floating():
                            result = result / world
                        else:  # towards zero, whatever `//` does with negative numbers here
                            result = tl.where(result < 0, -(-result // world), result // world)
                    target = (own_target + first).to(tl.pointer_type(ELEMENT))
                    tl.store(target + at + lane, result.to(ELEMENT), mask=mask)
                for k in range(1, world):
                    peer = (rank + k) % world
                    taken = tl.load(count + TAKEN * world + peer)
                    _raise(
                        tl.load(rows + peer * COLUMNS + PEER_BASE) + cta_flags + (DRAINED * world + rank) * LINE,
                        taken + 1,
                    )
                    tl.store(count + TAKEN * world + peer, taken + 1)
