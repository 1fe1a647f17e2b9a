"""The dashboard's page: the runs of a folder as their logs grow, made with Dash."""

from __future__ import annotations

import hmac
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dash
import flask

from lib.report import charts, history
from lib.report.history import RunFigures, RunHistory, figures, runs_in
from lib.system.terminal import duration

html: Any = dash.html  # whose parts take more than their types say
dcc: Any = dash.dcc
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


class Watcher:
    """The runs that pages show, read as their logs grow."""

    def __init__(self, folder: Path, selected: Sequence[Path] = ()):
        self.folder, self.selected = folder, list(selected)
        self.runs: dict[str, RunHistory] = {}  # by folder
        self.lock = threading.Lock()

    def listed(self) -> list[Path]:
        """Runs to choose from: those of the command line, or the newest of the folder."""
        return self.selected or runs_in(self.folder)[:LISTED_RUNS]

    def read(self, folders: Sequence[str]) -> list[RunHistory]:
        """Those of these runs that are listed. A page waits for its logs for READ_SECONDS at most; more comes later."""
        listed, ends = {str(path) for path in self.listed()}, time.monotonic() + READ_SECONDS
        runs = [self.runs.setdefault(folder, RunHistory(Path(folder))) for folder in folders if folder in listed]
        for run in runs:
            while run.read() and time.monotonic() < ends:
                pass
        return runs


