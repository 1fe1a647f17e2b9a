"""Held-out evaluation: per-pair rewards against the reference, and greedy answers that can be checked.

    python -m lib.evaluate --run runs/NAME [key=value ...]
    python -m lib.evaluate --model M --reference R --data FILE --per-pair OUT.jsonl [key=value ...]
    python -m lib.evaluate --run runs/NAME --data FILE --score rewards|logps|greedy|samples --out OUT.jsonl
    python -m lib.evaluate --model M --data PROMPTS --make-pairs OUT.jsonl rollouts.samples=4
    python -m lib.evaluate --run runs/NAME --against base|RUN|MODEL --data PROMPTS --out OUT.jsonl evaluate.judge=number
    python -m lib.evaluate --run runs/NAME --tasks arc_easy,gsm8k [--tasks-folder DIR]

The first evaluates a finished run's adapter on its own held-out data; the second any model against any reference. The
others go through files of any size, on as many ranks as there are, each at its own pace; after a crash they go on.
--against says how often the run's answers are better than another model's; --tasks runs lm-evaluation-harness.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from lib.config import command_line, load
from lib.config.settings import Config, DataSettings, ModelSettings, TrainSettings
from lib.data import tokenizer as tokenizer_module
from lib.data.dataset import Dataset, load_dataset, with_mismatched
from lib.data.prompts import load_questions
from lib.data.tokenizer import Tokenizer
from lib.distributed.world import World, start
from lib.errors import AgreedError, UserError
from lib.evaluate import harness, score_file, win_rate
from lib.evaluate.evaluator import digest_of, exact_match, greedy, metrics_of, write_per_pair
from lib.evaluate.score_file import FileJob, StoredModel, divides, evaluation_records, parts_of_model
from lib.model import adapter_files
from lib.model import load as load_module
from lib.system import files, mpi_and_blas
from lib.system.terminal import Terminal, metrics_text
from lib.training import divided_world, losses
from lib.training.checkpoint import find
from lib.training.losses import Metrics
from lib.training.reference_model import dataset_logps
from lib.training.run_inputs import vocabulary, with_compute_type
from lib.training.unpaired_losses import needs_mismatched


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    options = _parse(arguments)
    world = start(mpi_and_blas.launch_environment())
    with world.agreeing("the configuration"):
        settings = _read_config(options)
    world = dataclasses.replace(world, timeout_seconds=settings.sync.timeout_seconds)
    say = Terminal(silent=world.rank != 0)
    model = with_compute_type(settings.model, world, say.line)
    settings = settings.model_copy(update={"model": model})
    subject = StoredModel(settings, None if options.run is None else Path(options.run))
    if (options.against or options.tasks) and divides(settings.strategy, world):
        what = f"--against and --tasks: every rank has the whole model; leave strategy={settings.strategy} out"
        raise AgreedError(what)
    if options.score or options.make_pairs:
        in_bulk(subject, options, world, say)
    elif options.against:
        against(subject, options, world, say)
    elif options.tasks:
        harness.evaluate_tasks(subject, options, world, say)
    else:
        evaluate(subject, options, world, say)
    return 0


def evaluate(subject: StoredModel, options: argparse.Namespace, world: World, say: Terminal) -> None:
    """Evaluates a saved run, or a model against a reference; prints a line for people and one of JSON. A run of rounds
    has no held-out pairs: of it, the exact match of its questions."""
    settings, out = subject.settings, None if options.per_pair is None else Path(options.per_pair)
    named = options.data is not None or any(word.startswith("data.valid=") for word in options.overrides)
    with world.agreeing("reading the data"):
        if out is not None and world.rank == 0:
            files.require_absent(out)
        tokenizer = tokenizer_module.load_tokenizer_of(settings.model)
        dataset, sections = None, (settings.model, settings.data)
        if named or not settings.rollouts.rounds:
            dataset = _held_out_rows(*sections, settings.train, tokenizer)
        questions = load_questions(settings.evaluate, *sections, tokenizer, vocabulary(settings.model))
        if dataset is None and (not questions or out is not None):
            way = "name some with --data" if out is not None else "name some with --data, or evaluate.answers=FILE"
            raise UserError(f"a run of rounds has no held-out pairs; {way}")
        if out is not None and settings.train.loss == "sft":
            raise UserError("--per-pair writes preference pairs; train.loss=sft has none")
    world.require_equal("data or questions", digest_of(dataset, questions))
    parts, world = parts_of_model(settings, world)
    shares, reference = [1] * world.workers.size, None
    if dataset is not None and settings.train.loss != "sft" and (out or losses.needs_reference(settings.train)):
        model = divided_world.load_reference(settings.model, settings.train.seed, world)
        with say.counting("reference log-probabilities", len(dataset)) as progress:
            reference = dataset_logps(model, dataset, world, shares, settings, progress)
        del model  # two models need not lie in memory at once
    loaded = subject.load(world, parts)
    world = loaded.world
    values: Metrics = {}
    if dataset is not None:
        policy = dataset_logps(loaded.model, dataset, world, shares, settings)
        values |= metrics_of(dataset, policy, reference, settings.train)
        with world.agreeing("writing the pairs"):
            if out is not None and reference is not None and world.rank == 0:
                write_per_pair(out, dataset, policy, reference, settings.train)
    if questions and tokenizer is not None:
        prompts, limit = [question.prompt_ids for question in questions], settings.evaluate.max_tokens
        texts, _ = greedy(loaded.model, tokenizer, prompts, limit, world, say=say)
        values["exact_match"] = exact_match(questions, texts, settings.evaluate.answer_pattern)
    source, count = (settings.evaluate.answers, len(questions)) if dataset is None else (dataset.path, len(dataset))
    unit = "questions" if dataset is None else "rows"
    say.line(f"{options.run or settings.model.path} on {source}, {count:,} {unit}", "bold")
    say.line(metrics_text(values))
    say.record({unit: count, **values})


def _held_out_rows(
    model: ModelSettings, data: DataSettings, train: TrainSettings, tokenizer: Tokenizer | None
) -> Dataset:
    _require_records_loss(train)
    words = vocabulary(model)
    held_out = True if data.holdout and not data.valid else None
    source, kind = data.valid or data.train, train.record_kind
    dataset = load_dataset(source, data, kind, tokenizer, vocabulary=words, held_out=held_out)
    if needs_mismatched(train.loss):
        return with_mismatched(dataset, words.row_tokens(data.max_length))
    return dataset


def _require_records_loss(train: TrainSettings) -> None:
    if train.record_kind == "group":
        raise UserError(
            "train.loss=grpo has no loss of held-out records; name one that has, e.g. train.loss=sigmoid for pairs or "
            "train.loss=sft for completions, or let the model answer: --score greedy, --against, --tasks"
        )


def in_bulk(subject: StoredModel, options: argparse.Namespace, world: World, say: Terminal) -> None:
    """--score and --make-pairs: a line for every row of a file, by all ranks."""
    settings, kind, out = subject.settings, options.score or "pairs", Path(options.out or options.make_pairs)
    writes = kind in ("greedy", "samples", "pairs")
    with world.agreeing("reading the data"):
        if kind == "rewards" and settings.train.loss == "sft":
            raise UserError("--score rewards is for preference losses, not train.loss=sft; take --score logps")
        if not writes:
            _require_records_loss(settings.train)
        tokenizer = subject.tokenizer() if writes else tokenizer_module.load_tokenizer_of(settings.model)
        records = evaluation_records(options.data, settings, "prompt" if writes else settings.record_kind, say)
    ranks, (parts, world) = world, parts_of_model(settings, world)
    loaded = subject.load(world, parts)
    world = loaded.world if parts is not None else world.alone()
    reference, digests = loaded.start if kind == "rewards" else None, [subject.digest()]
    if kind == "rewards" and settings.model.reference != "initial":
        reference = divided_world.load_reference(settings.model, settings.train.seed, world).eval()
        digests.append(load_module.fingerprint(load_module.reference_settings(settings.model), settings.train.seed))
    key = score_file.key_of(kind, *digests, score_file.digest_of(records))
    ranks.require_equal("model, data or settings", key)
    do: score_file.Scorer | score_file.CompletionWriter | score_file.PairMaker
    if writes and tokenizer is not None:
        draws = None if kind == "greedy" else settings.rollouts.samples
        writer = score_file.CompletionWriter(loaded.model, tokenizer, records, settings, draws, world)
        do = score_file.PairMaker(writer) if kind == "pairs" else writer
    else:
        do = score_file.Scorer(loaded.model, reference, records, settings, tokenizer, world)
    job = FileJob(kind, key, len(records), out, settings.evaluate.batch_size)
    figures = score_file.pull(job, ranks if parts is None else world, do)
    if figures is not None:
        speed = f"{figures['rows_per_second']:.1f} rows/s"
        say.line(f"{out}: {figures['rows']:,} rows in {figures['seconds']:.1f} s ({speed})")
        if not isinstance(do, score_file.Scorer) and (text := do.summary(out, figures["rows"])):
            say.line(text)
        say.record(figures)


def against(subject: StoredModel, options: argparse.Namespace, world: World, say: Terminal) -> None:
    """--against: how often the answers of one model are better than those of another."""
    with world.agreeing("reading the prompts"):
        other = _other(subject, options)
        records = evaluation_records(options.data, subject.settings, "prompt", say)
    result = win_rate.compare(subject, other, records, Path(options.out), world)
    if result is not None:
        win_rate.show(say, subject.name, other.name, result)


def _other(subject: StoredModel, options: argparse.Namespace) -> StoredModel:
    """The model of --against: a run or one of its checkpoints, `base`, or a model as --model takes it."""
    settings = subject.settings
    if options.against == "base":
        return StoredModel(settings, None)
    folder = Path(options.against)
    if not (folder / "config.yaml").is_file():
        changes = {"path": options.against, "revision": None, "adapter": None, "random_init": False}
        return StoredModel(settings.model_copy(update={"model": settings.model.model_copy(update=changes)}), None)
    _need_adapter("--against", folder)
    words = [word for word in options.overrides if word.startswith(("data.", "model.trust_remote_code="))]
    config = load.of_run(folder / "config.yaml", words)
    return StoredModel(config.model_copy(update={"evaluate": settings.evaluate, "sync": settings.sync}), folder)


def _need_adapter(option: str, folder: Path) -> None:
    if not (folder / adapter_files.ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{option} {folder}: no finished run there ({adapter_files.ADAPTER_WEIGHTS} is missing)")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.evaluate", description=__doc__)
    works = parser.add_mutually_exclusive_group()
    add = parser.add_argument
    add("--run", metavar="RUN", help="folder of a finished run")
    add("--model", metavar="PATH", help="policy to evaluate")
    add("--reference", metavar="PATH", help="reference model (default: the policy itself, as it stands)")
    add("--data", metavar="FILE", help="records to evaluate on (default: the run's held-out ones)")
    works.add_argument("--per-pair", metavar="OUT", help="write one JSON line a pair")
    what = "rewards and log-probabilities, log-probabilities alone, the greedy answer, or drawn ones"
    score = f"a line for every row of --data: {what}"
    works.add_argument("--score", choices=score_file.KINDS, nargs="?", const="rewards", help=score)
    add("--out", metavar="OUT", help="where --score, --against and --tasks write")
    works.add_argument("--make-pairs", metavar="OUT", help="preference pairs of answers drawn to the prompts of --data")
    add("--checkpoint", metavar="WHICH", help="of --run: best, last or a step (default: what the run's folder holds)")
    other = "another run, a model, or `base`: the run's model before it was trained; evaluate.judge says who compares"
    works.add_argument("--against", metavar="OTHER", help=f"compare answers to --data with those of {other}")
    works.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness (package lm_eval)")
    add("--tasks-folder", metavar="DIR", help="folder with YAML files of tasks of your own")
    add("--shots", type=int, metavar="N", help="of --tasks: examples before each question")
    add("--limit", type=int, metavar="N", help="of --tasks: most questions of each task")
    add("--chat", action="store_true", help="of --tasks: ask by the model's chat template")
    add("overrides", nargs="*", metavar="key=value", help="settings, as train.py --help lists them")
    options = parser.parse_intermixed_args(arguments)
    needs_out = options.score or options.against
    of_tasks = options.tasks_folder or options.chat or options.shots is not None or options.limit is not None
    for is_wrong, why in (
        ((options.run is None) == (options.model is None), "give either --run RUN or --model PATH"),
        (options.model and not options.data and not options.tasks, "--model needs --data FILE"),
        (needs_out and not options.out, "--score and --against need --out OUT"),
        (options.out and not (needs_out or options.tasks), "--out is for --score, --against and --tasks"),
        (options.tasks and not (options.run or options.out), "--tasks with --model needs --out OUT, e.g. tasks.json"),
        (of_tasks and not options.tasks, "--tasks-folder, --shots, --limit and --chat are for --tasks NAMES"),
        (options.checkpoint and not options.run, "--checkpoint is of --run RUN"),
    ):
        if is_wrong:
            raise UserError(why)
    return options


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
        settings = settings.model_copy(update={"strategy": command_line.decided(path.with_name("plan.json"))})
    return settings
