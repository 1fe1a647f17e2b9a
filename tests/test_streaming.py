"""Data that is never in memory as a whole: the same rows as in memory, each once, whatever happens to files and ranks."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.config import load
from lib.config.settings import DataSettings
from lib.data import sources
from lib.data.dataset import load_dataset
from lib.data.streaming import StreamedDataset, open_held_out, open_training
from lib.data.tokenizer import Vocabulary
from lib.errors import UserError
from tests import tiny
from tests.test_data import CORPUS, byte_level
from tests.tiny import difference, rows_of_epochs, steps_of
from tests.tiny import write_jsonl as write

TOKENIZER = byte_level(CORPUS)


def record(i: int) -> dict[str, str]:
    answers = {"chosen": f"The answer é is {i + i * i}.", "rejected": "Blue" * (i % 7) + f" {i}"}
    return {"prompt": f"What is {i} + {i * i}? " * (1 + i % 2), **answers}


RECORDS = [record(i) for i in range(60)]


def settings_of(folder: Path, train: Any, **changes: Any) -> DataSettings:
    source = train if isinstance(train, dict) else str(train)
    return DataSettings(train=source, **{"streaming": True, "cache_dir": str(folder / "cache"), **changes})


def training(settings: DataSettings, kind: Any = "preference", told: list[str] | None = None) -> Any:
    tell = ([] if told is None else told).append
    return open_training(settings, kind, TOKENIZER, tell=tell, vocabulary=Vocabulary(1))


def open_streamed(folder: Path, train: Any, told: list[str] | None = None, **changes: Any) -> StreamedDataset:
    data = training(settings_of(folder, train, **changes), told=told)
    assert isinstance(data, StreamedDataset)
    return data


def tokens_of(data: Any, row: int) -> list[list[int]]:
    example = data[row]
    return [ids.tolist() for ids in (example.prompt_ids, *example.completions)]


def in_memory(folder: Path, train: Any, **changes: Any) -> Any:
    settings = settings_of(folder, train, **changes)
    return load_dataset(settings.train, settings, "preference", TOKENIZER, vocabulary=Vocabulary(1))


# ---- The same rows


@pytest.mark.parametrize(
    "names", [["a.jsonl"], ["a.jsonl.gz"], ["a.parquet"], ["a.jsonl", "b/c.parquet", "d.jsonl.gz"]]
)
@pytest.mark.parametrize("max_length", [1024, 34])
def test_streamed_rows_are_those_in_memory(tmp_path, names: list[str], max_length: int) -> None:
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    (folder / "README.md").write_text("no data")
    size = len(RECORDS) // len(names)
    for i, name in enumerate(sorted(names)):
        write(folder / name, RECORDS[i * size : (i + 1) * size])
    whole = in_memory(tmp_path, folder, max_length=max_length)
    for _ in range(2):  # the second time from what is kept
        data = open_streamed(tmp_path, folder, max_length=max_length)
        assert len(data) == len(whole) == 60
        for row in np.random.default_rng(0).permutation(60).tolist():
            assert tokens_of(data, row) == tokens_of(whole, row)
    if len(names) > 1:
        assert open_streamed(tmp_path, folder / "**" / "*.[jp]*", max_length=max_length).digest == data.digest
    assert abs(int(data.lengths.sum()) / int(whole.lengths.sum()) - 1) < 0.1
    assert data.lengths.max() < max_length and (data.pieces > 0).all()


def test_the_digest_covers_all_that_makes_the_tokens(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", RECORDS)
    same = open_streamed(tmp_path, path).digest
    assert open_streamed(tmp_path, write(tmp_path / "b.jsonl", RECORDS)).digest == same
    others = [
        open_streamed(tmp_path, path, max_length=34).digest,
        open_streamed(tmp_path, path, holdout=0.3).digest,
        open_streamed(tmp_path, {str(path): 2}).digest,
        open_streamed(tmp_path, write(tmp_path / "c.jsonl", RECORDS[::-1])).digest,
    ]
    changed = [dict(r) for r in RECORDS]
    changed[37]["chosen"] = changed[37]["chosen"].replace("answer", "Answer")
    others.append(open_streamed(tmp_path, write(tmp_path / "d.jsonl", changed)).digest)
    assert len({same, *others}) == 6


# ---- Which rows


def test_weights_say_how_often_an_epoch_takes_a_row(tmp_path) -> None:
    a, b, c = (write(tmp_path / f"{n}.jsonl", RECORDS[i * 20 : i * 20 + 20]) for i, n in enumerate("abc"))
    mixture = {str(a): 1, str(b): 2.5, str(c): 0.5}
    data, whole = open_streamed(tmp_path, mixture), in_memory(tmp_path, mixture)
    times = np.bincount(data.rows, minlength=60)
    assert (times[:20] == 1).all() and set(times[20:40]) == {2, 3} and set(times[40:]) == {0, 1}
    assert [tokens_of(data, row) for row in range(len(data))] == [tokens_of(whole, row) for row in range(len(whole))]
    words = load.load(None, ["model.path=m", f"data.train={{{a}: 1, {b}: 2.5}}"]).data.train
    assert words == {str(a): 1.0, str(b): 2.5}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_part_of_a_plain_text_is_taken_from_what_the_holdout_leaves(tmp_path, streaming: bool) -> None:
    """Both are decided by a hash of the whole text, which must not be the same number."""
    texts = write(tmp_path / "texts.jsonl", [{"text": f"The number {i} is a number."} for i in range(1000)])
    settings = settings_of(tmp_path, {str(texts): 0.1}, holdout=0.1, streaming=streaming)
    assert 60 < len(training(settings, "sft")) < 120, "a tenth of 900"


@pytest.mark.parametrize("streaming", [True, False])
def test_a_holdout_stays_when_rows_are_added_and_keeps_prompts_together(tmp_path, streaming: bool) -> None:
    again = [{**r, "chosen": r["chosen"] + " Yes."} for r in RECORDS]

    def sides(records: list[Any], name: str) -> tuple[set[str], set[str]]:
        path = write(tmp_path / name, records)
        settings = settings_of(tmp_path, path, holdout=0.3, streaming=streaming)
        left = training(settings)
        held = open_held_out(settings, "preference", TOKENIZER, tell=print, vocabulary=Vocabulary(1))
        assert held is not None and len(left) + len(held) == len(records)
        return tuple({TOKENIZER.decode(e.prompt_ids) for e in side.examples(range(len(side)))} for side in (left, held))  # type: ignore[return-value]

    left, held = sides(RECORDS, "a.jsonl")
    assert not left & held and 8 < len(held) < 30
    more_left, more_held = sides([*again[::-1], *[record(i) for i in range(100, 160)], *RECORDS], "b.jsonl")
    assert left <= more_left and held <= more_held and not more_left & more_held


@pytest.mark.parametrize("streaming", [True, False])
def test_duplicates_and_lengths_are_filtered_and_never_refused(tmp_path, streaming: bool) -> None:
    path = write(tmp_path / "a.jsonl", [*RECORDS, *RECORDS[:10], {**RECORDS[3], "rejected": "other"}])
    assert len(training(settings_of(tmp_path, path, deduplicate=True, streaming=streaming))) == 61
    lengths = in_memory(tmp_path, path, deduplicate=True).lengths + 1
    low, high = int(np.quantile(lengths, 0.2)), int(np.quantile(lengths, 0.7))
    settings = settings_of(tmp_path, path, deduplicate=True, streaming=streaming, shortest=low, longest=high)
    data = training(settings)
    found = data.examples(range(len(data)))
    assert len(found) == int(((lengths >= low) & (lengths <= high)).sum()) < 61
    assert all(low <= len(e.prompt_ids) + max(map(len, e.completions)) <= high for e in found)
    assert data.unwanted_count and not data.skipped_count


# ---- Bad input


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """By what is wrong: the file, and where; all but the first ten records are good."""
    whole = write(folder / "whole.jsonl.gz", [record(i) for i in range(4000)]).read_bytes()
    cut = folder / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    renamed = [{"ask" if name == "prompt" else name: text for name, text in r.items()} for r in RECORDS]
    other = write(folder / "other.parquet", renamed)
    return {
        "the gzip stream is cut short": (cut, "[0-9]+"),
        "no column 'prompt' (columns: ask, chosen, rejected)": (other, "1"),
        "not valid UTF-8: byte 0xff": (write(folder / "utf.jsonl", [*RECORDS, b'{"prompt": "\xff"}']), "61"),
    }


@pytest.mark.parametrize("streaming", [True, False])
def test_bad_files_are_refused_in_one_line_or_counted_and_named(tmp_path, streaming: bool) -> None:
    for why, (path, line) in bad_files(tmp_path).items():
        settings = settings_of(tmp_path, path, streaming=streaming)
        with pytest.raises(UserError, match=rf"^{path}:{line}: ") as error:
            training(settings)
        assert why in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
        settings = settings.model_copy(update={"skip_invalid": True})
        if path.suffix == ".parquet":
            with pytest.raises(UserError, match="no column 'prompt'.*none of its 60 records can be used"):
                training(settings)
            continue
        data = training(settings)
        assert data.skipped_count == len(data.skipped) == 1 and why in data.skipped[0]
        assert len(data.examples(range(len(data)))) == len(data) >= 60


def test_an_index_older_than_its_file_is_told_and_made_anew(tmp_path) -> None:
    path, told = write(tmp_path / "a.jsonl", RECORDS), list[str]()
    before = open_streamed(tmp_path, path, told)
    tokens_of(before, 0)
    write(path, RECORDS[::-1])
    for found in (before.records, sources.Records(before.records.indices)):  # opened before, and after
        with pytest.raises(UserError, match="is no longer what was indexed; put the file back"):
            found[5]
    after = open_streamed(tmp_path, path, told)
    assert tokens_of(after, 59) == tokens_of(in_memory(tmp_path, path), 59) and after.digest != before.digest
    records = sources.Records(after.records.indices)
    write_unseen(path, path.read_bytes().replace(b"What", b"Wha\xff"))
    with pytest.raises(UserError, match=r"a.jsonl:\d+ is no longer what was indexed"):
        records[0]


def write_unseen(path: Path, content: bytes) -> None:
    """Another content of the same size, with the modification time put back, as some tools that copy do."""
    stamp = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size


@pytest.mark.parametrize("what", ["entries.bin", "index.json", "lines.jsonl"])
def test_a_damaged_index_is_made_anew(tmp_path, what: str) -> None:
    path = write(tmp_path / "a.jsonl.gz", RECORDS)
    digest = open_streamed(tmp_path, path).digest
    (damaged,) = (tmp_path / "cache").glob(f"index-*/{what}")
    damaged.write_bytes(damaged.read_bytes()[:-7])
    assert open_streamed(tmp_path, path).digest == digest


def test_a_row_that_only_its_tokens_show_to_be_unusable(tmp_path) -> None:
    records = [*RECORDS, *({**record(i), "prompt": "word " * 400} for i in range(2))]
    path = write(tmp_path / "a.jsonl", [record(i) for i in range(60, 2000)] + records)
    refusing = open_streamed(tmp_path, path, max_length=340)
    with pytest.raises(UserError, match=rf"^{path}:2001: the prompt alone has .*skip_invalid=true .*--inspect"):
        refusing[2000]
    data = open_streamed(tmp_path, path, max_length=340, skip_invalid=True)
    assert [e.row for e in data.examples([1999, 2000, 3, 2001])] == [1999, 3]
    assert data.skipped_count == 2 and data.skipped[1].startswith(f"{path}:2002: the prompt alone")


# ---- Runs


def streamed_words(folder: Path, **changes: Any) -> list[str]:
    return [*tiny.settings(folder, **changes), "data.streaming=true", f"data.cache_dir={folder}/cache"]


def test_a_streamed_run_goes_on_exactly_without_the_rows_that_are_unusable(tmp_path) -> None:
    words = streamed_words(tmp_path, rows=40)
    path = tmp_path / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[::10] = ['{"prompt_ids": [3], "chosen_ids": [99], "rejected_ids": [4]}'] * 4  # outside of the vocabulary
    path.write_text("\n".join(lines))
    refused = tiny.train(tmp_path, [*words, "run.name=refused"], check=False)
    assert refused.returncode == 2 and "token id 99 is not below the vocabulary's size" in refused.stderr
    words += ["data.skip_invalid=true", "checkpoint.every=2", "train.schedule=constant"]
    tiny.train(tmp_path, [*words, "train.steps=10", "run.name=whole"])
    tiny.train(tmp_path, [*words, "train.steps=3", "run.name=halves"])
    whole, halves = tmp_path / "runs/whole", tmp_path / "runs/halves"
    tiny.train(tmp_path, ["--resume", str(halves), "train.steps=10"])
    for run in (whole, halves):
        epochs = rows_of_epochs(run)
        assert epochs[0] == epochs[1] == [row for row in range(40) if row % 10]
    assert difference(whole, halves) == 0


def test_a_step_of_which_every_row_is_left_out_changes_nothing(tmp_path) -> None:
    words = streamed_words(tmp_path, rows=40, data__longest=14, data__valid="null", train__global_batch_size=1)
    result = tiny.train(tmp_path, [*words, "train.steps=30", "run.name=run"])
    pairs = [record["loss"] is not None for record in steps_of(tmp_path / "runs" / "run")]
    assert 0 < sum(pairs) < 24 and "not finite" not in result.stdout


def test_sources_of_every_kind_are_found_in_one_order(tmp_path) -> None:
    for name in ("b.jsonl", "a/2.parquet", "a/1.jsonl.gz", ".hidden/x.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in sources.files_of(str(tmp_path), "-")]
    assert found == ["a/1.jsonl.gz", "a/2.parquet", "b.jsonl"]
    assert sources.files_of(str(tmp_path / "*.jsonl"), "-") == [tmp_path / "b.jsonl"]
    assert sources.files_of(str(tmp_path / "a" / "2.parquet"), "-") == [tmp_path / "a" / "2.parquet"]
    assert [*sources.weights_of("x"), *sources.weights_of({"y": 2})] == ["x", "y"]
