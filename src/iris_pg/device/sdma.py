"""Copy-engine packets that kernels write: into the queue to a rank, which a copy engine of the GPU, the software engine
or a proxy executes in order.

A queue is a row of ``ctx.get_copy_engine_ctx()``. Its protocol is that of copy_engine/ring.py, which producers on the
host follow too: reserve with one compare-and-swap, write, commit in the order of reservations. Packets are those of
copy_engine/layout.py, from the same table. All functions are for a whole CTA: every lane calls them with the same
scalars, one lane writes.

What the order rests on, in :func:`commit`:

1. Every wave waits for its stores, then a CTA barrier: data and packet are before what follows.
2. A release at system scope: it can be seen from outside of the GPU. Engines read behind the L2.
3. The write pointer, and, after another release, the doorbell: whoever sees the doorbell sees the packet.
4. The committed index, with release: the next producer rings after this one.

No wait is endless: past the queue's deadline a kernel writes why into the queue's error word, and marks the queue dead.
Then all functions return 0 and do nothing, and the host's next call raises.
"""

# mypy: ignore-errors

import triton.language as tl

from iris_pg.copy_engine import layout as _layout
from iris_pg.copy_engine.packets import ATOMIC_64_BIT as _64_BIT
from iris_pg.copy_engine.packets import ATOMIC_NO_RETURN as _NO_RETURN
from iris_pg.copy_engine.packets import AtomicOp as _AtomicOp
from iris_pg.copy_engine.packets import PollFunc as _PollFunc
from iris_pg.copy_engine.ring import Answers as _Answers
from iris_pg.copy_engine.ring import Context as _Context
from iris_pg.copy_engine.ring import Line as _Line
from iris_pg.copy_engine.ring import RingError as _RingError
from iris_pg.device.function import device_function
from iris_pg.device.target import clock_ns, fence_header, gather_stores, load_past_caches, most_bytes, pause, publish


def _signed(dword: int) -> tl.constexpr:
    """Return a dword as the int32 of the same bits."""
    return tl.constexpr(dword - (1 << 32) if dword >> 31 else dword)


def _shift(packet: str, field: str) -> int:
    return _layout.FIELD[packet, field].low


# Words of a row, and behind the committed index.
ROW = tl.constexpr(len(_Context._fields))
BUFFER = tl.constexpr(_Context._fields.index("queue_buffer"))
RPTR = tl.constexpr(_Context._fields.index("rptr"))
WPTR = tl.constexpr(_Context._fields.index("wptr"))
DOORBELL = tl.constexpr(_Context._fields.index("doorbell"))
CACHED = tl.constexpr(_Context._fields.index("cached_wptr"))
COMMITTED = tl.constexpr(_Context._fields.index("committed_wptr"))
RING_BYTES = tl.constexpr(int(_Line.RING_BYTES))
LIMIT_NS = tl.constexpr(int(_Line.LIMIT_NS))
ANSWERS = tl.constexpr(int(_Line.ANSWERS))
READ = tl.constexpr(int(_Line.READ))
LANDED = tl.constexpr(int(_Line.LANDED))
FENCES = tl.constexpr(int(_Line.FENCES))
ERROR_AT = tl.constexpr(4 * int(_Answers.ERROR))
FULL = tl.constexpr(int(_RingError.FULL))
STALLED = tl.constexpr(int(_RingError.STALLED))
NOT_LANDED = tl.constexpr(int(_RingError.NOT_LANDED))
NO_FLAG = tl.constexpr(int(_RingError.NO_FLAG))
DEAD = tl.constexpr(-(1 << 63))
POLLS = tl.constexpr(64)  # between two looks at the clock

