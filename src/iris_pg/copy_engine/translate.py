"""Program -> SDMA packets: a pure translation, the same for the software engine and for AMD queues.

=========== =====================================================================
step        packets
=========== =====================================================================
Copy        COPY_LINEAR, split where its count field ends
Copy2D      COPY_LINEAR_SUB_WINDOW_LARGE
Signal      FENCE: writes the tag after everything before it
Offer       ATOMIC SWAP of the address, and a Signal
Pull        NOP and TRAP: the software engine's host reads another process (trap.py)
Take        POLL_REGMEM until == tag, then FENCE: writes 0
Wait        POLL_REGMEM until >= value
Add         ATOMIC ADD without return
Reduce      NOP and TRAP: the software engine's host reduces (trap.py)
=========== =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from iris_pg.copy_engine import generations, layout, packets, trap
from iris_pg.copy_engine.ring import Patch
from iris_pg.errors import UnsupportedError
from iris_pg.flags import OFFER
from iris_pg.program import Add, Copy, Copy2D, Offer, Program, Pull, Reduce, Ref, Signal, Step, Take, Wait

_PLACEHOLDER = 1 << 12  # stands for an address that is patched in before a consumer sees it


@dataclass
class Batch:
    """Packets that are submitted together, and the addresses still to be filled in."""

    packets: bytearray = field(default_factory=bytearray)
    patches: list[Patch] = field(default_factory=list)

    @property
    def memory_bytes(self) -> int:
        """About what it takes in memory, measured in CPython with a key in a dictionary: objects weigh more than
        packets.
        """
        return 800 + len(self.packets) + 140 * len(self.patches)


class _Writer:
    def __init__(self, addresses: Callable[[Ref], int], bindings: Mapping[str, int], largest: int) -> None:
        self.addresses, self.bindings, self.largest = addresses, bindings, largest
        self.batches = [Batch()]

    def put(self, packet: bytes, **refs_at: tuple[Ref, int]) -> None:
        """Append a packet; each of ``refs_at`` is an address that may have to be patched: (ref, place in the
        packet).
        """
        batch = self.batches[-1]
        if len(batch.packets) + len(packet) > self.largest:
            batch = Batch()
            self.batches.append(batch)
        for ref, place in refs_at.values():
            if ref.buffer in self.bindings:
                batch.patches.append(Patch(len(batch.packets) + place, self.bindings[ref.buffer], ref.offset))
        batch.packets += packet

    def address(self, ref: Ref) -> int:
        return _PLACEHOLDER if ref.buffer in self.bindings else self.addresses(ref)

    def step(self, step: Step) -> None:
        match step:
            case Copy(dst, src, nbytes):
                step_bytes = generations.GFX942.split_bytes
                for start in range(0, nbytes, step_bytes):
                    d, s, size = dst + start, src + start, min(step_bytes, nbytes - start)
                    self.put(
                        packets.copy_linear(dst=self.address(d), src=self.address(s), nbytes=size),
                        src=(s, layout.COPY_LINEAR_SRC_OFFSET),
                        dst=(d, layout.COPY_LINEAR_DST_OFFSET),
                    )
            case Copy2D(dst, src, width_bytes, rows, dst_pitch_bytes, src_pitch_bytes):
                self.put(
                    packets.copy_sub_window(
                        dst=self.address(dst),
                        src=self.address(src),
                        width_bytes=width_bytes,
                        n_rows=rows,
                        dst_pitch_bytes=dst_pitch_bytes,
                        src_pitch_bytes=src_pitch_bytes,
                    ),
                    src=(src, layout.SUB_WINDOW_SRC_OFFSET),
                    dst=(dst, layout.SUB_WINDOW_DST_OFFSET),
                )
            case Offer(flag, tag, src=src):
                self.put(
                    packets.atomic(self.address(flag + OFFER), packets.AtomicOp.SWAP, self.address(src), width_bytes=8),
                    flag=(flag + OFFER, layout.ATOMIC_ADDRESS_OFFSET),
                    src=(src, layout.ATOMIC_OPERAND_OFFSET),
                )
                self.put(packets.fence(self.address(flag), tag), flag=(flag, layout.FENCE_ADDRESS_OFFSET))
            case Pull(dst, flag, writer, nbytes, offset):
                asked = trap.Pull(writer, self.address(dst), self.address(flag + OFFER), offset, nbytes)
                self.put(asked.request(), dst=(dst, trap.PULL_DST_OFFSET))
            case Signal(flag, tag):
                self.put(packets.fence(self.address(flag), tag), flag=(flag, layout.FENCE_ADDRESS_OFFSET))
            case Take(flag=flag, tag=tag):
                poll = packets.poll_regmem(self.address(flag), tag, func=packets.PollFunc.EQUAL)
                self.put(poll, flag=(flag, layout.POLL_ADDRESS_OFFSET))
                self.put(packets.fence(self.address(flag), 0), flag=(flag, layout.FENCE_ADDRESS_OFFSET))
            case Wait(flag, value):
                poll = packets.poll_regmem(self.address(flag), value, func=packets.PollFunc.GREATER_EQUAL)
                self.put(poll, flag=(flag, layout.POLL_ADDRESS_OFFSET))
            case Add(flag, value, width_bytes):
                self.put(
                    packets.atomic(self.address(flag), packets.AtomicOp.ADD, value, width_bytes=width_bytes),
                    flag=(flag, layout.ATOMIC_ADDRESS_OFFSET),
                )
            case Reduce(dst, sources, nbytes, dtype, op):
                addresses = tuple(self.address(source) for source in sources)
                places = {f"source{i}": (r, trap.SOURCES_OFFSET + 8 * i) for i, r in enumerate(sources)}
                reduction = trap.Reduction(op, dtype, self.address(dst), addresses, nbytes)
                self.put(reduction.request(), dst=(dst, trap.DST_OFFSET), **places)
            case _:
                raise UnsupportedError(
                    f"{type(step).__name__} has no SDMA packet; a copy engine moves bytes and cannot add them"
                )


def encode(
    program: Program, addresses: Callable[[Ref], int], bindings: Mapping[str, int], largest_batch: int
) -> list[Batch]:
    """Translate ``program`` into batches of packets, in program order (lanes merge into one queue).

    Args:
        addresses: address, in this process, of a Ref whose buffer never moves (flags, staging, heap).
        bindings: buffer -> number, for buffers whose address is only known at submission.
        largest_batch: most bytes a batch may have.

    Raises:
        UnsupportedError: a step that no packet can do.
    """
    writer = _Writer(addresses, bindings, largest_batch)
    for step in program.steps:
        writer.step(step)
    return [batch for batch in writer.batches if batch.packets]
