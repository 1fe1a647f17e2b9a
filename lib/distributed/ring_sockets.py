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
from collections.abc import Iterator, Sequence
from pathlib import Path

HOST = "127.0.0.1"
ADDRESSES, RANK = "MLX_HOSTFILE", "MLX_RANK"  # what MLX reads
# In a process of its own: MLX holds Python's lock while it waits for this. It is ended with its input.
CONNECT = """
import select, socket, sys, time
made = []
for port in map(int, sys.argv[1:]):
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        try:
            made.append(socket.create_connection(("127.0.0.1", port), 1))
            break
        except OSError:
            pass
sys.stdin.read()
"""


@contextlib.contextmanager
def given_to_mlx(
    rank: int, size: int, before: Sequence[socket.socket], after: Sequence[socket.socket]
) -> Iterator[None]:
    """Has MLX's ring, opened by `mx.distributed.init` inside the block, send and receive over these connections.

    before, after: to the rank before and the rank after this one; as many.

    Raises:
        RuntimeError: MLX has no sockets where this version of it had them.
    """
    with contextlib.ExitStack() as stack:
        # Bound by us, so that nobody else gets the port; MLX binds it as well, and alone listens there.
        reserved = [stack.enter_context(_reserved()) for _ in before]
        accepting = [stack.enter_context(socket.create_server((HOST, 0))) for _ in after]
        left, right = ([one.getsockname()[1] for one in sockets] for sockets in (reserved, accepting))
        nodes = [[f"{HOST}:{port}" for port in left] for _ in range(size)]
        nodes[(rank + 1) % size] = [f"{HOST}:{port}" for port in right]
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="tandem-ring-"))
        file.write(json.dumps(nodes))
        file.flush()
        words = [sys.executable, "-I", "-S", "-c", CONNECT, *map(str, left)]
        stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))
        with _environment({ADDRESSES: file.name, RANK: str(rank)}):
            yield
        mine = _connected()
        for ports, end, connections in ((left, 0, before), (right, 1, after)):
            for port, connection in zip(ports, connections, strict=True):
                descriptors = [number for number, ends in mine.items() if ends[end] == (HOST, port)]
                if len(descriptors) != 1:
                    raise RuntimeError(
                        f"MLX has {len(descriptors)} sockets at port {port}, not the one that its ring was given; "
                        "install the versions of constraints.txt (make setup)"
                    )
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)  # MLX asks again and again, and so it set its own
                os.dup2(connection.fileno(), descriptors[0], inheritable=False)
                connection.close()


def _reserved() -> socket.socket:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind((HOST, 0))
    return reserved


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
    """Both ends of every TCP connection of this process, its own first, by file descriptor."""
    found: dict[int, tuple[object, object]] = {}
    for path in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    if copy.family == socket.AF_INET:
                        found[int(path.name)] = copy.getsockname(), copy.getpeername()
    return found
