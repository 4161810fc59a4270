"""Programs for outputs or inputs in the symmetric heap, at the same offset on every rank: bytes go straight to where
they belong.

Bytes: of n bytes, n are read and written for each peer, which is the lower bound; nothing is staged.
"""

from __future__ import annotations

from dataclasses import replace

from iris_pg.collectives.flow import Flow
from iris_pg.collectives.setting import Setting
from iris_pg.program import Copy, Program, Signal, Step, Take


def push(s: Setting, flow: Flow) -> Program:
    """Each sender writes into its peers' outputs: all_gather, broadcast.

    The owner of an output lets its writers in (enter); a writer says when it has written (done). A writer signals done
    only after it took enter, and an owner enters again only after it took done, so no mailbox is ever signalled twice.
    """
    enter: list[Step] = [Signal(s.flag(part.peer, s.page.enter(s.rank)), s.tag) for part in flow.receives]
    own: list[Step] = [replace(flow.own, lane=s.receiving)] if flow.own else []
    # Beside what is sent, or, where lanes are merged, first: the flags that follow are then one call.
    steps = own + enter if s.pushes else enter + own
    for part in flow.sends:
        assert part.there
        steps.append(Take(s.flag(s.rank, s.page.enter(part.peer)), part.peer, s.tag))
        steps.append(Copy(part.there, part.here, part.nbytes))
        steps.append(Signal(s.flag(part.peer, s.page.done(s.rank)), s.tag))
    steps += [Take(s.flag(s.rank, s.page.done(part.peer)), part.peer, s.tag) for part in flow.receives]
    return Program(s.rank, s.world, tuple(steps), flow.name)


def pull(s: Setting, flow: Flow) -> Program:
    """Each receiver reads its peers' inputs: all_gather.

    The owner of an input lets its readers in (enter); a reader says when it has read (done). The flags are those of
    :func:`push`, whose rules hold with writers for readers.
    """
    steps: list[Step] = [Signal(s.flag(part.peer, s.page.enter(s.rank)), s.tag) for part in flow.sends]
    if flow.own:
        steps.insert(0 if s.pushes else len(steps), replace(flow.own, lane=s.receiving))
    for part in flow.receives:
        assert part.there
        steps.append(Take(s.flag(s.rank, s.page.enter(part.peer)), part.peer, s.tag))
        steps.append(Copy(part.here, part.there, part.nbytes))
        steps.append(Signal(s.flag(part.peer, s.page.done(s.rank)), s.tag))
    steps += [Take(s.flag(s.rank, s.page.done(part.peer)), part.peer, s.tag) for part in flow.sends]
    return Program(s.rank, s.world, tuple(steps), flow.name)
