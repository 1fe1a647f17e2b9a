"""What is printed: it fits a terminal, it is plain in a file, and what was warned of is recorded."""

import io
import json
import os
import pty
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest
from rich.cells import cell_len

from lib.report.console import ProgressLine, RunConsole
from lib.system import records, terminal
from lib.system.records import PerformanceTracker, read_records
from tests.tiny import config_file, settings, train
from tests.tiny import records as records_of

WARNED = {"train.learning_rate_batch_size": 16}
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|4[0-7]|48|9[0-7])[;m]")


def at_terminal(monkeypatch: pytest.MonkeyPatch, words: list[str], columns: int, **environment: str) -> str:
    """What train.py writes to a terminal of so many columns, codes and all; in this process."""
    import train as script

    for name in ("NO_COLOR", "FORCE_COLOR", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 2**16):
                written.append(piece)
        except OSError:  # Linux's way to say that the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        status = script.main(words)
        monkeypatch.undo()
    reader.join()
    os.close(ours)
    assert status == 0, b"".join(written)
    return b"".join(written).decode()


def test_a_run_fits_its_terminal(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # a path longer than a line is left whole
    words = [*settings(Path(), **WARNED), "--config", str(config_file(tmp_path)), "train.steps=6", "run.name=fits"]
    assert COLOURS.search(raw := at_terminal(monkeypatch, words, 80)) and "━" in raw
    lines = [line.rstrip(" ") for line in re.split(r"[\r\n]+", CODES.sub("", raw))]
    assert not [line for line in lines if cell_len(line) > 80 and not re.match("(try|serve|see) it ", line)]
    text = "\n".join(lines)
    assert re.search(r"step 6/6  ━+  loss 0\.\d{4}  acc .* pairs/s  in 0:\d\d", text), text[-3000:]
    assert "evaluating ..." in text and "held out 6/6  loss" in text and "…" not in text
    assert '{"name"' not in text, "JSON is for programs"
    assert shlex.split(text[text.index("try it ") :].splitlines()[0])[-2:] == ["--prompt", "..."]


def test_without_colours_and_where_nothing_can_be_drawn_over(monkeypatch, tmp_path) -> None:
    words = [*settings(tmp_path, **WARNED), "--config", str(config_file(tmp_path)), "--dry-run"]
    assert not COLOURS.search(at_terminal(monkeypatch, [*words, "train.global_batch_size=4"], 80, NO_COLOR="1"))
    dumb = at_terminal(monkeypatch, [*words[:-1], "train.steps=2", "run.name=dumb"], 80, TERM="dumb")
    assert not CODES.search(dumb) and "\r" not in dumb.replace("\r\n", "") and "\nstep     1/2  loss" in dumb


def test_a_file_gets_plain_lines_and_the_log_the_warnings(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = train(tmp_path, settings(tmp_path, **WARNED, train__steps=6, run__name="plain")).stdout
    lines = out.splitlines()
    assert "\x1b" not in out and "\r" not in out and not any(line != line.rstrip() for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/6", "6/6"]
    warning = "train.global_batch_size is 8, but train.learning_rate=0.001 was chosen for 16"
    (said,) = [line for line in lines if line.startswith("warning: ")]
    assert warning in said and len(said) > 120, "one line, whole, for grep"
    (record,) = records_of(tmp_path / "runs/plain", "warning")
    assert f"warning: {record['text']}" == said and record["step"] == 0 and record["rank"] == 0
    summary = json.loads(lines[-1])
    (rank,) = summary["ranks"]
    assert summary["computed_tflops"] >= summary["tflops"] > 0 and 0 < summary["matrix_rate_share"] < 1
    assert re.search(r"arithmetic +\S+ TFLOP/s \(\S+ with padding, \d+ % of the measured matrix rate", out)
    assert rank["pairs"] == summary["pairs"] > 40 and rank["peak_memory_bytes"] == summary["peak_memory_bytes"] > 0
    assert rank["compute_seconds"] + rank["sync_seconds"] + rank["wait_seconds"] <= rank["seconds"] * 1.01


@pytest.mark.parametrize("width", [80, 160])
def test_tables_and_lines_fit_and_lose_nothing(width: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TANDEM_COLUMNS", str(width))
    say = terminal.Terminal()
    say.table("", ["rank", "host", "a long name of figures"], [[str(i), f"host-{i}", f"{i:.9f}"] for i in range(4)], 2)
    say.line("a sentence of words and of /a/path/that/is/long, with 漢字 that are wide " * 3, lead="warning: ")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= width and all(line == line.rstrip() for line in lines)
    assert lines[1].split() == ["0", "host-0", "0.000000000"] and "漢字" in "".join(lines)


@pytest.mark.parametrize("total", [9, 12_500, 10_000_000])
def test_the_progress_line_keeps_what_matters(total: int) -> None:
    meter = ProgressLine({"kind": "start", "steps": total}, 3)
    meter.began -= 9999.0  # that an evaluation before the first step took
    for step, loss in enumerate((9.0, 0.3, 0.2, 0.1), 1):
        meter.add({**RECORD, "step": step, "loss": loss})
    for width in (40, 60, 80, 160):
        line = meter.shown(width, "━━").plain
        assert cell_len(line) <= width and f"/{total:,}" in line and "loss 0.2000" in line, line
    assert "kl" in line and "1.00 GB" in line and "━" * 10 in line, "there is room for all of it"
    assert "pairs/s" in meter.shown(60, "").plain and " left" in meter.shown(60, "").plain
    assert total > 9 or re.search(r" 0:0\d left", meter.shown(160, "").plain)
    meter.busy_with = "evaluating"
    assert "evaluating ..." in meter.shown(80, "━━").plain
    plan = {"strategy": "independent", "global_batch_size": 32, "shares": [24, 8]}
    (meter := ProgressLine({"steps": 48, "rows": 33, "plan": plan}, 3)).add({**RECORD, "step": 1, "pairs": 594})
    assert meter.step == 48  # two an epoch


RECORD = {"kind": "step", "reward_accuracy": 1.0, "reward_margin": -0.123, "kl": 0.1, "pairs": 64, "step_seconds": 1.0}
RECORD |= {"pairs_per_second": 64.0, "tokens_per_second": 900.0, "peak_memory_bytes": 10**9, "learning_rate": 1e-4}


def test_signs_that_an_output_cannot_write_end_nothing(monkeypatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    terminal.Terminal().line("➜ 漢")
    sys.stdout.flush()
    assert written.getvalue() == b"? ?\n"


def test_a_record_is_json_whatever_the_figures(capsys) -> None:
    """JSON has no NaN, and programs other than Python's refuse it."""
    values = {"loss": float("nan"), "ranks": [{"kl": float("-inf"), "pairs": 3}], "none": None}
    terminal.Terminal().record(values)
    told = capsys.readouterr().out
    wanted = {"loss": None, "ranks": [{"kl": None, "pairs": 3}], "none": None}
    assert json.loads(told) == json.loads(records.dumps(values, indent=2)) == wanted


NOT_FINITE = "step 3: not finite ([metal::malloc] Attempting to allocate 9 bytes)"


@pytest.mark.parametrize("each_rank", [True, False])
def test_independent_ranks_tell_what_they_alone_know(each_rank: bool, tmp_path, capsys) -> None:
    tracker = PerformanceTracker(tmp_path / "rank-001.jsonl", rank=1)
    console = RunConsole(1)
    console.record_in(tracker, 0, each_rank)
    console.own_warning("step 3: not finite", 3, " ([metal::malloc] Attempting to allocate 9 bytes)")
    console.warning("a plan that all ranks know", 3)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(r"warning: rank 1 on \S+: step 3: not finite\n", shown.err) if each_rank else not shown.err
    tracker.record("end")  # opens the log of a rank that had nothing to tell
    told = [record.get("text") for record in read_records(tmp_path / "rank-001.jsonl")]
    assert told == [*([NOT_FINITE, "a plan that all ranks know"] if each_rank else []), None]
