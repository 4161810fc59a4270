"""One call of the conformance table on one rank: its tensors, and what is wrong with its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from table import reductions
from table.values import (
    Form,
    Shape,
    assign,
    blank,
    gaps_are_untouched,
    laid_out,
    moved_to,
    numbers,
    packed,
    random_bytes,
    same_bytes,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One cell of the table; the same on all ranks.

    Args:
        operation: a key of ``operations.OPERATIONS``.
        dtype: name of the element type.
        reduction: a key of ``reductions.OPERATIONS``; empty for operations that move.
        form: shape and layout of one rank's tensor; an output has the same layout where it can.
        group: a key of ``sample.GROUPS``.
        asynchronous: with ``async_op=True``.
        number: of the row, which the values depend on.
    """

    operation: str
    dtype: str
    reduction: str
    form: Form
    group: str
    asynchronous: bool
    number: int


@dataclass
class Call:
    """A row on one rank: makes its tensors, calls, and collects what is wrong with the results.

    Args:
        row: of the table.
        group: which the operation is called on.
        members: its ranks, as numbered in the default group.
        rounds_each: see ``reductions.mistake``.
        device: where the tensors of calls are; what they should hold is always computed on the CPU.
    """

    row: Row
    group: dist.ProcessGroup
    members: Sequence[int]
    rounds_each: bool = False
    device: torch.device = CPU
    mistakes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.world = self.group.rank(), self.group.size()
        self.dtype, self.shape = getattr(torch, self.row.dtype), self.row.form.shape
        self.root = self.row.number % self.world  # in the group
        self.op = reductions.OPERATIONS.get(self.row.reduction)
        self._outputs: list[torch.Tensor] = []

    # Tensors

    def values(self, rank: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """Return the values [shape] of what ``rank`` gives; ``part`` tells several tensors of it apart."""
        make = numbers if self.row.reduction else random_bytes
        made = make(self.dtype, self.shape if shape is None else shape, self.row.number, rank, part)
        if self.row.reduction in ("min", "max") and self.dtype.is_floating_point and made.numel() > 6:
            made.view(-1)[(self.row.number + 2 * rank) % made.numel()] = float("nan")
        return made

    def given(self, rank: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """Return the input of ``rank`` in the row's layout; its values are not always those of :meth:`values`."""
        return self._there(laid_out(self.row.form.layout, self.values(rank, part, shape)))

    def expected(self, rank: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """Return the values of :meth:`given`."""
        return packed(laid_out(self.row.form.layout, self.values(rank, part, shape)))

    def into(self, shape: Shape | None = None) -> torch.Tensor:
        """Return an output [shape] in the row's layout, in memory whose gaps are checked."""
        tensor = self._there(blank(self.row.form.layout, self.shape if shape is None else shape, self.dtype))
        self._outputs.append(tensor)
        return tensor

    def in_place(self, rank: int, part: int = 0) -> torch.Tensor:
        """Return an output that holds the values of ``rank``."""
        tensor = blank(self.row.form.layout, self.shape, self.dtype)
        assign(tensor, self.values(rank, part))
        tensor = self._there(tensor)
        self._outputs.append(tensor)
        return tensor

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device == CPU else moved_to(self.device, tensor)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == CPU else moved_to(CPU, tensor)

    def stacked(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return what a tensor that holds one part of each rank has, [world * n...], or [world] of scalars."""
        return torch.stack(parts) if not self.shape else torch.cat(parts)

    @property
    def wide(self) -> Shape:
        """The shape of :meth:`stacked`."""
        return (self.world * self.shape[0], *self.shape[1:]) if self.shape else (self.world,)

    # Calls

    def peer(self, rank: int) -> int:
        """Return the number in the default group of ``rank`` of the group."""
        return self.members[rank % self.world]

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """Call a collective, and wait where it is asynchronous: for its work, or for its future."""
        work = function(*args, group=self.group, async_op=self.row.asynchronous, **keywords)
        if self.row.asynchronous:
            self.wait(work)

    def wait(self, work: dist.Work | torch._C.Future | None, on_host: bool = False) -> None:
        """Wait for a work: by itself or by its future, alternating with the number of the row. ``on_host``: until it is
        done, which the future of a CUDA operation does not wait for. A synchronous one may have none.
        """
        if work is None:
            assert not self.row.asynchronous and self.device != CPU
        elif (
            self.row.number % 4 < 2 or (on_host and self.device != CPU) or isinstance(work, torch._C.Future)
        ):  # torch's *_coalesced return futures
            work.wait()
        else:
            work.get_future().wait()

    # Results

    def moved(self, actual: torch.Tensor, expected: torch.Tensor, what: str = "output") -> None:
        """Note a mistake unless a tensor holds these very bytes."""
        actual = self._here(actual)
        if not same_bytes(actual, expected):
            self.mistakes.append(f"{what} is {actual.flatten()[:8]}... and not {expected.flatten()[:8]}...")

    def reduced(self, actual: torch.Tensor, operands: list[torch.Tensor]) -> None:
        """Note a mistake unless a tensor is the reduction of ``operands``, which are in the order of ranks."""
        if text := reductions.mistake(self.row.reduction, operands, self._here(actual), self.rounds_each):
            self.mistakes.append(text)

    def equal(self, actual: Any, expected: Any) -> None:
        """Note a mistake unless two things are equal."""
        if actual != expected:
            self.mistakes.append(f"{actual!r} and not {expected!r}")

    def mistake(self) -> str:
        """Return what is wrong, in words; nothing when all is right."""
        if not all(gaps_are_untouched(self._here(output)) for output in self._outputs):
            self.mistakes.append("bytes between the elements of an output have changed")
        return "; ".join(self.mistakes)
