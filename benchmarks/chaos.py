"""A training under a stream of faults, on hosts made of network namespaces (root, Linux), and what they cost.

    python benchmarks/chaos.py --faults 60          a training of the quickstart's model; about half an hour
    python benchmarks/chaos.py --quick              6 faults on a tiny model, two or three minutes

Two hosts train, a third one launches them with `--max-restarts`. Each fault comes a random time after training goes on
from the last one: a rank killed (`kill`) or stopped (`stop`), a host's cable out for a while (`cut`), a firewall that
lets only ssh through (`ports`), a full disk (`full`), the newest checkpoint torn on both disks and a rank killed
(`torn`), the launcher killed (`launcher`). After `full` and `launcher` the command is given again with --resume, as a
person would. At the end the logs of all disks have to show every example exactly once an epoch. Goodput is the part of
the time in which training made steps that it had not made before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib import runtime  # noqa: E402

runtime.prepare()

from lib.performance import read_records  # noqa: E402
from tests import tiny  # noqa: E402
from tests.cluster import Host, cluster  # noqa: E402

KINDS = ("kill", "stop", "cut", "ports", "full", "torn", "launcher")
HANG_SECONDS = 120.0  # without a new step: given up
DISK_BYTES = 256 * 2**20  # of each host's runs


class Launch:
    """The launcher on its own host, and the lines that it writes."""

    def __init__(self, host: Host, command: list[str]):
        self.host, self.command = host, command
        self.lines: list[tuple[float, str]] = []
        self.start(command)

    def start(self, command: list[str]) -> None:
        self.process = self.host.start(command, stdout=subprocess.DEVNULL)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: Any) -> None:
        for line in process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def first(self, pattern: str, since: float) -> float | None:
        """When a line that matches came, after `since`."""
        return next((at for at, line in self.lines if at >= since and re.search(pattern, line)), None)

    def resume(self, run: Path) -> None:
        """Gives the command again, with --resume."""
        cut = self.command.index("--")
        self.start([*self.command[: cut + 1], "train.py", "--resume", str(run)])


def mount(host: Host) -> Path:
    """A host's own small disk, as seen from here."""
    return Path(f"{host.root}{host.disk}/mnt")


def logs(hosts: list[Host]) -> list[Path]:
    return [log for host in hosts for log in sorted((mount(host) / "runs/run/logs").glob("rank-*.jsonl"))]


def newest_step(hosts: list[Host]) -> int:
    """The last step of any log, read from its end."""
    newest = 0
    for log in logs(hosts):
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            for line in file.read().split(b"\n"):
                found = re.match(rb'\{"kind": "step".*?"step": (\d+)', line)
                newest = max(newest, int(found[1]) if found else 0)
    return newest


def rank_process(host: Host) -> int | None:
    found = [
        pid
        for pid, line in host.processes().items()
        if re.search(r"\btrain\.py\b", line) and not re.search("launch|lib.agent|sh -c", line)
    ]
    return found[0] if found else None


def checkpoints(host: Host) -> list[Path]:
    return sorted((mount(host) / "runs/run/checkpoints").glob("step-*"))


