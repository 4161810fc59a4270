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

import datetime
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from iris_pg.errors import ArgumentError, MismatchError, UnsupportedError, where
from iris_pg.memory.sharing import Links
from iris_pg.operations.exchanges import Exchanges
from iris_pg.operations.gathers import Gathers
from iris_pg.operations.messages import Messages
from iris_pg.operations.reductions import Reductions
from iris_pg.operations.rooted import Rooted
from iris_pg.options import Options
from iris_pg.transport import Transport
from iris_pg.work import IrisWork

Tensor = torch.Tensor


class IrisProcessGroup(Gathers, Reductions, Exchanges, Rooted, Messages, dist.ProcessGroup):
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


def _missing(name: str) -> Callable[..., NoReturn]:
    def method(self: IrisProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name} does not exist in backend iris yet; use new_group, or a gloo or nccl group for it "
            f"{where(group=self._name, rank=self._rank)}"
        )

    method.__name__ = name
    method.__doc__ = f"Raise UnsupportedError: {name} does not exist yet."
    return method


for _name in ("monitored_barrier split_group splitGroup merge_remote_group mergeRemoteGroup").split():
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
