"""The stream engine: a GPU's stream, told to do what a program says. No kernel runs for copies and flags.

:func:`lower` turns the steps of a program into :data:`Action` s with addresses, which is pure; :func:`bind` turns these
into driver calls, ready to be made again for every call with the same addresses. Steps run in the order written on one
stream: the order is a serial schedule (program.py), so this cannot deadlock, whatever queues the hardware maps streams
to. That is also what makes a captured graph safe to replay.

Flags are 32-bit words in host memory that every GPU and every rank's process maps: a rank's host can read what its GPU
waits for, and release it. Between two GPUs, a stream writes a flag after its copies have landed (cuStreamWriteValue32
has a barrier of the system's scope before the write, cuda.h).

A stream has no atomic operation on another GPU's memory, so counters (``Add``, ``Wait``) are not for this engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from iris_pg.copy_engine.device_reduction import reduction
from iris_pg.errors import UnsupportedError
from iris_pg.platforms import cuda
from iris_pg.program import Copy, Copy2D, Program, Reduce, Ref, Signal, Take


@dataclass(frozen=True)
class Flags:
    """Accesses of flags, one after another."""

    ops: tuple[cuda.FlagOp, ...]


@dataclass(frozen=True)
class Linear:
    """A copy of ``nbytes`` bytes."""

    dst: int
    src: int
    nbytes: int


@dataclass(frozen=True)
class Rectangle:
    """A copy of ``rows`` rows of ``width_bytes``."""

    dst: int
    src: int
    width_bytes: int
    rows: int
    dst_pitch_bytes: int
    src_pitch_bytes: int


@dataclass(frozen=True)
class Reduction:
    """A reduction, as in :class:`iris_pg.program.Reduce`."""

    dst: int
    sources: tuple[int, ...]
    nbytes: int
    dtype: str
    op: str


Action: TypeAlias = Flags | Linear | Rectangle | Reduction


def lower(program: Program, address: Callable[[Ref], int]) -> list[Action]:
    """Return what a stream does for ``program``: flags that follow each other are one action.

    Args:
        address: Ref -> address, as the GPU sees it.

    Raises:
        UnsupportedError: a step that a stream cannot do.
    """
    actions: list[Action] = []
    ops: list[cuda.FlagOp] = []

    def done(action: Action | None = None) -> None:
        if ops:
            actions.append(Flags(tuple(ops)))
            ops.clear()
        if action:
            actions.append(action)

    for step in program.steps:
        if isinstance(step, Signal):
            ops.append(cuda.FlagOp(False, address(step.flag), step.tag))
        elif isinstance(step, Take):
            ops.append(cuda.FlagOp(True, address(step.flag), step.tag))
            ops.append(cuda.FlagOp(False, address(step.flag), 0))
        elif isinstance(step, Copy):
            done(Linear(address(step.dst), address(step.src), step.nbytes))
        elif isinstance(step, Copy2D):
            pitches = step.dst_pitch_bytes, step.src_pitch_bytes
            done(Rectangle(address(step.dst), address(step.src), step.width_bytes, step.rows, *pitches))
        elif isinstance(step, Reduce):
            done(Reduction(address(step.dst), tuple(map(address, step.sources)), step.nbytes, step.dtype, step.op))
        else:
            raise UnsupportedError(
                f"stream engine: `{step}`; a stream has no atomics on another GPU's memory; use Signal and Take"
            )
    done()
    return actions


def bind(actions: list[Action], device: torch.device, mark: int) -> tuple[list[cuda.Launch], cuda.FlagCalls]:
    """Return the driver calls of ``actions``, and the last of them, which may write a word behind everything.

    They go to the stream that they are given, which is the current one.

    Args:
        mark: address of the word.
    """
    last = actions[-1] if actions and isinstance(actions[-1], Flags) else Flags(())
    others = actions[:-1] if last.ops else actions
    return [_bound(action, device) for action in others], cuda.FlagCalls(last.ops, mark)


def _bound(action: Action, device: torch.device) -> cuda.Launch:
    if isinstance(action, Flags):
        return cuda.FlagCalls(action.ops)
    if isinstance(action, Linear):
        return cuda.copy(action.dst, action.src, action.nbytes)
    if isinstance(action, Rectangle):
        pitches = action.dst_pitch_bytes, action.src_pitch_bytes
        return cuda.copy_2d(action.dst, action.src, action.width_bytes, action.rows, *pitches)
    return reduction(device, action.op, action.dtype, action.dst, action.sources, action.nbytes)


__all__ = ["Action", "Flags", "Linear", "Rectangle", "Reduction", "bind", "lower"]
