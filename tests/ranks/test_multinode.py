"""Groups that span hosts, which ranks are on by name: they share no memory with those of another one."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import iris_pg
import rank_pool
from iris_pg.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    IrisError,
    PeerLostError,
    UnsupportedError,
)
from iris_pg.multinode import folds, wire
from iris_pg.multinode.group import HierarchicalProcessGroup
from iris_pg.process_group import IrisProcessGroup
from table.runner import groups_of, mistakes
from table.sample import sampled
from training import batch, differences, forget_meshes, mesh_of, model

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
Options = iris_pg.Options


needs_time = pytest.mark.skipif(not FULL, reason="takes long; set IRIS_PG_TEST_FULL=1")


def some(*few, full=()):
    """Return the cases of a test: a few, unless there is time."""
    return [*few, *full] if FULL else list(few)


def on(letters, rank, **options):
    """Return options that put a rank on the host whose letter is its own."""
    return Options(host=letters[rank], **options)


@contextlib.contextmanager
def world_group(rank, world, letters, timeout_s=20.0, **options):
    """Have a default group that spans hosts."""
    dist.init_process_group(
        "iris",
        store=rank_pool.current_store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
        pg_options=on(letters, rank, **options),
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


# The table ------------------------------------------------------------------------------------------------------------


def runs_the_table(rank, world, letters, rows_of_an_operation):
    with world_group(rank, world, letters):
        rows = list(sampled("sdma", len(letters), rows_of_an_operation))
        if len(set(letters)) < world:
            rows = [row for row in rows if row.operation != "recv_from_any"]  # of ranks that are alone on their hosts
        assert len(rows) > 50
        return mistakes(rows, groups_of(world, "iris"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("letters", "rows"),
    some(
        ("ab", 3), ("aab", 2), full=[("ab", None), ("aab", None), ("abab", 8), ("aabb", 8), ("abc", 8), ("aabbbc", 6)]
    ),
)
def test_the_table(ranks, letters, rows):
    for said in ranks(len(letters)).run(runs_the_table, letters, rows, init=None, timeout_s=150):
        assert not said, "\n".join(said)


# What crosses ---------------------------------------------------------------------------------------------------------


def counts_bytes(rank, world, letters, n):
    """Return the bytes that this rank sent to other hosts in each operation."""
    with world_group(rank, world, letters) as group:
        sent = {}

        def count(name, call):
            before = group._wires["cpu"].sent_bytes
            call()
            sent[name] = group._wires["cpu"].sent_bytes - before

        mine, whole = torch.full((n,), float(rank)), torch.empty(world * n)
        count("all_gather", lambda: dist.all_gather_into_tensor(whole, mine))
        assert torch.equal(whole, torch.arange(world).repeat_interleave(n).float())
        count("reduce_scatter", lambda: dist.reduce_scatter_tensor(mine, whole))
        assert torch.equal(mine, torch.full((n,), float(rank * world)))
        parts = list(whole.chunk(world)) if rank == 1 else None
        count("gather", lambda: dist.gather(mine, parts, 1))
        count("scatter", lambda: dist.scatter(mine, parts, 1))
        count("all_reduce", lambda: dist.all_reduce(whole))
        count("reduce", lambda: dist.reduce(whole, 1))
        count("broadcast", lambda: dist.broadcast(whole, 1))
        count("all_to_all", lambda: dist.all_to_all_single(whole.clone(), whole))
        count("all_reduce of 16 bits", lambda: dist.all_reduce(torch.ones(world * n, dtype=torch.bfloat16)))
        count("barrier", dist.barrier)
        if rank in (0, world - 1):
            count("message", lambda: dist.send(mine, world - 1) if rank == 0 else dist.recv(mine, 0))
        return sent


@pytest.mark.parametrize("letters", some("aab", full=["ab", "aabb", "abab", "abc", "aabbbc"]))
@pytest.mark.parametrize("n", [600, 600_000])
def test_a_byte_crosses_once_to_each_host(ranks, letters, n):
    """What is sent between hosts is the least of any algorithm; twice that for small all-reduces, which take one step
    and not two.
    """
    sent = ranks(len(letters)).run(counts_bytes, letters, n, init=None)
    world, hosts = len(letters), len(set(letters))
    part, whole = 4 * n, 4 * n * world
    elsewhere = world - letters.count(letters[1])  # ranks that are not on the root's host
    total = {name: sum(counts.get(name, 0) for counts in sent) for name in sent[0]}
    in_one_step = hosts == 2 or n == 600
    assert total == {
        "all_gather": (hosts - 1) * whole,  # of each rank to each other host, and not to each of its ranks
        "reduce_scatter": (hosts - 1) * whole,  # to each rank its part of the partial sum of each other host
        "gather": elsewhere * part,
        "scatter": elsewhere * part,
        "all_reduce": (hosts - 1) * (hosts if in_one_step else 2) * whole,
        "reduce": (hosts - 1) * whole,  # a partial sum of each other host
        "broadcast": (hosts - 1) * whole,
        "all_to_all": sum(part for x in letters for y in letters if x != y),
        # Partial sums have 32 bits, results have 16.
        "all_reduce of 16 bits": (hosts - 1) * (hosts * whole if in_one_step else whole + whole // 2),
        "barrier": hosts * (hosts - 1).bit_length(),
        "message": part,
    }
    if letters == "aabb":  # all ranks of a host have their share
        assert len({counts["all_gather"] for counts in sent}) == len({counts["all_reduce"] for counts in sent}) == 1


def sums_what_16_bits_cannot_hold(rank, world, letters):
    with world_group(rank, world, letters):
        # 256 + 0.5 is 256 in bfloat16, and so is each partial sum that is rounded; 257 has room.
        x = torch.tensor([256.0 if rank == 0 else 0.5 if rank < 3 else 0.0], dtype=torch.bfloat16)
        dist.all_reduce(x)
        parts = torch.tensor([256.0 if rank == 0 else 0.75] * world, dtype=torch.bfloat16)
        out = torch.empty(1, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(out, parts)
        return x.item(), out.item()


def test_partial_sums_are_not_rounded(ranks):
    exact = torch.tensor(256 + 3 * 0.75).bfloat16().item()
    assert torch.tensor(257.0).bfloat16().item() == 256.0  # so use a value that survives the last rounding
    assert exact == 258.0
    for _, out in ranks(4).run(sums_what_16_bits_cannot_hold, "aabb", init=None):
        assert out == exact


def adds_a_piece_and_a_little(rank, world, letters):
    sizes = dict(CROWDED_PIECE_BYTES=folds.IN_PLACE_BYTES, CROWDED_SLICE_BYTES=folds.SLICE_BYTES)
    with world_group(rank, world, letters), mock.patch.multiple(folds, **sizes):
        n = folds.IN_PLACE_BYTES // 4 + 1001
        assert folds.IN_PLACE_BYTES // 2 >= 2 * folds.SLICE_BYTES >= 2 * wire.LARGE_BYTES
        whole = torch.arange(n) % 251
        for turn in range(2):
            x = (whole + rank + turn).float()
            dist.all_reduce(x)
            assert torch.equal(x, (world * (whole + turn) + sum(range(world))).float())


def test_a_short_send_does_not_overtake_large_ones(ranks):
    """An all-reduce of a piece, which crosses in slices that a thread sends, and of a short one."""
    ranks(4).run(adds_a_piece_and_a_little, "aabb", init=None)


# The surface ----------------------------------------------------------------------------------------------------------


def picks_the_right_kind(rank, world, letters):
    with world_group(rank, world, letters, inter_host="gloo") as group:
        assert isinstance(group, HierarchicalProcessGroup)
        assert group.options.inter_host == "gloo"
        host = [p for p in range(world) if letters[p] == letters[rank]]
        inside = [dist.new_group([p for p in range(world) if letters[p] == x]) for x in dict.fromkeys(letters)]
        mine = next(g for g in inside if g is not dist.GroupMember.NON_GROUP_MEMBER)
        assert type(mine) is IrisProcessGroup and dist.get_process_group_ranks(mine) == host
        across = dist.new_group([0, world - 1])
        if rank in (0, world - 1):
            assert isinstance(across, HierarchicalProcessGroup) and across.options.inter_host == "gloo"
        split = group.split_group(list(range(1, world)))
        if split:
            x = torch.ones(3)
            split.allreduce(x)
            assert x.tolist() == [world - 1] * 3
            split.shutdown()
        text = iris_pg.explain()
        for said in ("on 2 hosts", "host a: ranks 0, 1", "gloo for cpu tensors", "within the host:", "engine    sdma"):
            assert said in text, text
        made = group.allocate_tensor(world, dtype=torch.int32, device=torch.device("cpu"))
        dist.all_gather_into_tensor(made, torch.tensor([rank], dtype=torch.int32))
        assert made.tolist() == list(range(world))
        group.monitored_barrier(datetime.timedelta(seconds=10))
        with pytest.raises(UnsupportedError, match="recv: from any rank"):
            dist.recv(torch.empty(1))
        with pytest.raises(ArgumentError, match="tag=1073741823"):
            dist.isend(torch.ones(1), (rank + 2) % world, tag=(1 << 30) - 1)
        with pytest.raises(ArgumentError, match="output of size"):
            dist.all_gather_into_tensor(torch.empty(3), torch.empty(2))  # nothing has moved
        dist.barrier()


def test_the_surface_is_that_of_any_group(ranks):
    ranks(4).run(picks_the_right_kind, "aabb", init=None)


def asks_for_nccl(rank, world):
    with pytest.raises(UnsupportedError, match='inter_host="nccl": torch was built without NCCL'):
        with world_group(rank, world, "ab", inter_host="nccl"):
            pass


def differs_in_an_option(rank, world):
    with pytest.raises(IrisError, match="rank 0 creates the group with {'inter_host': 'auto'} and rank 1 with"):
        with world_group(rank, world, "ab", inter_host=("auto", "gloo")[rank]):
            pass


@pytest.mark.parametrize("wrong", [differs_in_an_option, *([] if dist.is_nccl_available() else [asks_for_nccl])])
def test_what_cannot_be_is_an_error_of_all(ranks, wrong):
    ranks(2).run(wrong, init=None)


def overlaps(rank, world, letters):
    """Many operations in flight, messages among them, waited for in another order than they were begun in."""
    with world_group(rank, world, letters):
        values = [torch.arange(n).float() + rank for n in (1, 1000, 200_000) for _ in range(3)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
        inbox = [torch.empty(50) for _ in range(world)]
        receives = [dist.irecv(inbox[p], p, tag=7) for p in range(world) if p != rank]
        sends = [dist.isend(torch.full((50,), float(rank)), p, tag=7) for p in range(world) if p != rank]
        chained = works[-1].get_future().then(lambda future: future.value()[0].sum().item())
        for work in [*reversed(works), *receives, *sends]:
            work.wait()
        for value in values:
            assert torch.equal(value, world * torch.arange(len(value)).float() + sum(range(world)))
        assert chained.wait() == values[-1].sum().item()
        assert all((inbox[p] == p).all() for p in range(world) if p != rank)
        arriving = torch.empty(4)
        if rank == 0:
            rank_pool.current_store.wait(["has waited"])
            dist.send(torch.ones(4), world - 1)
        if rank == world - 1:
            work = dist.irecv(arriving, 0)
            assert not work.is_completed()
            with pytest.raises(DeadlineError):
                work.wait(datetime.timedelta(seconds=0.05))
            rank_pool.current_store.set("has waited", "")
            work.get_future().wait()
            assert work.is_completed() and arriving.tolist() == [1] * 4
        dist.barrier()


@pytest.mark.parametrize("letters", some("abb", full=["aabb"]))
def test_operations_overlap(ranks, letters):
    ranks(len(letters)).run(overlaps, letters, init=None)


def waits_for_a_late_message(rank, world, letters, largest_mesh):
    """A receive begins before an operation that its sender is to take part in first."""
    with mock.patch.object(wire, "LARGEST_MESH", largest_mesh), world_group(rank, world, letters):
        arriving, last = torch.zeros(3), world - 1
        if rank == 0:
            work = dist.irecv(arriving, last)
        total = torch.ones(5)
        dist.all_reduce(total)
        if rank == last:
            dist.send(torch.arange(3.0), 0)
        if rank == 0:
            work.wait()
            assert arriving.tolist() == [0, 1, 2]
        assert total.tolist() == [world] * 5


@pytest.mark.parametrize(("letters", "largest_mesh"), [("aabb", wire.LARGEST_MESH), ("abb", 0)])
def test_a_receive_may_begin_long_before_its_send(ranks, letters, largest_mesh):
    """Of any two ranks; where not all are connected, of those that are."""
    ranks(len(letters)).run(waits_for_a_late_message, letters, largest_mesh, init=None)


# Failures -------------------------------------------------------------------------------------------------------------


def told(call):
    start = time.monotonic()
    try:
        call()
    except IrisError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


def loses_a_host(rank, world, letters, how, operation, timeout_s):
    """The last host goes while the others are in an operation; return what they are told, and after it."""
    with world_group(rank, world, letters, timeout_s=timeout_s):
        size = 2_000_000
        calls = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(size)),
            "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(world * size), torch.ones(size)),
            "barrier": dist.barrier,
            "asynchronous": lambda: dist.all_reduce(torch.ones(size), async_op=True).wait(),
        }
        dist.all_reduce(torch.ones(size))
        dist.barrier()
        if letters[rank] == letters[-1]:
            if how is None:
                time.sleep(timeout_s + 6)
            else:
                os.kill(os.getpid(), how)
        said = told(calls[operation])
        again = told(lambda: dist.all_reduce(torch.ones(1)))
    return said, again


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("letters", "operation"),
    some(
        ("aab", "all_reduce"),
        full=[
            (x, op) for x in ("ab", "aabb", "aabbc") for op in ("all_reduce", "all_gather", "barrier", "asynchronous")
        ],
    ),
)
def test_a_host_that_dies_is_named_at_once(mortal_ranks, letters, operation):
    gone = [p for p, host in enumerate(letters) if host == letters[-1]]
    arguments = (letters, signal.SIGKILL, operation, 30.0)
    results = mortal_ranks(len(letters)).run(loses_a_host, *arguments, init=None, may_die=gone, timeout_s=50)
    for said, again in results[: gone[0]]:
        kind, text, seconds = said
        assert (kind, again[0]) == (PeerLostError.__name__, ClosedError.__name__), (said, again)
        assert f"on host {letters[-1]}" in text and any(f"rank {p} on host" in text for p in gone), text
        assert seconds < 20 and again[2] < 10  # of 30


@needs_time
@pytest.mark.timeout(120)
@pytest.mark.parametrize("letters", ["ab", "aabb"])
@pytest.mark.parametrize("operation", ["all_reduce", "barrier"])
def test_a_host_that_hangs_is_named_by_the_deadline(mortal_ranks, letters, operation):
    gone = [p for p, host in enumerate(letters) if host == letters[-1]]
    arguments = (letters, signal.SIGSTOP, operation, 3.0)
    with pytest.raises(rank_pool.RankError, match="was still busy") as raised:  # those that were stopped
        mortal_ranks(len(letters)).run(expects_a_deadline, *arguments, init=None, timeout_s=16)
    assert "failed" not in str(raised.value), raised.value
    assert sum(f"rank {p} was still busy" in str(raised.value) for p in range(len(letters))) == len(gone)


def expects_a_deadline(rank, world, letters, how, operation, timeout_s):
    (kind, text, seconds), again = loses_a_host(rank, world, letters, how, operation, timeout_s)
    assert kind in (DeadlineError.__name__, PeerLostError.__name__), (kind, text)
    assert f"on host {letters[-1]}" in text, text
    assert seconds < timeout_s + 5 and again[0] == ClosedError.__name__


def is_in_another_operation(rank, world, letters):
    with world_group(rank, world, letters, timeout_s=3.0):
        x = torch.ones(1000)
        call = (lambda: dist.all_reduce(x)) if letters[rank] == "a" else (lambda: dist.broadcast(x, 0))
        return told(call)


def test_hosts_in_different_operations_are_told(ranks):
    said = ranks(2).run(is_in_another_operation, "ab", init=None)
    assert {kind for kind, _, _ in said} <= {"DeadlineError", "MismatchError", "PeerLostError"}
    assert any("all_reduce" in text and "broadcast" in text for _, text, _ in said), said


def loses_a_neighbour(rank, world):
    """A rank of the first host dies; its neighbour is told by its host, and passes it on to the other host."""
    with world_group(rank, world, "aabb", timeout_s=30.0):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(lambda: dist.all_reduce(torch.ones(3_000_000)))


@needs_time
def test_a_rank_that_dies_ends_all(mortal_ranks):
    results = mortal_ranks(4).run(loses_a_neighbour, init=None, may_die=[1], timeout_s=50)
    for rank in (0, 2, 3):
        kind, text, seconds = results[rank]
        assert kind == PeerLostError.__name__ and seconds < 10 and "rank 1" in text, results[rank]


def is_aborted(rank, world):
    import threading

    with world_group(rank, world, "ab", timeout_s=30.0) as group:
        dist.barrier()
        if rank == 0:
            threading.Timer(0.3, group.abort).start()
            released = told(lambda: dist.all_reduce(torch.ones(10)))
            rank_pool.current_store.set("released", "")
            return released
        rank_pool.current_store.wait(["released"], datetime.timedelta(seconds=40))
        return told(lambda: dist.all_reduce(torch.ones(10)))


def test_abort_releases_who_waits_for_another_host(ranks):
    said = ranks(2).run(is_aborted, init=None)
    assert said[0][0] in ("ClosedError", "PeerLostError") and said[0][2] < 5, said
    assert said[1][0] == "PeerLostError" and "rank 0 on host a" in said[1][1] and said[1][2] < 5, said


# Frameworks -----------------------------------------------------------------------------------------------------------


def trains_ddp(rank, group):
    net = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.clone() for name, tensor in net.module.state_dict().items()}


def compares_ddp(rank, world, letters):
    with world_group(rank, world, letters):
        ours, theirs = trains_ddp(rank, dist.group.WORLD), trains_ddp(rank, dist.new_group(backend="gloo"))
        return ours[0], theirs[0], differences(ours[1], theirs[1])


@pytest.mark.parametrize("letters", some("ab", full=["aabb"]))
def test_ddp(ranks, letters):
    for ours, theirs, unequal in ranks(len(letters)).run(compares_ddp, letters, init=None):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert max(unequal.values(), default=0.0) < (1e-6 if len(letters) > 2 else 1e-30)


def trains_hsdp(rank, mesh, backend):
    from torch.distributed.fsdp import fully_shard

    net = model()
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
        if backend == "gloo":
            module.set_force_sum_reduction_for_comms(True)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        x, y = batch(rank, step)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}


def compares_hsdp(rank, world, letters, shape):
    with world_group(rank, world, letters):
        names = ("replicas", "shards")[-len(shape) :]
        mesh = mesh_of("iris", shape, names)
        groups = [mesh.get_group(name) for name in names]
        if len(shape) == 2:  # shards within a host, replicas across
            assert isinstance(groups[0], HierarchicalProcessGroup) and type(groups[1]) is IrisProcessGroup
        ours = trains_hsdp(rank, mesh, "iris")
        theirs = trains_hsdp(rank, mesh_of("gloo", shape, names), "gloo")
        forget_meshes()
        return ours[0], theirs[0], differences(ours[1], theirs[1])


@pytest.mark.parametrize(("letters", "shape"), some(("aabb", (2, 2)), full=[("aabb", (4,)), ("ab", (2,))]))
def test_fsdp2(ranks, letters, shape):
    for ours, theirs, unequal in ranks(len(letters)).run(compares_hsdp, letters, shape, init=None):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert max(unequal.values(), default=0.0) < 1e-6
