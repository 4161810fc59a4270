"""The links between the ranks of one group on one host: who they are, how they pass file descriptors, and who has died.

Every pair of ranks holds one Unix socket (SOCK_SEQPACKET), in the abstract namespace, so there is no file to leave
behind. A listener's name carries a random token that only the group's Store gives away; both sides check the token and
the other's uid (SO_PEERCRED). The sockets stay open for the life of the group: collective calls on the host
(:meth:`Links.exchange`) go over them, and a rank that dies closes them, which its peers see at once. A rank that leaves
because of an error sends the error, so its peers name the rank at fault and not the one that noticed first.
"""

from __future__ import annotations

import array
import json
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from iris_pg.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    IrisError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
    where,
)
from iris_pg.memory.cards import Cards, Store, names_of

_FRAME = struct.Struct("<IQ")  # kind, sequence number; the payload follows
_HELLO, _EXCHANGE, _LEAVE = 0x49524953, 1, 2
_MAX_FRAME = 1 << 16  # bytes; a SOCK_SEQPACKET message must fit the socket's buffer
_MAX_FDS = 8  # descriptors in one frame
_DEAD = select.POLLHUP | select.POLLERR | select.POLLRDHUP | select.POLLNVAL
_PROBE_S = 0.1  # seconds between two looks at peers that have not connected yet
_TOLD = {kind.__name__: kind for kind in (DeadlineError, MismatchError, PeerLostError, UnsupportedError)}

_open_links: weakref.WeakSet[Links] = weakref.WeakSet()


class Message(NamedTuple):
    """What one rank sent in an exchange; the receiver owns the descriptors."""

    payload: dict[str, Any]
    fds: list[int]


