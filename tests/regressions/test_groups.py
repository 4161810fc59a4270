"""Faults of other systems with groups: when they are made and closed, who is late or gone, what is kept alive.

Each test is named after the report that it keeps out.
"""

from __future__ import annotations

import datetime
import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rank_pool
from iris_pg.errors import ClosedError, IrisError
from iris_pg.mailbox import MailWork
from training import FEATURES, batch, differences, model

ENGINES = ["sdma", "cu"]


def meets(value: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return what all ranks of a group give."""
    output = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather_into_tensor(output, torch.tensor([value]), group=group)
    return output.tolist()


# Memory ---------------------------------------------------------------------------------------------------------------


def drops_tensors(rank, world, rounds):
    """Forget every tensor of an operation as soon as it has begun, and take memory of the same size."""
    n = 3000
    for i in range(rounds):
        base = torch.arange(2 * n, dtype=torch.int32) * (i + 3)
        outputs = [torch.empty(n, dtype=torch.int32), torch.empty(world * n, dtype=torch.int32)]
        if rank == i % world:
            time.sleep(0.002)
        works = [
            dist.all_reduce(outputs[0].copy_(base[::2] + rank), async_op=True),
            dist.all_gather_into_tensor(outputs[1], base[1::2] - rank, async_op=True),
            dist.all_to_all_single(torch.empty_like(outputs[1]), base.repeat(world)[: world * n], async_op=True),
        ]
        taken = [torch.full((n,), -1, dtype=torch.int32) for _ in range(6)]
        for work in works:
            work.wait()
        assert torch.equal(outputs[0], world * base[::2] + sum(range(world))), i
        assert torch.equal(outputs[1], torch.cat([base[1::2] - p for p in range(world)])), i
        assert all((t == -1).all() for t in taken), i


@pytest.mark.parametrize(("engine", "rounds"), [("sdma", 60), ("cu", 4)])
def test_pytorch_188655_and_147168_tensors_dropped_after_an_asynchronous_call(ranks, engine, rounds):
    ranks(2).run(drops_tensors, rounds, options=dict(engine=engine))


def trains_while_collecting(rank, world):
    """C++ holds the works of a reducer's buckets; a collector that never stops must not take them away."""
    stop = threading.Event()

    def collect():
        while not stop.is_set():
            gc.collect()
            time.sleep(1e-3)

    def train(group):
        net = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.001)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            x, y = batch(rank, step)
            assert x.size(-1) == FEATURES
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in net.module.state_dict().items()}

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        ours = train(dist.group.WORLD)
    finally:
        stop.set()
        thread.join()
    return differences(ours, train(dist.new_group(backend="gloo")))


def test_pytorch_79176_works_outlive_a_garbage_collector(ranks):
    assert ranks(2).run(trains_while_collecting) == [{}, {}]


# Groups made and closed -----------------------------------------------------------------------------------------------


def aborts_a_stuck_group(rank, world):
    """Rank 2 computes and never comes; the others give the group up and go on in a new one, on the same store."""
    survivors = list(range(world - 1))
    dist.barrier()
    if rank == world - 1:
        rank_pool.current_store.wait(["going on"])  # stuck, as far as the others can tell
        return None
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    threading.Timer(0.2, dist.group.WORLD.abort).start()
    start = time.monotonic()
    with pytest.raises(ClosedError, match="closed"):
        work.wait()
    assert time.monotonic() - start < 5
    dist.destroy_process_group()
    store = dist.PrefixStore("again", rank_pool.current_store)
    timeout = datetime.timedelta(seconds=20)
    dist.init_process_group("iris", store=store, rank=rank, world_size=world - 1, timeout=timeout)
    assert meets(rank + 5) == [p + 5 for p in survivors]
    dist.barrier()
    if rank == 0:
        rank_pool.current_store.set("going on", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_151159_and_torchft_132_abort_and_go_on_without_a_stuck_rank(ranks, engine):
    ranks(3).run(aborts_a_stuck_group, options=dict(engine=engine))


def closes_while_closing(rank, world):
    """A thread aborts a group at the moment in which another destroys it."""
    group = dist.new_group(list(range(world)))
    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
    work.wait()
    queue = group.transport.queue
    close = queue.close

    def close_in_between(error):
        queue.close = close
        thread = threading.Thread(target=group.abort)
        thread.start()
        thread.join()
        close(error)

    queue.close = close_in_between
    dist.destroy_process_group(group)
    assert queue.close == close


def test_a_group_that_two_threads_close_at_the_same_time(ranks):
    ranks(2).run(closes_while_closing, options=dict(engine="sdma"))


def makes_groups_at_once(rank, world, times):
    """Destroy and make again at once: a rank may be in the next while another is still in the last."""
    for i in range(times):
        dist.init_process_group(
            "iris",
            store=rank_pool.current_store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=20),
        )
        if i % 2:
            assert meets(rank * i) == [p * i for p in range(world)]
        dist.destroy_process_group()


def test_pytorch_55967_and_74666_twenty_groups_in_a_row_on_one_store(ranks):
    ranks(3).run(makes_groups_at_once, 20, init=None)


def uses_subsets_then_all(rank, world):
    for members in ([0], [0, 2], [1, 3]):
        group = dist.new_group(members)
        if rank in members:
            assert meets(rank, group) == members
            dist.barrier(group)
    for i in range(3):
        assert meets(rank + i) == [p + i for p in range(world)]


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_134314_and_130102_subsets_and_then_all(ranks, engine):
    ranks(4).run(uses_subsets_then_all, options=dict(engine=engine))


