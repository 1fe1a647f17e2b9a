"""What the dashboard draws: plain Plotly figures made from runs' records, without any state of their own.

People with any colour vision can distinguish the colours, whose contrast is 3 : 1 or more on the light and on the
dark ground; lines of one chart differ in dashes as well. Text and grid take the page's colours by its style sheet.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from lib.report.history import SENSORS, STEP_COLUMNS, Figures, MetricCurve, RunHistory, Who, batch_curves
from lib.system.records import PlanRecord, Record

Plotly = dict[str, Any]  # a figure, or a part of one, as Plotly takes it


COLOURS = ("#2490fc", "#d55e00", "#7a8a5c", "#9024fc", "#c0609c")
HELD_OUT_COLOUR = COLOURS[3]  # where ranks have lines of their own
DASHES = ("solid", "dash", "dot", "dashdot")
LIGHT, DARK = "#ffffff", "#14181f"


# The learning panels: column, title, and how a value is written.
LEARNING = (
    ("loss", "Loss", "{:.4f}"),
    ("reward_accuracy", "Reward accuracy", "{:.1%}"),
    ("reward_margin", "Reward margin", "{:.3f}"),
    ("kl", "KL to the reference", "{:.3f}"),
    ("exact_match", "Exact match", "{:.1%}"),
    ("learning_rate", "Learning rate", "{:.3g}"),
    ("grad_norm", "Gradient norm", "{:.3g}"),
)
AXES = {"reward_margin": "nats", "kl": "nats"}
# What ranks and hosts measure once in a while: title, factor, unit.
MEASURED = {
    "bytes_per_second": ("Bandwidth during syncs", 1e-6, "MB/s"),
    "round_trip_seconds": ("TCP round trip", 1e3, "ms"),
    "retransmits": ("TCP retransmits", 1.0, "since the start"),
    "temperature_celsius": ("Temperature", 1.0, "°C"),
    "power_watts": ("Power", 1.0, "W"),
    "speed_limit": ("CPU speed left by heat", 100.0, "%"),
}
# What is watched of rounds, a point a round: title, and unit.
OF_ROUNDS = {
    "round_held_out": ("Held out after each round", ""),
    "round_score": ("Mean score of the answers", ""),
    "round_tokens": ("Length of the answers", "tokens"),
    "round_entropy": ("Entropy of the policy", "nats a token"),
    "round_kl": ("KL to the reference", "nats a token"),
}
PARTS = (("compute_seconds", "compute"), ("sync_seconds", "sync"), ("wait_seconds", "wait"))
LANES = {"start": "triangle-right", "restart": "triangle-right-open", "plan": "diamond", "merge": "star"}


LANES |= {"evaluation": "circle", "checkpoint": "square", "warning": "x", "end": "triangle-left"}
LEGEND_LINES = 9  # more leave no room for the chart; the page's tables have keys, too
HIGHEST_DRAWN = 1e30  # Matplotlib cannot divide an axis that is much longer
LANE_POINTS = 500  # of more events of a kind some are left out, at even distances


def learning(runs: Sequence[RunHistory], name: str) -> Plotly:
    """One quantity of training over the steps; held-out values as points. Ranks that train apart have a line each.

    Of several runs the smooth lines alone, in the styles of `style`, with no key: the page's table of runs is that.
    """
    traces: list[Plotly] = []
    several = len(runs) > 1
    for number, run in enumerate(runs):
        each = learners(run)
        for index, who in enumerate(each):
            line = style(number if several else index)
            label = run.name[:40] if several else label_of(who) if len(each) > 1 else "training"
            curve = run.curve(who, name) if name in STEP_COLUMNS else None  # exact match is known of evaluations alone
            if curve is None or np.isnan(curve.values).all():
                continue
            if curve.width > 1 and not several:
                traces += _band(curve, line["color"])
            if name == "learning_rate" or len(curve.steps) < 20:
                traces.append(_line(curve.steps, curve.values, label, line))
                continue
            smooth = "running mean" if label == "training" else label
            if not several:
                raw = _line(curve.steps, curve.values, label, {**line, "width": 1}, opacity=0.45)
                traces.append({**raw, "showlegend": len(each) == 1})
            traces.append(_line(curve.steps, running_mean(curve.values), smooth, line))
        if points := held_out_points(run, name):
            steps, values = zip(*points, strict=True)
            colour = style(number)["color"] if several else HELD_OUT_COLOUR if len(each) > 1 else COLOURS[1]
            traces.append(
                {
                    **_line(steps, values, f"{run.name[:40]}, held out" if several else "held out", {"color": colour}),
                    "mode": "markers",
                    "marker": {"symbol": "circle-open", "size": 8, "color": colour, "line": {"width": 2}},
                }
            )
    axis: Plotly = {"tickformat": ".0%"} if name in ("reward_accuracy", "exact_match") else {"exponentformat": "e"}
    figure = _figure(traces, "step", axis, AXES.get(name))
    figure["layout"]["showlegend"] &= not several
    return figure


def learners(run: RunHistory) -> list[Who]:
    """Whose curves tell how a run learns: rank 0, wherever it was, or all ranks where they train apart."""
    everyone = list(run.series)
    if is_independent(run):
        return everyone
    return [who for who in everyone if who[0] == everyone[0][0]]


def is_independent(run: RunHistory) -> bool:
    """Whether the ranks have weights of their own between merges."""
    plans = [plan for event in run.events if event["kind"] == "start" and (plan := event.get("plan"))]
    return bool(plans) and plans[-1].get("strategy") == "independent"


def speed(run: RunHistory, now: Figures) -> Plotly:
    """Pairs a second of every rank over the steps; the plan's as dotted lines."""
    traces = []
    planned = {(rank.rank, rank.host): rank.planned_pairs_per_second for rank in now.ranks}
    for index, who in enumerate(run.series):
        curve, line = run.curve(who, "pairs", over="step_seconds"), style(index)
        traces.append(_line(curve.steps, curve.values, label_of(who), line))
        if (goal := planned.get(who)) is not None and len(curve.steps):
            ends = [curve.steps[0], curve.steps[-1]]
            traces.append(_line(ends, [goal, goal], f"{label_of(who)}, plan", {**line, "dash": "dot", "width": 1}))
    return _figure(traces, "step", {"rangemode": "tozero"}, "pairs/s")


