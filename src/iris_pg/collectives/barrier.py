"""The barrier: everyone tells everyone.

One round trip of mailboxes, (world - 1) signals a rank: for the few ranks of one host this beats a tree, whose depth
adds latency.
"""

from __future__ import annotations

from iris_pg.collectives.setting import Setting
from iris_pg.program import Program, Signal, Step, Take


def barrier(s: Setting, round_: int) -> Program:
    """Return when every rank has entered.

    Args:
        round_: 0 and 1 in turn. A rank that has left round 0 may signal round 1 before a slow peer has taken its signal
            of round 0; it cannot come to the next round 0 before that peer has, since the peer signals round 1 only
            then.
    """
    steps: list[Step] = [Signal(s.flag(p, s.page.barrier(round_, s.rank)), s.tag) for p in s.peers]
    steps += [Take(s.flag(s.rank, s.page.barrier(round_, p)), p, s.tag) for p in s.peers]
    return Program(s.rank, s.world, tuple(steps), "barrier")
