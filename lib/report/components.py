"""What the dashboard's page says in words and tables: Dash elements made from the figures of runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lib.report import charts
from lib.report.figures import Figures, RankFigures
from lib.report.history import RunHistory

SHOWN_EVENTS = 30


def chart_values(now: Figures) -> dict[str, str]:
    """The newest value of a chart in words, by the chart's name."""
    shown = {
        name: text.format(value) for name, _, text in charts.LEARNING if (value := now.latest.get(name)) is not None
    }
    shown["speed"] = f"{now.pairs_per_second:.3g} pairs/s together"
    if now.busy is not None:
        shown["seconds"] = f"{now.busy:.0%} compute"
    if syncs := [rank.sync_seconds for rank in now.ranks]:
        shown["network"] = f"{1e3 * max(syncs):.3g} ms"
    for name, (_, factor, unit) in charts.MEASURED.items():
        known = [value for rank in now.ranks if (value := getattr(rank, name)) is not None]
        known = [value for value in known if value or name != "bytes_per_second"]  # who is alone sends nothing
        worst = min if name in ("bytes_per_second", "speed_limit") else max
        if known:
            shown[name] = f"{factor * worst(known):.3g} {unit}" if name != "retransmits" else f"{max(known):.0f}"
    return shown


def state_badge(html: ModuleType, run: RunHistory, now: Figures) -> Any:
    words = now.state
    if now.state == "silent":
        words = f"silent for {duration(min(rank.heard_seconds for rank in now.ranks))}" if now.ranks else "silent"
    if run.is_sampled:
        words += ", reading the whole log"
    return html.Span(words, className=f"badge {now.state}")


def headline(html: ModuleType, now: Figures) -> list[Any]:
    if now.efficiency is not None:
        alone = f"{now.solo_pairs_per_second:.3g} pairs/s"
        note = f"of what the hosts do alone, added up: {now.pairs_per_second:.3g} of {alone}"
    else:
        note = "the share of what all hosts would do alone; known once they are measured: make calibrate"
    large = html.Section(
        [
            html.H2("Efficiency, η"),
            html.Strong("not known" if now.efficiency is None else f"{now.efficiency:.0%}", id="efficiency"),
            html.Small(note),
        ],
        className="panel eta" if now.efficiency is not None else "panel eta none",
    )
    return [
        large,
        html.Div(
            [html.Div(_cards(html, now), className="cards"), _plan(html, now)], className="grid", style={"marginTop": 0}
        ),
    ]


def _cards(html: ModuleType, now: Figures) -> list[Any]:
    planned = f"plan: {now.planned_pairs_per_second:.3g}" if now.planned_pairs_per_second else ""
    held = now.held_out
    held_loss = "" if (loss := held.get("loss")) is None else f"held out {loss:.4f}"
    held_accuracy = "" if (accuracy := held.get("reward_accuracy")) is None else f"held out {accuracy:.1%}"
    steps = [html.Progress(value=str(now.step), max=str(now.steps))] if now.steps else []
    cards = [
        _card(html, "Step", f"{now.step:,}" + (f" / {now.steps:,}" if now.steps else ""), "", steps, name="step"),
        _card(html, "Loss", _written("{:.4f}", now.latest["loss"]), held_loss, name="loss"),
        _card(html, "Accuracy", _written("{:.1%}", now.latest["reward_accuracy"]), held_accuracy, name="accuracy"),
        _card(html, "Pairs/s", f"{now.pairs_per_second:.3g}", planned, name="pairs-per-second"),
        _card(
            html,
            "Time left" if now.state != "finished" else "Time",
            duration(now.elapsed_seconds) if now.state == "finished" else _written_duration(now.left_seconds),
            _so_far(now),
            name="left",
        ),
    ]
    if now.cost is not None and now.cost_at_end is not None:
        at_end = f"{money(now.cost_at_end['cost'])} at the end, {now.cost_at_end['energy_kwh']:.3g} kWh"
        if now.state == "finished":
            at_end = f"{now.cost['energy_kwh']:.3g} kWh"
        title = "Cost" if now.state == "finished" else "Cost so far"
        cards.append(_card(html, title, money(now.cost["cost"]), at_end, name="cost"))
    hosts = {rank.host for rank in now.ranks} | {host for _, host in now.missing}
    troubles = f"{_counted(len(now.warnings), 'warning')}, {_counted(now.restarts, 'restart')}"
    cards.append(_card(html, "Hosts", str(len(hosts)), troubles, name="hosts"))
    return cards


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _so_far(now: Figures) -> str:
    if now.state == "finished":
        return ""
    end = ""
    if now.left_seconds:
        day = "%a %d %b, " if now.left_seconds > 12 * 3600 else ""
        end = time.strftime(f", ends at {day}%H:%M", time.localtime(time.time() + now.left_seconds))
    return f"{duration(now.elapsed_seconds)} so far{end}"


