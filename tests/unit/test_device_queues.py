"""Operations of AMD GPUs on SDMA queues, with the streams that begin and await them; two ranks in one process, on a
stand-in for rocm-xio.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import device_kernels as kernels
from fake_hip import installed
from fake_xio import SIGNATURES, FakeXio
from iris_pg import device_queues
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Part
from iris_pg.collectives.setting import Setting
from iris_pg.context import iris
from iris_pg.copy_engine import xio
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Line
from iris_pg.device_queues import DeviceQueues, make_queues, words_for
from iris_pg.errors import QueueError, UnsupportedError
from iris_pg.flags import LINE, ControlPage
from iris_pg.platforms import cpu, hip
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.gpu import platform
from iris_pg.program import Copy, Ref

PLACES = ["0000:0c:00.0", "0000:22:00.0"]


class Page:
    """As much of a DevicePage as queues need; what the host and the engine see is the same."""

    def __init__(self, rank, world, n_words, said=()):
        self._memory = cpu.private_memory(cpu.page_up(LINE * n_words))
        self.address_of_word = self.host_address_of_word = lambda number: self._memory.address + LINE * number

        def exchange(card, what=""):
            return [SimpleNamespace(payload=card | (dict(said) if p != rank else {})) for p in range(world)]

        links = SimpleNamespace(group="g", rank=rank, world=world, exchange=exchange)
        self.heap = SimpleNamespace(rank=rank, world=world, links=links)


@pytest.fixture
def fakes():
    made = []

    def make(*args, **keywords):
        made.append(FakeXio(*args, **keywords))
        return made[-1]

    yield make
    while made:
        made.pop().stop()


def as_stream(ops, patience):
    """Do what a stream is told."""
    for op in ops:
        if op.waits:
            patience.wait(op.address, 0xFFFFFFFF, op.value, 0, op.value)
        else:
            atomics().store32(op.address, op.value)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize(("zero_copy", "seed"), [(True, None), (False, 3)])
def test_an_all_gather_of_two_ranks(fakes, signature, zero_copy, seed):
    """Ten operations; stream and queue are ordered both ways, so an output may be read, and an input written, when the
    stream is done.
    """
    control, n, first, patience = ControlPage(2), 3000, 4, Patience(20.0, 100)
    both = [{name: cpu.private_memory(1 << 16) for name in ("heap", "flags", "pairs")} for _ in range(2)]
    inputs = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)]
    outputs = [both[rank]["heap"].tensor(0, 2 * n) for rank in range(2)]
    pages = [Page(rank, 2, first + words_for(2)) for rank in range(2)]
    for rank in range(2):
        for offset, value in control.initial().items():
            atomics().store32(both[rank]["flags"].address + offset, value)

    def address(ref):
        if ref.buffer == "in":
            return inputs[ref.rank].data_ptr() + ref.offset
        return both[ref.rank][ref.buffer].address + ref.offset

    queues = [
        DeviceQueues(xio.Library(fakes(signature, seed=seed).module), page, first, [0, 1], 20.0, lambda: None)
        for page in pages
    ]
    for i in range(10):
        prepared = []
        for rank in range(2):
            peer, here = 1 - rank, Ref(rank, "in", 0)
            there = Ref(peer, "heap", rank * n) if zero_copy else None
            own = Copy(Ref(rank, "heap", rank * n), here, n)
            part = Part(peer, n, Ref(rank, "heap", peer * n))
            flow = Flow("all_gather", (Part(peer, n, here, there),), (part,), own, True, zero_copy)
            setting = Setting(rank, 2, control, tag=77, pair_bytes=1024, first_slot=i % 2, pushes=True)
            prepared.append(queues[rank].prepare(build(setting, flow), address))
            inputs[rank].copy_((torch.arange(n) * 7 + 31 * rank + 13 * i) % 251)
        for submit, _ in prepared:
            submit(None)
        assert all(op.value in (0, 1) for _, ops in prepared for op in ops)
        for _, ops in prepared:  # both streams begin before either waits
            as_stream([op for op in ops if not op.waits][: sum(not o.waits and o.value == 1 for o in ops)], patience)
        for _, ops in prepared:
            as_stream(ops[next(k for k, op in enumerate(ops) if op.waits) :], patience)
        for output in outputs:
            for rank in range(2):
                assert torch.equal(output[rank * n : (rank + 1) * n], inputs[rank]), (i, rank)
        for tensor in inputs:
            tensor.fill_(255)
        for output in outputs:
            output.fill_(254)
    assert all(queue.close() for queue in queues)


# Who gets queues ------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch, fakes):
    module = ModuleType("xio.sdma_ep")
    module.__dict__.update(vars(fakes("old").module))
    monkeypatch.setitem(sys.modules, "xio", ModuleType("xio"))
    monkeypatch.setitem(sys.modules, "xio.sdma_ep", module)
    xio.load.cache_clear()
    yield xio
    xio.load.cache_clear()


def made(monkeypatch, places=PLACES, said=()):
    with installed(monkeypatch):
        assert hip.uuid(torch.device("cuda", 0)) == PLACES[0]
        return make_queues(Page(0, 2, words_for(2), said), 0, places, 5.0, lambda: None)


def test_a_second_group_copies_by_streams_and_says_so(library, monkeypatch):
    queues, words = made(monkeypatch)
    assert queues and words.startswith("through SDMA queues of rocm-xio")
    none, words = made(monkeypatch)
    assert none is None and words == (
        "by streams (hipMemcpyDeviceToDeviceNoCU): SDMA queues of a rank belong to g/0->0"
    )
    assert queues.close()
    none, words = made(monkeypatch, said=dict(lack="rank 1 has none"))
    assert none is None and words.endswith("rank 1 has none"), "all ranks do what one has to"
    again, _ = made(monkeypatch)
    assert again.close()


def test_what_goes_wrong_on_one_rank_is_an_error_on_all(library, monkeypatch):
    with pytest.raises(UnsupportedError, match="rank 1: no such library"):
        made(monkeypatch, said=dict(problem="no such library"))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([PLACES[0]] * 2, "ranks share a GPU"),
        ([PLACES[0], "0000:aa:00.0"], "does not see the GPUs 0000:aa:00.0 of other ranks.*unset HIP_VISIBLE_DEVICES"),
    ],
)
def test_gpus_that_have_no_queue(library, monkeypatch, places, message):
    none, words = made(monkeypatch, places)
    assert none is None and re.search(f"^by streams .*{message}", words)


def test_the_package_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "xio", None)
    xio.load.cache_clear()
    with pytest.raises(UnsupportedError, match=r"rank 0: SDMA user queues need xio\.sdma_ep"):
        made(monkeypatch)


# A one-sided context --------------------------------------------------------------------------------------------------


@pytest.fixture
def a_gpu(monkeypatch):
    """The CPU, taken for an AMD GPU."""
    for name in ("RANK", "WORLD_SIZE", "IRIS_PG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    with installed(monkeypatch):
        memory = cpu.HostMemory()
        memory.place = PLACES[0]
        monkeypatch.setattr(platform, "DeviceMemory", lambda device: memory)
        monkeypatch.setattr(platform, "register", hip.register)
        monkeypatch.setattr(platform, "unregister", hip.unregister)
        yield


@pytest.mark.parametrize("package", ["old", "missing"])
def test_a_context_on_an_amd_gpu(a_gpu, monkeypatch, fakes, package):
    if package == "missing":
        monkeypatch.setitem(sys.modules, "xio", None)
        xio.load.cache_clear()
        with pytest.raises(UnsupportedError, match="rank 0: SDMA user queues need"):
            iris(heap_size=1 << 20, engines=("sdma",), device="cuda:0")
        return
    library = xio.Library(fakes(package).module)
    monkeypatch.setattr(xio, "load", lambda: library)
    with iris(heap_size=1 << 20, engines=("sdma",), device="cuda:0") as ctx:
        a, b, flag = ctx.arange(100), ctx.zeros(100, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
        ctx.put(a, 0, b, signal_flag=flag, signal_value=3)
        assert torch.equal(a, b) and flag.item() == 3
        assert library.owner(0, 0)
    assert not library.owner(0, 0), "a context that is closed gives its queues back"
    for round_ in range(3):  # kernels go on where those of the context before have stopped
        with iris(heap_size=1 << 20, engines=("sdma",), device="cuda:0") as ctx:
            engine, bases = ctx.get_copy_engine_ctx(), ctx.get_heap_bases()
            assert engine.shape == (1, 6)
            a, b, flag = ctx.arange(64) + round_, ctx.zeros(64, dtype=torch.int64), ctx.zeros(1, dtype=torch.int32)
            landed, keep = torch.zeros(1, dtype=torch.int32), torch.ones(64, dtype=torch.int8)
            a = ctx.zeros(64, dtype=torch.int64).copy_(a)
            kernels.run(kernels.put_1d, a, b, keep, 0, 0, bases, engine, N=64, REVERSED=False)
            kernels.run(kernels.signals, flag, 5, 0, 0, bases, engine)
            kernels.run(kernels.waits, 0, engine, landed)
            assert torch.equal(a, b) and flag.item() == 5 and landed.item() == 1
            if round_ == 2:
                producers = library.kernels[0, 0]
                producers._words[8 + Line.LIMIT_NS] = 200_000_000
                atomics().rmw["add", 8](producers.context.cached_wptr, 28)  # one that never commits
                kernels.run(kernels.signals, flag, 5, 0, 0, bases, engine)
                with pytest.raises(QueueError, match="rank 0: a kernel waited in vain for a producer"):
                    ctx.quiet()


def test_a_context_on_another_gpu_is_refused():
    with pytest.raises(UnsupportedError, match="it is on the CPU, or on a GPU that torch sees"):
        iris(device="cuda:0")


def test_numbers_are_of_pci_addresses_and_not_of_ranks(monkeypatch):
    with installed(monkeypatch):
        assert device_queues.numbers(PLACES[::-1], 0, "g") == [1, 0]