def seconds(now: Figures) -> Plotly:
    """Where each rank's step goes, its last steps' means, as stacked bars: one colour and one pattern a part."""
    names = [html.escape(label_of((rank.rank, rank.host)), quote=False) for rank in now.ranks]
    traces = []
    for (column, label), colour, shape in zip(PARTS, COLOURS, ("", "/", "."), strict=False):
        marker = {"color": colour, "pattern": {"shape": shape, "solidity": 0.35}}
        values = [rank.latest[column] for rank in now.ranks]
        traces.append({"type": "bar", "orientation": "h", "name": label, "x": values, "y": names, "marker": marker})
    figure = _figure(traces, "seconds a step", {"autorange": "reversed", "type": "category"})
    figure["layout"] |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    figure["layout"]["legend"]["traceorder"] = "normal"
    return figure


def network(run: RunHistory) -> Plotly:
    """Milliseconds of every step's sync by rank."""
    traces = []
    for index, who in enumerate(run.series):
        curve = run.curve(who, "sync_seconds")
        traces.append(_line(curve.steps, 1000 * curve.values, label_of(who), style(index)))
    return _figure(traces, "step", {"rangemode": "tozero"}, "ms")


def measured(run: RunHistory, name: str) -> Plotly | None:
    """One of MEASURED over time, a line for each rank, or for each host (SENSORS); None where it was not measured."""
    _, factor, unit = MEASURED[name]
    traces: dict[str, Plotly] = {}
    for who in run.measured:
        times, values = run.measure(who, name)
        label = who[1] if name in SENSORS else label_of(who)
        if len(values) and label not in traces:
            line = _line([_clock(time) for time in times], factor * values, label, style(rank_index(run, who)))
            traces[label] = {**line, "mode": "lines+markers" if len(values) < 40 else "lines"}
    axis = {} if name == "temperature_celsius" else {"rangemode": "tozero"}
    return _figure(list(traces.values()), None, axis, unit) if traces else None


