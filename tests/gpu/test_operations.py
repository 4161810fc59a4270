"""Every operation on CUDA tensors, of ordinary memory and of the heap, against results computed on each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_data import OPERATIONS, Case, mistakes, use_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
TIMEOUT_S = 240
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.bool,
    torch.complex64,
]
CHUNK_BYTES = 1 << 20  # so that large tensors take several


def every_operation(rank, world, dtypes, sizes):
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")
    wrong, count = [], 0
    for operation in OPERATIONS:
        for numel in sizes:
            for dtype in dtypes:
                count += 1
                where = heap if count % 2 else None
                made = []
                case = Case(rank, world, numel, dtype, count, where, count % 3 == 0)
                if where:  # tensors are freed again, in order
                    case.heap = _Noting(heap, made)
                pairs = operation(case)
                form = (operation.__name__, numel, dtype, "heap" if where else "ordinary", case.asynchronous)
                wrong += mistakes(pairs, form)
                for tensor in made:
                    heap.free(tensor)
                assert len(wrong) < 5, "\n".join(wrong)
    assert not wrong, "\n".join(wrong)
    dist.barrier()
    return count


class _Noting:
    """A heap that notes what it hands out."""

    def __init__(self, heap, made):
        self.heap, self.made = heap, made

    def empty(self, *size, dtype):
        self.made.append(self.heap.empty(*size, dtype=dtype))
        return self.made[-1]


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("engine", "world", "n_dtypes", "sizes"),
    [
        ("sdma", 1, 9, (0, 1, 1003)),
        ("sdma", 2, 9, (0, 1, 17, (1 << 20) + 3)),
        ("sdma", 4, 3, (1, 1003)),
        ("sdma", 8, 2, (257,)),
        # Where ranks share a GPU a kernel that waits keeps it from the rank that it waits for, so these take longer.
        ("cu", 1, 9, (0, 1, 1003)),
        ("cu", 2, 3, (1, 300_001)),
        ("cu", 4, 1, (1003,)),
        ("cu", 8, 1, (257,)),
        ("auto", 1, 9, (0, 1, 1003)),
        ("auto", 2, 2, (17, (1 << 20) + 3)),
        ("auto", 4, 2, (1003,)),
        ("auto", 8, 1, (257,)),
    ],
)
def test_every_operation_gives_what_it_should(ranks, engine, world, n_dtypes, sizes):
    options = dict(engine=engine, device_chunk_bytes=CHUNK_BYTES)
    counts = ranks(world).run(every_operation, DTYPES[:n_dtypes], sizes, options=options, timeout_s=TIMEOUT_S)
    assert len(set(counts)) == 1


def gathers_out_of_the_heap(rank, world):
    """Inputs in the heap that change right behind each call, eager, asynchronous and in a graph."""
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")
    lead = heap.empty(512, dtype=torch.uint8)
    for n in (1000, (1 << 16) + 16, (5 << 20) + 3):
        input, output = heap.empty(n, dtype=torch.uint8), torch.empty(world * n, dtype=torch.uint8, device="cuda")
        index = torch.arange(n, device="cuda")

        def values(p, i, index=index):
            return ((index * 7 + index // 251 + 31 * p + 13 * i) % 251).to(torch.uint8)

        graph = torch.cuda.CUDAGraph()
        for i in range(8):
            output.fill_(0xEE)
            input.copy_(values(rank, i))
            if i < 6:
                work = dist.all_gather_into_tensor(output, input, async_op=i % 2 == 1)
                if work:
                    work.wait()
                if i == 5:
                    torch.cuda.synchronize()
                    dist.barrier()
                    with torch.cuda.graph(graph):
                        dist.all_gather_into_tensor(output, input)
            else:
                graph.replay()
            input.fill_(0x11)
            assert torch.equal(output, torch.cat([values(p, i) for p in range(world)])), (n, i)
        torch.cuda.synchronize()
        dist.barrier()
        heap.free(input)
    heap.free(lead)


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("engine", ["sdma", "cu", "auto"])
@pytest.mark.parametrize("world", [2, 4])
def test_an_input_in_the_heap_is_read_where_it_is(ranks, engine, world):
    options = dict(engine=engine, device_chunk_bytes=CHUNK_BYTES)
    ranks(world).run(gathers_out_of_the_heap, options=options, timeout_s=TIMEOUT_S)


def exchanges_of_both_engines(rank, world):
    """Little between some ranks and much between others, in one call, in turn with calls that are one or the other."""
    from iris_pg import planner

    use_device(rank)
    limits = dict(planner.PAIRS_UP_TO)
    planner.PAIRS_UP_TO.update(dict.fromkeys(limits, 4000))
    try:
        graph, captured = torch.cuda.CUDAGraph(), None
        for i in range(9):
            scale = (1, 500, 1999)[i % 3]  # all in kernels, some, most in copies
            sizes = [[(3 * s + r * r + (i + s) % 2) % 5 * scale for r in range(world)] for s in range(world)]
            sent = [(torch.arange(n) * 7 + 31 * rank + 13 * r + i) % 127 for r, n in enumerate(sizes[rank])]
            into = torch.full((sum(row[rank] for row in sizes),), -1, dtype=torch.uint8, device="cuda")
            source = torch.cat(sent).to("cuda", torch.uint8)
            splits = [row[rank] for row in sizes], sizes[rank]
            expected = torch.cat(
                [(torch.arange(row[rank]) * 7 + 31 * s + 13 * rank + i) % 127 for s, row in enumerate(sizes)]
            )
            for _ in range(2):
                into.fill_(255)
                dist.all_to_all_single(into, source, *splits)
                assert torch.equal(into.cpu(), expected.to(torch.uint8)), (i, sizes)
            if i == 1:
                torch.cuda.synchronize()
                captured = into, source, expected
                with torch.cuda.graph(graph):
                    dist.all_to_all_single(into, source, *splits)
            if captured and i > 3:
                captured[0].fill_(255)
                graph.replay()
                assert torch.equal(captured[0].cpu(), captured[2].to(torch.uint8)), i
            root = i % world
            mine = torch.full((sizes[root][rank],), rank + i, dtype=torch.uint8, device="cuda")
            got = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in sizes[root]] if rank == root else None
            dist.gather(mine, got, dst=root)
            assert got is None or all(bool((t == p + i).all()) for p, t in enumerate(got)), (i, "gather")
    finally:
        planner.PAIRS_UP_TO.update(limits)
    dist.barrier()


@pytest.mark.parametrize("world", [2, 4])
def test_exchanges_that_are_kernels_between_some_ranks_and_copies_between_others(ranks, world):
    ranks(world).run(
        exchanges_of_both_engines, options=dict(engine="auto", device_chunk_bytes=CHUNK_BYTES), timeout_s=90
    )
