"""PEFT's adapter: adapter_model.safetensors and adapter_config.json, for `PeftModel.from_pretrained(base, folder)`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear

from lib.config.plain_yaml import CARD_BYTES, front_matter
from lib.errors import Stopped, UserError
from lib.export import base_copy
from lib.export.form import ExportOptions, Reading
from lib.export.fused_weights import QUANTISED, AdaptedLayer, adapted_layers
from lib.export.mlx_adapter import require_stored_base
from lib.export.trained_run import TrainedRun
from lib.model.adapter_files import described, trainable, write_arrays
from lib.model.checkpoint_names import expert_pattern
from lib.model.peft_files import HEAD, peft_arrays
from lib.system import os_commands
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

READER = "peft"
SCRIPT = Path(__file__).with_name("peft_reader.py")
EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
IMPORT_SECONDS = 300.0  # torch, on a busy disk
READ_SECONDS = 3600.0


def check(run: TrainedRun, options: ExportOptions, prove: bool) -> None:
    """Raises UserError for a run that is no adapter, or where no Python has peft to prove it with."""
    require_stored_base(run)
    if run.settings.model.method == "full":
        raise UserError(f"{run.folder}: model.method=full trains no adapter; take --to fused")
    if options.type is not None or options.dequantize:
        raise UserError("--to peft keeps the adapter as it was trained, in float32; leave --type and --dequantize out")
    if prove:
        python = options.peft_python or sys.executable
        done = os_commands.run([python, "-c", "import peft, torch, transformers"], IMPORT_SECONDS)
        if done.status != 0:
            reason = (done.errors.strip().splitlines() or ["no answer"])[-1]
            raise UserError(
                f"--to peft is proven by peft, which {python} cannot import ({reason}); "
                "pip install peft torch, or name a Python that has them by --peft-python, or add --no-proof"
            )


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the adapter as `PeftModel.save_pretrained` does."""
    model = run.model()
    layers = list(adapted_layers(model))
    embeddings = frozenset(layer.name for layer in layers if isinstance(layer.base, EMBEDDINGS))
    is_tied = bool(embeddings) and HEAD not in dict(model.named_modules())
    arrays = dict(sorted(peft_arrays(trainable(model), embeddings, is_tied).items()))
    write_arrays(folder / PEFT_WEIGHTS, described(arrays), arrays.items(), kind="pt")
    config = peft_config(run, layers, linear_layers(run.base_model()), is_tied)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def stored_model(run: TrainedRun, options: ExportOptions) -> nn.Module | None:
    return None


def read_logps(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """By peft and transformers, in a process of their own; a base that they cannot read is copied for them first.

    Raises:
        Stopped: they cannot load it.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as own:
        base = base_copy.for_transformers(run, Path(own))
        rows, found = Path(own, "rows.json"), Path(own, "logps.npz")
        rows.write_text(json.dumps([ids.tolist() for ids in run.rows]), encoding="utf-8")
        words = [options.peft_python or sys.executable, str(SCRIPT), str(base), str(folder), str(rows), str(found)]
        words += ["--trust-remote-code"] if run.settings.model.trust_remote_code else []
        done = os_commands.run(words, READ_SECONDS)
        if done.status != 0:
            reason = (done.errors.strip().splitlines() or ["no answer"])[-1]
            raise Stopped(f"peft cannot read the adapter of {run.folder}: {reason}. Nothing was written")
        with np.load(found) as arrays:
            adapted, plain = ([arrays[f"{kind}{index}"] for index in range(len(run.rows))] for kind in ("row", "base"))
        return Reading(adapted, base=plain)


# ---- adapter_config.json: pure


def peft_config(
    run: TrainedRun, layers: Sequence[AdaptedLayer], others: Iterable[str], is_tied: bool
) -> dict[str, Any]:
    """What `LoraConfig` reads.

    Scales are alpha / r of every layer; those that differ from most are in rank_pattern and alpha_pattern.

    Args:
        others: all layers that peft could adapt, by our names.
        is_tied: whether the embedding's adapter is also one of the head.
    """
    named = {name: layer for layer in layers for name in _peft_layers(layer)}
    if is_tied:
        named[HEAD] = next(layer for layer in layers if isinstance(layer.base, EMBEDDINGS))
    ranks = {name: layer.rank for name, layer in named.items()}
    alphas = {name: _whole(layer.rank * layer.module.scale) for name, layer in named.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    has_experts = any(expert_pattern(layer.name) is not None for layer in layers)
    modules, indices = targets(set(named), {name for other in others for name in _names(other, 1)} | set(named))
    model = run.settings.model
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": original_of(run),
        "revision": model.revision,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "use_rslora": False,
        "use_dora": model.method == "dora",
        "target_modules": modules,
        "layers_to_transform": indices,
        "layers_pattern": None,
        "lora_dropout": 0.0 if has_experts else model.dropout,  # peft has none for experts
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def targets(adapted: set[str], layers: set[str]) -> tuple[list[str], list[int] | None]:
    """target_modules and layers_to_transform that mean exactly these layers of the model's.

    Ends of names where they suffice ("q_proj"), of some blocks only where these blocks have them all; else whole names.
    """
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    meant = {name for name in layers if name.rpartition(".")[2] in ends}
    if meant == adapted:
        return ends, None
    blocks = {name: _block(name) for name in meant}
    indices = sorted({index for name in adapted if (index := blocks[name]) is not None})
    if indices and {name for name, index in blocks.items() if index in indices} == adapted:
        return ends, indices
    return sorted(adapted), None


def linear_layers(model: nn.Module) -> list[str]:
    """The names of a model's layers that have a matrix of weights."""
    kinds = (nn.Linear, nn.Embedding, SwitchLinear, *QUANTISED)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def original_of(run: TrainedRun) -> str:
    """The model that peft would load: of a quantised one that which its card names as its base, where it has a card."""
    card = run.base / "README.md"
    if run.is_quantised and card.is_file():
        with card.open("rb") as file:
            known = front_matter(file.read(CARD_BYTES).decode(errors="replace"))
        named = known.get("base_model") if isinstance(known, dict) else None
        named = named[0] if isinstance(named, list) and named else named
        if isinstance(named, str):
            return named
    return run.settings.model.path


def _peft_layers(layer: AdaptedLayer) -> list[str]:
    return _names(layer.name, layer.module.lora_a.shape[0])


def _names(name: str, experts: int) -> list[str]:
    """What peft calls a layer: of stacked experts each by itself."""
    pattern = expert_pattern(name)
    return [name] if pattern is None else [pattern.format(expert) for expert in range(experts)]


def _block(name: str) -> int | None:
    """The block that peft takes a layer for a part of: the first number in its name."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", name)
    return int(match[1]) if match else None


def _whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _pattern(values: Mapping[str, int | float], most: int | float) -> dict[str, int | float]:
    """What differs from most layers, by whole names, in which a dot is a dot."""
    return {re.escape(name): value for name, value in values.items() if value != most}
