"""A rank that waits for its work: all is imported, so that training goes on sooner after a fault.

    python -m lib.spare        the agent (lib/agent.py) has one ready for each rank that it may have to start

Its command and environment come as the first line of its input, one JSON object; what follows is the command's own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Becomes the command that it is given; ends where there is none."""
    from lib import runtime

    runtime.prepare()
    from lib import batches, checkpoint, evaluate, loading, report, rounds, schedule, scoring, step  # noqa: F401

    print("ready", flush=True)
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)  # not more: it would be missed
        if not letter:
            return
        line += letter
    work = json.loads(line)
    os.environ.update(work["environment"])
    sys.argv = work["command"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
