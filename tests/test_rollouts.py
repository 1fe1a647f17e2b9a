"""Rounds: the same answers whoever draws them, the same end wherever a run stopped, a gate that undoes what loses."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest

from lib.config.load import load
from lib.config.settings import RolloutSettings, TrainSettings
from lib.data.dataset import load_dataset
from lib.data.encode import Encoder
from lib.data.prompts import load_questions, open_prompts
from lib.data.tokenizer import Vocabulary, load_tokenizer_of
from lib.distributed.work_queue import Journal
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command as evaluate
from lib.report import charts, run_report
from lib.report.history import OF_ROUNDS, RunHistory
from lib.rollouts.pairs import (
    Answer,
    Group,
    Pair,
    RoundFigures,
    SampleFigures,
    figures_of,
    groups_of,
    losses_of,
    pairs_of,
    warnings_of,
    why_nothing,
)
from lib.rollouts.rounds import Rounds
from lib.system.records import read_records
from lib.training.checkpoint import MOMENTUM, common_at, fault_of, load_part
from lib.training.checkpoint import part_of as rank_file
from lib.training.loop import Learner
from lib.training.optimizers import learning_rate
from tests import tiny
from tests.test_data import CORPUS, byte_level
from tests.tiny import read_jsonl as lines

# ---- Pairs


def group(*scores: float | None, tokens: list[list[int]] | None = None) -> Group:
    ids = tokens or [[k + 2, 1] for k in range(len(scores))]
    answers = [Answer(7, k, str(k), "stop", ids[k], [-0.5] * len(ids[k]), score) for k, score in enumerate(scores)]
    return Group(7, [2, 3], answers)


def chosen_and_rejected(pairs: list[Pair]) -> list[tuple[int, int]]:
    return [(pair.chosen.k, pair.rejected.k) for pair in pairs]


@pytest.mark.parametrize(
    ("scores", "settings", "pairs"),
    [
        ((0.0, 1.0, 1.0, 0.0), {}, [(1, 0)]),
        ((1.0, 1.0), {}, []),
        ((None, None), {}, []),
        ((None, 1.0), {}, []),
        ((None, -2.0, None, 3.0), {}, [(3, 1)]),
        ((0.0, 0.4, 1.0, None), {"margin": 0.5}, [(2, 0), (2, 1)]),
        ((0.0, 0.4), {"margin": 0.5}, []),
    ],
)
def test_the_best_and_the_worst_or_all_above_a_margin_make_pairs(scores: Any, settings: Any, pairs: Any) -> None:
    assert chosen_and_rejected(pairs_of(group(*scores), RolloutSettings(**settings))) == pairs


def test_an_answer_that_was_drawn_twice_counts_once() -> None:
    settings = RolloutSettings(margin=0.5)
    assert chosen_and_rejected(pairs_of(group(0.0, 1.0, 0.0, tokens=[[2, 1], [3, 1], [2, 1]]), settings)) == [(1, 0)]
    assert pairs_of(group(1.0, 0.0, tokens=[[2, 1], [2, 1]]), settings) == [], "nothing to prefer between equals"


def test_what_was_cut_teaches_nothing_if_asked() -> None:
    whole, masked = group(0.0, 1.0, 2.0), RolloutSettings(mask_truncated=True)
    cut = whole._replace(answers=[*whole.answers[:2], replace(whole.answers[2], finish="length")])
    assert chosen_and_rejected(pairs_of(cut, masked)) == [(1, 0)]
    (made,) = groups_of([cut], masked)
    assert made.rewards == [0.0, 1.0, 2.0] and made.completion_mask == [[True, True], [True, True], [False, False]]
    nothing = whole._replace(answers=[replace(answer, finish="length") for answer in whole.answers])
    assert groups_of([nothing, group(1.0, 1.0)], masked) == [] and len(groups_of([nothing, cut], masked)) == 2
    shorter = group(0.0, 1.0, tokens=[[2, 4, 1], [1]])
    (made,) = groups_of([shorter], masked)
    assert made.completion_mask == [[True] * 3, [True]]
    assert groups_of([shorter], RolloutSettings()) == [made.model_copy(update={"completion_mask": None})]
    assert (made.prompt_ids, made.completion_ids, made.logps) == ([2, 3], [[2, 4, 1], [1]], [[-0.5] * 3, [-0.5]])


def test_groups_of_equal_scores_can_be_left_out() -> None:
    groups = [group(1.0, 1.0), group(0.0, 1.0, None), group(None, None)]
    assert len(groups_of(groups, RolloutSettings())) == 2
    assert [made.rewards for made in groups_of(groups, RolloutSettings(filter_groups=True))] == [[0.0, 1.0, None]]
    assert groups_of([groups[0], groups[2]], RolloutSettings()) == [], "there is nothing to learn"


def test_figures_are_sums_over_counts() -> None:
    groups = [group(0.0, 1.0, None, tokens=[[2, 1], [3, 4, 5, 1], [2, 1]]), group(1.0, 1.0, tokens=[[2], [3]])]
    pairs = [pair for one in groups for pair in pairs_of(one, RolloutSettings())]
    figures = figures_of(groups, pairs)
    assert (figures.prompts, figures.samples, figures.failed, figures.pairs) == (2, 5, 1, 1)
    assert (figures.score, figures.accepted, figures.duplicates, figures.tokens) == (0.75, 0.5, 1 / 5, 2)
    assert (figures.entropy, figures.unended) == (0.5, 0.0)


def test_a_round_that_teaches_nothing_says_why() -> None:
    settings, equal = RolloutSettings(max_tokens=8), group(1.0, 1.0)
    cut = equal._replace(answers=[replace(answer, finish="length") for answer in equal.answers])
    assert why_nothing([equal], settings) == "no prompt has answers of different scores to learn from"
    count = "2 of 4 answers were cut by rollouts.max_tokens=8"
    assert why_nothing([equal, cut], settings).endswith(f"different scores to learn from; {count}")
    masked = settings.model_copy(update={"mask_truncated": True})
    assert why_nothing([cut], masked).endswith("max_tokens=8, and rollouts.mask_truncated=true leaves those out")
    assert why_nothing([group(None, None)], masked) == "the judge scored none of the 2 answers"


# ---- The gate


def samples(**changes: Any) -> SampleFigures:
    ended, entropy = {"tokens": 40.0, "unended": 0.0}, {"entropy": 0.5, "duplicates": 0.1}
    known = {"prompts": 64, "samples": 256, "failed": 0, "pairs": 40, "score": 0.4, "accepted": 0.6}
    return SampleFigures(**{**known, **ended, **entropy, **changes})


def test_a_round_is_measured_against_the_best_that_was_kept() -> None:
    known = [
        RoundFigures(0, {"exact_match": 0.30}),
        RoundFigures(1, {"exact_match": 0.50}, samples()),
        RoundFigures(2, {"exact_match": 0.90}, samples(), undone=True),
        RoundFigures(3, {"exact_match": 0.46}, samples()),
    ]
    assert losses_of(known, {"exact_match": 0.45}, 0.05) == []
    assert losses_of(known, {"exact_match": 0.44}, 0.05) == ["held-out exact match 0.5 (after round 1) ➜ 0.44"]
    assert losses_of(known, {"exact_match": 0.0}, None) == losses_of(known, {"held_out_score": 0.0}, 0.05) == []


def test_what_looks_like_a_gamed_judge_is_named() -> None:
    start = RoundFigures(0, {"exact_match": 0.5})

    def said(first: SampleFigures, last: SampleFigures) -> list[str]:
        return warnings_of([start, RoundFigures(1, {"exact_match": 0.5}, first), RoundFigures(2, {}, last)])

    assert said(samples(), samples()) == []
    assert "answers grow: 40 ➜ 70 tokens since round 1" in said(samples(), samples(tokens=70.0))[0]
    assert "the policy collapses" in said(samples(), samples(entropy=0.01))[0]


# ---- Prompts


def test_rounds_take_all_prompts_in_turn(tmp_path) -> None:
    tiny.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt_ids": [2] * (1 + row % 5)} for row in range(13)])
    settings = load(None, ["model.path=m", "data.train=d", f"data.cache_dir={tmp_path}/cache"]).data
    prompts = open_prompts(str(tmp_path / "prompts.jsonl"), settings, None, RolloutSettings(), 2, None, print)
    rounds = [prompts.of_round(number, 4, seed=0) for number in range(1, 7)]
    assert len(set(sum(rounds[:3], []))) == 12 == len(set(sum(rounds[3:], [])))
    assert rounds == [prompts.of_round(number, 4, seed=0) for number in range(1, 7)] and rounds[0] != rounds[3]
    for rows in rounds:
        lengths = [len(prompts.ids[row]) for row in rows]
        assert lengths == sorted(lengths, reverse=True)


# ---- Runs


def outcome(run: Path) -> tuple[dict[Path, bytes], dict[str, bytes]]:
    """The content of every file of the rounds, and the weights."""
    files = {path.relative_to(run): path.read_bytes() for path in run.glob("rounds/**/*") if path.is_file()}
    return files, tiny.bits(run)


@pytest.fixture(scope="module")
def second_loses() -> Iterator[None]:
    """The second round is undone, whatever this machine's roundings make of it."""
    with pytest.MonkeyPatch.context() as patcher:
        why = "lib.rollouts.rounds.losses_of"
        patcher.setattr(why, lambda rounds, latest, tolerance: ["it shall"] * (rounds[-1].round == 1))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, second_loses: None) -> tuple[Path, list[str]]:
    """A run of rounds that nobody stopped, and its words."""
    folder = tmp_path_factory.mktemp("rounds")
    words = tiny.rounds(folder)
    tiny.train(folder, [*words, "run.name=whole"])
    return folder / "runs" / "whole", words


