"""The optimizer step of ranks that hold stages of one model: micro-batches follow each other through them.

A stage's gradients are a vector-Jacobian product: of its output by its input and its trained parameters, with the
gradient that the next rank sends. The product's graph is made with the forward pass and evaluated when that gradient is
there; until then it holds the activations. A stage that recomputes keeps its input only, and makes the graph then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.settings import SyncSettings, TrainSettings
from lib.data.batch import Batch, MicroBatch
from lib.distributed import compression, heartbeat
from lib.model.layout import layout_of
from lib.model.token_stream import StreamInputs, arrays_of, hidden_states
from lib.plan.pipeline import operations
from lib.system.out_of_memory import Limit
from lib.training.divided_world import InStages, is_compiled
from lib.training.losses import SUMS, figures_of, loss_and_sums
from lib.training.step import Step, StepRecord, Tree, arrays_beside

ACTIVATIONS, GRADIENTS = "the activations of a micro-batch", "the gradients of a micro-batch's activations"
INPUT = ""  # its name among parameters
MOST_PARTS = 2  # arrays that one message is sent as
PASSES = 3  # forward, backward, and forward again where a stage recomputes


class Message(NamedTuple):
    """An array that another rank sends, and what it comes in."""

    rank: int
    array: mx.array
    parts: list[mx.array]


@dataclass(frozen=True)
class StagePace:
    """How micro-batches follow each other: in flight on each rank, recomputed here or not, and MLX's memory limit."""

    in_flight: Sequence[int]
    recomputes: bool
    limit: Limit


@dataclass
class MicroBatchState:
    """A micro-batch between its forward and its backward pass."""

    inputs: StreamInputs
    received: mx.array | None  # the stage's input, [N, D]; None on the first rank
    random_key: mx.array
    wanted: Message | None = None  # the gradient of its output
    slopes: list[mx.array] | None = None  # gradients by input, if wanted, then by sorted names; None: to be made


