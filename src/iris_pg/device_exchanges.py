"""The cu engine of CUDA tensors: operations as launches of kernels on a stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from iris_pg.collectives.flow import Flow, Part
from iris_pg.device_copies import Prepared
from iris_pg.device_operation import DeviceOperation
from iris_pg.device_page import DevicePage
from iris_pg.errors import UnsupportedError
from iris_pg.kernels.device import DeviceKernels, PreparedLaunches, check_comm_sms, one_shot_bytes, slot_bytes_for
from iris_pg.kernels.launch import area_bytes, reduction_types
from iris_pg.launches import launches
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Program, Ref

_PREPARED = 4096  # most operations that are kept


class PreparedExchanges:
    """An operation that is ready to be launched.

    Args:
        program: its name, without steps: kernels have flags of their own.
        launches: what is launched.
        word: address of the word that says how many operations are done.
    """

    __slots__ = ("_launches", "_word", "program")

    def __init__(self, program: Program, launches: PreparedLaunches, word: int) -> None:
        self.program, self._launches, self._word = program, launches, word

    def launch(self, stream: Any, number: int | None, after: Callable[[], Any] | None) -> None:
        """Put it on a stream, as :meth:`iris_pg.device_copies.Prepared.launch` does."""
        if number is None or after:
            self._launches.launch(stream)
            if after:
                after()
            if number is not None:
                gpu.write(self._word, number)(stream)
        else:  # the kernel writes it, at less than a call of the driver
            self._launches.launch(stream, self._word, number)


class PreparedBoth:
    """An operation that is launches between some ranks and copies between others.

    Args:
        launches: come first, on every rank.
        copies: come then.
    """

    __slots__ = ("_copies", "_launches", "program")

    def __init__(self, launches: PreparedExchanges, copies: Prepared) -> None:
        self.program, self._launches, self._copies = copies.program, launches, copies

    def launch(self, stream: Any, number: int | None, after: Callable[[], Any] | None) -> None:
        """Put it on a stream, as :meth:`iris_pg.device_copies.Prepared.launch` does."""
        self._launches.launch(stream, None, None)
        self._copies.launch(stream, number, after)


def last_resort_s(timeout_s: float) -> float:
    """Return the deadline of kernels, for a group's. It is longer, as the watchdog says more of what is late."""
    return 2 * timeout_s + 10


def has_reduction(op: str, dtype: str) -> bool:
    """Return whether the kernels have a reduction."""
    try:
        reduction_types(op, dtype)
    except UnsupportedError:
        return False
    return True


class DeviceExchanges:
    """Makes operations of one rank ready.

    Args:
        page: the words of lanes.
        device: this rank's GPU.
        comm_sms: most CTAs of a launch.
    """

    def __init__(self, page: DevicePage, device: torch.device, comm_sms: int) -> None:
        self.rank, self.world, self.device = page.heap.rank, page.heap.world, device
        self.comm_sms = comm_sms
        self._slot_bytes = slot_bytes_for(self.world)
        self._word = page.address_of_word(0)
        self._met = torch.zeros(1 + self.world, dtype=torch.int64, device=device)  # what goes and comes in a barrier
        self._tensors: SymmetricHeap | None = None
        self.kernels: DeviceKernels | None = None
        self._prepared: OrderedDict[Hashable, PreparedExchanges] = OrderedDict()

    def areas(self) -> dict[str, int]:
        """Return name -> nbytes of what it takes in the heap."""
        return area_bytes(self.world, self._slot_bytes, self.comm_sms)

    def use(self, heap: SymmetricHeap, tensors: SymmetricHeap, timeout_s: float) -> DeviceKernels:
        """Use a heap, which has the :meth:`areas`, and that of the user's tensors; return the kernels. No rank launches
        before all have come here.
        """
        self._tensors = tensors
        for name, nbytes in self.areas().items():
            heap.bytes_at(self.rank, heap.areas[name], nbytes).zero_()
        torch.cuda.synchronize(self.device)
        sizes = (self._slot_bytes, self.comm_sms, last_resort_s(timeout_s), self.device)
        self.kernels = DeviceKernels(self.rank, self.world, heap.bases, heap.areas, *sizes)
        return self.kernels

    @property
    def barrier_buffers(self) -> tuple[tuple[str, str], tuple[int, int]]:
        """Names and addresses of the buffers of :meth:`barrier_flow`."""
        return ("in", "out"), (self._met.data_ptr(), self._met.data_ptr() + 8)

    def barrier_flow(self, key: Hashable, local: Any) -> Flow:
        """Return this rank's side of a barrier: 8 bytes to and from every peer, which are not looked at."""
        peers = [(self.rank + k) % self.world for k in range(1, self.world)]
        sends = tuple(Part(p, 8, Ref(self.rank, "in", 0)) for p in peers)
        return Flow("barrier", sends, tuple(Part(p, 8, Ref(self.rank, "out", 8 * p)) for p in peers), to_all=True)

    def operation(self, what: DeviceOperation) -> PreparedExchanges:
        """Return an operation, ready.

        Raises:
            UnsupportedError: a reduction that the kernels do not have.
        """
        known: Hashable = (what.key, what.local, what.addresses)
        prepared = self._prepared.get(known)
        if prepared is None:
            assert self.kernels and self._tensors
            bound, bases = dict(zip(what.names, what.addresses, strict=True)), self._tensors.bases

            def address(ref: Ref) -> int:
                return (bound[ref.buffer] if ref.buffer in bound else bases[ref.rank]) + ref.offset

            made = launches(self.rank, self.world, what.flow(what.key, what.local), address, one_shot_bytes(self.world))
            with gpu.outside_of_capture():
                ready = self.kernels.prepare(made)
            name = Program(self.rank, self.world, (), str(what.key[0]))
            prepared = self._prepared[known] = PreparedExchanges(name, ready, self._word)
            if len(self._prepared) > _PREPARED:
                self._prepared.popitem(last=False)
        return prepared

    def close(self) -> None:
        """Forget everything."""
        self._prepared.clear()


__all__ = ["DeviceExchanges", "PreparedBoth", "PreparedExchanges", "check_comm_sms", "has_reduction", "last_resort_s"]
