"""A deterministic first-fit allocator of offsets.

It holds no memory: the same calls in the same order give the same offsets on every rank, which is what keeps a heap
symmetric.
"""

from __future__ import annotations

import zlib

from iris_pg.errors import ArgumentError

ALIGNMENT = 256  # bytes; a multiple of a cache line, and of the widest vector access of any GPU here


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of ``alignment`` that is >= ``nbytes``."""
    return -(-nbytes // alignment) * alignment


class Allocator:
    """First fit over ``[0, capacity)``; every block starts at a multiple of :data:`ALIGNMENT` and takes at least
    one.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._free: list[tuple[int, int]] = []  # (offset, nbytes), sorted by offset, never touching
        self._used: dict[int, int] = {}  # offset -> nbytes
        self._digest = 0

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` (a multiple of the alignment) at the end."""
        self._insert(self.capacity, nbytes)
        self.capacity += nbytes
        self._note(b"g", nbytes)

    def shortfall(self, nbytes: int) -> int:
        """Return by how many bytes the capacity must grow before ``nbytes`` fit; 0 when they fit now."""
        need = align_up(max(nbytes, 1))
        if any(size >= need for _, size in self._free):
            return 0
        at_end = self._free[-1] if self._free else (self.capacity, 0)
        return need - (at_end[1] if at_end[0] + at_end[1] == self.capacity else 0)

    def allocate(self, nbytes: int) -> int:
        """Take ``nbytes`` and return their offset. The caller has made room (:meth:`shortfall` is 0)."""
        need = align_up(max(nbytes, 1))
        for i, (offset, size) in enumerate(self._free):
            if size >= need:
                self._free[i : i + 1] = [(offset + need, size - need)] if size > need else []
                self._used[offset] = need
                self._note(b"a", need)
                return offset
        raise ArgumentError(f"no block of {need} bytes; shortfall() says what to grow by")

    def free(self, offset: int) -> None:
        """Give back the block at ``offset``.

        Raises:
            ArgumentError: no block in use starts there.
        """
        if offset not in self._used:
            raise ArgumentError(
                f"no block in use starts at offset {offset}; free() takes what allocate() returned, once"
            )
        self._insert(offset, self._used.pop(offset))
        self._note(b"f", offset)

    @property
    def used_bytes(self) -> int:
        """Bytes in use, alignment included."""
        return sum(self._used.values())

    def digest(self) -> int:
        """Return a 32-bit digest of every call so far; equal on ranks that made the same calls."""
        return self._digest

    def _note(self, kind: bytes, number: int) -> None:
        self._digest = zlib.crc32(kind + number.to_bytes(8, "little"), self._digest)

    def _insert(self, offset: int, nbytes: int) -> None:
        blocks = sorted([*self._free, (offset, nbytes)])
        merged = blocks[:1]
        for start, size in blocks[1:]:
            last, last_size = merged[-1]
            if last + last_size == start:
                merged[-1] = (last, last_size + size)
            else:
                merged.append((start, size))
        self._free = merged
