"""What is measured: the contenders, and how one size of one operation is run.

The default group (gloo) only coordinates: every contender moves its bytes over a group of its own.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from iris_pg.bench import timing
from iris_pg.bench.operations import Operation
from iris_pg.options import Options

Tensor = torch.Tensor

FLOOR = "memcpy"
_POISON = 0xA5  # fills outputs before a check, so a byte that is never written is seen
_CHECKS = 3  # calls with different data before the timing, and again after it


class WrongResultError(Exception):
    """An operation gave other bytes than it should have; the message says which."""


# Contenders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """Something that can do an operation.

    Args:
        backend: of torch.distributed.
        engine: of an iris group, else None.
        memory: "ordinary" tensors, outputs in the group's symmetric "heap", or there the "input" alone.
        largest_nbytes: larger sizes are left out, because of ``note``.
        note: shown under the table.
    """

    backend: str
    engine: str | None = None
    memory: str = "ordinary"
    largest_nbytes: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return " ".join(filter(None, (self.backend, self.engine, self.memory.replace("ordinary", ""))))


def contenders(backends: Sequence[str], engines: Sequence[str], memories: Sequence[str]) -> list[Contender]:
    """Return a contender for each backend, and for iris one for each engine and kind of memory."""
    found = []
    for backend in backends:
        if backend != "iris":
            found.append(Contender(backend))
            continue
        for engine in engines:
            for memory in memories:
                if engine == "cu":
                    note = "the cu engine runs in Triton's interpreter on CPUs: for its results, not its speed"
                    found.append(Contender(backend, engine, memory, 64 << 10, note))
                else:
                    found.append(Contender(backend, engine, memory))
    return found


def open_groups(found: Sequence[Contender]) -> dict[Contender, Any]:
    """Make a process group for each contender; contenders that differ in memory only share one. Collective."""
    groups: dict[tuple[str, str | None], Any] = {}
    for c in found:
        if (c.backend, c.engine) not in groups:
            options = Options(engine=c.engine) if c.engine else None
            groups[c.backend, c.engine] = dist.new_group(backend=c.backend, pg_options=options)
    return {c: groups[c.backend, c.engine] for c in found}


# One size -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the report; times in microseconds."""

    operation: str
    contender: Contender | None  # None is the floor: one local copy of the same size
    nbytes: int
    rounds: int
    calls: int
    times: timing.Summary
    gb_per_s: float
    ratio: tuple[float, float, float] | None  # to the anchor: median, least and most over rounds; above 1 is faster


class Data:
    """Inputs [numel] that depend on rank, position and iteration: whole numbers 0..255, so sums are exact."""

    def __init__(
        self, numel: int, seed: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu"
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.random = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator, device=device)
        self.dtype = dtype

    def of(self, rank: int, iteration: int) -> Tensor:
        """Return the input of ``rank`` in ``iteration``: random bytes turned by one number and xored with another."""
        turned = torch.roll(self.random, 7919 * rank + 104_729 * iteration)
        return turned.bitwise_xor_((37 * rank + 11 * iteration + 1) % 256).to(self.dtype)


def run_size(
    operation: Operation,
    groups: dict[Contender, Any],
    nbytes: int,
    *,
    rounds: int,
    iterations: int | None,
    seed: int,
) -> list[Row]:
    """Check and time ``operation`` at ``nbytes`` per rank on every contender. Collective; all ranks get the same rows.

    Args:
        groups: the contenders; the last is the anchor of the ratios.
        iterations: calls in a block; None chooses them from how long one takes.

    Raises:
        WrongResultError: on all ranks, when a byte is wrong on any.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = operation.numel(nbytes)
    data = Data(operation.inputs(world) * numel, seed, operation.dtype)
    input = data.of(rank, 0)
    taking_part = {
        c: g
        for c, g in groups.items()
        if (c.largest_nbytes is None or nbytes <= c.largest_nbytes) and operation.is_another_case(c.memory)
    }
    outputs = {
        c: _made("heap", c, g, operation.outputs(world) * numel, operation.dtype) for c, g in taking_part.items()
    }
    inputs = {c: _made("input", c, g, input.numel(), operation.dtype) for c, g in taking_part.items()}
    try:
        one = input[:numel]
        calls: dict[str, Callable[[], object]] = {FLOOR: _copy_call(torch.empty_like(one), one)}
        for c, group in taking_part.items():
            _check(operation, c, group, outputs[c], inputs[c], data, range(_CHECKS))
            calls[c.name] = functools.partial(operation.call, outputs[c], inputs[c], group)
        counts = {name: iterations or timing.calls_for(call) for name, call in calls.items()}
        times = timing.measure(calls, rounds, counts)
        for c, group in taking_part.items():
            _check(operation, c, group, outputs[c], inputs[c], data, range(_CHECKS, 2 * _CHECKS))
    finally:
        for c in taking_part:
            if c.memory != "ordinary":
                groups[c].heap.free((outputs if c.memory == "heap" else inputs)[c])

    anchor = list(groups)[-1].name
    received = operation.received(numel * operation.dtype.itemsize, world)

    def row(contender: Contender | None, name: str, moved: float) -> Row:
        ratio = timing.ratio(times[anchor], times[name]) if contender and anchor in times else None
        summary = times[name]
        return Row(
            operation.name, contender, nbytes, rounds, counts[name], summary, moved / summary.median / 1e3, ratio
        )

    return [*(row(c, c.name, received) for c in taking_part), row(None, FLOOR, nbytes)]


def _made(which: str, contender: Contender, group: Any, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor, in the heap if that is ``which`` tensor the contender has there."""
    if contender.memory == which:
        return group.heap.empty(numel, dtype=dtype)  # type: ignore[no-any-return]
    return torch.empty(numel, dtype=dtype)


def _copy_call(to: Tensor, source: Tensor) -> Callable[[], object]:
    """Return a call of C's memmove, which is what moves bytes on CPUs at best."""
    arguments = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(source.nbytes)
    memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, *map(type, arguments))(("memmove", ctypes.CDLL(None)))
    keep = (to, source)
    return lambda keep=keep: memmove(*arguments)  # type: ignore[misc]


def _check(
    operation: Operation, c: Contender, group: Any, output: Tensor, input: Tensor, data: Data, iterations: range
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    problem = None
    for iteration in iterations:
        input.copy_(data.of(rank, iteration))
        if operation.in_place:
            output.copy_(input)
        else:
            output.fill_(_POISON)
        operation.call(output, input, group)
        expected = operation.expected([data.of(p, iteration) for p in range(world)], rank)
        if problem is None and not torch.equal(output, expected):
            problem = f"rank {rank}, call {iteration}: {first_difference(output, expected)}"
    problems: list[str | None] = [None] * world
    dist.all_gather_object(problems, problem)
    wrong = "; ".join(filter(None, problems))
    if wrong:
        raise WrongResultError(f"{operation.name} of {data.random.numel()} elements by {c.name} is wrong: {wrong}")


def first_difference(output: Tensor, expected: Tensor) -> str:
    """Return in words where two tensors of one dimension differ; they do."""
    at = (output != expected).nonzero().flatten()
    first = int(at[0])
    return f"{at.numel()} elements differ, the first at {first}: {output[first]:g} and not {expected[first]:g}"
