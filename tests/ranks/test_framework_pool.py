"""Tensors of a group's pool: at the same place on every rank, given back when nobody uses them, never mixed up."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fake_gpu
import rank_pool
from iris_pg.errors import ClosedError, HeapExhaustedError, IrisError, MismatchError
from iris_pg.memory.pool import log

CPU = torch.device("cpu")


def make(numel, dtype=torch.float32):
    return dist.group.WORLD.allocate_tensor(numel, dtype=dtype, device=CPU)


def offset(tensor):
    return tensor.untyped_storage().data_ptr() - dist.group.WORLD.heap.base


def reuses_blocks(rank, world):
    group = dist.group.WORLD
    pool = group.pool
    tensor = make(1000)
    assert tensor.shape == (1000,)
    assert group.heap.is_symmetric(tensor)
    assert pool.nbytes == 4096
    first = offset(tensor)
    view = tensor[10:20].view(5, 2)
    del tensor
    other = make(1000)  # the view still uses the first block
    assert offset(other) != first
    view.fill_(3)
    other.fill_(4)
    assert view.sum().item() == 30
    del view
    assert offset(make(1000)) == first
    del other
    seen = []
    for _ in range(6):  # each is dropped before the next is made: the blocks take turns
        seen.append(offset(make(1000)))
    assert seen[::2] == [seen[0]] * 3
    assert len(set(seen)) == 2
    # What takes as many bytes, rounded up, shares blocks; what does not, does not.
    assert offset(make(2000, torch.bfloat16)) in seen
    assert offset(make(1023)) in seen
    assert offset(make(500)) not in seen
    assert make(0).numel() == 0
    assert pool.blocks == 3
    made = make(1000)
    dist.all_gather_into_tensor(made, torch.full((1000 // world,), float(rank)))
    assert made.view(world, -1)[:, 0].tolist() == list(range(world))
    seen.append(offset(made))
    return seen


def test_a_block_is_used_again_when_the_last_view_is_gone(ranks):
    one, other = ranks(2).run(reuses_blocks)
    assert one == other


def gathers_in_the_background(rank, world):
    """The engine's thread lets go of the tensors, at a time of its own."""
    n, pool = 3000, dist.group.WORLD.pool
    for i in range(60):
        output = make(world * n, torch.int64)
        work = dist.all_gather_into_tensor(output, torch.full((n,), i * world + rank), async_op=True)
        if i % 2:
            work.wait()
            assert output.view(world, n)[:, -1].tolist() == [i * world + p for p in range(world)]
        else:
            del output  # the operation keeps it
            work.wait()
    return pool.blocks


def test_operations_keep_their_tensors(ranks):
    for blocks in ranks(2).run(gathers_in_the_background):
        assert blocks <= 4


