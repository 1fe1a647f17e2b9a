"""One optimizer step: forward and backward, sum over ranks, one division, clip, update.

Every quantity travels as a sum beside a count, so that unequal ranks and ragged micro-batches weigh what they hold.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from lib.config.schema import SyncSettings, TrainSettings
from lib.data.collate import Batch
from lib.distributed import gradients as exchange
from lib.distributed.sharded_world import Lockstep
from lib.distributed.world import World
from lib.errors import UserError
from lib.model.backbone import embedding_of
from lib.model.token_stream import StreamInputs, arrays_of
from lib.system import out_of_memory
from lib.system.out_of_memory import OutOfMemory
from lib.training import baseline, losses
from lib.training.compiled_pass import GradientsOf, Tree, compiled_gradients, compiles, is_compiled
from lib.training.joined_arrays import JoinedArrays, is_worth_it, places_of
from lib.training.neftune import noisy
from lib.training.objective import SUMS, Metrics, figures_of, loss_and_sums, means_of
from lib.training.optimizers import AdamW8bit, apply_gradients, evaluate_in_turn

MicroBatch = tuple[Batch, np.ndarray | None]  # with its reference's log-probabilities: [b, K]; of groups [b, K, C]
Forward = Callable[
    [StreamInputs, mx.array | None, mx.array | None, mx.array | None], tuple[mx.array, mx.array]
]  # (inputs, reference, labels, baseline) -> (loss, SUMS)
MeanOf = Callable[[Tree, mx.array], tuple[Tree, exchange.Arrays]]  # (mean gradients, squared norms by name)
Watching = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
Places = Sequence[tuple[nn.Module, str]]
Update = Callable[[Tree, Tree, mx.array], Tree]  # (parameters, gradients, norm) -> parameters


@dataclass(frozen=True)
class StepResult:
    """What one step did; means are over all ranks, `skipped` says that a non-finite update was left out."""

    means: Metrics
    grad_norm: float
    learning_rate: float
    skipped: bool
    seconds: float
    pairs: int  # of all ranks
    tokens: int  # of all ranks, without padding
    rank_tokens: int
    padded_tokens: int
    rank: int  # the place of this rank in compute_seconds
    compute_seconds: list[float]  # of every rank that took part
    sync_seconds: float
    wait_seconds: float
    peak_memory_bytes: int
    bytes_sent: int
    elapsed_seconds: float  # rank 0's, from the step before to this one: the same number on every rank
    unwritten: int  # ranks of which records, or a checkpoint, of earlier steps are not on the disk yet
    traces: int  # distinct batch shapes so far: each is compiled once
    sent_error: float | None = None  # of compressed activations: what was left out, relative to their norm

    def measurements(self) -> dict[str, float]:
        """The fields of this rank's step record."""
        return {
            "tokens": self.rank_tokens,
            "padded_tokens": self.padded_tokens,
            "tokens_per_second": self.rank_tokens / self.seconds,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "skipped": self.skipped,
            "compute_seconds": self.compute_seconds[self.rank],
            "sync_seconds": self.sync_seconds,
            "wait_seconds": self.wait_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "bytes_sent": self.bytes_sent,
            "traces": self.traces,
            **({} if self.sent_error is None else {"sent_error": self.sent_error}),
        }


@dataclass(frozen=True)
class OwnPart:
    """What one rank brings to the sum beside its gradients: SUMS, tokens, and the bytes it held if memory ran out."""

    sums: mx.array
    tokens: int
    padded_tokens: int
    failed_bytes: int


def learning_rate(train: TrainSettings, step: int, steps: int) -> float:
    """The rate of the step-th of `steps` updates, the first being 0: a linear rise, then the schedule's fall.

    For another batch than the one that it was chosen for it grows linearly (arXiv:1706.02677, section 2.1) or with the
    square root (arXiv:1404.5997, section 5), if asked to.
    """
    ratio = train.global_batch_size / (train.learning_rate_batch_size or train.global_batch_size)
    scale = ratio ** {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.learning_rate_scaling]
    peak, final = scale * train.learning_rate, scale * train.final_learning_rate
    if step < train.warmup_steps:
        return peak * (step + 1) / (train.warmup_steps + 1)
    progress = min(1.0, (step - train.warmup_steps) / max(1, steps - train.warmup_steps))
    fall = {"constant": 0.0, "linear": progress, "cosine": (1 - math.cos(math.pi * progress)) / 2}[train.schedule]
    return peak + (final - peak) * fall


