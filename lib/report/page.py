"""The dashboard: runs as they go, in a browser.

    python -m lib.dashboard                          the newest run of runs/, at the address that it prints
    python -m lib.dashboard runs/A runs/B            these, compared
    python -m lib.dashboard --export runs/A          writes report.html, curves.png, model card; serves nothing

It reads the logs that ranks write, so it may be started and ended at any time, on the launching machine. All that the
page needs comes from this process. The printed address holds a token of this process, without which it answers nothing.
It listens on the loopback only; from elsewhere, `ssh -L 8050:127.0.0.1:8050 HOST`.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import logging
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.config import command_line
from lib.errors import UserError, shown
from lib.report import charts
from lib.report.history import Figures, RankFigures, RunHistory, figures, runs_in
from lib.system import mpi_and_blas
from lib.system.records import Record
from lib.system.terminal import duration, size_text

POLL_SECONDS = 0.5  # between looks at the logs
REFRESH_SECONDS = 1.0  # between looks of a page at this process
LISTED_RUNS = 40
SHOWN_EVENTS = 30
STYLE = Path(__file__).with_suffix(".css")
# The browser itself refuses what would come from, or go to, another place.
POLICY = "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
POLICY += "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; frame-ancestors 'none'"
PAGE = """<!DOCTYPE html>
<html lang="en"><head>{%metas%}<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{%title%}</title>
<link rel="icon" href="data:,">{%css%}<style>STYLE</style></head>
<body>{%app_entry%}<footer>{%config%}{%scripts%}{%renderer%}
Tandem reads the records of runs; nothing leaves this machine.</footer></body></html>"""
# Cycles through the system's theme, dark and light; remembered by the browser.
THEME = """(clicks, theme) => {
  const next = clicks ? {auto: 'dark', dark: 'light', light: 'auto'}[theme || 'auto'] : theme || 'auto';
  document.documentElement.dataset.theme = next;
  return [next, 'Theme: ' + next];
}"""
COOKIE = "tandem-dashboard"  # and the port: browsers send a host's cookies to all of its ports
UNKNOWN = "This dashboard wants its token: open the whole address that `python -m lib.dashboard` printed.\n"
GRAPH_OPTIONS = {"displayModeBar": False, "displaylogo": False, "showLink": False, "responsive": True}
TITLES = {name: title for name, title, _ in charts.LEARNING}
TITLES |= {"seconds": "Where a step's time goes", "speed": "Speed by rank", "network": "Sync of every step"}
TITLES |= {"timeline": "What happened when"}
OPTIONAL = {name: title for name, (title, *_) in (*charts.MEASURED.items(), *charts.OF_ROUNDS.items())}
OPTIONAL |= {"batches": "Batch curves"}  # panels that are there if there is something to draw
ROUND_PARTS = ("sampling", "waiting", "judging", "training")  # of a rank's time


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    options = _parse(arguments)
    if options.export:
        from lib.report import run_report

        for path in run_report.write(Path(options.export)):
            print(shown(str(path)))
        return 0
    watcher, token = Watcher(Path(options.runs), [Path(run) for run in options.run]), secrets.token_urlsafe(24)
    app = make_app(watcher, token)
    is_empty = not options.run and not runs_in(Path(options.runs))
    note = f"dashboard: no run in {options.runs}/ yet; one that starts is shown" if is_empty else None
    with contextlib.suppress(KeyboardInterrupt):
        _serve(app, options.host, options.port, token, note)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.dashboard", description=__doc__)
    parser.add_argument("run", nargs="*", metavar="RUN", help="folders of runs (default: the newest of --runs)")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="folder that holds runs (default: runs)")
    parser.add_argument(
        "--export", metavar="RUN", help="write its report.html, curves.png and README.md, serve nothing"
    )
    parser.add_argument("--port", type=int, default=8050, help="default: 8050; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: the loopback)")
    options = parser.parse_args(arguments)
    for run in options.run:
        if not Path(run).is_dir():
            raise UserError(f"{run} is not a run's folder; runs/ has those of this machine")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port} is not in 0 to 65535")
    return options


def _serve(app: Any, host: str, port: int, token: str, note: str | None = None) -> None:
    """Serves until it is interrupted; `note` is printed below the address, which holds the token.

    Raises:
        UserError: the port is taken.
    """
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"cannot listen at {host}:{port} ({why}); give another --port") from None
    port = listener.getsockname()[1]
    server = make_server(host, port, app.server, threaded=True, fd=listener.fileno())
    print(f"dashboard: http://{host}:{port}/?token={token}    (Ctrl-C ends it)", flush=True)
    if note:
        print(note, flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("dashboard: what it shows, and its token, travel unencrypted; ssh -L does better", file=sys.stderr)
    server.serve_forever()


class Watcher:
    """Reads the logs of the runs that are looked at, in a thread, so that a page never waits for a disk."""

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
                is_new = True
                while is_new and not self.ended.is_set():
                    with self.lock:
                        is_new = run.read()


# ---- The application -------------------------------------------------------------------------------------------------


def make_app(watcher: Watcher, token: str) -> Any:
    """The Dash application, for those who have the token: in the address (?token=), then in a cookie.

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
        index_string=PAGE.replace("STYLE", STYLE.read_text(encoding="utf-8")),
    )
    app.layout = lambda: page_layout(dash, [str(path) for path in (watcher.given or watcher.listed()[:1])])
    out, state, names = dash.Output, dash.State, (*TITLES, *OPTIONAL)
    theme = [out("theme", "data"), out("theme-button", "children")]
    app.clientside_callback(THEME, theme, dash.Input("theme-button", "n_clicks"), state("theme", "data"))
    texts = ("chosen", "state", "figures", "machines", "comparison", "rounds", "events", "warnings")
    app.callback(
        {
            **{name: out(name, "children") for name in texts},
            "options": out("runs", "options"),
            "warned": out("warnings", "className"),
            "shown": out("main", "className"),
            "seen": out("seen", "data"),
            "graphs": {name: out(f"graph-{name}", "figure") for name in names},
            "values": {name: out(f"value-{name}", "children") for name in names},
            "panels": {name: out(f"panel-{name}", "className") for name in OPTIONAL},
        },
        {
            "tick": dash.Input("tick", "n_intervals"),
            "chosen": dash.Input("runs", "value"),
            "seen": state("seen", "data"),
        },
    )(lambda tick, chosen, seen: _update(dash, watcher, chosen or [], seen))
    _guard(app.server, token)
    return app


