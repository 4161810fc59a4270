"""Small models to train on two backends, and what it takes to compare the results. For tests of torch's frameworks."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 12


class Block(nn.Module):
    """A residual block [..., FEATURES] -> [..., FEATURES] with parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(blocks: int = 2) -> nn.Sequential:
    """Return a model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [4, FEATURES] of a rank's step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, FEATURES, generator=generator), torch.randn(4, FEATURES, generator=generator)


def mesh_of(backend: str, shape: Sequence[int], names: Sequence[str]) -> dist.DeviceMesh:
    """Return a device mesh for CPU tensors with groups of ``backend``."""
    return dist.init_device_mesh(
        "cpu", tuple(shape), mesh_dim_names=tuple(names), backend_override=dict.fromkeys(names, backend)
    )


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return name -> largest difference of the tensors that are not equal."""
    assert ours.keys() == theirs.keys()
    unequal = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    return {name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in unequal}


def forget_meshes() -> None:
    """Make torch drop the groups of every device mesh that DTensor has met, which it keeps for its caches' sake."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
        if clear:
            clear()
        caches = [found for found in gc.get_objects() if type(found) is functools._lru_cache_wrapper]
        for cache in caches:
            if (cache.__module__ or "").startswith("torch.distributed"):
                cache.cache_clear()
