"""What the cu engine launches: an exchange of one rank, and the kernel, grid and arguments that carry it out. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from iris_pg.errors import UnsupportedError
from iris_pg.kernels.loader import kernels

WORD_LANES = 4096  # most 32-bit words of a message that a CTA sends with their flags
_CREDIT_SLOTS, _ROUND_SLOTS, _WORD_SLOTS = 4, 4, 2  # as in the kernels


@dataclass(frozen=True)
class Message:
    """``nbytes`` to or from one peer, at an address here; for a push, ``place`` is its address in the peer's output."""

    peer: int
    address: int
    nbytes: int
    place: int = 0


@dataclass
class Exchange:
    """One launch of one rank: what it sends, receives, and copies within itself (source, target, nbytes).

    With ``reduction`` (op, dtype) what it receives from all peers is as long as its own part, and all is combined into
    the target. When ``symmetric``, all ranks take part and every rank knows how long each message is, so that it needs
    no credit. ``zero_copy``: all outputs are in the symmetric heap, and every message has a ``place``.
    """

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    own: tuple[int, int, int] = (0, 0, 0)
    zero_copy: bool = False
    reduction: tuple[str, str] | None = None
    symmetric: bool = False


class Launch(NamedTuple):
    """A kernel's name, number of CTAs, arguments, the constants that it is compiled for, and warps of a CTA."""

    kernel: str
    ctas: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


@dataclass(frozen=True)
class Limits:
    """Where one kernel gives way to another, and how wide they are.

    Args:
        ctas: most CTAs of a launch.
        least_bytes: of a message for one CTA, before another one helps.
        words_bytes: largest message that goes in words with their flags.
        push_bytes: largest message to all that goes through slots though the output is in the heap.
        push_ctas: most CTAs of a launch that writes into outputs in the heap: a link is full with fewer.
        lanes: of a copy, 8 bytes each; the most.
        reduce_lanes: of a block of all operands, 8 bytes each; the most.
        fits: fewer lanes for less than that; where launches are compiled, each number of lanes is a compilation.
        warps: of a CTA.
        chunks: into how many a CTA cuts its share of a message, so that one can be copied out while another comes.
        polls: of a flag between two looks at the clock.
        platform: name of the constant of the kernels that says what they run on.
    """

    ctas: int
    least_bytes: int
    words_bytes: int
    push_bytes: int
    push_ctas: int
    lanes: int
    reduce_lanes: int
    fits: bool
    warps: int
    chunks: int
    polls: int
    platform: str


def area_bytes(world: int, slot_bytes: int, ctas: int = 1) -> dict[str, int]:
    """Return name -> nbytes of the areas of the heap that the engine needs. They are zeros before the first launch.

    Args:
        slot_bytes: size of a landing slot of one CTA and sender, a multiple of 16.
        ctas: most CTAs of a launch.
    """
    k = kernels(interpreted=True)
    return {
        "cu_flags": ctas * k.FLAGS.value * world * k.LINE.value,
        "cu_landing": sum(_landing_bytes(world, slot_bytes, ctas)),
    }


def _landing_bytes(world: int, slot_bytes: int, ctas: int) -> tuple[int, int, int]:
    slots = world * ctas
    return slots * _CREDIT_SLOTS * slot_bytes, slots * _ROUND_SLOTS * slot_bytes, slots * _WORD_SLOTS * 8 * WORD_LANES


