"""The ground under MLX: the BLAS it computes with, the MPI it opens, and what the launcher told it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lib.errors import UserError
from lib.system import hardware, mpi_and_blas, os_commands
from lib.system.mpi_and_blas import Launch
from tests.tiny import ROOT

SET = ("OMPI_", "PMI_", "PMIX_", "SLURM_", "MLX_", "NCCL_", "OPENBLAS_")  # by launchers and by prepare()

# Matrix products, wide, thin and ragged, and their gradients, at every alignment; prints the digest.
PRODUCTS = """
from lib.system import hardware, mpi_and_blas
mpi_and_blas.prepare()
import hashlib
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.random.seed(0)
digest = hashlib.sha256()
for m, k, n in ((512, 128, 384), (513, 127, 383), (1, 128, 384), (7, 33, 5), (256, 1024, 8)):
    a, b = mx.random.normal((m * k,)), mx.random.normal((k * n,))
    seen = set()
    for offset in range(0, 16, 3):
        left = mx.concatenate([mx.zeros(offset), a])[offset:].reshape(m, k)
        right = mx.concatenate([mx.zeros(offset), b])[offset:].reshape(k, n)
        arrays = [left @ right, *mx.grad(lambda x, y: mx.square(x @ y).sum(), argnums=(0, 1))(left, right)]
        mx.eval(arrays)
        seen.add(b"".join(bytes(memoryview(array)) for array in arrays))
    assert len(seen) == 1, ("the bits depend on the alignment", m, k, n)
    digest.update(seen.pop())
print(digest.hexdigest())
"""


def bare_environment() -> dict[str, str]:
    """The environment as a user's shell has it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SET)}


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=bare_environment() | environment,
        timeout=120,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """Sets the environment that a launcher would leave, and reads it."""
    for name in set(os.environ) - set(bare_environment()):
        monkeypatch.delenv(name)

    def launched(**environment: str) -> Launch:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return mpi_and_blas.launch_environment()

    return launched


def test_products_have_the_same_bits_in_every_process_and_at_every_alignment():
    first, second = python(PRODUCTS), python(PRODUCTS, OMP_NUM_THREADS="2")
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != ""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")
def test_mlx_computes_with_openblas_and_numpy_keeps_its_own():
    library = mpi_and_blas.load_blas()
    if library is None:
        pytest.skip("MLX brings no reference BLAS here")
    import mlx.core  # noqa: F401

    maps = Path("/proc/self/maps").read_text()
    assert str(library.resolve()) in maps
    assert "mlx_cpu.libs/libblas" not in maps
    assert "mlx_cpu.libs/liblapack" in maps  # it calls the same BLAS
    assert np.linalg.solve(np.eye(3) * 2, np.ones(3)).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.skipif(mpi_and_blas.load_blas() is None, reason="MLX brings no reference BLAS here")
def test_a_missing_openblas_is_one_warning(tmp_path):
    code = f"import sys; sys.prefix = {str(tmp_path)!r}; from lib.system import mpi_and_blas as r; "
    code += "r.shutil.which = lambda *_, **__: None; r.prepare()"
    done = python(code)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "make setup" in done.stderr
    assert python(code, OMPI_COMM_WORLD_RANK="1").stderr == ""  # the first rank tells it
    late = python("import mlx.core; from lib.system import mpi_and_blas as r; r.prepare()")
    assert "before lib.system.mpi_and_blas.prepare()" in late.stderr


def test_the_users_thread_count_stays():
    show = "from lib.system import mpi_and_blas; mpi_and_blas.prepare(); import os; print(os.environ['OPENBLAS_NUM_THREADS'])"
    assert python(show).stdout == "1\n"
    cores = os_commands.own_cores()
    assert python(show, OPENBLAS_NUM_THREADS=str(cores)).stdout == f"{cores}\n"


def test_importing_runtime_is_quick_work():
    heavy = {"numpy", "pydantic", "mlx", "mpi4py", "asyncio"}
    assert python(f"import sys, lib.system.mpi_and_blas; print(*{heavy} & set(sys.modules))").stdout == "\n"


def test_the_mpi_library_and_mpirun_are_this_environments():
    assert Path(os.environ["MLX_MPI_LIBNAME"]).exists()
    assert mpi_and_blas.mpirun_path().exists()
    late = "from lib.system import mpi_and_blas; mpi_and_blas.prepare(); from mpi4py import MPI; print(MPI.Is_initialized())"
    assert python(late).stdout == "False\n"
    # mlx.launch --backend mpi gives the name alone, which the dynamic linker would not find.
    show = (
        "from lib.system import mpi_and_blas; mpi_and_blas.prepare(); import os; print(os.environ['MLX_MPI_LIBNAME'])"
    )
    assert Path(python(show, MLX_MPI_LIBNAME=mpi_and_blas.MPI_LIBRARY).stdout.strip()).is_absolute()
    assert python(show, MLX_MPI_LIBNAME="/opt/libmpi.so").stdout == "/opt/libmpi.so\n"


