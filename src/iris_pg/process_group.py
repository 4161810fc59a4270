"""IrisProcessGroup: the c10d surface. Each method checks its arguments, names its operation and hands it to the
transport.

torch reaches this class in two ways. Python callers (``torch.distributed.*``) look methods up by name, under the names
of several releases; C++ callers (functional collectives, DDP's reducer) call a fixed table of virtual functions. Both
get the same method. Within a group operations run in the order in which they are called, on every rank. A synchronous
call returns when it is done; an asynchronous one runs on a thread, or in ``work.wait()``.
"""

# torch calls each of these with several sets of arguments, which its stubs list as overloads.
# mypy: disable-error-code="override, assignment, misc"

from __future__ import annotations

import copy
import datetime
import functools
import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from iris_pg.device_work import raw_stream
from iris_pg.errors import ArgumentError, ClosedError, MismatchError, UnsupportedError, where
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.pool import TensorPool
from iris_pg.memory.sharing import Links
from iris_pg.monitored import MonitoredBarriers
from iris_pg.operations import front
from iris_pg.operations.exchanges import Exchanges
from iris_pg.operations.messages import Messages
from iris_pg.operations.reductions import Reductions
from iris_pg.operations.rooted import Rooted
from iris_pg.options import Options
from iris_pg.transport import Transport
from iris_pg.work import IrisWork

if TYPE_CHECKING:
    from iris_pg.device_transport import DeviceTransport

Tensor = torch.Tensor

_FAKE, _dispatch_mode = torch._C._TorchDispatchModeKey.FAKE, torch._C._get_dispatch_mode


