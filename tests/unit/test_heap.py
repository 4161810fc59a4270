"""The allocator of offsets, and the symmetric heap on one rank. Heaps of several ranks: tests/ranks."""

import gc
import io
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rank_pool
from iris_pg.errors import ArgumentError, ClosedError, HeapExhaustedError
from iris_pg.flags import HISTORY, ControlPage
from iris_pg.memory.allocator import ALIGNMENT, Allocator, align_up
from iris_pg.memory.heap import SymmetricHeap, extent_bytes
from iris_pg.memory.sharing import Links
from iris_pg.platforms import cpu

# The allocator --------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, ALIGNMENT - 1, ALIGNMENT, ALIGNMENT + 1]))
CALLS = st.lists(
    st.one_of(st.tuples(st.just("allocate"), SIZES), st.tuples(st.just("free"), st.integers(0, 50))), max_size=60
)


def play(calls):
    """Return the allocator after ``calls``, and the blocks that are in use: offset -> bytes."""
    allocator, used = Allocator(), {}
    for what, number in calls:
        if what == "allocate":
            shortfall = allocator.shortfall(number)
            if shortfall:
                assert shortfall % ALIGNMENT == 0
                with pytest.raises(ArgumentError, match="no block of"):
                    allocator.allocate(number)
                allocator.grow(shortfall)
                assert allocator.shortfall(number) == 0
            used[allocator.allocate(number)] = number
        elif used:
            offset = sorted(used)[number % len(used)]
            del used[offset]
            allocator.free(offset)
    return allocator, used


@given(CALLS)
def test_blocks_are_aligned_and_never_overlap(calls):
    allocator, used = play(calls)
    end = 0
    for offset, nbytes in sorted(used.items()):
        assert offset % ALIGNMENT == 0
        assert offset >= end
        end = offset + max(nbytes, 1)
    assert end <= allocator.capacity
    assert allocator.used_bytes == sum(align_up(max(n, 1)) for n in used.values())


@given(CALLS)
def test_the_same_calls_give_the_same_offsets(calls):
    (one, used), (two, used_too) = play(calls), play(calls)
    assert used == used_too
    assert list(used) == list(used_too)
    assert one.digest() == two.digest()


@given(CALLS, CALLS)
def test_other_calls_give_another_digest(calls, others):
    (one, _), (two, _) = play(calls), play(others)
    if one._free != two._free or one._used != two._used:
        assert one.digest() != two.digest()


@given(CALLS, st.randoms())
def test_free_blocks_become_one_again(calls, random):
    allocator, used = play(calls)
    offsets = list(used)
    random.shuffle(offsets)
    for offset in offsets:
        allocator.free(offset)
    assert allocator.used_bytes == 0
    if allocator.capacity:
        assert allocator.shortfall(allocator.capacity) == 0
        assert allocator.allocate(allocator.capacity) == 0


def test_freeing_what_is_not_in_use():
    allocator = Allocator()
    allocator.grow(4 * ALIGNMENT)
    offset = allocator.allocate(2 * ALIGNMENT)
    for wrong in (offset + ALIGNMENT, 1, -ALIGNMENT, 99 * ALIGNMENT):
        with pytest.raises(
            ArgumentError, match=f"no block in use starts at offset {wrong}; free.. takes what allocate"
        ):
            allocator.free(wrong)
    allocator.free(offset)
    with pytest.raises(ArgumentError, match="no block in use"):
        allocator.free(offset)


# The control page -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", range(1, 9))
def test_flags_do_not_share_cache_lines_and_know_their_names(world):
    page = ControlPage(world)
    flags = {}
    for slot in range(2):
        for peer in range(world):
            for kind in ("ready", "free", "filled", "drained"):
                flags[getattr(page, kind)(slot, peer)] = (f"{kind}[{slot}] from rank {peer}", peer)
            flags[page.barrier(slot, peer)] = (f"barrier[{slot}] from rank {peer}", peer)
    for peer in range(world):
        flags[page.enter(peer)] = (f"enter from rank {peer}", peer)
        flags[page.done(peer)] = (f"done from rank {peer}", peer)
    assert len(flags) == 12 * world
    for offset, name in flags.items():
        assert offset % 64 == 0
        assert page.name(offset) == name
        assert page.name(offset + 4) is None
    words = [page.sequence, *(page.failure(peer) for peer in range(world))]
    words += [page.history + 8 * i for i in range(HISTORY)]
    words += [page.sizes(peer, i) + 8 * k for peer in range(world) for i in range(HISTORY) for k in range(3)]
    words.append(page.description)
    assert not set(words) & set(flags)
    assert sorted(set(words)) == sorted(words)
    assert all(page.name(word) is None and word % 8 == 0 for word in words)
    assert len(set(words)) == len(words)
    assert all(page.sizes(0, i + HISTORY) == page.sizes(0, i) for i in range(HISTORY))
    assert max(*words, *flags) < page.nbytes
    assert page.nbytes % 4096 == 0
    credits = {offset for offset, (name, _) in flags.items() if name.startswith(("free", "drained"))}
    assert page.initial() == dict.fromkeys(credits, 1)