# Packets: lengths, headers, and where fields lie.
COPY_BYTES = tl.constexpr(_layout.COPY_LINEAR_BYTES)
COPY_HEADER = _signed(_layout.header("COPY_LINEAR"))
COPY_NBYTES = tl.constexpr(_layout.COPY_LINEAR_NBYTES_OFFSET)
COPY_PARAMETER = tl.constexpr(_layout.COPY_LINEAR_NBYTES_OFFSET + 4)  # swap and cache bits, all zero
COPY_SRC = tl.constexpr(_layout.COPY_LINEAR_SRC_OFFSET)
COPY_DST = tl.constexpr(_layout.COPY_LINEAR_DST_OFFSET)
WINDOW_BYTES = tl.constexpr(_layout.SUB_WINDOW_BYTES)
WINDOW_HEADER = _signed(_layout.header("SUB_WINDOW"))
WINDOW_SRC = tl.constexpr(_layout.SUB_WINDOW_SRC_OFFSET)
WINDOW_SRC_PITCH = tl.constexpr(_layout.offset_of("SUB_WINDOW", "src_pitch_bytes"))
WINDOW_DST = tl.constexpr(_layout.SUB_WINDOW_DST_OFFSET)
WINDOW_DST_PITCH = tl.constexpr(_layout.offset_of("SUB_WINDOW", "dst_pitch_bytes"))
WINDOW_WIDTH = tl.constexpr(_layout.offset_of("SUB_WINDOW", "width_bytes"))
WINDOW_ROWS = tl.constexpr(_layout.offset_of("SUB_WINDOW", "n_rows"))
ATOMIC_BYTES = tl.constexpr(_layout.ATOMIC_BYTES)
ATOMIC_HEADER = tl.constexpr(_layout.header("ATOMIC"))
ATOMIC_SHIFT = tl.constexpr(_shift("ATOMIC", "operation"))
ATOMIC_ADDRESS = tl.constexpr(_layout.ATOMIC_ADDRESS_OFFSET)
ATOMIC_OPERAND = tl.constexpr(_layout.ATOMIC_OPERAND_OFFSET)
ATOMIC_COMPARE = tl.constexpr(_layout.offset_of("ATOMIC", "compare"))
ATOMIC_INTERVAL = tl.constexpr(_layout.offset_of("ATOMIC", "interval"))
POLL_BYTES = tl.constexpr(_layout.POLL_BYTES)
POLL_HEADER = _signed(_layout.header("POLL_REGMEM", mem_poll=1, func=int(_PollFunc.GREATER_EQUAL)))
POLL_ADDRESS = tl.constexpr(_layout.POLL_ADDRESS_OFFSET)
POLL_REFERENCE = tl.constexpr(_layout.POLL_REFERENCE_OFFSET)
POLL_MASK = tl.constexpr(_layout.offset_of("POLL_REGMEM", "mask"))
POLL_PACE = tl.constexpr(_layout.offset_of("POLL_REGMEM", "interval"))
POLL_FOREVER = _signed(10 | _layout.POLL_FOREVER << _shift("POLL_REGMEM", "retry_count"))
FENCE_BYTES = tl.constexpr(_layout.FENCE_BYTES)
FENCE_ADDRESS = tl.constexpr(_layout.FENCE_ADDRESS_OFFSET)
FENCE_VALUE = tl.constexpr(_layout.FENCE_VALUE_OFFSET)
NOP_SHIFT = tl.constexpr(_shift("NOP", "count"))

# Operations of atomic(), by name.
SWAP, CMPSWAP, ADD = (tl.constexpr(int(op)) for op in (_AtomicOp.SWAP, _AtomicOp.CMPSWAP, _AtomicOp.ADD))
NO_RETURN = tl.constexpr(_NO_RETURN)
NO_RETURN_64 = tl.constexpr(_NO_RETURN + _64_BIT)


# The ring -------------------------------------------------------------------------------------------------------------


@device_function
def word(copy_engine_ctx, to_rank, WHICH: tl.constexpr):
    """Return a pointer to what a word of the row of ``to_rank`` says."""
    return tl.load(copy_engine_ctx + to_rank * ROW + WHICH).to(tl.int64).to(tl.pointer_type(tl.int64))


@device_function
def watch(cached, line, began, WHY: tl.constexpr):
    """Look at the clock in a wait: mark the queue dead past the deadline; return when the wait began.

    Every lane has read a clock of its own. One lane writes, and what it wrote is read atomically, so all agree.
    """
    now = clock_ns()
    began = tl.where(began == 0, now, began)
    is_late = now - began > tl.load(line + LIMIT_NS)
    answers = tl.load(line + ANSWERS)
    tl.store((answers + ERROR_AT).to(tl.pointer_type(tl.int32)), WHY, mask=is_late)
    tl.atomic_or(cached, DEAD, mask=is_late, sem="relaxed", scope="gpu")
    return began


@device_function
def newest(pointer, copy, sem: tl.constexpr):
    """Return an index that an engine writes and that only grows, the same in all lanes.

    Args:
        copy: pointer to this GPU's copy of it.
    """
    tl.atomic_max(copy, load_past_caches(pointer), sem="relaxed", scope="gpu")
    return tl.atomic_add(copy, 0, sem=sem, scope="sys")


