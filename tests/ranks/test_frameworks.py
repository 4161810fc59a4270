"""What torch and its tools ask of a group besides operations: forms of calls, profiles, options, splits, lateness."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import time
import timeit
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import AllreduceOptions
from torch.nn.parallel import DistributedDataParallel

import rank_pool
from iris_pg import Options
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, PeerLostError, UnsupportedError
from iris_pg.operations import front
from iris_pg.process_group import IrisProcessGroup
from training import batch, differences, model

SECOND = datetime.timedelta(seconds=1)


def numbers(rank: int, n: int = 4) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 10 * rank


# Forms of calls -------------------------------------------------------------------------------------------------------


def calls_with_single_tensors(group):
    """Call operations as torch's own ProcessGroup takes them from people; return what has arrived."""
    rank, world = group.rank(), group.size()
    results = {}

    def note(name, work, *tensors):
        work.wait()
        results[name] = torch.cat([t.view(-1) for t in tensors])

    t = numbers(rank)
    note("allreduce", group.allreduce(t), t)
    note("allreduce max", group.allreduce(t := numbers(rank), dist.ReduceOp.MAX), t)
    note("allreduce list", group.allreduce([t := numbers(rank)], op=dist.ReduceOp.MIN), t)
    note("allreduce tuple", group.allreduce((t := numbers(rank),)), t)
    note("broadcast", group.broadcast(t := numbers(rank), 1), t)
    note("broadcast root", group.broadcast(t := numbers(rank), root=0), t)
    note("reduce", group.reduce(t := numbers(rank), 1, dist.ReduceOp.SUM), t if rank == 1 else torch.zeros(4))
    note("allgather", group.allgather(into := [torch.zeros(4) for _ in range(world)], numbers(rank)), *into)
    into = [torch.zeros(4) for _ in range(world)] if rank == 0 else []
    note("gather", group.gather(into, numbers(rank), 0), torch.zeros(1), *into)
    parts = [numbers(7 + p) for p in range(world)]
    note("scatter", group.scatter(t := torch.zeros(4), parts if rank == 0 else [], 0), t)
    note("reduce_scatter", group.reduce_scatter(t := torch.zeros(4), [numbers(rank + p) for p in range(world)]), t)
    note("alltoall_base", group.alltoall_base(t := torch.zeros(2 * world), numbers(rank, 2 * world), [], []), t)
    group.barrier().wait()
    return results


def compares_forms(rank, world):
    gloo = dist.new_group(backend="gloo")
    group = dist.group.WORLD
    assert not differences(calls_with_single_tensors(group), calls_with_single_tensors(gloo))
    work = group.allreduce(torch.ones(1))
    assert work.is_completed()
    for call in (
        lambda: group.allreduce(torch.ones(1), timeout=SECOND),
        lambda: group.barrier(SECOND),
        lambda: group.broadcast(torch.ones(1), 0, SECOND),
        lambda: group.allgather([torch.ones(1)] * world, torch.ones(1), SECOND),
    ):
        with pytest.raises(UnsupportedError, match=r"one call has no deadline of its own; use group\.set_timeout"):
            call()


def test_single_tensors_with_options_as_arguments(ranks):
    ranks(2).run(compares_forms)


# Profiles and debugging -----------------------------------------------------------------------------------------------


def records(rank, world):
    rows = [torch.zeros(4) for _ in range(world)]
    whole = torch.ones(world * 4)
    group = dist.group.WORLD
    counted = Counter()

    @contextlib.contextmanager
    def recorder(name):
        counted[name] += 1
        yield

    with (
        mock.patch.object(torch.profiler, "record_function", recorder),
        mock.patch.object(torch.autograd.profiler, "_is_profiler_enabled", True),
    ):
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
        dist.reduce(torch.ones(4), 0)
        dist.all_gather(rows, torch.ones(4))
        dist.all_gather_into_tensor(whole, torch.ones(4))
        dist.reduce_scatter(torch.ones(4), rows)
        dist.reduce_scatter_tensor(torch.ones(4), whole)
        dist.all_to_all(rows, [torch.ones(4) for _ in range(world)])
        dist.all_to_all_single(whole, torch.ones(world * 4))
        dist.gather(torch.ones(4), rows if rank == 0 else None, 0)
        dist.scatter(torch.ones(4), rows if rank == 0 else None, 0)
        dist.barrier()
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", group.group_name)
        )
        if rank == 0:
            dist.send(torch.ones(4), 1)
        if rank == 1:
            dist.recv(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
    names = "broadcast reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all "
    names += "all_to_all_single gather scatter barrier"
    expected = {f"iris:{name}": 1 for name in names.split()} | {"iris:all_reduce": 2}
    assert counted == expected | ({"iris:send": 1} if rank == 0 else {"iris:recv": 1})


def test_every_operation_is_recorded_by_name(ranks):
    """Without a profiler, which takes seconds to start and leaves a thread behind."""
    ranks(2).run(records)


class Idle:
    """A class whose operation does nothing, to time what comes before one."""

    def allreduce(self, tensors, opts=None):
        return None


def fronted():
    return front.install(type("Fronted", (Idle,), {}))().allreduce


def test_the_profiler_shows_what_is_recorded():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fronted()([torch.ones(1)], AllreduceOptions())
    assert "iris:all_reduce" in {event.key for event in profile.key_averages()}


def test_without_a_profiler_the_way_to_an_operation_is_short():
    """A look at the profiler's switch takes some 0.02 us, and all that comes before an operation some 0.3 us."""

    def seconds(call, *arguments):  # short runs, of which one is not interrupted
        return min(timeit.repeat(lambda: call(*arguments), number=200, repeat=500)) / 200

    def look():
        if front.profiler._is_profiler_enabled:
            raise AssertionError

    arguments = ([torch.ones(1)], AllreduceOptions())
    assert seconds(look) < 0.3e-6
    extra = seconds(fronted(), *arguments) - seconds(Idle().allreduce, *arguments)
    assert extra < 1.5e-6, f"{extra * 1e6:.2f} us"


def trains_in_detail(rank, world):
    level = dist.get_debug_level()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    try:
        group = dist.new_group()
        assert type(group) is IrisProcessGroup
        net = DistributedDataParallel(model(), process_group=group)
        x, y = batch(rank, 0)
        nn.functional.mse_loss(net(x), y).backward()
        dist.all_gather_object([None] * world, rank, group=group)
        return [p.grad.sum().item() for p in net.parameters()]
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]
        dist.set_debug_level(level)


