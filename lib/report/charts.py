"""The charts of the dashboard and the report: Plotly figures made from runs' records.

People with any colour vision can distinguish the colours, whose contrast is 3 : 1 or more on the light and on the
dark ground; lines of one chart differ in dashes as well. Text and grid take the page's colours by its style sheet.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from lib.plan.calibration import BatchCurve
from lib.report import tables
from lib.report.history import STEP_COLUMNS, RankHost, RunFigures, RunHistory, batch_curves

Plotly = dict[str, Any]  # a figure, or a part of one, as Plotly takes it


class Panel(NamedTuple):
    """A chart under its title, with its newest value beside it."""

    title: str
    figure: Plotly
    value: str


COLOURS = ("#2490fc", "#d55e00", "#7a8a5c", "#9024fc", "#c0609c")
DASHES = ("solid", "dash", "dot", "dashdot")
# Title, form of a value, unit of the axis.
LEARNING = {
    "loss": ("Loss", "{:.4f}", None),
    "exact_match": ("Exact match", "{:.1%}", None),
    "reward_accuracy": ("Reward accuracy", "{:.1%}", None),
    "reward_margin": ("Reward margin", "{:.3f}", "nats"),
    "kl": ("KL to the reference", "{:.3f}", "nats"),
    "learning_rate": ("Learning rate", "{:.3g}", None),
    "grad_norm": ("Gradient norm", "{:.3g}", None),
}
OF_ROUNDS = {
    "held_out": ("Held out after each round", None),
    "score": ("Mean score of the answers", None),
    "tokens": ("Length of the answers", "tokens"),
    "entropy": ("Entropy of the policy", "nats a token"),
    "kl": ("KL to the reference", "nats a token"),
}
PARTS = ("compute", "sync", "wait")
LANES = {"start": "triangle-right", "plan": "diamond", "merge": "star", "round": "hexagon", "evaluation": "circle"}
LANES |= {"checkpoint": "square", "warning": "x", "end": "triangle-left"}
LANE_POINTS = 500  # of more events of a kind the newest


def learning(runs: Sequence[RunHistory]) -> list[Panel]:
    """Quantities of training over the steps, a panel each; held-out values as points.

    Independent ranks have a line each. Of several runs the smooth lines alone; the table of runs is their key.
    """
    panels = []
    for name, (title, form, unit) in LEARNING.items():
        traces = [trace for number, run in enumerate(runs) for trace in _learning(run, name, number, len(runs) > 1)]
        axis: Plotly = {"tickformat": ".1%"} if "%" in form else {"exponentformat": "e"}
        lines = [trace for trace in traces if trace["name"] != "held out"] or traces[:1]
        if lines:
            newest = [value for value in lines[-1]["y"] if value is not None]
            value = form.format(newest[-1]) if newest else ""
            panels.append(Panel(title, figure(traces, "step", unit, **axis), value))
    return panels


def _learning(run: RunHistory, name: str, number: int, is_compared: bool) -> list[Plotly]:
    """The lines of a run: of rank 0, wherever it was, or of all ranks if they are independent."""
    ranks, traces = list(run.series), []
    if (run.start.get("plan") or {}).get("strategy") != "independent":
        ranks = [who for who in ranks if who[0] == ranks[0][0]]
    ranks = ranks if name in STEP_COLUMNS else []  # exact match is known of evaluations alone
    for index, who in enumerate(ranks):
        look = style(number if is_compared else index)
        steps, values = run.curve(who, name)
        if np.isnan(values).all():
            continue
        if len(steps) >= 20 and name != "learning_rate":
            if not is_compared:
                raw = {**look, "width": 1}
                traces.append(line(steps, values, "raw", raw, opacity=0.35, showlegend=False, hoverinfo="skip"))
            values = running_mean(values)
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
    """Pairs a second of every rank over the steps; the plan's as dotted lines."""
    traces = []
    planned = {(rank["rank"], rank["host"]): rank["planned_pairs_per_second"] for rank in now.summary["ranks"]}
    for index, who in enumerate(run.series):
        (steps, values), look = run.curve(who, "pairs", over="step_seconds"), style(index)
        traces.append(line(steps, values, label_of(who), look))
        if (goal := planned.get(who)) is not None and len(steps):
            dotted = {**look, "dash": "dot", "width": 1}
            traces.append(line([steps[0], steps[-1]], [goal, goal], f"{label_of(who)}, plan", dotted))
    value = f"{now.summary['pairs_per_second']:.3g} pairs/s together"
    return Panel("Speed by rank", figure(traces, "step", "pairs/s", rangemode="tozero"), value)