def _card(html: ModuleType, title: str, value: str, note: str, more: Sequence[Any] = (), name: str = "") -> Any:
    return html.Section(
        [html.H3(title), html.Strong(value, id=f"now-{name}"), *more, html.Small(note)], className="panel card"
    )


def _plan(html: ModuleType, now: Figures) -> Any:
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    text = [html.H2(f"Plan: {now.strategy}, shares {shares}" if now.strategy else "Plan")]
    return html.Section([*text, html.P(now.reason or "none yet", className="note")], className="panel")


def machines(html: ModuleType, run: RunHistory, now: Figures) -> list[Any]:
    columns: list[tuple[str, Any]] = [
        ("rank", lambda rank: [_key(html, charts.rank_index(run, (rank.rank, rank.host))), str(rank.rank)]),
        ("host", lambda rank: rank.host),
        ("pairs a step", lambda rank: "–" if rank.share is None else str(rank.share)),
        (
            "pairs/s, of plan",
            lambda rank: _against(html, rank.pairs_per_second, rank.planned_pairs_per_second, "{:.3g}"),
        ),
        ("memory, of limit", lambda rank: _memory(html, rank)),
        ("waits", lambda rank: _waits(html, rank)),
        ("sends", lambda rank: "–" if not rank.bytes_per_second else f"{rank.bytes_per_second / 1e6:.3g} MB/s"),
        ("last record", lambda rank: f"{duration(max(0.0, rank.heard_seconds))} ago"),
    ]
    if any(rank.temperature_celsius is not None for rank in now.ranks):
        columns.append(("temperature", lambda rank: _written("{:.0f} °C", rank.temperature_celsius)))
    if any(rank.power_watts is not None for rank in now.ranks):
        columns.append(("power", lambda rank: _written("{:.0f} W", rank.power_watts)))
    if any(rank.speed_limit is not None for rank in now.ranks):
        columns.append(("CPU speed", lambda rank: _written("{:.0%} of full", rank.speed_limit)))
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title, _ in columns]))
    rows = [html.Tr([_cell(html, title, write(rank)) for title, write in columns]) for rank in now.ranks]
    table = html.Table([head, html.Tbody(rows)], className="wide", id="ranks")
    return [html.H2("Ranks and hosts"), html.Div(table, className="scroll"), *_missing(html, run, now)]


def _missing(html: ModuleType, run: RunHistory, now: Figures) -> list[Any]:
    """Whose records are elsewhere, and what brings them: a page that leaves ranks out has to say so."""
    if not now.missing:
        return []
    names = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
    host, logs = now.missing[0][1], run.folder.resolve() / "logs"
    text = f"Not shown: {names}. The records are on those hosts"
    text += "; bring them by " if now.state == "finished" else ", and come with the next checkpoint; now, by "
    words = ["rsync", "-a", f"{host}:{logs}/", f"{logs / host}/"]
    return [html.P([text, html.Code(shlex.join(words))], className="note missing")]


