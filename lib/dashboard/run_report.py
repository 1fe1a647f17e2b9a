"""What a finished run leaves for people: report.html, one file that needs no other, and the model card of its adapter.

Both are made from the run's records and `summary.json`, so they can be made again, or of a run that is not over:
`python -m lib.dashboard --export RUN`.
"""

from __future__ import annotations

import html
import io
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.dashboard import charts
from lib.dashboard import figures as history
from lib.dashboard.figures import Figures, figures
from lib.dashboard.history import RunHistory
from lib.errors import UserError
from lib.plan.curves import Curve as BatchCurve
from lib.system.model_folder import ADAPTER_WEIGHTS
from lib.telemetry.run_records import read_records


def leave_pages(log: Path, folder: Path) -> None:
    """Writes what people read of a finished run into its folder: curves.png, report.html and the model card."""
    plot_curves(log, folder / "curves.png")
    write(folder)


def plot_curves(log: Path, picture: Path) -> None:
    """Draws loss, reward accuracy, margin and exact match over the steps, training and held-out, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_records(log)
    steps = [r for r in records if r["kind"] == "step"]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    panels = [
        ("loss", "loss"),
        ("reward_accuracy", "reward accuracy"),
        ("reward_margin", "reward margin"),
        ("exact_match", "exact match"),
    ]
    panels = [(key, label) for key, label in panels if _drawable(steps + evaluations, key)]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.4 * len(panels), 2.8), squeeze=False, layout="constrained"
    )
    for axis, (key, label) in zip(axes[0], panels, strict=True):
        trained, held_out = _drawable(steps, key), _drawable(evaluations, key)
        if trained:
            axis.plot(*zip(*trained, strict=True), color="#9ecae1", linewidth=1, label="training batches")
            smooth = _running_mean([value for _, value in trained], max(1, len(trained) // 20))
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
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)


def _drawable(records: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """Step and value of the records that have one which an axis can show."""
    values = charts.drawable([record.get(key) for record in records])
    return [(r["step"], float(value)) for r, value in zip(records, values, strict=True) if value == value]


def _running_mean(values: list[float], window: int) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


CARD = "README.md"
REPORT = "report.html"
SHOWN_EVENTS = 200
STYLE = """:root { color-scheme: light dark; --line: #8884; --soft: #667 } @media (prefers-color-scheme: dark) { :root { --soft: #9aa5b4 } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem } h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
svg { width: 100%; height: auto } .scroll { overflow-x: auto; margin: .8rem 0 } .scroll > svg { min-width: 40rem } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { text-align: left; padding: .25rem 1rem .25rem 0; vertical-align: top } tr + tr { border-top: 1px solid var(--line) } th { font-weight: 500; color: var(--soft) }
.panels { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 18rem), 1fr)) } td:first-child, .numbers td { white-space: nowrap } td { overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--line); padding-left: .8rem; margin: .4rem 0 } small, .soft { color: var(--soft) }"""
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ method }} of {{ base_shown }}, {{ trained }} by Tandem on {{ hosts }}.

| held out | before | after |
|---|---|---|
{% for row in held_out %}| {{ row[0] }} | {{ row[1] }} | {{ row[2] }} |
{% endfor %}
![metrics over the steps](curves.png)

    python -m mlx_lm generate --model {{ base }} --adapter-path . --prompt ...

## How it was made

{% for row in facts %}- {{ row[0] }}: {{ row[1] }}
{% endfor %}- plan: {{ reason }}
- environment: {{ environment }}
{% if samples %}
## Samples, before and after

{% for text in samples %}{{ text }}

{% endfor %}{% endif %}
`report.html` has all curves, ranks and settings; `logs/` has every step.
"""


def write(folder: Path) -> list[Path]:
    """Writes a run's report and, where it has an adapter, its model card; returns what it wrote.

    Raises:
        UserError: the folder has no records.
        OSError: the disk is full or not writable.
    """
    run = RunHistory(folder)
    while run.read():
        pass
    if not run.events and not run.series:
        raise UserError(f"{folder} has no records; a run's folder has them in logs/")
    now = figures(run, time.time())
    summary = _json(folder / "summary.json")
    report = folder / REPORT
    report.write_text(report_html(run, now, summary), encoding="utf-8")
    written = [report]
    if (folder / ADAPTER_WEIGHTS).exists():
        card = folder / CARD
        card.write_text(model_card(run, now, summary), encoding="utf-8")
        written.append(card)
    return written


