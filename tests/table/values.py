"""Element types, values that depend on rank, position and iteration, and memory layouts of the conformance table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
FLOATS_8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
COMPLEX = ("complex32", "complex64", "complex128")
REDUCED = ("bool", *INTEGERS, *FLOATS, *FLOATS_8, *COMPLEX)
MOVED = (*REDUCED, "float8_e8m0fnu", "float4_e2m1fn_x2")

GAP = 0xA5
"""What every byte of an output's storage holds before an operation, and those between its elements also after it."""


def random_bytes(dtype: torch.dtype, shape: Shape, *salt: int) -> torch.Tensor:
    """Return a tensor of any bytes at all, NaNs included (of bool, only its two values)."""
    generator = torch.Generator().manual_seed(hash(salt) & (2**63 - 1))
    numel = math.prod(shape)
    drawn = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (drawn % 2 if dtype == torch.bool else drawn).view(dtype).view(shape)


def numbers(dtype: torch.dtype, shape: Shape, *salt: int) -> torch.Tensor:
    """Return numbers that can be added and multiplied: any integers, and floating point of about one."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return random_bytes(dtype, shape, *salt)
    generator = torch.Generator().manual_seed(hash(salt) & (2**63 - 1))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


# Layouts: the same values, elsewhere in memory ------------------------------------------------------------------------


def storage(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [numel] elements whose every byte is :data:`GAP` (of bool, which has only two values, False)."""
    return torch.full((numel * dtype.itemsize,), 0 if dtype == torch.bool else GAP, dtype=torch.uint8).view(dtype)


def _contiguous(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return storage(math.prod(shape), dtype).view(shape)


def _transposed(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return storage(math.prod(shape), dtype).view(shape[::-1]).permute(*reversed(range(len(shape))))


def _strided(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return storage(2 * math.prod(shape) + 1, dtype)[1:].view(*shape, 2)[..., 0]


def _at_an_offset(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return storage(math.prod(shape) + 5, dtype)[3 : 3 + math.prod(shape)].view(shape)


def _channels_last(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    n, c, h, w = shape
    return storage(math.prod(shape), dtype).view(n, h, w, c).permute(0, 3, 1, 2)


LAYOUTS: dict[str, Callable[[Shape, torch.dtype], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "strided": _strided,
    "offset": _at_an_offset,
    "channels_last": _channels_last,
}
"""Name -> what makes a tensor [shape] that lies so; "expanded" is one for inputs alone, see :func:`laid_out`."""


def blank(layout: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return an output to be written, in ``layout``; contiguous where that layout is not for outputs, or of others
    dimensions.
    """
    made = _contiguous if layout == "expanded" or (layout == "channels_last" and len(shape) != 4) else LAYOUTS[layout]
    return made(shape, dtype)


def laid_out(layout: str, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor with these values in ``layout``; "expanded" keeps only the first along dimension 0."""
    if layout == "expanded":
        return values[:1].clone().expand(values.shape)
    tensor = blank(layout, tuple(values.shape), values.dtype)
    assign(tensor, values)
    return tensor


def assign(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor of the same type and any layout; torch lacks some copies of 4-bit types."""
    if tensor.dtype.itemsize == 1:
        tensor, values = tensor.view(torch.uint8), values.view(torch.uint8)
    tensor.copy_(values)


def moved_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose whole storage is a copy on ``device``, laid out like ``tensor``, gaps included."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).to(device)
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    return made.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in a row in memory, with the strides of such."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    assign(made, tensor)
    return made


def gaps_are_untouched(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of an output's storage that are no element of it are as :func:`storage` left them."""
    size = tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    used = torch.zeros(whole.numel() // size, dtype=torch.bool)
    used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return bool((whole.view(-1, size)[~used] == (0 if tensor.dtype == torch.bool else GAP)).all())


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype, and bytes of elements."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return packed(tensor).view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Form:
    """A shape [...] and how it lies in memory."""

    shape: Shape
    layout: str


FORMS = (
    Form((7,), "contiguous"),
    Form((3, 5), "transposed"),
    Form((2, 3, 4, 5), "channels_last"),
    Form((), "contiguous"),
    Form((3, 5), "expanded"),
    Form((37,), "offset"),
    Form((2, 3, 4, 5), "strided"),
    Form((1, 0, 2), "contiguous"),
    Form((1,), "offset"),
    Form((2, 1, 3), "transposed"),
    Form((0,), "contiguous"),
    Form((301,), "strided"),
    Form((5, 3, 1, 7), "expanded"),
    Form((1021,), "contiguous"),
    Form((9, 0), "transposed"),
    Form((3, 2, 1, 1), "channels_last"),
    Form((33, 31), "transposed"),
)
