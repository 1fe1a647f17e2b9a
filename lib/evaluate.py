"""Held-out evaluation: per-pair rewards against the reference, and greedy answers that can be checked.

    python -m lib.evaluate --run runs/NAME [key=value ...]
    python -m lib.evaluate --model M --reference R --data FILE --per-pair OUT.jsonl [key=value ...]
    python -m lib.evaluate --run runs/NAME --data FILE --score rewards|logps|greedy|samples --out OUT.jsonl
    python -m lib.evaluate --model M --data PROMPTS --make-pairs OUT.jsonl evaluate.completions=8

The first evaluates a finished run's adapter on its own held-out data; the second any model against any reference. The
others go through files of any size, on as many ranks as there are, each at its own pace; after a crash they go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import runtime

runtime.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import batch_generate  # noqa: E402

from lib import bulk, command, config, loading, losses, out_of_memory, scoring, sync, terminal  # noqa: E402
from lib import model as models  # noqa: E402
from lib.bulk import extract  # noqa: E402
from lib.config import Config, UserError  # noqa: E402
from lib.data import Dataset, encode_prompt, load_dataset  # noqa: E402
from lib.performance import PerformanceTracker  # noqa: E402
from lib.records import read  # noqa: E402
from lib.report import Report, describe  # noqa: E402
from lib.schedule import sharded_plan  # noqa: E402
from lib.step import SUMS, means_of, objective  # noqa: E402
from lib.streaming import StreamedDataset  # noqa: E402
from lib.sync import Lockstep, World  # noqa: E402

Metrics = dict[str, float | None]

SAMPLE_WIDTH = 160  # columns of a sample's line, in a file
MARKS = {True: "✓", False: "✗"}


@dataclass(frozen=True)
class Question:
    """A prompt whose answer a program can check."""

    prompt: str
    prompt_ids: list[int]
    answer: str


# ---- Pairs -------------------------------------------------------------------------------------------------------------


def policy_logps(
    model: nn.Module, dataset: Dataset, settings: Config, world: World, shares: Sequence[int]
) -> np.ndarray:
    """log pi of every completion, float32 [N, K], as `scoring.dataset_logps` gives them at the evaluation batch size."""
    return scoring.dataset_logps(model, dataset, world, shares, settings)


def digest_of(valid: Dataset | None, questions: list[Question]) -> str:
    """Of all that a run is judged by."""
    return hashlib.sha256(repr([valid and valid.digest, questions]).encode()).hexdigest()


def metrics_of(dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None, settings: Config) -> Metrics:
    """The loss and metrics of a dataset, each pair counted once, whatever the batches were."""
    _, sums = objective(settings.train, *_arrays(dataset, policy, reference))
    return means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, settings.train)


def held_out(
    model: nn.Module,
    tokenizer: Any,
    valid: Dataset | None,
    reference: np.ndarray | None,
    questions: list[Question],
    settings: Config,
    world: World,
    shares: Sequence[int],
) -> tuple[Metrics, list[str]]:
    """What a run looks at as it goes: metrics of the held-out pairs, and greedy answers, by all ranks together."""
    values: Metrics = {}
    texts: list[str] = []
    if valid is not None:
        values |= metrics_of(valid, policy_logps(model, valid, settings, world, shares), reference, settings)
    if questions:
        prompts = [question.prompt_ids for question in questions]
        texts = greedy(model, tokenizer, prompts, settings.evaluate.max_tokens, world)
        values["exact_match"] = exact_match(questions, texts, settings)
    return values, texts


def write_per_pair(path: Path, dataset: Dataset, policy: np.ndarray, reference: np.ndarray, settings: Config) -> None:
    """One JSON line a pair, in the file's order: both models' log-probabilities, the rewards and the loss."""
    arrays = _arrays(dataset, policy, reference)
    per_pair, _ = objective(settings.train, *arrays)
    pairs = [
        losses.LogProbs(logps[:, 0], logps[:, 1], arrays[1][:, 0], arrays[1][:, 1])
        for logps in (arrays[0], mx.array(reference))
    ]
    assert settings.train.loss != "sft"
    reward_chosen, reward_rejected = losses.implicit_rewards(
        settings.train.loss, pairs[0], pairs[1], settings.train.beta
    )
    columns = {
        "policy_chosen_logp": policy[:, 0],
        "policy_rejected_logp": policy[:, 1],
        "reference_chosen_logp": reference[:, 0],
        "reference_rejected_logp": reference[:, 1],
        "reward_chosen": np.array(reward_chosen),
        "reward_rejected": np.array(reward_rejected),
        "loss": np.array(per_pair),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in range(len(dataset)):
            file.write(json.dumps({name: float(column[row]) for name, column in columns.items()}) + "\n")


def _arrays(
    dataset: Dataset, policy: np.ndarray, reference: np.ndarray | None
) -> tuple[mx.array, mx.array, mx.array | None]:
    return mx.array(policy), mx.array(dataset.scored_tokens), None if reference is None else mx.array(reference)


# ---- Answers -----------------------------------------------------------------------------------------------------------


def load_questions(settings: Config, tokenizer: Any) -> list[Question]:
    """The records of evaluate.answers, at most evaluate.answers_limit.

    Raises:
        UserError: a record without a prompt or an answer, or a model without a tokenizer.
    """
    path = settings.evaluate.answers
    if path is None:
        return []
    if tokenizer is None:
        raise UserError(f"evaluate.answers={path} needs a tokenizer, but model.path {settings.model.path} has none")
    questions = []
    for line, record in read(path, settings.data):
        if isinstance(record, ValueError):
            raise UserError(f"{path}:{line}: {record}")
        prompt, answer = record.get(settings.data.prompt), record.get("answer")
        if not isinstance(prompt, str | list) or not isinstance(answer, str | int | float):
            raise UserError(
                f"{path}:{line}: a question needs {settings.data.prompt!r} and 'answer'; it has {', '.join(record)}"
            )
        shown = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
        questions.append(
            Question(
                shown,
                encode_prompt(prompt, settings.data, tokenizer, models.vocabulary(settings.model)["eos_token_id"]),
                str(answer).strip(),
            )
        )
        if len(questions) == settings.evaluate.answers_limit:
            break
    if not questions:
        raise UserError(f"evaluate.answers={path} has no records")
    return questions


def greedy(model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], max_tokens: int, world: World) -> list[str]:
    """The greedy continuation of every prompt, on every rank; the ranks share the work."""
    model.eval()
    world = world.workers
    mine = list(range(world.rank, len(prompts), world.size))
    tokens = np.zeros((len(prompts), max_tokens + 1), np.int32)  # a length, then that many tokens

    def answers(places: Sequence[int]) -> list[list[int]]:
        with world.together("greedy answers", passes=len(places)):
            response = batch_generate(
                model,
                tokenizer,
                [prompts[i] for i in places],
                max_tokens=max_tokens,
                return_token_ids=True,
                sampler=lambda logps: world.decide(mx.argmax(logps, axis=-1)),
            )
        return response.token_ids or []

    mx.eval(model.state)
    for start, generated in out_of_memory.in_pieces(mine, answers, can_halve=not isinstance(world, Lockstep)):
        for i, made in zip(mine[start:], generated, strict=False):
            ids = [token for token in made if token not in tokenizer.eos_token_ids][:max_tokens]
            tokens[i, 0], tokens[i, 1 : 1 + len(ids)] = len(ids), ids
    gathered = np.array(world.all_sum(mx.array(tokens), "greedy answers"))
    return [tokenizer.decode(row[1 : 1 + row[0]].tolist()) for row in gathered]


def exact_match(questions: list[Question], texts: list[str], settings: Config) -> float:
    """The share of questions whose continuation gives the right answer; the pattern's last match is what it gives."""
    return sum(_is_right(question, text, settings) for question, text in zip(questions, texts, strict=True)) / len(
        questions
    )


