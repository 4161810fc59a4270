"""The queues of a one-sided context whose heap is on a GPU: an AMD GPU's own, or those of a proxy."""

from __future__ import annotations

import torch

from iris_pg.copy_engine import xio
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


def channels_on(heap: SymmetricHeap, memory: gpu.DeviceMemory, timeout_s: float) -> DeviceChannels | ProxyChannels:
    """Return the queues of a context on a GPU. Collective on AMD GPUs.

    Raises:
        UnsupportedError: on all ranks; what rocm-xio lacks.
    """
    if torch.version.hip:
        return DeviceChannels(heap, memory.place, timeout_s)
    return ProxyChannels(heap, Cuda(memory.device), timeout_s)


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


__all__ = ["DeviceChannels", "channels_on", "memory_on"]
