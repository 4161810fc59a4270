"""Which program an operation becomes."""

from __future__ import annotations

from iris_pg.collectives.all_reduce import all_reduce
from iris_pg.collectives.flow import Flow, Fold
from iris_pg.collectives.reduce_scatter import reduce_scatter
from iris_pg.collectives.setting import Setting
from iris_pg.collectives.staged import pairwise, spread
from iris_pg.collectives.zero_copy import push
from iris_pg.program import Program


def build(s: Setting, flow: Flow | Fold) -> Program:
    """Return this rank's program for ``flow``."""
    if isinstance(flow, Fold):
        return all_reduce(s, flow) if flow.to_all else reduce_scatter(s, flow)
    if flow.zero_copy:
        return push(s, flow)
    return spread(s, flow) if flow.to_all and not s.pushes else pairwise(s, flow)
