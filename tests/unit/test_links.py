"""Links between ranks that are threads of this process: set-up, exchange, and how the end of a rank is seen."""

import json
import os
import socket
import struct
import threading
import time

import pytest
import torch.distributed as dist

from iris_pg.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
)
from iris_pg.memory import cards
from iris_pg.memory.sharing import Links


class Threads:
    """Runs one function per rank in a thread, and gives what each returned or raised."""

    def __init__(self, world, fn):
        self.results = [None] * world

        def run(rank):
            try:
                self.results[rank] = fn(rank)
            except BaseException as error:
                self.results[rank] = error

        self.threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in self.threads:
            thread.start()

    def join(self):
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank hangs"
        return self.results


def make(world, timeout_s=10, store=None, ranks=None):
    store = store or dist.HashStore()

    def rank_links(rank):
        return Links(store, (ranks or range(world))[rank], world, group="g", timeout_s=timeout_s)

    made = Threads(len(ranks or range(world)), rank_links).join()
    for links in made:
        if isinstance(links, BaseException):
            raise links
    return made


@pytest.fixture
def links_of():
    """Return ``links_of(world)``, closed after the test."""
    all_made = []

    def links_of(world, **keywords):
        made = make(world, **keywords)
        all_made.extend(made)
        return made

    yield links_of
    for links in all_made:
        links.close()


def everyone(group, fn):
    return Threads(len(group), lambda rank: fn(group[rank])).join()


# Exchange -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 5])
def test_everyone_gets_what_everyone_sent(links_of, world):
    group = links_of(world)
    for i in range(3):
        for messages in everyone(group, lambda links, i=i: links.exchange({"rank": links.rank, "i": i}, what="test")):
            assert [m.payload for m in messages] == [{"rank": p, "i": i} for p in range(world)]
            assert all(m.fds == [] for m in messages)


def test_descriptors_are_passed(links_of):
    group = links_of(3)

    def pass_one(links):
        fd = os.memfd_create(f"of-{links.rank}", os.MFD_CLOEXEC)
        os.write(fd, b"%d" % (100 + links.rank))
        try:
            messages = links.exchange({}, [fd], what="pass")
        finally:
            os.close(fd)
        texts = []
        for peer, message in enumerate(messages):
            if peer == links.rank:
                assert message.fds == [], "one's own descriptor stays one's own"
                continue
            (received,) = message.fds
            assert not os.get_inheritable(received)
            texts.append((peer, os.pread(received, 10, 0)))
            os.close(received)
        return texts

    for rank, texts in enumerate(everyone(group, pass_one)):
        assert texts == [(p, b"%d" % (100 + p)) for p in range(3) if p != rank]


def test_ranks_in_different_calls(links_of):
    group = links_of(3)
    before = len(os.listdir("/proc/self/fd"))
    fds = [os.memfd_create("x") for _ in range(3)]
    said = everyone(
        group, lambda links: links.exchange({}, [fds[links.rank]], what="free" if links.rank == 1 else "allocate")
    )
    for rank, error in enumerate(said):
        assert type(error) is MismatchError
        other = 1 if rank != 1 else r"\d"
        assert_matches(error, rf"rank {rank} is in \w+ \(host call 1\) and rank {other} in \w+ \(host call 1\)")
    for fd in fds:
        os.close(fd)
    del said, error
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors received before the error stay open"


def assert_matches(error, pattern):
    with pytest.raises(type(error), match=pattern):
        raise error


def test_a_rank_that_does_not_come_to_an_exchange_is_named(links_of):
    group = links_of(4, timeout_s=0.3)
    start = time.monotonic()
    said = everyone(group, lambda links: links.exchange({}, what="allocate") if links.rank in (0, 3) else None)
    assert 0.2 < time.monotonic() - start < 5
    for rank in (0, 3):
        assert type(said[rank]) is DeadlineError
        assert_matches(said[rank], r"allocate: ranks 1, 2 did not arrive within 0\.3 s")


def test_a_payload_that_is_too_long(links_of):
    (links,) = links_of(1)
    with pytest.raises(ArgumentError, match="a payload of 70"):
        links.exchange({"x": "y" * 70_000}, what="test")
    links.exchange({"x": "y" * 60_000}, what="test")


