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
from lib.report import charts, tables
from lib.report.history import RunFigures, RunHistory, figures, runs_in
from lib.system import mpi_and_blas
from lib.system.records import Record
from lib.system.terminal import duration, size_text

READ_SECONDS = 0.5
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
COOKIE = "tandem-dashboard"  # and the port: browsers send a host's cookies to all of its ports
UNKNOWN = "This dashboard wants its token: open the whole address that `python -m lib.dashboard` printed.\n"
GRAPH_OPTIONS = {"displayModeBar": False, "displaylogo": False, "showLink": False, "responsive": True}
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
    with contextlib.suppress(KeyboardInterrupt):
        _serve(app, options.host, options.port, token, f"no run in {options.runs}/ yet" if is_empty else None)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.dashboard", description=__doc__)
    add = parser.add_argument
    add("run", nargs="*", metavar="RUN", help="folders of runs (default: the newest of --runs)")
    add("--runs", metavar="DIR", default="runs", help="folder that holds runs (default: runs)")
    add("--export", metavar="RUN", help="write its report.html, curves.png and README.md, serve nothing")
    add("--port", type=int, default=8050, help="default: 8050; 0 takes a free one")
    add("--host", default="127.0.0.1", help="address to listen at (default: the loopback)")
    options = parser.parse_args(arguments)
    for run in options.run:
        if not Path(run).is_dir():
            raise UserError(f"{run} is not a run's folder; runs/ has those of this machine")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port} is not in 0 to 65535")
    return options


