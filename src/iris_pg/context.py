"""The one-sided API on the host: a context with a symmetric heap, and transfers that only the sender asks for.

::

    with iris(heap_size=1 << 30, engines=("sdma",)) as ctx:  # collective
        batch = ctx.zeros(4096)  # collective: at the same place of every rank's heap
        arrived = ctx.zeros(1, dtype=torch.int32)
        ctx.put(batch, to_rank=1, signal_flag=arrived)  # rank 1 does nothing, and then sees arrived == 1

Names, order and defaults are those of ROCm/iris. A transfer is a batch of copy-engine packets, reserved together: poll
a flag here, copy, add to a flag there; so nobody sees the signal before the copy. Transfers to one rank on one channel
run in order. The memory of a rank that has died stays where it is mapped: putting there is harmless.

Making a context, heap tensors, :meth:`Iris.barrier` and :meth:`Iris.broadcast` are collective: all ranks call them, in
the same order. Everything else concerns this rank alone, and may be called from any thread.
"""

from __future__ import annotations

import atexit
import functools
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from iris_pg.collective_api import Collectives
from iris_pg.copy_engine.channels import Channels
from iris_pg.copy_engine.one_sided import Encoder
from iris_pg.errors import ArgumentError, ClosedError, OptionError, PeerLostError, UnsupportedError, where
from iris_pg.memory import objects
from iris_pg.memory.factories import HeapTensors
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.options import Options
from iris_pg.rendezvous import meet

if TYPE_CHECKING:
    from iris_pg.device.all_gather import KernelGather
    from iris_pg.device_channels import CudaChannels, DeviceChannels
    from iris_pg.device_page import DevicePage
    from iris_pg.triggered import Send, TriggeredPlan

ENGINES = ("sdma",)

Tensor = torch.Tensor

_open_contexts: weakref.WeakSet[Iris] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Stop the threads of contexts that were not closed, as in transport.py."""
    for context in list(_open_contexts):
        context.close()


def iris(heap_size: int = 1 << 30, engines: Sequence[str] = (), device: torch.device | str | None = None) -> Iris:
    """Return a new one-sided context of the default process group, or else of torchrun's ranks. Collective.

    With neither a process group nor torchrun's variables it is a context of one rank. No group is made or changed.
    ``IRIS_PG_TIMEOUT`` and ``IRIS_PG_HOSTILE_SEED`` apply; the deadline is else the group's.

    Args:
        heap_size: most bytes of heap tensors per rank; mapped as they are used.
        engines: ``("sdma",)`` for puts: it starts the copy engine and its thread. Without it there are the heap, its
            tensors, and device code.
        device: where the heap is: the CPU, or this rank's GPU; when None the current GPU, or the CPU where there is
            none. On NVIDIA GPUs a transfer follows what the current
            stream was told before, and a signal is a kernel of one thread; what kernels put, a thread of the host has
            the copy engines do (docs/device_api.md). On AMD GPUs ``"sdma"`` is rocm-xio, its one channel to a rank is
            0, and a transfer reads what streams have done: call ``torch.cuda.synchronize()`` before it.

    Raises:
        UnsupportedError: GPUs that cannot access each other's memory, or what cuda-bindings or rocm-xio lacks.
        OptionError: an engine that does not exist, a bad size, or half of torchrun's variables.
        DeadlineError, PeerLostError: a rank did not come, or died. MismatchError: ranks ask for different sizes.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return Iris(heap_size, engines, torch.device(device))


