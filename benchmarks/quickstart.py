"""The quickstart over several seeds, with three controls: does the training do what it says, and because of what it says?

    python benchmarks/quickstart.py            five seeds, about half an hour on two cores
    python benchmarks/quickstart.py --quick    one seed and a third of the steps, about a minute and a half
    python benchmarks/quickstart.py --labels   learnt from one labelled completion of each pair: KTO, BCO, labels flipped

For every seed: the quickstart as `make train` runs it; the same with every pair's labels shuffled (no gain is to be
had), and inverted (exact match has to fall); and on two ranks that take three quarters and a quarter of the pairs,
which has to end with the first one's weights. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
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

from lib.config import load  # noqa: E402
from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from tests import tiny  # noqa: E402

QUICKSTART = ROOT / "configs/quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--labels", action="store_true")
    options = parser.parse_args()
    settings = load.load(QUICKSTART)
    batch = settings.train.global_batch_size
    quick = ["train.steps=40"] if options.quick else []
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(options.seed, options.seed + (1 if options.quick else options.seeds)):
            common = [f"train.seed={seed}", f"run.dir={folder}", "evaluate.samples=0", *quick]
            if options.labels:
                runs = from_labels(common, folder, seed)
            else:
                runs = from_pairs(common, ROOT / settings.data.train, folder, seed, batch)
                difference = tiny.difference(folder / f"plain{seed}", folder / f"two{seed}")
            for control, summary in runs.items():
                gain = summary["exact_match_after"] - summary["exact_match_before"]
                rows.append(
                    {
                        "seed": seed,
                        "control": control,
                        "before": summary["exact_match_before"],
                        "after": summary["exact_match_after"],
                        "gain": gain,
                        "seconds": summary["seconds"],
                    }
                )
                if control == "two unequal ranks":
                    rows[-1]["relative_difference"] = difference
                print(
                    f"seed {seed}, {control}: exact match {summary['exact_match_before']:.1%} -> {summary['exact_match_after']:.1%}",
                    flush=True,
                )
    table = Table(title="exact match on held-out prompts, greedy")
    for column in ("seed", "control", "before", "after", "gain (points)", "seconds", "weights' relative difference"):
        table.add_column(column)
    for row in rows:
        different = f"{row['relative_difference']:.1e}" if "relative_difference" in row else ""
        table.add_row(
            str(row["seed"]),
            row["control"],
            f"{row['before']:.1%}",
            f"{row['after']:.1%}",
            f"{100 * row['gain']:+.1f}",
            f"{row['seconds']:.0f}",
            different,
        )
    Console().print(table)
    print(json.dumps({"rows": rows}))


def from_pairs(common: list[str], data: Path, folder: Path, seed: int, batch: int) -> dict[str, Any]:
    """The summaries of the quickstart and of its controls."""
    shuffled = relabelled(data, folder / "shuffled.jsonl", 0.5, seed)
    inverted = relabelled(data, folder / "inverted.jsonl", 1.0, seed)
    shares = f"plan.shares=[{3 * batch // 4},{batch - 3 * batch // 4}]"
    return {
        "labels as they are": run(1, [*common, f"run.name=plain{seed}"]),
        "labels shuffled": run(1, [*common, f"run.name=shuffled{seed}", f"data.train={shuffled}"]),
        "labels inverted": run(1, [*common, f"run.name=inverted{seed}", f"data.train={inverted}"]),
        "two unequal ranks": run(2, [*common, f"run.name=two{seed}", shares]),
    }


def from_labels(common: list[str], folder: Path, seed: int) -> dict[str, Any]:
    """The summaries of KTO and BCO, and of KTO from wrong labels."""
    config = ROOT / "configs/quickstart-kto.yaml"
    data = labelled(ROOT / "configs/quickstart/train.jsonl", folder / "labels.jsonl", seed)
    flipped = labelled(ROOT / "configs/quickstart/train.jsonl", folder / "flipped.jsonl", seed, flipped=True)
    return {
        name: run(1, [*common, f"train.loss={loss}", f"data.train={rows}", f"run.name={name}{seed}"], config)
        for name, loss, rows in (("kto", "kto", data), ("bco", "bco", data), ("flipped", "kto", flipped))
    }


def labelled(source: Path, target: Path, seed: int, flipped: bool = False) -> Path:
    """One completion of every pair, chosen by a coin, with its label; or with the wrong one."""
    rng, records = random.Random(seed), []
    for line in source.read_text(encoding="utf-8").splitlines():
        pair, is_right = json.loads(line), rng.random() < 0.5
        completion = pair["chosen" if is_right else "rejected"]
        records.append({"prompt": pair["prompt"], "completion": completion, "label": is_right != flipped})
    return tiny.write_jsonl(target, records)


def run(ranks: int, words: list[str], config: Path = QUICKSTART) -> dict[str, Any]:
    """One quickstart as a user starts it; its summary."""
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(config), *words]
    if ranks > 1:
        command = [str(mpi_and_blas.mpirun_path()), "-n", str(ranks), *command]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(words)}: status {result.returncode}\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def relabelled(source: Path, target: Path, share: float, seed: int) -> Path:
    """The pairs with chosen and rejected exchanged in a share of them."""
    rng = random.Random(seed)
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for record in records:
        if rng.random() < share:
            record["chosen"], record["rejected"] = record["rejected"], record["chosen"]
    return tiny.write_jsonl(target, records)


if __name__ == "__main__":
    main()
