"""The programs of the collectives, proved: for every world size, root and shape, several in a row, whatever the timing.

Before each operation its user writes the inputs, and after it reads the outputs and is free to write again; both are
steps of the programs that are proved, so the proof covers that peers have stopped reading an input, and do not write an
output yet.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Part
from iris_pg.collectives.setting import Setting, chunks
from iris_pg.copy_engine.rounds import in_rounds
from iris_pg.errors import ProgramError
from iris_pg.flags import ControlPage
from iris_pg.program import Copy, Program, Ref, Signal, Take
from iris_pg.verify import verify

CHUNK, PAIR = 16, 8  # bytes of a slot that all read, and of one that one rank reads


@dataclass
class Operation:
    """One operation of a whole group: what every rank does, and what its user does before and after.

    Args:
        flows: of each rank.
        writes: rank -> where its user writes the input, and how many bytes.
        reads: rank -> what its user reads: (where, bytes, the rank whose input it is, where in that input).
    """

    flows: list[Flow]
    writes: dict[int, tuple[Ref, int]] = field(default_factory=dict)
    reads: dict[int, list[tuple[Ref, int, int, int]]] = field(default_factory=dict)


def peers(rank, world):
    return [(rank + k) % world for k in range(1, world)]


def all_gather(sizes, in_place=False, heap=False, pulls=False):
    world, out, starts = len(sizes), "heap" if heap else "out", [sum(sizes[:p]) for p in range(len(sizes))]
    made = Operation([])
    for rank, n in enumerate(sizes):
        place = Ref(rank, out, starts[rank])
        here = place if in_place else Ref(rank, "heap" if pulls else "in", 0)
        sends = [Part(p, n, here, Ref(p, "heap", starts[rank]) if heap else None) for p in peers(rank, world) if n]
        receives = [
            Part(p, sizes[p], Ref(rank, out, starts[p]), Ref(p, "heap", 0) if pulls else None)
            for p in peers(rank, world)
            if sizes[p]
        ]
        own = Copy(place, here, n) if n and not in_place else None
        how = dict(to_all=True, zero_copy=heap, pulls=pulls)
        made.flows.append(Flow("all_gather", tuple(sends), tuple(receives), own, **how))
        made.writes[rank] = here, n
        made.reads[rank] = [(Ref(rank, out, starts[p]), sizes[p], p, 0) for p in range(world)]
    return made


def broadcast(world, root, n, heap=False):
    made = Operation([])
    for rank in range(world):
        here = Ref(rank, "heap" if heap else "out", 0)
        sends = [
            Part(p, n, here, Ref(p, "heap", 0) if heap else None) for p in peers(rank, world) if rank == root and n
        ]
        receives = [Part(root, n, here)] if rank != root and n else []
        made.flows.append(Flow("broadcast", tuple(sends), tuple(receives), to_all=True, zero_copy=heap))
        made.reads[rank] = [(here, n, root, 0)]
    made.writes[root] = Ref(root, "heap" if heap else "out", 0), n
    return made


def gather(root, sizes):
    world, starts, made = len(sizes), [sum(sizes[:p]) for p in range(len(sizes))], Operation([])
    for rank, n in enumerate(sizes):
        here = Ref(rank, "in", 0)
        made.writes[rank] = here, n
        if rank != root:
            made.flows.append(Flow("gather", (Part(root, n, here),)))
            continue
        receives = [Part(p, sizes[p], Ref(rank, "out", starts[p])) for p in peers(rank, world)]
        own = Copy(Ref(rank, "out", starts[rank]), here, n) if n else None
        made.flows.append(Flow("gather", (), tuple(receives), own))
        made.reads[rank] = [(Ref(rank, "out", starts[p]), sizes[p], p, 0) for p in range(world)]
    return made


def scatter(root, sizes):
    world, starts, made = len(sizes), [sum(sizes[:p]) for p in range(len(sizes))], Operation([])
    for rank, n in enumerate(sizes):
        here = Ref(rank, "out", 0)
        if rank == root:
            sends = [Part(p, sizes[p], Ref(rank, "in", starts[p])) for p in peers(rank, world)]
            own = Copy(here, Ref(rank, "in", starts[rank]), n) if n else None
            made.flows.append(Flow("scatter", tuple(sends), (), own))
        else:
            made.flows.append(Flow("scatter", (), (Part(root, n, here),)))
        made.reads[rank] = [(here, n, root, starts[rank])]
    made.writes[root] = Ref(root, "in", 0), sum(sizes)
    return made


def exchange(world, size_of):
    """Every rank sends to every other: what all_to_all does."""
    made = Operation([])
    for rank in range(world):
        ins = [sum(size_of(rank, q) for q in range(p)) for p in range(world + 1)]
        outs = [sum(size_of(q, rank) for q in range(p)) for p in range(world)]
        sends = [Part(p, size_of(rank, p), Ref(rank, "in", ins[p])) for p in peers(rank, world)]
        receives = [Part(p, size_of(p, rank), Ref(rank, "out", outs[p])) for p in peers(rank, world)]
        n = size_of(rank, rank)
        own = Copy(Ref(rank, "out", outs[rank]), Ref(rank, "in", ins[rank]), n) if n else None
        made.flows.append(Flow("exchange", tuple(sends), tuple(receives), own))
        made.writes[rank] = Ref(rank, "in", 0), ins[world]
        made.reads[rank] = [
            (Ref(rank, "out", outs[p]), size_of(p, rank), p, sum(size_of(p, q) for q in range(rank)))
            for p in range(world)
        ]
    return made


def joined(rank):
    """Return the steps by which the lanes of a rank wait for each other, as engines make them do between operations."""
    here, there = (Ref(rank, "joins", 64 * lane) for lane in (0, 1))
    return [Signal(here, 1, 0), Take(here, rank, 1, 1), Signal(there, 1, 1), Take(there, rank, 1, 0)]


def group(operations, first=0, direct=0, pushes=False, rounds=()):
    """Return the arguments of verify for ``operations`` in a row, and the programs.

    Args:
        direct: bytes from which on tensors are read directly; 0: never.
        rounds: ranks on which nothing may wait beside anything else; these have one lane.
    """
    world = len(operations[0].flows)
    page = ControlPage(world)
    programs, inputs, outputs = [], [], []
    for rank in range(world):
        whole = Program(rank, world, ())
        for i, operation in enumerate(operations):
            sizes = dict(direct_bytes=direct, pushes=pushes, tapered_from=PAIR // 2 if pushes and i % 2 else 0)
            s = Setting(rank, world, page, 2 * i + 2, CHUNK, PAIR, (first + i) % 2, **sizes)
            steps = []
            if rank in operation.writes and operation.writes[rank][1]:
                here, n = operation.writes[rank]
                steps.append(Copy(here, Ref(rank, f"fresh{i}", 0), n))
                inputs.append((Ref(rank, f"fresh{i}", 0), n))
            join = joined(rank) if pushes and rank not in rounds else []
            program = build(s, operation.flows[rank])
            if rank in rounds:
                program = in_rounds(program)
                program = replace(program, steps=tuple(replace(step, lane=0) for step in program.steps))
            steps += [*join, *program.steps, *join]
            at = 0
            for where, n, source, offset in operation.reads.get(rank, ()):
                if n:
                    steps.append(Copy(Ref(rank, f"kept{i}", at), where, n))
                    outputs.append((Ref(rank, f"kept{i}", at), n, Ref(source, f"fresh{i}", offset)))
                    at += n
            whole = whole.then(Program(rank, world, tuple(steps)))
        programs.append(whole)
    flags = {Ref(rank, "flags", at): value for rank in range(world) for at, value in page.initial().items()}
    return programs, dict(inputs=inputs, outputs=outputs, flags=flags)


def prove(*operations, first=0, schedules=2, direct=0, push_schedules=1):
    programs, rest = group(operations, first, direct)
    verify(programs, **rest, schedules=schedules)
    programs, rest = group(operations, first, pushes=True)
    verify(programs, **rest, schedules=push_schedules)
    world = len(operations[0].flows)
    for rounds in (range(world), range(0, world, 2)):
        programs, rest = group(operations, first, pushes=True, rounds=rounds)
        verify(programs, **rest, schedules=0)


WORLDS = range(1, 9)


@pytest.mark.parametrize(("tapered_from", "taper"), [(0, (3, 1)), (256, (3, 1)), (768, (3, 1)), (512, (3, 2, 1))])
def test_pieces_are_the_whole_message_and_fit_their_slots(tapered_from, taper):
    s = Setting(0, 2, ControlPage(2), chunk_bytes=1024, pair_bytes=1024, tapered_from=tapered_from, taper=taper)
    for n in range(4200):
        pieces = s.pieces(n, 64)
        assert sum(length for _, length in pieces) == n
        assert all(start % 64 == 0 and 0 < length <= 1024 for start, length in pieces)
        assert all(a + length == b for (a, length), (b, _) in zip(pieces, pieces[1:], strict=False))
        if pieces and tapered_from:
            assert pieces[-1][1] <= max(tapered_from, (1024 + tapered_from) * taper[-1] // sum(taper) + 64)
    last = [(1024, 1024)]
    if tapered_from:
        last = [(1024, 512), (1536, 384), (1920, 128)] if len(taper) == 3 else [(1024, 768), (1792, 256)]
    assert s.pieces(2048, 64) == [(0, 1024), *last]
    if tapered_from == 512:  # with less behind them, not two whole slots
        assert s.pieces(2048 + 64, 64) == [(0, 1024), (1024, 576), (1600, 384), (1984, 128)]


def shapes(world):
    """Bytes of each rank: less than a chunk, one, several, uneven, none."""
    yield [5] * world
    yield [CHUNK] * world
    yield [2 * CHUNK + 3] * world
    yield [5 * CHUNK] * world
    yield [1 + 7 * p for p in range(world)]
    yield [0 if p % 2 else 40 for p in range(world)]
    yield [3 * CHUNK if p == world - 1 else 0 for p in range(world)]
    yield [0] * world


# Proofs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather(world):
    for sizes, in_place in itertools.product(shapes(world), [False, True]):
        if any(sizes):
            prove(all_gather(sizes, in_place))


@pytest.mark.parametrize("world", WORLDS)
def test_zero_copy_all_gather(world):
    for sizes, in_place in itertools.product(shapes(world), [False, True]):
        if any(sizes):
            prove(all_gather(sizes, in_place, heap=True))


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_out_of_the_heap(world):
    for sizes in shapes(world):
        if any(sizes):
            prove(all_gather(sizes, pulls=True), all_gather(sizes, heap=True), all_gather(sizes, pulls=True))


@pytest.mark.parametrize("heap", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_from_every_root(world, heap):
    for root, n in itertools.product(range(world), [3, CHUNK, 3 * CHUNK + 1]):
        prove(broadcast(world, root, n, heap))


@pytest.mark.parametrize("operation", [gather, scatter])
@pytest.mark.parametrize("world", WORLDS)
def test_gather_and_scatter_at_every_root(world, operation):
    for root, sizes in itertools.product(range(world), shapes(world)):
        if any(sizes):
            prove(operation(root, sizes), schedules=2)


@pytest.mark.parametrize("world", WORLDS)
def test_pairs_of_any_sizes(world):
    prove(exchange(world, lambda source, target: 5))
    prove(exchange(world, lambda source, target: (source * 11 + target * 7) % (3 * PAIR)))
    prove(exchange(world, lambda source, target: 3 * PAIR if target == (source + 1) % world else 0))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_several_in_a_row(world, first):
    """The slot of the first chunk alternates from one operation to the next, as the transport has it."""
    last, odd = world - 1, [CHUNK * (p % 3) + 5 for p in range(world)]
    prove(
        all_gather([20] * world),
        all_gather([20] * world),
        all_gather([3 * CHUNK] * world),
        broadcast(world, last, 2 * CHUNK + 1),
        all_gather(odd),
        broadcast(world, 0, 1),
        broadcast(world, 0, 1),
        broadcast(world, last, 1),
        first=first,
        schedules=2,
    )
    prove(
        gather(0, odd),
        gather(last, odd),
        scatter(0, odd),
        scatter(last, [7] * world),
        scatter(last, [7] * world),
        exchange(world, lambda source, target: PAIR * ((source + target) % 3)),
        all_gather([5] * world),
        gather(0, odd),
        first=first,
        schedules=2,
    )
    prove(
        all_gather([20] * world, heap=True),
        all_gather([20] * world, heap=True, in_place=True),
        broadcast(world, last, 9, heap=True),
        broadcast(world, 0, 9, heap=True),
        all_gather([CHUNK] * world),
        all_gather(odd, heap=True),
        all_gather(odd, pulls=True),
        all_gather([20] * world, pulls=True),
        broadcast(world, last, 9, heap=True),
        first=first,
        schedules=2,
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_in_a_row(seed):
    rng = random.Random(seed)
    world = rng.randint(2, 5)

    def sizes():
        return [rng.choice([0, 1, 5, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 1]) for _ in range(world - 1)] + [3]

    def operation():
        match rng.randrange(7):
            case 0:
                return all_gather(sizes(), rng.random() < 0.5)
            case 1:
                way = rng.choice(["heap", "pulls"])
                return all_gather(sizes(), way == "heap" and rng.random() < 0.5, **{way: True})
            case 2:
                return broadcast(world, rng.randrange(world), rng.choice([1, 40]), rng.random() < 0.5)
            case 3:
                return gather(rng.randrange(world), sizes())
            case 4:
                return scatter(rng.randrange(world), sizes())
            case _:
                table = [sizes() for _ in range(world)]
                return exchange(world, lambda source, target: table[source][target])

    prove(*(operation() for _ in range(10)), first=rng.randrange(2))


def barriers(world, rounds):
    """Every rank writes on a board of its own, meets the others, reads all boards, and meets them again."""
    page, programs, outputs = ControlPage(world), [], []
    for rank in range(world):
        s, steps = Setting(rank, world, page), []
        for i in range(rounds):
            steps.append(Copy(Ref(rank, "board", 0), Ref(rank, "fresh", 8 * i), 8))
            steps += barrier(s, 0).steps
            steps += [Copy(Ref(rank, f"kept{i}", 8 * p), Ref(p, "board", 0), 8) for p in range(world)]
            steps += barrier(s, 1).steps
            outputs += [(Ref(rank, f"kept{i}", 8 * p), 8, Ref(p, "fresh", 8 * i)) for p in range(world)]
        programs.append(Program(rank, world, tuple(steps)))
    inputs = [(Ref(rank, "fresh", 0), 8 * rounds) for rank in range(world)]
    return programs, dict(inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("world", WORLDS)
def test_barriers_order_what_lies_before_and_after(world):
    programs, rest = barriers(world, 3)
    verify(programs, **rest)


# Mistakes -------------------------------------------------------------------------------------------------------------

EXAMPLES = {
    "all_gather": lambda: group([all_gather([2 * CHUNK + 3] * 3), all_gather([5, 0, CHUNK + 1])]),
    "all_gather, zero copy": lambda: group([all_gather([9] * 3, heap=True), all_gather([9] * 3, heap=True)]),
    "all_gather out of the heap": lambda: group([all_gather([9] * 3, pulls=True), all_gather([9] * 3, pulls=True)]),
    "broadcast": lambda: group([broadcast(3, 1, 2 * CHUNK + 1), broadcast(3, 1, 5), broadcast(3, 0, CHUNK)]),
    "broadcast, zero copy": lambda: group([broadcast(3, 1, 5, heap=True), broadcast(3, 1, 5, heap=True)]),
    "gather": lambda: group([gather(1, [5, 2 * PAIR + 1, 0]), gather(1, [5, 5, 3 * PAIR])]),
    "scatter": lambda: group([scatter(1, [5, 2 * PAIR + 1, 0]), scatter(1, [5, 5, 3 * PAIR])]),
    "exchange": lambda: group([exchange(3, lambda a, b: PAIR * ((a + b) % 3)), exchange(3, lambda a, b: 5)]),
    "barrier": lambda: barriers(3, 2),
}
# For steps that are swapped: of one chunk each. With several, the flags of one chunk can order those of another.
SHORT_EXAMPLES = {
    **EXAMPLES,
    "all_gather": lambda: group([all_gather([CHUNK] * 3)] * 4),
    "broadcast": lambda: group([broadcast(3, 1, CHUNK)] * 4),
    "gather": lambda: group([gather(1, [PAIR] * 3)] * 4),
    "scatter": lambda: group([scatter(1, [PAIR] * 3)] * 4),
    "exchange": lambda: group([exchange(3, lambda a, b: PAIR)] * 4),
}


SLOTS = ("staging", "pairs")


def mutants(programs, mutate):
    """Yield (what was done, programs) for every place at which ``mutate`` can change one rank's steps."""
    for rank, program in enumerate(programs):
        for index in range(len(program.steps)):
            steps = mutate(programs, list(program.steps), index)
            if steps is not None:
                changed = [*programs]
                changed[rank] = replace(program, steps=tuple(steps))
                yield f"rank {rank} step {index} `{program.steps[index]}`", changed


