"""The step against an independent float64 reference: log-probabilities, losses, rewards and every parameter's gradient."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from lib import errors
from lib.config import load
from lib.config.settings import Config, TrainSettings
from lib.data.batch import MicroBatch, collate
from lib.data.dataset import Example
from lib.distributed import world as world_module
from lib.distributed.world import World
from lib.model import adapter_files, stream_trial
from lib.training.optimizers import learning_rate, make_optimizer
from lib.training.step import Step, StepRecord
from lib.training.update import UpdateRule
from tests import float64, rounding
from tests.test_losses import OPTIONS, loss64
from tests.tiny import LLAMA, model_folder, moved, pairs

HEADS, KV_HEADS = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"]


def build(folder: Path, *words: str, **changes: Any) -> tuple[nn.Module, Config]:
    """A tiny Llama whose adapters are not zero, and its settings."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "vocab_size": 20, "num_hidden_layers": 1}
    path = model_folder(folder / "model", **sizes, **changes)
    settings = load.load(None, [f"model.path={path}", "data.train=-", "model.random_init=true", "model.rank=2", *words])
    model = moved(settings.model, 0.2, seed=3, draw=5)
    assert stream_trial.cannot_share_prompts(model) is None
    return model, settings


def examples(count: int = 3) -> list[Example]:
    rows = [map(np.array, row.values()) for row in pairs(count, seed=2, vocab_size=20, longest=5)]
    return [Example(i, prompt, (chosen, rejected)) for i, (prompt, chosen, rejected) in enumerate(rows)]


