"""PyTorch's own tests of a distributed backend, at 2 and 4 ranks; see torch_suite.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# What torch itself allows for a backend of the name "gloo" only, so that a group of another name cannot pass.
GLOO_ONLY = {
    "test_get_backend",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_gloo_subgroup",
}


# ranks, whether the tests see the name "gloo", how many passed when this was written
RUNS = {"2": (2, False, 66), "4": (4, False, 66), "4 as gloo": (4, True, 83)}
FULL = os.environ.get("IRIS_PG_TEST_FULL") == "1"

skipped = {}  # name of a run -> the tests that it skipped


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_torch_finds_no_fault(name):
    """Nothing fails, and no test that ran before is skipped now. One run at a time: some tests measure seconds.

    Under the other name, what ran under its own does not run again, unless that is asked for.
    """
    ranks, as_gloo, least = RUNS[name]
    command = [sys.executable, str(Path(__file__).with_name("torch_suite.py")), "--ranks", str(ranks)]
    if as_gloo and not FULL and "4" in skipped:
        command += skipped["4"]
        least -= RUNS["4"][2]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen(command + ["--as-gloo"] * as_gloo, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=850)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = output.strip().splitlines()
    assert lines, errors[-3000:]
    result = json.loads(lines[-1])
    skipped[name] = result["which"]
    unexpected = {test: text for test, text in result["failures"].items() if not as_gloo or test not in GLOO_ONLY}
    assert not unexpected, "\n\n".join(f"{test}: {text}" for test, text in unexpected.items())
    assert result["passed"] >= least, result