def _is_right(question: Question, text: str, settings: Config) -> bool:
    return extract(settings.evaluate.answer_pattern, text) == question.answer


def show_samples(
    say: Report,
    tracker: PerformanceTracker,
    model: nn.Module,
    tokenizer: Any,
    dataset: Dataset | StreamedDataset,
    settings: Config,
    world: World,
    when: str,
) -> None:
    """Prints and records the greedy continuations of the first few prompts, which are the same before and after."""
    examples = dataset.examples(range(min(settings.evaluate.samples, len(dataset))))
    if tokenizer is None or not examples or any(len(example.prompt_ids) == 0 for example in examples):
        return
    texts = greedy(
        model, tokenizer, [example.prompt_ids.tolist() for example in examples], settings.evaluate.max_tokens, world
    )
    say.line(f"greedy answers {when} training", "bold")
    room = (say.width or SAMPLE_WIDTH) - 10
    prompts = [tokenizer.decode(example.prompt_ids.tolist()) for example in examples]
    for prompt, text in zip(prompts, texts, strict=True):
        say.line(f"  prompt  {_one_line(prompt, room)}")
        say.line(f"  answer  {_one_line(text, room)}")
    shown = [{"prompt": prompt, when: text} for prompt, text in zip(prompts, texts, strict=True)]
    tracker.record("samples", samples=shown)


