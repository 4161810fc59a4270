"""Carries out plans: on the host's own group, on the wire, and in this rank's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.multinode.arithmetic import combine_by_torch, finish
from iris_pg.multinode.plan import Await, Combine, Copy, Exchange, Expect, Finish, Plan, Span, Widen, Within
from iris_pg.multinode.wire import Pending, Wire, tag_of

Tensor = torch.Tensor

_SCRATCH_BYTES = 64 << 20  # of temporary buffers of CPU tensors that are kept from one operation to the next

_VIEWS = 1024  # of memory that are kept, then all are forgotten

WithinHost = Callable[[Any, Within, torch.device, dict[str, int]], None]
"""(key, step, device, name -> address of a buffer) -> None: an operation of the host's ranks, in line."""


class Executor:
    """Carries out plans of one group, one at a time.

    Args:
        within: carries out what is within the host.
    """

    def __init__(self, within: WithinHost) -> None:
        self._within = within
        self._scratch: dict[str, Tensor] = {}
        self._abandoned: list[dict[str, Tensor]] = []  # of an operation that failed
        self._views: dict[tuple[int, int], Tensor] = {}  # of a CPU's memory, by address and size

    def run(self, plan: Plan, key: Any, addresses: Mapping[str, int], device: torch.device, wire: Wire) -> None:
        """Carry out a plan.

        Args:
            key: what the operation is; the same on all ranks.
            addresses: of the operation's buffers, by name.

        Raises:
            IrisError: what ended it.
        """
        rooms = {name: self._room(name, nbytes, device) for name, nbytes in plan.temporaries.items()}
        places = {**addresses, **{name: room.data_ptr() for name, room in rooms.items()}}
        tag, deadline = tag_of(key), time.monotonic() + wire.timeout_s
        pending: dict[int, list[Pending]] = {}
        is_cpu = device.type == "cpu"
        parts = 0  # of it that are within the host

        def view(span: Span, dtype: str | None = None) -> Tensor:
            tensor = self._view(places[span.buffer] + span.offset, span.nbytes, device)
            return tensor.view(getattr(torch, dtype)) if dtype else tensor

        try:
            for step in plan.steps:
                if isinstance(step, Within):
                    parts += 1
                    self._within((*key, "within the host", parts), step, device, places)
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
                    if is_cpu:
                        into, *sources = (places[span.buffer] + span.offset for span in (step.into, *step.sources))
                        reduce_bytes(step.op, step.dtype, into, sources, step.into.nbytes)
                    else:
                        combine_by_torch(
                            step.op, view(step.into, step.dtype), [view(s, step.dtype) for s in step.sources]
                        )
                elif isinstance(step, Finish):
                    finish(view(step.into, step.dtype), view(step.source, step.wide), step.divisor)
        except BaseException:
            # Something may be on its way into them still, so they stay until the group goes.
            self._abandoned, self._scratch = [rooms, self._scratch], {}
            raise

    def _view(self, address: int, nbytes: int, device: torch.device) -> Tensor:
        """Return memory that the caller keeps, as bytes. A training loop repeats its addresses, so views of a CPU's
        memory are kept; they own nothing.
        """
        if device.type != "cpu":
            return _bytes_at(address, nbytes, device)
        found = self._views.get((address, nbytes))
        if found is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # else it could not be written outside of inference mode
                found = self._views[address, nbytes] = _bytes_at(address, nbytes, device)
        return found

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
