"""What tests of failures share: a call that gathers, and how a call ends."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from iris_pg.errors import IrisError


def told(call) -> tuple[str, str, float]:
    """Return (kind, text, seconds) of the IrisError that ``call`` ends with."""
    start = time.monotonic()
    try:
        call()
    except IrisError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing was raised", time.monotonic() - start


def gather(n: int, dtype: torch.dtype = torch.int32, asynchronous: bool = False):
    output = torch.zeros(dist.get_world_size() * n, dtype=dtype)
    work = dist.all_gather_into_tensor(output, torch.ones(n, dtype=dtype), async_op=asynchronous)
    if work:
        work.wait()
