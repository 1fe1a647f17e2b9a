"""Warnings of likely mistakes in a plan or its settings; docs/best_practices.md gives the reasons."""

from __future__ import annotations

from dataclasses import replace

from lib.config.settings import PlanSettings, TrainSettings
from lib.errors import UserError
from lib.plan.facts import DIVIDED
from lib.plan.plan import ClusterPlan, plan_cluster

NOTEWORTHY = 0.05  # of a step's time: less is not worth a word
HIGHEST_RATE = 1e-2  # of Adam, whose steps are about as long as its rate
STRAYED_NATS = 100.0  # of KL to the reference, a completion
ROOM_FOR_ACTIVATIONS = 0.5  # of a host's memory, left free beside weights, gradients and optimizer


def advised(settings: PlanSettings, train: TrainSettings, strategy: str, plan: ClusterPlan) -> ClusterPlan:
    """The plan, with a warning for each practice that it goes against. strategy: as the settings have it."""
    warnings = [slow_shares(settings, plan), needless_division(strategy, plan), not_calibrated(settings, plan)]
    return replace(plan, warnings=(*plan.warnings, *filter(None, warnings), *learning_rate(train)))


def slow_shares(settings: PlanSettings, plan: ClusterPlan) -> str:
    """Configured shares, often equal ones, that make a step longer than the hosts' curves allow."""
    if settings.shares is None or plan.divides_model or None in plan.curves:
        return ""
    hosts, sizes, sync = [rank.host for rank in plan.ranks], settings.micro_batch_sizes, plan.sync_seconds
    best = plan_cluster(hosts, plan.global_batch_size, micro_batch_sizes=sizes, curves=plan.curves, sync_seconds=sync)
    now, then = plan.predicted_step_seconds or 0.0, best.predicted_step_seconds or 0.0
    if now <= then * (1 + NOTEWORTHY):
        return ""
    equal = "equal shares of unequal hosts, " * (max(plan.shares) - min(plan.shares) <= 1)
    times = f"{now:.3g} s a step by the hosts' curves, where {best.shares} would take {then:.3g} s"
    return f"plan.shares {plan.shares}: {equal}{times}; leave plan.shares out"


def needless_division(strategy: str, plan: ClusterPlan) -> str:
    """A model that is divided although the smallest host could hold and train all of it; "auto" has its reasons."""
    smallest = min((rank.memory_bytes or 0 for rank in plan.ranks), default=0)
    if strategy not in DIVIDED or len(plan.ranks) < 2:
        return ""
    needed = sum(rank.part.held_bytes for rank in plan.ranks if rank.part)
    needed -= sum(part.whole_bytes for part in plan.parts[1:])
    if needed > (1 - ROOM_FOR_ACTIVATIONS) * smallest:
        return ""
    sizes = f"the whole model takes {needed / 1e9:.3g} GB and the smallest host has {smallest / 1e9:.3g} GB"
    return f"strategy={strategy}: {sizes}; parts wait for each other, replicas do not: strategy=auto"


def not_calibrated(settings: PlanSettings, plan: ClusterPlan) -> str:
    """Several hosts, of which one has no curve; raises UserError where plan.require_calibration refuses that."""
    hosts = ", ".join(dict.fromkeys(rank.host for rank in plan.ranks if rank.curve is None))
    if plan.divides_model or not hosts:
        return ""
    if settings.require_calibration:
        raise UserError(f"plan.require_calibration: no calibration of {hosts} for this model; run make calibrate there")
    if len({rank.host for rank in plan.ranks}) == 1:
        return ""
    corrected = "; the first steps correct the shares" * (settings.replan and settings.shares is None)
    return f"no calibration of {hosts}{corrected}; make calibrate HOSTS=hostfile"


def learning_rate(train: TrainSettings) -> list[str]:
    """A rate that was chosen for another global batch and is not scaled, or one that no model survives under Adam."""
    warnings, rate, batch = [], f"train.learning_rate={train.learning_rate:g}", train.global_batch_size
    if train.learning_rate_scaling == "none" and train.learning_rate_batch_size not in (None, batch):
        rule = "linear" if train.optimizer == "sgd" else "sqrt"  # arXiv:1706.02677 and arXiv:2205.10287
        was = f"train.global_batch_size is {batch}, but {rate} was chosen for {train.learning_rate_batch_size}"
        warnings.append(f"{was}; train.learning_rate_scaling={rule} scales it, train.learning_rate=... sets another")
    if train.optimizer != "sgd" and train.learning_rate > HIGHEST_RATE:
        usual = "LoRA takes 1e-5 to 1e-3, full training 1e-7 to 1e-4, DPO the lower end of it"
        warnings.append(f"{rate} is beyond what {train.optimizer} can train with: {usual}")
    return warnings


def strayed(kl: float | None) -> str | None:
    """A policy that ends very far from its reference."""
    if kl is None or abs(kl) < STRAYED_NATS:
        return None
    remedy = "a lower train.learning_rate, a larger train.beta, or fewer steps"
    return f"KL to the reference is {kl:.3g} nats a completion: the model has left what it was; {remedy}"


def uneven_labels(rows: int, desirable: int, train: TrainSettings) -> str | None:
    """Rows of one label that weigh more than twice those of the other."""
    undesirable = rows - desirable
    if not desirable or not undesirable:
        return f"all {rows:,} rows are {'' if desirable else 'un'}desirable: there is nothing to tell apart"
    ratio = train.desirable_weight * desirable / (train.undesirable_weight * undesirable)
    if 0.5 <= ratio <= 2:
        return None
    name, times = "undesirable" if ratio > 1 else "desirable", max(ratio, 1 / ratio)
    evened = f"train.{name}_weight={getattr(train, f'{name}_weight') * times:.3g} evens them out"
    return f"{desirable:,} rows are desirable and {undesirable:,} are not, {times:.3g} times the weight; {evened}"


def long_warm_up(steps: int, train: TrainSettings) -> str | None:
    """A run that ends before its learning rate has risen."""
    never = f"train.warmup_steps={train.warmup_steps} and {steps} steps in all: the learning rate never reaches "
    return f"{never}{train.learning_rate:g}" if train.warmup_steps >= steps else None
