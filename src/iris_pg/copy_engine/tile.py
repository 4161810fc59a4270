"""A rectangle of elements that one packet copies: where it lies, whether it overlaps itself, and its packet. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from iris_pg.copy_engine import packets
from iris_pg.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` rows of ``width_bytes`` bytes, a pitch apart; at least one of each."""

    dst: int
    src: int
    rows: int
    width_bytes: int
    dst_pitch_bytes: int
    src_pitch_bytes: int

    @classmethod
    def of_elements(
        cls, dst: int, src: int, data_size: int, height: int, width: int, dst_stride: int, src_stride: int
    ) -> Tile | None:
        """Return the tile of ``height`` x ``width`` elements of ``data_size`` bytes, or None when it has no element.

        Raises:
            ArgumentError: a negative number, or a stride that is neither 0 (contiguous) nor at least the width.
        """
        if data_size < 1 or min(height, width, dst_stride, src_stride) < 0:
            raise ArgumentError(
                f"data_size {data_size}, height {height}, width {width}, src_stride {src_stride}, dst_stride "
                f"{dst_stride}; data_size is at least 1 byte, and the others count elements and are not negative"
            )
        if not height or not width:
            return None
        for name, stride in (("src_stride", src_stride), ("dst_stride", dst_stride)):
            if height > 1 and 0 < stride < width:
                raise ArgumentError(
                    f"{name} {stride} is less than the width {width}; it is 0 (contiguous) or at least the width"
                )
        if height == 1:
            dst_stride = src_stride = width
        return cls(
            dst, src, height, width * data_size, (dst_stride or width) * data_size, (src_stride or width) * data_size
        )

    @property
    def dst_span_bytes(self) -> int:
        """Bytes from the first of the destination to its last, gaps included."""
        return (self.rows - 1) * self.dst_pitch_bytes + self.width_bytes

    @property
    def src_span_bytes(self) -> int:
        """Bytes from the first of the source to its last, gaps included."""
        return (self.rows - 1) * self.src_pitch_bytes + self.width_bytes

    @property
    def is_in_place(self) -> bool:
        """Whether every byte would be copied to itself."""
        return self.dst == self.src and self.dst_pitch_bytes == self.src_pitch_bytes

    def overlaps(self) -> bool:
        """Return whether a byte is in both the source and the destination."""
        if self.dst >= self.src + self.src_span_bytes or self.src >= self.dst + self.dst_span_bytes:
            return False
        # A source row can only touch the last destination row that starts at or before it, and the one after that.
        starts = self.src - self.dst + self.src_pitch_bytes * torch.arange(self.rows)
        below = torch.div(starts, self.dst_pitch_bytes, rounding_mode="floor")
        for row in (below, below + 1):
            touches = (starts - row * self.dst_pitch_bytes).abs() < self.width_bytes
            if bool((touches & (row >= 0) & (row < self.rows)).any()):
                return True
        return False

    def packets(self) -> list[bytes]:
        """Return the packets that copy it: one sub-window."""
        packet = packets.copy_sub_window(
            dst=self.dst,
            src=self.src,
            width_bytes=self.width_bytes,
            n_rows=self.rows,
            dst_pitch_bytes=self.dst_pitch_bytes,
            src_pitch_bytes=self.src_pitch_bytes,
        )
        return [packet]
