"""Reduction operations: what torch passes, which element types each takes, and what each does to bytes."""

import copy
import functools
import itertools
import operator
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from iris_pg.copy_engine import reduction as engine
from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.errors import ArgumentError
from iris_pg.reduce_ops import DTYPES, Reduction, check, reduction

ReduceOp = dist.ReduceOp
NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
KINDS = {
    "bool": ["bool"],
    "integer": ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"],
    "float": ["float16", "bfloat16", "float32", "float64"],
    "float8": ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"],
    "complex": ["complex32", "complex64", "complex128"],
}
KIND = {name: kind for kind, names in KINDS.items() for name in names}
REFUSED = {
    "avg": {"bool"},
    "min": {"complex"},
    "max": {"complex"},
    **dict.fromkeys(("band", "bor", "bxor"), {"float", "float8", "complex"}),
    "premul_sum": {"bool", "integer"},
}
EVERY = [(op, name) for op in DTYPES if op != "premul_sum" for name in DTYPES[op]]


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

# What torch passes.


@pytest.mark.parametrize("op", NAMES, ids=NAMES.values())
def test_every_operation_of_torch_has_a_name(op):
    options = dist.AllreduceOptions()
    options.reduceOp = op  # what a process group gets is a ReduceOp, what users pass a RedOpType
    for form in (op, ReduceOp(op), options.reduceOp):
        assert reduction("all_reduce", form, torch.int32) == Reduction(NAMES[op], "int32")


def test_no_operation_of_torch_is_missing():
    known = {*(op.name for op in NAMES), "PREMUL_SUM"}
    assert set(ReduceOp.RedOpType.__members__) == known


@pytest.mark.parametrize("factor", [0.5, 3.0, torch.tensor([0.5]), torch.tensor(3), torch.tensor(0.5).bfloat16()])
@pytest.mark.parametrize(
    "through", [lambda op: op, copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))]
)
def test_a_factor_is_read_back(factor, through):
    op = through(dist._make_nccl_premul_sum(factor))
    value = float(factor)
    assert reduction("all_reduce", op, torch.float32) == Reduction("sum", "float32", value)
    for options in (dist.AllreduceOptions(), dist.ReduceScatterOptions(), dist.ReduceOptions()):
        options.reduceOp = op
        assert reduction("all_reduce", options.reduceOp, torch.bfloat16) == Reduction("sum", "bfloat16", value)


def test_a_factor_must_be_there_and_real():
    with pytest.raises(ArgumentError, match="reduce: ReduceOp.PREMUL_SUM has no factor; .*_make_nccl_premul_sum"):
        reduction("reduce", ReduceOp.PREMUL_SUM, torch.float32)
    op = dist._make_nccl_premul_sum(torch.tensor([1j]))
    with pytest.raises(ArgumentError, match=r"has the factor 1j for torch.float32; it takes a real one"):
        reduction("reduce", op, torch.float32)
    assert reduction("reduce", op, torch.complex64).pre_scale == 1j


@pytest.mark.parametrize("name", DTYPES["premul_sum"])
def test_scaling_rounds_once_and_leaves_the_operand_alone(name):
    dtype = getattr(torch, name)
    operand = torch.linspace(-3, 3, 50).to(dtype)
    before = operand.view(torch.uint8).clone()
    scaled = Reduction("sum", name, 1 / 3).scaled(operand)
    wide = operand.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert scaled.dtype == dtype and scaled.data_ptr() != operand.data_ptr()
    assert torch.equal(operand.view(torch.uint8), before)
    expected = (wide / 3).to(dtype)
    off = (scaled.to(wide.dtype) - expected.to(wide.dtype)).abs() > 1e-6 * expected.to(wide.dtype).abs()
    assert off.sum() <= 1  # in a tie of 64-bit values, float32 can round to the other neighbour
    assert Reduction("sum", name).scaled(operand) is operand
    assert not Reduction("sum", name, 2.0).scaled(operand.clone().requires_grad_()).requires_grad


# Which element types.


