"""How the ranks of a group on one host find each other: each puts a card into the Store, and reads those of all."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from iris_pg.errors import DeadlineError, UnsupportedError, where

_MET, _GIVEN_UP = b"met", b"given up"  # what became of a try to make a group


class Store(Protocol):
    """The part of a c10d Store that set-up needs."""

    def set(self, key: str, value: str) -> None:
        """Give ``key`` a value."""

    def get(self, key: str) -> bytes:
        """Return the value of ``key``."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to the number that ``key`` holds, 0 at first, and return the sum."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Give ``key`` a value if it has the expected one (an empty one: none); return what it has then."""


def host_identity() -> str:
    """Return what makes two processes able to share memory and abstract sockets: boot id and network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def names_of(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


class Cards:
    """The cards of one group.

    Args:
        store: as of :class:`iris_pg.memory.sharing.Links`.
        rank, world: this rank and the number of ranks.
        group, timeout_s: for messages.
    """

    def __init__(self, store: Store, rank: int, world: int, *, group: str, timeout_s: float) -> None:
        self._store, self._rank, self._world, self._group, self._timeout_s = store, rank, world, group, timeout_s
        self._number = 0  # of this group among those made on the store

    def collect(self, address: str, token: str, deadline: float) -> list[dict[str, str]]:
        """Publish this rank's card and return those of all ranks: address, token, host, hostname.

        Raises:
            UnsupportedError: a rank is on another host. DeadlineError: a rank has not come; the message names it.
        """
        store = self._store
        mine = dict(address=address, token=token, host=host_identity(), hostname=socket.gethostname())
        # A store that served an earlier group holds its cards. Each rank numbers the groups that it makes on the store,
        # and those with one number belong together. A rank whose peers are ahead (it failed before it came here, and
        # they tried again) catches up. Whether the ranks of a number have met, or one of them has given up, the first
        # to know writes down, once: so a rank that has given up, and perhaps tries again, is never waited for.
        counter = f"links/number of rank {self._rank}"
        number = store.add(counter, 1)
        cards: dict[int, dict[str, Any]] = {}
        pause = 0.0005
        while True:
            if self._number != number:
                cards, self._number = {self._rank: mine}, number
                store.set(f"links/{self._rank}", json.dumps({**mine, "number": number}))
            before = len(cards)
            for peer in range(self._world):
                if peer in cards or not store.check([f"links/{peer}"]):
                    continue
                card = json.loads(store.get(f"links/{peer}"))
                if card["number"] > number:
                    number = store.add(counter, card["number"] - number)
                    break
                if card["number"] == number:
                    self._check_host(peer, card, mine)
                    cards[peer] = card
            if number != self._number:
                continue
            if len(cards) == self._world:
                if self._outcome(_MET) == _MET:
                    return [cards[peer] for peer in range(self._world)]
                number = store.add(counter, 1)
            elif len(cards) == before:
                if time.monotonic() > deadline:
                    if self._outcome(_GIVEN_UP) == _GIVEN_UP:
                        raise self.late([p for p in range(self._world) if p not in cards], "start")
                time.sleep(pause)
                pause = min(2 * pause, 0.02)

    def withdraw(self) -> None:
        """Tell who comes later that this rank has given up."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._store.set(f"links/outcome {self._number}", _GIVEN_UP.decode())

    def late(self, ranks: Sequence[int], did_not: str) -> DeadlineError:
        """Return the error of ranks that did not do something in time."""
        return DeadlineError(
            f"{names_of(ranks)} did not {did_not} within {self._timeout_s} s; every rank of the group must create it; "
            f"raise timeout= if they need longer {self._where()}"
        )

    def _outcome(self, seen: bytes) -> bytes:
        """Write down what became of this number, unless another rank has; return what holds."""
        return self._store.compare_set(f"links/outcome {self._number}", "", seen.decode())

    def _check_host(self, peer: int, card: dict[str, str], mine: dict[str, str]) -> None:
        if card["host"] != mine["host"]:
            raise UnsupportedError(
                f"rank {self._rank} is on host {mine['hostname']} and rank {peer} on host {card['hostname']} (or in "
                "another network namespace); the ranks of an iris group share memory and must be on one host; use one "
                f"group per host, or another backend {self._where()}"
            )

    def _where(self) -> str:
        return where(group=self._group, rank=self._rank)


__all__ = ["Cards", "Store", "host_identity", "names_of"]
