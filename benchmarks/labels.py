"""The quickstart's task learnt from labels alone, over several seeds: by KTO, by BCO, and by KTO from wrong labels.

    python benchmarks/labels.py            five seeds, about twenty minutes on two cores
    python benchmarks/labels.py --quick    one seed and a third of the steps, about two minutes
    python benchmarks/labels.py --make     writes configs/quickstart/labels.jsonl and labels-valid.jsonl again

Of every pair of the quickstart one completion is taken, by a coin: the right one is desirable, the wrong one is not. So
no prompt has an answer to compare with. Exact match has to rise by 20 points, and to fall where all labels are flipped.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks import quickstart  # noqa: E402
from tests import tiny  # noqa: E402

FOLDER = ROOT / "configs/quickstart"
CONFIG = ROOT / "configs/quickstart-kto.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--make", action="store_true", help="make the records of configs/quickstart-kto.yaml")
    options = parser.parse_args()
    if options.make:
        for pairs, labels in (("train.jsonl", "labels.jsonl"), ("valid.jsonl", "labels-valid.jsonl")):
            labelled(FOLDER / pairs, FOLDER / labels, options.seed)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(options.seed, options.seed + (1 if options.quick else options.seeds)):
            data = labelled(FOLDER / "train.jsonl", folder / "labels.jsonl", seed)
            flipped = labelled(FOLDER / "train.jsonl", folder / "flipped.jsonl", seed, flipped=True)
            common = [f"train.seed={seed}", f"run.dir={folder}", "evaluate.samples=0", f"data.train={data}"]
            common += ["train.steps=20"] if options.quick else []
            for method, words in (
                ("kto", ["train.loss=kto"]),
                ("bco", ["train.loss=bco"]),
                ("kto, labels flipped", ["train.loss=kto", f"data.train={flipped}"]),
            ):
                run_name = f"run.name={method.replace(', ', '-').replace(' ', '-')}-{seed}"
                summary = quickstart.run(1, [*common, *words, run_name], CONFIG)
                before, after = summary["exact_match_before"], summary["exact_match_after"]
                print(f"seed {seed}, {method}: exact match {before:.1%} -> {after:.1%}", flush=True)
                row = {"seed": seed, "method": method, "before": before, "after": after, "gain": after - before}
                rows.append(row | {"seconds": summary["seconds"]})
    table = Table(title="exact match on held-out prompts, greedy, after training on labels")
    for column in ("seed", "method", "before", "after", "gain (points)", "seconds"):
        table.add_column(column)
    for row in rows:
        figures = f"{row['before']:.1%}", f"{row['after']:.1%}", f"{100 * row['gain']:+.1f}", f"{row['seconds']:.0f}"
        table.add_row(str(row["seed"]), str(row["method"]), *figures)
    Console().print(table)
    print(json.dumps({"rows": rows}))


def labelled(source: Path, target: Path, seed: int, flipped: bool = False) -> Path:
    """One completion of every pair, with its label; or with the wrong one."""
    rng, records = random.Random(seed), []
    for line in source.read_text(encoding="utf-8").splitlines():
        pair, is_right = json.loads(line), rng.random() < 0.5
        completion = pair["chosen" if is_right else "rejected"]
        records.append({"prompt": pair["prompt"], "completion": completion, "label": is_right != flipped})
    return tiny.write_jsonl(target, records)


if __name__ == "__main__":
    main()
