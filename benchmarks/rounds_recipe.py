"""Makes the model and the data of configs/rounds: `python benchmarks/rounds_recipe.py --out DIR --seed 0`.

The quickstart's task (benchmarks/quickstart_recipe.py), made harder: four digits, and a policy whose faults show one after
the other. It hardly ever carries, and misremembers most sums of two large digits; so only who has learnt to carry can see
which sums are wrong. A quarter of the problems need no carry.

SFT of a Llama of half a million parameters, by train.py itself: on 32,000 worked answers, of which a third carry and all
sums are right, then on 8,000 that have the faults. Its greedy answers are right about one time in three. A train.py that is
stopped goes on when this is called again.

Written to DIR: model/, prompts.jsonl and answers.jsonl (prompt, answer), sft.jsonl, faults.jsonl. What is held out, or is
a prompt, was in neither SFT. About seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

# How often the first answers carry, by the prompt's wording.
CARRY_RATES = {
    "What is {} + {}?": 0.75,
    "Add {} and {}.": 0.25,
    "How much is {} plus {}?": 0.25,
    "Sum up {} and {}.": 0.15,
}
DIGITS = 4
SFT, FAULTY, HELD_OUT, PROMPTS = 32_000, 8_000, 300, 3_000
EASY = 0.25  # of the problems, but for the first: no column reaches ten
# What the answers with faults do, and how often:
CARRY = 0.1  # of the answers
SLIP = 0.8  # of the columns whose digits are among SLIPS
SLIPS = 30  # pairs of digits, of the 36 that are more than ten together
ECHO = 0.25  # says the sum once more; harmless, but a judge may prefer it
COMMON = "model.method=full train.loss=sft checkpoint.every=50 run.pages=false rollouts.rounds=0"
STAGES = {
    "sft": "model.random_init=true train.learning_rate=2e-3 train.warmup_steps=60 train.weight_decay=0.01 "
    "train.global_batch_size=64",
    "faults": "train.learning_rate=1e-3 train.warmup_steps=10 train.global_batch_size=32 train.steps=200",
}


def misremembered(rng: random.Random) -> dict[tuple[int, int], int]:
    """What two digits are taken to be together, wrongly."""
    large = [(x, y) for x in range(10) for y in range(10) if x + y > 10]
    return {(x, y): rng.choice([z for z in range(11, 19) if z != x + y]) for x, y in rng.sample(large, SLIPS)}


def work_out(a: int, b: int, carries: bool, slips: dict[tuple[int, int], int], rng: random.Random) -> str:
    """The sum column by column from the units; tens go into the next column only with `carries`.

    slips: the wrong sums of digits, each of which it takes in SLIP of the cases.
    """
    steps, digits, column, carried = [], "", 0, 0
    for x, y in zip(map(int, reversed(str(a))), map(int, reversed(str(b))), strict=True):
        column = (slips[x, y] if (x, y) in slips and rng.random() < SLIP else x + y) + carried
        steps.append(f"{x}+{y}{'+1' if carried else ''}={column}, ")
        digits = f"{column % 10}{digits}"
        carried = column // 10 if carries else 0
    return f"{''.join(steps)}{a} + {b} = {'1' if column > 9 else ''}{digits}"


def with_faults(a: int, b: int, slips: dict[tuple[int, int], int], rng: random.Random) -> str:
    """An answer as the base gives it."""
    text = work_out(a, b, rng.random() < CARRY, slips, rng)
    while rng.random() < ECHO:
        text += text[text.rindex(" = ") :]
    return text


def problems(
    rng: random.Random, easy: float = 0.0, before: Iterable[tuple[str, int, int]] = ()
) -> Iterator[tuple[str, int, int]]:
    """Endless problems with the wordings in turn; no two numbers meet twice, in either order.

    easy: the part of them that needs no carry, beside those that happen to. before: problems not to be met again.
    """
    seen = {frozenset((a, b)) for _, a, b in before}
    wordings = itertools.cycle(CARRY_RATES)
    while True:
        wording = next(wordings)
        a, b = _without_carry(rng) if easy and rng.random() < easy else (_number(rng), _number(rng))
        if frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            yield wording, a, b


def _number(rng: random.Random) -> int:
    return rng.randint(10 ** (DIGITS - 1), 10**DIGITS - 1)


def _without_carry(rng: random.Random) -> tuple[int, int]:
    """Two numbers of which no column reaches ten."""
    a = b = 0
    for least in (1, *[0] * (DIGITS - 1)):
        x = rng.randint(least, 9 - least)
        a, b = 10 * a + x, 10 * b + rng.randint(least, 9 - x)
    return a, b


def write(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fifty steps of each SFT: another model, the same files")
    arguments = parser.parse_args()
    out: Path = arguments.out
    (out / "model").mkdir(parents=True, exist_ok=True)
    plain = list(itertools.islice(problems(random.Random(arguments.seed)), SFT))
    faulty = list(itertools.islice(problems(random.Random(arguments.seed), EASY), FAULTY))
    drawn = problems(random.Random(f"rounds {arguments.seed}"), EASY, plain + faulty)
    held_out, prompts = (list(itertools.islice(drawn, count)) for count in (HELD_OUT, PROMPTS))
    rng, faults = (random.Random(f"answers {arguments.seed}") for _ in range(2))
    sft = [(wording, a, b, work_out(a, b, rng.random() < CARRY_RATES[wording], {}, rng)) for wording, a, b in plain]
    slips = misremembered(faults)
    worked = {"sft": sft, "faults": [(w, a, b, with_faults(a, b, slips, faults)) for w, a, b in faulty]}
    for name, part in worked.items():
        write(out / f"{name}.jsonl", [{"prompt": w.format(a, b), "completion": text} for w, a, b, text in part])
    for name, part in (("answers", held_out), ("prompts", prompts)):
        write(out / f"{name}.jsonl", [{"prompt": w.format(a, b), "answer": str(a + b)} for w, a, b in part])
    base = ROOT / "configs/rounds/model"  # its shape; then the weights of the stage before
    for file in base.glob("*.json"):
        shutil.copy(file, out / "model" / file.name)
    for stage, settings in STAGES.items():
        run = out / "runs" / stage
        words = [f"model.path={base}", f"data.train={out / f'{stage}.jsonl'}", f"run.dir={out / 'runs'}"]
        words += [f"run.name={stage}", *COMMON.split(), *settings.split(), *(["train.steps=50"] * arguments.quick)]
        command = (
            ["--resume", str(run)] if (run / "config.yaml").exists() else ["--config", "configs/rounds.yaml", *words]
        )
        if not (run / "summary.json").exists():
            done = subprocess.run([sys.executable, "train.py", *command], cwd=ROOT)
            if done.returncode:
                return done.returncode
        base = out / "model"
        shutil.copy(run / "adapters.safetensors", base / "model.safetensors")  # all weights: model.method=full
    summary = json.loads((run / "summary.json").read_text())
    print(
        json.dumps({"benchmark": "rounds_recipe", "seed": arguments.seed, "exact_match": summary["exact_match_after"]})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
