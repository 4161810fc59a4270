"""The decoder: golden dwords in, every corruption refused, and agreement with an encoder that it knows nothing of."""

import ast
import inspect
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_pg.copy_engine import decoded, decoder, packets
from iris_pg.copy_engine.decoded import (
    Atomic,
    Comparison,
    ConstFill,
    CopyLinear,
    CopySubWindow,
    Fence,
    Nop,
    Operation,
    PollRegMem,
    Timestamp,
    Trap,
)
from iris_pg.copy_engine.decoder import decode
from iris_pg.errors import ArgumentError, PacketError

ADDRESS = 0x1111222233334440
LO, HI = 0x33334440, 0x11112222
ALL = 0xFFFFFFFF
TOP = 1 << 64


def pack(*dwords):
    return struct.pack(f"<{len(dwords)}I", *dwords)


WINDOW_DWORDS = [
    *[0x2401, LO, HI, 0x11, 0x12, 0x13, 0x20, 0x56789ABB, 0x1234],
    *[LO + 8, HI, 0x31, 0x32, 0x33, 0x40, 0x99, 0],
    *[6, 4, 2],
]
WINDOW = CopySubWindow(
    dst=ADDRESS + 8,
    src=ADDRESS,
    width_bytes=7,
    n_rows=5,
    n_slices=3,
    dst_pitch_bytes=0x41,
    src_pitch_bytes=0x21,
    dst_slice_pitch_bytes=0x9A,
    src_slice_pitch_bytes=0x123456789ABC,
    dst_x=0x31,
    dst_y=0x32,
    dst_z=0x33,
    src_x=0x11,
    src_y=0x12,
    src_z=0x13,
)

# One good packet of each kind: its dwords, what they mean, and per dword the bits that may differ from zero.
KINDS = {
    "nop": ([0x00020000, 0xDEAD, 0xBEEF], Nop(3), [0x3FFFFFFF, ALL, ALL]),
    "copy": (
        [0x1, 0xFFF, 0, LO, HI, LO + 8, HI],
        CopyLinear(ADDRESS + 8, ADDRESS, 4096),
        [0xFFFF, ALL >> 2, 0, *[ALL] * 4],
    ),
    "window": (WINDOW_DWORDS, WINDOW, [0xFFFF, *[ALL] * 7, 0xFFFF, *[ALL] * 7, 0xFFFF, *[ALL] * 3]),
    "fence": ([0x5, LO, HI, 0xCAFEF00D], Fence(ADDRESS, 0xCAFEF00D), [0xFFFF, ALL, ALL, ALL]),
    "trap": ([0x6, 0x0ABCDEF1], Trap(0x0ABCDEF1), [0xFFFF, 0x0FFFFFFF]),
    "poll": (
        [0xD0000008, LO, HI, 7, ALL, 0x0FFF000A],
        PollRegMem(ADDRESS, 7, ALL, Comparison.GREATER_EQUAL, 10, 0xFFF),
        [0xF000FFFF, ALL, ALL, ALL, ALL, 0x0FFFFFFF],
    ),
    "atomic": (
        [0x0A | 1 << 16 | 104 << 25, LO, HI, 1, 2, 3, 4, 0x1FFF],
        Atomic(ADDRESS, Operation.CMPSWAP, 0x200000001, 0x400000003, 8, False, True, 0x1FFF),
        [0xFE01FFFF, *[ALL] * 6, 0x1FFF],
    ),
    "fill": (
        [0x8000000B, LO, HI, 0xDEADBEEF, 0x3F],
        ConstFill(ADDRESS, 0xDEADBEEF, 64, 4),
        [0xC000FFFF, *[ALL] * 3, ALL >> 2],
    ),
    "timestamp": ([0x20D, LO, HI], Timestamp(ADDRESS), [0xFFFF, ALL, ALL]),
}
SIZES = {
    "copy": 28,
    "window": 80,
    "fence": 16,
    "trap": 8,
    "poll": 24,
    "atomic": 32,
    "fill": 20,
    "timestamp": 12,
    "nop": 12,
}


