"""The sections of a run's pages, which the dashboard and the report both show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from lib.report import charts, tables
from lib.report.charts import Panel
from lib.report.history import RunFigures, RunHistory
from lib.system.records import Record

SHOWN_EVENTS, SHOWN_ROUNDS = 200, 30  # the newest


class PageSection(NamedTuple):
    """A table under its title, with charts and paragraphs below it."""

    title: str
    head: Sequence[str] | None = None
    rows: Sequence[Sequence[str]] = ()
    panels: Sequence[Panel] = ()
    texts: Sequence[str] = ()


def of_runs(runs: Sequence[RunHistory], now: RunFigures) -> list[PageSection]:
    """Curves of learning of all these runs; all else is of the first, whose figures `now` are."""
    run, summary = runs[0], now.summary | runs[0].stored_summary
    train, start = run.config.get("train") or {}, run.start
    made_with = {"data": (run.config.get("data") or {}).get("train"), "loss": train.get("loss")}
    made_with |= {"learning rate": train.get("learning_rate"), "seed": train.get("seed")}
    made_with |= {name: start.get(name) for name in ("commit", "platform")} | (start.get("versions") or {})
    missing = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
    elsewhere = [f"Not shown: {missing}. The records are on those hosts and come with the next checkpoint."]
    before = (run.of_kind("evaluation") or [Record()])[0]
    each = [
        PageSection("Held out", ("", "before", "after"), tables.held_out(before, now.held_out)),
        PageSection("Figures", None, tables.facts(summary, tables.unit_of(train.get("loss")))),
        PageSection("Learning", panels=charts.learning(runs)),
        *of_rounds(run),
        PageSection("Ranks and hosts", *tables.ranks(summary["ranks"]), texts=elsewhere if missing else ()),
        PageSection("Machines", panels=[charts.speed(run, now)]),
        PageSection(
            f"Warnings ({len(now.warnings)})", None, [(tables.describe(each),) for each in now.warnings[-SHOWN_EVENTS:]]
        ),
        PageSection("Samples before and after", texts=samples(run)),
        PageSection("What happened when", None, happened(run)),
        PageSection("How it was made", None, [(name, str(of)) for name, of in made_with.items() if of is not None]),
    ]
    return [section for section in each if section.rows or section.panels or section.texts]


def happened(run: RunHistory) -> list[tuple[str, str]]:
    """When each event was, and what, the newest first. Of what all ranks record together, rank 0's record is taken."""
    events = [
        event
        for event in run.events
        if event["kind"] not in ("checkpoint", "warning", "samples") and event.get("rank", 0) == 0
    ]
    return [
        (time.strftime("%b %d %H:%M:%S", time.localtime(event["time"])), tables.describe(event))
        for event in events[: -SHOWN_EVENTS - 1 : -1]
    ]


def samples(run: RunHistory) -> list[str]:
    """Prompts with the answers before and after, as rank 0 recorded them."""
    texts: dict[str, list[str]] = {}
    for event in run.of_kind("samples"):
        for sample in event.get("samples") or []:
            answers = [f"{when}: {sample.get(when)}" for when in ("before", "after") if when in sample]
            texts.setdefault(sample["prompt"], []).extend(answers)
    return ["\n".join([prompt, *dict.fromkeys(answers)]) for prompt, answers in texts.items()]


def of_rounds(run: RunHistory) -> list[PageSection]:
    """The rounds of a run: figures and verdicts; nothing where it has none."""
    newest = list(tables.rounds(run).values())[: -SHOWN_ROUNDS - 1 : -1]
    if not newest:
        return []
    figures = tables.OF_ROUNDS
    rows = []
    for record in newest:
        held_out = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in record["held_out"].items() if value]
        verdict = [f"undone: {'; '.join(record.get('why') or [])}"] if record.get("undone") else []
        cells = [figure.text(record["answers"].get(name)) for name, figure in figures.items()]
        remarks = "; ".join([*verdict, *(record.get("warnings") or [])]) or "kept"
        rows.append([str(record["round"]), ", ".join(held_out) or "-", *cells, remarks])
    head = ("round", "held out", *(figure.label for figure in figures.values()), "verdict")
    return [PageSection("Rounds", head, rows, charts.of_rounds(run))]