def seconds(now: RunFigures) -> Panel:
    """Where each rank's step goes, means of its last steps, as stacked bars: one colour and one pattern a part."""
    ranks = now.summary["ranks"]
    names = [html.escape(label_of((rank["rank"], rank["host"])), quote=False) for rank in ranks]
    traces, totals = [], []
    for part, colour, shape in zip(PARTS, COLOURS, ("", "/", "."), strict=False):
        marker = {"color": colour, "pattern": {"shape": shape, "solidity": 0.35}}
        values = [rank[f"{part}_seconds"] for rank in ranks]
        totals.append(sum(values))
        traces.append({"type": "bar", "orientation": "h", "name": part, "x": values, "y": names, "marker": marker})
    drawn = figure(traces, "seconds a step", autorange="reversed", type="category")
    drawn["layout"] |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    value = f"{totals[0] / sum(totals):.0%} compute" if sum(totals) else ""
    return Panel("Where a step's time goes", drawn, value)


def of_batches(run: RunHistory) -> Panel | None:
    """Pairs a second by the size of a micro-batch, as every host was measured, and where on it the plan is."""
    curves = [(label_of(who), curve, sizes) for who, sizes, curve in batch_curves(run)]
    return Panel("Batch curves", curves_figure(curves), "") if curves else None


def curves_figure(curves: Sequence[tuple[str, BatchCurve, Sequence[int]]]) -> Plotly:
    """Curves by name, with the planned micro-batches; a published curve, without a model's key, is dashed."""
    traces = []
    for index, (label, curve, sizes) in enumerate(curves):
        look = style(index)
        rates = [point.pairs_per_second for point in curve.points]
        shown = {**look, "dash": "solid" if curve.key else "dash"}
        marked = {"mode": "lines+markers", "marker": {"symbol": "circle-open", "size": 7}}
        traces.append(line([point.batch_size for point in curve.points], rates, label, shown, **marked))
        if sizes:
            speeds = np.array(sizes) / curve.seconds(np.array(sizes))
            points = {"mode": "markers", "marker": {"symbol": "diamond", "size": 10}}
            traces.append(line(sizes, speeds, f"{label}, planned", look, **points))
    drawn = figure(traces, "pairs a micro-batch", "pairs/s", rangemode="tozero")
    drawn["layout"] |= {"showlegend": True, "hovermode": "closest"}
    drawn["layout"]["xaxis"] |= {"type": "log", "dtick": math.log10(2), "tickformat": "~r"}
    return drawn


def of_rounds(run: RunHistory) -> list[Panel]:
    """What is measured of rounds, a point a round, with a cross on rounds that were undone."""
    records, panels = tables.rounds(run), []
    for name, (title, unit) in OF_ROUNDS.items() if records else ():
        lines = {title: [(number, one["answers"].get(name)) for number, one in records.items()]}
        if name == "held_out":  # round 0 is the policy before the first
            before = [event for event in run.of_kind("evaluation") if event.get("step") == 0]
            lines = {
                label: [
                    *((0, event.get(column)) for event in before[:1]),
                    *((number, one["held_out"].get(column)) for number, one in records.items()),
                ]
                for column, label in (("exact_match", "exact match"), ("held_out_score", "judge's score"))
            }
        traces = []
        for index, (label, points) in enumerate(lines.items()):
            known = [(number, value) for number, value in points if value is not None]
            symbols = ["x" if records.get(number, {}).get("undone") else "circle" for number, _ in known]
            look: Plotly = {"mode": "lines+markers", "marker": {"symbol": symbols, "size": 8}}
            if known:
                numbers, values = zip(*known, strict=True)
                traces.append(line(numbers, values, label, style(index), **look))
        if traces:
            drawn = figure(traces, "round", unit, rangemode="tozero")
            drawn["layout"]["xaxis"] |= {"tickformat": "d", "nticks": 8}
            panels.append(Panel(title, drawn, ", ".join(f"{trace['y'][-1]:.3g}" for trace in traces)))
    return panels


