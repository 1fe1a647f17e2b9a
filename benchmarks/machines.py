"""Which machine for which size of model, from memory and measured speed; and the plans of two that nobody calibrated.

    python benchmarks/machines.py                       the hosts in calibration/, else the published ones
    python benchmarks/machines.py --hosts published:m4-max,published:m3-ultra --bytes-per-parameter 0.56
    python benchmarks/machines.py --model FOLDER        for one model, from its config.json, by the memory model (lib/plan/memory.py)
    python benchmarks/machines.py --plans               the published machines' plans for LoRA of 1B to 70B, by the memory model

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib import environment

environment.enter()

from rich.console import Console
from rich.table import Table

from benchmarks.decide import Q4, dense  # noqa: E402
from lib.config import (
    command_line,  # noqa: E402
    load,  # noqa: E402
)
from lib.errors import UserError  # noqa: E402
from lib.model import partition  # noqa: E402
from lib.plan.calibration import FOLDER, MEMORY_HEADROOM, CurveKey, HostCalibration, read_calibration, read_published
from lib.plan.plan import ClusterPlan  # noqa: E402
from lib.plan.memory import MemoryModel, Rows, metal_limit_bytes  # noqa: E402
from lib.plan.memory_trace import Training  # noqa: E402
from lib.plan.run_facts import RankHost, RunFacts  # noqa: E402
from lib.plan.run_plan import plan_run  # noqa: E402

LENGTHS = (512, 512)  # of prompts and completions, in tokens
BATCH = 64
MODELS = {
    "1B": dense(2048, 16, 32, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "8B": dense(4096, 32, 32, 14336, 128256),
    "8B 4-bit": dense(4096, 32, 32, 14336, 128256, **Q4),
    "32B 4-bit": dense(5120, 64, 40, 27648, 152064, model_type="qwen2", **Q4),
    "70B 4-bit": dense(8192, 80, 64, 28672, 128256, **Q4),
}
SIZES = (1e9, 3e9, 8e9, 14e9, 32e9, 70e9, 120e9, 200e9, 240e9, 405e9, 671e9)


def machine_for(
    parameters: float, hosts: Sequence[HostCalibration], bytes_per_parameter: float, overhead: float
) -> dict[str, Any]:
    """Where a model of that size trains best.

    Args:
        overhead: memory for adapters, the activations of a pair and the rest, as a part of the weights.

    Returns:
        needed_bytes; `fits`: the hosts that hold it, the fastest first; `machine`: the first of them, or
        "distributed" where only all hosts together hold it, or None; `together`: the speed of all that hold
        it, each with a whole copy, over that of the fastest.
    """
    needed = parameters * bytes_per_parameter * (1 + overhead)
    room = {h.machine.host: (1 - MEMORY_HEADROOM) * (h.machine.memory_bytes or 0) for h in hosts}
    speed = dict(zip(room, speeds(hosts), strict=True))
    fits = sorted((host for host in room if room[host] >= needed), key=lambda host: -speed[host])
    together = len(hosts) > 1 and sum(room.values()) >= needed
    return {
        "parameters": parameters,
        "needed_bytes": needed,
        "machine": fits[0] if fits else "distributed" if together else None,
        "fits": fits,
        "together": sum(speed[host] for host in fits) / speed[fits[0]] if fits else None,
    }


def limit_bytes(host: HostCalibration) -> int:
    """What MLX may use there: of a Mac's memory what Metal recommends, as its size alone tells."""
    size = host.machine.memory_bytes or 0
    return metal_limit_bytes(size) if host.machine.device == "metal" else size


