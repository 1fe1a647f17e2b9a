"""A model divided among ranks by memory and speed: every rank keeps heads, columns and rows of the vocabulary.

Parts are uneven: by measured matrix-product rates, else by memory. A rank whose memory does not hold its part and the
activations of one pair gives the rest to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lib.errors import UserError
from lib.model.partition import Division, divide, rank_bytes
from lib.plan.calibration import MEMORY_HEADROOM
from lib.plan.facts import PlanFacts
from lib.plan.memory import largest_micro_batch, rank_shape, training_bytes_per_byte
from lib.plan.pipeline import ASSUMED_LINK, HostSpeeds
from lib.plan.plan import Basis, ClusterPlan, ModelParts, PartOfModel, Prediction, RankPlan
from lib.plan.shares import (
    DEFAULT_MICRO_BATCH_SIZE,
    check_count,
    solo_pairs_per_second,
    split_evenly_sized,
    within_memory,
)

EQUAL = 0.05  # of a matrix-product rate, by which hosts may differ and still get equal parts, which can be compiled
EQUAL_CHIPS = 0.25  # the same of NVIDIA's GPUs of one name: measured quickly, at clocks that come and go
MOST_DIVISIONS = 20  # of a model, until a pair's activations fit beside every part
RESERVE_STEP = 0.005  # of a host's memory: whole heads and columns move no part by less
PASSES_OF_ALL = 45
"""How often a block reads or writes a number for every token and hidden unit, which no division makes fewer.

