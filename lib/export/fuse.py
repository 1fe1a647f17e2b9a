"""The whole model with its adapter merged in: for mlx-lm, and where it is not quantised for transformers and others."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

from lib.config import read_file
from lib.errors import Stopped, UserError
from lib.export.proof import ExportOptions, Reading, mlx_logps
from lib.export.trained_run import ChatForm, TrainedRun
from lib.model.adapter_files import trainable, write_arrays
from lib.model.checkpoint_names import stacked_name, unstacked
from lib.system.model_folder import end_ids

READER = "mlx_lm.load"
TYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
ADAPTED = (LoRALinear, LoRASwitchLinear, LoRAEmbedding, DoRALinear, DoRAEmbedding)


SHARD_BYTES = 5 * 2**30  # of one file of weights
# What comes along of a base model's folder: configuration, tokenizer, chat template, generation settings, code.
COMPANIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.tiktoken")
INDEX = "model.safetensors.index.json"


# ---- The export ----


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for a type that plain weights cannot have."""
    if options.type is not None and options.type not in TYPES:
        raise UserError(f"--type {options.type} is for --to gguf; --to fused has {', '.join(TYPES)}")
    if options.dequantize and not run.is_quantised:
        raise UserError(f"--dequantize: {run.base} is not quantised; leave it out")
    if options.type is not None and run.is_quantised and not options.dequantize:
        raise UserError(f"--type {options.type}: {run.base} stays quantised; --dequantize stores plain weights")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes the model as its base is stored: the same names and types of weights, unless others are asked for."""
    arrays = dict(tree_flatten(_stored(run, options).parameters()))
    if any(stacked_name(name) for name in stored_names(run.base)):
        arrays = dict(unstacked(arrays))
    write_weights(folder, arrays)
    copy_companions(run.base, folder, run.chat_form())
    config = read_file.read_object(folder / "config.json", "the model's")
    if options.dequantize:
        config = without_quantisation(config)
    if options.type is not None:
        config |= {key: NAMES[options.type] for key in ("torch_dtype", "dtype") if key in config}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The log-probabilities of the rows by mlx-lm, with the text of a conversation by the exported template."""
    types = {array.dtype for file in folder.glob("model*.safetensors") for array in mx.load(str(file)).values()}
    require_template(run, folder)
    return Reading(READER, mlx_logps(folder, run), is_rounded=types != {mx.float32})


def require_template(run: TrainedRun, folder: Path) -> None:
    """Makes sure that a reader of the folder renders and ends a conversation as training did.

    Raises:
        Stopped: it does not.
    """
    chat = run.chat_form()
    if chat is None:
        return
    theirs = load_tokenizer(folder, eos_token_ids=sorted(end_ids(folder)) or None)
    messages = [{"role": "user", "content": "Is 7 a prime?"}]
    if chat.template is not None:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat.arguments)
        if text != chat.render(messages):
            raise Stopped(f"{folder}: its chat template makes {text!r}, training had {chat.render(messages)!r}")
    if not set(chat.end_ids) <= set(theirs.eos_token_ids):
        raise Stopped(f"{folder}: answers would not end at the tokens {chat.end_ids}, which training put")


def _stored(run: TrainedRun, options: ExportOptions) -> nn.Module:
    """The model in the types that it is stored in, not evaluated yet."""
    keeps_quantised = run.is_quantised and not options.dequantize
    model = _merged(run, _requantised) if keeps_quantised else fused_model(run)
    of_base = {name: array.dtype for name, array in tree_flatten(run.stored_base().parameters())}
    wanted = TYPES.get(options.type or "")
    cast = {
        name: array.astype(wanted or _type_of(name, of_base))
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    model.update(tree_unflatten(list(cast.items())))
    return model


def _type_of(name: str, of_base: dict[str, mx.Dtype]) -> mx.Dtype:
    """A weight's type in the base model; of one that was quantised the type of its scales."""
    dtype = of_base[name]
    if not mx.issubdtype(dtype, mx.floating):
        dtype = of_base[f"{name.removesuffix('.weight')}.scales"]
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16  # scales of 8 bits say nothing


# ---- Merged weights ----


@dataclass(frozen=True)
class AdaptedLayer:
    """One layer with low-rank factors.

    Args:
        name: of the layer, as the base model has it.
        module: mlx-lm's, with the base's layer inside.
        base: that layer.
        magnitude: float32 [out] of DoRA; None of LoRA.
    """

    name: str
    module: nn.Module
    base: nn.Module
    magnitude: mx.array | None

    @property
    def arrays(self) -> list[str]:
        """The names of what was trained of it."""
        return [f"{self.name}.{part}" for part in ("lora_a", "lora_b", *(["m"] if self.magnitude is not None else []))]

    @property
    def rank(self) -> int:
        """Columns of lora_a [in, r]; of experts [E, r, in] rows."""
        return int(self.module.lora_a.shape[1])

    @property
    def change(self) -> mx.array:
        """What is added to the weight: scale B A, float32 [(experts,) out, in]; of embeddings [vocabulary, D]."""
        a, b, scale = self.module.lora_a, self.module.lora_b, self.module.scale
        if isinstance(self.module, LoRASwitchLinear):
            return scale * (b @ a.reshape(b.shape[0], -1, a.shape[-1]))  # [E, out, r] [E, r, in]
        product = a @ b  # a linear's: [in, r] [r, out]
        return scale * (product if isinstance(self.base, nn.Embedding | nn.QuantizedEmbedding) else product.T)

    @property
    def weight(self) -> mx.array:
        """The merged weight, float32: W + scale B A, of DoRA (arXiv:2402.09353, equation 5) with rows of length m."""
        merged = plain_weight(self.base) + self.change
        if self.magnitude is None:
            return merged
        return (self.magnitude / mx.linalg.norm(merged, axis=1))[:, None] * merged


def adapted_layers(model: nn.Module) -> Iterator[AdaptedLayer]:
    """The layers of a model that have low-rank factors.

    Raises:
        UserError: some trained array belongs to none of them; it would be lost.
    """
    left = set(trainable(model))
    for name, module in model.named_modules():
        if isinstance(module, ADAPTED):
            base = module.embedding if isinstance(module, LoRAEmbedding | DoRAEmbedding) else module.linear
            layer = AdaptedLayer(name, module, base, module.get("m"))
            left -= set(layer.arrays)
            yield layer
    if left:
        raise UserError(
            f"{len(left)} trained arrays belong to no layer that can be merged, the first is {min(left)}; "
            "--to mlx keeps them as they are"
        )


def plain_weight(layer: nn.Module) -> mx.array:
    """A layer's weight, float32, dequantised where it is quantised."""
    if not isinstance(layer, QUANTISED):
        return layer.weight.astype(mx.float32)
    return mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), layer.group_size, layer.bits, layer.mode
    ).astype(mx.float32)


