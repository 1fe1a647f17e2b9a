"""A whole file scored, answered or made into pairs by all ranks.

Each rank has the whole model and takes chunks of rows from the work queue at its pace; or ranks hold parts of one model
and do the same chunk at the same time. What a chunk's rows come to depends on the chunk alone: draws follow from
train.seed and the chunk."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm import batch_generate
from mlx_lm.sample_utils import make_sampler

from lib.config.load import learning_digest
from lib.config.settings import Config, DataSettings
from lib.data import sources
from lib.data.batch import collate
from lib.data.dataset import Example, parse_record, tokenised
from lib.data.order import micro_batches
from lib.data.prompts import asked_of, columns_of, ids_of
from lib.data.record_formats import RecordKind, Unusable
from lib.data.sources import Records
from lib.data.tokenize import Encoder
from lib.data.tokenizer import Tokenizer, limits_of, require_own
from lib.distributed.work_queue import Journal, Lines, ServedQueue, open_queue, work
from lib.distributed.world import World, host_names
from lib.errors import UserError
from lib.evaluate.judges import Question, scorer_of
from lib.model import adapter_files, adapters
from lib.model import load as load_module
from lib.model.logps import completion_logps
from lib.model.partition import Division, Part
from lib.model.token_stream import arrays_of
from lib.system import out_of_memory
from lib.system.terminal import Terminal
from lib.training import divided_world, losses, reference_model
from lib.training.checkpoint import file_sha256
from lib.training.divided_world import Lockstep, pipelined, sharded
from lib.training.inputs import vocabulary
from lib.training.objective import objective
from lib.training.run_facts import sharded_plan, stage_blocks

Failure = dict[str, object]  # the line of a row that is unusable

KINDS = ("logps", "rewards", "greedy", "samples")


class FileFigures(TypedDict):
    """What became of a file; empty on all ranks but rank 0."""

    rows: int
    scored: int  # by this command, without what was there already
    seconds: float
    rows_per_second: float
    chunks_by_rank: dict[str, int]


def pull(
    kind: str,
    key: str,
    items: Sized,
    out: Path,
    settings: Config,
    world: World,
    do: Callable[[range], Lines],
    chunk_rows: int | None = None,
) -> FileFigures | None:
    """Lines for all rows, in order, into `out`: by all ranks, each once; what an earlier try finished is taken.

    key: digest of all that the lines depend on. do: makes lines for some rows. chunk_rows: that a rank takes at a time;
    by default evaluate.batch_size.

    Returns:
        On rank 0, the figures for people and machines; elsewhere nothing.

    Raises:
        AgreedError, UserError: on one rank, so on all.
    """
    size, total = chunk_rows or settings.evaluate.batch_size, len(items)
    say, began = Terminal(silent=world.rank != 0), time.perf_counter()
    chunks = -(-total // size)
    queue = open_queue(world, out, key, chunks)
    before = chunks - len(queue.fresh) if isinstance(queue, ServedQueue) else 0
    if before:
        say.line(f"{before:,} of {chunks:,} chunks are there already")

    def lines_of(chunk: int) -> Lines:
        return do(range(chunk * size, min((chunk + 1) * size, total)))

    if not isinstance(queue, ServedQueue):
        work(queue, lines_of)
        queue.close(0)
        return None
    with say.counting(kind, total) as progress:
        queue.report = lambda done, by_rank: progress(min(done * size, total))
        work(queue, lines_of)
    try:
        queue.journal.finish(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; free some space and start again, nothing is lost") from None
    seconds = time.perf_counter() - began
    queue.close(world.timeout_seconds)
    by_rank = {str(rank): count for rank, count in sorted(queue.finished_by.items())}
    scored = total - min(before * size, total)
    return FileFigures(
        rows=total, scored=scored, seconds=seconds, rows_per_second=scored / seconds, chunks_by_rank=by_rank
    )


def open_rows(source: str, settings: DataSettings, kind: RecordKind, say: Terminal) -> Records:
    """All usable records of a source, in order."""
    return sources.open_records(sources.files_of(source, settings, say.line), settings, kind, say.line)


def key_of(*parts: Any) -> str:
    """A digest of all that the lines depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def digest_of(records: Records) -> str:
    return key_of(*((index.digest, len(index.entries)) for index in records.indices))


