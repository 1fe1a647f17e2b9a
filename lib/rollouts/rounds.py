"""The rounds of a run: sample, judge, prefer, train, look at held-out figures; a round that loses too much is undone.

Round r takes the steps from (r - 1) * steps to r * steps, whatever becomes of it, so a step says which round it is in.
What a round came to is rounds/NNNN/round.json; with the checkpoints and the files of lib/rollouts/collect.py it is all
that a run needs to go on, inside a round as well.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lib.data.dataset import Dataset, in_memory
from lib.data.groups import groups_in_memory
from lib.data.prompts import Prompts
from lib.data.record_formats import ANSWER
from lib.distributed.world import World
from lib.errors import AgreedError, UserError, in_one_line
from lib.evaluate.evaluator import Evaluator, greedy
from lib.evaluate.judges import Judge, judge_of, question_of, scores_of
from lib.evaluate.sampler import Sampler
from lib.evaluate.score_file import key_of
from lib.model import adapter_files
from lib.rollouts.collect import PAIRS, SAMPLES, Collector, first_of
from lib.rollouts.pairs import (
    Group,
    Pair,
    RoundFigures,
    figures_of,
    groups_of,
    line_of,
    losses_of,
    warnings_of,
    why_nothing,
)
from lib.system import files
from lib.training.checkpoint import own_part_at, restore_learned
from lib.training.loop import Batches, TrainingLoop
from lib.training.losses import Metrics
from lib.training.run import TrainingRun

ROUND = "round.json"


@dataclass
class HeldOut:
    """Held-out metrics of a run, and the mean score of greedy answers to held-out prompts."""

    run: TrainingRun
    evaluator: Evaluator
    judge: Judge

    def __call__(self, world: World, shares: list[int]) -> Metrics:
        values, run = self.evaluator(world, shares), self.run
        prompts, tokenizer, settings = run.inputs.held_out, run.inputs.tokenizer, run.config.evaluate
        if prompts is None or tokenizer is None:
            return values
        ids = [prompts.ids[row] for row in range(min(len(prompts), settings.answers_limit))]
        with run.say.doing("answering held-out prompts"):
            texts, cut = greedy(run.model, tokenizer, ids, settings.max_tokens, world, shares, run.say)
        score = None
        with world.agreeing("judging held-out answers"):
            if world.rank == 0:
                each = enumerate(texts)
                questions = [
                    question_of(row, [text], prompts.records, run.config.data, tokenizer) for row, text in each
                ]
                scores = [of.score for (of,) in scores_of(self.judge, questions) if of.score is not None]
                score = sum(scores) / len(scores) if scores else None
        score = world.broadcast_value(score)
        run.tracker.record("evaluation", step=run.own_step, held_out_score=score, answers_cut=cut)
        return values | {"held_out_score": score}


@dataclass
class Rounds:
    """The rounds of a run, of which `loop` trains each. history: of every finished round; number 0 is the policy before
    the first."""

    run: TrainingRun
    collector: Collector
    loop: TrainingLoop
    history: list[RoundFigures] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings, self.steps = self.run.config.rollouts, self.run.config.steps_per_round

    def train(self) -> None:
        """Takes all rounds that are left."""
        for number in range(self._recall() + 1, self.settings.rounds + 1):
            self._round(number)
        self.loop.final_step = self.run.progress.best_step = self._last_valid().round * self.steps

    def _recall(self) -> int:
        """Reads the verdicts of the rounds so far, and returns the last round that is finished."""
        run, step, reader = self.run, self.run.progress.step, TypeAdapter(RoundFigures)
        if not run.progress.before:
            self.loop.evaluate_before()
        self.history = [RoundFigures(0, run.progress.before)]
        if step == 0:
            run.optimizer.init(run.model.trainable_parameters())
            run.save()  # to which the first round goes back, if it is undone
        for number in range(1, step // self.steps + 1):
            path = self._file_of(number)
            text = path.read_text("utf-8", "replace") if run.world.rank == 0 and path.exists() else ""
            text = run.world.broadcast_text(text)
            if not text and number * self.steps == step:  # a fault came before the verdict
                break
            try:
                self.history.append(reader.validate_json(text))
            except ValueError as error:
                fault = in_one_line(error) if text else "it is missing"
                raise AgreedError(f"{path} is not what a round writes: {fault}; start a new run") from None
        finished = len(self.history) - 1
        if run.lock is not None:  # verdicts of rounds that a run went back behind
            for number in range(finished + 1, self.settings.rounds + 1):
                self._file_of(number).unlink(missing_ok=True)
        if finished:
            self.loop.latest = dict(self.history[-1].held_out)
            if self.history[-1].undone and step == finished * self.steps:  # a fault may have come before that was done
                self._undo()
        return finished

    def _round(self, number: int) -> None:
        """One round, from its answers to the verdict."""
        run, first_step = self.run, (number - 1) * self.steps
        run.steps, run.progress.best_step = number * self.steps, self._last_valid().round * self.steps
        if run.model is not self.collector.sampler.model:  # a pipeline's blocks have moved
            sampler = Sampler(run.model, self.collector.sampler.tokenizer, self.settings, world=run.world)
            self.collector = replace(self.collector, world=run.world, sampler=sampler)
        groups, pairs = self._collected(number, first_step)
        figures = RoundFigures(number, {}, figures_of(groups, pairs))
        run.say.line(f"round {number} of {self.settings.rounds}: {line_of(figures, self.settings)}", "bold")
        if run.progress.step == first_step:  # an order of its own
            run.progress.epoch, run.progress.cursor = run.progress.epoch + 1, 0
        data = self._data(number, groups, pairs)
        if data is not None:
            self._prepare(number, data, first_step)
            self.loop.train()
        else:
            run.say.warning(f"round {number}: {why_nothing(groups, self.settings)}; nothing is trained", first_step)
            run.progress.step = run.steps
            if run.moving_reference:  # its turn is the round's, whatever was learnt
                run.moving_reference.follow(run.progress.step)
            self.loop.latest = dict(self._last_valid().held_out)
            run.save()
        self._judge(replace(figures, held_out=self.loop.latest))

    def _collected(self, number: int, first_step: int) -> tuple[list[Group], list[Pair]]:
        """A round's answers; drawn here, unless this round's training has begun."""
        run, world, folder = self.run, self.run.world, self.collector.folder_of(number)
        drawn_by = str(world.broadcast_value(first_of(folder / SAMPLES).get("policy", "")))
        if run.progress.step > first_step:
            if not drawn_by:
                lost = f"{folder} lacks the answers that step {run.progress.step} was trained on; put them back, or"
                raise AgreedError(f"{lost} remove the checkpoints after step {first_step}")
            return self.collector.collect(number, drawn_by)
        digest = adapter_files.digest(adapter_files.trainable(run.model))
        if world.divides_model:  # the parts of all ranks together
            digest = key_of(world.gather_text(digest, "digests of the weights"))
        if drawn_by not in ("", digest):
            run.say.warning(f"{folder} is of other weights, and is made again", run.progress.step)
            if run.lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
            world.gather_text("gone", "every disk's round")
        self.collector.draw(number, digest)
        return self.collector.collect(number, digest)

    def _data(self, number: int, groups: list[Group], pairs: list[Pair]) -> Dataset | None:
        """What a round trains on: its pairs, or for train.loss=grpo its groups; None where it has nothing to learn."""
        folder = self.collector.folder_of(number)
        if self.run.config.record_kind == "group":
            learnt = groups_of(groups, self.settings)
            return groups_in_memory(str(folder / SAMPLES), learnt, []) if learnt else None
        ids = [(pair.prompt_tokens, pair.chosen.tokens, pair.rejected.tokens) for pair in pairs]
        pieces = [np.array(piece, np.int32) for of_pair in ids for piece in of_pair]
        return in_memory(str(folder / PAIRS), "preference", "tokens", pieces) if pairs else None

    def _prepare(self, number: int, data: Dataset, first_step: int) -> None:
        """Makes ready to train on a round's data: independent ranks begin with it, or go on inside of it."""
        run = self.run
        run.world.require_equal(f"answers of round {number}", data.digest)
        run.inputs = replace(run.inputs, data=data)
        if run.local_sgd is not None:
            merger = run.local_sgd.merger
            state = run.resumed or {"momentum": merger.momentum, "feedback": merger.feedback}
            run.local_sgd = run.rounds_of(data.lengths, first_step)
            run.local_sgd.resume(run.progress, state)
            run.resumed = {}
        self.loop.batches = Batches(run, None)
        self.loop.learner.make = self.loop.batches.make

    def _judge(self, figures: RoundFigures) -> None:
        """Keeps a round or undoes it, and writes down why."""
        run, number, tolerance = self.run, figures.round, self.settings.tolerance
        lost = losses_of(self.history, figures.held_out, tolerance)
        self.history.append(replace(figures, undone=bool(lost)))
        verdict: dict[str, Any] = {"round": number, "undone": bool(lost), "why": lost}
        verdict |= {"warnings": warnings_of(self.history), "held_out": figures.held_out}
        for warning in verdict["warnings"]:
            run.say.warning(f"round {number}: {warning}", run.own_step)
        samples = figures.samples and asdict(figures.samples)
        run.tracker.record("round", step=run.own_step, **verdict, answers=samples)
        with run.world.agreeing(f"writing {ROUND}"):
            if run.lock is not None:
                text = json.dumps(verdict | {"samples": samples}, indent=2)
                files.write_atomically(self._file_of(number), text + "\n")
        if lost:
            why = f"round {number} is undone: {'; '.join(lost)} (rollouts.tolerance={tolerance:g})"
            run.say.warning(why, run.progress.step)
            self._undo()

    def _undo(self) -> None:
        """Goes back to the weights, the optimizer's state and the merges' momentum of the last valid round."""
        run, valid = self.run, self._last_valid()
        path = run.folder / "checkpoints" / f"step-{valid.round * self.steps:08d}"
        restore_learned(path, run.model, run.optimizer, run.world)
        if run.moving_reference:
            run.moving_reference.follow(run.progress.step)
        run.feedback.clear()
        if run.local_sgd is not None:  # what the round did to the merges that follow goes with it
            state, merger, run.resumed = own_part_at(path, run.world), run.local_sgd.merger, {}
            merger.momentum, merger.feedback = state.get("momentum", {}), state.get("feedback", {})
        self.loop.latest = dict(valid.held_out)
        run.save()

    def _last_valid(self) -> RoundFigures:
        """The last round that was not undone."""
        return next(of for of in reversed(self.history) if not of.undone)

    def _file_of(self, number: int) -> Path:
        return self.collector.folder_of(number) / ROUND


