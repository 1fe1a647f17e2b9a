"""Kills a training at random moments, with SIGKILL, resumes it, and compares every bit with a run that nobody killed.

    python benchmarks/kill_resume.py --kills 200        about ten minutes on two cores
    python benchmarks/kill_resume.py --quick            about a minute

A run is started, killed, resumed and killed again, until it has finished; then its losses, its rows and its final
weights are compared. Most kills come a random time after a random number of further records, so anywhere in training,
evaluation and the writing of checkpoints; one in eight comes while the process starts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from tests import tiny  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="12 kills")
    options = parser.parse_args()
    wanted = 12 if options.quick else options.kills
    rng, started, rows = random.Random(options.seed), time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [
            *tiny.settings(folder, rows=45),
            "train.steps=60",
            "checkpoint.every=3",
            "evaluate.every=7",
            "model.dropout=0.1",
            "--config",
            str(tiny.config_file(folder)),
        ]
        subprocess.run(command(words, folder / "runs" / "whole"), check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        reference = outcome(folder / "runs" / "whole")
        kills = 0
        while kills < wanted:
            run = folder / "runs" / f"run{len(rows)}"
            moments: list[str] = []
            while not finish_or_kill(words, run, rng, moments):
                kills += 1
            rows.append({"kills": len(moments), "moments": moments, "identical": outcome(run) == reference})
            print(f"{kills}/{wanted} kills, {sum(not row['identical'] for row in rows)} runs differ", flush=True)
    table = Table(title=f"{kills} kills")
    for column in ("run", "killed", "last record before each kill", "bit-identical"):
        table.add_column(column)
    for i, row in enumerate(rows):
        table.add_row(str(i), str(row["kills"]), ", ".join(row["moments"]), "yes" if row["identical"] else "NO")
    Console().print(table)
    different = sum(not row["identical"] for row in rows)
    print(
        json.dumps(
            {"kills": kills, "runs": len(rows), "different_runs": different, "seconds": time.perf_counter() - started}
        )
    )
    sys.exit(1 if different else 0)


def command(words: list[str], run: Path) -> list[str]:
    start = ["--resume", str(run)] if (run / "config.yaml").exists() else [*words, f"run.name={run.name}"]
    return [sys.executable, str(ROOT / "train.py"), *start]


def finish_or_kill(words: list[str], run: Path, rng: random.Random, moments: list[str]) -> bool:
    """Starts the run or resumes it; True if it finished by itself, False if it was killed, with the moment noted."""
    log = run / "logs" / "rank-000.jsonl"
    early, records, jitter = rng.random() < 1 / 8, rng.randint(1, 25), rng.uniform(0, 0.05)
    process = subprocess.Popen(
        command(words, run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if early:
        time.sleep(rng.uniform(0, 2))
    else:
        # The log is first cut back to a checkpoint: what counts is how far it goes beyond its shortest.
        shortest = length = lines(log)
        while process.poll() is None and length < shortest + records:
            time.sleep(0.002)
            length = lines(log)
            shortest = min(shortest, length)
        time.sleep(jitter)
    if process.poll() is None:
        process.kill()
        process.communicate()
        last = json.loads(log.read_bytes().split(b"\n")[-2]) if lines(log) else {"kind": "loading"}
        moments.append("starting" if early else f"{last['kind']} {last.get('step', '')}".strip())
        return False
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"a resumed run failed with status {process.returncode}: {errors}")
    return True


def lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def outcome(run: Path) -> Any:
    """The final weights' digest, and each step's loss and rows."""
    digest = hashlib.sha256((run / "adapters.safetensors").read_bytes()).hexdigest()
    return digest, [(record["step"], record["loss"], record["rows"]) for record in tiny.steps_of(run)]


if __name__ == "__main__":
    main()
