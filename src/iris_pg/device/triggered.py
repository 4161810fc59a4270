"""What kernels call on a triggered plan (iris_pg.triggered): publish a batch whose transfers are armed, and await one
that a peer has published. For Triton and Gluon.

``plan`` is ``plan.device``, int64; ``epoch`` is ``plan.epoch``, which a launch takes as an argument.
"""

# mypy: ignore-errors

import triton.language as tl

from iris_pg.device import sdma, target
from iris_pg.device.function import device_function
from iris_pg.device.target import gather_stores

# Words of a plan's tensor; gates, counts and arrivals are lines of 64-bit words.
READY = tl.constexpr(0)  # address of the gates [batches], in memory of the host
ARRIVED = tl.constexpr(1)  # address of the arrivals [batches, world], in the heap
WORLD = tl.constexpr(2)
COUNTS = tl.constexpr(3)  # address of the counts [batches], in memory of this GPU
LINE = tl.constexpr(8)
FENCES = tl.constexpr(1)  # in a count, behind how many producers are done


@device_function
def publish(plan, batch, producers, epoch):
    """Say that this CTA's part of a batch is written. When the last of ``producers`` CTAs has said so, the transfers
    that are armed for the batch begin.

    Args:
        batch: number of the batch. producers: how many calls make it complete, the same in all of them.
    """
    gate = tl.load(plan + READY).to(tl.pointer_type(tl.int64)) + batch * LINE
    count = tl.load(plan + COUNTS).to(tl.pointer_type(tl.int64)) + batch * LINE
    # 1. Every wave's stores, a barrier. 2. A release at system scope, and an acquire of the other producers'.
    # 3. The gate: a store behind a release, as GPUs may have no atomics on memory of the host.
    gather_stores()
    done = tl.atomic_add(count, 1, sem="acq_rel", scope="sys") + 1
    if done == tl.cast(producers, tl.int64) * epoch:
        target.publish(gate, tl.cast(epoch, tl.int64), count + FENCES)


@device_function
def await_batch(plan, copy_engine_ctx, batch, from_rank, epoch):
    """Return when what ``from_rank`` sends to this rank in a batch is there: 1, or 0 past the deadline.

    Args:
        copy_engine_ctx: as of :func:`iris_pg.put`; its deadline is the wait's.
    """
    arrived = tl.load(plan + ARRIVED).to(tl.pointer_type(tl.int64))
    flag = arrived + (batch * tl.load(plan + WORLD) + from_rank) * LINE
    return sdma.await_flag(copy_engine_ctx, from_rank, flag, tl.cast(epoch, tl.int64))
