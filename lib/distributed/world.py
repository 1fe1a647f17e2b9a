"""The world of ranks, and every collective there is. Nothing else calls `mx.distributed`.

Collectives are matched by their order alone, so every rank calls the same ones with the same shapes. They run by
themselves, on evaluated arrays: a Mac's GPU may not wait for the network inside a kernel.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed import heartbeat, ring_rendezvous
from lib.errors import AgreedError, UserError
from lib.model.partition import Division, Part
from lib.system.mpi_and_blas import Launch
from lib.system.network import distinct_names, host_name, machine_id
from lib.system.out_of_memory import OutOfMemory

Described = dict[str, tuple[tuple[int, ...], mx.Dtype]]  # name ➜ (shape, dtype)


BUCKET_BYTES = 256 * 2**20  # a collective's largest buffer: full-model gradients are not copied whole
MESSAGE_BYTES = 1024
ALIGNED_BYTES = 8  # a GPU reads a number only at a multiple of its size


@dataclass
class Traffic:
    """What this rank has sent so far, as ring algorithms do it; others may send more or less."""

    bytes_sent: int = 0


@dataclass(frozen=True)
class World:
    """This process among its peers; `group` is None in a world of one."""

    rank: int = 0
    size: int = 1
    group: Any = None
    stream: Any = None
    timeout_seconds: float = 600.0
    backend: str = ""
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def alone(self) -> World:
        """A world of this rank by itself, for work that no other takes part in."""
        return replace(self, rank=0, size=1, group=None)

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        """The sum over all ranks, evaluated. `what` names the wait if it never ends."""
        if self.size == 1:
            return array
        mx.eval(array)
        with self.deadline(what):
            total = mx.distributed.all_sum(array, group=self.group, stream=self.stream)
            mx.eval(total)
        self.traffic.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        return total

    def gather_arrays(self, arrays: list[mx.array], what: str) -> list[list[mx.array]]:
        """Every rank's arrays, in rank order, bit for bit. They have the same shapes and types everywhere."""
        if self.size == 1:
            return [arrays]
        gathered: list[list[mx.array]] = [[] for _ in range(self.size)]
        for bucket in _buckets([array.nbytes for array in arrays]):
            own = [arrays[i] for i in bucket]
            flat = _packed(own)
            mx.eval(flat)
            with self.deadline(what):
                together = mx.distributed.all_gather(flat, group=self.group, stream=self.stream)
                mx.eval(together)
            self.traffic.bytes_sent += flat.nbytes * (self.size - 1)
            for rank, theirs in enumerate(together.reshape(self.size, -1)):
                gathered[rank] += _unpacked(theirs, own)
        return gathered

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        """Sums a tree of float32 gradients and a float32 vector over all ranks.

        Both travel in the same buffers, so that one collective serves a LoRA step.
        """
        if self.size == 1:
            return gradients, sums
        leaves = sorted(tree_flatten(gradients), key=lambda leaf: leaf[0])
        sums, *summed = self.sum_arrays([sums, *(array for _, array in leaves)], "the sum of the gradients")
        return tree_unflatten([(name, array) for (name, _), array in zip(leaves, summed, strict=True)]), sums

    def sum_arrays(self, arrays: list[mx.array], what: str, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
        """Each array's sum over all ranks, in `dtype`: it is added up in this type, hop by hop."""
        if self.size == 1:
            return arrays
        summed = list(arrays)
        for bucket in _buckets([array.size * dtype.size for array in arrays]):
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
        for bucket in _buckets([array.nbytes for _, array in leaves]):
            # Bits, because a sum would lose NaN and -0.0; as int32, because not every backend sums uint8. The sum of
            # one number and zeros is that number in any order.
            own = [leaves[i][1] for i in bucket]
            flat = mx.view(_packed(own), mx.int32)
            flat = self.all_sum(flat if self.rank == 0 else mx.zeros_like(flat), "rank 0's arrays")
            for i, array in zip(bucket, _unpacked(mx.view(flat, mx.uint8), own), strict=True):
                leaves[i] = (leaves[i][0], array)
        return tree_unflatten(leaves)

    def gather_text(self, text: str, what: str = "a message from every rank") -> list[str]:
        """Every rank's text, cut at 1,024 bytes, in rank order."""
        if self.size == 1:
            return [text]
        slots = np.zeros((self.size, MESSAGE_BYTES), np.int32)
        encoded = text.encode()[:MESSAGE_BYTES]
        slots[self.rank, : len(encoded)] = list(encoded)
        gathered = np.array(self.all_sum(mx.array(slots), what))
        return [bytes(row[row > 0].astype(np.uint8)).decode(errors="replace") for row in gathered]

    def gather_long_text(self, text: str, what: str = "a text from every rank") -> list[str]:
        """Every rank's text, whole, in rank order."""
        if self.size == 1:
            return [text]
        encoded = np.frombuffer(text.encode(), np.uint8)
        sizes = np.zeros(self.size, np.int32)
        sizes[self.rank] = len(encoded)
        ends = np.cumsum(np.array(self.all_sum(mx.array(sizes), what)))
        flat = np.zeros(max(int(ends[-1]), 1), np.int32)
        flat[ends[self.rank] - len(encoded) : ends[self.rank]] = encoded
        gathered = bytes(np.array(self.all_sum(mx.array(flat), what)).astype(np.uint8))
        return [gathered[start:end].decode() for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, whole, on every rank."""
        if self.size == 1:
            return text
        encoded = np.frombuffer(text.encode(), np.uint8)
        length = int(self.broadcast({"length": mx.array(len(encoded))})["length"].item())
        mine = encoded if self.rank == 0 else np.zeros(length, np.uint8)
        return bytes(np.array(self.broadcast({"text": mx.array(mine)})["text"])).decode()

    def require_equal(self, what: str, value: str) -> None:
        """Makes sure that all ranks hold the same, a digest for instance.

        Raises:
            AgreedError: names the ranks that differ from rank 0.
        """
        values = self.gather_text(value, f"every rank's {what}")
        others = [str(rank) for rank, theirs in enumerate(values) if theirs != values[0]]
        if others:
            raise AgreedError(
                f"rank {', '.join(others)} has another {what} than rank 0; copy the same files and settings to every host"
            )

    @property
    def workers(self) -> World:
        """Those among whom data are divided: here, every rank by itself."""
        return self

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        """The sum of what was made of every summed gradient, by name: a scalar, the same on every rank."""
        return sum(values.values(), mx.array(0.0))

    def together(self, what: str, passes: int = 1) -> contextlib.AbstractContextManager[None]:
        """Passes through the model, in which ranks may have to wait for each other. Here they do not."""
        return heartbeat.passing(what, passes)

    def decide(self, x: mx.array) -> mx.array:
        """What a rank decides for itself: a token, a layout."""
        return x

    # ---- Whole arrays, for a file

    def part(self, name: str) -> Part | None:
        """How an array is divided: a parameter, or what an optimizer keeps for it, called PARAMETER.SLOT. Here none is."""
        return None

    def replicated(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Those that every rank holds whole."""
        return {name: array for name, array in arrays.items() if self.part(name) is None}

    def described(self, arrays: Mapping[str, mx.array]) -> Described:
        """Shapes and dtypes of the whole arrays, by sorted name."""
        parts = {name: self.part(name) for name in arrays}
        shapes = {name: part.shape(arrays[name].shape) if part else arrays[name].shape for name, part in parts.items()}
        return {name: (tuple(shapes[name]), arrays[name].dtype) for name in sorted(arrays)}

    @contextlib.contextmanager
    def gathering(self, *trees: Any) -> Iterator[list[tuple[Described, Iterator[tuple[str, mx.array]]]]]:
        """What the arrays of each tree are, and the arrays themselves by name, whole, one at a time, for rank 0 to write.

        All ranks enter. Every divided array is a collective: rank 0 takes them in order, and whatever nobody asked for,
        because there was no need or the disk was full, is gone through at the end.
        """
        flat = [dict(tree_flatten(tree)) for tree in trees]
        wholes = [(names, self._gathered(arrays, names)) for arrays in flat for names in [self._names(arrays)]]
        try:
            yield wholes
        finally:
            for _, arrays in wholes:
                for _ in arrays:
                    pass

    def scattered(self, whole: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
        """This rank's part of every array that rank 0 has whole, by name, some at a time; `whole` is emptied."""
        told = self._told(whole)
        names = list(told)
        sizes = [math.prod(shape) * dtype.size for shape, dtype in told.values()]
        for bucket in _buckets(sizes):
            mine = [whole.pop(names[i]) if self.rank == 0 else mx.zeros(*told[names[i]]) for i in bucket]
            for i, array in zip(bucket, self.broadcast(mine), strict=True):
                name, part = names[i], self.part(names[i])
                if part is None:
                    yield name, array
                elif part.size(self.rank):
                    array = mx.contiguous(part.of(array, self.rank))  # the whole can be let go
                    mx.eval(array)
                    yield name, array

    def align(self, tree: Any) -> Any:
        """The tree with rank 0's arrays where ranks hold the same, which on unlike machines drifts by roundings."""
        flat = dict(tree_flatten(tree))
        whole = tree_unflatten(list(self.replicated(flat).items()))
        return tree_unflatten(list((flat | dict(tree_flatten(self.broadcast(whole)))).items()))

    def _names(self, arrays: Mapping[str, mx.array]) -> Described:
        """Of the arrays that there are to gather: here this rank's own."""
        return self.described(arrays)

    def _told(self, arrays: Mapping[str, mx.array]) -> Described:
        """`described` as rank 0 knows it: it has some part of everything."""
        mine = [(name, shape, str(dtype).rpartition(".")[2]) for name, (shape, dtype) in self.described(arrays).items()]
        told = json.loads(self.broadcast_text(json.dumps(mine)))
        return {name: (tuple(shape), getattr(mx, dtype)) for name, shape, dtype in told}

    def _gathered(self, own: Mapping[str, mx.array], described: Described) -> Iterator[tuple[str, mx.array]]:
        for name, (shape, dtype) in described.items():
            part = self.part(name)
            if part is None:
                yield name, own[name]
                continue
            array = own.get(name, mx.zeros(part.shape(shape, self.rank), dtype))  # other ranks may keep all of it
            # Bit for bit: sums of integers, to which all but one rank add nothing. What is trained is float32.
            words = mx.view(array, mx.int32)
            around = [(0, 0)] * array.ndim
            around[part.axis] = (part.bounds[self.rank], part.bounds[-1] - part.bounds[self.rank + 1])
            total = self.all_sum(mx.pad(words, around), "the parts of an array")
            yield name, mx.view(total, dtype)

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
            return self._sum_lazily(x if self.rank == 0 else mx.zeros_like(x))

        @agreed.vjp
        def agreed_vjp(_: Any, cotangent: mx.array, __: Any) -> mx.array:
            return cotangent

        return agreed(x)

    def _sum_lazily(self, x: mx.array) -> mx.array:
        self.traffic.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size
        return mx.distributed.all_sum(x, group=self.group, stream=self.stream)

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Ends the block alike on all ranks: if one met a user's error, or cannot write, all raise `AgreedError`."""
        mine = ""
        try:
            yield
        except UserError as error:
            mine = str(error)
        except OSError as error:
            mine = f"{what}: {error.filename or 'a file'}: {error.strerror}; mend that and start again"
        errors = self.gather_text(mine, f"the outcome of {what}")
        distinct = list(dict.fromkeys(error for error in errors if error))
        if not distinct:
            return
        if self.size > 1 and (len(distinct) > 1 or not all(errors)):
            distinct = [f"rank {errors.index(error)}: {error}" for error in distinct]
        raise AgreedError("; ".join(distinct))

    @contextlib.contextmanager
    def deadline(self, what: str, times: int = 1) -> Iterator[None]:
        """Ends the process with a message if the block outlasts the limit (`times` it): MLX itself would wait for ever."""

        def give_up() -> None:
            print(
                f"error: rank {self.rank} on {host_name()} waited {times * self.timeout_seconds:g} s for {what}; another rank is dead, "
                "stopped or cut off (raise sync.timeout_seconds if it is only slow); resume from the last checkpoint",
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


@dataclass(frozen=True)
class ShardedWorld(World):
    """Ranks that hold parts of one model (lib/model/tensor_parallel.py): every batch goes through all of them.

    Args:
        division: that the model was divided by.
        parts: how parameters are divided, by name; the others are whole on every rank.
        partial: parameters that every rank holds whole, but of whose gradient it makes a part.
    """

    division: Division | None = None
    parts: Mapping[str, Part] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()

    @property
    def workers(self) -> World:
        """All ranks as one."""
        return Lockstep(timeout_seconds=self.timeout_seconds, backend=self.backend, traffic=self.traffic, ranks=self)

    def _names(self, arrays: Mapping[str, mx.array]) -> Described:
        return self._told(arrays)

    def part(self, name: str) -> Part | None:
        return self.parts.get(name) or self.parts.get(name.rpartition(".")[0])


def sharded(
    world: World, division: Division, parts: Mapping[str, Part] | None = None, partial: Iterable[str] = ()
) -> ShardedWorld:
    """The world, once its ranks hold parts of a model."""
    same = {of_world.name: getattr(world, of_world.name) for of_world in fields(World)}
    return ShardedWorld(**same, division=division, parts=parts or {}, partial=frozenset(partial))


@dataclass(frozen=True)
class Lockstep(World):
    """Ranks that do the same work at the same time, seen as one. What they may see differently, rank 0 says for all."""

    ranks: ShardedWorld = field(default_factory=ShardedWorld)

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        return self.ranks.all_sum(array if self.ranks.rank == 0 else mx.zeros_like(array), what)

    def decide(self, x: mx.array) -> mx.array:
        return self.ranks.agree_forward(x)

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        flat = dict(tree_flatten(gradients))
        parts = tree_unflatten([(name, g) for name, g in flat.items() if name in self.ranks.partial])
        total, sums = self.ranks.sum_gradients(parts, sums if self.ranks.rank == 0 else mx.zeros_like(sums))
        return tree_unflatten(list((flat | dict(tree_flatten(total))).items())), sums

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        once = {name: value for name, value in values.items() if name in self.ranks.parts or self.ranks.rank == 0}
        return self.ranks.all_sum(super().sum_of_all(once), "the gradient's norm")

    @contextlib.contextmanager
    def together(self, what: str, passes: int = 1) -> Iterator[None]:
        """Ranks meet on the CPU first: then a GPU waits inside a pass only for what the parts' times differ by.

        Raises:
            OutOfMemory: a rank gave up instead.
        """
        if self.ranks.all_sum(mx.array(0.0), what).item():
            raise OutOfMemory("another rank's", (0,))
        with self.ranks.deadline(what, passes):
            yield

    def give_up(self, what: str) -> None:
        """Meets the others, who are about to pass through the model, to say that this rank's memory does not allow it."""
        self.ranks.all_sum(mx.array(1.0), what)


def start(launch: Launch, timeout_seconds: float = 600.0) -> World:
    """Joins the world that the launcher described.

    Raises:
        RuntimeError: the backend is not there, or the world has another size than the launcher said.
        UserError: this rank cannot listen at its address of the ring.
    """
    heartbeat.start(launch.rank)
    if launch.backend == "jaccl":  # ends as Ctrl-C does: what RDMA holds is given back, not left to the kernel
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if launch.size == 1:
        return World(timeout_seconds=timeout_seconds)
    stream = mx.gpu if launch.backend == "nccl" else mx.cpu
    world = World(launch.rank, launch.size, None, stream, timeout_seconds, launch.backend or "")
    with world.deadline(f"all {launch.size} ranks to join over {launch.backend}"):
        if launch.backend == "ring":
            ring_rendezvous.wait_for_ring(launch.rank, _ring_addresses())
        group = mx.distributed.init(backend=launch.backend, strict=True)
    if group.size() != launch.size or group.rank() != launch.rank:
        raise RuntimeError(
            f"the launcher started rank {launch.rank} of {launch.size}, but MLX's {launch.backend} backend sees rank {group.rank()} of "
            f"{group.size()}; is the MPI that launched this the one in MLX_MPI_LIBNAME ({os.environ.get('MLX_MPI_LIBNAME', 'unset')})?"
        )
    return World(launch.rank, launch.size, group, stream, timeout_seconds, launch.backend or "")


def _ring_addresses() -> list[tuple[str, int]]:
    """Every rank's first address in the file that the ring reads."""
    ranks = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
    return [(host, int(port)) for host, _, port in (addresses[0].rpartition(":") for addresses in ranks)]


def host_names(world: World) -> list[str]:
    """The host of every rank, in their order; two machines of one name are two."""
    own = json.dumps([host_name(), machine_id()])
    return distinct_names([tuple(json.loads(text)) for text in world.gather_text(own, "the hosts' names")])


def _packed(arrays: Sequence[mx.array]) -> mx.array:
    """The bits of arrays as uint8, one after the other; each begins at a multiple of ALIGNED_BYTES."""
    bits = [mx.view(array.reshape(-1), mx.uint8) for array in arrays]
    return mx.concatenate([piece for own in bits for piece in (own, mx.zeros(-own.size % ALIGNED_BYTES, mx.uint8))])


def _unpacked(flat: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """What _packed was given, by arrays of the same shapes and types."""
    begins = np.cumsum([0, *(-(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for array in like)]).tolist()
    return [
        mx.view(flat[begin : begin + array.nbytes], array.dtype).reshape(array.shape)
        for begin, array in zip(begins, like, strict=False)
    ]


def _buckets(sizes: list[int]) -> list[list[int]]:
    """Consecutive indices whose sizes together stay within a bucket's bytes (a larger one stands alone)."""
    buckets: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room or not buckets:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(i)
        room -= size
    return buckets
