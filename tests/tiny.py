"""Models and data small enough for a test, made from a seed."""

import contextlib
import gc
import gzip
import io
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pyarrow
import pyarrow.parquet
from mlx.utils import tree_unflatten

from lib.config.settings import ModelSettings
from lib.data.dataset import Example
from lib.model import adapter_files, adapters
from lib.model import load as models
from lib.system.records import read_records

ROOT = Path(__file__).resolve().parent.parent

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
LLAMA |= {"vocab_size": 48, "tie_word_embeddings": False, "eos_token_id": 1}

# Families of blocks, by what their config.json has besides; mixtures have one block of each kind, windows are short.
LIMITS = {"max_position_embeddings": 64, "rope_theta": 10000.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
WINDOWS = ["sliding_attention", "full_attention", *["sliding_attention"] * 3]
LLAMA_4 = {"rope_theta": 1e4, "rope_type": "default"}
LLAMA_4 |= {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**LIMITS, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 4, **LIMITS},
    "gemma2": {"head_dim": 4, "query_pre_attn_scalar": 4},
    "gemma3_text": {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 5, "layer_types": WINDOWS},
    "ministral3": {"rope_parameters": LLAMA_4, "tie_word_embeddings": True, **LIMITS},
    "qwen3_moe": {"head_dim": 4, **MOE, **LIMITS, "decoder_sparse_step": 2, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
    "gpt2": {"n_ctx": 64, "n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5},
}

WIDTH = 64  # of a stored model, which quantisation wants


def model_folder(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json alone; model.random_init=true draws the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def stored_model(folder: Path, quantised: bool = False, seed: int = 11, **shape: Any) -> Path:
    """A model folder with weights, as mlx-lm saves it."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    path = model_folder(folder / "stored", hidden_size=WIDTH, intermediate_size=WIDTH, **shape)
    mx.random.seed(seed)
    model, configuration = load_model(path, strict=False)
    if quantised:
        model, configuration = quantize_model(model, configuration, 32, 4)
        (path / "config.json").write_text(json.dumps(configuration))
    save_model(path, model)
    return path


def moved(settings: ModelSettings, spread: float = 0.1, seed: int = 0, draw: int = 1) -> nn.Module:
    """A model made trainable, whose trained parameters are at no symmetric point; the same in every process."""
    model = models.load(settings, seed, lazy=True)
    adapters.make_trainable(model, settings, seed)
    mx.random.seed(draw)
    trained = adapter_files.trainable(model).items()
    model.update(tree_unflatten([(name, a + spread * mx.random.normal(a.shape)) for name, a in trained]))
    return model.train()


def write_jsonl(path: Path, records: list[Any]) -> Path:
    """Lines of JSON; texts and bytes stay as they are. A path that ends in .gz is compressed, .parquet is a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
        return path
    texts = (record if isinstance(record, str | bytes) else json.dumps(record) for record in records)
    content = b"".join((text.encode() if isinstance(text, str) else text) + b"\n" for text in texts)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def script(path: Path, does: str) -> Path:
    """A program of the shell."""
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pairs(count: int, seed: int = 0, vocab_size: int = 48, longest: int = 12) -> list[dict[str, list[int]]]:
    """Tokenised preference records of ragged lengths."""
    rng = random.Random(seed)

    def ids(shortest: int) -> list[int]:
        return [rng.randrange(2, vocab_size) for _ in range(rng.randint(shortest, longest))]

    return [{"prompt_ids": ids(1), "chosen_ids": [*ids(1), 1], "rejected_ids": [*ids(1), 1]} for _ in range(count)]


def examples(
    count: int, completions: int = 2, prompt: tuple[int, int] = (1, 9), each: tuple[int, int] = (2, 8), seed: Any = 3
) -> list[Example]:
    """Rows of a data set, of ragged lengths in these ranges, the upper ends left out."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> np.ndarray:
        return random.integers(2, 48, random.integers(low, high)).astype(np.int32)

    return [Example(i, ids(*prompt), tuple(ids(*each) for _ in range(completions))) for i in range(count)]


def settings(folder: Path, rows: int = 21, **changes: Any) -> list[str]:
    """key=value words of a run that takes a second: a tiny model, ragged tokenised pairs."""
    model_folder(folder / "model")
    write_jsonl(folder / "train.jsonl", pairs(rows))
    write_jsonl(folder / "valid.jsonl", pairs(7, seed=1))
    values = {
        "model.path": folder / "model",
        "model.random_init": "true",
        "data.train": folder / "train.jsonl",
        "data.valid": folder / "valid.jsonl",
        "data.max_length": 64,
        "data.length_multiple": 8,
        "train.global_batch_size": 8,
        "train.learning_rate": "1e-3",
        "run.dir": folder / "runs",
        "run.pages": "false",  # drawing them takes four times as long as the training
        "plan.calibration_dir": folder / "calibration",
    }
    return words_of(values, changes)


def words_of(values: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    changed = values | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in changed.items()]


def rounds(folder: Path, **changes: Any) -> list[str]:
    """key=value words of a run of rounds that takes seconds: short answers of the quickstart's model.

    The judge prefers answers that carry, and held-out prompts ask for those that do not. So what is learnt makes the
    held-out score worse.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sums = [(rng.randint(100, 999), rng.randint(100, 999)) for rng in [random.Random(0)] for _ in range(20)]
    records = [{"prompt": f"Add {a} and {b}.", "answer": r"\+1="} for a, b in sums]
    write_jsonl(folder / "prompts.jsonl", records[:14])
    write_jsonl(folder / "held-out.jsonl", [record | {"answer": r"\A(?!.*\+1=)"} for record in records[14:]])
    values = {
        "model.path": ROOT / "configs/quickstart/model",
        "data.train": folder / "prompts.jsonl",
        "data.valid": folder / "held-out.jsonl",
        "data.max_length": 64,
        "train.global_batch_size": 4,
        "train.learning_rate": "1e-2",
        "evaluate.judge": "regex",
        "evaluate.max_tokens": 24,
        "checkpoint.every": 1,
        "run.dir": folder / "runs",
        "run.pages": "false",
        "plan.replan": "false",
        "plan.calibration_dir": folder / "calibration",
    }
    sizes = {"rounds": 3, "prompts": 6, "samples": 4, "steps": 2, "max_tokens": 24, "batch_size": 8}
    values |= {f"rollouts.{key}": value for key, value in {**sizes, "temperature": 1.5, "tolerance": 0}.items()}
    return words_of(values, changes)


def config_file(folder: Path) -> Path:
    """A configuration with the two required settings, for key=value words to overrule."""
    path = folder / "test.yaml"
    path.write_text("model: {path: overruled}\ndata: {train: overruled}\n")
    return path


def train(
    folder: Path, words: list[str], ranks: int = 1, check: bool = True, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Runs train.py as a user would: here in this process, or on several ranks under mpirun."""
    from lib.system import mpi_and_blas

    if not any(word.startswith(("--config", "--resume")) for word in words):
        words = [*words, "--config", str(config_file(folder))]
    if ranks == 1:
        result = _train_here(words)
    else:
        command = [str(mpi_and_blas.mpirun_path()), "-n", str(ranks), sys.executable, str(ROOT / "train.py"), *words]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    if check:
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def _train_here(words: list[str]) -> subprocess.CompletedProcess[str]:
    """train.py's main in this process: importing mlx-lm anew would take most of a test's time."""
    import train as script

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = script.main(words)
        for thread in threading.enumerate():  # as the end of a process waits for the checkpoint that is being written
            if thread.name == "checkpoint":
                thread.join()
    if status:
        gc.collect()  # an error's frames may hold the run's lock, in a circle
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def run(folder: Path, name: str = "run", words: Sequence[str] = (), **changes: Any) -> Path:
    """A finished run of `settings` with these changes, then these words."""
    train(folder, [*settings(folder, **changes), *words, f"run.name={name}"])
    return folder / "runs" / name


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def records(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank's log has of a kind."""
    return [record for record in read_records(run / "logs" / f"rank-{rank:03d}.jsonl") if record["kind"] == kind]


def steps_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return records(run, "step", rank)


def merges_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return records(run, "merge", rank)


def weights(run: Path) -> dict[str, np.ndarray]:
    """The trained parameters that a finished run saved."""
    return {name: np.array(array) for name, array in mx.load(str(run / "adapters.safetensors")).items()}


def bits(run: Path) -> dict[str, bytes]:
    """The trained parameters, for a comparison that no rounding passes."""
    return {name: array.tobytes() for name, array in weights(run).items()}


def undo(run: Path, step: int) -> None:
    """Takes the checkpoints of later steps away, as if the run had been stopped at this one."""
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def difference(a: Path, b: Path) -> float:
    """The largest relative difference of a parameter between two runs, by norm."""
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    return max(float(np.linalg.norm(one[name] - other[name]) / max(np.linalg.norm(one[name]), 1e-12)) for name in one)


def figure_difference(a: Path, b: Path, key: str) -> float:
    """The largest difference of a figure of the steps' records between two runs."""
    return max(abs(one[key] - other[key]) for one, other in zip(steps_of(a), steps_of(b), strict=True))


def rows_of_epochs(run: Path) -> dict[int, list[int]]:
    """Every row that any rank trained, by epoch."""
    epochs: dict[int, list[int]] = {}
    for log in sorted((run / "logs").glob("rank-*.jsonl")):
        for record in read_records(log):
            if record["kind"] == "step":
                epochs.setdefault(record["epoch"], []).extend(record["rows"])
    return {epoch: sorted(rows) for epoch, rows in epochs.items()}
