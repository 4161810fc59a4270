"""What the cu engine launches: an exchange of one rank, and the kernel, grid and arguments that carry it out. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from iris_pg.errors import UnsupportedError
from iris_pg.kernels.loader import kernels

WORD_LANES = 4096  # most 32-bit words of a message that a CTA sends with their flags
_CREDIT_SLOTS, _ROUND_SLOTS, _WORD_SLOTS = 4, 4, 2  # as in the kernels
Width = tuple[int, int]  # lanes, and warps, of a kernel
_NOT_TOLD = (0, 0)  # the last two arguments: the word that the last CTA writes, and what it writes there


@dataclass(frozen=True)
class Message:
    """``nbytes`` to or from one peer, at an address here. ``place`` is its address at the peer: in the output of what
    is pushed there, in the input of what is pulled from there.
    """

    peer: int
    address: int
    nbytes: int
    place: int = 0


@dataclass
class Exchange:
    """One launch of one rank: what it sends, receives, and copies within itself (source, target, nbytes).

    With ``reduction`` (op, dtype) what it receives from all peers is as long as its own part, and all is combined into
    the target. When ``symmetric``, all ranks take part and every rank knows how long each message is, so that it needs
    no credit. ``is_known``: every rank knows the longest message, if not all. ``zero_copy``: all outputs are in the
    symmetric heap, and every send has a ``place``. ``pulls``: all inputs are, and every receive has one.
    """

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    own: tuple[int, int, int] = (0, 0, 0)
    zero_copy: bool = False
    pulls: bool = False
    reduction: tuple[str, str] | None = None
    symmetric: bool = False
    is_known: bool = False


class Launch(NamedTuple):
    """A kernel's name, number of CTAs, arguments, the constants that it is compiled for, and warps of a CTA.

    The last two arguments are for who launches it: the address of a word, and what the kernel writes there at its end.
    """

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
        push_bytes: largest message to all that goes through slots though the output, or the input, is in the heap.
        push_ctas: most CTAs of a launch that writes into outputs in the heap: a link is full with fewer.
        direct: width of what writes into outputs, or reads out of inputs, in the heap; lanes of 8 bytes.
        direct_own: the same of what stores an own part with the rest.
        slots: (most bytes of a CTA's share of a message, width) of what goes through slots, in order; lanes as above.
        reduce_lanes: of a block of all operands, 8 bytes each; the most.
        fits: fewer lanes for less than that; where launches are compiled, each number of lanes is a compilation.
        chunks: into how many a CTA cuts its share of a message, so that one can be copied out while another comes.
        polls: of a flag between two looks at the clock.
        platform: name of the constant of the kernels that says what they run on.
    """

    ctas: int
    least_bytes: int
    words_bytes: int
    push_bytes: int
    push_ctas: int
    direct: Width
    direct_own: Width
    slots: tuple[tuple[int, Width], ...]
    reduce_lanes: int
    fits: bool
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


def _landing_bytes(world: int, slot_bytes: int, ctas: int) -> tuple[int, int, int, int]:
    slots, words = world * ctas, _WORD_SLOTS * 8 * WORD_LANES
    return slots * _CREDIT_SLOTS * slot_bytes, slots * _ROUND_SLOTS * slot_bytes, slots * words, slots * words


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


class _Sides(NamedTuple):
    """An exchange by peer: addresses and sizes [world], and what all of them have in common.

    Args:
        longest: bytes of the longest message or own part.
        low: all bits of all addresses but places.
        to_all: the same bytes go to every peer, and are the own part, if there is one.
        is_even: there is a message to and from every peer, and all, and the own part if there is one, are as long.
    """

    sends: tuple[int, ...]
    send_bytes: tuple[int, ...]
    places: tuple[int, ...]
    receives: tuple[int, ...]
    receive_bytes: tuple[int, ...]
    longest: int
    low: int
    to_all: bool
    is_even: bool