# The heap -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def new_heap():
    """Return ``new_heap(limit_bytes)``: a heap of a group of one rank; closed after the test."""
    made = []

    def new_heap(limit_bytes=1 << 20, areas=None):
        links = Links(dist.HashStore(), 0, 1, group="g", timeout_s=5)
        heap = SymmetricHeap(links, limit_bytes, areas)
        made.append((heap, links))
        return heap

    yield new_heap
    for heap, links in made:
        heap.close()
        links.close()


def test_tensors_are_zero_at_first_writable_and_apart(new_heap):
    heap = new_heap()
    tensors = [
        heap.empty(*shape, dtype=dtype)
        for shape in ((3,), (2, 5), (), (0,), (7, 0, 2))
        for dtype in (torch.bool, torch.float64)
    ]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert not tensor.any(), "fresh memory is zero"
        tensor.fill_(i % 2)
        assert heap.is_symmetric(tensor)
    for i, tensor in enumerate(tensors):
        assert (tensor == i % 2).all()
    assert len({heap.offset_of(t.data_ptr(), 1) for t in tensors if t.numel()}) == sum(t.numel() > 0 for t in tensors)


def test_shapes_and_dtypes(new_heap):
    heap = new_heap()
    assert (
        heap.empty(2, 3).shape
        == heap.empty((2, 3)).shape
        == heap.empty([2, 3]).shape
        == heap.empty(torch.Size([2, 3])).shape
        == (2, 3)
    )
    assert heap.empty(()).shape == heap.empty().shape == ()
    assert heap.empty(3).dtype == torch.get_default_dtype()
    assert heap.empty(3, dtype=torch.float8_e5m2).dtype == torch.float8_e5m2
    assert heap.empty(3, dtype=torch.complex128).element_size() == 16
    for wrong in ((-1,), (2, -3), (1.5,), ("3",)):
        with pytest.raises(ArgumentError, match="it takes non-negative integers"):
            heap.empty(*wrong)
    before = heap.empty(1).data_ptr()
    assert heap.empty(1).data_ptr() - before == ALIGNMENT, "what was refused takes no memory"


def test_a_heap_that_is_full_says_how_to_make_it_larger(new_heap):
    heap = new_heap(limit_bytes=4096)
    tensor = heap.empty(3000, dtype=torch.uint8)
    with pytest.raises(HeapExhaustedError) as caught:
        heap.empty(2000, dtype=torch.uint8)
    for part in (
        "2000 bytes do not fit",
        "3072 of 4096 bytes are in use",
        "heap.free",
        "heap_bytes",
        "IRIS_PG_HEAP_BYTES",
        "[group=g rank=0]",
    ):
        assert part in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    heap.empty(1000, dtype=torch.uint8)
    heap.free(tensor)
    heap.empty(3072, dtype=torch.uint8)
    with pytest.raises(HeapExhaustedError):
        heap.empty(1 << 50, dtype=torch.uint8)


def test_memory_is_used_again(new_heap):
    heap = new_heap(limit_bytes=1 << 16)
    places = set()
    for i in range(200):
        tensor = heap.empty(30_000 + i, dtype=torch.uint8)
        places.add(tensor.data_ptr())
        heap.free(tensor)
    assert len(places) == 1


def test_growing_keeps_addresses_and_contents(new_heap):
    heap = new_heap(limit_bytes=200 << 20)
    first = heap.empty(1000, dtype=torch.int64).fill_(7)
    base, place = heap.base, first.data_ptr()
    others = [heap.empty(30 << 20, dtype=torch.uint8) for _ in range(4)]
    assert (heap.base, first.data_ptr()) == (base, place)
    others[3][-1] = 5
    assert first.sum() == 7000
    assert heap.translate(others[3].data_ptr(), 0, 0) == others[3].data_ptr()