def make_optimizer(train: TrainSettings) -> optim.Optimizer:
    """MLX's optimizer of that name, or ours.

    Raises:
        UserError: it does not know an option.
    """
    kinds = {name.lower(): kind for name, kind in vars(optim).items() if inspect.isclass(kind)}
    kind: Callable[..., optim.Optimizer] = (kinds | {"adamw_8bit": AdamW8bit})[train.optimizer]
    known = list(inspect.signature(kind).parameters)
    # MLX leaves Adam's bias correction out unless asked, and Adafactor would overrule the learning rate.
    defaults = {"bias_correction": True, "relative_step": False}
    options: dict[str, object] = {name: value for name, value in defaults.items() if name in known}
    if train.weight_decay:
        options["weight_decay"] = train.weight_decay
    options |= train.optimizer_options
    known = [name for name in known if name != "learning_rate"]  # train.learning_rate
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UserError(f"train.optimizer={train.optimizer} has no {', '.join(unknown)}; it has {', '.join(known)}")
    try:  # some options are looked at in the first update alone
        trial, weights = kind(learning_rate=train.learning_rate, **options), {"weight": mx.ones((2, 2))}
        mx.eval(trial.apply_gradients(weights, weights))
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError) as error:
        fault = str(error).partition("\n")[0]
        raise UserError(
            f"train.optimizer_options={train.optimizer_options} is not for {train.optimizer}: {fault}"
        ) from None
    return kind(learning_rate=train.learning_rate, **options)


def arrays_beside(batch: Batch, reference: np.ndarray | None) -> tuple[mx.array | None, mx.array | None]:
    """What a loss takes beside the log-probabilities, one row for each of the batch: the reference's, and labels."""
    known = None if reference is None else mx.array(batch.padded(reference))
    return known, None if batch.labels is None else mx.array(batch.padded(batch.labels))


def _all_join(world: World, joins: bool) -> bool:
    """Whether every rank's gradients are joined: one that does not compile may sum with one that does."""
    ranks = world.ranks if isinstance(world, Lockstep) else world
    if ranks.size == 1:
        return joins
    return set(ranks.gather_text(str(joins), "how gradients are laid out")) == {"True"}


def _raise_failures(failure: str | None, ranks_bytes: Sequence[float]) -> None:
    """Raises OutOfMemory on all ranks, where memory ran out on some. ranks_bytes: what each of those held; else 0."""
    if failed := {rank: int(size) for rank, size in enumerate(ranks_bytes) if size}:
        raise OutOfMemory(failure or "another rank's", tuple(failed), tuple(failed.values()))


def _tried(
    world: World, places: Places, what: str, work: Callable[[], tuple[Tree | None, mx.array]]
) -> tuple[Tree | None, mx.array, str | None]:
    """Gradients and sums, or None, zeros, and what went wrong where memory ran out: all that was made is let go then.

    Raises:
        OutOfMemory: no other rank waits in the sum; or ranks share one model and cannot synchronise there.
    """
    before = [module[key] for module, key in places]
    try:
        return *work(), None
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if not out_of_memory.told_by(error):
            raise
        failure, between_passes = str(error) or "std::bad_alloc", isinstance(error, OutOfMemory)
        all_know = isinstance(error, OutOfMemory) and bool(error.ranks)
    for (module, key), array in zip(places, before, strict=True):  # the reference's may be in their place
        module[key] = array
    out_of_memory.release()
    if world.size > 1:
        return None, mx.zeros(len(SUMS)), failure
    if isinstance(world, Lockstep):
        if not between_passes:  # the others are inside of one, where nothing can be said to them
            raise OutOfMemory(failure)
        if not all_know:
            world.give_up(what)
    raise OutOfMemory(failure, (0,), (max(1, mx.get_peak_memory()),))


