"""Losses, rewards and gradients against float64 formulas written again, pair by pair, in plain Python."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.config.settings import TrainSettings
from lib.training.losses import PREFERENCE_LOSSES, LogProbs, log_odds, objective, preference_losses, preference_metrics
from lib.training.unpaired_losses import log_sigmoid
from tests.rounding import roundoff
from tests.tiny import ROOT

DIFFERENCES = 1e-12  # what derivative64 loses to cancellation in float64
OPERATIONS = 16  # one after the other, in any of these formulas
OPTIONS = {"beta": 0.1, "label_smoothing": 0.0, "rpo_alpha": 0.0}
OPTIONS |= {"dpop_lambda": 50.0, "simpo_gamma": 1.0, "cpo_alpha": 1.0}
CASES = [("sigmoid", {}), ("sigmoid", {"beta": 0.5, "label_smoothing": 0.1}), ("sigmoid", {"rpo_alpha": 0.7})]
CASES += [("robust", {}), ("robust", {"label_smoothing": 0.3, "beta": 0.05}), ("ipo", {"beta": 0.2})]
CASES += [("ipo", {"beta": 0.01, "rpo_alpha": 1.0}), ("hinge", {"beta": 0.3}), ("dpop", {"dpop_lambda": 5.0})]
CASES += [("dpop", {"dpop_lambda": 50.0, "beta": 0.01}), ("simpo", {"beta": 2.0, "simpo_gamma": 0.5})]
CASES += [("simpo", {"beta": 2.5, "rpo_alpha": 0.2}), ("orpo", {"beta": 0.25}), ("cpo", {"cpo_alpha": 0.4})]
CASES += [("sigmoid_norm", {"beta": 5.0}), ("sppo", {"beta": 0.2}), ("sppo", {"beta": 0.001}), ("apo_zero", {})]
CASES += [("apo_zero", {"beta": 2.0}), ("apo_down", {"beta": 0.5}), ("bco_pair", {"rpo_alpha": 0.3}), ("mpo", {})]
CASES += [("sft + simpo", {"beta": 2.0})]
# Sums of losses, arXiv:2411.10442 first.
TERMS = {"mpo": (("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0)), "sft + simpo": (("sft", 0.5), ("simpo", 1.0))}

Pair = tuple[float, float, float, float, int, int]  # policy w, l; reference w, l; tokens w, l


def log_sigmoid64(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid64(x: float) -> float:
    return math.exp(log_sigmoid64(x))


def log_odds64(logp: float) -> float:
    return logp - math.log(-math.expm1(logp))


def terms(name: str) -> tuple[tuple[str, float], ...]:
    return TERMS.get(name, ((name, 1.0),))


def loss64(name: str, pair: Pair, o: dict[str, float]) -> float:
    """One pair's loss from the papers' formulas, in Python's float64."""
    if name in TERMS:
        return sum(weight * loss64(term, pair, o) for term, weight in TERMS[name])
    policy_w, policy_l, reference_w, reference_l, tokens_w, tokens_l = pair
    h = (policy_w - policy_l) - (reference_w - reference_l)
    beta, epsilon = o["beta"], o["label_smoothing"]
    if name == "sigmoid":
        loss = -(1 - epsilon) * log_sigmoid64(beta * h) - epsilon * log_sigmoid64(-beta * h)
    elif name == "robust":
        loss = (-(1 - epsilon) * log_sigmoid64(beta * h) + epsilon * log_sigmoid64(-beta * h)) / (1 - 2 * epsilon)
    elif name == "ipo":
        loss = (h - 1 / (2 * beta)) ** 2
    elif name == "hinge":
        loss = max(0.0, 1 - beta * h)
    elif name == "dpop":
        loss = -log_sigmoid64(beta * (h - o["dpop_lambda"] * max(0.0, reference_w - policy_w)))
    elif name == "simpo":
        loss = -log_sigmoid64(beta / tokens_w * policy_w - beta / tokens_l * policy_l - o["simpo_gamma"])
    elif name == "orpo":
        ratio = log_odds64(policy_w / tokens_w) - log_odds64(policy_l / tokens_l)
        loss = -policy_w / tokens_w - o["beta"] * log_sigmoid64(ratio)
    elif name == "cpo":
        loss = -log_sigmoid64(beta * policy_w - beta * policy_l) - o["cpo_alpha"] * policy_w / tokens_w
    elif name == "sigmoid_norm":
        loss = -log_sigmoid64(beta * ((policy_w - reference_w) / tokens_w - (policy_l - reference_l) / tokens_l))
    elif name == "sppo":
        loss = (policy_w - reference_w - 0.5 / beta) ** 2 + (policy_l - reference_l + 0.5 / beta) ** 2
    elif name == "apo_zero":
        loss = sigmoid64(-beta * (policy_w - reference_w)) + sigmoid64(beta * (policy_l - reference_l))
    elif name == "apo_down":
        loss = sigmoid64(beta * (policy_w - reference_w)) + sigmoid64(-beta * h)
    elif name == "bco_pair":
        loss = -log_sigmoid64(beta * (policy_w - reference_w)) - log_sigmoid64(-beta * (policy_l - reference_l))
    elif name == "sft":
        loss = -policy_w / tokens_w
    else:
        raise AssertionError(name)
    return loss - o["rpo_alpha"] * policy_w / tokens_w


