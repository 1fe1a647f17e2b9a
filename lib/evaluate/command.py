"""Held-out evaluation: per-pair rewards against the reference, and greedy answers that can be checked.

    python -m lib.evaluate --run runs/NAME [key=value ...]
    python -m lib.evaluate --model M --reference R --data FILE --per-pair OUT.jsonl [key=value ...]
    python -m lib.evaluate --run runs/NAME --data FILE --score rewards|logps|greedy|samples --out OUT.jsonl
    python -m lib.evaluate --model M --data PROMPTS --make-pairs OUT.jsonl evaluate.completions=8
    python -m lib.evaluate --run runs/NAME --against base|RUN|MODEL --data PROMPTS --out OUT.jsonl evaluate.judge=number
    python -m lib.evaluate --run runs/NAME --tasks arc_easy,gsm8k [--tasks-folder DIR]

The first evaluates a finished run's adapter on its own held-out data; the second any model against any reference. The
others go through files of any size, on as many ranks as there are, each at its own pace; after a crash they go on.
--against says how often the run's answers are better than another model's; --tasks runs lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn

from lib.config import (
    command_line,
    load,
    train_arguments,
)
from lib.config.settings import Config
from lib.data import tokenizer as tokenizer_module
from lib.data.dataset import load_dataset, with_mismatched
from lib.data.prompts import Question, load_questions
from lib.data.tokenizer import Tokenizer, limits_of
from lib.distributed.world import World, start
from lib.errors import UserError
from lib.evaluate import harness, score_file, win_rate
from lib.evaluate.answers import exact_match, greedy
from lib.evaluate.held_out_metrics import digest_of, metrics_of, policy_logps, write_per_pair
from lib.evaluate.score_file import DividedModel, Parts, WholeModel, divides, in_step, open_asked, parts_of_model
from lib.model import (
    adapter_files,
    adapters,
)
from lib.model import load as load_module
from lib.system import files, mpi_and_blas
from lib.system.terminal import Terminal, metrics_text
from lib.training import divided_world, losses
from lib.training.checkpoint import find
from lib.training.inputs import vocabulary, with_compute_type
from lib.training.objective import Metrics
from lib.training.reference_model import dataset_logps


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    options = _parse(arguments)
    world = start(mpi_and_blas.launch_environment())
    with world.agreeing("the configuration"):
        settings = _read_config(options)
    world = dataclasses.replace(world, timeout_seconds=settings.sync.timeout_seconds)
    model = with_compute_type(settings.model, world, Terminal(silent=world.rank != 0).line)
    settings = settings.model_copy(update={"model": model})
    _work_of(options)(settings, options, world)
    return 0


def _work_of(options: argparse.Namespace) -> Callable[[Config, argparse.Namespace, World], None]:
    if options.against is not None:
        return against
    if options.tasks is not None:
        return on_tasks
    return evaluate if options.score is None and options.make_pairs is None else in_bulk


def _names_pairs(options: argparse.Namespace) -> bool:
    """Whether the command names held-out pairs, which a run of rounds has none of."""
    return options.data is not None or any(word.startswith("data.valid=") for word in options.overrides)


def evaluate(settings: Config, options: argparse.Namespace, world: World) -> None:
    """Evaluates a saved run, or a model against a reference; prints a line for people and one of JSON."""
    if settings.rollouts.rounds and not _names_pairs(options):
        _answer(settings, options, world)
        return
    say = Terminal(silent=world.rank != 0)
    with world.agreeing("reading the data"):
        if options.per_pair is not None and world.rank == 0:
            files.require_absent(Path(options.per_pair))
        _require_records_loss(settings)
        tokenizer, words = tokenizer_module.load_tokenizer_of(settings.model), vocabulary(settings.model)
        dataset = load_dataset(
            settings.data.valid or settings.data.train,
            settings.data,
            settings.record_kind,
            tokenizer,
            held_out=True if settings.data.holdout and not settings.data.valid else None,
            **words,
        )
        limits = limits_of(words)
        if losses.needs_mismatched(settings.train.loss):
            dataset = with_mismatched(dataset, limits.row_tokens(settings.data.max_length))
        questions = load_questions(settings, tokenizer, limits)
    world.require_equal("data or questions", digest_of(dataset, questions))
    wants_reference = settings.train.loss != "sft" and (
        options.per_pair is not None or losses.needs_reference(settings.train)
    )
    parts, world = parts_of_model(settings, world)
    shares = [1] * world.workers.size
    reference = None
    if wants_reference:
        reference_model = divided_world.load_reference(settings, world)
        with say.counting("reference log-probabilities", len(dataset)) as progress:
            reference = dataset_logps(reference_model, dataset, world, shares, settings, progress)
        del reference_model  # two models need not lie in memory at once
    model, world = _policy(settings, options, parts, world)
    policy = policy_logps(model, dataset, settings, world, shares)
    values = metrics_of(dataset, policy, reference, settings)
    if questions:
        values["exact_match"] = _exact_match(questions, model, tokenizer, settings, world)
    with world.agreeing("writing the pairs"):
        if options.per_pair is not None and world.rank == 0:
            if reference is None:
                raise UserError("--per-pair writes preference pairs; train.loss=sft has none")
            write_per_pair(Path(options.per_pair), dataset, policy, reference, settings)
    say.line(f"{options.run or settings.model.path} on {dataset.path}, {len(dataset):,} rows", "bold")
    say.line(metrics_text(values))
    say.record({"rows": len(dataset), **values})


def _answer(settings: Config, options: argparse.Namespace, world: World) -> None:
    """Of a run of rounds, which has no held-out pairs: the exact match of its questions."""
    say = Terminal(silent=world.rank != 0)
    with world.agreeing("reading the questions"):
        if options.per_pair is not None:
            raise UserError("--per-pair needs held-out pairs, and a run of rounds has none; name a file with --data")
        tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
        questions = load_questions(settings, tokenizer, limits_of(vocabulary(settings.model)))
        if not questions:
            raise UserError("a run of rounds has no held-out pairs; name some with --data, or evaluate.answers=FILE")
    world.require_equal("questions", digest_of(None, questions))
    parts, world = parts_of_model(settings, world)
    model, world = _policy(settings, options, parts, world)
    values: Metrics = {"exact_match": _exact_match(questions, model, tokenizer, settings, world)}
    say.line(f"{options.run} on {settings.evaluate.answers}, {len(questions):,} questions", "bold")
    say.line(metrics_text(values))
    say.record({"questions": len(questions), **values})


def _policy(
    settings: Config, options: argparse.Namespace, parts: Parts | None, world: World
) -> tuple[nn.Module, World]:
    """The model that is evaluated, or this rank's part of it, and the world that holds it."""
    with world.agreeing("loading the model"):
        model = load_module.load(settings.model, settings.train.seed, lazy=parts is not None)
        if options.run is not None:
            adapters.make_trainable(model, settings.model, settings.train.seed)
            adapter_files.load_trained(model, Path(options.run), "--run")
        elif settings.model.adapter is not None:
            adapters.make_trainable(model, settings.model, settings.train.seed)
    return model, divided_world.divided(model, parts, world, settings.metal.wired)