@pytest.mark.parametrize("name", [name for names in KINDS.values() for name in names])
def test_each_operation_takes_the_types_it_should(name):
    for op in DTYPES:
        if KIND[name] in REFUSED.get(op, ()):
            with pytest.raises(ArgumentError, match=f"all_reduce: ReduceOp.{op.upper()} of torch.{name}; it takes "):
                check(op, name, "all_reduce")
        else:
            check(op, name, "all_reduce")


def test_a_refusal_names_what_is_allowed():
    with pytest.raises(ArgumentError) as error:
        reduction("all_reduce", ReduceOp.AVG, torch.bool)
    assert str(error.value).startswith("all_reduce: ReduceOp.AVG of torch.bool; it takes float32, float64, float16, ")
    assert str(error.value).endswith("convert the tensor, or use SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR")
    with pytest.raises(ArgumentError, match=r"SUM of torch.float8_e8m0fnu; .*uint64, bool; convert the tensor$"):
        reduction("all_reduce", ReduceOp.SUM, torch.float8_e8m0fnu)
    with pytest.raises(ArgumentError, match="op='mean'; it takes sum, avg, product"):
        check("mean", "float32")


# What they do to bytes.


def values(name, numel, seed):
    """Return `numel` elements that depend on position and seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, name)
    if name == "bool":
        return torch.randint(2, (numel,), generator=generator).bool()
    if KIND[name] == "integer":
        nbytes = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return nbytes.view(dtype)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64)
    if KIND[name] == "complex":
        drawn = torch.complex(drawn, torch.randn(numel, generator=generator, dtype=torch.float64))
    return drawn.to(dtype)


def expected_integers(op, name, operands):
    """The result by Python's integers, which have no width."""
    bits, is_signed = 8 * getattr(torch, name).itemsize, name.startswith("int")

    def wrap(value):
        value &= 2**bits - 1
        return value - 2**bits if is_signed and value >> (bits - 1) else value

    def divided(total, count):
        return total // count if total >= 0 else -(-total // count)

    fold = {
        "sum": operator.add,
        "avg": operator.add,
        "product": operator.mul,
        "min": min,
        "max": max,
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
    }[op]
    columns = zip(*(operand.numpy().tolist() for operand in operands), strict=True)
    results = [wrap(functools.reduce(fold, column)) for column in columns]
    return [divided(total, len(operands)) for total in results] if op == "avg" else results


def expected_floats(op, name, operands):
    """The result by torch, operand by operand in the type that accumulates, rounded at the end."""
    dtype = operands[0].dtype
    wide = {4: torch.complex64, 8: dtype, 16: dtype} if dtype.is_complex else {1: torch.float32, 2: torch.float32}
    wide = wide.get(dtype.itemsize, dtype)
    fold = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = functools.reduce(fold, (operand.to(wide) for operand in operands))
    if op == "avg":
        total = torch.view_as_real(total).div(len(operands)) if dtype.is_complex else total.div(len(operands))
        total = torch.view_as_complex(total) if dtype.is_complex else total
    return total.to(dtype)


def run(op, name, operands, into):
    reduce_bytes(op, name, into.data_ptr(), [operand.data_ptr() for operand in operands], into.nbytes)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(("op", "name"), EVERY)