def test_a_dead_rank_is_named_though_another_is_only_slow(links_of):
    group = links_of(3, timeout_s=10)
    group[2]._drop()  # as when its process has died
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="allocate: rank 2 died or exited"):
        group[0].exchange({}, what="allocate")
    assert time.monotonic() - start < 2


# The end of a rank ----------------------------------------------------------------------------------------------------


def test_lost_ranks_are_seen_at_once(links_of):
    group = links_of(4)
    assert [links.lost() for links in group] == [[]] * 4
    group[1].close("destroy_process_group")
    group[3]._drop()
    assert group[0].lost() == group[2].lost() == [1, 3]
    with pytest.raises(PeerLostError, match=r"test: rank 1 has left the group \(destroy_process_group\)|rank 3 died"):
        group[0].exchange({}, what="test")
    with pytest.raises(ClosedError, match=r"test: the group is closed \(destroy_process_group\)"):
        group[1].exchange({}, what="test")
    group[1].close("again")
    assert group[1].closed == "destroy_process_group"


def test_what_was_sent_before_leaving_is_received(links_of):
    group = links_of(2)

    def speak_and_leave(links):
        messages = links.exchange({"rank": links.rank}, what="test")
        if links.rank == 1:
            links.close()
        return messages

    assert [m.payload for m in everyone(group, speak_and_leave)[0]] == [{"rank": 0}, {"rank": 1}]
    with pytest.raises(PeerLostError, match="rank 1 has left the group"):
        group[0].exchange({}, what="next")


@pytest.mark.parametrize("kind", [DeadlineError, MismatchError, PeerLostError, UnsupportedError])
def test_a_rank_that_leaves_because_of_an_error_says_so(links_of, kind):
    group = links_of(3)
    group[1].close("set-up failed", kind("rank 2 did something [group=g rank=1]"))
    with pytest.raises(kind, match=r"allocate: rank 2 did something, says rank 1 \[group=g rank=0\]") as caught:
        group[0].exchange({}, what="allocate")
    assert type(caught.value) is kind


def test_lost_is_asked_from_many_threads(links_of):
    group = links_of(2)
    for result in Threads(4, lambda rank: [group[0].lost() for _ in range(2000)]).join():
        assert result == [[]] * 2000


# Set-up ---------------------------------------------------------------------------------------------------------------


def test_one_store_serves_one_group_after_another(links_of):
    store = dist.HashStore()
    for _ in range(10):
        group = links_of(3, store=store)
        everyone(group, lambda links: links.exchange({}, what="test"))
        group[0].close()  # the others stay for a while


def test_a_rank_that_missed_a_try_meets_the_others_in_the_next():
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"rank 1 did not start within 0\.1 s"):
            make(3, timeout_s=0.1, store=store, ranks=[0, 2])
    for links in make(3, store=store):
        links.close()


def test_a_rank_that_comes_between_two_tries_meets_the_others_in_the_next():
    """What the others have left in the store is of a try that they gave up."""
    store = dist.HashStore()
    for _ in range(2):
        with pytest.raises(DeadlineError, match=r"rank 1 did not start within 0\.1 s"):
            make(3, timeout_s=0.1, store=store, ranks=[0, 2])
    seen = threading.Event()

    def start(rank):
        if rank != 1:
            seen.wait(5)
        return Links(store, rank, 3, group="g", timeout_s=10)

    threads = Threads(3, start)
    while not store.check(["links/1"]) or json.loads(store.get("links/1"))["number"] < 2:
        time.sleep(0.005)
    time.sleep(0.05)  # it has read the cards of that number
    seen.set()
    for links in threads.join():
        assert isinstance(links, Links), links
        links.close()


def test_nobody_is_waited_for_in_a_try_that_it_gave_up():
    store = dist.HashStore()

    def start(rank):
        return Links(store, rank, 3, group="g", timeout_s=10)

    first = Threads(1, start)
    with pytest.raises(DeadlineError, match=r"did not start within 0\.2 s"):
        make(3, timeout_s=0.2, store=store, ranks=[2])
    second = Threads(1, lambda _: start(1))
    time.sleep(0.2)  # it has read the cards of that try
    third = Threads(1, lambda _: start(2))
    for links in [*first.join(), *second.join(), *third.join()]:
        assert isinstance(links, Links), links
        links.close()


