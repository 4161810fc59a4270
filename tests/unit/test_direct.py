"""Programs whose tensors are read directly: proven for every world size, in rows with staged ones, and mutated; and the
reading of another process's memory.

As in test_collectives.py the users write inputs before an operation, read outputs after it, and then write again.
"""

import ctypes
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.unit import test_collectives as staged
from tests.unit.test_collectives import CHUNK, PAIR, all_gather, broadcast, exchange, gather, prove, scatter
from tests.unit.test_verify import mutations

from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Fold, Part
from iris_pg.collectives.setting import Setting
from iris_pg.errors import ArgumentError, ProgramError
from iris_pg.flags import LINE, ControlPage
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import atomics
from iris_pg.program import Copy, Offer, Program, Pull, Ref, Signal, Take
from iris_pg.verify import verify

WORLDS = range(1, 9)
PIECE = 2 * LINE

# Moves ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_moves(world):
    for sizes in staged.shapes(world):
        if any(sizes):
            for in_place in (False, True):
                prove(all_gather(sizes, in_place), direct=1, schedules=2)
            for root in {0, world - 1}:
                prove(gather(root, sizes), direct=1, schedules=2)
                prove(scatter(root, sizes), direct=1, schedules=2)
    for root in range(world):
        prove(broadcast(world, root, 3 * CHUNK + 1), direct=1, schedules=2)
    prove(exchange(world, lambda source, target: (source * 11 + target * 7) % (3 * PAIR)), direct=1)


@pytest.mark.parametrize("seed", range(20))
def test_with_staged_and_zero_copy_ones_in_a_row(seed):
    """The limit lies among the sizes, so of one all_to_all some messages are staged and some are not."""
    rng = random.Random(seed)
    world = rng.randint(2, 5)

    def sizes():
        return [rng.choice([0, 1, PAIR, CHUNK, CHUNK + 1, 3 * CHUNK - 1]) for _ in range(world - 1)] + [3]

    def operation():
        table = [sizes() for _ in range(world)]
        return rng.choice(
            [
                lambda: all_gather(sizes(), rng.random() < 0.5, rng.random() < 0.3),
                lambda: broadcast(world, rng.randrange(world), rng.choice([1, 40]), rng.random() < 0.3),
                lambda: gather(rng.randrange(world), sizes()),
                lambda: scatter(rng.randrange(world), sizes()),
                lambda: exchange(world, lambda source, target: table[source][target]),
            ]
        )()

    prove(
        *(operation() for _ in range(8)), first=rng.randrange(2), schedules=2, direct=rng.choice([1, PAIR + 1, CHUNK])
    )


# Reductions -----------------------------------------------------------------------------------------------------------


def all_reduce(nbytes, in_place):
    def fold(rank, world):
        here = Ref(rank, "in", 0)
        result = here if in_place else Ref(rank, "out", 0)
        return Fold("all_reduce", "sum", "float32", (Part(rank, nbytes, here),), result, to_all=True), nbytes, 0

    return fold


def reduce_scatter(sizes, in_place):
    def fold(rank, world):
        each = [sizes[p % len(sizes)] for p in range(world)]
        at = sum(each[:rank])
        parts = tuple(Part(p, each[p], Ref(rank, "in", sum(each[:p]))) for p in range(world) if each[p])
        result = Ref(rank, "in", at) if in_place else Ref(rank, "out", 0)
        return Fold("reduce_scatter", "sum", "float32", parts, result if each[rank] else None), sum(each), at

    return fold


def reduce(nbytes, root, in_place):
    def fold(rank, world):
        here = Ref(rank, "in", 0)
        result = None if rank != root % world else here if in_place else Ref(rank, "out", 0)
        return Fold("reduce", "sum", "float32", (Part(root % world, nbytes, here),), result), nbytes, 0

    return fold


