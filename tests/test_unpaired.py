"""KTO and BCO: losses and gradients against float64 and TRL, rows and their mismatched completions, whole runs."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib import errors
from lib.config.settings import Config, DataSettings, TrainSettings
from lib.data.batch import MicroBatches, collate
from lib.data.dataset import Dataset, Example, load_dataset, partners, with_mismatched
from lib.data.streaming import open_training
from lib.data.tokenizer import Vocabulary
from lib.distributed.world import World
from lib.evaluate.command import main as evaluate
from lib.training.losses import SUMS, means_of, objective
from lib.training.step import Step, StepRecord
from lib.training.unpaired_losses import UNPAIRED_LOSSES, baseline_of_step, unpaired_losses
from tests import float64, rounding, tiny
from tests.test_losses import log_sigmoid64
from tests.test_step import Spy, build, float64_logps, gradients_of, parts_of, reference_logps
from tests.test_step import means_of as finite_means

BETA, WEIGHTS = 0.3, (1.25, 0.75)
TRAIN = {"beta": BETA, "desirable_weight": WEIGHTS[0], "undesirable_weight": WEIGHTS[1]}


# ---- The formulas


def loss64(
    name: str, ratio: float, desirable: bool, baseline: float, beta: float, weights: tuple[float, float]
) -> float:
    """One row's loss, from the papers."""
    sign, weight = (1, weights[0]) if desirable else (-1, weights[1])
    if name == "kto":
        return weight * (1 - 1 / (1 + math.exp(-sign * beta * (ratio - baseline))))
    return -weight * log_sigmoid64(sign * (beta * ratio - baseline))


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_extremes_stay_finite_and_small_gradients_keep_their_digits(name: str) -> None:
    values = [-2e4, -50.0, -1e-6, 0.0, 1e-6, 50.0, 2e4]
    log_ratios, desirable = mx.array(values), mx.array([True] * len(values))
    train = TrainSettings(loss=name, beta=1.0)

    def total(ratios: mx.array) -> mx.array:
        return unpaired_losses(ratios, desirable, mx.array(0.0), train)[0].sum()

    slopes = mx.grad(total)(log_ratios)
    assert np.isfinite(np.array(total(log_ratios))) and np.isfinite(np.array(slopes)).all()
    assert slopes[5].item() == pytest.approx(-math.exp(-50.0), rel=1e-5)


def test_the_baseline_is_never_negative_and_no_number_stays_none() -> None:
    train = TrainSettings(loss="kto")
    values = [baseline_of_step(train, mx.array(sums), []) for sums in ([-3.0, 4], [3.0, 4], [0.0, 0], [math.nan, 4])]
    assert values[:3] == [0.0, 0.75, 0.0] and math.isnan(values[3])


TRL = json.loads((tiny.ROOT / "tests/golden/trl.json").read_text())["unpaired"]  # tests/trl_figures.py


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_loss_gradients_and_metrics_are_those_of_trl(name: str) -> None:
    train = TrainSettings(loss=name, **(TRAIN if name == "kto" else {"beta": BETA}))
    sides = [[TRL[side], TRL[f"mismatched_{side}"]] for side in ("policy", "reference")]
    policy, reference = (np.array(side, np.float32).T for side in sides)
    wanted = TRL["figures"][name]
    sums = mx.array([float((policy - reference)[:, int(name == "kto")].sum()), 6.0])
    compared_with = mx.array(baseline_of_step(train, sums, [sum(TRL["earlier_rewards"]), 3.0]))

    def total(logps: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        arguments = mx.stack([logps, mx.array(policy[:, 1])], axis=1), mx.ones((6, 2)), mx.array(reference)
        _, sums = objective(train, *arguments, mx.array(TRL["labels"]), compared_with)
        return sums["loss"] / sums["count"], sums

    (loss, parts), gradients = mx.value_and_grad(total)(mx.array(policy[:, 0]))
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)
    assert gradients.tolist() == pytest.approx(wanted["gradients"], rel=1e-5)
    assert compared_with.item() == pytest.approx(wanted["baseline"], rel=1e-5)
    means = means_of({key: parts[key].item() if key in parts else 0.0 for key in SUMS}, train)
    assert means["reward_chosen"] == pytest.approx(0.55, rel=1e-5)
    assert means["reward_rejected"] == pytest.approx(-0.2, rel=1e-5)
    assert means["reward_margin"] == pytest.approx(0.75, rel=1e-5)
    assert (means["desirable"], means["undesirable"]) == (3, 3)
    if name == "kto":
        assert means["kl"] == pytest.approx(0.625, rel=1e-5)


