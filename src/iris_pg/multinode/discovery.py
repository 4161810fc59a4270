"""How the ranks of a group learn which of them are on one host, from their Store alone.

Rank 0 reads what every rank says of itself, and publishes what all have to know in one value. So a rank that is not
rank 0 reads one key, however many ranks there are; and one that does not come is named on all of them. That value is
written once: by rank 0, or by a rank that has waited too long for it and gives up. So no rank is taken for one that
comes along after it has given up, and none has given up that the others go on with.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from iris_pg.errors import DeadlineError, MismatchError, PeerLostError, where
from iris_pg.memory.cards import host_identity
from iris_pg.multinode.hosts import Hosts
from iris_pg.platforms.cpu import usable_cores

_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 2e-4, 2e-2, 1.25  # so a rank waits a quarter longer than it has to at most
_SHOWN = 16  # most ranks that a message names


class Discovered(NamedTuple):
    """What all ranks of a group have been told.

    Args:
        token: a text that no other group on the store has.
    """

    hosts: Hosts
    token: str


def discover(
    store: dist.Store,
    rank: int,
    world: int,
    *,
    group: str,
    timeout_s: float,
    host: str | None = None,
    agreed: Mapping[str, Any] = {},
) -> Discovered:
    """Return the hosts of a group. Collective.

    Args:
        store: the group's. It may have served earlier groups of these ranks.
        group: its name, for messages.
        timeout_s: deadline in seconds.
        host: what this rank's host is to be, in place of what it is.
        agreed: values that must be the same on all ranks, as JSON has them.

    Raises:
        DeadlineError: ranks did not come in time; they are named. MismatchError: ranks differ in what must be the same.
        PeerLostError: the process that keeps the store is gone.
    """
    try:
        return _discover(store, rank, world, group, timeout_s, host, dict(agreed))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        place = where(group=group, rank=rank)
        raise PeerLostError(f"create the group: its store does not answer: {error} {place}") from error


def _discover(
    store: dist.Store, rank: int, world: int, group: str, timeout_s: float, host: str | None, agreed: dict[str, Any]
) -> Discovered:
    # As with links: a store that served an earlier group holds its values, and a rank whose peers have tried more often
    # than it has catches up with them.
    deadline, place = time.monotonic() + timeout_s, where(group=group, rank=rank)
    counter = f"hosts/number of rank {rank}"
    number, published = store.add(counter, 1), 0
    name = socket.gethostname() if host is None else host
    mine = dict(host=host_identity() if host is None else host, name=name, cores=usable_cores(), agreed=agreed)
    cards: dict[int, dict[str, Any]] = {}
    pause = _PAUSE_S
    while True:
        is_late = pause >= _LONGEST_PAUSE_S or time.monotonic() > deadline  # then it looks at what is rarely so
        if published != number:
            published, cards = number, {}
            if rank == 0:
                cards[0] = mine
                store.set("hosts/number", str(number))
            else:
                store.set(f"hosts/{rank}", json.dumps({**mine, "number": number}))
        if rank == 0:
            number = _collect(store, world, cards, number, is_late)
            if number != published:
                store.add(counter, number - published)
                continue
            is_complete, is_over = len(cards) == world, time.monotonic() > deadline
            while is_complete or is_over:
                said = _say(store, number, _verdict(cards, world, timeout_s))
                if "gave_up" not in said:
                    return _read(said, place)
                # The others come along to the next number. Is there no time left for it, who gave up is among the late.
                cards.pop(said["gave_up"], None)
                number = published = store.add(counter, 1)
                store.set("hosts/number", str(number))
                is_complete = False
        elif store.check([_verdict_key(number)]):
            said = json.loads(store.get(_verdict_key(number)))
            if "gave_up" not in said and rank not in said.get("missing", []):
                return _read(said, place)
            # Someone has given up, or the others have given up on this rank before it came, and may try again.
            number = store.add(counter, 1)
            continue
        if rank and is_late and store.check(["hosts/number"]) and (ahead := int(store.get("hosts/number"))) > number:
            number = store.add(counter, ahead - number)
            continue
        # Rank 0 says who is late, so the others give it time to.
        if rank and time.monotonic() > deadline + min(timeout_s, 5):
            if _say(store, number, dict(gave_up=rank)) != dict(gave_up=rank):
                continue
            raise DeadlineError(
                f"rank 0 did not start within {timeout_s:g} s; every rank of the group must create it; raise timeout= "
                f"if they need longer {place}"
            )
        time.sleep(pause)
        pause = min(_GROWTH * pause, _LONGEST_PAUSE_S)


def _collect(store: dist.Store, world: int, cards: dict[int, dict[str, Any]], number: int, is_late: bool) -> int:
    """Read the cards, once all have come, or those that have when it ``is_late``; return the number of the group, which
    other ranks may know better.
    """
    absent = [p for p in range(1, world) if p not in cards]
    if not absent:
        return number
    if store.check([f"hosts/{p}" for p in absent]):
        ready = absent
    else:
        ready = [p for p in absent if is_late and store.check([f"hosts/{p}"])]
    if not ready:
        return number
    for p, text in zip(ready, store.multi_get([f"hosts/{p}" for p in ready]), strict=True):
        card = json.loads(text)
        if card["number"] > number:
            return int(card["number"])
        if card["number"] == number:
            cards[p] = card
    return number


def _verdict_key(number: int) -> str:
    return f"hosts/verdict {number}"


def _say(store: dist.Store, number: int, verdict: dict[str, Any]) -> dict[str, Any]:
    """Publish the verdict of a number, unless another rank has; return the one that holds."""
    return dict(json.loads(store.compare_set(_verdict_key(number), "", json.dumps(verdict))))


def _verdict(cards: Mapping[int, dict[str, Any]], world: int, timeout_s: float) -> dict[str, Any]:
    """Return what is published: the hosts, or what is wrong."""
    if missing := [p for p in range(world) if p not in cards]:
        names = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        return dict(
            error="late",
            missing=missing,
            text=f"rank{'s' if len(missing) > 1 else ''} {names} did not start within {timeout_s:g} s; every rank of "
            "the group must create it; raise timeout= if they need longer",
        )
    for p in range(1, world):
        if cards[p]["agreed"] != cards[0]["agreed"]:
            return dict(
                error="mismatch",
                text=f"rank 0 creates the group with {cards[0]['agreed']} and rank {p} with {cards[p]['agreed']}; "
                "options are the same on all ranks",
            )
    hosts = Hosts.of(*([cards[p][what] for p in range(world)] for what in ("host", "name", "cores")))
    return dict(members=hosts.members, names=hosts.names, is_roomy=hosts.is_roomy, token=secrets.token_hex(8))


def _read(said: Mapping[str, Any], place: str) -> Discovered:
    if said.get("error"):
        raise (DeadlineError if said["error"] == "late" else MismatchError)(f"{said['text']} {place}")
    members = tuple(map(tuple, said["members"]))
    return Discovered(Hosts(members, tuple(said["names"]), said["is_roomy"]), said["token"])
