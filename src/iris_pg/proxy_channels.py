"""The queues of a one-sided context whose heap is on an NVIDIA GPU, which takes no packets from user space: rings in
host memory, and a thread that executes them with streams (copy_engine/proxy.py).

What the host puts and what kernels put have queues of their own, to each rank, and do not wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from iris_pg.copy_engine.calls import Call
from iris_pg.copy_engine.channels import CHANNELS, RING_BYTES, batches
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.producers import Producers
from iris_pg.copy_engine.proxy import ProxyQueue, ProxyThread, Stream
from iris_pg.copy_engine.ring import Context, Ring
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, IrisError, QueueError, where
from iris_pg.memory.heap import SymmetricHeap

_PAUSE_S = 20e-6


class Platform(Protocol):
    """What the queues need of the GPU."""

    def begin(self) -> None:
        """Make the GPU's context the calling thread's."""

    def stream(self) -> Stream:
        """Return a stream of its own."""

    def register(self, address: int, nbytes: int) -> Any:
        """Let the GPU see memory of the host; its ``shift`` is what to add to an address, ``close()`` ends it."""


class Cuda:
    """An NVIDIA GPU.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        from iris_pg.device.word import launcher
        from iris_pg.platforms import cuda_proxy

        self.device, self._proxy, self._launcher = device, cuda_proxy, launcher
        for width_bytes in (4, 8):  # what signals need is compiled and loaded now, when nothing waits for it
            with torch.cuda.device(device):
                launcher(device, "ADD", width_bytes)

    def begin(self) -> None:
        """Make the GPU's context the calling thread's."""
        torch.cuda.set_device(self.device)

    def stream(self) -> Stream:
        """Return a stream of its own."""
        with torch.cuda.device(self.device):
            return self._proxy.ProxyStream(self.device, self._launcher)

    def register(self, address: int, nbytes: int) -> Any:
        """Let the GPU see memory of the host."""
        with torch.cuda.device(self.device):
            return self._proxy.Registered(address, nbytes)


