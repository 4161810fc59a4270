"""What ranks see of each other's operations in their control pages, for several ranks in one process."""

from __future__ import annotations

import pytest
import torch

from iris_pg.collectives.flow import Flow, Part
from iris_pg.errors import MismatchError
from iris_pg.flags import HISTORY, ControlPage
from iris_pg.program import Ref
from iris_pg.watch import Watch

WORLD = 2


class Links:
    """Stands for the links of a group from which nobody is gone."""

    group, closed = "test", False

    def lost(self):
        return []


class Heap:
    """Stands for one rank's view of a symmetric heap: the segments of all ranks lie in this process."""

    def __init__(self, rank, segments):
        self.rank, self.world, self.links, self.segments = rank, len(segments), Links(), segments
        self.control = ControlPage(self.world)
        self.bases = [segment.data_ptr() for segment in segments]
        self.base = self.bases[rank]

    def bytes_at(self, rank, offset, nbytes):
        return self.segments[rank][offset : offset + nbytes]


class Rank:
    """A rank whose engine has executed ``done`` operations of those begun."""

    def __init__(self, rank, segments):
        self.rank, self.done = rank, 0
        self.watch = Watch(Heap(rank, segments), lambda: self.done, tells_sizes=True)

    def begin(self, key, nbytes=8):
        sequence = self.watch.begin(key)
        (peer,) = {0, 1} - {self.rank}
        here = Ref(self.rank, "in", 0)
        flow = Flow("test", (Part(peer, nbytes, here),), (Part(peer, nbytes, here),))
        self.watch.sizes.tell(sequence, flow, self.watch.current()[0])
        self.watch.submitting(key)
        self.watch.submitted(sequence)


@pytest.fixture
def group():
    segments = [torch.zeros(ControlPage(WORLD).nbytes, dtype=torch.uint8) for _ in range(WORLD)]
    yield [Rank(rank, segments) for rank in range(WORLD)]
    del segments


FAR = 2 * HISTORY  # operations in flight, more than those of which a rank tells


@pytest.mark.parametrize("begun", [(1, 1), (1, FAR), (FAR, 1), (FAR, FAR), (FAR, HISTORY), (FAR, HISTORY + 1)])
@pytest.mark.parametrize("what", ["keys", "sizes", "nothing"])
def test_a_difference_is_found_by_a_rank_however_many_operations_are_in_flight(group, begun, what):
    """The first operations differ, and no rank has got past its own."""
    for rank, n in zip(group, begun, strict=True):
        for i in range(n):
            differs = rank.rank == 1 and i == 0
            key = ("b", 1) if differs and what == "keys" else ("a", 1)
            rank.begin(key, 9 if differs and what == "sizes" else 8)
    found = []
    for rank in group:
        try:
            rank.watch.compare(*rank.watch.current())
        except MismatchError as error:
            found.append(str(error))
    assert bool(found) == (what != "nothing"), found
    assert all("different operations" in said and "rank 0" in said and "rank 1" in said for said in found)
    assert all(("size of a message" in said) == (what == "sizes") for said in found), found


def test_operations_that_a_peer_has_not_begun_are_not_compared(group):
    group[0].begin(("a", 1))
    group[1].begin(("a", 1))
    group[0].begin(("b", 1))
    group[0].watch.ended(2, ("b", 1))
    group[1].begin(("c", 1))
    with pytest.raises(MismatchError, match=r"rank 1 in c 1, rank 0 in b 1; .* \[group=test rank=1 op=c seq=2\]"):
        group[1].watch.ended(2, ("c", 1))


def test_an_operation_that_has_ended_well_is_not_blamed_for_the_next_one(group):
    """A difference further on is not this operation's fault."""
    for rank in group:
        rank.begin(("a", 1))
        rank.begin(("b", rank.rank))
    for rank in group:
        rank.watch.ended(1, ("a", 1))
        rank.done = 1
        with pytest.raises(MismatchError, match="different operations"):
            rank.watch.ended(2, ("b", rank.rank))
