"""GRPO: losses and gradients against float64 and TRL, groups and what is left out of them, whole runs."""

import itertools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.config.schema import Config, DataSettings, TrainSettings
from lib.data.collate import collate
from lib.data.dataset import Example
from lib.data.groups import load_groups
from lib.data.model_limits import ModelLimits
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import logps as logps_module
from lib.model.logps import completion_token_logps
from lib.model.token_stream import arrays_of
from lib.training.group_losses import Groups, advantages, group_loss
from lib.training.objective import SUMS, means_of
from lib.training.step import StepResult, make_step
from tests import float64, rounding, tiny
from tests.test_step import HEADS, KV_HEADS, Spy, build, merged
from tests.test_step import means_of as finite_means
from tests.test_world import train

LOSS_TYPES = ("grpo", "dr_grpo", "bnpo", "dapo")
ADVANTAGES = ("standardized", "centered", "leave_one_out")
Ragged = list[list[list[float]]]  # of tokens, of completions, of groups
FIGURES = ["loss", "kl", "entropy", "reward"]  # that equal runs share


# ---- The formulas


def advantages64(rewards: list[float | None], kind: str) -> list[float]:
    """From the papers; 0 for what is left out."""
    known = np.array([reward for reward in rewards if reward is not None])
    made = []
    for reward in rewards:
        if reward is None or len(known) < 2:
            made.append(0.0)
        elif kind == "leave_one_out":
            made.append(reward - (known.sum() - reward) / (len(known) - 1))
        else:
            made.append((reward - known.mean()) / (known.std(ddof=1) + 1e-4 if kind == "standardized" else 1))
    return made


def loss64(
    train: TrainSettings, policy: Ragged, sampling: Ragged, reference: Ragged | None, rewards: list[list[float | None]]
) -> float:
    """The loss of a step, token by token."""
    kind = train.loss_type or "grpo"
    total, completions, tokens = 0.0, 0, 0
    upper = train.epsilon if train.epsilon_high is None else train.epsilon_high
    for i, of_group in enumerate(rewards):
        for k, advantage in enumerate(advantages64(of_group, train.advantages)):
            if of_group[k] is None:
                continue
            own = 0.0
            for t, (new, old) in enumerate(zip(policy[i][k], sampling[i][k], strict=True)):
                ratio = np.exp(new - old)
                own -= min(ratio * advantage, min(max(ratio, 1 - train.epsilon), 1 + upper) * advantage)
                if reference is not None:
                    difference = reference[i][k][t] - new
                    own += train.beta * (np.exp(difference) - difference - 1)
            total += own / len(policy[i][k]) if kind == "grpo" else own
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
    known = np.zeros(policy.shape[:2], np.float32)
    for (i, k), _ in np.ndenumerate(lengths):
        if k < len(rewards[i]) and (reward := rewards[i][k]) is not None:
            lengths[i, k], known[i, k] = len(sampling[i][k]), reward
    mask = mx.array(np.arange(policy.shape[2]) < lengths[..., None])
    compared = None if reference is None else mx.array(rectangle(reference))
    return Groups(policy, mx.array(rectangle(sampling)), compared, mx.zeros_like(policy), mask, mx.array(known))


