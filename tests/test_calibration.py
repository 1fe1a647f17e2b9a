"""Calibration files and the choice of curves: what is accepted, what is refused, what is said."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.config import load
from lib.errors import UserError
from lib.plan.calibration import (
    BatchCurve,
    CurveKey,
    HostCalibration,
    calibration_path,
    curve_key,
    is_fresh,
    read_calibration,
    read_published,
    time_now,
    write_calibration,
)

KEY = CurveKey(model="m", method="lora", dtype="bfloat16", sequence_length=512)
VERSIONS = {"mlx": "0.32.4"}


def calibration(host: str, *keys: CurveKey, versions: dict[str, str] = VERSIONS, chip: str = "c") -> HostCalibration:
    curve = BatchCurve.from_rates({1: 10, 4: 30}, {1: 10**9, 4: 2 * 10**9}, 10**10)
    curves = [{**curve.model_dump(), "key": key.model_dump(), "versions": versions} for key in keys]
    machine = {"host": host, "device_name": chip, "device": "metal"}
    return HostCalibration.model_validate({"machine": machine, "curves": curves})


def of(**changes: Any) -> CurveKey:
    return KEY.model_copy(update=changes)


def test_a_file_is_read_as_written(tmp_path) -> None:
    path = tmp_path / "calibration" / "a.json"
    written = calibration("a", KEY)
    write_calibration(path, written)
    assert read_calibration(path) == written
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    point = json.loads(path.read_text())["curves"][0]["points"][1]
    assert point["batch_size"] == 4 and point["pairs_per_second"] == pytest.approx(30)


POINTS = [{"batch_size": 1, "seconds_median": 0.1}, {"batch_size": 2, "seconds_median": 0.15}]


def with_points(points: list[dict[str, Any]]) -> str:
    machine = {"host": "a", "device_name": "c", "device": "cpu"}
    return json.dumps({"machine": machine, "curves": [{"points": points}]})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{\n"machine": ', ["a.json: cannot be read", "line 2"]),
        ("{}", ["machine", "required"]),
        (with_points(POINTS[:1]), ["curves.0", "at least 2 rising batch sizes and has [1]"]),
        (with_points([POINTS[0], POINTS[1] | {"seconds_median": 0}]), ["points.1.seconds_median", "greater than 0"]),
        (with_points([POINTS[0], POINTS[1] | {"seconds_median": "soon"}]), ["seconds_median", "valid number"]),
        (with_points(POINTS[::-1]), ["has [2, 1]"]),
        (with_points([{**POINTS[0], "peak_memory_bytes": 5}, POINTS[1]]), ["peak_memory_bytes", "some batch"]),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path, text: str, parts: list[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_calibration(path)
    message = str(raised.value)
    assert "\n" not in message and "a.json" in message and "make calibrate" in message
    for part in parts:
        assert part in message, message
    assert not re.search(r"pydantic|Error\(", message)


def test_missing_binary_and_unreadable_files(tmp_path) -> None:
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("none.json", "does not exist; make calibrate"),
        ("b.json", "cannot be read"),
        ("", "cannot be read"),
    ):
        with pytest.raises(UserError, match=why):
            read_calibration(tmp_path / name)


def test_times_between_below_and_beyond_the_measured_sizes() -> None:
    curve = BatchCurve.from_rates({2: 20, 4: 20, 8: 16})
    assert curve.seconds(np.array([1, 2, 3, 4, 6, 8, 16])) == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.35, 0.5, 1.0])


@pytest.mark.parametrize(("limit", "largest"), [(None, 8), (100, 8), (10, 8), (9, 7), (5, 3), (2.3, 1), (2, 0)])
def test_largest_micro_batch_in_memory(limit: float | None, largest: int) -> None:
    """Peaks 2, 3, 5, 9 for 1, 2, 4, 8 pairs, so 1 + b; a tenth of the limit stays free."""
    peaks = {size: 1000 * (1 + size) for size in (1, 2, 4, 8)}
    rates = dict.fromkeys(peaks, 1.0)
    curve = BatchCurve.from_rates(rates, peaks, int(limit * 1000) if limit else None)
    assert curve.max_batch_size == largest


def test_files_of_ranks(tmp_path) -> None:
    assert calibration_path(tmp_path, ["mac", "mac"], 1) == tmp_path / "mac.json"
    (tmp_path / "mac-1.json").write_text("{}")
    assert calibration_path(tmp_path, ["mac", "mac"], 1) == tmp_path / "mac-1.json"
    assert calibration_path(tmp_path, ["mac", "box"], 0) == tmp_path / "mac.json"
    (tmp_path / "._mac.json").write_bytes(b"\xff")
    (tmp_path / "mac-1.json").unlink()
    assert read_published(tmp_path) == {}
    sheets = [host for host in read_published().values() if not host.curves]
    assert len(sheets) == 25 and all("https://" in host.note and host.gflops for host in sheets), "each with its source"
    m4, m3 = (read_published()[name].curves[0] for name in ("m4-max", "m3-ultra"))
    assert (m4.best_point.pairs_per_second, m3.best_point.pairs_per_second) == (pytest.approx(776), pytest.approx(278))


def test_an_old_file_works_or_says_which_version_wrote_it(tmp_path) -> None:
    tree = calibration("a", KEY).model_dump(mode="json")
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**tree, "ceilings": [{"key": tree["curves"][0]["key"], "max_pairs": 2}]}))
    assert read_calibration(path) == calibration("a", KEY), "unknown keys, of an earlier or later version"
    path.write_text(json.dumps({**tree, "curves": [{"points": []}], "versions": {"tandem": "0.3", "mlx": "0.30"}}))
    with pytest.raises(UserError, match="written with tandem 0.3, mlx 0.30"):
        read_calibration(path)


def key_of(folder: Path, *words: str, **stored: Any) -> CurveKey:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, **stored}))
    settings = load.load(None, [f"model.path={folder}", "data.train=x", *words])
    return curve_key(settings.model, settings.record_kind, folder, 64)


def test_a_key_names_the_model_and_not_its_place(tmp_path) -> None:
    key = key_of(tmp_path / "here" / "model")
    assert key == key_of(tmp_path / "there" / "model")
    assert key.model.startswith("model ") and (key.method, key.dtype) == ("lora", "float32")
    words = ["model.rank=64", "model.blocks=1", "model.method=full", "train.loss=sft"]
    others = [key_of(tmp_path / "model", word) for word in [*words, "model.gradient_checkpointing=true"]]
    assert len({key, key_of(tmp_path / "model", hidden_size=32), *others}) == 7
    assert key == key_of(tmp_path / "model", "train.loss=ipo", "train.learning_rate=1", "data.max_length=9")


@pytest.mark.parametrize(
    ("stored", "words", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, [], "bfloat16"),
        ({"dtype": "float16"}, [], "float16"),
        ({"torch_dtype": "bfloat16"}, ["model.dtype=float32"], "float32"),
        ({"torch_dtype": "bfloat16"}, ["model.random_init=true"], "float32"),
        ({"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}, [], "4-bit"),
    ],
)
def test_a_keys_dtype(tmp_path, stored: dict[str, Any], words: list[str], dtype: str) -> None:
    assert key_of(tmp_path / "m", *words, **stored).dtype == dtype


def test_fresh_is_young_and_of_these_versions() -> None:
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert is_fresh(hour_ago, VERSIONS, VERSIONS, max_age_days=1) and is_fresh(time_now(), {}, {}, 1)
    assert not is_fresh(hour_ago, VERSIONS, VERSIONS, max_age_days=1 / 25)
    assert not is_fresh(hour_ago, VERSIONS, {"mlx": "0.33.0"}, max_age_days=1)
    for unusable in (None, "yesterday", "2026-01-01T00:00:00", "2999-01-01T00:00:00+00:00"):
        assert not is_fresh(unusable, VERSIONS, VERSIONS, max_age_days=1e9)


def test_the_best_point_is_the_fastest_that_fits() -> None:
    rates, peaks = {1: 10, 2: 15, 4: 18}, {1: 10, 2: 20, 4: 40}
    assert BatchCurve.from_rates(rates, peaks, 1000).best_point.batch_size == 4
    assert BatchCurve.from_rates(rates, peaks, 30).best_point.batch_size == 2
    assert BatchCurve.from_rates(rates, peaks, 5).best_point.batch_size == 1  # none fits
