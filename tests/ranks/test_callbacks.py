"""Callbacks of futures: they run on whatever thread ends an operation, and may begin operations and wait for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

ENGINES = ["sdma", "cu"]


def chains(rank, world, steps, waits):
    """Each operation is begun by the callback of the one before, in one of two groups."""
    groups = [dist.group.WORLD, dist.new_group()]
    done, last = torch.futures.Future(), []

    def begin(step, value):
        tensor = torch.tensor([value + rank])
        work = dist.all_reduce(tensor, group=groups[step % 2], async_op=True)
        if waits:
            work.wait()
        work.get_future().then(lambda future: go_on(step, future))

    def go_on(step, future):
        try:
            value = future.value()[0].item()
            if waits:
                dist.barrier(groups[step % 2])
            if step + 1 < steps:
                begin(step + 1, value)
            else:
                last.append(value)
                done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    begin(0, 0)
    done.wait()
    return last


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("waits", [False, True])
def test_a_callback_begins_the_next_operation(ranks, engine, waits):
    expected = 0
    for _ in range(12):
        expected = 3 * expected + 3
    assert ranks(3).run(chains, 12, waits, options={"engine": engine}) == [[expected]] * 3


def waits_for_another_group(rank, world):
    """Rank 0 waits in one group; what its peer needs to come there is begun by a callback in rank 0."""
    other = dist.new_group()
    first = dist.all_reduce(torch.ones(1), async_op=True)
    begun = first.get_future().then(lambda future: dist.all_reduce(torch.ones(1), group=other, async_op=True))
    if rank == 1:
        begun.wait().wait()
    dist.barrier()
    return begun.wait().wait()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_callback_runs_while_a_later_operation_waits(ranks, engine):
    assert ranks(2).run(waits_for_another_group, options={"engine": engine}) == [True, True]
