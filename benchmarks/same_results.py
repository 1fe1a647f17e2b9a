"""Whether two versions of this program compute the same, bit for bit: for changes that must change nothing.

    python benchmarks/same_results.py --record before        on the old tree: plays the matrix, writes the folder
    python benchmarks/same_results.py --compare before       on the new one: plays it again, and says what differs

The matrix: losses x methods x strategies x worlds of one to three ranks, 6 steps each of a tiny model, with fixed seeds.
Compared are every figure of every step, the weights, the checkpoints' arrays, the fields of every kind of record, and the help
texts; a run that the old tree left after 3 steps is resumed by the new one. Seconds a step are printed, and not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import lib  # noqa: E402, F401  goes on in .venv, or says in one line what to do

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 48,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
COMMON = (
    "model.random_init=true",
    "data.max_length=64",
    "data.length_multiple=8",
    "train.global_batch_size=8",
    "train.learning_rate=1e-3",
    "train.steps=6",
    "checkpoint.every=3",
    "checkpoint.keep=9",
    "train.seed=3",
    "plan.replan=false",
)
LOSSES = ("sft", "sigmoid", "robust", "ipo", "hinge", "dpop", "simpo", "orpo", "cpo")
METHODS = {
    "lora": (),
    "dora": ("model.method=dora",),
    "full": ("model.method=full",),
    "dropout": ("model.dropout=0.1",),
    "checkpointed": ("model.gradient_checkpointing=true",),
    "bfloat16": ("model.dtype=bfloat16",),
    "adapter of rank 2": ("model.rank=2", "train.label_smoothing=0.1"),
}
# Figures that follow from the data, the weights and the seed, and not from a clock.
COMPUTED = ("loss", "kl", "reward_chosen", "reward_rejected", "reward_accuracy", "reward_margin", "grad_norm")
COMPUTED += ("learning_rate", "pairs", "tokens", "rows", "epoch", "step", "skipped")
HELP = (
    ("train.py", "--help"),
    ("launch", "--help"),
    *(("-m", f"lib.{name}", "--help") for name in ("evaluate", "dashboard", "server", "data")),
    ("benchmarks/calibrate.py", "--help"),
)


def matrix() -> dict[str, tuple[int, tuple[str, ...]]]:
    """Every run's name, ranks and settings."""
    runs: dict[str, tuple[int, tuple[str, ...]]] = {}
    for loss in LOSSES:
        runs[f"{loss}"] = (1, (f"train.loss={loss}",))
    for name, words in METHODS.items():
        runs[f"method {name}"] = (1, words)
    for ranks, shares in ((2, "[6,2]"), (3, "[5,2,1]")):
        together = ("strategy=synchronous", f"plan.shares={shares}")
        for loss in ("sft", "sigmoid"):
            runs[f"synchronous {ranks} {loss}"] = (ranks, (*together, f"train.loss={loss}"))
        for name in ("dora", "full", "dropout"):
            runs[f"synchronous {ranks} {name}"] = (ranks, (*together, *METHODS[name]))
        runs[f"synchronous {ranks} int8"] = (ranks, (*together, "sync.compression=int8"))
        for merge in ("average", "svd", "stack", "outer", "none"):
            words = ("strategy=independent", f"plan.shares={shares}", f"independent.merge={merge}")
            words += ("independent.pairs_per_round=16",)
            runs[f"independent {ranks} {merge}"] = (ranks, words)
    for name in ("lora", "dora", "full"):
        words = ("strategy=sharded", "plan.shares=[3,1]", *METHODS[name])
        runs[f"sharded 2 {name}"] = (2, words)
    return runs


def write_inputs(folder: Path) -> tuple[str, ...]:
    """A model's folder and pairs; the settings that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rng = random.Random(0)

    def ids() -> list[int]:
        return [rng.randrange(2, 48) for _ in range(rng.randint(1, 12))]

    for name, rows in (("train", 21), ("valid", 7)):
        records = [{"prompt_ids": ids(), "chosen_ids": [*ids(), 1], "rejected_ids": [*ids(), 1]} for _ in range(rows)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.yaml").write_text("model: {path: overruled}\ndata: {train: overruled}\n")
    return (
        "--config",
        str(folder / "run.yaml"),
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.valid={folder}/valid.jsonl",
        f"plan.calibration_dir={folder}/calibration",
    )


def play(folder: Path, ranks: int, names: list[str]) -> None:
    """Some runs of one world, one after the other in the same processes; `folder/runs` has them afterwards."""
    own = [sys.executable, str(Path(__file__).resolve()), "--inside", str(folder), *names]
    if ranks > 1:
        own = [str(Path(sys.executable).parent / "mpirun"), "-n", str(ranks), *own]
    subprocess.run(own, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=os.environ | allowed())


def allowed() -> dict[str, str]:
    """What lets Open MPI start as root, and more ranks than cores."""
    names = [f"{prefix}_ALLOW_RUN_AS_ROOT{end}" for prefix in ("OMPI", "PRTE") for end in ("", "_CONFIRM")]
    return dict.fromkeys(names, "1") | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def inside(folder: Path, names: list[str]) -> int:
    """This process's part of `play`."""
    import train

    for name in names:
        if name.startswith("resume:"):
            words: tuple[str, ...] = ("--resume", name.removeprefix("resume:"))
        else:
            run = (f"run.dir={folder}/runs", f"run.name={name.replace(' ', '-')}")
            words = (*write_inputs(folder), *COMMON, *matrix()[name][1], *run)
        if train.main(list(words)):
            print(f"{name} failed", file=sys.stderr)
            return 1
    return 0


