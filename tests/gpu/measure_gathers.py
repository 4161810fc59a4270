"""All-gathers of a heap tensor on GPUs, each way in turn: kernels that store, the chip's bulk copy unit (TMA), copy
engines that the host tells, and copy engines that a kernel tells.

    torchrun --nproc-per-node 2 tests/gpu/measure_gathers.py

A time is that of one of several calls in a row by the GPU's clock, of the slowest rank; the median of several rounds,
in each of which every contender had its turn. Every result is compared with what all ranks sent.
"""

import os
import statistics
from collections.abc import Callable

import torch
import triton

from iris_pg import Iris, iris
from iris_pg.collective_api import Config
from iris_pg.device import tile_gather

SIZES = (1 << 20, 16 << 20, 64 << 20, 256 << 20)  # bytes from each rank
CTAS = (8, 16)
ROUNDS, CALLS = 5, 5

Gather = Callable[[torch.Tensor, torch.Tensor], None]


def by_tma(ctx: Iris, ctas: int) -> Gather:
    """Return what gathers with ``ctas`` CTAs of device/tile_gather.py."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    flags, bases, engine = ctx.zeros(2, world, 8, dtype=torch.int64), ctx.get_heap_bases(), ctx.get_copy_engine_ctx()
    rounds = torch.zeros(ctas, dtype=torch.int64, device="cuda")
    dead = torch.zeros(1, dtype=torch.int32, device="cuda")
    columns = tile_gather.COLUMNS.value

    def gather(output: torch.Tensor, input: torch.Tensor) -> None:
        tile_gather.gather_by_tma[(ctas,)](
            *(output, input, input.numel() // columns, flags, rounds, dead, bases, engine, rank), world=world
        )

    return gather


def by(ctx: Iris, **options: object) -> Gather:
    """Return what gathers with a collective of a context."""
    return lambda output, input: ctx.ccl.all_gather(output, input, config=Config(**options))  # type: ignore[arg-type]


def microseconds(ctx: Iris, gather: Gather, output: torch.Tensor, input: torch.Tensor) -> float:
    """Return what a call takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    ctx.barrier()
    start.record()
    for _ in range(CALLS):
        gather(output, input)
    end.record()
    torch.cuda.synchronize()
    took = start.elapsed_time(end) * 1e3 / CALLS
    return max(ctx.broadcast(took, rank) for rank in range(ctx.num_ranks))


def run(contexts: dict[int, Iris]) -> None:
    """Measure everything."""
    ctx = contexts[CTAS[0]]
    rank, world = ctx.cur_rank, ctx.num_ranks
    contenders: dict[str, tuple[Iris, Gather]] = {}
    for ctas, own in contexts.items():
        contenders[f"stores, {ctas} CTAs"] = own, by(own, engine="cu", comm_sms=ctas)
        contenders[f"TMA, {ctas} CTAs"] = own, by_tma(own, ctas)
    contenders["sdma"] = ctx, by(ctx, engine="sdma")
    contenders["kernel_puts"] = ctx, by(ctx, engine="sdma", all_gather_variant="kernel_puts")
    if rank == 0:
        print("bytes from each rank;", "us (GB/s to each peer) of", ", ".join(contenders), flush=True)
    outputs = {id(own): own.empty(world * max(SIZES) // 4, dtype=torch.int32) for own in contexts.values()}
    for nbytes in SIZES:
        numel = nbytes // 4
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_ in range(1 + ROUNDS):
            for number, (name, (own, gather)) in enumerate(contenders.items()):
                output = outputs[id(own)][: world * numel]
                place = torch.arange(numel, dtype=torch.int32, device="cuda")
                seed = 31 * round_ + 7 * number
                times[name].append(microseconds(ctx, gather, output, place * (rank + 3) + seed))
                for r in range(world):
                    came = output[r * numel : (r + 1) * numel]
                    assert torch.equal(came, place * (r + 3) + seed), f"{name}, {nbytes}, round {round_}, rank {r}"
                ctx.barrier()
        if rank == 0:
            medians = [statistics.median(took[1:]) for took in times.values()]
            print(f"{nbytes:>10}", *(f" {us:8.1f} ({nbytes / us / 1e3:5.0f})" for us in medians), flush=True)


def main() -> None:
    """Run one rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    heap_size = (int(os.environ["WORLD_SIZE"]) * max(SIZES)) + (16 << 20)
    contexts = {ctas: iris(heap_size=heap_size, engines=("sdma",), device="cuda") for ctas in CTAS}
    run(contexts)
    for ctx in contexts.values():
        ctx.close()


if __name__ == "__main__":
    main()
