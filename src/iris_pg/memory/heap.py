"""The symmetric heap: one segment per rank, mapped by every rank of the group at addresses that differ by a constant.

``translate(address, from_rank, to_rank) = bases[to_rank] + (address - bases[from_rank])``. A rank reserves ``world``
ranges of address space once and maps memory into them as it is used, so a base never moves. Layout of each range::

    [control page: flags, error words][private areas: staging, landing][user tensors ... up to heap_bytes]

What memory it is made of is the platform's: the machine's (platforms/cpu.py) or a GPU's (platforms/cuda.py, hip.py). A
heap on a GPU has no control page, as the host reads and writes one.

Making room is collective: all ranks of the group allocate the same sizes in the same order. A rank that differs, or
that has no memory left, is named in an error on every rank, before anything is handed out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from iris_pg.errors import ArgumentError, ClosedError, HeapExhaustedError, MismatchError, where
from iris_pg.flags import ControlPage
from iris_pg.memory.allocator import ALIGNMENT, Allocator, align_up
from iris_pg.memory.sharing import Links
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.cpu import HostMemory

_GROWTH = 16 << 20  # bytes; least that is mapped at once for user tensors


class Range(Protocol):
    """A range of address space that segments are mapped into; gone with the last tensor over it."""

    address: int

    def map(self, fd: int, offset: int, nbytes: int) -> None:
        """Map the segment ``fd`` at ``offset``."""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor [nbytes] over the range, which keeps it."""


class Memory(Protocol):
    """What a heap is made of, on one platform.

    Attributes:
        page: granularity of mappings in bytes.
        place: what ranks share: those with the same place take memory from each other.
        device: where its tensors are.
        grows: whether more can be mapped behind what is mapped. Else a range is mapped once, as a whole, and only then
            has an address.
    """

    page: int
    place: str
    device: torch.device
    grows: bool

    def available_bytes(self) -> int:
        """Return how much memory is left."""

    def create_segment(self, nbytes: int) -> int:
        """Return a descriptor of new memory, whole pages."""

    def reserve(self, nbytes: int) -> Range:
        """Return address space, whole pages."""