def drawn(seed: int) -> tuple[Ragged, Ragged, Ragged, list[list[float | None]]]:
    """Log-probabilities that float32 has, some far enough apart to be clipped; some rewards are missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, (4, 5)).tolist()

    def near(rows: Ragged, spread: float) -> Ragged:
        return [
            [np.float32(np.array(own) + rng.normal(0, spread, len(own))).tolist() for own in group] for group in rows
        ]

    policy: Ragged = near([[[-4.0] * length for length in group] for group in lengths], 1.0)
    rewards: list[list[float | None]] = np.float32(rng.normal(0, 2, (4, 5))).tolist()
    rewards[0][1] = rewards[2][0] = rewards[2][4] = None
    rewards[3] = [None, None, 1.5, None, None]  # nobody to compare with
    return policy, near(policy, 0.3), near(policy, 0.5), rewards


@pytest.mark.parametrize(("loss_type", "kind"), [*itertools.product(LOSS_TYPES, ADVANTAGES)])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_values_and_gradients_match_float64(loss_type: str, kind: str, beta: float) -> None:
    train = settings_of(loss_type, advantages=kind, beta=beta, epsilon_high=0.28)
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


TRL = json.loads((Path(__file__).parent / "trl_groups.json").read_text())  # tests/trl_groups.py


@pytest.mark.parametrize("case", TRL["figures"])
def test_loss_gradients_and_figures_are_those_of_trl(case: str) -> None:
    loss_type, scale = case.split()
    given = {name: TRL[name] for name in ("beta", "epsilon", "epsilon_high")}
    train = settings_of(loss_type, advantages={"group": "standardized", "none": "centered"}[scale], **given)
    policy, sampling, reference, rewards = (
        [TRL[name][:3], TRL[name][3:]] for name in ("policy", "sampling", "reference", "rewards")
    )

    def mean(policy: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        _, sums = group_loss(train, groups_of(policy, sampling, reference, rewards))
        return sums["loss"] / sums["count"], sums

    (value, sums), slopes = mx.value_and_grad(mean)(mx.array(rectangle(policy)))
    wanted = TRL["figures"][case]
    assert value.item() == pytest.approx(wanted["loss"], rel=1e-5)
    gradient = rectangle([wanted["gradients"][:3], wanted["gradients"][3:]])
    np.testing.assert_allclose(np.array(slopes), gradient, rtol=1e-5, atol=1e-7)
    means = means_of({name: sums[name].item() if name in sums else 0.0 for name in SUMS}, train)
    assert means["kl"] == pytest.approx(wanted["kl"], rel=1e-5)
    assert means["clip_fraction"] == pytest.approx(wanted["clip_fraction"], rel=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_rewards_that_are_alike_and_groups_of_one_have_no_advantage(kind: str) -> None:
    rewards, counted = mx.array([[0.3, 0.3, 0.3], [5.0, 0.0, 0.0]]), mx.array([[1.0, 1, 1], [1, 0, 0]])
    found = np.array(advantages(rewards, counted, kind))
    assert np.abs(found).max() <= 1e-3  # 0.3 is not quite a third of three times itself


# ---- A step of a model


def rows_of(count: int, seed: int = 3, samples: int = 3) -> list[Example]:
    """Groups of a vocabulary of 20, one completion in five left out."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(count):
        completions = tuple(rng.integers(0, 20, rng.integers(1, 5)).astype(np.int32) for _ in range(samples))
        is_known = rng.random(samples) < 0.8
        rewards = np.where(is_known, rng.normal(0, 1, samples), 0).astype(np.float32)
        sampled = tuple((-3 + 0.1 * rng.normal(size=len(own))).astype(np.float32) for own in completions)
        learnt = tuple(np.full(len(own), known) for own, known in zip(completions, is_known, strict=True))
        prompt = rng.integers(0, 20, rng.integers(1, 6)).astype(np.int32)
        rows.append(Example(row, prompt, completions, None, learnt, rewards, sampled))
    return rows


def reference_of(batch: Any, seed: int = 9) -> np.ndarray:
    """Made-up log-probabilities of a batch's tokens, the same for a token in whatever batch: float32 [b, K, C]."""
    made = np.zeros(batch.mask.shape, np.float32)
    for place, row in enumerate(batch.rows):
        own = np.random.default_rng([seed, int(row)]).normal(-3, 0.3, (batch.mask.shape[1], 8))
        made[place] = own[:, : made.shape[2]]
    return made[: len(batch.rows)]


