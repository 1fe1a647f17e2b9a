"""Exports read back: by mlx-lm, and for PEFT by its formula on the base's own arrays; files that peft itself saved, read."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from lib.errors import Stopped, UserError
from lib.export import base_copy, command, fused, fused_weights, mlx_adapter, mlx_reader, peft_adapter, proof
from lib.export.form import ExportOptions
from lib.export.model_files import shards_of
from lib.export.trained_run import TrainedRun, open_run
from lib.model import adapters, peft_experts, peft_files
from lib.model import load as models
from lib.model.adapter_files import trainable, write_arrays
from lib.model.checkpoint_names import expert_pattern, stacked_name
from tests import exported, tiny

PLAIN = ExportOptions()
PEFT = Path(__file__).parent / "peft"
DORA = {"model.method": "dora"}
PATTERNS = {
    "model.alpha": 6,
    "model.rank": 4,
    "model.rank_pattern": '{"o_proj": 2, "layers.1.*": 3}',
    "model.alpha_pattern": "{down_proj: 5}",
    "model.blocks": "[0-1]",
    "model.adapt_embeddings": "true",
}
# Family, the base's options, the run's settings.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, last block": ("llama", {}, {"model.blocks": 1, "model.scale": 0.7}),
    "llama, patterns": ("llama", {}, PATTERNS),
    "llama, 4-bit dora": ("llama-biased", {"bits": 4}, DORA),
    "qwen2, tied dora": ("qwen2-tied", {}, DORA),
    "qwen3, tied embeddings": ("qwen3-tied", {}, {"model.adapt_embeddings": "true"}),
    "gemma3, 4-bit": ("gemma3_text", {"bits": 4}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "mixtral, as converted": (
        "mixtral",
        {"as_converted": True},
        {"model.keys": "[self_attn.q_proj,block_sparse_moe.switch_mlp.up_proj]"},
    ),
}


def opened(folder: Path, name: str = "llama, last block", **changes: Any) -> TrainedRun:
    family, base, settings = RUNS[name]
    path = exported.base_model(folder / "base", family, **base)
    run = exported.run_of(folder / "run", path, **settings, **changes)
    return open_run(run, "final", [], 6, lambda text: None)


@pytest.fixture
def run(tmp_path: Path) -> TrainedRun:
    return opened(tmp_path)


def written(form: Any, run: TrainedRun, options: ExportOptions = PLAIN) -> Path:
    folder = run.folder.parent / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    form.check(run, options, False)
    form.write(run, folder, options)
    return folder


def by_pefts_formula(run: TrainedRun, adapter: Path, folder: Path) -> Path:
    """The base with every adapter merged as PEFT documents it, in numpy, by the names of the base's own arrays."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    base = base_copy.for_transformers(run, folder)
    arrays = {
        name: np.array(array) for file in base.glob("*.safetensors") for name, array in mx.load(str(file)).items()
    }
    stored_config = json.loads((base / "config.json").read_text())
    if "lm_head.weight" not in arrays:  # tied, and with an adapter for each use
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
        stored_config["tie_word_embeddings"] = False
    base_arrays = dict(arrays)
    theirs = {name: np.array(array) for name, array in mx.load(str(adapter / "adapter_model.safetensors")).items()}
    seen = set()
    for name in theirs:
        for letter, turn in (("lora_A.weight", 0), ("lora_embedding_A", 1)):
            if name.endswith(letter):
                module = name.removeprefix("base_model.model.").removesuffix(f".{letter}")
                a, b = theirs[name], theirs[name.replace("_A", "_B")]
                values = [
                    next(
                        (v for k, v in config[f"{what}_pattern"].items() if peft_files.first_match({k: 1}, module, 0)),
                        config[one],
                    )
                    for what, one in (("rank", "r"), ("alpha", "lora_alpha"))
                ]
                assert len(a) == values[0]
                change = values[1] / values[0] * (b @ a)
                weight = base_arrays[f"{module}.weight"] + (change.T if turn else change)
                if config["use_dora"]:
                    magnitude = theirs[f"base_model.model.{module}.lora_magnitude_vector"]
                    weight = magnitude[:, None] * weight / np.linalg.norm(weight, axis=1, keepdims=True)
                arrays[f"{module}.weight"] = weight.astype(np.float32)
                seen.add(module)
    ends = config["target_modules"]
    assert {module for module in seen if any(module == end or module.endswith(f".{end}") for end in ends)} == seen
    merged = folder / "merged"
    merged.mkdir()
    (merged / "config.json").write_text(json.dumps(stored_config))
    stored = {name: mx.array(array) for name, array in arrays.items()}
    described = {name: (array.shape, array.dtype) for name, array in stored.items()}
    write_arrays(merged / "model.safetensors", described, stored.items())
    return merged


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.long("*4-bit*")
def test_every_form_has_the_runs_log_probabilities(name: str, tmp_path: Path) -> None:
    run = opened(tmp_path, name)
    for form in (mlx_adapter, fused):
        proven = proof.prove(form, run, written(form, run), PLAIN)
        assert proven.difference <= proof.LIMIT < proven.trained_difference
        assert (proven.rounding_difference > 0) == (form is fused and run.is_quantised)
    if run.is_quantised:
        options = ExportOptions(dequantize=True)
        folder = written(fused, run, options)
        assert proof.prove(fused, run, folder, options).difference <= proof.LIMIT
        assert "quantization" not in json.loads((folder / "config.json").read_text())
    adapter = written(peft_adapter, run)
    (tmp_path / "numpy").mkdir()
    merged = by_pefts_formula(run, adapter, tmp_path / "numpy")
    found = mlx_reader.logps(merged, run.rows, False)
    assert proof.largest_difference(found, proof.model_logps(run.model(), run.rows)) <= proof.LIMIT


