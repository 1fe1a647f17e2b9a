"""The plan of every step: the first from every host's calibration, others when measured times ask for them.

All ranks see the same times (they travel with the gradients), so all decide alike at the same step, without a
word. Batches are made some steps ahead: a new plan begins at the first step that nobody has begun to make.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lib import calibration, machine, matmul
from lib import model as models
from lib.advice import advised
from lib.calibration import Curve, CurveKey, HostCalibration
from lib.choice import plan_run, slower
from lib.config import Config, UserError
from lib.config import Plan as PlanSettings
from lib.division import shape_of
from lib.estimate import needs_rates
from lib.forward import length_multiple
from lib.plan import ClusterPlan, plan_cluster, plan_sharded, with_micro_batches
from lib.shapes import padded_lengths
from lib.shares import DEFAULT_MICRO_BATCH_SIZE
from lib.sync import World


def first_plan(config: Config, world: World, hosts: list[str], lengths: np.ndarray) -> ClusterPlan:
    """The plan that a run starts with, and what is likely to be a mistake in it (lib/advice.py).

    Each rank reads its own host's calibration, and all exchange them.

    lengths: int [n], of the training data's rows, as Dataset.lengths.

    Raises:
        AgreedError: a calibration is corrupt, a host too small, or settings do not fit the world.
    """
    return advised(config, _first_plan(config, world, hosts, lengths))


def _first_plan(config: Config, world: World, hosts: list[str], lengths: np.ndarray) -> ClusterPlan:
    if config.strategy == "sharded" and world.size == 1:
        sizes = config.plan.micro_batch_sizes
        alone = {"shares": None, "micro_batch_sizes": sizes and sizes[:1]}  # one rank holds all
        config = config.model_copy(update={"plan": config.plan.model_copy(update=alone)})
    with world.agreeing("reading the calibration"):
        own = calibration.own_calibration(Path(config.plan.calibration_dir), hosts, world.rank)
        folder = models.resolve(config.model.path, config.model.revision)
        shape = None
        if config.strategy in ("auto", "sharded") and world.size > 1:
            with contextlib.suppress(*([UserError] if config.strategy == "auto" else [])):  # whoever asks is told why
                shape = shape_of(models.stored_config(config.model), _dtype(config))
        padded = padded_lengths(lengths, length_multiple(config.data))
        key = calibration.curve_key(config, folder, round(float(padded.mean())))
    # Unlike devices pad unlike: rank 0's lengths are the ones that all plan with.
    agreed = json.loads(world.broadcast_text(json.dumps({"key": key.model_dump(), "longest": int(padded.max())})))
    texts = world.gather_long_text(own.model_dump_json() if own else "", "every host's calibration")
    memory = world.gather_text(json.dumps(_memory_bytes(hosts, world)), "every host's memory")
    chips = world.gather_text(machine.identify(hosts[world.rank]).device_name, "every host's chip")
    calibrations = [HostCalibration.model_validate_json(text) if text else None for text in texts]
    key = calibration.CurveKey(**agreed["key"])
    with world.agreeing("planning"):
        return plan_run(
            config,
            hosts,
            calibrations,
            key,
            longest=agreed["longest"],
            backend=world.backend,
            versions=machine.versions(),
            device_names=chips,
            published=list(calibration.read_published().values()),
            dataset_size=len(lengths),
            shape=shape,
            memory_bytes=[json.loads(text) for text in memory],
            gflops=_matmul_rates(hosts, calibrations, key, world),
        )


def _matmul_rates(
    hosts: list[str], calibrations: Sequence[HostCalibration | None], key: CurveKey, world: World
) -> list[float] | None:
    """Every rank's, measured now, where a host of several was not calibrated for this; of one host's ranks all are equal."""
    if not needs_rates(hosts, calibrations, key):
        return None
    return [float(text) for text in world.gather_text(repr(matmul.quick_gflops()), "every rank's matrix-product rate")]


def sharded_plan(config: Config, world: World, hosts: list[str]) -> ClusterPlan:
    """The division of a model, from what every host has: memory, and the calibrated rate of its matrix products.

    Raises:
        AgreedError: the model cannot be divided, or not among these hosts.
    """
    with world.agreeing("reading the calibration"):
        own = calibration.own_calibration(Path(config.plan.calibration_dir), hosts, world.rank)
        shape = shape_of(models.stored_config(config.model), _dtype(config))
        memory = _memory_bytes(hosts, world)
    facts = world.gather_text(json.dumps([memory, own.gflops if own else None]), "every host's memory and speed")
    memory_bytes, gflops = zip(*map(json.loads, facts), strict=True)
    with world.agreeing("planning"):
        return plan_sharded(config, hosts, shape, memory_bytes, gflops)


def _dtype(config: Config) -> str | None:
    """Of the weights, where it is not the stored one."""
    return config.model.dtype or ("float32" if config.model.random_init else None)


def _memory_bytes(hosts: list[str], world: World) -> int | None:
    """What this rank may use."""
    memory = machine.memory_limit_bytes()
    if memory and machine.mlx_device()[0] != "cuda":  # there, each rank has a GPU of its own
        memory //= hosts.count(hosts[world.rank])
    return memory


class Schedule:
    """The plan of every step.

    Args:
        first: the plan that the run starts with.
        settings: threshold and patience; a user's shares stand, whatever is measured.
        lead: a plan that is decided after step s begins at step s + lead, which nobody has begun to make.
        steps: of the whole run.
    """

    def __init__(self, first: ClusterPlan, settings: PlanSettings, lead: int, steps: int):
        self.plans: list[tuple[int, ClusterPlan]] = [(1, first)]  # (first step, plan), steps counted from 1
        self.settings, self.lead, self.steps = settings, lead, steps
        self.is_open = settings.replan and settings.shares is None and len(first.workers) > 1
        self.remarks: list[str] = []  # what the times say of shares that stand whatever they say; the caller takes them
        self._is_watched = len(first.workers) > 1
        self._speeds: deque[np.ndarray] = deque(maxlen=settings.replan_steps)  # tokens/s by rank, of late
        self._costs: deque[float] = deque(maxlen=settings.replan_steps)  # tokens a pair
        self._excess: deque[float] = deque(maxlen=settings.replan_steps)  # slowest over balanced, less one

    def at(self, step: int) -> ClusterPlan:
        """The plan of a step."""
        return next(plan for first, plan in reversed(self.plans) if first <= step)

    def observe(self, step: int, tokens: Sequence[float], compute_seconds: Sequence[float]) -> ClusterPlan | None:
        """Takes in a step's tokens (or what costs as much) and seconds by rank; a new plan, if it is time.

        A host's speed is its tokens a second, so that longer rows are no slowdown. The slowest rank ends the
        step: when in `replan_steps` steps in a row it took more than `replan_threshold` longer than the same
        work spread evenly over the speeds, and another plan is that much shorter at the speeds' medians, that
        is taken.
        """
        if not self._is_watched:
            return None
        first, plan = self.plans[-1]
        shares = np.array(plan.shares, dtype=np.float64)
        worked = shares > 0
        # A plan's first step compiles and allocates; a step without some rank's rows says too little.
        counts, seconds = np.array(tokens, dtype=np.float64), np.array(compute_seconds, dtype=np.float64)
        comparable = (
            worked.any() and (counts[worked] > 0).all() and (seconds[worked] > 0).all() and np.isfinite(seconds).all()
        )
        if step <= first or not comparable:
            return None
        speeds = np.divide(counts, seconds, out=np.zeros_like(counts), where=worked)
        self._speeds.append(speeds)
        self._costs.append(counts.sum() / plan.global_batch_size)
        self._excess.append((shares[worked] / speeds[worked]).max() * speeds.sum() / plan.global_batch_size - 1)
        if len(self._excess) < self.settings.replan_steps or min(self._excess) <= self.settings.replan_threshold:
            return None
        other = self._plan_again(plan, step)
        self._forget()
        if other is None:
            return None
        if not self.is_open:
            fixed = "plan.shares" if self.settings.shares is not None else "plan.replan=false"
            self.remarks.append(f"{fixed} keeps shares {plan.shares}, where {other.shares} would do: {other.reason}")
            self._is_watched = False  # once is enough
            return None
        self.plans.append((step + self.lead, other))
        return other

    def _plan_again(self, plan: ClusterPlan, step: int) -> ClusterPlan | None:
        """The best plan at the medians of what was just seen, if it is worth a change."""
        relative = np.median([speeds / speeds.sum() for speeds in self._speeds], axis=0)
        pairs_per_second = float(np.median([s.sum() / c for s, c in zip(self._speeds, self._costs, strict=True)]))
        rates = relative / relative.sum() * pairs_per_second
        curves, sizes, factors = self._curves_at(plan, rates)
        now = max(
            plan.shares[rank] / rate + curves[rank].step_overhead_seconds for rank, rate in enumerate(rates) if rate
        )
        # A rank that is left out stays in the world and its collectives: leaving it out saves no sync.
        other = plan_cluster(
            [rank.host for rank in plan.ranks], plan.global_batch_size, micro_batch_sizes=sizes, curves=curves
        )
        then = (other.predicted_step_seconds or 0.0) - other.sync_seconds
        if other.shares == plan.shares or now <= then * (1 + self.settings.replan_threshold):
            return None
        # Short runs end before a change pays, and their steps are so short that mere noise looks like drift.
        if (now - then) * (self.steps - step - self.lead + 1) < self.settings.replan_seconds:
            return None
        usual = float(np.median(list(factors.values())))
        most_changed = sorted(factors, key=lambda rank: -abs(np.log(factors[rank] / usual)))[:4]
        speeds = [f"rank {rank} ({plan.ranks[rank].host}) {rates[rank]:.4g}" for rank in sorted(most_changed)]
        reason = (
            f"measured up to step {step}: {now:.4g} s a step in the old shares, {then:.4g} s in the new; "
            f"pairs/s of {', '.join(speeds)}"
        )
        # Speeds alone are what the summary's efficiency compares with; they were not measured again.
        ranks = [
            replace(new, solo_pairs_per_second=old.solo_pairs_per_second)
            for new, old in zip(other.ranks, plan.ranks, strict=True)
        ]
        return replace(
            plan,
            ranks=tuple(ranks),
            curves=other.curves if None not in plan.curves else plan.curves,
            reason=reason,
            warnings=other.warnings,
            predictions=(),
        )

    def _curves_at(
        self, plan: ClusterPlan, rates: np.ndarray
    ) -> tuple[list[Curve], list[int] | None, dict[int, float]]:
        """Curves that give each rank its measured time, micro-batch sizes to keep, and each rank's slowdown.

        The slowdown is against its plan; without a calibration, seconds a pair.
        """
        measured = [curve for curve in plan.curves if curve is not None]
        if len(measured) == len(rates):
            factors = {
                rank.rank: rank.share / rates[rank.rank] / rank.predicted_compute_seconds
                for rank in plan.ranks
                if rank.share and rank.predicted_compute_seconds
            }
            usual = float(np.median(list(factors.values())))  # of a rank without work nothing is known
            given = list(self.settings.micro_batch_sizes) if self.settings.micro_batch_sizes else None
            return (
                [slower(curve, factors.get(rank, usual)) for rank, curve in enumerate(measured)],
                given,
                factors,
            )
        # Nothing was calibrated: a pair takes what it took, in micro-batches no larger than those that ran.
        sizes = [max(rank.micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE) for rank in plan.ranks]
        known = rates[rates > 0]
        pace = [float(rate) if rate else float(np.median(known)) for rate in rates]
        curves = [Curve.from_rates({1: rate, max(size, 2): rate}) for rate, size in zip(pace, sizes, strict=True)]
        return curves, sizes, {rank: 1 / float(rate) for rank, rate in enumerate(rates) if rate}

    def _forget(self) -> None:
        for window in (self._speeds, self._costs, self._excess):
            window.clear()

    # ---- In a checkpoint

    def state(self, step: int) -> dict[str, Any]:
        """What a run resumed after `step` needs to go on alike: the plan in force, and any to come."""
        current = max((first for first, _ in self.plans if first <= step + 1), default=self.plans[0][0])
        return {
            **self._identity(),
            "plans": [
                {
                    "first_step": first,
                    "micro_batch_sizes": [list(rank.micro_batch_sizes) for rank in plan.ranks],
                }
                for first, plan in self.plans
                if first >= current
            ],
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Takes up a checkpoint's plans, unless hosts or settings are others now; returns whether it did."""
        if {**state, "plans": None} != {**self._identity(), "plans": None}:
            return False
        first = self.plans[0][1]
        self.plans = []
        for kept in state["plans"]:
            sizes = [tuple(of_rank) for of_rank in kept["micro_batch_sizes"]]
            same = sizes == [rank.micro_batch_sizes for rank in first.ranks]
            plan = first if same else with_micro_batches(first, sizes, "as the checkpoint has it")
            self.plans.append((kept["first_step"], plan))
        return True

    def _identity(self) -> dict[str, Any]:
        plan = self.plans[0][1]
        return {
            "strategy": plan.strategy,
            "hosts": [rank.host for rank in plan.ranks],
            "global_batch_size": plan.global_batch_size,
            "settings": self.settings.model_dump(mode="json", exclude={"calibration_dir", "require_calibration"}),
        }