Forward and backward: 10 for two norms, 12 for residual sums, 5 for what adapters read, 18 for their gradients.
"""


def plan_sharded(facts: PlanFacts) -> ClusterPlan:
    """Divides a model among ranks: as plan.shares weighs them, else by speed, else by memory, else equally.

    Raises:
        UserError: the settings do not fit the world, or the model does not fit the hosts' memory.
    """
    batch, settings = facts.batch_size, facts.settings
    division, parts, reason = _divided(facts)
    size, turned_on = _micro_batch_size(facts, division, parts)
    checkpointing = turned_on or bool(settings.model.gradient_checkpointing)
    if facts.memory is not None and all(host.device for host in facts.hosts):
        parts = [
            replace(part, activation_bytes=_activation_bytes(facts, division, part, rank, size, checkpointing))
            for rank, part in enumerate(parts)
        ]
    warnings = [
        f"host {host.name}: its part needs {part.needed_bytes / 1e9:.2f} GB, of {part.memory_bytes / 1e9:.2f} GB"
        for host, part in zip(facts.hosts, parts, strict=True)
        if part.memory_bytes and part.needed_bytes > (1 - MEMORY_HEADROOM) * part.memory_bytes
    ]
    if turned_on:
        warnings.append("gradient checkpointing is turned on: one pair does not fit beside the parts without")
    compiles = settings.train.compile or (settings.train.compile is None and facts.backend == "nccl")
    if compiles and not division.is_even:
        warnings.append("the step is not compiled, since ranks have unequal parts")
    sizes = split_evenly_sized(batch, size)
    plan = ClusterPlan(
        strategy="sharded",
        global_batch_size=batch,
        ranks=tuple(RankPlan(rank, host, batch, sizes) for rank, host in enumerate(facts.names)),
        sync_seconds=0.0,
        reason=reason,
        warnings=tuple(warnings),
        basis=Basis((None,) * len(facts.hosts)),
        model=ModelParts(division, tuple(parts)),
        gradient_checkpointing=turned_on,
    )
    return replace(plan, predictions=(_prediction(facts, plan, division, turned_on),))


def _divided(facts: PlanFacts) -> tuple[Division, list[PartOfModel], str]:
    """Each rank's part, as far as memory allows with a pair's activations beside it; and why these.

    Raises:
        UserError: as plan_sharded.
    """
    assert facts.shape is not None
    weights, reason = _part_weights(facts)
    sharding = facts.settings.model.shard_vocabulary
    division = divide(facts.shape, weights, sharding)
    parts = _parts(facts, division)
    if facts.settings.plan.shares is not None or not all(host.memory_bytes for host in facts.hosts):
        return division, parts, reason
    reserved = [0.0] * len(parts)
    for _ in range(MOST_DIVISIONS):
        limited = _weights_within_memory(facts, weights, parts, reserved)
        division = divide(facts.shape, limited, sharding)
        parts = _parts(facts, division)
        lacking = [_lacking_bytes(facts, division, part, rank) for rank, part in enumerate(parts)]
        if not any(lacking) or facts.settings.plan.micro_batch_sizes:
            break
        reserved = [
            before + (max(missing, RESERVE_STEP * (host.memory_bytes or 0)) if missing else 0.0)
            for before, missing, host in zip(reserved, lacking, facts.hosts, strict=True)
        ]
    is_limited = division.weights != tuple(weights)
    return division, parts, f"{reason}, as far as memory allows" if is_limited else reason


def _part_weights(facts: PlanFacts) -> tuple[list[float], str]:
    """How the model is divided as long as memory allows, and why so.

    Raises:
        UserError: plan.shares has not one number for each rank.
    """
    shares, hosts = facts.settings.plan.shares, facts.hosts
    if shares is not None:
        check_count("plan.shares", shares, len(hosts))
        return [float(share) for share in shares], "divided as plan.shares weighs the ranks"
    calibrated = [host.calibration.gflops if host.calibration else None for host in hosts]
    known = [float(rate) for rate in (calibrated if all(calibrated) else [host.gflops for host in hosts]) if rate]
    if len(known) == len(hosts):
        chips = {host.device_name for host in hosts}
        is_one_chip = len(chips) == 1 and None not in chips and all(host.device == "cuda" for host in hosts)
        if min(known) > (1 - (EQUAL_CHIPS if is_one_chip else EQUAL)) * max(known):
            return [1.0] * len(hosts), "divided equally: the hosts' matmul rates are alike"
        return known, "divided by the hosts' matmul rates"
    memory = [float(host.memory_bytes) for host in hosts if host.memory_bytes]
    if len(memory) == len(hosts):
        return memory, "divided by memory: no calibration of every host"
    return [1.0] * len(hosts), "divided equally: neither speed nor memory is known of every host"


def _per_weight(facts: PlanFacts) -> float:
    settings = facts.settings
    assert facts.shape is not None
    return training_bytes_per_byte(facts.shape, settings.model, settings.train.optimizer, settings.moving_reference)


def _parts(facts: PlanFacts, division: Division) -> list[PartOfModel]:
    """What each rank keeps, without activations."""
    assert facts.shape is not None
    sizes = [rank_bytes(facts.shape, division, rank) for rank in range(len(facts.hosts))]
    total, columns = sum(divided for divided, _ in sizes), division.mlp_columns or division.expert_columns
    return [
        PartOfModel(
            kv_heads=division.kv_heads[rank],
            columns=columns[rank],
            share=divided / total,
            divided_bytes=divided,
            whole_bytes=whole,
            training_bytes=round(_per_weight(facts) * (divided + whole)),
            memory_bytes=facts.hosts[rank].memory_bytes,
        )
        for rank, (divided, whole) in enumerate(sizes)
    ]


def _weights_within_memory(
    facts: PlanFacts, weights: list[float], parts: Sequence[PartOfModel], reserved: Sequence[float]
) -> list[float]:
    """The weights, changed where a part would not fit its host. reserved: bytes that a part leaves free.

    Raises:
        UserError: all hosts together have too little.
    """
    per_weight, memory_bytes = _per_weight(facts), [part.memory_bytes or 0 for part in parts]
    total, whole = sum(part.divided_bytes for part in parts), parts[0].whole_bytes
    room = [
        ((1 - MEMORY_HEADROOM) * size - free) / (1 + per_weight) - whole
        for size, free in zip(memory_bytes, reserved, strict=True)
    ]
    limited = within_memory(weights, [max(0.0, space) / total for space in room])
    if limited is None:
        needed = (1 + per_weight) * (total + len(parts) * whole) + sum(reserved)
        raise UserError(
            f"strategy=sharded: {len(parts)} ranks need {needed / 1e9:.2f} GB together for weights"
            f"{', gradients and optimizer' if per_weight else ''}"
            f"{' and the activations of one pair' if any(reserved) else ''}, but have {sum(memory_bytes) / 1e9:.2f} GB "
            f"less {MEMORY_HEADROOM:.0%} headroom; add a host, or take a quantised model with model.method=lora"
        )
    return limited


# ---- Micro-batches beside the parts


def _activation_bytes(
    facts: PlanFacts, division: Division, part: PartOfModel, rank: int, pairs: int, checkpointing: bool
) -> int:
    """Activations and adapters of a micro-batch beside a rank's part; 0 where nothing is known of the model."""
    device = facts.hosts[rank].device
    if facts.memory is None or device is None:
        return 0
    shape = rank_shape(facts.memory.shape, division, rank)
    needed = facts.memory.of_part(shape, part.divided_bytes + part.whole_bytes, pairs, device, checkpointing)
    return max(0, needed.total - part.needed_bytes)


def _lacking_bytes(facts: PlanFacts, division: Division, part: PartOfModel, rank: int) -> float:
    """What is missing for one pair beside a rank's part, with gradient checkpointing where it may be turned on."""
    activations = _activation_bytes(facts, division, part, rank, 1, facts.settings.may_checkpoint)
    return max(0.0, part.needed_bytes + activations - (1 - MEMORY_HEADROOM) * (part.memory_bytes or 0))


