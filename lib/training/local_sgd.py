"""Local SGD: independent ranks train in rounds of local steps without waiting, and merge at a round's end.

A round is a stream of global batches, in the order in which one machine would train them. Every rank trains its part
of each with its own optimizer. Now and then the ranks exchange how long their steps took, and the parts of the batches
that are left follow these speeds. With plan.shares, or plan.replan=false, each rank trains exactly its share of every
global batch, and the same run gives the same bits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import mlx.optimizers as optim
import numpy as np

from lib.config.settings import PlanSettings, TrainSettings
from lib.data.order import Position, divide_rows, epoch_order, global_batch
from lib.distributed.compression import Arrays
from lib.errors import Stopped
from lib.model import adapter_files
from lib.plan.plan import ClusterPlan
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, distribute_work
from lib.plan.strategy import FIRST_STEPS, longest_round, measures_merges, steps_per_round
from lib.training.checkpoint import CheckpointWriter, Progress, RankArrays, flat_state
from lib.training.merging import Merger, to_ranks
from lib.training.step import StepRecord

ROUND_ENDS = 6  # of late, by which the next round's length is chosen
LAST_BATCHES = 8  # global batches that are left to the end without synchronising once more
SYNCHRONISE_AT = 0.75  # of the batches that are left: the rest is assigned by the speeds measured meanwhile
PATIENCE = 0.25  # of sync.timeout_seconds: the longest that ranks go without synchronising

# Trains rows in one local step: this rank's own step, the global step that decides the learning rate, the epoch, the
# rows, int64 [n], and the micro-batch size.
LocalStep = Callable[[int, int, int, np.ndarray, int], StepRecord]


# ---- Assignment: indices into a round's stream, each trained exactly once (pure) -------------------------------------


@dataclass
class Round:
    """The stream of one round: its rows, their epochs, where its global batches begin and end; how far the ranks are in
    it."""

    first_step: int  # global batches before it
    last_step: int  # global batches up to its end
    rows: np.ndarray  # int64 [n]
    epochs: np.ndarray  # int64 [n]
    edges: np.ndarray  # int64 [batches + 1]
    trained: int = 0  # global batches of it
    pairs: list[int] = field(default_factory=list)  # that each rank trained, and its steps
    steps: list[int] = field(default_factory=list)
    start: Arrays = field(default_factory=dict)  # the weights with which it began
    rewards: list[float] = field(default_factory=list)  # of train.loss=bco: sum and count of all ranks when it began
    waited_seconds: float = 0.0
    last_wait_seconds: float = 0.0  # at its last synchronisation

    @property
    def left(self) -> int:
        """Global batches that are not trained yet."""
        return len(self.edges) - 1 - self.trained

    def batch_of(self, index: int) -> int:
        """The global batch, from 0 in the round, that an index into the stream belongs to: epochs end in short ones."""
        return int(np.searchsorted(self.edges, index, side="right")) - 1


def open_round(
    steps: tuple[int, int], pairs: int, lengths: np.ndarray, seed: int, global_batch_size: int, origin: int = 0
) -> Round:
    """The round that begins after steps[0] global batches: the fewest whole ones that hold `pairs`, until steps[1]. A
    batch's rows, which ascend in length in a synchronous run, stand in a random order: every part is a fair sample.
    lengths: int [n], of the rows. origin: global batches before their first epoch."""
    in_epoch, step, batches, epochs = -(-len(lengths) // global_batch_size), steps[0], list[np.ndarray](), list[int]()
    while step < steps[1] and sum(map(len, batches)) < pairs:
        epoch, index = divmod(step - origin, in_epoch)
        if not batches or index == 0:
            order = epoch_order(lengths, seed, epoch, global_batch_size)
        rows = global_batch(order, Position(epoch, index * global_batch_size), global_batch_size)
        keys = np.random.Philox(np.random.SeedSequence([seed, epoch, step - origin, 1])).random_raw(len(rows))
        batches.append(rows[np.argsort(keys, kind="stable")])
        epochs += [epoch] * len(rows)
        step += 1
    return Round(steps[0], step, np.concatenate(batches), np.array(epochs), np.cumsum([0, *map(len, batches)]))


def assign(
    stream: Round, batches: tuple[int, int], weights: Sequence[float], owed: np.ndarray | None = None
) -> list[list[np.ndarray]]:
    """Every rank's chunks of indices into the stream: of each global batch from batches[0] to before batches[1], one.
    weights: the ranks' parts. owed: float64 [ranks], rows that roundings kept from each rank so far, changed: a part of
    3.4 rows is 3 or 4. Without it each batch is divided by itself, by whole numbers."""
    queues: list[list[np.ndarray]] = [[] for _ in weights]
    for start, end in pairwise(stream.edges[batches[0] : batches[1] + 1].tolist()):
        if owed is None:
            counts = divide_rows(end - start, [int(weight) for weight in weights])
        else:
            owed += (end - start) * np.array(weights) / sum(weights)
            counts = divide_rows(end - start, [max(0, round(1e6 * rows)) for rows in owed])
            owed -= counts
        for queue, part in zip(queues, np.split(np.arange(start, end), np.cumsum(counts)[:-1]), strict=True):
            queue += [part] if len(part) else []
    return queues


# ---- Speeds ----------------------------------------------------------------------------------------------------------


@dataclass
class RankReport:
    """What a rank sends the others of its local steps since they synchronised last."""

    max_micro_batch_size: int | None  # that memory leaves
    round_end_seconds: float | None  # of the round before
    rewards: list[float]  # train.loss=bco: sum and count of all rewards so far, as this rank's steps know them
    tokens: int = 0
    timed_tokens: int = 0  # without the first step, which compiles
    timed_seconds: float = 0.0
    elapsed_seconds: float = 0.0  # since the last synchronisation
    stopped: str | None = None  # why training cannot go on
    skipped_in_row: int = 0  # updates that were not finite, the last ones of this rank


class RankSpeeds:
    """Every rank's speed, share (which follows the speeds, if `follows`), steps and largest micro-batch."""

    def __init__(self, plan: ClusterPlan, follows: bool):
        self.follows, self.shares = follows, plan.shares
        self.micro_batch_sizes = [max(r.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for r in plan.ranks]
        self.max_micro_batch_sizes = [rank.max_micro_batch_size for rank in plan.ranks]  # None: whatever was planned
        predicted = [(rank.share, rank.predicted_compute_seconds) for rank in plan.ranks]
        self.speeds = [share / seconds if seconds else 0.0 for share, seconds in predicted]  # pairs/s; 0 is unknown
        self.local_steps = [0] * len(plan.ranks)  # and after them those of ranks that take part no more
        self.skipped_in_row = [0] * len(plan.ranks)
        self.rewards: list[list[float]] = []  # train.loss=bco: sum and count, when they last synchronised
        self.is_warm = False  # this rank has taken its first step, which compiles
        self.owed = np.zeros(len(plan.ranks))  # rows, as `assign` has them

    def are_known(self) -> bool:
        """Of all ranks that have work."""
        return all(speed for speed, share in zip(self.speeds, self.shares, strict=True) if share)

    def take_in(self, reports: Sequence[RankReport], pairs: Sequence[int], steps: Sequence[int]) -> None:
        """New speeds, and shares in proportion to them; in tokens a second, so that longer rows are no slowdown."""
        self.rewards = [report.rewards for report in reports]
        self.skipped_in_row = [report.skipped_in_row for report in reports]
        self.local_steps[: len(steps)] = _sums(self.local_steps[: len(steps)], steps)
        tokens_a_pair = sum(report.tokens for report in reports) / max(1, sum(pairs))
        for rank, report in enumerate(reports):
            self.limit(rank, report.max_micro_batch_size)
            if report.timed_seconds and tokens_a_pair:
                self.speeds[rank] = report.timed_tokens / report.timed_seconds / tokens_a_pair
        if self.follows and self.are_known():
            self.shares = distribute_work(sum(self.shares), self.speeds)

    def assign(self, stream: Round, batches: tuple[int, int]) -> list[list[np.ndarray]]:
        """Every rank's chunks of some global batches, by its speed where shares follow it."""
        if self.follows and self.are_known():
            return assign(stream, batches, self.speeds, self.owed)
        return assign(stream, batches, self.shares)

    def limit(self, rank: int, size: int | None) -> None:
        """Keeps a rank's micro-batches to what its memory was seen to leave."""
        if size is not None:
            self.max_micro_batch_sizes[rank] = min(size, self.max_micro_batch_sizes[rank] or size)
            self.micro_batch_sizes[rank] = min(self.micro_batch_sizes[rank], size)


# ---- The rounds of a run ---------------------------------------------------------------------------------------------


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(first, second, strict=True)]


