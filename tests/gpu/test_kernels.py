"""The cu engine's kernels on a GPU. Ranks are streams of this process and segments slices of one tensor, so one GPU
serves every number of ranks.
"""

import os
import time
from dataclasses import replace

import pytest
import torch

from iris_pg.collectives.flow import Flow, Fold, Part
from iris_pg.errors import DeadlineError
from iris_pg.kernels.device import DeviceKernels, one_shot_bytes
from iris_pg.kernels.launch import area_bytes
from iris_pg.launches import launches
from iris_pg.program import Copy, Ref

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # streams that share a queue would wait for each other

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device"),
]

SLOT = 1 << 14
SMS = 3
USER = 8 << 20  # bytes of a segment for outputs
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]


class Ranks:
    """DeviceKernels of several ranks on one GPU."""

    def __init__(self, world, timeout_s=20.0, slot_bytes=SLOT, comm_sms=SMS):
        areas = area_bytes(world, slot_bytes, comm_sms)
        self.world, self.offsets, at = world, {}, 0
        for name, nbytes in areas.items():
            self.offsets[name], at = at, at + nbytes
        self.heap = (at + 255) // 256 * 256  # offset of what users allocate
        self.segments = torch.zeros(world, self.heap + USER, dtype=torch.uint8, device="cuda")
        self.bases = [segment.data_ptr() for segment in self.segments]
        self.streams = [torch.cuda.Stream() for _ in range(world)]
        arguments = (self.bases, self.offsets, slot_bytes, comm_sms, timeout_s)
        self.kernels = [DeviceKernels(rank, world, *arguments) for rank in range(world)]
        torch.cuda.synchronize()

    def exchanges(self, flows, tensors):
        """Return every rank's exchanges; ``tensors`` [rank] is name -> tensor, "heap" is the segment."""

        def of(rank):
            def address(ref):
                if ref.buffer == "heap":
                    return self.bases[ref.rank] + self.heap + ref.offset
                return tensors[rank][ref.buffer].data_ptr() + ref.offset

            return launches(rank, self.world, flows[rank], address, one_shot_bytes(self.world))

        made = [of(rank) for rank in range(self.world)]
        for kernels, exchanges in zip(self.kernels, made, strict=True):
            kernels.prepare(exchanges)  # loading a kernel may wait for those that run
        return made

    def launch(self, made, ranks=None):
        for rank in range(self.world) if ranks is None else ranks:
            self.streams[rank].wait_stream(torch.cuda.current_stream())
            self.kernels[rank].launch(made[rank], self.streams[rank])

    def wait(self, limit_s=30.0):
        deadline = time.monotonic() + limit_s
        while not all(stream.query() for stream in self.streams):
            if time.monotonic() > deadline:
                waiting = [k.waiting for k in self.kernels]
                for kernels in self.kernels:
                    kernels.abort()
                torch.cuda.synchronize()
                raise AssertionError(f"not done after {limit_s} s; ranks wait for {waiting}")
            time.sleep(1e-4)

    def run(self, flows, tensors):
        self.launch(self.exchanges(flows, tensors))
        self.wait()
        for kernels in self.kernels:
            kernels.check()


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids="W{}".format)
def ranks(request):
    return Ranks(request.param)


@pytest.fixture(scope="module")
def two():
    return Ranks(2)