def fused_model(run: TrainedRun) -> nn.Module:
    """The trained model without an adapter: plain layers, float32, not evaluated yet.

    Raises:
        UserError: some trained array would be lost.
    """
    model = _merged(run, plain_layer)
    plain = {
        name: plain_layer(module, plain_weight(module))
        for name, module in model.named_modules()
        if isinstance(module, QUANTISED)
    }
    model.update_modules(tree_unflatten(list(plain.items())))
    return model


def _requantised(base: nn.Module, weight: mx.array) -> nn.Module:
    """A merged layer, quantised as the base's is; layers without an adapter keep their bits."""
    plain = plain_layer(base, weight)
    if not isinstance(base, QUANTISED):
        return plain
    quantised: nn.Module = plain.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)
    return quantised


def _merged(run: TrainedRun, layer_of: Callable[[nn.Module, mx.array], nn.Module]) -> nn.Module:
    """The trained model, in which layers with an adapter are those that `layer_of` makes of base and merged weight."""
    model = run.model()
    if run.settings.model.method != "full":
        merged = {layer.name: layer_of(layer.base, layer.weight) for layer in adapted_layers(model)}
        model.update_modules(tree_unflatten(list(merged.items())))
    return model.eval()


def plain_layer(base: nn.Module, weight: mx.array) -> nn.Module:
    """A layer like the base's, without quantisation, with another weight."""
    plain: nn.Module
    if isinstance(base, nn.Embedding | nn.QuantizedEmbedding):
        plain = nn.Embedding(1, 1)
    elif isinstance(base, SwitchLinear | QuantizedSwitchLinear):
        plain = SwitchLinear(1, 1, 1, bias=False)
    else:
        plain = nn.Linear(1, 1, bias=False)
    plain.weight = weight
    if "bias" in base:
        plain.bias = base.bias
    return plain


# ---- A model's folder ----


def write_weights(folder: Path, arrays: dict[str, mx.array]) -> None:
    """Writes model.safetensors, or several files with their index. The arrays are made one at a time, and forgotten."""
    sizes = {name: array.nbytes for name, array in arrays.items()}
    shards = shards_of(sizes, SHARD_BYTES)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        described = {name: (arrays[name].shape, arrays[name].dtype) for name in names}
        write_arrays(folder / file, described, _taken(arrays, names))
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _taken(arrays: dict[str, mx.array], names: list[str]) -> Iterator[tuple[str, mx.array]]:
    for name in names:
        yield name, arrays.pop(name)


def shards_of(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in groups of at most `most` bytes each, in their order; a larger one is alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


def copy_companions(base: Path, folder: Path, chat: ChatForm | None) -> None:
    """Copies what belongs to a model besides its weights, with the chat template and the end tokens that were trained.

    Readers look for a template in chat_template.jinja or tokenizer_config.json, for end tokens in
    generation_config.json or config.json.
    """
    for path in sorted({path for pattern in COMPANIONS for path in base.glob(pattern)}):
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    if chat is not None:
        write_template(folder, chat)
        ends = chat.end_ids if len(chat.end_ids) > 1 else chat.end_ids[0]
        for name in ("generation_config.json", "config.json"):
            change_json(folder / name, {"eos_token_id": ends})


def write_template(folder: Path, chat: ChatForm) -> None:
    """Writes the chat template that was trained, in both of its places."""
    if chat.template is not None:
        (folder / "chat_template.jinja").write_text(chat.template, encoding="utf-8")
        if (folder / "tokenizer_config.json").exists():
            change_json(folder / "tokenizer_config.json", {"chat_template": chat.template})


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Changes keys of a JSON object's file; a file that is absent is made."""
    stored = read_file.read_object(path, "the model's") if path.exists() else {}
    path.write_text(json.dumps({**stored, **changes}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_names(folder: Path) -> set[str]:
    """The names of a model's arrays in its files; none where it has no files."""
    names: set[str] = set()
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            names |= json.loads(file.read(size)).keys() - {"__metadata__"}
    return names


def without_quantisation(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with plain weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization", None)
        part.pop("quantization_config", None)
    return config
