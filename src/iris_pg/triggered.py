"""Triggered plans: the host arms transfers ahead of time, and a kernel that computes what they send lets them go, batch
by batch, while it goes on computing. Peers see each batch arrive.

::

    plan = ctx.triggered([[Send(part, to_rank=p, to_tensor=inbox) for p in peers] for part in parts])   # collective
    epoch = plan.arm()
    kernel[grid](..., plan.device, epoch)    # publish(plan, batch, producers, epoch) when a batch is written
    plan.wait()                              # all is sent, and all that peers send has arrived

For each batch and peer a queue holds: poll until the batch's gate is at least the epoch | copy ... | raise the peer's
arrival flag to the epoch. Epochs count from 1, and nothing is ever reset. On a GPU none of it takes a multiprocessor,
so kernels may fill the GPU while they wait for batches.

Gates are words of the host's memory: kernels store there, engines poll there, and on NVIDIA GPUs the host's thread sees
a gate within a microsecond and tells the stream then. The stream could wait for the gate itself, from the moment that
it is armed; but streams share a few queues of the hardware, and a kernel that came to stand behind such a wait would
never open the gate.

A plan that is armed has its channel to the ranks it sends to for itself: what came behind it would wait for its gates.
So putting there, or arming another plan, is an error until it has ended.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_pg.copy_engine.calls import Call, Count, Poll
from iris_pg.errors import ArgumentError, ClosedError, DeadlineError, IrisError, MismatchError, PeerLostError, where
from iris_pg.memory.heap import address_of
from iris_pg.platforms.atomics import atomics

if TYPE_CHECKING:
    from iris_pg.context import Iris
    from iris_pg.device_page import DevicePage

_LINE_WORDS = 8  # of a gate and of an arrival, as in device/triggered.py
_MOST_BYTES = 1 << 19  # of packets that are armed in one queue: half a ring
_PAUSE_S, _LOOK_S = 20e-6, 2e-3  # between two looks at flags, and at peers
_SPIN_S = 10e-3  # how long arrivals on a GPU are looked at without a pause
_TURNS = 1 << 16  # looks before Python runs again, about 100 us
_FULL = (1 << 32) - 1


class State(enum.Enum):
    """What a plan is doing."""

    IDLE = "idle"  # made, or done with an epoch
    ARMED = "armed"  # transfers wait for their gates
    FAILED = "failed"  # an epoch did not end
    ABORTED = "aborted"
    CLOSED = "closed"


@dataclass(frozen=True)
class Send:
    """One transfer of a batch, as :meth:`iris_pg.Iris.put`.

    Args:
        from_tensor: contiguous, in this rank's heap.
        to_rank: whose memory is written.
        to_tensor: this rank's tensor at the place to be written there; ``from_tensor`` when None.
    """

    from_tensor: torch.Tensor
    to_rank: int
    to_tensor: torch.Tensor | None = None


class TriggeredPlan:
    """Transfers in batches; :meth:`iris_pg.Iris.triggered` makes it. All ranks make it, with as many batches.

    Args:
        ctx: the context.
        batches: what this rank sends in each batch.
        channel: of the copy engine.

    Attributes:
        state: a :class:`State`.
        epoch: how often it was armed.
        device: what kernels need, int64 on the heap's device.
    """

    def __init__(self, ctx: Iris, batches: Sequence[Sequence[Send]], channel: int) -> None:
        self._ctx, self._channel = ctx, channel
        self.state, self.epoch = State.IDLE, 0
        rank, world = ctx.cur_rank, ctx.num_ranks
        problem, self._copies = None, list[dict[int, list[Call]]]()
        try:
            self._copies = [self._by_peer(batch) for batch in batches]
            self._check_room()
        except IrisError as error:
            problem = error
        # What each rank sends to whom: a batch that nobody sends is not awaited, and all must mean the same plan.
        mine = dict(n=len(batches), to=[sorted(copies) for copies in self._copies], channel=channel)
        mine["bad"] = str(problem) if problem else ""
        told: list[Any] = [message.payload for message in ctx._links.exchange(mine, what="make a triggered plan")]
        if problem:
            raise problem
        for other, said in enumerate(told):
            if said["bad"]:
                raise MismatchError(f"triggered: rank {other} has no plan: {said['bad']} {self._where()}")
            if (said["n"], said["channel"]) != (len(batches), channel):
                raise MismatchError(
                    f"triggered: rank {other} has {said['n']} batches on channel {said['channel']}, this rank "
                    f"{len(batches)} on {channel}; they must be the same {self._where()}"
                )
        self._senders = [
            [r for r, said in enumerate(told) if rank in said["to"][batch]] for batch in range(len(batches))
        ]
        self.digest = hashlib.sha1(json.dumps([said["to"] for said in told]).encode()).hexdigest()
        device, lines = ctx.heap.device, max(len(batches), 1)
        on_gpu = device.type != "cpu"
        self._gates = torch.zeros(lines, _LINE_WORDS, dtype=torch.int64, pin_memory=on_gpu)
        self._counts = torch.zeros(lines, _LINE_WORDS, dtype=torch.int64, device=device)
        self._arrived = ctx.zeros(lines, world, _LINE_WORDS, dtype=torch.int64)
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._mirror = torch.zeros(self._arrived.size(), dtype=torch.int64, pin_memory=True) if on_gpu else None
        self._gate_of = [address_of(gate) for gate in self._gates]
        arrived = [address_of(line) for line in self._arrived[:, rank]]
        self._flag_of = {peer: [ctx.heap.translate(address, rank, peer) for address in arrived] for peer in self.peers}
        # Of each rank that sends here, a word that the host reads when its last batch is there, as all before are then;
        # and of each to which this one sends, when all has landed there.
        last = {sender: batch for batch, ranks in enumerate(self._senders) for sender in ranks}
        self._page: DevicePage | None = None
        self._end_of = {sender: address_of(self._arrived[batch, sender]) for sender, batch in last.items()}
        self._sent_to: dict[int, int] = {}
        if on_gpu:
            from iris_pg.device_page import DevicePage

            self._page = page = DevicePage(ctx._links, 2 * world)
            ctx._pages.append(page)
            self._end_of = {sender: page.host_address_of_word(sender) for sender in last}
            self._sent_to = {peer: page.host_address_of_word(world + peer) for peer in self.peers}
        words = [address_of(t) for t in (self._gates, self._arrived)] + [world, address_of(self._counts)]
        self.device = torch.tensor(words, dtype=torch.int64).to(device)

    @property
    def peers(self) -> list[int]:
        """The ranks that this rank sends to."""
        return sorted({peer for copies in self._copies for peer in copies})

    def arm(self) -> int:
        """Put the transfers of all batches into the queues, where they wait for their gates, and return the epoch.

        Raises:
            ArgumentError: the plan is armed, or another plan holds a queue. ClosedError: it has failed, or is closed.
        """
        if self.state is State.ARMED:
            raise ArgumentError(
                f"triggered: epoch {self.epoch} is armed and has not ended; wait() first {self._where()}"
            )
        if self.state is not State.IDLE:
            raise ClosedError(f"triggered: the plan is {self.state.value} and arms no more {self._where()}")
        self._ctx._hold(self, self._channel, self.peers)
        self.epoch += 1
        self.state = State.ARMED
        try:
            for peer, flags in self._flag_of.items():
                armed: list[Call] = []
                for gate, flag, copies in zip(self._gate_of, flags, self._copies, strict=False):
                    if peer in copies:
                        armed += [Poll(gate, self.epoch, in_host=True), *copies[peer], Count(flag, self.epoch)]
                if self._page:
                    armed.append(Count(self._page.address_at(peer, self._ctx.cur_rank), self.epoch))
                    armed.append(Count(self._page.address_of_word(self._ctx.num_ranks + peer), self.epoch))
                self._ctx._engine("triggered", peer).submit("triggered", peer, self._channel, armed, False)
        except IrisError:
            self._fail()
            raise
        return self.epoch

    def publish(self, batch: int) -> None:
        """Let a batch go from the host, as a kernel does when its producers are done.

        Raises:
            ArgumentError: no such batch, or the plan is not armed.
        """
        if self.state is not State.ARMED or not 0 <= batch < len(self._copies):
            raise ArgumentError(
                f"triggered: publish({batch}) of a plan of {len(self._copies)} batches that is {self.state.value} "
                f"{self._where()}"
            )
        self._open([batch])

    def arrived(self, batch: int) -> bool:
        """Return whether all that this rank is sent in a batch of this epoch is there."""
        flags = self._flags()[batch]
        return all(flags[sender] >= self.epoch for sender in self._senders[batch])

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all that this rank sends in this epoch has landed, and all that it is sent has arrived.

        Raises:
            DeadlineError: naming batches that were not published here, and ranks whose batches have not arrived.
            ArgumentError: the plan is not armed. QueueError, DriverError: a transfer failed. The plan has failed then.
        """
        if self.state is not State.ARMED:
            raise ArgumentError(f"triggered: wait() of a plan that is {self.state.value}; arm() first {self._where()}")
        limit_s = self._ctx._links.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        self._await(self._late, deadline, limit_s)
        self._await(self._closed, deadline, limit_s)
        self._await(self._unsent, deadline, limit_s)
        try:
            if not self._page:
                self._quiet()
        except IrisError:
            self._fail()
            raise
        self._end(State.IDLE)

    def abort(self) -> None:
        """Let go whatever is armed, and never arm again. What the transfers that were let go move is not to be used.
        Peers notice when they wait. Idempotent.
        """
        if self.state is State.ARMED:
            self._release()
            self._end(State.ABORTED)
        elif self.state is State.IDLE:
            self.state = State.ABORTED

    def close(self) -> None:
        """Abort, and give the memory of its flags back. Collective. Idempotent."""
        if self.state is State.CLOSED:
            return
        self.abort()
        if self._page:  # what was let go writes there
            with contextlib.suppress(IrisError):
                self._quiet()
        self._ctx.barrier()
        if self._page:
            self._page.close()
            self._ctx._pages.remove(self._page)
        self.state = State.CLOSED
        self._ctx.heap.free(self._arrived)

    # ------------------------------------------------------------------------------------------------------------------

    def _by_peer(self, batch: Sequence[Send]) -> dict[int, list[Call]]:
        copies: dict[int, list[Call]] = {}
        for send in batch:
            self._ctx._check_rank("triggered", "to_rank", send.to_rank)
            made = self._ctx._encoder.put("triggered", send.from_tensor, send.to_rank, send.to_tensor)
            copies.setdefault(send.to_rank, []).extend(made)
        return copies

    def _check_room(self) -> None:
        for peer in self.peers:
            armed = [copies[peer] for copies in self._copies if peer in copies]
            nbytes = sum(len(packet) for calls in armed for call in calls for packet in call.packets())
            nbytes += len(armed) * (24 + 16) + 16  # a poll and a fence each, and a fence at the end
            if nbytes > _MOST_BYTES:
                raise ArgumentError(
                    f"triggered: {nbytes} bytes of packets to rank {peer}; at most {_MOST_BYTES}, half a ring, are "
                    f"armed at once; send larger pieces, or make several plans {self._where()}"
                )

    def _await(self, missing: Callable[[], list[int]], deadline: float, limit_s: float) -> None:
        """Return when nothing is missing."""
        began = looked = time.monotonic()
        while left := missing():
            now = time.monotonic()
            if now > deadline:
                what, is_open = self._missing(), not self._closed()
                self._fail()
                if is_open:
                    self._quiet()  # raises what a transfer has failed with
                raise DeadlineError(f"triggered: after {limit_s} s {what} in epoch {self.epoch} {self._where()}")
            if now - looked > _LOOK_S:
                looked = now
                self._check()
                lost = self._ctx._links.lost()
                if lost and any(rank in lost for batch in self._senders for rank in batch):
                    time.sleep(0.1)  # it may have done its part before it went
                    if what := self._missing():
                        self._fail()
                        raise PeerLostError(f"triggered: rank {lost[0]} is gone, and {what} {self._where()}")
            words = {self._late: self._end_of, self._unsent: self._sent_to}.get(missing)
            if self._page and words and now - began < _SPIN_S:
                atomics().spin32(words[left[0]], _FULL, self.epoch, _FULL - self.epoch, _TURNS)
            else:
                time.sleep(_PAUSE_S)

    def _check(self) -> None:
        """Raise what a queue has failed with: nothing more goes through it. Fails the plan."""
        try:
            for peer in self.peers:
                self._ctx._engine("triggered", peer).check(peer, self._channel)
        except IrisError as error:
            what = self._missing()
            self._fail()
            if isinstance(error, DeadlineError):  # most likely of a gate
                raise DeadlineError(f"triggered: {what} in epoch {self.epoch}; {error}") from error
            raise

    def _closed(self) -> list[int]:
        """Return the batches that were not published here in this epoch."""
        load = atomics().load64
        return [b for b, copies in enumerate(self._copies) if copies and load(self._gate_of[b]) < self.epoch]

    def _late(self) -> list[int]:
        """Return the ranks of which not all has arrived in this epoch."""
        load = atomics().load32
        return [sender for sender, end in self._end_of.items() if load(end) < self.epoch]

    def _unsent(self) -> list[int]:
        """Return the ranks to which not all has landed in this epoch; nobody knows where there is no page."""
        load = atomics().load32
        return [peer for peer, word in self._sent_to.items() if load(word) < self.epoch]

    def _missing(self) -> str:
        """Return in words what this epoch waits for, or nothing."""
        said = []
        if closed := self._closed():
            said.append(f"batches {closed} were not published on this rank")
        if late := sorted(self._late()):
            said.append(f"batches of ranks {late} have not arrived")
        if not closed and (unsent := self._unsent()):
            said.append(f"what goes to ranks {unsent} has not landed")
        return " and ".join(said)

    def _flags(self) -> list[list[int]]:
        """Return the arrivals [batches, world]. On a GPU they are read beside the user's streams, whose kernels may
        wait for just this, and without a kernel, for which there may be no room.
        """
        if self._side is None or self._mirror is None:
            return self._arrived[:, :, 0].tolist()
        with torch.cuda.stream(self._side):
            self._mirror.copy_(self._arrived, non_blocking=True)
        self._side.synchronize()
        return self._mirror[:, :, 0].tolist()

    def _quiet(self) -> None:
        for peer in self.peers:
            self._ctx._engine("triggered", peer).quiet(peer, self._channel)

    def _open(self, batches: Sequence[int]) -> None:
        for batch in batches:
            atomics().store64(self._gate_of[batch], self.epoch)

    def _release(self) -> None:
        """Let everything go; queues look at the gates for as long as there is something armed in them."""
        self._ctx._kept.append(self._gates)
        self._open(range(len(self._copies)))

    def _fail(self) -> None:
        self._end(State.FAILED)
        self._release()

    def _end(self, state: State) -> None:
        self.state = state
        self._ctx._give_back(self)

    def _where(self) -> str:
        return where(group=self._ctx._links.group, rank=self._ctx.cur_rank)


__all__ = ["Send", "State", "TriggeredPlan"]
