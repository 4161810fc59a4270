"""An all-gather whose tiles are moved by a chip's bulk copy unit: TMA on Hopper, TDM on gfx1250. In Gluon.

A program (CTA) has its share of the tiles: a tile goes from the input into shared memory and from there to every peer's
output, and no lane touches it. Flags and deadlines are those of device/all_gather.py, but each program raises a flag at
each peer; the output lies in the symmetric heap.
"""

# mypy: ignore-errors

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.gfx1250 import tdm
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_pg.device import sdma
from iris_pg.device.all_gather import ARRIVED, ENTERED, LINE
from iris_pg.device.target import gather_stores
from iris_pg.device.triton import translate

ROWS = gl.constexpr(128)  # of a tile
COLUMNS = gl.constexpr(32)  # int32; a row has 128 bytes, the widest that one TMA instruction takes
TILE_BYTES = gl.constexpr(128 * 32 * 4)
STAGES = gl.constexpr(12)  # tiles of a CTA in shared memory, being read or written
TMA_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
BAR_LAYOUT = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit
def enter(flags, rounds, dead, bases, ctx, rank, world: gl.constexpr):
    """Say that the output may be written, and await that the peers' may; return the round and whether all may go on."""
    round_ = gl.load(rounds + gl.program_id(0)) + 1
    entered = flags + ENTERED * world * LINE
    is_alive = gl.atomic_add(dead, 0, sem="relaxed", scope="gpu") == 0
    for k in gl.static_range(1, world):
        peer = (rank + k) % world
        if gl.program_id(0) == 0:
            gl.atomic_add(translate(entered + rank * LINE, rank, peer, bases), 1, sem="release", scope="sys")
    for k in gl.static_range(1, world):
        peer = (rank + k) % world
        if is_alive:
            is_alive = sdma.await_flag(ctx, peer, entered + peer * LINE, round_) != 0
    return round_, is_alive


@gluon.jit
def leave(flags, rounds, dead, bases, ctx, rank, round_, is_alive, world: gl.constexpr):
    """Say that this program's tiles are with every peer, and await all that peers put here."""
    arrived = flags + ARRIVED * world * LINE
    gather_stores()
    for k in gl.static_range(1, world):
        peer = (rank + k) % world
        if is_alive:
            gl.atomic_add(translate(arrived + rank * LINE, rank, peer, bases), 1, sem="release", scope="sys")
    for k in gl.static_range(1, world):
        peer = (rank + k) % world
        if is_alive:
            is_alive = sdma.await_flag(ctx, peer, arrived + peer * LINE, round_ * gl.num_programs(0)) != 0
    gl.store(dead, 1, mask=is_alive == 0)
    gl.store(rounds + gl.program_id(0), round_)


@gluon.jit
def gather_by_tma(output, input, n_rows, flags, rounds, dead, bases, ctx, rank, world: gl.constexpr):
    """Gather ``n_rows`` rows of 128 bytes from each rank. A tile is read once, and written to every rank.

    Args:
        output: pointer to int32 [world * n_rows, COLUMNS], in the heap. input: pointer to int32 [n_rows, COLUMNS]. Both
            multiples of 16 bytes.
        flags, rounds, dead, bases, ctx, rank: as for :func:`iris_pg.device.all_gather.all_gather`; ``rounds`` has one
            number for each program.
    """
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, COLUMNS], TMA_LAYOUT)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR_LAYOUT)
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    round_, is_alive = enter(flags, rounds, dead, bases, ctx, rank, world)
    source = tma.make_tensor_descriptor(input, [n_rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], TMA_LAYOUT)
    targets = ()
    for k in gl.static_range(0, world):
        peer = (rank + k) % world  # the own part too
        base = translate(output + tl.cast(rank, gl.int64) * n_rows * COLUMNS, rank, peer, bases)
        targets += (tma.make_tensor_descriptor(base, [n_rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], TMA_LAYOUT),)
    first, step = gl.program_id(0), gl.num_programs(0)
    count = gl.cdiv(gl.cdiv(n_rows, ROWS) - first, step) * is_alive.to(gl.int32)
    for i in range(0, gl.minimum(count, STAGES - 1)):
        load_tile(source, tiles, bars, i, first, step)
    for i in range(0, count):
        mbarrier.wait(bars.index(i % STAGES), (i // STAGES) & 1)
        for k in gl.static_range(0, world):
            tma.async_copy_shared_to_global(targets[k], [(first + i * step) * ROWS, 0], tiles.index(i % STAGES))
        if i + STAGES - 1 < count:
            tma.store_wait(world)  # the tile before this one has been read, and its place may be filled again
            load_tile(source, tiles, bars, i + STAGES - 1, first, step)
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(stage))
    # What Triton waits for is that tiles have been read; that they have been written is another wait.
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, is_pure=False, pack=1
    )
    leave(flags, rounds, dead, bases, ctx, rank, round_, is_alive, world)


@gluon.jit
def load_tile(source, tiles, bars, i, first, step):
    """Begin to read this program's tile number i."""
    bar = bars.index(i % STAGES)
    mbarrier.expect(bar, TILE_BYTES)
    tma.async_copy_global_to_shared(source, [(first + i * step) * ROWS, 0], bar, tiles.index(i % STAGES))


@gluon.jit
def gather_by_tdm(output, input, n_rows, flags, rounds, dead, bases, ctx, rank, world: gl.constexpr):
    """The same on gfx1250."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile = gl.allocate_shared_memory(gl.int32, [ROWS, COLUMNS], layout)
    round_, is_alive = enter(flags, rounds, dead, bases, ctx, rank, world)
    source = tdm.make_tensor_descriptor(input, [n_rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], layout)
    for k in gl.static_range(0, world):
        peer = (rank + k) % world
        base = translate(output + tl.cast(rank, gl.int64) * n_rows * COLUMNS, rank, peer, bases)
        target = tdm.make_tensor_descriptor(base, [n_rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS], layout)
        if is_alive:
            for row in range(gl.program_id(0) * ROWS, n_rows, gl.num_programs(0) * ROWS):
                tdm.async_load(source, [row, 0], tile)
                tdm.async_wait(0)
                tdm.async_store(target, [row, 0], tile)
                tdm.async_wait(0)
    leave(flags, rounds, dead, bases, ctx, rank, round_, is_alive, world)
