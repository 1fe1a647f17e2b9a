"""The ranks of a ring find their neighbours, prove to each other that they are of one run, and connect.

MLX's ring takes whoever connects first. So it is given nobody's address: each rank connects to its neighbours by itself
(lib/system/handshake.py), at the ring's own addresses and ports, which a firewall lets through, and MLX's ring gets
these connections (lib/distributed/ring_sockets.py). Strangers are passed over, whenever they come and whatever they
say. Nothing listens any more once all are there.

A rank is called by the one before it only: MLX's configurator gives a host of a Thunderbolt ring the address that faces
its previous neighbour, which no other host reaches. Whoever is early calls again until the other one is there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lib.distributed.peer_messages import PeerMessages
from lib.errors import UserError
from lib.system.handshake import Channel, Listener, NotTrusted, connect

Address = tuple[str, int]


AGAIN_SECONDS = 0.02  # between two calls
CONNECT_SECONDS = 5.0
IN_USE_SECONDS = 2.0  # for a port that another process listens at to become free
FOREIGN_SECONDS = 3.0  # of nobody but strangers at a neighbour's address, then a line says so
RELAYED = "TANDEM_RELAYED"  # set by who has NAT or a tunnel between hosts: then ends of a connection look unlike
NO_SECRET = b""  # of ranks that nobody gave one: the steps then only tell them from other programs
SAME_SECRET = "calls again; without ./launch, TANDEM_KEY_FILE has to name the same line on every host"


@dataclass
class Neighbours:
    """What a rank has once all are there: connections for MLX, in its order, and channels for messages."""

    before: list[socket.socket]
    after: list[socket.socket]
    messages: PeerMessages

    def connections(self, nodes: Sequence[Sequence[Address]]) -> dict[int, tuple[list[socket.socket], Address]]:
        """All of them by the rank at the other end, which is one in a ring of two, and where that has listened."""
        rank, size = self.messages.rank, self.messages.size
        found: dict[int, tuple[list[socket.socket], Address]] = {}
        for other, channel, others in (
            ((rank - 1) % size, self.messages.before, self.before),
            ((rank + 1) % size, self.messages.after, self.after),
        ):
            # By the address at this very connection: in a ring of cables the rank before is reached at no other.
            address = channel.connection.getpeername()[0], nodes[other][0][1]
            found.setdefault(other, ([], address))[0].extend([channel.connection, *others])
        return found


def meet(rank: int, nodes: Sequence[Sequence[Address]], secret: bytes) -> Neighbours:
    """Returns when every rank of the ring has called this function; its caller bounds the wait.

    Args:
        nodes: every rank's addresses; each is for one connection from the rank before.
        secret: of the run, or NO_SECRET.

    Raises:
        UserError: this rank cannot listen at its address, or somebody relays what comes from a neighbour.
    """
    size = len(nodes)
    following = (rank + 1) % size
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, "ring"))
        heard, said = f"rank {(rank - 1) % size} calls rank {rank}", f"rank {rank} calls rank {following}"
        listeners = [stack.enter_context(Listener(_listening(address), secret, heard)) for address in nodes[rank]]
        # The first connection is for messages, the others are MLX's.
        accepting = pool.submit(_accept, [listeners[0], *listeners])
        targets = [nodes[following][0], *nodes[following]]
        after = [_call(address, secret, said, index, accepting) for index, address in enumerate(targets)]
        before = accepting.result()
    messages = PeerMessages(rank, size, before[0], after[0])
    messages.gather(b"")
    return Neighbours([one.connection for one in before[1:]], [one.connection for one in after[1:]], messages)


def _listening(address: Address) -> socket.socket:
    """Listens there; where another process still does, once it ends: it may be of the start before this one."""
    deadline = time.monotonic() + IN_USE_SECONDS
    while True:
        try:
            return socket.create_server(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UserError(
                    f"this rank cannot listen at {address[0]}:{address[1]}: {error.strerror}; in the host file give an "
                    "address that this host has, or another port by --starting-port"
                ) from None
        time.sleep(AGAIN_SECONDS)


def _accept(listeners: Sequence[Listener]) -> list[Channel]:
    """The connections of the rank before this one, in their order; where a call breaks off, it comes again.

    Raises:
        UserError: somebody relays them.
    """
    channels: list[Channel] = []
    while len(channels) < len(listeners):
        channel = listeners[len(channels)].accept()
        with contextlib.suppress(OSError, json.JSONDecodeError, LookupError, TypeError):
            channel.connection.settimeout(CONNECT_SECONDS)
            call = json.loads(channel.receive())
            if call["index"] == len(channels):
                ends = _ends(channel.connection)[::-1]
                channel.send(json.dumps(ends).encode())
                _refuse_relay(call["ends"], ends)
                channel.receive()  # it has seen the same
                channel.connection.settimeout(None)
                channels.append(channel)
                continue
        channel.close()
    return channels


def _call(address: Address, secret: bytes, purpose: str, index: int, accepting: Future[list[Channel]]) -> Channel:
    """One connection to the rank after this one, which is called until it answers."""
    began, is_told = time.monotonic(), False
    while True:
        if accepting.done() and (error := accepting.exception()) is not None:
            raise error
        with contextlib.suppress(OSError, json.JSONDecodeError):
            try:
                channel = connect(address, secret, purpose, CONNECT_SECONDS)
            except NotTrusted as distrusted:
                if not is_told and time.monotonic() - began > FOREIGN_SECONDS:
                    is_told = True
                    print(
                        f"warning: {address[0]}:{address[1]}: {distrusted}; {SAME_SECRET}", file=sys.stderr, flush=True
                    )
                raise
            channel.connection.settimeout(CONNECT_SECONDS)
            ends = _ends(channel.connection)
            channel.send(json.dumps({"index": index, "ends": ends}).encode())
            _refuse_relay(ends, json.loads(channel.receive()))
            channel.send(b"")
            channel.connection.settimeout(None)
            return channel
        time.sleep(AGAIN_SECONDS)


def _ends(connection: socket.socket) -> list[list[object]]:
    """Address and port of this end of a connection, and of the other."""
    return [list(connection.getsockname()[:2]), list(connection.getpeername()[:2])]


def _refuse_relay(called: list[list[object]], answered: list[list[object]]) -> None:
    """Makes sure that nobody takes a connection's bytes in and sends them on: he could read and change them.

    called, answered: the caller's end and the listener's, as the caller sees them, and as the listener does.
    """
    if called != answered and not os.environ.get(RELAYED):
        before, after = (" to ".join(f"{host}:{port}" for host, port in ends) for ends in (called, answered))
        raise UserError(
            f"somebody relays what ranks send each other: a connection that goes from {before} arrives as one from "
            f"{after}; if that is your own NAT or tunnel, give --env {RELAYED}=1"
        )
