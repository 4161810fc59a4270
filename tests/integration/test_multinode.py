"""torchrun with two nodes, on one machine: agents and ranks that believe to be on different hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

FULL = bool(os.environ.get("IRIS_PG_TEST_FULL"))
needs_time = pytest.mark.skipif(not FULL, reason="takes half a minute; set IRIS_PG_TEST_FULL=1")
TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
DEADLINE_S = 110

SUMS = """
import os, torch, torch.distributed as dist
import iris_pg
dist.init_process_group("iris")
x = torch.arange(100_000, dtype=torch.float32) + dist.get_rank()
dist.all_reduce(x)
world = dist.get_world_size()
assert torch.equal(x, world * torch.arange(100_000) + sum(range(world)))
print(f"rank {dist.get_rank()}:", iris_pg.explain().splitlines()[0], flush=True)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_nodes(*arguments: str, ranks_of_node=(1, 1), prefixes=((), ()), address="127.0.0.1", names=("a", "b")) -> str:
    """Run a script under one torchrun for each node; return what they print. Past the deadline all are ended."""
    port, processes = free_port(), []
    try:
        for node, ranks in enumerate(ranks_of_node):
            where = ["--nnodes", str(len(ranks_of_node)), "--node-rank", str(node)]
            where += ["--master-addr", address, "--master-port", str(port)]
            run = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(ranks), *arguments]
            environment = {"OMP_NUM_THREADS": "1", "IRIS_PG_TIMEOUT": "60", **os.environ}
            if names:
                environment["IRIS_PG_HOST"] = names[node]
            processes.append(
                subprocess.Popen(
                    [*prefixes[node], *run],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                    env=environment,
                )
            )
        end = time.monotonic() + DEADLINE_S
        said = [process.communicate(timeout=max(end - time.monotonic(), 1))[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
        for process in processes:
            try:
                process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return "\n".join(said)


@needs_time
@pytest.mark.parametrize("ranks_of_node", [(1, 1), (2, 1)])
def test_torchrun_with_two_nodes(tmp_path, ranks_of_node):
    script = tmp_path / "script.py"
    script.write_text(SUMS)
    said = run_nodes(str(script), ranks_of_node=ranks_of_node)
    world = sum(ranks_of_node)
    assert said.count(f"of {world}, on 2 hosts") == world, said


@needs_time
@pytest.mark.parametrize(
    ("script", "ranks_of_node"),
    [("train_ddp.py", (1, 1)), ("train_fsdp2.py", (1, 1)), ("train_fsdp2.py --replicas 2", (2, 2))],
)
def test_the_losses_are_those_of_gloo(script, ranks_of_node):
    name, *arguments = script.split()
    said = run_nodes(str(EXAMPLES / name), *arguments, "--compare", "gloo", "--steps", "3", ranks_of_node=ranks_of_node)
    found = re.search(r"largest difference between the losses over \w+ and \w+: (\S+)$", said, re.M)
    assert found and float(found[1]) <= (0 if ranks_of_node == (1, 1) else 1e-6), said  # four are added in any order


# A network namespace is what two hosts do not share.


def namespaces_work() -> bool:
    """Return whether a user may make network namespaces, and virtual cards and a bridge between them, here."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = "ip link add b0 type bridge && ip link add a0 type veth peer name a1 && unshare -n true"
    return subprocess.run(["unshare", "-rn", "sh", "-c", trial], capture_output=True, timeout=20).returncode == 0


def run_network(task: str, *arguments: str) -> str:
    """Run ranks on hosts made of network namespaces; return what they print."""
    if not namespaces_work():
        pytest.skip("no network namespaces with virtual cards between them can be made here")
    process = subprocess.Popen(
        ["unshare", "-rn", sys.executable, str(TESTS / "network_hosts.py"), task, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    return said


@needs_time
@pytest.mark.parametrize("hosts", ["1,1", "2,1", "1,3", "1,1,1", "2,1,3"])
def test_the_table_between_network_namespaces(hosts):
    run_network("table", "--hosts", hosts)


@needs_time
@pytest.mark.parametrize("hosts", ["1,1", "2,1,2"])
def test_a_host_whose_network_is_cut_off_is_named_by_the_deadline(tmp_path, hosts):
    said = run_network("cut", "--hosts", hosts, "--file", str(tmp_path / "cut"))
    assert said.count("told in time") == sum(map(int, hosts.split(","))), said
