"""Atomic operations on raw addresses of shared memory, with acquire and release order.

Python has no atomics, and a plain store through ctypes is only right on CPUs that keep stores in order. These functions
are a few lines of LLVM IR compiled in the process by llvmlite, so they are the real instructions of whatever CPU this
is, and a user needs no compiler. The first call of :func:`atomics` compiles them (about 20 ms); afterwards a call costs
what a ctypes call costs.

Order: loads are acquire, stores are release, read-modify-write operations are both.
Source: LLVM Language Reference, "Atomic Memory Ordering Constraints".
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_RMW = ("add", "sub", "and", "or", "xor", "xchg", "min", "max", "umin", "umax", "uinc_wrap", "udec_wrap")


COPY, STORE, AWAIT, OTHER, STORE64, READ, WITH = range(
    7
)  # what execute() can be asked to do; OTHER hands the operation back
RING_FULL = (1 << 64) - 1


class Atomics(NamedTuple):
    """Compiled functions; every address is an integer, every value an unsigned integer of the width in the name.

    ``load*(address) -> value``, ``store*(address, value)``, ``cas*(address, expected, desired) -> old value`` and
    ``rmw[operation, width_bytes](address, operand) -> old value`` keep the GIL: they take nanoseconds, and giving the
    GIL back and forth costs more. ``spin32(address, mask, low, span, turns) -> turns left`` releases it: it looks at
    the word up to ``turns`` times until ``((word & mask) - low) mod 2^32 <= span`` and returns 0 when it never was.
    ``copy_rows(dst, dst_pitch, src, src_pitch, width, rows)`` copies a rectangle of bytes, without the GIL.

    ``execute(operations, first, count, turns) -> index`` carries out operations of four 64-bit words each, without the
    GIL, and returns the index of the first that it did not: ``count`` when it did all, else one that waits longer than
    ``turns`` looks or that it does not know. They are ``(COPY, dst, src, nbytes)``, ``(STORE, address, value, 0)`` and
    ``(STORE64, address, value, 0)`` with release order, and ``(AWAIT, address, value, 0)``, which waits with acquire
    order until the 32-bit word equals the value. ``(READ, dst, word, nbytes)`` and ``(WITH, pid, offset, 0)`` together
    copy from the memory of process ``pid``, at ``offset`` bytes after the address that the 64-bit word holds.

    ``read_process(pid, dst, src, nbytes) -> nbytes read`` copies from the memory of another process, without the GIL:
    process_vm_readv(2) with one piece on each side; negative when it failed.

    ``await_change(words, seen, count, turns) -> index`` looks at ``count`` 64-bit words, whose addresses are an array,
    up to ``turns`` times each, until one is not what the array ``seen`` says, without the GIL; its index, or ``count``.

    ``advance(lanes, count, turns) -> how many wait`` carries out the steps of ``count`` lanes, whose addresses are an
    array, without the GIL: until all are done, or for ``turns`` looks none went on. A lane has four words: the number
    of the next step, how many there are, the address of the steps, and a status. A step has five: the address of a
    function and four arguments of it, an int for the status but 0, which ends the lane; or 0, the address of a 32-bit
    word, and what it has to be at least.

    ``reserve(cached_wptr, rptr, size, nbytes) -> base`` and ``commit(wptr, doorbell, committed_wptr, base, end) ->
    done`` are the two steps of a producer on a packet ring, each one call: 2^64 - 1 says that the ring is full, and 0
    that an earlier producer has not committed yet. What they do is said in copy_engine/ring.py.
    """

    load32: Callable[[int], int]
    load64: Callable[[int], int]
    store32: Callable[[int, int], None]
    store64: Callable[[int, int], None]
    cas32: Callable[[int, int, int], int]
    cas64: Callable[[int, int, int], int]
    rmw: dict[tuple[str, int], Callable[[int, int], int]]
    spin32: Callable[[int, int, int, int, int], int]
    copy_rows: Callable[[int, int, int, int, int, int], None]
    execute: Callable[[int, int, int, int], int]
    read_process: Callable[[int, int, int, int], int]
    await_change: Callable[[int, int, int, int], int]
    advance: Callable[[int, int, int], int]
    reserve: Callable[[int, int, int, int], int]
    commit: Callable[[int, int, int, int, int], int]
    keep: Any  # the LLVM engine that owns the code


def _module() -> str:
    parts = [
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
        "declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)",
    ]
    for bits in (32, 64):
        align = bits // 8
        parts.append(f"""
