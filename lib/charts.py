"""What the dashboard draws: plain Plotly figures made from runs' records, without any state of their own.

Colours are told apart by people with any colour vision, and have a contrast of 3 : 1 or more on the light and on the
dark ground; lines of one chart differ in dashes as well. Text and grid take the page's colours by its style sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lib.history import INDEX, Curve, Figures, Run, Who

Figure = dict[str, Any]

COLOURS = ("#2490fc", "#d55e00", "#7a8a5c", "#9024fc", "#c0609c")
DASHES = ("solid", "dash", "dot", "dashdot")
LIGHT, DARK = "#ffffff", "#14181f"

# The learning panels: column, title, and how a value is written.
LEARNING = (
    ("loss", "Loss", "{:.4f}"),
    ("reward_accuracy", "Reward accuracy", "{:.1%}"),
    ("reward_margin", "Reward margin", "{:.3f}"),
    ("kl", "KL to the reference", "{:.3f}"),
    ("learning_rate", "Learning rate", "{:.3g}"),
    ("grad_norm", "Gradient norm", "{:.3g}"),
)
PARTS = (("compute_seconds", "compute"), ("sync_seconds", "sync"), ("wait_seconds", "wait"))
LANES = ("start", "plan", "merge", "evaluation", "checkpoint", "warning", "end")


def learning(runs: Sequence[Run], name: str) -> Figure:
    """One quantity of training over the steps; held-out values as points. Ranks that train apart have a line each."""
    traces: list[dict[str, Any]] = []
    several = len(runs) > 1
    for number, run in enumerate(runs):
        for index, who in enumerate(learners(run)):
            colour = COLOURS[(number if several else index) % len(COLOURS)]
            style = {"color": colour, "width": 1.6}
            style["dash"] = DASHES[(index if several else index // len(COLOURS)) % len(DASHES)]
            label = run.name if several else _label(who) if len(learners(run)) > 1 else "training"
            curve = run.curve(who, name)
            if np.isnan(curve.values).all():
                continue
            if curve.width > 1 and not several:
                traces += _band(curve, colour)
            raw = _line(curve.steps, curve.values, label, {**style, "width": 1}, opacity=0.45)
            smooth = _line(
                curve.steps,
                running_mean(curve.values),
                "running mean" if label == "training" else f"{label}, running mean",
                style,
            )
            if name == "learning_rate" or len(curve.steps) < 20:
                traces.append(_line(curve.steps, curve.values, label, style))
            else:
                traces += [smooth] if several else [raw, smooth]
        points = [(e["step"], e[name]) for e in run.events if is_held_out(e, name)]
        if points:
            steps, values = zip(*points, strict=True)
            colour = COLOURS[number % len(COLOURS)] if several else COLOURS[1]
            traces.append(
                {
                    **_line(steps, values, f"{run.name}, held out" if several else "held out", {"color": colour}),
                    "mode": "markers",
                    "marker": {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 2}},
                }
            )
    return _figure(traces, "step", {"tickformat": ".0%"} if name == "reward_accuracy" else {})


def learners(run: Run) -> list[Who]:
    """Whose curves tell how a run learns: rank 0, wherever it was, or all ranks where they train apart."""
    everyone = list(run.series)
    if is_apart(run):
        return everyone
    return [who for who in everyone if who[0] == everyone[0][0]]


def is_apart(run: Run) -> bool:
    """Whether the ranks have weights of their own between merges."""
    starts = [event for event in run.events if event["kind"] == "start" and event.get("plan")]
    return bool(starts) and starts[-1]["plan"].get("strategy") == "independent"


def speed(run: Run, now: Figures) -> Figure:
    """Pairs a second of every rank over the steps; the plan's as dotted lines."""
    traces = []
    planned = {(rank.rank, rank.host): rank.planned_pairs_per_second for rank in now.ranks}
    for index, who in enumerate(run.series):
        curve, style = run.curve(who, "pairs", over="step_seconds"), _style(index)
        traces.append(_line(curve.steps, curve.values, _label(who), style))
        if (goal := planned.get(who)) is not None and len(curve.steps):
            ends = [curve.steps[0], curve.steps[-1]]
            traces.append(_line(ends, [goal, goal], f"{_label(who)}, plan", {**style, "dash": "dot", "width": 1}))
    return _figure(traces, "step", {"rangemode": "tozero"})


def seconds(now: Figures) -> Figure:
    """Where each rank's step goes, its last steps' means, as stacked bars: one colour and one pattern a part."""
    names = [_label((rank.rank, rank.host)) for rank in now.ranks]
    traces = []
    for (column, label), colour, shape in zip(PARTS, COLOURS, ("", "/", "."), strict=False):
        marker = {"color": colour, "pattern": {"shape": shape, "solidity": 0.35}}
        values = [getattr(rank, column) for rank in now.ranks]
        traces.append({"type": "bar", "orientation": "h", "name": label, "x": values, "y": names, "marker": marker})
    figure = _figure(traces, "seconds a step", {"autorange": "reversed", "type": "category"})
    figure["layout"] |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    figure["layout"]["legend"]["traceorder"] = "normal"
    return figure


def network(run: Run, now: Figures) -> Figure:
    """Seconds of every step's sync by rank, and the plan's."""
    traces = []
    for index, who in enumerate(run.series):
        curve = run.curve(who, "sync_seconds")
        traces.append(_line(curve.steps, 1000 * curve.values, _label(who), _style(index)))
    return _figure(traces, "step", {"rangemode": "tozero", "ticksuffix": " ms"})


