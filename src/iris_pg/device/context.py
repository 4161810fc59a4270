"""A device context for Triton kernels: this rank and the bases of all heaps in one object, made from the tensor that
``ctx.get_device_context()`` returns.

::

    @triton.jit
    def kernel(context, source, inbox, rank: tl.constexpr, world: tl.constexpr, N: tl.constexpr):
        ctx = DeviceContext.initialize(context, rank, world)
        i = tl.arange(0, N)
        ctx.put(source + i, inbox + i, to_rank=(rank + 1) % world)
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from iris_pg.device import methods
from iris_pg.device.function import device_function


@aggregate
class DeviceContext:
    """What a Triton kernel needs to reach other ranks. Its methods are the functions of device/triton.py without this
    rank and without ``heap_bases``.

    Attributes:
        rank, world_size: this rank and how many there are, constants.
        heap_bases: pointer to the bases of all heaps, int64 [world_size].
    """

    rank: tl.constexpr
    world_size: tl.constexpr
    heap_bases: tl.tensor

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases):
        self.rank = tl.constexpr(rank)
        self.world_size = tl.constexpr(world_size)
        self.heap_bases = heap_bases

    @staticmethod
    @device_function
    def initialize(context_tensor, rank: tl.constexpr, world_size: tl.constexpr):
        """Return the context of ``ctx.get_device_context()``, for this rank of ``world_size``."""
        return DeviceContext(rank, world_size, context_tensor + 2)

    load = methods.load
    store = methods.store
    get = methods.get
    put = methods.put
    copy = methods.copy
    quiet = methods.quiet
    atomic_add = methods.atomic_add
    atomic_sub = methods.atomic_sub
    atomic_cas = methods.atomic_cas
    atomic_xchg = methods.atomic_xchg
    atomic_xor = methods.atomic_xor
    atomic_and = methods.atomic_and
    atomic_or = methods.atomic_or
    atomic_min = methods.atomic_min
    atomic_max = methods.atomic_max


__all__ = ["DeviceContext"]
