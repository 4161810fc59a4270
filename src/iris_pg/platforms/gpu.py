"""The platform of the GPUs that torch is built for: ``platform`` is the module cuda.py or hip.py.

Both have the same functions and classes; types are checked against CUDA's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING or not torch.version.hip:
    from iris_pg.platforms import cuda as platform
else:
    from iris_pg.platforms import hip as platform

__all__ = ["platform"]
