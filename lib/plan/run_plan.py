"""The plan of a run: what is known of every host ➜ strategy and shares, with predictions. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.config.schema import Config
from lib.model.partition import ModelShape
from lib.plan.calibration import MEMORY_HEADROOM, CurveChoice, CurveKey, HostCalibration
from lib.plan.calibration_checks import all_sound
from lib.plan.cluster_plan import ClusterPlan, whole_bytes
from lib.plan.divide_work import GOOD_EFFICIENCY, make_plan, sufficient_global_batch, with_memory
from lib.plan.divided_run import DIVIDED, can_divide, divided_predictions, plan_divided, without_configured_shares
from lib.plan.memory_fitting import MemoryEstimates
from lib.plan.predictions import (
    MEETING_BYTES,
    Cluster,
    RoundsPlan,
    at_work_together,
    compressed_bytes,
    independent_seconds,
    measured_for,
    peak_bytes,
    predict_replicas,
)
from lib.plan.run_facts import RankHost, RunFacts
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge, listed
from lib.plan.strategy import choose_strategy, plan_merging
from lib.plan.uncalibrated_hosts import relative_speeds, with_estimates


def plan_run(config: Config, hosts: Sequence[RankHost], run: RunFacts) -> ClusterPlan:
    """The plan of a run from what is known of every rank's host, with the predictions of all strategies.

    Raises:
        UserError: as make_plan, plan_sharded and choose_curves.
    """
    cluster, warnings = _cluster(config, hosts, run)
    must_divide = config.strategy in DIVIDED and can_divide(cluster, config.strategy)
    may_divide = must_divide or (config.strategy == "auto" and config.plan.shares is None and can_divide(cluster))
    replicas: ClusterPlan | None = None
    too_large: TooLarge | None = None
    try:
        replicas = _plan_replicas(without_configured_shares(config) if must_divide else config, cluster)
    except TooLarge as error:
        if not may_divide:
            raise
        too_large = error
    if replicas is None or must_divide:
        return plan_divided(config, cluster, replicas, too_large, warnings)
    predictions = list(replicas.predictions)
    if replicas.calibrated and config.strategy != "pipelined":
        predictions[2:2] = divided_predictions(config, cluster)
    return replace(replicas, predictions=tuple(predictions), warnings=(*warnings, *replicas.warnings))


def _cluster(config: Config, hosts: Sequence[RankHost], run: RunFacts) -> tuple[Cluster, tuple[str, ...]]:
    """The hosts as they are when all work, with estimates where nothing was measured; and warnings of each change."""
    calibrations, implausible = all_sound([host.calibration for host in hosts])
    calibrations, shared = at_work_together([host.name for host in hosts], calibrations)
    hosts = [
        replace(host, calibration=calibration, memory_bytes=_memory_limit(host.memory_bytes, calibration))
        for host, calibration in zip(hosts, calibrations, strict=True)
    ]
    estimated: tuple[str, ...] = ()
    if not config.plan.require_calibration:
        completed, estimated = with_estimates(hosts, run.key, run.published)
        hosts = [replace(host, calibration=one) for host, one in zip(hosts, completed, strict=True)]
    cluster = Cluster(hosts, run, relative_speeds(hosts), MemoryEstimates.of(run.memory_model, hosts))
    return cluster, (*implausible, *shared, *estimated, *_stranger_warnings(config, cluster.names))


def _memory_limit(memory_bytes: int | None, calibration: HostCalibration | None) -> int | None:
    """What a rank may use: a calibration may know of less than the host has."""
    calibrated = [curve.memory_limit_bytes for curve in calibration.curves] if calibration else []
    return min((size for size in (memory_bytes, *calibrated) if size), default=None)


# ---- The whole model on every host


@dataclass(frozen=True)
class _Replicas:
    """Hosts that all keep the whole model, with the curves that were chosen for a key."""

    config: Config
    cluster: Cluster
    key: CurveKey
    choice: CurveChoice

    @classmethod
    def of(cls, config: Config, cluster: Cluster, key: CurveKey) -> _Replicas:
        choice = cluster.choose(key, config.plan.require_calibration)
        estimates = cluster.memory_estimates
        return cls(config, cluster, key, estimates.choice(choice, key) if estimates else choice)

    @property
    def is_calibrated(self) -> bool:
        return measured_for(self.key, self.choice)

    def plan(self, sync_seconds: float) -> ClusterPlan:
        """As make_plan."""
        estimates, curves = self.cluster.memory_estimates, self.choice.curves
        sizes = estimates.default_sizes(self.key) if estimates and curves is None else None
        return make_plan(self.config, self.cluster.names, curves, sync_seconds, self.cluster.speeds, sizes)

    def sync_seconds(self) -> float:
        """One sum of the gradients."""
        if not self.choice.curves:
            return 0.0
        gradients = max((curve.gradient_bytes or 0 for curve in self.choice.curves), default=0)
        return self.cluster.sum_seconds(compressed_bytes(gradients, self.config.sync))

    def planned_bytes(self, rank: int, pairs: int) -> int | None:
        """Of a rank's micro-batch, as measured, else by arithmetic."""
        estimates = self.cluster.memory_estimates
        curve = self.choice.curves[rank] if self.choice.curves else None
        peak = peak_bytes(curve, pairs) if curve else None
        return estimates.needed_bytes(rank, pairs, self.key) if peak is None and estimates else peak


