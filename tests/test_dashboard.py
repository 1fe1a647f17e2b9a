"""The dashboard in a real browser, beside a real training."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lib.report.figures import figures

from lib.report import app, charts, run_report
from lib.report import command as dashboard
from lib.report.history import RunHistory
from lib.system import mpi_and_blas
from lib.system.records import PerformanceTracker, read_records
from tests import chromium, tiny
from tests.cluster import Host
from tests.test_launch import wait_for
from tests.test_launch import words as words_of_launch
from tests.tiny import ROOT

needs_chromium = pytest.mark.skipif(chromium.unavailable() is not None, reason=str(chromium.unavailable()))
# What the page draws of a chart: every line's name, steps and values.
DRAWN = "Object.fromEntries(document.querySelector(arguments[0]).querySelector('.js-plotly-plot').data.map(t => [t.name, [t.x, t.y]]))"


@contextmanager
def served(*words: str | Path) -> Iterator[str]:
    """The dashboard as a user starts it, on a free port; its address."""
    command = [sys.executable, "-m", "lib.dashboard", *map(str, words), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield re.findall(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(10)


def drawn(page: chromium.Page, name: str) -> dict[str, Any]:
    """The lines of a chart, or nothing yet."""
    if not page.run(
        "document.querySelector(arguments[0])?.querySelector('.js-plotly-plot')?.data?.length", f"#graph-{name}"
    ):
        return {}
    return page.run(DRAWN, f"#graph-{name}")


@needs_chromium
@pytest.mark.long
def test_a_training_of_two_ranks_is_seen_live_and_as_it_was_logged(tmp_path: Path) -> None:
    words = tiny.settings(tmp_path, rows=300, **{"train.steps": 100_000, "data.skip_invalid": "true"})
    words += [
        "train.global_batch_size=64",
        "plan.shares=[48,16]",
        "run.name=live",
        "evaluate.every=40",
        "--config",
        str(tiny.config_file(tmp_path)),
    ]
    run = tmp_path / "runs" / "live"
    mpirun = [str(mpi_and_blas.mpirun_path()), "-n", "2", sys.executable, str(ROOT / "train.py"), *words]
    training = subprocess.Popen(mpirun, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: (run / "logs" / "rank-001.jsonl").exists())
        with served(run) as address, chromium.chromium() as page:
            page.open(address)
            wait_for(lambda: len(drawn(page, "speed")) == 2)
            # A step is on the page soon after its record, whichever rank's.
            for rank in (0, 1):
                newest = tiny.steps_of(run, rank)[-1]
                label = f"rank {rank}, {newest['host']}"
                wait_for(lambda at=label, step=newest["step"]: drawn(page, "speed")[at][0][-1] >= step)
            # Shares that the ranks' times contradict, once these are steady.
            wait_for(lambda: "plan.shares" in page.text("#warnings"))
            training.terminate()
            training.wait(20)
            # On a busy machine a rank outlives mpirun by some steps.
            wait_for(lambda: not trains(tmp_path))
            wait_for(lambda: page.text("#now-step").startswith(f"{tiny.steps_of(run)[-1]['step']:,} /"))
            check_figures(page, run)
            shown = "getComputedStyle(document.querySelector(arguments[0])).display !== 'none'"
            assert not page.run(shown, "#panel-batch_curves"), "nothing was calibrated"
            check_manners(page, address)
    finally:
        training.kill()
        training.wait()


def trains(folder: Path) -> bool:
    """Whether a process trains with what is in a folder."""
    commands = subprocess.run(["ps", "-A", "-ww", "-o", "command="], capture_output=True, text=True, check=True).stdout
    return any("train.py" in command and f"{folder}/" in command for command in commands.splitlines())


def check_figures(page: chromium.Page, run: Path) -> None:
    """Every figure and every drawn point is that of a record."""
    steps = tiny.steps_of(run)
    assert page.text("#now-loss") == f"{steps[-1]['loss']:.4f}"
    assert page.text("#now-accuracy") == f"{steps[-1]['reward_accuracy']:.1%}"
    for name, *_ in charts.LEARNING:
        wait_for(lambda name=name: drawn(page, name).get("training", [[0]])[0][-1] == steps[-1]["step"])
        x, y = drawn(page, name)["training"]
        assert x == [record["step"] for record in steps] and y == pytest.approx([r[name] for r in steps], rel=1e-12)
    evaluations = [r for r in read_records(run / "logs" / "rank-000.jsonl") if r["kind"] == "evaluation"]
    assert drawn(page, "loss")["held out"] == [[e["step"] for e in evaluations], [e["loss"] for e in evaluations]]
    for rank in (0, 1):
        label = f"rank {rank}, {tiny.steps_of(run, rank)[0]['host']}"
        # A rank that is killed may have a last record under way.
        wait_for(lambda at=label, of=rank: len(drawn(page, "speed")[at][1]) == len(tiny.steps_of(run, of)))
        own, (_, speeds) = tiny.steps_of(run, rank), drawn(page, "speed")[label]
        assert speeds == pytest.approx([record["pairs_per_second"] for record in own])
        bars = {name: values[0][rank] for name, values in drawn(page, "seconds").items()}
        for part in ("compute", "sync", "wait"):
            recent = [record[f"{part}_seconds"] for record in own[-20:]]
            assert bars[part] == pytest.approx(sum(recent) / len(recent))


def origin(address: str) -> str:
    """An address that the dashboard printed, without its token."""
    return address.partition("/?")[0]


def check_manners(page: chromium.Page, address: str) -> None:
    """Nothing wrong on the console, no request to another host, fits a telephone, works by keyboard and in the dark."""
    page.note()
    assert page.complaints == []
    requests = [url for url in page.requests if not url.startswith(("data:", "blob:", "chrome:"))]
    assert requests and all(url.startswith(origin(address)) for url in requests), requests
    assert page.run("document.querySelectorAll('.modebar').length") == 0, "no buttons, so none to any cloud"
    for width in (390, 1440):
        page.resize(width)
        wait_for(lambda width=width: page.run("window.innerWidth") == width)
        wait_for(lambda: page.run("document.documentElement.scrollWidth <= window.innerWidth"))
    unnamed = "[...document.querySelectorAll('button, a, input, summary, [tabindex=\"0\"], [role=img]')].filter(e => "
    unnamed += "!(e.innerText || e.ariaLabel || e.labels?.length || e.getAttribute('aria-labelledby'))).length"
    assert page.run(unnamed) == 0, "a screen reader has nothing to say"
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    page.theme("dark")
    assert page.run("getComputedStyle(document.body).backgroundColor") != ground
    page.run("document.querySelector('#theme-button').focus()")
    page.press("Enter")
    wait_for(lambda: page.run("document.documentElement.dataset.theme") == "dark")


def test_only_who_asks_for_this_machine_by_name_is_answered(tmp_path: Path) -> None:
    with served("--runs", tmp_path, "--host", "0.0.0.0") as address:
        port, token = re.findall(r":(\d+)/\?token=(\S+)", address)[0]

        def ask(host: str, path: str = "/", cookie: str = token) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
            connection.request("GET", path, headers={"Host": host, "Cookie": f"{app.COOKIE}-{port}={cookie}"})
            return connection.getresponse()

        for path in ("/", "/_dash-layout", "/?token=", "/?token=x", f"/?token={token}x"):
            refused = ask(f"127.0.0.1:{port}", path, cookie="x")
            assert refused.status == 401 and b"token" in refused.read(), path
        let_in = ask(f"127.0.0.1:{port}", f"/?token={token}", cookie="")
        assert let_in.status == 302 and let_in.headers["Location"] == "/", "no token stays in the browser's address"
        assert all(word in let_in.headers["Set-Cookie"] for word in (token, "HttpOnly", "SameSite=Strict"))
        good = ask(f"127.0.0.1:{port}")
        assert good.status == 200 and "default-src 'self'" in (good.headers["Content-Security-Policy"] or "")
        assert not re.search(rb"https?://(?!127\.0\.0\.1)", good.read())
        assert ask(f"{socket.gethostname()}:{port}").status == 200, "listening for all hosts, and none is answered"
        assert ask("evil.example").status == 400


# ---- Colours ---------------------------------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes (2009), severity 1.0, on linear RGB.
VISION = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b* of linear RGB."""
    matrix = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    clipped = [min(max(part, 0.0), 1.0) for part in rgb]
    whites = (0.9505, 1.0, 1.089)
    xyz = [sum(a * b for a, b in zip(row, clipped, strict=True)) / w for row, w in zip(matrix, whites, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


def test_colours_are_told_apart_by_everybody_on_light_and_dark() -> None:
    for colour in charts.COLOURS:
        for ground in (charts.LIGHT, charts.DARK):
            high, low = sorted((luminance(colour), luminance(ground)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 3, f"{colour} on {ground}"  # WCAG 2.2, 1.4.11
    for name, matrix in VISION.items():
        seen = [
            lab([sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in matrix])
            for colour in charts.COLOURS
        ]
        for i, one in enumerate(seen):
            for other in seen[:i]:
                difference = sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5
                assert difference > 20, (name, one, other)


# ---- Records of other hosts ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_records_of_every_host_come_to_the_launching_machine_as_they_are_written(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    """Over mpirun, whose ranks are no children of the agents, which read them; over the ring they are, and all else is equal."""
    launching, *others = three_hosts  # it trains nothing itself: all records come from elsewhere
    run = launching.disk / "runs" / "seen"
    words = tiny.settings(
        tmp_path, rows=45, run__name=run.name, run__dir=run.parent, train__steps=30, plan__replan="false"
    )
    command = words_of_launch(others, backend="mpi")
    launch = launching.start([*command, "train.py", "--config", str(tiny.config_file(tmp_path)), *words])
    here = RunHistory(launching.outside / "runs" / run.name)

    def seen(rank: int) -> int:
        while here.read():
            pass
        found = [one for who, one in here.series.items() if who == (rank, others[rank].name)]
        return int(found[0].recent[-1][0]) if found else 0

    def written(rank: int) -> int:
        log = others[rank].outside / "runs" / run.name / "logs" / f"rank-{rank:03d}.jsonl"
        return len(tiny.steps_of(log.parents[1], rank)) if log.exists() else 0

    for rank in (0, 1):
        step = wait_for(lambda rank=rank: written(rank))
        wait_for(lambda rank=rank, step=step: seen(rank) >= step, 5)
    launch.communicate(timeout=120)
    assert launch.returncode == 0
    for rank, host in enumerate(others):
        there = host.outside / "runs" / run.name / "logs" / f"rank-{rank:03d}.jsonl"
        copy = launching.outside / "runs" / run.name / "logs" / host.name / there.name
        assert copy.read_bytes() == there.read_bytes(), "to the last record"
    assert seen(0) == 30 and figures(here, time.time()).state == "finished"


# ---- Pages of a finished run -----------------------------------------------------------------------------------------


def test_a_run_leaves_one_page_that_needs_no_other_and_a_model_card(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    words = [*tiny.settings(tmp_path, run__pages="true"), "train.steps=6", "evaluate.every=3", "run.name=page"]
    words.append("cost.watts=100")
    tiny.train(tmp_path, words)
    run = tmp_path / "runs" / "page"
    page = (run / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|url\((?!#)|@import""", page), "nothing is fetched"
    assert page.count("<svg") == 6 and (run / "curves.png").stat().st_size > 10_000
    evaluations = [r for r in read_records(run / "logs" / "rank-000.jsonl") if r["kind"] == "evaluation"]
    best = min(evaluations[1:], key=lambda record: record["loss"])  # whose weights the folder holds
    for evaluation in (evaluations[0], best):
        assert f"<td>{evaluation['loss']:.4f}</td>" in page
    card = ModelCard.load(run / "README.md")
    assert card.data.library_name == "mlx" and card.data.base_model is None, "a local path is no name on the hub"
    assert f"| loss | {evaluations[0]['loss']:.4f} | {best['loss']:.4f} |" in card.text
    (run / "report.html").unlink()
    assert dashboard.main(["--export", str(run)]) == 0 and (run / "report.html").exists()


@pytest.mark.parametrize(
    "words", ["train.loss=sft data.valid=null train.steps=1", "strategy=independent train.steps=2"]
)
def test_whatever_a_run_has_no_figures_of_its_pages_are_drawn(tmp_path: Path, words: str) -> None:
    tiny.train(tmp_path, [*tiny.settings(tmp_path, run__pages="true"), *words.split(), "run.name=run"])
    run = tmp_path / "runs" / "run"
    assert (
        "<svg" in (run / "report.html").read_text() and (run / "curves.png").exists() and (run / "README.md").exists()
    )


def test_a_folders_name_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a\x1b]0;x\x07"
    tracker = PerformanceTracker(run / "logs" / "rank-000.jsonl", 0, "a")
    tracker.record("start")
    tracker.close()
    assert dashboard.main(["--export", str(run)]) == 0
    said = capsys.readouterr().out
    assert "a␛]0;x␇/report.html" in said and "\x1b" not in said


def test_what_a_model_says_is_text_on_the_page(tmp_path: Path) -> None:
    tracker = PerformanceTracker(tmp_path / "logs" / "rank-000.jsonl", 0, "a")
    tracker.record("start")
    tracker.record("samples", samples=[{"prompt": "<script>alert(1)</script>", "before": "</pre><img src=x>"}])
    tracker.close()
    run_report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script>" not in page and "<img" not in page and "&lt;script&gt;" in page
