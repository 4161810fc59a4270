"""Collectives over a symmetric heap, moved by Triton kernels or by copy engines.

The ``torch.distributed`` backend ``"iris"``, and the one-sided API under it. Importing this package registers the
backend and does nothing else: what it names is imported on first use.
"""

from typing import TYPE_CHECKING, Any

from iris_pg.backend import autoload

if TYPE_CHECKING:
    from iris_pg.context import Iris, iris
    from iris_pg.device.context import DeviceContext
    from iris_pg.device.triton import (
        atomic_add,
        atomic_and,
        atomic_cas,
        atomic_max,
        atomic_min,
        atomic_or,
        atomic_sub,
        atomic_xchg,
        atomic_xor,
        copy,
        get,
        load,
        put,
        quiet,
        store,
    )
    from iris_pg.errors import IrisError
    from iris_pg.options import Options
    from iris_pg.process_group import explain

_WHERE = {
    "Iris": "context",
    "IrisError": "errors",
    "Options": "options",
    "explain": "process_group",
    "iris": "context",
    # For kernels.
    "DeviceContext": "device.context",
    "atomic_add": "device.triton",
    "atomic_and": "device.triton",
    "atomic_cas": "device.triton",
    "atomic_max": "device.triton",
    "atomic_min": "device.triton",
    "atomic_or": "device.triton",
    "atomic_sub": "device.triton",
    "atomic_xchg": "device.triton",
    "atomic_xor": "device.triton",
    "copy": "device.triton",
    "get": "device.triton",
    "load": "device.triton",
    "put": "device.triton",
    "quiet": "device.triton",
    "store": "device.triton",
}

__all__ = [
    "DeviceContext",
    "Iris",
    "IrisError",
    "Options",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "copy",
    "explain",
    "get",
    "iris",
    "load",
    "put",
    "quiet",
    "store",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'iris_pg' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    value = getattr(importlib.import_module(f"iris_pg.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


autoload()
