"""Every host's calibration ➜ the plan of a run, and what each way to run it would give."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.calibration import MEMORY_HEADROOM, Curve, CurveChoice, CurveKey, HostCalibration, choose_curves
from lib.config import Config, Sync, UserError, with_strategy
from lib.division import Shape
from lib.estimate import Known, relative_speeds, with_estimates
from lib.fitting import Fitting
from lib.memory import Backend, Model
from lib.plan import (
    GOOD_EFFICIENCY,
    SHOWN_ALONE,
    ClusterPlan,
    Plan,
    Prediction,
    make_plan,
    plan_cluster,
    plan_sharded,
    sufficient_global_batch,
    whole_bytes,
    with_memory,
)
from lib.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge, equal_shares, listed, solo_pairs_per_second
from lib.strategy import Merging, choose_strategy, plan_merging
from lib.validation import all_sound

MEETING_BYTES = 4096  # of each of the two sums in which ranks tell each other how far they are, before they merge


@dataclass(frozen=True)
class _Measured:
    """What is known of all hosts, as they are while all work."""

    hosts: Sequence[str]
    calibrations: Sequence[HostCalibration | None]
    longest: int
    backend: str
    versions: Mapping[str, str]
    device_names: Sequence[str] | None
    published: Sequence[HostCalibration]
    speeds: Sequence[float] | None = None  # of the hosts beside each other, for where no curves compare them
    memory_bytes: Sequence[int | None] = ()  # that each rank may use
    fitting: Fitting | None = None  # the memory model's word, where the model's dimensions are known

    def choose(self, key: CurveKey, require_calibration: bool) -> CurveChoice:
        """Curves of all hosts, with the time of typical rows and the memory of the longest."""
        choice, of_longest = (
            choose_curves(
                self.hosts,
                self.calibrations,
                key.at_length(length),
                versions=self.versions,
                device_names=self.device_names,
                published=self.published,
                require_calibration=require_calibration,
            )
            for length in (key.sequence_length, self.longest)
        )
        if choice.curves is None or of_longest.curves is None:
            return choice
        pairs = zip(choice.curves, of_longest.curves, strict=True)
        return replace(choice, curves=tuple(_with_memory_of(curve, other) for curve, other in pairs))

    def of_this_model(self, key: CurveKey) -> list[Curve | None]:
        """Each host's own curve of this very model, where it has one."""
        found: list[Curve | None] = []
        for host, calibration in zip(self.hosts, self.calibrations, strict=True):
            choice = replace(self, hosts=[host], calibrations=[calibration], device_names=None, published=()).choose(
                key, require_calibration=False
            )
            found.append(choice.curves[0] if choice.curves and _measured_for(key, choice) else None)
        return found

    @property
    def link_is_known(self) -> bool:
        return any(link.backend == self.backend for one in self.calibrations if one for link in one.links)

    def sum_seconds(self, size_bytes: float) -> float:
        """One sum over the slowest link; 0 for a single host, and where nothing was measured."""
        links = [link for one in self.calibrations if one for link in one.links if link.backend == self.backend]
        sums = (link.seconds(size_bytes) for link in links if link.operation == "all_sum")
        return max(sums, default=0.0) * (len(self.hosts) > 1)


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
    shape: Shape | None = None,
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
    calibrations, shared = _at_work_together(hosts, calibrations)
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
    measured = _Measured(
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


def _plan_replicas(config: Config, measured: _Measured, key: CurveKey, dataset_size: int | None) -> ClusterPlan:
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
        return measured.sum_seconds(_compressed(gradients, config.sync)) if choice.curves else 0.0

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
        if not _measured_for(key, choice) and fitting is None:
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
    calibrated = _measured_for(key, choice)
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
    plan = replace(plan, predictions=_predict(plan, apart, sync_seconds(), rounds, config.sync))
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
    peak = _peak(curve, pairs) if curve else None
    return fitting.needed_bytes(rank, pairs, key) if peak is None and fitting else peak


@dataclass(frozen=True)
class _Rounds:
    """The rounds of independent ranks, as planned, and what a merge is predicted to take; 0 where nobody knows."""

    merging: Merging
    merge_seconds: float
    is_summed: bool  # on its way; else everybody gets everybody's whole


def _plan_rounds(config: Config, apart: ClusterPlan, measured: _Measured | None, dataset_size: int | None) -> _Rounds:
    """measured: None where the hosts were not all measured with this model."""
    in_epoch = -(-(dataset_size or apart.global_batch_size) // apart.global_batch_size)
    steps = config.train.steps or config.train.epochs * in_epoch
    trained = [curve.gradient_bytes for curve in apart.curves if curve is not None]
    is_summed = config.model.method == "full" and config.sync.compression in ("none", "bf16")
    seconds, step_seconds = None, None
    if measured is not None and measured.link_is_known and len(trained) == len(apart.ranks) > 1 and all(trained):
        message = _compressed(max(filter(None, trained)), config.sync)
        whole = (
            message if is_summed else message * len(apart.ranks) / 2
        )  # a sum passes 2 (n - 1) / n of it, a gather n - 1
        seconds = measured.sum_seconds(whole) + 2 * measured.sum_seconds(MEETING_BYTES)
        step_seconds = _apart_seconds(apart, [rank for rank in apart.ranks if rank.share])
    return _Rounds(plan_merging(config, steps, in_epoch, seconds, step_seconds), seconds or 0.0, is_summed)


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


def check_whole(config: Config, hosts: Sequence[str], shape: Shape, memory_bytes: Sequence[int | None]) -> None:
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


def predict_sharded(
    plan: ClusterPlan,
    shape: Shape,
    curves: Sequence[Curve | None],
    tokens_per_pair: int,
    sum_seconds: Callable[[float], float] | None,
) -> Prediction:
    """What a divided model gives: each rank's part of the compute, and a block's four sums, two of them backward.

    A rank computes its heads and columns, and, unless the vocabulary is divided, the whole head. A sum carries a number
    for every token and hidden unit, and nobody goes on before it: their times add up. What the sums of the adapters'
    whole halves cost is left out. Of a mixture of experts, all are counted as if they ran.

    Args:
        plan: of plan_sharded.
        curves: one a rank, of the whole model on its host, or None.
        tokens_per_pair: that go through the blocks.
        sum_seconds: one sum of so many bytes over the slowest link; None if no link is measured.
    """
    assert plan.division is not None
    ranks, sizes = len(plan.ranks), np.array(plan.ranks[0].micro_batch_sizes)
    rows = plan.division.vocabulary
    head = shape.vocabulary * shape.hidden_size
    fractions = [
        (part.share * shape.divided_parameters + head * (rows[rank] / shape.vocabulary if rows else 1.0))
        / (shape.divided_parameters + head)
        for rank, part in enumerate(plan.parts)
    ]
    messages = sizes * tokens_per_pair * shape.hidden_size * shape.other_bytes
    per_batch = 4 * shape.blocks + bool(rows)  # a divided embedding is summed, too
    known = [curve for curve in curves if curve is not None]
    seconds, solo = None, None
    if len(known) == ranks:
        computes = [
            fraction * (float(curve.seconds(sizes).sum()) + curve.step_overhead_seconds)
            for fraction, curve in zip(fractions, known, strict=True)
        ]
        if all(curve.max_batch_size for curve in known):  # else some host does nothing alone
            solo = sum(map(solo_pairs_per_second, known))
        if sum_seconds is not None:
            seconds = max(computes) + per_batch * sum(sum_seconds(float(size)) for size in messages)
    # Of a block's activations every rank keeps its two inputs and their norms; the rest are of heads and columns.
    own = 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * (shape.mlp_columns or shape.expert_columns)
    kept_by_all = 4 * shape.hidden_size / (4 * shape.hidden_size + own)
    needed = []
    for part, fraction, curve in zip(plan.parts, fractions, curves, strict=True):
        peak = _peak(curve, int(sizes.max())) if curve else None
        whole = sum(part.divided_bytes for part in plan.parts) + part.whole_bytes
        measured = max(0.0, (peak or 0) - whole) * (fraction + (1 - fraction) * kept_by_all)
        activations = measured if peak else part.activation_bytes or 0
        needed.append(part.needed_bytes + round(activations))
    return Prediction(
        "sharded, "
        + " + ".join(f"{part.share:.0%}" for part in plan.parts[:SHOWN_ALONE])
        + " + ..." * (ranks > SHOWN_ALONE),
        tuple(rank.host for rank in plan.ranks),
        seconds,
        plan.global_batch_size / seconds / solo if seconds and solo else None,
        plan.strategy == "sharded",
        max(needed),
        float(per_batch * messages.sum() * 2 * (ranks - 1) / ranks),
    )


def _measured_for(key: CurveKey, choice: CurveChoice) -> bool:
    return choice.curves is not None and all(
        curve.key is not None and curve.key.at_length(key.sequence_length) == key and curve.source == "measured"
        for curve in choice.curves
    )


def _at_work_together(
    hosts: Sequence[str], calibrations: Sequence[HostCalibration | None]
) -> tuple[list[HostCalibration | None], tuple[str, ...]]:
    """Curves as they are when all ranks work: slower as measured, else by the number that share a machine.

    A rank's own file (HOST-0.json, ...; its machine is not called HOST) stands as it is. On CUDA every rank
    has a GPU of its own.
    """
    if len(hosts) == 1:
        return list(calibrations), ()
    ranks_of = Counter(hosts)
    together: list[HostCalibration | None] = []
    warnings = []
    for host, calibration in zip(hosts, calibrations, strict=True):
        if calibration is not None:
            own = calibration.machine.host != host or calibration.machine.device == "cuda"
            sharing = 1 if own else ranks_of[host]
            curves = [slower(curve, curve.slowdown_together or sharing, sharing) for curve in calibration.curves]
            rate = calibration.gflops and calibration.gflops / sharing
            calibration = calibration.model_copy(update={"curves": tuple(curves), "gflops": rate})
            if sharing > 1 and any(curve.slowdown_together is None for curve in curves):
                warnings.append(
                    f"{sharing} ranks share {host}, which was measured for one: each is taken to have "
                    f"1/{sharing} of its speed and memory; {host}-0.json, ... would say what each has"
                )
        together.append(calibration)
    return together, tuple(dict.fromkeys(warnings))


def slower(curve: Curve, factor: float, ranks_sharing_memory: int = 1) -> Curve:
    """The curve of a host that takes `factor` times as long."""
    points = [
        point.model_copy(
            update={
                "seconds_median": point.seconds_median * factor,
                "seconds_spread": point.seconds_spread * factor,
                "pairs_per_second": point.pairs_per_second / factor,
            }
        )
        for point in curve.points
    ]
    limit = curve.memory_limit_bytes and curve.memory_limit_bytes // ranks_sharing_memory
    overhead = curve.step_overhead_seconds * factor
    changed = {"points": tuple(points), "memory_limit_bytes": limit, "step_overhead_seconds": overhead}
    return curve.model_copy(update=changed)


def _with_memory_of(curve: Curve, longest: Curve) -> Curve:
    """The curve's times, with the peak memory and the limit of the longest rows' curve."""
    if longest.memory_limit_bytes is None or longest.points[0].peak_memory_bytes is None:
        return curve
    sizes = np.array([point.batch_size for point in longest.points], dtype=np.float64)
    peaks = np.array([point.peak_memory_bytes for point in longest.points], dtype=np.float64)
    a_pair_more = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0])
    points = []
    for point in curve.points:
        beyond = max(0.0, point.batch_size - sizes[-1])
        peak = float(np.interp(point.batch_size, sizes, peaks)) + beyond * max(0.0, a_pair_more)
        points.append(point.model_copy(update={"peak_memory_bytes": int(peak)}))
    return curve.model_copy(update={"points": tuple(points), "memory_limit_bytes": longest.memory_limit_bytes})