def test_the_decoder_knows_nothing_of_the_encoder():
    imported = set()
    for module in (decoder, decoded):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    ours = {name for name in imported if name.startswith("iris_pg")}
    assert ours == {"iris_pg.errors", "iris_pg.copy_engine.decoded"}


def test_but_they_number_things_alike():
    assert {c.name: c.value for c in Comparison} == {f.name: f.value for f in packets.PollFunc}
    assert {o.name: o.value for o in Operation} == {o.name: o.value for o in packets.AtomicOp}


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_golden_dwords(kind, make):
    dwords, expected, _ = KINDS[kind]
    packet = decode(make(pack(*dwords)))
    assert packet == expected
    assert type(packet) is type(expected)
    assert packet.size_bytes == 4 * len(dwords) == SIZES[kind]


def test_packets_follow_one_another_in_a_ring():
    ring = memoryview(b"".join(pack(*dwords) for dwords, _, _ in KINDS.values()))
    at, found = 0, []
    while at < len(ring):
        found.append(decode(ring, at, len(ring)))
        at += found[-1].size_bytes
    assert at == len(ring)
    assert found == [expected for _, expected, _ in KINDS.values()]


@pytest.mark.parametrize(
    "header, op, width, returns",
    [
        (0x1E00000A, "ADD", 4, True),
        (0x5E00000A, "ADD", 8, True),
        (0x9E00000A, "ADD", 4, False),
        (0xDE00000A, "ADD", 8, False),
        (0x0A | 112 << 25, "SUB", 8, False),
        (0x0A | 7 << 25, "SWAP", 4, True),
        (0x0A | 40 << 25, "CMPSWAP", 8, True),
        (0x0A | 81 << 25, "SMIN", 4, False),
        (0x0A | 89 << 25, "DEC", 4, False),
    ],
)
def test_atomic_headers(header, op, width, returns):
    packet = decode(pack(header, LO, HI, 1, 0, 0, 0, 0))
    assert packet == Atomic(ADDRESS, Operation[op], 1, 0, width, returns, False, 0)


def test_every_atomic_code_is_known_or_refused():
    known = {}
    for code in range(128):
        try:
            packet = decode(pack(0x0A | code << 25, LO, HI, 1, 0, 0, 0, 0))
        except PacketError as error:
            assert f"operation {code} does not exist" in str(error)
        else:
            known[code] = (packet.op, packet.width_bytes, packet.returns)
    assert known == {
        op + (32 if width == 8 else 0) + (0 if returns else 64): (op, width, returns)
        for op in Operation
        for width in (4, 8)
        for returns in (True, False)
    }
    assert len(known) == 13 * 4


@pytest.mark.parametrize("func", Comparison)
def test_poll_comparisons(func):
    assert decode(pack(0x80000008 | func << 28, LO, HI, 1, ALL, 0)).func is func


@pytest.mark.parametrize("count", [0x3F, 0x3C])
def test_both_ways_to_count_a_dword_fill(count):
    assert decode(pack(0x8000000B, LO, HI, 5, count)) == ConstFill(ADDRESS, 5, 64, 4)


def test_a_byte_fill_holds_the_byte_in_all_lanes():
    assert decode(pack(0xB, LO + 1, HI, 0x5A5A5A5A, 2)) == ConstFill(ADDRESS + 1, 0x5A, 3, 1)


# --- Corruption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_reserved_bit_is_refused(kind):
    dwords, _, live = KINDS[kind]
    for number, mask in enumerate(live):
        for bit in range(16 if number == 0 else 0, 32):  # the rest of DW0 is the opcode
            corrupt = list(dwords)
            corrupt[number] ^= 1 << bit
            if mask >> bit & 1:
                try:
                    decode(pack(*corrupt))
                except PacketError as error:
                    assert "must be zero" not in str(error)
            else:
                with pytest.raises(PacketError, match=rf"DW{number} has bit {bit} \(\w+\) set") as caught:
                    decode(pack(*corrupt))
                assert f"{corrupt[number]:08x}" in str(caught.value)


