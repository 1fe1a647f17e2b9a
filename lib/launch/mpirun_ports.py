"""Strangers at the ports of an mpirun are hung up on: one that connects and says nothing would stop it for good.

Open MPI's PMIx server (5.0) reads what a new connection says in the thread that does everything else, without a limit
of time. Only processes that mpirun started have anything to say there, so every other connection to a port at which
mpirun listens is shut down, from outside, if it comes from this machine or from nobody known: Linux lets a process take
a copy of its child's socket (pidfd_getfd, from 5.6 on). On other systems nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

GETFD = 438  # the number of the system call, the same on all of Linux's processors but alpha
LISTENING, ESTABLISHED = "0A", "01"  # as /proc/net/tcp writes a connection's state
AT_ONCE = 20  # in a row, before the agent has something else to do
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Entry(NamedTuple):
    """A line of /proc/net/tcp: both ends as the kernel writes them, the state, and the socket's number."""

    local: str
    remote: str
    state: str
    inode: str


def hang_up_on_strangers(mpirun: int, trusted: set[str]) -> int:
    """Shuts down the connections of others to an mpirun that this process started; returns how many.

    trusted: numbers of sockets that were looked at before and belong to mpirun's own processes; grows.
    """
    if not sys.platform.startswith("linux"):
        return 0
    total = 0
    while (strangers := _hang_up(mpirun, trusted)) and total < AT_ONCE:
        total += strangers
        time.sleep(0.005)  # mpirun takes the next one then
    return total


def _hang_up(mpirun: int, trusted: set[str]) -> int:
    """Shuts down whom two looks in a row do not know.

    The kernel writes its table piece by piece, so the other end of a connection that comes up meanwhile can be missing
    from it: a process of mpirun's own would be taken for a stranger. A table begun after that has both ends.
    """
    first = _strangers(mpirun, trusted)
    second = _strangers(mpirun, trusted) if first else {}
    return sum(_shut_down(mpirun, second[inode]) for inode in first.keys() & second)


def _strangers(mpirun: int, trusted: set[str]) -> dict[str, int]:
    """The connections to mpirun whose other end none of its own processes has: descriptors, by the sockets' numbers."""
    entries, sockets = _entries(), _sockets_of(mpirun)
    doors = {one.local for one in entries if one.state == LISTENING and one.inode in sockets}
    strangers: dict[str, int] = {}
    for one in entries:
        if one.state != ESTABLISHED or one.local not in doors or one.inode not in sockets or one.inode in trusted:
            continue
        other_end = next((far.inode for far in entries if (far.local, far.remote) == (one.remote, one.local)), "")
        if _is_family(other_end, mpirun):
            trusted.add(one.inode)
        else:
            strangers[one.inode] = sockets[one.inode]
    return strangers


def _entries() -> list[Entry]:
    found: list[Entry] = []
    for path in TABLES:
        with contextlib.suppress(OSError):
            rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines()[1:])
            found += [Entry(row[1], row[2], row[3], row[9]) for row in rows if len(row) > 9]
    return found


def _sockets_of(pid: int) -> dict[str, int]:
    """A process's file descriptors of sockets, by the sockets' numbers; none where it is gone or another user's."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = str(path.readlink()).partition(":[")
                if kind == "socket":
                    found[inode.rstrip("]")] = int(path.name)
    return found


def _is_family(inode: str, mpirun: int) -> bool:
    """Whether a socket belongs to mpirun or to a process that descends from it."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    family, before = {mpirun}, 0
    while len(family) > before:
        before = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return any(inode in _sockets_of(pid) for pid in family)


def parent_of(pid: int) -> int:
    """The process that started another; 0 where it is gone."""
    return _parent(Path(f"/proc/{pid}"))


def _parent(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0


def _shut_down(pid: int, descriptor: int) -> bool:
    """Shuts down a child's connection; whether it could."""
    with contextlib.suppress(OSError, AttributeError):
        process = os.pidfd_open(pid)
        try:
            copy = ctypes.CDLL(None, use_errno=True).syscall(GETFD, process, descriptor, 0)
        finally:
            os.close(process)
        if copy >= 0:
            with socket.socket(fileno=copy) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False
