"""A device context for Gluon kernels, with the methods of Triton's, the copy engine's arguments too: a kernel moves
from one language to the other by its decorator and its layouts.

::

    @gluon.jit
    def kernel(context, source, inbox, N: gl.constexpr, layout: gl.constexpr):
        ctx = DeviceContext.initialize(context)
        i = gl.arange(0, N, layout=layout)
        ctx.put(source + i, inbox + i, to_rank=(ctx.cur_rank + 1) % ctx.num_ranks)

The functions under it are those of device/triton.py, which Triton compiles in the language of the kernel that calls
them; so ``iris_pg.put`` and the others can be called from Gluon kernels as well. Gluon has no interpreter.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from iris_pg.device import methods
from iris_pg.device.function import device_function


@aggregate
class DeviceContext:
    """What a Gluon kernel needs to reach other ranks. Its methods are the functions of device/triton.py without this
    rank and without ``heap_bases``.

    Attributes:
        cur_rank, rank: this rank, int32.
        num_ranks: how many there are, int32.
        heap_bases: pointer to the bases of all heaps, int64 [num_ranks].
    """

    rank: tl.tensor
    cur_rank: tl.tensor
    num_ranks: tl.tensor
    heap_bases: tl.tensor

    @triton.constexpr_function
    def __init__(self, cur_rank, num_ranks, heap_bases):
        self.rank = cur_rank
        self.cur_rank = cur_rank
        self.num_ranks = num_ranks
        self.heap_bases = heap_bases

    @staticmethod
    @device_function
    def initialize(context_tensor):
        """Return the context of ``ctx.get_device_context()``."""
        cur_rank, num_ranks = tl.load(context_tensor).to(tl.int32), tl.load(context_tensor + 1).to(tl.int32)
        return DeviceContext(cur_rank, num_ranks, context_tensor + 2)

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


IrisDeviceCtx = DeviceContext  # what ROCm/iris calls it

__all__ = ["DeviceContext", "IrisDeviceCtx"]
