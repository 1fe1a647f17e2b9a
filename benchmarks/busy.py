"""A machine that others use: processes that never rest, at the usual priority."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many of them; they do not outlive this process, whatever ends it."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
