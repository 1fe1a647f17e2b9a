"""Words and rows that the console's last lines, the dashboard and the report have in common, from a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.plan.cost import RunCost
from lib.report.history import RunHistory
from lib.system.records import PlanRecord, Record, SettingsRecord
from lib.system.terminal import duration, metrics_text, size_text, three_digits

HELD_OUT = {
    "loss": ("loss", ".4f"),
    "exact_match": ("exact match", ".1%"),
    "reward_accuracy": ("reward accuracy", ".1%"),
    "reward_margin": ("reward margin", ".3f"),
    "kl": ("KL to the reference", ".2f"),
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


def distinct_events(run: RunHistory) -> list[Record]:
    """Each event once. All ranks record what they do together: rank 0's record is taken, and a warning's first."""
    distinct: dict[object, Record] = {}
    for number, event in enumerate(run.events):
        if event["kind"] == "warning":
            distinct.setdefault((event.get("step"), event.get("text")), event)
        elif event["kind"] != "samples" and event.get("rank", 0) == 0:
            distinct[number] = event
    return list(distinct.values())


def rounds(run: RunHistory, rank: int = 0) -> dict[int, Record]:
    """A rank's records of rounds by their numbers; of a round that was taken again the newest."""
    needed = {"round", "answers", "held_out"}
    events = [event for event in run.events if event["kind"] == "round" and event.get("rank") == rank]
    return dict(sorted({event["round"]: event for event in events if needed <= event.keys()}.items()))


def held_out(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Metric, before training, after it, where it is known."""

    def text(value: float | None, form: str) -> str:
        return "-" if value is None else f"{value:{form}}".replace("%", " %")

    return [
        (label, text(before.get(name), form), text(after.get(name), form))
        for name, (label, form) in HELD_OUT.items()
        if after.get(name) is not None
    ]


def facts(summary: Mapping[str, Any], unit: str) -> list[tuple[str, str]]:
    """How a run went, name and value. summary: of summary.json, or of `RunFigures`."""
    held, efficiency = summary.get("checkpoint"), summary.get("efficiency")
    speed = f"{three_digits(summary['pairs_per_second'])} {unit}/s"
    rows = [
        ("steps", f"{summary['steps']:,}"),
        ("ended early", summary.get("early_end")),
        ("weights", f"of step {held['step']}, the {held['which']}" if held else None),
        ("training", f"{duration(summary['seconds'])} of steps, {duration(summary['wall_seconds'])} in all"),
        ("speed", f"{speed}, {tokens_text(summary)}"),
        ("arithmetic", flops_text(summary)),
        ("efficiency", f"{100 * efficiency:.1f} % of what the hosts do alone, added up" if efficiency else None),
        ("memory", f"{size_text(summary['peak_memory_bytes'])} at most"),
        *(("cost", text) for text in costs(summary.get("cost"))),
    ]
    return [(name, text) for name, text in rows if text]


def tokens_text(summary: Mapping[str, Any]) -> str:
    """Tokens a second, real and computed ones."""
    computed = summary.get("computed_tokens_per_second")
    return f"{summary['tokens_per_second']:,.0f} tokens/s" + (f" ({computed:,.0f} with padding)" if computed else "")


def flops_text(summary: Mapping[str, Any]) -> str | None:
    """TFLOP/s of real and of computed tokens, and the share of the measured matrix rate."""
    if not summary.get("tflops"):
        return None
    share = summary.get("matrix_rate_share")
    part = f", {100 * share:.0f} % of the measured matrix rate" if share else ""
    return f"{summary['tflops']:.3g} TFLOP/s ({summary['computed_tflops']:.3g} with padding{part})"


def unit_of(run: RunHistory) -> str:
    """What a run counts: pairs, groups of answers, or rows."""
    return loss_unit(((run.start.get("config") or SettingsRecord()).get("train") or {}).get("loss"))


def loss_unit(loss: object) -> str:
    return {"grpo": "groups", "sft": "rows", "kto": "rows", "bco": "rows"}.get(str(loss), "pairs")


def costs(cost: RunCost | None) -> list[str]:
    """A line a host, and one for all."""
    if cost is None:
        return []
    named: list[tuple[str, Any]] = [(str(host["host"]), host) for host in cost["hosts"]]
    named += [("all hosts", cost)] if len(named) > 1 else []
    return [
        f"{name}: {part['energy_kwh']:.3g} kWh for {part['electricity']:.2f}, rent {part['rent']:.2f}, "
        f"together {part['cost']:.2f}"
        for name, part in named
    ]


def ranks(totals: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of the table of ranks; `planned` only where it is known. totals: of summary.json."""
    rows = []
    for rank in totals:
        seconds = rank["seconds"] or float("nan")
        planned = rank["planned_pairs_per_second"]
        row = [str(rank["rank"]), rank["host"], f"{rank['pairs']:,.4g}", three_digits(rank["pairs"] / seconds)]
        row += [three_digits(planned) if planned else "-"]
        row += [f"{100 * rank[f'{part}_seconds'] / seconds:.0f} %" for part in ("compute", "sync", "wait")]
        rows.append([*row, size_text(rank["peak_memory_bytes"])])
    known = [i for i, name in enumerate(RANK_COLUMNS) if name != "planned" or any(row[i] != "-" for row in rows)]
    return [RANK_COLUMNS[i] for i in known], [[row[i] for i in known] for row in rows]


def made_with(run: RunHistory) -> list[tuple[str, str]]:
    """The settings that matter and the environment of a run, name and value."""
    start = run.start
    config = start.get("config") or SettingsRecord()
    train, data = config.get("train") or {}, config.get("data") or {}
    named = {"data": data.get("train"), "loss": train.get("loss"), "learning rate": train.get("learning_rate")}
    named |= {"seed": train.get("seed"), "commit": start.get("commit"), "platform": start.get("platform")}
    return [(name, str(value)) for name, value in (named | (start.get("versions") or {})).items() if value is not None]


def samples(run: RunHistory) -> list[str]:
    """Prompts with the answers before and after, as rank 0 recorded them."""
    texts: dict[str, list[str]] = {}
    for event in run.of_kind("samples"):
        for sample in event.get("samples") or []:
            answers = [f"{when}: {sample.get(when)}" for when in ("before", "after") if when in sample]
            texts.setdefault(sample["prompt"], []).extend(answers)
    return ["\n".join([prompt, *dict.fromkeys(answers)]) for prompt, answers in texts.items()]


def written(form: str, value: float | None, missing: str = "–") -> str:
    return missing if value is None else form.format(value)