def in_a_row(world, *folds, direct=1):
    """Return programs and the other arguments of verify; every operation uses the same tensors."""
    page, programs = ControlPage(world), []
    spec = dict(inputs=[], outputs=[], flags={})
    for rank in range(world):
        steps = []
        for i, make in enumerate(folds):
            fold, nbytes, at = make(rank, world)
            s = Setting(rank, world, page, 100 + i, CHUNK * LINE, PAIR * LINE, i % 2, direct, PIECE)
            fresh = Ref(rank, f"fresh{i}", 0)
            steps.append(Copy(Ref(rank, "in", 0), fresh, nbytes))
            spec["inputs"].append((fresh, nbytes))
            steps += build(s, fold).steps
            if fold.result:
                mine = fold.operands[0] if fold.to_all else next(p for p in fold.operands if p.peer == rank)
                steps.append(Copy(Ref(rank, f"kept{i}", 0), fold.result, mine.nbytes))
                sources = [Ref(p, f"fresh{i}", at) for p in range(world)]
                spec["outputs"].append((Ref(rank, f"kept{i}", 0), mine.nbytes, sources))
        programs.append(Program(rank, world, tuple(steps)))
        spec["flags"] |= {Ref(rank, "flags", offset): value for offset, value in page.initial().items()}
    return programs, spec


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_reductions(world, in_place):
    """``verify`` has unread inputs of others in the way: what a root reads of them it reads whole."""
    row = [all_reduce(n, in_place) for n in (4, LINE, 5 * PIECE + 4, world * LINE - 4)]
    row += [reduce_scatter(sizes, in_place) for sizes in ((4,), (PIECE + 8, 0, 3 * PIECE), (5 * PIECE - 4,))]
    row += [reduce(n, root, in_place) for n in (8, 3 * PIECE + 4) for root in (0, world - 1)]
    for fold in row:
        programs, spec = in_a_row(world, fold, fold, fold)
        if world > 1 or not in_place:
            verify(programs, **spec, schedules=1)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_reductions_in_a_row_with_staged_ones(world):
    row = [all_reduce(n, place) for n in (LINE, 4 * PIECE, 2 * LINE) for place in (False, True)]
    row += [reduce_scatter((n,), place) for n in (LINE, 2 * PIECE) for place in (False, True)]
    for seed in range(4):
        random.Random(seed).shuffle(row)
        programs, spec = in_a_row(world, *row, direct=2 * LINE)
        verify(programs, **spec, schedules=1, seed=seed)


# Mistakes -------------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "all_gather": lambda: staged.group([all_gather([9, 5, 7])] * 2, direct=1),
    "broadcast": lambda: staged.group([broadcast(3, 1, 9)] * 2, direct=1),
    "exchange": lambda: staged.group([exchange(3, lambda a, b: 3 + a + 2 * b)] * 2, direct=1),
    "all_reduce": lambda: in_a_row(3, *[all_reduce(3 * LINE + 8, True)] * 2),
    "reduce_scatter": lambda: in_a_row(3, *[reduce_scatter((PIECE + 4,), False)] * 2),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_mistake_is_found(example):
    programs, spec = EXAMPLES[example]()
    verify(programs, **spec)
    world, count = len(programs), 0
    for rank, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            if isinstance(step, Copy) and ("fresh" in step.src.buffer or "kept" in step.dst.buffer):
                continue  # its user's
            for what, instead in mutations(step, world):
                steps = (*program.steps[:i], *instead, *program.steps[i + 1 :])
                try:
                    verify(
                        [*programs[:rank], replace(program, steps=steps), *programs[rank + 1 :]], **spec, schedules=0
                    )
                except (ProgramError, ArgumentError):
                    count += 1
                else:
                    pytest.fail(f"rank {rank} step {i} `{step}`, {what}: not found")
    assert count > 100


