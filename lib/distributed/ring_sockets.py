"""MLX's ring over connections that are there already: those that ring_start made with the neighbours.

MLX opens a ring by itself, from a file of addresses: it listens, takes whoever connects first, and connects to the next
rank. Here that file names ports of this very process on the loopback, so that MLX connects to nobody else. Once it
has, each of its sockets is replaced by the connection to the neighbour, under the same file descriptor (dup2): before
the first collective MLX has sent nothing. Whoever else connected to one of those ports meanwhile has a connection that
leads nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
ADDRESSES, RANK = "MLX_HOSTFILE", "MLX_RANK"  # what MLX reads
ATTEMPTS = 3  # a port that is free may be somebody's a moment later
# In a process of its own: MLX holds Python's lock while it waits for this. It ends with its input.
CONNECT = """
import select, socket, sys
made, wanted = [], [int(word) for word in sys.stdin.readline().split()]
while not select.select([sys.stdin], [], [], 0.005 if wanted else None)[0]:
    for port in list(wanted):
        try:
            made.append(socket.create_connection(("127.0.0.1", port), 1))
            wanted.remove(port)
        except OSError:
            pass
"""


_ready: list[subprocess.Popen[bytes]] = []  # helpers that are there before they are needed


def prepare() -> None:
    """Has the next ring opened sooner, by a tenth of a second on a busy machine."""
    if not _ready:
        _ready.append(_helper())


def _helper() -> subprocess.Popen[bytes]:
    """A process that connects to the ports that it is given, and holds these connections until its input ends."""
    words = [sys.executable, "-I", "-S", "-c", CONNECT]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


def opened(
    rank: int, size: int, before: Sequence[socket.socket], after: Sequence[socket.socket], init: Callable[[], Any]
) -> Any:
    """MLX's ring over these connections.

    Args:
        before, after: to the rank before and the rank after this one; as many.
        init: opens a ring from MLX_HOSTFILE and MLX_RANK.

    Raises:
        RuntimeError: MLX could not open it, or has no sockets where this version of it had them.
    """
    for attempt in range(ATTEMPTS):
        left = _free_ports(len(before))
        with contextlib.ExitStack() as stack:
            accepting = [stack.enter_context(socket.create_server((HOST, 0))) for _ in after]
            right = [one.getsockname()[1] for one in accepting]
            nodes = [[f"{HOST}:{port}" for port in left] for _ in range(size)]
            nodes[(rank + 1) % size] = [f"{HOST}:{port}" for port in right]
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tandem-ring-"))
            file.write(json.dumps(nodes))
            file.flush()
            helper = stack.enter_context(_ready.pop() if _ready else _helper())
            assert helper.stdin is not None
            helper.stdin.write(" ".join(map(str, left)).encode() + b"\n")
            helper.stdin.flush()
            try:
                with _environment({ADDRESSES: file.name, RANK: str(rank)}):
                    ring = init()
            except RuntimeError:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            _replace([*zip(left, before, strict=True)], 0)
            _replace([*zip(right, after, strict=True)], 1)
            return ring
    raise AssertionError


def _replace(connections: Sequence[tuple[int, socket.socket]], end: int) -> None:
    """Puts connections in the place of MLX's, which have these ports at an end: 0 is this process's, 1 the other."""
    mine = _connected()
    for port, connection in connections:
        descriptors = [number for number, ends in mine.items() if ends[end] == (HOST, port)]
        if len(descriptors) != 1:
            raise RuntimeError(
                f"MLX has {len(descriptors)} sockets at port {port}, not the one that its ring was given; start again, "
                "and if that does not help, install the versions of constraints.txt (make setup)"
            )
        connection.setblocking(False)  # MLX asks again and again, and so it set its own
        os.dup2(connection.fileno(), descriptors[0], inheritable=False)
        connection.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server((HOST, 0))).getsockname()[1] for _ in range(count)]


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _connected() -> dict[int, tuple[object, object]]:
    """Both ends of every TCP connection of this process, its own first, by file descriptor.

    Of one that the other end has reset that end is None: a stranger may do that to the socket which MLX took from him.
    """
    found: dict[int, tuple[object, object]] = {}
    for path in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or the other end has
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    if copy.family != socket.AF_INET or copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue
                    found[int(path.name)] = (copy.getsockname(), None)
                    found[int(path.name)] = (copy.getsockname(), copy.getpeername())
    return found
