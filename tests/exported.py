"""Tiny models of many families, and runs that have trained them: weights by numpy's RandomState, the same for ever."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model, quantize_model, save_model

from lib.config import load as config
from lib.config.settings import Config
from lib.model import adapter_files, adapters
from lib.model import load as models
from lib.model.adapter_files import write_arrays
from lib.model.peft_adapters import unstacked
from tests import tiny

SHAPE: dict[str, Any] = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 10000.0}
SHAPE |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 1}
WIDE = {"hidden_size": 64}  # groups of quantised routers; and its root is exact in bfloat16, to which Gemma rounds it
EXPERTS = {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
EXPERTS |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
LOCAL = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
SCALED = {"query_pre_attn_scalar": 16, "sliding_window": 64, **GEMMA}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    "mixtral": {"model_type": "mixtral", **LOCAL, "sliding_window": None},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, **GEMMA},
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **SCALED},
    "gemma3_text": {"model_type": "gemma3_text", **WIDE, **SCALED}
    | {"sliding_window_pattern": 2, "rope_local_base_freq": 10000.0},
    "gpt_oss": {"model_type": "gpt_oss", **LOCAL, "head_dim": 16, "sliding_window": 64, "layer_types": SLIDING},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 128},
}


def drawn(shape: tuple[int, ...], name: str, random: np.random.RandomState) -> np.ndarray:
    """Values that tell a transposed, misnamed or missing array from the right one."""
    values = random.standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return values * (0.25 if "embed" in name else 1.0 / shape[-1] ** 0.5)
    return 0.2 * values + (1.0 if "norm" in name else 0.0)


def base_model(
    folder: Path,
    family: str,
    bits: int | None = None,
    as_converted: bool = False,
    dtype: str = "float32",
    seed: int = 5,
    mode: str = "affine",
) -> Path:
    """A model's folder as its makers publish it; with `bits`, or `as_converted`, as mlx-lm stores it then."""
    folder.mkdir(parents=True)
    stored = SHAPE | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(stored))
    model, loaded = load_model(folder, lazy=True, strict=False)
    random = np.random.RandomState(seed)
    shapes = [(name, array.shape) for name, array in sorted(tree_flatten(model.parameters()))]
    arrays = {name: mx.array(drawn(shape, name, random)).astype(getattr(mx, dtype)) for name, shape in shapes}
    if bits is None and not as_converted:
        checkpoint = dict(unstacked(arrays))
        described = {name: (array.shape, array.dtype) for name, array in checkpoint.items()}
        write_arrays(folder / "model.safetensors", described, checkpoint.items())
        return folder
    model.update(tree_unflatten(list(arrays.items())))
    if bits is not None:
        model, loaded = quantize_model(model, loaded, 32, bits, mode=mode)
        (folder / "config.json").write_text(json.dumps(loaded))
    save_model(folder, model)
    return folder


def settings_of(folder: Path, base: Path, **changes: Any) -> Config:
    """The settings of a run of this model on a few rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = tiny.write_jsonl(folder / "valid.jsonl", tiny.pairs(5, seed=3))
    words = {"model.path": base, "data.train": rows, "data.valid": rows, "model.rank": 4, **changes}
    return config.load(tiny.config_file(folder), [f"{key}={value}" for key, value in words.items()])


def run_of(folder: Path, base: Path, **changes: Any) -> Path:
    """The folder of a run of this model, as far as exports read it, with an adapter whose arrays are drawn."""
    settings = settings_of(folder, base, **changes)
    model = trained(settings)
    adapter_files.save_trained(model, settings.model, folder)
    (folder / "config.yaml").write_text(config.dump(settings))
    return folder


def trained(settings: Config, seed: int = 9) -> nn.Module:
    """The run's model, in which everything that is trained was moved at random."""
    model = models.load(settings.model, settings.train.seed)
    adapters.make_trainable(model, settings.model, settings.train.seed)
    random = np.random.RandomState(seed)
    moved = {}
    for name, array in sorted(adapter_files.trainable(model).items()):
        values = random.standard_normal(array.shape).astype(np.float32)
        old = np.array(array.astype(mx.float32))
        moved[name] = mx.array(0.2 * values if ".lora_" in name else old * (1 + 0.1 * values))
    model.update(tree_unflatten(list(moved.items())))
    return model.eval()