def digests(run: Path) -> dict[str, Any]:
    """What a run computed, as digests, and the names of its records' fields."""
    found: dict[str, Any] = {}
    fields: dict[str, list[str]] = {}
    for log in sorted((run / "logs").glob("rank-*.jsonl")):
        steps = []
        for line in log.read_text().splitlines():
            record = json.loads(line)
            fields[record["kind"]] = sorted(record)
            if record["kind"] == "step":
                steps.append([record.get(name) for name in COMPUTED])
        found[log.name] = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
    for path in sorted(run.rglob("*.safetensors")):
        found[str(path.relative_to(run))] = arrays_digest(path)
    found["record fields"] = fields
    summary = json.loads((run / "summary.json").read_text())
    found["summary"] = {name: summary[name] for name in ("loss", "reward_accuracy", "pairs", "tokens", "steps")}
    return found


def arrays_digest(path: Path) -> str:
    """Of a safetensors file's arrays, whatever their order."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    total = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        begin, end = entry["data_offsets"]
        total.update(f"{name} {entry['dtype']} {entry['shape']}".encode() + data[8 + size + begin : 8 + size + end])
    return total.hexdigest()


def step_seconds(run: Path) -> float:
    """The median step of rank 0, without the first."""
    lines = (run / "logs" / "rank-000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return statistics.median([record["step_seconds"] for record in records if record["kind"] == "step"][1:])


def help_texts() -> dict[str, str]:
    """What every command says of itself."""
    texts = {}
    for words in HELP:
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        texts[" ".join(words)] = f"status {done.returncode}\n{done.stdout}"
    return texts


def left_after_three_steps(run: Path, place: Path) -> Path:
    """A copy of a run as if it had been stopped after its first checkpoint."""
    copy = place / run.name
    shutil.copytree(run, copy)
    for path in (copy / "summary.json", copy / "adapters.safetensors"):
        path.unlink()
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


def play_all(folder: Path, chosen: dict[str, tuple[int, tuple[str, ...]]]) -> Iterator[str]:
    """Plays the matrix, a world after the other; yields what it is about to do."""
    write_inputs(folder)
    for ranks in sorted({ranks for ranks, _ in chosen.values()}):
        names = [name for name, (size, _) in chosen.items() if size == ranks]
        yield f"{len(names)} runs of {ranks} rank{'s' * (ranks > 1)}"
        play(folder, ranks, names)


def results(folder: Path, chosen: dict[str, tuple[int, tuple[str, ...]]]) -> dict[str, Any]:
    """What all runs below a folder computed."""
    runs = {name: folder / "runs" / name.replace(" ", "-") for name in chosen}
    return {
        "runs": {name: digests(run) for name, run in runs.items()},
        "step_seconds": {name: step_seconds(run) for name, run in runs.items()},
        "help": help_texts(),
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Every difference, in words."""
    found = []
    for name in before["runs"]:
        old, new = before["runs"][name], after["runs"].get(name, {})
        found += [f"{name}: {key} differs" for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    texts = before["help"].keys() | after["help"].keys()
    found += [
        f"help of {name} differs" for name in sorted(texts) if before["help"].get(name) != after["help"].get(name)
    ]
    return found


def resumed(recorded: Path, chosen: dict[str, tuple[int, tuple[str, ...]]], place: Path) -> list[str]:
    """Differences of runs that an older tree left after three steps, and this one goes on with."""
    found = []
    for name in ("sigmoid", "method full", "synchronous 2 sigmoid", "independent 2 outer"):
        if name not in chosen:
            continue
        old = recorded / "runs" / name.replace(" ", "-")
        copy = left_after_three_steps(old, place)
        play(recorded, chosen[name][0], [f"resume:{copy}"])
        same = arrays_digest(old / "adapters.safetensors") == arrays_digest(copy / "adapters.safetensors")
        found += [] if same else [f"{name}: resumed after three steps it ends with other weights"]
    return found


def main() -> int:
    """Runs the command line; returns 0 where nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep what this tree computes")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="with what was recorded there")
    parser.add_argument("--quick", action="store_true", help="every sixth run")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(Path(options.inside[0]), options.inside[1:])
    if (options.record is None) == (options.compare is None):
        parser.error("give --record FOLDER or --compare FOLDER")
    chosen = dict(list(matrix().items())[:: 6 if options.quick else 1])
    if options.record:
        folder = options.record.resolve()
        for words in play_all(folder, chosen):
            print(words, flush=True)
        (folder / "results.json").write_text(json.dumps(results(folder, chosen)))
        print(json.dumps({"recorded": len(chosen), "folder": str(options.record)}))
        return 0
    before = json.loads((options.compare / "results.json").read_text())
    chosen = {name: run for name, run in matrix().items() if name in before["runs"]}
    with tempfile.TemporaryDirectory() as place:
        for words in play_all(Path(place), chosen):
            print(words, flush=True)
        after = results(Path(place), chosen)
        differences = compare(before, after) + resumed(options.compare.resolve(), chosen, Path(place) / "resumed")
    ratios = [after["step_seconds"][name] / before["step_seconds"][name] for name in chosen]
    print(*(differences or ["no difference"]), sep="\n")
    print(f"{len(chosen)} runs; a step takes {statistics.median(ratios):.2f} of what it took (median over runs)")
    print(json.dumps({"runs": len(chosen), "differences": len(differences), "step_ratio": statistics.median(ratios)}))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
