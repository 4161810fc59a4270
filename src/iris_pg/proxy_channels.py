"""The queues of a one-sided context whose heap is on an NVIDIA GPU, which takes no packets from user space: rings in
host memory, and a thread that executes them with streams (copy_engine/proxy.py).

What the host puts and what kernels put have queues of their own, to each rank, and do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris_pg.copy_engine.calls import Call
from iris_pg.copy_engine.channels import RING_BYTES
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.producers import Producers
from iris_pg.copy_engine.proxy import Platform, ProxyQueue, ProxyThread, Stream
from iris_pg.copy_engine.ring import Context, Ring
from iris_pg.errors import IrisError, QueueError, where
from iris_pg.memory.heap import SymmetricHeap


class Cuda:
    """An NVIDIA GPU.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        from iris_pg.device.word import launcher
        from iris_pg.platforms import cuda_proxy

        self.device, self._proxy, self._launcher = device, cuda_proxy, launcher

    def begin(self) -> None:
        """Make the GPU's context the calling thread's."""
        torch.cuda.set_device(self.device)

    def stream(self) -> Stream:
        """Return a stream of its own."""
        with torch.cuda.device(self.device):
            launchers = {width_bytes: self._launcher(self.device, width_bytes) for width_bytes in (4, 8)}
            return self._proxy.ProxyStream(self.device, launchers)

    def register(self, address: int, nbytes: int) -> Any:
        """Let the GPU see memory of the host."""
        with torch.cuda.device(self.device):
            return self._proxy.Registered(address, nbytes)


class KernelQueues:
    """Queues that kernels of this rank's GPU write into, to all ranks; made when they are first asked for.

    Args:
        heap: on this rank's GPU.
        platform: the GPU.
        timeout_s: deadline of every wait.
    """

    def __init__(self, heap: SymmetricHeap, platform: Platform, timeout_s: float) -> None:
        self._heap, self._platform, self._timeout_s = heap, platform, timeout_s
        self._closed: IrisError | None = None
        self._lock = threading.Lock()
        self.queues: list[tuple[ProxyQueue, Producers, Any]] = []  # by rank
        self._thread: ProxyThread | None = None

    def contexts(self) -> list[Context]:
        """Return what kernels need to write into the queue to each rank, by rank."""
        with self._lock:
            if self._closed:
                raise self._closed
            if self._thread is None:
                self._thread = ProxyThread(self._platform, name=f"iris_pg proxy {self._heap.links.group}")
            while len(self.queues) < self._heap.world:
                made = self._create(len(self.queues))
                self.queues.append(made)
                self._thread.add(made[0])
        return [producers.context for _, producers, _ in self.queues]

    def check(self, to_rank: int) -> None:
        """Raise when the queue to a rank has failed.

        Raises:
            QueueError: a kernel has given it up. DeadlineError, PacketError, DriverError: what a packet failed with.
        """
        if to_rank < len(self.queues):
            queue, producers, _ = self.queues[to_rank]
            if why := producers.error():
                raise QueueError(f"the queue of kernels to rank {to_rank}: {why}\n{queue.dump()} {self._where()}")
            if queue.fault:
                raise queue.fault

    def close(self, error: IrisError) -> None:
        """Drop what has not been begun, and return when nothing reads or writes the heap any more. Kernels that wait
        for a queue go on.
        """
        with self._lock:
            self._closed = error
        for queue, _, _ in self.queues:
            queue.close(error)
        if self._thread:
            self._thread.close()
        for queue, _, registered in self.queues:
            queue.stream.synchronize()
            registered.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _create(self, to_rank: int) -> tuple[ProxyQueue, Producers, Any]:
        links = self._heap.links
        ring = Ring(RING_BYTES, f"{links.group}/{links.rank}->{to_rank}/kernels", self._timeout_s)
        registered = self._platform.register(ring.address, ring.memory_bytes)
        seen_by_gpu = Context(*(address + registered.shift for address in ring.context))
        producers = Producers(seen_by_gpu, ring.nbytes, self._heap.device, begun=0)
        producers.limit(self._timeout_s)
        patience, stream = self._patience(to_rank), self._platform.stream()
        queue = ProxyQueue(ring, patience, stream, producers.cached_wptr, producers.answers)
        return queue, producers, registered

    def _patience(self, to_rank: int) -> Patience:
        def describe(address: int) -> str:
            lost = "".join(f"; rank {rank} is gone" for rank in self._heap.links.lost())
            return (
                f"a kernel's transfer to rank {to_rank} waits for a flag of rank {self._heap.rank}, "
                f"{self._heap.words_for(address)}{lost} {self._where()}: the flag"
            )

        check: Callable[[int, int, int], None] = lambda *_: self._check()  # noqa: E731
        return Patience(self._timeout_s, self._heap.world, check, describe)

    def _check(self) -> None:
        if self._closed:
            raise self._closed

    def _where(self) -> str:
        return where(group=self._heap.links.group, rank=self._heap.rank)


class KernelPuts:
    """What a context's queues have beside those of the host, by inheritance: queues of kernels, ``kernels``. A kernel
    that has given one up is an error of the host's next call to that rank.
    """

    kernels: KernelQueues

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """As the host's queues do."""
        self.kernels.check(to_rank)
        super().submit(op, to_rank, channel, calls, wait)  # type: ignore[misc]

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """As the host's queues do, for what the host has put."""
        for rank in range(len(self.kernels.queues)) if to_rank is None else (to_rank,):
            self.kernels.check(rank)
        super().quiet(to_rank, channel)  # type: ignore[misc]

    def check(self, to_rank: int, channel: int) -> None:
        """As the host's queues do, and of those of kernels."""
        self.kernels.check(to_rank)
        super().check(to_rank, channel)  # type: ignore[misc]

    def contexts(self) -> list[Context]:
        """Return what kernels need."""
        return self.kernels.contexts()

    def close(self, error: IrisError) -> None:
        """Close both."""
        super().close(error)  # type: ignore[misc]
        self.kernels.close(error)


__all__ = ["Cuda", "KernelPuts", "KernelQueues"]
