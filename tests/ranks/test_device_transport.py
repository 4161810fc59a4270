"""The transport of CUDA tensors on a fake GPU (fake_gpu.py): orders of streams, lanes, programs, works, failures."""

from __future__ import annotations

import datetime
import time

import pytest
import torch
import torch.distributed as dist

import fake_gpu
import iris_pg
import rank_pool
from iris_pg.errors import ArgumentError, DeadlineError, IrisError, MismatchError

CHUNK = 1 << 12


def values(rank, numel, iteration, salt=0):
    position = torch.arange(numel, dtype=torch.float32)
    return (position * 7 + 31 * rank + 13 * iteration + 5 * salt) % 13


def settle(work, asynchronous):
    if asynchronous:
        work.wait()
        fake_gpu.Stream.current.synchronize()


def every_operation(rank, world, iterations, lanes_from):
    with fake_gpu.pretend():
        from iris_pg import device_copies

        device_copies._LANES_FROM = lanes_from
        group = dist.group.WORLD
        heap = group._on(fake_gpu.DEVICE).heap
        for i in range(iterations):
            for n in (1, 17, 3 * CHUNK + 5):
                asynchronous = i % 2 == 1
                mine, everyones = values(rank, n, i), [values(p, n, i) for p in range(world)]
                for out in (torch.empty(world * n), heap.empty(world * n, dtype=torch.float32)):
                    work = dist.all_gather_into_tensor(out, mine, async_op=asynchronous)
                    settle(work, asynchronous)
                    assert torch.equal(out, torch.cat(everyones)), ("all_gather", n, i)
                total = mine.clone()
                settle(dist.all_reduce(total, async_op=asynchronous), asynchronous)
                assert torch.equal(total, sum(everyones)), ("all_reduce", n, i)
                whole = torch.cat([values(rank, n, i, salt) for salt in range(world)])  # kept until its stream is done
                out = torch.empty(n)
                settle(dist.reduce_scatter_tensor(out, whole, async_op=asynchronous), asynchronous)
                assert torch.equal(out, sum(values(p, n, i, rank) for p in range(world))), ("reduce_scatter", n, i)
                out = torch.empty(world * n)
                settle(dist.all_to_all_single(out, whole, async_op=asynchronous), asynchronous)
                assert torch.equal(out, torch.cat([values(p, n, i, rank) for p in range(world)])), ("all_to_all", n, i)
                out = mine.clone() if rank == i % world else torch.full((n,), -1.0)
                settle(dist.broadcast(out, i % world, async_op=asynchronous), asynchronous)
                assert torch.equal(out, everyones[i % world]), ("broadcast", n, i)
                if not asynchronous:  # what is copied back lives as long as the call here
                    wide = torch.full((world * n, 2), -1.0)
                    dist.all_gather_into_tensor(wide[:, 1], mine)
                    assert torch.equal(wide[:, 1], torch.cat(everyones)) and wide[0, 0] == -1, ("strided", n, i)
                if world > 1:
                    out = torch.empty(n)
                    works = [dist.isend(mine, (rank + 1) % world), dist.irecv(out, (rank - 1) % world)]
                    for work in works:
                        settle(work, True)
                    assert torch.equal(out, everyones[(rank - 1) % world]), ("ring", n, i)
            dist.barrier()


