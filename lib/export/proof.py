"""Whether an export is the model that was trained: by the log-probabilities of what its reader finds in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from lib.errors import Stopped
from lib.export.trained_run import TrainedRun

Logps = list[np.ndarray]  # a row: float32 [tokens - 1], log-probability of every token but the first, in nats
WeightType = Literal["f32", "bf16", "f16", "q8_0"]
LIMIT = 1e-4  # nats of one token, between two float32 computations of one model
UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True)
class ExportOptions:
    """What a user asks of an export, besides its form.

    Args:
        type: of the stored weights; None for the base model's own.
        dequantize: store the weights of a quantised base as plain ones.
    """

    type: WeightType | None = None
    dequantize: bool = False


@dataclass(frozen=True)
class Reading:
    """What a reader makes of an export.

    Args:
        reader: its name.
        logps: of the run's rows.
        is_rounded: whether weights are stored in fewer bits than float32.
    """

    reader: str
    logps: Logps
    is_rounded: bool = False


@dataclass(frozen=True)
class Proof:
    """How far apart the log-probabilities of single tokens are at most, in nats.

    Args:
        difference: between the export and the trained model.
        limit: of `difference`; None where weights are rounded, and then rounding moves less than training did.
        trained_difference: between the trained model and the base model.
    """

    reader: str
    rows: int
    rows_from: str
    tokens: int
    difference: float
    limit: float | None
    trained_difference: float

    def __str__(self) -> str:
        allowed = "by rounding of the weights" if self.limit is None else f"at most, {self.limit:.1e} allowed"
        return (
            f"proven: {self.reader} gives the log-probabilities of the run on {self.rows:,} {self.rows_from} "
            f"({self.tokens:,} tokens): {self.difference:.1e} apart {allowed}; training moved them by "
            f"{self.trained_difference:.1e}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prove(run: TrainedRun, reading: Reading, fused: nn.Module | None) -> Proof:
    """Compares what was read back with the trained model. Models are in memory one after another.

    fused: plain float32 weights, moved by rounding to find the limit of another order of operations.

    Raises:
        Stopped: it is another model, or rounding leaves nothing of what was trained.
    """
    trained, base = model_logps(run.model(), run.rows), model_logps(run.base_model(), run.rows)
    difference, limit = largest_difference(reading.logps, trained), None
    if reading.is_rounded:
        require_kept(run, reading.logps, trained, base)
    else:
        limit = LIMIT
        if difference > limit and fused is not None:
            limit = max(limit, moved_by_rounding(fused, run.rows))
        if difference > limit:
            raise Stopped(
                f"{reading.reader}: log-probabilities are {difference:.2e} nats from those of {run.folder} "
                f"({run.checkpoint}), {limit:.1e} is what rounding explains. Nothing was written: please report it "
                "with the model's config.json"
            )
    tokens = sum(len(ids) - 1 for ids in run.rows)
    moved = largest_difference(trained, base)
    return Proof(reading.reader, len(run.rows), run.rows_from, tokens, difference, limit, moved)


def require_kept(run: TrainedRun, stored: Logps, trained: Logps, base: Logps) -> None:
    """Raises Stopped where rounding loses what was trained: it moves more than training did, or back to the base.

    Four bits hold no change that is small beside their steps. Medians are compared: a router that takes another expert
    moves a few tokens far, however little was trained.
    """
    rounding, training = median_difference(stored, trained), median_difference(trained, base)
    if rounding > max(LIMIT, min(training, median_difference(stored, base))):
        raise Stopped(
            f"{run.folder} ({run.checkpoint}): rounding the weights moves half of the log-probabilities by "
            f"{rounding:.1e} or more, training moved them by {training:.1e}, so what was learned would be lost; take "
            "--dequantize or a --type with more bits. Nothing was written"
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
    return [_row_logps(model, ids) for ids in rows]


def _row_logps(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    logits = model(mx.array(ids[None, :-1]))[0].astype(mx.float32)
    logps = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logps, mx.array(ids[1:, None]), axis=-1).squeeze(-1))


def largest_difference(left: Logps, right: Logps) -> float:
    """Of any token's log-probability; infinite where one is NaN."""
    largest = max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))
    return largest if np.isfinite(largest) else float("inf")


def median_difference(left: Logps, right: Logps) -> float:
    """Of the tokens' log-probabilities; infinite where one is NaN."""
    middle = float(np.median(np.abs(np.concatenate(left) - np.concatenate(right))))
    return middle if np.isfinite(middle) else float("inf")


def moved_by_rounding(fused: nn.Module, rows: Sequence[np.ndarray]) -> float:
    """What another order of operations in float32 may change, in nats.

    A sum of n products is the exact sum of factors that were changed by n u at most, and where the signs are random by
    about sqrt(n) u (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.1 and 2.8). So every weight is
    changed by as much, at random; the limit is four times the largest movement of a token.
    """
    unchanged = model_logps(fused, rows)
    weights = dict(tree_flatten(fused.parameters()))
    longest = max(max(array.shape, default=1) for array in weights.values())
    keys = mx.random.split(mx.random.key(0), len(weights))
    changed = {
        name: array * (1 + longest**0.5 * UNIT_ROUNDOFF * mx.random.uniform(-1, 1, array.shape, key=key))
        for (name, array), key in zip(weights.items(), keys, strict=True)
    }
    fused.update(tree_unflatten(list(changed.items())))
    return 4 * largest_difference(model_logps(fused, rows), unchanged)
