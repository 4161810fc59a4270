"""Measurements on GPUs: collectives of every contender, eager and in CUDA graphs, and what a matrix product beside them
loses.

Times are of the GPU, between two events around a block of calls; a block follows one call that does not count, so all
ranks are in step when it begins. Contenders take turns within each round, the largest time of all ranks counts, and a
ratio compares times of the same round. Before the timing every result is compared, byte for byte.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from iris_pg.bench import suite
from iris_pg.bench.gpu_contenders import PEER_COPY, Call, Contender, Field
from iris_pg.bench.operations import Operation
from iris_pg.bench.timing import median

MODES = ("eager", "graph")
_BLOCK_US = 3000.0  # how long a block should take
_CALLS = (2, 100)  # fewest and most calls of a block
_CHECKS = 3  # calls with different data before the timing


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the report; times in microseconds of a call.

    Args:
        contender, operation, mode: which.
        nbytes: bytes a rank.
        median, low, high: over rounds, of the slowest rank.
        host: median time that the host takes for a call of an eager block.
        gb_per_s: bytes that a rank receives from others at least, by the median.
        ratio: how many times faster than the anchor: median, least and most over rounds; None without an anchor.
    """

    contender: str
    operation: str
    mode: str
    nbytes: int
    calls: int
    median: float
    low: float
    high: float
    host: float | None
    gb_per_s: float
    ratio: tuple[float, float, float] | None
    by_round: list[float]


def run_size(
    field: Field, operation: Operation, nbytes: int, modes: Sequence[str], rounds: int, seed: int, anchor: str
) -> tuple[list[Row], list[str]]:
    """Check and time ``operation`` at ``nbytes`` a rank on every contender that takes it; return the rows, and what
    could not be done, in words. Collective; all ranks return the same.

    Raises:
        WrongResultError: on all ranks, when a byte is wrong on any.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = operation.numel(nbytes)
    data = suite.Data(operation.inputs(world) * numel, seed, operation.dtype, field.device)
    input, notes = data.of(rank, 0), list[str]()
    calls: dict[str, Call] = {}
    frees: list[Callable[[], object]] = []
    for c in field.contenders:
        if not c.takes(operation):
            continue
        call, output = _agreed(partial(field.call, c, operation, input, operation.outputs(world) * numel), c, notes)
        if call is None:
            continue
        wrong = None
        for iteration in range(_CHECKS):
            input.copy_(data.of(rank, iteration))
            made = output()
            expected = operation.expected([data.of(p, iteration) for p in range(world)], rank)
            if wrong is None and not torch.equal(made, expected):
                wrong = f"rank {rank}, call {iteration}: {suite.first_difference(made, expected)}"
        _raise_wrong(operation, c, nbytes, wrong)
        calls[c.name] = call
        frees.append(partial(field.free, c, made))
        del made, expected
    if operation.name == "all_gather" and (floor := field.peer_copy(nbytes)):
        calls[PEER_COPY] = floor[0]
        frees.append(floor[1])
    rows: list[Row] = []
    for mode in modes:
        rows += _run_mode(operation, nbytes, mode, calls, rounds, anchor, notes)
    torch.cuda.synchronize()
    for free in frees:
        free()
    return rows, notes


def _run_mode(
    operation: Operation,
    nbytes: int,
    mode: str,
    calls: dict[str, Call],
    rounds: int,
    anchor: str,
    notes: list[str],
) -> list[Row]:
    blocks: dict[str, tuple[Call, int, int]] = {}  # name -> call, calls of a block, operations of a call
    for name, call in calls.items():
        count = _calls_for(call)
        if mode == "eager":
            blocks[name] = call, count, 1
            continue
        graph = _agreed(partial(_captured, call, min(count, 20)), name, notes)[0]
        if graph is not None:
            blocks[name] = graph.replay, max(1, count // 20), min(count, 20)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
    names = list(blocks)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call, count, operations = blocks[name]
            gpu_us, host_us = _block(call, count)
            times[name].append((gpu_us / operations, host_us / operations))
    everyone = _from_all(times)
    slowest = {name: [max(rank[name][i][0] for rank in everyone) for i in range(rounds)] for name in names}
    host = {name: median([max(rank[name][i][1] for rank in everyone) for i in range(rounds)]) for name in names}
    received = operation.received(operation.numel(nbytes) * operation.dtype.itemsize, dist.get_world_size())

    def row(name: str) -> Row:
        by_round = slowest[name]
        middle = median(by_round)
        ratio = None
        if anchor in slowest:
            ratios = [a / b for a, b in zip(slowest[anchor], by_round, strict=True)]
            ratio = median(ratios), min(ratios), max(ratios)
        moved = nbytes if name == PEER_COPY else received
        return Row(
            *(name, operation.name, mode, nbytes, blocks[name][1] * blocks[name][2]),
            *(middle, min(by_round), max(by_round), host[name] if mode == "eager" else None),
            *(moved / middle / 1e3, ratio, by_round),
        )

    return [row(name) for name in names]


def _block(call: Call, count: int) -> tuple[float, float]:
    """Return how long a call of a block takes the GPU and the host, in microseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    call()
    begin.record()
    start = time.perf_counter()
    for _ in range(count):
        call()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / count, host * 1e6 / count


