"""Log-probabilities as mlx-lm gives them: its own loading, its own layers, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.export.form import Logps


def logps(folder: Path, rows: Sequence[np.ndarray], trust_remote_code: bool, adapter: Path | None = None) -> Logps:
    """Of every token but the first, in float32, by the model in a folder, with an adapter where one is given."""
    model, _ = load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.set_dtype(mx.float32)
    model.eval()
    return [_row_logps(model, ids) for ids in rows]


def _row_logps(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    logits = model(mx.array(ids[None, :-1]))[0].astype(mx.float32)
    of_all = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(of_all, mx.array(ids[1:, None]), axis=-1).squeeze(-1))
