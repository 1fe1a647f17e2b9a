"""The plan of a run: facts in, strategy, shares and predictions out. Pure functions.

Replicas where every host can hold the model: independent ones, that merge as often as takes MERGE_COST of the time, or
synchronous ones where a setting asks for them. Where a host cannot, the model is divided: pipelined, or sharded where
that is predicted to be faster by a tenth or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lib.config.settings import IndependentSettings, ModelSettings, PlanSettings, SyncSettings
from lib.errors import UserError
from lib.plan.calibration import MEMORY_HEADROOM, CurveKey
from lib.plan.facts import DIVIDED, CurveChoice, PlanFacts, choose_curves, prepared
from lib.plan.memory import whole_training_bytes
from lib.plan.pipeline import plan_pipelined
from lib.plan.plan import (
    GOOD_EFFICIENCY,
    ClusterPlan,
    Merging,
    Prediction,
    RankPlan,
    plan_cluster,
    sufficient_global_batch,
    with_memory,
)
from lib.plan.sharded import plan_sharded
from lib.plan.shares import TooLarge, equal_shares, listed, split_evenly_sized

MERGE_COST = 0.01  # of the time of a run
LEAST_MERGES = 8  # in a run; after each step, where it has fewer
FIRST_STEPS = 2  # global batches of the first rounds, where what a merge costs is still to be measured
MEETING_BYTES = 4096  # of each of the two sums in which ranks exchange how far they are, before they merge
NOTEWORTHY = 1.1  # times a pipeline's speed, for which `auto` would send several hundred times as much
SHOWN_ALONE = 8  # single hosts in the table of predictions: the fastest ones


def plan(facts: PlanFacts) -> ClusterPlan:
    """The plan of a run, with the predictions of all strategies.

    Raises:
        TooLarge: the model fits no host, and cannot be divided.
        UserError: settings that do not fit the world or the model; plan.require_calibration without one.
    """
    facts, warnings = prepared(facts)
    settings = facts.settings
    is_asked = settings.strategy in DIVIDED and facts.can_divide(settings.strategy)
    may_divide = is_asked or (settings.strategy == "auto" and settings.plan.shares is None)
    replicas: ClusterPlan | None = None
    too_large: TooLarge | None = None
    try:
        replicas = _plan_replicas(replace(facts, settings=settings.for_strategy("synchronous")) if is_asked else facts)
    except TooLarge as error:
        if not may_divide or not any(map(facts.can_divide, DIVIDED)):
            raise
        too_large = error
    if replicas is None or is_asked:
        chosen = _plan_divided(facts, replicas, too_large)
    else:
        chosen = replicas
        if replicas.calibrated:
            others = [candidate for candidate, _ in map(_divided_by, [facts] * 2, reversed(DIVIDED)) if candidate]
            added = [replace(way, chosen=False) for other in others for way in other.predictions]
            chosen = replace(replicas, predictions=(*replicas.predictions[:2], *added, *replicas.predictions[2:]))
    return replace(chosen, basis=replace(chosen.basis, key=facts.key), warnings=(*warnings, *chosen.warnings))


# ---- The whole model on every host


def _plan_replicas(facts: PlanFacts) -> ClusterPlan:
    """The plan of hosts that all keep the whole model, with the predictions of both strategies.

    Raises:
        TooLarge: a host's memory does not hold one pair.
    """
    settings, size = facts.settings, len(facts.hosts)
    _check_whole(facts)
    key, choice, synchronous, warnings = _with_checkpointing_if_needed(facts)
    sync_seconds = _sync_seconds(facts, choice)
    apart = _divided_batch(facts, key, choice, 0.0)
    strategy, why = _choose_replicas(facts)
    chosen = apart if strategy == "independent" else synchronous
    reason = _reason(facts, choice, chosen, sync_seconds)

    def planned_bytes(rank: int, pairs: int) -> int | None:
        measured = chosen.curves[rank]
        peak = measured.peak_bytes(pairs) if measured else None
        return facts.needed_bytes(rank, pairs, key) if peak is None else peak

    chosen = with_memory(chosen, [host.memory_bytes for host in facts.hosts], planned_bytes)
    chosen = replace(
        chosen,
        strategy=strategy,
        reason=f"{strategy}, {why}; {reason}" if size > 1 else reason,
        warnings=(*warnings, *choice.warnings, *chosen.warnings),
        basis=replace(chosen.basis, calibrated=choice.is_measured),
        gradient_checkpointing=key != facts.key,
    )
    merge_seconds = _merge_seconds(facts, apart) if choice.is_measured and facts.link_is_known else None
    step_seconds = _independent_seconds(apart) if merge_seconds is not None else None
    merging = plan_merging(settings.independent, settings.plan, facts, merge_seconds, step_seconds)
    chosen = replace(chosen, predictions=_predictions(facts, chosen, apart, sync_seconds, merging, merge_seconds))
    if strategy != "independent" or size == 1:
        return chosen
    return replace(
        chosen,
        rounds=merging,
        instead=_synchronous_instead(chosen, sync_seconds if facts.link_is_known else None),
    )


def _check_whole(facts: PlanFacts) -> None:
    """Whether hosts without a measured peak memory can keep the whole model.

    Raises:
        TooLarge: one cannot; with what it needs and has.
    """
    shape, settings = facts.shape or facts.block_shape, facts.settings
    if shape is None or len(facts.hosts) == 1 or settings.strategy in ("independent", "synchronous"):
        return
    needed = whole_training_bytes(shape, settings.model, settings.train.optimizer, settings.moving_reference)
    for host, curve in zip(facts.hosts, facts.measured_curves(facts.key), strict=True):
        is_measured = curve is not None and curve.points[0].peak_memory_bytes is not None
        if host.memory_bytes is None or is_measured or needed <= (1 - MEMORY_HEADROOM) * host.memory_bytes:
            continue
        trained = ", gradients and optimizer" if settings.model.method == "full" else ""
        raise TooLarge(
            f"host {host.name}: the model needs {needed / 1e9:.2f} GB for weights{trained}, but it has "
            f"{host.memory_bytes / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; take a quantised model with "
            "model.method=lora, or leave the host out",
            needed,
        )


def _with_checkpointing_if_needed(facts: PlanFacts) -> tuple[CurveKey, CurveChoice, ClusterPlan, tuple[str, ...]]:
    """The curves and the plan of synchronous steps; with a warning where gradient checkpointing had to be turned on.

    Raises:
        TooLarge: one pair does not fit, nor with gradient checkpointing where that may be turned on.
    """
    key = facts.key
    try:
        choice = choose_curves(facts, key)
        return key, choice, _divided_batch(facts, key, choice, _sync_seconds(facts, choice)), ()
    except TooLarge as too_large:
        if not facts.settings.model.may_turn_on_checkpointing:
            raise
        key = key.model_copy(update={"gradient_checkpointing": True})
        choice = choose_curves(facts, key)
        if not choice.is_measured and facts.memory is None:
            raise
        warning = f"gradient checkpointing is turned on: {str(too_large).partition(';')[0]} without"
        return key, choice, _divided_batch(facts, key, choice, _sync_seconds(facts, choice)), (warning,)


def _divided_batch(facts: PlanFacts, key: CurveKey, choice: CurveChoice, sync_seconds: float) -> ClusterPlan:
    settings = facts.settings.plan
    divided = plan_cluster(
        facts.names,
        facts.batch_size,
        curves=choice.curves,
        shares=settings.shares,
        micro_batch_sizes=settings.micro_batch_sizes,
        sync_seconds=sync_seconds,
        speeds=facts.relative_speeds(),
    )
    if choice.curves is not None or settings.micro_batch_sizes is not None:
        return divided
    sizes = [split_evenly_sized(rank.share, facts.default_size(rank.rank, key)) for rank in divided.ranks]
    return replace(divided.with_micro_batches(sizes, divided.reason), warnings=divided.warnings)


def _gradient_bytes(facts: PlanFacts, curves: Sequence[object]) -> float:
    """Of one message with all that is trained, compressed (lib/distributed/compression.py)."""
    sizes = [getattr(curve, "gradient_bytes", None) or 0 for curve in curves]
    return compression_factor(facts.settings.sync) * max(sizes, default=0)


def compression_factor(sync: SyncSettings) -> float:
    """Bytes that are sent of float32 values, over their own."""
    return {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256), "topk": 2 * sync.topk_fraction}[sync.compression]


def _sync_seconds(facts: PlanFacts, choice: CurveChoice) -> float:
    """One sum of the gradients."""
    return facts.sum_seconds(_gradient_bytes(facts, choice.curves)) if choice.curves else 0.0


def _choose_replicas(facts: PlanFacts) -> tuple[str, str]:
    """The strategy of ranks that all can hold the whole model, and why."""
    if facts.settings.strategy != "auto":
        return facts.settings.strategy, "as strategy has it"
    if len(facts.hosts) == 1:
        return "synchronous", "one rank"
    if facts.settings.synchronous_because:
        return "synchronous", facts.settings.synchronous_because
    return "independent", "as every host can hold the model"


def _reason(facts: PlanFacts, choice: CurveChoice, chosen: ClusterPlan, sync_seconds: float) -> str:
    """Why the shares are what they are, and which global batch would use the hosts better."""
    if choice.curves is None and len(facts.hosts) == 1:
        return f"{chosen.reason}, in micro-batches of {max(chosen.ranks[0].micro_batch_sizes)} at most: no calibration"
    if choice.curves is None or facts.settings.plan.shares is not None:
        return chosen.reason
    reason = f"{chosen.reason} ({choice.reason})"
    if chosen.efficiency is not None and chosen.efficiency < GOOD_EFFICIENCY and len(facts.hosts) <= 64:
        enough = sufficient_global_batch(facts.names, choice.curves, chosen.global_batch_size, sync_seconds)
        if enough and enough > chosen.global_batch_size:
            reason += f"; a global batch of {enough} would reach {GOOD_EFFICIENCY:.0%} of their speed"
    return reason


def _synchronous_instead(chosen: ClusterPlan, sync_seconds: float | None) -> str:
    """In one line what synchronous steps would give, and what they would cost. sync_seconds: None: not measured."""
    gives = "strategy=synchronous would give one machine's result, to rounding"
    unknown = [rank.host for rank, curve in zip(chosen.ranks, chosen.curves, strict=True) if curve is None]
    if not chosen.calibrated:
        hosts = listed(list(dict.fromkeys(unknown))) or "this model"
        return f"{gives}; at what speed is unknown: no calibration of {hosts} (make calibrate)"
    seconds = {one.strategy.partition(",")[0]: one.step_seconds or 1.0 for one in reversed(chosen.predictions)}
    here, there = (chosen.global_batch_size / seconds[name] for name in ("independent", "synchronous"))
    speeds = f"{there:.3g} pairs/s, where independent ranks have {here:.3g}"
    if sync_seconds is None:
        return f"{gives}; {speeds}, without its syncs: the link is not calibrated (make calibrate)"
    return f"{gives}; {speeds}; its sync takes {sync_seconds / seconds['synchronous']:.1%} of a step"


# ---- Predictions


def _independent_seconds(apart: ClusterPlan) -> float:
    """A global batch's time where each rank goes through its steps at its own pace, without merges."""
    speed = 0.0
    for rank, curve in zip(apart.ranks, apart.curves, strict=True):
        if rank.share and curve is not None and rank.predicted_compute_seconds is not None:
            speed += rank.share / (rank.predicted_compute_seconds + curve.step_overhead_seconds)
    return apart.global_batch_size / speed


