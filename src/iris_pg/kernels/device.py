"""The cu engine on a GPU: launches the kernels, compiled, on a stream.

A launch is asynchronous and never waits on the host. It copies nothing from host memory: what differs from launch to
launch is in the arguments, also where sizes are uneven, so a captured launch is right on every replay. The first launch
of a kind compiles and loads a kernel; :meth:`DeviceKernels.prepare` does so ahead.

Every wait in a kernel has a deadline by the GPU's clock. The kernel then writes for whom it waited into memory that the
host reads (:attr:`DeviceKernels.late`), and it and later launches return without moving anything: the group has failed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from iris_pg.errors import ArgumentError, DeadlineError
from iris_pg.kernels.launch import Exchange, Launch, Launches, Limits
from iris_pg.kernels.loader import kernels
from iris_pg.platforms.atomics import atomics
from iris_pg.platforms.compiled import KernelLaunch
from iris_pg.platforms.gpu import platform as gpu

_NARROW = ("rank",)  # arguments of 32 bits; all others have 64
_TUPLES = (
    *("bases", "sends", "send_bytes", "send_shares", "receives", "receive_bytes", "receive_shares"),
    *("here", "nbytes_used", "shares_used", "places", "nbytes_lent", "shares_lent"),
)


def one_shot_bytes(world: int) -> int:
    """Return up to how many bytes every rank should reduce all of an all_reduce, sending everything to everyone.

    It sends (world - 1) n bytes and waits once; in two phases a rank sends 2 (world - 1) / world n and waits twice.
    """
    return 1 << 62 if world == 2 else (1 << 20) // max(world - 1, 1)


def slot_bytes_for(world: int) -> int:
    """Return the size of a landing slot: a CTA writes one for each peer in a round, and a round costs a microsecond or
    two. All slots of a CTA take 4 MiB.
    """
    return max((1 << 19) // world // 16 * 16, 1 << 16)


def gpu_limits(platform: str, comm_sms: int) -> Limits:
    """Return which kernels serve which sizes on a GPU, "CUDA" or "HIP"; measured on H200s."""
    return Limits(
        ctas=comm_sms,
        least_bytes=8192,
        words_bytes=comm_sms * 16384,
        push_bytes=1 << 21,
        push_ctas=min(comm_sms, 16),
        direct=(4096, 16),
        direct_own=(2048, 8),
        slots=((1 << 19, (2048, 8)), (1 << 62, (4096, 16))),
        reduce_lanes=8192,
        fits=False,
        chunks=8,
        polls=4096,  # a few milliseconds: a look reads and writes memory of the host, which takes long
        platform=platform,
    )


def check_comm_sms(comm_sms: int, device: torch.device) -> None:
    """Raise ArgumentError unless all CTAs of a launch run at once on ``device``: each may wait for another's work."""
    most = torch.cuda.get_device_properties(device).multi_processor_count
    if not 1 <= comm_sms <= most:
        raise ArgumentError(
            f"comm_sms={comm_sms}; it takes 1..{most}, as {device} has {most} multiprocessors, and a CTA that waits "
            "must not keep another from starting"
        )


