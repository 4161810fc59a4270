"""Mail by itself: the slots, the packets that fill and empty them, and matching, for several ranks in one process."""

from __future__ import annotations

import itertools
import re
import threading
import time

import pytest
import torch

from iris_pg import mail, mailbox
from iris_pg.copy_engine import decoder
from iris_pg.copy_engine.decoded import Fence
from iris_pg.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, QueueError
from iris_pg.flags import MAIL_SLOTS, ControlPage
from iris_pg.mail import Mail
from iris_pg.mailbox import Inbox, Outbox, area_bytes, slot_bytes

SLOT = 256


class Links:
    """Stands for the links of a group: who is gone."""

    group = "test"

    def __init__(self):
        self.gone = []

    def lost(self):
        return self.gone


class Heap:
    """Stands for one rank's view of a symmetric heap: the segments of all ranks lie in this process."""

    def __init__(self, rank, segments, links):
        self.rank, self.world, self.links = rank, len(segments), links
        self.control = ControlPage(self.world)
        self.areas = {"mail": self.control.nbytes}
        self.segments = segments
        self.bases = [segment.data_ptr() for segment in segments]
        self.base = self.bases[rank]

    def bytes_at(self, rank, offset, nbytes):
        return self.segments[rank][offset : offset + nbytes]


class Group:
    """All ranks of a group, without threads: a receive or a send moves on when :meth:`go` is called, or wait()."""

    def __init__(self, world, timeout_s=10.0, threads=False):
        nbytes = ControlPage(world).nbytes + area_bytes(SLOT, world)
        self.segments = [torch.zeros(nbytes + 64, dtype=torch.uint8)[:nbytes] for _ in range(world)]
        self.links, self.failures = Links(), [None] * world
        self.heaps = [Heap(rank, self.segments, self.links) for rank in range(world)]
        self.mails = [
            Mail(heap, SLOT, timeout_s, lambda: None, self._check(rank), self._give_up(rank))
            for rank, heap in enumerate(self.heaps)
        ]
        if not threads:
            for m in self.mails:
                m._start = lambda: None

    def _check(self, rank):
        def check(what, where):
            if self.failures[rank]:
                raise self.failures[rank][0]

        return check

    def _give_up(self, rank):
        def give_up(error, culprit):
            self.failures[rank] = self.failures[rank] or (error, culprit)

        return give_up

    def go(self, *ranks):
        """Let ranks make all the progress that is possible."""
        ranks = ranks or range(len(self.mails))
        while sum(self._turn(self.mails[rank]) for rank in ranks):
            pass

    @staticmethod
    def _turn(m):
        with m._lock:
            moved = m._progress(everyone=True)
        m._tell()
        return moved

    def close(self):
        for m in self.mails:
            m.close(ClosedError("closed"))


@pytest.fixture
def group():
    groups = []

    def make(world=2, **keywords):
        groups.append(Group(world, **keywords))
        return groups[-1]

    yield make
    for made in groups:
        made.close()


def letter(number, n):
    return torch.arange(n) * 3 + 1000 * number


def blank(n):
    return torch.full((n,), -1)


# Slots and packets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "world", "expected"),
    [(1 << 18, 2, 1 << 18), (1 << 18, 8, 1 << 16), (1 << 18, 256, 1 << 14), (256, 8, 256)],
)
def test_size_of_a_slot(chunk, world, expected):
    assert slot_bytes(chunk, world) == expected
    assert slot_bytes(chunk, world) <= chunk


@pytest.mark.parametrize("world", range(1, 9))
def test_slots_and_headers_of_all_pairs_lie_apart(world):
    group = Group(world)
    spans, flags = [], []
    for a, b in itertools.permutations(range(world), 2):
        outbox, inbox = Outbox(group.heaps[a], b, SLOT), Inbox(group.heaps[b], a, SLOT)
        assert outbox._slots_at == inbox._slots_at
        spans += [(at, 64 + SLOT) for at in outbox._slots_at] + [(at, 64) for at in outbox._headers_at]
        flags += outbox._emptied_at + inbox._mailed_at
    spans.sort()
    for (at, nbytes), (following, _) in itertools.pairwise(spans):
        assert at + nbytes <= following
    areas = [(heap.base + heap.areas["mail"], area_bytes(SLOT, world)) for heap in group.heaps]
    assert all(any(at <= start and start + n <= at + nbytes for at, nbytes in areas) for start, n in spans)
    assert sum(n for _, n in spans) == sum(nbytes for _, nbytes in areas)
    assert len(set(flags)) == len(flags)
    pages = [(heap.base, heap.control.nbytes) for heap in group.heaps]
    assert all(any(at <= flag and flag + 64 <= at + nbytes for at, nbytes in pages) for flag in flags)
    group.close()


