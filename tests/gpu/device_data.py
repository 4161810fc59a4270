"""What tests on GPUs share: data that depends on rank, position and iteration, and every operation with its result.

An operation is a function of a :class:`Case` that calls torch.distributed and returns pairs (what came, what should
have come). Values are small integers, so that every sum is exact in every type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor
Pairs = list[tuple[Tensor, Tensor]]


def use_device(rank: int) -> torch.device:
    """Make a GPU of this rank current: ranks share GPUs where there are fewer."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def values(rank: int, numel: int, dtype: torch.dtype, iteration: int) -> Tensor:
    """Return rank's data [numel] of an iteration, on the current GPU."""
    position = torch.arange(numel, dtype=torch.int64, device="cuda")
    number = (position * 7 + 31 * rank + 13 * iteration) % 13
    if dtype.is_signed and not dtype.is_complex:
        number = number - 6
    return (number % 2 == 0) if dtype == torch.bool else number.to(dtype)


@dataclass
class Case:
    """One call of an operation."""

    rank: int
    world: int
    numel: int  # of what one rank contributes, or gets
    dtype: torch.dtype
    iteration: int
    heap: Any  # a heap on the GPU whose tensors are outputs; None for ordinary ones
    asynchronous: bool

    def mine(self, rank: int | None = None, numel: int | None = None, salt: int = 0) -> Tensor:
        """Return what a rank (this one) contributes."""
        rank = self.rank if rank is None else rank
        return values(rank, self.numel if numel is None else numel, self.dtype, self.iteration + 1000 * salt)

    def out(self, numel: int, of_all: bool = True) -> Tensor:
        """Return memory for an output, with other bytes in it than any result; in the heap if all ranks have one of
        that size.
        """
        if self.heap is not None and numel and of_all:
            made = self.heap.empty(numel, dtype=self.dtype)
        else:
            made = torch.empty(numel, dtype=self.dtype, device="cuda")
        made.view(torch.uint8).fill_(0xA5)
        return made

    def total(self, numel: int | None = None, salt: int = 0) -> Tensor:
        """Return the sum of what all ranks contribute."""
        return combined([self.mine(p, numel, salt) for p in range(self.world)], dist.ReduceOp.SUM)

    def done(self, work: Any) -> None:
        """Wait for an asynchronous call."""
        if self.asynchronous:
            assert work.wait()


def combined(operands: list[Tensor], op: Any) -> Tensor:
    """Return the operands combined, element by element, in a type that is wide enough."""
    dtype = operands[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else torch.int64
    stacked = torch.stack([t.to(wide) for t in operands])
    if dtype == torch.bool:
        return stacked.any(0)
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0).to(dtype)
    if op == dist.ReduceOp.AVG:
        return (stacked.sum(0) / len(operands)).to(dtype)
    return stacked.sum(0).to(dtype)


def all_gather_into_tensor(c: Case) -> Pairs:
    out = c.out(c.world * c.numel)
    c.done(dist.all_gather_into_tensor(out, c.mine(), async_op=c.asynchronous))
    return [(out, torch.cat([c.mine(p) for p in range(c.world)]))]


def all_gather_in_place(c: Case) -> Pairs:
    out = c.out(c.world * c.numel)
    own = out[c.rank * c.numel : (c.rank + 1) * c.numel].copy_(c.mine())
    c.done(dist.all_gather_into_tensor(out, own, async_op=c.asynchronous))
    return [(out, torch.cat([c.mine(p) for p in range(c.world)]))]


def all_gather_strided(c: Case) -> Pairs:
    wide = torch.empty(c.world * c.numel, 2, dtype=c.dtype, device="cuda")
    wide.view(torch.uint8).fill_(0xA5)
    source = torch.stack([c.mine(), c.mine()], 1)[:, 0]
    c.done(dist.all_gather_into_tensor(wide[:, 1], source, async_op=c.asynchronous))
    untouched = torch.empty_like(wide)
    untouched.view(torch.uint8).fill_(0xA5)
    return [(wide[:, 1], torch.cat([c.mine(p) for p in range(c.world)])), (wide[:, 0], untouched[:, 0])]


def all_gather(c: Case) -> Pairs:
    sizes = [c.numel + p for p in range(c.world)]
    outs = [c.out(n) for n in sizes]
    c.done(dist.all_gather(outs, c.mine(numel=sizes[c.rank]), async_op=c.asynchronous))
    return [(out, c.mine(p, sizes[p])) for p, out in enumerate(outs)]


def broadcast(c: Case) -> Pairs:
    src = c.iteration % c.world
    out = c.out(c.numel)
    if c.rank == src:
        out.copy_(c.mine())
    c.done(dist.broadcast(out, src, async_op=c.asynchronous))
    return [(out, c.mine(src))]


def all_reduce(c: Case) -> Pairs:
    out = c.out(c.numel).copy_(c.mine())
    c.done(dist.all_reduce(out, async_op=c.asynchronous))
    return [(out, c.total())]


def all_reduce_max(c: Case) -> Pairs:
    if c.dtype.is_complex:  # have no order
        return []
    out = c.out(c.numel).copy_(c.mine())
    c.done(dist.all_reduce(out, dist.ReduceOp.MAX, async_op=c.asynchronous))
    return [(out, combined([c.mine(p) for p in range(c.world)], dist.ReduceOp.MAX))]


def all_reduce_avg(c: Case) -> Pairs:
    if not c.dtype.is_floating_point or c.dtype.itemsize == 1:
        return []
    out = c.out(c.numel).copy_(c.mine())
    c.done(dist.all_reduce(out, dist.ReduceOp.AVG, async_op=c.asynchronous))
    return [(out, combined([c.mine(p) for p in range(c.world)], dist.ReduceOp.AVG))]


