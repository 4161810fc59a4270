"""The HIP platform: what the runtime is told, call by call, compared with sequences written from its documentation.

Sources, by symbol, of HIP's reference (rocm.docs.amd.com/projects/HIP, hip_runtime_api.h):

* Virtual memory: hipMemAddressReserve (alignment 0, flags 0), hipMemCreate (flags 0; hipMemAllocationTypePinned = 1,
  hipMemLocationTypeDevice = 1, hipMemHandleTypePosixFileDescriptor = 1), hipMemExportToShareableHandle (flags 0),
  hipMemImportFromShareableHandle, hipMemMap (offset 0, flags 0), hipMemSetAccess (hipMemAccessFlagsProtReadWrite = 3),
  hipMemUnmap, hipMemRelease, hipMemAddressFree. A handle may be released as soon as it is mapped. That an import takes
  the descriptor itself from ROCm 7.1 on and its address before: torch, CUDASymmetricMemory.cu, USE_ROCM.
* Peers: hipDeviceEnablePeerAccess (flags 0), without which copies between GPUs are staged on the host
  (hipMemcpyAsync's notes).
* IPC: hipExtMallocWithFlags (hipDeviceMallocFinegrained = 1), hipIpcGetMemHandle, hipIpcOpenMemHandle
  (hipIpcMemLazyEnablePeerAccess = 1), hipIpcCloseMemHandle before the owner's hipFree.
* Host memory: hipHostRegister (Portable 1 | Mapped 2), hipHostGetDevicePointer (flags 0), hipHostUnregister.
* Streams: hipMemcpyAsync (hipMemcpyDeviceToDeviceNoCU = 1024), hipMemcpy2DAsync (dst, dpitch, src, spitch, width,
  height), hipStreamWaitValue32 (hipStreamWaitValueEq = 1, mask), hipStreamWriteValue32 (flags 0),
  hipEventCreateWithFlags (hipEventDisableTiming = 2), hipEventRecord, hipStreamWaitEvent (flags 0).
* Capture: hipThreadExchangeStreamCaptureMode (hipStreamCaptureModeRelaxed = 2).
"""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from types import SimpleNamespace

import pytest
import torch

import fake_hip
from fake_hip import PAGE, FakeHip, installed
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Flow, Part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine import stream
from iris_pg.copy_engine.rounds import in_rounds
from iris_pg.errors import DriverError, HeapExhaustedError, UnsupportedError
from iris_pg.flags import ControlPage
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms import hip, hip_runtime, hip_streams
from iris_pg.program import Copy, Copy2D, Program, Ref, Signal, Take

DEVICE = torch.device("cuda", 0)
PROP, ACCESS = ("prop", 1, 1, 1, 0), ("access", 1, 0, 3)


@pytest.fixture
def runtime(monkeypatch):
    with installed(monkeypatch) as fake:
        yield fake


class TwoRanks:
    """As much of Links as a heap needs: the other rank says and shares the same."""

    rank, world, group = 0, 2, "g"

    def exchange(self, card, fds=(), what=""):
        theirs = [os.dup(fd) for fd in fds]
        return [SimpleNamespace(payload=card, fds=list(fds)), SimpleNamespace(payload=card, fds=theirs)]


# Structures -----------------------------------------------------------------------------------------------------------


def test_structures_lie_in_memory_as_the_header_says():
    """Sizes and offsets of hipMemAllocationProp, hipMemAccessDesc and hipIpcMemHandle_t on x86-64."""
    prop = hip_runtime.AllocationProperties
    assert ctypes.sizeof(prop) == 32 and ctypes.sizeof(hip_runtime.AccessDescription) == 12
    assert (prop.requested_handle_types.offset, prop.location.offset, prop.win32_handle_meta_data.offset) == (4, 8, 16)
    assert prop.compression_type.offset == 24 and prop.usage.offset == 26
    assert ctypes.sizeof(hip_runtime.IpcHandle) == 64


