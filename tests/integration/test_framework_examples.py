"""The training examples under torchrun: the same losses over iris and gloo, to the bit with two ranks."""

import re
from pathlib import Path

import pytest

from integration.test_examples import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(output: str) -> list[str]:
    """Return the lines of the table."""
    return re.findall(r"^ +\d+ .*$", output, re.M)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("train_ddp.py", "--backend gloo --compare iris --engine sdma"),
        ("train_fsdp2.py", "--compare gloo"),
    ],
)
def test_the_losses_are_those_of_gloo(script, arguments):
    done = torchrun(str(EXAMPLES / script), *arguments.split(), "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"largest difference between the losses over \w+ and \w+: 0$", done.stdout, re.M), done.stdout
    assert re.search(
        r"^a step takes [\d.]+ ms over \w+ and [\d.]+ ms over \w+, [\d.]+ times as long$", done.stdout, re.M
    )
    rows = [[float(cell) for cell in line.split()] for line in losses(done.stdout)]
    assert [row[0] for row in rows] == [0, 1, 2, 3]
    assert rows[-1][1] == rows[-1][2] < rows[0][1] - 0.5  # it learns
    assert ("buffers in the heap: " in done.stdout) == (script == "train_fsdp2.py")
