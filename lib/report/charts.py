"""The charts of the dashboard and the report: Plotly figures made from runs' records.

People with any colour vision can distinguish the colours, whose contrast is 3 : 1 or more on the light and on the
dark ground; lines of one chart differ in dashes as well. Text and grid take the page's colours by its style sheet.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lib.report import history
from lib.report.history import STEP_COLUMNS, RankHost, RunFigures, RunHistory
from lib.system.records import Record

Plotly = dict[str, Any]  # a figure, or a part of one, as Plotly takes it


class Panel(NamedTuple):
    """A chart under its title, with its newest value beside it."""

    title: str
    figure: Plotly
    value: str


COLOURS = ("#2490fc", "#d55e00", "#7a8a5c", "#9024fc", "#c0609c")
DASHES = ("solid", "dash", "dot", "dashdot")


def learning(runs: Sequence[RunHistory]) -> list[Panel]:
    """Quantities of training over the steps, a panel each; held-out values as points. Independent ranks have a line
    each. Of several runs the smooth lines alone; the table of runs is their key."""
    panels = []
    for name, quantity in history.FIGURES.items():
        traces = [trace for number, run in enumerate(runs) for trace in _learning(run, name, number, len(runs) > 1)]
        axis: Plotly = {"tickformat": ".1%"} if "%" in quantity.form else {"exponentformat": "e"}
        lines = [trace for trace in traces if trace["name"] != "held out"] or traces[:1]
        if lines:
            newest = [value for value in lines[-1]["y"] if value is not None]
            value = quantity.text(newest[-1]) if newest else ""
            panels.append(Panel(_title(quantity.label), figure(traces, "step", quantity.unit, **axis), value))
    return panels


def _title(label: str) -> str:
    return label[0].upper() + label[1:]


def _learning(run: RunHistory, name: str, number: int, is_compared: bool) -> list[Plotly]:
    """The lines of a run: of rank 0, wherever it was, or of all ranks if they are independent."""
    ranks, traces = list(run.series), []
    if run.plan.get("strategy") != "independent":
        ranks = [who for who in ranks if who[0] == ranks[0][0]]
    ranks = ranks if name in STEP_COLUMNS else []  # exact match is known of evaluations alone
    for index, who in enumerate(ranks):
        look = style(number if is_compared else index)
        steps, values = run.curve(who, name)
        if np.isnan(values).all():
            continue
        if len(steps) >= 20 and name != "learning_rate":
            # The mean of the last twentieth of all values at each of them; NaN counts nowhere.
            finite, window = np.isfinite(values), np.ones(max(1, len(values) // 20))
            sums, counts = (np.convolve(x, window)[: len(values)] for x in (np.where(finite, values, 0.0), finite))
            values = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
        label = run.name if is_compared else label_of(who) if len(ranks) > 1 else "training"
        traces.append(line(steps, values, label, look))
    events: list[Any] = [event for event in run.of_kind("evaluation") if isinstance(event.get(name), int | float)]
    if events:
        colour = style(number if is_compared else 3 if len(ranks) > 1 else 1)["color"]
        marker = {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 2}}
        steps_of, held_out = [event.get("step") for event in events], [event[name] for event in events]
        look = {"mode": "markers" if ranks else "lines+markers", "marker": marker}
        traces.append(line(steps_of, held_out, "held out", {"color": colour}, **look))
    return traces


def speed(run: RunHistory, now: RunFigures) -> Panel:
    """Pairs, or rows or groups, a second of every rank over the steps; the plan's as dotted lines."""
    traces, unit = [], f"{history.unit_of(run.config['train'].get('loss'))}/s"
    planned = {(rank["rank"], rank["host"]): rank["planned_pairs_per_second"] for rank in now.summary["ranks"]}
    for index, who in enumerate(run.series):
        (steps, values), look = run.curve(who, "pairs", over="step_seconds"), style(index)
        traces.append(line(steps, values, label_of(who), look))
        if (goal := planned.get(who)) is not None and len(steps):
            dotted = {**look, "dash": "dot", "width": 1}
            traces.append(line([steps[0], steps[-1]], [goal, goal], f"{label_of(who)}, plan", dotted))
    value = f"{now.summary['pairs_per_second']:.3g} {unit} together"
    return Panel("Speed by rank", figure(traces, "step", unit, rangemode="tozero"), value)


def round_panels(run: RunHistory) -> list[Panel]:
    """What is measured of rounds, a point a round, with a cross on rounds that were undone."""
    records, panels = history.rounds(run), list[Panel]()
    before = [event for event in run.of_kind("evaluation") if event.get("step") == 0][:1]  # of the first round
    held_out = [(0, event) for event in before] + [(number, record["held_out"]) for number, record in records.items()]
    answers = [(number, record["answers"]) for number, record in records.items()]
    charted = [(name, of, held_out) for name, of in history.HELD_OUT.items()]
    charted += [(name, of, answers) for name, of in history.OF_ROUNDS.items()]
    for name, quantity, points in charted if records else ():
        if measured := [(number, of[name]) for number, of in points if of.get(name) is not None]:
            numbers, values = zip(*measured, strict=True)
            symbols = ["x" if records.get(number, {}).get("undone") else "circle" for number in numbers]
            look: Plotly = {"mode": "lines+markers", "marker": {"symbol": symbols, "size": 8}}
            trace = line(numbers, values, quantity.label, style(0), **look)
            drawn = figure([trace], "round", quantity.unit, rangemode="tozero")
            drawn["layout"]["xaxis"] |= {"tickformat": "d", "nticks": 8}
            panels.append(Panel(_title(quantity.label), drawn, quantity.text(values[-1])))
    return panels


