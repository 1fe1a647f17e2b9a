"""A whole file scored, answered or made into pairs by all ranks.

Each rank has the whole model and takes chunks of rows from the work queue at its pace; or ranks hold parts of one model
and do the same chunk at the same time. What a chunk's rows come to depends on the chunk alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from lib.config.load import learning_digest
from lib.config.settings import Config
from lib.data import sources
from lib.data import tokenizer as tokenizer_module
from lib.data.dataset import Dataset, Tokenisation, in_memory
from lib.data.encode import Encoder
from lib.data.prompts import columns_of, ids_of
from lib.data.record_formats import JSON, RecordKind, Unusable
from lib.data.sources import Records
from lib.data.tokenizer import Tokenizer
from lib.distributed.work_queue import Lines, ServedQueue, WorkQueue, open_queue, work
from lib.distributed.world import World, host_names
from lib.errors import UserError
from lib.evaluate.evaluator import columns_by_row
from lib.evaluate.judges import Question, judge_of, question_of
from lib.evaluate.sampler import GreedySampling, Prompt, Sample, Sampler
from lib.model import adapter_files, adapters
from lib.model import load as load_module
from lib.model.partition import Division, Part
from lib.system.terminal import Terminal
from lib.training import divided_world
from lib.training.checkpoint import file_sha256
from lib.training.reference_model import dataset_logps
from lib.training.run_inputs import vocabulary
from lib.training.run_plan import sharded_plan, stage_blocks

KINDS = ("logps", "rewards", "greedy", "samples")


class FileJob(NamedTuple):
    """An output that all ranks write: what it is, a digest of all that its lines depend on, the rows of the input, and
    how many of them a rank takes at a time."""

    what: str
    key: str
    rows: int
    out: Path
    chunk_rows: int

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def rows_of(self, chunk: int) -> range:
        return range(chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows))


def pull(
    job: FileJob,
    world: World,
    do: Callable[[range], Lines | None],
    needs_model: bool = True,
    queue: WorkQueue | None = None,
) -> dict[str, Any] | None:
    """Lines for all rows, in order, into the job's file: by all ranks, each once; what is finished already is taken.
    Each rank works at its pace; where they hold parts of a model that is needed, all at the same chunk. queue: the
    job's, where it is open. Returns: On rank 0, the figures for people and machines; elsewhere nothing."""
    say, began = Terminal(silent=world.rank != 0), time.perf_counter()
    queue = queue or open_queue(world, job.out, job.key, job.chunks)
    served = queue if isinstance(queue, ServedQueue) else None
    missing = [*served.fresh] if served else []
    before = job.chunks - len(missing) if served else 0
    if before:
        say.line(f"{before:,} of {job.chunks:,} chunks are there already")
    with say.counting(job.what, job.rows) as progress:
        if served is not None:
            served.report = lambda done, by_rank: progress(min(done * job.chunk_rows, job.rows))
        together = needs_model and world.divides_model
        if not together:
            work(queue, lambda chunk: do(job.rows_of(chunk)))
        for chunk in world.broadcast_value(missing) if together else ():
            with world.agreeing("a chunk of rows"):
                lines = do(job.rows_of(chunk))
                if served is not None and lines is not None:
                    served.finish(chunk, lines)
                    if served.fault:
                        raise UserError(served.fault)
    if served is None:
        queue.close(0)
        return None
    try:
        served.journal.finish(job.out)
    except OSError as error:
        raise UserError(f"{job.out}: {error.strerror}; free some space and start again, nothing is lost") from None
    seconds, scored = time.perf_counter() - began, job.rows - min(before * job.chunk_rows, job.rows)
    served.close(world.timeout_seconds)
    by_rank = {str(rank): count for rank, count in sorted(served.finished_by.items())}
    figures = {"rows": job.rows, "scored": scored, "seconds": seconds, "rows_per_second": scored / seconds}
    return {**figures, "chunks_by_rank": by_rank}


def key_of(*parts: Any) -> str:
    """A digest of all that the lines depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def is_on_rank_0(path: Path, world: World) -> bool:
    """Whether rank 0 has a file; all ranks call it."""
    return world.broadcast_text(str(path.exists())) == "True"


def digest_of(records: Records) -> str:
    return key_of(*((index.digest, len(index.entries)) for index in records.indices))


def evaluation_records(named: str | None, settings: Config, kind: RecordKind, say: Terminal) -> Records:
    """The records of --data, by default those that the run holds out. kind: what the command reads of a record."""
    source, data = named or settings.data.valid, settings.data
    if source is not None:
        return sources.open_records(sources.files_of(str(source), data.cache_dir, say.line), data, kind, say.line)
    trained_as: RecordKind = "prompt" if settings.rollouts.rounds else settings.record_kind
    if not data.holdout or trained_as == "group":
        raise UserError("the run has no held-out records (data.valid, data.holdout); name a file with --data")
    if kind not in (trained_as, "prompt"):
        raise UserError("a run of rounds has held-out prompts alone; name a file with --data")
    # What data.holdout keeps of data.train, by the hashes that training goes by, which are of records of its kind.
    records, rows = sources.open_sources(data.train, data, trained_as, True, say.line)
    if kind == trained_as:
        return records.only(rows)
    others = sources.open_records([index.file for index in records.indices], data, kind, say.line)
    each = zip(records.indices, records.by_file(rows), others.indices, strict=True)
    held_out = [np.isin(other.entries["line"], index.entries["line"][of_file]) for index, of_file, other in each]
    return others.only(np.flatnonzero(np.concatenate(held_out)))


class Scorer:
    """Log-probabilities of records' completions, and with a reference DPO's rewards: a line for each of some rows.
    reference: a model; or the policy's trained parameters as they were before training; None for log-probabilities
    alone. world: of the ranks that hold parts of the models; else of this rank alone."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | dict[str, mx.array] | None,
        records: Records,
        settings: Config,
        tokenizer: Tokenizer | None,
        world: World,
    ):
        self.model, self.reference, self.records, self.settings, self.world = model, reference, records, settings, world
        words = vocabulary(settings.model)
        self.tokenisation = Tokenisation.of(settings.data, settings.record_kind, tokenizer, words)

    def __call__(self, rows: range) -> Lines:
        """Raises UserError: a row is unusable; with data.skip_invalid its line says why."""
        lines: dict[int, dict[str, Any]] = {row: {"row": row, "line": self.records.line(row)} for row in rows}
        usable, pieces = list[int](), list[np.ndarray]()
        with self.world.agreeing("reading rows"):
            for row, (place, result) in zip(rows, self.tokenisation.rows(self.records, rows), strict=True):
                if not isinstance(result, Unusable):
                    usable.append(row)
                    pieces += result[0]
                    if (label := self.records.label(row)) is not None:
                        lines[row]["label"] = label
                elif self.settings.data.skip_invalid:
                    lines[row]["error"] = f"{place}: {result}"
                else:
                    raise UserError(f"{place}: {result}; data.skip_invalid=true goes on and names it in the output")
        kind: RecordKind = "preference" if self.tokenisation.kind == "preference" else "sft"
        columns = self._columns(in_memory("", kind, "", pieces)) if usable else {}
        for i, row in enumerate(usable):
            lines[row] |= {name: float(column[i]) for name, column in columns.items()}
        return [json.dumps(line) for line in lines.values()]

    def _columns(self, dataset: Dataset) -> dict[str, np.ndarray]:
        policy, reference, tokens = self._logps(self.model, dataset), None, dataset.scored_tokens
        if isinstance(self.reference, nn.Module):
            reference = self._logps(self.reference, dataset)
        elif self.reference is not None:
            trained = adapter_files.trainable(self.model)
            self.model.update(tree_unflatten(self.reference))
            reference = self._logps(self.model, dataset)
            self.model.update(tree_unflatten(trained))
        columns: dict[str, np.ndarray] = {}
        for k, name in enumerate(("chosen", "rejected") if policy.shape[1] == 2 else ("completion",)):
            columns |= {f"policy_{name}_logp": policy[:, k], f"{name}_tokens": tokens[:, k]}
            columns |= {} if reference is None else {f"reference_{name}_logp": reference[:, k]}
        rewards = {} if reference is None else columns_by_row(policy, reference, tokens, self.settings.train)
        return columns | {name: column for name, column in rewards.items() if not name.endswith("_logp")}

    def _logps(self, model: nn.Module, dataset: Dataset) -> np.ndarray:
        return dataset_logps(model, dataset, self.world, [1] * self.world.workers.size, self.settings)