def merged(parameters: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """Plain float64 weights: W + scale (A B)^T, rescaled by DoRA's m / |row| where there is one."""
    weights = {name: a for name, a in parameters.items() if ".lora_" not in name and not name.endswith("_proj.m")}
    weights = {name.replace(".linear.weight", ".weight"): a for name, a in weights.items()}
    for name, a in parameters.items():
        if name.endswith(".lora_a"):
            layer = name.removesuffix(".lora_a")
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * (a @ parameters[f"{layer}.lora_b"]).T
            if f"{layer}.m" in parameters:
                # The norm is a constant in the gradient, as in DoRA's section 4.3.
                norm = parameters.get(f"{layer}.norm", np.linalg.norm(weights[f"{layer}.weight"], axis=1))
                weights[f"{layer}.weight"] = weights[f"{layer}.weight"] * (parameters[f"{layer}.m"] / norm)[:, None]
    return weights


def reference_logps(count: int) -> np.ndarray:
    return -np.abs(np.random.default_rng(0).normal(9.0, 2.0, (count, 2))).astype(np.float32)


def float64_logps(parameters: dict[str, np.ndarray], batch: list[Example], scale: float) -> np.ndarray:
    """The log-probability of every completion, one sequence at a time: [B, K]."""
    weights = merged(parameters, scale)
    parts = [[(e.prompt_ids.tolist(), completion.tolist()) for completion in e.completions] for e in batch]
    return np.array([[float64.completion_logp(weights, *part, HEADS, KV_HEADS) for part in of] for of in parts])


def loss_of_logps(logps: np.ndarray, batch: list[Example], reference: np.ndarray, train: TrainSettings) -> float:
    """The mean loss over pairs (SFT: over tokens)."""
    total, tokens = 0.0, 0
    for example, own, (rw, rl) in zip(batch, logps, reference.astype(np.float64), strict=True):
        if train.loss == "sft":
            total, tokens = total - own[0], tokens + len(example.completions[0])
        else:
            pair = (*own, rw, rl, *map(len, example.completions))
            options = {name: getattr(train, name) for name in OPTIONS}
            total += sum(weight * loss64(name, pair, options) for name, weight in train.loss_terms)
    return total / (tokens if train.loss == "sft" else len(batch))


def float64_loss(
    parameters: dict[str, np.ndarray], batch: list[Example], reference: np.ndarray, train: TrainSettings, scale: float
) -> float:
    return loss_of_logps(float64_logps(parameters, batch, scale), batch, reference, train)


class Spy(optim.SGD):
    """Keeps the gradients that the step arrived at, and leaves the weights alone."""

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        self.state["seen"] = gradients
        return parameters


def parts_of(sizes: Sequence[int]) -> list[slice]:
    """Consecutive parts of these sizes."""
    return [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]


def gradients_of(
    model: nn.Module, settings: Config, batches: Sequence[MicroBatch], rewards: list[float] | None = None
) -> tuple[StepRecord, dict[str, np.ndarray]]:
    """A step's result and its gradients; rewards: changed as the step does."""
    spy = Spy(learning_rate=0.0)
    step = Step(model, spy, settings.train, World())
    step.rewards = rewards or step.rewards
    result = step(0, 1e-4, batches)
    return result, {name: np.array(g, np.float64) for name, g in tree_flatten(spy.state["seen"])}


def step_gradients(
    model: nn.Module,
    settings: Config,
    batch: list[Example],
    reference: np.ndarray,
    sizes: list[int],
    shared: bool = True,
) -> tuple[Any, dict[str, np.ndarray]]:
    if settings.train.loss == "sft":
        batch = [dataclasses.replace(example, completions=example.completions[:1]) for example in batch]
    batches = [(collate(batch[part], 4, shared), reference[part]) for part in parts_of(sizes)]
    return gradients_of(model, settings, batches)


def means_of(result: Any) -> dict[str, float]:
    return {name: value for name, value in result.means.items() if value is not None}


def results_of(
    model: nn.Module, settings: Config, batch: list[Example], reference: np.ndarray, sizes: list[int]
) -> Callable[[], Sequence[rounding.Results]]:
    """For tests.rounding: a step's means and gradients, computed anew at each call."""

    def compute() -> Sequence[rounding.Results]:
        result, gradients = step_gradients(model, settings, batch, reference, sizes)
        return [means_of(result), gradients]

    return compute


# Those of tests/test_losses.py besides differ in what becomes of the log-probabilities alone.
LOSSES = ("sigmoid", "robust", "ipo", "hinge", "dpop", "simpo", "orpo", "cpo", "[orpo,apo_down,sft]", "sft")


class Logps(NamedTuple):
    """Of the tiny Llama with LoRA, in float64: [B, K], and the derivatives by each trained array, [*array, B, K]."""

    parameters: dict[str, np.ndarray]
    values: np.ndarray
    slopes: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Logps:
    """All losses are of these log-probabilities, whose derivatives take a second."""
    model, settings = build(tmp_path_factory.mktemp("float64"))
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}

    def logps() -> np.ndarray:
        return float64_logps(parameters, examples(), settings.model.scale)

    trained = adapter_files.trainable(model)
    return Logps(parameters, logps(), {name: float64.numerical_gradient(logps, parameters[name]) for name in trained})


@pytest.mark.parametrize(("loss", "compiled"), [*((loss, False) for loss in LOSSES), ("sigmoid", True), ("sft", True)])
def test_loss_and_every_gradient_equal_float64(tmp_path, known: Logps, loss: str, compiled: bool) -> None:
    words = [f"train.loss={loss}", "train.max_grad_norm=null", f"train.compile={compiled}", "train.beta=0.5"]
    model, settings = build(tmp_path, *words)
    batch, reference = examples(), reference_logps(3)
    assert all(np.array_equal(known.parameters[name], array) for name, array in tree_flatten(model.parameters()))
    result, gradients = step_gradients(model, settings, batch, reference, sizes=[2, 1])
    logps = known.values.copy()

    def loss_now() -> float:
        return loss_of_logps(logps, batch, reference, settings.train)

    assert gradients.keys() == known.slopes.keys()
    by_logps = float64.numerical_gradient(loss_now, logps)
    expected = {name: (slopes * by_logps).sum(axis=(-2, -1)) for name, slopes in known.slopes.items()}
    _, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, [2, 1]))
    found = [{"loss": result.means["loss"]}, gradients]
    rounding.assert_within(found, [{"loss": np.array(loss_now())}, expected], limits)


