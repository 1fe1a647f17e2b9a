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
    FOLDER,
    BatchCurve,
    CurveKey,
    HostCalibration,
    choose_curves,
    curve_key,
    read_calibration,
    read_published,
    write_calibration,
)
from lib.plan.calibrator import is_fresh, time_now
from lib.system import files

KEY = CurveKey(model="m", method="lora", dtype="bfloat16", sequence_length=512)
VERSIONS = {"mlx": "0.32.4"}


def calibration(host: str, *keys: CurveKey, versions: dict[str, str] = VERSIONS, chip: str = "c") -> HostCalibration:
    curve = BatchCurve.from_rates({1: 10, 4: 30}, {1: 10**9, 4: 2 * 10**9}, 10**10)
    curves = [{**curve.model_dump(), "key": key.model_dump(), "versions": versions} for key in keys]
    machine = {"host": host, "device_name": chip, "device": "metal"}
    return HostCalibration.model_validate({"machine": machine, "curves": curves})


def choose(*calibrations: HostCalibration | None, **arguments: Any) -> Any:
    hosts = [f"host{i}" for i in range(len(calibrations))]
    return choose_curves(hosts, calibrations, KEY, **{"versions": VERSIONS, **arguments})


def of(**changes: Any) -> CurveKey:
    return KEY.model_copy(update=changes)


def test_a_file_is_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "a.json"
    written = calibration("a", KEY)
    write_calibration(path, written)
    assert read_calibration(path) == written
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    point = json.loads(path.read_text())["curves"][0]["points"][1]
    assert point["batch_size"] == 4 and point["pairs_per_second"] == pytest.approx(30)


def test_unknown_keys_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    tree = {**calibration("a", KEY).model_dump(), "later": 1}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(tree))
    assert read_calibration(path) == calibration("a", KEY)


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_calibration(path, calibration("a", KEY))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush", full)
    with pytest.raises(OSError, match="No space"):
        write_calibration(path, calibration("b", KEY))
    assert read_calibration(path).machine.host == "a"


POINTS = [{"batch_size": 1, "seconds_median": 0.1}, {"batch_size": 2, "seconds_median": 0.15}]


def with_points(points: list[dict[str, Any]]) -> str:
    machine = {"host": "a", "device_name": "c", "device": "cpu"}
    return json.dumps({"machine": machine, "curves": [{"points": points}]})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{\n"machine": ', ["a.json:2", "not valid JSON"]),
        ("", ["a.json:1", "not valid JSON"]),
        ("[]", ["a.json"]),
        ("{}", ["machine", "required"]),
        (with_points(POINTS[:1]), ["curves.0", "at least 2 batch sizes and has 1"]),
        (with_points([]), ["at least 2 batch sizes and has 0"]),
        (
            with_points([POINTS[0], {"batch_size": 2, "seconds_median": 0}]),
            ["points.1.seconds_median", "not 0"],
        ),
        (with_points([POINTS[0], {"batch_size": 2, "seconds_median": -0.5}]), ["seconds_median", "not -0.5"]),
        (
            with_points([POINTS[0], {"batch_size": 2, "seconds_median": float("nan")}]),
            ["seconds_median", "nan"],
        ),
        (with_points([POINTS[0], {"batch_size": 2, "seconds_median": "soon"}]), ["seconds_median", "'soon'"]),
        (
            with_points([POINTS[0], {"batch_size": 0, "seconds_median": 0.1}]),
            ["points.1.batch_size", "not 0"],
        ),
        (with_points(POINTS[::-1]), ["[2, 1]", "do not rise"]),
        (with_points([POINTS[0], POINTS[0]]), ["do not rise"]),
        (
            with_points([{**POINTS[0], "peak_memory_bytes": 5}, POINTS[1]]),
            ["peak_memory_bytes", "some batch"],
        ),
        (with_points(POINTS)[:-30], ["not valid JSON"]),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        read_calibration(path)
    message = str(raised.value)
    assert "\n" not in message and "a.json" in message and "make calibrate" in message
    for part in parts:
        assert part in message, message
    assert not re.search(r"pydantic|Error\(", message)


def test_missing_binary_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; make calibrate"):
        read_calibration(tmp_path / "none.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_calibration(tmp_path / "b.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_calibration(tmp_path)


def test_times_between_below_and_beyond_the_measured_sizes() -> None:
    curve = BatchCurve.from_rates({2: 20, 4: 20, 8: 16})
    seconds = curve.seconds(np.array([1, 2, 3, 4, 6, 8, 16]))
    assert seconds == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.35, 0.5, 1.0])


@pytest.mark.parametrize(("limit", "largest"), [(None, 8), (100, 8), (10, 8), (9, 7), (5, 3), (2.3, 1), (2, 0)])
def test_largest_micro_batch_in_memory(limit: float | None, largest: int) -> None:
    """Peaks 2, 3, 5, 9 for 1, 2, 4, 8 pairs, so 1 + b; a tenth of the limit stays free."""
    peaks = {size: 1000 * (1 + size) for size in (1, 2, 4, 8)}
    rates = dict.fromkeys(peaks, 1.0)
    curve = BatchCurve.from_rates(rates, peaks, int(limit * 1000) if limit else None)
    assert curve.max_batch_size == largest


