"""What ranks tell each other about the sizes of their messages, for several ranks in one process."""

from __future__ import annotations

import pytest
import torch

from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.flags import HISTORY, ControlPage
from iris_pg.program import Ref
from iris_pg.sizes import Sizes

WORLD = 3


class Heap:
    """Stands for one rank's view of a symmetric heap: the segments of all ranks lie in this process."""

    def __init__(self, rank, segments):
        self.rank, self.world, self.control = rank, len(segments), ControlPage(len(segments))
        self.bases = [segment.data_ptr() for segment in segments]
        self.base = self.bases[rank]


@pytest.fixture
def sizes():
    segments = [torch.zeros(ControlPage(WORLD).nbytes, dtype=torch.uint8) for _ in range(WORLD)]
    made = [Sizes(Heap(rank, segments)) for rank in range(WORLD)]
    yield made
    del segments


def flow(rank, n, wrong=None):
    """Return an all-to-all of ``n(source, target)`` bytes; ``wrong`` is (source, bytes expected from it)."""
    peers = [p for p in range(WORLD) if p != rank]
    expected = {p: n(p, rank) for p in peers} | dict([wrong] if wrong else [])
    sends = tuple(Part(p, n(rank, p), Ref(rank, "in", 0)) for p in peers)
    return Flow("test", sends, tuple(Part(p, expected[p], Ref(rank, "out", 0)) for p in peers))


def nbytes(sequence):
    return lambda source, target: (7 * source + 3 * target + sequence) % 5 * 1000


def differences(sizes, sequence):
    return {
        (rank, peer): said
        for rank in range(WORLD)
        for peer in range(WORLD)
        if (said := sizes[rank].difference(peer, sequence))
    }


def test_ranks_that_agree_do_not_differ(sizes):
    for sequence in range(1, 3 * HISTORY):
        for rank in range(WORLD):
            sizes[rank].tell(sequence, flow(rank, nbytes(sequence)), oldest=sequence)
        for told in range(max(1, sequence - HISTORY + 1), sequence + 1):
            assert not differences(sizes, told)


def test_a_difference_is_said_by_both_ranks_of_the_message_and_by_no_other(sizes):
    for sequence in (1, 2):
        for rank in range(WORLD):
            wrong = (0, 4321) if (rank, sequence) == (2, 2) else None
            sizes[rank].tell(sequence, flow(rank, nbytes(sequence), wrong), oldest=sequence)
    assert not differences(sizes, 1)
    n = nbytes(2)(0, 2)
    assert differences(sizes, 2) == {
        (0, 2): f"rank 0 sends {n} bytes to rank 2, which expects 4321",
        (2, 0): f"rank 2 expects 4321 bytes from rank 0, which sends {n}",
    }


@pytest.mark.parametrize("expected", [0, 9])
def test_nothing_is_a_size(sizes, expected):
    sizes[0].tell(1, flow(0, lambda p, q: 9 - expected), oldest=1)
    sizes[1].tell(1, flow(1, lambda p, q: 9 - expected, (0, expected)), oldest=1)
    assert sizes[0].difference(1, 1) == f"rank 0 sends {9 - expected} bytes to rank 1, which expects {expected}"


def test_the_direction_of_a_message_counts(sizes):
    """Each rank would send 8 bytes to the other and expects none."""
    for rank in range(2):
        sizes[rank].tell(1, flow(rank, lambda p, q, rank=rank: 8 if p == rank else 0), oldest=1)
    assert sizes[0].difference(1, 1) == "rank 0 sends 8 bytes to rank 1, which expects 0"


def test_a_difference_is_still_seen_when_its_own_words_are_gone(sizes):
    for sequence in range(1, 2 * HISTORY):
        for rank in range(WORLD):
            wrong = (0, 4321) if (rank, sequence) == (1, 1) else None
            sizes[rank].tell(sequence, flow(rank, nbytes(sequence), wrong), oldest=sequence)
    assert not differences(sizes, 1), "of operation 1 nobody tells any more"
    said = f"do so in an operation before seq {sequence}"
    assert differences(sizes, sequence) == {
        (0, 1): f"rank 0 and rank 1 {said}",
        (1, 0): f"rank 1 and rank 0 {said}",
    }


def test_a_rank_with_many_operations_in_flight_still_knows_its_own(sizes):
    for sequence in range(1, 2 * HISTORY):
        sizes[0].tell(sequence, flow(0, nbytes(sequence)), oldest=1)
    sizes[1].tell(1, flow(1, nbytes(1), (0, 4321)), oldest=1)
    assert sizes[0].difference(1, 1) == f"rank 0 sends {nbytes(1)(0, 1)} bytes to rank 1, which expects 4321"
    assert sizes[1].difference(0, 1) is None


def test_what_a_rank_has_done_is_still_compared_when_its_peer_comes_to_it(sizes):
    """What only sends ends before its receiver begins."""
    for sequence in range(1, 6):
        sizes[0].tell(sequence, flow(0, nbytes(sequence)), oldest=sequence)
    sizes[1].tell(1, flow(1, nbytes(1), (0, 4321)), oldest=1)
    said = f"{nbytes(1)(0, 1)}"
    assert sizes[0].difference(1, 1) == f"rank 0 sends {said} bytes to rank 1, which expects 4321"
    assert sizes[1].difference(0, 1) == f"rank 1 expects 4321 bytes from rank 0, which sends {said}"


def test_who_has_not_begun_an_operation_does_not_differ_in_it(sizes):
    sizes[0].tell(1, flow(0, nbytes(1)), oldest=1)
    assert not differences(sizes, 1)


def test_operations_that_reduce_are_between_others(sizes):
    """A reduction tells nothing, and what comes after it is still compared."""
    for rank in range(2):
        sizes[rank].tell(1, Fold("test", "sum", "float32", (Part(rank, 8, Ref(rank, "in", 0)),), to_all=True), 1)
        sizes[rank].tell(2, flow(rank, nbytes(2), (0, 4321) if rank else None), oldest=2)
    assert sizes[0].difference(1, 1) is None
    assert sizes[1].difference(0, 2) == f"rank 1 expects 4321 bytes from rank 0, which sends {nbytes(2)(0, 1)}"