# ---- A step


def rows_of(count: int, seed: int = 3, longest: int = 5) -> list[Example]:
    """Labelled rows of ragged lengths, each with another completion behind its own."""
    rng = np.random.default_rng(seed)

    def ids(shortest: int) -> np.ndarray:
        return rng.integers(2, 20, rng.integers(shortest, longest + 1))

    return [Example(i, ids(1), (ids(1), ids(1)), label=bool(i % 3)) for i in range(count)]


def step_gradients(
    model: Any, settings: Config, rows: list[Example], reference: np.ndarray, sizes: list[int], rewards: list[float]
) -> tuple[StepRecord, dict[str, np.ndarray]]:
    """A step's result and its gradients; rewards: changed as the step does."""
    with_other, batches = settings.train.loss == "kto", []
    for part in parts_of(sizes):
        each = [[dataclasses.replace(r, completions=r.completions[k : k + 1]) for r in rows[part]] for k in (0, 1)]
        own, mismatched = (collate(one, 4, True) for one in each)
        batch = dataclasses.replace(own, mismatched=mismatched if with_other else None)
        batches.append((batch, reference[part, : 1 + with_other]))
    return gradients_of(model, settings, batches, rewards)


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
@pytest.mark.long("bco")
def test_a_steps_loss_and_every_gradient_equal_float64(tmp_path, loss: str) -> None:
    words = [f"train.loss={loss}", "train.max_grad_norm=null", "train.beta=0.5"]
    model, settings = build(tmp_path, *words, "train.desirable_weight=1.5", "train.undesirable_weight=0.8")
    rows, reference = rows_of(3), reference_logps(3)
    earlier = [1.5, 4.0]
    result, gradients = step_gradients(model, settings, rows, reference, [2, 1], list(earlier))
    parameters = {name: np.array(a, np.float64) for name, a in tree_flatten(model.parameters())}

    def ratios() -> np.ndarray:
        return float64_logps(parameters, rows, settings.model.scale) - reference.astype(np.float64)

    def baseline64() -> float:
        own, mismatched = ratios().T
        return max(0.0, mismatched.mean()) if loss == "kto" else (earlier[0] + 0.5 * own.sum()) / (earlier[1] + 3)

    held = baseline64()  # no gradient goes through it

    def loss_now() -> float:
        rates = zip(ratios()[:, 0], [row.label for row in rows], strict=True)
        return float(np.mean([loss64(loss, ratio, bool(label), held, 0.5, (1.5, 0.8)) for ratio, label in rates]))

    expected = {name: float64.numerical_gradient(loss_now, parameters[name]) for name in gradients}

    def compute() -> list[rounding.Results]:
        result, gradients = step_gradients(model, settings, rows, reference, [2, 1], list(earlier))
        return [finite_means(result), gradients]

    _, limits = rounding.expected_and_limits(model, compute)
    found = [{"loss": result.means["loss"]}, gradients]
    rounding.assert_within(found, [{"loss": np.array(loss_now())}, expected], limits)
    if loss == "kto":
        assert result.means["kl"] == pytest.approx(held, rel=1e-5)


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_micro_batches_of_any_size_add_up_to_the_same_step(tmp_path, loss: str) -> None:
    model, settings = build(tmp_path, f"train.loss={loss}", "train.max_grad_norm=null", "train.beta=0.5")
    rows, reference = rows_of(6), reference_logps(6) - 20  # so that the baseline is not 0

    def compute() -> list[rounding.Results]:
        rewards = [0.5, 2.0]
        result, gradients = step_gradients(model, settings, rows, reference, [6], rewards)
        return [finite_means(result) | {"rewards": rewards[0]}, gradients]

    expected, limits = rounding.expected_and_limits(model, compute)
    for sizes in ([1] * 6, [4, 2], [1, 5], [3, 2, 1]):
        rewards = [0.5, 2.0]
        result, gradients = step_gradients(model, settings, rows, reference, sizes, rewards)
        rounding.assert_within([finite_means(result) | {"rewards": rewards[0]}, gradients], expected, limits)
        assert rewards[1] == (8.0 if loss == "bco" else 2.0)


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_a_step_that_is_not_finite_is_left_out_and_so_are_its_rewards(tmp_path, loss: str) -> None:
    model, settings = build(tmp_path, f"train.loss={loss}")
    reference, rewards = reference_logps(3), [0.5, 2.0]
    reference[1, -1 if loss == "kto" else 0] = np.nan  # kto: of a mismatched completion alone
    step = Step(model, Spy(learning_rate=0.0), settings.train, World())
    step.rewards = rewards
    data, columns = labelled_dataset(3), 1 + (loss == "kto")
    rows = with_mismatched(data, 64) if loss == "kto" else data
    make = MicroBatches(rows, reference[:, :columns], 4, True)
    assert step(0, 1e-4, make.of([np.arange(3)], 3)).skipped and rewards == [0.5, 2.0]


