"""What kernels call to reach the memory of other ranks: ``iris_pg.load``, ``store``, ``copy``, ``get``, ``put``, the
atomics, and ``quiet``. For Triton, compiled or interpreted; from Gluon kernels device/gluon.py calls the same.

Names, order of arguments and defaults are those of ROCm/iris, so its kernels run when their import is changed. Pointers
are this rank's own, into its symmetric heap; ``heap_bases`` is ``ctx.get_heap_bases()``, and a pointer becomes one into
another rank's heap by the distance of the two bases.

Whatever a peer may look at is for the whole system: atomics have ``scope="sys"`` unless told otherwise. A put is seen
by a peer before a flag that is raised after it, as ``atomic_add`` and the others release what the CTA did before.

With ``copy_engine_ctx=ctx.get_copy_engine_ctx()`` and ``use_copy_engine=True``, ``put``, ``atomic_add`` and
``atomic_cas`` become packets in the queue to that rank (device/sdma.py): they return before anything has moved, run in
the order in which they were put, and ``quiet`` waits for them. ``hint`` is what the pointer is a multiple of, in
elements, for wide accesses; a number, or a tuple with one for each dimension.
"""

# mypy: ignore-errors

import triton.language as tl

from iris_pg.device import sdma
from iris_pg.device.function import device_function
from iris_pg.device.shape import element_bytes, greatest, put_run, put_window

PAGE = tl.constexpr(16)  # elements; bases are multiples of a page, so their distance keeps 16 of any type aligned


@device_function
def translate(pointer, from_rank, to_rank, heap_bases, hint: tl.constexpr = None):
    """Return the pointer to the same place of ``to_rank``'s heap, of one into ``from_rank``'s."""
    SIZE: tl.constexpr = element_bytes(pointer)
    distance = tl.load(heap_bases + to_rank).to(tl.int64) - tl.load(heap_bases + from_rank).to(tl.int64)
    pointer = pointer + tl.multiple_of(distance // SIZE, PAGE)
    if hint is not None:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, hint), hint)
    return pointer


@device_function
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Return what lies at ``pointer`` on ``from_rank``.

    Args:
        pointer: into the heap of ``to_rank``, which is this rank; a scalar or a block.
        from_rank: whose memory is read.
        mask, other: as in ``tl.load``.
    """
    there = translate(pointer, to_rank, from_rank, heap_bases, hint)
    return tl.load(there, mask=mask, other=other, cache_modifier=cache_modifier or "", volatile=volatile)


@device_function
def store(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    hint: tl.constexpr = None,
    cache_modifier: tl.constexpr = None,
):
    """Store ``value`` at ``pointer`` on ``to_rank``.

    Args:
        pointer: into the heap of ``from_rank``, which is this rank; a scalar or a block.
        to_rank: whose memory is written.
        mask: as in ``tl.store``.
    """
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    tl.store(there, value, mask=mask, cache_modifier=cache_modifier or "")


@device_function
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from ``src_ptr`` on ``from_rank`` to ``dst_ptr`` on ``to_rank``; both pointers are ``cur_rank``'s."""
    source = translate(src_ptr, cur_rank, from_rank, heap_bases, hint)
    target = translate(dst_ptr, cur_rank, to_rank, heap_bases, hint)
    value = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier or "")
    tl.store(target, value, mask=mask, cache_modifier=store_cache_modifier or "")


@device_function
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from ``from_ptr`` on another rank to ``to_ptr``, which is this rank's.

    Args:
        from_ptr: into this rank's heap; the same place of the other rank's is read.
        from_rank, to_rank: the other rank and this one, in either order: what ROCm/iris says and what its kernels do
            differ. The pointer shows which is this one, as it lies in its heap.
    """
    mine = belongs_to(from_ptr, from_rank, to_rank, heap_bases)
    there = translate(from_ptr, mine, from_rank + to_rank - mine, heap_bases, hint)
    value = tl.load(there, mask=mask, other=other, cache_modifier=load_cache_modifier or "")
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier or "")


@device_function
def belongs_to(pointer, a, b, heap_bases):
    """Return which of two ranks' heaps a pointer lies in: the one that begins last, of those that begin before it."""
    address = greatest(pointer.to(tl.int64))
    base_a, base_b = tl.load(heap_bases + a).to(tl.int64), tl.load(heap_bases + b).to(tl.int64)
    is_in_a = (base_a <= address) & ((base_b > address) | (base_a >= base_b))
    return tl.where(is_in_a, a, b)


