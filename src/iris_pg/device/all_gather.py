"""An all-gather that a kernel drives: one program (CTA) for each peer tells the copy engine what to put there. The
kernel moves no bytes itself. One source for Triton and for Gluon.

The output lies in the symmetric heap. A rank first says to each peer that its own output may be written, and a program
puts only when its peer has said so; then it awaits what the peer puts here. Both flags are counters, int64
[2, world (the writer), 8] in the heap; how many gathers there were lies in the rank's own memory and is counted in the
kernel, so a captured launch is right on every replay. The engine raises a flag by a store of 32 bits.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from iris_pg.device import sdma
from iris_pg.device.function import device_function
from iris_pg.device.triton import translate
from iris_pg.errors import ArgumentError, IrisError, QueueError, UnsupportedError, where
from iris_pg.kernels.loader import interpret
from iris_pg.memory.heap import SymmetricHeap, address_of

ENTERED = tl.constexpr(0)
ARRIVED = tl.constexpr(1)
LINE = tl.constexpr(8)  # words


@device_function
def all_gather(output, input, nbytes, flags, rounds, dead, bases, ctx, rank, world, PROGRAMS: tl.constexpr):
    """Gather ``nbytes`` from each rank. Program i is for the peers rank + 1 + i, + PROGRAMS, and so on.

    Args:
        output: address in this rank's heap. input: address of anything that the copy engine reads.
        flags: pointer to int64 [2, world, LINE], in the heap.
        rounds: pointer to int64 [PROGRAMS], this rank's memory: how many gathers there were.
        dead: pointer to int32, set when a wait was in vain.
    """
    program = tl.program_id(0)
    round_ = tl.load(rounds + program) + 1
    entered, arrived = flags + ENTERED * world * LINE, flags + ARRIVED * world * LINE
    is_alive = tl.atomic_add(dead, 0, sem="relaxed", scope="gpu") == 0  # the same in all lanes
    for k in range(1 + program, world, PROGRAMS):
        peer = (rank + k) % world
        there = translate(entered + rank * LINE, rank, peer, bases)
        tl.debug_barrier()
        tl.atomic_add(there, 1, sem="release", scope="sys")
    if (program == 0) & (output + rank * nbytes != input) & is_alive:
        is_alive = sdma.copy_linear(ctx, rank, output + rank * nbytes, input, nbytes) != 0
    for k in range(1 + program, world, PROGRAMS):
        peer = (rank + k) % world
        if is_alive:
            is_alive = sdma.await_flag(ctx, peer, entered + peer * LINE, round_) != 0
        if is_alive:
            distance = tl.load(bases + peer).to(tl.int64) - tl.load(bases + rank).to(tl.int64)
            sdma.copy_linear(ctx, peer, output + rank * nbytes + distance, input, nbytes)
            there = translate(arrived + rank * LINE, rank, peer, bases)
            sdma.fence(ctx, peer, there.to(tl.int64), round_)  # one writer: a store will do
    for k in range(1 + program, world, PROGRAMS):
        peer = (rank + k) % world
        if is_alive:
            is_alive = sdma.await_flag(ctx, peer, arrived + peer * LINE, round_) != 0
        if is_alive:  # the input may be written again when it has been read for this peer too
            is_alive = sdma.quiet(ctx, peer) != 0
    if (program == 0) & is_alive:
        is_alive = sdma.quiet(ctx, rank) != 0
    tl.store(dead, 1, mask=is_alive == 0)
    tl.store(rounds + program, round_)


@functools.cache
def _interpreted_kernel():
    return InterpretedFunction(all_gather.fn)


class KernelGather:
    """All-gathers of one context that kernels drive. Collective to make: it allocates flags in the heap.

    Args:
        heap: the context's.
        flags: int64 [2, world, 8] zeros in the heap.
        bases, copy_engine_ctx: as the context gives them.
    """

    def __init__(
        self, heap: SymmetricHeap, flags: torch.Tensor, bases: torch.Tensor, copy_engine_ctx: torch.Tensor
    ) -> None:
        self._heap, self._flags, self._bases, self._ctx = heap, flags, bases, copy_engine_ctx
        self._programs = 1 if heap.device.type == "cpu" else max(heap.world - 1, 1)  # the interpreter runs one
        self._rounds = torch.zeros(self._programs, dtype=torch.int64, device=heap.device)
        self._dead = torch.zeros(1, dtype=torch.int32, device=heap.device)

    def __call__(self, output: torch.Tensor, input: torch.Tensor, language: str = "triton") -> None:
        """Gather every rank's ``input`` [n...] into ``output`` [world * n...], in the heap at one place on all ranks.
        It returns when all is there; on an AMD GPU, and while a graph is captured, at once, and it is on the current
        stream. On an NVIDIA GPU the host has to wait: a blocking copy, ``output.cpu()`` for instance, would keep the
        driver from doing for the proxy what the kernel waits for, until the deadline. So synchronize the stream after
        the replay of a graph.

        Args:
            language: of the kernel on a GPU, "triton" or "gluon".

        Raises:
            ArgumentError: a size, dtype or layout that does not fit, or an output that is not in the heap.
            QueueError: where it waits, a peer did not come.
        """
        heap, op = self._heap, "all_gather"
        place = where(group=heap.links.group, rank=heap.rank, op=op)
        nbytes = input.numel() * input.element_size()
        if output.dtype != input.dtype or output.numel() != input.numel() * heap.world:
            raise ArgumentError(
                f"{op}: the output has {output.numel()} elements of {output.dtype} and the input {input.numel()} of "
                f"{input.dtype}; the output takes {heap.world} times as many of the same {place}"
            )
        if not (output.is_contiguous() and input.is_contiguous()) or input.device != heap.device:
            raise ArgumentError(f"{op}: output and input are contiguous, on {heap.device} {place}")
        if heap.offset_of(address_of(output), nbytes * heap.world) is None:
            raise ArgumentError(
                f"{op}: the output is not in this context's heap; kernels put straight into the peers' outputs. Make "
                f"it with ctx.empty(...), or use another all_gather_variant {place}"
            )
        if not nbytes:
            return
        arguments = (
            *(address_of(output), address_of(input), nbytes, self._flags, self._rounds, self._dead, self._bases),
            *(self._ctx, heap.rank, heap.world),
        )
        if heap.device.type == "cpu":
            interpret(_interpreted_kernel(), *arguments, PROGRAMS=1)
            self.check()
        elif language == "gluon":
            from iris_pg.device.all_gather_gluon import all_gather_in_gluon

            all_gather_in_gluon[(self._programs,)](*arguments, PROGRAMS=self._programs)
        elif language == "triton":
            all_gather[(self._programs,)](*arguments, PROGRAMS=self._programs)
        else:
            raise UnsupportedError(f"{op}: language={language!r}; it is 'triton' or 'gluon' {place}")
        if heap.device.type != "cpu" and not torch.version.hip and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(heap.device).synchronize()
            self.check()

    def check(self) -> None:
        """Raise when a gather has waited in vain for a peer. On an AMD GPU it waits for what is under way.

        Raises:
            QueueError: gathers do nothing any more.
        """
        if self._dead.item():
            error: IrisError = QueueError(
                "all_gather: a kernel waited in vain for a peer, or for a queue; ctx.quiet() says for which "
                f"{where(group=self._heap.links.group, rank=self._heap.rank)}"
            )
            raise error


__all__ = ["KernelGather", "all_gather"]
