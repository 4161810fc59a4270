"""Plans: what one rank does in an operation of a group that spans hosts, as data.

A plan is a list of steps over named buffers: those of the operation, and temporary ones. Building one does no I/O, so
the plans of all ranks can be run together in one process, however many there are (tests/unit/test_multinode.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.program import Ref

PIECE_BYTES = 4 << 20
"""Large operations move in pieces of this size: one crosses between hosts while another is moved within them."""


class Span(NamedTuple):
    """``nbytes`` bytes of a buffer of this rank, from ``offset`` on."""

    buffer: str
    offset: int
    nbytes: int

    def part(self, start: int, nbytes: int) -> Span:
        """Return at most ``nbytes`` bytes of this from ``start`` on; none past its end."""
        return Span(self.buffer, self.offset + start, max(min(nbytes, self.nbytes - start), 0))

    def ref(self, rank: int) -> Ref:
        """Return where it begins, in memory of ``rank``."""
        return Ref(rank, self.buffer, self.offset)


class Copy(NamedTuple):
    """Copy bytes within this rank."""

    into: Span
    source: Span


class Widen(NamedTuple):
    """Convert elements of ``dtype`` to those of ``wide``."""

    into: Span
    source: Span
    dtype: str
    wide: str


class Exchange(NamedTuple):
    """Begin to send to and receive from ranks of other hosts; the buffers are in use until it has been awaited."""

    number: int
    sends: tuple[tuple[int, Span], ...]
    receives: tuple[tuple[int, Span], ...]


class Expect(NamedTuple):
    """Take what an exchange that comes later receives from now on, if the wire can. Then its senders need not be told
    first that there is room.
    """

    number: int
    receives: tuple[tuple[int, Span], ...]


class Await(NamedTuple):
    """Wait for an exchange, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Within:
    """An operation of the ranks of this host; ranks in it are indices on the host. Equal to itself alone, so that what
    is kept for it is found without a look at all that it says.
    """

    flow: Flow | Fold


class Combine(NamedTuple):
    """Reduce elements of ``dtype``: ``op`` over ``sources``, in the order given. ``into`` may be one of them."""

    into: Span
    sources: tuple[Span, ...]
    op: str
    dtype: str


class Finish(NamedTuple):
    """Convert elements of ``wide`` to ``dtype``, divided by ``divisor`` first."""

    into: Span
    source: Span
    wide: str
    dtype: str
    divisor: int


Step: TypeAlias = Copy | Widen | Exchange | Expect | Await | Within | Combine | Finish


@dataclass
class Plan:
    """One rank's steps.

    Attributes:
        steps: in order.
        temporaries: name -> bytes of each temporary buffer.
        exchanges: number of exchanges.
    """

    steps: list[Step] = field(default_factory=list)
    temporaries: dict[str, int] = field(default_factory=dict)
    exchanges: int = 0

    def temporary(self, name: str, nbytes: int) -> Span:
        """Return a temporary buffer of ``nbytes``; of the same memory for the same name."""
        self.temporaries[name] = max(self.temporaries.get(name, 0), nbytes)
        return Span(name, 0, nbytes)

    def exchange(self, sends: Iterable[tuple[int, Span]], receives: Iterable[tuple[int, Span]]) -> Exchange:
        """Return an :class:`Exchange` of what has any bytes."""
        self.exchanges += 1
        some = [tuple((peer, span) for peer, span in spans if span.nbytes) for spans in (sends, receives)]
        return Exchange(self.exchanges - 1, *some)

    def in_turn(self, pieces: Sequence[Sequence[list[Step]]]) -> None:
        """Add the steps of pieces, each in the same number of stages: while a later stage of one piece waits, an
        earlier stage of the next one has begun. Exchanges in which this rank has no part are left out.
        """
        depth = max((len(stages) for stages in pieces), default=0)
        steps = list[Step]()
        for turn in range(len(pieces) + depth - 1):
            for stage in range(depth):
                if 0 <= turn - stage < len(pieces):
                    steps += pieces[turn - stage][stage]
        idle = {s.number for s in steps if isinstance(s, Exchange) and not s.sends and not s.receives}
        self.steps += [s for s in steps if not isinstance(s, Exchange | Expect | Await) or s.number not in idle]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other hosts."""
        return sum(span.nbytes for step in self.steps if isinstance(step, Exchange) for _, span in step.sends)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name -> bytes of each buffer that this rank's own steps reach; of a plan that is complete."""
        sizes = dict(self.temporaries)
        for step in self.steps:
            for span in spans_of(step):
                sizes[span.buffer] = max(sizes.get(span.buffer, 0), span.offset + span.nbytes)
        return sizes


def spans_of(step: Step) -> list[Span]:
    """Return the spans that a step reads or writes; none of one within the host, which knows addresses alone."""
    if isinstance(step, Exchange):
        return [span for _, span in (*step.sends, *step.receives)]
    if isinstance(step, Combine):
        return [step.into, *step.sources]
    return [step.into, step.source] if isinstance(step, Copy | Widen | Finish) else []


def copied(into: Span, source: Span) -> list[Step]:
    """Return the step that copies, if there is anything to copy."""
    return [Copy(into, source)] if into != source and source.nbytes else []


def gathered_within(name: str, index: int, parts: Sequence[Span]) -> list[Step]:
    """Return the all-gather within the host, in place: every rank has its own of ``parts`` and gets the others."""
    mine, peers = parts[index], [(index + k) % len(parts) for k in range(1, len(parts))]
    sends = tuple(Part(p, mine.nbytes, mine.ref(index)) for p in peers if mine.nbytes)
    receives = tuple(Part(p, parts[p].nbytes, parts[p].ref(index)) for p in peers if parts[p].nbytes)
    return [Within(Flow(name, sends, receives, to_all=True))] if sends or receives else []


def folded_within(name: str, op: str, dtype: str, index: int, operands: Sequence[Span], result: Span) -> list[Step]:
    """Return the reduce-scatter within the host: rank k gets the reduction of ``operands[k]`` of all ranks, this one in
    ``result``.
    """
    parts = tuple(Part(k, span.nbytes, span.ref(index)) for k, span in enumerate(operands) if span.nbytes)
    into = result.ref(index) if operands[index].nbytes else None
    return [Within(Fold(name, op, dtype, parts, into))] if parts else []


def folded_by_all(name: str, op: str, dtype: str, index: int, operand: Span, result: Span) -> list[Step]:
    """Return the all-reduce within the host: every rank gets the reduction of all operands in ``result``."""
    part = Part(index, operand.nbytes, operand.ref(index))
    return [Within(Fold(name, op, dtype, (part,), result.ref(index), to_all=True))]