def show_changes(
    say: Report,
    tracker: PerformanceTracker,
    questions: list[Question],
    before: list[str],
    after: list[str],
    settings: Config,
) -> None:
    """Prints and records a few questions whose answer training changed, right for wrong and wrong for right in their proportion."""
    judged = [
        (q, b, a, _is_right(q, b, settings), _is_right(q, a, settings))
        for q, b, a in zip(questions, before, after, strict=True)
    ]
    changed = [row for row in judged if row[3] != row[4]]
    if not changed:
        return
    mended = sum(row[4] for row in changed)
    say.line("")
    back = len(changed) - mended
    say.line(
        f"of {len(questions)} answers {mended} are right now that were wrong, {back} wrong that were right", "bold"
    )
    shown = changed[: settings.evaluate.samples]
    room = (say.width or SAMPLE_WIDTH) - 12
    for question, was, now, was_right, is_right in shown:
        answer = f"  (right: {question.answer})"
        say.line(f"  {_one_line(question.prompt, room - len(answer))}{answer}")
        say.line(f"    before {MARKS[was_right]} {_one_line(was, room - 1)}")
        say.line(f"    after  {MARKS[is_right]} {_one_line(now, room - 1)}")
    tracker.record(
        "samples", samples=[{"prompt": q.prompt, "before": was, "after": now} for q, was, now, _, _ in shown]
    )


