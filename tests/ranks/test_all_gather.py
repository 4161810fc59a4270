"""all_gather_into_tensor: every byte of every dtype, size and form, compared with Gloo."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from iris_pg.memory import neighbours
from iris_pg.options import Options
from iris_pg.platforms import cpu

ENGINES = ["sdma", "cu"]

LARGE = (1 << 20) + 3  # bytes, at least
# Engine -> the largest tensor in bytes, and how many of the forms below each dtype and size goes through. The cu engine
# on CPUs is an interpreter: a few milliseconds a launch, tens of megabytes a second.
LIMITS = {"sdma": (LARGE, 16), "cu": (4099, 2)}  # largest tensor in bytes, and forms of each
CU_DTYPES_OF_A_SIZE = 1  # in groups of more ranks than a CI machine has cores, where the interpreter is slower still
TIMEOUT_S = 100
FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
if FULL:  # the cu engine with all of it, a quarter of an hour
    LIMITS["cu"], CU_DTYPES_OF_A_SIZE, TIMEOUT_S = (LARGE, 4), 100, 1500

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
# (in place, output in the heap, output stacked [world, n], asynchronous)
FORMS = list(itertools.product([False, True], repeat=4))


def data(rank: int, numel: int, itemsize: int, iteration: int) -> torch.Tensor:
    """Bytes [numel * itemsize] that depend on rank, position and iteration."""
    generator = torch.Generator().manual_seed(1_000_003 * iteration + 1009 * rank + itemsize)
    return torch.randint(256, (numel * itemsize,), dtype=torch.uint8, generator=generator)


def numels(itemsize: int, largest: int) -> list[int]:
    """Numbers of elements: 0, 1, odd ones, and a large odd one where the engine is fast enough."""
    return [0, 1, 1021] + [LARGE // itemsize + 3] * (largest >= LARGE)


def gathers_all_dtypes(rank, world, engine, forms_of_small, forms_of_large):
    warnings.simplefilter("ignore")  # torch's, about dtypes that it calls experimental or deprecated
    gloo = dist.new_group(backend="gloo")
    heap = dist.group.WORLD.transport.heap
    largest, n_forms = LIMITS[engine]
    flats = {}
    count = 0
    for itemsize in sorted({dtype.itemsize for dtype in DTYPES}):
        dtypes = [dtype for dtype in DTYPES if dtype.itemsize == itemsize]
        if engine == "cu" and world > 2:
            dtypes = dtypes[:CU_DTYPES_OF_A_SIZE]
        for numel in numels(itemsize, largest):
            mine = data(rank, numel, itemsize, count)
            expected = torch.empty(world * mine.numel(), dtype=torch.uint8)
            dist.all_gather_into_tensor(expected, mine, group=gloo)
            nbytes = expected.numel()
            flats[False], flats[True] = torch.empty(nbytes, dtype=torch.uint8), heap.empty(nbytes, dtype=torch.uint8)
            for i, dtype in enumerate(dtypes):
                n = min(
                    n_forms if world < 8 or n_forms > 2 else 1,
                    forms_of_large if numel * itemsize >= LARGE else forms_of_small,
                )
                for k in range(n):
                    form = FORMS[(i * n + k) * 5 % len(FORMS)]  # 5: so that a few of them still differ in everything
                    in_place, in_heap, stacked, asynchronous = form
                    flat = flats[in_heap].fill_(0xA5)
                    output = flat.view(dtype).view((world, numel) if stacked else (world * numel,))
                    if in_place:
                        own = flat[rank * mine.numel() : (rank + 1) * mine.numel()]
                        input = own.copy_(mine).view(dtype)
                    else:
                        input = mine.clone().view(dtype)
                    work = dist.all_gather_into_tensor(output, input, async_op=asynchronous)
                    if asynchronous:
                        result = work.get_future().wait() if k % 2 else (work.wait(), work.result())[1]
                        assert work.is_completed(), (dtype, numel, form)
                        assert result[0].data_ptr() == output.data_ptr(), (dtype, numel, form)
                    assert torch.equal(flat, expected), (dtype, numel, form, wrong(flat, expected))
                    assert in_place or torch.equal(input.view(torch.uint8), mine), "the input has changed"
                    count += 1
            heap.free(flats[True]) if nbytes else None
    return count


def wrong(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Say which bytes differ."""
    at = (actual != expected).nonzero().flatten()
    return f"{len(at)} of {len(expected)} bytes are wrong, from {at[0]} to {at[-1]}"


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("world", "small", "large"), [(1, 4, 4), (2, 16, 16), (4, 8, 4), (8, 5, 1)])
def test_every_dtype_size_and_form_is_what_gloo_gathers(ranks, world, small, large, engine):
    """``small`` and ``large``: how many of the forms each dtype goes through; together they go through all of them.
    Of two ranks all tensors outside the heap are staged, of more than two all are read directly.
    """
    options = dict(engine=engine, direct_bytes=0 if world == 2 else 1)
    counts = ranks(world).run(gathers_all_dtypes, engine, small, large, options=options, timeout_s=TIMEOUT_S)
    assert len(set(counts)) == 1
    assert counts[0] > 500 or engine == "cu"