@pytest.mark.parametrize("name", ["llama, patterns", "qwen3_moe", "qwen2, tied dora", "qwen3, tied embeddings"])
def test_what_we_write_for_peft_comes_in_again_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    run = opened(tmp_path, name)
    folder = written(peft_adapter, run)
    first = (folder / "adapter_model.safetensors").read_bytes()
    settings = run.settings.model.model_copy(update={"adapter": str(folder)})
    model = models.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    found = proof.model_logps(model, run.rows)
    assert proof.largest_difference(found, proof.model_logps(run.model(), run.rows)) <= proof.LIMIT
    again = exported.adapter_files.save_trained
    again(model, settings, run.folder)
    if name == "llama, patterns":  # what a run ends with is padded for mlx-lm; its checkpoints are not
        return
    assert (written(peft_adapter, run) / "adapter_model.safetensors").read_bytes() == first


def test_a_types_rounding_is_known_and_nothing_more_is_allowed(run: TrainedRun) -> None:
    for kind in ("bf16", "f16"):
        options = ExportOptions(type=kind)
        folder = written(fused, run, options)
        proven = proof.prove(fused, run, folder, options)
        assert proven.difference <= proof.LIMIT < proven.rounding_difference < proven.trained_difference
    arrays = dict(mx.load(str(folder / "model.safetensors")))
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * 1.01
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    with pytest.raises(Stopped, match="first at row 0"):
        proof.prove(fused, run, folder, options)


def test_what_rounding_loses_is_not_written(run: TrainedRun) -> None:
    """mlx-lm#1172: a fused model that is its base, or noise: steps of four bits are wider than what was trained."""
    base, trained = [np.zeros(3, np.float32)], [np.ones(3, np.float32)]
    proof.require_kept(run, [np.full(3, 0.9, np.float32)], trained, base)
    for lost in (0.0, 0.4, 3.0):
        with pytest.raises(Stopped, match="what was learned would be lost; take --dequantize"):
            proof.require_kept(run, [np.full(3, lost, np.float32)], trained, base)


