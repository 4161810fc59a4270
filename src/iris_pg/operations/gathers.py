"""Gathers: every rank gets the tensors of all."""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from typing import Any

from iris_pg import arguments
from iris_pg.collectives.flow import Flow, Part
from iris_pg.errors import ArgumentError
from iris_pg.operations.base import Operations, Tensor, copy, dense, is_asynchronous, place, room
from iris_pg.program import Copy, Ref
from iris_pg.transport import Key
from iris_pg.work import IrisWork

_PULLED_FROM = 64 << 10  # bytes of an input in the heap; less goes by slots, whose owner need not wait for its readers
_PULLS = "out of the heap at"


class Gathers(Operations):
    """all_gather in all its forms."""

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> IrisWork | None:
        """Gather every rank's ``input`` [n...] into ``output`` [world * n...] or [world, n...]. See torch.distributed.

        Any layout is taken; a contiguous tensor is not copied. In place when ``input`` is this rank's part of
        ``output``. Zero copy when ``output``, or an ``input`` of 64 KiB or more, is in the group's heap at the same
        offset on all ranks.
        """
        return self._gather_into(output, input, is_asynchronous(opts))

    def _gather_into(self, output: Tensor, input: Tensor, asynchronous: bool) -> IrisWork | None:
        here, there = place(input), place(output)
        seen = here and there and ("all_gather_into_tensor", here, there)
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, [output], asynchronous, (input, output))
        arguments.check_gathered("all_gather_into_tensor", output, input, self._world)
        n = input.numel() * input.element_size()
        if n == 0:
            return IrisWork([output])
        source, target = dense(input), room(output)
        addresses = (source.data_ptr(), target.data_ptr())
        own_copy = addresses[0] != addresses[1] + self._rank * n
        if own_copy:
            arguments.check_overlap("all_gather_into_tensor", target, source, self._rank * n)
        offset = self._offset(target, self._world * n)
        zero_copy = None if offset is None else ("zero copy at", offset)
        if offset is None and n >= _PULLED_FROM and (offset := self._offset(source, n)) is not None:
            zero_copy = _PULLS, offset
        key = ("all_gather_into_tensor", n, "bytes a rank", input.dtype, zero_copy)
        after = None if target is output else lambda: copy([(output, target)])
        keep = (source, target)
        flow, names = self._gather_flow, ("in", "out")
        given = (target.device, key, own_copy, flow, names, addresses, [output], asynchronous, keep, after, seen)
        return self._run(*given)

    def _gather_flow(self, key: Key, own_copy: bool) -> Flow:
        op, n, _, _, zero_copy = key
        how, offset = zero_copy or ("", 0)
        pulls, pushes = how == _PULLS, zero_copy is not None and how != _PULLS
        rank, into, here = self._rank, Ref(self._rank, "out", 0), Ref(self._rank, "in", 0)
        sends = [Part(p, n, here, Ref(p, "heap", offset + rank * n) if pushes else None) for p in self._peers]
        receives = [Part(p, n, into + p * n, Ref(p, "heap", offset) if pulls else None) for p in self._peers]
        # Whether this rank gathers in place is not part of what ranks agree on.
        own = Copy(into + rank * n, here, n) if own_copy else None
        return Flow(op, tuple(sends), tuple(receives), own, to_all=True, zero_copy=pushes, pulls=pulls)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> IrisWork | None:
        """Gather several tensors; the work is done when all are. See torch.distributed."""
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"all_gather_into_tensor: {len(outputs)} outputs and {len(inputs)} inputs; as many of each"
            )
        asynchronous = is_asynchronous(opts)
        for output, input in zip(outputs, inputs, strict=True):
            arguments.check_gathered("all_gather_into_tensor", output, input, self._world)
        works = [self._gather_into(output, input, asynchronous) for output, input in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._all(works, outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Gather every rank's tensor into a list of tensors; rank p's may have any size, the same on all ranks. See
        torch.distributed.
        """
        op = "all_gather"
        rank, world = self._rank, self._world
        if len(outputs) != 1 or len(inputs) != 1:
            raise ArgumentError(
                f"{op}: {len(outputs)} output lists and {len(inputs)} inputs; it takes one of each per rank"
            )
        input, into = inputs[0], list(outputs[0])
        arguments.check_tensor(op, "input", input)
        arguments.check_list(op, "output", into, world, input.dtype)
        arguments.check_same_device(op, "output[0]", into[0], input.device)
        if into[rank].numel() != input.numel():
            raise ArgumentError(
                f"{op}: output[{rank}] has {into[rank].numel()} elements and this rank's input {input.numel()}; they "
                "must be the same"
            )
        sizes = [t.numel() * t.element_size() for t in into]
        source, targets = dense(input), [room(t) for t in into]
        arguments.check_lists_apart(op, targets, [source], rank)
        own_copy = source.data_ptr() != targets[rank].data_ptr()
        if not any(sizes):
            return IrisWork([into])
        key = (op, tuple(sizes), "bytes", input.dtype)

        def flow(key: Key, own_copy: bool) -> Flow:
            here, n = Ref(rank, "in", 0), sizes[rank]
            sends = [Part(p, n, here) for p in self._peers if n]
            receives = [Part(p, sizes[p], Ref(rank, f"out{p}", 0)) for p in self._peers if sizes[p]]
            own = Copy(Ref(rank, f"out{rank}", 0), here, n) if own_copy and n else None
            return Flow(op, tuple(sends), tuple(receives), own, to_all=True)

        names = ("in", *(f"out{p}" for p in range(world)))
        addresses = (source.data_ptr(), *(t.data_ptr() for t in targets))
        moved = [(t, u) for t, u in zip(into, targets, strict=True) if t is not u]
        after = (lambda: copy(moved)) if moved else None
        asynchronous, keep = is_asynchronous(opts), (source, targets)
        return self._run(source.device, key, own_copy, flow, names, addresses, [into], asynchronous, keep, after)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> IrisWork | None:
        """Gather several tensors into lists: ``outputs[rank][i]`` gets rank's ``inputs[i]``. See torch.distributed."""
        works = [self.allgather([[row[i] for row in outputs]], [t], opts) for i, t in enumerate(inputs)]
        return self._all(works, outputs)

    # Names of other torch releases.
    _allgather_base = all_gather_single
    all_gather_into_tensor = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    all_gather = allgather
