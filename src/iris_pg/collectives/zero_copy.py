"""Programs for outputs or inputs in the symmetric heap, at the same offset on every rank: bytes go straight to where
they belong.

Bytes: of n bytes, n are read and written for each peer, which is the lower bound; nothing is staged.
"""

from __future__ import annotations

from dataclasses import replace

from iris_pg.collectives.flow import Flow
from iris_pg.collectives.setting import Setting
from iris_pg.program import Copy, Program, Signal, Step, Take


def zero_copy(s: Setting, flow: Flow) -> Program:
    """Each sender writes into its peers' outputs: all_gather, broadcast. Or each receiver reads its peers' inputs:
    all_gather.

    The owner of such memory lets its users in (enter); a user says when it has written, or read (done). A user signals
    done only after it took enter, and an owner enters again only after it took done, so no mailbox is ever signalled
    twice.
    """
    used, lent = (flow.receives, flow.sends) if flow.pulls else (flow.sends, flow.receives)
    enter: list[Step] = [Signal(s.flag(part.peer, s.page.enter(s.rank)), s.tag) for part in lent]
    own: list[Step] = [replace(flow.own, lane=s.receiving)] if flow.own else []
    # Beside what is moved, or, where lanes are merged, first: the flags that follow are then one call.
    steps = own + enter if s.pushes else enter + own
    for part in used:
        assert part.there
        to, source = (part.here, part.there) if flow.pulls else (part.there, part.here)
        steps.append(Take(s.flag(s.rank, s.page.enter(part.peer)), part.peer, s.tag))
        steps.append(Copy(to, source, part.nbytes))
        steps.append(Signal(s.flag(part.peer, s.page.done(s.rank)), s.tag))
    steps += [Take(s.flag(s.rank, s.page.done(part.peer)), part.peer, s.tag) for part in lent]
    return Program(s.rank, s.world, tuple(steps), flow.name)
