"""What "auto" means on a GPU, and that ranks agree on it."""

import pytest

from iris_pg.planner import KERNELS_UP_TO, uses_kernels, words_of_table


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
def test_operations_whose_sizes_ranks_do_not_know_of_each_other_are_copies(op):
    assert not any(uses_kernels("auto", op, nbytes) for nbytes in (0, 1, 1 << 30))


@pytest.mark.parametrize("nbytes", [1, 1 << 30])
def test_an_engine_by_name_is_that_and_nothing_else(nbytes):
    for op in ("all_gather", "all_to_all"):
        assert uses_kernels("cu", op, nbytes) and not uses_kernels("sdma", op, nbytes)
