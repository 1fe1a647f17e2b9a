"""What a finished run leaves for people: curves.png, report.html, which needs no other file, and its model card.

All are made from the run's records and `summary.json`, so they can be made again, or of a run that is not over:
`python -m lib.dashboard --export RUN`.
"""

from __future__ import annotations

import html
import io
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from lib.config import read_file
from lib.errors import UserError, shown
from lib.plan.calibration import BatchCurve
from lib.report import charts
from lib.report.history import Figures, RunHistory, batch_curves, figures, held_out_now
from lib.system import files
from lib.system.model_folder import ADAPTER_WEIGHTS
from lib.system.records import Record, SettingsRecord

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

CARD, CURVES, REPORT = "README.md", "curves.png", "report.html"
SHOWN_EVENTS = 200
STYLE = Path(__file__).with_suffix(".css")
MARKERS = {"circle-open": "o", "circle": "o", "x": "x", "diamond": "D"}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PICTURED = ("loss", "reward_accuracy", "reward_margin", "exact_match")
TEMPLATE = """---
{card_data}
---

# {name}

{method} of {base_shown}, {trained} by Tandem on {hosts}.

| held out | before | after |
|---|---|---|
{held_out}

![metrics over the steps](curves.png)

    python -m mlx_lm generate --model {base} --adapter-path . --prompt ...

## How it was made

{facts}
{samples}
`report.html` has all curves, ranks and settings; `logs/` has every step.
"""


def write(folder: Path) -> list[Path]:
    """Writes a run's curves, its report and, where it has an adapter, its model card; returns what it wrote.

    Raises:
        UserError: the folder has no records.
        OSError: the disk is full or not writable.
    """
    run = RunHistory(folder)
    while run.read():
        pass
    if not run.events and not run.series:
        raise UserError(f"{folder} has no records; a run's folder has them in logs/")
    now, summary = figures(run, time.time()), _summary(folder)
    texts = {REPORT: report_html(run, now, summary).encode("utf-8", "replace")}
    if picture := curves_png(run):
        texts[CURVES] = picture
    if (folder / ADAPTER_WEIGHTS).exists():
        texts[CARD] = model_card(run, now, summary).encode("utf-8", "replace")
    for name, content in texts.items():
        files.write_atomically(folder / name, content)
    return [folder / name for name in texts]


# ---- Pictures: Plotly's figures of lib/report/charts.py, by Matplotlib -----------------------------------------------


def curves_png(run: RunHistory) -> bytes | None:
    """Loss, reward accuracy, margin and exact match over the steps, training and held out; None without any."""
    titles = {name: title for name, title, _ in charts.LEARNING}
    drawn = [(titles[name], plotly) for name in PICTURED if (plotly := charts.learning([run], name))["data"]]
    if not drawn:
        return None
    size = (3.4 * len(drawn), 2.8)
    figure, axes = pyplot.subplots(1, len(drawn), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, plotly) in zip(axes[0], drawn, strict=True):
        draw(axis, title, plotly)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    pyplot.close(figure)
    return picture.getvalue()


def draw(axis: Any, title: str, figure: charts.Plotly) -> None:
    """The lines and points of a figure, as a panel."""
    for trace in figure["data"]:
        line, marker = trace.get("line", {}), trace.get("marker", {})
        if trace.get("hoverinfo") == "skip":  # a band's edges
            continue
        symbols = marker.get("symbol", "circle")
        symbol = MARKERS.get(symbols if isinstance(symbols, str) else symbols[0], "o")
        axis.plot(
            trace["x"],
            charts.drawable(trace["y"]),
            DASHES[line.get("dash", "solid")] if "lines" in trace["mode"] else "",
            marker=symbol if "markers" in trace["mode"] else None,
            color=line.get("color") or marker.get("color"),
            linewidth=line.get("width", 1.4),
            markersize=4,
            alpha=trace.get("opacity", 1.0),
            label=html.unescape(trace["name"]) if trace.get("showlegend", True) else None,
        )
        undone = [at for at, text in enumerate(trace.get("text", ())) if text == "undone"]
        axis.plot([trace["x"][at] for at in undone], [trace["y"][at] for at in undone], "x", markersize=10)
    axes = figure["layout"]
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(axes["xaxis"].get("title", {}).get("text", ""), fontsize=9)
    axis.set_ylabel(axes["yaxis"].get("title", {}).get("text", ""), fontsize=9)
    if axes["yaxis"].get("tickformat") == ".0%":
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)


