"""Adapters of unlike layers, LoRA+, NEFTune, optimizer states of 8 bits: each against its paper, mlx-lm, and whole runs."""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_adapters, load_model

from lib.config import load
from lib.config.settings import ModelSettings, TrainSettings
from lib.data.batch import Batch, collate
from lib.data.dataset import load_dataset
from lib.data.tokenizer import vocabulary
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapter_files, adapters
from lib.model import load as models
from lib.model.logps import completion_logps
from lib.model.token_stream import arrays_of
from lib.training import reference_model, update
from lib.training.optimizers import Codes, make_optimizer
from lib.training.step import noisy
from tests import rounding, tiny
from tests.test_step import build, examples, means_of, reference_logps, results_of, step_gradients

# ---- Ranks, scales and layers


def trained(path: Path, *words: str, seed: int = 3, **changes: Any) -> tuple[nn.Module, ModelSettings]:
    """A stored model with adapters that are not zero."""
    settings = load.load(None, [f"model.path={path}", "data.train=-", *words]).model
    return tiny.moved(settings, seed=seed, draw=seed), settings


def ranks_and_scales(model: nn.Module) -> dict[str, tuple[int, float]]:
    return {name: (part.lora_a.shape[-1], part.scale) for name, part in model.named_modules() if "lora_a" in part}


LAYERS = [
    (["model.rank_pattern={q_proj: 2, 'layers.1.mlp.*': 16}"], {}),
    (["model.alpha=12", "model.use_rslora=true", "model.rank_pattern={o_proj: 3}", "model.rank=4"], {}),
    (
        [
            "model.alpha=8",
            "model.alpha_pattern={'mlp.(up|down)_proj': 2}",
            "model.keys=[self_attn.q_proj, mlp.up_proj]",
        ],
        {},
    ),
    (["model.blocks=[0, 2-3]"], {}),
    (["model.adapt_embeddings=true", "model.rank_pattern={embed_tokens: 3}"], {}),
    (["model.adapt_embeddings=true", "model.blocks=[1]"], {"tie_word_embeddings": True}),
    (["model.adapt_embeddings=true", "model.alpha=4", "model.rank_pattern={lm_head: 2}"], {"quantised": True}),
    (["model.method=dora", "model.alpha=6", "model.rank_pattern={q_proj: 2}"], {}),
]


@pytest.mark.parametrize(("words", "shape"), LAYERS, ids=lambda case: " ".join(case) if isinstance(case, list) else "")
def test_mlx_lm_loads_adapters_of_unlike_layers(tmp_path, words: list[str], shape: dict[str, Any]) -> None:
    path = tiny.stored_model(tmp_path, num_hidden_layers=4, **shape)
    model, settings = trained(path, *words)
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter_files.save_trained(model, settings, folder)
    theirs, _ = load_model(path)
    theirs = load_adapters(theirs, str(folder))
    tokens = mx.array([[3, 7, 30, 2, 9]])
    expected, limits = rounding.expected_and_limits(model, lambda: [{"logits": model(tokens)}])
    rounding.assert_within([{"logits": theirs(tokens)}], expected, limits)
    plain = models.load(settings, 3)
    adapters.make_trainable(plain, settings.model_copy(update={"adapter": str(folder)}), 3)
    assert ranks_and_scales(plain) == ranks_and_scales(model)
    for name, array in adapter_files.trainable(plain).items():
        assert mx.allclose(array, adapter_files.trainable(model)[name], rtol=rounding.roundoff(2), atol=0), name


def test_every_layer_has_the_rank_and_scale_of_the_first_pattern_that_ends_its_name(tmp_path) -> None:
    words = ["model.alpha=8", "model.rank_pattern={layers.0.self_attn.q_proj: 2, q_proj: 16}", "model.rank=4"]
    path = tiny.stored_model(tmp_path)
    plain = ranks_and_scales(trained(path, *words)[0])
    stabilised = ranks_and_scales(trained(path, *words, "model.use_rslora=true", "model.alpha_pattern={q_proj: 32}")[0])
    names = ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj")
    first, second, other = (f"model.layers.{name}" for name in names)
    assert (plain[first], plain[second], plain[other]) == ((2, 4.0), (16, 0.5), (4, 2.0))
    assert (stabilised[first], stabilised[second], stabilised[other]) == ((2, 32 / math.sqrt(2)), (16, 8.0), (4, 4.0))