class Links:
    """Connections from this rank to every other rank of the group.

    Args:
        store: the group's Store, already prefixed for this group alone. It may have served earlier groups of these
            ranks.
        rank, world: this rank and the number of ranks.
        group: name of the group, for messages.
        timeout_s: deadline of set-up and of each exchange, in seconds.

    Raises:
        UnsupportedError: the ranks are on more than one host.
        DeadlineError: a rank did not arrive in time; the message names it.
        PeerLostError: a rank died during set-up.
    """

    def __init__(self, store: Store, rank: int, world: int, *, group: str, timeout_s: float) -> None:
        self.rank, self.world, self.group, self.timeout_s = rank, world, group, timeout_s
        self.closed: str | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._sequence = 0
        self._lock = threading.Lock()  # of the two below: a poll object serves one thread at a time
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        _open_links.add(self)
        if world > 1:
            cards = Cards(store, rank, world, group=group, timeout_s=timeout_s)
            try:
                self._connect(cards)
            except BaseException as error:
                if isinstance(error, DeadlineError):
                    cards.withdraw()  # of any other error the peers learn as they dial
                self.close("set-up failed", error)
                raise

    # Set-up -----------------------------------------------------------------------------------------------------------

    def _connect(self, all_cards: Cards) -> None:
        deadline = time.monotonic() + self.timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            address = f"iris_pg-{secrets.token_hex(8)}"
            listener.bind("\0" + address)
            listener.listen(2 * self.world)
            listener.setblocking(False)
            # 1. Nobody dials or answers before it holds the cards of all ranks, so a rank that never comes is waited
            #    for, and named, by all others. 2. A rank dials those before it and is answered by them.
            cards = all_cards.collect(address, secrets.token_hex(16), deadline)
            self._dial(cards, deadline)
            next_probe = time.monotonic() + _PROBE_S
            while len(self._sockets) < self.world - 1:
                progress = self._answer(listener, cards)
                for peer in self.lost():
                    raise self._farewell(peer, "set-up")
                now = time.monotonic()
                if now > deadline:
                    late = [p for p in range(self.world) if p != self.rank and p not in self._sockets]
                    raise all_cards.late(late, "connect")
                if now > next_probe:
                    self._probe(cards)
                    next_probe = now + _PROBE_S
                if not progress:
                    _wait_readable(listener, min(deadline, next_probe) - now)

    def _dial(self, cards: list[dict[str, str]], deadline: float) -> None:
        """Connect to the ranks before this one."""
        for peer in range(self.rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                link.settimeout(max(deadline - time.monotonic(), 0.001))
                link.connect("\0" + cards[peer]["address"])
                if _uid(link) != os.getuid():
                    raise UnsupportedError(
                        f"rank {peer} runs as uid {_uid(link)} and rank {self.rank} as uid {os.getuid()}; memory "
                        f"is shared between processes of one user only {self._where()}"
                    )
                link.send(_FRAME.pack(_HELLO, self.rank) + cards[peer]["token"].encode())
                if link.recv(64) != cards[self.rank]["token"].encode():
                    raise ConnectionResetError
            except UnsupportedError:
                link.close()
                raise
            except TimeoutError:
                link.close()
                raise DeadlineError(f"rank {peer} did not answer within {self.timeout_s} s {self._where()}") from None
            except OSError:
                link.close()
                raise PeerLostError(f"rank {peer} died during set-up {self._where()}") from None
            self._add(peer, link)

    def _answer(self, listener: socket.socket, cards: list[dict[str, str]]) -> bool:
        """Accept one connection, if there is one; return whether it is a rank of this group."""
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            return False
        link.settimeout(1.0)  # a peer sends its hello right after it connects; a stranger is not waited for longer
        try:
            frame = link.recv(64)
            kind, peer = _FRAME.unpack_from(frame)
            right = kind == _HELLO
            right = right and secrets.compare_digest(frame[_FRAME.size :], cards[self.rank]["token"].encode())
            right = right and self.rank < peer < self.world and peer not in self._sockets
            right = right and _uid(link) == os.getuid()
            if right:
                link.send(cards[peer]["token"].encode())
        except (OSError, struct.error):
            right = False
        if not right:
            link.close()  # not a rank of this group, or gone already
            return False
        self._add(peer, link)
        return True

    def _probe(self, cards: list[dict[str, str]]) -> None:
        """Raise when a rank that is still to dial has died: then nobody listens at its address.

        It listens until it has dialled everyone before it, this rank included.
        """
        gone = []
        for peer in range(self.rank + 1, self.world):
            if peer not in self._sockets:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
                    probe.setblocking(False)
                    try:
                        probe.connect("\0" + cards[peer]["address"])
                    except ConnectionRefusedError:
                        gone.append(peer)
                    except OSError:
                        pass  # its backlog is full: it lives
        if gone:
            raise PeerLostError(f"{names_of(gone)} died during set-up {self._where()}")

    def pid(self, peer: int) -> int:
        """Return the process of ``peer``, by its number here; 0 when it has none here (another PID namespace)."""
        return _credentials(self._sockets[peer])[0]

    def _add(self, peer: int, link: socket.socket) -> None:
        link.setblocking(True)
        self._sockets[peer] = link
        with self._lock:
            self._rank_of[link.fileno()] = peer
            self._poll.register(link.fileno(), select.POLLRDHUP)

    def _where(self) -> str:
        return where(group=self.group, rank=self.rank)

    # Life -------------------------------------------------------------------------------------------------------------

    def lost(self) -> list[int]:
        """Return the ranks whose process has closed its link: it died, or it left the group. Does not block."""
        with self._lock:
            return sorted(self._rank_of[fd] for fd, event in self._poll.poll(0) if event & _DEAD)

    def exchange(self, payload: dict[str, Any], fds: Sequence[int] = (), *, what: str) -> list[Message]:
        """Send ``payload`` (JSON) and descriptors to every rank and return what each rank sent, by rank. Collective.

        Args:
            payload: at most 60 KiB as JSON.
            fds: descriptors to pass; the caller keeps its own.
            what: the call in words, for messages.

        Raises:
            DeadlineError, PeerLostError: naming the rank; descriptors received so far are closed.
            MismatchError: ranks are not in the same call.
        """
        if self.closed:
            raise ClosedError(f"{what}: the group is closed ({self.closed}) {self._where()}")
        frame = _FRAME.pack(_EXCHANGE, self._sequence + 1) + json.dumps({"what": what, **payload}).encode()
        if len(frame) > _MAX_FRAME:
            raise ArgumentError(
                f"{what}: a payload of {len(frame)} bytes; it takes at most {_MAX_FRAME} {self._where()}"
            )
        self._sequence += 1
        deadline = time.monotonic() + self.timeout_s
        messages: list[Message | None] = [None] * self.world
        messages[self.rank] = Message(payload, [])
        waiting = {link.fileno(): peer for peer, link in self._sockets.items()}
        poll = select.poll()
        try:
            for fd, peer in waiting.items():
                poll.register(fd, select.POLLIN)
                try:
                    socket.send_fds(self._sockets[peer], [frame], list(fds), socket.MSG_NOSIGNAL)
                except OSError:
                    pass  # it is gone; reading from it below says how
            while waiting:
                arrived = poll.poll(1000 * max(deadline - time.monotonic(), 0))
                if not arrived:
                    late = names_of(waiting.values())
                    raise DeadlineError(f"{what}: {late} did not arrive within {self.timeout_s} s {self._where()}")
                for fd, _ in arrived:
                    poll.unregister(fd)
                    peer = waiting.pop(fd)
                    messages[peer] = self._receive(peer, what)
        except BaseException:
            for message in messages:
                for fd in message.fds if message else ():
                    os.close(fd)
            raise
        return [message for message in messages if message is not None]

    def _receive(self, peer: int, what: str) -> Message:
        frame, fds = self._next_frame(peer)
        if len(frame) < _FRAME.size:
            raise PeerLostError(f"{what}: rank {peer} died or exited {self._where()}")
        kind, sequence = _FRAME.unpack_from(frame)
        if kind == _LEAVE:
            raise self._explained(peer, what, frame)
        payload = json.loads(frame[_FRAME.size :])
        theirs = payload.pop("what")
        if (sequence, theirs) != (self._sequence, what):
            for fd in fds:
                os.close(fd)
            raise MismatchError(
                f"rank {self.rank} is in {what} (host call {self._sequence}) and rank {peer} in {theirs} (host call "
                f"{sequence}); all ranks make these calls in the same order {self._where()}"
            )
        return Message(payload, fds)

    def _next_frame(self, peer: int, flags: int = 0) -> tuple[bytes, list[int]]:
        """Return the next frame of a peer and its descriptors; an empty one when the peer is gone."""
        # Not socket.recv_fds: until Python 3.12 it ignores its flags, and a descriptor would stay open across exec.
        fds = array.array("i")
        space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
        try:
            frame, messages, _, _ = self._sockets[peer].recvmsg(_MAX_FRAME, space, socket.MSG_CMSG_CLOEXEC | flags)
        except OSError:
            return b"", []
        for level, kind, content in messages:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
        return frame, fds.tolist()

    def _farewell(self, peer: int, what: str) -> IrisError:
        """Return the error for a peer whose link has closed: what it said last, or that it died."""
        while True:
            frame, fds = self._next_frame(peer, socket.MSG_DONTWAIT)
            for fd in fds:
                os.close(fd)
            if len(frame) < _FRAME.size:
                return PeerLostError(f"{what}: rank {peer} died or exited {self._where()}")
            if _FRAME.unpack_from(frame)[0] == _LEAVE:
                return self._explained(peer, what, frame)

    def _explained(self, peer: int, what: str, frame: bytes) -> IrisError:
        """Return the error for a peer that said goodbye: the same as its own, if it had one."""
        said = json.loads(frame[_FRAME.size :])
        if kind := _TOLD.get(said["error"]):
            return kind(f"{what}: {said['text']}, says rank {peer} {self._where()}")
        why = said["text"] and f"{said['why']}: {said['text']}" or said["why"]
        return PeerLostError(f"{what}: rank {peer} has left the group ({why}) {self._where()}")

    def close(self, why: str = "closed", error: BaseException | None = None) -> None:
        """Say goodbye, and because of which error if there is one, and close every link. Idempotent."""
        if self.closed:
            return
        self.closed = why
        text = re.sub(r" \[group=[^]]*\]$", "", str(error)) if error else ""
        said = dict(why=why, error=type(error).__name__, text=text[:4096])
        frame = _FRAME.pack(_LEAVE, self._sequence) + json.dumps(said).encode()
        for link in self._sockets.values():
            try:
                link.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                pass
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            for link in self._sockets.values():
                link.close()
            self._sockets.clear()
            self._rank_of.clear()
            self._poll = select.poll()

    def _forget(self) -> None:
        """In a forked child: close this process's copies of the links, which stay open in the parent."""
        self.closed = "this process is a fork of the one that created it"
        self._lock = threading.Lock()  # whoever held it lives in the parent
        self._drop()


def _credentials(link: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end."""
    return struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def _uid(link: socket.socket) -> int:
    return _credentials(link)[1]


def _wait_readable(link: socket.socket, timeout_s: float) -> None:
    poll = select.poll()  # select() takes no descriptor from 1024 on
    poll.register(link.fileno(), select.POLLIN)
    poll.poll(1000 * max(timeout_s, 0))


def _after_fork_in_child() -> None:
    """Let go of the links: while a child (a DataLoader worker) held them open, peers would not see its parent die."""
    for links in list(_open_links):
        links._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
