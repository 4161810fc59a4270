"""Registers backend "iris" with torch.distributed; nothing heavy is imported until a group is made.

``import torch`` loads this module by its entry point, perhaps while ``import iris_pg`` is under way. So it imports
nothing by itself: whoever comes first finds it whole.
"""

from __future__ import annotations

from typing import Any


def _create(dist_opts: Any, options: Any) -> Any:
    from iris_pg.groups import create

    return create(dist_opts, options)


def autoload() -> None:
    """Register ``"iris"``, once. ``import torch`` calls this through the ``torch.backends`` entry point."""
    import torch.distributed as dist

    if dist.is_available() and "IRIS" not in dist.Backend._plugins:
        dist.Backend.register_backend("iris", _create, extended_api=True, devices=["cpu", "cuda"])