def rewards64(name: str, pair: Pair, beta: float) -> tuple[float, float]:
    policy_w, policy_l, reference_w, reference_l, tokens_w, tokens_l = pair
    name = {"mpo": "sigmoid", "sft + simpo": "simpo"}.get(name, name)
    if name == "sigmoid_norm":
        return beta * (policy_w - reference_w) / tokens_w, beta * (policy_l - reference_l) / tokens_l
    if name == "simpo":
        return beta * policy_w / tokens_w, beta * policy_l / tokens_l
    if name == "orpo":
        return log_odds64(policy_w / tokens_w), log_odds64(policy_l / tokens_l)
    if name == "cpo":
        return beta * policy_w, beta * policy_l
    return beta * (policy_w - reference_w), beta * (policy_l - reference_l)


def derivative64(function: Callable[[float], float], x: float) -> float:
    """Central difference, extrapolated twice (Richardson): about 1e-10 relative on these smooth functions."""
    step = 1e-3 * max(1.0, abs(x))
    while True:
        d = [(function(x + step / k) - function(x - step / k)) / (2 * step / k) for k in (1, 2, 4)]
        first, second = (4 * d[1] - d[0]) / 3, (4 * d[2] - d[1]) / 3
        value = (16 * second - first) / 15
        if abs(second - first) <= 1e-7 * abs(value) or step < 1e-4:
            return value
        step /= 4


