"""pytest by itself, or on every rank of `mpirun -n N pytest`, where the tests marked `mpi` run on all."""

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from lib.system import mpi_and_blas
from tests.cluster import Host, Unavailable, cluster

# Tests start hundreds of Python processes, each of which would compile all of lib/ where this is set, as in containers.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) is not None:
    sys.dont_write_bytecode = False
# Tests have more ranks than cores: one that waits in MPI sleeps for a moment between two looks, instead of asking again at
# once, which would take a core from those that it waits for.
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("OMPI_MCA_threads_pthreads_yield_strategy", "nanosleep")
os.environ.setdefault("OMPI_MCA_threads_pthreads_nanosleep_time", "200000")
os.fsync = lambda descriptor: None  # no test cuts the power, and a disk takes hundredths of a second
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no measurement decides how a test's figures are rounded
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


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background: what tests start must hear it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if LAUNCH.size > 1:
        config.option.with_mpi = True  # without it pytest-mpi skips the marked tests, and the run passes
    if LAUNCH.rank > 0:
        config.option.verbose = -2  # rank 0 tells the story; the others tell their failures


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (report.outcome, "", "") if LAUNCH.rank > 0 and report.outcome != "failed" else None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ranks of a world read only the files that have something for them: the others take seconds to import."""
    if LAUNCH.size > 1 and collection_path.name.startswith("test_") and "mark.mpi" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A mark `long` stays where it applies; under mpirun, only the tests marked mpi for a world of this size."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "long" or _applies(mark, item)]
    if LAUNCH.size > 1:
        selected = [item for item in items if _is_for(list(item.iter_markers("mpi")), LAUNCH.size)]
        config.hook.pytest_deselected(items=list(set(items) - set(selected)))
        items[:] = selected


def pytest_collection_finish() -> None:
    """What was imported and collected stays: looking for garbage in it, and often, was a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def _applies(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Whether `long(*ids, ranks=N)` names this item's parameters (a * stands for anything) and this world's size."""
    parameters = item.callspec.id if hasattr(item, "callspec") else ""
    patterns = [".*".join(map(re.escape, name.split("*"))) for name in mark.args]
    is_named = not patterns or any(re.fullmatch(pattern, parameters) for pattern in patterns)
    return is_named and mark.kwargs.get("ranks", LAUNCH.size) == LAUNCH.size


def _is_for(marks: list[pytest.Mark], size: int) -> bool:
    """Whether a test says something on a world of this size that it does not say on another of `make test`.

    All of its marks have to allow it: the module's, its own and its parameters'.
    """
    sizes = [(mark.kwargs.get("min_size", 1), mark.kwargs.get("max_size", size)) for mark in marks]
    return bool(marks) and all(least <= size <= most for least, most in sizes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """No rank goes on, or cleans up, while another one still reads what a test that passed has written."""
    yield
    if LAUNCH.size > 1 and "world" in item.fixturenames:
        item.funcargs["world"].gather_text("passed")


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[list[Host]]:
    """Three hosts for the whole session; a test that unplugs one plugs it in again."""
    try:
        with cluster(hosts=3) as hosts:
            yield hosts
    except Unavailable as reason:
        pytest.skip(f"no cluster of namespaces: {reason}")


@pytest.fixture(scope="module")
def world():
    """The ranks that run this test: one, or those of `mpirun -n N pytest`."""
    from lib.distributed.world import start

    return start(LAUNCH, timeout_seconds=120)


@pytest.fixture
def folder(world, tmp_path):
    """One folder for all ranks."""
    return Path(world.broadcast_text(str(tmp_path)))
