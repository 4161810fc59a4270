"""Messages between two ranks: order, tags, sizes, any source, threads, collectives beside them, and what goes wrong."""

from __future__ import annotations

import datetime
import os
import random
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import rank_pool
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError

# A slot is 256 bytes with the first of these, so nearly everything takes several parts.
OPTIONS = [dict(chunk_bytes=256), dict(chunk_bytes=256, hostile_seed=3), {}]


def letter(source: int, target: int, number: int, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return what ``source`` sends as message ``number`` to ``target``: [n] values that depend on all of these."""
    return (torch.arange(n) * 7 + 1009 * source + 503 * target + 101 * number).to(dtype)


def blank(n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.full((n,), -1).to(dtype)


def told(call) -> tuple[str, str, float]:
    """Return (kind, text, seconds) of the IrisError that ``call`` ends with."""
    start = time.monotonic()
    try:
        call()
    except IrisError as error:
        error.__traceback__ = None  # torch's frames in it hold a future, and that the error
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


def holds_nothing() -> bool:
    mail = dist.group.WORLD.transport.mail
    return (mail._kept, mail._pending) == (0, 0) and not any(p.unexpected or p.arriving for p in mail._order)


# What Gloo does, too -------------------------------------------------------------------------------------------------

SIZES = [0, 1, 31, 32, 33, 64, 65, 1000]


def sends_and_receives(rank, world):
    """Blocking calls, one rank sending first and the other receiving first."""
    got = []
    for number, n in enumerate(SIZES):
        for dtype in (torch.uint8, torch.int64, torch.bfloat16):
            into = blank(n, dtype)
            if rank == 0:
                dist.send(letter(0, 1, number, n, dtype), 1)
                got.append(dist.recv(into, 1))
            else:
                got.append(dist.recv(into, 0))
                dist.send(letter(1, 0, number, n, dtype), 0)
            assert torch.equal(into, letter(1 - rank, rank, number, n, dtype))
    return got


def uses_tags(rank, world):
    """Receives in another order than the sends, by tag; within a tag in the order of the sends."""
    got = []
    if rank == 0:
        works = [
            dist.isend(letter(0, 1, 10 * tag + number, 100 + number), 1, tag=tag)
            for number in range(4)
            for tag in (1, 2, 3)
        ]
    else:
        time.sleep(0.02)
        for tag in (3, 1, 2):
            for number in range(4):
                into = blank(100 + number)
                dist.recv(into, 0, tag=tag)
                assert torch.equal(into, letter(0, 1, 10 * tag + number, 100 + number)), (tag, number)
                got.append(into[:2].tolist())
        works = []
    for work in works:
        work.wait()
    return got


def receives_first(rank, world):
    """Receives are begun long before the sends, and waited for in another order."""
    into = [blank(50) for _ in range(6)]
    works = [dist.irecv(t, 1 - rank, tag=i % 2) for i, t in enumerate(into)]
    time.sleep(0.02 * rank)
    works += [dist.isend(letter(rank, 1 - rank, i, 50), 1 - rank, tag=i % 2) for i in range(6)]
    for work in reversed(works):
        work.wait()
    assert all(torch.equal(t, letter(1 - rank, rank, i, 50)) for i, t in enumerate(into))
    return [t[0].item() for t in into]


def receives_from_any(rank, world):
    """Rank 0 takes messages of whoever is first; those of one rank come in order."""
    each = 5
    if rank:
        works = []
        for number in range(each):
            works.append(dist.isend(letter(rank, 0, 100 + number, 1), 0, tag=7))
            dist.send(letter(rank, 0, number, 40), 0, tag=6)
        for work in works:
            work.wait()
        return None
    got = {source: [] for source in range(1, world)}
    for i in range(each * (world - 1)):
        into = blank(40)
        if i % 2:
            source = dist.recv(into, tag=6)
        else:
            work = dist.irecv(into, tag=6)
            work.wait()
            source = work._source_rank()
        assert torch.equal(into, letter(source, 0, len(got[source]), 40)), (source, got)
        got[source].append(into[0].item())
    for source in got:
        for number in range(each):
            into = blank(1)
            assert dist.recv(into, source, tag=7) == source
            assert torch.equal(into, letter(source, 0, 100 + number, 1))
    return got


def passes_around(rank, world):
    """Every rank sends to the next and receives from the one before, in one batch."""
    got = []
    for number, n in enumerate((1, 40, 3000)):
        into, out = blank(n), letter(rank, (rank + 1) % world, number, n)
        batch = [dist.P2POp(dist.isend, out, (rank + 1) % world), dist.P2POp(dist.irecv, into, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(batch if (rank + number) % 2 else batch[::-1]):
            work.wait()
        assert torch.equal(into, letter((rank - 1) % world, rank, number, n))
        got.append(into[-1].item())
    return got


def sends_objects(rank, world):
    objects = [{"from": rank, "text": "x" * 3000}, None, [torch.arange(3) + rank]]
    into = [None] * 3
    if rank == 0:
        dist.send_object_list(objects, dst=1)
        dist.recv_object_list(into, src=1)
    elif rank == 1:
        dist.recv_object_list(into, src=0)
        dist.send_object_list(objects, dst=0)
    return str(into)


def sends_in_subgroups(rank, world):
    """Ranks given to torch are global; a group numbers its own."""
    got = []
    for members in ([3, 1], [0, 2, 3]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        order = sorted(members)
        for source in order:
            for target in order:
                if source == target:
                    continue
                if rank == source:
                    dist.send(letter(source, target, 0, 9), target, group=group, tag=target)
                    dist.send(letter(source, target, 1, 9), group=group, group_dst=order.index(target))
                if rank == target:
                    into = blank(9)
                    got.append(dist.recv(into, source, group=group, tag=target))
                    assert torch.equal(into, letter(source, target, 0, 9))
                    got.append(dist.recv(into, group=group))  # from any rank
                    assert torch.equal(into, letter(source, target, 1, 9))
                dist.barrier(group)
    return got


ALIKE = [
    (2, sends_and_receives),
    (2, uses_tags),
    (2, receives_first),
    (4, receives_from_any),
    (4, passes_around),
    (2, sends_objects),
    (4, sends_in_subgroups),
]


@pytest.mark.parametrize(("world", "fn"), ALIKE, ids=[fn.__name__ for _, fn in ALIKE])
def test_messages_arrive_as_with_gloo(ranks, world, fn):
    expected = ranks(world).run(fn, init="gloo")
    for options in OPTIONS[: 3 if world == 2 else 2]:
        assert ranks(world).run(fn, options=options) == expected, options


@pytest.mark.parametrize(("world", "fn"), ALIKE[1:5:2], ids=[fn.__name__ for _, fn in ALIKE[1:5:2]])
def test_messages_in_a_group_of_engine_cu(ranks, world, fn):
    ranks(world).run(fn, options=dict(engine="cu", chunk_bytes=256))


# What a send waits for ------------------------------------------------------------------------------------------------


def sends_before_it_receives(rank, world):
    """Both ranks send before either receives; small messages need no receive, however many there are."""
    peer = 1 - rank
    dist.send(letter(rank, peer, 0, 4), peer)
    for number in range(1, 30):
        dist.send(letter(rank, peer, number, 4), peer, tag=number % 3)
    into = blank(4)
    dist.recv(into, peer)
    assert torch.equal(into, letter(peer, rank, 0, 4))
    for tag in (2, 0, 1):
        for number in range(1, 30):
            if number % 3 == tag:
                dist.recv(into, peer, tag=tag)
                assert torch.equal(into, letter(peer, rank, number, 4))
    dist.barrier()
    assert holds_nothing()
    # Asynchronous sends of any size wait for no receive of the same rank.
    n = 3000
    works = [dist.isend(letter(rank, peer, number, n), peer, tag=number) for number in range(3)]
    for number in (2, 0, 1):
        into = blank(n)
        dist.recv(into, peer, tag=number)
        assert torch.equal(into, letter(peer, rank, number, n))
    for work in works:
        work.wait()
    dist.barrier()
    assert holds_nothing()


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_a_small_send_does_not_wait_for_its_receive(ranks, options):
    ranks(2).run(sends_before_it_receives, options=options)


def waits_in_a_circle(rank, world):
    """Who waits lets on peers that have filled their slots: 2 sends to 0, while 0 waits for 1, and 1 waits for 2."""
    many = 10
    if rank == 2:
        for number in range(many):
            dist.send(letter(2, 0, number, 2), 0)
        dist.send(letter(2, 1, 0, 2), 1)
    elif rank == 1:
        into = blank(2)
        dist.recv(into, 2)
        dist.send(into, 0)
    else:
        into = blank(2)
        dist.recv(into, 1)
        assert torch.equal(into, letter(2, 1, 0, 2))
        for number in range(many):
            dist.recv(into, 2)
            assert torch.equal(into, letter(2, 0, number, 2))


def test_a_waiting_rank_makes_room_for_messages_it_does_not_wait_for(ranks):
    ranks(3).run(waits_in_a_circle, options=OPTIONS[0])


LARGE = 8 << 20  # bytes


def swaps_large_messages(rank, world):
    peer, n = 1 - rank, LARGE // 8
    into, out = blank(n), letter(rank, peer, 0, n)
    works = [dist.isend(out, peer), dist.irecv(into, peer)]
    for work in works[:: 1 if rank else -1]:
        work.wait()
    assert torch.equal(into, letter(peer, rank, 0, n))
    # Nobody waits: the thread moves the bytes, and the futures are told.
    into, received = blank(n), []
    futures = [dist.isend(out, peer).get_future(), dist.irecv(into, peer).get_future()]
    futures[1].then(lambda f: received.append(f.value()[0] is into))
    deadline = time.monotonic() + 20
    while not all(f.done() for f in futures) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [f.wait()[0].data_ptr() for f in futures] == [out.data_ptr(), into.data_ptr()]
    assert torch.equal(into, letter(peer, rank, 0, n))
    assert received == [True]
    # The message that is wanted lies behind a large one.
    works = [dist.isend(out, peer, tag=1), dist.isend(out[:5], peer, tag=2)]
    small, into = blank(5), blank(n)
    dist.recv(small, peer, tag=2)
    dist.recv(into, peer, tag=1)
    assert torch.equal(small, letter(peer, rank, 0, 5))
    assert torch.equal(into, letter(peer, rank, 0, n))
    for work in works:
        assert work.wait(datetime.timedelta(seconds=20))
    dist.barrier()
    assert holds_nothing()


def test_large_messages_both_ways_at_once(ranks):
    ranks(2).run(swaps_large_messages)


def sends_any_layout(rank, world):
    base = torch.arange(60, dtype=torch.float32).view(6, 10)
    layouts = [
        base.t(),
        base[1::2, 3:],
        base[:, 4],
        torch.arange(3.0).expand(4, 3),
        torch.complex(base, -base).t(),
        torch.tensor(3.5),
        torch.ones(3, requires_grad=True),
        base.to(torch.bool),
    ]
    for number, sent in enumerate(layouts):
        for mine in (0, 1):  # as the tensor that is sent and as the one that receives
            into = torch.zeros(sent.size(), dtype=sent.dtype)
            if mine and not any(s == 0 for s in sent.stride()):
                into = torch.zeros_like(sent, memory_format=torch.preserve_format).detach()
                into = torch.zeros(*sent.size()[::-1], dtype=sent.dtype).t() if sent.dim() == 2 else into
            if rank == 0:
                dist.send(sent if mine == 0 else sent.clone(), 1, tag=number)
            else:
                dist.recv(into, 0, tag=number)
                assert torch.equal(into, sent), (number, into, sent)
    into = torch.zeros(20, 30, dtype=torch.int64)
    view, values = into[3::4, 5:25], letter(0, 1, 0, 100).view(5, 20)
    if rank == 0:
        dist.isend(values, 1).wait()
    else:
        work = dist.irecv(view, 0)
        work.wait()
        assert work.result()[0] is view
        assert torch.equal(view, values)
        view.zero_()
        assert not into.any()


def test_tensors_of_any_layout(ranks):
    ranks(2).run(sends_any_layout, options=OPTIONS[0])


# Beside other things --------------------------------------------------------------------------------------------------


def mixes_with_collectives(rank, world):
    n = 2000
    nxt, last = (rank + 1) % world, (rank - 1) % world

    def gather(value):
        output = torch.zeros(world, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([value]))
        assert output.tolist() == [value - rank + p for p in range(world)]

    for i in range(10):
        into = blank(n)
        receive = dist.irecv(into, last, tag=i)
        gather(10 * i + rank)  # with a receive outstanding that nothing was sent for
        send = dist.isend(letter(rank, nxt, i, n), nxt, tag=i)
        output = torch.zeros(world * 500, dtype=torch.int64)
        collective = dist.all_gather_into_tensor(output, torch.full((500,), rank), async_op=True)
        dist.barrier()
        receive.wait()
        send.wait()
        assert torch.equal(into, letter(last, rank, i, n))
        collective.wait()
        assert output.view(world, 500)[:, -1].tolist() == list(range(world))
    # A message needs its thread while this rank is in a collective that waits for the receiver.
    if rank == 0:
        work = dist.isend(letter(0, 1, 99, 10 * n), 1)
    if rank == 1:
        into = blank(10 * n)
        dist.recv(into, 0)
        assert torch.equal(into, letter(0, 1, 99, 10 * n))
    gather(rank)
    # And a collective while this rank waits for a message.
    collective = dist.all_gather_into_tensor(output, torch.full((500,), rank), async_op=True)
    if rank == 0:
        work.wait()
        collective.wait()
        dist.send(torch.ones(1), 1)
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    collective.wait()
    dist.barrier()
    assert holds_nothing()


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_messages_and_collectives_do_not_wait_for_each_other(ranks, options):
    ranks(4).run(mixes_with_collectives, options=options)


def outstanding_beside_a_kernel(rank, world):
    into, output = blank(5), torch.zeros(world, dtype=torch.int64)
    work = dist.irecv(into, 1 - rank)
    dist.all_gather_into_tensor(output, torch.tensor([rank]))
    dist.send(letter(rank, 1 - rank, 0, 5), 1 - rank)
    work.wait()
    assert torch.equal(into, letter(1 - rank, rank, 0, 5))
    assert "matched by the host" in dist.group.WORLD.transport.explain()


def test_messages_beside_collectives_of_engine_cu(ranks):
    ranks(2).run(outstanding_beside_a_kernel, options=dict(engine="cu"))


def sends_from_threads(rank, world):
    peer, failures = 1 - rank, []
    groups = [dist.group.WORLD, dist.new_group([0, 1])]

    def work_on(number):
        draw, group = random.Random(number), groups[number % 2]
        try:
            for i in range(40):
                n = draw.randrange(200)
                into, out = blank(n), letter(rank, peer, 100 * number + i, n)
                if i % 3 == 0:
                    works = [dist.irecv(into, peer, group, tag=number), dist.isend(out, peer, group, tag=number)]
                    for work in works:
                        work.wait()
                elif (i + rank) % 2:
                    dist.send(out, peer, group, tag=number)
                    dist.recv(into, peer, group, tag=number)
                else:
                    dist.recv(into, peer, group, tag=number)
                    dist.send(out, peer, group, tag=number)
                assert torch.equal(into, letter(peer, rank, 100 * number + i, n))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for i in range(20):
        output = torch.zeros(world, dtype=torch.int64)
        dist.all_gather_into_tensor(output, torch.tensor([rank + i]))
        assert output.tolist() == [i, i + 1]
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.barrier()
    assert holds_nothing()


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_several_threads_and_groups(ranks, options):
    ranks(2).run(sends_from_threads, options=options)


def random_traffic(rank, world, seed):
    """Every rank draws the same list of messages, and begins its part of it in an order of its own."""
    draw = random.Random(seed)
    messages = []
    for number in range(60):
        source, target = draw.sample(range(world), 2)
        messages.append((source, target, number, draw.choice([0, 1, 30, 32, 33, 100, 700]), draw.randrange(3)))
    mine = random.Random(f"{seed}/{rank}")
    works = []
    sends = [m for m in messages if m[0] == rank]
    receives = [m for m in messages if m[1] == rank]
    while sends or receives:
        kind = sends if sends and (not receives or mine.random() < 0.5) else receives
        source, target, number, n, tag = message = kind.pop(0)
        if kind is sends:
            works.append((dist.isend(letter(*message[:4]), target, tag=tag), None, message))
        else:
            into = blank(n)
            works.append((dist.irecv(into, source, tag=tag), into, message))
        if mine.random() < 0.1:
            time.sleep(0.001)
    mine.shuffle(works)
    for work, into, message in works:
        work.wait()
        assert into is None or torch.equal(into, letter(*message[:4])), message
    dist.barrier()
    assert holds_nothing()


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_random_traffic(ranks, options):
    for seed in range(3):
        ranks(4).run(random_traffic, seed, options=options)


# Users' mistakes ------------------------------------------------------------------------------------------------------


def makes_mistakes(rank, world):
    one, group = torch.ones(1), dist.group.WORLD
    for call, message in (
        (lambda: dist.isend(one, rank), rf"send: a message to this rank itself, {rank}; .*copy_"),
        (lambda: dist.irecv(one, rank), "recv: a message from this rank itself"),
        (lambda: dist.isend(one, 1 - rank, tag=-1), r"send: tag=-1; it takes 0\.\.2147483647"),
        (lambda: dist.recv(one, 1 - rank, tag=1 << 31), "recv: tag=2147483648"),
        (lambda: group.send([one], 2, 0), r"send: dst=2 is not a rank of this group; it takes 0\.\.1"),
        (lambda: group.recv([one], -1, 0), "recv: src=-1 is not a rank"),
        (lambda: group.send([one, one], 1 - rank, 0), "send: 2 tensors; it takes one per rank"),
        (lambda: group.recv([], 1 - rank, 0), "recv: 0 tensors"),
        (lambda: dist.recv(one.expand(3), 1 - rank), "recv: tensor of size .* has elements that share memory"),
        (lambda: dist.recv(torch.ones(2, 2).to_sparse(), 1 - rank), "recv: tensor has layout torch.sparse_coo"),
        (lambda: dist.send(torch.ones(2, 2).to_sparse(), 1 - rank), "send: tensor has layout torch.sparse_coo"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()
    work = dist.irecv(one, tag=3)
    with pytest.raises(ArgumentError, match=r"source_rank: recv from any rank, tag 3 has no source before a message"):
        work._source_rank()
    dist.barrier()
    sent = dist.isend(torch.tensor([1.0 + rank]), 1 - rank, tag=3)
    with pytest.raises(
        ArgumentError, match=r"source_rank: send to rank \d, tag 3, 4 bytes has no source; ask the work"
    ):
        sent.source_rank()
    work.wait()
    assert work.source_rank() == 1 - rank
    assert one.item() == 2 - rank


def test_mistakes_are_errors_before_anything_moves(ranks):
    ranks(2).run(makes_mistakes)


def sends_other_sizes(rank, world):
    """Rank 0 sends what rank 1 does not expect; each such receive fails alone."""
    small, large = torch.arange(10, dtype=torch.int32), torch.arange(5000, dtype=torch.int32)
    if rank == 0:
        for sent in (small, large, small[:0]):
            dist.isend(sent, 1, tag=1).wait()
            dist.send(small + 1, 1, tag=1)
        works = [dist.isend(sent, 1, tag=2) for sent in (large, small, large)]  # received when they are there
        dist.send(small, 1, tag=3)
        for work in works:
            work.wait()
        dist.recv(small, 1, tag=4)
        assert small.tolist() == [7] * 10
        return None
    said = []
    for n in (4, 20, 3):
        work = dist.irecv(torch.zeros(n, dtype=torch.float64), 0, tag=1)
        said.append(told(work.wait)[:2])
        assert work.is_completed()
        assert not work.is_success()
        into = torch.zeros(5, dtype=torch.int64)  # other dtypes are fine, when the bytes are as many
        dist.recv(into, 0, tag=1)
        assert into.view(torch.int32).tolist() == list(range(1, 11))
    into = torch.zeros(10, dtype=torch.int32)
    dist.recv(into, 0, tag=3)
    assert into.tolist() == list(range(10))
    said += [told(lambda: dist.recv(into, 0, tag=2))[:2], told(lambda: dist.recv(into[:0], tag=2))[:2]]
    after = torch.zeros(5000, dtype=torch.int32)
    dist.recv(after, 0, tag=2)
    assert torch.equal(after, torch.arange(5000, dtype=torch.int32))
    assert into.tolist() == list(range(10))
    dist.send(torch.full((10,), 7, dtype=torch.int32), 0, tag=4)
    assert holds_nothing()
    return said


@pytest.mark.parametrize("options", OPTIONS)
def test_a_message_of_another_size_fails_its_receive_and_nothing_else(ranks, options):
    _, said = ranks(2).run(sends_other_sizes, options=options)
    sizes = [(40, "float64", 32), (20000, "float64", 160), (0, "float64", 24), (20000, "int32", 40), (40, "int32", 0)]
    for (kind, text), (theirs, dtype, ours) in zip(said, sizes, strict=True):
        assert kind == MismatchError.__name__, text
        assert f"the message of rank 0 has {theirs} bytes (int32) and the tensor here {ours} bytes ({dtype})" in text
        assert "[group=" in text


# Late ranks, dead ranks, closing --------------------------------------------------------------------------------------


def is_kept_waiting(rank, world, what):
    """Rank 0 waits for rank 1, which does not come; rank 2 waits longer, and is told by rank 0."""
    calls = {
        "recv": lambda: dist.recv(torch.ones(2), 1, tag=3),
        "recv, future": lambda: dist.irecv(torch.ones(2), 1, tag=3).get_future().wait(),
        "recv, other tags": lambda: dist.recv(torch.ones(2), 1, tag=4),
        "recv, part of it": lambda: dist.recv(torch.ones(LARGE // 4), 1, tag=6),
        "recv from any": lambda: dist.recv(torch.ones(2), tag=5),
        "send": lambda: dist.send(torch.ones(LARGE // 4), 1, tag=3),
        "send, behind another": lambda: (
            dist.isend(torch.ones(LARGE // 4), 1, tag=8),
            dist.send(torch.ones(2), 1, tag=9),
        ),
        "barrier": dist.barrier,
    }
    group, store = dist.group.WORLD, rank_pool.current_store
    if rank == 1:
        if what == "recv, other tags":
            dist.send(torch.ones(1), 0, tag=7)
        if what == "recv, part of it":
            group.transport.mail._start = lambda: None  # the rest of it is not sent
            work = dist.isend(torch.ones(LARGE // 4), 0, tag=6)
        store.wait(["seen by 0", "seen by 2"])
        first = told(lambda: dist.recv(torch.ones(1), 0))
        if what == "recv, part of it":
            assert told(work.wait)[0] == DeadlineError.__name__
        return first, told(lambda: dist.send(torch.ones(1), 0)), told(dist.barrier)
    if rank == 0:
        group.set_timeout(datetime.timedelta(seconds=0.25))
    first = told(calls[what if rank == 0 else "barrier" if what == "send" else "recv"])
    store.set(f"seen by {rank}", "")
    return first, told(lambda: dist.isend(torch.ones(1), 1)), told(dist.barrier)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("recv", r"recv from rank 1, tag 3: Timed out waiting: rank 1 has sent no message with that tag \["),
        ("recv, future", r"recv from rank 1, tag 3: Timed out waiting: rank 1 has sent no message with that tag \["),
        (
            "recv, other tags",
            r"rank 1 has sent no message with that tag; there are messages with tags 7, which no recv ",
        ),
        ("recv, part of it", r"recv from rank 1, tag 6: Timed out waiting: rank 1 has sent \d+ of 8388608 bytes \["),
        ("recv from any", r"recv from any rank, tag 5: Timed out waiting: no rank has sent a message with that tag"),
        (
            "send",
            r"send to rank 1, tag 3, 8388608 bytes: Timed out waiting: rank 1 has taken \d+ of 8388608 bytes; it",
        ),
        (
            "send, behind another",
            r"tag 9, 8 bytes: Timed out waiting: rank 1 has taken \d+ of 8388608 bytes of tag 8, which is bef",
        ),
    ],
)
def test_a_rank_that_is_late_is_named(ranks, what, message):
    zero, one, two = ranks(3).run(is_kept_waiting, what, group_timeout_s=20)
    kind, text, seconds = zero[0]
    assert kind == DeadlineError.__name__, text
    assert re.search(message, text), text
    assert re.search(r"\[group=\w+ rank=0 op=(send|recv)\]$", text), text
    assert 0.2 < seconds < 10  # of 20
    kind, text, seconds = two[0]
    assert kind == DeadlineError.__name__, text
    assert re.search(r"(barrier|when another operation failed): it Timed out waiting.*, says rank 0 \[", text), text
    assert seconds < 10
    for kind, text, seconds in (*zero[1:], *two[1:]):
        assert kind == ClosedError.__name__, text
        assert "Timed out waiting" in text
        assert seconds < 10
    assert [kind for kind, _, _ in one] == [DeadlineError.__name__, *[ClosedError.__name__] * 2], one


def is_late_but_in_time(rank, world):
    if rank == 1:
        time.sleep(0.3)
        dist.recv(torch.ones(LARGE // 4), 0)
        rank_pool.current_store.wait(["has waited"])
        dist.send(torch.ones(1), 0)
    else:
        group = dist.group.WORLD
        dist.send(torch.ones(LARGE // 4), 1)
        work = dist.irecv(torch.ones(1), 1)
        with pytest.raises(DeadlineError, match=r"not done within the 0\.1 s given to wait"):
            work.wait(datetime.timedelta(seconds=0.1))
        rank_pool.current_store.set("has waited", "")
        work.wait()
        # What nobody waits for has no deadline.
        group.set_timeout(datetime.timedelta(seconds=0.3))
        works = [dist.irecv(torch.ones(1), 1, tag=9), dist.isend(torch.ones(LARGE // 4), 1, tag=9)]
        time.sleep(0.7)
        assert not any(work.is_completed() for work in works)
    dist.barrier()


def test_only_what_is_waited_for_has_a_deadline(ranks):
    ranks(2).run(is_late_but_in_time, group_timeout_s=5)


def outlives_a_peer(rank, world):
    """Rank 1 dies; the others wait for it, in a group each time, as a group that has failed takes nothing more."""
    groups = [dist.new_group([0, 1, 2]) for _ in range(4)]
    dist.barrier()
    large, pair, store = torch.ones(LARGE // 4), torch.ones(2), rank_pool.current_store
    if rank == 1:
        dist.isend(large, 0, groups[3], tag=4)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        store.wait(["seen"])
        return [told(lambda g=g: dist.barrier(g)) for g in groups]
    said = [
        told(lambda: dist.recv(pair, 1, groups[0], tag=1)),
        told(lambda: dist.send(large, 1, groups[1], tag=2)),
        told(lambda: dist.irecv(pair, 1, groups[2], tag=3).get_future().wait()),
        told(lambda: dist.recv(large, 1, groups[3], tag=4)),
    ]
    store.set("seen", "")
    return said + [told(lambda g=g: dist.isend(pair, 2, g)) for g in groups]


def test_a_rank_that_is_killed_is_named(mortal_ranks):
    zero, _, two = mortal_ranks(3).run(outlives_a_peer, may_die=[1], group_timeout_s=20)
    for (kind, text, seconds), begin in zip(zero[:4], ("recv from", "send to", "recv from", "recv from"), strict=True):
        assert kind == PeerLostError.__name__, text
        assert re.match(rf"{begin} rank 1, tag \d.*: rank 1 has died, or has left the group, before", text), text
        assert seconds < 10  # of 20
    assert "before more than" in zero[3][1]
    for kind, text, _ in zero[4:]:
        assert kind == ClosedError.__name__, text
        assert "rank 1 has died" in text
    for kind, text, _ in two:
        assert kind == PeerLostError.__name__, text
        assert "rank 1" in text


def receives_from_the_dead(rank, world):
    """What a rank has sent arrives though it has left; what it has not is an error, that harms no other traffic when
    nobody waits for it.
    """
    dist.barrier()
    if rank == 2:
        dist.send(letter(2, 0, 0, 20), 0, tag=1)
        dist.send(letter(2, 0, 1, 20), 0, tag=2)
        dist.destroy_process_group()
        return
    if rank == 0:
        links, deadline = dist.group.WORLD.links, time.monotonic() + 5
        never = dist.irecv(torch.ones(1), 2, tag=3)
        while not links.lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert links.lost() == [2]
        into = blank(20)
        assert dist.recv(into, tag=2) == 2
        assert torch.equal(into, letter(2, 0, 1, 20))
        dist.recv(into, 2, tag=1)
        assert torch.equal(into, letter(2, 0, 0, 20))
        while not never.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.send(torch.ones(3), 1)
        assert dist.recv(torch.ones(3)) == 1  # from any rank, and one is gone
        with pytest.raises(PeerLostError, match="recv from rank 2, tag 3: rank 2 has died, or has left the group"):
            never.wait()
    else:
        dist.recv(torch.ones(3), 0)
        dist.send(torch.ones(3), 0)


def test_what_a_rank_has_sent_arrives_though_it_has_left(ranks):
    ranks(3).run(receives_from_the_dead)


def all_others_leave(rank, world):
    dist.barrier()
    if rank == 0:
        return told(lambda: dist.recv(torch.ones(1)))


def test_receiving_from_any_rank_when_all_are_gone(ranks):
    kind, text, seconds = ranks(3).run(all_others_leave)[0]
    assert kind == PeerLostError.__name__
    assert "recv from any rank, tag 0: rank" in text
    assert seconds < 10


def closes_with_messages_outstanding(rank, world):
    dist.barrier()
    group, works = dist.group.WORLD, []
    if rank == 0:
        works = [dist.irecv(torch.ones(3), 1), dist.isend(torch.ones(LARGE // 4), 1), dist.irecv(torch.ones(1))]
        futures = [works[0].get_future()]
        waiting = []
        thread = threading.Thread(target=lambda: waiting.append(told(works[1].wait)))
        thread.start()
        time.sleep(0.05)
        start = time.monotonic()
        dist.destroy_process_group()
        thread.join()
        assert time.monotonic() - start < 10
        assert all(f.done() for f in futures)
        assert waiting[0][0] == ClosedError.__name__
        rank_pool.current_store.set("left", "")
    else:
        rank_pool.current_store.wait(["left"])
        dist.destroy_process_group()
    for work in works:
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(ClosedError, match="the group was closed"):
            work.wait()
    with pytest.raises(ClosedError, match="closed"):
        group.send([torch.ones(1)], 1 - rank, 0)
    with pytest.raises(ClosedError, match="closed"):
        group.recv_anysource([torch.ones(1)], 0)


def test_closing_ends_what_is_outstanding(ranks):
    for _ in range(3):
        ranks(2).run(closes_with_messages_outstanding)


def forks(rank, world):
    into, peer = blank(3), 1 - rank
    work = dist.irecv(into, peer)  # starts the thread
    dist.barrier()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = [told(lambda: dist.send(torch.ones(1), peer)), told(lambda: dist.recv(torch.ones(1))), told(work.wait)]
        os.write(writing, "\n".join(f"{kind}: {text}" for kind, text, _ in said).encode())
        dist.destroy_process_group()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    dist.send(letter(rank, peer, 0, 3), peer)
    work.wait()
    assert torch.equal(into, letter(peer, rank, 0, 3))
    return said


def test_a_fork_harms_nothing_and_cannot_send(ranks):
    for said in ranks(2).run(forks):
        assert len(said) == 3, said
        for line in said:
            assert line.startswith(ClosedError.__name__), said
            assert "fork" in line, said


def is_idle(rank, world):
    """The thread sleeps when nothing is outstanding, and hardly runs while a receive is that nothing was sent for."""
    thread_of = time.clock_gettime  # CPU time of the whole process
    dist.recv(blank(1), 1) if rank == 0 else dist.send(blank(1), 0)
    mail = dist.group.WORLD.transport.mail
    time.sleep(0.1)
    used = []
    for outstanding in (False, True):
        if outstanding:
            work = dist.irecv(blank(1), 1 - rank)
            time.sleep(0.2)
        elif mail._thread:
            assert mail._is_napping
        start = thread_of(time.CLOCK_PROCESS_CPUTIME_ID)
        time.sleep(0.3)
        used.append(thread_of(time.CLOCK_PROCESS_CPUTIME_ID) - start)
    dist.send(blank(1), 1 - rank)
    work.wait()
    return used


def test_no_thread_spins_when_nobody_waits(ranks):
    for idle, outstanding in ranks(2).run(is_idle):
        assert idle < 0.01, idle
        assert outstanding < 0.06, outstanding
