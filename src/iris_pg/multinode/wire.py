"""What carries bytes between hosts: an existing engine, Gloo for CPU tensors and NCCL for CUDA tensors.

Each engine is one context of all ranks of the group. Gloo connects two ranks when they first have something for each
other, and then each waits for the other; so a receive could not be begun long before its send. Therefore ranks of a
group that is not large are all connected when it is made; in a large one a rank is connected to its counterparts, one
on each other host. Every rank has an engine of its own, and Gloo's takes the network interface that is its rank's turn
among those in ``GLOO_SOCKET_IFNAME``, so all network cards of a host work.

A connection of Gloo's sends or receives, one at a time, and while it does one its thread asks over and over whether it
may do the other. So ranks of a group that is not large have two connections: by one the lower rank sends, by the other
the higher.
"""

from __future__ import annotations

import datetime
import functools
import os
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from iris_pg.errors import DeadlineError, IrisError, PeerLostError, UnsupportedError, where
from iris_pg.multinode.hosts import Hosts

Tensor = torch.Tensor
Parts = Sequence[tuple[int, Tensor]]

LARGEST_TAG = (1 << 30) - 2
"""Of a message between users; tags of Gloo have 31 bits, of which one tells messages from operations."""

LARGE_BYTES = 1 << 20
"""A send of at least this size is begun by a thread: Gloo returns from it when the kernel has no more room, which takes
megabytes and a good part of the time.
"""

ANY = -1  # in place of a rank
LARGEST_MESH = 256
"""Ranks of the largest group that has all its connections from the start, as groups of Gloo's own have."""

_NEVER = 2 * (LARGEST_TAG + 1)  # a tag that nobody sends with
_AT_ONCE = datetime.timedelta(milliseconds=1)
_ATTEMPTS = 5  # of Gloo to connect to a rank, each as long as its context's timeout


@functools.lru_cache(maxsize=1024)
def tag_of(key: Any) -> int:
    """Return the tag of an operation: ranks that are in different ones never take each other's bytes."""
    return 2 * (zlib.crc32(repr(key).encode()) & LARGEST_TAG) + 1


class Pending(Protocol):
    """An exchange under way."""

    def wait(self, deadline: float) -> int:
        """Return the rank that sent what was received from any, when it is done, else -1; on a GPU, when the current
        stream waits for it. ``deadline`` is one of ``time.monotonic()``.
        """


class Wire(Protocol):
    """An engine between hosts.

    Attributes:
        name: in words.
        has_tags: it may be given receives before sends that the other rank waits for; else it does things in order.
        sent_bytes: that this rank has sent to other hosts.
        timeout_s: deadline of every wait.
    """

    name: str
    has_tags: bool
    sent_bytes: int
    timeout_s: float

    def exchange(self, sends: Parts, receives: Parts, tag: int) -> Pending:
        """Begin to send and to receive contiguous tensors [n] of bytes."""

    def receive_from_any(self, tensor: Tensor, tag: int) -> Pending:
        """Begin to receive bytes [n] from whichever rank sends first; of CPU tensors only."""

    def close(self) -> None:
        """Drop the connections; who waits for this rank is told. Idempotent."""


