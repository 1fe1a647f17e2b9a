"""A standby: a process that has imported and read everything, to replace a rank soon after a fault.

    python -m lib.launch.standby    the agent (lib/launch/host_agent.py) has one for each rank that it may have to start

The first line of its input is the command that it should expect, so that it can preload (lib/training/preload.py). The
second is the command that it becomes, with its environment; both are JSON objects. What follows is the command's input.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import NotRequired, TypedDict

from lib.environment import ROOT


class Request(TypedDict):
    """A line of the agent's."""

    command: list[str]  # the words of train.py
    local_ranks: NotRequired[int]  # of this host; known before the variables that tell a rank
    environment: NotRequired[dict[str, str]]


def main() -> None:
    """Preloads, waits, and becomes the command that it is given; ends where there is none."""
    expected = _read_line()
    if expected is None:
        return
    from lib.system import mpi_and_blas

    mpi_and_blas.prepare(expected.get("local_ranks"))
    # All that train.py imports on its way.
    from lib.evaluate import evaluator  # noqa: F401
    from lib.plan import strategy  # noqa: F401
    from lib.rollouts import rounds  # noqa: F401
    from lib.training import (  # noqa: F401
        divided_world,  # noqa: F401
        kernels,
        loop,
        preload,
        reference_model,
        report,
        resume,
        step_retries,
        summary,
    )

    words = expected["command"]
    if words and Path(words[0]).resolve() == ROOT / "train.py":
        with (
            contextlib.redirect_stdout(sys.stderr),
            contextlib.suppress(Exception, SystemExit),
        ):  # the run itself will report it
            preload.read(words[1:])
    print("ready", flush=True)
    work = _read_line()
    if work is None:
        return
    os.environ.update(work["environment"])
    sys.argv = work["command"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _read_line() -> Request | None:
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)  # one byte: the rest is the command's
        if not letter:
            return None
        line += letter
    request: Request = json.loads(line)
    return request


if __name__ == "__main__":
    main()
