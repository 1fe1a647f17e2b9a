"""What GGUF says of a family of models and how its tensors lie there: facts of llama.cpp, for mlx-lm's models.

Sizes come from the model's own arguments and its rope layers: the file says what was trained, whatever config.json
left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np
from gguf import GGUFWriter, RopeScalingType
from mlx_lm.models import rope_utils

from lib.errors import UserError

DEFAULT_CONTEXT = 2048  # where config.json has no max_position_embeddings


@dataclass(frozen=True)
class Family:
    """How a family of mlx-lm's models is stored in GGUF.

    Args:
        architecture: its name in GGUF.
        pairs_neighbours: llama.cpp rotates neighbouring values of a head here, mlx-lm the two halves: the rows of q
            and k are put in another order.
        takes_frequency_factors: the file may hold a factor for each frequency of the rope.
        needs_head: llama.cpp does not take the embedding for the head.
        norm_offset: mlx-lm's norms add this to their weight, llama.cpp's do not.
        renames: patterns of mlx-lm's tensor names, and what gguf's name map knows instead.
        parameters: writes what only this family has, by its arguments and the longest context.
        check: names what llama.cpp computes otherwise for a model of this family, or None.
    """

    architecture: str
    pairs_neighbours: bool = False
    takes_frequency_factors: bool = False
    needs_head: bool = False
    norm_offset: float = 0.0
    renames: tuple[tuple[str, str], ...] = ()
    parameters: Callable[[GGUFWriter, Any, int], None] | None = None
    check: Callable[[Any], str | None] | None = None


def family_of(model: nn.Module, path: str) -> Family:
    """The family of a model.

    Raises:
        UserError: GGUF has no such family here, or llama.cpp computes this model in another way.
    """
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise UserError(
            f"--to gguf: {path} is of the family {model.model_type}; there are {', '.join(sorted(FAMILIES))}. Others: "
            "--to fused --dequantize, then llama.cpp's `python convert_hf_to_gguf.py FOLDER`"
        )
    args = text_model(model).args
    problem = family.check(args) if family.check is not None else None
    if family.needs_head and args.tie_word_embeddings:
        problem = "its head is its embedding"
    if problem is not None:
        raise UserError(f"--to gguf: {path}: {problem}, and GGUF cannot say so; take --to fused")
    return family


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text: of one that also sees pictures its language model."""
    return getattr(model, "language_model", model)


def tensor_name(name: str, family: Family) -> str:
    """A parameter's name as gguf's name maps know it: the transformers library's."""
    for pattern, replacement in (*family.renames, (r"\.switch_mlp\.", ".experts.")):
        name = re.sub(pattern, replacement, name)
    return name


def laid_out(name: str, weight: np.ndarray, family: Family, args: Any) -> np.ndarray:
    """A weight as llama.cpp wants it: the rows of q and k in its order, a norm's offset added; float32."""
    if heads := _rotated_heads(name, family, args):
        return neighbouring_pairs(weight, heads)
    return weight + np.float32(family.norm_offset) if name.endswith("norm.weight") else weight


def restored(name: str, weight: np.ndarray, family: Family, args: Any) -> np.ndarray:
    """The opposite of `laid_out`: a weight of the file in mlx-lm's order."""
    if heads := _rotated_heads(name, family, args):
        return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    return weight - np.float32(family.norm_offset) if name.endswith("norm.weight") else weight


def _rotated_heads(name: str, family: Family, args: Any) -> int:
    """The heads of a weight whose rows have another order in the file; 0 for others."""
    if not family.pairs_neighbours or getattr(args, "rope_traditional", False):
        return 0
    return args.num_attention_heads * (".q_proj." in name) + args.num_key_value_heads * (".k_proj." in name)


