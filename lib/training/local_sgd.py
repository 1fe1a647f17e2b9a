"""Independent ranks (local SGD): rounds of local steps without waiting, merged at their ends.

A round is a stream of global batches (lib/training/round_assignment.py). Every rank trains chunks of it with its own optimizer, of its share
of a global batch each, so that all take about as long for a step. The ranks meet seldom: at a deadline somewhat before the
end they tell each other how far they are, and what is left is dealt again by the speeds just measured. At a meeting all
ranks see the same numbers, so all decide alike. With shares that were told, or plan.replan=false, each rank trains exactly
its share of every global batch, rounds are as long as planned from the calibration, and the same run gives the same bits.
Otherwise a round is as long as the ends of the rounds before it ask for (lib/plan/strategy.py).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.schema import Config
from lib.data.row_order import Position
from lib.distributed import gradients
from lib.distributed.compression import decode, encode
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import adapter_files as models
from lib.plan.balance import DEFAULT_MICRO_BATCH_SIZE, distribute_work
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.strategy import FIRST_STEPS, default_merge, longest_round, measures_merges, steps_per_round
from lib.training import merge_adapters, round_assignment
from lib.training.checkpoint import Progress
from lib.training.step import StepResult

ROUND_ENDS = 6  # of late, by which the next round's length is chosen
LAST_BATCHES = 8  # global batches that are left to the end without another meeting
MEET_AT = 0.75  # of the time that a round is expected to take: a meeting, and what is left is dealt again
PATIENCE = 0.25  # of sync.timeout_seconds: the longest that ranks go without a meeting
GROUP_BYTES = 64 * 2**20  # of parameters that are merged at a time


LocalStep = Callable[[int, int, int, np.ndarray, int], StepResult]


class Rounds:
    """The rounds of a run.

    Args:
        plan: shares and micro-batches to begin with.
        lengths: int [n], of the training rows, as Dataset.lengths.
        steps: of the whole run, in global batches.
    """

    def __init__(
        self, config: Config, world: World, plan: ClusterPlan, model: nn.Module, lengths: np.ndarray, steps: int
    ):
        self.config, self.world, self.model, self.lengths, self.steps = config, world, model, lengths, steps
        self.steps_per_round = plan.steps_per_round or longest_round(steps)
        self.measures_merges = measures_merges(config) and world.size > 1
        self.round_ends: list[float] = []  # seconds, mean of all ranks: the last wait for each other, and the merge
        self.own_round_end: float | None = None  # of the round before, on this rank: the others do not know it yet
        self.remark = ""  # what is new at the end of a round
        self.method = config.independent.merge or default_merge(config)
        self.follows_speed = config.plan.replan and config.plan.shares is None and world.size > 1
        self.shares = plan.shares
        self.micro_batch_sizes = [max(r.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for r in plan.ranks]
        self.most = [rank.max_micro_batch_size for rank in plan.ranks]  # that memory leaves; None: whatever was planned
        predicted = [(rank.share, rank.predicted_compute_seconds) for rank in plan.ranks]
        self.speeds = [share / seconds if seconds else 0.0 for share, seconds in predicted]  # pairs/s; 0 is unknown
        self.local_steps = [0] * world.size
        self.former_steps: list[int] = []  # of ranks that took part before and do no more: their logs end there
        self.momentum: gradients.Arrays = {}
        self.feedback: gradients.Arrays = {}
        self.start: gradients.Arrays = {}  # the weights with which the round began
        self.round: round_assignment.Round | None = None  # None between rounds
        self.pending = np.zeros(0, np.int64)  # places of the round that nobody has trained
        self.trained: list[list[int]] = []  # of the round: [pairs, steps] of every rank
        self.waited_seconds = self.last_wait_seconds = 0.0  # of the round; of its last meeting
        self._warm = False

    # ---- Training

    def train(
        self, progress: Progress, local_step: LocalStep, checkpoint_every: int
    ) -> Iterator[tuple[dict[str, Any] | None, bool]]:
        """Trains until the run's last step, and counts in `progress`.

        Yields whenever the ranks stand still together: at a round's end the figures of the merge, and whether a checkpoint
        is due; inside a round None, where one is due. Only one from a round's end serves a world of another size, so it
        comes at the next such end, unless that is far.

        Args:
            local_step: trains rows, given (local step, global step for the learning rate, epoch, rows, micro-batch size).

        Raises:
            Stopped, AgreedError: on all ranks, what one rank met.
        """
        saved = saved_whole = progress.step
        while progress.step < self.steps:
            if self.round is None:
                self._open(progress.step)
            assert self.round is not None
            while len(self.pending):
                target = (saved // checkpoint_every + 1) * checkpoint_every
                if self.round.last_step - target < checkpoint_every:
                    target = self.round.last_step
                self._work_and_meet(progress, local_step, target)
                if len(self.pending) and progress.step > saved and progress.step >= target - self.follows_speed:
                    saved = max(progress.step, target)
                    yield None, True
            began = time.perf_counter()
            figures = self._merge(last=progress.step >= self.steps)
            figures |= {"seconds": time.perf_counter() - began, "waited_seconds": self.waited_seconds}
            self.own_round_end = self.last_wait_seconds + figures["seconds"]
            progress.seconds += figures["seconds"]
            progress.bytes_sent += figures["bytes_sent"]
            self.round = None
            self._choose_length()
            progress.rounds = self.state()
            is_due = progress.step >= min(self.steps, saved_whole + checkpoint_every)
            if is_due:
                saved = saved_whole = progress.step
            yield figures, is_due

    def _choose_length(self) -> None:
        """Of the next round: as often as measured merges may come."""
        if not (self.measures_merges and self.round_ends and self._speeds_are_known()):
            return
        seconds = float(np.median(self.round_ends[1:] or self.round_ends))  # the first is slow: everything is new
        step_seconds = self.config.train.global_batch_size / sum(self.speeds)
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
        own = self.speeds[self.world.rank]
        return replace(result, pairs=round(result.pairs * sum(self.speeds) / own)) if own else result

    def _open(self, step: int) -> None:
        pairs = self.config.independent.pairs_per_round
        if pairs is None:
            self._read(step, min(self.steps, step + self.steps_per_round))
        else:
            self._read(step, self.steps, pairs)
        assert self.round is not None
        self.pending = np.arange(len(self.round.rows))
        self.trained = [[0, 0] for _ in self.shares]
        self.start = models.trainable(self.model)
        self.waited_seconds = 0.0

    def _read(self, first_step: int, last_step: int, pairs: int = sys.maxsize) -> None:
        """The round that ends with `last_step`, or before it, once it has so many pairs."""
        train, window = self.config.train, self.config.data.length_window
        self.round = round_assignment.open_round(
            first_step, last_step, pairs, self.lengths, train.seed, train.global_batch_size, window
        )

    def _work_and_meet(self, progress: Progress, local_step: LocalStep, target: int) -> None:
        """Local steps until the ranks' next meeting; and the meeting. target: the step of the next checkpoint."""
        assert self.round is not None
        began = time.perf_counter()
        queues, seconds = self._deal(target)
        told = self._work(queues[self.world.rank], seconds, local_step) | {"round_end_seconds": self.own_round_end}
        arrived = time.perf_counter()
        texts = self.world.gather_long_text(json.dumps(told), "the other ranks to train their part of the round")
        self.last_wait_seconds = time.perf_counter() - arrived
        self.waited_seconds += self.last_wait_seconds
        answers = [json.loads(text) for text in texts]
        for kind in (Stopped, AgreedError):
            faults = [f"rank {rank}: {a[kind.__name__]}" for rank, a in enumerate(answers) if kind.__name__ in a]
            if faults:
                raise kind("; ".join(faults) if self.world.size > 1 else faults[0].partition(": ")[2])
        done = [answer["steps"] for answer in answers]
        pairs = [sum(len(chunk.places) for chunk in queue[:count]) for queue, count in zip(queues, done, strict=True)]
        self.pending = round_assignment.left_over(self.pending, queues, done)
        self.trained = [[p + more, s + n] for (p, s), more, n in zip(self.trained, pairs, done, strict=True)]
        self.local_steps = [steps + more for steps, more in zip(self.local_steps, done, strict=True)]
        for other, answer in enumerate(answers):
            self.limit(other, answer["most"])
        self._measure(answers, pairs)
        progress.pairs += sum(pairs)
        progress.tokens += sum(answer["tokens"] for answer in answers)
        progress.seconds += time.perf_counter() - began
        progress.step, progress.epoch, progress.cursor = self._place()
        progress.rounds = self.state()

    def _deal(self, target: int) -> tuple[list[list[round_assignment.Chunk]], float | None]:
        """Every rank's chunks, and the seconds after which to meet; without, after all of them."""
        assert self.round is not None
        batch_size, left = self.config.train.global_batch_size, len(self.pending)
        patience = PATIENCE * self.world.timeout_seconds
        to_checkpoint = target - self._place()[0]
        if not self.follows_speed and round_assignment.is_tail(self.round, self.pending):
            queues = round_assignment.deal_planned(self.round, self.pending, self.shares)
            slowest = max((n / v for n, v in zip(self.shares, self.speeds, strict=True) if v), default=None)
            batches = FIRST_STEPS if slowest is None else max(1, int(patience / slowest))
            first = int(np.searchsorted(self.round.edges, self.pending[0]))
            last = min(first + max(1, min(batches, to_checkpoint)), len(self.round.edges) - 1)
            end = self.round.edges[last]
            return [[chunk for chunk in queue if chunk.places[-1] < end] for queue in queues], None
        if not self._speeds_are_known():
            queues = round_assignment.deal_by_speed(self.round, self.pending, self.shares, self.shares)
            return [queue[:FIRST_STEPS] for queue in queues], None
        queues = round_assignment.deal_by_speed(self.round, self.pending, self.shares, self.speeds)
        speed = sum(self.speeds)
        moments = [patience, max(1, to_checkpoint) * batch_size / speed]
        if left > LAST_BATCHES * batch_size:
            moments.append(MEET_AT * left / speed)
        return queues, None if min(moments) >= left / speed else min(moments)

    def _speeds_are_known(self) -> bool:
        """Of all ranks that have work."""
        return all(speed for speed, share in zip(self.speeds, self.shares, strict=True) if share)

    def _work(
        self, queue: Sequence[round_assignment.Chunk], seconds: float | None, local_step: LocalStep
    ) -> dict[str, Any]:
        """This rank's local steps until `seconds` have passed; what it tells the others of them."""
        assert self.round is not None
        rank, batch_size = self.world.rank, self.config.train.global_batch_size
        told: dict[str, Any] = {"steps": 0, "tokens": 0, "timed_tokens": 0, "timed_seconds": 0.0}
        told["most"] = self.most[rank]
        began = time.perf_counter()
        for chunk in queue:
            elapsed = time.perf_counter() - began
            if seconds is not None and told["steps"] and elapsed * (1 + 0.5 / told["steps"]) > seconds:
                break
            step_began, size, most = time.perf_counter(), len(chunk.places), self.micro_batch_sizes[rank]
            try:
                result = local_step(
                    self.local_steps[rank] + told["steps"] + 1,
                    self.round.first_step + chunk.before // batch_size,
                    int(self.round.epochs[chunk.places[0]]),
                    self.round.rows[chunk.places],
                    -(-size // -(-size // most)),  # of about one size: a last one of a pair or two is slow
                )
            except Stopped as stop:
                return {**told, Stopped.__name__: str(stop)}
            except (UserError, OSError) as error:
                return {**told, AgreedError.__name__: str(error)}
            told["steps"] += 1
            told["most"] = self.most[rank]  # memory may have run out
            told["tokens"] += result.tokens
            if self._warm:  # the first step compiles
                told["timed_tokens"] += result.tokens
                told["timed_seconds"] += time.perf_counter() - step_began
            self._warm = True
        return told

    def _measure(self, answers: Sequence[dict[str, Any]], pairs: Sequence[int]) -> None:
        """New speeds, and shares in proportion to them; in tokens a second, so that longer rows are no slowdown."""
        if self.own_round_end is not None:
            ends = [answer["round_end_seconds"] for answer in answers]
            self.round_ends = [*self.round_ends, sum(ends) / len(ends)][-ROUND_ENDS:]
            self.own_round_end = None
        tokens_a_pair = sum(answer["tokens"] for answer in answers) / max(1, sum(pairs))
        for rank, answer in enumerate(answers):
            if answer["timed_seconds"] and tokens_a_pair:
                self.speeds[rank] = answer["timed_tokens"] / answer["timed_seconds"] / tokens_a_pair
        if self.follows_speed and self._speeds_are_known():
            shares = distribute_work(sum(self.shares), self.speeds)
            for rank, before in enumerate(self.shares):
                if before and not shares[rank]:  # a rank that never works is never measured again
                    shares[rank] += 1
                    shares[shares.index(max(shares))] -= 1
            self.shares = shares

    def limit(self, rank: int, most: int | None) -> None:
        """Keeps a rank's micro-batches to what its memory was seen to leave."""
        if most is not None:
            self.most[rank] = min(most, self.most[rank] or most)
            self.micro_batch_sizes[rank] = min(self.micro_batch_sizes[rank], most)

    def _place(self) -> tuple[int, int, int]:
        """Global batches trained, in whole ones, and the epoch and cursor there, as a synchronous run counts them."""
        assert self.round is not None
        done = len(self.round.rows) - len(self.pending)
        step = self.round.first_step + int(np.searchsorted(self.round.edges, done, side="right")) - 1
        batch_size = self.config.train.global_batch_size
        epoch, batches = divmod(step, -(-len(self.lengths) // batch_size))
        position = Position(epoch, batches * batch_size)
        return step, position.epoch, position.cursor

    # ---- In a checkpoint

    @property
    def is_inside(self) -> bool:
        """Whether the ranks have different weights: inside a round, and always without a merge."""
        return self.round is not None or self.method == "none"

    def state(self) -> dict[str, Any]:
        """What all ranks know alike."""
        known: dict[str, Any] = {"shares": self.shares, "speeds": self.speeds, "are_one": not self.is_inside}
        known["max_micro_batch_sizes"] = self.most
        known["local_steps"] = [*self.local_steps, *self.former_steps]
        known["round_ends"] = self.round_ends
        if self.round is not None:
            known |= round_assignment.to_state(self.pending, len(self.round.rows))
            known |= {"first_step": self.round.first_step, "last_step": self.round.last_step, "trained": self.trained}
        return known

    def judges(self) -> tuple[World, list[int]]:
        """Who evaluates, and in which shares: all together, but each its own where nothing is merged."""
        return (self.world.alone(), [1]) if self.method == "none" else (self.world, self.shares)

    def own(self, optimizer: optim.Optimizer) -> dict[str, gradients.Arrays]:
        """What this rank alone knows; rank 0's weights and optimizer are in the checkpoint itself."""
        own = {"momentum": self.momentum, "feedback": self.feedback}
        if self.is_inside:
            own["start"] = self.start
        if self.world.rank:
            own |= {"weights": models.trainable(self.model), "optimizer": dict(tree_flatten(optimizer.state))}
        return own

    def resume(self, progress: Progress, own: dict[str, gradients.Arrays]) -> None:
        """Takes up what a checkpoint has; in a world of another size it is one from between two rounds.

        A synchronous run's is one, too: the ranks part where it stood.
        """
        if progress.step < self.steps and to_rank(self.model, self.config.model.rank):
            mx.eval(self.model.trainable_parameters())
        self.momentum, self.feedback = own.get("momentum", {}), own.get("feedback", {})
        state = progress.rounds
        self.local_steps = [progress.steps_of(rank) for rank in range(self.world.size)]
        self.former_steps = state.get("local_steps", [])[self.world.size :]
        if state and self.follows_speed and len(state["shares"]) == self.world.size:
            self.shares, self.speeds = state["shares"], state["speeds"]
            self.round_ends = state.get("round_ends", [])
            self._choose_length()
        most = state.get("max_micro_batch_sizes", [])
        for rank, size in enumerate(most if len(most) == self.world.size else ()):
            self.limit(rank, size)
        if "tail" in state:
            # A run of an earlier version took an epoch, where the settings did not say.
            pairs = (
                sys.maxsize if "last_step" in state else self.config.independent.pairs_per_round or len(self.lengths)
            )
            self._read(state["first_step"], min(self.steps, state.get("last_step", self.steps)), pairs)
            assert self.round is not None
            self.pending = round_assignment.from_state(state["scattered"], state["tail"], len(self.round.rows))
            self.trained, self.start = state["trained"], own["start"]
        progress.rounds = self.state()

    # ---- Merging

    def _merge(self, last: bool) -> dict[str, Any]:
        """Makes the ranks' weights one; returns the fields of the merge's record.

        `error`: how far the merged change is from the exact weighted mean of the ranks' changes as they arrived, relative
        to it (Frobenius norms); None where a mean of products is not known (DoRA) or nothing was merged.
        `compression_error`: how far what the others received of this rank's change is from it, relative to it.
        """
        pairs, steps = ([of_rank[i] for of_rank in self.trained] for i in (0, 1))
        method = self.method if self.method != "stack" or last else "svd"
        figures: dict[str, Any] = {
            "method": method,
            "pairs": pairs,
            "steps": steps,
            "error": None,
            "compression_error": None,
            "bytes_sent": 0,
        }
        if method == "none":
            return figures
        before = self.world.traffic.bytes_sent
        now = models.trainable(self.model)
        travels = self.config.sync.compression
        new: gradients.Arrays = {}
        if self.config.model.method == "full" and travels in ("none", "bf16"):
            error, lost = self._merge_sums(method, now, pairs, steps, new)
        else:
            error, lost = self._merge_gathered(method, now, pairs, steps, new)
        self.model.update(tree_unflatten(list(new.items())))
        mx.eval(self.model.trainable_parameters(), self.momentum, self.feedback)
        if self.config.model.method != "dora":
            figures["error"] = error
        if travels != "none":
            figures["compression_error"] = lost
        return {**figures, "bytes_sent": self.world.traffic.bytes_sent - before}

    def _merge_sums(
        self, method: str, now: gradients.Arrays, pairs: list[int], steps: list[int], new: gradients.Arrays
    ) -> tuple[float, float]:
        """Plain parameters, a group at a time: the ranks' weighted changes are added up on their way."""
        kind = self.config.sync.compression
        factor = self._factors(method, pairs, steps)[self.world.rank]
        missed, exact = 0.0, 0.0
        lost, whole = 0.0, 0.0
        for names in _groups(now):
            own = {name: now[name].astype(mx.float32) - self.start[name].astype(mx.float32) for name in names}
            weighted = [float(factor) * own[name] for name in names]
            dtype = mx.float32 if kind == "none" else mx.bfloat16
            for array in weighted:
                lost += mx.square(array - decode(encode(array, kind), kind, array.shape)).sum().item()
                whole += mx.square(array).sum().item()
            summed = self.world.sum_arrays(weighted, "the merge of the ranks' changes", dtype)
            change = {name: array.astype(mx.float32) for name, array in zip(names, summed, strict=True)}
            begun = {name: self.start[name].astype(mx.float32) for name in names}
            if method == "outer":
                merged = self._outer(begun, change)
            else:
                merged = {name: begun[name] + change[name] for name in names}
            for name in names:
                missed += mx.square(merged[name] - begun[name] - change[name]).sum().item()
                exact += mx.square(change[name]).sum().item()
                new[name] = merged[name].astype(now[name].dtype)
        return _ratio(missed, exact), _ratio(lost, whole)

    def _merge_gathered(
        self, method: str, now: gradients.Arrays, pairs: list[int], steps: list[int], new: gradients.Arrays
    ) -> tuple[float, float]:
        """Adapters, and whatever cannot be added up on its way, a group at a time: every rank merges what all sent."""
        sync, weights = self.config.sync, merge_adapters.example_weights(pairs)
        factors = self._factors(method, pairs, steps)
        took_part = [rank for rank, count in enumerate(pairs) if count]
        missed, exact, lost, whole = 0.0, 0.0, 0.0, 0.0
        for names in _groups(now):
            begun = {name: self.start[name].astype(mx.float32) for name in names}
            own = {name: now[name].astype(mx.float32) for name in names}
            # Uncompressed, the weights themselves travel; else what has changed, which is smaller and so is its error.
            if sync.compression != "none":
                own = {name: own[name] - begun[name] for name in names}
            arrived, left_out = gradients.gather(
                self.world, own, sync, {n: self.feedback[n] for n in names if n in self.feedback}, "the merge"
            )
            self.feedback |= left_out
            lost += sum(mx.square(own[n] - arrived[self.world.rank][n]).sum().item() for n in names)
            whole += sum(mx.square(own[n]).sum().item() for n in names)
            if sync.compression != "none":
                arrived = [{name: begun[name] + change[name] for name in names} for change in arrived]
            adapters = [{name: np.array(arrived[rank][name]) for name in names} for rank in took_part]
            origin = {name: np.array(begun[name]) for name in names}
            parts = weights[took_part]
            if method == "outer":
                change = {
                    name: sum(factors[rank] * (arrived[rank][name] - begun[name]) for rank in took_part)
                    for name in names
                }
                merged = {name: np.array(array) for name, array in self._outer(begun, change).items()}
            elif method == "average" or len(took_part) == 1:
                merged = merge_adapters.average(adapters, parts)
            else:
                merged = (merge_adapters.stack if method == "stack" else merge_adapters.svd)(adapters, parts)
            further, size = merge_adapters.distance(merged, origin, adapters, parts)
            missed, exact = missed + further, exact + size
            new |= {name: mx.array(array).astype(now[name].dtype) for name, array in merged.items()}
        return _ratio(missed, exact), _ratio(lost, whole)

    def _factors(self, method: str, pairs: list[int], steps: list[int]) -> np.ndarray:
        """Of every rank's change in the mean."""
        return (
            merge_adapters.normalised_weights(pairs, steps)
            if method == "outer"
            else merge_adapters.example_weights(pairs)
        )

    def _outer(self, begun: gradients.Arrays, change: gradients.Arrays) -> gradients.Arrays:
        """DiLoCo's step from the mean change of some parameters; their momentum moves on."""
        settings = self.config.independent
        merged, momentum = merge_adapters.outer(
            {name: np.array(array) for name, array in begun.items()},
            {name: np.array(array) for name, array in change.items()},
            {name: np.array(self.momentum[name]) for name in begun if name in self.momentum},
            settings.outer_learning_rate,
            settings.outer_momentum,
        )
        self.momentum |= {name: mx.array(array) for name, array in momentum.items()}
        return {name: mx.array(array) for name, array in merged.items()}


def to_rank(model: nn.Module, rank: int) -> bool:
    """Brings a stacked adapter back to the rank that training goes on with, as well as that can be; whether it was one."""
    if models.adapter_rank(model) in (None, rank):
        return False
    adapter = {name: np.array(array) for name, array in models.trainable(model).items()}
    smaller = merge_adapters.svd([adapter], np.ones(1), rank)
    model.update(tree_unflatten([(name, mx.array(array)) for name, array in smaller.items()]))
    return True


def _groups(arrays: gradients.Arrays) -> list[list[str]]:
    """Names in order, LoRA's two factors of a layer together, as many as GROUP_BYTES hold."""
    groups: list[list[str]] = []
    layer, room = None, 0
    for name in sorted(arrays):
        this = name.rpartition(".")[0] if ".lora_" in name else None
        room -= arrays[name].nbytes
        if not groups or (room < 0 and (this is None or this != layer)):
            groups.append([])
            room = GROUP_BYTES - arrays[name].nbytes
        groups[-1].append(name)
        layer = this
    return groups


def _ratio(missed: float, whole: float) -> float:
    return math.sqrt(missed / whole) if whole else 0.0