def test_every_function_is_called_with_what_it_takes():
    """A stand-in refuses arguments of the wrong number or type, or the tests below would show nothing."""
    fake = FakeHip()
    with pytest.raises(AssertionError, match="takes 5 arguments"):
        fake.hipMemcpyAsync(1, 2, 3, 4)
    with pytest.raises((TypeError, ctypes.ArgumentError)):
        fake.hipMemcpyAsync(1, 2, 3, "a kind", 4)


def test_without_a_runtime_it_says_so(monkeypatch):
    hip_runtime.runtime.cache_clear()
    monkeypatch.setattr(hip_runtime, "_loaded", lambda: None)
    with pytest.raises(UnsupportedError, match="libamdhip64.so, and this process has none loaded; install a torch"):
        hip_runtime.runtime()


def test_a_failed_call_is_named(runtime):
    runtime.statuses["hipHostRegister"] = 712
    with pytest.raises(DriverError, match="hipHostRegister failed: hipError712") as raised:
        hip.register(0x1000, 4096)
    assert raised.value.status == 712


# Devices --------------------------------------------------------------------------------------------------------------


def test_gpus_are_told_by_their_pci_address(runtime):
    assert hip.uuid(DEVICE) == "0000:0c:00.0"
    assert hip.number_of("0000:22:00.0") == 1 and hip.number_of("0000:aa:00.0") is None
    assert hip.can_reach(DEVICE, "0000:22:00.0") and hip.can_reach(DEVICE, "0000:0c:00.0")
    assert hip.can_reach(DEVICE, "0000:aa:00.0"), "it is not seen here; the runtime says when memory is mapped"
    runtime.taken()
    hip.enable_peers(DEVICE)
    assert runtime.taken() == [
        ("hipGetDeviceCount",),
        ("hipDeviceCanAccessPeer", 0, 1),
        ("hipDeviceEnablePeerAccess", 1, 0),
    ]
    runtime.statuses["hipDeviceEnablePeerAccess"] = 704  # hipErrorPeerAccessAlreadyEnabled
    hip.enable_peers(DEVICE)
    runtime.statuses["hipDeviceEnablePeerAccess"] = 1
    with pytest.raises(DriverError):
        hip.enable_peers(DEVICE)


# Memory ---------------------------------------------------------------------------------------------------------------


def descriptor_or_address(version):
    return "7.2.0" if version == "by value" else "7.0.2"


@pytest.mark.parametrize("passing", ["by value", "by address"])
def test_init_and_heap(monkeypatch, passing):
    """A heap of two ranks with one area: what is reserved, made, exported, imported, mapped; and how it ends."""
    with installed(monkeypatch, descriptor_or_address(passing)) as runtime:
        memory = hip.DeviceMemory(DEVICE)
        assert memory.grows and memory.page == PAGE and memory.place == "0000:0c:00.0"
        (*begin, make, export, release) = runtime.taken()
        assert begin == [
            ("hipGetDeviceCount",),
            ("hipDeviceCanAccessPeer", 0, 1),
            ("hipDeviceEnablePeerAccess", 1, 0),
            ("hipDeviceGetPCIBusId", "text", 64, 0),
            ("hipMemGetAllocationGranularity", PROP, 0),
        ]
        handle = export[2]
        assert make == ("hipMemCreate", PAGE, PROP, 0)
        assert export[0::1][0] == "hipMemExportToShareableHandle" and export[2:] == (handle, 1, 0)
        assert release == ("hipMemRelease", handle)

        heap = SymmetricHeap(TwoRanks(), 3 * PAGE, dict(staging=100), memory)
        a, b = heap.bases
        calls = runtime.taken()
        assert calls[:2] == [("hipMemAddressReserve", 4 * PAGE, 0, None, 0)] * 2
        assert [call[0] for call in calls[2:5]] == ["hipMemCreate", "hipMemExportToShareableHandle", "hipMemRelease"]
        assert calls[2] == ("hipMemCreate", PAGE, PROP, 0)
        mapped = calls[5:]
        for base, (imported, to, access, released) in zip((a, b), (mapped[:4], mapped[4:]), strict=True):
            assert imported[0] == "hipMemImportFromShareableHandle" and imported[2] == 1
            assert isinstance(imported[1], int) and imported[1] > 2
            assert to[:4] == ("hipMemMap", base, PAGE, 0) and to[5] == 0
            assert access == ("hipMemSetAccess", base, PAGE, ACCESS, 1)
            assert released == ("hipMemRelease", to[4])

        heap.allocate(10)  # more is mapped behind it: a base never moves
        more = [call for call in runtime.taken() if call[0] == "hipMemMap"]
        assert [call[1:3] for call in more] == [(a + PAGE, 3 * PAGE), (b + PAGE, 3 * PAGE)] and heap.bases == [a, b]

        heap.close()
        gc.collect()
        assert sorted(runtime.taken()) == sorted(
            [("synchronize",)] * 2
            + [("hipMemUnmap", base + at, n) for base in (a, b) for at, n in ((0, PAGE), (PAGE, 3 * PAGE))]
            + [("hipMemAddressFree", base, 4 * PAGE) for base in (a, b)]
        )