def panel_svg(title: str, figure: charts.Plotly) -> str:
    """A figure as an SVG element."""
    picture, axis = pyplot.subplots(figsize=(4, 2.8), layout="constrained")
    draw(axis, title, figure)
    return svg_of(picture, title)


def svg_of(figure: Any, label: str = "pairs a second by the size of a micro-batch") -> str:
    """A Matplotlib figure as an SVG element: text takes the page's colour, nothing is fetched. Closes the figure."""
    picture = io.StringIO()
    with pyplot.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "tandem"}):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    text = picture.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
    return text.replace("#000000", "currentColor").replace("<text ", '<text fill="currentColor" ')


def batch_curves_figure(
    measured: Sequence[tuple[str, BatchCurve]], published: Sequence[tuple[str, BatchCurve]] = ()
) -> Any:
    """Speed by the size of a micro-batch, all hosts in one figure, and memory where it was measured.

    Measured curves are solid, published ones dashed.
    """
    has_memory = any(point.peak_memory_bytes for _, curve in measured for point in curve.points)
    panels = 2 if has_memory else 1
    figure, axes = pyplot.subplots(1, panels, figsize=(5.5 * panels, 4.2), layout="constrained", squeeze=False)
    for index, (name, curve) in enumerate([*measured, *published]):
        label, colour = name.replace("$", r"\$"), charts.COLOURS[index % len(charts.COLOURS)]  # no formula
        sizes, line = [point.batch_size for point in curve.points], "o-" if index < len(measured) else "--"
        axes[0][0].plot(sizes, [point.pairs_per_second for point in curve.points], line, color=colour, label=label)
        peaks = [point.peak_memory_bytes / 1e9 for point in curve.points if point.peak_memory_bytes]
        if has_memory and peaks and index < len(measured):
            axes[0][1].plot(sizes, peaks, "o-", color=colour, label=label)
            if curve.memory_limit_bytes and curve.memory_limit_bytes < 20e9 * max(peaks):
                axes[0][1].axhline(curve.memory_limit_bytes / 1e9, color=colour, linestyle=":", linewidth=1)
    for axis, what in zip(axes[0], ("pairs/s", "peak memory, GB (dotted: limit)"), strict=False):
        axis.set_ylabel(what)
        axis.set_xlabel("pairs a micro-batch")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        for scale in (axis.xaxis, axis.yaxis):  # plain numbers, on the few ticks between powers of ten as well
            scale.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        _plain(axis)
    return figure


# ---- The report ------------------------------------------------------------------------------------------------------