def test_without_the_packages_it_is_one_line():
    done = subprocess.run([sys.executable, "-S", "train.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "make setup" in done.stderr
    assert done.stderr.count("\n") == 1


def test_variables_that_mlx_does_not_have_are_answered_once_with_the_setting():
    show = "from lib.system import mpi_and_blas; mpi_and_blas.prepare(); mpi_and_blas.prepare()"
    errors = python(show, MLX_MAX_MEMORY_GB="48").stderr
    assert errors == "warning: MLX_MAX_MEMORY_GB has no effect; plan.memory_limit_gb=N limits what MLX holds\n"


MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_RANK": "2"}
MPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
NCCL = {"NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "12345", "MLX_WORLD_SIZE": "2", "MLX_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [({}, Launch(None, 0, 1, 1)), (MPI, Launch("mpi", 2, 3, 2)), (NCCL, Launch("nccl", 1, 2, 1))],
    ids=["nobody launched us", "mpirun", "nccl"],
)
def test_a_launcher_s_variables_are_read(launched, environment, launch):
    assert launched(**environment) == launch


def test_ring(launched, tmp_path):
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([["10.0.0.1:1"], ["10.0.0.2:2", "10.0.1.2:3"], ["10.0.0.2:4"]]))
    assert launched(MLX_HOSTFILE=str(hostfile), MLX_RANK="1") == Launch("ring", 1, 3, 2)
    assert launched(MLX_HOSTFILE=str(hostfile), MLX_RANK="2") == Launch("ring", 2, 3, 2)
    hostfile.write_text("")  # mlx.launch -n 1
    assert launched(MLX_HOSTFILE=str(hostfile), MLX_RANK="0") == Launch()


def test_jaccl(launched, tmp_path):
    devices = tmp_path / "devices.json"
    devices.write_text(json.dumps([[None, "rdma_en5"], ["rdma_en5", None]]))
    launch = launched(MLX_IBV_DEVICES=str(devices), MLX_JACCL_COORDINATOR="10.0.0.1:32323", MLX_RANK="1")
    assert launch == Launch("jaccl", 1, 2, 1)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "two", "OMPI_COMM_WORLD_RANK": "0"}, "launcher's variables.*'two'"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "no mpirun started.*unset OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "OMPI_COMM_WORLD_RANK"),
        ({"MLX_HOSTFILE": "/nowhere/hosts.json", "MLX_RANK": "0"}, "/nowhere/hosts.json"),
        ({"MLX_HOSTFILE": "FOLDER/broken", "MLX_RANK": "0"}, "launcher's variables"),
        ({"MLX_HOSTFILE": "hostfile"}, "take ./launch --hostfile hostfile, or unset it"),
        ({"NCCL_HOST_IP": "10.0.0.1", "MLX_RANK": "0"}, "MLX_WORLD_SIZE"),
        ({"MLX_RANK": "1"}, "no MLX_HOSTFILE"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2.*mpirun"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4.*mpirun"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2.*./launch"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1, but neither.*unset LOCAL_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, "no mpirun started.*unset OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_a_malformed_launch_is_an_error_of_one_line(launched, tmp_path, environment, named):
    (tmp_path / "broken").write_text("[[")
    with pytest.raises(UserError, match=named) as error:
        launched(**{name: value.replace("FOLDER", str(tmp_path)) for name, value in environment.items()})
    assert "\n" not in str(error.value)


@pytest.mark.mpi(min_size=2)
def test_every_rank_is_in_the_launchers_world():
    import mlx.core as mx
    from mpi4py import MPI

    launch, world = mpi_and_blas.launch_environment(), mx.distributed.init(backend="mpi", strict=True)
    assert (world.rank(), world.size()) == (launch.rank, launch.size)
    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (launch.rank, launch.size)
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    total = mx.distributed.all_sum(mx.array(2.0**launch.rank), stream=mx.cpu)
    assert total.item() == 2.0**launch.size - 1


@pytest.mark.parametrize(
    ("all_cores", "stored", "is_alone", "may_measure", "expected"),
    [
        (16.0, None, True, True, 4),
        (11.0, None, True, True, 1),  # of 10 with one thread: not worth it
        (16.0, None, False, True, 1),
        (16.0, None, True, False, 1),  # plan.replan=false
        (2.0, 8, True, True, 4),  # a resume takes what the run started with, up to its cores
    ],
)
def test_a_process_that_is_alone_takes_all_cores_where_that_is_faster(
    monkeypatch, all_cores: float, stored: int, is_alone: bool, may_measure: bool, expected: int
) -> None:
    counts: list[int] = []
    monkeypatch.setenv(mpi_and_blas.AUTOMATIC, "1")
    monkeypatch.setattr(os_commands, "own_cores", lambda: 4)
    monkeypatch.setattr(mpi_and_blas, "set_blas_threads", lambda count: counts.append(count) or Path("blas"))
    slowed = lambda: 0.5 if len(counts) == 3 else 1.0  # the first look at all cores, by another process  # noqa: E731
    monkeypatch.setattr(hardware, "quick_gflops", lambda seconds: 10.0 if counts[-1] == 1 else slowed() * all_cores)
    monkeypatch.setattr(hardware, "mlx_device", lambda: ("cpu", {}))
    assert hardware.choose_threads(stored, is_alone, may_measure) == expected == counts[-1]
    monkeypatch.delenv(mpi_and_blas.AUTOMATIC)
    assert hardware.choose_threads(stored, is_alone, may_measure) is None  # the user's number stays