def agreeing(world: World, what: str) -> contextlib.AbstractContextManager[None]:
    """Where ranks go on together afterwards, an error of one is all ranks'."""
    return world.agreeing(what) if world.size > 1 else contextlib.nullcontext()


# ---- Log-probabilities and rewards


class Scorer:
    """Log-probabilities of records' completions, and with a reference DPO's rewards.

    Args:
        reference: a model; or the policy's trained parameters as they were before training; None for log-probabilities
            alone.
        world: of the ranks that hold parts of the models; else of this rank alone.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | dict[str, mx.array] | None,
        records: Records,
        settings: Config,
        tokenizer: Tokenizer | None,
        world: World,
    ):
        self.model, self.reference, self.records, self.settings = model, reference, records, settings
        self.world = world
        words, data = vocabulary(settings.model), settings.data
        self.limits = limits_of(words)
        self.encoder = None if tokenizer is None else Encoder(tokenizer, data, words["eos_token_id"])
        self.multiple, self.shares_prompts, _ = reference_model.layout(model, data, world)

    def __call__(self, rows: range) -> Lines:
        """A line for each of some rows; of one that is unusable, why (data.skip_invalid).

        Raises:
            UserError: a row is unusable.
        """
        return self.of_chunks([rows])[0]

    def of_chunks(self, chunks: Sequence[range]) -> list[Lines]:
        """The same for some chunks, each of which is scored by itself."""
        with agreeing(self.world, "reading rows"):
            read = [self._read(rows) for rows in chunks]
        examples = [own for own, _ in read]
        policy, reference = self._logps_of(self.model, examples), self._reference_logps_of(examples)
        return [
            self._lines(rows, *of_chunk, policy[i], None if reference is None else reference[i])
            for i, (rows, of_chunk) in enumerate(zip(chunks, read, strict=True))
        ]

    def _read(self, rows: range) -> tuple[list[Example], dict[int, Failure]]:
        """The usable rows, and what is wrong with the others."""
        settings = self.settings
        read = (
            (self.records.location(row), parse_record(self.records, row, settings.data, settings.record_kind))
            for row in rows
        )
        examples, failures = [], {}
        results = tokenised(read, settings.data, self.encoder, self.limits)
        for row, (place, record, result) in zip(rows, results, strict=True):
            if not isinstance(result, Unusable) and not isinstance(record, Unusable):
                examples.append(Example.of(row, result[0], record.label))
            elif settings.data.skip_invalid:
                failures[row] = {"row": row, "line": self.records.line(row), "error": f"{place}: {result}"}
            else:
                raise UserError(f"{place}: {result}; data.skip_invalid=true goes on and names it in the output")
        return examples, failures

    def _lines(
        self,
        rows: range,
        examples: list[Example],
        failures: Mapping[int, Failure],
        policy: np.ndarray,
        reference: np.ndarray | None,
    ) -> Lines:
        values = self._values(examples, policy, reference) if examples else {}
        scored: dict[int, Mapping[str, Any]] = {
            e.row: {
                "row": e.row,
                "line": self.records.line(e.row),
                **({} if e.label is None else {"label": e.label}),
                **{name: float(v[i]) for name, v in values.items()},
            }
            for i, e in enumerate(examples)
        }
        return [json.dumps(({**scored, **failures})[row]) for row in rows]

    def _values(
        self, examples: list[Example], policy: np.ndarray, reference: np.ndarray | None
    ) -> dict[str, np.ndarray]:
        settings = self.settings
        tokens = np.array([[*map(len, e.scored_indices)] for e in examples])
        names = ("chosen", "rejected") if policy.shape[1] == 2 else ("completion",)
        values = {f"policy_{name}_logp": policy[:, k] for k, name in enumerate(names)}
        values |= {f"{name}_tokens": tokens[:, k] for k, name in enumerate(names)}
        if reference is None:
            return values
        if settings.record_kind == "unpaired":  # no loss: it compares a row with all others
            rewards = settings.train.beta * (policy[:, 0] - reference[:, 0])
            return values | {"reference_completion_logp": reference[:, 0], "reward": rewards}
        per_pair, _ = objective(settings.train, mx.array(policy), mx.array(tokens), mx.array(reference))
        counts = [mx.array(tokens[:, k]) for k in range(2)]
        of_policy, of_reference = (
            losses.LogProbs(mx.array(logps[:, 0]), mx.array(logps[:, 1]), *counts) for logps in (policy, reference)
        )
        chosen, rejected = losses.implicit_rewards(
            losses.terms_of(settings.train.loss), of_policy, of_reference, settings.train.beta
        )
        values |= {f"reference_{name}_logp": reference[:, k] for k, name in enumerate(names)}
        return values | {
            "reward_chosen": np.array(chosen),
            "reward_rejected": np.array(rejected),
            "loss": np.array(per_pair),
        }

    def _reference_logps_of(self, chunks: Sequence[list[Example]]) -> list[np.ndarray] | None:
        if self.reference is None or self.settings.record_kind == "sft":
            return None
        if isinstance(self.reference, nn.Module):
            return self._logps_of(self.reference, chunks)
        now, start = adapter_files.trainable(self.model), self.reference
        self.model.update(tree_unflatten(list(start.items())))
        logps = self._logps_of(self.model, chunks)
        self.model.update(tree_unflatten(list(now.items())))
        return logps

    def _logps_of(self, model: nn.Module, chunks: Sequence[list[Example]]) -> list[np.ndarray]:
        """float32 [n, K] for each chunk, in nats, the same on every rank."""
        own = [self._logps(model, examples) for examples in chunks]
        flat = np.concatenate([np.zeros(1, np.float32), *(logps.reshape(-1) for logps in own)])
        summed = np.array(self.world.workers.all_sum(mx.array(flat), "log-probabilities of some rows"))
        ends = np.cumsum([1, *(logps.size for logps in own)])
        return [part.reshape(logps.shape) for part, logps in zip(np.split(summed, ends)[1:-1], own, strict=True)]

    def _logps(self, model: nn.Module, examples: list[Example]) -> np.ndarray:
        """float32 [n, K], in nats, as far as this rank knows them."""
        if not examples:
            return np.zeros((0, 1), np.float32)
        lengths = np.array([len(e.prompt_ids) + max(map(len, e.completions)) for e in examples])
        logps = np.zeros((len(examples), len(examples[0].completions)), np.float32)
        can_halve = not isinstance(self.world.workers, Lockstep)

        def of(indices: Sequence[int]) -> np.ndarray:
            batch = collate([examples[i] for i in indices], self.multiple, self.shares_prompts)
            with self.world.workers.together("log-probabilities of a batch"):
                return np.array(completion_logps(model, arrays_of(batch.inputs)))

        mx.eval(model.state)
        for part in micro_batches(np.argsort(lengths, kind="stable"), self.settings.evaluate.batch_size):
            logps[part] = np.concatenate([own for _, own in out_of_memory.in_pieces(part.tolist(), of, can_halve)])
        return logps


# ---- Answers, and pairs made of them


class Drawn(NamedTuple):
    """A completion that was drawn."""

    text: str
    ids: list[int]
    """Without the end token."""
    is_whole: bool
    """Whether the model ended it; else evaluate.max_tokens did."""


class CompletionWriter:
    """Completions of records' prompts: the greedy one, or so many drawn ones.

    Args:
        world: of the ranks that hold parts of the model; else of this rank alone.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        records: Records,
        settings: Config,
        draws: int | None,
        world: World | None = None,
    ):
        self.model, self.tokenizer, self.records, self.settings, self.draws = model, tokenizer, records, settings, draws
        self.world = world or World()
        words = vocabulary(settings.model)
        self.limits = limits_of(words)
        self.encoder = Encoder(tokenizer, settings.data, words["eos_token_id"])
        self.encoder.stop_generation()
        self.end_id = words["eos_token_id"] if words["eos_token_id"] is not None else min(self.encoder.end_ids)
        self.model.eval()

    def __call__(self, rows: range) -> Lines:
        """A line for each of some rows."""
        written = zip(rows, self.completions(rows), strict=True)
        return [
            json.dumps({"row": row, "line": self.records.line(row), "completions": texts}, ensure_ascii=False)
            for row, texts in written
        ]

    def of_chunks(self, chunks: Sequence[range]) -> list[Lines]:
        """The same for some chunks, one after the other."""
        return list(map(self, chunks))

    def completions(self, rows: range) -> list[list[str]]:
        """Some completions of each row's prompt."""
        return [[one.text for one in of_row] for of_row in self.drawn(rows)]

    def drawn(self, rows: range) -> list[list[Drawn]]:
        """The same, with what else is known of them."""
        settings = self.settings
        with agreeing(self.world, "reading rows"):
            prompts = [ids for ids in map(self._prompt_ids, rows) for _ in range(self.draws or 1)]
        seed = np.random.SeedSequence([settings.train.seed, rows.start]).generate_state(1)
        mx.random.seed(int(seed[0]))
        draw = make_sampler(temp=0.0 if self.draws is None else settings.evaluate.temperature)
        workers = self.world.workers
        with workers.together("answers", passes=len(prompts)):
            response = batch_generate(
                self.model,
                self.tokenizer,
                prompts,
                max_tokens=settings.evaluate.max_tokens,
                return_token_ids=True,
                sampler=lambda logps: workers.decide(draw(logps)),
            )
        ends = self.tokenizer.eos_token_ids
        ids = [list(itertools.takewhile(lambda token: token not in ends, own)) for own in response.token_ids or []]
        most = settings.evaluate.max_tokens
        made = [Drawn(self.tokenizer.decode(own), own, len(own) < most) for own in ids]
        return [made[start : start + (self.draws or 1)] for start in range(0, len(made), self.draws or 1)]

    def _prompt_ids(self, row: int) -> list[int]:
        """The tokens of a row's prompt.

        Raises:
            UserError: it has none, or the model cannot answer it.
        """
        record = parse_record(self.records, row, self.settings.data, "prompt")
        try:
            if isinstance(record, Unusable):
                raise record
            require_own(record, self.tokenizer, self.records.location(row))
            ids = ids_of(record, self.encoder)
            self.limits.check_ids([ids])
            self.limits.check_answer(len(ids), self.settings.evaluate.max_tokens, "evaluate.max_tokens")
        except Unusable as why:
            raise UserError(f"{self.records.location(row)}: {why}") from None
        return ids


