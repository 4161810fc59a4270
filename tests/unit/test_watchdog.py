"""The watchdog of CUDA operations, with threads for streams: they obey the same flags, in the same host memory."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist

from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.message import receive
from iris_pg.collectives.setting import Setting
from iris_pg.device_page import DevicePage
from iris_pg.device_watchdog import Captured, Watchdog
from iris_pg.device_work import Held, Lane
from iris_pg.errors import DeadlineError, MismatchError, PeerLostError
from iris_pg.memory.sharing import Links
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.gpu import platform as cuda
from iris_pg.program import Program, Ref, Signal, Take
from iris_pg.watch import Watch, tag_of

WORLD = 2
names = itertools.count()


class Rank:
    """One rank: a page, a lane, a watchdog, and a thread for each operation."""

    def __init__(self, store, rank, timeout_s):
        self.rank = rank
        self.links = Links(store, rank, WORLD, group="test", timeout_s=10)
        self.page = page = DevicePage(self.links, 4)
        self.lane = Lane(page.reader(0), lambda peer: page.word_of(peer, 0))
        self.mail = Lane(page.reader(1), lambda peer: page.word_of(peer, 2))
        self.captured = Captured(page.reader(3), 0)
        self.watch = Watch(page.heap, lambda: self.lane.done)
        lanes = [self.lane, self.mail]
        self.watchdog = Watchdog(self.watch, page, lanes, self.captured, threading.RLock(), None, timeout_s, "test")
        self.streams: list[threading.Thread] = []
        self._last: dict[int, threading.Thread] = {}  # word -> the last operation of that lane

    def run(self, key, program=None):
        """Begin a collective: a barrier, unless it is another program."""
        setting = Setting(self.rank, WORLD, self.page.heap.control, tag=tag_of(key))
        if program is None:
            program = barrier(setting, 0).then(barrier(setting, 1))
        self.watch.begin(key, self.lane.count + 1)
        self._stream(program, 0, self.lane.next)
        self.lane.add(key, program, None)

    def receive(self, nbytes):
        """Begin to receive a message from the other rank."""
        setting = Setting(self.rank, WORLD, self.page.heap.control, pair_bytes=64)
        program = receive(setting, 1 - self.rank, Ref(self.rank, "tensor", 0), nbytes)
        self._stream(program, 1, self.mail.next)
        self.mail.add(("recv", nbytes), program, None)

    def replay(self, key):
        """Replay a graph that holds one operation, whose peer does not come."""
        setting = Setting(self.rank, WORLD, self.page.heap.control, tag=tag_of(key))
        program = barrier(setting, 0)
        self.captured.all.append((key, program))
        self.mark(3, len(self.captured.all))
        self._stream(program, 3, 0)

    def mark(self, word, value):
        atomics().store32(self.page.heap.base + self.page._words + 64 * word, value)

    def _stream(self, program: Program, word, number):
        before = self._last.get(word)

        def obey():
            if before:
                before.join()  # a stream has an order
            ops = atomics()
            for step in program.steps:
                at = self.page.heap.bases[getattr(step, "flag", Ref(0, "", 0)).rank]
                if isinstance(step, Signal):
                    ops.store32(at + step.flag.offset, step.tag)
                elif isinstance(step, Take):
                    while ops.load32(at + step.flag.offset) != step.tag:
                        time.sleep(1e-3)
                    ops.store32(at + step.flag.offset, 0)
            self.mark(word, number)

        self._last[word] = stream = threading.Thread(target=obey, daemon=True)
        self.streams.append(stream)
        stream.start()

    def failure(self, within_s):
        deadline = time.monotonic() + within_s
        while self.watch.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.watch.failure

    def ended(self, within_s=5):
        """Return whether every stream has come to an end."""
        for stream in self.streams:
            stream.join(within_s)
        return not any(stream.is_alive() for stream in self.streams)

    def close(self):
        assert self.watchdog.release(lambda: self.ended(0.01))  # no thread may look at memory that is gone
        self.watchdog.stop()
        self.links.close()
        self.page.close()


@pytest.fixture
def pair(monkeypatch):
    """Return ``pair(timeout_s)``, which makes two ranks in this process."""
    monkeypatch.setattr(cuda, "register", lambda address, nbytes: address)
    monkeypatch.setattr(cuda, "unregister", lambda address: None)
    made = []

    def make(timeout_s=30.0):
        store = dist.PrefixStore(f"watchdog-{next(names)}", dist.HashStore())
        with concurrent.futures.ThreadPoolExecutor(WORLD) as pool:
            made.extend(pool.map(lambda rank: Rank(store, rank, timeout_s), range(WORLD)))
        return made

    yield make
    for rank in made:
        rank.close()


def test_operations_that_end_are_left_alone(pair):
    one, two = pair()
    for i in range(5):
        one.run(("barrier", i))
        two.run(("barrier", i))
    assert one.ended() and two.ended()
    assert one.lane.oldest() is None and one.lane.done == 5
    assert one.watch.failure is None and two.watch.failure is None


def test_a_late_rank_is_named_and_streams_are_released(pair):
    one, two = pair(timeout_s=1.0)
    one.run(("all_reduce", 8))
    error = one.failure(within_s=5)
    assert isinstance(error, DeadlineError) and "rank 1 has not begun it" in str(error) and "all_reduce 8" in str(error)
    assert one.ended()
    error = two.failure(within_s=0.9)  # it is told at once, though it does nothing
    assert isinstance(error, DeadlineError) and "says rank 0" in str(error)


def test_ranks_in_other_operations_are_noticed(pair):
    one, two = pair()
    one.run(("all_reduce", 8))
    two.run(("broadcast", 8))
    for rank in (one, two):
        error = rank.failure(within_s=5)
        assert isinstance(error, MismatchError) and "different operations" in str(error)
        assert rank.ended()


def test_a_message_of_another_size_is_noticed(pair):
    one, _ = pair()
    control = one.page.heap.control
    one.receive(8)
    one.page.store(control.mailed(0, 1), Setting(1, WORLD, control).tag_of(9))
    error = one.failure(within_s=5)
    assert isinstance(error, MismatchError) and "recv 8" in str(error)
    assert one.ended()


def test_a_rank_that_is_gone_is_named(pair):
    one, two = pair()
    one.run(("all_reduce", 8))
    two.links.close()
    error = one.failure(within_s=5)
    assert isinstance(error, PeerLostError) and "rank 1" in str(error)
    assert one.ended()


def test_a_rank_may_leave_when_its_part_is_done(pair):
    one, two = pair()
    flag = Ref(0, "flags", one.page.heap.control.enter(1))
    one.run(("broadcast", 8), Program(0, WORLD, (Take(flag, 1, 77),)))
    two.run(("broadcast", 8), Program(1, WORLD, ()))
    assert two.ended()
    two.links.close()
    assert one.failure(within_s=2.5) is None  # it is slow by itself
    one.page.store(flag.offset, 77)
    assert one.ended()
    assert one.lane.oldest() is None


@pytest.mark.parametrize("leaves", [True, False])
def test_a_graph_that_is_replayed_in_vain_is_noticed(pair, leaves):
    one, two = pair(timeout_s=30.0 if leaves else 1.0)
    one.replay(("all_gather", 8))
    if leaves:
        two.links.close()
    error = one.failure(within_s=5)
    assert isinstance(error, PeerLostError if leaves else DeadlineError) and "all_gather 8" in str(error)
    assert "rank 1" in str(error)
    assert one.ended()


# Lanes ----------------------------------------------------------------------------------------------------------------


def test_a_lane_lets_go_of_what_is_done_and_no_more():
    done = 0
    lane = Lane(lambda: done, lambda peer: done)
    held = [Held(torch.ones(1)) for _ in range(3)]
    for i, each in enumerate(held):
        lane.add(("op", i), Program(0, 1, ()), each)
    assert lane.oldest().what == ("op", 0)
    done = 2
    assert lane.oldest().what == ("op", 2)
    assert [each.tensors is None for each in held] == [True, True, False]
    assert lane.has_done(0, 2) and not lane.has_done(0, 3)
    done = 3
    assert lane.oldest() is None and held[2].tensors is None


def test_a_lane_counts_beyond_32_bits():
    word = 0xFFFFFFFE
    lane = Lane(lambda: word, lambda peer: word)
    lane.count = 0xFFFFFFFE
    assert lane.done == 0xFFFFFFFE and lane.next == 0xFFFFFFFF
    for i in range(3):
        lane.add(("op", i), Program(0, 1, ()), None)
    assert lane.next == 2  # of a word
    assert lane.oldest().what == ("op", 0)
    word = 0
    assert lane.done == 1 << 32
    assert lane.oldest().what == ("op", 2)
    assert lane.has_done(0, 1 << 32) and not lane.has_done(0, (1 << 32) + 1)
    word = 1
    assert lane.oldest() is None
