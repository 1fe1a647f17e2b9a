"""Two hosts on a cable, one of them three times slower: a pipeline against its schedule's bound, and against parts of blocks.

    python benchmarks/pipeline.py              about ten minutes on two cores, as root, on Linux
    python benchmarks/pipeline.py --quick      about a minute and a half: one link, fewer steps

Two hosts made of network namespaces (tests/cluster.py), the second with a third of the first one's CPU time, over MLX's ring.
On each link the same model trains pipelined, cut 3 to 1, and sharded 3 to 1. The bound of the schedule is 1F1B played with the
seconds that each rank's steps computed (lib/plan/pipeline_schedule.py), without any link: what no order of the same passes on
these two hosts can be much faster than. Bytes are those that rank 0 sent in a step; the formula's are the activations at the
cut, one way, for the micro-batches of the step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from lib.plan.pipeline_schedule import Hop, depths, step_seconds  # noqa: E402
from lib.telemetry.run_records import read_records  # noqa: E402
from tests.cluster import Host, cluster  # noqa: E402

PORT = 5200
TOKENS, VOCABULARY, HIDDEN = 32, 256, 128  # tokens of a prompt and of each completion
BLOCKS, PAIRS, MICRO_BATCHES = 8, 2, 16  # pairs of a micro-batch
WARM = 2  # first steps that do not count
MODEL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": BLOCKS,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the link, in tc's words")
    parser.add_argument("--quota", type=float, default=1 / 3, help="cores' worth of CPU time of the second host")
    parser.add_argument("--steps", type=int, default=None, help="of a run (default 12)")
    parser.add_argument("--quick", action="store_true", help="the first rate, 5 steps")
    options = parser.parse_args()
    steps = options.steps or (5 if options.quick else 12)
    rates = options.rates[:1] if options.quick else options.rates
    rows = [row for rate in rates for row in on_link(rate, options.quota, steps, options.seed)]
    show(rows, options.quota)
    print(json.dumps({"quota": options.quota, "steps": steps, "rows": rows}))


def on_link(rate: str, quota: float, steps: int, seed: int) -> list[dict[str, Any]]:
    """Both strategies on one link."""
    ways = {"pipelined": f"[{BLOCKS * 3 // 4},{BLOCKS // 4}]", "sharded": "[3,1]"}
    rows = []
    with cluster(hosts=2, quotas=(1.0, quota), rate=rate) as hosts:
        for number, (strategy, shares) in enumerate(ways.items()):
            count = steps if strategy == "pipelined" else max(WARM + 2, steps // 3)
            words = [f"strategy={strategy}", f"plan.shares={shares}", f"train.steps={count}", f"train.seed={seed}"]
            logs = train(hosts, [*words, f"run.name={strategy}"], PORT + 10 * number, seed)
            rows.append(figures(rate, strategy, logs))
    return rows


def figures(rate: str, strategy: str, logs: list[Path]) -> dict[str, Any]:
    """Medians over a run's steps."""
    steps = [[one for one in read_records(log) if one["kind"] == "step"][WARM:] for log in logs]

    def median(rank: int, key: str) -> float:
        return statistics.median(one[key] for one in steps[rank])

    seconds = statistics.median(
        max(of_ranks) for of_ranks in zip(*([s["step_seconds"] for s in r] for r in steps), strict=False)
    )
    row: dict[str, Any] = {
        "rate": rate,
        "strategy": strategy,
        "pairs_per_second": PAIRS * MICRO_BATCHES / seconds,
        "step_seconds": seconds,
        "compute_seconds": [median(rank, "compute_seconds") for rank in range(2)],
        "wait_seconds": [median(rank, "wait_seconds") for rank in range(2)],
        "bytes_per_step": median(0, "bytes_sent"),
    }
    if strategy == "pipelined":
        passes = [compute / MICRO_BATCHES for compute in row["compute_seconds"]]
        halves = [one / 2 for one in passes]  # forward and backward: their sum is what counts
        bound = step_seconds(halves, halves, [Hop()], depths(2), MICRO_BATCHES)
        row |= {"bound_seconds": bound, "of_bound": bound / seconds}
        row["formula_bytes"] = median(0, "padded_tokens") * HIDDEN * 4
    return row


def show(rows: list[dict[str, Any]], quota: float) -> None:
    table = Table(
        title=f"two hosts, the second with {quota:.2g} of a core; {MICRO_BATCHES} micro-batches of {PAIRS} pairs"
    )
    for column in (
        "link",
        "strategy",
        "pairs/s",
        "step s",
        "compute s",
        "wait s",
        "of the bound",
        "MB a step",
        "formula",
    ):
        table.add_column(column, justify="right" if column not in ("link", "strategy") else "left")
    for row in rows:
        table.add_row(
            row["rate"],
            row["strategy"],
            f"{row['pairs_per_second']:.3g}",
            f"{row['step_seconds']:.3g}",
            " ".join(f"{one:.2f}" for one in row["compute_seconds"]),
            " ".join(f"{one:.2f}" for one in row["wait_seconds"]),
            f"{row['of_bound']:.0%}" if "of_bound" in row else "-",
            f"{row['bytes_per_step'] / 1e6:.3g}",
            f"{row['formula_bytes'] / 1e6:.3g}" if "formula_bytes" in row else "-",
        )
    Console(width=140).print(table)


def train(hosts: list[Host], words: list[str], port: int, seed: int) -> list[Path]:
    """One run over MLX's ring, a rank a host; their logs."""
    addresses = json.dumps([[f"{host.address}:{port + rank}"] for rank, host in enumerate(hosts)])
    processes = []
    for rank, host in enumerate(hosts):
        write_inputs(host.outside, seed)
        (host.outside / "ring.json").write_text(addresses)
        variables = dict(os.environ) | {"MLX_HOSTFILE": str(host.disk / "ring.json"), "MLX_RANK": str(rank)}
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(host.disk / "run.yaml")]
        command += [f"run.dir={host.disk}/runs", f"plan.calibration_dir={host.disk}", *words]
        processes.append(host.start(command, env=variables, cwd=ROOT))
    for process in processes:
        finished(process)
    name = next(word.partition("=")[2] for word in words if word.startswith("run.name="))
    return [host.outside / "runs" / name / f"logs/rank-{rank:03d}.jsonl" for rank, host in enumerate(hosts)]


def write_inputs(folder: Path, seed: int) -> None:
    """A random model's shape, pairs of one length, and the settings of all runs."""
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(2, VOCABULARY) for _ in range(TOKENS)]

    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(MODEL))
    rows = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(PAIRS * MICRO_BATCHES)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    disk = "." if not folder.is_absolute() else str(folder)
    settings = {
        "model": {"path": f"{disk}/model", "random_init": True},
        "data": {"train": f"{disk}/train.jsonl", "max_length": 2 * TOKENS},
        "train": {"global_batch_size": PAIRS * MICRO_BATCHES, "loss": "simpo"},
        "plan": {"micro_batch_sizes": [PAIRS]},
        "evaluate": {"samples": 0},
        "checkpoint": {"every": 1_000_000},
        "run": {"log_every": 1_000_000},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML


def finished(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=900)
    if process.returncode:
        sys.exit(errors)


if __name__ == "__main__":
    main()
