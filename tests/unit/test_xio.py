"""rocm-xio's adapter: calls of a program, both signatures, what is caught before data moves, rings, deadlines."""

from __future__ import annotations

import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest

from fake_xio import FAULTS, SIGNATURES, FakeXio
from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Part
from iris_pg.collectives.message import receive, send
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine import calls as c
from iris_pg.copy_engine import xio
from iris_pg.copy_engine.tile import Tile
from iris_pg.copy_engine.xio_queue import WORDS_BYTES, Words, XioQueue
from iris_pg.errors import ClosedError, DeadlineError, QueueError, UnsupportedError
from iris_pg.flags import CREDIT, MAIL_SLOTS, ControlPage
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import atomics
from iris_pg.program import Copy, Copy2D, Program, Reduce, Ref, Signal, Take
from iris_pg.verify import verify

GIB = 1 << 30


# Programs over queues -------------------------------------------------------------------------------------------------


def gathers(world, n, heap, in_place):
    """Return each rank's side of an all-gather."""
    for rank in range(world):
        out = Ref(rank, "heap" if heap else "out", 0)
        place = out + rank * n
        here = place if in_place else Ref(rank, "in", 0)
        peers = [(rank + k) % world for k in range(1, world)]
        sends = tuple(Part(p, n, here, Ref(p, "heap", rank * n) if heap else None) for p in peers)
        own = None if in_place else Copy(place, here, n)
        yield here, out, Flow("all_gather", sends, tuple(Part(p, n, out + p * n) for p in peers), own, True, heap)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize(("heap", "in_place"), list(itertools.product([False, True], repeat=2)))
def test_an_all_gather_over_queues_is_proven(world, heap, in_place):
    """Three in a row, each after its user has written the input; and read at once, by the stream, when it is over."""
    page, n, programs, inputs, outputs = ControlPage(world), 40, [], [], []
    for rank, (here, out, flow) in enumerate(gathers(world, n, heap, in_place)):
        program = Program(rank, world, ())
        for i in range(3):
            s = Setting(rank, world, page, pair_bytes=16, first_slot=i % 2, pushes=True)
            fresh, seen = Ref(rank, f"fresh{i}", 0), Ref(rank, f"seen{i}", 0)
            user = Program(rank, world, (Copy(here, fresh, n),)), Program(rank, world, (Copy(seen, out, world * n),))
            program = program.then(user[0]).then(c.over_queues(build(s, flow))).then(user[1])
            inputs.append((fresh, n))
            outputs += [(seen + p * n, n, Ref(p, f"fresh{i}", 0)) for p in range(world)]
        programs.append(program)
    flags = {Ref(rank, "flags", at): value for rank in range(world) for at, value in page.initial().items()}
    verify(programs, inputs=inputs, outputs=outputs, flags=flags, schedules=2)


@pytest.mark.parametrize("world", range(1, 9))
def test_scatter_all_to_all_and_barrier_over_queues_are_proven(world):
    page, n, programs, inputs, outputs = ControlPage(world), 24, [], [], []
    for rank in range(world):
        peers = [(rank + k) % world for k in range(1, world)]
        source, target = Ref(rank, "in", 0), Ref(rank, "out", 0)
        sends = tuple(Part(p, n, source + p * n) for p in peers)
        own = Copy(target + rank * n, source + rank * n, n)
        s = Setting(rank, world, page, pair_bytes=16, pushes=True)
        flow = Flow("all_to_all", sends, tuple(Part(p, n, target + p * n) for p in peers), own)
        both = barrier(s, 0).then(barrier(s, 1))
        programs.append(c.over_queues(build(s, flow)).then(c.over_queues(both)))
        inputs.append((source, world * n))
        outputs += [(target + p * n, n, Ref(p, "in", rank * n)) for p in range(world)]
    flags = {Ref(rank, "flags", at): value for rank in range(world) for at, value in page.initial().items()}
    verify(programs, inputs=inputs, outputs=outputs, flags=flags, schedules=2)


