"""Functions of the CUDA driver as addresses with arguments, for compiled code that calls them without Python: see
copy_engine/gated.py.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple


class Step(NamedTuple):
    """A call, or with function 0 a wait: until the 32-bit word at ``a`` is at least ``b``."""

    function: int
    a: int
    b: int
    c: int = 0
    d: int = 0


@functools.cache
def _address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), name), ctypes.c_void_p).value or 0


def copy(stream: int, dst: int, src: int, nbytes: int) -> Step:
    """Return the call that lets a stream copy ``nbytes``."""
    return Step(_address("cuMemcpyDtoDAsync_v2"), dst, src, nbytes, stream)


def write(stream: int, address: int, value: int) -> Step:
    """Return the call that lets a stream write a 32-bit word, after all that it did before."""
    return Step(_address("cuStreamWriteValue32_v2"), stream, address, value)


__all__ = ["Step", "copy", "write"]
