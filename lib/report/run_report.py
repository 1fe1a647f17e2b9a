"""What a finished run leaves for people: curves.png, report.html, which needs no other file, and its model card.

All are made from the run's records and `summary.json`, so they can be made again, or of a run that is not over:
`python -m lib.dashboard --export RUN`.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

from lib.config import read_file
from lib.errors import UserError, shown
from lib.plan.cost import RunCost
from lib.report import charts, pictures
from lib.report.figures import Figures, batch_curves, figures, held_out_now
from lib.report.history import RunHistory
from lib.system import files
from lib.system.model_folder import ADAPTER_WEIGHTS
from lib.system.records import Record, SettingsRecord

CARD = "README.md"
CURVES = "curves.png"
REPORT = "report.html"
SHOWN_EVENTS = 200
STYLE = Path(__file__).with_suffix(".css")
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


class FinalCheckpoint(TypedDict):
    """Which weights the run's folder holds, as lib/training/summary.py has it."""

    which: str
    step: int


class Summary(TypedDict, total=False):
    """What the pages take from summary.json."""

    model: str
    pairs_per_second: float
    efficiency: float | None
    cost: RunCost | None
    early_end: str | None
    checkpoint: FinalCheckpoint


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
    now = figures(run, time.time())
    summary = _summary(folder / "summary.json")
    report, curves, log = folder / REPORT, folder / CURVES, folder / "logs" / "rank-000.jsonl"
    files.write_atomically(report, _encoded(report_html(run, now, summary)))
    if log.is_file():  # not where the run's other logs were copied alone
        pictures.plot_curves(log, curves)
    written = [report, *([curves] if curves.exists() else [])]
    if (folder / ADAPTER_WEIGHTS).exists():
        card = folder / CARD
        files.write_atomically(card, _encoded(model_card(run, now, summary)))
        written.append(card)
    return written


def _encoded(text: str) -> bytes:
    """A page's bytes; half a surrogate pair of somebody's records becomes a question mark."""
    return text.encode("utf-8", "replace")


def report_html(run: RunHistory, now: Figures, summary: Summary) -> str:
    """One page: figures, curves, plan, samples, environment, costs. Nothing in it is fetched from anywhere."""
    start = _start(run)
    table = _table(["held out", "before", "after"], held_out(run))
    parts = [f"<h1>{html.escape(run.name)}</h1>", f"<p class=soft>{html.escape(now.reason or '')}</p>"]
    parts += [_table(None, facts(run, now, summary)), table, "<h2>Curves</h2>", pictures.curves_svg(run)]
    if rounds := pictures.rounds_svg(run):
        parts += ["<h2>Rounds</h2>", rounds]
    parts += ["<h2>Ranks</h2>", _table(*ranks(now)), *_missing(now)]
    if curves := batch_curves(run):
        drawn = [(charts.label_of(who), curve) for who, _, curve in curves]
        key = curves[0][2].key
        parts += [f"<h2>Batch curves</h2><p class=soft>{html.escape(str(key or curves[0][2].source))}</p>"]
        parts += [f'<div class="scroll">{pictures.svg_of(pictures.batch_curves_figure(drawn))}</div>']
    if now.warnings:
        warned = [
            (_clock(at), "" if step is None else f"step {step}", text)
            for at, step, text in now.warnings[-SHOWN_EVENTS:]
        ]
        parts += ["<h2>Warnings</h2>", _table(None, warned)]
    if shown := samples(run):
        parts += ["<h2>Samples before and after</h2>", *(f"<pre>{html.escape(text)}</pre>" for text in shown)]
    events = [event for event in charts.distinct_events(run.events) if event["kind"] not in ("checkpoint", "warning")]
    described = [(_clock(event["time"]), charts.describe(event)) for event in events[-SHOWN_EVENTS:]]
    parts += ["<h2>What happened when</h2>", _table(None, described)]
    parts += ["<h2>Environment</h2>", _table(None, list(environment(run).items()))]
    settings = html.escape(json.dumps(start.get("config", {}), indent=1))
    parts += [f"<details><summary>Settings</summary><pre>{settings}</pre></details>"]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(run.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style>"
    )
    body = "".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def model_card(run: RunHistory, now: Figures, summary: Summary) -> str:
    """The adapter's README.md, with the metadata that the Hugging Face hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

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
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=plain(run.name),
        method={"lora": "A LoRA adapter", "dora": "A DoRA adapter"}.get(str(model.get("method")), "All weights"),
        base=" ".join(shlex.quote(base).split()),
        base_shown=f"[{base}](https://huggingface.co/{base})" if is_hub_name else f"`{plain(base)}`",
        trained=f"preference-trained with the {train.get('loss')} loss (beta {train.get('beta')})"
        if preference
        else "fine-tuned (SFT)",
        environment=plain(", ".join(f"{name} {value}" for name, value in environment(run).items())),
        reason=plain(now.reason or ""),
        hosts=plain(", ".join(dict.fromkeys(rank.host for rank in now.ranks))),
        held_out=held_out(run),
        facts=[(name, plain(text)) for name, text in facts(run, now, summary)],
        samples=["\n".join(f"    {shown(line)}" for line in text.splitlines()) for text in samples(run)],
    )
    return str(card)


def plain(text: str) -> str:
    """Text of others as one line of Markdown, without markup of its own."""
    return re.sub(r"([\\`*<>\[\]|])", r"\\\1", shown(" ".join(text.split())))


# ---- What both pages show


def held_out(run: RunHistory) -> list[tuple[str, str, str]]:
    """Metric, before, after: of rank 0's first evaluation, and of the weights that the run's folder holds."""
    evaluations = [*charts.evaluations(run)[:1], held_out_now(run.events)]
    rows = []
    for name, title, text in charts.HELD_OUT:
        values = [value for event in evaluations if (value := charts.metric_of(event, name)) is not None]
        if values:
            rows.append((title, text.format(values[0]), text.format(values[-1])))
    return rows


def facts(run: RunHistory, now: Figures, summary: Summary) -> list[tuple[str, str]]:
    """How the run went, name and value."""
    config = _start(run).get("config") or SettingsRecord()
    train, data = config.get("train") or {}, config.get("data") or {}
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    saved = [event for event in run.events if event["kind"] == "checkpoint"]
    speed = summary.get("pairs_per_second", now.pairs_per_second)
    efficiency = summary.get("efficiency", now.efficiency)
    rows = [
        ("state", now.state),
        ("data", str(data.get("train"))),
        ("steps", f"{now.step:,}" + (f" of {now.steps:,}" if now.steps else "")),
        *([("ended early", why)] if (why := summary.get("early_end")) else []),
        *([("weights here", text)] if (text := _weights_here(summary.get("checkpoint"))) else []),
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


def _weights_here(held: FinalCheckpoint | None) -> str:
    """Which checkpoint the run's folder holds; empty where nobody knows."""
    if held is None:
        return ""
    return f"of step {held['step']}, " + ("of the lowest held-out loss" if held["which"] == "best" else "the last")


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
    recorded = [event for event in run.events if event["kind"] == "samples" and event.get("rank") == 0]
    texts: dict[str, list[str]] = {}
    for event in recorded:
        for one in event.get("samples") or []:
            answers = [f"{when}: {one.get(when)}" for when in ("before", "after") if when in one]
            texts.setdefault(one["prompt"], []).extend(answers)
    return ["\n".join([prompt, *dict.fromkeys(answers)]) for prompt, answers in texts.items()]


