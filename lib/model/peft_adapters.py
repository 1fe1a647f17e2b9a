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
from typing import Annotated

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import BaseModel, Field, ValidationError

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.model.adapter_files import adapter_layers_of, described, fitted, trainable
from lib.model.adapter_layers import AdapterLayer, first_match
from lib.model.adapter_layers import scale as scale_by
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
    "lora_magnitude_vector.weight": "m",
    "lora_magnitude_vector": "m",
}
# Values of adapter_config.json under which PEFT computes as we do; others are refused.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "alora_invocation_tokens"), (None, [])),
    **dict.fromkeys(("arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others change the base's weights when training starts
}
Factors = dict[str, mx.array]  # lora_a: A, lora_b: B


class LoraNumbers(BaseModel):
    """The numbers of adapter_config.json that decide a layer's rank and scale."""

    r: Annotated[int, Field(gt=0, lt=2**20)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, Annotated[int, Field(gt=0, lt=2**20)]] = {}
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}

    def rank(self, layer: str) -> int:
        return first_match(self.rank_pattern, layer, self.r)

    def scale(self, layer: str) -> float:
        """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
        return scale_by(first_match(self.alpha_pattern, layer, self.lora_alpha), self.rank(layer), self.use_rslora)


@dataclass(frozen=True)
class PeftAdapter:
    """The numbers of adapter_config.json, the arrays by our names, and the rank and scale of every layer."""

    numbers: LoraNumbers
    arrays: dict[str, mx.array]
    layers: dict[str, AdapterLayer]


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
    where, weights = f"{where} {folder}", folder / PEFT_WEIGHTS
    if not weights.exists():
        raise UserError(
            f"{where}: {PICKLED} is a pickle, which may run code; where torch is installed type: python -c "
            f"\"import torch, safetensors.torch as s; s.save_file(torch.load('{folder / PICKLED}', weights_only=True), "
            f"'{weights}')\""
        )
    read_file.require_regular(weights, where)
    try:
        config = read_file.read_object(folder / ADAPTER_CONFIG, where)
        stored = dict(mx.load(str(weights)))
        numbers = LoraNumbers.model_validate({k: v for k, v in config.items() if v is not None}, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError(f"{where}: {key} of its {ADAPTER_CONFIG}: {fault['msg'].lower()}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: it cannot be read: {str(error).splitlines()[0]}") from None
    for key, plain in PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise UserError(f"{where}: {key}={config[key]} of its {ADAPTER_CONFIG} has no counterpart here")
    factors: dict[str, mx.array] = {}
    whole: dict[str, mx.array] = {}
    experts: dict[str, Factors] = defaultdict(dict)
    for name, array in stored.items():
        layer, part = _layer_and_part(name, where)
        if part == "weight":
            whole[layer] = array
        elif layer.endswith((".experts", ".experts.base_layer")):
            experts[layer][part] = array
        else:
            factors[name] = array
    arrays = our_arrays(factors, where)
    of_experts, parameters = unfused(experts, numbers.rank, where)
    arrays |= of_experts
    layers = {}
    for name in (name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")):
        theirs = parameters.get(name, (expert_pattern(name) or name).format(0))
        rank, found = numbers.rank(theirs), arrays[f"{name}.lora_a"].shape[1]
        if found != rank:
            raise UserError(f"{where}: {theirs} has rank {found}, but {ADAPTER_CONFIG} says {rank}")
        layers[name] = AdapterLayer(rank, numbers.scale(theirs))
    return PeftAdapter(numbers, arrays, layers), whole


def our_arrays(arrays: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """PEFT's factors, by its names, as ours.

    Raises:
        UserError: experts that are missing.
    """
    ours: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, array in arrays.items():
        layer, part = _layer_and_part(name, where)
        if (stacked := stacked_name(layer)) is not None:
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
    """Our arrays of stacked experts, and of each of our layers PEFT's parameter that it was a part of.

    Gate and up projections have one A in PEFT, and a copy each here. layers: by PEFT's names.

    Raises:
        UserError: one of the two parameters alone is adapted, or their shapes do not fit each other.
    """
    arrays: dict[str, mx.array] = {}
    parameters: dict[str, str] = {}
    for block in sorted({layer.removesuffix(".base_layer").removesuffix(".experts") for layer in layers}):
        pair = [layers[each] for each in (f"{block}.experts.base_layer", f"{block}.experts") if each in layers]
        if len(pair) < 2:
            raise UserError(f"{where}: {block}.experts adapts one of gate_up_proj and down_proj; both or neither fit")
        gate_up, down = pair if _are_gate_up_and_down(*pair) else reversed(pair)
        if not _are_gate_up_and_down(gate_up, down):
            raise UserError(f"{where}: {block}.experts: its arrays are not those of gate_up_proj and down_proj")
        for part, factors, names in (
            ("gate_up_proj", gate_up, ("gate_proj", "up_proj")),
            ("down_proj", down, ("down_proj",)),
        ):
            parameter, (a, b) = f"{block}.experts.{part}", (factors["lora_a"], factors["lora_b"])
            a = a.reshape(-1, rank_of(parameter), a.shape[1])
            b = b.reshape(b.shape[0], a.shape[1], -1).transpose(2, 0, 1)
            for name, part_of_b in zip(names, mx.split(b, len(names), axis=1), strict=True):
                layer = f"{block}.switch_mlp.{name}"
                arrays |= {f"{layer}.lora_a": a, f"{layer}.lora_b": part_of_b}
                parameters[layer] = parameter
    return arrays, parameters


def _are_gate_up_and_down(first: Factors, second: Factors) -> bool:
    """[2 I, D] and [D, I], of one expert's weights."""
    inputs, outputs = first["lora_a"].shape[1], first["lora_b"].shape[0]
    return bool(inputs == second["lora_b"].shape[0] and outputs == 2 * second["lora_a"].shape[1])