def ragged_pairs(count: int = 24, seed: int = 0) -> list[Pair]:
    """float32 log-probabilities of completions of 1 to 200 tokens, policy and reference some nats apart."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        tokens = rng.integers(1, 200, 2)
        reference = -rng.uniform(0.05, 3.0, 2) * tokens
        # Never within 0.05 of the reference: dpop's corner is at equality, where no derivative exists.
        drift = rng.choice([-1, 1], 2) * rng.uniform(0.05, 6, 2)
        policy = np.minimum(reference + drift, -0.02)
        values = [float(np.float32(v)) for v in (*policy, *reference)]
        pairs.append((*values, int(tokens[0]), int(tokens[1])))
    return pairs


def to_arrays(pairs: list[Pair]) -> tuple[LogProbs, LogProbs]:
    columns = list(zip(*pairs, strict=True))
    policy_w, policy_l, reference_w, reference_l = (mx.array(c, dtype=mx.float32) for c in columns[:4])
    tokens_w, tokens_l = (mx.array(c, dtype=mx.int32) for c in columns[4:])
    return LogProbs(policy_w, policy_l, tokens_w, tokens_l), LogProbs(reference_w, reference_l, tokens_w, tokens_l)


def close(actual: mx.array, function: Callable[..., float], points: Sequence[tuple[float, ...]]) -> None:
    """Asserts that each value is the function's at its point, but for the rounding of so many operations in float32.

    The function's arguments may each be changed by it, and its value. Elementwise: it is as exact where most of it cancels.
    """
    relative = roundoff(OPERATIONS)
    for value, point in zip(actual.tolist(), points, strict=True):
        expected = function(*point)
        changed = [function(*point[:i], x * (1 + relative), *point[i + 1 :]) for i, x in enumerate(point)]
        limit = sum(abs(moved - expected) for moved in changed) + relative * abs(expected) + DIFFERENCES
        assert abs(value - expected) <= limit, (point, value, expected, limit)


def losses_of(name: str, policy: LogProbs, reference: LogProbs | None, options: dict[str, float]) -> Any:
    return preference_losses(terms(name), policy, reference, TrainSettings.model_construct(**options))


def gradients(name: str, policy: LogProbs, reference: LogProbs, options: dict[str, float]) -> list[mx.array]:
    def total(chosen: mx.array, rejected: mx.array) -> mx.array:
        moved = LogProbs(chosen, rejected, policy.chosen_tokens, policy.rejected_tokens)
        return losses_of(name, moved, reference, options)[0].sum()

    return list(mx.grad(total, argnums=(0, 1))(policy.chosen, policy.rejected))


@pytest.mark.parametrize(("name", "changed"), CASES, ids=lambda v: v if isinstance(v, str) else str(sorted(v.items())))
def test_values_rewards_and_gradients_match_float64(name: str, changed: dict[str, float]) -> None:
    options, pairs = OPTIONS | changed, ragged_pairs()
    policy, reference = to_arrays(pairs)
    losses, chosen_rewards, rejected_rewards = losses_of(name, policy, reference, options)
    assert losses.dtype == chosen_rewards.dtype == rejected_rewards.dtype == mx.float32
    close(losses, lambda *p: loss64(name, p, options), pairs)
    close(chosen_rewards, lambda *p: rewards64(name, p, options["beta"])[0], pairs)
    close(rejected_rewards, lambda *p: rewards64(name, p, options["beta"])[1], pairs)
    by_chosen, by_rejected = gradients(name, policy, reference, options)
    close(by_chosen, lambda *p: derivative64(lambda v: loss64(name, (v, *p[1:]), options), p[0]), pairs)
    close(by_rejected, lambda *p: derivative64(lambda v: loss64(name, (p[0], v, *p[2:]), options), p[1]), pairs)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("beta", [0.1, 10.0])
def test_extremes_stay_finite(name: str, beta: float) -> None:
    values = [0.0, -1e-30, -1e-8, -1e-3, -1.0, -1e4, -2e4]
    pairs: list[Pair] = [(w, lost, -1e4, -1e4, t, 3) for w in values for lost in values for t in (1, 1000)]
    options = OPTIONS | {"beta": beta, "label_smoothing": 0.2, "rpo_alpha": 1.0}
    policy, reference = to_arrays(pairs)
    for output in (*losses_of(name, policy, reference, options), *gradients(name, policy, reference, options)):
        assert np.all(np.isfinite(np.array(output)))


@pytest.mark.parametrize(
    "logp", [-1.2e-7, -1e-6, -1e-4, -0.01, -0.5, -math.log(2) - 0.01, -1.0, -10.0, -80.0, -1e4], ids=str
)
def test_log_odds_keeps_its_digits(logp: float) -> None:
    """Where 1 - exp(logp), computed plainly, has none left; the gradient of log odds is 1 / (1 - p)."""
    logp = float(np.float32(logp))
    x = mx.array([logp])
    close(log_odds(x), log_odds64, [(logp,)])
    close(mx.grad(lambda v: log_odds(v).sum())(x), lambda logp: -1 / math.expm1(logp), [(logp,)])


def test_log_sigmoid_keeps_its_digits() -> None:
    values = [-1e4, -90.0, -20.0, -1.0, -1e-6, 0.0, 1e-6, 1.0, 20.0, 80.0, 1e4]
    x = mx.array(values)
    points = [(value,) for value in x.tolist()]
    close(-log_sigmoid(x), lambda v: -log_sigmoid64(v), points)
    slopes = mx.grad(lambda v: log_sigmoid(v).sum())(x)
    close(slopes, lambda v: math.exp(-max(v, 0)) / (1 + math.exp(-abs(v))), points)


TRL = json.loads((ROOT / "tests/golden/trl.json").read_text())["pairs"]  # tests/trl_figures.py


@pytest.mark.parametrize("name", TRL["figures"])
def test_losses_and_gradients_are_those_of_trl(name: str) -> None:
    names, weights = zip(*terms("sigmoid" if name == "wpo" else name), strict=True)
    train = TrainSettings(loss=names, loss_weights=weights, beta=TRL["beta"], use_weighting=name == "wpo")

    def pairs(of_completions: list[float]) -> mx.array:
        return mx.array(of_completions).reshape(2, 3).T

    reference, tokens = pairs(TRL["reference"]), pairs([*map(len, TRL["policy"])])

    def loss(logps: mx.array) -> mx.array:
        aligned = mx.exp((mx.stop_gradient(logps) - pairs([*map(sum, TRL["square_sums"])])) / tokens)
        sums = objective(train, logps, tokens, reference, weights=aligned if train.use_weighting else None)[1]
        return sums["loss"] / sums["count"]

    value, gradients = mx.value_and_grad(loss)(pairs([*map(sum, TRL["policy"])]))
    wanted = TRL["figures"][name]
    actual, expected = [value.item(), *gradients.T.reshape(-1).tolist()], [wanted["loss"], *wanted["gradients"]]
    limits = [roundoff(OPERATIONS) * max(map(abs, expected))] * len(expected)
    assert all(abs(a - b) <= limit for a, b, limit in zip(actual, expected, limits, strict=True)), (actual, expected)


def test_metrics_are_sums_that_ranks_can_add() -> None:
    pairs = ragged_pairs(9)
    pairs[4] = (*pairs[4][:2], *pairs[4][:2], *pairs[4][4:])  # policy = reference: a tie

    def metrics(some: list[Pair]) -> dict[str, mx.array]:
        policy, reference = to_arrays(some)
        _, chosen, rejected = losses_of("sigmoid", policy, reference, OPTIONS)
        return preference_metrics(chosen, rejected, policy, reference, mx.ones(len(chosen)))

    whole, first, rest = metrics(pairs), metrics(pairs[:2]), metrics(pairs[2:])
    rewards = [rewards64("sigmoid", p, OPTIONS["beta"]) for p in pairs]
    expected = {
        "reward_chosen": sum(w for w, _ in rewards),
        "reward_rejected": sum(lost for _, lost in rewards),
        "reward_margin": sum(won - lost for won, lost in rewards),
        "reward_accuracy": sum(1.0 if won > lost else 0.5 if won == lost else 0.0 for won, lost in rewards),
        "kl": sum(((p[2] - p[0]) + (p[3] - p[1])) / 2 for p in pairs),
    }
    assert whole.keys() == expected.keys()
    # The log-probabilities that all are made of.
    limit = roundoff(OPERATIONS) * sum(sum(map(abs, p[:4])) for p in pairs)
    for key, value in expected.items():
        assert whole[key].item() == pytest.approx(value, rel=0, abs=limit), key
        assert (first[key] + rest[key]).item() == pytest.approx(value, rel=0, abs=limit), key
    assert expected["reward_accuracy"] % 1 == 0.5
    policy, _ = to_arrays(pairs)
    _, chosen, rejected = losses_of("simpo", policy, None, OPTIONS)
    assert "kl" not in preference_metrics(chosen, rejected, policy, None, mx.ones(len(chosen)))


def test_sft_sums_over_tokens_not_rows() -> None:
    """Two micro-batches of unequal token counts add up to the whole, and a mean of their means would not."""
    logps, tokens, train = mx.array([[-3.0], [-100.0], [-7.5]]), mx.array([[2], [50], [5]]), TrainSettings(loss="sft")
    whole, a, b = (objective(train, logps[rows], tokens[rows], None)[1] for rows in (slice(3), slice(1), slice(1, 3)))
    for name, total in (("loss", 110.5), ("count", 57.0)):
        assert whole[name].item() == total == (a[name] + b[name]).item() and whole[name].dtype == mx.float32
