"""Memory that grew without a bound, or over the one that it has."""

import tracemalloc

import torch
import torch.distributed as dist

from iris_pg import transport


def gathers_many_sizes(rank, world, sizes, bound):
    """Return how many bytes a process has grown by with programs that come when the cache is full."""

    def gather(n):
        output = torch.empty(world * n, dtype=torch.uint8)
        dist.all_gather_into_tensor(output, torch.full((n,), rank, dtype=torch.uint8))
        assert output.view(world, n)[:, -1].tolist() == list(range(world))

    allowed, transport._CACHE_BYTES = transport._CACHE_BYTES, bound
    try:
        tracemalloc.start()
        for n in range(1, sizes):
            gather(n)
        before, _ = tracemalloc.get_traced_memory()
        for n in range(sizes, 2 * sizes):
            gather(n)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        transport._CACHE_BYTES = allowed
    return after - before


def test_programs_take_no_more_memory_than_their_cache_may(ranks):
    """Only the packets counted, an eighth of it: 32 MiB were 250 in a process that had met enough sizes."""
    bound = 512 << 10
    for grown in ranks(2).run(gathers_many_sizes, 700, bound, options=dict(engine="sdma")):
        assert grown < bound, grown  # what remains is the table of tags, which has a bound of its own
