"""The end of a process that has not destroyed its groups."""

import os

import pytest

from integration.test_examples import REGISTERED, torchrun

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))

SCRIPT = (
    REGISTERED
    + """
import sys
import torch, torch.distributed as dist

engine, state = sys.argv[1:]
dist.init_process_group("iris", pg_options=iris_pg.Options(engine=engine))
rank = dist.get_rank()
context = iris_pg.iris(1 << 20, engines=("sdma",))
for i in range(50 if engine == "sdma" else 3):
    works = [dist.all_reduce(torch.ones(300) * j, async_op=True) for j in range(5)]
    works.append(dist.barrier(async_op=True))
    works.append(dist.isend(torch.ones(3), 1) if rank == 0 else dist.irecv(torch.ones(3), 0))
    futures = [work.get_future().then(lambda future: torch.ones(3)) for work in works]
if state == "pending" and rank == 0:  # for ever
    late = [dist.all_reduce(torch.ones(1), async_op=True), dist.irecv(torch.ones(1), 1, tag=7)]
    futures = [work.get_future().then(lambda future: None) for work in late]
if state == "done":
    for work in works:
        work.wait()
    dist.barrier()
"""
)


@pytest.mark.parametrize(
    ("engine", "state"), [("sdma", "done"), ("cu", "pending"), *([("sdma", "pending"), ("cu", "done")] if FULL else [])]
)
def test_a_process_ends_well_with_its_groups_open(tmp_path, engine, state):
    """Threads of the engines stop before the interpreter does. One that it ends itself aborts the process at times."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = torchrun(str(script), engine, state)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr
