"""Random operations on random groups for a long time, on both engines, checked against their references.

    python tests/soak.py --minutes 30 --ranks 4

Each round makes groups of random members (all ranks, a few, in any order), engines and chunk sizes, and runs the
operations of the conformance table on all of them at the same time, one thread a group, now and then with several
operations outstanding; ranks are late at random. All is decided by the seed, so a round can be run again. Values depend
on the seed, the rank and the iteration. After each round the groups are destroyed, and what a process holds is counted:
descriptors, mappings and threads may not grow, and memory only a little after the first rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rank_pool
from iris_pg import Options
from table.call import Call, Row
from table.operations import OPERATIONS
from table.sample import kinds
from table.values import FORMS, Form

WARM_UP = 4  # rounds, until which libraries are loaded
GROWTH_MIB = 40.0  # most that a process may grow in the second half; caches of programs, 32 MiB each, fill for long
WAIT_S = 120.0  # seconds; tiny chunks, and other busy processes, make a message of megabytes slow
TOGETHER = {"sdma": 10, "cu": 2}  # operations between two agreements on whether there is time for more
MIXED = 3  # one round of so many has groups of all engines: one that is an interpreter leaves the others little time
GROUPS = 5  # made in a round, besides the default group


# One rank -------------------------------------------------------------------------------------------------------------


def random_row(shared: random.Random, engine: str, number: int) -> Row:
    """Return a random cell of the table, sometimes with a larger tensor than the table has."""
    operation = shared.choice(list(OPERATIONS.values()))
    dtype, reduction = shared.choice(kinds(operation, engine))
    form = shared.choice(operation.forms)
    if operation.forms is FORMS and shared.random() < 0.1:
        form = Form(
            (shared.randrange(1, 200_000 if engine == "sdma" else 3_000),), shared.choice(("offset", "strided"))
        )
    return Row(operation.name, dtype, reduction, form, "", shared.random() < 0.5, number)


def overlap(group: dist.ProcessGroup, shared: random.Random, own: random.Random, number: int, most: int) -> str:
    """Begin several operations, wait for them in an order of this rank's own, and return what is wrong."""
    rank, world = group.rank(), group.size()

    def values(p: int, i: int, n: int) -> torch.Tensor:
        return torch.arange(n) * (p + 2) + 1009 * i + number

    members = dist.get_process_group_ranks(group)
    pending: list[tuple[str, dist.Work, torch.Tensor, torch.Tensor]] = []
    for i in range(shared.randrange(2, 8)):
        kind, n, root = (
            shared.choice(("gather", "reduce", "broadcast", "exchange")),
            shared.randrange(most),
            shared.randrange(world),
        )
        parts = [values(p, i, n) for p in range(world)]
        if kind == "gather":
            output, expected = torch.empty(world * n, dtype=torch.int64), torch.cat(parts)
            work = dist.all_gather_into_tensor(output, parts[rank], group=group, async_op=True)
        elif kind == "reduce":
            output, expected = parts[rank].clone(), torch.stack(parts).sum(0)
            work = dist.all_reduce(output, group=group, async_op=True)
        elif kind == "broadcast":
            output, expected = parts[rank].clone(), parts[root]
            work = dist.broadcast(output, members[root], group=group, async_op=True)
        else:
            output = torch.empty(world * n, dtype=torch.int64)
            expected = torch.cat([part + rank for part in parts])
            sent = torch.cat([parts[rank] + p for p in range(world)])
            work = dist.all_to_all_single(output, sent, group=group, async_op=True)
        pending.append((f"{kind} of {n}, number {number}.{i}", work, output, expected))
    own.shuffle(pending)
    wrong = []
    for what, work, output, expected in pending:
        work.wait()
        if not torch.equal(output, expected):
            wrong.append(f"{what}: {output[:6]}... and not {expected[:6]}...")
    return "; ".join(wrong)


