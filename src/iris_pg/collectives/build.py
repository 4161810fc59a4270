"""Which program an operation becomes."""

from __future__ import annotations

from iris_pg.collectives import direct
from iris_pg.collectives.all_reduce import all_reduce
from iris_pg.collectives.flow import Flow, Fold, largest_part
from iris_pg.collectives.reduce_scatter import reduce_scatter
from iris_pg.collectives.setting import Setting
from iris_pg.collectives.staged import pairwise, spread
from iris_pg.collectives.zero_copy import zero_copy
from iris_pg.program import Program


def build(s: Setting, flow: Flow | Fold) -> Program:
    """Return this rank's program for ``flow``. What is chosen depends on what all ranks know."""
    if isinstance(flow, Fold):
        is_direct = s.world > 1 and s.is_direct(largest_part(flow))
        if flow.to_all:
            return (direct.all_reduce if is_direct else all_reduce)(s, flow)
        return (direct.reduce_scatter if is_direct else reduce_scatter)(s, flow)
    if flow.zero_copy or flow.pulls:
        return zero_copy(s, flow)
    if not flow.to_all or s.pushes:
        return pairwise(s, flow)
    return direct.spread(s, flow) if s.is_direct(largest_part(flow)) else spread(s, flow)
