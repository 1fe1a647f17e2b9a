"""How a gateway and a backend meet: at a Unix socket in a folder that one user alone can enter. No MLX here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import httpx2

SECRET_HEADER = "X-Backend-Secret"  # of every request
ID_HEADER = "X-Backend-Request"  # of a request that may be stopped
OWNER_HEADER = "X-Backend-Owner"  # the name of the key that asks: what was read for one is used for no other
ROOM_PATH = "/room"  # of a backend that has its model: {"tokens": that it has memory for, or null}
LISTENS = "tandem-backend listens at "  # a line of a backend's output, and the path of its socket
LONGEST_FOLDER = 70  # a socket's path has at most 103 letters on a Mac, and ssh adds 17 while it makes its own


def socket_folder() -> Path:
    """A new folder for sockets, that its user alone can enter. Nobody can know its name before it is there."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-"))
    if len(str(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))
    return folder


def remove(path: Path) -> None:
    """Removes a socket, and its folder where that is the last one in it.

    Raises:
        OSError: others are in it.
    """
    path.unlink(missing_ok=True)
    path.parent.rmdir()


def client_of(sockets: dict[str, Path]) -> httpx2.AsyncClient:
    """A client that finds each host of these names at a Unix socket, and all others where they are."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    mounts = {
        f"all://{host}": httpx2.AsyncHTTPTransport(uds=str(path), limits=limits) for host, path in sockets.items()
    }
    # Nothing from the environment: a proxy has no place between here and a backend.
    return httpx2.AsyncClient(limits=limits, trust_env=False, mounts=mounts)