def label_of(who: RankHost) -> str:
    """A rank by name; several may be on one host."""
    return f"rank {who[0]}, {who[1]}"


def style(index: int) -> Plotly:
    """The line of a rank, a host or a run: a colour, and a dash where there are more of them than colours."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 1.6}


def line(x: Any, y: Any, name: str, look: Plotly, **more: Any) -> Plotly:
    """A trace. Plotly would take a host named <b> for a bold one, and JSON has no NaN."""
    x, y = (list(values.tolist() if isinstance(values, np.ndarray) else values) for values in (x, y))
    y = [None if isinstance(value, float) and not math.isfinite(value) else value for value in y]
    name = html.escape(name[:40], quote=False)
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": look, **more}


def figure(traces: list[Plotly], x_title: str, y_title: str | None = None, **y_axis: Any) -> Plotly:
    """A figure of some traces."""
    # Unseen ticks keep the first number of this axis away from that of the other.
    axis = {"automargin": True, "zeroline": False}
    x_axis = {**axis, "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
    layout: Plotly = {
        "uirevision": "constant",  # a zoom stays while data come in
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "font": {"size": 12, "family": "system-ui, sans-serif"},
        "xaxis": {**x_axis, "title": {"text": x_title, "standoff": 6}},
        "yaxis": {**axis, "title": {"text": y_title or ""}, **y_axis},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "showlegend": 1 < len(traces) <= 9,  # more leave no room
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}


# ---- The sections of a run's pages, which the dashboard and the report both show

SHOWN_EVENTS, SHOWN_ROUNDS = 200, 30  # the newest
LEARNING = "Learning"  # the section of learning's panels


class PageSection(NamedTuple):
    """A table under its title, with charts and paragraphs below it."""

    title: str
    head: Sequence[str] | None = None
    rows: Sequence[Sequence[str]] = ()
    panels: Sequence[Panel] = ()
    texts: Sequence[str] = ()


def sections_of(runs: Sequence[RunHistory], now: RunFigures) -> list[PageSection]:
    """Curves of learning of all these runs; all else is of the first, whose figures `now` are."""
    run, summary = runs[0], now.summary | runs[0].stored_summary
    train, start = run.config["train"], run.start
    settings = {"data": run.config["data"].get("train"), "loss": train.get("loss")}
    settings |= {"learning rate": train.get("learning_rate"), "seed": train.get("seed")}
    settings |= {"commit": start.get("commit"), "platform": start.get("platform"), **(start.get("versions") or {})}
    missing = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
    elsewhere = [f"Not shown: {missing}. The records are on those hosts and come with the next checkpoint."]
    before, warnings = (run.of_kind("evaluation") or [Record()])[0], now.warnings[-SHOWN_EVENTS:]
    each = [
        PageSection("Held out", ("", "before", "after"), history.held_out(before, now.held_out)),
        PageSection("Figures", None, history.facts(summary, history.unit_of(train.get("loss")))),
        PageSection(LEARNING, panels=learning(runs)),
        *round_sections(run),
        PageSection("Ranks and hosts", *history.ranks(summary["ranks"]), texts=elsewhere if missing else ()),
        PageSection("Machines", panels=[speed(run, now)]),
        PageSection(f"Warnings ({len(now.warnings)})", None, [(history.describe(each),) for each in warnings]),
        PageSection("Samples before and after", texts=samples(run)),
        PageSection("What happened when", None, happened(run)),
        PageSection("How it was made", None, [(name, str(of)) for name, of in settings.items() if of is not None]),
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
        (time.strftime("%b %d %H:%M:%S", time.localtime(event["time"])), history.describe(event))
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


def round_sections(run: RunHistory) -> list[PageSection]:
    """The rounds of a run: figures and verdicts; nothing where it has none."""
    rows, figures = list[list[str]](), history.OF_ROUNDS
    for record in list(history.rounds(run).values())[: -SHOWN_ROUNDS - 1 : -1]:
        held_out = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in record["held_out"].items() if value]
        verdict = [f"undone: {'; '.join(record.get('why') or [])}"] if record.get("undone") else []
        cells = [figure.text(record["answers"].get(name)) for name, figure in figures.items()]
        remarks = "; ".join([*verdict, *(record.get("warnings") or [])]) or "kept"
        rows.append([str(record["round"]), ", ".join(held_out) or "-", *cells, remarks])
    head = ("round", "held out", *(figure.label for figure in figures.values()), "verdict")
    return [PageSection("Rounds", head, rows, round_panels(run))] if rows else []
