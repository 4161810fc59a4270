"""Hosts made of network namespaces, joined by a bridge; run as ``unshare -rn python network_hosts.py ...``.

Each rank runs this file again, within its host, and does what the first argument says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_S = 5.0  # of the group that loses a host
ADDRESS = "10.77.0.{}"


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def host(number: int) -> subprocess.Popen[bytes]:
    """Make a host; return the process that holds its namespace."""
    holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()  # so the namespace is there
    card = f"iris{number}"
    run("ip", "link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
    run("ip", "link", "set", card, "master", "bridge", "up")
    address = ADDRESS.format(number + 1)
    up = f"ip link set lo up && ip addr add {address}/24 dev eth0 && ip link set eth0 up"
    run("nsenter", "-t", str(holder.pid), "-n", "sh", "-c", up)
    return holder


def main(args: argparse.Namespace) -> int:
    """Run the ranks; return 0 when all of them end well in time."""
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "link", "set", "bridge", "up")
    sizes = [int(size) for size in args.hosts.split(",")]
    holders, ranks = [], []
    try:
        holders = [host(number) for number in range(len(sizes))]
        common = dict(MASTER_ADDR=ADDRESS.format(1), MASTER_PORT="29555", WORLD_SIZE=str(sum(sizes)))
        for number, size in enumerate(sizes):
            for _ in range(size):
                place = dict(RANK=str(len(ranks)), GLOO_SOCKET_IFNAME="eth0", ON_HOST=str(number), **common)
                enter = ["nsenter", "-t", str(holders[number].pid), "-n"]
                ranks.append(subprocess.Popen([*enter, sys.executable, *sys.argv], env={**os.environ, **place}))
        end, is_cut = time.monotonic() + args.deadline, False
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            if args.task == "cut" and not is_cut and os.path.exists(args.file):
                run("ip", "link", "set", f"iris{len(sizes) - 1}", "down")  # as if somebody had pulled the plug
                is_cut = True
            time.sleep(0.02)
        return max(1 if rank.poll() is None else abs(rank.returncode) for rank in ranks)
    finally:
        for process in (*ranks, *holders):
            if process.poll() is None:
                process.kill()
            process.wait()


def table(rows_of_an_operation: int) -> str:
    """Run rows of the table; return what is wrong."""
    import torch.distributed as dist

    import iris_pg
    from table.runner import groups_of, mistakes
    from table.sample import sampled

    dist.init_process_group("iris")
    world = dist.get_world_size()
    assert f"on {len(args.hosts.split(','))} hosts" in iris_pg.explain()
    rows = [row for row in sampled("sdma", world, rows_of_an_operation) if row.operation != "recv_from_any"]
    said = mistakes(rows, groups_of(world, "iris"))
    dist.destroy_process_group()
    return "; ".join(said)


def cut(file: str) -> str:
    """Reduce until the last host is cut off; return what is wrong with how that ends."""
    import datetime

    import torch
    import torch.distributed as dist

    from iris_pg.errors import DeadlineError, IrisError, PeerLostError

    dist.init_process_group("iris", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    last = len(args.hosts.split(",")) - 1
    is_last, start = int(os.environ["ON_HOST"]) == last, time.monotonic()
    x, end = torch.ones(100_000), start + 60
    try:
        while time.monotonic() < end:
            start = time.monotonic()
            dist.all_reduce(x)
            if dist.get_rank() == 0:
                Path(file).touch()
    except IrisError as error:
        seconds, text = time.monotonic() - start, str(error)
        # A rank that hears of it from others may be told that one of them has left.
        if not isinstance(error, DeadlineError | PeerLostError) or seconds > TIMEOUT_S + 8:
            return f"after {seconds:.1f} s {type(error).__name__}: {text}"
        gone = [rank for rank in range(dist.get_world_size()) if rank >= dist.get_world_size() - int(args.hosts[-1])]
        if not is_last and not any(f"rank {rank} on host" in text for rank in gone):
            return f"none of ranks {gone} is named: {text}"
        if not is_last and isinstance(error, DeadlineError) and error.late not in (None, *gone):
            return f"rank {error.late} is taken for the late one: {text}"
        print(f"rank {dist.get_rank()} told in time", flush=True)
        return ""
    return "nothing was raised"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("table", "cut"))
    parser.add_argument("--hosts", help="ranks of each, by commas")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--file", help="appears when a host is to be cut off")
    parser.add_argument("--deadline", type=float, default=100)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(main(args))
    wrong = table(args.rows) if args.task == "table" else cut(args.file)
    if wrong:
        print(f"rank {os.environ['RANK']}: {wrong}", flush=True)
    sys.stdout.flush()
    os._exit(1 if wrong else 0)  # the store of a host that is cut off cannot be closed
