"""The dashboard's page: its layout, what it shows of each run, and what it refreshes."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.dashboard import charts
from lib.dashboard.figures import Figures, RankFigures, figures
from lib.dashboard.history import RunHistory, runs_in
from lib.errors import UserError

POLL_SECONDS = 0.5  # between looks at the logs
REFRESH_SECONDS = 1.0  # between looks of a page at this process
LISTED_RUNS = 40
SHOWN_EVENTS = 30
STYLE = Path(__file__).with_suffix(".css")
GRAPH = {"displayModeBar": False, "displaylogo": False, "showLink": False, "responsive": True}


# The browser itself refuses whatever would come from, or go to, another place.
POLICY = "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "


POLICY += "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; frame-ancestors 'none'"
PAGE = """<!DOCTYPE html>
<html lang="en"><head>{%metas%}<meta name="viewport" content="width=device-width, initial-scale=1"><title>{%title%}</title>
<link rel="icon" href="data:,">{%css%}<style>STYLE</style></head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}
Tandem reads the records of runs; nothing leaves this machine.</footer></body></html>"""


# Cycles through the system's theme, dark and light; remembered by the browser.
THEME = """(clicks, theme) => {
  const next = clicks ? {auto: 'dark', dark: 'light', light: 'auto'}[theme || 'auto'] : theme || 'auto';
  document.documentElement.dataset.theme = next;
  return [next, 'Theme: ' + next];
}"""


class Watcher:
    """Reads the logs of the runs that somebody looks at, in a thread, so that a page never waits for a disk."""

    def __init__(self, folder: Path, given: Sequence[Path] = ()):
        self.folder, self.given = folder, [Path(path) for path in given]
        self.runs: dict[str, RunHistory] = {}  # by folder
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="logs", daemon=True)
        self.thread.start()

    def listed(self) -> list[Path]:
        """Runs to choose from: those given, or the newest of the folder."""
        return self.given or runs_in(self.folder)[:LISTED_RUNS]

    def look(self, folder: str) -> RunHistory | None:
        """A run that is watched from now on; None where it is none of those listed."""
        if folder not in self.runs and folder not in map(str, self.listed()):
            return None
        with self.lock:
            if folder not in self.runs:
                self.runs[folder] = RunHistory(Path(folder))
                self.runs[folder].read()  # a first piece at once, the rest in the thread
            return self.runs[folder]

    def close(self) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            for run in list(self.runs.values()):
                busy = True
                while busy and not self.ended.is_set():
                    started = time.perf_counter()
                    with self.lock:
                        busy = run.read()
                    # Half of one core at most: this may be a machine that trains.
                    self.ended.wait(time.perf_counter() - started if run.is_sampled else 0)


# ---- What a page holds


def make_app(watcher: Watcher) -> Any:
    """The Dash application.

    Raises:
        UserError: Dash is not installed.
    """
    try:
        import dash
    except ImportError as error:
        raise UserError("the dashboard needs Dash; run pip install -c constraints.txt dash") from error
    app = dash.Dash(
        "tandem",
        title="Tandem",
        update_title="",
        serve_locally=True,
        assets_folder=str(STYLE.with_suffix("")),  # there are none
        index_string=PAGE.replace("STYLE", STYLE.read_text()),
    )
    app.layout = lambda: _layout(dash, watcher)
    _callbacks(dash, app, watcher)

    def guard(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    app.server.after_request(guard)
    return app


def _layout(dash: Any, watcher: Watcher) -> Any:
    html, dcc = dash.html, dash.dcc
    chosen = [str(path) for path in (watcher.given or watcher.listed()[:1])]
    return html.Div(
        [
            html.A("Skip to the figures", href="#figures", className="skip"),
            dcc.Interval(id="tick", interval=1000 * REFRESH_SECONDS),
            dcc.Store(id="seen"),
            dcc.Store(id="theme", storage_type="local"),
            html.Header(
                [
                    html.H1("Tandem"),
                    html.Details(
                        [
                            html.Summary("Runs", id="chosen"),
                            html.Div(dcc.Checklist(id="runs", value=chosen, options=[])),
                        ],
                        className="runs",
                    ),
                    html.Span("", id="state", role="status"),
                    html.Span(className="space"),
                    html.Button("Theme: auto", id="theme-button", n_clicks=0),
                ]
            ),
            html.Main(
                [
                    html.Div(id="figures", className="grid top", tabIndex="-1"),
                    html.Section(id="comparison"),
                    html.Div([_panel(dash, name, title) for name, title, _ in charts.LEARNING], className="grid three"),
                    html.Section(id="machines", className="panel"),
                    html.Div(
                        [
                            _panel(dash, "seconds", "Where a step's time goes"),
                            _panel(dash, "speed", "Speed by rank"),
                            _panel(dash, "network", "Sync of every step"),
                        ],
                        className="grid three",
                    ),
                    html.Div(
                        [
                            *(_panel(dash, name, title) for name, (title, _, _) in charts.MEASURED.items()),
                            _panel(dash, "batch_curves", "Batch curves"),
                        ],
                        className="grid fit low",
                    ),
                    html.Section(id="warnings", className="hidden"),
                    html.Div(
                        [
                            _panel(dash, "timeline", "What happened when"),
                            html.Section(
                                [
                                    html.H2("Latest events", id="events-title"),
                                    html.Ol(
                                        id="events",
                                        className="events",
                                        tabIndex="0",
                                        **{"aria-labelledby": "events-title"},
                                    ),
                                ],
                                className="panel",
                            ),
                        ],
                        className="grid two",
                    ),
                ]
            ),
        ]
    )


def _panel(dash: Any, name: str, title: str) -> Any:
    """A chart under its title, with its newest value in words beside it."""
    html = dash.html
    graph = html.Div(
        dash.dcc.Graph(id=f"graph-{name}", config=GRAPH, responsive=True, style={"height": "100%"}),
        className="chart",
        role="img",
        **{"aria-label": f"chart: {title}"},
    )
    head = html.Div([html.H2(title), html.Span("", id=f"value-{name}")], className="head")
    return html.Section([head, graph], className="panel", id=f"panel-{name}")


GRAPHS = [name for name, *_ in charts.LEARNING] + ["seconds", "speed", "network", "timeline"]
OPTIONAL = ["batch_curves", *charts.MEASURED]  # their panels are there if there is something to draw


def _callbacks(dash: Any, app: Any, watcher: Watcher) -> None:
    out, state = dash.Output, dash.State
    app.clientside_callback(
        THEME,
        [out("theme", "data"), out("theme-button", "children")],
        dash.Input("theme-button", "n_clicks"),
        state("theme", "data"),
    )
    app.callback(
        {
            "options": out("runs", "options"),
            "chosen": out("chosen", "children"),
            "state": out("state", "children"),
            "figures": out("figures", "children"),
            "machines": out("machines", "children"),
            "comparison": out("comparison", "children"),
            "events": out("events", "children"),
            "warnings": out("warnings", "children"),
            "warned": out("warnings", "className"),
            "seen": out("seen", "data"),
            "graphs": {name: out(f"graph-{name}", "figure") for name in (*GRAPHS, *OPTIONAL)},
            "values": {name: out(f"value-{name}", "children") for name in (*GRAPHS, *OPTIONAL)},
            "panels": {name: out(f"panel-{name}", "className") for name in OPTIONAL},
        },
        {
            "tick": dash.Input("tick", "n_intervals"),
            "chosen": dash.Input("runs", "value"),
            "seen": state("seen", "data"),
        },
    )(lambda tick, chosen, seen: _update(dash, watcher, chosen or [], seen))


def _update(dash: Any, watcher: Watcher, chosen: list[str], seen: Any) -> dict[str, Any]:
    html, same = dash.html, dash.no_update
    chosen = chosen or [str(path) for path in watcher.listed()[:1]]  # the first run of a folder may have begun by now
    runs = [run for run in map(watcher.look, chosen) if run is not None]
    options = [{"label": path.name, "value": str(path)} for path in watcher.listed()]
    with watcher.lock:
        now = [figures(run, time.time()) for run in runs]
        versions = [[str(run.folder), run.version, one.state] for run, one in zip(runs, now, strict=True)]
        update: dict[str, Any] = {
            "options": options,
            "chosen": ", ".join(run.name for run in runs) or "choose a run",
            "state": _state(html, runs[0], now[0]) if runs else "",
            "figures": _headline(html, now[0]) if runs else [html.P(_nothing(watcher), className="note")],
            "machines": _machines(html, runs[0], now[0]) if runs else "",
            "seen": versions,
            "comparison": same,
            "events": same,
            "warnings": same,
            "warned": same,
            "graphs": dict.fromkeys((*GRAPHS, *OPTIONAL), same),
            "values": dict.fromkeys((*GRAPHS, *OPTIONAL), same),
            "panels": dict.fromkeys(OPTIONAL, same),
        }
        if versions == seen:
            return update
        update["comparison"] = _comparison(html, runs, now) if len(runs) > 1 else ""
        if not runs:
            return update
        run, one = runs[0], now[0]
        update["events"] = _events(html, run)
        graphs: dict[str, Any] = {name: charts.learning(runs, name) for name, *_ in charts.LEARNING}
        graphs |= {"seconds": charts.seconds(one), "speed": charts.speed(run, one)}
        graphs |= {"network": charts.network(run), "timeline": charts.timeline(run)}
        optional = {"batch_curves": charts.batch_curves(run)}
        optional |= {name: charts.measured(run, name) for name in charts.MEASURED}
        update["graphs"] = graphs | {name: figure or charts.EMPTY for name, figure in optional.items()}
        update["panels"] = {name: "panel" if figure else "hidden" for name, figure in optional.items()}
        update["warnings"] = _warnings(html, one)
        update["warned"] = "panel" if one.warnings else "hidden"
        update["values"] = _values(run, one)
    return update


def _nothing(watcher: Watcher) -> str:
    return f"No run in {watcher.folder.resolve()} has logs yet; this page shows the first one as soon as it begins."


def _values(run: RunHistory, now: Figures) -> dict[str, str]:
    shown = {
        name: text.format(value) for name, _, text in charts.LEARNING if (value := now.latest.get(name)) is not None
    }
    shown["speed"] = f"{now.pairs_per_second:.3g} pairs/s together"
    if now.busy is not None:
        shown["seconds"] = f"{now.busy:.0%} compute"
    if syncs := [rank.sync_seconds for rank in now.ranks]:
        shown["network"] = f"{1e3 * max(syncs):.3g} ms"
    for name, (_, factor, unit) in charts.MEASURED.items():
        found = [value for rank in now.ranks if (value := getattr(rank, name)) is not None]
        found = [value for value in found if value or name != "bytes_per_second"]  # who is alone sends nothing
        worst = min if name in ("bytes_per_second", "speed_limit") else max
        if found:
            shown[name] = f"{factor * worst(found):.3g} {unit}" if name != "retransmits" else f"{max(found):.0f}"
    return {name: shown.get(name, "") for name in (*GRAPHS, *OPTIONAL)}


def _state(html: Any, run: RunHistory, now: Figures) -> Any:
    words = now.state
    if now.state == "silent":
        words = f"silent for {duration(min(rank.heard_seconds for rank in now.ranks))}" if now.ranks else "silent"
    if run.is_sampled:
        words += ", reading the whole log"
    return html.Span(words, className=f"badge {now.state}")


def _headline(html: Any, now: Figures) -> list[Any]:
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


def _cards(html: Any, now: Figures) -> list[Any]:
    planned = f"plan: {now.planned_pairs_per_second:.3g}" if now.planned_pairs_per_second else ""
    held = now.held_out
    after = f"held out {held['loss']:.4f}" if held.get("loss") is not None else ""
    judged = f"held out {held['reward_accuracy']:.1%}" if held.get("reward_accuracy") is not None else ""
    steps = [html.Progress(value=str(now.step), max=str(now.steps))] if now.steps else []
    cards = [
        _card(html, "Step", f"{now.step:,}" + (f" / {now.steps:,}" if now.steps else ""), "", steps, name="step"),
        _card(html, "Loss", _written("{:.4f}", now.latest["loss"]), after, name="loss"),
        _card(html, "Accuracy", _written("{:.1%}", now.latest["reward_accuracy"]), judged, name="accuracy"),
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


def _card(html: Any, title: str, value: str, note: str, more: Sequence[Any] = (), name: str = "") -> Any:
    return html.Section(
        [html.H3(title), html.Strong(value, id=f"now-{name}"), *more, html.Small(note)], className="panel card"
    )


def _plan(html: Any, now: Figures) -> Any:
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    text = [html.H2(f"Plan: {now.strategy}, shares {shares}" if now.strategy else "Plan")]
    return html.Section([*text, html.P(now.reason or "none yet", className="note")], className="panel")


def _machines(html: Any, run: RunHistory, now: Figures) -> list[Any]:
    columns: list[tuple[str, Any]] = [
        ("rank", lambda rank: [_key(html, charts.place(run, (rank.rank, rank.host))), str(rank.rank)]),
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


def _missing(html: Any, run: RunHistory, now: Figures) -> list[Any]:
    """Whose records are elsewhere, and what brings them: a page that leaves ranks out has to say so."""
    if not now.missing:
        return []
    names = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
    host, logs = now.missing[0][1], run.folder.resolve() / "logs"
    text = f"Not shown: {names}. The records are on those hosts"
    text += "; bring them by " if now.state == "finished" else ", and come with the next checkpoint; now, by "
    words = ["rsync", "-a", f"{host}:{logs}/", f"{logs / host}/"]
    return [html.P([text, html.Code(shlex.join(words))], className="note missing")]


def _warnings(html: Any, now: Figures) -> list[Any]:
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


def _cell(html: Any, title: str, content: Any) -> Any:
    return html.Td(content, **{"data-label": title})


def _against(html: Any, value: float, goal: float | None, text: str) -> list[Any]:
    if not goal:
        return [text.format(value)]
    return [f"{text.format(value)} / {text.format(goal)}", _meter(html, value / goal)]


def _memory(html: Any, rank: RankFigures) -> list[Any]:
    used = rank.peak_memory_bytes
    if not rank.memory_limit_bytes:
        return [gigabytes(used)]
    part = used / rank.memory_limit_bytes
    return [f"{gigabytes(used)} / {gigabytes(rank.memory_limit_bytes)}", _meter(html, part, full=part > 0.9)]


def _waits(html: Any, rank: RankFigures) -> list[Any]:
    total = rank.compute_seconds + rank.sync_seconds + rank.wait_seconds
    part = rank.wait_seconds / total if total else 0.0
    return [f"{part:.0%} of its time", _meter(html, part, full=part > 0.2)]


def _meter(html: Any, part: float, full: bool = False) -> Any:
    width = f"{100 * max(0.0, min(1.0, part)):.0f}%"
    return html.Span(html.I(style={"width": width}), className="meter full" if full else "meter")


def _events(html: Any, run: RunHistory) -> list[Any]:
    told = charts.told_once(run.events)[-SHOWN_EVENTS:]
    return [
        html.Li(
            [
                html.Time(time.strftime("%H:%M:%S", time.localtime(event["time"]))),
                html.Span(charts.describe(event), className=event["kind"]),
            ]
        )
        for event in reversed(told)
    ]


def _comparison(html: Any, runs: Sequence[RunHistory], now: Sequence[Figures]) -> Any:
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


def _key(html: Any, number: int) -> Any:
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
