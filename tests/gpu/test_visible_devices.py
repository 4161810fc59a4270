"""Ranks whose processes see the GPUs in different orders, or only their own: a GPU is known by its UUID."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; torch sees fewer"),
]
DEADLINE_S = 90

PROGRAM = textwrap.dedent(
    """
    import os, sys, torch, torch.distributed as dist
    import iris_pg.backend
    from iris_pg import Options, iris

    iris_pg.backend.autoload()
    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    dist.init_process_group("iris", pg_options=Options(engine=sys.argv[2]), device_id=device)
    heap = dist.group.WORLD.heap_on(device)
    for i in range(5):
        for numel in (1, 1003, 700_001):
            x = (torch.arange(numel, device=device) * 7 + 31 * rank + i) % 13
            for out in (x.new_empty(2 * numel), heap.empty(2 * numel, dtype=x.dtype)):
                dist.all_gather_into_tensor(out, x)
                for p in range(2):
                    expected = (torch.arange(numel, device=device) * 7 + 31 * p + i) % 13
                    assert torch.equal(out[p * numel : (p + 1) * numel], expected), (i, numel, p)
            dist.all_reduce(x)
            total = sum((torch.arange(numel, device=device) * 7 + 31 * p + i) % 13 for p in range(2))
            assert torch.equal(x, total), (i, numel)
    with iris(heap_size=1 << 20, engines=("sdma",), device=device) as ctx:
        source, inbox, flag = ctx.full((100,), rank), ctx.full((100,), 9), ctx.zeros(1, dtype=torch.int32)
        ctx.put(source, 1 - rank, inbox, signal_flag=flag)
        ctx.put(source[:0], rank, wait_flag=flag, wait_value=1, channel=1)
        assert inbox.tolist() == [1 - rank] * 100
        ctx.barrier()
    dist.barrier()
    dist.destroy_process_group()
    print("right on", torch.cuda.get_device_properties(device).uuid)
    """
)


@pytest.mark.parametrize("engine", ["sdma", "cu"])
@pytest.mark.parametrize(
    ("visible", "devices"),
    [(("0,1", "1,0"), (0, 0)), (("0", "1"), (0, 0)), (("0,1", "1,0"), (0, 1)), (("1,0", "0,1"), (1, 1))],
    ids=["permuted", "own only", "permuted, one GPU", "permuted, second"],
)
def test_visible_devices_in_any_order(tmp_path, visible, devices, engine):
    path, processes = tmp_path / "program.py", []
    path.write_text(PROGRAM)
    port = 20000 + os.getpid() % 20000
    for rank in range(2):
        place = dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        environment = os.environ | place | dict(CUDA_VISIBLE_DEVICES=visible[rank])
        command = [sys.executable, str(path), str(devices[rank]), engine]
        processes.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    uuids = {text.split("right on")[1].strip() for text in said}
    assert len(uuids) == (1 if devices == (0, 1) else 2), said