class Iris(HeapTensors):
    """A one-sided context; :func:`iris` makes it. ``ctx.zeros`` and the like are those of :class:`HeapTensors`.

    Attributes:
        heap: the symmetric heap, with ``translate``, ``is_symmetric`` and ``free``.
        cur_rank, num_ranks: this rank, and how many there are.
    """

    def __init__(self, heap_size: int, engines: Sequence[str], device: torch.device) -> None:
        if not isinstance(heap_size, int) or heap_size <= 0:
            raise OptionError(f"heap_size={heap_size!r}; it takes a positive number of bytes")
        if isinstance(engines, str) or any(engine not in ENGINES for engine in engines):
            raise OptionError(f"engines={engines!r}; it takes a sequence of names, and {ENGINES} has all of them")
        options, memory = Options(), None
        if device.type != "cpu":
            from iris_pg.device_channels import memory_on  # and what GPUs need

            memory = memory_on(device)
        try:
            store, self.cur_rank, self.num_ranks, timeout_s, number = meet(options.timeout_s)
            self._links = Links(store, self.cur_rank, self.num_ranks, group=f"iris/{number}", timeout_s=timeout_s)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise PeerLostError(
                f"the process that keeps the ranks' store is gone, or was never there: {error}"
            ) from error
        try:
            self.heap = SymmetricHeap(self._links, heap_size, memory=memory)
            self._encoder = Encoder(self.heap)
            self._holding = threading.Lock()
            self._held: dict[tuple[int, int], TriggeredPlan] = {}  # who holds a rank's channel
            self._kept: list[Any] = []  # memory of plans that engines may still look at
            self._pages: list[DevicePage] = []  # of plans that were not closed
            self._channels: Channels | CudaChannels | DeviceChannels | None = None
            if "sdma" in engines and memory is None:
                self._channels = Channels(self.heap, timeout_s, options.hostile_seed)
            elif "sdma" in engines and memory:
                from iris_pg.device_channels import channels_on

                self._channels = channels_on(self.heap, memory.place, timeout_s)
        except BaseException as error:
            self._links.close("set-up failed", error)
            raise
        _open_contexts.add(self)

    # Transfers --------------------------------------------------------------------------------------------------------

    def put(
        self,
        from_tensor: Tensor,
        to_rank: int,
        to_tensor: Tensor | None = None,
        wait_flag: Tensor | None = None,
        wait_value: int | None = None,
        signal_flag: Tensor | None = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
    ) -> None:
        """Copy ``from_tensor`` to where ``to_tensor`` lies on ``to_rank``.

        Args:
            from_tensor: contiguous, in this rank's heap. Without elements nothing is copied; the flags still work.
            to_rank: whose memory is written; may be this rank.
            to_tensor: this rank's tensor at the place to be written there, as many elements of the same dtype as
                ``from_tensor``, which it is when None.
            wait_flag: one int32 or int64 in this rank's heap; the copy waits until its low 32 bits, unsigned, are
                >= ``wait_value``.
            wait_value: 0..2**32-1; given with ``wait_flag``.
            signal_flag: this rank's tensor at the place of the flag there; one int32 or int64.
            signal_value: added atomically to that flag on ``to_rank`` when the copy has landed.
            async_op: return at once; ``from_tensor`` may be written again after :meth:`quiet`.
            channel: 0..7. A wait holds up what was put to the same rank on the same channel after it.

        Raises:
            ArgumentError: a tensor, flag, rank or channel that does not fit. Nothing has moved.
            UnsupportedError: the context has no copy engine, a tensor is not where its heap is, or a graph is captured.
            DeadlineError: the wait was in vain; with a dump of the queue, which takes nothing more.
            ClosedError: the context is closed, or the queue has failed before.
        """
        channels = self._engine("put", to_rank, channel)
        wait = self._encoder.wait("put", wait_flag, wait_value)
        copies = self._encoder.put("put", from_tensor, to_rank, to_tensor)
        signal = self._encoder.signal("put", signal_flag, signal_value, to_rank)
        channels.submit("put", to_rank, channel, [*wait, *copies, *signal], not async_op)

    def put_tile(
        self,
        global_addr: int,
        to_rank: int,
        dst_addr: int,
        data_size: int,
        tile_height: int,
        tile_width: int,
        src_stride: int,
        dst_stride: int,
        wait_flag: Tensor | int | None = None,
        wait_value: int | None = None,
        signal_flag: int | None = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
    ) -> None:
        """Copy a rectangle of elements to ``to_rank``'s heap. All that is not named here is as in :meth:`put`.

        Args:
            global_addr: address of the tile's first element, in this rank's heap.
            dst_addr: address of its place in ``to_rank``'s heap as mapped here, from ``heap.translate``.
            data_size: bytes of an element.
            tile_height, tile_width: rows, and elements in a row. With none nothing is copied; the flags still work.
            src_stride, dst_stride: elements from the start of a row to the start of the next; 0 means ``tile_width``.
            wait_flag: address of a 32-bit flag in this rank's heap, or of the low half of a 64-bit one; or a tensor.
            signal_flag: address of a 32-bit flag in ``to_rank``'s heap as mapped here.
        """
        channels = self._engine("put_tile", to_rank, channel)
        lists = dict(
            global_addr=[global_addr],
            dst_addr=[dst_addr],
            tile_height=[tile_height],
            tile_width=[tile_width],
            src_stride=[src_stride],
            dst_stride=[dst_stride],
        )
        wait = self._encoder.wait("put_tile", wait_flag, wait_value)
        copies = self._encoder.tiles("put_tile", to_rank, data_size, lists)
        signal = self._encoder.signal("put_tile", signal_flag, signal_value, to_rank)
        channels.submit("put_tile", to_rank, channel, [*wait, *copies, *signal], not async_op)

    def put_tiles(
        self,
        global_addrs: Sequence[int],
        to_rank: int,
        dst_addrs: Sequence[int],
        data_size: int,
        tile_heights: Sequence[int],
        tile_widths: Sequence[int],
        src_strides: Sequence[int],
        dst_strides: Sequence[int],
        wait_flag: Tensor | int | None = None,
        wait_value: int | None = None,
        signal_flag: int | None = None,
        signal_value: int = 1,
        async_op: bool = False,
        channel: int = 0,
    ) -> None:
        """Copy several rectangles: one wait before all of them, one signal after all.

        The lists are equally long, any length; else as :meth:`put_tile`.
        """
        channels = self._engine("put_tiles", to_rank, channel)
        lists = dict(
            global_addrs=global_addrs,
            dst_addrs=dst_addrs,
            tile_heights=tile_heights,
            tile_widths=tile_widths,
            src_strides=src_strides,
            dst_strides=dst_strides,
        )
        wait = self._encoder.wait("put_tiles", wait_flag, wait_value)
        copies = self._encoder.tiles("put_tiles", to_rank, data_size, lists)
        signal = self._encoder.signal("put_tiles", signal_flag, signal_value, to_rank)
        channels.submit("put_tiles", to_rank, channel, [*wait, *copies, *signal], not async_op)

    def quiet(self, to_rank: int | None = None, channel: int = 0) -> None:
        """Return when all that this process has put on ``channel`` so far, to ``to_rank`` or to every rank, has landed.

        Raises:
            DeadlineError, QueueError, PacketError: what an asynchronous transfer failed with.
            ArgumentError, UnsupportedError, ClosedError: as :meth:`put`.
        """
        ranks = range(self.num_ranks) if to_rank is None else (to_rank,)
        for rank in ranks:
            channels = self._engine("quiet", rank, channel)
        channels.quiet(to_rank, channel)

    def get_copy_engine_ctx(self) -> Tensor | None:
        """Return what kernels need for puts through the copy engine, uint64 [num_ranks, 6] on the heap's device; None
        without the copy engine.

        A row is the queue to that rank on channel 0: queue buffer, read pointer, write pointer, doorbell, cached write
        pointer, committed write pointer.
        """
        self._check_open("get_copy_engine_ctx")
        if not self._channels:
            return None
        return torch.tensor(self._channels.contexts(), dtype=torch.uint64).to(self.heap.device)

    def triggered(self, batches: Sequence[Sequence[Send]], channel: int | None = None) -> TriggeredPlan:
        """Return a plan of transfers that kernels let go, batch by batch; see :mod:`iris_pg.triggered`. Collective.

        Args:
            batches: what this rank sends in each batch; as many on all ranks.
            channel: of the copy engine; the last one when None. While the plan is armed nothing else is put on it to
                the ranks that the plan sends to.

        Raises:
            ArgumentError: a transfer that does not fit, or more packets than half a ring holds.
            UnsupportedError: the context has no copy engine. MismatchError: ranks ask for different plans.
        """
        from iris_pg.copy_engine.channels import CHANNELS
        from iris_pg.triggered import TriggeredPlan

        self._engine("triggered", self.cur_rank)
        last = 0 if self.heap.device.type == "cuda" and torch.version.hip else CHANNELS - 1
        return TriggeredPlan(self, batches, last if channel is None else channel)

    # The ranks --------------------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return this rank."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.num_ranks

    def get_heap_bases(self) -> Tensor:
        """Return where each rank's heap is mapped in this process, uint64 [num_ranks] on the heap's device."""
        return torch.tensor(self.heap.bases, dtype=torch.uint64).to(self.heap.device)

    def get_device_context(self) -> Tensor:
        """Return what a DeviceContext is made from, int64 [2 + num_ranks] on the heap's device: cur_rank, num_ranks,
        heap bases.
        """
        return torch.tensor([self.cur_rank, self.num_ranks, *self.heap.bases], dtype=torch.int64).to(self.heap.device)

    def barrier(self) -> None:
        """Return when every rank has entered. It does not wait for transfers: call :meth:`quiet` first. Collective.

        Raises:
            DeadlineError, PeerLostError: naming the rank that did not come.
            MismatchError: ranks are in different calls.
        """
        self._links.exchange({}, what="barrier")

    def broadcast(self, value: Any, src: int) -> Any:
        """Return rank ``src``'s ``value``, any object that pickles; other ranks' are ignored. Collective.

        Tensors arrive as new ordinary tensors; on ``src`` it is ``value`` itself.

        Raises:
            ArgumentError: no such rank, or a value that does not pickle. Else as :meth:`barrier`.
        """
        self._check_rank("broadcast", "src", src)
        sent = value
        if isinstance(value, Tensor) and src == self.cur_rank:
            sent = value.detach().clone()  # the part of its storage that it shows, and no more
        received = objects.broadcast(self._links, sent, src)
        return value if src == self.cur_rank else received

    @functools.cached_property
    def ccl(self) -> Collectives:
        """The context's collectives: ``ctx.ccl.all_gather(output, input)`` and the like."""
        self._check_open("ccl")
        return Collectives(self._links, self.heap, self._kernel_gather)

    def _kernel_gather(self) -> KernelGather:
        from iris_pg.device.all_gather import KernelGather

        engine = self.get_copy_engine_ctx()
        if engine is None:
            raise UnsupportedError(
                "all_gather: all_gather_variant='kernel_puts' needs the copy engine; make the context with "
                f"iris(..., engines=('sdma',)) {self._where()}"
            )
        flags = self.zeros(2, self.num_ranks, 8, dtype=torch.int64)
        return KernelGather(self.heap, flags, self.get_heap_bases(), engine)

    # Life -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the context on this rank. Idempotent, and not collective.

        Transfers that :meth:`quiet` has not waited for may be dropped. Heap tensors can be used as long as they live,
        but reach no peer. Other ranks notice only when they make a collective call.
        """
        if self._links.closed:
            return
        if "ccl" in self.__dict__:
            self.ccl.close()
        if self._channels:
            self._channels.close(ClosedError(f"the context was closed {self._where()}"))
        if self._pages:
            torch.cuda.synchronize(self.heap.device)  # streams may write there
            for page in self._pages:
                page.close()
        self.heap.close()
        self._links.close("closed")

    def __enter__(self) -> Iris:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Iris {self._links.group}, rank {self.cur_rank} of {self.num_ranks}>"

    def _hold(self, plan: TriggeredPlan, channel: int, peers: Sequence[int]) -> None:
        """Keep a channel to some ranks for a plan."""
        with self._holding:
            for peer in peers:
                if (peer, channel) in self._held:
                    raise ArgumentError(
                        f"triggered: another plan is armed on channel {channel} to rank {peer}, and what is behind it "
                        f"in the queue would wait for its gates; wait for that plan first, or use another channel "
                        f"{self._where()}"
                    )
            self._held |= {(peer, channel): plan for peer in peers}

    def _give_back(self, plan: TriggeredPlan) -> None:
        with self._holding:
            self._held = {place: held for place, held in self._held.items() if held is not plan}

    def _engine(self, op: str, to_rank: int, channel: int = -1) -> Channels | CudaChannels | DeviceChannels:
        """Return the copy engine's queues, when ``op`` to ``to_rank`` is possible."""
        self._check_open(op)
        if self._channels is None:
            raise UnsupportedError(
                f'{op}: this context has no copy engine; make it with iris(engines=("sdma",)) {self._where()}'
            )
        self._check_rank(op, "to_rank", to_rank)
        if (to_rank, channel) in self._held:
            raise ArgumentError(
                f"{op}: a triggered plan is armed on channel {channel} to rank {to_rank}, and what is behind it in the "
                f"queue would wait for its gates; wait for the plan first, or use another channel {self._where()}"
            )
        return self._channels

    def _check_rank(self, op: str, name: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise ArgumentError(
                f"{op}: {name}={rank!r} is not a rank of this context; it takes 0..{self.num_ranks - 1} {self._where()}"
            )

    def _check_open(self, op: str) -> None:
        if self._links.closed:
            raise ClosedError(f"{op}: the context is closed ({self._links.closed}) {self._where()}")

    def _where(self) -> str:
        return where(group=self._links.group, rank=self.cur_rank)


__all__ = ["ENGINES", "Iris", "iris"]