def calls_are_known_again(rank, world):
    """The same tensors again and again, in calls that differ in a root, a reduction, a factor, or splits."""
    n, one, other = 24, dist.ReduceOp.SUM, dist.ReduceOp.MAX
    splits = [n - 1, n + 1] if rank == 0 else [n + 1, n - 1]  # of what 2 ranks send, and of what they receive
    with fake_gpu.pretend():
        part, out = torch.empty(n), torch.empty(world * n)
        sent, received = torch.empty(2 * n), torch.empty(2 * n)
        kinds = 0
        for i in range(6):
            asynchronous = i % 3 == 1

            def run(call, *given, is_async=asynchronous, **named):
                settle(call(*given, async_op=is_async, **named), is_async)

            everyones = [values(p, n, i) for p in range(world)]
            part.copy_(everyones[rank])
            run(dist.all_gather_into_tensor, out, part)
            assert torch.equal(out, torch.cat(everyones)), i
            for op, expected in ((one, sum(everyones)), (other, torch.stack(everyones).max(0).values)):
                part.copy_(everyones[rank])
                run(dist.all_reduce, part, op)
                assert torch.equal(part, expected), (i, op)
                out.copy_(everyones[rank].repeat(world))
                run(dist.reduce_scatter_tensor, part, out, op)
                assert torch.equal(part, expected), (i, op)
            for factor in (2.0, 3.0):
                part.copy_(everyones[rank])
                dist.all_reduce(part, dist._make_nccl_premul_sum(factor))
                assert torch.equal(part, factor * sum(everyones)), (i, factor)
            for root in range(world):
                part.copy_(everyones[rank])
                run(dist.broadcast, part, root)
                assert torch.equal(part, everyones[root]), (i, root)
                part.copy_(everyones[rank])
                run(dist.reduce, part, root)
                assert torch.equal(part, sum(everyones) if rank == root else everyones[rank]), (i, root)
            sent.copy_(values(rank, 2 * n, i, 1))
            pieces = [values(p, 2 * n, i, 1).view(world, -1)[rank] for p in range(world)]
            run(dist.all_to_all_single, received, sent)
            assert torch.equal(received, torch.cat(pieces)), i
            if world == 2:  # the same number of elements, in parts of other sizes
                run(dist.all_to_all_single, received, sent, splits, splits)
                at = 0 if rank == 0 else n - 1, 0 if rank == 0 else n + 1
                pieces = [values(p, 2 * n, i, 1)[at[p] : at[p] + splits[p]] for p in range(world)]
                assert torch.equal(received, torch.cat(pieces)), i
            if i == 0:
                kinds = len(dist.group.WORLD._known)
                assert kinds and not fake_gpu.repeated
            assert len(dist.group.WORLD._known) == kinds and len(fake_gpu.repeated) == i * kinds, i
        with pytest.raises(ArgumentError, match="rows"):
            dist.all_to_all_single(received.view(1, -1), sent.view(1, -1))
        with pytest.raises(ArgumentError, match="has 24 elements"):
            dist.group.WORLD._gather_into(part, sent, False)


def streams_keep_the_order_of_calls(rank, world):
    with fake_gpu.pretend():
        streams = [fake_gpu.Stream() for _ in range(3)]
        tensors = [values(rank, 100, i) for i in range(12)]
        works = []
        for i, tensor in enumerate(tensors):
            with fake_gpu.current(streams[(i + rank) % 3]):
                if (i + rank) % 4 == 0:
                    fake_gpu.Stream.current.submit(lambda: time.sleep(0.01))
                works.append(dist.all_reduce(tensor, async_op=True))
        for work in works:
            work.wait()
        fake_gpu.synchronize()
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, sum(values(p, 100, i) for p in range(world))), i


def a_late_rank_is_named(rank, world):
    with fake_gpu.pretend():
        x = torch.ones(8)
        dist.all_reduce(x)
        if rank == 1:
            rank_pool.current_store.wait(["seen"])
            with pytest.raises(IrisError):
                dist.all_reduce(x)
        else:
            dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
            work = dist.all_reduce(x, async_op=True)
            deadline = time.monotonic() + 15
            with pytest.raises(DeadlineError, match="rank 1 has not begun it"):
                while time.monotonic() < deadline:
                    work.wait()
                    time.sleep(0.05)
            rank_pool.current_store.set("seen", "")
            fake_gpu.synchronize()


def other_operations_are_noticed(rank, world):
    with fake_gpu.pretend():
        x = torch.ones(8)
        dist.all_reduce(x)
        work = dist.all_reduce(x, async_op=True) if rank else dist.broadcast(x, 1, async_op=True)
        deadline = time.monotonic() + 8
        with pytest.raises(MismatchError, match="different operations"):
            while time.monotonic() < deadline:
                work.wait()
                time.sleep(0.05)


