"""The layout of the dashboard's page: its sections, and the ids by which callbacks fill them."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lib.report import charts

REFRESH_SECONDS = 1.0  # between looks of a page at this process
GRAPH_OPTIONS = {"displayModeBar": False, "displaylogo": False, "showLink": False, "responsive": True}
GRAPHS = [name for name, *_ in charts.LEARNING] + ["seconds", "speed", "network", "timeline"]
OPTIONAL = ["batch_curves", *charts.MEASURED, *charts.OF_ROUNDS]  # their panels are there if there is something to draw


def page_layout(dash: ModuleType, chosen: Sequence[str]) -> Any:
    """The page without figures yet. chosen: folders of the runs that it shows first."""
    html, dcc = dash.html, dash.dcc
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
                            html.Div(dcc.Checklist(id="runs", value=list(chosen), options=[])),
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
                        [_panel(dash, name, title) for name, (title, _) in charts.OF_ROUNDS.items()],
                        className="grid three low",
                    ),
                    html.Section(id="rounds"),
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


def _panel(dash: ModuleType, name: str, title: str) -> Any:
    """A chart under its title, with its newest value in words beside it."""
    html = dash.html
    graph = html.Div(
        dash.dcc.Graph(id=f"graph-{name}", config=GRAPH_OPTIONS, responsive=True, style={"height": "100%"}),
        className="chart",
        role="img",
        **{"aria-label": f"chart: {title}"},
    )
    head = html.Div([html.H2(title), html.Span("", id=f"value-{name}")], className="head")
    return html.Section([head, graph], className="panel", id=f"panel-{name}")
