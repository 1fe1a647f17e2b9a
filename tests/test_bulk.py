"""Files scored and answered by ranks at their own pace: every row once, in order, the same whoever did it."""

import contextlib
import io
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lib.config import load
from lib.config.settings import Config, DataSettings, ModelSettings
from lib.data.dataset import load_dataset
from lib.data.prompts import load_questions
from lib.data.tokenizer import Vocabulary, load_tokenizer_of
from lib.distributed.work_queue import Journal
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command as evaluate
from lib.evaluate import score_file
from lib.evaluate.sampler import Sample
from lib.evaluate.score_file import evaluation_records
from lib.model import load as models
from lib.system.terminal import Terminal
from lib.training import reference_model
from tests import tiny
from tests.ranks import ring_of
from tests.test_data import CORPUS, byte_level
from tests.tiny import ROOT
from tests.tiny import read_jsonl as scored

# ---- Files


def bulk(words: list[str], check: bool = True) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = evaluate.main(words)
    assert not check or status == 0, err.getvalue()
    return status, out.getvalue() if status == 0 else err.getvalue()


def refused(words: list[str], why: str) -> None:
    status, said = bulk(words, check=False)
    assert status == 2 and why in said and said.count("\n") == 1, said


def common(folder: Path, *more: str) -> list[str]:
    words = ["--model", str(folder / "model"), "model.random_init=true", "evaluate.batch_size=4"]
    return [*words, f"data.cache_dir={folder}/cache", "data.length_multiple=8", "data.max_length=64", *more]


def test_scores_are_those_of_the_data_set_and_go_on_to_the_same_bytes(tmp_path, monkeypatch) -> None:
    tiny.settings(tmp_path, rows=30)
    out, data = tmp_path / "out.jsonl", str(tmp_path / "train.jsonl")
    words = [*common(tmp_path), "--data", data, "--score", "rewards", "--out", str(out)]
    words += ["--reference", str(tmp_path / "other")]
    other = ModelSettings(path=str(tiny.model_folder(tmp_path / "other", hidden_size=24)), random_init=True)
    models.load(other, 0).save_weights(str(tmp_path / "other" / "model.safetensors"))
    _, said = bulk(words)
    rows = scored(out)
    assert [row["row"] for row in rows] == list(range(30)) and '"scored": 30' in said
    model = [f"model.path={tmp_path}/model", "model.random_init=true"]
    settings = load.load(None, [*model, f"data.train={data}", "data.length_multiple=8"])
    dataset = load_dataset(data, settings.data, "preference", None, vocabulary=Vocabulary(1))
    for prefix, folder in (("policy", "model"), ("reference", "other")):
        drawn = folder == "model"
        path = settings.model.model_copy(update={"path": str(tmp_path / folder), "random_init": drawn})
        logps = reference_model.dataset_logps(models.load(path, 0), dataset, World(), [1], settings)
        for k, name in enumerate(("chosen", "rejected")):
            np.testing.assert_allclose([row[f"{prefix}_{name}_logp"] for row in rows], logps[:, k], rtol=1e-5)
            assert [row[f"{name}_tokens"] for row in rows] == dataset.scored_tokens[:, k].tolist()
    margin = 0.1 * (rows[3]["policy_chosen_logp"] - rows[3]["reference_chosen_logp"])
    assert rows[3]["reward_chosen"] == pytest.approx(margin, rel=1e-4)
    whole = out.read_bytes()
    refused(words, "is there already; remove it")
    out.unlink()
    kept: list[bytes] = []

    def stop(self: Journal, path: Path) -> None:  # as if it had been killed after some chunks
        kept.extend(self.path.read_bytes().splitlines(keepends=True))
        raise UserError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", stop)
        bulk(words, check=False)
    (tmp_path / "out.jsonl.partial").write_bytes(b"".join(kept[:4]) + kept[4][:30])
    _, said = bulk(words)
    assert "3 of 8 chunks are there already" in said and '"scored": 18' in said and out.read_bytes() == whole


