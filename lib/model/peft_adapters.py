"""PEFT's adapters, as `PeftModel.save_pretrained` writes them: into our arrays and back, and a start from them.

Ours are mlx-lm's: y = W x + scale B A x with lora_a = A^T [in, r] and lora_b = B^T [r, out]; of stacked experts lora_a
[E, r, in] and lora_b [E, out, r]. PEFT keeps A [r, in] and B [out, r] of every expert, and alpha = scale r.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from pydantic import ValidationError

from lib.config import read_file
from lib.config.settings import ModelSettings
from lib.errors import UserError, in_one_line
from lib.model.adapter_files import AdapterLayer, adapter_layers_of, described, fitted, layer_of, trainable
from lib.system.model_folder import ADAPTER_CONFIG, PEFT_WEIGHTS

Layers = Mapping[str, AdapterLayer]
Words = Sequence[str]  # settings, as one types them

PREFIX = "base_model.model."
PICKLED = "adapter_model.bin"
UNPICKLE = "import torch,safetensors.torch as s;s.save_file(torch.load('{0}.bin',weights_only=True),'{0}.safetensors')"
HEAD = "lm_head"
SAME_SCALE = 1e-6  # relatively: what one types of a square root
# The part of a layer that an array is, by PEFT's names and by those of others: A, B, DoRA's magnitudes, or all of it.
# Embeddings are looked up in A^T, so ours have the same form as linear layers.
PART = re.compile(r"\.(?:lora_(?:embedding_)?(?:(A|a|down)|(B|b|up)|(magnitude_vector))(?:\.weight)?|weight)$")
SAME_NAMES = ("use_rslora", "rank_pattern", "alpha_pattern")  # in adapter_config.json and in our settings
# Values of adapter_config.json, beside null, under which PEFT computes as we do; others are refused.
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication", "alora_invocation_tokens"), ([],)),
    **dict.fromkeys(("arrow_config", "kasa_config", "velora_config", "monteclora_config"), ()),
    "trainable_token_indices": ([], {}),
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others change the base's weights when training starts
}
# The part of a stacked layer's name in mlx-lm, and in checkpoints that transformers and peft read, {} for the expert.
EXPERTS = {f"mlp.switch_mlp.{name}": f"mlp.experts.{{}}.{name}" for name in ("gate_proj", "down_proj", "up_proj")}
EXPERTS |= {
    f"block_sparse_moe.switch_mlp.{name}": f"block_sparse_moe.experts.{{}}.{theirs}"
    for name, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
}

# What torch.compile, DDP and FSDP put into names, and where transformers has a model's text part.
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module|default)\.")
TEXT_PART = re.compile(r"^(model\.)+|(?<![^.])(language_model|text_model|llm|thinker)\.(model\.)?")
# The adapter's name in an array's, which saving by hand leaves in: layer.lora_A.NAME.weight.
ADAPTER_NAME = re.compile(r"(\.lora_\w+)\.(?!weight$)[^.]+(?=\.weight$|$)")
MERGED = "merge it with peft's merge_and_unload(), save that, and give the folder as model.path without model.adapter"


class PeftAdapter(NamedTuple):
    """An adapter that peft saved."""

    settings: ModelSettings  # method, rank, alpha and patterns of adapter_config.json, which mean the same here
    arrays: dict[str, mx.array]  # by our names
    whole: dict[str, mx.array]  # weights that PEFT stored whole beside, by layer
    layers: Layers


def expert_pattern(name: str) -> str | None:
    """The name of each expert of a stacked layer, {} for its number; None of another layer."""
    return next((name.replace(ours, theirs) for ours, theirs in EXPERTS.items() if ours in name), None)


def stacked_name(name: str) -> tuple[str, int] | None:
    """The stacked layer that an expert's layer is a part of, and the expert's number; None of another layer."""
    for ours, theirs in EXPERTS.items():
        pattern = re.escape(theirs).replace(r"\{\}", r"(\d+)")
        if match := re.search(rf"\b{pattern}(?=\.|$)", name):
            return name[: match.start()] + ours + name[match.end() :], int(match[1])
    return None


def unstacked(arrays: Mapping[str, mx.array]) -> Iterator[tuple[str, mx.array]]:
    """A model's arrays by their names in a checkpoint, those of stacked experts one by one."""
    for name, array in arrays.items():
        pattern = expert_pattern(name)
        yield from [(name, array)] if pattern is None else ((pattern.format(i), each) for i, each in enumerate(array))