def decoded(packets):
    found, at = [], 0
    while at < len(packets):
        found.append(decoder.decode(packets, at, len(packets)))
        at += found[-1].size_bytes
    return found


def test_packets_of_a_part(group):
    a, b = group().heaps
    outbox, inbox = Outbox(a, 1, SLOT), Inbox(b, 0, SLOT)
    page, (source, target) = a.control, (letter(0, 32), blank(32))
    assert outbox.has_room
    take, header, copy, signal = decoded(outbox.put(source.data_ptr(), 256, (256, 5, b"int64")))
    slot = b.base + b.areas["mail"]
    assert take == Fence(a.base + page.emptied(0, 1), 0)
    assert (header.dst, header.nbytes) == (slot, 64)
    assert (copy.dst, copy.src, copy.nbytes) == (slot + 64, source.data_ptr(), 256)
    assert signal == Fence(b.base + page.mailed(0, 0), 1)
    take, copy, signal = decoded(inbox.take(target.data_ptr(), 256, True))
    assert take == Fence(b.base + page.mailed(0, 0), 0)
    assert (copy.dst, copy.src, copy.nbytes) == (target.data_ptr(), slot + 64, 256)
    assert signal == Fence(a.base + page.emptied(0, 1), 1)
    # Another part has no header; a message of 0 bytes, and bytes that nobody wants, have no copy.
    assert [type(p).__name__ for p in decoded(outbox.put(source.data_ptr(), 8))] == ["Fence", "CopyLinear", "Fence"]
    assert not outbox.has_room  # both slots have been used, and neither emptied
    assert [type(p).__name__ for p in decoded(inbox.take(None, 8, False))] == ["Fence", "Fence"]
    assert [type(p).__name__ for p in decoded(outbox.put(0, 0, (0, 5, b"int64")))] == ["Fence", "CopyLinear", "Fence"]


def test_a_broken_header_is_an_error_of_the_group(group):
    made = group()
    one, two = made.mails
    work = one.send(letter(0, 3), 1, 0)
    assert work.is_success()
    made.segments[1][ControlPage(2).nbytes] = 7  # the sequence number
    received = two.recv(blank(3), 0, 0)
    with pytest.raises(QueueError, match="the slots from rank 0 hold message 7 where message 1 comes next"):
        received.wait()
    assert isinstance(made.failures[1][0], QueueError)


# Matching -------------------------------------------------------------------------------------------------------------


def test_a_send_is_done_when_it_is_in_the_slots(group):
    made = group()
    one, two = made.mails
    fits = [one.send(letter(i, 32), 1, 0) for i in range(MAIL_SLOTS)]
    waits = one.send(letter(9, 200), 1, 0)
    assert all(w.is_completed() for w in fits)
    made.go(0)
    assert not waits.is_completed()
    into = [blank(32), blank(32), blank(200)]
    works = [two.recv(t, 0, 0) for t in into]
    made.go()
    assert waits.is_success()
    assert all(w.is_success() for w in works)
    assert torch.equal(torch.cat(into), torch.cat([letter(0, 32), letter(1, 32), letter(9, 200)]))


