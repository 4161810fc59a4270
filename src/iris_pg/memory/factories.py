"""Tensors of a symmetric heap by the names of torch's factories.

Every call is collective, as :meth:`SymmetricHeap.empty` is: all ranks make the same tensors in the same order. One that
fills its tensor returns when every rank has filled its own, so that none overwrites what a faster one has put there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris_pg.errors import ArgumentError
from iris_pg.memory.heap import SymmetricHeap

Tensor = torch.Tensor
Size = int | Sequence[int]


class HeapTensors:
    """Factories of tensors in :attr:`heap`; each argument means what it does in torch.

    Raises (all of them):
        HeapExhaustedError, MismatchError, DeadlineError, PeerLostError: as :meth:`SymmetricHeap.empty`.
    """

    heap: SymmetricHeap

    def empty(self, *size: Size, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor [size] in the heap. Collective."""
        return self.heap.empty(*size, dtype=dtype)

    def zeros(self, *size: Size, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [size] of zeros in the heap. Collective."""
        return self._filled("zeros", lambda t: t.zero_(), size, dtype)

    def ones(self, *size: Size, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [size] of ones in the heap. Collective."""
        return self._filled("ones", lambda t: t.fill_(1), size, dtype)

    def full(self, size: Size, fill_value: complex, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [size] of ``fill_value``, whose type gives the dtype as in torch, in the heap. Collective."""
        dtype = dtype or torch.full((), fill_value).dtype
        return self._filled("full", lambda t: t.fill_(fill_value), (size,), dtype)

    def arange(
        self, start: float, end: float | None = None, step: float = 1, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return ``start, start + step, ...`` up to ``end``, or ``0, 1, ...`` up to ``start``. Collective."""
        first, last = (0, start) if end is None else (start, end)
        values = torch.arange(first, last, step, dtype=dtype)
        return self._filled("arange", lambda t: t.copy_(values), values.size(), values.dtype)

    def rand(self, *size: Size, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [size], uniform in [0, 1), each rank's from its own generator, in the heap. Collective."""
        return self._filled("rand", lambda t: t.uniform_(generator=generator), size, dtype)

    def randn(self, *size: Size, generator: torch.Generator | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [size], normal with mean 0 and variance 1, in the heap. Collective."""
        return self._filled("randn", lambda t: t.normal_(generator=generator), size, dtype)

    def randint(
        self,
        low: int = 0,
        high: Any = None,
        size: Size | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.int64,
    ) -> Tensor:
        """Return integers in [low, high) in the heap: ``randint([low,] high, size)``. Collective."""
        if size is None and isinstance(high, Sequence):
            low, high, size = 0, low, high
        elif high is None:
            low, high = 0, low
        if size is None:
            raise ArgumentError("randint: no size; call randint(high, size) or randint(low, high, size)")
        return self._filled("randint", lambda t: t.random_(low, high, generator=generator), (size,), dtype)

    def empty_like(self, input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised contiguous tensor of the size and dtype of ``input``, in the heap. Collective."""
        return self.empty(input.size(), dtype=dtype or input.dtype)

    def zeros_like(self, input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As :meth:`zeros`, with the size and dtype of ``input``. Collective."""
        return self.zeros(input.size(), dtype=dtype or input.dtype)

    def ones_like(self, input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As :meth:`ones`, with the size and dtype of ``input``. Collective."""
        return self.ones(input.size(), dtype=dtype or input.dtype)

    def full_like(self, input: Tensor, fill_value: complex, *, dtype: torch.dtype | None = None) -> Tensor:
        """As :meth:`full`, with the size and dtype of ``input``. Collective."""
        return self.full(input.size(), fill_value, dtype=dtype or input.dtype)

    def rand_like(
        self, input: Tensor, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As :meth:`rand`, with the size and dtype of ``input``. Collective."""
        return self.rand(input.size(), generator=generator, dtype=dtype or input.dtype)

    def randn_like(
        self, input: Tensor, *, generator: torch.Generator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """As :meth:`randn`, with the size and dtype of ``input``. Collective."""
        return self.randn(input.size(), generator=generator, dtype=dtype or input.dtype)

    def randint_like(
        self,
        input: Tensor,
        low: int = 0,
        high: int | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """As :meth:`randint`, with the size and dtype of ``input``. Collective."""
        return self.randint(low, high, input.size(), generator=generator, dtype=dtype or input.dtype)

    def _filled(
        self, name: str, fill: Callable[[Tensor], Any], size: Sequence[Size], dtype: torch.dtype | None
    ) -> Tensor:
        tensor = self.heap.empty(*size, dtype=dtype)
        try:
            fill(tensor)
        except BaseException:
            self.heap.free(tensor)
            raise
        if self.heap.device.type != "cpu":
            torch.cuda.synchronize(self.heap.device)
        self.heap.links.exchange({}, what=name)
        return tensor