def peft_arrays(
    arrays: Mapping[str, mx.array], embeddings: frozenset[str] = frozenset(), is_tied: bool = False
) -> dict[str, mx.array]:
    """Our arrays by PEFT's names. embeddings: layers that are looked up; is_tied: PEFT has an adapter of its own for
    the head. Raises UserError: experts whose names in a checkpoint are not known."""
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


def read(folder: Path, where: str) -> PeftAdapter:
    """An adapter that peft saved. Raises UserError: it cannot be read, or has parts that have no counterpart here."""
    where, weights = f"{where} {folder}", folder / PEFT_WEIGHTS
    if not weights.exists():
        command = shlex.quote(UNPICKLE.format(weights.with_suffix("")))
        raise UserError(f"{where}: {PICKLED} is a pickle, which may run code; where torch is: python3 -c {command}")
    read_file.require_regular(weights, where)
    try:
        config = read_file.read_object(folder / ADAPTER_CONFIG, where)
        stored = dict(mx.load(str(weights)))
        numbers = {"rank": config.get("r", 8), "alpha": config.get("lora_alpha", 8)}
        numbers |= {name: config[name] for name in SAME_NAMES if config.get(name) is not None}
        settings = ModelSettings(path=str(folder), method="dora" if config.get("use_dora") else "lora", **numbers)
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"{where}: {ADAPTER_CONFIG} says {numbers}: {fault['loc'][0]}: {fault['msg']}") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{where}: it cannot be read: {in_one_line(error)}") from None
    for key, plain in PLAIN.items():
        if config.get(key) not in (None, *plain):
            raise UserError(f"{where}: {key}={config[key]} of its {ADAPTER_CONFIG} has no counterpart here; {MERGED}")
    factors: dict[str, mx.array] = {}
    whole: dict[str, mx.array] = {}
    for name, array in stored.items():
        layer, part = _layer_and_part(name, where)
        if layer.endswith((".experts", ".experts.base_layer")):
            raise UserError(f"{where}: {layer} adapts all experts in one array; only adapters of each expert are read")
        if part == "weight":
            whole[layer.removesuffix(".base_layer").removesuffix(".modules_to_save")] = array
        else:
            factors[name] = array
    arrays, layers = our_arrays(factors, where), {}
    for name in (name.removesuffix(".lora_a") for name in arrays if name.endswith(".lora_a")):
        theirs = (expert_pattern(name) or name).format(0)  # which patterns are of
        layers[name] = layer_of(settings, theirs)
        if (rank := arrays[f"{name}.lora_a"].shape[1]) != layers[name].rank:
            raise UserError(f"{where}: {theirs} has rank {rank}, but {ADAPTER_CONFIG} says {layers[name].rank}")
    return PeftAdapter(settings, arrays, whole, layers)


def our_arrays(arrays: Mapping[str, mx.array], where: str) -> dict[str, mx.array]:
    """PEFT's factors, by its names, as ours. Raises UserError where experts are missing."""
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


def _layer_and_part(name: str, where: str) -> tuple[str, str]:
    """Of an array's name in PEFT's file: the layer, and what we call its part."""
    plain = WRAPPERS.sub("", ADAPTER_NAME.sub(r"\1", name))
    while plain.startswith(PREFIX):
        plain = plain.removeprefix(PREFIX)
    if match := PART.search(plain):
        return plain[: match.start()], {1: "lora_a", 2: "lora_b", 3: "m"}.get(match.lastindex or 0, "weight")
    raise UserError(f"{where}: {name} is no part of a low-rank layer; save the adapter without modules_to_save")


def load(model: nn.Module, folder: Path, settings: ModelSettings) -> None:
    """Starts a model from a PEFT adapter. Raises UserError: it is unreadable, or of other settings, which are named."""
    where, adapter = f"model.adapter {folder}", with_names_of(model, read(folder, "model.adapter"))
    _require_same_weights(model, adapter.whole, where)
    if HEAD in adapter.layers and HEAD not in dict(model.named_modules()):
        adapter = _with_tied_head(adapter, where)
    names = {name for name, _ in model.named_modules()}
    if strange := [layer for layer in adapter.layers if layer not in names]:
        raise UserError(f"{where} changes {strange[0]}, which the model does not have: it is of another base")
    theirs = adapter.settings
    words = [f"model.rank={theirs.rank}", f"model.alpha={theirs.alpha:g}"]
    patterns = {name: getattr(theirs, name) for name in SAME_NAMES}
    words += [f"'model.{name}={json.dumps(value)}'" for name, value in patterns.items() if value]
    require_settings(model, settings, adapter.layers, theirs.method, where, words)
    model.update(tree_unflatten(fitted(described(trainable(model)), adapter.arrays, where)))