class CompletionWriter:
    """Completions of records' prompts, the greedy one or so many drawn ones: a line for each of some rows. world: of
    the ranks that hold parts of the model; else of this rank alone."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        records: Records,
        settings: Config,
        draws: int | None,
        world: World = World(),  # noqa: B008  (frozen)
    ):
        self.tokenizer, self.records, self.settings, self.count = tokenizer, records, settings, draws or 1
        self.world, self.answers, self.cut = world, 0, 0  # of this rank
        limits, most = vocabulary(settings.model), settings.evaluate.max_tokens
        self.encoder = Encoder(tokenizer, settings.data, limits.eos_token_id)
        self.encoder.stop_generation()
        self.end_id = min(self.encoder.end_ids) if limits.eos_token_id is None else limits.eos_token_id
        self.tokenisation = Tokenisation(settings.data, "prompt", self.encoder, limits)
        sampling = GreedySampling(most, self.count, 0.0 if draws is None else settings.rollouts.temperature)
        self.sampler = Sampler(model, tokenizer, sampling, self.world)

    def __call__(self, rows: range) -> Lines:
        lines = [
            {"row": row, "line": self.records.line(row), "completions": [sample.text for sample in of_row]}
            for row, of_row in zip(rows, self.drawn(rows), strict=True)
        ]
        return [json.dumps(line, ensure_ascii=False) for line in lines]

    def drawn(self, rows: range) -> list[list[Sample]]:
        """The samples of each row's prompt."""
        with self.world.agreeing("reading rows"):
            prompts = [Prompt(row, self.prompt_ids(row)) for row in rows]
        with self.world.workers.together("answers", passes=len(prompts) * self.count):
            samples = self.sampler.sample(prompts, (self.settings.train.seed,))
        self.answers += len(samples)
        self.cut += sum(sample.finish == "length" for sample in samples)
        return [samples[start : start + self.count] for start in range(0, len(samples), self.count)]

    def summary(self, out: Path, rows: int) -> str:
        """How many of this rank's answers were cut; empty where all ended."""
        text = f"{self.cut:,} of the {self.answers:,} answers that rank {self.world.rank} drew have no end within "
        return f"{text}evaluate.max_tokens={self.settings.evaluate.max_tokens}" if self.cut else ""

    def prompt_ids(self, row: int) -> list[int]:
        """The tokens of a row's prompt. Raises UserError: it has none, or the model cannot answer it."""
        ((place, record),) = self.tokenisation.placed(self.records, [row])
        limits, most = self.tokenisation.vocabulary, self.settings.evaluate.max_tokens
        try:
            return ids_of(record, self.encoder, limits, most, "evaluate.max_tokens")
        except Unusable as why:
            raise UserError(f"{place}: {why}") from None


class PairMaker:
    """Preference pairs from drawn completions: the best against the worst, where one is better. A completion that
    evaluate.max_tokens cut is in none: training adds an end token to a text, and the model would learn to stop in the
    middle of a sentence."""

    def __init__(self, writer: CompletionWriter):
        self.writer, self.judge = writer, judge_of(writer.settings, grades=True)

    def __call__(self, rows: range) -> Lines:
        """One line for each of some rows: a pair, or nothing where all completions are equally good."""
        writer, questions, answers = self.writer, list[Question](), list[list[Sample]]()
        drawn = writer.drawn(rows)
        with writer.world.agreeing("judging"):
            if writer.world.rank:
                return []
            for row, of_row in zip(rows, drawn, strict=True):
                distinct = {sample.text: sample for sample in of_row[::-1] if sample.finish == "stop"}
                if distinct:
                    answers.append(sorted(distinct.values(), key=lambda sample: sample.k))
                    texts = [sample.text for sample in answers[-1]]
                    questions.append(question_of(row, texts, writer.records, writer.settings.data, writer.tokenizer))
            grades = self.judge(questions) if questions else []
            pairs = [self._pair(*each) for each in zip(questions, answers, grades, strict=True)]
        return [json.dumps(pair, ensure_ascii=False) for pair in pairs if pair]

    def summary(self, out: Path, rows: int) -> str:
        """How many prompts gave a pair, of all ranks, and what this rank had to leave out."""
        made = f"{out}: {len(out.read_bytes().splitlines()):,} of {rows:,} prompts gave a pair"
        return f"{made}; {cut} and are in none" if (cut := self.writer.summary(out, rows)) else made

    def _pair(self, question: Question, answers: Sequence[Sample], of_answers: Sequence[float]) -> JSON:
        """Empty where no answer is better. of_answers: grades, NaN where the judge gave none."""
        grades = np.array(of_answers)
        if np.isnan(grades).all() or np.nanmax(grades) == np.nanmin(grades):
            return {}
        best, worst = (answers[int(of(grades))] for of in (np.nanargmax, np.nanargmin))
        if not (best.text.strip() and worst.text.strip()):
            return {}
        pair = columns_of({**question.record}, self.writer.settings.data, self.writer.tokenizer)
        pair |= {"chosen": best.text, "rejected": worst.text}
        if "prompt_ids" in pair:  # an end token is added to text alone
            sides = {"chosen_ids": best, "rejected_ids": worst}
            pair |= {name: [*side.tokens[:-1], self.writer.end_id] for name, side in sides.items()}
        return pair


