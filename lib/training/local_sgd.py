"""Local SGD: independent ranks train in rounds of local steps without waiting, and merge at a round's end.

A round is a stream of global batches (lib/training/round_assignment.py). Every rank trains chunks of it with its own
optimizer, of its share of a global batch each, so that all take about as long for a step. The ranks synchronise seldom:
at a deadline somewhat before the end they tell each other how far they are, and what is left is assigned again by the
speeds just measured. After that all ranks know the same numbers, so all decide the same. With plan.shares, or
plan.replan=false, each rank trains exactly its share of every global batch, rounds are as long as planned from the
calibration, and the same run gives the same bits. Otherwise a round is as long as the ends of the rounds before it ask
for (lib/plan/strategy.py).
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from lib.config.schema import Config
from lib.data.row_order import Position
from lib.distributed.compression import Arrays
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import adapter_files
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.strategy import FIRST_STEPS, default_merge, longest_round, measures_merges, steps_per_round
from lib.training import round_assignment
from lib.training.checkpoint import Progress, RankArrays, RoundsState
from lib.training.rank_speeds import RankReport, RankSpeeds
from lib.training.round_merge import Merger, MergeResult, RoundWork, to_ranks
from lib.training.step import StepResult

ROUND_ENDS = 6  # of late, by which the next round's length is chosen
LAST_BATCHES = 8  # global batches that are left to the end without synchronising once more
SYNCHRONISE_AT = 0.75  # of the time that a round is expected to take: what is left is assigned again
PATIENCE = 0.25  # of sync.timeout_seconds: the longest that ranks go without synchronising


@dataclass
class Unfinished:
    """What a rank has trained since the ranks synchronised last, as it may go on from there by itself.

    digest: of the rows that it took, in their order. rewards_before: of all ranks, when the round began. target: the
    step up to which all ranks divided the work.
    """

    report: RankReport
    digest: str
    target: int
    rewards_before: list[float]


class LocalStep(Protocol):
    """Trains rows in one local step."""

    def __call__(self, step: int, index: int, epoch: int, rows: np.ndarray, micro_batch_size: int) -> StepResult:
        """step: this rank's own; index: the global step that decides the learning rate; rows: int64 [n]."""


Keep = Callable[[StepResult | None, Unfinished], None]  # (result of a local step; None: none was taken yet, state)


