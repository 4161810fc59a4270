"""What the device side compiles to, for every GPU, from Triton and from Gluon kernels: scopes, widths, no spills, and
an engine's packet in the order that device/sdma.py promises. No GPU is needed.
"""

import re

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import iris_pg as iris
from iris_pg.copy_engine.generations import generation_of
from iris_pg.device import sdma
from iris_pg.device.context import DeviceContext
from iris_pg.device.gluon import DeviceContext as GluonContext

GPUS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


@triton.jit
def moves_in_triton(context, source, inbox, n, rank: tl.constexpr, world: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, world)
    i = tl.program_id(0) * N + tl.arange(0, N)
    peer = (rank + 1) % world
    ctx.store(inbox + i, ctx.load(source + i, peer), peer)
    ctx.get(source + i, inbox + N + i, peer)
    ctx.put(source + i, inbox + 2 * N + i, peer)
    ctx.copy(source + i, inbox + 3 * N + i, peer, rank)


@gluon.jit
def moves_in_gluon(context, source, inbox, n, N: gl.constexpr, L: gl.constexpr):
    ctx = GluonContext.initialize(context)
    i = gl.program_id(0) * N + gl.arange(0, N, layout=L)
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    ctx.store(inbox + i, ctx.load(source + i, peer), peer)
    ctx.get(source + i, inbox + N + i, peer)
    ctx.put(source + i, inbox + 2 * N + i, peer)
    ctx.copy(source + i, inbox + 3 * N + i, peer, ctx.cur_rank)


