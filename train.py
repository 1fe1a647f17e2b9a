#!/usr/bin/env python3
"""Tandem: preference training on machines that do not match.

python train.py                                            the quickstart, offline, in about two minutes
python train.py --config configs/X.yaml train.beta=0.2     any setting as key=value
python train.py --config configs/X.yaml --dry-run          the plan, and what would be trained
python train.py --resume runs/NAME                         go on from the last good checkpoint
mpirun -n 2 python train.py 'plan.shares=[24,8]'           the same file on two unequal ranks, 24 + 8 pairs a step
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.config import load as settings
from lib.config import train_arguments
from lib.config.schema import Config
from lib.errors import Stopped, UserError
from lib.system import metal, mpi_and_blas, out_of_memory, terminal

if TYPE_CHECKING:
    import numpy as np

    from lib.distributed.world import World
    from lib.training.step import StepResult

PREFETCHED = 2  # batches made ahead of the step


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input, 1 anything else."""
    launch, again = None, "--resume"
    try:
        options = train_arguments.parse(arguments, __doc__)
        launch = mpi_and_blas.launch_environment()
        mpi_and_blas.prepare(metal.relaxes(options))
        from lib.distributed import (
            world as world_module,  # MLX comes in here: --help and a misspelt option answer at once
        )

        world = world_module.start(launch)
        with world.agreeing("the configuration"):
            config = train_arguments.read_config(options)
        name = world.broadcast_text(config.run.name or "")  # it may hold the time, which ranks see differently
        again = f"--resume {Path(config.run.dir) / name}"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
        world.require_equal("configuration", settings.learning_digest(config))
        world = dataclasses.replace(world, timeout_seconds=config.sync.timeout_seconds)
        train(config, world, resume=options.resume is not None, dry_run=options.dry_run)
    except UserError as error:
        if launch is None or launch.rank == 0 or type(error) is UserError:  # an agreed error is told once
            terminal.error(str(error))
        return mpi_and_blas.leave(2, launch, alone=type(error) is UserError)
    except OSError as error:  # a full or read-only disk: what was saved before is whole
        terminal.error(f"{error.filename or 'a file'}: {error.strerror or error}; mend that, then go on with {again}")
        return mpi_and_blas.leave(2, launch, alone=True)
    except (out_of_memory.OutOfMemory, RuntimeError, MemoryError) as error:
        if not out_of_memory.told_by(error):
            raise
        terminal.error(f"{out_of_memory.advice(error)}; go on with {again}")
        return mpi_and_blas.leave(1, launch, alone=True)
    except (Stopped, KeyboardInterrupt) as error:
        terminal.error(f"{str(error) or 'interrupted'}; go on from the last checkpoint with {again}", "stopped")
        return 1
    return 0