class DeviceKernels:
    """Launches exchanges of one rank on a GPU. Launches of a group follow each other on the GPU: the caller orders
    them, in the same order on every rank.

    Args:
        rank, world: of the group.
        bases: address at which rank p's segment is mapped for ``device``, by rank.
        areas: name -> offset in a segment, of the areas of :func:`iris_pg.kernels.launch.area_bytes` for ``comm_sms``
            CTAs; zeros on all ranks before the first launch.
        slot_bytes: size of a landing slot, as for ``area_bytes``.
        comm_sms: most CTAs of a launch; the same on all ranks.
        timeout_s: deadline of one wait.
        device: a CUDA or HIP device; the current one when None.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        bases: Sequence[int],
        areas: Mapping[str, int],
        slot_bytes: int,
        comm_sms: int,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        if slot_bytes <= 0 or slot_bytes % 16:
            raise ArgumentError(f"slot_bytes={slot_bytes}; it takes a positive multiple of 16")
        check_comm_sms(comm_sms, self.device)
        self.timeout_s = timeout_s
        k = kernels(interpreted=False)
        self._counters = torch.zeros(comm_sms * k.COUNTERS.value * world, dtype=torch.int32, device=self.device)
        torch.cuda.current_stream(self.device).synchronize()  # launches may be on other streams
        self._words = torch.zeros(k.WAITING.value + comm_sms, dtype=torch.int32, pin_memory=True)
        self._at = {name: self._words.data_ptr() + 4 * getattr(k, name).value for name in ("ABORT", "ERROR", "WAITING")}
        limits = gpu_limits("HIP" if torch.version.hip else "CUDA", comm_sms)
        self._launches = Launches(
            *(rank, world, bases, areas["cu_flags"], areas["cu_landing"], slot_bytes),
            *(self._counters.data_ptr(), self._words.data_ptr(), limits),
        )

    def prepare(self, exchanges: Sequence[Exchange]) -> PreparedLaunches:
        """Return ``exchanges`` compiled, loaded and ready to be launched any number of times; the deadline of their
        waits is that of now.

        Raises:
            UnsupportedError: a reduction that the kernels do not have.
        """
        limit_ns = int(self.timeout_s * 1e9)
        launches = [launch for exchange in exchanges for launch in self._launches.of(exchange, limit_ns)]
        with torch.cuda.device(self.device):
            return PreparedLaunches([(self._compiled(launch), launch) for launch in launches])

    def launch(self, exchanges: Sequence[Exchange], stream: torch.cuda.Stream | int) -> None:
        """Launch ``exchanges`` on ``stream`` (or its handle), one after another, and return. Their memory may be used
        by what comes after them on the stream.

        Raises:
            UnsupportedError: a reduction that the kernels do not have.
        """
        with torch.cuda.device(self.device):
            self.prepare(exchanges).launch(stream if isinstance(stream, int) else stream.cuda_stream)

    @property
    def late(self) -> int | None:
        """The rank for which a launch has waited until the deadline, if one has."""
        word = atomics().load32(self._at["ERROR"])
        return word - 1 if word else None

    @property
    def waits(self) -> tuple[int, ...]:
        """A word for each CTA that has been waiting for some time: 1 + the rank, and which wait it is << 16."""
        first, load = self._at["WAITING"], atomics().load32
        return tuple(filter(None, (load(first + 4 * cta) for cta in range(self._launches.limits.ctas))))

    @property
    def waiting(self) -> list[int]:
        """The ranks for which a launch has been waiting for some time."""
        return sorted({(word & 0xFFFF) - 1 for word in self.waits})

    def check(self) -> None:
        """Raise when a launch has waited in vain.

        Raises:
            DeadlineError: naming the late rank.
        """
        if (late := self.late) is not None:
            raise DeadlineError(
                f"rank {self._launches.rank}: a kernel of the cu engine waited {self.timeout_s} s for rank {late}, "
                "which did not come or is in another operation; look at what that rank does, or raise the timeout"
            )

    def abort(self) -> None:
        """End all waits, of what runs and of what is launched later. The group cannot be used again. Idempotent."""
        atomics().store32(self._at["ABORT"], 1)

    def _compiled(self, launch: Launch) -> Any:
        return _compile(self.device, launch.kernel, len(self._launches.bases), launch.warps, *launch.constants.items())


class PreparedLaunches:
    """Launches of one rank that take no more Python than one of them; see :meth:`DeviceKernels.prepare`."""

    __slots__ = ("_calls", "_last")

    def __init__(self, launches: Sequence[tuple[Any, Launch]]) -> None:
        made = [KernelLaunch(kernel, launch.ctas, launch.arguments) for kernel, launch in launches]
        self._calls, self._last = gpu.Calls([one.call for one in made]), made[-1]

    def launch(self, stream: Any, done: int = 0, number: int = 0) -> None:
        """Launch them on ``stream`` (its handle, or as the platform's functions take it), one after another, and
        return. The device is the current one.

        Args:
            done: address of a word in memory of the host, into which the last one writes ``number`` when all of its
                CTAs are done; 0 for none.
        """
        self._last.change(done, number)
        self._calls(stream)


@functools.cache
def _compile(device: torch.device, name: str, world: int, warps: int, *constants: tuple[str, Any]) -> Any:
    """Return a kernel loaded on ``device``, the current one, for each set of constants."""
    import triton
    from triton.compiler import ASTSource

    compiled = triton.compile(ASTSource(**source_of(name, world, dict(constants))), options=dict(num_warps=warps))
    compiled._init_handles()
    return compiled


def source_of(name: str, world: int, constants: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of Triton's ASTSource for a kernel; its constants are its last arguments."""
    fn = getattr(kernels(interpreted=False), name)
    types: dict[str, Any] = {}
    for argument in fn.arg_names:
        is_tuple = argument in _TUPLES
        types[argument] = (
            "constexpr"
            if argument in constants
            else ("i64",) * world
            if is_tuple
            else "i32"
            if argument in _NARROW
            else "i64"
        )
    return dict(fn=fn, signature=types, constexprs=constants)
