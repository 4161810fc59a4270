"""The first failure of a group, which its ranks leave in its Store, so that those that only see others leave can say
why.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch.distributed as dist

_PATIENCE_S = 2.0  # the host of the store may be the one that is cut off


class Failures:
    """Where the first failure of a group is left.

    Args:
        store: the group's.
        token: a text that no other group on the store has.
    """

    def __init__(self, store: dist.Store, token: str) -> None:
        self._store, self._key = store, f"failed/{token}"

    def first(self, rank: int, text: str, operation: str, number: int) -> dict[str, Any] | None:
        """Leave a failure, unless another rank has left one; return that one's, None where there is none to be had.

        Args:
            rank: this rank.
            text: of the error.
            operation, number: that it ended.
        """
        mine = json.dumps(dict(rank=rank, text=text, operation=operation, number=number))
        found: list[dict[str, Any]] = []

        def ask() -> None:
            try:
                found.append(json.loads(self._store.compare_set(self._key, "", mine)))
            except RuntimeError:
                pass  # the store's process is gone; the error that is being told about says enough

        # A store whose host hangs does not answer, and takes no deadline for this call.
        thread = threading.Thread(target=ask, name="iris_pg failure", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
        return found[0] if found and found[0]["rank"] != rank else None


__all__ = ["Failures"]