def _serve(app: Any, host: str, port: int, token: str, note: str | None = None) -> None:
    """Serves until it is interrupted.

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
        print(f"dashboard: {note}; one that starts is shown", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("dashboard: figures and token travel unencrypted; ssh -L does better", file=sys.stderr)
    server.serve_forever()


class Watcher:
    """The runs that pages show, read as their logs grow."""

    def __init__(self, folder: Path, given: Sequence[Path] = ()):
        self.folder, self.given = folder, [Path(path) for path in given]
        self.runs: dict[str, RunHistory] = {}  # by folder
        self.lock = threading.Lock()

    def listed(self) -> list[Path]:
        """Runs to choose from: those given, or the newest of the folder."""
        return self.given or runs_in(self.folder)[:LISTED_RUNS]

    def read(self, folders: Sequence[str]) -> list[RunHistory]:
        """Those of these runs that are listed. A page waits for its logs for READ_SECONDS at most; more comes later."""
        listed, ends = {str(path) for path in self.listed()}, time.monotonic() + READ_SECONDS
        runs = [self.runs.setdefault(folder, RunHistory(Path(folder))) for folder in folders if folder in listed]
        for run in runs:
            while run.read() and time.monotonic() < ends:
                pass
        return runs


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
    app.callback(
        {
            "options": dash.Output("runs", "options"),
            "chosen": dash.Output("chosen", "children"),
            "state": dash.Output("state", "children"),
            "now": dash.Output("now", "children"),
            "charts": dash.Output("charts", "children"),
            "seen": dash.Output("seen", "data"),
        },
        {
            "tick": dash.Input("tick", "n_intervals"),
            "chosen": dash.Input("runs", "value"),
            "seen": dash.State("seen", "data"),
        },
    )(lambda tick, chosen, seen: update(dash, watcher, chosen or [], seen))
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

    def add_policy(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = POLICY
        return response

    server.before_request_funcs.setdefault(None, []).insert(0, refuse_strangers)
    server.after_request(add_policy)


def page_layout(dash: ModuleType, chosen: Sequence[str]) -> Any:
    """The page without figures yet. chosen: folders of the runs that it shows first."""
    html, dcc = dash.html, dash.dcc
    choice = html.Div(dcc.Checklist(id="runs", value=list(chosen), options=[]))
    runs = html.Details([html.Summary("Runs", id="chosen"), choice], className="runs")
    header = html.Header([html.H1("Tandem"), runs, html.Span("", id="state", role="status")])
    main = html.Main([html.Div(id="now"), html.Div(id="charts")])
    return html.Div([dcc.Interval(id="tick", interval=1000 * REFRESH_SECONDS), dcc.Store(id="seen"), header, main])


def update(dash: ModuleType, watcher: Watcher, chosen: list[str], seen: Any) -> dict[str, object]:
    """The new content of each part of the page; charts stay where nothing new was read since `seen`."""
    html = dash.html
    options = [{"label": path.name, "value": str(path)} for path in watcher.listed()]
    with watcher.lock:
        runs = watcher.read(chosen or [str(path) for path in watcher.listed()[:1]])
        each = [figures(run, time.time()) for run in runs]
        versions = [[str(run.folder), run.version, now.state] for run, now in zip(runs, each, strict=True)]
        if not runs:
            text = f"No run in {watcher.folder.resolve()} has logs yet; this page shows the first one as it begins."
            now = html.Section(html.P(text, className="note"), className="panel")
            return {"options": options, "chosen": "Runs", "state": "", "now": now, "charts": "", "seen": None}
        return {
            "options": options,
            "chosen": ", ".join(run.name for run in runs),
            "state": html.Span(each[0].state, className=f"badge {each[0].state}"),
            "now": headline(html, runs, each),
            "charts": dash.no_update if versions == seen else sections(dash, runs, each[0]),
            "seen": versions,
        }


# ---- What it shows ---------------------------------------------------------------------------------------------------


def headline(html: ModuleType, runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> list[Any]:
    """The figures of the moment as cards, the plan, the ranks; of several runs a row a run."""
    now = each[0]
    cards = [
        html.Section([html.H3(title), html.Strong(value), html.Small(note)], className="panel card")
        for title, value, note in card_texts(now, tables.unit_of(runs[0]))
    ]
    shares = " + ".join(str(rank.share) for rank in now.ranks if rank.share is not None)
    title = html.H2(f"Plan: {now.plan['strategy']}, shares {shares}" if now.plan.get("strategy") else "Plan")
    parts = [html.Div(cards, className="cards")]
    parts.append(
        html.Section([title, html.P(now.plan.get("reason") or "none yet", className="note")], className="panel")
    )
    if len(runs) > 1:
        parts.append(_section(html, "Runs compared", comparison(html, runs, each)))
    parts.append(_section(html, "Ranks and hosts", machines(html, runs[0], now)))
    return parts


def card_texts(now: RunFigures, unit: str) -> list[tuple[str, str, str]]:
    """Title, value and a note of each card."""
    held, over, time_ = now.held_out, now.state == "finished", now.time
    loss = written("held out {:.4f}", held.get("loss"), "")
    exact = written("exact match {:.1%}", held.get("exact_match"), "")
    exact = exact or written("held out {:.1%}", held.get("reward_accuracy"), "")
    figures_now = {"tokens_per_second": now.speed.tokens_per_second, **now.speed.arithmetic}
    plan = written("plan: {:.3g}", now.speed.planned_pairs_per_second, "")
    pace = ", ".join(filter(None, (tables.tokens_text(figures_now), tables.flops_text(figures_now), plan)))
    cards = [
        ("Step", f"{now.step:,}" + (f" / {now.steps:,}" if now.steps else ""), ""),
        ("Loss", written("{:.4f}", now.latest["loss"]), loss),
        ("Accuracy", written("{:.1%}", now.latest["reward_accuracy"]), exact),
        (f"{unit.capitalize()}/s", f"{now.speed.pairs_per_second:.3g}", pace),
    ]
    if over:
        cards.append(("Time", duration(time_.elapsed_seconds), ""))
    else:
        left = "–" if time_.left_seconds is None else duration(time_.left_seconds)
        cards.append(("Time left", left, f"{duration(time_.elapsed_seconds)} so far"))
    if now.speed.efficiency is not None:
        note = f"of what the hosts do alone, added up: {now.plan.get('solo_sum_pairs_per_second'):.3g} pairs/s"
        cards.insert(0, ("Efficiency, η", f"{now.speed.efficiency:.0%}", note))
    elif len(now.plan.get("ranks") or []) > 1:
        cards.insert(0, ("Efficiency, η", "not known", "of what the hosts do alone; known after make calibrate"))
    if time_.cost is not None:
        cards.append(("Cost", f"{time_.cost['cost']:.3g}", f"{time_.cost['energy_kwh']:.3g} kWh"))
    troubles = f"{len(now.warnings)} warning{'s' * (len(now.warnings) != 1)}"
    troubles += f", {now.restarts} restart{'s' * (now.restarts != 1)}"
    hosts = {rank.host for rank in now.ranks} | {host for _, host in now.missing}
    return [*cards, ("Hosts", str(len(hosts)), troubles)]


def machines(html: ModuleType, run: RunHistory, now: RunFigures) -> list[Any]:
    """The table of ranks, and whose records are elsewhere."""
    sensors = {"temperature_celsius": "°C", "power_watts": "W"}
    sensors = {name: unit for name, unit in sensors.items() if any(name in rank.measures for rank in now.ranks)}
    titles, rows = tables.ranks(tables.so_far(run, now)["ranks"])
    titles += ["of limit", "last record", *sensors.values()]
    for row, rank in zip(rows, now.ranks, strict=True):
        row += [size_text(rank.memory_limit_bytes) if rank.memory_limit_bytes else "–"]
        row += [f"{duration(max(0.0, round(rank.silent_seconds)))} ago"]
        row += [written("{:.0f}", rank.measures.get(name)) for name in sensors]
    parts = [table(html, titles, rows)]
    if now.missing:
        names = ", ".join(f"rank {rank} ({host})" for rank, host in now.missing)
        text = f"Not shown: {names}. The records are on those hosts and come with the next checkpoint."
        parts.append(html.P(text, className="note missing"))
    return parts


def comparison(html: ModuleType, runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> list[Any]:
    """A row a run; its key is how its lines look."""
    titles = ("run", "state", "strategy", "step", "loss", "accuracy", "held-out loss", "pairs/s", "η", "time", "cost")
    rows: list[list[Any]] = []
    for number, (run, now) in enumerate(zip(runs, each, strict=True)):
        look = charts.style(number)
        border = {"solid": "solid", "dash": "dashed"}.get(look["dash"], "dotted")
        key = html.I(className="key", style={"borderTop": f"3px {border} {look['color']}"})
        rows.append([[key, run.name], now.state, now.plan.get("strategy") or "–", f"{now.step:,}"])
        rows[-1] += [written("{:.4f}", now.latest["loss"]), written("{:.1%}", now.latest["reward_accuracy"])]
        rows[-1] += [written("{:.4f}", now.held_out.get("loss")), f"{now.speed.pairs_per_second:.3g}"]
        rows[-1] += [written("{:.0%}", now.speed.efficiency), duration(now.time.elapsed_seconds)]
        rows[-1] += [written("{:.3g}", now.time.cost and now.time.cost["cost"])]
    note = "Curves of learning are of all of them; all else is of the first."
    return [table(html, titles, rows), html.P(note, className="note")]


def sections(dash: ModuleType, runs: list[RunHistory], now: RunFigures) -> list[Any]:
    """The charts, rounds, warnings and events."""
    html, run = dash.html, runs[0]
    machine = [charts.seconds(now), charts.speed(run, now), charts.syncs(run), charts.of_batches(run)]
    parts = [_grid(dash, charts.learning(runs)), _grid(dash, charts.of_rounds(run)), *rounds_section(html, run)]
    parts.append(_grid(dash, [panel for panel in (*machine, *charts.measured(run)) if panel]))
    if now.warnings:
        parts.append(_section(html, f"Warnings ({len(now.warnings)})", [_events(html, now.warnings)]))
    parts.append(_grid(dash, [charts.timeline(run)]))
    parts.append(_section(html, "Latest events", [_events(html, tables.distinct_events(run))]))
    return parts


def _grid(dash: ModuleType, panels: Sequence[charts.Panel]) -> Any:
    """Charts under their titles, with their newest values in words beside them."""
    html, shown_panels = dash.html, []
    for panel in panels:
        graph = dash.dcc.Graph(figure=panel.figure, config=GRAPH_OPTIONS, responsive=True, style={"height": "100%"})
        chart = html.Div(graph, className="chart", role="img", **{"aria-label": f"chart: {panel.title}"})
        head = html.Div([html.H2(panel.title), html.Span(panel.value)], className="head")
        shown_panels.append(html.Section([head, chart], className="panel", key=panel.title))
    return html.Div(shown_panels, className="grid")


def rounds_section(html: ModuleType, run: RunHistory) -> list[Any]:
    """The rounds of a run: figures and verdicts, each host's time, and examples; nothing where it has none."""
    newest = list(tables.rounds(run).values())[-SHOWN_EVENTS:]
    if not newest:
        return []
    titles = ("round", "mean score", "held out", "prompts with pairs", "tokens", "duplicates", "entropy", "verdict")
    parts = [table(html, titles, [_round_cells(record) for record in reversed(newest)])]
    rows = []
    for rank, host in run.series:
        records: list[dict[str, Any]] = [{**record} for record in tables.rounds(run, rank).values()]
        sums = [sum(record.get(f"{part}_seconds") or 0.0 for record in records) for part in ROUND_PARTS]
        rows.append([str(rank), host, *(f"{seconds:.1f} s" for seconds in sums)])
    parts += [html.H2("Seconds in rounds"), table(html, ("rank", "host", *ROUND_PARTS), rows)]
    for pair in newest[-1].get("examples") or []:
        texts = (pair["prompt"], f"+ {pair['chosen']}", f"− {pair['rejected']}")
        parts.append(html.Details([html.Summary(pair["prompt"][:80]), *map(html.P, texts)]))
    return [_section(html, "Rounds", parts)]


