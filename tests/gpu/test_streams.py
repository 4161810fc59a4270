"""When operations on CUDA tensors run: after the current stream's work, without blocking the host, and what waits."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from device_data import use_device, values

from iris_pg.errors import ArgumentError, UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
NUMEL = 100_003
CUBLAS = ["thread", "nvidia", "anon_inode"]  # what it keeps for as long as the process
CYCLES = 20_000_000  # of the GPU's clock: about 10 ms


def gathered(world, iteration, numel=NUMEL):
    return torch.cat([values(p, numel, torch.float32, iteration) for p in range(world)])


def an_operation_follows_the_current_stream(rank, world):
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")
    outputs = torch.empty(world * NUMEL, device="cuda"), heap.empty(world * NUMEL, dtype=torch.float32)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for i in range(24):
        stream, output, asynchronous = streams[i % 3], outputs[i // 3 % 2], i // 6 % 2 == 0
        with torch.cuda.stream(stream):
            source = torch.full((NUMEL,), -1.0, device="cuda")
            if rank == i % world:
                torch.cuda._sleep(CYCLES)
            source.copy_(values(rank, NUMEL, torch.float32, i))
            work = dist.all_gather_into_tensor(output, source, async_op=asynchronous)
            if asynchronous:
                work.wait()
            source.fill_(-2)  # whoever reads it late reads this
            assert torch.equal(output, gathered(world, i)), i
        torch.cuda.current_stream().wait_stream(stream)


def tensors_live_until_an_operation_is_done(rank, world):
    use_device(rank)
    for i in range(20):
        output = torch.empty(world * NUMEL, device="cuda")
        source = values(rank, NUMEL, torch.float32, i)
        if rank == i % world:
            torch.cuda._sleep(CYCLES)
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        del source
        others = [torch.full((NUMEL,), float("nan"), device="cuda") for _ in range(4)]  # would take its memory
        work.wait()
        del others
        assert torch.equal(output, gathered(world, i)), i
        # And one that nobody waits for at all.
        forgotten = torch.empty(world * NUMEL, device="cuda")
        dist.all_gather_into_tensor(forgotten, values(rank, NUMEL, torch.float32, i), async_op=True)
    dist.barrier()


def the_host_does_not_wait(rank, world, store_key):
    use_device(rank)
    x = torch.ones(NUMEL, device="cuda")
    dist.all_reduce(x)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        time.sleep(1.0)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
    else:
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True)
        assert not work.is_completed()
        work.wait()
        assert time.monotonic() - start < 0.5
    work.wait()
    assert x[0].item() == world**3
    assert work.is_completed()


def futures_follow_their_operation(rank, world):
    device = use_device(rank)
    for i in range(6):
        x = values(rank, NUMEL, torch.float32, i)
        if rank == i % world:
            torch.cuda._sleep(CYCLES)
        future = dist.all_reduce(x, async_op=True).get_future()
        halves = future.then(lambda f: [f.value()[0] / 2])
        total = sum(values(p, NUMEL, torch.float32, i) for p in range(world))
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream())  # which has made what is expected, and does not wait itself
        with torch.cuda.stream(stream):
            (tensor,) = future.wait()
            assert tensor.data_ptr() == x.data_ptr()
            assert torch.equal(tensor, total), i
            assert torch.equal(halves.wait()[0], total / 2), i
        gc.collect()


def a_barrier_waits_for_the_streams_of_all(rank, world):
    use_device(rank)
    dist.all_reduce(torch.ones(1, device="cuda"))
    for i in range(4):
        dist.barrier()
        start = time.monotonic()
        if rank == i % world:
            torch.cuda._sleep(20 * CYCLES)  # on this rank's stream only; its host goes on
        dist.barrier()
        assert time.monotonic() - start > 0.05, i


def operations_on_several_streams_keep_their_order(rank, world):
    """Without the chain between streams, ranks would run them in orders of their own."""
    use_device(rank)
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = [values(rank, NUMEL, torch.float32, i) for i in range(12)]
    torch.cuda.synchronize()
    for i, tensor in enumerate(tensors):
        stream = streams[(i + rank) % 3]
        with torch.cuda.stream(stream):
            if (i + rank) % 4 == 0:
                torch.cuda._sleep(CYCLES)
            dist.all_reduce(tensor, async_op=i % 2 == 0)
    torch.cuda.synchronize()
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, sum(values(p, NUMEL, torch.float32, i) for p in range(world))), i


def messages_do_not_wait_for_their_receipts(rank, world):
    """Both ranks send first, more than slots hold, and then receive."""
    use_device(rank)
    peer, chunk = 1 - rank, dist.group.WORLD.options.device_chunk_bytes
    for i, numel in enumerate((1, chunk, 3 * chunk + 5)):
        out = torch.empty(numel, dtype=torch.uint8, device="cuda")
        mine = values(rank, numel, torch.uint8, i)
        works = [dist.isend(mine, peer), dist.isend(mine + 1, peer)]
        for work in works[:1]:
            work.wait() if numel == 1 else None
        for more in (0, 1):
            received = dist.irecv(out, peer)
            received.wait()
            assert torch.equal(out, values(peer, numel, torch.uint8, i) + more), (numel, more)
        for work in works:
            work.wait()
    torch.cuda.synchronize()
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, out, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(out, values(peer, numel, torch.uint8, i))


def memory_is_used_again_at_once(rank, world):
    """Inputs are dropped and their memory is written while operations on several streams and groups are under way."""
    use_device(rank)
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    heap = dist.group.WORLD.heap_on("cuda")
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    outs, expected = [], []
    for i in range(18):
        group, stream, asynchronous = groups[i % 3], streams[i // 3 % 3], i % 2 == 0
        with torch.cuda.stream(stream):
            if (rank + i) % 4 == 0:
                torch.cuda._sleep(CYCLES)
            source = values(rank, NUMEL, torch.float32, i)
            out = heap.empty(world * NUMEL, dtype=torch.float32) if i % 6 == 0 else source.new_empty(world * NUMEL)
            work = dist.all_gather_into_tensor(out, source, group=group, async_op=asynchronous)
            if asynchronous:
                work.wait()
            del source, work
            for _ in range(3):
                torch.full((NUMEL,), float("nan"), device="cuda")  # takes the memory of the input, if it is free
        outs.append(out)
        expected.append(i)
    torch.cuda.synchronize()
    for out, i in zip(outs, expected, strict=True):
        assert torch.equal(out, gathered(world, i)), i
    dist.barrier()


def a_busy_gpu_is_no_deadlock(rank, world, comm_sms):
    """Kernels of the cu engine beside matrix products that fill the GPU, before and after them, on another stream."""
    use_device(rank)
    assert dist.group.WORLD.options.comm_sms == comm_sms
    assert f"at most {comm_sms} CTAs" in dist.group.WORLD._on(use_device(rank)).explain()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, busy, ours = a.clone(), torch.cuda.Stream(), torch.cuda.Stream()
    sizes = (100, NUMEL, 6_000_011)
    for numel in sizes:  # compiled before
        dist.all_reduce(torch.ones(numel, device="cuda"))
        dist.all_gather_into_tensor(torch.empty(world * numel, device="cuda"), torch.ones(numel, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    outs = []
    for i in range(12):
        numel = sizes[i % 3]
        for stream in (busy, ours):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(busy):
            for _ in range(3 + (rank + i) % 3):  # ranks are busy at different times
                a @ b
        with torch.cuda.stream(ours):
            total, all_of_it = values(rank, numel, torch.float32, i), torch.empty(world * numel, device="cuda")
            dist.all_gather_into_tensor(all_of_it, total)
            dist.all_reduce(total)
            outs.append((i, total, all_of_it))
    torch.cuda.synchronize()
    for i, total, all_of_it in outs:
        parts = [values(p, total.numel(), torch.float32, i) for p in range(world)]
        assert torch.equal(total, sum(parts)) and torch.equal(all_of_it, torch.cat(parts)), i
    dist.barrier()


def pinned_memory_is_memory_of_the_host(rank, world):
    """Tensors in pinned memory are CPU tensors, and move as those do, on a group that moves CUDA tensors, too."""
    device = use_device(rank)
    for numel in (1, NUMEL, 3_000_001):
        mine = torch.full((numel,), rank + 1.0, pin_memory=True)
        out = torch.zeros(world * numel, pin_memory=True)
        dist.all_gather_into_tensor(out, mine)
        assert torch.equal(out, torch.cat([torch.full((numel,), p + 1.0) for p in range(world)])), numel
        dist.all_reduce(mine)
        assert mine.unique().tolist() == [world * (world + 1) / 2]
        on_gpu = mine.to(device, non_blocking=True)
        dist.all_reduce(on_gpu)
        assert on_gpu.unique().tolist() == [world * world * (world + 1) / 2]
    with pytest.raises(ArgumentError, match="on one device"):
        dist.all_gather_into_tensor(out, mine.to(device))
    dist.barrier()


def a_block_of_the_pool_stays_with_its_stream(rank, world):
    """So what one stream does holds up no other that makes tensors of one size."""
    device, streams = use_device(rank), (torch.cuda.Stream(), torch.cuda.Stream())

    def filled(stream):
        with torch.cuda.stream(stream):
            tensor = dist.group.WORLD.allocate_tensor(NUMEL, dtype=torch.float32, device=device)
            return tensor.fill_(rank).data_ptr()

    before = [filled(stream) for stream in streams]
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20 * CYCLES)
    assert [filled(stream) for stream in streams] == before
    streams[1].synchronize()
    assert not streams[0].query()
    torch.cuda.synchronize()


def a_full_heap_gets_back_what_is_idle(rank, world):
    """Memory that goes from a tensor of one size, on a stream that is behind, to one of another size on another."""
    device, streams = use_device(rank), (torch.cuda.Stream(), torch.cuda.Stream())
    group, page = dist.group.WORLD, 2 << 20

    def gathered(stream, pages, value):
        with torch.cuda.stream(stream):
            n = pages * page // 4
            made = group.allocate_tensor(n, dtype=torch.float32, device=device)
            dist.all_gather_into_tensor(made, torch.full((n // world,), value + rank, device=device))
            return made

    for i in range(3):
        small = [gathered(streams[0], 1, 10.0 * i) for _ in range(4)]  # the whole heap
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(CYCLES)
            seen = torch.stack([made[:: made.numel() // world] for made in small])
        del small
        large = gathered(streams[1], 3, 100.0 + i)  # where they were
        assert group._device_pool.nbytes <= 4 * page
        torch.cuda.synchronize()
        assert seen.tolist() == [[10.0 * i + r for r in range(world)]] * 4
        assert large.view(world, -1).unique(dim=1).tolist() == [[100.0 + i + r] for r in range(world)]
        del large
    dist.barrier()


FUNCTIONS = [
    an_operation_follows_the_current_stream,
    tensors_live_until_an_operation_is_done,
    futures_follow_their_operation,
    a_barrier_waits_for_the_streams_of_all,
    operations_on_several_streams_keep_their_order,
    messages_do_not_wait_for_their_receipts,
    memory_is_used_again_at_once,
    pinned_memory_is_memory_of_the_host,
    a_block_of_the_pool_stays_with_its_stream,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_streams(ranks, function):
    ranks(2).run(function, options=dict(engine="sdma", device_chunk_bytes=1 << 20), timeout_s=60)


@pytest.mark.parametrize("engine", ["sdma", "cu"])
def test_a_full_heap_gets_back_what_is_idle(ranks, engine):
    ranks(2).run(a_full_heap_gets_back_what_is_idle, options=dict(engine=engine, heap_bytes=8 << 20), timeout_s=60)


@pytest.mark.parametrize("function", [memory_is_used_again_at_once], ids=lambda f: f.__name__)
def test_streams_of_kernels(ranks, function):
    ranks(2).run(function, options=dict(engine="cu"), timeout_s=80)


@pytest.mark.parametrize("comm_sms", [4, 132])
def test_a_busy_gpu_is_no_deadlock(ranks, comm_sms):
    most = torch.cuda.get_device_properties(0).multi_processor_count
    options = dict(engine="cu", comm_sms=min(comm_sms, most))
    ranks(2).run(a_busy_gpu_is_no_deadlock, min(comm_sms, most), options=options, timeout_s=100, may_hold=CUBLAS)


def has_too_many_ctas(rank, world):
    use_device(rank)
    with pytest.raises(UnsupportedError, match=r"comm_sms=100000; it takes 1\.\.\d+, as cuda:\d has"):
        dist.all_reduce(torch.ones(1, device="cuda"))


def test_more_ctas_than_multiprocessors_are_refused(ranks):
    ranks(2).run(has_too_many_ctas, options=dict(engine="cu", comm_sms=100_000), timeout_s=60)


def test_the_host_does_not_wait(ranks):
    ranks(2).run(the_host_does_not_wait, "key", options=dict(engine="sdma"), timeout_s=60)
