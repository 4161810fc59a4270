"""Carries out plans: on the host's own group, on the wire, and in this rank's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from iris_pg.multinode.arithmetic import combine, finish
from iris_pg.multinode.plan import Await, Combine, Copy, Exchange, Expect, Finish, Plan, Span, Widen, Within
from iris_pg.multinode.wire import Pending, Wire, tag_of

Tensor = torch.Tensor

_SCRATCH_BYTES = 64 << 20  # of temporary buffers of CPU tensors that are kept from one operation to the next

WithinHost = Callable[[Any, Any, torch.device, dict[str, int]], None]
"""(key, flow, device, name -> address of a buffer) -> None: an operation of the host's ranks, in line."""


class Executor:
    """Carries out plans of one group, one at a time.

    Args:
        within: carries out what is within the host.
    """

    def __init__(self, within: WithinHost) -> None:
        self._within = within
        self._scratch: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    def run(self, plan: Plan, key: Any, addresses: Mapping[str, int], device: torch.device, wire: Wire) -> None:
        """Carry out a plan.

        Args:
            key: what the operation is; the same on all ranks.
            addresses: of the operation's buffers, by name.

        Raises:
            IrisError: what ended it.
        """
        memory = {name: self._room(name, nbytes, device) for name, nbytes in plan.temporaries.items()}
        for name, nbytes in plan.sizes.items():
            if name not in memory:
                memory[name] = _bytes_at(addresses[name], nbytes, device)
        places = {**addresses, **{name: memory[name].data_ptr() for name in plan.temporaries}}
        tag, deadline = tag_of(key), time.monotonic() + wire.timeout_s
        pending: dict[int, list[Pending]] = {}
        parts = 0  # of it that are within the host

        def view(span: Span, dtype: str | None = None) -> Tensor:
            tensor = memory[span.buffer][span.offset : span.offset + span.nbytes]
            return tensor.view(self._type(dtype)) if dtype else tensor

        try:
            for step in plan.steps:
                if isinstance(step, Within):
                    parts += 1
                    self._within((*key, "within the host", parts), step.flow, device, places)
                elif isinstance(step, Expect):
                    if wire.has_tags:
                        receives = [(peer, view(span)) for peer, span in step.receives]
                        pending[step.number] = [wire.exchange([], receives, tag)]
                elif isinstance(step, Exchange):
                    begun = pending.setdefault(step.number, [])
                    receives = [] if begun else [(peer, view(span)) for peer, span in step.receives]
                    begun.append(wire.exchange([(peer, view(span)) for peer, span in step.sends], receives, tag))
                elif isinstance(step, Await):
                    for part in pending.pop(step.number):
                        part.wait(deadline)
                elif isinstance(step, Copy):
                    view(step.into).copy_(view(step.source))
                elif isinstance(step, Widen):
                    view(step.into, step.wide).copy_(view(step.source, step.dtype))
                elif isinstance(step, Combine):
                    combine(step.op, view(step.into, step.dtype), [view(s, step.dtype) for s in step.sources])
                elif isinstance(step, Finish):
                    finish(view(step.into, step.dtype), view(step.source, step.wide), step.divisor)
        except BaseException:
            self._scratch = {}  # something may be on its way into it still
            raise

    def _type(self, name: str) -> torch.dtype:
        return self._types.setdefault(name, getattr(torch, name))

    def _room(self, name: str, nbytes: int, device: torch.device) -> Tensor:
        """Return memory for a temporary buffer."""
        if device.type != "cpu" or nbytes > _SCRATCH_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < nbytes:
            kept = self._scratch[name] = torch.empty(max(nbytes, 4096), dtype=torch.uint8)
        return kept


def _bytes_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """Return memory of a tensor that the caller keeps, as bytes."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
