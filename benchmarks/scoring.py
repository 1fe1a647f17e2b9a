"""Two ranks of 3:1 speed score a file, against the sum of what each does alone; nobody knows of the speeds beforehand.

    python benchmarks/scoring.py [--quick] [--skew 3] [--rows N]

As root on Linux with cgroup v1. Each rank has a core of its own; rank 1 gets a part of its core's time, in periods of
10 ms. Rank 0 scores all rows alone and rank 1 a quarter of them, then both together score all by pulling chunks. Measured on two
cores, 1,600 rows: alone 122.3 and 39.4 rows/s, together 159.9, 98.9 % of the sum; output the same bytes as rank 0's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import numpy as np

from benchmarks.balance import MODEL, PERIOD_MICROSECONDS, VOCABULARY, groups


def write_inputs(folder: Path, rows: int) -> None:
    """A small model's shape, and pairs of ragged lengths."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rng = np.random.default_rng(0)

    def ids() -> list[int]:
        return rng.integers(2, VOCABULARY, rng.integers(10, 80)).tolist()

    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            file.write(json.dumps({"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()}) + "\n")


def start(command: list[str], folder: Path, ranks: list[int], control: list[Path]) -> list[subprocess.Popen[str]]:
    """A command on these ranks of one world over ring, each in its control group and on its core."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in ranks:
            ports.append(stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1])
    environment = dict(os.environ)
    if len(ranks) > 1:
        (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        environment["MLX_HOSTFILE"] = str(folder / "hosts.json")
    cores = sorted(os.sched_getaffinity(0))

    def join(rank: int) -> None:
        os.sched_setaffinity(0, {cores[rank]})
        (control[rank] / "cgroup.procs").write_text(str(os.getpid()))

    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | ({"MLX_RANK": str(place)} if len(ranks) > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda rank=rank: join(rank),  # type: ignore[misc]
        )
        for place, rank in enumerate(ranks)
    ]


def score(folder: Path, name: str, data: str, ranks: list[int], control: list[Path]) -> dict[str, Any]:
    """The figures of a file scored by these ranks."""
    command = [sys.executable, "-m", "lib.evaluate", "--model", f"{folder}/model", "model.random_init=true"]
    command += ["--data", f"{folder}/{data}", "--score", "logps", "--out", f"{folder}/{name}.jsonl"]
    command += [f"data.cache_dir={folder}/cache", "evaluate.batch_size=8"]
    processes = start(command, folder, ranks, control)
    told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    figures: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute")
    parser.add_argument("--skew", type=float, default=3.0)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of no use here: nothing is drawn")
    options = parser.parse_args()
    rows = options.rows or (1200 if options.quick else 4000)
    with tempfile.TemporaryDirectory() as own, groups() as control:
        folder = Path(own)
        write_inputs(folder, rows)
        lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
        (folder / "some.jsonl").write_text("".join(lines[: rows // 4]))
        (control[1] / "cpu.cfs_quota_us").write_text(str(round(PERIOD_MICROSECONDS / options.skew)))
        alone = [score(folder, f"alone{rank}", "some.jsonl", [rank], control) for rank in range(2)]
        whole = score(folder, "whole", "rows.jsonl", [0], control)
        both = score(folder, "both", "rows.jsonl", [0, 1], control)
        same = (folder / "both.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()
    solo = [whole["rows_per_second"], alone[1]["rows_per_second"]]
    result = {
        "rows": rows,
        "skew": options.skew,
        "solo_rows_per_second": solo,
        "rows_per_second": both["rows_per_second"],
        "efficiency": both["rows_per_second"] / sum(solo),
        "chunks_by_rank": both["chunks_by_rank"],
        "output_is_one_ranks": same,
    }
    print(
        f"alone {solo[0]:.1f} and {solo[1]:.1f} rows/s, together {both['rows_per_second']:.1f}: {result['efficiency']:.1%} of the sum"
    )
    print(f"chunks by rank {both['chunks_by_rank']}; output identical to one rank's: {same}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
