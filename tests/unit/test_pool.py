"""The pool of a heap of one rank: what keeps a block, when it is handed out again, and what a tensor of it is like."""

import ctypes
import gc
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import rank_pool
from iris_pg.errors import ClosedError
from iris_pg.memory import pool as pool_module
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.pool import TensorPool
from iris_pg.memory.sharing import Links
from iris_pg.platforms import hip

F32 = torch.float32


@pytest.fixture
def pool():
    links = Links(dist.HashStore(), 0, 1, group="g", timeout_s=5)
    heap = SymmetricHeap(links, 1 << 20)
    made = TensorPool(heap)
    yield made
    heap.close()
    made.close()
    links.close()


def place(pool, numel=1000, dtype=F32):
    """Return where the next tensor would lie, which is dropped at once."""
    return pool.tensor(numel, dtype).data_ptr()


def typed_storage(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return tensor.storage()


def a_graph(tensor):
    factor = torch.ones(1000, requires_grad=True)
    return (tensor * factor).sum()


HOLDERS = dict(
    tensor=lambda tensor: tensor,
    view=lambda tensor: tensor[10:20].view(5, 2),
    of_another_type=lambda tensor: tensor.view(torch.uint8)[:1],
    parameter=torch.nn.Parameter,
    numpy=lambda tensor: tensor.numpy(),
    view_in_numpy=lambda tensor: tensor.numpy()[3:4],
    capsule=torch.utils.dlpack.to_dlpack,
    from_a_capsule=torch.from_dlpack,
    storage=lambda tensor: tensor.untyped_storage(),
    typed_storage=typed_storage,
    tensor_of_the_storage=lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    graph=a_graph,
    hook=lambda tensor: [tensor].copy,
)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_whoever_holds_memory_keeps_the_block(pool, hold):
    tensor = pool.tensor(1000, F32)
    first = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    assert first not in {place(pool) for _ in range(3)}
    assert pool.blocks == 2
    del held
    assert first in {place(pool) for _ in range(2)}
    assert pool.blocks == 2


def test_a_storage_that_was_only_looked_at_keeps_nothing(pool):
    tensor = pool.tensor(1000, F32)
    first = tensor.data_ptr()
    assert tensor.untyped_storage().data_ptr() == first
    storages = [tensor.untyped_storage() for _ in range(3)]
    view = tensor[5:]
    assert view.untyped_storage().nbytes() == 4000
    del storages
    assert place(pool) != first
    del tensor, view
    assert first in {place(pool) for _ in range(2)}
    assert pool.blocks == 2


def test_from_a_storage_to_a_tensor_and_back(pool):
    tensor = pool.tensor(1000, F32)
    first = tensor.data_ptr()
    for _ in range(3):
        storage = tensor.untyped_storage()
        del tensor
        assert place(pool) != first
        tensor = torch.empty(0).set_(storage)
        del storage
        assert place(pool) != first
    del tensor
    assert first in {place(pool) for _ in range(2)}


def test_the_block_that_was_handed_out_longest_ago_comes_first(pool):
    held = {i: pool.tensor(1000, F32) for i in range(4)}
    places = [held[i].data_ptr() for i in range(4)]
    for i in (2, 0, 3):
        del held[i]
    assert [place(pool) for _ in range(6)] == [places[i] for i in (0, 2, 3)] * 2
    del held[1]
    assert [place(pool) for _ in range(8)] == [places[i] for i in (1, 0, 2, 3)] * 2
    assert pool.blocks == 4
    assert pool.nbytes == 4 * 4096


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_tensor_is_a_new_one_for_autograd(pool, mode):
    for i in range(4):
        with mode():
            tensor = pool.tensor(6, F32)
            tensor.fill_(i)
        assert type(tensor) is torch.Tensor
        assert tensor._base is None and tensor.is_leaf and not tensor.requires_grad and not tensor.is_inference()
        assert tensor._version == 1  # it was filled
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == ((6,), (1,), 0)
        weight = torch.ones(6, requires_grad=True)
        tensor.copy_(weight * i)
        (tensor * tensor).sum().backward()
        assert weight.grad.tolist() == [2.0 * i * i] * 6
        del tensor, weight
    tensor = pool.tensor(6, F32).requires_grad_()
    tensor.sum().backward()
    tensor = tensor.detach().unsqueeze_(0).t_()
    assert tensor.shape == (6, 1)
    assert pool.blocks == 1


def test_a_change_of_what_is_saved_is_found(pool):
    weight = torch.ones(6, requires_grad=True)
    tensor = pool.tensor(6, F32)
    product = (tensor * weight).sum()
    other = pool.tensor(6, F32)
    other.fill_(1)  # a block of its own, with a version of its own
    product.backward()
    product = (tensor * weight).sum()
    tensor.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_types_and_lengths_share_a_block(pool):
    types = (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, F32, torch.int64, torch.complex128)
    for dtype in (*types, *types[::-1]):
        for nbytes in (16, 256, 48):
            tensor = pool.tensor(nbytes // dtype.itemsize, dtype)
            assert (tensor.dtype, tensor.nbytes) == (dtype, nbytes)
            assert tensor.untyped_storage().nbytes() == nbytes
            with pytest.raises(RuntimeError, match="not resizable"):
                tensor.resize_(tensor.numel() + 1)
            del tensor
    assert pool.blocks == 1
    assert pool.tensor(0, F32).shape == (0,)


def test_a_storage_that_has_left_the_heap_is_made_again(pool):
    tensor = pool.tensor(1000, F32).fill_(3)
    first = tensor.data_ptr()
    tensor.share_memory_()
    assert tensor.data_ptr() != first
    assert place(pool) != first
    del tensor
    assert first in {place(pool) for _ in range(2)}
    assert pool.blocks == 2


def test_the_collector_is_asked_before_a_block_is_made(pool):
    cycle = [pool.tensor(1000, F32)]
    first = cycle[0].data_ptr()
    cycle.append(cycle)
    with mock.patch.object(gc, "collect") as collect:
        pool.tensor(10, F32)  # there is none of its size, and nothing to collect
        collect.assert_not_called()
    del cycle
    assert place(pool) == first
    held = pool.tensor(1000, F32)
    with mock.patch.object(gc, "collect") as collect:
        assert place(pool) != held.data_ptr()
        collect.assert_not_called()  # it has just run
    assert pool.blocks == 3


def test_tensors_outlive_the_pool_and_keep_the_mapping(pool):
    gc.collect()
    idle, tensor = place(pool), pool.tensor(2000, F32)
    tensor.fill_(5)
    assert idle != tensor.data_ptr()
    before = rank_pool.shared_mappings()
    pool._heap.close()
    pool.close()
    pool.close()
    with pytest.raises(ClosedError, match="allocate_tensor: the heap is closed"):
        pool.tensor(1000, F32)
    assert rank_pool.shared_mappings() == before
    view = tensor[1:]
    del tensor
    assert view.unique().tolist() == [5]
    assert rank_pool.shared_mappings() == before
    del view
    assert before - rank_pool.shared_mappings()


def test_a_pool_that_is_closed_meanwhile_keeps_nothing(pool):
    """Another thread may close the group while this one is in a collective call."""
    memory = pool._memory

    def closes(offset, nbytes):
        found = memory(offset, nbytes)
        pool._heap.close()
        pool.close()
        return found

    before = rank_pool.shared_mappings()
    with mock.patch.object(pool, "_memory", closes):
        tensor = pool.tensor(1000, F32)
    tensor.fill_(1)
    del tensor
    assert not rank_pool.shared_mappings() - before
    assert not pool._blocks


def test_storages_of_other_platforms_are_idle_at_first():
    memory = (ctypes.c_uint8 * 64)(*range(64))
    made = hip.over(torch.device("cpu"), ctypes.addressof(memory), 64, memory)
    block = pool_module._Block(0, made)
    del made
    assert block.counts() == pool_module._IDLE
    tensor = block.tensor(F32)
    assert block.counts() != pool_module._IDLE
    del tensor
    assert block.counts() == pool_module._IDLE
