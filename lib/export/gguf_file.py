"""A GGUF file: a fused model's weights, its sizes and its tokenizer, by gguf's own writer and name maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from lib.errors import UserError
from lib.export import gguf_families
from lib.export.form import WeightType
from lib.export.gguf_families import Family
from lib.export.gguf_tokenizer import TokenizerFacts, name_with, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FILE = "model.gguf"
# A matrix of one of these is small and decides much: a router's choice of experts.
ALWAYS_FLOAT32 = ("ffn_gate_inp",)


@dataclass(frozen=True)
class Stored:
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


def plan_tensors(model: nn.Module, family: Family, type: WeightType) -> list[Stored]:
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
        tensors.append(Stored(known, name, _stored_type(known, shape, type), shape))
    extra = gguf_families.frequency_factors(model)
    float32 = GGMLQuantizationType.F32
    return [Stored(name, None, float32, values.shape, values) for name, values in extra.items()] + tensors


def rounded_model(model: nn.Module, type: WeightType, path: str) -> nn.Module:
    """The model with every weight rounded as the file stores it, float32, and computed as llama.cpp computes it.

    What a type's rounding costs is the difference between this model and the run; what a wrong name, order or size
    costs is the difference between this model and the file.
    """
    from gguf.quants import dequantize, quantize

    family = gguf_families.family_of(model, path)
    types = {tensor.source: tensor.type for tensor in plan_tensors(model, family, type)}

    def rounded(name: str, array: mx.array) -> mx.array:
        values = np.array(array.astype(mx.float32))
        # A permutation of rows keeps every row's blocks, so it need not be made to know the rounding.
        return mx.array(dequantize(quantize(values, types[name]), types[name]))

    model.update(tree_map_with_path(rounded, model.parameters()))
    text = gguf_families.text_model(model).model
    if family.architecture == "GEMMA3":
        text.embed_tokens = _ExactlyScaled(text.embed_tokens.weight)
    if family.architecture == "GEMMA":
        for layer in text.layers:
            layer.mlp = _TanhGelu(layer.mlp)
    return model


class _TanhGelu(nn.Module):
    """Gemma 1's feed-forward layer with GELU by its approximation with tanh, as Google and llama.cpp have it.

    mlx-lm takes the exact one, by erf.
    """

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))
        return y


class _ExactlyScaled(nn.Module):
    """Gemma 3's embedding, whose product with mlx-lm's √hidden is that with √hidden as llama.cpp has it.

    mlx-lm multiplies by √hidden rounded to bfloat16, llama.cpp by the float32.
    """

    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight = weight
        root = weight.shape[-1] ** 0.5
        self.correction = root / mx.array(root, mx.bfloat16).astype(mx.float32).item()

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids] * self.correction

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits: these are not scaled."""
        return x @ self.weight.T


def _stored_type(name: str, shape: tuple[int, ...], type: WeightType) -> GGMLQuantizationType:
    """Of a tensor in a file of `type`: vectors stay float32, and rows that no block divides are float16."""
    from gguf import GGMLQuantizationType

    if len(shape) == 1 or any(part in name for part in ALWAYS_FLOAT32):
        return GGMLQuantizationType.F32
    if type == "q8_0" and shape[-1] % 32:
        return GGMLQuantizationType.F16
    return GGMLQuantizationType[type.upper()]


def _values(tensor: Stored, parameters: dict[str, mx.array], family: Family, args: Any) -> np.ndarray:
    """A tensor's stored values; its parameter is taken away."""
    from gguf.quants import quantize

    values = tensor.values
    if values is None:
        assert tensor.source is not None
        values = np.array(parameters.pop(tensor.source).astype(mx.float32))
        values = gguf_families.laid_out(tensor.source, values, family, args).reshape(tensor.shape)
    return quantize(np.ascontiguousarray(values), tensor.type)


def _bytes_of(tensor: Stored) -> int:
    from gguf.constants import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[tensor.type]
    return int(np.prod(tensor.shape)) // block * size


def _architecture_name(family: Family) -> str:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    return str(MODEL_ARCH_NAMES[MODEL_ARCH[family.architecture]])
