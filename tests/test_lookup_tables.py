"""No index leaves a model's tables: of learned positions, of tokens; in training, evaluation and generation alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from lib.config.schema import ModelSettings
from lib.data.record_formats import Unusable
from lib.data.tokenizer import ModelLimits
from lib.evaluate import command
from lib.model import load as load_module
from lib.model.lookup_tables import bounded
from tests import tiny
from tests.test_forward import FAMILIES

QUICKSTART = tiny.ROOT / "configs/quickstart/model"
LONG = {"prompt_ids": [3] * 40, "chosen_ids": [5] * 39 + [1], "rejected_ids": [6, 1]}
GROUP = {"prompt_ids": [3] * 40, "completion_ids": [[5] * 40, [6]], "rewards": [1, 0]}


def gpt2(folder: Path, **changes: Any) -> Path:
    """A model with a table of 64 positions."""
    return tiny.model_folder(folder, model_type="gpt2", **FAMILIES["gpt2"] | changes)


def with_tokenizer(folder: Path) -> Path:
    """The same with the quickstart's tokenizer."""
    stored = json.loads((QUICKSTART / "config.json").read_text())
    end = stored["eos_token_id"]
    gpt2(folder, vocab_size=stored["vocab_size"], bos_token_id=end, eos_token_id=end)  # transformers tells of others
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder)
    return folder


def words_of(folder: Path, **changes: Any) -> list[str]:
    words = tiny.settings(folder, **{"data.max_length": 128, "train.steps": 2} | changes)
    gpt2(folder / "model")
    return words


def refusal(folder: Path, words: list[str]) -> str:
    """The one line that a dry run ends with."""
    done = tiny.train(folder, [*words, "--dry-run"], check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---- The tables


@pytest.mark.parametrize(
    ("family", "positions"), [("gpt2", 64), ("gpt_bigcode", 64), ("llama", None), ("gemma3_text", None)]
)
def test_a_table_of_positions_is_known_by_what_it_is_asked_for(
    tmp_path: Path, family: str, positions: int | None
) -> None:
    own = FAMILIES["gpt2" if family == "gpt_bigcode" else family]
    settings = ModelSettings(
        path=str(tiny.model_folder(tmp_path, model_type=family, n_inner=32, **own)), random_init=True
    )
    assert load_module.table_sizes(settings) == (48, positions)


def test_a_model_is_loaded_once_for_its_tables_until_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loaded, load = tmp_path / "model", list[str](), load_module.load
    shutil.copytree(tiny.ROOT / "configs/quickstart/model", folder)
    monkeypatch.setattr(load_module, "load", lambda *given, **how: loaded.append("once") or load(*given, **how))
    settings = ModelSettings(path=str(folder))
    sizes = [load_module.table_sizes(settings) for _ in range(3)]
    assert len(loaded) == 1 and len(set(sizes)) == 1
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"changed": True}))
    assert load_module.table_sizes(settings) == sizes[0] and len(loaded) == 2


def test_padding_reads_no_other_memory(tmp_path: Path) -> None:
    """Padded rows may end behind the table; quantised, too."""
    path = tiny.model_folder(tmp_path, model_type="gpt2", **FAMILIES["gpt2"] | {"n_embd": 64, "n_positions": 32})
    model = load_module.load(ModelSettings(path=str(path), random_init=True), 0)
    for _ in range(2):
        table = model.model.wpe
        assert mx.array_equal(table(mx.array([31, 32, 2**30])), table(mx.array([31] * 3)))
        nn.quantize(model, 32, 4)
        assert bounded(model).positions == 32


# ---- Training


def test_rows_are_as_long_as_the_table(tmp_path: Path) -> None:
    """65 tokens have 64 positions: nothing is predicted from the last one."""
    words = words_of(tmp_path, **{"data.length_multiple": 128, "data.shared_prompts": "false", "model.method": "full"})
    fitting = {"prompt_ids": [3] * 40, "chosen_ids": [5] * 24 + [1], "rejected_ids": [6, 1]}
    tiny.write_jsonl(tmp_path / "train.jsonl", [fitting] * 8)
    tiny.train(tmp_path, [*words, "run.name=fitting"])
    tiny.write_jsonl(tmp_path / "train.jsonl", [fitting, fitting | {"prompt_ids": [3] * 41}])
    why = (
        "train.jsonl:2: a row of 66 tokens is longer than the 64 positions of the model's table; set data.max_length=64"
    )
    assert why in refusal(tmp_path, words)
    assert "2 rows cut to data.max_length=64" in tiny.train(tmp_path, [*words, "data.max_length=64"]).stdout


