"""Programs: what one rank does in a collective, as data.

A :class:`Program` is a list of steps: copies, reductions, and the flags that order them. It is pure data, without
pointers, so it can be printed, hashed and cached, run by any copy engine, and verified together with the programs of
the other ranks (:mod:`iris_pg.verify`). Collectives build programs, copy engines run them; this module does neither.

Two rules give a program its meaning:

1. Steps of one lane happen one after another, in the order written. Lanes of a rank are independent of each other and
   of all other ranks, except where flags order them; all lanes begin at the program's start, and the program ends when
   all of them have.
2. The order written is a serial schedule: executed one step after another on every rank, the programs of a group end.
   So an engine may merge lanes, in the order written, and the programs still end.

Flags are mailboxes (:class:`Signal`, :class:`Offer`, :class:`Take`) or counters (:class:`Add`, :class:`Wait`), never
both. A mailbox is a 32-bit word at its reader, 0 when empty. One mailbox has one writer and one reader, and a writer
never signals before the reader took the previous signal; it knows, directly or through a chain of other flags. The word
carries a *tag* and not a bare 1: it costs the same, and a rank that is in another operation than its peer is noticed at
once, because the tag that it finds is not the one that it takes.

A rank's own memory is not mapped by others. Where the machine lets them read it all the same, an :class:`Offer` tells
where it is, and a :class:`Pull` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from iris_pg.errors import ArgumentError

MAX_WORD = 2**32 - 1
"""Largest tag, and largest value that a Wait compares with: flags are polled as unsigned 32-bit words."""

RECEIVING = 1
"""The lane of what a rank receives, in programs with several lanes; it sends in all others."""

LANES = 3
"""Most lanes of a program."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A byte address: whose memory, which buffer, where in it.

    Args:
        rank: rank in the group whose memory it is.
        buffer: "in" and "out" (the user's tensors), "heap", "staging", "flags", or any name the engine resolves.
        offset: bytes from the start of the buffer.
    """

    rank: int
    buffer: str
    offset: int

    def __add__(self, nbytes: int) -> Ref:
        """Return the address `nbytes` bytes further on."""
        return Ref(self.rank, self.buffer, self.offset + nbytes)

    def __str__(self) -> str:
        return f"rank{self.rank}.{self.buffer}[{self.offset:#x}]"

    def span(self, nbytes: int) -> str:
        """Return `nbytes` bytes from here as text: ``rank1.staging[0x40:0x80]``."""
        return f"rank{self.rank}.{self.buffer}[{self.offset:#x}:{self.offset + nbytes:#x}]"

    def rows(self, width_bytes: int, rows: int, pitch_bytes: int) -> str:
        """Return a rectangle as text, its first row and how it repeats: ``rank1.out[0x0:0x8 x 4 rows, pitch 0x20]``."""
        return f"{self.span(width_bytes)[:-1]} x {rows} rows, pitch {pitch_bytes:#x}]"


class _Move:
    """A step that moves bytes from `src` to `dst`."""

    __slots__ = ()
    dst: Ref
    src: Ref

    def refs(self) -> tuple[Ref, ...]:
        """Return the addresses that the step names."""
        return self.dst, self.src


class _FlagStep:
    """A step that writes or polls `flag`."""

    __slots__ = ()
    flag: Ref

    def refs(self) -> tuple[Ref, ...]:
        """Return the addresses that the step names."""
        return (self.flag,)


@dataclass(frozen=True, slots=True)
class Copy(_Move):
    """Copy `nbytes` bytes from `src` to `dst`; the two do not overlap.

    Raises:
        ArgumentError: `nbytes` is less than 1, or `lane` is negative.
    """

    dst: Ref
    src: Ref
    nbytes: int
    lane: int = 0

    def __post_init__(self) -> None:
        _check_size("copy", "nbytes", self.nbytes)
        _check_lane("copy", self.lane)

    def __str__(self) -> str:
        return f"copy {self.dst.span(self.nbytes)} <- {self.src.span(self.nbytes)}"


@dataclass(frozen=True, slots=True)
class Copy2D(_Move):
    """Copy a rectangle: `rows` rows of `width_bytes` bytes, row i at ``i * pitch`` bytes after the first.

    Raises:
        ArgumentError: `width_bytes` or `rows` is less than 1, a pitch is less than the width, or `lane` is negative.
    """

    dst: Ref
    src: Ref
    width_bytes: int
    rows: int
    dst_pitch_bytes: int
    src_pitch_bytes: int
    lane: int = 0

    def __post_init__(self) -> None:
        _check_size("copy2d", "width_bytes", self.width_bytes)
        _check_size("copy2d", "rows", self.rows)
        for name, pitch in (("dst_pitch_bytes", self.dst_pitch_bytes), ("src_pitch_bytes", self.src_pitch_bytes)):
            if pitch < self.width_bytes:
                raise ArgumentError(
                    f"copy2d: {name}={pitch} is less than width_bytes={self.width_bytes}; a pitch is the distance in "
                    "bytes between the starts of two rows, which do not overlap; pass the row length of the whole "
                    "tensor in bytes"
                )
        _check_lane("copy2d", self.lane)

    def __str__(self) -> str:
        dst = self.dst.rows(self.width_bytes, self.rows, self.dst_pitch_bytes)
        return f"copy2d {dst} <- {self.src.rows(self.width_bytes, self.rows, self.src_pitch_bytes)}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Set each element of `dst` to `op` over the elements of `sources` at the same place, in the order given.

    An element is accumulated in a type that is wide enough (float32 for 16-bit and 8-bit floating point, complex64 for
    complex32, else its own) and rounded once, so every rank that reduces the same bytes gets the same bits. `dst` may
    be one of the sources (in place), and overlaps none in part; sources may overlap each other.

    Args:
        dst: first byte of the result.
        sources: first byte of each operand, two or more.
        nbytes: bytes of the result, and of each operand; whole elements.
        dtype: element type by its torch name ("float32", "bfloat16", ...).
        op: "sum", "avg" (the sum, divided by the number of sources before it is rounded), "product", "min", "max",
            "band", "bor" or "bxor".

    Raises:
        ArgumentError: `sources` is not a tuple or has less than two, `nbytes` is less than 1, or `lane` is negative.
    """

    dst: Ref
    sources: tuple[Ref, ...]
    nbytes: int
    dtype: str
    op: str
    lane: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sources, tuple):
            raise ArgumentError(
                f"reduce: sources is a {type(self.sources).__name__}; a step is immutable, so that it can be cached; "
                "pass tuple(sources)"
            )
        if len(self.sources) < 2:
            raise ArgumentError(
                f"reduce: {len(self.sources)} sources; it takes two or more; for one use Copy, or nothing in place"
            )
        _check_size("reduce", "nbytes", self.nbytes)
        _check_lane("reduce", self.lane)

    def refs(self) -> tuple[Ref, ...]:
        """Return the addresses that the step names."""
        return self.dst, *self.sources

    def __str__(self) -> str:
        sources = ", ".join(map(str, self.sources))
        return f"reduce {self.dst.span(self.nbytes)} <- {self.op} as {self.dtype} of {sources}"


