"""Limits on what code of somebody else's making takes of this process: a chat template is a program."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from lib.errors import UserError


class _TooLong(BaseException):
    """Raised in a thread whose time is over; no `except Exception` on the way takes it."""


@contextlib.contextmanager
def limited_time(seconds: float, what: str) -> Iterator[None]:
    """Ends a block that takes longer: it has to be Python's own code, since a call into C is waited for.

    Raises:
        UserError: it took longer; what: for its message.
    """
    thread, over, turn = threading.get_ident(), threading.Event(), threading.Lock()

    def watch() -> None:
        if not over.wait(seconds):
            with turn:
                if not over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TooLong))

    watcher = threading.Thread(target=watch, name="time limit", daemon=True)
    watcher.start()
    try:
        yield
    except _TooLong:
        raise UserError(f"{what} takes more than {seconds:g} s") from None
    finally:
        with turn:
            over.set()


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Lets this process take so many bytes more, and raises MemoryError beyond; on Linux alone, elsewhere nothing.

    For moments in which no other thread works.
    """
    if sys.platform != "linux":
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + size
    for known in (before, most):
        limit = limit if known == resource.RLIM_INFINITY else min(limit, known)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