def train(run: TrainingRun, evaluator: Evaluator) -> TrainingLoop:
    """All rounds of a run, resumed or new; its last weights are in the model then."""
    config, inputs, world, rollouts = run.config, run.inputs, run.world, run.config.rollouts
    prompts, tokenizer = inputs.data, inputs.tokenizer
    assert isinstance(prompts, Prompts) and tokenizer is not None

    def judge_of_section(section: str) -> Judge:
        """The judge that rollouts.judge or evaluate.judge names, tried on the first prompt with its own answer."""
        named = config.evaluate.model_copy(update={"judge": getattr(config, section).judge})
        judge = judge_of(config.model_copy(update={"evaluate": named}), f"{section}.judge", grades=True)
        answer = prompts.records[0].get(ANSWER)
        judge.require_scores(question_of(0, [str(answer or "")], prompts.records, config.data, tokenizer))
        return judge

    with world.agreeing("opening the prompts"):
        if run.plan.strategy == "sharded":
            raise UserError("the plan is sharded, and ranks draw with whole models, or pipelined; take pipelined")
        judge = judge_of_held_out = judge_of_section("evaluate" if rollouts.judge is None else "rollouts")
        if inputs.held_out is not None and rollouts.judge not in (None, config.evaluate.judge):
            judge_of_held_out = judge_of_section("evaluate")
    loop = TrainingLoop(run, None, HeldOut(run, evaluator, judge_of_held_out))
    sampler = Sampler(run.model, tokenizer, rollouts, world=world)
    collector = Collector(config, run.folder, world, run.lock is not None, sampler, prompts, judge, run.say)
    if run.is_new:
        evaluator.show("before")
    Rounds(run, collector, loop).train()
    return loop
