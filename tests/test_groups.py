"""GRPO: losses and gradients against float64 and TRL, groups and what is left out of them, whole runs."""

import itertools
import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.config.settings import Config, DataSettings, TrainSettings
from lib.data.batch import collate
from lib.data.batch_shapes import BatchShape
from lib.data.dataset import Example
from lib.data.groups import Group, groups_in_memory, load_groups
from lib.data.tokenizer import Vocabulary
from lib.errors import UserError
from lib.model import logps as logps_module
from lib.model.entropies import completion_token_logps
from lib.model.token_stream import arrays_of
from lib.training.group_losses import Groups, advantages, group_loss
from lib.training.losses import SUMS, means_of
from lib.training.step import StepRecord
from tests import float64, rounding, tiny
from tests.test_step import HEADS, KV_HEADS, build, gradients_of, merged, parts_of
from tests.test_step import means_of as finite_means

LOSS_TYPES = ("grpo", "dr_grpo", "bnpo", "dapo")
ADVANTAGES = ("standardized", "batch_standardized", "centered", "leave_one_out")
RATIOS = ("token", "geometric_mean", "completion")
Ragged = list[list[list[float]]]  # of tokens, of completions, of groups


# ---- The formulas


def advantages64(rewards: list[float | None], kind: str, deviation: float) -> list[float]:
    """From the papers; 0 for what is left out. deviation: of the rewards of all groups."""
    known = np.array([reward for reward in rewards if reward is not None])
    made = []
    for reward in rewards:
        if reward is None or len(known) < 2:
            made.append(0.0)
        elif kind == "leave_one_out":
            made.append(reward - (known.sum() - reward) / (len(known) - 1))
        else:
            scales = {"standardized": known.std(ddof=1) + 1e-4, "batch_standardized": deviation + 1e-4}
            made.append((reward - known.mean()) / scales.get(kind, 1.0))
    return made


def deviation64(rewards: list[list[float | None]]) -> float:
    """Of all rewards that there are."""
    return float(np.std([reward for group in rewards for reward in group if reward is not None], ddof=1))


def loss64(
    train: TrainSettings, policy: Ragged, sampling: Ragged, reference: Ragged | None, rewards: list[list[float | None]]
) -> float:
    """The loss of a step, token by token."""
    kind = train.loss_type or "grpo"
    total, completions, tokens = 0.0, 0, 0
    upper = train.epsilon if train.epsilon_high is None else train.epsilon_high
    for i, of_group in enumerate(rewards):
        for k, advantage in enumerate(advantages64(of_group, train.advantages, deviation64(rewards))):
            if of_group[k] is None:
                continue
            own, changes = 0.0, [new - old for new, old in zip(policy[i][k], sampling[i][k], strict=True)]
            whole = {"geometric_mean": sum(changes) / max(len(changes), 1), "completion": sum(changes)}
            for t, (new, change) in enumerate(zip(policy[i][k], changes, strict=True)):
                ratio = np.exp(whole.get(train.ratio, change))
                own -= min(ratio * advantage, min(max(ratio, 1 - train.epsilon), 1 + upper) * advantage)
                if reference is not None:
                    difference = reference[i][k][t] - new
                    own += train.beta * (np.exp(difference) - difference - 1)
            total += own / max(len(policy[i][k]), 1) if kind == "grpo" else own
            completions, tokens = completions + 1, tokens + len(policy[i][k])
    divisor = {"grpo": completions, "dr_grpo": completions * (train.max_completion_length or 0)}
    return total / divisor.get(kind, tokens)


def settings_of(loss_type: str, **changes: Any) -> TrainSettings:
    longest = {"max_completion_length": 8} if loss_type == "dr_grpo" else {}
    return TrainSettings(loss="grpo", loss_type=loss_type, **longest, **changes)


def rectangle(rows: Ragged) -> np.ndarray:
    """float32 [b, K, C], 0 behind each completion's end."""
    made = np.zeros((len(rows), max(map(len, rows)), max(len(own) for group in rows for own in group)), np.float32)
    for i, group in enumerate(rows):
        for k, own in enumerate(group):
            made[i, k, : len(own)] = own
    return made


def groups_of(
    policy: mx.array, sampling: Ragged, reference: Ragged | None, rewards: list[list[float | None]]
) -> Groups:
    lengths = np.zeros(policy.shape[:2], np.int64)
    known = np.full(policy.shape[:2], np.nan, np.float32)
    for (i, k), _ in np.ndenumerate(lengths):
        if k < len(rewards[i]) and (reward := rewards[i][k]) is not None:
            lengths[i, k], known[i, k] = len(sampling[i][k]), reward
    mask = mx.array(np.arange(policy.shape[2]) < lengths[..., None])
    compared = None if reference is None else mx.array(rectangle(reference))
    deviation = mx.full(len(known), deviation64(rewards))
    old, entropies = mx.array(rectangle(sampling)), mx.zeros_like(policy)
    return Groups(policy, old, compared, entropies, mask, mx.array(known), deviation)


