"""Kills a training at random moments, with SIGKILL, resumes it, and compares every bit with a run that nobody killed.

    python benchmarks/kill_resume.py --kills 200        about twenty minutes on two cores
    python benchmarks/kill_resume.py --quick            about a minute

A run is started, killed after a random time (while it loads, trains, evaluates, or writes a checkpoint), resumed, and
killed again, until it has finished; then its losses, its rows and its final weights are compared. The last line is
one JSON object.
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
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib import runtime  # noqa: E402

runtime.prepare()

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
        words = [*tiny.settings(folder, rows=45), "train.steps=60", "checkpoint.every=3", "evaluate.every=7", "model.dropout=0.1", "--config", str(tiny.config_file(folder))]
        seconds = timed(words, "whole")
        reference = outcome(folder / "runs" / "whole")
        kills = 0
        while kills < wanted:
            run = folder / "runs" / f"run{len(rows)}"
            moments: list[str] = []
            while not finish_or_kill(words, run, rng.uniform(0.3, 1.1) * seconds, moments):
                kills += 1
            rows.append({"kills": len(moments), "moments": moments, "identical": outcome(run) == reference})
            print(f"{kills}/{wanted} kills, {sum(not row['identical'] for row in rows)} runs differ", flush=True)
    table = Table(title=f"{kills} kills of a run of {seconds:.1f} s")
    for column in ("run", "killed", "last record before each kill", "bit-identical"):
        table.add_column(column)
    for i, row in enumerate(rows):
        table.add_row(str(i), str(row["kills"]), ", ".join(row["moments"]), "yes" if row["identical"] else "NO")
    Console().print(table)
    different = sum(not row["identical"] for row in rows)
    print(json.dumps({"kills": kills, "runs": len(rows), "different_runs": different, "seconds": time.perf_counter() - started}))
    sys.exit(1 if different else 0)


def command(words: list[str], run: Path) -> list[str]:
    start = ["--resume", str(run)] if (run / "config.yaml").exists() else [*words, f"run.name={run.name}"]
    return [sys.executable, str(ROOT / "train.py"), *start]


def timed(words: list[str], name: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, str(ROOT / "train.py"), *words, f"run.name={name}"], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.perf_counter() - started


def finish_or_kill(words: list[str], run: Path, limit: float, moments: list[str]) -> bool:
    """Lets the run go on for `limit` seconds; True if it finished by itself, else it is killed and the moment noted."""
    process = subprocess.Popen(command(words, run), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        log = run / "logs" / "rank-000.jsonl"
        last = json.loads(log.read_bytes().split(b"\n")[-2]) if log.exists() and log.read_bytes().count(b"\n") else {"kind": "loading"}
        moments.append(f"{last['kind']} {last.get('step', '')}".strip())
        return False
    if process.returncode:
        sys.exit(f"a resumed run failed with status {process.returncode}: {errors}")
    return True


def outcome(run: Path) -> Any:
    """The final weights' digest, and each step's loss and rows."""
    digest = hashlib.sha256((run / "adapters.safetensors").read_bytes()).hexdigest()
    return digest, [(record["step"], record["loss"], record["rows"]) for record in tiny.steps_of(run)]


if __name__ == "__main__":
    main()
