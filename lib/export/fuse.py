"""The whole model with its adapter merged in: for mlx-lm, and where it is not quantised for transformers and others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.utils import dequantize_model, save_model

from lib.config import read_file
from lib.errors import Stopped, UserError
from lib.export.trained_run import ChatForm, ExportOptions, Reading, TrainedRun, mlx_logps
from lib.model.adapter_files import trainable
from lib.model.peft_adapters import stacked_name, unstacked
from lib.system.model_folder import end_ids

TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
ADAPTED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)
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
    for path in sorted({path for pattern in COMPANIONS for path in run.base.glob(pattern)}):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    save_model(folder, _stored(run, options), donate_model=True)
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
        reader = load_tokenizer(folder, eos_token_ids=sorted(end_ids(folder)) or None)
        messages = [{"role": "user", "content": "Is 7 a prime?"}]
        if chat.template is not None:
            text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat.arguments)
            if text != (trained := chat.render(messages)):
                raise Stopped(f"{folder}: its chat template makes {text!r}, training had {trained!r}")
        if not set(chat.end_ids) <= set(reader.eos_token_ids):
            raise Stopped(f"{folder}: answers would not end at the tokens {chat.end_ids}, which training put")
    return Reading("mlx_lm.load", mlx_logps(folder, run), is_rounded=types != {mx.float32})


def _stored(run: TrainedRun, options: ExportOptions) -> nn.Module:
    """The weights in the types that they are stored in: the change is added in float32, and rounded once."""
    model = fused_model(run, keeps_quantised=run.is_quantised and not options.dequantize)
    base, arrays = dict(tree_flatten(run.stored_base().parameters())), dict(tree_flatten(model.parameters()))

    def type_of(name: str) -> mx.Dtype:
        """The type in the base model, of a weight that was quantised that of its scales."""
        if options.type is not None:
            return getattr(mx, TYPES[options.type])
        array = base[name]
        if not mx.issubdtype(array.dtype, mx.floating):
            array = base[f"{name.removesuffix('.weight')}.scales"]
        return array.dtype if mx.issubdtype(array.dtype, mx.floating) else mx.bfloat16  # 8-bit scales say nothing

    arrays = {n: a.astype(type_of(n)) if mx.issubdtype(a.dtype, mx.floating) else a for n, a in arrays.items()}
    if any(stacked_name(name) for path in run.base.glob("model*.safetensors") for name in mx.load(str(path))):
        arrays = dict(unstacked(arrays))
    weights = nn.Module()
    for name, array in arrays.items():
        weights[name] = array
    return weights


def fused_model(run: TrainedRun, keeps_quantised: bool = False) -> nn.Module:
    """The trained model without an adapter, not evaluated: plain layers in float32, or quantised as the base's."""
    model = run.model()
    layers = adapted_layers(model) if run.settings.model.method != "full" else {}
    if not keeps_quantised:
        dequantize_model(model).set_dtype(mx.float32)  # types of 4 and 8 bits come as bfloat16, which holds them
    model.update_modules(tree_unflatten([(name, layer.fuse()) for name, layer in layers.items()]))
    return model.eval()


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have low-rank factors, by name. Raises UserError: a trained array belongs to none of them."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ADAPTED)}
    parts = {f"{name}.{part}" for name in layers for part in ("lora_a", "lora_b", "m")}
    if lost := trainable(model).keys() - parts:
        raise UserError(f"{len(lost)} trained arrays belong to no layer that can be merged: {min(lost)}; take --to mlx")
    return layers


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