def _calls_for(call: Call) -> int:
    for _ in range(2):
        call()
    slowest = max(_from_all(_block(call, 3)[0]))
    return min(max(int(_BLOCK_US / max(slowest, 1e-3)), _CALLS[0]), _CALLS[1])


def _captured(call: Call, count: int) -> tuple[torch.cuda.CUDAGraph, None]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, None


def _agreed(make: Callable[[], tuple[Any, Any]], what: Contender | str, notes: list[str]) -> tuple[Any, Any]:
    """Return what ``make`` returns, or (None, None) and a note where a rank cannot: a contender may lack something."""
    made, problem = (None, None), None
    try:
        made = make()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        problem = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    problems = [text for text in _from_all(problem) if text]
    if problems:
        name = what if isinstance(what, str) else what.name
        notes.append(f"{name} was left out: {problems[0]}")
        return None, None
    return made


def _raise_wrong(operation: Operation, c: Contender, nbytes: int, wrong: str | None) -> None:
    texts = "; ".join(filter(None, _from_all(wrong)))
    if texts:
        raise suite.WrongResultError(f"{operation.name} of {nbytes} bytes a rank by {c.name} is wrong: {texts}")


# Beside a matrix product ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Beside:
    """How long matrix products take alone and beside all-gathers, in milliseconds; medians over rounds."""

    contender: str
    alone: float
    beside: float
    low: float
    high: float

    @property
    def slowdown(self) -> float:
        """By how much longer, 0.1 being ten per cent."""
        return self.beside / self.alone - 1


def overlap(field: Field, operation: Operation, nbytes: int, side: int, times: int, rounds: int) -> list[Beside]:
    """Time ``times`` products of bfloat16 matrices [side, side], alone and beside as many all-gathers of ``nbytes`` a
    rank on a second stream, until both are done. Collective.
    """
    world = dist.get_world_size()
    data = suite.Data(operation.inputs(world) * operation.numel(nbytes), 0, operation.dtype, field.device)
    input = data.of(dist.get_rank(), 0)
    a, b = (torch.randn(side, side, device=field.device, dtype=torch.bfloat16) for _ in range(2))
    product, second = torch.empty_like(a), torch.cuda.Stream()

    def products() -> None:
        for _ in range(times):
            torch.mm(a, b, out=product)

    def beside(call: Call) -> None:
        main = torch.cuda.current_stream()
        second.wait_stream(main)
        with torch.cuda.stream(second):
            for _ in range(times):
                call()
        products()
        main.wait_stream(second)

    calls, notes = dict[str, Call](), list[str]()
    frees: list[Callable[[], object]] = []
    for c in field.contenders:
        numel = operation.outputs(world) * operation.numel(nbytes)
        call, output = _agreed(partial(field.call, c, operation, input, numel), c, notes)
        if call is not None:
            made = output()
            calls[c.name] = partial(beside, call)
            frees.append(partial(field.free, c, made))
    found: dict[str, list[float]] = {name: [] for name in ("", *calls)}
    for _ in range(rounds):
        for name, call in (("", products), *calls.items()):
            found[name].append(max(_from_all(_block(call, 1)[0])) / 1e3)
    torch.cuda.synchronize()
    for free in frees:
        free()
    alone = median(found.pop(""))
    return [Beside(name, alone, median(t), min(t), max(t)) for name, t in found.items()]


def _from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


__all__ = ["MODES", "Beside", "Row", "overlap", "run_size"]
