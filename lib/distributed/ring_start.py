"""The ranks of a ring wait for each other before MLX connects them, in whatever order they were started.

MLX's last rank connects to the first, the first then to the second, and so on; a rank that is refused asks again after
1, 2, 4, 8 and 16 s, and then gives up. So a greeting goes round first: rank 0 calls rank 1, which then calls rank 2,
and the last one calls rank 0. Once rank 0 has been called, every rank is there and about to listen.

Each rank is called by the one before it only, at its first address: MLX's configurator gives a host of a Thunderbolt
ring the address that faces its previous neighbour, which no other host reaches. Callers and listeners use the ring's
own ports, which a firewall lets through. A connection counts when both ends have said their words: strangers are passed
over, and no call is left over that MLX could take for a neighbour's.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from lib.errors import UserError

Address = tuple[str, int]


CALL, REPLY = b"tandem: ready?\n", b"tandem: ready.\n"
AGAIN_SECONDS = 0.02  # between two calls; also from the last call until MLX's listener is there
CONNECT_SECONDS = 1.0
STRANGER_SECONDS = 1.0  # for one that connects to say its word
REPLY_SECONDS = 5.0  # several strangers may be heard out first


def wait_for_ring(rank: int, addresses: Sequence[Address]) -> None:
    """Returns when every rank of the ring has called this function; its caller bounds the wait.

    Raises:
        UserError: this rank cannot listen at its address.
    """
    following = addresses[(rank + 1) % len(addresses)]
    if rank == 0:
        _call(following)
        _be_called(addresses[0])
        return
    _be_called(addresses[rank])
    _call(following)
    if rank == len(addresses) - 1:
        time.sleep(AGAIN_SECONDS)


def _be_called(address: Address) -> None:
    """Listens until the rank before this one has called."""
    try:
        listener = socket.create_server(address, reuse_port=True)
    except OSError as error:
        raise UserError(
            f"this rank cannot listen at {address[0]}:{address[1]}: {error.strerror}; in the host file give an address "
            "that this host has, or another port by --starting-port"
        ) from None
    with listener:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(STRANGER_SECONDS)
                if _received(connection, CALL):
                    connection.sendall(REPLY)
                    if _received(connection, CALL):
                        return


def _call(address: Address) -> None:
    """Calls a rank until it answers."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=CONNECT_SECONDS) as connection:
            connection.settimeout(REPLY_SECONDS)
            connection.sendall(CALL)
            if _received(connection, REPLY):
                connection.sendall(CALL)
                return
        time.sleep(AGAIN_SECONDS)


def _received(connection: socket.socket, words: bytes) -> bool:
    """Whether these words, and nothing else, come in."""
    text = b""
    while len(text) < len(words) and (piece := connection.recv(len(words) - len(text))):
        text += piece
    return text == words
