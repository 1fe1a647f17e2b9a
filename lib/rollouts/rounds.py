"""The rounds of a run: sample, judge, prefer, train, look at held-out figures; a round that loses too much is undone.

Round r takes the steps from (r - 1) * steps to r * steps, whatever becomes of it, so a step says which round it is in.
What a round came to is rounds/NNNN/round.json; with the checkpoints and the files of lib/rollouts/collect.py it is all
that a run needs to go on, inside a round as well.

With rollouts.overlap a round's answers are drawn just before the round before it is trained, by the policy as it is
then. That is agreed by all ranks and has nothing to do with time, so a run that goes on anywhere knows what was drawn.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from lib.config import read_file
from lib.config.settings import REWARD_MODEL, Config
from lib.data.dataset import Dataset, in_memory
from lib.data.groups import groups_in_memory
from lib.data.prompts import Prompts, asked_of
from lib.data.record_formats import ANSWER
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.errors import AgreedError, UserError
from lib.evaluate import answers
from lib.evaluate.evaluator import Evaluator
from lib.evaluate.judges import Judge, Question, judge_of, require_scores, scores_of
from lib.evaluate.sample import Sampler
from lib.evaluate.score_file import key_of
from lib.model import adapter_files
from lib.rollouts.collect import PAIRS, SAMPLES, Collected, Collector, Drawing, Policy, policy_of
from lib.rollouts.divergence import kl_of
from lib.rollouts.pairs import (
    Group,
    Pair,
    RoundFigures,
    SampleFigures,
    figures_of,
    groups_of,
    losses_of,
    warnings_of,
    why_nothing,
)
from lib.system import files
from lib.training.checkpoint import own_part_at, restore_learned
from lib.training.local_sgd import LocalSGD
from lib.training.loop import Batches, TrainingLoop
from lib.training.objective import Metrics
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
        ids = [prompts.prompt_ids(row) for row in range(min(len(prompts), settings.answers_limit))]
        with run.say.doing("answering held-out prompts"):
            made = answers.greedy(run.model, tokenizer, ids, settings.max_tokens, world, shares)
        if warning := made.warning(f"evaluate.max_tokens={settings.max_tokens}"):
            run.say.line(warning)
        score = None
        with world.agreeing("judging held-out answers"):
            if world.rank == 0:
                score = self._mean_score(prompts, tokenizer, made.texts)
        score = json.loads(world.broadcast_text(json.dumps(score)))
        run.tracker.record("evaluation", step=run.own_step, held_out_score=score, answers_cut=made.cut)
        return values | {"held_out_score": score}

    def _mean_score(self, prompts: Prompts, tokenizer: Tokenizer, texts: list[str]) -> float | None:
        questions = []
        for row, text in enumerate(texts):
            asked = asked_of(prompts.record(row), self.run.config.data, tokenizer)
            questions.append(Question(prompts.location(row), asked, [text], prompts.record(row)))
        scores = [one.score for (one,) in scores_of(self.judge, questions) if one.score is not None]
        return sum(scores) / len(scores) if scores else None


@dataclass
class Rounds:
    """The rounds of a run, of which `loop` trains each.

    Args:
        history: of every finished round; number 0 is the policy before the first.
        drawings: rounds that this process draws, or has drawn and not yet collected.
    """

    run: TrainingRun
    collector: Collector
    loop: TrainingLoop
    history: list[RoundFigures] = field(default_factory=list)
    drawings: dict[int, Drawing | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.run.config
        self.settings, self.steps = config.rollouts, config.steps_per_round
        self.folder = self.run.folder / "rounds"

    def train(self) -> None:
        """Takes all rounds that are left, or those until one is undone (rollouts.after_undone=stop)."""
        try:
            self._take()
        finally:
            for drawing in filter(None, self.drawings.values()):
                drawing.end()

    def _take(self) -> None:
        run, rounds = self.run, self.settings.rounds
        for number in range(self._recall() + 1, rounds + 1):
            if self.history[-1].undone and self.settings.after_undone == "stop":
                self.loop.ended, run.steps = f"round {number - 1} of {rounds} was undone", run.progress.step
                run.say.line(f"training ends: {self.loop.ended} (rollouts.after_undone=stop)")
                break
            self._round(number)
        self.loop.final_step = run.progress.best_step = self._kept().number * self.steps

    def _recall(self) -> int:
        """Takes up what is known of the rounds so far, and returns the last that is finished."""
        run, step = self.run, self.run.progress.step
        if not run.progress.before:
            self.loop.evaluate_before()
        self.history = [RoundFigures(0, _known(run.progress.before))]
        if step == 0:
            run.optimizer.init(run.model.trainable_parameters())
            run.save()  # to which the first round goes back, if it is undone
        finished: list[RoundFigures] = []
        for number in range(1, step // self.steps + 1):
            text = run.world.broadcast_text(_read(self._file_of(number)) if run.world.rank == 0 else "")
            if not text:
                break
            finished.append(_figures(self._file_of(number), text))
        if len(finished) < (step - 1) // self.steps:
            raise AgreedError(
                f"{self._file_of(len(finished) + 1)} is missing, of a round before step {step}; put it back, "
                "or start a new run"
            )
        self.history += finished
        if run.lock is not None:
            for path in self.folder.glob("*/" + ROUND):
                if path.parent.name.isdecimal() and int(path.parent.name) > len(finished):
                    path.unlink()
        if finished:
            self.loop.latest = dict(finished[-1].held_out)
            if finished[-1].undone and step == len(finished) * self.steps:  # a fault may have come before that was done
                self._undo()
        return len(finished)

    def _round(self, number: int) -> None:
        """One round, from its answers to the verdict."""
        run, began = self.run, time.perf_counter()
        first_step, run.steps = (number - 1) * self.steps, number * self.steps
        run.progress.best_step = self._kept().number * self.steps  # its checkpoint is kept
        if run.model is not self.collector.sampler.model:  # a pipeline's blocks have moved
            sampler = Sampler(run.model, self.collector.sampler.tokenizer, self.settings, world=run.world)
            self.collector = replace(self.collector, world=run.world, sampler=sampler)
        collected = self._collected(number)
        groups, pairs, seconds = collected.groups, collected.pairs, collected.seconds
        staleness = int(collected.version != self._kept().number)
        figures = figures_of(groups, pairs, kl_of(run, groups))
        self._show(number, figures)
        begins = run.progress.step == first_step
        if begins:  # an order of its own
            run.progress.epoch, run.progress.cursor = run.progress.epoch + 1, 0
        data = self._data(number, groups, pairs)
        if data is not None:
            self._prepare(number, data)
        if self.settings.overlap and begins and number < self.settings.rounds:
            self._draw(number + 1)
        training = time.perf_counter()
        if data is not None:
            self.loop.train()  # a rank goes on to it while others draw: nothing is exchanged in between
        else:
            run.say.warning(f"round {number}: {why_nothing(groups, self.settings)}; nothing is trained", first_step)
            run.progress.step = run.steps
            if run.reference is not None:  # its turn is the round's, whatever was learnt
                run.reference.follow(run.progress.step)
            self.loop.latest = dict(self._kept().held_out)
            run.save()
        seconds["training_seconds"] = time.perf_counter() - training
        seconds["round_seconds"] = time.perf_counter() - began
        self._judge(number, staleness, figures, seconds, self.collector.examples(pairs))

    def _collected(self, number: int) -> Collected:
        """A round's answers; drawn here, unless they were drawn before.

        Raises:
            AgreedError: training has begun, and the answers are gone.
        """
        run, first_step, folder = self.run, (number - 1) * self.steps, self.collector.folder_of(number)
        if number not in self.drawings and run.progress.step == first_step:
            was_drawn = self.settings.overlap and number > 1
            if was_drawn and not self._drawn_by(number):  # lost with the disk that kept them
                text = f"{folder} lacks answers that were drawn before; the weights as they are draw them"
                run.say.warning(text, run.progress.step)
                was_drawn = False
            if not was_drawn:
                self._draw(number, waits=True)
        drawn_by = self._drawn_by(number)
        if not drawn_by:
            raise AgreedError(
                f"{folder} lacks the answers that step {run.progress.step} was trained on; put them back, or "
                f"remove the checkpoints after step {first_step}"
            )
        return self.collector.collect(number, drawn_by, self.drawings.pop(number, None))

    def _drawn_by(self, number: int) -> str:
        """Digest of the weights that drew a round's answers, all of them; nothing where some are missing."""
        folder, world = self.collector.folder_of(number), self.run.world
        return world.broadcast_text(policy_of(folder) if world.rank == 0 else "")

    def _own_digest(self) -> str:
        """Of the weights as they are: those that all ranks hold, or the parts of all ranks together."""
        world, weights = self.run.world, adapter_files.trainable(self.run.model)
        if not world.divides_model:
            return adapter_files.digest(weights)
        return key_of(world.gather_text(adapter_files.digest(weights), "digests of the weights"))

    def _draw(self, number: int, waits: bool = False) -> None:
        """Draws a round's answers with the weights as they are; files of other weights go."""
        run, world, folder = self.run, self.run.world, self.collector.folder_of(number)
        sampled = self._drawn_by(number)
        own = self._own_digest()
        if sampled and sampled != own:
            run.say.warning(f"{folder} is of other weights, and is made again", run.progress.step)
            if run.lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
            world.gather_text("gone", "every disk's round")
        policy = Policy(own, self._kept().number)
        self.drawings[number] = self.collector.draw(number, policy, waits)

    def _data(self, number: int, groups: list[Group], pairs: list[Pair]) -> Dataset | None:
        """What a round trains on: its pairs, or for train.loss=grpo its groups; None where it has nothing to learn."""
        folder = self.collector.folder_of(number)
        if self.run.config.record_kind == "group":
            learnt = groups_of(groups, self.settings)
            return groups_in_memory(str(folder / SAMPLES), learnt, []) if learnt else None
        if not pairs:
            return None
        pieces = [
            np.array(ids, np.int32)
            for pair in pairs
            for ids in (pair.prompt_tokens, pair.chosen.tokens, pair.rejected.tokens)
        ]
        return in_memory(str(folder / PAIRS), "preference", "tokens", pieces, 0, [], 0)

    def _prepare(self, number: int, data: Dataset) -> None:
        """Makes ready to train on a round's data."""
        run = self.run
        run.world.require_equal(f"answers of round {number}", data.digest)
        run.inputs = replace(run.inputs, data=data)
        if run.local_sgd is not None:
            self._part_ranks(run.local_sgd, data, (number - 1) * self.steps)
        self.loop.batches = Batches.prepare(run, None)
        self.loop.learner.make = self.loop.batches.make

    def _part_ranks(self, before: LocalSGD, data: Dataset, first_step: int) -> None:
        """Independent ranks begin with a round's pairs, or go on inside of them, with the speeds measured so far."""
        run = self.run
        kept = run.resumed or {"momentum": before.merger.momentum, "feedback": before.merger.feedback}
        run.local_sgd = LocalSGD(run.config, run.world, run.plan, run.model, data.lengths, run.steps, first_step)
        run.local_sgd.resume(run.progress, kept)
        run.resumed = {}

    def _judge(
        self,
        number: int,
        staleness: int,
        samples: SampleFigures,
        seconds: dict[str, float],
        examples: list[dict[str, str]],
    ) -> None:
        """Keeps a round or undoes it, and writes down why. staleness: rounds learnt between drawing and training."""
        run, latest = self.run, self.loop.latest
        lost = losses_of(self.history, _known(latest), self.settings.tolerance)
        self.history.append(RoundFigures(number, _known(latest), samples, bool(lost)))
        warnings = warnings_of(self.history, self.settings.tolerance)
        for warning in warnings:
            run.say.warning(f"round {number}: {warning}", run.own_step)
        verdict = {"round": number, "staleness": staleness, "undone": bool(lost), "why": lost, "warnings": warnings}
        known = verdict | {"held_out": latest, "samples": asdict(samples)}
        answers = {"answers": asdict(samples), "examples": examples}
        run.tracker.record("round", step=run.own_step, **verdict, held_out=latest, **answers, **seconds)
        with run.world.agreeing(f"writing {ROUND}"):
            if run.lock is not None:
                files.write_atomically(self._file_of(number), json.dumps(known, indent=2) + "\n")
        if lost:
            run.say.warning(
                f"round {number} is undone: {'; '.join(lost)} (rollouts.tolerance={self.settings.tolerance:g})",
                run.progress.step,
            )
            self._undo()

    def _undo(self) -> None:
        """Goes back to the weights, the optimizer's state and the merges' momentum of the last round that was kept."""
        run, kept = self.run, self._kept()
        path = run.folder / "checkpoints" / f"step-{kept.number * self.steps:08d}"
        restore_learned(path, run.model, run.optimizer, run.world)
        if run.reference is not None:
            run.reference.follow(run.progress.step)
        run.feedback.clear()
        if run.local_sgd is not None:  # what the round did to the merges that follow goes with it
            own, merger, run.resumed = own_part_at(path, run.world), run.local_sgd.merger, {}
            merger.momentum, merger.feedback = own.get("momentum", {}), own.get("feedback", {})
        self.loop.latest = dict(kept.held_out)
        run.save()

    def _kept(self) -> RoundFigures:
        """The last round that was not undone."""
        return next(one for one in reversed(self.history) if not one.undone)

    def _file_of(self, number: int) -> Path:
        return self.collector.folder_of(number) / ROUND

    def _show(self, number: int, figures: SampleFigures) -> None:
        score = "none is scored" if figures.score is None else f"mean score {figures.score:.4g}"
        kl = "" if figures.kl is None else f", KL {figures.kl:.3g}"
        failed = f", {figures.failed:,} left out by the judge" if figures.failed else ""
        cut = round(figures.unended * figures.samples)
        failed += f", {cut:,} cut by rollouts.max_tokens={self.settings.max_tokens}" if cut else ""
        self.run.say.line(
            f"round {number} of {self.settings.rounds}: {figures.samples:,} answers, {score}{failed}; "
            f"{figures.pairs:,} pairs of {figures.accepted:.0%} of the prompts; {figures.tokens:.4g} tokens an answer, "
            f"{figures.duplicates:.0%} duplicates, entropy {figures.entropy:.3g}{kl}",
            "bold",
        )


