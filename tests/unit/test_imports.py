"""Imports: arrows between modules point down, importing the package is light, and torch finds the backend by itself."""

import ast
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "iris_pg"

# The first part of a module's path under src/iris_pg -> its layer. A module imports from its own layer or a lower one.
LAYERS = {
    "errors": 0,
    "options": 1,
    "program": 1,
    "program_group": 1,
    "verify": 1,
    "reduce_ops": 1,
    "arguments": 1,
    "flags": 1,
    "completion": 1,
    "rendezvous": 1,
    "platforms": 2,
    "memory": 3,
    "copy_engine": 4,
    "kernels": 4,
    "collectives": 5,
    "planner": 6,
    "launches": 6,
    "work": 7,
    "mailbox": 7,
    "mail": 7,
    "process_group": 7,
    "groups": 7,
    "monitored": 7,
    "multinode": 7,
    "transport": 7,
    "device_page": 7,
    "device_queues": 7,
    "device_channels": 7,
    "proxy_channels": 7,
    "triggered": 7,
    "device_work": 7,
    "device_operation": 7,
    "device_copies": 7,
    "device_exchanges": 7,
    "device_messages": 7,
    "device_watchdog": 7,
    "device_transport": 7,
    "sizes": 7,
    "watch": 7,
    "operations": 7,
    "context": 7,
    "collective_api": 7,
    "integrations": 7,
    "observe": 7,
    "device": 7,
    "backend": 8,
    "__init__": 9,
    "bench": 10,
    "doctor": 10,
}

# Narrower than its layer: all that it may import from outside itself.
ONLY = {
    "errors": set(),
    "options": {"errors"},
    "program": {"errors"},
    "program_group": {"errors", "program"},
    "verify": {"errors", "program", "program_group"},  # a proof about programs must not lean on what runs them
    "flags": set(),
    "completion": set(),
    "collectives": {"errors", "program", "flags"},  # program builders are pure: no heap, no device, no I/O
}

# Same layer, but neither may know the other.
APART = [{"copy_engine", "kernels"}]


class Import(NamedTuple):
    """One arrow: the first part of the path of what is imported, and where."""

    target: str
    line: int
    at_import: bool  # runs when the module is imported, so not inside a function nor under TYPE_CHECKING


class _Imports(ast.NodeVisitor):
    def __init__(self, package: list[str]) -> None:
        self.package = package  # what a relative import starts from: ["iris_pg", "memory"]
        self.found: list[Import] = []
        self._deferred = 0

    def _add(self, dotted: str, node: ast.AST) -> None:
        first, *rest = dotted.split(".")
        if first == "iris_pg":
            self.found.append(Import(rest[0] if rest else "__init__", node.lineno, not self._deferred))

    def visit_Import(self, node):
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node):
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        dotted = ".".join([*base, *([node.module] if node.module else [])])
        if dotted != "iris_pg":
            return self._add(dotted, node)
        for alias in node.names:  # a submodule, or a public name that __init__ holds
            self._add(f"iris_pg.{alias.name}" if _is_module(alias.name) else "iris_pg", node)

    def visit_Call(self, node):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        argument = node.args[0] if node.args else None
        if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
            self._add(str(argument.value), node)
        self.generic_visit(node)

    def visit(self, node):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        self._deferred += deferred
        super().visit(node)
        self._deferred -= deferred