def roots_in_a_subgroup(rank, world):
    """Roots and peers are given as ranks of the default group."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    tensor = torch.arange(6) + 100 * rank
    dist.broadcast(tensor, src=3, group=group)
    assert torch.equal(tensor, torch.arange(6) + 300)
    into = [torch.zeros(2, dtype=torch.int64) for _ in range(2)] if rank == 3 else None
    dist.gather(torch.tensor([rank, 7]), into, dst=3, group=group)
    assert into is None or [t.tolist() for t in into] == [[1, 7], [3, 7]]
    output = torch.zeros(1, dtype=torch.int64)
    dist.scatter(output, [torch.tensor([10]), torch.tensor([30])] if rank == 3 else None, src=3, group=group)
    assert output.item() == 10 * rank
    total = torch.tensor([rank])
    dist.reduce(total, dst=3, group=group)
    assert total.item() == (4 if rank == 3 else 1)
    if rank == 3:
        dist.send(torch.tensor([33]), dst=1, group=group)
    else:
        dist.recv(output, src=3, group=group)
        assert output.item() == 33


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_74602_ranks_of_a_subgroup_are_given_as_global_ranks(ranks, engine):
    ranks(4).run(roots_in_a_subgroup, options=dict(engine=engine))


def starts_with_a_barrier(rank, world, asynchronous):
    work = dist.barrier(async_op=asynchronous)
    if work:
        work.wait()
    assert meets(rank) == list(range(world))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_pytorch_124714_and_15051_a_barrier_comes_first(ranks, world, asynchronous, engine):
    ranks(world).run(starts_with_a_barrier, asynchronous, options=dict(engine=engine))


# Late ranks -----------------------------------------------------------------------------------------------------------


def comes_late(rank, world, late_s, group_s, store_s, path):
    """The store has a timeout of its own, which must not matter: neither to set-up nor to an operation."""
    store = dist.FileStore(path, world)
    store.set_timeout(datetime.timedelta(seconds=store_s))
    if rank == 1:
        time.sleep(late_s)
    try:
        dist.init_process_group(
            "iris", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=group_s)
        )
        if rank == 1:
            time.sleep(late_s)
        dist.all_reduce(torch.ones(3))
    except IrisError as error:
        return type(error).__name__
    return "in time"


@pytest.mark.parametrize("store_s", [0.3, 60])
@pytest.mark.parametrize(("group_s", "expected"), [(0.8, "DeadlineError"), (20, "in time")])
def test_pytorch_107177_and_191560_only_the_timeout_of_the_group_counts(ranks, tmp_path, store_s, group_s, expected):
    said = ranks(2).run(comes_late, 1.5, group_s, store_s, str(tmp_path / "store"), init=None, timeout_s=40)
    assert said[0] == expected
    assert said[1] in (("DeadlineError", "PeerLostError") if expected != "in time" else ("in time",))


def changes_its_input(rank, world, rounds):
    """A late peer may still be reading; a fast one may be writing the next result already."""
    n = 2000
    for i in range(rounds):
        source = torch.arange(n) * (rank + 1) + i
        summed, parts = source.clone(), torch.empty(world * n, dtype=torch.int64)
        if rank == i % world:
            time.sleep(0.003)
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(parts, source)
        source.fill_(-1)
        if rank == (i + 1) % world:
            time.sleep(0.002)
        assert torch.equal(summed, torch.arange(n) * sum(range(1, world + 1)) + world * i), i
        assert torch.equal(parts.view(world, n), torch.stack([torch.arange(n) * (p + 1) + i for p in range(world)])), i
        summed.fill_(-2)
        parts.fill_(-2)


@pytest.mark.parametrize(("engine", "rounds"), [("sdma", 60), ("cu", 5)])
def test_pytorch_137171_inputs_change_right_after_an_operation(ranks, engine, rounds):
    ranks(3).run(changes_its_input, rounds, options=dict(engine=engine))


# Messages -------------------------------------------------------------------------------------------------------------


def matches_tags(rank, world):
    """Receives may be posted before sends, and in another order than they: the tag says which is which."""
    peer, into = 1 - rank, [torch.zeros(500, dtype=torch.int64) for _ in range(3)]
    works = [dist.irecv(into[0], peer, tag=1), dist.irecv(into[1], peer, tag=2)]
    works += [dist.isend(torch.arange(500) + 10 * rank + tag, peer, tag=tag) for tag in (2, 1)]
    for work in works:
        work.wait()
    assert torch.equal(into[0], torch.arange(500) + 10 * peer + 1)
    assert torch.equal(into[1], torch.arange(500) + 10 * peer + 2)
    works = [dist.isend(torch.arange(500) - rank, peer)]  # and the other way round, from whoever sends
    assert dist.recv(into[2]) == peer
    assert torch.equal(into[2], torch.arange(500) - peer)
    works[0].wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_94819_and_nccl_479_tags_and_receives_that_come_first(ranks, engine):
    ranks(2).run(matches_tags, options=dict(engine=engine))


def test_a_receive_is_not_done_before_its_output_is_written():
    """An output with gaps is copied when the message is whole, by any thread; who waits meanwhile waits for that."""
    work = MailWork("recv", 0, 0, torch.zeros(1), lambda work, timeout_s: None)
    copying, may_copy, written = threading.Event(), threading.Event(), []

    def copy():
        copying.set()
        assert may_copy.wait(10)
        written.append(True)

    work.completion.after = copy
    thread = threading.Thread(target=work.finished, args=(None,))
    thread.start()
    assert copying.wait(10)
    timer = threading.Timer(0.1, may_copy.set)
    timer.start()
    assert work.wait()
    assert written
    thread.join()
    timer.join()