# ---- Rows


def labelled(count: int, seed: int = 0, vocab_size: int = 48, longest: int = 12) -> list[dict[str, Any]]:
    """Tokenised records with labels, of ragged lengths; some prompts come twice."""
    rng = random.Random(seed)

    def ids(shortest: int) -> list[int]:
        return [rng.randrange(2, vocab_size) for _ in range(rng.randint(shortest, longest))]

    records: list[dict[str, Any]] = []
    for i in range(count):
        prompt = records[-1]["prompt_ids"] if i % 4 == 3 else ids(1)
        records.append({"prompt_ids": prompt, "completion_ids": [*ids(1), 1], "label": rng.random() < 0.5})
    return records


def labelled_dataset(count: int) -> Dataset:
    from lib.data.dataset import in_memory

    records = labelled(count, vocab_size=20, longest=5)
    pieces = [np.array(r[key], np.int32) for r in records for key in ("prompt_ids", "completion_ids")]
    return in_memory("-", "unpaired", "-", pieces, np.array([r["label"] for r in records]))


def read(folder: Path, records: list[Any], **settings: Any) -> Dataset:
    path = tiny.write_jsonl(folder / "rows.jsonl", records)
    data = DataSettings(train=str(path), cache_dir=str(folder / "cache"), **settings)
    return load_dataset(str(path), data, "unpaired", None, vocabulary=Vocabulary(1, 48))


@pytest.mark.parametrize("count", [2, 3, 10, 997])
def test_every_row_gets_the_completion_of_another_prompt_and_each_is_taken_once(count: int) -> None:
    others = partners(np.arange(count), "x")
    assert sorted(others.tolist()) == list(range(count)) and (others != np.arange(count)).all()
    assert (others == partners(np.arange(count), "x")).all()