def require_settings(
    model: nn.Module, settings: ModelSettings, wanted: Layers, method: str, where: str, words_for_ranks: Words = ()
) -> None:
    """Raises UserError where a model has other layers, ranks or scales than an adapter; says what to add."""
    layers = adapter_layers_of(settings, described(trainable(model)))
    words = [] if method == settings.method else [f"model.method={method}"]
    if wanted and layers.keys() != wanted.keys():
        words += _words_for_layers(list(wanted), len(model.layers))
    for name, (rank, scale) in sorted(wanted.items()):
        ours = layers.get(name, wanted[name])
        if rank != ours.rank or not math.isclose(scale, ours.scale, rel_tol=SAME_SCALE):
            words += words_for_ranks or [f"model.rank={rank}", f"model.scale={scale} (of {name})"]
            break
    if words:
        raise UserError(f"{where} was made with other settings; add {' '.join(words)}")


def with_names_of(model: nn.Module, adapter: PeftAdapter) -> PeftAdapter:
    """The adapter by the model's names: transformers puts a text part in that mlx-lm may not have, or lacks it."""
    names = {name: name for name, _ in model.named_modules()}
    by_plain_name = {TEXT_PART.sub("", name): name for name in names}

    def ours(layer: str) -> str:
        return names.get(layer) or by_plain_name.get(TEXT_PART.sub("", layer), layer)

    split = ((name.rpartition("."), array) for name, array in adapter.arrays.items())
    arrays = {f"{ours(layer)}.{part}": array for (layer, _, part), array in split}
    return adapter._replace(arrays=arrays, layers={ours(name): layer for name, layer in adapter.layers.items()})


def _require_same_weights(model: nn.Module, whole: Mapping[str, mx.array], where: str) -> None:
    """Raises UserError where a weight that PEFT stored whole (it does so with a head) is not the model's own."""
    stored = tree_flatten(model.parameters())
    weights = {name.replace(".linear.", ".").replace(".embedding.", "."): array for name, array in stored}
    tied = next((array for name, array in weights.items() if name.endswith("embed_tokens.weight")), None)
    for layer, array in whole.items():
        ours, wide = weights.get(f"{layer}.weight", tied if layer == HEAD else None), array.astype(mx.float32)
        if ours is None or ours.shape != array.shape or not mx.allclose(ours.astype(mx.float32), wide, 1e-2, 1e-3):
            raise UserError(f"{where} stores {layer}.weight, which is another one than the model's; {MERGED}")


def _with_tied_head(adapter: PeftAdapter, where: str) -> PeftAdapter:
    """The adapter for a model whose head is its embedding: one for both uses. Raises UserError: PEFT trained two."""
    arrays, layers = dict(adapter.arrays), dict(adapter.layers)
    embedding = next((name for name in layers if name.endswith("embed_tokens")), "")
    is_shared = layers.get(embedding) == layers.pop(HEAD) and f"{HEAD}.m" not in arrays
    for ours, theirs in (("lora_a", "lora_b"), ("lora_b", "lora_a")):
        array = arrays.pop(f"{HEAD}.{ours}")
        is_shared = is_shared and mx.array_equal(array, arrays[f"{embedding}.{theirs}"].T).item()
    if not is_shared:
        raise UserError(
            f"{where}: the model's head is its embedding, which has one adapter here for both uses; "
            "train with ensure_weight_tying=True, or without lm_head"
        )
    return adapter._replace(arrays=arrays, layers=layers)


def _words_for_layers(layers: Words, block_count: int) -> list[str]:
    """The settings that adapt these layers: the same ones of some blocks, or by their full names."""
    split = {layer: re.fullmatch(r"(?:\w+\.)*?\w+\.(\d+)\.(.+)", layer) for layer in layers}
    in_blocks = {(int(match[1]), match[2]) for match in split.values() if match}
    blocks, names = sorted({block for block, _ in in_blocks}), {name for _, name in in_blocks}
    if len(blocks) * len(names) != len(in_blocks):
        blocks, names = [], set(layers)
    keys = sorted(names | {layer for layer, match in split.items() if match is None})
    listed = "null" if len(blocks) in (0, block_count) else f"[{','.join(map(str, blocks))}]"
    return [f"model.keys=[{','.join(keys)}]", f"model.blocks={listed}"]
