"""Whether an export is the model that was trained: by the log-probabilities of what its reader finds in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.errors import Stopped
from lib.export.trained_run import TrainedRun

Logps = list[np.ndarray]  # a row: float32 [tokens - 1], log-probability of every token but the first, in nats
WeightType = Literal["f32", "bf16", "f16", "q8_0"]
LIMIT = 1e-4  # nats of one token, between two float32 computations of one model
LIMIT_OF_TRAINING = 0.002  # the same, as a part of what training moved


class ExportOptions(NamedTuple):
    """The type of the stored weights (None: the base's), and whether those of a quantised base become plain ones."""

    type: WeightType | None = None
    dequantize: bool = False


class Reading(NamedTuple):
    """The rows' log-probabilities by the reader of an export, whose weights may have fewer bits than float32."""

    reader: str
    logps: Logps
    is_rounded: bool = False


def prove(run: TrainedRun, reading: Reading) -> tuple[dict[str, Any], str]:
    """Compares what was read back with the trained model: figures and a sentence. `difference`, `trained_difference`:
    the largest of a token's log-probability, in nats, between export and trained, trained and base model. Raises
    Stopped: it is another model, or rounding leaves nothing of what was trained."""
    trained, base = model_logps(run.model(), run.rows), model_logps(run.base_model(), run.rows)
    difference, moved = largest_difference(reading.logps, trained), largest_difference(trained, base)
    limit = None if reading.is_rounded else max(LIMIT, LIMIT_OF_TRAINING * moved)
    if limit is None:
        require_kept(reading.logps, trained, base)
    elif difference > limit:
        raise Stopped(
            f"{reading.reader}: log-probabilities are {difference:.2e} nats from those of {run.folder} "
            f"({run.checkpoint}), at most {limit:.1e} is allowed. Nothing was written: please report it with the "
            "model's config.json"
        )
    tokens = sum(len(ids) - 1 for ids in run.rows)
    figures = {"reader": reading.reader, "rows": len(run.rows), "rows_from": run.rows_from, "tokens": tokens}
    figures |= {"difference": difference, "limit": limit, "trained_difference": moved}
    allowed = "by rounding of the weights" if limit is None else f"at most, {limit:.1e} allowed"
    return figures, (
        f"proven: {reading.reader} gives the log-probabilities of the run on {len(run.rows):,} {run.rows_from} "
        f"({tokens:,} tokens): {difference:.1e} apart {allowed}; training moved them by {moved:.1e}"
    )


def require_kept(stored: Logps, trained: Logps, base: Logps) -> None:
    """Raises Stopped where rounding moves the model more than training did, or back to the base. Medians are compared:
    a router that takes another expert moves a few tokens far, however little was trained."""

    def median(left: Logps, right: Logps) -> float:
        return float(np.nan_to_num(np.median(np.abs(np.concatenate(left) - np.concatenate(right))), nan=np.inf))

    rounding, training = median(stored, trained), median(trained, base)
    if rounding > max(LIMIT, min(training, median(stored, base))):
        raise Stopped(
            f"rounding the weights moves half of the log-probabilities by {rounding:.1e} or more, training moved them "
            f"by {training:.1e}, so what was learned would be lost; take --dequantize or a --type with more bits. "
            "Nothing was written"
        )


def mlx_logps(folder: Path, run: TrainedRun, adapter: Path | None = None) -> Logps:
    """By mlx-lm's own loading of the model in a folder, with an adapter where one is given; float32."""
    model, _ = load_model(folder, lazy=True, trust_remote_code=run.settings.model.trust_remote_code)
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.set_dtype(mx.float32)
    return model_logps(model, run.rows)


def model_logps(model: nn.Module, rows: Sequence[np.ndarray]) -> Logps:
    """Log-probabilities of every token but the first, one row at a time; float32 [tokens - 1] each."""
    model.eval()
    logps = []
    for ids in rows:
        logits = model(mx.array(ids[None, :-1]))[0].astype(mx.float32)
        scored = mx.take_along_axis(logits, mx.array(ids[1:, None]), axis=-1).squeeze(-1)
        logps.append(np.array(scored - mx.logsumexp(logits, axis=-1)))
    return logps


def largest_difference(left: Logps, right: Logps) -> float:
    """Of any token's log-probability; infinite where one is NaN."""
    return float(np.nan_to_num(np.abs(np.concatenate(left) - np.concatenate(right)), nan=np.inf).max())