def verdicts_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads((run / f"rounds/{number:04d}/round.json").read_text()) for number in (1, 2, 3)]


@pytest.mark.long
def test_every_sample_score_and_pair_is_kept(whole: tuple[Path, list[str]]) -> None:
    run, _ = whole
    policies = set()
    for number in (1, 2, 3):
        folder = run / "rounds" / f"{number:04d}"
        drawn, scored, pairs = (lines(folder / f"{name}.jsonl") for name in ("samples", "scores", "pairs"))
        assert len(drawn) == len(scored) == 6 * 4
        assert [(one["prompt_id"], one["k"]) for one in drawn] == [(one["prompt_id"], one["k"]) for one in scored]
        scores = {(one["prompt_id"], one["k"]): one["score"] for one in scored}
        for pair in pairs:
            assert [scores[pair["prompt_id"], k] for k in pair["k"]] == pair["scores"] == [1.0, 0.0]
        assert not list(folder.glob("*.partial"))
        policies |= {one["policy"] for one in drawn}
    assert len(policies) > 1, "what was learnt writes the next round's answers"


def test_a_round_that_loses_is_undone(whole: tuple[Path, list[str]]) -> None:
    run, _ = whole
    verdicts = verdicts_of(run)
    assert [one["undone"] for one in verdicts] == [False, True, False] and verdicts[1]["why"] == ["it shall"]
    kept, undone, last = (tiny.weights(run / f"checkpoints/step-{step:08d}") for step in (2, 4, 6))
    for name, array in tiny.weights(run).items():
        assert np.array_equal(undone[name], kept[name]) and np.array_equal(array, last[name])
    first, second, third = (lines(run / f"rounds/{n:04d}/samples.jsonl")[0]["policy"] for n in (1, 2, 3))
    assert first != second == third, "the round after it samples from the weights before it"
    shown = [one["samples"] for one in tiny.records(run, "samples")]
    assert [[*samples[0]] for samples in shown] == [["prompt", "before"], ["prompt", "after"]]
    assert len({tuple(sample["prompt"] for sample in samples) for samples in shown}) == 1