def _is_module(name: str) -> bool:
    return name in LAYERS or (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def imports_of(source: str, path: Path) -> list[Import]:
    """What the module at `path` (relative to src/iris_pg) imports from iris_pg, wherever in it the import stands."""
    visitor = _Imports(["iris_pg", *path.parent.parts])
    visitor.visit(ast.parse(source))
    return visitor.found


def owner_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def objection(owner: str, target: str) -> str | None:
    """Why `owner` may not import `target`, or None where it may."""
    if target not in LAYERS:
        return f"{target} has no layer; add it to LAYERS in {Path(__file__).name}"
    if owner == target:
        return None
    if owner in ONLY and target not in ONLY[owner]:
        return f"{owner} may import only {sorted(ONLY[owner]) or 'nothing'} of iris_pg"
    if LAYERS[target] > LAYERS[owner]:
        return f"{owner} is layer {LAYERS[owner]} and {target} is above it, layer {LAYERS[target]}"
    if any({owner, target} <= pair for pair in APART):
        return f"{owner} and {target} may not know each other"
    return None


@pytest.mark.parametrize("path", sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")), ids=str)
def test_imports_point_down(path):
    owner = owner_of(path)
    assert owner in LAYERS, f"src/iris_pg/{path}: {owner} has no layer; add it to LAYERS in {Path(__file__).name}"
    found = imports_of((PACKAGE / path).read_text(), path)
    wrong = [f"src/iris_pg/{path}:{i.line}: {why}" for i in found if (why := objection(owner, i.target))]
    assert not wrong, "\n".join(wrong)


def test_backend_imports_the_process_group_only_when_a_group_is_made():
    path = Path("backend.py")
    eager = [i for i in imports_of((PACKAGE / path).read_text(), path) if i.at_import and i.target == "process_group"]
    assert not eager, f"src/iris_pg/{path}:{eager[0].line}: every `import torch` would pay for it; import in a function"


@pytest.mark.parametrize(
    "statement, target, at_import",
    [
        ("import iris_pg", "__init__", True),
        ("import iris_pg.planner", "planner", True),
        ("from iris_pg import planner", "planner", True),
        ("from iris_pg import a_public_name", "__init__", True),
        ("from iris_pg.memory.heap import SymmetricHeap", "memory", True),
        ("from .. import planner", "planner", True),
        ("from ..planner import explain", "planner", True),
        ("from .ring import Ring", "copy_engine", True),
        ("from . import ring", "copy_engine", True),
        ("try:\n    import iris_pg.context\nexcept ImportError:\n    pass", "context", True),
        ("def f():\n    from iris_pg.work import IrisWork", "work", False),
        ("if TYPE_CHECKING:\n    from iris_pg.work import IrisWork", "work", False),
        ("importlib.import_module('iris_pg.device.triton')", "device", True),
    ],
)
def test_every_form_of_import_is_seen(statement, target, at_import):
    (found,) = imports_of(statement, Path("copy_engine/packets.py"))
    assert (found.target, found.at_import) == (target, at_import)


@pytest.mark.parametrize(
    "owner, target, allowed",
    [
        ("memory", "platforms", True),
        ("memory", "copy_engine", False),
        ("copy_engine", "kernels", False),
        ("kernels", "copy_engine", False),
        ("collectives", "program", True),
        ("collectives", "memory", False),
        ("verify", "program", True),
        ("verify", "options", False),
        ("errors", "options", False),
        ("program", "options", False),
        ("process_group", "work", True),
        ("process_group", "__init__", False),
        ("planner", "no_such_module", False),
    ],
)
def test_the_rules_refuse_what_they_should(owner, target, allowed):
    assert (objection(owner, target) is None) == allowed


def run_python(code: str, cwd: Path, **environ: str) -> str:
    """Run `code` in a fresh interpreter, away from the source tree, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Prints what the process holds before and after a statement. The baseline is torch without
# the backends that it loads by itself.
FOOTPRINT = """
import json, os, sys
import torch, torch.distributed

def footprint():
    with open("/proc/self/maps") as maps:
        memfds = sum("memfd:" in line for line in maps)
    return {
        "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        "threads": sorted(os.listdir("/proc/self/task")),
        "fds": sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + fd)),
        "memfd_mappings": memfds,
        "cuda_initialized": torch.cuda.is_initialized(),
    }

before = footprint()
STATEMENT
print(json.dumps([before, footprint()]))
"""


@pytest.mark.parametrize(
    "statement", ["import iris_pg", "import iris_pg.backend; iris_pg.backend.autoload()"], ids=["import", "autoload"]
)
def test_importing_the_package_is_light(statement, tmp_path):
    code = FOOTPRINT.replace("STATEMENT", statement)
    before, after = json.loads(run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    loaded = set(after.pop("modules")) - set(before.pop("modules"))
    assert "iris_pg" in loaded
    assert not loaded & {"triton", "llvmlite", "numba", "cuda", "hip"}
    assert after == before


def test_torch_registers_the_backend_without_an_import_of_iris_pg(tmp_path):
    installed = [e.value for e in metadata.entry_points(group="torch.backends") if e.name == "iris"]
    assert installed == ["iris_pg.backend:autoload"], "iris-pg is not installed in this environment: make .venv"
    code = "import torch, torch.distributed as dist; print(dist.Backend.backend_list)"
    assert "'iris'" in run_python(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")


@pytest.mark.parametrize(
    "first", ["import iris_pg", "from iris_pg import options", "import torch", "import iris_pg.errors"]
)
def test_whichever_is_imported_first_the_backend_is_there(first):
    """Importing the package imports torch, which loads the package by its entry point while it is being imported."""
    script = (
        f"{first}\nimport torch.distributed as dist, iris_pg\n"
        "assert 'iris' in dist.Backend.backend_list\niris_pg.Options()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
