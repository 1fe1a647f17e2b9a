"""A tiny configuration for every text model of the installed mlx-lm, from the fields of its ModelArgs."""

import dataclasses
import importlib
import importlib.resources
import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes as classes_of
from mlx_lm.utils import save_model

from lib.config.settings import ModelSettings
from lib.errors import UserError
from lib.export import fuse, gguf
from lib.model import adapter_files, partition, peft_adapters, pipeline_stage, stream_trial
from tests.tiny import ROOT, moved

YES, NO, REFUSED = "✓", "–", "|{}|refused|"

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
WINDOW = 12  # more tokens than lib/model/token_stream.py tries, fewer than a row of the tests has
# By the names of the fields, as config.json says them. Every window, and every choice of keys, is of WINDOW tokens.
SIZES: dict[int, str] = {
    1: "n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts n_group topk_group moe_layer_freq"
    " expert_layer_period decoder_sparse_step first_k_dense_replace num_dense_layers num_expert_group mamba_expand"
    " n_groups mamba_n_groups sliding_window_pattern interleave_moe_layer_step scale_depth scale_emb logits_scaling"
    " embedding_multiplier attention_multiplier residual_multiplier routed_scaling_factor moe_routed_scaling_factor"
    " moe_router_scaling_factor route_scale laurel_rank altup_coef_clip num_nextn_predict_layers n_shared_head"
    " expert_layer_offset attn_layer_offset zero_expert_num eos_token_id gegelu_limit mup_width_multiplier",
    2: "num_hidden_layers num_layers n_layer n_layers num_transformer_layers num_key_value_heads num_kv_heads n_kv_heads"
    " num_attention_groups num_swa_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k"
    " top_k_experts mamba_step attn_layer_period full_attention_interval layer_group_size group_norm_size"
    " altup_num_inputs mamba_num_heads mamba_n_heads linear_num_key_heads index_n_heads swa_num_key_value_heads"
    " num_global_key_value_heads o_groups kv_reuse cla_share_factor emb_neighbor_num emb_split_num conv_window"
    " block_multiple_of hc_mult num_loops",
    3: "conv_kernel conv_L_cache mamba_d_conv conv1d_width linear_conv_kernel_dim short_conv_kernel_size",
    4: "num_attention_heads num_heads n_head n_heads num_experts num_local_experts n_routed_experts moe_num_experts"
    " linear_num_value_heads num_swa_attention_heads swa_num_attention_heads qk_rope_head_dim rotary_dim state_size"
    " mamba_d_state ssm_state_size time_step_rank mamba_dt_rank index_block_size candidate_block_size",
    8: "head_dim hidden_size_per_head kv_channels kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim v_head_dim"
    " global_head_dim linear_key_head_dim linear_value_head_dim index_head_dim mamba_d_head mamba_head_dim swa_head_dim"
    " swa_v_head_dim hidden_size_per_layer_input a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"
    " dim_model_base query_pre_attn_scalar moe_latent_size routed_expert_hidden_size",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size share_expert_dim"
    " expert_ffn_hidden_size shared_intermediate_size",
    32: "hidden_size n_embd d_model model_dim hidden_dim intermediate_size ffn_hidden_size intermediate_size_mlp n_inner"
    " ff_intermediate_size dense_intermediate_size block_dim block_ff_dim mamba_d_ssm",
    WINDOW: "sliding_window sliding_window_size window_size attention_window_size loop_window_size index_topk"
    " attention_chunk_size floor_scale",
    30: "final_logit_softcapping attn_logit_softcapping logits_soft_cap",
    48: "vocab_size num_vocab vocab_size_per_layer_input",
    256: "max_position_embeddings n_positions n_ctx block_size model_max_length",
    10_000: "rope_theta swa_rope_theta rotary_emb_base rope_freq_constant rope_local_base_freq rope_embedding_base",
}
VALUES = {name: value for value, names in SIZES.items() for name in names.split()}
BY_TYPE = {"int": 2, "float": 1e-5, "bool": False}