class Verdict(TypedDict):
    """What of round.json a run needs to go on."""

    round: int
    undone: bool
    held_out: dict[str, float | None]
    samples: SampleFigures


def _figures(path: Path, text: str) -> RoundFigures:
    """What round.json says.

    Raises:
        AgreedError: it is not what a round writes; all ranks have the same text.
    """
    try:
        read = TypeAdapter(Verdict).validate_python(json.loads(text))
    except (ValueError, RecursionError) as error:
        fault = str(error).partition("\n")[0]
        raise AgreedError(f"{path} is not what a round writes: {fault}; start a new run") from None
    return RoundFigures(read["round"], _known(read["held_out"]), read["samples"], read["undone"])


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}


def _read(path: Path) -> str:
    """A file's text; nothing where there is none, and what is no JSON where it is no text."""
    try:
        return read_file.read_text(path, "round")
    except OSError:
        return ""
    except UserError:
        return "{"


def _judge_of(config: Config, section: str, prompts: Prompts, tokenizer: Tokenizer) -> Judge:
    """The judge that rollouts.judge or evaluate.judge names, tried on the first prompt with its own answer."""
    named = config.evaluate.model_copy(update={"judge": getattr(config, section).judge})
    judge = judge_of(config.model_copy(update={"evaluate": named}), f"{section}.judge", grades=True)
    record = prompts.record(0)
    answer = record.get(ANSWER)
    asked = asked_of(record, config.data, tokenizer)
    require_scores(judge, Question(prompts.location(0), asked, ["" if answer is None else str(answer)], record))
    return judge


