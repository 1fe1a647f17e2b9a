"""Attacks by somebody else's files and words: what was tried, what held, what fell.

    python benchmarks/attack.py                    all of them, a few minutes
    python benchmarks/attack.py --only alias       those with this in their names
    python benchmarks/attack.py --quick            every third

Each attack (tests/attacks.py) runs in a process of its own, on a fresh run of a tiny model, and may take so many seconds
and bytes and no more. The last line is one JSON object; the exit status is 1 where one fell.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

SECONDS = 60
MEMORY_BYTES = 1_500_000_000  # more than it had before the attack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="attacks with this in their names")
    parser.add_argument("--quick", action="store_true", help="every third attack")
    parser.add_argument("--seed", type=int, default=0, help="of the attacks' order")
    options = parser.parse_args()
    from tests.attacks import ATTACKS, prepare

    names = [name for name in ATTACKS if options.only in name][:: 3 if options.quick else 1]
    random.Random(options.seed).shuffle(names)
    fell: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            prepare(Path(folder))
        for name in names:
            began = time.perf_counter()
            why = outcome(name, Path(folder))
            seconds = time.perf_counter() - began
            print(
                f"{'held' if why is None else 'FELL'}  {seconds:5.1f} s  {name}{'' if why is None else ': ' + why}",
                flush=True,
            )
            if why is not None:
                fell[name] = why
    print(json.dumps({"tried": len(names), "held": len(names) - len(fell), "fell": len(fell), "which": fell}))
    return 1 if fell else 0


def outcome(name: str, folder: Path) -> str | None:
    """Why an attack fell, in a process of its own; None where the program held."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_attack, args=(name, str(folder), sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(SECONDS):
            return f"it was not over after {SECONDS} s"
        why: str | None = receiving.recv()
        return why
    except EOFError:
        process.join()
        return f"its process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _attack(name: str, folder: str, sending: Connection) -> None:
    from tests.attacks import ATTACKS

    os.chdir(ROOT)
    before = _peak_bytes()
    try:
        why = ATTACKS[name](Path(folder))
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    taken = _peak_bytes() - before
    sending.send(f"it took {taken / 1e9:.1f} GB" if why is None and taken > MEMORY_BYTES else why)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main())