def train(config: Config, world: World, resume: bool, dry_run: bool) -> None:
    """One run, from its configuration to the finished adapter."""
    import numpy as np

    from lib import errors
    from lib.data.micro_batches import MicroBatches, lengths_and_cost
    from lib.data.prefetch import prefetch
    from lib.data.row_order import Position, advance, assign_micro_batches, epoch_order, global_batch
    from lib.data.row_order import micro_batches as micro_batches_of
    from lib.data.streaming import StreamedDataset
    from lib.distributed import heartbeat, sharded_model
    from lib.distributed import world as world_module
    from lib.evaluate import answers as answers_module
    from lib.evaluate import metrics
    from lib.model import adapter_files, adapters, load
    from lib.model.token_stream import length_multiple
    from lib.plan.first_plan import first_plan, memory_limit
    from lib.plan.memory import Rows
    from lib.plan.memory_ceilings import Memory
    from lib.plan.replan import Schedule
    from lib.system import provenance
    from lib.telemetry import trackers
    from lib.telemetry.run_records import PerformanceTracker
    from lib.training import checkpoint, console, preload, report
    from lib.training import reference as scoring
    from lib.training import resume as resume_module
    from lib.training.learner import Learner
    from lib.training.local_sgd import Rounds
    from lib.training.step import is_compiled, make_optimizer, make_step

    launched = time.perf_counter()
    folder = Path(config.run.dir) / str(config.run.name)
    say = console.Report(world, config.run.log_every)

    # ---- Data: every rank reads it, and all make sure that they read the same ----------------------------------------

    with world.agreeing("reading the data"), say.doing("reading the data"):
        feed = trackers.Feed(config.run.sinks if world.rank == 0 else (), folder)
        inputs = preload.inputs(config, say.line)
    tokenizer, data, valid, questions = inputs.tokenizer, inputs.data, inputs.valid, inputs.questions
    world.require_equal("tokenised training data", data.digest)
    world.require_equal("held-out data or questions", metrics.digest_of(valid, questions))
    batch_size = config.train.global_batch_size
    steps = config.train.steps or config.train.epochs * -(-len(data) // batch_size)
    checkpoint_every = config.checkpoint.every or min(100, -(-steps // 10))

    # ---- Plan: who takes how much ------------------------------------------------------------------------------------

    hosts = world_module.host_names(world)
    largest = Rows.of(data.prompts, data.seen, data.scored_tokens, length_multiple(config.data))
    plan = first_plan(config, world, hosts, data.lengths, largest, folder if resume else None)
    schedule = Schedule(plan, config.plan, lead=PREFETCHED + 1, steps=steps)
    report.show_run(say, config, plan, data, valid, steps)
    report.warn_of_displays(say, config, world, hosts, dry_run)

    # ---- Model: the base, and what is trained of it ------------------------------------------------------------------

    with world.agreeing("loading the model"), say.doing("loading the model"):
        model = preload.policy(config, lazy=dry_run or plan.division is not None)
        if plan.gradient_checkpointing:
            adapters.checkpoint_blocks(model)
        optimizer = make_optimizer(config.train)
    report.show_model(say, config, model)
    if dry_run:
        say.line("dry run: nothing is trained or written")
        return
    world = sharded_model.divided(model, plan.division, world, config.metal.wired)
    workers = world.workers  # those that take different rows: all ranks, or, where they share one model, all as one
    multiple, shares_prompts, why_not = scoring.layout(model, config.data, world)
    if why_not:
        say.line(f"prompts run once for each completion: {why_not}")
    world.require_equal("model files", load.fingerprint(config.model, config.train.seed))
    world.require_equal("initial weights", adapter_files.digest(world.alike(adapter_files.trainable(model))))

    # ---- The run's folder has one owner, on every disk -----------------------------------------------------------------

    lock = checkpoint.open_run(folder, config, plan.to_dict(), resume, world)  # one rank on every disk has it
    heartbeat.tell(run=str(folder.resolve()))  # where the launcher goes on, if a host is lost

    # ---- Reference: the policy before training, or another model, asked once and kept on disk ------------------------

    reference, valid_reference = (
        None
        if dataset is None or isinstance(dataset, StreamedDataset)
        else scoring.reference_logps(config, model, dataset, world, plan.shares, say.counting)
        for dataset in (data, valid)
    )
    asked = scoring.ask_as_needed(config, model, world) if data.is_estimated else iter  # in each step, of its own rows

    # ---- Resume: weights, optimizer, position and counters of the last good checkpoint -------------------------------

    progress = checkpoint.Progress(data_digest=data.digest)
    apart = Rounds(config, world, plan, model, data.lengths, steps) if plan.strategy == "independent" else None
    feedback: dict[str, Any] = {}  # what compression left out of this rank's gradients so far
    if resume:
        newest, with_parts, warnings = resume_module.choose(folder / "checkpoints", world)
        for warning in warnings:
            say.warning(warning)
        progress, own = resume_module.resume(
            folder / "checkpoints", newest, with_parts, model, optimizer, progress, world
        )
        feedback = own.get("feedback", {})
        if apart is not None:
            apart.resume(progress, own)
        elif progress.rounds:
            raise errors.AgreedError(f"{folder} is a run of ranks that train apart; go on with strategy=independent")
        if progress.schedule and not schedule.restore(progress.schedule):
            say.line("hosts or settings are no longer those of the checkpoint: the work is divided anew")
        if schedule.at(progress.step + 1).gradient_checkpointing and not plan.gradient_checkpointing:
            adapters.checkpoint_blocks(model)
        resume_module.go_back(folder / "logs", progress, world, lock is not None)
        say.line(f"resuming {folder} after step {progress.step} of {steps}")

    # ---- Training ----------------------------------------------------------------------------------------------------

    tracker = PerformanceTracker(folder / "logs" / f"rank-{world.rank:03d}.jsonl", world.rank, hosts[world.rank], feed)
    started = provenance.provenance() | {
        "steps": steps,
        "config": config.model_dump(mode="json"),
        "plan": plan.to_dict(),
    }
    started |= {"resumes": progress.resumes, "resume_ids": progress.resume_ids}
    started |= {"kernel_kills": out_of_memory.kernel_kills()}
    tracker.record("start", **started, resumed_from_step=progress.step if resume else None)
    say.record_in(tracker, progress.step, each_rank=apart is not None)

    def build() -> Callable[..., StepResult]:
        among, rank = (workers, None) if apart is None else (world.alone(), world.rank)
        return make_step(model, optimizer, config.train, among, config.model.dropout > 0, config.sync, feedback, rank)

    # Unlike devices pad unlike, but all ranks assign rows alike.
    lengths, cost = lengths_and_cost(data, int(world.broadcast_text(str(multiple))), shares_prompts)
    passes = metal.training_passes(config.model.method, bool(plan.gradient_checkpointing))
    pace = metal.pace(config, model, data.seen.sum() / len(data), passes, world)
    make = MicroBatches(data, reference, config, multiple, shares_prompts, is_compiled(config.train, workers), pace)
    limit, remembers = memory_limit(config, hosts, world), Memory.of(config, hosts, world.rank, plan)
    learner = Learner(config, model, optimizer, schedule, say, tracker, progress, build, make, asked, remembers, limit)

    def batches() -> Iterator[tuple[int, Position, int, list[float], list[int], list[Any]]]:
        """Every step that is left: its epoch, the position after it, its pairs, what each rank's part costs, and this rank's part."""
        position, epoch = Position(progress.epoch, progress.cursor), -1
        for step in range(progress.step + 1, steps + 1):
            if position.epoch != epoch:
                epoch = position.epoch
                order = epoch_order(data.lengths, config.train.seed, epoch, batch_size, config.data.length_window)
            rows = global_batch(order, position, batch_size)
            assigned, tokens = assign_micro_batches(rows, lengths, schedule.at(step).micro_batch_sizes, cost)
            own, sizes = assigned[workers.rank], schedule.at(step).micro_batch_sizes[workers.rank]
            position = advance(position, len(rows), len(data))
            made = make.of(own, max(sizes, default=1))
            own_rows = [int(row) for batch, _ in made for row in batch.rows]
            yield epoch, position, len(rows), tokens, own_rows, made

    writer = checkpoint.Writer(lock is not None, config.checkpoint.max_lost_seconds)
    answers: list[list[str]] = []  # to the questions, one list an evaluation
    latest: dict[str, float | None] = {}  # held-out metrics

    def evaluate_now() -> dict[str, float | None]:
        """Held-out metrics and greedy answers, over all ranks (never merged, each rank's own); recorded and printed."""
        judges, shares = (world, schedule.at(progress.step + 1).shares) if apart is None else apart.judges()
        with say.doing("evaluating"):
            values, texts = metrics.held_out(
                model, tokenizer, valid, valid_reference, questions, config, judges, shares
            )
        answers.append(texts)
        if values:
            tracker.record("evaluation", step=progress.steps_of(world.rank), **values)
            say.held_out(progress.step, steps, values)
        return values

    def evaluate_and_save(is_due: bool, save_anyway: bool) -> None:
        """Once in a while: held-out metrics, and a checkpoint where one is due or the model is the best so far."""
        nonlocal latest
        writer.record(tracker)
        if is_due:
            latest = evaluate_now()
        # Rank 0's word: ranks that are never merged have losses of their own.
        best = is_due and progress.is_best(
            progress.step, json.loads(world.broadcast_text(json.dumps(latest))).get("loss")
        )
        if save_anyway or best:
            if apart is None:  # replicas on unlike machines drift by roundings, so all take rank 0's weights first
                checkpoint.share(world, model, optimizer)
            own = (
                apart.own(optimizer) if apart else {"feedback": feedback} if config.sync.compression != "none" else None
            )
            plan_now = schedule.at(progress.step + 1).to_dict()
            is_last, state = progress.step == steps, (progress, model, optimizer)
            if fault := checkpoint.save_all(folder, world, writer, *state, config, plan_now, own, tracker, is_last):
                say.warning(fault, progress.step)

    if progress.step == 0:
        progress.before = evaluate_now()
        if not questions:
            answers_module.show_samples(say, tracker, model, tokenizer, valid or data, config, world, "before")
    latest = evaluate_now() if progress.step >= steps else progress.before
    with say.training(progress.step, steps) as show:
        if apart is None:
            with contextlib.closing(prefetch(batches(), PREFETCHED)) as upcoming:
                for epoch, position, pairs, tokens, rows, micro_batches in upcoming:
                    step = progress.step + 1
                    result = learner.learn(step, step - 1, epoch, rows, micro_batches)
                    show(step, result)
                    progress.count(step, position, pairs, result)
                    changed = schedule.observe(step, tokens, result.compute_seconds)
                    progress.schedule = schedule.state(step)
                    report.show_schedule(say, tracker, step, schedule, changed)
                    is_last = step == steps
                    is_due = writer.is_due(result.elapsed_seconds) or step % checkpoint_every == 0
                    evaluation_due = is_last or bool(config.evaluate.every and step % config.evaluate.every == 0)
                    evaluate_and_save(evaluation_due, is_last or is_due)
        else:

            def local_step(step: int, index: int, epoch: int, rows: np.ndarray, micro_batch_size: int) -> StepResult:
                rows = rows[np.argsort(lengths[rows], kind="stable")]
                parts = micro_batches_of(rows, micro_batch_size)
                result = learner.learn(step, index, epoch, rows.tolist(), make.of(parts, micro_batch_size))
                show(index + 1, apart.of_all(result))
                apart.limit(world.rank, learner.most)
                return result

            evaluated = progress.step
            for merged, is_due in apart.train(progress, local_step, checkpoint_every):
                if merged is None:
                    evaluate_and_save(False, is_due)
                    continue
                tracker.log_merge(progress.steps_of(world.rank), merged)
                report.show_merge(say, progress.step, steps, merged, apart.take_remark())
                every = config.evaluate.every or steps
                evaluation_due = progress.step == steps or progress.step // every > evaluated // every
                evaluate_and_save(evaluation_due, is_due)
                evaluated = progress.step

    # ---- Finish: the adapter where mlx-lm finds it, the figures, the curves --------------------------------------------

    if questions:
        answers_module.show_changes(say, tracker, questions, answers[0], answers[-1], config)
    else:
        answers_module.show_samples(say, tracker, model, tokenizer, valid or data, config, world, "after")
    report.warn_of_the_end(say, progress.step, latest.get("kl"))
    totals = tracker.totals() | (latest if apart and apart.method == "none" else {})
    each = world.gather_long_text(json.dumps(totals), "every rank's figures")
    with world.agreeing("finishing"), world.gathering(model.trainable_parameters()) as [weights]:
        if apart is not None and apart.method == "none":
            adapter_files.save_trained(model, config.model, checkpoint.own_folder(folder, world.rank))
        if world.rank == 0:
            adapter_files.save_trained(model, config.model, folder, *weights)
            summary = report.summarise(config, plan, progress, latest, each, time.perf_counter() - launched)
            (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    writer.record(tracker)
    tracker.record("end", step=progress.steps_of(world.rank))
    tracker.gather(world, everything=True)
    tracker.close(progress.step)
    if world.rank == 0:
        from lib.dashboard import run_report

        run_report.leave_pages(tracker.log_path, folder)
        report.show_end(say, tracker.log_path, folder, summary)
    if lock is not None:
        lock.close()


if __name__ == "__main__":
    sys.exit(mpi_and_blas.status_of(main))