def of_rounds(run: RunHistory, name: str) -> Plotly | None:
    """One of OF_ROUNDS by the round, with a cross on rounds that were undone; None where there is nothing to draw."""
    records = round_records(run)
    traces = []
    for index, (label, points) in enumerate(_points_of_rounds(run, records, name).items()):
        if not points:
            continue
        numbers, values = zip(*points, strict=True)
        undone = [bool(records.get(number, Record()).get("undone")) for number in numbers]
        marker = {"symbol": ["x" if cross else "circle" for cross in undone], "size": 8}
        texts = ["undone" if cross else "" for cross in undone]
        line = _line(numbers, drawable(values), label, style(index), mode="lines+markers", marker=marker, text=texts)
        traces.append({**line, "hovertemplate": "%{y:.4g} %{text}"})
    if not traces:
        return None
    figure = _figure(traces, "round", {"rangemode": "tozero"}, OF_ROUNDS[name][1] or None)
    figure["layout"]["xaxis"] |= {"tickformat": "d", "nticks": 8}
    return figure


def newest(figure: Plotly | None) -> str:
    """The last value of each line of a chart, in words."""
    last = [line["y"][-1] for line in (figure or EMPTY)["data"]]
    return ", ".join(f"{value:.3g}" for value in last if value is not None)


def round_records(run: RunHistory) -> dict[int, Record]:
    """Rank 0's records of rounds by their numbers; of a round that was taken again the newest."""
    newest = {event["round"]: event for event in round_events(run) if event["rank"] == 0}
    return dict(sorted(newest.items()))


def round_events(run: RunHistory) -> list[Record]:
    """All ranks' records of rounds; records that lack something are left out."""
    whole, of_answers = {"round", "answers", "held_out", "rank"}, {"accepted", "duplicates", "tokens", "entropy"}
    events = [event for event in run.events if event["kind"] == "round" and whole <= event.keys()]
    return [event for event in events if of_answers <= event["answers"].keys()]


def _points_of_rounds(run: RunHistory, records: dict[int, Record], name: str) -> dict[str, list[tuple[int, float]]]:
    """Numbers and values of rounds, by the name of their line. Round 0 is the policy before the first."""
    if name == "round_held_out":
        lines: dict[str, list[tuple[int, float]]] = {}
        for column, label in (("exact_match", "exact match"), ("held_out_score", "judge's score")):
            before = [(0, value) for step, value in held_out_points(run, column) if step == 0][:1] if records else []
            after = ((number, one["held_out"].get(column)) for number, one in records.items())
            lines[label] = before + [(number, value) for number, value in after if value is not None]
        return lines
    known = ((number, one["answers"].get(name.removeprefix("round_"))) for number, one in records.items())
    return {OF_ROUNDS[name][0]: [(number, float(value)) for number, value in known if isinstance(value, int | float)]}


def rank_index(run: RunHistory, who: Who) -> int:
    """Which of a run's ranks it is, so that its line looks the same in every chart; one more where it is none."""
    everyone = list(run.series)
    return everyone.index(who) if who in everyone else len(everyone)


def of_batches(run: RunHistory) -> Plotly | None:
    """Pairs a second by the size of a micro-batch, as every host was measured, and where on it the plan is."""
    traces = []
    for who, taken, curve in batch_curves(run):
        look, label = style(rank_index(run, who)), label_of(who)
        rates = [point.pairs_per_second for point in curve.points]
        line = _line([point.batch_size for point in curve.points], rates, label, look)
        traces.append({**line, "mode": "lines+markers", "marker": {"symbol": "circle-open", "size": 7}})
        if taken:
            at = _line(taken, np.array(taken) / curve.seconds(np.array(taken)), f"{label}, planned", look)
            traces.append({**at, "mode": "markers", "marker": {"symbol": "diamond", "size": 10}})
    if not traces:
        return None
    figure = _figure(traces, "pairs a micro-batch", {"rangemode": "tozero"}, "pairs/s")
    figure["layout"] |= {"showlegend": True, "hovermode": "closest"}
    figure["layout"]["xaxis"] |= {"type": "log", "dtick": math.log10(2), "tickformat": "~r"}
    return figure