def test_the_result_is_right(op, name, count):
    numels = (1, 37, 1000) + ((engine._BLOCK_BYTES // 2 + 5,) if count == 3 and name in ("bfloat16", "int8") else ())
    for numel in numels:
        operands = [values(name, numel, seed) for seed in range(count)]
        into = torch.zeros_like(operands[0])
        run(op, name, operands, into)
        if name == "bool":
            any_or_all = {"sum": any, "max": any, "bor": any, "product": all, "min": all, "band": all}
            fold = any_or_all.get(op, lambda column: sum(column) % 2 == 1)
            columns = zip(*(operand.tolist() for operand in operands), strict=True)
            assert into.tolist() == [fold(column) for column in columns]
        elif KIND[name] == "integer":
            assert into.numpy().tolist() == expected_integers(op, name, operands)
        elif op == "product" and KIND[name] == "complex":  # torch and NumPy may contract a * b + c differently
            wide = torch.complex128
            close = {"complex32": 2e-3, "complex64": 1e-6, "complex128": 1e-14}[name]
            torch.testing.assert_close(
                into.to(wide), expected_floats(op, name, operands).to(wide), rtol=close, atol=10 * close
            )
        else:
            assert bits(into) == bits(expected_floats(op, name, operands))


def test_sums_and_products_of_the_largest_integers_wrap():
    for name in KINDS["integer"]:
        dtype = getattr(torch, name)
        ones = torch.full((3 * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype)  # -1, or the largest
        into = torch.empty_like(ones)
        for op, count in itertools.product(("sum", "product"), (2, 3)):
            run(op, name, [ones] * count, into)
            assert into.numpy().tolist() == expected_integers(op, name, [ones] * count)


def test_an_average_of_more_ranks_than_the_type_can_count():
    for name in ("int8", "uint8"):
        operands = [torch.full((4,), 1, dtype=getattr(torch, name)) for _ in range(300)]
        into = torch.empty_like(operands[0])
        run("avg", name, operands, into)
        assert into.tolist() == expected_integers("avg", name, operands)


def test_averages_of_integers_drop_the_fraction():
    operands = [torch.tensor([-7, -1, 7, 1, -8], dtype=torch.int64), torch.zeros(5, dtype=torch.int64)]
    into = torch.empty(5, dtype=torch.int64)
    run("avg", "int64", operands, into)
    assert into.tolist() == [-3, 0, 3, 0, -4]


def test_what_is_accumulated_in_float32_is_rounded_once():
    """256 + 1 + 1 is 256 when each sum is rounded to bfloat16, and 1 / 3 of 65504 * 3 is infinite in float16."""
    operands = [torch.tensor([value], dtype=torch.bfloat16) for value in (256, 1, 1)]
    into = torch.empty_like(operands[0])
    run("sum", "bfloat16", operands, into)
    assert into.item() == 258
    operands = [torch.tensor([65504], dtype=torch.float16)] * 3
    into = torch.empty_like(operands[0])
    run("avg", "float16", operands, into)
    assert into.item() == 65504


SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 1.5, -2.25)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if KIND[name] in ("float", "float8")])
def test_bits_do_not_depend_on_where_operands_lie(op, name, count):
    """At any alignment, in place of any operand or of none; zeros keep their sign, a NaN its bits."""
    dtype = getattr(torch, name)
    for numel in (1, 3, 8, 19, 67, 260):
        drawn = torch.Generator().manual_seed(numel)
        picks = torch.randint(len(SPECIAL), (count, numel), generator=drawn)
        operands = [torch.tensor(SPECIAL)[row].to(dtype) for row in picks]
        results = set()
        for shift, place in itertools.product((0, 1, 5), (None, *range(count))):
            rows = [torch.zeros(numel + 9, dtype=dtype)[i + shift :][:numel] for i in range(count + 1)]
            for row, operand in zip(rows, operands, strict=False):
                row.copy_(operand)
            into = rows[-1] if place is None else rows[place]
            run(op, name, rows[:-1], into)
            results.add(bits(into))
        assert len(results) == 1


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_in_place_of_each_operand_or_of_two(op, name):
    numel = 100
    for count, places in ((2, (0,)), (2, (1,)), (4, (0,)), (4, (2,)), (4, (3,)), (3, (0, 2)), (3, (1, 2))):
        operands = [values(name, numel, seed) for seed in range(count)]
        for place in places:
            operands[place] = operands[places[0]]
        expected = torch.empty_like(operands[0])
        run(op, name, operands, expected)
        run(op, name, operands, operands[places[0]])
        assert bits(operands[places[0]]) == bits(expected)


