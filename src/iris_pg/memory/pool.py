"""Tensors in the symmetric heap that are given back when nobody uses them any more, as torch's own are.

FSDP2 makes its buffers with the group's ``allocate_tensor``, at every layer of every step, and never frees one. So
blocks are kept by size, and a block is idle again when nothing but the pool holds its storage: no tensor or view, and
nobody who has kept ``tensor.untyped_storage()``. That is looked at when a block is wanted, and costs nothing before.

A tensor from the pool lies at the same offset on every rank as long as all ranks make and drop tensors of one size in
the same order: each takes the idle block that it has handed out longest ago. That one has most likely been idle for a
while, so it does not matter if the last reference to another goes a moment earlier on one rank than on the next. A call
is collective only when no block is idle. Where ranks differ after all (a tensor in a reference cycle goes when Python's
collector comes along) they find themselves in different calls, or in operations at different places of the heap. Both
are errors that say so, and no byte goes to a wrong place.

As with torch's own allocator, a block on a GPU belongs to the stream that was current when it was made, and is handed
out to no other: whoever uses it on others lets that stream wait for them, if only before its next use of the block. So
no stream waits for another because of a block, and what is gathered can overlap what is computed. Where the heap has no
room for a new block, one of another stream is handed out once the GPU has done all it was told, with a warning; and
where there is none of its size, the blocks that are idle on all ranks are given back to the heap.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from sys import getrefcount
from typing import TypeAlias

import torch

from iris_pg.errors import HeapExhaustedError
from iris_pg.memory.allocator import align_up
from iris_pg.memory.heap import SymmetricHeap

log = logging.getLogger("iris_pg")

_Kind: TypeAlias = tuple[int, int]  # of blocks: nbytes, and torch's handle of their stream, 0 on CPUs

_USUAL = 1024  # most kinds of tensors that are remembered
_GIVEN = 2048  # most blocks that are given back at once; ranks tell each other their offsets
_COLLECT_S = 1.0  # seconds; least time between two runs of Python's collector

_use_count = torch._C._storage_Use_Count


class _Block:
    """Bytes that are handed out together, with one storage over them, which is made once and not for each tensor.

    Args:
        offset: of the bytes in the heap.
        memory: uint8 [nbytes], over them; nothing else holds its storage. No inference tensor.

    Attributes:
        number: of the call that handed it out last.
        dtype, numel: of the tensor that it handed out last.
        sample: another one like it, which stays here.
    """

    __slots__ = ("address", "cdata", "dtype", "nbytes", "number", "numel", "offset", "sample", "storage")

    def __init__(self, offset: int, memory: torch.Tensor) -> None:
        self.offset, self.number = offset, 0
        self.lie_over(memory)

    def lie_over(self, memory: torch.Tensor) -> None:
        """Take the storage of ``memory`` instead."""
        self.sample, self.dtype, self.numel = memory, memory.dtype, memory.numel()
        self.storage = memory.untyped_storage()
        self.cdata, self.address, self.nbytes = self.storage._cdata, memory.data_ptr(), self.numel

    def counts(self) -> tuple[int, int, int]:
        """Return by how many the storage is held in C++, its Python object in Python, and the first once more.

        Tensors, and what is made of them by NumPy or DLPack, count in C++; a storage that was asked for counts in
        Python when its tensor is gone. Another thread may take one for the other between two looks, in either
        direction, and is seen at the look before or behind.
        """
        return _use_count(self.cdata), getrefcount(self.storage), _use_count(self.cdata)

    def fits(self, nbytes: int) -> bool:
        """Return whether the storage is ``nbytes`` long and still over the block; ``share_memory_()`` moves it away."""
        return self.nbytes == nbytes and self.storage.data_ptr() == self.address

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor [nbytes / itemsize] over the storage: no view of another, with a version of its own."""
        if dtype is not self.dtype:
            with torch.inference_mode(False):
                empty = torch.empty(0, dtype=dtype, device=self.storage.device)
                self.sample = empty.set_(self.storage)
            self.dtype, self.numel = dtype, self.sample.numel()
        return self.sample.data  # which is one call of C++, and torch.empty and set_ are ten times as much


_IDLE = _Block(0, torch.frombuffer(bytearray(1), dtype=torch.uint8)).counts()  # when only the pool holds a storage