def test_what_four_bits_cannot_hold_is_not_written_in_four_bits(tmp_path: Path) -> None:
    """A small adapter over MXFP4 experts: rounding undoes it, and the few tokens that take other experts hide nothing."""
    keys = "[self_attn.q_proj,mlp.experts.up_proj,mlp.experts.down_proj]"
    base = exported.base_model(tmp_path / "base", "gpt_oss", bits=4, mode="mxfp4")
    folder = exported.run_of(tmp_path / "run", base, **{"model.keys": keys, "model.scale": 0.002})
    run = open_run(folder, "final", [], 6, lambda text: None)
    with pytest.raises(Stopped, match="what was learned would be lost; take --dequantize"):
        proof.prove(fused, run, written(fused, run), PLAIN)
    plain = ExportOptions(dequantize=True, type="f32")
    assert proof.prove(fused, run, written(fused, run, plain), plain).difference <= proof.LIMIT


def test_experts_that_peft_has_no_names_for_are_refused(tmp_path: Path) -> None:
    base = exported.base_model(tmp_path / "base", "gpt_oss", bits=4, mode="mxfp4")
    folder = exported.run_of(tmp_path / "run", base, **{"model.keys": "[mlp.experts.up_proj]"})
    run = open_run(folder, "final", [], 6, lambda text: None)
    with pytest.raises(UserError, match="how PEFT names the experts of this family is not known"):
        written(peft_adapter, run)


def test_other_code_for_the_base_is_allowed_for_but_never_hides_an_adapter() -> None:
    assert proof.allowed_for("peft", base_difference=1e-6, trained_difference=1.0) == proof.LIMIT
    assert proof.allowed_for("peft", base_difference=3e-3, trained_difference=1.0) == 4 * 3e-3
    with pytest.raises(Stopped, match="too little to be told by that"):
        proof.allowed_for("peft", base_difference=3e-3, trained_difference=0.04)


def test_a_fused_model_has_its_bases_names_and_types(tmp_path: Path) -> None:
    run = opened(tmp_path, "qwen3_moe")
    folder = written(fused, run)
    base, stored = (mx.load(str(path / "model.safetensors")) for path in (run.base, folder))
    assert {name: (array.shape, array.dtype) for name, array in base.items()} == {
        name: (array.shape, array.dtype) for name, array in stored.items()
    }
    assert (folder / "config.json").read_bytes() == (run.base / "config.json").read_bytes()


def test_a_trained_array_that_no_layer_takes_stops_the_merge(run: TrainedRun) -> None:
    """mlx-lm#1172: a fused model that silently is its base."""
    model = run.model()
    model.model.norm.unfreeze()
    with pytest.raises(UserError, match="1 trained arrays belong to no layer that can be merged.*model.norm.weight"):
        list(fused_weights.adapted_layers(model))


def test_a_full_run_is_its_model(tmp_path: Path) -> None:
    base = exported.base_model(tmp_path / "base", "qwen3", dtype="bfloat16")
    run = open_run(
        exported.run_of(tmp_path / "run", base, **{"model.method": "full"}), "final", [], 6, lambda text: None
    )
    proven = proof.prove(fused, run, written(fused, run), PLAIN)
    assert proven.difference <= proof.LIMIT < proven.rounding_difference
    with pytest.raises(UserError, match="method=full"):
        peft_adapter.check(run, PLAIN, False)


# ---- PEFT's own files (benchmarks/exports.py --record)


WANTED = {
    "llama-lora": {
        "model.rank": 2,
        "model.scale": 1.5,
        "model.keys": "[self_attn.q_proj,self_attn.v_proj,self_attn.o_proj]",
    },
    "llama-dora": {
        "model.rank": 2,
        "model.scale": 1.5,
        "model.method": "dora",
        "model.keys": "[self_attn.q_proj,self_attn.v_proj,self_attn.o_proj]",
    },
    "llama-rslora": {"model.rank": 3, "model.scale": 3**0.5, "model.keys": "[self_attn.q_proj,mlp.down_proj]"},
    "llama-patterns": {
        "model.rank": 2,
        "model.alpha": 4,
        "model.keys": "[self_attn.q_proj,self_attn.v_proj,mlp.down_proj]",
        "model.rank_pattern": "{down_proj: 1, layers.1.self_attn.q_proj: 3}",
        "model.alpha_pattern": "{down_proj: 6}",
    },
}


