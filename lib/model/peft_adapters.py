"""PEFT's adapters, as `PeftModel.save_pretrained` writes them: into our arrays and back, and a start from them.

Ours are mlx-lm's: y = W x + scale B A x with lora_a = A^T [in, r] and lora_b = B^T [r, out]; of stacked experts lora_a
[E, r, in] and lora_b [E, out, r]. PEFT keeps A [r, in] and B [out, r] of every expert, and alpha = scale r. With
transformers 5 experts are two parameters of all experts each, `mlp.experts.gate_up_proj` [E, 2 I, D] and `down_proj`
[E, D, I], and PEFT wraps one around the other, so that their layers are `mlp.experts.base_layer` and `mlp.experts`, in
either order: A is [E r, in], expert by expert, and B [out, r E], rank by rank.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, Field, ValidationError

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model.adapter_files import adapter_layers_of, described, fitted, trainable
from lib.model.adapter_layers import AdapterLayer, first_match
from lib.model.checkpoint_names import expert_pattern, stacked_name
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

PREFIX = "base_model.model."
PICKLED = "adapter_model.bin"
HEAD = "lm_head"
SAME_SCALE = 1e-6  # relatively: what one types of a square root
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
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)),
    "bias": ("none",),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others change the base's weights when training starts
}
Factors = dict[str, mx.array]  # lora_a: A, lora_b: B


@dataclass(frozen=True)
class PeftAdapter:
    """adapter_config.json, the arrays by our names, and the rank and scale of every layer."""

    config: Mapping[str, Any]
    arrays: dict[str, mx.array]
    layers: dict[str, AdapterLayer]

    @property
    def method(self) -> str:
        """model.method."""
        return "dora" if self.config.get("use_dora") else "lora"


def is_peft(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT's."""
    return (folder / PEFT_WEIGHTS).is_file() or (folder / PICKLED).is_file()


# ---- Ours into PEFT's


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
        letter, pattern = {"lora_a": "A", "lora_b": "B"}.get(part), expert_pattern(layer)
        if pattern is not None:
            for expert in range(len(array)):
                theirs[f"{PREFIX}{pattern.format(expert)}.lora_{letter}.weight"] = array[expert]
        elif array.ndim == 3:
            raise UserError(f"{layer}: how PEFT names the experts of this family is not known; take --to fused")
        elif part == "m":
            theirs[f"{PREFIX}{layer}.lora_magnitude_vector"] = array
        else:
            suffix = f"lora_embedding_{letter}" if layer in embeddings else f"lora_{letter}.weight"
            theirs[f"{PREFIX}{layer}.{suffix}"] = array.T
            if is_tied and layer in embeddings:  # the head multiplies by the transposed embedding
                theirs[f"{PREFIX}{HEAD}.lora_{'B' if letter == 'A' else 'A'}.weight"] = array
    return theirs


# ---- PEFT's into ours