def _micro_batch_size(facts: PlanFacts, division: Division, parts: Sequence[PartOfModel]) -> tuple[int, bool]:
    """Pairs of a micro-batch: as configured, else as fit every rank; and whether checkpointing has to be turned on.

    Raises:
        UserError: one pair does not fit.
    """
    settings, configured = facts.settings, facts.settings.plan.micro_batch_sizes
    checkpointing = bool(settings.model.gradient_checkpointing)

    def largest(rank: int, checkpointing: bool) -> int:
        device, part = facts.hosts[rank].device, parts[rank]
        most = facts.memory.most_pairs(device) if facts.memory and device else DEFAULT_MICRO_BATCH_SIZE
        room = part.memory_bytes and (1 - MEMORY_HEADROOM) * part.memory_bytes - part.needed_bytes
        return largest_micro_batch(
            lambda pairs: _activation_bytes(facts, division, part, rank, pairs, checkpointing),
            room if facts.memory else None,
            min(DEFAULT_MICRO_BATCH_SIZE, most),
        )

    sizes = [largest(rank, checkpointing) for rank in range(len(parts))]
    turned_on = min(sizes) == 0 and settings.model.may_turn_on_checkpointing
    if turned_on:
        sizes = [largest(rank, True) for rank in range(len(parts))]
    if min(sizes) == 0 and not configured and settings.plan.shares is None:
        rank = sizes.index(0)
        part = parts[rank]
        needed = part.needed_bytes + _activation_bytes(facts, division, part, rank, 1, checkpointing or turned_on)
        raise UserError(
            f"strategy=sharded: host {facts.names[rank]}: its part and one pair need {needed / 1e9:.2f} GB by the "
            f"formula, but it has {(part.memory_bytes or 0) / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; "
            "add a host, or lower data.max_length"
        )
    return configured[0] if configured else max(1, min(sizes)), turned_on


# ---- Prediction


def _prediction(facts: PlanFacts, plan: ClusterPlan, division: Division, turned_on: bool) -> Prediction:
    """What a divided model gives: each rank's part of the compute, and a block's four sums, two of them backward.

    A rank computes its heads and columns, and its part of the head: rows of the vocabulary, positions beside a frozen
    head, or all of one that is trained. What every rank does for all hidden units is bound by memory: norms, residual
    sums, adapters' inputs and their gradients. A sum carries a number for every token and hidden unit, and their times
    add up. Of a mixture of experts, all are counted as if they ran.
    """
    shape, model = facts.shape, facts.settings.model
    assert shape is not None
    ranks, sizes = len(plan.ranks), np.array(plan.ranks[0].micro_batch_sizes)
    head, divided = shape.vocabulary * shape.hidden_size, shape.divided_parameters
    adapted = model.adapt_embeddings or any("lm_head" in key for key in model.keys or ())
    is_frozen = model.method != "full" and not adapted
    of_head = np.array(division.vocabulary or ([*division.weights] if is_frozen else [1.0] * ranks), dtype=np.float64)
    if division.vocabulary or is_frozen:
        of_head = of_head / of_head.sum()
    fractions = (np.array([part.share for part in plan.model.parts]) * divided + of_head * head) / (divided + head)
    messages = np.array([facts.tokens(size)[0] for size in sizes.tolist()]) * shape.hidden_size * shape.other_bytes
    per_batch = 4 * shape.blocks + bool(division.vocabulary) + (bool(division.vocabulary) or is_frozen)
    curves = HostSpeeds.of(facts).whole_curves(turned_on) if facts.block_shape is not None else []
    seconds, solo = None, None
    if curves:
        passes = PASSES_OF_ALL * shape.blocks * float(messages.sum())
        computes = []
        for fraction, curve, host in zip(fractions, curves, facts.hosts, strict=True):
            alone = float(curve.seconds(sizes).sum())
            rate = host.calibration.memory_bytes_per_second if host.calibration else None
            of_all = min(passes / rate, alone) if rate else 0.0
            computes.append(fraction * (alone - of_all) + of_all + curve.step_overhead_seconds)
        sums = sum(_sum_seconds(facts, float(size)) for size in messages)
        seconds = max(computes) + per_batch * sums
        solo = sum(map(solo_pairs_per_second, curves))
    shown = " + ".join(f"{part.share:.0%}" for part in plan.model.parts[:8]) + " + ..." * (ranks > 8)
    return Prediction(
        f"sharded, {shown}",
        tuple(facts.names),
        seconds,
        plan.global_batch_size / seconds / solo if seconds and solo else None,
        True,
        max(part.needed_bytes + (part.activation_bytes or 0) for part in plan.model.parts),
        float(per_batch * messages.sum() * 2 * (ranks - 1) / ranks),
    )


def _sum_seconds(facts: PlanFacts, size_bytes: float) -> float:
    """One sum within a pass. Over NCCL what was measured as latency is the host's, which runs ahead there."""
    if not facts.link_is_known:
        return ASSUMED_LINK.seconds(size_bytes)
    latency = min(
        (k.latency_seconds for h in facts.hosts if h.calibration for k in h.calibration.links if k.backend == "nccl"),
        default=0.0,
    )
    return max(0.0, facts.sum_seconds(size_bytes) - latency * (facts.backend == "nccl"))
