"""The doctor: its report on this machine, and what it says of what is missing."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from iris_pg import doctor
from iris_pg.platforms import kfd


def needs_of(title):
    return dict(doctor.engines(has_gpu=False))[title]


def test_report_of_this_machine():
    done = subprocess.run([sys.executable, "-m", "iris_pg.doctor"], capture_output=True, text=True, timeout=100)
    assert f"torch          {torch.__version__.split('+')[0]}" in done.stdout, done.stdout + done.stderr
    assert "Engine sdma on CPU: ready" in done.stdout, done.stdout
    assert "Engine cu on CPU (Triton's interpreter): ready" in done.stdout, done.stdout
    assert ("Engine cu on GPU" in done.stdout) == torch.cuda.is_available()
    assert done.returncode == ("cannot run" in done.stdout)


def test_a_missing_package_is_named_with_what_to_do(monkeypatch):
    version = importlib.metadata.version

    def without_triton(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_triton)
    lines, is_well = doctor.report()
    text = "\n".join(lines)
    assert not is_well
    assert "Engine sdma on CPU: ready" in text
    assert "Engine cu on CPU (Triton's interpreter): cannot run" in text
    assert "the package triton is not installed" in text and "To do: pip install triton" in text


def test_an_old_torch_is_not_enough(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: "2.10.1+cu130")
    (need,) = [need for need in needs_of("Engine sdma on CPU") if need.what.startswith("torch")]
    assert "2.10.1" in need.problem and "torch>=2.11" in need.fix


def test_a_driver_that_fails_is_reported(monkeypatch):
    def fail():
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    lines, problem = doctor.devices()
    assert not lines and "no driver" in problem


def test_two_gpus_that_cannot_reach_each_other(monkeypatch):
    class Properties:
        name, total_memory, multi_processor_count = "a GPU", 80 << 30, 132

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a > b)
    monkeypatch.setattr(doctor, "_driver_facts", lambda index: [])
    lines, problem = doctor.devices()
    assert not problem and len(lines) == 3
    assert lines[2].startswith("0 cannot reach the memory of 1")


def test_an_amd_machine_without_the_library(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setitem(sys.modules, "xio", None)
    needs = dict(doctor.engines(has_gpu=True))
    by_streams = {need.what: need for need in needs['Engine sdma on GPU, by streams (engine="auto")']}
    assert "libamdhip64.so" in by_streams["the HIP runtime that torch has loaded"].problem
    *_, queues = needs['Engine sdma on GPU, by SDMA queues (engine="sdma")']
    assert "xio.sdma_ep" in queues.problem and "rocm-xio from its sources" in queues.fix


def test_device_files_of_amd(tmp_path):
    with pytest.raises(PermissionError, match="kfd does not exist"):
        doctor._kfd(str(tmp_path))
    (tmp_path / "kfd").touch()
    with pytest.raises(FileNotFoundError, match="no renderD node"):
        doctor._kfd(str(tmp_path))
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").touch()
    doctor._kfd(str(tmp_path))


def test_engines_between_amd_gpus(monkeypatch):
    gpus = [kfd.Node(n, f"0000:0{n}:00.0", "gfx950", 0, 2, 14, {3 - n: 0b1100}) for n in (1, 2)]
    monkeypatch.setattr(kfd, "gpus", lambda: [*gpus, kfd.Node(3, "0000:03:00.0", "gfx950", 0, 2, 14)])
    first, second, third = doctor.sdma_engines()
    assert first.startswith(
        "0000:01:00.0 (gfx950, 2 + 14 SDMA engines) reaches 0000:02:00.0 by 2/3, 0000:03:00.0: which"
    )
    assert "0000:01:00.0 by 2/3" in second and "is not known" in third


def test_importing_it_is_light():
    code = "import sys, iris_pg.doctor; print([m for m in ('triton', 'llvmlite', 'cuda') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