def test_an_adapter_of_other_ranks_is_refused_by_its_first_layer(tmp_path) -> None:
    path, folder = tiny.stored_model(tmp_path), tmp_path / "adapter"
    folder.mkdir()
    adapter_files.save_trained(*trained(path, "model.rank_pattern={q_proj: 2}"), folder)
    with pytest.raises(UserError, match=r"add model.rank=2 model.scale=2.0 .of model.layers.0.self_attn.q_proj"):
        trained(path, f"model.adapter={folder}")


def test_gradients_reach_the_embedding_and_a_tied_head(tmp_path) -> None:
    words = ["model.adapt_embeddings=true", "model.blocks=[0]", "train.max_grad_norm=null"]
    model, settings = build(tmp_path, *words, tie_word_embeddings=True)
    batch, reference = examples(2), reference_logps(2)
    _, gradients = step_gradients(model, settings, batch, reference, [1, 1])
    found = {name: g for name, g in gradients.items() if "embed_tokens" in name}
    assert {name.rpartition(".")[2] for name in found} == {"lora_a", "lora_b"}
    # The same model with its weights merged: of W + s A B the chain rule gives both factors' gradients.
    full = ["model.method=full", "train.max_grad_norm=null"]
    merged_model, merged_settings = build(tmp_path / "merged", *full, tie_word_embeddings=True)
    ours = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}
    scale, weights = settings.model.scale, {}
    for name in ours:
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            change = scale * ours[name] @ ours[f"{layer}.lora_b"]
            inner = "embedding" if "embed" in layer else "linear"
            weights[f"{layer}.weight"] = ours[f"{layer}.{inner}.weight"] + (change if "embed" in layer else change.T)
        elif ".lora_" not in name and ".linear." not in name and ".embedding." not in name:
            weights[name] = ours[name]
    merged_model.update(tree_unflatten([(name, mx.array(a.astype(np.float32))) for name, a in weights.items()]))
    _, whole = step_gradients(merged_model, merged_settings, batch, reference, [2])
    of_weight = whole["model.embed_tokens.weight"]
    a, b = ours["model.embed_tokens.lora_a"], ours["model.embed_tokens.lora_b"]
    expected = {"lora_a": scale * of_weight @ b.T, "lora_b": scale * a.T @ of_weight}
    _, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, [1, 1]))
    named = {f"model.embed_tokens.{name}": array for name, array in expected.items()}
    rounding.assert_within([found], [named], limits[1:])


# ---- LoRA+


def test_loraplus_gives_b_its_own_rate_and_changes_nothing_else(tmp_path) -> None:
    """Weight decay too, as with parameter groups of two rates; a ratio of 1 is no LoRA+, to the bit."""
    rng = np.random.default_rng(0)

    def tree() -> dict[str, Any]:
        arrays = {name: mx.array(rng.normal(size=(6, 5)).astype(np.float32)) for name in ("lora_a", "lora_b", "m")}
        return {"layers": [{}, {"q_proj": arrays}]}

    start, gradients = tree(), [tree() for _ in range(3)]

    def after(train: TrainSettings, ratio: float | None) -> dict[str, mx.array]:
        optimizer, parameters = make_optimizer(train), start
        for each in gradients:
            optimizer.learning_rate = train.learning_rate
            parameters = update.apply_gradients(optimizer, each, parameters, ratio)
        assert optimizer.step.item() == len(gradients)
        return {name.rpartition(".")[2]: array for name, array in tree_flatten(parameters)}

    for name in ("adamw", "lion", "adamw_8bit"):
        train = TrainSettings(optimizer=name, learning_rate=1e-2, weight_decay=0.1)
        fast = train.model_copy(update={"learning_rate": 0.16})
        plain, plus, all_fast = after(train, None), after(train, 16.0), after(fast, None)
        assert mx.array_equal(plus["lora_a"], plain["lora_a"]) and mx.array_equal(plus["m"], plain["m"])
        assert mx.allclose(plus["lora_b"], all_fast["lora_b"], rtol=rounding.roundoff(16), atol=1e-7)
        assert not mx.allclose(plus["lora_b"], plain["lora_b"])
        assert all(mx.array_equal(after(train, 1.0)[key], plain[key]) for key in plain)


