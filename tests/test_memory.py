"""The memory formula: against peaks that an H200 held, and what it must never say."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lib.config.settings import ModelSettings, TrainSettings
from lib.data.batch import collate
from lib.data.batch_shapes import batch_shape_of, need_of
from lib.data.dataset import Example
from lib.distributed.world import World
from lib.model import adapters, quantised
from lib.model import load as load_module
from lib.model.partition import divide, model_shape_of
from lib.model.stream_trial import cannot_share_prompts
from lib.plan.calibration import MEMORY_HEADROOM
from lib.plan.facts import RankHost
from lib.plan.memory import OPTIMIZERS, MemoryModel, Rows, Training, metal_limit_bytes, rank_shape
from lib.training.optimizers import make_optimizer
from lib.training.step import Step
from tests import families
from tests.planning import KEY, LLAMA_8B, MEMORY, ROWS, SHAPE, calibrated, facts

GB = 10**9


def llama(hidden: int, blocks: int, heads: int, kv_heads: int, columns: int, vocabulary: int, **more: Any) -> Any:
    sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": columns, "vocab_size": vocabulary}
    return {**LLAMA_8B, **sizes, **more}


MODELS = {
    "0.5B": llama(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
    "1B": llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "3B": llama(3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "7B": llama(3584, 28, 28, 4, 18944, 152064),
    "8B": LLAMA_8B,
}
# (model, method, bits, checkpointing, prompt, completion, pairs, GB that one H200 held): docs/performance.md.
HELD: list[tuple[str, Any, int, bool, int, int, int, float]] = [("1B", "lora", 0, False, 512, 512, 8, 20.4)]
HELD += [("1B", "lora", 0, False, 512, 512, 16, 36.9), ("1B", "lora", 0, False, 896, 128, 16, 28.7)]
HELD += [("1B", "lora", 0, False, 4096, 4096, 1, 20.3), ("1B", "lora", 4, False, 512, 512, 8, 19.2)]
HELD += [("1B", "dora", 0, False, 512, 512, 4, 19.6), ("1B", "full", 0, False, 512, 512, 2, 33.0)]
HELD += [("1B", "lora", 0, True, 512, 512, 8, 6.3), ("1B", "dora", 0, True, 512, 512, 8, 8.7)]
HELD += [("1B", "full", 0, True, 512, 512, 8, 28.5), ("8B", "lora", 0, False, 512, 512, 2, 32.8)]
HELD += [("8B", "lora", 0, False, 896, 128, 4, 40.5), ("8B", "lora", 4, False, 512, 512, 4, 37.8)]
HELD += [("8B", "dora", 0, False, 512, 512, 1, 32.0), ("8B", "lora", 0, True, 512, 512, 8, 23.9)]
HELD += [("8B", "lora", 4, True, 512, 512, 8, 12.7), ("0.5B", "lora", 0, False, 300, 700, 3, 8.1)]
HELD += [("0.5B", "lora", 0, False, 2048, 256, 1, 4.1), ("0.5B", "full", 0, False, 512, 512, 2, 18.8)]
HELD += [("3B", "lora", 0, False, 300, 700, 3, 23.3), ("3B", "lora", 0, True, 700, 200, 7, 10.5)]
HELD += [("3B", "full", 0, False, 512, 512, 2, 68.3), ("7B", "lora", 0, False, 300, 700, 3, 42.2)]
HELD += [("7B", "lora", 8, False, 256, 384, 5, 35.5)]


@pytest.mark.parametrize("row", HELD, ids=str)
def test_the_formula_is_near_what_an_h200_held(row: Any) -> None:
    model, method, bits, checkpointing, prompt, completion, pairs, held = row
    shape = model_shape_of({**MODELS[model], **({"quantization": {"group_size": 64, "bits": bits}} if bits else {})})
    rows = Rows(prompt, prompt + completion, prompt + 2 * completion, 2 * completion + 2)
    planned = MemoryModel(shape, Training(method, checkpointing=checkpointing), rows).bytes(pairs, "cuda").total
    assert 0.8 <= planned / GB / held <= 1.25


def test_more_work_needs_more_memory() -> None:
    for device in ("cpu", "metal", "cuda"):
        sizes = [MEMORY.bytes(pairs, device).total for pairs in (1, 2, 4, 8, 16)]  # type: ignore[arg-type]
        assert sizes == sorted(set(sizes)) and sizes[0] > 16.06 * GB
        again = [MEMORY.bytes(pairs, device, checkpointing=True).total for pairs in (1, 4, 16)]  # type: ignore[arg-type]
        assert again == sorted(set(again)) and again[2] < sizes[4] / 2
    assert MEMORY.bytes(4, "metal").total > MEMORY.bytes(4, "cuda").total, "Metal keeps attention's probabilities"
    shared = MemoryModel(SHAPE, replace(MEMORY.training, shared_prompts=False), ROWS)
    assert shared.bytes(4, "cuda").total > MEMORY.bytes(4, "cuda").total
    few = MemoryModel(SHAPE, replace(MEMORY.training, blocks=4), ROWS).bytes(4, "cuda")
    assert few.activations < MEMORY.bytes(4, "cuda").activations / 2
    full = MemoryModel(SHAPE, replace(MEMORY.training, method="full"), ROWS).bytes(1, "cuda")
    assert full.gradients == pytest.approx(4 * 8.03e9, rel=0.01) and full.trained > 2 * full.gradients


def test_a_mixture_of_experts() -> None:
    stored = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    stored |= {"intermediate_size": 128, "vocab_size": 100, "num_local_experts": 8, "num_experts_per_tok": 2}
    rows = Rows(prompt=16, seen=32, tokens=48, scored=32, length_multiple=16)
    shapes = [model_shape_of({**stored, "num_local_experts": count}, to_divide=False) for count in (8, 0)]
    sparse, dense = (MemoryModel(shape, Training(), rows) for shape in shapes)
    assert sparse.bytes(8, "cpu").activations > 1.2 * dense.bytes(8, "cpu").activations
    assert sparse.bytes(8, "cpu").weights > 3 * dense.bytes(8, "cpu").weights


def test_a_part_of_a_model_needs_a_part_of_its_memory() -> None:
    small, large = (rank_shape(SHAPE, divide(SHAPE, [1, 3], vocabulary=True), rank) for rank in range(2))
    parts = [MEMORY.of_part(part, 0, 4, "cuda").activations for part in (small, large)]
    whole = MEMORY.of_part(SHAPE, 0, 4, "cuda").activations
    assert parts[0] < parts[1] < whole < sum(parts), "what is between the layers is kept by both"


def test_measured_peaks_correct_the_formula() -> None:
    long = KEY.model_copy(update={"sequence_length": ROWS.seen})
    planned = {size: MEMORY.bytes(size, "metal").total for size in (1, 8)}
    measured = calibrated("a", {1: 10.0, 8: 20.0}, long, {size: int(1.3 * peak) for size, peak in planned.items()})
    known = facts([RankHost("a", measured, device="metal")], key=long, longest=ROWS.seen, memory=MEMORY)
    assert known.needed_bytes(0, 4, long) == pytest.approx(1.3 * MEMORY.bytes(4, "metal").total, rel=1e-3)
    checkpointed = long.model_copy(update={"gradient_checkpointing": True})
    expected = 1.3 * MEMORY.bytes(4, "metal", checkpointing=True).total
    assert known.needed_bytes(0, 4, checkpointed) == pytest.approx(expected, rel=1e-3)


def test_default_sizes_fit_and_limits_of_macs() -> None:
    limit = metal_limit_bytes(128 * GB)
    assert limit == 96 * GB and metal_limit_bytes(18 * GB) == 12 * GB
    size = facts([RankHost("a", device="metal", memory_bytes=40 * GB)], memory=MEMORY).default_size(0, KEY)
    assert size >= 1 and MEMORY.bytes(size, "metal").total <= (1 - MEMORY_HEADROOM) * 40 * GB


# Small models with recurrences: beside these fields, those of tests/families.py.
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
GATED = {f"linear_{kind}_head_dim": 64 for kind in ("key", "value")} | {"linear_num_key_heads": 4}
MAMBA2 = {"num_local_experts": 0, "mamba_d_head": 64, "mamba_d_state": 64, "shared_intermediate_size": 768}
CONVOLVED = {"block_dim": 256, "block_ff_dim": 768, "layer_types": ["conv", "full_attention", "conv", "conv"]}
RECURRENT = {"qwen3_5": {**GATED, "full_attention_interval": 4}, "lfm2": CONVOLVED, "granitemoehybrid": MAMBA2}
RECURRENT["mamba"] = {"intermediate_size": 512, "state_size": 16, "time_step_rank": 16}


@pytest.mark.skipif(quantised.device() != "cpu", reason="peaks of a CPU")
@pytest.mark.parametrize("family", RECURRENT)
def test_the_formula_is_near_what_small_recurrent_models_hold(tmp_path, family: str) -> None:
    config = families.configuration(family)
    config.get("text_config", config).update({**SMALL, **RECURRENT[family]})
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 4096}))
    settings, train = ModelSettings(path=str(tmp_path), random_init=True), TrainSettings(optimizer="sgd")
    model = load_module.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    assert cannot_share_prompts(model) is None
    ids = np.ones(128, np.int32)
    batch = collate([Example(i, ids, (ids, ids)) for i in range(2)], 16, True)
    step = Step(model, make_optimizer(train), train, World())
    held = [step(0, 1e-4, [(batch, np.zeros((2, 2)))]).figures["peak_memory_bytes"] for _ in range(2)][1]
    rows, shape = Rows(128, 255, 382, 256, 2, 16), model_shape_of(config, to_divide=False)
    planned = MemoryModel(shape, Training(optimizer=OPTIMIZERS["sgd"]), rows).bytes(2, "cpu").total
    assert 0.75 <= planned / held <= 1.3


def test_the_estimate_of_a_micro_batch_with_a_single_long_prompt_is_not_below_its_need() -> None:
    prompts, scored = np.array([1000] + 63 * [10]), np.full((64, 2), 30)
    seen = prompts[:, None] + scored - 1
    real = batch_shape_of(need_of(prompts[:8], seen[:8], scored[:8])[None], 2, 16, True)
    estimate = Rows.of(prompts, seen, scored, 16).batch(8, True)
    assert estimate.prefix <= real.prefix and estimate.scores >= real.scores and estimate.tokens >= real.tokens