def timeline(run: RunHistory) -> Plotly:
    """What happened when, a lane a kind."""
    traces, distinct = [], distinct_events(run.events)
    for index, (lane, symbol) in enumerate(LANES.items()):
        events = [event for event in distinct if _lane(event) == lane]
        if not events:
            continue
        shown = events[:: -(-len(events) // LANE_POINTS)]
        colour = COLOURS[1] if lane in ("warning", "restart") else COLOURS[index % 2 * 2]
        traces.append(
            {
                **_line([_clock(e["time"]) for e in shown], [lane] * len(shown), lane, {}),
                "mode": "markers",
                "marker": {"symbol": symbol, "size": 9, "color": colour},
                "text": [_wrapped(describe(event)) for event in shown],
                "hovertemplate": "%{x|%H:%M:%S} %{text}<extra></extra>",
            }
        )
    kinds = [trace["name"] for trace in traces]
    figure = _figure(traces, None, {"type": "category", "categoryarray": kinds[::-1], "categoryorder": "array"})
    figure["layout"] |= {"showlegend": False, "hovermode": "closest"}
    return figure


def _lane(event: Record) -> str:
    return "restart" if event["kind"] == "start" and event.get("resumed_from_step") is not None else event["kind"]


def _wrapped(text: str) -> str:
    """For a box beside the pointer; what a run says is text there, too."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text[:600], 70))


def describe(event: Record) -> str:
    """One line of an event."""
    kind, step = event["kind"], event.get("step")
    at = f"step {step}: " if step is not None else ""
    if kind == "start":
        resumed = event.get("resumed_from_step")
        hosts = dict.fromkeys(rank["host"] for rank in (event.get("plan") or PlanRecord()).get("ranks") or [])
        where = f" on {', '.join(hosts)}" if hosts else ""
        return f"started{where}" if resumed is None else f"started again after step {resumed}{where}"
    if kind == "plan":
        what, parts = ("blocks", event.get("blocks")) if event.get("blocks") else ("shares", event.get("shares"))
        divided = " + ".join(map(str, parts or []))
        return f"{at}from step {event.get('first_step')} on {what} {divided}: {event.get('reason')}"
    if kind == "merge":
        pairs = " + ".join(map(str, event.get("pairs") or []))
        error = f", error {merge_error:.1e}" if (merge_error := event.get("error")) is not None else ""
        return (
            f"{at}merged by {event.get('method')}, {pairs} pairs, {event.get('bytes_sent') or 0:,.0f} bytes sent{error}"
        )
    if kind == "evaluation":
        shown = [
            f"{title} {text.format(value)}"
            for name, title, text in HELD_OUT
            if (value := metric_of(event, name)) is not None
        ]
        return f"{at}held out: {', '.join(shown)}"
    if kind == "checkpoint":
        return f"{at}checkpoint"
    if kind == "round":
        verdict = f"undone: {'; '.join(event.get('why') or [])}" if event.get("undone") else "kept"
        return f"{at}round {event.get('round')} {verdict}"
    if kind == "warning":
        return f"{at}{event.get('text')}"
    if kind == "end":
        final = event.get("final_step")
        why = f": {event['reason']}" if event.get("reason") else ""
        return f"{at}ended{why}" + (f"; the folder holds step {final}" if final is not None else "")
    return f"{at}{kind}"


HELD_OUT = (
    ("loss", "loss", "{:.4f}"),
    ("reward_accuracy", "reward accuracy", "{:.1%}"),
    ("reward_margin", "reward margin", "{:.4f}"),
    ("kl", "KL to the reference", "{:.4f}"),
    ("exact_match", "exact match", "{:.1%}"),
)


def drawable(values: Sequence[float | None] | np.ndarray) -> np.ndarray:
    """The values as float64, with NaN (a gap) for what no axis can show: infinities, and losses of 1e300."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.abs(numbers) <= HIGHEST_DRAWN, numbers, np.nan)


def running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of the last twentieth of all values at each of them; NaN and infinities count nowhere."""
    window = max(1, len(values) // 20)
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    number = counts[ends] - counts[begins]
    return np.divide(sums[ends] - sums[begins], number, out=np.full(len(values), np.nan), where=number > 0)


def held_out_points(run: RunHistory, name: str) -> list[tuple[int, float]]:
    """Step and value of one metric in rank 0's evaluations."""
    return [
        (step, value)
        for event in evaluations(run)
        if (step := event.get("step")) is not None and (value := metric_of(event, name)) is not None
    ]


def evaluations(run: RunHistory) -> list[Record]:
    """Rank 0's evaluations."""
    return [event for event in run.events if event["kind"] == "evaluation" and event.get("rank") == 0]


def metric_of(event: Record, name: str) -> float | None:
    """A metric of an evaluation; None where it was not measured."""
    value = event.get(name)
    return value if isinstance(value, int | float) else None


def distinct_events(events: Sequence[Record]) -> list[Record]:
    """Each event once. All ranks record what they do together: rank 0's record is taken, and a warning's first."""
    distinct: dict[object, Record] = {}
    for number, event in enumerate(events):
        if event["kind"] == "warning":
            distinct.setdefault((event.get("step"), event.get("text")), event)
        elif event["kind"] != "samples" and event.get("rank", 0) == 0:
            distinct[number] = event
    return list(distinct.values())


def label_of(who: Who) -> str:
    """A rank by name; several may be on one host."""
    return f"rank {who[0]}, {who[1]}"


def style(index: int) -> Plotly:
    """The line of a rank, a host or a run: a colour, and a dash where there are more of them than colours."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 1.6}


def _line(x: Any, y: Any, name: str, line: Plotly, **more: Any) -> Plotly:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _plain(x),
        "y": _plain(y),
        "name": html.escape(name, quote=False),  # Plotly would take a host named <b> for a bold one
        "line": line,
        **more,
    }


def _band(curve: MetricCurve, colour: str) -> list[Plotly]:
    """Least to greatest value of every bucket."""
    edge = {"width": 0, "color": colour}
    quiet: Plotly = {"showlegend": False, "hoverinfo": "skip", "fillcolor": f"{colour}33"}
    return [
        _line(curve.steps, curve.least, "least", edge, **quiet),
        _line(curve.steps, curve.greatest, "greatest", edge, fill="tonexty", **quiet),
    ]


def _plain(values: Any) -> list[Any]:
    """JSON has no NaN."""
    if isinstance(values, np.ndarray):
        return [value if math.isfinite(value) else None for value in values.tolist()]
    return list(values)


def _clock(time: float) -> str:
    """Local time as Plotly reads it."""
    return str(np.datetime64(int(1000 * time), "ms") + np.timedelta64(int(1000 * _offset_seconds(time)), "ms"))


def _offset_seconds(time: float) -> float:
    from datetime import datetime

    offset = datetime.fromtimestamp(time).astimezone().utcoffset()
    return offset.total_seconds() if offset else 0.0


def _figure(traces: list[Plotly], x_title: str | None, y_axis: Plotly, y_title: str | None = None) -> Plotly:
    # Without a title it is the time of day.
    title = {"title": {"text": x_title, "standoff": 6}} if x_title else {"tickangle": 0, "nticks": 5}
    unit = {"title": {"text": y_title, "standoff": 4}} if y_title else {}
    return {
        "data": traces,
        "layout": {
            "uirevision": "kept",  # a zoom stays while data come in
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "font": {"size": 12, "family": "system-ui, sans-serif"},
            # Unseen ticks keep the first number of this axis away from that of the other.
            "xaxis": {
                "ticks": "outside",
                "ticklen": 5,
                "tickcolor": "rgba(0,0,0,0)",
                "automargin": True,
                "zeroline": False,
                **title,
            },
            "yaxis": {"automargin": True, "zeroline": False, **y_axis, **unit},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
            "showlegend": 1 < sum(trace.get("showlegend", True) for trace in traces) <= LEGEND_LINES,
            "hovermode": "x unified",
            "hoverlabel": {"namelength": 40},
            "dragmode": "zoom",
        },
    }


EMPTY = _figure([], None, {})