@front.install
class IrisProcessGroup(Reductions, Exchanges, Rooted, Messages, dist.ProcessGroup):
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
        # The only constructor that is open to Python subclasses.
        dist.ProcessGroup.__init__(self, rank, world)  # type: ignore[call-arg]
        self.options = options or Options()
        self._store, self._rank, self._world = store, rank, world
        self._name, self._description = name, "iris"
        self._global_ranks = list(global_ranks)
        self._timeout_s = self.options.timeout_s or timeout.total_seconds()
        self._peers = [(rank + k) % world for k in range(1, world)]
        self._coalescing: list[IrisWork] | None = None
        self._splits = 0
        self._bound_device: torch.device | None = None
        self._device_transport: DeviceTransport | None = None
        self._pools: dict[torch.device, TensorPool] = {}  # by a device with its number
        self.links = Links(store, rank, world, group=name, timeout_s=self._timeout_s)
        try:
            self._agree_on_options()
            self.transport = Transport(self.links, self.options, self._timeout_s)
        except BaseException as error:
            self.links.close("set-up failed", error)
            raise

    def _agree_on_options(self) -> None:
        names = ("engine", "heap_bytes", "chunk_bytes", "device_chunk_bytes", "direct_bytes", "comm_sms")
        mine = {name: getattr(self.options, name) for name in names}
        messages = self.links.exchange({**mine, "token": secrets.token_hex(8)}, what="create the group")
        tokens = [message.payload.pop("token") for message in messages]
        for peer, message in enumerate(messages):
            if message.payload != mine:
                raise MismatchError(
                    f"rank {self._rank} creates the group with {mine} and rank {peer} with {message.payload}; options "
                    "are the same "
                    f"on all ranks {where(group=self._name, rank=self._rank)}"
                )
        self._monitored = MonitoredBarriers(self._store, self.links, tokens[0])

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
    def heap(self) -> SymmetricHeap:
        """The group's symmetric heap: outputs made by ``heap.empty`` are gathered and broadcast without a copy."""
        return self.transport.heap

    def heap_on(self, device: torch.device | str) -> SymmetricHeap:
        """Return the group's symmetric heap on a device: the CPU, or this rank's GPU. Collective for a GPU that the
        group has moved no tensor of yet.

        Raises:
            ArgumentError: another GPU than the group's. UnsupportedError: a device of another type.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return self.transport.heap if device.type == "cpu" else self._on(device).heap

    @property
    def _device_types(self) -> list[torch.device]:
        # The CPU first: torch takes it for objects then.
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    @property
    def bound_device_id(self) -> torch.device | None:
        """The GPU of this rank, if ``device_id`` said so."""
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device if device is not None and device.type != "cpu" else None

    def _on(self, device: torch.device) -> DeviceTransport:
        transport = self._device_transport
        if transport is not None and transport.device == device:
            return transport
        place = where(group=self._name, rank=self._rank)
        if device.type != "cuda":
            raise UnsupportedError(f"tensors on {device}: the group moves tensors on CPUs and CUDA devices {place}")
        if transport is not None:
            raise ArgumentError(
                f"a tensor on {device}, and the group has moved tensors on {transport.device} before; a rank of a "
                f"group has one GPU; move the tensor there, or make another group {place}"
            )
        if self.links.closed:
            raise ClosedError(f"the group is closed ({self.links.closed}) {place}")
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "the group's first operation on a CUDA tensor, while a graph is captured; it allocates memory, which "
                "all ranks do together; before the capture call any collective on a CUDA tensor, or pass device_id= to "
                f"init_process_group {place}"
            )
        from iris_pg.device_transport import DeviceTransport  # with Triton, which groups of CPU tensors do without

        self._device_transport = DeviceTransport(self.links, self.options, self._timeout_s, device)
        return self._device_transport

    def _barrier_device(self, opts: Any) -> torch.device | None:
        if self._device_transport is not None:
            return self._device_transport.device
        device = self._bound_device or getattr(opts, "device", None)
        return device if device is not None and device.type == "cuda" else None

    def _get_backend(self, device: torch.device) -> IrisProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: operations are numbered from 1 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.transport.sequence

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> IrisWork | None:
        works, self._coalescing = self._coalescing or [], None
        return self._all(works, [])

    # What torch asks of a Backend, the object that _get_backend returns -----------------------------------------------

    supports_splitting = True
    supports_coalescing = supports_time_estimate = supports_shrinking = False

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Prepare for tensors on a GPU, which the first of them does otherwise. Collective; for torch's ``device_id``.

        Raises:
            UnsupportedError, MismatchError, DeadlineError, PeerLostError: as :class:`DeviceTransport`.
        """
        if device is not None and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            self.bound_device_id = device
            self._on(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing to do: ranks outside a new group need not help to make it."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether :meth:`allocate_tensor` makes tensors for ``device``."""
        if device in self._pools:
            return True
        kind = torch.device(device).type
        return kind == "cpu" or (kind == "cuda" and (self._device_transport is not None or torch.cuda.is_available()))

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor [size] in the group's symmetric heap; its memory is used again when it and all
        views of it are gone. All ranks call this in the same order. See :class:`TensorPool`.

        Raises:
            UnsupportedError: neither a CPU nor a CUDA device. Else as :meth:`TensorPool.tensor`, and for a CUDA device
                as :meth:`heap_on`.
        """
        if _dispatch_mode(_FAKE) is not None:
            return torch.empty(size, dtype=dtype, device=device)
        pool = self._pools.get(device) or self._pool_on(torch.device(device))
        return pool.tensor(size, dtype)

    def _pool_on(self, device: torch.device) -> TensorPool:
        if not self.supports_tensor_alloc(device):
            raise UnsupportedError(
                f"allocate_tensor on {device}: heaps are on CPUs and CUDA devices; use torch.empty "
                f"{where(group=self._name, rank=self._rank)}"
            )
        if device.type == "cpu":
            pool = self.pool
        else:
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self._on(device)
            pool = self._device_pool
        self._pools[device] = pool
        return pool

    @functools.cached_property
    def _device_pool(self) -> TensorPool:
        assert self._device_transport
        heap = self._device_transport.heap
        return TensorPool(heap, functools.partial(raw_stream, heap.device))

    @functools.cached_property
    def pool(self) -> TensorPool:
        """The tensors of :meth:`allocate_tensor`."""
        return TensorPool(self.transport.heap)

    # Groups from groups -----------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> IrisProcessGroup | None:
        """Return a new group of some ranks of this one, in ascending order; None on any other rank. Every rank of this
        group calls it, at the same time with sets of ranks that do not overlap. ``shutdown`` closes the new group.

        Args:
            ranks: in this group.
            timeout, opts: this group's when None.
            device_types: ignored: a group serves all devices that it can.

        Raises:
            ArgumentError: not ranks of this group, a rank twice, or options of another backend.
        """
        place = where(group=self._name, rank=self._rank)
        members = sorted(ranks)
        if not members or members[0] < 0 or members[-1] >= self._world or len(set(members)) < len(members):
            raise ArgumentError(
                f"split_group: ranks={list(ranks)}; it takes different ranks out of 0..{self._world - 1} {place}"
            )
        if opts is not None and not isinstance(opts, Options):
            raise ArgumentError(f"split_group: opts is {type(opts).__name__}; it takes iris_pg.Options {place}")
        # torch's name of the group is no good for the Store: it depends on how many groups a rank is in.
        self._splits += 1
        if self._rank not in members:
            return None
        part = f"split/{self._splits}/{'_'.join(map(str, members))}"
        group = self._subgroup(
            dist.PrefixStore(part, self._store),
            members.index(self._rank),
            len(members),
            timeout or datetime.timedelta(seconds=self._timeout_s),
            [self._global_ranks[r] for r in members],
            group_name or f"{self._name}/{part}",
            copy.deepcopy(self.options) if opts is None else opts,
        )
        group._set_group_desc(group_desc or f"{self._description}:split")
        if self._bound_device:
            group.eager_connect_single_device(self._bound_device)
        return group

    def _subgroup(self, *arguments: Any) -> IrisProcessGroup:
        return IrisProcessGroup(*arguments)  # some ranks of one host are on one host

    def _share_a_host(self, global_ranks: Iterable[int]) -> bool:
        """Return whether all these ranks are on one host; for the default group, which has found out."""
        return True

    splitGroup = split_group  # noqa: N815 (torch's name)

    # Life -------------------------------------------------------------------------------------------------------------

    def monitored_barrier(
        self, timeout: datetime.timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has entered, or say which has not. It leaves the group as it is, also when it fails.

        Args:
            timeout: deadline; the group's when None.
            wait_all_ranks: name all ranks that are late or gone by then, and not only the first that is.

        Raises:
            DeadlineError: naming ranks that are late. PeerLostError: naming ranks that have died or left.
        """
        timeout_s = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        self._monitored.wait(self._timeout_s if timeout_s is None else timeout_s, wait_all_ranks)

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError: groups of backend iris cannot be merged."""
        raise UnsupportedError(
            "merge_remote_group does not exist in backend iris; make one group of all ranks at once, by new_group or "
            f"init_process_group {where(group=self._name, rank=self._rank)}"
        )

    mergeRemoteGroup = merge_remote_group  # noqa: N815 (torch's name)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the deadline of every later wait of this group, on this rank."""
        self._timeout_s = timeout.total_seconds()
        self.links.timeout_s = self._timeout_s
        self.transport.set_timeout(self._timeout_s)
        if self._device_transport:
            self._device_transport.set_timeout(self._timeout_s)
            self._known.clear()  # launches carry their deadline

    def shutdown(self) -> None:
        """Close the group on this rank: pending operations on CPU tensors fail, those on CUDA tensors are waited for,
        memory and links go. Idempotent.
        """
        self._close("destroy_process_group", None)

    def abort(self) -> None:
        """As :meth:`shutdown`, and do not wait for operations on CUDA tensors that are under way: release them."""
        self._close("abort", 0.0)

    def _explained(self) -> str:
        device = self._device_transport
        return "\n".join([self.transport.explain(), *([device.explain()] if device else [])])

    def _close(self, why: str, patience_s: float | None) -> None:
        if self._device_transport:
            self._device_transport.close(why, patience_s)
        self.transport.close(why)
        for name in ("pool", "_device_pool"):
            if name in vars(self):
                vars(self)[name].close()
        self.links.close(why)


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
    return group._explained()
