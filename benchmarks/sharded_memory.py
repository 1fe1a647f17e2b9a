"""What ranks of `strategy=sharded` hold while they train, against the plan: `peak_memory_bytes` of the steps on real ranks.

    mpirun -n 2 python benchmarks/sharded_memory.py              LoRA and full training, equal and unequal parts: two minutes
    mpirun -n 3 python benchmarks/sharded_memory.py --quick      full training of a small model, unequal parts

What a rank keeps is its part of the weights, and what all keep whole: embedding, head, norms (`whole`), for full training their
gradients and optimizer as well, and the activations between blocks. `beyond` is the measured peak less all that is whole of weights and
training, and `of all` what part of all ranks' sum that is, which should be the planned part. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib.system import mpi_and_blas  # noqa: E402

LAUNCH = mpi_and_blas.launch_environment()
mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import train as script  # noqa: E402
from lib.config import load  # noqa: E402
from lib.distributed import world as sync  # noqa: E402
from lib.distributed.world import World  # noqa: E402
from tests import tiny  # noqa: E402

UNEVEN = {2: [1, 3], 3: [5, 2, 3], 4: [1, 2, 2, 3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="size of the model")
    parser.add_argument("--quick", action="store_true", help="a model of 256, full training in unequal parts alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    world = sync.start(LAUNCH, 120)
    if world.size == 1:
        sys.exit("error: a model is divided among ranks; start this under mpirun -n 2")
    hidden = 256 if options.quick else options.hidden
    weights = UNEVEN.get(world.size, list(range(1, world.size + 1)))
    cases = (
        [("full", weights)]
        if options.quick
        else [(m, w) for m in ("full", "lora") for w in ([1] * world.size, weights)]
    )
    rows = [row for method, of_ranks in cases for row in measured(world, hidden, method, of_ranks, options.seed)]
    if world.rank:
        return
    table = Table(title=f"{world.size} ranks, Llama of hidden size {hidden}, float32, MB")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)
    print(json.dumps({"world_size": world.size, "hidden_size": hidden, "ranks": rows}))


def measured(world: World, hidden: int, method: str, weights: list[int], seed: int) -> list[dict[str, Any]]:
    """One row a rank."""
    with tempfile.TemporaryDirectory() as mine, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(world.broadcast_text(mine))
        words = settings(world, folder, hidden, method, weights, seed)
        gc.collect()
        mx.clear_cache()
        script.train(load.load(None, words), world, resume=False, dry_run=False)
        plan = json.loads((folder / "runs/run/plan.json").read_text())
        peak = max(step["peak_memory_bytes"] for step in tiny.steps_of(folder / "runs/run", world.rank))
        told = world.gather_text(json.dumps(peak))
    peaks = [int(text) for text in told]
    rows = []
    for rank, (part, peak) in enumerate(zip(plan["parts"], peaks, strict=True)):
        whole = part["whole_bytes"] * (1 + part["training_bytes"] / (part["divided_bytes"] + part["whole_bytes"]))
        planned = part["divided_bytes"] + part["whole_bytes"] + part["training_bytes"]
        rows.append(
            {
                "method": method,
                "rank": rank,
                "part": part["share"],
                "planned": planned / 1e6,
                "whole": whole / 1e6,
                "peak": peak / 1e6,
                "peak_over_planned": peak / planned,
                "beyond": (peak - whole) / 1e6,
            }
        )
    total = sum(row["beyond"] for row in rows)
    for row in rows:
        row["of_all"] = row["beyond"] / total
    return rows


def settings(world: World, folder: Path, hidden: int, method: str, weights: list[int], seed: int) -> list[str]:
    """The same words on every rank; rank 0 writes the files."""
    words: list[str] = []
    if world.rank == 0:
        words = [*tiny.settings(folder, rows=4), "data.valid=null", "run.name=run", f"train.seed={seed}"]
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 8, "vocab_size": 256}
        tiny.model_folder(folder / "model", **sizes, num_attention_heads=16, num_key_value_heads=8)
        words += ["strategy=sharded", f"plan.shares={weights}", f"model.method={method}", "train.steps=2"]
        words += ["plan.micro_batch_sizes=[1]", "train.global_batch_size=2", "evaluate.samples=0", "model.rank=1"]
    return list(json.loads(world.broadcast_text(json.dumps(words))))


if __name__ == "__main__":
    main()