def reduce(c: Case) -> Pairs:
    dst = c.iteration % c.world
    out = c.out(c.numel).copy_(c.mine())
    c.done(dist.reduce(out, dst, async_op=c.asynchronous))
    return [(out, c.total() if c.rank == dst else c.mine())]


def reduce_scatter_tensor(c: Case) -> Pairs:
    out, source = c.out(c.numel), torch.cat([c.mine(salt=p) for p in range(c.world)])
    c.done(dist.reduce_scatter_tensor(out, source, async_op=c.asynchronous))
    return [(out, c.total(salt=c.rank))]


def reduce_scatter_in_place(c: Case) -> Pairs:
    source = torch.cat([c.mine(salt=p) for p in range(c.world)])
    out = source[c.rank * c.numel : (c.rank + 1) * c.numel]
    c.done(dist.reduce_scatter_tensor(out, source, async_op=c.asynchronous))
    return [(out, c.total(salt=c.rank))]


def reduce_scatter(c: Case) -> Pairs:
    sizes = [c.numel + p for p in range(c.world)]
    out = c.out(sizes[c.rank], of_all=False)
    c.done(dist.reduce_scatter(out, [c.mine(numel=n, salt=p) for p, n in enumerate(sizes)], async_op=c.asynchronous))
    return [(out, c.total(sizes[c.rank], c.rank))]


def gather(c: Case) -> Pairs:
    dst = c.iteration % c.world
    outs = [c.out(c.numel, of_all=False) for _ in range(c.world)] if c.rank == dst else None
    c.done(dist.gather(c.mine(), outs, dst, async_op=c.asynchronous))
    return [(out, c.mine(p)) for p, out in enumerate(outs or [])]


def scatter(c: Case) -> Pairs:
    src = c.iteration % c.world
    out = c.out(c.numel)
    sources = [c.mine(salt=p) for p in range(c.world)] if c.rank == src else None
    c.done(dist.scatter(out, sources, src, async_op=c.asynchronous))
    return [(out, c.mine(src, salt=c.rank))]


def all_to_all_single(c: Case) -> Pairs:
    out, source = c.out(c.world * c.numel), torch.cat([c.mine(salt=p) for p in range(c.world)])
    c.done(dist.all_to_all_single(out, source, async_op=c.asynchronous))
    return [(out, torch.cat([c.mine(p, salt=c.rank) for p in range(c.world)]))]


def all_to_all_uneven(c: Case) -> Pairs:
    def size(source: int, target: int) -> int:
        return c.numel * ((source + 2 * target) % 3)

    sends, receives = [size(c.rank, p) for p in range(c.world)], [size(p, c.rank) for p in range(c.world)]
    source = torch.cat([c.mine(numel=n, salt=p) for p, n in enumerate(sends)])
    out = c.out(sum(receives), of_all=False)
    c.done(dist.all_to_all_single(out, source, receives, sends, async_op=c.asynchronous))
    return [(out, torch.cat([c.mine(p, n, c.rank) for p, n in enumerate(receives)]))]


def all_to_all(c: Case) -> Pairs:
    outs = [c.out(c.numel + p + c.rank, of_all=False) for p in range(c.world)]
    sources = [c.mine(numel=c.numel + p + c.rank, salt=p) for p in range(c.world)]
    c.done(dist.all_to_all(outs, sources, async_op=c.asynchronous))
    return [(out, c.mine(p, c.numel + p + c.rank, c.rank)) for p, out in enumerate(outs)]


def ring(c: Case) -> Pairs:
    if c.world == 1:
        return []
    out, right, left = c.out(c.numel), (c.rank + 1) % c.world, (c.rank - 1) % c.world
    works = [dist.isend(c.mine(), right, tag=3), dist.irecv(out, left, tag=3)]
    for work in works:
        work.wait()
    return [(out, c.mine(left))]


def one_way(c: Case) -> Pairs:
    if c.world == 1 or c.rank > 1:
        return []
    if c.rank == 0:
        dist.send(c.mine(), 1)
        return []
    out = c.out(c.numel, of_all=False)
    dist.recv(out, 0)
    return [(out, c.mine(0))]


OPERATIONS: list[Callable[[Case], Pairs]] = [
    all_gather_into_tensor,
    all_gather_in_place,
    all_gather_strided,
    all_gather,
    broadcast,
    all_reduce,
    all_reduce_max,
    all_reduce_avg,
    reduce,
    reduce_scatter_tensor,
    reduce_scatter_in_place,
    reduce_scatter,
    gather,
    scatter,
    all_to_all_single,
    all_to_all_uneven,
    all_to_all,
    ring,
    one_way,
]


def mistakes(pairs: Pairs, what: Any) -> Iterator[str]:
    """Yield what is wrong with results, in words."""
    for i, (came, should) in enumerate(pairs):
        # Byte by byte; a fresh copy, as a view of other bytes is made only of strides that are in order.
        came, should = (t.clone(memory_format=torch.contiguous_format).flatten() for t in (came, should))
        if came.numel() and not torch.equal(came.view(torch.uint8), should.view(torch.uint8)):
            at = (came != should).nonzero().flatten()
            first = int(at[0]) if len(at) else -1
            yield (
                f"{what}, result {i}: {len(at)} of {came.numel()} elements are wrong, from {first}: "
                f"{came[first].item()} and not {should[first].item()}"
            )
