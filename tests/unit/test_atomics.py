"""The compiled atomic operations, against Python's arithmetic; and that they are atomic."""

import ctypes
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iris_pg.platforms.atomics import RING_FULL, atomics

WIDTHS = {4: ctypes.c_uint32, 8: ctypes.c_uint64}


def signed(value: int, width: int) -> int:
    return value - (1 << 8 * width) if value >> (8 * width - 1) else value


REFERENCE = {
    "add": lambda old, x, w: old + x,
    "sub": lambda old, x, w: old - x,
    "and": lambda old, x, w: old & x,
    "or": lambda old, x, w: old | x,
    "xor": lambda old, x, w: old ^ x,
    "xchg": lambda old, x, w: x,
    "min": lambda old, x, w: min(signed(old, w), signed(x, w)),
    "max": lambda old, x, w: max(signed(old, w), signed(x, w)),
    "umin": lambda old, x, w: min(old, x),
    "umax": lambda old, x, w: max(old, x),
    "uinc_wrap": lambda old, x, w: 0 if old >= x else old + 1,
    "udec_wrap": lambda old, x, w: x if old == 0 or old > x else old - 1,
}


def numbers(width):
    top = (1 << 8 * width) - 1
    return st.one_of(st.sampled_from([0, 1, 2, top, top - 1, top // 2, top // 2 + 1]), st.integers(0, top))


def test_every_operation_has_both_widths():
    assert set(atomics().rmw) == {(op, width) for op in REFERENCE for width in WIDTHS}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", REFERENCE)
@given(data=st.data())
def test_read_modify_write(op, width, data):
    old, operand = data.draw(numbers(width)), data.draw(numbers(width))
    row = (WIDTHS[width] * 3)(7, old, 9)
    assert atomics().rmw[op, width](ctypes.addressof(row) + width, operand) == old
    assert list(row) == [7, REFERENCE[op](old, operand, width) & ((1 << 8 * width) - 1), 9]


@pytest.mark.parametrize("width", WIDTHS)
@given(data=st.data())
def test_load_store_and_compare_and_swap(width, data):
    ops = atomics()
    load, store, cas = (ops.load32, ops.store32, ops.cas32) if width == 4 else (ops.load64, ops.store64, ops.cas64)
    old, expected, desired = (data.draw(numbers(width)) for _ in range(3))
    row = (WIDTHS[width] * 3)(7, 0, 9)
    at = ctypes.addressof(row) + width
    store(at, old)
    assert load(at) == old
    assert cas(at, expected, desired) == old
    assert load(at) == (desired if old == expected else old)
    assert (row[0], row[2]) == (7, 9)


@pytest.mark.parametrize("width", WIDTHS)
def test_additions_of_several_threads_all_count(width):
    word, add = WIDTHS[width](0), atomics().rmw["add", width]

    def count():
        for _ in range(20_000):
            add(ctypes.addressof(word), 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word.value == 4 * 20_000 * 3


def test_spin_returns_how_it_ended_and_lets_other_threads_run():
    word, spin = ctypes.c_uint32(5), atomics().spin32
    at = ctypes.addressof(word)
    assert spin(at, 0xFFFFFFFF, 5, 0, 10) > 0
    assert spin(at, 0xFFFFFFFF, 6, 0, 10) == 0
    assert spin(at, 0xFF, 4, 1, 10) > 0  # 4..5
    assert spin(at, 0xFF, 6, 0xFFFFFFFE, 10) == 0  # anything but 5
    assert spin(at, 0xFF, 7, 0xFFFFFFFE, 10) > 0  # anything but 6
    word.value = 0x105
    assert spin(at, 0xFF, 5, 0, 10) > 0  # the mask
    word.value = 0
    setter = threading.Timer(0.05, atomics().store32, (at, 1))
    setter.start()
    deadline = time.monotonic() + 10
    while not spin(at, 0xFFFFFFFF, 1, 0, 1_000_000):
        assert time.monotonic() < deadline, "the thread that sets the word never ran"
    setter.join()


@given(rows=st.integers(1, 5), width=st.integers(1, 9), more_dst=st.integers(0, 4), more_src=st.integers(0, 4))
def test_copy_rows(rows, width, more_dst, more_src):
    dst_pitch, src_pitch = width + more_dst, width + more_src
    source = (ctypes.c_ubyte * (rows * src_pitch))(*[i % 251 for i in range(rows * src_pitch)])
    target = (ctypes.c_ubyte * (rows * dst_pitch))(*[255] * (rows * dst_pitch))
    atomics().copy_rows(ctypes.addressof(target), dst_pitch, ctypes.addressof(source), src_pitch, width, rows)
    expected = [255] * (rows * dst_pitch)
    for row in range(rows):
        expected[row * dst_pitch : row * dst_pitch + width] = source[row * src_pitch : row * src_pitch + width]
    assert list(target) == expected


@given(base=st.integers(0, 1 << 40), used=st.integers(0, 4096), nbytes=st.integers(1, 256))
def test_reserving_in_a_ring(base, used, nbytes):
    base, used, nbytes = base // 4 * 4, used // 4 * 4, nbytes * 4
    words = (ctypes.c_uint64 * 2)(base, max(base - used, 0))
    at, size = ctypes.addressof(words), 4096
    pad = size - base % size if base % size + nbytes > size else 0
    has_room = base + pad + nbytes - words[1] < size
    assert atomics().reserve(at, at + 8, size, nbytes) == (base if has_room else RING_FULL)
    assert words[0] == (base + pad + nbytes if has_room else base)


def test_committing_in_order():
    words = (ctypes.c_uint64 * 3)(0, 0, 64)
    at = ctypes.addressof(words)
    assert not atomics().commit(at, at + 8, at + 16, 128, 256)
    assert list(words) == [0, 0, 64]
    assert atomics().commit(at, at + 8, at + 16, 64, 128)
    assert list(words) == [128, 128, 128]


def test_threads_that_are_first_together_get_the_same_code():
    """Two sets compiled at once would leave functions of one whose code is gone with it."""
    script = (
        "import threading\nfrom iris_pg.platforms.atomics import atomics\n"
        "start, sets = threading.Barrier(8), []\n"
        "def first(): start.wait(); sets.append(atomics())\n"
        "threads = [threading.Thread(target=first) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(sets) == 8 and all(s is sets[0] for s in sets)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