def _plan_replicas(config: Config, cluster: Cluster) -> ClusterPlan:
    """The plan of hosts that all keep the whole model, with the predictions of both strategies.

    Raises:
        TooLarge: a host's memory does not hold one pair.
        UserError: as make_plan and choose_curves.
    """
    run, size = cluster.run, len(cluster.hosts)
    shape = run.shape or run.block_shape
    if config.strategy in ("auto", *DIVIDED) and shape is not None and size > 1:
        _check_unmeasured(config, cluster, shape)
    replicas, synchronous, warnings = _with_checkpointing_if_needed(config, cluster)
    choice, sync_seconds = replicas.choice, replicas.sync_seconds()
    without_sync = replicas.plan(0.0)
    strategy, why = choose_strategy(config, size)
    plan = without_sync if strategy == "independent" else synchronous

    reason = _reason(replicas, plan)
    plan = with_memory(plan, [host.memory_bytes for host in cluster.hosts], replicas.planned_bytes)
    plan = replace(
        plan,
        strategy=strategy,
        reason=f"{strategy}, {why}; {reason}" if size > 1 else reason,
        warnings=(*warnings, *choice.warnings, *plan.warnings),
        calibrated=replicas.is_calibrated,
        gradient_checkpointing=replicas.key != run.key,
    )
    rounds = _plan_rounds(config, without_sync, cluster if replicas.is_calibrated else None, run.dataset_size)
    plan = replace(plan, predictions=predict_replicas(plan, without_sync, sync_seconds, rounds, config.sync))
    if strategy != "independent" or size == 1:
        return plan
    return replace(
        plan,
        steps_per_round=rounds.merging.steps_per_round,
        merges=rounds.merging.merges,
        merging=rounds.merging.reason,
        synchronous_instead=_synchronous_instead(plan, sync_seconds if cluster.link_is_known else None),
    )


def _check_unmeasured(config: Config, cluster: Cluster, shape: ModelShape) -> None:
    """Whether hosts without a measured peak memory can keep the whole model.

    Raises:
        TooLarge: one cannot.
    """
    unmeasured = [
        host
        for host, curve in zip(cluster.hosts, cluster.of_this_model(cluster.run.key), strict=True)
        if curve is None or curve.points[0].peak_memory_bytes is None
    ]
    check_whole(config, [host.name for host in unmeasured], shape, [host.memory_bytes for host in unmeasured])


def _with_checkpointing_if_needed(config: Config, cluster: Cluster) -> tuple[_Replicas, ClusterPlan, tuple[str, ...]]:
    """The curves and the plan of synchronous steps; with a warning where gradient checkpointing had to be turned on.

    Raises:
        TooLarge: one pair does not fit, nor with gradient checkpointing where that may be turned on.
    """
    key = cluster.run.key
    try:
        replicas = _Replicas.of(config, cluster, key)
        return replicas, replicas.plan(replicas.sync_seconds()), ()
    except TooLarge as too_large:
        if not config.model.may_turn_on_checkpointing:
            raise
        replicas = _Replicas.of(config, cluster, key.model_copy(update={"gradient_checkpointing": True}))
        if not replicas.is_calibrated and cluster.memory_estimates is None:
            raise
        warning = f"gradient checkpointing is turned on: {str(too_large).partition(';')[0]} without"
        return replicas, replicas.plan(replicas.sync_seconds()), (warning,)


