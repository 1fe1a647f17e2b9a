"""The whole model with its adapter merged in: for mlx-lm, and where it is not quantised for transformers and others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.utils import make_shards

from lib.config import read_file
from lib.errors import Stopped, UserError
from lib.export.trained_run import ChatForm, ExportOptions, Reading, TrainedRun, mlx_logps
from lib.model.adapter_files import described, trainable, write_arrays
from lib.model.adapters import EMBEDDINGS
from lib.model.peft_adapters import stacked_name, unstacked
from lib.system.model_folder import end_ids

TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
ADAPTED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)
SHARD_GIGABYTES = 5  # of one file of weights
# What comes along of a base model's folder: configuration, tokenizer, chat template, generation settings, code.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for a type that plain weights cannot have."""
    if options.type is not None and options.type not in TYPES:
        raise UserError(f"--type {options.type} is for --to gguf; --to fused has {', '.join(TYPES)}")
    if options.type is not None and run.is_quantised and not options.dequantize:
        raise UserError(f"--type {options.type}: {run.base} stays quantised; --dequantize stores plain weights")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the model as its base is stored: the same names and types of weights, unless others are asked for."""
    arrays = _stored(run, options)
    if any(stacked_name(name) for path in run.base.glob("model*.safetensors") for name in mx.load(str(path))):
        arrays = dict(unstacked(arrays))
    write_weights(folder, arrays)
    for path in sorted({path for pattern in COMPANIONS for path in run.base.glob(pattern)}):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    chat = run.chat_form()
    write_template(folder, chat)
    if chat is not None:
        ends = chat.end_ids if len(chat.end_ids) > 1 else chat.end_ids[0]
        for name in ("generation_config.json", "config.json"):
            change_json(folder / name, {"eos_token_id": ends})
        if (unnamed := run.unnamed_ends()) and (folder / "tokenizer_config.json").exists():
            change_json(folder / "tokenizer_config.json", {"eos_token": unnamed[0]})
    config = read_file.read_object(folder / "config.json", "the model's")
    for part in (config, config.get("text_config") or {}) if options.dequantize else ():
        part.pop("quantization", None)
        part.pop("quantization_config", None)
    if options.type is not None:
        config |= {key: TYPES[options.type] for key in ("torch_dtype", "dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The log-probabilities by mlx-lm. Raises Stopped: it renders or ends a conversation otherwise than training."""
    types = {array.dtype for file in folder.glob("model*.safetensors") for array in mx.load(str(file)).values()}
    if (chat := run.chat_form()) is not None:
        theirs = load_tokenizer(folder, eos_token_ids=sorted(end_ids(folder)) or None)
        messages = [{"role": "user", "content": "Is 7 a prime?"}]
        options_of_text: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, **chat.arguments}
        if chat.template is not None:
            text, wanted = theirs.apply_chat_template(messages, **options_of_text), chat.render(messages)
            if text != wanted:
                raise Stopped(f"{folder}: its chat template makes {text!r}, training had {wanted!r}")
        if not set(chat.end_ids) <= set(theirs.eos_token_ids):
            raise Stopped(f"{folder}: answers would not end at the tokens {chat.end_ids}, which training put")
    return Reading("mlx_lm.load", mlx_logps(folder, run), is_rounded=types != {mx.float32})


def _stored(run: TrainedRun, options: ExportOptions) -> dict[str, mx.array]:
    """The weights in the types that they are stored in: the change is added in float32, and rounded once."""
    keeps_quantised = run.is_quantised and not options.dequantize
    model = _merged(run, keeps_quantised) if keeps_quantised else fused_model(run)
    base = dict(tree_flatten(run.stored_base().parameters()))

    def type_of(name: str) -> mx.Dtype:
        """The type in the base model, of a weight that was quantised that of its scales."""
        if options.type is not None:
            return getattr(mx, TYPES[options.type])
        array = base[name]
        if not mx.issubdtype(array.dtype, mx.floating):
            array = base[f"{name.removesuffix('.weight')}.scales"]
        return array.dtype if mx.issubdtype(array.dtype, mx.floating) else mx.bfloat16  # 8-bit scales say nothing

    arrays = dict(tree_flatten(model.parameters()))
    return {n: a.astype(type_of(n)) if mx.issubdtype(a.dtype, mx.floating) else a for n, a in arrays.items()}


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have low-rank factors, by name. Raises UserError: a trained array belongs to none of them."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ADAPTED)}
    parts = {f"{name}.{part}" for name in layers for part in ("lora_a", "lora_b", "m")}
    if lost := trainable(model).keys() - parts:
        raise UserError(f"{len(lost)} trained arrays belong to no layer that can be merged: {min(lost)}; take --to mlx")
    return layers