def report_html(run: RunHistory, now: Figures, summary: dict[str, Any]) -> str:
    """One page: figures, curves, plan, samples, environment, costs. Nothing in it is fetched from anywhere."""
    start = _start(run)
    table = _table(["held out", "before", "after"], held_out(run))
    parts = [f"<h1>{html.escape(run.name)}</h1>", f"<p class=soft>{html.escape(now.reason or '')}</p>"]
    parts += [_table(None, facts(run, now, summary)), table, "<h2>Curves</h2>", curves_svg(run)]
    parts += ["<h2>Ranks</h2>", _table(*ranks(now)), *_missing(now)]
    if curves := history.batch_curves(run):
        drawn = [(charts.label_of(who), curve) for who, _, curve in curves]
        key = curves[0][2].key
        parts += [f"<h2>Batch curves</h2><p class=soft>{html.escape(str(key or curves[0][2].source))}</p>"]
        parts += [f'<div class="scroll">{svg_of(batch_curves_figure(drawn))}</div>']
    if now.warnings:
        warned = [
            (_clock(at), "" if step is None else f"step {step}", text)
            for at, step, text in now.warnings[-SHOWN_EVENTS:]
        ]
        parts += ["<h2>Warnings</h2>", _table(None, warned)]
    if shown := samples(run):
        parts += ["<h2>Samples before and after</h2>", *(f"<pre>{html.escape(text)}</pre>" for text in shown)]
    events = [event for event in charts.told_once(run.events) if event["kind"] not in ("checkpoint", "warning")]
    told = [(_clock(event["time"]), charts.describe(event)) for event in events[-SHOWN_EVENTS:]]
    parts += ["<h2>What happened when</h2>", _table(None, told)]
    parts += ["<h2>Environment</h2>", _table(None, list(environment(run).items()))]
    parts += [
        f"<details><summary>Settings</summary><pre>{html.escape(json.dumps(start.get('config', {}), indent=1))}</pre></details>"
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(run.name)}</title>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>\n'


def model_card(run: RunHistory, now: Figures, summary: dict[str, Any]) -> str:
    """The adapter's README.md, with the metadata that the Hugging Face hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    config = _start(run).get("config") or {}
    model, train = config.get("model") or {}, config.get("train") or {}
    base = str(summary.get("model") or model.get("path"))
    is_hub_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base)) and not Path(base).exists()
    preference = train.get("loss") != "sft"
    data = ModelCardData(
        base_model=base if is_hub_name else None,  # the hub refuses a path
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "tandem", *(["dpo"] if train.get("loss") == "sigmoid" else []), *(["preference"] * preference)],
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=run.name,
        method={"lora": "A LoRA adapter", "dora": "A DoRA adapter"}.get(str(model.get("method")), "All weights"),
        base=base,
        base_shown=f"[{base}](https://huggingface.co/{base})" if is_hub_name else f"`{base}`",
        trained=f"preference-trained with the {train.get('loss')} loss (beta {train.get('beta')})"
        if preference
        else "fine-tuned (SFT)",
        environment=", ".join(f"{name} {value}" for name, value in environment(run).items()),
        reason=now.reason,
        hosts=", ".join(dict.fromkeys(rank.host for rank in now.ranks)),
        held_out=held_out(run),
        facts=facts(run, now, summary),
        samples=["    " + text.replace("\n", "\n    ") for text in samples(run)],
    )
    return str(card)


# ---- What both tell --------------------------------------------------------------------------------------------------


def held_out(run: RunHistory) -> list[tuple[str, str, str]]:
    """Metric, before, after: of rank 0's first and last evaluation."""
    found = [event for event in run.events if event["kind"] == "evaluation" and event.get("rank") == 0]
    rows = []
    for name, title, text in charts.HELD_OUT:
        values = [event[name] for event in found if event.get(name) is not None]
        if values:
            rows.append((title, text.format(values[0]), text.format(values[-1])))
    return rows


