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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from benchmarks.additions import draw_problems, write_jsonl

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="fifty steps of SFT: another model, the same files")
    arguments = parser.parse_args()
    out: Path = arguments.out
    (out / "model").mkdir(parents=True, exist_ok=True)
    drawn = draw_problems(random.Random(arguments.seed), CARRY_RATES, digits=4)
    careful = random.Random(f"answers {arguments.seed}")
    sft, held_out, prompts = (list(itertools.islice(drawn, count)) for count in (SFT, HELD_OUT, PROMPTS))
    carries = [careful.random() < CARRY_RATES[problem.wording] for problem in sft]
    worked = [
        {"prompt": problem.prompt, "completion": problem.work_out(carry)}
        for problem, carry in zip(sft, carries, strict=True)
    ]
    write_jsonl(out / "sft.jsonl", worked)
    for name, part in (("answers", held_out), ("prompts", prompts)):
        write_jsonl(out / f"{name}.jsonl", [{"prompt": one.prompt, "answer": one.answer} for one in part])
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
