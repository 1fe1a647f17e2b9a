"""Judges of rounds: checks and functions in a process of their own, graders, reward models; what fails is left out."""

import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.config.load import load
from lib.config.settings import Config
from lib.errors import UserError
from lib.evaluate.judge_process import scores_in
from lib.evaluate.judges import Judge, Question, judge_of, scores_of
from tests.tiny import ROOT


def settings(judge: str, **evaluate: Any) -> Config:
    return load(None, [], {"model": {"path": "m"}, "data": {"train": "d"}, "evaluate": {"judge": judge, **evaluate}})


def scorer_of(config: Config) -> Judge:
    return judge_of(config, grades=True)


def judge_of_round(function: str, **evaluate: Any) -> Judge:
    return judge_of(settings(f"round_judges:{function}", **evaluate), "rollouts.judge")


def asked(*texts: str, **record: Any) -> Question:
    return Question("q.jsonl:1", "?", texts, {"prompt": "?", **record})


FUNCTIONS = """
import os, time
def length(prompt, completions, record):
    print("a word to the standard output")
    return [len(text) for text in completions]
def frail(prompt, completions, record):
    if "slow" in completions:
        time.sleep(60)
    if "dead" in completions:
        os._exit(3)
    if "bad" in completions:
        raise KeyError("grade")
    return [1.0 for text in completions]
def of_words(prompt, completions, record):
    return ["good" for text in completions]
def of_one(prompt, completions, record):
    return 1.0
def of_arrays(prompt, completions, record):
    import numpy
    return numpy.arange(len(completions))
def of_some(prompt, completions, record):
    return [len(text) or None for text in completions]
CALLS = []
def relative(prompt, completions, record):
    CALLS.append(completions)
    assert len(CALLS) <= 2, "each question is asked once"
    lengths = sorted(map(len, completions))
    return [None if text.startswith("Z") else lengths.index(len(text)) for text in completions]
def nothing(prompt, completions, record):
    return [None for text in completions]
def broken(prompt, completions, record):
    raise ValueError("no key")
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "round_judges.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_has_a_process_of_its_own(functions: None, capfd: pytest.CaptureFixture[str]) -> None:
    judge = judge_of(settings("round_judges:length"), "rollouts.judge")
    assert judge([asked("a", "abc", day=datetime.date(2026, 1, 2)), asked("")]) == [[1.0, 3.0], [0.0]]
    assert "round_judges" not in sys.modules and "a word to the standard output" in capfd.readouterr().err
    with pytest.raises(UserError, match="rollouts.judge=round_judges:absent: .*give module:function"):
        judge_of(settings("round_judges:absent"), "rollouts.judge")


def test_a_judge_that_fails_on_an_answer_leaves_that_one_out(functions: None) -> None:
    judge = judge_of(settings("round_judges:frail", judge_seconds=0.5), "rollouts.judge")
    scored = scores_of(judge, [asked("a", "b"), asked("bad", "c"), asked("slow", "d"), asked("dead", "e")])
    assert [[one.score for one in of_question] for of_question in scored] == [[1, 1], [None, 1], [None, 1], [None, 1]]
    assert "KeyError: 'grade'" in scored[1][0].fault
    assert "no answer within 0.5 s (evaluate.judge_seconds)" in scored[2][0].fault
    assert "its process ended with status 3" in scored[3][0].fault


def test_a_function_that_gives_no_scores_is_refused_before_answers_are_sampled_for_it(functions: None) -> None:
    for name, made in (("of_words", r"\['good'\]"), ("of_one", "1.0")):
        with pytest.raises(UserError, match=f"{name}: q.jsonl:1: returned {made}; it has to be a list of 1 scores"):
            judge_of_round(name).require_scores(asked(""))
    for name in ("broken", "of_some", "of_arrays"):  # the first two may be about that answer alone
        judge_of_round(name).require_scores(asked(""))


@pytest.mark.parametrize("made", ["12", b"12", {1: 2, 2: 3}, [10**400, 1], 3, [1.0], {1, 2}])
def test_what_is_no_score_for_each_answer(made: object) -> None:
    assert scores_in(made, 2) is None and scores_in((1, True), 2) == [1.0, 1.0]


def test_a_none_leaves_that_answer_out_and_keeps_the_others_of_the_same_call(functions: None) -> None:
    """A function that ranks the answers of a prompt among each other would say something else of each alone."""
    judge = judge_of_round("relative")
    scored = scores_of(judge, [asked("Z", "abc", "ab"), asked("a", "Zzz", "abcd")])
    assert [[answer.score for answer in of_question] for of_question in scored] == [[None, 2.0, 1.0], [0.0, None, 2.0]]
    assert scored[0][0].fault == "the judge gave no verdict"
    assert [answer.score for answer in scores_of(judge_of_round("nothing"), [asked("a", "b")])[0]] == [None, None]
    command = f"{sys.executable} -c \"import sys; [print('[null, 2]') for line in sys.stdin]\""
    assert [answer.score for answer in scores_of(scorer_of(settings(command)), [asked("a", "b")])[0]] == [None, 2.0]


def test_a_judge_that_fails_on_every_answer_ends_the_round(functions: None) -> None:
    with pytest.raises(UserError, match="no answer is scored: rollouts.judge=round_judges:broken: .*no key"):
        scores_of(judge_of(settings("round_judges:broken"), "rollouts.judge"), [asked("a", "b"), asked("c")])
    (judge := judge_of_round("frail")).require_scores(asked("a"))  # then "bad" may be at fault itself
    assert scores_of(judge, [asked("bad")])[0][0].score is None


def test_a_regular_expression_is_the_answer() -> None:
    judge = scorer_of(settings("regex"))
    assert judge([asked("it is 42.", "it is 4", answer=r"\b42\b")]) == [[1.0, 0.0]]
    wrong = "evaluate.judge=regex: q.jsonl:1: ValueError: 'answer' is no regular expression"
    for record, why in (({"answer": "("}, wrong), ({}, r"no 'answer' to check completions by \(columns: prompt\)")):
        with pytest.raises(UserError, match=why):
            judge([asked("a", **record)])


def test_a_pattern_without_end_is_ended() -> None:
    judge = scorer_of(settings("regex", judge_seconds=0.5))
    scored = scores_of(judge, [asked("a" * 40 + "b", answer="^(a+)+$"), asked("aa", answer="^(a+)+$")])
    assert [of_question[0].score for of_question in scored] == [None, 1.0]


def save_classifier(folder: Path, labels: int = 1) -> np.ndarray:
    """The quickstart's model as a sequence classifier; returns its head, float32 [labels, hidden]."""
    model = ROOT / "configs/quickstart/model"
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))
    head = np.random.default_rng(0).normal(size=(labels, config["hidden_size"])).astype(np.float32)
    weights = dict(mx.load(str(model / "model.safetensors")))
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, "score.weight": mx.array(head)})
    return head


