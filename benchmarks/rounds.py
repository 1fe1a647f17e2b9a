"""Rounds against offline DPO, over several seeds, with two controls: does it gain because of what the judge says?

    python benchmarks/rounds.py                five seeds, an hour or so on two cores
    python benchmarks/rounds.py --quick        one seed and two rounds, a few minutes

For every seed, from the same base, with the same number of updates and of samples (configs/rounds.yaml):

    rounds      pairs of the policy's own answers, renewed every round
    offline     the same, but all answers are the base's: one round of all prompts and all steps
    grpo        rounds with train.loss=grpo
    shuffled    rounds whose scores say nothing of the answers: nothing is to be gained
    length      rounds whose judge prefers long answers: the gate has to name it, or to undo what it costs

The bar: rounds, and grpo, are better than offline by 10 points or more, in the mean over seeds. The last line is one JSON
object; exit status 1 where a bar is missed. What is finished is kept in --out, and taken when it is called again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import yaml  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

BAR = 0.10


def variants(settings: dict[str, Any], rounds: int) -> dict[str, list[str]]:
    """The words of each variant. settings: those of configs/rounds.yaml."""
    prompts, batch = settings["rollouts"]["prompts"], settings["train"]["global_batch_size"]
    steps = settings["rollouts"].get("steps") or -(-prompts // batch)
    in_rounds = [f"rollouts.rounds={rounds}"]
    ungated = "rollouts.tolerance=null"
    judged = "rollouts.judge=benchmarks.round_judges:"
    return {
        "rounds": in_rounds,
        "offline": [
            "rollouts.rounds=1",
            f"rollouts.prompts={rounds * prompts}",
            f"rollouts.steps={rounds * steps}",
            ungated,
        ],
        "grpo": [*in_rounds, "train.loss=grpo", "train.beta=0.02"],
        "shuffled": [*in_rounds, f"{judged}by_chance", ungated],
        "length": [*in_rounds, f"{judged}by_length"],
    }


def run(out: Path, name: str, words: list[str]) -> dict[str, Any]:
    """One run's figures; what is finished is taken, what was begun goes on."""
    folder = out / name
    if not (folder / "summary.json").exists():
        command = ["--config", "configs/rounds.yaml", f"run.dir={out}", f"run.name={name}", "run.pages=false", *words]
        if (folder / "config.yaml").exists():
            command = ["--resume", str(folder), *(word for word in words if word.startswith("rollouts.judge="))]
        done = subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: train.py ended with status {done.returncode}\n{done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    verdicts = [json.loads(path.read_text()) for path in sorted((folder / "rounds").glob("*/round.json"))]
    return {
        "before": summary["exact_match_before"],
        "after": summary["exact_match_after"],
        "undone": sum(one["undone"] for one in verdicts),
        "warnings": [text for one in verdicts for text in one["warnings"]],
        "held_out": [one["held_out"].get("exact_match") for one in verdicts],
        "seconds": summary["wall_seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some variants")
    parser.add_argument("--out", type=Path, help="folder that keeps the runs; by default a temporary one")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    settings = yaml.safe_load((ROOT / "configs/rounds.yaml").read_text())
    seeds, rounds = (1, 2) if options.quick else (options.seeds, settings["rollouts"]["rounds"])
    out = options.out or Path(tempfile.mkdtemp())
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seed, options.seed + seeds):
        for name, words in variants(settings, rounds).items():
            if options.only and name not in options.only:
                continue
            figures = run(out, f"{name}-{seed}", [*words, f"train.seed={seed}"])
            found.setdefault(name, []).append(figures)
            print(f"seed {seed}, {name}: {figures['before']:.1%} ➜ {figures['after']:.1%}", file=sys.stderr, flush=True)
    table = Table("", "before", "after", "worst seed", "best seed", "undone", "named", "seconds")
    means = {name: statistics.mean(one["after"] for one in each) for name, each in found.items()}
    for name, each in found.items():
        after = [one["after"] for one in each]
        cells = [f"{value:.1%}" for value in (each[0]["before"], means[name], min(after), max(after))]
        named = sum(bool(one["warnings"]) for one in each)
        undone, seconds = sum(one["undone"] for one in each), sum(one["seconds"] for one in each)
        table.add_row(name, *cells, str(undone), f"{named} of {len(each)}", f"{seconds:.0f}")
    Console(width=110).print(table)
    bars = {}
    if "offline" in means:
        bars |= {name: means[name] >= means["offline"] + BAR for name in ("rounds", "grpo") if name in means}
    if "shuffled" in found:
        bars["shuffled"] = all(one["after"] <= one["before"] + 0.03 for one in found["shuffled"])
    if "length" in found:
        bars["length"] = all(one["warnings"] or one["undone"] for one in found["length"])
    result = {"benchmark": "rounds", "seeds": seeds, "rounds": rounds, "means": means, "bars": bars, "runs": found}
    print(json.dumps(result))
    return 0 if options.quick or all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