def drawn(seed: int) -> tuple[Ragged, Ragged, Ragged, list[list[float | None]]]:
    """Log-probabilities that float32 has, some far enough apart to be clipped; some rewards are missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, (4, 5)).tolist()

    def near(rows: Ragged, spread: float) -> Ragged:
        moved = [[np.array(own) + rng.normal(0, spread, len(own)) for own in group] for group in rows]
        return [[np.float32(own).tolist() for own in group] for group in moved]

    policy: Ragged = near([[[-4.0] * length for length in group] for group in lengths], 1.0)
    rewards: list[list[float | None]] = np.float32(rng.normal(0, 2, (4, 5))).tolist()
    rewards[0][1] = rewards[2][0] = rewards[2][4] = None
    rewards[3] = [None, None, 1.5, None, None]  # nobody to compare with
    policy[1][2] = []  # it is masked: its reward counts
    return policy, near(policy, 0.3), near(policy, 0.5), rewards


CASES = [*zip(LOSS_TYPES, ADVANTAGES, ["token"] * 4, strict=True)]
CASES += itertools.product(["grpo", "dapo"], ADVANTAGES[:1], RATIOS[1:])


@pytest.mark.parametrize(("loss_type", "kind", "ratio"), CASES)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_values_and_gradients_match_float64(loss_type: str, kind: str, ratio: str, beta: float) -> None:
    train = settings_of(loss_type, advantages=kind, ratio=ratio, beta=beta, epsilon_high=0.28)
    policy, sampling, reference, rewards = drawn(3)
    compared = reference if beta else None

    def mean(policy: mx.array) -> mx.array:
        _, sums = group_loss(train, groups_of(policy, sampling, compared, rewards))
        return sums["loss"] / sums["count"]

    value, slopes = mx.value_and_grad(mean)(mx.array(rectangle(policy)))
    expected = loss64(train, policy, sampling, compared, rewards)
    assert value.dtype == mx.float32
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    gradient, step = np.zeros(slopes.shape), 1e-6
    for i, group in enumerate(policy):
        for k, own in enumerate(group):
            for t, middle in enumerate(own):
                sides = []
                for own[t] in (middle - step, middle + step):
                    sides.append(loss64(train, policy, sampling, compared, rewards))
                own[t] = middle
                gradient[i, k, t] = (sides[1] - sides[0]) / (2 * step)
    assert np.linalg.norm(np.array(slopes) - gradient) <= 1e-5 * np.linalg.norm(gradient)


OF_TRL = {"group": "standardized", "batch": "batch_standardized", "none": "centered", "rloo": "leave_one_out"}
TRL = json.loads((tiny.ROOT / "tests/golden/trl.json").read_text())["groups"]  # tests/trl_figures.py


def in_threes(of_completions: list[Any]) -> list[list[Any]]:
    return [of_completions[start : start + 3] for start in range(0, len(of_completions), 3)]


@pytest.mark.parametrize("case", TRL["figures"])
def test_loss_gradients_and_figures_are_those_of_trl(case: str) -> None:
    loss_type, scale, level = case.split()
    given = {name: TRL[name] for name in ("beta", "epsilon", "epsilon_high")}
    if scale == "rloo":
        given["beta"] = 0  # TRL's RLOO takes the divergence off the rewards
    kind, ratio = OF_TRL[scale], {"sequence": "geometric_mean"}.get(level, level)
    train = settings_of(loss_type, advantages=kind, ratio=ratio, **given)
    masked = [] if scale == "rloo" else TRL["masked"]
    policy, sampling, reference = (
        in_threes([[] if i in masked else own for i, own in enumerate(TRL[name])])
        for name in ("policy", "sampling", "reference")
    )
    rewards = in_threes(TRL["rewards"])
    compared = reference if train.beta else None

    def mean(policy: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        _, sums = group_loss(train, groups_of(policy, sampling, compared, rewards))
        return sums["loss"] / sums["count"], sums

    (value, sums), slopes = mx.value_and_grad(mean)(mx.array(rectangle(policy)))
    wanted = TRL["figures"][case]
    assert value.item() == pytest.approx(wanted["loss"], rel=1e-5)
    gradient = rectangle(in_threes(wanted["gradients"]))
    np.testing.assert_allclose(np.array(slopes), gradient, rtol=1e-5, atol=1e-7)
    means = means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, train)
    assert means["kl"] == (pytest.approx(wanted["kl"], rel=1e-5) if train.beta else None)
    if ratio == "token":  # TRL counts completions elsewhere
        assert means["clip_fraction"] == pytest.approx(wanted["clip_fraction"], rel=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_rewards_that_are_alike_and_groups_of_one_have_no_advantage(kind: str) -> None:
    # The sum of seven, divided by seven, is not always one of them.
    alike = [[reward] * 7 for reward in (0.1, 0.3, 0.7)]
    rewards, counted = mx.array([*alike, [5.0] + [0.0] * 6]), mx.array([[1.0] * 7] * 3 + [[1.0] + [0.0] * 6])
    assert not np.array(advantages(rewards, counted, kind, mx.zeros(4))).any()


@pytest.mark.parametrize("of", RATIOS)
def test_a_ratio_that_float32_cannot_hold_makes_no_other_gradient_a_nan(of: str) -> None:
    """Two tokens a completion; in the last of each group both have a ratio of e^100, the geometric mean's as well."""
    train = settings_of("grpo", advantages="centered", ratio=of, beta=0)
    rewards: list[list[float | None]] = [[1.0, 1.0], [0.0, 2.0], [2.0, 0.0]]  # an advantage of 0, 1 and -1
    sampling: Ragged = [[[-1.0, -2.0], [-100.5, -101.0]] for _ in rewards]
    policy = mx.array(rectangle([[[-1.0625, -2.0], [-0.5, -1.0]] for _ in rewards]))

    def loss(policy: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        _, sums = group_loss(train, groups_of(policy, sampling, None, rewards))
        return sums["loss"], sums

    (value, sums), slopes = mx.value_and_grad(loss)(policy)
    assert np.isfinite(value.item()) and not np.array(slopes[0]).any() and not np.array(slopes[:, 1]).any()
    assert sums["clip_fraction"].item() == 4  # of 12 tokens those that are far off, and have an advantage
    whole = [np.exp(-0.0625)] * 2
    weights = {"token": [np.exp(-0.0625) / 2, 0.5], "geometric_mean": [np.exp(-0.03125) / 2] * 2}.get(of, whole)
    np.testing.assert_allclose(np.array(slopes[1:, 0]), [weights, [-weight for weight in weights]], rtol=1e-6)


# ---- A step of a model


def rows_of(count: int, seed: int = 3, samples: int = 3) -> list[Example]:
    """Groups of a vocabulary of 20; of five completions one is left out, and one is masked."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(count):
        completions = tuple(rng.integers(0, 20, rng.integers(1, 5)).astype(np.int32) for _ in range(samples))
        chance = rng.random(samples)
        rewards = np.where(chance < 0.8, rng.normal(0, 1, samples), np.nan).astype(np.float32)
        sampled = tuple((-3 + 0.1 * rng.normal(size=len(own))).astype(np.float32) for own in completions)
        learnt = tuple(np.full(len(own), is_learnt) for own, is_learnt in zip(completions, chance < 0.6, strict=True))
        prompt = rng.integers(0, 20, rng.integers(1, 6)).astype(np.int32)
        rows.append(Example(row, prompt, completions, None, learnt, rewards, sampling_logps=sampled))
    deviation = float(np.nanstd([row.rewards for row in rows], ddof=1))
    return [replace(row, reward_deviation=deviation) for row in rows]


def reference_of(batch: Any, seed: int = 9) -> np.ndarray:
    """Made-up log-probabilities of a batch's tokens, the same for a token in whatever batch: float32 [b, K, C]."""
    made = np.zeros(batch.mask.shape, np.float32)
    for place, row in enumerate(batch.rows):
        own = np.random.default_rng([seed, int(row)]).normal(-3, 0.3, (batch.mask.shape[1], 8))
        made[place] = own[:, : made.shape[2]]
    return made[: len(batch.rows)]


def step_gradients(
    model: Any, settings: Config, rows: list[Example], sizes: list[int], shared: bool = True, shapes: Any = ()
) -> tuple[StepRecord, list[rounding.Results]]:
    """The record, and for tests.rounding its means and the gradients."""
    made = [collate(rows[part], 4, shared, shapes) for part in parts_of(sizes)]
    result, gradients = gradients_of(model, settings, [(batch, reference_of(batch)) for batch in made])
    return result, [finite_means(result), gradients]


WORDS = ("train.loss=grpo", "train.max_grad_norm=null", "train.beta=0.5", "train.temperature=0.7")


def test_a_steps_loss_and_every_gradient_equal_float64(tmp_path) -> None:
    model, settings = build(tmp_path, *WORDS, "train.advantages=batch_standardized")
    rows = rows_of(3)
    result, (_, gradients) = step_gradients(model, settings, rows, [2, 1])
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}
    reference = [reference_of(collate([row], 4, True))[0] for row in rows]
    learnt = [[bool(mask[0]) for mask in row.learnt or ()] for row in rows]
    rewards = [[None if np.isnan(r) else float(r) for r in row.rewards] for row in rows if row.rewards is not None]
    both = zip(sum(rewards, []), sum(learnt, []), strict=True)
    assert any(reward is not None and not is_learnt for reward, is_learnt in both)

    def logps(row: Example, completion: np.ndarray, weights: float64.Weights) -> list[float]:
        prompt = row.prompt_ids.tolist()
        logits = float64.llama_logits(weights, [*prompt, *completion.tolist()], HEADS, KV_HEADS) / 0.7
        of_tokens = logits[len(prompt) - 1 : -1]
        of_tokens = of_tokens - np.log(np.exp(of_tokens).sum(axis=1, keepdims=True))
        return of_tokens[np.arange(len(completion)), completion].tolist()

    def loss_now() -> float:
        weights = merged(parameters, settings.model.scale)
        policy, sampling, compared = [], [], []
        for row, of, made in zip(rows, learnt, reference, strict=True):
            each = [*zip(row.completions, row.sampling_logps or (), of, made, strict=True)]
            policy.append([logps(row, ids, weights) if is_learnt else [] for ids, _, is_learnt, _ in each])
            sampling.append([sampled.tolist() if is_learnt else [] for _, sampled, is_learnt, _ in each])
            compared.append([own[: len(ids)].tolist() for ids, _, _, own in each])
        return loss64(settings.train, policy, sampling, compared, rewards)

    expected = {name: float64.numerical_gradient(loss_now, parameters[name]) for name in gradients}
    _, limits = rounding.expected_and_limits(model, lambda: step_gradients(model, settings, rows, [2, 1])[1])
    found = [{"loss": result.means["loss"]}, gradients]
    rounding.assert_within(found, [{"loss": np.array(loss_now())}, expected], limits)


