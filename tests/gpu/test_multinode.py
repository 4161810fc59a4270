"""Groups that span hosts, on CUDA tensors: NCCL between the hosts. A host is a name here, and each rank has its own, as
NCCL takes a GPU once.
"""

from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist
from device_data import OPERATIONS, Case, mistakes, use_device

import rank_pool
from iris_pg import Options, explain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; torch sees fewer"),
]


def every_operation(rank, world, dtypes, sizes):
    os.environ["NCCL_RAS_ENABLE"] = "0"  # else a thread of NCCL's, and its sockets, stay with the process
    device = use_device(rank)
    dist.init_process_group(
        "iris",
        store=rank_pool.current_store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
        pg_options=Options(host="abcdefgh"[rank], engine="auto"),
    )
    try:
        wrong, count = [], 0
        for operation in OPERATIONS:
            for numel in sizes:
                for dtype in dtypes:
                    count += 1
                    pairs = operation(Case(rank, world, numel, dtype, count, None, count % 3 == 0))
                    wrong += mistakes(pairs, (operation.__name__, numel, dtype, count % 3 == 0))
                    assert len(wrong) < 5, "\n".join(wrong)
        assert not wrong, "\n".join(wrong)
        assert "nccl for cuda tensors" in explain(), explain()
        n = 1 << 20
        x = torch.full((n,), rank + 1.0, device=device)
        graph = torch.cuda.CUDAGraph()
        dist.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            dist.all_reduce(x)
        for i in range(3):
            x.fill_(rank + i)
            graph.replay()
            assert bool((x == sum(r + i for r in range(world))).all()), i
        del graph
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return count


@pytest.mark.timeout(150)
def test_every_operation_between_hosts(ranks):
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    counts = ranks(2).run(every_operation, dtypes, (1, 1003, 300_001), init=None, timeout_s=120)
    assert len(set(counts)) == 1 and counts[0] > 100
