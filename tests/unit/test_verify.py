"""The proof about programs: right ones pass, every mistake is found, and what passes survives every timing tried.

Three kinds of tests: small programs, each with one mistake and the message it must get; mutations of every step of
correct collectives; and random programs that are run, byte by byte, by a simulator that shares no code with the proof.
"""

import dataclasses
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_pg.errors import ArgumentError, ProgramError
from iris_pg.program import Add, Copy, Copy2D, Program, Pull, Reduce, Ref, Signal, Take, Wait
from iris_pg.program_group import ProgramGroup
from iris_pg.verify import _run, _sampled, verify

# Correct collectives: each returns its programs, and the other arguments of verify.


def pull_all_gather(world, chunks=5, ops=2, nbytes=2, lanes=1, ahead=0):
    """Each rank stages its chunks in two slots, and pulls those of its peers.

    Args:
        lanes: 2 to pull on a lane of its own.
        ahead: 1 to stage a chunk before the one before it is pulled.
    """
    lane, shard, uses = lanes - 1, chunks * nbytes, ops * chunks

    def ready(owner, reader, slot):
        return Ref(reader, "ready", 4 * (2 * owner + slot))

    def free(owner, reader, slot):
        return Ref(owner, "free", 4 * (2 * reader + slot))

    def peers(rank):
        return [(rank + k) % world for k in range(1, world)]

    def out(rank, peer, use):
        return Ref(rank, "out", (use // chunks * world + peer) * shard + use % chunks * nbytes)

    def stage(rank, use):
        slot, source = use % 2, Ref(rank, "in", use * nbytes)
        yield from (Take(free(rank, peer, slot), peer) for peer in peers(rank))
        if world > 1:
            yield Copy(Ref(rank, "staging", slot * nbytes), source, nbytes)
        yield from (Signal(ready(rank, peer, slot), use // chunks + 1) for peer in peers(rank))
        yield Copy(out(rank, rank, use), source, nbytes)

    def pull(rank, use):
        for peer in peers(rank):
            yield Take(ready(peer, rank, use % 2), peer, use // chunks + 1, lane)
            yield Copy(out(rank, peer, use), Ref(peer, "staging", use % 2 * nbytes), nbytes, lane)
            yield Signal(free(peer, rank, use % 2), 1, lane)

    programs = []
    for rank in range(world):
        steps = [step for use in range(ahead) for step in stage(rank, use)]
        for use in range(uses):
            steps += [*(stage(rank, use + ahead) if use + ahead < uses else ()), *pull(rank, use)]
        programs.append(Program(rank, world, tuple(steps), "all_gather"))
    ranks, starts = range(world), range(0, uses, chunks)
    return programs, {
        "inputs": [(Ref(rank, "in", 0), ops * shard) for rank in ranks],
        "outputs": [
            (out(rank, peer, use), shard, Ref(peer, "in", use * nbytes))
            for rank in ranks
            for peer in ranks
            for use in starts
        ],
        "flags": {free(rank, peer, slot): 1 for rank in ranks for peer in peers(rank) for slot in range(2)},
    }


def ring_reduce_scatter(world, ops=3, nbytes=2):
    """Sums travel to the right, and each rank adds its part; a rank has two slots, which its right neighbour reads."""
    programs, inputs, outputs, flags = [], [], [], {}
    for rank in range(world):
        left, right, steps = (rank - 1) % world, (rank + 1) % world, []
        for use in range(ops * world):
            op, hop = divmod(use, world)  # at the last hop the sum has arrived
            source, slot = Ref(rank, "in", op * world * nbytes), (use - op) % 2
            here = Ref(rank, "staging", slot * nbytes) if hop < world - 1 else Ref(rank, "out", op * nbytes)
            mine, theirs = source + (rank - hop - 1) % world * nbytes, Ref(left, "staging", (1 - slot) * nbytes)
            if hop < world - 1:
                steps += [Take(Ref(rank, "free", slot * 4), right)]
            if hop:
                steps += [Take(Ref(rank, "ready", (1 - slot) * 4), left)]
                steps += [Reduce(here, (theirs, mine), nbytes, "uint8", "sum")]
                steps += [Signal(Ref(left, "free", (1 - slot) * 4))]
            else:
                steps += [Copy(here, mine, nbytes)]
            if hop < world - 1:
                steps += [Signal(Ref(right, "ready", slot * 4))]
        for op in range(ops):
            sources = frozenset(Ref(peer, "in", (op * world + rank) * nbytes) for peer in range(world))
            outputs.append((Ref(rank, "out", op * nbytes), nbytes, sources))
        inputs.append((Ref(rank, "in", 0), ops * world * nbytes))
        flags |= {Ref(rank, "free", slot * 4): 1 for slot in range(2)}
        programs.append(Program(rank, world, tuple(steps), "reduce_scatter"))
    return programs, {"inputs": inputs, "outputs": outputs, "flags": flags}


@pytest.mark.parametrize("world", range(1, 9))
def test_correct_collectives_pass(world):
    for lanes, ahead in [(1, 0), (1, 1), (2, 0)]:
        programs, spec = pull_all_gather(world, lanes=lanes, ahead=ahead)
        verify(programs, **spec)
    programs, spec = ring_reduce_scatter(world)
    verify(programs, **spec)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2**33), st.integers(1, 2), st.integers())
@settings(deadline=None, max_examples=30, derandomize=True)
def test_correct_collectives_pass_at_any_size(world, chunks, ops, nbytes, lanes, seed):
    programs, spec = pull_all_gather(world, chunks, ops, nbytes, lanes)
    verify(programs, **spec, seed=seed, schedules=1)
    programs, spec = ring_reduce_scatter(world, ops, nbytes)
    verify(programs, **spec, seed=seed, schedules=1)


def test_eight_ranks_of_two_hundred_steps_take_well_under_a_second():
    programs, spec = pull_all_gather(8, chunks=3, nbytes=4096, lanes=2)
    assert len(programs[0]) > 200
    times = []
    for _ in range(3):
        start = time.perf_counter()
        verify(programs, **spec)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times  # seconds; 0.07 on one core of a server


# Small programs, each with one mistake.


def at(rank, offset=0, buffer="m"):
    return Ref(rank, buffer, offset)


def flag(rank, number=0):
    return Ref(rank, "flags", 4 * number)


IN, OUT, M, N = at(0, 0, "in"), at(0, 0, "out"), at(0), at(1)  # M and N: scratch memory of rank 0 and of rank 1
TO_OUT = Copy(OUT, IN, 4)
F, G, H = flag(0), flag(1), flag(1, 1)  # F lies at rank 0, G and H at rank 1
OUT_1 = at(1, 0, "out")
INPUTS = [(at(rank, 0, "in"), 16) for rank in range(3)]


def total(dst, *sources):
    return Reduce(dst, sources, 4, "uint8", "sum")


def programs_of(*steps_of_ranks):
    return [Program(rank, len(steps_of_ranks), tuple(steps)) for rank, steps in enumerate(steps_of_ranks)]


def wrong(name, message, *steps_of_ranks, outputs=(), flags=None):
    return pytest.param(programs_of(*steps_of_ranks), {"outputs": outputs, "flags": flags}, message, id=name)


MISTAKES = [
    wrong(
        "each waits for the other",
        r"^deadlock: .*\[schedule=serial\]"
        r"\n  rank 0 step 1 `take rank0.flags\[0x0\] == 1 from rank 1`: the flag holds 0, ranks that write it: \[1\]"
        r"\n  rank 1 step 0 `take rank1.flags\[0x0\] == 1 from rank 0`: the flag holds 0, ranks that write it: \[0\]$",
        [TO_OUT, Take(F, 1), Signal(G)],
        [Take(G, 0), Signal(F)],
    ),
    wrong(
        "ends with two lanes, but not as one FIFO",
        "^deadlock: ",
        [Take(F, 1, lane=0), Signal(G, lane=1)],
        [Take(G, 0), Signal(F)],
    ),
    wrong("nobody signals", "ranks that write it: none", [Take(F, 0)]),
    wrong("not enough adds", r"rank 0 step 0 `wait .*` ?: the flag holds 1, .*: \[1\]", [Wait(F, 2)], [Add(F, 1)]),
    wrong("signal into a full mailbox", "rank 0 step 1 .* finds tag 1 there", [Signal(G), Signal(G)], []),
    wrong(
        "signal that does not know of the take",
        r"rank 0 step 1 .* does not come after rank 1 step 0 .* in every run",
        [Signal(G), Signal(G)],
        [Take(G, 0), Take(G, 0)],
    ),
    wrong(
        "takes on two lanes",
        r"rank 1 step 2 .* does not come after rank 1 step 0 .* in every run",
        [Signal(G), Take(F, 1), Signal(G)],
        [Take(G, 0, lane=0), Signal(F, lane=0), Take(G, 0, lane=1)],
    ),
    wrong("take from another rank", "rank 0 step 1 .* takes from memory of rank 1", [Signal(G), Take(G, 0)], []),
    wrong("other tag", "rank 1 step 0 .* finds tag 2; signal and take the same", [Signal(G, 2)], [Take(G, 0, 3)]),
    wrong("two writers", "rank 1 step 0 .* signals the mailbox of rank 0", [Signal(G)], [Signal(G), Take(G, 0)]),
    wrong("wrong name", "rank 1 step 0 .* names another writer than rank 0", [Signal(G)], [Take(G, 1)]),
    wrong("mailbox as counter", "rank 1 step 0 .* shares its flag with rank 0", [Signal(G)], [Wait(G, 1)]),
    wrong("left over", "rank 0 step 0 .* leaves 1 in the mailbox at the end; it must end as it began, 0", [Signal(F)]),
    wrong("credit kept", "rank 0 step 0 .* leaves 0 .*; it must end as it began, 1", [Take(F, 0)], flags={F: 1}),
    wrong("undefined", r"reads rank0.in\[0x10:0x12\], which is undefined", [Copy(M, IN + 12, 6)]),
    wrong("reduce of undefined", r"reads rank0.m\[0x0:0x4\], which is", [total(OUT, IN, M)]),
    wrong("reduce into undefined in place", r"reads rank0.m\[0x0:0x4\], which is", [total(M, IN, M)]),
    wrong(
        "reduce without a flag",
        r"rank 1 step 0 .* reads rank1.m\[0x0:0x4\] while it is written by rank 0 step 0 .*; nothing orders the two",
        [Copy(N, IN, 4)],
        [total(OUT_1, at(1, 0, "in"), N)],
        outputs=[(OUT_1, 4, {at(1, 0, "in"), IN})],
    ),
    wrong(
        "overwritten while it is reduced",
        r"rank 0 step 3 .* overwrites rank1.m\[0x0:0x4\] while it is read by rank 1 step 1",
        [Copy(N, IN, 4), Signal(G), TO_OUT, Copy(N, IN + 4, 4), Signal(H)],
        [Take(G, 0), total(OUT_1, at(1, 0, "in"), N), Take(H, 0), total(OUT_1 + 4, N, at(1, 4, "in"))],
        outputs=[(OUT, 4, IN), (OUT_1, 8, {at(1, 0, "in"), IN})],
    ),
    wrong(
        "read without a flag",
        r"rank 1 step 0 .* reads rank1.m\[0x0:0x4\] while it is written by rank 0 step 0 .*; nothing orders the two",
        [Copy(N, IN, 4)],
        [Copy(OUT_1, N, 4)],
        outputs=[(OUT_1, 4, IN)],
    ),
    wrong(
        "signal before its copy",
        r"rank 1 step 1 .* reads rank1.m\[0x0:0x4\] while it is written by rank 0 step 1",
        [Signal(G), Copy(N, IN, 4)],
        [Take(G, 0), Copy(OUT_1, N, 4)],
        outputs=[(OUT_1, 4, IN)],
    ),
    wrong(
        "overwritten while it is read",
        r"rank 0 step 3 .* overwrites rank1.m\[0x0:0x4\] while it is read by rank 1 step 1",
        [Copy(N, IN, 4), Signal(G), TO_OUT, Copy(N, IN + 4, 4), Signal(H)],
        [Take(G, 0), Copy(OUT_1, N, 4), Take(H, 0), Copy(OUT_1 + 4, N, 4)],
        outputs=[(OUT, 4, IN), (OUT_1, 8, IN)],
    ),
    wrong(
        "two write at once",
        r"rank 1 step 0 .* overwrites rank0.m\[0x2:0x4\] while it is written by rank 0 step 0",
        [Copy(M, IN, 4)],
        [Copy(M + 2, at(1, 0, "in"), 4)],
    ),
    wrong(
        "lanes of one rank",
        r"rank 0 step 1 .* reads rank0.m\[0x0:0x4\] while it is written by rank 0 step 0",
        [Copy(M, IN, 4, lane=0), Copy(OUT, M, 4, lane=1)],
        outputs=[(OUT, 4, IN)],
    ),
    wrong(
        "a wait that passes without the add",
        r"rank 2 step 1 .* reads rank0.m\[0x0:0x4\] while it is written by rank 0 step 0",
        [Copy(M, IN, 4), Add(flag(2), 1)],
        [Add(flag(2), 1)],
        [Wait(flag(2), 1), Copy(at(2, 0, "out"), M, 4)],
        outputs=[(at(2, 0, "out"), 4, IN)],
    ),
    wrong(
        "push into memory that its owner still reads",
        r"rank 0 step 1 .* overwrites rank1.in\[0x0:0x4\] while it is read by rank 1 step 0",
        [TO_OUT, Copy(at(1, 0, "in"), IN, 4), Signal(G)],
        [Copy(OUT_1, at(1, 0, "in"), 4), Take(G, 0)],
        outputs=[(OUT, 4, IN), (OUT_1, 4, at(1, 0, "in")), (at(1, 0, "in"), 4, IN)],
    ),
    wrong("overlap", r"reads and writes rank0.in\[0x2:0x4\]", [Copy(IN + 2, IN, 4)]),
    wrong("overlap in part", r"reads and writes rank0.in\[0x2:0x4\]", [total(IN + 2, IN + 8, IN)]),
    wrong("overlap in part in place", r"reads and writes rank0.in\[0x2:0x4\]", [total(IN, IN, IN + 8, IN + 2)]),
    wrong("overlap of rows", r"reads and writes rank0.in\[0x8:0xc\]", [Copy2D(IN + 4, IN, 4, 2, 4, 8)]),
    wrong("before the buffer", "rank 0 step 0 .* uses offset -1 of 'm'", [Copy(M + -1, IN, 4)]),
    wrong(
        "wrong bytes",
        r"rank 0 step 0 .* last to write an output: rank0.out\[0x0:0x4\] holds rank0.in\[0x1\], not rank0.in\[0x0\];",
        [Copy(OUT, IN + 1, 4)],
        outputs=[(OUT, 4, IN)],
    ),
    wrong(
        "no bytes",
        r"rank0.out\[0x2:0x4\] holds nothing defined, .*: no step writes",
        [Copy(OUT, IN, 2)],
        outputs=[(OUT, 4, IN)],
    ),
    wrong(
        "lacks a part",
        r"holds rank0.in\[0x0\], not rank0.in\[0x0\] \+ rank0.in\[0x4\]",
        [TO_OUT],
        outputs=[(OUT, 4, (IN, IN + 4))],
    ),
    wrong(
        "adds a part twice",
        r"rank 0 step 0 .* holds rank0.in\[0x0\] \+ rank0.in\[0x4\] \+ rank0.in\[0x4\], not",
        [total(OUT, IN, IN + 4, IN + 4)],
        outputs=[(OUT, 4, {IN, IN + 4})],
    ),
    wrong("written twice", "rank 0 step 1 .* again after rank 0 step 0", [TO_OUT, TO_OUT], outputs=[(OUT, 4, IN)]),
    wrong(
        "reduced after a copy",
        "rank 0 step 1 .* again after rank 0 step 0",
        [TO_OUT, total(OUT, OUT, IN + 4)],
        outputs=[(OUT, 4, {IN, IN + 4})],
    ),
    wrong(
        "reduced twice",
        "rank 0 step 1 .* again after rank 0 step 0",
        [total(OUT, IN, IN + 4), total(OUT, OUT, IN + 8)],
        outputs=[(OUT, 4, {IN, IN + 4, IN + 8})],
    ),
    wrong(
        "reduced past the end",
        r"writes rank0.out\[0x4:0x5\], which nobody reads",
        [Reduce(OUT, (IN, IN + 8), 5, "uint8", "sum")],
        outputs=[(OUT, 4, {IN, IN + 8})],
    ),
    wrong(
        "in place, written",
        "step 1 .* is right from the start",
        [Copy(M, IN, 4), Copy(IN, M, 4)],
        outputs=[(IN, 4, IN)],
    ),
    wrong(
        "staged twice",
        "step 1 .* nobody has read since rank 0 step 0",
        [Copy(M, IN, 4), Copy(M, IN, 4), Copy(OUT, M, 4)],
    ),
    wrong(
        "past the end", r"writes rank0.out\[0x4:0x5\], which nobody reads", [Copy(OUT, IN, 5)], outputs=[(OUT, 4, IN)]
    ),
    wrong(
        "misaligned", "rank 0 step 0 .* misaligned flag; its offset is a multiple of 4", [Signal(F + 2), Take(F + 2, 0)]
    ),
    wrong("misaligned 8", "rank 0 step 0 .* misaligned flag; its offset is a multiple of 8", [Add(F + 4, 1, 8)]),
    wrong(
        "flags overlap",
        "rank 0 step 1 .* has a flag that overlaps that of rank 0 step 0",
        [Add(F, 1, 8), Add(F + 4, 1)],
    ),
    wrong(
        "data over a flag",
        r"step 0 .* moves rank0.flags\[0x0:0x4\], the flag of rank 0 step 1",
        [Copy(F, IN, 8), Add(F, 1)],
    ),
    wrong("wraps", "rank 0 step 1 .* can bring its counter to 4294967296", [Add(F, 2**32 - 1), Add(F, 1)]),
]


@pytest.mark.parametrize(("programs", "spec", "message"), MISTAKES)
def test_a_mistake_is_named(programs, spec, message):
    with pytest.raises(ProgramError, match=re.compile(message, re.DOTALL)):
        verify(programs, inputs=INPUTS, **spec)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"programs\[0\] is of rank 0 of 2, and there are 1", {"programs": [Program(0, 2, ())]}),
        ("offset -4 of 'in'", {"programs": programs_of([]), "inputs": [(IN + -4, 4)]}),
        ("differ on rank0.out", {"programs": programs_of([TO_OUT]), "outputs": [(OUT, 4, IN), (OUT + 2, 4, IN)]}),
        ("starts at -1; it holds 0..", {"programs": programs_of([Signal(F)]), "flags": {F: -1}}),
    ],
)
def test_arguments_that_make_no_sense_are_named(message, arguments):
    with pytest.raises(ArgumentError, match=message):
        verify(**{"inputs": INPUTS, "outputs": [], **arguments})


