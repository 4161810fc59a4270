"""What a run on GPUs says: tables for people, JSON for machines, and plots (``python -m iris_pg.bench.gpu_report``)."""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from iris_pg.bench import report
from iris_pg.bench.gpu import Beside, Row
from iris_pg.bench.gpu_contenders import parse
from iris_pg.bench.gpu_training import Step

SCHEMA = 1  # of the JSON; raised when a field changes its meaning or goes


@dataclasses.dataclass(frozen=True)
class Report:
    """All that a run has found; ``notes`` say what was left out."""

    rows: Sequence[Row]
    beside: Sequence[Beside]
    steps: Sequence[Step]
    notes: Sequence[str]

    def document(self, options: dict[str, Any], world: int) -> dict[str, Any]:
        """Return it as JSON-able data; times in the units of the fields."""
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": report.host(),
            "gpu": torch.cuda.get_device_name(),
            "versions": report.versions() | dict(nccl=".".join(map(str, torch.cuda.nccl.version()))),
            "world": world,
            "options": options,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "beside": [dataclasses.asdict(b) | dict(slowdown=b.slowdown) for b in self.beside],
            "steps": [step._asdict() for step in self.steps],
            "notes": list(self.notes),
        }

    def print(self, world: int, anchor: str) -> None:
        """Print one table for each operation and mode: a line for each size, a column for each contender."""
        for operation, mode in dict.fromkeys((row.operation, row.mode) for row in self.rows):
            rows = [row for row in self.rows if (row.operation, row.mode) == (operation, mode)]
            names = list(dict.fromkeys(row.contender for row in rows))
            print(f"\n{operation}, {mode}, {world} ranks: us [us of the host] (times {anchor})")
            lines = [["bytes/rank", *names]]
            for nbytes in dict.fromkeys(row.nbytes for row in rows):
                cells = {row.contender: _cell(row) for row in rows if row.nbytes == nbytes}
                lines.append([report.size_text(nbytes), *(cells.get(name, "") for name in names)])
            _print_columns(lines)
        if self.beside:
            print("\nmatrix products beside all-gathers: ms alone, beside (least - most), slow-down")
            _print_columns(
                [
                    [b.contender, f"{b.alone:.2f}", f"{b.beside:.2f} ({b.low:.2f} - {b.high:.2f})", f"{b.slowdown:.1%}"]
                    for b in self.beside
                ]
            )
        if self.steps:
            print("\na training step with FSDP2: tokens, ms (least - most)")
            _print_columns(
                [[s.contender, str(s.tokens), f"{s.median:.1f} ({s.low:.1f} - {s.high:.1f})"] for s in self.steps]
            )
        for note in self.notes:
            print(note)


def _cell(row: Row) -> str:
    host = "" if row.host is None or row.nbytes > 1 << 20 else f" [{row.host:.0f}]"
    return f"{report.time_text(row.median)}{host}" + (f" ({row.ratio[0]:.2f})" if row.ratio else "")


def _print_columns(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def plot(document: dict[str, Any], prefix: str) -> list[str]:
    """Write plots of a report, and return their paths: bandwidth by size of each operation and mode, and of an
    all-gather by comm_sms. It takes matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for operation, mode in dict.fromkeys((row["operation"], row["mode"]) for row in document["rows"]):
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        rows = [row for row in document["rows"] if (row["operation"], row["mode"]) == (operation, mode)]
        for name in dict.fromkeys(row["contender"] for row in rows):
            line = [(row["nbytes"], row["gb_per_s"]) for row in rows if row["contender"] == name]
            axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set(xscale="log", xlabel="bytes a rank", ylabel="GB/s a rank", title=f"{operation}, {mode}")
        paths.append(_save(figure, axes, f"{prefix}{operation}_{mode}.png"))
        by_ctas = _by_comm_sms(rows)
        if any(len(line) > 2 for line in by_ctas.values()):
            figure, axes = pyplot.subplots(figsize=(8, 4.5))
            for label, line in by_ctas.items():
                axes.plot(*zip(*sorted(line), strict=True), marker="o", label=label)
            for row in rows:
                if row["contender"] == document["options"]["anchor"] and row["nbytes"] == max(
                    r["nbytes"] for r in rows
                ):
                    axes.axhline(row["gb_per_s"], linestyle="--", color="grey", label=row["contender"])
            axes.set(xscale="log", xlabel="CTAs (comm_sms)", ylabel="GB/s a rank", title=f"{operation}, {mode}")
            paths.append(_save(figure, axes, f"{prefix}{operation}_{mode}_by_comm_sms.png"))
    return paths


def _by_comm_sms(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return label -> (comm_sms, GB/s) of contenders that differ in that alone."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        c = parse(row["contender"]) if ":" in row["contender"] else None
        if c and c.comm_sms:
            label = f"{c.engine}, {c.memory}, {report.size_text(row['nbytes'])}"
            lines.setdefault(label, []).append((c.comm_sms, row["gb_per_s"]))
    return lines


def _save(figure: Any, axes: Any, path: str) -> str:
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80, bbox_inches="tight")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m iris_pg.bench.gpu_report REPORT.json PREFIX: writes plots, whose paths begin with PREFIX")
    with open(sys.argv[1]) as file:
        print("\n".join(plot(json.load(file), sys.argv[2])))
