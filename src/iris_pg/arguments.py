"""Checks of what users pass to collectives, before any byte moves. Pure; raises, or returns what the operation
needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iris_pg.errors import ArgumentError, UnsupportedError


def check_tensor(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` is a dense tensor on the CPU or on a CUDA device.

    Raises:
        ArgumentError: not a tensor, or sparse or another layout. UnsupportedError: on a device of another type.
    """
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and (tensor.is_cuda or tensor.is_cpu):
        return  # as nearly always
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{op}: {name} is {type(tensor).__name__}; it takes a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{op}: {name} has layout {tensor.layout}; it takes a dense tensor (call .to_dense())")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{op}: {name} is on {tensor.device}; it takes tensors on the CPU or on a CUDA device")


def check_output(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` can be written: every element has a place of its own.

    Raises:
        ArgumentError: an expanded or otherwise overlapping tensor. Also what :func:`check_tensor` raises.
    """
    check_tensor(op, name, tensor)
    if not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ArgumentError(
            f"{op}: {name} of size {tuple(tensor.size())} and stride {tensor.stride()} has elements that share memory "
            "(an expanded "
            "tensor?); an output needs memory for each element; pass a contiguous tensor"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory; exact for views made by slicing, transposing and expanding."""
    if tensor.numel() < 2:
        return False
    reach = 0  # elements spanned by the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def check_same_dtype(op: str, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ArgumentError unless ``tensor`` has ``dtype``."""
    if tensor.dtype != dtype:
        raise ArgumentError(f"{op}: {name} has dtype {tensor.dtype} and the input {dtype}; they must be the same")


def check_same_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ArgumentError unless ``tensor`` is on ``device``."""
    if tensor.device != device:
        raise ArgumentError(f"{op}: {name} is on {tensor.device} and another tensor on {device}; all are on one device")


def check_rank(op: str, name: str, rank: int, world: int) -> None:
    """Raise ArgumentError unless ``rank`` is a rank of the group."""
    if not 0 <= rank < world:
        raise ArgumentError(
            f"{op}: {name}={rank} is not a rank of this group; it takes 0..{world - 1} (ranks in the group)"
        )


def _are_usual(output: torch.Tensor, input: torch.Tensor) -> bool:
    """Return whether an output and an input raise nothing in the checks of each of them, and of both together but for
    their sizes, for the usual reason: they are contiguous, and alike.
    """
    return (
        isinstance(output, torch.Tensor)
        and isinstance(input, torch.Tensor)
        and output.layout is torch.strided
        and input.layout is torch.strided
        and output.is_contiguous()
        and output.dtype is input.dtype
        and output.device == input.device
        and (output.is_cuda or output.is_cpu)
    )


def check_gathered(op: str, output: torch.Tensor, input: torch.Tensor, world: int) -> None:
    """Raise ArgumentError unless ``output`` holds ``world`` inputs of its dtype, concatenated or stacked."""
    if not _are_usual(output, input):
        check_tensor(op, "input", input)
        check_output(op, "output", output)
        check_same_dtype(op, "output", output, input.dtype)
        check_same_device(op, "output", output, input.device)
    if output.numel() != world * input.numel():
        raise ArgumentError(
            f"{op}: output of size {tuple(output.size())} has {output.numel()} elements; it takes {world} x "
            f"{input.numel()} for "
            f"{world} ranks and an input of size {tuple(input.size())}"
        )


def check_list(op: str, name: str, tensors: Sequence[torch.Tensor], world: int, dtype: torch.dtype) -> None:
    """Raise unless ``tensors`` is one output of ``dtype`` for each rank."""
    if len(tensors) != world:
        raise ArgumentError(f"{op}: {name} has {len(tensors)} tensors; it takes one for each of the {world} ranks")
    for i, tensor in enumerate(tensors):
        check_output(op, f"{name}[{i}]", tensor)
        check_same_dtype(op, f"{name}[{i}]", tensor, dtype)
        check_same_device(op, f"{name}[{i}]", tensor, tensors[0].device)


def check_scattered(op: str, output: torch.Tensor, input: torch.Tensor, world: int) -> None:
    """Raise ArgumentError unless ``input`` holds ``world`` outputs of its dtype, concatenated or stacked."""
    if not _are_usual(output, input):
        check_tensor(op, "input", input)
        check_output(op, "output", output)
        check_same_dtype(op, "output", output, input.dtype)
        check_same_device(op, "output", output, input.device)
    if input.numel() != world * output.numel():
        raise ArgumentError(
            f"{op}: input of size {tuple(input.size())} has {input.numel()} elements; it takes {world} x "
            f"{output.numel()} for {world} ranks and an output of size {tuple(output.size())}"
        )


def check_inputs(op: str, name: str, tensors: Sequence[torch.Tensor], world: int, dtype: torch.dtype) -> None:
    """Raise unless ``tensors`` is one input of ``dtype`` for each rank."""
    if len(tensors) != world:
        raise ArgumentError(f"{op}: {name} has {len(tensors)} tensors; it takes one for each of the {world} ranks")
    for i, tensor in enumerate(tensors):
        check_tensor(op, f"{name}[{i}]", tensor)
        if tensor.dtype != dtype:
            raise ArgumentError(f"{op}: {name}[{i}] has dtype {tensor.dtype} and another tensor {dtype}; one for all")
        check_same_device(op, f"{name}[{i}]", tensor, tensors[0].device)


def split_bytes(op: str, name: str, tensor: torch.Tensor, splits: Sequence[int], world: int) -> tuple[int, ...]:
    """Return the bytes of each rank's part of ``tensor``, given rows (along dimension 0), or equal parts when empty.

    Raises:
        ArgumentError: not one split for each rank, a negative one, or not as many rows as the tensor has.
    """
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % world:
            raise ArgumentError(
                f"{op}: {name} has {rows} rows, which {world} ranks cannot share equally; pass {name}_split_sizes"
            )
        splits = [rows // world] * world
    if len(splits) != world or min(splits) < 0 or sum(splits) != rows:
        raise ArgumentError(
            f"{op}: {name}_split_sizes={list(splits)}; it takes one number of rows for each of {world} ranks, none "
            "negative, "
            f"{rows} in all (dimension 0 of {name})"
        )
    row = tensor.numel() // rows * tensor.element_size() if rows else 0
    return tuple(n * row for n in splits)


def check_apart(op: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Raise ArgumentError when contiguous ``input`` and ``output`` share memory."""
    start = input.data_ptr() - output.data_ptr()
    if -input.numel() * input.element_size() < start < output.numel() * output.element_size():
        raise ArgumentError(f"{op}: the input and the output share memory; pass two tensors")


def check_lists_apart(op: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], own: int) -> None:
    """Raise ArgumentError when a contiguous output shares memory with a contiguous input.

    In place is allowed: output ``own`` may begin where this rank's own input does, input ``own`` of several or the only
    one.
    """
    places = [(t.data_ptr(), t.numel() * t.element_size()) for t in (*outputs, *inputs)]
    written, read = places[: len(outputs)], places[len(outputs) :]
    if max(at + n for at, n in written) <= min(at for at, _ in read):
        return
    for i, (output, n) in enumerate(written):
        for j, (input, m) in enumerate(read):
            in_place = i == own and j == min(own, len(read) - 1) and output == input
            if n and m and not in_place and -m < input - output < n:
                raise ArgumentError(
                    f"{op}: output {i} and input {j} share memory; only this rank's own ones, of index {own}, may be "
                    "the same (in place)"
                )


def check_overlap(
    op: str, whole: torch.Tensor, part: torch.Tensor, own: int, names: tuple[str, str] = ("output", "input")
) -> None:
    """Raise ArgumentError when contiguous ``part`` overlaps ``whole`` anywhere but at byte ``own`` of it, exactly (in
    place); ``names`` are what the caller knows the two by.
    """
    nbytes = part.numel() * part.element_size()
    start = part.data_ptr() - whole.data_ptr()
    if start != own and -nbytes < start < whole.numel() * whole.element_size():
        raise ArgumentError(
            f"{op}: the {names[1]} overlaps the {names[0]} at byte {start}; it may only be this rank's own part, at "
            "byte "
            f"{own} (in place)"
        )
