"""Messages of CUDA tensors between two ranks: matched by their order, on a stream for each direction and peer.

A send is done when its bytes are in the receiver's slots, so a message that fits the slots does not wait for its
receive; a larger one waits on its stream, and no host does. Tags must be equal, and so must sizes: a message that is
not the one that is received fails the group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from iris_pg.copy_engine.stream import Joins
from iris_pg.device_copies import DeviceCopies, Prepared
from iris_pg.device_page import DevicePage
from iris_pg.device_work import End, Held, Lane, StreamWork, raw_stream
from iris_pg.errors import ArgumentError, UnsupportedError
from iris_pg.flags import MAIL_SLOTS
from iris_pg.watch import Key, Watch


class MailLane:
    """Messages to one rank, or from it.

    Attributes:
        stream, lane: where they run, and in what order.
        word: number of the lane's word.
        chunks: number of chunks so far; gives the slot of the next.
    """

    def __init__(self, stream: torch.cuda.Stream, lane: Lane, word: int) -> None:
        self.stream, self.lane, self.word, self.chunks = stream, lane, word, 0


class DeviceMessages:
    """Base of the transport of CUDA tensors: its messages."""

    rank: int
    world: int
    device: torch.device
    watch: Watch
    _page: DevicePage
    _copies: DeviceCopies
    _lanes: list[Lane]
    _mail: dict[tuple[str, int], MailLane]
    _lock: threading.RLock
    _events: list[torch.cuda.Event]
    _joins: Joins
    # Of the transport, for all operations.
    _check_usable: Callable[[Key], None]
    _capture: Callable[..., None]
    work: Callable[..., StreamWork]
    _handle: Callable[[int], Any]
    _failed_with: Callable[[], BaseException | None]
    _where: Callable[..., str]

    def send(self, tensor: torch.Tensor, dst: int, tag: int, outputs: list[Any]) -> StreamWork:
        """Put a message of contiguous ``tensor`` to rank ``dst`` on the stream for messages to that rank."""
        return self._message("send", "to", self._copies.send, tensor, dst, tag, outputs, None)

    def recv(
        self, tensor: torch.Tensor, src: int, tag: int, outputs: list[Any], after: Callable[[], Any] | None
    ) -> StreamWork:
        """Put the receipt of a message into contiguous ``tensor`` on the stream for messages from rank ``src``.

        ``after`` is called with that stream current, behind the receipt.
        """
        return self._message("recv", "from", self._copies.receive, tensor, src, tag, outputs, after)

    def _message(
        self,
        op: str,
        direction: str,
        prepare: Callable[[int, int, int, int, int, int], Prepared],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        outputs: list[Any],
        after: Callable[[], Any] | None,
    ) -> StreamWork:
        if peer == self.rank:
            raise ArgumentError(
                f"{op}: a message to or from this rank itself, {self.rank}; messages are between two ranks; copy the "
                f"tensor (tensor.copy_) instead {self._where(op)}"
            )
        nbytes, most = tensor.numel() * tensor.element_size(), MAIL_SLOTS * self._copies.mail_bytes
        with self._lock, torch.cuda.device(self.device):
            said: Key = (op, nbytes, "bytes", direction, "rank", peer)
            self._check_usable(said)
            captures = torch.cuda.is_current_stream_capturing()
            if captures and nbytes > most:
                raise UnsupportedError(
                    f"{op}: a message of {nbytes} bytes while a graph is captured; it takes {most}, what slots hold, "
                    "since a captured send must not wait for its receive; raise IRIS_PG_DEVICE_CHUNK_BYTES, or send "
                    f"smaller messages {self._where(op)}"
                )
            mail = self._mail_lane(op, peer)
            lane = mail.lane
            prepared = prepare(peer, tag, tensor.data_ptr(), nbytes, mail.chunks, mail.word)
            mail.chunks += prepared.chunks
            if captures:
                self._capture(said, prepared, after, is_in_line=False)
                return self.work(outputs, is_in_line=False)
            stream, raw = mail.stream, mail.stream.cuda_stream
            try:
                self._joins.join(raw, raw_stream(self.device))
                with torch.cuda.stream(stream):
                    prepared.launch(self._handle(raw), lane.next, after)
                end = End(stream, self._events)
            except BaseException as error:  # the peer waits for a message that may have begun by half
                self.watch.give_up(error)
                raise
            held = Held(tensor)
            work = StreamWork(outputs, self.device, raw, end, self._failed_with, held, is_in_line=False)
            lane.add(said, prepared.program, held)
            lane.oldest()
            return work

    def _mail_lane(self, op: str, peer: int) -> MailLane:
        mail = self._mail.get((op, peer))
        if mail is None:
            # Streams of different priorities never share a hardware queue. So a receive does not queue behind a send
            # that waits for it, whatever CUDA_DEVICE_MAX_CONNECTIONS says.
            stream = torch.cuda.Stream(self.device, priority=0 if op == "send" else -1)
            to, from_ = (lambda rank: 1 + rank), (lambda rank: 1 + self.world + rank)
            word, theirs = (to(peer), from_(self.rank)) if op == "send" else (from_(peer), to(self.rank))
            page = self._page
            lane = Lane(page.reader(word), lambda peer: page.word_of(peer, theirs))
            mail = self._mail[op, peer] = MailLane(stream, lane, word)
            self._lanes.append(lane)
        return mail
