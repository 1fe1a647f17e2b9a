"""A stream of tokens, the head in pieces and its gradient made ahead: each equal to the plain formula."""

import gc
import io
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from lib.config import settings
from lib.data.batch import Batch, collate
from lib.data.dataset import Example
from lib.model import adapters, lora_layers, patches, stream_trial, token_stream
from lib.model import load as load_module
from lib.model import logps as logps_module
from lib.model.gradient_checkpointing import checkpoint_blocks
from lib.model.layout import layout_of
from tests import families, rounding, tiny
from tests.tiny import model_folder

VOCABULARY = 48
NAMES = ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt2", "gemma2")
FAMILIES = {name: tiny.FAMILIES[name] for name in NAMES}


def load(folder: Path, family: str, **changes: Any) -> nn.Module:
    """A tiny model of the family whose trained parameters are not at a symmetric point."""
    path = model_folder(folder / f"{family}-{len(changes)}", model_type=family, **FAMILIES[family])
    return tiny.moved(settings.ModelSettings(path=str(path), random_init=True, **changes), 0.2)


def draw(seed: int, count: int, completions: int = 2, shortest_prompt: int = 0) -> list[Example]:
    # Two tokens at least: the only token of a text without a prompt cannot be scored.
    return tiny.examples(count, completions, (shortest_prompt, 20), (2, 12), seed)


def plain_logps(model: nn.Module, examples: list[Example]) -> mx.array:
    """One sequence at a time, through the model's own call: [b, K]."""
    rows = []
    for example in examples:
        for completion in example.completions:
            tokens = mx.array(np.concatenate([example.prompt_ids, completion]))
            logps = nn.log_softmax(model(tokens[None, :-1])[0].astype(mx.float32), axis=-1)
            scored = mx.take_along_axis(logps, tokens[1:, None], axis=-1)[:, 0]
            rows.append(scored[max(len(example.prompt_ids) - 1, 0) :].sum())
    return mx.stack(rows).reshape(len(examples), -1)


def weighted(logps: mx.array) -> mx.array:
    """A loss that gives every completion another weight and slope."""
    return (mx.arange(1.0, 1.0 + logps.size).reshape(logps.shape) * mx.square(logps / 10)).mean()


def results_of(model: nn.Module, logps: Callable[[], mx.array]) -> list[dict[str, mx.array]]:
    """The log-probabilities, a loss of them, and its gradients."""
    loss, gradients = nn.value_and_grad(model, lambda: weighted(logps()))()
    return [{"logps": logps()}, {"loss": loss}, dict(tree_flatten(gradients))]