def sequences() -> list[np.ndarray]:
    return [np.array([*pair["prompt_ids"], *pair["chosen_ids"]], np.int32) for pair in tiny.pairs(6, seed=4)]


@pytest.mark.parametrize("name", WANTED)
def test_adapters_that_peft_trained_have_its_log_probabilities(name: str, tmp_path: Path) -> None:
    base = exported.base_model(tmp_path / "base", "llama")
    settings = exported.settings_of(tmp_path, base, **WANTED[name], **{"model.adapter": PEFT / name}).model
    model = models.load(settings, 0)
    adapters.make_trainable(model, settings, 0)
    expected = [np.array(row, np.float32) for row in json.loads((PEFT / name / "logps.json").read_text())]
    assert proof.largest_difference(proof.model_logps(model, sequences()), expected) <= proof.LIMIT
    with pytest.raises(UserError, match="was made with other settings; add model") as error:
        other = settings.model_copy(update={"keys": None, "rank": 8, "method": "lora"})
        adapters.make_trainable(models.load(other, 0), other, 0)
    assert all(word.partition("=")[0] in str(error.value) for word in ("model.keys", "model.rank"))


@pytest.mark.parametrize("name", WANTED)
def test_pefts_arrays_come_out_again_with_the_same_bytes(name: str) -> None:
    theirs = dict(mx.load(str(PEFT / name / "adapter_model.safetensors")))
    again = peft_files.peft_arrays(peft_files.our_arrays(theirs, "here"))
    assert again.keys() == theirs.keys()
    assert all(np.array(again[name]).tobytes() == np.array(theirs[name]).tobytes() for name in theirs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias=all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"r": 4}, "has rank 2, but adapter_config.json says 4"),
    ],
)
def test_what_of_peft_has_no_counterpart_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    shutil.copytree(PEFT / "llama-lora", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(UserError, match=words):
        peft_files.read(tmp_path / "adapter", "model.adapter")


def test_a_torn_or_unknown_file_of_peft_is_refused(tmp_path: Path) -> None:
    shutil.copytree(PEFT / "llama-lora", tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    mx.save_safetensors(str(weights), {"base_model.model.lm_head.weight": mx.zeros((2, 2))})
    with pytest.raises(UserError, match="lm_head.weight is no part of a low-rank layer"):
        peft_files.read(tmp_path / "adapter", "model.adapter")
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        peft_files.read(tmp_path / "adapter", "model.adapter")
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(UserError, match=f"^model.adapter {weights} is a pipe"):
        peft_files.read(tmp_path / "adapter", "model.adapter")


def test_experts_that_peft_adapted_as_two_parameters() -> None:
    """A [E r, in] and B [out, r E] of a parameter of all experts, whichever of the two is the inner one."""
    draw = np.random.RandomState(0)
    experts, inner, width = 3, 4, 6
    ranks = {"gate_up_proj": 2, "down_proj": 1}
    shapes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    layers = {
        name: {
            "lora_a": mx.array(draw.standard_normal((experts * ranks[name], shape[1]))),
            "lora_b": mx.array(draw.standard_normal((shape[0], ranks[name] * experts))),
        }
        for name, shape in shapes.items()
    }
    for order in (("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")):
        named = dict(zip(("x.mlp.experts.base_layer", "x.mlp.experts"), (layers[name] for name in order), strict=True))
        arrays, parameters = peft_experts.unfused(named, lambda name: ranks[name.rpartition(".")[2]], "here")
        assert parameters["x.mlp.switch_mlp.up_proj"] == "x.mlp.experts.gate_up_proj"

        def change(name: str, arrays: dict[str, mx.array] = arrays) -> np.ndarray:
            return np.array(arrays[f"x.mlp.switch_mlp.{name}.lora_b"] @ arrays[f"x.mlp.switch_mlp.{name}.lora_a"])

        ours = {
            "gate_up_proj": np.concatenate([change("gate_proj"), change("up_proj")], axis=1),
            "down_proj": change("down_proj"),
        }
        for name, rank in ranks.items():
            a = np.array(layers[name]["lora_a"]).reshape(experts, rank, -1)
            b = np.array(layers[name]["lora_b"]).reshape(-1, rank, experts)
            np.testing.assert_allclose(ours[name], np.einsum("ore,eri->eoi", b, a), atol=1e-5)  # as peft has it
    with pytest.raises(UserError, match="both or neither fit"):
        peft_experts.unfused({"x.mlp.experts": layers["down_proj"]}, lambda name: 1, "here")


# ---- The command


def export(run: TrainedRun, *words: str) -> tuple[int, Path]:
    return command.main([str(run.folder), *words, *(["--no-proof"] if "peft" in words else [])]), run.folder / "export"


def test_an_export_is_whole_and_says_what_it_is(run: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    torn = run.folder / "export" / ".fused.unfinished"  # of a process that was killed
    (torn / "torn-folder").mkdir(parents=True)
    (torn / "torn-file").touch()
    lock = os.open(torn, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert export(run, "--to", "fused")[0] == 2
    assert "another process is writing it" in capsys.readouterr().err
    os.close(lock)
    status, folder = export(run, "--to", "fused")
    assert status == 0
    facts = json.loads((folder / "fused" / "tandem_export.json").read_text())
    assert facts["form"] == "fused" and facts["checkpoint"] == "final" and facts["proof"]["difference"] <= 1e-4
    out = capsys.readouterr().out
    assert "proven: mlx_lm.load gives the same log-probabilities" in out
    assert json.loads(out.splitlines()[-1])["proof"] == facts["proof"]
    assert [path.name for path in folder.iterdir()] == ["fused"]
    assert not list((folder / "fused").glob("torn*"))
    assert export(run, "--to", "fused")[0] == 2
    assert "exists already; give another folder by --out" in capsys.readouterr().err


def test_a_link_in_a_runs_folder_leads_no_export_to_another(
    run: TrainedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may come from anybody, with links to folders of yours."""
    own = tmp_path / "documents"
    (own / "letters").mkdir(parents=True)
    (own / "thesis.txt").write_text("all of it")
    export_folder = run.folder / "export"
    export_folder.mkdir()
    (export_folder / ".mlx.unfinished").symlink_to(own)
    assert export(run, "--to", "mlx")[0] == 0
    assert sorted(path.name for path in own.iterdir()) == ["letters", "thesis.txt"]
    assert not (export_folder / "mlx").is_symlink() and (export_folder / "mlx" / "adapters.safetensors").is_file()
    shutil.rmtree(export_folder)
    export_folder.symlink_to(own)
    capsys.readouterr()
    assert export(run, "--to", "mlx")[0] == 2 and "is a link, perhaps to a folder of yours" in capsys.readouterr().err
    assert sorted(path.name for path in own.iterdir()) == ["letters", "thesis.txt"]


def test_a_wrong_export_is_not_written(
    run: TrainedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fused_weights.AdaptedLayer.change.fget
    assert right is not None
    monkeypatch.setattr(fused_weights.AdaptedLayer, "change", property(lambda layer: 1.1 * right(layer)))
    status, folder = export(run, "--to", "fused")
    assert status == 1 and list(folder.iterdir()) == []
    assert "Nothing was written" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(
    run: TrainedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mlx_adapter, "save_trained", full)
    status, folder = export(run, "--to", "mlx")
    assert status == 2 and list(folder.iterdir()) == []
    assert "bytes are free there (No space left on device)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "mlx", "--checkpoint", "7"], "--checkpoint 7"),
        (["--to", "mlx", "--checkpoint", "newest"], "give best, last, or a step's number"),
        (["--to", "mlx", "--type", "f16"], "leave --type and --dequantize out"),
        (["--to", "fused", "--type", "q8_0"], "--type q8_0 is for --to gguf"),
        (["--to", "fused", "--dequantize"], "is not quantised"),
        (["--to", "fused", "--rows", "0"], "--rows 0"),
        (["--to", "onnx"], "invalid choice: 'onnx'"),
        (["--to", "mlx", "model.path=/nowhere/at/all"], "no such folder"),
        (["--to", "peft", "--peft-python", "/nowhere/python"], "pip install peft torch"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], message: str, run: TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(run.folder), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not (run.folder / "export").exists()


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path), "--to", "mlx"]) == 2
    assert "no run there" in capsys.readouterr().err


def test_a_base_that_nobody_has_is_exported_whole_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny.settings(tmp_path, **{"run.name": "r", "train.steps": 2, "checkpoint.every": 1, "evaluate.every": 1})
    tiny.train(tmp_path, words)
    run = tmp_path / "runs" / "r"
    assert command.main([str(run), "--to", "mlx"]) == 2
    assert "take --to fused" in capsys.readouterr().err
    digests = []
    for which in ("1", "last", "best", "final"):
        assert command.main([str(run), "--to", "fused", "--checkpoint", which, "--out", str(tmp_path / which)]) == 0
        digests.append((tmp_path / which / "model.safetensors").read_bytes())
    assert digests[0] != digests[1] and digests[1] == digests[3] and digests[2] in digests[:2]


# ---- Pure parts


def test_experts_have_names_of_their_own() -> None:
    name = "model.layers.0.mlp.switch_mlp.gate_proj"
    assert expert_pattern(name) == "model.layers.0.mlp.experts.{}.gate_proj"
    assert stacked_name("model.layers.0.mlp.experts.12.gate_proj") == (name, 12)
    assert stacked_name("model.layers.0.mlp.experts.12.gate_proj.weight") == (f"{name}.weight", 12)
    mixtral = "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight"
    assert stacked_name(str(expert_pattern(mixtral)).format(3)) == (mixtral, 3)
    assert expert_pattern("model.layers.0.mlp.gate_proj") is stacked_name("model.layers.0.mlp.gate_proj") is None


def test_targets_mean_exactly_the_adapted_layers() -> None:
    layers = {f"model.layers.{i}.{name}" for i in range(3) for name in ("attn.q", "attn.v", "mlp.q")} | {"lm_head"}
    of_last = {name for name in layers if ".2." in name}
    assert peft_adapter.targets(layers - {"lm_head"}, layers) == (["q", "v"], None)
    assert peft_adapter.targets(of_last, layers) == (["q", "v"], [2])
    some = {"model.layers.0.attn.q", "model.layers.1.attn.q"}
    assert peft_adapter.targets(some, layers) == (sorted(some), None)
    both = {"model.layers.0.attn.v", "lm_head"}
    assert peft_adapter.targets(both, layers) == (sorted(both), None)


def test_weights_are_spread_over_files() -> None:
    assert shards_of({"a": 3, "b": 3, "c": 9, "d": 1}, most=6) == [["a", "b"], ["c"], ["d"]]


def test_a_quantised_base_names_its_original(tmp_path: Path) -> None:
    run = opened(tmp_path, "gemma3, 4-bit")
    assert peft_adapter.original_of(run) == str(run.base)
    (run.base / "README.md").write_text("---\nbase_model: google/gemma-3-1b-it\n---\n# Converted\n")
    assert peft_adapter.original_of(run) == "google/gemma-3-1b-it"


def test_merging_is_what_the_adapter_does(run: TrainedRun) -> None:
    """Layer by layer: the merged weight gives what the base and the adapter beside it give."""
    model = run.model()
    x = mx.random.normal((3, 64), key=mx.random.key(0))
    for layer in fused_weights.adapted_layers(model):
        own = x[:, : layer.weight.shape[1]]
        assert isinstance(layer.module, nn.Module) and mx.allclose(layer.module(own), own @ layer.weight.T, atol=1e-5)
    assert not tree_flatten(trainable(fused_weights.fused_model(run).freeze()))