def plan_for(
    name: str, stored: dict[str, Any], hosts: Sequence[HostCalibration], words: Sequence[str] = ()
) -> dict[str, Any]:
    """What a run of LoRA-DPO on these hosts would do without a calibration of the model: one row a rank.

    Args:
        stored: the model's config.json. words: key=value settings.
    """
    config = load.load(None, ["model.path=-", "data.train=-", f"train.global_batch_size={BATCH}", *words])
    prompt, completion = LENGTHS
    rows = Rows(prompt, prompt + completion, prompt + 2 * completion, 2 * completion)
    shape = partition.model_shape_of(stored, to_divide=False)
    can_divide = stored.get("model_type") in partition.FAMILIES
    shared = Training(method=config.model.method, rank=config.model.rank, shared_prompts=can_divide)
    limits = [limit_bytes(host) for host in hosts]
    machines = [host.machine for host in hosts]
    ranks = [
        RankHost(machine.host, None, machine.device_name, machine.device, memory_bytes=limit)
        for machine, limit in zip(machines, limits, strict=True)
    ]
    facts = RunFacts(
        CurveKey(model=name, method=config.model.method, dtype="bfloat16", sequence_length=rows.seen),
        longest=rows.seen,
        backend="ring",
        published=list(read_published().values()),
        dataset_size=10_000,
        shape=shape if can_divide else None,
        block_shape=shape,
        memory_model=MemoryModel(shape, shared, rows),
    )
    try:
        plan = plan_run(config, ranks, facts)
    except UserError as error:
        return {"model": name, "strategy": None, "error": str(error), "ranks": []}
    ranks = [
        {
            "host": rank.host,
            "share": part_of(plan, rank.rank),
            "micro_batch_size": max(rank.micro_batch_sizes, default=0),
            "planned_bytes": planned_bytes(plan, rank.rank),
            "limit_bytes": limit,
        }
        for rank, limit in zip(plan.ranks, limits, strict=True)
    ]
    return {
        "model": name,
        "strategy": plan.strategy,
        "gradient_checkpointing": any(plan.checkpoints_blocks(rank.rank) for rank in plan.ranks),
        "reason": plan.reason,
        "ranks": ranks,
    }


def part_of(plan: ClusterPlan, rank: int) -> str:
    """Pairs of a step, or what a rank keeps of the model."""
    if plan.stages:
        return f"{plan.blocks[rank]} blocks"
    return f"{plan.parts[rank].share:.0%}" if plan.parts else str(plan.ranks[rank].share)


def planned_bytes(plan: ClusterPlan, rank: int) -> int:
    """What a rank holds at its largest moment; 0 where that is not known."""
    if plan.stages:
        return plan.stages[rank].needed_bytes
    if plan.parts:
        return plan.parts[rank].needed_bytes + (plan.parts[rank].activation_bytes or 0)
    return plan.ranks[rank].planned_bytes or 0


def show_plans(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(box=None, title_justify="left")
    prompt, completion = LENGTHS
    table.title = (
        f"LoRA, pairs of {prompt} + 2 x {completion} tokens, {BATCH} a step, not calibrated: planned by arithmetic"
    )
    for column in ("model", "strategy", "host", "share", "micro-batch", "checkpointing", "planned GB", "limit GB"):
        table.add_column(column, justify="left" if column in ("model", "strategy", "host") else "right")
    for row in rows:
        if row["strategy"] is None:
            table.add_row(row["model"], "too large")
        for rank in row["ranks"]:
            table.add_row(
                row["model"],
                row["strategy"],
                rank["host"],
                rank["share"],
                str(rank["micro_batch_size"]),
                "on" if row["gradient_checkpointing"] else "off",
                f"{rank['planned_bytes'] / 1e9:.1f}",
                f"{rank['limit_bytes'] / 1e9:.1f}",
            )
    console.print(table)


def model_rows(path: Path, hosts: Sequence[HostCalibration]) -> list[dict[str, Any]]:
    """A model's plan on each host alone, and on all together.

    Raises:
        UserError: no config.json, or one whose dimensions are not understood.
    """
    try:
        stored = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path}: config.json cannot be read: {error}") from None
    groups = [[host] for host in hosts] + ([list(hosts)] if len(hosts) > 1 else [])
    return [plan_for(path.name, stored, group) for group in groups]