def _exact_match(
    questions: list[Question], model: nn.Module, tokenizer: Tokenizer | None, settings: Config, world: World
) -> float:
    assert tokenizer is not None  # where there are questions
    prompts = [question.prompt_ids for question in questions]
    made = greedy(model, tokenizer, prompts, settings.evaluate.max_tokens, world)
    if warning := made.warning(f"evaluate.max_tokens={settings.evaluate.max_tokens}"):
        Terminal(silent=world.rank != 0).line(warning)
    return exact_match(questions, made.texts, settings)


def _require_records_loss(settings: Config) -> None:
    if settings.record_kind == "group":
        raise UserError(
            "train.loss=grpo has no loss of held-out records; name one that has, e.g. train.loss=sigmoid for pairs or "
            "train.loss=sft for completions, or let the model answer: --score greedy, --against, --tasks"
        )


def in_bulk(settings: Config, options: argparse.Namespace, world: World) -> None:
    """--score and --make-pairs: a line for every row of a file, by all ranks."""
    say = Terminal(silent=world.rank != 0)
    kind, out = options.score or "pairs", Path(options.out or options.make_pairs)
    writes, run = kind in ("greedy", "samples", "pairs"), None if options.run is None else Path(options.run)
    with world.agreeing("reading the data"):
        if kind == "rewards" and settings.train.loss == "sft":
            raise UserError("--score rewards is for preference losses, not train.loss=sft; take --score logps")
        if not writes:
            _require_records_loss(settings)
        tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
        if writes and tokenizer is None:
            raise UserError(f"model.path {settings.model.path} has no tokenizer, which writing answers needs")
        records = open_asked(options.data, settings, "prompt" if writes else settings.record_kind, say)
    load_model = DividedModel.load if divides(settings, world) else _load_whole
    asked = load_model(settings, run, kind == "rewards", world)
    key = score_file.key_of(kind, *asked.digests, score_file.digest_of(records), load.learning_digest(settings))
    world.require_equal("model, data or settings", key)
    do: score_file.CompletionWriter | score_file.PairMaker | score_file.Scorer
    if writes:
        assert tokenizer is not None
        draws = None if kind == "greedy" else settings.evaluate.completions
        do = score_file.CompletionWriter(asked.model, tokenizer, records, settings, draws, asked.world)
        do = score_file.PairMaker(do) if kind == "pairs" else do
    else:
        do = score_file.Scorer(asked.model, asked.reference, records, settings, tokenizer, asked.world)
    if divides(settings, world):
        figures = in_step(kind, key, len(records), out, settings, asked.world, do.of_chunks)
    else:
        figures = score_file.pull(kind, key, records, out, settings, world, do)
    if figures is not None:
        speed = f"{figures['rows_per_second']:.1f} rows/s"
        say.line(f"{out}: {figures['rows']:,} rows in {figures['seconds']:.1f} s ({speed})")
        if isinstance(do, score_file.PairMaker):
            say.line(do.summary(out, figures["rows"]))
        say.record(dict(figures))