class GlooWire:
    """Gloo, for CPU tensors.

    Args:
        store: of the group, and for this alone.
        hosts, rank: of the group.
        group: its name, for messages.
        timeout_s: deadline of every wait.
    """

    name, has_tags = "gloo", True

    def __init__(self, store: dist.Store, hosts: Hosts, rank: int, group: str, timeout_s: float) -> None:
        self.hosts, self.rank, self.group, self.timeout_s = hosts, rank, group, timeout_s
        self.sent_bytes = 0
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack some of it
        self._sender = futures.ThreadPoolExecutor(1, f"iris_pg {group} sends")  # a thread, from the first large one on
        self._last: futures.Future[Any] | None = None  # that it was given
        self._lock = threading.Lock()  # of these two; an operation and a message may begin at once
        self._ways: list[Any] = []  # contexts of Gloo's
        self._reached: int | None = None  # a rank that there is a connection to
        try:
            for way in range(2 if hosts.world <= LARGEST_MESH else 1):
                options = gloo._Options()
                options._timeout = datetime.timedelta(seconds=timeout_s)
                options._threads = 1  # it is given messages alone, which have no use for more
                options._devices = [self._device(hosts.places[rank][1])]
                prefix = dist.PrefixStore(f"way {way}", store)
                self._ways.append(dist.ProcessGroupGloo(prefix, rank, hosts.world, options))
            host = hosts.places[rank][0]
            everyone = [peer for other in hosts.others(host) for peer in hosts.members[other]]
            self._connect(everyone if hosts.world <= LARGEST_MESH else hosts.peers(rank))
        except BaseException:
            self.close()
            raise

    def _connect(self, peers: Sequence[int]) -> None:
        token, tokens = torch.zeros(1, dtype=torch.uint8), torch.zeros(len(peers), dtype=torch.uint8)
        tag, deadline = tag_of("connect"), time.monotonic() + self.timeout_s
        for way, gloo in enumerate(self._ways):
            works = [(peer, self._begin(way, "recv", tokens[k : k + 1], peer, tag)) for k, peer in enumerate(peers)]
            works += [(peer, self._begin(way, "send", token, peer, tag)) for peer in peers]
            _GlooPending(self, works).wait(deadline)
            # From here on it is for connecting alone: other waits are given what is left of their deadline.
            gloo._set_default_timeout(datetime.timedelta(seconds=max(self.timeout_s / _ATTEMPTS, 0.001)))

    @staticmethod
    def _device(index: int) -> Any:
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        if not interfaces:
            return dist.ProcessGroupGloo.create_default_device(lazy_init=True)
        interface = interfaces[index % len(interfaces)]
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)

    def exchange(self, sends: Parts, receives: Parts, tag: int) -> Pending:
        """See :class:`Wire`."""
        two = tag % 2 and len(self._ways) > 1  # of a message, its receiver may not know where it comes from
        works: list[tuple[int, Any]] = []
        for peer, tensor in receives:
            works.append((peer, self._begin(two and peer < self.rank, "recv", tensor, peer, tag)))
        for peer, tensor in sends:
            works.append((peer, self._send(two and peer > self.rank, tensor, peer, tag)))
            self.sent_bytes += tensor.nbytes
        return _GlooPending(self, works)

    def receive_from_any(self, tensor: Tensor, tag: int) -> Pending:
        """Begin to receive bytes [n] from whichever rank sends first."""
        return _GlooPending(self, [(ANY, self._begin(0, "recv_anysource", tensor, ANY, tag))])

    def _send(self, way: int, tensor: Tensor, peer: int, tag: int) -> Any:
        """Begin a send, after all that were begun before; return a work of Gloo's, or the future of one."""
        if tensor.nbytes < LARGE_BYTES and (self._last is None or self._last.done()):
            return self._begin(way, "send", tensor, peer, tag)
        with self._lock:
            if not self._ways:
                raise self._closed(peer)
            self._last = self._sender.submit(self._begin, way, "send", tensor, peer, tag)
            return self._last

    def _begin(self, way: int, call: str, tensor: Tensor, peer: int, tag: int) -> Any:
        ways = self._ways
        if not ways:
            raise self._closed(peer)
        begin = getattr(ways[way], call)
        try:
            return begin([tensor], tag) if peer == ANY else begin([tensor], peer, tag)
        except RuntimeError as error:
            raise self.failed(peer, error) from error

    def await_one(self, peer: int, work: Any, deadline: float) -> int:
        """Wait for a work of Gloo's; return the rank that it was with.

        Raises:
            DeadlineError, PeerLostError: naming the rank and its host.
        """
        if isinstance(work, futures.Future):
            try:
                work = work.result(max(deadline - time.monotonic(), 0.001))
            except TimeoutError as error:
                raise self.failed(peer, TimeoutError("timed out before it could be begun")) from error
        left = max(deadline - time.monotonic(), 0.001)
        try:
            work.wait(datetime.timedelta(seconds=left))
        except RuntimeError as error:
            raise self.failed(peer, error) from error
        self._reached = work._source_rank() if peer == ANY else peer
        return self._reached

    def failed(self, peer: int, error: BaseException) -> IrisError:
        """Return the error for what Gloo says about a peer."""
        said = str(error).partition("] ")[2] or str(error)
        said = (
            said.partition(". This is typically")[0].strip().splitlines()[0] if said.strip() else type(error).__name__
        )
        if "imed out" in said or "imeout" in said:
            late = DeadlineError(
                f"{self._named(peer)} did not send, or take, its bytes within {self.timeout_s:g} s: it is late, hangs "
                f"or is cut off ({said}) {self._where()}"
            )
            late.late = None if peer == ANY else peer
            return late
        return self.lost(peer, said)

    def lost(self, peer: int, said: str) -> PeerLostError:
        """Return the error for a peer that is gone."""
        return PeerLostError(f"{self._named(peer)} died, left the group or is cut off ({said}) {self._where()}")

    def _closed(self, peer: int) -> PeerLostError:
        return self.lost(peer, "this rank has closed its connections")

    def _named(self, peer: int) -> str:
        return "any rank" if peer == ANY else f"rank {peer} on host {self.hosts.name_of(peer)}"

    def _where(self) -> str:
        return where(group=self.group, rank=self.rank)

    def close(self) -> None:
        """See :class:`Wire`."""
        with self._lock:
            ways, self._ways = self._ways, []
            if self._reached is not None:  # all at once: whoever is released by one finds the others closed
                for gloo in ways[1:]:
                    self._sender.submit(_end, gloo, self._reached)
        if self._reached is not None:
            for gloo in ways[:1]:
                _end(gloo, self._reached)
        self._sender.shutdown()  # soon: sends that have not begun fail now; so memory that they read may go