def assert_equal(model: nn.Module, examples: list[Example], batch: Batch, compiled: bool = False) -> None:
    inputs = token_stream.arrays_of(batch.inputs)
    wanted = rounding.expected_and_limits(model, lambda: results_of(model, lambda: plain_logps(model, examples)))
    take = nn.value_and_grad(model, lambda inputs: weighted(logps_module.completion_logps(model, inputs)))
    if compiled:
        take = mx.compile(take, inputs=[model.state], outputs=[model.state])
    loss, gradients = take(inputs)
    logps = logps_module.completion_logps(model, inputs)
    rounding.assert_within([{"logps": logps}, {"loss": loss}, dict(tree_flatten(gradients))], *wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.long("mixtral", "qwen3", "llama")
def test_a_stream_gives_the_log_probabilities_and_gradients_of_sequences_alone(tmp_path, family: str) -> None:
    model = load(tmp_path, family)
    assert stream_trial.cannot_share_prompts(model) is None
    layouts = set()
    for seed, (count, multiple, shortest) in enumerate([(5, 4, 0), (4, 1, 6), (3, 8, 9), (1, 4, 3)]):
        examples = draw(seed, count, shortest_prompt=shortest)
        batch = collate(examples, multiple, shared_prompts=True)
        assert_equal(model, examples, batch)
        layouts.add((batch.prefix_length > 0, batch.suffix_indices is None))
    assert layouts >= {(False, False), (True, False)}


def graph_of(states: mx.array) -> Counter[str]:
    """How often each kind of operation is in what has to be computed."""
    text = io.StringIO()
    mx.export_to_dot(text, states)
    return Counter(re.findall(r'label ?="([A-Za-z]+)"', text.getvalue()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_block_goes_on_with_the_tokens_that_the_head_sees(tmp_path, family: str) -> None:
    model = load(tmp_path, family)
    assert stream_trial.cannot_share_prompts(model) is None
    batch = collate(draw(3, 4, shortest_prompt=6), 4, shared_prompts=True)
    inputs = token_stream.arrays_of(batch.inputs)
    of_all, of_scored = token_stream.hidden_states(model, inputs), token_stream.scored_states(model, inputs)
    assert len(of_all) == batch.computed_tokens > len(of_scored) == len(batch.scored)
    more = graph_of(of_scored) - graph_of(of_all)
    assert more["Gather"] >= 2 and not any("Mat" in name or "MM" in name for name in more), "no product is made twice"


def test_a_model_that_needs_every_token_after_its_blocks_gets_them(tmp_path) -> None:
    model = load(tmp_path, "llama")
    backbone, embedding = type(model.model), model.model.embed_tokens

    class Skipping(backbone):  # type: ignore[misc, valid-type]
        def __call__(self, tokens: mx.array, *args: Any, **options: Any) -> Any:
            return backbone.__call__(self, tokens, *args, **options) + embedding(tokens)

    model.model.__class__ = Skipping
    assert stream_trial.cannot_share_prompts(model) is None and not layout_of(model).ends_early
    examples = draw(3, 4, shortest_prompt=6)
    assert_equal(model, examples, collate(examples, 4, shared_prompts=True))


def test_with_dropout_every_token_goes_through_the_last_block(tmp_path) -> None:
    model = load(tmp_path, "llama", dropout=0.1)
    assert stream_trial.cannot_share_prompts(model) is None and layout_of(model).ends_early
    inputs = token_stream.arrays_of(collate(draw(3, 4, shortest_prompt=6), 4, shared_prompts=True).inputs)
    drawn = []
    for ends_early in (True, False):
        layout_of(model).ends_early = ends_early
        mx.random.seed(5)
        drawn.append((token_stream.scored_states(model, inputs), mx.array(mx.random.state[0])))
    (first, key), (second, other_key) = drawn
    assert mx.array_equal(first, second) and mx.array_equal(key, other_key), "cuts of a pipeline draw the same masks"


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_rows_for_the_families_that_cannot_share(tmp_path, family: str) -> None:
    model = load(tmp_path, family)
    examples = draw(11, 3)
    assert_equal(model, examples, collate(examples, 4, shared_prompts=False))


def test_a_family_with_its_own_attention_is_found_out(tmp_path) -> None:
    model = families.build(families.stored(tmp_path / "stored", "nanbeige"))  # its blocks run twice
    model.make_cache = lambda: []  # and in a stream once
    assert "would change its outputs" in str(stream_trial.cannot_share_prompts(model))


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.long("False-*", "True-True-full", "True-False-lora")
def test_chunks_of_the_head_checkpoints_and_compilation_change_nothing(
    tmp_path, monkeypatch, method: str, checkpointing: bool, compiled: bool
) -> None:
    model = load(tmp_path, "llama", method=method)
    kind = type(model.layers[0])
    monkeypatch.setattr(kind, "__call__", kind.__call__)  # checkpointing belongs to the class: undone after the test
    if checkpointing:
        checkpoint_blocks(model)
    monkeypatch.setattr(logps_module, "LOGITS_BYTES", 7 * VOCABULARY * 4)
    assert stream_trial.cannot_share_prompts(model) is None
    examples = draw(3, 4, shortest_prompt=4)
    names = [name for name, _ in tree_flatten(model.parameters())]
    for shared in (False, True):
        assert_equal(model, examples, collate(examples, 4, shared), compiled)
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    block = weakref.ref(model.layers.pop())
    gc.collect()
    assert block() is None, "a compiled graph holds what its blocks hold, MPI's group among it, for ever"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"blocks": 1, "adapt_embeddings": True}),  # the block between is frozen, and passes gradients on
        ("llama", {"blocks": 1, "method": "full"}),
        ("llama", {"method": "dora"}),
    ],
)
def test_blocks_that_are_made_again_have_the_same_gradients(
    tmp_path, monkeypatch, family: str, changes: dict[str, Any]
) -> None:
    model, examples = load(tmp_path, family, **changes), draw(4, 2)
    inputs = token_stream.arrays_of(collate(examples, 4, False).inputs)
    slopes_of = nn.value_and_grad(model, lambda inputs: logps_module.completion_logps(model, inputs).sum())
    kept = dict(tree_flatten(slopes_of(inputs)[1]))
    norm = type(next(part for name, part in model.layers[0].named_modules() if "norm" in name or name.startswith("ln")))
    calls, plain = [0], norm.__call__

    def counted(self: nn.Module, *args: Any) -> Any:
        calls[0] += 1
        return plain(self, *args)

    monkeypatch.setattr(norm, "__call__", counted)
    slopes_of(inputs)
    once, calls[0] = calls[0], 0
    checkpoint_blocks(model)
    again = dict(tree_flatten(slopes_of(inputs)[1]))
    assert calls[0] > once, "no block was made again"
    assert kept.keys() == again.keys() and any(mx.abs(slope).max().item() > 0 for slope in kept.values())
    for name, slope in kept.items():  # the same operations, on the same numbers
        assert mx.allclose(again[name], slope, rtol=0, atol=1e-6 * mx.linalg.norm(slope).item()), name


