"""Pipelined training against one rank: every family and method, two to four ranks, even and uneven cuts; weights after 20 steps.

    python benchmarks/pipelined_weights.py                                     270 runs and 45 of one rank: half an hour on two cores
    python benchmarks/pipelined_weights.py --families llama,qwen3 --ranks 2    some of them
    python benchmarks/pipelined_weights.py --quick                             one family on two ranks

Models are tiny, of twelve blocks with random weights, in float32; a quantised one is compared with the same quantised one.
Losses take turns. A row's figure is the largest relative difference of a trained parameter, by norm. The bar is 1e-4; where
a training is ill-conditioned, rounding alone may explain more: as much as a run moves whose starting weights were changed by
what rounding may change them (tests/rounding.py). The exit status says whether a run missed both. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from lib.system import mpi_and_blas  # noqa: E402

LAUNCH = mpi_and_blas.launch_environment()
mpi_and_blas.prepare()

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import train as script  # noqa: E402
from lib.config import load  # noqa: E402
from lib.distributed import world as worlds  # noqa: E402
from lib.distributed.world import World  # noqa: E402
from tests import rounding, tiny  # noqa: E402

BAR = 1e-4
STEPS, BLOCKS = 20, 12
CUTS = {2: ([6, 6], [9, 3]), 3: ([4, 4, 4], [6, 1, 5]), 4: ([3, 3, 3, 3], [1, 5, 2, 4])}  # even, uneven
LIMITS = {"max_position_embeddings": 64, "rope_theta": 10000.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": LIMITS | {"tie_word_embeddings": True},
    "qwen3": LIMITS,
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 5, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * (BLOCKS // 2)},
    "qwen3_moe": LIMITS | EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}
METHODS = {
    "lora": (),
    "dora": ("model.method=dora",),
    "full": ("model.method=full", "train.learning_rate=1e-4"),
    "4-bit lora": (),
    "4-bit dora": ("model.method=dora",),
}
LOSSES = ("sigmoid", "sft", "orpo", "ipo", "kto")

Case = tuple[str, str, str]  # family, method, loss


def cases_of(families: Sequence[str], methods: Sequence[str]) -> list[Case]:
    """Each family with each method. Losses take turns, so that every method and every family meets every one."""
    return [
        (family, method, LOSSES[(list(FAMILIES).index(family) + list(METHODS).index(method)) % len(LOSSES)])
        for family in families
        for method in methods
    ]


def words_of(folder: Path, case: Case, seed: int) -> list[str]:
    """Settings of a run of one rank."""
    family, method, loss = case
    words = [f"model.path={folder / family / method.partition(' ')[0]}", f"data.train={folder / 'train.jsonl'}"]
    words += ["data.max_length=64", "data.length_multiple=8", "data.valid=null", "evaluate.samples=0"]
    words += [f"train.loss={loss}", f"train.steps={STEPS}", "train.global_batch_size=8", "train.schedule=constant"]
    words.append(f"train.seed={seed}")
    words += ["train.learning_rate=1e-3", *METHODS[method], "plan.micro_batch_sizes=[3]"]
    if "dora" in method and family in ("qwen3_moe", "mixtral"):  # mlx-lm has no DoRA of experts
        words.append("model.keys=[self_attn.q_proj,self_attn.o_proj]")
    return [*words, f"run.dir={folder / 'runs'}", "run.pages=false", f"plan.calibration_dir={folder}"]


def write_models(folder: Path, families: Sequence[str]) -> None:
    """Every family's model at the places that `words_of` names."""
    for family in families:
        shape = {"model_type": family.partition("-")[0], "num_hidden_layers": BLOCKS, "head_dim": 16} | FAMILIES[family]
        (folder / family).mkdir()
        stored = tiny.stored_model(folder / family, **shape)
        for name in ("lora", "dora", "full"):
            (folder / family / name).symlink_to(stored)
        (folder / family / "quantised").mkdir()
        tiny.stored_model(folder / family / "quantised", quantised=True, **shape)
        (folder / family / "4-bit").symlink_to(folder / family / "quantised/stored")


