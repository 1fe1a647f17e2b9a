"""The plan of hosts that each keep a part of one model: pipelined or sharded, as configured or as predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from lib.config.load import with_strategy
from lib.config.schema import Config
from lib.errors import UserError
from lib.plan.calibration import BatchCurve
from lib.plan.cluster_plan import ClusterPlan, Prediction
from lib.plan.divide_work import plan_sharded
from lib.plan.pipeline_costs import ASSUMED_LINK
from lib.plan.pipeline_plan import pipeline_costs, plan_pipelined
from lib.plan.predictions import Cluster, predict_sharded, sharded_tokens, slower
from lib.plan.run_facts import RunFacts
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge

DIVIDED = ("pipelined", "sharded")
NOTEWORTHY = 1.1  # times a pipeline's speed, for which `auto` would send several hundred times as much


@dataclass(frozen=True)
class _Way:
    """One way to divide the model; without a plan, why not."""

    strategy: str
    plan: ClusterPlan | None
    why_not: str = ""

    @property
    def pairs_per_second(self) -> float | None:
        seconds = self.plan.predictions[0].step_seconds if self.plan else None
        return self.plan.global_batch_size / seconds if self.plan and seconds else None

    @property
    def bytes_per_step(self) -> float:
        return (self.plan.predictions[0].bytes_per_step or 0.0) if self.plan else 0.0


def can_divide(cluster: Cluster, strategy: str = "auto") -> bool:
    """Whether the run's family can be divided so, and there are hosts to divide it among. auto: in any way."""
    shapes = {"sharded": cluster.run.shape, "pipelined": cluster.run.block_shape}
    ways = [shapes[strategy]] if strategy in shapes else list(shapes.values())
    return len(cluster.hosts) > 1 and any(shape is not None for shape in ways)


def plan_divided(
    config: Config,
    cluster: Cluster,
    replicas: ClusterPlan | None,
    too_large: TooLarge | None,
    warnings: tuple[str, ...],
) -> ClusterPlan:
    """The plan of a run whose model is divided, as configured, or because the whole is too large for a host.

    `auto` takes sharded where it is predicted to be faster than pipelined by a tenth or more.

    Args:
        replicas: the plan of hosts that keep the whole model, for its predictions.
        too_large: why there is none.

    Raises:
        UserError: the model cannot be divided among these hosts.
    """
    is_asked = config.strategy in DIVIDED
    ways = [_way(config, cluster, strategy) for strategy in DIVIDED if can_divide(cluster, strategy)]
    possible = [way for way in ways if way.plan and way.strategy == (config.strategy if is_asked else way.strategy)]
    if not possible:
        why_not = "; ".join(way.why_not for way in ways if not is_asked or way.strategy == config.strategy)
        raise UserError(why_not if is_asked else f"{too_large}; nor can it be divided: {why_not}")
    best = max(
        possible, key=lambda way: (way.pairs_per_second or 0.0) * (NOTEWORTHY if way.strategy == "pipelined" else 1)
    )
    assert best.plan is not None
    other = next((way for way in ways if way is not best), None)
    others: tuple[Prediction, ...] = ()
    if other and other.plan:
        others = tuple(replace(prediction, chosen=False) for prediction in other.plan.predictions)
    if too_large is not None:
        name, needed = "independent, synchronous: too large", too_large.needed_bytes
        others += (Prediction(name, tuple(cluster.names), None, None, memory_bytes=needed),)
    elif replicas is not None and replicas.calibrated:
        others += tuple(replace(prediction, chosen=False) for prediction in replicas.predictions)
    why = "as strategy has it" if is_asked else f"because {str(too_large).partition(';')[0]}"
    return replace(
        best.plan,
        reason=f"{best.strategy}, {why}; {best.plan.reason}",
        warnings=(*warnings, *best.plan.warnings),
        predictions=(*best.plan.predictions, *others),
        divided_instead=_instead(best, other) if other else "",
    )


def divided_predictions(config: Config, cluster: Cluster) -> list[Prediction]:
    """What each way to divide a model would give that every host can keep whole; without those that cannot be."""
    config = without_configured_shares(config)
    ways = [_way(config, cluster, strategy) for strategy in ("sharded", "pipelined") if can_divide(cluster, strategy)]
    return [replace(one, chosen=False) for way in ways if way.plan for one in way.plan.predictions]