def _sums_merges(facts: PlanFacts) -> bool:
    """Whether a merge is a sum on its way; else every rank gets every other's adapter whole."""
    return facts.settings.model.method == "full" and facts.settings.sync.compression in ("none", "bf16")


def _merge_seconds(facts: PlanFacts, apart: ClusterPlan) -> float | None:
    """What a round's end takes; None where it is not known."""
    size, message = len(facts.hosts), _gradient_bytes(facts, apart.curves)
    if not message or size == 1:
        return None
    # A sum passes 2 (n - 1) / n of its bytes, a gather n - 1.
    return facts.sum_seconds(message if _sums_merges(facts) else message * size / 2) + 2 * facts.sum_seconds(
        MEETING_BYTES
    )


def _predictions(
    facts: PlanFacts,
    chosen: ClusterPlan,
    apart: ClusterPlan,
    sync_seconds: float,
    merging: Merging,
    merge_seconds: float | None,
) -> tuple[Prediction, ...]:
    """Both strategies, equal shares, and the fastest hosts each alone; nothing without curves."""
    solo = chosen.solo_sum_pairs_per_second
    if solo is None or chosen.predicted_step_seconds is None:
        return ()
    hosts, batch, size = facts.names, chosen.global_batch_size, len(chosen.ranks)
    message, is_summed = _gradient_bytes(facts, chosen.curves), facts.settings.sync.compression in ("none", "bf16")
    to_sum = message * (2 * (size - 1) / size if is_summed else size - 1)

    def prediction(name: str, ranks: Sequence[RankPlan], seconds: float, bytes_sent: float = 0.0) -> Prediction:
        curves = [chosen.curves[rank.rank] for rank in ranks]
        peaks = [
            c.peak_bytes(max(r.micro_batch_sizes, default=1)) if c else None for r, c in zip(ranks, curves, strict=True)
        ]
        known = [peak for peak in peaks if peak is not None]
        return Prediction(
            name,
            tuple(rank.host for rank in ranks),
            seconds,
            batch / seconds / solo if size > 1 else None,
            memory_bytes=max(known) if len(known) == len(peaks) else None,
            bytes_per_step=bytes_sent if message or len(ranks) == 1 else None,
        )

    alone = []
    for rank in sorted(chosen.ranks, key=lambda rank: -(rank.solo_pairs_per_second or 0.0))[:SHOWN_ALONE]:
        name = f"{rank.host} alone" if hosts.count(rank.host) == 1 else f"rank {rank.rank} ({rank.host}) alone"
        single = plan_cluster([rank.host], batch, curves=[chosen.curves[rank.rank]])
        alone.append(prediction(name, [rank], single.predicted_step_seconds or 0.0))
    if size == 1:
        return (replace(alone[0], chosen=True),)
    shares = equal_shares(batch, size)
    equal = plan_cluster(hosts, batch, shares=shares, curves=chosen.curves, sync_seconds=sync_seconds)
    working = [rank for rank in chosen.ranks if rank.share]
    seconds = chosen.predicted_step_seconds - chosen.sync_seconds + sync_seconds * (len(working) > 1)
    together = prediction(f"synchronous, {_sum_of(chosen.shares)}", working, seconds, to_sum)
    merges = 1 / merging.steps_per_round if merging.merges else 0.0  # a step
    working = [rank for rank in apart.ranks if rank.share]
    seconds = _independent_seconds(apart) + (merge_seconds or 0.0) * merges
    to_merge = (to_sum if _sums_merges(facts) else message * (size - 1)) * merges
    in_rounds = prediction(f"independent, {_sum_of(apart.shares)}", working, seconds, to_merge)
    first, second = (in_rounds, together) if chosen.strategy == "independent" else (together, in_rounds)
    of_equal = prediction("synchronous, equal shares", chosen.ranks, equal.predicted_step_seconds or 0.0, to_sum)
    return replace(first, chosen=True), second, of_equal, *alone


