"""Makes process groups: which kind, of one host or of several, is found out from the Store by all ranks together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from iris_pg.errors import ArgumentError
from iris_pg.multinode.discovery import discover
from iris_pg.multinode.group import HierarchicalProcessGroup
from iris_pg.options import Options
from iris_pg.process_group import IrisProcessGroup


def create(dist_opts: Any, options: Any) -> IrisProcessGroup:
    """Make a group for torch: the creator that the backend registers.

    Raises:
        ArgumentError: ``pg_options`` of another backend. Also what :class:`IrisProcessGroup` raises.
    """
    if options is not None and not isinstance(options, Options):
        raise ArgumentError(f"pg_options is {type(options).__name__}; backend iris takes iris_pg.Options")
    world = dist_opts.group_size
    if options is None and dist_opts.global_ranks_in_group:
        options = _options_of_default_group()
    return make(
        dist_opts.store,
        dist_opts.group_rank,
        world,
        dist_opts.timeout,
        dist_opts.global_ranks_in_group or range(world),
        dist_opts.group_id,
        options,
    )


def make(
    store: dist.Store,
    rank: int,
    world: int,
    timeout: datetime.timedelta,
    global_ranks: Sequence[int],
    name: str,
    options: Options | None = None,
) -> IrisProcessGroup:
    """Make a group of ranks on one host or on several, as they find out. Arguments as :class:`IrisProcessGroup`."""
    options = options or Options()
    if world == 1 or _are_known_to_share_a_host(global_ranks, options):
        return IrisProcessGroup(store, rank, world, timeout, global_ranks, name, options)
    timeout_s = options.timeout_s or timeout.total_seconds()
    agreed = dict(inter_host=options.inter_host)
    found = discover(store, rank, world, group=name, timeout_s=timeout_s, host=options.host, agreed=agreed)
    if found.hosts.count == 1:
        return IrisProcessGroup(store, rank, world, timeout, global_ranks, name, options)
    return HierarchicalProcessGroup(store, rank, world, timeout, global_ranks, name, options, found)


def _are_known_to_share_a_host(global_ranks: Sequence[int], options: Options) -> bool:
    """Return whether the ranks of a new group are on one host, as the default group has found out; then there is
    nothing to ask its store. All these ranks get the same answer.
    """
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return (
        isinstance(group, IrisProcessGroup) and group._share_a_host(global_ranks) and options.host == group.options.host
    )


def _options_of_default_group() -> Options | None:
    """Return what a subgroup takes when it is given no options: those of the default group, if that is one of these."""
    group = dist.distributed_c10d._get_default_group() if dist.is_initialized() else None
    return group.options if isinstance(group, IrisProcessGroup) else None
