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
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LOOK_SECONDS = 0.1
END_SECONDS = 2.0
HELLO = "tandem-rank"  # in the first line of output, after what a login shell may print


def main() -> int:
    """Runs the rank; returns its exit status, as a shell gives it: 128 + the signal that ended it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the input's end says that ssh is gone
        signal.signal(number, lambda *_: None)
    order = json.loads(sys.stdin.readline())
    print(json.dumps({HELLO: os.getpid(), "system": platform.system()}), flush=True)
    folder = tempfile.mkdtemp(prefix="tandem-")
    try:
        for name, text in order["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        return _run(order, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(order: dict, folder: str) -> int:  # type: ignore[type-arg]
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    environment = {name: value.replace("{folder}", folder) for name, value in order["environment"].items()}
    command = [word.replace("{folder}", folder) for word in order["command"]]
    process = _start(command, {**os.environ, **environment}, order["nice"]) if command else None
    if isinstance(process, int):
        return process
    last, end_at, status = time.monotonic(), float("inf"), None
    while status is None:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=LOOK_SECONDS)
            last = time.monotonic()
            word, _, rest = line.partition(" ")
            if word == "end" or not line:
                number, seconds = (rest.split() or [str(int(signal.SIGTERM)), str(END_SECONDS)])[:2]
                _signal(process, int(number))
                end_at = min(end_at, last + float(seconds))
                if process is None:
                    return 0
        now = time.monotonic()
        if now - last > order["silent_seconds"]:
            print(f"error: the launcher was silent for {now - last:.0f} s; this rank ends", file=sys.stderr, flush=True)
            end_at = now
        if now >= end_at:
            _signal(process, signal.SIGKILL)
        status = process.poll() if process is not None else (0 if now >= end_at else None)
    _signal(process, signal.SIGKILL)  # what it started and left behind
    return 128 - status if status < 0 else status


def _start(command: list[str], environment: dict[str, str], nice: int | None) -> subprocess.Popen[bytes] | int:
    """The process, in a session of its own; or the exit status where there is no such program."""
    try:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if nice is not None:
        try:
            os.setpriority(os.PRIO_PGRP, process.pid, nice)
        except PermissionError:
            words = ["sudo", "-n", "renice", "-n", str(nice), "-g", str(process.pid)]
            if shutil.which("sudo") is None or subprocess.run(words, capture_output=True).returncode:
                text = "needs root, or sudo without a password; the rank has the usual priority"
                print(f"warning: --nice {nice} {text}", file=sys.stderr)
    if sys.platform == "darwin":  # a Mac that sleeps is a rank that is lost
        subprocess.Popen(["caffeinate", "-is", "-w", str(process.pid)])
    return process


def _signal(process: subprocess.Popen[bytes] | None, number: int) -> None:
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line.strip() or "-")
    lines.put("")


if __name__ == "__main__":
    sys.exit(main())
