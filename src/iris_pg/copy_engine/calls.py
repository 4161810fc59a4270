"""What a copy engine is told, with addresses: the calls of a one-sided transfer, and those of a program. Pure.

A :data:`Call` becomes packets (``call.packets()``) on a queue whose packets this package writes, or a call of rocm-xio
(:func:`invocations`) where that library writes them.

rocm-xio has one queue for each pair of GPUs, and its host calls can only poll for >= and add. :func:`over_queues` turns
a program into one for such queues::

    lane 0      the stream: signals "go" to each queue, then takes "done" from each
    lane 1 + p  the queue to rank p: takes "go", does its part, signals "done"

It is a program like any other, so that :func:`iris_pg.verify.verify` proves it. Mailboxes hold 1 when they are full: a
signal adds 1, and a take polls for >= 1 and adds 2^32 - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from iris_pg.copy_engine import packets
from iris_pg.copy_engine.generations import GFX942
from iris_pg.copy_engine.layout import ATOMIC_BYTES, COPY_LINEAR_BYTES, POLL_BYTES, SUB_WINDOW_BYTES
from iris_pg.copy_engine.tile import Tile
from iris_pg.errors import UnsupportedError
from iris_pg.flags import LINE
from iris_pg.program import Add, Copy, Copy2D, Program, Ref, Signal, Step, Take, Wait

EMPTY = 2**32 - 1
"""What is added to a full mailbox to empty it: -1, modulo 2^32."""


class Linear(NamedTuple):
    """A copy of ``nbytes`` bytes, at least one."""

    dst: int
    src: int
    nbytes: int

    def packets(self) -> list[bytes]:
        """Return the packets that do it."""
        return packets.copy_linear_split(dst=self.dst, src=self.src, nbytes=self.nbytes)


class Poll(NamedTuple):
    """A wait until the 32-bit word at ``flag``, unsigned, is at least ``value``.

    Args:
        in_host: the word is the low half of a 64-bit one in memory of this process, which engines see too.
    """

    flag: int
    value: int
    in_host: bool = False

    def packets(self) -> list[bytes]:
        """Return the packets that do it."""
        return [packets.poll_regmem(self.flag, self.value)]


class Increase(NamedTuple):
    """An atomic addition of ``value`` to the word of ``bits`` (32 or 64) at ``flag``, after all that came before."""

    flag: int
    value: int
    bits: int = 32

    def packets(self) -> list[bytes]:
        """Return the packets that do it."""
        return [packets.atomic(self.flag, packets.AtomicOp.ADD, self.value, width_bytes=self.bits // 8)]


class Count(NamedTuple):
    """A flag that counts from 0 by 1, and that nobody else raises, becomes ``value``, after all that came before.
    Unlike an addition a store needs no atomic operation, which streams have only as kernels.
    """

    flag: int
    value: int

    def packets(self) -> list[bytes]:
        """Return the packets that do it."""
        return [packets.fence(self.flag, self.value)]


Call: TypeAlias = Linear | Tile | Poll | Increase | Count


# Programs -------------------------------------------------------------------------------------------------------------


def with_unit_tags(program: Program) -> Program:
    """Return ``program`` with mailboxes that hold 1 when they are full, whatever the operation."""

    def plain(step: Step) -> Step:
        return replace(step, tag=1) if isinstance(step, Signal | Take) else step

    return replace(program, steps=tuple(map(plain, program.steps)))


def fits(program: Program) -> bool:
    """Return whether queues can do all of ``program``: it moves bytes and flags, and adds no tensors."""
    return all(isinstance(step, Copy | Copy2D | Take | Wait | Add) or type(step) is Signal for step in program.steps)


def over_queues(program: Program) -> Program:
    """Return ``program`` spread over a queue for each rank, begun and awaited by lane 0: see the module.

    What lane 0 has to do with a peer goes to the queue of that peer, so that each link has its own engine; a copy
    within the rank, to that of the peer whose signal was taken last. All of the lanes beside lane 0 keep their order on
    the queue of the rank itself. That this is enough holds for the programs of engines that push
    (``Setting.pushes``), as their tests prove.

    Raises:
        UnsupportedError: the program does not fit (:func:`fits`).
    """
    if not fits(program):
        raise UnsupportedError(
            f"{program.name or 'a program'} adds tensors or reads other processes; a copy engine moves bytes and adds "
            "to flags; use a stream"
        )
    rank = taken = program.rank
    spread: list[Step] = []
    for step in with_unit_tags(program).steps:
        peer = rank
        if step.lane == 0:
            if isinstance(step, Take):
                taken = step.writer
            peer = _peer(rank, step, taken)
        spread.append(replace(step, lane=1 + peer))
    queues = list(dict.fromkeys(step.lane - 1 for step in spread))  # in the order in which they are used
    steps: list[Step] = [Signal(go(rank, peer)) for peer in queues]
    steps += [Take(go(rank, peer), rank, lane=1 + peer) for peer in queues]
    steps += spread
    steps += [Signal(done(rank, peer), lane=1 + peer) for peer in queues]
    steps += [Take(done(rank, peer), rank) for peer in queues]
    return Program(rank, program.world, tuple(steps), program.name)


def go(rank: int, peer: int) -> Ref:
    """The mailbox in which ``rank``'s stream lets its queue to ``peer`` begin."""
    return Ref(rank, "queues", 2 * peer * LINE)