def step_gradients(
    model: Any, settings: Config, rows: list[Example], sizes: list[int], shared: bool = True
) -> tuple[StepResult, dict[str, np.ndarray]]:
    spy, batches, start = Spy(learning_rate=0.0), [], 0
    for size in sizes:
        batch = collate(rows[start : start + size], 4, shared)
        batches.append((batch, reference_of(batch)))
        start += size
    result = make_step(model, spy, settings.train, World(), dropout=False)(0, 10, batches)
    return result, {name: np.array(g, np.float64) for name, g in tree_flatten(spy.state["seen"])}


WORDS = ("train.loss=grpo", "train.max_grad_norm=null", "train.beta=0.5", "train.temperature=0.7")


def test_a_steps_loss_and_every_gradient_equal_float64(tmp_path: Path) -> None:
    model, settings = build(tmp_path, *WORDS)
    rows = rows_of(3)
    result, gradients = step_gradients(model, settings, rows, [2, 1])
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}
    reference = [reference_of(collate([row], 4, True))[0] for row in rows]
    learnt = [[bool(mask[0]) for mask in row.learnt or ()] for row in rows]
    rewards = [
        [r if known else None for r, known in zip(row.rewards.tolist(), own, strict=True)]
        for row, own in zip(rows, learnt, strict=True)
    ]

    def logps(row: Example, completion: np.ndarray, weights: float64.Weights) -> list[float]:
        prompt = row.prompt_ids.tolist()
        logits = float64.llama_logits(weights, [*prompt, *completion.tolist()], HEADS, KV_HEADS) / 0.7
        of_tokens = logits[len(prompt) - 1 : -1]
        of_tokens = of_tokens - np.log(np.exp(of_tokens).sum(axis=1, keepdims=True))
        return of_tokens[np.arange(len(completion)), completion].tolist()

    def loss_now() -> float:
        weights = merged(parameters, settings.model.scale)
        policy = [[logps(row, own, weights) for own in row.completions] for row in rows]
        sampling = [[own.tolist() for own in row.sampling_logps or ()] for row in rows]
        compared = [
            [own[: len(ids)].tolist() for own, ids in zip(made, row.completions, strict=True)]
            for made, row in zip(reference, rows, strict=True)
        ]
        return loss64(settings.train, policy, sampling, compared, rewards)

    expected = {name: float64.numerical_gradient(loss_now, parameters[name]) for name in gradients}

    def compute() -> list[rounding.Results]:
        result, gradients = step_gradients(model, settings, rows, [2, 1])
        return [finite_means(result), gradients]

    _, limits = rounding.expected_and_limits(model, compute)
    found = [{"loss": result.means["loss"]}, gradients]
    rounding.assert_within(found, [{"loss": np.array(loss_now())}, expected], limits)