def _sum_of(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers[:SHOWN_ALONE])) + (" + ..." if len(numbers) > SHOWN_ALONE else "")


# ---- How often independent ranks merge


def longest_round(steps: int) -> int:
    """The longest round, in steps, with which a run of `steps` has LEAST_MERGES merges, or one after each step."""
    return max(1, math.ceil(steps / (LEAST_MERGES - 1)) - 1)


def steps_per_round(steps: int, merge_seconds: float, step_seconds: float) -> int:
    """The fewest global batches of a round with which merges take at most MERGE_COST of the time; LEAST_MERGES stands.

    Args:
        steps: of the whole run.
        merge_seconds: what a round's end takes; `step_seconds`: a global batch, without it.
    """
    enough = math.ceil(merge_seconds * (1 / MERGE_COST - 1) / step_seconds - 1e-9)
    return min(max(1, enough), longest_round(steps))


def plan_merging(
    independent: IndependentSettings,
    settings: PlanSettings,
    facts: PlanFacts,
    merge_seconds: float | None,
    step_seconds: float | None,
) -> Merging:
    """How often independent ranks merge: as the settings say, else as predicted, else as will be measured.

    merge_seconds, step_seconds: as calibrated for this model and link; None where that is not known.
    """
    given, steps = independent.pairs_per_round, facts.steps
    if independent.merge == "none":
        return Merging(steps, 0, "never, as independent.merge=none has it")
    if given is not None:
        return _merging(math.ceil(given / facts.batch_size), steps, "as independent.pairs_per_round has it")
    if merge_seconds is not None and step_seconds:
        size = steps_per_round(steps, merge_seconds, step_seconds)
        part = merge_seconds / (merge_seconds + size * step_seconds)
        least = f", at least {LEAST_MERGES} merges a run" * (part > MERGE_COST)
        return _merging(
            size, steps, f"a merge is predicted to take {merge_seconds:.2g} s, {part:.2%} of the time{least}"
        )
    if measures_merges(independent, settings):
        size = min(FIRST_STEPS, longest_round(steps))
        often = f"as often as costs {MERGE_COST:.0%} of the time, at least {LEAST_MERGES} times"
        reason = f"{_every(size)} until the first merges are timed, then {often}"
        return Merging(size, math.ceil(steps / size), reason)
    fixed = "plan.replan=false" if settings.shares is None else "plan.shares"
    return _merging(longest_round(steps), steps, f"what a merge costs is not calibrated, and with {fixed} not measured")