def test_memory_that_is_not_aligned_to_elements():
    for name in ("float32", "bfloat16", "complex64"):
        dtype = getattr(torch, name)
        memory = np.zeros(4096, np.uint8)
        operands = [values(name, 64, seed) for seed in range(3)]
        addresses = [memory.ctypes.data + 1 + 1000 * i for i in range(4)]
        for i, operand in enumerate(operands):
            memory[1 + 1000 * i :][: operand.nbytes] = operand.view(torch.uint8).numpy()
        reduce_bytes("sum", name, addresses[3], addresses[:3], 64 * dtype.itemsize)
        assert memory[3001:][: 64 * dtype.itemsize].tobytes() == bits(expected_floats("sum", name, operands))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mean", "float32", 8), "op='mean'; it takes sum"),
        (("premul_sum", "float32", 8), "op='premul_sum'; it takes sum, .*; scale the operands first, and use sum"),
        (("max", "complex64", 8), "ReduceOp.MAX of torch.complex64; it takes float32"),
        (("sum", "float32", 6), "nbytes=6 of float32; it takes whole elements of 4 bytes"),
        (("sum", "float32", 0), "nbytes=0 of float32"),
    ],
)
def test_a_mistake_is_an_argument_error_and_nothing_is_written(arguments, message):
    op, name, nbytes = arguments
    into = torch.full((8,), 7, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=message):
        reduce_bytes(op, name, into.data_ptr(), [torch.zeros(2).data_ptr()] * 2, nbytes)
    with pytest.raises(ArgumentError, match="1 sources; it takes two or more"):
        reduce_bytes("sum", "float32", into.data_ptr(), [torch.zeros(2).data_ptr()], 8)
    assert into.tolist() == [7] * 8


# How they live with the rest of a process.


def test_an_address_may_get_another_type_size_and_operation():
    memory = torch.arange(1, 17, dtype=torch.int64)
    a, b, into = memory[:4], memory[4:8], memory[8:12]
    run("sum", "int64", [a, b], into)
    assert into.tolist() == [6, 8, 10, 12]
    run("product", "int64", [a, b], into)
    assert into.tolist() == [5, 12, 21, 32]
    reduce_bytes("max", "int32", into.data_ptr(), [a.data_ptr(), b.data_ptr()], 8)
    assert into.tolist() == [5, 12, 21, 32]
    memory[0] = 100
    run("sum", "int64", [a, b], into)
    assert into.tolist() == [105, 8, 10, 12]


def test_what_is_kept_is_bounded():
    memory = torch.zeros(3 * engine._KEPT + 8, dtype=torch.int32)
    for i in range(2 * engine._KEPT):
        run("sum", "int32", [memory[i : i + 1], memory[i + 2 : i + 3]], memory[i + 1 : i + 2])
    assert 0 < len(engine._local.calls) <= engine._KEPT


def test_infinities_and_overflow_warn_nobody():
    operands = [torch.tensor([float("inf"), 3e38, 0.0, float("nan")]), torch.tensor([-float("inf"), 3e38, -0.0, 1.0])]
    into = torch.empty(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op in ("sum", "avg", "product", "min", "max"):
            run(op, "float32", operands, into)
            run(op, "bfloat16", [operand.bfloat16() for operand in operands], into[:2].view(torch.bfloat16))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int32"])
def test_modes_of_torch_do_not_matter(name):
    """What is made in inference mode is used outside of it, and the other way round."""
    operands = [values(name, 8, seed) for seed in range(3)]
    into, expected = torch.zeros_like(operands[0]), torch.zeros_like(operands[0])
    run("avg", name, operands, expected)
    engine._local.calls.clear()
    for _ in range(2):
        with torch.inference_mode():
            run("avg", name, operands, into)
        assert bits(into) == bits(expected)
        into.zero_()
        run("avg", name, operands, into)
        assert bits(into) == bits(expected)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        engine._local.calls.clear()
        run("avg", name, operands, into)
        assert bits(into) == bits(expected)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_threads_do_not_share_scratch_memory():
    numel, failures = 20_000, []

    def repeat(seed):
        operands = [values("bfloat16", numel, seed + i) for i in range(3)]
        into, expected = torch.empty_like(operands[0]), expected_floats("sum", "bfloat16", operands)
        for _ in range(20):
            into.zero_()
            run("sum", "bfloat16", operands, into)
            if bits(into) != bits(expected):
                failures.append(seed)

    threads = [threading.Thread(target=repeat, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
