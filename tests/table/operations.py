"""The operations of the conformance table: each is called as users call it, and says what its results should be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from table.call import Call
from table.values import FLOATS, FORMS, MOVED, REDUCED, Form, Shape

# Moves ----------------------------------------------------------------------------------------------------------------


def all_gather_into_tensor(c: Call) -> None:
    output, input = c.into(c.wide), c.given(c.rank)
    c.run(dist.all_gather_into_tensor, output, input)
    c.moved(output, c.stacked([c.expected(p) for p in range(c.world)]))
    c.moved(input, c.expected(c.rank), "input")


def all_gather_into_stacked(c: Call) -> None:
    output = c.into((c.world, *c.shape))
    c.run(dist.all_gather_into_tensor, output, c.given(c.rank))
    c.moved(output, torch.stack([c.expected(p) for p in range(c.world)]))


def all_gather_coalesced_manager(c: Call) -> None:
    outputs = [c.into(c.wide) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(c.group, async_ops=c.row.asynchronous) as manager:
        for i, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, c.given(c.rank, i), group=c.group)
    if c.row.asynchronous:
        manager.wait()
    for i, output in enumerate(outputs):
        c.moved(output, c.stacked([c.expected(p, i) for p in range(c.world)]))


def all_gather(c: Call) -> None:
    into = [c.into() for _ in range(c.world)]
    c.run(dist.all_gather, into, c.given(c.rank))
    for p, output in enumerate(into):
        c.moved(output, c.expected(p))


def all_gather_uneven(c: Call) -> None:
    into = [c.into((p + c.row.number % 3, 3)) for p in range(c.world)]
    c.run(dist.all_gather, into, c.given(c.rank, shape=tuple(into[c.rank].shape)))
    for p, output in enumerate(into):
        c.moved(output, c.expected(p, shape=tuple(output.shape)))


def all_gather_coalesced(c: Call) -> None:
    into = [[c.into(), c.into()] for _ in range(c.world)]
    inputs = [c.given(c.rank, i) for i in range(2)]
    c.run(dist.distributed_c10d.all_gather_coalesced, into, inputs)
    for p, row in enumerate(into):
        for i, output in enumerate(row):
            c.moved(output, c.expected(p, i))


def broadcast(c: Call) -> None:
    tensor = c.given(c.rank) if c.rank == c.root else c.in_place(c.rank)
    c.run(dist.broadcast, tensor, src=c.peer(c.root))
    c.moved(tensor, c.expected(c.root))


def gather(c: Call) -> None:
    into = [c.into() for _ in range(c.world)] if c.rank == c.root else None
    c.run(dist.gather, c.given(c.rank), into, dst=c.peer(c.root))
    for p, output in enumerate(into or ()):
        c.moved(output, c.expected(p))


def scatter(c: Call) -> None:
    output = c.into()
    parts = [c.given(c.root, p) for p in range(c.world)] if c.rank == c.root else None
    c.run(dist.scatter, output, parts, src=c.peer(c.root))
    c.moved(output, c.expected(c.root, c.rank))


def all_to_all(c: Call) -> None:
    into = [c.into() for _ in range(c.world)]
    c.run(dist.all_to_all, into, [c.given(c.rank, p) for p in range(c.world)])
    for p, output in enumerate(into):
        c.moved(output, c.expected(p, c.rank))


def all_to_all_uneven(c: Call) -> None:
    def shape(source: int, target: int) -> Shape:
        return ((source * 2 + target + c.row.number) % 4, 3)

    into = [c.into(shape(p, c.rank)) for p in range(c.world)]
    c.run(dist.all_to_all, into, [c.given(c.rank, p, shape(c.rank, p)) for p in range(c.world)])
    for p, output in enumerate(into):
        c.moved(output, c.expected(p, c.rank, shape(p, c.rank)))


def all_to_all_single(c: Call) -> None:
    shape = c.shape or (1,)
    wide = (c.world * shape[0], *shape[1:])
    output, input = c.into(wide), c.given(c.rank, shape=wide)
    c.run(dist.all_to_all_single, output, input)
    n = shape[0]
    parts = [c.expected(p, shape=wide)[c.rank * n : (c.rank + 1) * n] for p in range(c.world)]
    c.moved(output, torch.cat(parts))
    c.moved(input, c.expected(c.rank, shape=wide), "input")


def all_to_all_single_uneven(c: Call) -> None:
    """Splits from 0 to 4 rows, on the diagonal too."""

    def rows(source: int, target: int) -> int:
        return (source * 3 + target * 2 + c.row.number) % 5

    def shape(rank: int) -> Shape:
        return (sum(rows(rank, p) for p in range(c.world)), 3)

    def sent(source: int) -> torch.Tensor:
        begin = sum(rows(source, p) for p in range(c.rank))
        return c.expected(source, shape=shape(source))[begin : begin + rows(source, c.rank)]

    ins, outs = [rows(c.rank, p) for p in range(c.world)], [rows(p, c.rank) for p in range(c.world)]
    output = c.into((sum(outs), 3))
    c.run(dist.all_to_all_single, output, c.given(c.rank, shape=shape(c.rank)), outs, ins)
    c.moved(output, torch.cat([sent(p) for p in range(c.world)]))


def send_recv(c: Call) -> None:
    """Around the ring; the even ranks send first."""
    if c.world == 1:
        return
    output, after, before, tag = c.into(), c.peer(c.rank + 1), c.peer(c.rank - 1), c.row.number % 7
    sends = [lambda: dist.send(c.given(c.rank), after, c.group, tag), lambda: dist.recv(output, before, c.group, tag)]
    for call in sends if c.rank % 2 == 0 else reversed(sends):
        call()
    c.moved(output, c.expected((c.rank - 1) % c.world))


def isend_irecv(c: Call) -> None:
    """From everyone to everyone, receives first, in two orders; the message from the root to any who sends."""
    tag = c.row.number % 7
    others = [p for p in range(c.world) if p != c.rank]
    into = {p: c.into() for p in others}
    works = [dist.irecv(into[p], c.peer(p), c.group, tag) for p in others]
    works += [dist.isend(c.given(c.rank, p), c.peer(p), c.group, tag) for p in reversed(others)]
    for work in works:
        work.wait()
    for p, output in into.items():
        c.moved(output, c.expected(p, c.rank))


def batch_isend_irecv(c: Call) -> None:
    if c.world == 1:
        return
    output = c.into()
    ops = [
        dist.P2POp(dist.isend, c.given(c.rank), c.peer(c.rank + 1), c.group),
        dist.P2POp(dist.irecv, output, c.peer(c.rank - 1), c.group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    c.moved(output, c.expected((c.rank - 1) % c.world))


def recv_from_any(c: Call) -> None:
    """The root receives from everyone, whoever sends first; a fast sender may be rows ahead, with another tag."""
    tag = c.row.number % (1 << 20)
    if c.rank != c.root:
        dist.send(c.given(c.rank), c.peer(c.root), c.group, tag)
        return
    seen = []
    for _ in range(c.world - 1):
        output = c.into()
        source = list(c.members).index(dist.recv(output, None, c.group, tag))
        c.moved(output, c.expected(source), f"message of rank {source}")
        seen.append(source)
    c.equal(sorted(seen), [p for p in range(c.world) if p != c.root])


# Reductions -----------------------------------------------------------------------------------------------------------


def all_reduce(c: Call) -> None:
    tensor = c.in_place(c.rank)
    c.run(dist.all_reduce, tensor, op=c.op)
    c.reduced(tensor, [c.values(p) for p in range(c.world)])


def all_reduce_method(c: Call) -> None:
    """The group's own method: dist.all_reduce hands complex tensors over as real ones, and refuses to multiply."""
    tensor, opts = c.in_place(c.rank), dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = c.op, c.row.asynchronous
    c.wait(c.group.allreduce([tensor], opts))
    c.reduced(tensor, [c.values(p) for p in range(c.world)])


