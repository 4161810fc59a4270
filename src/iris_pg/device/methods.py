"""The methods of device contexts, Triton's and Gluon's: the functions of device/triton.py, with this rank and the bases
of heaps taken from the context.
"""

# mypy: ignore-errors

import triton.language as tl

from iris_pg.device import triton as device
from iris_pg.device.function import device_method


@device_method
def load(
    self,
    pointer,
    from_rank,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """Return what lies at ``pointer`` on ``from_rank``."""
    return device.load(
        *(pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile),
        hint=hint,
    )


@device_method
def store(self, pointer, value, to_rank, mask=None, cache_modifier: tl.constexpr = None, hint: tl.constexpr = None):
    """Store ``value`` at ``pointer`` on ``to_rank``."""
    device.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)


@device_method
def get(
    self,
    from_ptr,
    to_ptr,
    from_rank,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from ``from_ptr`` on ``from_rank`` to ``to_ptr``, which is this rank's."""
    value = device.load(
        *(from_ptr, self.rank, from_rank, self.heap_bases, mask, other, load_cache_modifier),
        hint=hint,
    )
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier or "")


@device_method
def put(
    self,
    from_ptr,
    to_ptr,
    to_rank,
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
    """Copy from ``from_ptr``, this rank's memory, to ``to_ptr`` on ``to_rank``; see :func:`iris_pg.put`."""
    device.put(
        *(from_ptr, to_ptr, self.rank, to_rank, self.heap_bases, mask, other),
        *(load_cache_modifier, store_cache_modifier, hint, copy_engine_ctx, from_row_stride, to_row_stride),
        *(use_copy_engine, contiguous_copy, from_base_ptr, to_base_ptr),
    )


@device_method
def copy(
    self,
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Copy from ``src_ptr`` on ``from_rank`` to ``dst_ptr`` on ``to_rank``; both pointers are this rank's."""
    device.copy(
        *(src_ptr, dst_ptr, from_rank, to_rank, self.rank, self.heap_bases, mask, other),
        *(load_cache_modifier, store_cache_modifier, hint),
    )


@device_method
def quiet(self, to_rank, copy_engine_ctx):
    """Return when what was put into the queue to ``to_rank`` before has landed; see :func:`iris_pg.quiet`."""
    return device.quiet(to_rank, copy_engine_ctx)


@device_method
def atomic_add(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Add ``val`` on ``to_rank``; see :func:`iris_pg.atomic_add`."""
    return device.atomic_add(
        *(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint),
        *(copy_engine_ctx, use_copy_engine),
    )


@device_method
def atomic_cas(
    self,
    pointer,
    cmp,
    val,
    to_rank,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Store ``val`` on ``to_rank`` where ``cmp`` is; see :func:`iris_pg.atomic_cas`."""
    return device.atomic_cas(
        *(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint),
        *(copy_engine_ctx, use_copy_engine),
    )


@device_method
def atomic_sub(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_sub`, on ``to_rank``."""
    return device.atomic_sub(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_xchg(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_xchg`, on ``to_rank``."""
    return device.atomic_xchg(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_xor(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_xor`, on ``to_rank``."""
    return device.atomic_xor(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_and(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_and`, on ``to_rank``."""
    return device.atomic_and(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_or(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_or`, on ``to_rank``."""
    return device.atomic_or(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_min(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_min`, on ``to_rank``."""
    return device.atomic_min(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)


@device_method
def atomic_max(
    self,
    pointer,
    val,
    to_rank,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """As :func:`iris_pg.atomic_max`, on ``to_rank``."""
    return device.atomic_max(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)
