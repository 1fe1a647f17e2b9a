"""Every host's calibration ➜ the plan of a run, and what each way to run it would give."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lib.config.load import with_strategy
from lib.config.schema import Config
from lib.errors import UserError
from lib.model.partition import ModelShape
from lib.plan.balance import DEFAULT_MICRO_BATCH_SIZE, TooLarge, listed
from lib.plan.cluster_plan import ClusterPlan, Prediction, whole_bytes
from lib.plan.curve_validation import all_sound
from lib.plan.curves import MEMORY_HEADROOM, CurveChoice, CurveKey, HostCalibration
from lib.plan.divide_work import GOOD_EFFICIENCY, make_plan, plan_sharded, sufficient_global_batch, with_memory
from lib.plan.memory import Model
from lib.plan.memory_fitting import Fitting
from lib.plan.predictions import (
    MEETING_BYTES,
    Measured,
    RoundsPlan,
    at_work_together,
    compressed_bytes,
    independent_seconds,
    measured_for,
    peak_bytes,
    predict_replicas,
    predict_sharded,
)
from lib.plan.step_arrays import Backend
from lib.plan.strategy import choose_strategy, plan_merging
from lib.plan.uncalibrated_hosts import Known, relative_speeds, with_estimates


def plan_run(
    config: Config,
    hosts: Sequence[str],
    calibrations: Sequence[HostCalibration | None],
    key: CurveKey,
    *,
    longest: int,
    backend: str,
    versions: Mapping[str, str],
    device_names: Sequence[str] | None = None,
    published: Sequence[HostCalibration] = (),
    dataset_size: int | None = None,
    shape: ModelShape | None = None,
    memory_bytes: Sequence[int | None] | None = None,
    gflops: Sequence[float | None] | None = None,
    model: Model | None = None,
    devices: Sequence[Backend] | None = None,
) -> ClusterPlan:
    """The plan of a run from every host's calibration, with the predictions of the ways to run it.

    Args:
        hosts, calibrations, device_names: one a rank.
        key: its sequence length is a typical row's, for the time; `longest`: the longest's, for the memory.
        backend: that carries the gradients.
        dataset_size: in pairs; with train.epochs, the length of the run.
        shape: of the model; None if it cannot be divided.
        memory_bytes: that each rank may use; a calibration may know of less.
        gflops: of each rank's matrix products, measured now; it compares hosts that were not calibrated.
        model, devices: for what was not measured, the memory model and what each rank computes on; None: nothing is
            known of the model's dimensions.

    Raises:
        UserError: as make_plan, plan_sharded and choose_curves.
    """
    calibrations, impossible = all_sound(calibrations)
    calibrations, shared = at_work_together(hosts, calibrations)
    memory = [
        min([size for size in (room, *_memory_limits(one)) if size], default=None)
        for room, one in zip(memory_bytes or [None] * len(hosts), calibrations, strict=True)
    ]
    nothing = [None] * len(hosts)
    known = list(map(Known, hosts, calibrations, device_names or nothing, gflops or nothing, memory))
    estimated: tuple[str, ...] = ()
    if not config.plan.require_calibration:
        calibrations, estimated = with_estimates(known, key, published)
    warnings = (*impossible, *shared, *estimated)
    speeds = relative_speeds(known)
    fitting = Fitting(model, hosts, devices, memory, calibrations) if model and devices else None
    measured = Measured(
        hosts, calibrations, longest, backend, versions, device_names, published, speeds, memory, fitting
    )

    def whole(settings: Config) -> ClusterPlan:
        """Every host keeps the model."""
        if settings.strategy in ("auto", "sharded") and shape is not None and len(hosts) > 1:
            curves = measured.of_this_model(key)
            rough = [  # what was measured together with its peak memory is known better
                rank for rank, curve in enumerate(curves) if curve is None or curve.points[0].peak_memory_bytes is None
            ]
            check_whole(settings, [hosts[rank] for rank in rough], shape, [memory[rank] for rank in rough])
        return _plan_replicas(settings, measured, key, dataset_size)

    def divided(settings: Config) -> ClusterPlan:
        """Every host keeps a part of it."""
        assert shape is not None
        rates = [one.gflops if one else None for one in calibrations]
        comparable = rates if all(rates) else gflops or rates
        plan = plan_sharded(with_strategy(settings, "sharded"), hosts, shape, memory, comparable, model, devices)
        tokens = key.sequence_length * (1 if key.records == "sft" else 2)
        sums = measured.sum_seconds if measured.link_is_known else None
        return replace(plan, predictions=(predict_sharded(plan, shape, measured.of_this_model(key), tokens, sums),))

    can_divide = shape is not None and len(hosts) > 1
    is_open = config.strategy == "auto" and config.plan.shares is None
    told = {"shares": None, "micro_batch_sizes": None, "require_calibration": False}
    freely = config.model_copy(update={"plan": config.plan.model_copy(update=told)})  # for the other ways to run it
    too_large: TooLarge | None = None
    replicas: ClusterPlan | None = None
    try:
        replicas = whole(freely if config.strategy == "sharded" and can_divide else config)
    except TooLarge as error:
        if not can_divide or not (is_open or config.strategy == "sharded"):
            raise
        too_large = error
    if replicas is not None and (config.strategy != "sharded" or not can_divide):
        ways = list(replicas.predictions)
        if can_divide and replicas.calibrated:
            with contextlib.suppress(UserError):  # then that is no way to run it
                ways[2:2] = [replace(way, chosen=False) for way in divided(freely).predictions]
        return replace(replicas, predictions=tuple(ways), warnings=(*warnings, *replicas.warnings))

    assert shape is not None
    why, others = "as strategy has it", tuple[Prediction, ...]()
    if too_large is not None:
        needed = too_large.needed_bytes
        others = (Prediction("independent, synchronous: too large", tuple(hosts), None, None, memory_bytes=needed),)
    elif replicas is not None and replicas.calibrated:
        others = tuple(replace(way, chosen=False) for way in replicas.predictions)
    try:
        plan = divided(config)
    except UserError as error:
        if config.strategy == "sharded":
            raise
        raise UserError(f"{too_large}; nor can it be divided: {error}") from None
    if config.strategy == "auto":
        why = f"because {str(too_large).partition(';')[0]}"
    return replace(
        plan,
        reason=f"sharded, {why}; {plan.reason}",
        warnings=(*warnings, *plan.warnings),
        predictions=(*plan.predictions, *others),
    )


def _memory_limits(calibration: HostCalibration | None) -> list[int | None]:
    return [curve.memory_limit_bytes for curve in calibration.curves] if calibration else []


def _plan_replicas(config: Config, measured: Measured, key: CurveKey, dataset_size: int | None) -> ClusterPlan:
    """The plan of hosts that all keep the whole model.

    Raises:
        TooLarge: a host's memory does not hold one pair.
        UserError: as make_plan and choose_curves.
    """
    hosts = measured.hosts
    warnings: tuple[str, ...] = ()

    def choose(key: CurveKey) -> CurveChoice:
        chosen = measured.choose(key, config.plan.require_calibration)
        return fitting.choice(chosen, key) if fitting else chosen

    def planned(sync: float) -> ClusterPlan:
        sizes = fitting.default_sizes(key) if fitting and choice.curves is None else None
        return make_plan(config, hosts, choice.curves, sync, measured.speeds, sizes)

    def sync_seconds() -> float:
        """One sum of the gradients."""
        gradients = max((curve.gradient_bytes or 0 for curve in choice.curves or ()), default=0)
        return measured.sum_seconds(compressed_bytes(gradients, config.sync)) if choice.curves else 0.0

    fitting = measured.fitting
    checkpointed = False
    try:
        choice = choose(key)
        plan = planned(sync_seconds())
    except TooLarge as too_large:
        # Dropout is the one thing that MLX's gradient checkpointing gets wrong.
        if config.model.gradient_checkpointing is not None or config.model.dropout:
            raise
        key = key.model_copy(update={"gradient_checkpointing": True})
        choice = choose(key)
        if not measured_for(key, choice) and fitting is None:
            raise
        plan = planned(sync_seconds())
        checkpointed = True
        warnings = (
            *warnings,
            f"gradient checkpointing is turned on: {str(too_large).partition(';')[0]} without",
        )

    apart = planned(0.0)
    strategy, why = choose_strategy(config, len(hosts))
    plan = apart if strategy == "independent" else plan

    reason = plan.reason
    if choice.curves is None:
        reason = choice.reason if plan.reason.startswith("equal shares") else plan.reason
    elif config.plan.shares is None:
        reason = f"{plan.reason} ({choice.reason})"
    if len(hosts) == 1 and choice.curves is None:
        most = max(plan.ranks[0].micro_batch_sizes, default=DEFAULT_MICRO_BATCH_SIZE)
        reason = f"{plan.reason}, in micro-batches of {most} at most: no calibration"
    priced = [config.cost.watts, config.cost.rent_per_hour]
    strangers = {name for prices in priced if isinstance(prices, dict) for name in prices} - set(hosts)
    if strangers:
        warnings = (*warnings, f"cost: no host of this run is called {listed(sorted(strangers))}")
    if plan.efficiency is not None and plan.efficiency < GOOD_EFFICIENCY and 1 < len(hosts) <= 64 and choice.curves:
        enough = sufficient_global_batch(hosts, choice.curves, plan.global_batch_size, sync_seconds())
        if enough and enough > plan.global_batch_size and config.plan.shares is None:
            reason += f"; a global batch of {enough} would reach {GOOD_EFFICIENCY:.0%} of their speed"
    calibrated = measured_for(key, choice)
    plan = with_memory(
        plan, measured.memory_bytes, lambda rank, pairs: _planned_bytes(choice, fitting, rank, pairs, key)
    )
    plan = replace(
        plan,
        strategy=strategy,
        reason=f"{strategy}, {why}; {reason}" if len(hosts) > 1 else reason,
        warnings=(*warnings, *choice.warnings, *plan.warnings),
        calibrated=calibrated,
        gradient_checkpointing=checkpointed,
    )
    rounds = _plan_rounds(config, apart, measured if calibrated else None, dataset_size)
    plan = replace(plan, predictions=predict_replicas(plan, apart, sync_seconds(), rounds, config.sync))
    if strategy != "independent" or len(hosts) == 1:
        return plan
    merging = rounds.merging
    note = _synchronous_instead(plan, sync_seconds() if measured.link_is_known else None)
    return replace(
        plan,
        steps_per_round=merging.steps_per_round,
        merges=merging.merges,
        merging=merging.reason,
        synchronous_instead=note,
    )


def _planned_bytes(choice: CurveChoice, fitting: Fitting | None, rank: int, pairs: int, key: CurveKey) -> int | None:
    """Of a rank's micro-batches, as measured, else by arithmetic."""
    curve = choice.curves[rank] if choice.curves else None
    peak = peak_bytes(curve, pairs) if curve else None
    return fitting.needed_bytes(rank, pairs, key) if peak is None and fitting else peak