def with_tokenizer(folder: Path, template: str | None = None) -> Path:
    """A folder with a model that has a tokenizer."""
    tokenizer = byte_level(CORPUS, template=template)
    tokenizer.save_pretrained(folder / "model")
    tiny.model_folder(folder / "model", vocab_size=len(tokenizer))
    return folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With questions."""
    folder = with_tokenizer(tmp_path_factory.mktemp("writer"))
    questions = [{"prompt": f"What is {i} + {i}?", "answer": str(i % 3)} for i in range(20)]
    tiny.write_jsonl(folder / "questions.jsonl", questions)
    return folder


def test_answers_are_written_in_order_and_draws_follow_the_seed(writer: Path, tmp_path) -> None:
    words = [*common(writer), "--data", str(writer / "questions.jsonl"), "evaluate.max_tokens=6"]
    bulk([*words, "--score", "greedy", "--out", str(tmp_path / "greedy.jsonl")])
    greedy = scored(tmp_path / "greedy.jsonl")
    assert [row["row"] for row in greedy] == list(range(20)) and all(len(row["completions"]) == 1 for row in greedy)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        bulk([*words, "--score", "samples", "--out", str(tmp_path / name), "rollouts.samples=3", f"train.seed={seed}"])
    a, b = scored(tmp_path / "a"), scored(tmp_path / "b")
    assert a == b and len(set(map(len, (row["completions"] for row in a)))) == 1 and len(a[0]["completions"]) == 3
    assert [row["completions"] for row in scored(tmp_path / "c")] != [row["completions"] for row in a]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that writes tools and a system prompt, and may be told to think."""
    template = (ROOT / "tests/templates/Qwen-Qwen3-0.6B.jinja").read_text()
    return with_tokenizer(tmp_path_factory.mktemp("chatty"), template)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
