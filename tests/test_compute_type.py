"""16-bit weights on a CPU: computed in float32 where memory allows, said, recorded; exports round once."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import yaml

from lib.config.settings import ModelSettings
from lib.export import command, fuse
from lib.export.trained_run import open_run
from lib.model.load import compute_type
from lib.system import hardware
from tests import exported, tiny


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return exported.base_model(tmp_path / "base", "llama", dtype="bfloat16")


def test_float32_where_memory_allows_and_nothing_else_is_set(base: Path, monkeypatch) -> None:
    settings = ModelSettings(path=str(base))
    found = compute_type(settings)
    assert found.is_float32 and "model.dtype=bfloat16" in found.note
    for changes in ({"dtype": "bfloat16"}, {"random_init": True}):
        assert compute_type(settings.model_copy(update=changes)).note == ""
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda: 10_000)
    found = compute_type(settings)
    assert not found.is_float32 and "10.0 kB are free" in found.note and "slower" in found.note


def test_a_run_records_the_type_and_its_export_rounds_once(base: Path, tmp_path) -> None:
    words = tiny.settings(tmp_path, **{"train.steps": 2, "model.path": base, "model.random_init": "false"})
    words += ["model.rank=4", "train.learning_rate=0.01", "run.name=r"]
    assert "weights stored in bfloat16 are computed in float32" in tiny.train(tmp_path, words).stdout
    folder = tmp_path / "runs" / "r"
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["dtype"] == "float32"
    assert {array.dtype for array in mx.load(str(folder / "adapters.safetensors")).values()} == {mx.float32}
    assert "computed in float32" not in tiny.train(tmp_path, [*words[:-1], "run.name=s", "model.dtype=bfloat16"]).stdout
    assert command.main([str(folder), "--to", "fused"]) == 0
    stored, fused = (mx.load(str(path / "model.safetensors")) for path in (base, folder / "export" / "fused"))
    layers = fuse.adapted_layers(open_run(folder, "final", [], 1, print).model())
    for name, array in stored.items():
        layer = layers.get(name.removesuffix(".weight"))
        right = array if layer is None else layer.fuse().weight.astype(mx.bfloat16)
        assert np.array_equal(np.array(right.view(mx.uint16)), np.array(fused[name].view(mx.uint16))), name