@dataclass(frozen=True, slots=True)
class Signal(_FlagStep):
    """Write `tag` into the mailbox `flag`, after all earlier steps of this lane have happened.

    The mailbox lies in the reader's memory (``flag.rank`` is the reader) and must be empty: see the module's rules.

    Raises:
        ArgumentError: `tag` is not in 1..2**32-1 (0 means empty), or `lane` is negative.
    """

    flag: Ref
    tag: int = 1
    lane: int = 0

    def __post_init__(self) -> None:
        _check_word("signal", "tag", self.tag, MAX_WORD)
        _check_lane("signal", self.lane)

    def __str__(self) -> str:
        return f"signal {self.flag} = {self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Signal):
    """Write the address of `src`, in this rank's own memory, beside the mailbox `flag`; then signal `tag` in it.

    The reader takes it and may :class:`Pull` from there. When it may no more is for another flag to say.
    """

    src: Ref

    def refs(self) -> tuple[Ref, ...]:
        """Return the addresses that the step names."""
        return self.flag, self.src

    def __str__(self) -> str:
        return f"offer {self.flag} = {self.tag}, {self.src}"


@dataclass(frozen=True, slots=True)
class Take(_FlagStep):
    """Wait until the mailbox `flag`, in this rank's own memory, holds `tag`, then write 0: it is empty again.

    Args:
        writer: rank that signals it, for the message when it does not come.

    Raises:
        ArgumentError: `tag` is not in 1..2**32-1 (0 means empty), or `lane` is negative.
    """

    flag: Ref
    writer: int
    tag: int = 1
    lane: int = 0

    def __post_init__(self) -> None:
        _check_word("take", "tag", self.tag, MAX_WORD)
        _check_lane("take", self.lane)

    def __str__(self) -> str:
        return f"take {self.flag} == {self.tag} from rank {self.writer}"


@dataclass(frozen=True, slots=True)
class Pull:
    """Copy `nbytes` bytes to `dst` from `offset` bytes after the address that the last :class:`Offer` taken from `flag`
    told. The take comes before it on its lane.

    Raises:
        ArgumentError: `nbytes` is less than 1, or `offset` or `lane` is negative.
    """

    dst: Ref
    flag: Ref
    writer: int
    nbytes: int
    offset: int = 0
    lane: int = 0

    def __post_init__(self) -> None:
        _check_size("pull", "nbytes", self.nbytes)
        if self.offset < 0:
            raise ArgumentError(f"pull: offset={self.offset}; it counts bytes from what was offered; pass 0 or more")
        _check_lane("pull", self.lane)

    def refs(self) -> tuple[Ref, ...]:
        """Return the addresses that the step names."""
        return self.dst, self.flag

    def __str__(self) -> str:
        offered = f"[{self.offset:#x}:{self.offset + self.nbytes:#x}] of rank {self.writer}'s offer at {self.flag}"
        return f"pull {self.dst.span(self.nbytes)} <- {offered}"


