"""Operations in the order in which they are submitted, what they make and read, and the most bytes held at a time.

lib/plan/memory_trace.py records a training step so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from lib.system.hardware import Device
from lib.system.mpi_and_blas import CUDA_BUFFER_SIZE

TASKS = 11  # that MLX has under way at most: ten, and the one that is being filled
# Operations, elements read. CUDA's second figure is this program's own (lib/system/mpi_and_blas.py).
TASK_SIZES = {"cpu": (2, math.inf), "metal": (50, 50 * 2**20), "cuda": (100, CUDA_BUFFER_SIZE * 2**20)}


class Array:
    __slots__ = ("elements", "size_bytes")

    def __init__(self, elements: float, item_bytes: float):
        self.elements, self.size_bytes = elements, elements * item_bytes


class Operation(NamedTuple):
    makes: tuple[Array, ...]
    reads: tuple[Array, ...]
    scratch_bytes: float
    weights: float  # elements that are read besides


class Tape:
    """Operations in order, and those of the backward pass in the order of the forward."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.operations: list[Operation] = []
        self.backward: list[Callable[[], None]] = []
        self.cotangents: dict[Array, Array] = {}
        self.kept_to_the_end: list[Array] = []

    def make(self, elements: float, item_bytes: float, *reads: Array, scratch: float = 0, weights: float = 0) -> Array:
        """A new array; an operation that overwrites its input makes none."""
        array = Array(elements, item_bytes)
        self.operations.append(Operation((array,), reads, scratch, weights))
        return array

    def touch(self, *reads: Array, scratch: float = 0, weights: float = 0) -> None:
        """An operation whose output is too small to count."""
        self.operations.append(Operation((), reads, scratch, weights))

    def over(self, array: Array, item_bytes: float, *reads: Array) -> Array:
        """New values for an array whose old ones nobody reads again, element by element.

        MLX writes them in their place. Counted so on CUDA, where peaks of such steps were measured; what is planned for
        a CPU was measured without, and on Metal nothing was.
        """
        if self.device != "cuda":
            return self.make(array.elements, item_bytes, array, *reads)
        self.touch(array, *reads)
        return array

    def give(self, array: Array, cotangent: Array, item_bytes: float) -> None:
        """Adds to an array's cotangent."""
        earlier = self.cotangents.get(array)
        self.cotangents[array] = cotangent if earlier is None else self.over(cotangent, item_bytes, earlier)

    def go_back(self, operations: list[Callable[[], None]]) -> None:
        while operations:
            operations.pop()()

    def peak_bytes(self) -> float:
        """The most bytes held at a time."""
        last = {
            array: i for i, operation in enumerate(self.operations) for array in (*operation.makes, *operation.reads)
        }
        forever = set(self.kept_to_the_end)
        most_operations, most_elements = TASK_SIZES[self.device]
        tasks: deque[float] = deque()  # what each lets go, once it is done
        held = peak = freed = elements = 0.0
        count = 0
        for index, operation in enumerate(self.operations):
            held += sum(array.size_bytes for array in operation.makes) + operation.scratch_bytes
            peak = max(peak, held)
            arrays = (*operation.makes, *operation.reads)
            done = {array for array in arrays if last[array] == index and array not in forever}
            freed += sum(array.size_bytes for array in done) + operation.scratch_bytes
            elements += sum(array.elements for array in operation.reads) + operation.weights
            count += 1
            if count >= most_operations or elements > most_elements:
                tasks.append(freed)
                freed, elements, count = 0.0, 0.0, 0
                if len(tasks) >= TASKS:
                    held -= tasks.popleft()
        return peak