def all_reduce_coalesced(c: Call) -> None:
    tensors = [c.in_place(c.rank, i) for i in range(3)]
    c.run(dist.distributed_c10d.all_reduce_coalesced, tensors, op=c.op)
    for i, tensor in enumerate(tensors):
        c.reduced(tensor, [c.values(p, i) for p in range(c.world)])


def reduce(c: Call) -> None:
    tensor = c.in_place(c.rank)
    c.run(dist.reduce, tensor, dst=c.peer(c.root), op=c.op)
    if c.rank == c.root:
        c.reduced(tensor, [c.values(p) for p in range(c.world)])
    elif not c.rounds_each:  # Gloo leaves parts of the sum in the tensors of other ranks
        c.moved(tensor, c.values(c.rank), "tensor of another rank than the root")


def reduce_scatter(c: Call) -> None:
    output, inputs = c.into(), [c.given(c.rank, p) for p in range(c.world)]
    c.run(dist.reduce_scatter, output, inputs, op=c.op)
    c.reduced(output, [c.expected(p, c.rank) for p in range(c.world)])
    for p, input in enumerate(inputs):
        c.moved(input, c.expected(c.rank, p), "input")


def reduce_scatter_uneven(c: Call) -> None:
    shapes = [(2 * p + c.row.number % 2, 2) for p in range(c.world)]
    output = c.into(shapes[c.rank])
    c.run(dist.reduce_scatter, output, [c.given(c.rank, p, shapes[p]) for p in range(c.world)], op=c.op)
    c.reduced(output, [c.expected(p, c.rank, shapes[c.rank]) for p in range(c.world)])


