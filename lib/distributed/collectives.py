"""Sums, gathers and broadcasts of arrays. Nothing else calls `mx.distributed`, but `world.start`, which opens it.

Collectives are matched by their order alone, so every rank calls the same ones with the same shapes. They run by
themselves, on evaluated arrays: a Mac's GPU may not wait for the network inside a kernel.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed import heartbeat
from lib.distributed.checked_sums import CheckedSums
from lib.system.network import host_name

BUCKET_BYTES = 256 * 2**20  # a collective's largest buffer: full-model gradients are not copied whole
# Arrays of at most so many bytes travel as messages where a ring has channels of our own: a sum over MLX's ring took
# three ranks on two cores 17 to 38 ms, of two numbers as of 50,000, a message 1 to 3.
SMALL_BYTES = 2**20
ALIGNED_BYTES = 8  # a GPU reads a number only at a multiple of its size


@dataclass
class Traffic:
    """What this rank has sent so far, as ring algorithms do it; others may send more or less."""

    bytes_sent: int = 0


def no_group() -> Any:
    """Of a world of one."""


@dataclass(frozen=True)
class Collectives:
    """What ranks do with arrays together; `group` is MLX's, `checks` None where the backend has none."""

    rank: int = 0
    size: int = 1
    group: Callable[[], Any] = field(default=no_group, compare=False)
    stream: Any = None
    timeout_seconds: float = 600.0
    backend: str = ""
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    checks: CheckedSums | None = field(default=None, compare=False)

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        """The sum over all ranks, evaluated. `what` names the wait if it never ends."""
        if self.size == 1:
            return array
        mx.eval(array)
        self.traffic.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        if self.checks is not None and array.nbytes <= SMALL_BYTES and array.dtype in (mx.float32, mx.int32):
            self.finish_messages(what)
            with self.deadline(what):
                return mx.array(self.checks.peers.sum(np.array(array).reshape(-1))).reshape(array.shape)
        with self.deadline(what):
            total = mx.distributed.all_sum(array, group=self.group(), stream=self.stream)
            mx.eval(total)
            if self.checks is not None:
                self.checks.note_sum(what, array, total)
        return total

    def gather_arrays(self, arrays: list[mx.array], what: str) -> list[list[mx.array]]:
        """Every rank's arrays, in rank order, bit for bit. They have the same shapes and types everywhere."""
        if self.size == 1:
            return [arrays]
        gathered: list[list[mx.array]] = [[] for _ in range(self.size)]
        for bucket in buckets([array.nbytes for array in arrays]):
            own = [arrays[i] for i in bucket]
            flat = packed(own)
            mx.eval(flat)
            for rank, theirs in enumerate(self._gathered_bits(flat, what)):
                gathered[rank] += unpacked(theirs, own)
        return gathered

    def _gathered_bits(self, flat: mx.array, what: str) -> Iterable[mx.array]:
        """Every rank's bits, uint8 [n], in rank order."""
        self.traffic.bytes_sent += flat.nbytes * (self.size - 1)
        if self.checks is not None and flat.nbytes <= SMALL_BYTES:
            return [mx.array(np.frombuffer(theirs, np.uint8)) for theirs in self.peer_bytes(_bytes_of(flat), what)]
        with self.deadline(what):
            together = mx.distributed.all_gather(flat, group=self.group(), stream=self.stream)
            mx.eval(together)
            if self.checks is not None:
                self.checks.note_gather(what, flat, together)
        return together.reshape(self.size, -1)

    def sum_arrays(self, arrays: list[mx.array], what: str, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        """Each array's sum over all ranks, in `dtype`: it is added up in this type, hop by hop."""
        if self.size == 1:
            return arrays
        summed = list(arrays)
        for bucket in buckets([array.size * dtype.size for array in arrays]):
            flat = self.all_sum(mx.concatenate([arrays[i].astype(dtype).reshape(-1) for i in bucket]), what)
            ends = np.cumsum([arrays[i].size for i in bucket]).tolist()
            for i, part in zip(bucket, mx.split(flat, ends[:-1]), strict=True):
                summed[i] = part.reshape(arrays[i].shape)
        return summed

    def broadcast(self, tree: Any) -> Any:
        """Rank 0's arrays, on every rank. Trees have the same names, shapes and dtypes everywhere."""
        if self.size == 1:
            return tree
        # By name: a tree that was read from a file may hold the same arrays in another order.
        leaves = sorted(tree_flatten(tree), key=lambda leaf: leaf[0])
        for bucket in buckets([array.nbytes for _, array in leaves]):
            own = [leaves[i][1] for i in bucket]
            for i, array in zip(bucket, unpacked(self._of_rank_0(packed(own)), own), strict=True):
                leaves[i] = (leaves[i][0], array)
        return tree_unflatten(leaves)

    def _of_rank_0(self, flat: mx.array) -> mx.array:
        """Rank 0's packed bytes, on every rank. They are as many everywhere."""
        if self.checks is not None and flat.nbytes <= SMALL_BYTES:
            theirs = self.peer_bytes(_bytes_of(flat) if self.rank == 0 else b"", "rank 0's arrays")[0]
            return mx.array(np.frombuffer(theirs, np.uint8))
        # Bits, because a sum would lose NaN and -0.0; as int32, because not every backend sums uint8. The sum of
        # one number and zeros is that number in any order.
        bits = mx.view(flat, mx.int32)
        return mx.view(self.all_sum(bits if self.rank == 0 else mx.zeros_like(bits), "rank 0's arrays"), mx.uint8)

    def peer_bytes(self, own: bytes, what: str) -> list[bytes]:
        """Every rank's bytes over a ring's channels of our own, where nobody between ranks can forge one."""
        assert self.checks is not None
        self.finish_messages(what)
        with self.deadline(what):
            return self.checks.peers.gather(own)

    def finish_messages(self, what: str) -> None:
        """Waits until what this rank sends to single ranks is on its way: they may need it to come here, too."""

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        """Sums a tree of float32 gradients and a float32 vector over all ranks.

        Both travel in the same buffers, so that one collective serves a LoRA step.
        """
        if self.size == 1:
            return gradients, sums
        leaves = sorted(tree_flatten(gradients), key=lambda leaf: leaf[0])
        sums, *summed = self.sum_arrays([sums, *(array for _, array in leaves)], "the sum of the gradients")
        return tree_unflatten([(name, array) for (name, _), array in zip(leaves, summed, strict=True)]), sums

    def send(self, array: mx.array, rank: int, stream: Any) -> mx.array:
        """An evaluated array, once another rank has it; nothing is sent before this is evaluated."""
        self.traffic.bytes_sent += array.nbytes
        return mx.distributed.send(array, rank, group=self.group(), stream=stream)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int, stream: Any) -> mx.array:
        """What another rank sends next, once this is evaluated."""
        return mx.distributed.recv(shape, dtype, rank, group=self.group(), stream=stream)

    def split(self, color: int) -> Collectives:
        """The ranks that give the same color, in their order. All ranks call it."""
        with self.deadline("all ranks to form groups"):
            group = self.group().split(color)
        return replace(self, rank=group.rank(), size=group.size(), group=lambda: group)

    def gather_lazily(self, array: mx.array) -> mx.array:
        """Every rank's array, one after the other along the first axis, once this is evaluated."""
        return mx.distributed.all_gather(array, group=self.group(), stream=self.stream)

    @contextlib.contextmanager
    def deadline(self, what: str, times: int = 1) -> Iterator[None]:
        """Ends the process with a message if the block outlasts the limit, `times` it. MLX would wait for ever."""

        def give_up() -> None:
            print(
                f"error: rank {self.rank} on {host_name()} waited {times * self.timeout_seconds:g} s for {what}; "
                "another rank is dead, stopped or cut off (raise sync.timeout_seconds if it is only slow); "
                "go on with --resume",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # the main thread is inside MLX, where no exception or signal handler can reach it

        timer = threading.Timer(times * self.timeout_seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            with heartbeat.waiting(what):
                yield
        finally:
            timer.cancel()
            timer.join()

    # ---- Inside a graph: nothing is evaluated, and the graphs of all ranks have the same collectives in the same order

    def sum_forward(self, x: mx.array) -> mx.array:
        """The sum of all ranks' x, whose gradient is everyone's own: Megatron-LM's g (arXiv:1909.08053, section 3)."""
        return x if self.size == 1 else self._sum_lazily(x)

    def sum_backward(self, x: mx.array) -> mx.array:
        """x itself, whose gradient is summed over the ranks: Megatron-LM's f."""
        if self.size == 1:
            return x

        @mx.custom_function
        def pass_on(x: mx.array) -> mx.array:
            return x

        @pass_on.vjp
        def pass_on_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
            return self._sum_lazily(cotangent)

        return pass_on(x)

    def agree_forward(self, x: mx.array) -> mx.array:
        """Rank 0's x, whose gradient is everyone's own: for what decides, and may differ by roundings."""
        if self.size == 1:
            return x

        @mx.custom_function
        def agreed(x: mx.array) -> mx.array:
            # Zeros wait for x as well, so that all ranks sum in one order.
            return self._sum_lazily(x if self.rank == 0 else mx.depends([mx.zeros_like(x)], [x])[0])

        @agreed.vjp
        def agreed_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
            return cotangent

        return agreed(x)

    def _sum_lazily(self, x: mx.array) -> mx.array:
        self.traffic.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size
        return mx.distributed.all_sum(x, group=self.group(), stream=self.stream)


def _bytes_of(array: mx.array) -> bytes:
    """An evaluated array's bits."""
    return np.array(array, copy=False).tobytes()


def packed(arrays: Sequence[mx.array]) -> mx.array:
    """The bits of arrays as uint8, one after the other; each begins at a multiple of ALIGNED_BYTES."""
    bits = [mx.view(array.reshape(-1), mx.uint8) for array in arrays]
    return mx.concatenate([piece for own in bits for piece in (own, mx.zeros(-own.size % ALIGNED_BYTES, mx.uint8))])


def unpacked(flat: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """What packed was given, by arrays of the same shapes and types."""
    begins = np.cumsum([0, *(-(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for array in like)]).tolist()
    return [
        mx.view(flat[begin : begin + array.nbytes], array.dtype).reshape(array.shape)
        for begin, array in zip(begins, like, strict=False)
    ]


def buckets(sizes: list[int], most_bytes: int | None = None) -> list[list[int]]:
    """Consecutive indices whose sizes together stay within a bucket's bytes (a larger one stands alone)."""
    buckets: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not buckets:
            buckets.append([])
            room = most_bytes or BUCKET_BYTES
        buckets[-1].append(i)
        room -= size
    return buckets