def _compressed(size_bytes: float, sync: Sync) -> float:
    """What float32 values of that size are on their way (lib/compression.py)."""
    factor = {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256), "topk": 2 * sync.topk_fraction}
    return size_bytes * factor[sync.compression]


def _predict(
    plan: ClusterPlan, apart: ClusterPlan, sync_seconds: float, rounds: _Rounds, sync: Sync
) -> tuple[Prediction, ...]:
    """Both strategies, equal shares, and the fastest hosts each alone; nothing without curves. apart: without a sync."""
    solo = plan.solo_sum_pairs_per_second
    if solo is None or plan.predicted_step_seconds is None:
        return ()
    hosts = [rank.host for rank in plan.ranks]
    batch, size = plan.global_batch_size, len(plan.ranks)
    # One message of all that is trained, as a ring algorithm sends it.
    message = _compressed(max((curve.gradient_bytes or 0 for curve in plan.curves if curve), default=0), sync)
    to_sum = message * (2 * (size - 1) / size if sync.compression in ("none", "bf16") else size - 1)

    def prediction(
        name: str, ranks: Sequence[Plan], seconds: float, chosen: bool = False, bytes_sent: float = 0.0
    ) -> Prediction:
        return Prediction(
            name,
            tuple(rank.host for rank in ranks),
            seconds,
            batch / seconds / solo,
            chosen,
            _peak_memory(plan, ranks),
            bytes_sent if message or len(ranks) == 1 else None,
        )

    alone = [
        prediction(
            f"{rank.host} alone" if hosts.count(rank.host) == 1 else f"rank {rank.rank} ({rank.host}) alone",
            [rank],
            plan_cluster([rank.host], batch, curves=[plan.curves[rank.rank]]).predicted_step_seconds or 0.0,
        )
        for rank in sorted(plan.ranks, key=lambda rank: -(rank.solo_pairs_per_second or 0.0))[:SHOWN_ALONE]
    ]
    if len(hosts) == 1:
        return (replace(alone[0], chosen=True),)
    equal = plan_cluster(
        hosts,
        batch,
        shares=equal_shares(batch, len(hosts)),
        curves=plan.curves,
        sync_seconds=sync_seconds,
    )
    working = [rank for rank in plan.ranks if rank.share]
    seconds = plan.predicted_step_seconds - plan.sync_seconds + (sync_seconds if len(working) > 1 else 0.0)
    together = prediction(f"synchronous, {_sum_of(plan.shares)}", working, seconds, False, to_sum)
    # A merge's message is as large as a step's.
    merges = 1 / rounds.merging.steps_per_round if rounds.merging.merges else 0.0  # a step
    working = [rank for rank in apart.ranks if rank.share]
    seconds = _apart_seconds(apart, working) + rounds.merge_seconds * merges
    to_merge = (to_sum if rounds.is_summed else message * (size - 1)) * merges
    in_rounds = prediction(f"independent, {_sum_of(apart.shares)}", working, seconds, False, to_merge)
    first, second = (in_rounds, together) if plan.strategy == "independent" else (together, in_rounds)
    return (
        replace(first, chosen=True),
        second,
        prediction("synchronous, equal shares", plan.ranks, equal.predicted_step_seconds or 0.0, False, to_sum),
        *alone,
    )


