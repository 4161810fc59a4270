"""Tensors in the symmetric heap that are given back when nobody uses them any more, as torch's own are.

FSDP2 makes its buffers with the group's ``allocate_tensor``, at every layer of every step, and never frees one. So
blocks are kept by size, and a block is idle again when the storage of its tensor, and of every view of it, is gone.

A tensor from the pool lies at the same offset on every rank as long as all ranks make and drop tensors of one size in
the same order: each takes the idle block that it has handed out longest ago. That one has most likely been idle for a
while, so it does not matter if the last reference to another goes a moment earlier on one rank than on the next. A call
is collective only when no block is idle. Where ranks differ after all (a tensor in a reference cycle goes when Python's
collector comes along) they find themselves in different calls, or in operations at different places of the heap. Both
are errors that say so, and no byte goes to a wrong place.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque

import torch

from iris_pg.memory.allocator import align_up
from iris_pg.memory.heap import SymmetricHeap

_COLLECT_S = 1.0  # least time between two runs of Python's collector


class TensorPool:
    """A pool in a heap. Its methods may be called from any thread, by all ranks in one order.

    Attributes:
        blocks: number of blocks that the pool holds of the heap, idle or in use.
        nbytes: of all blocks.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        self.blocks = self.nbytes = 0
        self._lock = threading.RLock()
        self._idle: dict[int, list[tuple[int, int]]] = {}  # nbytes -> (number when handed out last, offset)
        self._in_use: dict[int, int] = {}  # nbytes -> number of blocks
        self._streams: dict[int, torch.cuda.Stream] = {}  # offset -> the stream that the block was handed out on last
        self._numbers = 0
        # Storages die in any thread, also in the middle of a call here: what they leave is only noted, and put in order
        # by the next call.
        self._returned: deque[tuple[int, int, int]] = deque()
        self._collected = -_COLLECT_S

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [numel] in the heap. Collective when no block of its size is idle.

        Raises:
            HeapExhaustedError, MismatchError, DeadlineError, PeerLostError, ClosedError: as
                :meth:`SymmetricHeap.empty`.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype, device=self._heap.device)
        size = align_up(nbytes)
        with self._lock:
            self._heap._check_open("allocate_tensor")
            offset = self._take(size)
            self._numbers += 1
            self._in_use[size] = self._in_use.get(size, 0) + 1
            self._follow(offset)
            tensor, owner = self._heap.owned(offset, nbytes)
            end = weakref.finalize(owner, self._returned.append, (size, self._numbers, offset))
            end.atexit = False
        return tensor.view(dtype)

    def _follow(self, offset: int) -> None:
        """Let the current stream of a GPU wait for the stream that a block was handed out on last.

        As with torch's own allocator, a block belongs to that stream: whoever uses it on others lets this one wait for
        them before the tensor goes.
        """
        if self._heap.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._heap.device)
        last = self._streams.get(offset)
        if last is not None and last != current:
            current.wait_stream(last)
        self._streams[offset] = current

    def _take(self, size: int) -> int:
        """Return the offset of an idle block, or of a new one."""
        if not self._find(size) and self._in_use.get(size):
            # A tensor may wait for Python's collector, which has come along on a peer. That peer would see an idle
            # block, and not come to a collective call.
            if time.monotonic() > self._collected + _COLLECT_S:
                gc.collect()
                self._collected = time.monotonic()
        idle = self._find(size)
        if idle:
            oldest = min(idle)
            idle.remove(oldest)
            return oldest[1]
        offset = self._heap.allocate(size)
        self.blocks += 1
        self.nbytes += size
        return offset

    def _find(self, size: int) -> list[tuple[int, int]]:
        """Return the idle blocks of a size, with those that have been returned by now."""
        while self._returned:
            nbytes, number, offset = self._returned.popleft()
            self._idle.setdefault(nbytes, []).append((number, offset))
            self._in_use[nbytes] -= 1
        return self._idle.get(size, [])


__all__ = ["TensorPool"]
