"""All-gather by both engines of iris_pg, checked byte for byte against gloo, then timed; ``make demo`` runs it."""

import faulthandler
import statistics
import sys
import time

import torch
import torch.distributed as dist

import iris_pg

SIZES = (4, 1000, 65_539, 1 << 20, 16 << 20)  # bytes from each rank; odd ones too
CU_LARGEST = 65_539  # on CPUs the cu engine runs in Triton's interpreter: for its results, not its speed
ITERATIONS = 3
SECONDS_A_CELL = 0.25

all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name since, and before, torch 2.13


def data(nbytes: int, rank: int, iteration: int) -> torch.Tensor:
    """Bytes that depend on rank, position and iteration, so that one in the wrong place, or an old one, is seen."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def wrong_calls(nbytes: int, output: torch.Tensor, group, gloo) -> int:
    """All-gather different data a few times; return how many calls gave other bytes than gloo's, on this rank."""
    wrong = 0
    for iteration in range(ITERATIONS):
        input = data(nbytes, dist.get_rank(), iteration)
        reference = torch.empty_like(output)
        all_gather(reference, input, group=gloo)
        output.fill_(0xA5)
        all_gather(output, input, group=group)
        wrong += not torch.equal(output, reference)
    return wrong


def median_us(output: torch.Tensor, input: torch.Tensor, group, gloo) -> float:
    """Time of one call in microseconds: the median, on the slowest rank."""

    def once() -> float:
        start = time.perf_counter()
        all_gather(output, input, group=group)
        return (time.perf_counter() - start) * 1e6

    def slowest(us: float) -> float:
        value = torch.tensor(us)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=gloo)
        return value.item()

    calls = int(min(max(SECONDS_A_CELL * 1e6 / slowest(min(once() for _ in range(3))), 3), 2000))
    dist.barrier(group=gloo)
    return slowest(statistics.median(once() for _ in range(calls)))


def main() -> int:
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("iris")
    rank, world = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    sdma = dist.new_group(backend="iris", pg_options=iris_pg.Options(engine="sdma"))
    cu = dist.new_group(backend="iris", pg_options=iris_pg.Options(engine="cu"))
    heap = sdma.heap  # symmetric memory of that group: all ranks map it

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    say(f"iris_pg demo: all-gather on {world} ranks, torch {torch.__version__}")
    say(iris_pg.explain())
    wrong = checked = 0
    lines = []
    for nbytes in SIZES:
        ordinary = torch.empty(world * nbytes, dtype=torch.uint8)
        contenders = {
            "sdma": (ordinary, sdma),
            "sdma heap": (heap.empty(world * nbytes, dtype=torch.uint8), sdma),
            "cu": (ordinary, cu if nbytes <= CU_LARGEST else ...),
        }
        for output, group in contenders.values():
            if group is not ...:
                wrong += wrong_calls(nbytes, output, group, gloo)
                checked += ITERATIONS
        input = data(nbytes, rank, 0)
        us = {
            name: median_us(output, input, group, gloo)
            for name, (output, group) in {**contenders, "gloo": (ordinary, gloo)}.items()
            if group is not ...
        }
        cells = [f"{us[name]:,.0f}" if name in us else "-" for name in (*contenders, "gloo")]
        ratios = [f"{us['gloo'] / us[name]:.1f}" for name in ("sdma", "sdma heap")]
        lines.append((f"{nbytes:,}", *cells, *ratios))

    say(f"\n{'':>14}{'median time of a call in us':^48}{'times gloo':>24}")
    for line in (("bytes a rank", "sdma", "sdma heap", "cu", "gloo", "sdma", "sdma heap"), *lines):
        say(f"{line[0]:>14}" + "".join(f"{cell:>12}" for cell in line[1:]))
    say("sdma: ordinary tensors, by the software copy engine; sdma heap: output in the symmetric heap, zero copy;")
    say("cu: the Triton kernels in Triton's interpreter, hence small sizes only")

    total = torch.tensor(wrong)
    dist.all_reduce(total, group=gloo)
    say(
        f"\nPASS: {checked} all-gathers a rank, sdma and cu, equal to gloo's byte for byte"
        if total == 0
        else f"\nFAIL: {total} of {world * checked} all-gathers differ from gloo's"
    )
    dist.destroy_process_group()
    return int(total != 0)


if __name__ == "__main__":
    sys.exit(main())
