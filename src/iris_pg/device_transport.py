"""What moves the bytes of CUDA tensors between the ranks of one group: a heap on the GPU, flags in host memory, and
programs run by streams.

Made by the first operation on a CUDA tensor, which all ranks of the group take part in. Keys, flows and programs are
those of CPU tensors (transport.py).

An operation runs on the caller's current stream, or, when it is asynchronous, on the group's own stream, which waits
for the current one first. Operations of a group are done in the order of calls, on whatever streams: flags are
mailboxes with one writer at a time. Under capture everything runs on the caller's stream, in one chain, and nothing
that is captured depends on what ran before, so a graph can be replayed among eager calls. Replays have to be in one
order with the group's other operations, on all ranks, which they are when streams put them in one.

An operation that fails to be put on its stream, as a whole, fails the group.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from iris_pg.collectives.barrier import barrier
from iris_pg.collectives.flow import Flow, Fold, largest_part
from iris_pg.collectives.setting import Setting
from iris_pg.copy_engine.stream import Joins
from iris_pg.device_copies import DeviceCopies, Prepared
from iris_pg.device_exchanges import (
    DeviceExchanges,
    PreparedBoth,
    PreparedExchanges,
    check_comm_sms,
    has_reduction,
    last_resort_s,
)
from iris_pg.device_messages import DeviceMessages, MailLane
from iris_pg.device_operation import DeviceOperation
from iris_pg.device_page import DevicePage
from iris_pg.device_queues import DeviceQueues, make_queues, try_streams, words_for
from iris_pg.device_watchdog import Captured, Watchdog
from iris_pg.device_work import End, Held, Lane, StreamWork, raw_stream, stream_of
from iris_pg.errors import ArgumentError, ClosedError, IrisError, UnsupportedError, where
from iris_pg.flags import MAIL_SLOTS
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.memory.sharing import Links
from iris_pg.options import Options
from iris_pg.planner import engine_for, pair_limit, uses_kernels, words_of_table
from iris_pg.platforms.gpu import platform as gpu
from iris_pg.program import Program
from iris_pg.transport import BARRIER
from iris_pg.watch import Key, Watch, text_of

_LOOK_FROM = 8  # operations on the caller's stream, from which it is looked whether they are done
_AT_EXIT_S = 5.0  # longest time that operations get to end by themselves when the process ends

_open_transports: weakref.WeakSet[DeviceTransport] = weakref.WeakSet()
_abandoned: list[DeviceTransport] = []


class DeviceTransport(DeviceMessages):
    """Operations on tensors of one GPU, for one group. Collective to make.

    Args:
        links: the group's links.
        options: the group's options.
        timeout_s: deadline of every wait.
        device: this rank's GPU.
        tensors: the heap of the user's tensors, when it is not the transport's own.

    Attributes:
        heap: symmetric memory on the GPU; outputs in it are written by peers directly.

    Raises:
        UnsupportedError: cuda-bindings or rocm-xio is missing, GPUs cannot access each other's memory, or streams of
            an AMD GPU do not do what they are told. Else as :class:`SymmetricHeap`.
    """

    def __init__(
        self,
        links: Links,
        options: Options,
        timeout_s: float,
        device: torch.device,
        tensors: SymmetricHeap | None = None,
    ) -> None:
        self.links, self.rank, self.world, self.device = links, links.rank, links.world, device
        self.engine, self.reason = engine_for(options.engine, "cuda")
        self._chunk_bytes, self._comm_sms = options.device_chunk_bytes, options.comm_sms
        self._requested = options.engine
        memory = self._agree_on_devices()
        # Words: collectives, messages to each rank, messages from each rank, graphs.
        words = 2 + 2 * self.world
        self._page = page = DevicePage(links, words + (words_for(self.world) if torch.version.hip else 0))
        self._copies = DeviceCopies(page, device, self._chunk_bytes, options.comm_sms)
        self._exchanges = None if self._requested == "sdma" else DeviceExchanges(page, device, options.comm_sms)
        self._uses_kernels: dict[Key, bool] = {}
        self._kernels = None
        try:
            areas = self._copies.areas(only_messages=self._requested == "cu")
            areas |= self._exchanges.areas() if self._exchanges else {}
            self.heap = SymmetricHeap(links, options.heap_bytes, areas, memory)
            self.tensors = tensors or self.heap
            self._copies.use(self.heap, self.tensors)
            if self._exchanges:
                self._kernels = self._exchanges.use(self.heap, self.tensors, timeout_s)
                links.exchange({}, what="create the cu engine for CUDA tensors")
        except BaseException:
            page.close()
            raise
        self._lane = Lane(page.reader(0), lambda peer: page.word_of(peer, 0))
        graphs = 1 + 2 * self.world
        self._captured = Captured(page.reader(graphs), page.address_of_word(graphs))
        self.watch = Watch(page.heap, lambda: self._lane.done)
        self._queues: DeviceQueues | None = None
        self._copying = ""
        if torch.version.hip and self._requested != "cu":
            try:
                try_streams(self.heap, page, words, self._copies.mail_bytes, timeout_s)
            except UnsupportedError as error:
                if self._requested == "sdma":
                    raise
                self._requested, self.engine = "cu", "cu"
                self.reason, self._copying = "copy engines failed their trial", f"not used: {error}"
            if self._requested == "sdma":
                made = make_queues(page, words, self._places, timeout_s, self.watch.check_open)
                self._queues, self._copying = made
                self._copies.queues = self._queues
        self._lock = threading.RLock()  # operations are numbered and put on streams in one order
        self._index, self._side = device.index, torch.cuda.Stream(device)
        self._raw_side = self._side.cuda_stream
        self._joins, self._events = Joins(), list[torch.cuda.Event]()
        self._last: dict[bool, int | None] = {False: None, True: None}  # was it captured -> the last one's stream
        self._lanes = [self._lane]
        self._mail: dict[tuple[str, int], MailLane] = {}
        self._handles: dict[int, Any] = {}
        self._is_fork = self._is_closed = False
        looked_after = (self.watch, page, self._lanes, self._captured, self._lock, self._kernels)
        self._watchdog = Watchdog(*looked_after, timeout_s, f"iris_pg {links.group} watchdog")
        _open_transports.add(self)

    def _agree_on_devices(self) -> gpu.DeviceMemory:
        """Make this rank's platform and check that the GPUs of all ranks can access each other."""
        problem, memory = None, None
        try:
            memory = gpu.DeviceMemory(self.device)
            if self._requested != "sdma":
                check_comm_sms(self._comm_sms, self.device)
        except IrisError as error:
            problem = str(error)
        card = dict(problem=problem, place=memory and memory.place, chunk_bytes=self._chunk_bytes, engine=self.engine)
        messages = self.links.exchange(card, what="create the group's transport for CUDA tensors")
        self._places = [str(m.payload["place"]) for m in messages]
        for peer, said in enumerate(m.payload for m in messages):
            if said["problem"]:
                raise UnsupportedError(f"CUDA tensors, on rank {peer}: {said['problem']} {self._where()}")
            if said["chunk_bytes"] != self._chunk_bytes:
                raise ArgumentError(
                    f"rank {self.rank} has device_chunk_bytes={self._chunk_bytes} and rank {peer} "
                    f"{said['chunk_bytes']}; options are the same on all ranks {self._where()}"
                )
            if not gpu.can_reach(self.device, said["place"]):
                raise UnsupportedError(
                    f"rank {self.rank}'s {self.device} cannot access the memory of rank {peer}'s GPU; an iris group "
                    "needs GPUs with peer access (NVLink, or PCIe peer to peer; see `nvidia-smi topo -p2p rw`); use "
                    f"another backend for them {self._where()}"
                )
        assert memory
        return memory

    # Operations -------------------------------------------------------------------------------------------------------

    def perform(
        self,
        what: DeviceOperation,
        outputs: list[Any],
        asynchronous: bool = False,
        keep: Any = None,
        after: Callable[[], Any] | None = None,
        program: Callable[[Setting], Program] | None = None,
        blocks: bool = False,
    ) -> StreamWork | None:
        """Put an operation on a stream. Return its work if it is asynchronous; else there is nothing to wait for, and
        :meth:`work` makes one for who wants it.

        Args:
            what: the operation; it may have been performed before.
            outputs: what the work gives.
            asynchronous: on the group's stream and not on the current one.
            keep: tensors to keep until the work is done.
            after: called with the operation's stream current, behind the operation.
            program: builds the program, when it is not what the flow says.
            blocks: ``wait`` of the work waits on the host.

        Raises:
            ClosedError: the group has failed or was closed before. DriverError: the driver does not take a call.
        """
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self.device):
                return self.perform(what, outputs, asynchronous, keep, after, program, blocks)
        watch, key = self.watch, what.key
        with self._lock:
            if watch.failure or watch.hears_failure():
                self._check_usable(key)
            captures = torch._C._cuda_isCurrentStreamCapturing()
            # Before anyone is told that the operation has begun: what is wrong with it is an error and no more.
            prepared = what.launches or self._prepare(what, program, captures)
            lane, end, held, raw = self._lane, None, None, raw_stream(self.device)
            watch.begin(key, None if captures else lane.count + 1, what.tag)
            try:
                if captures:
                    self._capture(key, prepared, after)
                    return self.work(outputs) if asynchronous else None
                if asynchronous:
                    held, side = Held(keep), self._side
                    self._joins.join(self._raw_side, raw)
                    raw = self._raw_side
                if self._last[False] != raw:
                    self._follow(raw, False)
                handle = self._handles.get(raw) or self._handle(raw)
                if asynchronous and after:
                    with torch.cuda.stream(side):
                        prepared.launch(handle, lane.next, after)
                else:
                    prepared.launch(handle, lane.next, after)
                if asynchronous:
                    end = End(side, self._events)
            except BaseException as error:  # peers wait for an operation that this rank may have begun by half
                watch.give_up(error)
                raise
            lane.add(key, prepared.program, held)
            if asynchronous or (len(lane) > _LOOK_FROM and lane.count % _LOOK_FROM == 0):
                lane.oldest()
            return StreamWork(outputs, self.device, raw, end, self._failed_with, held, blocks) if asynchronous else None

    def work(self, outputs: list[Any], blocks: bool = False, is_in_line: bool = True) -> StreamWork:
        """Return the work of what was put on the current stream last. Arguments as of :class:`StreamWork`."""
        raw = raw_stream(self.device)
        return StreamWork(outputs, self.device, raw, None, self._failed_with, None, blocks, is_in_line)

    def _prepare(
        self, what: DeviceOperation, program: Callable[[Setting], Program] | None, captures: bool
    ) -> Prepared | PreparedExchanges | PreparedBoth:
        if what.ready and not program:  # it was copies before
            return self._copies.operation(what, self.watch.sequence + 1, None, captures)
        if self._exchanges and not program:
            most = pair_limit(self._requested, str(what.key[0]))
            if most is not None and self.world > 1:
                return self._prepare_pairs(self._exchanges, what, most, captures)
            if self._is_for_kernels(what.key, what.local, what.flow):
                what.launches = self._exchanges.operation(what)
                return what.launches
        return self._copies.operation(what, self.watch.sequence + 1, program, captures)

    def _prepare_pairs(
        self, exchanges: DeviceExchanges, what: DeviceOperation, most: int, captures: bool
    ) -> Prepared | PreparedExchanges | PreparedBoth:
        """Prepare an operation that is kernels between some ranks, and copies between others."""
        small, large = what.split(most)
        if large.local.is_empty:
            what.launches = exchanges.operation(small)
            return what.launches
        copies = self._copies.operation(large, self.watch.sequence + 1, None, captures)
        return copies if small.local.is_empty else PreparedBoth(exchanges.operation(small), copies)

    def _check_usable(self, key: Key) -> None:
        """Raise when the group has failed. A peer that gave up released its streams, so flags may have been signalled
        for an operation that this rank is about to begin, and what it would receive is not to be used.
        """
        watch = self.watch
        watch.check_open()
        if watch.hears_failure():
            try:
                watch.check_failed(text_of(key), self._where(str(key[0])))
            except IrisError as error:
                watch.give_up(error)
                raise

    def _is_for_kernels(self, key: Key, local: Any, flow: Callable[[Key, Any], Flow | Fold]) -> bool:
        """Return whether an operation is of the cu engine; all ranks decide alike."""
        if self._requested == "cu" or self.world == 1:
            return self._requested == "cu"
        answer = self._uses_kernels.get(key)
        if answer is None:
            if len(self._uses_kernels) > 4096:
                self._uses_kernels.clear()
            made = flow(key, local)
            answer = uses_kernels(self._requested, str(key[0]), largest_part(made))
            if isinstance(made, Fold) and not has_reduction(made.op, made.dtype):
                answer = False
            self._uses_kernels[key] = answer
        return answer

    def _capture(
        self,
        key: Key,
        prepared: Prepared | PreparedExchanges | PreparedBoth,
        after: Callable[[], Any] | None,
        is_in_line: bool = True,
    ) -> None:
        """Put an operation on the current stream, which is being captured."""
        raw = raw_stream(self.device)
        if is_in_line:
            self._follow(raw, True)
        self._captured.launch(key, prepared, self._handle(raw), after)

    def _follow(self, raw: int, captures: bool) -> None:
        """Let a stream wait for the operation before, if that ran on another one.

        A graph is replayed at other times. So what is captured follows only what the same graph holds, and other
        operations follow each other.
        """
        last = self._last[captures]
        if last is not None and last != raw:
            if not captures or _is_capturing(stream_of(self.device, last)):
                self._joins.join(raw, last)
        self._last[captures] = raw

    def _handle(self, raw: int) -> Any:
        handle = self._handles.get(raw)
        if handle is None:
            if len(self._handles) > 1024:
                self._handles.clear()
            handle = self._handles[raw] = gpu.stream_handle(raw)
        return handle

    def barrier(self, asynchronous: bool = False) -> StreamWork:
        """Return the work of a barrier: done when every rank's stream has come to it; its ``wait`` waits on the host.

        Where there are kernels a word goes from every rank to every other, in one launch. Else it is flags alone, both
        rounds at once, and not in turn as on CPUs: a captured barrier is the same at every replay.
        """

        def both(s: Setting) -> Program:
            return barrier(s, 0).then(barrier(s, 1))

        blocks = not torch.cuda.is_current_stream_capturing()
        if self._exchanges:
            what = DeviceOperation(BARRIER, None, self._exchanges.barrier_flow, *self._exchanges.barrier_buffers)
            work = self.perform(what, [], asynchronous, blocks=blocks)
        else:
            what = DeviceOperation(BARRIER, None, lambda key, local: Flow("barrier"), (), ())
            work = self.perform(what, [], asynchronous, program=both, blocks=blocks)
        return self.work([], blocks) if work is None else work

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of operations begun."""
        return self.watch.sequence

    def _failed_with(self) -> BaseException | None:
        return self.watch.failure

    def _where(self, op: str | None = None) -> str:
        return where(group=self.links.group, rank=self.rank, op=op)

    def explain(self) -> str:
        """Return what was chosen for CUDA tensors, and why, in words."""
        return "\n".join(
            (
                f"group {self.links.group}: rank {self.rank} of {self.world}, CUDA tensors on {self.device}",
                f"  engine    {self.engine} ({self.reason})",
                *([f"            {words_of_table()}"] if self._requested == "auto" else []),
                f"  heap      {self.heap.limit_bytes} bytes a rank for tensors; peers write outputs and read inputs "
                "in it directly (zero copy)",
                *([f"  copies    {self._copying}"] if self._copying else []),
                f"  kernels   at most {self._comm_sms} CTAs each (comm_sms)"
                + ("" if self._exchanges else ", and only where something is added"),
                f"  elsewhere through landing slots of {self._chunk_bytes} bytes",
                f"  messages  are matched by their order, and go through {MAIL_SLOTS} slots of "
                f"{self._copies.mail_bytes} bytes for each pair of ranks",
            )
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of later waits, but for those of launches that are captured, or in an operation that was
        made before.
        """
        self._watchdog.timeout_s = timeout_s
        if self._kernels and self._exchanges:
            self._kernels.timeout_s = last_resort_s(timeout_s)
            self._exchanges.close()

    def close(self, why: str = "closed", patience_s: float | None = None) -> None:
        """Drop the heap, once nothing uses it any more. Idempotent.

        Operations that are under way get time to end by themselves. When it is over, or the group has failed, what they
        wait for is written.

        Args:
            patience_s: how much time; the group's deadline when None.
        """
        if self._is_fork or self._is_closed:
            return
        self._is_closed = True
        patience_s = self._watchdog.timeout_s if patience_s is None else patience_s
        is_over = self._come_to_an_end(patience_s)
        watch = self.watch
        watch.failure = watch.failure or ClosedError(f"the group was closed ({why}) {self._where()}")
        self._watchdog.stop()
        if self._queues and not self._queues.close():
            is_over = False
        if not is_over:
            _abandoned.append(self)  # a GPU may still use the memory: it stays for as long as the process
            return
        with self._lock:
            self._copies.close()
            if self._exchanges:
                self._exchanges.close()
            for lane in self._lanes:
                lane.drop()
            self._mail.clear()
            self._page.close()
            self.heap.close()

    def _come_to_an_end(self, patience_s: float) -> bool:
        """Wait for the GPU, and release its streams when that takes longer; return whether it is done."""
        done = threading.Thread(target=torch.cuda.synchronize, args=(self.device,), daemon=True)
        done.start()
        deadline = time.monotonic() + patience_s
        while done.is_alive() and not self.watch.failure and time.monotonic() < deadline:
            done.join(0.01)
        return self._watchdog.release(lambda: not done.is_alive())

    def _forget(self) -> None:
        """In a forked child, which has no context of the GPU: touch nothing."""
        self._is_fork = True
        self._lock = threading.RLock()  # whoever held it lives in the parent
        self.watch.failure = ClosedError(
            "this process is a fork of the one that created the group, and cannot use it; make a group of its own "
            f"{self._where()}"
        )


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _after_fork_in_child() -> None:
    for transport in list(_open_transports):
        transport._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    """Release what would keep the process from ending: the driver waits for streams when it does."""
    for transport in list(_open_transports):
        transport.close("the process ends", _AT_EXIT_S)
