"""Attacks by somebody else's files, words and connections: what was tried, what held, what fell.

    python benchmarks/attack.py                    all of them, about ten minutes
    python benchmarks/attack.py --only alias host  those with one of these in their names; --list names them
    python benchmarks/attack.py --quick            every tenth

Each attack is a line of tests/attacks*.py, and may take so many seconds and bytes and no more. They run in processes that
go on as long as nothing falls: one that hangs, dies or grows is ended, and the next goes on in a fresh one. The last line is
one JSON object; the exit status is 1 where one fell.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

SECONDS = 90
MEMORY_BYTES = 1_500_000_000  # more than it had before the attack
ADDRESS_BYTES = 10 * 2**30
GROWN_BYTES = 500_000_000  # a process that has taken so much makes room for a fresh one: it would hide less


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", default=[""], help="attacks with one of these in their names"
    )
    parser.add_argument("--quick", action="store_true", help="every tenth attack")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks' order")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1), help="attacks at once")
    parser.add_argument("--list", action="store_true", help="name the attacks")
    options = parser.parse_args()
    names = [name for name in attacks() if any(text in name for text in options.only)][:: 10 if options.quick else 1]
    if options.list:
        print("\n".join(names))
        return 0
    random.Random(options.seed).shuffle(names)
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        parts = [names[start :: options.workers] for start in range(options.workers)]
        fell = {name: why for part in pool.map(outcomes, parts) for name, why in part.items()}
    print(json.dumps({"tried": len(names), "held": len(names) - len(fell), "fell": len(fell), "which": fell}))
    return 1 if fell else 0


class Line(NamedTuple):
    """One attack.

    Args:
        attack: gives why it fell, in the folder of `prepare`.
        prepare: makes what is attacked in a folder.
    """

    attack: Callable[[Path], str | None]
    prepare: Callable[[Path], object]


def attacks() -> dict[str, Line]:
    """The attacks of all modules, by module and name.

    A module without a `prepare` attacks what tests/attacks.py prepares.
    """
    shared = importlib.import_module("tests.attacks").prepare
    found: dict[str, Line] = {}
    for path in sorted((ROOT / "tests").glob("attacks*.py")):
        module = importlib.import_module(f"tests.{path.stem}")
        prepare, kind = getattr(module, "prepare", shared), path.stem.removeprefix("attacks").removeprefix("_")
        found |= {f"{kind or 'words'}/{name}": Line(attack, prepare) for name, attack in module.ATTACKS.items()}
    return found


def outcomes(names: list[str]) -> dict[str, str]:
    """Why attacks fell, by name; each is told as it ends."""
    fell: dict[str, str] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            done, fault = _in_one_process(left, Path(folder), fell)
        if fault is not None:
            _tell(left[done], fault, SECONDS, fell)
            done += 1
        left = left[done:]
    return fell


def _in_one_process(names: list[str], folder: Path, fell: dict[str, str]) -> tuple[int, str | None]:
    """How many attacks a process went through, and why it did not get through the next one."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_attack, args=(names, str(folder), sending))
    process.start()
    sending.close()
    done = 0
    try:
        for name in names:
            if not receiving.poll(3 * SECONDS):  # what it attacks may have to be made first
                return done, "nothing to be attacked could be prepared"
            receiving.recv()
            began = time.perf_counter()
            if not receiving.poll(SECONDS):
                return done, f"it was not over after {SECONDS} s"
            why, grown = receiving.recv()
            _tell(name, why, time.perf_counter() - began, fell)
            done += 1
            if grown > GROWN_BYTES:
                break
        return done, None
    except EOFError:
        process.join()
        return done, f"its process ended with status {process.exitcode}"
    finally:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # with what its attacks have started
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _tell(name: str, why: str | None, seconds: float, fell: dict[str, str]) -> None:
    told = "" if why is None else ": " + " ".join(why.split())
    print(f"{'held' if why is None else 'FELL'}  {seconds:5.1f} s  {name}{told}", flush=True)
    if why is not None:
        fell[name] = why


def _attack(names: list[str], folder: str, sending: Connection) -> None:
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.chdir(ROOT)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))  # or others would be ended for its memory
    known, prepared = attacks(), dict[Callable[[Path], object], Path]()
    start = None
    for name in names:
        attack, prepare = known[name]
        if prepare not in prepared:
            prepared[prepare] = Path(folder) / str(len(prepared))
            prepared[prepare].mkdir()
            with contextlib.redirect_stdout(io.StringIO()):
                prepare(prepared[prepare])
        sending.send(name)
        before = _peak_bytes()
        start = before if start is None else start
        try:
            why = attack(prepared[prepare])
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
        taken = _peak_bytes() - before
        why = f"it took {taken / 1e9:.1f} GB" if why is None and taken > MEMORY_BYTES else why
        sending.send((why, _peak_bytes() - start))


def _end_with(parent: int) -> None:
    """Ends this process and all that its attacks have started, once the benchmark is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main())
