"""NEFTune: noise on the embeddings of training sequences, the same however rows are divided and laid out.

Jain et al. 2023, arXiv:2310.05914, algorithm 1: each number of each token's embedding gets alpha / sqrt(L D) times a
number drawn evenly from [-1, 1]. L is that of the row's longest sequence: completions share their prompt's tokens.
What is drawn follows from train.seed, the step, the row and the token's place in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from lib.data.collate import Batch


def noisy(
    batches: Iterable[tuple[Batch, np.ndarray | None]], alpha: float, seed: int, step: int
) -> Iterator[tuple[Batch, np.ndarray | None]]:
    """Micro-batches of a step with the keys and the scales of their tokens' noise; sqrt(D) is left to the model."""
    for batch, reference in batches:
        rows, numbers = batch.places.T
        is_token = rows >= 0
        of_rows = [np.random.SeedSequence([seed, step, int(row)]).generate_state(1)[0] for row in batch.rows]
        keys = np.stack([np.array(of_rows, np.uint32)[rows], numbers.astype(np.uint32)], axis=1)
        scales = np.where(is_token, alpha / np.sqrt(batch.longest[rows]), 0).astype(np.float32)
        yield replace(batch, noise_keys=keys, noise_scales=scales), reference