ALTERNATING = {"layer_types": [SLIDING, FULL]}
HYBRID = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL] * 2}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
LLAMA4 = {"llama_4_scaling_beta": 0.1, "rope_theta": 1e4, **YARN, "original_max_position_embeddings": WINDOW}
KIMI = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3, "kda_layers": [1, 3], "full_attn_layers": [2, 4]}
BLOCK = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA4 = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_proj_bias": False, "mamba_conv_bias": True}
LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2, "block_ffn_dim_multiplier": 1.0}
LONGCAT = {"attention_method": "MLA", "zero_expert_type": "identity"}
LONGCAT |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
FOUR = {"num_hidden_layers": 4}
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# What a family's configuration has beside, or instead of, the values above.
OVERRIDES: dict[str, dict[str, Any]] = {
    "Klear": {"mlp_only_layers": [0]},
    "afm7": {"num_layers": 4, "num_kv_reuse_layers": 1},
    "afmoe": ALTERNATING,
    "baichuan_m1": {"sliding_window_layers": [0]},
    "bailing_hybrid": {"num_hidden_layers": 4, "num_key_value_heads": 4},
    "bailing_moe_linear": {"num_hidden_layers": 4, "num_key_value_heads": 4},
    "bailing_moe_v3": {"num_hidden_layers": 4, "architectures": ["BailingMoeV3ForCausalLM"]},
    "cohere2": {"num_hidden_layers": 4, "sliding_window_pattern": 2},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}
    | {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v2": {"rope_scaling": {**YARN, "type": "yarn"}, "topk_method": "greedy"},
    "deepseek_v41": FOUR
    | {"compress_ratios": [0, 0, 4, 4], "kv_source_layer_ids": [2], "index_source_layer_ids": [2, 3]},
    "dots1": {"scoring_func": "noaux_tc"},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {**ALTERNATING, "is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_n_groups": 1, "mlp_multipliers": [1.0, 1.0]},
    "gear": {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, "conv_mixer"]},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3": {"sliding_window_pattern": 2},
    "gemma3n": {**GEMMA4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}
    | {"altup_active_idx": 0, "altup_correct_scale": True},
    "gemma4": GEMMA4,
    "gemma4_text": {**ALTERNATING, "enable_moe_block": True, "num_kv_shared_layers": 0}
    | {"hidden_size_per_layer_input": 0},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {"rope_scaling": None, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": {**SIGMOID, "rope_parameters": ROPE},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": {**ALTERNATING, "rope_scaling": YARN},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, **MAMBA},
    "hunyuan": {**FOUR, "rope_scaling": {"alpha": 2.0, "type": "dynamic", "factor": 1.0}}
    | {"use_cla": True, "use_mixed_mlp_moe": True},
    "jamba": {"num_hidden_layers": 4, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": {**HYBRID, "linear_attn_config": KIMI, "attn_res_block_size": 2},
    "kimi_linear": {**HYBRID, "linear_attn_config": KIMI},
    "laguna": ALTERNATING,
    "lfm2": LFM2,
    "lfm2-vl": LFM2,
    "lfm2_moe": LFM2,
    "lille-130m": {"n_embd": 96, "n_head": 4},
    "llama4": {"num_experts_per_tok": 1, "rope_scaling": None, "num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": LONGCAT,
    "longcat_flash_ngram": LONGCAT,
    "mamba2": {"num_heads": 8, "hidden_size": 32, "time_step_limit": [0.001, 100.0], "head_dim": 8},
    "mellum": {**ALTERNATING, "rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "mimo_v2_flash": {**SIGMOID, "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1]}
    | {"add_swa_attention_sink_bias": True, "partial_rotary_factor": 0.5},
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 128, "short_factor": 1.0, "long_factor": 1.0}},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1], "sparse_attention_freq": [0, 1], "index_topk_blocks": 2},
    "ministral3": {**ALTERNATING, "rope_parameters": LLAMA4},
    "mistral4": {"rope_parameters": LLAMA4},
    "muse_glimmer": {**ALTERNATING, "layer_rope_theta": [1e4, 0]},
    "muse_spark": {**ALTERNATING, "num_shared_experts": 0, "layer_rope_theta": [1e4, 0]}
    | {"rope_parameters": ROPE, "moe_hidden_size": 16},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"block_configs": [BLOCK, {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}}]},
    "nemotron_h": {"num_hidden_layers": 4, "hybrid_override_pattern": ["M", "-", "*", "E"], "mamba_num_heads": 4},
    "olmo2": {"tie_word_embeddings": False},
    "olmo3": ALTERNATING,
    "olmo_hybrid": HYBRID,
    "openelm": {"num_query_heads": [4, 4], "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 2.0], "ffn_dim_divisor": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3small": {"vocab_size": 100_352},
    "plamo2": {"num_hidden_layers": 4, "full_attention_idx": [1]},
    "plamo3": {"sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {**FOUR, "hidden_size": 128},
    "qwen3_5": {**FOUR, "num_experts": 0},
    "qwen3_5_moe": FOUR,
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
    "qwen3_next": {**FOUR, "mlp_only_layers": [], "partial_rotary_factor": 0.5},
    "qwen3_vl_moe": {"mlp_only_layers": []},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ["recurrent", "attention"]},
    "seed_oss": {"tie_word_embeddings": False},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "solar_open": {"partial_rotary_factor": 0.5},
    "spark2_5": {**ALTERNATING, "rope_parameters": {SLIDING: ROPE, FULL: ROPE}},
    "stablelm": {"partial_rotary_factor": 0.5},
    "step3p5": {**ALTERNATING, "moe_layers_enum": "1"},
}
# Families whose text model is described in text_config, and the module and class of that description.
INNER = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "deepseek_v3.ModelArgs",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "llama.ModelArgs",
    "muse_spark": "muse_spark.TextArgs",
    "pixtral": "llama.ModelArgs",
    "prism_hadamard_qwen35": "qwen3_5.TextModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}