def test_debug_level_detail(ranks):
    one, other = ranks(2).run(trains_in_detail)
    assert one == other


# Options and backends -------------------------------------------------------------------------------------------------


def makes_subgroups(rank, world, init):
    options = dict(IRIS_PG_CHUNK_BYTES="1024")
    os.environ.update(options)
    try:
        group = dist.group.WORLD
        inherited = dist.new_group(backend="iris")
        given = dist.new_group(backend="iris", pg_options=Options(chunk_bytes=2048))
        dist.all_reduce(torch.ones(3), group=inherited)
    finally:
        for name in options:
            del os.environ[name]
    is_same = getattr(group, "options", None) is inherited.options
    return is_same, inherited.options.chunk_bytes, given.options.chunk_bytes


def test_a_subgroup_takes_the_options_of_the_default_group(ranks):
    assert ranks(2).run(makes_subgroups, "iris", options=dict(chunk_bytes=512)) == [(True, 512, 2048)] * 2


def test_or_those_of_the_environment_when_that_is_of_another_backend(ranks):
    assert ranks(2).run(makes_subgroups, "gloo", init="gloo") == [(False, 1024, 2048)] * 2


def makes_with_a_mixed_name(rank, world, name):
    dist.init_process_group(name, store=rank_pool.current_store, rank=rank, world_size=world, timeout=20 * SECOND)
    tensor = numbers(rank)
    dist.all_reduce(tensor)
    objects = [None] * world
    dist.all_gather_object(objects, rank)
    subgroup = dist.new_group()
    dist.barrier(group=subgroup)
    return type(dist.group.WORLD).__name__, type(subgroup).__name__, dist.get_backend(), tensor.tolist(), objects


@pytest.mark.parametrize("name", ["cpu:iris", "cpu:gloo,cuda:iris", "cpu:iris,cuda:nccl"])
def test_a_mixed_name_makes_a_group_of_this_backend_for_all_devices(ranks, name):
    """torch puts a group that is written in Python in the place of all that the name says."""
    kind = IrisProcessGroup.__name__
    expected = (kind, kind, name, [10.0, 12.0, 14.0, 16.0], [0, 1])
    assert ranks(2).run(makes_with_a_mixed_name, name, init=None) == [expected] * 2


def answers_as_a_backend(rank, world):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "iris"
    assert backend.supports_splitting
    assert not (backend.supports_coalescing or backend.supports_time_estimate or backend.supports_shrinking)
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cuda"))
    backend._set_sequence_number_for_group()
    backend.eager_connect_single_device(torch.device("cpu"))
    backend.perform_nocolor_split(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="allocate_tensor on meta"):
        backend.allocate_tensor(3, dtype=torch.float32, device=torch.device("meta"))
    with pytest.raises(NotImplementedError, match="time estimator"), dist.distributed_c10d._time_estimator():
        pass
    assert dist.distributed_c10d._get_process_group_uid(dist.group.WORLD) == -1
    assert dist.distributed_c10d._get_pg_config()["backend_config"] == "cpu:iris,cuda:iris"


def test_answers_to_what_torch_asks_a_backend(ranks):
    ranks(2).run(answers_as_a_backend)


# Groups from groups ---------------------------------------------------------------------------------------------------