def _sum_of(shares: Sequence[int]) -> str:
    return " + ".join(map(str, shares[:SHOWN_ALONE])) + (" + ..." if len(shares) > SHOWN_ALONE else "")


def _apart_seconds(plan: ClusterPlan, working: Sequence[Plan]) -> float:
    """A global batch's time where each rank goes through its steps at its own pace."""
    speeds = []
    for rank in working:
        curve = plan.curves[rank.rank]
        assert curve is not None and rank.predicted_compute_seconds is not None
        speeds.append(rank.share / (rank.predicted_compute_seconds + curve.step_overhead_seconds))
    return plan.global_batch_size / sum(speeds)


def _peak_memory(plan: ClusterPlan, ranks: Sequence[Plan]) -> int | None:
    """The largest peak of these ranks' micro-batches, in bytes; None where it was not measured."""
    peaks = []
    for rank in ranks:
        curve = plan.curves[rank.rank]
        peak = _peak(curve, max(rank.micro_batch_sizes, default=1)) if curve else None
        if peak is None:
            return None
        peaks.append(peak)
    return max(peaks)


def _peak(curve: Curve, micro_batch_size: int) -> int | None:
    """The peak of a micro-batch, in bytes; beyond the measured sizes it grows as between them. None where it was not measured."""
    if curve.points[0].peak_memory_bytes is None:
        return None
    sizes = [point.batch_size for point in curve.points]
    peaks = [point.peak_memory_bytes or 0 for point in curve.points]
    beyond = max(0, micro_batch_size - sizes[-1])
    slope = (peaks[-1] - peaks[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else peaks[0] / sizes[0]
    return int(np.interp(micro_batch_size, sizes, peaks) + beyond * max(0.0, slope))