def _sides(exchange: Exchange, world: int) -> _Sides:
    sends, send_bytes, places = [0] * world, [0] * world, [0] * world
    receives, receive_bytes = [0] * world, [0] * world
    own_source, own_target, own_bytes = exchange.own
    low, longest, shortest = own_source | own_target, own_bytes, own_bytes or 1 << 62
    for m in exchange.sends:
        sends[m.peer], send_bytes[m.peer] = m.address, m.nbytes
        low, longest, shortest = low | m.address, max(longest, m.nbytes), min(shortest, m.nbytes)
    for m in exchange.receives:
        receives[m.peer], receive_bytes[m.peer] = m.address, m.nbytes
        low, longest, shortest = low | m.address, max(longest, m.nbytes), min(shortest, m.nbytes)
    for m in exchange.receives if exchange.pulls else exchange.sends:
        places[m.peer] = m.place
    sent = {(m.address, m.nbytes) for m in exchange.sends}
    if own_bytes:
        sent.add((own_source, own_bytes))
    to_all = len(sent) == 1 and len(exchange.sends) == world - 1 > 0
    sizes = (tuple(sends), tuple(send_bytes), tuple(places), tuple(receives), tuple(receive_bytes))
    is_complete = len(exchange.sends) == len(exchange.receives) == world - 1
    return _Sides(*sizes, longest, low, to_all, is_complete and shortest >= longest)


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
        credits, rounds, words_, _ = _landing_bytes(world, slot_bytes, limits.ctas)
        self.credit_slots, self.round_slots, self.word_slots = landing, landing + credits, landing + credits + rounds
        self.pair_slots = self.word_slots + words_
        platform = getattr(kernels(interpreted=True), limits.platform).value
        self._common = dict(world=world, POLLS=limits.polls, PLATFORM=platform)
        source = kernels(interpreted=True)
        self._chunk = source.CHUNK.value
        self._lanes = max(2, 1 << (world - 1).bit_length())
        self._words_bytes = min(limits.words_bytes, limits.ctas * WORD_LANES * 4)

    def of(self, exchange: Exchange, limit_ns: int) -> list[Launch]:
        """Return the launches of an exchange, whose waits end after ``limit_ns``.

        All ranks of an exchange get the same kernel for the same messages, and the two ranks of a message cut it alike:
        what decides is what both of them know.

        Raises:
            UnsupportedError: a reduction that the kernels do not have.
        """
        sides = _sides(exchange, self.world)
        how: dict[str, Any] = dict(self._common)
        size = 1
        if exchange.reduction is not None:
            element, accumulator, op, size = reduction_types(*exchange.reduction)
            how |= dict(ELEMENT=element, ACCUMULATOR=accumulator, OP=op)
        are_words = self.world > 1 and 0 < sides.longest <= self._words_bytes
        if exchange.symmetric and sides.is_even and are_words:
            return [self._in_words(exchange, sides, how, size, limit_ns)]
        is_direct = exchange.zero_copy or exchange.pulls
        if exchange.reduction is None and not (exchange.symmetric or exchange.is_known or is_direct):
            return [self._of_width(*part, how, limit_ns) for part in self._by_width(exchange, sides)]
        if exchange.reduction is None and are_words:
            return [self._in_pairs(exchange, sides, how, limit_ns, self._word_lanes(sides.longest))]
        is_small = exchange.symmetric and sides.longest <= self.limits.push_bytes
        if is_direct and exchange.reduction is None and not is_small:
            return [self._zero_copy(exchange, sides, how, limit_ns)]
        return [self._in_slots(exchange, sides, how, size, limit_ns)]

    def _of_width(self, width: Width | None, exchange: Exchange, how: dict[str, Any], limit_ns: int) -> Launch:
        sides = _sides(exchange, self.world)
        if width:
            return self._in_pairs(exchange, sides, how, limit_ns, width)
        return self._in_slots(exchange, sides, how, 1, limit_ns)

    def _by_width(self, exchange: Exchange, sides: _Sides) -> list[tuple[Width | None, Exchange]]:
        """Return the exchanges of which one consists whose messages only their two ranks know: by the width of the
        kernel, as :meth:`_word_lanes` says for the longer of the two messages of a pair, and what goes through slots.
        """
        widths: dict[int, Width | None] = {}  # by peer
        for peer, pair in enumerate(zip(sides.send_bytes, sides.receive_bytes, strict=True)):
            if longest := max(pair):
                widths[peer] = self._word_lanes(longest) if longest <= self._words_bytes else None
        parts = {
            width: replace(
                exchange,
                sends=[m for m in exchange.sends if widths[m.peer] == width],
                receives=[m for m in exchange.receives if widths[m.peer] == width],
                own=(0, 0, 0),
            )
            for width in sorted(set(widths.values()), key=lambda width: width or (1 << 30, 0))
        }
        own = exchange.own[2]
        # The own part goes with others where that takes no launch more.
        takes = next((width for width in parts if width is None or own <= 4 * width[0] * self.limits.ctas), None)
        if own or not parts:
            part = parts.get(takes) or replace(exchange, sends=[], receives=[])
            parts[takes] = replace(part, own=exchange.own)
        return list(parts.items())

    def _in_words(self, exchange: Exchange, sides: _Sides, how: dict[str, Any], size: int, limit_ns: int) -> Launch:
        nbytes = sides.longest
        lanes, warps = self._word_lanes(nbytes)
        how |= dict(BLOCK=lanes, WORD=max(_word(sides.low | nbytes), size), TO_ALL=sides.to_all)
        tail = self._words_tail(self.word_slots, limit_ns)
        ctas = -(-nbytes // (4 * lanes))
        if exchange.reduction is not None:
            source, target, _ = exchange.own
            return Launch("reduce_words", ctas, (self.bases, sides.sends, nbytes, source, target, *tail), how, warps)
        return self._exchange_words(exchange, sides, how | dict(IN_PAIRS=False), ctas, tail, warps)

    def _in_pairs(self, exchange: Exchange, sides: _Sides, how: dict[str, Any], limit_ns: int, width: Width) -> Launch:
        lanes, warps = width
        sizes = functools.reduce(int.__or__, (*sides.send_bytes, *sides.receive_bytes), exchange.own[2])
        constants = dict(BLOCK=lanes, WORD=_word(sides.low | sizes), TO_ALL=sides.to_all, IN_PAIRS=True)
        ctas, tail = -(-sides.longest // (4 * lanes)), self._words_tail(self.pair_slots, limit_ns)
        return self._exchange_words(exchange, sides, how | constants, ctas, tail, warps)

    def _words_tail(self, slots: int, limit_ns: int) -> tuple[int, ...]:
        slot_bytes = 8 * WORD_LANES
        return slots, slot_bytes, self.counters, self.words, self.rank, self.limits.ctas, limit_ns, *_NOT_TOLD

    def _exchange_words(
        self, exchange: Exchange, sides: _Sides, how: dict[str, Any], ctas: int, tail: tuple[int, ...], warps: int
    ) -> Launch:
        messages = (sides.sends, sides.send_bytes, sides.receives, sides.receive_bytes)
        return Launch("exchange_words", ctas, (self.bases, *messages, *exchange.own, *tail), how, warps)

    def _zero_copy(self, exchange: Exchange, sides: _Sides, how: dict[str, Any], limit_ns: int) -> Launch:
        limits, pulls = self.limits, exchange.pulls
        lanes, warps = limits.direct_own if not pulls and sides.to_all and exchange.own[2] else limits.direct
        low = functools.reduce(int.__or__, sides.places, sides.low)
        how |= dict(LANES=self._lanes, BLOCK=self._block(sides.longest, lanes), WORD=_word(low))
        how |= dict(TO_ALL=sides.to_all and not pulls, PULLS=pulls)
        ctas, own_share, shares, shares_in = self._shares(exchange, sides, limits.ctas if pulls else limits.push_ctas)
        sent, received = (sides.sends, sides.send_bytes, shares), (sides.receives, sides.receive_bytes, shares_in)
        used, lent = (received, sent) if pulls else (sent, received)
        arguments = (
            *(self.bases, *used, sides.places, *lent[1:], *exchange.own, own_share),
            *(self.flags, self.counters, self.words, self.rank, limit_ns, *_NOT_TOLD),
        )
        return Launch("zero_copy", ctas, arguments, how, warps)

    def _in_slots(self, exchange: Exchange, sides: _Sides, how: dict[str, Any], size: int, limit_ns: int) -> Launch:
        limits, reduces = self.limits, exchange.reduction is not None
        share = self._share(sides.longest, limits.ctas)
        lanes, warps = next(width for most, width in limits.slots if share <= most)
        lanes = limits.reduce_lanes if reduces else lanes
        how |= dict(LANES=self._lanes, BLOCK=self._block(sides.longest, lanes), WORD=max(_word(sides.low), size))
        how |= dict(CREDITS=not exchange.symmetric, CHUNKS=limits.chunks)
        ctas, own_share, shares, shares_in = self._shares(exchange, sides, limits.ctas)
        slots = self.round_slots if exchange.symmetric else self.credit_slots
        tail = (
            *(*exchange.own, own_share, self._rounds(sides.longest), self.flags, slots, self.slot_bytes),
            *(self.counters, self.words, self.rank, limits.ctas, limit_ns, *_NOT_TOLD),
        )
        head = (self.bases, sides.sends, sides.send_bytes, shares)
        if reduces:
            return Launch("reduce", ctas, (*head, *tail), how, warps)
        how["TO_ALL"] = sides.to_all and exchange.own[2] > 0
        arguments = (*head, sides.receives, sides.receive_bytes, shares_in, *tail)
        return Launch("exchange", ctas, arguments, how, warps)

    def _shares(
        self, exchange: Exchange, sides: _Sides, most: int
    ) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """Return how many of ``most`` CTAs have a share, and the shares of the own part, of sends, of receives."""
        sizes = (exchange.own[2], *sides.send_bytes, *sides.receive_bytes)
        if exchange.symmetric:  # then all ranks know the longest message; else a message's ranks know that one
            shares = [self._share(sides.longest, most)] * len(sizes)
        else:
            shares = [self._share(n, most) for n in sizes]
        ctas = max(1, *(-(-n // share) for n, share in zip(sizes, shares, strict=True)))
        return ctas, shares[0], tuple(shares[1 : self.world + 1]), tuple(shares[self.world + 1 :])

    def _share(self, nbytes: int, ctas: int) -> int:
        """Return how many bytes of a message each of at most ``ctas`` CTAs moves, a multiple of 16."""
        return max((nbytes + ctas * 16 - 1) // (ctas * 16) * 16, self.limits.least_bytes)

    def _rounds(self, nbytes: int) -> int:
        """Return into how many chunks a CTA cuts its share of a message; a longer message has no fewer."""
        share, chunks = self._share(nbytes, self.limits.ctas), self.limits.chunks
        cut = min(max((share + chunks * 16 - 1) // (chunks * 16) * 16, self._chunk), self.slot_bytes)
        return -(-min(share, nbytes) // cut)

    def _block(self, longest: int, lanes: int) -> int:
        return max(16, min(lanes, 1 << (longest // 8).bit_length())) if self.limits.fits else lanes

    def _word_lanes(self, nbytes: int) -> Width:
        """Return (lanes, warps) for a message in words."""
        for lanes, warps in ((512, 4), (2048, 8)):
            if nbytes <= 4 * lanes * self.limits.ctas:
                return lanes, warps
        return WORD_LANES, 16


def _word(low: int) -> int:
    """Return how wide accesses can be, where ``low`` has all bits of all addresses: 1, 2, 4 or 16 bytes."""
    word = math.gcd(low, 16)
    return 4 if word == 8 else word  # not worth a compilation of its own
