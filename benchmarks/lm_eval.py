"""lm-evaluation-harness through our adapter, against its own `hf` model on the fused export, and one rank against two.

    python benchmarks/lm_eval.py --hf PYTHON            a few minutes on two cores
    python benchmarks/lm_eval.py --hf PYTHON --quick    fewer questions
    python benchmarks/lm_eval.py                        the times alone

PYTHON is an interpreter that has `lm_eval[hf]`; the one that runs this needs `lm_eval`. A short run of the quickstart is
trained and fused by mlx-lm. Three tasks in a local folder ask it: which of two answers is likelier (multiple choice), what
it writes (generation, up to a stop text), and how likely texts are (perplexity). Every figure has to be that of `hf` within
1e-3, and that of two ranks the same as of one. Times are the least of two tries in turn; two ranks share the cores that
one has for itself. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

from tests import tiny  # noqa: E402

QUICKSTART = ROOT / "configs/quickstart"
TOLERANCE = 1e-3  # the issue's
TASKS = {
    "likelier": """
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{[chosen, rejected]}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{chosen.split('= ')[-1]}}"
generation_kwargs: {until: ["\\n", ". "], max_gen_toks: 64, do_sample: false}
filter_list:
  - name: last-number
    filter: [{function: regex, regex_pattern: "= (\\\\d+)$"}, {function: take_first}]
metric_list: [{metric: exact_match}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{prompt}} {{chosen}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", metavar="PYTHON", help="interpreter with lm_eval[hf]")
    parser.add_argument("--rows", type=int, default=400, help="questions of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="60 questions")
    options = parser.parse_args()
    rows = 60 if options.quick else options.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, tasks = trained(folder, options.seed), task_folder(folder, rows)
        tries = [
            (ranks, ours(run, tasks, folder / f"{number}.json", ranks)) for number, ranks in enumerate((1, 2, 2, 1))
        ]
        results = {ranks: min((r for own, r in tries if own == ranks), key=lambda r: r["seconds"]) for ranks in (1, 2)}
        same = results[1]["tasks"] == results[2]["tasks"]
        foreign = theirs(options.hf, run, tasks, folder) if options.hf else None
    rows_shown, largest = compared(results[1]["tasks"], foreign)
    table = Table("task", "metric", "ours", "hf", "difference", title=f"{rows} questions a task")
    for row in rows_shown:
        table.add_row(*row)
    Console().print(table)
    seconds = {ranks: result["seconds"] for ranks, result in results.items()}
    print(f"one rank {seconds[1]:.1f} s, two ranks {seconds[2]:.1f} s; the same figures: {same}")
    told: dict[str, Any] = {"rows": rows, "largest_difference": largest, "tolerance": TOLERANCE}
    told |= {"seconds_one_rank": seconds[1], "seconds_two_ranks": seconds[2], "same_on_two_ranks": same}
    told["ok"] = same and (largest is None or largest <= TOLERANCE)
    print(json.dumps(told))
    sys.exit(0 if told["ok"] else 1)


def trained(folder: Path, seed: int) -> Path:
    """A short run of the quickstart."""
    words = ["train.steps=10", f"train.seed={seed}", f"run.dir={folder}", "run.name=run", "run.pages=false"]
    words += ["evaluate.answers=null", "evaluate.samples=0", "evaluate.every=null", "train.learning_rate=1e-3"]
    tiny.train(folder, ["--config", str(ROOT / "configs/quickstart.yaml"), *words])
    return folder / "run"


def task_folder(folder: Path, rows: int) -> Path:
    """The tasks' YAML files, and the data that they ask about."""
    tasks = folder / "tasks"
    tasks.mkdir()
    lines = (QUICKSTART / "valid.jsonl").read_text().splitlines(keepends=True)
    (tasks / "rows.jsonl").write_text("".join((lines * -(-rows // len(lines)))[:rows]))
    data = {"data_files": {"test": str(tasks / "rows.jsonl")}}
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(data)}\ntest_split: test\n"
        (tasks / f"{name}.yaml").write_text(head + text.lstrip() + "metadata: {version: 1}\n")
    return tasks


def ours(run: Path, tasks: Path, out: Path, ranks: int) -> dict[str, Any]:
    """The last line of our command, started as a user would."""
    command = [sys.executable, "-m", "lib.evaluate", "--run", str(run), "--tasks", ",".join(TASKS)]
    command += ["--tasks-folder", str(tasks), "--chat", "--out", str(out)]
    started = [str(mpi_and_blas.mpirun_path()), "-n", str(ranks)] if ranks > 1 else []
    found: dict[str, Any] = json.loads(output([*started, *command]).splitlines()[-1])
    return found


def theirs(python: str, run: Path, tasks: Path, folder: Path) -> dict[str, dict[str, float]]:
    """The metrics of the harness's own model, on what mlx-lm fuses."""
    fused, out = folder / "fused", folder / "hf"
    source = json.loads((run / "adapter_config.json").read_text())["model"]
    fuse = ["--model", source, "--adapter-path", str(run), "--save-path", str(fused)]
    output([sys.executable, "-m", "mlx_lm", "fuse", *fuse])
    arguments = f"pretrained={fused},dtype=float32"
    command = [python, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--tasks", ",".join(TASKS)]
    command += ["--device", "cpu", "--batch_size", "16", "--apply_chat_template"]
    output([*command, "--include_path", str(tasks), "--output_path", str(out)])
    (stored,) = out.rglob("results_*.json")
    return {task: figures_of(values) for task, values in json.loads(stored.read_text())["results"].items()}


def figures_of(values: dict[str, Any]) -> dict[str, float]:
    """Metrics by the names that our command prints."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def output(command: list[str]) -> str:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    print(f"{time.perf_counter() - began:6.1f} s  {' '.join(command)[:100]}", flush=True)
    return done.stdout


def compared(
    own: dict[str, dict[str, float]], foreign: dict[str, dict[str, float]] | None
) -> tuple[list[list[str]], float | None]:
    """Rows of the table, and the largest difference; of a figure above one, e.g. a perplexity, in parts of it."""
    rows, differences = [], []
    for task, values in own.items():
        for name, value in values.items():
            other = math.nan if foreign is None else foreign[task][name]
            difference = abs(value - other) / max(1.0, abs(value))
            rows.append([task, name, f"{value:.6g}", f"{other:.6g}", f"{difference:.1e}"])
            differences += [difference] * (foreign is not None)
    return rows, max(differences, default=None)


if __name__ == "__main__":
    main()