def gathers_by_two_threads(rank, world):
    made = neighbours.HALVED_BYTES, cpu.usable_cores
    neighbours.HALVED_BYTES, cpu.usable_cores = 1000, lambda: 2 * world
    try:
        group = dist.new_group(backend="iris", pg_options=Options(engine="sdma", direct_bytes=1))
    finally:
        neighbours.HALVED_BYTES, cpu.usable_cores = made
    for iteration in range(4):  # from the third on packets run without Python where they can
        for n in (999, 1000, 100_001):
            output = torch.zeros(world * n, dtype=torch.uint8)
            dist.all_gather_into_tensor(output, data(rank, n, 1, iteration), group=group)
            assert torch.equal(output, torch.cat([data(p, n, 1, iteration) for p in range(world)])), (n, iteration)
    readers = [thread.name for thread in threading.enumerate() if " reads" in thread.name]
    dist.destroy_process_group(group)
    return len(readers), any(" reads" in thread.name for thread in threading.enumerate())


def test_large_tensors_are_read_in_halves_where_there_are_cores(ranks):
    assert ranks(2).run(gathers_by_two_threads) == [(1, False)] * 2


def gathers_for_long(rank, world, iterations):
    gloo = dist.new_group(backend="gloo")
    heap = dist.group.WORLD.transport.heap
    shared = random.Random(world)  # the same on every rank
    sizes = [1, 17, 1024, 1025, 5000]
    mine = torch.empty(max(sizes), dtype=torch.uint8)
    outputs = torch.empty(world * max(sizes), dtype=torch.uint8), heap.empty(world * max(sizes), dtype=torch.uint8)
    sums = []
    for i in range(iterations):
        n, late, nap = shared.choice(sizes), shared.randrange(world), shared.random() * 2e-3
        output, asynchronous = outputs[shared.randrange(2)][: world * n], shared.random() < 0.3
        position = torch.arange(n, dtype=torch.int64)
        mine[:n] = (position * 7 + 31 * rank + 13 * i) % 251
        if rank == late:
            time.sleep(nap)
        work = dist.all_gather_into_tensor(output, mine[:n], async_op=asynchronous)
        if asynchronous:
            work.wait()
        mine[:n] = 255  # whoever reads it late reads this
        expected = torch.cat([(position * 7 + 31 * p + 13 * i) % 251 for p in range(world)]).to(torch.uint8)
        assert torch.equal(output, expected), (i, n, asynchronous, wrong(output, expected))
        sums.append(int(output.sum()))
    theirs = torch.empty(world * len(sums), dtype=torch.int64)
    dist.all_gather_into_tensor(theirs, torch.tensor(sums), group=gloo)
    assert torch.equal(theirs.view(world, -1), torch.tensor([sums] * world))


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(  # hostile_seed is for the software copy engine
    ("engine", "hostile_seed"),
    [(engine, seed) for engine in ENGINES for seed in (None, 7) if not seed or engine == "sdma"],
)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_thousand_times_with_new_data_and_a_late_rank(ranks, world, hostile_seed, engine):
    if world == 8 and hostile_seed and not FULL:
        pytest.skip("set IRIS_PG_TEST_FULL=1")
    options = dict(engine=engine, chunk_bytes=1024, hostile_seed=hostile_seed)
    times = 256 // world**2 if engine == "cu" and not FULL else 1000
    ranks(world).run(gathers_for_long, times, options=options, timeout_s=TIMEOUT_S)


def gathers_out_of_the_heap(rank, world, sizes):
    """Inputs in the heap that change right after each call, which so has to have been read by all."""
    heap = dist.group.WORLD.transport.heap
    lead = heap.empty(256, dtype=torch.uint8)  # so that the input is not at the start
    input, offset = heap.empty(max(sizes), dtype=torch.uint8), 3
    into_heap = heap.empty(world * max(sizes), dtype=torch.uint8)
    for i, n in enumerate(sizes):
        mine = input[offset:][: n - offset] if i % 2 else input[:n]
        n = mine.numel()
        for turn in range(3):
            output = into_heap[: world * n] if turn == 1 else torch.empty(world * n, dtype=torch.uint8)
            mine.copy_(data(rank, n, 1, 3 * i + turn))
            work = dist.all_gather_into_tensor(output, mine, async_op=turn == 2)
            if work:
                work.wait()
            mine.fill_(0xEE)
            expected = torch.cat([data(p, n, 1, 3 * i + turn) for p in range(world)])
            assert torch.equal(output, expected), (n, turn, wrong(output, expected))
    del lead


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("world", [2, 4])
def test_an_input_in_the_heap_is_read_where_it_is(ranks, world, engine):
    sizes = [1 << 16, (1 << 16) + 5, 1000, (1 << 17) + 1 if engine == "cu" else 3 << 20]
    seed = 5 if world == 4 and engine == "sdma" else None
    ranks(world).run(
        gathers_out_of_the_heap,
        sizes,
        options=dict(engine=engine, hostile_seed=seed),
    )


