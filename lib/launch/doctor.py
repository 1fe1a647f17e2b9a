"""Whether this machine can train: a page that tries each part that training uses, each with ok or its remedy.

    make doctor                      the page; attach it to a report. It names this host, and nobody
    make doctor ARGS="--json"        the same for programs

Exit status: 0 if training can run here, 1 if something that it needs is broken, 2 for words that it does not know. What
only several machines need (MPI, the ring, ssh) or what only slows (a battery) does not change it. Every check has its
limit in seconds.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text

from lib.config import command_line
from lib.launch.machine_checks import Check, Result, all_checks, late, probe_mlx
from lib.system import hardware, mpi_and_blas, network, terminal

STYLES = {"ok": "green", "note": "bold magenta", "failed": "bold red"}


@dataclass(frozen=True)
class Checked:
    """A result under its name. needed: training on this machine alone needs it."""

    check: str
    status: str
    message: str
    remedy: str
    note: str
    needed: bool
    seconds: float


def shortened(text: str, home: str, user: str) -> str:
    """A text without the name of who sits here: the home folder is ~, and user@ and /Users/NAME lose it."""
    text = text.replace(home, "~") if len(home) > 1 else text
    return re.sub(r"(/Users|/home)/[^/\s'\":]+", "~", re.sub(rf"\b{re.escape(user)}@", "", text))


def can_train(results: Sequence[Checked]) -> bool:
    """Whether everything that training on this machine needs is there."""
    return not any(one.status == "failed" and one.needed for one in results)


# ---- Trying


def attempt(check: Check) -> Checked | None:
    """A check's result, within its limit; a fault of the check itself is its result."""
    results: list[Result | None] = []

    def examine() -> None:
        try:
            results.append(check.examine(check.limit_seconds))
        except Exception as error:  # the page goes on with the other checks
            results.append(Result("failed", f"{type(error).__name__}: {error}".splitlines()[0]))

    began = time.monotonic()
    thread = threading.Thread(target=examine, daemon=True)
    thread.start()
    thread.join(check.limit_seconds + 2)  # what it starts has its own limit
    result = results[0] if results else Result("failed", late(check.limit_seconds))
    if result is None:
        return None
    message, remedy, note = (shortened(part, str(Path.home()), getpass.getuser()) for part in result[1:])
    seconds = round(time.monotonic() - began, 2)
    return Checked(check.name, result.status, message, remedy, note, check.needed, seconds)


# ---- The page


def show(say: terminal.Terminal, one: Checked) -> None:
    """A check's line, and under it its remedy in one piece, to be copied."""
    lead = Text.assemble((f"  {one.check:<13}", "dim"), (f"{one.status:<8}", STYLES[one.status]))
    say.line(one.message or "-", lead=lead)
    if one.status != "ok" and one.remedy:
        say.console.print(Text(f"    {one.remedy}"), soft_wrap=True)
    if one.status != "ok" and one.note:
        say.line(f"({one.note})", lead="    ")


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the page; returns the exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["probe"]:
        print(json.dumps(probe_mlx()))
        return 0
    parser = command_line.Parser(
        prog="doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="the page as one JSON object")
    options = parser.parse_args(words)
    say = terminal.Terminal(silent=options.json)
    header = {"host": network.own_name(), "os": hardware.operating_system(), "processor": hardware.processor_name()}
    say.line(f"{header['host']}: {header['processor']}, {header['os']}", "bold")
    results = []
    for check in all_checks():
        if (one := attempt(check)) is not None:
            results.append(one)
            show(say, one)
    passed, failed = can_train(results), [one.check for one in results if one.status == "failed" and not one.needed]
    if options.json:
        print(json.dumps({**header, "can_train": passed, "checks": [asdict(one) for one in results]}))
        return 0 if passed else 1
    verdict = "training can run here" if passed else "training cannot run here"
    if passed and failed:
        verdict += f"; on several machines or ranks it needs what failed: {', '.join(failed)}"
    say.line(verdict, "bold")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