class LocalSGD:
    """The rounds of a run.

    Args:
        plan: shares and micro-batches to begin with.
        lengths: int [n], of the training rows, as Dataset.lengths.
        steps: of the whole run, in global batches.
        first_step: that the data begin with: epochs count from there.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        plan: ClusterPlan,
        model: nn.Module,
        lengths: np.ndarray,
        steps: int,
        first_step: int = 0,
    ):
        self.config, self.world, self.model, self.lengths, self.steps = config, world, model, lengths, steps
        self.first_step = first_step
        self.steps_per_round = plan.steps_per_round or longest_round(steps)
        self.measures_merges = measures_merges(config) and world.size > 1
        self.round_ends: list[float] = []  # seconds, mean of all ranks: the last wait for each other, and the merge
        self.own_round_end: float | None = None  # of the round before, on this rank: the others do not know it yet
        self.remark = ""  # what is new at the end of a round
        self.method = config.independent.merge or default_merge(config)
        self.ranks = RankSpeeds(plan, follows=config.plan.replan and config.plan.shares is None and world.size > 1)
        self.merger = Merger(config, world, model)
        self.local_steps = [0] * world.size
        self.former_steps: list[int] = []  # of ranks that took part before and do no more: their logs end there
        self.start: Arrays = {}  # the weights with which the round began
        self.round: round_assignment.Round | None = None  # None between rounds
        self.pending = np.zeros(0, np.int64)  # indices into the round's stream that nobody has trained
        self.trained = RoundWork([], [])  # of the round
        self.waited_seconds = self.last_wait_seconds = 0.0  # of the round; at its last synchronisation
        self.rewards: list[list[float]] = []  # train.loss=bco: every rank's sum and count when they last synchronised
        self.rewards_before = [0.0, 0.0]  # of all ranks, when the round began
        self.skipped_in_row = [0] * world.size  # every rank's, when they last synchronised
        self._warm = False
        self.saved_whole = 0  # the step of the last checkpoint that was due at a round's end
        self.unfinished: Unfinished | None = None  # with which the next steps go on

    # ---- Training

    def train(
        self, progress: Progress, local_step: LocalStep, checkpoint_every: int, keep: Keep
    ) -> Iterator[tuple[MergeResult | None, bool]]:
        """Trains until the run's last step, and counts in `progress`.

        Yields whenever all ranks have synchronised: at a round's end the figures of the merge, and whether a checkpoint
        is due; inside a round None, where one is due. Only one from a round's end serves a world of another size, so it
        comes at the next such end, unless that is far.

        keep: is called after local steps, from which a rank may go on by itself.

        Raises:
            Stopped, AgreedError: on all ranks, what one rank met.
        """
        saved = progress.step
        while progress.step < self.steps or self.round is not None:  # a resume may end a run inside a round
            if self.round is None:
                self._open(progress.step, progress.rewards)
            assert self.round is not None
            while len(self.pending):
                target = (saved // checkpoint_every + 1) * checkpoint_every
                if self.round.last_step - target < checkpoint_every:
                    target = self.round.last_step
                self._work_and_synchronise(progress, local_step, target, keep)
                if len(self.pending) and progress.step > saved and progress.step >= target - self.ranks.follows:
                    saved = max(progress.step, target)
                    yield None, True
            result = self._end_round(progress)
            is_due = progress.step >= min(self.steps, self.saved_whole + checkpoint_every)
            if is_due:
                saved = self.saved_whole = progress.step
                progress.rounds = self.state()
            yield result, is_due

    def _end_round(self, progress: Progress) -> MergeResult:
        began = time.perf_counter()
        is_last = progress.step >= self.steps
        method = self.method if self.method != "stack" or is_last else "svd"
        result = self.merger.merge(method, self.start, self.trained)
        result.seconds, result.waited_seconds = time.perf_counter() - began, self.waited_seconds
        self.own_round_end = self.last_wait_seconds + result.seconds
        progress.seconds += result.seconds
        progress.bytes_sent += result.bytes_sent
        if method != "none":
            self._merge_rewards(progress)
        self.round = None
        self._choose_length()
        progress.rounds = self.state()
        return result

    def _merge_rewards(self, progress: Progress) -> None:
        """Gives every rank the rewards of all: those before the round, and what each rank added in it."""
        before, added = self.rewards_before, np.array(self.rewards) - self.rewards_before
        progress.rewards[:] = (np.array(before) + added.sum(axis=0)).tolist()
        self.rewards = [list(progress.rewards)] * self.world.size

    def _choose_length(self) -> None:
        """Of the next round: as often as measured merges may come."""
        if not (self.measures_merges and self.round_ends and self.ranks.are_known()):
            return
        seconds = float(np.median(self.round_ends[1:] or self.round_ends))  # the first is slow: everything is new
        step_seconds = self.config.train.global_batch_size / sum(self.ranks.speeds)
        before, now = self.steps_per_round, steps_per_round(self.steps, seconds, step_seconds)
        self.steps_per_round = now
        if max(now, before) > 1.5 * min(now, before):
            part = seconds / (seconds + now * step_seconds)
            self.remark = (
                f"merges from here on {'after every step' if now == 1 else f'every {now:,} steps'}: one takes "
                f"{seconds:.2g} s, {part:.1%} of the time"
            )

    def take_remark(self) -> str:
        """What is new since the last call, for people; empty mostly."""
        remark, self.remark = self.remark, ""
        return remark

    def of_all(self, result: StepResult) -> StepResult:
        """A local step with the pairs that all ranks together train in its time, for the progress line."""
        own = self.ranks.speeds[self.world.rank]
        return replace(result, pairs=round(result.pairs * sum(self.ranks.speeds) / own)) if own else result

    def _open(self, step: int, rewards: Sequence[float]) -> None:
        pairs = self.config.independent.pairs_per_round
        if pairs is None:
            self._read(step, min(self.steps, step + self.steps_per_round))
        else:
            self._read(step, self.steps, pairs)
        assert self.round is not None
        self.pending = np.arange(len(self.round.rows))
        self.trained = RoundWork([0] * self.world.size, [0] * self.world.size)
        self.start = adapter_files.trainable(self.model)
        self.waited_seconds, self.rewards_before = 0.0, list(rewards)

    def _read(self, first_step: int, last_step: int, pairs: int = sys.maxsize) -> None:
        """The round that ends with `last_step`, or before it, once it has so many pairs."""
        train, window = self.config.train, self.config.data.length_window
        before = self.first_step
        opened = round_assignment.open_round(
            first_step - before, last_step - before, pairs, self.lengths, train.seed, train.global_batch_size, window
        )
        self.round = replace(opened, first_step=first_step, last_step=opened.last_step + before)

    def _work_and_synchronise(self, progress: Progress, local_step: LocalStep, target: int, keep: Keep) -> None:
        """Local steps until the ranks synchronise, and what they know then. target: the step of the next checkpoint."""
        began = time.perf_counter()
        if self.unfinished is not None:  # the same on all ranks, which go on together
            target = max(target, self.unfinished.target)
        queues, seconds = self._assign(target)
        own = self._work(queues[self.world.rank], seconds, local_step, progress.rewards, keep, target)
        own.skipped_in_row = progress.skipped_in_row
        arrived = time.perf_counter()
        texts = self.world.gather_long_text(json.dumps(asdict(own)), "the other ranks to train their part of the round")
        self.last_wait_seconds = time.perf_counter() - arrived
        self.waited_seconds += self.last_wait_seconds
        reports = [RankReport(**json.loads(text)) for text in texts]
        self._raise_faults(Stopped, [report.stopped for report in reports])
        self._raise_faults(AgreedError, [report.failed for report in reports])
        self.rewards = [report.rewards for report in reports]
        self.skipped_in_row = [report.skipped_in_row for report in reports]
        steps = [report.steps for report in reports]
        assert all(count <= len(queue) for count, queue in zip(steps, queues, strict=True))
        pairs = [sum(len(chunk.indices) for chunk in queue[:count]) for queue, count in zip(queues, steps, strict=True)]
        self.pending = round_assignment.left_over(self.pending, queues, steps)
        self.trained = RoundWork(_sums(self.trained.pairs, pairs), _sums(self.trained.steps, steps))
        self.local_steps = _sums(self.local_steps, steps)
        for rank, report in enumerate(reports):
            self.ranks.limit(rank, report.max_micro_batch_size)
        if self.own_round_end is not None:
            ends = [report.round_end_seconds or 0.0 for report in reports]
            self.round_ends = [*self.round_ends, sum(ends) / len(ends)][-ROUND_ENDS:]
            self.own_round_end = None
        self.ranks.measure(reports, pairs)
        progress.pairs += sum(pairs)
        progress.tokens += sum(report.tokens for report in reports)
        progress.seconds += time.perf_counter() - began
        progress.step, position = self._position()
        progress.epoch, progress.cursor = position.epoch, position.cursor
        progress.rounds = self.state()

    def _raise_faults(self, kind: type[Stopped | AgreedError], faults: Sequence[str | None]) -> None:
        met = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
        if met:
            raise kind("; ".join(met) if self.world.size > 1 else met[0].partition(": ")[2])

    def _assign(self, target: int) -> tuple[list[list[round_assignment.Chunk]], float | None]:
        """Every rank's chunks, and the seconds after which to synchronise; without, after all of them."""
        assert self.round is not None
        batch_size, left = self.config.train.global_batch_size, len(self.pending)
        patience = PATIENCE * self.world.timeout_seconds
        to_checkpoint = target - self._position()[0]
        if not self.ranks.follows and round_assignment.is_tail(self.round, self.pending):
            queues = round_assignment.assign_planned(self.round, self.pending, self.ranks.shares)
            slowest = max((n / v for n, v in zip(self.ranks.shares, self.ranks.speeds, strict=True) if v), default=None)
            batches = FIRST_STEPS if slowest is None else max(1, int(patience / slowest))
            first = int(np.searchsorted(self.round.edges, self.pending[0]))
            last = min(first + max(1, min(batches, to_checkpoint)), len(self.round.edges) - 1)
            end = self.round.edges[last]
            return [[chunk for chunk in queue if chunk.indices[-1] < end] for queue in queues], None
        if not self.ranks.are_known():
            queues = round_assignment.assign_by_speed(self.round, self.pending, self.ranks.shares, self.ranks.shares)
            return [queue[:FIRST_STEPS] for queue in queues], None
        queues = round_assignment.assign_by_speed(self.round, self.pending, self.ranks.shares, self.ranks.speeds)
        speed = sum(self.ranks.speeds)
        moments = [patience, max(1, to_checkpoint) * batch_size / speed]
        if left > LAST_BATCHES * batch_size:
            moments.append(SYNCHRONISE_AT * left / speed)
        return queues, None if min(moments) >= left / speed else min(moments)

    def _work(
        self,
        queue: Sequence[round_assignment.Chunk],
        seconds: float | None,
        local_step: LocalStep,
        rewards: list[float],
        keep: Keep,
        target: int,
    ) -> RankReport:
        """This rank's local steps until `seconds` have passed. rewards: the steps add to them."""
        assert self.round is not None
        rank, batch_size = self.world.rank, self.config.train.global_batch_size
        report = RankReport(self.ranks.max_micro_batch_sizes[rank], self.own_round_end, rewards)
        if self.unfinished is not None:
            report, self.unfinished = replace(self.unfinished.report, rewards=rewards), None
        digest = _digest_of(queue[: report.steps])
        if report.steps < len(queue):  # else this rank's log has what follows next as well, soon
            keep(None, Unfinished(report, digest.hexdigest(), target, self.rewards_before))
        began = time.perf_counter()
        for chunk in queue[report.steps :]:
            elapsed = time.perf_counter() - began
            if seconds is not None and report.steps and elapsed * (1 + 0.5 / report.steps) > seconds:
                break
            step_began, size, most = time.perf_counter(), len(chunk.indices), self.ranks.micro_batch_sizes[rank]
            try:
                result = local_step(
                    self.local_steps[rank] + report.steps + 1,
                    self.round.first_step + chunk.before // batch_size,
                    int(self.round.epochs[chunk.indices[0]]),
                    self.round.rows[chunk.indices],
                    -(-size // -(-size // most)),  # of about one size: a last one of a pair or two is slow
                )
            except Stopped as stop:
                return replace(report, stopped=str(stop))
            except (UserError, OSError) as error:
                return replace(report, failed=str(error))
            report.steps += 1
            report.max_micro_batch_size = self.ranks.max_micro_batch_sizes[rank]  # memory may have run out
            report.tokens += result.tokens
            if self._warm:  # the first step compiles
                report.timed_tokens += result.tokens
                report.timed_seconds += time.perf_counter() - step_began
            self._warm = True
            digest.update(chunk.indices.tobytes())
            if chunk is not queue[-1]:  # after the last one of a round its merge is in the log
                keep(result, Unfinished(report, digest.hexdigest(), target, self.rewards_before))
        return report

    def _position(self) -> tuple[int, Position]:
        """Global batches trained, in whole ones, and the position there, as a synchronous run counts them."""
        assert self.round is not None
        done = len(self.round.rows) - len(self.pending)
        step = self.round.first_step + int(np.searchsorted(self.round.edges, done, side="right")) - 1
        batch_size = self.config.train.global_batch_size
        epoch, batches = divmod(step - self.first_step, -(-len(self.lengths) // batch_size))
        return step, Position(epoch, batches * batch_size)

    # ---- In a checkpoint

    @property
    def is_inside(self) -> bool:
        """Whether the ranks have different weights: inside a round, and always without a merge."""
        return self.round is not None or self.method == "none"

    def state(self) -> RoundsState:
        """What all ranks know."""
        state: RoundsState = {
            "shares": list(self.ranks.shares),
            "speeds": list(self.ranks.speeds),
            "are_one": not self.is_inside,
            "max_micro_batch_sizes": list(self.ranks.max_micro_batch_sizes),  # a rank's own may change before all meet
            "local_steps": [*self.local_steps, *self.former_steps],
            "round_ends": self.round_ends,
            "skipped_in_row": self.skipped_in_row,
            "saved_whole": self.saved_whole,
        }
        if self.round is not None:
            pending = round_assignment.to_state(self.pending, len(self.round.rows))
            state["scattered"], state["tail"] = pending["scattered"], pending["tail"]
            state["first_step"], state["last_step"] = self.round.first_step, self.round.last_step
            state["trained"] = [[pairs, steps] for pairs, steps in zip(*self.trained, strict=True)]
        if self.config.train.loss == "bco" and self.rewards and self.is_inside:
            state["rewards"], state["rewards_before"] = self.rewards, self.rewards_before
        return state

    def evaluating_ranks(self) -> tuple[World, list[int]]:
        """Who evaluates, and in which shares: all together, but each its own where nothing is merged."""
        return (self.world.alone(), [1]) if self.method == "none" else (self.world, self.ranks.shares)

    def own_arrays(self, optimizer: optim.Optimizer) -> RankArrays:
        """What this rank alone knows; rank 0's weights and optimizer are in the checkpoint itself."""
        own = {"momentum": self.merger.momentum, "feedback": self.merger.feedback}
        if self.is_inside:
            own["start"] = self.start
        if self.world.rank:
            own |= {"weights": adapter_files.trainable(self.model), "optimizer": dict(tree_flatten(optimizer.state))}
        return own

    def resume(self, progress: Progress, own: RankArrays, unfinished: Unfinished | None = None) -> None:
        """Takes up what a checkpoint has; in a world of another size it is one from between two rounds.

        A synchronous run's is one, too: the ranks part where it stood.

        unfinished: what this rank trained after it, and goes on from (`would_go_on`).

        Raises:
            AgreedError: the state is not what a run writes. It is the same on every rank.
        """
        if progress.step < self.steps and to_ranks(self.model, self.config.model):
            mx.eval(self.model.trainable_parameters())
        self.merger.momentum, self.merger.feedback = own.get("momentum", {}), own.get("feedback", {})
        try:
            self._take_rounds(progress)
            if self.round is not None:
                self.start = own["start"]
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
            raise AgreedError(
                f"the checkpoint of step {progress.step}: the state of its rounds is not what a run writes: {error!r}"
            ) from None
        progress.rounds = self.state()
        self.unfinished = unfinished
        if unfinished is not None:
            self._open_after(progress, unfinished)
            self.start = own["start"]
            progress.rewards, progress.skipped_in_row = list(unfinished.report.rewards), 0

    def would_go_on(self, progress: Progress, unfinished: Unfinished) -> bool:
        """Whether this rank would take the same rows once more, from where all met, so that it can go on behind them.

        Raises:
            KeyError, TypeError, ValueError, IndexError, ArithmeticError: the state is not what a run writes.
        """
        self._take_rounds(copy.deepcopy(progress))
        self._open_after(progress, unfinished)
        own_queue = self._assign(unfinished.target)[0][self.world.rank]
        steps = unfinished.report.steps
        return steps <= len(own_queue) and _digest_of(own_queue[:steps]).hexdigest() == unfinished.digest

    def _open_after(self, progress: Progress, unfinished: Unfinished) -> None:
        if self.round is None:
            self._open(progress.step, unfinished.rewards_before)

    def _take_rounds(self, progress: Progress) -> None:
        """Where all ranks are, but for arrays."""
        state = progress.rounds
        self.local_steps = [progress.steps_of(rank) for rank in range(self.world.size)]
        self.former_steps = state.get("local_steps", [])[self.world.size :]
        self.saved_whole = state.get("saved_whole", progress.step)
        if state and len(state["shares"]) == self.world.size:
            self.ranks.speeds = list(state["speeds"])
        if state and self.ranks.follows and len(state["shares"]) == self.world.size:
            self.ranks.shares = list(state["shares"])
            self.round_ends = list(state.get("round_ends", []))
            self._choose_length()
        limits = state.get("max_micro_batch_sizes", [])
        for rank, size in enumerate(limits if len(limits) == self.world.size else ()):
            self.ranks.limit(rank, size)
        if len(skipped := state.get("skipped_in_row", [])) == self.world.size:
            self.skipped_in_row, progress.skipped_in_row = skipped, skipped[self.world.rank]
        self.round = None  # also where this is the second try
        if "tail" in state:
            # A run of an earlier version took an epoch, where the settings did not say.
            pairs = (
                sys.maxsize if "last_step" in state else self.config.independent.pairs_per_round or len(self.lengths)
            )
            self._read(state["first_step"], min(self.steps, state.get("last_step", self.steps)), pairs)
            assert self.round is not None
            self.pending = round_assignment.from_state(state["scattered"], state["tail"], len(self.round.rows))
            self.trained = RoundWork(*(list(of_ranks) for of_ranks in zip(*state["trained"], strict=True)))
        self.rewards, self.rewards_before = [list(progress.rewards)] * self.world.size, list(progress.rewards)
        if "rewards" in state and len(state["rewards"]) == self.world.size:
            self.rewards, self.rewards_before = state["rewards"], state["rewards_before"]
            progress.rewards = list(self.rewards[self.world.rank])


def _digest_of(queue: Sequence[round_assignment.Chunk]) -> hashlib._Hash:
    """Of the rows of these chunks, in their order."""
    digest = hashlib.sha256()
    for chunk in queue:
        digest.update(chunk.indices.tobytes())
    return digest


def _sums(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Element by element."""
    return [one + other for one, other in zip(first, second, strict=True)]
