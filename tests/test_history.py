"""Logs that grow ➜ curves in bounded memory: every record counted once, whatever way it comes in."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.report.figures import figures

from lib.plan.calibration import BatchCurve
from lib.report import charts, components, history, run_report
from lib.report import figures as figures_module
from lib.report.history import COLUMNS, INDEX, RunHistory, Series
from lib.system import records as run_records
from lib.system.records import Copy, PerformanceTracker, Tail, rewind

KINDS = ("start", "evaluation", "checkpoint", "plan", "merge", "warning", "end", "samples", "network", "sensors", "new")


def write(path: Path, records: list[dict[str, Any]], mode: str = "a") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, rank: int = 0, host: str = "a", **values: Any) -> dict[str, Any]:
    defaults = {"pairs": 4, "step_seconds": 0.5, "compute_seconds": 0.4, "sync_seconds": 0.06, "wait_seconds": 0.04}
    defaults |= {"loss": 1 / number, "peak_memory_bytes": 100 + number, "bytes_sent": 600_000}
    return {"kind": "step", "time": 1000.0 + number, "rank": rank, "host": host, "step": number, **defaults, **values}


def read_all(run: RunHistory) -> RunHistory:
    while run.read():
        pass
    return run


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 700), capacity=st.sampled_from([2, 4, 32]))
def test_buckets_are_what_all_records_at_once_would_give(seed: int, count: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, len(COLUMNS)))
    rows[rng.random(rows.shape) < 0.2] = np.nan  # records without some of the fields
    rows[:, INDEX["step"]] = np.arange(count)
    series = Series(capacity)
    places = sorted(rng.integers(0, count + 1, size=rng.integers(0, 9)))
    for part in np.split(rows, places):  # in pieces of any size
        series.append(part)
    means, least, greatest = series.table()
    assert len(means) <= 2 * capacity and series.count == count
    for bucket, first in enumerate(range(0, count, series.width)):
        records = rows[first : first + series.width]
        known = [column[~np.isnan(column)] for column in records.T]
        expected = [column.mean() if len(column) else np.nan for column in known]
        np.testing.assert_allclose(means[bucket], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(least[bucket], [min(c) if len(c) else np.nan for c in known])
        np.testing.assert_array_equal(greatest[bucket], [max(c) if len(c) else np.nan for c in known])
    assert bucket == len(means) - 1
    np.testing.assert_allclose(series.totals, np.nansum(rows, axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(np.array(series.recent), rows[-history.RECENT :])


def test_a_tail_gives_each_line_once_and_only_whole_ones(tmp_path: Path) -> None:
    path, rng = tmp_path / "log", random.Random(3)
    lines = [bytes([rng.randrange(32, 127)]) * rng.randrange(1, 400) + b"\n" for _ in range(300)]
    text, written, tail, got = b"".join(lines), 0, Tail(path), b""
    assert tail.read() == (False, b"")
    while written < len(text):
        more = rng.randrange(1, 900)
        with path.open("ab") as file:
            file.write(text[written : written + more])
        written += more
        _, new = tail.read(limit_bytes=rng.randrange(1, 500))  # shorter than a line, sometimes
        assert not new or new.endswith(b"\n")
        got += new
    while new := tail.read(100)[1]:
        got += new
    assert got == text


def test_a_log_that_a_resume_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-000.jsonl"
    write(
        path,
        [step(n) for n in range(1, 21)] + [{"kind": "checkpoint", "time": 1020.5, "rank": 0, "host": "a", "step": 20}],
    )
    run = read_all(RunHistory(tmp_path))
    rewind(path, 12)
    write(path, [step(n, loss=9.0) for n in range(13, 31)])  # as long as before, and longer, before anybody looks
    curve = read_all(run).curve((0, "a"), "loss")
    assert curve.steps.tolist() == list(range(1, 31)) and curve.values[11:].tolist() == [1 / 12, *[9.0] * 18]
    assert run.events == []


def test_broken_lines_and_strangers_records_harm_nobody(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-000.jsonl"
    path.parent.mkdir()
    strange = [
        b'{"kind": "step"}',
        b"[1, 2]",
        b"17",
        b'{"kind": "step", "time": "now", "loss": {}, "rank": 0, "host": "a"}',
    ]
    strange += [b"\xff\xfe", b"", b"null", b'{"time": 1}', b'{"kind": "start", "time": 999.0, "plan": null}']
    strange += [b'{"kind": ["x"], "time": 1}', b'{"kind": "end", "time": NaN}', b'{"kind": "end", "time": 1e300}']
    strange += [
        b"[" * 100_000,
        b'{"kind": "end", "time": 1, "rank": "0"}',
        b'{"kind": "step", "time": 1, "step": 1e999}',
    ]
    strange += [
        b'{"kind": "step", "time": 1, "step": ' + b"9" * 400 + b"}",
        b'{"kind": "network", "time": 1, "connections": 3}',
    ]
    whole = [json.dumps(step(n)).encode() for n in (1, 2)]
    path.write_bytes(b"\n".join([whole[0], *strange, whole[1]]) + b'\n{"kind": "st')
    path.with_name("rank-001.jsonl").mkdir()  # what cannot be read
    run = read_all(RunHistory(tmp_path))
    assert run.curve((0, "a"), "loss").values.tolist() == [1.0, 0.5]
    assert [event["kind"] for event in run.events] == ["start"] and figures(run, 2000.0).step == 2


PLACES = ("step", "steps", "plan", "config", "shares", "pairs", "resumed_from_step", "resumes", "text", "samples")
PLACES += ("loss", "reward_accuracy", "memory_limit_bytes", "temperature_celsius", "connections", "reason", "versions")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["ranks", "host", "shares", "curves", "cost", "watts", "warnings", "prompt", "peer", "train"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(PLACES), JSON)), max_size=6))
def test_no_record_whatever_it_holds_breaks_a_page(found: list[tuple[str, dict[str, Any]]]) -> None:
    from dash import html

    lines = [step(1), {"kind": "start", "time": 999.0, "rank": 0, "host": "a", "steps": 9}]
    lines += [
        {"kind": kind, "time": 1000.0 + n, "rank": 0, "host": "a", **more} for n, (kind, more) in enumerate(found)
    ]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "logs" / "rank-000.jsonl", lines)
        run = read_all(RunHistory(Path(folder)))
        now = figures(run, 2000.0)
        drawn = [charts.learning([run], name) for name, *_ in charts.LEARNING] + [charts.timeline(run)]
        drawn += [charts.speed(run, now), charts.seconds(now), charts.network(run), charts.batch_curves(run)]
        drawn += [charts.measured(run, name) for name in charts.MEASURED]
        json.dumps(drawn)
        shown = [components.headline(html, now), components.machines(html, run, now), components.events(html, run)]
        shown += [
            components.comparison(html, [run], [now]),
            components.warnings(html, now),
            components.chart_values(now),
        ]
        assert shown
        assert run_report.facts(run, now, {}) and isinstance(
            run_report.samples(run) + charts.distinct_events(run.events), list
        )


def test_the_network_and_sensors_are_told_by_rank_and_host(tmp_path: Path) -> None:
    links = [{"peer": "10.0.0.2", "round_trip_seconds": 0.002, "retransmits": 3}]
    links += [{"peer": "10.0.0.3", "round_trip_seconds": 0.005, "retransmits": 1}]
    links += [{"peer": "127.0.0.1", "round_trip_seconds": 9.0, "retransmits": 99}]  # mpirun's daemon, no other rank
    common = {"rank": 1, "host": "b", "step": 3}
    network = {"kind": "network", "time": 1003.0, **common, "bytes_per_second": 2e6, "connections": links}
    sensors = {"kind": "sensors", "time": 1003.5, **common, "temperature_celsius": 71.5, "power_watts": 120}
    write(tmp_path / "logs" / "rank-001.jsonl", [step(3, rank=1, host="b"), network, sensors])
    write(tmp_path / "logs" / "rank-002.jsonl", [step(3, rank=2, host="b")])  # on the same host
    run = read_all(RunHistory(tmp_path))
    one, two = figures(run, 1004.0).ranks
    assert (one.round_trip_seconds, one.retransmits, one.temperature_celsius) == (0.005, 4, 71.5)
    assert (two.round_trip_seconds, two.power_watts) == (None, 120)
    shown = charts.measured(run, "round_trip_seconds")
    assert shown is not None and (shown["data"][0]["y"], shown["data"][0]["name"]) == ([5.0], "rank 1, b")
    assert charts.measured(run, "speed_limit") is None, "nobody tells it, nothing is drawn"


def test_a_folder_that_goes_away_is_shown_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "run" / "logs" / "rank-000.jsonl", [step(n) for n in (1, 2)])
    run = read_all(RunHistory(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "gone")
    assert not run.read() and figures(run, 1003.0).step == 2 and history.runs_in(tmp_path / "run") == []


def test_the_first_look_at_a_long_log_has_its_ends_and_what_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "GLANCE_BYTES", 2**20)
    start = {"kind": "start", "time": 1000.0, "rank": 0, "host": "a", "steps": 20_000}
    write(tmp_path / "logs" / "rank-000.jsonl", [start, *(step(n) for n in range(1, 20_001))])
    run = RunHistory(tmp_path)
    assert run.read() and run.is_sampled
    glanced = run.curve((0, "a"), "loss")
    assert glanced.steps[0] <= 2 and figures(run, 30_000.0).step == 20_000 and figures(run, 30_000.0).steps == 20_000
    assert np.diff(glanced.steps).max() < 60 and (np.diff(glanced.steps) > 0).all()
    read_all(run)
    assert not run.is_sampled and run.series[0, "a"].count == 20_000
    assert run.curve((0, "a"), "loss").steps[-1] == 20_000


def test_of_two_copies_of_one_log_each_record_counts_once(tmp_path: Path) -> None:
    records = [
        {"kind": "start", "time": 999.0, "rank": 1, "host": "b"},
        *(step(n, rank=1, host="b") for n in range(1, 9)),
    ]
    write(tmp_path / "logs" / "rank-001.jsonl", records[:5])
    write(tmp_path / "logs" / "b" / "rank-001.jsonl", records)
    write(tmp_path / "logs" / "discarded" / "rank-001.jsonl", records)
    run = read_all(RunHistory(tmp_path))
    assert len(run.events) == 1 and run.series[1, "b"].count == 8 and list(run.series) == [(1, "b")]


def test_steps_that_a_lost_host_still_has_but_the_others_undid_are_not_shown(tmp_path: Path) -> None:
    start = {"kind": "start", "rank": 0, "host": "a", "time": 1020.5, "resumed_from_step": 10, "resumes": [[10]]}
    again = [step(n, time=1020.0 + n) for n in range(11, 16)]
    write(tmp_path / "logs" / "rank-000.jsonl", [*(step(n) for n in range(1, 11)), start, *again])
    write(tmp_path / "logs" / "b" / "rank-001.jsonl", [step(n, rank=1, host="b") for n in range(1, 21)])
    run = read_all(RunHistory(tmp_path))
    assert run.curve((1, "b"), "loss").steps.tolist() == list(range(1, 11))
    assert run.curve((0, "a"), "loss").steps.tolist() == list(range(1, 16))


def test_the_figures_follow_from_the_records(tmp_path: Path) -> None:
    ranks = [{"host": "a", "micro_batch_sizes": [3, 3]}, {"host": "b"}]
    plan = {
        "strategy": "synchronous",
        "reason": "measured",
        "shares": [6, 2],
        "global_batch_size": 8,
        "calibrated": True,
    }
    plan |= {
        "ranks": ranks,
        "predicted_step_seconds": 0.4,
        "predicted_pairs_per_second": 20.0,
        "solo_sum_pairs_per_second": 25.0,
    }
    plan["curves"] = [json.loads(BatchCurve.from_rates({1: 5, 4: 12}).model_dump_json()), None]
    config = {"model": {"path": "m"}, "data": {"train": "t"}, "cost": {"watts": 100, "price_per_kwh": 0.5}}
    start = {"kind": "start", "time": 1000.0, "host": "a", "steps": 100, "plan": plan, "config": config}
    start |= {"memory_limit_bytes": 1000}
    for rank, (host, share) in enumerate((("a", 6), ("b", 2))):
        steps = [step(n, rank, host, pairs=share) for n in range(1, 41)]
        write(tmp_path / "logs" / f"rank-{rank:03d}.jsonl", [{**start, "rank": rank, "host": host}, *steps])
    now = figures(read_all(RunHistory(tmp_path)), 1041.0)
    assert (now.state, now.step, now.steps, now.strategy) == ("running", 40, 100, "synchronous")
    assert now.pairs_per_second == pytest.approx(16.0) and now.efficiency == pytest.approx(16 / 25)
    assert now.left_seconds == pytest.approx(60.0) and now.busy == pytest.approx(0.8)
    assert now.cost is not None and now.cost["energy_kwh"] == pytest.approx(2 * 0.1 * 41 / 3600)
    first, second = now.ranks
    assert (first.pairs_per_second, first.planned_pairs_per_second) == (pytest.approx(12.0), pytest.approx(15.0))
    assert (second.peak_memory_bytes, second.memory_limit_bytes, second.host) == (140, 1000, "b")
    assert second.bytes_per_second == pytest.approx(1e7)
    silent = figures(read_all(RunHistory(tmp_path)), 5000.0)
    assert silent.state == "silent" and silent.left_seconds is None, "nobody knows when what is silent ends"
    assert [(who, taken) for who, taken, _ in figures_module.batch_curves(read_all(RunHistory(tmp_path)))] == [
        ((0, "a"), [3])
    ]
    (tmp_path / "logs" / "rank-001.jsonl").rename(tmp_path / "elsewhere")
    assert figures(read_all(RunHistory(tmp_path)), 1041.0).missing == [(1, "b")]
    (tmp_path / "elsewhere").rename(tmp_path / "logs" / "rank-001.jsonl")
    for rank, host in enumerate("ab"):
        tracker = PerformanceTracker(tmp_path / "logs" / f"rank-{rank:03d}.jsonl", rank, host)
        tracker.record("end", step=40)
        tracker.close()
    assert figures(read_all(RunHistory(tmp_path)), 5000.0).state == "finished"


def test_of_independent_ranks_each_step_is_one_of_all_in_its_time(tmp_path: Path) -> None:
    plan = {
        "strategy": "independent",
        "shares": [6, 2],
        "global_batch_size": 8,
        "ranks": [{"host": "a"}, {"host": "b"}],
    }
    start = {"kind": "start", "time": 1000.0, "steps": 100, "plan": plan}
    for rank, (host, share) in enumerate((("a", 6), ("b", 2))):
        steps = [step(n, rank, host, pairs=share, step_seconds=1.0) for n in range(1, 41)]
        write(tmp_path / "logs" / f"rank-{rank:03d}.jsonl", [{**start, "rank": rank, "host": host}, *steps])
    now = figures(read_all(RunHistory(tmp_path)), 1041.0)
    assert now.step == 40 and now.pairs_per_second == pytest.approx(8.0) and now.left_seconds == pytest.approx(60.0)


def test_the_time_between_a_stop_and_a_resume_is_none_of_the_runs(tmp_path: Path) -> None:
    start = {"kind": "start", "rank": 0, "host": "a", "config": {"cost": {"rent_per_hour": 1.0}}}
    start["plan"] = {"ranks": [{"host": "a"}, {"host": "b"}]}
    day = 86_400.0
    records = [{**start, "time": 1000.0}, *(step(n, time=1000.0 + n) for n in range(1, 5))]
    records += [{**start, "time": day}, *(step(n, time=day + n - 4) for n in range(5, 9))]
    write(tmp_path / "logs" / "rank-000.jsonl", records)
    now = figures(read_all(RunHistory(tmp_path)), day + 5.0)
    assert now.elapsed_seconds == pytest.approx(4.0 + 5.0) and now.restarts == 1
    assert now.cost is not None and now.cost["cost"] == pytest.approx(2 * 9.0 / 3600)


def test_a_run_without_a_record_has_figures_too(tmp_path: Path) -> None:
    assert figures(RunHistory(tmp_path), 5.0).state == "waiting"


def test_a_copy_follows_its_log_and_writes_nothing_where_the_disk_is_the_same(tmp_path: Path) -> None:
    there, here = tmp_path / "there" / "logs", tmp_path / "here" / "logs"
    here.mkdir(parents=True)
    log, tail, copy = there / "rank-001.jsonl", Tail(there / "rank-001.jsonl"), Copy(here, "host-b")
    same = Copy(there, "host-b")

    def follow() -> None:
        while True:
            before = tail.offset
            begins, lines = tail.read(1000)
            if not lines:
                return
            for one in (copy, same):
                one.write(1, 0 if begins else before, lines)

    write(log, [step(n) for n in range(1, 30)])
    follow()
    rewind(log, 5)
    write(log, [step(n, loss=7.0) for n in range(6, 40)])
    follow()
    assert (here / "host-b" / "rank-001.jsonl").read_bytes() == log.read_bytes()
    assert sorted(path.name for path in there.rglob("*") if path.is_file() and path.parent.name != "discarded") == [
        log.name
    ]
    Copy(here, "../../etc").write(1, 0, b"x\n")
    assert (here / "______etc" / "rank-001.jsonl").exists()


@pytest.mark.parametrize("length", [1000, 2500])
def test_a_log_is_cut_at_a_line_that_is_too_long_for_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Nobody reads beyond it, so what is written next would be lost."""
    monkeypatch.setattr(run_records, "LONGEST_LINE", 1000)
    log = tmp_path / "logs" / "rank-000.jsonl"
    write(log, [step(n) for n in range(1, 4)])
    whole = log.read_bytes()
    long = json.dumps(step(4)).encode()[:-1] + b', "x": "'
    behind = long + b"y" * (length - len(long) - 3) + b'"}\n' + json.dumps(step(4)).encode()
    log.write_bytes(whole + behind)
    assert rewind(log, 9) == 2
    assert log.read_bytes() == whole
    assert (log.parent / "discarded" / log.name).read_bytes() == behind + b"\n"
    write(log, [step(4)])
    assert [record["step"] for record in run_records.read_records(log)] == [1, 2, 3, 4]


