"""How ranks may work together, on the quickstart's task: what each way learns, and what it sends.

    python benchmarks/strategies.py                 five seeds, about two hours on two cores
    python benchmarks/strategies.py --quick         one seed, a third of the steps, a few merges: about two minutes
    python benchmarks/strategies.py --results runs/strategies.jsonl --runs 4
                                                    at most four runs more than that file has; the table is of all in it
    python benchmarks/strategies.py --ways auto synchronous      five seeds of these two, about five minutes

Two ranks: what `strategy=auto` makes of them, in rounds as long as measured; and in unequal shares (24 + 8 of 32 pairs)
beside one: synchronous, also with compressed gradients, and independent with each merge, in one round and in eight. Exact match is that of greedy answers to 300 held-out sums; the KL is to the
model before training, per held-out completion; bytes are what rank 0 sends in steps and merges. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
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

from lib.config import load  # noqa: E402
from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from benchmarks.quickstart import QUICKSTART, run  # noqa: E402

ROUNDS = 8
SHARES = "plan.shares=[24,8]"
MERGES = ("stack", "svd", "average", "outer", "none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="these alone, as the table names them")
    parser.add_argument("--results", type=Path, help="file of the runs that are done: they are not done again")
    parser.add_argument("--runs", type=int, help="most new runs of this call")
    options = parser.parse_args()
    began = time.perf_counter()
    batch = load.load(QUICKSTART).train.global_batch_size
    steps = 21 if options.quick else 63
    ways = ways_to_train(-(-steps // ROUNDS) * batch, options.quick)
    if options.ways:
        if unknown := [name for name in options.ways if name not in ways]:
            parser.error(f"--ways {', '.join(unknown)}: not one of {', '.join(ways)}")
        ways = {name: ways[name] for name in options.ways}
    seeds = range(options.seed, options.seed + (1 if options.quick else options.seeds))
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder) / "results.jsonl"
        wanted = [
            (name, [f"train.steps={steps}", f"train.seed={seed}", *ways[name]]) for seed in seeds for name in ways
        ]
        done = finished(results)
        missing = [(name, words) for name, words in wanted if json.dumps(words) not in done]
        for number, (name, words) in enumerate(missing[: options.runs]):
            common = [f"run.dir={folder}", f"run.name=run-{number}", "evaluate.samples=0", "evaluate.every=null"]
            summary = run(1 if name == "single" else 2, [*common, "checkpoint.every=1000", *words])
            done[json.dumps(words)] = summary
            with results.open("a") as file:
                file.write(json.dumps({"words": words, "summary": summary}) + "\n")
            print(
                f"{words[1]}, {name}: exact match {summary['exact_match_after']:.1%}, kl {summary['kl']:.3f}, "
                f"{summary['bytes_sent']:,} bytes",
                flush=True,
            )
    runs = {
        name: {w[1]: done[json.dumps(w)] for n, w in wanted if n == name and json.dumps(w) in done} for name in ways
    }
    rows = [summed_up(name, of_way, runs.get("synchronous", {})) for name, of_way in runs.items() if of_way]
    table = Table(title=f"{steps} steps of {batch} pairs; two ranks, {SHARES}")
    for column in ("", "seeds", "exact match", "lowest", "highest", "points from synchronous", "KL", "loss", "MB sent"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        over = row["exact_match_over_synchronous"]
        table.add_row(
            row["way"],
            str(row["seeds"]),
            f"{row['exact_match']:.1%}",
            f"{row['exact_match_lowest']:.1%}",
            f"{row['exact_match_highest']:.1%}",
            "-" if over is None else f"{100 * over:+.1f}",
            f"{row['kl']:.3f}",
            f"{row['loss']:.4f}",
            f"{row['bytes_sent'] / 1e6:.3f}",
        )
    Console(width=140).print(table)
    seconds = time.perf_counter() - began
    left = len(wanted) - sum(map(len, runs.values()))
    print(json.dumps({"steps": steps, "seconds": seconds, "runs_left": left, "ways": rows}))


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """The summaries in a file of results, by what each run was started with."""
    if not results.exists():
        return {}
    records = [json.loads(line) for line in results.read_text().splitlines()]
    return {json.dumps(record["words"]): record["summary"] for record in records}


def ways_to_train(pairs_per_round: int, quick: bool) -> dict[str, list[str]]:
    """Words of each run, by its name."""
    apart = ["strategy=independent", SHARES, "independent.pairs_per_round=1000000"]
    in_rounds = [*apart, f"independent.pairs_per_round={pairs_per_round}"]
    ways: dict[str, list[str]] = {"single": [], "auto": ["strategy=auto"]}
    ways["synchronous"] = ["strategy=synchronous", SHARES]
    for compression in ("int8",) if quick else ("bf16", "int8", "topk"):
        ways[f"synchronous, {compression}"] = ["strategy=synchronous", SHARES, f"sync.compression={compression}"]
    for merge in ("svd",) if quick else MERGES:
        ways[f"{merge}, 1 round"] = [*apart, f"independent.merge={merge}"]
    for merge in ("outer",) if quick else MERGES[:-1]:
        ways[f"{merge}, {ROUNDS} rounds"] = [*in_rounds, f"independent.merge={merge}"]
    for merge in ("outer",) if quick else ("svd", "outer"):
        ways[f"{merge}, {ROUNDS} rounds, int8"] = [*in_rounds, f"independent.merge={merge}", "sync.compression=int8"]
    return ways


def summed_up(name: str, runs: dict[str, dict[str, Any]], synchronous: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and the range of what is learnt; of ranks that were never merged, the mean rank's.

    runs, synchronous: summaries by seed; compared are those of seeds that both have.
    """
    # Each rank has held-out figures of its own only where nothing was merged.
    learners = {s: [rank for rank in one["ranks"] if "loss" in rank] or [one] for s, one in runs.items()}
    each = {s: [rank.get("exact_match", runs[s]["exact_match_after"]) for rank in own] for s, own in learners.items()}
    over = [
        statistics.fmean(each[seed]) - synchronous[seed]["exact_match_after"] for seed in runs if seed in synchronous
    ]
    return {
        "way": name,
        "seeds": len(runs),
        "exact_match": statistics.fmean(map(statistics.fmean, each.values())),
        "exact_match_lowest": min(map(min, each.values())),
        "exact_match_highest": max(map(max, each.values())),
        "exact_match_over_synchronous": statistics.fmean(over) if over else None,
        "kl": statistics.fmean(statistics.fmean(rank["kl"] for rank in own) for own in learners.values()),
        "loss": statistics.fmean(statistics.fmean(rank["loss"] for rank in own) for own in learners.values()),
        "bytes_sent": statistics.fmean(one["bytes_sent"] for one in runs.values()),
    }


if __name__ == "__main__":
    main()