@pytest.mark.parametrize(
    "dwords, name",
    [
        ([0x1 | 1 << 27, 0, 0, LO, HI, LO, HI], "broadcast"),
        ([0x1 | 1 << 18, 0, 0, LO, HI, LO, HI], "tmz"),
        ([0x1, 0, 1 << 17, LO, HI, LO, HI], "dst_sw"),
        ([0x8 | 1 << 26, LO, HI, 0, 0, 0], "hdp_flush"),
        ([0x00030005, LO, HI, 0], "mtype"),  # a fence for SDMA 5 and later
        ([0x8000000B | 1 << 16, LO, HI, 0, 3], "sw"),
    ],
)
def test_a_bit_this_engine_does_not_act_on_is_named(dwords, name):
    with pytest.raises(PacketError, match=rf"\({name}\) set"):
        decode(pack(*dwords))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packet_must_end_before_the_end(kind):
    dwords, expected, _ = KINDS[kind]
    packet = pack(*dwords)
    ring = bytes(16) + packet + bytes(64)
    assert decode(ring, 16, 16 + len(packet)) == expected
    for end in range(len(packet)):
        with pytest.raises(PacketError, match="end"):  # the ring goes on: stale bytes
            decode(ring, 16, 16 + end)
        with pytest.raises(PacketError, match="end"):  # the buffer itself ends
            decode(packet[:end])


def test_a_nop_does_not_skip_past_the_end():
    with pytest.raises(PacketError, match="count skips to 0x10000, past the end at 0x80"):
        decode(pack(0x3FFF0000) + bytes(124))


@pytest.mark.parametrize(
    "dwords, message",
    [
        ([0x1, 0, 0, 0, 0, LO, HI], "src 0x0 is null"),
        ([0x1, 0, 0, LO, HI, 0, 0], "dst 0x0 is null"),
        ([0x1, 3, 0, ALL - 2, ALL, LO, HI], "src .* 4 bytes from it pass"),
        ([0x1, 3, 0, LO, HI, ALL - 2, ALL], "dst .* 4 bytes from it pass"),
        ([0x1, 0x40000000, 0, LO, HI, LO, HI], r"DW1 has bit 30 \(reserved\)"),
        ([0x1, ALL, 0, LO, HI, LO, HI], r"DW1 has bit 30 \(reserved\)"),  # a size of 0, minus one
        ([*WINDOW_DWORDS[:1], 0, 0, *WINDOW_DWORDS[3:]], "src 0x0 is null"),
        ([*WINDOW_DWORDS[:9], 0, 0, *WINDOW_DWORDS[11:]], "dst 0x0 is null"),
        ([*WINDOW_DWORDS[:9], ALL, ALL, *WINDOW_DWORDS[11:]], "dst .* window passes"),
        ([*WINDOW_DWORDS[:19], ALL], "src .* window passes"),
        ([0x5, 0, 0, 1], "address 0x0 is null"),
        ([0x5, LO + 2, HI, 1], "no multiple of 4"),
        ([0xD0000008, 0, 0, 1, ALL, 0], "address 0x0 is null"),
        ([0xD0000008, LO + 1, HI, 1, ALL, 0], "no multiple of 4"),
        ([0xF0000008, LO, HI, 1, ALL, 0], "func is 7; allowed is 0..6"),
        ([0x50000008, LO, HI, 1, ALL, 0], "mem_poll is 0"),
        ([0x8, 0, 0x80000000, 0, 0, 0], "mem_poll is 0"),  # the HDP flush of ROCr
        ([0x9E00000A, 0, 0, 1, 0, 0, 0, 0], "address 0x0 is null"),
        ([0x9E00000A, LO + 2, HI, 1, 0, 0, 0, 0], "no multiple of 4"),
        ([0xDE00000A, LO + 4, HI, 1, 0, 0, 0, 0], "no multiple of 8"),
        ([0x0A | 31 << 25, LO, HI, 1, 0, 0, 0, 0], "operation 31 does not exist"),
        ([0x9E00000A, LO, HI, 1, 1, 0, 0, 0], "over 32 bits"),
        ([0x9E01000A, LO, HI, 1, 0, 0, 0, 0], "loop is set"),
        ([0x4000000B, LO, HI, 0, 3], "fillsize 1 does not exist"),
        ([0x8000000B, LO, HI, 0, 5], "count 5 is not a whole number of dwords"),
        ([0x8000000B, LO + 2, HI, 0, 3], "no multiple of 4"),
        ([0x8000000B, 0, 0, 0, 3], "is null"),
        ([0x8000000B, ALL - 3, ALL, 0, 7], "pass 2"),
        ([0xB, LO, HI, 0x5A, 3], "all four lanes"),
        ([0x20D, LO + 4, HI], "no multiple of 8"),
        ([0x20D, 0, 0], "is null"),
        ([0x2, LO, HI, 0, 0], r"op 2 sub_op 0 \(WRITE\) is not done"),
        ([0x401, *[0] * 12], r"op 1 sub_op 4 \(COPY\) is not done"),
        ([0x3, 0], "op 3 sub_op 0 does not exist"),
        ([0x6789AB7F], r"op 127 sub_op 171 does not exist \[dwords 6789ab7f\]"),
    ],
)
def test_refused(dwords, message):
    with pytest.raises(PacketError, match=message):
        decode(pack(*dwords))


