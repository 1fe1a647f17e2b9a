"""What the dashboard's page says of rounds: their figures and verdicts, each host's time, and examples."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lib.report import charts
from lib.report.history import RunHistory
from lib.system.records import Record

SHOWN_ROUNDS = 30
PARTS = ("sampling", "waiting", "judging", "training")  # of a rank's time


def section(html: ModuleType, run: RunHistory) -> list[Any]:
    """The rounds of a run; nothing where it has none."""
    of_all = charts.round_records(run)
    if not of_all:
        return []
    records = charts.round_events(run)
    newest = list(of_all.values())[-SHOWN_ROUNDS:]
    rounds = _table(
        html,
        ("round", "mean score", "held out", "prompts with pairs", "tokens", "duplicates", "entropy", "verdict"),
        [_cells(one) for one in reversed(newest)],
    )
    hosts = _table(html, ("rank", "host", *PARTS), _seconds(records))
    examples = [
        html.Li(
            [
                html.Span(f"pair {number}"),
                html.Div([html.Div(one["prompt"]), html.Div(f"+ {one['chosen']}"), html.Div(f"− {one['rejected']}")]),
            ]
        )
        for number, one in enumerate(newest[-1].get("examples") or [], 1)
    ]
    shown = [html.H2("Rounds"), rounds, html.H2("Seconds in rounds"), hosts]
    if examples:
        shown += [html.H2(f"Pairs of round {newest[-1]['round']}"), html.Ol(examples, className="events", tabIndex="0")]
    return [html.Div(shown, className="panel", style={"marginTop": ".8rem"})]


def _cells(one: Record) -> list[str]:
    answers = one["answers"]
    held_out = {name: value for name, value in one["held_out"].items() if value is not None}
    shown = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in held_out.items()) or "–"
    score = "–" if answers.get("score") is None else f"{answers['score']:.3g}"
    parts = [f"{answers[name]:.0%}" for name in ("accepted", "duplicates")]  # type: ignore[literal-required]
    undone = [f"undone: {'; '.join(one.get('why') or [])}"] if one.get("undone") else []
    verdict = "; ".join([*undone, *(one.get("warnings") or [])]) or "kept"
    return [
        str(one["round"]),
        score,
        shown,
        parts[0],
        f"{answers['tokens']:.3g}",
        parts[1],
        f"{answers['entropy']:.3g}",
        verdict,
    ]


def _seconds(records: Sequence[Record]) -> list[list[str]]:
    """Each rank's seconds of all rounds."""
    totals: dict[tuple[int, str], list[float]] = {}
    # A resumed run may have one twice.
    once = {(one.get("rank", 0), one.get("host", ""), one["round"]): one for one in records}
    for (rank, host, _), one in once.items():
        own = totals.setdefault((rank, host), [0.0] * len(PARTS))
        drawing = one.get("sampling_seconds"), one.get("waiting_seconds")
        parts = *drawing, one.get("judging_seconds"), one.get("training_seconds")
        own[:] = [total + (part or 0.0) for total, part in zip(own, parts, strict=True)]
    return [[str(rank), host, *(f"{value:.1f} s" for value in own)] for (rank, host), own in sorted(totals.items())]


def _table(html: ModuleType, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    body = [
        html.Tr([html.Td(cell, **{"data-label": title}) for title, cell in zip(titles, row, strict=True)])
        for row in rows
    ]
    return html.Div(html.Table([head, html.Tbody(body)], className="wide"), className="scroll")
