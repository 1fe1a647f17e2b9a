"""A model divided among ranks by speed and memory: every rank keeps heads, columns and rows of the vocabulary.

Parts are uneven: by measured matrix-product rates, else by memory. A rank whose memory does not hold its part and the
activations of one pair gives some of it to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lib.errors import UserError
from lib.model.partition import Division, divide, rank_bytes
from lib.plan.calibration import MEMORY_HEADROOM
from lib.plan.facts import ASSUMED_LINK, PASSES_OF_ALL, HostSpeeds, PlanFacts
from lib.plan.memory import StepBytes, rank_shape
from lib.plan.pipeline import plan_of_parts
from lib.plan.plan import ClusterPlan, PartOfModel, Prediction, sum_of
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, check_count, solo_pairs_per_second

EQUAL = 0.05  # of a matrix-product rate, by which hosts may differ and still get equal parts, which can be compiled
EQUAL_CHIPS = 0.25  # the same of NVIDIA's GPUs of one name: measured quickly, at clocks that come and go
MOST_DIVISIONS = 40  # of a model, until all parts fit


def plan_sharded(facts: PlanFacts) -> ClusterPlan:
    """Divides a model among ranks: as plan.shares weighs them, else by speed, by memory, equally; or UserError."""
    settings, sizes = facts.settings, facts.settings.plan.micro_batch_sizes
    weights, reason = _part_weights(facts)
    # Parts may be smaller than their weights say, for hosts with little memory.
    may_move = settings.plan.shares is None and all(host.memory_bytes for host in facts.hosts)
    division = _fitting(facts, weights, int(may_move and not sizes), may_move)
    if division.weights != tuple(weights):
        reason += ", as far as memory allows"
    is_on, turned_on = bool(settings.model.gradient_checkpointing), False
    size = sizes[0] if sizes else _largest_size(facts, division, is_on)
    if size == 0:
        turned_on = settings.model.may_turn_on_checkpointing
        size = max(1, _largest_size(facts, division, is_on or turned_on))
    parts = _parts(facts, division, size, is_on or turned_on)
    plan = plan_of_parts(facts, "sharded", parts, size, reason)
    plan = replace(plan, division=division, gradient_checkpointing=turned_on)
    if turned_on:
        why = "gradient checkpointing is turned on: one pair does not fit beside the parts without"
        plan = replace(plan, warnings=(*plan.warnings, why))
    return replace(plan, predictions=(_prediction(facts, plan, division),))


def _part_weights(facts: PlanFacts) -> tuple[list[float], str]:
    """How the model is divided as long as memory allows, and why so."""
    shares, hosts = facts.settings.plan.shares, facts.hosts
    if shares is not None:
        check_count("plan.shares", shares, len(hosts))
        return [float(share) for share in shares], "divided as plan.shares weighs the ranks"
    rates = [float(rate) for rate in facts.rates() if rate]
    if len(rates) == len(hosts):
        chips = {host.device_name for host in hosts}
        is_one_chip = len(chips) == 1 and None not in chips and all(host.device == "cuda" for host in hosts)
        if min(rates) > (1 - (EQUAL_CHIPS if is_one_chip else EQUAL)) * max(rates):
            return [1.0] * len(hosts), "divided equally: the hosts' matmul rates are about equal"
        return rates, "divided by the hosts' matmul rates"
    memory = [float(host.memory_bytes) for host in hosts if host.memory_bytes]
    if len(memory) == len(hosts):
        return memory, "divided by memory: no calibration of every host"
    return [1.0] * len(hosts), "divided equally: neither speed nor memory is known of every host"


# ---- Parts and the micro-batches beside them


def _fitting(facts: PlanFacts, weights: Sequence[float], pairs: int, may_move: bool) -> Division:
    """The division by these weights; a host that does not hold its part, and so many pairs' activations, gets less."""
    assert facts.shape is not None
    model, room = facts.settings.model, [host.room_bytes for host in facts.hosts]
    checkpointing = bool(model.gradient_checkpointing) or model.may_turn_on_checkpointing
    parts, shares = list[PartOfModel](), [*weights]
    for _ in range(MOST_DIVISIONS):
        division = divide(facts.shape, tuple(shares), model.shard_vocabulary)
        parts = _parts(facts, division, pairs, checkpointing)
        over = [rank for rank, part in enumerate(parts) if part.needed_bytes > room[rank]]
        if not over or not may_move:
            return division
        if len(over) == len(parts):
            break
        for rank in over:
            whole = parts[rank].whole_bytes
            shares[rank] *= 0.999 * max(0.0, room[rank] - whole) / (parts[rank].needed_bytes - whole)
    needed, held = sum(part.needed_bytes for part in parts), sum(host.memory_bytes or 0 for host in facts.hosts)
    raise UserError(
        f"strategy=sharded: {len(room)} ranks need {needed / 1e9:.2f} GB together for weights and the activations of "
        f"one pair, but have {held / 1e9:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; add a rank, or take a quantised "
        "model with model.method=lora"
    )


