"""Two hosts on a slow link: what ranks that train apart keep of their summed speed, and what they send.

    python benchmarks/slow_link.py              about seven minutes on two cores, as root, on Linux
    python benchmarks/slow_link.py --quick      about a minute

Two hosts made of network namespaces (tests/cluster.py), one of them with a part of the other's CPU time, on a link of
100 Mbit/s. Full training of the quickstart's model: each host alone (at the same time), both synchronously, both apart in one
round, both apart with int8 changes. Bytes are what rank 0 says that it sent in steps and merges, and what its network interface
counted from start to end, agreement before training and the last checkpoint included. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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

from tests.cluster import Host, cluster  # noqa: E402

QUICKSTART = ROOT / "configs/quickstart.yaml"
PORT = 5100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", default="100mbit", help="of the link, in tc's words")
    parser.add_argument("--quota", type=float, default=0.4, help="cores' worth of CPU time of the second host")
    parser.add_argument("--global-batch", type=int, default=64, help="pairs of a step")
    parser.add_argument("--steps", type=int, default=None, help="global batches of a run (default 126)")
    parser.add_argument("--quick", action="store_true", help="24 steps")
    options = parser.parse_args()
    steps = options.steps or (24 if options.quick else 126)
    common = [f"train.seed={options.seed}", "model.method=full", "train.learning_rate=2e-5", "evaluate.samples=0"]
    common += ["evaluate.every=null", "evaluate.answers=null", "data.valid=null", "checkpoint.every=1000000"]
    common += [f"train.global_batch_size={options.global_batch}", f"train.steps={steps}", "run.log_every=1000000"]
    apart = ["strategy=independent", "independent.pairs_per_round=1000000", "plan.replan=true"]
    fewer = ["strategy=synchronous", f"train.steps={max(8, steps // 4)}"]
    ways: dict[str, list[str]] = {
        "synchronous": fewer,
        "synchronous, int8": [*fewer, "sync.compression=int8"],
        "independent": apart,
        "independent, int8": [*apart, "sync.compression=int8"],
    }
    rows: list[dict[str, Any]] = []
    with cluster(hosts=2, quotas=(1.0, options.quota), rate=options.rate) as hosts:
        # Both at the same time, because the two hosts share the machine's memory, and whatever else slows it.
        alone = [
            start([host], [*common, f"train.steps={count}", "run.name=alone"], PORT)[0]
            for host, count in zip(hosts, (max(8, steps // 2), max(4, int(steps / 2 * options.quota))), strict=True)
        ]
        for name, summary in zip(("first host alone", "second host alone"), map(finished, alone), strict=True):
            rows.append({"way": name, "steps": summary["steps"], "pairs_per_second": summary["pairs_per_second"]})
        for number, (name, words) in enumerate(ways.items(), 1):
            before = sent_by(hosts[0])
            processes = start(hosts, [*common, *words, f"run.name=way-{number}"], PORT + 10 * number)
            summary = [finished(process) for process in processes][0]
            rows.append(
                {
                    "way": name,
                    "steps": summary["steps"],
                    "pairs_per_second": summary["pairs_per_second"],
                    "bytes_per_step": summary["bytes_sent"] / summary["steps"],
                    "interface_bytes_per_step": (sent_by(hosts[0]) - before) / summary["steps"],
                }
            )
    solo = rows[0]["pairs_per_second"] + rows[1]["pairs_per_second"]
    full = next(row for row in rows if row["way"] == "synchronous")
    for row in rows:
        row["efficiency"] = row["pairs_per_second"] / solo
        row["fewer_bytes"] = full["bytes_per_step"] / row["bytes_per_step"] if "bytes_per_step" in row else None
    table = Table(
        title=f"two hosts, {options.rate}, the second with {options.quota:g} of a core; full training, batch {options.global_batch}"
    )
    for column in ("", "steps", "pairs/s", "of the summed speed", "MB a step", "on the interface", "fewer bytes"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        fewer = f"{row['fewer_bytes']:.0f}x" if row["fewer_bytes"] else "-"
        sizes = (f"{row.get(key, 0) / 1e6:.4f}" for key in ("bytes_per_step", "interface_bytes_per_step"))
        cells = (
            row["way"],
            str(row["steps"]),
            f"{row['pairs_per_second']:.2f}",
            f"{row['efficiency']:.1%}",
            *sizes,
            fewer,
        )
        table.add_row(*cells)
    Console(width=140).print(table)
    print(json.dumps({"rate": options.rate, "quota": options.quota, "steps": steps, "rows": rows}))


def start(hosts: list[Host], words: list[str], port: int) -> list[subprocess.Popen[str]]:
    """One run over MLX's ring, a rank a host."""
    addresses = json.dumps([[f"{host.address}:{port + rank}"] for rank, host in enumerate(hosts)])
    processes = []
    for rank, host in enumerate(hosts):
        variables = dict(os.environ)
        if len(hosts) > 1:
            (host.outside / "ring.json").write_text(addresses)
            variables |= {"MLX_HOSTFILE": str(host.disk / "ring.json"), "MLX_RANK": str(rank)}
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(QUICKSTART), f"run.dir={host.disk}/runs"]
        processes.append(host.start([*command, f"plan.calibration_dir={host.disk}", *words], env=variables, cwd=ROOT))
    return processes


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    """A rank's summary once it has ended; rank 0 prints one."""
    output, errors = process.communicate(timeout=900)
    if process.returncode:
        sys.exit(errors)
    return json.loads(output.splitlines()[-1]) if output.strip() else {}


def sent_by(host: Host) -> int:
    """Bytes that have left the host's network interface."""
    line = next(line for line in host.run(["cat", "/proc/net/dev"]).stdout.splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])


if __name__ == "__main__":
    main()