def holds_on_one_rank(rank, world):
    """Rank 1 holds a tensor for longer than rank 0: the next ones lie at different places, which is found out."""
    held = [make(256) for _ in range(3)]
    del held[rank]
    dist.barrier()
    output = make(256)
    with pytest.raises(IrisError) as caught:
        dist.all_gather_into_tensor(output, torch.ones(256 // world))
        dist.barrier()
    return type(caught.value), str(caught.value), offset(output)


def test_ranks_that_differ_are_an_error_and_no_byte_goes_wrong(ranks):
    one, other = ranks(2).run(holds_on_one_rank)
    assert one[2] != other[2]
    for kind, text, _ in (one, other):
        assert kind is MismatchError
        assert "ranks are in different operations" in text


def exhausts(rank, world):
    mapped = rank_pool.shared_mappings()
    held = [make(1 << 16)]
    with pytest.raises(HeapExhaustedError, match="raise heap_bytes"):
        make(1 << 20)
    held.append(make(1 << 16))
    dist.barrier()
    assert held[0].numel() == held[1].numel()
    group = dist.group.WORLD
    dist.destroy_process_group()
    held[0].fill_(1)  # it outlives its group
    held.clear()
    assert not rank_pool.shared_mappings() - mapped  # though the group's object is still there, and its pool
    with pytest.raises(ClosedError, match="the heap is closed"):
        group.allocate_tensor(1 << 16, dtype=torch.float32, device=CPU)


def test_a_full_heap_and_a_closed_one(ranks):
    ranks(2).run(exhausts, options=dict(heap_bytes=1 << 20))


def makes_room(rank, world):
    """Of blocks of a quarter of the heap three are idle on all ranks, and one on rank 0 alone."""
    heap, pool, quarter = dist.group.WORLD.heap, dist.group.WORLD.pool, 1 << 16
    held = [make(quarter) for _ in range(4)]
    first = offset(held[0])
    held[0].fill_(rank)
    view = held[0][:10] if rank else None
    held.clear()
    whole = make(3 * quarter)  # where the others were
    whole.fill_(7)
    assert pool.blocks == 2 and pool.nbytes == heap.limit_bytes
    if rank:
        assert torch.equal(view, torch.ones(10)) and offset(whole) > first
    with pytest.raises(HeapExhaustedError, match="raise heap_bytes"):
        make(2 * quarter)  # nothing is idle on both
    view = None
    dist.barrier()
    assert offset(make(quarter)) == first  # which was kept
    whole = None
    assert make(2 * quarter).numel() == 2 * quarter
    dist.barrier()
    return pool.blocks, heap._allocator.used_bytes


def test_a_full_heap_gets_back_what_is_idle_on_all_ranks(ranks):
    assert ranks(2).run(makes_room, options=dict(heap_bytes=1 << 20)) == [(1, 2 << 18)] * 2


def agrees_on_what_to_do(rank, world):
    """Rank 0 alone has an idle block of another stream: it makes room as rank 1 has to."""
    pool, current, quarter = dist.group.WORLD.pool, [1], 1 << 16
    pool._stream = lambda: current[0]
    first, other = make(quarter), make(2 * quarter)
    places = offset(first), offset(other)
    if rank == 0:
        first = None
    other, current[0] = None, 2
    with mock.patch.object(log, "warning") as warning:
        assert offset(make(quarter)) == places[1]
    warning.assert_not_called()
    dist.barrier()


def test_ranks_agree_on_how_to_make_room(ranks):
    ranks(2).run(agrees_on_what_to_do, options=dict(heap_bytes=3 << 18))


def keeps_streams_apart(rank, world):
    """As on a GPU, where a stream is what orders the uses of a block."""
    heap, pool, current = dist.group.WORLD.heap, dist.group.WORLD.pool, [1]
    pool._stream = lambda: current[0]

    def on(stream):
        current[0] = stream
        return offset(make(1 << 16))

    first, second = on(1), on(2)
    assert first != second
    assert [on(stream) for stream in (2, 1, 1, 2)] == [second, first, first, second]
    assert pool.blocks == 2
    current[0] = 1
    held = [make(1 << 16), make(1 << 16)]  # of a heap that has room for three
    assert [offset(t) for t in held].count(first) == 1
    with mock.patch.object(log, "warning") as warning:
        third = make(1 << 16)  # no other is left
        assert offset(third) == second
        with pytest.raises(HeapExhaustedError):
            on(2)
        del third
        assert on(1) == second  # it stays with who got it
        with mock.patch.object(heap, "allocate") as allocate:
            assert [on(stream) for stream in (2, 1)] == [second, second]
        allocate.assert_not_called()  # that the heap is full is known
    (call,) = warning.call_args_list
    assert "from stream to stream" in call.args[0] and "raise heap_bytes" in str(call.args[1])
    dist.barrier()


def test_a_block_stays_with_its_stream(ranks):
    ranks(2).run(keeps_streams_apart, options=dict(heap_bytes=3 << 18))


def takes_blocks_of_a_gpu(rank, world):
    with fake_gpu.pretend():
        group, device = dist.group.WORLD, fake_gpu.DEVICE
        assert not group.supports_tensor_alloc(device)  # torch has none
        heap = group._on(device).heap
        assert group.supports_tensor_alloc(device)
        streams = fake_gpu.Stream.current, fake_gpu.Stream()

        def on(stream, device=device):
            with fake_gpu.current(stream):
                tensor = group.allocate_tensor(1000, dtype=torch.float32, device=device)
            assert heap.offset_of(tensor.data_ptr(), 4000) is not None
            return tensor.data_ptr()

        first, second = (on(stream) for stream in streams)
        assert first != second
        assert [on(stream) for stream in streams] == [first, second]
        assert on(streams[1], "cuda") == second
        assert group._device_pool.blocks == 2
        assert "pool" not in vars(group)


def test_a_group_of_cuda_tensors_has_a_pool_on_its_gpu(ranks):
    ranks(2).run(takes_blocks_of_a_gpu, options=dict(engine="sdma"))


def allocates_from_threads(rank, world):
    """All ranks make tensors of different sizes in different threads, and drop them in others."""
    failures, kept = [], [[] for _ in range(2)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]  # the ranks' order of calls is one

    def work_on(number):
        try:
            for i in range(40):
                turns[number].acquire()
                tensor = make(100 + 400 * number)
                turns[1 - number].release()
                tensor.fill_(i)
                kept[1 - number].append(tensor)
                del tensor
                if len(kept[number]) > 2:
                    assert len(set(kept[number].pop(0).tolist())) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work_on, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return dist.group.WORLD.pool.blocks


def test_tensors_made_and_dropped_in_threads(ranks):
    (blocks,) = ranks(1).run(allocates_from_threads)
    assert blocks <= 12
