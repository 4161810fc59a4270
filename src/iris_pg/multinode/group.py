"""A process group that spans hosts: iris within each host, an existing engine between them.

It is a group like any other of backend iris: the same calls, the same checks of arguments, the same errors. What
differs is how an operation is carried out. It becomes a plan (plan.py) of steps on the group of this host's ranks and
on the wire (wire.py). Operations run one after another, in the order of their calls.
"""

# mypy: disable-error-code="override, misc"

from __future__ import annotations

import datetime
import functools
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris_pg import process_group
from iris_pg.collectives.flow import Flow, Fold
from iris_pg.device_work import End, StreamWork, raw_stream
from iris_pg.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    IrisError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
    where,
)
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.pool import TensorPool
from iris_pg.monitored import MonitoredBarriers
from iris_pg.multinode import moves
from iris_pg.multinode.discovery import Discovered
from iris_pg.multinode.executor import Executor
from iris_pg.multinode.failures import Failures
from iris_pg.multinode.messages import WireMessages
from iris_pg.multinode.plan import Plan, Within
from iris_pg.multinode.translate import plan_of
from iris_pg.multinode.wire import GlooWire, NcclWire, Wire
from iris_pg.multinode.worker import Worker
from iris_pg.operations import front
from iris_pg.operations.base import is_asynchronous
from iris_pg.options import Options
from iris_pg.platforms.cpu import usable_cores
from iris_pg.transport import BARRIER
from iris_pg.watch import Key, text_of
from iris_pg.work import IrisWork

Tensor = torch.Tensor

_MOST_PLANS = 256  # that are kept, the latest used
_YIELD_S = 2e-4  # where cores are few: a rank waits for neighbours that wait for the network, whose threads need them
_GRACE_S = 3.0  # a rank that waits for its own host waits longer than one that waits for another, which knows more


