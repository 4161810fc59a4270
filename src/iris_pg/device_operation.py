"""An operation on CUDA tensors at their addresses, which can be performed any number of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from iris_pg.collectives.flow import Flow, Fold
from iris_pg.watch import Key

if TYPE_CHECKING:
    from iris_pg.device_exchanges import PreparedExchanges


class DeviceOperation:
    """What an operation is, for its rank.

    Args:
        key, local, flow, names: as in :meth:`iris_pg.transport.Transport.run`.
        addresses: of the buffers, by position in ``names``.

    Attributes:
        launches: its launches, once it is known to be one of the cu engine: the same every time.
    """

    __slots__ = ("addresses", "flow", "key", "launches", "local", "names")

    def __init__(
        self,
        key: Key,
        local: Any,
        flow: Callable[[Key, Any], Flow | Fold],
        names: Sequence[str],
        addresses: Sequence[int],
    ) -> None:
        self.key, self.local, self.flow, self.names = key, local, flow, names
        self.addresses = tuple(addresses)
        self.launches: PreparedExchanges | None = None


__all__ = ["DeviceOperation"]
