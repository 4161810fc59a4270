"""The collectives that can be measured: what goes in, what has to come out, and how torch is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


@dataclass(frozen=True)
class Operation:
    """One collective.

    Args:
        name: on the command line and in the report.
        inputs, outputs: parts of "bytes per rank" that a rank's input and output have, as (world) -> parts.
        received: (bytes per rank, world) -> bytes that a rank gets from other ranks at least: what GB/s counts.
        expected: (inputs of all ranks, rank) -> the right output.
        call: (output, input, group) -> None; synchronous.
        dtype: of the elements.
        in_place: there is one tensor, which holds the input before and the output afterwards.
        uses_heap: whether outputs in an iris group's heap are another case than ordinary ones.
    """

    name: str
    inputs: Callable[[int], int]
    outputs: Callable[[int], int]
    received: Callable[[int, int], float]
    expected: Callable[[list[Tensor], int], Tensor]
    call: Callable[[Tensor, Tensor, Any], None]
    dtype: torch.dtype = torch.uint8
    in_place: bool = False
    uses_heap: bool = False

    def is_another_case(self, memory: str) -> bool:
        """Return whether it is done otherwise where "ordinary" tensors, outputs in a "heap", or the "input" there."""
        return {"ordinary": True, "heap": self.uses_heap, "input": self.name == "all_gather"}[memory]

    def numel(self, nbytes: int) -> int:
        """Return the elements of one part of ``nbytes``, at least one."""
        return max(nbytes // self.dtype.itemsize, 1)


def _one(world: int) -> int:
    return 1


def _each(world: int) -> int:
    return world


def _sum(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(0)


def _transposed(inputs: list[Tensor], rank: int) -> Tensor:
    return torch.cat([t.view(len(inputs), -1)[rank] for t in inputs])


def _all_reduce(output: Tensor, input: Tensor, group: Any) -> None:
    dist.all_reduce(output, group=group)


def _broadcast(output: Tensor, input: Tensor, group: Any) -> None:
    dist.broadcast(output, group=group, group_src=0)


# Their names since torch 2.13; the old ones warn on every call there, which would be timed.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            "all_gather",
            inputs=_one,
            outputs=_each,
            received=lambda n, world: (world - 1) * n,
            expected=lambda inputs, rank: torch.cat(inputs),
            call=lambda output, input, group: _all_gather(output, input, group=group),
            uses_heap=True,
        ),
        Operation(
            "reduce_scatter",
            inputs=_each,
            outputs=_one,
            received=lambda n, world: (world - 1) * n,
            expected=lambda inputs, rank: _sum(inputs).chunk(len(inputs))[rank],
            call=lambda output, input, group: _reduce_scatter(output, input, group=group),
            dtype=torch.float32,
        ),
        Operation(
            "all_reduce",
            inputs=_one,
            outputs=_one,
            received=lambda n, world: 2 * (world - 1) * n / world,
            expected=lambda inputs, rank: _sum(inputs),
            call=_all_reduce,
            dtype=torch.float32,
            in_place=True,
        ),
        Operation(
            "all_to_all",
            inputs=_each,
            outputs=_each,
            received=lambda n, world: (world - 1) * n,
            expected=_transposed,
            call=lambda output, input, group: dist.all_to_all_single(output, input, group=group),
        ),
        Operation(
            "broadcast",
            inputs=_one,
            outputs=_one,
            received=lambda n, world: n,
            expected=lambda inputs, rank: inputs[0],
            call=_broadcast,
            in_place=True,
            uses_heap=True,
        ),
    )
}