def _load_whole(settings: Config, run: Path | None, with_reference: bool, world: World) -> DividedModel:
    """As DividedModel.load, where every rank has the whole model."""
    with world.agreeing("loading the model"):
        model = load_module.load(settings.model, settings.train.seed)
        divided_world.divided(model, None, world, settings.metal.wired)
        reference: Any = {} if with_reference else None
        if run is not None or settings.model.adapter is not None:
            adapters.make_trainable(model, settings.model, settings.train.seed)
            reference = adapter_files.trainable(model) if with_reference else None
        if run is not None:
            adapter_files.load_trained(model, run, "--run")
        digests = [
            load_module.fingerprint(settings.model, settings.train.seed),
            adapter_files.digest(adapter_files.trainable(model)),
        ]
        if with_reference and settings.model.reference != "initial":
            reference = load_module.load_reference(settings.model, settings.train.seed)
            digests.append(load_module.reference_fingerprint(settings.model, settings.train.seed))
        model.eval()
    return DividedModel(model, reference, world.alone(), tuple(digests))


def against(settings: Config, options: argparse.Namespace, world: World) -> None:
    """--against: how often the answers of one model are better than those of another."""
    say = Terminal(silent=world.rank != 0)
    with world.agreeing("reading the prompts"):
        _need_whole_models(settings, world, "--against")
        first, second = _subject(settings, options), _other(settings, options)
        records = open_asked(options.data, settings, "prompt", say)
    result = win_rate.compare(first, second, records, Path(options.out), world)
    if result is not None:
        win_rate.show(say, first.name, second.name, result)


def on_tasks(settings: Config, options: argparse.Namespace, world: World) -> None:
    """--tasks: what lm-evaluation-harness finds of a model."""
    with world.agreeing("reading the tasks"):
        _need_whole_models(settings, world, "--tasks")
    folder = None if options.tasks_folder is None else Path(options.tasks_folder)
    names = tuple(name.strip() for name in options.tasks.split(","))
    tasks = harness.Tasks(names, folder, options.shots, options.limit, options.chat)
    subject, plain_names = _subject(settings, options), re.sub(r"[^\w.-]+", "-", options.tasks)
    out = Path(options.out or options.home / f"tasks-{plain_names}.json")
    results = harness.evaluate_tasks(subject, tasks, out, world)
    if results is not None:
        harness.show(Terminal(silent=world.rank != 0), subject.name, results, out)


def _need_whole_models(settings: Config, world: World, option: str) -> None:
    if divides(settings, world):
        raise UserError(f"{option}: every rank has the whole model; leave strategy={settings.strategy} out")


def _subject(settings: Config, options: argparse.Namespace) -> WholeModel:
    return WholeModel(settings, None if options.run is None else Path(options.run))


def _other(settings: Config, options: argparse.Namespace) -> WholeModel:
    """The model of --against: a run or one of its checkpoints, `base`, or a model as --model takes it."""
    if options.against == "base":
        return WholeModel(settings, None)
    folder = Path(options.against)
    if not (folder / "config.yaml").is_file():
        changes = {"path": options.against, "revision": None, "adapter": None, "random_init": False}
        return WholeModel(settings.model_copy(update={"model": settings.model.model_copy(update=changes)}), None)
    _need_adapter("--against", folder)
    words = [word for word in options.overrides if word.startswith(("data.", "model.trust_remote_code="))]
    own = load.of_run(folder / "config.yaml", words)
    return WholeModel(own.model_copy(update={"evaluate": settings.evaluate, "sync": settings.sync}), folder)


