"""A run from its records, as its logs grow: curves, events, and the figures that a person asks for first."""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from lib.config import read_file
from lib.config.settings import CostSettings
from lib.errors import UserError
from lib.plan.time_and_cost import hosts_cost
from lib.system.records import PlanRecord, Record, SettingsRecord, Tail
from lib.system.terminal import duration, metrics_text, size_text, three_digits

ARITHMETIC = ("computed_tokens_per_second", "tflops", "computed_tflops", "matrix_rate_share")
LEARNT = "step time pairs tokens loss kl reward_accuracy reward_margin grad_norm learning_rate"
SPENT = "step_seconds compute_seconds sync_seconds wait_seconds peak_memory_bytes"
STEP_COLUMNS = (*LEARNT.split(), *SPENT.split(), *ARITHMETIC)
POINTS = 2048  # of a curve at most: of longer ones each point is the mean of 2, 4, 8, ... records
RECENT = 20  # records behind the figures of the moment
SILENT_SECONDS = 300.0
LATE_SECONDS = 20.0  # into a run every rank has written a record, here or elsewhere
LARGEST = 1e30  # a larger figure is a gap: no axis can show it

RankHost = tuple[int, str]


class StepTable:
    """Steps of one rank as rows of numbers, NaN for what a record does not have."""

    def __init__(self) -> None:
        self._rows = np.empty((0, len(STEP_COLUMNS)))
        self._new: list[list[float]] = []

    def append(self, record: Record) -> None:
        self._new.append([_number(record.get(name)) for name in STEP_COLUMNS])

    @property
    def rows(self) -> np.ndarray:
        """float64 [records, columns]."""
        if self._new:
            self._rows, self._new = np.concatenate([self._rows, np.array(self._new)]), []
        return self._rows

    def of(self, name: str) -> np.ndarray:
        """One column: float64 [records]."""
        return np.asarray(self.rows[:, STEP_COLUMNS.index(name)])


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else math.nan