def _one_line(text: str, limit: int) -> str:
    """Beginning and end of a long text."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 2 - 3]} ... {text[len(text) + 2 - limit + limit // 2 :]}"


# ---- The command line --------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    try:
        options = _parse(arguments)
        world = sync.start(runtime.launch_environment())
        with world.agreeing("the configuration"):
            settings = _read_config(options)
        world = dataclasses.replace(world, timeout_seconds=settings.sync.timeout_seconds)
        (evaluate if options.score is None and options.make_pairs is None else in_bulk)(settings, options, world)
    except UserError as error:
        if runtime.launch_environment().rank == 0 or type(error) is UserError:
            terminal.error(str(error))
        return 2
    except OSError as error:
        terminal.error(f"{error.filename or 'a file'}: {error.strerror or error}")
        return 2
    return 0


def evaluate(settings: Config, options: argparse.Namespace, world: World) -> None:
    """Evaluates a saved run, or a model against a reference; prints a line for people and one of JSON."""
    say = Report(world)
    with world.agreeing("reading the data"):
        tokenizer = models.load_tokenizer_of(settings.model)
        dataset = load_dataset(
            settings.data.valid or settings.data.train,
            settings.data,
            settings.record_kind,
            tokenizer,
            held_out=True if settings.data.holdout and not settings.data.valid else None,
            **models.vocabulary(settings.model),
        )
        questions = load_questions(settings, tokenizer)
    world.require_equal("data or questions", digest_of(dataset, questions))
    wants_reference = settings.train.loss != "sft" and (
        options.per_pair is not None or losses.needs_reference(settings.train.loss)
    )
    division = None
    if settings.strategy == "sharded" and world.size > 1:
        division = sharded_plan(settings, world, sync.host_names(world)).division
    if division is not None:
        world = sync.sharded(world, division)
    shares = [1] * world.workers.size
    reference = None
    if wants_reference:
        judge = loading.load_reference(settings, world)
        with say.counting("reference log-probabilities", len(dataset)) as progress:
            reference = scoring.dataset_logps(judge, dataset, world, shares, settings, progress)
        del judge  # two models need not lie in memory at once
    with world.agreeing("loading the model"):
        model = models.load(settings.model, settings.train.seed, lazy=division is not None)
        if options.run is not None:
            models.make_trainable(model, settings.model, settings.train.seed)
            models.load_trained(model, Path(options.run), "--run")
        elif settings.model.adapter is not None:
            models.make_trainable(model, settings.model, settings.train.seed)
    world = loading.divided(model, division, world, settings.metal.wired)
    policy = policy_logps(model, dataset, settings, world, shares)
    values = metrics_of(dataset, policy, reference, settings)
    if questions:
        texts = greedy(
            model, tokenizer, [question.prompt_ids for question in questions], settings.evaluate.max_tokens, world
        )
        values["exact_match"] = exact_match(questions, texts, settings)
    with world.agreeing("writing the pairs"):
        if options.per_pair is not None and world.rank == 0:
            if reference is None:
                raise UserError("--per-pair writes preference pairs; train.loss=sft has none")
            write_per_pair(Path(options.per_pair), dataset, policy, reference, settings)
    say.line(f"{options.run or settings.model.path} on {dataset.path}, {len(dataset):,} rows", "bold")
    say.line(describe(values))
    say.record({"rows": len(dataset), **values})


def in_bulk(settings: Config, options: argparse.Namespace, world: World) -> None:
    """--score and --make-pairs: a line for every row of a file, by all ranks."""
    say = Report(world)
    kind, out = options.score or "pairs", Path(options.out or options.make_pairs)
    writes = kind in ("greedy", "samples", "pairs")
    with world.agreeing("reading the data and the model"):
        if settings.strategy == "sharded" and world.size > 1:
            raise UserError(
                f"--{'score' if options.score else 'make-pairs'}: every rank has the whole model; leave strategy=sharded out"
            )
        if kind == "rewards" and settings.train.loss == "sft":
            raise UserError("--score rewards is for preference losses, not train.loss=sft; take --score logps")
        tokenizer = models.load_tokenizer_of(settings.model)
        if writes and tokenizer is None:
            raise UserError(f"model.path {settings.model.path} has no tokenizer, which writing answers needs")
        source = options.data or settings.data.valid or settings.data.train
        found = bulk.open_rows(str(source), settings.data, "prompt" if writes else settings.record_kind, say)
        model = models.load(settings.model, settings.train.seed)
        loading.divided(model, None, world, settings.metal.wired)
        reference: Any = {} if kind == "rewards" else None
        if options.run is not None or settings.model.adapter is not None:
            models.make_trainable(model, settings.model, settings.train.seed)
            reference = models.trainable(model) if kind == "rewards" else None
        if options.run is not None:
            models.load_trained(model, Path(options.run), "--run")
        parts = [models.fingerprint(settings.model, settings.train.seed), models.digest(models.trainable(model))]
        if kind == "rewards" and settings.model.reference != "initial":
            reference = models.load_reference(settings.model, settings.train.seed)
            parts.append(models.reference_fingerprint(settings.model, settings.train.seed))
        model.eval()
    key = bulk.key_of(kind, *parts, bulk.digest_of(found), config.learning_digest(settings))
    world.require_equal("model, data or settings", key)
    do: Callable[[range], list[str]]
    if writes:
        draws = None if kind == "greedy" else settings.evaluate.completions
        do = bulk.Writer(model, tokenizer, found, settings, draws)
        do = bulk.PairMaker(do) if kind == "pairs" else do
    else:
        do = bulk.Scorer(model, reference, found, settings, tokenizer, world.alone())
    figures = bulk.pull(kind, key, found, out, settings, world, do)
    say.record(figures)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = config.Parser(
        prog="python -m lib.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--model", metavar="PATH", help="policy to evaluate")
    parser.add_argument(
        "--reference", metavar="PATH", help="reference model (default: the policy itself, as it stands)"
    )
    parser.add_argument("--data", metavar="FILE", help="records to evaluate on (default: the run's held-out ones)")
    parser.add_argument("--per-pair", metavar="OUT", help="write one JSON line a pair")
    parser.add_argument(
        "--score",
        choices=bulk.KINDS,
        nargs="?",
        const="rewards",
        help="a line for every row of --data: rewards and log-probabilities, log-probabilities alone, the greedy answer, or drawn ones",
    )
    parser.add_argument("--out", metavar="OUT", help="where --score writes")
    parser.add_argument(
        "--make-pairs", metavar="OUT", help="preference pairs of answers drawn to the prompts of --data"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as train.py --help lists them")
    options = parser.parse_intermixed_args(arguments)
    if (options.run is None) == (options.model is None):
        raise UserError("give either --run RUN or --model PATH")
    if options.model is not None and options.data is None:
        raise UserError("--model needs --data FILE")
    if options.score is not None and (options.out is None or options.make_pairs is not None):
        raise UserError("--score needs --out OUT, and goes without --make-pairs")
    return options


def _read_config(options: argparse.Namespace) -> Config:
    if options.run is None:
        model = {"path": options.model, "reference": options.reference or "initial"}
        return config.load(None, options.overrides, base={"model": model, "data": {"train": options.data}})
    path = Path(options.run) / "config.yaml"
    if not (Path(options.run) / models.WEIGHTS).is_file():
        raise UserError(f"--run {options.run}: no finished run there ({models.WEIGHTS} is missing)")
    extra = [f"model.reference={options.reference}"] if options.reference else []
    extra += [f"data.valid={options.data}"] if options.data else []
    settings = config.load(path, [*extra, *options.overrides])
    if settings.strategy == "auto":  # a model that was too large for one host still is
        settings = settings.model_copy(update={"strategy": command.decided(path.with_name("plan.json"))})
    return settings


if __name__ == "__main__":
    sys.exit(main())
