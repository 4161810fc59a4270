"""What all operations of a process group share: how one is run, and where tensors of any layout arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.device_operation import DeviceOperation
from iris_pg.device_work import StreamWork
from iris_pg.errors import ArgumentError
from iris_pg.transport import Key, Transport
from iris_pg.work import IrisWork, Together

if TYPE_CHECKING:
    from iris_pg.device_transport import DeviceTransport

Tensor = torch.Tensor

_UNCOPIED = {torch.float4_e2m1fn_x2}  # types of a byte that torch cannot copy between all layouts
_MOST_KNOWN = 4096  # most calls that are remembered


class Operations:
    """Base of the classes that hold a group's operations.

    Attributes:
        transport: what moves the bytes of CPU tensors.
    """

    transport: Transport
    _rank: int
    _world: int
    _peers: list[int]  # the other ranks, in the order in which this one visits them
    _coalescing: list[IrisWork] | None

    def _on(self, device: torch.device) -> DeviceTransport:
        """Return what moves the bytes of tensors on a GPU; made by the first call, which is collective."""
        raise NotImplementedError

    def _barrier_device(self, opts: Any) -> torch.device | None:
        """Return the GPU on whose stream a barrier is; None where hosts meet."""
        raise NotImplementedError

    @functools.cached_property
    def _known(self) -> dict[Hashable, tuple[DeviceTransport, DeviceOperation]]:
        """Calls with CUDA tensors: what they follow from -> what they are."""
        return {}

    def _repeat(
        self, known: tuple[DeviceTransport, DeviceOperation], outputs: list[Any], asynchronous: bool, keep: Any
    ) -> IrisWork | None:
        """Run an operation that has been run before at these addresses."""
        transport, operation = known
        work = transport.perform(operation, outputs, asynchronous, keep)
        return work and self._coalesced(work)

    def _offset(self, tensor: Tensor, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` at contiguous ``tensor`` in the symmetric heap, or None when they are not in
        it.
        """
        transport = self.transport if tensor.device.type == "cpu" else self._on(tensor.device)
        return transport.tensors.offset_of(tensor.data_ptr(), nbytes)

    def _run(
        self,
        device: torch.device,
        key: tuple[Any, ...],
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str],
        addresses: Sequence[int],
        outputs: list[Any],
        asynchronous: bool,
        keep: Any,
        after: Callable[[], Any] | None,
        seen: Hashable | None = None,
    ) -> IrisWork | None:
        """Run one operation; ``key`` is what all ranks agree on, ``local`` what else the flow depends on. Return its
        work, but none of a synchronous one on a GPU: what follows on its stream need not wait, nor does the host.

        Args:
            seen: what all of it follows from, so that it need not be looked at again; from :func:`place`.
        """
        if device.type != "cpu":
            transport, operation = self._on(device), DeviceOperation(key, local, flow, names, addresses)
            work = transport.perform(operation, outputs, asynchronous, keep, after)
            if seen and not after:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[seen] = transport, operation
            return work and self._coalesced(work)
        if not asynchronous:
            self.transport.run(key, local, flow, names, addresses)
            if after:
                after()
            return IrisWork(outputs)
        pending = IrisWork(outputs, drive=self.transport.drive_work)
        assert pending.completion
        pending.completion.keep, pending.completion.after = keep, after
        self.transport.run(key, local, flow, names, addresses, pending)
        return self._coalesced(pending)

    def _coalesced(self, work: IrisWork) -> IrisWork:
        """Note ``work`` if calls are being coalesced; returns it."""
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _work_on_gpu(self, outputs: Any, inputs: Any) -> IrisWork:
        """Return the work of the synchronous operation that the current stream was told last; tensors, or lists of
        them, which a rank that gets nothing may lack.
        """
        results = outputs if isinstance(outputs, list) else [outputs]
        first: Any = results or inputs
        while isinstance(first, list):
            first = first[0] if first else inputs
        return self._on(first.device).work(results or inputs)

    def _all(self, works: Sequence[IrisWork | None], outputs: list[Any]) -> IrisWork | None:
        """Return a work that is done when all of ``works`` are; None where those are of a GPU, and synchronous."""
        if works and all(work is None for work in works):
            return None
        pending = [w for w in works if w is not None and w.must_be_waited_for()]
        if len(pending) > 1 and not all(isinstance(w, StreamWork) and w.is_in_line for w in pending):
            return Together(pending, outputs)
        return pending[-1].of(outputs) if pending else IrisWork(outputs)

    def _only(self, op: str, tensors: list[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ArgumentError(f"{op}: {len(tensors)} tensors; it takes one per rank")
        return tensors[0]


def place(tensor: Tensor) -> tuple[int, int, torch.dtype] | None:
    """Return the address, number of elements and type of a CUDA tensor whose values are in a row, which say all that
    matters of it; None of any other tensor.
    """
    if (
        type(tensor) is Tensor
        and tensor.is_cuda
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    ):
        return tensor.data_ptr(), tensor.numel(), tensor.dtype
    return None


def dense(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in a row in memory, without lazy conjugation or negation; itself where they are
    so already.
    """
    if _is_dense(tensor):
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in _UNCOPIED:
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def room(tensor: Tensor) -> Tensor:
    """Return where the values of the output ``tensor`` can arrive in a row: itself, or memory to :func:`copy` them
    from.
    """
    if _is_dense(tensor):
        return tensor
    return torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.device)


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