@dataclass(frozen=True, slots=True)
class Add(_FlagStep):
    """Add `value` to the counter `flag` atomically, after all earlier steps of this lane have happened.

    Raises:
        ArgumentError: `width_bytes` is not 4 or 8, `value` does not fit in it or is 0, or `lane` is negative.
    """

    flag: Ref
    value: int
    width_bytes: int = 4
    lane: int = 0

    def __post_init__(self) -> None:
        if self.width_bytes not in (4, 8):
            raise ArgumentError(
                f"add: width_bytes={self.width_bytes}; a counter is 4 or 8 bytes wide, as copy engines have atomics of "
                "those two sizes; pass 4 or 8"
            )
        _check_word("add", "value", self.value, 2 ** (8 * self.width_bytes) - 1)
        _check_lane("add", self.lane)

    def __str__(self) -> str:
        return f"add {self.flag} += {self.value} ({self.width_bytes} bytes)"


@dataclass(frozen=True, slots=True)
class Wait(_FlagStep):
    """Wait until the low 32 bits of the counter `flag`, unsigned, are at least `value`; leave it as it is.

    Raises:
        ArgumentError: `value` is not in 1..2**32-1 (0 waits for nothing), or `lane` is negative.
    """

    flag: Ref
    value: int
    lane: int = 0

    def __post_init__(self) -> None:
        _check_word("wait", "value", self.value, MAX_WORD)
        _check_lane("wait", self.lane)

    def __str__(self) -> str:
        return f"wait {self.flag} >= {self.value}"


Step: TypeAlias = Copy | Copy2D | Pull | Reduce | Signal | Take | Add | Wait


@dataclass(frozen=True)
class Program:
    """The steps of one rank of a group, in the order written.

    Args:
        rank: rank in the group that runs it.
        world: number of ranks in the group.
        steps: the steps; may be empty.
        name: what it does, for printing.

    Raises:
        ArgumentError: `rank`, or a rank that a step names, is not in ``0..world-1``; or `steps` is not a tuple.
    """

    rank: int
    world: int
    steps: tuple[Step, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ArgumentError(
                f"program: rank={self.rank} with world={self.world}; a rank is in 0..world-1; pass the rank in the "
                "group, not the global rank"
            )
        if not isinstance(self.steps, tuple):
            raise ArgumentError(
                f"program: steps is a {type(self.steps).__name__}; a program is immutable, so that it can be cached; "
                "pass tuple(steps)"
            )
        for index, step in enumerate(self.steps):
            ranks = [ref.rank for ref in step.refs()]
            if isinstance(step, Take | Pull):
                ranks.append(step.writer)
            for rank in ranks:
                if not 0 <= rank < self.world:
                    raise ArgumentError(
                        f"program: step {index} `{step}` names rank {rank} with world={self.world}; a rank is in "
                        "0..world-1; pass the rank in the group, not the global rank"
                    )

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        """Return a title and one aligned line per step: index, lane, verb, operands."""
        title = f"{self.name or 'program'}: rank {self.rank} of {self.world}, {len(self)} steps"
        index_width = len(str(len(self) - 1))
        lane_width = max((len(str(step.lane)) for step in self.steps), default=1)
        lines = [f"{title}, {self.nbytes_moved()} bytes moved"]
        for index, step in enumerate(self.steps):
            verb, _, operands = str(step).partition(" ")
            lines.append(f"  {index:>{index_width}}  lane {step.lane:>{lane_width}}  {verb:<6}  {operands}")
        return "\n".join(lines)

    def then(self, other: Program) -> Program:
        """Return the program that does this one and then `other`, lane by lane: nothing is added between the two.

        Raises:
            ArgumentError: `other` is of another rank or world.
        """
        if (self.rank, self.world) != (other.rank, other.world):
            raise ArgumentError(
                f"program: rank {self.rank} of {self.world} then rank {other.rank} of {other.world}; both must be "
                "programs of one rank of one group; join the programs rank by rank"
            )
        name = " then ".join(name for name in (self.name, other.name) if name)
        return Program(self.rank, self.world, self.steps + other.steps, name)

    def nbytes_moved(self) -> int:
        """Return the bytes that this rank's steps write by copies and reductions, flags not counted."""
        total = 0
        for step in self.steps:
            if isinstance(step, Copy | Pull | Reduce):
                total += step.nbytes
            elif isinstance(step, Copy2D):
                total += step.width_bytes * step.rows
        return total


def _check_size(verb: str, name: str, value: int) -> None:
    if value < 1:
        raise ArgumentError(
            f"{verb}: {name}={value}; it must be at least 1, as zero bytes produce no copy step; leave the step out"
        )


def _check_word(verb: str, name: str, value: int, largest: int) -> None:
    if not 1 <= value <= largest:
        raise ArgumentError(f"{verb}: {name}={value}; it must be in 1..{largest}; pass a positive value that fits")


def _check_lane(verb: str, lane: int) -> None:
    if lane < 0:
        raise ArgumentError(f"{verb}: lane={lane}; lanes are numbered from 0; pass 0 or more")