@dataclass
class TrainStep:
    """Takes one optimizer step after the other; `make_step` makes it.

    A step raises OutOfMemory on all ranks where memory ran out on one of them before the sum: weights, optimizer and
    feedback are as they were, and the same step can be taken again.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    train: TrainSettings
    world: World
    dropout: bool
    sync: SyncSettings
    feedback: exchange.Arrays
    rank: int
    forward: Forward
    gradients_of: GradientsOf
    mean_of: MeanOf
    update: Update
    optimizer_state: list[Tree]  # one, which a compiled update reads and writes
    places: Places  # of what is trained
    joined: JoinedArrays | None = None  # gradients_of, mean_of and update then take trees of few arrays
    rewards: list[float] = field(default_factory=lambda: [0.0, 0.0])  # bco: sum and count of all so far
    shapes: set[object] = field(default_factory=set)  # of the batches so far
    last_started: float = field(default_factory=time.perf_counter)
    has_unwritten: bool = False  # records, or a checkpoint, of earlier steps, told to all

    def __call__(self, index: int, steps: int, batches: Iterable[MicroBatch], watching: Watching = iter) -> StepResult:
        """One step. index: its number from 0, of `steps` in the run. `batches` may raise OutOfMemory, too.

        watching: looks at the memory after each micro-batch of a pass.
        """
        started, bytes_before = time.perf_counter(), self.world.traffic.bytes_sent
        elapsed = started - self.last_started if self.world.rank == 0 else 0.0
        self.last_started = started
        mx.reset_peak_memory()
        self.model.train()
        if self.dropout:  # from the seed, the step and the rank alone: a resumed run draws the same masks
            mx.random.seed(int(np.random.SeedSequence([self.train.seed, index, self.rank]).generate_state(1)[0]))
        if self.train.neftune_noise_alpha is not None:
            batches = noisy(batches, self.train.neftune_noise_alpha, self.train.seed, index)
        what, ratios, compared_with, waited_seconds = f"step {index + 1}", None, None, 0.0
        if self.train.loss in losses.UNPAIRED_LOSSES:
            batches, ratios, waited_seconds = self._log_ratios(what, batches, watching)
            compared_with = mx.array(baseline.of_step(self.train, ratios, self.rewards))
        gradients, own, failure = self._own_gradients(what, watching(iter(batches)), compared_with)
        compute_seconds = time.perf_counter() - started - waited_seconds

        # Names are bound anew: a rank has no room for its own gradients beside the sum.
        gradients, totals, left_out = self._sum_over_ranks(gradients, own, compute_seconds, elapsed)
        at = SUMS.index("count")  # a slice: with an index CUDA would compile a gathering kernel for it
        gradients, squares = self.mean_of(gradients, totals[at : at + 1].squeeze())
        norm = mx.sqrt(self.world.sum_of_all(squares))
        mx.eval(norm, totals)
        sync_seconds = time.perf_counter() - started - compute_seconds
        values = totals.tolist()
        sums, by_rank = dict(zip(SUMS, values, strict=False)), values[len(SUMS) :]
        ranks_seconds, ranks_bytes = by_rank[: self.world.size], by_rank[self.world.size : -3]
        _raise_failures(failure, ranks_bytes)
        # Made of sums that are the same bits on every rank, so all ranks skip or none does.
        skipped = not (math.isfinite(sums["loss"]) and math.isfinite(norm.item()))
        rate = learning_rate(self.train, index, steps)
        if not skipped and sums["count"]:  # of a streamed batch every row may turn out to be left out
            self.feedback.update(left_out)
            if ratios is not None:
                baseline.count_rewards(self.train, ratios, self.rewards)
            self.take(gradients, norm, rate)
        wait_seconds = min(max(ranks_seconds) - ranks_seconds[self.world.rank], sync_seconds)
        return StepResult(
            seconds=time.perf_counter() - started,
            pairs=int(sums["pairs"]),
            means=means_of(sums, self.train),
            grad_norm=norm.item(),
            learning_rate=rate,
            skipped=skipped,
            tokens=int(values[-3]),
            rank_tokens=own.tokens,
            padded_tokens=own.padded_tokens,
            rank=self.world.rank,
            compute_seconds=ranks_seconds,
            sync_seconds=sync_seconds - wait_seconds,
            wait_seconds=wait_seconds,
            peak_memory_bytes=mx.get_peak_memory(),
            bytes_sent=self.world.traffic.bytes_sent - bytes_before,
            elapsed_seconds=values[-1],
            unwritten=int(values[-2]),
            traces=len(self.shapes),
        )

    def _log_ratios(
        self, what: str, batches: Iterable[MicroBatch], watching: Watching
    ) -> tuple[list[MicroBatch], mx.array, float]:
        """The micro-batches, the sum and count of log ratios that a baseline is made of, and the seconds waited for it.

        Raises:
            OutOfMemory: on all ranks, where memory ran out on one of them.
        """
        taken: list[MicroBatch] = []
        size, rank = self.world.size, self.world.rank

        def work() -> tuple[None, mx.array]:
            taken.extend(batches)
            passed = watching(iter(taken))
            return None, baseline.log_ratio_sums(self.model, passed, self.train, self.world.together, what)

        _, sums, failure = _tried(self.world, self.places, what, work)
        failed_bytes = [0.0] * size
        failed_bytes[rank] = float(max(1, mx.get_peak_memory())) if failure is not None else 0.0
        arrived = time.perf_counter()
        totals = self.world.all_sum(mx.concatenate([sums[:2], mx.array(failed_bytes)]), "the baseline of a step")
        mx.eval(totals)
        _raise_failures(failure, totals[2:].tolist())
        return taken, totals[:2], time.perf_counter() - arrived

    def _own_gradients(
        self, what: str, batches: Iterable[MicroBatch], compared_with: mx.array | None
    ) -> tuple[Tree, OwnPart, str | None]:
        """This rank's part of the sum; zeros, and what went wrong, where memory ran out and others wait in the sum."""
        counted: list[Batch] = []
        tokens = padded_tokens = failed_bytes = 0
        gradients, sums, failure = _tried(
            self.world, self.places, what, lambda: self._forward_backward(what, batches, counted, compared_with)
        )
        if failure is not None:  # the others wait for this rank in the sum: it comes with nothing but that
            failed_bytes = max(1, mx.get_peak_memory())
        else:
            tokens = sum(batch.real_tokens for batch in counted)
            padded_tokens = sum(batch.computed_tokens for batch in counted)
        if gradients is None:  # no row of this step is this rank's
            gradients = self.gradients_of_value(0.0)
        return gradients, OwnPart(sums, tokens, padded_tokens, failed_bytes), failure

    def _forward_backward(
        self, what: str, batches: Iterable[MicroBatch], counted: list[Batch], compared_with: mx.array | None
    ) -> tuple[Tree | None, mx.array]:
        """Gradients and SUMS, summed over this rank's micro-batches and evaluated; `counted` gets the batches."""
        gradients: Tree | None = None
        sums = mx.zeros(len(SUMS))
        for batch, reference in batches:
            self.shapes.add(batch.shapes)
            counted.append(batch)
            with self.world.together(what):
                (_, micro_sums), micro = self.gradients_of(
                    arrays_of(batch.inputs), *arrays_beside(batch, reference), compared_with
                )
                micro = tree_map(lambda g: g.astype(mx.float32), micro)
                gradients = micro if gradients is None else tree_map(lambda total, g: total + g, gradients, micro)
                del micro  # as large as what is trained
                sums = sums + micro_sums
                mx.async_eval(gradients, sums)  # frees this micro-batch's activations while the next one is prepared
        with self.world.together(what):
            mx.eval(gradients, sums)
        return gradients, sums

    def _sum_over_ranks(
        self, gradients: Tree, own: OwnPart, compute_seconds: float, elapsed_seconds: float
    ) -> tuple[Tree, mx.array, exchange.Arrays]:
        """Gradients summed over the ranks; a float32 vector; and what compression left out of the gradients.

        The vector holds SUMS, every rank's compute seconds, every rank's bytes where its memory ran out, the tokens of
        all ranks, how many of them have unwritten records, and rank 0's elapsed seconds. Each rank has elements of its
        own in it: after the sum all ranks know who waited for whom, and who ran out of memory.
        """
        size, rank = self.world.size, self.world.rank
        seconds, failed_bytes = [0.0] * size, [0.0] * size
        seconds[rank], failed_bytes[rank] = compute_seconds, float(own.failed_bytes)
        alone = float(own.tokens), float(self.has_unwritten), elapsed_seconds
        vector = mx.concatenate([own.sums, mx.array([*seconds, *failed_bytes, *alone])])
        return exchange.sum_gradients(self.world, gradients, vector, self.sync, self.feedback)

    def take(self, gradients: Tree, norm: mx.array, rate: float) -> None:
        """The update by mean gradients, whose norm is known; its evaluation has begun."""
        if self.joined is not None:
            parameters = self.joined.parameters(rate)
            self.optimizer_state[0] = self.joined.optimizer.state
            self.joined.take(self.update(parameters, gradients, norm))
            return
        self.optimizer.learning_rate = rate
        self.optimizer_state[0] = self.optimizer.state  # another object after a resume
        self.model.update(self.update(self.model.trainable_parameters(), gradients, norm))
        evaluate_in_turn(self.model.trainable_parameters(), self.optimizer.state)

    def evaluate_held(self) -> None:
        """Evaluates what is trained and the optimizer's state: a lazy array belongs to its thread."""
        if self.joined is None or self.joined.has_new_state or not self.joined.are_in_place():
            mx.async_eval(self.model.trainable_parameters(), self.optimizer.state)

    def gradients_of_value(self, value: float) -> Tree:
        """Gradients, every number of which is this one."""
        gradients = tree_map(lambda p: mx.full(p.shape, value, mx.float32), self.model.trainable_parameters())
        return gradients if self.joined is None else self.joined.join(gradients)


