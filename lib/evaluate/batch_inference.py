"""A whole file scored, answered or made into pairs, by all ranks at their own pace.

Every rank has the whole model, pulls chunks of rows (lib/evaluate/work_queue.py), reads them by the file's index, and
hands in a line of JSON for each row. What a chunk's rows come to depends on the chunk alone, not on who does it, so
that one rank's output is that of many; what is drawn follows from train.seed and the chunk.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypedDict

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm import batch_generate
from mlx_lm.sample_utils import make_sampler

from lib.config.schema import Config, DataSettings
from lib.data import sources
from lib.data import tokenizer as tokenizer_module
from lib.data.collate import collate
from lib.data.dataset import Example, parse, tokenised
from lib.data.record_formats import RecordKind, Unusable
from lib.data.row_order import micro_batches
from lib.data.sources import Records
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Encoder
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.judges import Question, judge_of
from lib.evaluate.work_queue import Dispatcher, Journal, Lines, Local, Remote, Server, work
from lib.model import adapter_files
from lib.model.logps import completion_logps
from lib.model.token_stream import arrays_of
from lib.system import metal, out_of_memory
from lib.training import losses, reference_model
from lib.training.objective import objective
from lib.training.progress_display import RunConsole

KINDS = ("logps", "rewards", "greedy", "samples")


class FileFigures(TypedDict):
    """What became of a file; empty on all ranks but rank 0."""

    rows: int
    scored: int  # by this command, without what was there already
    seconds: float
    rows_per_second: float
    chunks_by_rank: dict[str, int]


def pull(
    kind: str, key: str, rows: Sized, out: Path, settings: Config, world: World, do: Callable[[range], Lines]
) -> FileFigures | None:
    """Lines for all rows, in order, into `out`: by all ranks, each once; what an earlier try finished is taken.

    key: digest of all that the lines depend on. do: makes lines for some rows.

    Returns:
        On rank 0, the figures for people and machines; elsewhere nothing.

    Raises:
        AgreedError, UserError: on one rank, so on all.
    """
    size, total = settings.evaluate.batch_size, len(rows)
    say, began = RunConsole(world), time.perf_counter()
    chunks = -(-total // size)
    server = dispatcher = None
    with world.agreeing(f"opening {out}"):
        if world.rank == 0:
            if out.exists():
                raise UserError(f"{out} is there already; remove it, or give another name")
            dispatcher = Dispatcher(Journal(out.with_name(f"{out.name}.partial"), key, chunks))
            server = Server(dispatcher, everywhere=True) if world.size > 1 else None
    before = 0 if dispatcher is None else int(dispatcher.journal.done.sum())
    if before:
        say.line(f"{before:,} of {chunks:,} chunks are there already")
    address = json.loads(world.broadcast_text(json.dumps(server.address if server else None)))

    def lines_of(chunk: int) -> Lines:
        return do(range(chunk * size, min((chunk + 1) * size, total)))

    if dispatcher is None:
        # From here on no rank waits for another in a collective: who is gone is missed by nobody.
        work(Remote(address, world.rank, world.timeout_seconds), lines_of)
        return None
    with say.counting(kind, total) as progress:
        dispatcher.report = lambda done, by_rank: progress(min(done * size, total))
        work(Local(dispatcher), lines_of)
    try:
        dispatcher.journal.finish(out)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}; free some space and start again, nothing is lost") from None
    seconds = time.perf_counter() - began
    if server is not None:
        server.close(world.timeout_seconds)
    by_rank = {str(rank): count for rank, count in sorted(dispatcher.by_rank.items())}
    scored = total - min(before * size, total)
    figures = FileFigures(
        rows=total, scored=scored, seconds=seconds, rows_per_second=scored / seconds, chunks_by_rank=by_rank
    )
    say.line(f"{out}: {total:,} rows in {seconds:.1f} s ({figures['rows_per_second']:.1f} rows/s)")
    return figures


def open_rows(source: str, settings: DataSettings, kind: RecordKind, say: RunConsole) -> Records:
    """All usable records of a source, in order."""
    return sources.open_records(sources.files_of(source, settings, say.line), settings, kind, say.line)


def key_of(*parts: Any) -> str:
    """A digest of all that the lines depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def digest_of(records: Records) -> str:
    return key_of(*((index.digest, len(index.entries)) for index in records.indices))


