"""Texts that every rank of a ring gets from every other, over connections of our own: nobody between can forge one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        for hop in range(self.size - 1):
            held, missing = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
            texts[missing] = self._pass_on(texts[held])
        return texts

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum of every rank's values, float32 or int32 [n]; the same bits on all ranks.

        Each part goes round once and is added up, then once more as it is: no rank sends more than twice its values.

        Raises:
            as `gather`.
        """
        parts = np.array_split(values.copy(), self.size)
        with np.errstate(all="ignore"):  # a step may have numbers that are not finite
            for hop in range(self.size - 1):
                held, missing = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
                parts[missing] += np.frombuffer(self._pass_on(parts[held].tobytes()), values.dtype)
        for hop in range(self.size - 1):
            held, missing = (self.rank + 1 - hop) % self.size, (self.rank - hop) % self.size
            parts[missing] = np.frombuffer(self._pass_on(parts[held].tobytes()), values.dtype)
        return np.concatenate(parts)

    def _pass_on(self, text: bytes) -> bytes:
        """Sends the next rank a text, and returns the one of the rank before."""
        try:
            if self.rank == 0:
                received = self.before.receive()
                self.after.send(text)
            else:
                self.after.send(text)
                received = self.before.receive()
        except NotTrusted as error:
            raise Stopped(
                f"rank {self.rank} on {host_name()}: what came from rank {(self.rank - 1) % self.size} cannot be "
                f"trusted: {error}; somebody sits between them: join the hosts by ssh or WireGuard (docs/security.md)"
            ) from None
        except OSError as error:
            raise RuntimeError(f"[ring] connection to a peer was lost ({error})") from None
        return received

    def close(self) -> None:
        self.before.close()
        self.after.close()
