"""Messages of a group that spans hosts: within a host by its own group, between hosts by the wire."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from iris_pg import arguments
from iris_pg.device_work import End, StreamWork, raw_stream
from iris_pg.errors import ArgumentError, UnsupportedError
from iris_pg.multinode.hosts import Hosts
from iris_pg.multinode.wire import LARGEST_TAG, Wire
from iris_pg.operations.base import copy, dense, room
from iris_pg.watch import Key
from iris_pg.work import IrisWork

if TYPE_CHECKING:
    from iris_pg.process_group import IrisProcessGroup

Tensor = torch.Tensor


class WireWork(IrisWork):
    """A message to or from a rank of another host.

    Whoever waits for it finishes it. A thread does where nobody waits: for a future, for a wait with a deadline of its
    own, and for whoever only asks whether it is done.

    Args:
        outputs: what ``result()`` and the future give.
        keep: tensors that it reads or writes.
        finish: returns the other rank when it is done; raises what ended it.
    """

    def __init__(self, outputs: list[Any], keep: Any, finish: Callable[[], int]) -> None:
        super().__init__(outputs, drive=self._drive)
        assert self.completion
        self.completion.keep = keep
        self._peer, self._finish = -1, finish
        self._finishing, self._lock = False, threading.Lock()

    def _drive(self, work: IrisWork) -> None:
        with self._lock:
            if self._finishing:
                return  # by another thread, which tells the completion
            self._finishing = True
        error: BaseException | None = None
        try:
            self._peer = self._finish()
        except BaseException as raised:
            error = raised
        assert self.completion
        if tell := self.completion.finished(error):
            tell()

    def _finish_aside(self) -> None:
        if not self._finishing:
            threading.Thread(target=self._drive, args=(self,), name="iris_pg message", daemon=True).start()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """See :meth:`IrisWork.wait`."""
        if timeout:
            self._finish_aside()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """See :meth:`IrisWork.is_completed`."""
        self._finish_aside()
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """See :meth:`IrisWork.get_future`."""
        future = super().get_future()
        self._finish_aside()
        return future

    def source_rank(self) -> int:
        """Return the other rank, once the work is done."""
        return self._peer

    _source_rank = source_rank


class WireMessages:
    """The calls for messages, of :class:`iris_pg.multinode.group.HierarchicalProcessGroup`."""

    if TYPE_CHECKING:
        hosts: Hosts
        local: IrisProcessGroup
        _host: int
        _world: int
        _failure: BaseException | None

        def _only(self, op: str, tensors: list[Tensor]) -> Tensor: ...
        def _check_open(self) -> None: ...
        def _place(self, op: str | None = None) -> str: ...
        def _wire(self, device: torch.device) -> Wire: ...
        def _coalesced(self, work: IrisWork) -> IrisWork: ...
        def _fail(self, error: BaseException, key: Key, number: int) -> BaseException: ...

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> IrisWork:
        """Send a tensor of any layout to rank ``dst`` of the group. See torch.distributed.

        Within the host as in :meth:`IrisProcessGroup.send`. To another host it is done when the bytes have left, which
        may be when the other rank receives.
        """
        tensor = self._only("send", tensors)
        arguments.check_rank("send", "dst", dst, self._world)
        arguments.check_tensor("send", "tensor", tensor)
        host, index = self.hosts.places[dst]
        if host == self._host:
            self._check_open()
            return self._coalesced(self.local.send(tensors, index, tag))
        return self._message("send", dense(tensor), dst, tag, tensors, None)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> IrisWork:
        """Receive into a tensor of any layout from rank ``src`` of the group. See torch.distributed."""
        tensor = self._only("recv", tensors)
        arguments.check_rank("recv", "src", src, self._world)
        arguments.check_output("recv", "tensor", tensor)
        host, index = self.hosts.places[src]
        if host == self._host:
            self._check_open()
            return self._coalesced(self.local.recv(tensors, index, tag))
        target = room(tensor)
        after = None if target is tensor else lambda: copy([(tensor, target)])
        return self._message("recv", target, src, tag, tensors, after)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> IrisWork:
        """Receive into a tensor of any layout from whichever rank sends first. See torch.distributed.

        Raises:
            UnsupportedError: a rank that is not alone on its host, or a CUDA tensor.
        """
        tensor = self._only("recv", tensors)
        arguments.check_output("recv", "tensor", tensor)
        if len(self.hosts.members[self._host]) > 1 or tensor.device.type != "cpu":
            raise UnsupportedError(
                "recv: from any rank, in a group that spans hosts: messages of this host's ranks and those of others "
                "come by two ways, and what waits at one cannot be taken back when the other has one; pass src=, or "
                f"use a group of one host, or of one rank of each {self._place('recv')}"
            )
        target = room(tensor)
        after = None if target is tensor else lambda: copy([(tensor, target)])
        return self._message("recv", target, None, tag, tensors, after)

    recvAnysource = recv_anysource  # noqa: N815 (torch's name)

    def _message(
        self,
        op: str,
        tensor: Tensor,
        peer: int | None,
        tag: int,
        outputs: list[Tensor],
        after: Callable[[], None] | None,
    ) -> IrisWork:
        self._check_open()
        if not 0 <= tag <= LARGEST_TAG:
            raise ArgumentError(f"{op}: tag={tag}; between hosts it takes 0..{LARGEST_TAG} {self._place(op)}")
        wire, data = self._wire(tensor.device), _as_bytes(tensor)
        key, number = (op, tensor.nbytes, "bytes, tag", tag), 0  # no number: messages are not in one order
        try:
            if peer is None:
                pending = wire.receive_from_any(data, 2 * tag)
            else:
                sends, receives = ([(peer, data)], []) if op == "send" else ([], [(peer, data)])
                pending = wire.exchange(sends, receives, 2 * tag)
        except BaseException as error:
            raise self._fail(error, key, number) from error

        def finish() -> int:
            try:
                source = pending.wait(time.monotonic() + wire.timeout_s)
            except BaseException as error:
                raise self._fail(error, key, number) from error
            if after:
                after()
            return source if peer is None else peer

        if tensor.device.type != "cpu":
            finish()
            end = End(torch.cuda.current_stream(tensor.device), [])
            raw = raw_stream(tensor.device)
            return self._coalesced(StreamWork(outputs, tensor.device, raw, end, lambda: self._failure))
        return self._coalesced(WireWork(outputs, (tensor, data), finish))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return contiguous ``tensor`` as bytes [n]; one of its own for an empty tensor, which is a message like others."""
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.uint8, device=tensor.device)
    return tensor.detach().reshape(-1).view(torch.uint8)


__all__ = ["WireMessages", "WireWork"]