def test_gradients_of_weighted_pairs_equal_float64_with_the_weights_held(tmp_path) -> None:
    model, settings = build(tmp_path, "train.use_weighting=true", "train.max_grad_norm=null", "train.compile=true")
    batch, reference = examples(2), reference_logps(2)
    result, gradients = step_gradients(model, settings, batch, reference, sizes=[1, 1])
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}
    start = merged(parameters, settings.model.scale)
    rows = [[(e.prompt_ids.tolist(), completion.tolist()) for completion in e.completions] for e in batch]
    weights = [[float64.wpo_weight(start, *row, HEADS, KV_HEADS) for row in of] for of in rows]
    train, scale = settings.train, settings.model.scale

    def loss_now() -> float:
        losses = [float64_loss(parameters, [e], reference[i : i + 1], train, scale) for i, e in enumerate(batch)]
        return sum(w * lost * loss for (w, lost), loss in zip(weights, losses, strict=True)) / len(batch)

    names = [name for name in gradients if "self_attn.q_proj" in name]
    expected = {name: float64.numerical_gradient(loss_now, parameters[name]) for name in names}
    _, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, [1, 1]))
    found = [{"loss": result.means["loss"]}, {name: gradients[name] for name in names}]
    rounding.assert_within(found, [{"loss": np.array(loss_now())}, expected], limits)


@pytest.mark.parametrize(("method", "sizes"), [("full", [1, 1]), ("dora", [2])])
def test_every_gradient_of_full_training_and_of_dora_equals_float64(tmp_path, method: str, sizes: list[int]) -> None:
    """DoRA's with the norm held."""
    words, scale = [f"model.method={method}", "train.max_grad_norm=null"], 1.0
    model, settings = build(tmp_path, *words, tie_word_embeddings=method == "full")
    batch, reference = examples(2), reference_logps(2)
    result, gradients = step_gradients(model, settings, batch, reference, sizes)
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}
    assert method == "dora" or gradients.keys() == parameters.keys()
    for layer in [name.removesuffix(".lora_a") for name in parameters if name.endswith(".lora_a")]:
        scale = settings.model.scale
        change = scale * (parameters[f"{layer}.lora_a"] @ parameters[f"{layer}.lora_b"]).T
        parameters[f"{layer}.norm"] = np.linalg.norm(parameters[f"{layer}.linear.weight"] + change, axis=1)

    def loss_now() -> float:
        return float64_loss(parameters, batch, reference, settings.train, scale)

    expected = {name: float64.numerical_gradient(loss_now, parameters[name]) for name in gradients}
    _, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, sizes))
    rounding.assert_within([gradients], [expected], limits[1:])


def test_micro_batches_of_any_size_add_up_to_the_same_step(tmp_path) -> None:
    model, settings = build(tmp_path, "train.max_grad_norm=null")
    batch, reference = examples(6), reference_logps(6)
    expected, limits = rounding.expected_and_limits(model, results_of(model, settings, batch, reference, [6]))
    for sizes in ([1] * 6, [4, 2], [1, 5], [3, 2, 1]):
        result, gradients = step_gradients(model, settings, batch, reference, sizes, shared=len(sizes) % 2 == 0)
        rounding.assert_within([means_of(result), gradients], expected, limits)


def test_clipping_bounds_the_global_norm(tmp_path) -> None:
    model, settings = build(tmp_path, "train.max_grad_norm=null")
    plain, before = step_gradients(model, settings, examples(), reference_logps(3), [3])
    norm = plain.figures["grad_norm"]
    model, settings = build(tmp_path, f"train.max_grad_norm={norm / 4}")
    clipped, after = step_gradients(model, settings, examples(), reference_logps(3), [3])
    assert clipped.figures["grad_norm"] == pytest.approx(norm)
    assert np.sqrt(sum((g**2).sum() for g in after.values())) == pytest.approx(norm / 4, rel=1e-4)
    assert norm == pytest.approx(np.sqrt(sum((g**2).sum() for g in before.values())), rel=1e-5)


