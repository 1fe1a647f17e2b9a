"""CUDA's kernels, compiled ahead: what the parts of a step have in common with the whole."""

from __future__ import annotations

import io
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.config import load
from lib.data.collate import collate
from lib.data.dataset import Example
from lib.distributed.world import World
from lib.model.token_stream import arrays_of
from lib.training import kernels, losses
from lib.training.step import make_optimizer, make_step
from tests import tiny


def fused(*arrays: object) -> set[str]:
    """The kernels that MLX would compile for these arrays, by their operations."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *(array for _, array in tree_flatten(list(arrays)) if isinstance(array, mx.array)))
    return set(re.findall(r'label ?="(Compiled[^"]*)"', drawn.getvalue()))


@pytest.mark.parametrize("words", [[], ["train.loss=sft"], ["model.dtype=bfloat16", "train.loss=ipo"]], ids=str)
def test_the_parts_of_a_step_have_every_kernel_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    settings = load.load(
        None, [f"model.path={tiny.model_folder(tmp_path)}", "data.train=-", "train.compile=true", *words]
    )
    count = 1 if settings.train.loss == "sft" else 2
    tokens = [np.arange(20 + n, dtype=np.int32) for n in range(count + 1)]
    rows = [Example(row, tokens[0], tuple(tokens[1:])) for row in range(2)]

    of_parts: set[str] = set()
    with monkeypatch.context() as patched:  # graphs are looked at instead of evaluated, which would compile them here
        patched.setattr(mx, "eval", lambda *arrays: of_parts.update(fused(*arrays)))
        patched.setattr(mx, "async_eval", lambda *arrays: of_parts.update(fused(*arrays)))
        for part in kernels.PARTS:
            kernels.compile_part(part, settings, rows)

    model = kernels.small_model(settings.model, 0)
    step = make_step(model, make_optimizer(settings.train), settings.train, World(), dropout=False)
    model.train()
    batch = collate(rows, 16, True)
    reference = mx.full((len(batch.rows), count), -10.0) if losses.needs_reference(settings.train) else None
    whole = fused(step.gradients_of(arrays_of(batch.inputs), reference, None, None))
    assert whole and whole <= of_parts