def test_micro_batches_of_any_size_and_layout_add_up_to_the_same_step(tmp_path) -> None:
    model, settings = build(tmp_path, *WORDS)
    rows = rows_of(6)
    wanted = rounding.expected_and_limits(model, lambda: step_gradients(model, settings, rows, [6])[1])
    padded = BatchShape(8, 3, prefix=0, length=16, suffix_tokens=384, is_dense=True, uses=1, scored=96, width=8)
    for sizes, *how in ([1] * 6, True), ([4, 2], True), ([1, 5], False), ([6], False, [padded]):
        rounding.assert_within(step_gradients(model, settings, rows, sizes, *how)[1], *wanted)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_of_tokens_are_those_of_the_logits(
    tmp_path, training: bool, temperature: float, monkeypatch
) -> None:
    model, _ = build(tmp_path)
    model.train(training)
    monkeypatch.setattr(logps_module, "LOGITS_BYTES", 4 * 20 * 3)  # three tokens at a time
    rows = rows_of(3)
    batch = collate(rows, 4, True)
    made = completion_token_logps(model, arrays_of(batch.inputs), temperature)
    logps, entropies = (np.array(array, np.float64) for array in made)
    for i, row in enumerate(rows):
        for k, own in enumerate(row.completions):
            count = int(batch.mask[i, k].sum())
            assert count in (0, len(own)) and not logps[i, k, count:].any() and not entropies[i, k, count:].any()
            ids = mx.array([[*row.prompt_ids.tolist(), *own.tolist()]])
            wide = np.array(model(ids)[0, len(row.prompt_ids) - 1 : -1], np.float64) / temperature
            wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
            tolerance, entropy = rounding.roundoff(64) * 20, -(np.exp(wide) * wide).sum(axis=1)
            assert np.abs(logps[i, k, :count] - wide[np.arange(len(own)), own][:count]).max(initial=0) <= tolerance
            assert np.abs(entropies[i, k, :count] - entropy[:count]).max(initial=0) <= tolerance


