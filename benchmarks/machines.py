"""Which machine for which size of model, from memory and measured speed.

    python benchmarks/machines.py            the hosts in calibration/, else the published ones
    python benchmarks/machines.py --hosts published:m4-max,published:m3-ultra --bytes-per-parameter 0.56

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

from lib import config as settings  # noqa: E402
from lib.calibration import (  # noqa: E402
    FOLDER,
    MEMORY_HEADROOM,
    HostCalibration,
    read_calibration,
    read_published,
)
from lib.config import UserError  # noqa: E402

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
    return "sharded: no machine holds it alone" if row["machine"] else "more than all of them hold: quantise it"


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
    parser = settings.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    add("--quick", action="store_true", help="it is quick")
    add("--seed", type=int, default=0, help="nothing here is random")
    try:
        options = parser.parse_args(arguments)
        if options.bytes_per_parameter <= 0 or options.overhead < 0:
            raise UserError("--bytes-per-parameter is above 0, --overhead at least 0")
        hosts = known_hosts(options.hosts)
        known, per_parameter = list(hosts.values()), options.bytes_per_parameter
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
