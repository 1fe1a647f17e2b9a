"""Training on paper: from batch curves, what a division of the work would reach on 2 to 1,000 hosts.

    python benchmarks/simulate.py                      2 to 1,000 invented hosts
    python benchmarks/simulate.py --hosts published:m4-max,published:m3-ultra --global-batch 128
    python benchmarks/simulate.py --hosts published:m4-max,published:m3-ultra --shares 84,44

A host is `published:NAME`, or the NAME of a file in calibration/. Invented hosts take the shape of a
published curve, at a speed of their own. A played step lasts as long as its slowest host, then the sync;
hosts are noisy, throttle for a while, and fail. All divisions meet the same noise:

    equal         the same number of pairs each
    proportional  pairs in proportion to what each host does alone, as one would by hand
    planned       the planner's shares, once
    given         --shares
    replanned     planned again every --replan-every steps from the speeds just seen
    ideal         every host busy all the time at its best micro-batch, no sync, no failure

Efficiency is speed over the sum of what the hosts do alone; "predicted" is without noise, drift and failures.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import numpy as np

from lib.config.load import load  # noqa: E402
from lib.errors import UserError  # noqa: E402
from lib.plan import calibration, strategy  # noqa: E402
from lib.plan.calibration import BatchCurve, CurveKey, HostCalibration, Link, Machine  # noqa: E402
from lib.plan.facts import PlanFacts, RankHost  # noqa: E402
from lib.plan.plan import ClusterPlan, plan_cluster  # noqa: E402
from lib.plan.shares import distribute_work, solo_pairs_per_second  # noqa: E402
from lib.system import terminal  # noqa: E402
from lib.system.terminal import Terminal  # noqa: E402


@dataclass(frozen=True)
class Weather:
    """What plans do not know: each host's slowdown at each step, and the steps at which some host fails."""

    slowdown: np.ndarray  # float64 [steps, hosts], about 1
    state: np.ndarray  # float64 [steps, hosts], the part of it that lasts for many steps: what replanning can see
    fails: np.ndarray  # bool [steps]


def make_weather(rng: np.random.Generator, steps: int, hosts: int, settings: argparse.Namespace) -> Weather:
    """Lognormal noise a step, times a drift that sets in and ends at random (a hot machine throttles)."""
    noise = np.exp(settings.noise * rng.standard_normal((steps, hosts)))
    level = np.exp(settings.drift * np.abs(rng.standard_normal((steps, hosts))))
    changes = rng.random((steps, hosts)) < settings.drift_changes / steps
    state = np.ones((steps, hosts))
    for step in range(1, steps):
        state[step] = np.where(changes[step], level[step], state[step - 1])
    fails = rng.random(steps) < 1 - (1 - settings.failure_probability) ** hosts
    return Weather(noise * state, state, fails)


def slower(curve: BatchCurve, factor: float) -> BatchCurve:
    """The curve of a host that takes `factor` times as long."""
    rates = {point.batch_size: point.pairs_per_second / factor for point in curve.points}
    return BatchCurve.from_rates(rates)


def play(plans: Sequence[ClusterPlan], weather: Weather, settings: argparse.Namespace) -> float:
    """Pairs/s over all steps, each with its plan; a failure repeats the work since the last checkpoint."""
    seconds = 0.0
    since_checkpoint = 0.0
    for step, plan in enumerate(plans):
        computes = np.array([rank.predicted_compute_seconds or 0.0 for rank in plan.ranks])
        step_seconds = float((computes * weather.slowdown[step]).max()) + plan.sync_seconds
        if step % settings.checkpoint_every == 0:
            since_checkpoint = 0.0
        since_checkpoint += step_seconds
        seconds += step_seconds
        if weather.fails[step]:
            seconds += settings.restart_seconds + since_checkpoint
    return plans[0].global_batch_size * len(plans) / seconds


def compare(
    hosts: Sequence[str],
    curves: Sequence[BatchCurve],
    global_batch_size: int,
    sync_seconds: float,
    shares: Sequence[int] | None,
    settings: argparse.Namespace,
) -> tuple[dict[str, Any], dict[str, ClusterPlan]]:
    """Plays every division of one cluster, among them the `shares` that are given."""
    world_size = len(hosts)
    rng = np.random.default_rng([settings.seed, world_size])
    weather = make_weather(rng, settings.steps, world_size, settings)
    solo = [solo_pairs_per_second(curve) for curve in curves]

    def plan(divided: Sequence[int] | None, at: Sequence[BatchCurve] = curves) -> ClusterPlan:
        return plan_cluster(hosts, global_batch_size, shares=divided, curves=at, sync_seconds=sync_seconds)

    plans = {
        "equal": plan(distribute_work(global_batch_size, [1] * world_size)),
        "proportional": plan(distribute_work(global_batch_size, solo)),
        "planned": plan(None),
    }
    if shares is not None:
        plans["given"] = plan(shares)
    played = {name: [plans[name]] * settings.steps for name in plans}
    played["replanned"] = replan(plans["planned"], plan, curves, weather, settings)
    ideal = settings.steps / np.sum(1 / (weather.slowdown**-1 @ np.array(solo)))
    row: dict[str, Any] = {
        "hosts": world_size,
        "global_batch_size": global_batch_size,
        "sync_seconds": round(sync_seconds, 4),
        "failures": int(weather.fails.sum()),
        "solo_sum_pairs_per_second": round(sum(solo), 3),
        "ideal_pairs_per_second": round(float(ideal), 3),
    }
    for name in played:
        speed = play(played[name], weather, settings)
        row[f"{name}_pairs_per_second"] = round(speed, 3)
        row[f"{name}_efficiency"] = round(speed / sum(solo), 4)
    for name, of in plans.items():
        row[f"{name}_predicted_efficiency"] = round(of.efficiency or 0.0, 4)
    return row, plans