# ---- Log-probabilities and rewards


class Scorer:
    """Log-probabilities of records' completions, and with a reference DPO's rewards.

    Args:
        reference: a model; or the policy's trained parameters as they were before training; None for log-probabilities
            alone.
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
        words = tokenizer_module.vocabulary(settings.model)
        self.vocab_size = words["vocab_size"]
        data = settings.data
        self.encoder = None if tokenizer is None else Encoder(tokenizer, data, words["eos_token_id"])
        self.multiple, self.shares_prompts, _ = reference_model.layout(model, data, world)

    def __call__(self, rows: range) -> Lines:
        """A line for each of some rows; of one that is unusable, why (data.skip_invalid).

        Raises:
            UserError: a row is unusable.
        """
        settings = self.settings
        read = (
            (self.records.location(row), parse(self.records, row, settings.data, settings.record_kind)) for row in rows
        )
        examples, failures = [], {}
        results = tokenised(read, settings.data, self.encoder, self.vocab_size)
        for row, (place, record, result) in zip(rows, results, strict=True):
            if not isinstance(result, Unusable) and not isinstance(record, Unusable):
                examples.append(Example.of(row, result[0], record.label))
            elif settings.data.skip_invalid:
                failures[row] = {"row": row, "line": self.records.line(row), "error": f"{place}: {result}"}
            else:
                raise UserError(f"{place}: {result}; data.skip_invalid=true goes on and names it in the output")
        values = self._values(examples) if examples else {}
        scored = {
            e.row: {
                "row": e.row,
                "line": self.records.line(e.row),
                **({} if e.label is None else {"label": e.label}),
                **{name: float(v[i]) for name, v in values.items()},
            }
            for i, e in enumerate(examples)
        }
        return [json.dumps((scored | failures)[row]) for row in rows]

    def _values(self, examples: list[Example]) -> dict[str, np.ndarray]:
        settings = self.settings
        policy = self._logps(self.model, examples)
        tokens = np.array([[*map(len, e.scored_indices)] for e in examples])
        names = ("chosen", "rejected") if policy.shape[1] == 2 else ("completion",)
        values = {f"policy_{name}_logp": policy[:, k] for k, name in enumerate(names)}
        values |= {f"{name}_tokens": tokens[:, k] for k, name in enumerate(names)}
        if self.reference is None or settings.record_kind == "sft":
            return values
        reference = self._reference_logps(examples)
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

    def _reference_logps(self, examples: list[Example]) -> np.ndarray:
        if isinstance(self.reference, nn.Module):
            return self._logps(self.reference, examples)
        now, start = adapter_files.trainable(self.model), self.reference or {}
        self.model.update(tree_unflatten(list(start.items())))
        logps = self._logps(self.model, examples)
        self.model.update(tree_unflatten(list(now.items())))
        return logps

    def _logps(self, model: nn.Module, examples: list[Example]) -> np.ndarray:
        """float32 [n, K], in nats."""
        lengths = np.array([len(e.prompt_ids) + max(map(len, e.completions)) for e in examples])
        logps = np.zeros((len(examples), len(examples[0].completions)), np.float32)
        tokens = float(lengths.mean()) * logps.shape[1]
        pace = metal.pace(self.settings, model, tokens, metal.FORWARD, World())

        def of(indices: Sequence[int]) -> np.ndarray:
            batch = collate([examples[i] for i in indices], self.multiple, self.shares_prompts)
            return np.array(completion_logps(model, arrays_of(batch.inputs)))

        mx.eval(model.state)
        most = pace.most_rows(self.settings.evaluate.batch_size)
        for part in micro_batches(np.argsort(lengths, kind="stable"), most):
            logps[part] = np.concatenate([own for _, own in out_of_memory.in_pieces(part.tolist(), of)])
        return logps


# ---- Answers, and pairs made of them


def prompt_of(record: Mapping[str, Any], data: DataSettings) -> Any:
    """A record's prompt as it is stored: text, messages or token ids."""
    return record.get(data.prompt, record.get(data.messages))