# What stands beside text_config.
OUTER: dict[str, dict[str, Any]] = {
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    }
}


def names() -> list[str]:
    """Every file of mlx_lm.models that has a model."""
    files = sorted(Path(mlx_lm.models.__path__[0]).glob("*.py"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in files}
    return [name for name, text in texts.items() if "class Model(" in text and "class ModelArgs(" in text]


def configuration(family: str) -> dict[str, Any]:
    """A tiny config.json of a family. Raises KeyError: a field without a value here."""
    overrides = OVERRIDES.get(family, {})
    module, _, name = INNER.get(family, f"{family}.ModelArgs").rpartition(".")
    args = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    values: dict[str, Any] = {"model_type": module if family in INNER else family}
    for each in dataclasses.fields(args):
        is_needed = each.default is each.default_factory is dataclasses.MISSING
        if each.name in overrides or each.name == "model_type":
            continue
        if each.name in VALUES:
            values[each.name] = VALUES[each.name]
        elif is_needed:
            kind = each.type if isinstance(each.type, str) else getattr(each.type, "__name__", "")
            if kind not in BY_TYPE:
                raise KeyError(f"{family}: ModelArgs.{each.name} ({kind}) has no value in tests/families.py")
            values[each.name] = BY_TYPE[kind]
    values |= overrides
    if family in INNER:
        common = {"model_type": family, "eos_token_id": 1, "vocab_size": 48, "text_config": values}
        return OUTER.get(family, {}) | common
    return values | {"eos_token_id": 1}


def stored(folder: Path, family: str) -> Path:
    """A tiny model of a family with drawn weights, as mlx-lm stores it."""
    folder.mkdir()
    text = json.dumps(configuration(family))
    (folder / "config.json").write_text(text)
    mx.random.seed(0)
    model_class, args_class = classes_of(config=json.loads(text))
    model = model_class(args_class.from_dict(json.loads(text)))
    floats = [(n, a) for n, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)]
    model.update(tree_unflatten([(n, (a + 0.05 * mx.random.normal(a.shape)).astype(a.dtype)) for n, a in floats]))
    save_model(folder, model)
    return folder


def build(path: Path, spread: float = 0.1) -> nn.Module:
    """The model with an adapter on every layer that takes one, moved at random."""
    return moved(ModelSettings(path=str(path)), spread)


def stages(path: Path) -> list[nn.Module] | None:
    """The model in two stages, the first of one block; None: it cannot be cut."""
    parts = [build(path), build(path)]
    try:
        for rank, part in enumerate(parts):
            pipeline_stage.cut(part, [1, len(part.layers) - 1], rank, None)
            stream_trial.cannot_share_prompts(part)
    except UserError:
        return None
    return parts


# ---- docs/families.md: python -m tests.families


def documented() -> list[str]:
    """The table's rows."""
    lines = (ROOT / "docs/families.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("|") and not line.startswith(("|family|", "|---|"))]


def row(path: Path, family: str) -> str:
    """What a family can do: prompts shared, pipelined, sharded, exported as PEFT's adapter, fused, as GGUF."""

    def can(work: Any) -> bool:
        try:
            return work() is not False
        except UserError:
            return False

    if not can(lambda: stream_trial.cannot_share_prompts(build(path))):
        return REFUSED.format(family)
    model, config = build(path), configuration(family)
    able = (
        stream_trial.cannot_share_prompts(model) is None,
        stages(path) is not None and can(lambda: partition.model_shape_of(config, to_divide=False)),
        can(lambda: partition.model_shape_of(config)),
        can(lambda: peft_adapters.peft_arrays(adapter_files.trainable(model)) and fuse.adapted_layers(model)),
        can(lambda: fuse.adapted_layers(model)),
        family in gguf.FAMILIES,
    )
    return f"|{family}|{'|'.join(YES if each else NO for each in able)}|"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in names():
            is_known = name != "olmo"  # which wants ai2-olmo
            print(row(stored(Path(folder) / name, name), name) if is_known else REFUSED.format(name))
