"""The sdma engine of CUDA tensors: operations as programs, and programs as driver calls for a stream.

The first call for given sizes and addresses makes the driver calls; later ones make them again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from iris_pg.collectives import message
from iris_pg.collectives.build import build
from iris_pg.collectives.flow import Fold, largest_part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.calls import fits, with_unit_tags
from iris_pg.copy_engine.rounds import in_rounds
from iris_pg.copy_engine.stream import SecondStream, bind, lower
from iris_pg.device_operation import DeviceOperation
from iris_pg.device_page import DevicePage
from iris_pg.device_queues import DeviceQueues
from iris_pg.flags import MAIL_SLOTS, SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.planner import all_know_largest
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Copy, Copy2D, Program, Ref, Signal, Take
from iris_pg.watch import Key, tag_of

_PREPARED = 4096  # most operations whose driver calls are kept
_PROGRAMS = 1024  # most programs that are kept
_TAPERED_FROM = 32 << 20  # bytes from which pieces get smaller at the end
_MOVED, _REDUCED = (3, 1), (3, 2, 1)  # and how: what is added takes half as long as on the way, what is copied a fifth
_LANES_FROM = 16 << 20  # bytes that a rank moves; for less a second stream costs more than it gains


class Prepared:
    """An operation that is ready to be put on a stream.

    Args:
        program: what it does.
        calls: what the stream is told; it can say that the operation is done.
        chunks: slots that it goes through, one after another, as far as all ranks know.
    """

    __slots__ = ("_calls", "chunks", "program")

    def __init__(self, program: Program, calls: gpu.Calls, chunks: int = 1) -> None:
        self.program, self._calls, self.chunks = program, calls, chunks

    def launch(self, stream: Any, number: int | None, after: Callable[[], Any] | None) -> None:
        """Put it on a stream (its handle), which writes ``number``, if there is one, into its lane's word behind it and
        behind what ``after`` puts on the stream.
        """
        if number is None or after:
            self._calls(stream)
            if after:
                after()
            if number is not None:
                self._calls.mark(stream, number)
        else:
            self._calls.marked(stream, number)


class DeviceCopies:
    """Makes operations of one rank ready.

    Args:
        page: the flags, and the words of lanes.
        device: this rank's GPU.
        chunk_bytes: size of a slot that all ranks read.
        comm_sms: most CTAs of a kernel that reduces.

    Attributes:
        pair_bytes: size of a slot that one rank reads.
        mail_bytes: the same for messages.
    """

    def __init__(self, page: DevicePage, device: torch.device, chunk_bytes: int, comm_sms: int) -> None:
        self.rank, self.world, self.device, self._comm_sms = page.heap.rank, page.heap.world, device, comm_sms
        self.chunk_bytes = chunk_bytes
        self.pair_bytes = max(256, 2 * chunk_bytes // max(self.world - 1, 1) // 256 * 256)
        self.mail_bytes = max(256, 2 * chunk_bytes // max(self.world, 1) // 256 * 256)
        self._page = page
        self._second = SecondStream(torch.cuda.Stream(device).cuda_stream)
        self._heap: SymmetricHeap | None = None
        self._tensors: SymmetricHeap | None = None
        self.queues: DeviceQueues | None = None  # for what they can do, where they are
        self._programs: OrderedDict[Hashable, tuple[Program, int]] = OrderedDict()
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._ahead = 0  # slots that operations went through, beside the first: where one ends the next does not begin

    def areas(self, only_messages: bool = False) -> dict[str, int]:
        """Return name -> nbytes of what it takes in the heap."""
        mail = dict(mail=MAIL_SLOTS * self.world * self.mail_bytes)
        pairs = SLOTS * (self.world - 1) * self.pair_bytes
        return mail if only_messages else dict(staging=SLOTS * self.chunk_bytes, pairs=pairs) | mail

    def use(self, heap: SymmetricHeap, tensors: SymmetricHeap) -> None:
        """Use a heap, which has the :meth:`areas`, and that of the user's tensors."""
        self._heap, self._tensors = heap, tensors

    def operation(
        self,
        what: DeviceOperation,
        sequence: int,
        program: Callable[[Setting], Program] | None,
        captures: bool,
    ) -> Prepared:
        """Return operation number ``sequence``, ready; ``program`` builds what it does, when its flow does not say.

        While a graph is captured nothing waits beside anything else: a graph with waits on parallel branches was seen
        to hang.
        """
        key, local, slot = what.key, what.local, (sequence + self._ahead) % SLOTS
        if not captures and (prepared := what.ready.get(slot)):
            self._ahead += prepared.chunks - 1
            return prepared
        known: Hashable = (key, local, slot, what.addresses, captures)
        prepared = self._prepared.get(known)
        if prepared is None:
            made, chunks = self._programs.get((key, local, slot)) or self._build(what, slot, program)
            if self.queues and not captures and fits(made):
                prepared = self._prepare_queues(self.queues, made, what.names, what.addresses, chunks)
            else:
                moving = {step.lane for step in made.steps if not isinstance(step, Signal | Take)}
                lanes = made.nbytes_moved() >= _LANES_FROM and len(moving) > 1
                rounds = lanes and captures and not _is_free(made)
                prepared = self._prepare(made, what.names, what.addresses, 0, lanes, rounds, chunks)
            self._keep(known, prepared)
        if not captures:
            what.ready[slot] = prepared
        self._ahead += prepared.chunks - 1
        return prepared

    def _build(
        self, what: DeviceOperation, slot: int, program: Callable[[Setting], Program] | None
    ) -> tuple[Program, int]:
        """Return the program of an operation, and how many slots it goes through as far as all ranks know."""
        key, local = what.key, what.local
        if program:
            made, chunks = program(self._setting(key, slot)), 1
        else:
            flow = what.flow(key, local)
            setting = self._setting(key, slot, isinstance(flow, Fold))
            made, chunks = build(setting, flow), 1
            if all_know_largest(str(key[0])):
                chunks = max(1, len(setting.pieces(largest_part(flow))))
        self._programs[key, local, slot] = made, chunks
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        return made, chunks

    def send(self, peer: int, tag: int, address: int, nbytes: int, chunks: int, word: int) -> Prepared:
        """Return a message to ``peer``, ready; ``chunks`` were sent to it before.

        Args:
            word: number of the word that says how many messages to it are done.
        """
        return self._message(message.send, "send", peer, tag, address, nbytes, chunks, word)

    def receive(self, peer: int, tag: int, address: int, nbytes: int, chunks: int, word: int) -> Prepared:
        """Return the receipt of a message; as :meth:`send`."""
        return self._message(message.receive, "recv", peer, tag, address, nbytes, chunks, word)

    def _message(
        self,
        program: Callable[[Setting, int, Ref, int], Program],
        op: str,
        peer: int,
        tag: int,
        address: int,
        nbytes: int,
        chunks: int,
        word: int,
    ) -> Prepared:
        known: Hashable = (op, peer, tag, nbytes, chunks % MAIL_SLOTS, address)
        prepared = self._prepared.get(known)
        if prepared is None:
            setting = replace(self._setting(("message", tag), chunks % MAIL_SLOTS), pair_bytes=self.mail_bytes)
            made, pieces = program(setting, peer, Ref(self.rank, "tensor", 0), nbytes), message.pieces(setting, nbytes)
            prepared = self._keep(known, self._prepare(made, ("tensor",), (address,), word, chunks=len(pieces)))
        return prepared

    def _setting(self, key: Key, slot: int, reduces: bool = False) -> Setting:
        return Setting(
            self.rank,
            self.world,
            self._page.heap.control,
            tag=tag_of(key),
            chunk_bytes=self.chunk_bytes,
            pair_bytes=self.pair_bytes,
            tapered_from=_TAPERED_FROM,
            taper=_REDUCED if reduces else _MOVED,
            first_slot=slot,
            pushes=True,
        )

    def _prepare(
        self,
        program: Program,
        names: Sequence[str],
        addresses: Sequence[int],
        word: int,
        lanes: bool = False,
        rounds: bool = False,
        chunks: int = 1,
    ) -> Prepared:
        if rounds:
            program = in_rounds(program)
        actions = lower(program, self._addresses(names, addresses), lanes)
        calls = bind(actions, self.device, self._comm_sms, self._page.address_of_word(word), self._second, rounds)
        return Prepared(program, calls, chunks)

    def _prepare_queues(
        self, queues: DeviceQueues, program: Program, names: Sequence[str], addresses: Sequence[int], chunks: int
    ) -> Prepared:
        submit, ops = queues.prepare(program, self._addresses(names, addresses))
        return Prepared(with_unit_tags(program), gpu.Calls([submit], ops, self._page.address_of_word(0)), chunks)

    def _keep(self, known: Hashable, prepared: Prepared) -> Prepared:
        self._prepared[known] = prepared
        if len(self._prepared) > _PREPARED:
            self._prepared.popitem(last=False)
        return prepared

    def _addresses(self, names: Sequence[str], addresses: Sequence[int]) -> Callable[[Ref], int]:
        bound = dict(zip(names, addresses, strict=True))

        def address(ref: Ref) -> int:
            return bound[ref.buffer] + ref.offset if ref.buffer in bound else self._address(ref)

        return address

    def _address(self, ref: Ref) -> int:
        if ref.buffer == "flags":
            return self._page.flags[ref.rank] + ref.offset
        assert self._heap and self._tensors
        if ref.buffer == "heap":
            return self._tensors.bases[ref.rank] + ref.offset
        return self._heap.bases[ref.rank] + self._heap.areas[ref.buffer] + ref.offset

    def close(self) -> None:
        """Forget everything."""
        self._programs.clear()
        self._prepared.clear()


def _is_free(program: Program) -> bool:
    """Return whether nothing waits but in lane 0."""
    return all(isinstance(step, Copy | Copy2D) for step in program.steps if step.lane)


__all__ = ["DeviceCopies", "Prepared"]
