"""``python -m iris_pg.bench`` runs, checks what it times, and writes what it says. Nothing here asserts a time."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from iris_pg.bench import __main__ as command_line
from iris_pg.bench import report, suite, timing
from iris_pg.bench.operations import OPERATIONS

DEADLINE_S = 100
QUICK = ["--rounds", "2", "--iterations", "3", "--deadline", "80"]


def run(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the bench in a session of its own; afterwards no process of that session is left."""
    command = [sys.executable, *launcher, "-m", "iris_pg.bench", *arguments]
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, start_new_session=True, env={**os.environ, "COLUMNS": "150"}
    )
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks, which are in sessions of their own
        process.communicate(timeout=15)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_its_ranks_can_be_on_several_hosts():
    done = run("all_gather", "--hosts", "2", "--ranks", "3", "--sizes", "4", "--memory", "ordinary", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "all_gather, 3 ranks on 2 hosts" in done.stdout
    assert run("all_gather", "--hosts", "3").returncode == 2  # of two ranks


def test_it_starts_its_ranks_and_writes_what_it_measured(tmp_path):
    path = tmp_path / "report.json"
    done = run("all_gather", "--backends", "iris,gloo", "--sizes", "4,5KiB", *QUICK, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "iris sdma heap" in done.stdout and "5 KiB" in done.stdout

    found = json.loads(path.read_text())
    assert found["schema"] == report.SCHEMA
    assert (found["world"], found["anchor"]) == (2, "gloo")
    assert found["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["host"]["cores"] == os.cpu_count()
    assert found["options"]["iterations"] == 3
    assert 0 <= found["cores_busy_with_others"] <= os.cpu_count()
    names = ["iris sdma", "iris sdma heap", "gloo", suite.FLOOR]
    assert [(r["bytes_per_rank"], r["contender"]) for r in found["rows"]] == [(n, c) for n in (4, 5120) for c in names]
    for row in found["rows"]:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["loop_us"] > 0 and row["gb_per_s"] > 0
        assert len(row["by_round_us"]) == row["rounds"] == 2
        assert ("ratio" in row) == (row["contender"] != suite.FLOOR)
    assert [r["ratio"] for r in found["rows"] if r["contender"] == "gloo"] == [1, 1]


def test_under_torchrun_it_uses_the_ranks_given():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = run(
        "all_gather", "--backends", "gloo,iris", "--memory", "ordinary", "--sizes", "1000", *QUICK, launcher=torchrun
    )
    assert done.returncode == 0, done.stderr
    assert "all_gather, 3 ranks" in done.stdout
    assert "times iris sdma" in done.stdout


def test_all_operations_are_measured():
    names = ",".join(OPERATIONS)
    done = run(names, "--backends", "iris,gloo", "--sizes", "4,5000", "--ranks", "3", *QUICK)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\w+), 3 ranks", done.stdout) == list(OPERATIONS)
    assert done.stdout.count("iris sdma heap") == 2 * sum(operation.uses_heap for operation in OPERATIONS.values()) == 4


def test_the_cu_engine_is_a_contender_for_small_sizes():
    done = run("--backends", "iris", "--engine", "cu,sdma", "--memory", "ordinary", "--sizes", "16,128KiB", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("iris cu ") == 1  # not at 128 KiB
    assert "interpreter" in done.stdout


def test_a_run_past_its_deadline_is_killed():
    done = run("--sizes", "1MiB", "--rounds", "100000", "--deadline", "5")
    assert done.returncode != 0
    assert "--deadline" in done.stderr or "Timeout" in done.stderr


@pytest.mark.parametrize(
    "wrong", [["--sizes", "4,x"], ["--sizes", "0"], ["--memory", "hip"], ["--engine", "x"], ["gossip"]]
)
def test_a_wrong_argument_is_refused_before_ranks_start(wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        command_line.main(wrong)
    assert refused.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4", 4), ("64KiB", 65536), ("1 MiB", 1 << 20), ("2gib", 2 << 30), ("7B", 7)]
)
def test_sizes_are_read_and_written(text, nbytes):
    assert command_line.parse_size(text) == nbytes
    assert command_line.parse_size(report.size_text(nbytes)) == nbytes


def test_data_differs_by_rank_position_and_iteration():
    data = suite.Data(4096, seed=3)
    inputs = [data.of(rank, iteration) for rank in range(8) for iteration in range(6)]
    assert all(not torch.equal(a, b) for i, a in enumerate(inputs) for b in inputs[:i])
    assert all(not torch.equal(t[:-1], t[1:]) for t in inputs)


def test_the_slowest_rank_counts():
    fast, slow = timing.Samples([[1, 2, 3], [1, 2, 3]]), timing.Samples([[4, 4, 7], [2, 2, 8]])
    summary = timing.summarise([fast, slow])
    assert (summary.median, summary.p10, summary.p90) == (4, 2, 8)
    assert (summary.loop, summary.by_round) == (4, [4, 2])
    assert timing.ratio(summary, timing.summarise([fast])) == (1, 1, 2)


def test_a_wrong_byte_is_named():
    right = torch.arange(8, dtype=torch.uint8)
    wrong = right.clone()
    wrong[5] += 1
    assert suite.first_difference(wrong, right) == "1 elements differ, the first at 5: 6 and not 5"