def neighbouring_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of every head reordered, so that values i and i + d/2, which a rope rotates together, are neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_parameters(writer: GGUFWriter, model: nn.Module, family: Family, config: Mapping[str, Any]) -> None:
    """Writes sizes, norms, rope and experts, and what only the family has."""
    args = text_model(model).args
    head_size = int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)
    context = int({**config, **config.get("text_config", {})}.get("max_position_embeddings") or DEFAULT_CONTEXT)
    writer.add_context_length(context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_block_count(args.num_hidden_layers)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(args.num_attention_heads)
    writer.add_head_count_kv(args.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_vocab_size(args.vocab_size)
    _write_rope(writer, model, args, family)
    if family.parameters is not None:
        family.parameters(writer, args, context)


# ---- Ropes


def _rope(model: nn.Module) -> nn.Module:
    """The rope of the blocks that attend to everything, of which those that attend to a window may differ."""
    attention = sorted((layer.self_attn for layer in text_model(model).layers), key=_is_sliding)
    ropes: list[nn.Module] = [each.rope for each in attention]
    return next(rope for rope in ropes if isinstance(rope, nn.RoPE) or type(rope).__module__ == rope_utils.__name__)


def _is_sliding(attention: nn.Module) -> bool:
    return bool(getattr(attention, "is_sliding", False))


def _write_rope(writer: GGUFWriter, model: nn.Module, args: Any, family: Family) -> None:
    """Writes base, dimensions and scaling, as the model's own rope layers have them.

    Raises:
        UserError: a kind of scaling that llama.cpp does not compute for this family.
    """
    rope = _rope(model)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_rope_dimension_count(rope.dim if isinstance(rope, rope_utils.SuScaledRoPE) else rope.dims)
    if isinstance(rope, nn.RoPE):
        if rope.scale != 1.0:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(1.0 / rope.scale)
    elif isinstance(rope, rope_utils.Llama3RoPE) and family.takes_frequency_factors:
        pass  # a tensor: frequency_factors
    elif isinstance(rope, rope_utils.SuScaledRoPE) and family.architecture == "PHI3":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope._scale)
    elif isinstance(rope, rope_utils.YarnRoPE):
        _write_yarn(writer, rope, args.rope_scaling)
    else:
        kind, architecture = type(rope).__name__, family.architecture.lower()
        raise UserError(f"--to gguf: llama.cpp computes no {kind} for {architecture}; take --to fused")


def _write_yarn(writer: GGUFWriter, rope: nn.Module, scaling: Mapping[str, Any]) -> None:
    """YaRN (arXiv:2309.00071), by the settings that mlx-lm takes."""
    factor = float(scaling["factor"])
    if not math.isclose(rope.mscale, 0.1 * math.log(factor) + 1.0, rel_tol=1e-6):
        raise UserError("--to gguf: the rope's mscale is not YaRN's own, and GGUF cannot say so; take --to fused")
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings", 4096))
    writer.add_rope_scaling_yarn_beta_fast(scaling.get("beta_fast", 32))
    writer.add_rope_scaling_yarn_beta_slow(scaling.get("beta_slow", 1))


def frequency_factors(model: nn.Module) -> dict[str, np.ndarray]:
    """What a rope's frequencies are divided by, float32 [dimensions / 2], by the tensor's name in GGUF.

    mlx-lm scales a "longrope" by its long factors whatever the length, and llama.cpp by the short ones in a short
    context: the model was trained with the long ones, so the file says that both are these.
    """
    rope, theta = _rope(model), float(text_model(model).args.rope_theta)
    if not isinstance(rope, rope_utils.Llama3RoPE | rope_utils.SuScaledRoPE):
        return {}
    is_long = isinstance(rope, rope_utils.SuScaledRoPE)
    dimensions = rope.dim if is_long else rope.dims
    plain = theta ** (np.arange(0, dimensions, 2) / dimensions)
    factors = (np.array(rope._freqs, np.float64) / plain).astype(np.float32)
    names = ("rope_factors_long.weight", "rope_factors_short.weight") if is_long else ("rope_freqs.weight",)
    return dict.fromkeys(names, factors)


# ---- Families


def _all_attend_to_all(args: Any) -> str | None:
    kinds = set(getattr(args, "layer_types", None) or ["full_attention"])
    return None if kinds == {"full_attention"} else "some of its blocks attend to a window"


def _scale_of_heads(blocks_of_largest: int) -> Callable[[Any], str | None]:
    """llama.cpp scales Gemma's attention by the size of a head, of the largest model by hidden size over heads."""

    def check(args: Any) -> str | None:
        is_largest = args.num_hidden_layers == blocks_of_largest
        size = args.hidden_size // args.num_attention_heads if is_largest else args.head_dim
        scalar = args.query_pre_attn_scalar
        return None if scalar == size else f"query_pre_attn_scalar is {scalar:g}, not {size}"

    return check


def _every_block_has_experts(norm_topk_prob: bool) -> Callable[[Any], str | None]:
    def check(args: Any) -> str | None:
        if getattr(args, "mlp_only_layers", None) or getattr(args, "decoder_sparse_step", 1) != 1:
            return "some of its blocks have no experts"
        is_right = getattr(args, "norm_topk_prob", norm_topk_prob) == norm_topk_prob
        return None if is_right else f"norm_topk_prob is not {str(norm_topk_prob).lower()}"

    return check


def _smollm3(args: Any) -> str | None:
    every_fourth = [int((block + 1) % 4 != 0) for block in range(args.num_hidden_layers)]
    is_right = list(args.no_rope_layers) == every_fourth
    return _all_attend_to_all(args) if is_right else "blocks other than every fourth have no rope"


def _write_experts(writer: GGUFWriter, args: Any, context: int) -> None:
    writer.add_expert_count(getattr(args, "num_experts", 0) or args.num_local_experts)
    writer.add_expert_used_count(args.num_experts_per_tok)
    if hasattr(args, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(args.moe_intermediate_size)
    if hasattr(args, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(args.shared_expert_intermediate_size)


def _write_gemma2(writer: GGUFWriter, args: Any, context: int) -> None:
    writer.add_attn_logit_softcapping(args.attn_logit_softcapping)
    writer.add_final_logit_softcapping(args.final_logit_softcapping)
    # mlx-lm's Gemma 2 attends to everything. llama.cpp's attends to 4,096 tokens in every other block, unless it is
    # given a window: the longest context, which no text is longer than.
    writer.add_sliding_window(context)


def _write_gemma3(writer: GGUFWriter, args: Any, context: int) -> None:
    pattern = args.sliding_window_pattern
    if pattern > 1:
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern([(block + 1) % pattern != 0 for block in range(args.num_hidden_layers)])
    writer.add_rope_freq_base_swa(args.rope_local_base_freq)


def _write_granite(writer: GGUFWriter, args: Any, context: int) -> None:
    writer.add_attention_scale(args.attention_multiplier)
    writer.add_embedding_scale(args.embedding_multiplier)
    writer.add_residual_scale(args.residual_multiplier)
    writer.add_logit_scale(args.logits_scaling)


_LLAMA = Family("LLAMA", pairs_neighbours=True, takes_frequency_factors=True, check=_all_attend_to_all)
_MIXTRAL_NAMES = tuple(
    (rf"^model\.(.*)\.block_sparse_moe\.switch_mlp\.{ours}\.", rf"\1.feed_forward.experts.{theirs}.")
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
)
_GEMMA3 = Family(
    "GEMMA3",
    norm_offset=1.0,
    renames=((r"^language_model\.", ""),),
    parameters=_write_gemma3,
    check=_scale_of_heads(62),
)
_QWEN2_MOE, _QWEN3_MOE = _every_block_has_experts(False), _every_block_has_experts(True)

# By mlx-lm's model_type.
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Family("LLAMA", pairs_neighbours=True, renames=_MIXTRAL_NAMES, parameters=_write_experts),
    "qwen2": Family("QWEN2"),
    "qwen2_moe": Family("QWEN2MOE", needs_head=True, parameters=_write_experts, check=_QWEN2_MOE),
    "qwen3": Family("QWEN3"),
    "qwen3_moe": Family("QWEN3MOE", parameters=_write_experts, check=_QWEN3_MOE),
    "gemma": Family("GEMMA", norm_offset=1.0),
    "gemma2": Family("GEMMA2", norm_offset=1.0, parameters=_write_gemma2, check=_scale_of_heads(46)),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family("PHI3"),
    "olmo2": Family("OLMO2", needs_head=True),
    "granite": Family("GRANITE", pairs_neighbours=True, takes_frequency_factors=True, parameters=_write_granite),
    "smollm3": Family("SMOLLM3", pairs_neighbours=True, check=_smollm3),
}
