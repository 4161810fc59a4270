"""What all operations of a process group share: how one is run, and where tensors of any layout arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.errors import ArgumentError
from iris_pg.transport import Key, Transport
from iris_pg.work import IrisWork, Together

Tensor = torch.Tensor

_UNCOPIED = {torch.float4_e2m1fn_x2}  # types of a byte that torch cannot copy between all layouts


class Operations:
    """Base of the classes that hold a group's operations.

    Attributes:
        transport: what moves the bytes.
    """

    transport: Transport
    _rank: int
    _world: int
    _peers: list[int]  # the other ranks, in the order in which this one visits them
    _coalescing: list[IrisWork] | None

    def _run(
        self,
        key: tuple[Any, ...],
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str],
        addresses: Sequence[int],
        outputs: list[Any],
        asynchronous: bool,
        keep: Any,
        after: Callable[[], Any] | None,
    ) -> IrisWork:
        """Run one operation; ``key`` is what all ranks agree on, ``local`` what else the flow depends on."""
        if not asynchronous:
            self.transport.run(key, local, flow, names, addresses)
            if after:
                after()
            return IrisWork(outputs)
        work = IrisWork(outputs, drive=self.transport.drive_work)
        assert work.completion
        work.completion.keep, work.completion.after = keep, after
        self.transport.run(key, local, flow, names, addresses, work)
        return self._coalesced(work)

    def _coalesced(self, work: IrisWork) -> IrisWork:
        """Note ``work`` if calls are being coalesced; returns it."""
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _all(self, works: list[IrisWork], outputs: list[Any]) -> IrisWork:
        """Return a work that is done when all of ``works`` are."""
        pending = [w for w in works if not w.is_success()]  # one that has failed already must be told of, too
        if len(pending) > 1:
            return Together(pending, outputs)
        return pending[0].of(outputs) if pending else IrisWork(outputs)

    def _only(self, op: str, tensors: list[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ArgumentError(f"{op}: {len(tensors)} tensors; it takes one per rank")
        return tensors[0]


def dense(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in a row in memory, without lazy conjugation or negation; itself where they are
    so already.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in _UNCOPIED:
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def room(tensor: Tensor) -> Tensor:
    """Return where the values of the output ``tensor`` can arrive in a row: itself, or memory to :func:`copy` them
    from.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.size(), dtype=tensor.dtype)


def copy(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, as the bytes of any other output arrive: unseen by autograd."""
    with torch.no_grad():
        for into, values in moves:
            if into.dtype in _UNCOPIED:
                into, values = into.view(torch.uint8), values.view(torch.uint8)
            into.copy_(values)


def is_asynchronous(opts: Any) -> bool:
    """Return whether torch's options of a call ask for it to run in the background."""
    return opts is not None and bool(getattr(opts, "asyncOp", False))
