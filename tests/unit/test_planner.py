"""What "auto" means on a GPU, and that ranks agree on it."""

import pytest

from iris_pg.collectives.flow import Flow, Part
from iris_pg.planner import KERNELS_UP_TO, pair_limit, uses_kernels, words_of_table
from iris_pg.program import Copy, Ref


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("all_gather", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("broadcast", "broadcast"),
        ("reduce", "reduce"),
        ("reduce_scatter", "reduce"),
        ("reduce_scatter_tensor", "reduce"),
        ("all_reduce", "all_reduce"),
    ],
)
def test_small_operations_are_kernels_and_large_ones_copies(op, kind):
    most = KERNELS_UP_TO[kind]
    assert uses_kernels("auto", op, 0) and uses_kernels("auto", op, most)
    assert not uses_kernels("auto", op, most + 1)
    assert str(most) in words_of_table()


@pytest.mark.parametrize("op", ["all_to_all", "all_to_all_single", "gather", "scatter"])
def test_pairs_of_ranks_decide_where_sizes_are_not_known_to_all(op):
    most = pair_limit("auto", op)
    assert most and f"between two ranks up to {most} bytes" in words_of_table()
    assert pair_limit("cu", op) is pair_limit("sdma", op) is None
    assert pair_limit("auto", "all_gather") is pair_limit("auto", "broadcast") is None


def test_both_ranks_of_a_pair_split_an_operation_alike():
    """Every message is in one half, the same one at both of its ranks, and so is the own part."""
    world, most = 4, 100
    sizes = [[(s + r * r) % 4 * 50 for r in range(world)] for s in range(world)]  # 0 to 150, [from][to]

    def flow(rank):
        here, peers = Ref(rank, "in", 0), [p for p in range(world) if p != rank]
        sends = tuple(Part(p, sizes[rank][p], here) for p in peers)
        own = Copy(Ref(rank, "out", 0), here, 5)
        return Flow("all_to_all", sends, tuple(Part(p, sizes[p][rank], here) for p in peers), own)

    halves = [flow(rank).split(most) for rank in range(world)]
    assert any(part.nbytes for few, _ in halves for part in few.sends)
    for rank, both in enumerate(halves):
        assert {p.peer for half in both for p in half.sends} == set(range(world)) - {rank}
        assert [half.own for half in both].count(None) == 1
        for which, half in enumerate(both):
            for part in half.sends:
                theirs = {p.peer: p.nbytes for p in halves[part.peer][which].receives}
                assert theirs[rank] == part.nbytes == sizes[rank][part.peer]
    few, many = Flow("gather", own=Copy(Ref(0, "out", 0), Ref(0, "in", 0), 5)).split(most)
    assert few.is_empty and not many.is_empty


@pytest.mark.parametrize("nbytes", [1, 1 << 30])
def test_an_engine_by_name_is_that_and_nothing_else(nbytes):
    for op in ("all_gather", "all_to_all"):
        assert uses_kernels("cu", op, nbytes) and not uses_kernels("sdma", op, nbytes)
