"""Rooted operations, and the barrier."""

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


class Rooted(Operations):
    """broadcast, gather, scatter, barrier."""

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Copy the root's tensor to all ranks. See torch.distributed."""
        op = "broadcast"
        tensor, root = self._only(op, tensors), opts.rootRank if opts is not None else 0
        rank, world = self._rank, self._world
        there = place(tensor)
        seen = there and (op, root, there)
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, tensors, is_asynchronous(opts), tensor)
        arguments.check_rank(op, "src", root, world)
        (arguments.check_tensor if rank == root else arguments.check_output)(op, "tensor", tensor)
        n = tensor.numel() * tensor.element_size()
        if n == 0 or world == 1:
            return IrisWork(tensors)
        target = dense(tensor) if rank == root else room(tensor)
        address = target.data_ptr()
        offset = self._offset(target, n)
        zero_copy = None if offset is None else ("zero copy at", offset)
        key = (op, n, "bytes", tensor.dtype, "from rank", root, zero_copy)

        def flow(key: Key, local: None) -> Flow:
            here = Ref(rank, "tensor", 0)
            sends = [
                Part(p, n, here, None if offset is None else Ref(p, "heap", offset))
                for p in self._peers
                if rank == root
            ]
            receives = [Part(root, n, here)] if rank != root else []
            return Flow(op, tuple(sends), tuple(receives), to_all=True, zero_copy=offset is not None)

        after = None if target is tensor or rank == root else lambda: copy([(tensor, target)])
        asynchronous = is_asynchronous(opts)
        names = ("tensor",)
        given = (target.device, key, None, flow, names, (address,), tensors, asynchronous, target, after, seen)
        return self._run(*given)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Gather every rank's tensor into the root's list; sizes may differ. See torch.distributed."""
        op = "gather"
        input, root = self._only(op, inputs), opts.rootRank if opts is not None else 0
        rank, world = self._rank, self._world
        arguments.check_rank(op, "dst", root, world)
        arguments.check_tensor(op, "input", input)
        into: list[Tensor] = list(outputs[0]) if rank == root and outputs else []
        if rank == root:
            arguments.check_list(op, "gather_list", into, world, input.dtype)
            arguments.check_same_device(op, "gather_list[0]", into[0], input.device)
            if into[rank].numel() != input.numel():
                raise ArgumentError(
                    f"{op}: gather_list[{rank}] has {into[rank].numel()} elements and this rank's input {input.numel()}"
                )
        n = input.numel() * input.element_size()
        sizes = [t.numel() * t.element_size() for t in into]
        here = Ref(rank, "tensor", 0)
        if rank == root:
            receives = tuple(Part(p, sizes[p], Ref(rank, f"part{p}", 0)) for p in self._peers)
            own = (
                Copy(Ref(rank, f"part{rank}", 0), here, n) if n and into[rank].data_ptr() != input.data_ptr() else None
            )
            flow = Flow(op, (), receives, own)
        else:
            flow = Flow(op, (Part(root, n, here),))
        outputs_ = [into] if rank == root else inputs
        return self._pairwise(flow, f"to rank {root}", input, into, outputs_, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> IrisWork | None:
        """Send one tensor of the root's list to each rank; sizes may differ. See torch.distributed."""
        op = "scatter"
        output, root = self._only(op, outputs), opts.rootRank if opts is not None else 0
        rank, world = self._rank, self._world
        arguments.check_rank(op, "src", root, world)
        arguments.check_output(op, "output", output)
        parts: list[Tensor] = list(inputs[0]) if rank == root and inputs else []
        if rank == root:
            if len(parts) != world:
                raise ArgumentError(
                    f"{op}: scatter_list has {len(parts)} tensors; it takes one for each of the {world} ranks"
                )
            for i, t in enumerate(parts):
                arguments.check_tensor(op, f"scatter_list[{i}]", t)
                arguments.check_same_dtype(op, f"scatter_list[{i}]", t, output.dtype)
                arguments.check_same_device(op, f"scatter_list[{i}]", t, output.device)
            if parts[rank].numel() != output.numel():
                raise ArgumentError(
                    f"{op}: scatter_list[{rank}] has {parts[rank].numel()} elements and this rank's output "
                    f"{output.numel()}"
                )
        n = output.numel() * output.element_size()
        sizes = [t.numel() * t.element_size() for t in parts]
        here = Ref(rank, "tensor", 0)
        if rank == root:
            sends = tuple(Part(p, sizes[p], Ref(rank, f"part{p}", 0)) for p in self._peers)
            own = (
                Copy(here, Ref(rank, f"part{rank}", 0), n)
                if n and parts[rank].data_ptr() != output.data_ptr()
                else None
            )
            flow = Flow(op, sends, (), own)
        else:
            flow = Flow(op, (), (Part(root, n, here),))
        return self._pairwise(flow, f"from rank {root}", output, parts, outputs, opts)

    def _pairwise(
        self, flow: Flow, direction: str, tensor: Tensor, parts: list[Tensor], outputs: list[Any], opts: Any
    ) -> IrisWork | None:
        """Run gather or scatter: ``tensor`` is this rank's, ``parts`` the root's list."""
        contiguous = [dense(t) for t in (tensor, *parts)]
        written = zip(parts, contiguous[1:], strict=True) if flow.name == "gather" else [(tensor, contiguous[0])]
        moved = [(t, u) for t, u in written if t is not u]
        names = ("tensor", *(f"part{p}" for p in range(len(parts))))
        # A rank does not know the sizes of others, so what all agree on is the operation; the flow is this rank's own.
        key = (flow.name, tensor.dtype, direction)
        after = (lambda: copy(moved)) if moved else None
        addresses = tuple(t.data_ptr() for t in contiguous)
        asynchronous, device = is_asynchronous(opts), tensor.device

        def same(key: Key, flow: Flow) -> Flow:
            return flow

        return self._run(device, key, flow, same, names, addresses, outputs, asynchronous, contiguous, after)

    def barrier(self, opts: Any = None) -> IrisWork:
        """Return when every rank has entered. See torch.distributed.

        In a group that has moved CUDA tensors, or is bound to a GPU, it returns when the current streams of all ranks
        have come to it.
        """
        if self._world == 1:
            return IrisWork([])
        if device := self._barrier_device(opts):
            work = self._on(device).barrier(is_asynchronous(opts))
            if is_asynchronous(opts):
                return self._coalesced(work)
            work.wait()
            return work
        if opts is None or not getattr(opts, "asyncOp", False):
            self.transport.barrier()
            return IrisWork([])
        pending = IrisWork([], drive=self.transport.drive_work)
        self.transport.barrier(pending)
        return pending
