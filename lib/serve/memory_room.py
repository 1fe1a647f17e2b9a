"""How many tokens a backend has memory for, with the keys and values that each of them leaves in every layer.

MLX ends a process whose memory is gone on a GPU by an exception that nobody can catch, and with it everybody's answers.
A batch's rows are as long as its longest, so requests together need as much as there are of them times that.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from lib.system import hardware

MEASURED_TOKENS = 2048
ROWS_PART = 0.6  # of the memory that is left beside the model: for the rows of answers, which are copied as they grow
KEPT_PART = 0.3  # and for the prompts that are kept; the rest is for what a step computes


def bytes_of_token(model: Any) -> float:
    """Bytes that a token leaves in all layers of a mlx-lm model. Nothing is computed: shapes are known before.

    Where a layer looks back over a window alone it is as much for as long as that is not full.
    """
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    model(mx.zeros((1, MEASURED_TOKENS), mx.int32), cache=cache)
    return float(sum(layer.nbytes for layer in cache)) / MEASURED_TOKENS


def free_bytes() -> int | None:
    """What is left for all that a backend keeps beside its model, which is loaded; None where nobody knows."""
    device, limit = hardware.mlx_device()[0], hardware.memory_limit_bytes()
    left = [] if limit is None else [limit - mx.get_active_memory()]
    if device != "cuda" and (free := hardware.free_memory_bytes()) is not None:  # a GPU's own memory is another
        left.append(free)
    return max(0, min(left)) if left else None


def room(model: Any) -> tuple[int | None, int | None]:
    """Tokens that the rows of all answers together may have (`backend_pool.fits`), and bytes of prompts that are kept,
    with those rows; None where nobody knows."""
    free = free_bytes()
    if free is None:
        return None, None
    try:
        each = bytes_of_token(model)
    except Exception:  # a model that wants more than tokens to be called with, or whose state tells no size
        each = 0.0
    return int(ROWS_PART * free / each) if each else None, int(KEPT_PART * free)
