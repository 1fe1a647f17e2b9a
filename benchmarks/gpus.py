"""One GPU, and the GPUs of this machine with parts of one model over NCCL, pipelined and sharded: pairs/s, waiting, memory.

    python benchmarks/gpus.py                              Llamas of 1B and 8B, two GPUs, about ten minutes
    python benchmarks/gpus.py --models 8B --limit-gb 11    and one that neither GPU may hold by itself
    python benchmarks/gpus.py --strategies sharded --batch 16 --sizes 16 --calibrate      beside what the plan predicts
    python benchmarks/gpus.py --quick                      the 1B alone, fewer steps

LoRA-DPO in bfloat16 of random weights, pairs of three times --tokens tokens, --batch of them a step, in the micro-batches of
--sizes. Each run is train.py's own; figures are medians of its steps, without the first ones. `times one` compares with the
fastest run of one GPU, whatever its micro-batches. With --limit-gb each run may hold so much memory (plan.memory_limit_gb).
The bound is the best cut's: 1F1B replayed with the seconds that each GPU took for a block and for the head, without any message. With --calibrate the GPUs are
measured before (benchmarks/calibrate.py --quick), and predicted is what the plan made of that, over what the median step
took. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.plan.pipeline import Hop, depths, step_seconds  # noqa: E402
from lib.system.records import read_records  # noqa: E402


def dense(hidden: int, blocks: int, heads: int, columns: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """A Llama's config.json."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads}
    common = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_key_value_heads": 8, "head_dim": 128}
    return {**sizes, "intermediate_size": columns, "vocab_size": vocabulary, "model_type": "llama", **common, **more}


MODELS = {
    "tiny": dense(64, 4, 8, 128, 512, head_dim=8),
    "1B": dense(2048, 16, 32, 8192, 128256, head_dim=64),
    "8B": dense(4096, 32, 32, 14336, 128256),
    "70B": dense(8192, 80, 64, 28672, 128256),
}
PORT = 29_500
WARM = 2  # first steps that do not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["1B", "8B"])
    add("--gpus", type=int, default=2)
    add("--strategies", nargs="+", choices=["pipelined", "sharded"], default=["pipelined", "sharded"])
    add("--calibrate", action="store_true", help="measure the GPUs first, for predictions")
    add("--batch", type=int, default=64, help="pairs a step")
    add("--sizes", type=int, nargs="+", default=[4, 8], help="of micro-batches, in pairs")
    add("--tokens", type=int, default=512, help="of a prompt and of each completion")
    add("--steps", type=int, default=6, help="of a run")
    add("--limit-gb", type=float, default=None, help="what each run may hold on each GPU")
    add("--only-together", action="store_true", help="not one GPU alone")
    add("--words", nargs="*", default=[], help="further settings, as train.py takes them")
    add("--backend", default="nccl", choices=["nccl", "ring"], help="ring: to try the benchmark without GPUs")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.models, options.steps = options.models[:1], 4
    rows = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), model, options)
            if options.calibrate:
                words = ["--quick", f"--largest={max(options.sizes)}", f"--folder={folder}"]
                script = ["benchmarks/calibrate.py", *words]
                if error := launched(Path(folder), options.gpus, script, options.backend):
                    sys.exit(f"calibrate: {error}")
            alone = [] if options.only_together else ["alone"]
            for strategy in (*alone, *options.strategies):
                for size in options.sizes:
                    rows.append(row_of(Path(folder), model, strategy, size, options))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    show(rows, options)
    print(json.dumps({"settings": vars(options), "rows": rows}))


