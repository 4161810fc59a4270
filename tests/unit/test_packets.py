"""The packet encoder against golden dwords, derived by hand from the field definitions of the kernel headers."""

import inspect
import struct

import pytest

from iris_pg.copy_engine import generations, layout
from iris_pg.copy_engine import packets as p
from iris_pg.copy_engine.generations import GENERATIONS
from iris_pg.copy_engine.packets import AtomicOp, PollFunc
from iris_pg.errors import ArgumentError, PacketError, UnsupportedError

SRC = 0x1111222233334440
DST = 0x5555666677778880
GIB = 1 << 30


def dwords(packet):
    return list(struct.unpack(f"<{len(packet) // 4}I", packet))


def tile(**changes):
    """A tile of 64 rows of 256 bytes, from rows 4096 bytes apart to rows 1024 bytes apart."""
    values = {
        "dst": DST,
        "src": SRC,
        "width_bytes": 256,
        "n_rows": 64,
        "dst_pitch_bytes": 1024,
        "src_pitch_bytes": 4096,
    }
    return p.copy_sub_window(**values | changes)


GOLDEN = {
    "nop of 1": (p.nop(1), [0x00000000]),
    "nop of 3": (p.nop(3), [0x00020000, 0, 0]),
    "copy": (
        p.copy_linear(dst=DST, src=SRC, nbytes=0x1000),
        [0x00000001, 0x00000FFF, 0, 0x33334440, 0x11112222, 0x77778880, 0x55556666],
    ),
    "copy of 1 byte at odd addresses": (
        p.copy_linear(dst=DST + 1, src=SRC + 3, nbytes=1),
        [0x00000001, 0, 0, 0x33334443, 0x11112222, 0x77778881, 0x55556666],
    ),
    "copy of 1 GiB": (
        p.copy_linear(dst=DST, src=SRC, nbytes=GIB),
        [0x00000001, 0x3FFFFFFF, 0, 0x33334440, 0x11112222, 0x77778880, 0x55556666],
    ),
    "copy of 4 MiB on gfx908": (
        p.copy_linear(dst=DST, src=SRC, nbytes=1 << 22, generation=GENERATIONS["gfx908"]),
        [0x00000001, 0x003FFFFF, 0, 0x33334440, 0x11112222, 0x77778880, 0x55556666],
    ),
    "tile": (
        tile(),
        [
            *[0x00002401, 0x33334440, 0x11112222, 0, 0, 0, 0xFFF, 0, 0],
            *[0x77778880, 0x55556666, 0, 0, 0, 0x3FF, 0, 0],
            *[0xFF, 0x3F, 0],
        ],
    ),
    "tile, contiguous on both sides": (
        tile(dst_pitch_bytes=0, src_pitch_bytes=0),
        [
            *[0x00002401, 0x33334440, 0x11112222, 0, 0, 0, 0xFF, 0, 0],
            *[0x77778880, 0x55556666, 0, 0, 0, 0xFF, 0, 0],
            *[0xFF, 0x3F, 0],
        ],
    ),
    "block of a volume": (
        p.copy_sub_window(
            dst=0x5555666677778880,
            src=0x1111222233334440,
            width_bytes=7,
            n_rows=5,
            n_slices=3,
            src_x=0x11,
            src_y=0x12,
            src_z=0x13,
            src_pitch_bytes=0x21,
            src_slice_pitch_bytes=0x123456789ABC,
            dst_x=0x31,
            dst_y=0x32,
            dst_z=0x33,
            dst_pitch_bytes=0x41,
            dst_slice_pitch_bytes=0,  # contiguous: 5 rows of 0x41
        ),
        [
            *[0x00002401, 0x33334440, 0x11112222, 0x11, 0x12, 0x13, 0x20, 0x56789ABB, 0x1234],
            *[0x77778880, 0x55556666, 0x31, 0x32, 0x33, 0x40, 5 * 0x41 - 1, 0],
            *[6, 4, 2],
        ],
    ),
    "poll for >=": (
        p.poll_regmem(SRC, 0x89ABCDEF),
        [0xD0000008, 0x33334440, 0x11112222, 0x89ABCDEF, 0xFFFFFFFF, 0x0FFF000A],
    ),
    "poll as ROCr writes it": (
        p.poll_regmem(SRC, 0, func=PollFunc.EQUAL, interval=4),
        [0xB0000008, 0x33334440, 0x11112222, 0, 0xFFFFFFFF, 0x0FFF0004],
    ),
    "poll with all fields": (
        p.poll_regmem(SRC + 4, 1, 0xFF00, PollFunc.NOT_EQUAL, 0xABCD, 0x123),
        [0xC0000008, 0x33334444, 0x11112222, 1, 0xFF00, 0x0123ABCD],
    ),
    "atomic add32, returning": (
        p.atomic(SRC, AtomicOp.ADD, 0xFFFFFFFF, returns=True),
        [0x1E00000A, 0x33334440, 0x11112222, 0xFFFFFFFF, 0, 0, 0, 0],
    ),
    "atomic add64, returning": (
        p.atomic(SRC, AtomicOp.ADD, 1, width_bytes=8, returns=True),
        [0x5E00000A, 0x33334440, 0x11112222, 1, 0, 0, 0, 0],
    ),
    "atomic add32": (p.atomic(SRC, AtomicOp.ADD, 1), [0x9E00000A, 0x33334440, 0x11112222, 1, 0, 0, 0, 0]),
    "atomic add64": (
        p.atomic(SRC, AtomicOp.ADD, 0x0123456789ABCDEF, width_bytes=8),
        [0xDE00000A, 0x33334440, 0x11112222, 0x89ABCDEF, 0x01234567, 0, 0, 0],
    ),
    "atomic compare and swap, looping": (
        p.atomic(SRC, AtomicOp.CMPSWAP, 2, compare=0xAAAAAAAABBBBBBBB, width_bytes=8, loop=True, interval=0x1FFF),
        [0x0A | 1 << 16 | 104 << 25, 0x33334440, 0x11112222, 2, 0, 0xBBBBBBBB, 0xAAAAAAAA, 0x1FFF],
    ),
    "fence": (p.fence(SRC, 0xCAFEF00D), [0x00000005, 0x33334440, 0x11112222, 0xCAFEF00D]),
    "fence on gfx10": (p.fence(SRC, 1, GENERATIONS["gfx10"]), [0x00030005, 0x33334440, 0x11112222, 1]),
    "fence on gfx12": (p.fence(SRC, 1, GENERATIONS["gfx12"]), [0x00030005, 0x33334440, 0x11112222, 1]),
    "fence on gfx125": (p.fence(SRC, 1, GENERATIONS["gfx125"]), [0x03030005, 0x33334440, 0x11112222, 1]),
    "fill with dwords": (
        p.const_fill(DST, 0xDEADBEEF, 0x40),
        [0x8000000B, 0x77778880, 0x55556666, 0xDEADBEEF, 0x3F],
    ),
    "fill with bytes": (
        p.const_fill(DST + 1, 0x5A, 3, unit_bytes=1),
        [0x0000000B, 0x77778881, 0x55556666, 0x5A5A5A5A, 2],
    ),
    "trap": (p.trap(0x0ABCDEF1), [0x00000006, 0x0ABCDEF1]),
    "timestamp": (p.timestamp(DST), [0x0000020D, 0x77778880, 0x55556666]),
}