def test_an_import_takes_the_descriptor_itself_or_its_address(monkeypatch):
    for passing, is_pointer in (("by value", False), ("by address", True)):
        with installed(monkeypatch, descriptor_or_address(passing)) as runtime:
            memory = hip.DeviceMemory(DEVICE)
            given = []
            runtime.does["hipMemImportFromShareableHandle"] = lambda out, fd, kind, given=given: given.append(fd)
            memory.map(PAGE, 5, PAGE)
            (fd,) = given
            assert hasattr(fd, "_obj") == is_pointer
            assert (fd._obj if is_pointer else fd).value == 5


def test_a_peer_without_access_is_an_error_and_nothing_stays_mapped(runtime):
    memory = hip.DeviceMemory(DEVICE)
    runtime.statuses["hipMemSetAccess"] = 1
    runtime.taken()
    with pytest.raises(UnsupportedError, match="cannot access the memory of a peer's GPU.*xGMI"):
        memory.map(PAGE, 5, PAGE)
    assert [call[0] for call in runtime.taken()][-2:] == ["hipMemUnmap", "hipMemRelease"]


def test_a_gpu_without_room_is_an_error(runtime):
    memory = hip.DeviceMemory(DEVICE)
    runtime.statuses["hipMemCreate"] = 2
    with pytest.raises(HeapExhaustedError, match="has no 4194304 bytes"):
        memory.create_segment(2 * PAGE)


def test_where_memory_cannot_be_exported_there_are_ipc_handles(monkeypatch):
    """All of the heap at once; this rank's own memory is where it was made, and a peer's is opened."""
    with installed(monkeypatch, exports=False) as runtime:
        memory = hip.DeviceMemory(DEVICE)
        assert not memory.grows
        runtime.taken()

        class Peer(TwoRanks):
            def exchange(self, card, fds=(), what=""):
                messages = super().exchange(card, fds, what)
                if fds:  # the peer's descriptor says that it is another process's
                    os.close(messages[1].fds[0])
                    theirs = os.memfd_create("peer", os.MFD_CLOEXEC)
                    packed = bytearray(os.pread(fds[0], hip._IPC.size, 0))
                    packed[8:16] = (1).to_bytes(8, "little")
                    os.write(theirs, packed)
                    messages[1].fds[:] = [theirs]
                return messages

        heap = SymmetricHeap(Peer(), 3 * PAGE, dict(staging=100), memory)
        mine, theirs = heap.bases
        assert runtime.taken() == [
            ("hipExtMallocWithFlags", 4 * PAGE, 1),
            ("hipIpcGetMemHandle", ("handle", "ipc"), mine),
            ("hipIpcOpenMemHandle", ("handle", "ipc"), 1),
        ]
        assert heap.allocate(3 * PAGE - 4096) and heap.bases == [mine, theirs] and not runtime.taken()
        with pytest.raises(HeapExhaustedError, match="do not fit"):
            heap.allocate(PAGE)
        heap.close()
        gc.collect()
        ended = [call for call in runtime.taken() if call[0] != "synchronize"]
        assert sorted(ended) == [("hipFree", mine), ("hipIpcCloseMemHandle", theirs)]


