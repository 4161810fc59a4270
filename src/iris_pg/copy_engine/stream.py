"""The stream engine: a GPU's stream, told to do what a program says. No kernel runs for copies and flags.

:func:`lower` turns the steps of a program into :data:`Action` s with addresses, which is pure; :func:`bind` turns these
into driver calls, ready to be made again for every call with the same addresses. Lane 0 of a program is the stream of
the operation, others share a second one. Calls are made in the order written, which is a serial schedule (program.py).
So this cannot deadlock, whatever queues the hardware maps streams to.

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
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Copy, Copy2D, Program, Reduce, Ref, Signal, Take

_JOINS = 1024  # most pairs of streams whose calls are kept


@dataclass(frozen=True)
class Flags:
    """Accesses of flags, one after another."""

    ops: tuple[gpu.FlagOp, ...]


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


@dataclass(frozen=True)
class Order:
    """One lane waits for another of the same rank: at ``flag`` one says how far it has come, or the other waits."""

    flag: int
    waits: bool


Action: TypeAlias = Flags | Linear | Rectangle | Reduction | Order


def lower(program: Program, address: Callable[[Ref], int], lanes: bool = True) -> list[tuple[int, Action]]:
    """Return (lane, what a stream does) for ``program``, in its order: flags that follow each other are one action.
    Flags by which a rank orders its own lanes are no memory: they begin as they end, and one lane has an order.

    Args:
        address: Ref -> address, as the GPU sees it.
        lanes: else all steps are in lane 0.

    Raises:
        UnsupportedError: a step that a stream cannot do.
    """
    actions: list[tuple[int, Action]] = []
    ops: list[gpu.FlagOp] = []
    ordered: set[Ref] = set()
    lane = 0

    def flush() -> None:
        if ops:
            actions.append((lane, Flags(tuple(ops))))
            ops.clear()

    for step in program.steps:
        # What is written first is told first, in whatever lane: lanes may share one queue of the hardware.
        if lanes and step.lane != lane:
            flush()
            lane = step.lane
        action: Action
        if isinstance(step, Signal) and step.flag.rank == program.rank:
            if lanes:
                flush()
                ordered.add(step.flag)
                actions.append((lane, Order(address(step.flag), False)))
            continue
        if isinstance(step, Take) and step.writer == program.rank:
            if step.flag in ordered:
                flush()
                actions.append((lane, Order(address(step.flag), True)))
            continue
        if isinstance(step, Signal):
            ops.append(gpu.FlagOp(False, address(step.flag), step.tag))
            continue
        if isinstance(step, Take):
            ops.append(gpu.FlagOp(True, address(step.flag), step.tag))
            ops.append(gpu.FlagOp(False, address(step.flag), 0))
            continue
        if isinstance(step, Copy):
            action = Linear(address(step.dst), address(step.src), step.nbytes)
        elif isinstance(step, Copy2D):
            pitches = step.dst_pitch_bytes, step.src_pitch_bytes
            action = Rectangle(address(step.dst), address(step.src), step.width_bytes, step.rows, *pitches)
        elif isinstance(step, Reduce):
            action = Reduction(address(step.dst), tuple(map(address, step.sources)), step.nbytes, step.dtype, step.op)
        else:
            raise UnsupportedError(
                f"stream engine: `{step}`; a stream has no atomics on another GPU's memory; use Signal and Take"
            )
        flush()
        actions.append((lane, action))
    flush()
    return actions


class Joins:
    """Lets streams wait for what others have been told, by one event: who waits for it waits for what it stood for."""

    def __init__(self) -> None:
        self._event = gpu.Event()
        self._calls: dict[tuple[int, int], gpu.Calls] = {}

    def join(self, stream: int, other: int) -> None:
        """Let ``stream`` wait for what ``other`` has been told, both torch's handles."""
        calls = self._calls.get((stream, other))
        if calls is None:
            if len(self._calls) >= _JOINS:
                self._calls.clear()
            told = (other, self._event.record), (stream, self._event.wait)
            calls = self._calls[stream, other] = gpu.Calls(gpu.on(gpu.stream_handle(raw), call) for raw, call in told)
        calls(0)  # each has its stream


class SecondStream:
    """A stream beside the one of an operation.

    Args:
        raw: torch's handle of it. It is used for one operation at a time.

    Attributes:
        begin: what lets it wait for what the other stream has been told.
        end: what lets the other stream wait for it.
    """

    def __init__(self, raw: int) -> None:
        self._stream = gpu.stream_handle(raw)
        forked, joined = gpu.Event(), gpu.Event()
        self.begin: list[gpu.Launch] = [forked.record, self.beside(forked.wait)]
        self.end: list[gpu.Launch] = [self.beside(joined.record), joined.wait]

    def beside(self, launch: gpu.Launch) -> gpu.Launch:
        """Return what does the same on this stream, whatever stream it is given."""
        return gpu.on(self._stream, launch)


def bind(
    actions: list[tuple[int, Action]],
    device: torch.device,
    ctas: int,
    mark: int,
    second: SecondStream,
    joins: bool = False,
) -> gpu.Calls:
    """Return the driver calls of ``actions``, behind which a word may be written.

    Lane 0 goes to the stream that they are given, all others to ``second``, which begins after what that stream did
    before, and which the last call waits for.

    Args:
        ctas: most CTAs of a kernel that reduces.
        mark: address of the word.
        joins: flags of lane 0 wait for what ``second`` was told before: for programs in rounds (rounds.py).
    """
    lanes = {lane for lane, _ in actions}
    last = actions[-1][1] if actions else None
    ops: tuple[gpu.FlagOp, ...] = ()
    # The last call may be of the last flags, too, but not where these need not wait for the other lane.
    if isinstance(last, Flags) and (joins or not any(lanes) or actions[-1][0]):
        ops, actions = last.ops, actions[:-1]
    events: dict[int, gpu.Event] = {}
    calls: list[gpu.Launch] = []
    is_beside = any(lanes) and not joins
    if is_beside:
        calls += second.begin
    for lane, action in actions:
        if joins and is_beside and isinstance(action, Flags):
            calls += second.end
            is_beside = False
        elif lane and not is_beside:
            calls += second.begin
            is_beside = True
        bound = _bound(action, device, ctas, events)
        calls += map(second.beside, bound) if lane else bound
    return gpu.Calls([*calls, *second.end] if is_beside else calls, ops, mark)


def _bound(action: Action, device: torch.device, ctas: int, events: dict[int, gpu.Event]) -> list[gpu.Launch]:
    """Return what a stream is told; ``events`` has those of the flags by which lanes are ordered."""
    if isinstance(action, Order):
        event = events.get(action.flag) or events.setdefault(action.flag, gpu.Event())
        return [event.wait if action.waits else event.record]
    if isinstance(action, Flags):
        return list(gpu.flags(action.ops))
    if isinstance(action, Linear):
        return [gpu.copy(action.dst, action.src, action.nbytes)]
    if isinstance(action, Rectangle):
        pitches = action.dst_pitch_bytes, action.src_pitch_bytes
        return [gpu.copy_2d(action.dst, action.src, action.width_bytes, action.rows, *pitches)]
    return [reduction(device, ctas, action.op, action.dtype, action.dst, action.sources, action.nbytes)]


__all__ = ["Action", "Flags", "Joins", "Linear", "Order", "Rectangle", "Reduction", "SecondStream", "bind", "lower"]
