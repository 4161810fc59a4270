"""All-to-all: every rank has something for every rank."""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from iris_pg import arguments
from iris_pg.collectives.flow import Flow, Part
from iris_pg.errors import ArgumentError
from iris_pg.operations.base import Operations, Tensor, copy, dense, is_asynchronous, place, room
from iris_pg.program import Copy, Ref
from iris_pg.transport import Key
from iris_pg.work import IrisWork


class Exchanges(Operations):
    """all_to_all of lists, and all_to_all_single with splits of any sizes."""

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> IrisWork | None:
        """Send part p of ``input`` to rank p, and receive part p of ``output`` from it. See torch.distributed.

        Args:
            output_splits, input_splits: rows (along dimension 0) for each rank; equal parts when empty.
        """
        op, rank = "all_to_all_single", self._rank
        here, there = place(input), place(output)
        seen = None
        if here and there:
            seen = (op, here, input.shape[:1], tuple(input_splits), there, output.shape[:1], tuple(output_splits))
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, [output], is_asynchronous(opts), (input, output))
        arguments.check_tensor(op, "input", input)
        arguments.check_output(op, "output", output)
        arguments.check_same_dtype(op, "output", output, input.dtype)
        arguments.check_same_device(op, "output", output, input.device)
        sends = arguments.split_bytes(op, "input", input, input_splits, self._world)
        receives = arguments.split_bytes(op, "output", output, output_splits, self._world)
        source, target = dense(input), room(output)
        if input.numel() and output.numel():
            arguments.check_apart(op, target, source)

        def flow(key: Key, local: Any) -> Flow:
            begins = [0, *accumulate(sends)], [0, *accumulate(receives)]
            parts_out = tuple(Part(p, sends[p], Ref(rank, "in", begins[0][p])) for p in self._peers)
            parts_in = tuple(Part(p, receives[p], Ref(rank, "out", begins[1][p])) for p in self._peers)
            mine = Ref(rank, "out", begins[1][rank]), Ref(rank, "in", begins[0][rank])
            return Flow(op, parts_out, parts_in, Copy(*mine, sends[rank]) if sends[rank] else None)

        self._check_own(op, sends[rank], receives[rank])
        key = (op, input.dtype)  # a rank does not know the sizes of others; each message's own size is in its tag
        after = None if target is output else lambda: copy([(output, target)])
        addresses = (source.data_ptr(), target.data_ptr())
        asynchronous, keep = is_asynchronous(opts), (source, target)
        local = (sends, receives)
        device, names = source.device, ("in", "out")
        given = (device, key, local, flow, names, addresses, [output], asynchronous, keep, after, seen)
        return self._run(*given)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Send ``inputs[p]`` to rank p, and receive ``outputs[p]`` from it; sizes may differ. See torch.distributed."""
        op, rank, world = "all_to_all", self._rank, self._world
        if not inputs or not outputs:
            raise ArgumentError(f"{op}: {len(outputs)} outputs and {len(inputs)} inputs; one of each for each rank")
        arguments.check_list(op, "output_tensor_list", outputs, world, inputs[0].dtype)
        arguments.check_inputs(op, "input_tensor_list", inputs, world, inputs[0].dtype)
        arguments.check_same_device(op, "output_tensor_list[0]", outputs[0], inputs[0].device)
        sends = tuple(t.numel() * t.element_size() for t in inputs)
        receives = tuple(t.numel() * t.element_size() for t in outputs)
        self._check_own(op, sends[rank], receives[rank])
        sources, targets = [dense(t) for t in inputs], [room(t) for t in outputs]
        arguments.check_lists_apart(op, targets, sources, rank)
        in_place = sources[rank].data_ptr() == targets[rank].data_ptr()

        def flow(key: Key, local: Any) -> Flow:
            parts_out = tuple(Part(p, sends[p], Ref(rank, f"in{p}", 0)) for p in self._peers)
            parts_in = tuple(Part(p, receives[p], Ref(rank, f"out{p}", 0)) for p in self._peers)
            own = Copy(Ref(rank, f"out{rank}", 0), Ref(rank, f"in{rank}", 0), sends[rank]) if sends[rank] else None
            return Flow(op, parts_out, parts_in, None if in_place else own)

        names = (*(f"in{p}" for p in range(world)), *(f"out{p}" for p in range(world)))
        addresses = tuple(t.data_ptr() for t in (*sources, *targets))
        moved = [(t, u) for t, u in zip(outputs, targets, strict=True) if t is not u]
        after = (lambda: copy(moved)) if moved else None
        local = (sends, receives, in_place)
        asynchronous, keep = is_asynchronous(opts), (sources, targets)
        device, key = sources[0].device, (op, inputs[0].dtype)
        return self._run(device, key, local, flow, names, addresses, outputs, asynchronous, keep, after)

    def _check_own(self, op: str, sent: int, received: int) -> None:
        if sent != received:
            raise ArgumentError(
                f"{op}: rank {self._rank} sends {sent} bytes to itself and receives {received}; its own input part and "
                "output part must be the same size"
            )

    # Names of other torch releases.
    all_to_all_single = alltoall_base
    all_to_all = alltoall
