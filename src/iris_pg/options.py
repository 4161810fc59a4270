"""Options of a group and the one table of ``IRIS_PG_*`` environment variables.

An option given in code (``pg_options=Options(...)``) wins over its variable, which wins over the default.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Backend

from iris_pg.errors import OptionError

ENGINES = ("auto", "cu", "sdma")
INTER_HOST = ("auto", "gloo", "nccl")
_LONGEST_S = 10**9  # 30 years; a timedelta, and the waits of the operating system, do not take any number


@dataclass(frozen=True)
class Variable:
    """One row of the table: an environment variable, the option it stands for, and how its text is read."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    unit: str
    meaning: str


VARIABLES = (
    Variable("IRIS_PG_ENGINE", "engine", str, "auto", f"one of {', '.join(ENGINES)}", "which engine moves the bytes"),
    Variable(
        "IRIS_PG_HEAP_BYTES",
        "heap_bytes",
        int,
        1 << 30,
        "bytes per rank",
        "most symmetric memory that tensors of one group may take; mapped as it is used",
    ),
    Variable(
        "IRIS_PG_CHUNK_BYTES",
        "chunk_bytes",
        int,
        1 << 19,
        "bytes, a multiple of 256",
        "size of one staging slot: tensors outside the heap move in pieces of this size",
    ),
    Variable(
        "IRIS_PG_DEVICE_CHUNK_BYTES",
        "device_chunk_bytes",
        int,
        1 << 26,
        "bytes, a multiple of 256",
        "the same for CUDA tensors, in the GPU's memory; a group takes about ten of these on each GPU",
    ),
    Variable(
        "IRIS_PG_DIRECT_BYTES",
        "direct_bytes",
        int,
        1 << 15,
        "bytes; 0: never",
        "tensors from this size on are read out of their process by the others, where the system allows it",
    ),
    Variable(
        "IRIS_PG_COMM_SMS",
        "comm_sms",
        int,
        32,
        "CTAs, 1 to the GPU's multiprocessors",
        "for CUDA tensors: most CTAs of a kernel, of the cu engine and of what adds for copy engines; each takes 4 MiB "
        "or more of the GPU's memory",
    ),
    Variable(
        "IRIS_PG_INTER_HOST",
        "inter_host",
        str,
        "auto",
        f"one of {', '.join(INTER_HOST)}",
        "what carries bytes between hosts: gloo takes CPU tensors, nccl CUDA tensors, auto has both",
    ),
    Variable(
        "IRIS_PG_TIMEOUT", "timeout", float, None, "seconds", "deadline of every wait (default: the group's timeout)"
    ),
    Variable(
        "IRIS_PG_HOSTILE_SEED",
        "hostile_seed",
        int,
        None,
        "an integer",
        "for tests: the software copy engine splits copies, delays and interleaves queues, seeded by this",
    ),
    Variable(
        "IRIS_PG_HOST",
        "host",
        str,
        None,
        "a name",
        "for tests: the host that this rank is to be on; ranks with different names share no memory",
    ),
)


def _from_environment(variable: Variable) -> Any:
    text = os.environ.get(variable.name)
    if text is None or text == "":
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise OptionError(f"{variable.name}={text!r} cannot be read; it takes {variable.unit}") from None


