"""Programs in rounds, for where nothing may wait beside anything else: a graph whose parallel branches wait was seen to
hang, as branches may share one queue of the hardware.

In a round all waits come first, then what is moved, and then all signals. What two lanes move in a round may run side
by side: nothing waits there, and all of it has ended before the next wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from iris_pg.program import Program, Signal, Step, Take


def in_rounds(program: Program) -> Program:
    """Return ``program`` with its steps in rounds: flags in lane 0, and moves in their lanes.

    A wait is moved before what was written earlier, and a signal behind what was written later. A rank does not wait
    for a peer while it owes it a signal, but in another lane, and for no more signals than it has sent before: its peer
    will have sent as many. That programs still end, all of a group's or some, is proved for each collective
    (:mod:`iris_pg.verify`), with all in one lane. Lanes are ordered by flags alone, so the moves of a round need no
    order between them; flags by which a rank orders its own lanes are left out.
    """
    steps: list[Step] = []
    takes: list[Take] = []
    moves: list[Step] = []
    signals: list[Signal] = []
    sent: Counter[int] = Counter()  # rank -> signals to it in the rounds before
    taken: Counter[tuple[int, int]] = Counter()  # (lane, rank) -> takes of what it signals

    def close() -> None:
        lanes = len({step.lane for step in moves})
        steps.extend(replace(step, lane=0) for step in takes if step.writer != program.rank)
        beside = sorted(moves, key=lambda step: -step.lane)  # begun before lane 0 goes on
        steps.extend(step if lanes > 1 else replace(step, lane=0) for step in beside)
        steps.extend(replace(step, lane=0) for step in signals if step.flag.rank != program.rank)
        sent.update(step.flag.rank for step in signals if not step.lane)
        for done in (takes, moves, signals):
            done.clear()

    for step in program.steps:
        if isinstance(step, Signal):
            signals.append(step)
        elif isinstance(step, Take):
            taken[step.lane, step.writer] += 1
            owed = [signal for signal in signals if signal.flag.rank == step.writer]
            is_beside = all(signal.lane != step.lane for signal in owed)
            if owed and not (is_beside and taken[step.lane, step.writer] <= sent[step.writer]):
                close()
            takes.append(step)
        else:
            moves.append(step)
    close()
    return Program(program.rank, program.world, tuple(steps), program.name)


__all__ = ["in_rounds"]
