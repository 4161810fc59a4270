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

EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.mark.parametrize("ranks_of_node", [(1, 1), (2, 1)])
def test_torchrun_with_two_nodes(tmp_path, ranks_of_node):
    script = tmp_path / "script.py"
    script.write_text(SUMS)
    said = run_nodes(str(script), ranks_of_node=ranks_of_node)
    world = sum(ranks_of_node)
    assert said.count(f"of {world}, on 2 hosts") == world, said


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp2.py"])
def test_the_losses_are_those_of_gloo(script):
    said = run_nodes(str(EXAMPLES / script), "--compare", "gloo", "--steps", "3")
    assert re.search(r"largest difference between the losses over \w+ and \w+: 0$", said, re.M), said


# A network namespace is what two hosts do not share: here there are two, joined by a pair of virtual network cards.
IN_NAMESPACES = """
set -e
unshare -n sleep 100 &
other=$!
trap "kill $other" EXIT
sleep 0.3
ip link set lo up
ip link add iris0 type veth peer name iris1 netns $other
ip addr add 10.77.0.1/24 dev iris0 && ip link set iris0 up
nsenter -t $other -n sh -c "ip addr add 10.77.0.2/24 dev iris1 && ip link set iris1 up && ip link set lo up"
cd /
common="--nnodes 2 --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29555"
GLOO_SOCKET_IFNAME=iris1 nsenter -t $other -n timeout 80 $PYTHON -m torch.distributed.run $common --node-rank 1 $1 &
second=$!
GLOO_SOCKET_IFNAME=iris0 timeout 80 $PYTHON -m torch.distributed.run $common --node-rank 0 $1
wait $second
"""


def namespaces_work() -> bool:
    """Return whether a user may make network namespaces, and virtual cards between them, here."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = "ip link add a0 type veth peer name a1 && unshare -n true"
    return subprocess.run(["unshare", "-rn", "sh", "-c", trial], capture_output=True, timeout=20).returncode == 0


def test_two_network_namespaces_are_two_hosts(tmp_path):
    if not namespaces_work():
        pytest.skip("no network namespaces with virtual cards between them can be made here")
    script = tmp_path / "script.py"
    script.write_text(SUMS)
    environment = {"OMP_NUM_THREADS": "1", "IRIS_PG_TIMEOUT": "60", **os.environ, "PYTHON": sys.executable}
    process = subprocess.Popen(
        ["unshare", "-rn", "bash", "-c", IN_NAMESPACES, "namespaces", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said
    assert said.count("of 4, on 2 hosts") == 4, said
