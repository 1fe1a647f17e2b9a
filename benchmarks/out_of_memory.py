"""Trains with a micro-batch that is far too large, and compares with a run that never ran out of memory.

    python benchmarks/out_of_memory.py --seed 0                a GPU: 1B shape, micro-batches of 256 pairs
    python benchmarks/out_of_memory.py --limit-gb 0.5          a CPU, which refuses no memory: a limit of ours
    python benchmarks/out_of_memory.py --quick                 a smaller model

Three runs of train.py on the same rows from the same random weights: in small micro-batches; in those that do not fit; and
the next run, which has to start with what the host remembers. float32, without TF32: what differs is the order of sums.
SGD: Adam divides by a gradient's own size, so that the rounding of one near zero becomes a whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from lib.system.terminal import Voice  # noqa: E402
from lib.telemetry.run_records import read_records  # noqa: E402

BAR = 1e-5  # of any weight
CHANGE_BAR = (
    1e-2  # of the difference, relative to what training changed (2-norms): a bar that nothing trains to is none
)
LLAMA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32}
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024, "num_attention_heads": 8}


def main() -> int:
    """Runs the benchmark; returns the exit status: 1 where a run failed or the weights differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer pairs")
    parser.add_argument("--micro-batch", type=int, help="pairs, far too many (default: 256; on a CPU 32)")
    parser.add_argument(
        "--limit-gb", type=float, help="plan.memory_limit_gb; by default, on a CPU, 1.5 times what 2 pairs take"
    )
    options = parser.parse_args()
    is_gpu = mx.default_device() == mx.gpu
    with tempfile.TemporaryDirectory() as name:
        rows, summary = compare(Path(name), options, is_gpu)
    voice = Voice()
    voice.table("out of memory", list(rows[0]), [list(row.values()) for row in rows])
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def compare(folder: Path, options: argparse.Namespace, is_gpu: bool) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """The runs' rows for a table, and the figures."""
    large = options.micro_batch or (256 if is_gpu else 32)
    small = 12 if is_gpu else 3  # no power of two: the sums then differ in their order
    words = settings(folder, options, is_gpu, large)
    free = run(folder, "free", [*words, f"plan.micro_batch_sizes=[{small}]"], folder / "other")
    limit_gb = options.limit_gb or (None if is_gpu else 1.5 * free["peak_gb"])
    limit = [f"plan.memory_limit_gb={limit_gb:.4f}"] if limit_gb else []
    too_large = [*words, *limit, f"plan.micro_batch_sizes=[{large}]"]
    met = run(folder, "met", too_large, folder / "remembers")
    after = run(folder, "after", too_large, folder / "remembers")
    rows = [
        {
            "run": title,
            "micro-batch": str(size),
            "ended with": str(one["last_size"]),
            "ran out": str(one["times"]),
            "s": f"{one['seconds']:.1f}",
            "peak GB": f"{one['peak_gb']:.3g}",
            "largest difference": f"{difference(one, free)[0]:.1e}",
        }
        for title, size, one in (
            ("never met it", small, free),
            ("too large", large, met),
            ("the next one", large, after),
        )
    ]
    largest, relative = difference(met, free)
    figures = {
        "device": str(mx.device_info().get("device_name", "CPU")) if is_gpu else "CPU",
        "limit_gb": limit_gb,
        "micro_batch_size": large,
        "ended_with": met["last_size"],
        "times": met["times"],
        "next_started_with": after["first_size"],
        "largest_difference": largest,
        "relative_difference": relative,
        "bar": BAR,
        "seconds": {"free": free["seconds"], "met": met["seconds"], "next": after["seconds"]},
    }
    ok = met["times"] > 0 and after["times"] == 0 and after["first_size"] == met["last_size"]
    ok = ok and largest <= BAR and relative <= CHANGE_BAR and difference(after, free)[0] <= BAR
    return rows, {**figures, "seed": options.seed, "quick": options.quick, "ok": bool(ok)}


def settings(folder: Path, options: argparse.Namespace, is_gpu: bool, batch: int) -> list[str]:
    """Writes a model without weights and tokenised pairs; returns the words of all runs."""
    shape: dict[str, Any] = LLAMA_1B if is_gpu else SMALL
    if options.quick and is_gpu:
        shape = shape | {"num_hidden_layers": 4}
    vocabulary = 32000 if is_gpu else 4000
    model = {"model_type": "llama", "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": vocabulary}
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(
        json.dumps(model | shape | {"tie_word_embeddings": True, "eos_token_id": 1})
    )
    rng, length = random.Random(options.seed), (64 if options.quick and not is_gpu else 128)
    steps = 2

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, vocabulary) for _ in range(count)]

    rows = [
        {"prompt_ids": ids(length), "chosen_ids": ids(rng.randint(length // 2, length)), "rejected_ids": ids(length)}
        for _ in range(steps * batch)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model.path": folder / "model",
        "model.random_init": "true",
        "model.dtype": "float32",
        "model.dropout": 0,
        "data.train": folder / "train.jsonl",
        "data.max_length": 3 * length,
        "train.loss": "simpo",  # no reference pass: its memory and time are not the question here
        "train.optimizer": "sgd",
        "train.learning_rate": 1.0,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.steps": steps,
        "train.global_batch_size": batch,
        "train.seed": options.seed,
        "evaluate.samples": 0,
        "run.dir": folder / "runs",
    }
    (folder / "config.yaml").write_text("model: {path: overruled}\ndata: {train: overruled}\n")
    return [f"{name}={value}" for name, value in values.items()]


def run(folder: Path, name: str, words: list[str], calibration: Path) -> dict[str, Any]:
    """One run of train.py, and what its log says.

    Raises:
        SystemExit: it failed; with what it said.
    """
    command = [sys.executable, "train.py", "--config", str(folder / "config.yaml"), *words]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, f"run.name={name}", f"plan.calibration_dir={calibration}"],
        cwd=ROOT,
        env={**os.environ, "MLX_ENABLE_TF32": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    records = list(read_records(folder / "runs" / name / "logs/rank-000.jsonl"))
    plans = [
        next(one for one in records if one["kind"] == "start")["plan"],
        *(one for one in records if one["kind"] == "plan"),
    ]
    sizes = [max(plan["ranks"][0]["micro_batch_sizes"]) for plan in plans]
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "first_size": sizes[0],
        "last_size": sizes[-1],
        "times": len(sizes) - 1,
        "peak_gb": max(one["peak_memory_bytes"] for one in records if one["kind"] == "step") / 1e9,
        "weights": weights(folder / "runs" / name),
    }


def weights(run_folder: Path) -> dict[str, np.ndarray]:
    """The trained adapter."""
    arrays: Any = mx.load(str(run_folder / "adapters.safetensors"))
    return {name: np.array(array) for name, array in arrays.items()}


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """The largest difference of any weight; and all of it, relative to the adapters' trained halves (B, which begins at zero)."""
    pairs = [(one["weights"][name], array, name) for name, array in other["weights"].items()]
    largest = max(float(np.abs(mine - theirs).max()) for mine, theirs, _ in pairs)
    trained = [(mine, theirs) for mine, theirs, name in pairs if name.endswith("lora_b")]
    lost = sum(float(np.square(mine - theirs).sum()) for mine, theirs in trained)
    whole = sum(float(np.square(theirs).sum()) for _, theirs in trained)
    return largest, (lost / whole) ** 0.5


if __name__ == "__main__":
    sys.exit(main())