def warnings(html: ModuleType, now: Figures) -> list[Any]:
    items = [
        html.Li(
            [
                html.Time(time.strftime("%H:%M:%S", time.localtime(at))),
                html.Span((f"step {step}: " if step is not None else "") + text),
            ]
        )
        for at, step, text in reversed(now.warnings[-SHOWN_EVENTS:])
    ]
    title = html.H2(f"Warnings ({len(now.warnings)})", id="warnings-title")
    return [title, html.Ol(items, className="events", tabIndex="0", **{"aria-labelledby": "warnings-title"})]


def _cell(html: ModuleType, title: str, content: Any) -> Any:
    return html.Td(content, **{"data-label": title})


def _against(html: ModuleType, value: float, goal: float | None, text: str) -> list[Any]:
    if not goal:
        return [text.format(value)]
    return [f"{text.format(value)} / {text.format(goal)}", _meter(html, value / goal)]


def _memory(html: ModuleType, rank: RankFigures) -> list[Any]:
    used = rank.peak_memory_bytes
    if not rank.memory_limit_bytes:
        return [gigabytes(used)]
    part = used / rank.memory_limit_bytes
    return [f"{gigabytes(used)} / {gigabytes(rank.memory_limit_bytes)}", _meter(html, part, full=part > 0.9)]


def _waits(html: ModuleType, rank: RankFigures) -> list[Any]:
    total = rank.compute_seconds + rank.sync_seconds + rank.wait_seconds
    part = rank.wait_seconds / total if total else 0.0
    return [f"{part:.0%} of its time", _meter(html, part, full=part > 0.2)]


def _meter(html: ModuleType, part: float, full: bool = False) -> Any:
    width = f"{100 * max(0.0, min(1.0, part)):.0f}%"
    return html.Span(html.I(style={"width": width}), className="meter full" if full else "meter")


def events(html: ModuleType, run: RunHistory) -> list[Any]:
    newest = charts.distinct_events(run.events)[-SHOWN_EVENTS:]
    return [
        html.Li(
            [
                html.Time(time.strftime("%H:%M:%S", time.localtime(event["time"]))),
                html.Span(charts.describe(event), className=event["kind"]),
            ]
        )
        for event in reversed(newest)
    ]


def comparison(html: ModuleType, runs: Sequence[RunHistory], now: Sequence[Figures]) -> Any:
    titles = ("run", "state", "strategy", "step", "loss", "accuracy", "held-out loss", "pairs/s", "η", "time", "cost")
    rows = []
    for number, (run, one) in enumerate(zip(runs, now, strict=True)):
        cost = one.cost["cost"] if one.cost else None
        values: list[Any] = [[_key(html, number), run.name], one.state, one.strategy or "–", f"{one.step:,}"]
        values += [_written("{:.4f}", one.latest["loss"]), _written("{:.1%}", one.latest["reward_accuracy"])]
        values += [_written("{:.4f}", one.held_out.get("loss")), f"{one.pairs_per_second:.3g}"]
        values += [
            _written("{:.0%}", one.efficiency),
            duration(one.elapsed_seconds),
            "–" if cost is None else money(cost),
        ]
        rows.append(html.Tr([_cell(html, title, value) for title, value in zip(titles, values, strict=True)]))
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    note = html.P("The curves below are of all of them; machines and events of the first.", className="note")
    table = html.Div(html.Table([head, html.Tbody(rows)], className="wide"), className="scroll")
    return html.Div([html.H2("Runs compared"), table, note], className="panel", style={"marginTop": ".8rem"})


def _key(html: ModuleType, number: int) -> Any:
    """How the lines of a run, or of a rank, look."""
    line = charts.style(number)
    border = {"solid": "solid", "dash": "dashed"}.get(line["dash"], "dotted")
    return html.I(className="key", style={"borderTop": f"3px {border} {line['color']}"})


def _written(text: str, value: float | None) -> str:
    return "–" if value is None else text.format(value)


def _written_duration(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def money(amount: float) -> str:
    """Two digits after the point, or two that count."""
    return f"{amount:.2f}" if amount >= 1 or amount == 0 else f"{amount:.2g}"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def duration(seconds: float) -> str:
    """E.g. "41 s", "12 min", "3.4 h", "2.1 days"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