@front.install
class HierarchicalProcessGroup(WireMessages, process_group.IrisProcessGroup):
    """A group named ``"iris"`` whose ranks are on several hosts.

    Args:
        found: which ranks are on which host. Else as :class:`IrisProcessGroup`.

    Attributes:
        hosts: which ranks are on which host.
        local: the group of this host's ranks; their numbers in it are their indices on the host.

    Raises:
        UnsupportedError: an engine between hosts that torch lacks here. Else as :class:`IrisProcessGroup`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: datetime.timedelta,
        global_ranks: Sequence[int],
        name: str,
        options: Options,
        found: Discovered,
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, world)  # type: ignore[call-arg]
        self.options, self.hosts = options, found.hosts
        self._store, self._rank, self._world = store, rank, world
        self._name, self._description = name, "iris"
        self._global_ranks = list(global_ranks)
        self._timeout_s = options.timeout_s or timeout.total_seconds()
        self._peers = [(rank + k) % world for k in range(1, world)]
        self._coalescing, self._splits, self._bound_device = None, 0, None
        self._device_transport = None
        self._pid, self._sequence = os.getpid(), 0
        self._failure: BaseException | None = None
        self._host, self._index = found.hosts.places[rank]
        self._plans: OrderedDict[Any, Plan] = OrderedDict()
        self._failures = Failures(store, found.token)
        self._wires: dict[str, Wire] = {}
        if options.inter_host == "nccl" and not dist.is_nccl_available():
            raise UnsupportedError(f'inter_host="nccl": torch was built without NCCL; use "auto" {self._place()}')
        self.local = process_group.IrisProcessGroup(
            dist.PrefixStore(f"host/{found.token}/{self._host}", store),
            self._index,
            len(self._host_ranks),
            timeout,
            [self._global_ranks[p] for p in self._host_ranks],
            f"{name} on {found.hosts.names[self._host]}",
            Options(**{**options._fields(), "timeout": self._timeout_s + _GRACE_S}),
        )
        if usable_cores() < 2 * self.local.size():
            self.local.transport.yield_for(_YIELD_S)
        self._worker = Worker(f"iris_pg {name}")
        self._executor = Executor(self._within)
        self._monitored = MonitoredBarriers(store, _Marks(self), found.token)
        try:
            if options.inter_host != "nccl":
                wire_store = dist.PrefixStore(f"wire/{found.token}", store)
                self._wires["cpu"] = GlooWire(wire_store, self.hosts, rank, name, self._timeout_s)
        except BaseException:
            self.local.shutdown()
            raise

    @property
    def _host_ranks(self) -> tuple[int, ...]:
        return self.hosts.members[self._host]

    def _place(self, op: str | None = None) -> str:
        return where(group=self._name, rank=self._rank, op=op)

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def heap(self) -> SymmetricHeap:
        """The symmetric heap of this host's ranks. Tensors in it are as good as any other, and no better."""
        return self.local.heap

    @property
    def pool(self) -> TensorPool:  # type: ignore[override]
        """The tensors of :meth:`allocate_tensor`."""
        return self.local.pool

    def heap_on(self, device: torch.device | str) -> SymmetricHeap:
        """Return the symmetric heap of this host's ranks on a device; see :meth:`IrisProcessGroup.heap_on`."""
        return self.local.heap_on(device)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether :meth:`allocate_tensor` makes tensors for ``device``."""
        return self.local.supports_tensor_alloc(device)

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor [size] in the symmetric heap of this host's ranks."""
        return self.local.allocate_tensor(size, dtype=dtype, device=device)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Prepare for tensors on a GPU; see :meth:`IrisProcessGroup.eager_connect_single_device`."""
        self.local.eager_connect_single_device(device)
        self._bound_device = self.local.bound_device_id

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # Operations -------------------------------------------------------------------------------------------------------

    def _offset(self, tensor: Tensor, nbytes: int) -> int | None:
        return None  # peers of other hosts do not map it, so an operation is the same wherever tensors are

    def _run(
        self,
        device: torch.device,
        key: Key,
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str],
        addresses: Sequence[int],
        outputs: list[Any],
        asynchronous: bool,
        keep: Any,
        after: Callable[[], Any] | None,
        seen: Hashable | None = None,
    ) -> IrisWork:
        plan = self._plans.get((key, local))
        if plan is None:
            plan = self._plans[key, local] = plan_of(self.hosts, self._rank, flow(key, local))
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        places = dict(zip(names, addresses, strict=True))
        return self._begin(plan, key, places, device, outputs, asynchronous, keep, after)

    def _begin(
        self,
        plan: Plan,
        key: Key,
        places: dict[str, int],
        device: torch.device,
        outputs: list[Any],
        asynchronous: bool,
        keep: Any,
        after: Callable[[], Any] | None,
    ) -> IrisWork:
        self._check_open()
        wire = self._wire(device)
        self._sequence += 1
        number = self._sequence

        def job() -> None:
            self._check_open()
            try:
                self._executor.run(plan, key, places, device, wire)
            except BaseException as error:
                raise self._fail(error, key, number) from error
            if after and device.type != "cpu":
                after()

        if device.type != "cpu":
            # In the order of the current stream: so a call returns at once, and what it does is captured, too.
            self._worker.run(job)
            end = End(torch.cuda.current_stream(device), []) if asynchronous else None
            return self._coalesced(StreamWork(outputs, device, raw_stream(device), end, lambda: self._failure))
        if not asynchronous:
            self._worker.run(job)
            if after:
                after()
            return IrisWork(outputs)
        work = IrisWork(outputs, drive=lambda work: None)
        assert work.completion
        work.completion.keep, work.completion.after = keep, after
        self._worker.submit(job, work.completion)
        return self._coalesced(work)

    def _within(self, key: Key, step: Within, device: torch.device, places: dict[str, int]) -> None:
        """Carry out an operation of the host's ranks, in line."""
        names, addresses = tuple(places), tuple(places.values())
        if device.type == "cpu":
            self.local.transport.run(key, step, _flow_of, names, addresses)
        else:
            self.local._run(device, key, step, _flow_of, names, addresses, [], False, None, None)

    def _wire(self, device: torch.device) -> Wire:
        wire = self._wires.get(device.type)
        if wire is not None:
            return wire
        choice = self.options.inter_host
        if device.type != "cuda" or choice == "gloo":
            raise UnsupportedError(
                f'inter_host="{choice}": tensors on {device.type} cannot cross between hosts by it; gloo takes CPU '
                f'tensors and nccl CUDA tensors; use "auto", which has both {self._place()}'
            )
        if not dist.is_nccl_available():
            raise UnsupportedError(f"CUDA tensors cross between hosts by NCCL, which torch lacks here {self._place()}")
        store = dist.PrefixStore("nccl", self._store)
        wire = self._wires[device.type] = NcclWire(store, self.hosts, self._rank, self._timeout_s)
        return wire

    def barrier(self, opts: Any = None) -> IrisWork | None:
        """Return when every rank has entered. See torch.distributed, and :meth:`IrisProcessGroup.barrier`."""
        device = self._bound_device or getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            token = torch.zeros(1, device=device)
            work = self.allreduce([token])
            torch.cuda.current_stream(device).synchronize()
            return work
        self._check_open()
        self._sequence += 1
        number = self._sequence

        def job() -> None:
            self._check_open()
            try:
                self.local.transport.barrier()
                self._executor.run(self._barrier_plan, BARRIER, {}, torch.device("cpu"), self._wires["cpu"])
                self.local.transport.barrier()
            except BaseException as error:
                raise self._fail(error, BARRIER, number) from error

        if not is_asynchronous(opts):
            self._worker.run(job)
            return IrisWork([])
        work = IrisWork([], drive=lambda work: None)
        assert work.completion
        self._worker.submit(job, work.completion)
        return self._coalesced(work)

    @functools.cached_property
    def _barrier_plan(self) -> Plan:
        return moves.barrier(self.hosts, self._rank)

    # Failures ---------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this process is a fork of the one that created the group, and cannot use it; make a group of its own "
                f"{self._place()}"
            )
        failure = self._failure
        if isinstance(failure, ClosedError):
            raise failure
        if failure:
            raise ClosedError(
                "the group has failed before and cannot be used; destroy it and make a new one. It failed with: "
                f"{failure} {self._place()}"
            )

    def _fail(self, error: BaseException, key: Key, number: int) -> BaseException:
        """Return what the group fails with. The ranks of this host and of others are told, so none waits in vain."""
        op, operation = str(key[0]), text_of(key)
        if self._failure:
            return self._failure
        if not isinstance(error, IrisError):
            self._failure = ClosedError(f"{op} was interrupted by {type(error).__name__}: {error} {self._place(op)}")
            self._let_go(self._failure)
            return error
        text = _bare(str(error))
        if "on host" not in text:
            ranks = ", ".join(map(str, self._host_ranks))
            text = f"on host {self.hosts.names[self._host]}, whose ranks 0, 1, ... are {ranks} of the group: {text}"
        late = error.late if isinstance(error, DeadlineError) else None
        behind, first = self._failures.tell(self._rank, text, operation, number, late)
        for rank in behind:
            text += f"; rank {late} has itself waited for rank {rank} on host {self.hosts.name_of(rank)}"
            late = rank
        kind: type[IrisError] = type(error) if type(error) in (DeadlineError, MismatchError) else PeerLostError
        if isinstance(error, ArgumentError | UnsupportedError):
            kind = type(error)
        is_other = first is not None and first["number"] == number and first["operation"] != operation
        if is_other and number:
            kind = MismatchError
            text = f"this rank is in {operation} (operation {number}), and another in a different one: {text}"
        if first:
            text += (
                f"; the first to fail was rank {first['rank']} on host {self.hosts.name_of(first['rank'])}, in "
                f"{first['operation']}: {first['text']}"
            )
        failure = kind(f"{op}: {text} {where(group=self._name, rank=self._rank, op=op, seq=number or None)}")
        if isinstance(failure, DeadlineError):
            failure.late = late
        self._failure = failure
        self._let_go(failure)
        return failure

    def _let_go(self, failure: BaseException) -> None:
        told = failure if not isinstance(failure, ClosedError) else PeerLostError(str(failure))
        self.local.transport.watch.give_up(told)
        for wire in list(self._wires.values()):
            wire.close()
        if self.local._device_transport:
            self.local.abort()

    # Life -------------------------------------------------------------------------------------------------------------

    def _subgroup(self, *arguments: Any) -> process_group.IrisProcessGroup:
        from iris_pg.groups import make  # which makes groups of this class

        return make(*arguments)

    def _share_a_host(self, global_ranks: Iterable[int]) -> bool:
        return len({self.hosts.places[rank][0] for rank in global_ranks}) == 1

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of every later wait of this group, on this rank."""
        self._timeout_s = timeout.total_seconds()
        self.local.set_timeout(timeout + datetime.timedelta(seconds=_GRACE_S))
        for wire in self._wires.values():
            wire.timeout_s = self._timeout_s

    def _close(self, why: str, patience_s: float | None) -> None:
        if os.getpid() != self._pid:
            return
        if self._failure is None:
            self._failure = ClosedError(f"the group was closed ({why}) {self._place()}")
        for wire in self._wires.values():
            wire.close()
        self.local._close(why, patience_s)
        self._worker.close()

    def _explained(self) -> str:
        wires = ", ".join(f"{wire.name} for {kind} tensors" for kind, wire in self._wires.items())
        shown = [f"{name}: {_ranks(ranks)}" for name, ranks in zip(self.hosts.names, self.hosts.members, strict=True)]
        lines = [
            f"group {self._name}: rank {self._rank} of {self._world}, on {self.hosts.count} hosts",
            *(f"  host {line}" for line in shown[:8]),
            *([f"  ... and {len(shown) - 8} more"] if len(shown) > 8 else []),
            f'  between   {wires or "nothing yet"} (inter_host="{self.options.inter_host}"); connections are made when '
            "first used",
            "  two level all_gather, broadcast, all_reduce, reduce, reduce_scatter, barrier: a byte crosses once to a "
            "host, between ranks of the same index; partial sums of 16-bit floats cross in float32",
            "  one level all_to_all, gather, scatter, messages: straight to their rank, on this host or another",
            f"  sent      {sum(wire.sent_bytes for wire in self._wires.values())} bytes to other hosts so far",
            "  within the host:",
        ]
        return "\n".join([*lines, *(f"    {line}" for line in self.local._explained().splitlines())])


class _Marks:
    """What a monitored barrier asks of a group's links."""

    def __init__(self, group: HierarchicalProcessGroup) -> None:
        self._of = group
        self.rank, self.world, self.group = group._rank, group._world, group._name

    def lost(self) -> list[int]:
        """Return the ranks of this host that are gone; of others nothing is known."""
        return [self._of._host_ranks[index] for index in self._of.local.links.lost()]


def _flow_of(key: Key, step: Within) -> Flow | Fold:
    return step.flow


def _bare(text: str) -> str:
    return re.sub(r" \[group=[^]]*\]$", "", text)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


__all__ = ["HierarchicalProcessGroup"]
