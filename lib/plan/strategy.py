"""The plan of a run: facts in, strategy, shares and predictions out. Pure functions.

Replicas where every host can hold the model: independent ones, that merge as often as takes MERGE_COST of the time, or
synchronous ones where a setting asks for them. Where a host cannot, the model is divided: pipelined, or sharded where
that is predicted to be faster by a tenth or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lib.config.load import with_strategy
from lib.config.settings import IndependentSettings, PlanSettings
from lib.errors import UserError
from lib.plan.calibration import BatchCurve, CurveKey
from lib.plan.facts import DIVIDED, HostSpeeds, PlanFacts, prepared
from lib.plan.pipeline import plan_pipelined
from lib.plan.plan import Basis, ClusterPlan, Merging, Prediction, RankPlan, plan_cluster, sum_of
from lib.plan.sharded import plan_sharded
from lib.plan.shares import TooLarge, distribute_work

MERGE_COST = 0.01  # of the time of a run
LEAST_MERGES = 8  # in a run; after each step, where it has fewer
FIRST_STEPS = 2  # global batches of the first rounds, where what a merge costs is still to be measured
MEETING_BYTES = 4096  # of each of the two sums in which ranks exchange how far they are, before they merge
NOTEWORTHY = 1.1  # times a pipeline's speed, for which `auto` would send several hundred times as much
SHOWN_ALONE = 8  # single hosts in the table of predictions: the fastest ones


def plan(facts: PlanFacts) -> ClusterPlan:
    """The plan of a run, with the predictions of all strategies. Raises UserError: the model fits no host, and cannot
    be divided; settings that do not fit world or model."""
    facts, warnings = prepared(facts)
    settings = facts.settings
    if settings.strategy in DIVIDED and facts.can_divide(settings.strategy):
        chosen = _plan_divided(facts, [settings.strategy], None)
    else:
        try:
            chosen = _plan_replicas(facts)
        except TooLarge as too_large:
            is_open = settings.strategy == "auto" and settings.plan.shares is None
            if not is_open or not any(map(facts.can_divide, DIVIDED)):
                raise UserError(f"{too_large}; try {_less_memory(facts)}") from None
            chosen = _plan_divided(facts, DIVIDED, too_large)
    if chosen.calibrated:
        others = [_divided_by(facts, strategy)[0] for strategy in reversed(DIVIDED)]
        added = [replace(way, chosen=False) for other in others if other for way in other.predictions]
        chosen = replace(chosen, predictions=(*chosen.predictions[:2], *added, *chosen.predictions[2:]))
    # A step's time as predicted by curves, else by matrix products and the model's operations.
    seconds = next((way.step_seconds for way in chosen.predictions if way.chosen), None)
    if seconds is None and facts.memory is not None and not chosen.divides_model:
        hosts = [replace(host, gflops=host.gflops or facts.usual_gflops) for host in facts.hosts]
        curves = HostSpeeds.of(replace(facts, hosts=hosts)).whole_curves(chosen.gradient_checkpointing)
        with_curves = (replace(rank, curve=curve) for rank, curve in zip(chosen.ranks, curves, strict=False))
        seconds = max((rank.predicted_compute_seconds or 0.0 for rank in with_curves), default=None)
    recomputes = chosen.gradient_checkpointing or facts.key.gradient_checkpointing
    key = facts.key.model_copy(update={"gradient_checkpointing": recomputes})
    basis = Basis(facts.key, step_seconds=seconds, needed_bytes=partial(facts.needed_bytes, key=key))
    return replace(chosen, basis=basis, warnings=(*warnings, *chosen.warnings))


def _less_memory(facts: PlanFacts) -> str:
    """What a user can do about a pair that a host cannot hold, in words."""
    several, method = len(facts.hosts) > 1, facts.settings.model.method
    if several and any(map(facts.can_divide, DIVIDED)):
        return "strategy=auto without plan.shares, which divides the model"
    way = "model.method=lora" if method == "full" else "a quantised model"
    return f"a smaller data.max_length, {way}, more machines{', or without this host' * several}"


# ---- The whole model on every host


def _plan_replicas(facts: PlanFacts) -> ClusterPlan:
    """The plan of hosts that all keep the whole model, with the predictions of both strategies."""
    key, warnings = facts.key, list[str]()
    try:
        together = _divided_batch(facts, key, True)
    except TooLarge as too_large:
        key = key.model_copy(update={"gradient_checkpointing": True})
        has_memory = facts.memory is not None or None not in facts.measured_curves(key)
        if not facts.settings.model.may_turn_on_checkpointing or not has_memory:
            raise
        together = _divided_batch(facts, key, True)
        warnings.append(f"gradient checkpointing is turned on: {str(too_large).partition(';')[0]} without")
    apart = _divided_batch(facts, key, False)
    strategy, why = _choose_replicas(facts)
    chosen = apart if strategy == "independent" else together
    sync_seconds, several = _sync_seconds(facts, chosen.curves), len(facts.hosts) > 1
    ranks = []
    for rank, host in zip(chosen.ranks, facts.hosts, strict=True):
        pairs, planned = max(rank.micro_batch_sizes, default=0), None
        if pairs:
            planned = (rank.curve and rank.curve.peak_bytes(pairs)) or facts.needed_bytes(rank.rank, pairs, key)
        ranks.append(replace(rank, planned_bytes=planned, memory_bytes=host.memory_bytes))
    chosen = replace(
        chosen,
        strategy=strategy,
        ranks=tuple(ranks),
        reason=f"{strategy}, {why}; " * several + chosen.reason,
        warnings=tuple(warnings),
        gradient_checkpointing=key != facts.key,
    )
    merge_seconds = _merge_seconds(facts, apart) if chosen.calibrated and facts.link_is_measured else None
    merging = plan_merging(facts, merge_seconds, _independent_seconds(apart) if merge_seconds is not None else None)
    of_merges = merge_seconds / merging.steps_per_round if merge_seconds and merging.merges else 0.0
    predictions = _predictions(facts, chosen, apart, sync_seconds, of_merges)
    return replace(chosen, predictions=predictions, rounds=merging if strategy == "independent" and several else None)


def _divided_batch(facts: PlanFacts, key: CurveKey, syncs: bool) -> ClusterPlan:
    """The global batch among replicas."""
    settings, curves = facts.settings.plan, facts.measured_curves(key)
    sizes = settings.micro_batch_sizes
    divided = plan_cluster(
        facts.names,
        facts.batch_size,
        curves=curves,
        shares=settings.shares,
        micro_batch_sizes=sizes,
        sync_seconds=_sync_seconds(facts, curves) if syncs else 0.0,
        speeds=facts.relative_speeds(),
    )
    if sizes is not None and (facts.settings.strategy != "auto" or len(curves) == 1):
        return divided
    most = [None if curve else facts.default_size(rank, key) for rank, curve in enumerate(curves)]  # or TooLarge
    return divided.in_smaller(most, divided.reason) if sizes is None else divided


def _gradient_bytes(facts: PlanFacts, curves: Sequence[BatchCurve | None]) -> float:
    """Of one message with all that is trained, compressed (lib/distributed/compression.py)."""
    sync = facts.settings.sync
    factor = {"none": 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / 256), "topk": 2 * sync.topk_fraction}[sync.compression]
    return factor * max((curve.gradient_bytes or 0 for curve in curves if curve), default=0)


def _sync_seconds(facts: PlanFacts, curves: Sequence[BatchCurve | None]) -> float:
    return 0.0 if None in curves else facts.sum_seconds(_gradient_bytes(facts, curves))


def _choose_replicas(facts: PlanFacts) -> tuple[str, str]:
    """The strategy of ranks that all can hold the whole model, and why."""
    if facts.settings.strategy != "auto":
        return facts.settings.strategy, "as strategy has it"
    if len(facts.hosts) == 1:
        return "synchronous", "one rank"
    if facts.settings.plan.shares is not None:
        return "synchronous", "since plan.shares divides every step (strategy=independent takes shares, too)"
    if facts.settings.reference_sync_steps is not None:
        return "synchronous", "since all ranks follow one policy, which becomes the reference"
    return "independent", "as every host can hold the model (strategy=synchronous: one machine's result, to rounding)"


# ---- Predictions


def _independent_seconds(apart: ClusterPlan) -> float:
    """A global batch's time where each rank goes through its steps at its own pace, without merges."""
    ranks = [rank for rank in apart.ranks if rank.share]
    speeds = [rank.share / ((rank.predicted_compute_seconds or 0.0) + rank.update_seconds) for rank in ranks]
    return apart.global_batch_size / sum(speeds)


