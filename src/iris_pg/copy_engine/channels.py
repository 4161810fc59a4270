"""The copy-engine queues of one rank's one-sided transfers: one for each target rank and channel, and their thread.

Transfers of one queue run in order; queues are independent of each other. A caller that waits executes its queue
inline; everything else is executed by the thread, which also sees the doorbells that device code rings.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from iris_pg.copy_engine.calls import Call
from iris_pg.copy_engine.patience import Patience
from iris_pg.copy_engine.ring import Context, Ring
from iris_pg.copy_engine.software import Queue
from iris_pg.copy_engine.thread import EngineThread
from iris_pg.copy_engine.translate import Batch
from iris_pg.errors import ArgumentError, ClosedError, IrisError, QueueError, where
from iris_pg.memory.heap import SymmetricHeap

RING_BYTES = 1 << 20  # of one queue
CHANNELS = 8  # queues of one engine on MI300X: no more channels to one rank than hardware could give


class Channels:
    """Queues from this rank to every rank of the group, itself included; channel 0 exists at once, others on first use.

    Args:
        heap: where transfers read and write; its links name the group.
        timeout_s: deadline of each poll, in seconds.
        hostile_seed: see ``IRIS_PG_HOSTILE_SEED``.
    """

    def __init__(self, heap: SymmetricHeap, timeout_s: float, hostile_seed: int | None = None) -> None:
        self._heap, self._links = heap, heap.links
        self._timeout_s, self._hostile_seed = timeout_s, hostile_seed
        self._closed: IrisError | None = None
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], Queue] = {}
        for peer in range(heap.world):
            self._queues[peer, 0] = self._create(peer, 0)
        name = f"iris_pg {self._links.group}"
        self._thread = EngineThread(list(self._queues.values()), keep_looking=True, name=name)
        self._thread.wake()

    def submit(self, op: str, to_rank: int, channel: int, calls: Sequence[Call], wait: bool) -> None:
        """Write the packets of ``calls`` into a queue and ring its doorbell; with ``wait``, return when they have been
        executed.

        Packets that fit one batch (a quarter of the ring) are reserved together; more go in several batches, in order.

        Raises:
            ArgumentError: no such channel. ClosedError: the queue has failed before.
            DeadlineError, QueueError: a poll, or the ring, took too long; with a dump of the queue.
        """
        queue = self._queue(op, to_rank, channel)
        if queue.fault:
            raise self._closed or ClosedError(
                f"{op}: the queue to rank {to_rank} on channel {channel} has failed before and takes nothing more; use "
                f"another channel or a new context. It failed with: {queue.fault} {self._where()}"
            )
        made = batches([packet for call in calls for packet in call.packets()], queue.ring.largest_batch)
        if not made:
            return
        end = queue.submit(made)
        if wait:
            queue.drive(end)
        else:
            self._thread.wake()

    def quiet(self, to_rank: int | None, channel: int) -> None:
        """Return when what was submitted on ``channel`` before, to ``to_rank`` or to all ranks, has been executed.

        Raises:
            DeadlineError, QueueError, PacketError: what a transfer failed with, one of a kernel too.
        """
        self._check_channel("quiet", channel)
        ranks = range(self._heap.world) if to_rank is None else (to_rank,)
        queues = [queue for rank in ranks if (queue := self._queues.get((rank, channel)))]
        # What was submitted before this call is committed, so it ends at or before this index; more may follow.
        for queue, end in [(queue, queue.ring.committed()) for queue in queues]:
            self._look(queue)
            if queue.fault and queue.ring.error():
                raise queue.fault
            queue.drive(end)

    def check(self, to_rank: int, channel: int) -> None:
        """Raise what the queue to a rank has failed with, if it has. Does not wait."""
        queue = self._queue("check", to_rank, channel)
        if queue.fault:
            raise queue.fault

    def contexts(self) -> list[Context]:
        """Return what device code needs to write into the queues of channel 0, by rank."""
        return [self._queues[peer, 0].ring.context for peer in range(self._heap.world)]

    def close(self, error: IrisError) -> None:
        """Drop what has not been executed, and return when no thread reads or writes the heap any more."""
        with self._lock:  # no queue is added after this
            self._closed = error
        for queue in self._queues.values():
            queue.close(error)
        self._thread.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _queue(self, op: str, to_rank: int, channel: int) -> Queue:
        queue = self._queues.get((to_rank, channel))
        if queue is None:
            self._check_channel(op, channel)
            with self._lock:
                if self._closed:
                    raise self._closed
                queue = self._queues.get((to_rank, channel))
                if queue is None:
                    queue = self._queues[to_rank, channel] = self._create(to_rank, channel)
                    self._thread.add(queue)
        self._look(queue)
        return queue

    def _look(self, queue: Queue) -> None:
        """Fail a queue that a kernel has given up."""
        if not queue.fault and (why := queue.ring.error()):
            queue.fail(QueueError(f"{why} {self._where()}"))

    def _create(self, peer: int, channel: int) -> Queue:
        def describe(address: int) -> str:
            lost = "".join(f"; rank {rank} is gone" for rank in self._links.lost())
            return (
                f"a transfer to rank {peer} on channel {channel} waits for a flag of rank {self._heap.rank}, "
                f"{self._heap.words_for(address)}{lost} {self._where()}: the flag"
            )

        seed = self._hostile_seed
        hostile = None if seed is None else random.Random(f"{seed}/{self._heap.rank}/{peer}/{channel}")
        patience = Patience(self._timeout_s, self._heap.world, self._check, describe)
        name = f"{self._links.group}/{self._heap.rank}->{peer}/{channel}"
        return Queue(Ring(RING_BYTES, name, self._timeout_s), patience, hostile)

    def _check(self, address: int, expected: int, seen: int) -> None:
        if self._closed:
            raise self._closed

    def _check_channel(self, op: str, channel: int) -> None:
        if not isinstance(channel, int) or not 0 <= channel < CHANNELS:
            raise ArgumentError(f"{op}: channel={channel!r}; it takes 0..{CHANNELS - 1} {self._where()}")

    def _where(self) -> str:
        return where(group=self._links.group, rank=self._heap.rank)


def batches(packets: Sequence[bytes], largest: int) -> list[Batch]:
    """Return ``packets`` in order, in as few batches of at most ``largest`` bytes as that takes."""
    made: list[Batch] = []
    for packet in packets:
        if not made or len(made[-1].packets) + len(packet) > largest:
            made.append(Batch())
        made[-1].packets += packet
    return made