def test_the_dashboard_shows_rounds(whole: tuple[Path, list[str]]) -> None:
    history = RunHistory(whole[0])
    while history.read():
        pass
    assert "undone: it shall" in str(charts.round_sections(history))
    empty = RunHistory(whole[0] / "rounds")
    assert charts.round_sections(empty) == [] == charts.round_panels(empty)
    verdicts = verdicts_of(whole[0])
    panels = {panel.title: panel.figure for panel in charts.round_panels(history)}
    for name in ("score", "tokens", "entropy"):
        label = OF_ROUNDS[name].label
        (line,) = panels[label[0].upper() + label[1:]]["data"]
        assert line["x"] == [1, 2, 3] and line["y"] == [one["samples"][name] for one in verdicts]
        assert line["marker"]["symbol"] == ["circle", "x", "circle"], "a cross on what was undone"
    held_out = panels["Held-out score"]["data"][0]
    assert held_out["x"] == [0, 1, 2, 3], "and the policy before the first round"
    assert held_out["y"][1:] == [one["held_out"]["held_out_score"] for one in verdicts]
    assert run_report.png([*map(run_report.picture, charts.round_panels(history))]).startswith(b"\x89PNG")


def stopped_at(owner: type, method: str, count: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Ends the process when a method is called for the n-th time."""

    def patch(patcher: pytest.MonkeyPatch) -> None:
        left, real = iter(range(count, 0, -1)), getattr(owner, method)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(left, 0) == 1:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        patcher.setattr(owner, method, dying)

    return patch


Moment = Callable[[pytest.MonkeyPatch], None]
# Where a run is stopped, one life after the other: each goes on into another round before the next stop.
STOPS: dict[str, list[Moment]] = {
    "sampling; training; in the round after one that is undone": [
        stopped_at(Journal, "add", 2),
        stopped_at(Learner, "learn", 4),
        stopped_at(Learner, "learn", 3),
    ],
    "after the answers, before their journal goes; before the verdict": [
        stopped_at(Journal, "close", 1),
        stopped_at(Rounds, "_judge", 2),
    ],
    "judging; before a round is undone": [stopped_at(Journal, "add", 5), stopped_at(Rounds, "_undo", 1)],
}


@pytest.mark.parametrize("moments", STOPS)
@pytest.mark.long(
    "judging; before a round is undone", "after the answers, before their journal goes; before the verdict"
)
def test_a_run_that_was_stopped_is_one_that_never_was(
    moments: str, whole: tuple[Path, list[str]], tmp_path, monkeypatch
) -> None:
    run, words = whole
    command = [*words, "run.name=stopped", f"run.dir={tmp_path}"]
    for moment in STOPS[moments]:
        with monkeypatch.context() as patcher:
            moment(patcher)
            stopped = tiny.train(tmp_path, command, check=False)
        assert stopped.returncode == 1 and "--resume" in stopped.stderr
        command = ["--resume", str(tmp_path / "stopped")]
        assert not any(map(fault_of, (tmp_path / "stopped").glob("checkpoints/step-*")))
    tiny.train(tmp_path, command)
    assert outcome(tmp_path / "stopped") == outcome(run)
    assert not any(map(fault_of, run.glob("checkpoints/step-*"))), "whether there is a held-out loss or none"
    assert not list((tmp_path / "stopped").glob("rounds/*/*.partial"))
    stopped, whole = ({one["step"] for one in tiny.records(r, "evaluation")} for r in (tmp_path / "stopped", run))
    assert stopped == whole and 0 in whole, "the policy before the first round stays in the log"


def test_a_finished_run_answers_questions(whole: tuple[Path, list[str]], capsys) -> None:
    run, _ = whole
    assert evaluate.main(["--run", str(run)]) == 2
    why = "a run of rounds has no held-out pairs; name some with --data, or evaluate.answers"
    assert why in capsys.readouterr().err
    sums, model = run.parent.parent / "sums.jsonl", tiny.ROOT / "configs/quickstart/model"
    own = [f"evaluate.answers={sums}", "evaluate.max_tokens=6", r"evaluate.answer_pattern=(?s)\A(.*)"]

    def match(answers: list[str]) -> float:
        tiny.write_jsonl(sums, [{"prompt": f"Add {n} and 67.", "answer": answer} for n, answer in enumerate(answers)])
        assert evaluate.main(["--run", str(run), *own]) == 0
        told = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert told.pop("questions") == len(answers) and set(told) == {"exact_match"}
        return float(told["exact_match"])

    assert match(["no"] * 4) == 0.0
    config = load(run / "config.yaml", own)
    questions = load_questions(config.evaluate, config.model, config.data, load_tokenizer_of(config.model))
    trained, base = (
        [mlx_lm.generate(*loaded, question.prompt_ids, max_tokens=6).strip() for question in questions]
        for loaded in (mlx_lm.load(str(model), adapter_path=str(run)), mlx_lm.load(str(model)))
    )
    assert trained != base and match([*trained[:3], "no"]) == 0.75
    pairs = tiny.write_jsonl(sums.with_name("held-out-pairs.jsonl"), tiny.pairs(3))
    assert evaluate.main(["--run", str(run), f"data.valid={pairs}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 3


@pytest.mark.long
def test_the_momentum_of_merges_goes_with_a_round_that_is_undone(second_loses: None, tmp_path, monkeypatch) -> None:
    """Independent ranks would follow it into the next round; so too where a fault came before the round was undone."""
    words = [*tiny.rounds(tmp_path), "strategy=independent", "independent.merge=outer", "sync.compression=int8"]
    tiny.train(tmp_path, [*words, "run.name=whole"])
    run, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    parts = [load_part(rank_file(run / "checkpoints", step, 0)) for step in (2, 4, 6)]
    momenta = [common_at(run / f"checkpoints/step-{step:08d}", MOMENTUM, World()) for step in (2, 4, 6)]
    first, second, third = ({**part, "momentum": own} for part, own in zip(parts, momenta, strict=True))
    for kind in ("momentum", "feedback"):
        assert first[kind] and first[kind].keys() == second[kind].keys()
        assert all(np.array_equal(second[kind][name], array) for name, array in first[kind].items())
        assert not all(np.array_equal(third[kind][name], array) for name, array in first[kind].items())
    with monkeypatch.context() as patcher:
        stopped_at(Rounds, "_undo", 1)(patcher)
        tiny.train(tmp_path, [*words, "run.name=stopped"], check=False)
    tiny.train(tmp_path, ["--resume", str(stopped)])
    assert outcome(stopped) == outcome(run)


def test_pairs_of_a_round_are_trained_by_their_ids_and_by_no_other_tokenizer(
    whole: tuple[Path, list[str]], tmp_path
) -> None:
    pairs = next(path for path in sorted(whole[0].glob("rounds/*/pairs.jsonl")) if path.stat().st_size)
    config = load(None, whole[1])
    own, other = load_tokenizer_of(config.model), byte_level(CORPUS)

    def read(path: Path, tokenizer: Any) -> list[list[int]]:
        data = config.data.model_copy(update={"max_length": 1024})
        rows = load_dataset(str(path), data, "preference", tokenizer, vocabulary=Vocabulary(1))
        return [row.completions[0].tolist() for row in rows]

    assert read(pairs, own) == [pair["chosen_ids"] for pair in lines(pairs)]
    encoder = Encoder(other, config.data, 1)
    for reading in (
        lambda: read(pairs, other),
        lambda: open_prompts(str(pairs), config.data, encoder, RolloutSettings(), 2, None, print),
    ):
        with pytest.raises(UserError, match=r"pairs.jsonl:1: its token ids are of another tokenizer than the model's"):
            reading()
    without = [{name: value for name, value in pair.items() if not name.endswith("_ids")} for pair in lines(pairs)]
    texts = [other.decode(ids[:-1]) for ids in read(tiny.write_jsonl(tmp_path / "texts.jsonl", without), other)]
    assert texts == [pair["chosen"] for pair in lines(pairs)]


@pytest.mark.long
def test_ragged_rounds_take_the_learning_rates_of_the_schedule_over_all_rounds(tmp_path) -> None:
    words = tiny.rounds(tmp_path, rollouts__rounds=2, rollouts__steps=3, train__global_batch_size=3, run__name="apart")
    words += ["strategy=independent", "plan.shares=[2,1]", "train.warmup_steps=2"]
    tiny.train(tmp_path, words, ranks=2)
    run, expected, found = tmp_path / "runs/apart", Counter[float](), Counter[float]()
    counts = [len(lines(run / f"rounds/{number:04d}/pairs.jsonl")) for number in (1, 2)]
    assert any(count > 3 and count % 3 for count in counts), f"no batch is ragged: {counts}"
    for step in range(6):
        rate = learning_rate(TrainSettings(learning_rate=1e-2, warmup_steps=2), step, 6)
        starts = range(0, counts[step // 3], 3)
        expected[rate] += min(3, counts[step // 3] - starts[step % 3 % len(starts)])
    for rank in range(2):
        for record in tiny.steps_of(run, rank):
            found[record["learning_rate"]] += len(record["rows"])
    assert found == expected


def test_groups_train_in_rounds(whole: tuple[Path, list[str]], tmp_path) -> None:
    _, words = whole
    own = ["run.name=grpo", f"run.dir={tmp_path}", "train.loss=grpo", "train.temperature=1.5", "rollouts.rounds=1"]
    tiny.train(tmp_path, [*words, *own])
    assert [step["step"] for step in tiny.steps_of(tmp_path / "grpo")] == [1, 2]
    assert not (tmp_path / "grpo/rounds/0001/pairs.jsonl").exists()


def test_answers_that_were_cut_are_counted(whole: tuple[Path, list[str]], tmp_path) -> None:
    """In a round's line and record, of held-out prompts, and in the reason why nothing was learnt."""
    own = ["run.name=cut", f"run.dir={tmp_path}", "rollouts.max_tokens=1", "rollouts.rounds=1", "evaluate.max_tokens=1"]
    told = " ".join(tiny.train(tmp_path, [*whole[1], *own]).stdout.split())
    assert "24 cut by rollouts.max_tokens=1" in told
    assert "greedy answers have no end within evaluate.max_tokens=1" in told
    assert "different scores to learn from; 24 of 24 answers were cut by rollouts.max_tokens=1; nothing is" in told
    records = list(read_records(tmp_path / "cut/logs/rank-000.jsonl"))
    assert [one["answers"]["unended"] for one in records if one["kind"] == "round"] == [1.0]
    assert all(one["answers_cut"] > 0 for one in records if "answers_cut" in one)
    assert any("answers_cut" in one for one in records)


# ---- Wrong input


@pytest.mark.parametrize(
    ("damage", "why"),
    [(b"{", "Invalid JSON"), (b'{"round": 1}', "validation error for RoundFigures"), (b"\xff\xfe", "Invalid JSON")],
)
def test_a_damaged_verdict_of_an_unfinished_run_is_one_line(
    damage: bytes, why: str, whole: tuple[Path, list[str]], tmp_path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    (run / "summary.json").unlink()
    for lost in ("checkpoints/step-00000005", "checkpoints/step-00000006", "rounds/0003"):
        shutil.rmtree(run / lost)
    (run / "rounds/0001/round.json").write_bytes(damage)
    result = tiny.train(tmp_path, ["--resume", str(run)], check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "rounds/0001/round.json is not what a round writes" in result.stderr and why in result.stderr


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ("train.loss=sft", "rollouts.rounds makes pairs or groups of answers, which train.loss=sft does not"),
        ("train.steps=4", "train.steps is not for rounds: a run has rollouts.rounds times rollouts.steps of them"),
        ("evaluate.every=4", "evaluate.every is not for rounds: every round ends with an evaluation"),
        ("train.reference_sync_steps=4", "rollouts.reference_every moves the reference"),
        ("strategy=sharded", "strategy=sharded is not for rounds"),
        ("independent.merge=stack", "independent.merge=stack is not for rounds"),
        ("rollouts.overlap=true", "which an earlier version had"),
        ("rollouts.samples=1", "rollouts.samples=1: input should be greater than or equal to 2"),
        ("rollouts.stop=['']", "rollouts.stop has an empty text"),
        ("rollouts.prompts=15", "rollouts.prompts=15, but .*prompts.jsonl has 14; set rollouts.prompts=14"),
        ("rollouts.max_tokens=60", "a prompt of .* tokens and rollouts.max_tokens=60 are more than data.max_length=64"),
        ("rollouts.judge=nowhere:judge", "rollouts.judge=nowhere:judge: no module"),
        ("rollouts.judge=exat", "rollouts.judge=exat: no such command here; a judge is exact, number"),
        ('rollouts.judge=a "b', "no such command here"),
        ("rollouts.judge=reward:nowhere", "rollouts.judge=reward:nowhere: nowhere: no such folder"),
        ("rollouts.judge=http://a/v1", "rollouts.judge=http://a/v1 needs evaluate.judge_model"),
        ("evaluate.judge=nonsense", "evaluate.judge=nonsense: no such command here"),
        ("data.train={a.jsonl: 2}", "prompts have no weights; name the files without"),
        ("train.loss=grpo", "train.temperature=1 has to be rollouts.temperature=1.5"),
        ("rollouts.filter_groups=true", "rollouts.filter_groups is for train.loss=grpo"),
    ],
)
def test_wrong_input_is_one_clear_line(own: str, why: str, tmp_path) -> None:
    result = tiny.train(tmp_path, [*tiny.rounds(tmp_path), own, "--dry-run"], check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and re.search(why, result.stderr), result.stderr