@device_function
def reserve(copy_engine_ctx, to_rank, NBYTES: tl.constexpr):
    """Reserve room for a packet; return the index where it and the padding before it begin, less than 0 when the queue
    is dead, and the index where it ends.
    """
    cached = word(copy_engine_ctx, to_rank, CACHED)
    rptr = word(copy_engine_ctx, to_rank, RPTR)
    line = word(copy_engine_ctx, to_rank, COMMITTED)
    size = tl.load(line + RING_BYTES)
    base = tl.atomic_add(cached, 0, sem="relaxed", scope="sys")
    read = tl.atomic_add(line + READ, 0, sem="relaxed", scope="sys")
    end = base
    began = base * 0
    polls = 0
    is_over = base < 0
    while is_over == 0:
        at = base & (size - 1)
        end = base + NBYTES + tl.where(at + NBYTES > size, size - at, 0)
        if end - read < size:
            seen = tl.atomic_cas(cached, base, end, sem="relaxed", scope="sys")
            is_over = (seen == base) | (seen < 0)
            base = seen
        else:
            pause()
            read = newest(rptr, line + READ, "acquire")
            polls += 1
            if polls % POLLS == 0:
                began = watch(cached, line, began, FULL)
            base = tl.atomic_add(cached, 0, sem="relaxed", scope="sys")
            is_over = base < 0
    return base, end


@device_function
def commit(copy_engine_ctx, to_rank, base, end):
    """Hand what was written up to ``end`` to the engine, after those that reserved before; return whether it was."""
    cached = word(copy_engine_ctx, to_rank, CACHED)
    line = word(copy_engine_ctx, to_rank, COMMITTED)
    gather_stores()
    turn = tl.atomic_add(line, 0, sem="acquire", scope="sys")
    began = base * 0
    polls = 0
    is_dead = base < 0
    while (turn != base) & (is_dead == 0):
        pause()
        polls += 1
        if polls % POLLS == 0:
            began = watch(cached, line, began, STALLED)
            is_dead = tl.atomic_add(cached, 0, sem="relaxed", scope="sys") < 0
        turn = tl.atomic_add(line, 0, sem="acquire", scope="sys")
    if turn == base:
        publish(word(copy_engine_ctx, to_rank, WPTR), end, line + FENCES)
        publish(word(copy_engine_ctx, to_rank, DOORBELL), end, line + FENCES)
        tl.atomic_xchg(line, end, sem="release", scope="sys")
    return (turn == base).to(tl.int32)


@device_function
def write(packet, OFFSET: tl.constexpr, value):
    """Write the low half of a number into a dword of a packet."""
    tl.store((packet + OFFSET).to(tl.pointer_type(tl.int32)), value.to(tl.int32))


@device_function
def write_header(packet, OFFSET: tl.constexpr, VALUE: tl.constexpr):
    """Write a constant into a dword of a packet."""
    tl.store((packet + OFFSET).to(tl.pointer_type(tl.int32)), VALUE)


@device_function
def write_wide(packet, OFFSET: tl.constexpr, value):
    """Write an address, or another number of 64 bits, into two dwords of a packet."""
    write(packet, OFFSET, value)
    write(packet, OFFSET + 4, value >> 32)


@device_function
def begin(copy_engine_ctx, to_rank, NBYTES: tl.constexpr):
    """Reserve room for a packet and pad up to it; return as :func:`reserve`, and the packet's address."""
    base, end = reserve(copy_engine_ctx, to_rank, NBYTES)
    buffer = tl.load(copy_engine_ctx + to_rank * ROW + BUFFER).to(tl.int64)
    size = tl.load(word(copy_engine_ctx, to_rank, COMMITTED) + RING_BYTES)
    first = end - NBYTES
    if (base >= 0) & (first > base):
        gap = buffer + (base & (size - 1))
        n_dwords = (first - base) // 4  # less than a packet's, so one NOP does
        write(gap, 0, (n_dwords - 1) << NOP_SHIFT)
        for i in range(1, n_dwords):
            write(gap + 4 * i, 0, base * 0)
    return base, end, buffer + (first & (size - 1))


# Packets --------------------------------------------------------------------------------------------------------------