def test_mismatched_completions_keep_the_prompt_and_fit_the_length(tmp_path) -> None:
    plain = read(tmp_path, labelled(40), max_length=16)
    data = with_mismatched(plain, 16)
    assert data.completions_per_example == 2 and data.digest != plain.digest and len(data) == len(plain) == 40
    cut = 0
    for row, own in zip(data, plain, strict=True):
        assert row.label == own.label and (row.prompt_ids == own.prompt_ids).all()
        assert (row.completions[0] == own.completions[0]).all()
        mismatched = row.completions[1]
        assert 1 <= len(mismatched) <= 16 - len(row.prompt_ids)
        sources = [e for e in plain if e.completions[0][: len(mismatched)].tolist() == mismatched.tolist()]
        assert any(e.prompt_ids.tolist() != row.prompt_ids.tolist() for e in sources)
        cut += all(len(e.completions[0]) > len(mismatched) for e in sources)
    assert cut, "no completion was cut: the test tests nothing"
    trained_prompts, seen, scored = data.trained
    assert seen.shape == scored.shape == (40, 1) and (trained_prompts == plain.prompts).all()


@pytest.mark.parametrize("row", [{"prompt_ids": [5, 6], "completion_ids": [7, 1]}, {"prompt": "a", "completion": "b"}])
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"label": None}, "label"),
        ({"label": "yes"}, 'is "yes", not true or false'),
        ({"label": 2}, "is 2, not true or false"),
        ({"label": []}, "is [], not true or false"),
        ({}, "no column 'label'"),
        ({"rating": True}, "data.columns={label: COLUMN}"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_no_label_is_one_clear_line(
    tmp_path, row: dict[str, Any], record: dict[str, Any], expected: str, streaming: bool
) -> None:
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", [*labelled(4), row | record])
    settings = DataSettings(train=str(path), streaming=streaming, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(errors.UserError) as told:
        open_training(settings, "unpaired", None, tell=print, vocabulary=Vocabulary(1))
    assert expected in str(told.value) and "rows.jsonl:5" in str(told.value)


# ---- Runs


def run_words(folder: Path, loss: str, **changes: Any) -> list[str]:
    words = tiny.settings(folder, **changes)
    tiny.write_jsonl(folder / "train.jsonl", labelled(21))
    tiny.write_jsonl(folder / "valid.jsonl", labelled(7, seed=1))
    return [*words, f"train.loss={loss}", "evaluate.samples=0"]


def test_a_compiled_step_asks_the_reference_of_fewer_rows_than_its_shape(tmp_path) -> None:
    """Batches are padded to shapes, and completions beside others' prompts, of KTO, to none."""
    words = [*run_words(tmp_path, "kto"), "train.steps=4", "plan.micro_batch_sizes=[4]"]
    words += ["train.global_batch_size=7", "train.max_traces=1"]
    for compiled in (False, True):
        tiny.train(tmp_path, [*words, f"run.name={compiled}", f"train.compile={compiled}"])
    rounding.assert_equal_runs(tmp_path / "runs/False", [tmp_path / "runs/True"], ["loss"])


@pytest.mark.parametrize("loss", UNPAIRED_LOSSES)
def test_per_pair_writes_a_line_a_row_from_which_the_loss_follows(tmp_path, loss: str, capsys) -> None:
    tiny.train(tmp_path, [*run_words(tmp_path, loss), "train.steps=4", "run.name=run", "train.learning_rate=1e-2"])
    out = tmp_path / "rows.jsonl"
    capsys.readouterr()
    assert evaluate(["--run", str(tmp_path / "runs/run"), "--per-pair", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = tiny.read_jsonl(out)
    assert [line["label"] for line in lines] == [record["label"] for record in labelled(7, seed=1)]
    assert list(lines[0]) == ["label", "policy_logp", "reference_logp", "reward", "loss"]
    shift = figures["kl"] if loss == "kto" else np.mean([line["reward"] for line in lines])
    for line in lines:
        ratio = line["policy_logp"] - line["reference_logp"]
        assert line["reward"] == pytest.approx(0.1 * ratio, rel=1e-5, abs=1e-7)
        assert line["loss"] == pytest.approx(loss64(loss, ratio, line["label"], shift, 0.1, (1, 1)), rel=1e-5)
    assert figures["loss"] == pytest.approx(np.mean([line["loss"] for line in lines]), rel=1e-6)
    assert tiny.summary(tmp_path / "runs/run")["loss"] == pytest.approx(figures["loss"], rel=1e-6)
