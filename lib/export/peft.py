"""Adapters: mlx-lm's, for `mlx_lm.load(model, adapter_path=folder)`, and PEFT's, for `PeftModel.from_pretrained`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn

from lib.config.read_file import front_matter
from lib.errors import UserError, in_one_line
from lib.export.fuse import adapted_layers, write_template
from lib.export.trained_run import ExportOptions, Reading, TrainedRun, mlx_logps, model_logps
from lib.model.adapter_files import described, save_trained, trainable, write_arrays
from lib.model.adapters import ADAPTABLE
from lib.model.peft_adapters import HEAD, expert_pattern, peft_arrays
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS


def check_mlx(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError where there is no stored base that the adapter could be loaded onto."""
    if run.settings.model.random_init:
        raise UserError(f"{run.folder}: model.random_init drew the base model's weights; take --to fused")
    if options.type is not None or options.dequantize:
        raise UserError("an adapter is stored as it was trained, in float32; leave --type and --dequantize out")


def write_mlx(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes adapters.safetensors and adapter_config.json."""
    save_trained(run.model(), run.settings.model, folder)
    write_template(folder, run.chat_form())


def read_mlx(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    try:
        return Reading("mlx_lm.load", mlx_logps(run.base, run, adapter=folder))
    except (ValueError, AttributeError) as error:
        fault = f"mlx-lm cannot load an adapter of this family: {in_one_line(error)[:160]}"
        raise UserError(f"--to mlx: {fault}; model.adapter={run.folder} still reads it here") from None


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for a run that is not an adapter of a stored base."""
    check_mlx(run, options)
    if run.settings.model.method == "full":
        raise UserError(f"{run.folder}: model.method=full trains no adapter; take --to fused")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the adapter as `PeftModel.save_pretrained` does."""
    model = run.model()
    layers = adapted_layers(model)
    embeddings = frozenset(name for name, layer in layers.items() if "embedding" in layer)
    if embeddings and HEAD not in dict(model.named_modules()):  # it is tied: the embedding's adapter is the head's
        layers[HEAD] = layers[next(iter(embeddings))]
    arrays = dict(sorted(peft_arrays(trainable(model), embeddings, is_tied=HEAD in layers.keys() - embeddings).items()))
    write_arrays(folder / PEFT_WEIGHTS, described(arrays), arrays.items(), kind="pt")
    config = json.dumps(peft_config(run, layers), indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(config + "\n", encoding="utf-8")
    write_template(folder, run.chat_form())


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The rows' log-probabilities by the files, as a run reads an adapter that PEFT made."""
    return Reading("PEFT's files", model_logps(run.model(adapter=str(folder)), run.rows))


def peft_config(run: TrainedRun, layers: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What `LoraConfig` reads: alpha / r is a layer's scale; what differs from most is in the patterns."""
    named = {peft: layer for name, layer in layers.items() for peft in _peft_names(name, layer.lora_a.shape[0])}
    ranks = {name: layer.lora_a.shape[1] for name, layer in named.items()}
    alphas = {name: ranks[name] * layer.scale for name, layer in named.items()}
    (rank, alpha), model = (Counter(each.values()).most_common(1)[0][0] for each in (ranks, alphas)), run.settings.model
    plain = (name for name, layer in run.base_model().named_modules() if isinstance(layer, ADAPTABLE))
    others = {each for name in plain for each in _peft_names(name, 1)} | named.keys()
    ends = {name.rpartition(".")[2] for name in named}  # where they mean exactly the adapted layers
    are_exact = {name for name in others if name.rpartition(".")[2] in ends} == named.keys()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": original_of(run),
        "revision": model.revision,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(name): value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(name): value for name, value in alphas.items() if value != alpha},
        "use_dora": model.method == "dora",
        "target_modules": sorted(ends if are_exact else named),
        "lora_dropout": 0.0 if any(map(expert_pattern, layers)) else model.dropout,  # peft has none for experts
        "bias": "none",
        "inference_mode": True,
    }


def original_of(run: TrainedRun) -> str:
    """The model that peft would load: of a quantised one that which its card names as its base, where it has a card."""
    card = run.base / "README.md"
    front = front_matter(card.read_text("utf-8", errors="replace")) if run.is_quantised and card.is_file() else None
    named = front.get("base_model") if isinstance(front, dict) else None
    named = named[0] if isinstance(named, list) and named else named
    return named if isinstance(named, str) else run.settings.model.path


def _peft_names(name: str, experts: int) -> list[str]:
    """What peft calls a layer: of stacked experts each by itself."""
    pattern = expert_pattern(name)
    return [name] if pattern is None else [pattern.format(expert) for expert in range(experts)]
