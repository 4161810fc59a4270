"""How the ranks of a context find each other: by the default process group, by torchrun's environment, or not at all.

No process group is made or changed here, and one may be made later in the same process, from the same environment.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris_pg.errors import DeadlineError, OptionError

_DEFAULT_TIMEOUT_S = dist.constants.default_pg_timeout.total_seconds()
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Meeting(NamedTuple):
    """Who meets where."""

    store: dist.Store
    rank: int
    world: int
    timeout_s: float
    number: int  # of meetings of this rank on this store before; the same on all ranks


def meet(timeout_s: float | None) -> Meeting:
    """Return the ranks of the default process group, else those of the environment, else this process alone.

    Each call returns a part of the store that no other call uses, provided that all ranks call in the same order.

    Args:
        timeout_s: deadline in seconds; the process group's, or torch's default, when None.

    Raises:
        OptionError: the environment holds only half of what torchrun sets.
        DeadlineError: a rank did not come to the store of the environment.
    """
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        store, rank, world = dist.distributed_c10d._get_default_store(), group.rank(), group.size()
        timeout_s = timeout_s or _timeout_of(group)
    elif "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        timeout_s = timeout_s or _DEFAULT_TIMEOUT_S
        store, rank, world = _from_environment(tuple(os.environ.get(name) for name in _NEEDED), timeout_s)
    else:
        store, rank, world = dist.HashStore(), 0, 1
    # A store may outlive a restart of its ranks. The count lies in it, not here: this process may know several stores.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    number = store.add(f"iris_pg/{attempt}/meetings of rank {rank}", 1) - 1
    store = dist.PrefixStore(f"iris_pg/{attempt}/{number}", store)
    return Meeting(store, rank, world, timeout_s or _DEFAULT_TIMEOUT_S, number)


@functools.cache
def _from_environment(where: tuple[str | None, ...], timeout_s: float) -> tuple[dist.Store, int, int]:
    # Kept for the life of the process: if rank 0 dropped it with each context, a fast rank might reach the old one.
    missing = [name for name, value in zip(_NEEDED, where, strict=True) if not value]
    if missing:
        raise OptionError(
            f"{', '.join(missing)} not set in the environment, but other variables of torchrun are; start the "
            "ranks with torchrun, or unset RANK and WORLD_SIZE for a context of one rank"
        )
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s)))
    except ValueError as error:
        raise OptionError(f"the environment cannot be used: {error}") from None
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise DeadlineError(
            f"not all of {where[1]} ranks came within {timeout_s} s to {where[2]}:{where[3]}: {error}"
        ) from None
    return store, rank, world


def _timeout_of(group: dist.ProcessGroup) -> float:
    own = getattr(group, "_timeout_s", None)  # backend iris
    if own:
        return float(own)
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # no backend for CPU tensors, or one without options
        return _DEFAULT_TIMEOUT_S