def test_of_more_events_than_there_is_room_for_some_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the kind that takes most room, and at even distances."""
    monkeypatch.setattr(history, "EVENT_BYTES", 100_000)
    log = tmp_path / "logs" / "rank-000.jsonl"
    start = {"kind": "start", "time": 1000.0, "rank": 0, "host": "a", "step": 0}
    many = [
        {"kind": "new", "time": 1000.0 + n, "rank": 0, "host": "a", "step": n, "text": "x" * 99} for n in range(5000)
    ]
    write(log, [start, *many, {**start, "kind": "end", "time": 9000.0}])
    run = read_all(RunHistory(tmp_path))
    kinds = [event["kind"] for event in run.events]
    assert (kinds[0], kinds[-1]) == ("start", "end") and 200 < len(kinds) < 1000
    steps = [event["step"] for event in run.events[1:-1]]
    assert max(np.diff(steps[: len(steps) // 2])) < 50 and steps[-1] > 4900


def test_much_that_is_cut_of_a_log_is_moved_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of terabytes takes no room, and its copy all that there is."""
    monkeypatch.setattr(run_records, "MOVED_BYTES", 10_000)
    log = tmp_path / "logs" / "rank-000.jsonl"
    for number in (1, 2):
        write(log, [step(n) for n in range(1, 4)])
        whole = log.read_bytes()
        log.write_bytes(whole + bytes(20_000))
        assert rewind(log, 9) == 1
        assert log.read_bytes() == whole
        assert (log.parent / "discarded" / f"{log.name}.{number}").read_bytes() == whole + bytes(20_000)
        log.unlink()


def test_a_warning_is_told_once_whoever_says_it(tmp_path: Path) -> None:
    said = [{"kind": "warning", "time": 1000.5 + rank, "host": "a", "step": 3, "text": "hot"} for rank in range(2)]
    plan = {"plan": {"warnings": ["equal shares"]}, "kind": "start", "time": 1000.0, "host": "a", "steps": 9}
    for rank in range(2):
        records = [{**plan, "rank": rank}, step(1, rank), {**said[rank], "rank": rank}, {**said[rank], "rank": rank}]
        write(tmp_path / f"logs/rank-{rank:03d}.jsonl", records)
    now = figures(read_all(RunHistory(tmp_path)), 1010.0)
    assert [text for _, _, text in now.warnings] == ["equal shares", "hot"]
