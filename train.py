#!/usr/bin/env python3
"""Tandem: preference training on machines that do not match.

python train.py                                            the quickstart, offline, in about two minutes
python train.py --config configs/X.yaml train.beta=0.2     any setting as key=value
python train.py --config configs/X.yaml --dry-run          the plan and the expected time (--measure: from three steps)
python train.py --resume runs/NAME                         go on from the last good checkpoint
mpirun -n 2 python train.py 'plan.shares=[24,8]'           the same file on two unequal ranks, 24 + 8 pairs a step
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lib.config import command_line
from lib.config import load as settings
from lib.system import mpi_and_blas

if TYPE_CHECKING:
    from lib.config.settings import Config
    from lib.distributed.world import World
    from lib.report.console import RunConsole
    from lib.training.run import TrainingRun


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input, 1 anything else."""
    launch = run = None
    try:
        options = command_line.train_options(arguments, __doc__)
        launch = mpi_and_blas.launch_environment()
        mpi_and_blas.prepare()
        from lib.distributed.world import start  # brings MLX: --help and a misspelt option answer at once

        world = start(launch)
        with world.agreeing("the configuration"):
            config = command_line.train_config(options, world.rank == 0)
        name = world.broadcast_text(config.run.name or "")  # it may hold the time, which ranks see differently
        run = Path(config.run.dir) / name
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        world.require_equal("configuration", settings.learning_digest(config))
        world = dataclasses.replace(world, timeout_seconds=config.sync.timeout_seconds)
        train(config, world, options.resume is not None, options.dry_run, options.measure)
    except (Exception, KeyboardInterrupt) as error:
        return mpi_and_blas.report_end(error, launch, run)
    return 0


def train(config: Config, world: World, resume: bool, dry_run: bool, measure: bool = False) -> None:
    """One run, from its configuration to the finished adapter."""
    from lib.evaluate.evaluator import Evaluator
    from lib.report import console, run_report
    from lib.rollouts import rounds
    from lib.training import run_end, run_inputs, trial
    from lib.training.loop import TrainingLoop

    def three_steps(folder: str) -> None:
        train(settings.of_trial(config, folder), world, False, False)

    tried = trial.step_seconds(world, three_steps) if measure else None
    launched, say = time.perf_counter(), console.RunConsole(world.rank, tried)
    if not resume:
        config = config.model_copy(update={"model": run_inputs.with_compute_type(config.model, world, say.line)})
    if (run := prepare(config, world, say, resume, dry_run)) is None:
        return
    with contextlib.closing(run):  # frees its folder, whatever ends it
        run.counted_until = launched

        # Reference: the policy before training, or another model.
        of_rows, of_held_out = run.compute_references(say.counting)

        # Resume: weights, optimizer, position and counters of the last good checkpoint.
        if resume:
            run.resume()
        run.record_start(resume)
        say.record_in(run.tracker, run.progress.step, each_rank=run.local_sgd is not None)

        # Training: once in a while the model is evaluated, and a checkpoint is written.
        evaluator = Evaluator(run, of_held_out)
        if config.rollouts.rounds:
            loop = rounds.train(run, evaluator)
        else:
            loop = TrainingLoop(run, of_rows, evaluator)
            if run.is_new:
                loop.evaluate_before()
                evaluator.show("before")
            loop.train()
        evaluator.show("after")

        # Finish: the adapter where mlx-lm finds it, the figures, the curves.
        run_end.finish(run, loop.latest, loop.final_step)
        if world.rank == 0 and config.run.pages:
            run_report.write(run.folder)
        console.show_end(say, run.folder, config.train.loss)


def prepare(config: Config, world: World, say: RunConsole, resume: bool, dry_run: bool) -> TrainingRun | None:
    """Data, plan and model, the same on all ranks, and the run's folder; None where nothing is to be trained."""
    from lib.distributed.world import host_names
    from lib.evaluate import judges
    from lib.evaluate.evaluator import digest_of
    from lib.report import console, trackers
    from lib.training import checkpoint, run, run_inputs, run_plan, trial

    # Data: every rank reads it, and all make sure that they read the same.
    folder = Path(config.run.dir) / str(config.run.name)
    with world.agreeing("reading the data"), say.doing("reading the data"):
        if not (resume or dry_run):
            checkpoint.require_free(folder)
        sinks = trackers.Trackers(config.run.sinks if world.rank == 0 else (), folder)
        read = run_inputs.read_inputs(config, say.line)
        judges.require_judges(config.evaluate, config.rollouts.judge, read.data, read.held_out)
    steps = config.steps_over(len(read.data))
    world.require_equal("tokenised training data", read.data.digest)
    world.require_equal("held-out data or questions", digest_of(read.valid or read.held_out, read.questions))
    if resume and checkpoint.is_finished(folder, steps, config.train.patience, world):
        say.line(f"{folder} has made all of its {steps} steps, or ended early: nothing is left (train.steps=N goes on)")
        console.show_end(say, folder, config.train.loss)
        return None

    # Plan: the share of every rank.
    hosts = host_names(world)
    plan = run_plan.plan_run(config, world, hosts, read.data, folder if resume else None)
    console.show_run(say, folder, config.model, config.train, plan, read, steps)
    console.show_plan(say, config.train, config.cost, plan, read, config.data.max_length, steps)
    console.attend_displays(say, config.metal, world, hosts, dry_run)

    # Model: the base, and what is trained of it; in parts, where the plan divides it.
    with world.agreeing("loading the model"), say.doing("loading the model"):
        lazy, recomputes = dry_run or plan.divides_model, plan.checkpoints_blocks(world.rank)
        model = run_inputs.load_policy(config.model, config.train.seed, lazy, recomputes)
    pace, chosen = trial.pace(config, world, plan, model, read, say.tried_step_seconds, resume)
    expected = console.expected(config.model, config.train, config.evaluate, read, chosen, pace, steps)
    console.show_model(say, model, plan, chosen, expected)
    if dry_run:
        say.line("dry run: nothing is trained or written")
        return None
    opened = run.open_run(config, world, hosts, read, chosen, model, say)
    opened.tracker.subscribers += [say.take, sinks.take]
    opened.claim(resume)  # the run's folder has one owner, on every disk
    return opened


if __name__ == "__main__":
    sys.exit(mpi_and_blas.status_of(main))
