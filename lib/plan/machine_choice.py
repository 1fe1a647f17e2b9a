"""Which machine for which model: one line a host, whether the model fits and why, how fast it is, and which to take.

    python -m lib.plan --model FOLDER                       the hosts of calibration/, else two Macs
    python -m lib.plan --model 8B --hosts m5-max,h200       a size: bf16 Llama; 70B-4bit, 8B-full

The planner's own limits: a Mac's GPU may hold about three quarters of its memory, of which a tenth stays free. Speeds
are those of matrix products, as measured or published.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.config import read_file
from lib.config.command_line import Parser
from lib.config.load import load
from lib.errors import UserError
from lib.model.partition import ModelShape, model_shape_of
from lib.plan.calibration import FOLDER, MEMORY_HEADROOM, CurveKey, HostCalibration, read_calibration, read_published
from lib.plan.facts import HostSpeeds, PlanFacts, RankHost
from lib.plan.memory import MemoryModel, Rows, Training, metal_limit_bytes, whole_weight_bytes
from lib.plan.shares import solo_pairs_per_second
from lib.system.mpi_and_blas import reported

ROWS = Rows(prompt=512, seen=1024, tokens=1536, scored=1024)  # a pair of 512 + 2 x 512 tokens
WIDTHS = {
    1: (2048, 16),
    3: (3072, 28),
    8: (4096, 32),
    14: (5120, 48),
    32: (5120, 64),
    70: (8192, 80),
    405: (16384, 126),
}
"""Hidden sizes and blocks of known models, by billions of parameters."""


def shape_of(model: str) -> tuple[ModelShape, Training]:
    """The dimensions of a model folder, or of a Llama of so many parameters, e.g. 70B-4bit or 8B-full; or UserError."""
    config = Path(model) / "config.json"
    if config.is_file():
        return model_shape_of(read_file.read_object(config, "--model"), to_divide=False), Training()
    size = re.fullmatch(r"(\d+(?:\.\d+)?)B(?:-(4|8)bit)?(-full)?", model, re.IGNORECASE)
    if size is None:
        raise UserError(f"--model {model}: neither a folder with config.json nor a size: 8B, 70B-4bit or 8B-full")
    billions = float(size[1])
    hidden, blocks = WIDTHS[min(WIDTHS, key=lambda size: abs(size - billions))]
    attention = 2 * hidden * hidden + 2 * hidden * 8 * 128
    columns = max(hidden, (billions * 1e9 - 2 * 128256 * hidden) / blocks - attention) / (3 * hidden)
    stored: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": round(columns / 64) * 64,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **({"quantization": {"group_size": 64, "bits": int(size[2])}} if size[2] else {}),
    }
    return model_shape_of(stored, to_divide=False), Training(method="full" if size[3] else "lora")


def calibrated_hosts(names: Sequence[str], folder: Path) -> list[HostCalibration]:
    """Calibrations by name, measured or published; without names all measured ones, else the published Macs."""
    published = read_published()
    measured = {path.stem: read_calibration(path) for path in sorted(folder.glob("[!.]*.json"))}
    every = published | measured
    if missing := [name for name in names if name not in every]:
        raise UserError(f"--hosts {','.join(names)}: no calibration of {missing[0]}; known are {', '.join(every)}")
    usual = measured or {name: host for name, host in published.items() if host.curves}
    return [every[name] for name in names or usual]


def verdict(shape: ModelShape, training: Training, host: HostCalibration) -> dict[str, Any]:
    """Whether a host holds a model and one pair, perhaps with checkpointing alone, and how fast it trains."""
    machine, size = host.machine, host.machine.memory_bytes or 0
    limit = metal_limit_bytes(size) if machine.device == "metal" else size
    room, memory = round((1 - MEMORY_HEADROOM) * limit), MemoryModel(shape, training, ROWS, ROWS)
    plain, checkpointed = (memory.bytes(1, machine.device, recomputes).total for recomputes in (False, True))
    config = load(None, ["model.path=model", "data.train=data", f"model.method={training.method}"])
    key = CurveKey(model="", method=training.method, dtype="", sequence_length=ROWS.seen)
    rank = RankHost(machine.host, None, machine.device_name, machine.device, host.gflops, limit)
    published = list(read_published().values())
    facts = PlanFacts(config, [rank], key, ROWS.seen, "ring", 1, published=published, memory=memory)
    curves = HostSpeeds.of(facts).whole_curves(plain > room)
    needed = min(plain, checkpointed) if plain > room else plain
    return {
        "host": machine.host,
        "chip": machine.device_name,
        "fits": needed <= room,
        "checkpointing": plain > room,
        "needed_bytes": needed,
        "room_bytes": room,  # that may be planned for
        "pairs_per_second": solo_pairs_per_second(curves[0]) if curves else None,
    }


def show(shape: ModelShape, training: Training, hosts: Sequence[HostCalibration]) -> None:
    """A line a host, the machine to take (the fastest that holds the model, else all hosts together), and as JSON."""
    rows, weights = [verdict(shape, training, host) for host in hosts], whole_weight_bytes(shape)
    print(f"weights {weights / 1e9:.3g} GB; one pair of {ROWS.tokens:,} tokens:")
    for row in rows:
        fits = ("fits" if row["fits"] else "does not fit") + " with gradient checkpointing" * row["checkpointing"]
        sizes = f"needs {row['needed_bytes'] / 1e9:.3g} GB of {row['room_bytes'] / 1e9:.3g} GB that may be planned for"
        speed = f"; about {row['pairs_per_second']:.2g} pairs/s" if row["pairs_per_second"] and row["fits"] else ""
        print(f"  {row['host']} ({row['chip']}): {fits}, {sizes}{speed}")
    fitting = sorted((row for row in rows if row["fits"]), key=lambda row: -(row["pairs_per_second"] or 0.0))
    machine, *others = [row["host"] for row in fitting] or [None]
    if machine:
        beside = f"; {', '.join(others)} can work beside it with a copy (strategy=independent)" if others else ""
        print(f"take: {machine}, the fastest that holds it{beside}")
    elif len(rows) > 1 and min(row["needed_bytes"] for row in rows) <= sum(row["room_bytes"] for row in rows):
        machine = "distributed"
        print("take: all of them, each with a part of the model (strategy=auto cuts it into stages)")
    else:
        print("take: none of them holds it, nor do all together; a smaller or a quantised one (14B-4bit) takes less")
    print(json.dumps({"weights_bytes": weights, "hosts": rows, "machine": machine}))


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = Parser(prog="python -m lib.plan", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with config.json, or a size: 8B, 70B-4bit, 8B-full")
    parser.add_argument("--hosts", default="", help="names in the calibration folder or published ones, with commas")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the hosts' calibrations")
    options = parser.parse_args(arguments)
    hosts = calibrated_hosts([name for name in options.hosts.split(",") if name], options.folder)
    show(*shape_of(options.model), hosts)
    return 0
