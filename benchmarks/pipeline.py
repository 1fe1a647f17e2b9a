"""Two hosts on a cable, one of them three times slower: a pipeline against its schedule's bound, its prediction, and sharding.

    python benchmarks/pipeline.py              about fifteen minutes on two cores, as root, on Linux
    python benchmarks/pipeline.py --quick      about three minutes: one link, one width, fewer steps
    python benchmarks/pipeline.py --rounds 3 --rates 1gbit --hidden 256     every way three times, medians of the rounds

Two hosts made of network namespaces (tests/cluster.py), the second with a third of the first one's CPU time, over MLX's ring.
On each link and for each width, both hosts are calibrated (benchmarks/calibrate.py --quick --largest 4) and the same model trains
pipelined as planned, pipelined by other cuts and micro-batches, and sharded 3 to 1. The hosts are calibrated again before every
run, because a shared machine is faster in one minute than in the next: a promise is judged by the minute that it knew. The bound of the schedule is 1F1B played
with the seconds that each rank's steps computed (lib/plan/pipeline.py), without any link: what no order of the same
passes on these two hosts can be much faster than. Predicted is the step that the plan promised before the run. Bytes are those
that rank 0 sent in a step; the formula's are the activations at the cut, one way, for the micro-batches of the step. The last
line is one JSON object.
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

from benchmarks.gpus import best_bound  # noqa: E402
from lib.system.records import read_records  # noqa: E402
from tests.cluster import Host, cluster  # noqa: E402

PORT = 5200
TOKENS, VOCABULARY = 32, 256  # tokens of a prompt and of each completion
BLOCKS, PAIRS, MICRO_BATCHES = 8, 2, 16  # pairs of a micro-batch
WARM = 2  # first steps that do not count
OTHERS = (([7, 1], 2), ([6, 2], 1), ([6, 2], 4), ([5, 3], 2), ([4, 4], 2))  # cuts and micro-batches, for predictions


def model_of(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": BLOCKS,
        "intermediate_size": 2 * hidden,
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
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256], help="widths of the model")
    parser.add_argument("--quota", type=float, default=1 / 3, help="cores' worth of CPU time of the second host")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every way; the table has their medians")
    parser.add_argument("--steps", type=int, default=None, help="of a run (default 12)")
    parser.add_argument("--quick", action="store_true", help="the first rate and width, two other cuts, 5 steps")
    options = parser.parse_args()
    steps = options.steps or (5 if options.quick else 12)
    count = 1 if options.quick else None
    rows = [
        row
        for hidden in options.hidden[:count]
        for rate in options.rates[:count]
        for row in on_link(rate, hidden, options, steps)
    ]
    show(rows, options.quota)
    print(json.dumps({"quota": options.quota, "steps": steps, "rows": rows}))


def on_link(rate: str, hidden: int, options: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    """Calibrates, then trains in every way on one link."""
    ways: list[tuple[str, list[int] | None, int]] = [("pipelined", None, PAIRS), ("sharded", [3, 1], PAIRS)]
    others = OTHERS[:2] if options.quick else OTHERS
    ways += [("pipelined", *other) for other in others]
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in range(len(ways))}
    with cluster(hosts=2, quotas=(1.0, options.quota), rate=rate) as hosts:
        for host in hosts:
            write_inputs(host.outside, hidden, options.seed)
        for run in range(options.rounds * len(ways)):
            strategy, shares, size = ways[run % len(ways)]
            port, calibration = PORT + 20 * run, f"calibration-{run}"
            words = [f"--folder={{disk}}/{calibration}", f"--largest={2 * PAIRS}"]  # a slow host has time for no more
            on_ring(hosts, ["benchmarks/calibrate.py", "--quick"], words, port)
            count = max(WARM + 2, steps // 3) if strategy == "sharded" else steps
            words = [f"strategy={strategy}", f"train.steps={count}", f"train.seed={options.seed}"]
            words += [f"run.name=way-{run}", f"plan.micro_batch_sizes=[{size}]"]
            words += [f"plan.shares={json.dumps(shares)}"] if shares else []
            words += ["run.dir={disk}/runs", f"plan.calibration_dir={{disk}}/{calibration}"]
            on_ring(hosts, ["train.py"], words, port + 10)
            logs = [host.outside / f"runs/way-{run}/logs/rank-{rank:03d}.jsonl" for rank, host in enumerate(hosts)]
            row = {"rate": rate, "hidden": hidden, "strategy": strategy, "pairs": size, **figures(hidden, size, logs)}
            found[run % len(ways)].append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return [median_of(of_way) for of_way in found.values()]


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round whose step took the median time, with the medians of what is compared with it."""
    middle = sorted(rounds, key=lambda row: row["step_seconds"])[(len(rounds) - 1) // 2]
    compared = [key for key in ("predicted_of_measured", "of_bound") if key in middle]
    return middle | {
        key: statistics.median(row[key] for row in rounds if row.get("blocks") == middle.get("blocks"))
        for key in compared
    }


def figures(hidden: int, size: int, logs: list[Path]) -> dict[str, Any]:
    """Medians over a run's steps."""
    steps = [[one for one in read_records(log) if one["kind"] == "step"][WARM:] for log in logs]

    def median(rank: int, key: str) -> float:
        return statistics.median(one[key] for one in steps[rank])

    seconds = statistics.median(
        max(of_ranks) for of_ranks in zip(*([s["step_seconds"] for s in r] for r in steps), strict=False)
    )
    row: dict[str, Any] = {
        "pairs_per_second": PAIRS * MICRO_BATCHES / seconds,
        "step_seconds": seconds,
        "compute_seconds": [median(rank, "compute_seconds") for rank in range(2)],
        "wait_seconds": [median(rank, "wait_seconds") for rank in range(2)],
        "bytes_per_step": median(0, "bytes_sent"),
    }
    plan = json.loads((logs[0].parents[1] / "plan.json").read_text())
    row["predicted_seconds"] = next(way["step_seconds"] for way in plan["predictions"] if way["chosen"])
    if row["predicted_seconds"]:
        row["predicted_of_measured"] = row["predicted_seconds"] / seconds
    if plan["strategy"] == "pipelined":
        micro_batches = PAIRS * MICRO_BATCHES // size
        blocks = [one["blocks"] for one in plan["stages"]]
        bound = best_bound(blocks, row["compute_seconds"], micro_batches)
        row |= {"bound_seconds": bound, "of_bound": bound / seconds, "blocks": blocks}
        row["in_flight"] = plan["stages"][0]["in_flight"]
        row["formula_bytes"] = median(0, "padded_tokens") * hidden * 4
    return row


def show(rows: list[dict[str, Any]], quota: float) -> None:
    table = Table(title=f"two hosts, the second with {quota:.2g} of a core; {PAIRS * MICRO_BATCHES} pairs a step")
    left = ("link", "strategy")
    columns = ("link", "hidden", "strategy", "blocks", "micro-batch", "in flight", "pairs/s", "step s", "predicted")
    for column in (*columns, "compute s", "wait s", "of the bound", "MB a step", "formula"):
        table.add_column(column, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(
            row["rate"],
            str(row["hidden"]),
            row["strategy"],
            " + ".join(map(str, row.get("blocks", "-"))),
            str(row["pairs"]),
            str(row.get("in_flight", "-")),
            f"{row['pairs_per_second']:.3g}",
            f"{row['step_seconds']:.3g}",
            f"{row['predicted_of_measured']:.2f}" if "predicted_of_measured" in row else "-",
            " ".join(f"{one:.2f}" for one in row["compute_seconds"]),
            " ".join(f"{one:.2f}" for one in row["wait_seconds"]),
            f"{row['of_bound']:.1%}" if "of_bound" in row else "-",
            f"{row['bytes_per_step'] / 1e6:.3g}",
            f"{row['formula_bytes'] / 1e6:.3g}" if "formula_bytes" in row else "-",
        )
    Console(width=160).print(table)


def on_ring(hosts: list[Host], program: list[str], words: list[str], port: int) -> None:
    """Runs a program of this repository over MLX's ring, a rank a host; "{disk}" in words is a host's folder."""
    addresses = json.dumps([[f"{host.address}:{port + rank}"] for rank, host in enumerate(hosts)])
    processes = []
    for rank, host in enumerate(hosts):
        (host.outside / "ring.json").write_text(addresses)
        variables = dict(os.environ) | {"MLX_HOSTFILE": str(host.disk / "ring.json"), "MLX_RANK": str(rank)}
        command = [sys.executable, str(ROOT / program[0]), *program[1:], "--config", str(host.disk / "run.yaml")]
        command += [word.format(disk=host.disk) for word in words]
        processes.append(host.start(command, env=variables, cwd=ROOT))
    for process in processes:
        finished(process)


def write_inputs(folder: Path, hidden: int, seed: int) -> None:
    """A random model's shape, pairs of one length, and the settings of all runs."""
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(2, VOCABULARY) for _ in range(TOKENS)]

    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/config.json").write_text(json.dumps(model_of(hidden)))
    rows = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(PAIRS * MICRO_BATCHES)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    disk = "." if not folder.is_absolute() else str(folder)
    settings = {
        "model": {"path": f"{disk}/model", "random_init": True},
        "data": {"train": f"{disk}/train.jsonl", "max_length": 2 * TOKENS},
        "train": {"global_batch_size": PAIRS * MICRO_BATCHES, "loss": "simpo"},
        "evaluate": {"samples": 0},
        "checkpoint": {"every": 1_000_000},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML


def finished(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=900)
    if process.returncode:
        sys.exit(errors)


if __name__ == "__main__":
    main()
