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
from lib.report import charts, sections, tables
from lib.report.history import RunFigures, RunHistory, figures, runs_in
from lib.report.tables import written
from lib.system import mpi_and_blas
from lib.system.terminal import duration

READ_SECONDS = 0.5
REFRESH_SECONDS = 1.0  # between looks of a page at this process
LISTED_RUNS = 40
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
    if not watcher.listed():
        print(f"dashboard: no run in {options.runs}/ yet; one that starts is shown", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        _serve(app, options.host, options.port, token)
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


def _serve(app: Any, host: str, port: int, token: str) -> None:
    """Serves until it is interrupted. Raises UserError: the port is taken."""
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


def make_app(watcher: Watcher, token: str) -> Any:
    """The Dash application, for those who have the token: in the address (?token=), then in a cookie."""
    try:
        import dash
    except ImportError as error:
        raise UserError("the dashboard needs Dash; run pip install -c constraints.txt dash") from error
    html, dcc = dash.html, dash.dcc

    def layout() -> Any:
        first = [str(path) for path in (watcher.given or watcher.listed()[:1])]
        choice = html.Div(dcc.Checklist(id="runs", value=first, options=[]))
        runs = html.Details([html.Summary("Runs", id="chosen"), choice], className="runs")
        header = html.Header([html.H1("Tandem"), runs, html.Span("", id="state", role="status")])
        main = html.Main([html.Div(id="now"), html.Div(id="charts")])
        return html.Div([dcc.Interval(id="tick", interval=1000 * REFRESH_SECONDS), dcc.Store(id="seen"), header, main])

    app = dash.Dash(
        "tandem",
        title="Tandem",
        update_title="",
        serve_locally=True,
        assets_folder=str(STYLE.with_suffix("")),  # there are none
        index_string=PAGE.replace("STYLE", STYLE.read_text(encoding="utf-8")),
    )
    app.layout = layout
    parts = {"options": "runs", "chosen": "chosen", "state": "state", "now": "now", "charts": "charts", "seen": "seen"}
    properties = {"options": "options", "seen": "data"}
    app.callback(
        {name: dash.Output(part, properties.get(name, "children")) for name, part in parts.items()},
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
        is_new = versions != seen
        return {
            "options": options,
            "chosen": ", ".join(run.name for run in runs),
            "state": html.Span(each[0].state, className=f"badge {each[0].state}"),
            "now": headline(html, runs, each),
            "charts": [_shown(dash, section) for section in sections.of_runs(runs, each[0])]
            if is_new
            else dash.no_update,
            "seen": versions,
        }


def headline(html: ModuleType, runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> list[Any]:
    """The figures of the moment as cards, and the plan; of several runs a row a run."""
    plan = each[0].plan
    cards = [
        html.Section([html.H3(title), html.Strong(value), html.Small(note)], className="panel card")
        for title, value, note in card_texts(each[0], tables.unit_of(runs[0]))
    ]
    shares = " + ".join(map(str, plan.get("shares") or []))
    title = html.H2(f"Plan: {plan['strategy']}, shares {shares}" if plan.get("strategy") else "Plan")
    reason = html.P(plan.get("reason") or "none yet", className="note")
    parts = [html.Div(cards, className="cards"), html.Section([title, reason], className="panel")]
    if len(runs) > 1:
        note = html.P("Curves of learning are of all of them; all else is of the first.", className="note")
        parts.append(html.Section([html.H2("Runs compared"), comparison(html, runs, each), note], className="panel"))
    return parts


def card_texts(now: RunFigures, unit: str) -> list[tuple[str, str, str]]:
    """Title, value and a note of each card."""
    held, known = now.held_out, now.summary
    exact = written("exact match {:.1%}", held.get("exact_match"), "")
    exact = exact or written("held out {:.1%}", held.get("reward_accuracy"), "")
    predicted = now.plan.get("predicted_pairs_per_second") if now.plan.get("calibrated") else None
    plan = written("plan: {:.3g}", predicted, "")
    pace = ", ".join(filter(None, (tables.tokens_text(known), tables.flops_text(known), plan)))
    elapsed = duration(known["wall_seconds"])
    left = "–" if now.left_seconds is None else duration(now.left_seconds)
    cards = [
        ("Step", f"{known['steps']:,}" + (f" / {now.steps:,}" if now.steps else ""), ""),
        ("Loss", written("{:.4f}", now.latest["loss"]), written("held out {:.4f}", held.get("loss"), "")),
        ("Accuracy", written("{:.1%}", now.latest["reward_accuracy"]), exact),
        (f"{unit.capitalize()}/s", f"{known['pairs_per_second']:.3g}", pace),
        ("Time", elapsed, "") if now.state == "finished" else ("Time left", left, f"{elapsed} so far"),
    ]
    if known["efficiency"] is not None:
        note = f"of what the hosts do alone, added up: {now.plan.get('solo_sum_pairs_per_second'):.3g} pairs/s"
        cards.insert(0, ("Efficiency, η", f"{known['efficiency']:.0%}", note))
    elif len(now.plan.get("ranks") or []) > 1:
        cards.insert(0, ("Efficiency, η", "not known", "of what the hosts do alone; known after make calibrate"))
    if known["cost"] is not None:
        cards.append(("Cost", f"{known['cost']['cost']:.3g}", f"{known['cost']['energy_kwh']:.3g} kWh"))
    troubles = f"{len(now.warnings)} warning{'s' * (len(now.warnings) != 1)}"
    troubles += f", {now.restarts} restart{'s' * (now.restarts != 1)}"
    hosts = {rank["host"] for rank in known["ranks"]} | {host for _, host in now.missing}
    return [*cards, ("Hosts", str(len(hosts)), troubles)]


def comparison(html: ModuleType, runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> Any:
    """A row a run with the values of its cards; its key is how its lines look."""
    cards = [dict(card[:2] for card in card_texts(now, "pairs")) for now in each]
    titles = list(dict.fromkeys(title for of_run in cards for title in of_run))
    rows: list[list[Any]] = []
    for number, (run, now, values) in enumerate(zip(runs, each, cards, strict=True)):
        look = charts.style(number)
        border = {"solid": "solid", "dash": "dashed"}.get(look["dash"], "dotted")
        key = html.I(className="key", style={"borderTop": f"3px {border} {look['color']}"})
        held_out = written("{:.4f}", now.held_out.get("loss"))
        rows.append([[key, run.name], now.state, now.plan.get("strategy") or "–", held_out])
        rows[-1] += [values.get(title, "–") for title in titles]
    return _table(html, ("run", "state", "strategy", "held-out loss", *titles), rows)


def _shown(dash: ModuleType, section: sections.PageSection) -> Any:
    """A section: its table, its charts with their newest values in words beside them, its paragraphs."""
    html, parts, panels = dash.html, [], []
    if section.rows:
        parts.append(_table(html, section.head, section.rows))
    parts += [html.P(text, className="note text") for text in section.texts]
    for panel in section.panels:
        graph = dash.dcc.Graph(figure=panel.figure, config=GRAPH_OPTIONS, responsive=True, style={"height": "100%"})
        chart = html.Div(graph, className="chart", role="img", **{"aria-label": f"chart: {panel.title}"})
        head = html.Div([html.H2(panel.title), html.Span(panel.value)], className="head")
        panels.append(html.Section([head, chart], className="panel", key=panel.title))
    whole = [html.Section([html.H2(section.title), *parts], className="panel")] if parts else []
    return html.Div([*whole, html.Div(panels, className="grid")])


def _table(html: ModuleType, titles: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> Any:
    head = [html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))] if titles else []
    body = html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in rows])
    return html.Div(html.Table([*head, body]), className="scroll")
