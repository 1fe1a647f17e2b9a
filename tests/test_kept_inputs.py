"""What an earlier start kept of the data gives the very run that reading it gives, and nothing else is ever taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from lib.config import load
from lib.config.schema import Config
from lib.data import tokenizer
from lib.errors import UserError
from lib.training import kept_inputs, preload
from lib.training.inputs import Inputs
from tests.tiny import ROOT

QUICKSTART = ROOT / "configs/quickstart"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer and a chat template, and some rows."""
    shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    for name, rows in (("train", 24), ("valid", 8), ("answers", 3)):
        lines = (QUICKSTART / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:rows]))
    return tmp_path


def words_of(folder: Path, *changes: str) -> list[str]:
    files = [f"data.{name}={folder}/{name}.jsonl" for name in ("train", "valid")]
    files += [
        f"model.path={folder}/model",
        f"data.cache_dir={folder}/cache",
        f"evaluate.answers={folder}/answers.jsonl",
    ]
    return [*files, *changes]


def settings_of(folder: Path, *changes: str) -> Config:
    return load.load(ROOT / "configs/quickstart.yaml", words_of(folder, *changes))


def read(folder: Path, *changes: str, keep: bool = True) -> tuple[Inputs, list[str]]:
    told: list[str] = []
    return preload.inputs(settings_of(folder, *changes), told.append, keep), told


def is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> bool:
    """Whether these settings' data are read without the tokenizer."""

    class Loaded(Exception):
        pass

    def loaded(settings: Any) -> None:
        raise Loaded

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "load_tokenizer_of", loaded)
        try:
            read(folder, *changes, keep=False)
        except Loaded:
            return False
        return True


def kept_file(folder: Path) -> Path:
    (path,) = (folder / "cache").glob("inputs-*.safetensors")
    return path


@pytest.mark.parametrize(
    "changes", [[], ["train.loss=kto"], ["train.loss=sft"], ["data.valid=null", "data.holdout=0.2"]]
)
def test_what_was_kept_is_what_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]) -> None:
    first, told = read(folder, *changes)
    assert is_kept(folder, monkeypatch, *changes)
    again, told_again = read(folder, *changes)
    assert told == told_again and told and first.messages == again.messages
    assert first.questions == again.questions and first.questions and first.limits == again.limits
    assert first.first_row == again.first_row and first.first_row is not None
    for one, other in ((first.data, again.data), (first.valid, again.valid)):
        assert str(one) == str(other) and one is not None and other is not None and one.digest == other.digest  # type: ignore[union-attr]
        for row in range(len(one)):
            (a,), (b,) = one.examples([row]), other.examples([row])
            assert (a.label, len(a.completions)) == (b.label, len(b.completions))
            assert all(np.array_equal(x, y) for x, y in zip(a.stored, b.stored, strict=True))
    assert first.tokenizer is not None and again.tokenizer is not None
    assert again.tokenizer.decode([5, 6, 7]) == first.tokenizer.decode([5, 6, 7])


def test_a_change_of_any_file_or_setting_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder)
    for name in ("train.jsonl", "valid.jsonl", "answers.jsonl", "model/tokenizer.json", "model/config.json"):
        path = folder / name
        seen, content = path.stat(), path.read_bytes()
        path.write_bytes(content)
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as if nobody had touched it
        assert not is_kept(folder, monkeypatch), name
        read(folder)
        assert is_kept(folder, monkeypatch), name
    for change in ("data.max_length=40", "train.loss=sft", "train.seed=3", "data.chat_template=false"):
        assert not is_kept(folder, monkeypatch, change), change
    monkeypatch.setattr(kept_inputs.importlib.metadata, "version", lambda name: "0.0.1")
    assert not is_kept(folder, monkeypatch), "another version of what makes the tokens"


@pytest.mark.long
def test_a_start_without_answers_to_show_needs_no_transformers(folder: Path) -> None:
    program = "import sys, train; status = train.main(sys.argv[1:]); print(status, 'transformers' in sys.modules)"
    words = words_of(folder, "evaluate.answers=null", "evaluate.samples=0", "train.steps=2", "run.pages=false")

    def started(*more: str) -> tuple[str, str]:
        command = [sys.executable, "-c", program, *more]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True).stdout
        return out.splitlines()[-1], out

    new = ["--config", str(ROOT / "configs/quickstart.yaml"), *words, f"run.dir={folder}/runs"]
    assert started(*new, "run.name=first")[0] == "0 True"
    last, text = started(*new, "run.name=second")
    assert last == "0 False" and "row 1: " in text and "chat template: " in text
    assert started("--resume", f"{folder}/runs/first", "train.steps=3")[0] == "0 False"
    assert started("--resume", f"{folder}/runs/second", "train.steps=3")[0] == "0 False"
    runs = [(folder / "runs" / name / "adapters.safetensors").read_bytes() for name in ("first", "second")]
    assert runs[0] == runs[1]


def test_nothing_is_kept_where_it_is_not_wanted_or_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder, keep=False)  # a dry run
    assert not (folder / "cache").exists()
    (folder / "cache").write_text("")  # no folder
    read(folder)
    assert not is_kept(folder, monkeypatch)
    (folder / "cache").unlink()

    def full(*arguments: object) -> None:
        raise RuntimeError("[write] Unable to write 99 bytes to file.")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        read(folder)
    assert [path.name for path in (folder / "cache").iterdir()] == ["inputs.lock"]
    changed = preload._read

    def changes(*arguments: Any) -> Inputs:
        result = changed(*arguments)
        with (folder / "train.jsonl").open("a") as file:
            file.write("\n")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(preload, "_read", changes)  # somebody writes while it is read
        read(folder)
    assert [path.name for path in (folder / "cache").iterdir()] == ["inputs.lock"]


