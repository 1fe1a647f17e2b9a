"""Samples of a model's own answers: what they are drawn from, what they do not depend on, where they end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import batch_generate

from lib.errors import Stopped
from lib.evaluate.sampler import BLOCK, Prompt, Sample, Sampler, draw, uniforms
from lib.model.stream_trial import cannot_share_prompts
from tests import families, rounding
from tests.test_forward import load

VOCABULARY = 48
END = 1


@dataclass(frozen=True)
class Sampling:
    """As the settings have it."""

    samples: int = 3
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 2 * BLOCK + 3
    stop: tuple[str, ...] = ()
    batch_size: int = 8


class Letters:
    """A tokenizer of one letter a token."""

    eos_token_ids = (END,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 64 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + token) for token in ids)


def prompts_of(count: int, seed: int = 0, longest: int = 40) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(i, rng.integers(2, VOCABULARY, rng.integers(1, longest)).tolist()) for i in range(count)]


def sampled(
    model: nn.Module, settings: Sampling, prompts: Sequence[Prompt], seed: Sequence[int] = (0, 1)
) -> list[Sample]:
    found = Sampler(model, Letters(), settings).sample(prompts, seed)  # type: ignore[arg-type]
    found.sort(key=lambda sample: (sample.prompt_id, sample.k))
    assert [(s.prompt_id, s.k) for s in found] == sorted((p.id, k) for p in prompts for k in range(settings.samples))
    return found


def logps_of(model: nn.Module, sample: Sample, temperature: float = 1.0) -> np.ndarray:
    """Of the sample's tokens, by the model alone, without any cache."""
    wide = np.array(model(mx.array([sample.prompt_tokens + sample.tokens]))[0], np.float64) / temperature
    wide = wide[len(sample.prompt_tokens) - 1 : -1]
    wide -= wide.max(axis=1, keepdims=True)
    logps = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return logps[np.arange(len(sample.tokens)), sample.tokens]


# ---- Numbers and tokens


def test_numbers_follow_from_seed_prompt_and_sample_alone() -> None:
    row = uniforms((3, 1), 7, 2, 100)
    assert row.dtype == np.float32 and row.min() >= 0 and row.max() < 1
    assert (uniforms((3, 1), 7, 2, 10) == row[:10]).all()
    others = [uniforms((3, 2), 7, 2, 100), uniforms((3, 1), 8, 2, 100), uniforms((3, 1), 7, 3, 100)]
    assert all((other != row).mean() > 0.9 for other in others)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_as_often_as_they_are_likely(top_p: float, temperature: float) -> None:
    """Numbers that are evenly spaced give each token its share of them, to one."""
    logits, count = np.random.default_rng(0).normal(0, 2, 20).astype(np.float32), 1024
    numbers = mx.array((np.arange(count) / count).astype(np.float32))
    tokens, logps = draw(mx.broadcast_to(mx.array(logits), (count, 20)), numbers, temperature, top_p)
    likely = np.exp(logits.astype(np.float64) / temperature)
    likely /= likely.sum()
    np.testing.assert_allclose(np.array(logps), np.log(likely)[np.array(tokens)], rtol=1e-5, atol=1e-6)
    order = np.argsort(-likely)
    kept = order[: int(np.searchsorted(np.cumsum(likely[order]), top_p)) + 1] if top_p < 1 else order
    share = np.zeros(20)
    share[kept] = likely[kept] / likely[kept].sum()
    assert np.abs(np.bincount(np.array(tokens), minlength=20) - count * share).max() <= 2


# ---- What samples depend on


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "qwen3_moe", "gpt2"])
def test_log_probabilities_are_those_of_the_model_alone(tmp_path, family: str) -> None:
    model = load(tmp_path, family).eval()
    sampler = Sampler(model, Letters(), Sampling(temperature=0.8))  # type: ignore[arg-type]
    limit = rounding.roundoff(64) * VOCABULARY
    for sample in sampler.sample(prompts_of(5, longest=30), (1,)):  # and GPT-2 has a table of 64 positions
        assert np.abs(logps_of(model, sample, 0.8) - sample.logps).max() <= limit


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_answers_that_are_not_wanted_any_more_are_left(tmp_path, family: str) -> None:
    sampler = Sampler(load(tmp_path, family).eval(), Letters(), Sampling())  # type: ignore[arg-type]
    questions = iter([True, True])
    found = list(sampler.sample(prompts_of(5, longest=20), (1,), lambda: next(questions, False)))
    assert len(found) < 5 * Sampling.samples


