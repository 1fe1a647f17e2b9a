"""What GGUF says of a family of models and how its tensors lie there: facts of llama.cpp, for mlx-lm's models.

Sizes come from the model's own arguments and its rope layers: the file says what was trained, whatever config.json
left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np
from gguf import GGUFWriter, RopeScalingType
from mlx_lm.models import rope_utils

from lib.errors import UserError

DEFAULT_CONTEXT = 2048  # where config.json has no max_position_embeddings
ALL = "full_attention"


@dataclass(frozen=True)
class Family:
    """How a family of mlx-lm's models is stored in GGUF."""

    architecture: str  # its name in GGUF
    # llama.cpp rotates neighbouring values of a head, mlx-lm the two halves: the rows of q and k are reordered.
    pairs_neighbours: bool = False
    needs_head: bool = False  # llama.cpp does not take the embedding for the head
    norm_offset: float = 0.0  # mlx-lm's norms add this to their weight, llama.cpp's do not
    norm_topk_prob: bool | None = None  # what llama.cpp does with the shares of experts
    heads_of: int = 0  # at so many blocks llama.cpp scales Gemma's attention by hidden size over heads


_LLAMA, _GEMMA3 = Family("LLAMA", pairs_neighbours=True), Family("GEMMA3", norm_offset=1.0, heads_of=62)
# By mlx-lm's model_type.
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Family("QWEN2"),
    "qwen2_moe": Family("QWEN2MOE", needs_head=True, norm_topk_prob=False),
    "qwen3": Family("QWEN3"),
    "qwen3_moe": Family("QWEN3MOE", norm_topk_prob=True),
    "gemma": Family("GEMMA", norm_offset=1.0),
    "gemma2": Family("GEMMA2", norm_offset=1.0, heads_of=46),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": Family("PHI3"),
    "olmo2": Family("OLMO2", needs_head=True),
    "granite": Family("GRANITE", pairs_neighbours=True),
    "smollm3": Family("SMOLLM3", pairs_neighbours=True),
}
# What GGUF's writer calls the arguments of mlx-lm's models; a family has those that its arguments have.
PARAMETERS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_freq_base",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope_local_base_freq": "rope_freq_base_swa",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Patterns of mlx-lm's tensor names, and what gguf's name maps, which know the transformers library's, have instead.
RENAMES = (
    (r"^language_model\.", ""),
    (r"^model\.(.*)\.block_sparse_moe\.switch_mlp\.gate_proj\.", r"\1.feed_forward.experts.w1."),
    (r"^model\.(.*)\.block_sparse_moe\.switch_mlp\.down_proj\.", r"\1.feed_forward.experts.w2."),
    (r"^model\.(.*)\.block_sparse_moe\.switch_mlp\.up_proj\.", r"\1.feed_forward.experts.w3."),
    (r"\.switch_mlp\.", ".experts."),
)


def family_of(model: nn.Module, path: str) -> Family:
    """The family of a model.

    Raises UserError: GGUF has no such family here, or llama.cpp computes this model in another way.
    """
    family = FAMILIES.get(model.model_type)
    if family is None:
        raise UserError(
            f"--to gguf: {path} is of the family {model.model_type}; there are {', '.join(sorted(FAMILIES))}. Others: "
            "--to fused --dequantize, then llama.cpp's `python convert_hf_to_gguf.py FOLDER`"
        )
    if (problem := _problem(family, text_model(model).args)) is not None:
        raise UserError(f"--to gguf: {path}: {problem}, and GGUF cannot say so; take --to fused")
    return family