def _need_adapter(option: str, folder: Path) -> None:
    if not (folder / adapter_files.ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{option} {folder}: no finished run there ({adapter_files.ADAPTER_WEIGHTS} is missing)")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.evaluate", description=__doc__)
    parser.add_argument("--run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--model", metavar="PATH", help="policy to evaluate")
    parser.add_argument(
        "--reference", metavar="PATH", help="reference model (default: the policy itself, as it stands)"
    )
    parser.add_argument("--data", metavar="FILE", help="records to evaluate on (default: the run's held-out ones)")
    parser.add_argument("--per-pair", metavar="OUT", help="write one JSON line a pair")
    parser.add_argument(
        "--score",
        choices=score_file.KINDS,
        nargs="?",
        const="rewards",
        help="a line for every row of --data: rewards and log-probabilities, log-probabilities alone, "
        "the greedy answer, or drawn ones",
    )
    parser.add_argument("--out", metavar="OUT", help="where --score, --against and --tasks write")
    parser.add_argument(
        "--make-pairs", metavar="OUT", help="preference pairs of answers drawn to the prompts of --data"
    )
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="of --run: best, last or a step (default: what the run's folder holds)"
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="compare answers to --data with those of another run, of a model, or of `base`: the run's model before it "
        "was trained; evaluate.judge says who compares",
    )
    parser.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness (package lm_eval)")
    parser.add_argument("--tasks-folder", metavar="DIR", help="folder with YAML files of tasks of your own")
    parser.add_argument("--shots", type=int, metavar="N", help="of --tasks: examples before each question")
    parser.add_argument("--limit", type=int, metavar="N", help="of --tasks: most questions of each task")
    parser.add_argument("--chat", action="store_true", help="of --tasks: ask by the model's chat template")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as train.py --help lists them")
    options = parser.parse_intermixed_args(arguments)
    if (options.run is None) == (options.model is None):
        raise UserError("give either --run RUN or --model PATH")
    if options.model is not None and options.data is None and options.tasks is None:
        raise UserError("--model needs --data FILE")
    _require_one_work(options)
    return options


def _require_one_work(options: argparse.Namespace) -> None:
    """Makes sure that the options belong together."""
    works = [
        name for name in ("score", "make_pairs", "per_pair", "against", "tasks") if getattr(options, name) is not None
    ]
    if len(works) > 1:
        raise UserError(f"{' and '.join('--' + name.replace('_', '-') for name in works)} go one at a time")
    if options.out is None and (options.score is not None or options.against is not None):
        raise UserError(f"--{works[0]} needs --out OUT")
    if options.out is not None and not {"score", "against", "tasks"} & {*works}:
        raise UserError("--out is for --score, --against and --tasks; --per-pair and --make-pairs name their own file")
    if options.tasks is not None and not all(name.strip() for name in options.tasks.split(",")):
        raise UserError(f"--tasks {options.tasks!r}: give names with commas between them, e.g. arc_easy,gsm8k")
    if (options.shots or 0) < 0 or (options.limit is not None and options.limit < 1):
        raise UserError("--shots is 0 or more, --limit 1 or more")
    if options.tasks is not None and options.run is None and options.out is None:
        raise UserError("--tasks with --model needs --out OUT, e.g. tasks.json")
    if options.tasks is None and (options.tasks_folder or options.shots is not None or options.limit or options.chat):
        raise UserError("--tasks-folder, --shots, --limit and --chat are for --tasks NAMES")
    if options.checkpoint is not None and options.run is None:
        raise UserError("--checkpoint is of --run RUN")


def _read_config(options: argparse.Namespace) -> Config:
    if options.run is None:
        model = {"path": options.model, "reference": options.reference or "initial"}
        return load.load(None, options.overrides, base={"model": model, "data": {"train": options.data or ""}})
    options.home = Path(options.run)  # of the run, where options.run may become that of a checkpoint
    if options.checkpoint is not None:
        options.run = str(find(Path(options.run), options.checkpoint))
    path = Path(options.run) / "config.yaml"
    _need_adapter("--run", Path(options.run))
    extra = [f"model.reference={options.reference}"] if options.reference else []
    extra += [f"data.valid={options.data}", "data.holdout=0"] if options.data else []
    settings = load.of_run(path, [*extra, *options.overrides])
    if settings.strategy == "auto":  # a model that was too large for one host still is
        settings = settings.model_copy(update={"strategy": train_arguments.decided(path.with_name("plan.json"))})
    return settings