@device_function
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    from_row_stride=0,
    to_row_stride=0,
    use_copy_engine: tl.constexpr = False,
    contiguous_copy: tl.constexpr = False,
    from_base_ptr=None,
    to_base_ptr=None,
):
    """Copy from ``from_ptr``, this rank's memory, to ``to_ptr`` on ``to_rank``.

    With ``use_copy_engine`` and ``contiguous_copy`` it is one packet: for a 1-D block whose elements that the mask
    keeps lie side by side, a linear copy; for a 2-D block of which it keeps a rectangle, rows a pitch apart, a window.
    Nothing is sent where it keeps none. What is neither (a mask with holes, say) is copied by this CTA: slower, never
    wrong.

    Args:
        from_ptr, to_ptr: into this rank's memory; scalars or blocks of one shape, at most 2-D, of one type.
        from_rank: this rank.
        to_rank: whose memory is written.
        from_row_stride, to_row_stride, from_base_ptr, to_base_ptr: of a window, for kernels that pass them. The
            pointers say the same, and are what is looked at.
    """
    there = translate(to_ptr, from_rank, to_rank, heap_bases, hint)
    if use_copy_engine and contiguous_copy:
        tl.static_assert(copy_engine_ctx is not None, "put: use_copy_engine=True needs copy_engine_ctx")
        tl.static_assert(from_ptr.dtype == to_ptr.dtype, "put: the copy engine does not convert types")
        if len(from_ptr.shape) == 0:
            is_done = put_run(from_ptr, there, to_rank, mask, copy_engine_ctx)
        elif len(from_ptr.shape) == 1:
            is_done = put_run(from_ptr, there, to_rank, mask, copy_engine_ctx)
        else:
            is_done = put_window(from_ptr, there, to_rank, mask, copy_engine_ctx)
        if is_done == 0:
            value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier or "")
            tl.store(there, value, mask=mask, cache_modifier=store_cache_modifier or "")
    else:
        value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier or "")
        tl.store(there, value, mask=mask, cache_modifier=store_cache_modifier or "")


@device_function
def quiet(to_rank, copy_engine_ctx):
    """Return when all that this GPU has put into the queue to ``to_rank`` before has landed there: 1. It is 0 when the
    queue has failed, and the host's next call says why.
    """
    return sdma.quiet(copy_engine_ctx, to_rank)


# Atomics --------------------------------------------------------------------------------------------------------------
# Each returns what was there before. ``pointer`` is into the heap of ``from_rank``, this rank; ``to_rank``'s memory is
# changed. ``sem`` is "acq_rel" and ``scope`` "sys" when None: peers, the host and copy engines see what is changed.


@device_function
def enqueue_atomic(pointer, value, compare, to_rank, copy_engine_ctx, mask, OP: tl.constexpr):
    """Let the copy engine do an atomic on one word, which returns nothing."""
    tl.static_assert(copy_engine_ctx is not None, "use_copy_engine=True needs copy_engine_ctx")
    tl.static_assert(len(pointer.shape) == 0, "an atomic of the copy engine takes one pointer, not a block")
    tl.static_assert(pointer.dtype.element_ty.is_int(), "an atomic of the copy engine takes an integer")
    BITS: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    tl.static_assert(BITS == 32 or BITS == 64, "an atomic of the copy engine takes 32 or 64 bits")
    address = pointer.to(tl.int64)
    if mask is None:
        sdma.atomic(copy_engine_ctx, to_rank, address, OP, value, compare, BITS == 64)
    elif tl.cast(mask, tl.int32) != 0:
        sdma.atomic(copy_engine_ctx, to_rank, address, OP, value, compare, BITS == 64)


@device_function
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Add ``val``. The copy engine adds to one integer of 32 or 64 bits, after what was put before; returns nothing."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    if use_copy_engine:
        enqueue_atomic(there, val, 0, to_rank, copy_engine_ctx, mask, sdma.ADD)
    else:
        return tl.atomic_add(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Store ``val`` where ``cmp`` is. With the copy engine: as :func:`atomic_add`."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    if use_copy_engine:
        enqueue_atomic(there, val, cmp, to_rank, copy_engine_ctx, None, sdma.CMPSWAP)
    else:
        return tl.atomic_cas(there, cmp, val, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_sub(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Subtract ``val``."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_add(there, -val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store ``val``."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xchg(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Combine with ``val`` by exclusive or."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xor(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Combine with ``val`` by and."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_and(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Combine with ``val`` by or."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_or(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Keep the lesser of ``val`` and what is there."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_min(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")


@device_function
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Keep the greater of ``val`` and what is there."""
    there = translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_max(there, val, mask=mask, sem=sem or "acq_rel", scope=scope or "sys")
