"""Which machine for which model: one line a host, whether the model fits and why, how fast it is, and which to take.

    python -m lib.plan --model FOLDER                       the hosts of calibration/, else the published Macs
    python -m lib.plan --model 8B --hosts m4-max,m3-ultra   a size: bf16 Llama; 70B-4bit, 8B-full

The planner's own limits: a Mac's GPU may hold about three quarters of its memory, of which a tenth stays free.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import UserError
from lib.model.partition import ModelShape, model_shape_of
from lib.plan.calibration import FOLDER, MEMORY_HEADROOM, HostCalibration, read_calibration, read_published
from lib.plan.memory import MemoryModel, Rows, Training, metal_limit_bytes, whole_weight_bytes

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


def shape_of(model: str) -> tuple[ModelShape, Training]:
    """The dimensions of a model folder, or of a Llama of so many parameters, e.g. 8B, 70B-4bit or 8B-full.

    Raises:
        UserError: neither.
    """
    if (Path(model) / "config.json").is_file():
        return model_shape_of(
            json.loads((Path(model) / "config.json").read_text(encoding="utf-8")), to_divide=False
        ), Training()
    size = re.fullmatch(r"(\d+(?:\.\d+)?)B(?:-(4|8)bit)?(-full)?", model, re.IGNORECASE)
    if size is None:
        raise UserError(
            f"--model {model}: neither a folder with config.json nor a size such as 8B, 70B-4bit or 8B-full"
        )
    parameters = float(size[1]) * 1e9
    hidden, blocks = WIDTHS[min(WIDTHS, key=lambda billions: abs(billions * 1e9 - parameters))]
    head_dim, kv_heads = 128, 8
    attention = 2 * hidden * hidden + 2 * hidden * kv_heads * head_dim
    columns = max(hidden, (parameters - 2 * 128256 * hidden) / blocks - attention) / (3 * hidden)
    stored: dict[str, Any] = {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks}
    stored |= {"num_attention_heads": hidden // head_dim, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    stored |= {"intermediate_size": round(columns / 64) * 64, "vocab_size": 128256, "torch_dtype": "bfloat16"}
    stored |= {"tie_word_embeddings": False} | (
        {"quantization": {"group_size": 64, "bits": int(size[2])}} if size[2] else {}
    )
    return model_shape_of(stored, to_divide=False), Training(method="full" if size[3] else "lora")


def known_hosts(names: Sequence[str], folder: Path) -> list[HostCalibration]:
    """The calibrations of some hosts, measured or published; without names all measured ones, else all published.

    Raises:
        UserError: a host has neither.
    """
    published = read_published()
    measured = {path.stem: read_calibration(path) for path in sorted(folder.glob("[!.]*.json"))}
    if unknown := [name for name in names if name not in measured and name not in published]:
        known = ", ".join(dict.fromkeys([*measured, *published]))
        raise UserError(f"--hosts {','.join(unknown)}: no calibration of {unknown[0]}; known are {known}")
    return [measured.get(name) or published[name] for name in names] or list((measured or published).values())


def limit_bytes(host: HostCalibration) -> int:
    """What MLX may use there."""
    size = host.machine.memory_bytes or 0
    return metal_limit_bytes(size) if host.machine.device == "metal" else size


def answer(shape: ModelShape, training: Training, hosts: Sequence[HostCalibration]) -> dict[str, Any]:
    """One row a host, and the machine to take: the fastest that holds the model, else all hosts together."""
    rows = []
    memory = MemoryModel(shape, training, ROWS)
    for host in hosts:
        device, room = host.machine.device, (1 - MEMORY_HEADROOM) * limit_bytes(host)
        plain, checkpointed = (memory.bytes(1, device, recomputes).total for recomputes in (False, True))
        speed = host.gflops or (host.curves[0].best_point.pairs_per_second if host.curves else 0.0)
        rows.append(
            {
                "host": host.machine.host,
                "chip": host.machine.device_name,
                "fits": plain <= room or checkpointed <= room,
                "checkpointing": plain > room,
                "needed_bytes": min(plain, checkpointed) if plain > room else plain,
                "room_bytes": round(room),
                "speed": speed,
            }
        )
    fitting = sorted((row for row in rows if row["fits"]), key=lambda row: -float(str(row["speed"])))
    together = whole_weight_bytes(shape) <= sum(int(str(row["room_bytes"])) for row in rows) and len(rows) > 1
    machine = fitting[0]["host"] if fitting else "distributed" if together else None
    return {"weights_bytes": whole_weight_bytes(shape), "hosts": rows, "machine": machine}


def show(found: dict[str, Any]) -> None:
    fastest = max((row["speed"] for row in found["hosts"]), default=0.0) or 1.0
    print(f"weights {found['weights_bytes'] / 1e9:.3g} GB; one pair of {ROWS.tokens:,} tokens:")
    for row in found["hosts"]:
        how = " with gradient checkpointing" * row["checkpointing"]
        verdict = "fits" + how if row["fits"] else "does not fit" + how
        sizes = f"needs {row['needed_bytes'] / 1e9:.3g} GB of {row['room_bytes'] / 1e9:.3g} GB that may be planned for"
        print(f"  {row['host']} ({row['chip']}): {verdict}, {sizes}; speed {row['speed'] / fastest:.0%} of the fastest")
    if found["machine"] == "distributed":
        print("take: all of them, each with a part of the model (strategy=auto cuts it into stages)")
    elif found["machine"] is None:
        print("take: none of them holds it, nor do all together; a quantised model (e.g. 70B-4bit) takes less")
    else:
        also = [row["host"] for row in found["hosts"] if row["fits"] and row["host"] != found["machine"]]
        beside = f"; {', '.join(also)} can work beside it with a copy (strategy=independent)" if also else ""
        print(f"take: {found['machine']}, the fastest that holds it{beside}")
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = argparse.ArgumentParser(
        prog="python -m lib.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with config.json, or a size: 8B, 70B-4bit, 8B-full")
    parser.add_argument("--hosts", default="", help="names in the calibration folder or published ones, with commas")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the hosts' calibrations")
    options = parser.parse_args(arguments)
    try:
        hosts = known_hosts([name for name in options.hosts.split(",") if name], options.folder)
        show(answer(*shape_of(options.model), hosts))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
