"""A step's forward and backward pass, traced once for every shape of its batches, and where that may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from lib.config.schema import TrainSettings
from lib.distributed.collectives import Traffic
from lib.distributed.pipelined_world import InStages
from lib.distributed.sharded_world import Lockstep
from lib.distributed.world import World
from lib.model.token_stream import StreamInputs
from lib.training.joined_arrays import JoinedArrays
from lib.training.objective import Figures, figures_of, loss_and_sums

Tree = Mapping[str, object]  # MLX's tree of arrays: by name, nested
GradientsOf = Callable[
    [StreamInputs, mx.array | None, mx.array | None, mx.array | None], tuple[tuple[mx.array, mx.array], Tree]
]  # (inputs, reference, labels, baseline) -> ((loss, SUMS), gradients)


def is_compiled(train: TrainSettings, world: World) -> bool:
    """Whether the step is traced once for every shape of its batches.

    Where ranks have unequal parts of every block their graphs differ, and so might the order of their collectives:
    there it never is. Nor is it by default where a sum leaves the device, as over a Mac's ring: nobody has tried that.
    """
    if isinstance(world, Lockstep) and not isinstance(world, InStages):  # within a stage there are none
        division = world.ranks.division
        if division is None or not division.is_even or not (train.compile or world.backend == "nccl"):
            return False
    return compiles(train)


def compiles(train: TrainSettings) -> bool:
    """Whether functions without collectives are compiled: on a GPU, unless the settings say otherwise."""
    return train.compile if train.compile is not None else mx.default_device() == mx.gpu


def compiled_gradients(
    model: nn.Module, train: TrainSettings, traffic: Traffic, joined: JoinedArrays | None
) -> GradientsOf:
    """GradientsOf, compiled, but for the metrics; of `joined` arrays, where there are any.

    The metrics are dozens of operations on arrays of a number a row, and cost nothing one by one. Compiled they would
    be some kernels more, and CUDA takes three seconds for each of these on a machine that does not have them yet.
    """

    def loss_of(inputs: StreamInputs, *beside: mx.array | None) -> tuple[mx.array, Figures]:
        figures = figures_of(train, model, inputs)
        return loss_and_sums(train, figures, inputs, *beside)[0], figures

    def as_joined(inputs: StreamInputs, *beside: mx.array | None) -> tuple[tuple[mx.array, Figures], Tree]:
        values, gradients = value_and_gradients(inputs, *beside)
        return values, gradients if joined is None else joined.join(gradients)

    value_and_gradients = nn.value_and_grad(model, loss_of)
    state = [model.state, mx.random.state]
    compiled = mx.compile(as_joined, inputs=state, outputs=state)
    bytes_sent: dict[object, int] = {}  # within a pass, by its inputs' shapes

    def gradients_of(inputs: StreamInputs, *beside: mx.array | None) -> tuple[tuple[mx.array, mx.array], Tree]:
        are_in_place = joined is not None and joined.are_in_place()
        leaves = [leaf for _, leaf in tree_flatten((inputs, beside))]
        shapes = tuple(leaf.shape if isinstance(leaf, mx.array) else leaf for leaf in leaves)
        sent_before = traffic.bytes_sent
        (_, figures), gradients = compiled(inputs, *beside)
        if joined is not None:  # small: the device has its work before the metrics are made
            mx.async_eval(figures, gradients)
        if shapes in bytes_sent:  # no function of ours ran, that would have counted them
            traffic.bytes_sent = sent_before + bytes_sent[shapes]
        bytes_sent[shapes] = traffic.bytes_sent - sent_before
        if joined is not None and are_in_place:  # mx.compile gives the model new objects for all that it has
            joined.put_in_place()
        return loss_and_sums(train, figures, inputs, *beside), gradients

    return gradients_of