def _reason(replicas: _Replicas, plan: ClusterPlan) -> str:
    """Why the shares are what they are, and which global batch would use the hosts better."""
    config, hosts, choice = replicas.config, replicas.cluster.names, replicas.choice
    if choice.curves is None and len(hosts) == 1:
        most = max(plan.ranks[0].micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE)
        return f"{plan.reason}, in micro-batches of {most} at most: no calibration"
    if choice.curves is None:
        return choice.reason if plan.reason.startswith("equal shares") else plan.reason
    if config.plan.shares is not None:
        return plan.reason
    reason = f"{plan.reason} ({choice.reason})"
    if plan.efficiency is not None and plan.efficiency < GOOD_EFFICIENCY and 1 < len(hosts) <= 64:
        enough = sufficient_global_batch(hosts, choice.curves, plan.global_batch_size, replicas.sync_seconds())
        if enough and enough > plan.global_batch_size:
            reason += f"; a global batch of {enough} would reach {GOOD_EFFICIENCY:.0%} of their speed"
    return reason


def _stranger_warnings(config: Config, hosts: Sequence[str]) -> list[str]:
    """Settings of hosts that are not in the run: misspelt, or away since it was resumed."""
    by_host = {
        "cost": (config.cost.watts, config.cost.rent_per_hour),
        "plan.memory_limit_gb": (config.plan.memory_limit_gb,),
    }
    warnings = []
    for name, settings in by_host.items():
        strangers = {host for setting in settings if isinstance(setting, dict) for host in setting} - set(hosts)
        if strangers:
            called = f"no host of this run is called {listed(sorted(strangers))}"
            warnings.append(f"{name}: {called}; its hosts: {listed(sorted(set(hosts)))}")
    return warnings


def _plan_rounds(
    config: Config, without_sync: ClusterPlan, cluster: Cluster | None, dataset_size: int | None
) -> RoundsPlan:
    """How often independent ranks merge. cluster: None where the hosts were not all measured with this model."""
    batch, size = without_sync.global_batch_size, len(without_sync.ranks)
    steps_per_epoch = -(-(dataset_size or batch) // batch)
    steps = config.train.steps or config.train.epochs * steps_per_epoch
    gradients = [curve.gradient_bytes for curve in without_sync.curves if curve is not None and curve.gradient_bytes]
    is_summed = config.model.method == "full" and config.sync.compression in ("none", "bf16")
    merge_seconds, step_seconds = None, None
    if cluster is not None and cluster.link_is_known and len(gradients) == size > 1:
        message = compressed_bytes(max(gradients), config.sync)
        summed_bytes = message if is_summed else message * size / 2  # a sum passes 2 (n - 1) / n of it, a gather n - 1
        merge_seconds = cluster.sum_seconds(summed_bytes) + 2 * cluster.sum_seconds(MEETING_BYTES)
        step_seconds = independent_seconds(without_sync, [rank for rank in without_sync.ranks if rank.share])
    merging = plan_merging(config, steps, steps_per_epoch, merge_seconds, step_seconds)
    return RoundsPlan(merging, merge_seconds or 0.0, is_summed)


def _synchronous_instead(plan: ClusterPlan, sync_seconds: float | None) -> str:
    """In one line what synchronous steps would give, and what they would cost. sync_seconds: None if nobody knows."""
    gives = "strategy=synchronous would give one machine's result, to rounding"
    unknown = [rank.host for rank, curve in zip(plan.ranks, plan.curves, strict=True) if curve is None]
    if not plan.calibrated:
        whose = (
            f"no calibration of {listed(list(dict.fromkeys(unknown)))}" if unknown else "no calibration of this model"
        )
        return f"{gives}; at what speed is unknown: {whose} (make calibrate)"
    predictions = {one.strategy.partition(",")[0]: one for one in reversed(plan.predictions)}
    here, there = (
        plan.global_batch_size / (predictions[name].step_seconds or 1.0) for name in ("independent", "synchronous")
    )
    speeds = f"{there:.3g} pairs/s, where independent ranks have {here:.3g}"
    if sync_seconds is None:
        return f"{gives}; {speeds}, its syncs left out: the link is not calibrated (make calibrate)"
    part = sync_seconds / (predictions["synchronous"].step_seconds or 1.0)
    return f"{gives}; {speeds}; its sync takes {part:.1%} of a step"


def check_whole(config: Config, hosts: Sequence[str], shape: ModelShape, memory_bytes: Sequence[int | None]) -> None:
    """Whether every host can keep the whole model.

    Raises:
        TooLarge: one cannot; with what it needs and has.
    """
    needed = whole_bytes(config, shape)
    for host, size in zip(hosts, memory_bytes, strict=True):
        if size is not None and needed > (1 - MEMORY_HEADROOM) * size:
            raise TooLarge(
                f"host {host}: the model needs {needed / 1e9:.2f} GB for weights"
                f"{', gradients and optimizer' * (config.model.method == 'full')}, but it has {size / 1e9:.2f} GB "
                f"less {MEMORY_HEADROOM:.0%} headroom; take a quantised model with model.method=lora, "
                "or leave the host out",
                needed,
            )