def measures_merges(independent: IndependentSettings, settings: PlanSettings) -> bool:
    """Whether rounds get as long as measured timings ask for. Otherwise the same run gives the same bits again."""
    is_open = independent.pairs_per_round is None and independent.merge != "none"
    return is_open and settings.replan and settings.shares is None


def default_merge(independent: IndependentSettings, model: ModelSettings) -> str:
    """The merge method where the settings name none.

    In rounds as short as planned here, the mean of LoRA's factors is as good as the best adapter of the mean product,
    with far less arithmetic. Rounds that a user chose may be so long that it is not.
    """
    return "svd" if model.method == "lora" and independent.pairs_per_round is not None else "average"


def _merging(size: int, steps: int, reason: str) -> Merging:
    merges = math.ceil(steps / size)
    return Merging(size, merges, f"{_every(size)} ({merges:,} merge{'s' * (merges != 1)}): {reason}")


def _every(size: int) -> str:
    return "after every step" if size == 1 else f"every {size:,} steps"


# ---- A part of the model on every host


def _divided_by(facts: PlanFacts, strategy: str) -> tuple[ClusterPlan | None, str]:
    """The plan of one way to divide the model; or None, and why not."""
    if not facts.can_divide(strategy):
        return None, ""
    settings = facts.settings.for_strategy(strategy)
    if why_not := settings.impossible.get(strategy):
        return None, why_not
    facts = replace(facts, settings=settings)
    try:
        return plan_pipelined(facts) if strategy == "pipelined" else plan_sharded(facts), ""
    except UserError as error:
        return None, str(error)


