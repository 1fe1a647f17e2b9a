"""One GGUF file, for llama.cpp and what is built on it: the whole model, its tokenizer and its chat template.

Weights, sizes and names are written by gguf's own writer and name maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten, tree_unflatten

from lib.errors import Stopped, UserError
from lib.export import gguf_families as families
from lib.export.fuse import fused_model
from lib.export.gguf_families import Family
from lib.export.gguf_tokenizer import GgufTokenizer, tokenizer_of
from lib.export.proof import ExportOptions, Reading, WeightType, model_logps
from lib.export.trained_run import TrainedRun

TYPES: dict[mx.Dtype, WeightType] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
FILE = "model.gguf"
F32 = GGMLQuantizationType.F32


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for what GGUF or llama.cpp does not have: a family, a rope, a tokenizer."""
    if options.dequantize:
        raise UserError("--dequantize is for --to fused; GGUF has its own types: --type q8_0")
    family, tokenizer = families.family_of(run.stored_base(), run.settings.model.path), gguf_tokenizer(run)
    model = fused_model(run)  # not evaluated: only names and shapes of its weights are read
    list(tensors(model, family, "f32"))
    if tokenizer is not None and len(tokenizer.tokens) > families.text_model(model).args.vocab_size:
        raise UserError(f"--to gguf: the tokenizer of {run.base} has more tokens than the model has embeddings")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf: adapters fused in float32, then rounded once to the stored type; one weight is in memory."""
    model, tokenizer = fused_model(run), gguf_tokenizer(run)
    plain = families.text_model(run.stored_base()).model.norm.weight.dtype
    type: WeightType = options.type or TYPES.get(plain, "bf16")
    family, args = families.family_of(model, run.settings.model.path), families.text_model(model).args
    writer = GGUFWriter(folder / FILE, MODEL_ARCH_NAMES[MODEL_ARCH[family.architecture]])
    # "phi-3" in its name tells llama.cpp that special tokens swallow the space behind them.
    strips = tokenizer is not None and tokenizer.strips_right
    writer.add_name(f"{'Phi-3 ' * strips}{run.base.name} {run.folder.resolve().name}")
    families.write_parameters(writer, model, family, run.base_config)
    writer.add_file_type(LlamaFileType["ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"])
    writer.add_quantization_version(2)  # of the layout of quantised blocks: GGML_QNT_VERSION
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        tokenizer.write(writer, args.vocab_size)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    factors = families.frequency_factors(model)
    listed = list(tensors(model, family, type))
    model.clear()
    for name, shape, stored in [
        *((name, each.shape, F32) for name, each in factors.items()),
        *((name, shape, stored) for name, _, shape, stored in listed),
    ]:
        block, size = GGML_QUANT_SIZES[stored]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) // block * size, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in factors.values():
        writer.write_tensor_data(values)
    for _, source, shape, stored in listed:
        values = np.array(parameters.pop(source).astype(mx.float32))
        values = families.laid_out(source, values, family, args).reshape(shape)
        writer.write_tensor_data(quantize(np.ascontiguousarray(values), stored))
    writer.close()


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """The log-probabilities by GGUFReader's arrays, put back in mlx-lm's order and names.

    Raises Stopped: the file has another chat template or end of turn.
    """
    reader, model = GGUFReader(folder / FILE), fused_model(run)
    family, args = families.family_of(model, run.settings.model.path), families.text_model(model).args
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    stored, restored = {tensor.name: tensor for tensor in reader.tensors}, []
    for name, source, shape, _ in tensors(model, family, "f32"):
        values = dequantize(stored[name].data, stored[name].tensor_type).astype(np.float32).reshape(shape)
        values = families.restored(source, values, family, args)
        restored.append((source, mx.array(values.reshape(shapes[source]))))
    model.update(tree_unflatten(restored))
    if (chat := run.chat_form()) is not None:
        names = ("tokenizer.chat_template", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        fields = [reader.get_field(name) for name in names]
        template, *ends = [None if field is None else field.contents() for field in fields]
        if template != chat.template or not {*ends} & {*chat.end_ids}:
            raise Stopped(f"--to gguf: the file has another chat template than training, or ends at {ends} alone")
    return Reading(
        "gguf's reader", model_logps(model, run.rows), {each.tensor_type for each in reader.tensors} != {F32}
    )


def gguf_tokenizer(run: TrainedRun) -> GgufTokenizer | None:
    """The tokenizer with the chat template of training; None for a model without one.

    Raises UserError: llama.cpp has no such tokenizer.
    """
    chat = run.chat_form()
    return None if chat is None else tokenizer_of(chat, run.settings.model.path)


def tensors(
    model: nn.Module, family: Family, type: WeightType
) -> Iterator[tuple[str, str, tuple[int, ...], GGMLQuantizationType]]:
    """Every tensor of the file: its name, the model's parameter, shape, and stored type.

    Raises UserError: the model has a parameter that gguf's name map does not know.
    """
    names = get_tensor_name_map(MODEL_ARCH[family.architecture], families.text_model(model).args.num_hidden_layers)
    for source, array in tree_flatten(model.parameters()):
        name = names.get_name(families.tensor_name(source), try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"--to gguf: GGUF's {family.architecture.lower()} has no {source}; take --to fused")
        shape = (array.size,) if "ffn_gate_inp_shexp" in name else array.shape  # one row, which is a vector there
        stored = GGMLQuantizationType[type.upper()]
        if len(shape) == 1 or "ffn_gate_inp" in name:  # a router is small, and decides much
            stored = F32
        elif type == "q8_0" and shape[-1] % 32:
            stored = GGMLQuantizationType.F16
        yield name, source, shape, stored
