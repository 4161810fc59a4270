"""Reductions: every rank's tensor goes into one result, for all ranks, for each rank its part, or for one."""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from iris_pg import arguments
from iris_pg.collectives.flow import Fold, Part
from iris_pg.errors import ArgumentError
from iris_pg.operations.base import Tensor, copy, dense, is_asynchronous, place, room
from iris_pg.operations.gathers import Gathers
from iris_pg.program import Ref
from iris_pg.reduce_ops import reduction
from iris_pg.transport import Key
from iris_pg.work import IrisWork


class Reductions(Gathers):
    """all_reduce, reduce, reduce_scatter in all their forms.

    An element's operands are combined in the order of ranks, 16-bit and smaller floats in float32 with one rounding at
    the end, so all ranks get the same bits, and the same ones every time.
    """

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Reduce in place, on all ranks. See torch.distributed."""
        tensor = self._only("all_reduce", tensors)
        there = place(tensor)
        seen = there and ("all_reduce", hash(_op(opts)), there)
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, tensors, is_asynchronous(opts), tensor)
        if tensor.layout is torch.sparse_coo:
            return self._sparse_all_reduce(tensor, opts)
        arguments.check_output("all_reduce", "tensor", tensor)
        r = reduction("all_reduce", _op(opts), tensor.dtype)
        n = tensor.numel() * tensor.element_size()
        if n == 0:
            return IrisWork(tensors)
        source, target = r.scaled(dense(tensor)), room(tensor)
        key = ("all_reduce", n, "bytes", tensor.dtype, r.op)

        def flow(key: Key, in_place: bool) -> Fold:
            here, result = _buffers(self._rank, in_place)
            return Fold("all_reduce", r.op, r.dtype, (Part(self._rank, n, here),), result, to_all=True)

        after = None if target is tensor else lambda: copy([(tensor, target)])
        addresses = (source.data_ptr(), target.data_ptr())
        is_in_place = addresses[0] == addresses[1]
        asynchronous, keep, names = is_asynchronous(opts), (source, target), ("in", "out")
        seen = seen if source is tensor else None
        given = (source.device, key, is_in_place, flow, names, addresses, tensors, asynchronous, keep, after, seen)
        return self._run(*given)

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> IrisWork:
        """Add the sparse tensors of all ranks, which may have elements in different places; done on return.

        Gathers the number of elements of every rank, then their places and values: each rank reads what others hold,
        and no zero is moved.
        """
        if not isinstance(_op(opts), (dist.ReduceOp, dist.ReduceOp.RedOpType)) or _op(opts) != dist.ReduceOp.SUM:
            raise ArgumentError(
                f"all_reduce: {_op(opts)} of a sparse tensor; it takes ReduceOp.SUM; or call .to_dense()"
            )
        mine = tensor.coalesce()
        counts = torch.empty(self._world, dtype=torch.int64)  # on the CPU, which reads them
        self.all_gather_single(counts, torch.tensor([mine._nnz()]))
        places = [mine.indices().new_empty((mine.sparse_dim(), n)) for n in counts.tolist()]
        values = [mine.values().new_empty((n, *mine.values().shape[1:])) for n in counts.tolist()]
        self.allgather([places], [mine.indices()])
        self.allgather([values], [mine.values()])
        with torch.no_grad():
            whole = torch.sparse_coo_tensor(torch.cat(places, 1), torch.cat(values), tensor.size())
            tensor.copy_(whole.coalesce())
        return IrisWork([tensor])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Reduce several tensors in place; the work is done when all are. See torch.distributed."""
        for tensor in tensors:
            arguments.check_output("all_reduce", "tensor", tensor)
            reduction("all_reduce", _op(opts), tensor.dtype)
        return self._all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> IrisWork | None:
        """Reduce in place, on the root; other ranks' tensors stay as they are. See torch.distributed."""
        tensor, root = self._only("reduce", tensors), opts.rootRank if opts is not None else 0
        there = place(tensor)
        seen = there and ("reduce", root, hash(_op(opts)), there)
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, tensors, is_asynchronous(opts), tensor)
        arguments.check_rank("reduce", "dst", root, self._world)
        is_root = self._rank == root
        (arguments.check_output if is_root else arguments.check_tensor)("reduce", "tensor", tensor)
        r = reduction("reduce", _op(opts), tensor.dtype)
        n = tensor.numel() * tensor.element_size()
        if n == 0:
            return IrisWork(tensors)
        source = r.scaled(dense(tensor))
        target = room(tensor) if is_root else source
        key = ("reduce", n, "bytes", tensor.dtype, r.op, "to rank", root)

        def flow(key: Key, in_place: bool) -> Fold:
            here, result = _buffers(self._rank, in_place)
            return Fold("reduce", r.op, r.dtype, (Part(root, n, here),), result if is_root else None)

        after = (lambda: copy([(tensor, target)])) if is_root and target is not tensor else None
        addresses = (source.data_ptr(), target.data_ptr())
        is_in_place = addresses[0] == addresses[1]
        asynchronous, keep, names = is_asynchronous(opts), (source, target), ("in", "out")
        seen = seen if source is tensor else None
        given = (source.device, key, is_in_place, flow, names, addresses, tensors, asynchronous, keep, after, seen)
        return self._run(*given)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> IrisWork | None:
        """Reduce ``input`` [world * n...] and give rank r part r of the result, in ``output`` [n...]. See
        torch.distributed. In place when ``output`` is this rank's part of ``input``.
        """
        op, rank = "reduce_scatter_tensor", self._rank
        here, there = place(input), place(output)
        seen = here and there and (op, hash(_op(opts)), here, there)
        if seen and (known := self._known.get(seen)):
            return self._repeat(known, [output], is_asynchronous(opts), (input, output))
        arguments.check_scattered(op, output, input, self._world)
        r = reduction(op, _op(opts), input.dtype)
        n = output.numel() * output.element_size()
        if n == 0:
            return IrisWork([output])
        source, target = r.scaled(dense(input)), room(output)
        addresses = (source.data_ptr(), target.data_ptr())
        is_in_place = addresses[1] == addresses[0] + rank * n
        if not is_in_place:
            arguments.check_overlap(op, source, target, rank * n, ("input", "output"))
        key = (op, n, "bytes a rank", input.dtype, r.op)

        def flow(key: Key, in_place: bool) -> Fold:
            here = Ref(rank, "in", 0)
            parts = tuple(Part(p, n, here + p * n) for p in range(self._world))
            return Fold(op, r.op, r.dtype, parts, here + rank * n if in_place else Ref(rank, "out", 0))

        after = None if target is output else lambda: copy([(output, target)])
        asynchronous, keep, names = is_asynchronous(opts), (source, target), ("in", "out")
        seen = seen if source is input else None
        given = (source.device, key, is_in_place, flow, names, addresses, [output], asynchronous, keep, after, seen)
        return self._run(*given)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> IrisWork | None:
        """Reduce and scatter several tensors; the work is done when all are. See torch.distributed."""
        op = "reduce_scatter_tensor"
        if len(outputs) != len(inputs):
            raise ArgumentError(f"{op}: {len(outputs)} outputs and {len(inputs)} inputs; as many of each")
        for output, input in zip(outputs, inputs, strict=True):
            arguments.check_scattered(op, output, input, self._world)
            reduction(op, _op(opts), input.dtype)
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._all(works, outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> IrisWork | None:
        """Reduce a list of tensors, and give rank r the result of the r-th; they may have any sizes. See
        torch.distributed.
        """
        op, rank, world = "reduce_scatter", self._rank, self._world
        output = self._only(op, outputs)
        if len(inputs) != 1:
            raise ArgumentError(f"{op}: {len(inputs)} lists of inputs; it takes one per rank")
        parts = list(inputs[0])
        arguments.check_output(op, "output", output)
        arguments.check_inputs(op, "input_list", parts, world, output.dtype)
        arguments.check_same_device(op, "input_list[0]", parts[0], output.device)
        if parts[rank].numel() != output.numel():
            raise ArgumentError(
                f"{op}: input_list[{rank}] has {parts[rank].numel()} elements and this rank's output {output.numel()}; "
                "they "
                "must be the same"
            )
        r = reduction(op, _op(opts), output.dtype)
        sizes = tuple(t.numel() * t.element_size() for t in parts)
        if not any(sizes):
            return IrisWork(outputs)
        sources, target = [r.scaled(dense(t)) for t in parts], room(output)
        is_in_place = target.data_ptr() == sources[rank].data_ptr()
        key = (op, sizes, "bytes", output.dtype, r.op)

        def flow(key: Key, in_place: bool) -> Fold:
            operands = tuple(Part(p, n, Ref(rank, f"in{p}", 0)) for p, n in enumerate(sizes) if n)
            result = Ref(rank, f"in{rank}" if in_place else "out", 0) if sizes[rank] else None
            return Fold(op, r.op, r.dtype, operands, result)

        names = ("out", *(f"in{p}" for p in range(world)))
        addresses = (target.data_ptr(), *(t.data_ptr() for t in sources))
        after = None if target is output else lambda: copy([(output, target)])
        asynchronous, keep = is_asynchronous(opts), (sources, target)
        return self._run(target.device, key, is_in_place, flow, names, addresses, outputs, asynchronous, keep, after)

    # Names of other torch releases.
    all_reduce = allreduce
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: Any) -> Any:
    return opts.reduceOp if opts is not None else dist.ReduceOp.SUM


def _buffers(rank: int, in_place: bool) -> tuple[Ref, Ref]:
    """Return where the operand is and where the result goes; one buffer in place, so that verify() sees it."""
    here = Ref(rank, "in", 0)
    return here, here if in_place else Ref(rank, "out", 0)