def _distinct(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The first of each text."""
    first: dict[str, Drawn] = {}
    for one in drawn:
        first.setdefault(one.text, one)
    return list(first.values())


class PairMaker:
    """Preference pairs from drawn completions: the best against the worst, where one is better.

    A completion that evaluate.max_tokens cut is in none: training adds an end token to a text, and the model would
    learn to stop in the middle of a sentence.
    """

    def __init__(self, writer: CompletionWriter):
        self.writer, self.settings, self.judge = writer, writer.settings, scorer_of(writer.settings)
        self.drawn = self.cut = 0  # completions of this rank, and those of them that have no end

    def __call__(self, rows: range) -> Lines:
        """One line for each of some rows: a pair, or nothing where all completions are the same.

        Raises:
            UserError: a record without an answer, where there is no judge; or what the judge did wrong.
        """
        made = self.writer.drawn(rows)
        drawn = [_distinct([one for one in of_row if one.is_whole]) for of_row in made]
        self.drawn += sum(map(len, made))
        self.cut += sum(not one.is_whole for of_row in made for one in of_row)
        with agreeing(self.writer.world, "judging"):
            return self._pairs(rows, drawn) if self.writer.world.rank == 0 else []

    def of_chunks(self, chunks: Sequence[range]) -> list[Lines]:
        """The same for some chunks, one after the other."""
        return list(map(self, chunks))

    def summary(self, out: Path, rows: int) -> str:
        """For people: how many prompts of all ranks gave a pair, and what this rank had to leave out."""
        with out.open("rb") as file:
            pairs = sum(1 for _ in file)
        made = f"{out}: {pairs:,} of {rows:,} prompts gave a pair"
        if not self.cut:
            return made
        most = self.settings.evaluate.max_tokens
        return (
            f"{made}; {self.cut:,} of the {self.drawn:,} answers that rank {self.writer.world.rank} drew have no end "
            f"within evaluate.max_tokens={most} and are in none"
        )

    def _pairs(self, rows: range, drawn: Sequence[list[Drawn]]) -> Lines:
        writer, data = self.writer, self.settings.data
        kept = [(row, writer.records[row], of_row) for row, of_row in zip(rows, drawn, strict=True) if of_row]
        questions = [
            Question(
                writer.records.location(row),
                asked_of(record, data, writer.tokenizer),
                [one.text for one in of_row],
                record,
            )
            for row, record, of_row in kept
        ]
        scores = self.judge(questions) if questions else []
        lines = []
        for (_, record, of_row), of_texts in zip(kept, scores, strict=True):
            grades = np.array(of_texts)  # NaN where the judge gave none
            if np.isnan(grades).all():
                continue
            best, worst = (of_row[int(find(grades))] for find in (np.nanargmax, np.nanargmin))
            if np.nanmax(grades) > np.nanmin(grades) and best.text.strip() and worst.text.strip():
                pair = columns_of(record, data, writer.tokenizer) | {"chosen": best.text, "rejected": worst.text}
                if "prompt_ids" in pair:  # an end token is added to text alone
                    pair |= {"chosen_ids": [*best.ids, writer.end_id], "rejected_ids": [*worst.ids, writer.end_id]}
                lines.append(json.dumps(pair, ensure_ascii=False))
        return lines


def open_asked(named: str | None, settings: Config, kind: RecordKind, say: Terminal) -> Records:
    """named: what --data says. kind: what the command reads of a record.

    Raises:
        UserError: nothing is named, and the run has nothing held out that could be read so; or as `open_records`.
    """
    source, data = named or settings.data.valid, settings.data
    if source is not None:
        return open_rows(str(source), data, kind, say)
    trained_as: RecordKind = "prompt" if settings.rollouts.rounds else settings.record_kind
    if not data.holdout or trained_as == "group":
        raise UserError("the run has no held-out records (data.valid, data.holdout); name a file with --data")
    if kind not in (trained_as, "prompt"):
        raise UserError("a run of rounds has held-out prompts alone; name a file with --data")
    return _held_out(settings, trained_as, kind, say)


def _held_out(settings: Config, trained_as: RecordKind, kind: RecordKind, say: Terminal) -> Records:
    """What data.holdout keeps of data.train, by the hashes that training goes by, which are of records of its kind."""
    data = settings.data
    records, rows = sources.open_sources(data.train, data, trained_as, True, say.line)
    if kind == trained_as:
        return records.only(rows)
    files = [index.file for index in records.indices]
    others = sources.open_records(files, data, kind, say.line)
    lines = [
        index.entries["line"][of_file] for index, of_file in zip(records.indices, records.by_file(rows), strict=True)
    ]
    kept = [np.isin(index.entries["line"], wanted) for index, wanted in zip(others.indices, lines, strict=True)]
    return others.only(np.flatnonzero(np.concatenate(kept)))


CHUNKS = 16  # of a group: between groups the ranks synchronise, and what is finished is kept

Parts = Division | tuple[int, ...]  # of every block, or each rank's blocks


def divides(settings: Config, world: World) -> bool:
    """Whether the ranks are to hold parts of one model."""
    return settings.strategy in ("sharded", "pipelined") and world.size > 1


def parts_of_model(settings: Config, world: World) -> tuple[Parts | None, World]:
    """What each rank holds of a model as strategy has it, and the world of these ranks; None: all of it.

    Raises:
        AgreedError: the model cannot be divided so.
    """
    if not divides(settings, world):
        return None, world
    if settings.strategy == "pipelined":
        blocks = stage_blocks(settings, world, host_names(world))
        return blocks, pipelined(world, blocks)
    division = sharded_plan(settings, world, host_names(world)).division
    assert division is not None
    return division, sharded(world, division)


@dataclass(frozen=True)
class DividedModel:
    """A rank's part of a model, and of its reference: a model, what the policy was before training, or nothing."""

    model: nn.Module
    reference: nn.Module | dict[str, mx.array] | None
    world: World
    digests: tuple[str, ...]  # of the files that they are made of

    @classmethod
    def load(cls, settings: Config, run: Path | None, with_reference: bool, world: World) -> DividedModel:
        """run: the folder of an adapter, or None.

        Raises:
            AgreedError: the model, the adapter or the reference cannot be read or divided.
        """
        parts, world = parts_of_model(settings, world)
        adapter = run or (Path(settings.model.adapter) if settings.model.adapter else None)
        start: dict[str, mx.array] = {}
        with world.agreeing("loading the model"):
            model = load_module.load(settings.model, settings.train.seed, lazy=True)
            if adapter is not None:
                adapters.make_trainable(model, settings.model, settings.train.seed)
                start = adapter_files.trainable(model)
            if run is not None:
                adapter_files.load_trained(model, run, "--run")
            digests = [load_module.fingerprint(settings.model, settings.train.seed)]
            digests += [file_sha256(adapter / adapter_files.ADAPTER_WEIGHTS)] if adapter else []
        world = divided_world.divided(model, parts, world, settings.metal.wired)
        model.eval()
        if not with_reference:
            return cls(model, None, world, tuple(digests))
        if settings.model.reference == "initial":
            return cls(model, _own_part(start, model, world), world, tuple(digests))
        reference = divided_world.load_reference(settings, world)
        digests.append(load_module.reference_fingerprint(settings.model, settings.train.seed))
        return cls(model, reference.eval(), world, tuple(digests))


def _own_part(whole: Mapping[str, mx.array], model: nn.Module, world: World) -> dict[str, mx.array]:
    """What a rank holds of arrays that are trained."""
    own = {}
    for name in adapter_files.trainable(model):
        part = world.part(name)
        own[name] = mx.contiguous(part.of(whole[name], world.rank)) if isinstance(part, Part) else whole[name]
        mx.eval(own[name])
    return own


def in_step(
    kind: str,
    key: str,
    total: int,
    out: Path,
    settings: Config,
    world: World,
    do: Callable[[Sequence[range]], list[Lines]],
) -> FileFigures | None:
    """Lines for all rows, in order, into `out`; what an earlier try finished is taken.

    Args:
        key: digest of all that the lines depend on.
        total: rows.
        do: makes lines for some chunks of rows, on all ranks at once; rank 0's are kept.

    Returns:
        On rank 0, the figures for people and machines; elsewhere nothing.

    Raises:
        AgreedError: a row cannot be read, or a disk written, on any rank.
    """
    size, say, began = settings.evaluate.batch_size, Terminal(silent=world.rank != 0), time.perf_counter()
    chunks, journal = -(-total // size), None
    with world.agreeing(f"opening {out}"):
        if world.rank == 0:
            journal = Journal(out, key, chunks)
    left: list[int] = json.loads(world.broadcast_text(json.dumps(journal.missing if journal else [])))
    if len(left) < chunks:
        say.line(f"{chunks - len(left):,} of {chunks:,} chunks are there already")
    with say.counting(kind, total) as progress:
        for start in range(0, len(left), CHUNKS):
            group = left[start : start + CHUNKS]
            made = do([range(chunk * size, min((chunk + 1) * size, total)) for chunk in group])
            with world.agreeing("keeping what is finished"):
                if journal is not None:
                    for chunk, lines in zip(group, made, strict=True):
                        journal.add(chunk, lines)
            progress(min((chunks - len(left) + start + len(group)) * size, total))
    with world.agreeing(f"writing {out}, for which the rows are kept"):
        if journal is not None:
            journal.finish(out)
    if world.rank:
        return None
    seconds, rows = time.perf_counter() - began, total - min((chunks - len(left)) * size, total)
    say.line(f"{out}: {total:,} rows in {seconds:.1f} s ({rows / seconds:.1f} rows/s)")
    by_rank = {"all together": len(left)}
    return FileFigures(rows=total, scored=rows, seconds=seconds, rows_per_second=rows / seconds, chunks_by_rank=by_rank)


@dataclass(frozen=True)
class WholeModel:
    """What is asked: a model, and the folder of an adapter.

    Args:
        adapter: a run's folder or one of its checkpoints; None for the model as it stands.
    """

    settings: Config
    adapter: Path | None

    @property
    def name(self) -> str:
        """For people."""
        return str(self.adapter or self.settings.model.path)

    def load(self, world: World) -> nn.Module:
        """The model on every rank, ready to be asked.

        Raises:
            UserError: the model or the adapter cannot be read.
        """
        settings = self.settings
        model = load_module.load(settings.model, settings.train.seed)
        divided_world.divided(model, None, world, settings.metal.wired)
        if self.adapter is not None or settings.model.adapter is not None:
            adapters.make_trainable(model, settings.model, settings.train.seed)
        if self.adapter is not None:
            adapter_files.load_trained(model, self.adapter, "--run")
        model.eval()
        return model

    def digest(self) -> str:
        """Of the files that the model is made of."""
        settings = self.settings
        parts = [load_module.fingerprint(settings.model, settings.train.seed)]
        if self.adapter is not None:
            weights = self.adapter / adapter_files.ADAPTER_WEIGHTS
            parts.append(file_sha256(weights))
        return key_of(*parts, learning_digest(settings))