def test_a_tensor_keeps_its_memory():
    memory = (ctypes.c_uint8 * 64)(*range(64))

    class Owner:
        pass

    owner = Owner()
    tensor = hip.over(torch.device("cpu"), ctypes.addressof(memory), 64, owner)
    alive = weakref.ref(owner)
    del owner
    view = tensor.view(torch.int32)[3:5]
    del tensor
    gc.collect()
    assert alive() and view.tolist() == [0x0F0E0D0C, 0x13121110]
    del view
    gc.collect()
    assert alive() is None


def test_host_memory(runtime):
    assert hip.register(0x5000, 8192) == 0x5000
    hip.unregister(0x5000)
    assert runtime.taken() == [
        ("hipHostRegister", 0x5000, 8192, 3),
        ("hipHostGetDevicePointer", 0x5000, 0),
        ("hipHostUnregister", 0x5000),
    ]


# Streams --------------------------------------------------------------------------------------------------------------

STREAM, SECOND = 0x77, 0x88


@pytest.fixture
def engine(runtime, monkeypatch):
    """The stream engine on the HIP platform."""
    for name in ("Calls", "Event", "copy", "copy_2d", "flags", "on", "stream_handle"):
        monkeypatch.setattr(stream.gpu, name, getattr(hip_streams, name))
    return runtime


def address(ref):
    return 0x1000 * (ref.rank + 1) + {"in": 0x100000, "heap": 0x200000, "flags": 0x300000}[ref.buffer] + ref.offset


def put(program, runtime, second=None, lanes=True, number=None, joins=False):
    calls = stream.bind(stream.lower(program, address, lanes=lanes), DEVICE, 32, 0x9000, second, joins)
    runtime.taken()
    calls.marked(STREAM, number) if number is not None else calls(STREAM)
    return runtime.taken()


def test_an_all_gather(engine):
    """Two ranks, output in the heap: copy the own part; let the peer write; when the peer lets us, copy and say so;
    wait for the peer's part; say that operation 7 is done.
    """
    page = ControlPage(2)
    part = Part(1, 64, Ref(0, "in", 0), Ref(1, "heap", 0))
    own = Copy(Ref(0, "heap", 0), Ref(0, "in", 0), 64)
    flow = Flow("all_gather", (part,), (Part(1, 64, Ref(0, "heap", 64)),), own, to_all=True, zero_copy=True)
    program = build(Setting(0, 2, page, tag=0xABC, pushes=True), flow)
    enter, done = page.enter, page.done
    mine, theirs = 0x301000, 0x302000  # control pages
    assert put(program, engine, lanes=False, number=7) == [
        ("hipMemcpyAsync", 0x201000, 0x101000, 64, 1024, STREAM),
        ("hipStreamWriteValue32", STREAM, theirs + enter(0), 0xABC, 0),
        ("hipStreamWaitValue32", STREAM, mine + enter(1), 0xABC, 1, 0xFFFFFFFF),
        ("hipStreamWriteValue32", STREAM, mine + enter(1), 0, 0),
        ("hipMemcpyAsync", 0x202000, 0x101000, 64, 1024, STREAM),
        ("hipStreamWriteValue32", STREAM, theirs + done(0), 0xABC, 0),
        ("hipStreamWaitValue32", STREAM, mine + done(1), 0xABC, 1, 0xFFFFFFFF),
        ("hipStreamWriteValue32", STREAM, mine + done(1), 0, 0),
        ("hipStreamWriteValue32", STREAM, 0x9000, 7, 0),
    ]


LANES = (
    Signal(Ref(1, "flags", 0), 5),
    Take(Ref(0, "flags", 64), 1, 6, 1),
    Copy2D(Ref(0, "heap", 0), Ref(0, "in", 0), 8, 3, 16, 32, 1),
)