class RunHistory:
    """A run's folder, read as it grows: its ranks' logs, and copies of those of other hosts."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.tails: dict[Path, Tail] = {}
        self.tables: dict[tuple[Path, RankHost], StepTable] = {}
        self.others: dict[Path, list[Record]] = {}  # records that are no numbers of a rank
        self.version = 0  # changes when a record was read

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def read(self) -> bool:
        """Reads a piece of every log; False where there was nothing new in any."""
        logs, before = self.folder / "logs", self.version
        with contextlib.suppress(OSError):  # the folder is removed at this moment
            for path in (*logs.glob("rank-*.jsonl"), *logs.glob("*/rank-*.jsonl")):
                if path.parent.name != "discarded" and path.is_file():
                    self.tails.setdefault(path, Tail(path))
        for path, tail in self.tails.items():
            begins, lines = tail.read()
            if begins:
                self.others[path] = []
                self.tables = {key: table for key, table in self.tables.items() if key[0] != path}
            for line in lines.splitlines():
                with contextlib.suppress(ValueError, RecursionError):  # half a line of a crash, or no record
                    self._take(path, json.loads(line))
            self.version += bool(lines)
        return self.version > before

    def _take(self, path: Path, record: Any) -> None:
        if not isinstance(record, dict) or not math.isfinite(_number(record.get("time"))):
            return
        if record.get("kind") == "step":
            who = record.get("rank", 0), record.get("host", "")
            self.tables.setdefault((path, who), StepTable()).append(record)
        elif isinstance(record.get("kind"), str):
            self.others[path].append(record)

    @property
    def events(self) -> list[Record]:
        """All records that are no measurements, by time; of two copies of one file each record once."""
        every = [event for _, records in sorted(self.others.items()) for event in records]
        distinct = {(e["time"], e["kind"], e.get("rank"), e.get("host"), e.get("text")): e for e in every}
        return sorted(distinct.values(), key=lambda event: event["time"])

    def of_kind(self, kind: str) -> list[Record]:
        """Rank 0's records of a kind: all ranks record what they do together."""
        return [event for event in self.events if event["kind"] == kind and event.get("rank", 0) == 0]

    @property
    def start(self) -> Record:
        """The newest start."""
        return next((event for event in reversed(self.events) if event["kind"] == "start"), Record())

    @property
    def config(self) -> SettingsRecord:
        """The settings that the run was started with; every section is empty before its start."""
        return defaultdict(dict, self.start.get("config") or {})

    @property
    def plan(self) -> PlanRecord:
        """The plan that is in force: of the newest start, or made since."""
        plans = [self.start.get("plan"), *(event for event in self.events if event["kind"] == "plan")]
        return next((plan for plan in reversed(plans) if plan), PlanRecord())

    @property
    def stored_summary(self) -> Record:
        """summary.json; empty where there is none."""
        try:
            return read_file.read_object(self.folder / "summary.json", "the run's")
        except (OSError, UserError):
            return Record()

    @property
    def series(self) -> dict[RankHost, StepTable]:
        """Step records by rank and host, in the order of ranks; of two copies of one file the longer."""
        every = [(who, table) for (_, who), table in self.tables.items()]
        return dict(sorted(sorted(every, key=lambda pair: len(pair[1].rows)), key=lambda pair: pair[0]))

    def curve(self, who: RankHost, name: str, over: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and a column's means over buckets of them; with `over`, divided by that column's means. Steps that a
        crash undid are left out, where a host that was lost still has them."""
        table = self.series[who]
        keep = np.ones(len(table.rows), bool)
        for event in self.of_kind("start"):
            if (step := event.get("resumed_from_step")) is not None:  # or this rank's own last step that lived on
                resumed = (event.get("resumes") or [[step]])[-1]
                last = resumed[1 + who[0]] if 1 + who[0] < len(resumed) else resumed[0]
                keep &= ~((table.of("time") < event["time"]) & (table.of("step") > last))
        steps, values = table.of("step")[keep], table.of(name)[keep]
        below = np.ones(len(values)) if over is None else table.of(over)[keep]
        bounds = np.arange(0, len(steps), 2 ** max(0, math.ceil(math.log2(max(1, len(steps)) / POINTS))))
        if not len(bounds):
            return steps, values
        finite = np.isfinite(values) & (below > 0)
        sums, counts = (np.add.reduceat(np.where(finite, array, 0.0), bounds) for array in (values, below))
        means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        return np.maximum.reduceat(steps, bounds), means


def runs_in(folder: Path) -> list[Path]:
    """The runs of a folder that have logs, the newest first."""
    by_time = []
    for path in Path(folder).glob("*/logs"):
        with contextlib.suppress(OSError):  # removed at this moment
            by_time.append((path.stat().st_mtime, path.parent))
    return [path for _, path in sorted(by_time, reverse=True)]


@dataclass(frozen=True)
class RunFigures:
    """A run, now."""

    state: str  # waiting, running, silent, finished
    plan: PlanRecord
    steps: int | None  # of the whole run
    summary: dict[str, Any]  # so far, under the names of summary.json; of `ranks` means over their last records
    loss: float | None  # of the newest step
    held_out: Record  # metrics of the newest evaluation; of a finished run, of the weights in its folder
    left_seconds: float | None
    restarts: int
    warnings: list[Record]  # each once, whatever the number of ranks that record it
    missing: list[RankHost]  # ranks of the plan whose records are not here


def figures(run: RunHistory, now: float) -> RunFigures:
    """Everything that a person asks first. now: Unix seconds."""
    events, series, start, plan = run.events, run.series, run.start, run.plan
    hosts = [rank["host"] for rank in plan.get("ranks") or []]
    present = {who: table for who, table in series.items() if not hosts or who in [*enumerate(hosts)]} or series
    ranks = [_rank_figures(who, table, plan) for who, table in present.items()]
    times = [event["time"] for event in (*events[:1], *events[-1:])]
    times += [time for table in series.values() for time in table.of("time")[[0, -1]]]
    first, last = min(times, default=0.0), max(times, default=0.0)
    ends = [event for event in events if event["kind"] == "end" and event["time"] > start.get("time", 0.0)]
    silent = now - last > max(SILENT_SECONDS, 20 * max((rank["seconds"] for rank in ranks), default=0.0))
    steps = total if isinstance(total := start.get("steps"), int) else None
    done = _steps_done(plan, start, present)
    is_over = bool(ends) or silent
    elapsed = (last if is_over else max(now, last)) - first - _paused_seconds(events, series) if last else 0.0
    newest = max(present.values(), key=lambda table: table.of("time")[-1], default=None)
    loss = float(newest.of("loss")[-1]) if newest else math.nan
    sums = {name: sum(rank[name] for rank in ranks) for name in ("pairs_per_second", *ARITHMETIC[:-1])}
    rate = sum(rank["computed_tflops"] / rank["matrix_rate_share"] for rank in ranks if rank["matrix_rate_share"])
    summary = {
        "steps": math.ceil(min(done, steps or done)),
        "seconds": max((float(np.nansum(table.of("step_seconds"))) for table in series.values()), default=0.0),
        "wall_seconds": elapsed,
        "tokens_per_second": sum(rank["tokens"] / rank["seconds"] for rank in ranks if rank["seconds"]),
        **sums,
        "matrix_rate_share": sums["computed_tflops"] / rate if rate else 0.0,
        "efficiency": _efficiency(plan, events, present, start.get("time", 0.0)),
        "peak_memory_bytes": max((rank["peak_memory_bytes"] for rank in ranks), default=0.0),
        "cost": None,
        "ranks": ranks,
    }
    if ends:  # the run's own figures: of all steps, and of merges
        summary |= {name: run.stored_summary.get(name, value) for name, value in summary.items()} | {"ranks": ranks}
    with contextlib.suppress(ValidationError):  # prices of another version
        prices = CostSettings.model_validate(run.config["cost"])
        summary["cost"] = hosts_cost(hosts or [host for _, host in series], summary["wall_seconds"], prices)
    # At its end, a run may go back to the weights of an earlier step.
    evaluations = [end for end in ends if end.get("rank", 0) == 0 and end.get("final_step") is not None]
    return RunFigures(
        state="finished" if ends else "waiting" if not last else "silent" if silent else "running",
        plan=plan,
        steps=steps,
        summary=summary,
        loss=loss if math.isfinite(loss) else None,
        held_out=(evaluations or run.of_kind("evaluation") or [Record()])[-1],
        left_seconds=elapsed / done * max(0.0, steps - done) if steps and done and not is_over else None,
        restarts=max(0, len(run.of_kind("start")) - 1),
        warnings=_warnings(events),
        missing=[who for who in enumerate(hosts) if elapsed > LATE_SECONDS and series and who not in series],
    )


def _rank_figures(who: RankHost, table: StepTable, plan: PlanRecord) -> dict[str, Any]:
    rows, (rank, host) = table.rows[-RECENT:], who
    counts = np.maximum(1, np.isfinite(rows).sum(axis=0))
    latest = dict(zip(STEP_COLUMNS, (np.nansum(rows, axis=0) / counts).tolist(), strict=True))
    shares, step_seconds, seconds = plan.get("shares") or [], plan.get("predicted_step_seconds"), latest["step_seconds"]
    share = shares[rank] if rank < len(shares) and plan.get("calibrated") else None
    return {
        **latest,
        "rank": rank,
        "host": host,
        "seconds": seconds,
        "peak_memory_bytes": float(np.nanmax(table.of("peak_memory_bytes")[-RECENT:], initial=0.0)),
        "pairs_per_second": latest["pairs"] / (seconds or math.inf),
        "planned_pairs_per_second": share / step_seconds if share and step_seconds else None,
    }


def _steps_done(plan: PlanRecord, start: Record, present: dict[RankHost, StepTable]) -> float:
    """Global steps. Independent ranks count steps of their own, but all count pairs; epochs end in short batches."""
    batch, rows = plan.get("global_batch_size"), start.get("rows")
    if plan.get("strategy") != "independent" or not batch:
        return float(max((table.of("step")[-1] for table in present.values()), default=0.0))
    pairs = float(sum(np.nansum(table.of("pairs")) for table in present.values()))
    epochs, rest = divmod(pairs, rows) if rows else (0.0, pairs)
    return epochs * -(-(rows or 0) // batch) + rest / batch


def _efficiency(
    plan: PlanRecord, events: Sequence[Record], present: dict[RankHost, StepTable], began: float
) -> float | None:
    """Speed over the sum of what the hosts do alone; waits at rounds' ends and merges count, as in summary.json."""
    solo = plan.get("solo_sum_pairs_per_second")
    if not solo or not plan.get("calibrated") or len(plan.get("ranks") or []) < 2:
        return None
    pairs, seconds = [], []
    for (rank, _), table in present.items():
        since = table.of("time") >= began
        merges = [e for e in events if e["kind"] == "merge" and e.get("rank") == rank and e["time"] >= began]
        ends = sum(e.get("seconds", 0.0) + e.get("waited_seconds", 0.0) for e in merges)
        pairs.append(float(np.nansum(table.of("pairs")[since])))
        seconds.append(float(np.nansum(table.of("step_seconds")[since])) + ends)
    is_divided = plan.get("strategy") in ("sharded", "pipelined")  # then every rank does every pair
    longest = max(seconds, default=0.0)
    return (pairs[0] if is_divided else sum(pairs)) / longest / solo if longest else None


def _warnings(events: Sequence[Record]) -> list[Record]:
    """Each warning once; plans warn as well."""
    distinct: dict[object, Record] = {}
    for event in events:
        for text in (event.get("plan") or PlanRecord()).get("warnings") or []:
            distinct.setdefault((None, text), {"kind": "warning", "time": event["time"], "text": text})
        said = event.get("text")
        if event["kind"] == "warning" and said and (None, said) not in distinct:
            distinct.setdefault((event.get("step"), said), event)
    return list(distinct.values())


def _paused_seconds(events: Sequence[Record], series: dict[RankHost, StepTable]) -> float:
    """The time between the last record of a process and the start of the next one, by rank 0's, added up."""
    of_rank_0 = [event for event in events if event.get("rank") == 0]
    again = [event["time"] for event in of_rank_0 if event["kind"] == "start"][1:]
    steps = [table.of("time") for (rank, _), table in series.items() if rank == 0]
    times = np.sort(np.concatenate([[event["time"] for event in of_rank_0], *steps]))
    before = times[np.maximum(0, np.searchsorted(times, again) - 1)]
    return float(np.sum(again - before)) if again else 0.0


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
    share = summary.get("matrix_rate_share")
    speed = f"{three_digits(summary['pairs_per_second'])} {unit}/s, {summary['tokens_per_second']:,.0f} tokens/s"
    speed += f" ({computed:,.0f} with padding)" if computed else ""
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
