"""The shape of what a put moves: whether the elements that a mask keeps are a run, or a rectangle, so one packet does.

Every pointer is looked at, on both sides, so what is no run is never taken for one.
"""

# mypy: ignore-errors

import triton.language as tl

# The interpreter knows these by name; tl.max and the like would have to be compiled.
from triton.language.standard import _elementwise_max, _elementwise_min, _sum_combine

from iris_pg.device import sdma
from iris_pg.device.function import device_function
from iris_pg.device.target import has_sub_window, index_along

HIGHEST = tl.constexpr((1 << 63) - 1)


@device_function
def element_bytes(pointer):
    """Return the size of what a pointer points to, for bool too, which Triton counts as one bit."""
    return (pointer.dtype.scalar.element_ty.primitive_bitwidth + 7) // 8


@device_function
def greatest(block):
    """Return the greatest element."""
    for _ in tl.static_range(len(block.shape)):
        block = tl.reduce(block, 0, _elementwise_max)
    return block


@device_function
def least(block):
    """Return the least element."""
    for _ in tl.static_range(len(block.shape)):
        block = tl.reduce(block, 0, _elementwise_min)
    return block


@device_function
def total(block):
    """Return the sum of all elements."""
    for _ in tl.static_range(len(block.shape)):
        block = tl.reduce(block, 0, _sum_combine)
    return block


@device_function
def put_run(source, target, to_rank, mask, copy_engine_ctx):
    """Put the elements that a mask keeps, if they lie side by side on both sides; return whether they are done with
    (1).
    """
    SIZE: tl.constexpr = element_bytes(source)
    src, dst = source.to(tl.int64), target.to(tl.int64)
    if len(source.shape) == 0:
        count = src * 0 + 1
        if mask is not None:
            count = count * tl.cast(mask, tl.int64)
        is_run = count >= 0
    else:
        lane = index_along(source, 0).to(tl.int64)
        kept = lane >= 0
        if mask is not None:
            kept = kept & mask
        count = total(kept.to(tl.int64))
        place = lane - least(tl.where(kept, lane, HIGHEST))
        first_src, first_dst = least(tl.where(kept, src, HIGHEST)), least(tl.where(kept, dst, HIGHEST))
        is_off = (place >= count) | (src - first_src != place * SIZE) | (dst - first_dst != place * SIZE)
        is_run = total((kept & is_off).to(tl.int64)) == 0
        src, dst = first_src, first_dst
    is_done = is_run.to(tl.int32)
    if is_run & (count > 0):
        sdma.copy_linear(copy_engine_ctx, to_rank, dst, src, count * SIZE)
    return is_done


@device_function
def put_window(source, target, to_rank, mask, copy_engine_ctx):
    """Put the elements that a mask keeps, if they are a rectangle on both sides; return whether they are done with."""
    SIZE: tl.constexpr = element_bytes(source)
    src, dst = source.to(tl.int64), target.to(tl.int64)
    row, column = index_along(source, 0).to(tl.int64), index_along(source, 1).to(tl.int64)
    kept = (row >= 0) & (column >= 0)
    if mask is not None:
        kept = kept & mask
    row, column = row + column * 0, column + row * 0
    count = total(kept.to(tl.int64))
    first_row, first_column = least(tl.where(kept, row, HIGHEST)), least(tl.where(kept, column, HIGHEST))
    rows = greatest(tl.where(kept, row, -1)) - first_row + 1
    width = greatest(tl.where(kept, column, -1)) - first_column + 1
    row, column = row - first_row, column - first_column
    first_src, first_dst = least(tl.where(kept, src, HIGHEST)), least(tl.where(kept, dst, HIGHEST))
    second = kept & (row == 1)
    src_pitch = tl.where(rows > 1, least(tl.where(second, src, HIGHEST)) - first_src, width * SIZE)
    dst_pitch = tl.where(rows > 1, least(tl.where(second, dst, HIGHEST)) - first_dst, width * SIZE)
    is_off = (src - first_src != row * src_pitch + column * SIZE) | (dst - first_dst != row * dst_pitch + column * SIZE)
    is_window = (total((kept & is_off).to(tl.int64)) == 0) & ((count == rows * width) | (count == 0))
    is_window = is_window & (tl.minimum(src_pitch, dst_pitch) >= width * SIZE)
    is_window = (is_window & (tl.maximum(src_pitch, dst_pitch) < 1 << 32)) | (count == 0)
    if not has_sub_window():
        is_window = is_window & (count == 0)
    is_done = is_window.to(tl.int32)
    if is_window & (count > 0):
        sdma.copy_window(copy_engine_ctx, to_rank, first_dst, first_src, rows, width * SIZE, dst_pitch, src_pitch)
    return is_done