@pytest.mark.parametrize("packet, expected", GOLDEN.values(), ids=GOLDEN)
def test_golden_dwords(packet, expected):
    assert [f"{d:08x}" for d in dwords(packet)] == [f"{d:08x}" for d in expected]


def test_sizes_and_offsets():
    assert (layout.COPY_LINEAR_BYTES, layout.SUB_WINDOW_BYTES, layout.POLL_BYTES, layout.ATOMIC_BYTES) == (
        28,
        80,
        24,
        32,
    )
    assert (layout.FENCE_BYTES, layout.CONST_FILL_BYTES, layout.TRAP_BYTES, layout.TIMESTAMP_BYTES) == (16, 20, 8, 12)
    assert (layout.COPY_LINEAR_NBYTES_OFFSET, layout.COPY_LINEAR_SRC_OFFSET, layout.COPY_LINEAR_DST_OFFSET) == (
        4,
        12,
        20,
    )
    assert (layout.SUB_WINDOW_SRC_OFFSET, layout.SUB_WINDOW_DST_OFFSET) == (4, 36)
    assert (layout.POLL_ADDRESS_OFFSET, layout.POLL_REFERENCE_OFFSET) == (4, 12)
    assert (layout.FENCE_ADDRESS_OFFSET, layout.FENCE_VALUE_OFFSET) == (4, 12)
    assert (layout.ATOMIC_ADDRESS_OFFSET, layout.ATOMIC_OPERAND_OFFSET) == (4, 12)
    assert (layout.CONST_FILL_ADDRESS_OFFSET, layout.TIMESTAMP_ADDRESS_OFFSET) == (4, 4)


