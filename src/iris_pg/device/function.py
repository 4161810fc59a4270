"""Functions of which one object serves every kind of kernel: Triton's, compiled or interpreted, and Gluon's.

``@triton.jit`` decides when a function is made whether it will be compiled or interpreted. What is made here is
compiled into a compiled kernel (a Gluon kernel too: Triton compiles a callee in the language of its caller), and
interpreted when a kernel that is being interpreted calls it. So ``iris_pg.put`` is one name, wherever it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from triton.compiler.code_generator import BoundJITMethod
from triton.runtime.interpreter import FunctionRewriter
from triton.runtime.jit import JITFunction

_rewriting = threading.Lock()


class DeviceFunction(JITFunction):  # type: ignore[misc]
    """A function for kernels. Calling it from Python is only right inside a kernel that is being interpreted."""

    _interpreted: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the interpreter."""
        if self._interpreted is None:
            with _rewriting:  # Python 3.11 builds one syntax tree at a time: see kernels/loader.py
                self._interpreted = self._interpreted or FunctionRewriter(self.fn).rewrite_ast()
        return self._interpreted(*args, **kwargs)


class BoundMethod(BoundJITMethod):  # type: ignore[misc]
    """A method of one object, for the compiler and for the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the interpreter."""
        return self.__func__(self.__self__, *args, **kwargs)


class DeviceMethod(DeviceFunction):
    """A function that is a method of an aggregate."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return it bound to an object, as methods are."""
        return self if instance is None else BoundMethod(instance, self)


def device_method(function: Callable[..., Any]) -> DeviceMethod:
    """Make a method for kernels; a decorator."""
    return DeviceMethod(function)


def device_function(function: Callable[..., Any]) -> DeviceFunction:
    """Make a function for kernels; a decorator, as ``@triton.jit`` is."""
    return DeviceFunction(function)


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call while they are compiled; it gets the compiler's ``_semantic``, which is None in
    the interpreter, and returns a value or a constant.
    """
    function.__triton_builtin__ = True  # type: ignore[attr-defined]
    return function
