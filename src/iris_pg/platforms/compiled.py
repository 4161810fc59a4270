"""Launches of kernels that Triton has compiled and loaded, with arguments that are known beforehand.

On NVIDIA GPUs a launch is one call of the driver, with the arguments where they were put once: Triton's own launcher
takes two to three times as long, as it reads them from Python every time. On AMD GPUs it is Triton's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from iris_pg.platforms.cuda import _driver, _error

_WIDTHS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def kernel_launch(kernel: Any, ctas: int, arguments: tuple[Any, ...]) -> Callable[..., None]:
    """Return what launches a compiled kernel on a stream, a handle or a number. It takes two values more, for the last
    two arguments of the kernel that are no constants, instead of those given here.

    Args:
        kernel: what triton.compile returned, loaded on the device that is current at the launch.
        ctas: of the grid, which has one dimension.
        arguments: values of all that are no constants, i32, i64, or tuples of these.
    """
    if torch.version.hip:
        # A kernel's constants have places among its arguments, though nothing is passed for them.
        run, constants = kernel[ctas, 1, 1], kernel.src.constants.values()

        def launch_by_triton(stream: Any, *changed: int) -> None:
            run(*arguments[: len(arguments) - len(changed)], *changed, *constants, stream=int(stream))

        return launch_by_triton
    driver = _driver()
    types = [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
    values = [_WIDTHS[kind](value) for kind, value in _flat(types, arguments)]
    last_but_one, last = values[-2:]
    # Behind its own arguments a kernel may take two pointers to scratch memory, of which these kernels use none.
    values += [ctypes.c_int64(0), ctypes.c_int64(0)]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    launch, function, at = driver.cuLaunchKernel, driver.CUfunction(kernel.function), ctypes.addressof(places)
    threads, shared = 32 * kernel.metadata.num_warps, kernel.metadata.shared
    keep = values, places, kernel

    def call(stream: Any, *changed: int, keep: Any = keep) -> None:
        if changed:
            last_but_one.value, last.value = changed
        status = launch(function, ctas, 1, 1, threads, 1, 1, shared, stream, at, 0)[0]
        if status:
            raise _error(driver, "cuLaunchKernel", status)

    return call


def _flat(types: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, int]]:
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value)
        else:
            yield kind, value


__all__ = ["kernel_launch"]