def without_configured_shares(config: Config) -> Config:
    """The settings for predictions of another strategy than the one that plan.shares was written for."""
    unset = {"shares": None, "micro_batch_sizes": None, "require_calibration": False}
    return config.model_copy(update={"plan": config.plan.model_copy(update=unset)})


def _way(config: Config, cluster: Cluster, strategy: str) -> _Way:
    if config.strategy not in ("auto", strategy):  # what is configured was for another one
        config = without_configured_shares(config)
    try:
        settings = with_strategy(config, strategy)
        plan = plan_pipelined(settings, cluster) if strategy == "pipelined" else _plan_sharded(settings, cluster)
    except UserError as error:
        return _Way(strategy, None, str(error))
    return _Way(strategy, plan)


def _plan_sharded(config: Config, cluster: Cluster) -> ClusterPlan:
    """The plan of hosts that each keep a part of every block, with its prediction."""
    run, hosts = cluster.run, cluster.hosts
    assert run.shape is not None
    rates = [one.gflops if one else None for one in cluster.calibrations]
    if not all(rates) and all(host.gflops for host in hosts):  # comparable only where all are measured the same way
        rates = [host.gflops for host in hosts]
    comparable = [replace(host, gflops=rate) for host, rate in zip(hosts, rates, strict=True)]
    plan = plan_sharded(config, comparable, run.shape, run.memory_model)
    sums: Callable[[float], float] | None = cluster.sum_seconds_in_pass if cluster.link_is_known else None
    curves = cluster.of_this_model(run.key)
    if run.block_shape is not None:  # beside a pipeline, with what is assumed of it
        sums = sums or ASSUMED_LINK.seconds
        curves = _curves_beside_a_pipeline(config, cluster, curves, plan.gradient_checkpointing)
    memory_rates = [one.memory_bytes_per_second if one else None for one in cluster.calibrations]
    adapted = config.model.adapt_embeddings or any("lm_head" in key for key in config.model.keys or ())
    is_frozen = config.model.method != "full" and not adapted
    tokens_of = functools.partial(sharded_tokens, run)
    prediction = predict_sharded(plan, run.shape, curves, tokens_of, sums, is_frozen, memory_rates)
    return replace(plan, predictions=(prediction,), warnings=(*plan.warnings, *_not_compiled(config, run, plan)))


def _not_compiled(config: Config, run: RunFacts, plan: ClusterPlan) -> list[str]:
    """Why a pass that would be compiled will not be."""
    assert plan.division is not None
    asked = config.train.compile or (config.train.compile is None and run.backend == "nccl")
    if not asked or plan.division.is_even:
        return []
    counts = {
        "KV heads": plan.division.kv_heads,
        "MLP columns": plan.division.mlp_columns,
        "columns of an expert": plan.division.expert_columns,
        "rows of the vocabulary": plan.division.vocabulary,
    }
    uneven = [f"{list(of_ranks)} {what}" for what, of_ranks in counts.items() if len(set(of_ranks)) > 1]
    return [
        "the step is not compiled, since ranks have unequal parts: "
        + (", ".join(uneven) or f"weights of {list(plan.division.weights)}")
    ]


def _curves_beside_a_pipeline(
    config: Config, cluster: Cluster, curves: list[BatchCurve | None], turned_on: bool
) -> list[BatchCurve | None]:
    """What the whole model takes on each host, or would take by what the costs of a pipeline's stages rest on.

    turned_on: gradient checkpointing, which the curves were measured without.
    """
    costs = pipeline_costs(config, cluster)
    if not all(curves):
        sizes, recomputes = (1, DEFAULT_MICRO_BATCH_SIZE), bool(config.model.gradient_checkpointing)
        curves = [costs.whole_curve(rank, sizes, recomputes) for rank in range(len(cluster.hosts))]
    factor = costs.whole_operations(1, turned_on) / costs.whole_operations(1, False)
    return [curve and slower(curve, factor) for curve in curves]


def _instead(best: _Way, other: _Way) -> str:
    """In one line what the other way would give and cost."""
    if other.plan is None:
        return f"strategy={other.strategy} cannot: {other.why_not}"
    here, there = best.pairs_per_second, other.pairs_per_second
    traffic = f"each rank would send {_size(other.bytes_per_step)} a step instead of {_size(best.bytes_per_step)}"
    if here is None or there is None:
        return f"strategy={other.strategy}: at what speed is unknown, no host is calibrated (make calibrate); {traffic}"
    return f"strategy={other.strategy} would give {there:.3g} pairs/s, where {best.strategy} has {here:.3g}; {traffic}"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.3g} MB"
