"""A model cut into pipeline stages: what its blocks cost on each host, and the plan of the best cut.

Times: a block's forward pass is 2 operations a weight and token, the head's 2 a weight and scored token; the backward
pass as many again, and as many once more for the gradients of weights in full training. A host's operations a second
come from a curve of this very model, where all hosts have one (measured or estimated), else from matrix products.
Memory is the formula's (lib/plan/memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from lib.data.batch import BatchShape
from lib.errors import UserError
from lib.model.partition import ModelShape
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, Link
from lib.plan.cuts import Cut, CutCosts, CutMemory, Hop, Keeps, best_cut, cut_at, depths, most_blocks, needed_bytes
from lib.plan.facts import PlanFacts, choose_curves
from lib.plan.memory import (
    BlockBytes,
    activation_bytes_of_block,
    block_weights,
    head_bytes,
    trained_bytes_per_parameter,
    trained_parameters,
)
from lib.plan.plan import Basis, ClusterPlan, ModelParts, Prediction, RankPlan, StagePlan
from lib.plan.shares import DEFAULT_MICRO_BATCH_SIZE, TooLarge, check_count, split_evenly_sized
from lib.system.hardware import Device

SIZES = (1, 2, 3, 4, 6, 8)  # of micro-batches, in pairs, that are compared
DEEPER = (1, 2, 4)  # more micro-batches in flight, over links that a stage would wait for
WORTH_IT = 0.01  # of a step's time, that more micro-batches in flight have to save
BACKWARD = {"lora": 1.0, "dora": 1.0, "full": 2.0}  # times the forward pass's operations
# Tokens at which a device does half of its matrix-product rate. One H200 did 156 to 375 of 620 TFLOP/s at 512 tokens of
# an 8B model's shapes; smaller devices are busy with fewer.
HALF_RATE_TOKENS: dict[Device, int] = {"cpu": 32, "metal": 64, "cuda": 768}
ASSUMED_LINK = Link(backend="ring", latency_seconds=5e-4, bandwidth_bytes_per_second=1.1e8)  # where none is measured


@dataclass(frozen=True)
class HostSpeeds:
    """How fast each host runs the run's model."""

    facts: PlanFacts
    shape: ModelShape
    curves: Sequence[BatchCurve] | None  # of this model; None: by matrix products
    rates: Sequence[float] | None  # of matrix products, GFLOP/s; None: not known, all hosts count as equal

    @classmethod
    def of(cls, facts: PlanFacts) -> HostSpeeds:
        assert facts.block_shape is not None
        curves: Sequence[BatchCurve | None] = facts.measured_curves(facts.key)
        if any(curves) and not all(curves):
            try:
                choice = choose_curves(facts, facts.key)
                curves = choice.curves or curves
            except TooLarge:  # for a host that holds all; here it holds a part
                pass
        known = [curve for curve in curves if curve is not None]
        rates = [rate for rate in facts.rates() if rate]
        complete = len(facts.hosts)
        return cls(
            facts,
            facts.block_shape,
            known if len(known) == complete else None,
            rates if len(rates) == complete else None,
        )

    @property
    def source(self) -> str:
        """Where they come from, as the plan says it."""
        if self.curves:
            return "by the hosts' curves"
        return (
            "by the hosts' matrix-product rates"
            if self.rates
            else "with equal speeds: none is measured (make calibrate)"
        )

    @property
    def are_known(self) -> bool:
        return bool(self.curves or self.rates)

    def block_operations(self, pairs: float) -> np.ndarray:
        """Of each block's forward pass: float64 [L]."""
        sparse = np.arange(self.shape.blocks) >= self.shape.blocks - self.shape.expert_blocks
        dense, experts = (block_weights(self.shape, is_sparse, active=True) for is_sparse in (False, True))
        tokens, _ = self.tokens(pairs)
        operations: np.ndarray = 2 * tokens * np.where(sparse, experts, dense)
        return operations

    def head_operations(self, pairs: float) -> float:
        """Of the head's forward pass."""
        return 2 * self.shape.vocabulary * self.shape.hidden_size * self.tokens(pairs)[1]

    def operations(self, pairs: float, checkpointing: bool) -> float:
        """Forward and backward through the whole model."""
        blocks = float(self.block_operations(pairs).sum())
        passes = 1 + BACKWARD[self.facts.settings.model.method]
        return (blocks + self.head_operations(pairs)) * passes + checkpointing * blocks

    def per_second(self, rank: int, pairs: float) -> float:
        """Operations a second of a host in micro-batches of so many pairs."""
        if self.curves:
            checkpointing = self.facts.key.gradient_checkpointing
            return self.operations(pairs, checkpointing) / float(self.curves[rank].seconds(np.array([pairs]))[0])
        if self.rates:
            half = HALF_RATE_TOKENS[self.facts.hosts[rank].device or "metal"]
            return self.rates[rank] * 1e9 / (1 + half / self.tokens(pairs)[0])
        return 1e12

    def factors(self, rank: int, pairs: float) -> tuple[float, float]:
        """Seconds over those by operations: of a block, and of the head.

        A head, a loss and all that is started for them take longer than their operations say, most so in a small model.
        On CUDA the measured share is not used: with few blocks the host's launches are what was timed there, which
        overlap with the GPU's work in a whole step.
        """
        share = self.curves[rank].outside_blocks if self.curves else None
        if share is None or self.facts.hosts[rank].device == "cuda":
            return 1.0, 1.0
        whole = self.operations(pairs, self.facts.key.gradient_checkpointing)
        head = self.head_operations(pairs) * (1 + BACKWARD[self.facts.settings.model.method])
        return (1 - share) * whole / (whole - head), share * whole / head

    def whole_curves(self, turned_on: bool) -> list[BatchCurve]:
        """What the whole model takes on each host; turned_on: gradient checkpointing. Empty where nothing is known."""
        if self.curves:
            return [curve.slowed(self.operations(1, turned_on) / self.operations(1, False)) for curve in self.curves]
        checkpointing = turned_on or bool(self.facts.settings.model.gradient_checkpointing)
        sizes = sorted({1, 2, 4, DEFAULT_MICRO_BATCH_SIZE})
        return [
            BatchCurve.from_rates(
                {size: size * self.per_second(rank, size) / self.operations(size, checkpointing) for size in sizes}
            )
            for rank in range(len(self.facts.hosts) if self.are_known else 0)
        ]

    def tokens(self, pairs: float) -> tuple[float, float]:
        """Through the blocks, and through the head; of a mean micro-batch."""
        whole = int(np.ceil(pairs))
        tokens, scored = self.facts.tokens(whole)
        return tokens / whole * pairs, scored / whole * pairs