def _round_cells(record: Record) -> list[str]:
    answers, undone = record["answers"], record.get("undone")
    held_out = [f"{name.replace('_', ' ')} {value:.3g}" for name, value in record["held_out"].items() if value]
    verdict = [f"undone: {'; '.join(record.get('why') or [])}"] if undone else []
    cells = [str(record["round"]), written("{:.3g}", answers.get("score")), ", ".join(held_out) or "–"]
    forms = {"accepted": "{:.0%}", "tokens": "{:.3g}", "duplicates": "{:.0%}", "entropy": "{:.3g}"}
    cells += [written(form, answers.get(name)) for name, form in forms.items()]  # type: ignore[arg-type]
    return [*cells, "; ".join([*verdict, *(record.get("warnings") or [])]) or "kept"]


def _events(html: ModuleType, events: Sequence[Record]) -> Any:
    """The newest events, the newest first."""
    items = []
    for event in events[-SHOWN_EVENTS:][::-1]:
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        items.append(html.Li([html.Time(clock), html.Span(tables.describe(event), className=event["kind"])]))
    return html.Ol(items, className="events", tabIndex="0")


def _section(html: ModuleType, title: str, parts: Sequence[Any]) -> Any:
    return html.Section([html.H2(title), *parts], className="panel")


def table(html: ModuleType, titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    body = html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in rows])
    return html.Div(html.Table([head, body]), className="scroll")


def written(text: str, value: float | None, missing: str = "–") -> str:
    return missing if value is None else text.format(value)