# ---- The model that is asked

Parts = Division | tuple[int, ...]  # of every block, or each rank's blocks


def divides(strategy: str, world: World) -> bool:
    """Whether the ranks are to hold parts of one model."""
    return strategy in ("sharded", "pipelined") and world.size > 1


def parts_of_model(settings: Config, world: World) -> tuple[Parts | None, World]:
    """What each rank holds of a model as strategy has it, and the world of these ranks; None: all of it."""
    if not divides(settings.strategy, world):
        return None, world
    if settings.strategy == "pipelined":
        blocks = stage_blocks(settings.plan, settings.model, world, host_names(world))
        return blocks, divided_world.pipelined(world, blocks)
    division = sharded_plan(settings, world, host_names(world)).division
    assert division is not None
    return division, divided_world.sharded(world, division)


class LoadedModel(NamedTuple):
    """A rank's model, or its part of one; the trained parameters as they were before training; the world whose ranks
    hold parts of it, else the one that it was loaded in."""

    model: nn.Module
    start: dict[str, mx.array]
    world: World


class StoredModel(NamedTuple):
    """A model to evaluate. adapter: a run's folder or one of its checkpoints; None for the model as it stands."""

    settings: Config
    adapter: Path | None

    @property
    def name(self) -> str:
        return str(self.adapter or self.settings.model.path)

    def tokenizer(self) -> Tokenizer:
        """Raises UserError: the model has none."""
        tokenizer = tokenizer_module.load_tokenizer_of(self.settings.model)
        if tokenizer is None:
            raise UserError(f"{self.settings.model.path} has no tokenizer, which asking it for answers needs")
        return tokenizer

    def load(self, world: World, parts: Parts | None = None) -> LoadedModel:
        """The model on every rank. parts, world: of `parts_of_model`."""
        settings, start = self.settings, dict[str, mx.array]()
        with world.agreeing("loading the model"):
            model = load_module.load(settings.model, settings.train.seed, lazy=parts is not None)
            if self.adapter is not None or settings.model.adapter is not None:
                adapters.make_trainable(model, settings.model, settings.train.seed)
                start = adapter_files.trainable(model)
            if self.adapter is not None:
                adapter_files.load_trained(model, self.adapter, "--run")
        world = divided_world.divided(model, parts, world, keeps_wired=True)
        model.eval()
        start = {name: start[name] for name in adapter_files.trainable(model) if start}
        for name, whole in start.items():
            if isinstance(part := world.part(name), Part):
                start[name] = mx.contiguous(part.of(whole, world.rank))
        mx.eval(start)
        return LoadedModel(model, start, world)

    def digest(self) -> str:
        """Of the files that the model is made of."""
        parts = [load_module.fingerprint(self.settings.model, self.settings.train.seed)]
        if self.adapter is not None:
            parts.append(file_sha256(self.adapter / adapter_files.ADAPTER_WEIGHTS))
        return key_of(*parts, learning_digest(self.settings))