def _plan_divided(facts: PlanFacts, replicas: ClusterPlan | None, too_large: TooLarge | None) -> ClusterPlan:
    """The plan of a run whose model is divided, as configured, or because the whole is too large for a host.

    Raises:
        UserError: the model cannot be divided among these hosts.
    """
    asked = facts.settings.strategy if facts.settings.strategy in DIVIDED else None
    candidates = {strategy: _divided_by(facts, strategy) for strategy in DIVIDED}
    possible = [found for name, (found, _) in candidates.items() if found and asked in (None, name)]
    if not possible:
        why_not = "; ".join(why for name, (_, why) in candidates.items() if why and asked in (None, name))
        raise UserError(why_not if asked else f"{too_large}; nor can it be divided: {why_not}")

    def speed(one: ClusterPlan) -> float:
        return (one.predicted_pairs_per_second or 0.0) * (NOTEWORTHY if one.strategy == "pipelined" else 1)

    best = max(possible, key=speed)
    name = next(strategy for strategy in DIVIDED if strategy != best.strategy)
    other, why_not = candidates[name]
    others = tuple(replace(way, chosen=False) for way in other.predictions) if other else ()
    if too_large is not None:
        label, needed = "independent, synchronous: too large", too_large.needed_bytes
        others += (Prediction(label, tuple(facts.names), None, None, memory_bytes=needed),)
    elif replicas is not None and replicas.calibrated:
        others += tuple(replace(way, chosen=False) for way in replicas.predictions)
    why = "as strategy has it" if asked else f"because {str(too_large).partition(';')[0]}"
    return replace(
        best,
        reason=f"{best.strategy}, {why}; {best.reason}",
        predictions=(*best.predictions, *others),
        instead=_divided_instead(best, other, name, why_not),
    )


def _divided_instead(best: ClusterPlan, other: ClusterPlan | None, name: str, why_not: str) -> str:
    """In one line what the other way to divide the model would give and cost."""
    if other is None:
        return f"strategy={name} cannot: {why_not}" if why_not else ""
    here, there = best.predicted_pairs_per_second, other.predicted_pairs_per_second
    mine, theirs = (one.predictions[0].bytes_per_step or 0.0 for one in (best, other))
    traffic = f"each rank would send {theirs / 1e6:,.3g} MB a step instead of {mine / 1e6:,.3g} MB"
    if here is None or there is None:
        return f"strategy={name}: at what speed is unknown, no host is calibrated (make calibrate); {traffic}"
    return f"strategy={name} would give {there:.3g} pairs/s, where {best.strategy} has {here:.3g}; {traffic}"