def reduce_scatter_tensor(c: Call) -> None:
    output, input = c.into(), c.given(c.rank, shape=c.wide)
    c.run(dist.reduce_scatter_tensor, output, input, op=c.op)
    c.reduced(output, [_part(c, p, 0) for p in range(c.world)])
    c.moved(input, c.expected(c.rank, shape=c.wide), "input")


def reduce_scatter_coalesced(c: Call) -> None:
    outputs = [c.into() for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(c.group, async_ops=c.row.asynchronous) as manager:
        for i, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, c.given(c.rank, i, c.wide), op=c.op, group=c.group)
    if c.row.asynchronous:
        manager.wait()
    for i, output in enumerate(outputs):
        c.reduced(output, [_part(c, p, i) for p in range(c.world)])


def _part(c: Call, rank: int, number: int) -> torch.Tensor:
    return c.expected(rank, number, c.wide).view(c.world, *c.shape)[c.rank]


# Without tensors ------------------------------------------------------------------------------------------------------


def barrier(c: Call) -> None:
    """No rank may leave before the last has entered."""
    if c.rank == c.root:
        time.sleep(0.002)
    entered = time.monotonic()  # of the machine
    work = dist.barrier(group=c.group, async_op=c.row.asynchronous)
    if work:
        c.wait(work, on_host=True)
    left = time.monotonic()
    times: list[Any] = [None] * c.world
    dist.all_gather_object(times, (entered, left), group=c.group)
    c.equal(max(t[0] for t in times) <= min(t[1] for t in times), True)


def objects(c: Call) -> None:
    def thing(rank: int) -> dict[str, Any]:
        return {"rank": rank, "text": "x" * (1 + 300 * rank), "row": c.row.number, "tensor": c.values(rank).tolist()}

    everyone: list[Any] = [None] * c.world
    dist.all_gather_object(everyone, thing(c.rank), group=c.group)
    c.equal(everyone, [thing(p) for p in range(c.world)])
    gathered: list[Any] | None = [None] * c.world if c.rank == c.root else None
    dist.gather_object(thing(c.rank), gathered, dst=c.peer(c.root), group=c.group)
    c.equal(gathered, [thing(p) for p in range(c.world)] if c.rank == c.root else None)
    told = [thing(c.rank) if c.rank == c.root else None]
    dist.broadcast_object_list(told, src=c.peer(c.root), group=c.group)
    c.equal(told, [thing(c.root)])
    one: list[Any] = [None]
    all_of_them = [thing(p) for p in range(c.world)] if c.rank == c.root else None
    dist.scatter_object_list(one, all_of_them, src=c.peer(c.root), group=c.group)
    c.equal(one, [thing(c.rank)])