def _end(gloo: Any, reached: int) -> None:
    """Close all connections of a context. Gloo has no call that ends what others wait for, in this process or
    elsewhere, and closes them only when nobody uses it any more; but a receive that is late makes it close all at once.
    """
    try:
        gloo.recv([torch.empty(1, dtype=torch.uint8)], reached, _NEVER).wait(_AT_ONCE)
    except RuntimeError:
        pass


class _GlooPending:
    def __init__(self, wire: GlooWire, works: list[tuple[int, Any]]) -> None:
        self._wire, self._works = wire, works

    def wait(self, deadline: float) -> int:
        """See :class:`Pending`."""
        source = -1
        for peer, work in self._works:
            reached = self._wire.await_one(peer, work, deadline)
            source = reached if peer == ANY else source
        return source


class NcclWire:
    """NCCL (or RCCL), for CUDA tensors. What it is given runs in the order of the current stream, as all else does.

    Args:
        as :class:`GlooWire`; NCCL's own watchdog keeps the deadline.
    """

    name, has_tags = "nccl", False

    def __init__(self, store: dist.Store, hosts: Hosts, rank: int, timeout_s: float) -> None:
        self.timeout_s, self.sent_bytes = timeout_s, 0
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        self._nccl: Any = dist.ProcessGroupNCCL(store, rank, hosts.world, options)

    def exchange(self, sends: Parts, receives: Parts, tag: int) -> Pending:
        """See :class:`Wire`. NCCL has no tags: it matches by order alone."""
        if not sends and not receives:
            return _NcclPending(None)
        nccl = self._nccl
        nccl._start_coalescing()  # so that sends and receives of one exchange do not wait for each other
        for peer, tensor in receives:
            nccl.recv([tensor], peer, 0)
        for peer, tensor in sends:
            nccl.send([tensor], peer, 0)
            self.sent_bytes += tensor.nbytes
        return _NcclPending(nccl._end_coalescing())

    def receive_from_any(self, tensor: Tensor, tag: int) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError("NCCL receives from no rank but the one it is given; pass src=")

    def close(self) -> None:
        """See :class:`Wire`."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()


class _NcclPending:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, deadline: float) -> int:
        """See :class:`Pending`."""
        if self._work is not None:
            self._work.wait()
        return -1
