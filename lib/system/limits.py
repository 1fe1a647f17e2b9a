"""Limits on what a call of a library, or this process, may take: files of somebody else decide what it has to do."""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lib.errors import UserError

Made = TypeVar("Made")


def within(seconds: float, what: str, do: Callable[[], Made]) -> Made:
    """What a call gives that lets other threads work meanwhile. One that takes too long is left behind.

    It cannot be ended: it goes on until this process ends, which does not wait for it.

    Raises:
        UserError: it took longer; what: for its message.
    """
    made: list[Made] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            made.append(do())
        except BaseException as error:  # the caller's to handle
            raised.append(error)

    thread = threading.Thread(target=call, name="time limit", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise UserError(f"{what} takes more than {seconds:g} s")
    if raised:
        raise raised[0]
    return made[0]


def limit_memory(size: int) -> None:
    """Lets this process take so many bytes more from now on, and raises MemoryError beyond; on Linux alone."""
    if sys.platform != "linux":
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + size
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