def _plan_rounds(config: Config, apart: ClusterPlan, measured: Measured | None, dataset_size: int | None) -> RoundsPlan:
    """measured: None where the hosts were not all measured with this model."""
    in_epoch = -(-(dataset_size or apart.global_batch_size) // apart.global_batch_size)
    steps = config.train.steps or config.train.epochs * in_epoch
    trained = [curve.gradient_bytes for curve in apart.curves if curve is not None]
    is_summed = config.model.method == "full" and config.sync.compression in ("none", "bf16")
    seconds, step_seconds = None, None
    if measured is not None and measured.link_is_known and len(trained) == len(apart.ranks) > 1 and all(trained):
        message = compressed_bytes(max(filter(None, trained)), config.sync)
        whole = (
            message if is_summed else message * len(apart.ranks) / 2
        )  # a sum passes 2 (n - 1) / n of it, a gather n - 1
        seconds = measured.sum_seconds(whole) + 2 * measured.sum_seconds(MEETING_BYTES)
        step_seconds = independent_seconds(apart, [rank for rank in apart.ranks if rank.share])
    return RoundsPlan(plan_merging(config, steps, in_epoch, seconds, step_seconds), seconds or 0.0, is_summed)


def _synchronous_instead(plan: ClusterPlan, sync_seconds: float | None) -> str:
    """In one line what synchronous steps would give, and what they would cost. sync_seconds: None if nobody knows."""
    gives = "strategy=synchronous would give one machine's result, to rounding"
    unknown = [rank.host for rank, curve in zip(plan.ranks, plan.curves, strict=True) if curve is None]
    if not plan.calibrated:
        whose = (
            f"no calibration of {listed(list(dict.fromkeys(unknown)))}" if unknown else "no calibration of this model"
        )
        return f"{gives}; at what speed is unknown: {whose} (make calibrate)"
    ways = {way.strategy.partition(",")[0]: way for way in reversed(plan.predictions)}
    here, there = (plan.global_batch_size / (ways[name].step_seconds or 1.0) for name in ("independent", "synchronous"))
    speeds = f"{there:.3g} pairs/s, where independent ranks have {here:.3g}"
    if sync_seconds is None:
        return f"{gives}; {speeds}, its syncs left out: the link is not calibrated (make calibrate)"
    part = sync_seconds / (ways["synchronous"].step_seconds or 1.0)
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
                f"less {MEMORY_HEADROOM:.0%} headroom; take a quantised model with model.method=lora, or leave the host out",
                needed,
            )
