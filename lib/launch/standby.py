"""A rank that waits for its work: all is imported and read, so that training goes on sooner after a fault.

    python -m lib.launch.standby        the agent (lib/agent.py) has one ready for each rank that it may have to start

Its input's first line says what it will be given, so that it reads ahead (lib/training/preload.py); the second is its command and
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

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Becomes the command that it is given; ends where there is none."""
    expected = _line()
    if expected is None:
        return
    from lib.config import train_arguments
    from lib.system import metal, mpi_and_blas

    relaxed = True
    with contextlib.suppress(Exception, SystemExit):  # of another command than train.py's nothing is known
        relaxed = metal.relaxes(train_arguments.parse(expected["command"][1:], None))
    mpi_and_blas.prepare(relaxed)
    from lib.data import micro_batches  # noqa: F401
    from lib.distributed import sharded_model  # noqa: F401
    from lib.evaluate import metrics  # noqa: F401
    from lib.plan import replan  # noqa: F401
    from lib.training import (
        checkpoint,  # noqa: F401
        local_sgd,  # noqa: F401
        preload,  # noqa: F401
        reference,  # noqa: F401
        report,  # noqa: F401
        step,  # noqa: F401
    )

    words = expected["command"]
    if words and Path(words[0]).resolve() == ROOT / "train.py":
        with (
            contextlib.redirect_stdout(sys.stderr),
            contextlib.suppress(Exception, SystemExit),
        ):  # the run itself will tell
            preload.read(words[1:])
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