def make_app(watcher: Watcher, token: str) -> dash.Dash:
    """The Dash application, for those who have the token: in the address (?token=), then in a cookie."""

    def layout() -> Any:
        first = [str(path) for path in (watcher.selected or watcher.listed()[:1])]
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
        dash.Input("tick", "n_intervals"),
        dash.Input("runs", "value"),
        dash.State("seen", "data"),
    )(lambda tick, chosen, seen: update(watcher, chosen or [], seen))

    def refuse_strangers() -> Any:
        in_address, cookie = flask.request.args.get("token"), f"{COOKIE}-{flask.request.host.rpartition(':')[2]}"
        if not hmac.compare_digest((in_address or flask.request.cookies.get(cookie, "")).encode(), token.encode()):
            return flask.make_response(UNKNOWN, 401, {"Content-Type": "text/plain"})
        if in_address is None:
            return None
        response = flask.redirect(flask.request.path)  # the address that stays in the browser holds no token
        response.set_cookie(cookie, token, httponly=True, samesite="Strict")
        return response

    def add_policy(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = POLICY
        return response

    app.server.before_request_funcs.setdefault(None, []).insert(0, refuse_strangers)
    app.server.after_request(add_policy)
    return app


def update(watcher: Watcher, chosen: list[str], seen: Any) -> dict[str, object]:
    """The new content of each part of the page; charts stay where nothing new was read since `seen`."""
    options = [{"label": path.name, "value": str(path)} for path in watcher.listed()]
    with watcher.lock:
        runs = watcher.read(chosen or [str(path) for path in watcher.listed()[:1]])
        each = [figures(run, time.time()) for run in runs]
        versions = [[str(run.folder), run.version, now.state] for run, now in zip(runs, each, strict=True)]
        if not runs:
            text = f"No run in {watcher.folder.resolve()} has logs yet; this page shows the first one as it begins."
            empty = html.Section(html.P(text, className="note"), className="panel")
            return {"options": options, "chosen": "Runs", "state": "", "now": empty, "charts": "", "seen": None}
        drawn = dash.no_update if versions == seen else [_shown(each_) for each_ in charts.sections_of(runs, each[0])]
        state = html.Span(each[0].state, className=f"badge {each[0].state}")
        names = ", ".join(run.name for run in runs)
        now = headline(runs, each)
        return {"options": options, "chosen": names, "state": state, "now": now, "charts": drawn, "seen": versions}


def headline(runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> list[Any]:
    """The figures of the moment as cards, and the plan; of several runs a row a run."""
    plan, cards = each[0].plan, []
    for title, text in card_texts(runs[0], each[0]):
        value, note = split(text)
        cards.append(html.Section([html.H3(title), html.Strong(value), html.Small(note)], className="panel card"))
    shares = " + ".join(map(str, plan.get("shares") or []))
    head = html.H2(f"Plan: {plan['strategy']}, shares {shares}" if plan.get("strategy") else "Plan")
    reason = html.P(plan.get("reason") or "none yet", className="note")
    parts = [html.Div(cards, className="cards"), html.Section([head, reason], className="panel")]
    if len(runs) > 1:
        about = html.P("Curves of learning are of all of them; all else is of the first.", className="note")
        parts.append(html.Section([html.H2("Runs compared"), comparison(runs, each), about], className="panel"))
    return parts


def split(text: str) -> tuple[str, str]:
    """The number with its unit that a text begins with, and what follows: 17.4 s | of steps, 44 s in all."""
    number = re.match(r"([\d.,]*\d(?: / [\d,]*\d| [^\s,]+)?),? ?(.*)", text)
    return (number[1], number[2]) if number else (text, "")


def card_texts(run: RunHistory, now: RunFigures) -> list[tuple[str, str]]:
    """Title and text of each card: its figure, and a note."""
    unit, loss = history.unit_of(run.config["train"].get("loss")), history.FIGURES["loss"]
    (_, steps), *facts = history.facts(now.summary, unit)
    steps += f" / {now.steps:,}" if now.steps else ""
    steps += "" if now.left_seconds is None else f", {duration(now.left_seconds)} left"
    held_out = now.held_out.get("loss")
    losses = loss.text(now.loss) + ("" if held_out is None else f", held out {loss.text(held_out)}")
    hosts = {rank["host"] for rank in now.summary["ranks"]} | {host for _, host in now.missing}
    troubles = f"{len(hosts)}, warnings: {len(now.warnings)}, restarts: {now.restarts}"
    return [("step", steps), ("loss", losses), *facts, ("hosts", troubles)]


def comparison(runs: Sequence[RunHistory], each: Sequence[RunFigures]) -> Any:
    """A row a run with the figures of its cards; its key is how its lines look."""
    cards = [dict(card_texts(run, now)) for run, now in zip(runs, each, strict=True)]
    titles = list(dict.fromkeys(title for of_run in cards for title in of_run))
    rows: list[list[Any]] = []
    for number, (run, now, values) in enumerate(zip(runs, each, cards, strict=True)):
        look = charts.style(number)
        border = {"solid": "solid", "dash": "dashed"}.get(look["dash"], "dotted")
        key = html.I(className="key", style={"borderTop": f"3px {border} {look['color']}"})
        held_out = history.FIGURES["loss"].text(now.held_out.get("loss"))
        rows.append([[key, run.name], now.state, now.plan.get("strategy") or "-", held_out])
        rows[-1] += [split(values.get(title, "-"))[0] for title in titles]
    return _table(("run", "state", "strategy", "held-out loss", *titles), rows)


def _shown(section: charts.PageSection) -> Any:
    """A section: its table, its charts with their newest values in words beside them, its paragraphs."""
    parts = [_table(section.head, section.rows)] if section.rows else []
    parts += [html.P(text, className="note text") for text in section.texts]
    panels = []
    for panel in section.panels:
        graph = dcc.Graph(figure=panel.figure, config=GRAPH_OPTIONS, responsive=True, style={"height": "100%"})
        chart = html.Div(graph, className="chart", role="img", **{"aria-label": f"chart: {panel.title}"})
        head = html.Div([html.H2(panel.title), html.Span(panel.value)], className="head")
        panels.append(html.Section([head, chart], className="panel", key=panel.title))
    whole = [html.Section([html.H2(section.title), *parts], className="panel")] if parts else []
    return html.Div([*whole, html.Div(panels, className="grid")])


def _table(titles: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> Any:
    head = [html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))] if titles else []
    body = html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in rows])
    return html.Div(html.Table([*head, body]), className="scroll")
