"""Programs that reduce: proven for every world size and shape, mutated, run on real memory, and their bytes counted."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_verify import mutations, simulate

from iris_pg.collectives.all_reduce import one_shot, two_phases
from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.copy_engine.rounds import in_rounds
from iris_pg.errors import ProgramError
from iris_pg.flags import CREDIT, LINE, SLOTS, ControlPage
from iris_pg.program import Copy, Program, Reduce, Ref, Signal, Take
from iris_pg.verify import verify

PAIR, CHUNK = LINE, 2 * LINE  # bytes of the slots in these tests; tensors of a few hundred bytes take many chunks
WORLDS = range(1, 9)

# Operations in a row. Each is a function of (setting, its number) and returns the program of that rank, what it reads
# and what it must write; its tensors are called in<number> and out<number>.


def all_reduce(nbytes, in_place=False, dtype="float32", op="sum"):
    def operation(s, number):
        here = Ref(s.rank, f"in{number}", 0)
        result = here if in_place else Ref(s.rank, f"out{number}", 0)
        operands = (Part(s.rank, nbytes, here),) if nbytes else ()
        fold = Fold("all_reduce", op, dtype, operands, result, to_all=True)
        everyone = tuple(Ref(p, f"in{number}", 0) for p in range(s.world))
        return build(s, fold), [(here, nbytes)], [(result, nbytes, everyone)]

    return operation


def reduce_scatter(sizes, in_place=False, dtype="float32", op="sum"):
    """`sizes`: bytes of the result of each rank, in turn."""

    def operation(s, number):
        each = [sizes[p % len(sizes)] for p in range(s.world)]
        starts = [sum(each[:p]) for p in range(s.world)]
        here = Ref(s.rank, f"in{number}", 0)
        operands = tuple(Part(p, each[p], here + starts[p]) for p in range(s.world) if each[p])
        own = here + starts[s.rank]
        result = None if not each[s.rank] else own if in_place else Ref(s.rank, f"out{number}", 0)
        fold = Fold("reduce_scatter", op, dtype, operands, result)
        everyone = tuple(Ref(p, f"in{number}", starts[s.rank]) for p in range(s.world))
        return build(s, fold), [(here, sum(each))], [(result, each[s.rank], everyone)] if result else []

    return operation


def reduce(nbytes, root=0, in_place=True, dtype="float32", op="sum"):
    def operation(s, number):
        here, to = Ref(s.rank, f"in{number}", 0), root % s.world
        result = None if s.rank != to else here if in_place else Ref(s.rank, f"out{number}", 0)
        operands = (Part(to, nbytes, here),) if nbytes else ()
        fold = Fold("reduce", op, dtype, operands, result)
        everyone = tuple(Ref(p, f"in{number}", 0) for p in range(s.world))
        return build(s, fold), [(here, nbytes)], [(result, nbytes, everyone)] if result else []

    return operation


def all_gather(nbytes):
    def operation(s, number):
        here, into = Ref(s.rank, f"in{number}", 0), Ref(s.rank, f"out{number}", 0)
        sends = tuple(Part(p, nbytes, here) for p in s.peers)
        receives = tuple(Part(p, nbytes, into + p * nbytes) for p in s.peers)
        flow = Flow("all_gather", sends, receives, Copy(into + s.rank * nbytes, here, nbytes), to_all=True)
        outputs = [(into + p * nbytes, nbytes, Ref(p, f"in{number}", 0)) for p in range(s.world)]
        return build(s, flow), [(here, nbytes)], outputs

    return operation


def all_to_all(nbytes):
    def operation(s, number):
        here, into = Ref(s.rank, f"in{number}", 0), Ref(s.rank, f"out{number}", 0)
        sends = tuple(Part(p, nbytes, here + p * nbytes) for p in s.peers)
        receives = tuple(Part(p, nbytes, into + p * nbytes) for p in s.peers)
        own = Copy(into + s.rank * nbytes, here + s.rank * nbytes, nbytes)
        outputs = [(into + p * nbytes, nbytes, Ref(p, f"in{number}", 0) + s.rank * nbytes) for p in range(s.world)]
        return build(s, Flow("all_to_all", sends, receives, own)), [(here, s.world * nbytes)], outputs

    return operation


def meet(round_):
    return lambda s, number: (barrier(s, round_), [], [])


def joined(rank):
    """Return the steps by which the lanes of a rank wait for each other, as engines make them do between operations."""
    here, there = (Ref(rank, "joins", 64 * lane) for lane in (0, 1))
    steps = Signal(here, 1, 0), Take(here, rank, 1, 1), Signal(there, 1, 1), Take(there, rank, 1, 0)
    return Program(rank, rank + 1, steps)


def in_one_lane(program):
    return replace(program, steps=tuple(replace(step, lane=0) for step in program.steps))


def in_a_row(world, *operations, first=0, pushes=False, rounds=()):
    """Return the programs of all ranks that do the operations, and the other arguments of verify. `first` is the slot
    with which the first operation begins; from one to the next they alternate. Ranks in `rounds` have one lane.
    """
    page = ControlPage(world)
    programs, spec = [], {"inputs": [], "outputs": [], "flags": {}}
    for rank in range(world):
        program = Program(rank, world, ())
        for number, operation in enumerate(operations):
            times = 8 if pushes and first else 1  # as large, pieces get smaller at the end
            how = dict(pushes=pushes, tapered_from=2 * PAIR if times > 1 else 0, taper=(3, 2, 1))
            sizes = times * CHUNK, times * PAIR
            s = Setting(rank, world, page, 100 + number, *sizes, (first + number) % SLOTS, **how)
            part, inputs, outputs = operation(s, number)
            program = program.then(in_one_lane(in_rounds(part)) if rank in rounds else part)
            if pushes and rank not in rounds:
                program = program.then(replace(joined(rank), world=world))
            spec["inputs"] += inputs
            spec["outputs"] += outputs
        programs.append(program)
        spec["flags"] |= {Ref(rank, "flags", offset): value for offset, value in page.initial().items()}
    return programs, spec


# Proven: alone, in rows, and in random rows.

SIZES = (4, CHUNK - 4, CHUNK, CHUNK + 4, 5 * CHUNK, 17 * CHUNK + 12)


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("world", WORLDS)
def test_every_reduction_is_right(world, in_place):
    operations = [all_reduce(n, in_place) for n in SIZES]
    operations += [reduce(n, root, in_place) for n in SIZES[::2] for root in {0, world - 1}]
    for sizes in [(4,), (PAIR,), (3 * PAIR + 4,), (PAIR - 4, 0, 2 * PAIR), (0, 8), (6 * PAIR, 4, 4)]:
        operations.append(reduce_scatter(sizes, in_place))
    for number, operation in enumerate(operations):
        for pushes in (False, True):
            for first in range(SLOTS) if world < 5 else [(number + pushes) % SLOTS]:
                programs, spec = in_a_row(world, operation, first=first, pushes=pushes)
                verify(programs, **spec, schedules=1)
                if pushes:
                    some = range(number % 2, world, 1 + number % 2)  # all of them, or every other one
                    programs, spec = in_a_row(world, operation, first=first, pushes=True, rounds=some)
                    verify(programs, **spec, schedules=0)


@pytest.mark.parametrize("operation", [all_reduce(0), reduce_scatter((0,)), reduce(0)])
def test_nothing_to_reduce_is_no_step(operation):
    programs, _ = in_a_row(3, operation)
    assert not any(programs)


@pytest.mark.parametrize("first", range(SLOTS))
@pytest.mark.parametrize("world", WORLDS)
def test_operations_in_a_row_are_right(world, first):
    row = [
        all_reduce(CHUNK),
        all_reduce(3 * CHUNK, in_place=True),
        all_gather(CHUNK + 4),
        reduce_scatter((2 * PAIR + 4,)),
        all_reduce(8, in_place=True),
        meet(0),
        all_to_all(PAIR + 8),
        reduce(3 * PAIR, root=1),
        reduce(PAIR, root=0),
        reduce_scatter((PAIR, 0), in_place=True),
        meet(1),
        all_reduce(world * 3 * PAIR - 4),
        all_gather(4),
        meet(0),
    ]
    for pushes, rounds in ((False, ()), (True, ()), (True, range(world)), (True, range(0, world, 2))):
        programs, spec = in_a_row(world, *row, first=first, pushes=pushes, rounds=rounds)
        verify(programs, **spec, schedules=0 if rounds else 2)


OPERATIONS = st.one_of(
    st.builds(all_reduce, st.integers(0, 300).map(lambda n: 4 * n), st.booleans()),
    st.builds(reduce_scatter, st.lists(st.integers(0, 80).map(lambda n: 4 * n), min_size=1, max_size=3), st.booleans()),
    st.builds(reduce, st.integers(0, 80).map(lambda n: 4 * n), st.integers(0, 7), st.booleans()),
    st.builds(all_gather, st.integers(1, 300)),
    st.builds(all_to_all, st.integers(1, 200)),
)


@given(
    st.integers(1, 6),
    st.lists(OPERATIONS, min_size=1, max_size=5),
    st.integers(0, SLOTS - 1),
    st.integers(),
    st.booleans(),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_random_operations_in_a_row_are_right(world, row, first, seed, pushes):
    programs, spec = in_a_row(world, *row, first=first, pushes=pushes)
    verify(programs, **spec, seed=seed, schedules=1)


@pytest.mark.parametrize("nbytes", [CHUNK, 5 * CHUNK + 4])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_user_may_write_the_tensor_again_when_its_operation_has_ended(world, nbytes):
    """In place, three times on one tensor, which the user fills before and copies elsewhere after."""
    page, programs = ControlPage(world), []
    for rank in range(world):
        tensor, steps = Ref(rank, "tensor", 0), []
        for k in range(3):
            s = Setting(rank, world, page, 100 + k, CHUNK, PAIR, k % SLOTS)
            fold = Fold("all_reduce", "sum", "float32", (Part(rank, nbytes, tensor),), tensor, to_all=True)
            steps += [Copy(tensor, Ref(rank, f"fresh{k}", 0), nbytes), *build(s, fold).steps]
            steps += [Copy(Ref(rank, f"kept{k}", 0), tensor, nbytes)]
        programs.append(Program(rank, world, tuple(steps)))
    ranks, times = range(world), range(3)
    verify(
        programs,
        inputs=[(Ref(rank, f"fresh{k}", 0), nbytes) for rank in ranks for k in times],
        outputs=[
            (Ref(rank, f"kept{k}", 0), nbytes, [Ref(p, f"fresh{k}", 0) for p in ranks]) for rank in ranks for k in times
        ],
        flags={Ref(rank, "flags", offset): value for rank in ranks for offset, value in page.initial().items()},
        schedules=2,
    )


# What a program may touch, in which order it adds, and how many bytes that takes.


@pytest.mark.parametrize("world", WORLDS)
def test_slots_are_not_overrun_and_sources_come_in_the_order_of_ranks(world):
    row = [all_reduce(n, place) for n in SIZES for place in (False, True)] + [
        reduce_scatter((5 * PAIR + 8,)),
        reduce(999),
    ]
    sizes = {"staging": CHUNK, "pairs": PAIR}
    for program in in_a_row(world, *row)[0]:
        for step in program.steps:
            if isinstance(step, Copy | Reduce):
                assert not isinstance(step, Reduce) or [ref.rank for ref in step.sources] == list(range(world))
                for ref in step.refs():
                    if size := sizes.get(ref.buffer):
                        assert ref.offset // size == (ref.offset + step.nbytes - 1) // size, step
                        assert ref.offset < SLOTS * size * (world - 1 if ref.buffer == "pairs" else 1), step


@pytest.mark.parametrize("itemsize", [1, 2, 8, 16])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_elements_are_whole(world, itemsize):
    row = [all_reduce(itemsize * n, place) for n in (1, 100, 1001) for place in (False, True)]
    row += [reduce_scatter((itemsize * 99, itemsize)), reduce(itemsize * 1001)]
    for program in in_a_row(world, *row)[0]:
        for step in program.steps:
            if isinstance(step, Copy | Reduce):
                assert not step.nbytes % itemsize and not any(ref.offset % itemsize for ref in step.refs()), step


def bytes_of(program):
    """Return the bytes that a rank writes, and those that it reads from others."""
    read = 0
    for step in program.steps:
        if isinstance(step, Copy | Reduce):
            read += sum(step.nbytes for ref in step.refs()[1:] if ref.rank != program.rank)
    return program.nbytes_moved(), read


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("in_place", [False, True])
def test_bytes_are_as_documented(world, in_place):
    n = 4 * world * PAIR
    for program in in_a_row(world, all_reduce(n, in_place))[0]:
        assert bytes_of(program) == (2 * n, 2 * (world - 1) * n // world)
    for program in in_a_row(world, all_reduce(CHUNK, in_place))[0]:
        assert bytes_of(program) == (2 * CHUNK, (world - 1) * CHUNK)
    for program in in_a_row(world, reduce_scatter((n,), in_place))[0]:
        assert bytes_of(program) == (world * n, (world - 1) * n)
    root, *others = in_a_row(world, reduce(n, 0, in_place))[0]
    assert bytes_of(root) == (n, (world - 1) * n)
    assert {bytes_of(program) for program in others} == {(n, 0)}


def test_many_ranks_take_two_phases_sooner():
    """What one shot reads grows with the world: with 8 ranks it stops at half a slot."""
    page, n = ControlPage(8), 1 << 17
    s = Setting(0, 8, page, chunk_bytes=1 << 18, pair_bytes=1 << 16)
    here = Ref(0, "in", 0)
    for nbytes, makes in ((n, one_shot), (n + 4, two_phases)):
        fold = Fold("all_reduce", "sum", "float32", (Part(0, nbytes, here),), here, to_all=True)
        assert build(s, fold) == makes(s, fold)


@pytest.mark.parametrize("in_place", [False, True])
def test_one_rank_copies_or_does_nothing(in_place):
    for operation in (all_reduce(900, in_place), reduce_scatter((900,), in_place), reduce(900, 0, in_place)):
        ((program,), _) = in_a_row(1, operation)
        assert [type(step) for step in program.steps] == ([] if in_place else [Copy])


# Mutations: one change to one step.

MUTATED = {
    "one shot of 2": in_a_row(2, all_reduce(CHUNK), all_reduce(CHUNK, in_place=True), all_reduce(4)),
    "one shot of 3": in_a_row(3, all_reduce(CHUNK, in_place=True), all_reduce(CHUNK)),
    "two phases of 2": in_a_row(2, all_reduce(5 * CHUNK + 4)),
    "two phases of 2 in place": in_a_row(2, all_reduce(5 * CHUNK, in_place=True)),
    "two phases of 3 in place": in_a_row(3, all_reduce(2 * CHUNK, in_place=True), all_reduce(2 * CHUNK)),
    "reduce_scatter of 2": in_a_row(2, reduce_scatter((3 * PAIR,))),
    "reduce_scatter of 3 in place": in_a_row(3, reduce_scatter((3 * PAIR, 4, PAIR + 4), in_place=True)),
    "reduce of 3": in_a_row(3, reduce(3 * PAIR, root=1)),
    "a row of 2": in_a_row(2, all_reduce(8), all_gather(8), reduce_scatter((8,)), all_to_all(8), all_reduce(4 * CHUNK)),
}


@pytest.mark.parametrize("name", MUTATED)
def test_every_mutation_of_every_step_is_found(name):
    programs, spec = MUTATED[name]
    for rank, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            for what, replacement in mutations(step, program.world):
                steps = program.steps[:i] + replacement + program.steps[i + 1 :]
                mutant = [*programs[:rank], Program(rank, program.world, steps), *programs[rank + 1 :]]
                try:
                    verify(mutant, **spec, schedules=0)
                except ProgramError:
                    continue
                pytest.fail(f"rank {rank} step {i} `{step}` {what}: not found")


@pytest.mark.parametrize("name", MUTATED)
def test_every_credit_matters(name):
    programs, spec = MUTATED[name]
    taken = {step.flag for program in programs for step in program.steps if isinstance(step, Take)}
    credits_ = [flag for flag, value in spec["flags"].items() if flag in taken]
    assert credits_
    for flag in credits_:
        for credit in (0, 2):
            with pytest.raises(ProgramError):
                verify(programs, **{**spec, "flags": {**spec["flags"], flag: credit}}, schedules=0)


def reordered(steps, i):
    """Return the steps with flag step i and what it guards (the move before a run of signals, or after one of takes) in
    the wrong order; None where it guards nothing.
    """
    kind, step = type(steps[i]), -1 if isinstance(steps[i], Signal) else 1
    j = i
    while 0 <= j < len(steps) and isinstance(steps[j], kind):
        j += step
    if not 0 <= j < len(steps) or not isinstance(steps[j], Copy | Reduce):
        return None
    if kind is Signal:
        return (*steps[:j], steps[i], *steps[j:i], *steps[i + 1 :])
    return (*steps[:i], *steps[i + 1 : j + 1], steps[i], *steps[j + 1 :])


def in_wrong_order(programs, spec):
    """Yield (rank, flag step, the group with that step in the wrong order, what verify says or None)."""
    for rank, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            if isinstance(step, Signal | Take) and (steps := reordered(program.steps, i)):
                group = [*programs[:rank], Program(rank, program.world, steps), *programs[rank + 1 :]]
                found = None
                try:
                    verify(group, **spec, schedules=0)
                except ProgramError as error:
                    found = error
                yield rank, step, group, found


@pytest.mark.parametrize(
    "operation",
    [all_reduce(CHUNK), all_reduce(CHUNK + 4), all_reduce(3 * PAIR, in_place=True), reduce_scatter((PAIR,)), reduce(4)],
)
def test_a_signal_before_its_copy_and_a_take_after_its_reader_are_found(operation):
    """One chunk of one operation: nothing else orders the two."""
    programs, spec = in_a_row(3, operation)
    data = [case for case in in_wrong_order(programs, spec) if case[1].tag != CREDIT]
    assert data and all(found for _, _, _, found in data)


@pytest.mark.parametrize("name", MUTATED)
def test_what_is_reordered_and_passes_survives_any_timing(name):
    """With many chunks, and several operations, some flags are implied by others; then a wrong order does no harm."""
    programs, spec = MUTATED[name]
    rng = random.Random(name)
    cases = list(in_wrong_order(programs, spec))
    passed = [(rank, step, group) for rank, step, group, found in cases if not found]
    assert 0 < len(passed) < len(cases)
    for rank, step, group in rng.sample(passed, min(len(passed), 12)):
        assert simulate(group, spec, rng) is None, f"rank {rank} `{step}`"


# On real memory.


def execute(programs, spec, memory, seed):
    """Run the programs step by step, ranks in a random order. `memory`: (rank, buffer) -> array of bytes."""
    rng, flags = random.Random(seed), dict(spec["flags"])
    heads, running = [0] * len(programs), list(range(len(programs)))

    def address(ref):
        return memory[ref.rank, ref.buffer].ctypes.data + ref.offset

    blocked = 0
    while running:
        rank = running[rng.randrange(len(running))]
        if heads[rank] == len(programs[rank]):
            running.remove(rank)
            continue
        step = programs[rank].steps[heads[rank]]
        if isinstance(step, Take) and flags.get(step.flag) != step.tag:
            blocked += 1
            assert blocked < 10_000, "deadlock"
            continue
        blocked = 0
        heads[rank] += 1
        if isinstance(step, Take | Signal):
            flags[step.flag] = step.tag if isinstance(step, Signal) else 0
        elif isinstance(step, Reduce):
            reduce_bytes(step.op, step.dtype, address(step.dst), [address(ref) for ref in step.sources], step.nbytes)
        else:
            source = memory[step.src.rank, step.src.buffer][step.src.offset :][: step.nbytes]
            memory[step.dst.rank, step.dst.buffer][step.dst.offset :][: step.nbytes] = source


def bytes_at(nbytes, shift):
    """Return memory of `nbytes` that begins `shift` bytes after a line."""
    memory = np.zeros(nbytes + 2 * LINE, np.uint8)
    return memory[-memory.ctypes.data % LINE + shift :][:nbytes]


ODD = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3.0, 65504.0)


def operand(rank, numel, dtype):
    """Values that depend on rank and position; some are infinite, NaN, or zeros with a sign."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        values = torch.randn(numel, generator=generator)
        odd = torch.tensor(ODD)[torch.randint(len(ODD), (numel,), generator=generator)]
        return torch.where(torch.rand(numel, generator=generator) < 0.2, odd, values).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


@pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int16"])
def test_all_ranks_get_the_same_bits_as_one_reduction_of_all_operands(name, op, in_place):
    dtype = getattr(torch, name)
    for world in (1, 2, 3, 5):
        for numel in (1, CHUNK // dtype.itemsize, (6 * CHUNK + 16) // dtype.itemsize):
            nbytes = numel * dtype.itemsize
            operands = [operand(rank, numel, dtype).view(torch.uint8).numpy() for rank in range(world)]
            expected = operands[0].copy()
            if world > 1:
                addresses = [x.ctypes.data for x in operands]
                reduce_bytes(op, name, expected.ctypes.data, addresses, nbytes)
            kinds = {
                "all_reduce": all_reduce(nbytes, in_place, name, op),
                "reduce": reduce(nbytes, world - 1, in_place, name, op),
                "reduce_scatter": reduce_scatter((nbytes,), in_place, name, op),
            }
            for kind, operation in kinds.items():
                programs, spec = in_a_row(world, operation)
                memory = {}
                for rank in range(world):
                    shift = rank * dtype.itemsize
                    copies = world if kind == "reduce_scatter" else 1
                    memory[rank, "in0"] = bytes_at(copies * nbytes, shift)
                    memory[rank, "in0"][:] = np.tile(operands[rank], copies)
                    memory[rank, "out0"] = bytes_at(nbytes, 2 * shift)
                    memory[rank, "staging"] = bytes_at(SLOTS * CHUNK, 0)
                    memory[rank, "pairs"] = bytes_at(SLOTS * world * PAIR, 0)
                execute(programs, spec, memory, seed=world)
                for ref, _, _ in spec["outputs"]:
                    got = memory[ref.rank, ref.buffer][ref.offset :][:nbytes]
                    assert (got == expected).all(), (kind, world, numel, ref)


def test_one_shot_reads_its_own_operand_from_its_slot():
    """So that all ranks reduce the same bytes, and the result in place is none of the sources."""
    s = Setting(1, 3, ControlPage(3), chunk_bytes=CHUNK, pair_bytes=PAIR)
    here = Ref(1, "in", 0)
    program = one_shot(s, Fold("all_reduce", "sum", "float32", (Part(1, 64, here),), here, to_all=True))
    (step,) = [step for step in program.steps if isinstance(step, Reduce)]
    assert step.sources == tuple(Ref(p, "staging", 0) for p in range(3))