def without(programs, steps, index):
    del steps[index]
    return steps


def twice(programs, steps, index):
    steps.insert(index, steps[index])
    return steps


def swapped(steps, index):
    steps[index], steps[index + 1] = steps[index + 1], steps[index]
    return steps


def is_pulled(copy):
    return copy.src.buffer == "heap" != copy.dst.buffer and copy.src.rank != copy.dst.rank


def pair(steps, index, first, second):
    """Return the step and the next one when they are of these kinds, and part of an operation and not of its user."""
    if index + 1 < len(steps) and isinstance(steps[index], first) and isinstance(steps[index + 1], second):
        copy = steps[index] if isinstance(steps[index], Copy) else steps[index + 1]
        end = copy.src if is_pulled(copy) else copy.dst  # of the two, where others look
        remote = second is Signal and steps[index + 1].flag.rank == end.rank
        if copy.src.buffer in SLOTS or end.buffer in SLOTS or end.buffer == "heap" and (remote or second is Copy):
            return steps[index], steps[index + 1]
    return None, None


def signal_before_its_copy(programs, steps, index):
    copy, _ = pair(steps, index, Copy, Signal)
    if copy is None:
        return None
    if is_pulled(copy) and not any(isinstance(s, Copy) and s.src == copy.src for s in steps[index + 1 :]):
        return None  # nor does it where the input is not written again
    if copy.src.buffer in SLOTS:
        # To give a slot back early does harm only when it is filled again; and not where this rank sends too, as the
        # sender has to wait for that, and so for this rank, before it comes to the slot again.
        if any(isinstance(s, Copy) and s.dst.buffer in SLOTS for s in steps):
            return None
        filled = sum(isinstance(s, Copy) and s.dst == copy.src for s in programs[copy.src.rank].steps)
        drained = sum(isinstance(s, Copy) and s.src == copy.src for s in steps[: index + 1])
        if filled == drained:
            return None
    return swapped(steps, index)