class SymmetricHeap:
    """Symmetric memory of one group on one rank.

    Args:
        links: the group's links; collective calls go over them.
        limit_bytes: most bytes that user tensors may take, per rank.
        areas: name -> nbytes of the group's own areas (staging slots and the like), the same on every rank.
        memory: what it is made of; the machine's memory when None. On a GPU there is no control page.

    Attributes:
        bases: address at which rank p's segment is mapped here, by rank.
        control: layout of the control page at the start of each segment.
        areas: name -> offset in the segment.
    """

    def __init__(
        self,
        links: Links,
        limit_bytes: int,
        areas: dict[str, int] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._memory: Memory = memory or HostMemory()
        self.device = self._memory.device
        self.links, self.rank, self.world = links, links.rank, links.world
        self.control = ControlPage(links.world)
        self.limit_bytes = limit_bytes
        self.areas: dict[str, int] = {}
        has_control = self.device.type == "cpu"
        at = self.control.nbytes if has_control else 0
        for name, nbytes in (areas or {}).items():
            self.areas[name] = at
            at += align_up(nbytes)
        page = self._memory.page
        self._user = align_up(at, page)  # offset of the first user tensor
        self._mapped = 0  # bytes of the segment mapped so far
        self._allocator = Allocator()
        self._freed = False  # since the device was last waited for
        self._end = self._user + align_up(limit_bytes, page)
        self._ranges = [self._memory.reserve(self._end) for _ in range(self.world)]
        self._closed = False
        grows = self._memory.grows
        asked: dict[str, object] = dict(areas=areas or {}, limit_bytes=limit_bytes, grows=grows)
        self._map_more(self._user if grows else self._end, "create the heap", asked)
        if not grows:
            self._allocator.grow(self._end - self._user)
        self.bases = [r.address for r in self._ranges]
        self.base = self.bases[self.rank]
        if has_control:
            store = atomics().store32
            for offset, value in self.control.initial().items():
                store(self.base + offset, value)

    # Addresses --------------------------------------------------------------------------------------------------------

    def translate(self, address: int, from_rank: int, to_rank: int) -> int:
        """Return where the byte that ``from_rank``'s copy of the heap has at ``address`` lies in ``to_rank``'s, both
        as mapped here.

        Raises:
            ArgumentError: a rank out of range, or an address outside ``from_rank``'s segment.
        """
        for name, rank in (("from_rank", from_rank), ("to_rank", to_rank)):
            if not 0 <= rank < self.world:
                raise ArgumentError(f"translate: {name}={rank} is outside 0..{self.world - 1} {self._where()}")
        offset = address - self.bases[from_rank]
        if not 0 <= offset < self._mapped:
            raise ArgumentError(
                f"translate: {address:#x} is not in rank {from_rank}'s segment "
                f"[{self.bases[from_rank]:#x}, {self.bases[from_rank] + self._mapped:#x}) {self._where()}"
            )
        return self.bases[to_rank] + offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset in the segment of ``nbytes`` at a local address, or None when they are not all in the user
        part.
        """
        offset = address - self.base
        return offset if self._user <= offset and offset + nbytes <= self._mapped else None

    def words_for(self, address: int) -> str:
        """Return where a flag lies, for messages: in the heap, or else."""
        at = self.offset_of(address, 4)
        return f"at {address:#x}" if at is None else f"at byte {at:#x} of its heap"

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether every byte of ``tensor``'s storage extent lies in this rank's part of the heap."""
        if tensor.device != self.device or tensor.layout != torch.strided:
            return False
        return self.offset_of(address_of(tensor), extent_bytes(tensor)) is not None

    # Allocation -------------------------------------------------------------------------------------------------------

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised contiguous tensor [size] in the heap, at the same offset on every rank. Collective.

        Args:
            size: the shape, as integers or one sequence.
            dtype: default ``torch.get_default_dtype()``.

        Raises:
            HeapExhaustedError: more than ``heap_bytes``, or more than the machine has; on every rank.
            MismatchError: ranks ask for different sizes, or have allocated or freed differently before; on every rank.
        """
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise ArgumentError(f"size={shape}; it takes non-negative integers {self._where()}")
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize  # type: ignore[arg-type]
        offset = self.allocate(nbytes)
        flat = self._ranges[self.rank].tensor(offset, max(nbytes, 1))[:nbytes]
        return flat.view(dtype).view(shape)  # type: ignore[arg-type]

    def allocate(self, nbytes: int) -> int:
        """Take ``nbytes`` at the same offset of every rank's segment and return that offset. Collective; errors as
        :meth:`empty`.
        """
        self._check_open("allocate")
        shortfall = self._allocator.shortfall(nbytes)
        room = self._end - self._user - self._allocator.capacity
        too_much = shortfall > room
        grow = 0 if too_much else min(room, align_up(max(shortfall, _GROWTH), self._memory.page)) if shortfall else 0
        request: dict[str, object] = dict(nbytes=nbytes, digest=self._allocator.digest())
        problem = None
        if too_much:
            problem = (
                f"{nbytes} bytes do not fit: {self._allocator.used_bytes} of {self.limit_bytes} bytes are in use; free "
                "tensors "
                "(heap.free) or raise heap_bytes (Options, IRIS_PG_HEAP_BYTES; heap_size= for iris_pg.iris)"
            )
        if self._freed and self.device.type != "cpu":
            # A block is handed out again when all that used it is done, here and, once all ranks have come to the
            # exchange below, at peers that write into it.
            torch.cuda.synchronize(self.device)
            self._freed = False
        self._map_more(grow, "allocate", request, problem)
        if grow:
            self._allocator.grow(grow)
        return self._user + self._allocator.allocate(nbytes)

    def free(self, tensor: torch.Tensor | int) -> None:
        """Give back a tensor made by :meth:`empty` (or its offset). All ranks free the same tensors in the same order.

        Using the tensor, or a view of it, afterwards is an error that cannot be seen here.

        Raises:
            ArgumentError: not a tensor that this heap handed out, or freed before.
        """
        self._check_open("free")
        if isinstance(tensor, torch.Tensor):
            if not self.is_symmetric(tensor):
                raise ArgumentError(f"free: the tensor is not in the heap of this group {self._where()}")
            offset = address_of(tensor) - self.base
        else:
            offset = tensor
        self._allocator.free(offset - self._user)
        self._freed = True

    def bytes_at(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        """Return rank's bytes [nbytes] as a uint8 tensor mapped here."""
        return self._ranges[rank].tensor(offset, nbytes)

    def close(self) -> None:
        """Drop every mapping; memory that a tensor still views stays until that tensor is gone. Idempotent."""
        self._closed = True
        self._ranges = []

    # ------------------------------------------------------------------------------------------------------------------

    def _map_more(self, nbytes: int, what: str, request: dict[str, object], problem: str | None = None) -> None:
        """Agree with all ranks on ``request``; then map ``nbytes`` more of every rank's segment."""
        room = self._memory.available_bytes() if nbytes and problem is None else 0
        card = dict(request=request, problem=problem, room=room, place=self._memory.place)
        messages = self.links.exchange(card, what=f"heap: {what}")
        self._agree(what, [m.payload for m in messages])
        if not nbytes:
            return
        # Decided by all ranks alike, and before any of them takes memory: one after another, they could take what the
        # machine does not have, and it would kill processes.
        for place in sorted({m.payload["place"] for m in messages}):
            rooms = [m.payload["room"] for m in messages if m.payload["place"] == place]
            if len(rooms) * nbytes > min(rooms):
                raise HeapExhaustedError(
                    f"{what}: {len(rooms)} x {nbytes} bytes of shared memory, for {len(rooms)} ranks, are more than "
                    f"the {min(rooms)} bytes that {place} has left; free memory, or use fewer or smaller heap tensors "
                    f"{self._where()}"
                )
        self._map(nbytes, what)

    def _map(self, nbytes: int, what: str) -> None:
        """Take ``nbytes`` of memory, and map it and that of all other ranks."""
        fd, problem = None, None
        try:
            fd = self._memory.create_segment(nbytes)
        except HeapExhaustedError as error:
            problem = str(error)
        try:
            messages = self.links.exchange(
                dict(problem=problem), [] if fd is None else [fd], what=f"heap: {what}, memory"
            )
            fds = [fd if rank == self.rank else m.fds[0] if m.fds else None for rank, m in enumerate(messages)]
            try:
                self._no_problem(what, [m.payload for m in messages])
                for range_, peer_fd in zip(self._ranges, fds, strict=True):
                    assert peer_fd is not None
                    range_.map(peer_fd, self._mapped, nbytes)
                self._mapped += nbytes
            finally:
                for peer_fd in fds:
                    if peer_fd is not None and peer_fd != fd:
                        os.close(peer_fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _agree(self, what: str, payloads: list[dict[str, object]]) -> None:
        mine = payloads[self.rank]["request"]
        if any(p["request"] != mine for p in payloads):
            asked = "; ".join(f"rank {rank}: {p['request']}" for rank, p in enumerate(payloads))
            raise MismatchError(
                f"{what}: ranks ask for different things ({asked}); symmetric memory is allocated and freed by all "
                "ranks, "
                f"the same sizes in the same order {self._where()}"
            )
        self._no_problem(what, payloads)

    def _no_problem(self, what: str, payloads: list[dict[str, object]]) -> None:
        problems = {rank: p["problem"] for rank, p in enumerate(payloads) if p["problem"]}
        if problems:
            rank, text = next(iter(problems.items()))
            others = f" (and on ranks {sorted(problems)[1:]})" if len(problems) > 1 else ""
            raise HeapExhaustedError(f"{what}, on rank {rank}{others}: {text} {self._where()}")

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"{what}: the heap is closed {self._where()}")

    def _where(self) -> str:
        return where(group=self.links.group, rank=self.rank)


def address_of(tensor: torch.Tensor) -> int:
    """Return where ``tensor`` begins, also when it has no element, where ``data_ptr()`` is 0."""
    return (
        tensor.data_ptr() or tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
    )


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes ``tensor`` spans from its first element to its last, gaps included; 0 when it has no
    element.
    """
    if tensor.numel() == 0:
        return 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


__all__ = ["ALIGNMENT", "SymmetricHeap", "address_of", "extent_bytes"]
