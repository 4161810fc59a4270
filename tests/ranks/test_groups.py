"""Groups: subsets, many at once, from several threads, made again and again; options; forks; closing."""

from __future__ import annotations

import datetime
import inspect
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import rank_pool
from iris_pg import Options
from iris_pg.errors import ArgumentError, ClosedError, IrisError, MismatchError, OptionError


def gather(value: int, group: dist.ProcessGroup | None = None, n: int = 3) -> list[int]:
    """Return what all ranks of ``group`` give, [world]; each rank's tensor has ``n`` elements."""
    output = torch.full((dist.get_world_size(group) * n,), -1, dtype=torch.int64)
    dist.all_gather_into_tensor(output, torch.arange(n) + 1000 * value, group=group)
    rows = output.view(-1, n)
    assert torch.equal(rows - rows[:, :1], torch.arange(n).expand_as(rows))
    return (rows[:, 0] // 1000).tolist()


# Subsets --------------------------------------------------------------------------------------------------------------


def uses_subsets(rank, world):
    subsets = [[0], [0, 2], [1, 3], [2, 0], [3, 1, 0], [0, 1, 2, 3], [2]]
    for members in subsets:
        group = dist.new_group(members)
        if rank not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        # new_group sorts the ranks of a group, unless told to leave them.
        order = sorted(members)
        assert gather(rank, group) == order
        for root in order:
            tensor = torch.full((5,), rank)
            dist.broadcast(tensor, src=root, group=group)  # a global rank
            assert tensor.tolist() == [root] * 5
            into = [torch.zeros(2, dtype=torch.int64) for _ in order] if rank == root else None
            dist.gather(torch.full((2,), rank), into, dst=root, group=group)
            assert into is None or [t[0].item() for t in into] == order
            output = torch.zeros(1, dtype=torch.int64)
            dist.scatter(output, [torch.tensor([p]) for p in order] if rank == root else None, src=root, group=group)
            assert output.item() == rank
        objects = [None] * len(members)
        dist.all_gather_object(objects, f"I am {rank}", group=group)
        assert objects == [f"I am {p}" for p in order]
        dist.barrier(group=group)
    assert gather(rank) == [0, 1, 2, 3]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # newer than torch 2.11
        unsorted = dist.new_group([3, 1, 0], sort_ranks=False)
        if rank != 2:
            assert gather(rank, unsorted) == [3, 1, 0]
    groups, _ = dist.new_subgroups(2)
    assert gather(rank, groups) == [rank // 2 * 2, rank // 2 * 2 + 1]
    dist.destroy_process_group(groups)
    assert gather(rank) == [0, 1, 2, 3]


def test_subsets_in_any_order_with_ranks_translated(ranks):
    ranks(4).run(uses_subsets)


def interleaves_groups(rank, world):
    pairs = {(a, b): dist.new_group([a, b]) for a in range(world) for b in range(a + 1, world)}
    works = []
    for i in range(20):
        for (a, b), group in pairs.items():
            if rank in (a, b):
                output = torch.zeros(2, dtype=torch.int64)
                works.append(
                    (a, b, i, output, dist.all_gather_into_tensor(output, torch.tensor([i * 10 + rank]), group, True))
                )
        assert gather(rank * 7 + i) == [p * 7 + i for p in range(world)]
    for a, b, i, output, work in reversed(works):
        work.wait()
        assert output.tolist() == [i * 10 + a, i * 10 + b]


@pytest.mark.parametrize("options", [None, dict(hostile_seed=1)])
def test_overlapping_groups_interleaved(ranks, options):
    ranks(3).run(interleaves_groups, options=options)


def uses_groups_from_threads(rank, world):
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    failures = []

    def work_on(number):
        try:
            for i in range(200):
                n = 1 + (i * 37) % 300
                assert gather(100 * number + i + rank, groups[number], n) == [
                    100 * number + i + p for p in range(world)
                ]
                if i % 10 == number:
                    time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for i in range(100):
        assert gather(i + rank) == [i + p for p in range(world)]
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("options", [dict(chunk_bytes=256), dict(chunk_bytes=256, hostile_seed=5)])
def test_groups_used_from_threads_at_the_same_time(ranks, options):
    ranks(2).run(uses_groups_from_threads, options=options)


# Made again -----------------------------------------------------------------------------------------------------------


def makes_groups_again(rank, world, times):
    before = rank_pool.holdings()
    store = rank_pool.current_store
    for i in range(times):
        dist.init_process_group(
            "iris", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
        )
        assert gather(rank + i) == [p + i for p in range(world)]
        subgroup = dist.new_group(list(range(world)))
        assert gather(rank - i, subgroup) == [p - i for p in range(world)]
        dist.destroy_process_group()
    del subgroup
    return rank_pool.left_over(before, rank_pool.CLEAN_S)


@pytest.mark.parametrize("world", [2, 4])
def test_twenty_times_on_one_store(ranks, world):
    assert ranks(world).run(makes_groups_again, 20, init=None) == [""] * world


def makes_groups_on_a_file(rank, world, path):
    store = dist.FileStore(path, world)
    for i in range(3):
        dist.init_process_group(
            "iris", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30)
        )
        assert gather(rank + i) == [p + i for p in range(world)]
        dist.destroy_process_group()


def test_on_a_file_store(ranks, tmp_path):
    ranks(2).run(makes_groups_on_a_file, str(tmp_path / "store"), init=None)


def destroys_with_work_outstanding(rank, world, waits_for):
    """Rank 0 begins an operation that nobody joins, and leaves: it must not hang, and its work must end with an
    error.
    """
    group = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        work = dist.all_gather_into_tensor(torch.zeros(world * 100_000), torch.ones(100_000), async_op=True)
        future = work.get_future()
        time.sleep(0.05)
        start = time.monotonic()
        dist.destroy_process_group()
        took = time.monotonic() - start
        assert took < 10, f"it took {took:.1f} s"
        assert work.is_completed()
        assert not work.is_success()
        assert future.done()
        with pytest.raises(ClosedError, match="the group was closed") as caught:
            (work if waits_for == "work" else future).wait()
        if waits_for == "future":
            # torch's frames in it hold the future, and that the error: a leak of torch's own. Waiting for a work has
            # none.
            caught.value.__traceback__ = None
        rank_pool.current_store.set("left", "")
    else:
        rank_pool.current_store.wait(["left"])
        dist.destroy_process_group()
    with pytest.raises(ClosedError, match="closed"):
        group.barrier()
    with pytest.raises(ClosedError, match="closed"):
        group.all_gather_single(torch.zeros(world), torch.zeros(1))
    group.shutdown()  # again
    group.abort()


@pytest.mark.parametrize("waits_for", ["work", "future"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_group_may_be_destroyed_while_an_operation_is_under_way(ranks, world, waits_for):
    ranks(world).run(destroys_with_work_outstanding, waits_for)


def leaves_at_once(rank, world):
    """A rank leaves right after its part is done; the others still have to finish theirs."""
    n = 100_000
    output = torch.zeros(world * n, dtype=torch.int64)
    if rank == 1:
        time.sleep(0.02)
    dist.all_gather_into_tensor(output, torch.arange(n) + rank)
    tensor = torch.arange(n) * (rank + 1)
    dist.broadcast(tensor, 0)
    dist.destroy_process_group()
    assert torch.equal(output.view(world, n), torch.stack([torch.arange(n) + p for p in range(world)]))
    assert torch.equal(tensor, torch.arange(n))


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_done_may_leave_before_the_others_are(ranks, world):
    for _ in range(5):
        ranks(world).run(leaves_at_once)


def keeps_tensors(rank, world):
    tensor = dist.group.WORLD.transport.heap.empty(world, dtype=torch.int64)
    dist.all_gather_into_tensor(tensor, torch.tensor([rank + 5]))
    dist.destroy_process_group()
    return tensor.tolist()


def test_heap_tensors_outlive_their_group(ranks):
    assert ranks(2).run(keeps_tensors) == [[5, 6]] * 2


def uses_high_descriptors(rank, world):
    """select() takes no descriptor from 1024 on; a group must not care."""
    import resource

    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000:
        pytest.skip("needs 2000 descriptors (ulimit -n)")
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        group = dist.new_group(list(range(world)))
        assert gather(rank, group) == list(range(world))
        group.transport.heap.empty(1000)
    finally:
        for fd in held:
            os.close(fd)


def test_in_a_process_with_many_descriptors(ranks):
    ranks(2).run(uses_high_descriptors)


# Options --------------------------------------------------------------------------------------------------------------


def makes_with_options(rank, world, options_of_rank, environment_of_rank):
    os.environ.update(environment_of_rank[rank])
    try:
        options = options_of_rank[rank]
        start = time.monotonic()
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=20),
            pg_options=Options(**options) if options else None,
        )
        return repr(dist.group.WORLD.options)
    except IrisError as error:
        assert time.monotonic() - start < 5
        return f"{type(error).__name__}: {error}"
    finally:
        for name in environment_of_rank[rank]:
            del os.environ[name]


@pytest.mark.parametrize(
    "options", [[dict(chunk_bytes=256), {}, {}], [{}, dict(heap_bytes=1 << 20), {}], [{}, {}, dict(engine="sdma")]]
)
def test_different_options_are_an_error_on_every_rank(ranks, options):
    odd = next(rank for rank, given in enumerate(options) if given)
    for rank, text in enumerate(ranks(3).run(makes_with_options, options, [{}] * 3, init=None)):
        assert text.startswith(f"{MismatchError.__name__}: rank {rank} creates the group with"), text
        assert "options are the same on all ranks" in text
        assert f"rank {odd}" in text or rank == odd, text


def test_the_environment_gives_options_and_the_code_wins(ranks):
    environment = dict(IRIS_PG_CHUNK_BYTES="512", IRIS_PG_HEAP_BYTES="1048576", IRIS_PG_TIMEOUT="7.5")
    text, _ = ranks(2).run(makes_with_options, [dict(chunk_bytes=1024)] * 2, [environment] * 2, init=None)
    assert "chunk_bytes=1024" in text
    assert "heap_bytes=1048576" in text
    assert "timeout=7.5" in text


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (dict(IRIS_PG_ENGINE="warp"), r"engine='warp' is not known; it is one of 'auto', 'cu', 'sdma'"),
        (
            dict(IRIS_PG_CHUNK_BYTES="lots"),
            r"IRIS_PG_CHUNK_BYTES='lots' cannot be read; it takes bytes, a multiple of 256",
        ),
        (dict(IRIS_PG_TIMEOUT="-1"), r"timeout=-1\.0; it takes a positive number of seconds"),
    ],
)
def test_an_environment_that_cannot_be_read(ranks, environment, message):
    for text in ranks(2).run(makes_with_options, [{}] * 2, [environment] * 2, init=None):
        assert text.startswith(OptionError.__name__), text
        assert re.search(message, text), text


