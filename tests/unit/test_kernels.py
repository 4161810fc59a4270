"""The cu engine: what its kernels compile to for GPUs, and what they do in the interpreter, ranks being threads
here.
"""

import ctypes
import mmap
import os
import platform
import re
from types import SimpleNamespace

import pytest
import torch

from iris_pg.collectives.flow import Fold, Part
from iris_pg.copy_engine.reduction import reduce_bytes
from iris_pg.device_exchanges import DeviceExchanges
from iris_pg.errors import DeadlineError, UnsupportedError
from iris_pg.kernels.device import gpu_limits, source_of
from iris_pg.kernels.engine import Exchange, KernelEngine, Message, area_bytes, reduction_types
from iris_pg.kernels.launch import Launches
from iris_pg.launches import launches
from iris_pg.program import Ref

SLOT = 256


GPUS = [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)]


def gpu_launch(backend, world, nbytes, symmetric, zero_copy=False, pulls=False, reduction=None, address=1 << 30):
    """Return what rank 0 launches on a GPU: an all-gather, or a reduce-scatter, or the same without symmetry."""
    limits = gpu_limits(backend.upper(), comm_sms=16)
    launches = Launches(0, world, [1 << 40] * world, 0, 1 << 16, 1 << 16, 4096, 4096, limits)
    peers = range(1, world)
    if reduction:
        sends = [Message(p, address + p * nbytes, nbytes) for p in peers]
    else:
        sends = [Message(p, address, nbytes, (1 << 40) + nbytes) for p in peers]
    receives = [Message(p, address + p * nbytes, nbytes, (1 << 41) + p * nbytes) for p in peers]
    exchange = Exchange(sends, receives, (address, address, nbytes), zero_copy, pulls, reduction, symmetric)
    (launch,) = launches.of(exchange, 10**9)
    return launch