class LocalSGD:
    """The rounds of a run. lengths: int [n], of its rows. span: the global batches before these rows' first one and
    before the end. whole: steps, and rounds of rollouts, of the whole run."""

    def __init__(
        self,
        merger: Merger,
        plan: ClusterPlan,
        settings: PlanSettings,
        train: TrainSettings,
        lengths: np.ndarray,
        span: tuple[int, int],
        whole: tuple[int, int],
    ):
        self.merger, self.world, self.lengths, self.whole = merger, merger.world, lengths, whole
        self.seed, self.batch_size, (self.first_step, self.steps) = train.seed, train.global_batch_size, span
        independent, several = merger.settings, merger.world.size > 1
        # The mean of LoRA's factors is good enough for short rounds alone.
        has_long_rounds = merger.model_settings.method == "lora" and independent.pairs_per_round is not None
        self.method = independent.merge or ("svd" if has_long_rounds else "average")
        self.ranks = RankSpeeds(plan, follows=settings.replan and settings.shares is None and several)
        self.round: Round | None = None  # None between rounds
        self.saved_whole = 0  # the step of the last checkpoint at a round's end
        # Global batches in a round: as planned, or as often as measured merges may come.
        self.steps_per_round = plan.steps_per_round or longest_round(*whole)
        self.measures = measures_merges(independent, settings) and several
        self.round_ends: list[float] = []  # seconds, mean of all ranks: the last wait for each other, and the merge
        self.own_end: float | None = None  # of the round before, on this rank: the others do not know it yet

    def train(
        self, progress: Progress, local_step: LocalStep, writer: CheckpointWriter
    ) -> Iterator[tuple[dict[str, Any] | None, bool]]:
        """Trains until the run's last step, and counts in `progress`; raises Stopped or AgreedError on all ranks.
        Yields, whenever all ranks have synchronised, the merge's record at a round's end, else None, and whether a
        checkpoint is due: at round ends, which serve a world of another size, unless the next one is far."""
        saved, whole_seconds, every = progress.step, 0.0, writer.every
        while progress.step < self.steps or self.round is not None:  # a resume may end a run inside a round
            round = self.round = self.round or self._open(progress)
            while round.left:
                target = sys.maxsize if every is None else (saved // every + 1) * every
                if every is not None and round.last_step - target < every:
                    target = round.last_step
                elapsed = self._work_and_synchronise(round, progress, local_step, target, writer)
                writer.unsaved_seconds += elapsed
                whole_seconds += elapsed
                is_due = progress.step >= target or (every is None and writer.unsaved_seconds > writer.seconds)
                if round.left and is_due:
                    saved = progress.step
                    yield None, True
            record = self._end_round(round, progress)
            is_far = whole_seconds > writer.seconds if every is None else progress.step >= self.saved_whole + every
            if is_due := is_far or progress.step >= self.steps:
                saved, self.saved_whole, whole_seconds = progress.step, progress.step, 0.0
                progress.rounds = self.state()
            yield record, is_due

    def _end_round(self, round: Round, progress: Progress) -> dict[str, Any]:
        began = time.perf_counter()
        method = "svd" if self.method == "stack" and progress.step < self.steps else self.method
        record = self.merger.merge(method, round.start, round.pairs, round.steps)
        seconds = time.perf_counter() - began
        self.own_end = round.last_wait_seconds + seconds
        progress.count(0, 0, seconds, record["bytes_sent"])
        if method != "none":  # every rank gets the rewards of all: those before the round, and what each rank added
            added = np.array(self.ranks.rewards) - round.rewards
            progress.rewards[:] = (np.array(round.rewards) + added.sum(axis=0)).tolist()
            self.ranks.rewards = [list(progress.rewards)] * self.world.size
        self.round = None
        self._choose_length()
        progress.rounds = self.state()
        return record | {"seconds": seconds, "waited_seconds": round.waited_seconds, "global_step": progress.step}

    def _choose_length(self) -> None:
        """Of the next round, by how long the ends of the last ones took."""
        if self.measures and self.round_ends and self.ranks.are_known() and sum(self.ranks.speeds):
            seconds = float(np.median(self.round_ends[1:] or self.round_ends))  # the first is slow: everything is new
            step_seconds, (steps, rollouts) = self.batch_size / sum(self.ranks.speeds), self.whole
            self.steps_per_round = steps_per_round(steps, seconds, step_seconds, rollouts)

    def _open(self, progress: Progress) -> Round:
        pairs = self.merger.settings.pairs_per_round
        last_step = self.steps if pairs else min(self.steps, progress.step + self.steps_per_round)
        round = self._round((progress.step, last_step), progress.rewards, pairs or sys.maxsize)
        round.start = adapter_files.trainable(self.merger.model)
        return round

    def _round(self, steps: tuple[int, int], rewards: list[float], pairs: int = sys.maxsize) -> Round:
        """The round that ends with steps[1], or before it, once it has so many pairs."""
        round = open_round(steps, pairs, self.lengths, self.seed, self.batch_size, self.first_step)
        round.pairs = round.steps = [0] * self.world.size
        round.rewards = list(rewards)
        return round

    def _work_and_synchronise(
        self, round: Round, progress: Progress, local_step: LocalStep, target: int, writer: CheckpointWriter
    ) -> float:
        """Local steps until the ranks synchronise; rank 0's seconds. target: the step of the next checkpoint."""
        began, ranks, what = time.perf_counter(), self.ranks, "the other ranks to train their part of the round"
        last = round.trained + min(self._batches_at_once(round, writer), max(1, target - progress.step))
        queues = ranks.assign(round, (round.trained, last))
        with self.world.agreeing(what):
            own = self._work(round, queues[self.world.rank], local_step, progress.rewards)
            own.skipped_in_row, arrived = progress.skipped_in_row, time.perf_counter()
            own.elapsed_seconds = arrived - began
        reports = [RankReport(**report) for report in self.world.gather_values(asdict(own), what)]
        round.last_wait_seconds = time.perf_counter() - arrived
        round.waited_seconds += round.last_wait_seconds
        if stopped := [f"rank {rank}: {report.stopped}" for rank, report in enumerate(reports) if report.stopped]:
            raise Stopped("; ".join(stopped) if self.world.size > 1 else reports[0].stopped)
        steps, pairs = [len(queue) for queue in queues], [sum(map(len, queue)) for queue in queues]
        round.trained, round.pairs, round.steps = last, _sums(round.pairs, pairs), _sums(round.steps, steps)
        if self.own_end is not None:
            end = sum(report.round_end_seconds or 0.0 for report in reports) / self.world.size
            self.round_ends, self.own_end = [*self.round_ends, end][-ROUND_ENDS:], None
        ranks.take_in(reports, pairs, steps)
        progress.count(sum(pairs), sum(report.tokens for report in reports), time.perf_counter() - began)
        progress.step = round.first_step + last
        progress.epoch, batches = divmod(progress.step - self.first_step, -(-len(self.lengths) // self.batch_size))
        progress.cursor = batches * self.batch_size
        progress.rounds = self.state()
        return reports[0].elapsed_seconds

    def _batches_at_once(self, round: Round, writer: CheckpointWriter) -> int:
        """Global batches until the ranks synchronise."""
        ranks, patience = self.ranks, PATIENCE * self.world.timeout_seconds
        if writer.every is None:
            patience = min(patience, max(1.0, writer.seconds - writer.unsaved_seconds))
        if not ranks.are_known():
            return min(round.left, FIRST_STEPS)
        slowest = max(share / speed for share, speed in zip(ranks.shares, ranks.speeds, strict=True) if share)
        batches = min(round.left, max(1, int(patience / slowest)))
        if ranks.follows and round.left > LAST_BATCHES:
            batches = min(batches, math.ceil(SYNCHRONISE_AT * round.left))
        return batches

    def _work(
        self, stream: Round, queue: Sequence[np.ndarray], local_step: LocalStep, rewards: list[float]
    ) -> RankReport:
        """This rank's local steps. rewards: the steps add to them."""
        rank, ranks = self.world.rank, self.ranks
        report = RankReport(ranks.max_micro_batch_sizes[rank], self.own_end, rewards)
        for i, chunk in enumerate(queue):
            step_began, size, most = time.perf_counter(), len(chunk), ranks.micro_batch_sizes[rank]
            step, index = ranks.local_steps[rank] + i + 1, stream.first_step + stream.batch_of(chunk[0])
            micro_batch_size = -(-size // -(-size // most))  # of about one size: a last one of a pair or two is slow
            try:
                result = local_step(step, index, int(stream.epochs[chunk[0]]), stream.rows[chunk], micro_batch_size)
            except Stopped as stop:
                return replace(report, stopped=str(stop))
            report.max_micro_batch_size = ranks.max_micro_batch_sizes[rank]  # memory may have run out
            report.tokens += result.tokens
            if ranks.is_warm:
                report.timed_tokens += result.tokens
                report.timed_seconds += time.perf_counter() - step_began
            ranks.is_warm = True
        return report

    # ---- In a checkpoint

    def state(self) -> dict[str, Any]:
        """What all ranks know; every list has one element a rank."""
        ranks, round = self.ranks, self.round
        lists = ("shares", "speeds", "max_micro_batch_sizes", "local_steps", "skipped_in_row")
        state: dict[str, Any] = {name: list(getattr(ranks, name)) for name in lists}
        state |= {"round_ends": self.round_ends, "saved_whole": self.saved_whole}
        state["are_one"] = round is None and self.method != "none"  # whether the ranks have the same weights
        state["rewards"] = ranks.rewards or [[0.0, 0.0]] * self.world.size
        state["rewards_before"] = [0.0, 0.0] if round is None else round.rewards
        if round is not None:
            state |= {"first_step": round.first_step, "last_step": round.last_step, "batches": round.trained}
            state |= {"pairs": round.pairs, "steps": round.steps}
        return state

    def rank_arrays(self, optimizer: optim.Optimizer) -> RankArrays:
        """What this rank alone has; rank 0's weights and optimizer are in the checkpoint itself."""
        own = {"feedback": self.merger.feedback}
        if self.round is not None:
            own |= {"start": self.round.start}
        if self.world.rank:
            own |= {"weights": adapter_files.trainable(self.merger.model), "optimizer": flat_state(optimizer)}
        return own

    def resume(self, progress: Progress, own: RankArrays) -> None:
        """Takes up a checkpoint; in a world of another size one from between two rounds, as a synchronous run's is."""
        if progress.step < self.steps:
            to_ranks(self.merger.model, self.merger.model_settings)
        self.merger.momentum, self.merger.feedback = own.get("momentum", {}), own.get("feedback", {})
        state, ranks, size = progress.rounds, self.ranks, self.world.size
        ranks.local_steps = [progress.steps_of(rank) for rank in range(size)] + state.get("local_steps", [])[size:]
        self.saved_whole = state.get("saved_whole", progress.step)
        ranks.rewards, before = [list(progress.rewards)] * size, list(progress.rewards)
        if len(state.get("shares", [])) == size:
            ranks.speeds = list(state["speeds"])
            if ranks.follows:
                ranks.shares, self.round_ends = list(state["shares"]), list(state["round_ends"])
                self._choose_length()
            for rank, limit in enumerate(state["max_micro_batch_sizes"]):
                ranks.limit(rank, limit)
            ranks.skipped_in_row = state["skipped_in_row"]
            progress.skipped_in_row = ranks.skipped_in_row[self.world.rank]
            if not state["are_one"]:
                ranks.rewards, before = state["rewards"], state["rewards_before"]
                progress.rewards = list(ranks.rewards[self.world.rank])
            if "last_step" in state:
                steps = state["first_step"], min(self.steps, state["last_step"])
                round = self.round = self._round(steps, before)
                round.trained, round.start = min(state["batches"], round.left), own["start"]
                round.pairs, round.steps = state["pairs"], state["steps"]
        progress.rounds = self.state()