@pytest.mark.parametrize("nbytes", [1, 16, 17, 80])
def test_messages_over_queues_are_proven(nbytes):
    page = ControlPage(2)
    s = [Setting(rank, 2, page, pair_bytes=16, pushes=True) for rank in range(2)]
    sent = send(s[0], 1, Ref(0, "in", 0), nbytes), receive(s[1], 0, Ref(1, "out", 0), nbytes)
    flags = {Ref(0, "flags", page.emptied(slot, 1)): CREDIT for slot in range(MAIL_SLOTS)}
    outputs = [(Ref(1, "out", 0), nbytes, Ref(0, "in", 0))]
    verify([*map(c.over_queues, sent)], inputs=[(Ref(0, "in", 0), nbytes)], outputs=outputs, flags=flags)


def test_each_peer_has_a_queue_and_what_is_received_keeps_its_order():
    page, n = ControlPage(4), 64
    flow = list(gathers(4, n, True, False))[1][2]
    program = c.over_queues(build(Setting(1, 4, page, pushes=True), flow))
    copies = {step.lane - 1: step for step in program.steps if isinstance(step, Copy)}
    assert sorted(copies) == [0, 1, 2, 3] and all(copies[p].dst.rank == p for p in copies)
    assert {step.tag for step in program.steps if isinstance(step, Signal | Take)} == {1}


def test_a_reduction_is_refused():
    steps = (Reduce(Ref(0, "out", 0), (Ref(0, "in", 0), Ref(0, "in", 8)), 8, "float32", "sum", 1),)
    program = Program(0, 1, steps, "all_reduce")
    assert not c.fits(program)
    with pytest.raises(UnsupportedError, match="all_reduce adds tensors"):
        c.over_queues(program)


# Calls of the library -------------------------------------------------------------------------------------------------


def address(ref):
    return {"in": 0x1000, "out": 0x2000, "flags": 0x3000}[ref.buffer] + 0x10000 * ref.rank + ref.offset


def test_steps_become_calls():
    here, there, flag = Ref(0, "in", 0), Ref(1, "out", 64), Ref(0, "flags", 0)
    steps = (
        Take(flag, 1, 1, 2),
        Copy(there, here, 32, 2),
        Copy2D(there, here, 8, 3, 16, 24, 2),
        Signal(Ref(1, "flags", 64), 1, 2),
        Take(flag, 1, 1, 1),
    )
    lowered = list(c.lower(Program(0, 2, (Signal(flag), *steps)), address))
    assert lowered == [
        (1, c.Poll(0x3000, 1)),
        (1, c.Increase(0x3000, 0xFFFFFFFF)),
        (1, c.Linear(0x12040, 0x1000, 32)),
        (1, Tile(0x12040, 0x1000, 3, 8, 16, 24)),
        (1, c.Increase(0x13040, 1)),
        (0, c.Poll(0x3000, 1)),
        (0, c.Increase(0x3000, 0xFFFFFFFF)),
    ]
    # A wait is one call with the copy behind it; one that has none behind it copies scratch.
    assert [(i.name, i.arguments) for i in c.invocations([c.Poll(4, 7), c.Linear(16, 32, 5)], 0x900)] == [
        ("wait_flag_then_put", dict(flag_ptr=4, expected_value=7, dst=16, src=32, size=5, flag_bits=32)),
    ]
    asked = list(c.invocations([call for _, call in lowered], 0x900))
    assert [i.name for i in asked] == ["wait_flag_then_put", "signal", "put", "put_tile", "signal"] + [
        "wait_flag_then_put",
        "signal",
    ]
    scratch = dict(flag_ptr=0x3000, expected_value=1, dst=0x904, src=0x900, size=4, flag_bits=32)
    assert asked[0].arguments == asked[5].arguments == scratch
    assert [i.nbytes for i in asked] == [52, 32, 28, 80, 32, 52, 32]


@pytest.mark.parametrize("nbytes", [1, GIB - 33, GIB - 32, GIB - 31, GIB, GIB + 1, 4 * GIB, 4 * GIB + 5])
@pytest.mark.parametrize("waits", [False, True])
def test_sizes_above_the_field_are_split(nbytes, waits):
    calls = [c.Poll(4, 1)] * waits + [c.Linear(1 << 40, 1 << 41, nbytes)]
    at = 0
    for i, asked in enumerate(c.invocations(calls, 0)):
        assert asked.name == ("wait_flag_then_put" if waits and i == 0 else "put")
        assert asked.arguments["dst"] == (1 << 40) + at and asked.arguments["src"] == (1 << 41) + at
        assert 0 < asked.arguments["size"] <= 0x3FFFFFE0
        at += asked.arguments["size"]
    assert at == nbytes


