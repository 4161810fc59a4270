"""``python -m iris_pg.doctor``: what this machine has, what each engine needs of it, and how to get what is missing.

Nothing is changed, and nothing needs to work: a package that is missing or a driver that fails is what it reports. The
exit status is 1 when an engine cannot run on a device that the machine has, else 0.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PACKAGES = ("iris-pg", "torch", "triton", "llvmlite", "numpy", "cuda-bindings", "rocm-xio", "rich", "matplotlib")


class Need(NamedTuple):
    """One thing that an engine needs.

    Args:
        what: it is, in words.
        problem: why it is not there; empty when it is.
        fix: what to do then.
    """

    what: str
    problem: str = ""
    fix: str = ""


def main() -> int:
    """Print the report and return the exit status."""
    lines, is_well = report()
    print("\n".join(lines))
    return 0 if is_well else 1


def report() -> tuple[list[str], bool]:
    """Return the report, and whether every engine can run on every device that the machine has."""
    lines = ["Packages", *(f"  {name:14} {version_of(name) or 'not installed'}" for name in PACKAGES)]
    lines += ["", "Machine", *(f"  {name:14} {value}" for name, value in machine())]
    gpus, problem = devices()
    lines += ["", "Devices", *(f"  {line}" for line in gpus or [problem or "no GPU that torch can use"])]
    is_well = True
    for title, needs in engines(bool(gpus)):
        missing = [need for need in needs if need.problem]
        is_well = is_well and not missing
        lines += ["", f"{title}: {'ready' if not missing else 'cannot run'}"]
        for need in needs:
            lines.append(f"  {'missing' if need.problem else 'ok':8}{need.what}")
            if need.problem:
                lines += [f"{'':10}{need.problem}", f"{'':10}To do: {need.fix}"]
    return lines, is_well


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> Iterable[tuple[str, str]]:
    """Yield (name, value) of facts about the machine."""
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process"
    try:
        from iris_pg.platforms import cpu

        yield "memory", f"{cpu.available_bytes() / (1 << 30):.1f} GiB left for shared memory"
    except Exception as error:
        yield "memory", f"cannot be told: {error}"
    yield 'backend "iris"', _backend()
    set_here = sorted(name for name in os.environ if name.startswith("IRIS_PG_"))
    yield "variables", ", ".join(f"{name}={os.environ[name]}" for name in set_here) or "no IRIS_PG_* variable is set"


def devices() -> tuple[list[str], str]:
    """Return a line for each GPU and for each pair that cannot reach each other, and what went wrong, if it did."""
    try:
        import torch

        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            return [], "" if built else "no GPU support in this build of torch (a CPU-only wheel)"
        lines = []
        count = torch.cuda.device_count()
        kind = f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        for i in range(count):
            p = torch.cuda.get_device_properties(i)
            more = "".join(f", {text}" for text in _driver_facts(i))
            lines.append(
                f"{i}: {p.name}, {p.total_memory / (1 << 30):.0f} GiB, {p.multi_processor_count} multiprocessors, "
                f"{kind}{more}"
            )
        apart = [
            f"{a} cannot reach the memory of {b}: no peer access, so they cannot be in one group"
            for a in range(count)
            for b in range(count)
            if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
        if count > 1 and not apart:
            lines.append("every GPU reaches the memory of every other")
        if torch.version.hip:
            lines += sdma_engines()
        return lines + apart, ""
    except Exception as error:
        return [], f"torch cannot tell: {type(error).__name__}: {error}"


def sdma_engines() -> list[str]:
    """Return a line for each AMD GPU: where it is, and which of its SDMA engines lead to which peers."""
    from iris_pg.errors import UnsupportedError
    from iris_pg.platforms import kfd

    lines, gpus = [], kfd.gpus()
    for gpu in gpus:
        told = []
        for peer in gpus:
            if peer is not gpu:
                try:
                    told.append(f"{peer.address} by {'/'.join(map(str, kfd.engine_between(gpu, peer)[0]))}")
                except UnsupportedError as error:
                    told.append(f"{peer.address}: {error}")
        engines = f"{gpu.engines} + {gpu.link_engines} SDMA engines"
        lines.append(f"{gpu.address} ({gpu.target}, {engines}) reaches {', '.join(told) or 'no other'}")
    return lines


def _driver_facts(index: int) -> Iterable[str]:
    """Yield what the CUDA driver says of a GPU, where cuda-bindings is installed."""
    if importlib.util.find_spec("cuda") is None or version_of("cuda-bindings") is None:
        return
    from cuda.bindings import driver

    def ask(name: str, *arguments: Any) -> Any:
        status, *values = getattr(driver, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {status.name}")
        return values[0] if values else None

    ask("cuInit", 0)
    version = ask("cuDriverGetVersion")
    device = ask("cuDeviceGet", index)
    kinds = driver.CUdevice_attribute
    engines = ask("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device)
    shares = ask("cuDeviceGetAttribute", kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device)
    yield f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
    yield f"{engines} copy engines"
    yield "memory can be shared by file descriptor" if shares else "memory cannot be shared by file descriptor"


def engines(has_gpu: bool) -> Iterable[tuple[str, list[Need]]]:
    """Yield (engine and device, what it needs) for the devices of this machine."""
    common = [_torch()]
    memory = _tried("shared memory (memfd)", _shared_memory, "run on Linux, and let the process create memfds")
    atomics = _tried("llvmlite, for loads and stores in order", _atomics, 'install it: pip install "llvmlite>=0.45"')
    triton = _package("triton", "triton", "pip install triton")
    yield "Engine sdma on CPU", [*common, memory, atomics]
    yield "Engine cu on CPU (Triton's interpreter)", [*common, memory, atomics, triton]
    if not has_gpu:
        return
    import torch

    if torch.version.hip:
        hip = [
            _tried(
                "the HIP runtime that torch has loaded", _hip, "install a torch that is built for ROCm 6.2 or newer"
            ),
            _tried("access to /dev/kfd and /dev/dri", _kfd, "join the groups of these files (render, video)"),
        ]
        yield 'Engine sdma on GPU, by streams (engine="auto")', [*common, *hip]
        from iris_pg.copy_engine import xio

        queues = _tried(f'{xio.MODULE}, for SDMA queues (engine="sdma")', xio.find, xio.INSTALL)
        yield 'Engine sdma on GPU, by SDMA queues (engine="sdma")', [*common, *hip, queues]
    else:
        yield "Engine sdma on GPU", [*common, _package("cuda", "cuda-bindings", "pip install iris-pg[cuda]")]
    yield "Engine cu on GPU", [*common, triton, _compiler()]


def _torch() -> Need:
    version = version_of("torch")
    if version is None:
        return Need("torch 2.11 or newer", "torch is not installed", "install torch from pytorch.org")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Need("torch 2.11 or newer", f"this is torch {version}", 'pip install --upgrade "torch>=2.11"')
    return Need("torch 2.11 or newer")


def _backend() -> str:
    if any(entry.name == "iris" for entry in importlib.metadata.entry_points(group="torch.backends")):
        return "torch finds it by itself"
    return "torch does not find it, as iris-pg is not installed; import iris_pg before init_process_group"


def _package(module: str, package: str, fix: str) -> Need:
    if importlib.util.find_spec(module) is not None and version_of(package) is not None:
        return Need(package)
    return Need(package, f"the package {package} is not installed", fix)


def _compiler() -> Need:
    what = "a C compiler, with which Triton builds launchers"
    if os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        return Need(what)
    return Need(what, "neither gcc, cc nor clang is on PATH, and CC is not set", "install gcc, or set CC")


def _tried(what: str, attempt: Callable[[], None], fix: str) -> Need:
    try:
        attempt()
    except Exception as error:
        return Need(what, f"{type(error).__name__}: {error}", fix)
    return Need(what)


def _hip() -> None:
    from iris_pg.platforms import hip_runtime

    hip_runtime.runtime()


def _kfd(devices: str = "/dev") -> None:
    """Raise when this process may not open what ROCm opens."""
    nodes = [f"{devices}/kfd", *sorted(glob.glob(f"{devices}/dri/renderD*"))]
    for node in nodes:
        if not os.access(node, os.R_OK | os.W_OK):
            raise PermissionError(
                f"{node} {'cannot be read and written' if os.path.exists(node) else 'does not exist'}"
            )
    if len(nodes) == 1:
        raise FileNotFoundError(f"{devices}/dri has no renderD node")


def _shared_memory() -> None:
    from iris_pg.platforms import cpu

    os.close(cpu.create_segment(cpu.PAGE))


def _atomics() -> None:
    import ctypes

    from iris_pg.platforms.atomics import atomics

    word = ctypes.c_uint32(0)
    atomics().store32(ctypes.addressof(word), 7)
    if word.value != 7:
        raise RuntimeError(f"a store of 7 left {word.value}")


if __name__ == "__main__":
    sys.exit(main())
