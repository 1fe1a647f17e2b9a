"""No index leaves a model's tables: of learned positions, of tokens; in training, evaluation and generation alike."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from lib.config.settings import ModelSettings
from lib.model import load as load_module
from lib.model.load import bounded
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


@pytest.mark.parametrize(("family", "positions"), [("gpt2", 64), ("gpt_bigcode", 64), ("gemma3_text", None)])
def test_a_models_tables_have_sizes(tmp_path, family: str, positions: int | None) -> None:
    shape = FAMILIES["gpt2" if family == "gpt_bigcode" else family]
    path = tiny.model_folder(tmp_path, model_type=family, n_inner=32, **shape)
    assert load_module.table_sizes(ModelSettings(path=str(path), random_init=True)) == (48, positions)


def test_padding_reads_no_other_memory(tmp_path) -> None:
    """Padded rows may end behind the table; quantised, too."""
    path = tiny.model_folder(tmp_path, model_type="gpt2", **FAMILIES["gpt2"] | {"n_embd": 64, "n_positions": 32})
    model = load_module.load(ModelSettings(path=str(path), random_init=True), 0)
    for _ in range(2):
        table = model.model.wpe
        assert mx.array_equal(table(mx.array([31, 32, 2**30])), table(mx.array([31] * 3)))
        nn.quantize(model, 32, 4)
        assert bounded(model).positions == 32


# ---- Training


def test_rows_are_as_long_as_the_table(tmp_path) -> None:
    """65 tokens have 64 positions: nothing is predicted from the last one."""
    words = words_of(tmp_path, **{"data.length_multiple": 128, "data.shared_prompts": "false", "model.method": "full"})
    fitting = {"prompt_ids": [3] * 40, "chosen_ids": [5] * 24 + [1], "rejected_ids": [6, 1]}
    tiny.write_jsonl(tmp_path / "train.jsonl", [fitting] * 8)
    tiny.train(tmp_path, [*words, "run.name=fitting"])
    tiny.write_jsonl(tmp_path / "train.jsonl", [fitting, fitting | {"prompt_ids": [3] * 41}])
    why = "train.jsonl:2: a row of 66 tokens is longer than the 64 positions of the model's table; set data.max_length"
    assert f"{why}=64" in refusal(tmp_path, words)
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
    tmp_path, own: list[str], file: str, record: dict[str, Any], why: str
) -> None:
    words = words_of(tmp_path)
    tiny.write_jsonl(tmp_path / file, [record])
    assert why in refusal(tmp_path, [*words, *own])


def test_a_smaller_reference_counts(tmp_path) -> None:
    """Policy and reference see the same rows."""
    words = words_of(tmp_path)
    shape = FAMILIES["gpt2"] | {"vocab_size": 20, "n_positions": 9}
    words.append(f"model.reference={tiny.stored_model(tmp_path, model_type='gpt2', **shape)}")
    assert "is not below the vocabulary's size, 20" in refusal(tmp_path, words)
    tiny.write_jsonl(tmp_path / "train.jsonl", [{"prompt_ids": [3] * 9, "chosen_ids": [5, 1], "rejected_ids": [6]}])
    assert "a row of 11 tokens is longer than the 9 positions" in refusal(tmp_path, words)


# ---- Answers


def test_answers_end_inside_the_table(tmp_path) -> None:
    words = words_of(tmp_path)
    with_tokenizer(tmp_path / "model")
    tiny.write_jsonl(tmp_path / "questions.jsonl", [{"prompt": "What is 437 + 248?", "answer": "685"}])
    asked = [*words, f"evaluate.answers={tmp_path / 'questions.jsonl'}"]
    assert "questions.jsonl:1: a prompt of" in (why := refusal(tmp_path, asked))
    assert "evaluate.max_tokens=128 are more than the 64 positions" in why
    assert "of the model's table; set evaluate.max_tokens=" in why
    assert "row 0 (evaluate.samples): a prompt of" in refusal(tmp_path, words)
    tiny.train(tmp_path, [*words, "--dry-run", "evaluate.max_tokens=16"])
