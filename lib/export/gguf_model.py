"""One GGUF file, for llama.cpp and what is built on it: the whole model, its tokenizer and its chat template."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from lib.data.chat_template import ChatTemplate
from lib.data.tokenizer import load_tokenizer_of
from lib.errors import Stopped, UserError
from lib.export import gguf_families, gguf_reader
from lib.export.form import ExportOptions, Reading, WeightType
from lib.export.fused_weights import fused_model
from lib.export.gguf_file import FILE, plan_tensors, rounded_model, write_gguf
from lib.export.gguf_read_tokens import GgufTokens
from lib.export.gguf_tokenizer import TokenizerFacts, facts_of
from lib.export.trained_run import TrainedRun

READER = "gguf's reader with a forward pass in numpy"
TYPES: dict[mx.Dtype, WeightType] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}


def check(run: TrainedRun, options: ExportOptions, prove: bool) -> None:
    """Raises UserError for what GGUF or llama.cpp does not have: a family, a rope, a tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--to gguf needs the package gguf: pip install gguf (make setup brings it)")
    if options.dequantize:
        raise UserError("--dequantize is for --to fused; GGUF has its own types: --type q8_0")
    family = gguf_families.family_of(run.stored_base(), run.settings.model.path)
    model = fused_model(run)  # not evaluated: of its weights only names and shapes are looked at
    plan_tensors(model, family, "f32")
    facts = tokenizer_facts(run)
    if facts is not None and facts.size > gguf_families.text_model(model).args.vocab_size:
        raise UserError(f"--to gguf: the tokenizer of {run.base} has more tokens than the model has embeddings")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf; float32 sums, rounded once to the stored type."""
    name = f"{run.base.name} {run.folder.resolve().name}"
    write_gguf(folder / FILE, fused_model(run), run.base_config, tokenizer_facts(run), weight_type(run, options), name)


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module:
    """As it is written, read as float32."""
    return rounded_model(fused_model(run), weight_type(run, options), run.settings.model.path)


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """By numpy. The file's tokenizer has to give the ids that the model's own gives, on the same rows.

    Raises:
        Stopped: it gives others.
    """
    tokenizer = load_tokenizer_of(run.settings.model)
    if tokenizer is not None:
        _same_tokens(run, tokenizer, GgufTokens(gguf_reader.GgufModel(folder / FILE)))
    return Reading(gguf_reader.logps(folder / FILE, run.rows))


def weight_type(run: TrainedRun, options: ExportOptions) -> WeightType:
    """What --type says, else the type of the base model's plain weights."""
    if options.type is not None:
        return options.type
    text = gguf_families.text_model(run.stored_base())
    return TYPES.get(text.model.norm.weight.dtype, "bf16")


def tokenizer_facts(run: TrainedRun) -> TokenizerFacts | None:
    """The tokenizer with the chat template that the run's rows were rendered with; None where there is none.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    tokenizer: Any = load_tokenizer_of(run.settings.model)
    if tokenizer is None:
        return None
    template = ChatTemplate(tokenizer, run.settings.data)
    return facts_of(tokenizer, template.text if template.is_used else None, run.settings.model.path)


def _same_tokens(run: TrainedRun, tokenizer: Any, tokens: GgufTokens) -> None:
    """Compares both tokenizers on the texts of the rows."""
    for number, ids in enumerate(run.rows):
        text = tokenizer.decode([int(index) for index in ids])
        theirs, ours = tokenizer.encode(text, add_special_tokens=False), tokens(text)
        if ours != theirs:
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            near = tokenizer.decode(theirs[max(0, at - 3) : at + 3])
            raise Stopped(
                f"--to gguf: the file's tokenizer, as llama.cpp reads it, gives other tokens than {run.base} for row "
                f"{number}, near {near!r}. Nothing was written; --to fused keeps the model's own tokenizer"
            )
