"""One GGUF file, for llama.cpp and what is built on it: the whole model, its tokenizer and its chat template.

Weights, sizes and names are written by gguf's own writer and name maps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.errors import Stopped, UserError
from lib.export import gguf_families
from lib.export.fuse import fused_model
from lib.export.gguf_families import Family
from lib.export.gguf_tokenizer import TokenizerFacts, facts_of, name_with, write_tokenizer
from lib.export.proof import ExportOptions, Reading, WeightType, model_logps
from lib.export.trained_run import TrainedRun

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

TYPES: dict[mx.Dtype, WeightType] = {mx.float32: "f32", mx.bfloat16: "bf16", mx.float16: "f16"}
FILE = "model.gguf"
# A matrix of one of these is small and decides much: a router's choice of experts.
ALWAYS_FLOAT32 = ("ffn_gate_inp",)

# ---- The export ----


def check(run: TrainedRun, options: ExportOptions) -> None:
    """Raises UserError for what GGUF or llama.cpp does not have: a family, a rope, a tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--to gguf needs the package gguf: pip install gguf (make setup brings it)")
    if options.dequantize:
        raise UserError("--dequantize is for --to fused; GGUF has its own types: --type q8_0")
    family = gguf_families.family_of(run.stored_base(), run.settings.model.path)
    model = fused_model(run)  # not evaluated: only names and shapes of its weights are read
    plan_tensors(model, family, "f32")
    facts = tokenizer_facts(run)
    if facts is not None and facts.size > gguf_families.text_model(model).args.vocab_size:
        raise UserError(f"--to gguf: the tokenizer of {run.base} has more tokens than the model has embeddings")


def write(run: TrainedRun, folder: Path, options: ExportOptions) -> None:
    """Writes model.gguf: adapters fused in float32, then rounded once to the stored type."""
    name = f"{run.base.name} {run.folder.resolve().name}"
    write_gguf(folder / FILE, fused_model(run), run.base_config, tokenizer_facts(run), weight_type(run, options), name)


def read(run: TrainedRun, folder: Path, options: ExportOptions) -> Reading:
    """By GGUFReader: its arrays, put back in mlx-lm's order and names, have to be the fused weights but for rounding.

    Raises:
        Stopped: an array differs, or the file has another chat template or end of turn.
    """
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(folder / FILE)
    model = fused_model(run)
    family, args = gguf_families.family_of(model, run.settings.model.path), gguf_families.text_model(model).args
    expected = dict(tree_flatten(model.parameters()))
    found, is_rounded = {}, False
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in plan_tensors(model, family, weight_type(run, options)):
        if tensor.source is None:
            continue
        item = stored[tensor.name]
        values = dequantize(item.data, item.tensor_type).astype(np.float32).reshape(tensor.shape)
        values = gguf_families.restored(tensor.source, values, family, args).reshape(expected[tensor.source].shape)
        wanted = np.array(expected[tensor.source].astype(mx.float32))
        is_rounded |= item.tensor_type != GGMLQuantizationType.F32
        if np.abs(values - wanted).max(initial=0) > _rounding(wanted, item.tensor_type):
            raise Stopped(f"--to gguf: {tensor.name} is not {tensor.source} of the run. Nothing was written")
        found[tensor.source] = mx.array(values)
    model.update(tree_unflatten(list(found.items())))
    _require_chat(run, reader)
    return Reading("gguf's reader", model_logps(model, run.rows), is_rounded)


def _rounding(values: np.ndarray, type: GGMLQuantizationType) -> float:
    """The largest error of storing values in a type: half a unit of the largest, of a block's scale in q8_0."""
    unit = {"F32": 2.0**-23, "BF16": 2.0**-8, "F16": 2.0**-10, "Q8_0": 1 / 127}[type.name]
    return float(np.abs(values).max(initial=0)) * unit + 2.0**-24