def test_micro_batches_of_any_size_and_layout_add_up_to_the_same_step(tmp_path: Path) -> None:
    model, settings = build(tmp_path, *WORDS)
    rows = rows_of(6)

    def compute() -> list[rounding.Results]:
        result, gradients = step_gradients(model, settings, rows, [6])
        return [finite_means(result), gradients]

    expected, limits = rounding.expected_and_limits(model, compute)
    for sizes, shared in (([1] * 6, True), ([4, 2], True), ([1, 5], False)):
        result, gradients = step_gradients(model, settings, rows, sizes, shared)
        rounding.assert_within([finite_means(result), gradients], expected, limits)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_of_tokens_are_those_of_the_logits(
    tmp_path: Path, training: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build(tmp_path)
    model.train(training)
    monkeypatch.setattr(logps_module, "LOGITS_BYTES", 4 * 20 * 3)  # three tokens at a time
    rows = rows_of(3)
    batch = collate(rows, 4, True)
    logps, entropies = (
        np.array(x, np.float64) for x in completion_token_logps(model, arrays_of(batch.inputs), temperature)
    )
    for i, row in enumerate(rows):
        for k, own in enumerate(row.completions):
            count = int(batch.mask[i, k].sum())
            assert count in (0, len(own)) and not logps[i, k, count:].any() and not entropies[i, k, count:].any()
            ids = mx.array([[*row.prompt_ids.tolist(), *own.tolist()]])
            wide = np.array(model(ids)[0, len(row.prompt_ids) - 1 : -1], np.float64) / temperature
            wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
            tolerance = rounding.roundoff(64) * 20
            assert np.abs(logps[i, k, :count] - wide[np.arange(len(own)), own][:count]).max(initial=0) <= tolerance
            assert (
                np.abs(entropies[i, k, :count] + (np.exp(wide) * wide).sum(axis=1)[:count]).max(initial=0) <= tolerance
            )


# ---- Files of groups


def records(count: int, seed: int = 0, samples: int = 4) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        completions = [rng.integers(2, 48, rng.integers(1, 9)).tolist() for _ in range(samples)]
        made.append(
            {
                "prompt_ids": rng.integers(2, 48, rng.integers(1, 12)).tolist(),
                "completion_ids": completions,
                "rewards": rng.normal(0, 1, samples).tolist(),
                "logps": [(-4 + 0.1 * rng.normal(size=len(own))).tolist() for own in completions],
            }
        )
    return made


def run_words(folder: Path, made: list[Any], **changes: Any) -> list[str]:
    words = [word for word in tiny.settings(folder, **changes) if not word.startswith("data.valid=")]
    tiny.write_jsonl(folder / "train.jsonl", made)
    return [*words, "train.loss=grpo", "evaluate.samples=0", "train.learning_rate=1e-2"]


def test_what_nobody_could_judge_changes_nothing(tmp_path: Path) -> None:
    """A completion without a reward is the same as one that is not there, whatever its place and the group's size."""
    made = records(12)
    without = [dict(record) for record in made]
    for i, record in enumerate(made):
        out = i % 4
        for name in ("completion_ids", "rewards", "logps"):
            without[i][name] = [own for k, own in enumerate(record[name]) if k != out]
        record["rewards"][out] = None
    for name, own in (("null", made), ("without", without)):
        (tmp_path / name).mkdir()
        tiny.train(tmp_path / name, [*run_words(tmp_path / name, own), "train.steps=3", "run.name=run"])
    rounding.assert_equal_runs(tmp_path / "null/runs/run", [tmp_path / "without/runs/run"], ["loss", "kl", "reward"])


def test_without_logps_the_policy_itself_counts_as_the_one_that_sampled(tmp_path: Path) -> None:
    made = [{name: own for name, own in record.items() if name != "logps"} for record in records(8)]
    tiny.train(tmp_path, [*run_words(tmp_path, made), "train.steps=2", "run.name=run", "train.beta=0"])
    for record in tiny.steps_of(tmp_path / "runs/run"):
        assert record["clip_fraction"] == 0.0 and record["kl"] is None
        assert {"reward", "reward_std", "entropy", "completion_length"} <= record.keys()
        assert abs(record["loss"]) <= 1e-5  # advantages sum up to 0, and every ratio is 1


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    words = [*run_words(tmp_path, records(21)), "train.schedule=constant", "checkpoint.every=3"]
    tiny.train(tmp_path, [*words, "run.name=whole", "train.steps=7"])
    tiny.train(tmp_path, [*words, "run.name=halves", "train.steps=3"])
    tiny.train(tmp_path, ["--resume", str(tmp_path / "runs/halves"), "train.steps=7"])
    whole, halves = tmp_path / "runs/whole", tmp_path / "runs/halves"
    assert tiny.difference(whole, halves) == 0.0 and tiny.figure_difference(whole, halves, "loss") == 0.0


@pytest.mark.parametrize(
    "words",
    [["train.compile=true", "train.max_traces=1"], ["data.shared_prompts=false", "plan.micro_batch_sizes=[3]"]],
    ids=str,
)
def test_layouts_train_as_the_usual_one_does(tmp_path: Path, words: list[str]) -> None:
    common = [*run_words(tmp_path, records(16)), "train.steps=3"]
    tiny.train(tmp_path, [*common, "run.name=one"])
    tiny.train(tmp_path, [*common, "run.name=other", *words])
    runs = tmp_path / "runs/one", tmp_path / "runs/other"
    rounding.assert_equal_runs(runs[0], [runs[1]], FIGURES)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "words",
    [["plan.shares=[6,2]"], ["strategy=pipelined"], ["strategy=sharded", "model.shard_vocabulary=true"]],
    ids=str,
)
def test_ranks_train_as_one_rank_does(world: World, folder: Path, words: list[str]) -> None:
    mine = run_words(folder, records(16)) if world.rank == 0 else []
    common = [*json.loads(world.broadcast_text(json.dumps(mine))), "train.steps=3"]
    alone = rounding.trained_alone(world, common)
    run = train(world, folder, [*common, *words], "other")
    world.gather_text("finished")
    rounding.assert_equal_runs(alone, [run], FIGURES)
    world.gather_text("checked")