def test_a_non_finite_batch_leaves_weights_and_optimizer_alone(tmp_path) -> None:
    model, settings = build(tmp_path)
    optimizer = make_optimizer(settings.train)
    optimizer.init(model.trainable_parameters())

    def digests() -> list[str]:
        trees = (model.trainable_parameters(), optimizer.state)
        return [adapter_files.digest(dict(tree_flatten(tree))) for tree in trees]

    before, step = digests(), Step(model, optimizer, settings.train, World())
    assert step(0, 1e-4, [(collate(examples(), 8, True), np.full((3, 2), np.nan, np.float32))]).skipped
    assert digests() == before
    assert not step(0, 1e-4, [(collate(examples(), 8, True), reference_logps(3))]).skipped
    assert digests()[0] != before[0]


def test_the_learning_rate_rises_then_falls_as_scheduled() -> None:
    train = TrainSettings(learning_rate=1.0, warmup_steps=4, schedule="linear", final_learning_rate=0.2)
    rates = [learning_rate(train, step, 15) for step in range(15)]
    assert [*rates[:5], rates[9], rates[14]] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2])
    cosine = TrainSettings(learning_rate=1.0, schedule="cosine")
    assert [learning_rate(cosine, step, 11) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate(TrainSettings(schedule="constant", learning_rate=0.3), 99, 100) == 0.3


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_learning_rate_follows_the_batch_where_it_is_asked_to(scaling: str, rate: float) -> None:
    words = {"learning_rate": 0.1, "final_learning_rate": 0.01, "global_batch_size": 64, "learning_rate_batch_size": 16}
    train = TrainSettings(**words, learning_rate_scaling=scaling, schedule="linear")
    assert learning_rate(train, 0, 10) == pytest.approx(rate)
    assert learning_rate(train, 9, 10) == pytest.approx(rate / 10)


@pytest.mark.parametrize(
    "name", ["adamw", "adam", "sgd", "adafactor", "lion", "muon", "rmsprop", "adagrad", "adamax", "adadelta"]
)
def test_every_named_optimizer_takes_a_step(tmp_path, name: str) -> None:
    model, settings = build(tmp_path, f"train.optimizer={name}")
    before = adapter_files.digest(adapter_files.trainable(model))
    step = Step(model, make_optimizer(settings.train), settings.train, World())
    result = step(0, 1e-4, [(collate(examples(), 8, True), reference_logps(3))])
    assert not result.skipped and adapter_files.digest(adapter_files.trainable(model)) != before


@pytest.mark.parametrize("method", ["full", "dora"])
def test_norms_and_magnitudes_do_not_decay(tmp_path, method: str) -> None:
    model, settings = build(tmp_path, f"model.method={method}", "train.weight_decay=0.5", "train.optimizer=adamw")
    before = dict(tree_flatten(model.trainable_parameters()))
    zeros = tree_unflatten([(name, mx.zeros(a.shape)) for name, a in before.items()])
    UpdateRule(model, make_optimizer(settings.train), settings.train).take(zeros, mx.array(0.0), 0.1)
    for name, after in tree_flatten(model.trainable_parameters()):
        factor = 0.95 if after.ndim > 1 else 1.0
        assert mx.allclose(after, factor * before[name], rtol=1e-6).item(), name


def test_an_unknown_optimizer_option_names_the_known_ones() -> None:
    with pytest.raises(errors.UserError, match="adamw has no momentum; it has betas"):
        make_optimizer(TrainSettings(optimizer_options={"momentum": 0.9}))


def test_squared_norms_are_added_in_the_same_order_on_a_gpu() -> None:
    values = [mx.array(value, mx.float32) for value in np.random.default_rng(0).lognormal(0, 9, 40)]
    assert world_module._added_in_few_kernels(values).item() == world_module._added(values).item()
