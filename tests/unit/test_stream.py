"""The stream engine's side that needs no GPU: what a stream is told to do for a program."""

from __future__ import annotations

import pytest

from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Part
from iris_pg.collectives.message import pieces, receive, send
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.stream import Flags, Linear, Rectangle, Reduction, lower
from iris_pg.errors import UnsupportedError
from iris_pg.flags import CREDIT, MAIL_SLOTS, ControlPage
from iris_pg.platforms.cuda import FlagOp
from iris_pg.program import Add, Copy, Copy2D, Program, Reduce, Ref, Signal, Take
from iris_pg.verify import verify


def address(ref):
    return 1000 * ref.rank + {"in": 1, "out": 2, "flags": 3}[ref.buffer] * 100000 + ref.offset


def here(buffer, offset=0, rank=0):
    return Ref(rank, buffer, offset)


def test_flags_that_follow_each_other_are_one_action():
    steps = (
        Signal(here("flags", 0, 1), 5),
        Take(here("flags", 64), 1, 6),
        Copy(here("out", 8), here("in"), 32),
        Signal(here("flags", 128, 1), 7),
    )
    assert lower(Program(0, 2, steps), address) == [
        (0, Flags((FlagOp(False, 301000, 5), FlagOp(True, 300064, 6), FlagOp(False, 300064, 0)))),
        (0, Linear(200008, 100000, 32)),
        (0, Flags((FlagOp(False, 301128, 7),))),
    ]


def test_every_kind_of_move():
    steps = (
        Copy2D(here("out"), here("in", 4), 8, 3, 16, 32),
        Reduce(here("out"), (here("in"), here("out", 64, 1)), 16, "float32", "sum"),
    )
    assert lower(Program(0, 2, steps), address) == [
        (0, Rectangle(200000, 100004, 8, 3, 16, 32)),
        (0, Reduction(200000, (100000, 201064), 16, "float32", "sum")),
    ]


def test_counters_are_refused():
    with pytest.raises(UnsupportedError, match="no atomics"):
        lower(Program(0, 2, (Add(here("flags", 0, 1), 1),)), address)


def test_lanes_keep_the_order_of_the_program():
    """What is written first is told first: a lane's flags are not held back while another lane's wait is told."""
    steps = (
        Signal(here("flags", 0, 1), 5, 0),
        Take(here("flags", 64), 1, 6, 1),
        Signal(here("flags", 128, 1), 7, 0),
        Copy(here("out"), here("in"), 8, 1),
    )
    program = Program(0, 2, steps)
    assert [(lane, type(action).__name__) for lane, action in lower(program, address)] == [
        (0, "Flags"),
        (1, "Flags"),
        (0, "Flags"),
        (1, "Linear"),
    ]
    merged = lower(program, address, lanes=False)
    assert [lane for lane, _ in merged] == [0, 0] and len(merged[0][1].ops) == 4


def test_a_gather_of_two_ranks_takes_few_calls():
    """A zero-copy gather in place is four driver calls, so that a call costs the host little."""
    page = ControlPage(2)
    part = Part(1, 64, here("out"), here("out", 0, 1))
    flow = Flow("all_gather", (part,), (Part(1, 64, here("out", 64)),), to_all=True, zero_copy=True)
    actions = lower(build(Setting(0, 2, page, pushes=True), flow), address)
    assert [type(action) for _, action in actions] == [Flags, Linear, Flags]


@pytest.mark.parametrize("nbytes", [0, 1, 8, 9, 40])
def test_messages_are_proven(nbytes):
    """Three messages in a row, in both directions at once, through slots of 8 bytes."""
    page, programs, inputs, outputs = ControlPage(2), [], [], []
    flags = {}
    for rank in range(2):
        peer, sent, received, steps = 1 - rank, 0, 0, []
        for i in range(3):
            s = Setting(rank, 2, page, tag=2 + i, pair_bytes=8, first_slot=sent % MAIL_SLOTS)
            source, target = Ref(rank, f"in{i}", 0), Ref(rank, f"out{i}", 0)
            steps += [_in_lane(step, 0) for step in send(s, peer, source, nbytes).steps]
            steps += [_in_lane(step, 1) for step in receive(s, peer, target, nbytes).steps]
            sent += len(pieces(s, nbytes))
            received += len(pieces(s, nbytes))
            if nbytes:
                inputs.append((source, nbytes))
                outputs.append((target, nbytes, Ref(peer, f"in{i}", 0)))
        # Receives are told before the sends that would wait for them.
        programs.append(Program(rank, 2, tuple(_interleaved(steps))))
        flags |= {Ref(rank, "flags", page.emptied(slot, peer)): CREDIT for slot in range(MAIL_SLOTS)}
    verify(programs, inputs=inputs, outputs=outputs, flags=flags)


def _in_lane(step, lane):
    from dataclasses import replace

    return replace(step, lane=lane)


def _interleaved(steps):
    """Return the steps with chunk i of what is received behind chunk i of what is sent, as two streams would go on."""
    lanes = [[step for step in steps if step.lane == lane] for lane in range(2)]
    groups = [[], []]
    for lane, of_lane in enumerate(lanes):
        chunk = []
        for step in of_lane:
            chunk.append(step)
            if isinstance(step, Signal):
                groups[lane].append(chunk)
                chunk = []
    for out, into in zip(*groups, strict=True):
        yield from out
        yield from into