def test_two_lanes_are_two_streams(engine):
    """hipMemcpy2DAsync takes (dst, dpitch, src, spitch, width, height, kind, stream)."""
    second = stream.SecondStream(SECOND)
    assert engine.taken() == [("hipEventCreateWithFlags", 2)] * 2
    calls = put(Program(0, 2, LANES), engine, second, number=3)
    forked, joined = calls[0][1], calls[-3][1]
    assert forked != joined
    assert calls == [
        ("hipEventRecord", forked, STREAM),
        ("hipStreamWaitEvent", SECOND, forked, 0),
        ("hipStreamWriteValue32", STREAM, 0x302000, 5, 0),
        ("hipStreamWaitValue32", SECOND, 0x301040, 6, 1, 0xFFFFFFFF),
        ("hipStreamWriteValue32", SECOND, 0x301040, 0, 0),
        ("hipMemcpy2DAsync", 0x201000, 16, 0x101000, 32, 8, 3, 1024, SECOND),
        ("hipEventRecord", joined, SECOND),
        ("hipStreamWaitEvent", STREAM, joined, 0),
        ("hipStreamWriteValue32", STREAM, 0x9000, 3, 0),
    ]
    del second
    gc.collect()
    assert sorted(engine.taken()) == sorted([("hipEventDestroy", forked), ("hipEventDestroy", joined)])


def test_a_peer_is_told_of_its_part_before_this_rank_has_its_own(engine):
    """Flags at the end of the first lane do not wait for the second; those of the second go with the last call."""
    second = stream.SecondStream(SECOND)
    engine.taken()
    own, part = Copy(Ref(0, "heap", 0), Ref(0, "in", 0), 8, 1), Copy(Ref(1, "heap", 0), Ref(0, "in", 0), 8)
    names = [name for name, *_ in put(Program(0, 2, (own, part, Signal(Ref(1, "flags", 0), 5))), engine, second)]
    copies, last = ["hipMemcpyAsync"] * 2, ["hipEventRecord", "hipStreamWaitEvent"]
    assert names[2:] == [*copies, "hipStreamWriteValue32", *last]
    names = [name for name, *_ in put(Program(0, 2, (part, own, Signal(Ref(1, "flags", 0), 5, 1))), engine, second)]
    assert names[2:] == [*copies, *last, "hipStreamWriteValue32"]


def test_rounds_wait_for_what_was_moved_beside(engine):
    """Of two chunks that come, the first is copied out while the second is sent: no flag is written or awaited before
    both have ended.
    """
    there, out, credit = Ref(1, "heap", 0), Ref(0, "heap", 0), Take(Ref(0, "flags", 192), 1, 4)
    program = Program(
        *(0, 2),
        (
            Copy(there, Ref(0, "in", 0), 64),
            Signal(Ref(1, "flags", 0), 5),
            credit,
            Copy(there + 64, Ref(0, "in", 64), 32),
            Take(Ref(0, "flags", 64), 1, 6, 1),
            Copy(out, Ref(0, "heap", 128), 64, 1),
            Signal(Ref(1, "flags", 128), 7, 1),
        ),
    )
    second = stream.SecondStream(SECOND)
    engine.taken()
    calls = put(in_rounds(program), engine, second, joins=True)
    assert [(name, args[-1] if "Memcpy" in name else None) for name, *args in calls] == [
        ("hipMemcpyAsync", STREAM),
        ("hipStreamWriteValue32", None),
        *[("hipStreamWaitValue32", None), ("hipStreamWriteValue32", None)] * 2,
        ("hipEventRecord", None),
        ("hipStreamWaitEvent", None),
        ("hipMemcpyAsync", SECOND),
        ("hipMemcpyAsync", STREAM),
        ("hipEventRecord", None),
        ("hipStreamWaitEvent", None),
        ("hipStreamWriteValue32", None),
    ]


def test_a_rank_orders_its_lanes_by_events(engine):
    """In one lane they have an order, and nothing is written."""
    own = Ref(0, "flags", 0)
    steps = Take(Ref(0, "flags", 64), 0, 1), Signal(own, 5), Take(own, 0, 5, 1), Copy(Ref(0, "heap", 0), own, 8, 1)
    second = stream.SecondStream(SECOND)
    engine.taken()
    calls = put(Program(0, 2, steps), engine, second)
    assert [(name, *args[:1]) for name, *args in calls[:2]] == [
        ("hipEventRecord", calls[0][1]),
        ("hipStreamWaitEvent", SECOND),
    ]
    assert calls[2][0::2] == ("hipEventRecord", STREAM) and calls[3][:3] == ("hipStreamWaitEvent", SECOND, calls[2][1])
    assert [name for name, *_ in calls[4:]] == ["hipMemcpyAsync", "hipEventRecord", "hipStreamWaitEvent"]
    assert [name for name, *_ in put(Program(0, 2, steps), engine, lanes=False)] == ["hipMemcpyAsync"]


