"""How the network between ranks does, as the kernel saw it: of every connection of this process its round trip and retries."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any

# Places in Linux's struct tcp_info (linux/tcp.h): tcpi_rtt in microseconds, tcpi_total_retrans.
ROUND_TRIP, RETRANSMITS, INFO_BYTES = 68, 100, 104


def connections() -> list[dict[str, Any]]:
    """Every TCP connection that this process has open: peer, round_trip_seconds (smoothed), retransmits (since it began).

    Linux tells; elsewhere, and over backends that bypass TCP, the list is empty.
    """
    found = []
    folder = Path("/proc/self/fd")
    for path in folder.iterdir() if folder.exists() and hasattr(socket, "TCP_INFO") else ():
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    continue
                peer = copy.getpeername()[0]
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
            trip, retransmits = (struct.unpack_from("=I", info, place)[0] for place in (ROUND_TRIP, RETRANSMITS))
            found.append({"peer": peer, "round_trip_seconds": trip / 1e6, "retransmits": retransmits})
    return sorted(found, key=lambda one: str(one["peer"]))