def train(run: TrainingRun, evaluator: Evaluator) -> TrainingLoop:
    """All rounds of a run, resumed or new; its last weights are in the model then.

    Raises:
        UserError, AgreedError, Stopped: as sampling, judging and training.
    """
    config, inputs, world = run.config, run.inputs, run.world
    prompts, tokenizer, rollouts = inputs.data, inputs.tokenizer, config.rollouts
    assert isinstance(prompts, Prompts) and tokenizer is not None
    with world.agreeing("opening the prompts"):
        if run.plan.strategy == "sharded":
            raise UserError("the plan is sharded, and ranks draw with whole models, or pipelined; take pipelined")
        section = "rollouts" if rollouts.judge is not None else "evaluate"
        judge = judge_of_held_out = _judge_of(config, section, prompts, tokenizer)
        is_other = rollouts.judge not in (None, config.evaluate.judge)
        if inputs.held_out is not None and (is_other or rollouts.overlap):  # it may be asked while the first one scores
            judge_of_held_out = _judge_of(config, "evaluate", prompts, tokenizer)
        judges_beside = not (rollouts.judge or config.evaluate.judge or "").startswith(REWARD_MODEL)
    loop = TrainingLoop.over(run, None, HeldOut(run, evaluator, judge_of_held_out))
    sampler = Sampler(run.model, tokenizer, rollouts, world=world)
    keeps_disk = run.lock is not None
    collector = Collector(config, run.folder, world, keeps_disk, sampler, prompts, judge, judges_beside, run.say)
    Rounds(run, collector, loop).train()
    return loop
