"""What a person asks of a run first, from its records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import ValidationError

from lib.config.schema import CostSettings
from lib.plan.calibration import BatchCurve
from lib.plan.cost import RunCost, hosts_cost
from lib.report.history import COLUMNS, INDEX, LATE_SECONDS, SENSORS, SILENT_SECONDS, RunHistory, Series, Warned, Who
from lib.system.records import PlanRecord, Record, SettingsRecord


@dataclass(frozen=True)
class RankFigures:
    """One rank, now: means over its last records."""

    rank: int
    host: str
    share: int | None  # pairs a step
    step: int
    heard_seconds: float  # since its last record
    pairs_per_second: float
    planned_pairs_per_second: float | None
    compute_seconds: float
    sync_seconds: float
    wait_seconds: float
    peak_memory_bytes: float
    memory_limit_bytes: float | None
    bytes_per_second: float | None  # sent while it syncs
    round_trip_seconds: float | None = None  # of its slowest connection
    retransmits: float | None = None  # segments that its connections sent again
    temperature_celsius: float | None = None  # its host's
    power_watts: float | None = None
    speed_limit: float | None = None  # part of its full speed that a warm machine allows itself


@dataclass(frozen=True)
class Figures:
    """A run, now."""

    state: str  # waiting, running, silent, finished
    strategy: str | None
    reason: str | None
    step: int
    steps: int | None
    latest: dict[str, float | None]  # of the newest step
    held_out: Record  # metrics of the newest evaluation; of a finished run, of the weights in its folder
    pairs_per_second: float
    planned_pairs_per_second: float | None
    efficiency: float | None  # eta; None where the hosts were never measured
    busy: float | None  # part of their time that ranks compute
    elapsed_seconds: float
    left_seconds: float | None
    cost: RunCost | None  # so far
    cost_at_end: RunCost | None
    restarts: int
    warnings: list[Warned]
    solo_pairs_per_second: float | None = None  # all hosts alone, added up, as they were measured
    ranks: list[RankFigures] = field(default_factory=list)
    missing: list[Who] = field(default_factory=list)  # ranks of the plan whose records are not here


def figures(run: RunHistory, now: float) -> Figures:
    """Everything that a person asks first. now: Unix seconds."""
    events, series = run.events, run.series
    starts = [event for event in events if event["kind"] == "start"]
    start = starts[-1] if starts else Record()
    plans = [start.get("plan"), *(event for event in events if event["kind"] == "plan")]
    plan = next((plan for plan in reversed(plans) if plan), PlanRecord())
    hosts = [rank["host"] for rank in plan.get("ranks") or []]
    # Who is in the run now: as the plan has them, wherever a rank was before.
    present = {who: one for who, one in series.items() if not hosts or who in list(enumerate(hosts))} or series
    measured = {who: _measured_now(one) for who, one in run.measured.items()}
    ranks = [_rank_figures(who, one, plan, events, measured, now) for who, one in present.items()]
    apart = plan.get("strategy") == "independent"  # then each rank counts steps of its own, but all count pairs
    pairs = sum(one.totals[INDEX["pairs"]] for one in present.values())
    done = pairs / (plan.get("global_batch_size") or 1) if apart else max((rank.step for rank in ranks), default=0)
    first, last = _span(events, series)
    ended = bool(starts) and any(event["kind"] == "end" and event["time"] > start["time"] for event in events)
    pace = max((_seconds_a_record(one) for one in present.values()), default=0.0)
    silent = now - last > max(SILENT_SECONDS, 20 * pace)
    speed = sum(rank.pairs_per_second for rank in ranks)
    solo, steps = plan.get("solo_sum_pairs_per_second"), start.get("steps")
    steps = steps if isinstance(steps, int) else None
    step = math.ceil(done) if not steps else min(math.ceil(done), steps)
    left = None
    if steps and pace and not (ended or silent):
        remaining = max(0.0, steps - done)
        left = remaining * (plan.get("global_batch_size") or 1) / speed if apart and speed else remaining * pace
    paused = _paused_seconds(events, series)
    elapsed = (last if ended or silent else max(now, last)) - first - paused if last else 0.0
    costs = _cost(hosts or [who[1] for who in series], start)
    seconds = np.array([[rank.compute_seconds, rank.sync_seconds, rank.wait_seconds] for rank in ranks])
    newest = max(present.values(), key=lambda one: one.recent[-1][INDEX["time"]], default=None)
    row = newest.recent[-1] if newest else np.full(len(COLUMNS), np.nan)
    return Figures(
        state="finished" if ended else "waiting" if not last else "silent" if silent else "running",
        strategy=plan.get("strategy"),
        reason=plan.get("reason"),
        step=step,
        steps=steps,
        latest={name: _or_none(row[index]) for name, index in INDEX.items()},
        held_out=held_out_now(events),
        pairs_per_second=speed,
        planned_pairs_per_second=plan.get("predicted_pairs_per_second") if plan.get("calibrated") else None,
        efficiency=speed / solo if solo and plan.get("calibrated") and speed else None,
        busy=float(seconds[:, 0].sum() / seconds.sum()) if len(seconds) and seconds.sum() > 0 else None,
        elapsed_seconds=elapsed,
        left_seconds=left,
        cost=costs(elapsed),
        cost_at_end=costs(elapsed + (left or 0.0)),
        restarts=max(0, sum(event.get("rank") == 0 for event in starts) - 1),
        warnings=_warnings(events),
        solo_pairs_per_second=solo if plan.get("calibrated") else None,
        ranks=ranks,
        missing=[who for who in enumerate(hosts) if elapsed > LATE_SECONDS and series and who not in series],
    )


def held_out_now(events: Sequence[Record]) -> Record:
    """Rank 0's newest held-out metrics: at its end, a run may go back to the weights of an earlier step."""
    of_rank_0 = [event for event in events if event.get("rank") == 0]
    kinds = [event["kind"] for event in of_rank_0]
    if kinds and kinds[-1] == "end" and of_rank_0[-1].get("final_step") is not None:
        return of_rank_0[-1]
    return next((event for event in reversed(of_rank_0) if event["kind"] == "evaluation"), Record())