# The table ------------------------------------------------------------------------------------------------------------

_GLOO_MOVES = ("bool", "uint8", "int8", "int32", "int64", *FLOATS, "complex64", "complex128")
_GLOO_ADDS = ("uint8", "int8", "int32", "int64", *FLOATS)
_DENSE_OUTPUT = tuple(form for form in FORMS if form.layout != "expanded")
_LAYOUTS = tuple({form.layout: form for form in reversed(FORMS)}.values())
_PLAIN = (FORMS[0],)


@dataclass(frozen=True)
class Operation:
    """A row of operations.

    Args:
        call: makes the call and checks its results.
        dtypes: element types that it takes.
        forms: shapes and layouts of one rank's tensor.
        gloo: element types with which Gloo is called too and held to the same results.
        reduces: whether it takes a reduction.
        refused: reductions that torch itself refuses with complex tensors.
        has_every_pair: whether a sample has every reduction of every element type.
    """

    call: Callable[[Call], None]
    dtypes: tuple[str, ...]
    forms: tuple[Form, ...]
    gloo: tuple[str, ...]
    reduces: bool = False
    refused: tuple[str, ...] = ()
    has_every_pair: bool = False

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.call.__name__


def _operations() -> Iterator[Operation]:
    product = ("product",)
    # fmt: off
    #               call                          element types  forms          Gloo takes
    yield Operation(all_gather_into_tensor,       MOVED,         FORMS,         _GLOO_MOVES)
    yield Operation(all_gather_into_stacked,      MOVED,         FORMS,         ())
    yield Operation(all_gather_coalesced_manager, MOVED,         FORMS,         ())
    yield Operation(all_gather,                   MOVED,         FORMS,         _GLOO_MOVES)
    yield Operation(all_gather_uneven,            MOVED,         _LAYOUTS,      ())
    yield Operation(all_gather_coalesced,         MOVED,         FORMS,         ())
    yield Operation(broadcast,                    MOVED,         FORMS,         _GLOO_MOVES)
    yield Operation(gather,                       MOVED,         FORMS,         _GLOO_MOVES[:-2])
    yield Operation(scatter,                      MOVED,         FORMS,         _GLOO_MOVES)
    yield Operation(all_to_all,                   MOVED,         FORMS,         ())
    yield Operation(all_to_all_uneven,            MOVED,         _LAYOUTS,      ())
    yield Operation(all_to_all_single,            MOVED,         FORMS,         _GLOO_MOVES)
    yield Operation(all_to_all_single_uneven,     MOVED,         _LAYOUTS,      _GLOO_MOVES)
    yield Operation(send_recv,                    MOVED,         FORMS,         MOVED)
    yield Operation(isend_irecv,                  MOVED,         FORMS,         MOVED)
    yield Operation(batch_isend_irecv,            MOVED,         FORMS,         MOVED)
    yield Operation(recv_from_any,                MOVED,         FORMS,         MOVED)
    yield Operation(all_reduce,                   REDUCED,       _DENSE_OUTPUT, _GLOO_ADDS, True, product)
    yield Operation(all_reduce_method,            REDUCED,       _DENSE_OUTPUT, (), True, has_every_pair=True)
    yield Operation(all_reduce_coalesced,         REDUCED,       _DENSE_OUTPUT, (), True, product)
    yield Operation(reduce,                       REDUCED,       _DENSE_OUTPUT, _GLOO_ADDS, True)
    yield Operation(reduce_scatter,               REDUCED,       FORMS,         (), True)
    yield Operation(reduce_scatter_uneven,        REDUCED,       _LAYOUTS,      (), True)
    yield Operation(reduce_scatter_tensor,        REDUCED,       FORMS,         _GLOO_ADDS, True)
    yield Operation(reduce_scatter_coalesced,     REDUCED,       FORMS,         (), True)
    yield Operation(barrier,                      ("int32",),    _PLAIN,        ("int32",))
    yield Operation(objects,                      ("int32",),    _PLAIN,        ("int32",))
    # fmt: on


OPERATIONS = {operation.name: operation for operation in _operations()}
