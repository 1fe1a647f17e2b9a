"""A rank on its host: started, and ended with all that it started when its launcher says so or is gone.

    python -m lib.launch.rank_process        ./launch starts this for every rank, directly or over ssh

The first line of the standard input is the order, in JSON; the key of the run comes in its environment, never on a
command line. Then a line comes each second; `end SIGNAL SECONDS` ends the rank. A launcher that is killed closes the
input, and one that is cut off is silent: either ends the rank. Only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.1
HELLO = "tandem-rank:"  # begins the first line of output, after what a login shell may print


def main() -> int:
    """Runs the rank; returns its exit status, as a shell gives it: 128 + the signal that ended it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the input's end says that ssh is gone
        signal.signal(number, lambda *_: None)
    order = json.loads(sys.stdin.readline())
    print(HELLO, platform.system(), flush=True)
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as folder:
        for name, text in order["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        return _run(order, folder)


def _run(order: dict[str, Any], folder: str) -> int:
    environment = {name: value.replace("{folder}", folder) for name, value in order["environment"].items()}
    # Without a command it holds the connection to a host where mpirun starts the ranks.
    command = [word.replace("{folder}", folder) for word in order["command"]] or ["sleep", str(10**8)]
    try:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if sys.platform == "darwin":  # a Mac that sleeps is a rank that is lost
        subprocess.Popen(["caffeinate", "-is", "-w", str(process.pid)])
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    last, end_at = time.monotonic(), float("inf")
    while process.poll() is None:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=LOOK_SECONDS)
            last = time.monotonic()
            if line.startswith("end"):
                _, number, seconds = line.split()
                _signal(process, int(number))
                end_at = min(end_at, last + float(seconds))
        now = time.monotonic()
        if now - last > order["silent_seconds"]:
            print(f"error: the launcher was silent for {now - last:.0f} s; this rank ends", file=sys.stderr, flush=True)
            end_at = now
        if now >= end_at:
            _signal(process, signal.SIGKILL)
    _signal(process, signal.SIGKILL)  # what it started and left behind
    status = process.returncode if order["command"] else 0
    return 128 - status if status < 0 else status


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    lines.put(f"end {int(signal.SIGTERM)} 2.0")


if __name__ == "__main__":
    sys.exit(main())
