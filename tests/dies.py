"""A program of ours that ends by SIGKILL at a chosen moment of its life.

    python -m tests.dies '{"root": "/tmp/x", "trace": "/tmp/x/trace"}' train.py run.name=a ...

Moments are what it does to files: opens one to write, renames, removes, flushes, locks, and sockets and processes that it
begins. Each is written to the trace as a word, e.g. `os.rename .unfinished-# step-#`; digits are `#`, so that a word
is the same in every life. It dies when a word comes for the n-th time, just before the system call, or so many seconds later,
wherever it is then.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OF_PATHS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2}  # how many
OF_OTHERS = ("fcntl.flock", "socket.bind", "socket.listen", "subprocess.Popen", "os.fork", "os.kill")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Death:
    """When a process dies, and who.

    Args:
        root: only files in here count.
        trace: file that the words go to.
        word: the word at which it dies; never, by default.
        count: when it comes for this time.
        delay: seconds after that.
        whom: this process; its parent, which is the launcher of several ranks; or both.
        constants: numbers of modules by their names, e.g. lib.data.hub.SHARD_BYTES, in the place of theirs.
    """

    root: str
    trace: str
    word: str | None = None
    count: int = 1
    delay: float = 0.0
    whom: str = "self"
    constants: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of_json(cls, text: str) -> Death:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def strike(self) -> None:
        if self.whom != "self":
            os.kill(os.getppid(), signal.SIGKILL)
        if self.whom != "parent":
            os.kill(os.getpid(), signal.SIGKILL)


def word_of(event: str, arguments: tuple[Any, ...], root: str) -> str | None:
    """The word of one of Python's audit events; None where it changes nothing that outlives the process."""
    if event in OF_OTHERS:
        return event
    if event == "open":
        path, _, flags = arguments
        paths = [path] if isinstance(flags, int) and flags & WRITES else []
    else:
        paths = list(arguments[: OF_PATHS.get(event, 0)])
    names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
    is_below = any(isinstance(fd, int) and fd >= 0 for fd in arguments[len(paths) :]) and event in OF_PATHS  # rmtree's
    if not names or not (is_below or any(name.startswith(root) for name in names)):
        return None
    return " ".join([event, *(re.sub(r"\b[0-9a-f]{12,}\b|\d+", "#", Path(name).name) for name in names)])


def watch(death: Death) -> Callable[[str], None]:
    """Begins to look at what this process does."""
    seen: Counter[str] = Counter()
    trace = os.open(death.trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def comes(word: str) -> None:
        seen[word] += 1
        os.write(trace, f"{word}\n".encode())
        if word == death.word and seen[word] == death.count:
            if death.delay:
                timer = threading.Timer(death.delay, death.strike)
                timer.daemon = True  # who ends before that lives
                timer.start()
            else:
                death.strike()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OF_OTHERS or event in OF_PATHS or event == "open":
            word = word_of(event, arguments, death.root)
            if word is not None:
                comes(word)

    sys.addaudithook(hook)
    flush = os.fsync

    def flushed(descriptor: int) -> None:
        comes("fsync")
        flush(descriptor)

    os.fsync = flushed
    return comes


def run(death: Death, words: list[str]) -> None:
    """Runs a command in this process, until its end or its death."""
    sys.argv = words
    comes = watch(death)
    comes("begin")
    for name, value in death.constants.items():
        module, _, constant = name.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    if words[0].endswith(".py"):
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(Death.of_json(sys.argv[1]), sys.argv[2:])