def test_the_cache_keeps_a_few_and_nothing_unfinished(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_inputs, "KEPT_FILES", 3)
    (folder / "cache").mkdir()
    (folder / "cache/.inputs-unfinished.safetensors").write_text("of a process that was killed")
    for seed in range(5):
        read(folder, f"train.seed={seed}")
        read(folder, "train.seed=0")  # in use
    assert len(list((folder / "cache").iterdir())) == 3 + 1
    assert [is_kept(folder, monkeypatch, f"train.seed={seed}") for seed in range(5)] == [True, False, False, True, True]


# ---- A cache of somebody else


def altered(change: Callable[[dict[str, mx.array], dict[str, Any]], None]) -> Callable[[Path], None]:
    """With other arrays, or other JSON, and a digest that agrees."""

    def alter(path: Path) -> None:
        loaded, texts = mx.load(str(path), return_metadata=True)
        arrays, kept = dict(loaded), json.loads(texts["inputs"])
        mx.eval(arrays)
        change(arrays, kept)
        for name in {name.partition(".")[0] for name in arrays} & kept.keys():
            tokens, bounds = (np.array(arrays.get(f"{name}.{part}", mx.array([0]))) for part in ("tokens", "bounds"))
            if isinstance(kept[name], dict):
                kept[name]["digest"] = kept_inputs.digest_of("preference", tokens, bounds, None)
        path.unlink()
        mx.save_safetensors(str(path), arrays, {"inputs": json.dumps(kept)})

    return alter


def put(name: str, value: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return altered(lambda arrays, kept: arrays.update({name: mx.array(value(np.array(arrays[name])))}))


def field(**fields: Any) -> Callable[[Path], None]:
    return altered(lambda arrays, kept: kept.update(fields))


def at(index: int, value: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([array[:index], [value], array[index + 1 :]]).astype(array.dtype)


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 9),
    "empty": lambda path: os.truncate(path, 0),
    "12 GB": lambda path: os.truncate(path, 12 * 2**30),
    "no JSON": lambda path: mx.save_safetensors(str(path), {"a": mx.zeros(2)}),
    "lists without end": lambda path: mx.save_safetensors(str(path), {"a": mx.zeros(2)}, {"inputs": "[" * 99_999}),
    "a token beyond the vocabulary": put("data.tokens", at(3, 2**20)),
    "a token beyond it that is not learnt": put("data.tokens", at(3, -(2**31))),
    "a prompt's token below zero": put("data.tokens", at(0, -7)),
    "a prompt's token far below zero": put("data.tokens", at(0, -40)),
    "tokens of half the bits": altered(
        lambda arrays, kept: arrays.update({"data.other": mx.zeros(3, mx.bfloat16)}) or arrays.pop("valid.bounds")
    ),
    "tokens of another type": put("data.tokens", lambda array: array.astype(np.float32)),
    "tokens in a square": put("data.tokens", lambda array: array[: len(array) // 2 * 2].reshape(2, -1)),
    "pieces that end before they begin": put("data.bounds", at(2, 10**6)),
    "pieces that begin before the text": put("data.bounds", at(0, -5)),
    "pieces beyond the text": put("data.bounds", at(-1, 10**9)),
    "half a row": put("data.bounds", lambda array: np.concatenate([array[:-2], array[-1:]])),
    "no row": put("data.bounds", lambda array: array[:1]),
    "a row of nothing": put("data.bounds", lambda array: at(2, int(array[1]))(array)),
    "one long row": put("data.bounds", lambda array: array[[0, 1, 2, -1]]),
    "labels": altered(lambda arrays, kept: arrays.update({"data.labels": mx.array([True])})),
    "no tokens": altered(lambda arrays, kept: arrays.pop("data.tokens")),
    "no held-out tokens": altered(lambda arrays, kept: arrays.pop("valid.tokens")),
    "nothing held out": field(valid=None),
    "no questions": field(questions=[]),
    "a question of text": field(questions=[{"prompt": "a", "prompt_ids": "b", "answer": "c"}]),
    "a question beyond the vocabulary": field(questions=[{"prompt": "a", "prompt_ids": [10**9], "answer": "c"}]),
    "a question below zero": field(questions=[{"prompt": "a", "prompt_ids": [-5], "answer": "c"}]),
    "a question of no tokens": field(questions=[{"prompt": "a", "prompt_ids": [], "answer": "c"}]),
    "messages of numbers": field(messages=[1]),
    "a first row of text": field(first_row="x"),
    "data of text": field(data="x"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_none_of_ours_is_read_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, _ = read(folder)
    HOSTILE[name](kept_file(folder))
    assert not is_kept(folder, monkeypatch)
    assert read(folder)[0].data.digest == first.data.digest
    assert is_kept(folder, monkeypatch), "it was not written anew"


def test_damage_that_fits_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(folder)
    path = kept_file(folder)
    content = bytearray(path.read_bytes())
    content[-40] ^= 1  # of a token or a bound: none of them is beyond anything
    path.write_bytes(content)
    assert not is_kept(folder, monkeypatch)


@pytest.mark.parametrize("name", ["inputs-*.safetensors", "inputs.lock"])
def test_a_link_in_the_cache_is_refused_and_followed_nowhere(folder: Path, name: str) -> None:
    read(folder)
    (path,) = (folder / "cache").glob(name)
    (folder / "victim").write_text("mine")
    path.unlink()
    path.symlink_to(folder / "victim")
    if name == "inputs.lock":
        kept_file(folder).unlink()
    with pytest.raises(UserError, match="is a link"):
        read(folder)
    assert (folder / "victim").read_text() == "mine"
