"""Processes that act as ranks: started once, given one function after another, replaced when they die or hang.

A test calls ``ranks(world).run(fn, *args)`` (see conftest.py) and ``fn(rank, world, *args)`` runs in ``world``
processes, in a process group of its own. A function travels as its file and name, so it has to be at the top level of a
test module; arguments and results are pickled.

Every run has a hard deadline. After it, or a while after the first failure, processes that are still busy show where
they are (faulthandler), and are killed and replaced; so no test can hang or harm the next one. After a run each process
checks that it holds what it held before: descriptors, mappings of shared memory, threads, children. What it holds more
fails the test.

This file is also the program of these processes: ``python rank_pool.py DESCRIPTOR PORT``.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

MOST = 8  # ranks of the largest group
GRACE_S = 10.0  # after the first failure of a run, the others get this long to notice
CLEAN_S = 3.0  # after a run, memory and threads get this long to go


class RankError(AssertionError):
    """A rank raised, died, hung or leaked; the message holds the rank and its traceback."""


class Task(NamedTuple):
    """One run of one rank."""

    file: str
    module: str
    function: str
    arguments: bytes
    rank: int
    world: int
    prefix: str  # of the store; unique for the run
    init: str | None
    options: bytes  # of a dictionary, or of None
    group_timeout_s: float


class Outcome(NamedTuple):
    """How a run of one rank ended; ``error`` is a traceback and ``result`` a pickle."""

    at: float  # time.monotonic(), which all processes of a machine share
    result: bytes
    error: str | None
    skip: str | None


# The parent's side ----------------------------------------------------------------------------------------------------


class _Process:
    """One worker process, seen from its parent."""

    def __init__(self, folder: Path, number: int, port: int) -> None:
        ours, theirs = socket.socketpair()
        self.log = folder / f"{number}.log"
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1")
        with open(self.log, "wb") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.is_ready = False
        self.is_busy = False
        self._is_killed = False

    def get_ready(self) -> None:
        """Wait until it has imported torch."""
        if not self.is_ready:
            if not self.connection.poll(120):
                raise RankError(f"a rank process did not start\n{self.said(0)}")
            try:
                self.connection.recv()
            except EOFError:
                raise RankError(f"a rank process died while it started\n{self.said(0)}") from None
            self.is_ready = True

    def said(self, start: int) -> str:
        """Return what it has printed since ``start`` (a size of its log), the end of it."""
        text = self.log.read_bytes()[start:][-20_000:].decode(errors="replace")
        return "".join(f"    | {line}\n" for line in text.splitlines())

    def stacks(self) -> str:
        """Return where all its threads are."""
        start = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.1)
            if self.log.stat().st_size > start:
                time.sleep(0.1)
                break
        return self.said(start)

    def kill(self) -> None:
        """End it, and whatever it has started. Idempotent."""
        self.connection.close()
        if not self._is_killed:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            for name in Path("/dev/shm").glob(f"sem.{_semaphores(self.process.pid)}*"):
                name.unlink(missing_ok=True)  # what would have unlinked it was killed too

    def close(self) -> None:
        """Let it end by itself."""
        self.connection.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()


class RankPool:
    """Up to :data:`MOST` processes; one run at a time."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="iris_pg-ranks-")
        self._processes: list[_Process] = []
        self.sessions: set[int] = set()  # every process that was ever started leads a session of its own

    def _start(self) -> _Process:
        process = _Process(Path(self._folder.name), next(self._numbers), self._store.port)
        self.sessions.add(process.process.pid)
        return process

    def _team(self, world: int) -> list[_Process]:
        while len(self._processes) < world:
            self._processes.append(self._start())
        for i, process in enumerate(self._processes[:world]):
            if process.is_busy or process.process.poll() is not None:
                process.kill()
                self._processes[i] = self._start()
        team = self._processes[:world]
        for process in team:
            process.get_ready()
        return team

    def run(
        self,
        world: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60,
        init: str | None = "iris",
        options: dict[str, Any] | None = None,
        group_timeout_s: float | None = None,
        may_die: Collection[int] = (),
        may_hold: Collection[str] = (),
    ) -> list[Any]:
        """Run ``fn(rank, world, *args)`` on every rank and return the results by rank.

        Args:
            world: number of ranks.
            fn: a function at the top level of a test module.
            timeout_s: hard deadline of the run, in seconds.
            init: backend of the default process group, destroyed after the run; None for no group.
            options: arguments of ``iris_pg.Options`` for that group.
            group_timeout_s: the group's timeout; by default less than the deadline, so that the group's own error comes
                first.
            may_die: ranks that are expected to end their process; their result is None.
            may_hold: words in what the processes may hold more afterwards, as some libraries never let go.

        Raises:
            RankError: with the rank that failed first, its traceback, and what the others said.
        """
        __tracebackhide__ = True
        team = self._team(world)
        group_timeout_s = group_timeout_s or timeout_s / 2
        prefix = f"run-{next(self._numbers)}"
        sizes = [process.log.stat().st_size for process in team]
        file, arguments = os.path.abspath(fn.__code__.co_filename), pickle.dumps(args)
        for rank, process in enumerate(team):
            process.is_busy = True
            process.connection.send(
                Task(
                    *(file, fn.__module__, fn.__qualname__, arguments, rank, world),
                    *(prefix, init, pickle.dumps(options), group_timeout_s),
                )
            )
        outcomes, leaks, died = self._collect(team, time.monotonic() + timeout_s, may_die, may_hold)
        stuck = {rank: process.stacks() for rank, process in enumerate(team) if process.is_busy and rank not in died}
        for process in team:
            if process.is_busy:
                process.kill()
        self._judge(
            outcomes, leaks, died, stuck, may_die, [p.said(n) for p, n in zip(team, sizes, strict=True)], timeout_s
        )
        return [pickle.loads(outcomes[rank].result) if rank in outcomes else None for rank in range(world)]

    def _collect(
        self, team: list[_Process], deadline: float, may_die: Collection[int], may_hold: Collection[str]
    ) -> tuple[dict[int, Outcome], dict[int, str], dict[int, int]]:
        """Wait for all ranks; return outcomes, leaks and exit codes, each by rank. Who is missing is stuck."""
        rank_of = {process.connection: rank for rank, process in enumerate(team)}
        outcomes: dict[int, Outcome] = {}
        leaks: dict[int, str] = {}
        died: dict[int, int] = {}
        waiting = set(rank_of)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = rank_of[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    died[rank] = team[rank].process.wait()
                    waiting.discard(connection)
                    message = None
                if isinstance(message, Outcome):
                    outcomes[rank] = message
                    if len(outcomes) + len(died) == len(team):
                        deadline = max(deadline, time.monotonic() + 2 * CLEAN_S)  # all that is left is cleaning up
                elif isinstance(message, str):
                    message = ", ".join(h for h in message.split(", ") if not any(word in h for word in may_hold))
                    leaks[rank] = message
                    team[rank].is_busy = False
                    if message:
                        team[rank].kill()  # with the children it may have left; it is replaced
                    waiting.discard(connection)
                failed = rank in outcomes and outcomes[rank].error or rank in died and rank not in may_die
                if failed and len(outcomes) + len(died) < len(team):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes, leaks, died

    @staticmethod
    def _judge(
        outcomes: dict[int, Outcome],
        leaks: dict[int, str],
        died: dict[int, int],
        stuck: dict[int, str],
        may_die: Collection[int],
        said: list[str],
        timeout_s: float,
    ) -> None:
        __tracebackhide__ = True
        skips = [outcome.skip for outcome in outcomes.values() if outcome.skip]
        if skips:
            import pytest

            pytest.skip(skips[0])
        failed = sorted((o.at, rank, o.error) for rank, o in outcomes.items() if o.error)
        unexpected = {rank: code for rank, code in died.items() if rank not in may_die}
        lines = [f"rank {rank} died, exit code {code}\n{said[rank]}" for rank, code in unexpected.items()]
        if failed:
            _, rank, text = failed[0]
            lines.append(f"rank {rank} failed first\n{text}{said[rank]}")
            lines += [f"rank {rank} failed then: {text.strip().splitlines()[-1]}" for _, rank, text in failed[1:]]
        lines += [
            f"rank {rank} was still busy (deadline {timeout_s} s), and was killed\n{text}"
            for rank, text in stuck.items()
        ]
        if not lines:
            lines = [f"rank {rank} holds more than before the run: {text}" for rank, text in leaks.items() if text]
        if lines:
            raise RankError("\n".join(lines))

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill() if process.is_busy else process.connection.close()
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._folder.cleanup()


class Ranks:
    """The ranks of one group: ``world`` processes of the pool."""

    def __init__(self, pool: RankPool, world: int) -> None:
        self.pool, self.world = pool, world

    def run(self, fn: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """See :meth:`RankPool.run`."""
        __tracebackhide__ = True
        return self.pool.run(self.world, fn, *args, **keywords)


def processes_of_sessions(sessions: Collection[int]) -> list[str]:
    """Return the processes that belong to one of ``sessions``, in words."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] != "Z":
                found.append(f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}")
        except OSError:
            continue
    return found


def _semaphores(pid: int) -> str:
    """Return how the names of the semaphores begin that a worker's libraries make with multiprocessing."""
    return f"rank-pool-{pid}-"


# What a process holds -------------------------------------------------------------------------------------------------


def descriptors() -> Counter[str]:
    """Return what the descriptors of this process refer to."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target != f"/proc/{os.getpid()}/fd":
                found[f"descriptor of {target.partition(':[')[0]}"] += 1
    return found


def shared_mappings() -> Counter[str]:
    """Return the mappings of nameless shared memory in this process."""
    with open("/proc/self/maps") as lines:
        names = [line.split(maxsplit=5)[5].strip() for line in lines if "/memfd:" in line or "/dev/shm/" in line]
    return Counter(f"mapping of {name}" for name in names)


def threads() -> Counter[str]:
    """Return the names of the threads of this process, Python's or not, but for autograd's: torch keeps one for each
    kind of device from the first backward pass on.
    """
    found: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if not name.startswith("pt_autograd"):
                found[f"thread {name}"] += 1
    return found


def children() -> Counter[str]:
    """Return the children of this process, dead ones that nobody has waited for included."""
    found: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                found[f"child {command[:200] or 'zombie'}"] += 1
    return found


def holdings() -> Counter[str]:
    """Return all that this process holds and that can leak."""
    return descriptors() + shared_mappings() + threads() + children()


def left_over(before: Counter[str], patience_s: float, now: Callable[[], Counter[str]] = holdings) -> str:
    """Return what this process holds more than ``before``, in words; it gets ``patience_s`` seconds to let go."""
    deadline = time.monotonic() + patience_s
    while True:
        gc.collect()
        more = now() - before
        if not more or time.monotonic() > deadline:
            return ", ".join(f"{n} x {what}" for what, n in more.items())
        time.sleep(0.02)


current_store: Any = None
"""In a worker: a store for the use of the function that is running, unique to its run."""

# The worker's side ----------------------------------------------------------------------------------------------------


def _function(task: Task) -> Callable[..., Any]:
    """Return the function of a task, from the very file that the parent has it from."""
    module = sys.modules.get(task.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module] = module  # so that pickle finds what lies in it
        spec.loader.exec_module(module)
    found: Any = module
    for name in task.function.split("."):
        found = getattr(found, name)
    return found


@contextlib.contextmanager
def _group(task: Task, store: Any) -> Iterator[None]:
    import torch.distributed as dist

    options = pickle.loads(task.options)
    try:
        if task.init:
            from iris_pg import Options

            dist.init_process_group(
                task.init,
                store=dist.PrefixStore(task.prefix, store),
                rank=task.rank,
                world_size=task.world,
                timeout=datetime.timedelta(seconds=task.group_timeout_s),
                pg_options=Options(**options) if options is not None else None,
            )
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # torch counts on after an init that failed, on this rank only


def _execute(task: Task, store: Any) -> Outcome:
    import pytest

    global current_store
    result, error, skip = pickle.dumps(None), None, None
    failed_at = None
    try:
        function = _function(task)
        with _group(task, store):
            current_store = _prefixed(task.prefix, store)
            try:
                result = pickle.dumps(function(task.rank, task.world, *pickle.loads(task.arguments)))
            except BaseException:
                failed_at = time.monotonic()  # before the group is destroyed, which others may notice and end first
                raise
    except pytest.skip.Exception as raised:
        skip = str(raised)
    except BaseException:
        error = traceback.format_exc()
    current_store = None
    return Outcome(failed_at or time.monotonic(), result, error, skip)


def _prefixed(prefix: str, store: Any) -> Any:
    import torch.distributed as dist

    return dist.PrefixStore(f"{prefix}/own", store)


def _serve(fd: int, port: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the tests
    multiprocessing.current_process()._config["semprefix"] = "/" + _semaphores(os.getpid())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Connection(fd)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for name in ("iris_pg.process_group", "torch.distributed.nn"):  # the latter would keep the first group as a default
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that the collections after each run look only at what the run has made
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)  # the interpreter's own end takes a second and gives nothing back that the kernel does not
        if torch.cuda.is_available():  # rank r uses GPU r; its context is the process's, and stays
            torch.cuda.current_stream(task.rank % torch.cuda.device_count()).query()
        before = holdings()
        connection.send(_execute(task, store))
        connection.send(left_over(before, CLEAN_S))


def main(arguments: Sequence[str]) -> None:
    """Serve the parent that holds the other end of the descriptor."""
    _serve(int(arguments[0]), int(arguments[1]))


if __name__ == "__main__":
    import rank_pool  # what is pickled must be of the module that the parent knows

    rank_pool.main(sys.argv[1:])