def test_messages_and_receives_match_in_the_order_of_calls(group):
    made = group(3)
    zero, one, two = made.mails
    into = [blank(2) for _ in range(5)]
    calls = [(1, 4), (None, 4), (None, 5), (1, 4), (None, 4)]
    works = [zero.recv(t, source, tag) for t, (source, tag) in zip(into, calls, strict=True)]
    one.send(letter(1, 2), 0, 5)  # the third: the first of its tag
    made.go()
    one.send(letter(2, 2), 0, 4)  # the first
    made.go()
    two.send(letter(3, 2), 0, 4)  # the second
    made.go()
    two.send(letter(4, 2), 0, 4)  # the last: the fourth takes only what rank 1 sends
    made.go()
    assert not works[3].is_completed()
    one.send(letter(5, 2), 0, 4)
    made.go()
    assert [t[0].item() // 1000 for t in into] == [2, 3, 1, 5, 4]
    assert [w.source_rank() for w in works] == [1, 2, 1, 1, 2]
    assert zero._pending == 0


def test_a_receive_from_any_rank_takes_the_first_that_came(group):
    made = group(4)
    zero = made.mails[0]
    blocked = zero.recv(blank(1), None, 99)  # so that everything is taken from the slots
    for source in (2, 3, 1, 3):
        made.mails[source].send(letter(source, 2), 0, 7)
        made.go()
    assert zero._kept == 4 * 16
    works = [zero.recv(blank(2), None, 7) for _ in range(4)]
    assert [w.source_rank() for w in works] == [2, 3, 1, 3]
    assert zero._kept == 0
    assert not blocked.is_completed()


def test_messages_leave_their_slots_only_when_they_are_wanted_or_in_the_way(group):
    made = group(3)
    zero, one, two = made.mails
    works = [one.send(letter(i, 2), 0, i) for i in range(MAIL_SLOTS - 1)]
    made.go()
    assert zero._kept == 0  # the sender has a slot left
    works += [one.send(letter(i, 2), 0, i) for i in range(MAIL_SLOTS - 1, 10)]
    made.go()
    assert all(w.is_completed() for w in works)
    assert 0 < zero._kept <= 10 * 16
    kept = zero._kept
    large = two.send(letter(20, 500), 0, 0)  # does not fit the slots, and is not taken out of them unasked
    made.go()
    assert (zero._kept, large.is_completed()) == (kept, False)
    last = two.send(letter(21, 1), 0, 1)
    into = blank(1)
    wanted = zero.recv(into, 2, 1)  # is for what lies behind it
    made.go()
    assert large.is_completed()
    assert last.is_completed()
    assert wanted.is_success()
    assert torch.equal(into, letter(21, 1))
    assert zero._kept == kept + 4000
    into = [blank(2) for _ in range(10)]
    for i in reversed(range(10)):
        zero.recv(into[i], 1, i).wait()
        assert torch.equal(into[i], letter(i, 2))
    into = blank(500)
    zero.recv(into, 2, 0).wait()
    assert torch.equal(into, letter(20, 500))
    assert zero._kept == zero._pending == 0


def test_a_flood_is_not_kept_without_end(group, monkeypatch):
    monkeypatch.setattr(mail, "_KEPT_BYTES", 100)
    made = group()
    one, two = made.mails
    works = [one.send(letter(i, 2), 1, 0) for i in range(20)]
    made.go()
    assert two._kept <= 100
    assert sum(w.is_completed() for w in works) == 6 + MAIL_SLOTS
    for i in range(20):
        into = blank(2)
        work = two.recv(into, 0, 0)
        made.go()
        assert work.is_success()
        assert torch.equal(into, letter(i, 2))
    assert all(w.is_completed() for w in works)


def test_a_receive_may_take_over_a_message_that_is_still_arriving(group):
    made = group()
    one, two = made.mails
    one.send(letter(1, 300), 1, 1)
    behind = two.recv(blank(2), 0, 2)  # has taken the first parts of it out of the way
    assert two._kept == 2400
    into, short = blank(300), blank(299)
    work = two.recv(into, 0, 1)
    assert not work.is_completed()
    made.go()
    assert work.is_success()
    assert torch.equal(into, letter(1, 300))
    # The same for a receive of another size; what is still on its way is dropped.
    sent = one.send(letter(2, 300), 1, 1)
    made.go(1)
    refused = two.recv(short, 0, 1)
    one.send(letter(3, 2), 1, 2)
    made.go()
    assert sent.is_success()
    with pytest.raises(
        MismatchError, match=r"recv from rank 0, tag 1: the message of rank 0 has 2400 bytes \(int64\) and"
    ):
        refused.wait()
    assert short.eq(-1).all()
    assert behind.is_success()
    assert two._kept == two._pending == 0
    assert made.failures == [None, None]


def test_a_message_of_zero_bytes(group):
    made = group()
    one, two = made.mails
    for tensor in (torch.empty(0), torch.empty(3, 0)):
        sent, work = one.send(tensor, 1, 3), two.recv(torch.empty(0), None, 3)
        assert sent.is_success()
        assert work.is_success()
        assert work.source_rank() == 0
    one.send(torch.empty(0), 1, 1)
    other = two.recv(blank(1), 0, 2)
    assert len(two._peers[0].unexpected) == 1
    assert two.recv(torch.empty(0), 0, 1).is_success()
    assert not two._peers[0].unexpected
    assert not other.is_completed()


# Deadlines, lost peers, closing ---------------------------------------------------------------------------------------


def test_a_deadline_counts_from_what_moved_last(group):
    made = group(timeout_s=0.3)
    one, two = made.mails
    work = one.send(letter(0, 768), 1, 0)  # 24 parts
    into, stop = blank(768), threading.Event()

    def receive_slowly():
        two.recv(into, 0, 0)
        while not stop.wait(0.05):
            with two._lock:
                two._progress(everyone=True)
            two._tell()

    thread = threading.Thread(target=receive_slowly)
    thread.start()
    start = time.monotonic()
    try:
        work.wait()
        assert time.monotonic() - start > 0.31
    finally:
        stop.set()
        thread.join()
    late = one.send(letter(0, 320), 1, 4)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"send to rank 1, tag 4, 2560 bytes: Timed out waiting: rank 1 has taken"):
        late.wait()
    assert 0.2 < time.monotonic() - start < 1
    assert isinstance(made.failures[0][0], DeadlineError)
    assert made.failures[0][1] is None


