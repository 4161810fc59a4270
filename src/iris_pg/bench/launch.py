"""Starts the ranks of a run on this machine when no launcher has, and never leaves one behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_GRACE_S = 5.0  # how long the others may go on when one rank has failed: they usually fail too, and say why


def run_ranks(module: str, arguments: Sequence[str], ranks: int, deadline_s: float, hosts: int = 1) -> int:
    """Run ``python -m module arguments --store URL`` once per rank; return the first status that is not 0, else 0.

    Args:
        hosts: what the ranks believe to be on, each on one as large as the others where that can be; they are here.
        deadline_s: ranks still running then are killed, and the status is 124.
    """
    with tempfile.TemporaryDirectory(prefix="iris_pg_bench") as folder:
        command = [sys.executable, "-m", module, *arguments, "--store", f"file://{folder}/store"]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                place = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
                if hosts > 1:
                    place["IRIS_PG_HOST"] = f"host{rank * hosts // ranks}"
                processes.append(subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ, **place}))
            return _wait(processes, time.monotonic() + deadline_s, deadline_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], end: float, deadline_s: float) -> int:
    while True:
        statuses = [p.poll() for p in processes]
        failed = next((s for s in statuses if s), 0)
        if failed:
            end = min(end, time.monotonic() + _GRACE_S)
        if None not in statuses:
            return failed
        if time.monotonic() > end:
            if not failed:
                print(f"not done within {deadline_s:.0f} s (--deadline); its ranks are killed", file=sys.stderr)
            return failed or 124
        time.sleep(0.02)
