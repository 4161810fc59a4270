"""What a group's ranks leave in its Store when it fails: the first failure, so that those that only see others leave
can say why; and for whom each has waited in vain, so that a rank that is late because of another is not blamed alone.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

_PATIENCE_S = 2.5  # the host of the store may be the one that is cut off
_HEARING_S = 1.0  # ranks that wait for each other give up at about one time
_LOOK_S = 0.02  # between two looks


class Told(NamedTuple):
    """What others have said.

    Args:
        behind: for whom the rank has waited that this one waits for, for whom that one has, and so on; the last has
            said nothing. Empty where the first has not, or where they wait for each other.
        first: the failure that another rank has left before; None when this one is the first, or there is none to be
            had. rank, text, operation, number.
    """

    behind: tuple[int, ...] = ()
    first: dict[str, Any] | None = None


class Failures:
    """Where ranks of a group leave their failures.

    Args:
        store: the group's.
        token: a text that no other group on the store has.
    """

    def __init__(self, store: dist.Store, token: str) -> None:
        self._store, self._key = store, f"failed/{token}"

    def tell(self, rank: int, text: str, operation: str, number: int, late: int | None = None) -> Told:
        """Leave a failure, and return what others have said.

        Args:
            rank: this rank.
            text: of the error.
            operation, number: that it ended.
            late: the rank that this one has waited for in vain, if it has.
        """
        mine = json.dumps(dict(rank=rank, text=text, operation=operation, number=number))
        told = [Told()]

        def ask() -> None:
            try:
                if late is not None:
                    self._store.set(f"{self._key}/{rank}", str(late))
                first = json.loads(self._store.compare_set(self._key, "", mine))
                told[0] = Told((), first if first["rank"] != rank else None)
                if late is not None:
                    told[0] = told[0]._replace(behind=self._behind(rank, late))
            except RuntimeError:
                pass  # the store's process is gone; the error that is being told about says enough

        # A store whose host hangs does not answer, and takes no deadline for some calls.
        thread = threading.Thread(target=ask, name="iris_pg failure", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        return told[0]

    def _behind(self, rank: int, late: int) -> tuple[int, ...]:
        ranks, end = [rank, late], time.monotonic() + _HEARING_S
        while True:
            key = f"{self._key}/{ranks[-1]}"
            while not self._store.check([key]):
                if time.monotonic() > end:
                    return tuple(ranks[2:])
                time.sleep(_LOOK_S)
            behind = int(self._store.get(key))
            if behind in ranks:
                return ()
            ranks.append(behind)


__all__ = ["Failures", "Told"]
