"""Collectives of a one-sided context: ``ctx.ccl.all_gather(output, input)`` and the like.

::

    with iris(heap_size=1 << 30) as ctx:
        output, input = ctx.empty(ctx.num_ranks * 1024), ctx.ones(1024)
        ctx.ccl.all_gather(output, input)
        ctx.ccl.all_gather(output, input, config=Config(engine="sdma"))

Names, order and defaults of arguments are those of ROCm Iris; what a collective does to shapes is what
torch.distributed's of the same name does. An engine is set up by the first call that uses it: flags and staging slots
in memory of their own, so the context's heap holds nothing but the user's tensors. Tensors outside the heap work too,
at one copy more. Tensors are where the heap is, on the CPU or on this rank's GPU; on a GPU a call returns when its
kernels and copies are on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from iris_pg.errors import ArgumentError, OptionError, UnsupportedError, where
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.operations import front
from iris_pg.operations.exchanges import Exchanges
from iris_pg.operations.reductions import Reductions
from iris_pg.operations.rooted import Rooted
from iris_pg.options import ENGINES, Options
from iris_pg.planner import engine_for
from iris_pg.transport import Transport
from iris_pg.work import IrisWork

if TYPE_CHECKING:
    from iris_pg.device.all_gather import KernelGather
    from iris_pg.device_transport import DeviceTransport

Tensor = torch.Tensor

KERNEL_PUTS = "kernel_puts"
ALL_GATHER_VARIANTS = {"sdma": "sdma", "persistent": "cu", "partitioned": "cu", KERNEL_PUTS: "sdma"}
"""A way to gather, by ROCm Iris's name or by :data:`KERNEL_PUTS` -> the engine that does it here."""


@dataclass(frozen=True)
class Config:
    """How collectives of a context run.

    Args:
        engine: ``"auto"``, ``"cu"`` (Triton kernels) or ``"sdma"`` (copy engine).
        comm_sms: CTAs of a kernel on a GPU, at most: those of the first call that uses the engine; for a CPU it means
            nothing.
        all_gather_variant: for :meth:`Collectives.all_gather`, another way to name the engine: ``"sdma"``, or one of
            ROCm Iris's kernels, ``"persistent"`` and ``"partitioned"``, which are one here; or ``"kernel_puts"``, where
            a kernel tells the copy engine what to put: into an output in the heap, of a context with that engine.

    Raises:
        OptionError: a value that is not valid, or a variant that is not of the engine.
    """

    engine: str = "auto"
    comm_sms: int = 64
    all_gather_variant: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise OptionError(f"engine={self.engine!r} is not known; it is one of {', '.join(map(repr, ENGINES))}")
        if not isinstance(self.comm_sms, int) or self.comm_sms <= 0:
            raise OptionError(f"comm_sms={self.comm_sms!r}; it takes a positive number of compute units")
        variant = self.all_gather_variant
        if variant is not None and variant not in ALL_GATHER_VARIANTS:
            names = ", ".join(map(repr, ALL_GATHER_VARIANTS))
            raise OptionError(f"all_gather_variant={variant!r} is not known; it is one of {names}")
        if variant is not None and self.engine not in ("auto", ALL_GATHER_VARIANTS[variant]):
            raise OptionError(
                f"all_gather_variant={variant!r} with engine={self.engine!r}; it is of engine "
                f"{ALL_GATHER_VARIANTS[variant]!r}; leave one of the two out"
            )

    def engine_of(self, op: str) -> str:
        """Return the engine that was asked for ``op``."""
        variant = self.all_gather_variant if op == "all_gather" else None
        return ALL_GATHER_VARIANTS[variant] if variant else self.engine