def sensors(run: Run, name: str) -> Figure | None:
    """A host's temperature or power over the time; None where no host tells it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for event in run.events:
        if event["kind"] == "sensors" and event.get(name) is not None:
            found.setdefault(event["host"], []).append((event["time"], event[name]))
    if not found:
        return None
    traces = []
    for index, (host, points) in enumerate(found.items()):
        times, values = zip(*points, strict=True)
        traces.append(_line([_clock(time) for time in times], values, host, _style(index)))
    return _figure(traces, None, {"ticksuffix": " °C" if name == "temperature_celsius" else " W"})


def timeline(run: Run) -> Figure:
    """What happened when, a lane a kind."""
    traces = []
    symbols = ("triangle-right", "diamond", "star", "circle", "square", "x", "triangle-left")
    for index, (kind, symbol) in enumerate(zip(LANES, symbols, strict=True)):
        events = [event for event in run.events if event["kind"] == kind and is_told_once(event)]
        if not events:
            continue
        marker = {"symbol": symbol, "size": 9, "color": COLOURS[1] if kind == "warning" else COLOURS[index % 2 * 2]}
        traces.append(
            {
                **_line([_clock(e["time"]) for e in events], [kind] * len(events), kind, {}),
                "mode": "markers",
                "marker": marker,
                "text": [describe(event) for event in events],
                "hovertemplate": "%{x|%H:%M:%S} %{text}<extra></extra>",
            }
        )
    kinds = [trace["name"] for trace in traces]
    figure = _figure(traces, None, {"type": "category", "categoryarray": kinds[::-1], "categoryorder": "array"})
    figure["layout"] |= {"showlegend": False, "hovermode": "closest"}
    return figure


def describe(event: dict[str, Any]) -> str:
    """One line of an event."""
    kind, step = event["kind"], event.get("step")
    at = f"step {step}: " if step is not None else ""
    if kind == "start":
        resumed = event.get("resumed_from_step")
        return "started" if resumed is None else f"started again after step {resumed}"
    if kind == "plan":
        shares = " + ".join(map(str, event.get("shares", [])))
        return f"{at}from step {event.get('first_step')} on shares {shares}: {event.get('reason')}"
    if kind == "merge":
        pairs = " + ".join(map(str, event.get("pairs", [])))
        return f"{at}merged by {event.get('method')}, {pairs} pairs, {event.get('bytes_sent', 0):,} bytes sent"
    if kind == "evaluation":
        shown = [f"{event[name]:.4g} {name.replace('_', ' ')}" for name in _HELD_OUT if event.get(name) is not None]
        return f"{at}held out {', '.join(shown)}"
    if kind == "checkpoint":
        return f"{at}checkpoint"
    if kind == "warning":
        return f"{at}{event.get('text')}"
    return f"{at}ended" if kind == "end" else f"{at}{kind}"


_HELD_OUT = ("loss", "reward_accuracy", "reward_margin", "kl", "exact_match")


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the last twentieth of all values at each of them; NaN counts nowhere."""
    window = max(1, len(values) // 20)
    known = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    number = counts[ends] - counts[begins]
    return np.divide(sums[ends] - sums[begins], number, out=np.full(len(values), np.nan), where=number > 0)


def is_held_out(event: dict[str, Any], name: str) -> bool:
    return event["kind"] == "evaluation" and event.get("rank") == 0 and event.get(name) is not None


def is_told_once(event: dict[str, Any]) -> bool:
    """All ranks record what they do together; rank 0's word is enough."""
    return event["kind"] != "samples" and (event.get("rank") == 0 or event["kind"] == "warning")


def _label(who: Who) -> str:
    return f"{who[0]} {who[1]}"


def _style(index: int) -> dict[str, Any]:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 1.6}


def _line(x: Any, y: Any, name: str, line: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _plain(x),
        "y": _plain(y),
        "name": name,
        "line": line,
        **more,
    }


def _band(curve: Curve, colour: str) -> list[dict[str, Any]]:
    """Least to greatest value of every bucket."""
    edge = {"width": 0, "color": colour}
    quiet: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip", "fillcolor": f"{colour}33"}
    return [
        _line(curve.steps, curve.least, "least", edge, **quiet),
        _line(curve.steps, curve.greatest, "greatest", edge, fill="tonexty", **quiet),
    ]


def _plain(values: Any) -> list[Any]:
    """JSON has no NaN."""
    if isinstance(values, np.ndarray):
        return [None if value != value else value for value in values.tolist()]
    return list(values)


def _clock(time: float) -> str:
    """Local time as Plotly reads it."""
    return str(np.datetime64(int(1000 * time), "ms") + np.timedelta64(int(1000 * _offset_seconds(time)), "ms"))


def _offset_seconds(time: float) -> float:
    from datetime import datetime

    offset = datetime.fromtimestamp(time).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0


def _figure(traces: list[dict[str, Any]], x_title: str | None, y_axis: dict[str, Any]) -> Figure:
    title = {"title": {"text": x_title, "standoff": 6}} if x_title else {}
    return {
        "data": traces,
        "layout": {
            "uirevision": "kept",  # a zoom stays while data come in
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "font": {"size": 12, "family": "system-ui, sans-serif"},
            "xaxis": {"automargin": True, "zeroline": False, **title},
            "yaxis": {"automargin": True, "zeroline": False, **y_axis},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
            "showlegend": len(traces) > 1,
            "hovermode": "x unified",
            "dragmode": "zoom",
        },
    }


EMPTY = _figure([], None, {})


def newest(run: Run, name: str) -> float | None:
    """The column's value in the newest step record."""
    rows = [one.recent[-1] for who, one in run.series.items() if who in learners(run)]
    row = max(rows, key=lambda row: row[INDEX["time"]], default=None)
    return None if row is None or np.isnan(row[INDEX[name]]) else float(row[INDEX[name]])
