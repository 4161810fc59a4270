"""Tensors in the symmetric heap that are given back when nobody uses them any more, as torch's own are.

FSDP2 makes its buffers with the group's ``allocate_tensor``, at every layer of every step, and never frees one. So
blocks are kept by size, and a block is idle again when the storage of its tensor, and of every view of it, is gone.

A tensor from the pool lies at the same offset on every rank as long as all ranks make and drop tensors of one size in
the same order: each takes the idle block that it has handed out longest ago. That one has most likely been idle for a
while, so it does not matter if the last reference to another goes a moment earlier on one rank than on the next. A call
is collective only when no block is idle. Where ranks differ after all (a tensor in a reference cycle goes when Python's
collector comes along) they find themselves in different calls, or in operations at different places of the heap. Both
are errors that say so, and no byte goes to a wrong place.

As with torch's own allocator, a block on a GPU belongs to the stream that was current when it was made, and is handed
out to no other: whoever uses it on others lets that stream wait for them, if only before its next use of the block. So
no stream waits for another because of a block, and what is gathered can overlap what is computed. Where the heap has no
room for a new block, one of another stream is handed out once the GPU has done all it was told, with a warning.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import deque
from typing import TypeAlias

import torch

from iris_pg.errors import HeapExhaustedError
from iris_pg.memory.allocator import align_up
from iris_pg.memory.heap import SymmetricHeap

log = logging.getLogger("iris_pg")

_Kind: TypeAlias = tuple[int, int]  # of blocks: nbytes, and torch's handle of their stream, 0 on CPUs

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
        self._idle: dict[_Kind, list[tuple[int, int]]] = {}  # -> (number when handed out last, offset)
        self._in_use: dict[_Kind, int] = {}  # -> number of blocks
        self._full_at: dict[
            int, int
        ] = {}  # nbytes of a block -> bytes of the heap in use when there was no room for it
        self._numbers = 0
        # Storages die in any thread, also in the middle of a call here: what they leave is only noted, and put in order
        # by the next call.
        self._returned: deque[tuple[_Kind, int, int]] = deque()
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
        kind = align_up(nbytes), self._stream()
        with self._lock:
            self._heap._check_open("allocate_tensor")
            offset = self._take(kind)
            self._numbers += 1
            self._in_use[kind] = self._in_use.get(kind, 0) + 1
            tensor, owner = self._heap.owned(offset, nbytes)
            end = weakref.finalize(owner, self._returned.append, (kind, self._numbers, offset))
            end.atexit = False
        return tensor.view(dtype)

    def _stream(self) -> int:
        device = self._heap.device
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0

    def _take(self, kind: _Kind) -> int:
        """Return the offset of an idle block, or of a new one."""
        if not self._find(kind) and self._in_use.get(kind):
            # A tensor may wait for Python's collector, which has come along on a peer. That peer would see an idle
            # block, and not come to a collective call.
            if time.monotonic() > self._collected + _COLLECT_S:
                gc.collect()
                self._collected = time.monotonic()
        if idle := self._find(kind):
            return _oldest(idle)
        size, _ = kind
        others = [idle for (n, _), idle in self._idle.items() if n == size and idle]
        used = self._heap._allocator.used_bytes
        if not others or used < self._full_at.get(size, used + 1):
            try:
                offset = self._heap.allocate(size)
                self.blocks += 1
                self.nbytes += size
                return offset
            except HeapExhaustedError as error:
                if not others:
                    raise
                if not self._full_at:
                    said = str(error)  # and not the error, which holds on to the tensor
                    log.warning("allocate_tensor hands blocks from stream to stream, which waits for the GPU: %s", said)
                self._full_at[size] = used
        if self._heap.device.type == "cuda":
            torch.cuda.synchronize(self._heap.device)  # whatever has used the block is done
        return _oldest(min(others, key=min))

    def _find(self, kind: _Kind) -> list[tuple[int, int]]:
        """Return the idle blocks of a kind, with those that have been returned by now."""
        while self._returned:
            returned, number, offset = self._returned.popleft()
            self._idle.setdefault(returned, []).append((number, offset))
            self._in_use[returned] -= 1
        return self._idle.get(kind, [])


def _oldest(idle: list[tuple[int, int]]) -> int:
    """Take out the block that was handed out longest ago; return its offset."""
    block = min(idle)
    idle.remove(block)
    return block[1]


__all__ = ["TensorPool"]