RIGHT = {
    "nothing to do": ([[], []], []),
    "in place": ([[Copy(OUT + 4, IN, 4)]], [(IN, 4, IN), (OUT + 4, 4, IN)]),
    "sum": ([[total(OUT, IN, IN + 4, IN + 8)]], [(OUT, 4, {IN, IN + 4, IN + 8})]),
    "sum of sources that overlap": ([[total(OUT, IN, IN + 2)]], [(OUT, 4, {IN, IN + 2})]),
    "sum of a source twice": ([[total(OUT, IN, IN)]], [(OUT, 4, (IN, IN))]),
    "sum in place": ([[total(IN, IN, IN + 4)]], [(IN, 4, {IN, IN + 4})]),
    "sum in place of the last source": ([[total(IN, IN + 4, IN + 8, IN)]], [(IN, 4, {IN, IN + 4, IN + 8})]),
    "sum of sums": (
        [[total(M, IN, IN + 4), total(OUT, M, IN + 8)]],
        [(OUT, 4, {IN, IN + 4, IN + 8})],
    ),
    "sum in place, then copied": (
        [[total(IN, IN, IN + 4), Copy(OUT, IN, 4)]],
        [(OUT, 4, (IN, IN + 4)), (IN, 4, (IN, IN + 4))],
    ),
    "sum in place of scratch memory, then replaced": (
        [[Copy(M, IN, 4), total(M, M, IN + 4), Copy(OUT, M, 4), Copy(M, IN + 8, 4), Copy(OUT + 4, M, 4)]],
        [(OUT, 4, (IN, IN + 4)), (OUT + 4, 4, IN + 8)],
    ),
    "rows between rows": ([[Copy2D(OUT, IN, 2, 3, 3, 4)]], [(OUT + 3 * i, 2, IN + 4 * i) for i in range(3)]),
    "two lanes of one rank": (
        [[Copy(M, IN, 4), Signal(F), Take(F, 0, lane=1), Copy(OUT, M, 4, lane=1)]],
        [(OUT, 4, IN)],
    ),
    "a counter for each direction": (
        [
            [Copy(N, IN, 4), Add(G, 1), Wait(F, 1), Copy(N, IN + 4, 4), Add(G, 1)],
            [Wait(G, 1), Copy(OUT_1, N, 4), Add(F, 1), Wait(G, 2), Copy(OUT_1 + 4, N, 4)],
        ],
        [(OUT_1, 8, IN)],
    ),
    "a counter of two writers": (
        [[Copy(M, IN, 4), Add(flag(2), 2)], [Add(flag(2), 1)], [Wait(flag(2), 2), Copy(at(2, 0, "out"), M, 4)]],
        [(at(2, 0, "out"), 4, IN)],
    ),
    "an add that is needed because another wait orders the other add": (
        [
            [Copy(M, IN, 4), Add(flag(2), 1), Add(G, 1)],
            [Wait(G, 1), Add(flag(2), 1)],
            [Wait(flag(2), 1), Copy(at(2, 0, "out"), M, 4)],
        ],
        [(at(2, 0, "out"), 4, IN)],
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    steps_of_ranks, outputs = RIGHT[name]
    verify(programs_of(*steps_of_ranks), inputs=INPUTS, outputs=outputs)


def test_pieces_that_become_too_small_are_an_error_and_not_a_hang():
    programs = programs_of(
        [Copy(M, IN, 2**20), Copy(OUT, M, 2**20), Copy(OUT + 2**20, IN, 2**20), Copy(M + 1, OUT, 2**20)]
    )
    with pytest.raises(ArgumentError, match="smaller pieces .* use sizes of a few KiB"):
        verify(programs, inputs=[(IN, 2**20)], outputs=[])


def run_sampled(programs, spec, seed):
    """Return the messages of the sampled schedules that fail, without the proof."""
    group, messages = ProgramGroup(programs, spec.get("flags") or {}), []
    group.place(INPUTS, spec["outputs"])
    for name, fifos, pick in _sampled(group, seed, 8):
        try:
            _run(group, name, fifos, pick)
        except ProgramError as error:
            messages.append(str(error))
    return messages


def test_sampled_schedules_find_mistakes_on_their_own_and_again():
    by_name = {param.id: param.values for param in MISTAKES}
    for name in ("read without a flag", "signal before its copy", "lanes of one rank", "overwritten while it is read"):
        programs, spec, _ = by_name[name]
        messages = run_sampled(programs, spec, seed=5)
        assert messages and all(re.search(r"schedule=\S+-\d+ seed=5\]", message) for message in messages), name
        assert messages == run_sampled(programs, spec, seed=5)
    programs, spec, _ = by_name["ends with two lanes, but not as one FIFO"]
    messages = run_sampled(programs, spec, seed=5)
    assert messages and all(re.match(r"deadlock: .*schedule=merged-", message) for message in messages)


# Mutations: one change to one step of a correct collective, for every step of every rank.


def mutations(step, world):
    """Yield (what was done, the steps that replace `step`); each is a mistake."""

    def changed(**fields):
        return (dataclasses.replace(step, **fields),)

    def of_another_rank(ref, shift=1):
        return Ref((ref.rank + shift) % world, ref.buffer, ref.offset)

    yield "removed", ()
    yield "doubled", (step, step)
    for name in ("dst", "src", "flag"):
        if ref := getattr(step, name, None):
            yield f"{name} one byte on", changed(**{name: ref + 1})
            yield f"{name} four bytes on", changed(**{name: ref + 4})
            for shift in range(1, world if name == "flag" else 2):
                yield f"{name} of another rank", changed(**{name: of_another_rank(ref, shift)})
    if isinstance(step, Reduce):
        for n, ref in enumerate(step.sources):
            before, after = step.sources[:n], step.sources[n + 1 :]
            if len(step.sources) > 2:
                yield f"without source {n}", changed(sources=before + after)
            else:
                yield f"without source {n}", (Copy(step.dst, *before, *after, step.nbytes, step.lane),)
            yield f"source {n} twice", changed(sources=(*step.sources, ref))
            yield f"source {n} one byte on", changed(sources=(*before, ref + 1, *after))
            yield f"source {n} four bytes on", changed(sources=(*before, ref + 4, *after))
            yield f"source {n} of another rank", changed(sources=(*before, of_another_rank(ref), *after))
    if isinstance(step, Copy | Pull | Reduce):
        yield "a byte longer", changed(nbytes=step.nbytes + 1)
        yield "a byte shorter", changed(nbytes=step.nbytes - 1)
    else:
        yield "another tag", changed(tag=step.tag + 1)
    if isinstance(step, Take):
        yield "another writer", changed(writer=(step.writer + 1) % world)


def reorderings(steps, i, in_step):
    """Yield (start, stop, the steps that replace steps[start:stop], why it is harmless or None if it is a mistake), for
    each way in which steps[i], a flag step, and a neighbour that moves bytes change places.
    """

    def moves(j):
        return 0 <= j < len(steps) and isinstance(steps[j], Copy | Reduce)

    flag, is_credit = steps[i], isinstance(steps[i], Signal | Take) and steps[i].flag.buffer == "free"
    if isinstance(flag, Take):
        if moves(i - 1):
            why = "the take comes earlier, and past no signal: this rank waits longer, and nobody waits for it"
            yield i - 1, i + 1, (flag, steps[i - 1]), why
        j = next((j for j in range(i, len(steps)) if not isinstance(steps[j], Take)), i)
        if moves(j):
            is_first = all(step.dst != steps[j].dst for step in steps[:i] if isinstance(step, Copy | Reduce))
            why = "the slot is filled before its credit is taken, but nobody has read it yet, or see in_step"
            yield i, j + 1, (*steps[i + 1 : j + 1], flag), why if is_credit and (in_step or is_first) else None
    if isinstance(flag, Signal):
        if moves(i + 1):
            why = "the signal comes later: its reader waits longer, and finds more done"
            yield i, i + 2, (steps[i + 1], flag), why
        j = next((j for j in range(i, -1, -1) if not isinstance(steps[j], Signal)), i)
        if moves(j):
            read = set(steps[j].refs()[1:])
            is_last = not any(read & set(step.refs()[1:]) for step in steps[i + 1 :])
            why = "the slot is given back before it is read, but nobody fills it again, or see in_step"
            yield j, i + 1, (flag, *steps[j:i]), why if is_credit and (in_step or is_last) else None


# name: ((programs, spec), in_step). In step, on one lane, slots are safe without credits: before a rank fills a slot it
# took `ready` for the other slot from each peer, which the peer signalled after it had read the first one. Credits are
# needed where ranks pull on another lane, or where operations of other kinds come between.
MUTATED = {
    "all_gather of 2 in step": (pull_all_gather(2), True),
    "all_gather of 2": (pull_all_gather(2, lanes=2), False),
    "all_gather of 3": (pull_all_gather(3, chunks=2, lanes=2), False),
    "all_gather of 4": (pull_all_gather(4, chunks=3, ops=1, lanes=2), False),
    "reduce_scatter of 2 in step": (ring_reduce_scatter(2, ops=5), True),
    "reduce_scatter of 3": (ring_reduce_scatter(3), False),
    "reduce_scatter of 4": (ring_reduce_scatter(4, ops=2), False),
}


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutation_of_every_step_is_found(name):
    (programs, spec), in_step = MUTATED[name]
    for rank, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            changes = [(what, i, i + 1, steps, None) for what, steps in mutations(step, program.world)]
            changes += [("moved", *change) for change in reorderings(program.steps, i, in_step)]
            for what, start, stop, replacement, reason in changes:
                steps = program.steps[:start] + replacement + program.steps[stop:]
                mutant = [*programs[:rank], Program(rank, program.world, steps), *programs[rank + 1 :]]
                found = None
                try:
                    verify(mutant, **spec, schedules=0)
                except ProgramError as error:
                    found = error
                assert bool(found) != bool(reason), f"rank {rank} step {i} `{step}` {what}: {reason}, {found}"


@pytest.mark.parametrize("name", MUTATED)
def test_every_credit_matters(name):
    (programs, spec), _ = MUTATED[name]
    for ref in spec["flags"]:
        for credit in (0, 2):
            with pytest.raises(ProgramError):
                verify(programs, **{**spec, "flags": {**spec["flags"], ref: credit}}, schedules=0)


# What passes survives every timing tried: a simulator that moves single bytes, and shares no code with the proof.


def simulate(programs, spec, rng):
    """Run the programs once in a random order; return what goes wrong, or None."""
    memory = {ref + i: [ref + i] for ref, nbytes in spec["inputs"] for i in range(nbytes)}
    flags = dict(spec["flags"] or {})
    trouble = []

    def lane(steps):
        """Do the steps; yield after each part of one whether it was done."""
        for step in steps:
            if isinstance(step, Take):
                while flags.get(step.flag, 0) != step.tag:
                    yield False
                flags[step.flag] = 0
            elif isinstance(step, Signal):
                trouble.extend([f"{step} finds it full"] if flags.get(step.flag) else [])
                flags[step.flag] = step.tag
            else:
                for i in rng.sample(range(step.nbytes), step.nbytes):
                    value = []
                    for src in step.refs()[1:]:
                        value += memory.get(src + i, ["?"])
                        yield True
                    memory[step.dst + i] = value
                    yield True
            yield True

    running = [
        lane([step for step in program.steps if step.lane == number])
        for program in programs
        for number in {step.lane for step in program.steps}
    ]
    blocked = []
    while running:
        current = running.pop(rng.randrange(len(running)))
        for done in current:
            if not done:
                blocked.append(current)
                break
            running, blocked = running + blocked, []
            if rng.random() < 0.3:  # else it goes on
                running.append(current)
                break
    if blocked:
        return "deadlock"
    for dst, nbytes, sources in spec["outputs"]:
        for i in range(nbytes):
            expected = [source + i for source in ([sources] if isinstance(sources, Ref) else sources)]
            if sorted(map(str, memory.get(dst + i, ["?"]))) != sorted(map(str, expected)):
                return f"{dst + i} holds {memory.get(dst + i)}"
    return trouble[0] if trouble else None


EDITS = {
    "swap": lambda steps, i: [*steps[:i], *steps[i : i + 2][::-1], *steps[i + 2 :]],
    "move back": lambda steps, i: [*steps[: max(0, i - 5)], steps[i], *steps[max(0, i - 5) : i], *steps[i + 1 :]],
    "other lane": lambda steps, i: [*steps[:i], dataclasses.replace(steps[i], lane=1 - steps[i].lane), *steps[i + 1 :]],
    "drop": lambda steps, i: [*steps[:i], *steps[i + 1 :]],
}
COLLECTIVES = [
    pull_all_gather(2, chunks=3, ops=1),
    pull_all_gather(2, chunks=3, ops=1, ahead=1),
    pull_all_gather(3, chunks=2, ops=2, lanes=2),
    ring_reduce_scatter(2, ops=4),
    ring_reduce_scatter(3, ops=2),
]


@given(
    st.sampled_from(COLLECTIVES),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 99), st.sampled_from(sorted(EDITS))), max_size=3),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_edited_programs_that_pass_survive_any_timing(collective, edits, seed):
    programs, spec = list(collective[0]), collective[1]
    for rank, i, edit in edits:
        rank %= len(programs)
        steps = EDITS[edit](programs[rank].steps, i % len(programs[rank]))
        programs[rank] = Program(rank, len(programs), tuple(steps))
    try:
        verify(programs, **spec, schedules=0)
    except ProgramError:
        return
    rng = random.Random(seed)
    for _ in range(5):
        assert simulate(programs, spec, rng) is None


@pytest.mark.parametrize("name", ["read without a flag", "signal before its copy", "overwritten while it is read"])
def test_the_simulator_finds_races(name):
    programs, spec, _ = next(param.values for param in MISTAKES if param.id == name)
    found = {simulate(programs, {"inputs": INPUTS, **spec}, random.Random(seed)) for seed in range(50)}
    assert found - {None}