define i{bits} @load{bits}(i64 %a) {{
  %p = inttoptr i64 %a to ptr
  %v = load atomic i{bits}, ptr %p acquire, align {align}
  ret i{bits} %v
}}
define void @store{bits}(i64 %a, i{bits} %v) {{
  %p = inttoptr i64 %a to ptr
  store atomic i{bits} %v, ptr %p release, align {align}
  ret void
}}
define i{bits} @cas{bits}(i64 %a, i{bits} %expected, i{bits} %desired) {{
  %p = inttoptr i64 %a to ptr
  %r = cmpxchg ptr %p, i{bits} %expected, i{bits} %desired acq_rel acquire
  %v = extractvalue {{ i{bits}, i1 }} %r, 0
  ret i{bits} %v
}}""")
        parts += [
            f"""
define i{bits} @{op}{bits}(i64 %a, i{bits} %v) {{
  %p = inttoptr i64 %a to ptr
  %old = atomicrmw {op} ptr %p, i{bits} %v acq_rel
  ret i{bits} %old
}}"""
            for op in _RMW
        ]
    parts.append("""
define i32 @spin32(i64 %a, i32 %mask, i32 %low, i32 %span, i32 %turns) {
entry:
  %p = inttoptr i64 %a to ptr
  br label %look
look:
  %left = phi i32 [ %turns, %entry ], [ %next, %again ]
  %word = load atomic i32, ptr %p acquire, align 4
  %masked = and i32 %word, %mask
  %above = sub i32 %masked, %low
  %hit = icmp ule i32 %above, %span
  br i1 %hit, label %done, label %again
again:
  %next = sub i32 %left, 1
  %out = icmp eq i32 %next, 0
  br i1 %out, label %done, label %look
done:
  %result = phi i32 [ %left, %look ], [ 0, %again ]
  ret i32 %result
}
define void @copy_rows(i64 %dst, i64 %dst_pitch, i64 %src, i64 %src_pitch, i64 %width, i64 %rows) {
entry:
  br label %row
row:
  %i = phi i64 [ 0, %entry ], [ %next, %row ]
  %d_off = mul i64 %i, %dst_pitch
  %s_off = mul i64 %i, %src_pitch
  %d_addr = add i64 %dst, %d_off
  %s_addr = add i64 %src, %s_off
  %d = inttoptr i64 %d_addr to ptr
  %s = inttoptr i64 %s_addr to ptr
  call void @llvm.memcpy.p0.p0.i64(ptr %d, ptr %s, i64 %width, i1 false)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}""")
    parts.append(f"""
