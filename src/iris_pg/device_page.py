"""Words in host memory that the GPUs of all ranks and their hosts share: the flags of device_transport.py, and how far
this rank's GPU has come.

In host memory, because a host can then see what its GPU waits for, and release it, with no call of the driver: such
calls may block behind the very wait, and are forbidden while another thread captures a graph.
"""

from __future__ import annotations

from collections.abc import Callable

from iris_pg.flags import CREDIT, MAIL_SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.gpu import platform as gpu

_LINE = 64  # bytes; each word has a cache line
_PAGE = 4096  # bytes; what is registered is whole pages


class DevicePage:
    """The control pages of a group's ranks, mapped by this rank's host and GPU. Collective to make.

    Args:
        links: the group's links.
        words: number of words besides the flags.

    Attributes:
        heap: the pages as the host sees them; flags begin as for a group that has just been made.
        flags: where each rank's page is as the GPU sees it, by rank.
    """

    def __init__(self, links: Links, words: int) -> None:
        self.heap = heap = SymmetricHeap(links, 1, dict(words=_LINE * words))
        self._words = heap.areas["words"]
        ops = atomics()
        self._load32, self._store32 = ops.load32, ops.store32
        for slot in range(MAIL_SLOTS):  # messages between GPUs use both of their flags from the start
            for peer in range(heap.world):
                self._store32(heap.base + heap.control.emptied(slot, peer), CREDIT)
        nbytes = -(-(self._words + _LINE * words) // _PAGE) * _PAGE
        self._registered: list[int] = []
        self.flags: list[int] = []
        try:
            for base in heap.bases:
                self.flags.append(gpu.register(base, nbytes))
                self._registered.append(base)
            links.exchange({}, what="create flags for CUDA tensors")  # nobody writes one before all are as they begin
        except BaseException:
            self.close()
            raise

    def reader(self, number: int) -> Callable[[], int]:
        """Return what reads word ``number`` of this rank."""
        here, load = self.heap.base + self._words + _LINE * number, self._load32
        return lambda: load(here)

    def host_address_of_word(self, number: int) -> int:
        """Return where word ``number`` of this rank is as the host sees it."""
        return self.heap.base + self._words + _LINE * number

    def address_of_word(self, number: int) -> int:
        """Return where word ``number`` of this rank is as the GPU sees it."""
        return self.address_at(self.heap.rank, number)

    def address_at(self, rank: int, number: int) -> int:
        """Return where word ``number`` of a rank is as this rank's GPU sees it."""
        return self.flags[rank] + self._words + _LINE * number

    def word_of(self, rank: int, number: int) -> int:
        """Return word ``number`` of a rank."""
        return self._load32(self.heap.bases[rank] + self._words + _LINE * number)

    def load(self, offset: int) -> int:
        """Return this rank's flag at ``offset`` of the control page."""
        return self._load32(self.heap.base + offset)

    def store(self, offset: int, value: int) -> None:
        """Set this rank's flag at ``offset`` of the control page: a stream that waits for ``value`` goes on."""
        self._store32(self.heap.base + offset, value)

    def close(self) -> None:
        """Drop the pages, which no GPU may use any more. Idempotent."""
        for base in self._registered:
            gpu.unregister(base)
        self._registered = []
        self.heap.close()


__all__ = ["DevicePage"]