def cut_costs(facts: PlanFacts, speeds: HostSpeeds, pairs: int, more_in_flight: int = 0) -> CutCosts:
    """What blocks cost for the global batch in micro-batches of so many pairs at most.

    more_in_flight: micro-batches of every stage but the last, beyond the usual 1F1B's.
    """
    hosts, shape, settings = facts.hosts, speeds.shape, facts.settings
    ranks, micro_batches = range(len(hosts)), -(-facts.batch_size // pairs)
    mean, backward = facts.batch_size / micro_batches, BACKWARD[settings.model.method]
    rates = np.array([speeds.per_second(rank, pairs) for rank in ranks])
    of_blocks, of_head = np.array([speeds.factors(rank, mean) for rank in ranks]).T
    forward = _running_sum(speeds.block_operations(mean)[None] * (of_blocks / rates)[:, None])
    head = np.where(np.array(ranks) == len(hosts) - 1, speeds.head_operations(mean) * of_head / rates, 0.0)
    memory = [_HostMemory.of(facts, shape, host.device, pairs) for host in hosts]
    table = shape.vocabulary * shape.hidden_size
    ends, work = np.zeros(len(hosts)), np.array([one.transient for one in memory])
    ends[0] += table * (shape.weight_bytes + memory[0].per_trained * memory[0].trains_tables)
    ends[-1] += table * (shape.weight_bytes + memory[-1].per_trained * memory[-1].trains_tables)
    work[-1] += memory[-1].head
    limits = [(1 - MEMORY_HEADROOM) * host.memory_bytes if host.memory_bytes else np.inf for host in hosts]
    message = speeds.tokens(mean)[0] * shape.hidden_size * _item_bytes(facts, shape) * _sent_part(facts, shape)
    taken = CutMemory(
        held=_running_sum(np.array([one.held for one in memory])),
        kept=_running_sum(np.array([one.kept for one in memory])),
        inputs=_running_sum(np.array([one.inputs for one in memory])),
        ends=ends,
        work=work,
        block=np.array([one.kept.max() for one in memory]),
        may_checkpoint=settings.may_checkpoint,
        must_checkpoint=bool(settings.model.gradient_checkpointing),
        input=_largest_tokens(facts, pairs) * shape.hidden_size * _item_bytes(facts, shape),
        room=np.array(limits),
    )
    hops = tuple(_hop(facts, rank, message) for rank in ranks[:-1])
    in_flight = depths(len(hosts), more_in_flight)
    return CutCosts(forward, forward * backward, head, head * backward, taken, hops, in_flight, micro_batches)


@dataclass(frozen=True)
class _HostMemory:
    """What the model takes on one host, in bytes; arrays are of each block, float64 [L]."""

    held: np.ndarray  # weights, adapters, gradients, optimizer
    kept: np.ndarray  # activations of one micro-batch
    inputs: np.ndarray  # the same with gradient checkpointing
    transient: float  # of a micro-batch at work
    head: float  # logits
    per_trained: float  # bytes for each trained parameter
    trains_tables: bool

    @classmethod
    def of(cls, facts: PlanFacts, shape: ModelShape, device: Device | None, pairs: int) -> _HostMemory:
        sparse = np.arange(shape.blocks) >= shape.blocks - shape.expert_blocks
        weights = np.array([block_weights(shape, bool(is_sparse)) for is_sparse in sparse])
        held = weights * shape.weight_bytes + 2 * shape.hidden_size * shape.other_bytes
        is_full = facts.settings.model.method == "full"
        if facts.memory is None or device is None:
            zeros = np.zeros(shape.blocks)
            return cls(held + 16.0 * weights * is_full, zeros, zeros, 0.0, 0.0, 16.0, is_full)
        training = facts.memory.training
        per_trained = trained_bytes_per_parameter(shape, training)
        counts = [
            trained_parameters(
                replace(shape, blocks=1, expert_blocks=int(one)),
                replace(training, blocks=1, adapts_embeddings=False),
            )[0]
            for one in sparse
        ]
        trained = np.arange(shape.blocks) >= shape.blocks - (training.blocks or shape.blocks)
        held = held + np.array(counts) * per_trained * trained
        batch: BatchShape = facts.memory.rows.batch(pairs, training.shared_prompts)
        blocks: dict[bool, BlockBytes] = {
            one: activation_bytes_of_block(shape, training, batch, device, one) for one in {bool(s) for s in sparse}
        }
        return cls(
            held,
            np.array([blocks[bool(one)].kept for one in sparse]),
            np.array([blocks[bool(one)].input for one in sparse]),
            max(block.at_work for block in blocks.values()),
            head_bytes(shape, training, batch, device),
            per_trained,
            is_full and training.blocks is None,
        )


def _item_bytes(facts: PlanFacts, shape: ModelShape) -> int:
    """Of one number between two blocks: full training computes in float32."""
    return 4 if facts.settings.model.method == "full" else shape.other_bytes


def _sent_part(facts: PlanFacts, shape: ModelShape) -> float:
    """Bytes sent over those of the model's type."""
    item = _item_bytes(facts, shape)
    sent = {"none": item, "bf16": 2, "int8": 1 + 4 / 256, "topk": item}[facts.settings.sync.compression]
    return min(1.0, sent / item)


def _largest_tokens(facts: PlanFacts, pairs: int) -> float:
    if facts.memory is None:
        return facts.tokens(pairs)[0]
    return facts.memory.rows.batch(pairs, facts.memory.training.shared_prompts).tokens


def _hop(facts: PlanFacts, rank: int, size_bytes: float) -> Hop:
    link = facts.link_between(rank)
    if link is None and facts.names[rank] == facts.names[rank + 1]:
        return Hop()
    link = link or ASSUMED_LINK
    return Hop(max(0.0, link.seconds(size_bytes) - link.latency_seconds), link.latency_seconds)


def _running_sum(by_block: np.ndarray) -> np.ndarray:
    """Of the first n blocks: [p, L] as [p, L + 1]."""
    return np.concatenate([np.zeros((len(by_block), 1)), by_block.cumsum(axis=1)], axis=1)


# ---- The plan


@dataclass(frozen=True)
class _Choice:
    """Micro-batches, and the cut for them."""

    size: int  # pairs of a micro-batch
    costs: CutCosts
    cut: Cut


def plan_pipelined(facts: PlanFacts) -> ClusterPlan:
    """Cuts a model between blocks for the shortest step, with its prediction; plan.shares sets the cut.

    A run that is resumed keeps its cut; where its ranks took other times than planned, and another cut is shorter by
    plan.replan_threshold with these, it takes that one.

    Raises:
        UserError: settings that do not fit the world or the model, or too little memory for any cut.
    """
    speeds, names, batch = HostSpeeds.of(facts), facts.names, facts.batch_size
    blocks, is_measured = _configured_blocks(facts, speeds.shape), False
    chosen = _choose(facts, speeds, blocks)
    reason = "blocks as plan.shares has them" if blocks else f"blocks for the shortest step, {speeds.source}"
    if blocks is None and (before := facts.stages_before) is not None:
        resumed = _as_measured_before(facts, speeds, chosen)
        if resumed is not None:
            chosen, is_measured = resumed, bool(before.step_seconds)
            kept = chosen.cut.blocks == before.blocks
            reason = "blocks as before" if kept else f"blocks moved from {list(before.blocks)} by measured steps"
    known = is_measured or speeds.are_known
    stages = _stages(facts, chosen, known)
    sizes = split_evenly_sized(batch, chosen.size)
    updates = [curve.step_overhead_seconds for curve in speeds.curves or ()]
    update = max((o * b / speeds.shape.blocks for o, b in zip(updates, chosen.cut.blocks, strict=False)), default=0.0)
    shown = " + ".join(map(str, chosen.cut.blocks[:8])) + " + ..." * (len(names) > 8)
    prediction = Prediction(
        f"pipelined, {shown} blocks",
        tuple(names),
        chosen.cut.step_seconds + update if known else None,
        None,
        True,
        max(stage.needed_bytes for stage in stages),
        sum(stage.sent_bytes or 0.0 for stage in stages) / len(stages),
    )
    return ClusterPlan(
        strategy="pipelined",
        global_batch_size=batch,
        ranks=tuple(RankPlan(rank, name, batch, sizes) for rank, name in enumerate(names)),
        sync_seconds=0.0,
        reason=reason,
        warnings=_warnings(facts, stages),
        basis=Basis((None,) * len(names)),
        model=ModelParts(stages=stages),
        predictions=(prediction,),
    )


def _configured_blocks(facts: PlanFacts, shape: ModelShape) -> tuple[int, ...] | None:
    """plan.shares, where it is given.

    Raises:
        UserError: it does not fit the world or the model, or there are more ranks than blocks.
    """
    shares, ranks = facts.settings.plan.shares, len(facts.hosts)
    if ranks > shape.blocks:
        raise UserError(
            f"strategy=pipelined: {ranks} ranks, but the model has only {shape.blocks} blocks; use fewer ranks"
        )
    if shares is None:
        return None
    check_count("plan.shares", shares, ranks)
    if sum(shares) != shape.blocks:
        raise UserError(
            f"plan.shares {list(shares)} sum to {sum(shares)}, but the model has {shape.blocks} blocks, which "
            "strategy=pipelined assigns; make them equal"
        )
    return shares


def _choose(facts: PlanFacts, speeds: HostSpeeds, blocks: tuple[int, ...] | None) -> _Choice:
    """The micro-batch and the cut of the shortest step. blocks: of a given cut.

    Raises:
        UserError: no cut fits the hosts' memory.
    """
    configured = facts.settings.plan.micro_batch_sizes
    sizes = list(configured[:1]) if configured else _sizes(facts)
    choices = []
    for size in sizes:
        costs = cut_costs(facts, speeds, size)
        cut = cut_at(costs, blocks) if blocks else best_cut(costs)
        choices += [_Choice(size, costs, cut)] if cut else []
    if not choices:
        raise UserError(_why_not(facts, speeds, min(sizes)))
    best = min(choices, key=lambda one: (not one.cut.fits, one.cut.step_seconds, one.size))
    for more in DEEPER if any(map(sum, best.costs.hops)) else ():
        costs = replace(best.costs, in_flight=depths(len(facts.hosts), more))
        cut = cut_at(costs, blocks) if blocks else best_cut(costs)
        # One more costs no time: it makes up for links that are slower, and passes that vary more, than was measured.
        enough = 1.0 if more == 1 else 1 - WORTH_IT
        if cut is not None and cut.fits and cut.step_seconds <= enough * best.cut.step_seconds:
            best = _Choice(best.size, costs, cut)
    return best


def _sizes(facts: PlanFacts) -> list[int]:
    memory = facts.memory
    most = min((memory.most_pairs(host.device) for host in facts.hosts if memory and host.device), default=8)
    return [size for size in SIZES if size <= min(most, facts.batch_size, DEFAULT_MICRO_BATCH_SIZE)] or [1]


def _as_measured_before(facts: PlanFacts, speeds: HostSpeeds, chosen: _Choice) -> _Choice | None:
    """The cut of the run that is resumed, or a better one for hosts as fast as they were; None: no cut to keep."""
    before, settings = facts.stages_before, facts.settings.plan
    if before is None or len(before.blocks) != len(facts.hosts) or sum(before.blocks) != speeds.shape.blocks:
        return None
    same = _choose(facts, speeds, before.blocks)
    if not same.cut.fits:
        return None
    if len(before.step_seconds) != len(facts.hosts) or not settings.replan:
        return same
    passes = np.array(same.cut.forward_seconds) + np.array(same.cut.backward_seconds)
    costs = same.costs.slowed(np.array(before.step_seconds) / (same.costs.micro_batches * passes))
    now, best = cut_at(costs, before.blocks), best_cut(costs)
    if best is None or now.step_seconds <= best.step_seconds * (1 + settings.replan_threshold):
        best = now
    return _Choice(same.size, costs, best)


def _why_not(facts: PlanFacts, speeds: HostSpeeds, size: int) -> str:
    """Which host holds how much, what is missing, and the smallest remedy."""
    costs = cut_costs(facts, speeds, size)
    most, blocks = most_blocks(costs), speeds.shape.blocks
    pairs = f"{size} pair{'s' * (size > 1)}"
    smaller = "lower plan.micro_batch_sizes, " * (size > 1)
    smaller += "try model.gradient_checkpointing=true, " * (facts.settings.model.gradient_checkpointing is False)
    memory = [(host.memory_bytes or 0) / 1e9 for host in facts.hosts]
    if 0 in most:
        rank = most.index(0)
        needed = needed_bytes(costs, rank, sum(most[:rank]), 1) / 1e9
        ends = " with the embedding" * (rank == 0) + " with norm and head" * (rank == len(most) - 1)
        return (
            f"strategy=pipelined: host {facts.names[rank]}: one block{ends} and micro-batches of {pairs} need "
            f"{needed:.2f} GB, but it has {memory[rank]:.2f} GB less {MEMORY_HEADROOM:.0%} headroom; {smaller}leave "
            "the host out, or put one with more memory at its place"
        )
    held = ", ".join(f"{n} {b} of {m:.2f} GB" for n, b, m in zip(facts.names, most, memory, strict=True))
    missing = float(costs.memory.held[-1, -1] - costs.memory.held[-1, sum(most)]) / (1 - MEMORY_HEADROOM)
    return (
        f"strategy=pipelined: of {blocks} blocks the hosts hold {sum(most)} ({held}, each less {MEMORY_HEADROOM:.0%} "
        f"headroom) with micro-batches of {pairs}; {smaller}add {missing / 1e9:.2f} GB of memory with another host, or "
        "take a quantised model with model.method=lora"
    )


def _stages(facts: PlanFacts, chosen: _Choice, known: bool) -> tuple[StagePlan, ...]:
    costs, cut = chosen.costs, chosen.cut
    has_activations = facts.memory is not None and all(host.device for host in facts.hosts)
    shape = facts.block_shape
    assert shape is not None
    number_bytes = shape.hidden_size * _item_bytes(facts, shape) * _sent_part(facts, shape)
    sent = facts.tokens(facts.batch_size)[0] * number_bytes  # over one cut, in one direction
    stages = []
    for rank, (first, blocks) in enumerate(zip(accumulate(cut.blocks, initial=0), cut.blocks, strict=False)):
        held = float(costs.memory.held[rank, first + blocks] - costs.memory.held[rank, first] + costs.memory.ends[rank])
        neighbours = (rank > 0) + (rank < costs.hosts - 1)
        stages.append(
            StagePlan(
                first_block=first,
                blocks=blocks,
                in_flight=costs.in_flight[rank],
                recomputes=cut.keeps[rank] == Keeps.INPUT,
                gradient_checkpointing=cut.keeps[rank] == Keeps.BLOCK_INPUTS,
                held_bytes=round(held),
                activation_bytes=round(cut.activation_bytes[rank] + costs.memory.work[rank])
                if has_activations
                else None,
                memory_bytes=facts.hosts[rank].memory_bytes,
                forward_seconds=cut.forward_seconds[rank] if known else None,
                backward_seconds=cut.backward_seconds[rank] if known else None,
                idle_fraction=cut.idle_fraction(rank, costs.micro_batches) if known else None,
                sent_bytes=sent * neighbours,
            )
        )
    return tuple(stages)


def _warnings(facts: PlanFacts, stages: Sequence[StagePlan]) -> tuple[str, ...]:
    warnings = []
    unknown = [
        f"{a} to {b}" for rank, (a, b) in enumerate(pairwise(facts.names)) if a != b and not facts.link_between(rank)
    ]
    if unknown:
        warnings.append(
            f"link {', '.join(dict.fromkeys(unknown))}: not calibrated, planned with "
            f"{ASSUMED_LINK.bandwidth_bytes_per_second / 1e6:.0f} MB/s and {ASSUMED_LINK.latency_seconds * 1e3:g} ms "
            "of latency (1 Gbit/s); make calibrate measures it"
        )
    for name, stage in zip(facts.names, stages, strict=True):
        if stage.memory_bytes and stage.needed_bytes > (1 - MEMORY_HEADROOM) * stage.memory_bytes:
            warnings.append(
                f"host {name}: its {stage.blocks} blocks need {stage.needed_bytes / 1e9:.2f} GB, "
                f"of {stage.memory_bytes / 1e9:.2f} GB" + "; leave plan.shares out" * bool(facts.settings.plan.shares)
            )
    return tuple(warnings)
