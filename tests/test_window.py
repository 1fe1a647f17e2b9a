"""Sliding windows: each token attends to the last few alone, in training, scoring and answers; memory linear in the length."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import create_causal_mask

from lib.config.settings import DataSettings, ModelSettings
from lib.data import tokenizer as tokenizer_module
from lib.data.batch import collate
from lib.data.dataset import Example
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate.evaluator import greedy
from lib.model import load as load_module
from lib.model import logps, long_attention, stream_trial, token_stream
from lib.training import reference_model
from tests import families, rounding, tiny
from tests.test_forward import draw, load, results_of
from tests.tiny import ROOT, model_folder

QUICKSTART = str(ROOT / "configs/quickstart/model")


class Banded:
    """The plain form: a cache that hands every block a mask of the whole square."""

    offset = 0

    def __init__(self, window: int):
        self.window = window

    def make_mask(self, N: int, window_size: int | None = None, **_: Any) -> mx.array:  # noqa: N803
        return create_causal_mask(N, window_size=min(self.window, window_size or N))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def masked_logps(model: nn.Module, examples: list[Example], window: int) -> mx.array:
    """One sequence at a time, through the model's own call and a mask: [b, K]."""
    sums = []
    for example in examples:
        for completion in example.completions:
            tokens = mx.array(np.concatenate([example.prompt_ids, completion]))
            logits = model(tokens[None, :-1], cache=[Banded(window)] * len(model.layers))[0].astype(mx.float32)
            scored = mx.take_along_axis(nn.log_softmax(logits, axis=-1), tokens[1:, None], axis=-1)[:, 0]
            sums.append(scored[max(len(example.prompt_ids) - 1, 0) :].sum())
    return mx.stack(sums).reshape(len(examples), -1)


@pytest.mark.parametrize("window", [5, 7, 100])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "mixtral", "gpt2"])
@pytest.mark.long("gpt2-*", "mixtral-*", "qwen3-*", "*-7")
def test_a_window_equals_its_mask_in_every_layout(tmp_path, family: str, window: int) -> None:
    model = load(tmp_path, family, attention_window=window)
    assert stream_trial.cannot_share_prompts(model) is None
    layouts = set()
    for seed, count, multiple, shared, shortest in [(0, 5, 4, False, 0), (0, 5, 4, True, 0), (2, 3, 8, True, 9)]:
        examples = draw(seed, count, shortest_prompt=shortest)
        batch = collate(examples, multiple, shared)
        layouts.add((batch.prefix_length > 0, batch.suffix_indices is None))
        inputs = token_stream.arrays_of(batch.inputs)

        def ours(inputs: dict[str, Any] = inputs) -> mx.array:
            return logps.completion_logps(model, inputs)

        def plain(examples: list[Example] = examples) -> mx.array:
            return masked_logps(model, examples, window)

        wanted = rounding.expected_and_limits(model, lambda plain=plain: results_of(model, plain))
        rounding.assert_within(results_of(model, ours), *wanted)
    assert layouts >= {(False, True), (False, False), (True, False)}


@pytest.mark.parametrize("window", [1, 2, 3, 8, 30])
@pytest.mark.parametrize(("behind", "length"), [(0, 23), (5, 16), (9, 1), (16, 8), (20, 3)])
def test_blocks_equal_the_masked_square(window: int, behind: int, length: int) -> None:
    mx.random.seed(0)
    q = mx.random.normal((2, 4, length, 8))
    k, v = mx.random.normal((2, 2, 2, behind + length, 8))
    mask = create_causal_mask(length, offset=behind, window_size=window)

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)

    def blocks(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return long_attention.local_attention(q, k, v, window, scale=0.3)

    (wanted, expected), (out, gradients) = (mx.vjp(one, [q, k, v], [mx.cos(q)]) for one in (plain, blocks))
    for ours, theirs in zip([*out, *gradients], [*wanted, *expected], strict=True):
        assert ours.shape == theirs.shape
        assert mx.linalg.norm(ours - theirs).item() <= 1e-5 * mx.linalg.norm(theirs).item() + 1e-6


def test_answers_and_scores_of_a_trained_model_look_back_as_far() -> None:
    settings = ModelSettings(path=QUICKSTART, attention_window=6)
    model, tokenizer = load_module.load(settings, 0), tokenizer_module.load_tokenizer_of(settings)
    prompts = [tokenizer.encode(text) for text in ("Add 797 and 370.", "Add 12 and 5 and then some more of it.")]
    texts = greedy(model, tokenizer, prompts, 12, World())[0]
    for prompt, text in zip(prompts, texts, strict=True):
        ids = list(prompt)
        for _ in range(12):
            logits = model(mx.array([ids]), cache=[Banded(6)] * len(model.layers))
            ids.append(mx.argmax(logits[0, -1]).item())
            if ids[-1] in tokenizer.eos_token_ids:
                ids.pop()
                break
        assert text == tokenizer.decode(ids[len(prompt) :])
    assert texts != greedy(load_module.load(ModelSettings(path=QUICKSTART), 0), tokenizer, prompts, 12, World())[0]
    assert load_module.fingerprint(settings, 0) != load_module.fingerprint(ModelSettings(path=QUICKSTART), 0)


def test_models_that_cannot_are_refused_in_a_line(tmp_path) -> None:
    path = families.stored(tmp_path / "stored", "gpt_bigcode")
    model = load_module.load(ModelSettings(path=str(path), attention_window=4), 0)
    with pytest.raises(UserError, match=r"model.attention_window=4 is not for this model: .* do not take a stream"):
        reference_model.layout(model, DataSettings(train="-", shared_prompts=False), World())
    with pytest.raises(UserError, match="of 5 tokens; leave it out, or widen it"):
        load(tmp_path, "gemma3_text", attention_window=4)
    recurrent = {"state_size": 4, "conv_kernel": 2, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
    path = model_folder(tmp_path / "mamba", model_type="mamba", **recurrent)
    with pytest.raises(UserError, match="leave it out"):
        load_module.load(ModelSettings(path=str(path), random_init=True, attention_window=4), 0)


def test_a_run_trains_and_evaluates_with_a_window(tmp_path) -> None:
    narrow = tiny.run(tmp_path, "narrow", model__attention_window=4)
    assert tiny.records(narrow, "evaluation")
    whole_rows = tiny.run(tmp_path, "whole-rows", model__attention_window=4, data__shared_prompts="false")
    wide, limit = tiny.run(tmp_path, "wide"), rounding.limit_of(narrow)
    assert tiny.difference(narrow, whole_rows) <= limit
    assert tiny.difference(narrow, wide) > 100 * limit
