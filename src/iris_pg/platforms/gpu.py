"""The platform of the GPUs that torch is built for, CUDA or HIP: what the engines use of it, under one name.

Both have the same functions and classes. Types are checked against CUDA's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from iris_pg.platforms.cuda import FlagOp, Launch, view

if TYPE_CHECKING or not torch.version.hip:
    from iris_pg.platforms.cuda import (
        DeviceMemory,
        DeviceRange,
        FlagCalls,
        SecondStream,
        can_reach,
        copy,
        copy_2d,
        initialise,
        outside_of_capture,
        register,
        stream_handle,
        unregister,
        uuid,
        write,
    )
else:
    from iris_pg.platforms.hip import (
        DeviceMemory,
        DeviceRange,
        can_reach,
        initialise,
        outside_of_capture,
        register,
        unregister,
        uuid,
    )
    from iris_pg.platforms.hip_streams import FlagCalls, SecondStream, copy, copy_2d, stream_handle, write

__all__ = [
    "DeviceMemory",
    "DeviceRange",
    "FlagCalls",
    "FlagOp",
    "Launch",
    "SecondStream",
    "can_reach",
    "copy",
    "copy_2d",
    "initialise",
    "outside_of_capture",
    "register",
    "stream_handle",
    "unregister",
    "uuid",
    "view",
    "write",
]
