"""python -m lib.data --inspect: what it counts, on a file whose every fault was put there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.data.inspect import main
from tests import tiny
from tests.test_data import CORPUS, byte_level
from tests.tiny import ROOT


def pair(i: int, chosen: str = "The answer is 42.", rejected: str = "Blue.") -> dict[str, str]:
    return {"prompt": f"What is {i} + 30?", "chosen": f"{chosen} {i}", "rejected": f"{rejected} {i}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows: list[dict[str, Any]] = [pair(i) | {"documents": ["a"]} for i in range(40)]
    rows += [pair(3), pair(4)]  # twice there
    rows.append({**pair(5), "chosen": pair(5)["rejected"], "rejected": pair(5)["chosen"]})  # the other way round
    rows.append(pair(50, chosen="word " * 30))  # cut
    rows.append(pair(51) | {"prompt": "word " * 300})  # too long a prompt: only tokens show it
    rows.append(pair(52) | {"rejected": ""})
    return tiny.write_jsonl(tmp_path / "pairs.jsonl", rows)


def test_everything_is_counted_once(file: Path, tmp_path, capsys) -> None:
    tokenizer = byte_level(CORPUS)
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.model_folder(tmp_path / "model", vocab_size=len(tokenizer))
    words = [str(file), f"data.cache_dir={tmp_path}/cache", "--model", str(tmp_path / "model"), "data.max_length=64"]
    assert main(["--inspect", *words]) == 0
    said = capsys.readouterr().out
    table = dict(re.findall(r"^([a-z ]+?)  +(.+?) *$", said, re.MULTILINE))
    assert table["usable"] == "45 records from prompt + chosen + rejected" and table["unusable"] == "2"
    assert table["duplicates"].startswith("2 ")
    assert table["trained"] == "44, 1 cut to data.max_length=64 tokens"
    assert f"{file}:46: empty completion: 'rejected' is blank" in said and f"{file}:45: the prompt alone has" in said
    assert "columns that nothing reads: documents; data.ignore=[documents] says that this is meant" in said
    assert table["contradictions"].startswith("1 pairs are there the other way round")
    assert "chosen: What is 0 + 30?⟦The answer is 42. 0</s>⟧" in said


def test_it_needs_no_model_and_faults_are_one_line(file: Path, tmp_path) -> None:
    command = [sys.executable, "-m", "lib.data", "--inspect", f"data.cache_dir={tmp_path}/cache"]
    done = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "lengths in token ids or characters" in done.stdout
    done = subprocess.run([*command, str(file) + "x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "did you mean" in done.stderr
