"""The world of ranks: what they say to each other, agree on, and hold between them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.distributed import heartbeat
from lib.errors import AgreedError, Stopped, UserError, shown
from lib.system.mpi_and_blas import Launch
from lib.system.network import distinct_names, host_name, machine_id

Described = dict[str, tuple[tuple[int, ...], mx.Dtype]]  # name ➜ (shape, dtype)

GATHERED_BYTES = 2**22  # of whole arrays in one sum, where rank 0 writes what ranks have parts of
BUCKET_BYTES = 256 * 2**20  # a collective's largest buffer: full-model gradients are not copied whole
ALIGNED_BYTES = 8  # a GPU reads a number only at a multiple of its size


@dataclass
class Traffic:
    """What this rank has sent so far, as ring algorithms do it; others may send more or less."""

    bytes_sent: int = 0


def _added(values: list[mx.array]) -> mx.array:
    return sum(values, mx.array(0.0))


# An adapter has hundreds of squared norms, and a GPU would add them one kernel after the other, while all else waits.
_added_in_few_kernels = mx.compile(_added)


@dataclass(frozen=True)
class World:
    """This process among its ranks, and every collective; `group` gives MLX's group."""

    rank: int = 0
    size: int = 1
    group: Callable[[], Any] = field(default=lambda: None, compare=False)
    stream: Any = None
    timeout_seconds: float = 600.0
    backend: str = ""
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    def all_sum(self, array: mx.array, what: str) -> mx.array:
        """The sum over all ranks, evaluated. `what` names the wait if it never ends."""
        if self.size == 1:
            return array
        mx.eval(array)
        with self.deadline(what):
            total = self._sum_lazily(array)
            mx.eval(total)
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
            self.traffic.bytes_sent += flat.nbytes * (self.size - 1)
            with self.deadline(what):
                together = self.gather_lazily(flat)
                mx.eval(together)
            for rank, theirs in enumerate(together.reshape(self.size, -1)):
                gathered[rank] += unpacked(theirs, own)
        return gathered

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
            # Bits, because a sum would lose NaN and -0.0; as int32, because not every backend sums uint8.
            bits = mx.view(packed(own), mx.int32)
            bits = self.all_sum(bits if self.rank == 0 else mx.zeros_like(bits), "rank 0's arrays")
            for i, array in zip(bucket, unpacked(mx.view(bits, mx.uint8), own), strict=True):
                leaves[i] = (leaves[i][0], array)
        return tree_unflatten(leaves)

    def sum_gradients(self, gradients: Any, sums: mx.array) -> tuple[Any, mx.array]:
        """Sums a tree of float32 gradients and a float32 vector over all ranks, in the same buffers."""
        if self.size == 1:
            return gradients, sums
        leaves = dict(sorted(tree_flatten(gradients)))
        sums, *summed = self.sum_arrays([sums, *leaves.values()], "the sum of the gradients")
        return tree_unflatten(list(zip(leaves, summed, strict=True))), sums

    def send(self, array: mx.array, rank: int, stream: Any) -> mx.array:
        """An evaluated array, once another rank has it; nothing is sent before this is evaluated."""
        self.traffic.bytes_sent += array.nbytes
        return mx.distributed.send(array, rank, group=self.group(), stream=stream)

    def receive(self, shape: Sequence[int], dtype: mx.Dtype, rank: int, stream: Any) -> mx.array:
        """What another rank sends next, once this is evaluated."""
        return mx.distributed.recv(shape, dtype, rank, group=self.group(), stream=stream)

    def split(self, color: int) -> World:
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

    # Inside a graph nothing is evaluated, and the graphs of all ranks have the same collectives in the same order.

    def sum_forward(self, x: mx.array) -> mx.array:
        """The sum of all ranks' x, whose gradient is everyone's own: Megatron-LM's g (arXiv:1909.08053, section 3)."""
        return x if self.size == 1 else self._sum_lazily(x)

    def sum_backward(self, x: mx.array) -> mx.array:
        """x, whose gradient is summed over the ranks: Megatron-LM's f."""
        return x if self.size == 1 else _with_gradient(lambda x: x, self._sum_lazily)(x)

    def agree_forward(self, x: mx.array) -> mx.array:
        """Rank 0's x, whose gradient is everyone's own: for what decides, and may differ by roundings."""

        def agreed(x: mx.array) -> mx.array:  # zeros wait for x as well, so that all ranks sum in one order
            return self._sum_lazily(x if self.rank == 0 else mx.depends([mx.zeros_like(x)], [x])[0])

        return x if self.size == 1 else _with_gradient(agreed, lambda cotangent: cotangent)(x)

    def _sum_lazily(self, x: mx.array) -> mx.array:
        self.traffic.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size
        return mx.distributed.all_sum(x, group=self.group(), stream=self.stream)

    # ---- Texts and agreement

    def alone(self) -> World:
        """A world of this rank by itself, for work that no other takes part in."""
        return replace(self, rank=0, size=1)

    def gather_text(self, text: str, what: str = "a message from every rank") -> list[str]:
        """Every rank's text, in rank order."""
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
        """Rank 0's text, on every rank."""
        return self.gather_text(text if self.rank == 0 else "", "rank 0's text")[0]

    def gather_values(self, value: Any, what: str = "a message from every rank") -> list[Any]:
        """Every rank's value, of JSON's types, in rank order."""
        return [json.loads(text) for text in self.gather_text(json.dumps(value), what)]

    def broadcast_value(self, value: Any) -> Any:
        """Rank 0's value, of JSON's types, on every rank."""
        return json.loads(self.broadcast_text(json.dumps(value)))

    def require_equal(self, what: str, value: str) -> None:
        """Raises AgreedError where a rank was given another value than rank 0, a digest for instance."""
        values = self.gather_text(value, f"every rank's {what}")
        if others := [str(rank) for rank, theirs in enumerate(values) if theirs != values[0]]:
            remedy = "copy the same files and settings to every host"
            raise AgreedError(f"rank {', '.join(others)} has another {what} than rank 0; {remedy}")

    @contextlib.contextmanager
    def agreeing(self, what: str) -> Iterator[None]:
        """Ends the block in the same way on all ranks: if one met a user's error, or cannot write, all raise it."""
        own = ""
        try:
            yield
        except UserError as error:
            own = str(error) or type(error).__name__  # empty would be no error
        except OSError as error:
            own = shown(f"{what}: {error.filename or 'a file'}: {error.strerror or error}; fix that and start again")
        errors = self.gather_text(own, f"the outcome of {what}")
        distinct = list(dict.fromkeys(error for error in errors if error))
        if self.size > 1 and (len(distinct) > 1 or not all(errors)):
            distinct = [f"rank {errors.index(error)}: {error}" for error in distinct]
        if distinct:
            raise AgreedError("; ".join(distinct))

    # ---- What lib/training/divided_world.py does otherwise

    @property
    def workers(self) -> World:
        """Those among whom data are divided: here, every rank by itself."""
        return self

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold parts of one model, so that all of them work at the same rows."""
        return self.workers.size < self.size

    def sum_of_all(self, values: Mapping[str, mx.array]) -> mx.array:
        """The sum of what was made of every summed gradient, by name: a scalar, the same on every rank."""
        add = _added_in_few_kernels if mx.default_device() == mx.gpu else _added
        return add(list(values.values()))

    def together(self, what: str, passes: int = 1) -> contextlib.AbstractContextManager[None]:
        """Passes through the model, in which ranks may have to wait for each other. Here they do not."""
        return heartbeat.passing(what, passes)

    def decide(self, x: mx.array) -> mx.array:
        """What a rank decides for itself: a token, a layout."""
        return x

    def part(self, name: str) -> Any:
        """How a parameter, or an optimizer's slot of it (PARAMETER.SLOT), is divided: lib/model/partition.py's Part or
        Holders. Here none is."""
        return None

    def whole(self, arrays: Mapping[str, mx.array]) -> Described:
        """Shapes and dtypes of all that the ranks hold together, by sorted name: here of this rank's own."""
        parts = {name: self.part(name) for name in arrays}
        shapes = {name: part.shape(arrays[name].shape) if part else arrays[name].shape for name, part in parts.items()}
        return {name: (tuple(shapes[name]), arrays[name].dtype) for name in sorted(arrays)}

    # ---- Whole arrays, for a file

    def replicated(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Those that every rank holds whole."""
        return {name: array for name, array in arrays.items() if self.part(name) is None}

    @contextlib.contextmanager
    def gathering(self, *trees: Any) -> Iterator[list[tuple[Described, Iterator[tuple[str, mx.array]]]]]:
        """What the arrays of each tree are, and the whole arrays by name, one at a time, for rank 0 to write. All ranks
        enter. Divided arrays travel by collectives: rank 0 takes them in order, and what it did not ask for, because
        there was no need or the disk was full, is gone through at the end."""
        flat = [dict(tree_flatten(tree)) for tree in trees]
        wholes = [(names, self._gathered(arrays, names)) for arrays in flat for names in [self.whole(arrays)]]
        try:
            yield wholes
        finally:
            for _, arrays in wholes:
                for _ in arrays:
                    pass

    def _gathered(self, own: Mapping[str, mx.array], described: Described) -> Iterator[tuple[str, mx.array]]:
        names = list(described)
        for bucket in buckets([math.prod(shape) * dtype.size for shape, dtype in described.values()], GATHERED_BYTES):
            divided = [names[i] for i in bucket if self.part(names[i]) is not None]
            # Bit for bit: sums of integers, to which all but one rank add nothing. What is trained is float32.
            bits = [mx.view(self._within(name, own, *described[name]).reshape(-1), mx.int32) for name in divided]
            sums = self.sum_arrays(bits, "the parts of the model", mx.int32)
            summed = dict(zip(divided, sums, strict=True))
            for name in (names[i] for i in bucket):
                shape, dtype = described[name]
                yield name, mx.view(summed.pop(name), dtype).reshape(shape) if name in summed else own[name]

    def _within(self, name: str, own: Mapping[str, mx.array], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A whole array of which this rank has its part alone, zeros elsewhere."""
        part = self.part(name)
        array = own.get(name, mx.zeros(part.shape(shape, self.rank), dtype))  # other ranks may keep all of it
        around = [(0, 0)] * array.ndim
        around[part.axis] = (part.bounds[self.rank], part.bounds[-1] - part.bounds[self.rank + 1])
        return mx.pad(array, around)

    def scattered(self, whole: dict[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
        """This rank's part of every array that rank 0 has whole, by name, one at a time; `whole` is emptied."""
        for name, (shape, dtype) in self.described_by(0, World.whole(self, whole)).items():
            array, part = self.broadcast(whole.pop(name) if self.rank == 0 else mx.zeros(shape, dtype)), self.part(name)
            if part is None:
                yield name, array
            elif part.size(self.rank):
                array = mx.contiguous(part.of(array, self.rank))  # the whole can be let go
                mx.eval(array)
                yield name, array

    def described_by(self, last: int, described: Described) -> Described:
        """What the ranks from 0 to `last` describe, together."""
        own = [(name, shape, str(dtype).rpartition(".")[2]) for name, (shape, dtype) in described.items()]
        every = self.gather_values(own if self.rank <= last else [], "every rank's arrays")
        arrays = sorted(array for of_rank in every for array in of_rank)
        return {name: (tuple(shape), getattr(mx, dtype)) for name, shape, dtype in arrays}

    def align(self, tree: Any) -> Any:
        """The tree with rank 0's arrays where ranks hold the same, which on unlike machines drifts by roundings."""
        flat = dict(tree_flatten(tree))
        whole = tree_unflatten(self.replicated(flat))
        return tree_unflatten(flat | dict(tree_flatten(self.broadcast(whole))))


def _with_gradient(
    forward: Callable[[mx.array], mx.array], backward: Callable[[mx.array], mx.array]
) -> Callable[[mx.array], mx.array]:
    function = mx.custom_function(forward)
    function.vjp(lambda _, cotangent, __: backward(cotangent))
    return function


def start(launch: Launch, timeout_seconds: float = 600.0) -> World:
    """Joins the world that the launcher described; Stopped where the backend does not come up."""
    heartbeat.start(launch.rank)
    if launch.backend == "jaccl":  # ends as Ctrl-C does: what RDMA holds is given back, not left to the kernel
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if launch.size == 1:
        return World(timeout_seconds=timeout_seconds)
    if launch.backend == "mpi":
        heartbeat.report_termination(launch.rank)
    stream = mx.gpu if launch.backend == "nccl" else mx.cpu
    world = World(launch.rank, launch.size, lambda: None, stream, timeout_seconds, launch.backend or "")
    with world.deadline(f"all {launch.size} ranks to join over {launch.backend}"):
        try:
            group = mx.distributed.init(strict=True, backend=launch.backend or "any")
        except RuntimeError as error:
            raise Stopped(f"{launch.backend} does not come up on {host_name()}: {error}") from None
    if group.size() != launch.size or group.rank() != launch.rank:
        raise RuntimeError(
            f"the launcher started rank {launch.rank} of {launch.size}, but MLX's {launch.backend} backend sees rank "
            f"{group.rank()} of {group.size()}; is {os.environ.get('MLX_MPI_LIBNAME')} of the MPI that launched this?"
        )
    return replace(world, group=lambda: group)


def neighbour_pairs(world: World) -> dict[int, World]:
    """Groups of two: of this rank and the one after it, and the one before it, in a circle; by the other's rank."""
    size, rank, pairs = world.size, world.rank, {}
    # Each round splits the world into pairs of ranks next to each other, and single ones. Of an odd number the first
    # and the last rank have a round for themselves, and two ranks only one.
    for of_round in range(1 if size == 2 else 2 + size % 2):
        starts = [size - 1] if size % 2 and of_round == 2 else range(of_round, size - size % 2, 2)
        pair = next((start for start in starts if rank in (start, (start + 1) % size)), None)
        group = world.split(size + rank if pair is None else pair)
        if pair is not None:
            pairs[(pair + 1) % size if rank == pair else pair] = group
    return pairs


def host_names(world: World) -> list[str]:
    """The host of every rank, in their order; two machines of one name are two."""
    own = json.dumps([host_name(), machine_id()])
    return distinct_names([tuple(json.loads(text)) for text in world.gather_text(own, "the hosts' names")])


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
