"""What newcomers run: the examples under torchrun, and what README.md shows."""

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from iris_pg.options import VARIABLES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DEADLINE_S = 100
FULL = os.environ.get("IRIS_PG_TEST_FULL") == "1"
interpretable = pytest.mark.skipif(
    [int(x) for x in version("triton").split(".")[:2]] < [3, 7] and int(version("numpy").split(".")[1]) >= 4,
    reason="the interpreter of Triton 3.6 cannot loop over a kernel's argument with NumPy 2.4",
)
REGISTERED = "import iris_pg\n"  # where the package is not installed, nothing else registers the backend


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun; past the deadline it and its ranks are ended."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    environment = {"OMP_NUM_THREADS": "1", "IRIS_PG_TIMEOUT": "60", **os.environ}
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True, env=environment)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        process.communicate(timeout=15)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_the_demo_passes():
    done = torchrun(str(ROOT / "examples/demo.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("PASS: ")


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (3, "--engine cu"),
        (2, "--engine sdma --heap --against gloo"),
        *([(1, "--engine sdma"), (2, "--engine auto")] if FULL else []),
    ],
)
def test_all_gather(ranks, arguments):
    script = str(ROOT / "examples/all_gather.py")
    done = torchrun(script, *arguments.split(), "--size", "1001", "--iterations", "3", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks, 1001 bytes from each" in done.stdout
    assert ("gloo: " in done.stdout) == ("gloo" in arguments)


@interpretable
@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("gemm_send", "overlapped: "),
        ("gather_gemm", "overlapped: "),
        *([("two_languages", "Triton: ")] if FULL else []),
    ],
)
def test_kernels_that_communicate(example, says):
    done = torchrun(str(ROOT / "examples" / f"{example}.py"))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout and done.stdout.splitlines()[-1] == "ok"


@interpretable
def test_the_snippets_of_the_device_api_run(tmp_path):
    """They are one script, which runs in the interpreter here."""
    text = (ROOT / "docs/device_api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 8
    script = tmp_path / "script.py"
    script.write_text("\n\n".join(blocks))
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all of it was right") == 2


def test_the_device_api_names_every_function():
    text = (ROOT / "docs/device_api.md").read_text(encoding="utf-8")
    import iris_pg
    from iris_pg.device import sdma, triggered

    kernels = [name for name in iris_pg.__all__ if iris_pg._WHERE[name].startswith("device.")]
    raw = ("copy_linear", "copy_window", "atomic", "poll", "fence", "quiet", "await_flag")
    assert all(hasattr(sdma, name) for name in raw)
    missing = [name for name in kernels if f"`{name}" not in text]
    missing += [name for name in raw if f"`sdma.{name}" not in text]
    missing += [name for name in ("publish", "await_batch") if f"`triggered.{name}" not in text]
    assert not missing and hasattr(triggered, "publish")


def test_the_first_script_of_the_readme_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REGISTERED + python_blocks()[0])
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[0, 1, 2, 3, 10, 11, 12, 13]") == 2


def test_the_other_snippets_of_the_readme_run(tmp_path):
    """They follow on from the first one, so they run in one script, without its first and last line."""
    engines, *others = python_blocks()[1:]
    script = tmp_path / "script.py"
    lines = ["import torch", "import torch.distributed as dist", engines, "world = dist.get_world_size()", *others]
    script.write_text("\n".join([*lines, "print('done')", "dist.destroy_process_group()"]))
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_the_readme_lists_every_variable_as_it_is():
    rows = [
        f"| `{v.name}` | {'none' if v.default is None else v.default} | {v.unit} | {v.meaning} |" for v in VARIABLES
    ]
    assert re.findall(r"^\| `IRIS_PG_.*$", README, re.M) == rows


def python_blocks() -> list[str]:
    """Return the Python code of README.md, block by block."""
    return re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
