"""What a run learns from and is measured by: rows, held-out rows, questions, the tokenizer and the model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.nn as nn
from rich.text import Text

from lib.config.settings import Config, DataSettings, EvaluateSettings, ModelSettings, RolloutSettings
from lib.data import sources, tokenizer
from lib.data.dataset import Dataset
from lib.data.encode import Encoder
from lib.data.groups import load_groups
from lib.data.inspect import facts_of, picture
from lib.data.prompts import Prompts, Question, load_questions, open_prompts
from lib.data.record_formats import Unusable
from lib.data.streaming import StreamedDataset, open_held_out, open_training
from lib.data.tokenizer import Tokenizer, Vocabulary
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapters, gradient_checkpointing, load
from lib.model.load import compute_type
from lib.system.model_folder import end_ids, resolve
from lib.training.unpaired_losses import needs_mismatched

SHOWN_CHARACTERS = 400  # of the first row


@dataclass(frozen=True)
class Inputs:
    """The same on every host."""

    tokenizer: Tokenizer | None  # None where the model has none
    data: Dataset | StreamedDataset | Prompts
    valid: Dataset | None
    questions: list[Question]
    first_row: Text | None = None  # as the model sees it
    held_out: Prompts | None = None  # of a run of rounds


def vocabulary(settings: ModelSettings) -> Vocabulary:
    """The ids and positions that policy and reference both have embeddings for, and the policy's end token."""
    of_policy = tokenizer.vocabulary(settings)
    models = [settings] if settings.reference == "initial" else [settings, load.reference_settings(settings)]
    tables = [load.table_sizes(model) for model in models]
    ids = filter(None, (of_policy.vocab_size, *(table.tokens for table in tables)))
    positions = filter(None, (table.positions for table in tables))
    return replace(of_policy, vocab_size=min(ids, default=None), positions=min(positions, default=None))


def with_compute_type(model: ModelSettings, world: World, say: Callable[[str], None]) -> ModelSettings:
    """The settings with the type that weights are computed in, the same on all ranks: float32 where all want it."""
    with world.agreeing("reading the model's types"):
        here = compute_type(model)
    every = world.gather_values(here)
    is_float32 = all(wanted for wanted, _ in every)
    if note := next((note for wanted, note in every if note and wanted == is_float32), ""):
        say(note)
    elif any(wanted for wanted, _ in every):
        say("weights are computed as stored on all ranks, which is slow on a CPU: not every rank wants float32")
    return model.model_copy(update={"dtype": "float32"}) if is_float32 else model


def unnamed_ends(of_model: Any, model: ModelSettings, data: DataSettings) -> list[str]:
    """The tokens that end a trained answer and that the model's own files do not name, as text."""
    if of_model is None:
        return []
    named = end_ids(resolve(model.path, model.revision)) | {of_model.eos_token_id}
    return [of_model.decode([index]) for index in sorted(Encoder(of_model, data, None).end_ids - named)]


def generate_options(of_model: Any, model: ModelSettings, data: DataSettings) -> list[str] | None:
    """The words that make `mlx_lm generate` render a prompt and end its answer as this run does; None where no words
    do: it has the model's own chat template, whatever data.chat_template, and no DoRA on 3, 5 or 6 bits."""
    if of_model is None:
        return []
    stored = tokenizer.stored_config(model).get("quantization") or {}
    layers = [part for part in (stored, *stored.values()) if isinstance(part, dict)]
    if model.method == "dora" and any(32 % part.get("bits", 32) for part in layers):
        return None  # mlx-lm reads another width of DoRA's layers than they have
    template, question = Encoder(of_model, data, None).template, [{"role": "user", "content": "Is 7 a prime?"}]
    words = [word for end in unnamed_ends(of_model, model, data) for word in ("--extra-eos-token", end)]
    if not template.is_used:
        return [*words, *["--ignore-chat-template"] * of_model.has_chat_template]
    for options in ({}, template.arguments_without_answer):
        with contextlib.suppress(Exception):  # a template raises whatever its author chose
            text = of_model.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **options)
            if text == template.text_of(question, is_prompt=True):
                return [*words, *(("--chat-template-config", json.dumps(options)) if options else ())]
    return None


