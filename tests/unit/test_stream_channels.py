"""Queues of one-sided transfers that streams carry, on a fake GPU (fake_gpu.py): order, waits, deadlines, the end."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import fake_gpu
from iris_pg.copy_engine import stream_channels
from iris_pg.copy_engine.calls import Count, Increase, Linear, Poll
from iris_pg.copy_engine.stream_channels import StreamChannels
from iris_pg.copy_engine.tile import Tile
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, DriverError, UnsupportedError
from iris_pg.platforms import cuda_streams
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.gpu import platform as gpu


@pytest.fixture
def channels(monkeypatch):
    """Channels of rank 0 of 2 with a deadline of half a second, on a fake GPU."""
    words = atomics()

    def increase(device, flag, value, bits):
        add = words.rmw["add", bits // 8]
        return lambda raw: fake_gpu.Stream.all[raw].submit(lambda: add(flag, value))

    def copy_2d(dst, src, width_bytes, rows, dst_pitch_bytes, src_pitch_bytes):
        def rectangle():
            words.copy_rows(dst, dst_pitch_bytes, src, src_pitch_bytes, width_bytes, rows)

        return lambda raw: fake_gpu.Stream.all[raw].submit(rectangle)

    fake_gpu.Stream.current = fake_gpu.Stream()
    monkeypatch.setattr(stream_channels, "increase", increase)
    monkeypatch.setattr(StreamChannels, "_read", lambda self, flag: words.load32(flag))

    def told(stream, address, value):
        return fake_gpu.Stream.all[stream].submit(lambda: words.store32(address, value)) or 0

    def copied(dst, src, nbytes, stream):
        return fake_gpu.copy(dst, src, nbytes)(stream) or 0

    four = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 4)
    kept = four(copied), four(lambda stream, address, value, _: told(stream, address, value))
    places = [ctypes.cast(function, ctypes.c_void_p).value for function in kept]
    found = dict(zip(("cuMemcpyDtoDAsync_v2", "cuStreamWriteValue32_v2"), places, strict=True))
    monkeypatch.setattr(cuda_streams, "address_of", found.__getitem__)
    for name, value in dict(copy=fake_gpu.copy, copy_2d=copy_2d, stream_handle=lambda raw: raw).items():
        monkeypatch.setattr(gpu, name, value)
    fakes = dict(Stream=fake_gpu.Stream, device=lambda device: fake_gpu.current(fake_gpu.Stream.current))
    fakes |= dict(current_stream=lambda device=None: fake_gpu.Stream.current)
    fakes |= dict(is_current_stream_capturing=lambda: False)
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    links = SimpleNamespace(group="g", rank=0, world=2, lost=set)
    heap = SimpleNamespace(links=links, rank=0, world=2, base=0, device=fake_gpu.DEVICE, words_for=hex)
    made = StreamChannels(heap, 0.5)
    yield made
    made.close(ClosedError("the test is over"))
    assert not made._thread.is_alive()
    for stream in fake_gpu.Stream.all.values():
        stream.submit(None)
    fake_gpu.Stream.all.clear()


def copy_of(source, target):
    return Linear(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


def test_a_transfer_follows_the_current_stream_and_its_signal_follows_it(channels):
    source, target, flag = torch.zeros(1000), torch.zeros(1000), torch.zeros(1, dtype=torch.int64)
    fake_gpu.Stream.current.submit(lambda: time.sleep(0.05))
    fake_gpu.Stream.current.submit(lambda: source.fill_(7))
    channels.submit("put", 1, 0, [copy_of(source, target), Increase(flag.data_ptr(), 3, 64)], True)
    assert target.eq(7).all() and flag.item() == 3
    for value in (2**64 - 1, 5):  # modulo 2^64
        channels.submit("put", 1, 0, [Increase(flag.data_ptr(), value, 64)], False)
    channels.quiet(1, 0)
    assert flag.item() == 7
    rows = torch.arange(24, dtype=torch.uint8)
    into = torch.zeros(40, dtype=torch.uint8)
    channels.submit("put_tile", 0, 3, [Tile(into.data_ptr(), rows.data_ptr(), 3, 2, 10, 6)], True)
    assert into.nonzero().flatten().tolist() == [1, 10, 11, 20, 21]  # the first is 0
    channels.submit("put", 1, 0, [], True)


def test_what_follows_a_wait_on_a_channel_waits_and_other_channels_do_not(channels):
    source, target, other = torch.ones(10), torch.zeros(2, 10), torch.zeros(10)
    flag = torch.tensor([-5], dtype=torch.int32)  # 2^32 - 5, unsigned
    channels.submit("put", 1, 0, [Poll(flag.data_ptr(), 2**32 - 2), copy_of(source, target[0])], False)
    channels.submit("put", 1, 0, [copy_of(source, target[1])], False)
    channels.submit("put", 1, 1, [copy_of(source, other)], True)
    assert other.all() and not target.any()
    threading.Timer(0.1, lambda: flag.fill_(-2)).start()
    channels.quiet(None, 0)
    assert target.all()
    channels.submit("put", 0, 0, [Poll(flag.data_ptr(), 1)], True)


def test_what_is_armed_at_once_goes_gate_by_gate(channels, monkeypatch):
    """Two queues with three transfers each, behind gates in memory of the host, which are opened one by one."""
    monkeypatch.setattr(StreamChannels, "_read", lambda self, flag: pytest.fail("no copy is needed to look at a gate"))
    source, target, gates = torch.arange(3.0) + 1, torch.zeros(2, 3), torch.zeros(3, 8, dtype=torch.int64)
    counts = torch.zeros(2, dtype=torch.int32)
    done = threading.Event()
    fake_gpu.Stream.current.submit(lambda: done.wait(5))
    for peer in (0, 1):
        calls = []
        for i in range(3):
            calls += [Poll(gates[i].data_ptr(), 7, in_host=True), copy_of(source[i], target[peer, i])]
            calls.append(Count(counts[peer:].data_ptr(), i + 1))
        channels.submit("triggered", peer, 7, calls, False)
    assert not target.any()
    for i in range(3):
        atomics().store64(gates[i].data_ptr(), 7)
        if i == 0:
            time.sleep(0.02)
            assert not target.any()  # what the current stream was told before comes first, whatever the gates are
            done.set()
        deadline = time.monotonic() + 5
        while not target[:, i].all():
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        assert target.count_nonzero() == 2 * (i + 1)
        time.sleep(0.02 * (2 - i))  # longer than the thread looks without a pause
    channels.quiet(None, 7)
    assert counts.tolist() == [3, 3]
    channels.submit("triggered", 1, 7, [Poll(gates[0].data_ptr(), 8, in_host=True), copy_of(source, target[1])], False)
    with pytest.raises(
        DeadlineError, match=f"rank 0, {gates[0].data_ptr():#x}: it has been 7, and not >= 8, for 0.5 s"
    ):
        channels.quiet(1, 7)


def test_a_driver_call_that_fails_behind_a_gate_ends_its_queue(channels, monkeypatch):
    source, target, gate = torch.ones(3), torch.zeros(3), torch.zeros(8, dtype=torch.int64)
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_uint64] * 4)(lambda *_: 700)
    place = ctypes.cast(refuse, ctypes.c_void_p).value
    monkeypatch.setattr(cuda_streams, "address_of", lambda name: place)
    calls = [Poll(gate.data_ptr(), 1, in_host=True), copy_of(source, target), Count(target.data_ptr(), 9)]
    channels.submit("triggered", 1, 7, calls, False)
    channels.check(1, 7)
    atomics().store64(gate.data_ptr(), 1)
    with pytest.raises(DriverError, match="a copy behind a gate failed: 700") as raised:
        channels.quiet(1, 7)
    with pytest.raises(DriverError, match="a copy behind a gate failed: 700"):
        channels.check(1, 7)
    channels.check(0, 7)
    assert raised.value.status == 700 and not target.any()
    with pytest.raises(ClosedError, match="triggered: the queue to rank 1 on channel 7 has failed before"):
        channels.submit("triggered", 1, 7, calls, False)
    with pytest.raises(UnsupportedError, match="behind a gate; a plan has linear copies"):
        channels.submit("triggered", 0, 7, [calls[0], Increase(target.data_ptr(), 1)], False)


def test_a_wait_in_vain_ends_and_moves_nothing(channels):
    source, target, flag = torch.ones(10), torch.zeros(10), torch.zeros(1, dtype=torch.int32)
    channels.submit("put", 1, 0, [Poll(flag.data_ptr(), 9), copy_of(source, target)], False)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="it has been 0, and not >= 9, for 0.5 s; 2 transfers are in the queue"):
        channels.submit("put", 1, 0, [copy_of(source, target)], True)
    assert 0.3 < time.monotonic() - start < 5
    with pytest.raises(ClosedError, match="put: the queue to rank 1 on channel 0 has failed before"):
        channels.submit("put", 1, 0, [copy_of(source, target)], True)
    assert not target.any()
    channels.submit("put", 1, 1, [copy_of(source, target)], True)
    assert target.all()


def test_the_end_drops_what_waits(channels):
    flag = torch.zeros(1, dtype=torch.int32)
    channels.submit("put", 1, 0, [Poll(flag.data_ptr(), 9)], False)
    raised = []

    def quiet():
        try:
            channels.quiet(1, 0)
        except ClosedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=quiet)
    thread.start()
    time.sleep(0.05)
    channels.close(ClosedError("it was closed"))
    thread.join(5)
    assert raised == ["it was closed"]


@pytest.mark.parametrize("channel", [-1, 8, "0"])
def test_there_are_eight_channels(channels, channel):
    with pytest.raises(ArgumentError, match=r"channel=.*; it takes 0\.\.7"):
        channels.submit("put", 0, channel, [Increase(0, 1, 32)], True)