# What a row may say of its prompt, and what a model is sent because of it.
BESIDE = [
    ({"prompt": "Q?", "system": "Be brief."}, ["system\nBe brief.", "user\nQ?"]),
    ({"prompt": [{"role": "user", "content": "Q?"}], "tools": TOOLS}, ['"name": "add"', "user\nQ?"]),
    ({"prompt": "Q?", "chat_template_kwargs": {"enable_thinking": False}}, ["<think>\n\n</think>"]),
    ({"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}]}, ["user\nQ?"]),
    ({"messages": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A."}]}, ["user\nQ?"]),
    ({"instruction": "Q?", "input": "", "output": "A."}, ["user\nQ?"]),
    ({"chosen": "\n\nHuman: Q?\n\nAssistant: A.", "rejected": "\n\nHuman: Q?\n\nAssistant: B."}, ["user\nQ?"]),
]


def config_of(folder: Path, *words: str) -> Config:
    model = [f"model.path={folder}/model", "model.random_init=true"]
    return load.load(None, [*model, f"data.cache_dir={folder}/cache", "data.train=-", *words])


def test_questions_are_asked_with_all_that_training_reads_beside_a_prompt(chatty: Path, tmp_path) -> None:
    path = tiny.write_jsonl(tmp_path / "q.jsonl", [record | {"answer": "7"} for record, _ in BESIDE])
    config = config_of(chatty, f"evaluate.answers={path}", "evaluate.max_tokens=4")
    tokenizer = load_tokenizer_of(config.model)
    assert tokenizer is not None
    questions = load_questions(config.evaluate, config.model, config.data, tokenizer)
    for (record, wanted), question in zip(BESIDE, questions, strict=True):
        text = tokenizer.decode(question.prompt_ids)
        assert all(part in text for part in wanted) and "A." not in text, record
        assert "Q?" in text and question.answer == "7"
    records = evaluation_records(str(path), config, "prompt", Terminal())
    asked = score_file.CompletionWriter(models.load(config.model, 0), tokenizer, records, config, None)
    assert [asked.prompt_ids(row) for row in range(len(BESIDE))] == [one.prompt_ids for one in questions]
    for wrong in ([], ["a"], [{"role": "user"}]):
        tiny.write_jsonl(path, [{"prompt": wrong, "answer": "7"}])
        with pytest.raises(UserError, match=r"q\.jsonl:1: .*prompt"):
            load_questions(config.evaluate, config.model, config.data, tokenizer)
    for answer in (None, ["7"], True, " "):
        tiny.write_jsonl(path, [{"prompt": "Q?", "answer": answer}])
        with pytest.raises(UserError, match=r"q\.jsonl:1: a question's 'answer' is .*: give it an answer, or leave"):
            load_questions(config.evaluate, config.model, config.data, tokenizer)


def always_drawn(monkeypatch: pytest.MonkeyPatch, *texts: str, cut: tuple[str, ...] = ()) -> None:
    """Whatever is asked, these are the answers; those of `cut` have no end."""
    ends = ["length" if text in cut else "stop" for text in texts]
    made = [Sample(0, k, [2], [20 + k, 1], [-1.0, -1.0], ends[k], text) for k, text in enumerate(texts)]  # type: ignore[arg-type]
    drawn = score_file.CompletionWriter.drawn

    def always(self: Any, rows: range) -> list[list[Sample]]:
        self.count, self.sampler = len(made), SimpleNamespace(sample=lambda prompts, _: made * len(prompts))
        return drawn(self, rows)

    monkeypatch.setattr(score_file.CompletionWriter, "drawn", always)


def by_length(prompt: Any, completions: list[str], record: dict[str, Any]) -> list[int]:
    """A judge that is told the prompt, and nothing of what the record has for an answer."""
    said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    assert said == "Q?" and (isinstance(prompt, str) or {one["role"] for one in prompt} <= {"system", "user"}), prompt
    return [len(text) for text in completions]


def test_pairs_are_trained_behind_the_prompts_that_were_answered(chatty: Path, tmp_path, monkeypatch) -> None:
    """Of every format; the judge sees what was asked, without the answer that a record has."""
    always_drawn(monkeypatch, "One.", "Three.")
    tokenizer = load_tokenizer_of(config_of(chatty).model)
    assert tokenizer is not None
    ids = {"prompt_ids": tokenizer.encode("Q?", add_special_tokens=False)}
    data = tiny.write_jsonl(tmp_path / "q.jsonl", [*(record for record, _ in BESIDE), ids])
    out = tmp_path / "pairs.jsonl"
    words = [*common(chatty, "evaluate.judge=tests.test_bulk:by_length", "data.max_length=1024"), "--data", str(data)]
    bulk([*words, "--make-pairs", str(out)])
    config = config_of(chatty)
    records = evaluation_records(str(data), config, "prompt", Terminal())
    asked = score_file.CompletionWriter(models.load(config.model, 0), tokenizer, records, config, None)
    trained = load_dataset(str(out), config.data, "preference", tokenizer, vocabulary=Vocabulary(1))
    assert [one.prompt_ids.tolist() for one in trained] == [asked.prompt_ids(row) for row in range(len(records))]
    assert [(pair["chosen"], pair["rejected"]) for pair in scored(out)] == [("Three.", "One.")] * len(records)
    assert [ids.tolist() for ids in trained[len(BESIDE)].completions] == [[21, 1], [20, 1]], "with their end"


def test_an_answer_without_an_end_is_in_no_pair(writer: Path, tmp_path, monkeypatch) -> None:
    """Training adds an end token to every text: a model would learn to stop in the middle of a sentence."""
    questions, out = str(writer / "questions.jsonl"), tmp_path / "pairs.jsonl"
    words = [*common(writer, "evaluate.judge=tests.test_bulk:longest"), "--data", questions, "--make-pairs"]
    with monkeypatch.context() as patch:
        always_drawn(patch, "It is 0.", "It is 11.", "It is 22222222 and", cut=("It is 22222222 and",))
        _, said = bulk([*words, str(out)])
    assert {(pair["chosen"], pair["rejected"]) for pair in scored(out)} == {("It is 11.", "It is 0.")}
    told = " ".join(said.split())
    assert "20 of 20 prompts gave a pair; 20 of the 60 answers that rank 0 drew have no end within" in told
    _, said = bulk([*words, str(tmp_path / "none.jsonl"), "evaluate.max_tokens=1", "rollouts.samples=2"])
    assert scored(tmp_path / "none.jsonl") == []
    assert "0 of 20 prompts gave a pair; 40 of the 40 answers" in " ".join(said.split())


def longest(prompt: Any, completions: list[str], record: dict[str, Any]) -> list[int]:
    """A judge that prefers long answers."""
    return [len(text) for text in completions]


def test_pairs_are_made_by_an_answer_or_by_a_judge(writer: Path, tmp_path, monkeypatch) -> None:
    drawn = ["It is 0.", "It is 1.", "It is 2.", "It is 2."]
    always_drawn(monkeypatch, *drawn)
    words = [*common(writer), "--data", str(writer / "questions.jsonl")]
    pattern = r"evaluate.answer_pattern=(\d+)\."
    bulk([*words, pattern, "--make-pairs", str(tmp_path / "checked.jsonl")])
    pairs = scored(tmp_path / "checked.jsonl")
    assert [pair["chosen"] for pair in pairs] == [f"It is {i % 3}." for i in range(20)]
    assert all(pair["rejected"] in drawn and pair["rejected"] != pair["chosen"] for pair in pairs)
    checked, tokenizer = str(tmp_path / "checked.jsonl"), byte_level(CORPUS)
    assert len(load_dataset(checked, DataSettings(train="-"), "preference", tokenizer, vocabulary=Vocabulary(1))) == 20
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, sys\nfor line in sys.stdin:\n    q = json.loads(line)\n    assert q['record']['answer']\n"
        "    print([1.0] * len(q['completions']) if '3 + 3' in q['prompt'] else list(range(len(q['completions']))))\n"
    )
    words += ["--make-pairs"]
    bulk([*words, str(tmp_path / "judged.jsonl"), f"evaluate.judge={shlex.quote(sys.executable)} {judge}"])
    judged = scored(tmp_path / "judged.jsonl")
    assert {(pair["chosen"], pair["rejected"]) for pair in judged} == {("It is 2.", "It is 0.")}
    assert len(judged) == 19  # of 3 + 3 all are alike
    for name, grades in (("unsure", [math.nan, 2.0, 1.0]), ("silent", [math.nan] * 3)):  # a model may give no grade
        with monkeypatch.context() as patch:
            patch.setattr("lib.evaluate.score_file.judge_of", lambda *_, g=grades, **__: lambda asked: [g] * len(asked))
            bulk([*words, str(tmp_path / f"{name}.jsonl")])
    assert {(p["chosen"], p["rejected"]) for p in scored(tmp_path / "unsure.jsonl")} == {("It is 1.", "It is 2.")}
    assert scored(tmp_path / "silent.jsonl") == []
    for command, why in (
        (f"{shlex.quote(sys.executable)} -c 'import sys; sys.exit(\"no GPU\")'", "ended with status 1: no GPU"),
        ("echo [1]", "wrote 1 lines for 4 questions"),
        ("nothing-of-this-name", "evaluate.judge=nothing-of-this-name: no such command here"),
    ):
        refused([*words, str(tmp_path / "x"), f"evaluate.judge={command}"], why)
        (tmp_path / "x.partial").unlink(missing_ok=True)
    bare = ["--data", str(tiny.write_jsonl(tmp_path / "bare.jsonl", [{"prompt": "What?"}]))]
    why = "bare.jsonl:1: no 'answer' to check completions by"
    refused([*common(writer), *bare, *words[-1:], str(tmp_path / "y")], why)


# ---- Ranks


def ring(folder: Path, ranks: int, words: list[str]) -> list[subprocess.Popen[str]]:
    """Processes that a launcher could have started: MLX's ring on this machine."""
    environments, command = ring_of(folder, ranks), [sys.executable, "-m", "lib.evaluate", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    return [subprocess.Popen(command, env=environment, **pipes) for environment in environments]


@pytest.mark.long
def test_a_killed_ranks_rows_are_done_by_the_others_and_the_output_is_one_ranks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # a rank alone could have more, which round otherwise
    tiny.settings(tmp_path, rows=1000)
    tiny.model_folder(tmp_path / "model", hidden_size=64, num_hidden_layers=4, intermediate_size=256)
    words = [*common(tmp_path, "data.skip_invalid=true"), "--data", str(tmp_path / "train.jsonl")]
    words += ["--score", "logps", "--out"]
    [alone] = ring(tmp_path, 1, [*words, str(tmp_path / "alone.jsonl")])
    told, _ = alone.communicate(timeout=120)
    assert alone.returncode == 0, told
    processes = ring(tmp_path, 2, [*words, str(tmp_path / "both.jsonl")])
    partial, deadline = tmp_path / "both.jsonl.partial", time.monotonic() + 120
    while time.monotonic() < deadline and not (partial.exists() and partial.read_bytes().count(b"\n") > 40):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGKILL)
    said, _ = processes[0].communicate(timeout=120)
    processes[1].communicate()
    assert processes[0].returncode == 0, said
    figures = json.loads(said.splitlines()[-1])
    assert (tmp_path / "both.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()
    assert set(figures["chunks_by_rank"]) == {"0", "1"} and sum(figures["chunks_by_rank"].values()) == 250


def test_by_default_a_runs_held_out_rows_are_scored(tmp_path) -> None:
    """Not those that it was trained on; of several sources, and by the hashes that training went by."""
    words = [word for word in tiny.settings(tmp_path, rows=30) if not word.startswith(("data.train=", "data.valid="))]
    folder, out = tmp_path / "runs", tmp_path / "out.jsonl"
    other = tiny.write_jsonl(tmp_path / "other.jsonl", tiny.pairs(30, seed=5))
    mixture = f"data.train={{{tmp_path}/train.jsonl: 1, {other}: 0.5}}"
    tiny.train(tmp_path, [*words, mixture, "data.holdout=0.3", "train.steps=4", "run.name=run"])
    cache = f"data.cache_dir={tmp_path}/cache"
    bulk(["--run", str(folder / "run"), cache, "--score", "--out", str(out)])
    bulk(["--run", str(folder / "run"), cache, "--per-pair", str(tmp_path / "pairs.jsonl")])
    assert 5 < len(scored(out)) < 30 and any(abs(row["reward_chosen"]) > 1e-4 for row in scored(out))
    for one, pair in zip(scored(out), scored(tmp_path / "pairs.jsonl"), strict=True):
        assert {name: one[name] for name in pair} == pytest.approx(pair, rel=1e-4, abs=1e-5)
    tiny.train(tmp_path, [*words, f"data.train={other}", "train.steps=2", "run.name=bare"])
    why = "the run has no held-out records (data.valid, data.holdout); name a file with"
    refused(["--run", str(folder / "bare"), cache, "--score", "--out", f"{out}.2"], why)