def load_policy(settings: ModelSettings, seed: int, lazy: bool, recomputes: bool) -> nn.Module:
    """The model as training starts, its trained part chosen. recomputes: by gradient checkpointing."""
    model = load.load(settings, seed, lazy)
    adapters.make_trainable(model, settings, seed)
    if recomputes:
        gradient_checkpointing.checkpoint_blocks(model)
    return model


def read_inputs(config: Config, say: Callable[[str], None]) -> Inputs:
    """Reads and tokenises the rows, the held-out rows and the questions."""
    words, of_model, encoder = vocabulary(config.model), tokenizer.load_tokenizer_of(config.model), None
    if of_model is not None:
        encoder = Encoder(of_model, config.data, words.eos_token_id)
        encoder.stop_generation()
        if facts := facts_of(encoder):
            say(facts)
    data: Dataset | StreamedDataset | Prompts
    valid = held_out = None
    if config.rollouts.rounds:
        if encoder is None:
            raise UserError(f"rollouts.rounds={config.rollouts.rounds}: {config.model.path} has no tokenizer")
        completions = config.rollouts.samples if config.record_kind == "group" else 2
        split = sources.with_splits(config.data, say)
        data, held_out = _prompts(split, config.rollouts, encoder, completions, words, say)
    elif config.record_kind == "group":
        data = load_groups(config.data, words, say)
    else:
        kind, mismatched = config.record_kind, needs_mismatched(config.train.loss)
        data = open_training(config.data, kind, of_model, tell=say, mismatched=mismatched, vocabulary=words)
        valid = open_held_out(config.data, kind, of_model, tell=say, mismatched=mismatched, vocabulary=words)
        if data.segments is None:  # else nothing is known of rows that are not fetched
            sources.require_apart(sources.with_splits(config.data), kind, say)
    questions = load_questions(config.evaluate, config.model, config.data, of_model, words)
    first_row = None
    if of_model is not None and (examples := data.examples([0])):  # in one line, cut at its beginning where it is long
        text = Text("↵").join(picture(examples[0], of_model, 0, "green").split("\n", allow_blank=True))
        first_row = Text("... ").append_text(text[-SHOWN_CHARACTERS:]) if len(text) > SHOWN_CHARACTERS else text
    inputs = Inputs(of_model, data, valid, questions, first_row, held_out)
    if words.positions is not None and of_model is not None:
        _require_room(config.evaluate, inputs, words)
    return inputs


def _require_room(settings: EvaluateSettings, inputs: Inputs, words: Vocabulary) -> None:
    """Raises UserError where a greedy answer of an evaluation may end beyond the model's table of positions."""
    prompts, rows, answers = inputs.held_out, inputs.valid or inputs.data, list[tuple[str, int]]()
    if prompts is not None:
        count = min(len(prompts), settings.answers_limit)
        answers = [(prompts.records.location(row), len(prompts.ids[row])) for row in range(count)]
    elif not inputs.questions:
        examples = rows.examples(range(min(settings.samples, len(rows))))
        answers = [(f"{rows.path}, row {each.row} (evaluate.samples)", len(each.prompt_ids)) for each in examples]
    for place, tokens in answers:
        try:
            words.check_answer(tokens, settings.max_tokens, "evaluate.max_tokens")
        except Unusable as why:
            raise UserError(f"{place}: {why}") from None


def _prompts(
    data: DataSettings,
    rollouts: RolloutSettings,
    encoder: Encoder,
    completions: int,
    words: Vocabulary,
    say: Callable[[str], None],
) -> tuple[Prompts, Prompts | None]:
    """The prompts of a run of rounds, and those held out: of data.valid, or what data.holdout keeps; None without."""

    def opened(source: str | dict[str, float], held_out: bool | None) -> Prompts:
        return open_prompts(source, data, encoder, rollouts, completions, held_out, say, words)

    prompts = opened(data.train, False if data.holdout else None)
    if rollouts.prompts > len(prompts):
        remedy = f"set rollouts.prompts={len(prompts)}"
        raise UserError(f"rollouts.prompts={rollouts.prompts}, but {prompts.path} has {len(prompts)}; {remedy}")
    if data.valid is not None:
        sources.require_apart(data, "prompt", say)
        return prompts, opened(data.valid, None)
    return prompts, opened(data.train, True) if data.holdout else None
