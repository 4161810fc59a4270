"""Which rank is on which host. Pure; all ranks of a group hold the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group, in the order of their lowest ranks.

    Args:
        members: the ranks of each host, in ascending order. A rank's place in there is its *index* on its host.
        names: a name of each host, for messages.
        is_roomy: whether every rank may run on two cores or more for each rank of its host. Else the threads of some
            keep others from running, and what needs the fewest of them is the fastest.
    """

    members: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    is_roomy: bool = False

    @classmethod
    def of(cls, identities: Sequence[str], names: Sequence[str], cores: Sequence[int] = ()) -> Hosts:
        """Return the hosts of ranks with these identities, equal on one host, names of hosts, and numbers of cores that
        they may run on, if known; all by rank.
        """
        members: dict[str, list[int]] = {}
        for rank, identity in enumerate(identities):
            members.setdefault(identity, []).append(rank)
        is_roomy = bool(cores) and all(cores[p] >= 2 * len(ranks) for ranks in members.values() for p in ranks)
        return cls(tuple(map(tuple, members.values())), tuple(names[ranks[0]] for ranks in members.values()), is_roomy)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Host and index of each rank."""
        places = {rank: (h, i) for h, ranks in enumerate(self.members) for i, rank in enumerate(ranks)}
        return tuple(places[rank] for rank in range(len(places)))

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.members)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.names[self.places[rank][0]]

    def counterpart(self, host: int, index: int) -> int:
        """Return the rank on ``host`` that deals with what the rank of an index on another host sends there."""
        ranks = self.members[host]
        return ranks[index % len(ranks)]

    def lanes(self, host: int) -> list[list[int]]:
        """Return for each rank of ``host`` the ranks, of all hosts, that it is the counterpart of, itself included."""
        size = len(self.members[host])
        return [[rank for ranks in self.members for rank in ranks[index::size]] for index in range(size)]

    def peers(self, rank: int) -> list[int]:
        """Return the ranks of other hosts that a rank of theirs is the counterpart of, or that are its counterparts."""
        host, index = self.places[rank]
        far = {self.counterpart(other, index) for other in self.others(host)}
        far |= {peer for peer in self.lanes(host)[index] if self.places[peer][0] != host}
        return sorted(far, key=lambda peer: ((self.places[peer][0] - host) % self.count, peer))

    def others(self, host: int) -> list[int]:
        """Return the other hosts, in the order in which ``host`` turns to them: all turn to different ones at first."""
        return [(host + k) % self.count for k in range(1, self.count)]