class TensorPool:
    """A pool in a heap. Its methods may be called from any thread, by all ranks in one order.

    Args:
        heap: where its tensors lie.
        stream: returns torch's handle of the current stream; None on CPUs.

    Attributes:
        blocks: number of blocks that the pool holds of the heap, idle or in use.
        nbytes: of all blocks.
    """

    def __init__(self, heap: SymmetricHeap, stream: Callable[[], int] | None = None) -> None:
        self._heap, self._stream = heap, stream
        self.blocks = self.nbytes = 0
        self._lock = threading.RLock()
        self._blocks: dict[_Kind, deque[_Block]] = {}  # in the order in which they were handed out last
        # (numel, dtype, stream) of a tensor -> the blocks of its kind
        self._usual: dict[tuple[int, torch.dtype, int], deque[_Block]] = {}
        # nbytes of a block -> bytes of the heap in use when there was no room for it
        self._full_at: dict[int, int] = {}
        self._numbers = 0
        self._collected = -_COLLECT_S

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [numel] in the heap. Collective when no block of its size is idle.

        Raises:
            HeapExhaustedError, MismatchError, DeadlineError, PeerLostError, ClosedError: as
                :meth:`SymmetricHeap.empty`.
        """
        stream = self._stream() if self._stream else 0
        with self._lock:
            # What is almost always so, and what the rest of this does then, in a few lines.
            if blocks := self._usual.get((numel, dtype, stream)):
                block = blocks[0]
                if (
                    block.numel == numel
                    and block.dtype is dtype
                    and block.counts() == _IDLE
                    and block.storage.data_ptr() == block.address
                ):
                    blocks.rotate(-1)
                    self._numbers = block.number = self._numbers + 1
                    return block.sample.data
            nbytes = numel * dtype.itemsize
            if nbytes == 0:
                return torch.empty(numel, dtype=dtype, device=self._heap.device)
            self._heap._check_open("allocate_tensor")
            kind = align_up(nbytes), stream
            block = self._take(kind, nbytes)
            if len(self._usual) >= _USUAL:
                self._usual.clear()
            if blocks := self._blocks.get(kind):
                self._usual[numel, dtype, stream] = blocks
            self._numbers += 1
            block.number = self._numbers
            # A storage is as long as its tensor, as those of torch.empty are: who copies or saves it gets no more.
            if not block.fits(nbytes):
                block.lie_over(self._memory(block.offset, nbytes))
            return block.tensor(dtype)

    def close(self) -> None:
        """Let go of the memory, of which each block stays until its tensors are gone. After the heap was closed;
        idempotent.
        """
        # Without the lock: another thread may be in a collective call, or have been when this process was forked.
        self._blocks, self._usual = {}, {}

    def _memory(self, offset: int, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._heap.bytes_at(self._heap.rank, offset, nbytes)

    def _take(self, kind: _Kind, nbytes: int) -> _Block:
        """Return an idle block, or a new one, which is now the last of its kind."""
        blocks = self._blocks.get(kind)
        if blocks is None:
            blocks = self._blocks[kind] = deque()
        block = _oldest_idle(blocks)
        if block is None and blocks and time.monotonic() > self._collected + _COLLECT_S:
            # A tensor may wait for Python's collector, which has come along on a peer. That peer would see an idle
            # block, and not come to a collective call.
            gc.collect()
            self._collected = time.monotonic()
            block = _oldest_idle(blocks)
        if block is not None:
            blocks.remove(block)
            blocks.append(block)
            return block
        block = self._new(kind[0], nbytes)
        blocks.append(block)
        if self._heap._closed:  # meanwhile, and close() may have come before the block
            self.close()
        return block

    def _new(self, size: int, nbytes: int) -> _Block:
        """Return a new block; where there is no room for one, take out the idle block of another stream that was handed
        out longest ago, or make room.
        """
        others = [(block, of) for (n, _), of in self._blocks.items() if n == size and (block := _oldest_idle(of))]
        used = self._heap._allocator.used_bytes
        if not others or used < self._full_at.get(size, used + 1):
            try:
                return self._allocated(size, nbytes)
            except HeapExhaustedError as error:
                if self._give_back(bool(others)):
                    return self._allocated(size, nbytes)
                if not others:
                    raise
                if not self._full_at:
                    said = str(error)  # and not the error, which holds on to the tensor
                    log.warning("allocate_tensor hands blocks from stream to stream, which waits for the GPU: %s", said)
                self._full_at[size] = used
        if self._heap.device.type == "cuda":
            torch.cuda.synchronize(self._heap.device)  # whatever has used the block is done
        block, blocks = min(others, key=lambda other: other[0].number)
        blocks.remove(block)
        return block

    def _allocated(self, size: int, nbytes: int) -> _Block:
        offset = self._heap.allocate(size)
        self.blocks += 1
        self.nbytes += size
        return _Block(offset, self._memory(offset, nbytes))

    def _give_back(self, has_others: bool) -> bool:
        """Give the heap the blocks that are idle on all ranks, and return whether there were any. Not where all ranks
        have an idle block of another stream. Collective: a heap is full on all ranks.
        """
        mine = {block.offset: (kind, block) for kind, of in self._blocks.items() for block in of if _is_idle(block)}
        card = dict(idle=sorted(mine)[:_GIVEN], has_others=has_others)
        messages = self._heap.links.exchange(card, what="allocate_tensor: give idle blocks back")
        if all(message.payload["has_others"] for message in messages):
            return False
        given = set(mine).intersection(*(message.payload["idle"] for message in messages))
        for offset in sorted(given):
            kind, block = mine[offset]
            self._blocks[kind].remove(block)
            self._heap.free(offset)
            self.blocks -= 1
            self.nbytes -= kind[0]
        return bool(given)


def _is_idle(block: _Block) -> bool:
    return block.counts() == _IDLE


def _oldest_idle(blocks: deque[_Block]) -> _Block | None:
    """Return the idle block that was handed out longest ago."""
    return next(filter(_is_idle, blocks), None)


__all__ = ["TensorPool"]
