"""When operations on CUDA tensors run: after the current stream's work, without blocking the host, and what waits."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from device_data import use_device, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
NUMEL = 100_003
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


FUNCTIONS = [
    an_operation_follows_the_current_stream,
    tensors_live_until_an_operation_is_done,
    futures_follow_their_operation,
    a_barrier_waits_for_the_streams_of_all,
    operations_on_several_streams_keep_their_order,
    messages_do_not_wait_for_their_receipts,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_streams(ranks, function):
    ranks(2).run(function, options=dict(engine="sdma", device_chunk_bytes=1 << 20), timeout_s=60)


def test_the_host_does_not_wait(ranks):
    ranks(2).run(the_host_does_not_wait, "key", options=dict(engine="sdma"), timeout_s=60)
