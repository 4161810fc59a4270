"""The queues of one rank's one-sided transfers on AMD GPUs, through rocm-xio: one to each rank of the group.

Transfers to one rank run in order. rocm-xio has one queue for each pair of GPUs, so there is one channel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from iris_pg.copy_engine.calls import Call
from iris_pg.copy_engine.producers import Producers
from iris_pg.copy_engine.ring import Context
from iris_pg.copy_engine.xio import Library
from iris_pg.copy_engine.xio_queue import Words, XioQueue
from iris_pg.errors import ArgumentError, ClosedError, IrisError, QueueError, where
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics

_making = threading.Lock()
_abandoned: list[Any] = []  # memory that an engine may still use: it stays for as long as the process


class XioChannels:
    """Queues from this rank to every rank of the group, itself included.

    Args:
        library: rocm-xio.
        heap: where transfers read and write; its links name the group.
        devices: the GPU of each rank, as the library counts them, by rank.
        words: memory for each queue, by rank.
        timeout_s: deadline of every wait.

    Attributes:
        is_over: after :meth:`close`, whether no engine uses any memory any more.

    Raises:
        UnsupportedError: two ranks share a GPU, a queue is in use, or the library does not do what it says.
    """

    def __init__(
        self, library: Library, heap: SymmetricHeap, devices: Sequence[int], words: Sequence[Words], timeout_s: float
    ) -> None:
        self._heap, self._library, self._devices = heap, library, devices
        self._timeout_s = timeout_s
        self._closed: IrisError | None = None
        self.is_over = False
        self._queues: list[XioQueue] = []
        try:
            for peer in range(heap.world):
                name = f"{heap.links.group}/{heap.rank}->{peer}"
                pair = devices[heap.rank], devices[peer]
                self._queues.append(XioQueue(library, *pair, words[peer], timeout_s, name, self._check))
        except BaseException:
            for queue in self._queues:
                queue.close()
            raise

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """Put calls into a queue; with ``wait``, return when they have landed.

        Raises:
            ArgumentError: no such channel. ClosedError: the queue has failed before.
            DeadlineError, QueueError: a wait took too long, or the library refuses a call; with a dump of the queue.
        """
        self._check_channel(op, channel)
        queue = self._queues[to_rank]
        if queue.fault:
            raise self._closed or ClosedError(
                f"{op}: the queue to rank {to_rank} has failed before and takes nothing more, in this process. It "
                f"failed with: {queue.fault} {self._where()}"
            )
        self._look(to_rank)
        if not calls:
            return
        end = queue.submit(calls)
        if wait:
            queue.wait(end)

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """Return when what this host has submitted before, to ``to_rank`` or to all ranks, has landed.

        Raises:
            DeadlineError, QueueError: what a transfer failed with.
        """
        self._check_channel("quiet", channel)
        for rank in range(self._heap.world) if to_rank is None else (to_rank,):
            self._look(rank)
        queues = self._queues if to_rank is None else [self._queues[to_rank]]
        for queue, end in [(queue, queue.told) for queue in queues]:
            queue.wait(end)

    def check(self, to_rank: int, channel: int) -> None:
        """Raise what the queue to a rank has failed with, if it has. Does not wait."""
        self._look(to_rank)
        if fault := self._queues[to_rank].fault:
            raise fault

    def contexts(self) -> list[Context]:
        """Return what device code needs to write into queues of its own to each rank, by rank."""
        made = [self._producers(device) for device in self._devices]
        for producers in made:
            producers.limit(self._timeout_s)
        return [producers.context for producers in made]

    def close(self, error: IrisError) -> None:
        """Wait for what is under way, for a second. Where that is not enough, the memory stays mapped for good, as an
        engine cannot be told to stop.
        """
        self._closed = error
        ended = [queue.close() for queue in self._queues]
        self.is_over = all(ended)
        if not self.is_over:
            _abandoned.extend(self._heap.bytes_at(rank, 0, 1) for rank in range(self._heap.world))
            _abandoned.append(self)

    # ------------------------------------------------------------------------------------------------------------------

    def _producers(self, device: int) -> Producers:
        """Return what kernels share of their queue to a GPU."""
        pair = self._devices[self._heap.rank], device
        with _making:
            made = self._library.kernels.get(pair)
            if made is None:
                queue = Context(*self._library.device_context(*pair))
                begun = _word(queue.committed_wptr, self._heap.device)
                made = Producers(queue, self._library.ring_bytes, self._heap.device, begun)
                self._library.kernels[pair] = made
        return made

    def _look(self, to_rank: int) -> None:
        """Raise when a kernel has given up its queue to a rank."""
        made = self._library.kernels.get((self._devices[self._heap.rank], self._devices[to_rank]))
        if made and (why := made.error()):
            raise QueueError(f"the queue of kernels to rank {to_rank}: {why} {self._where()}")

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def _check_channel(self, op: str, channel: int) -> None:
        if channel != 0 or isinstance(channel, bool):
            raise ArgumentError(
                f"{op}: channel={channel!r}; on AMD GPUs it is 0, as rocm-xio has one queue for each pair of GPUs "
                f"{self._where()}"
            )

    def _where(self) -> str:
        return where(group=self._heap.links.group, rank=self._heap.rank)


def _word(address: int, device: torch.device) -> int:
    """Return a 64-bit word that a GPU sees."""
    if device.type == "cpu":
        return atomics().load64(address)
    from iris_pg.platforms.gpu import platform

    return int(platform.view(device, address, 8, torch.int64).item())


__all__ = ["XioChannels"]
