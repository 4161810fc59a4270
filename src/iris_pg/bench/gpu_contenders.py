"""What is measured on GPUs: the contenders, with their groups and the memory that each of them takes.

A contender is named ``iris:ENGINE[:COMM_SMS][:MEMORY]``, ``nccl``, ``nccl:zero-cta`` (its copy engines, on symmetric
memory) or ``torch:low-contention`` (the all-gather of torch's symmetric memory). ``MEMORY`` is that of an iris output:
``ordinary``, ``heap``, ``inplace`` (in the heap, with the input in its place), or ``input`` (the input in the heap, and
not the output). ``nccl:zero-cta`` and ``torch:low-contention`` cannot be in one run, as torch has one kind of symmetric
memory in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from iris_pg.bench.operations import Operation
from iris_pg.errors import ArgumentError
from iris_pg.options import ENGINES, Options
from iris_pg.platforms.gpu import platform as gpu

Tensor = torch.Tensor
Call = Callable[[], object]

MEMORIES = ("ordinary", "heap", "inplace", "input")
PEER_COPY = "peer copy"
"""One copy of "bytes a rank" to the next rank by a copy engine, without flags: the floor of an all-gather of two."""

_HEAP_BYTES = 16 << 30


class Contender(NamedTuple):
    """Something that can do an operation.

    Args:
        name: as on the command line.
        backend: "iris", "nccl" or "torch".
        engine, comm_sms: of an iris group, else "" and None.
        memory: one of :data:`MEMORIES`, or "symmetric".
    """

    name: str
    backend: str
    engine: str
    comm_sms: int | None
    memory: str

    def takes(self, operation: Operation) -> bool:
        """Return whether it can do an operation, and does it otherwise than another contender."""
        if self.memory in ("inplace", "input") or self.backend == "torch":
            return operation.name == "all_gather"
        return operation.uses_heap or self.memory != "heap"


def parse(name: str) -> Contender:
    """Return the contender of a name.

    Raises:
        ArgumentError: no such contender.
    """
    if name == "nccl":
        return Contender(name, "nccl", "", None, "ordinary")
    if name in ("nccl:zero-cta", "torch:low-contention"):
        return Contender(name, name.split(":")[0], "", None, "symmetric")
    backend, *parts = name.split(":")
    engine = parts.pop(0) if parts else ""
    comm_sms = int(parts.pop(0)) if parts and parts[0].isdigit() else None
    memory = parts.pop(0) if parts else "ordinary"
    if backend != "iris" or engine not in ENGINES or memory not in MEMORIES or parts:
        raise ArgumentError(
            f"contender {name!r}; it is iris:ENGINE[:COMM_SMS][:MEMORY] (engine {', '.join(ENGINES)}; memory "
            f"{', '.join(MEMORIES)}), nccl, nccl:zero-cta or torch:low-contention"
        )
    return Contender(name, backend, engine, comm_sms, memory)


class Field:
    """The contenders of a run, with a process group for each that needs one of its own. Collective to make.

    Args:
        contenders: at least one.
        device: this rank's GPU.
    """

    def __init__(self, contenders: Sequence[Contender], device: torch.device) -> None:
        self.contenders, self.device = list(contenders), device
        symmetric = {c.backend for c in contenders if c.memory == "symmetric"}
        if len(symmetric) > 1:
            raise ArgumentError("nccl:zero-cta and torch:low-contention cannot be in one run; run one after the other")
        if "nccl" in symmetric:
            _symmetric_memory().set_backend("NCCL")
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._inputs: dict[int, Tensor] = {}  # in a heap, by the address of the output
        for c in contenders:
            key = self._key(c)
            if key not in self._groups:
                self._groups[key] = self._open(c)

    @staticmethod
    def _key(c: Contender) -> tuple[Any, ...]:
        return c.backend, c.engine, c.comm_sms, c.memory == "symmetric"

    def _open(self, c: Contender) -> Any:
        if c.backend == "iris":
            ours = Options(engine=c.engine, comm_sms=c.comm_sms, heap_bytes=_HEAP_BYTES)
            return dist.new_group(backend="iris", pg_options=ours)
        if c.name != "nccl:zero-cta":
            return dist.new_group(backend="nccl")
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        group = dist.new_group(backend="nccl", pg_options=options)
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)  # symmetric memory takes a communicator
        return group

    def group(self, c: Contender) -> Any:
        """Return the process group of a contender."""
        return self._groups[self._key(c)]

    def call(self, c: Contender, operation: Operation, input: Tensor, numel: int) -> tuple[Call, Callable[[], Tensor]]:
        """Return what calls ``operation`` once, and what returns its output of the last call, [numel]. Collective.

        The call reads ``input``, which may be written anew between calls, but for contenders whose input is elsewhere:
        those copy it there when the output is asked for, so that is asked for behind every change.
        """
        group = self.group(c)
        if c.backend == "torch":
            name, source = group.group_name, self._symmetric(c, input.numel(), input.dtype)
            last: list[Tensor] = []

            def gather() -> None:
                made = torch.ops.symm_mem._low_contention_all_gather(source, name)
                last[:] = [torch.ops._c10d_functional.wait_tensor(made)]

            def output() -> Tensor:
                source.copy_(input)
                gather()
                return last[0]

            return gather, output
        made = self._output(c, group, numel, input.dtype)
        source = input
        if c.memory == "symmetric":
            source = self._symmetric(c, input.numel(), input.dtype)
        elif c.memory == "input":
            source = self._inputs[made.data_ptr()] = group.heap_on(self.device).empty(input.numel(), dtype=input.dtype)
        elif c.memory == "inplace":
            source = made.chunk(dist.get_world_size())[dist.get_rank()]

        def call() -> None:
            operation.call(made, source, group)

        def checked() -> Tensor:
            made.view(torch.uint8).fill_(0xA5)
            if operation.in_place:
                made.copy_(input)
            elif source is not input:
                source.copy_(input)
            call()
            return made

        return call, checked

    def _output(self, c: Contender, group: Any, numel: int, dtype: torch.dtype) -> Tensor:
        if c.memory in ("heap", "inplace"):
            return group.heap_on(self.device).empty(numel, dtype=dtype)  # type: ignore[no-any-return]
        if c.memory == "symmetric":
            return self._symmetric(c, numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _symmetric(self, c: Contender, numel: int, dtype: torch.dtype) -> Tensor:
        memory = _symmetric_memory()
        tensor: Tensor = memory.empty(numel, dtype=dtype, device=self.device)
        memory.rendezvous(tensor, self.group(c).group_name)
        return tensor

    def free(self, c: Contender, output: Tensor) -> None:
        """Give back what an output of a contender, or its input, takes in a heap. Collective."""
        if c.memory in ("heap", "inplace", "input"):
            self.group(c).heap_on(self.device).free(self._inputs.pop(output.data_ptr(), output))

    def peer_copy(self, nbytes: int) -> tuple[Call, Callable[[], None]] | None:
        """Return what copies ``nbytes`` to the next rank, and what gives its memory back; None where no contender has a
        heap. Collective.
        """
        found = next((c for c in self.contenders if c.memory in ("heap", "inplace")), None)
        if found is None:
            return None
        heap = self.group(found).heap_on(self.device)
        target = heap.empty(nbytes, dtype=torch.uint8)
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        rank, world = dist.get_rank(), dist.get_world_size()
        there = heap.translate(target.data_ptr(), rank, (rank + 1) % world)
        copy = gpu.copy(there, source.data_ptr(), nbytes)

        def call(source: Tensor = source) -> None:
            copy(gpu.stream_handle(torch.cuda.current_stream().cuda_stream))

        return call, lambda: heap.free(target)


def _symmetric_memory() -> Any:
    import torch.distributed._symmetric_memory as memory

    return memory


__all__ = ["MEMORIES", "PEER_COPY", "Contender", "Field", "parse"]
