"""Whether an export is the model that was trained: by the log-probabilities that its own reader gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from lib.data.collate import collate
from lib.data.dataset import Example
from lib.errors import Stopped
from lib.export.form import ExportOptions, Form, Logps
from lib.export.fused_weights import fused_model
from lib.export.trained_run import TrainedRun
from lib.model.logps import token_logps
from lib.model.token_stream import arrays_of, scored_states

LIMIT = 1e-4  # nats of one token, between two float32 computations of one model
UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True)
class Proof:
    """How far apart the log-probabilities of single tokens are at most, in nats.

    Args:
        rows, tokens: that were compared.
        difference: between the reader and the model that is stored.
        limit: of `difference`.
        rounding_difference: between what is stored and what was trained; 0 where no weight is rounded.
        trained_difference: between what was trained and the base model.
        base_difference: between the reader and mlx-lm for the base model by itself; 0 where the reader is mlx-lm.
    """

    reader: str
    rows: int
    rows_from: str
    tokens: int
    difference: float
    limit: float
    rounding_difference: float
    trained_difference: float
    base_difference: float = 0.0

    def __str__(self) -> str:
        line = (
            f"proven: {self.reader} gives the same log-probabilities on {self.rows:,} {self.rows_from} "
            f"({self.tokens:,} tokens): {self.difference:.1e} apart at most, {self.limit:.1e} allowed"
        )
        rounding = f"rounding of the weights moved them by {self.rounding_difference:.1e}, "
        base = f"the base model itself is {self.base_difference:.1e} apart, since mlx-lm computes it otherwise, "
        return (
            f"{line}; {rounding if self.rounding_difference else ''}{base if self.base_difference > LIMIT else ''}"
            f"training moved them by {self.trained_difference:.1e}"
        )


def prove(form: Form, run: TrainedRun, folder: Path, options: ExportOptions) -> Proof:
    """Compares an export with the run that it was made of.

    The reader has to agree with the model that is stored: the trained one where the form keeps its weights as they are,
    else the trained one with every weight rounded as the form does. Of that the merged weights must agree with the
    adapter beside the base, before they are rounded. Models are in memory one after another.

    Raises:
        Stopped: it is another model, beyond what rounding explains, or rounding leaves nothing of what was trained.
    """
    trained = model_logps(run.model(), run.rows)
    base = model_logps(run.base_model(), run.rows)
    trained_difference = largest_difference(trained, base)
    stored, stored_model = trained, form.stored_model(run, options)
    if stored_model is not None:
        merged = model_logps(fused_model(run), run.rows)
        _agree(run, "the merged weights", merged, trained)
        stored = model_logps(stored_model, run.rows)
        del stored_model
        require_kept(run, stored, trained, base)
    found = form.read_logps(run, folder, options)
    base_difference = largest_difference(found.base, base) if found.base is not None else 0.0
    limit = _agree(run, form.READER, found.logps, stored, allowed_for(form.READER, base_difference, trained_difference))
    return Proof(
        reader=form.READER,
        rows=len(run.rows),
        rows_from=run.rows_from,
        tokens=sum(len(ids) - 1 for ids in run.rows),
        difference=largest_difference(found.logps, stored),
        limit=limit,
        rounding_difference=largest_difference(stored, trained),
        trained_difference=trained_difference,
        base_difference=base_difference,
    )


def require_kept(run: TrainedRun, stored: Logps, trained: Logps, base: Logps) -> None:
    """Raises Stopped where rounding loses what was trained: it moves more than training did, or back to the base.

    Four bits hold no change that is small beside their steps (mlx-lm#1172: a fused gpt-oss that is its base). Medians
    are compared: a router that takes another expert moves a few tokens far, however little was trained.
    """
    rounding, training = median_difference(stored, trained), median_difference(trained, base)
    if rounding > max(LIMIT, min(training, median_difference(stored, base))):
        raise Stopped(
            f"{run.folder} ({run.checkpoint}): rounding the weights moves half of the log-probabilities by "
            f"{rounding:.1e} or more, training moved them by {training:.1e}, so what was learned would be lost; take "
            "--dequantize or a --type with more bits. Nothing was written"
        )


def allowed_for(reader: str, base_difference: float, trained_difference: float) -> float:
    """What an implementation of the base model that is not mlx-lm's may change: as much as in the base by itself.

    The reader's Gemma, say, has the tanh form of GELU where mlx-lm has the exact one. Four times that for the trained
    model, whose activations are others, and never so much that an adapter could be missing.

    Raises:
        Stopped: the two implementations differ by so much that they can prove nothing.
    """
    if base_difference <= LIMIT:
        return LIMIT
    if 4 * base_difference > trained_difference / 4:
        raise Stopped(
            f"{reader} computes the base model itself otherwise than mlx-lm: log-probabilities are "
            f"{base_difference:.1e} nats apart, and training moved them by {trained_difference:.1e}, too little to be "
            "told by that; --no-proof writes without a proof"
        )
    return 4 * base_difference


def model_logps(model: nn.Module, rows: Sequence[np.ndarray]) -> Logps:
    """Log-probabilities by the way that training takes, for a model that it has in memory."""
    model.eval()
    return [_row_logps(model, ids) for ids in rows]


def _row_logps(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    """Of every token but the first: float32 [tokens - 1]."""
    batch = collate([Example(0, ids[:1], (ids[1:],))], length_multiple=8, shared_prompts=False)
    inputs = arrays_of(batch.inputs)
    logps = token_logps(model, scored_states(model, inputs), inputs["targets"])
    return np.array(mx.take(logps, inputs["logp_indices"])[0, 0, : len(ids) - 1])


def largest_difference(one: Logps, other: Logps) -> float:
    """Of any token's log-probability; infinite where one is no number."""
    largest = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return largest if np.isfinite(largest) else float("inf")


def median_difference(one: Logps, other: Logps) -> float:
    """Of the tokens' log-probabilities; infinite where one is no number."""
    middle = float(np.median(np.abs(np.concatenate(one) - np.concatenate(other))))
    return middle if np.isfinite(middle) else float("inf")


def _agree(run: TrainedRun, what: str, found: Logps, expected: Logps, allowed: float = LIMIT) -> float:
    """The limit that two results of one model keep: `allowed`, or what float32 explains where that is more.

    Raises:
        Stopped: they do not.
    """
    difference = largest_difference(found, expected)
    limit = allowed if difference <= allowed else max(allowed, _moved_by_rounding(run))
    if difference <= limit:
        return limit
    row, token = _first_beyond(found, expected, limit)
    raise Stopped(
        f"{what}: log-probabilities are {difference:.2e} nats from those of {run.folder} ({run.checkpoint}), "
        f"{limit:.1e} is what rounding explains; first at row {row}, token {token}. Nothing was written: "
        "please report it with the model's config.json"
    )


def _first_beyond(found: Logps, expected: Logps, limit: float) -> tuple[int, int]:
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        beyond = np.flatnonzero(~(np.abs(one - other) <= limit))
        if len(beyond):
            return row, int(beyond[0]) + 1
    raise AssertionError("some token is beyond the limit")


def _moved_by_rounding(run: TrainedRun) -> float:
    """How far float32 may take the log-probabilities of two computations of this model apart.

    Summed in another order, n products give the exact sum of factors that were changed by n u at most, and, as the
    signs are random, by about sqrt(n) u (Higham, Accuracy and Stability of Numerical Algorithms, sections 3.1 and 2.8).
    So every weight is changed by as much, at random; the limit is four times the largest movement of a token.
    """
    model = fused_model(run)
    unchanged = model_logps(model, run.rows)
    weights = dict(tree_flatten(model.parameters()))
    longest = max(max(array.shape, default=1) for array in weights.values())
    keys = mx.random.split(mx.random.key(0), len(weights))
    changed = {
        name: array * (1 + longest**0.5 * UNIT_ROUNDOFF * mx.random.uniform(-1, 1, array.shape, key=key))
        for (name, array), key in zip(weights.items(), keys, strict=True)
    }
    model.update(tree_unflatten(list(changed.items())))
    return 4 * largest_difference(model_logps(model, run.rows), unchanged)