def replan(
    first: ClusterPlan, plan: Any, curves: Sequence[BatchCurve], weather: Weather, settings: argparse.Namespace
) -> list[ClusterPlan]:
    """The plan at each step: made again from the slowdowns at the step before, every few steps."""
    plans = []
    current, planned_at = first, weather.state[0]
    for step in range(settings.steps):
        if step and step % settings.replan_every == 0 and (weather.state[step - 1] != planned_at).any():
            planned_at = weather.state[step - 1]
            seen = [slower(curve, factor) for curve, factor in zip(curves, weather.state[step - 1], strict=True)]
            shares = plan(None, seen).shares
            current = plan(shares)  # the played times are the curves', times the weather
        plans.append(current)
    return plans


# ------------------------------------------------------------------------------------------------------------
# Clusters


def known_curve(name: str) -> BatchCurve:
    """The (first) curve of published:NAME or of calibration/NAME.json.

    Raises:
        UserError: there is none.
    """
    source, _, published_name = name.rpartition(":")
    if source == "published":
        published = {chip: host for chip, host in calibration.read_published().items() if host.curves}
        if published_name not in published:
            raise UserError(f"--hosts {name}: not published; there are {', '.join(sorted(published))}")
        return published[published_name].curves[0]
    if source:
        raise UserError(f"--hosts {name}: a host is published:NAME or the NAME of a file in calibration/")
    curves = calibration.read_calibration(calibration.FOLDER / f"{name}.json").curves
    if not curves:
        raise UserError(f"--hosts {name}: its file has no curve; run make calibrate there")
    return curves[0]


def invented_hosts(count: int, shapes: Sequence[BatchCurve], settings: argparse.Namespace) -> list[BatchCurve]:
    """Hosts of a few models, each of a known curve's shape, up to `skew` times slower than the fastest."""
    rng = np.random.default_rng([settings.seed, count, 1])
    kinds = []
    for _ in range(min(count, settings.models)):
        shape = shapes[int(rng.integers(len(shapes)))]
        speed = settings.pairs_per_second / settings.skew ** rng.random()
        kinds.append(slower(shape, solo_pairs_per_second(shape) / speed))
    return [kinds[i] if i < len(kinds) else kinds[int(rng.integers(len(kinds)))] for i in range(count)]


def ring_seconds(world_size: int, settings: argparse.Namespace) -> float:
    """A ring all-reduce: 2 (N - 1) messages, and 2 (N - 1) / N of the gradient over each link."""
    messages = 2 * (world_size - 1)
    carried = messages / world_size * settings.gradient_bytes
    seconds: float = messages * settings.latency_seconds + carried / settings.bandwidth_bytes_per_second
    return seconds


# ------------------------------------------------------------------------------------------------------------
# What a person sees


def divisions(row: dict[str, Any]) -> list[str]:
    """The played ones, in the order of the table."""
    played = [key for key in row if key.endswith("_efficiency") and "predicted" not in key]
    return [key.removesuffix("_efficiency") for key in played]


def of_a_run(hosts: Sequence[str], curves: Sequence[BatchCurve], row: dict[str, Any], *words: str) -> ClusterPlan:
    """The plan that a run would start with whose model has these curves, and its predictions of all strategies."""
    key, ranks = CurveKey(model="model", method="lora", dtype="float32", sequence_length=1), []
    link = Link(backend="ring", latency_seconds=row["sync_seconds"] + 1e-9, bandwidth_bytes_per_second=1e15)
    for host, curve in zip((name.rpartition(":")[2] for name in hosts), curves, strict=True):
        machine = Machine(host=host, device_name=host, device="metal")
        of_host = {"curves": (curve.model_copy(update={"key": key}),), "links": (link,)}
        ranks.append(RankHost(host, HostCalibration(machine=machine, **of_host)))
    config = load(
        None, ["model.path=model", "data.train=data", f"train.global_batch_size={row['global_batch_size']}", *words]
    )
    return strategy.plan(PlanFacts(config, ranks, key, 1, "ring", 1000))