def _require_chat(run: TrainedRun, reader: Any) -> None:
    chat = run.chat_form()
    if chat is None:
        return
    field = reader.get_field("tokenizer.chat_template")
    if (None if field is None else field.contents()) != chat.template:
        raise Stopped("--to gguf: the file's chat template is not the one that was trained. Nothing was written")
    ends = [reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    if not {end.contents() for end in ends if end is not None} & set(chat.end_ids):
        raise Stopped(f"--to gguf: the file ends answers at none of the tokens {chat.end_ids}. Nothing was written")


def weight_type(run: TrainedRun, options: ExportOptions) -> WeightType:
    """What --type says, else the type of the base model's plain weights."""
    if options.type is not None:
        return options.type
    text = gguf_families.text_model(run.stored_base())
    return TYPES.get(text.model.norm.weight.dtype, "bf16")


def tokenizer_facts(run: TrainedRun) -> TokenizerFacts | None:
    """The tokenizer with the chat template that the run's rows were rendered with; None where there is none.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    chat = run.chat_form()
    return None if chat is None else facts_of(chat, run.settings.model.path)


# ---- The file ----


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file.

    Args:
        name: in GGUF.
        source: the model's parameter, or None where `values` are given.
        type: of the stored values.
    """

    name: str
    source: str | None
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    values: np.ndarray | None = None


def write_gguf(
    path: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    tokenizer: TokenizerFacts | None,
    type: WeightType,
    name: str,
) -> None:
    """Writes a model as one GGUF file, and takes the weights out of it: one at a time is in memory.

    Args:
        model: plain float32 weights, not evaluated yet: adapters fused, nothing quantised. It is empty afterwards.
        config: config.json of the base model.
        tokenizer: None for a model without one: the file then takes token ids alone.
        name: for people.

    Raises:
        UserError: GGUF has no such family.
        OSError: the disk is full.
    """
    from gguf import GGUFWriter, LlamaFileType

    family, args = gguf_families.family_of(model, name), gguf_families.text_model(model).args
    tensors = plan_tensors(model, family, type)
    writer = GGUFWriter(path, _architecture_name(family))
    try:
        writer.add_name(name if tokenizer is None else name_with(tokenizer, name))
        gguf_families.write_parameters(writer, model, family, config)
        writer.add_file_type(LlamaFileType["ALL_F32" if type == "f32" else f"MOSTLY_{type.upper()}"])
        writer.add_quantization_version(2)  # of the layout of quantised blocks: GGML_QNT_VERSION
        write_tokenizer(writer, tokenizer, args.vocab_size)
        for tensor in tensors:
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), _bytes_of(tensor), raw_dtype=tensor.type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
        model.clear()
        for tensor in tensors:
            writer.write_tensor_data(_values(tensor, parameters, family, args))
    finally:
        writer.close()


def plan_tensors(model: nn.Module, family: Family, type: WeightType) -> list[StoredTensor]:
    """Every tensor of the file with its name and type, in the model's order.

    Raises:
        UserError: the model has a parameter that gguf's name map does not know.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map

    text = gguf_families.text_model(model)
    names = get_tensor_name_map(MODEL_ARCH[family.architecture], text.args.num_hidden_layers)
    tensors = []
    for name, array in tree_flatten(model.parameters()):
        known = names.get_name(gguf_families.tensor_name(name, family), try_suffixes=(".weight", ".bias"))
        if known is None:
            raise UserError(
                f"--to gguf: {name} has no place in a GGUF of {family.architecture.lower()}; take --to fused"
            )
        shape = (array.size,) if "ffn_gate_inp_shexp" in known else array.shape  # one row, which is a vector there
        tensors.append(StoredTensor(known, name, _stored_type(known, shape, type), shape))
    extra = gguf_families.frequency_factors(model)
    float32 = GGMLQuantizationType.F32
    return [StoredTensor(name, None, float32, values.shape, values) for name, values in extra.items()] + tensors


def _stored_type(name: str, shape: tuple[int, ...], type: WeightType) -> GGMLQuantizationType:
    """Of a tensor in a file of `type`: vectors stay float32, and rows that no block divides are float16."""
    from gguf import GGMLQuantizationType

    if len(shape) == 1 or any(part in name for part in ALWAYS_FLOAT32):
        return GGMLQuantizationType.F32
    if type == "q8_0" and shape[-1] % 32:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[type.upper()]


def _values(tensor: StoredTensor, parameters: dict[str, mx.array], family: Family, args: Any) -> np.ndarray:
    """A tensor's stored values; its parameter is taken away."""
    from gguf.quants import quantize

    values = tensor.values
    if values is None:
        assert tensor.source is not None
        values = np.array(parameters.pop(tensor.source).astype(mx.float32))
        values = gguf_families.laid_out(tensor.source, values, family, args).reshape(tensor.shape)
    return quantize(np.ascontiguousarray(values), tensor.type)


def _bytes_of(tensor: StoredTensor) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[tensor.type]
    return int(np.prod(tensor.shape)) // block * size


def _architecture_name(family: Family) -> str:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    return str(MODEL_ARCH_NAMES[MODEL_ARCH[family.architecture]])
