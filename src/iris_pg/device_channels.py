"""The queues of a one-sided context whose heap is on a GPU: streams of an NVIDIA GPU, and a proxy
for its kernels; or rocm-xio for an AMD one.
"""

from __future__ import annotations

import torch

from iris_pg.copy_engine import xio
from iris_pg.copy_engine.stream_channels import StreamChannels
from iris_pg.copy_engine.xio_channels import XioChannels
from iris_pg.copy_engine.xio_queue import WORDS_BYTES, Words
from iris_pg.device_page import DevicePage
from iris_pg.device_queues import numbers
from iris_pg.errors import IrisError, UnsupportedError
from iris_pg.flags import LINE
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.proxy_channels import Cuda, KernelPuts, KernelQueues

_OF_A_QUEUE = -(-WORDS_BYTES // LINE)  # words of the page, which are lines


def memory_on(device: torch.device) -> gpu.DeviceMemory:
    """Return the memory of a GPU that a context's heap may be made of.

    Raises:
        UnsupportedError: torch has no GPU, or what it needs is missing.
    """
    if device.type != "cuda" or not (torch.version.hip or torch.cuda.is_available()):
        raise UnsupportedError(f"a one-sided context on {device}; it is on the CPU, or on a GPU that torch sees")
    return gpu.DeviceMemory(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)


def channels_on(heap: SymmetricHeap, place: str, timeout_s: float) -> CudaChannels | DeviceChannels:
    """Return the queues from this rank's GPU to those of all ranks. Collective; see :class:`DeviceChannels`.

    Raises:
        UnsupportedError: as :class:`DeviceChannels`; or GPUs that cannot add to flags in each other's memory.
    """
    if torch.version.hip:
        return DeviceChannels(heap, place, timeout_s)
    places = [str(m.payload["place"]) for m in heap.links.exchange(dict(place=place), what="create queues")]
    for peer, there in enumerate(places):
        if not gpu.has_atomics(heap.device, there):
            raise UnsupportedError(
                f"rank {heap.rank}'s {heap.device} has no atomic operations on the memory of rank {peer}'s GPU (see "
                "`nvidia-smi topo -p2p a`), so a put cannot signal; use the collectives of a process group"
            )
    return CudaChannels(heap, timeout_s)


class CudaChannels(KernelPuts, StreamChannels):
    """Streams for what the host puts, and a proxy's queues for kernels. Arguments as :class:`StreamChannels`."""

    def __init__(self, heap: SymmetricHeap, timeout_s: float) -> None:
        super().__init__(heap, timeout_s)
        self.kernels = KernelQueues(heap, Cuda(heap.device), timeout_s)


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