@pytest.mark.parametrize("example", EXAMPLES)
def test_reading_too_early_or_leaving_too_early_is_found(example):
    """A pull before its take; what ends the operation (the takes of `done`) after its user writes again."""
    programs, spec = EXAMPLES[example]()
    page, found = ControlPage(3), 0
    done = {page.done(p) for p in range(3)}
    for rank, program in enumerate(programs):
        for i, step in enumerate(program.steps):
            later = list(program.steps)
            if isinstance(step, Pull):
                take = max(k for k in range(i) if isinstance(later[k], Take) and later[k].flag == step.flag)
                later.insert(take, later.pop(i))
            elif isinstance(step, Take) and step.flag.offset in done and example != "all_reduce":
                write = next(
                    (k for k in range(i, len(later)) if isinstance(later[k], Copy) and "fresh" in later[k].src.buffer),
                    0,
                )
                if not write or later[write].dst.buffer != "in":
                    continue
                later.insert(write, later.pop(i))
            else:
                continue
            found += 1
            changed = [*programs[:rank], replace(program, steps=tuple(later)), *programs[rank + 1 :]]
            with pytest.raises(ProgramError):
                verify(changed, **spec, schedules=0)
    assert found >= 3


def test_a_pull_needs_an_offer():
    flag, there = Ref(1, "flags", 0), Ref(0, "in", 0)
    take, pull = Take(flag, 0, 5), Pull(Ref(1, "out", 0), flag, 0, 8)
    spec = dict(inputs=[(there, 8)], outputs=[(Ref(1, "out", 0), 8, there)])

    def check(first, second):
        verify([Program(0, 2, first), Program(1, 2, second)], **spec)

    check((Offer(flag, 5, src=there),), (take, pull))
    for first, second in (
        ((Signal(flag, 5),), (take, pull)),
        ((Offer(flag, 5, src=there),), (pull, take)),
        ((Offer(flag, 5, src=there),), (take, replace(pull, lane=1))),
        ((Offer(flag, 5, src=there),), (take, replace(pull, writer=1))),
        ((Offer(flag, 5, src=Ref(1, "in", 0)),), (take, pull)),
        ((Offer(flag, 5, src=there + 4),), (take, pull)),
        ((Offer(flag, 5, src=there),), (take, replace(pull, offset=1))),
    ):
        with pytest.raises(ProgramError):
            check(first, second)
    for fields in (dict(nbytes=0), dict(offset=-1), dict(lane=-1)):
        with pytest.raises(ArgumentError):
            replace(pull, **fields)
    assert str(pull) == "pull rank1.out[0x0:0x8] <- [0x0:0x8] of rank 0's offer at rank1.flags[0x0]"
    assert str(Offer(flag, 5, src=there)) == "offer rank1.flags[0x0] = 5, rank0.in[0x0]"


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_the_lower_bound(world):
    """What the user's steps move is not counted."""
    n = 4 * world * LINE

    def pulled(program):
        return sum(step.nbytes for step in program.steps if isinstance(step, Pull))

    for program in staged.group([all_gather([n] * world)], direct=1)[0]:
        assert pulled(program) == (world - 1) * n
        assert not any("staging" in str(step) for step in program.steps)
    for program in in_a_row(world, all_reduce(n, True))[0]:
        assert pulled(program) == 2 * (world - 1) * n // world
    for program in in_a_row(world, reduce_scatter((n,), True))[0]:
        assert pulled(program) == (world - 1) * n


# Another process ------------------------------------------------------------------------------------------------------


def test_memory_of_another_process_is_read():
    code = """
import ctypes, sys
text = ctypes.create_string_buffer(bytes(range(256)) * 4000)
print(ctypes.addressof(text), flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        address = int(other.stdout.readline())
        into = bytearray(100_003)
        at = ctypes.addressof((ctypes.c_char * len(into)).from_buffer(into))
        assert atomics().read_process(other.pid, at, address + 5, len(into)) == len(into)
        assert into == (bytes(range(256)) * 4000)[5 : 5 + len(into)]
        assert atomics().read_process(other.pid, at, 4096, 8) < 0
        assert os.strerror(cpu.read_error(other.pid, 4096)) == "Bad address"
        assert cpu.read_error(other.pid, address) == 0
    finally:
        other.communicate(timeout=20)
    assert os.strerror(cpu.read_error(other.pid, address)) == "No such process"