def exercise(group: dist.ProcessGroup, engine: str, seed: str, until: float, done: Counter[str]) -> None:
    """Run random operations on one group until the time is over on its last rank.

    Raises:
        AssertionError: a result is wrong.
    """
    shared, own = random.Random(seed), random.Random(f"{seed}/{dist.get_rank()}")
    members, first = dist.get_process_group_ranks(group), shared.randrange(1 << 40)
    number = first
    while True:
        for _ in range(TOGETHER[engine]):
            number += 1
            row = random_row(shared, engine, number)
            if own.random() < 0.05:
                time.sleep(own.random() * 5e-3)
            if shared.random() < 0.15:
                text = overlap(group, shared, own, number, 20_000 if engine == "sdma" else 500)
            else:
                call = Call(row, group, members)
                OPERATIONS[row.operation].call(call)
                text = call.mistake()
            assert not text, f"{row}: {text}"
            done[engine] += 1
        time_left = torch.tensor([time.monotonic() < until], dtype=torch.int64)
        dist.all_reduce(time_left, op=dist.ReduceOp.MIN, group=group)
        if not time_left.item():
            return


def play(round_: int, seed: int, engines: list[str], until: float, done: Counter[str]) -> None:
    """Make the groups of one round, run them all at once, and destroy them.

    Raises:
        BaseException: the first that a thread ended with.
    """
    shared, world = random.Random(f"{seed}/{round_}"), dist.get_world_size()
    unsorted = dict(sort_ranks=False) if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    mine = [(dist.group.WORLD, "sdma")]
    made = []
    if round_ % MIXED:
        engines = engines[:1]
    for i in range(GROUPS):
        # The last engine has a group of all ranks, so that all load what it needs in the same round.
        members = shared.sample(range(world), shared.randrange(1, world + 1) if i else world)
        engine, chunk = engines[-1 - i % len(engines)], shared.choice([256, 4096, 1 << 19])
        options = Options(engine=engine, chunk_bytes=chunk, timeout=WAIT_S)
        group = dist.new_group(members, backend="iris", pg_options=options, **unsorted)
        if dist.get_rank() in members:
            made.append(group)
            mine.append((group, engine))
    failures: list[BaseException] = []

    def work_on(group: dist.ProcessGroup, engine: str) -> None:
        try:
            exercise(group, engine, f"{seed}/{round_}/{group.group_name}", until, done)
        except BaseException as error:
            failures.append(error)
            for open_ in [*made, dist.group.WORLD]:
                open_.abort()  # so that the other threads end, too, and the other ranks'

    threads = [threading.Thread(target=work_on, args=each) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)


def holds() -> dict[str, Any]:
    """Return what this process holds, when it does nothing."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": sum(rank_pool.descriptors().values()),
        "mappings": sum(rank_pool.shared_mappings().values()),
        "threads": sum(rank_pool.threads().values()),
    }


def be_a_rank(arguments: argparse.Namespace) -> None:
    """Take part until the parent says that it is over."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the parent
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, engines = arguments.rank, arguments.engines.split(",")
    hour = datetime.timedelta(hours=1)
    store = dist.TCPStore("127.0.0.1", arguments.port, is_master=False, timeout=hour)
    dist.init_process_group(
        "iris",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=arguments.ranks,
        pg_options=Options(engine="sdma", timeout=WAIT_S),
    )
    done: Counter[str] = Counter()
    for round_ in range(sys.maxsize):
        store.wait([f"round {round_}"])
        seconds = float(store.get(f"round {round_}"))
        if not seconds:
            break
        play(round_, arguments.seed, engines, time.monotonic() + seconds, done)
        dist.barrier()
        store.set(f"done {round_}/{rank}", json.dumps({**holds(), **{engine: done[engine] for engine in engines}}))
    dist.destroy_process_group()


# The parent -----------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """A rank has died or hangs."""


