"""The sections of a run's pages, which the dashboard and the report both show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.config import read_file
from lib.errors import UserError
from lib.report import charts, tables
from lib.report.charts import Panel
from lib.report.history import RunFigures, RunHistory

SHOWN_EVENTS, SHOWN_ROUNDS = 200, 30  # the newest
ROUND_PARTS = ("sampling", "waiting", "judging", "training")  # of a rank's time


class PageSection(NamedTuple):
    """A table under its title, with charts and paragraphs below it."""

    title: str
    head: Sequence[str] | None = None
    rows: Sequence[Sequence[str]] = ()
    panels: Sequence[Panel] = ()
    texts: Sequence[str] = ()


def of_runs(runs: Sequence[RunHistory], now: RunFigures) -> list[PageSection]:
    """Curves of learning of all these runs; all else is of the first, whose figures `now` are."""
    run, summary = runs[0], now.summary | summary_of(runs[0].folder)
    machine = (charts.seconds(now), charts.speed(run, now), charts.of_batches(run))
    missing = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
    elsewhere = [f"Not shown: {missing}. The records are on those hosts and come with the next checkpoint."]
    events = [event for event in tables.distinct_events(run) if event["kind"] not in ("checkpoint", "warning")]
    clocks = [time.strftime("%b %d %H:%M:%S", time.localtime(event["time"])) for event in events]
    happened = list(zip(clocks, map(tables.describe, events), strict=True))[: -SHOWN_EVENTS - 1 : -1]
    warnings = [(tables.describe(warning),) for warning in now.warnings[-SHOWN_EVENTS:]]
    each = [
        PageSection("Held out", ("", "before", "after"), tables.held_out(first_evaluation(run), now.held_out)),
        PageSection("Figures", None, tables.facts(summary, tables.unit_of(run))),
        PageSection("Learning", panels=charts.learning(runs)),
        *of_rounds(run),
        PageSection("Ranks and hosts", *tables.ranks(summary["ranks"]), texts=elsewhere if missing else ()),
        PageSection("Machines", panels=[panel for panel in machine if panel]),
        PageSection(f"Warnings ({len(now.warnings)})", None, warnings),
        PageSection("Samples before and after", texts=tables.samples(run)),
        PageSection("What happened when", None, happened, [charts.timeline(run)] if events else ()),
        PageSection("How it was made", None, tables.made_with(run)),
    ]
    return [section for section in each if section.rows or section.panels or section.texts]


def first_evaluation(run: RunHistory) -> Any:
    return (run.of_kind("evaluation") or [{}])[0]


def summary_of(folder: Path) -> dict[str, Any]:
    """summary.json; empty where there is none."""
    try:
        return read_file.read_object(folder / "summary.json", "the run's")
    except (OSError, UserError):
        return {}


def of_rounds(run: RunHistory) -> list[PageSection]:
    """The rounds of a run: figures and verdicts, each host's time, and examples; nothing where it has none."""
    newest = list(tables.rounds(run).values())[-SHOWN_ROUNDS:]
    if not newest:
        return []
    head = ("round", "mean score", "held out", "prompts with pairs", "tokens", "duplicates", "entropy", "verdict")
    rows = []
    for rank, host in run.series:
        records: list[dict[str, Any]] = [{**record} for record in tables.rounds(run, rank).values()]
        sums = [sum(record.get(f"{part}_seconds") or 0.0 for record in records) for part in ROUND_PARTS]
        rows.append([str(rank), host, *(f"{seconds:.1f} s" for seconds in sums)])
    pairs = newest[-1].get("examples") or []
    texts = ["\n".join((pair["prompt"], f"+ {pair['chosen']}", f"− {pair['rejected']}")) for pair in pairs]
    figures = [_of_round({**record}) for record in reversed(newest)]
    return [
        PageSection("Rounds", head, figures, charts.of_rounds(run)),
        PageSection("Seconds in rounds", ("rank", "host", *ROUND_PARTS), rows, texts=texts),
    ]


def _of_round(record: dict[str, Any]) -> list[str]:
    answers, undone = record["answers"], record.get("undone")
    held_out = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in record["held_out"].items() if value]
    verdict = [f"undone: {'; '.join(record.get('why') or [])}"] if undone else []
    forms = {"accepted": "{:.0%}", "tokens": "{:.3g}", "duplicates": "{:.0%}", "entropy": "{:.3g}"}
    cells = [str(record["round"]), tables.written("{:.3g}", answers.get("score")), ", ".join(held_out) or "–"]
    cells += [tables.written(form, answers.get(name)) for name, form in forms.items()]
    return [*cells, "; ".join([*verdict, *(record.get("warnings") or [])]) or "kept"]
