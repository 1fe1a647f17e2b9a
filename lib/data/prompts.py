"""The prompts that a run of rounds answers: their records, their tokens, and which of them a round takes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lib.config.settings import DataSettings, EvaluateSettings, ModelSettings, RolloutSettings
from lib.data import record_files, sources
from lib.data import tokenizer as tokenizer_module
from lib.data.dataset import Example, Sized, Tokenisation
from lib.data.encode import Encoder
from lib.data.record_formats import (
    ANSWER,
    JSON,
    TEMPLATE_ARGUMENTS,
    VOCABULARY,
    Columns,
    Message,
    Plain,
    Record,
    Tokens,
    Unusable,
    answer_text,
    name_of_type,
    parse,
)
from lib.data.sources import Records, Tell
from lib.data.tokenizer import NO_LIMITS, Tokenizer, Vocabulary, vocabulary_digest
from lib.errors import UserError


def columns_of(record: JSON, data: DataSettings, tokenizer: Tokenizer) -> JSON:
    """The columns of a prompt, under the names that every reader knows; a text stays a text. Raises Unusable."""
    parsed, stored = parse(record, Columns.of(data), "prompt"), record.get(data.column("prompt"))
    if isinstance(parsed, Tokens):
        text = tokenizer.decode(parsed.prompt)
        return {"prompt": text, "prompt_ids": parsed.prompt, VOCABULARY: vocabulary_digest(tokenizer)}
    if isinstance(parsed, Plain):
        return {"prompt": parsed.prompt or ""}
    is_text = isinstance(stored, str) and parsed.prompt == [{"role": "user", "content": stored}]
    extras = {"tools": parsed.tools, TEMPLATE_ARGUMENTS: parsed.template_arguments}
    return {"prompt": stored if is_text else parsed.prompt} | {name: extra for name, extra in extras.items() if extra}


def prompt_of(record: JSON, data: DataSettings, tokenizer: Tokenizer) -> str | list[Message]:
    """A record's prompt: text, or messages up to the one that is to be answered. Raises Unusable."""
    return columns_of(record, data, tokenizer)["prompt"]


def ids_of(
    parsed: Record | Unusable, encoder: Encoder | None, limits: Vocabulary, max_tokens: int, setting: str
) -> list[int]:
    """The tokens that a model is sent for a parsed prompt, tools and template arguments included. Raises Unusable: the
    model, of these limits, cannot answer it with max_tokens, which that setting says."""
    if isinstance(parsed, Unusable):
        raise parsed
    if isinstance(parsed, Tokens):
        ids = parsed.prompt
    elif encoder is None:
        raise UserError("prompts are text, and the model has no tokenizer; add one to the model's folder")
    else:
        ids = encoder.encoded(parsed).prompt
    if not ids:
        raise Unusable("the prompt is empty")
    limits.check_ids([ids])
    limits.check_answer(len(ids), max_tokens, setting)
    return ids


@dataclass(frozen=True)
class Question:
    """A prompt whose answer a program can check."""

    prompt_ids: list[int]
    answer: str


def load_questions(
    evaluate: EvaluateSettings,
    model: ModelSettings,
    data: DataSettings,
    tokenizer: Tokenizer | None,
    limits: Vocabulary = NO_LIMITS,
) -> list[Question]:
    """The records of evaluate.answers, at most evaluate.answers_limit. limits: of the model that answers. Raises
    UserError: a record without a prompt or an answer, or a prompt that the model cannot answer; no tokenizer."""
    if (path := evaluate.answers) is None:
        return []
    if tokenizer is None:
        raise UserError(f"evaluate.answers={path} needs a tokenizer, but model.path {model.path} has none")
    encoder = Encoder(tokenizer, data, tokenizer_module.vocabulary(model).eos_token_id)
    encoder.stop_generation()
    questions, columns = list[Question](), Columns.of(data)
    for line, record in itertools.islice(record_files.read(path), evaluate.answers_limit):
        try:
            if isinstance(record, Unusable):
                raise record
            if (answer := answer_text(record)) is None:
                value = record.get(ANSWER)
                is_what = "blank" if isinstance(value, str) else f"{name_of_type(value)}, neither text nor a number"
                raise Unusable(f"a question's {ANSWER!r} is {is_what}: give it an answer, or leave the line out")
            parsed = parse(record, columns, "prompt")
            ids = ids_of(parsed, encoder, limits, evaluate.max_tokens, "evaluate.max_tokens")
        except Unusable as why:
            raise UserError(f"{path}:{line}: {why}") from None
        questions.append(Question(ids, answer))
    if not questions:
        raise UserError(f"evaluate.answers={path} has no records")
    return questions


