"""A link of a rate and a delay that tc may lack here (netem), as a relay of frames between a port and the switch.

    python tests/relay.py PORT TAP BITS_PER_SECOND DELAY_SECONDS      in the switch's network; lasts as long as its input

Frames that arrive at PORT leave at TAP, and the other way, each after the delay and no faster than the rate. Who sends
faster than that finds half a second of frames queued, and further ones dropped, as in a cheap router. Frames travel with
their virtio header, because neither end has cut them to the size of a packet, or has computed their checksums, yet.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

FRAME_BYTES = 2**16 + 64
QUEUE_SECONDS = 0.5
SOL_PACKET, PACKET_VNET_HDR, PACKET_OUTGOING, ETH_P_ALL = 263, 15, 4, 3
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFORMATION, VNET_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4 = 1, 2


class Direction:
    """Frames under way in one direction."""

    def __init__(self, send: Callable[[bytes], object], bits_per_second: float, delay_seconds: float):
        self.send, self.rate, self.delay_seconds = send, bits_per_second, delay_seconds
        self.frames: deque[tuple[float, bytes]] = deque()  # when each arrives
        self.free_at = 0.0  # when the link has sent all that it took

    def take(self, frame: bytes) -> None:
        now = time.monotonic()
        if self.free_at - now > QUEUE_SECONDS:
            return
        self.free_at = max(now, self.free_at) + 8 * len(frame) / self.rate
        self.frames.append((self.free_at + self.delay_seconds, frame))

    def deliver(self) -> float | None:
        """Sends what has arrived; returns the seconds until the next frame does."""
        while self.frames:
            seconds = self.frames[0][0] - time.monotonic()
            if seconds > 0:
                return seconds
            try:
                self.send(self.frames.popleft()[1])
            except OSError:
                continue  # the port is down, or the frame is none that it takes: lost, as on a wire
        return None


def main(port: str, tap: str, bits_per_second: float, delay_seconds: float) -> None:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    wire.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    wire.bind((port, ETH_P_ALL))
    switch = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(switch, TUNSETIFF, struct.pack("16sH22x", tap.encode(), TAP | NO_PACKET_INFORMATION | VNET_HEADER))
    fcntl.ioctl(switch, TUNSETOFFLOAD, CHECKSUM | TSO4)
    outwards = Direction(lambda frame: os.write(switch, frame), bits_per_second, delay_seconds)
    inwards = Direction(wire.send, bits_per_second, delay_seconds)
    print("ready", flush=True)
    while True:
        left = [seconds for way in (outwards, inwards) if (seconds := way.deliver()) is not None]
        readable, _, _ = select.select([0, wire, switch], [], [], min(left, default=None))
        if 0 in readable and not os.read(0, 1):
            return
        if wire in readable:
            try:
                frame, origin = wire.recvfrom(FRAME_BYTES)
            except OSError:  # the port is down
                time.sleep(0.01)
                continue
            if origin[2] != PACKET_OUTGOING:
                outwards.take(frame)
        if switch in readable:
            inwards.take(os.read(switch, FRAME_BYTES))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