def test_a_capture_is_one_chain_and_kernels_are_loaded_beside_it(engine):
    with hip.outside_of_capture():
        assert engine._mode == 2
    assert engine._mode == 0 and [call[0] for call in engine.taken()] == ["hipThreadExchangeStreamCaptureMode"] * 2
    assert put(Program(0, 2, LANES), engine, lanes=False) == [
        ("hipStreamWriteValue32", STREAM, 0x302000, 5, 0),
        ("hipStreamWaitValue32", STREAM, 0x301040, 6, 1, 0xFFFFFFFF),
        ("hipStreamWriteValue32", STREAM, 0x301040, 0, 0),
        ("hipMemcpy2DAsync", 0x201000, 16, 0x101000, 32, 8, 3, 1024, STREAM),
    ]


@pytest.mark.parametrize(
    "name", ["hipMemcpyAsync", "hipMemcpy2DAsync", "hipStreamWaitValue32", "hipStreamWriteValue32"]
)
def test_a_refused_call_is_named(engine, name):
    engine.statuses[name] = 900  # hipErrorStreamCaptureUnsupported
    steps = (*LANES, Copy(Ref(0, "heap", 0), Ref(0, "in", 0), 8))
    with pytest.raises(DriverError, match=f"{name} failed"):
        put(Program(0, 2, steps), engine, lanes=False)


# A trial --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def places(monkeypatch):
    nbytes = max(hip_streams.CHECKED_BYTES)
    tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(3)]
    flag = ctypes.c_uint32(5)
    at = [t.data_ptr() for t in tensors]
    monkeypatch.setattr(fake_hip, "real", [*((address, nbytes) for address in at), (ctypes.addressof(flag), 4)])
    on_cpu = hip_streams.view
    monkeypatch.setattr(hip_streams, "view", lambda device, *args: on_cpu(torch.device("cpu"), *args))
    here, there = (at[0], at[1]), at[2]
    yield (torch.device("cpu", 0), STREAM, here, there, (ctypes.addressof(flag),) * 2, lambda: None), tensors
    del flag


def test_a_trial_moves_bytes_and_looks_at_them(runtime, places):
    arguments, tensors = places
    hip_streams.check(*arguments)
    assert torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2]) and tensors[0].any()
    assert [call[3] for call in runtime.calls if call[0] == "hipMemcpyAsync"] == [64, 64, 8192, 8192, 65536, 65536]


def test_a_trial_of_one_rank_has_no_peer(runtime, places):
    (device, stream, here, _, *rest), tensors = places
    hip_streams.check(device, stream, here, here[1], *rest)
    assert torch.equal(tensors[0], tensors[1]) and not tensors[2].any()


def test_a_copy_that_is_skipped_is_noticed(monkeypatch, places):
    with installed(monkeypatch, skips=16 << 10):
        with pytest.raises(UnsupportedError, match="a copy of 64 bytes with hipMemcpyDeviceToDeviceNoCU.*engine='cu'"):
            hip_streams.check(*places[0])


def test_flags_that_are_not_written_are_noticed(runtime, places, monkeypatch):
    for name in ("hipStreamWriteValue32", "hipStreamWaitValue32"):
        runtime.does[name] = lambda *_: 0
    with pytest.raises(UnsupportedError, match="hipStreamWriteValue32 left 0 in host memory and not 1001"):
        hip_streams.check(*places[0])


def test_a_gpu_without_stream_memory_operations(runtime, places, monkeypatch):
    runtime.does["hipDeviceGetAttribute"] = lambda out, *_: 0
    with pytest.raises(UnsupportedError, match="no stream memory operations"):
        hip_streams.check(*places[0])
