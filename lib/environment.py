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
OLDEST = (3, 11)
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
    missing = [name for name in NEEDED if util.find_spec(name) is None]
    in_venv = os.environ.get(ENTERED) == str(os.getpid()) or Path(sys.prefix).resolve() == VENV.resolve()
    # Who activated an environment of his own, and installed everything there, means it.
    is_chosen = sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir()
    fault = fault_of(sys.version_info[:3], missing, in_venv)
    if in_venv or (fault is None and is_chosen):
        pass
    elif PYTHON.exists() and is_program():
        fault = _enter_venv()
    elif PYTHON.exists() and fault is not None:
        fault = f"{fault.partition('; ')[0]}; use {PYTHON}"
    elif os.path.lexists(str(PYTHON)) and fault is not None:
        fault = f"{PYTHON} leads nowhere: the Python that it was made with is gone; make clean, then make setup"
    if fault is not None:
        if all(os.environ.get(name, "0") == "0" for name in ("OMPI_COMM_WORLD_RANK", "MLX_RANK")):
            print(f"error: {fault}", file=sys.stderr)
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


def fault_of(version: "tuple[int, ...]", missing: "list[str]", in_venv: bool) -> "str | None":
    """Why an interpreter of this version, without these packages, will not do; None where it will."""
    if version[:2] < OLDEST:
        wanted, found = ".".join(map(str, OLDEST)), ".".join(map(str, version))
        remedy = "make setup looks for one and sets up .venv"
        return f"Python {wanted} or newer is needed, and {sys.executable} is {found}; {remedy}"
    if missing and in_venv:
        return f"{VENV} lacks {', '.join(missing)}; make clean, then make setup"
    if missing:
        return f"{sys.executable} lacks {', '.join(missing)}; make setup installs what is needed into .venv"
    return None


def is_program() -> bool:
    """Whether this process runs one of our programs, and not another that imports us (pytest, a notebook)."""
    if sys.argv[:1] == ["-m"]:  # a module is being looked for in this package, and will be the program
        return True
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is not None and ROOT in Path(file).resolve().parents


def _enter_venv() -> str:
    """Replaces this process by the same command in .venv; returns why it could not."""
    sys.stdout.flush()
    environment = {
        name: value for name, value in os.environ.items() if name != "__PYVENV_LAUNCHER__"
    }  # macOS: of this one
    try:
        os.execve(str(PYTHON), [str(PYTHON), *_arguments()], {**environment, ENTERED: str(os.getpid())})
    except OSError as error:
        return f"{PYTHON} does not start ({error.strerror}); make clean, then make setup"


def _arguments() -> "list[str]":
    """All that followed the interpreter on the command line, its own options included."""
    if hasattr(sys, "orig_argv"):
        return list(sys.orig_argv[1:])
    import ctypes  # before Python 3.10

    count, words = ctypes.c_int(), ctypes.POINTER(ctypes.c_wchar_p)()
    ctypes.pythonapi.Py_GetArgcArgv(ctypes.byref(count), ctypes.byref(words))
    return [words[index] or "" for index in range(1, count.value)]