class CompletionWriter:
    """Completions of records' prompts: the greedy one, or so many drawn ones."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, records: Records, settings: Config, draws: int | None):
        self.model, self.tokenizer, self.records, self.settings, self.draws = model, tokenizer, records, settings, draws
        self.encoder = Encoder(tokenizer, settings.data, tokenizer_module.vocabulary(settings.model)["eos_token_id"])
        self.encoder.stop_generation()
        self.model.eval()

    def __call__(self, rows: range) -> Lines:
        """A line for each of some rows."""
        written = zip(rows, self.completions(rows), strict=True)
        return [
            json.dumps({"row": row, "line": self.records.line(row), "completions": texts}, ensure_ascii=False)
            for row, texts in written
        ]

    def completions(self, rows: range) -> list[list[str]]:
        """Some completions of each row's prompt."""
        settings = self.settings
        prompts = [ids for ids in map(self._prompt_ids, rows) for _ in range(self.draws or 1)]
        seed = np.random.SeedSequence([settings.train.seed, rows.start]).generate_state(1)
        mx.random.seed(int(seed[0]))
        response = batch_generate(
            self.model,
            self.tokenizer,
            prompts,
            max_tokens=settings.evaluate.max_tokens,
            return_token_ids=True,
            sampler=None if self.draws is None else make_sampler(temp=settings.evaluate.temperature),
        )
        ends = self.tokenizer.eos_token_ids
        ids = [list(itertools.takewhile(lambda token: token not in ends, made)) for made in response.token_ids or []]
        texts = [self.tokenizer.decode(made) for made in ids]
        return [texts[start : start + (self.draws or 1)] for start in range(0, len(texts), self.draws or 1)]

    def _prompt_ids(self, row: int) -> list[int]:
        record = parse(self.records, row, self.settings.data, "prompt")
        if isinstance(record, Unusable):
            raise UserError(f"{self.records.location(row)}: {record}")
        prompt: Any = record.prompt
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        return self.encoder.prompt_ids(prompt or "")


class PairMaker:
    """Preference pairs from drawn completions: the best against the worst, where one is better."""

    def __init__(self, writer: CompletionWriter):
        self.writer, self.settings, self.judge = writer, writer.settings, judge_of(writer.settings)

    def __call__(self, rows: range) -> Lines:
        """One line for each of some rows: a pair, or nothing where all completions are the same.

        Raises:
            UserError: a record without an answer, where there is no judge; or what the judge did wrong.
        """
        records = self.writer.records
        drawn = [list(dict.fromkeys(texts)) for texts in self.writer.completions(rows)]
        kept = [records[row] for row in rows]
        scores = self.judge(
            [
                Question(records.location(row), prompt_of(record, self.settings.data), texts, record)
                for row, record, texts in zip(rows, kept, drawn, strict=True)
            ]
        )
        lines = []
        for record, texts, of_texts in zip(kept, drawn, scores, strict=True):
            best, worst = int(np.argmax(of_texts)), int(np.argmin(of_texts))
            if of_texts[best] > of_texts[worst] and texts[best].strip() and texts[worst].strip():
                prompt = prompt_of(record, self.settings.data)
                pair = {"prompt": prompt, "chosen": texts[best], "rejected": texts[worst]}
                lines.append(json.dumps(pair, ensure_ascii=False))
        return lines