@device_function
def copy_linear(copy_engine_ctx, to_rank, dst, src, nbytes):
    """Copy ``nbytes`` bytes between two addresses, in as many packets as that takes; none when it is 0.

    Args:
        dst, src: addresses as this GPU sees them, int64; any alignment.
        nbytes: int64.

    Returns:
        1, or 0 when the queue is dead.
    """
    dst, src, nbytes = tl.cast(dst, tl.int64), tl.cast(src, tl.int64), tl.cast(nbytes, tl.int64)
    done = nbytes * 0
    is_alive = (done + 1).to(tl.int32)
    while (done < nbytes) & (is_alive != 0):
        n = tl.minimum(nbytes - done, most_bytes())
        base, end, packet = begin(copy_engine_ctx, to_rank, COPY_BYTES)
        if base >= 0:
            write_header(packet, 0, COPY_HEADER)
            write(packet, COPY_NBYTES, n - 1)
            write_header(packet, COPY_PARAMETER, 0)
            write_wide(packet, COPY_SRC, src + done)
            write_wide(packet, COPY_DST, dst + done)
        is_alive = commit(copy_engine_ctx, to_rank, base, end)
        done += n
    return is_alive


@device_function
def copy_window(copy_engine_ctx, to_rank, dst, src, rows, width_bytes, dst_pitch_bytes, src_pitch_bytes):
    """Copy ``rows`` rows of ``width_bytes`` bytes, a pitch apart on each side; nothing when one of the two is 0.

    Args:
        dst, src: addresses of the first byte, int64; any alignment.
        rows, width_bytes, dst_pitch_bytes, src_pitch_bytes: int64, less than 2**32; pitches at least the width.

    Returns:
        1, or 0 when the queue is dead.
    """
    dst, src, rows = tl.cast(dst, tl.int64), tl.cast(src, tl.int64), tl.cast(rows, tl.int64)
    width_bytes = tl.cast(width_bytes, tl.int64)
    dst_pitch_bytes, src_pitch_bytes = tl.cast(dst_pitch_bytes, tl.int64), tl.cast(src_pitch_bytes, tl.int64)
    is_alive = (rows * 0 + 1).to(tl.int32)
    if (rows > 0) & (width_bytes > 0):
        base, end, packet = begin(copy_engine_ctx, to_rank, WINDOW_BYTES)
        if base >= 0:
            # Offsets into the two sides, the third dimension, and its pitches (0 stands for 1) are all zero.
            for offset in tl.static_range(0, WINDOW_BYTES, 4):
                write_header(packet, offset, 0)
            write_header(packet, 0, WINDOW_HEADER)
            write_wide(packet, WINDOW_SRC, src)
            write(packet, WINDOW_SRC_PITCH, src_pitch_bytes - 1)
            write_wide(packet, WINDOW_DST, dst)
            write(packet, WINDOW_DST_PITCH, dst_pitch_bytes - 1)
            write(packet, WINDOW_WIDTH, width_bytes - 1)
            write(packet, WINDOW_ROWS, rows - 1)
        is_alive = commit(copy_engine_ctx, to_rank, base, end)
    return is_alive


@device_function
def atomic(copy_engine_ctx, to_rank, address, OP: tl.constexpr, operand, compare, WIDE: tl.constexpr):
    """Let the engine do an atomic operation, after all that was put into the queue before.

    Args:
        address: int64, a multiple of the width.
        OP: SWAP, CMPSWAP or ADD of this module, or another number of copy_engine/packets.py's AtomicOp.
        operand, compare: int64; the low half where not ``WIDE``. ``compare`` is for CMPSWAP, else 0.
        WIDE: the word has 64 bits, else 32.

    Returns:
        1, or 0 when the queue is dead.
    """
    address, operand, compare = tl.cast(address, tl.int64), tl.cast(operand, tl.int64), tl.cast(compare, tl.int64)
    base, end, packet = begin(copy_engine_ctx, to_rank, ATOMIC_BYTES)
    if base >= 0:
        FORM: tl.constexpr = NO_RETURN_64 if WIDE else NO_RETURN
        # A shift by 32 - 7 leaves a negative int32 for every operation that returns nothing.
        write_header(packet, 0, (ATOMIC_HEADER | (OP + FORM) << ATOMIC_SHIFT) - (1 << 32))
        write_wide(packet, ATOMIC_ADDRESS, address)
        if WIDE:
            write_wide(packet, ATOMIC_OPERAND, operand)
            write_wide(packet, ATOMIC_COMPARE, compare)
        else:
            write(packet, ATOMIC_OPERAND, operand)
            write_header(packet, ATOMIC_OPERAND + 4, 0)
            write(packet, ATOMIC_COMPARE, compare)
            write_header(packet, ATOMIC_COMPARE + 4, 0)
        write_header(packet, ATOMIC_INTERVAL, 0)
    return commit(copy_engine_ctx, to_rank, base, end)


