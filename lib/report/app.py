"""The dashboard's application: Dash, the page's security headers, and the callbacks that refresh the page."""

from __future__ import annotations

import hmac
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from lib.errors import UserError
from lib.report import charts, components, rounds
from lib.report.figures import Figures, figures
from lib.report.history import RunHistory
from lib.report.layout import GRAPHS, OPTIONAL, page_layout
from lib.report.watcher import Watcher

STYLE = Path(__file__).with_suffix(".css")
# The browser itself refuses whatever would come from, or go to, another place.
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
UNKNOWN = "This dashboard answers who has its token: open the whole address that `python -m lib.dashboard` printed.\n"


def make_app(watcher: Watcher, token: str) -> Any:
    """The Dash application, for whoever has the token: in the address (?token=), then in a cookie.

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
    _callbacks(dash, app, watcher)

    def guard(response: Any) -> Any:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    app.server.after_request(guard)
    _ask_for_token(app.server, token)
    return app


def _ask_for_token(server: Any, token: str) -> None:
    from flask import make_response, redirect, request

    def cookie() -> str:
        return f"{COOKIE}-{request.host.rpartition(':')[2]}"

    def refuse_strangers() -> Any:
        given = request.args.get("token")
        if hmac.compare_digest((given or request.cookies.get(cookie(), "")).encode(), token.encode()):
            if given is None:
                return None
            response = redirect(request.path)  # the address that stays in the browser holds no token
            response.set_cookie(cookie(), token, httponly=True, samesite="Strict")
            return response
        return make_response(UNKNOWN, 401, {"Content-Type": "text/plain"})

    # Before what Dash itself asks of a request.
    server.before_request_funcs.setdefault(None, []).insert(0, refuse_strangers)


def _callbacks(dash: ModuleType, app: Any, watcher: Watcher) -> None:
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
            "rounds": out("rounds", "children"),
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


def _update(dash: ModuleType, watcher: Watcher, chosen: list[str], seen: Any) -> dict[str, object]:
    """What each output of the page becomes; charts and events stay where nothing new was read since `seen`."""
    html, same = dash.html, dash.no_update
    chosen = chosen or [str(path) for path in watcher.listed()[:1]]  # the first run of a folder may have begun by now
    runs = [run for run in map(watcher.look, chosen) if run is not None]
    options = [{"label": path.name, "value": str(path)} for path in watcher.listed()]
    with watcher.lock:
        now = [figures(run, time.time()) for run in runs]
        versions = [[str(run.folder), run.version, one.state] for run, one in zip(runs, now, strict=True)]
        update = {
            "options": options,
            "chosen": ", ".join(run.name for run in runs) or "choose a run",
            "state": components.state_badge(html, runs[0], now[0]) if runs else "",
            "figures": components.headline(html, now[0]) if runs else [html.P(_nothing(watcher), className="note")],
            "machines": components.machines(html, runs[0], now[0]) if runs else "",
            "seen": versions,
            **dict.fromkeys(("comparison", "rounds", "events", "warnings", "warned"), same),
            "graphs": dict.fromkeys((*GRAPHS, *OPTIONAL), same),
            "values": dict.fromkeys((*GRAPHS, *OPTIONAL), same),
            "panels": dict.fromkeys(OPTIONAL, same),
        }
        if versions == seen:
            return update
        update["comparison"] = components.comparison(html, runs, now) if len(runs) > 1 else ""
        return update | _drawn(html, runs, now[0]) if runs else update


def _drawn(html: ModuleType, runs: list[RunHistory], now: Figures) -> dict[str, object]:
    """The charts of all runs, and what the page tells of the first. now: its figures."""
    run = runs[0]
    graphs: dict[str, object] = {name: charts.learning(runs, name) for name, *_ in charts.LEARNING}
    graphs |= {"seconds": charts.seconds(now), "speed": charts.speed(run, now)}
    graphs |= {"network": charts.network(run), "timeline": charts.timeline(run)}
    optional = {"batch_curves": charts.batch_curves(run)}
    optional |= {name: charts.measured(run, name) for name in charts.MEASURED}
    optional |= {name: charts.of_rounds(run, name) for name in charts.OF_ROUNDS}
    values = components.chart_values(now) | {name: charts.newest(optional[name]) for name in charts.OF_ROUNDS}
    return {
        "events": components.events(html, run),
        "rounds": rounds.section(html, run),
        "graphs": graphs | {name: figure or charts.EMPTY for name, figure in optional.items()},
        "panels": {name: "panel" if figure else "hidden" for name, figure in optional.items()},
        "warnings": components.warnings(html, now),
        "warned": "panel" if now.warnings else "hidden",
        "values": {name: values.get(name, "") for name in (*GRAPHS, *OPTIONAL)},
    }


def _nothing(watcher: Watcher) -> str:
    return f"No run in {watcher.folder.resolve()} has logs yet; this page shows the first one as soon as it begins."
