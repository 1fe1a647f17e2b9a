"""Makes the model and the data of configs/rounds: `python benchmarks/rounds_recipe.py --out DIR --seed 0`.

The quickstart's task (benchmarks/quickstart_recipe.py), made harder: two four-digit numbers, and four wordings, of which one
alone mostly recalls answers that carry. SFT of a Llama of half a million parameters on 32,000 worked answers, by train.py
itself; its greedy answers are right about two times in five. A train.py that is stopped goes on when this is called again.

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

# How often the SFT answers carry, by the prompt's wording.
CARRY_RATES = {
    "What is {} + {}?": 0.75,
    "Add {} and {}.": 0.25,
    "How much is {} plus {}?": 0.25,
    "Sum up {} and {}.": 0.15,
}
SFT, HELD_OUT, PROMPTS = 32_000, 300, 3_000
SETTINGS = (
    "model.random_init=true model.method=full data.max_length=96 train.loss=sft train.learning_rate=2e-3 train.warmup_steps=60 "
    "train.weight_decay=0.01 train.global_batch_size=64 checkpoint.every=50 run.pages=false run.name=sft"
)


def work_out(a: int, b: int, carry: bool) -> str:
    """The sum column by column from the units; tens go into the next column only with `carry`."""
    steps, digits, column, carried = [], "", 0, 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        column = int(x) + int(y) + carried
        steps.append(f"{x}+{y}{'+1' if carried else ''}={column}, ")
        digits = f"{column % 10}{digits}"
        carried = column // 10 if carry else 0
    return f"{''.join(steps)}{a} + {b} = {'1' if column > 9 else ''}{digits}"


def problems(rng: random.Random) -> Iterator[tuple[str, int, int]]:
    """Endless problems with the wordings in turn; no two numbers meet twice, in either order."""
    seen = set()
    wordings = itertools.cycle(CARRY_RATES)
    while True:
        wording, a, b = next(wordings), rng.randint(1000, 9999), rng.randint(1000, 9999)
        if frozenset((a, b)) not in seen:
            seen.add(frozenset((a, b)))
            yield wording, a, b


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
    careful = random.Random(f"answers {arguments.seed}")
    sft, held_out, prompts = (list(itertools.islice(drawn, count)) for count in (SFT, HELD_OUT, PROMPTS))
    carries = [careful.random() < CARRY_RATES[wording] for wording, _, _ in sft]
    worked = [
        {"prompt": wording.format(a, b), "completion": work_out(a, b, carry)}
        for (wording, a, b), carry in zip(sft, carries, strict=True)
    ]
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
