"""How the queries of a long row are cut into blocks: to keep no scores for the backward pass, or to make fewer."""

from __future__ import annotations

from lib.system.hardware import Device

LONG = 2048  # positions: shorter rows are attended to at once
SCORE_BYTES = 2**27  # of scores at a time, over all sequences and heads
MULTIPLE = 64  # of a block's queries
TILE = 128  # queries of each sequence of which cuDNN's backward pass wants a multiple
FUSED_LONG = 8192  # queries: fewer are given to cuDNN at once
FUSED_BLOCKS = 4  # of more: each keeps a copy of the keys that it sees, so that more of them would want much memory


def is_fused(device: Device, head_dim: int, item_bytes: int) -> bool:
    """Whether attention has a kernel that keeps no scores for the backward pass: cuDNN's, from Ampere on."""
    return device == "cuda" and item_bytes == 2 and head_dim <= 128 and head_dim % 8 == 0


def block_rows(is_fused: bool, sequences: int, heads: int, queries: int, keys: int, item_bytes: int) -> int:
    """Queries of each sequence that attend at a time; all of them where nothing is gained by blocks.

    Without a fused kernel MLX's backward pass of attention keeps the scores: memory would grow with the square of the
    length. cuDNN's keeps none, but takes nearly as long for scores that the causal mask hides as for others: with 8,192
    queries at once an H200 took 1.2 times as long as with 2,048 at a time, with 16,384 1.3 times as long as with 4,096.
    Where a query sees more keys than there are queries, the mask hides little.
    """
    if is_fused:
        in_blocks = queries >= FUSED_LONG and keys <= 2 * queries
        return -(-queries // FUSED_BLOCKS // TILE) * TILE if in_blocks else queries
    if keys <= LONG:
        return queries
    rows = SCORE_BYTES // (sequences * heads * keys * item_bytes) // MULTIPLE * MULTIPLE
    return min(queries, max(MULTIPLE, rows))