def test_a_classifier_scores_each_answer_as_alone(tmp_path) -> None:
    """The score is the head's output at the last token of the chat, whatever is batched with it."""
    head = save_classifier(tmp_path)
    judge = scorer_of(settings(f"reward:{tmp_path}"))
    texts = ["7+8=15, 437 + 248 = 685", "no", "5"]
    ((*together,),) = [judge([asked(*texts)])[0]]
    alone = [judge([asked(text)])[0][0] for text in texts]
    from mlx_lm import load as load_plain

    model, tokenizer = load_plain(str(ROOT / "configs/quickstart/model"))[:2]
    for text, score, other in zip(texts, together, alone, strict=True):
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=False, return_dict=False)
        hidden = np.array(model.model(mx.array([ids]))[0, -1].astype(mx.float32), np.float64)
        # A dot product of `hidden` numbers, each rounded once; the padding's shapes round the passes otherwise.
        bound = 64 * np.finfo(np.float32).eps * np.abs(hidden * head[0]).sum()
        assert abs(score - hidden @ head[0]) <= bound and abs(score - other) <= bound


def test_a_language_model_is_asked_yes_or_no() -> None:
    judge = scorer_of(settings(f"reward:{ROOT / 'configs/quickstart/model'}"))
    ((score, other),) = judge([asked("42", "43")])
    assert math.isfinite(score) and math.isfinite(other) and score != other
    with pytest.raises(UserError, match="evaluate.judge=reward:nowhere"):
        scorer_of(settings("reward:nowhere"))
