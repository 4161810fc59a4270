"""``python -m iris_pg.bench``: times collectives of several backends side by side.

Run directly it starts its own ranks; under torchrun it uses the ranks it is given. Results are checked before the
timing, and again after it.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import re
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from iris_pg.bench import report, suite, timing
from iris_pg.bench.launch import run_ranks
from iris_pg.bench.operations import OPERATIONS
from iris_pg.options import ENGINES

_UNITS = {"": 0, "b": 0, "kib": 10, "mib": 20, "gib": 30}
_CONTENDERS = "iris:sdma,iris:sdma:heap,iris:sdma:inplace,iris:cu:32,iris:cu:16:heap,iris:auto,iris:auto:heap,nccl"
_SIZES = "4,1KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def parse_size(text: str) -> int:
    """Return the bytes that "4", "64KiB" or "1 MiB" stands for; at least 1."""
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; it takes 4, 64KiB, 1MiB, 2GiB")
    return int(match[1]) << _UNITS[match[2]]


def _sizes(text: str) -> list[int]:
    return [parse_size(part) for part in text.split(",")]


def _names(*known: str):  # type: ignore[no-untyped-def]
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if known and name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}; it takes {', '.join(known)}, separated by commas")
        return list(dict.fromkeys(names))

    return parse


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; it takes a positive integer")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser("python -m iris_pg.bench", description=__doc__)
    p.add_argument(
        "operations",
        nargs="?",
        metavar="operation",
        type=_names(*OPERATIONS),
        default="all_gather",
        help=f"one or several by commas, of {', '.join(OPERATIONS)} (%(default)s)",
    )
    p.add_argument(
        "--backends", type=_names(), default="iris,gloo", help="the last is the anchor of the ratios (%(default)s)"
    )
    p.add_argument("--engine", type=_names(*ENGINES), default="sdma", help="of iris; several by commas (%(default)s)")
    p.add_argument(
        "--memory",
        type=_names("ordinary", "heap", "input"),
        default="ordinary,heap",
        help="of iris: ordinary, outputs in the heap, or the input there (%(default)s)",
    )
    p.add_argument("--sizes", type=_sizes, default=_SIZES, help="bytes per rank (%(default)s)")
    p.add_argument("--ranks", type=_positive, default=2, help="when no launcher has started them (%(default)s)")
    p.add_argument(
        "--hosts",
        type=_positive,
        default=1,
        help="that many groups of these ranks behave as if each were on a host of its own (%(default)s)",
    )
    p.add_argument("--rounds", type=_positive, default=9, help="interleaved rounds (%(default)s)")
    p.add_argument(
        "--iterations", type=_positive, help="calls per contender and round (as many as take 40 ms, 3 to 1000)"
    )
    p.add_argument("--seed", type=int, default=0, help="of the data (%(default)s)")
    p.add_argument(
        "--deadline", type=float, default=900.0, help="seconds after which everything is killed (%(default)s)"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are (%(default)s)")
    p.add_argument(
        "--contenders",
        type=_names(),
        default=_CONTENDERS,
        help="with --device cuda, see docs/performance.md (%(default)s)",
    )
    p.add_argument("--modes", type=_names("eager", "graph"), default="eager,graph", help="on GPUs (%(default)s)")
    p.add_argument("--anchor", default="nccl", help="contender that ratios are to, on GPUs (%(default)s)")
    p.add_argument(
        "--overlap", type=parse_size, metavar="SIZE", help="on GPUs: matrix products beside all-gathers of that size"
    )
    p.add_argument(
        "--train", type=_sizes, metavar="TOKENS", help="on GPUs: a training step with FSDP2, of these sequence lengths"
    )
    p.add_argument("--pin", action="store_true", help="keep each rank's main thread on a core of its own")
    p.add_argument("--json", metavar="FILE", help="write the results there")
    p.add_argument("--store", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status: 0, or 1 for a wrong result."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command_line = parser()
    args = command_line.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs a GPU; torch sees none", file=sys.stderr)
        return 1
    if args.hosts > args.ranks:
        command_line.error(f"--hosts {args.hosts}: each has a rank at least, and there are {args.ranks} (--ranks)")
    if "RANK" not in os.environ:
        return run_ranks("iris_pg.bench", arguments, args.ranks, args.deadline, args.hosts)
    if args.hosts > 1 and not args.store:
        command_line.error("--hosts is for ranks that no launcher has started; set IRIS_PG_HOST for each")
    faulthandler.dump_traceback_later(args.deadline, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=args.store or "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=min(args.deadline, 120)),
    )
    try:
        return _run(args) if args.device == "cpu" else _run_gpu(args)
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def _run(args: argparse.Namespace) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = suite.open_groups(suite.contenders(args.backends, args.engine, args.memory))
    anchor = list(groups)[-1].name
    machine = report.host()
    if args.pin:  # only now: threads that a backend has started stay free to run anywhere
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    rows: list[suite.Row] = []
    meter = timing.Meter()
    how = dict(rounds=args.rounds, iterations=args.iterations, seed=args.seed)
    try:
        for name in args.operations:
            for nbytes in args.sizes:
                rows += suite.run_size(OPERATIONS[name], groups, nbytes, **how)
                if rank == 0:
                    print(f"{name} {report.size_text(nbytes)} done", file=sys.stderr)
    except suite.WrongResultError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return 1
    others = meter.others()
    if rank == 0:
        report.print_table(rows, world, anchor, others, sorted({c.note for c in groups if c.note}), args.hosts)
        if args.json:
            options = {name: value for name, value in vars(args).items() if name not in ("store", "json", "deadline")}
            with open(args.json, "w") as file:
                json.dump(report.document(rows, options, world, anchor, machine, others), file, indent=1)
                file.write("\n")
    return 0


def _run_gpu(args: argparse.Namespace) -> int:
    from iris_pg.bench import gpu, gpu_contenders, gpu_report  # with what GPUs need

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())  # NCCL's copy engines refuse the default stream
    rank = dist.get_rank()
    field = gpu_contenders.Field([gpu_contenders.parse(name) for name in args.contenders], device)
    rows: list[gpu.Row] = []
    notes: list[str] = []
    how = dict(rounds=args.rounds, seed=args.seed, anchor=args.anchor)
    try:
        for name in args.operations:
            for nbytes in args.sizes:
                made, said = gpu.run_size(field, OPERATIONS[name], nbytes, args.modes, **how)
                rows += made
                notes += said
                if rank == 0:
                    print(f"{name} {report.size_text(nbytes)} done", file=sys.stderr)
    except suite.WrongResultError as error:
        if rank == 0:
            print(error, file=sys.stderr)
        return 1
    beside = gpu.overlap(field, OPERATIONS["all_gather"], args.overlap, 8192, 10, args.rounds) if args.overlap else []
    steps = []
    if args.train:
        from iris_pg.bench import gpu_training

        steps = gpu_training.steps(args.contenders, args.train, args.rounds)
    if rank == 0:
        found = gpu_report.Report(rows, beside, steps, sorted(set(notes)))
        found.print(dist.get_world_size(), args.anchor)
        if args.json:
            options = {name: value for name, value in vars(args).items() if name not in ("store", "json", "deadline")}
            with open(args.json, "w") as file:
                json.dump(found.document(options, dist.get_world_size()), file, indent=1)
                file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