# ---- Files of groups


def records(count: int, seed: int = 0, samples: int = 4) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        completions = [rng.integers(2, 48, rng.integers(1, 9)).tolist() for _ in range(samples)]
        prompt, rewards = rng.integers(2, 48, rng.integers(1, 12)).tolist(), rng.normal(0, 1, samples).tolist()
        logps = [(-4 + 0.1 * rng.normal(size=len(own))).tolist() for own in completions]
        made.append({"prompt_ids": prompt, "completion_ids": completions, "rewards": rewards, "logps": logps})
    return made


def test_masked_tokens_are_not_learnt_and_rewards_of_masked_completions_count(tmp_path) -> None:
    record = {"completion_ids": [[7, 8, 1], [9, 1], [3]], "rewards": [1.0, 0.5, None]}
    record |= {"logps": [[-1, -2, -3], [-4, -5], [0]], "completion_mask": [[1, 0, 1], [0, 0], [1]]}
    made = [{"prompt_ids": [5, 6], **record}]
    smaller = {"completion_ids": [[4, 1], [2]], "rewards": [2.0, 1.0], "logps": [[-6, -7], [-8]]}
    made.append({"prompt_ids": [5], **smaller, "completion_mask": [[1, 1], [1]]})
    settings = DataSettings(train=str(tiny.write_jsonl(tmp_path / "groups.jsonl", made)), max_length=64)
    groups = load_groups(settings, Vocabulary(vocab_size=48))
    assert [[len(ids) for ids in group.completions] for group in (groups[0], groups[1])] == [[3, 1, 1], [2, 1, 1]]
    batch = collate([groups[0], groups[1]], 4, True)
    assert batch.mask is not None and batch.mask.sum(axis=-1).tolist() == [[2, 0, 0], [2, 1, 0]]
    assert batch.sampling_logps is not None and batch.sampling_logps[0, 0, :2].tolist() == [-1, -3]
    assert batch.sampling_logps[1, :2, :2].tolist() == [[-6, -7], [-8, 0]]
    assert batch.rewards is not None and batch.rewards[:, :2].tolist() == [[1.0, 0.5], [2.0, 1.0]]
    assert batch.completion_lengths is not None and batch.completion_lengths.tolist() == [[3, 2, 0], [2, 1, 0]]
    assert np.isnan(batch.rewards[:, 2]).all() and batch.reward_deviations is not None
    assert batch.reward_deviations.tolist() == [np.float32(np.std([1.0, 0.5, 2.0, 1.0], ddof=1))] * 2
    one = Group(prompt_ids=[5], completion_ids=[[1], [2]], rewards=[3.0, None], logps=[[-1], [-1]])
    assert groups_in_memory("one", [one], []).deviation == 0.0
    changes = {"rewards": [2.0, None]}, {"logps": [[-2], [-1]]}, {"completion_mask": [[False], [True]]}
    others = [one.model_copy(update=change) for change in changes]
    assert len({groups_in_memory("one", [group], []).digest for group in (one, *others)}) == 4


