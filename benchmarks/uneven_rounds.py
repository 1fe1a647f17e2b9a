"""Rounds on two ranks of 3:1 speed, against the sum of what each does alone: sampling, and the whole run.

    python benchmarks/uneven_rounds.py               about nine minutes
    python benchmarks/uneven_rounds.py --overlap     with rollouts.overlap=true
    python benchmarks/uneven_rounds.py --judge 0.02  and a judge that takes so many seconds for each answer
    python benchmarks/uneven_rounds.py --quick       a minute: fewer and smaller rounds

As root on Linux with two cores and cgroup v1. Each rank has a core of its own; rank 1 gets a part of its core's time, in
periods of 10 ms. First both run rounds at the same time, each by itself: what two cores of one chip take from each other
is then the same as when they run rounds together, which comes next. Figures are medians over rounds, without the first and
the last. The answers, scores and pairs have to be those of rank 0 alone, bit for bit, for as long as both draw them with the
same weights: in the first round, with --overlap in the first two. (After that weights differ by roundings: a sum of gradients over two
ranks is added up in another order.)

Bars: sampling at 0.95 or more of the summed speed, whole rounds at 0.9. The last line is one JSON object; exit status 1
where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.balance import PERIOD_MICROSECONDS, groups  # noqa: E402
from benchmarks.scoring import start  # noqa: E402
from lib.system.records import read_records  # noqa: E402

BARS = {"sampling": 0.95, "whole": 0.9}
ALONE = (8, 4)  # rounds of each rank by itself: about as long, where one is three times slower
TOGETHER = 6
FILES = ("samples.jsonl", "scores.jsonl", "pairs.jsonl")


def words_of(options: argparse.Namespace, folder: Path) -> list[str]:
    """The settings of all runs."""
    prompts, samples, limit = (64, 4, 32) if options.quick else (256, 4, 96)
    return [
        *("--config", "configs/rounds.yaml", f"run.dir={folder}", "run.pages=false", f"train.seed={options.seed}"),
        *(f"data.cache_dir={folder}/cache", f"plan.calibration_dir={folder}/calibration", "evaluate.samples=0"),
        *(
            f"rollouts.prompts={prompts}",
            f"rollouts.samples={samples}",
            f"rollouts.batch_size={prompts * samples // 32}",
        ),
        *("rollouts.steps=8", "train.learning_rate=1e-4", "train.global_batch_size=32"),
        *(f"evaluate.answers_limit={limit}", "strategy=synchronous"),
        *(f"rollouts.overlap={str(options.overlap).lower()}", "rollouts.tolerance=null"),
        *(["rollouts.judge=benchmarks.round_judges:slowly"] if options.judge else []),
    ]


def run(
    folder: Path, options: argparse.Namespace, control: list[Path], runs: dict[str, tuple[list[int], int]]
) -> dict[str, list[dict[str, Any]]]:
    """Runs of some ranks each, at the same time: their rounds' records on their first rank, by name.

    runs: of each its ranks, and rounds.
    """
    started = {}
    for name, (ranks, rounds) in runs.items():
        own = [f"run.name={name}", f"rollouts.rounds={rounds}"]
        own += [f"plan.shares=[{options.shares}]"] if len(ranks) > 1 else []
        command = [sys.executable, "train.py", *words_of(options, folder), *own]
        started[name] = start(command, folder, ranks, control)
    try:
        for name, processes in started.items():
            for process in processes:
                told = process.communicate()[0]
                if process.returncode:
                    raise SystemExit(f"{name}: train.py ended with status {process.returncode}\n{told[-2000:]}")
    finally:
        for process in (one for processes in started.values() for one in processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
    logs = {name: folder / name / "logs" / "rank-000.jsonl" for name in runs}
    return {name: [one for one in read_records(log) if one["kind"] == "round"] for name, log in logs.items()}


def speeds(records: list[dict[str, Any]]) -> dict[str, float]:
    """Answers a second while they are drawn, and rounds a second; and the seconds of a round's parts."""
    inner = records[1:-1]
    drawn = [one["answers"]["samples"] / (one["sampling_seconds"] + one["waiting_seconds"]) for one in inner]
    parts = ("sampling", "waiting", "judging", "training", "round")
    seconds = {f"{part}_seconds": statistics.median(one[f"{part}_seconds"] for one in inner) for part in parts}
    return {"sampling": statistics.median(drawn), "whole": 1 / seconds["round_seconds"], **seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skew", type=float, default=3.0)
    parser.add_argument("--shares", default="24,8", help="plan.shares of the two ranks together")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument(
        "--judge", type=float, default=0.0, metavar="SECONDS", help="that the judge takes for an answer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the control groups go, too
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "JUDGE_SECONDS": f"{options.judge:g}"}
    with tempfile.TemporaryDirectory() as name, groups() as control:
        if not control:
            raise SystemExit("this benchmark slows a rank down by a quota: it needs root and cgroup v1")
        folder = Path(name)
        (control[1] / "cpu.cfs_quota_us").write_text(str(round(PERIOD_MICROSECONDS / options.skew)))
        alone = run(folder, options, control, {f"alone-{rank}": ([rank], ALONE[rank]) for rank in range(2)})
        together = run(folder, options, control, {"together": ([0, 1], TOGETHER)})["together"]
        same = {
            f"{number}/{file}": (folder / "together/rounds" / f"{number:04d}" / file).read_bytes()
            == (folder / "alone-0/rounds" / f"{number:04d}" / file).read_bytes()
            for number in range(1, 2 + options.overlap)
            for file in FILES
        }
    of = {**{name: speeds(records) for name, records in alone.items()}, "together": speeds(together)}
    efficiency = {name: of["together"][name] / sum(of[one][name] for one in alone) for name in BARS}
    table = Table("", "answers/s", "rounds/min", "sampling s", "waiting s", "judging s", "training s", "round s")
    for name, figures in of.items():
        parts = [f"{value:.2f}" for part, value in figures.items() if part.endswith("_seconds")]
        table.add_row(name, f"{figures['sampling']:.1f}", f"{60 * figures['whole']:.2f}", *parts)
    Console(width=110).print(table)
    print(f"of the summed speed: sampling {efficiency['sampling']:.1%}, whole rounds {efficiency['whole']:.1%}")
    print(f"the same bits as rank 0 alone: {same}")
    bars = {name: efficiency[name] >= bar for name, bar in BARS.items()} | {"same": all(same.values())}
    result = {"benchmark": "uneven_rounds", "skew": options.skew, "overlap": options.overlap, "judge": options.judge}
    print(json.dumps({**result, "seed": options.seed, "efficiency": efficiency, "bars": bars, "ranks": of}))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