def copy_before_its_take(programs, steps, index):
    _, copy = pair(steps, index, Take, Copy)
    if copy is None:
        return None
    if copy.src.buffer not in SLOTS:
        # To fill a slot, or an output, early does harm only when it was filled before; and see above.
        if not any(isinstance(s, Copy) and s.dst == copy.dst for s in steps[:index]):
            return None
        if any(isinstance(s, Copy) and s.src.buffer in SLOTS for s in steps):
            return None
    return swapped(steps, index)


def shift(where, by):
    def mutate(programs, steps, index):
        step = steps[index]
        if not isinstance(step, Copy):
            return None
        steps[index] = replace(step, **{where: getattr(step, where) + by})
        return steps

    return mutate


def longer(by):
    def mutate(programs, steps, index):
        if not isinstance(steps[index], Copy) or steps[index].nbytes + by < 1:
            return None
        steps[index] = replace(steps[index], nbytes=steps[index].nbytes + by)
        return steps

    return mutate


def other_slot(programs, steps, index):
    step = steps[index]
    if isinstance(step, Copy) and "staging" in (step.src.buffer, step.dst.buffer):
        side = "src" if step.src.buffer == "staging" else "dst"
        ref = getattr(step, side)
        steps[index] = replace(step, **{side: Ref(ref.rank, ref.buffer, ref.offset ^ CHUNK)})
        return steps
    return None