GOOD = {"prompt_ids": [5, 6], "completion_ids": [[7, 1], [8]], "rewards": [1.0, 0], "logps": [[-1, -2.0], [0]]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"completion_ids": None}, "have a list 'completion_ids', and it is null"),
        ({"prompt_ids": []}, "empty prompt"),
        ({"completion_ids": [[7, 1], []]}, "completion_ids[1] is empty"),
        ({"completion_ids": [[7, True], [8]]}, "completion_ids[0] has True"),
        ({"completion_ids": [[7, 48], [8]]}, "48, which is no token id below 48"),
        ({"rewards": [1.0]}, "2 completion_ids and 1 rewards"),
        ({"rewards": [1.0, "good"]}, "rewards[1] is 'good', neither a number nor null"),
        ({"rewards": [1.0, float("nan")]}, "rewards[1] is nan"),
        ({"rewards": [1.0, 10**400]}, "neither a number nor null"),
        ({"rewards": [1e39, 0.0]}, "rewards[0] is 1e+39"),
        ({"logps": [[-1.0], [0]]}, "logps[0] is not a list of 2 numbers"),
        ({"logps": [[-1.0, 0.5], [0]]}, "logps[0] has what is no log-probability"),
        ({"prompt_ids": [5] * 63}, "data.max_length=64"),
    ],
    ids=str,
)
def test_a_record_that_is_no_group_is_one_clear_line(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    file = tiny.write_jsonl(tmp_path / "groups.jsonl", [GOOD, GOOD | change])
    settings = DataSettings(train=str(file), max_length=64)
    with pytest.raises(UserError) as error:
        load_groups(settings, ModelLimits(48))
    assert expected in str(error.value) and f"{file}:2" in str(error.value) and "\n" not in str(error.value)
    assert len(load_groups(settings.model_copy(update={"skip_invalid": True}), ModelLimits(48))) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.valid=groups.jsonl"], "data.valid is not for train.loss=grpo"),
        (["data.holdout=0.1"], "data.holdout is not for train.loss=grpo"),
        (["data.streaming=true"], "data.streaming is not for train.loss=grpo"),
        (["train.loss_type=dr_grpo"], "train.max_completion_length belong together"),
        (["train.loss=sigmoid", "train.epsilon=0.1"], "train.epsilon is for train.loss=grpo"),
        (["train.loss=sigmoid", "train.beta=0"], "train.beta=0 is for grpo alone"),
        (["train.use_weighting=true"], "train.use_weighting is for losses of pairs"),
    ],
    ids=str,
)
def test_settings_that_do_not_belong_to_the_loss_are_refused(tmp_path: Path, words: list[str], expected: str) -> None:
    result = tiny.train(tmp_path, [*run_words(tmp_path, [GOOD]), *words], check=False)
    assert result.returncode == 2 and expected in result.stderr and "Traceback" not in result.stderr