def test_freeing(new_heap):
    heap, other = new_heap(), new_heap()
    tensor = heap.empty(100)
    with pytest.raises(ArgumentError, match="free: the tensor is not in the heap of this group"):
        heap.free(torch.zeros(4))
    with pytest.raises(ArgumentError, match="not in the heap of this group"):
        other.free(tensor)
    with pytest.raises(ArgumentError, match="no block in use starts at"):
        heap.free(tensor[1:])
    heap.free(tensor.view(10, 10))
    with pytest.raises(ArgumentError, match="takes what allocate.. returned, once"):
        heap.free(tensor)
    offset = heap.allocate(300)
    heap.free(offset)
    with pytest.raises(ArgumentError, match="once"):
        heap.free(offset)
    empty = heap.empty(0)
    heap.free(empty)
    with pytest.raises(ArgumentError, match="once"):
        heap.free(empty)


def test_what_is_symmetric(new_heap):
    heap, other = new_heap(areas=dict(staging=4096)), new_heap()
    tensor = heap.empty(8, 8)
    for view in (tensor, tensor.t(), tensor[2:, ::3], tensor[0, 0], tensor[:0]):
        assert heap.is_symmetric(view)
        assert not other.is_symmetric(view)
    assert not heap.is_symmetric(torch.zeros(4))
    assert not heap.is_symmetric(torch.zeros(4).to_sparse())
    assert not heap.is_symmetric(torch.zeros(4, device="meta"))
    assert not heap.is_symmetric(heap.bytes_at(0, heap.areas["staging"], 4096)), (
        "the group's own memory is not for users"
    )
    assert not heap.is_symmetric(heap.bytes_at(0, 0, 8))
    offset = heap.offset_of(tensor.data_ptr(), 256)
    assert offset is not None
    assert heap.bytes_at(0, offset, 4).data_ptr() == tensor.data_ptr()
    assert heap.offset_of(tensor.data_ptr(), 1 << 40) is None
    assert heap.offset_of(heap.base - 8, 4) is None


def test_extent_counts_the_gaps():
    assert extent_bytes(torch.zeros(3, 4)) == 48
    assert extent_bytes(torch.zeros(3, 4).t()) == 48
    assert extent_bytes(torch.zeros(3, 4)[:, 0]) == 36
    assert extent_bytes(torch.zeros(9)[::2]) == 36
    assert extent_bytes(torch.zeros(1).expand(5)) == 4
    assert extent_bytes(torch.zeros(3, 0)) == 0
    assert extent_bytes(torch.zeros((), dtype=torch.int16)) == 2


def test_translate(new_heap):
    heap = new_heap()
    tensor = heap.empty(4)
    assert heap.translate(tensor.data_ptr(), 0, 0) == tensor.data_ptr()
    assert heap.translate(heap.base, 0, 0) == heap.base
    for address in (heap.base - 1, heap.base + (1 << 40), 0):
        with pytest.raises(ArgumentError, match=r"translate: 0x[0-9a-f]+ is not in rank 0's segment \[0x|-0x1 is not"):
            heap.translate(address, 0, 0)
    for ranks in ((1, 0), (0, 1), (-1, 0)):
        with pytest.raises(ArgumentError, match=r"translate: (from|to)_rank=-?1 is outside 0\.\.0"):
            heap.translate(tensor.data_ptr(), *ranks)


def test_closing(new_heap):
    gc.collect()
    before = rank_pool.shared_mappings()
    heap = new_heap()
    tensor = heap.empty(1000, dtype=torch.int64)
    tensor.copy_(torch.arange(1000))
    heap.close()
    heap.close()
    gc.collect()
    assert torch.equal(tensor, torch.arange(1000)), "a tensor stays readable"
    tensor[0] = 5
    for call, *arguments in ((heap.empty, 1), (heap.allocate, 1), (heap.free, tensor)):
        with pytest.raises(ClosedError, match="the heap is closed"):
            call(*arguments)
    view = tensor[10:20]
    del tensor, arguments
    gc.collect()
    assert view.tolist() == list(range(10, 20))
    assert rank_pool.shared_mappings() - before
    del view
    gc.collect()
    assert not rank_pool.shared_mappings() - before, "the last tensor takes the mapping with it"