def test_what_the_calls_write_are_the_packets_of_the_calls():
    """Program -> packets and Program -> library -> packets agree, but for the placement of scratch copies."""
    memory = cpu.private_memory(4096).address
    calls = [
        c.Linear(memory + 512, memory, 100),
        c.Increase(memory + 8, 5, 64),
        Tile(memory + 1024, memory, 3, 5, 8, 16),
        c.Poll(memory + 8, 5),
        c.Linear(memory + 700, memory, 3),
    ]
    for signature in SIGNATURES:
        written = []
        fake = FakeXio(signature)
        fake._write = lambda *a, written=written: written.append(a[-1]) or 0
        library = xio.Library(fake.module)
        for asked in c.invocations(calls, memory + 4000):
            library.call(3, 4, 0, asked)
        assert b"".join(written) == b"".join(packet for call in calls for packet in call.packets())


# The library ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fakes():
    made = []

    def make(*args, **keywords):
        made.append(FakeXio(*args, **keywords))
        return made[-1]

    yield make
    while made:  # and nothing refers to them, when it is seen what the tests have left
        made.pop().stop()


def words():
    memory = cpu.private_memory(cpu.page_up(WORDS_BYTES))
    return memory, Words(memory.address, memory.address)


def queue_of(fake, memory_words, timeout_s=5.0, name="g 0->1", library=None):
    return XioQueue(library or xio.Library(fake.module), 0, 1, memory_words, timeout_s, name)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("seed", [None, 1])
def test_bytes_go_from_source_to_destination(fakes, signature, seed):
    memory, at = words()
    queue = queue_of(fakes(signature, seed=seed), at)
    source = (ctypes.c_uint8 * 300)(*(i * 7 % 251 for i in range(300)))
    target = (ctypes.c_uint8 * 300)()
    a, b = ctypes.addressof(source), ctypes.addressof(target)
    queue.wait(queue.submit([c.Linear(b, a, 100), Tile(b + 100, a + 100, 4, 9, 20, 11)]))
    expected = bytearray(300)
    expected[:100] = bytes(source)[:100]
    for row in range(4):
        expected[100 + 20 * row : 109 + 20 * row] = bytes(source)[100 + 11 * row : 109 + 11 * row]
    assert bytes(target) == bytes(expected)
    assert queue.close()
    del memory


CAUGHT = {
    "swapped": "put copies from its destination to its source",
    "swapped wait": "wait_flag_then_put does not copy",
    "plain signal": "signal does not add what it was given",
    "no wait": "wait_flag_then_put does not wait",
    "tile in elements": "put_tile copies another rectangle",
}


@pytest.mark.parametrize(("fault", "message"), CAUGHT.items())
@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_library_that_does_something_else_is_caught_before_it_moves_data(fakes, signature, fault, message):
    if signature == "old" and fault == "tile in elements":
        fault, message = "swapped", CAUGHT["swapped"]  # its tiles say how large an element is
    memory, at = words()
    with pytest.raises(UnsupportedError, match=message):
        queue_of(fakes(signature, fault=fault), at)
    assert set(CAUGHT) | {"writes nothing"} == set(FAULTS)
    del memory


def test_a_library_that_does_nothing_is_a_deadline_with_the_queue(fakes):
    memory, at = words()
    with pytest.raises(
        DeadlineError, match=r"(?s)queue g 0->1: GPU 0 to GPU 1, channel 0; 0 of 1 marks.*\n  put\(dst=0x"
    ):
        queue_of(fakes(fault="writes nothing"), at, timeout_s=0.2)
    del memory


def test_positional_arguments_would_be_swapped(fakes):
    """The planted mistake itself: what is right by position in one signature copies backwards in the other."""
    for signature, first in (("old", "src"), ("new", "dst")):
        fake = fakes(signature)
        fake.module.create_host_queue(src_device=0, dst_device=0)
        memory = (ctypes.c_uint32 * 2)(1, 2)
        a = ctypes.addressof(memory)
        fake.module.put(0, 0, 0, a, a + 4, 4)
        assert fake.called[-1][1][first] == a


def test_a_missing_package_is_an_error_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "xio", None)
    xio.load.cache_clear()
    with pytest.raises(
        UnsupportedError, match=r"(?s)xio\.sdma_ep.*cannot be imported.*iris-pg\[rocm\].*rocm-xio from its sources"
    ):
        xio.load()


