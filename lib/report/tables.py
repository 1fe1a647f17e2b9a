"""Words and rows that the console's last lines, the dashboard and the report have in common, from a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lib.report.history import RunHistory
from lib.system.records import PlanRecord, Record
from lib.system.terminal import duration, metrics_text, size_text, three_digits


class Figure(NamedTuple):
    """A quantity of training: what it is called, the form of a value, the unit of an axis."""

    label: str
    form: str
    unit: str | None = None

    def text(self, value: float | None) -> str:
        return "-" if value is None else f"{value:{self.form}}".replace("%", " %")


FIGURES = {
    "loss": Figure("loss", ".4f"),
    "exact_match": Figure("exact match", ".1%"),
    "reward_accuracy": Figure("reward accuracy", ".1%"),
    "reward_margin": Figure("reward margin", ".3f", "nats"),
    "kl": Figure("KL to the reference", ".2f", "nats"),
    "learning_rate": Figure("learning rate", ".3g"),
    "grad_norm": Figure("gradient norm", ".3g"),
}
HELD_OUT = {  # after a round
    "exact_match": Figure("held-out exact match", ".1%"),
    "held_out_score": Figure("held-out score", ".3g"),
}
OF_ROUNDS = {  # of a round's answers
    "score": Figure("mean score of the answers", ".3g"),
    "accepted": Figure("prompts with pairs", ".0%"),
    "tokens": Figure("length of the answers", ".3g", "tokens"),
    "duplicates": Figure("duplicates", ".0%"),
    "entropy": Figure("entropy of the policy", ".3g", "nats a token"),
}
RANK_COLUMNS = ("rank", "host", "pairs", "a second", "planned", "compute", "sync", "wait", "memory")


def describe(event: Record) -> str:
    """One line of an event."""
    kind, step = event["kind"], event.get("step")
    at = f"step {step}: " if step is not None else ""
    if kind == "start":
        hosts = dict.fromkeys(rank["host"] for rank in (event.get("plan") or PlanRecord()).get("ranks") or [])
        resumed = event.get("resumed_from_step")
        again = "" if resumed is None else f" again after step {resumed}"
        return f"started{again}{' on ' * bool(hosts)}{', '.join(hosts)}"
    if kind == "plan":
        what = "blocks" if event.get("blocks") else "shares"
        parts = " + ".join(map(str, event.get("blocks") or event.get("shares") or []))
        return f"{at}from step {event.get('first_step')} on {what} {parts}: {event.get('reason')}"
    if kind == "merge":
        shown = [f"{' + '.join(map(str, event.get('pairs') or []))} pairs"]
        shown.append(f"{size_text(event.get('bytes_sent') or 0)} sent")
        shown += [f"error {event['error']:.1e}"] if event.get("error") is not None else []
        return f"{at}merged by {event.get('method')}: {', '.join(shown)}"
    if kind == "evaluation":
        return f"{at}held out  {metrics_text(event)}"
    if kind == "round":
        verdict = f"undone: {'; '.join(event.get('why') or [])}" if event.get("undone") else "kept"
        return f"{at}round {event.get('round')} {verdict}"
    if kind == "end":
        why = f": {event['reason']}" if event.get("reason") else ""
        final = event.get("final_step")
        return f"{at}ended{why}" + ("" if final is None else f"; the folder holds step {final}")
    return f"{at}{event.get('text') or kind}"


def rounds(run: RunHistory) -> dict[int, Record]:
    """Rank 0's records of rounds by their numbers; of a round that was taken again the newest."""
    needed = {"round", "answers", "held_out"}
    return dict(sorted({event["round"]: event for event in run.of_kind("round") if needed <= event.keys()}.items()))


def held_out(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Metric, before training, after it, where it is known."""
    return [
        (figure.label, figure.text(before.get(name)), figure.text(after.get(name)))
        for name, figure in FIGURES.items()
        if after.get(name) is not None
    ]


def facts(summary: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    """How a run went, name and value, after a comma what explains it. summary: of summary.json, or of `RunFigures`."""
    held, efficiency, computed = map(summary.get, ("checkpoint", "efficiency", "computed_tokens_per_second"))
    share, speed = summary.get("matrix_rate_share"), f"{three_digits(summary['pairs_per_second'])} {unit}/s"
    speed += f", {summary['tokens_per_second']:,.0f} tokens/s" + f" ({computed or 0:,.0f} with padding)" * bool(
        computed
    )
    part = f", {100 * share:.0f} % of the measured matrix rate" if share else ""
    tflops = f"{summary.get('tflops') or 0:.3g} TFLOP/s ({summary.get('computed_tflops') or 0:.3g} with padding{part})"
    rows = [
        ("steps", f"{summary['steps']:,}"),
        ("ended early", summary.get("early_end")),
        ("weights", f"of step {held['step']}, the {held['which']}" if held else None),
        ("training", f"{duration(summary['seconds'])} of steps, {duration(summary['wall_seconds'])} in all"),
        ("speed", speed),
        ("arithmetic", tflops if summary.get("tflops") else None),
        ("efficiency", f"{100 * efficiency:.1f} %, of what the hosts do alone, added up" if efficiency else None),
        ("memory", f"{size_text(summary['peak_memory_bytes'])} at most"),
        *(("cost", text) for text in costs(summary.get("cost"))),
    ]
    return [(name, text) for name, text in rows if text]


def unit_of(loss: object) -> str:
    """What a run of this loss counts: pairs, groups of answers, or rows."""
    return {"grpo": "groups", "sft": "rows", "kto": "rows", "bco": "rows"}.get(str(loss), "pairs")


def costs(cost: dict[str, Any] | None) -> list[str]:
    """A line a host, and one for all."""
    each = cost["hosts"] if cost else []
    return [
        f"{of['cost']:.2f}, {of.get('host', 'all hosts')}: {of['energy_kwh']:.3g} kWh for {of['electricity']:.2f}, "
        f"rent {of['rent']:.2f}"
        for of in (*each, *[cost] * (len(each) > 1))
    ]


def ranks(totals: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of the table of ranks; `planned` only where it is known. totals: of summary.json."""
    rows = []
    for rank in totals:
        seconds, planned = rank["seconds"] or float("nan"), rank["planned_pairs_per_second"]
        row = [str(rank["rank"]), rank["host"], f"{rank['pairs']:,.4g}", three_digits(rank["pairs"] / seconds)]
        row += [three_digits(planned) if planned else "-"]
        row += [f"{100 * rank[f'{part}_seconds'] / seconds:.0f} %" for part in ("compute", "sync", "wait")]
        rows.append([*row, size_text(rank["peak_memory_bytes"])])
    used = [i for i in range(len(RANK_COLUMNS)) if any(row[i] != "-" for row in rows)]
    return [RANK_COLUMNS[i] for i in used], [[row[i] for i in used] for row in rows]