def report_html(run: RunHistory, now: Figures, summary: dict[str, Any]) -> str:
    """One page: figures, curves, plan, samples, environment, costs. Nothing in it is fetched from anywhere."""
    learning = [(title, charts.learning([run], name)) for name, title, _ in charts.LEARNING]
    rounds = [(title, charts.of_rounds(run, name)) for name, (title, _) in charts.OF_ROUNDS.items()]
    parts = [f"<h1>{html.escape(run.name)}</h1>", f"<p class=soft>{html.escape(now.plan.get('reason') or '')}</p>"]
    parts += [_table(None, facts(run, now, summary)), _table(["held out", "before", "after"], held_out(run))]
    parts += ["<h2>Curves</h2>", _panels(learning)]
    parts += ["<h2>Rounds</h2>", _panels(rounds)] if any(figure for _, figure in rounds) else []
    parts += ["<h2>Ranks</h2>", _table(*_ranks(now))]
    if now.missing:
        hosts = ", ".join(f"{rank} ({host})" for rank, host in now.missing)
        parts.append(
            f"<p class=soft>Records of rank {html.escape(hosts)} are on those hosts, not in these figures.</p>"
        )
    if curves := batch_curves(run):
        drawn = batch_curves_figure([(charts.label_of(who), curve) for who, _, curve in curves])
        parts += [f"<h2>Batch curves</h2><p class=soft>{html.escape(str(curves[0][2].key))}</p>"]
        parts += [f'<div class="scroll">{svg_of(drawn, "pairs a second by the size of a micro-batch")}</div>']
    if now.warnings:
        warned = [(_clock(w.time), "" if w.step is None else f"step {w.step}", w.text) for w in now.warnings]
        parts += ["<h2>Warnings</h2>", _table(None, warned[-SHOWN_EVENTS:])]
    if texts := samples(run):
        parts += ["<h2>Samples before and after</h2>", *(f"<pre>{html.escape(text)}</pre>" for text in texts)]
    events = [event for event in charts.distinct_events(run.events) if event["kind"] not in ("checkpoint", "warning")]
    described = [(_clock(event["time"]), charts.describe(event)) for event in events[-SHOWN_EVENTS:]]
    parts += ["<h2>What happened when</h2>", _table(None, described)]
    parts += ["<h2>Environment</h2>", _table(None, list(environment(run).items()))]
    settings = html.escape(json.dumps(_start(run).get("config", {}), indent=1))
    parts += [f"<details><summary>Settings</summary><pre>{settings}</pre></details>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{html.escape(run.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _panels(drawn: Sequence[tuple[str, charts.Plotly | None]]) -> str:
    panels = [panel_svg(title, figure) for title, figure in drawn if figure and figure["data"]]
    return f'<div class="panels">{"".join(panels)}</div>'


def held_out(run: RunHistory) -> list[tuple[str, str, str]]:
    """Metric, before, after: of rank 0's first evaluation, and of the weights that the run's folder holds."""
    evaluations = [*charts.evaluations(run)[:1], held_out_now(run.events)]
    rows = []
    for name, title, text in charts.HELD_OUT:
        values = [value for event in evaluations if (value := charts.metric_of(event, name)) is not None]
        if values:
            rows.append((title, text.format(values[0]), text.format(values[-1])))
    return rows


def facts(run: RunHistory, now: Figures, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How the run went, name and value."""
    config = _start(run).get("config") or SettingsRecord()
    train, data = config.get("train") or {}, config.get("data") or {}
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    saved = [event for event in run.events if event["kind"] == "checkpoint"]
    speed = summary.get("pairs_per_second", now.speed.pairs_per_second)
    tokens = summary.get("tokens_per_second", now.speed.tokens_per_second)
    efficiency = summary.get("efficiency", now.speed.efficiency)
    held = summary.get("checkpoint") or {}
    rows = [
        ("state", now.state),
        ("data", str(data.get("train"))),
        ("steps", f"{now.step:,}" + (f" of {now.steps:,}" if now.steps else "")),
        ("ended early", summary.get("early_end") or ""),
        ("weights here", f"of step {held['step']}, the {held['which']}" if held else ""),
        ("strategy and shares", f"{now.plan.get('strategy')}, {shares}"),
        ("learning rate, seed", f"{train.get('learning_rate')}, {train.get('seed')}"),
        ("speed", f"{speed:.3g} pairs/s, {tokens:,.0f} tokens/s"),
        ("efficiency (η)", "" if efficiency is None else f"{efficiency:.1%}"),
        ("time", f"{now.time.elapsed_seconds:,.0f} s"),
        ("checkpoints", str(len(saved)) + (f", the last of step {saved[-1].get('step')}" if saved else "")),
        ("restarts, warnings", f"{now.restarts}, {len(now.warnings)}"),
    ]
    if cost := summary.get("cost") or now.time.cost:
        rows.append(("cost", f"{cost['cost']:.3g} ({cost['energy_kwh']:.3g} kWh)"))
    return [(name, text) for name, text in rows if text]


def _ranks(now: Figures) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of the table of ranks: means over their last steps."""
    columns = ["rank", "host", "pairs a step", "pairs/s", "plan", "compute s", "sync s", "wait s", "peak memory GB"]
    rows = []
    for rank in now.ranks:
        planned = "–" if rank.planned_pairs_per_second is None else f"{rank.planned_pairs_per_second:.3g}"
        times = [f"{rank.latest[f'{part}_seconds']:.3g}" for part in ("compute", "sync", "wait")]
        first = [str(rank.rank), rank.host, str(rank.share), f"{rank.pairs_per_second:.3g}", planned]
        rows.append([*first, *times, f"{rank.latest['peak_memory_bytes'] / 1e9:.3g}"])
    return columns, rows


def samples(run: RunHistory) -> list[str]:
    """Prompts with the answers before and after, as rank 0 recorded them."""
    texts: dict[str, list[str]] = {}
    for event in run.events:
        for sample in (event.get("samples") or []) if event["kind"] == "samples" and event.get("rank") == 0 else ():
            answers = [f"{when}: {sample.get(when)}" for when in ("before", "after") if when in sample]
            texts.setdefault(sample["prompt"], []).extend(answers)
    return ["\n".join([prompt, *dict.fromkeys(answers)]) for prompt, answers in texts.items()]


def environment(run: RunHistory) -> dict[str, str]:
    """What a run was made with, name and value."""
    start = _start(run)
    named = {"commit": start.get("commit"), "platform": start.get("platform"), **(start.get("versions") or {})}
    return {name: str(value) for name, value in named.items() if value}


def _start(run: RunHistory) -> Record:
    """Rank 0's last record of a start."""
    starts = [event for event in run.events if event["kind"] == "start" and event.get("rank") == 0]
    return starts[-1] if starts else Record()


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty where there is none."""
    try:
        return read_file.read_object(folder / "summary.json", "the run's")
    except (OSError, UserError):
        return {}


def _clock(at: float) -> str:
    return time.strftime("%b %d %H:%M:%S", time.localtime(at))


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head or ())
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    first = f"<tr>{titles}</tr>" if head else ""
    return f'<div class="scroll"><table{" class=numbers" if head else ""}>{first}{body}</table></div>'


# ---- The model card --------------------------------------------------------------------------------------------------


def model_card(run: RunHistory, now: Figures, summary: dict[str, Any]) -> str:
    """The adapter's README.md, with the metadata that the Hugging Face hub reads."""
    from huggingface_hub import ModelCardData

    config = _start(run).get("config") or SettingsRecord()
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
    loss = f"preference-trained with the {train.get('loss')} loss (beta {train.get('beta')})"
    listed = [*facts(run, now, summary), ("plan", now.plan.get("reason") or "")]
    listed.append(("environment", ", ".join(f"{name} {value}" for name, value in environment(run).items())))
    texts = ["\n".join(f"    {shown(line)}" for line in text.splitlines()) for text in samples(run)]
    return TEMPLATE.format(
        card_data=data.to_yaml(),
        name=_as_text(run.name),
        method={"lora": "A LoRA adapter", "dora": "A DoRA adapter"}.get(str(model.get("method")), "All weights"),
        base=" ".join(shlex.quote(base).split()),
        base_shown=f"[{base}](https://huggingface.co/{base})" if is_hub_name else f"`{_as_text(base)}`",
        trained=loss if preference else "fine-tuned (SFT)",
        hosts=_as_text(", ".join(dict.fromkeys(rank.host for rank in now.ranks))),
        held_out="\n".join(f"| {' | '.join(row)} |" for row in held_out(run)),
        facts="\n".join(f"- {name}: {_as_text(text)}" for name, text in listed),
        samples="\n## Samples, before and after\n\n" + "\n\n".join(texts) + "\n" if texts else "",
    )


def _as_text(text: str) -> str:
    """A text as one line of Markdown, without markup of its own."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", shown(" ".join(text.split())))
