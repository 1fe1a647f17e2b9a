"""What a finished run leaves for people: curves.png, report.html, which needs no other file, and its model card.

All are made from the run's records and `summary.json`, so they can be made again, or of a run that is not over:
`python -m lib.dashboard --export RUN`.
"""

from __future__ import annotations

import base64
import html
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from lib.errors import UserError
from lib.report import charts
from lib.report.charts import Plotly
from lib.report.history import RunHistory, figures
from lib.report.model_card import CARD, CURVES, REPORT, model_card
from lib.system import files
from lib.system.model_folder import ADAPTER_WEIGHTS

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (after the backend is chosen)

STYLE = Path(__file__).with_suffix(".css")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
PICTURED = 4  # panels of learning


def write(folder: Path) -> list[Path]:
    """Writes a run's curves, its report and, where it has an adapter, its model card; returns what it wrote. Raises
    UserError: the folder has no records. OSError: the disk is full or not writable."""
    run = RunHistory(folder)
    while run.read():
        pass
    if not run.events and not run.series:
        raise UserError(f"{folder} has no records; a run's folder has them in logs/")
    written = {REPORT: report_html(run).encode("utf-8", "replace")}
    if panels := charts.learning([run])[:PICTURED]:
        written[CURVES] = png([(panel.title, panel.figure) for panel in panels])
    if (folder / ADAPTER_WEIGHTS).exists():
        written[CARD] = model_card(run).encode("utf-8", "replace")
    for name, content in written.items():
        files.write_atomically(folder / name, content)
    return [folder / name for name in written]


def draw(axis: Any, title: str, figure: Plotly) -> None:
    """The lines and points of a figure, as a panel."""
    y_axis = figure["layout"]["yaxis"]
    for trace in figure["data"]:
        look, symbols = trace["line"], trace.get("marker", {}).get("symbol", "circle")
        values = [float("nan") if value is None else value for value in trace["y"]]
        axis.plot(
            trace["x"],
            values,
            DASHES[look.get("dash", "solid")] if "lines" in trace["mode"] else "",
            marker="o" if "markers" in trace["mode"] else None,
            color=look["color"],
            linewidth=look.get("width", 1.4),
            markersize=4,
            alpha=trace.get("opacity", 1.0),
            label=html.unescape(trace["name"]).replace("$", r"\$") if trace.get("showlegend", True) else None,
        )
        undone = [i for i, symbol in enumerate(symbols if isinstance(symbols, list) else []) if symbol == "x"]
        axis.plot([trace["x"][i] for i in undone], [values[i] for i in undone], "x", markersize=10)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(figure["layout"]["xaxis"]["title"]["text"], fontsize=9)
    axis.set_ylabel(y_axis["title"]["text"], fontsize=9)
    if y_axis.get("tickformat") == ".1%":
        axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=1))
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)


def png(panels: Sequence[tuple[str, Plotly]], width: float = 3.4) -> bytes:
    """Figures with their titles in a row, as a picture. width: inches of a panel."""
    size = (width * len(panels), 0.82 * width)
    picture, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, figure) in zip(axes[0], panels, strict=True):
        draw(axis, title, figure)
    content = io.BytesIO()
    picture.savefig(content, dpi=130, format="png")
    pyplot.close(picture)
    return content.getvalue()


def _image(title: str, figure: Plotly) -> str:
    """A figure as an element that holds its picture: nothing is fetched."""
    content = base64.b64encode(png([(title, figure)], width=4)).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{content}">'


def report_html(run: RunHistory) -> str:
    """The whole report as one file of HTML."""
    now, escape = figures(run, time.time()), html.escape
    base = f"{(run.config.get('model') or {}).get('path')}, {now.state}. Plan: {now.plan.get('reason') or 'none'}"
    parts = [f'<h1>{escape(run.name)}</h1><p class="soft">{escape(base)}</p>']
    for section in charts.sections_of([run], now):
        parts.append(f"<h2>{escape(section.title)}</h2>")
        if section.rows:
            titles = "".join(f"<th>{escape(title)}</th>" for title in section.head or ())
            rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in section.rows]
            body = "".join(f"<tr>{row}</tr>" for row in [titles, *rows] if row)
            kind = " class=numbers" if titles else ""
            parts.append(f'<div class="scroll"><table{kind}>{body}</table></div>')
        parts += [f"<pre>{escape(text)}</pre>" for text in section.texts]
        parts.append(
            f'<div class="panels">{"".join(_image(panel.title, panel.figure) for panel in section.panels)}</div>'
        )
    settings = escape(json.dumps(run.config, indent=1))
    parts.append(f"<details><summary>Settings</summary><pre>{settings}</pre></details>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(run.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'