def show_plan(say: Terminal, plan: ClusterPlan) -> None:
    """A named cluster's shares, and what each strategy would give."""
    ranks, batch = plan.rows()[:32], plan.global_batch_size
    columns = [name for name in ranks[0] if any(rank[name] not in ("-", "unknown") for rank in ranks)]
    say.table(f"{batch} pairs a step", columns, [[rank[name] for name in columns] for rank in ranks], 2)
    say.line("")
    table = [
        [
            f"{'➜' if way.chosen else ' '} {way.strategy}",
            f"{way.efficiency:.0%}",
            f"{way.step_seconds:.3f} s",
            f"{batch / way.step_seconds:.0f}",
        ]
        for way in plan.predictions
        if way.efficiency and way.step_seconds
    ]
    say.table("strategies, as predicted; η: of what the hosts do alone, added up", ["", "η", "step", "pairs/s"], table)
    say.line("")


def show(say: Terminal, rows: Sequence[dict[str, Any]]) -> None:
    """The played efficiencies."""
    table = []
    for row in rows:
        cells = [f"{row[key]:,}" for key in ("hosts", "global_batch_size", "sync_seconds", "failures")]
        for name in divisions(row):
            predicted = row.get(f"{name}_predicted_efficiency")
            played = f"{row[f'{name}_efficiency']:.2f}"
            cells.append(f"{predicted:.2f} / {played}" if predicted is not None else played)
        table.append([*cells, f"{row['ideal_pairs_per_second'] / row['solo_sum_pairs_per_second']:.2f}"])
    columns = ["hosts", "global batch", "sync s", "failures", *divisions(rows[0]), "ideal"]
    say.table("efficiency: predicted / played with noise, drift and failures", columns, table, text_columns=0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def number(option: str, default: float | None, meaning: str) -> None:
        parser.add_argument(option, type=float, metavar="X", default=default, help=meaning)

    parser.add_argument("--hosts", help="comma-separated; default: invented ones")
    parser.add_argument("--shares", help="pairs per host and step, comma-separated, instead of the planner's")
    parser.add_argument("--global-batch", type=int, help="pairs a step (default: 32 a host)")
    number("--sync-seconds", None, "of one step (default: a ring all-reduce over the link)")
    parser.add_argument("--count", default="2,4,8,16,32,64,128,256,512,1000", help="how many invented hosts")
    number("--pairs-per-second", 4.0, "of the fastest invented host")
    number("--skew", 4.0, "fastest over slowest invented host")
    parser.add_argument("--models", type=int, default=40, metavar="N", help="different invented machines at most")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="played")
    number("--noise", 0.02, "spread of a step's time")
    number("--drift", 0.2, "spread of the lasting slowdowns; 0 for none")
    number("--drift-changes", 1.0, "lasting changes a host and play")
    parser.add_argument("--replan-every", type=int, default=20, metavar="N", help="steps")
    number("--failure-probability", 1e-5, "of a host in a step")
    number("--restart-seconds", 60.0, "after a failure")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="steps")
    number("--gradient-bytes", 20e6, "sent a step")
    number("--latency-seconds", 5e-5, "of one message")
    number("--bandwidth-bytes-per-second", 1.2e9, "of one link")
    parser.add_argument("--quick", action="store_true", help="fewer clusters and steps")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    if settings.quick:
        settings.steps = min(settings.steps, 100)
        settings.count = "2,10,100,1000"
    return settings


def integers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"{option} {text}: expected whole numbers separated by commas, e.g. 84,44") from None


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse(arguments)
    if settings.steps < 1 or (settings.global_batch is not None and settings.global_batch < 1):
        raise UserError("--steps and --global-batch are at least 1")
    shares = integers("--shares", settings.shares) if settings.shares else None
    if settings.hosts:
        names = settings.hosts.split(",")
        clusters = [(names, [known_curve(name) for name in names])]
    else:
        shapes = [machine.curves[0] for machine in calibration.read_published().values() if machine.curves]
        counts = integers("--count", settings.count)
        clusters = [([f"host-{i}" for i in range(n)], invented_hosts(n, shapes, settings)) for n in counts]

    say = Terminal()
    rows: list[dict[str, Any]] = []
    first: dict[str, ClusterPlan] = {}
    for hosts, curves in clusters:
        sync = ring_seconds(len(hosts), settings) if settings.sync_seconds is None else settings.sync_seconds
        pairs = settings.global_batch or (sum(shares) if shares else 32 * len(hosts))
        row, plans = compare(hosts, curves, pairs, sync, shares, settings)
        rows.append(row)
        first = first or plans
    plan = first["given" if shares else "planned"]
    if settings.hosts:
        show_plan(say, of_a_run(*clusters[0], rows[0], *([f"plan.shares={shares}"] if shares else ())))
    show(say, rows)
    result = {
        "hosts": clusters[0][0] if settings.hosts else None,
        "global_batch_size": plan.global_batch_size,
        "shares": plan.shares,
        "micro_batch_sizes": [list(rank.micro_batch_sizes) for rank in plan.ranks],
        "step_seconds": plan.predicted_step_seconds,
        "pairs_per_second": plan.predicted_pairs_per_second,
        "efficiency": plan.efficiency,
        "seed": settings.seed,
        "rows": rows,
    }
    say.record(result)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        terminal.error(str(error))
        sys.exit(2)
