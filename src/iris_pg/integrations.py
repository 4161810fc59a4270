"""Communication objects for FSDP2, whose buffers are in a group's symmetric heap.

::

    group = mesh.get_group()  # of backend iris
    for block in model.layers:
        fully_shard(block, mesh=mesh)
        block.set_custom_all_gather(HeapAllGather(group))
        block.set_custom_reduce_scatter(HeapReduceScatter(group))

``module.set_allocate_memory_from_process_group_for_comm(True)`` does the same for both; these are for one of the two
alone. They are what ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` ask for: an ``allocate`` and a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris_pg.errors import ArgumentError
from iris_pg.process_group import IrisProcessGroup

Tensor = torch.Tensor

# Their names since, and before, torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _HeapBuffers:
    """Buffers in the heap of a group.

    Args:
        group: of backend iris: the one over which the module is sharded.

    Raises:
        ArgumentError: a group of another backend.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if not isinstance(group, IrisProcessGroup):
            raise ArgumentError(
                f"{type(self).__name__}: {type(group).__name__} is not a group of backend iris; pass one made by "
                'init_device_mesh(..., backend_override=...) or new_group(backend="iris")'
            )
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor [product of size]; see :meth:`IrisProcessGroup.allocate_tensor`."""
        return self._group.allocate_tensor(math.prod(int(n) for n in size), dtype=dtype, device=device)


class HeapAllGather(_HeapBuffers):
    """An all-gather into the heap: peers write each other's output directly."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather; returns a work when ``async_op``, else None."""
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class HeapReduceScatter(_HeapBuffers):
    """A reduce-scatter of buffers in the heap."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce and scatter; returns a work when ``async_op``, else None."""
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


__all__ = ["HeapAllGather", "HeapReduceScatter"]
