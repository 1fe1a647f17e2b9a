"""Each anti-pattern of docs/best_practices.md is detected and said, with its numbers; its opposite is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lib.config import load
from lib.config.schema import Config
from lib.model.partition import model_shape_of
from lib.plan import plan_warnings
from lib.plan.calibration import BatchCurve, read_published
from lib.plan.divide_work import make_plan, plan_sharded
from lib.plan.replan import Schedule
from lib.plan.run_facts import RankHost
from lib.plan.strategy import plan_merging
from tests import tiny
from tests.test_plan import LLAMA_8B
from tests.test_replan import LEAD, constant, played

HOSTS = ["m4-max", "m3-ultra"]
SHAPE = model_shape_of(LLAMA_8B)


def configured(*words: str) -> Config:
    return load.load(None, ["model.path=m", "data.train=d", "train.global_batch_size=128", *words])


def published() -> list[BatchCurve]:
    known = read_published()
    return [known[host].curves[0] for host in HOSTS]


def warnings(*words: str, hosts: list[str] = HOSTS, curves: list[BatchCurve] | None = None) -> str:
    settings = configured(*words)
    plan = make_plan(settings, hosts, curves)
    advised = plan_warnings.advised(settings, plan)
    assert advised.shares == plan.shares and advised.warnings[: len(plan.warnings)] == plan.warnings
    return "\n".join(advised.warnings)


def test_a_good_plan_is_left_in_peace() -> None:
    assert warnings(curves=published()) == ""
    assert warnings("plan.shares=[96,32]", curves=published()) == ""
    assert warnings(hosts=["one"]) == "" and warnings(hosts=["one", "one"]) == ""
    assert warnings("plan.shares=[64,64]", curves=[published()[0]] * 2) == ""


@pytest.mark.parametrize(
    ("shares", "words"), [("[64,64]", "equal shares of unequal hosts, "), ("[84,44]", ""), ("[128,0]", "")]
)
def test_shares_that_the_curves_contradict(shares: str, words: str) -> None:
    said = warnings(f"plan.shares={shares}", curves=published())
    listed = shares.replace(",", ", ")
    found = re.fullmatch(
        rf"(no work .*\n)?plan.shares {re.escape(listed)}: {words}(\S+) s a step .* \[96, 32\] would take (\S+) s; leave .*",
        said,
    )
    assert found and float(found[2]) > 1.05 * float(found[3]), said


def test_micro_batches_beyond_the_knee() -> None:
    said = warnings("plan.shares=[96,32]", "plan.micro_batch_sizes=[32,32]", curves=published())
    assert "rank 1 (m3-ultra): micro-batches of 32 pairs are beyond its knee, 210 pairs/s where 4 give 278" in said
    assert "rank 0" not in said
    assert warnings("plan.micro_batch_sizes=[64,4]", curves=published()) == ""  # 750 of 776 is near enough


@pytest.mark.parametrize(
    ("memory", "words", "is_said"),
    [
        ([128, 512], ["strategy=sharded"], True),
        ([33, 33], ["strategy=sharded"], True),
        ([30, 512], ["strategy=sharded"], False),  # half of the smaller is needed for activations
        ([128, 512], ["strategy=auto"], False),
        ([128, 512], ["strategy=sharded", "model.method=full"], False),  # 16 GB of weights, and seven times that beside
        ([128, None], ["strategy=sharded"], False),
        ([512, 512], ["strategy=sharded", "model.method=full"], True),
    ],
)
def test_a_model_that_fits_need_not_be_divided(memory: list[int | None], words: list[str], is_said: bool) -> None:
    settings = configured(*words)
    sizes = [size and size * 10**9 for size in memory]
    hosts = [RankHost(host, memory_bytes=size) for host, size in zip(HOSTS, sizes, strict=True)]
    plan = plan_sharded(settings, hosts, SHAPE)
    said = plan_warnings.advised(settings, plan).warnings
    assert bool(said) == is_said, said
    if is_said:
        needed = 128 if "model.method=full" in words else 16.1  # 2 bytes a weight, and 14 more to train it
        assert f"takes {needed} GB and the smallest host has {min(memory)} GB" in said[0]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("words", "until"),
    [
        ([], "equal until the first steps have been timed"),
        (["plan.replan=false"], "the slowest host holds back the others"),
        (["plan.shares=[64,64]"], "nobody can say whether plan.shares suits the hosts"),
    ],
)
def test_hosts_that_nobody_measured(words: list[str], until: str) -> None:
    said = warnings(*words)
    assert "no calibration of m4-max, m3-ultra: " in said and until in said and "make calibrate HOSTS=hostfile" in said


def test_a_learning_rate_that_was_chosen_for_another_batch(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: m}\ndata: {train: d}\ntrain: {learning_rate: 1e-4, global_batch_size: 32}\n")

    def said(*words: str) -> str:
        return plan_warnings.unscaled_learning_rate(load.load(file, words).train) or ""

    message = said("train.global_batch_size=128")
    assert "is 128, but train.learning_rate=0.0001 was chosen for 32" in message and "scaling=sqrt" in message
    assert "scaling=linear" in said("train.global_batch_size=128", "train.optimizer=sgd")
    scaled = load.load(file, ["train.learning_rate_scaling=sqrt", "train.global_batch_size=128"]).train
    assert scaled.learning_rate_batch_size == 32, "the scaling knows what to scale by"
    for words in (
        [],
        ["train.global_batch_size=32"],
        ["train.global_batch_size=128", "train.learning_rate=2e-4"],
        ["train.global_batch_size=128", "train.learning_rate_scaling=sqrt"],
        ["train.global_batch_size=128", "train.learning_rate_batch_size=128"],
        ["train.learning_rate=2e-4"],
    ):
        assert said(*words) == "", words
    file.write_text("model: {path: m}\ndata: {train: d}\ntrain:\n")  # the default's batch is 16
    assert "chosen for 16" in said("train.global_batch_size=8")


def test_a_learning_rate_that_is_a_slip() -> None:
    assert warnings("train.learning_rate=10", hosts=["one"]).count("is beyond what adamw can train with") == 1, (
        "said once"
    )
    assert "beyond what" not in warnings("train.learning_rate=1e-3") + warnings(
        "train.learning_rate=10", "train.optimizer=sgd"
    )
    assert "is 305 nats" in str(plan_warnings.strayed(305.1)) and "is -305 nats" in str(plan_warnings.strayed(-305.1))
    assert plan_warnings.strayed(30.0) is None and plan_warnings.strayed(None) is None


def test_outer_wants_several_rounds() -> None:
    told = ["strategy=independent", "independent.merge=outer"]
    hosts = ["one", "one"]

    def said(*words: str) -> bool:
        settings = configured(*told, *words)
        merges = plan_merging(settings, 20, 10, None, None).merges
        plan = replace(make_plan(settings, hosts), strategy=settings.strategy, merges=merges)
        return bool(plan_warnings.one_outer_round(settings, plan))

    assert said("independent.pairs_per_round=1000000")
    assert not said() and not said("independent.pairs_per_round=256")
    assert not said("independent.pairs_per_round=1000000", "independent.merge=svd")
    assert not said("independent.pairs_per_round=1000000", "strategy=synchronous")


@pytest.mark.parametrize("words", [["plan.shares=[64,64]"], ["plan.replan=false"]])
def test_shares_that_the_measured_times_contradict_are_said_once_and_kept(words: list[str]) -> None:
    settings = configured(*words)
    schedule = Schedule(make_plan(settings, HOSTS), settings.plan, LEAD, steps=100_000)
    decided, _ = played(schedule, 40, constant(4.0, 1.0))
    assert decided == [] and schedule.at(40).shares == [64, 64]
    [remark] = schedule.remarks
    assert remark.startswith(f"{words[0].partition('[')[0].rstrip('=')} keeps shares [64, 64], where [10"), remark
    assert "pairs/s of rank 0 (m4-max) " in remark


def test_suitable_shares_are_not_remarked_upon() -> None:
    settings = configured("plan.shares=[102,26]")
    schedule = Schedule(make_plan(settings, HOSTS), settings.plan, LEAD, steps=100_000)
    played(schedule, 40, constant(4.0, 1.0))
    assert schedule.remarks == []


def test_a_run_says_it(tmp_path: Path) -> None:
    words = [w for w in tiny.settings(tmp_path, plan__micro_batch_sizes="[8]") if "learning_rate=" not in w]
    words = [w for w in words if "global_batch_size" not in w]
    file = tiny.config_file(tmp_path)
    result = tiny.train(tmp_path, ["--config", str(file), *words, "train.global_batch_size=8", "--dry-run"])
    assert "warning: train.global_batch_size is 8, but train.learning_rate=5e-05 was chosen for 16" in result.stdout
