"""How the queries of a long row are cut into blocks, where attention's scores would be kept for the backward pass."""

from __future__ import annotations

from lib.system.hardware import Device

LONG = 2048  # positions: shorter rows are attended to at once
SCORE_BYTES = 2**27  # of scores at a time, over all sequences and heads
MULTIPLE = 64  # of a block's queries


def block_rows(device: Device, sequences: int, heads: int, queries: int, keys: int, item_bytes: int) -> int:
    """Queries of each sequence that attend at a time; all of them where nothing is gained by blocks.

    MLX's backward pass of attention keeps the scores on a CPU and on Metal, which has no fused kernel for it: memory
    would grow with the square of the length. On CUDA cuDNN's kernel keeps none.
    """
    if device == "cuda" or keys <= LONG:
        return queries
    rows = SCORE_BYTES // (sequences * heads * keys * item_bytes) // MULTIPLE * MULTIPLE
    return min(queries, max(MULTIPLE, rows))
