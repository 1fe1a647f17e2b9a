"""A rank that waits for its work: all is imported and read, so that training goes on sooner after a fault.

    python -m lib.spare        the agent (lib/agent.py) has one ready for each rank that it may have to start

Its input's first line says what it will be given, so that it reads ahead (lib/ahead.py); the second is its command and
environment, one JSON object each. What follows is the command's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Becomes the command that it is given; ends where there is none."""
    expected = _line()
    if expected is None:
        return
    from lib import command, metal, runtime

    relaxed = True
    with contextlib.suppress(Exception, SystemExit):  # of another command than train.py's nothing is known
        relaxed = metal.relaxes(command.parse(expected["command"][1:], None))
    runtime.prepare(relaxed)
    from lib import ahead, batches, checkpoint, evaluate, loading, report, rounds, schedule, scoring, step  # noqa: F401

    words = expected["command"]
    if words and Path(words[0]).resolve() == ROOT / "train.py":
        with (
            contextlib.redirect_stdout(sys.stderr),
            contextlib.suppress(Exception, SystemExit),
        ):  # the run itself will tell
            ahead.read(words[1:])
    print("ready", flush=True)
    work = _line()
    if work is None:
        return
    os.environ.update(work["environment"])
    sys.argv = work["command"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _line() -> Any:
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)  # not more: it would be missed
        if not letter:
            return None
        line += letter
    return json.loads(line)


if __name__ == "__main__":
    main()