class Options(Backend.Options):
    """Options of one ``"iris"`` group, for ``init_process_group(pg_options=...)`` and ``new_group(pg_options=...)``.

    Args:
        engine: ``"auto"``, ``"cu"`` (Triton kernels) or ``"sdma"`` (copy engine).
        heap_bytes: most symmetric memory per rank that tensors of this group may take, in bytes.
        chunk_bytes: size of one staging slot in bytes, a multiple of 256.
        device_chunk_bytes: the same on a GPU, for CUDA tensors.
        direct_bytes: tensors outside the heap of at least so many bytes are not staged: their readers read them out of
            the sender's process, where the system allows it. 0 means never.
        comm_sms: most CTAs of a kernel on a GPU, and so most multiprocessors that it takes: of the cu engine, and of
            the one that adds what copy engines have brought.
        inter_host: ``"auto"``, ``"gloo"`` or ``"nccl"``: what carries bytes between hosts.
        timeout: deadline of every wait, in seconds or a ``timedelta``; the group's own timeout when None.
        hostile_seed, host: for tests, see ``IRIS_PG_HOSTILE_SEED`` and ``IRIS_PG_HOST``.

    Anything left out comes from the environment (:data:`VARIABLES`), then from the default there.

    Raises:
        OptionError: a value that is not valid; the message lists the valid ones.
    """

    engine: str
    heap_bytes: int
    chunk_bytes: int
    device_chunk_bytes: int
    direct_bytes: int
    comm_sms: int
    inter_host: str
    timeout_s: float | None
    hostile_seed: int | None
    host: str | None

    def __init__(
        self,
        engine: str | None = None,
        heap_bytes: int | None = None,
        chunk_bytes: int | None = None,
        direct_bytes: int | None = None,
        timeout: float | datetime.timedelta | None = None,
        hostile_seed: int | None = None,
        device_chunk_bytes: int | None = None,
        comm_sms: int | None = None,
        inter_host: str | None = None,
        host: str | None = None,
    ) -> None:
        given: dict[str, Any] = dict(
            engine=engine,
            heap_bytes=heap_bytes,
            chunk_bytes=chunk_bytes,
            device_chunk_bytes=device_chunk_bytes,
            direct_bytes=direct_bytes,
            comm_sms=comm_sms,
            timeout=timeout,
            hostile_seed=hostile_seed,
            inter_host=inter_host,
            host=host,
        )
        value: dict[str, Any] = {
            v.field: _from_environment(v) if given[v.field] is None else given[v.field] for v in VARIABLES
        }
        deadline = value["timeout"]
        if isinstance(deadline, datetime.timedelta):
            deadline = deadline.total_seconds()
        if value["engine"] not in ENGINES:
            raise OptionError(f"engine={value['engine']!r} is not known; it is one of {', '.join(map(repr, ENGINES))}")
        if value["inter_host"] not in INTER_HOST:
            names = ", ".join(map(repr, INTER_HOST))
            raise OptionError(f"inter_host={value['inter_host']!r} is not known; it is one of {names}")
        if value["host"] is not None and not isinstance(value["host"], str):
            raise OptionError(f"host={value['host']!r}; it takes a name")
        if not isinstance(value["heap_bytes"], int) or value["heap_bytes"] <= 0:
            raise OptionError(f"heap_bytes={value['heap_bytes']!r}; it takes a positive number of bytes")
        for name in ("chunk_bytes", "device_chunk_bytes"):
            chunk = value[name]
            if not isinstance(chunk, int) or chunk <= 0 or chunk % 256:
                raise OptionError(f"{name}={chunk!r}; it takes a positive multiple of 256 bytes")
        direct = value["direct_bytes"]
        if not isinstance(direct, int) or direct < 0:
            raise OptionError(f"direct_bytes={direct!r}; it takes a number of bytes, or 0 for never")
        ctas = value["comm_sms"]
        if not isinstance(ctas, int) or ctas <= 0:
            raise OptionError(
                f"comm_sms={ctas!r}; it takes a positive number of CTAs, at most the GPU's multiprocessors"
            )
        if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline <= _LONGEST_S):
            raise OptionError(
                f"timeout={deadline!r}; it takes a positive number of seconds, at most {_LONGEST_S}, or a timedelta"
            )
        if value["hostile_seed"] is not None and not isinstance(value["hostile_seed"], int):
            raise OptionError(f"hostile_seed={value['hostile_seed']!r}; it takes an integer")
        super().__init__("iris", datetime.timedelta(seconds=deadline if deadline is not None else 1800))
        self.engine, self.heap_bytes = value["engine"], value["heap_bytes"]
        self.chunk_bytes, self.device_chunk_bytes = value["chunk_bytes"], value["device_chunk_bytes"]
        self.direct_bytes, self.comm_sms = direct, ctas
        self.timeout_s, self.hostile_seed = deadline, value["hostile_seed"]
        self.inter_host, self.host = value["inter_host"], value["host"]

    def _fields(self) -> dict[str, Any]:
        return dict(
            engine=self.engine,
            heap_bytes=self.heap_bytes,
            chunk_bytes=self.chunk_bytes,
            device_chunk_bytes=self.device_chunk_bytes,
            direct_bytes=self.direct_bytes,
            comm_sms=self.comm_sms,
            timeout=self.timeout_s,
            hostile_seed=self.hostile_seed,
            inter_host=self.inter_host,
            host=self.host,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        """Copy by value: torch deep-copies options when it splits a group, and a C++ base cannot be pickled."""
        return Options(**self._fields())

    def __repr__(self) -> str:
        return "Options(" + ", ".join(f"{k}={v!r}" for k, v in self._fields().items()) + ")"
