"""IrisProcessGroup: the c10d surface. Each method checks its arguments, names its operation and hands it to the
transport.

torch reaches this class in two ways. Python callers (``torch.distributed.*``) look methods up by name, under the names
of several releases; C++ callers (functional collectives, DDP's reducer) call a fixed table of virtual functions. Both
get the same method. Within a group operations run in the order in which they are called, on every rank. A synchronous
call returns when it is done; an asynchronous one runs on a thread, or in ``work.wait()``.
"""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from iris_pg import arguments
from iris_pg.collectives.flow import Flow, Part
from iris_pg.errors import ArgumentError, MismatchError, UnsupportedError, where
from iris_pg.memory.sharing import Links
from iris_pg.options import Options
from iris_pg.program import Copy, Ref
from iris_pg.transport import Key, Transport
from iris_pg.work import IrisWork

Tensor = torch.Tensor


class IrisProcessGroup(dist.ProcessGroup):
    """A ``torch.distributed`` process group named ``"iris"``, for the ranks of one host.

    Made by ``init_process_group("iris")`` and ``new_group(backend="iris")``; every rank of the group makes it.

    Args:
        store: the group's Store, prefixed for this group.
        rank, world: rank in the group, and number of ranks.
        timeout: deadline of every wait, unless ``options`` has its own.
        global_ranks: rank in the group -> rank in the default group.
        name: name of the group, for messages.
        options: None takes everything from the environment and the defaults.

    Raises:
        UnsupportedError: ranks on more than one host. DeadlineError, PeerLostError: a rank did not come, or died.
        MismatchError: ranks with different options.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: datetime.timedelta,
        global_ranks: Sequence[int],
        name: str,
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the only constructor open to Python subclasses
        self.options = options or Options()
        self._store, self._rank, self._world = store, rank, world
        self._name, self._description = name, "iris"
        self._global_ranks = list(global_ranks)
        self._timeout_s = self.options.timeout_s or timeout.total_seconds()
        self._peers = [(rank + k) % world for k in range(1, world)]
        self._coalescing: list[IrisWork] | None = None
        self.links = Links(store, rank, world, group=name, timeout_s=self._timeout_s)
        try:
            self._agree_on_options()
            self.transport = Transport(self.links, self.options, self._timeout_s)
        except BaseException as error:
            self.links.close("set-up failed", error)
            raise

    def _agree_on_options(self) -> None:
        mine = dict(
            engine=self.options.engine, heap_bytes=self.options.heap_bytes, chunk_bytes=self.options.chunk_bytes
        )
        messages = self.links.exchange(mine, what="create the group")
        for peer, message in enumerate(messages):
            if message.payload != mine:
                raise MismatchError(
                    f"rank {self._rank} creates the group with {mine} and rank {peer} with {message.payload}; options "
                    "are the same "
                    f"on all ranks {where(group=self._name, rank=self._rank)}"
                )

    # What the group is ------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return "iris"."""
        return "iris"

    name = getBackendName

    def get_group_store(self) -> dist.Store:
        """Return the Store the group was made with."""
        return self._store

    @property
    def group_name(self) -> str:
        """Name of the group, as torch gave it."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def bound_device_id(self) -> None:
        """None: the group is bound to no GPU."""
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        if device is not None and device.type != "cpu":
            raise UnsupportedError(f"device_id={device}: this version moves CPU tensors only; leave device_id out")

    def _get_backend(self, device: torch.device) -> IrisProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: operations are numbered from 1 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.transport.sequence

    # all_gather -------------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> IrisWork:
        """Gather every rank's ``input`` [n...] into ``output`` [world * n...] or [world, n...]. See torch.distributed.

        Any layout is taken; a contiguous tensor is not copied. In place when ``input`` is this rank's part of
        ``output``. Zero copy when ``output`` is in the group's heap at the same offset on all ranks.
        """
        return self._gather_into(output, input, opts is not None and opts.asyncOp)

    def _gather_into(self, output: Tensor, input: Tensor, asynchronous: bool) -> IrisWork:
        arguments.check_gathered("all_gather_into_tensor", output, input, self._world)
        n = input.numel() * input.element_size()
        if n == 0:
            return IrisWork([output])
        source = input if input.is_contiguous() else input.contiguous()
        target = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        addresses = (source.data_ptr(), target.data_ptr())
        own_copy = addresses[0] != addresses[1] + self._rank * n
        if own_copy:
            arguments.check_overlap("all_gather_into_tensor", target, source, self._rank * n)
        offset = self.transport.heap.offset_of(addresses[1], self._world * n)
        place = None if offset is None else ("zero copy at", offset)
        key = ("all_gather_into_tensor", n, "bytes a rank", input.dtype, place)
        after = None if target is output else lambda: output.copy_(target)
        keep = (source, target)
        return self._run(
            key, own_copy, self._gather_flow, ("in", "out"), addresses, [output], asynchronous, keep, after
        )

    def _gather_flow(self, key: Key, own_copy: bool) -> Flow:
        op, n, _, _, place = key
        offset = place and place[1]
        rank, into, here = self._rank, Ref(self._rank, "out", 0), Ref(self._rank, "in", 0)
        sends = [Part(p, n, here, None if offset is None else Ref(p, "heap", offset + rank * n)) for p in self._peers]
        receives = [Part(p, n, into + p * n) for p in self._peers]
        # Whether this rank gathers in place is not part of what ranks agree on.
        own = Copy(into + rank * n, here, n) if own_copy else None
        return Flow(op, tuple(sends), tuple(receives), own, to_all=True, zero_copy=offset is not None)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> IrisWork:
        """Gather several tensors; the work is done when all are. See torch.distributed."""
        if len(outputs) != len(inputs):
            raise ArgumentError(
                f"all_gather_into_tensor: {len(outputs)} outputs and {len(inputs)} inputs; as many of each"
            )
        asynchronous = opts is not None and opts.asyncOp
        for output, input in zip(outputs, inputs, strict=True):
            arguments.check_gathered("all_gather_into_tensor", output, input, self._world)
        works = [self._gather_into(output, input, asynchronous) for output, input in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._all(works, outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> IrisWork:
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
        if into[rank].numel() != input.numel():
            raise ArgumentError(
                f"{op}: output[{rank}] has {into[rank].numel()} elements and this rank's input {input.numel()}; they "
                "must be the same"
            )
        sizes = [t.numel() * t.element_size() for t in into]
        source, targets = _dense(input), [_room(t) for t in into]
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
        after = (lambda: _copy(moved)) if moved else None
        asynchronous = opts is not None and opts.asyncOp
        return self._run(key, own_copy, flow, names, addresses, [into], asynchronous, (source, targets), after)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> IrisWork:
        """Gather several tensors into lists: ``outputs[rank][i]`` gets rank's ``inputs[i]``. See torch.distributed."""
        works = [self.allgather([[row[i] for row in outputs]], [t], opts) for i, t in enumerate(inputs)]
        return self._all(works, outputs)

    # Rooted operations ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> IrisWork:
        """Copy the root's tensor to all ranks. See torch.distributed."""
        op = "broadcast"
        tensor, root = self._only(op, tensors), opts.rootRank if opts is not None else 0
        rank, world = self._rank, self._world
        arguments.check_rank(op, "src", root, world)
        (arguments.check_tensor if rank == root else arguments.check_output)(op, "tensor", tensor)
        n = tensor.numel() * tensor.element_size()
        if n == 0 or world == 1:
            return IrisWork(tensors)
        target = _dense(tensor) if rank == root else _room(tensor)
        address = target.data_ptr()
        offset = self.transport.heap.offset_of(address, n)
        place = None if offset is None else ("zero copy at", offset)
        key = (op, n, "bytes", tensor.dtype, "from rank", root, place)

        def flow(key: Key, local: None) -> Flow:
            here = Ref(rank, "tensor", 0)
            sends = [
                Part(p, n, here, None if offset is None else Ref(p, "heap", offset))
                for p in self._peers
                if rank == root
            ]
            receives = [Part(root, n, here)] if rank != root else []
            return Flow(op, tuple(sends), tuple(receives), to_all=True, zero_copy=offset is not None)

        after = None if target is tensor or rank == root else lambda: _copy([(tensor, target)])
        asynchronous = opts is not None and opts.asyncOp
        return self._run(key, None, flow, ("tensor",), (address,), tensors, asynchronous, target, after)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> IrisWork:
        """Gather every rank's tensor into the root's list; sizes may differ. See torch.distributed."""
        op = "gather"
        input, root = self._only(op, inputs), opts.rootRank if opts is not None else 0
        rank, world = self._rank, self._world
        arguments.check_rank(op, "dst", root, world)
        arguments.check_tensor(op, "input", input)
        into: list[Tensor] = list(outputs[0]) if rank == root and outputs else []
        if rank == root:
            arguments.check_list(op, "gather_list", into, world, input.dtype)
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

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> IrisWork:
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
    ) -> IrisWork:
        """Run gather or scatter: ``tensor`` is this rank's, ``parts`` the root's list."""
        contiguous = [_dense(t) for t in (tensor, *parts)]
        written = zip(parts, contiguous[1:], strict=True) if flow.name == "gather" else [(tensor, contiguous[0])]
        moved = [(t, u) for t, u in written if t is not u]
        names = ("tensor", *(f"part{p}" for p in range(len(parts))))
        # A rank does not know the sizes of others, so what all agree on is the operation; the flow is this rank's own.
        key = (flow.name, tensor.dtype, direction)
        after = (lambda: _copy(moved)) if moved else None
        addresses = tuple(t.data_ptr() for t in contiguous)
        asynchronous = opts is not None and opts.asyncOp
        return self._run(key, flow, lambda key, flow: flow, names, addresses, outputs, asynchronous, contiguous, after)

    def barrier(self, opts: Any = None) -> IrisWork:
        """Return when every rank has entered. See torch.distributed."""
        if self._world == 1:
            return IrisWork([])
        if opts is None or not getattr(opts, "asyncOp", False):
            self.transport.barrier()
            return IrisWork([])
        work = IrisWork([], drive=self.transport.drive_work)
        self.transport.barrier(work)
        return work

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> IrisWork:
        """Send a tensor of any layout to rank ``dst`` of the group. See torch.distributed, and mail.py.

        It is done when the bytes are in slots of the group's memory: at once for a small tensor, whether or not the
        other rank receives yet.
        """
        tensor = self._only("send", tensors)
        arguments.check_rank("send", "dst", dst, self._world)
        arguments.check_tensor("send", "tensor", tensor)
        return self.transport.mail.send(_dense(tensor), dst, tag).of(tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> IrisWork:
        """Receive into a tensor of any layout from rank ``src`` of the group. See torch.distributed, and mail.py.

        The message must have as many bytes as the tensor; its dtype may be another, and its shape is not known.
        """
        arguments.check_rank("recv", "src", src, self._world)
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> IrisWork:
        """Receive as :meth:`recv` does, from whichever rank sends first; ``work.source_rank()`` says which."""
        return self._recv(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815 (torch's name)

    def _recv(self, tensors: list[Tensor], src: int | None, tag: int) -> IrisWork:
        tensor = self._only("recv", tensors)
        arguments.check_output("recv", "tensor", tensor)
        target = _room(tensor)
        after = None if target is tensor else lambda: _copy([(tensor, target)])
        return self.transport.mail.recv(target, src, tag, after).of(tensors)

    # ------------------------------------------------------------------------------------------------------------------

    def _run(
        self,
        key: tuple[Any, ...],
        local: Any,
        flow: Callable[[Key, Any], Flow],
        names: Sequence[str],
        addresses: Sequence[int],
        outputs: list[Any],
        asynchronous: bool,
        keep: Any,
        after: Callable[[], Any] | None,
    ) -> IrisWork:
        """Run one operation; ``key`` is what all ranks agree on, ``local`` what else the flow depends on."""
        if not asynchronous:
            self.transport.run(key, local, flow, names, addresses)
            if after:
                after()
            return IrisWork(outputs)
        work = IrisWork(outputs, drive=self.transport.drive_work)
        work.keep, work.after = keep, after
        self.transport.run(key, local, flow, names, addresses, work)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _all(self, works: list[IrisWork], outputs: list[Any]) -> IrisWork:
        """Return a work that is done when all of ``works`` are; they run in order, so when the last is."""
        pending = [w for w in works if not w.is_completed()]
        return pending[-1].of(outputs) if pending else IrisWork(outputs)

    def _only(self, op: str, tensors: list[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ArgumentError(f"{op}: {len(tensors)} tensors; it takes one per rank")
        return tensors[0]

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> IrisWork:
        works, self._coalescing = self._coalescing or [], None
        return self._all(works, [])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of every later wait of this group, on this rank."""
        self._timeout_s = timeout.total_seconds()
        self.links.timeout_s = self._timeout_s
        self.transport.set_timeout(self._timeout_s)

    def shutdown(self) -> None:
        """Close the group on this rank: pending operations fail, memory and links go. Idempotent."""
        self.transport.close("destroy_process_group")
        self.links.close("destroy_process_group")

    abort = shutdown

    # Names of other torch releases, and operations that do not exist yet
    # ------------------------------------------------

    _allgather_base = all_gather_single
    all_gather_into_tensor = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    all_gather = allgather


def _dense(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in a row in memory, without lazy conjugation or negation; itself where they are
    so already.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def _room(tensor: Tensor) -> Tensor:
    """Return where the values of the output ``tensor`` can arrive in a row: itself, or memory to :func:`_copy` them
    from.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.size(), dtype=tensor.dtype)


def _copy(moves: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, as the bytes of any other output arrive: unseen by autograd."""
    with torch.no_grad():
        for into, values in moves:
            into.copy_(values)


def _missing(name: str) -> Callable[..., NoReturn]:
    def method(self: IrisProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name} does not exist in backend iris yet; there are all_gather (all forms), broadcast, gather, scatter, "
            "barrier and object "
            f"collectives; use a gloo or nccl group for it {where(group=self._name, rank=self._rank)}"
        )

    method.__name__ = name
    method.__doc__ = f"Raise UnsupportedError: {name} does not exist yet."
    return method


for _name in (
    "allreduce allreduce_coalesced all_reduce reduce reduce_scatter reduce_scatter_single _reduce_scatter_base "
    "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced alltoall alltoall_base all_to_all_single "
    "all_to_all "
    "monitored_barrier split_group splitGroup merge_remote_group "
    "mergeRemoteGroup"
).split():
    setattr(IrisProcessGroup, _name, _missing(_name))


def explain(group: dist.ProcessGroup | None = None) -> str:
    """Return which engine and algorithms a group uses, with what sizes, and why, in words.

    Args:
        group: the default group when None.

    Raises:
        ArgumentError: not a group of backend iris.
    """
    group = group or dist.group.WORLD
    if not isinstance(group, IrisProcessGroup):
        raise ArgumentError(
            f"explain: {type(group).__name__} is not a group of backend iris; make one with "
            'init_process_group("iris") or new_group(backend="iris")'
        )
    return group.transport.explain()


def create(dist_opts: Any, options: Any) -> IrisProcessGroup:
    """Make a group for torch: the creator that the backend registers.

    Raises:
        ArgumentError: ``pg_options`` of another backend. Also what :class:`IrisProcessGroup` raises.
    """
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(f"pg_options is {type(options).__name__}; backend iris takes iris_pg.Options")
    world = dist_opts.group_size
    return IrisProcessGroup(
        dist_opts.store,
        dist_opts.group_rank,
        world,
        dist_opts.timeout,
        dist_opts.global_ranks_in_group or range(world),
        dist_opts.group_id,
        options,
    )