NEW, OTHER = 0x7F0123456788, 0x7E0000000010


@pytest.mark.parametrize(
    "template, patches, expected",
    [
        (
            p.copy_linear(dst=8, src=8, nbytes=512),
            {layout.COPY_LINEAR_DST_OFFSET: NEW, layout.COPY_LINEAR_SRC_OFFSET: OTHER},
            p.copy_linear(dst=NEW, src=OTHER, nbytes=512),
        ),
        (
            tile(dst=8, src=8),
            {layout.SUB_WINDOW_DST_OFFSET: NEW, layout.SUB_WINDOW_SRC_OFFSET: OTHER},
            tile(dst=NEW, src=OTHER),
        ),
        (p.poll_regmem(8, 1), {layout.POLL_ADDRESS_OFFSET: NEW}, p.poll_regmem(NEW, 1)),
        (p.fence(8, 1), {layout.FENCE_ADDRESS_OFFSET: NEW}, p.fence(NEW, 1)),
        (p.atomic(8, AtomicOp.ADD, 1), {layout.ATOMIC_ADDRESS_OFFSET: NEW}, p.atomic(NEW, AtomicOp.ADD, 1)),
        (p.const_fill(8, 1, 4), {layout.CONST_FILL_ADDRESS_OFFSET: NEW}, p.const_fill(NEW, 1, 4)),
        (p.timestamp(8), {layout.TIMESTAMP_ADDRESS_OFFSET: NEW}, p.timestamp(NEW)),
    ],
    ids=["copy", "tile", "poll", "fence", "atomic", "fill", "timestamp"],
)
def test_patching_an_address_in_a_template_is_encoding_it(template, patches, expected):
    packet = bytearray(template)
    for offset, address in patches.items():
        struct.pack_into("<Q", packet, offset, address)
    assert bytes(packet) == expected


# TC_OP_ATOMIC_*: with return 32 and 64 bits, without return 32 and 64 bits.
ATOMIC_CODES = {
    "SWAP": (7, 39, 71, 103),
    "CMPSWAP": (8, 40, 72, 104),
    "ADD": (15, 47, 79, 111),
    "SUB": (16, 48, 80, 112),
    "SMIN": (17, 49, 81, 113),
    "UMIN": (18, 50, 82, 114),
    "SMAX": (19, 51, 83, 115),
    "UMAX": (20, 52, 84, 116),
    "AND": (21, 53, 85, 117),
    "OR": (22, 54, 86, 118),
    "XOR": (23, 55, 87, 119),
    "INC": (24, 56, 88, 120),
    "DEC": (25, 57, 89, 121),
}


@pytest.mark.parametrize("name", ATOMIC_CODES)
def test_every_atomic_operation_code(name):
    forms = [(4, True), (8, True), (4, False), (8, False)]
    packets = [p.atomic(SRC, AtomicOp[name], 1, width_bytes=w, returns=r) for w, r in forms]
    assert tuple(dwords(packet)[0] >> 25 for packet in packets) == ATOMIC_CODES[name]
    assert {dwords(packet)[0] & 0x01FFFFFF for packet in packets} == {0x0A}


def test_the_table_has_every_atomic_operation():
    assert set(ATOMIC_CODES) == set(AtomicOp.__members__)


