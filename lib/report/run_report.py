"""What a finished run leaves for people: curves.png, report.html, which needs no other file, and its model card.

All are made from the run's records and `summary.json`, so they can be made again, or of a run that is not over:
`python -m lib.dashboard --export RUN`.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import UserError, shown
from lib.report import charts
from lib.report.charts import PageSection, Panel
from lib.report.history import RunFigures, RunHistory, figures
from lib.system import files
from lib.system.model_folder import ADAPTER_WEIGHTS

CARD, CURVES, REPORT = "README.md", "curves.png", "report.html"
ON_CARD = ("Held out", "Figures", "Samples before and after", "How it was made")  # sections of the model card


def model_card(run: RunHistory) -> str:
    """The adapter's README.md, with the metadata that the Hugging Face hub reads."""
    from huggingface_hub import ModelCardData

    now, model, train = figures(run, time.time()), run.config["model"], run.config["train"]
    base, loss = str(run.stored_summary.get("model") or model.get("path")), train.get("loss")
    is_hub_name = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", base)) and not Path(base).exists()
    data = ModelCardData(
        base_model=base if is_hub_name else None,  # the hub refuses a path
        library_name="mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "tandem", *["dpo"] * (loss == "sigmoid"), *["preference"] * (loss != "sft")],
    )
    method = {"lora": "A LoRA adapter", "dora": "A DoRA adapter"}.get(str(model.get("method")), "All weights")
    shown_base = f"[{base}](https://huggingface.co/{base})" if is_hub_name else f"`{_as_text(base)}`"
    preference = f"preference-trained with the {loss} loss (beta {train.get('beta')})"
    trained = "fine-tuned (SFT)" if loss == "sft" else preference
    hosts = _as_text(", ".join(dict.fromkeys(rank["host"] for rank in now.summary["ranks"])))
    options = run.stored_summary.get("generate_options", [])
    words = ["mlx_lm", "generate", "--model", " ".join(base.split()), "--adapter-path", ".", "--prompt", "..."]
    words = ["lib.export", ".", "--to", "fused"] if options is None else [*words, *options]  # with its chat template
    command = shown(f"python -m {shlex.join(words)}")
    parts = [f"---\n{data.to_yaml()}\n---", f"# {_as_text(run.name)}"]
    parts += [f"{method} of {shown_base}, {trained} by Tandem on {hosts}.", f"![metrics]({CURVES})", f"    {command}"]
    for section in charts.sections_of([run], now):
        if section.title in ON_CARD:
            rows = [[_as_text(cell) for cell in row] for row in section.rows]
            head = section.head or [""] * len(rows[0]) if rows else []
            lines = [head, ["---"] * len(head), *rows] if rows else []
            parts += [f"## {section.title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
            parts += ["\n".join(f"    {shown(line)}" for line in text.splitlines()) for text in section.texts]
    parts.append(f"Plan: {_as_text(now.plan.get('reason') or 'none')}. `{REPORT}` has all curves, ranks and settings.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _as_text(text: str) -> str:
    """A text as one line of Markdown, without markup of its own."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", shown(" ".join(text.split())))


STYLE = Path(__file__).with_suffix(".css")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PICTURED = 4  # panels of learning
PANEL_INCHES, DOTS_PER_INCH = (3.6, 2.95), 130
PLACE = 0.2, 0.16, 0.77, 0.75  # of the axes in a panel: to look where labels end would take as long as drawing


def write(folder: Path) -> list[Path]:
    """Writes a run's curves, its report and, where it has an adapter, its model card; returns what it wrote. Raises
    UserError: the folder has no records. OSError: the disk is full or not writable."""
    run = RunHistory(folder)
    while run.read():
        pass
    if not run.events and not run.series:
        raise UserError(f"{folder} has no records; a run's folder has them in logs/")
    now = figures(run, time.time())
    pictured = [(section, [*map(picture, section.panels)]) for section in charts.sections_of([run], now)]
    written = {REPORT: report_html(run, now, pictured).encode("utf-8", "replace")}
    if learning := next((pictures for section, pictures in pictured if section.title == charts.LEARNING), None):
        written[CURVES] = png(learning[:PICTURED])
    if (folder / ADAPTER_WEIGHTS).exists():
        written[CARD] = model_card(run).encode("utf-8", "replace")
    for name, content in written.items():
        files.write_atomically(folder / name, content)
    return [folder / name for name in written]


def picture(panel: Panel) -> np.ndarray:
    """A panel with its title, drawn: uint8 [height, width, 4]."""
    from matplotlib import figure as plot  # here: half a second that the start of a run would wait for
    from matplotlib import ticker
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas, figure = FigureCanvasAgg(plot.Figure(PANEL_INCHES, DOTS_PER_INCH)), panel.figure
    axis: Any = canvas.figure.add_axes(PLACE)
    y_axis = figure["layout"]["yaxis"]
    for trace in figure["data"]:
        look, symbols = trace["line"], trace.get("marker", {}).get("symbol", "circle")
        values = [float("nan") if value is None else value for value in trace["y"]]
        label = html.unescape(trace["name"]).replace("$", r"\$")
        lines = DASHES[look.get("dash", "solid")] if "lines" in trace["mode"] else ""
        shown = {"color": look["color"], "linewidth": look.get("width", 1.4)}
        marker = "o" if "markers" in trace["mode"] else None
        axis.plot(trace["x"], values, lines, marker=marker, markersize=4, label=label, **shown)
        undone = [i for i, symbol in enumerate(symbols if isinstance(symbols, list) else []) if symbol == "x"]
        axis.plot([trace["x"][i] for i in undone], [values[i] for i in undone], "x", markersize=10)
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(figure["layout"]["xaxis"]["title"]["text"], fontsize=9)
    axis.set_ylabel(y_axis["title"]["text"], fontsize=9)
    if y_axis.get("tickformat") == ".1%":
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=1))
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def png(pictures: Sequence[np.ndarray]) -> bytes:
    """Pictures beside each other, as a file."""
    from matplotlib import image

    content = io.BytesIO()
    image.imsave(content, np.hstack(pictures), format="png")
    return content.getvalue()


def report_html(run: RunHistory, now: RunFigures, pictured: Sequence[tuple[PageSection, Sequence[np.ndarray]]]) -> str:
    """The whole report as one file of HTML."""
    escape = html.escape
    base = f"{run.config['model'].get('path')}, {now.state}. Plan: {now.plan.get('reason') or 'none'}"
    parts = [f'<h1>{escape(run.name)}</h1><p class="soft">{escape(base)}</p>']
    for section, pictures in pictured:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.rows:
            titles = "".join(f"<th>{escape(title)}</th>" for title in section.head or ())
            rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows]
            body = "".join(f"<tr>{row}</tr>" for row in [titles, *rows] if row)
            kind = " class=numbers" if titles else ""
            parts.append(f'<div class="scroll"><table{kind}>{body}</table></div>')
        parts += [f"<pre>{escape(text)}</pre>" for text in section.texts]
        encoded = [base64.b64encode(png([each])).decode() for each in pictures]
        images = [
            f'<img alt="{escape(panel.title)}" src="data:image/png;base64,{data}">'  # nothing is fetched
            for panel, data in zip(section.panels, encoded, strict=True)
        ]
        parts.append(f'<div class="panels">{"".join(images)}</div>')
    settings = escape(json.dumps(run.config, indent=1))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(run.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