# ---- NEFTune


def noise_of(batch: Batch, size: int) -> dict[tuple[int, int], np.ndarray]:
    """Each token's noise, by its row in the data and its number there."""
    ((made, _),) = noisy([(batch, None)], 5.0, seed=7, step=3)
    assert made.noise_keys is not None and made.noise_scales is not None
    noise = mx.vmap(lambda key: mx.random.uniform(-1, 1, (size,), key=key))(mx.array(made.noise_keys))
    scaled = np.array(noise) * made.noise_scales[:, None]
    return {(int(batch.rows[row]), int(number)): scaled[i] for i, (row, number) in enumerate(batch.places) if row >= 0}


def test_noise_depends_on_the_row_and_never_on_the_layout() -> None:
    rows = examples(5)
    whole = noise_of(collate(rows, 4, True), 8)
    assert len(whole) == sum(len(e.prompt_ids) + sum(len(c) - 1 for c in e.completions) for e in rows)
    for shared in (True, False):
        for part in ([rows[3]], [rows[1], rows[4]], rows[::-1]):
            for place, noise in noise_of(collate(part, 16, shared), 8).items():
                assert np.array_equal(noise, whole[place]), (shared, place)
    for (row, _), noise in whole.items():
        longest = len(rows[row].prompt_ids) + max(map(len, rows[row].completions)) - 1
        assert np.abs(noise).max() <= 5 / math.sqrt(longest)
    values = np.concatenate([noise * math.sqrt(len(rows[row].prompt_ids)) for (row, _), noise in whole.items()])
    assert len(np.unique(values)) > 0.99 * len(values) and abs(np.sign(values).mean()) < 4 / math.sqrt(len(values))


def test_a_step_with_noise_is_the_same_in_any_micro_batches_and_no_evaluation_has_any(tmp_path) -> None:
    model, settings = build(tmp_path, "train.max_grad_norm=null", "train.neftune_noise_alpha=5")
    batch, reference = examples(5), reference_logps(5)
    expected, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, [5]))
    for sizes in ([1] * 5, [3, 2]):
        result, gradients = step_gradients(model, settings, batch, reference, sizes, shared=len(sizes) == 2)
        rounding.assert_within([means_of(result), gradients], expected, limits)
    quiet = settings.model_copy(update={"train": settings.train.model_copy(update={"neftune_noise_alpha": None})})
    silent, _ = step_gradients(model, quiet, batch, reference, [5])
    assert abs(silent.means["loss"] - expected[0]["loss"]) > 100 * limits[0]["loss"]
    ((made, _),) = noisy([(collate(batch, 4, True), None)], 5.0, 0, 0)
    model.eval()
    noisy_one, plain = (completion_logps(model, arrays_of(one.inputs)) for one in (made, collate(batch, 4, True)))
    assert mx.array_equal(noisy_one, plain)