def timeline(run: RunHistory) -> Panel:
    """When each event happened, a lane a kind."""
    traces = []
    for index, (kind, symbol) in enumerate(LANES.items()):
        events = [event for event in tables.distinct_events(run) if event["kind"] == kind][-LANE_POINTS:]
        colour = COLOURS[1] if kind == "warning" else COLOURS[index % 2 * 2]
        # What a run says is text in the box beside the pointer, too.
        texts = ["<br>".join(textwrap.wrap(html.escape(tables.describe(event)[:600]), 70)) for event in events]
        look: Plotly = {"mode": "markers", "marker": {"symbol": symbol, "size": 9, "color": colour}, "text": texts}
        look["hovertemplate"] = "%{x|%H:%M:%S} %{text}<extra></extra>"
        if events:
            traces.append(line([_clock(event["time"]) for event in events], [kind] * len(events), kind, {}, **look))
    lanes = [trace["name"] for trace in traces][::-1]
    drawn = figure(traces, None, type="category", categoryarray=lanes, categoryorder="array")
    drawn["layout"] |= {"showlegend": False, "hovermode": "closest"}
    return Panel("What happened when", drawn, "")


def label_of(who: RankHost) -> str:
    """A rank by name; several may be on one host."""
    return f"rank {who[0]}, {who[1]}"


def style(index: int) -> Plotly:
    """The line of a rank, a host or a run: a colour, and a dash where there are more of them than colours."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 1.6}


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the last twentieth of all values at each of them; NaN counts nowhere."""
    window, known = max(1, len(values) // 20), np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    number = counts[ends] - counts[begins]
    return np.divide(sums[ends] - sums[begins], number, out=np.full(len(values), np.nan), where=number > 0)


def line(x: Any, y: Any, name: str, look: Plotly, **more: Any) -> Plotly:
    """A trace. Plotly would take a host named <b> for a bold one, and JSON has no NaN."""
    x, y = (list(values.tolist() if isinstance(values, np.ndarray) else values) for values in (x, y))
    y = [None if isinstance(value, float) and not math.isfinite(value) else value for value in y]
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": html.escape(name[:40], quote=False),
            "line": look, **more}  # fmt: skip


def _clock(time: float) -> str:
    """Local time as Plotly reads it."""
    return datetime.fromtimestamp(time).isoformat()


def figure(traces: list[Plotly], x_title: str | None, y_title: str | None = None, **y_axis: Any) -> Plotly:
    """A figure; without a title the x axis is the time of day."""
    x_axis = {"title": {"text": x_title, "standoff": 6}} if x_title else {"tickangle": 0, "nticks": 5}
    # Unseen ticks keep the first number of this axis away from that of the other.
    ticks = {"ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
    layout: Plotly = {
        "uirevision": "constant",  # a zoom stays while data come in
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "font": {"size": 12, "family": "system-ui, sans-serif"},
        "xaxis": {"automargin": True, "zeroline": False, **ticks, **x_axis},
        "yaxis": {"automargin": True, "zeroline": False, **({"title": {"text": y_title}} if y_title else {}), **y_axis},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "showlegend": 1 < sum(trace.get("showlegend", True) for trace in traces) <= 9,  # more leave no room
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}