def test_a_peer_that_is_gone(group):
    made = group(3)
    zero, one, _ = made.mails
    one.send(letter(1, 4), 0, 1)
    part = one.send(letter(2, 300), 0, 2)
    made.links.gone = [1]
    into = blank(4)
    assert zero.recv(into, 1, 1).is_success()  # it is there
    assert not part.is_completed()
    works = [
        zero.recv(blank(300), 1, 2),
        zero.recv(blank(1), 1, 3),
        zero.recv(blank(1), None, 3),
        zero.recv(into, 2, 3),
    ]
    with zero._lock:
        zero._look(time.monotonic())
    zero._tell()
    assert [w.is_completed() for w in works] == [True, True, False, False]
    with pytest.raises(
        PeerLostError, match=r"recv from rank 1, tag 2: rank 1 has died.* before more than \d+ of 2400 b"
    ):
        works[0].wait()
    with pytest.raises(
        PeerLostError, match=r"recv from rank 1, tag 3: rank 1 has died, .* before its part was done \["
    ):
        works[1].wait()
    assert made.failures[0] is None  # nobody waited when they ended
    made.links.gone = [1, 2]
    with pytest.raises(PeerLostError, match="recv from any rank, tag 3: rank 1 has died"):
        works[2].wait()
    assert made.failures[0][1] == 1
    with pytest.raises(PeerLostError, match="from any rank"):
        works[3].wait()  # with the group


def test_a_group_that_fails_elsewhere_ends_messages(group):
    made = group()
    one, _ = made.mails
    works = [one.recv(blank(1), 1, 0), one.send(letter(0, 999), 1, 0)]
    made.failures[0] = (MismatchError("ranks differ"), None)
    for work in works:
        with pytest.raises(MismatchError, match="ranks differ"):
            work.wait()


def test_closing(group):
    made = group(threads=True)
    one, two = made.mails
    works = [one.recv(blank(1), 1, 0), one.send(letter(0, 999), 1, 0), one.recv(blank(1), None, 0)]
    futures = [w.get_future() for w in works]
    thread = one._thread
    assert thread.is_alive()
    made.close()
    assert not thread.is_alive()
    assert all(w.is_completed() for w in works)
    assert all(f.done() for f in futures)
    for work in works:
        with pytest.raises(ClosedError, match="closed"):
            work.wait()
    made.close()
    with pytest.raises(ClosedError):
        two.recv(blank(1), 0, 0)


# The thread -----------------------------------------------------------------------------------------------------------


def test_the_thread_runs_only_when_something_is_outstanding(group):
    made = group(threads=True)
    one, two = made.mails
    into = blank(3)
    one.send(letter(0, 3), 1, 0)
    two.recv(into, 0, 0).wait()
    assert one._thread is two._thread is None  # all was done at once
    for number in range(3):
        into = blank(3)
        work = two.recv(into, 0, number)
        thread = two._thread
        assert thread.is_alive()
        assert not work.is_completed()
        one.send(letter(number, 3), 1, number)
        assert work.ended_within(5)
        assert torch.equal(into, letter(number, 3))
        deadline = time.monotonic() + 5
        while not two._is_napping and time.monotonic() < deadline:
            time.sleep(0.005)
        assert two._is_napping
        assert two._thread is thread


def test_callbacks_may_send_and_receive(group):
    """A chain of messages, each begun by what the one before it sets off, in whatever thread that is."""
    made = group(threads=True)
    one, two = made.mails
    done, values = threading.Event(), []

    def answer(number):
        into = blank(1)

        def arrived(future):
            values.append(future.value()[0].item())
            if number < 20:
                answer(number + 1)
                one.send(torch.tensor([number + 1]), 1, 0)
            else:
                done.set()

        two.recv(into, 0, 0).get_future().then(arrived)

    answer(0)
    one.send(torch.tensor([0]), 1, 0)
    assert done.wait(10)
    assert values == list(range(21))


def test_dtypes_in_words_fit_the_header():
    dtypes = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    assert all(mailbox._in_words(d) == re.sub(r"^torch\.", "", str(d)).encode() for d in dtypes)