def speeds(hosts: Sequence[HostCalibration]) -> list[float]:
    """One a host, on one footing: pairs/s of curves measured alike (or all published), else the matmul rates.

    Raises:
        UserError: nothing compares them.
    """
    curves = [{curve.key: curve for curve in host.curves} for host in hosts]
    alike = set.intersection(*(set(of_host) for of_host in curves))
    if alike:
        key = min(alike, key=str)
        return [max(point.pairs_per_second for point in of_host[key].points) for of_host in curves]
    rates = [host.gflops for host in hosts if host.gflops]
    if len(rates) < len(hosts):
        names = ", ".join(host.machine.host for host in hosts)
        raise UserError(f"nothing compares {names}: no curve of one model; run make calibrate on all of them")
    return rates


def why(row: dict[str, Any]) -> str:
    if len(row["fits"]) > 1:
        others = ", ".join(row["fits"][1:])
        return f"the fastest that holds it; with {others} by shares {row['together']:.2f} times as fast"
    if row["fits"]:
        return "the only one that holds it"
    return (
        "pipelined or sharded: no machine holds it alone"
        if row["machine"]
        else "more than all of them hold: quantise it"
    )


def known_hosts(names: str | None, folder: Path = FOLDER) -> dict[str, HostCalibration]:
    """By name: those asked for, else the measured ones, else the published ones.

    Raises:
        UserError: a name that is not known, or a damaged file.
    """
    published = {f"published:{name}": one for name, one in read_published().items()}
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    wanted = names.split(",") if names else list(files) or list(published)
    for name in wanted:
        if name not in files and name not in published:
            raise UserError(f"--hosts {name}: not known; there are {', '.join([*files, *published])}")
    return {name: published.get(name) or read_calibration(files[name]) for name in wanted}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = command_line.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", metavar="A,B", help="names of files in calibration/, or published:NAME")
    add("--bytes-per-parameter", type=float, metavar="X", default=2.0, help="2 for bfloat16, 0.56 for 4 bits")
    add(
        "--overhead",
        type=float,
        metavar="X",
        default=0.1,
        help="memory beside the weights, as a part of them",
    )
    add("--model", type=Path, metavar="FOLDER", help="a model's folder: where it fits, and with which micro-batches")
    add("--plans", action="store_true", help=f"plans for {', '.join(MODELS)}")
    add("--quick", action="store_true", help="it is quick")
    add("--seed", type=int, default=0, help="nothing here is random")
    try:
        options = parser.parse_args(arguments)
        if options.bytes_per_parameter <= 0 or options.overhead < 0:
            raise UserError("--bytes-per-parameter is above 0, --overhead at least 0")
        macs = ",".join(f"published:{name}" for name in read_published())
        hosts = known_hosts(options.hosts or (macs if options.plans else None))
        known, per_parameter = list(hosts.values()), options.bytes_per_parameter
        if options.model or options.plans:
            plans = model_rows(options.model, known) if options.model else []
            plans = plans or [plan_for(name, stored, known) for name, stored in MODELS.items()]
            show_plans(plans, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
            print(json.dumps({"hosts": list(hosts), "plans": plans}))
            return 0
        rows = [machine_for(size, known, per_parameter, options.overhead) for size in SIZES]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table(box=None, title_justify="left")
    table.title = f"{options.bytes_per_parameter:g} bytes a parameter, {options.overhead:.0%} more beside them"
    for column in ("model", "needs", "machine", "why"):
        table.add_column(column, justify="right" if column in ("model", "needs") else "left")
    for row in rows:
        size, needed = f"{row['parameters'] / 1e9:g}B", f"{row['needed_bytes'] / 1e9:.0f} GB"
        table.add_row(size, needed, row["machine"] or "none", why(row))
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    print(json.dumps({"hosts": list(hosts), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
