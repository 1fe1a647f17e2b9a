"""Blocks that move from one rank of a pipeline to another while a run goes on.

Nothing is started anew: a checkpoint is written, every rank lets go of its blocks, reads those of the new cut, and
takes weights and optimizer from the checkpoint, as a run that is resumed does.
"""

from __future__ import annotations

import gc
import json
from dataclasses import asdict

import mlx.core as mx
import mlx.nn as nn

from lib.distributed import sharded_model
from lib.distributed.pipelined_world import PipelinedWorld
from lib.errors import AgreedError
from lib.model import backward_order
from lib.plan.pipeline_replan import MovedCut, moved_cut, moved_plan
from lib.system import files
from lib.training import preload, reference_model, report
from lib.training.resume import restore_all, restore_reference
from lib.training.step import make_optimizer
from lib.training.step_retries import Learner
from lib.training.training_run import TrainingRun


class CutWatch:
    """Finds a better cut for the stages of a run as fast as they are now, the same one on every rank.

    Ranks exchange the seconds of their steps every `plan.replan_steps` steps; after each move only every twice as many,
    so that a cut which does not keep what it promised costs little.
    """

    def __init__(self, run: TrainingRun):
        self.run, self.settings = run, run.config.plan
        self.is_watched = bool(run.plan.stages)
        self.patience = run.config.plan.replan_steps
        self.seconds: list[float] = []  # of this rank's last steps
        self.is_warm = False  # the first step of a cut compiles and allocates

    def observe(self, step: int, compute_seconds: float) -> MovedCut | None:
        """The cut that pays from here on, if there is one. compute_seconds: this rank's own."""
        if not self.is_watched:
            return None
        if self.is_warm:
            self.seconds.append(compute_seconds)
        self.is_warm = True
        if len(self.seconds) < self.patience:
            return None
        moved = self._agreed(step)
        self.seconds.clear()
        if moved is not None and not (self.settings.replan and self.settings.shares is None):
            fixed = "plan.shares" if self.settings.shares is not None else "plan.replan=false"
            before = self.run.schedule.at(step)
            self.run.say.warning(f"{fixed} keeps blocks {list(before.blocks)}: {moved.reason(before)}", step)
            self.is_watched = False  # once is enough
            return None
        return moved

    def moved(self) -> None:
        """The run goes on in another cut."""
        self.patience *= 2
        self.is_warm = False

    def _agreed(self, step: int) -> MovedCut | None:
        """Rank 0's decision, from what all ranks took; unlike machines may round unlike."""
        run, world = self.run, self.run.world
        assert isinstance(world, PipelinedWorld)
        rows = [[0.0] * (self.patience + 1) for _ in range(world.size)]
        rows[world.rank] = [*self.seconds, world.loading_seconds]
        *seconds, loading = zip(*world.all_sum(mx.array(rows), "the seconds of every stage").tolist(), strict=True)
        decision = None
        if world.rank == 0:
            plan = run.schedule.at(step + 1)
            decision = moved_cut(plan, seconds, self.settings, run.steps - step, max(loading))
        text = world.broadcast_text(json.dumps(decision and asdict(decision)))
        fields = json.loads(text)
        if fields is None:
            return None
        return MovedCut(**{**fields, "blocks": tuple(fields["blocks"]), "slowdowns": tuple(fields["slowdowns"])})


def move_blocks(run: TrainingRun, learner: Learner, moved: MovedCut) -> Learner:
    """Takes every rank to its blocks of another cut, from the checkpoint of the last step; what learns with them.

    Raises:
        AgreedError: the model's files or the checkpoint can no longer be read.
    """
    step, config, world, make = run.progress.step, run.config, run.world, learner.make
    before = run.schedule.at(step + 1)
    run.schedule.move(moved_plan(before, moved, step))
    run.plan = plan = run.schedule.at(step + 1)
    report.record_moved_cut(run, before, plan, moved)
    # What the old blocks and their step hold goes before anything of the new ones is read.
    vars(learner).clear()
    ends_early = getattr(run.model, "ends_early", False)
    run.model, run.asked_reference, run.optimizer = nn.Module(), None, make_optimizer(config.train)
    gc.collect()
    mx.clear_cache()
    with run.say.doing("moving blocks"):
        with world.agreeing("loading other blocks"):
            model = preload.policy(config, lazy=True)
            if plan.checkpoints_blocks(world.rank):
                backward_order.checkpoint_blocks(model)
        run.world = world = sharded_model.divided(model, plan.blocks, world, config.metal.wired)
        run.model, model.ends_early = model, ends_early
        run.asked_reference = reference_model.asked(config, model, run.inputs.data, world, run.layout)
        path = run.folder / "checkpoints" / f"step-{step:08d}"
        restore_all(path, model, run.optimizer, run.progress, world)
        if run.reference is not None:
            restore_reference(path, run.reference, world)
    try:
        with world.agreeing("keeping the plan"):
            if run.lock is not None:
                files.write_atomically(run.folder / "plan.json", json.dumps(plan.to_dict(), indent=2) + "\n")
    except AgreedError as fault:
        run.say.warning(f"{fault}; a run that is resumed begins with the cut of its first plan", step)
    return Learner(run, make)