def _warnings(events: Sequence[Record]) -> list[Warned]:
    """What was warned of, each once, whatever the number of ranks that say so; plans warn as well."""
    warnings: dict[tuple[int | None, str], Warned] = {}
    for event in events:
        of_plan = (event.get("plan") or PlanRecord()).get("warnings") or []
        for text in [event.get("text")] if event["kind"] == "warning" else of_plan:
            if text and (None, text) not in warnings:
                warnings.setdefault((event.get("step"), text), (event["time"], event.get("step"), text))
    return list(warnings.values())


def _rank_figures(
    who: Who,
    series: Series,
    plan: PlanRecord,
    events: Sequence[Record],
    measured: dict[Who, dict[str, float]],
    now: float,
) -> RankFigures:
    rank, host = who
    rows = np.array(series.recent)
    mean = {name: _or_none(_mean(rows[:, index])) or 0.0 for name, index in INDEX.items()}
    shares, step_seconds = plan.get("shares") or [], plan.get("predicted_step_seconds")
    share = shares[rank] if rank < len(shares) else None
    own = [event for event in events if event.get("rank") == rank and event.get("host") == host]
    limit = next((e["memory_limit_bytes"] for e in reversed(own) if e.get("memory_limit_bytes")), None)
    own_measures = measured.get(who, {})
    # One rank of a host, the first, may speak for its others.
    of_host = next((one for (_, name), one in measured.items() if name == host and SENSORS & one.keys()), {})
    return RankFigures(
        rank=rank,
        host=host,
        share=share,
        step=int(rows[-1, INDEX["step"]]),
        heard_seconds=now - rows[-1, INDEX["time"]],
        pairs_per_second=mean["pairs"] / mean["step_seconds"] if mean["step_seconds"] else 0.0,
        planned_pairs_per_second=share / step_seconds if plan.get("calibrated") and share and step_seconds else None,
        compute_seconds=mean["compute_seconds"],
        sync_seconds=mean["sync_seconds"],
        wait_seconds=mean["wait_seconds"],
        peak_memory_bytes=_or_none(np.fmax.reduce(rows[:, INDEX["peak_memory_bytes"]])) or 0.0,
        memory_limit_bytes=limit,
        bytes_per_second=mean["bytes_sent"] / mean["sync_seconds"] if mean["sync_seconds"] else None,
        round_trip_seconds=own_measures.get("round_trip_seconds"),
        retransmits=own_measures.get("retransmits"),
        **{name: of_host.get(name) for name in SENSORS},
    )


def _measured_now(series: Series) -> dict[str, float]:
    """The newest known value of every measure."""
    newest: dict[str, float] = {}
    for row in series.recent:
        newest |= {name: float(row[i]) for name, i in series.index.items() if math.isfinite(row[i])}
    return newest


def _seconds_a_record(series: Series) -> float:
    """From one record to the next, evaluations and checkpoints between them included."""
    times = [row[INDEX["time"]] for row in series.recent]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _span(events: Sequence[Record], series: dict[Who, Series]) -> tuple[float, float]:
    """The times of the first and the last record; zeros where there is none."""
    times = [event["time"] for event in (*events[:1], *events[-1:])]
    times += [row[INDEX["time"]] for one in series.values() for row in (one.table()[0][0], one.recent[-1])]
    return (min(times), max(times)) if times else (0.0, 0.0)


def _paused_seconds(events: Sequence[Record], series: dict[Who, Series]) -> float:
    """The time between the last record of a process and the start of the one that went on, by rank 0's, added up."""
    own = [event for event in events if event.get("rank") == 0]
    again = [event["time"] for event in own if event["kind"] == "start"][1:]
    tables = [table for (rank, _), one in series.items() if rank == 0 for table in one.table()[1:]]  # least, greatest
    times = np.sort(np.concatenate([[event["time"] for event in own], *(table[:, INDEX["time"]] for table in tables)]))
    before = times[np.maximum(0, np.searchsorted(times, again) - 1)]
    return float(np.sum(again - before)) if again else 0.0


def _cost(hosts: Sequence[str], start: Record) -> Callable[[float], RunCost | None]:
    """What these hosts cost for given seconds, by the prices that the run was started with."""
    try:
        settings = CostSettings.model_validate((start.get("config") or SettingsRecord()).get("cost") or {})
    except ValidationError:  # another version's
        settings = CostSettings()
    return lambda seconds: hosts_cost(hosts, seconds, settings)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def batch_curves(run: RunHistory) -> list[tuple[Who, list[int], BatchCurve]]:
    """What the plan of a run rests on: every rank's micro-batches and batch curve; of equal ones of a host, one."""
    plans = [plan for event in run.events if event["kind"] == "start" and (plan := event.get("plan"))]
    plan = plans[-1] if plans else PlanRecord()
    distinct: dict[tuple[str, str], tuple[Who, list[int], BatchCurve]] = {}
    for number, (rank, curve) in enumerate(zip(plan.get("ranks") or [], plan.get("curves") or [], strict=False)):
        with contextlib.suppress(ValidationError):
            measured = BatchCurve.model_validate(curve)
            sizes = sorted({size for size in rank.get("micro_batch_sizes") or [] if isinstance(size, int) and size > 0})
            key = rank["host"], measured.model_dump_json()
            distinct.setdefault(key, ((number, rank["host"]), sizes, measured))
    return list(distinct.values())