def test_softcapped_and_quantised_heads_keep_their_gradient(tmp_path) -> None:
    gemma = load(tmp_path, "gemma2")  # softcapped and tied
    examples = draw(5, 2)
    assert_equal(gemma, examples, collate(examples, 4, False))
    path = model_folder(tmp_path / "wide", hidden_size=64, intermediate_size=64)
    model = load_module.load(settings.ModelSettings(path=str(path), random_init=True), 0)
    nn.quantize(model, group_size=32, bits=8)
    adapters.make_trainable(model, settings.ModelSettings(path=str(path)), 0)
    assert stream_trial.cannot_share_prompts(model.train()) is None
    assert_equal(model, examples, collate(examples, 4, True))


def test_no_more_than_a_chunk_of_logits_is_made_at_a_time(tmp_path, monkeypatch) -> None:
    model, made = load(tmp_path, "llama"), []
    plain = logps_module._logps_and_slope
    monkeypatch.setattr(logps_module, "LOGITS_BYTES", 10 * VOCABULARY * 4)

    def listen(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
        made.append(logits.shape)
        return plain(logits, targets)

    monkeypatch.setattr(logps_module, "_logps_and_slope", listen)
    batch = collate(draw(0, 5), 4, False)
    mx.eval(logps_module.completion_logps(model, token_stream.arrays_of(batch.inputs)))
    assert sum(rows for rows, _ in made) == len(batch.targets) > 40 and max(rows for rows, _ in made) <= 10


@pytest.mark.parametrize("kind", ["plain", "biased", "quantised"])
@pytest.mark.parametrize("names", [("o_proj",), ("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj")])
def test_low_rank_linears_equal_mlx_lms_layers(kind: str, names: tuple[str, ...]) -> None:
    mx.random.seed(0)
    block = nn.Module()
    for i, name in enumerate(names):
        linear = nn.Linear(64, 32 * (i + 1), bias=kind == "biased")
        base = nn.QuantizedLinear.from_linear(linear, group_size=32) if kind == "quantised" else linear
        block[name] = LoRALinear.from_base(base, r=4 + i, scale=3.0)
        block[name].linear.freeze()
        block[name].lora_b = mx.random.normal(block[name].lora_b.shape)
    x, other = mx.random.normal((2, 5, 3, 64))
    weights = [mx.random.normal((5, 3, 32 * (i + 1))) for i in range(len(names))]

    def total(x: mx.array) -> mx.array:
        again = block[names[0]](other).sum()  # a second input, while the first may not have been asked for by all
        outputs = [block[name](x) for name in names]
        return again + block[names[-1]](x).sum() + sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))

    def run() -> list[mx.array]:
        gradients = nn.value_and_grad(block, total)(x)[1]
        return [*(block[name](x) for name in names), mx.grad(total)(x), *(a for _, a in tree_flatten(gradients))]

    expected = run()
    lora_layers.use_low_rank_linear(block)
    assert all(type(block[name]) is lora_layers.LowRankLinear for name in names)
    for ours, theirs in zip(run(), expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == mx.float32
        # Sums of 96 columns at most, or of 15 rows of them.
        assert mx.linalg.norm(ours - theirs).item() <= rounding.roundoff(96 * 2) * mx.linalg.norm(theirs).item()


def test_low_rank_products_are_made_in_the_models_type_from_float32_adapters(tmp_path) -> None:
    model = load(tmp_path, "llama", dtype="bfloat16")
    layer = model.layers[0].mlp.up_proj
    assert type(layer) is lora_layers.LowRankLinear and layer.lora_a.dtype == mx.float32
    x = mx.random.normal((7, 16)).astype(mx.bfloat16)
    value, gradients = nn.value_and_grad(layer, lambda x: layer(x).astype(mx.float32).sum())(x)
    assert layer(x).dtype == mx.bfloat16 and all(a.dtype == mx.float32 for _, a in tree_flatten(gradients))
    wanted = x.astype(mx.float32) @ (layer.linear.weight.T + layer.scale * layer.lora_a @ layer.lora_b)
    # Both products and their sum are rounded to bfloat16, and so is the adapter.
    assert mx.linalg.norm(layer(x) - wanted).item() <= rounding.roundoff(4, mx.bfloat16) * mx.linalg.norm(wanted).item()


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu])
def test_both_forms_of_the_loss_equal_float64(device: mx.DeviceType, monkeypatch) -> None:
    """Both on this device: which is taken is the only thing that asks for it."""
    monkeypatch.setattr(mx, "default_device", lambda: device)
    logits = mx.concatenate([mx.random.normal((6, 50)) * 5, mx.array([[0.0, 300.0, -300.0] + [0.0] * 47])])
    targets = mx.array([0, 49, 7, 7, 3, 2, 2])
    logps, slope = logps_module._logps_and_slope(logits, targets)
    exact = np.array(logits, np.float64)
    partition = np.log(np.exp(exact - exact.max(1, keepdims=True)).sum(1)) + exact.max(1)
    # A logit less the partition is rounded relatively to them; the partition is a sum of 50 terms.
    sizes = rounding.roundoff(4) * np.abs(exact).max(1) + rounding.roundoff(50)
    assert (np.abs(np.array(logps) - (exact[np.arange(7), np.array(targets)] - partition)) <= sizes).all()
    expected = np.eye(50)[np.array(targets)] - np.exp(exact - partition[:, None])
    assert (np.abs(np.array(slope) - expected) <= sizes[:, None]).all()