def watch(processes: list[subprocess.Popen[bytes]], store: dist.Store, keys: list[str], limit_s: float) -> None:
    """Return when all keys are in the store.

    Raises:
        StoppedError: a rank has ended, or it takes longer than ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while not store.check(keys):
        for rank, process in enumerate(processes):
            if process.poll() is not None:
                time.sleep(3)  # the others say what they have seen
                raise StoppedError(f"rank {rank} has ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            for process in processes:
                process.send_signal(signal.SIGUSR1)  # says where it is
            time.sleep(2)
            raise StoppedError(f"not done after {limit_s:.0f} s")
        time.sleep(0.1)


def judge(rounds: list[list[dict[str, Any]]]) -> list[str]:
    """Return what has grown, in words: memory in the second half, all else from the end of the warm-up on."""
    wrong = []
    if len(rounds) <= WARM_UP:
        return wrong
    half = rounds[max(WARM_UP - 1, len(rounds) // 2)]
    for rank, (before, middle, after) in enumerate(zip(rounds[WARM_UP - 1], half, rounds[-1], strict=True)):
        for what in ("descriptors", "mappings", "threads"):
            if after[what] > before[what]:
                wrong.append(f"rank {rank} holds {after[what]} {what}, and held {before[what]}")
        if after["MiB"] - middle["MiB"] > GROWTH_MIB:
            wrong.append(f"rank {rank} has grown from {middle['MiB']:.1f} to {after['MiB']:.1f} MiB in the second half")
    return wrong


def row_of_table(begun: float, rounds: list[list[dict[str, Any]]], engines: list[str]) -> str:
    """Return a line for the last round."""
    last = rounds[-1]

    def each(what: str, form: str) -> str:
        return " ".join(format(said[what], form) for said in last)

    operations = [f"{sum(said[engine] for said in last):>9}" for engine in engines]
    held = [each("MiB", ".1f"), each("descriptors", "d"), each("mappings", "d"), each("threads", "d")]
    return "  ".join([f"{(time.monotonic() - begun) / 60:7.1f}", *operations, *held])


def main() -> int:
    """Run it; return 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="for how long (30)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (4)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the time of day")
    parser.add_argument("--engines", default="sdma,cu", help="which (sdma,cu)")
    parser.add_argument("--round", type=float, default=60, help="seconds between two lines of the table (60)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        be_a_rank(arguments)
        return 0
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(arguments.seed), "--port", str(store.port)]
    # One arena: with one for each thread that came and went, memory grows by what lies free in them.
    environment = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1")
    engines, rounds = arguments.engines.split(","), list[list[dict[str, Any]]]()
    print(f"seed {arguments.seed}, {arguments.ranks} ranks")
    print(
        f"minutes  {'  '.join(f'{e:>9}' for e in engines)}  MiB of each rank, descriptors, mappings, threads",
        flush=True,
    )
    processes = [subprocess.Popen([*command, "--rank", str(r)], env=environment) for r in range(arguments.ranks)]
    begun = time.monotonic()
    try:
        while (left := begun + 60 * arguments.minutes - time.monotonic()) > 0:
            seconds = min(left, arguments.round)
            store.set(f"round {len(rounds)}", str(seconds))
            keys = [f"done {len(rounds)}/{rank}" for rank in range(arguments.ranks)]
            watch(processes, store, keys, seconds + 4 * WAIT_S)
            rounds.append([json.loads(store.get(key)) for key in keys])
            print(row_of_table(begun, rounds, engines), flush=True)
        store.set(f"round {len(rounds)}", "0")
        for process in processes:
            process.wait(timeout=30)
        wrong = judge(rounds) + [f"exit code {p.returncode}" for p in processes if p.returncode]
    except (StoppedError, subprocess.TimeoutExpired) as error:
        wrong = [str(error)]
    except KeyboardInterrupt:
        wrong = ["interrupted"]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    print("\n".join(wrong) or "nothing wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