def row_of(folder: Path, model: str, strategy: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over a run's steps, or why there is none. strategy: or "alone"."""
    ranks, name = (1 if strategy == "alone" else options.gpus), f"{strategy}-{size}"
    row: dict[str, Any] = {"model": model, "strategy": strategy, "gpus": ranks, "size": size}
    words = [f"run.name={name}", f"plan.micro_batch_sizes=[{size}]", f"train.seed={options.seed}"]
    words += [f"strategy={strategy}"] * (ranks > 1) + options.words
    words += [f"plan.memory_limit_gb={options.limit_gb}"] * (options.limit_gb is not None)
    error = launched(folder, ranks, ["train.py", *words], options.backend)
    logs = [folder / f"runs/{name}/logs/rank-{rank:03d}.jsonl" for rank in range(ranks)]
    if error:
        return {**row, "error": error}
    steps = [[one for one in read_records(log) if one["kind"] == "step"][WARM:] for log in logs]
    seconds = statistics.median(
        max(of_ranks) for of_ranks in zip(*([s["step_seconds"] for s in r] for r in steps), strict=False)
    )

    def medians(key: str) -> list[float]:
        return [statistics.median(one[key] for one in of_rank) for of_rank in steps]

    row |= {
        "pairs_per_second": options.batch / seconds,
        "step_seconds": seconds,
        "compute_seconds": medians("compute_seconds"),
        "wait_seconds": medians("wait_seconds"),
        "sync_seconds": medians("sync_seconds"),
        "peak_gb": [max(one["peak_memory_bytes"] for one in of_rank) / 1e9 for of_rank in steps],
        "bytes_per_step": medians("bytes_sent"),
        "losses": [one["loss"] for one in steps[0]],
    }
    plan = json.loads((folder / f"runs/{name}/plan.json").read_text())
    predicted = next((way["step_seconds"] for way in plan["predictions"] if way["chosen"]), None)
    if predicted:
        row["predicted_of_measured"] = predicted / seconds
    if strategy == "pipelined":
        micro_batches = -(-options.batch // size)
        row["blocks"] = [stage["blocks"] for stage in plan["stages"]]
        bound = best_bound(row["blocks"], row["compute_seconds"], micro_batches)
        row |= {"bound_seconds": bound, "of_bound": bound / seconds}
    return row


def best_bound(blocks: Sequence[int], compute_seconds: Sequence[float], micro_batches: int) -> float:
    """The shortest step of any cut, without messages, from what each rank's blocks took in this one.

    The last rank's head takes what its time is beyond its blocks at the median rank's pace.
    """
    ranks, total = len(blocks), sum(blocks)
    paces = [seconds / count / micro_batches for seconds, count in zip(compute_seconds, blocks, strict=True)]
    if ranks > 1:
        paces[-1] = min(paces[-1], statistics.median(paces[:-1]))
    head = max(0.0, compute_seconds[-1] / micro_batches - paces[-1] * blocks[-1])

    def seconds_of(cut: Sequence[int]) -> float:
        halves = [pace * count / 2 for pace, count in zip(paces, cut, strict=True)]
        halves[-1] += head / 2
        return step_seconds(halves, halves, [Hop()] * (ranks - 1), depths(ranks), micro_batches)

    best = list(blocks)
    while True:  # a block from one rank to another, as long as that is shorter
        moves = [
            [n + (r == to) - (r == source) for r, n in enumerate(best)]
            for source in range(ranks)
            for to in range(ranks)
        ]
        shortest = min((move for move in moves if min(move) > 0 and sum(move) == total), key=seconds_of)
        if seconds_of(shortest) >= seconds_of(best):
            return seconds_of(best)
        best = shortest


def launched(folder: Path, ranks: int, script: Sequence[str], backend: str) -> str | None:
    """A script and its words, one rank a GPU; the last line of what went wrong."""
    processes = []
    for rank in range(ranks):
        variables = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": str(rank)}
        if ranks > 1 and backend == "nccl":
            variables |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(PORT), "MLX_WORLD_SIZE": str(ranks)}
            variables |= {"MLX_RANK": str(rank)}
        elif ranks > 1:
            (folder / "ring.json").write_text(json.dumps([[f"127.0.0.1:{PORT + one}"] for one in range(ranks)]))
            variables |= {"MLX_HOSTFILE": str(folder / "ring.json"), "MLX_RANK": str(rank)}
        command = [sys.executable, str(ROOT / script[0]), "--config", str(folder / "run.yaml"), *script[1:]]
        processes.append(
            subprocess.Popen(
                command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    errors = [(process.communicate()[1], process.returncode) for process in processes]
    return next((text.strip().splitlines()[-1] for text, status in errors if status), None)


def write_inputs(folder: Path, model: str, options: argparse.Namespace) -> None:
    """A model's shape, random pairs of one length, and the settings of all runs."""
    draw = random.Random(options.seed)
    stored = MODELS[model]

    def ids() -> list[int]:
        return [draw.randrange(2, stored["vocab_size"]) for _ in range(options.tokens)]

    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps({**stored, "rms_norm_eps": 1e-5, "eos_token_id": 1}))
    rows = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(options.batch)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"path": str(folder / "model"), "random_init": True, "dtype": "bfloat16"},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 2 * options.tokens},
        "train": {"global_batch_size": options.batch, "steps": options.steps},
        "plan": {"calibration_dir": str(folder)},
        "evaluate": {"samples": 0},
        "checkpoint": {"every": 1_000_000},
        "run": {"dir": str(folder / "runs")},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML


def show(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title=f"{options.batch} pairs of 3 x {options.tokens} tokens a step")
    columns = (
        "model",
        "GPUs",
        "strategy",
        "blocks",
        "micro-batch",
        "pairs/s",
        "times one",
        "of the bound",
        "predicted",
        "compute s",
        "wait s",
        "GB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        beside = [one for one in rows if one["model"] == row["model"] and one["gpus"] == 1 and "error" not in one]
        alone = max((one["pairs_per_second"] for one in beside), default=None)
        if "error" in row:
            cells = [row["error"].splitlines()[-1][:60]]
        else:
            cells = [
                f"{row['pairs_per_second']:.3g}",
                f"{row['pairs_per_second'] / alone:.2f}" if alone else "-",
                f"{row['of_bound']:.0%}" if "of_bound" in row else "-",
                f"{row['predicted_of_measured']:.2f}" if "predicted_of_measured" in row else "-",
                *(" ".join(f"{one:.2f}" for one in row[key]) for key in ("compute_seconds", "wait_seconds")),
                " ".join(f"{one:.1f}" for one in row["peak_gb"]),
            ]
        blocks = " + ".join(map(str, row.get("blocks", []))) or "-"
        table.add_row(row["model"], str(row["gpus"]), row["strategy"], blocks, str(row["size"]), *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