def _merge_seconds(facts: PlanFacts, apart: ClusterPlan) -> float | None:
    """What a round's end takes; None where it is not known."""
    size, message = len(facts.hosts), _gradient_bytes(facts, apart.curves)
    if not message or size == 1:
        return None
    is_sum = facts.settings.model.method == "full" and facts.settings.sync.compression in ("none", "bf16")
    # A sum passes 2 (n - 1) / n of its bytes, a gather of all adapters n - 1.
    return facts.sum_seconds(message if is_sum else message * size / 2) + 2 * facts.sum_seconds(MEETING_BYTES)


def _predictions(
    facts: PlanFacts, chosen: ClusterPlan, apart: ClusterPlan, sync_seconds: float, merge_seconds: float
) -> tuple[Prediction, ...]:
    """Both strategies, equal shares, and the fastest hosts each alone; nothing without curves. merge_seconds: that
    independent ranks' merges take, a step."""
    solo, step_seconds = chosen.solo_sum_pairs_per_second, chosen.predicted_step_seconds
    if solo is None or step_seconds is None:
        return ()
    hosts, batch, size = facts.names, chosen.global_batch_size, len(chosen.ranks)

    def prediction(name: str, ranks: Sequence[RankPlan], seconds: float | None) -> Prediction:
        planned = max(chosen.ranks[rank.rank].planned_bytes or 0 for rank in ranks) or None
        efficiency = batch / seconds / solo if size > 1 and seconds else None
        return Prediction(name, tuple(rank.host for rank in ranks), seconds, efficiency, False, planned)

    alone = []
    for rank in sorted(chosen.ranks, key=lambda rank: -(rank.solo_pairs_per_second or 0.0))[:SHOWN_ALONE]:
        name = rank.host if hosts.count(rank.host) == 1 else f"rank {rank.rank} ({rank.host})"
        single = plan_cluster([rank.host], batch, curves=[rank.curve])
        alone.append(prediction(f"{name} alone", [rank], single.predicted_step_seconds))
    if size == 1:
        return (replace(alone[0], chosen=True),)
    equal = plan_cluster(hosts, batch, distribute_work(batch, [1] * size), chosen.curves, sync_seconds=sync_seconds)
    of_equal = prediction("synchronous, equal shares", chosen.ranks, equal.predicted_step_seconds)
    working, at_work = ([rank for rank in each.ranks if rank.share] for each in (chosen, apart))
    seconds = step_seconds - chosen.sync_seconds + sync_seconds * (len(working) > 1)
    both = [prediction(f"synchronous, {sum_of(chosen.shares)}", working, seconds)]
    seconds = _independent_seconds(apart) + merge_seconds
    both.append(prediction(f"independent, {sum_of(apart.shares)}", at_work, seconds))
    first, second = both[::-1] if chosen.strategy == "independent" else both
    return replace(first, chosen=True), second, of_equal, *alone