def facts(run: RunHistory, now: Figures, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How the run went, name and value."""
    config = _start(run).get("config") or {}
    train, data = config.get("train") or {}, config.get("data") or {}
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    saved = [event for event in run.events if event["kind"] == "checkpoint"]
    speed = summary.get("pairs_per_second", now.pairs_per_second)
    efficiency = summary.get("efficiency", now.efficiency)
    rows = [
        ("state", now.state),
        ("data", str(data.get("train"))),
        ("steps", f"{now.step:,}" + (f" of {now.steps:,}" if now.steps else "")),
        ("strategy and shares", f"{now.strategy}, {shares}"),
        ("learning rate, seed", f"{train.get('learning_rate')}, {train.get('seed')}"),
        ("speed", f"{speed:.3g} pairs/s"),
        ("efficiency (η)", "not calibrated" if efficiency is None else f"{efficiency:.1%}"),
        ("time", f"{now.elapsed_seconds:,.0f} s"),
        ("checkpoints", str(len(saved)) + (f", the last of step {saved[-1].get('step')}" if saved else "")),
        ("restarts, warnings", f"{now.restarts}, {len(now.warnings)}"),
    ]
    cost = summary.get("cost") or now.cost
    if cost:
        rows.append(("cost", f"{cost['cost']:.3g} ({cost['energy_kwh']:.3g} kWh)"))
    return rows


def ranks(now: Figures) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of the table of ranks: means over their last steps."""
    columns = ["rank", "host", "pairs a step", "pairs/s", "plan", "compute s", "sync s", "wait s", "peak memory GB"]
    rows = []
    for rank in now.ranks:
        planned = "–" if rank.planned_pairs_per_second is None else f"{rank.planned_pairs_per_second:.3g}"
        times = [f"{rank.compute_seconds:.3g}", f"{rank.sync_seconds:.3g}", f"{rank.wait_seconds:.3g}"]
        own = [str(rank.rank), rank.host, str(rank.share), f"{rank.pairs_per_second:.3g}", planned]
        rows.append([*own, *times, f"{rank.peak_memory_bytes / 1e9:.3g}"])
    return columns, rows


def samples(run: RunHistory) -> list[str]:
    """Prompts with the answers before and after, as rank 0 recorded them."""
    found = [event for event in run.events if event["kind"] == "samples" and event.get("rank") == 0]
    texts: dict[str, list[str]] = {}
    for event in found:
        for one in event.get("samples") or []:
            answers = [f"{when}: {one[when]}" for when in ("before", "after") if when in one]
            texts.setdefault(one["prompt"], []).extend(answers)
    return ["\n".join([prompt, *dict.fromkeys(answers)]) for prompt, answers in texts.items()]


def environment(run: RunHistory) -> dict[str, str]:
    """What a run was made with, name and value."""
    start = _start(run)
    found = {"commit": start.get("commit"), "platform": start.get("platform"), **(start.get("versions") or {})}
    return {name: str(value) for name, value in found.items() if value}


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
        points = [(e["step"], e[name]) for e in run.events if charts.is_held_out(e, name)]
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


def batch_curves_figure(
    measured: Sequence[tuple[str, BatchCurve]], published: Sequence[tuple[str, BatchCurve]] = ()
) -> Any:
    """Speed by the size of a micro-batch, hosts in one picture: measured solid, published dashed. Memory where it was measured."""
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
    """A Matplotlib figure, closed by this, as an element of a page: text takes the page's colour, and nothing is fetched."""
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


def _clock(at: float) -> str:
    return time.strftime("%b %d %H:%M:%S", time.localtime(at))


def _missing(now: Figures) -> list[str]:
    hosts = ", ".join(f"{rank} ({host})" for rank, host in now.missing)
    return [
        f"<p class=soft>Records of rank {html.escape(hosts)} are on those hosts, and not in these figures.</p>"
    ] * bool(hosts)


def _start(run: RunHistory) -> dict[str, Any]:
    starts = [event for event in run.events if event["kind"] == "start" and event.get("rank") == 0]
    return starts[-1] if starts else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head or ())
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table{" class=numbers" if head else ""}>{f"<tr>{titles}</tr>" if head else ""}{body}</table></div>'
