"""How far the policy that drew a round's answers is from the reference."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from lib.data.batch import collate
from lib.data.groups import Group as SampledGroup
from lib.data.groups import groups_in_memory
from lib.evaluate.answers import part_of
from lib.evaluate.sample import in_batches
from lib.model.logps import completion_token_logps
from lib.model.token_stream import arrays_of
from lib.rollouts.pairs import Group
from lib.training.losses import divergence
from lib.training.run import TrainingRun


def kl_of(run: TrainingRun, groups: Sequence[Group]) -> float | None:
    """KL(policy || reference) at the sampling temperature, in nats a token; None for a loss without a reference.
    Estimated as GRPO does (lib/training/losses.py), over the first answer to each prompt. Ranks share the work, and all
    have the same result."""
    reference = run.asked_reference
    if reference is None:
        return None
    first = [(group.prompt_tokens, group.answers[0]) for group in groups]
    data = groups_in_memory("", [SampledGroup(ids, [one.tokens], [0.0], [one.logps]) for ids, one in first], [])
    world, layout, size = run.world.workers, run.layout, run.config.evaluate.batch_size
    own = part_of(len(data), run.shares if world.size > 1 else [1], world.rank)
    sums = np.zeros(len(data), np.float32)

    def sums_of(indices: Sequence[int]) -> np.ndarray:
        examples = [data[own[i]] for i in indices]
        inputs = arrays_of(collate(examples, layout.length_multiple, layout.shares_prompts).inputs)
        with world.together("log-probabilities of the reference"):
            logps, _ = completion_token_logps(model, inputs, run.config.rollouts.temperature)
            kl = mx.where(inputs["mask"], divergence(inputs["sampling_logps"], logps), 0.0)
            return np.array(kl.sum(axis=(1, 2)))

    with reference.in_place() as model:
        sums[own] = in_batches(data.lengths[own], size, sums_of, can_halve=not run.world.divides_model)
    of_all = np.array(world.all_sum(mx.array(sums), "divergences of answers"))
    return float(of_all.sum(dtype=np.float64)) / sum(len(one.tokens) for _, one in first)
