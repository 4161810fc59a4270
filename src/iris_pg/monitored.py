"""A barrier that says who is missing: it needs nothing of the group but its Store, so it works where operations hang.

Ranks leave a mark in the Store and look for those of the others. A rank that has waited in vain leaves a mark, too, so
that one that comes later does not take the barrier for passed.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch.distributed as dist

from iris_pg.errors import DeadlineError, PeerLostError, where

_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 5e-3


class Members(Protocol):
    """What is asked of a group's links."""

    rank: int
    world: int
    group: str

    def lost(self) -> list[int]:
        """Return the ranks that are known to be gone."""


class MonitoredBarriers:
    """The monitored barriers of one group.

    Args:
        store: the group's.
        links: the group's; they tell which ranks are gone.
        token: a text that all ranks of the group have, and that no earlier group on the store had.
    """

    def __init__(self, store: dist.Store, links: Members, token: str) -> None:
        self._store, self._links, self._token = store, links, token
        self._number = 0

    def wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Return when all ranks have entered.

        Args:
            timeout_s: deadline, in seconds.
            wait_all_ranks: wait for all that are alive until the deadline, also when a rank has died already.

        Raises:
            DeadlineError: naming the ranks that are late. PeerLostError: ranks have died or left, or the process that
                keeps the Store has.
        """
        try:
            self._wait(timeout_s, wait_all_ranks)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerLostError(f"monitored_barrier: the group's store does not answer: {error}") from error

    def _wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        store, links = self._store, self._links
        deadline = time.monotonic() + timeout_s
        self._number += 1
        prefix = f"monitored_barrier/{self._token}/{self._number}"
        marks = {peer: f"{prefix}/{peer}" for peer in range(links.world)}
        store.set(marks[links.rank], "")
        pause, lost, is_over = _PAUSE_S, list[int](), False
        while not store.check(list(marks.values())):
            lost = [peer for peer in links.lost() if not store.check([marks[peer]])]
            is_over = time.monotonic() > deadline
            if is_over or (lost and not wait_all_ranks) or store.check([f"{prefix}/failed"]):
                break
            time.sleep(min(pause, max(deadline - time.monotonic(), _PAUSE_S)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if store.check([f"{prefix}/failed"]):
            raise DeadlineError(f"monitored_barrier: {store.get(f'{prefix}/failed').decode()} {self._where()}")
        missing = [peer for peer, mark in marks.items() if not store.check([mark])]
        if not missing:
            return
        late = [peer for peer in missing if peer not in lost] if is_over else []
        text = _in_words(late, lost, timeout_s, wait_all_ranks)
        store.set(f"{prefix}/failed", f"rank {links.rank} has waited in vain: {text}")
        raise (DeadlineError if late else PeerLostError)(f"monitored_barrier: {text} {self._where()}")

    def _where(self) -> str:
        return where(group=self._links.group, rank=self._links.rank, op="monitored_barrier", seq=self._number)


def _in_words(late: list[int], lost: list[int], timeout_s: float, wait_all_ranks: bool) -> str:
    # As torch says it of gloo, since people look for these words: the first rank, or all where all are waited for.
    missing = sorted({*late, *lost})
    shown = missing if wait_all_ranks else missing[:1]
    text = f"Rank{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))} failed to pass monitoredBarrier"
    if late:
        text += f" in {1000 * timeout_s:g} ms"
    others = missing[len(shown) :]
    if others:
        text += f", nor has rank {', '.join(map(str, others))}"
    if lost:
        text += f"; rank {', '.join(map(str, lost))} has died or left the group"
    return text