@pytest.mark.parametrize(
    "offset, end", [(1, 64), (2, 64), (-4, 64), (64, 64), (62, 64), (0, 68), (0, 3), (0, -1), (8, 4)]
)
def test_a_place_where_no_packet_can_start(offset, end):
    with pytest.raises(PacketError, match="no SDMA packet can start"):
        decode(bytes(64), offset, end)


# --- Agreement with the encoder --------------------------------------------------------------------------------------

u32 = st.integers(0, ALL)
dword_address = st.integers(1, (TOP >> 2) - 1).map(lambda n: 4 * n)
qword_address = st.integers(1, (TOP >> 3) - 1).map(lambda n: 8 * n)


def encode(packet):
    """Encode what was decoded."""
    match packet:
        case Nop(n_dwords):
            return packets.nop(n_dwords)
        case CopyLinear(dst, src, nbytes):
            return packets.copy_linear(dst=dst, src=src, nbytes=nbytes)
        case CopySubWindow():
            return packets.copy_sub_window(**{name: getattr(packet, name) for name in CopySubWindow.__slots__})
        case PollRegMem(address, reference, mask, func, interval, retry_count):
            return packets.poll_regmem(address, reference, mask, packets.PollFunc(func), interval, retry_count)
        case Atomic(address, op, operand, compare, width, returns, loop, interval):
            op = packets.AtomicOp(op)
            return packets.atomic(address, op, operand, compare, width, returns, loop, interval)
        case Fence(address, value):
            return packets.fence(address, value)
        case ConstFill(address, value, nbytes, unit_bytes):
            return packets.const_fill(address, value, nbytes, unit_bytes=unit_bytes)
        case Trap(context):
            return packets.trap(context)
        case Timestamp(address):
            return packets.timestamp(address)
    raise AssertionError(packet)