def what_it_says_and_takes(rank, world):
    with fake_gpu.pretend():
        group = dist.group.WORLD
        x = torch.ones(8)
        dist.all_reduce(x)
        text = iris_pg.explain()
        assert "CPU tensors" in text and "CUDA tensors on cuda:0" in text and f"slots of {CHUNK} bytes" in text
        group.set_timeout(datetime.timedelta(seconds=7))
        assert group._device_transport._watchdog.timeout_s == 7 and not group._known
        with pytest.raises(ArgumentError, match="this rank itself"):
            group.send([x], rank, 0)
        with pytest.raises(ArgumentError, match="has moved tensors on cuda:0 before"):
            group.heap_on("cuda:1")
        before = group._device_transport.sequence
        dist.all_reduce(x)  # an error in an argument harms nothing
        fake_gpu.synchronize()
        assert group._device_transport.sequence == before + 1 and x[0] == world**2
        heap = group.heap_on("cuda:0")
        offsets = [heap.allocate(400), heap.allocate(200)]
        heap.free(offsets[0])
        assert heap.allocate(400) == offsets[0]  # after a wait for the GPU


def flat(tensors):
    return [t for item in tensors for t in (item if isinstance(item, list) else [item])]


def only_who_asks_gets_a_work(rank, world):
    """What torch.distributed calls synchronously has no work, as NCCL's have none. Without options there is one."""
    with fake_gpu.pretend():
        group, n, c10d = dist.group.WORLD, 6, dist.distributed_c10d
        mine, out, part, whole = values(rank, n, 0), torch.empty(world * n), torch.empty(n), torch.empty(world * n)
        into, is_root = list(out.chunk(world)), rank == 0
        cases = [  # operation, tensors, options, what the work gives
            (group.all_gather_single, (out, mine), c10d.AllgatherOptions, [out]),
            (group.allgather, ([into], [mine]), c10d.AllgatherOptions, [into]),
            (group.allreduce, ([mine],), c10d.AllreduceOptions, [mine]),
            (group.reduce_scatter_single, (part, whole), c10d.ReduceScatterOptions, [part]),
            (group.broadcast, ([part],), c10d.BroadcastOptions, [part]),
            (group.alltoall, (into, list(whole.chunk(world))), c10d.AllToAllOptions, into),
            (group.gather, ([into] if is_root else [], [mine]), c10d.GatherOptions, [into] if is_root else [mine]),
            (group.scatter, ([part], [into] if is_root else []), c10d.ScatterOptions, [part]),
        ]
        for i in range(3):  # the first time, and when a call is known again
            for call, tensors, kind, expected in cases:
                work = call(*tensors)
                assert work.wait(), (call, i)
                work.is_completed()  # from now on it looks at what the stream was told up to here
                fake_gpu.synchronize()
                assert work.is_success(), (call, i)
                assert [t.data_ptr() for t in flat(work.result())] == [t.data_ptr() for t in flat(expected)], (call, i)
                opts = kind()
                assert opts.asyncOp
                settle(call(*tensors, opts), True)
                opts.asyncOp = False
                is_moved = world > 1 or call.__name__ != "broadcast"
                assert (call(*tensors, opts) is None) == is_moved, (call, i)
        out = torch.empty(world * n)
        dist.all_gather_into_tensor(out, values(rank, n, 1))
        assert torch.equal(out, torch.cat([values(p, n, 1) for p in range(world)]))


OPTIONS = dict(engine="sdma", device_chunk_bytes=CHUNK)


@pytest.mark.parametrize(
    ("world", "iterations", "lanes_from"), [(1, 2, 1), (2, 4, 1), (2, 2, 1 << 40), (3, 2, 1), (4, 1, 1)]
)
def test_every_operation(ranks, world, iterations, lanes_from):
    ranks(world).run(every_operation, iterations, lanes_from, options=OPTIONS, timeout_s=100)


@pytest.mark.parametrize("world", [2, 3])
def test_calls_are_known_again(ranks, world):
    ranks(world).run(calls_are_known_again, options=OPTIONS)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_who_asks_gets_a_work(ranks, world):
    ranks(world).run(only_who_asks_gets_a_work, options=OPTIONS)


def test_streams_keep_the_order_of_calls(ranks):
    ranks(2).run(streams_keep_the_order_of_calls, options=OPTIONS)


def test_what_it_says_and_takes(ranks):
    ranks(2).run(what_it_says_and_takes, options=OPTIONS)


@pytest.mark.parametrize("function", [a_late_rank_is_named, other_operations_are_noticed])
def test_failures(ranks, function):
    ranks(2).run(function, options=OPTIONS, timeout_s=40, group_timeout_s=20)
