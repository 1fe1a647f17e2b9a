"""The interpreter that has what Tandem needs: a program of ours that was started by another one goes on in `.venv`.

lib/__init__.py calls `enter()`, so it comes before anything else of ours. Only Python's own library is imported here,
and nothing is written that Python 3.8 cannot read: an interpreter that is too old still gets as far as the remedy.
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
ANY_PYTHON = "TANDEM_ANY_PYTHON"  # set: stay, whatever is missing; for what runs in another project's environment


def enter() -> None:
    """Stays where this interpreter has what is needed; else starts the same command in `.venv`, or ends with a remedy.

    Raises SystemExit: status 2, after one line that says what is missing.
    """
    if os.environ.get(ANY_PYTHON):
        return
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    in_venv = os.environ.get(ENTERED) == str(os.getpid()) or Path(sys.prefix).resolve() == VENV.resolve()
    fault, remedy = None, "make clean, then make setup"
    if tuple(sys.version_info[:2]) < (3, 11):
        fault = f"Python 3.11 or newer is needed, and {sys.executable} is {sys.version.split()[0]}"
    elif missing:
        fault = f"{VENV if in_venv else sys.executable} lacks {', '.join(missing)}"
    # Who activated an environment of his own, and installed everything there, means it.
    is_chosen = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    if fault is None and (in_venv or is_chosen):
        return
    # A program of ours goes on there, also a module that is still being looked for; what imports us (pytest) does not.
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    is_ours = sys.argv[:1] == ["-m"] or (file is not None and ROOT in Path(file).resolve().parents)
    if not in_venv and PYTHON.exists() and is_ours and hasattr(sys, "orig_argv"):
        # __PYVENV_LAUNCHER__ of macOS is of this interpreter
        environment = {name: value for name, value in os.environ.items() if name != "__PYVENV_LAUNCHER__"}
        try:
            os.execve(str(PYTHON), [str(PYTHON), *sys.orig_argv[1:]], {**environment, ENTERED: str(os.getpid())})
        except OSError as error:
            fault = f"{PYTHON} does not start ({error.strerror})"
    elif not in_venv and PYTHON.exists():
        remedy = f"use {PYTHON}"
    elif not in_venv and not os.path.lexists(str(PYTHON)):
        remedy = "make setup installs what is needed into .venv"
    if fault is not None:
        if all(os.environ.get(name, "0") == "0" for name in ("OMPI_COMM_WORLD_RANK", "MLX_RANK")):
            print(f"error: {fault}; {remedy}", file=sys.stderr)
        raise SystemExit(2)