def splits(rank, world):
    parent = dist.group.WORLD
    if rank < 2:
        torch.distributed.distributed_c10d._world.group_count += 3  # as if it were in groups that the others are not in
    made = []
    for halves in ([[0, 1], [2, 3]], [[3, 0]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        mine = next((half for half in halves if rank in half), halves[0])
        group = parent.split_group(mine, group_desc="half")
        assert (group is None) == (rank not in mine)
        if group:
            made.append(group)
            tensor = torch.tensor([rank])
            group.allreduce(tensor)
            assert tensor.item() == sum(mine)
            assert group.rank() == sorted(mine).index(rank)
            assert group.options is not parent.options
            assert repr(group.options) == repr(parent.options)
            assert group.group_desc == "half"
    quarter = made[0].splitGroup([1], SECOND, Options(chunk_bytes=512), "quarter")
    if quarter:
        made.append(quarter)
        quarter.allreduce(torch.ones(1))
        assert (quarter.group_name, quarter.options.chunk_bytes, quarter._timeout_s) == ("quarter", 512, 1.0)
        assert quarter._global_ranks == [rank]
    for ranks in ([], [0, 0], [4], [-1, 0]):
        with pytest.raises(ArgumentError, match=r"split_group: ranks=.*it takes different ranks out of 0\.\.3"):
            parent.split_group(ranks)
    with pytest.raises(ArgumentError, match=r"split_group: opts is object; it takes iris_pg\.Options"):
        parent.split_group([0, 1, 2, 3], opts=object())
    for group in made:
        group.shutdown()
        with pytest.raises(ClosedError):
            group.allreduce(torch.ones(1))
    parent.allreduce(torch.ones(1))


def test_split_group(ranks):
    ranks(4).run(splits)


def splits_by_torch(rank, world):
    """torch splits groups only where there is an accelerator, to which the default group is bound."""
    cpu = torch.device("cpu")
    with (
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: cpu),
        mock.patch.object(IrisProcessGroup, "bound_device_id", cpu),
    ):
        group = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        sums = [tensor.item()]
        if hasattr(dist, "all_gather_single"):  # since torch 2.13 meshes are made in this way, too
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
            for name in ("rows", "columns"):
                group = mesh.get_group(name)
                assert group._store is not dist.group.WORLD._store
                tensor = torch.tensor([rank])
                dist.all_reduce(tensor, group=group)
                sums.append(tensor.item())
    return sums


def test_split_group_by_torch(ranks):
    for sums, expected in zip(ranks(4).run(splits_by_torch), ([2, 2, 1], [4, 4, 1], [2, 2, 5], [4, 4, 5]), strict=True):
        assert sums == expected[: len(sums)]


# Who is late ----------------------------------------------------------------------------------------------------------


def waits_for_late_ranks(rank, world):
    group = dist.group.WORLD
    store = rank_pool.current_store
    for wait_all_ranks in (False, True):
        group.monitored_barrier(wait_all_ranks=wait_all_ranks)
        group.monitored_barrier(10 * SECOND, wait_all_ranks)
    said = []
    for round_, wait_all_ranks in enumerate((False, True)):
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(DeadlineError) as caught:
                group.monitored_barrier(SECOND / 5, wait_all_ranks)
            assert 0.2 <= time.monotonic() - start < 5
            store.set(f"failed {round_}", "")
        else:
            store.wait([f"failed {round_}"])
            with pytest.raises(DeadlineError) as caught:
                group.monitored_barrier(10 * SECOND)
        said.append(str(caught.value))
    group.monitored_barrier()  # it has harmed nothing
    dist.all_reduce(torch.ones(1))
    return said


def test_a_monitored_barrier_names_who_is_late(ranks):
    first, *others = ranks(3).run(waits_for_late_ranks)
    assert re.fullmatch(
        r"monitored_barrier: Rank 1 failed to pass monitoredBarrier in 200 ms, nor has rank 2 "
        r"\[group=0 rank=0 op=monitored_barrier seq=5\]",
        first[0],
    )
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms [group=0 rank=0" in first[1]
    for said in others:
        assert "rank 0 has waited in vain: Rank 1 failed to pass monitoredBarrier in 200 ms" in said[0]


def leaves_others_waiting(rank, world):
    if rank == 1:
        os._exit(0)
    if rank == 2:
        rank_pool.current_store.wait(["named"])
        return ""
    try:
        with pytest.raises(PeerLostError) as caught:
            dist.group.WORLD.monitored_barrier(30 * SECOND)
        with pytest.raises(DeadlineError) as late:
            dist.group.WORLD.monitored_barrier(SECOND / 5, wait_all_ranks=True)
    finally:
        rank_pool.current_store.set("named", "")
    return f"{caught.value}\n{late.value}"


def test_a_monitored_barrier_names_who_has_died(mortal_ranks):
    said, _, _ = mortal_ranks(3).run(leaves_others_waiting, may_die=(1,))
    gone, late = said.splitlines()
    assert "Rank 1 failed to pass monitoredBarrier; rank 1 has died or left the group [" in gone
    assert "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms; rank 1 has died or left the group [" in late