def make_step(
    model: nn.Module,
    optimizer: optim.Optimizer,
    train: TrainSettings,
    world: World,
    dropout: bool,
    sync: SyncSettings | None = None,
    feedback: exchange.Arrays | None = None,
    rank: int | None = None,
) -> TrainStep:
    """Builds `step(index, steps, batches) -> StepResult`, where `batches` yields (Batch, reference log-probs or None).

    Args:
        world: the ranks whose gradients are summed; an independent rank is alone in it.
        sync: how the gradients travel; uncompressed by default.
        feedback: what compression left out of this rank's gradients so far, by name; each step changes it.
        rank: among all ranks, which draw different dropout masks; by default world.rank.

    Raises:
        UserError: train.neftune_noise_alpha, and the model has no embedding.
    """
    if train.neftune_noise_alpha is not None and embedding_of(model) is None:
        raise UserError(
            "train.neftune_noise_alpha: the model has no embedding that noise could be added to; leave it out"
        )

    def forward(inputs: StreamInputs, *beside: mx.array | None) -> tuple[mx.array, mx.array]:
        return loss_and_sums(train, figures_of(train, model, inputs), inputs, *beside)

    def mean_of(gradients: Tree, count: mx.array) -> tuple[Tree, exchange.Arrays]:
        mean = tree_map(lambda g: g / mx.maximum(count, 1), gradients)
        # Rows first: float32 forgets what is added to a sum of millions.
        return mean, {name: mx.square(mx.atleast_1d(g)).sum(axis=-1).sum() for name, g in tree_flatten(mean)}

    def update(parameters: Tree, gradients: Tree, norm: mx.array) -> Tree:
        if train.max_grad_norm is not None:
            factor = mx.minimum(train.max_grad_norm / (norm + 1e-6), 1.0)
            gradients = tree_map(lambda g: g * factor, gradients)
        updating = optimizer if joined is None else joined.optimizer
        return apply_gradients(updating, gradients, parameters, train.loraplus_lr_ratio)

    gradients_of = nn.value_and_grad(model, forward)
    optimizer_state: list[Tree] = [optimizer.state]
    sync = sync or SyncSettings()
    is_alike = train.loraplus_lr_ratio is None and sync.compression == "none"
    joins = is_alike and is_compiled(train, world) and is_worth_it(model, optimizer)
    joined = JoinedArrays(model, optimizer, world.kind_of) if _all_join(world, joins) else None
    if is_compiled(train, world):
        gradients_of = compiled_gradients(model, train, world.traffic, joined)
    if compiles(train):
        # An adapter is hundreds of small arrays: on an H200 updating them one operation at a time took 34 ms.
        mean_of = mx.compile(mean_of)
        update = mx.compile(update, inputs=optimizer_state, outputs=optimizer_state)
    return TrainStep(
        model,
        optimizer,
        train,
        world,
        dropout,
        sync,
        {} if feedback is None else feedback,
        world.rank if rank is None else rank,
        forward,
        gradients_of,
        mean_of,
        update,
        optimizer_state,
        places_of(model),
        joined,
    )
