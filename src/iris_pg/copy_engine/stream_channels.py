"""The queues of one rank's one-sided transfers on NVIDIA GPUs: a stream for each target rank and channel.

A copy is a driver call, which a copy engine carries out. A signal is a kernel of one thread that adds to the flag
(increase.py), as a stream has no atomic operation. A wait is the host's: a thread reads the flag until it is there, and
only then gives the stream what follows. A stream could wait too, but not for unsigned numbers, and not with a deadline
after which nothing moves. A flag of the GPU's memory takes a copy to look at; gates of triggered plans are in memory of
the host, and seen within a microsecond (gated.py).

A transfer follows what the caller's current stream was told before it. The current stream does not wait for the
transfer: :meth:`StreamChannels.quiet` does, and a transfer that is not asynchronous.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from iris_pg.copy_engine.calls import Call, Count, Increase, Linear, Poll
from iris_pg.copy_engine.channels import CHANNELS
from iris_pg.copy_engine.gated import Gated, advance
from iris_pg.copy_engine.increase import increase
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, DriverError, IrisError, UnsupportedError, where
from iris_pg.memory.heap import SymmetricHeap
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.gpu import platform as gpu

_SHORT_S, _LONG_S = 20e-6, 1e-3  # seconds between two looks at a flag: at first, and when it takes long
_YIELD_S = 200e-6  # how long a wait does not sleep
_SPIN_S = 10e-3  # how long gates are looked at without a pause
_TURNS = 1 << 16  # looks at them, about 100 us, before Python runs again
_END_S = 5.0  # longest time that the thread gets to end


class _Transfer:
    """What one call asks for: perhaps to wait for a flag, then calls, behind an event of the caller's stream.

    Args:
        stream: torch's handle of the queue's stream.
    """

    def __init__(self, calls: Sequence[Call], event: torch.cuda.Event, stream: int) -> None:
        self.poll = calls[0] if isinstance(calls[0], Poll) else None
        self.gated = Gated(calls, stream) if self.poll and self.poll.in_host else None
        self.calls = calls[1:] if self.poll else calls
        self.event: torch.cuda.Event | None = event  # None once the queue's stream waits for it
        self.since, self.at = time.monotonic(), 0  # when it became the first of its queue, or went on, and how far
        self.end: torch.cuda.Event | None = None  # behind it, once it is on the stream
        self.error: IrisError | None = None
        self.is_told = threading.Event()  # on the stream, or failed


class _Queue:
    """Transfers to one rank on one channel, in order."""

    def __init__(self, device: torch.device, peer: int, channel: int) -> None:
        self.peer, self.channel = peer, channel
        # Not of the priority of kernels that may wait for a transfer: streams of one priority share a few queues of the
        # hardware, in which a transfer might stand behind such a kernel.
        self.stream = torch.cuda.Stream(device, priority=-8)  # torch takes the nearest that there is
        self.handle = gpu.stream_handle(self.stream.cuda_stream)
        self.lock = threading.Lock()
        self.waiting: deque[_Transfer] = deque()
        self.last: _Transfer | None = None
        self.fault: IrisError | None = None


class StreamChannels:
    """Queues from this rank to every rank of the group, itself included.

    Args:
        heap: on a GPU; where transfers read and write. Its links name the group.
        timeout_s: deadline of every wait.
    """

    def __init__(self, heap: SymmetricHeap, timeout_s: float) -> None:
        self._heap, self._timeout_s, self._device = heap, timeout_s, heap.device
        self._closed: IrisError | None = None
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._lock = threading.Lock()  # of the dictionary
        self._looks: tuple[torch.cuda.Stream, torch.Tensor] | None = None  # where the thread reads flags
        self._wake, self._stop = threading.Event(), False
        name = f"iris_pg {heap.links.group} transfers"
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """Put calls into a queue; with ``wait``, return when they have landed.

        Raises:
            ArgumentError: no such channel. ClosedError: the queue has failed before. UnsupportedError: under capture.
            DeadlineError: a wait took too long.
        """
        self._check_channel(op, channel)
        if not calls:
            return
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{op}: while a graph is captured; a one-sided transfer is not captured; use a collective, or put "
                f"before and after the graph {self._where()}"
            )
        queue = self._queue(to_rank, channel)
        with queue.lock:
            if queue.fault or self._closed:
                raise self._closed or ClosedError(
                    f"{op}: the queue to rank {to_rank} on channel {channel} has failed before and takes nothing more; "
                    f"use another channel or a new context. It failed with: {queue.fault} {self._where()}"
                )
            with torch.cuda.device(self._device):
                event = torch.cuda.current_stream().record_event()
                queue.last = transfer = _Transfer(calls, event, queue.stream.cuda_stream)
                if transfer.poll is None and not queue.waiting:
                    self._tell(queue, transfer)
                else:
                    queue.waiting.append(transfer)
                    self._wake.set()
        if wait:
            self._finish(transfer, op)

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """Return when what was submitted on ``channel`` before, to ``to_rank`` or to all ranks, has landed.

        Raises:
            DeadlineError: what a transfer failed with.
        """
        self._check_channel("quiet", channel)
        ranks = range(self._heap.world) if to_rank is None else (to_rank,)
        queues = [queue for rank in ranks if (queue := self._queues.get((rank, channel)))]
        for transfer in [queue.last for queue in queues]:
            if transfer:
                self._finish(transfer, "quiet")

    def check(self, to_rank: int, channel: int) -> None:
        """Raise what the queue to a rank has failed with, if it has. Does not wait."""
        queue = self._queues.get((to_rank, channel))
        if queue and queue.fault:
            raise queue.fault

    def close(self, error: IrisError) -> None:
        """Drop what waits for a flag, and end the thread. What is on a stream ends by itself."""
        self._closed, self._stop = error, True
        self._wake.set()
        self._thread.join(_END_S)
        for queue in list(self._queues.values()):
            with queue.lock:
                self._fail(queue, error)

    # ------------------------------------------------------------------------------------------------------------------

    def _tell(self, queue: _Queue, transfer: _Transfer) -> None:
        """Put a transfer on the queue's stream, with its lock held."""
        self._follow(queue, transfer)
        for call in transfer.calls:
            self._launch(call)(queue.handle)
        self._told(queue, transfer)

    @staticmethod
    def _follow(queue: _Queue, transfer: _Transfer) -> None:
        """Let the queue's stream wait for what the transfer follows."""
        if transfer.event:
            queue.stream.wait_event(transfer.event)
            transfer.event = None

    @staticmethod
    def _told(queue: _Queue, transfer: _Transfer) -> None:
        transfer.end = queue.stream.record_event()
        transfer.is_told.set()

    def _launch(self, call: Call) -> gpu.Launch:
        if isinstance(call, Linear):
            return gpu.copy(call.dst, call.src, call.nbytes)
        if isinstance(call, Increase):
            return increase(self._device, call.flag, call.value, call.bits)
        if isinstance(call, Count):
            return gpu.write(call.flag, call.value)
        assert not isinstance(call, Poll)  # one comes first, and nowhere else
        pitches = call.dst_pitch_bytes, call.src_pitch_bytes
        return gpu.copy_2d(call.dst, call.src, call.width_bytes, call.rows, *pitches)

    def _finish(self, transfer: _Transfer, op: str) -> None:
        """Return when a transfer has landed."""
        while not transfer.is_told.wait(0.1):  # the thread has the deadline of the wait
            if self._closed:
                raise self._closed
        if transfer.error:
            raise transfer.error
        assert transfer.end
        until = time.monotonic() + self._timeout_s
        for turn in _turns():
            if transfer.end.query():
                return
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{op}: a transfer has not landed {self._timeout_s} s after it was given to its stream; what the "
                    f"current stream does before it may take longer; raise the timeout {self._where()}"
                )
            turn()

    def _loop(self) -> None:
        with torch.cuda.device(self._device):
            turns, went_on = _turns(), time.monotonic()
            while not self._stop:
                with self._lock:
                    heads = [(queue, first) for queue in self._queues.values() for first in list(queue.waiting)[:1]]
                if not heads:
                    self._wake.wait()
                    self._wake.clear()
                    turns, went_on = _turns(), time.monotonic()
                    continue
                gated = [(queue, first, first.gated) for queue, first in heads if first.gated]
                spins = len(gated) == len(heads) and time.monotonic() - went_on < _SPIN_S
                advanced = [self._advance(queue) for queue, first in heads if not first.gated]
                advanced += self._go_through(gated, _TURNS if spins else 1)
                if any(advanced):
                    turns, went_on = _turns(), time.monotonic()
                elif not spins:
                    next(turns)()

    def _go_through(self, heads: Sequence[tuple[_Queue, _Transfer, Gated]], looks: int) -> list[bool]:
        """Carry out what gates let go, after ``looks`` looks at them; return of each whether there was anything."""
        for queue, transfer, _ in heads:
            self._follow(queue, transfer)
        if heads:
            advance([gated for _, _, gated in heads], looks)
        return [self._went_on(*head) for head in heads]

    def _went_on(self, queue: _Queue, transfer: _Transfer, gated: Gated) -> bool:
        with queue.lock:
            if not queue.waiting or queue.waiting[0] is not transfer:  # it was closed meanwhile
                return True
            if gated.status:
                self._fail(
                    queue, DriverError(f"a copy behind a gate failed: {gated.status} {self._where()}", gated.status)
                )
            elif gated.is_over:
                self._told(queue, transfer)
                self._next(queue)
            elif gated.at > transfer.at:
                transfer.at, transfer.since = gated.at, time.monotonic()
            elif time.monotonic() - transfer.since > self._timeout_s:
                gate = gated.gate()
                self._fail(queue, DeadlineError(self._late(queue, gate, atomics().load32(gate.flag))))
            else:
                return False
            return True

    @staticmethod
    def _next(queue: _Queue) -> None:
        queue.waiting.popleft()
        if queue.waiting:
            queue.waiting[0].since = time.monotonic()

    def _advance(self, queue: _Queue) -> bool:
        """Put on the stream what need not wait any more; return whether there was anything."""
        with queue.lock:
            transfer = queue.waiting[0]
        seen = self._read(transfer.poll.flag) if transfer.poll else 0
        with queue.lock:
            if not queue.waiting or queue.waiting[0] is not transfer:  # it was closed meanwhile
                return True
            try:
                if transfer.poll and seen < transfer.poll.value:
                    waited = time.monotonic() - transfer.since
                    if waited > self._timeout_s:
                        raise DeadlineError(self._late(queue, transfer.poll, seen))
                    return False
                self._tell(queue, transfer)
            except IrisError as error:
                self._fail(queue, error)
                return True
            self._next(queue)
            return True

    def _read(self, flag: int) -> int:
        """Return the 32-bit word at an address of the GPU's memory."""
        if self._looks is None:
            word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
            self._looks = torch.cuda.Stream(self._device, priority=-1), word
        stream, word = self._looks
        with torch.cuda.stream(stream):
            word.copy_(gpu.view(self._device, flag, 4, torch.int32), non_blocking=True)
            stream.synchronize()
        return int(word[0]) & 0xFFFFFFFF

    def _late(self, queue: _Queue, poll: Poll, seen: int) -> str:
        lost = "".join(f"; rank {rank} is gone" for rank in self._heap.links.lost())
        return (
            f"a transfer to rank {queue.peer} on channel {queue.channel} waits for a flag of rank {self._heap.rank}, "
            f"{self._heap.words_for(poll.flag)}{lost}: it has been {seen}, and not >= "
            f"{poll.value}, for {self._timeout_s} s; {len(queue.waiting)} transfers are in the queue, and none of them "
            f"has moved anything {self._where()}"
        )

    @staticmethod
    def _fail(queue: _Queue, error: IrisError) -> None:
        """Fail all that waits in a queue, with its lock held."""
        queue.fault = queue.fault or error
        while queue.waiting:
            transfer = queue.waiting.popleft()
            transfer.error = error
            transfer.is_told.set()

    def _queue(self, to_rank: int, channel: int) -> _Queue:
        with self._lock:
            queue = self._queues.get((to_rank, channel))
            if queue is None:
                queue = self._queues[to_rank, channel] = _Queue(self._device, to_rank, channel)
            return queue

    def _check_channel(self, op: str, channel: int) -> None:
        if not isinstance(channel, int) or not 0 <= channel < CHANNELS:
            raise ArgumentError(f"{op}: channel={channel!r}; it takes 0..{CHANNELS - 1} {self._where()}")

    def _where(self) -> str:
        return where(group=self._heap.links.group, rank=self._heap.rank)


def _turns() -> Iterator[Callable[[], None]]:
    """Yield what to do between two looks: at first let others have the core, then short sleeps, then long ones."""
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        pause = 0.0 if waited < _YIELD_S else _SHORT_S if waited < 10e-3 else _LONG_S
        yield functools.partial(time.sleep, pause)


__all__ = ["StreamChannels"]