@pytest.mark.parametrize("name, limit", [("gfx942", 0x3FFFFFE0), ("gfx908", 0x3FFFE0)])
@pytest.mark.parametrize("nbytes", [1, 31, GIB - 32, GIB, GIB + 1, 4 * GIB])
def test_a_split_copy_is_contiguous_and_complete(name, limit, nbytes):
    src, dst = 0x10_0000_0000, 0x90_0000_0020
    pieces = p.copy_linear_split(dst=dst, src=src, nbytes=nbytes, generation=GENERATIONS[name])
    assert len(pieces) == -(-nbytes // limit)
    done = 0
    for piece in pieces:
        header, count, parameter, piece_src, piece_dst = struct.unpack("<IIIQQ", piece)
        assert (header, parameter, piece_src, piece_dst) == (1, 0, src + done, dst + done)
        assert (piece_src % 32, piece_dst % 32) == (src % 32, dst % 32)
        assert count + 1 <= limit
        done += count + 1
    assert done == nbytes


@pytest.mark.parametrize(
    "n_bytes, heads",
    [
        (4, [0x00000000]),
        (28, [0x00060000]),
        (64 << 10, [0x3FFF0000]),
        ((64 << 10) + 4, [0x3FFF0000, 0x00000000]),
        (192 << 10, [0x3FFF0000] * 3),
    ],
)
def test_pads_are_as_few_nops_as_the_count_allows(n_bytes, heads):
    pad = p.pad(n_bytes)
    assert len(pad) == n_bytes
    at, found = 0, []
    while at < n_bytes:
        found.append(struct.unpack_from("<I", pad, at)[0])
        end = at + 4 + 4 * (found[-1] >> 16)
        assert pad[at + 4 : end] == bytes(end - at - 4)
        at = end
    assert at == n_bytes
    assert found == heads


# Every refusal: what must raise, what the message must name.
GFX908 = GENERATIONS["gfx908"]
TOP = 1 << 64
REFUSED = {
    # A zero size would encode as the largest one.
    "nop 0": (lambda: p.nop(0), "n_dwords is 0"),
    "pad 0": (lambda: p.pad(0), "n_bytes is 0"),
    "copy 0": (lambda: p.copy_linear(dst=DST, src=SRC, nbytes=0), "nbytes is 0 .*1..1073741824"),
    "split 0": (lambda: p.copy_linear_split(dst=DST, src=SRC, nbytes=0), "nbytes is 0"),
    "tile width 0": (lambda: tile(width_bytes=0), "width_bytes is 0"),
    "tile rows 0": (lambda: tile(n_rows=0), "n_rows is 0"),
    "tile slices 0": (lambda: tile(n_slices=0), "n_slices is 0"),
    "fill 0": (lambda: p.const_fill(DST, 0, 0), "nbytes is 0"),
    # Negative sizes.
    "nop -1": (lambda: p.nop(-1), "n_dwords is -1"),
    "pad -4": (lambda: p.pad(-4), "n_bytes is -4"),
    "copy -1": (lambda: p.copy_linear(dst=DST, src=SRC, nbytes=-1), "nbytes is -1"),
    "split -1": (lambda: p.copy_linear_split(dst=DST, src=SRC, nbytes=-1), "nbytes is -1"),
    "tile width -1": (lambda: tile(width_bytes=-1), "width_bytes is -1"),
    "tile pitch -1": (lambda: tile(dst_pitch_bytes=-1), "dst_pitch_bytes is -1"),
    "tile slice pitch -1": (lambda: tile(src_slice_pitch_bytes=-1), "src_slice_pitch_bytes is -1"),
    "tile x -1": (lambda: tile(src_x=-1), "src_x is -1"),
    # Too large for the field.
    "nop 16385": (lambda: p.nop(16385), "n_dwords is 16385 .*1..16384"),
    "copy over 1 GiB": (lambda: p.copy_linear(dst=DST, src=SRC, nbytes=GIB + 1), "nbytes is 1073741825"),
    "copy over 4 MiB": (lambda: p.copy_linear(dst=DST, src=SRC, nbytes=(1 << 22) + 1, generation=GFX908), "4194304"),
    "tile width": (
        lambda: tile(width_bytes=(1 << 32) + 1, dst_pitch_bytes=0, src_pitch_bytes=0),
        "width_bytes is 4294",
    ),
    "tile rows": (lambda: tile(n_rows=(1 << 32) + 1, src=8, dst=8), "n_rows is 4294967297"),
    "tile slices": (lambda: tile(n_slices=(1 << 32) + 1, src=8, dst=8), "n_slices is 4294967297"),
    "tile pitch": (lambda: tile(src_pitch_bytes=(1 << 32) + 1), "src_pitch_bytes is 4294967297"),
    "tile slice pitch": (lambda: tile(dst_slice_pitch_bytes=(1 << 48) + 1), "dst_slice_pitch_bytes is 281474976710657"),
    **{
        f"tile {at}": (lambda at=at: tile(**{at: 1 << 32}), f"{at} is 4294967296") for at in ("dst_x", "src_y", "dst_z")
    },
    "poll reference": (lambda: p.poll_regmem(SRC, 1 << 32), "reference is 4294967296"),
    "poll mask": (lambda: p.poll_regmem(SRC, 1, mask=-1), "mask is -1"),
    "poll func": (lambda: p.poll_regmem(SRC, 1, func=7), "func is 7 .*0..6"),
    "poll interval": (lambda: p.poll_regmem(SRC, 1, interval=1 << 16), "interval is 65536"),
    "poll retry count": (lambda: p.poll_regmem(SRC, 1, retry_count=1 << 12), "retry_count is 4096"),
    "atomic operand 32": (lambda: p.atomic(SRC, AtomicOp.ADD, 1 << 32), "operand is 4294967296"),
    "atomic operand 64": (lambda: p.atomic(SRC, AtomicOp.ADD, TOP, width_bytes=8), "operand is 18446744073709551616"),
    "atomic operand -1": (lambda: p.atomic(SRC, AtomicOp.ADD, -1), "operand is -1"),
    "atomic compare": (lambda: p.atomic(SRC, AtomicOp.CMPSWAP, 1, compare=1 << 32), "compare is 4294967296"),
    "atomic interval": (lambda: p.atomic(SRC, AtomicOp.CMPSWAP, 1, loop=True, interval=1 << 13), "interval is 8192"),
    "fence value": (lambda: p.fence(SRC, 1 << 32), "value is 4294967296"),
    "fill value": (lambda: p.const_fill(DST, 1 << 32, 4), "value is 4294967296"),
    "fill byte value": (lambda: p.const_fill(DST, 256, 4, unit_bytes=1), "value is 256"),
    "fill over 1 GiB": (lambda: p.const_fill(DST, 0, GIB + 4), "nbytes is 1073741828"),
    "fill over 4 MiB": (lambda: p.const_fill(DST, 0, (1 << 22) + 4, generation=GFX908), "nbytes is 4194308"),
    "trap context": (lambda: p.trap(1 << 28), "context is 268435456"),
    # Null addresses.
    "copy src 0": (lambda: p.copy_linear(dst=DST, src=0, nbytes=1), "src is 0"),
    "copy dst 0": (lambda: p.copy_linear(dst=0, src=SRC, nbytes=1), "dst is 0"),
    "split dst 0": (lambda: p.copy_linear_split(dst=0, src=SRC, nbytes=4 * GIB), "dst is 0"),
    "tile src 0": (lambda: tile(src=0), "src is 0"),
    "tile dst 0": (lambda: tile(dst=0), "dst is 0"),
    "poll 0": (lambda: p.poll_regmem(0, 1), "address is 0"),
    "atomic 0": (lambda: p.atomic(0, AtomicOp.ADD, 1), "address is 0"),
    "fence 0": (lambda: p.fence(0, 1), "address is 0"),
    "fill address 0": (lambda: p.const_fill(0, 1, 4), "address is 0"),
    "timestamp 0": (lambda: p.timestamp(0), "address is 0"),
    # Misaligned.
    "pad 6": (lambda: p.pad(6), "n_bytes is 0x6; .*multiple of 4"),
    **{f"poll +{k}": (lambda k=k: p.poll_regmem(SRC + k, 1), "multiple of 4") for k in (1, 2, 3)},
    **{f"fence +{k}": (lambda k=k: p.fence(SRC + k, 1), "multiple of 4") for k in (1, 2, 3)},
    **{f"atomic32 +{k}": (lambda k=k: p.atomic(SRC + k, AtomicOp.ADD, 1), "multiple of 4") for k in (1, 2, 3)},
    **{
        f"atomic64 +{k}": (lambda k=k: p.atomic(SRC + k, AtomicOp.ADD, 1, width_bytes=8), "multiple of 8")
        for k in (1, 2, 4)
    },
    **{f"timestamp +{k}": (lambda k=k: p.timestamp(SRC + k), "multiple of 8") for k in (1, 2, 4)},
    "fill +2": (lambda: p.const_fill(DST + 2, 0, 4), "address .*multiple of 4"),
    "fill of 6": (lambda: p.const_fill(DST, 0, 6), "nbytes .*multiple of 4"),
    # Past the end of the address space.
    "copy src end": (lambda: p.copy_linear(dst=DST, src=TOP - 3, nbytes=4), "src is"),
    "copy dst end": (lambda: p.copy_linear(dst=TOP - 3, src=SRC, nbytes=4), "dst is"),
    "split end": (lambda: p.copy_linear_split(dst=TOP - 4 * GIB + 1, src=SRC, nbytes=4 * GIB), "dst is"),
    "tile end": (lambda: tile(dst=TOP - 63 * 1024 - 256 + 1), "dst is"),
    "poll end": (lambda: p.poll_regmem(TOP, 1), "address is"),
    "fill end": (lambda: p.const_fill(TOP - 4, 0, 8), "address is"),
    # Rows that would overlap.
    "tile dst pitch": (lambda: tile(dst_pitch_bytes=255), "dst_pitch_bytes is 255 .*256.."),
    "tile src pitch": (lambda: tile(src_pitch_bytes=255), "src_pitch_bytes is 255 .*256.."),
}


@pytest.mark.parametrize("make, message", REFUSED.values(), ids=REFUSED)
def test_refused(make, message):
    with pytest.raises(PacketError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: p.atomic(SRC, 9, 1), "op=9 .*does not exist"),
        (lambda: p.atomic(SRC, 15 | 32, 1), "op=47 .*does not exist"),  # the width belongs in width_bytes
        (lambda: p.atomic(SRC, AtomicOp.ADD, 1, width_bytes=2), "width_bytes=2"),
        (lambda: p.atomic(SRC, AtomicOp.ADD, 1, compare=1), "ADD ignores compare=1"),
        (lambda: p.atomic(SRC, AtomicOp.SWAP, 1, loop=True), "SWAP ignores .*loop=True"),
        (lambda: p.atomic(SRC, AtomicOp.CMPSWAP, 1, interval=3), "interval needs loop"),
        (lambda: p.const_fill(DST, 0, 4, unit_bytes=2), "unit_bytes=2"),
    ],
)
def test_arguments_that_no_packet_has(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_the_extremes_fit():
    for packet in (
        p.copy_linear(dst=TOP - 1, src=TOP - 1, nbytes=1),
        p.copy_linear(dst=TOP - GIB, src=1, nbytes=GIB),
        p.copy_linear_split(dst=TOP - 4 * GIB, src=1, nbytes=4 * GIB)[-1],
        tile(dst=TOP - 63 * 1024 - 256),
        tile(width_bytes=1 << 32, n_rows=1, dst_pitch_bytes=1, src_pitch_bytes=1 << 32),  # one row needs no pitch
        p.poll_regmem(TOP - 4, (1 << 32) - 1, 0, PollFunc.GREATER, 0xFFFF, 0xFFF),
        p.atomic(TOP - 8, AtomicOp.CMPSWAP, TOP - 1, TOP - 1, 8, True, True, 0x1FFF),
        p.fence(TOP - 4, (1 << 32) - 1),
        p.const_fill(TOP - GIB, (1 << 32) - 1, GIB),
        p.trap((1 << 28) - 1),
        p.timestamp(TOP - 8),
    ):
        assert isinstance(packet, bytes)


def test_copies_take_keywords_only():
    for function in (p.copy_linear, p.copy_linear_split, p.copy_sub_window):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


# --- The table of fields ---------------------------------------------------------------------------------------------


def from_table(packet, **values):
    """Encode by the table alone, one field after the other."""
    form = layout.LAYOUTS[packet]
    number = form.op | form.sub_op << 8
    for field in layout.FIELDS:
        if field.packet == packet:
            number |= (values.pop(field.name, field.minus_one) - field.minus_one) << (32 * field.dword + field.low)
    assert not values
    return number.to_bytes(4 * form.n_dwords, "little")


WINDOW = {
    **{"dst": DST, "src": SRC, "width_bytes": 7, "n_rows": 5, "n_slices": 3, "dst_x": 1, "dst_y": 2, "dst_z": 3},
    **{"src_x": 4, "src_y": 5, "src_z": 6, "dst_pitch_bytes": 99, "src_pitch_bytes": 98},
    **{"dst_slice_pitch_bytes": 0xABCDEF012345, "src_slice_pitch_bytes": 0x123456789ABC},
}


@pytest.mark.parametrize(
    "packet, expected",
    [
        (p.nop(1), from_table("NOP")),
        (p.copy_linear(dst=DST, src=SRC, nbytes=77), from_table("COPY_LINEAR", dst=DST, src=SRC, nbytes=77)),
        (p.copy_sub_window(**WINDOW), from_table("SUB_WINDOW", **WINDOW)),
        (
            p.fence(SRC, 5, GENERATIONS["gfx125"]),
            from_table("FENCE", address=SRC, value=5, mtype=3, scope=3),
        ),
        (p.trap(12345), from_table("TRAP", context=12345)),
        (
            p.poll_regmem(SRC, 9, 0xF0, PollFunc.LESS, 7, 8),
            from_table(
                "POLL_REGMEM", address=SRC, reference=9, mask=0xF0, func=1, interval=7, retry_count=8, mem_poll=1
            ),
        ),
        (
            p.atomic(SRC, AtomicOp.CMPSWAP, 3, 4, 8, True, True, 5),
            from_table("ATOMIC", address=SRC, operation=40, operand=3, compare=4, loop=1, interval=5),
        ),
        (p.const_fill(DST, 6, 8), from_table("CONST_FILL", address=DST, value=6, nbytes=8, fillsize=2)),
        (p.timestamp(DST), from_table("TIMESTAMP", address=DST)),
    ],
    ids=lambda value: "",
)
def test_the_encoder_agrees_with_the_table(packet, expected):
    assert packet.hex(" ", 4) == expected.hex(" ", 4)


@pytest.mark.parametrize("packet", layout.LAYOUTS)
def test_fields_lie_in_the_packet_and_do_not_overlap(packet):
    used = 0xFFFF  # op and sub_op
    for field in layout.FIELDS:
        if field.packet == packet:
            bits = ((1 << field.n_bits) - 1) << (32 * field.dword + field.low)
            assert not used & bits, field.name
            used |= bits
    assert used.bit_length() <= 32 * layout.LAYOUTS[packet].n_dwords


def test_the_table_can_be_printed():
    lines = layout.field_table().splitlines()
    assert len(lines) == 2 + len(layout.FIELDS)
    row = "| COPY_LINEAR | 1, 0 | 1 | 29:0 | nbytes | value - 1 | SDMA_PKT_COPY_LINEAR_COUNT_count |"
    assert row in lines
    assert {line.count("|") for line in lines} == {8}


# --- Generations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, name",
    [
        ("gfx908:sramecc+:xnack-", "gfx908"),
        ("gfx90a", "gfx90a"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx950", "gfx950"),
        ("gfx1030", "gfx10"),
        ("gfx1100", "gfx11"),
        ("gfx1201", "gfx12"),
        ("gfx1250", "gfx125"),
    ],
)
def test_generation_of_an_architecture(arch, name):
    assert generations.generation_of(arch) is GENERATIONS[name]


def test_an_unknown_architecture_is_refused():
    with pytest.raises(UnsupportedError, match="sm_90.*gfx942"):
        generations.generation_of("sm_90")


def test_generations_differ_as_the_headers_do():
    assert generations.GFX942 is GENERATIONS["gfx942"]
    rows = GENERATIONS.values()
    assert [g.name for g in rows if g.linear_count_bits == 22] == ["gfx908"]
    assert {g.linear_count_bits for g in rows} == {22, 30}
    assert [g.name for g in rows if g.fence_header == 0x5] == ["gfx908", "gfx90a", "gfx942", "gfx950"]
    assert [g.name for g in rows if g.min_submit_bytes] == ["gfx908"]
    assert (generations.GFX942.max_linear_bytes, generations.GFX942.split_bytes) == (0x40000000, 0x3FFFFFE0)
    assert (GFX908.max_linear_bytes, GFX908.split_bytes) == (0x400000, 0x3FFFE0)
    assert all(g.split_bytes % 32 == 0 for g in rows)


@pytest.mark.parametrize("generation", [g for g in GENERATIONS.values() if not g.has_sub_window], ids=lambda g: g.name)
def test_no_sub_window_names_the_alternative(generation):
    with pytest.raises(UnsupportedError, match=f"{generation.name} .*copy_linear"):
        tile(generation=generation)
