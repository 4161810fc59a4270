"""Which kernels the sdma engine launches: none, where nothing is added."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device_data import use_device
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
NUMEL = 1 << 18


def on_the_gpu(call):
    """Return the names of what runs on the GPU in ``call``."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def copies_only(rank, world):
    use_device(rank)
    heap = dist.group.WORLD.heap_on("cuda")
    x = torch.ones(NUMEL, device="cuda")
    in_heap, ordinary = heap.empty(world * NUMEL, dtype=torch.float32), torch.empty(world * NUMEL, device="cuda")
    calls = {
        "all_gather, zero copy": lambda: dist.all_gather_into_tensor(in_heap, x),
        "all_gather, staged": lambda: dist.all_gather_into_tensor(ordinary, x),
        "all_to_all": lambda: dist.all_to_all_single(ordinary, in_heap),
        "broadcast": lambda: dist.broadcast(ordinary, 0),
    }
    for name, call in calls.items():
        ran = [event for event in on_the_gpu(call) if not event.startswith("iris:")]
        assert any(event.startswith(("Memcpy DtoD", "Memcpy PtoP")) for event in ran), (name, ran)
        assert all(event.startswith("Memcpy") for event in ran), (name, ran)
    ran = on_the_gpu(lambda: dist.all_reduce(ordinary))
    assert any("Memcpy" not in event and "iris:" not in event for event in ran), ran  # the profiler does see kernels
    dist.barrier()


def test_no_kernel_runs_where_nothing_is_added(ranks):
    """The profiler's threads stay for as long as the process."""
    ranks(2).run(copies_only, options=dict(engine="sdma"), timeout_s=60, may_hold=["thread", "nvidia", "anon_inode"])
