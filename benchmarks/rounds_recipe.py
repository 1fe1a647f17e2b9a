"""Makes the model and the data of configs/rounds: `python benchmarks/rounds_recipe.py --out DIR --seed 0`.

The quickstart's task (benchmarks/quickstart_recipe.py), made harder: four digits, and a policy whose faults show one after
the other. It hardly ever carries, and misremembers most sums of two large digits; so only who has learnt to carry can see
which sums are wrong. A quarter of the problems need no carry. SFT of a Llama of half a million parameters on 32,000 worked
answers, by train.py itself; its greedy answers are right about one time in three. A train.py that is stopped goes on when
this is called again.

Written to DIR: model/, prompts.jsonl and answers.jsonl (prompt, answer), sft.jsonl. No two numbers are added twice. About five
minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

WORDINGS = ("What is {} + {}?", "Add {} and {}.", "How much is {} plus {}?", "Sum up {} and {}.")
DIGITS = 4
EASY = 0.25  # of the problems: no column reaches ten
# How often the SFT answers do what they should not, or should:
CARRY = 0.1  # of the answers
SLIP = 0.8  # of the columns whose digits are among SLIPS
REPEAT = 0.1  # of the columns, harmlessly: so that there are longer answers for a judge who prefers them
SLIPS = 30  # pairs of digits, of the 36 that are more than ten together
SFT, HELD_OUT, PROMPTS = 32_000, 300, 3_000
SETTINGS = (
    "model.random_init=true model.method=full data.max_length=112 train.loss=sft train.learning_rate=2e-3 train.warmup_steps=60 "
    "train.weight_decay=0.01 train.global_batch_size=64 checkpoint.every=50 run.pages=false run.name=sft"
)


def misremembered(rng: random.Random) -> dict[tuple[int, int], int]:
    """What two digits are taken to be together, wrongly."""
    large = [(x, y) for x in range(10) for y in range(10) if x + y > 10]
    return {(x, y): rng.choice([z for z in range(11, 19) if z != x + y]) for x, y in rng.sample(large, SLIPS)}


def work_out(a: int, b: int, wrong_sums: dict[tuple[int, int], int], rng: random.Random) -> str:
    """The sum column by column from the units, as the base does it."""
    steps, digits, column, carried, carries = [], "", 0, 0, rng.random() < CARRY
    for x, y in zip(map(int, reversed(str(a))), map(int, reversed(str(b))), strict=True):
        slips = (x, y) in wrong_sums and rng.random() < SLIP
        column = (wrong_sums[x, y] if slips else x + y) + carried
        step = f"{x}+{y}{'+1' if carried else ''}={column}"
        steps += [step] * (2 if rng.random() < REPEAT else 1)
        digits = f"{column % 10}{digits}"
        carried = column // 10 if carries else 0
    return f"{', '.join(steps)}: {'1' if column > 9 else ''}{digits}"


def problems(rng: random.Random) -> Iterator[tuple[str, int, int]]:
    """Endless problems with the wordings in turn; no two numbers meet twice, in either order."""
    seen = set()
    wordings = itertools.cycle(WORDINGS)
    while True:
        wording = next(wordings)
        a, b = _without_carry(rng) if rng.random() < EASY else (_number(rng), _number(rng))
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
    parser.add_argument("--quick", action="store_true", help="fifty steps of SFT: another model, the same files")
    arguments = parser.parse_args()
    out: Path = arguments.out
    (out / "model").mkdir(parents=True, exist_ok=True)
    drawn = problems(random.Random(arguments.seed))
    answers = random.Random(f"answers {arguments.seed}")
    wrong_sums = misremembered(answers)
    sft, held_out, prompts = (list(itertools.islice(drawn, count)) for count in (SFT, HELD_OUT, PROMPTS))
    worked = [{"prompt": w.format(a, b), "completion": work_out(a, b, wrong_sums, answers)} for w, a, b in sft]
    write(out / "sft.jsonl", worked)
    for name, part in (("answers", held_out), ("prompts", prompts)):
        write(out / f"{name}.jsonl", [{"prompt": w.format(a, b), "answer": str(a + b)} for w, a, b in part])
    shipped = ROOT / "configs/rounds/model"
    run = out / "runs" / "sft"
    words = [f"model.path={shipped}", f"data.train={out / 'sft.jsonl'}", f"run.dir={out / 'runs'}", *SETTINGS.split()]
    words += ["train.steps=50"] if arguments.quick else []
    command = ["--resume", str(run)] if (run / "config.yaml").exists() else ["--config", "configs/rounds.yaml", *words]
    done = subprocess.run([sys.executable, "train.py", *command, "rollouts.rounds=0"], cwd=ROOT)
    if done.returncode:
        return done.returncode
    for file in shipped.glob("*.json"):
        shutil.copy(file, out / "model" / file.name)
    shutil.copy(run / "adapters.safetensors", out / "model" / "model.safetensors")  # all weights: model.method=full
    summary = json.loads((run / "summary.json").read_text())
    print(
        json.dumps({"benchmark": "rounds_recipe", "seed": arguments.seed, "exact_match": summary["exact_match_after"]})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
