"""The interpreter that has what Tandem needs: a program of ours that was started by another one goes on in `.venv`.

lib/__init__.py calls `open_closed_streams()` and `enter()`, so they come before anything else of ours, for train.py,
./launch, benchmarks and `python -m lib.X`. Only Python's own library is imported here, and nothing is written that
Python 3.8 cannot read: an interpreter that is too old still gets as far as the remedy.
"""

import os
import sys
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"  # what `make setup` makes
PYTHON = VENV / "bin" / "python"
NEEDED = ("mlx", "mlx_lm", "mpi4py", "numpy", "pydantic", "rich", "yaml")
ENTERED = "TANDEM_ENTERED"  # the process that has gone into .venv; exec keeps its id, children have others
# Set: stay, whatever is missing; for what runs in the environment of another project.
ANY_PYTHON = "TANDEM_ANY_PYTHON"


def enter() -> None:
    """Stays where this interpreter has what is needed; else starts the same command in `.venv`, or ends with a remedy.

    Raises:
        SystemExit: status 2, after one line that says what is missing.
    """
    if os.environ.get(ANY_PYTHON):
        return
    missing, fault = [name for name in NEEDED if util.find_spec(name) is None], None
    remedy = "make clean, then make setup"
    in_venv = os.environ.get(ENTERED) == str(os.getpid()) or Path(sys.prefix).resolve() == VENV.resolve()
    version = tuple(sys.version_info[:2])
    if version < (3, 11):
        fault = f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}"
    elif missing:
        fault = f"{VENV if in_venv else sys.executable} lacks {', '.join(missing)}"
    # Who activated an environment of his own, and installed everything there, means it.
    is_chosen = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    if fault is None and (in_venv or is_chosen):
        return
    if not in_venv and PYTHON.exists() and is_program():
        fault = _enter_venv()
    elif not in_venv and PYTHON.exists():
        remedy = f"use {PYTHON}"
    elif not in_venv and os.path.lexists(str(PYTHON)):
        fault = fault and f"{PYTHON} leads nowhere: the Python that it was made with is gone"
    elif not in_venv:
        remedy = "make setup installs what is needed into .venv"
    if fault is not None:
        if all(os.environ.get(name, "0") == "0" for name in ("OMPI_COMM_WORLD_RANK", "MLX_RANK")):
            print(f"error: {fault}; {remedy}", file=sys.stderr)
        raise SystemExit(2)


def open_closed_streams() -> None:
    """Gives a process that was started without standard input, output or error (`>&-`) an empty one.

    Python has None there, and the next file that is opened would get the number: a child's output would go into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode)  # noqa: SIM115  (it stays open)
            if stream.fileno() == number:
                os.set_inheritable(number, True)
            setattr(sys, name, stream)


def is_program() -> bool:
    """Whether this process runs one of our programs, and not another that imports us (pytest, a notebook)."""
    if sys.argv[:1] == ["-m"]:  # a module is being looked for in this package, and will be the program
        return True
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is not None and ROOT in Path(file).resolve().parents


def _enter_venv() -> str:
    """Replaces this process by the same command in .venv; returns why it could not."""
    if not hasattr(sys, "orig_argv"):
        return f"{sys.executable} is too old; type {PYTHON} instead of it"
    sys.stdout.flush()
    # __PYVENV_LAUNCHER__ of macOS is of this interpreter
    environment = {name: value for name, value in os.environ.items() if name != "__PYVENV_LAUNCHER__"}
    try:
        os.execve(str(PYTHON), [str(PYTHON), *sys.orig_argv[1:]], {**environment, ENTERED: str(os.getpid())})
    except OSError as error:
        return f"{PYTHON} does not start ({error.strerror})"
