"""Every error this package raises on purpose.

Each message says what is wrong, with the values; what is allowed; and what to do. Where they are known it ends in
``[group=... rank=... op=... seq=...]``. All kinds derive from :class:`IrisError`, which is a
``torch.distributed.DistBackendError`` (a ``RuntimeError``), so code written for NCCL's errors catches them too.
"""

from __future__ import annotations

from torch.distributed import DistBackendError


class IrisError(DistBackendError):
    """Base of every error raised by iris_pg."""


class ArgumentError(IrisError, ValueError):
    """An argument has a value, shape, dtype or layout that the operation does not take. Nothing has moved."""


class OptionError(IrisError, ValueError):
    """An option or an ``IRIS_PG_*`` variable has a value that is not one of the valid ones."""


class UnsupportedError(IrisError, NotImplementedError):
    """The operation, or the engine asked for, does not exist here; the message names the alternative."""


class HeapExhaustedError(IrisError, MemoryError):
    """The symmetric heap, or the machine's memory under it, has no room for the request."""


class MismatchError(IrisError):
    """Ranks of one group do not agree (sizes, options, order of calls); the message names them."""


class DeadlineError(IrisError, TimeoutError):
    """A wait passed its deadline; the message names the ranks that are late.

    Attributes:
        late: the rank that was waited for, or the last that is known to keep others waiting, where it is one of
            another host; else None.
    """

    late: int | None = None


class PeerLostError(IrisError, ConnectionError):
    """A rank of the group has died or left while this rank still needed it."""


class ClosedError(IrisError):
    """The group, heap or context has been closed, or has failed before; the message says when and why."""


class PacketError(IrisError):
    """A copy-engine packet breaks the rules of its format (field range, alignment, reserved bits, opcode)."""


class QueueError(IrisError):
    """A copy-engine queue is stuck or broken; the message holds a dump of the queue."""


class DriverError(IrisError):
    """A call to a GPU's driver failed.

    Args:
        text: names the call and its status.
        status: the driver's number for it.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class ProgramError(IrisError):
    """A set of programs is wrong: deadlock, race, unbalanced flag, or a byte from the wrong place."""


def where(**known: object) -> str:
    """Return the ``[group=... rank=... op=... seq=...]`` suffix of a message, with the fields that are known."""
    return "[" + " ".join(f"{name}={value}" for name, value in known.items() if value is not None) + "]"
