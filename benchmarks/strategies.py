"""How ranks may work together, on the quickstart's task: what each way learns, and what it sends.

    python benchmarks/strategies.py                 five seeds, about an hour on two cores
    python benchmarks/strategies.py --quick         one seed, a third of the steps, a few merges: about two minutes

Two ranks of unequal shares (24 + 8 of 32 pairs) beside one: synchronous, also with compressed gradients, and independent
with each merge, in one round and in eight. Exact match is that of greedy answers to 300 held-out sums; the KL is to the
model before training, per held-out completion; bytes are what rank 0 sends in steps and merges. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib import config, runtime  # noqa: E402

runtime.prepare()

QUICKSTART = ROOT / "configs/quickstart.yaml"
ROUNDS = 8
SHARES = "plan.shares=[24,8]"
MERGES = ("stack", "svd", "average", "outer", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    batch = config.load(QUICKSTART).train.global_batch_size
    steps = 21 if options.quick else 63
    ways = ways_to_train(-(-steps // ROUNDS) * batch, options.quick)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + (1 if options.quick else options.seeds)):
            for number, (name, words) in enumerate(ways.items()):
                common = [
                    f"train.seed={seed}",
                    f"train.steps={steps}",
                    f"run.dir={folder}",
                    f"run.name=seed-{seed}-way-{number}",
                ]
                common += ["evaluate.samples=0", "evaluate.every=null", "checkpoint.every=1000"]
                runs[name].append(run(1 if name == "single" else 2, [*common, *words]))
                latest = runs[name][-1]
                print(
                    f"seed {seed}, {name}: exact match {latest['exact_match_after']:.1%}, kl {latest['kl']:.3f}, "
                    f"{latest['bytes_sent']:,} bytes",
                    flush=True,
                )
    rows = [summed_up(name, of_way, runs["synchronous"]) for name, of_way in runs.items()]
    table = Table(title=f"{len(runs['single'])} seeds, {steps} steps of {batch} pairs; two ranks, {SHARES}")
    for column in ("", "exact match", "lowest", "highest", "points from synchronous", "KL", "loss", "MB sent"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['exact_match']:.1%}",
            f"{row['exact_match_lowest']:.1%}",
            f"{row['exact_match_highest']:.1%}",
            f"{100 * row['exact_match_over_synchronous']:+.1f}",
            f"{row['kl']:.3f}",
            f"{row['loss']:.4f}",
            f"{row['bytes_sent'] / 1e6:.3f}",
        )
    Console(width=140).print(table)
    seconds = time.perf_counter() - began
    print(json.dumps({"seeds": len(runs["single"]), "steps": steps, "seconds": seconds, "ways": rows}))


def ways_to_train(pairs_per_round: int, quick: bool) -> dict[str, list[str]]:
    """Words of each run, by its name."""
    apart = ["strategy=independent", SHARES, "independent.pairs_per_round=1000000"]
    in_rounds = [*apart, f"independent.pairs_per_round={pairs_per_round}"]
    ways: dict[str, list[str]] = {"single": [], "synchronous": [SHARES]}
    for compression in ("int8",) if quick else ("bf16", "int8", "topk"):
        ways[f"synchronous, {compression}"] = [SHARES, f"sync.compression={compression}"]
    for merge in ("svd",) if quick else MERGES:
        ways[f"{merge}, 1 round"] = [*apart, f"independent.merge={merge}"]
    for merge in ("outer",) if quick else MERGES[:-1]:
        ways[f"{merge}, {ROUNDS} rounds"] = [*in_rounds, f"independent.merge={merge}"]
    for merge in ("outer",) if quick else ("svd", "outer"):
        ways[f"{merge}, {ROUNDS} rounds, int8"] = [*in_rounds, f"independent.merge={merge}", "sync.compression=int8"]
    return ways


def summed_up(name: str, runs: list[dict[str, Any]], synchronous: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the range of what is learnt; of ranks that were never merged, the mean rank's."""
    each = [[rank["exact_match"] for rank in one.get("ranks", [])] or [one["exact_match_after"]] for one in runs]
    matches = [statistics.fmean(ranks) for ranks in each]
    return {
        "way": name,
        "exact_match": statistics.fmean(matches),
        "exact_match_lowest": min(map(min, each)),
        "exact_match_highest": max(map(max, each)),
        "exact_match_over_synchronous": statistics.fmean(matches)
        - statistics.fmean(one["exact_match_after"] for one in synchronous),
        "kl": statistics.fmean(statistics.fmean(r["kl"] for r in one.get("ranks", [one])) for one in runs),
        "loss": statistics.fmean(statistics.fmean(r["loss"] for r in one.get("ranks", [one])) for one in runs),
        "bytes_sent": statistics.fmean(one["bytes_sent"] for one in runs),
    }


def run(ranks: int, words: list[str]) -> dict[str, Any]:
    """One quickstart as a user starts it; its summary."""
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(QUICKSTART), *words]
    if ranks > 1:
        command = [str(runtime.mpirun_path()), "-n", str(ranks), *command]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(words)}: status {result.returncode}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