def done(rank: int, peer: int) -> Ref:
    """The mailbox in which ``rank``'s queue to ``peer`` tells the stream that it has done its part."""
    return Ref(rank, "queues", (2 * peer + 1) * LINE)


def _peer(rank: int, step: Step, taken: int) -> int:
    """Return the rank whose queue a step of lane 0 is for; ``taken`` is the writer of the last mailbox that was taken,
    for what is then copied within ``rank``.
    """
    if isinstance(step, Take):
        return step.writer
    if isinstance(step, Signal | Add):
        return step.flag.rank
    if isinstance(step, Copy | Copy2D):
        other = {step.dst.rank, step.src.rank} - {rank}
        return other.pop() if other else taken
    return rank


def lower(program: Program, address: Callable[[Ref], int]) -> Iterator[tuple[int, Call]]:
    """Yield (queue, call) for the steps of :func:`over_queues` that are not of lane 0, in their order.

    Args:
        address: Ref -> address, as the engine sees it.
    """
    for step in program.steps:
        queue = step.lane - 1
        if queue < 0:
            continue
        match step:
            case Copy(dst, src, nbytes):
                yield queue, Linear(address(dst), address(src), nbytes)
            case Copy2D(dst, src, width_bytes, rows, dst_pitch_bytes, src_pitch_bytes):
                yield queue, Tile(address(dst), address(src), rows, width_bytes, dst_pitch_bytes, src_pitch_bytes)
            case Take(flag, _, tag):
                yield queue, Poll(address(flag), tag)
                yield queue, Increase(address(flag), EMPTY)
            case Wait(flag, value):
                yield queue, Poll(address(flag), value)
            case Add(flag, value, width_bytes):
                yield queue, Increase(address(flag), value, 8 * width_bytes)
            case Signal(flag, tag):
                yield queue, Increase(address(flag), tag)


# rocm-xio -------------------------------------------------------------------------------------------------------------


class Invocation(NamedTuple):
    """One call of rocm-xio, in the terms of its newer signature.

    Args:
        name: of the function.
        arguments: keyword -> value; the queue's come besides.
        nbytes: of the packets that it writes.
    """

    name: str
    arguments: dict[str, Any]
    nbytes: int


def invocations(calls: Iterable[Call], scratch: int) -> Iterator[Invocation]:
    """Yield the calls of rocm-xio for the calls of one queue, in their order.

    A copy that is longer than a packet's field becomes several: the library takes sizes up to 4 GiB, of which it writes
    the low 30 bits. It has no call that only waits, so a wait that no linear copy follows copies 4 bytes of scratch.

    Args:
        scratch: address of 8 bytes that nobody looks at.
    """
    waits: Poll | None = None
    for call in calls:
        if waits is not None:
            if isinstance(call, Linear):
                first, *rest = _split(call)
                yield _after(waits, first)
                yield from map(_put, rest)
                waits = None
                continue
            yield _after(waits, Linear(scratch + 4, scratch, 4))
            waits = None
        match call:
            case Poll():
                waits = call
            case Linear():
                yield from map(_put, _split(call))
            case Increase(flag, value, bits):
                yield Invocation("signal", dict(flag_ptr=flag, value=value, flag_bits=bits), ATOMIC_BYTES)
            case Count(flag):  # the library's host calls only add
                yield Invocation("signal", dict(flag_ptr=flag, value=1, flag_bits=32), ATOMIC_BYTES)
            case Tile():
                yield _put_tile(call)
    if waits is not None:
        yield _after(waits, Linear(scratch + 4, scratch, 4))


def _split(copy: Linear) -> Iterator[Linear]:
    most = GFX942.split_bytes
    for start in range(0, copy.nbytes, most):
        yield Linear(copy.dst + start, copy.src + start, min(most, copy.nbytes - start))


def _put(copy: Linear) -> Invocation:
    return Invocation("put", dict(dst=copy.dst, src=copy.src, size=copy.nbytes), COPY_LINEAR_BYTES)


def _after(waits: Poll, copy: Linear) -> Invocation:
    arguments = dict(flag_ptr=waits.flag, expected_value=waits.value, dst=copy.dst, src=copy.src, size=copy.nbytes)
    return Invocation("wait_flag_then_put", arguments | dict(flag_bits=32), POLL_BYTES + COPY_LINEAR_BYTES)


def _put_tile(tile: Tile) -> Invocation:
    # Elements of one byte: then it does not matter which of the numbers count bytes and which elements.
    arguments = dict(
        dst_addr=tile.dst,
        global_addr=tile.src,
        data_size=1,
        tile_height=tile.rows,
        tile_width=tile.width_bytes,
        dst_stride=tile.dst_pitch_bytes,
        src_stride=tile.src_pitch_bytes,
    )
    return Invocation("put_tile", arguments, SUB_WINDOW_BYTES)


__all__ = [
    "EMPTY",
    "Call",
    "Count",
    "Increase",
    "Invocation",
    "Linear",
    "Poll",
    "done",
    "fits",
    "go",
    "invocations",
    "lower",
    "over_queues",
    "with_unit_tags",
]
