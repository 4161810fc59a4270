"""What happens when a rank is late, dead, or in another operation: it is named, and nothing waits for ever."""

from __future__ import annotations

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from device_data import use_device

from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]


def warmed_up(rank):
    use_device(rank)
    x = torch.ones(1003, device="cuda")
    dist.all_reduce(x)
    dist.barrier()
    return x


def wait_no_longer_than(seconds):
    """Deadlines are short only from where one is to pass: ranks that share a machine start seconds apart."""
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=seconds))


def error_of(call, kind, within_s):
    """Return the text of the error that ``call``, repeated, ends with."""
    start = time.monotonic()
    while time.monotonic() - start < within_s:
        try:
            call()
        except kind as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError(f"no {kind.__name__} within {within_s} s")


def a_late_rank_is_named(rank, world):
    x = warmed_up(rank)
    wait_no_longer_than(2)
    if rank == 1:
        time.sleep(5)
        with pytest.raises(IrisError):
            dist.all_reduce(x)
            dist.barrier()
        return
    start = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    text = error_of(work.wait, DeadlineError, 8)
    assert "all_reduce" in text and "rank 1 has not begun it" in text, text
    assert time.monotonic() - start < 4
    torch.cuda.synchronize()  # the stream was released
    with pytest.raises(ClosedError, match="Timed out"):
        dist.all_reduce(x)
    assert isinstance(work.exception(), DeadlineError) and work.is_completed() and not work.is_success()


def a_late_rank_is_named_in_a_replay(rank, world):
    x = warmed_up(rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    wait_no_longer_than(2)
    if rank == 1:
        time.sleep(5)
        return
    start = time.monotonic()
    graph.replay()
    text = error_of(dist.group.WORLD._device_transport.watch.check_open, ClosedError, 8)
    assert "replayed graph" in text and "Timed out" in text and "rank 1" in text, text
    assert time.monotonic() - start < 4
    torch.cuda.synchronize()  # it was released


def other_operations_are_noticed(rank, world):
    x = warmed_up(rank)
    work = dist.all_reduce(x, async_op=True) if rank else dist.broadcast(x, 1, async_op=True)
    text = error_of(work.wait, MismatchError, 8)
    assert "different operations" in text and ("all_reduce" in text or "broadcast" in text), text
    torch.cuda.synchronize()


def messages_of_other_sizes_are_noticed(rank, world):
    x = warmed_up(rank)
    work = dist.irecv(x[:7], 1) if rank == 0 else dist.isend(x[:9], 0)
    if rank == 0:
        assert "rank 1" in error_of(work.wait, MismatchError, 8)
        torch.cuda.synchronize()
    else:
        work.wait()
        time.sleep(1)


def a_killed_rank_is_named(rank, world, how):
    x = warmed_up(rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os._exit(7)
    if how == "replay":
        graph.replay()
        text = error_of(lambda: dist.group.WORLD._device_transport.watch.check_open(), ClosedError, 8)
    elif how == "message":
        text = error_of(dist.irecv(x, 1).wait, PeerLostError, 8)
    elif how == "barrier":
        with pytest.raises(PeerLostError) as caught:
            dist.barrier()
        text = str(caught.value)
    else:
        text = error_of(dist.all_gather_into_tensor(x.new_empty(world * 1003), x, async_op=True).wait, PeerLostError, 8)
    assert "rank 1" in text, text
    torch.cuda.synchronize()
    dist.destroy_process_group()


def abort_frees_a_stuck_stream(rank, world):
    x = warmed_up(rank)
    group = dist.new_group()
    dist.all_reduce(x, group=group)
    dist.barrier()
    start = time.monotonic()
    if rank == 0:
        dist.all_reduce(x, group=group)  # rank 1 never comes
        time.sleep(0.2)
        group.abort()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 3
        with pytest.raises(ClosedError):
            dist.all_reduce(x, group=group)
    else:
        time.sleep(1)
        group.abort()
    y = torch.full((5,), rank + 1.0, device="cuda")
    dist.all_reduce(y)  # other groups go on
    assert y[0].item() == 3
    again = dist.new_group()
    dist.all_reduce(y, group=again)
    assert y[0].item() == 6
    dist.barrier()


def a_rank_that_is_done_may_leave(rank, world):
    x = warmed_up(rank)
    if rank == 0:
        dist.broadcast(x.fill_(7), 0)
        torch.cuda.synchronize()
    else:
        torch.cuda._sleep(4_000_000_000)  # about two seconds, in which rank 0 leaves
        dist.broadcast(x, 0)
        torch.cuda.synchronize()
        assert x[0].item() == 7
        assert dist.group.WORLD._device_transport.watch.failure is None


def wrong_arguments_raise_before_anything_moves(rank, world):
    x = warmed_up(rank)
    with pytest.raises(ArgumentError, match="on one device"):
        dist.all_gather_into_tensor(torch.empty(world * 1003), x)
    with pytest.raises(ArgumentError, match="this rank itself"):
        dist.group.WORLD.send([x], rank, 0)
    dist.all_reduce(x)
    assert x[0].item() == world**2


def groups_leave_nothing(rank, world, cycles):
    device = use_device(rank)
    free, fds = [], []
    for i in range(cycles):
        group = dist.new_group()
        x = torch.full((1003,), rank + 1.0 + i, device="cuda")
        dist.all_reduce(x, group=group)
        assert x[0].item() == world * (world + 1) / 2 + world * i
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()
        free.append(torch.cuda.mem_get_info(device)[0])
        fds.append(len(os.listdir("/proc/self/fd")))
    assert fds[-1] <= fds[2], fds
    assert free[-1] >= free[2] - (8 << 20), free


def a_longer_timeout_holds_for_calls_made_before(rank, world):
    x = warmed_up(rank)
    wait_no_longer_than(2)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    wait_no_longer_than(60)
    x.fill_(rank + 1)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(16)  # longer than a kernel waits with the timeout before, which is 14 s
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert bool((x == 3).all()), x[:4]
    dist.barrier()


OPTIONS = dict(engine="sdma", device_chunk_bytes=1 << 20)


@pytest.mark.parametrize(
    "function",
    [
        a_late_rank_is_named,
        a_late_rank_is_named_in_a_replay,
        other_operations_are_noticed,
        messages_of_other_sizes_are_noticed,
        abort_frees_a_stuck_stream,
        a_rank_that_is_done_may_leave,
        wrong_arguments_raise_before_anything_moves,
    ],
)
def test_failures(ranks, function):
    ranks(2).run(function, options=OPTIONS, timeout_s=40, group_timeout_s=20.0)


@pytest.mark.parametrize(
    "function",
    [
        a_late_rank_is_named,
        a_late_rank_is_named_in_a_replay,
        other_operations_are_noticed,
        abort_frees_a_stuck_stream,
        a_longer_timeout_holds_for_calls_made_before,
    ],
)
def test_failures_of_kernels(ranks, function):
    ranks(2).run(function, options=dict(engine="cu"), timeout_s=40, group_timeout_s=20.0)


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("sdma", "collective"),
        ("sdma", "message"),
        ("sdma", "barrier"),
        ("sdma", "replay"),
        ("cu", "collective"),
        ("cu", "replay"),
    ],
)
def test_a_killed_rank_is_named(mortal_ranks, engine, how):
    options = OPTIONS | dict(engine=engine)
    mortal_ranks(2).run(a_killed_rank_is_named, how, options=options, timeout_s=40, group_timeout_s=20.0, may_die=[1])


def test_groups_leave_nothing(ranks):
    ranks(2).run(groups_leave_nothing, 8, options=OPTIONS, timeout_s=60)
