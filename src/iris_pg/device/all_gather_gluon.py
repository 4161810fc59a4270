"""The all-gather of device/all_gather.py as a Gluon kernel."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_pg.device.all_gather import all_gather


@gluon.jit
def all_gather_in_gluon(output, input, nbytes, flags, rounds, dead, bases, ctx, rank, world, PROGRAMS: gl.constexpr):
    """Gather ``nbytes`` from each rank; see :func:`iris_pg.device.all_gather.all_gather`."""
    all_gather(output, input, nbytes, flags, rounds, dead, bases, ctx, rank, world, PROGRAMS)
