"""Faults of other systems with tensors: layouts, no elements, element types, sizes. Each is named after its report."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine import decoded, decoder
from iris_pg.copy_engine.translate import encode
from iris_pg.errors import ArgumentError, MismatchError
from iris_pg.flags import ControlPage
from iris_pg.program import Copy, Reduce, Ref
from table.call import Row
from table.operations import OPERATIONS
from table.reductions import TAKEN
from table.runner import mistakes, world_only
from table.values import MOVED, Form

ENGINES = ["sdma", "cu"]

STRIDED = [Form((4, 6), "transposed"), Form((3, 5), "strided"), Form((4, 6), "expanded")]
CHANNELS_LAST = [Form((2, 3, 4, 5), "channels_last"), Form((2, 1, 4, 5), "channels_last")]
EMPTY = [Form((1, 0, 2), "contiguous"), Form((0,), "contiguous"), Form((3, 0), "transposed")]
ODD_OFFSETS = [Form((37,), "offset"), Form((5, 7), "offset")]
FLOATS_8 = tuple(name for name in MOVED if name.startswith("float8"))


def rows(engine, forms, dtypes, reductions=("sum",), operations=tuple(OPERATIONS)):
    """Return every operation with every form, sync and async, with the element types in turn; of engine cu, which is
    an interpreter on CPUs, each operation with one form and sync or async.
    """
    made, turn = [], itertools.cycle(dtypes)
    for name in operations:
        operation = OPERATIONS[name]
        layouts = {form.layout for form in operation.forms}
        cells = itertools.product(
            [form for form in forms if form.layout != "expanded" or "expanded" in layouts],
            reductions if operation.reduces else [""],
            [False, True],
        )
        cells = [(next(turn), *cell) for cell in cells]
        cells = [(d, f, op, a) for d, f, op, a in cells if d in (TAKEN[op] if op else operation.dtypes)]
        for dtype, form, op, asynchronous in cells if engine == "sdma" else cells[len(made) % 3 :: 5]:
            made.append(Row(name, dtype, op, form, "world", asynchronous, len(made)))
    return made


def runs(rank, world, chosen):
    return mistakes(chosen, world_only())


def check(ranks, engine, *what, **more):
    chosen = rows(engine, *what, **more)
    assert len(chosen) >= 14
    for said in ranks(2).run(runs, chosen, options=dict(engine=engine)):
        assert not said, "\n".join(said)


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_192920_and_128066_and_sglang_29181_strided_tensors_are_right(ranks, engine):
    check(ranks, engine, STRIDED, ["float32", "int64", "uint8", "bfloat16", "int16"])


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_163483_and_79043_channels_last(ranks, engine):
    check(ranks, engine, CHANNELS_LAST, ["float32", "bfloat16", "int8"])


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_20421_views_keep_their_storage_offset(ranks, engine):
    check(ranks, engine, ODD_OFFSETS, ["uint8", "int16", "float32", "bool"])


def expands_outputs(rank, world):
    """Return the operations that took an output whose elements share memory, on any rank."""
    group, whole = dist.group.WORLD, torch.ones(4)
    shared, wide = torch.zeros(1).expand(4), torch.zeros(1).expand(4 * world)
    parts, list_ = [whole] * world, [shared] + [torch.zeros(4) for _ in range(world - 1)]
    calls = {
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, whole),
        "all_gather": lambda: dist.all_gather(list_, whole),
        "broadcast": lambda: dist.broadcast(shared, 1 - rank),
        "gather": lambda: dist.gather(whole, list_, dst=rank),
        "scatter": lambda: dist.scatter(shared, parts, src=rank),
        "all_to_all": lambda: dist.all_to_all(list_, parts),
        "all_to_all_single": lambda: dist.all_to_all_single(wide, torch.zeros(4 * world)),
        "all_reduce": lambda: dist.all_reduce(shared),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced([whole, shared]),
        "reduce": lambda: dist.reduce(shared, dst=rank),
        "reduce_scatter": lambda: dist.reduce_scatter(shared, parts),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(shared, torch.zeros(4 * world)),
        "recv": lambda: dist.recv(shared, 1 - rank),
    }
    wrong = []
    for name, call in calls.items():
        try:
            call()
            wrong.append(name)
        except ArgumentError as error:
            if "share memory" not in str(error):
                wrong.append(f"{name}: {error}")
    assert not shared.any() and not wide.any()
    dist.barrier()
    return wrong


def test_pytorch_192920_an_expanded_output_is_refused_by_every_operation(ranks):
    assert ranks(2).run(expands_outputs) == [[], []]


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_85234_and_20651_and_140741_no_elements(ranks, engine):
    check(ranks, engine, EMPTY, ["float32", "int32", "bool", "complex64", "float16"])


def shares_a_storage(rank, world):
    """Two windows of one storage, and of one heap block, in two operations at once."""
    for storage in (torch.zeros(2000, dtype=torch.uint8), dist.group.WORLD.heap.empty(2000, dtype=torch.uint8)):
        storage.fill_(9)
        sent = torch.arange(201, dtype=torch.uint8) + rank
        first, second = storage[1:202], storage[202 : 202 + world * 201]
        first.copy_(sent)
        works = [
            dist.broadcast(first, 1, async_op=True),
            dist.all_gather_into_tensor(second, sent, async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        assert torch.equal(first, torch.arange(201, dtype=torch.uint8) + 1)
        assert torch.equal(second, torch.cat([torch.arange(201, dtype=torch.uint8) + p for p in range(world)]))
        assert (storage[202 + world * 201 :] == 9).all() and storage[0] == 9


@pytest.mark.parametrize("engine", ENGINES)
def test_nccl_2198_two_windows_of_one_allocation(ranks, engine):
    ranks(2).run(shares_a_storage, options=dict(engine=engine))


# Splits ---------------------------------------------------------------------------------------------------------------


def exchanges(rank, world, rows_of):
    """``rows_of[source][target]`` rows go from source to target."""
    ins, outs = rows_of[rank], [rows_of[p][rank] for p in range(world)]

    def given(source):
        return (torch.arange(sum(rows_of[source]) * 3) * 7 + 1000 * source).view(-1, 3)

    for asynchronous in (False, True):
        output = torch.full((sum(outs), 3), -1)
        work = dist.all_to_all_single(output, given(rank), outs, ins, async_op=asynchronous)
        if work:
            work.wait()
        begins = [sum(rows_of[p][:rank]) for p in range(world)]
        expected = [given(p)[b : b + rows_of[p][rank]] for p, b in enumerate(begins)]
        assert torch.equal(output, torch.cat(expected))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "rows_of",
    [
        [[0, 3], [2, 0]],  # only to the other
        [[0, 3], [0, 3]],  # rank 1 gets all, its own too
        [[0, 0], [4, 1]],  # rank 0 sends nothing
        [[0, 0], [0, 0]],
        [[0, 1, 2], [0, 0, 0], [5, 0, 1]],
        [[2, 0, 1], [1, 0, 3], [0, 4, 0]],
    ],
    ids=str,
)
def test_pytorch_146468_and_158016_a_rank_with_nothing_to_send_even_to_itself(ranks, rows_of, engine):
    ranks(len(rows_of)).run(exchanges, rows_of, options=dict(engine=engine), timeout_s=20)


def splits_wrongly(rank, world, ins, outs):
    try:
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), outs, ins)
    except ArgumentError as error:
        dist.barrier()  # the group works on
        return str(error)


@pytest.mark.parametrize(
    ("ins", "outs"), [([1, 2], [2, 2]), ([2, 2], [2, 3]), ([5, -1], [2, 2]), ([4], [2, 2]), ([2, 2], [0, 2, 2])]
)
def test_pytorch_101380_split_sizes_that_do_not_add_up(ranks, ins, outs):
    for text in ranks(2).run(splits_wrongly, ins, outs):
        assert "split_sizes=" in text and "4 in all" in text, text


def disagrees_about_a_split(rank, world):
    """Rank 0 sends 3 rows to rank 1, which expects 2."""
    ins, outs = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [2, 2])
    try:
        dist.all_to_all_single(torch.zeros(sum(outs)), torch.zeros(sum(ins)), outs, ins)
        dist.barrier()
    except MismatchError as error:
        return str(error)


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_146468_splits_that_two_ranks_disagree_about(ranks, engine):
    options = dict(engine=engine)
    for text in ranks(2).run(disagrees_about_a_split, options=options, timeout_s=20, group_timeout_s=8):
        assert text and "different operations" in text, text


# Element types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_89197_and_103585_bool(ranks, engine):
    forms = [Form((65,), "contiguous"), Form((5, 3), "strided")]
    check(ranks, engine, forms, ["bool"], ["sum", "product", "min", "max", "band", "bor", "bxor"])


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_71613_complex(ranks, engine):
    check(ranks, engine, [Form((33,), "contiguous"), Form((4, 6), "transposed")], ["complex64"], ["sum", "avg"])


def takes_the_largest_complex_number(rank, world):
    group, tensor = dist.group.WORLD, torch.ones(4, dtype=torch.complex64)
    before = group._get_sequence_number_for_group()
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND):
        with pytest.raises(ValueError, match="does not support"):
            dist.all_reduce(tensor, op)
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = op
        with pytest.raises(ArgumentError, match=rf"{op.name} of torch.complex64; it takes"):
            group.reduce_scatter_single(torch.zeros(2, dtype=torch.complex64), tensor, opts)
    assert group._get_sequence_number_for_group() == before, "a refused call counts as an operation"


def test_pytorch_45760_the_largest_complex_number_is_refused_before_anything_moves(ranks):
    ranks(2).run(takes_the_largest_complex_number)


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_148344_8_bit_floats_move_byte_for_byte(ranks, engine):
    moves = [name for name, operation in OPERATIONS.items() if not operation.reduces]
    check(ranks, engine, [Form((1021,), "contiguous"), Form((3, 5), "strided")], FLOATS_8, operations=moves)


@pytest.mark.parametrize("engine", ENGINES)
def test_4_bit_floats_of_any_layout(ranks, engine):
    """torch cannot make a larger transposed tensor of them contiguous."""
    moves = [name for name, operation in OPERATIONS.items() if not operation.reduces]
    forms = [Form((132, 31), "transposed"), Form((8, 9, 10, 5), "channels_last"), Form((4000,), "strided")]
    check(ranks, engine, forms, ["float4_e2m1fn_x2"], operations=moves)


def every_dtype():
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def test_aiter_the_size_of_every_dtype_is_what_torch_says():
    """Nothing guesses a size: a dtype that is new in torch moves as its bytes."""
    from iris_pg.operations.base import dense

    for dtype in every_dtype():
        flat = torch.arange(48, dtype=torch.uint8).view(dtype)
        assert dense(flat).numel() * dense(flat).element_size() == 48, dtype


FACTORS = {"float": 0.375, "tensor": torch.tensor([0.375])}


def scales(rank, world, factor):
    """Sizes that are no multiple of the number of ranks, or one element."""
    op = dist._make_nccl_premul_sum(FACTORS[factor])
    for n in (1, 5, 1000):
        tensor = torch.arange(n, dtype=torch.float32) + 100 * rank
        operands = [torch.arange(n, dtype=torch.float32) + 100 * p for p in range(world)]
        scaled, average = tensor.clone(), tensor.clone()
        dist.all_reduce(scaled, op)
        assert torch.allclose(scaled, 0.375 * sum(operands), rtol=1e-6)
        dist.all_reduce(average, dist.ReduceOp.AVG)
        assert torch.allclose(average, sum(operands) / world, rtol=1e-6)
        whole, part = tensor.repeat(world), torch.empty(n)
        dist.reduce_scatter_tensor(part, whole, op)
        assert torch.allclose(part, 0.375 * sum(operands), rtol=1e-6)
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG)
        assert torch.allclose(part, sum(operands) / world, rtol=1e-6)
        assert torch.equal(whole, tensor.repeat(world)), "the input has changed"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("factor", FACTORS)
def test_pytorch_155903_and_152594_a_factor_and_an_average(ranks, engine, factor):
    ranks(3).run(scales, factor, options=dict(engine=engine))


def has_another_dtype(rank, world):
    tensor = torch.ones(8, dtype=torch.float32 if rank == 0 else torch.int32)
    try:
        dist.all_reduce(tensor)
    except MismatchError as error:
        return str(error)


@pytest.mark.parametrize("engine", ENGINES)
def test_pytorch_150248_another_dtype_on_another_rank_is_told_at_once(ranks, engine):
    for text in ranks(2).run(has_another_dtype, options=dict(engine=engine), group_timeout_s=10):
        assert text and "different operations" in text, text


# Large sizes ----------------------------------------------------------------------------------------------------------

MIB, CHUNK = 1 << 20, 128 << 20
LARGE = [768 * MIB - 1, 768 * MIB, 768 * MIB + 1, 2**31 - 1, 2**31, 2**31 + 4, 2**32 - 4, 2**32, 2**32 + 4, 5 * 2**30]
APART = 1 << 44  # bytes between the buffers of the plan


def spans(places):
    """Return the ranges that (begin, nbytes) cover, joined where they touch."""
    joined = []
    for begin, nbytes in sorted(places):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], begin + nbytes)
        else:
            joined.append((begin, begin + nbytes))
    return joined


def copies_of(program):
    """Return the copies that a program becomes, as packets say them: (where to, where from, nbytes)."""
    names = ["flags", "staging", "pairs", "in", "out"]

    def address(ref):
        return APART * (1 + len(names) * ref.rank + names.index(ref.buffer)) + ref.offset

    found = []
    for batch in encode(program, address, {}, 1 << 16):
        at = 0
        while at < len(batch.packets):
            packet = decoder.decode(batch.packets, at, len(batch.packets))
            at += packet.size_bytes
            if isinstance(packet, decoded.CopyLinear):
                found.append((packet.dst, packet.src, packet.nbytes))
    return found, address


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("nbytes", LARGE)
def test_iris_532_large_tensors_are_moved_whole_in_the_plan(nbytes, world):
    """Every byte of the input is read and every byte of the output written once: nothing wraps at 31 or 32 bits."""
    for rank in (0, world - 1):
        setting = Setting(rank, world, ControlPage(world), chunk_bytes=CHUNK, pair_bytes=CHUNK)
        own = Copy(Ref(rank, "out", rank * nbytes), Ref(rank, "in", 0), nbytes)
        sends = tuple(Part(p, nbytes, Ref(rank, "in", 0)) for p in setting.peers)
        receives = tuple(Part(p, nbytes, Ref(rank, "out", p * nbytes)) for p in setting.peers)
        copies, address = copies_of(build(setting, Flow("all_gather", sends, receives, own, to_all=True)))
        here, there = address(Ref(rank, "in", 0)), address(Ref(rank, "out", 0))
        assert spans((dst, n) for dst, _, n in copies if there <= dst < there + APART) == [
            (there, there + world * nbytes)
        ]
        staged = [(src, n) for dst, src, n in copies if here <= src < here + APART and not there <= dst < there + APART]
        assert spans(staged) == [(here, here + nbytes)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("nbytes", [n // 4 * 4 for n in LARGE])
def test_iris_532_large_tensors_are_reduced_whole_in_the_plan(nbytes, world):
    for rank in (0, world - 1):
        setting = Setting(rank, world, ControlPage(world), chunk_bytes=CHUNK, pair_bytes=CHUNK)
        operand, result = Part(rank, nbytes, Ref(rank, "in", 0)), Ref(rank, "out", 0)
        program = build(setting, Fold("all_reduce", "sum", "float32", (operand,), result, to_all=True))
        into = [step for step in program.steps if isinstance(step, (Copy, Reduce)) and step.dst.buffer == "out"]
        assert spans((step.dst.offset, step.nbytes) for step in into) == [(0, nbytes)]