GOOD = {"prompt_ids": [5, 6], "completion_ids": [[7, 1], [8]], "rewards": [1.0, 0], "logps": [[-1, -2.0], [0]]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"completion_ids": None}, "completion_ids: Input should be a valid list"),
        ({"prompt_ids": []}, "prompt_ids: List should have at least 1 item"),
        ({"completion_ids": [[7, True], [8]]}, "completion_ids[0][1]: Input should be a valid integer, not True"),
        ({"completion_ids": [[7, 48], [8]]}, "token id 48 is not below the vocabulary's size, 48"),
        ({"rewards": [1.0]}, "2 completion_ids and 1 rewards"),
        ({"rewards": [1.0, "good"]}, "rewards[1]: Input should be a valid number, not 'good'"),
        ({"logps": [[-1.0], [0]]}, "logps has to be lists of 2, 1 numbers"),
        ({"logps": [[-1.0, 0.5], [0]]}, "logps[0][1]: "),
        ({"completion_mask": [[1, 0], [1, 1]]}, "completion_mask has to be lists of 2, 1 numbers"),
        ({"prompt_ids": [5] * 63}, "data.max_length=64"),
    ],
    ids=str,
)
def test_a_record_that_is_no_group_is_one_clear_line(tmp_path, change: dict[str, Any], expected: str) -> None:
    file = tiny.write_jsonl(tmp_path / "groups.jsonl", [GOOD, GOOD | change])
    settings = DataSettings(train=str(file), max_length=64)
    with pytest.raises(UserError) as error:
        load_groups(settings, Vocabulary(vocab_size=48))
    assert expected in str(error.value) and f"{file}:2" in str(error.value) and "\n" not in str(error.value)
    assert len(load_groups(settings.model_copy(update={"skip_invalid": True}), Vocabulary(vocab_size=48))) == 1
