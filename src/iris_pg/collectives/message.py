"""Programs of a message between two ranks, on engines that match messages by their order.

The sender pushes each chunk into a landing slot of the receiver, which copies it out. Messages of one rank to another
go through the slots of that pair in turn, across messages too, so a message may begin before the last one has been
received.

Bytes: of n bytes the sender writes n and the receiver n.
"""

from __future__ import annotations

from collections.abc import Iterator

from iris_pg.collectives.setting import Setting, chunks
from iris_pg.flags import CREDIT, MAIL_SLOTS
from iris_pg.program import Copy, Program, Ref, Signal, Step, Take


def pieces(s: Setting, nbytes: int) -> list[tuple[int, int]]:
    """Return (start, length) of each chunk of a message; one of 0 bytes is one chunk."""
    return list(chunks(nbytes, s.pair_bytes)) or [(0, 0)]


def send(s: Setting, peer: int, here: Ref, nbytes: int) -> Program:
    """The sender's program. ``s.first_slot`` is the number of chunks that this rank has sent to ``peer`` before."""
    steps: list[Step] = []
    for slot, start, length in _slots(s, nbytes):
        steps.append(Take(s.flag(s.rank, s.page.emptied(slot, peer)), peer, CREDIT))
        if length:
            steps.append(Copy(_landing(s, peer, slot, s.rank), here + start, length))
        steps.append(Signal(s.flag(peer, s.page.mailed(slot, s.rank)), s.tag_of(nbytes)))
    return Program(s.rank, s.world, tuple(steps), "send")


def receive(s: Setting, peer: int, here: Ref, nbytes: int) -> Program:
    """The receiver's program. ``s.first_slot`` is the number of chunks that it has received from ``peer`` before."""
    steps: list[Step] = []
    for slot, start, length in _slots(s, nbytes):
        steps.append(Take(s.flag(s.rank, s.page.mailed(slot, peer)), peer, s.tag_of(nbytes)))
        if length:
            steps.append(Copy(here + start, _landing(s, s.rank, slot, peer), length))
        steps.append(Signal(s.flag(peer, s.page.emptied(slot, s.rank)), CREDIT))
    return Program(s.rank, s.world, tuple(steps), "recv")


def _slots(s: Setting, nbytes: int) -> Iterator[tuple[int, int, int]]:
    for number, (start, length) in enumerate(pieces(s, nbytes)):
        yield (s.first_slot + number) % MAIL_SLOTS, start, length


def _landing(s: Setting, receiver: int, slot: int, sender: int) -> Ref:
    return Ref(receiver, "mail", (slot * s.world + sender) * s.pair_bytes)