def other_tag(programs, steps, index):
    if not isinstance(steps[index], Signal | Take):
        return None
    steps[index] = replace(steps[index], tag=steps[index].tag + 1)
    return steps


MUTATIONS = {
    "a step left out": without,
    "a step done twice": twice,
    "a signal before its copy": signal_before_its_copy,
    "a copy before its take": copy_before_its_take,
    "a destination shifted by 1": shift("dst", 1),
    "a source shifted by 1": shift("src", 1),
    "a destination shifted by 8": shift("dst", 8),
    "a copy of one byte more": longer(1),
    "a copy of one byte less": longer(-1),
    "the other slot": other_slot,
    "another tag": other_tag,
}
SWAPS = (signal_before_its_copy, copy_before_its_take)
NOT_THERE = {
    ("barrier", "a signal before its copy"),  # a barrier has no copies
    ("barrier", "a copy before its take"),
    *((example, "the other slot") for example in EXAMPLES if example not in ("all_gather", "broadcast")),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_every_mistake_is_found(example, mutation):
    programs, rest = (SHORT_EXAMPLES if MUTATIONS[mutation] in SWAPS else EXAMPLES)[example]()
    verify(programs, **rest)
    count = 0
    for what, changed in mutants(programs, MUTATIONS[mutation]):
        try:
            verify(changed, **rest, schedules=0)
        except ProgramError:
            count += 1
        else:
            pytest.fail(f"{mutation} at {what} was not found")
    assert bool(count) != ((example, mutation) in NOT_THERE)


# What the builders promise --------------------------------------------------------------------------------------------


def test_chunks():
    assert list(chunks(0, 4)) == []
    assert list(chunks(4, 4)) == [(0, 4)]
    assert list(chunks(9, 4)) == [(0, 4), (4, 4), (8, 1)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_sender_stages_its_bytes_once_for_all(world):
    n = 3 * CHUNK + 1
    programs, _ = group([all_gather([n] * world)])
    for rank, program in enumerate(programs):
        own = [s for s in program.steps if isinstance(s, Copy) and s.dst.buffer == "staging"]
        assert sum(s.nbytes for s in own) == (n if world > 1 else 0)
        assert all(s.dst.rank == rank for s in own)
        user = 2 * n + (world - 1) * n  # what the user's steps move
        assert program.nbytes_moved() - user == world * n + (n if world > 1 else 0)


@pytest.mark.parametrize("world", WORLDS)
def test_zero_copy_moves_no_byte_twice(world):
    for way in ("heap", "pulls"):
        programs, _ = group([all_gather([24] * world, **{way: True})])
        assert all(p.nbytes_moved() == 24 * world + 24 + 24 * world for p in programs)


def test_what_lies_outside_a_slot_is_never_touched():
    world = 4
    programs, _ = group([all_gather([5 * CHUNK - 1] * world), exchange(world, lambda a, b: 3 * PAIR + 1)])
    for program in programs:
        for step in program.steps:
            for ref in step.refs():
                size = {"staging": 2 * CHUNK, "pairs": 2 * world * PAIR, "flags": ControlPage(world).nbytes}.get(
                    ref.buffer
                )
                if size:
                    assert 0 <= ref.offset
                    assert ref.offset + (step.nbytes if isinstance(step, Copy) else 4) <= size


def test_tags_tell_sizes_apart_and_are_never_a_credit():
    s = Setting(0, 2, ControlPage(2), tag=1234)
    tags = [s.tag_of(n) for n in (0, 1, 2, 8, 255, 256, 1 << 20, 1 << 40)]
    assert len(set(tags)) == len(tags)
    assert all(1 < tag < 1 << 32 for tag in tags)
    assert s.tag_of(8) != replace(s, tag=1235).tag_of(8)