def _layer_and_part(name: str, where: str) -> tuple[str, str]:
    """Of an array's name in PEFT's file: the layer, and what we call its part; `weight` of a whole one."""
    plain = name.replace(".default", "")  # the adapter's name, which saving by hand leaves in
    while plain.startswith(PREFIX):
        plain = plain.removeprefix(PREFIX)
    for theirs, ours in PARTS.items():
        if plain.endswith(f".{theirs}"):
            return plain.removesuffix(f".{theirs}"), ours
    if plain.endswith(".weight"):
        return plain.removesuffix(".weight").removesuffix(".base_layer").removesuffix(".modules_to_save"), "weight"
    raise UserError(f"{where}: {name} is no part of a low-rank layer; save the adapter without modules_to_save")


# ---- A start from PEFT's


def load(model: nn.Module, folder: Path, settings: ModelSettings) -> None:
    """Reads a PEFT adapter into a model with adapters of the same ranks and scales in the same layers.

    Raises:
        UserError: it cannot be read, or wants other settings, which are named as one would type them.
    """
    where = f"model.adapter {folder}"
    adapter, whole = read(folder, "model.adapter")
    adapter = with_names_of(model, adapter)
    _require_same_weights(model, whole, where)
    if HEAD in adapter.layers and HEAD not in dict(model.named_modules()):
        adapter = _with_tied_head(adapter, where)
    shapes, method = described(trainable(model)), "dora" if adapter.numbers.use_dora else "lora"
    layers = adapter_layers_of(settings, shapes)
    words = [] if method == settings.method else [f"model.method={method}"]
    if layers.keys() != adapter.layers.keys():
        words += _words_for_layers(adapter.layers, model)
    pairs = [(layer, layers.get(name, layer)) for name, layer in adapter.layers.items()]
    if any(a.rank != b.rank or not math.isclose(a.scale, b.scale, rel_tol=SAME_SCALE) for a, b in pairs):
        words += _words_for_scales(adapter, settings)
    if words:
        raise UserError(f"{where} was made with other settings; add {' '.join(words)}")
    model.update(tree_unflatten(list(fitted(shapes, adapter.arrays, where).items())))


def with_names_of(model: nn.Module, adapter: PeftAdapter) -> PeftAdapter:
    """The adapter by the model's names: a text model's, where it was trained as a part of one that also sees pictures.

    transformers calls it model.language_model.layers or language_model.model.layers, and mlx-lm may not, or the other
    way round.
    """
    names = {name for name, _ in model.named_modules()}
    by_plain_name = {name.replace("language_model.", ""): name for name in names}

    def ours(layer: str) -> str:
        return layer if layer in names else by_plain_name.get(layer.replace("language_model.", ""), layer)

    split = ((name.rpartition("."), array) for name, array in adapter.arrays.items())
    arrays = {f"{ours(layer)}.{part}": array for (layer, _, part), array in split}
    return PeftAdapter(adapter.numbers, arrays, {ours(name): layer for name, layer in adapter.layers.items()})


