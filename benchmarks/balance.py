"""Two real ranks, one slower than the other: does the planned split keep both busy?

    python benchmarks/balance.py               skews 1, 2 and 4
    python benchmarks/balance.py --quick       skew 3 alone, fewer steps

On Linux with two cores. Each rank has a core of its own; on rank 1's core so many processes compute beside it as leave
it 1 / skew of the time. For each skew a curve of a few micro-batch sizes is measured on each rank, in rounds; then both
train: by that curve, by equal shares, and independently with nothing calibrated. Efficiency (eta) is pairs/s over the
sum of what the ranks do alone; the ideal is 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console
from rich.table import Table

from lib.config import load
from lib.errors import UserError
from lib.plan.calibration import BatchCurve, HostCalibration, curve_key, write_calibration
from lib.system import hardware, mpi_and_blas
from lib.system.network import host_name
from lib.system.records import read_records

SIZES = [1, 2, 4, 8, 16]  # pairs a micro-batch
TOKENS, VOCABULARY = 32, 256  # of a prompt and of each completion
SETTLED = 12  # first steps that do not count: the shares are corrected in them
RANK_VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def write_inputs(folder: Path, seed: int) -> list[str]:
    """A model's shape and random pairs of one length; returns the words of all runs."""
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(2, VOCABULARY) for _ in range(TOKENS)]

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rows = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(256)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"model.path={folder / 'model'}", "model.random_init=true", f"data.train={folder / 'train.jsonl'}"]
    words += [
        "train.global_batch_size=64",
        f"run.dir={folder / 'runs'}",
        "run.pages=false",
        "evaluate.samples=0",
        "data.valid=null",
        "evaluate.answers=null",
    ]
    return [*words, f"plan.calibration_dir={folder / 'calibration'}", "checkpoint.every=100000", f"train.seed={seed}"]


@contextlib.contextmanager
def busy(core: int, count: int) -> Iterator[None]:
    """So many processes that never rest on a core; they do not outlive this process."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def pinned(core: int, program: Sequence[str]) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, *program]


def curve_of(core: int, words: Sequence[str], seconds: float) -> dict[int, float]:
    """Seconds of a step by the pairs of its one micro-batch, on a core as it is now."""
    config = load.load(None, list(words))
    rows = [[TOKENS, TOKENS, TOKENS]]
    request = {"kind": "rounds", "sizes": SIZES, "rounds": 5, "seconds": seconds, "rows": rows}
    request["config"] = config.model_dump(mode="json")
    command = pinned(core, [str(ROOT / "benchmarks/probe.py"), json.dumps(request)])
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | RANK_VARIABLES, check=True)
    rounds = json.loads(done.stdout.splitlines()[-1])["rounds"]
    return {int(size): statistics.median(times) for size, times in rounds.items()}


def calibrate(folder: Path, words: Sequence[str], curves: Sequence[dict[int, float]]) -> None:
    """HOST-0.json and HOST-1.json."""
    config = load.load(None, list(words))
    key = curve_key(config.model, config.record_kind, folder / "model", 2 * TOKENS)
    for rank, curve in enumerate(curves):
        name = f"{host_name()}-{rank}"
        measured = BatchCurve.from_rates({size: size / seconds for size, seconds in curve.items()})
        stored = HostCalibration(machine=hardware.identify(name), curves=(measured.model_copy(update={"key": key}),))
        write_calibration(folder / "calibration" / f"{name}.json", stored)


def trained(folder: Path, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Both ranks, each on its core: pairs/s without the first steps, and the shares at the end."""
    program = [str(ROOT / "train.py"), *words, f"run.name={name}"]
    ranks: list[str] = []
    for core in (0, 1):
        ranks += [":"] * bool(ranks) + ["-n", "1", *pinned(core, program)]
    options = ["--bind-to", "none", "--oversubscribe", "--allow-run-as-root"]
    command = [str(mpi_and_blas.mpirun_path()), *options, *ranks]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | RANK_VARIABLES, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
        raise UserError(f"{name}: {(lines or [done.stderr])[0]}")
    logs = [list(read_records(folder / "runs" / name / "logs" / f"rank-{rank:03d}.jsonl")) for rank in (0, 1)]
    steps = [[one for one in log if one["kind"] == "step"][SETTLED:] for log in logs]
    merges = [sum(one["seconds"] + one["waited_seconds"] for one in log if one["kind"] == "merge") for log in logs]
    pairs = sum(one["pairs"] for of_rank in steps for one in of_rank)
    every = max(1, len([one for one in logs[0] if one["kind"] == "step"]))
    seconds = [sum(s["step_seconds"] for s in r) + m * len(r) / every for r, m in zip(steps, merges, strict=True)]
    plans = [one["shares"] for one in logs[0] if one["kind"] == "plan"]
    first = next(one["plan"]["shares"] for one in logs[0] if one["kind"] == "start")
    return {"pairs_per_second": pairs / max(seconds), "shares": plans[-1] if plans else first}


def row_of(folder: Path, skew: int, words: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """One skew: what the ranks do alone, and together in three ways."""
    (folder / "calibration").mkdir(exist_ok=True)
    steps = f"train.steps={options.steps}"
    with busy(1, skew - 1):
        curves = [curve_of(core, words, options.seconds) for core in (0, 1)]
        alone = [max(size / seconds for size, seconds in curve.items()) for curve in curves]
        calibrate(folder, words, curves)
        synchronous, fixed = [*words, steps, "strategy=synchronous"], ["plan.replan=false", "plan.shares=[32,32]"]
        runs = {
            "planned": trained(folder, f"planned-{skew}", synchronous),
            "equal shares": trained(folder, f"equal-{skew}", [*synchronous, *fixed]),
            "independent, nothing calibrated": trained(
                folder,
                f"independent-{skew}",
                [*words, steps, "strategy=independent", f"plan.calibration_dir={folder / 'none'}"],
            ),
        }
    for run in runs.values():
        run["efficiency"] = run["pairs_per_second"] / sum(alone)
    return {"skew": alone[0] / alone[1], "alone_pairs_per_second": alone, "runs": runs}


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="efficiency: pairs/s over the sum of what the ranks do alone")
    for column in ("rank 0 : rank 1", "alone pairs/s", "run", "shares", "pairs/s", "η"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in rows:
        for name, run in row["runs"].items():
            alone = " + ".join(f"{speed:.1f}" for speed in row["alone_pairs_per_second"])
            shares = " + ".join(map(str, run["shares"]))
            cells = [f"{row['skew']:.2f}", alone, name, shares, f"{run['pairs_per_second']:.1f}"]
            table.add_row(*cells, f"{run['efficiency']:.0%}")
    Console(width=120).print(table)


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skews", default="1,2,4", help="how many times slower rank 1 is, comma-separated")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of measuring a rank's curve")
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--quick", action="store_true", help="skew 3 alone, fewer steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.skews, options.seconds, options.steps = "3", 5.0, 30
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise UserError("this benchmark gives each of two ranks a core of its own: it needs Linux and two cores")
    if not all(word.isdigit() and int(word) for word in options.skews.split(",")):
        raise UserError(f"--skews {options.skews}: expected whole numbers from 1 on, e.g. 1,2,4")
    mpi_and_blas.prepare()
    with tempfile.TemporaryDirectory() as name:
        words = write_inputs(Path(name), options.seed)
        rows = [row_of(Path(name), int(skew), words, options) for skew in options.skews.split(",")]
    show(rows)
    print(json.dumps({"settings": vars(options), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