def test_thousands_of_tensors_cost_no_descriptor_and_no_mapping(new_heap):
    heap = new_heap(limit_bytes=64 << 20)
    kept = [heap.empty(1 << 20, dtype=torch.uint8) for _ in range(4)]
    before = rank_pool.descriptors() + rank_pool.shared_mappings()
    kept += [heap.empty(100) for _ in range(3000)]
    assert rank_pool.descriptors() + rank_pool.shared_mappings() == before


# The platform ---------------------------------------------------------------------------------------------------------


def test_a_segment_is_sealed_zeroed_and_without_a_name():
    fd = cpu.create_segment(8192)
    try:
        assert os.fstat(fd).st_size == 8192
        assert os.fstat(fd).st_nlink == 0
        for nbytes in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        assert os.pread(fd, 8192, 0) == bytes(8192)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_no_memory_is_an_error_now_and_not_a_fault_later():
    before = rank_pool.descriptors()
    with pytest.raises(
        HeapExhaustedError, match=r"the machine has no 4611686018427387904 bytes of .* left, it has \d+"
    ):
        cpu.create_segment(1 << 62)
    with pytest.raises(HeapExhaustedError, match=r"cannot reserve .*lower heap_bytes"):
        cpu.Reservation(1 << 60)
    assert rank_pool.descriptors() == before


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 1000 << 10),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 1000 << 10),
        ("0::/a/b\n", {"a/memory.max": "9000\n", "a/memory.current": "4000\n", "a/memory.stat": "anon 1\n"}, 5000),
        (
            "1:cpu:/x\n0::/a/b\n",
            {"a/b/memory.max": "9000", "a/b/memory.current": "8000", "a/b/memory.stat": "inactive_file 3000\n"},
            4000,
        ),
        ("4:memory:/a\n", {"v1/a/limit": "9000", "v1/a/used": "9500", "v1/a/memory.stat": "inactive_file 0\n"}, 0),
        ("4:memory:/gone\n", {"v1/limit": "9000", "v1/used": "1000", "v1/memory.stat": "x 0\n"}, 8000),
    ],
)
def test_available_memory_is_what_the_control_groups_leave(tmp_path, monkeypatch, groups, files, expected):
    monkeypatch.setattr(
        cpu,
        "_MEMORY_GROUPS",
        (("", str(tmp_path), "memory.max", "memory.current"), ("memory", str(tmp_path / "v1"), "limit", "used")),
    )
    texts = {"/proc/meminfo": "MemTotal: 5 kB\nMemAvailable:     1000 kB\n", "/proc/self/cgroup": groups}
    texts |= {str(tmp_path / name): text for name, text in files.items()}

    def open_one(path):
        if path not in texts:
            raise FileNotFoundError(path)
        return io.StringIO(texts[path])

    monkeypatch.setattr(cpu, "open", open_one, raising=False)
    assert cpu.available_bytes() == expected


def test_a_heap_asks_for_the_memory_of_all_ranks(new_heap, monkeypatch):
    heap = new_heap(limit_bytes=1 << 30)
    heap.empty(100)
    monkeypatch.setattr(cpu, "available_bytes", lambda: 100 << 20)
    with pytest.raises(
        HeapExhaustedError, match=r"1 x \d+ bytes of shared memory, for 1 ranks, are more than the 104857600"
    ):
        heap.empty(200 << 20, dtype=torch.uint8)
    heap.empty(50 << 20, dtype=torch.uint8)


def test_segments_mapped_twice_are_one_memory():
    fd = cpu.create_segment(4096)
    one, two = cpu.Reservation(8192), cpu.Reservation(8192)
    one.map(fd, 0, 4096)
    two.map(fd, 4096, 4096)
    os.close(fd)
    one.tensor(100, 4)[:] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    assert two.tensor(4096 + 100, 4).tolist() == [1, 2, 3, 4]
    assert one.tensor(0, 0).numel() == 0


@settings(max_examples=20)
@given(st.integers(1, 100_000))
def test_private_memory_is_zero_and_page_aligned(nbytes):
    memory = cpu.private_memory(cpu.page_up(nbytes))
    assert memory.address % cpu.PAGE == 0
    assert not memory.tensor(0, nbytes).any()