class ProxyChannels:
    """Queues from this rank's GPU to those of all ranks.

    Args:
        heap: on this rank's GPU.
        platform: the GPU.
        timeout_s: deadline of every wait.
    """

    def __init__(self, heap: SymmetricHeap, platform: Platform, timeout_s: float) -> None:
        self._heap, self._platform, self._timeout_s = heap, platform, timeout_s
        self._closed: IrisError | None = None
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], ProxyQueue] = {}  # of the host, by rank and channel
        self._kernels: list[tuple[ProxyQueue, Producers, Any]] = []  # of kernels, by rank
        self._thread = ProxyThread(platform.begin, name=f"iris_pg proxy {heap.links.group}")

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """Write the packets of ``calls`` into a queue of the host; with ``wait``, return when they have landed.

        Raises:
            ArgumentError: no such channel. ClosedError: the queue has failed before.
            DeadlineError, QueueError: a wait took too long; with a dump of the queue.
        """
        queue = self._queue(op, to_rank, channel)
        if queue.fault:
            raise self._closed or ClosedError(
                f"{op}: the queue to rank {to_rank} on channel {channel} has failed before and takes nothing more; use "
                f"another channel or a new context. It failed with: {queue.fault} {self._where()}"
            )
        made = batches([packet for call in calls for packet in call.packets()], queue.ring.largest_batch)
        if made:
            end = queue.submit(made)
            if wait:
                self._wait(queue, end)

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """Return when what this host has submitted on ``channel`` before, to ``to_rank`` or to all ranks, has landed.

        Raises:
            DeadlineError, QueueError, PacketError: what a transfer failed with, one of a kernel too.
        """
        self._check_channel("quiet", channel)
        ranks = range(self._heap.world) if to_rank is None else (to_rank,)
        for rank in ranks:
            self._look(rank)
        queues = [queue for rank in ranks if (queue := self._queues.get((rank, channel)))]
        for queue, end in [(queue, queue.ring.committed()) for queue in queues]:
            self._wait(queue, end)

    def contexts(self) -> list[Context]:
        """Return what kernels need to write into queues of their own to each rank, by rank."""
        with self._lock:
            while len(self._kernels) < self._heap.world:
                self._kernels.append(self._of_kernels(len(self._kernels)))
        return [producers.context for _, producers, _ in self._kernels]

    def close(self, error: IrisError) -> None:
        """Drop what has not been begun, and return when nothing reads or writes the heap any more. Kernels that wait
        for a queue go on.
        """
        with self._lock:
            self._closed = error
        made = [*self._queues.values(), *(queue for queue, _, _ in self._kernels)]
        for queue in made:
            queue.close(error)
        self._thread.close()
        for queue in made:
            queue.stream.synchronize()
        for _, _, registered in self._kernels:
            registered.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _wait(self, queue: ProxyQueue, end: int) -> None:
        """Wait until packets before ``end`` have been begun, then for the stream. Polls have deadlines of their own."""
        deadline = time.monotonic() + 2 * self._timeout_s
        while queue.done < end:
            if queue.fault:
                raise queue.fault
            if time.monotonic() > deadline:
                raise DeadlineError(f"packets before {end} were not begun {self._where()}\n{queue.dump()}")
            time.sleep(_PAUSE_S)
        queue.stream.synchronize()

    def _queue(self, op: str, to_rank: int, channel: int) -> ProxyQueue:
        self._check_channel(op, channel)
        self._look(to_rank)
        with self._lock:
            if self._closed:
                raise self._closed
            queue = self._queues.get((to_rank, channel))
            if queue is None:
                ring = Ring(RING_BYTES, f"{self._links}->{to_rank}/{channel}", self._timeout_s)
                queue = ProxyQueue(ring, self._patience(to_rank, f"on channel {channel}"), self._platform.stream())
                self._queues[to_rank, channel] = queue
                self._thread.add(queue)
        return queue

    def _of_kernels(self, to_rank: int) -> tuple[ProxyQueue, Producers, Any]:
        ring = Ring(RING_BYTES, f"{self._links}->{to_rank}/kernels", self._timeout_s)
        registered = self._platform.register(ring.address, ring.memory_bytes)
        seen_by_gpu = Context(*(address + registered.shift for address in ring.context))
        producers = Producers(seen_by_gpu, ring.nbytes, self._heap.device, begun=0)
        producers.limit(self._timeout_s)
        patience = self._patience(to_rank, "of a kernel")
        stream = self._platform.stream()
        queue = ProxyQueue(ring, patience, stream, producers.cached_wptr, producers.answers)
        self._thread.add(queue)
        return queue, producers, registered

    def _patience(self, to_rank: int, what: str) -> Patience:
        def describe(address: int) -> str:
            lost = "".join(f"; rank {rank} is gone" for rank in self._heap.links.lost())
            at = self._heap.offset_of(address, 4)
            flag = f"at byte {at:#x} of its heap" if at is not None else f"at {address:#x}"
            return (
                f"a transfer to rank {to_rank} {what} waits for a flag of rank {self._heap.rank}, {flag}{lost} "
                f"{self._where()}: the flag"
            )

        check: Callable[[int, int, int], None] = lambda *_: self._check()  # noqa: E731
        return Patience(self._timeout_s, self._heap.world, check, describe)

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def _look(self, to_rank: int) -> None:
        """Raise when a queue of kernels has failed."""
        if to_rank < len(self._kernels):
            queue, producers, _ = self._kernels[to_rank]
            if why := producers.error():
                raise QueueError(f"the queue of kernels to rank {to_rank}: {why}\n{queue.dump()} {self._where()}")
            if queue.fault:
                raise queue.fault

    def _check_channel(self, op: str, channel: int) -> None:
        if not isinstance(channel, int) or not 0 <= channel < CHANNELS:
            raise ArgumentError(f"{op}: channel={channel!r}; it takes 0..{CHANNELS - 1} {self._where()}")

    @property
    def _links(self) -> str:
        return f"{self._heap.links.group}/{self._heap.rank}"

    def _where(self) -> str:
        return where(group=self._heap.links.group, rank=self._heap.rank)


__all__ = ["Cuda", "ProxyChannels"]