define i64 @execute(i64 %operations, i64 %first, i64 %count, i32 %turns) {{
entry:
  %here = alloca [2 x i64]
  %there = alloca [2 x i64]
  %n1 = getelementptr i64, ptr %here, i64 1
  %n2 = getelementptr i64, ptr %there, i64 1
  %base = inttoptr i64 %operations to ptr
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %advance ]
  %end = icmp uge i64 %i, %count
  br i1 %end, label %out, label %fetch
fetch:
  %op = getelementptr [4 x i64], ptr %base, i64 %i
  %kind = load i64, ptr %op
  %p1 = getelementptr i64, ptr %op, i64 1
  %p2 = getelementptr i64, ptr %op, i64 2
  %p3 = getelementptr i64, ptr %op, i64 3
  %w1 = load i64, ptr %p1
  %w2 = load i64, ptr %p2
  %w3 = load i64, ptr %p3
  %a1 = inttoptr i64 %w1 to ptr
  %value = trunc i64 %w2 to i32
  switch i64 %kind, label %out [ i64 {COPY}, label %copy  i64 {STORE}, label %store  i64 {AWAIT}, label %look
    i64 {STORE64}, label %store64  i64 {READ}, label %read  i64 {WITH}, label %advance ]
copy:
  %a2 = inttoptr i64 %w2 to ptr
  call void @llvm.memmove.p0.p0.i64(ptr %a1, ptr %a2, i64 %w3, i1 false)
  br label %advance
store:
  store atomic i32 %value, ptr %a1 release, align 4
  br label %advance
read:
  %with = getelementptr [4 x i64], ptr %op, i64 1
  %ppid = getelementptr i64, ptr %with, i64 1
  %poffset = getelementptr i64, ptr %with, i64 2
  %pid64 = load i64, ptr %ppid
  %pid = trunc i64 %pid64 to i32
  %offset = load i64, ptr %poffset
  %word = inttoptr i64 %w2 to ptr
  %offered = load atomic i64, ptr %word acquire, align 8
  %src = add i64 %offered, %offset
  store i64 %w1, ptr %here
  store i64 %src, ptr %there
  store i64 %w3, ptr %n1
  store i64 %w3, ptr %n2
  %got = call i64 @process_vm_readv(i32 %pid, ptr %here, i64 1, ptr %there, i64 1, i64 0)
  %whole = icmp eq i64 %got, %w3
  br i1 %whole, label %advance, label %out
store64:
  store atomic i64 %w2, ptr %a1 release, align 8
  br label %advance
look:
  %left = phi i32 [ %turns, %fetch ], [ %fewer, %again ]
  %seen = load atomic i32, ptr %a1 acquire, align 4
  %hit = icmp eq i32 %seen, %value
  br i1 %hit, label %advance, label %again
again:
  %fewer = sub i32 %left, 1
  %tired = icmp eq i32 %fewer, 0
  br i1 %tired, label %out, label %look
advance:
  %next = add i64 %i, 1
  br label %head
out:
  ret i64 %i
}}
declare i64 @process_vm_readv(i32, ptr, i64, ptr, i64, i64)
define i64 @read_process(i32 %pid, i64 %dst, i64 %src, i64 %n) {{
entry:
  %here = alloca [2 x i64]
  %there = alloca [2 x i64]
  %n1 = getelementptr i64, ptr %here, i64 1
  %n2 = getelementptr i64, ptr %there, i64 1
  store i64 %dst, ptr %here
  store i64 %src, ptr %there
  store i64 %n, ptr %n1
  store i64 %n, ptr %n2
  %got = call i64 @process_vm_readv(i32 %pid, ptr %here, i64 1, ptr %there, i64 1, i64 0)
  ret i64 %got
}}
define i64 @await_change(i64 %words, i64 %seen, i64 %count, i64 %turns) {{
entry:
  %pw = inttoptr i64 %words to ptr
  %ps = inttoptr i64 %seen to ptr
  br label %turn
turn:
  %t = phi i64 [ 0, %entry ], [ %t2, %again ]
  %tired = icmp uge i64 %t, %turns
  br i1 %tired, label %none, label %look
look:
  %i = phi i64 [ 0, %turn ], [ %i2, %same ]
  %end = icmp uge i64 %i, %count
  br i1 %end, label %again, label %one
one:
  %pa = getelementptr i64, ptr %pw, i64 %i
  %a = load i64, ptr %pa
  %p = inttoptr i64 %a to ptr
  %now = load atomic i64, ptr %p acquire, align 8
  %pe = getelementptr i64, ptr %ps, i64 %i
  %was = load i64, ptr %pe
  %equal = icmp eq i64 %now, %was
  br i1 %equal, label %same, label %found
same:
  %i2 = add i64 %i, 1
  br label %look
again:
  %t2 = add i64 %t, 1
  br label %turn
found:
  ret i64 %i
none:
  ret i64 %count
}}
define i64 @advance(i64 %lanes, i64 %n, i64 %turns) {{
entry:
  %pl = inttoptr i64 %lanes to ptr
  br label %turn
turn:
  %idle = phi i64 [ 0, %entry ], [ %idle2, %decide ]
  br label %each
each:
  %i = phi i64 [ 0, %turn ], [ %i2, %after ]
  %moved = phi i1 [ false, %turn ], [ %moved2, %after ]
  %open = phi i64 [ 0, %turn ], [ %open2, %after ]
  %all = icmp uge i64 %i, %n
  br i1 %all, label %ended, label %lane
lane:
  %pa = getelementptr i64, ptr %pl, i64 %i
  %a = load i64, ptr %pa
  %p = inttoptr i64 %a to ptr
  %pcount = getelementptr i64, ptr %p, i64 1
  %count = load i64, ptr %pcount
  %ptable = getelementptr i64, ptr %p, i64 2
  %tables = load i64, ptr %ptable
  %table = inttoptr i64 %tables to ptr
  %first = load i64, ptr %p
  br label %step
step:
  %at = phi i64 [ %first, %lane ], [ %at2, %done ]
  %over = icmp uge i64 %at, %count
  br i1 %over, label %after, label %look
look:
  %off = mul i64 %at, 5
  %e = getelementptr i64, ptr %table, i64 %off
  %fn = load i64, ptr %e
  %px = getelementptr i64, ptr %e, i64 1
  %x = load i64, ptr %px
  %py = getelementptr i64, ptr %e, i64 2
  %y = load i64, ptr %py
  %pz = getelementptr i64, ptr %e, i64 3
  %z = load i64, ptr %pz
  %pw = getelementptr i64, ptr %e, i64 4
  %w = load i64, ptr %pw
  %gate = icmp eq i64 %fn, 0
  br i1 %gate, label %poll, label %call
poll:
  %pg = inttoptr i64 %x to ptr
  %v32 = load atomic i32, ptr %pg acquire, align 4
  %v = zext i32 %v32 to i64
  %opened = icmp uge i64 %v, %y
  br i1 %opened, label %done, label %after
call:
  %pf = inttoptr i64 %fn to ptr
  %r = call i32 %pf(i64 %x, i64 %y, i64 %z, i64 %w)
  %ok = icmp eq i32 %r, 0
  br i1 %ok, label %done, label %failed
done:
  %at2 = add i64 %at, 1
  store i64 %at2, ptr %p
  br label %step
failed:
  %status = zext i32 %r to i64
  %pstatus = getelementptr i64, ptr %p, i64 3
  store i64 %status, ptr %pstatus
  store i64 %at, ptr %pcount
  br label %after
after:
  %waits = phi i64 [ 0, %step ], [ 1, %poll ], [ 0, %failed ]
  %went = icmp ne i64 %at, %first
  %moved2 = or i1 %moved, %went
  %open2 = add i64 %open, %waits
  %i2 = add i64 %i, 1
  br label %each
ended:
  %nobody = icmp eq i64 %open, 0
  br i1 %nobody, label %return, label %decide
decide:
  %more = add i64 %idle, 1
  %idle2 = select i1 %moved, i64 0, i64 %more
  %tired = icmp uge i64 %idle2, %turns
  br i1 %tired, label %return, label %turn
return:
  ret i64 %open
}}
define i64 @reserve(i64 %cached, i64 %rptr, i64 %size, i64 %n) {{
entry:
  %pc = inttoptr i64 %cached to ptr
  %pr = inttoptr i64 %rptr to ptr
  %mask = sub i64 %size, 1
  br label %try
try:
  %base = load atomic i64, ptr %pc acquire, align 8
  %at = and i64 %base, %mask
  %after = add i64 %at, %n
  %fits = icmp ule i64 %after, %size
  %rest = sub i64 %size, %at
  %skip = select i1 %fits, i64 0, i64 %rest
  %start = add i64 %base, %skip
  %end = add i64 %start, %n
  %read = load atomic i64, ptr %pr acquire, align 8
  %used = sub i64 %end, %read
  %room = icmp ult i64 %used, %size
  br i1 %room, label %take, label %full
take:
  %r = cmpxchg ptr %pc, i64 %base, i64 %end acq_rel acquire
  %won = extractvalue {{ i64, i1 }} %r, 1
  br i1 %won, label %done, label %try
done:
  ret i64 %base
full:
  ret i64 {RING_FULL - (1 << 64)}
}}
define i64 @commit(i64 %wptr, i64 %doorbell, i64 %committed, i64 %base, i64 %end) {{
entry:
  %pw = inttoptr i64 %wptr to ptr
  %pd = inttoptr i64 %doorbell to ptr
  %pc = inttoptr i64 %committed to ptr
  %now = load atomic i64, ptr %pc acquire, align 8
  %turn = icmp eq i64 %now, %base
  br i1 %turn, label %ring, label %wait
ring:
  store atomic i64 %end, ptr %pw release, align 8
  store atomic i64 %end, ptr %pd release, align 8
  store atomic i64 %end, ptr %pc release, align 8
  ret i64 1
wait:
  ret i64 0
}}""")
    return "\n".join(parts)


_compiled: Atomics | None = None
_compiling = threading.Lock()


def atomics() -> Atomics:
    """Return the compiled operations; the first call compiles them. A process has one set, for good."""
    global _compiled
    if _compiled is None:
        with _compiling:
            _compiled = _compiled or _compile()
    return _compiled


def _compile() -> Atomics:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(_module()), llvm.Target.from_default_triple().create_target_machine(opt=2)
    )
    engine.finalize_object()

    def bind(name: str, factory: Any, result: Any, *arguments: Any) -> Any:
        return factory(result, *arguments)(engine.get_function_address(name))

    word = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
    with_gil, without_gil, address = ctypes.PYFUNCTYPE, ctypes.CFUNCTYPE, ctypes.c_uint64
    return Atomics(
        load32=bind("load32", with_gil, word[4], address),
        load64=bind("load64", with_gil, word[8], address),
        store32=bind("store32", with_gil, None, address, word[4]),
        store64=bind("store64", with_gil, None, address, word[8]),
        cas32=bind("cas32", with_gil, word[4], address, word[4], word[4]),
        cas64=bind("cas64", with_gil, word[8], address, word[8], word[8]),
        rmw={
            (op, width): bind(f"{op}{8 * width}", with_gil, word[width], address, word[width])
            for op in _RMW
            for width in (4, 8)
        },
        spin32=bind("spin32", without_gil, word[4], address, *[word[4]] * 4),
        copy_rows=bind("copy_rows", without_gil, None, *[address] * 6),
        execute=bind("execute", without_gil, word[8], address, address, address, word[4]),
        read_process=bind("read_process", without_gil, ctypes.c_int64, ctypes.c_int32, *[address] * 3),
        await_change=bind("await_change", without_gil, word[8], *[address] * 4),
        advance=bind("advance", without_gil, word[8], *[address] * 3),
        reserve=bind("reserve", with_gil, word[8], *[address] * 4),
        commit=bind("commit", with_gil, word[8], *[address] * 5),
        keep=engine,
    )
