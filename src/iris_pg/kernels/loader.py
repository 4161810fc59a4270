"""Loads the cu engine's kernels: compiled for a GPU, or in Triton's interpreter for a CPU, in one process side by side.

Triton decides how a kernel runs when ``@triton.jit`` sees it, from one process-wide setting. So the package of kernels
is loaded once per way, each with the setting it needs for that moment; the user sets nothing, and nothing else in the
process is changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_loading = threading.Lock()


def kernels(interpreted: bool) -> ModuleType:
    """Return :mod:`iris_pg.kernels.source`, loaded to run in the interpreter or to be compiled."""
    with _loading:
        return _load(interpreted)


@functools.cache
def _load(interpreted: bool) -> ModuleType:
    import triton

    if interpreted:
        _mend_interpreter()
    name = "iris_pg.kernels." + ("interpreted" if interpreted else "compiled")
    folder = Path(__file__).with_name("source")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        sys.modules[name] = module  # where its own imports look for it
        spec.loader.exec_module(module)
    if interpreted:
        _rewrite(name)
    return module


def _rewrite(package: str) -> None:
    """Let the interpreter rewrite every function now, and not at its first launch on some thread: Python 3.11 counts
    the depth of a syntax tree that is being built for all threads together, and two at a time can end in a SystemError.

    What kernels call then becomes the rewritten function itself. Called through the interpreter, it would replace
    ``triton.language`` once more, which takes longer than most of these functions; the launch has done so already.
    """
    from triton.runtime.interpreter import InterpretedFunction

    for module in [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]:
        for name, function in list(vars(module).items()):
            if isinstance(function, InterpretedFunction):
                setattr(module, name, function.rewrite())


def _mend_interpreter() -> None:
    """Make loops over scalar tensors work in the interpreter of Triton 3.6 with NumPy 2.4 and later.

    It converts an array of one element to an integer, which NumPy has stopped to allow; Triton 3.7 squeezes it first.
    """
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_squeeze(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_squeeze


_patched = threading.Lock()
_patches: list[Any] = []
_launches = 0


@contextlib.contextmanager
def _interpreting(kernel: Any) -> Iterator[None]:
    """Keep ``triton.language`` interpretable while any launch runs.

    A launch replaces the functions of ``triton.language`` by interpreting ones and puts the old ones back at its end.
    Launches of two groups in two threads would take them from each other, so the outermost of them holds one more layer
    until the last has ended.
    """
    global _launches
    from triton.runtime import interpreter

    with _patched:
        if _launches == 0:
            _patches.append(interpreter._patch_lang(kernel.fn))
        _launches += 1
    try:
        yield
    finally:
        with _patched:
            _launches -= 1
            if _launches == 0:
                scope = _patches.pop()
                if scope is not None:
                    scope.restore()


def interpret(kernel: Any, *arguments: Any, **constants: Any) -> None:
    """Run ``kernel`` with one CTA in this thread. The interpreter's grid is global, so every launch here has the same:
    (1,).
    """
    with _interpreting(kernel):
        kernel[(1,)](*arguments, **constants)
