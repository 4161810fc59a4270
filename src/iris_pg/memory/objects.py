"""Python objects, from one rank of a group to all others, over its links."""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any

from iris_pg.errors import ArgumentError, MismatchError, where
from iris_pg.memory.sharing import Links
from iris_pg.platforms import cpu


def broadcast(links: Links, value: object, src: int) -> Any:
    """Return rank ``src``'s ``value``, of any size, as it was pickled; on ``src`` the value itself. Collective.

    Raises:
        ArgumentError: the value does not pickle; on every rank. MismatchError: ranks disagree on ``src``.
        DeadlineError, PeerLostError, ClosedError: as :meth:`Links.exchange`.
    """
    data, problem, fd = b"", None, None
    if links.rank == src:
        try:
            data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever an object's own __reduce__ raises
            problem = f"{type(error).__name__}: {error}"
    try:
        if data:
            fd = cpu.create_segment(cpu.page_up(len(data)))
            with mmap.mmap(fd, len(data)) as memory:
                memory[:] = data
        messages = links.exchange(
            dict(src=src, nbytes=len(data), problem=problem), [] if fd is None else [fd], what="broadcast"
        )
    finally:
        if fd is not None:
            os.close(fd)
    try:
        place = where(group=links.group, rank=links.rank)
        asked = [message.payload["src"] for message in messages]
        if any(rank != src for rank in asked):
            raise MismatchError(f"broadcast: ranks 0, 1, ... gave src={asked}; all ranks give the same {place}")
        card = messages[src].payload
        if card["problem"]:
            raise ArgumentError(f"broadcast: rank {src}'s value does not pickle ({card['problem']}) {place}")
        if links.rank == src:
            return value
        with mmap.mmap(messages[src].fds[0], card["nbytes"], access=mmap.ACCESS_READ) as memory:
            return pickle.loads(memory)
    finally:
        for message in messages:
            for received in message.fds:
                os.close(received)
