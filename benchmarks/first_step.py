"""What a user waits for on a machine where nothing was compiled: seconds from train.py's start to its first step.

    python benchmarks/first_step.py                       a small model of 4 bits, wherever MLX computes
    python benchmarks/first_step.py --model 8B --bits 4   on a GPU; --bits 16 for bfloat16

Weights are drawn at random and saved before, by another process. Then the same run is started twice: with an empty folder of
compiled kernels (MLX_PTX_CACHE_DIR on CUDA, TMPDIR on a CPU), and with what the first one left there. A kernel's seconds are those
since the one before it was written: on CUDA they are compiled one after another. The last line is JSON.
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
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from benchmarks.gpus import dense  # noqa: E402
from lib.system.records import read_records  # noqa: E402

MODELS = {
    "small": dense(128, 2, 4, 256, 512, head_dim=32, num_key_value_heads=2),
    "1B": dense(2048, 16, 32, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "8B": dense(4096, 32, 32, 14336, 128256),
}
KERNELS = {".ptx", ".so"}
PAUSE = 1.0  # seconds: a longer one between two kernels was not spent on compiling the second alone


def main() -> None:
    options = parse()
    if options.draw:
        draw(options)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, options)
        kernels = options.kernels or folder / "kernels"
        kernels.mkdir(exist_ok=True)
        for run in ("empty", "kept"):
            rows.append({"kernels": run, **row_of(folder, run, kernels, options)})
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"benchmark": "first_step", "settings": vars(options), "rows": rows}, default=str))


def row_of(folder: Path, run: str, kernels: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the process's start to what it records, and the kernels written by then."""
    known = files_of(kernels)
    began = time.time()
    words = [f"run.name={run}", *options.words]
    process = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", str(folder / "run.yaml"), *words],
        env=with_kernels(kernels),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        return {"error": (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]}
    records = list(read_records(folder / f"runs/{run}/logs/rank-000.jsonl"))
    steps = [record["time"] - began for record in records if record["kind"] == "step"]
    start = next(record["time"] - began for record in records if record["kind"] == "start")
    new = sorted(written - began for name, written in files_of(kernels).items() if name not in known)
    return {
        "start_seconds": start,  # data, model and reference are there
        "first_step_seconds": steps[0],
        "second_step_seconds": steps[1] - steps[0],
        "last_step_seconds": steps[-1] - steps[-2],
        "compiled_before_start": sum(written < start for written in new),
        "compiled_before_first_step": sum(written < steps[0] for written in new),
        "compiled": len(new),
    }


def with_kernels(folder: Path) -> dict[str, str]:
    return dict(os.environ) | {"MLX_PTX_CACHE_DIR": str(folder), "TMPDIR": str(folder)}


def files_of(folder: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob("*") if path.suffix in KERNELS}


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """A saved model, random pairs of one length, and the settings of both runs."""
    (folder / "drawn").mkdir()
    command = [sys.executable, __file__, "--draw", str(folder / "model"), "--model", options.model]
    subprocess.run([*command, "--bits", str(options.bits)], env=with_kernels(folder / "drawn"), check=True)
    numbers = random.Random(options.seed)
    vocabulary = MODELS[options.model]["vocab_size"]

    def ids() -> list[int]:
        return [numbers.randrange(2, vocabulary) for _ in range(options.tokens)]

    rows = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(options.batch)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 2 * options.tokens},
        "train": {"global_batch_size": options.batch, "steps": 4},
        "plan": {"calibration_dir": str(folder), "micro_batch_sizes": [options.batch]},
        "evaluate": {"samples": 0},
        "checkpoint": {"every": 1_000_000},
        "run": {"dir": str(folder / "runs"), "log_every": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML


def draw(options: argparse.Namespace) -> None:
    """A model of random weights, saved as mlx-lm does."""
    import mlx.nn as nn
    from mlx_lm.utils import save_config, save_model

    from lib.config.settings import ModelSettings
    from lib.model import load

    options.draw.mkdir()
    stored: dict[str, Any] = MODELS[options.model] | {"rms_norm_eps": 1e-5, "eos_token_id": 1}
    (options.draw / "config.json").write_text(json.dumps(stored))
    model = load.load(
        ModelSettings(path=str(options.draw), random_init=True, dtype="bfloat16"), options.seed, lazy=True
    )
    if options.bits < 16:
        nn.quantize(model, 64, options.bits)
        stored = stored | {"quantization": {"group_size": 64, "bits": options.bits}}
    save_model(options.draw, model)
    save_config(stored, options.draw / "config.json")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODELS, default="small")
    add("--bits", type=int, default=4, choices=[2, 3, 4, 5, 6, 8, 16])
    add("--batch", type=int, default=8, help="pairs a step, all in one micro-batch")
    add("--tokens", type=int, default=64, help="of a prompt and of each completion")
    add(
        "--kernels",
        type=Path,
        default=None,
        help="an empty folder for the compiled kernels; by default one that is removed",
    )
    add("--words", nargs="*", default=[], help="further settings, as train.py takes them")
    add("--draw", type=Path, default=None, help=argparse.SUPPRESS)
    add("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
