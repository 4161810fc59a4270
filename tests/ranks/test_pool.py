"""The pool itself: a test that fails, hangs, dies or leaks in a rank is told so, and harms no other test."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from rank_pool import RankError

KEPT: list[object] = []


def gathers(rank, world):
    output = torch.empty(world, dtype=torch.int64)
    dist.all_gather_into_tensor(output, torch.tensor([10 + rank]))
    return output.tolist()


def raises(rank, world):
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def sleeps(rank, world):
    if rank == 1:
        time.sleep(100)


def dies(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def leaks(rank, world):
    from iris_pg.platforms import cpu

    if rank == 1:
        KEPT.extend([os.open("/dev/null", 0), cpu.private_memory(4096)])
        if os.fork() == 0:
            time.sleep(100)
            os._exit(0)


def skips(rank, world):
    pytest.skip("not here")


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            raises,
            r'rank 1 failed first\n(?s:.*)raise ValueError\("boom"\)(?s:.*)rank 0 failed then: .*rank 1 has died',
        ),
        (sleeps, r"rank 1 was still busy .*\n(?s:.*)in sleeps\n"),
        (dies, r"rank 1 died, exit code -9"),
        (
            leaks,
            r"rank 1 holds more than before the run: 1 x descriptor of /dev/null, 1 x mapping of /memfd:iris.*, 1 x "
            r"child .*pool",
        ),
    ],
)
def test_what_goes_wrong_in_a_rank_is_told_and_ends_there(ranks, fails, message):
    with pytest.raises(RankError, match=message):
        ranks(2).run(fails, timeout_s=2)
    assert ranks(2).run(gathers) == [[10, 11]] * 2


def test_a_skip_in_a_rank_skips_the_test(ranks):
    with pytest.raises(pytest.skip.Exception, match="not here"):
        ranks(2).run(skips)


def test_without_a_group_none_is_made(ranks):
    assert ranks(1).run(is_initialized, init=None) == [False]


def is_initialized(rank, world):
    return dist.is_initialized()