def _guard(server: Any, token: str) -> None:
    """Answers nothing without the token."""
    from flask import make_response, redirect, request

    def refuse_strangers() -> Any:
        given, cookie = request.args.get("token"), f"{COOKIE}-{request.host.rpartition(':')[2]}"
        if hmac.compare_digest((given or request.cookies.get(cookie, "")).encode(), token.encode()):
            if given is None:
                return None
            response = redirect(request.path)  # the address that stays in the browser holds no token
            response.set_cookie(cookie, token, httponly=True, samesite="Strict")
            return response
        return make_response(UNKNOWN, 401, {"Content-Type": "text/plain"})

    def add_headers(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    server.before_request_funcs.setdefault(None, []).insert(0, refuse_strangers)
    server.after_request(add_headers)


def _update(dash: ModuleType, watcher: Watcher, chosen: list[str], seen: Any) -> dict[str, object]:
    """What each output of the page becomes; charts and events stay where nothing new was read since `seen`."""
    html, same, names = dash.html, dash.no_update, (*TITLES, *OPTIONAL)
    chosen = chosen or [str(path) for path in watcher.listed()[:1]]  # the first run of a folder may have begun by now
    runs = [run for run in map(watcher.look, chosen) if run is not None]
    nothing = f"No run in {watcher.folder.resolve()} has logs yet; this page shows the first one as soon as it begins."
    with watcher.lock:
        now = [figures(run, time.time()) for run in runs]
        versions = [[str(run.folder), run.version, of_run.state] for run, of_run in zip(runs, now, strict=True)]
        update: dict[str, object] = {
            "options": [{"label": path.name, "value": str(path)} for path in watcher.listed()],
            "chosen": ", ".join(run.name for run in runs) or "choose a run",
            "state": _badge(html, now[0]) if runs else "",
            "figures": headline(html, now[0]) if runs else [html.P(nothing, className="note")],
            "machines": machines(html, runs[0], now[0]) if runs else "",
            "shown": "" if runs else "empty",
            "seen": versions,
            **dict.fromkeys(("comparison", "rounds", "events", "warnings", "warned"), same),
            "graphs": dict.fromkeys(names, same),
            "values": dict.fromkeys(names, same),
            "panels": dict.fromkeys(OPTIONAL, same),
        }
        if versions == seen or not runs:
            return update
        update["comparison"] = comparison(html, runs, now) if len(runs) > 1 else ""
        return update | _drawn(html, runs, now[0])


def _drawn(html: ModuleType, runs: list[RunHistory], now: Figures) -> dict[str, object]:
    """The charts of all runs, and what the page says of the first. now: its figures."""
    run = runs[0]
    graphs: dict[str, charts.Plotly | None] = {name: charts.learning(runs, name) for name, *_ in charts.LEARNING}
    graphs |= {"seconds": charts.seconds(now), "speed": charts.speed(run, now)}
    graphs |= {"network": charts.network(run), "timeline": charts.timeline(run), "batches": charts.of_batches(run)}
    graphs |= {name: charts.measured(run, name) for name in charts.MEASURED}
    graphs |= {name: charts.of_rounds(run, name) for name in charts.OF_ROUNDS}
    values = chart_values(now) | {name: charts.newest(graphs[name]) for name in charts.OF_ROUNDS}
    return {
        "events": [_item(html, e["time"], charts.describe(e), e["kind"]) for e in _latest(run)],
        "rounds": rounds_section(html, run),
        "graphs": {name: figure or charts.EMPTY for name, figure in graphs.items()},
        "panels": {name: "panel" if graphs[name] else "hidden" for name in OPTIONAL},
        "warnings": warnings(html, now),
        "warned": "panel" if now.warnings else "hidden",
        "values": {name: values.get(name, "") for name in (*TITLES, *OPTIONAL)},
    }


def page_layout(dash: ModuleType, chosen: Sequence[str]) -> Any:
    """The page without figures yet. chosen: folders of the runs that it shows first."""
    html, dcc = dash.html, dash.dcc

    def panels(names: Sequence[str], layout: str) -> Any:
        return html.Div([_panel(dash, name) for name in names], className=f"grid {layout}")

    choice = html.Div(dcc.Checklist(id="runs", value=list(chosen), options=[]))
    header = [
        html.H1("Tandem"),
        html.Details([html.Summary("Runs", id="chosen"), choice], className="runs"),
        html.Span("", id="state", role="status"),
        html.Span(className="space"),
        html.Button("Theme: auto", id="theme-button", n_clicks=0),
    ]
    events = html.Ol(id="events", className="events", tabIndex="0", **{"aria-labelledby": "events-title"})
    latest = html.Section([html.H2("Latest events", id="events-title"), events], className="panel")
    main = [
        html.Div(id="figures", className="grid top", tabIndex="-1"),
        html.Section(id="comparison"),
        panels([name for name, *_ in charts.LEARNING], "three"),
        html.Section(id="machines", className="panel"),
        panels(list(charts.OF_ROUNDS), "three low"),
        html.Section(id="rounds"),
        panels(["seconds", "speed", "network"], "three"),
        panels([*charts.MEASURED, "batches"], "fit low"),
        html.Section(id="warnings", className="hidden"),
        html.Div([_panel(dash, "timeline"), latest], className="grid two"),
    ]
    return html.Div(
        [
            html.A("Skip to the figures", href="#figures", className="skip"),
            dcc.Interval(id="tick", interval=1000 * REFRESH_SECONDS),
            dcc.Store(id="seen"),
            dcc.Store(id="theme", storage_type="local"),
            html.Header(header),
            html.Main(main, id="main"),
        ]
    )


def _panel(dash: ModuleType, name: str) -> Any:
    """A chart under its title, with its newest value in words beside it."""
    html, title = dash.html, (TITLES | OPTIONAL)[name]
    graph = dash.dcc.Graph(id=f"graph-{name}", config=GRAPH_OPTIONS, responsive=True, style={"height": "100%"})
    chart = html.Div(graph, className="chart", role="img", **{"aria-label": f"chart: {title}"})
    head = html.Div([html.H2(title), html.Span("", id=f"value-{name}")], className="head")
    return html.Section([head, chart], className="panel", id=f"panel-{name}")


# ---- Words and tables ------------------------------------------------------------------------------------------------


def chart_values(now: Figures) -> dict[str, str]:
    """The newest value of a chart in words, by the chart's name."""
    values = {
        name: text.format(value) for name, _, text in charts.LEARNING if (value := now.latest.get(name)) is not None
    }
    values["speed"] = f"{now.speed.pairs_per_second:.3g} pairs/s together"
    seconds = [sum(rank.latest[part] for rank in now.ranks) for part, _ in charts.PARTS]
    if sum(seconds):
        values["seconds"] = f"{seconds[0] / sum(seconds):.0%} compute"
    if now.ranks:
        values["network"] = f"{1e3 * max(rank.latest['sync_seconds'] for rank in now.ranks):.3g} ms"
    for name, (_, factor, unit) in charts.MEASURED.items():
        known = [rank.measures[name] for rank in now.ranks if name in rank.measures]
        worst = min if name in ("bytes_per_second", "speed_limit") else max
        if known:
            values[name] = f"{factor * worst(known):.3g} {unit}" if name != "retransmits" else f"{max(known):.0f}"
    return values


def _badge(html: ModuleType, now: Figures) -> Any:
    words = now.state
    if now.state == "silent" and now.ranks:
        words = f"silent for {duration(min(rank.silent_seconds for rank in now.ranks))}"
    return html.Span(words, className=f"badge {now.state}")


def headline(html: ModuleType, now: Figures) -> list[Any]:
    """η where several hosts were measured, the cards, and the plan."""
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    title = html.H2(f"Plan: {now.plan['strategy']}, shares {shares}" if now.plan.get("strategy") else "Plan")
    plan = html.Section([title, html.P(now.plan.get("reason") or "none yet", className="note")], className="panel")
    rest = html.Div([html.Div(_cards(html, now), className="cards"), plan], className="grid", style={"marginTop": 0})
    if now.speed.efficiency is None and len(now.plan.get("ranks") or []) < 2:
        return [rest]  # one machine
    note = "the share of what all hosts would do alone; known once they are measured: make calibrate"
    if now.speed.efficiency is not None:
        note = f"of what the hosts do alone, added up: {now.plan.get('solo_sum_pairs_per_second'):.3g} pairs/s"
    shown_eta = "not known" if now.speed.efficiency is None else f"{now.speed.efficiency:.0%}"
    eta = [html.H2("Efficiency, η"), html.Strong(shown_eta, id="efficiency"), html.Small(note)]
    return [html.Section(eta, className="panel eta" + " none" * (now.speed.efficiency is None)), rest]


def _cards(html: ModuleType, now: Figures) -> list[Any]:
    def card(title: str, value: str, note: str, name: str, *more: Any) -> Any:
        parts = [html.H3(title), html.Strong(value, id=f"now-{name}"), *more, html.Small(note)]
        return html.Section(parts, className="panel card")

    held, over, speed = now.held_out, now.state == "finished", f"{now.speed.tokens_per_second:,.0f} tokens/s"
    if now.planned_pairs_per_second:
        speed += f", plan: {now.planned_pairs_per_second:.3g} pairs/s"
    bar = [html.Progress(value=str(now.step), max=str(now.steps))] if now.steps else []
    left = (
        duration(now.time.elapsed_seconds)
        if over
        else "–"
        if now.time.left_seconds is None
        else duration(now.time.left_seconds)
    )
    hosts = {rank.host for rank in now.ranks} | {host for _, host in now.missing}
    troubles = f"{_counted(len(now.warnings), 'warning')}, {_counted(now.restarts, 'restart')}"
    accuracy = _written("held out {:.1%}", held.get("reward_accuracy"), "")
    exact = _written("exact match {:.1%}", held.get("exact_match"), "")
    cards = [
        card("Step", f"{now.step:,}" + (f" / {now.steps:,}" if now.steps else ""), "", "step", *bar),
        card("Loss", _written("{:.4f}", now.latest["loss"]), _written("held out {:.4f}", held.get("loss"), ""), "loss"),
        card("Accuracy", _written("{:.1%}", now.latest["reward_accuracy"]), exact or accuracy, "accuracy"),
        card("Pairs/s", f"{now.speed.pairs_per_second:.3g}", speed, "pairs-per-second"),
        card("Time" if over else "Time left", left, "" if over else _so_far(now), "left"),
        card("Hosts", str(len(hosts)), troubles, "hosts"),
    ]
    if now.time.cost is not None:
        title = "Cost" if over else "Cost so far"
        cards.insert(5, card(title, _money(now.time.cost["cost"]), f"{now.time.cost['energy_kwh']:.3g} kWh", "cost"))
    return cards


def _so_far(now: Figures) -> str:
    end = ""
    if now.time.left_seconds:
        day = "%a %d %b, " if now.time.left_seconds > 12 * 3600 else ""
        end = time.strftime(f", ends at {day}%H:%M", time.localtime(time.time() + now.time.left_seconds))
    return f"{duration(now.time.elapsed_seconds)} so far{end}"


def machines(html: ModuleType, run: RunHistory, now: Figures) -> list[Any]:
    """The table of ranks, and whose records are elsewhere."""
    titles = ["rank", "host", "pairs a step", "pairs/s, of plan", "memory, of limit", "waits", "sends", "last record"]
    measured = [(name, title) for name, title in (("temperature_celsius", "temperature"), ("power_watts", "power"))
                if any(name in rank.measures for rank in now.ranks)]  # fmt: skip
    rows = []
    for rank in now.ranks:
        sends, parts = rank.measures.get("bytes_per_second"), [rank.latest[part] for part, _ in charts.PARTS]
        waits = parts[2] / sum(parts) if sum(parts) else 0.0
        cells: list[Any] = [[_key(html, charts.rank_index(run, (rank.rank, rank.host))), str(rank.rank)], rank.host]
        cells += ["–" if rank.share is None else str(rank.share), _against_plan(html, rank), _memory(html, rank)]
        cells += [[f"{waits:.0%} of its time", _meter(html, waits, is_full=waits > 0.2)]]
        cells += [f"{sends / 1e6:.3g} MB/s" if sends else "–", f"{duration(max(0.0, rank.silent_seconds))} ago"]
        cells += [_written("{:.0f}", rank.measures.get(name)) for name, _ in measured]
        rows.append(cells)
    parts = [html.H2("Ranks and hosts"), _table(html, [*titles, *(title for _, title in measured)], rows, "ranks")]
    if now.missing:
        names = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
        host, logs = now.missing[0][1], run.folder.resolve() / "logs"
        text = f"Not shown: {names}. The records are on those hosts and come with the next checkpoint; now, by "
        command = html.Code(shlex.join(["rsync", "-a", f"{host}:{logs}/", f"{logs / host}/"]))
        parts.append(html.P([text, command], className="note missing"))
    return parts


def _against_plan(html: ModuleType, rank: RankFigures) -> Any:
    value, goal = rank.pairs_per_second, rank.planned_pairs_per_second
    return [f"{value:.3g} / {goal:.3g}", _meter(html, value / goal)] if goal else f"{value:.3g}"


def _memory(html: ModuleType, rank: RankFigures) -> Any:
    used, limit = rank.latest["peak_memory_bytes"], rank.memory_limit_bytes
    if not limit:
        return size_text(used)
    return [f"{size_text(used)} / {size_text(limit)}", _meter(html, used / limit, is_full=used > 0.9 * limit)]


def _meter(html: ModuleType, part: float, is_full: bool = False) -> Any:
    width = f"{100 * max(0.0, min(1.0, part)):.0f}%"
    return html.Span(html.I(style={"width": width}), className="meter full" if is_full else "meter")


def warnings(html: ModuleType, now: Figures) -> list[Any]:
    """The newest warnings."""
    newest = now.warnings[-SHOWN_EVENTS:][::-1]
    items = [_item(html, w.time, (f"step {w.step}: " if w.step is not None else "") + w.text) for w in newest]
    title = html.H2(f"Warnings ({len(now.warnings)})", id="warnings-title")
    return [title, html.Ol(items, className="events", tabIndex="0", **{"aria-labelledby": "warnings-title"})]


def _latest(run: RunHistory) -> list[Record]:
    return charts.distinct_events(run.events)[-SHOWN_EVENTS:][::-1]


def _item(html: ModuleType, at: float, text: str, kind: str = "") -> Any:
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    return html.Li([html.Time(clock), html.Span(text, className=kind)])


def comparison(html: ModuleType, runs: Sequence[RunHistory], now: Sequence[Figures]) -> Any:
    """A row a run."""
    titles = ("run", "state", "strategy", "step", "loss", "accuracy", "held-out loss", "pairs/s", "η", "time", "cost")
    rows = []
    for number, (run, each) in enumerate(zip(runs, now, strict=True)):
        cells: list[Any] = [[_key(html, number), run.name], each.state, each.plan.get("strategy") or "–"]
        cells += [f"{each.step:,}", _written("{:.4f}", each.latest["loss"])]
        cells += [_written("{:.1%}", each.latest["reward_accuracy"]), _written("{:.4f}", each.held_out.get("loss"))]
        cells += [
            f"{each.speed.pairs_per_second:.3g}",
            _written("{:.0%}", each.speed.efficiency),
            duration(each.time.elapsed_seconds),
        ]
        rows.append([*cells, "–" if each.time.cost is None else _money(each.time.cost["cost"])])
    note = html.P("The curves below are of all of them; machines and events of the first.", className="note")
    parts = [html.H2("Runs compared"), _table(html, titles, rows), note]
    return html.Div(parts, className="panel", style={"marginTop": ".8rem"})


def rounds_section(html: ModuleType, run: RunHistory) -> list[Any]:
    """The rounds of a run: figures and verdicts, each host's time, and examples; nothing where it has none."""
    newest = list(charts.round_records(run).values())[-SHOWN_EVENTS:]
    if not newest:
        return []
    titles = ("round", "mean score", "held out", "prompts with pairs", "tokens", "duplicates", "entropy", "verdict")
    parts = [html.H2("Rounds"), _table(html, titles, [_round_cells(record) for record in reversed(newest)])]
    totals: dict[tuple[int, str], list[float]] = {}
    once = {(r.get("rank", 0), r.get("host", ""), r["round"]): r for r in charts.round_events(run)}
    for (rank, host, _), record in once.items():  # a resumed run may have one twice
        before = totals.get((rank, host), [0.0] * len(ROUND_PARTS))
        seconds = [float(record.get(f"{part}_seconds") or 0.0) for part in ROUND_PARTS]  # type: ignore[arg-type]
        totals[rank, host] = [a + b for a, b in zip(before, seconds, strict=True)]
    rows = [[str(rank), host, *(f"{s:.1f} s" for s in seconds)] for (rank, host), seconds in sorted(totals.items())]
    parts += [html.H2("Seconds in rounds"), _table(html, ("rank", "host", *ROUND_PARTS), rows)]
    examples = []
    for number, pair in enumerate(newest[-1].get("examples") or [], 1):
        lines = [pair["prompt"], f"+ {pair['chosen']}", f"− {pair['rejected']}"]
        examples.append(html.Li([html.Span(f"pair {number}"), html.Div([html.Div(line) for line in lines])]))
    if examples:
        parts += [html.H2(f"Pairs of round {newest[-1]['round']}"), html.Ol(examples, className="events", tabIndex="0")]
    return [html.Div(parts, className="panel", style={"marginTop": ".8rem"})]


def _round_cells(record: Record) -> list[str]:
    answers, undone = record["answers"], record.get("undone")
    held_out = {name: value for name, value in record["held_out"].items() if value is not None}
    verdict = [f"undone: {'; '.join(record.get('why') or [])}"] if undone else []
    return [
        str(record["round"]),
        _written("{:.3g}", answers.get("score")),
        ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in held_out.items()) or "–",
        f"{answers['accepted']:.0%}",
        f"{answers['tokens']:.3g}",
        f"{answers['duplicates']:.0%}",
        f"{answers['entropy']:.3g}",
        "; ".join([*verdict, *(record.get("warnings") or [])]) or "kept",
    ]


def _table(html: ModuleType, titles: Sequence[str], rows: Sequence[Sequence[Any]], name: str = "") -> Any:
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    body = [
        html.Tr([html.Td(cell, **{"data-label": title}) for title, cell in zip(titles, row, strict=True)])
        for row in rows
    ]
    table = html.Table([head, html.Tbody(body)], className="wide", **({"id": name} if name else {}))
    return html.Div(table, className="scroll")


def _key(html: ModuleType, number: int) -> Any:
    """How the lines of a run, or of a rank, look."""
    line = charts.style(number)
    border = {"solid": "solid", "dash": "dashed"}.get(line["dash"], "dotted")
    return html.I(className="key", style={"borderTop": f"3px {border} {line['color']}"})


def _written(text: str, value: float | None, missing: str = "–") -> str:
    return missing if value is None else text.format(value)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _money(amount: float) -> str:
    """Two digits after the point, or two that count."""
    return f"{amount:.2f}" if amount >= 1 or amount == 0 else f"{amount:.2g}"
