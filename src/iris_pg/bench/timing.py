"""How things are timed, and what the numbers of all ranks come down to.

A *round* times one block of every contender, one after another, so that whatever else the machine does meets all of
them; the order rotates from round to round. A *block* is ``calls`` calls back to back, after one that is not timed. A
call's time is the time from the end of the call before to its own end, so the times of a block add up to the block.
Ranks time themselves, and the slowest counts.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

_BLOCK_S = 0.04  # seconds; how long a block should take
_CALLS = (3, 1000)  # fewest and most calls of a block


@dataclass
class Samples:
    """What one rank measured of one contender, in microseconds: per round, the time of every call."""

    rounds: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Summary:
    """One contender's times in microseconds, on the rank with the largest median.

    Args:
        median, p10, p90: over all calls of that rank.
        loop: median over rounds of (time of a block / its calls), largest over ranks.
        by_round: median of each round, largest over ranks.
    """

    median: float
    p10: float
    p90: float
    loop: float
    by_round: list[float]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of ``values`` that at least ``percent`` per cent of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the (lower) median."""
    return percentile(values, 50)


def time_block(call: Callable[[], object], calls: int) -> list[float]:
    """Call ``calls`` times back to back and return how long each took, in microseconds."""
    clock, ends = time.perf_counter_ns, [0] * (calls + 1)
    ends[0] = clock()
    for i in range(1, calls + 1):
        call()
        ends[i] = clock()
    return [(b - a) / 1000 for a, b in zip(ends, ends[1:], strict=False)]


def calls_for(call: Callable[[], object]) -> int:
    """Return how many calls make a block, the same on all ranks. Collective over the default group."""
    call()
    slowest = max(_from_all(median(time_block(call, 3))))
    return min(max(int(_BLOCK_S * 1e6 / max(slowest, 1e-3)), _CALLS[0]), _CALLS[1])


def measure(contenders: dict[str, Callable[[], object]], rounds: int, calls: dict[str, int]) -> dict[str, Summary]:
    """Time every contender's call in interleaved rounds. Collective over the default group.

    Args:
        contenders: name -> what to call; the same names in the same order on all ranks.
        rounds: how many.
        calls: name -> calls in a block.
    """
    names = list(contenders)
    samples = {name: Samples() for name in names}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                contenders[name]()  # not timed: ranks leave the barrier at different times, and caches are cold
                samples[name].rounds.append(time_block(contenders[name], calls[name]))
    finally:
        gc.enable()
    return {name: summarise(_from_all(samples[name])) for name in names}


def summarise(ranks: Sequence[Samples]) -> Summary:
    """Bring the samples of all ranks down to one summary."""
    pooled = [[t for block in rank.rounds for t in block] for rank in ranks]
    slowest = max(pooled, key=median)
    return Summary(
        median=median(slowest),
        p10=percentile(slowest, 10),
        p90=percentile(slowest, 90),
        loop=max(median([sum(block) / len(block) for block in rank.rounds]) for rank in ranks),
        by_round=[max(map(median, blocks)) for blocks in zip(*(rank.rounds for rank in ranks), strict=True)],
    )


def ratio(anchor: Summary, other: Summary) -> tuple[float, float, float]:
    """Return how many times faster ``other`` is than ``anchor``: median, least and most over rounds.

    The two are compared within each round, since they ran next to each other there.
    """
    ratios = [a / b for a, b in zip(anchor.by_round, other.by_round, strict=True)]
    return median(ratios), min(ratios), max(ratios)


class Meter:
    """How many cores other processes kept busy since it was made: what spoils a measurement."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float:
        """Return cores that were busy with anything but the ranks, on average; the hypervisor's too. Collective."""
        wall, busy, mine = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return max(0.0, (busy - sum(_from_all(mine))) / wall)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()


def _from_all(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