def test_ranks_that_do_not_start_are_named_by_all():
    def start(rank):
        return Links(store, rank, 5, group="g", timeout_s=0.3)

    store = dist.HashStore()
    for error in Threads(3, start).join():
        assert type(error) is DeadlineError
        assert_matches(error, r"ranks 3, 4 did not start within 0\.3 s; every rank .*raise timeout=")


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_a_rank_that_dies_after_it_has_published_its_card(monkeypatch, doomed):
    dial = Links._dial

    def die(links, cards, deadline):
        if links.rank == doomed:
            raise SystemExit
        return dial(links, cards, deadline)

    monkeypatch.setattr(Links, "_dial", die)
    # It leaves without a word, as a killed process does.
    close = Links.close
    monkeypatch.setattr(Links, "close", lambda links, *a: links._drop() if links.rank == doomed else close(links, *a))
    start = time.monotonic()
    store = dist.HashStore()
    for rank, error in enumerate(Threads(3, lambda rank: Links(store, rank, 3, group="g", timeout_s=20)).join()):
        if rank != doomed:
            assert type(error) is PeerLostError
            assert_matches(error, rf"rank {doomed} died")
    assert time.monotonic() - start < 5


def test_ranks_of_two_hosts(monkeypatch):
    hosts = iter(["here", "there"])
    monkeypatch.setattr(cards, "host_identity", lambda: next(hosts))
    store = dist.HashStore()
    for rank, error in enumerate(Threads(2, lambda rank: Links(store, rank, 2, group="g", timeout_s=5)).join()):
        if isinstance(error, UnsupportedError):
            assert_matches(error, rf"rank {rank} is on host .* and rank {1 - rank} on host .* must be on one host")
        else:
            assert type(error) is PeerLostError, error


def test_strangers_are_not_let_in():
    """Someone who knows the address and not the token gets nothing, and holds nobody up."""
    store = dist.HashStore()
    first = Threads(1, lambda rank: Links(store, 0, 2, group="g", timeout_s=10))
    store.wait(["links/0"])
    address = "\0" + json.loads(store.get("links/0"))["address"]
    hello = struct.Struct("<IQ")
    strangers = []
    for said in (
        None,  # nothing
        b"",
        b"x",
        b"\xff" * 60,
        hello.pack(0x49524953, 1),
        hello.pack(0x49524953, 1) + b"0" * 32,
        hello.pack(0x49524953, 0) + b"0" * 32,
    ):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(10)
        try:
            stranger.connect(address)
        except BlockingIOError:
            break
        if said is not None:
            stranger.send(said)
        strangers.append(stranger)
        if len(strangers) == 4:  # all that fit into the backlog
            break
    second = Threads(1, lambda rank: Links(store, 1, 2, group="g", timeout_s=10))
    (one,), (two,) = first.join(), second.join()
    for stranger in strangers:
        try:
            assert stranger.recv(64) == b""
        except ConnectionResetError:
            pass
        stranger.close()
    assert isinstance(one, Links), one
    assert isinstance(two, Links), two
    assert len(everyone([one, two], lambda links: links.exchange({}, what="test"))) == 2
    one.close()
    two.close()


@pytest.mark.parametrize("frame", [b"", b"x", struct.pack("<IQ", 0x49524953, 1) + b"0" * 32, struct.pack("<IQ", 7, 1)])
def test_a_wrong_hello_is_refused(frame):
    links = Links(dist.HashStore(), 0, 1, group="g", timeout_s=1)
    links.world = 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0iris_pg-test-" + os.urandom(8).hex())
        listener.listen(4)
        listener.setblocking(False)
        cards = [{"token": "a" * 32}, {"token": "b" * 32}]
        assert links._answer(listener, cards) is False, "nobody is there"
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(listener.getsockname())
        stranger.send(frame)
        assert links._answer(listener, cards) is False
        assert links._sockets == {}
        stranger.close()
        friend = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        friend.connect(listener.getsockname())
        friend.send(struct.pack("<IQ", 0x49524953, 1) + b"a" * 32)
        assert links._answer(listener, cards) is True
        assert friend.recv(64) == b"b" * 32
        friend.close()
    links.close()


def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for links in make(4):
        links.close()
    with pytest.raises(DeadlineError):
        make(3, timeout_s=0.1, ranks=[0, 1])
    assert len(os.listdir("/proc/self/fd")) == before