@pytest.mark.parametrize(
    ("own", "file", "record", "why"),
    [
        ([], "train.jsonl", LONG, "train.jsonl:1: a row of 80 tokens is longer than the 64 positions"),
        ([], "valid.jsonl", LONG, "valid.jsonl:1: a row of 80 tokens is longer than the 64 positions"),
        (["data.streaming=true"], "train.jsonl", LONG, "data.max_length=128 is more than the 64 positions"),
        (["train.loss=grpo", "data.valid=null"], "train.jsonl", GROUP, "train.jsonl:1: a row of 80 tokens is longer"),
    ],
)
def test_a_row_beyond_the_table_is_one_clear_line(
    tmp_path: Path, own: list[str], file: str, record: dict[str, Any], why: str
) -> None:
    words = words_of(tmp_path)
    tiny.write_jsonl(tmp_path / file, [record])
    assert why in refusal(tmp_path, [*words, *own])


def test_a_smaller_reference_counts(tmp_path: Path) -> None:
    """Policy and reference see the same rows."""
    words = words_of(tmp_path)
    shape = FAMILIES["gpt2"] | {"vocab_size": 20, "n_positions": 9}
    words.append(f"model.reference={tiny.stored_model(tmp_path, model_type='gpt2', **shape)}")
    assert "is not below the vocabulary's size, 20" in refusal(tmp_path, words)
    tiny.write_jsonl(tmp_path / "train.jsonl", [{"prompt_ids": [3] * 9, "chosen_ids": [5, 1], "rejected_ids": [6]}])
    assert "a row of 11 tokens is longer than the 9 positions" in refusal(tmp_path, words)


# ---- Answers


def test_answers_end_inside_the_table(tmp_path: Path) -> None:
    words = words_of(tmp_path)
    with_tokenizer(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "questions.jsonl", [{"prompt": "What is 437 + 248?", "answer": "685"}])
    asked = [*words, f"evaluate.answers={tmp_path / 'questions.jsonl'}"]
    assert "questions.jsonl:1: a prompt of" in (why := refusal(tmp_path, asked))
    assert (
        "evaluate.max_tokens=128 are more than the 64 positions of the model's table; set evaluate.max_tokens=" in why
    )
    assert "row 0 (evaluate.samples): a prompt of" in refusal(tmp_path, words)
    tiny.train(tmp_path, [*words, "--dry-run", "evaluate.max_tokens=16"])


def test_rounds_end_inside_the_table(tmp_path: Path) -> None:
    words = [*tiny.rounds(tmp_path), f"model.path={with_tokenizer(tmp_path / 'model')}", "model.random_init=true"]
    words.append("data.max_length=128")
    assert "rollouts.max_tokens=60 are more than the 64 positions" in refusal(
        tmp_path, [*words, "rollouts.max_tokens=60"]
    )
    assert "held-out.jsonl:1: a prompt of" in refusal(tmp_path, [*words, "evaluate.max_tokens=60"])
    tiny.write_jsonl(tmp_path / "prompts.jsonl", [{"prompt_ids": [3, 10**6], "answer": "x"}] * 14)
    assert "prompts.jsonl:1: token id 1000000 is not below the vocabulary's size" in refusal(tmp_path, words)


def test_a_file_is_answered_inside_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--make-pairs and --score: the row is named, and nothing is written."""
    with_tokenizer(tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    shared = ["--model", str(tmp_path / "model"), "--data", str(prompts), "model.random_init=true"]
    for record, own, why in (
        (
            {"prompt_ids": [3] * 40},
            ["--score", "greedy"],
            "prompts.jsonl:1: a prompt of 40 tokens and evaluate.max_tokens",
        ),
        ({"prompt_ids": [3, 10**6]}, ["--score", "samples"], "prompts.jsonl:1: token id 1000000 is not below"),
        (LONG, ["--score", "logps"], "prompts.jsonl:1: a row of 80 tokens is longer than the 64 positions"),
    ):
        tiny.write_jsonl(prompts, [record])
        assert command.main([*shared, *own, "--out", str(out)]) == 2
        assert why in (told := capsys.readouterr().err) and told.count("\n") == 1, told
        (tmp_path / "out.jsonl.partial").unlink(missing_ok=True)
    assert not out.exists()


# ---- The arithmetic


def test_limits_count_what_the_model_sees() -> None:
    limits = ModelLimits(48, 10)
    limits.check_row(11)
    limits.check_answer(4, 7, "evaluate.max_tokens")
    limits.check_ids([[0, 47], []])
    assert limits.row_tokens(100) == 11 and limits.row_tokens(5) == 5 and ModelLimits().row_tokens(7) == 7
    for check, why in (
        (lambda: limits.check_row(12), "a row of 12 tokens is longer than the 10 positions"),
        (lambda: limits.check_answer(4, 8, "evaluate.max_tokens"), "set evaluate.max_tokens=7 or less"),
        (lambda: limits.check_answer(11, 1, "evaluate.max_tokens"), "leave it out"),
        (lambda: limits.check_ids([[3], [48]]), "token id 48 is not below the vocabulary's size, 48"),
    ):
        with pytest.raises(Unusable, match=why):
            check()