def environment(run: RunHistory) -> dict[str, str]:
    """What a run was made with, name and value."""
    start = _start(run)
    facts = {"commit": start.get("commit"), "platform": start.get("platform"), **(start.get("versions") or {})}
    return {name: str(value) for name, value in facts.items() if value}


def _clock(at: float) -> str:
    return time.strftime("%b %d %H:%M:%S", time.localtime(at))


def _missing(now: Figures) -> list[str]:
    hosts = ", ".join(f"{rank} ({host})" for rank, host in now.missing)
    return [
        f"<p class=soft>Records of rank {html.escape(hosts)} are on those hosts, and not in these figures.</p>"
    ] * bool(hosts)


def _start(run: RunHistory) -> Record:
    """Rank 0's last record of a start."""
    starts = [event for event in run.events if event["kind"] == "start" and event.get("rank") == 0]
    return starts[-1] if starts else Record()


def _summary(path: Path) -> Summary:
    """summary.json; empty where there is none that can be read."""
    try:
        stored = read_file.read_object(path, "the run's")
    except (OSError, UserError):
        return {}
    return cast(Summary, {name: value for name, value in stored.items() if _fits(name, value)})


def _fits(name: str, value: object) -> bool:
    """Whether a figure of summary.json is of its type: anybody may have changed the file."""
    fields = value if isinstance(value, dict) else {}
    if name in ("pairs_per_second", "efficiency"):
        return _is_figure(value) or (value is None and name == "efficiency")
    if name == "cost":
        return value is None or (_is_figure(fields.get("cost")) and _is_figure(fields.get("energy_kwh")))
    if name == "checkpoint":
        return value is None or (isinstance(fields.get("which"), str) and isinstance(fields.get("step"), int))
    return value is None or isinstance(value, str)


def _is_figure(value: object) -> bool:
    """Whether it is a number that can be written as a float: JSON's integers have any number of digits."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _table(head: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head or ())
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    first = f"<tr>{titles}</tr>" if head else ""
    return f'<div class="scroll"><table{" class=numbers" if head else ""}>{first}{body}</table></div>'