def _problem(family: Family, args: Any) -> str | None:
    """What llama.cpp computes otherwise for a model of this family."""
    if family.architecture in ("LLAMA", "SMOLLM3") and {*(getattr(args, "layer_types", None) or [ALL])} != {ALL}:
        return "some of its blocks attend to a window"
    if family.needs_head and args.tie_word_embeddings:
        return "its head is its embedding"
    if family.heads_of:
        is_largest, scalar = args.num_hidden_layers == family.heads_of, args.query_pre_attn_scalar
        size = args.hidden_size // args.num_attention_heads if is_largest else args.head_dim
        return None if scalar == size else f"query_pre_attn_scalar is {scalar:g}, not {size}"
    if family.norm_topk_prob is not None:
        if getattr(args, "mlp_only_layers", None) or getattr(args, "decoder_sparse_step", 1) != 1:
            return "some of its blocks have no experts"
        is_right = getattr(args, "norm_topk_prob", family.norm_topk_prob) == family.norm_topk_prob
        return None if is_right else f"norm_topk_prob is not {str(family.norm_topk_prob).lower()}"
    if family.architecture == "SMOLLM3":
        every_fourth = [int((block + 1) % 4 != 0) for block in range(args.num_hidden_layers)]
        return None if list(args.no_rope_layers) == every_fourth else "blocks other than every fourth have no rope"
    return None


def text_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text: of one that also sees pictures its language model."""
    return getattr(model, "language_model", model)


def tensor_name(name: str) -> str:
    """A parameter's name as gguf's name maps know it."""
    for pattern, replacement in RENAMES:
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
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    for name, key in PARAMETERS.items():
        if (value := getattr(args, name, None)) is not None:
            getattr(writer, f"add_{key}")(value)
    if family.architecture == "GEMMA2":
        # mlx-lm's Gemma 2 attends to everything. llama.cpp's attends to 4,096 tokens in every other block, unless it
        # is given a window: the longest context, which no text is longer than.
        writer.add_sliding_window(context)
    if (pattern := getattr(args, "sliding_window_pattern", 1)) > 1:
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern([(block + 1) % pattern != 0 for block in range(args.num_hidden_layers)])
    _write_rope(writer, model, args, family)


# ---- Ropes


def _rope(model: nn.Module) -> nn.Module:
    """The rope of the blocks that attend to everything, of which those that attend to a window may differ."""
    attention = [layer.self_attn for layer in text_model(model).layers]
    ropes = [each.rope for each in sorted(attention, key=lambda each: bool(getattr(each, "is_sliding", False)))]
    return next(rope for rope in ropes if isinstance(rope, nn.RoPE) or type(rope).__module__ == rope_utils.__name__)


def _write_rope(writer: GGUFWriter, model: nn.Module, args: Any, family: Family) -> None:
    """Writes the rope's dimensions and scaling, as the model's own rope layers have them.

    Raises UserError: a kind of scaling that llama.cpp does not compute for this family.
    """
    rope = _rope(model)
    writer.add_rope_dimension_count(rope.dim if isinstance(rope, rope_utils.SuScaledRoPE) else rope.dims)
    if isinstance(rope, nn.RoPE):
        if rope.scale != 1.0:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(1.0 / rope.scale)
    elif isinstance(rope, rope_utils.Llama3RoPE) and family.architecture in ("LLAMA", "GRANITE"):
        pass  # a tensor: frequency_factors
    elif isinstance(rope, rope_utils.SuScaledRoPE) and family.architecture == "PHI3":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope._scale)
    elif isinstance(rope, rope_utils.YarnRoPE):  # arXiv:2309.00071
        scaling = args.rope_scaling
        factor = float(scaling["factor"])
        if not math.isclose(rope.mscale, 0.1 * math.log(factor) + 1.0, rel_tol=1e-6):
            raise UserError("--to gguf: the rope's mscale is not YaRN's own, and GGUF cannot say so; take --to fused")
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.get("original_max_position_embeddings", 4096))
        writer.add_rope_scaling_yarn_beta_fast(scaling.get("beta_fast", 32))
        writer.add_rope_scaling_yarn_beta_slow(scaling.get("beta_slow", 1))
    else:
        raise UserError(f"--to gguf: llama.cpp has no {type(rope).__name__} for {family.architecture}; take --to fused")


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