@dataclass(frozen=True, eq=False)
class Prompts(Sized):
    """Prompts in the files' order. To a plan they are rows whose completions are as long as they may become."""

    path: str
    records: Records  # of the prompts, whole, e.g. with their answers
    ids: list[list[int]]  # the tokens of each prompt
    max_tokens: int  # of an answer
    completions: int  # of a row that is trained
    skipped: Sequence[str]

    kind = "prompt"
    is_estimated = True
    truncated_count = 0
    unit = "prompts"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def completions_per_example(self) -> int:
        return self.completions

    @cached_property
    def pieces(self) -> np.ndarray:
        """int64 [n, 1 + K]: tokens of each prompt, and the most that its answers may have."""
        answers = [self.max_tokens] * self.completions
        return np.array([[len(prompt), *answers] for prompt in self.ids])

    @property
    def columns(self) -> str:
        """What was read, for people."""
        return self.records.formats

    @property
    def skipped_count(self) -> int:
        return len(self.skipped)

    @property
    def digest(self) -> str:
        """sha256 of all prompts' tokens and records, in order."""
        return hashlib.sha256(repr((self.records.digests, self.ids)).encode()).hexdigest()

    def examples(self, rows: object) -> list[Example]:
        """None: there is nothing to train before prompts are answered."""
        return []

    def of_round(self, number: int, count: int, seed: int) -> list[int]:
        """The prompts of a round, the first being 1, the longest first. All are permuted; one round after the other
        takes `count`, until there are not so many left."""
        epoch, index = divmod(number - 1, len(self) // count)
        source = np.random.Philox(np.random.SeedSequence([seed, epoch, 0x726F756E]))
        taken = np.argsort(source.random_raw(len(self)), kind="stable")[index * count : (index + 1) * count]
        return sorted(taken.tolist(), key=lambda row: (-len(self.ids[row]), row))


def open_prompts(
    source: str | Mapping[str, float],
    settings: DataSettings,
    encoder: Encoder | None,
    rollouts: RolloutSettings,
    completions: int,
    held_out: bool | None,
    tell: Tell,
    limits: Vocabulary = NO_LIMITS,
) -> Prompts:
    """The prompts of some sources, tokenised. completions: of a row that is trained. held_out: see `load_dataset`.
    Raises UserError: a file cannot be read, or, unless settings.skip_invalid, a prompt cannot be used."""
    name, most = " + ".join(sources.unweighted(source, "prompts")), rollouts.max_tokens
    records, rows = sources.open_sources(source, settings, "prompt", held_out, tell)
    tokenisation = Tokenisation(settings, "prompt", encoder, limits)
    ids, skipped = dict[int, list[int]](), [*records.unusable]
    for row, (place, record) in zip(rows.tolist(), tokenisation.placed(records, rows), strict=True):
        try:
            prompt = ids_of(record, encoder, limits, most, "rollouts.max_tokens")
            if len(prompt) + most > settings.max_length:
                raise Unusable(
                    f"a prompt of {len(prompt)} tokens and rollouts.max_tokens={most} are more than "
                    f"data.max_length={settings.max_length}; raise it"
                )
        except Unusable as why:
            skipped.append(f"{place}: {why}")
        else:
            ids[row] = prompt
    sources.require_usable(name, skipped, len(skipped), len(ids), settings.skip_invalid)
    return Prompts(name, records.only(np.array([*ids])), [*ids.values()], most, completions, skipped)
