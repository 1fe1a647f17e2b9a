"""CUDA's kernels, compiled ahead: what the parts of a step have in common with the whole."""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.config import load
from lib.data.collate import collate
from lib.data.dataset import Example, load_dataset
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


@pytest.fixture
def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that would compile kernels: the folder where MLX would keep them. A part says that it ran."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(folder))
    monkeypatch.setattr(kernels, "device", lambda: "cuda")
    monkeypatch.setattr(kernels, "is_compiled", lambda *_: True)
    return folder


def compiled_once(tmp_path: Path, words: Sequence[str] = ()) -> list[str]:
    """What a run of one rank is told while it loads its model."""
    model, data = tiny.model_folder(tmp_path / "model"), tmp_path / "train.jsonl"
    tiny.write_jsonl(data, list(tiny.pairs(4)))
    settings, told = load.load(None, [f"model.path={model}", f"data.train={data}", *words]), list[str]()
    rows = load_dataset(str(data), settings.data, "preference", None)
    with kernels.compiled(settings, rows, World(), ["one"], told.append):
        pass
    return told


def test_kernels_are_compiled_once_for_a_kind_of_model_and_loss(
    on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PARTS", {"update": kernels.update})
    (tmp_path / "python").write_text('#!/bin/sh\ncat > "$MLX_PTX_CACHE_DIR/$3.ptx"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (told,) = compiled_once(tmp_path)
    assert "compiling CUDA kernels" in told
    config, rows = pickle.loads((on_cuda / "update.ptx").read_bytes())
    assert config.train.loss == "sigmoid" and len(rows) == 2
    assert len(list(on_cuda.iterdir())) == 2  # and what says that it is done
    assert compiled_once(tmp_path) == [] and len(compiled_once(tmp_path, ["train.loss=ipo"])) == 1


def test_a_folder_that_cannot_be_written_stops_no_run(on_cuda: Path, tmp_path: Path) -> None:
    on_cuda.write_text("no folder")
    told = compiled_once(tmp_path)
    assert len(told) == 2 and "compiled in the first step" in told[1] and str(on_cuda) in told[1]
