"""Backend "iris" through torch.distributed: every operation, layout, argument and form of Work."""

from __future__ import annotations

import datetime
import gc
import itertools
import time
import weakref

import pytest
import torch
import torch.distributed as dist

import iris_pg
import rank_pool
from iris_pg.errors import ArgumentError, DeadlineError, UnsupportedError

SMALL_CHUNKS = dict(chunk_bytes=256)
HOSTILE = dict(chunk_bytes=256, hostile_seed=3)


def numbers(rank: int, n: int, salt: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """[n] numbers that depend on rank, position and ``salt``, and fit a byte."""
    return ((torch.arange(n) * 5 + rank * 37 + salt * 11) % 127).to(dtype)


def raises(kind: type[Exception], pattern: str, call, *args, **keywords) -> str:
    """Check that a call raises ``kind``, exactly, with a message that matches; return the message."""
    with pytest.raises(kind, match=pattern) as caught:
        call(*args, **keywords)
    assert type(caught.value) is kind, repr(caught.value)
    return str(caught.value)


def done(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
        assert work.is_completed()


# Lists of tensors -----------------------------------------------------------------------------------------------------


def gathers_lists(rank, world):
    sizes_of_tests = [
        [5] * world,
        list(range(1, world + 1)),
        [100 * p for p in range(world)],
        [0 if p % 2 else 700 for p in range(world)],
        [0] * world,
        [3000 if p == 1 else 1 for p in range(world)],
    ]
    for salt, (sizes, asynchronous) in enumerate(itertools.product(sizes_of_tests, [False, True])):
        into = [torch.full((n,), -1, dtype=torch.int16) for n in sizes]
        done(dist.all_gather(into, numbers(rank, sizes[rank], salt, torch.int16), async_op=asynchronous))
        for p, tensor in enumerate(into):
            assert torch.equal(tensor, numbers(p, sizes[p], salt, torch.int16)), (sizes, p)

    # In place, and parts that do not lie in a row.
    flat = torch.zeros(world, 2, 8, dtype=torch.int32)
    flat[rank, 1] = numbers(rank, 8)
    dist.all_gather([flat[p, 1] for p in range(world)], flat[rank, 1])
    assert all(torch.equal(flat[p, 1], numbers(p, 8)) for p in range(world))
    assert not flat[:, 0].any()

    columns = torch.zeros(9, world, dtype=torch.int32)
    dist.all_gather(list(columns.unbind(1)), numbers(rank, 9))
    assert torch.equal(columns, torch.stack([numbers(p, 9) for p in range(world)], 1))

    coalesced = [[torch.zeros(4, dtype=torch.int32), torch.zeros(300, dtype=torch.int32)] for _ in range(world)]
    dist.distributed_c10d.all_gather_coalesced(coalesced, [numbers(rank, 4), numbers(rank, 300)])
    assert all(torch.equal(t, numbers(p, t.numel())) for p, row in enumerate(coalesced) for t in row)


@pytest.mark.parametrize("options", [None, SMALL_CHUNKS, HOSTILE])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather_into_a_list_takes_any_sizes(ranks, world, options):
    ranks(world).run(gathers_lists, options=options)


# Rooted operations ----------------------------------------------------------------------------------------------------


def broadcasts(rank, world):
    heap = dist.group.WORLD.transport.heap
    for salt, (root, n, in_heap, asynchronous) in enumerate(
        itertools.product(range(world), [0, 1, 33, 1000], [False, True], [False, True])
    ):
        tensor = heap.empty(n, dtype=torch.int32) if in_heap else torch.empty(n, dtype=torch.int32)
        tensor.copy_(numbers(rank, n, salt))
        done(dist.broadcast(tensor, root, async_op=asynchronous))
        assert torch.equal(tensor, numbers(root, n, salt)), (root, n, in_heap, asynchronous)
        if in_heap:
            heap.free(tensor)


@pytest.mark.parametrize("options", [None, SMALL_CHUNKS, HOSTILE])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_broadcast_from_every_root(ranks, world, options):
    ranks(world).run(broadcasts, options=options)


def gathers_and_scatters(rank, world):
    sizes_of_tests = [
        [6] * world,
        [p + 1 for p in range(world)],
        [0] * world,
        [0 if p == rank_with_none else 400 for rank_with_none in [world - 1] for p in range(world)],
        [1000 * (p % 2) for p in range(world)],
        # Only one rank's size changes from one to the next, so nothing of the one before may be used again.
        [5] + [7] * (world - 1),
        [9] + [7] * (world - 1),
        [9] * (world - 1) + [7],
        [9] * world,
    ]
    for salt, (root, sizes, asynchronous) in enumerate(itertools.product(range(world), sizes_of_tests, [False, True])):
        where = (root, sizes, asynchronous)
        into = [torch.full((n,), -1, dtype=torch.int32) for n in sizes] if rank == root else None
        done(dist.gather(numbers(rank, sizes[rank], salt), into, dst=root, async_op=asynchronous))
        for p, tensor in enumerate(into or ()):
            assert torch.equal(tensor, numbers(p, sizes[p], salt)), (where, p)

        output = torch.full((sizes[rank],), -1, dtype=torch.int32)
        parts = [numbers(root * 5 + p, sizes[p], salt) for p in range(world)] if rank == root else None
        done(dist.scatter(output, parts, src=root, async_op=asynchronous))
        assert torch.equal(output, numbers(root * 5 + rank, sizes[rank], salt)), where

    # In place, and parts with gaps.
    for root in range(world):
        rows = torch.zeros(world, 2, 5, dtype=torch.int32)
        rows[rank, 0] = numbers(rank, 5)
        dist.gather(rows[rank, 0], list(rows[:, 0].unbind()) if rank == root else None, dst=root)
        assert rank != root or torch.equal(rows[:, 0], torch.stack([numbers(p, 5) for p in range(world)]))
        columns = torch.stack([numbers(p, 5) for p in range(world)], 1)
        output = torch.zeros(5, 2, dtype=torch.int32)[:, 0]
        dist.scatter(output, list(columns.unbind(1)) if rank == root else None, src=root)
        assert torch.equal(output, numbers(rank, 5))
        columns = torch.zeros(5, world, dtype=torch.int32)
        dist.gather(numbers(rank, 5), list(columns.unbind(1)) if rank == root else None, dst=root)
        assert rank != root or torch.equal(columns, torch.stack([numbers(p, 5) for p in range(world)], 1))


@pytest.mark.parametrize("options", [None, SMALL_CHUNKS, HOSTILE])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gather_and_scatter_at_every_root_with_any_sizes(ranks, world, options):
    ranks(world).run(gathers_and_scatters, options=options)


def passes_objects(rank, world):
    mine = {"rank": rank, "text": "x" * (1 + 1000 * rank), "none": None}
    theirs = [{"rank": p, "text": "x" * (1 + 1000 * p), "none": None} for p in range(world)]
    everyone = [None] * world
    dist.all_gather_object(everyone, mine)
    assert everyone == theirs
    for root in range(world):
        everyone = [None] * world if rank == root else None
        dist.gather_object(mine, everyone, dst=root)
        assert everyone == (theirs if rank == root else None)
        objects = [root, mine] if rank == root else [None, None]
        dist.broadcast_object_list(objects, src=root)
        assert objects == [root, theirs[root]]
        one = [None]
        dist.scatter_object_list(one, theirs if rank == root else None, src=root)
        assert one == [theirs[rank]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_object_collectives(ranks, world):
    ranks(world).run(passes_objects)


def meets(rank, world, rounds):
    times = []
    for i in range(rounds):
        if rank == i % world:
            time.sleep(0.02)
        entered = time.monotonic()
        done(dist.barrier(async_op=i % 2 == 1))
        times.append((entered, time.monotonic()))
    for _ in range(500):
        dist.barrier()
    return times


@pytest.mark.parametrize("world", [1, 2, 4])
def test_no_rank_leaves_a_barrier_before_the_last_has_entered(ranks, world):
    times = ranks(world).run(meets, 8)
    for of_ranks in zip(*times, strict=True):
        assert max(entered for entered, _ in of_ranks) <= min(left for _, left in of_ranks)


# Layouts --------------------------------------------------------------------------------------------------------------


def gathers_layouts(rank, world, salt):
    def inputs(p):
        base = numbers(p, 2 * 3 * 4 * 5, salt, torch.float32).view(2, 3, 4, 5)
        yield "transposed", base.transpose(1, 3)
        yield "permuted", base.permute(3, 1, 0, 2)
        yield "every other", base[..., ::2]
        yield "every other row", base[:, :, ::2]
        yield "at an offset", base.view(-1)[7:29]
        yield "channels last", base.contiguous(memory_format=torch.channels_last)
        yield "expanded", base[:1, :1].expand(3, 2, 4, 5)
        yield "scalar expanded", base[0, 0, 0, 0].expand(6)
        yield "scalar", base[1, 1, 1, 1]
        yield "no elements", base[:, :0]
        yield "one element, odd stride", base[:1, :1, :1, :1]
        yield "a row of size 1", base[:, :1].transpose(0, 1)
        yield "conjugated", torch.complex(base, base + 1).conj()
        yield "imaginary part of a conjugate", torch.complex(base, base + 1).conj().imag[:1, :1, :1, :1]
        yield "negated view", torch._neg_view(base)
        yield "requires grad", base.clone().requires_grad_()

    expected_of = [dict(inputs(p)) for p in range(world)]
    for name, input in inputs(rank):
        # Through functional collectives and PG methods: dist.* itself refuses or converts some kinds of complex
        # tensors.
        group = dist.group.WORLD
        expected = torch.stack([e[name].detach().resolve_conj().resolve_neg() for e in expected_of])
        wide = torch.full((*expected.shape, 2), 99, dtype=expected.dtype)
        outputs = {
            "plain": torch.empty_like(expected, memory_format=torch.contiguous_format),
            "transposed": torch.empty(tuple(reversed(expected.shape)), dtype=expected.dtype).permute(
                *reversed(range(expected.dim()))
            ),
            "every other": wide[..., 0],
            "at an offset": torch.empty(expected.numel() + 3, dtype=expected.dtype)[3:].view(expected.shape),
            "neg view": torch._neg_view(torch.empty_like(expected, memory_format=torch.contiguous_format)),
        }
        for form, output in outputs.items():
            group.all_gather_single(output, input).wait()
            assert torch.equal(output.resolve_neg(), expected), (name, form)
        assert (wide[..., 1] == 99).all(), f"{name}: bytes between the elements of the output have changed"
        into = [torch.empty_like(expected[0], memory_format=torch.contiguous_format) for _ in range(world)]
        group.allgather([into], [input]).wait()
        assert torch.equal(torch.stack(into), expected), name


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_of_any_layout_are_gathered_right(ranks, world):
    ranks(world).run(gathers_layouts, 1, options=SMALL_CHUNKS)


def broadcasts_layouts(rank, world):
    def tensors(p):
        base = numbers(p, 2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
        yield "transposed", base.transpose(1, 3)
        yield "every other", base[..., ::2]
        yield "channels last", base.contiguous(memory_format=torch.channels_last)
        yield "conjugated", torch.complex(base, base + 1).conj()
        yield "negated view", torch._neg_view(base)
        yield "a parameter", torch.nn.Parameter(base.clone())
        yield "a parameter, channels last", torch.nn.Parameter(base.contiguous(memory_format=torch.channels_last))

    for root in range(world):
        expected = dict(tensors(root))
        for name, tensor in tensors(rank):
            dist.group.WORLD.broadcast(*_broadcast(tensor, root)).wait()
            assert torch.equal(tensor.resolve_conj().resolve_neg(), expected[name].resolve_conj().resolve_neg()), name
            assert torch.is_conj(tensor) == torch.is_conj(expected[name])
            if isinstance(tensor, torch.nn.Parameter):
                assert tensor.is_leaf
                assert tensor.grad_fn is None
        into = [torch.zeros(3, 4).t() for _ in range(world)] if rank == root else None
        dist.gather(torch.nn.Parameter(numbers(rank, 12, dtype=torch.float32).view(3, 4).t()), into, dst=root)
        for p, tensor in enumerate(into or ()):
            assert torch.equal(tensor, numbers(p, 12, dtype=torch.float32).view(3, 4).t())
        output = torch.nn.Parameter(torch.zeros(4, 3).t())
        parts = [numbers(p, 12, dtype=torch.float32).view(3, 4) for p in range(world)]
        dist.scatter(output, parts if rank == root else None, src=root)
        assert torch.equal(output, parts[rank])


def _broadcast(tensor, root):
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return [tensor], options


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_of_any_layout_are_broadcast_right(ranks, world):
    ranks(world).run(broadcasts_layouts, options=SMALL_CHUNKS)


def gathers_views_of_one_storage(rank, world):
    """Neighbours in one storage or heap block, at odd offsets, must not touch each other."""
    heap = dist.group.WORLD.transport.heap
    for storage in (torch.zeros(4000, dtype=torch.uint8), heap.empty(4000, dtype=torch.uint8)):
        storage.fill_(200)
        n = 37
        views = [storage[start : start + world * n] for start in (1, 1 + world * n, 1003, 2001)]
        for i, view in enumerate(views):
            dist.all_gather_into_tensor(view, numbers(rank, n, i, torch.uint8))
        for i, view in enumerate(views):
            assert torch.equal(view, torch.cat([numbers(p, n, i, torch.uint8) for p in range(world)]))
        for view in views:
            view.fill_(200)
        assert (storage == 200).all()


@pytest.mark.parametrize("world", [2, 4])
def test_views_at_odd_offsets_of_one_storage(ranks, world):
    ranks(world).run(gathers_views_of_one_storage)


# Wrong arguments ------------------------------------------------------------------------------------------------------


def gives_wrong_arguments(rank, world):
    group = dist.group.WORLD
    gather, into = dist.all_gather_into_tensor, torch.zeros(world * 4)
    ones = torch.ones(4)
    before = dist.group.WORLD._get_sequence_number_for_group()
    raises(ArgumentError, rf"output .*{world * 4 + 1} elements.*{world} x 4", gather, torch.zeros(world * 4 + 1), ones)
    raises(ArgumentError, "0 elements", gather, torch.zeros(0), ones)
    raises(
        ArgumentError, "dtype torch.float64 and the input torch.float32", group.all_gather_single, into.double(), ones
    )
    raises(ArgumentError, "share memory", gather, torch.zeros(1).expand(world * 4), ones)
    raises(
        ArgumentError, "input has layout torch.sparse_coo.*to_dense", group.all_gather_single, into, ones.to_sparse()
    )
    raises(UnsupportedError, "output is on meta", group.all_gather_single, into.to("meta"), ones)
    raises(ArgumentError, "input is list", group.all_gather_single, into, [1.0])
    if world > 1:
        raises(ArgumentError, "share memory", gather, torch.zeros(4).expand(world, 4), ones)
        raises(ArgumentError, "share memory", gather, torch.zeros(world * 4 + 9).as_strided((world, 4), (2, 1)), ones)
        other = (rank + 1) % world * 4
        raises(ArgumentError, "overlaps the output at byte", gather, into, into[other : other + 4])
        if rank + 1 < world:
            raises(ArgumentError, "overlaps the output at byte", gather, into, into[rank * 4 + 1 : rank * 4 + 5])

        peer = (rank + 1) % world
        raises(
            ArgumentError,
            f"output {peer} and input 0 share",
            group.allgather,
            [list(into.view(world, 4))],
            [into[other : other + 4]],
        )

    halves = [torch.zeros(4) for _ in range(world)]
    raises(ArgumentError, rf"{world - 1} tensors.*{world} ranks", group.allgather, [halves[1:]], [ones])
    raises(
        ArgumentError,
        r"output\[\d\] has 4 elements and this rank's input 5",
        group.allgather,
        [halves],
        [torch.ones(5)],
    )
    raises(ArgumentError, "must be the same", group.allgather, [halves], [torch.ones(4, dtype=torch.int32)])
    shared = [torch.zeros(1).expand(4), *halves[1:]]
    raises(ArgumentError, r"output\[0\].*share memory", group.allgather, [shared], [ones])
    raises(ArgumentError, "2 inputs", group.allgather, [halves], [ones, ones])
    raises(ArgumentError, "1 outputs and 2 inputs", group.all_gather_single_coalesced, [into], [ones, ones])

    raises(ArgumentError, rf"src={world} is not a rank", group.broadcast, *_broadcast(ones, world))
    raises(ArgumentError, "2 tensors; it takes one", group.broadcast, [ones, ones], _broadcast(ones, 0)[1])
    if rank != 0:
        raises(ArgumentError, "share memory", dist.broadcast, torch.zeros(1).expand(4), 0)
    else:
        parts = [torch.zeros(4) for _ in range(world)]
        raises(ArgumentError, r"gather_list\[0\] has 4 elements", dist.gather, torch.ones(5), parts, dst=0)
        raises(ArgumentError, r"scatter_list\[0\] has 4 elements", dist.scatter, torch.ones(5), parts, src=0)
        mixed = [torch.zeros(4, dtype=torch.int32) for _ in range(world)]
        options = dist.ScatterOptions()
        options.rootRank = 0
        raises(ArgumentError, r"scatter_list\[0\] has dtype", group.scatter, [ones], [mixed], options)
        raises(ArgumentError, "share memory", dist.scatter, torch.zeros(1).expand(4), parts, src=0)

    assert not into.any(), "a refused call has written"
    assert group._get_sequence_number_for_group() == before, "a refused call counts as an operation"
    dist.all_gather_into_tensor(into, ones * rank)  # and the group works as before
    assert torch.equal(into, torch.arange(world).repeat_interleave(4).float())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_wrong_arguments_are_refused_before_anything_moves(ranks, world):
    ranks(world).run(gives_wrong_arguments)


MISSING = ["merge_remote_group", "mergeRemoteGroup"]


def calls_what_is_missing(rank, world):
    return [raises(UnsupportedError, "does not exist in backend iris", getattr(dist.group.WORLD, n)) for n in MISSING]


def test_an_operation_that_does_not_exist_names_the_alternatives(ranks):
    for rank, texts in enumerate(ranks(2).run(calls_what_is_missing)):
        for text in texts:
            assert "init_process_group" in text
            assert f"[group=0 rank={rank}]" in text


# Work -----------------------------------------------------------------------------------------------------------------


def uses_work(rank, world):
    output = torch.zeros(world * 100, dtype=torch.int32)
    work = dist.all_gather_into_tensor(output, numbers(rank, 100), async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait() is True
    assert work.wait() is True  # again
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result() == [output]
    work.synchronize()
    work.block_current_stream()
    expected = torch.cat([numbers(p, 100) for p in range(world)])
    assert torch.equal(output, expected)
    assert torch.equal(work.get_future().wait()[0], expected)
    assert work.get_future() is work.get_future()

    # Futures: before and after the work is done, chained, and never waited for by hand.
    seen = []
    output.zero_()
    work = dist.all_gather_into_tensor(output, numbers(rank, 100, 1), async_op=True)
    chained = work.get_future().then(lambda f: seen.append(f.value()[0].clone()) or "then")
    assert chained.wait() == "then"
    assert work.is_completed()
    assert torch.equal(seen[0], torch.cat([numbers(p, 100, 1) for p in range(world)]))
    assert work.get_future().then(lambda f: f.value()[0].sum().item()).wait() == output.sum().item()

    # is_completed becomes true by itself, and a timeout given to wait() ends only the wait.
    if world > 1:
        if rank == 0:
            work = dist.all_gather_into_tensor(output, numbers(rank, 100, 2), async_op=True)
            assert not work.is_completed()
            raises(DeadlineError, r"0\.05 s given to wait", work.wait, datetime.timedelta(seconds=0.05))
            rank_pool.current_store.set("has waited", "")
        else:
            rank_pool.current_store.wait(["has waited"])
            work = dist.all_gather_into_tensor(output, numbers(rank, 100, 2), async_op=True)
        deadline = time.monotonic() + 20
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert work.is_success()
        assert torch.equal(output, torch.cat([numbers(p, 100, 2) for p in range(world)]))

    # A callback may begin the next operation.
    again = torch.zeros(world, dtype=torch.int32)
    first = dist.all_gather_into_tensor(output, numbers(rank, 100, 3), async_op=True)
    second = first.get_future().then(
        lambda f: dist.all_gather_into_tensor(again, f.value()[0][rank * 100 : rank * 100 + 1].clone())
    )
    second.wait()
    assert torch.equal(again, torch.stack([numbers(p, 1, 3)[0] for p in range(world)]))

    # Many at a time, waited for in another order.
    outputs = [torch.zeros(world * n, dtype=torch.int32) for n in range(1, 40)]
    works = [
        dist.all_gather_into_tensor(o, numbers(rank, n, n), async_op=True)
        for n, o in zip(range(1, 40), outputs, strict=True)
    ]
    for i in [*range(20, 39), *range(20)] if rank else range(39):
        works[i].wait()
        assert torch.equal(outputs[i], torch.cat([numbers(p, i + 1, i + 1) for p in range(world)]))
    work = dist.barrier(async_op=True)
    work.wait()
    assert work.get_future().wait() is not None


@pytest.mark.parametrize("options", [None, HOSTILE])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_work(ranks, world, options):
    ranks(world).run(uses_work, options=options)


def frees_tensors(rank, world):
    """Drop every reference right after an asynchronous operation began, and take memory of the same size at once."""
    n = 5000
    for i in range(100):
        output = torch.empty(world * n, dtype=torch.int32)
        source = numbers(rank, 2 * n, i).view(n, 2)[:, 0]
        expected = torch.cat([numbers(p, 2 * n, i).view(n, 2)[:, 0] for p in range(world)])
        freed = weakref.ref(source)
        if i % 3 == 1 and rank == world - 1:
            time.sleep(0.002)
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        del source
        others = [torch.full((n,), -7, dtype=torch.int32) for _ in range(4)]
        if i % 2:
            future = work.get_future()
            del work, output
            gc.collect(0)
            output = future.wait()[0]
        else:
            work.wait()
        assert torch.equal(output, expected), i
        assert all((t == -7).all() for t in others)
    work = future = output = None
    gc.collect()
    assert freed() is None, "the work keeps its tensors after it is done"


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_may_be_dropped_while_an_operation_is_under_way(ranks, world):
    ranks(world).run(frees_tensors)


def changes_the_input(rank, world):
    source, output = torch.zeros(3000, dtype=torch.int32), torch.zeros(world * 3000, dtype=torch.int32)
    heap_output = dist.group.WORLD.transport.heap.empty(world * 3000, dtype=torch.int32)
    for i in range(60):
        into = heap_output if i % 2 else output
        source.copy_(numbers(rank, 3000, i))
        if rank == i % world:
            time.sleep(0.003)
        dist.all_gather_into_tensor(into, source, async_op=True).wait()
        source.fill_(-1)
        expected = torch.cat([numbers(p, 3000, i) for p in range(world)])
        time.sleep(0.001 * (rank == (i + 1) % world))
        assert torch.equal(into, expected), i
        into.fill_(-2)  # and a fast peer must not write its next data before this


@pytest.mark.parametrize("options", [None, HOSTILE])
@pytest.mark.parametrize("world", [2, 3])
def test_the_input_may_change_and_the_output_be_used_right_after_wait(ranks, world, options):
    ranks(world).run(changes_the_input, options=options)


def coalesces(rank, world):
    for asynchronous, device in itertools.product([False, True], [None, torch.device("cpu")]):
        sizes = [1, 0, 300, 77]
        inputs = [numbers(rank, n, n) for n in sizes]
        outputs = [torch.full((world * n,), -1, dtype=torch.int32) for n in sizes]
        with dist.distributed_c10d._coalescing_manager(device=device, async_ops=asynchronous) as manager:
            for output, input in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, input)
        if asynchronous:
            manager.wait()
        for output, n in zip(outputs, sizes, strict=True):
            assert torch.equal(output, torch.cat([numbers(p, n, n) for p in range(world)])), (asynchronous, device, n)
        dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_coalescing(ranks, world):
    ranks(world).run(coalesces)


def reads_properties(rank, world):
    group = dist.group.WORLD
    assert dist.get_backend() == "iris"
    assert group.name() == group.getBackendName() == "iris"
    assert (group.rank(), group.size(), dist.get_rank(), dist.get_world_size()) == (rank, world, rank, world)
    assert isinstance(group.group_name, str)
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group._device_types == [torch.device("cpu")]
    assert isinstance(group.options, iris_pg.Options)
    assert dist.distributed_c10d._get_process_group_store(group) is not None
    before = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 1


def test_properties_of_a_group(ranks):
    ranks(2).run(reads_properties)