class PipelinedStep(Step):
    """A step whose gradients are made stage by stage; a stage that recomputes keeps a micro-batch's input only."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        train: TrainSettings,
        world: InStages,
        sync: SyncSettings,
        pace: StagePace,
    ):
        super().__init__(model, optimizer, train, world, sync)
        stage = layout_of(model).stage
        assert stage is not None
        self.stages, self.stage, self.pace, self.links = world, stage, pace, world.ranks.links
        self.waited_seconds = 0.0  # of this step, for other stages
        self.output, self.product, self.last = self._output, self._product, self._last
        if is_compiled(train, world):
            state = [model.state, mx.random.state]
            compiled = functools.partial(mx.compile, inputs=state, outputs=state)
            self.output, self.product, self.last = map(compiled, (self._output, self._product, self._last))
        self._begin([], None)

    def __call__(self, index: int, rate: float, batches: Iterable[MicroBatch]) -> StepRecord:
        """One step, as Step's; the seconds are this rank's own."""
        self.waited_seconds = -self.links.waited_seconds
        result = super().__call__(index, rate, batches)
        compute = max(0.0, result.compute_seconds[0] - self.waited_seconds)
        waited = result.figures["wait_seconds"] + self.waited_seconds
        figures = result.figures | {"compute_seconds": compute, "wait_seconds": waited}
        return replace(result, compute_seconds=[compute], figures=figures)

    def _begin(self, batches: list[MicroBatch], baseline: mx.array | None) -> None:
        """What one step's passes add to."""
        self.batches, self.baseline = batches, baseline
        self.under_way: dict[int, MicroBatchState] = {}
        self.expected: dict[int, Message] = {}  # by micro-batch: what the rank before sends
        self.begun = 0  # of these, so far
        self.total: dict[str, mx.array] = {}  # gradients by name
        self.sums = mx.zeros(len(SUMS))

    def forward_backward(
        self, what: str, batches: Iterable[MicroBatch], counted: list[Batch], baseline: mx.array | None
    ) -> tuple[Tree | None, mx.array]:
        """As Step's, of this rank's stage."""
        made = list(batches)  # a reference that is computed as needed has its passes here
        counted += [batch for batch, _ in made]
        self.shapes |= dict.fromkeys((batch.shapes for batch in counted), 0)
        largest, links = max((len(batch.rows) for batch in counted), default=0), self.links
        self.pace.limit.check(largest)
        self.stages.agree_to_go_on(what)
        self._begin(made, baseline)
        links.under_way = MOST_PARTS * self.pace.in_flight[0]
        try:
            with heartbeat.passing(what, PASSES * len(made)):
                for operation in operations(self.pace.in_flight[self.stage.rank], len(made)):
                    with links.deadline(what):
                        (self._forward if operation.is_forward else self._backward)(operation.micro_batch)
                with links.deadline(what):
                    mx.eval(self.total, self.sums)
                links.finish(what)
            self.pace.limit.check(largest)
            self.stages.agree_to_go_on(what)
            self.waited_seconds += links.waited_seconds
            return tree_unflatten(self.total) if self.total else None, self.sums
        finally:
            self._begin([], None)  # frees all

    # ---- What a stage computes of one micro-batch

    def _output(self, inputs: StreamInputs, received: mx.array | None) -> mx.array:
        """What goes to the next rank, [N, D]. received: what came from the rank before."""
        window = layout_of(self.model).attention_window
        return self.stage.run(lambda: hidden_states(self.model, inputs, window), received)

    def _product(
        self, inputs: StreamInputs, received: mx.array | None, wanted: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        """The output, and the products of `wanted`, its gradient, with its derivatives."""
        arrays = self._differentiated(received)

        def outputs(*values: mx.array) -> list[mx.array]:
            return [self._output(inputs, self._put(dict(zip(arrays, values, strict=True)), received))]

        (output,), slopes = mx.vjp(outputs, list(arrays.values()), [wanted])
        self._put(arrays, received)
        return output, slopes

    def _last(
        self, inputs: StreamInputs, received: mx.array, *beside: mx.array | None
    ) -> tuple[mx.array, list[mx.array]]:
        """SUMS, and the gradients of the loss: what the last rank computes. beside: as `loss_and_sums` takes them."""
        arrays = self._differentiated(received)

        def loss(arrays: Mapping[str, mx.array]) -> tuple[mx.array, mx.array]:
            sums: list[mx.array] = []

            def work() -> mx.array:
                figures = figures_of(self.train, self.model, inputs)
                value, own = loss_and_sums(self.train, figures, inputs, *beside)
                sums.append(own)
                return value

            return self.stage.run(work, self._put(arrays, received)), sums[0]

        (_, sums), slopes = mx.value_and_grad(loss)(arrays) if arrays else (loss({}), {})
        self._put(arrays, received)
        return sums, [slopes[name] for name in arrays]

    def _differentiated(self, received: mx.array | None) -> dict[str, mx.array]:
        """What gradients are made for: the stage's input, if wanted, and what it trains, by sorted name."""
        by_input = {} if received is None or not self.stage.passes_gradients else {INPUT: received}
        return by_input | self._trained()

    def _trained(self) -> dict[str, mx.array]:
        return dict(sorted(tree_flatten(self.model.trainable_parameters())))

    def _put(self, arrays: Mapping[str, mx.array], received: mx.array | None) -> mx.array | None:
        """Puts the parameters among arrays in their modules; returns the stage's input."""
        self.model.update(tree_unflatten([(name, array) for name, array in arrays.items() if name != INPUT]))
        return arrays.get(INPUT, received)

    # ---- Passes

    def _forward(self, i: int) -> None:
        """A micro-batch through this rank's blocks, and on; on the last rank backward as well, up to the gradients."""
        stage, (batch, reference) = self.stage, self.batches[i]
        received = None
        if not stage.is_first:
            self._begin_to_receive(i)
            received = self._awaited(self.expected.pop(i), ACTIVATIONS)
        micro = MicroBatchState(arrays_of(batch.inputs), received, mx.array(mx.random.state[0]))
        self.under_way[i] = micro
        if stage.is_last:
            beside = *arrays_beside(batch, reference), self.baseline
            sums, micro.slopes = self.last(micro.inputs, received, *beside)
            self.sums = self.sums + sums
            self.links.evaluate(self.sums, micro.slopes)
            return
        if stage.is_trained:
            micro.wanted = self._expected(i, stage.rank + 1, stage.dtypes[1])
        if micro.wanted is not None and not self.pace.recomputes:
            output, micro.slopes = self.product(micro.inputs, received, micro.wanted.array)
        else:
            output = self.output(micro.inputs, received)
        self.links.evaluate(output)
        self._send(output, stage.rank + 1, ACTIVATIONS)

    def _backward(self, i: int) -> None:
        """A micro-batch's gradients, by way of what the next rank sends; those of its input go to the rank before."""
        micro = self.under_way.pop(i)
        if not self.stage.is_trained:
            return
        if micro.wanted is not None:
            self._awaited(micro.wanted, GRADIENTS)
        if micro.slopes is None:
            assert micro.wanted is not None
            key = mx.random.state[0]
            now, key[:] = mx.array(key), micro.random_key  # the masks of the forward pass once more
            _, micro.slopes = self.product(micro.inputs, micro.received, micro.wanted.array)
            mx.random.state[0][:] = now
        by_input = micro.slopes.pop(0) if self.stage.passes_gradients else None
        for name, slope in zip(self._trained(), micro.slopes, strict=True):
            gradient = slope.astype(mx.float32)
            self.total[name] = self.total[name] + gradient if name in self.total else gradient
        del micro
        self.links.evaluate(self.total, [] if by_input is None else by_input)
        if by_input is not None:
            if self.links.receives_ahead:  # all that the rank before sends until it asks for this gradient
                self._begin_to_receive(i + self.pace.in_flight[self.stage.rank - 1] - 1)
            self._send(by_input, self.stage.rank - 1, GRADIENTS)

    def _send(self, array: mx.array, rank: int, what: str) -> None:
        parts = [array]
        if self.sync.compression != "none":
            parts = compression.encode(array, self.sync.compression)
            self.links.evaluate(parts)
        for part in parts:
            self.links.send(part, rank, what)

    def _expected(self, i: int, rank: int, dtype: mx.Dtype) -> Message:
        shape, kind = (self.batches[i][0].computed_tokens, self.stage.hidden_size), self.sync.compression
        if kind == "none":
            array = self.links.expect(shape, dtype, rank)
            return Message(rank, array, [array])
        parts = [self.links.expect(*part, rank) for part in compression.parts_of(math.prod(shape), kind)]
        return Message(rank, compression.decode(parts, kind, shape).astype(dtype), parts)

    def _begin_to_receive(self, last: int) -> None:
        """Begins to receive the activations of micro-batches up to this one, as far as there are any."""
        for i in range(self.begun, min(last + 1, len(self.batches))):
            self.expected[i] = self._expected(i, self.stage.rank - 1, self.stage.dtypes[0])
            self.links.begin(*self.expected[i].parts)
            self.begun = i + 1

    def _awaited(self, message: Message, what: str) -> mx.array:
        self.links.wait(*message.parts, rank=message.rank, what=what)
        return message.array
