"""Launches of kernels that Triton has compiled and loaded, with arguments that are known beforehand.

On NVIDIA GPUs a launch is one call of the driver, with the arguments where they were put once: Triton's own launcher
takes two to three times as long, as it reads them from Python every time. On AMD GPUs it is Triton's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from iris_pg.platforms import cuda_streams

_WIDTHS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


class KernelLaunch:
    """What launches a compiled kernel.

    Args:
        kernel: what triton.compile returned, loaded on the device that is current at the launch.
        ctas: of the grid, which has one dimension.
        arguments: values of all that are no constants, i32, i64, or tuples of these.

    Attributes:
        call: tells a stream to do so.
    """

    __slots__ = ("_last", "call")

    def __init__(self, kernel: Any, ctas: int, arguments: tuple[Any, ...]) -> None:
        self.call: cuda_streams.Launch
        if torch.version.hip:
            # A kernel's constants have places among its arguments, though nothing is passed for them.
            run, constants, last = kernel[ctas, 1, 1], kernel.src.constants.values(), list(arguments[-2:])
            self._last: Any = last
            self.call = lambda stream: run(*arguments[:-2], *last, *constants, stream=int(stream))
            return
        types = [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
        values = [_WIDTHS[kind](value) for kind, value in _flat(types, arguments)]
        self._last = values[-2:]
        # Behind its own arguments a kernel may take two pointers to scratch memory, of which these kernels use none.
        values += [ctypes.c_int64(0), ctypes.c_int64(0)]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = ctas, 32 * kernel.metadata.num_warps, kernel.metadata.shared
        self.call = cuda_streams.kernel(kernel.function, *sizes, ctypes.addressof(places), (values, places, kernel))

    def change(self, last_but_one: int, last: int) -> None:
        """Set the last two arguments, of 64 bits, for the launches that follow."""
        if torch.version.hip:
            self._last[:] = last_but_one, last
        else:
            self._last[0].value, self._last[1].value = last_but_one, last


def _flat(types: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        else:
            yield kind, value


__all__ = ["KernelLaunch"]
