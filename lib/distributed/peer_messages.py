"""Texts that every rank of a ring gets from every other, over connections of our own: nobody between can forge one."""

from __future__ import annotations

from dataclasses import dataclass

from lib.errors import Stopped
from lib.system.handshake import Channel, NotTrusted
from lib.system.network import host_name


@dataclass
class PeerMessages:
    """A rank's channels to its two neighbours in the ring. All ranks call the same methods in the same order."""

    rank: int
    size: int
    before: Channel
    after: Channel

    def gather(self, text: bytes) -> list[bytes]:
        """Every rank's text, in rank order. Each hands on what came last, so that all have been round once.

        Rank 0 receives before it sends: if all sent first, texts beyond what the system buffers would wait for ever.

        Raises:
            Stopped: what came is not what a rank sent.
            RuntimeError: a neighbour is gone; it says so as MLX's ring does.
        """
        texts = [b""] * self.size
        texts[self.rank] = text
        try:
            for hop in range(self.size - 1):
                held, missing = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
                if self.rank == 0:
                    texts[missing] = self.before.receive()
                self.after.send(texts[held])
                if self.rank != 0:
                    texts[missing] = self.before.receive()
        except NotTrusted as error:
            raise Stopped(
                f"rank {self.rank} on {host_name()}: what came from rank {(self.rank - 1) % self.size} cannot be "
                f"trusted: {error}; somebody sits between them: join the hosts by ssh or WireGuard (docs/security.md)"
            ) from None
        except OSError as error:
            raise RuntimeError(f"[ring] connection to a peer was lost ({error})") from None
        return texts

    def close(self) -> None:
        self.before.close()
        self.after.close()
