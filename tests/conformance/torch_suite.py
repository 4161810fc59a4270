"""PyTorch's own DistributedTest, which comes with torch, run against backend "iris" on CPU tensors.

    python tests/conformance/torch_suite.py --ranks 2 [--as-gloo] [NAME ...]

With ``--as-gloo`` the tests see a backend named "gloo" and 20 more of them run; their calls go to "iris". Prints one
JSON line: how many passed, failed and were skipped, why those were and which, and what the failures said. Each test
starts its ranks with fork, which is some twenty times faster than spawn, torch's own way.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import os
import shutil
import sys
import tempfile
import unittest


def prepare(ranks: int, as_gloo: bool, folder: str, port: int) -> None:
    """Set the environment that torch's tests read, and what they believe of the backend."""
    os.environ.update(
        BACKEND="gloo" if as_gloo else "iris",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/shared_init_file",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    for name in ("barrier", "test_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)

    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        common_distributed.DistTestCases.backend_feature[feature].add("iris")
    if as_gloo:
        core = dist.distributed_c10d
        init_process_group, new_group = core.init_process_group, core.new_group

        def init(backend=None, *arguments, **options):
            return init_process_group("iris" if backend in ("gloo", None) else backend, *arguments, **options)

        def new(ranks=None, timeout=None, backend=None, *arguments, **options):
            return new_group(ranks, timeout, "iris" if backend == "gloo" else backend, *arguments, **options)

        for module in (dist, core):
            module.init_process_group, module.new_group = init, new


def suite() -> type[unittest.TestCase]:
    """Return the test case; needs :func:`prepare` first."""
    import torch
    from torch.testing._internal.distributed import distributed_test

    class TestIris(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestIris


def needs_gpu(case: type[unittest.TestCase], name: str) -> bool:
    """Return whether a test asks for a GPU."""
    try:
        source = inspect.getsource(inspect.unwrap(getattr(case, name)))
    except (OSError, TypeError):
        return False
    return any(word in source for word in ("skip_if_no_gpu", "skip_if_lt_x_gpu", "skip_if_rocm", "cuda("))


def main() -> int:
    """Run the suite and return the exit status: 0 when nothing failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--as-gloo", action="store_true")
    parser.add_argument("--port", type=int, default=29871)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        prepare(given.ranks, given.as_gloo, folder, given.port)
        case = suite()
        names = given.names or [n for n in unittest.TestLoader().getTestCaseNames(case) if not needs_gpu(case, n)]
        result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(case(name) for name in names))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bad = {test.id().split(".")[-1]: text[-1500:] for test, text in result.failures + result.errors}
    counts = {
        "passed": result.testsRun - len(bad) - len(result.skipped),
        "failed": len(bad),
        "skipped": len(result.skipped),
    }
    why = collections.Counter(reason for _, reason in result.skipped)
    which = [test.id().split(".")[-1] for test, _ in result.skipped]
    print(json.dumps({**counts, "why skipped": why, "which": which, "failures": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