LAUNCHES = {
    "exchange_words": dict(nbytes=4096, symmetric=True),
    "exchange": dict(nbytes=8 << 20, symmetric=True),
    "exchange_words in pairs": dict(nbytes=4096, symmetric=False),
    "exchange with credits": dict(nbytes=8 << 20, symmetric=False),
    "zero_copy": dict(nbytes=8 << 20, symmetric=True, zero_copy=True),
    "zero_copy that pulls": dict(nbytes=8 << 20, symmetric=True, pulls=True),
    "reduce_words": dict(nbytes=4096, symmetric=True, reduction=("avg", "bfloat16")),
    "reduce": dict(nbytes=8 << 20, symmetric=True, reduction=("avg", "bfloat16")),
    "reduce with credits": dict(nbytes=4096, symmetric=False, reduction=("sum", "int64")),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_has_every_argument_of_its_kernel_and_its_constants_come_last(name):
    launch = gpu_launch("cuda", 4, **LAUNCHES[name])
    names = list(source_of(launch.kernel, 4, launch.constants)["signature"])
    assert set(names[len(launch.arguments) :]) == set(launch.constants)
    types = source_of(launch.kernel, 4, launch.constants)["signature"]
    for argument, value in zip(names, launch.arguments, strict=False):
        assert isinstance(types[argument], tuple) == isinstance(value, tuple), argument


def compiled(launch, backend, arch, width):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(**source_of(launch.kernel, launch.constants["world"], launch.constants))
    return triton.compile(source, target=GPUTarget(backend, arch, width), options=dict(num_warps=launch.warps)).asm


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("backend,arch,width", GPUS)
def test_flags_are_released_and_acquired_at_system_scope(name, backend, arch, width):
    launch = gpu_launch(backend, 4, **LAUNCHES[name])
    assert launch.kernel == name.split()[0]
    asm = compiled(launch, backend, arch, width)
    if launch.kernel.endswith("_words"):  # no flag apart from the words: written through, and read past the caches
        lines = [line.strip() for line in (asm["ptx"] if backend == "cuda" else asm["amdgcn"]).splitlines()]
        if backend == "cuda":
            written = [line for line in lines if "st.global" in line and ".b64" in line]
            read = [line for line in lines if re.search(r"ld\.[\w.]*global[\w.]*b64", line)]
            assert written and all("st.global.wt.v2.b64" in line for line in written), written
            assert read and all("ld.volatile.global.v2.b64" in line for line in read), read
        else:
            written = [line for line in lines if re.match(r"buffer_store_dwordx4.* sc0 sc1", line)]
            read = [line for line in lines if re.match(r"buffer_load_dwordx4.* sc0 sc1", line)]
            assert len(written) >= 3 and len(read) >= 3
    elif backend == "cuda":
        atomics = re.findall(r"(?:atom|ld|st)\.[\w.]*(?:acquire|release)[\w.]*", asm["ptx"])
        assert atomics and all(".sys." in a for a in atomics), atomics
        assert any("acquire" in a for a in atomics) and any("release" in a for a in atomics)
    else:
        # LLVM AMDGPU memory model, gfx942: system scope is sc0 and sc1 on the write-back and on the invalidation.
        lines = [line.strip() for line in asm["amdgcn"].splitlines()]
        for instruction in ("buffer_wbl2", "buffer_inv"):
            found = [line for line in lines if line.startswith(instruction)]
            assert found and all("sc0 sc1" in line for line in found), found
        # The release waits for the stores of its own wave; every wave does before the barrier.
        drains = [i for i, line in enumerate(lines) if line == "s_waitcnt vmcnt(0)" and lines[i - 1] == ";;#ASMSTART"]
        assert drains
        for i in drains:
            follow = [line for line in lines[i:] if line.startswith(("s_barrier", "buffer_store", "global_store"))]
            assert follow[0].startswith("s_barrier"), follow[:3]
        clocks = [i for i, line in enumerate(lines) if line.startswith("s_memrealtime")]
        assert clocks and all(lines[i + 1] == "s_waitcnt lgkmcnt(0)" for i in clocks)


@pytest.mark.parametrize("name", LAUNCHES)
def test_aligned_memory_is_accessed_16_bytes_at_a_time(name):
    ptx = compiled(gpu_launch("cuda", 2, **LAUNCHES[name]), "cuda", 90, 32)["ptx"]
    loads = re.findall(r"ld\.(?:volatile\.)?global\.v(\d)\.b(\d+)", ptx)
    stores = re.findall(r"st\.global\.(?:wt\.)?v(\d)\.b(\d+)", ptx)
    for accesses in (loads, stores):
        assert accesses and all(int(count) * int(bits) == 128 for count, bits in accesses), accesses
    odd = compiled(gpu_launch("cuda", 2, **LAUNCHES[name], address=(1 << 30) + 8), "cuda", 90, 32)["ptx"]
    assert odd != ptx  # what is not a multiple of 16 must not be


@pytest.mark.parametrize("world", [2, 3, 8])
def test_all_ranks_choose_the_same_kernel_for_one_operation(world):
    """Of uneven parts too: a rank sees every size, but another one as its own."""
    limits = gpu_limits("CUDA", comm_sms=3)
    arguments = (world, [1 << 40] * world, 0, 1 << 16, 1 << 16, 4096, 4096, limits)
    engines = [Launches(rank, *arguments) for rank in range(world)]
    for n in [17, 33, 129, 257, *range(8, 400_000, 9973), 1 << 20, 3 << 20]:
        one_shot_bytes = 0 if n % 2 else 1 << 14
        for fold in (
            lambda rank, n=n: Fold("all_reduce", "sum", "int8", (Part(rank, n, ref(rank)),), ref(rank), to_all=True),
            lambda rank, n=n: Fold(
                "reduce_scatter",
                *("sum", "int8", tuple(Part(p, n + p // 2 * 16, ref(rank)) for p in range(world)), ref(rank)),
            ),
        ):
            made = [launches(r, world, fold(r), lambda ref: 1 << 30, one_shot_bytes) for r in range(world)]
            for phase in zip(*made, strict=True):
                chosen = [engine.of(exchange, 1) for engine, exchange in zip(engines, phase, strict=True)]
                chosen = [launch for (launch,) in chosen]
                assert len({(launch.kernel, launch.ctas) for launch in chosen}) == 1, (n, chosen)
                for rank, launch in enumerate(chosen):
                    sends = launch.arguments[1]
                    if any(not sends[p] for p in range(world) if p != rank):
                        # Words between all ranks go to every peer.
                        assert not launch.kernel.endswith("_words") or launch.constants.get("IN_PAIRS")
                if chosen[0].kernel in ("exchange", "reduce"):
                    names = list(source_of(chosen[0].kernel, world, {})["signature"])
                    rounds = names.index("rounds")
                    assert len({(x.arguments[rounds], x.arguments[names.index("own_share")]) for x in chosen}) == 1


def test_both_ranks_of_a_message_choose_the_same_kernel_for_it():
    """Where only they know its size: the same width of the words that it goes in, or slots."""
    world, limits = 4, gpu_limits("CUDA", comm_sms=4)
    engines = [
        Launches(rank, world, [1 << 40] * world, 0, 1 << 16, 1 << 16, 4096, 4096, limits) for rank in range(world)
    ]
    kinds = (0, 1, 8000, 8193, 32768, 32769, 65536, 65537, 1 << 20)
    for i in range(60):
        sizes = [[kinds[(s * 5 + r * r * 7 + i * (s + 1)) % 9] for r in range(world)] for s in range(world)]
        chosen = []  # rank -> peer -> kernel
        for rank, engine in enumerate(engines):
            peers = [p for p in range(world) if p != rank]
            sends = [Message(p, 1 << 30, sizes[rank][p]) for p in peers if sizes[rank][p]]
            receives = [Message(p, 1 << 30, sizes[p][rank]) for p in peers if sizes[p][rank]]
            made = engine.of(Exchange(sends, receives, (1 << 30, 1 << 30, sizes[rank][rank])), 1)
            of_peer = {}
            for launch in made:
                names = list(source_of(launch.kernel, world, {})["signature"])
                given = dict(zip(names, launch.arguments, strict=False))
                for p in peers:
                    if given["send_bytes"][p] or given["receive_bytes"][p]:
                        assert p not in of_peer
                        assert (given["send_bytes"][p], given["receive_bytes"][p]) == (sizes[rank][p], sizes[p][rank])
                        of_peer[p] = launch.kernel, launch.constants["BLOCK"] if launch.kernel.endswith("words") else 0
            assert set(of_peer) == {p for p in peers if sizes[rank][p] or sizes[p][rank]}
            chosen.append(of_peer)
            assert len(made) <= 4
            assert (
                sum(
                    launch.arguments[list(source_of(launch.kernel, world, {})["signature"]).index("own_bytes")]
                    for launch in made
                )
                == sizes[rank][rank]
            )
        assert all(chosen[p][rank] == kernel for rank in range(world) for p, kernel in chosen[rank].items())
    assert {kernel for of_peer in chosen for kernel in of_peer.values()}


def test_a_barrier_is_one_launch_that_sends_a_word_to_every_rank():
    page = SimpleNamespace(heap=SimpleNamespace(rank=1, world=4), address_of_word=lambda number: 0)
    made = DeviceExchanges(page, torch.device("cpu"), comm_sms=4)
    names, addresses = made.barrier_buffers
    bound = dict(zip(names, addresses, strict=True))
    (exchange,) = launches(1, 4, made.barrier_flow(("barrier",), None), lambda at: bound[at.buffer] + at.offset)
    limits = gpu_limits("CUDA", comm_sms=16)
    (launch,) = Launches(1, 4, [1 << 40] * 4, 0, 1 << 16, 1 << 16, 4096, 4096, limits).of(exchange, 10**9)
    assert (launch.kernel, launch.ctas) == ("exchange_words", 1)
    assert launch.constants["TO_ALL"] and not launch.constants["IN_PAIRS"]
    assert [m.peer for m in exchange.sends] == [m.peer for m in exchange.receives] == [2, 3, 0]
    assert {m.address for m in exchange.sends}.isdisjoint(m.address for m in exchange.receives)
    assert all(made._met.data_ptr() < m.address < made._met.data_ptr() + made._met.nbytes for m in exchange.receives)


def ref(rank):
    return Ref(rank, "in", 0)


def test_a_launch_is_the_same_kernel_for_every_message_of_its_kind():
    """What differs from call to call is in the arguments; its constants are few, or compiling has no end."""
    kinds = {
        (launch.kernel, *launch.constants.items())
        for nbytes in range(16, 8 << 20, 99_984)
        for launch in [gpu_launch("cuda", 2, nbytes, symmetric=True)]
    }
    assert len(kinds) <= 4, kinds


def alone(kernel, nbytes):
    """Return the exchange of a group of one rank that a kernel serves, and its buffers."""
    source, target = data(0, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    own = (source.data_ptr(), target.data_ptr(), nbytes)
    reduction = ("sum", "uint8") if kernel.startswith("reduce") else None
    ways = dict(zero_copy=kernel == "zero_copy", pulls=kernel == "zero_copy that pulls")
    return Exchange(own=own, **ways, reduction=reduction, symmetric=True), source, target


@pytest.mark.parametrize(
    ("kernel", "nbytes"), [("zero_copy", 1 << 21), ("zero_copy that pulls", 999), ("exchange", 999), ("reduce", 999)]
)
def test_a_launch_tells_that_it_is_done(kernel, nbytes):
    from iris_pg.kernels.loader import interpret, kernels

    group, told = Group(1), torch.zeros(2, dtype=torch.int32)
    try:
        for number in (7, 0xFFFFFFFF, 1):  # a number has 32 bits
            exchange, source, target = alone(kernel, nbytes)
            (launch,) = group.engines[0]._launches.of(exchange, 0)
            assert launch.kernel == kernel.split()[0]
            function = getattr(kernels(interpreted=True), launch.kernel)
            interpret(function, *launch.arguments, **launch.constants)
            before = told.tolist()
            assert torch.equal(source, target)
            interpret(function, *launch.arguments[:-2], told.data_ptr(), number, **launch.constants)
            assert told.tolist() == [number if number < 1 << 31 else -1, 0] != before
    finally:
        group.close()


class Group:
    """KernelEngines of several ranks in one process, over ordinary memory."""

    def __init__(self, world, timeout_s=20.0, check=lambda peer: None):
        areas = area_bytes(world, SLOT)
        self.segments = [torch.zeros(sum(areas.values()) + 4096, dtype=torch.uint8) for _ in range(world)]
        self.bases = [s.data_ptr() for s in self.segments]
        self.faults = []
        self.engines = [
            KernelEngine(
                r,
                world,
                self.bases,
                0,
                areas["cu_flags"],
                SLOT,
                timeout_s,
                check,
                lambda peer: f"waiting for rank {peer}",
                self.faults.append,
                f"test {r}",
            )
            for r in range(world)
        ]

    def run(self, exchanges):
        jobs = [e.submit(x, None) for e, x in zip(self.engines, exchanges, strict=True)]
        for engine, job in zip(self.engines, jobs, strict=True):
            engine.wait(job)

    def close(self):
        for engine in self.engines:
            engine.close()


def data(rank, n, iteration=0):
    return (torch.arange(n, dtype=torch.int64) * 7 + rank * 31 + iteration * 13).to(torch.uint8)


@pytest.mark.parametrize("symmetric", [False, True], ids=["credits", "symmetric"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchange_gathers_through_slots(world, symmetric):
    """Symmetric exchanges go in words when they are small, and else in slots that need no credits."""
    group = Group(world)
    try:
        sizes = [1, 7, 8, SLOT, SLOT + 1, 3 * SLOT + 5, *((5000, 6 * SLOT, 9 * SLOT, 32) if symmetric else ())]
        for iteration, n in enumerate(sizes):
            inputs = [data(r, n, iteration) for r in range(world)]
            outputs = [torch.zeros(world * n, dtype=torch.uint8) for _ in range(world)]

            def exchange(r, inputs=inputs, outputs=outputs, n=n):
                peers = [p for p in range(world) if p != r]
                at = outputs[r].data_ptr()
                return Exchange(
                    [Message(p, inputs[r].data_ptr(), n) for p in peers],
                    [Message(p, at + p * n, n) for p in peers],
                    (inputs[r].data_ptr(), at + r * n, n),
                    symmetric=symmetric,
                )

            group.run([exchange(r) for r in range(world)])
            for output in outputs:
                assert torch.equal(output, torch.cat(inputs))
    finally:
        group.close()


def test_messages_of_any_sizes_between_any_ranks():
    """Every pair has its own sizes, some none: little in words, more in chunks through slots; as in a gather or an
    uneven all-to-all. Another alignment on every rank.
    """
    world, group = 3, Group(3)
    patterns = [  # [from][to]
        [[0, 700, 3], [0, 0, SLOT], [5, 0, 0]],
        [[9, 16, 0], [0, 3000, 16], [0, 1 << 11, 1]],
        [[0, (1 << 11) + 1, 40], [1, 0, 5000], [0, 3 * SLOT, 0]],
        [[0, 0, 0], [4500, 0, 6000], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 9]],
    ]
    kernels = set()
    try:
        for iteration in range(7):
            sizes = patterns[iteration % len(patterns)]
            sent = [[data(s * 3 + r, sizes[s][r] + s, iteration)[s:] for r in range(world)] for s in range(world)]
            got = [[torch.zeros(sizes[s][r] + r, dtype=torch.uint8)[r:] for s in range(world)] for r in range(world)]
            exchanges = [
                Exchange(
                    [Message(p, sent[r][p].data_ptr(), sizes[r][p]) for p in range(world) if p != r and sizes[r][p]],
                    [Message(p, got[r][p].data_ptr(), sizes[p][r]) for p in range(world) if p != r and sizes[p][r]],
                    (sent[r][r].data_ptr(), got[r][r].data_ptr(), sizes[r][r]),
                )
                for r in range(world)
            ]
            kernels |= {launch.kernel for x in exchanges for launch in group.engines[0]._launches.of(x, 0)}
            group.run(exchanges)
            for s in range(world):
                for r in range(world):
                    assert torch.equal(got[r][s], sent[s][r]), (iteration, s, r)
    finally:
        group.close()
    assert kernels == {"exchange_words", "exchange"}


@pytest.mark.parametrize("n", [1, 16, 4096, 4097])
def test_a_broadcast_moves_in_words_or_slots(n):
    world, group = 3, Group(3)
    try:
        for iteration in range(3):
            root = iteration % world
            tensors = [data(r, n + r, iteration)[r:].clone() for r in range(world)]
            expected = tensors[root].clone()
            at = [t.data_ptr() for t in tensors]
            exchanges = [
                Exchange([Message(p, at[r], n) for p in range(world) if p != r], is_known=True)
                if r == root
                else Exchange(receives=[Message(root, at[r], n)], is_known=True)
                for r in range(world)
            ]
            group.run(exchanges)
            assert all(torch.equal(t, expected) for t in tensors), (n, iteration)
    finally:
        group.close()


def test_push_writes_outputs_directly():
    world, n, group = 2, 501, Group(2)
    outputs = [torch.zeros(world * n, dtype=torch.uint8) for _ in range(world)]
    try:
        for iteration in range(4):
            inputs = [data(r, n, iteration) for r in range(world)]
            group.run(
                [
                    Exchange(
                        [Message(1 - r, inputs[r].data_ptr(), n, outputs[1 - r].data_ptr() + r * n)],
                        [Message(1 - r, outputs[r].data_ptr() + (1 - r) * n, n)],
                        (inputs[r].data_ptr(), outputs[r].data_ptr() + r * n, n),
                        zero_copy=True,
                    )
                    for r in range(world)
                ]
            )
            for output in outputs:
                assert torch.equal(output, torch.cat(inputs))
    finally:
        group.close()


def test_pull_reads_inputs_directly_in_turn_with_pushes():
    """They share flags: how many of each there were differs from rank to rank and from pair to pair."""
    world, group = 3, Group(3)
    outputs = [torch.zeros(world * 6000, dtype=torch.uint8) for _ in range(world)]
    kernels = set()
    try:
        for iteration in range(6):
            n = [4999, 5001, 6000][iteration % 3]  # more than goes in words
            inputs = [data(r, n, iteration) for r in range(world)]
            at = [o.data_ptr() for o in outputs]
            reader = iteration % world  # it alone pulls, or is pushed to, but for every third time

            def exchange(r, pulls, n=n, inputs=inputs, at=at, reader=reader, everyone=iteration % 3 == 2):
                readers = range(world) if everyone else [reader]
                sends = [Message(p, inputs[r].data_ptr(), n, at[p] + r * n) for p in readers if p != r]
                sources = [p for p in range(world) if p != r and r in readers]
                receives = [Message(p, at[r] + p * n, n, inputs[p].data_ptr()) for p in sources]
                own = (inputs[r].data_ptr(), at[r] + r * n, n)
                return Exchange(sends, receives, own, zero_copy=not pulls, pulls=pulls, symmetric=everyone)

            for pulls in (True, False, True):
                for output in outputs:
                    output.zero_()
                exchanges = [exchange(r, pulls) for r in range(world)]
                kernels |= {x.kernel for e in exchanges for x in group.engines[0]._launches.of(e, 0)}
                group.run(exchanges)
                for r, output in enumerate(outputs):
                    gets = range(world) if r == reader or iteration % 3 == 2 else [r]
                    for p in range(world):
                        part = output[p * n : (p + 1) * n]
                        assert torch.equal(part, inputs[p] if p in gets else torch.zeros_like(part)), (iteration, r, p)
    finally:
        group.close()
    assert kernels == {"zero_copy"}


def test_a_late_peer_is_named_at_the_deadline():
    group = Group(2, timeout_s=0.3)
    into = torch.zeros(8, dtype=torch.uint8)
    try:
        job = group.engines[0].submit(Exchange(receives=[Message(1, into.data_ptr(), 8)]), None)
        with pytest.raises(DeadlineError, match="waiting for rank 1"):
            group.engines[0].wait(job)
        assert isinstance(group.faults[0], DeadlineError)
        with pytest.raises(DeadlineError):
            group.engines[0].submit(Exchange(), None)
    finally:
        group.close()


def test_triton_is_left_as_it_was():
    """A launch makes triton.language interpretable; afterwards its functions are the old ones."""
    import triton.language as tl

    before = tl.load
    group = Group(2)
    try:
        group.run([Exchange(), Exchange()])
    finally:
        group.close()
    assert tl.load is before


def test_addresses_that_fit_in_31_bits():
    """Memory of a small allocation lies low in an interpreter that is not position independent."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    map_32bit = 0x40  # <sys/mman.h>, x86-64
    length = 1 << 16
    low = libc.mmap(
        None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_32bit, -1, 0
    )
    if platform.machine() != "x86_64":
        pytest.skip("MAP_32BIT is x86-64's alone; other machines have no such memory to ask for")
    try:
        assert low < 1 << 31

        def moved(tensor, offset):
            memory = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(low + offset)
            return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)

        group = Group(1)
        engine = group.engines[0]
        engine._counters, engine._words = moved(engine._counters, 4096), moved(engine._words, 8192)
        launches = engine._launches
        launches.bases, launches.counters, launches.words = (low + (1 << 15),), low + 4096, low + 8192
        source, target = data(0, 1000), torch.zeros(1000, dtype=torch.uint8)
        group.run([Exchange(own=(source.data_ptr(), target.data_ptr(), 1000))])
        group.close()
        assert torch.equal(source, target)
    finally:
        libc.munmap(low, length)


REDUCED = [
    ("sum", "float32"),
    ("avg", "int32"),
    ("avg", "int8"),
    ("avg", "uint16"),
    ("avg", "float32"),
    ("sum", "float64"),
    ("max", "bfloat16"),
    ("bxor", "uint8"),
    ("product", "int64"),
    ("sum", "bool"),
]


def some_reductions():
    """Return (world, op, dtype, symmetric): each reduction with both numbers of ranks, and both ways."""
    for number, reduced in enumerate(REDUCED):
        for world in (2, 3):
            ways = (False, True) if os.environ.get("IRIS_PG_TEST_FULL") else ((number + world) % 2 == 0,)
            yield from ((world, *reduced, symmetric) for symmetric in ways)


@pytest.mark.parametrize(("world", "op", "dtype", "symmetric"), list(some_reductions()))
def test_reduce_combines_in_the_order_of_ranks(world, op, dtype, symmetric):
    """Every rank's kernel gives the bits that the software engine's reduction gives."""
    element = getattr(torch, dtype)
    group = Group(world)
    try:
        for iteration, numel in enumerate([1, SLOT // element.itemsize + 3, 9 * SLOT // element.itemsize + 1, 4]):
            inputs = [(data(r, numel, iteration).to(torch.int64) % 7 - 3 + r % 2).to(element) for r in range(world)]
            if not element.is_floating_point and dtype != "bool":  # sums that are, or pass, the ends of the type
                ends = torch.iinfo(element)
                for r, tensor in enumerate(inputs):
                    tensor[::5], tensor[4::5] = ends.min if r == 0 else 0, ends.max
                    tensor[3::5] = ends.max if r == 0 else int(r == 1)
            n = numel * element.itemsize
            expected = torch.empty_like(inputs[0])
            reduce_bytes(op, dtype, expected.data_ptr(), [t.data_ptr() for t in inputs], n)
            outputs = [torch.zeros_like(expected) for _ in range(world)]
            group.run(
                [
                    Exchange(
                        [Message(p, inputs[r].data_ptr(), n) for p in range(world) if p != r],
                        [Message(p, 0, n) for p in range(world) if p != r],
                        (inputs[r].data_ptr(), outputs[r].data_ptr(), n),
                        reduction=(op, dtype),
                        symmetric=symmetric,
                    )
                    for r in range(world)
                ]
            )
            for output in outputs:
                assert torch.equal(output, expected), (numel, output, expected)
    finally:
        group.close()


def test_a_reduction_that_the_kernels_lack_is_refused():
    with pytest.raises(UnsupportedError, match='product of complex64 .* engine="sdma"'):
        reduction_types("product", "complex64")
