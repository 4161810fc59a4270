"""What a run says: a table for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from iris_pg.bench.suite import FLOOR, Row

SCHEMA = 1  # of the JSON; raised when a field changes its meaning or goes


def size_text(nbytes: int) -> str:
    """Return ``nbytes`` as "4 B", "64 KiB", "1 MiB"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def time_text(us: float) -> str:
    """Return a time in microseconds with three significant digits or all that come before the point."""
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part; None where it is not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("iris-pg", "torch", "triton", "llvmlite", "numpy")},
    }


def host() -> dict[str, Any]:
    """Return what is worth knowing of this machine."""
    model = ""
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "machine": platform.machine(),
        "kernel": platform.release(),
    }


def document(
    rows: Sequence[Row], options: dict[str, Any], world: int, anchor: str, machine: dict[str, Any], others: float
) -> dict[str, Any]:
    """Return the report as JSON-able data; times in microseconds, sizes in bytes per rank.

    Args:
        machine: from :func:`host`, asked before ranks were pinned.
        others: cores that other processes kept busy meanwhile.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": machine,
        "versions": versions(),
        "world": world,
        "anchor": anchor,
        "cores_busy_with_others": round(others, 3),
        "options": options,
        "rows": [_record(row) for row in rows],
    }


def _record(row: Row) -> dict[str, Any]:
    c = row.contender
    return {
        "operation": row.operation,
        "contender": c.name if c else FLOOR,
        **(
            dict(backend=c.backend, engine=c.engine, memory=c.memory)
            if c
            else dict(backend=None, engine=None, memory="ordinary")
        ),
        "bytes_per_rank": row.nbytes,
        "rounds": row.rounds,
        "calls_per_round": row.calls,
        **{f"{name}_us": value for name, value in dataclasses.asdict(row.times).items()},
        "gb_per_s": row.gb_per_s,
        **({} if row.ratio is None else dict(zip(("ratio", "ratio_low", "ratio_high"), row.ratio, strict=True))),
    }


def print_table(
    rows: Sequence[Row], world: int, anchor: str, others: float, notes: Iterable[str] = (), hosts: int = 1
) -> None:
    """Print the rows, with rich where it is installed; ``others`` as in :func:`document`."""
    ranks = f"{world} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
    heads = ("bytes/rank", "contender", "median us", "p10 - p90", "loop us", "GB/s per rank", f"times {anchor}", "")
    for operation, group in itertools.groupby(rows, lambda row: row.operation):
        _print_lines(f"{operation}, {ranks}", heads, list(group))
    print("median, p10, p90: time of a call on the rank with the largest median; loop: time of a block / its calls")
    print(f"GB/s per rank: bytes received from others / median; {FLOOR}: a local copy of bytes/rank, all ranks at once")
    print(f"times {anchor}: median (least - most) over rounds of {anchor}'s time / this one's")
    print(f"other processes kept {others:.2f} of {os.cpu_count()} cores busy meanwhile")
    for note in notes:
        print(note)


def _print_lines(title: str, heads: Sequence[str], rows: Sequence[Row]) -> None:
    lines = [_cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _print_plain(title, heads, lines)
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 1 else "right", no_wrap=True)
    for i, cells in enumerate(lines):
        table.add_row(*cells, end_section=i + 1 == len(lines) or rows[i + 1].nbytes != rows[i].nbytes)
    console = Console()
    Console(width=None if console.is_terminal else 120, highlight=False).print(table)


def _cells(row: Row) -> tuple[str, ...]:
    t = row.times
    faster = spread = ""
    if row.ratio:
        middle, low, high = row.ratio
        faster, spread = f"{middle:.2f}", f"{low:.2f} - {high:.2f}"
    return (
        size_text(row.nbytes),
        row.contender.name if row.contender else FLOOR,
        time_text(t.median),
        f"{time_text(t.p10)} - {time_text(t.p90)}",
        time_text(t.loop),
        f"{row.gb_per_s:.2f}" if row.gb_per_s >= 0.01 else f"{row.gb_per_s:.1g}",
        faster,
        spread,
    )


def _print_plain(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (heads, *lines)) for i in range(len(heads))]
    print(title)
    for line in (heads, *lines):
        print(
            "  ".join(
                text.ljust(w) if i == 1 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )
