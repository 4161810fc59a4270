"""Every tracked text file reads the same on every machine: no path of one machine, no word about how it was written."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Written so that no pattern matches itself in this file.
UNWELCOME = {
    "an absolute path of one machine": re.compile(r"(?<![\w.~$}/-])/(?:root|home|work|Users)/[\w.]"),
    "a path outside the project": re.compile(r"\bshared/(?:design|facts|prototypes|conformance|hooks)\b"),
    "a word about how it was written": re.compile(
        r"\b(?:(?:previous|earlier|next) session|sub-?agents?|work(?:place)|chat ?bot|language[ ]model assistant)\b",
        re.I,
    ),
}


def tracked_text_files() -> list[tuple[Path, str]]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    files = []
    for name in filter(None, listed.decode().split("\0")):
        try:
            files.append((Path(name), (ROOT / name).read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):  # binary; or tracked and deleted, a link, a submodule
            continue
    return files


@pytest.mark.parametrize("what", UNWELCOME)
def test_no_tracked_file_holds(what):
    found = [
        f"{path}:{number}: {line.strip()[:120]}"
        for path, text in tracked_text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if UNWELCOME[what].search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


@pytest.mark.parametrize("text", ["/".join(["", "home", "me", "x.py"]), "see '" + "/".join(["", "root", "x"]) + "'"])
def test_a_path_of_one_machine_is_seen(text):
    assert UNWELCOME["an absolute path of one machine"].search(text)


@pytest.mark.parametrize("text", ["https://a.org/home/x", "$HOME/x", "src/work/x", "~/work/x", "/tmp/x", "/dev/shm/x"])
def test_other_paths_pass(text):
    assert not UNWELCOME["an absolute path of one machine"].search(text)