def base_layer(module: nn.Module) -> nn.Module:
    """The base's layer inside of an adapted one."""
    layer: nn.Module = module.embedding if isinstance(module, LoRAEmbedding | DoRAEmbedding) else module.linear
    return layer


def weight_change(module: nn.Module) -> mx.array:
    """What an adapter adds to the weight: scale B A, float32 [(experts,) out, in]; of embeddings [vocabulary, D]."""
    a, b, scale = module.lora_a, module.lora_b, module.scale
    if isinstance(module, LoRASwitchLinear):
        return scale * (b @ a.reshape(b.shape[0], -1, a.shape[-1]))  # [E, out, r] [E, r, in]
    return scale * (a @ b if isinstance(base_layer(module), EMBEDDINGS) else (a @ b).T)  # [in, r] [r, out]


def merged_weight(module: nn.Module) -> mx.array:
    """Float32: W + scale B A, of DoRA (arXiv:2402.09353, equation 5) with rows of length m."""
    merged = plain_weight(base_layer(module)) + weight_change(module)
    return (module.m / mx.linalg.norm(merged, axis=1))[:, None] * merged if "m" in module else merged


def plain_weight(layer: nn.Module) -> mx.array:
    """A layer's weight, float32, dequantised where it is quantised."""
    weight: mx.array = layer.weight
    if isinstance(layer, QUANTISED):
        scales = (layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode)
        weight = mx.dequantize(weight, *scales, dtype=mx.float32)
    return weight.astype(mx.float32)


def fused_model(run: TrainedRun) -> nn.Module:
    """The trained model without an adapter: plain layers, float32, not evaluated yet."""
    model = _merged(run, keeps_quantised=False)
    quantised = [(name, module) for name, module in model.named_modules() if isinstance(module, QUANTISED)]
    model.update_modules(tree_unflatten([(name, _plain(layer, plain_weight(layer))) for name, layer in quantised]))
    return model


def _merged(run: TrainedRun, keeps_quantised: bool) -> nn.Module:
    """The trained model; adapted layers are plain ones, or quantised again as the base's were."""
    model = run.model()
    merged = []
    for name, layer in (adapted_layers(model) if run.settings.model.method != "full" else {}).items():
        base = base_layer(layer)
        plain: Any = _plain(base, merged_weight(layer))
        if keeps_quantised and isinstance(base, QUANTISED):
            plain = plain.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)
        merged.append((name, plain))
    model.update_modules(tree_unflatten(merged))
    return model.eval()


def _plain(base: nn.Module, weight: mx.array) -> nn.Module:
    """A layer like the base's, without quantisation, with another weight."""
    if isinstance(base, EMBEDDINGS):
        plain: nn.Module = nn.Embedding(1, 1)
    elif isinstance(base, SwitchLinear | QuantizedSwitchLinear):
        plain = SwitchLinear(1, 1, 1, bias=False)
    else:
        plain = nn.Linear(1, 1, bias=False)
    plain.weight = weight
    if "bias" in base:
        plain.bias = base.bias
    return plain


def write_weights(folder: Path, arrays: dict[str, mx.array]) -> None:
    """Writes model.safetensors, or several files with their index. The arrays are made one at a time, and forgotten."""
    shards = [shard for shard in make_shards(arrays, SHARD_GIGABYTES) if shard]
    total, index = sum(array.nbytes for array in arrays.values()), dict[str, str]()
    arrays.clear()
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        index |= dict.fromkeys(shard, file)
        write_arrays(folder / file, described(shard), ((name, shard.pop(name)) for name in list(shard)))
    if len(shards) > 1:
        change_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def write_template(folder: Path, chat: ChatForm | None) -> None:
    """Writes the chat template that was trained, in both places where readers look for it."""
    if chat is not None and chat.template is not None:
        (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
        if (folder / "tokenizer_config.json").exists():
            change_json(folder / "tokenizer_config.json", {"chat_template": chat.template})


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Changes keys of a JSON object's file; a file that is absent is made."""
    stored = read_file.read_object(path, "the model's") if path.exists() else {}
    path.write_text(json.dumps({**stored, **changes}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
