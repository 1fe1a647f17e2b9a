"""CUDA's kernels, compiled ahead: what the parts of a step have in common with the whole."""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.config import load
from lib.config.schema import ModelSettings
from lib.data.collate import collate
from lib.data.dataset import Example, load_dataset
from lib.distributed.world import World
from lib.errors import UserError
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


def test_the_loss_of_groups_is_compared_with_a_reference_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model.path={tiny.model_folder(tmp_path)}", "data.train=-", "train.loss=grpo"]
    tokens, looked_at = [np.arange(20 + n, dtype=np.int32) for n in range(4)], list[set[str]]()
    row = Example(0, tokens[0], tuple(tokens[1:]), rewards=np.array([0, 1, 2], np.float32))
    monkeypatch.setattr(mx, "eval", lambda *arrays: looked_at.append(fused(*arrays)))
    kernels.compile_part("loss", load.load(None, words), [row])
    assert looked_at[-1]


def test_a_model_that_keeps_its_sizes_one_level_down_is_small_all_the_same(tmp_path: Path) -> None:
    """Four processes draw it on the GPU that the model itself is loaded to."""
    text = tiny.LLAMA | {"num_hidden_layers": 12, "vocab_size": 9000}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    model = kernels.small_model(ModelSettings(path=str(folder)), 0)
    assert len(model.layers) == kernels.BLOCKS
    assert max(weights.shape[0] for _, weights in tree_flatten(model.parameters())) <= kernels.VOCABULARY


def test_a_model_of_large_blocks_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGEST_BYTES", 1000)
    with pytest.raises(UserError, match="2 blocks of it take .* bytes"):
        kernels.small_model(ModelSettings(path=str(tiny.model_folder(tmp_path))), 0)


@pytest.fixture
def on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that would compile kernels: the folder where MLX would keep them. A part says that it ran."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(folder))
    monkeypatch.setattr(kernels, "device", lambda: "cuda")
    monkeypatch.setattr(kernels, "is_compiled", lambda *_: True)
    return folder


def compiled_once(
    tmp_path: Path, words: Sequence[str] = (), meanwhile: Callable[[], object] = lambda: None, longest: int = 12
) -> list[str]:
    """What a run of one rank is told while it loads its model."""
    model, data = tiny.model_folder(tmp_path / "model"), tmp_path / "train.jsonl"
    tiny.write_jsonl(data, list(tiny.pairs(4, longest=longest)))
    settings, told = load.load(None, [f"model.path={model}", f"data.train={data}", *words]), list[str]()
    rows = load_dataset(str(data), settings.data, "preference", None)
    with kernels.compiled(settings, rows, World(), ["one"], told.append):
        meanwhile()
    return told


def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    """One part, which a script plays."""
    monkeypatch.setattr(kernels, "PARTS", {"update": kernels.update})
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


def test_kernels_are_compiled_once_for_a_kind_of_model_and_loss(
    on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, tmp_path, 'cat > "$MLX_PTX_CACHE_DIR/$3.ptx"')
    (told,) = compiled_once(tmp_path)
    assert "compiling CUDA kernels" in told
    config, rows = pickle.loads((on_cuda / "update.ptx").read_bytes())
    assert config.train.loss == "sigmoid" and len(rows) == 2
    assert len(list(on_cuda.iterdir())) == 2  # and what says that it is done
    assert compiled_once(tmp_path) == [] and len(compiled_once(tmp_path, ["train.loss=ipo"])) == 1


def test_the_model_is_found_from_the_folder_that_a_part_works_in(
    on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, tmp_path, 'cat > "$MLX_PTX_CACHE_DIR/$3.ptx"')
    monkeypatch.chdir(tmp_path)
    compiled_once(tmp_path, ["model.path=model"])
    config, _ = pickle.loads((on_cuda / "update.ptx").read_bytes())
    monkeypatch.chdir(kernels.ROOT)
    assert (Path(config.model.path) / "config.json").is_file()


def test_long_rows_are_given_without_waiting_for_who_reads_them(
    on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB, and a part imports MLX before it reads."""
    go, in_time = tmp_path / "go", tmp_path / "in-time"
    waits = f"n=0; while [ ! -e {go} ] && [ $n -lt 100 ]; do sleep 0.05; n=$((n + 1)); done"
    play(monkeypatch, tmp_path, f"{waits}; if [ -e {go} ]; then touch {in_time}; fi")
    compiled_once(tmp_path, ["data.max_length=200000"], go.touch, longest=30_000)
    assert in_time.exists()


def test_what_a_part_had_not_finished_is_no_kernel(
    on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a kernel on the disk would fail in every run to come."""
    play(monkeypatch, tmp_path, 'echo half > "$MLX_PTX_CACHE_DIR/half.ptx"; exec sleep 60')
    monkeypatch.setattr(kernels, "LIMIT_SECONDS", 0.0)

    def until_it_writes() -> None:
        while not list(on_cuda.rglob("half.ptx")):
            time.sleep(0.01)

    compiled_once(tmp_path, [], until_it_writes)
    assert not list(on_cuda.rglob("half.ptx"))


@pytest.mark.parametrize("folder", ["kernels", "a name of too many letters" * 20])
def test_a_folder_that_cannot_be_written_stops_no_run(
    folder: str, on_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda.write_text("no folder")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / folder))
    told = compiled_once(tmp_path)
    assert "compiled in the first step" in told[-1] and str(tmp_path / folder) in told[-1]
