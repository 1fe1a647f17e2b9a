"""Rounds and GRPO against offline DPO, over several seeds, with two controls: do they gain because of what the judge says?

    python benchmarks/rounds.py                          five seeds: about two hours on one core
    python benchmarks/rounds.py --seeds 1 2              two of them; what is finished is kept in --out, and taken
    python benchmarks/rounds.py --sweep offline grpo     where the learning rates and betas below come from
    python benchmarks/rounds.py --quick                  one seed and two rounds, a minute and a half

For every seed, from the same base, with the same number of updates and of samples (configs/rounds.yaml):

    rounds      pairs of the policy's own answers, renewed every round
    offline     the same, but all answers are the base's: one round of all prompts and all steps
    grpo        rounds with train.loss=grpo
    shuffled    rounds whose scores are permuted among the answers to a prompt: nothing is to be gained
    length      rounds whose judge prefers long answers: the gate has to name it, to undo a round and to end the run

Nothing but `length` has a gate, which would choose by the figures that are compared here. The bars: rounds, and grpo, are
better than offline by 10 points or more, in the mean over seeds; shuffled scores gain 3 points at most, in the mean; the
gate notices `length` with every seed. The last line is one JSON object; exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.config import load  # noqa: E402

CONFIG = ROOT / "configs/rounds.yaml"
BAR, NOTHING = 0.10, 0.03  # what is gained over offline DPO, at least; and by scores that say nothing, at most
ANSWERS = 300  # held-out, all that there are: a standard error of 3 points
# The best so far of a sweep (--sweep), each for itself; rounds take those of configs/rounds.yaml.
BEST = {"offline": (1e-3, 0.1), "grpo": (2e-3, 0.0)}
RATES = (1e-3, 2e-3, 4e-3)
GRPO = ("train.loss=grpo", "train.rpo_alpha=0", "train.global_batch_size=16", "rollouts.filter_groups=true")
BETAS = {"rounds": (0.1,), "offline": (0.1,), "grpo": (0.0,)}


@dataclass(frozen=True)
class Outcome:
    """One run. held_out: the exact match after each round; named: what the gate says of hacking, and when."""

    before: float
    after: float
    held_out: list[float | None]
    pairs: list[int]
    undone: list[int]
    named: list[str]
    seconds: float


def variants(rounds: int) -> dict[str, list[str]]:
    """The words of each variant."""
    settings = load.load(CONFIG)
    prompts, steps = settings.rollouts.prompts, settings.steps_per_round
    renewed, ungated = f"rollouts.rounds={rounds}", "rollouts.tolerance=null"
    once = ["rollouts.rounds=1", f"rollouts.prompts={rounds * prompts}", f"rollouts.steps={rounds * steps}"]
    judge = "rollouts.judge=benchmarks.round_judges:"
    named = {
        "rounds": [renewed, ungated],
        "offline": [*once, ungated, *_optimised(*BEST["offline"])],
        "grpo": [renewed, ungated, *GRPO, *_optimised(*BEST["grpo"])],
        "shuffled": [renewed, ungated, f"{judge}shuffled"],
        "length": [renewed, f"{judge}by_length"],
    }
    return {name: [*words, f"evaluate.answers_limit={ANSWERS}"] for name, words in named.items()}


def _optimised(rate: float, beta: float) -> list[str]:
    return [f"train.learning_rate={rate:g}", f"train.beta={beta:g}"]


def _last_of_each(words: list[str]) -> list[str]:
    """The words that count, so that a run at the best settings is the same run, swept or not."""
    return list({word.partition("=")[0]: word for word in words}.values())


def run(out: Path, name: str, words: list[str]) -> Outcome:
    """One run's figures; what is finished is taken, what was begun goes on, of the same settings and base."""
    base = hashlib.sha256((CONFIG.with_suffix("") / "model/model.safetensors").read_bytes()).hexdigest()
    key = hashlib.sha256(
        f"{words} {load.load(CONFIG).model_dump_json(exclude_defaults=True)} {base}".encode()
    ).hexdigest()[:8]
    folder = out / f"{name}-{key}"
    if not (folder / "summary.json").exists():
        command = ["--config", str(CONFIG), f"run.dir={out}", f"run.name={folder.name}", "run.pages=false", *words]
        if (folder / "config.yaml").exists():
            command = ["--resume", str(folder), *(word for word in words if word.startswith("rollouts.judge="))]
        done = subprocess.run([sys.executable, "train.py", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: train.py ended with status {done.returncode}\n{done.stderr[-2000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    verdicts = [json.loads(path.read_text()) for path in sorted((folder / "rounds").glob("*/round.json"))]
    return Outcome(
        before=summary["exact_match_before"],
        after=summary["exact_match_after"],
        held_out=[one["held_out"].get("exact_match") for one in verdicts],
        pairs=[one["samples"]["pairs"] for one in verdicts],
        undone=[one["round"] for one in verdicts if one["undone"]],
        named=[f"round {one['round']}: {text}" for one in verdicts for text in one["warnings"]],
        seconds=summary["wall_seconds"],
    )


def bars_of(found: dict[str, list[Outcome]]) -> dict[str, bool]:
    """Which bars are met, of the variants that were run."""
    means = {name: statistics.mean(one.after for one in each) for name, each in found.items()}
    bars = {}
    if "offline" in means:
        bars |= {name: means[name] >= means["offline"] + BAR for name in ("rounds", "grpo") if name in means}
    if "shuffled" in means:
        gains = [one.after - one.before for one in found["shuffled"]]
        bars["shuffled"] = statistics.mean(gains) <= NOTHING
    if "length" in found:
        bars["length"] = all(one.named and one.undone for one in found["length"])
    return bars


def table_of(found: dict[str, list[Outcome]], seeds: list[int]) -> Table:
    """Held-out exact match of every variant: the mean and the standard deviation over seeds, and each seed."""
    table = Table("", "before", "after", "±", *(f"seed {seed}" for seed in seeds), "undone", "named", "seconds")
    for name, each in found.items():
        after = [one.after for one in each]
        spread = f"{statistics.stdev(after):.1%}" if len(after) > 1 else "–"
        cells = [f"{each[0].before:.1%}", f"{statistics.mean(after):.1%}", spread, *(f"{one:.1%}" for one in after)]
        counts = [sum(bool(one.undone) for one in each), sum(bool(one.named) for one in each)]
        table.add_row(name, *cells, *map(str, counts), f"{sum(one.seconds for one in each):.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some variants")
    parser.add_argument("--sweep", nargs="+", choices=list(BETAS), help="learning rates and betas instead")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/benchmark-rounds", help="folder that keeps the runs")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    seeds = [options.seed] if options.seed is not None else options.seeds[:1] if options.quick else options.seeds
    known = variants(2 if options.quick else load.load(CONFIG).rollouts.rounds)
    if unknown := set(options.only or ()) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = {name: words for name, words in known.items() if not options.only or name in options.only}
    if options.sweep:
        chosen = {
            f"{name}, rate {rate:g}, beta {beta:g}": _last_of_each([*known[name], *_optimised(rate, beta)])
            for name in options.sweep
            for rate, beta in itertools.product(RATES, BETAS[name])
        }
    found: dict[str, list[Outcome]] = {}
    for seed in seeds:
        for name, words in chosen.items():
            one = run(options.out, f"{name.partition(',')[0]}-{seed}", [*words, f"train.seed={seed}"])
            found.setdefault(name, []).append(one)
            print(f"seed {seed}, {name}: {one.before:.1%} ➜ {one.after:.1%}", file=sys.stderr, flush=True)
    Console(width=120).print(table_of(found, seeds))
    bars = {} if options.sweep else bars_of(found)
    for name, is_met in bars.items():
        print(f"{name}: {'met' if is_met else 'MISSED'}")
    runs = {name: [asdict(one) for one in each] for name, each in found.items()}
    print(json.dumps({"benchmark": "rounds", "seeds": seeds, "bars": bars, "runs": runs}))
    return 0 if options.quick or options.sweep or all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