@pytest.mark.parametrize("family", ["gemma2", "mamba", "qwen3_5", "kimi_linear", "lfm2", "granitemoehybrid", "jamba"])
@pytest.mark.long("granitemoehybrid", "jamba", "lfm2")
def test_windows_and_recurrent_states_are_sampled_by_their_own_caches(tmp_path, family: str) -> None:
    """Drawn and greedy tokens of padded prompts, by whole rows without a cache; after a trial of the stream, too."""
    model = families.build(families.stored(tmp_path / "stored", family)).eval()
    assert cannot_share_prompts(model) is None
    limit = rounding.roundoff(64) * VOCABULARY
    for sample in sampled(model, Sampling(), prompts_of(3)):
        assert np.abs(logps_of(model, sample) - sample.logps).max() <= limit
    for sample in sampled(model, Sampling(samples=1, temperature=0), prompts_of(3, seed=1)):
        logits = model(mx.array([sample.prompt_tokens + sample.tokens]))[0, len(sample.prompt_tokens) - 1 : -1]
        chosen = mx.take_along_axis(logits, mx.array(sample.tokens)[:, None], axis=-1)[:, 0]
        assert len(sample.tokens) and mx.all(chosen >= logits.max(axis=-1) - limit)


@pytest.mark.long
def test_who_samples_and_in_which_batch_changes_no_token(tmp_path) -> None:
    """Logits of another batch may be rounded otherwise; a token would change where a number lies within that rounding."""
    model, prompts = load(tmp_path, "llama").eval(), prompts_of(9)
    whole = sampled(model, Sampling(), prompts)
    again = sampled(model, Sampling(), prompts)
    assert whole == again  # to the last bit
    ends = {len(sample.tokens) for sample in whole}
    assert len(ends) > 5, "rows end at various times, so others begin beside them"
    others = [
        sampled(model, Sampling(batch_size=64), prompts[::-1][:4]),
        [sample for part in (prompts[:2], prompts[2:5], prompts[5:]) for sample in sampled(model, Sampling(), part)],
        sampled(model, Sampling(batch_size=3), prompts),
    ]
    by_name = {(sample.prompt_id, sample.k): sample for sample in whole}
    for sample in (sample for other in others for sample in other):
        first = by_name[sample.prompt_id, sample.k]
        assert sample.tokens == first.tokens and sample.finish == first.finish
        np.testing.assert_allclose(sample.logps, first.logps, atol=rounding.roundoff(64) * VOCABULARY)
    assert [s.tokens for s in sampled(model, Sampling(), prompts, (0, 2))] != [s.tokens for s in whole]


# ---- Where they end


def test_a_temperature_of_zero_is_greedy(tmp_path) -> None:
    model, prompts = load(tmp_path, "llama").eval(), prompts_of(4)
    found = sampled(model, Sampling(samples=2, temperature=0), prompts)
    options = {"max_tokens": Sampling.max_tokens, "return_token_ids": True}
    wanted = batch_generate(model, Letters(), [p.tokens for p in prompts], **options)
    for sample in found:
        assert Letters().decode(wanted.token_ids[sample.prompt_id]) == sample.text
        np.testing.assert_allclose(sample.logps, logps_of(model, sample), atol=rounding.roundoff(64) * VOCABULARY)


def test_answers_end_at_end_tokens_stop_strings_and_the_longest_length(tmp_path) -> None:
    model, prompts = load(tmp_path, "llama").eval(), prompts_of(8)
    plain = sampled(model, Sampling(), prompts)
    assert {sample.finish for sample in plain} == {"stop", "length"}
    for sample in plain:
        assert len(sample.tokens) == len(sample.logps) <= Sampling.max_tokens
        assert (sample.tokens[-1] == END) == (sample.finish == "stop") and END not in sample.tokens[:-1]
        assert sample.text == Letters().decode([token for token in sample.tokens if token != END])
    # Two letters that come somewhere, often across two looks at what was drawn.
    letters = [sample.text[at : at + 2] for sample, at in zip(plain, (4, BLOCK - 1, 9), strict=False)]
    stops = tuple(two for two in letters if len(two) == 2)
    assert stops
    for sample, whole in zip(sampled(model, Sampling(stop=stops), prompts), plain, strict=True):
        cut = min((at for stop in stops if (at := whole.text.find(stop)) >= 0), default=None)
        count = len(whole.tokens) if cut is None else cut + 2
        assert sample.text == whole.text[:cut] and sample.tokens == whole.tokens[:count]
        assert sample.finish == (whole.finish if cut is None else "stop")
        # Rows that end earlier make another batch, which may be rounded otherwise.
        limit = rounding.roundoff(64) * VOCABULARY
        np.testing.assert_allclose(sample.logps, whole.logps[:count], atol=limit)
    short = sampled(model, replace(Sampling(), max_tokens=1), prompts)
    assert [s.tokens for s in short] == [s.tokens[:1] for s in plain]


def test_probabilities_that_are_not_finite_stop_the_run(tmp_path) -> None:
    model = load(tmp_path, "llama").eval()
    model.update({"lm_head": {"weight": model.lm_head.weight * np.nan}})
    with pytest.raises(Stopped, match="prompt 0 are not finite"):
        sampled(model, Sampling(), prompts_of(2))