@functools.cache
def reduction_types(op: str, dtype: str) -> tuple[Any, Any, Any, int]:
    """Return (element, accumulator, number of the operation, element size in bytes) for a reduction in a kernel.

    Complex numbers are added as pairs of real ones; bool is 0 or 1 of a byte.

    Raises:
        UnsupportedError: a reduction that the kernels do not have.
    """
    import triton.language as tl

    k = kernels(interpreted=True)
    if dtype == "bool":
        op, dtype = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op), "uint8"
    real = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype, dtype)
    elements = {
        "float16": tl.float16,
        "bfloat16": tl.bfloat16,
        "float32": tl.float32,
        "float64": tl.float64,
        **{f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }
    if real not in elements or (real != dtype and op not in ("sum", "avg")):
        raise UnsupportedError(f'{op} of {dtype} is not in the cu engine\'s kernels; use a group with engine="sdma"')
    element = elements[real]
    accumulator = tl.float32 if real in ("float16", "bfloat16") else element
    return element, accumulator, getattr(k, op.upper()).value, element.primitive_bitwidth // 8


class Launches:
    """Turns exchanges of one rank into launches.

    Args:
        rank, world, bases: as in the heap.
        flags, landing: offsets in a segment of the engine's areas.
        slot_bytes: size of a landing slot, as for :func:`area_bytes`.
        counters: address of int32 [ctas, COUNTERS, world] of this rank alone, zeros at first.
        words: address of int32 [WAITING + ctas] shared with the host, zeros at first.
        limits: which kernels for which sizes; the same on all ranks.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        bases: Sequence[int],
        flags: int,
        landing: int,
        slot_bytes: int,
        counters: int,
        words: int,
        limits: Limits,
    ) -> None:
        self.rank, self.world, self.bases, self.flags = rank, world, tuple(bases), flags
        self.slot_bytes, self.counters, self.words, self.limits = slot_bytes, counters, words, limits
        credits, rounds, _ = _landing_bytes(world, slot_bytes, limits.ctas)
        self.credit_slots, self.round_slots, self.word_slots = landing, landing + credits, landing + credits + rounds
        platform = getattr(kernels(interpreted=True), limits.platform).value
        self._common = dict(world=world, POLLS=limits.polls, PLATFORM=platform)
        source = kernels(interpreted=True)
        self._chunk = source.CHUNK.value
        self._lanes = max(2, 1 << (world - 1).bit_length())
        self._words_bytes = min(limits.words_bytes, limits.ctas * WORD_LANES * 4)

    def of(self, exchange: Exchange, limit_ns: int) -> Launch:
        """Return the launch of an exchange, whose waits end after ``limit_ns``.

        Raises:
            UnsupportedError: a reduction that the kernels do not have.
        """
        world, limits, reduction = self.world, self.limits, exchange.reduction
        sends, send_bytes, places = [0] * world, [0] * world, [0] * world
        receives, receive_bytes = [0] * world, [0] * world
        own_source, own_target, own_bytes = own = exchange.own
        low = own_source | own_target
        for m in exchange.sends:
            sends[m.peer], send_bytes[m.peer], places[m.peer] = m.address, m.nbytes, m.place
            low |= m.address
        for m in exchange.receives:
            receives[m.peer], receive_bytes[m.peer] = m.address, m.nbytes
            low |= m.address
        longest = max(own_bytes, *send_bytes, *receive_bytes)
        symmetric = exchange.symmetric
        first = exchange.sends[0] if exchange.sends else None
        to_all = (
            first is not None
            and len(exchange.sends) == world - 1
            and all(m.address == first.address and m.nbytes == first.nbytes for m in exchange.sends)
        )
        if to_all and first and own_bytes:
            to_all = own_source == first.address and own_bytes == first.nbytes
        tail: tuple[int, ...] = (self.counters, self.words, self.rank, limits.ctas)
        constants: dict[str, Any] = dict(self._common)
        size = 1
        if reduction is not None:
            element, accumulator, op, size = reduction_types(*reduction)
            constants |= dict(ELEMENT=element, ACCUMULATOR=accumulator, OP=op)

        in_words = symmetric and world > 1 and 0 < longest <= self._words_bytes
        # Every rank must choose alike, and each sees all sizes, though not the same ones in the same place.
        messages_here = (*exchange.sends, *exchange.receives)
        if in_words and own_bytes in (0, longest) and all(m.nbytes == longest for m in messages_here):
            low |= longest
            lanes, warps = self._word_lanes(longest)
            constants |= dict(BLOCK=lanes, WORD=max(_word(low), size), TO_ALL=to_all)
            slots = (self.word_slots, 8 * WORD_LANES)
            ctas = -(-longest // (4 * lanes))
            if reduction is not None:
                arguments: tuple[Any, ...] = (
                    self.bases,
                    tuple(sends),
                    longest,
                    own_source,
                    own_target,
                    *slots,
                    *tail,
                    limit_ns,
                )
                return Launch("reduce_words", ctas, arguments, constants, warps)
            arguments = (self.bases, tuple(sends), tuple(receives), longest, *own, *slots, *tail, limit_ns)
            return Launch("exchange_words", ctas, arguments, constants, warps)

        pushes = exchange.zero_copy and reduction is None and not (symmetric and longest <= limits.push_bytes)
        if pushes:
            for place in places:
                low |= place
        credits = not symmetric
        lanes = limits.lanes if reduction is None else limits.reduce_lanes
        constants |= dict(LANES=self._lanes, BLOCK=self._block(longest, lanes), WORD=max(_word(low), size))
        most = limits.push_ctas if pushes else limits.ctas
        # All ranks know the longest message of a symmetric exchange, and else the two ranks of a message know that one.
        sizes = (own_bytes, *send_bytes, *receive_bytes)
        if symmetric:
            shares = [self._share(longest, most)] * len(sizes)
        else:
            shares = [self._share(n, most) for n in sizes]
        ctas = max(1, *(-(-n // share) for n, share in zip(sizes, shares, strict=True)))
        own_share, send_shares, receive_shares = shares[0], tuple(shares[1 : world + 1]), tuple(shares[world + 1 :])
        own_part = (*own, own_share)
        messages = (self.bases, tuple(sends), tuple(send_bytes), send_shares)
        if pushes:
            constants["TO_ALL"] = to_all
            tail = (self.flags, self.counters, self.words, self.rank, limit_ns)
            arguments = (*messages, tuple(places), tuple(receive_bytes), receive_shares, *own_part, *tail)
            return Launch("push", ctas, arguments, constants, limits.warps)
        constants |= dict(CREDITS=credits, CHUNKS=limits.chunks)
        slots = (self.credit_slots if credits else self.round_slots, self.slot_bytes)
        tail = (self._rounds(longest), self.flags, *slots, *tail, limit_ns)
        if reduction is not None:
            return Launch("reduce", ctas, (*messages, *own_part, *tail), constants, limits.warps)
        constants["TO_ALL"] = to_all and own_bytes > 0
        arguments = (*messages, tuple(receives), tuple(receive_bytes), receive_shares, *own_part, *tail)
        return Launch("exchange", ctas, arguments, constants, limits.warps)

    def _share(self, nbytes: int, ctas: int) -> int:
        """Return how many bytes of a message each of at most ``ctas`` CTAs moves, a multiple of 16."""
        return max((nbytes + ctas * 16 - 1) // (ctas * 16) * 16, self.limits.least_bytes)

    def _rounds(self, nbytes: int) -> int:
        """Return into how many chunks a CTA cuts its share of a message; a longer message has no fewer."""
        share = self._share(nbytes, self.limits.ctas)
        chunks = self.limits.chunks
        cut = min(max((share + chunks * 16 - 1) // (chunks * 16) * 16, self._chunk), self.slot_bytes)
        return -(-min(share, nbytes) // cut)

    def _block(self, longest: int, lanes: int) -> int:
        return max(16, min(lanes, 1 << (longest // 8).bit_length())) if self.limits.fits else lanes

    def _word_lanes(self, nbytes: int) -> tuple[int, int]:
        """Return (lanes, warps) for a message in words."""
        for lanes, warps in ((512, 4), (2048, 8)):
            if nbytes <= 4 * lanes * self.limits.ctas:
                return lanes, warps
        return WORD_LANES, 16


def _word(low: int) -> int:
    """Return how wide accesses can be, where ``low`` has all bits of all addresses: 1, 2, 4 or 16 bytes."""
    word = math.gcd(low, 16)
    return 4 if word == 8 else word  # not worth a compilation of its own