def read(folder: Path, where: str) -> tuple[PeftAdapter, dict[str, mx.array]]:
    """An adapter that peft saved; and whole weights that it stored beside, by layer. where: the setting that names it.

    Raises:
        UserError: it cannot be read, or has more than low-rank factors, magnitudes and whole weights.
    """
    if (folder / PICKLED).is_file() and not (folder / PEFT_WEIGHTS).exists():
        raise UserError(
            f"{where} {folder}: {PICKLED} is a pickle, which may run code; where torch is installed type: python -c "
            f"\"import torch, safetensors.torch as s; s.save_file(torch.load('{folder / PICKLED}', weights_only=True), "
            f"'{folder / PEFT_WEIGHTS}')\""
        )
    read_file.require_regular(folder / PEFT_WEIGHTS, where)
    where = f"{where} {folder}"
    try:
        config = read_file.read_object(folder / ADAPTER_CONFIG, where)
        stored = dict(mx.load(str(folder / PEFT_WEIGHTS)))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: it cannot be read: {str(error).splitlines()[0]}") from None
    _require_plain(config, where)
    arrays: dict[str, mx.array] = {}
    whole: dict[str, mx.array] = {}
    experts: dict[str, Factors] = defaultdict(dict)
    for name, array in stored.items():
        layer, part = _layer_and_part(name, where)
        if part == "weight":
            whole[layer] = array
        elif array.ndim == 0 or (array.ndim == 1 and part != "m"):
            raise UserError(f"{where}: {name} has the shape {array.shape}, and is no part of a low-rank layer")
        elif layer.endswith((".experts", ".experts.base_layer")):
            experts[layer][part] = array
        else:
            arrays[name] = array
    arrays = our_arrays(arrays, where)
    fused, parameters = unfused(experts, lambda name: _rank(config, name), where)
    arrays |= fused
    names = [name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")]
    layers = {
        name: _layer(parameters.get(name, _peft_name(name)), arrays[f"{name}.lora_a"], config, where) for name in names
    }
    return PeftAdapter(config, arrays, layers), whole


def our_arrays(arrays: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """PEFT's factors, by its names, as ours.

    Raises:
        UserError: experts that are missing.
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


def unfused(
    layers: Mapping[str, Factors], rank_of: Callable[[str], int], where: str
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Our arrays of stacked experts, and of each of our layers the parameter that it was a part of.

    Gate and up projections have one A in PEFT, and a copy each here.

    Args:
        layers: by PEFT's names.
        rank_of: the rank of an adapted parameter, by its full name.

    Raises:
        UserError: only one of the two parameters is adapted, or their shapes do not fit each other.
    """
    arrays: dict[str, mx.array] = {}
    parameters: dict[str, str] = {}
    for block in sorted({layer.removesuffix(".base_layer").removesuffix(".experts") for layer in layers}):
        inner, outer = layers.get(f"{block}.experts.base_layer"), layers.get(f"{block}.experts")
        if inner is None or outer is None:
            raise UserError(f"{where}: {block}.experts adapts one of gate_up_proj and down_proj; both or neither fit")
        gate_up, down = (inner, outer) if _are_gate_up_and_down(inner, outer) else (outer, inner)
        if not _are_gate_up_and_down(gate_up, down):
            raise UserError(f"{where}: {block}.experts: its arrays are not those of gate_up_proj and down_proj")
        for part, factors, names in (
            ("gate_up_proj", gate_up, ("gate_proj", "up_proj")),
            ("down_proj", down, ("down_proj",)),
        ):
            parameter, (a, b) = f"{block}.experts.{part}", (factors["lora_a"], factors["lora_b"])
            rank = rank_of(parameter)
            a = a.reshape(-1, rank, a.shape[1])
            b = b.reshape(b.shape[0], rank, -1).transpose(2, 0, 1)
            for name, of_name in zip(names, mx.split(b, len(names), axis=1), strict=True):
                layer = f"{block}.switch_mlp.{name}"
                arrays |= {f"{layer}.lora_a": a, f"{layer}.lora_b": of_name}
                parameters[layer] = parameter
    return arrays, parameters


def _are_gate_up_and_down(first: Factors, second: Factors) -> bool:
    """[2 I, D] and [D, I], of one expert's weights."""
    inputs, outputs = first["lora_a"].shape[1], first["lora_b"].shape[0]
    return bool(inputs == second["lora_b"].shape[0] and outputs == 2 * second["lora_a"].shape[1])


class _Numbers(BaseModel):
    """What of adapter_config.json is computed with."""

    r: Annotated[int, Field(gt=0, lt=2**20)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool | None = False
    rank_pattern: dict[str, Annotated[int, Field(gt=0, lt=2**20)]] | None = None
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None


def _require_plain(config: Mapping[str, Any], where: str) -> None:
    """Raises UserError where adapter_config.json asks for a computation that is not ours."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type {config.get('peft_type')}; only LORA, with use_dora or without, fits")
    try:
        _Numbers.model_validate(config, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError(f"{where}: {key} of its {ADAPTER_CONFIG}: {fault['msg'].lower()}") from None
    for key, plain in PLAIN.items():
        if key in config and config[key] not in plain:
            raise UserError(f"{where}: {key}={config[key]} of its {ADAPTER_CONFIG} has no counterpart here")


def _layer_and_part(name: str, where: str) -> tuple[str, str]:
    """Of an array's name in PEFT's file: the layer, and what we call its part; `weight` of a whole one."""
    plain = name.replace(".default", "")  # the adapter's name, which saving by hand leaves in
    while plain.startswith(PREFIX):
        plain = plain.removeprefix(PREFIX)
    plain = plain.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    for theirs, ours in PARTS.items():
        if plain.endswith(f".{theirs}"):
            return plain.removesuffix(f".{theirs}"), ours
    if plain.endswith(".weight"):
        return plain.removesuffix(".weight").removesuffix(".base_layer").removesuffix(".modules_to_save"), "weight"
    raise UserError(f"{where}: {name} is no part of a low-rank layer; save the adapter without modules_to_save")


def _peft_name(layer: str) -> str:
    """What PEFT calls a layer; of stacked experts the first one."""
    pattern = expert_pattern(layer)
    return layer if pattern is None else pattern.format(0)


def _rank(config: Mapping[str, Any], theirs: str) -> int:
    return int(first_match(config.get("rank_pattern") or {}, theirs, config.get("r", 8)))


def _layer(theirs: str, lora_a: mx.array, config: Mapping[str, Any], where: str) -> AdapterLayer:
    """By the patterns that its name matches: its rank, and alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
    rank = _rank(config, theirs)
    alpha = first_match(config.get("alpha_pattern") or {}, theirs, config.get("lora_alpha", 8))
    if lora_a.shape[1] != rank:
        raise UserError(f"{where}: {theirs} has rank {lora_a.shape[1]}, but {ADAPTER_CONFIG} says {rank}")
    return AdapterLayer(rank, float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)))


# ---- A start from PEFT's


def load(model: nn.Module, folder: Path, settings: ModelSettings) -> None:
    """Reads a PEFT adapter into a model with adapters of the same ranks and scales in the same layers.

    Raises:
        UserError: it cannot be read, or wants other settings, which are named as one would type them.
    """
    where = f"model.adapter {folder}"
    adapter, whole = read(folder, "model.adapter")
    adapter = _with_names_of(model, adapter)
    _require_same_weights(model, whole, where)
    if HEAD in adapter.layers and HEAD not in dict(model.named_modules()):
        adapter = _with_tied_head(adapter, where)
    shapes = described(trainable(model))
    layers = adapter_layers_of(settings, shapes)
    words = [] if adapter.method == settings.method else [f"model.method={adapter.method}"]
    if layers.keys() != adapter.layers.keys():
        words += _words_for_layers(adapter.layers, model)
    if not all(_is_same(layer, layers.get(name, layer)) for name, layer in adapter.layers.items()):
        words += _words_for_scales(adapter, settings)
    if words:
        raise UserError(f"{where} was made with other settings; add {' '.join(words)}")
    model.update(tree_unflatten(list(fitted(shapes, adapter.arrays, where).items())))


def _with_names_of(model: nn.Module, adapter: PeftAdapter) -> PeftAdapter:
    """The adapter by the model's names: a text model's, where it was trained as a part of one that also sees pictures.

    transformers calls it model.language_model.layers or language_model.model.layers, and mlx-lm may not, or the other
    way round.
    """
    names = {name for name, _ in model.named_modules()}
    by_plain_name = {name.replace("language_model.", ""): name for name in names}

    def ours(layer: str) -> str:
        return layer if layer in names else by_plain_name.get(layer.replace("language_model.", ""), layer)

    arrays = {}
    for name, array in adapter.arrays.items():
        layer, _, part = name.rpartition(".")
        arrays[f"{ours(layer)}.{part}"] = array
    return PeftAdapter(adapter.config, arrays, {ours(name): layer for name, layer in adapter.layers.items()})


def _require_same_weights(model: nn.Module, whole: Mapping[str, mx.array], where: str) -> None:
    """Raises UserError where a weight that PEFT stored whole (it does so with a head) is not the model's own."""
    weights = {
        name.replace(".linear.", ".").replace(".embedding.", "."): a for name, a in tree_flatten(model.parameters())
    }
    tied = next((array for name, array in weights.items() if name.endswith("embed_tokens.weight")), None)
    for layer, array in whole.items():
        known = weights.get(f"{layer}.weight", tied if layer == HEAD else None)
        if (
            known is None
            or known.shape != array.shape
            or not mx.allclose(known.astype(mx.float32), array.astype(mx.float32), 1e-2, 1e-3).item()
        ):
            raise UserError(
                f"{where} stores {layer}.weight, which is another one than the model's; merge it with peft's "
                "merge_and_unload(), save that, and give the folder as model.path without model.adapter"
            )


def _with_tied_head(adapter: PeftAdapter, where: str) -> PeftAdapter:
    """The adapter of a model whose head is its embedding: one for both.

    Raises:
        UserError: PEFT trained two.
    """
    embedding = next((name for name in adapter.layers if name.endswith("embed_tokens")), None)
    arrays, layers = dict(adapter.arrays), dict(adapter.layers)
    head = {part: arrays.pop(f"{HEAD}.{part}", None) for part in ("lora_a", "lora_b", "m")}
    of_head = layers.pop(HEAD)
    is_shared = embedding is not None and head["m"] is None and layers[embedding] == of_head
    for part, other in (("lora_a", "lora_b"), ("lora_b", "lora_a")):
        is_shared = is_shared and mx.array_equal(head[part], arrays[f"{embedding}.{other}"].T).item()
    if not is_shared:
        raise UserError(
            f"{where}: the model's head is its embedding, which has one adapter here for both uses; "
            "train with ensure_weight_tying=True, or without lm_head"
        )
    return PeftAdapter(adapter.config, arrays, layers)


def _is_same(first: AdapterLayer, second: AdapterLayer) -> bool:
    return first.rank == second.rank and math.isclose(first.scale, second.scale, rel_tol=SAME_SCALE)


def _words_for_layers(layers: Iterable[str], model: nn.Module) -> list[str]:
    """The settings that adapt these layers: the same ones of some blocks, or by their full names."""
    names = {id(module): name for name, module in model.named_modules()}
    prefixes = [f"{names[id(block)]}." for block in model.layers]
    keys: dict[int, set[str]] = {}
    outside: set[str] = set()
    for layer in layers:
        index = next((index for index, prefix in enumerate(prefixes) if layer.startswith(prefix)), None)
        if index is None:
            outside.add(layer)
        else:
            keys.setdefault(index, set()).add(layer.removeprefix(prefixes[index]))
    of_blocks = list(keys.values())
    if not of_blocks or any(of_block != of_blocks[0] for of_block in of_blocks):
        return [f"model.keys={_list(sorted(layers))}", "model.blocks=null"]
    blocks = "null" if len(keys) == len(prefixes) else _list(sorted(keys))
    return [f"model.keys={_list(sorted(of_blocks[0] | outside))}", f"model.blocks={blocks}"]


def _words_for_scales(adapter: PeftAdapter, settings: ModelSettings) -> list[str]:
    """The settings that give every layer its rank and scale: one for all, or each layer's name as a pattern."""
    kinds = set(adapter.layers.values())
    if len(kinds) == 1 and settings.alpha is None:
        layer = kinds.pop()
        return [f"model.rank={layer.rank}", f"model.scale={layer.scale}"]
    config = adapter.config
    rank, alpha, is_rooted = config.get("r", 8), config.get("lora_alpha", 8), bool(config.get("use_rslora"))
    words = [f"model.rank={rank}", f"model.alpha={alpha}"] + ["model.use_rslora=true"] * is_rooted
    ranks = {name: layer.rank for name, layer in adapter.layers.items()}
    alphas = {
        n: layer.scale * (math.sqrt(layer.rank) if is_rooted else layer.rank) for n, layer in adapter.layers.items()
    }
    for setting, values, default in (("rank_pattern", ranks, rank), ("alpha_pattern", alphas, alpha)):
        if pattern := _pattern(values, default):
            words.append(f"'model.{setting}={json.dumps(pattern)}'")
    return words


def _pattern(values: Mapping[str, float], default: float) -> dict[str, float]:
    """The shortest ends of the layers' names that give each its value: the last word where that decides, or all."""
    by_end: dict[str, set[float]] = defaultdict(set)
    for name, value in values.items():
        by_end[name.rpartition(".")[2]].add(value)
    pattern: dict[str, float] = {}
    for name, value in values.items():
        end = name.rpartition(".")[2]
        key = end if len(by_end[end]) == 1 else name.replace(".", r"\.")
        if not math.isclose(value, default):
            pattern[key] = value
    return pattern


def _list(names: Iterable[object]) -> str:
    return f"[{','.join(map(str, names))}]"
