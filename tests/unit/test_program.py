"""Programs as data: what they refuse, how they print, how they join."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_pg.errors import ArgumentError
from iris_pg.program import MAX_WORD, Add, Copy, Copy2D, Program, Reduce, Ref, Signal, Take, Wait

A, B, F = Ref(0, "in", 0), Ref(1, "staging", 0x40), Ref(0, "flags", 4)

EVERY_STEP = (
    Take(F, writer=1),
    Copy(B, A, 0x40, lane=1),
    Copy2D(Ref(1, "out", 0), A, 8, 4, 32, 16),
    Reduce(Ref(0, "out", 0), (A, B), 16, "float32", "sum"),
    Signal(Ref(1, "flags", 0), tag=7),
    Add(Ref(1, "counters", 8), 3, width_bytes=8),
    Wait(Ref(0, "counters", 8), 3),
)


def test_a_program_prints_one_aligned_line_per_step():
    assert str(Program(0, 2, EVERY_STEP, "demo")).splitlines() == [
        "demo: rank 0 of 2, 7 steps, 112 bytes moved",
        "  0  lane 0  take    rank0.flags[0x4] == 1 from rank 1",
        "  1  lane 1  copy    rank1.staging[0x40:0x80] <- rank0.in[0x0:0x40]",
        "  2  lane 0  copy2d  rank1.out[0x0:0x8 x 4 rows, pitch 0x20] <- rank0.in[0x0:0x8 x 4 rows, pitch 0x10]",
        "  3  lane 0  reduce  rank0.out[0x0:0x10] <- sum as float32 of rank0.in[0x0], rank1.staging[0x40]",
        "  4  lane 0  signal  rank1.flags[0x0] = 7",
        "  5  lane 0  add     rank1.counters[0x8] += 3 (8 bytes)",
        "  6  lane 0  wait    rank0.counters[0x8] >= 3",
    ]


def test_columns_stay_aligned_with_many_steps_and_lanes():
    lines = str(Program(0, 2, EVERY_STEP * 2 + (Copy(B, A, 1, lane=10),))).splitlines()
    assert lines[0] == "program: rank 0 of 2, 15 steps, 225 bytes moved"
    assert lines[1] == "   0  lane  0  take    rank0.flags[0x4] == 1 from rank 1"
    assert lines[15] == "  14  lane 10  copy    rank1.staging[0x40:0x41] <- rank0.in[0x0:0x1]"


def test_an_empty_program_prints_its_title():
    assert str(Program(0, 1, ())) == "program: rank 0 of 1, 0 steps, 0 bytes moved"


def test_a_step_prints_as_in_its_program():
    assert str(EVERY_STEP[1]) == "copy rank1.staging[0x40:0x80] <- rank0.in[0x0:0x40]"


@given(st.integers(0, 7), st.integers(0, 2**40), st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_addresses_add_like_pointers(rank, offset, first, second):
    ref = Ref(rank, "heap", offset)
    assert ref + first + second == ref + (first + second) == Ref(rank, "heap", offset + first + second)
    assert ref + 0 == ref and hash(ref + 0) == hash(ref)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Copy(B, A, 0), "copy: nbytes=0; it must be at least 1, as zero bytes produce no copy step"),
        (lambda: Copy(B, A, -4), "copy: nbytes=-4"),
        (lambda: Copy(B, A, 4, lane=-1), "copy: lane=-1; lanes are numbered from 0"),
        (lambda: Reduce(B, (A, F), 0, "float32", "sum"), "reduce: nbytes=0"),
        (lambda: Reduce(B, (A, F), 4, "float32", "sum", lane=-1), "reduce: lane=-1"),
        (lambda: Reduce(B, [A, F], 4, "float32", "sum"), "reduce: sources is a list; a step is immutable"),
        (lambda: Reduce(B, (A,), 4, "float32", "sum"), "reduce: 1 sources; it takes two or more; for one use Copy"),
        (lambda: Copy2D(B, A, 0, 1, 8, 8), "copy2d: width_bytes=0"),
        (lambda: Copy2D(B, A, 8, 0, 8, 8), "copy2d: rows=0"),
        (lambda: Copy2D(B, A, 8, 2, 7, 8), "copy2d: dst_pitch_bytes=7 is less than width_bytes=8"),
        (lambda: Copy2D(B, A, 8, 2, 8, 7), "copy2d: src_pitch_bytes=7 is less than width_bytes=8"),
        (lambda: Signal(F, tag=0), "signal: tag=0; it must be in 1..4294967295"),
        (lambda: Signal(F, tag=2**32), "signal: tag=4294967296"),
        (lambda: Take(F, 1, tag=0), "take: tag=0"),
        (lambda: Wait(F, 0), "wait: value=0; it must be in 1..4294967295"),
        (lambda: Add(F, 0), "add: value=0"),
        (lambda: Add(F, 2**32), "add: value=4294967296; it must be in 1..4294967295"),
        (lambda: Add(F, 1, width_bytes=2), "add: width_bytes=2; a counter is 4 or 8 bytes wide"),
        (lambda: Program(2, 2, ()), "program: rank=2 with world=2; a rank is in 0..world-1"),
        (lambda: Program(0, 0, ()), "program: rank=0 with world=0"),
        (lambda: Program(0, 1, (Copy(B, A, 4),)), r"program: step 0 `copy rank1\..*` names rank 1 with world=1"),
        (
            lambda: Program(0, 1, (Reduce(A, (A, B), 4, "int8", "max"),)),
            "program: step 0 `reduce .*` names rank 1 with",
        ),
        (lambda: Program(0, 1, (Take(F, 3),)), "program: step 0 `take .*` names rank 3 with world=1"),
        (lambda: Program(0, 1, (Signal(Ref(-1, "flags", 0)),)), "names rank -1"),
        (lambda: Program(0, 2, [Copy(B, A, 4)]), "program: steps is a list; a program is immutable"),
        (lambda: Program(0, 2, ()).then(Program(1, 2, ())), "program: rank 0 of 2 then rank 1 of 2"),
    ],
)
def test_a_mistake_is_an_argument_error_when_it_is_made(build, message):
    with pytest.raises(ArgumentError, match=re.compile(message)):
        build()


def test_the_largest_values_are_taken():
    assert Signal(F, MAX_WORD).tag == Take(F, 0, MAX_WORD).tag == Wait(F, MAX_WORD).value == 2**32 - 1
    assert Add(F, 2**64 - 1, width_bytes=8).value == 2**64 - 1
    assert Copy2D(B, A, 8, 2, 8, 8).rows == 2


def test_programs_join_in_order():
    first, second = Program(0, 2, EVERY_STEP[:3], "first"), Program(0, 2, EVERY_STEP[3:], "second")
    assert first.then(second) == Program(0, 2, EVERY_STEP, "first then second")
    assert Program(0, 2, ()).then(second).name == "second"
    assert len(first) == 3 and first.nbytes_moved() + second.nbytes_moved() == 112


def test_programs_are_immutable_and_can_be_keys():
    program = Program(0, 2, EVERY_STEP)
    assert {program: 1}[Program(0, 2, tuple(dataclasses.replace(step) for step in EVERY_STEP))] == 1
    for thing, name in [(program, "rank"), (EVERY_STEP[1], "nbytes"), (A, "offset")]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, 1)
