"""Pictures of a run by Matplotlib: curves.png, and the figures in report.html as SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.plan.calibration import BatchCurve
from lib.report import charts
from lib.report.history import RunHistory
from lib.system import files
from lib.system.records import read_records

Points = list[tuple[int, float | None]]  # steps and values


def plot_curves(log: Path, picture: Path) -> None:
    """Draws loss, reward accuracy, margin and exact match over the steps, training and held-out, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {name: title for name, title, _ in charts.HELD_OUT if name != "kl"}
    told: dict[tuple[str, str], Points] = {}
    for record in read_records(log):
        for name in titles if record["kind"] in ("step", "evaluation") else ():
            point = record.get("step") or 0, charts.metric_of(record, name)
            told.setdefault((record["kind"], name), []).append(point)
    curves = {of_what: curve for of_what, points in told.items() if (curve := _drawable(points))}
    panels = [(name, title) for name, title in titles.items() if {("step", name), ("evaluation", name)} & curves.keys()]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 2.8), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        trained, held_out = curves.get(("step", key)), curves.get(("evaluation", key))
        if trained:
            axis.plot(*zip(*trained, strict=True), color="#9ecae1", linewidth=1, label="training batches")
            smooth = charts.running_mean(np.array([value for _, value in trained]))
            axis.plot([step for step, _ in trained], smooth, color="#2171b5", linewidth=1.6, label="running mean")
        if held_out:
            axis.plot(
                *zip(*held_out, strict=True), "o-", color="#d94801", linewidth=1.4, markersize=4, label="held out"
            )
        if key in ("reward_accuracy", "exact_match"):
            axis.set_ylim(-0.02, 1.02)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format="png")
    files.write_atomically(picture, drawn.getvalue())
    pyplot.close(figure)


def _drawable(points: Points) -> list[tuple[int, float]]:
    """The points that an axis can show."""
    values = charts.drawable([value for _, value in points])
    return [(step, float(value)) for (step, _), value in zip(points, values, strict=True) if value == value]


def curves_svg(run: RunHistory) -> str:
    """A panel a quantity of training, held-out values as points; text takes the page's colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    panels = []
    for name, title, _ in charts.LEARNING:
        figure, axis = pyplot.subplots(figsize=(4, 2.8), layout="constrained")
        each = charts.learners(run)
        for index, who in enumerate(each):
            curve, colour = run.curve(who, name), charts.COLOURS[index % len(charts.COLOURS)]
            values = charts.drawable(curve.values)
            if np.isnan(values).all():
                continue
            label = f"rank {who[0]}" if len(each) > 1 else "running mean"
            axis.plot(curve.steps, values, color=colour, alpha=0.35, linewidth=0.8)
            axis.plot(curve.steps, charts.running_mean(values), color=colour, linewidth=1.5, label=label)
        points = charts.held_out_points(run, name)
        if points:
            colour = charts.HELD_OUT_COLOUR if len(each) > 1 else charts.COLOURS[1]
            steps, held_out = zip(*points, strict=True)
            axis.plot(steps, charts.drawable(held_out), "o", color=colour, markersize=4, label="held out")
        if not axis.lines:  # SFT has no rewards
            pyplot.close(figure)
            continue
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.set_ylabel(charts.AXES.get(name, ""), fontsize=9)
        axis.tick_params(labelsize=8)
        if name == "reward_accuracy":
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.legend(fontsize=8, frameon=False)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        panels.append(svg_of(figure, f"{title} over the steps"))
    return f'<div class="panels">{"".join(panels)}</div>'


def rounds_svg(run: RunHistory) -> str:
    """A panel for each of charts.OF_ROUNDS, with a cross on rounds that were undone; empty for a run without rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    panels = []
    for name, (title, unit) in charts.OF_ROUNDS.items():
        drawn = charts.of_rounds(run, name)
        if drawn is None:
            continue
        figure, axis = pyplot.subplots(figsize=(4, 2.8), layout="constrained")
        for line in drawn["data"]:
            colour, crosses = line["line"]["color"], [at for at, text in enumerate(line["text"]) if text]
            values = charts.drawable(line["y"])
            axis.plot(line["x"], values, "o-", color=colour, markersize=4, label=html.unescape(line["name"]))
            axis.plot([line["x"][at] for at in crosses], values[crosses], "x", color=colour, markersize=10)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round", fontsize=9)
        axis.set_ylabel(unit, fontsize=9)
        low, high = axis.get_ylim()
        axis.set_ylim(min(0.0, low), max(0.0, high + 0.05 * abs(high)))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.tick_params(labelsize=8)
        if len(drawn["data"]) > 1:
            axis.legend(fontsize=8, frameon=False)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        panels.append(svg_of(figure, f"{title}, by the round"))
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def batch_curves_figure(
    measured: Sequence[tuple[str, BatchCurve]], published: Sequence[tuple[str, BatchCurve]] = ()
) -> Any:
    """Speed by the size of a micro-batch, all hosts in one figure, and memory where it was measured.

    Measured curves are solid, published ones dashed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with_memory = any(point.peak_memory_bytes for _, curve in measured for point in curve.points)
    panels = 2 if with_memory else 1  # a logarithmic axis without a positive number is none
    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 4.2), layout="constrained", squeeze=False)
    rates, memory = axes[0][0], axes[0][-1]
    for index, (host, curve) in enumerate(measured):
        host = host.replace("$", r"\$")  # a name is no formula
        colour = charts.COLOURS[index % len(charts.COLOURS)]
        sizes, points = [point.batch_size for point in curve.points], curve.points
        rates.plot(sizes, [point.pairs_per_second for point in points], "o-", color=colour, label=host)
        low = [p.batch_size / (p.seconds_median + p.seconds_spread / 2) for p in points]
        high = [p.batch_size / max(p.seconds_median - p.seconds_spread / 2, 0.1 * p.seconds_median) for p in points]
        rates.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        if with_memory:
            _draw_memory(memory, host, curve, colour)
    for index, (name, curve) in enumerate(published, start=len(measured)):
        sizes = [point.batch_size for point in curve.points]
        look = {"color": charts.COLOURS[index % len(charts.COLOURS)], "linestyle": "--", "linewidth": 1.2}
        rates.plot(sizes, [p.pairs_per_second for p in curve.points], **look, label=name)
    rates.set_ylabel("pairs/s")
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("pairs a micro-batch")
        for scale in (axis.xaxis, axis.yaxis):  # plain numbers, on the few ticks between powers of ten as well
            scale.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(fontsize=8, frameon=False)
    return figure


def _draw_memory(axis: Any, host: str, curve: BatchCurve, colour: str) -> None:
    peaks = [point.peak_memory_bytes / 1e9 for point in curve.points if point.peak_memory_bytes]
    axis.set_ylabel("peak memory, GB (dotted: limit)")
    if not peaks:
        return
    axis.plot([point.batch_size for point in curve.points], peaks, "o-", color=colour, label=host)
    if curve.memory_limit_bytes and curve.memory_limit_bytes < 20e9 * max(peaks):
        axis.axhline(curve.memory_limit_bytes / 1e9, color=colour, linestyle=":", linewidth=1)


def svg_of(figure: Any, label: str = "pairs a second, and peak memory, by the size of a micro-batch") -> str:
    """A Matplotlib figure as an SVG element: text takes the page's colour, nothing is fetched. Closes the figure."""
    from matplotlib import pyplot

    picture = io.StringIO()
    with pyplot.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "tandem"}):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = picture.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1
    )
    return text.replace("#000000", "currentColor").replace("<text ", '<text fill="currentColor" ')