def test_published_machines() -> None:
    published = read_published()
    assert sorted(published) == ["m3-ultra", "m4-max"]
    best = {name: max(c.curves[0].points, key=lambda point: point.pairs_per_second) for name, c in published.items()}
    assert (best["m4-max"].batch_size, round(best["m4-max"].pairs_per_second)) == (32, 776)
    assert (best["m3-ultra"].batch_size, round(best["m3-ultra"].pairs_per_second)) == (4, 278)
    for c in published.values():
        assert c.source != "measured" and c.note and c.curves[0].source == c.source and c.curves[0].note
        assert c.curves[0].key is None and c.gflops


# ------------------------------------------------------------------------------------------------------------
# The choice


def test_the_exact_curve_first() -> None:
    choice = choose(calibration("a", of(sequence_length=256), KEY), calibration("b", KEY))
    assert [c.key for c in choice.curves] == [KEY, KEY] and not choice.warnings
    assert "m, lora, bfloat16, 512 tokens" in choice.reason and "scaled" not in choice.reason


def test_then_the_nearest_length_scaled_by_tokens() -> None:
    near = calibration("a", of(sequence_length=64), of(sequence_length=256), of(sequence_length=4096))
    choice = choose(near, calibration("b", KEY))
    assert choice.curves[0].key == KEY
    assert choice.curves[0].seconds(np.array([1]))[0] == pytest.approx(2 * 0.1)
    assert choice.curves[0].points[0].peak_memory_bytes == 2 * 10**9
    assert "scaled by tokens: host0 from 256 tokens" in choice.reason
    shorter = calibration("a", of(sequence_length=1024)).curves[0].at_length(512)
    assert shorter.points[0].peak_memory_bytes == 10**9  # what part of it does not shrink is unknown


def test_then_another_measurement_that_all_hosts_have() -> None:
    other = of(model="other")
    choice = choose(calibration("a", KEY, other), calibration("b", other, of(method="full")))
    assert [c.key for c in choice.curves] == [other, other]
    assert "no calibration of host1" in choice.warnings[0] and "other" in choice.warnings[0]


def test_then_published_figures_of_the_chips() -> None:
    published = list(read_published().values())
    choice = choose(
        calibration("a", KEY, chip="Apple M4 Max"),
        None,
        published=published,
        device_names=[None, "Apple M3 Ultra"],
    )
    assert [round(max(p.pairs_per_second for p in c.points)) for c in choice.curves] == [776, 278]
    assert "published" in choice.reason and "no calibration of host1" in choice.warnings[0]


def test_at_last_equal_shares_and_who_lacks_what() -> None:
    choice = choose(calibration("a", KEY), None, published=list(read_published().values()))
    assert choice.curves is None
    assert "no calibration of host1" in choice.reason and "make calibrate" in choice.reason
    assert choose(calibration("a", KEY), calibration("b", of(model="other"))).curves is None


def test_other_versions_are_a_warning_or_refused() -> None:
    old = calibration("a", KEY, versions={"mlx": "0.30.0"})
    choice = choose(old, calibration("b", KEY))
    assert "host0 was made with mlx 0.30.0 (now 0.32.4)" in choice.warnings[0]
    with pytest.raises(UserError, match="plan.require_calibration: .*mlx 0.30.0.*make calibrate"):
        choose(old, calibration("b", KEY), require_calibration=True)


@pytest.mark.parametrize("second", [None, calibration("b", of(model="other"))])
def test_what_is_not_measured_is_refused_when_required(second: HostCalibration | None) -> None:
    with pytest.raises(UserError, match="plan.require_calibration: no calibration of host1 .*make calibrate"):
        choose(calibration("a", KEY, of(model="other")), second, require_calibration=True)


# ------------------------------------------------------------------------------------------------------------
# What to measure


def key_of(folder: Path, *words: str, **stored: Any) -> CurveKey:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, **stored}))
    settings = load.load(None, [f"model.path={folder}", "data.train=x", *words])
    return curve_key(settings, folder, 64)


def test_a_key_names_the_model_and_not_its_place(tmp_path: Path) -> None:
    key = key_of(tmp_path / "here" / "model")
    assert key == key_of(tmp_path / "there" / "model")
    assert key.model.startswith("model ") and (key.method, key.dtype) == ("lora", "float32")
    others = [
        key_of(tmp_path / "model", hidden_size=32),
        key_of(tmp_path / "model", "model.rank=64"),
        key_of(tmp_path / "model", "model.blocks=1"),
        key_of(tmp_path / "model", "model.method=full"),
        key_of(tmp_path / "model", "train.loss=sft"),
        key_of(tmp_path / "model", "model.gradient_checkpointing=true"),
    ]
    assert len({key, *others}) == 7
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
def test_a_keys_dtype(tmp_path: Path, stored: dict[str, Any], words: list[str], dtype: str) -> None:
    assert key_of(tmp_path / "m", *words, **stored).dtype == dtype


def test_a_key_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    settings = load.load(None, ["model.path=nowhere", "data.train=x"])
    with pytest.raises(UserError, match="model.path nowhere: config.json cannot be read"):
        curve_key(settings, tmp_path, 64)


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


def test_what_a_mac_leaves_on_other_disks_is_no_calibration(tmp_path: Path) -> None:
    (tmp_path / "m4-max.json").write_bytes((FOLDER / "published/m4-max.json").read_bytes())
    (tmp_path / "._m4-max.json").write_bytes(b"\0\5\x16\7\0\2")
    assert list(read_published(tmp_path)) == ["m4-max"]