def test_the_package_is_found_by_its_name(monkeypatch, fakes):
    module = ModuleType("xio.sdma_ep")
    module.__dict__.update(vars(fakes("old").module))
    monkeypatch.setitem(sys.modules, "xio", ModuleType("xio"))
    monkeypatch.setitem(sys.modules, "xio.sdma_ep", module)
    xio.load.cache_clear()
    try:
        assert xio.load().ring_bytes == 1 << 20
    finally:
        xio.load.cache_clear()


def test_another_version_is_told(fakes):
    module = SimpleNamespace(**vars(fakes().module))
    del module.put_tile
    with pytest.raises(UnsupportedError, match="has no put_tile"):
        xio.Library(module)
    failing = fakes().module
    failing.init = lambda: -5
    with pytest.raises(QueueError, match="init failed with status -5"):
        xio.Library(failing)


def test_a_queue_has_one_owner(fakes):
    fake = fakes()
    library = xio.Library(fake.module)
    (m1, w1), (m2, w2) = words(), words()
    queue = queue_of(fake, w1, library=library)
    with pytest.raises(UnsupportedError, match=r"GPU 0 to GPU 1 belongs to g 0->1"):
        queue_of(fake, w2, name="h 0->1", library=library)
    assert queue.close()
    assert queue_of(fake, w2, name="h 0->1", library=library).close()
    del m1, m2


# Rings and deadlines --------------------------------------------------------------------------------------------------


def test_a_batch_longer_than_the_ring_never_fills_it(fakes):
    """The library would wait for room for ever; 3000 tiles are 240 KB of packets, and the ring has 16 KiB."""
    fake = fakes(ring_bytes=1 << 14)
    memory, at = words()
    queue = queue_of(fake, at)
    source = (ctypes.c_uint32 * 3000)(*range(3000))
    target = (ctypes.c_uint32 * 3000)()
    a, b = ctypes.addressof(source), ctypes.addressof(target)
    queue.wait(queue.submit(Tile(b + 4 * i, a + 4 * i, 1, 4, 4, 4) for i in range(3000)))
    assert list(target) == list(range(3000))
    # Half of it, and what is done already: a read pointer may lag an eighth of a ring behind.
    assert fake.most <= (1 << 13) + (1 << 11) + 104
    assert queue.close()
    del memory


def test_a_wait_in_vain_ends_with_the_queue_and_what_it_waits_for(fakes):
    fake = fakes()
    memory, at = words()
    queue = queue_of(fake, at, timeout_s=0.3)
    flag = ctypes.c_uint32(0)
    end = queue.submit([c.Poll(ctypes.addressof(flag), 5)])
    with pytest.raises(
        DeadlineError,
        match=rf"(?s)the queue g 0->1.*wait_flag_then_put\(flag_ptr={ctypes.addressof(flag):#x}, expected_value=5",
    ):
        queue.wait(end)
    for again in (lambda: queue.submit([]), lambda: queue.wait(end)):
        with pytest.raises(DeadlineError):
            again()
    assert not queue.close(0.1), "it is still waiting, so it must not be released"
    atomics().store32(ctypes.addressof(flag), 6)
    assert queue.close(5)
    del memory


def test_a_full_ring_ends_at_the_deadline(fakes):
    fake = fakes(ring_bytes=1 << 12)
    memory, at = words()
    queue = queue_of(fake, at, timeout_s=0.3)
    flag = ctypes.c_uint32(0)
    here = ctypes.addressof(flag)
    with pytest.raises(DeadlineError, match=r"(?s)bytes of packets in a ring of 4096"):
        queue.submit([c.Poll(here, 1), *(c.Increase(at.device + 64, 1) for _ in range(200))])
    atomics().store32(here, 1)
    assert queue.close(5)
    del memory


def test_who_watches_can_end_a_wait(fakes):
    def watch():
        raise ClosedError("the group has failed")

    memory, at = words()
    library = xio.Library(fakes().module)
    queue = XioQueue(library, 0, 1, at, 60.0, "g", watch=lambda: None)
    queue._patience.check = lambda *_: watch()
    flag = ctypes.c_uint32(0)
    end = queue.submit([c.Poll(ctypes.addressof(flag), 1)])
    with pytest.raises(ClosedError, match="has failed"):
        queue.wait(end)
    atomics().store32(ctypes.addressof(flag), 1)
    assert queue.close(5)
    del memory
