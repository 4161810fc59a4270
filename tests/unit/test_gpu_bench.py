"""The benchmark for GPUs, as far as no GPU is needed: names of contenders, tables, plots."""

from __future__ import annotations

import pytest
import torch

from iris_pg.bench import gpu_report
from iris_pg.bench.gpu import Beside, Row
from iris_pg.bench.gpu_contenders import parse
from iris_pg.bench.gpu_training import Step
from iris_pg.bench.operations import OPERATIONS
from iris_pg.errors import ArgumentError


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("iris:sdma", ("iris", "sdma", None, "ordinary")),
        ("iris:cu:16:heap", ("iris", "cu", 16, "heap")),
        ("iris:auto:inplace", ("iris", "auto", None, "inplace")),
        ("nccl", ("nccl", "", None, "ordinary")),
        ("nccl:zero-cta", ("nccl", "", None, "symmetric")),
        ("torch:low-contention", ("torch", "", None, "symmetric")),
    ],
)
def test_names_of_contenders(name, parts):
    assert parse(name) == (name, *parts)


@pytest.mark.parametrize("name", ["iris", "iris:warp", "iris:cu:heap:16", "gloo", "nccl:fast", "iris:sdma:heap:heap"])
def test_other_names_are_refused(name):
    with pytest.raises(ArgumentError, match="it is iris:ENGINE"):
        parse(name)


def test_contenders_take_what_they_can_do():
    def takes(name):
        return {op.name for op in OPERATIONS.values() if parse(name).takes(op)}

    assert takes("iris:sdma") == takes("nccl") == takes("nccl:zero-cta") == set(OPERATIONS)
    assert takes("iris:sdma:heap") == {"all_gather", "broadcast"}
    assert takes("iris:cu:inplace") == takes("torch:low-contention") == {"all_gather"}


def rows():
    times = {"iris:sdma": [10.0, 12.0, 11.0], "nccl": [20.0, 22.0, 21.0]}
    for nbytes in (4096, 1 << 26):
        for name, by_round in times.items():
            ratio = (21.0 / sorted(by_round)[1], 1.0, 2.0)
            us = sorted(by_round)[1], min(by_round), max(by_round)
            yield Row(name, "all_gather", "eager", nbytes, 9, *us, 7.0, nbytes / us[0] / 1e3, ratio, by_round)


def test_what_a_run_says(capsys):
    beside = [Beside("nccl", 16.0, 19.2, 19.0, 20.0)]
    found = gpu_report.Report(list(rows()), beside, [Step("nccl", 512, 88.0, 87.0, 90.0)], ["x was left out: y"])
    found.print(2, "nccl")
    said = capsys.readouterr().out
    assert "all_gather, eager, 2 ranks" in said and "11 [7] (1.91)" in said and "64 MiB" in said
    assert "20.0%" in said and "88.0 (87.0 - 90.0)" in said and "x was left out: y" in said


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    document = dict(rows=[row.__dict__ for row in rows()], options=dict(anchor="nccl"))
    (path,) = gpu_report.plot(document, f"{tmp_path}/")
    assert path.endswith("all_gather_eager.png") and open(path, "rb").read(4) == b"\x89PNG"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this says what happens without a GPU")
def test_it_needs_a_gpu(capfd):
    from iris_pg.bench.__main__ import main

    assert main(["--device", "cuda", "--ranks", "1", "--sizes", "4", "--deadline", "60"]) != 0
    assert "needs a GPU; torch sees none" in capfd.readouterr().err
