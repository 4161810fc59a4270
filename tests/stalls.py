"""Stops random rank processes of tests for a while, over and over, as a host does that is short of cores.

    python tests/stalls.py --longest 4 --seconds 900 &
    python -m pytest tests/ranks tests/regressions

What fails then waits for time to pass where it should wait for an event, or is a race.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from pathlib import Path

PAUSE_S = 0.3  # between two stops, at most


def ranks() -> list[int]:
    """Return the processes of the pool (tests/rank_pool.py)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"rank_pool.py\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a test."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def main() -> None:
    """Stop processes until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of a stop; most are short (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="that it goes on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    args = parser.parse_args()
    chance, end = random.Random(args.seed), time.monotonic() + args.seconds
    while time.monotonic() < end:
        if found := ranks():
            pid = chance.choice(found)
            with contextlib.suppress(OSError):  # it ends meanwhile
                if not is_stopped(pid):
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        time.sleep(args.longest * chance.random() ** 2)
                    finally:
                        os.kill(pid, signal.SIGCONT)
        time.sleep(PAUSE_S * chance.random())


if __name__ == "__main__":
    main()
