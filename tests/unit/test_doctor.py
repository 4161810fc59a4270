"""The doctor: its report on this machine, and what it says of what is missing."""

import importlib.metadata
import subprocess
import sys

import torch

from iris_pg import doctor


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


def test_importing_it_is_light():
    code = "import sys, iris_pg.doctor; print([m for m in ('triton', 'llvmlite', 'cuda') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
