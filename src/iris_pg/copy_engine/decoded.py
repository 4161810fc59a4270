"""SDMA packets as the engine reads them: one small object for each (:mod:`iris_pg.copy_engine.decoder` makes them).

The software engine executes these, and traces and dumps of queues show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, TypeAlias

# Dataclasses with slots are built in about two thirds of the time of named tuples (a frozen one takes three times as
# long), and two packets are equal only if their types are. Sizes, pitches and extents are true values, not "minus one".
# ``size_bytes`` is the length of the packet in the ring.


class Comparison(IntEnum):
    """How a poll compares ``memory & mask`` with the reference: unsigned, 32 bits (``POLL_REGMEM_HEADER_func``)."""

    ALWAYS = 0
    LESS = 1
    LESS_EQUAL = 2
    EQUAL = 3
    NOT_EQUAL = 4
    GREATER_EQUAL = 5
    GREATER = 6


class Operation(IntEnum):
    """What an atomic does, whatever its width; the numbers are those of ``TC_OP_ATOMIC_*_RTN_32``."""

    SWAP = 7
    CMPSWAP = 8
    ADD = 15
    SUB = 16
    SMIN = 17
    UMIN = 18
    SMAX = 19
    UMAX = 20
    AND = 21
    OR = 22
    XOR = 23
    INC = 24
    DEC = 25


@dataclass(slots=True)
class Nop:
    """Skip ``n_dwords`` dwords, the header included."""

    n_dwords: int

    @property
    def size_bytes(self) -> int:
        """Length of the packet in the ring."""
        return 4 * self.n_dwords


@dataclass(slots=True)
class CopyLinear:
    """Copy ``nbytes`` bytes."""

    dst: int
    src: int
    nbytes: int

    size_bytes: ClassVar[int] = 28


@dataclass(slots=True)
class CopySubWindow:
    """Copy ``n_slices`` x ``n_rows`` x ``width_bytes``; a side starts at ``base + x + y * pitch + z * slice_pitch``."""

    dst: int
    src: int
    width_bytes: int
    n_rows: int
    n_slices: int
    dst_pitch_bytes: int
    src_pitch_bytes: int
    dst_slice_pitch_bytes: int
    src_slice_pitch_bytes: int
    dst_x: int  # bytes
    dst_y: int  # rows
    dst_z: int  # slices
    src_x: int
    src_y: int
    src_z: int

    size_bytes: ClassVar[int] = 80


@dataclass(slots=True)
class PollRegMem:
    """Wait until ``(u32 at address & mask) func reference``, or ``retry_count`` reads unless it is 0xfff."""

    address: int
    reference: int
    mask: int
    func: Comparison
    interval: int
    retry_count: int

    FOREVER: ClassVar[int] = 0xFFF
    size_bytes: ClassVar[int] = 24

    @property
    def gives_up(self) -> bool:
        """Whether the engine goes on after a number of reads, whatever it has read."""
        return self.retry_count != self.FOREVER


@dataclass(slots=True)
class Atomic:
    """Do ``op`` on ``width_bytes`` bytes; ``operand`` and ``compare`` are unsigned and fit the width."""

    address: int
    op: Operation
    operand: int
    compare: int
    width_bytes: int
    returns: bool
    loop: bool
    interval: int

    size_bytes: ClassVar[int] = 32


@dataclass(slots=True)
class Fence:
    """Store the 32-bit ``value`` when everything before it has landed."""

    address: int
    value: int

    size_bytes: ClassVar[int] = 16


@dataclass(slots=True)
class ConstFill:
    """Fill ``nbytes`` bytes with ``value``, a dword or a byte (``unit_bytes`` 4 or 1)."""

    address: int
    value: int
    nbytes: int
    unit_bytes: int

    size_bytes: ClassVar[int] = 20


@dataclass(slots=True)
class Trap:
    """Raise an interrupt with a 28-bit ``context``."""

    context: int

    size_bytes: ClassVar[int] = 8


@dataclass(slots=True)
class Timestamp:
    """Store the 64-bit global clock."""

    address: int

    size_bytes: ClassVar[int] = 12


Packet: TypeAlias = Nop | CopyLinear | CopySubWindow | PollRegMem | Atomic | Fence | ConstFill | Trap | Timestamp