@triton.jit
def functions_in_triton(bases, source, inbox, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    iris.store(inbox + i, iris.load(source + i, 0, 1, bases), 0, 1, bases)
    iris.get(source + i, inbox + N + i, 0, 1, bases)
    iris.put(source + i, inbox + 2 * N + i, 0, 1, bases)
    iris.copy(source + i, inbox + 3 * N + i, 1, 0, 0, bases)


@triton.jit
def atomics_in_triton(context, words, old, val, rank: tl.constexpr, world: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, world)
    tl.store(old + 0, ctx.atomic_add(words + 0, val, 1))
    tl.store(old + 1, ctx.atomic_sub(words + 1, val, 1))
    tl.store(old + 2, ctx.atomic_cas(words + 2, val, val + 1, 1))
    tl.store(old + 3, ctx.atomic_xchg(words + 3, val, 1))
    tl.store(old + 4, ctx.atomic_xor(words + 4, val, 1))
    tl.store(old + 5, ctx.atomic_and(words + 5, val, 1))
    tl.store(old + 6, ctx.atomic_or(words + 6, val, 1))
    tl.store(old + 7, ctx.atomic_min(words + 7, val, 1))
    tl.store(old + 8, ctx.atomic_max(words + 8, val, 1))


@gluon.jit
def atomics_in_gluon(context, words, old, val):
    ctx = GluonContext.initialize(context)
    gl.store(old + 0, ctx.atomic_add(words + 0, val, 1))
    gl.store(old + 1, ctx.atomic_sub(words + 1, val, 1))
    gl.store(old + 2, ctx.atomic_cas(words + 2, val, val + 1, 1))
    gl.store(old + 3, ctx.atomic_xchg(words + 3, val, 1))
    gl.store(old + 4, ctx.atomic_xor(words + 4, val, 1))
    gl.store(old + 5, ctx.atomic_and(words + 5, val, 1))
    gl.store(old + 6, ctx.atomic_or(words + 6, val, 1))
    gl.store(old + 7, ctx.atomic_min(words + 7, val, 1))
    gl.store(old + 8, ctx.atomic_max(words + 8, val, 1))


@triton.jit
def engine_in_triton(context, engine, source, inbox, flag, n, rank: tl.constexpr, world: tl.constexpr, N: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, world)
    i = tl.arange(0, N)
    to = tl.program_id(0)
    tl.store(source + i, i.to(tl.float32))
    ctx.put(source + i, inbox + i, to, mask=i < n, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(flag, 1, to, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.atomic_cas(flag + 1, 1, 2, to, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.quiet(to, engine)


@gluon.jit
def engine_in_gluon(context, engine, source, inbox, flag, n, N: gl.constexpr, L: gl.constexpr):
    ctx = GluonContext.initialize(context)
    i = gl.arange(0, N, layout=L)
    to = gl.program_id(0)
    gl.store(source + i, i.to(gl.float32))
    ctx.put(source + i, inbox + i, to, mask=i < n, copy_engine_ctx=engine, use_copy_engine=True, contiguous_copy=True)
    ctx.atomic_add(flag, 1, to, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.atomic_cas(flag + 1, 1, 2, to, copy_engine_ctx=engine, use_copy_engine=True)
    ctx.quiet(to, engine)


@triton.jit
def tile_in_triton(bases, engine, source, inbox, n, pitch, N: tl.constexpr):
    r, c = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    iris.put(
        *(source + r * pitch + c, inbox + r * pitch + c, 0, 1, bases),
        mask=(r < n) & (c < n),
        copy_engine_ctx=engine,
        use_copy_engine=True,
        contiguous_copy=True,
    )


@gluon.jit
def tile_in_gluon(bases, engine, source, inbox, n, pitch, N: gl.constexpr, L: gl.constexpr):
    r = gl.arange(0, N, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, N, layout=gl.SliceLayout(0, L))[None, :]
    iris.put(
        *(source + r * pitch + c, inbox + r * pitch + c, 0, 1, bases),
        mask=(r < n) & (c < n),
        copy_engine_ctx=engine,
        use_copy_engine=True,
        contiguous_copy=True,
    )


@triton.jit
def packets_in_triton(engine, address, to: tl.constexpr):
    sdma.poll(engine, to, address, 7)
    sdma.fence(engine, to, address, 7)


TYPES = dict(
    context="*i64",
    bases="*u64",
    engine="*u64",
    source="*fp32",
    inbox="*fp32",
    words="*i32",
    old="*i32",
    flag="*i32",
    val="i32",
    n="i32",
    pitch="i32",
    address="i64",
)


def compiled(kernel, gpu, tile=False, **constants):
    """Return the code of a kernel for a GPU, and what it is said to use."""
    target = GPUS[gpu]
    if gpu == "gfx1250" and VERSION < (3, 7):
        pytest.skip("Triton 3.6 has no barriers for gfx1250: it writes an instruction that the GPU lacks")
    if "L" in kernel.arg_names:
        width = target.warp_size
        constants["L"] = (
            gl.BlockedLayout([1, 4], [width // 8, 8], [4, 1], [1, 0])
            if tile
            else gl.BlockedLayout([4], [width], [4], [0])
        )
    signature = {name: "constexpr" if name in constants else TYPES[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name == "pitch"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    asm = triton.compile(source, target=target).asm
    return asm["ptx"] if target.backend == "cuda" else asm["amdgcn"]


def lines_of(code):
    return [line.strip() for line in code.splitlines()]


def check_no_spills(gpu, code):
    if gpu == "sm_90":
        assert not re.findall(r"\b(?:ld|st)\.local", code)
    else:
        assert re.findall(r"vgpr_spill_count:\s*(\d+)", code) == ["0"]
        assert re.findall(r"sgpr_spill_count:\s*(\d+)", code) == ["0"]
        assert re.findall(r"ScratchSize:\s*(\d+)", code) == ["0"]


MOVES = {"triton": moves_in_triton, "gluon": moves_in_gluon, "functions": functions_in_triton}


@pytest.mark.parametrize("language", MOVES)
@pytest.mark.parametrize("gpu", GPUS)
def test_blocks_move_16_bytes_at_a_time(gpu, language):
    kernel = MOVES[language]
    constants = dict(rank=0, world=2, N=1024) if language == "triton" else dict(N=1024)
    code = compiled(kernel, gpu, **constants)
    if gpu == "sm_90":
        loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", code)
        stores = re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", code)
        wide = [access for access in loads if access[0]]
        # What is not wide are the bases and the context, 64-bit scalars.
        assert all(bits == "64" for count, bits in loads if not count)
        assert len(stores) >= 8 and all(int(count) * int(bits) == 128 for count, bits in [*wide, *stores])
        assert len(wide) == len(stores)
    else:
        vector = re.findall(r"(?:global|flat|buffer)_(load|store)_(\w+) v", code)
        stores = [width for kind, width in vector if kind == "store"]
        loads = [width for kind, width in vector if kind == "load"]  # of bases too, which have 8 bytes
        assert len(stores) >= 4 and len(loads) >= len(stores)
        assert set(stores) <= {"dwordx4", "b128"} and set(loads) <= {"dwordx4", "b128", "dwordx2", "b64"}, vector
    check_no_spills(gpu, code)


@pytest.mark.parametrize("kernel", [atomics_in_triton, atomics_in_gluon], ids=["triton", "gluon"])
@pytest.mark.parametrize("gpu", GPUS)
def test_atomics_are_for_the_whole_system(gpu, kernel):
    code = compiled(kernel, gpu, **(dict(rank=0, world=2) if kernel is atomics_in_triton else {}))
    if gpu == "sm_90":
        atomics = re.findall(r"\batom\.[\w.]+", code)
        assert len(atomics) == 9
        assert all(".sys." in a and ".acq_rel." in a for a in atomics), atomics
    else:
        lines = lines_of(code)
        atomics = [line for line in lines if re.match(r"(global|flat|buffer)_atomic", line)]
        assert len(atomics) == 9
        if gpu == "gfx1250":
            assert all("scope:SCOPE_SYS" in line for line in atomics)
            written = [line for line in lines if line.startswith("global_wb")]
            assert written and all("scope:SCOPE_SYS" in line for line in written)
        else:  # LLVM AMDGPU memory model, gfx942: sc1 is system scope; sc0 and sc1 on write-back and invalidation
            if VERSION < (3, 7):  # Triton 3.6 compares and swaps for one GPU only there, whatever the scope
                atomics = [line for line in atomics if "offset:8 " not in line]
            assert all(" sc1" in line for line in atomics), atomics
            for instruction in ("buffer_wbl2", "buffer_inv"):
                found = [line for line in lines if line.startswith(instruction)]
                assert sum("sc0 sc1" in line for line in found) >= (8 if VERSION < (3, 7) else 9), found


ENGINES = {"triton": engine_in_triton, "gluon": engine_in_gluon}


@pytest.mark.parametrize("language", ENGINES)
@pytest.mark.parametrize("gpu", GPUS)
def test_a_packet_is_released_to_the_system_before_its_doorbell(gpu, language):
    code = compiled(ENGINES[language], gpu, **(dict(rank=0, world=2) if language == "triton" else {}), N=1024)
    lines = lines_of(code)
    check_no_spills(gpu, code)
    if gpu == "sm_90":
        rung = [i for i, line in enumerate(lines) if "st.global.wt.b64" in line]
        assert len(rung) == 8  # write pointer and doorbell of four packets
        for i in rung:
            before = [line for line in lines[:i] if line.startswith(("fence.", "st.global", "@")) and "ld." not in line]
            assert any("fence.acq_rel.sys" in line for line in before[-2:]), lines[i - 12 : i + 1]
        # Between the data and the first doorbell there is a barrier of the CTA.
        data = [i for i, line in enumerate(lines) if "st.global.v4.b32" in line]
        assert any("bar.sync" in line for line in lines[data[0] : rung[0]])
        kinds = set(re.findall(r"\batom\.global\.([\w.]+)", code))
        assert kinds and all("sys" in kind or kind.startswith(("gpu.relaxed.max", "gpu.relaxed.or")) for kind in kinds)
        assert len(re.findall(r"ld\.volatile\.global\.b64", code)) >= 5  # rptr and answers, past the caches
        assert "%globaltimer" in code
    elif gpu == "gfx1250":
        rung = [line for line in lines if re.match(r"global_store_b64 .* scope:SCOPE_SYS", line)]
        assert len(rung) == 8
        order = [
            re.split(r" ", line)[0] for line in lines if re.match(r"global_(wb|inv|atomic_add_u64) .*SCOPE_SYS", line)
        ]
        release = ["global_wb", "global_atomic_add_u64", "global_inv"]
        assert sum(order[i : i + 3] == release for i in range(len(order))) == 8
        drained = [i for i, line in enumerate(lines) if line == "s_wait_storecnt 0x0" and "v_mov_b32" in lines[i + 1]]
        assert sum(any("s_barrier" in line for line in lines[i : i + 30]) for i in drained) >= 4
        assert "s_sendmsg_rtn_b64" in code
        assert len([line for line in lines if re.match(r"global_load_b64 .*scope:SCOPE_SYS", line)]) >= 5
    else:
        rung = [i for i, line in enumerate(lines) if re.match(r"global_store_dwordx2 .* sc0 sc1", line)]
        assert len(rung) == 8
        # Each follows a release: written back, waited for, then the atomic that carries it, and an invalidation.
        order = [
            re.split(r",| v\d| v\[", line)[0] for line in lines if re.match(r"buffer_|global_atomic|s_waitcnt vm", line)
        ]
        release = ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)", "global_atomic_add_x2"]
        release += ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"]
        assert sum(order[i : i + 5] == release for i in range(len(order))) == 8
        drained = [i for i, line in enumerate(lines) if "v_mov_b32" in line and "s_waitcnt vmcnt(0)" == lines[i - 1]]
        # Each wave waits for its stores before the barrier.
        assert sum(any("s_barrier" in line for line in lines[i : i + 30]) for i in drained) >= 4
        assert "s_memrealtime" in code
        polled = [line for line in lines if re.match(r"global_load_dwordx2 .* sc0 sc1", line)]
        assert len(polled) >= 5


@pytest.mark.parametrize("kernel", [tile_in_triton, tile_in_gluon], ids=["triton", "gluon"])
@pytest.mark.parametrize("gpu", GPUS)
def test_a_tile_is_a_window_or_is_moved_16_bytes_at_a_time(gpu, kernel):
    code = compiled(kernel, gpu, tile=True, N=32)
    check_no_spills(gpu, code)
    assert str(sdma.WINDOW_HEADER.value) in code or hex(sdma.WINDOW_HEADER.value) in code


@pytest.mark.parametrize("gpu", GPUS)
def test_packets_are_those_of_the_generation(gpu):
    """FENCE says how it is to be cached on GPUs whose engines have the field."""
    code = compiled(packets_in_triton, gpu, to=0).lower()
    header = generation_of("gfx942" if gpu == "sm_90" else gpu).fence_header
    assert hex(header) in code or str(header) in re.findall(r"\b\d+\b", code)
    poll = sdma.POLL_HEADER.value
    assert hex(poll & 0xFFFFFFFF) in code or str(poll) in code


def test_tiles_are_moved_by_the_bulk_copy_unit():
    """TMA on Hopper, TDM on gfx1250: no lane loads or stores a tile; what was stored is awaited before the flag."""
    from iris_pg.device import tile_gather

    TYPES.update(output="*i32", input="*i32", n_rows="i32", flags="*i64", rounds="*i64", dead="*i32", bases="*u64")
    types = TYPES | dict(ctx="*u64", rank="i32")
    for kernel, gpu in ((tile_gather.gather_by_tma, "sm_90"), (tile_gather.gather_by_tdm, "gfx1250")):
        if gpu == "gfx1250" and VERSION < (3, 7):
            continue
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
        asm = triton.compile(GluonASTSource(kernel, signature, dict(world=2), aligned), target=GPUS[gpu]).asm
        code = asm["ptx"] if gpu == "sm_90" else asm["amdgcn"]
        check_no_spills(gpu, code)
        if gpu == "sm_90":
            assert "cp.async.bulk.tensor.2d.shared" in code and "cp.async.bulk.tensor.2d.global.shared" in code
            awaited = code.index("cp.async.bulk.wait_group 0;")
            assert awaited < code.rindex("atom.global.sys.release.add") or awaited < code.rindex(".release.")
            assert "st.global.v4" not in code and "ld.global.v4" not in code
        else:
            assert "tensor_load_to_lds" in code and "tensor_store_from_lds" in code and "s_wait_tensorcnt 0x0" in code


@pytest.mark.parametrize("gpu", GPUS)
def test_kernels_of_collectives_and_plans_compile(gpu):
    """The all-gather in both languages, what plans call, and the proxy's atomics."""
    import device_kernels
    from iris_pg.device import word
    from iris_pg.device.all_gather import all_gather
    from iris_pg.device.all_gather_gluon import all_gather_in_gluon

    types = dict(output="i64", input="i64", nbytes="i64", flags="*i64", rounds="*i64", dead="*i32", bases="*u64")
    types |= dict(ctx="*u64", rank="i32", world="i32", PROGRAMS="constexpr")
    if gpu == "gfx1250" and VERSION < (3, 7):
        pytest.skip("Triton 3.6 has no barriers for gfx1250: it writes an instruction that the GPU lacks")

    def code_of(source, **options):
        asm = triton.compile(source, target=GPUS[gpu], options=options).asm
        code = asm["ptx"] if gpu == "sm_90" else asm["amdgcn"]
        check_no_spills(gpu, code)
        return code

    for source in (ASTSource, GluonASTSource):
        kernel = all_gather if source is ASTSource else all_gather_in_gluon
        code_of(source(kernel, types, dict(PROGRAMS=1)))
    plan = dict(plan="*i64", engine="*u64", source="*i64", inbox="*i64", result="*i64", epoch="i32", rank="i32")
    plan |= dict(world="i32", BATCHES="constexpr", N="constexpr")
    lines = lines_of(code_of(ASTSource(triton.jit(device_kernels.computes), plan, dict(BATCHES=3, N=64))))
    # A gate is stored behind a release at system scope, and the count before it acquires what other producers wrote.
    gate, release, count = {
        "sm_90": (r"@?.*st\.global\.wt\.b64", r"fence\.acq_rel\.sys", r".*atom\.global\.sys\.acq_rel\.add\.u64"),
        "gfx942": (r"global_store_dwordx2 .* sc0 sc1", r"buffer_wbl2 sc0 sc1", r"global_atomic_add_x2"),
        "gfx1250": (
            r"global_store_b64 .* scope:SCOPE_SYS",
            r"global_wb .*SCOPE_SYS",
            r"global_atomic_add_u64 .*SCOPE_SYS",
        ),
    }["gfx942" if gpu == "gfx950" else gpu]
    gates = [i for i, line in enumerate(lines) if re.match(gate, line)]
    assert gates
    for i in gates:
        released = max(j for j in range(i) if re.match(release, lines[j]))
        assert any(re.match(count, line) for line in lines[:released])
        # Between the release and the gate nothing else is stored.
        assert not any(re.search(r"\bst\.global|global_store|flat_store", line) for line in lines[released:i])
    for width_bytes in (4, 8):
        code = code_of(ASTSource(**word.source_of(width_bytes)), num_warps=1)
        if gpu == "sm_90":
            atomics = re.findall(r"\batom\.[\w.]+", code)
            assert len(atomics) == 11 and all(".sys." in a for a in atomics), atomics
