"""Arrays that one rank sends to another while both compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from lib.distributed.collectives import Collectives


@dataclass
class Links:
    """What ranks send to each other, in order; each direction has a stream of its own, so that none waits for another.

    Shapes and types are known to the receiver. `finish` comes before any collective: it would use the same connection.

    Args:
        under_way: most arrays on their way to one rank; a rank that is ahead waits until the first of them is there.
            In a step no fewer than the first rank has micro-batches in flight, or ranks would wait for each other.
    """

    ranks: Collectives
    under_way: int = 2
    streams: dict[tuple[str, int], mx.ThreadLocalStream] = field(default_factory=dict)
    sent: dict[int, deque[mx.array]] = field(default_factory=dict)  # by receiver: what may not have arrived

    def send(self, array: mx.array, rank: int, what: str) -> None:
        """Begins to send an evaluated array, and goes on."""
        sent = self.sent.setdefault(rank, deque())
        while len(sent) >= self.under_way:
            self.wait(sent.popleft(), what=what)
        sent.append(self.ranks.send(array, rank, self._stream("to", rank)))
        mx.async_eval(sent[-1])

    def expect(self, shape: Sequence[int], dtype: mx.Dtype, rank: int) -> mx.array:
        """What a rank will send next, to be had by `wait`, in this order."""
        return self.ranks.receive(shape, dtype, rank, self._stream("from", rank))

    def wait(self, *arrays: mx.array, what: str) -> None:
        """Returns when the arrays are there. `what` names the wait if it never ends."""
        with self.ranks.deadline(what):
            for array in arrays:  # evaluated together they would be received in any order
                mx.eval(array)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int, what: str) -> mx.array:
        """What a rank sends."""
        array = self.expect(shape, dtype, rank)
        self.wait(array, what=what)
        return array

    def finish(self, what: str) -> None:
        """Waits until everything that this rank sent has arrived."""
        for sent in self.sent.values():
            while sent:
                self.wait(sent.popleft(), what=what)

    def _stream(self, way: str, rank: int) -> mx.ThreadLocalStream:
        if (way, rank) not in self.streams:
            self.streams[way, rank] = mx.new_thread_local_stream(mx.cpu)
        return self.streams[way, rank]