def train(words: Sequence[str], world: World, name: str) -> Path:
    settings = load.load(None, [*words, f"run.name={name}"])
    with contextlib.redirect_stdout(io.StringIO()):
        script.train(settings, world, resume=False, dry_run=False)
    return Path(settings.run.dir) / name


def name_of(case: Case, cut: Sequence[int] = ()) -> str:
    return "-".join([*case, *map(str, cut)]).replace(" ", "-")


def play(folder: Path, cases: Sequence[Case], seed: int) -> None:
    """This rank's part of the runs of a world."""
    world = worlds.start(LAUNCH, timeout_seconds=60)
    for case in cases:
        for cut in CUTS[world.size]:
            words = [*words_of(folder, case, seed), "strategy=pipelined", f"plan.shares={cut}"]
            train(words, world, name_of(case, cut))
    world.gather_text("finished")


def compare(folder: Path, cases: Sequence[Case], sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """A row for each case: what every cut's weights differ by from one rank's, and what rounding explains."""
    alone = {case: train(words_of(folder, case, seed), World(), name_of(case)) for case in cases}
    rows: list[dict[str, Any]] = []
    for case, run in alone.items():
        differences = {
            "+".join(map(str, cut)): tiny.difference(run, folder / "runs" / name_of(case, cut))
            for size in sizes
            for cut in CUTS[size]
        }
        missed = [cut for cut, difference in differences.items() if difference > BAR]
        explained = rounding.limit_of(run) if missed else None
        red = [cut for cut in missed if differences[cut] > (explained or 0.0)]
        rows.append(
            dict(zip(("family", "method", "loss"), case, strict=True))
            | {"differences": differences, "explained": explained, "missed": red}
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"weights after {STEPS} steps, relative to one rank's")
    for column in ("family", "method", "loss", *rows[0]["differences"], "rounding explains"):
        table.add_column(column, justify="left" if column in ("family", "method", "loss") else "right")
    for row in rows:
        figures = [f"{difference:.1e}" for difference in row["differences"].values()]
        explained = "" if row["explained"] is None else f"{row['explained']:.1e}"
        table.add_row(row["family"], row["method"], row["loss"], *figures, explained)
    Console(width=150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="with commas (default: all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(CUTS), default=list(CUTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the first family, two ranks")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    families, methods = options.families.split(",")[: 1 if options.quick else None], options.methods.split(",")
    for names, known in ((families, FAMILIES), (methods, METHODS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f"{unknown[0]} is not known; there are {', '.join(known)}")
    sizes = [2] if options.quick else options.ranks
    cases = cases_of(families, methods)
    if LAUNCH.size > 1:
        play(options.folder, cases, options.seed)
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny.write_jsonl(folder / "train.jsonl", list(tiny.pairs(21)))
        write_models(folder, families)
        for size in sizes:
            ranks = [str(mpi_and_blas.mpirun_path()), "-n", str(size), sys.executable, str(Path(__file__).resolve())]
            chosen = ["--families", ",".join(families), "--methods", options.methods, "--seed", str(options.seed)]
            subprocess.run([*ranks, *chosen, "--folder", place], cwd=ROOT, check=True)
            print(f"{size} ranks: {len(cases)} runs of each cut ended", file=sys.stderr, flush=True)
        rows = compare(folder, cases, sizes, options.seed)
    show(rows)
    largest = max(difference for row in rows for difference in row["differences"].values())
    red = sum(len(row["missed"]) for row in rows)
    runs = sum(len(row["differences"]) for row in rows)
    beyond = sum(difference > BAR for row in rows for difference in row["differences"].values())
    print(f"{runs} pipelined runs, {largest:.1e} at most: {beyond} beyond {BAR:g}, {red} beyond what rounding explains")
    print(json.dumps({"rows": rows, "runs": runs, "largest": largest, "beyond_bar": beyond, "red": red}))
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