def _require_same_weights(model: nn.Module, whole: Mapping[str, mx.array], where: str) -> None:
    """Raises UserError where a weight that PEFT stored whole (it does so with a head) is not the model's own."""
    weights = {
        name.replace(".linear.", ".").replace(".embedding.", "."): a for name, a in tree_flatten(model.parameters())
    }
    tied = next((array for name, array in weights.items() if name.endswith("embed_tokens.weight")), None)
    for layer, array in whole.items():
        ours = weights.get(f"{layer}.weight", tied if layer == HEAD else None)
        is_same = False
        if ours is not None and ours.shape == array.shape:
            is_same = mx.allclose(ours.astype(mx.float32), array.astype(mx.float32), 1e-2, 1e-3).item()
        if not is_same:
            raise UserError(
                f"{where} stores {layer}.weight, which is another one than the model's; merge it with peft's "
                "merge_and_unload(), save that, and give the folder as model.path without model.adapter"
            )


def _with_tied_head(adapter: PeftAdapter, where: str) -> PeftAdapter:
    """The adapter for a model whose head is its embedding: mlx-lm has one adapter for both uses.

    Raises:
        UserError: PEFT trained two.
    """
    embedding = next((name for name in adapter.layers if name.endswith("embed_tokens")), None)
    parts = (("lora_a", "lora_b"), ("lora_b", "lora_a"))
    arrays = adapter.arrays
    is_shared = (
        embedding is not None and adapter.layers[embedding] == adapter.layers[HEAD] and f"{HEAD}.m" not in arrays
    )
    if not is_shared or not all(mx.array_equal(arrays[f"{HEAD}.{a}"], arrays[f"{embedding}.{b}"].T) for a, b in parts):
        raise UserError(
            f"{where}: the model's head is its embedding, which has one adapter here for both uses; "
            "train with ensure_weight_tying=True, or without lm_head"
        )
    kept = {name: array for name, array in arrays.items() if name.rpartition(".")[0] != HEAD}
    return PeftAdapter(adapter.numbers, kept, {name: a for name, a in adapter.layers.items() if name != HEAD})


def _words_for_layers(layers: Iterable[str], model: nn.Module) -> list[str]:
    """The settings that adapt these layers: the same ones of some blocks, or by their full names."""
    names = {id(module): name for name, module in model.named_modules()}
    keys: dict[int, set[str]] = defaultdict(set)
    outside = set(layers)
    for index, block in enumerate(model.layers):
        prefix = f"{names[id(block)]}."
        if inside := {layer for layer in outside if layer.startswith(prefix)}:
            keys[index] = {layer.removeprefix(prefix) for layer in inside}
            outside -= inside
    if len(set(map(frozenset, keys.values()))) != 1:
        return [f"model.keys={_list(sorted(layers))}", "model.blocks=null"]
    blocks = "null" if len(keys) == len(model.layers) else _list(sorted(keys))
    return [f"model.keys={_list(sorted(next(iter(keys.values())) | outside))}", f"model.blocks={blocks}"]


def _words_for_scales(adapter: PeftAdapter, settings: ModelSettings) -> list[str]:
    """The settings that give every layer its rank and scale: one for all, or each layer's name as a pattern."""
    kinds, numbers = set(adapter.layers.values()), adapter.numbers
    if len(kinds) == 1 and settings.alpha is None:
        (layer,) = kinds
        return [f"model.rank={layer.rank}", f"model.scale={layer.scale}"]
    words = [f"model.rank={numbers.r}", f"model.alpha={numbers.lora_alpha:g}"]
    words += ["model.use_rslora=true"] * numbers.use_rslora
    ranks: dict[str, float] = {name: layer.rank for name, layer in adapter.layers.items()}
    alphas = {n: layer.scale / scale_by(1, layer.rank, numbers.use_rslora) for n, layer in adapter.layers.items()}
    for setting, values, default in (("rank_pattern", ranks, numbers.r), ("alpha_pattern", alphas, numbers.lora_alpha)):
        if pattern := {n.replace(".", r"\."): v for n, v in values.items() if not math.isclose(v, default)}:
            words.append(f"'model.{setting}={json.dumps(pattern)}'")
    return words


def _list(names: Iterable[object]) -> str:
    return f"[{','.join(map(str, names))}]"
