"""Arrays that one rank sends to another while both compute.

By MLX's sources (0.32), what its backends have for that:

    ring    send and receive, to the ranks before and after in the circle; both directions at once
    mpi     send and receive, to any rank; both directions at once
    jaccl   send and receive; over a mesh to any rank, over a ring to the ranks before and after. Either one waits at
            the neighbour's only completion queue, and takes whatever is complete for its own: never both at once
    nccl    neither; but groups of two ranks, which gather each other's arrays on the GPU

So messages between two ranks have one order, in which both ends send or receive them where one direction works at a
time: see `exchange`, and what lib/training/pipelined_step.py receives before it sends.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from lib.distributed.world import World, host_names, neighbour_pairs

READ = """
unsigned long long now;
asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
nanoseconds[0] = now;
"""


@dataclass
class Links:
    """What ranks send to each other, in order; each direction has a stream of its own, so that none waits for another.
    The receiver has their shapes and types. `finish` comes before any collective: it would use the same
    connection."""

    ranks: World
    # Most arrays on their way to one rank; a rank that is ahead waits until the first of them is there. In a step no
    # fewer than the first rank has micro-batches in flight, or ranks would wait for each other.
    under_way: int = 2
    hosts: Sequence[str] = ()  # of every rank, to name who is waited for
    waited_seconds: float = 0.0  # in all, for others to send or to receive
    streams: dict[tuple[str, int], mx.ThreadLocalStream] = field(default_factory=dict)
    sent: dict[int, deque[mx.array]] = field(default_factory=dict)  # by receiver: what may not have arrived

    @property
    def receives_ahead(self) -> bool:
        """Whether a rank begins to receive, before it sends, all that the other end sends before it receives. Where one
        direction works at a time it has to. MLX's threads keep a core busy while they wait: not on a CPU."""
        return self._has_order or mx.default_device() == mx.gpu

    @property
    def _has_order(self) -> bool:
        return self.ranks.backend == "jaccl"

    def evaluate(self, *arrays: object) -> None:
        """Computes what is to be sent, or is needed for it."""
        mx.eval(*arrays)

    def send(self, array: mx.array, rank: int, what: str) -> None:
        """Begins to send an evaluated array, and goes on."""
        sent = self.sent.setdefault(rank, deque())
        while len(sent) >= self.under_way:
            self._wait(sent.popleft(), f"{what}, which {self._name(rank)} does not take")
        sent.append(self.ranks.send(array, rank, self._stream("to", rank)))
        mx.async_eval(sent[-1])

    def expect(self, shape: Sequence[int], dtype: mx.Dtype, rank: int) -> mx.array:
        """What a rank will send next, in this order; `begin` or `wait` receives it."""
        return self.ranks.receive(shape, dtype, rank, self._stream("from", rank))

    def begin(self, *arrays: mx.array) -> None:
        """Begins to receive what is expected, and goes on."""
        for array in arrays:  # evaluated together they would be received in any order
            mx.async_eval(array)

    def wait(self, *arrays: mx.array, rank: int, what: str) -> None:
        """Returns when what is expected of a rank, in this order, can be computed with. `what` names the wait."""
        for array in arrays:
            self._wait(array, f"{what} from {self._name(rank)}")

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int, what: str) -> mx.array:
        """What a rank sends."""
        array = self.expect(shape, dtype, rank)
        self.wait(array, rank=rank, what=what)
        return array

    def exchange(self, array: mx.array, rank: int, what: str) -> mx.array:
        """Another rank's array for this rank's, of the same shape and type; the lower rank's goes first."""
        if self.ranks.rank < rank:
            self.send(array, rank, what)
        theirs = self.receive(array.shape, array.dtype, rank, what)
        if self.ranks.rank > rank:
            self.send(array, rank, what)
        return theirs

    def finish(self, what: str) -> None:
        """Waits until everything that this rank sent has arrived."""
        for rank, sent in self.sent.items():
            while sent:
                self._wait(sent.popleft(), f"{what}: {self._name(rank)} does not take what it was sent")

    def deadline(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around computations that may wait for messages, where the host does not wait for those by itself."""
        return contextlib.nullcontext()

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def _wait(self, array: mx.array, what: str) -> None:
        began = time.perf_counter()
        with self.ranks.deadline(what):
            mx.eval(array)
        self.waited_seconds += time.perf_counter() - began

    def _stream(self, way: str, rank: int) -> mx.ThreadLocalStream:
        place = ("both", rank) if self._has_order else (way, rank)
        if place not in self.streams:
            self.streams[place] = mx.new_thread_local_stream(mx.cpu)
        return self.streams[place]


@dataclass
class PairLinks(Links):
    """Links of ranks on GPUs, where two ranks gather each other's arrays; the receiver gives zeros. Messages are
    operations of the same stream as the computation, in the order of the program: the host runs ahead of all of them. A
    message begins when both ranks have come to it; what a rank waits is measured by the GPU's clock."""

    pairs: Mapping[int, World] = field(default_factory=dict)  # by the other rank
    expected: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)  # by identity: array, and gathered
    times: list[tuple[mx.array, mx.array]] = field(default_factory=list)  # nanoseconds before and after messages

    @property
    def _has_order(self) -> bool:
        return True

    def evaluate(self, *arrays: object) -> None:
        mx.async_eval(*arrays)

    def send(self, array: mx.array, rank: int, what: str) -> None:
        mx.async_eval(array)  # in another graph than the message: the message comes after everything before it
        self.ranks.traffic.bytes_sent += array.nbytes
        self._pass(self.pairs[rank].gather_lazily(array))

    def expect(self, shape: Sequence[int], dtype: mx.Dtype, rank: int) -> mx.array:
        pair = self.pairs[rank]
        gathered = pair.gather_lazily(mx.zeros(shape, dtype))
        array = mx.split(gathered, 2)[1 - pair.rank]
        self.expected[id(array)] = array, gathered
        return array

    def begin(self, *arrays: mx.array) -> None:
        for array in arrays:
            if (expected := self.expected.pop(id(array), None)) is not None:
                self._pass(expected[1])

    def wait(self, *arrays: mx.array, rank: int, what: str) -> None:
        self.begin(*arrays)

    def finish(self, what: str) -> None:
        with self.ranks.deadline(what):
            mx.eval(self.times)
        self.waited_seconds += sum(after.item() - before.item() for before, after in self.times) / 1e9
        self.times.clear()

    def deadline(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.ranks.deadline(what)

    def _pass(self, gathered: mx.array) -> None:
        before = device_nanoseconds()
        mx.async_eval(gathered)
        self.times.append((before, device_nanoseconds()))


def links_of(world: World) -> Links:
    """Links between the ranks of a world, as its backend has them. All ranks call it."""
    hosts = host_names(world)
    if world.backend == "nccl":
        return PairLinks(world, hosts=hosts, pairs=neighbour_pairs(world))
    return Links(world, hosts=hosts)


def device_nanoseconds() -> mx.array:
    """Nanoseconds, uint64 [1], once everything is done that was begun on the default stream before: being computed.
    Only CUDA lets a program read such a clock; elsewhere the host waits, and reads its own."""
    if not mx.cuda.is_available():
        mx.synchronize()
        return mx.array([time.perf_counter_ns()], mx.uint64)
    read, nothing = _kernel()
    (nanoseconds,) = read(
        inputs=[nothing], output_shapes=[(1,)], output_dtypes=[mx.uint64], grid=(1, 1, 1), threadgroup=(1, 1, 1)
    )
    mx.async_eval(nanoseconds)  # a graph by itself: within one, kernels that share no array may run in any order
    return nanoseconds


@functools.cache
def _kernel() -> tuple[Callable[..., list[mx.array]], mx.array]:
    nothing = mx.zeros(1)
    mx.eval(nothing)
    return mx.fast.cuda_kernel("device_clock", ["nothing"], ["nanoseconds"], READ), nothing
