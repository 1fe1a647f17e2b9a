"""What a run has trained, opened read-only; and whether an export is that model, by log-probabilities of its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.config import load as config
from lib.config.settings import Config, DataSettings, ModelSettings
from lib.data.encode import Encoder
from lib.data.groups import load_groups
from lib.data.record_formats import RecordKind
from lib.data.streaming import open_held_out, open_training
from lib.data.tokenizer import load_tokenizer_of, stored_config
from lib.errors import Stopped, UserError
from lib.model import adapter_files, adapters
from lib.model import load as models
from lib.rollouts.collect import Answer, lines_of
from lib.system.model_folder import ADAPTER_WEIGHTS, resolve
from lib.training import checkpoint as checkpoints
from lib.training.run_inputs import generate_options, unnamed_ends, vocabulary

Logps = list[np.ndarray]  # a row: float32 [tokens - 1], log-probability of every token but the first, in nats
WeightType = Literal["f32", "bf16", "f16", "q8_0"]
LIMIT = 1e-4  # nats of one token, between two float32 computations of one model
LIMIT_OF_TRAINING = 0.002  # the same, as a part of what training moved


class ExportOptions(NamedTuple):
    """The type of the stored weights (None: the base's), and whether those of a quantised base become plain ones."""

    type: WeightType | None = None
    dequantize: bool = False


class Reading(NamedTuple):
    """The rows' log-probabilities by the reader of an export, whose weights may have fewer bits than float32."""

    reader: str
    logps: Logps
    is_rounded: bool = False


@dataclass(frozen=True)
class ChatForm:
    """How a run's rows became text."""

    tokenizer: Any  # mlx-lm's wrapper around the model's
    template: str | None  # the chat template that training rendered with, as Jinja; None where it used none
    arguments: dict[str, Any]  # of the template
    end_ids: list[int]  # tokens that end an answer: first the end of turn that training put

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation's text, with the opening of an answer at its end."""
        options = {"tokenize": False, "add_generation_prompt": True, "chat_template": self.template, **self.arguments}
        return self.tokenizer.apply_chat_template(messages, **options)


@dataclass(frozen=True)
class TrainedRun:
    """A run's model at one checkpoint."""

    folder: Path
    settings: Config
    base: Path  # the folder of the model that was trained
    weights: Path  # the folder with what was trained, in mlx-lm's adapter layout
    checkpoint: str  # `final` or `step 40`
    rows: list[np.ndarray]  # token ids to compare log-probabilities on, int32 [tokens] each
    rows_from: str

    @property
    def base_config(self) -> dict[str, Any]:
        """The base model's config.json."""
        return stored_config(self.settings.model)

    @property
    def is_quantised(self) -> bool:
        return "quantization" in self.base_config or "quantization_config" in self.base_config

    def chat_form(self) -> ChatForm | None:
        """The tokenizer, chat template and end of turn of training; None for a model without a tokenizer."""
        tokenizer: Any = load_tokenizer_of(self.settings.model)
        if tokenizer is None:
            return None
        encoder = Encoder(tokenizer, self.settings.data, None)
        template = encoder.template
        arguments, text = dict(template.arguments_without_answer), template.text if template.is_used else None
        if text is not None:  # readers that give no arguments render as training did
            used = {n: json.dumps(v) for n, v in arguments.items() if v is not None and re.search(rf"\b{n}\b", text)}
            defaults = (f"{{%- if {n} is not defined %}}{{%- set {n} = {v} %}}{{%- endif %}}" for n, v in used.items())
            text = "".join([*defaults, text])
        ends = sorted(encoder.end_ids, key=lambda index: (index != encoder.turn_end_id, index))
        return ChatForm(tokenizer, text, arguments, ends)

    def unnamed_ends(self) -> list[str]:
        """`run_inputs.unnamed_ends` of the run."""
        model = self.settings.model
        return unnamed_ends(load_tokenizer_of(model), model, self.settings.data)

    def generate_options(self, folder: Path) -> list[str] | None:
        """`run_inputs.generate_options` of the run, for its base model or another in a folder."""
        model = self.settings.model.model_copy(update={"path": str(folder)})
        return generate_options(load_tokenizer_of(model), model, self.settings.data)

    def stored_base(self) -> nn.Module:
        """The model before training, not evaluated, as stored, whatever model.dtype; drawn weights are as drawn."""
        settings = self.settings.model
        changes = {"attention_window": None, "dtype": settings.dtype if settings.random_init else None}
        return models.load(settings.model_copy(update=changes), self.settings.train.seed, lazy=True).eval()

    def base_model(self) -> nn.Module:
        """The same in float32; what is quantised stays so."""
        model = self.stored_base()
        model.set_dtype(mx.float32)
        return model

    def model(self, adapter: str | None = None) -> nn.Module:
        """The model as trained, or with another adapter's folder, float32, not evaluated. Raises UserError: a
        misfit."""
        model = self.base_model()
        settings = self.settings.model.model_copy(update={"adapter": adapter, "gradient_checkpointing": False})
        adapters.make_trainable(model, settings, self.settings.train.seed)
        if adapter is None:
            adapter_files.load_trained(model, self.weights, "run")
        return model.eval()


def open_run(
    folder: Path, checkpoint: str, overrides: Sequence[str], row_count: int, say: Callable[[str], None]
) -> TrainedRun:
    """A run's model at `checkpoint` (final, best, last or a step), and sequences of its data. Raises UserError: no such
    run or checkpoint; its model or data cannot be read."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: no run there (config.yaml is missing); give the folder of a run, runs/NAME")
    settings = config.of_run(folder / "config.yaml", overrides)
    weights, name = folder, "final"
    if checkpoint != "final":
        weights = checkpoints.find(folder, checkpoint)
        name = f"step {checkpoints.step_of(weights)}"
    elif not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{folder}: the run has not ended ({ADAPTER_WEIGHTS} is missing); take --checkpoint last")
    kind, rows_of = settings.record_kind, (settings.model, settings.data, folder, row_count, say)
    rows, rows_from = _rows(kind, *rows_of) if row_count else ([], "")
    base = resolve(settings.model.path, settings.model.revision)
    return TrainedRun(folder, settings, base, weights, name, [ids for ids in rows if len(ids) > 1], rows_from)


def _rows(
    kind: RecordKind, model: ModelSettings, settings: DataSettings, folder: Path, count: int, say: Callable[[str], None]
) -> tuple[list[np.ndarray], str]:
    """Sequences evenly over the held-out rows (training rows without those); of rounds, answers of the last one."""
    if answers := sorted(folder.glob("rounds/*/samples.jsonl")):
        lines = islice(lines_of(answers[-1], Answer), count)
        return [np.array(line.tokens, np.int32) for line in lines], f"answers of {answers[-1].parent.name}"
    words, tokenizer = vocabulary(model), load_tokenizer_of(model)
    data: Any = None if kind == "group" else open_held_out(settings, kind, tokenizer, tell=say, vocabulary=words)
    source = "held-out rows" if data is not None else "training rows (none are held out)"
    if kind == "group":
        data = load_groups(settings, words)
    elif data is None:
        data = open_training(settings, kind, tokenizer, tell=say, vocabulary=words)
    indices = np.unique(np.linspace(0, len(data) - 1, min(count, len(data))).astype(int))
    examples = (data[int(index)] for index in indices)
    sequences = [np.concatenate([each.prompt_ids, y]).astype(np.int32) for each in examples for y in each.completions]
    return sequences[:count], source


def prove(run: TrainedRun, reading: Reading) -> tuple[dict[str, Any], str]:
    """Compares what was read back with the trained model: figures and a sentence. `difference`, `trained_difference`:
    the largest of a token's log-probability, in nats, between export and trained, trained and base model. Raises
    Stopped: it is another model, or rounding leaves nothing of what was trained."""
    trained, base = model_logps(run.model(), run.rows), model_logps(run.base_model(), run.rows)
    difference, moved = largest_difference(reading.logps, trained), largest_difference(trained, base)
    limit = None if reading.is_rounded else max(LIMIT, LIMIT_OF_TRAINING * moved)
    if limit is None:
        require_learned(reading.logps, trained, base)
    elif difference > limit:
        raise Stopped(
            f"{reading.reader}: log-probabilities are {difference:.2e} nats from those of {run.folder} "
            f"({run.checkpoint}), at most {limit:.1e} is allowed. Nothing was written: please report it with the "
            "model's config.json"
        )
    tokens = sum(len(ids) - 1 for ids in run.rows)
    figures = {"reader": reading.reader, "rows": len(run.rows), "rows_from": run.rows_from, "tokens": tokens}
    figures |= {"difference": difference, "limit": limit, "trained_difference": moved}
    allowed = "by rounding of the weights" if limit is None else f"at most, {limit:.1e} allowed"
    return figures, (
        f"proven: {reading.reader} gives the log-probabilities of the run on {len(run.rows):,} {run.rows_from} "
        f"({tokens:,} tokens): {difference:.1e} apart {allowed}; training moved them by {moved:.1e}"
    )


def require_learned(stored: Logps, trained: Logps, base: Logps) -> None:
    """Raises Stopped where rounding moves the model more than training did, or back to the base. Medians are compared:
    a router that takes another expert moves a few tokens far, however little was trained."""

    def median(left: Logps, right: Logps) -> float:
        return float(np.nan_to_num(np.median(np.abs(np.concatenate(left) - np.concatenate(right))), nan=np.inf))

    rounding, training = median(stored, trained), median(trained, base)
    if rounding > max(LIMIT, min(training, median(stored, base))):
        raise Stopped(
            f"rounding the weights moves half of the log-probabilities by {rounding:.1e} or more, training moved them "
            f"by {training:.1e}, so what was learned would be lost; take --dequantize or a --type with more bits. "
            "Nothing was written"
        )


def mlx_logps(folder: Path, run: TrainedRun, adapter: Path | None = None) -> Logps:
    """By mlx-lm's own loading of the model in a folder, with an adapter where one is given; float32."""
    model, _ = load_model(folder, lazy=True, trust_remote_code=run.settings.model.trust_remote_code)
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.set_dtype(mx.float32)
    return model_logps(model, run.rows)


def model_logps(model: nn.Module, rows: Sequence[np.ndarray]) -> Logps:
    """Log-probabilities of every token but the first, one row at a time; float32 [tokens - 1] each."""
    model.eval()
    logps = []
    for ids in rows:
        logits = model(mx.array(ids[None, :-1]))[0].astype(mx.float32)
        scored = mx.take_along_axis(logits, mx.array(ids[1:, None]), axis=-1).squeeze(-1)
        logps.append(np.array(scored - mx.logsumexp(logits, axis=-1)))
    return logps


def largest_difference(left: Logps, right: Logps) -> float:
    """Of any token's log-probability; infinite where one is NaN."""
    return float(np.nan_to_num(np.abs(np.concatenate(left) - np.concatenate(right)), nan=np.inf).max())