def _parts(facts: PlanFacts, division: Division, pairs: int, checkpointing: bool) -> list[PartOfModel]:
    """What each rank keeps, and what micro-batches of so many pairs take beside it by the formula."""
    assert facts.shape is not None
    sizes = [rank_bytes(facts.shape, division, rank) for rank in range(len(facts.hosts))]
    total, columns, parts = sum(divided for divided, _ in sizes), division.mlp_columns or division.expert_columns, []
    for rank, (host, (divided, whole)) in enumerate(zip(facts.hosts, sizes, strict=True)):
        step = StepBytes(divided + whole, 0, 0, 0)
        if facts.memory is not None:
            shape = rank_shape(facts.memory.shape, division, rank)
            step = facts.memory.of_part(shape, divided + whole, max(1, pairs), host.device, checkpointing)
        held = divided, whole, step.trained + step.gradients, step.activations if pairs else 0
        parts.append(PartOfModel(division.kv_heads[rank], columns[rank], divided / total, *held))
    return parts


def _largest_size(facts: PlanFacts, division: Division, checkpointing: bool) -> int:
    """The most pairs of a micro-batch that fit every rank by the formula; 0: one pair does not."""
    most = DEFAULT_MICRO_BATCH_SIZE
    if facts.memory is not None:
        most = min(most, *(facts.memory.most_pairs(host.device) for host in facts.hosts))
    for pairs in range(most, 0, -1):
        parts = _parts(facts, division, pairs, checkpointing)
        if all(part.needed_bytes <= host.room_bytes for host, part in zip(facts.hosts, parts, strict=True)):
            return pairs
    return 0


# ---- Prediction


def _prediction(facts: PlanFacts, plan: ClusterPlan, division: Division) -> Prediction:
    """What a divided model gives: each rank's part of the compute, and a block's four sums, two of them backward. Of
    the head a rank computes rows of the vocabulary, positions beside a frozen head, or all of one that is trained. What
    every rank does for all hidden units is bound by memory."""
    shape, model, parts = facts.shape, facts.settings.model, plan.parts
    label, seconds, efficiency = f"sharded, {sum_of([f'{part.share:.0%}' for part in parts])}", None, None
    if facts.memory is not None and shape is not None and (speeds := HostSpeeds.of(facts)).are_measured:
        adapted = model.adapt_embeddings or any("lm_head" in key for key in model.keys or ())
        divides_head = bool(division.vocabulary) or (model.method != "full" and not adapted)
        of_head = np.array(division.vocabulary or division.weights, dtype=np.float64)
        of_head = of_head / of_head.sum() if divides_head else np.ones(len(parts))
        sizes = np.array(plan.ranks[0].micro_batch_sizes)
        messages = np.array([facts.tokens(size)[0] for size in sizes.tolist()]) * shape.hidden_size * shape.other_bytes
        curves, computes = speeds.whole_curves(plan.gradient_checkpointing), []
        for rank, (part, curve) in enumerate(zip(parts, curves, strict=True)):
            block, head = speeds.parts(rank, int(sizes.max()))
            blocks, alone = block * shape.blocks, float(curve.seconds(sizes).sum())
            for_all = min(alone, PASSES_OF_ALL * shape.blocks * messages.sum() / facts.memory_speed(rank))
            fraction = (part.share * blocks + of_head[rank] * head) / (blocks + head)
            computes.append(fraction * (alone - for_all) + for_all + curve.step_overhead_seconds)
        # Over NCCL what was measured as latency is the host's, which runs ahead within a pass.
        links = [link for host in facts.hosts if host.calibration for link in host.calibration.links]
        latency = min((link.latency_seconds for link in links if link.backend == "nccl"), default=0.0)
        latency *= facts.backend == "nccl"
        of_sum = facts.sum_seconds if facts.link_is_measured else ASSUMED_LINK.seconds
        sums = [of_sum(size) - latency for size in messages.tolist()]
        sums_per_batch = 4 * shape.blocks + bool(division.vocabulary) + divides_head
        seconds = max(computes) + sums_per_batch * sum(max(0.0, each) for each in sums)
        efficiency = plan.global_batch_size / seconds / sum(map(solo_pairs_per_second, curves))
    largest = max(rank.planned_bytes or 0 for rank in plan.ranks)
    return Prediction(label, tuple(facts.names), seconds, efficiency, True, largest)
