"""One-sided transfers as calls: checks the arguments of put, put_tile and put_tiles, and says what an engine is to do
for them. Moves nothing.

The calls of a transfer, in this order: a poll of the local flag, the copies, an addition to the remote flag.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch

from iris_pg import arguments
from iris_pg.copy_engine.calls import Call, Increase, Linear, Poll
from iris_pg.copy_engine.tile import Tile
from iris_pg.errors import ArgumentError, UnsupportedError, where
from iris_pg.memory.heap import SymmetricHeap, address_of

_U32 = (1 << 32) - 1
_FLAG_DTYPES = (torch.int32, torch.int64)

Tensor = torch.Tensor


class Encoder:
    """Makes the calls of transfers within one heap.

    Every method that takes ``op``, the name of the user's call, raises ArgumentError that begins with it.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        # How far the heap of each rank is from this rank's own, as mapped here.
        self._shifts = [base - heap.base for base in heap.bases]

    def put(self, op: str, source: Tensor, to_rank: int, target: Tensor | None) -> list[Call]:
        """Return the calls that copy a tensor to where ``target``, or the tensor itself, lies on ``to_rank``."""
        src, nbytes = self._in_heap(op, "from_tensor", source)
        dst = src
        if target is not None:
            dst, _ = self._in_heap(op, "to_tensor", target)
            if target.dtype != source.dtype or target.numel() != source.numel():
                raise self._wrong(
                    f"{op}: to_tensor has {target.numel()} elements of {target.dtype} and from_tensor "
                    f"{source.numel()} of {source.dtype}; they must be the same"
                )
        dst += self._shifts[to_rank]
        if not nbytes or dst == src:
            return []
        if abs(dst - src) < nbytes:
            raise self._wrong(
                f"{op}: to_tensor begins {dst - src} bytes from from_tensor, of {nbytes} bytes: they overlap in "
                "part; on the same rank they are the same or apart"
            )
        return [Linear(dst, src, nbytes)]

    def tiles(self, op: str, to_rank: int, data_size: int, lists: Mapping[str, Sequence[int]]) -> list[Call]:
        """Return the calls for several tiles.

        Args:
            lists: one number for each tile: addresses of source and destination, heights, widths, strides of source and
                destination, in this order; the keys are what the user calls them.
        """
        if len({len(numbers) for numbers in lists.values()}) > 1:
            told = ", ".join(f"{len(numbers)} {name}" for name, numbers in lists.items())
            raise self._wrong(f"{op}: lists of different lengths: {told}; each has one entry for each tile")
        tiles: list[Call] = []
        for i, numbers in enumerate(zip(*lists.values(), strict=True)):
            which = f"{op}: tile {i}" if op == "put_tiles" else op
            tile = self._tile(which, self._shifts[to_rank], data_size, *numbers)
            if tile:
                tiles.append(tile)
        return tiles

    def wait(self, op: str, flag: Tensor | int | None, value: int | None) -> list[Call]:
        """Return the calls that wait for ``flag >= value``; a flag that is an address is a 32-bit one."""
        if flag is None and value is None:
            return []
        if flag is None or value is None:
            given, missing = ("wait_value", "wait_flag") if flag is None else ("wait_flag", "wait_value")
            raise self._wrong(f"{op}: {given} without {missing}; give both, or neither")
        if isinstance(flag, Tensor):
            address, _ = self._flag(op, "wait_flag", flag)
        else:
            address = self._flag_address(op, "wait_flag", flag, self._heap.rank)
        value = self._integer(op, "wait_value", value)
        if not 0 <= value <= _U32:
            raise self._wrong(
                f"{op}: wait_value={value}; it takes 0..2**32-1: the low 32 bits of a flag are compared, unsigned"
            )
        return [Poll(address, value)]

    def signal(self, op: str, flag: Tensor | int | None, value: int, to_rank: int) -> list[Call]:
        """Return the calls that add ``value`` to ``to_rank``'s flag.

        Args:
            flag: this rank's tensor at the place of the flag, or the address of a 32-bit flag in ``to_rank``'s heap.
        """
        value = self._integer(op, "signal_value", value)
        if flag is None:
            if value != 1:
                raise self._wrong(f"{op}: signal_value={value} without signal_flag; give both, or neither")
            return []
        if isinstance(flag, Tensor):
            address, width_bytes = self._flag(op, "signal_flag", flag)
            address += self._shifts[to_rank]
        else:
            address, width_bytes = self._flag_address(op, "signal_flag", flag, to_rank), 4
        bits = 8 * width_bytes
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise self._wrong(f"{op}: signal_value={value} does not fit the {bits} bits of the flag")
        return [Increase(address, value & ((1 << bits) - 1), bits)]

    # ------------------------------------------------------------------------------------------------------------------

    def _in_heap(self, op: str, name: str, tensor: Tensor) -> tuple[int, int]:
        """Return the address and the number of bytes of a tensor that may be put."""
        arguments.check_tensor(op, name, tensor)
        if tensor.device != self._heap.device:
            place = "of CPU memory" if self._heap.device.type == "cpu" else f"on {self._heap.device}"
            raise UnsupportedError(f"{op}: {name} is on {tensor.device}; the context's heap is {place}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise self._wrong(
                f"{op}: {name} of size {tuple(tensor.size())} and stride {tensor.stride()} is not contiguous, or is a "
                "conjugate or negative view; copy it with .contiguous() or .resolve_conj() into a tensor of the "
                "heap, or use put_tile"
            )
        address, nbytes = address_of(tensor), tensor.numel() * tensor.element_size()
        if self._heap.offset_of(address, nbytes) is None:
            raise self._wrong(
                f"{op}: {name} is not in this rank's heap of this context; make it with ctx.zeros(...), ctx.empty(...) "
                "or the like, which all ranks call"
            )
        return address, nbytes

    def _flag(self, op: str, name: str, flag: Tensor) -> tuple[int, int]:
        """Return the address and the width in bytes of a flag."""
        arguments.check_tensor(op, name, flag)
        if flag.dtype not in _FLAG_DTYPES or flag.numel() != 1:
            raise self._wrong(
                f"{op}: {name} has {flag.numel()} elements of {flag.dtype}; a flag is one int32 or int64, such as "
                "flags[i] of flags = ctx.zeros(n, dtype=torch.int32)"
            )
        return self._in_heap(op, name, flag)

    def _flag_address(self, op: str, name: str, flag: int, owner: int) -> int:
        address = self._integer(op, name, flag)
        if address % 4 or self._heap.offset_of(address - self._shifts[owner], 4) is None:
            raise self._wrong(
                f"{op}: {name}={address:#x} is not the address of a 32-bit word in rank {owner}'s heap as mapped here; "
                f"heap.translate(flag.data_ptr(), {self._heap.rank}, {owner}) is one"
            )
        return address

    def _tile(
        self,
        op: str,
        shift: int,
        data_size: int,
        src: int,
        dst: int,
        height: int,
        width: int,
        src_stride: int,
        dst_stride: int,
    ) -> Tile | None:
        """Return a tile that may be put, or None when there is nothing to copy."""
        try:
            numbers = dst, src, data_size, height, width, dst_stride, src_stride
            tile = Tile.of_elements(*map(operator.index, numbers))
        except (ArgumentError, TypeError) as error:
            raise self._wrong(f"{op}: {error}") from None
        if tile is None:
            return None
        if self._heap.offset_of(tile.src, tile.src_span_bytes) is None:
            raise self._wrong(
                f"{op}: {tile.src_span_bytes} bytes from global_addr {tile.src:#x} are not all in this rank's heap"
            )
        if self._heap.offset_of(tile.dst - shift, tile.dst_span_bytes) is None:
            raise self._wrong(
                f"{op}: {tile.dst_span_bytes} bytes from dst_addr {tile.dst:#x} are not all in to_rank's heap as "
                "mapped here; heap.translate(address, cur_rank, to_rank) gives addresses in it"
            )
        if tile.is_in_place:
            return None
        if not shift and tile.overlaps():
            raise self._wrong(f"{op}: source and destination overlap in part; they are the same or apart")
        return tile

    def _integer(self, op: str, name: str, value: int) -> int:
        try:
            return operator.index(value)
        except TypeError:
            raise self._wrong(f"{op}: {name} is {type(value).__name__}; it takes an integer") from None

    def _wrong(self, text: str) -> ArgumentError:
        return ArgumentError(f"{text} {where(group=self._heap.links.group, rank=self._heap.rank)}")
