"""Tasks of lm-evaluation-harness, with its own figures for them, by a run's model on all ranks."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.data import tokenizer as tokenizer_module
from lib.data.tokenize import Encoder
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.harness_model import HarnessModel
from lib.evaluate.harness_worker import HarnessWorker
from lib.evaluate.whole_model import WholeModel
from lib.system import files
from lib.system.terminal import Terminal

PACKAGE = "lm_eval"


@dataclass(frozen=True)
class Tasks:
    """What is asked of the harness.

    Args:
        names: of tasks or groups.
        folder: with tasks' YAML files, besides those that the package brings.
        shots: examples before each question; None for as many as a task says.
        limit: most questions of each task.
        chat: questions as chats, by the model's template.
    """

    names: tuple[str, ...]
    folder: Path | None
    shots: int | None
    limit: int | None
    chat: bool


def evaluate_tasks(subject: WholeModel, tasks: Tasks, out: Path, world: World) -> dict[str, Any] | None:
    """The harness's results, also written to `out`; what is finished is kept beside it until then.

    Returns:
        On rank 0 the results, as lm_eval.simple_evaluate returns them; elsewhere nothing.

    Raises:
        UserError, AgreedError: the package or a task is missing, or a task and the model do not fit.
    """
    settings, kept = subject.settings, out.with_name(f"{out.name}.partial")
    with world.agreeing("reading the model"):
        if world.rank == 0:
            _check(tasks, out)
        tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
        if tokenizer is None:
            raise UserError(f"{subject.name} has no tokenizer, which tasks need")
        model, digest = subject.load(world), subject.digest()
        if tasks.chat:
            end = tokenizer_module.vocabulary(settings.model)["eos_token_id"]
            encoder = Encoder(tokenizer, settings.data, end)
            if not encoder.template.is_used:
                raise UserError(f"--chat: {settings.model.path} has no chat template; give data.chat_template=FILE")
            encoder.stop_generation()
    world.require_equal("model or settings", digest)
    worker = HarnessWorker(model, tokenizer, settings, world, kept, digest)
    if world.rank:
        worker.follow()
        return None
    error: str | None = "rank 0 ended; its own message says why"
    try:
        results = _run_harness(worker, tokenizer, subject, tasks)
        files.write_atomically(out, json.dumps(results, indent=2, default=str) + "\n")
        error = None
    except UserError as fault:
        error = str(fault)
        raise
    finally:
        worker.end(error)
    shutil.rmtree(kept, ignore_errors=True)
    return results


def _check(tasks: Tasks, out: Path) -> None:
    """Looks for what would fail only after the model is loaded."""
    if tasks.folder is not None and not tasks.folder.is_dir():
        raise UserError(f"--tasks-folder {tasks.folder}: no such folder")
    files.require_absent(out)
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(
            f"--tasks needs the package {PACKAGE}; run .venv/bin/python -m pip install -c constraints.txt {PACKAGE}"
        )


def _run_harness(worker: HarnessWorker, tokenizer: Tokenizer, subject: WholeModel, tasks: Tasks) -> dict[str, Any]:
    """What lm_eval finds of the tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Adapter(HarnessModel, LM):
        """The harness takes what is an LM of its own."""

    # A look at the thousands of tasks that the package brings takes ten seconds: only where one of them is meant.
    include = None if tasks.folder is None else str(tasks.folder)
    manager = TaskManager(include_path=include, include_defaults=include is None)
    if include is not None and _unknown(tasks, manager):
        manager = TaskManager(include_path=include)
    if unknown := _unknown(tasks, manager):
        place = f"{tasks.folder} and {PACKAGE}" if tasks.folder else f"{PACKAGE}; --tasks-folder DIR adds your own"
        raise UserError(f"--tasks {','.join(unknown)}: no such task in {place}")
    try:
        manager.load(list(tasks.names))
    except Exception as error:  # whatever a task's file or its data are wrong with
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--tasks {','.join(tasks.names)}: cannot be loaded: {said[-1]}") from error
    results: dict[str, Any] = simple_evaluate(
        model=Adapter(worker.ask, tokenizer, subject.settings, subject.name),
        tasks=list(tasks.names),
        num_fewshot=tasks.shots,
        limit=tasks.limit,
        apply_chat_template=tasks.chat,
        log_samples=False,
        task_manager=manager,
    )
    return {**results, "seconds": worker.seconds}


def _unknown(tasks: Tasks, manager: Any) -> list[str]:
    return [name for name in tasks.names if not manager.match_tasks([name])]


def figures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The metrics of each task or group, as the harness names them: {"arc": {"acc,none": 0.5, ...}}."""
    return {
        task: {
            name: value
            for name, value in of_task.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, of_task in results["results"].items()
    }


def show(say: Terminal, name: str, results: dict[str, Any], out: Path) -> None:
    """A table for people, and a line of JSON."""
    rows: list[Sequence[str]] = []
    metrics = figures(results)
    for task, values in metrics.items():
        for metric, value in values.items():
            measure, _, which = metric.partition(",")
            if measure.endswith("_stderr") or not which:
                continue
            error = values.get(f"{measure}_stderr,{which}")
            shown = measure if which == "none" else f"{measure} ({which})"
            rows.append([task, shown, f"{value:.4f}", "-" if error is None else f"{error:.4f}"])
    say.table(f"{name} on tasks of lm-evaluation-harness", ["task", "metric", "value", "standard error"], rows, 2)
    say.line(f"{out}: all results")
    say.record({"run": name, "tasks": metrics, "seconds": results["seconds"]})