@device_function
def poll(copy_engine_ctx, to_rank, address, reference):
    """Let the engine wait until the 32-bit word at ``address`` is at least ``reference``, unsigned.

    Args:
        address: int64, a multiple of 4. reference: int64, 0..2**32-1.

    Returns:
        1, or 0 when the queue is dead.
    """
    address, reference = tl.cast(address, tl.int64), tl.cast(reference, tl.int64)
    base, end, packet = begin(copy_engine_ctx, to_rank, POLL_BYTES)
    if base >= 0:
        write_header(packet, 0, POLL_HEADER)
        write_wide(packet, POLL_ADDRESS, address)
        write(packet, POLL_REFERENCE, reference)
        write_header(packet, POLL_MASK, -1)
        write_header(packet, POLL_PACE, POLL_FOREVER)
    return commit(copy_engine_ctx, to_rank, base, end)


@device_function
def fence(copy_engine_ctx, to_rank, address, value):
    """Let the engine store a 32-bit ``value`` at ``address``, after all that was put into the queue before has landed.

    Args:
        address: int64, a multiple of 4. value: int64, the low half counts.

    Returns:
        1, or 0 when the queue is dead.
    """
    address, value = tl.cast(address, tl.int64), tl.cast(value, tl.int64)
    base, end, packet = begin(copy_engine_ctx, to_rank, FENCE_BYTES)
    if base >= 0:
        HEADER: tl.constexpr = fence_header()
        write_header(packet, 0, HEADER)
        write_wide(packet, FENCE_ADDRESS, address)
        write(packet, FENCE_VALUE, value)
    return commit(copy_engine_ctx, to_rank, base, end)


@device_function
def quiet(copy_engine_ctx, to_rank):
    """Return when all that this GPU has put into the queue before has landed: 1, or 0 when the queue is dead.

    A read pointer that has moved on proves nothing about what has landed. So the engine itself writes, behind all of
    it, how far it is; producers that wait at once compare with >=.
    """
    cached = word(copy_engine_ctx, to_rank, CACHED)
    line = word(copy_engine_ctx, to_rank, COMMITTED)
    answers = tl.load(line + ANSWERS)
    base, end, packet = begin(copy_engine_ctx, to_rank, ATOMIC_BYTES)
    if base >= 0:
        write_header(packet, 0, (ATOMIC_HEADER | (SWAP + NO_RETURN_64) << ATOMIC_SHIFT) - (1 << 32))
        write_wide(packet, ATOMIC_ADDRESS, answers)
        write_wide(packet, ATOMIC_OPERAND, end)
        write_wide(packet, ATOMIC_COMPARE, end * 0)
        write_header(packet, ATOMIC_INTERVAL, 0)
    is_alive = commit(copy_engine_ctx, to_rank, base, end)
    began = base * 0
    polls = 0
    landed = began
    while (landed < end) & (is_alive != 0):
        pause()
        landed = newest(answers.to(tl.pointer_type(tl.int64)), line + LANDED, "acquire")
        polls += 1
        if polls % POLLS == 0:
            began = watch(cached, line, began, NOT_LANDED)
            dead = tl.atomic_add(cached, 0, sem="relaxed", scope="sys") < 0
            is_alive = tl.where(dead & (landed < end), 0, is_alive)
    tl.debug_barrier()
    return is_alive


@device_function
def await_flag(copy_engine_ctx, from_rank, flag, value):
    """Return when a flag of this rank that ``from_rank`` raises is at least ``value``: 1, or 0 past the deadline of the
    queue to that rank, which is then dead. What the flag stands for may be read.

    Args:
        flag: pointer to int64, which only grows.
    """
    cached = word(copy_engine_ctx, from_rank, CACHED)
    line = word(copy_engine_ctx, from_rank, COMMITTED)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    began = seen * 0
    polls = 0
    is_dead = seen < seen
    while (seen < value) & (is_dead == 0):
        pause()
        polls += 1
        if polls % POLLS == 0:
            began = watch(cached, line, began, NO_FLAG)
            is_dead = tl.atomic_add(cached, 0, sem="relaxed", scope="sys") < 0
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return (seen >= value).to(tl.int32)
