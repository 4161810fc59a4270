"""What one rank does in an operation, before anyone decides how: the bytes it sends to and receives from each peer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from iris_pg.program import Copy, Ref


@dataclass(frozen=True)
class Part:
    """``nbytes`` bytes to or from ``peer``; more than 0, unless only the two ranks know how many.

    Args:
        here: where they are, or go, at this rank.
        there: for a zero-copy send, where they go in the peer's memory; for a receive that pulls, where they are there.
    """

    peer: int
    nbytes: int
    here: Ref
    there: Ref | None = None


@dataclass(frozen=True)
class Flow:
    """One rank's side of an operation.

    Args:
        name: of the operation.
        sends, receives: at most one part for each peer.
        own: the copy within this rank, if any.
        to_all: every sender sends the same bytes to all its peers, and every rank knows how many.
        zero_copy: the outputs are in the symmetric heap, and every send says where there.
        pulls: the inputs are in the symmetric heap, and every receive says where there.
    """

    name: str
    sends: tuple[Part, ...] = ()
    receives: tuple[Part, ...] = ()
    own: Copy | None = None
    to_all: bool = False
    zero_copy: bool = False
    pulls: bool = False

    def split(self, most: int) -> tuple[Flow, Flow]:
        """Return two flows of which this one consists: between ranks where no message is larger than ``most`` bytes,
        and between others. Both ranks of a message split it alike. The own copy goes where messages are.
        """
        large = {part.peer for part in (*self.sends, *self.receives) if part.nbytes > most}
        halves = [
            replace(
                self,
                sends=tuple(part for part in self.sends if (part.peer in large) == is_large),
                receives=tuple(part for part in self.receives if (part.peer in large) == is_large),
                own=None,
            )
            for is_large in (False, True)
        ]
        takes_own = 0 if any(part.nbytes for part in (*halves[0].sends, *halves[0].receives)) else 1
        halves[takes_own] = replace(halves[takes_own], own=self.own)
        return halves[0], halves[1]

    @property
    def is_empty(self) -> bool:
        """Whether it moves nothing."""
        return not (self.own or any(part.nbytes for part in (*self.sends, *self.receives)))


@dataclass(frozen=True)
class Fold:
    """One rank's side of an operation that reduces. A result is made of one operand of every rank, in the order of
    ranks.

    Args:
        name: of the operation.
        op, dtype: what is done to the elements, as in :class:`iris_pg.program.Reduce`.
        operands: this rank's operands, whole elements; each part's ``peer`` is the rank that gets the result, which may
            be this one. All ranks know which ranks get a result, and how long each result is.
        result: where this rank's own result goes, if it gets one. In place, exactly where its operand of it is.
        to_all: there is one result, and all ranks get it. ``operands`` is one part, with this rank as ``peer``.
    """

    name: str
    op: str
    dtype: str
    operands: tuple[Part, ...]
    result: Ref | None = None
    to_all: bool = False


def largest_part(flow: Flow | Fold) -> int:
    """Return the bytes of the largest message, or operand, of this rank's side; 0 where there is none."""
    parts = flow.operands if isinstance(flow, Fold) else (*flow.sends, *flow.receives)
    return max((part.nbytes for part in parts), default=0)
