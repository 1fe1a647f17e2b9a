"""pytest by itself, or on every rank of `mpirun -n N pytest`, where the tests marked `mpi` run on all."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from lib.system import mpi_and_blas, network
from tests.cluster import Host, Unavailable, cluster
from tests.darwin import Mac, forget_names

if TYPE_CHECKING:
    from lib.distributed.world import World

# Tests start hundreds of Python processes, each of which would compile all of lib/ where this is set, as in containers.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
    sys.dont_write_bytecode = False
# Tests have more ranks than cores: one that waits in MPI sleeps for a moment between two looks, instead of asking again at
# once, which would take a core from those that it waits for.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")
os.environ.setdefault("OMPI_MCA_threads_pthreads_nanosleep_time", "1000000")
# How long an example took says how busy the machine is. What fails prints how to run it again.
hypothesis_settings.register_profile(
    "anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
hypothesis_settings.load_profile("anywhere")
LAUNCH = mpi_and_blas.launch_environment()
MPI_FOLDER = "PRTE_MCA_prte_tmpdir_base"
if LAUNCH.size == 1 and MPI_FOLDER not in os.environ:
    # Open MPI names its folder by a process id alone, and does not start where a killed mpirun left that one behind.
    os.environ.update({MPI_FOLDER: tempfile.mkdtemp(prefix="mpi-")})
    atexit.register(shutil.rmtree, os.environ[MPI_FOLDER], ignore_errors=True)
mpi_and_blas.prepare()

if LAUNCH.size > 1:
    import mlx.core as mx

    # MLX first: it would get a world of one if mpi4py, which pytest-mpi imports later, had initialised MPI.
    assert mx.distributed.init(backend=LAUNCH.backend, strict=True).size() == LAUNCH.size


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--length",
        choices=["short", "long"],
        help="the tests of make test, or those marked long, of make test-long (default: both)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as in a script's background: what tests start must hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if LAUNCH.size > 1:
        config.option.with_mpi = True  # without it pytest-mpi skips the marked tests, and the run passes
    if LAUNCH.rank > 0:
        config.option.verbose = -2  # rank 0 tells the story; the others tell their failures


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (report.outcome, "", "") if LAUNCH.rank > 0 and report.outcome != "failed" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """For `make test` (tests/parts.py), which tells at its end what failed in all its parts."""
    if "FAILED_TESTS" in os.environ:
        with Path(os.environ["FAILED_TESTS"]).open("a", encoding="utf-8") as file:
            for kind in ("failed", "error"):
                file.writelines(f"{report.nodeid}\n" for report in terminalreporter.stats.get(kind, []))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ranks of a world read only the files that have something for them: the others take seconds to import."""
    if LAUNCH.size > 1 and collection_path.name.startswith("test_") and "mark.mpi" not in collection_path.read_text():
        return True
    return None


# Their seconds are most of all; under xdist (make test), which hands out files, the longest have to begin first.
LONGEST = [
    "recovery",
    "server",
    "launch",
    "train",
    "rollouts",
    "dashboard",
    "preflight",
    "out_of_memory",
    "memory",
    "docs",
    "attacks_gateway",
    "gguf",
    "calibrate",
    "slurm",
    "unpaired",
    "local_launch",
    "shapes",
    "help",
    "forward",
    "cables",
    "attacks",
    "topology",
    "window",
    "mistakes",
    "rounds",
    "listener",
    "streaming",
    "doctor",
    "pipeline_plan",
    "kills",
    "network_attacks",
    "training_options",
    "bulk",
    "sampler",
    "pasted",
    "export",
    "plan",
    "pages",
    "rendezvous",
    "cluster",
    "win_rate",
    "groups",
    "discovery",
    "best",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (length := config.getoption("length")) is not None:
        if not any("::" in word for word in config.args):
            _require_named(items)
        _deselect(config, items, [item for item in items if _is_long(item) == (length == "long")])
    if LAUNCH.size == 1:
        names = [f"test_{name}" for name in LONGEST]
        items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))
        return
    _deselect(config, items, [item for item in items if _is_for(list(item.iter_markers("mpi")), LAUNCH.size)])


def _deselect(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def pytest_collection_finish() -> None:
    """What was imported and collected stays: looking for garbage in it, and often, was a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def _is_for(marks: list[pytest.Mark], size: int) -> bool:
    """Whether a test says something on a world of this size that it does not say on another of `make test`.

    All of its marks have to allow it: the module's, its own and its parameters'.
    """
    sizes = [(mark.kwargs.get("min_size", 1), mark.kwargs.get("max_size", size)) for mark in marks]
    return bool(marks) and all(least <= size <= most for least, most in sizes)


def _is_long(item: pytest.Item) -> bool:
    """Whether one of its marks `long` is for these parameters, by their id, and for a world of this size."""
    return any(
        (not mark.args or any(_names(name, _parameters(item)) for name in mark.args))
        and mark.kwargs.get("ranks", LAUNCH.size) == LAUNCH.size
        for mark in item.iter_markers("long")
    )


def _names(name: str, parameters: str) -> bool:
    """Whether a name, in which * stands for anything, is that of these parameters."""
    return re.fullmatch(".*".join(map(re.escape, name.split("*"))), parameters) is not None


def _require_named(items: list[pytest.Item]) -> None:
    """Refuses a mark `long` that names parameters which its test does not have."""
    known: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        test = item.nodeid.split("[")[0]
        known.setdefault(test, set()).add(_parameters(item))
        named.setdefault(test, set()).update(*(mark.args for mark in item.iter_markers("long")))
    for test, names in named.items():
        for name in names:
            if not any(_names(name, parameters) for parameters in known[test]):
                raise pytest.UsageError(f"{test} is marked long for {name!r}, and has no parameters of that id")


def _parameters(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


@pytest.fixture(scope="session")
def data_folder() -> Path | None:
    """The folder of real data: TANDEM_DATA, or shared/data beside the checkout; None where there is none."""
    folder = Path(os.environ.get("TANDEM_DATA", Path(__file__).resolve().parents[2] / "shared/data"))
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[list[Host]]:
    """Three hosts for the whole session; whoever unplugs or shapes one mends it again."""
    try:
        with cluster(hosts=3) as hosts:
            yield hosts
    except Unavailable as reason:
        pytest.skip(f"no cluster of namespaces: {reason}")


@pytest.fixture
def fresh_hosts(three_hosts: list[Host]) -> list[Host]:
    """The three hosts, with no run on their disks: those of an earlier test would be there to go on with."""
    for host in three_hosts:
        subprocess.run(["rm", "-rf", host.outside / "runs"], check=True)
    return three_hosts


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mac]:
    """This process on a MacBook."""
    monkeypatch.delenv(network.HOST, raising=False)
    one = Mac(tmp_path)
    one.enter(monkeypatch)
    yield one
    forget_names()


@pytest.fixture(scope="module")
def world() -> World:
    """The ranks that run this test: one, or those of `mpirun -n N pytest`."""
    from lib.distributed.world import start

    return start(LAUNCH, timeout_seconds=120)


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(world.broadcast_text(str(tmp_path)))