# ---- Optimizer states of 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_dynamic_tree_quantisation(signed: bool) -> None:
    codes = Codes(signed)
    numbers = np.array(codes.numbers)
    assert len(np.unique(numbers)) == 256 and numbers.max() == 1 and (numbers < 0).any() == signed
    rng = np.random.default_rng(0)
    array = (10.0 ** rng.uniform(-9, 2, 5000) * (rng.choice([-1, 1], 5000) if signed else 1)).astype(np.float32)
    stored, largest = codes.encode(mx.array(array))
    assert stored.dtype == mx.uint8 and stored.shape == (20, 256) and largest.shape == (20,)
    decoded = np.array(codes.decode(stored, largest, (50, 100))).reshape(-1)
    scales = np.repeat(np.array(largest), 256)[:5000]
    errors = np.abs(decoded - array)
    assert (errors <= np.abs(array[:, None] - scales[:, None] * numbers).min(axis=1) + scales * 1e-6).all()
    zeros, none = codes.zeros(5000)
    assert not np.array(codes.decode(zeros, none, (5000,))).any()
    assert not np.array(codes.decode(*codes.encode(mx.zeros(300)), (300,))).any()


def test_no_second_moment_of_8_bits_becomes_zero_beside_larger_ones() -> None:
    """A column of large gradients among small ones in a block: the root of a zero would divide the small ones' mean."""
    gradient = mx.where(mx.arange(256) % 64 == 0, 1e-2, 1e-6) * mx.ones((32, 1))
    largest = {}
    for name in ("adamw", "adamw_8bit"):
        optimizer = make_optimizer(TrainSettings(optimizer=name, learning_rate=0.1))
        parameters: dict[str, Any] = {"large": mx.zeros((32, 256))}
        moves = []
        for _ in range(40):
            before = parameters["large"]
            parameters = optimizer.apply_gradients({"large": gradient}, parameters)
            moves.append(mx.abs(parameters["large"] - before).max().item() / 0.1)
        largest[name] = max(moves)
    assert largest["adamw"] <= 1.01 and largest["adamw_8bit"] <= 1.5, largest  # rounded to 8 bits; it was over 50


# ---- A reference that follows


@pytest.mark.parametrize(("method", "alpha"), [("lora", 1.0), ("full", 0.6)])
def test_the_reference_is_what_the_paper_makes_of_the_policies_before(tmp_path, method: str, alpha: float) -> None:
    """Every step's loss is that of its own policy and its own reference, which are made here from the checkpoints."""
    words = [f"model.method={method}", "train.schedule=constant", "train.global_batch_size=21", "train.steps=5"]
    words += ["train.learning_rate=1e-2", "checkpoint.every=1", "checkpoint.keep=9"]
    words += ["train.reference_sync_steps=2", f"train.reference_mixup_alpha={alpha}"]
    run = tiny.run(tmp_path, words=words)
    settings = load.load(run / "config.yaml", [])
    data = load_dataset(settings.data.train, settings.data, "preference", None, vocabulary=vocabulary(settings.model))
    model = models.load(settings.model, settings.train.seed)
    adapters.make_trainable(model, settings.model, settings.train.seed)

    def arrays(step: int, file: str = "adapters") -> dict[str, mx.array]:
        return dict(mx.load(str(run / f"checkpoints/step-{step:08d}/{file}.safetensors")))

    def logps(weights: dict[str, mx.array]) -> np.ndarray:
        model.update(tree_unflatten(list(weights.items())))
        return reference_model.dataset_logps(model, data, World(), [1], settings).astype(np.float64)

    start = adapter_files.trainable(model)
    policy = reference = start
    for step, record in enumerate(tiny.steps_of(run), 1):
        now = logps(policy)
        ratios = now - logps(reference)
        loss = np.log1p(np.exp(-settings.train.beta * (ratios[:, 0] - ratios[:, 1]))).mean()
        assert record["loss"] == pytest.approx(loss, abs=rounding.roundoff(48) * np.abs(now).max()), step
        policy = arrays(step)
        if step % 2 == 0:
            reference = {name: alpha * policy[name] + (1 - alpha) * array for name, array in reference.items()}
        stored = arrays(step, "reference")
        limits = {name: rounding.roundoff(4) * mx.abs(array).max() for name, array in reference.items()}
        assert all(mx.abs(stored[name] - array).max() <= limits[name] for name, array in reference.items()), step
    assert step == 5 and any(not mx.array_equal(reference[name], array) for name, array in start.items())