class Collectives:
    """The collectives of one context. All ranks of the context call them, in the same order, with the same config.

    Args:
        links, heap: the context's.
        gather_by_kernel: returns a new :class:`iris_pg.device.all_gather.KernelGather`. Collective.
    """

    def __init__(self, links: Links, heap: SymmetricHeap, gather_by_kernel: Callable[[], KernelGather]) -> None:
        self._links, self._heap, self._gather_by_kernel = links, heap, gather_by_kernel
        self._engines: dict[str, _Operations] = {}
        self._kernel_gather: KernelGather | None = None

    def all_gather(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> IrisWork | None:
        """Gather every rank's ``input_tensor`` [n...] into ``output_tensor`` [num_ranks * n...].

        Args:
            group: None; ranks of the context are all there are.
            async_op: return a work at once. The tensors may be read and written after ``work.wait()``; without it, when
                the call returns.

        Raises:
            ArgumentError: a size, dtype or layout that does not fit. Nothing has moved.
            UnsupportedError: a ``group``; an engine that the machine, or the operation, does not have.
            DeadlineError, PeerLostError, MismatchError: naming the rank at fault. ClosedError: after one of these.
        """
        if isinstance(config, Config) and config.all_gather_variant == KERNEL_PUTS and group is None:
            if async_op:
                raise UnsupportedError(
                    "all_gather: all_gather_variant='kernel_puts' with async_op=True; on a GPU it is on the current "
                    "stream anyway; use a stream of your own, or the variant 'sdma'"
                )
            self._kernel_gather = self._kernel_gather or self._gather_by_kernel()
            self._kernel_gather(output_tensor, input_tensor)
            return None
        ops = self._engine("all_gather", group, config)
        opts = _options("AllgatherOptions", async_op)
        return _result(ops.all_gather_single(output_tensor, input_tensor, opts), async_op)

    def all_reduce(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
        workspace: Any = None,
    ) -> IrisWork | None:
        """Reduce every rank's ``input_tensor`` [n...] into every rank's ``output_tensor`` [n...]; the two may be one.

        Args:
            op: a ``torch.distributed.ReduceOp``; SUM when None.
            workspace: not used: nothing is to be prepared. Else as :meth:`all_gather`.
        """
        ops = self._engine("all_reduce", group, config)
        _fill("all_reduce", output_tensor, input_tensor)
        opts = _options("AllreduceOptions", async_op, reduceOp=dist.ReduceOp.SUM if op is None else op)
        return _result(ops.allreduce([output_tensor], opts), async_op)

    def reduce_scatter(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> IrisWork | None:
        """Reduce every rank's ``input_tensor`` [num_ranks * n...], and give rank r part r, in ``output_tensor`` [n...].

        Arguments as :meth:`all_reduce`.
        """
        ops = self._engine("reduce_scatter", group, config)
        opts = _options("ReduceScatterOptions", async_op, reduceOp=dist.ReduceOp.SUM if op is None else op)
        return _result(ops.reduce_scatter_single(output_tensor, input_tensor, opts), async_op)

    def all_to_all(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> IrisWork | None:
        """Send part p of ``input_tensor`` (along dimension 0) to rank p, and receive part p of ``output_tensor`` from
        it. Arguments as :meth:`all_gather`.
        """
        ops = self._engine("all_to_all", group, config)
        opts = _options("AllToAllOptions", async_op)
        return _result(ops.alltoall_base(output_tensor, input_tensor, [], [], opts), async_op)

    def broadcast(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> IrisWork | None:
        """Copy rank ``src``'s ``input_tensor`` [n...] to every rank's ``output_tensor`` [n...]; the two may be one.

        Arguments as :meth:`all_gather`.
        """
        ops = self._engine("broadcast", group, config)
        if self._links.rank == src:
            _fill("broadcast", output_tensor, input_tensor)
        opts = _options("BroadcastOptions", async_op, rootRank=src)
        return _result(ops.broadcast([output_tensor], opts), async_op)

    def explain(self) -> str:
        """Return which engines have been used, and why, in words."""
        return "\n".join(ops.transport.explain() for ops in self._engines.values()) or "no collective has been called"

    def close(self) -> None:
        """Close the engines. Idempotent; the context calls it."""
        for ops in self._engines.values():
            ops.transport.close("the context was closed")

    def _engine(self, op: str, group: Any, config: Config | None) -> _Operations:
        place = where(group=self._links.group, rank=self._links.rank, op=op)
        if group is not None:
            raise UnsupportedError(
                f"{op}: group={group!r}; all ranks of the context take part; use torch.distributed for another group "
                f"{place}"
            )
        if config is not None and not isinstance(config, Config):
            raise ArgumentError(
                f"{op}: config is {type(config).__name__}; it takes iris_pg.collective_api.Config {place}"
            )
        config = config or Config()
        engine = config.engine_of(op)
        if self._heap.device.type == "cpu":
            engine, _ = engine_for(engine, "cpu")
        found = self._engines.get(engine)
        if found is None:
            # The options' heap is for no tensors: those are in the context's.
            options = Options(engine=engine, heap_bytes=1, comm_sms=config.comm_sms)
            found = self._engines[engine] = _Operations(self._transport(options), self._heap.device)
        return found

    def _transport(self, options: Options) -> Transport | DeviceTransport:
        device, timeout_s = self._heap.device, self._links.timeout_s
        if device.type == "cpu":
            return Transport(self._links, options, timeout_s, tensors=self._heap)
        from iris_pg.device_transport import DeviceTransport  # with what GPUs need

        return DeviceTransport(self._links, options, timeout_s, device, self._heap)


@front.install
class _Operations(Reductions, Exchanges, Rooted):
    """The operations of one engine."""

    def __init__(self, transport: Transport | DeviceTransport, device: torch.device) -> None:
        self.transport, self._device = transport, device  # type: ignore[assignment]
        self._rank, self._world = transport.rank, transport.world
        self._peers: list[int] = [(self._rank + k) % self._world for k in range(1, self._world)]
        self._coalescing = None

    def _on(self, device: torch.device) -> DeviceTransport:
        self._check(device)
        return self.transport  # type: ignore[return-value]

    def _run(self, device: torch.device, *operation: Any) -> IrisWork | None:
        self._check(device)
        return super()._run(device, *operation)

    def _check(self, device: torch.device) -> None:
        if device != self._device:
            raise ArgumentError(f"a tensor on {device}; the context's heap, and its collectives, are on {self._device}")


def _options(kind: str, async_op: bool, **values: Any) -> Any:
    opts = getattr(_distributed_c10d, kind)()
    opts.asyncOp = async_op
    for name, value in values.items():
        setattr(opts, name, value)
    return opts


def _fill(op: str, output: Tensor, input: Tensor) -> None:
    """Copy an input of the same size and dtype to where an operation that works in place expects it."""
    if output is input:
        return
    shapes: Sequence[Any] = [(tuple(t.size()), t.dtype) for t in (output, input)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(f"{op}: the output is {shapes[0]} and the input {shapes[1]}; they must be the same")
    with torch.no_grad():
        output.copy_(input)


def _result(work: IrisWork | None, async_op: bool) -> IrisWork | None:
    return work if async_op else None


__all__ = ["ALL_GATHER_VARIANTS", "Collectives", "Config"]
