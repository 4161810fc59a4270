"""An operation on CUDA tensors at their addresses, which can be performed any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.watch import Key, tag_of

if TYPE_CHECKING:
    from iris_pg.device_copies import Prepared
    from iris_pg.device_exchanges import PreparedExchanges


class DeviceOperation:
    """What an operation is, for its rank.

    Args:
        key, local, flow, names: as in :meth:`iris_pg.transport.Transport.run`.
        addresses: of the buffers, by position in ``names``.

    Attributes:
        tag: of the key, for flags.
        launches: its launches, once it is known to be one of the cu engine: the same every time.
        ready: what it is as copies, by slot, when no graph is captured.
        halves: of one that is kernels between some ranks and copies between others, the two.
    """

    __slots__ = ("addresses", "flow", "halves", "key", "launches", "local", "names", "ready", "tag")

    def __init__(
        self,
        key: Key,
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str],
        addresses: Sequence[int],
    ) -> None:
        self.key, self.local, self.flow, self.names = key, local, flow, names
        self.addresses, self.tag = tuple(addresses), tag_of(key)
        self.launches: PreparedExchanges | None = None
        self.ready: dict[int, Prepared] = {}
        self.halves: tuple[DeviceOperation, DeviceOperation] | None = None

    def split(self, most: int) -> tuple[DeviceOperation, DeviceOperation]:
        """Return the two operations of which this one consists: between ranks where no message is larger than ``most``
        bytes, and between others.
        """
        if self.halves is None:
            flow = self.flow(self.key, self.local)
            assert isinstance(flow, Flow)
            small, large = flow.split(most)
            self.halves = self._of(small), self._of(large)
        return self.halves

    def _of(self, flow: Flow) -> DeviceOperation:
        return DeviceOperation(self.key, flow, _itself, self.names, self.addresses)


def _itself(key: Key, flow: Flow) -> Flow:
    return flow


__all__ = ["DeviceOperation"]
