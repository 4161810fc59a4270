"""The transport of GPU tensors on AMD's SDMA queues: on fake GPUs (fake_gpu.py), with a stand-in for rocm-xio."""

from __future__ import annotations

import contextlib
import datetime
import time

import pytest
import torch
import torch.distributed as dist

import fake_gpu
import rank_pool
from fake_xio import FakeXio

CHUNK = 1 << 12


def values(rank, numel, iteration, salt=0):
    position = torch.arange(numel, dtype=torch.float32)
    return (position * 7 + 31 * rank + 13 * iteration + 5 * salt) % 13


@contextlib.contextmanager
def amd_gpus(signature, seed=None):
    """Have an AMD GPU for each rank, whose streams are fake_gpu's. Yields the stand-in for the library."""
    from iris_pg import device_transport
    from iris_pg.copy_engine import xio
    from iris_pg.platforms import hip

    fake = FakeXio(signature, seed=seed)
    library = xio.Library(fake.module)
    rank, patch = dist.get_rank(), pytest.MonkeyPatch()
    patch.setattr(torch.version, "hip", "7.2.0")
    patch.setattr(hip, "number_of", lambda place: 7 - int(place[-1]))  # never the rank
    patch.setattr(xio, "load", lambda: library)
    patch.setattr(device_transport, "try_streams", lambda *_: None)  # tests/unit/test_hip.py
    memory = fake_gpu.Memory.__init__

    def on_a_gpu_of_its_own(self, device):
        memory(self, device)
        self.place = f"gpu{rank}"

    patch.setattr(fake_gpu.Memory, "__init__", on_a_gpu_of_its_own)
    try:
        with fake_gpu.pretend():
            yield fake
    finally:
        patch.undo()
        fake.stop()


def settle(work, asynchronous):
    if asynchronous:
        work.wait()
        fake_gpu.Stream.current.synchronize()


def every_operation(rank, world, signature, seed, iterations):
    with amd_gpus(signature, seed) as fake:
        import iris_pg

        group = dist.group.WORLD
        heap = group._on(fake_gpu.DEVICE).heap
        assert "copies    through SDMA queues of rocm-xio" in iris_pg.explain()
        for i in range(iterations):
            for n in (1, 17, 3 * CHUNK + 5):
                asynchronous = i % 2 == 1
                mine, everyones = values(rank, n, i), [values(p, n, i) for p in range(world)]
                for out in (torch.empty(world * n), heap.empty(world * n, dtype=torch.float32)):
                    work = dist.all_gather_into_tensor(out, mine, async_op=asynchronous)
                    settle(work, asynchronous)
                    assert torch.equal(out, torch.cat(everyones)), ("all_gather", n, i)
                before = len(fake.called)
                total = mine.clone()
                settle(dist.all_reduce(total, async_op=asynchronous), asynchronous)
                assert torch.equal(total, sum(everyones)), ("all_reduce", n, i)
                assert len(fake.called) == before, "a reduction is the stream's"
                whole = torch.cat([values(rank, n, i, salt) for salt in range(world)])
                out = torch.empty(world * n)
                settle(dist.all_to_all_single(out, whole, async_op=asynchronous), asynchronous)
                assert torch.equal(out, torch.cat([values(p, n, i, rank) for p in range(world)])), ("all_to_all", n, i)
                out = mine.clone() if rank == i % world else torch.full((n,), -1.0)
                settle(dist.broadcast(out, i % world, async_op=asynchronous), asynchronous)
                assert torch.equal(out, everyones[i % world]), ("broadcast", n, i)
                if world > 1:  # by streams: they may wait for their receiver while collectives go on
                    out = torch.empty(n)
                    works = [dist.isend(mine, (rank + 1) % world), dist.irecv(out, (rank - 1) % world)]
                    for work in works:
                        settle(work, True)
                    assert torch.equal(out, everyones[(rank - 1) % world]), ("ring", n, i)
            dist.barrier()
        assert {"put", "wait_flag_then_put", "signal"} <= {name for name, _ in fake.called}


@pytest.mark.parametrize(
    ("world", "signature", "seed"), [(1, "new", None), (2, "old", None), (2, "new", 1), (3, "new", None)]
)
def test_every_operation(ranks, world, signature, seed):
    options = dict(device_chunk_bytes=CHUNK, engine="sdma")
    ranks(world).run(every_operation, signature, seed, 4 if world < 3 else 2, options=options, timeout_s=100)


class NoKernels:
    """In place of the kernels of the cu engine, which need a GPU."""

    def __init__(self, page, device, comm_sms):
        pass

    def areas(self):
        return {}

    def use(self, heap, tensors, timeout_s):
        return None

    def close(self):
        pass


def a_trial_fails(rank, world, engine):
    from iris_pg import device_transport
    from iris_pg.errors import UnsupportedError

    def fails(*_):
        raise UnsupportedError("rank 1: a copy was skipped")

    with amd_gpus("new"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_transport, "try_streams", fails)
        patch.setattr(device_transport, "DeviceExchanges", NoKernels)
        patch.setattr(device_transport, "check_comm_sms", lambda *_: None)
        if engine == "sdma":
            with pytest.raises(UnsupportedError, match="rank 1: a copy was skipped"):
                dist.group.WORLD._on(fake_gpu.DEVICE)
            return
        transport = dist.group.WORLD._on(fake_gpu.DEVICE)
        text = transport.explain()
        assert "engine    cu (copy engines failed their trial)" in text, text
        assert "copies    not used: rank 1: a copy was skipped" in text, text
        assert transport._is_for_kernels(("any",), None, lambda *_: None)


@pytest.mark.parametrize("engine", ["sdma", "auto"])
def test_streams_that_fail_their_trial_are_not_used(ranks, engine):
    ranks(2).run(a_trial_fails, engine, options=dict(engine=engine))


def a_late_rank_is_named(rank, world, signature):
    """And what the other's queues and streams wait for is written, so that all come to an end."""
    from iris_pg.errors import DeadlineError, IrisError

    with amd_gpus(signature):
        out, mine = torch.empty(world * 100), values(rank, 100, 0)
        dist.all_gather_into_tensor(out, mine)
        if rank == 1:
            rank_pool.current_store.wait(["seen"])
            with pytest.raises(IrisError):
                dist.all_gather_into_tensor(out, mine)
        else:
            dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
            work = dist.all_gather_into_tensor(out, mine, async_op=True)
            deadline = time.monotonic() + 15
            with pytest.raises(DeadlineError, match="rank 1 has not begun it"):
                while time.monotonic() < deadline:
                    work.wait()
                    time.sleep(0.02)
            rank_pool.current_store.set("seen", "")
            fake_gpu.synchronize()
            queues = dist.group.WORLD._device_transport._queues._queues
            while any(queue.done != queue.told for queue in queues):
                assert time.monotonic() < deadline + 5, queues[1].dump()
                time.sleep(0.02)


@pytest.mark.parametrize("signature", ["old", "new"])
def test_a_late_rank_is_named(ranks, signature):
    ranks(2).run(a_late_rank_is_named, signature, options=dict(engine="sdma"), group_timeout_s=20, timeout_s=60)
