"""PEFT's adapters, as `PeftModel.save_pretrained` writes them: into our arrays and back.

Ours are mlx-lm's: y = W x + scale B A x with lora_a = A^T [in, r] and lora_b = B^T [r, out]; of stacked experts lora_a
[E, r, in] and lora_b [E, out, r]. PEFT keeps A [r, in] and B [out, r] of every expert, and alpha = scale r.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
from pydantic import BaseModel, Field, ValidationError

from lib.config import read_file
from lib.errors import UserError
from lib.model import peft_experts
from lib.model.adapter_layers import AdapterLayer, first_match
from lib.model.checkpoint_names import expert_pattern, stacked_name
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

PREFIX = "base_model.model."
HEAD = "lm_head"
# PEFT's name of an array, and ours. Embeddings are looked up in A^T, so ours have the same form as linear layers.
PARTS = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m",
}
# What adapter_config.json may say only so: anything else would be another computation than ours.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    # The others change the base model's weights when training starts.
    "init_lora_weights": (True, False, "gaussian", "eva"),
}


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter of PEFT's.

    Args:
        config: adapter_config.json.
        arrays: by our names, not evaluated yet.
        layers: the rank and scale of every layer.
    """

    config: Mapping[str, Any]
    arrays: dict[str, mx.array]
    layers: dict[str, AdapterLayer]


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT's."""
    return (folder / PEFT_WEIGHTS).is_file()


def peft_arrays(
    arrays: Mapping[str, mx.array], embeddings: frozenset[str] = frozenset(), is_tied: bool = False
) -> dict[str, mx.array]:
    """Our arrays by PEFT's names.

    Args:
        embeddings: the names of layers that are looked up.
        is_tied: whether these are also the head: PEFT has an adapter for each use, and mlx-lm one for both.

    Raises:
        UserError: stacked experts whose names in a checkpoint are not known.
    """
    theirs: dict[str, mx.array] = {}
    for name, array in arrays.items():
        layer, _, part = name.rpartition(".")
        pattern = expert_pattern(layer)
        if pattern is not None:
            suffix = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}[part]
            for expert in range(len(array)):
                theirs[f"{PREFIX}{pattern.format(expert)}.{suffix}"] = array[expert]
        elif array.ndim == 3:
            raise UserError(f"{layer}: how PEFT names the experts of this family is not known; take --to fused")
        elif part == "m":
            theirs[f"{PREFIX}{layer}.lora_magnitude_vector"] = array
        else:
            letter = {"lora_a": "A", "lora_b": "B"}[part]
            suffix = f"lora_embedding_{letter}" if layer in embeddings else f"lora_{letter}.weight"
            theirs[f"{PREFIX}{layer}.{suffix}"] = array.T
            if is_tied and layer in embeddings:  # the head multiplies by the transposed embedding
                turned = {"lora_a": "lora_B", "lora_b": "lora_A"}[part]
                theirs[f"{PREFIX}{HEAD}.{turned}.weight"] = array
    return theirs


def our_arrays(arrays: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """PEFT's arrays by our names.

    Raises:
        UserError: an array that is none of a low-rank layer's; experts that are missing.
    """
    ours: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, array in arrays.items():
        layer, part = _layer_and_part(name, where)
        stacked = stacked_name(layer)
        if stacked is not None:
            experts[f"{stacked[0]}.{part}"][stacked[1]] = array
        else:
            ours[f"{layer}.{part}"] = array if part == "m" else array.T
    for name, by_expert in experts.items():
        if sorted(by_expert) != list(range(len(by_expert))):
            raise UserError(f"{where}: {name.rpartition('.')[0]} has adapters of some experts only, all or none fit")
        ours[name] = mx.stack([by_expert[expert] for expert in range(len(by_expert))])
    return ours


def read(folder: Path, where: str) -> PeftAdapter:
    """An adapter that peft saved. where: the setting that names it.

    Raises:
        UserError: it cannot be read, or has more than low-rank factors and magnitudes.
    """
    read_file.require_regular(folder / PEFT_WEIGHTS, where)
    where = f"{where} {folder}"
    try:
        config = read_file.read_object(folder / ADAPTER_CONFIG, where)
        stored = dict(mx.load(str(folder / PEFT_WEIGHTS)))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: it cannot be read: {str(error).splitlines()[0]}") from None
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {config.get('peft_type')}; only LORA, with use_dora or without, fits")
    _require_numbers(config, where)
    for name, array in stored.items():
        if array.ndim == 0 or (array.ndim == 1 and "lora_magnitude_vector" not in name):
            raise UserError(f"{where}: {name} has the shape {array.shape}, and is no part of a low-rank layer")
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(f"{where}: {key}={config[key]} of its {ADAPTER_CONFIG} has no counterpart here")
    fused = {name: array for name, array in stored.items() if peft_experts.is_fused(_layer_and_part(name, where)[0])}
    arrays = our_arrays({name: array for name, array in stored.items() if name not in fused}, where)
    experts: dict[str, peft_experts.Factors] = defaultdict(dict)
    for name, array in fused.items():
        layer, part = _layer_and_part(name, where)
        experts[layer][part] = array
    own, parameters = peft_experts.unfused(experts, lambda name: int(_rank(config, name)), where)
    arrays |= own
    names = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    layers = {
        name: _layer(parameters.get(name, _peft_name(name)), arrays[f"{name}.lora_a"], config, where) for name in names
    }
    return PeftAdapter(config, arrays, layers)


class _Numbers(BaseModel):
    """What of adapter_config.json is computed with."""

    r: Annotated[int, Field(gt=0, lt=2**20)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool | None = False
    rank_pattern: dict[str, Annotated[int, Field(gt=0, lt=2**20)]] | None = None
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None


def _require_numbers(config: Mapping[str, Any], where: str) -> None:
    try:
        _Numbers.model_validate(config, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError(f"{where}: {key} of its {ADAPTER_CONFIG}: {fault['msg'].lower()}") from None


def _layer_and_part(name: str, where: str) -> tuple[str, str]:
    """Of an array's name in PEFT's file: the layer, and what we call its part."""
    plain = name.removeprefix(PREFIX).replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    for theirs, ours in PARTS.items():
        if plain.endswith(f".{theirs}"):
            return plain.removesuffix(f".{theirs}"), ours
    raise UserError(f"{where}: {name} is no part of a low-rank layer; save the adapter without modules_to_save")


def _peft_name(layer: str) -> str:
    """What PEFT calls a layer; of stacked experts the first one."""
    pattern = expert_pattern(layer)
    return layer if pattern is None else pattern.format(0)


def _rank(config: Mapping[str, Any], theirs: str) -> int:
    return first_match(config.get("rank_pattern") or {}, theirs, config.get("r", 8))


def _layer(theirs: str, lora_a: mx.array, config: Mapping[str, Any], where: str) -> AdapterLayer:
    """By the patterns that its name matches: its rank, and alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
    rank = _rank(config, theirs)
    alpha = first_match(config.get("alpha_pattern") or {}, theirs, config.get("lora_alpha", 8))
    if lora_a.shape[1] != rank:
        raise UserError(f"{where}: {theirs} has rank {lora_a.shape[1]}, but {ADAPTER_CONFIG} says {rank}")
    return AdapterLayer(rank, float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))
