"""The queues of a one-sided context whose heap is on a GPU: an AMD GPU's own, or streams of an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iris_pg.copy_engine import xio
from iris_pg.copy_engine.calls import Call
from iris_pg.copy_engine.ring import Context
from iris_pg.copy_engine.stream_channels import StreamChannels
from iris_pg.copy_engine.xio_channels import XioChannels
from iris_pg.copy_engine.xio_queue import WORDS_BYTES, Words
from iris_pg.device_page import DevicePage
from iris_pg.device_queues import numbers
from iris_pg.errors import IrisError, UnsupportedError
from iris_pg.flags import LINE
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.proxy_channels import Cuda, ProxyChannels

_OF_A_QUEUE = -(-WORDS_BYTES // LINE)  # words of the page, which are lines


def memory_on(device: torch.device) -> gpu.DeviceMemory:
    """Return the memory of a GPU that a context's heap may be made of.

    Raises:
        UnsupportedError: it is no GPU, or a package is missing that its memory needs.
    """
    if device.type != "cuda":
        raise UnsupportedError(f"a one-sided context on {device}; it is on the CPU or on a GPU, which is 'cuda'")
    return gpu.DeviceMemory(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)


def channels_on(heap: SymmetricHeap, memory: gpu.DeviceMemory, timeout_s: float) -> CudaChannels | DeviceChannels:
    """Return the queues of a context on a GPU. Collective.

    Raises:
        UnsupportedError: on all ranks; what rocm-xio lacks. Or GPUs that cannot add to flags in each other's memory.
    """
    if torch.version.hip:
        return DeviceChannels(heap, memory.place, timeout_s)
    places = [str(m.payload["place"]) for m in heap.links.exchange(dict(place=memory.place), what="create queues")]
    for peer, there in enumerate(places):
        if not gpu.has_atomics(heap.device, there):
            raise UnsupportedError(
                f"rank {heap.rank}'s {heap.device} has no atomic operations on the memory of rank {peer}'s GPU (see "
                "`nvidia-smi topo -p2p a`), so a put cannot signal; use the collectives of a process group"
            )
    return CudaChannels(heap, timeout_s)


class CudaChannels(StreamChannels):
    """Queues from this rank's GPU to those of all ranks: of the host, and, once they are asked for, of kernels.

    Args:
        heap: on this rank's GPU.
        timeout_s: deadline of every wait.
    """

    def __init__(self, heap: SymmetricHeap, timeout_s: float) -> None:
        super().__init__(heap, timeout_s)
        self._kernels: ProxyChannels | None = None

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """As :meth:`StreamChannels.submit`; raises what a queue of kernels has failed with, too."""
        if self._kernels:
            self._kernels.quiet(to_rank, 0)
        super().submit(op, to_rank, channel, calls, wait)

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """As :meth:`StreamChannels.quiet`; raises what a queue of kernels has failed with, too."""
        if self._kernels:
            self._kernels.quiet(to_rank, 0)
        super().quiet(to_rank, channel)

    def contexts(self) -> list[Context]:
        """Return what kernels need to write into queues of their own to each rank, by rank."""
        if self._kernels is None:
            self._kernels = ProxyChannels(self._heap, Cuda(self._heap.device), self._timeout_s)
        return self._kernels.contexts()

    def close(self, error: IrisError) -> None:
        """As :meth:`StreamChannels.close`, and :meth:`ProxyChannels.close`."""
        super().close(error)
        if self._kernels:
            self._kernels.close(error)


class DeviceChannels(XioChannels):
    """Queues from this rank's GPU to those of all ranks. Collective to make.

    Args:
        heap: on this rank's GPU.
        place: what identifies that GPU.
        timeout_s: deadline of every wait.

    Raises:
        UnsupportedError: on all ranks. As :class:`XioChannels`, or rocm-xio is missing.
    """

    def __init__(self, heap: SymmetricHeap, place: str, timeout_s: float) -> None:
        links, problem = heap.links, None
        places = [str(m.payload["place"]) for m in links.exchange(dict(place=place), what="create SDMA queues")]
        self._page = page = DevicePage(links, _OF_A_QUEUE * heap.world)
        at = [_OF_A_QUEUE * peer for peer in range(heap.world)]
        words = [Words(page.host_address_of_word(n), page.address_of_word(n)) for n in at]
        try:
            super().__init__(xio.load(), heap, numbers(places, heap.rank, links.group), words, timeout_s)
        except IrisError as error:
            problem = str(error)
        for rank, said in enumerate(links.exchange(dict(problem=problem), what="create SDMA queues, done")):
            if said.payload["problem"]:
                if not problem:
                    super().close(UnsupportedError("a peer has none"))
                page.close()
                raise UnsupportedError(f"rank {rank}: {said.payload['problem']}")

    def close(self, error: IrisError) -> None:
        """As :meth:`XioChannels.close`; the words go too, unless an engine may still write them."""
        super().close(error)
        if self.is_over:
            self._page.close()


__all__ = ["CudaChannels", "DeviceChannels", "channels_on", "memory_on"]
