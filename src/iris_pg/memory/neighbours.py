"""The processes of a group's ranks, whose memory this one may read where the system allows it: process_vm_readv(2).

Linux lets a process read another of the same user that is not protected (prctl PR_SET_DUMPABLE), unless a security
module forbids it (kernel.yama.ptrace_scope above 0, a container's seccomp filter). So every rank tries with every other
when the group is made, and all of them do it, or none.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from concurrent import futures

import torch

from iris_pg.errors import UnsupportedError, where
from iris_pg.memory.sharing import Links
from iris_pg.platforms import cpu
from iris_pg.platforms.atomics import atomics

_TOKEN_BYTES = 16

HALVED_BYTES = 2 << 20
"""Reads of at least this size are done by two threads, where there are cores for both. The kernel looks up every page
of the other process, so one core reads 4 to 5 GB/s: 8 MiB take 1.9 ms, and in halves 1.2.
"""


class Neighbours:
    """Reads the memory of other ranks. Collective to make.

    Args:
        links: the group's links.

    Attributes:
        is_readable: whether every rank can read every other.
        reason: why, in words.
        pids: the processes, by rank.
        halved_bytes: reads of at least this size are done in halves; None: none are.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.pids = [os.getpid() if rank == links.rank else links.pid(rank) for rank in range(links.world)]
        self._read = atomics().read_process
        self.halved_bytes = HALVED_BYTES if cpu.usable_cores() >= 2 * links.world else None
        self._helper = futures.ThreadPoolExecutor(1, f"iris_pg {links.group} reads")  # a thread, from the first one on
        token = secrets.token_bytes(_TOKEN_BYTES)
        mine = ctypes.create_string_buffer(token, _TOKEN_BYTES)
        problem = self._unreadable()
        told = dict(address=ctypes.addressof(mine), token=token.hex(), problem=problem)
        messages = links.exchange(told, what="create the group, memory to read")
        problems = [m.payload["problem"] for m in messages]
        if not any(problems):
            problems = self._try([m.payload for m in messages])
        self.is_readable = not any(problems)
        self.reason = next(filter(None, problems), "every rank may read the memory of every other")

    @staticmethod
    def _unreadable() -> str | None:
        # A tensor may then lie in memory that a driver has pinned. What CUDA's has can be read (driver 580, H200).
        if torch.version.hip and torch.cuda.device_count():
            return "there are AMD GPUs, whose driver may have pinned a tensor's memory, which may not be readable"
        return None

    def _try(self, cards: list[dict[str, object]]) -> list[str | None]:
        """Return what is in the way, of every rank."""
        problem = None
        for rank, card in enumerate(cards):
            seen = ctypes.create_string_buffer(_TOKEN_BYTES)
            address, pid = int(str(card["address"])), self.pids[rank]
            got = self._read(pid, ctypes.addressof(seen), address, _TOKEN_BYTES)
            if got != _TOKEN_BYTES:
                why = os.strerror(cpu.read_error(pid, address))
                problem = problem or f"rank {self._links.rank} may not read rank {rank}'s memory ({why})"
            elif seen.raw.hex() != card["token"]:
                problem = problem or f"rank {self._links.rank} does not see rank {rank}'s process"
        messages = self._links.exchange(dict(problem=problem), what="create the group, memory was read")
        return [m.payload["problem"] for m in messages]

    def read(self, rank: int, dst: int, src: int, nbytes: int) -> bool:
        """Copy ``nbytes`` to ``dst`` from ``src`` in the memory of ``rank``'s process; return False when that is gone.

        Raises:
            UnsupportedError: that memory cannot be read.
        """
        if self.halved_bytes is None or nbytes < self.halved_bytes:
            return self._copy(rank, dst, src, nbytes)
        half = nbytes // 2
        second = self._helper.submit(self._copy, rank, dst + half, src + half, nbytes - half)
        try:
            is_there = self._copy(rank, dst, src, half)
        finally:
            futures.wait([second])  # until then it writes to memory that is the caller's
        return second.result() and is_there

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._helper.shutdown()

    def _copy(self, rank: int, dst: int, src: int, nbytes: int) -> bool:
        pid = self.pids[rank]
        while nbytes:
            got = self._read(pid, dst, src, nbytes)  # at most 2 GiB at a time
            if got <= 0:
                code = cpu.read_error(pid, src)
                if code == errno.ESRCH or rank in self._links.lost():
                    return False
                raise UnsupportedError(
                    f"the tensor of rank {rank} at {src:#x} cannot be read from another process ({os.strerror(code)}): "
                    "memory of a device, or unmapped; set IRIS_PG_DIRECT_BYTES=0 "
                    f"{where(group=self._links.group, rank=self._links.rank)}"
                )
            dst, src, nbytes = dst + got, src + got, nbytes - got
        return True