def do(kind: str, victim: Host, hosts: list[Host], launch: Launch, rng: random.Random) -> Callable[[], None]:
    """Brings a fault about; returns what mends it, to be called once it was noticed."""
    if kind in ("kill", "stop", "torn"):
        if kind == "torn":
            # The newest on every disk, and not the only one.
            newest = min((found[-1].name for host in hosts if len(found := checkpoints(host)) > 1), default=None)
            for host in hosts:
                path = mount(host) / "runs/run/checkpoints" / str(newest) / "optimizer.safetensors"
                if path.exists():
                    path.write_bytes(path.read_bytes()[: rng.randrange(1, path.stat().st_size)])
        pid = rank_process(victim)
        if pid is not None:
            victim.signal(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        return lambda: None
    if kind == "cut":
        victim.unplug()
        return victim.plug_in
    if kind == "ports":
        victim.only_ssh()
        return lambda: victim.only_ssh(False)
    if kind == "full":
        victim.run(["sh", "-c", f"cat /dev/zero > {victim.disk}/mnt/filler"])
        return lambda: (mount(victim) / "filler").unlink()
    launcher = next(pid for pid, line in launch.host.processes().items() if f"{ROOT}/launch" in line)
    launch.host.signal(launcher, signal.SIGKILL)
    return lambda: None


def one_fault(kind: str, hosts: list[Host], launch: Launch, rng: random.Random, run: Path) -> dict[str, Any]:
    """A fault and its end: seconds until it was noticed, and until training was beyond where it had been."""
    training = [host for host in hosts if rank_process(host)] or hosts  # one that was cut off may not be back yet
    victim, before = rng.choice(training), newest_step(hosts)
    began = time.monotonic()
    mend = do(kind, victim, hosts, launch, rng)
    noticed, mended, given_again = None, False, False
    while (
        (newest := newest_step(hosts)) <= before
        or (kind != "full" and noticed is None)
        or (kind == "full" and not given_again)
    ):
        now = time.monotonic()
        if now - began > HANG_SECONDS:
            break
        if noticed is None:
            if kind == "launcher":
                noticed = now if launch.process.poll() is not None else None
            else:
                noticed = launch.first(
                    r"launch: (died|silent|lost|stopped|late|wedged): |cannot be written|No space", began
                )
        # A cable is put back, and a firewall opened, some time after the others went on without.
        if noticed is not None and not mended and now - noticed > (8.0 if kind in ("cut", "ports") else 0.0):
            mend()
            mended = True
        if launch.process.poll() is not None and not given_again and (kind != "full" or mended):
            deadline = time.monotonic() + 30
            while any(rank_process(host) for host in hosts) and time.monotonic() < deadline:
                time.sleep(0.1)
            launch.resume(run)
            given_again = True
        time.sleep(0.1)
    if not mended:
        mend()
    ended = time.monotonic()
    hung = newest <= before
    return {
        "kind": kind,
        "host": victim.name,
        "step": before,
        "noticed_seconds": noticed and noticed - began,
        "recovery_seconds": ended - began,
        "hung": hung,
    }


def ledger(hosts: list[Host], rows_an_epoch: int) -> tuple[int, int]:
    """Examples lost and repeated, over whole epochs, by the logs of all disks as they were left."""
    steps: dict[tuple[int, int], list[int]] = {}
    for log in logs(hosts):
        for record in read_records(log):
            if record["kind"] == "step":
                steps.setdefault((record["epoch"], record["step"]), []).extend(record["rows"])
    epochs: dict[int, list[int]] = {}
    for (epoch, _), rows in steps.items():
        epochs.setdefault(epoch, []).extend(rows)
    lost = repeated = 0
    for rows in epochs.values():
        lost += rows_an_epoch - len(set(rows))
        repeated += len(rows) - len(set(rows))
    return lost, repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--backend", choices=("ring", "mpi"), default="ring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="6 faults, a tiny model")
    options = parser.parse_args()
    faults = 6 if options.quick else options.faults
    rng = random.Random(options.seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(faults)]
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as name, cluster(hosts=3) as machines:
        folder, hosts, away = Path(name), machines[:2], machines[2]
        for host in hosts:
            (host.outside / "mnt").mkdir()
            host.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", f"{host.disk}/mnt"])
        run = hosts[0].disk / "mnt/runs/run"
        if options.quick:
            words = [*tiny.settings(folder, rows=45), "--config", str(tiny.config_file(folder)), "checkpoint.every=20"]
            words += ["train.learning_rate=1e-4"]  # roundings, which differ with the world, should stay roundings
            rows, batch = 45, 8
        else:
            words = ["--config", str(ROOT / "configs/quickstart.yaml"), "checkpoint.every=4", "evaluate.samples=0"]
            rows, batch = sum(1 for _ in (ROOT / "configs/quickstart/train.jsonl").open()), 32
        # A constant rate and no end: how long it trains is decided when the faults are over.
        words += ["train.schedule=constant", "plan.replan=false", "evaluate.every=1000000", "run.name=run"]
        options_here = [
            "--no-preflight",
            "--backend",
            options.backend,
            "--max-restarts",
            "1000",
            "--silent-seconds",
            "3",
            "--wedged-seconds",
            "6",
        ]
        start = [sys.executable, str(ROOT / "launch"), "--hosts", "host-a,host-b", *options_here, "--"]
        launch = Launch(away, [*start, "train.py", *words, f"run.dir={run.parent}", "train.steps=1000000"])
        began = time.monotonic()
        wait_for_steps(hosts, 1)
        warm = time.monotonic() - began
        rows_of_table: list[dict[str, Any]] = []
        began = time.monotonic()
        for number, kind in enumerate(kinds, 1):
            deadline = (
                time.monotonic() + HANG_SECONDS
            )  # until all train: a fault of a host that is alone is another one
            while not all(rank_process(host) for host in hosts) and time.monotonic() < deadline:
                time.sleep(0.2)
            wait_for_steps(hosts, newest_step(hosts) + 2)
            time.sleep(rng.uniform(*((1, 4) if options.quick else (5, 15))))
            found = one_fault(kind, hosts, launch, rng, run)
            rows_of_table.append(found)
            print(
                f"{number}/{faults} {kind} on {found['host']} at step {found['step']}: {found['recovery_seconds']:.1f} s",
                flush=True,
            )
            if found["hung"]:
                print("\n".join(line for _, line in launch.lines[-20:]))
                break
        seconds = time.monotonic() - began
        for host in away, *hosts:  # a person ends it
            for pid, line in host.processes().items():
                if f"{ROOT}/launch" in line:
                    host.signal(pid, signal.SIGINT)
        launch.process.wait(30)
        an_epoch = -(-rows // batch)
        steps = an_epoch * (newest_step(hosts) // an_epoch + 1)
        finished = away.run([*start, "train.py", "--resume", str(run), f"train.steps={steps}"], timeout=600)
        assert finished.returncode == 0, finished.stderr[-2000:]
        lost, repeated = ledger(hosts, rows)
        summary = json.loads(
            next(
                mount(host) / "runs/run/summary.json"
                for host in hosts
                if (mount(host) / "runs/run/summary.json").exists()
            ).read_text()
        )
        whole = folder / "whole"
        tiny.train(folder, [*words, f"run.dir={whole}", f"train.steps={steps}"])
        without = json.loads((whole / "run/summary.json").read_text())
        finisher = next(host for host in hosts if (mount(host) / "runs/run/summary.json").exists())
        difference = tiny.difference(whole / "run", mount(finisher) / "runs/run")
        torn = sum("is damaged" in line for _, line in launch.lines)

    table = Table(title=f"{len(rows_of_table)} faults in {seconds / 60:.1f} minutes, {options.backend}")
    for column in (
        "fault",
        "times",
        "noticed, seconds (median, most)",
        "training again, seconds (median, most)",
        "hung",
    ):
        table.add_column(column)
    for kind in KINDS:
        these = [row for row in rows_of_table if row["kind"] == kind]
        if these:
            noticed = [row["noticed_seconds"] for row in these if row["noticed_seconds"] is not None] or [float("nan")]
            recovery = [row["recovery_seconds"] for row in these]
            table.add_row(
                kind,
                str(len(these)),
                f"{statistics.median(noticed):.1f}  {max(noticed):.1f}",
                f"{statistics.median(recovery):.1f}  {max(recovery):.1f}",
                str(sum(row["hung"] for row in these)),
            )
    Console().print(table)
    print(
        f"the first start took {warm:.1f} s; {steps} steps; against a run without faults the weights differ by {difference:.1e}"
    )
    result = {
        "faults": len(rows_of_table),
        "hangs": sum(row["hung"] for row in rows_of_table),
        "lost_examples": lost,
        "repeated_examples": repeated,
        "damaged_checkpoints_passed_over": torn,
        "goodput": 1 - sum(row["recovery_seconds"] for row in rows_of_table) / seconds,
        "recovery_seconds_median": statistics.median(row["recovery_seconds"] for row in rows_of_table),
        "noticed_seconds_median": statistics.median(row["noticed_seconds"] or HANG_SECONDS for row in rows_of_table),
        "weights_difference": difference,
        "exact_match_after": summary.get("exact_match_after"),
        "exact_match_without_faults": without.get("exact_match_after"),
    }
    print(json.dumps(result))
    sys.exit(1 if result["hangs"] or lost or repeated else 0)


def wait_for_steps(hosts: list[Host], step: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while newest_step(hosts) < step and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
