"""Which engine and algorithm an operation uses, and why.

``engine="auto"`` is the table below, filled from measurements; it is never a fallback. ``"cu"`` and ``"sdma"`` mean
that and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

KERNELS_UP_TO = {"all_gather": 16 << 20, "broadcast": 12 << 20, "reduce": 32 << 20, "all_reduce": 32 << 20}
"""On a GPU, "auto": bytes of the largest part of an operation up to which it is kernels, and above which it is copies.

Of two H200s, in a graph, kernels gather 1 MiB in 10 us and 16 MiB in 74, copies in 36 and 89; from 32 MiB on copies are
as fast. They broadcast 16 MiB in 56 us, copies in 58, and eager in 60 and 55. They reduce 32 MiB in 139 to 144 us,
copies in 151 to 157 (docs/performance.md). Operations of other names are copies, or of :data:`PAIRS_UP_TO`.
"""

PAIRS_UP_TO = {"all_to_all": 16 << 20, "gather": 16 << 20, "scatter": 16 << 20}
"""The same of operations whose ranks do not know each other's sizes, and so could not agree on one engine for all:
bytes of the largest message between two ranks up to which these use kernels, and else copies. One call may be both.

Of two H200s, in a graph, kernels exchange 16 MiB in 82 us and 32 MiB in 154, copies in 88 and 144.
"""


def uses_kernels(requested: str, op: str, nbytes: int) -> bool:
    """Return whether an operation on CUDA tensors is of the cu engine; the same on all ranks.

    Args:
        op: its name, as in keys.
        nbytes: of its largest part, which all ranks know.
    """
    if requested != "auto":
        return requested == "cu"
    return op == "barrier" or any(op.startswith(kind) and nbytes <= most for kind, most in KERNELS_UP_TO.items())


def all_know_largest(op: str) -> bool:
    """Return whether all ranks know how many bytes the largest part of an operation has."""
    return op.startswith(tuple(KERNELS_UP_TO))


def pair_limit(requested: str, op: str) -> int | None:
    """Return up to how many bytes between two ranks are of the cu engine, where each pair decides for itself; None of
    an operation on which all ranks decide together.
    """
    if requested != "auto":
        return None
    return next((most for kind, most in PAIRS_UP_TO.items() if op.startswith(kind)), None)


def words_of_table() -> str:
    """Return what "auto" does on a GPU, in words."""
    table = {**KERNELS_UP_TO, **{f"{kind} between two ranks": most for kind, most in PAIRS_UP_TO.items()}}
    rows = ", ".join(f"{kind} up to {most} bytes" for kind, most in table.items())
    return f"kernels (cu) for small operations, which take them half the time: {rows}"


class Plan(NamedTuple):
    """What was chosen for one kind of operation.

    Args:
        engine: "cu" or "sdma".
        algorithm: "zero copy" or "staged".
        reason: why, in words.
    """

    engine: str
    algorithm: str
    reason: str


class Row(NamedTuple):
    """One row of the table: on this device type, "auto" means this engine, for this reason."""

    device_type: str
    engine: str
    reason: str


AUTO = (
    Row(
        "cpu", "sdma", "on CPUs the cu engine runs in Triton's interpreter, a thousand times slower than a memory copy"
    ),
    Row("cuda", "sdma", "copy engines move megabytes faster than kernels do, and take no SM"),
)


def engine_for(requested: str, device_type: str) -> tuple[str, str]:
    """Return (engine, reason) for ``Options.engine`` on a device type."""
    if requested != "auto":
        return requested, f'engine="{requested}" was asked for'
    row = next(row for row in AUTO if row.device_type == device_type)
    return row.engine, f'engine="auto": {row.reason}'


def plan(requested: str, device_type: str, in_heap: bool) -> Plan:
    """Return the plan of an operation whose output is ``in_heap``, or is not, on every rank."""
    engine, reason = engine_for(requested, device_type)
    if in_heap:
        return Plan(engine, "zero copy", f"{reason}; the output is in the symmetric heap, so peers write it directly")
    return Plan(
        engine, "staged", f"{reason}; the output is not in the symmetric heap, so bytes go through staging slots"
    )
