"""Fixtures of all tests: the pool of ranks, and the check that nothing is left behind."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rank_pool
from rank_pool import RankPool, Ranks


def _used_by_others(path: str) -> bool:
    """Return whether a living process has ``path`` open or mapped: it is theirs, then, not something left behind."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if path in (process / "maps").read_text() or any(
                os.readlink(fd) == path for fd in (process / "fd").iterdir()
            ):
                return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[set[int]]:
    """Fail the session when it leaves files in /dev/shm, processes, descriptors of shared memory or mappings of it.

    Yields a set to which sessions of processes are added, for the check at the end.
    """

    def held() -> Counter[str]:
        ours = rank_pool.shared_mappings() + rank_pool.children()
        return ours + Counter({what: n for what, n in rank_pool.descriptors().items() if "memfd" in what})

    files, before, sessions = set(os.listdir("/dev/shm")), held(), set[int]()
    yield sessions
    left = [rank_pool.left_over(before, patience_s=5, now=held)]
    left += rank_pool.processes_of_sessions(sessions)
    suspects = [
        name
        for name in set(os.listdir("/dev/shm")) - files
        # Python's own semaphores stay when torchrun is killed; nothing here makes any.
        if not name.startswith("sem.mp-") and not _used_by_others(f"/dev/shm/{name}")
    ]
    if suspects:
        time.sleep(1)  # other programs make files there and unlink them a moment later
    left += [f"/dev/shm/{name}" for name in suspects if os.path.exists(f"/dev/shm/{name}")]
    assert not any(left), f"the tests left behind: {'; '.join(filter(None, left))}"


@pytest.fixture(scope="session")
def _pool(nothing_is_left: set[int]) -> Iterator[RankPool]:
    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()
        nothing_is_left |= pool.sessions


@pytest.fixture
def ranks(_pool: RankPool) -> Callable[[int], Ranks]:
    """Return ``ranks(world)``, whose ``run(fn, *args)`` runs ``fn(rank, world, *args)`` in ``world`` processes."""
    return lambda world: Ranks(_pool, world)


@pytest.fixture(scope="module")
def mortal_ranks(nothing_is_left: set[int]) -> Iterator[Callable[[int], Ranks]]:
    """Like ``ranks``, in processes of the test module's own: for tests that kill ranks."""
    pool = RankPool()
    try:
        yield lambda world: Ranks(pool, world)
    finally:
        pool.close()
        nothing_is_left |= pool.sessions