def waits_for_a_late_rank(rank, world):
    mine, output = torch.full((3,), rank), torch.empty(3 * world, dtype=torch.int64)
    dist.all_gather_into_tensor(output, mine)
    if rank == 0:
        time.sleep(2)
    began = time.process_time()
    dist.all_gather_into_tensor(output, mine)
    return time.process_time() - began


@pytest.mark.parametrize("engine", ENGINES)
def test_waiting_leaves_the_core_to_others(ranks, engine):
    """Kernels in the interpreter used to poll without a pause: of 8 ranks on 2 cores, the one that all others waited
    for got no core for 20 s.
    """
    _, busy = ranks(2).run(waits_for_a_late_rank, options=dict(engine=engine))
    assert busy < 1.5, f"{busy} of 2 seconds"


def gathers_many_chunks(rank, world, sizes):
    for i, n in enumerate(sizes):
        output = torch.empty(world * n, dtype=torch.uint8)
        dist.all_gather_into_tensor(output, data(rank, n, 1, i))
        expected = torch.cat([data(p, n, 1, i) for p in range(world)])
        assert torch.equal(output, expected), (n, wrong(output, expected))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunk_bytes", [256, 1024])
@pytest.mark.parametrize("world", [2, 4])
def test_small_chunks_use_both_slots_many_times(ranks, world, chunk_bytes, engine):
    around = [n + d for n in (chunk_bytes, 2 * chunk_bytes, 3 * chunk_bytes) for d in (-1, 0, 1)]
    sizes = [*around, *reversed(around), 40 * chunk_bytes + 5, 1, 64 * chunk_bytes]
    options = dict(engine=engine, chunk_bytes=chunk_bytes)
    ranks(world).run(gathers_many_chunks, sizes[: 6 if engine == "cu" else None], options=options)


def gathers_more_than_the_ring_holds(rank, world, n_operations, n):
    outputs = [torch.empty(world * n, dtype=torch.uint8) for _ in range(n_operations)]
    works = [dist.all_gather_into_tensor(o, data(rank, n, 1, i), async_op=True) for i, o in enumerate(outputs)]
    for i in reversed(range(n_operations)):
        works[i].wait()
        expected = torch.cat([data(p, n, 1, i) for p in range(world)])
        assert torch.equal(outputs[i], expected), (i, wrong(outputs[i], expected))


def test_more_work_than_the_ring_holds(ranks):
    """A ring that is full is drained by whoever submits; 256-byte chunks make 1 MiB into more packets than it holds."""
    ranks(2).run(gathers_more_than_the_ring_holds, 8, 1 << 20, options=dict(chunk_bytes=256))


def gathers_distinct_tensors(rank, world, n_tensors):
    import rank_pool

    def gather_one(i):
        n = 64 + 8 * (i % 97)
        output = torch.empty(world * n, dtype=torch.uint8)
        dist.all_gather_into_tensor(output, torch.full((n,), (i + rank) % 256, dtype=torch.uint8))
        assert int(output[-1]) == (i + world - 1) % 256
        return output

    kept = [gather_one(i) for i in range(100)]
    before = rank_pool.descriptors() + rank_pool.shared_mappings()
    kept += [gather_one(i) for i in range(n_tensors)]
    return rank_pool.left_over(before, 0, lambda: rank_pool.descriptors() + rank_pool.shared_mappings())


def test_thousands_of_tensors_cost_no_descriptor_and_no_mapping(ranks):
    assert ranks(2).run(gathers_distinct_tensors, 3000) == ["", ""]


def allocates_and_frees(rank, world, rounds):
    import rank_pool

    heap = dist.group.WORLD.transport.heap
    kept = [heap.empty(1 << 20, dtype=torch.uint8) for _ in range(8)]
    before = rank_pool.descriptors() + rank_pool.shared_mappings()
    for i in range(rounds):
        tensor = heap.empty(world, 1000 + i, dtype=torch.uint8)
        dist.all_gather_into_tensor(tensor, torch.full((1000 + i,), (i + rank) % 256, dtype=torch.uint8))
        assert tensor[:, -1].tolist() == [(i + p) % 256 for p in range(world)]
        heap.free(tensor)
    for tensor in kept:
        heap.free(tensor)
    return rank_pool.left_over(before, 0, lambda: rank_pool.descriptors() + rank_pool.shared_mappings())


def test_thousands_of_heap_tensors_cost_no_descriptor_and_no_mapping(ranks):
    assert ranks(2).run(allocates_and_frees, 1000) == ["", ""]
