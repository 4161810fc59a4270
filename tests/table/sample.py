"""Which cells of the table are run: all of them, or a sample in which every pair with the operation occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from table.call import Row
from table.operations import OPERATIONS, Operation
from table.reductions import TAKEN

GROUPS: dict[str, Callable[[int], list[int]]] = {
    "world": lambda world: list(range(world)),
    "subgroup": lambda world: list(range(1, world, 2)) or [0],
    "reversed": lambda world: list(reversed(range(world))),
    "unordered": lambda world: [world - 1, *range(world - 1)][: max(world - 1, 1)],
}
"""Name -> members, as numbered in the default group, of a group of that many ranks."""

CU_LACKS = {
    *((op, name) for op, names in TAKEN.items() for name in names if name.startswith("float8")),
    *(("product", name) for name in TAKEN["product"] if name.startswith("complex")),
}
"""(reduction, element type) that the cu engine refuses."""


def kinds(operation: Operation, engine: str) -> list[tuple[str, str]]:
    """Return each (element type, reduction) that an operation takes; the reduction is empty where it has none."""
    if not operation.reduces:
        return [(name, "") for name in operation.dtypes]
    return [
        (name, op)
        for op, names in TAKEN.items()
        for name in names
        if not (name.startswith("complex") and op in operation.refused)
        and not (engine == "cu" and (op, name) in CU_LACKS)
    ]


def everything(engine: str) -> Iterator[Row]:
    """Yield the whole product."""
    for operation in OPERATIONS.values():
        cells = itertools.product(kinds(operation, engine), operation.forms, GROUPS, [False, True])
        for number, ((dtype, op), form, group, asynchronous) in enumerate(cells):
            yield Row(operation.name, dtype, op, form, group, asynchronous, number)


def sampled(engine: str, first: int, rows_of_an_operation: int | None = None) -> Iterator[Row]:
    """Yield rows in which each operation meets every element type, reduction, form, group, sync and async; and one of
    them every reduction of every element type.

    Args:
        engine: whose reductions are left out that it lacks.
        first: rotates which values meet each other.
        rows_of_an_operation: that many only.
    """
    everyone: Counter[tuple[str, str]] = Counter()
    for k, operation in enumerate(OPERATIONS.values()):
        taken = kinds(operation, engine)
        dtypes = list(dict.fromkeys(dtype for dtype, _ in taken))
        forms, groups = operation.forms, list(GROUPS)
        count = len(taken) if operation.has_every_pair else max(len(dtypes), len(forms), len(groups), 8)
        mine: Counter[str] = Counter()
        for i in range(min(count, rows_of_an_operation or count)):
            number = first + k + i
            dtype = dtypes[number % len(dtypes)]
            # The reduction that this operation has met least, and of those the one that the element type has.
            if operation.has_every_pair:
                dtype, op = taken[number % len(taken)]
            else:
                op = min((op for name, op in taken if name == dtype), key=lambda op: (mine[op], everyone[dtype, op]))
            mine[op] += 1
            everyone[dtype, op] += 1
            form, group = forms[(number + first) % len(forms)], groups[(i + i // len(groups) + k) % len(groups)]
            yield Row(operation.name, dtype, op, form, group, (i // 2 + first) % 2 == 1, number)