@pytest.mark.parametrize("ours", [patches.lean_swiglu, patches.quick_swiglu])
def test_swiglu_equals_mlx_lms_function(tmp_path, ours: Any) -> None:
    assert sys.modules[type(load(tmp_path, "llama")).__module__].swiglu is patches.quick_swiglu  # on this CPU
    gate = mx.concatenate([mx.random.normal((7, 64)) * 4, mx.array([[-200.0, -30.0, 0.0, 200.0] * 16])])
    x, weight = mx.random.normal((2, *gate.shape))
    (plain,), expected = mx.vjp(lambda gate, x: gate * mx.sigmoid(gate) * x, [gate, x], [weight])
    (value,), gradients = mx.vjp(ours, [gate, x], [weight])
    for mine, theirs in zip([value, *gradients], [plain, *expected], strict=True):
        assert mx.linalg.norm(mine - theirs).item() <= 1e-5 * mx.linalg.norm(theirs).item()


def test_gpt_oss_hands_its_scale_on_by_position(tmp_path) -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "hidden_size": 32, "sliding_window": 128}
    shape |= {"rope_theta": 1e4, "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": rope}
    path = model_folder(tmp_path, model_type="gpt_oss", **shape)
    model = load_module.load(settings.ModelSettings(path=str(path), random_init=True), 0)
    assert stream_trial.cannot_share_prompts(model) is None