def makes_with_foreign_options(rank, world):
    with pytest.raises(ArgumentError, match=r"pg_options is Options; backend iris takes iris_pg\.Options"):
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            pg_options=dist.ProcessGroup.Options("gloo") if hasattr(dist.ProcessGroup, "Options") else _gloo_options(),
        )


def _gloo_options():
    from torch._C._distributed_c10d import Backend

    return Backend.Options("gloo", datetime.timedelta(seconds=1))


def test_options_of_another_backend(ranks):
    ranks(1).run(makes_with_foreign_options, init=None)


# Forks ----------------------------------------------------------------------------------------------------------------


def forks(rank, world):
    before = gather(rank)
    work = dist.all_gather_into_tensor(torch.zeros(world), torch.ones(1), async_op=True)  # starts the engine's thread
    work.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (
            dist.barrier,
            lambda: gather(rank),
            lambda: dist.all_gather_into_tensor(torch.zeros(world), torch.ones(1), async_op=True).wait(),
            lambda: dist.group.WORLD.transport.heap.empty(4),
        ):
            try:
                call()
                said.append("nothing was raised")
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
        os.write(writing, "\n".join(said).encode())
        dist.destroy_process_group()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(100):
        assert gather(rank) == before
    return said


def test_a_fork_harms_nothing_and_cannot_use_the_group(ranks):
    for said in ranks(2).run(forks):
        assert len(said) == 4
        for line in said:
            assert line.startswith(ClosedError.__name__), said
            assert "fork" in line, said


def forks_while_a_peer_dies(rank, world):
    """A forked child must not keep this rank's links open: peers would not see it die."""
    dist.barrier()
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        dist.destroy_process_group()
        seen = rank_pool.current_store
        seen.set("left", "")
        seen.wait(["seen"])
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        rank_pool.current_store.wait(["left"])
        deadline = time.monotonic() + 5
        while not dist.group.WORLD.links.lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        lost = dist.group.WORLD.links.lost()
        rank_pool.current_store.set("seen", "")
        return lost


def test_a_rank_that_leaves_is_seen_though_a_child_of_it_lives_on(ranks):
    assert ranks(2).run(forks_while_a_peer_dies)[0] == [1]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((3,), i)


def loads_data(rank, world):
    output = torch.zeros(world * 3, dtype=torch.int64)
    total = 0
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=1, num_workers=2)
    for _ in range(2):
        for batch in loader:
            work = dist.all_gather_into_tensor(output, batch.view(-1), async_op=True)
            work.wait()
            assert output.tolist() == [int(batch[0, 0])] * (3 * world)
            total += 1
    return total


def test_a_data_loader_with_workers(ranks):
    assert ranks(2).run(loads_data) == [80, 80]
