"""A training step with FSDP2 on GPUs, over iris and over NCCL: transformer blocks in bfloat16, gradients reduced in
float32, and a fused AdamW. Its time is what a user of torch sees of all the rest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from iris_pg.bench.gpu_contenders import Contender, Field, parse
from iris_pg.bench.timing import median

FEATURES, HEADS, BLOCKS = 4096, 32, 16
_WARM_UP = 3  # steps that do not count


class Step(NamedTuple):
    """Milliseconds of a step: median, least and most."""

    contender: str
    tokens: int
    median: float
    low: float
    high: float


class Block(nn.Module):
    """A transformer's block [batch, tokens, FEATURES] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)
        self.qkv, self.o = (nn.Linear(FEATURES, n * FEATURES, bias=False) for n in (3, 1))
        self.up, self.down = (
            nn.Linear(FEATURES, 4 * FEATURES, bias=False),
            nn.Linear(4 * FEATURES, FEATURES, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        batch, tokens, _ = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, tokens, 3, HEADS, FEATURES // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, tokens, FEATURES))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


def steps(contenders: Sequence[str], tokens: Sequence[int], count: int) -> list[Step]:
    """Time ``count`` steps of each contender that is no comm_sms of another, for each sequence length. They take turns.
    Collective.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = [c for c in map(parse, contenders) if c.memory in ("ordinary", "heap") and not c.comm_sms]
    trainings = {c.name: _Training(c, device) for c in chosen}
    found = []
    for n in tokens:
        times: dict[str, list[float]] = {name: [] for name in trainings}
        for i in range(_WARM_UP + count):
            for name, training in trainings.items():
                slowest: list[float] = [0.0] * dist.get_world_size()
                dist.all_gather_object(slowest, training.step(n))
                if i >= _WARM_UP:
                    times[name].append(max(slowest))
        found += [Step(name, n, median(t), min(t), max(t)) for name, t in times.items()]
    trainings.clear()
    gc.collect()  # modules are in cycles, and their gradients in heaps
    torch.cuda.empty_cache()
    return found


class _Training:
    """A network over one contender's group, and its optimizer. Collective to make."""

    def __init__(self, c: Contender, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self._field = Field([c], device)
        mesh = DeviceMesh.from_group(self._field.group(c), "cuda")
        torch.manual_seed(0)
        with device:
            self._net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*self._net, self._net):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        for module in self._net.modules():
            if isinstance(module, FSDPModule) and c.memory == "heap":
                module.set_allocate_memory_from_process_group_for_comm(True)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-4, fused=True)

    def step(self, tokens: int) -> float:
        """Return the milliseconds of a step with a batch of one."""
        x = torch.randn(1, tokens, FEATURES, device=self._field.device, dtype=torch.bfloat16)
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._net(x).float().pow(2).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3


__all__ = ["Step", "steps"]