@st.composite
def ranges(draw, largest, multiple=1):
    """(address, nbytes) below 2**64, both multiples of ``multiple``."""
    nbytes = multiple * draw(st.integers(1, largest // multiple))
    return multiple * draw(st.integers(1, (TOP - nbytes) // multiple)), nbytes


@st.composite
def copies(draw):
    dst, nbytes = draw(ranges(1 << 30))
    return CopyLinear(dst, draw(st.integers(1, TOP - nbytes)), nbytes)


@st.composite
def fills(draw):
    unit_bytes = draw(st.sampled_from([1, 4]))
    address, nbytes = draw(ranges(1 << 30, unit_bytes))
    return ConstFill(address, draw(st.integers(0, (1 << 8 * unit_bytes) - 1)), nbytes, unit_bytes)


@st.composite
def atomics(draw):
    width = draw(st.sampled_from([4, 8]))
    address, data = (dword_address, u32) if width == 4 else (qword_address, st.integers(0, TOP - 1))
    op = draw(st.sampled_from(Operation))
    has_compare = op is Operation.CMPSWAP
    loop = has_compare and draw(st.booleans())
    compare = draw(data) if has_compare else 0
    interval = draw(st.integers(0, 0x1FFF)) if loop else 0
    return Atomic(draw(address), op, draw(data), compare, width, draw(st.booleans()), loop, interval)


@st.composite
def windows(draw):
    width = draw(st.integers(1, 1 << 32))
    n_rows = draw(st.integers(1, 1 << 12))
    pitch = st.integers(1 if n_rows == 1 else width, 1 << 32)
    slice_pitch = st.integers(1, 1 << 48)
    at = st.integers(0, 1 << 10)
    return CopySubWindow(
        *(draw(st.integers(1, 1 << 62)), draw(st.integers(1, 1 << 62)), width, n_rows, draw(st.integers(1, 1 << 10))),
        *(draw(pitch), draw(pitch), draw(slice_pitch), draw(slice_pitch)),
        *(draw(u32), draw(at), draw(at), draw(u32), draw(at), draw(at)),
    )


polls = st.builds(
    *(PollRegMem, dword_address, u32, u32),
    *(st.sampled_from(Comparison), st.integers(0, 0xFFFF), st.integers(0, 0xFFF)),
)
EVERY_KIND = {
    "nop": st.builds(Nop, st.integers(1, 16384)),
    "copy": copies(),
    "window": windows(),
    "poll": polls,
    "atomic": atomics(),
    "fence": st.builds(Fence, dword_address, u32),
    "fill": fills(),
    "trap": st.builds(Trap, st.integers(0, (1 << 28) - 1)),
    "timestamp": st.builds(Timestamp, qword_address),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_decoding_undoes_encoding(kind):
    @settings(max_examples=150, deadline=None)
    @given(packet=EVERY_KIND[kind], before=st.integers(0, 8))
    def check(packet, before):
        encoded = encode(packet)
        decoded = decode(memoryview(bytes(4 * before) + encoded), 4 * before)
        assert decoded == packet
        assert decoded.size_bytes == len(encoded)

    check()


def test_a_contiguous_window_is_decoded_with_its_pitches():
    packet = packets.copy_sub_window(dst=8, src=16, width_bytes=100, n_rows=3, n_slices=2, src_pitch_bytes=128)
    assert decode(packet) == CopySubWindow(8, 16, 100, 3, 2, 100, 128, 300, 384, 0, 0, 0, 0, 0, 0)


def test_a_long_pad_decodes_to_nops_that_fill_it():
    pad = packets.pad((64 << 10) + 4)
    first = decode(pad)
    assert (first, decode(pad, first.size_bytes)) == (Nop(16384), Nop(1))


CODES = [dwords[0] & 0xFFFF for dwords, _, _ in KINDS.values()]


@settings(max_examples=600, deadline=None)
@given(
    words=st.lists(u32, min_size=0, max_size=24),
    code=st.sampled_from([None, *CODES]),
    offset=st.integers(-8, 100),
    end=st.none() | st.integers(-8, 120),
)
def test_any_dwords_decode_or_are_refused(words, code, offset, end):
    if words and code is not None:
        words[0] = words[0] & 0xFFFF0000 | code
    ring = pack(*words)
    for at in (0, offset):
        try:
            packet = decode(ring, at, end)
        except PacketError:
            continue
        assert at + packet.size_bytes <= (len(ring) if end is None else end)


@settings(max_examples=600, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), words=st.lists(u32, min_size=20, max_size=20), data=st.data())
def test_what_is_decoded_encodes_to_the_same_dwords(kind, words, data):
    """Nearly good dwords: a random choice of the dwords of a good packet, replaced by random ones under its mask."""
    good, _, live = KINDS[kind]
    replaced = data.draw(st.sets(st.integers(0, len(good) - 1)))
    dwords = [words[i] & live[i] if i in replaced else dword for i, dword in enumerate(good)]
    dwords[0] = dwords[0] & ~0xFFFF | good[0] & 0xFFFF
    try:
        packet = decode(pack(*dwords))
    except PacketError:
        return
    try:
        encoded = encode(packet)
    except (PacketError, ArgumentError):
        # The encoder is the stricter: rows that overlap, data that the operation ignores.
        assert kind in ("window", "atomic")
        return
    if isinstance(packet, Nop):
        assert encoded == pack(dwords[0]) + bytes(packet.size_bytes - 4)
    elif isinstance(packet, ConstFill) and packet.unit_bytes == 4:
        assert encoded == pack(*dwords[:4], dwords[4] | 3)  # two ways to count
    else:
        assert encoded == pack(*dwords)