# ---- How often independent ranks merge


def longest_round(steps: int, rollouts: int = 1) -> int:
    """The longest round, in steps, with which a run of `steps` has LEAST_MERGES merges, or one after each step.
    rollouts: rounds of rollouts in the run; each ends with a merge."""
    return max(1, min(math.ceil(steps / (LEAST_MERGES - 1)) - 1, steps // rollouts))


def steps_per_round(steps: int, merge_seconds: float, step_seconds: float, rollouts: int = 1) -> int:
    """The fewest global batches of a round with which merges take at most MERGE_COST of the time; LEAST_MERGES stands.
    steps: of the whole run. merge_seconds: what a round's end takes. step_seconds: a global batch, without it."""
    enough = math.ceil(merge_seconds * (1 / MERGE_COST - 1) / step_seconds - 1e-9)
    return min(max(1, enough), longest_round(steps, rollouts))


def plan_merging(facts: PlanFacts, merge_seconds: float | None, step_seconds: float | None) -> Merging:
    """How often independent ranks merge: as the settings say, else as predicted, else as will be measured."""
    independent, steps, rollouts = facts.settings.independent, facts.steps, facts.settings.rollouts.rounds or 1
    if independent.merge == "none":
        return Merging(steps, 0, "never, as independent.merge=none has it")
    if independent.pairs_per_round is not None:
        size = min(math.ceil(independent.pairs_per_round / facts.batch_size), max(1, steps // rollouts))
        reason = "as independent.pairs_per_round has it"
    elif merge_seconds is not None and step_seconds:
        size = steps_per_round(steps, merge_seconds, step_seconds, rollouts)
        part = merge_seconds / (merge_seconds + size * step_seconds)
        reason = f"a merge is predicted to take {merge_seconds:.2g} s, {part:.2%} of the time"
    elif measures_merges(independent, facts.settings.plan):
        size = min(FIRST_STEPS, longest_round(steps, rollouts))
        reason = f"until the first merges are timed, then as often as costs {MERGE_COST:.0%} of the time"
    else:
        size, reason = longest_round(steps, rollouts), "what a merge costs is neither calibrated nor measured"
    merges = rollouts * math.ceil(steps / rollouts / size)
    often = "after every step" if size == 1 else f"every {size:,} steps"
    return Merging(size, merges, f"{often} ({merges:,} merge{'s' * (merges != 1)}): {reason}")


def measures_merges(independent: IndependentSettings, settings: PlanSettings) -> bool:
    """Whether rounds get as long as measured timings ask for. Otherwise the same run gives the same bits again."""
    is_open = independent.pairs_per_round is None and independent.merge != "none"
    return is_open and settings.replan and settings.shares is None


# ---- A part of the model on every host


def _divided_by(facts: PlanFacts, strategy: str) -> tuple[ClusterPlan | None, str]:
    """The plan of one way to divide the model; or None, and why not."""
    settings = facts.settings
    if settings.strategy != strategy:  # configured shares and sizes are for another strategy
        unset = settings.plan.model_copy(update={"shares": None, "micro_batch_sizes": None})
        settings = settings.model_copy(update={"plan": unset})
    try:
        with_strategy(settings, strategy)
        if not facts.can_divide(strategy):
            return None, ""
        facts = facts if facts.settings.strategy == "auto" else replace(facts, settings=settings)
        return plan_pipelined(facts) if strategy == "pipelined" else plan_sharded(facts), ""
    except UserError as error:
        return None, str(error)


def _plan_divided(facts: PlanFacts, strategies: Sequence[str], too_large: TooLarge | None) -> ClusterPlan:
    """The plan of a run whose model is divided, by one of these strategies, as configured, or because the whole is too
    large for a host."""
    candidates = {strategy: _divided_by(facts, strategy) for strategy in DIVIDED}
    possible = [plan for name in strategies if (plan := candidates[name][0])]
    if not possible:
        why_not = "; ".join(filter(None, (candidates[name][1] for name in strategies)))
        raise UserError(f"{too_large}; nor can it be divided: {why_not}" if too_large else why_not)
    best = max(possible, key=lambda each: (each.predicted_pairs_per_second or 0.0) * (NOTEWORTHY if each.stages else 1))
    ((other, why_not),) = (of for strategy, of in candidates.items() if strategy != best.strategy)
    others = [replace(way, chosen=False) for way in other.predictions] if other else []
    why = "as strategy has it"
    if too_large is not None:
        label, why = "independent, synchronous: too large", f"because {str(too_large).partition(';')[0]}"
        others.append(Prediction(label, tuple(facts.names), None, None, memory_bytes=too_large.needed_bytes))
    cannot = f"; the other division cannot: {why_not}" if why_not else ""
    reason = f"{best.strategy}, {why}; {best.reason}{cannot}"
    return replace(best, reason=reason, predictions=(*best.predictions, *others))