def data(rank, n, iteration=0, to=0):
    index = torch.arange(n, dtype=torch.int64, device="cuda")
    return ((index * 7 + index // 251 * 3 + rank * 31 + iteration * 13 + to * 57) % 251).to(torch.uint8)


def unaligned(tensor, offset):
    """Return a copy whose first byte is ``offset`` after a multiple of 256."""
    room = torch.empty(tensor.numel() * tensor.element_size() + 256, dtype=torch.uint8, device="cuda")
    copy = room[offset : offset + tensor.numel() * tensor.element_size()].view(tensor.dtype)
    copy.copy_(tensor)
    return copy


def blank(n, offset=0):
    return unaligned(torch.full([n], 0xEE, dtype=torch.uint8, device="cuda"), offset)


# Each rank's side of operations, as iris_pg.operations states them; tensors are "in" and "out".


def all_gather(rank, world, n, in_heap=False, from_heap=False):
    peers = [(rank + k) % world for k in range(1, world)]
    here, out = Ref(rank, "heap" if from_heap else "in", 0), "heap" if in_heap else "out"
    return Flow(
        "all_gather",
        tuple(Part(p, n, here, Ref(p, "heap", rank * n) if in_heap else None) for p in peers),
        tuple(Part(p, n, Ref(rank, out, p * n), Ref(p, "heap", 0) if from_heap else None) for p in peers),
        Copy(Ref(rank, out, rank * n), here, n),
        to_all=True,
        zero_copy=in_heap,
        pulls=from_heap,
    )


def all_to_all(rank, world, sizes):
    """``sizes`` [from][to] in bytes."""
    peers = [(rank + k) % world for k in range(1, world)]
    sends = tuple(Part(p, sizes[rank][p], Ref(rank, "in", sum(sizes[rank][:p]))) for p in peers)
    receives = tuple(Part(p, sizes[p][rank], Ref(rank, "out", sum(sizes[q][rank] for q in range(p)))) for p in peers)
    mine = Ref(rank, "out", sum(sizes[q][rank] for q in range(rank))), Ref(rank, "in", sum(sizes[rank][:rank]))
    return Flow("all_to_all", sends, receives, Copy(*mine, sizes[rank][rank]) if sizes[rank][rank] else None)


def broadcast(rank, world, root, n):
    if rank == root:
        peers = [(rank + k) % world for k in range(1, world)]
        return Flow("broadcast", tuple(Part(p, n, Ref(rank, "in", 0)) for p in peers), to_all=True)
    return Flow("broadcast", receives=(Part(root, n, Ref(rank, "out", 0)),), to_all=True)


def barrier(rank, world):
    peers = [(rank + k) % world for k in range(1, world)]
    here = Ref(rank, "in", 0)
    return Flow("barrier", tuple(Part(p, 8, here) for p in peers), tuple(Part(p, 8, here + 8 * p + 8) for p in peers))


def all_reduce(rank, op, dtype, n, in_place=False):
    result = Ref(rank, "in" if in_place else "out", 0)
    return Fold("all_reduce", op, dtype, (Part(rank, n, Ref(rank, "in", 0)),), result, to_all=True)


def reduce_scatter(rank, world, op, dtype, sizes, in_place=False):
    parts = tuple(Part(p, n, Ref(rank, "in", sum(sizes[:p]))) for p, n in enumerate(sizes) if n)
    mine = Ref(rank, "in", sum(sizes[:rank])) if in_place else Ref(rank, "out", 0)
    return Fold("reduce_scatter", op, dtype, parts, mine if sizes[rank] else None)


def reduce_to(rank, op, dtype, root, n):
    return Fold(
        "reduce", op, dtype, (Part(root, n, Ref(rank, "in", 0)),), Ref(rank, "out", 0) if rank == root else None
    )


def combined(op, tensors):
    """Return what the kernels should give: in the order of ranks, 16-bit floats in float32."""
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else tensors[0].dtype
    result = tensors[0].to(wide)
    for tensor in tensors[1:]:
        other = tensor.to(wide)
        if op in ("sum", "avg"):
            result = result + other
        elif op == "product":
            result = result * other
        elif op in ("min", "max"):
            result = (torch.minimum if op == "min" else torch.maximum)(result, other)
        else:
            result = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op](result, other)
    if op == "avg":
        result = (
            result / len(tensors) if wide.is_floating_point else torch.div(result, len(tensors), rounding_mode="trunc")
        )
    return result.to(tensors[0].dtype)


def values(rank, numel, dtype, iteration=0):
    index = torch.arange(numel, dtype=torch.int64, device="cuda")
    whole = (index * 5 + index // 127 + rank * 3 + iteration * 11) % 17 - (0 if dtype == torch.uint8 else 8)
    return (whole / 8).to(dtype) if dtype.is_floating_point else whole.to(dtype)


SIZES = [1, 7, 16, 4096, 8192 * SMS, 8192 * SMS + 1, SLOT * SMS + 13, (1 << 20) + 3]


@pytest.mark.parametrize("in_heap", [False, True], ids=["ordinary", "heap"])
@pytest.mark.parametrize("offset", [0, 4, 1], ids="offset{}".format)
def test_all_gather(ranks, in_heap, offset):
    world = ranks.world
    for iteration, n in enumerate([*SIZES, 3 << 20] if world == 2 else SIZES if world < 8 else SIZES[:-1]):
        inputs = [unaligned(data(r, n, iteration), offset) for r in range(world)]
        expected = torch.cat(inputs)
        heap = ranks.segments[:, ranks.heap : ranks.heap + world * n]
        heap.fill_(0xEE)
        outputs = [heap[r] if in_heap else blank(world * n, 256 - offset) for r in range(world)]
        flows = [all_gather(r, world, n, in_heap) for r in range(world)]
        ranks.run(flows, [{"in": inputs[r], "out": outputs[r]} for r in range(world)])
        for r, output in enumerate(outputs):
            assert torch.equal(output, expected), f"rank {r}, {n} bytes"


def test_all_gather_in_place(ranks):
    world = ranks.world
    for iteration, n in enumerate([48, 100_000, (3 << 20) // world // 16 * 16]):
        ranks.segments[:, ranks.heap : ranks.heap + world * n].fill_(0xEE)
        outputs = [ranks.segments[r, ranks.heap : ranks.heap + world * n] for r in range(world)]
        inputs = [data(r, n, iteration) for r in range(world)]
        for r in range(world):
            outputs[r][r * n : (r + 1) * n].copy_(inputs[r])
        flows = [replace(all_gather(r, world, n, in_heap=True), own=None) for r in range(world)]
        ranks.run(flows, [{"in": outputs[r][r * n : (r + 1) * n]} for r in range(world)])
        for r, output in enumerate(outputs):
            assert torch.equal(output, torch.cat(inputs)), f"rank {r}, {n} bytes"


@pytest.mark.parametrize("offset", [0, 1], ids="offset{}".format)
def test_all_gather_out_of_the_heap(ranks, offset):
    """In turn with one into the heap, which has the same flags."""
    world = ranks.world
    for iteration, n in enumerate([(2 << 20) + 16, (3 << 20) + 5, 100]):
        inputs, into = [data(r, n, iteration) for r in range(world)], ranks.segments[:, ranks.heap :]
        for pulls in (True, False, True) if world * n <= USER else (True, True):
            into.fill_(0xEE)
            for r in range(world):
                into[r, :n].copy_(inputs[r])
            outputs = [blank(world * n, offset) if pulls else into[r, : world * n] for r in range(world)]
            flows = [all_gather(r, world, n, in_heap=not pulls, from_heap=pulls) for r in range(world)]
            ranks.run(flows, [{"in": inputs[r], "out": outputs[r]} for r in range(world)])
            for r, output in enumerate(outputs):
                assert torch.equal(output, torch.cat(inputs)), f"rank {r}, {n} bytes, pulls {pulls}"


def test_all_to_all_of_any_sizes(ranks):
    world = ranks.world
    for iteration in range(6):
        if iteration % 2:
            sizes = [[(1 << 12) * (iteration + 1)] * world for _ in range(world)]
        else:  # uneven, some nothing
            lengths = [0, 1, 17, SLOT, SLOT * SMS + 5, 3 * SLOT * SMS, 100_003]
            sizes = [[lengths[(3 * s + 5 * r + iteration) % 7] for r in range(world)] for s in range(world)]
        sent = [[data(s, sizes[s][r], iteration, r) for r in range(world)] for s in range(world)]
        tensors = [
            {"in": torch.cat(sent[r]), "out": blank(sum(sizes[s][r] for s in range(world)))} for r in range(world)
        ]
        ranks.run([all_to_all(r, world, sizes) for r in range(world)], tensors)
        for r in range(world):
            assert torch.equal(tensors[r]["out"], torch.cat([sent[s][r] for s in range(world)])), f"rank {r}"


def test_broadcast_and_barrier(ranks):
    world = ranks.world
    for iteration, n in enumerate(SIZES):
        root = iteration % world
        tensors = [{"in": data(r, n, iteration), "out": blank(n)} for r in range(world)]
        ranks.run([broadcast(r, world, root, n) for r in range(world)], tensors)
        for r in range(world):
            assert r == root or torch.equal(tensors[r]["out"], tensors[root]["in"]), f"rank {r}, {n} bytes"
        ranks.run([barrier(r, world) for r in range(world)], [{"in": blank(8 * world + 8)} for _ in range(world)])


REDUCTIONS = [
    *((op, dtype) for op in ("sum", "avg", "product", "min", "max") for dtype in FLOATS),
    *((op, dtype) for op in ("sum", "avg", "max", "bxor") for dtype in INTEGERS),
    *((op, "int32") for op in ("product", "min", "band", "bor")),
]


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_all_reduce_of_every_type(two, op, dtype):
    check_all_reduce(two, op, dtype, [64, SLOT * SMS + 64], offsets=(0,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_all_reduce(ranks, dtype):
    check_all_reduce(
        ranks, "sum", dtype, [1, 3, 4096, SLOT * SMS + 1, 300_001] if ranks.world < 8 else [1, 4096, 300_001]
    )


def check_all_reduce(ranks, op, dtype, numels, offsets=(0, 1, 2)):
    world, dtype = ranks.world, getattr(torch, dtype)
    for iteration, numel in enumerate(numels):
        in_place, offset = bool(iteration % 2), offsets[iteration % len(offsets)] * dtype.itemsize
        inputs = [unaligned(values(r, numel, dtype, iteration), offset) for r in range(world)]
        expected = combined(op, inputs)
        tensors = [{"in": t, "out": t if in_place else torch.full_like(t, 3)} for t in inputs]
        name, n = str(dtype).removeprefix("torch."), numel * dtype.itemsize
        ranks.run([all_reduce(r, op, name, n, in_place) for r in range(world)], tensors)
        for r in range(world):
            assert torch.equal(tensors[r]["out"], expected), f"rank {r}, {numel} elements"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduce_scatter_and_reduce(ranks, dtype):
    world, name, dtype = ranks.world, dtype, getattr(torch, dtype)
    for iteration, numel in enumerate([1, 8, 1025, SLOT * SMS + 3, 200_001]):
        even = iteration < 3
        numels = [numel + (0 if even else 7 * r) for r in range(world)]
        sizes = [m * dtype.itemsize for m in numels]
        inputs = [values(r, sum(numels), dtype, iteration) for r in range(world)]
        expected = combined("avg", inputs).split(numels)
        tensors = [
            {"in": inputs[r], "out": torch.full([numels[r]], 3, dtype=dtype, device="cuda")} for r in range(world)
        ]
        ranks.run([reduce_scatter(r, world, "avg", name, sizes) for r in range(world)], tensors)
        for r in range(world):
            assert torch.equal(tensors[r]["out"], expected[r]), f"rank {r}, {numel} elements"
        root = iteration % world
        expected = combined("sum", [t[:numel] for t in inputs])
        tensors = [
            {"in": inputs[r][:numel].clone(), "out": torch.zeros(numel, dtype=dtype, device="cuda")}
            for r in range(world)
        ]
        ranks.run([reduce_to(r, "sum", name, root, numel * dtype.itemsize) for r in range(world)], tensors)
        assert torch.equal(tensors[root]["out"], expected), f"root {root}, {numel} elements"


@pytest.mark.parametrize("n", [64, 100_000, 3 << 20])
def test_launches_tell_that_they_are_done(ranks, n):
    """The last CTA of a launch writes a number where the host sees it, behind all that the launch has written."""
    world = ranks.world
    tensors = [
        dict(zip(("in", "out"), map(torch.empty_like, (data(r, n), data(r, world * n))), strict=True))
        for r in range(world)
    ]
    made = ranks.exchanges([all_gather(r, world, n) for r in range(world)], tensors)
    prepared = [kernels.prepare(exchanges) for kernels, exchanges in zip(ranks.kernels, made, strict=True)]
    told = torch.zeros(world, 16, dtype=torch.int32, pin_memory=True)
    for iteration in range(1, 20):
        for r in range(world):
            tensors[r]["in"].copy_(data(r, n, iteration))
            ranks.streams[r].wait_stream(torch.cuda.current_stream())
        for r in range(world):
            prepared[r].launch(ranks.streams[r].cuda_stream, told[r].data_ptr(), (0xFFFFFFF0 + iteration) & 0xFFFFFFFF)
        ranks.wait()
        assert [x & 0xFFFFFFFF for x in told[:, 0].tolist()] == [(0xFFFFFFF0 + iteration) & 0xFFFFFFFF] * world
        expected = torch.cat([data(r, n, iteration) for r in range(world)])
        assert all(torch.equal(tensors[r]["out"], expected) for r in range(world)), iteration


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_replayed_with_new_inputs_between_eager_launches(world):
    """Each rank captures a graph of several operations on its own stream; nothing in it counts launches."""
    ranks = Ranks(world)
    sizes = [48, 20_000, 200_000, 1_000_003]
    tensors = [
        {f"{kind}{n}": torch.zeros(n * (1 if kind == "in" else world), dtype=torch.uint8, device="cuda")
         for kind in ("in", "out") for n in sizes}
        for _ in range(world)
    ]  # fmt: skip
    plans = []
    for n in sizes:
        named = [{"in": t[f"in{n}"], "out": t[f"out{n}"]} for t in tensors]
        plans.append(ranks.exchanges([all_gather(r, world, n) for r in range(world)], named))
        halves = [[n // world] * world for _ in range(world)]
        plans.append(ranks.exchanges([all_to_all(r, world, halves) for r in range(world)], named))
        plans.append(ranks.exchanges([broadcast(r, world, 1, n) for r in range(world)], named))
    graphs = []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for plan in plans[::3]:
                ranks.kernels[rank].launch(plan[rank], ranks.streams[rank])
        graphs.append(graph)
    for iteration in range(12):
        for r in range(world):
            for n in sizes:
                tensors[r][f"in{n}"].copy_(data(r, n, iteration))
                tensors[r][f"out{n}"].fill_(0xEE)
        if iteration % 3 == 2:
            ranks.launch(plans[iteration % 2 + 1])  # something else in between
            ranks.wait()
        if iteration % 4 == 3:
            for plan in plans[::3]:
                ranks.launch(plan)
        else:
            for rank in range(world):
                ranks.streams[rank].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(ranks.streams[rank]):
                    graphs[rank].replay()
        ranks.wait()
        for n in sizes:
            expected = torch.cat([tensors[r][f"in{n}"] for r in range(world)])
            for r in range(world):
                assert torch.equal(tensors[r][f"out{n}"], expected), f"iteration {iteration}, rank {r}, {n} bytes"


def test_many_launches_in_flight_with_late_ranks(two):
    """Ranks run ahead of each other as far as they can; no slot is written before it has been read."""
    count, n = 60, SLOT * SMS + 48
    sizes = [n if i % 3 else 64 + i for i in range(count)]
    inputs = [[data(r, m, i) for i, m in enumerate(sizes)] for r in range(2)]
    outputs = [[blank(2 * m) for m in sizes] for _ in range(2)]
    made = []
    for i, m in enumerate(sizes):
        named = [{"in": inputs[r][i], "out": outputs[r][i]} for r in range(2)]
        flows = [broadcast(r, 2, i % 2, m) if i % 5 == 4 else all_gather(r, 2, m) for r in range(2)]
        made.append(two.exchanges(flows, named))
    torch.cuda._sleep(1)  # loads its kernel, which would wait for those that run
    torch.cuda.synchronize()
    for first in (0, 1):
        for i in range(count):
            if i % 20 == 7:
                with torch.cuda.stream(two.streams[first]):
                    torch.cuda._sleep(20_000_000)
            two.launch(made[i], [first])
        for i in range(count):
            two.launch(made[i], [1 - first])
        two.wait()
        for i in range(count):
            for r in range(2):
                if i % 5 != 4:
                    assert torch.equal(outputs[r][i], torch.cat([inputs[0][i], inputs[1][i]])), f"launch {i}, rank {r}"
                elif r != i % 2:
                    assert torch.equal(outputs[r][i][: sizes[i]], inputs[1 - r][i]), f"launch {i}, rank {r}"
        for row in outputs:
            for output in row:
                output.fill_(0xEE)


@pytest.mark.parametrize("n", [64, 100_000])
def test_a_missing_rank_is_named_at_the_deadline(n):
    ranks = Ranks(4, timeout_s=0.5)
    tensors = [{"in": data(r, n), "out": blank(4 * n)} for r in range(4)]
    made = ranks.exchanges([all_gather(r, 4, n) for r in range(4)], tensors)
    began = time.monotonic()
    ranks.launch(made, [0, 1, 3])
    time.sleep(0.2)
    assert ranks.kernels[0].waiting == [2]
    ranks.wait(10)
    assert 0.4 < time.monotonic() - began < 5
    for rank in (0, 1, 3):
        assert ranks.kernels[rank].late == 2
        with pytest.raises(DeadlineError, match="for rank 2"):
            ranks.kernels[rank].check()
    began = time.monotonic()
    ranks.launch(made, [0, 1, 3])  # a group that has failed waits no more
    ranks.wait(10)
    assert time.monotonic() - began < 0.4


def test_abort_ends_a_wait():
    ranks = Ranks(2, timeout_s=60)
    tensors = [{"in": data(r, 50_000), "out": blank(100_000)} for r in range(2)]
    made = ranks.exchanges([all_gather(r, 2, 50_000) for r in range(2)], tensors)
    ranks.launch(made, [0])
    time.sleep(0.1)
    assert not ranks.streams[0].query()
    ranks.kernels[0].abort()
    ranks.wait(5)
    assert ranks.kernels[0].late is None


def test_beside_a_kernel_that_fills_the_gpu(two):
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    busy = torch.cuda.Stream()
    n = 1_000_000
    tensors = [{"in": data(r, n), "out": blank(2 * n)} for r in range(2)]
    made = two.exchanges([all_gather(r, 2, n) for r in range(2)], tensors)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(20):
            a @ a
    for _ in range(10):
        two.launch(made)
    with torch.cuda.stream(busy):
        for _ in range(20):
            a @ a
    two.wait()
    torch.cuda.synchronize()
    assert torch.equal(tensors[0]["out"], torch.cat([tensors[0]["in"], tensors[1]["in"]]))
