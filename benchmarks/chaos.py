"""A training under a stream of faults, on hosts made of network namespaces (root, Linux), and what they cost.

    python benchmarks/chaos.py --faults 60          the quickstart's model; half an hour, and half as long again to compare
    python benchmarks/chaos.py --quick              9 faults on a tiny model, four minutes
    python benchmarks/chaos.py --strategy pipelined     the same where each host holds some of the model's blocks

Two hosts train, a third one launches them with `--max-restarts`. A fault comes every `--seconds` on average, once all hosts
train. Some have to be noticed and survived: a rank killed (`kill`) or stopped (`stop`), a host's cable out for a while
(`cut`), a firewall that lets only ssh through (`ports`), the newest checkpoint torn on both disks and a rank killed
(`torn`), the launcher killed, and its command given again as a person would (`launcher`). Others may not even end a rank: one
stopped for less than the limit (`pause`), a disk full for a while (`full`), a gradient that is NaN once (`nan`).

At the end the logs of all disks have to show every example exactly once an epoch, and every loss, the weights and the exact
match have to be those of a run without faults. Goodput is the time in steps that live on, of all time from the first fault's
turn to the last one's end. The last line is one JSON object.

On 21 November 2026, two cores, `--faults 60 --seconds 24.5`: 60 faults in 25 minutes, no hang, none unnoticed, no example lost,
median recovery 2.7 s, goodput 0.91 over the first 54 faults (22 minutes) and 0.87 over all: others took up their work on the two
cores then, and a limit of one second was too short. 9 steps were in two logs; docs/reliability.md has the table, and what was mended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
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

from lib.telemetry.run_records import read_records  # noqa: E402
from tests import tiny  # noqa: E402
from tests.cluster import Host, cluster  # noqa: E402

SURVIVED = ("kill", "stop", "cut", "ports", "torn", "launcher")
ENDURED = ("pause", "full", "nan")
KINDS = SURVIVED + ENDURED
HANG_SECONDS = 90.0  # without a new step: given up
AWAY_SECONDS = 4.0  # that a cable stays out, or a firewall closed, once it was noticed
SILENT_SECONDS = 1.0
WEDGED_SECONDS = 5.0
DISK_BYTES = 256 * 2**20  # of each host's runs
NOTICED = {
    "full": r"cannot be written|No space left",
    "nan": r"not finite",
    **dict.fromkeys(SURVIVED, r"launch: (died|silent|lost|stopped|late|wedged): |launch: a host is back"),
}

# Every Python of the ranks imports this: at SIGUSR1 the gradients of the next step are NaN on that rank.
POISON = """
import signal

def poison(number, frame):
    from lib.distributed import gradients as exchange
    from mlx.utils import tree_map
    plain = exchange.sum_gradients
    def once(world, gradients, *rest):
        exchange.sum_gradients = plain
        return plain(world, tree_map(lambda g: g * float("nan"), gradients), *rest)
    exchange.sum_gradients = once

signal.signal(signal.SIGUSR1, poison)
"""


class Launch:
    """The launcher on its own host, and the lines that it writes."""

    def __init__(self, host: Host, command: list[str]):
        self.host, self.command = host, command
        self.lines: list[tuple[float, str]] = []
        self.start(command)

    def start(self, command: list[str]) -> None:
        self.process = self.host.start(command)
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def first(self, pattern: str, since: float) -> float | None:
        """When a line that matches came, after `since`."""
        return next((at for at, line in list(self.lines) if at >= since and re.search(pattern, line)), None)

    def resume(self, run: Path) -> None:
        """Gives the command again, with --resume."""
        cut = self.command.index("--")
        self.start([*self.command[: cut + 1], "train.py", "--resume", str(run)])

    def pid(self) -> int | None:
        """Its process, as its host counts."""
        return next((pid for pid, line in self.host.processes().items() if f"{ROOT}/launch" in line), None)


def mount(host: Host) -> Path:
    """A host's own small disk, as seen from here."""
    return Path(f"{host.root}{host.disk}/mnt")


def logs(hosts: list[Host]) -> list[Path]:
    return [log for host in hosts for log in sorted((mount(host) / "runs/run/logs").glob("rank-*.jsonl"))]


def newest_step(hosts: list[Host]) -> int:
    """The last step of any log, read from its end."""
    newest = 0
    for log in logs(hosts):
        with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            for line in file.read().split(b"\n"):
                found = re.match(rb'\{"kind": "step".*?"step": (\d+)', line)
                newest = max(newest, int(found[1]) if found else 0)
    return newest


def rank_process(host: Host) -> int | None:
    """The rank that owns the run's folder on this host's disk, if it lives."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((mount(host) / "runs/run/.lock").read_text())
        if re.search(rb"train\.py|lib\.launch\.standby", Path(f"{host.root}/proc/{pid}/cmdline").read_bytes()):
            return pid
    return None


def checkpoints(host: Host) -> list[str]:
    return sorted(path.name for path in (mount(host) / "runs/run/checkpoints").glob("step-*"))


def do(
    kind: str, victim: Host, hosts: list[Host], launch: Launch, rng: random.Random
) -> tuple[Callable[[], None], int]:
    """Brings a fault about. Returns what mends it, to be called once it was noticed, and the step of a torn checkpoint."""
    pid, torn = rank_process(victim), -1
    assert pid is not None, f"no rank on {victim.name}"
    if kind in ("kill", "torn"):
        victim.signal(pid, signal.SIGKILL)
    if kind == "torn":  # at once, before a start looks for it, and after the last one was made
        newest = max(name for host in hosts for name in checkpoints(host))
        for host in hosts:
            path = mount(host) / "runs/run/checkpoints" / newest / "optimizer.safetensors"
            with contextlib.suppress(FileNotFoundError):  # the other disk may not have it yet
                path.write_bytes(path.read_bytes()[: rng.randrange(1, path.stat().st_size)])
        torn = int(newest.removeprefix("step-"))
    elif kind == "stop":
        victim.signal(pid, signal.SIGSTOP)
        return lambda: victim.signal(pid, signal.SIGCONT), torn
    elif kind == "pause":
        victim.signal(pid, signal.SIGSTOP)
        time.sleep(SILENT_SECONDS / 3)
        victim.signal(pid, signal.SIGCONT)
    elif kind == "nan":
        victim.signal(pid, signal.SIGUSR1)
    elif kind == "cut":
        victim.unplug()
        return victim.plug_in, torn
    elif kind == "ports":
        victim.only_ssh()
        return lambda: victim.only_ssh(False), torn
    elif kind == "full":
        victim.run(["sh", "-c", f"cat /dev/zero > {victim.disk}/mnt/filler"])
        return lambda: (mount(victim) / "filler").unlink(), torn
    elif kind == "launcher":
        launcher = launch.pid()
        assert launcher is not None
        launch.host.signal(launcher, signal.SIGKILL)
    return lambda: None, torn


def one_fault(kind: str, hosts: list[Host], launch: Launch, rng: random.Random, run: Path) -> dict[str, Any]:
    """A fault and its end: seconds until it was noticed, and until training was beyond where it had been."""
    victim, before = rng.choice(hosts), newest_step(hosts)
    began = time.monotonic()
    mend, torn = do(kind, victim, hosts, launch, rng)
    made = time.monotonic()  # writing a disk full takes a moment, and training goes on meanwhile
    noticed: float | None = None
    mended = given_again = False
    while True:
        newest, now = newest_step(hosts), time.monotonic()
        if now - made > HANG_SECONDS:
            break
        if noticed is None and kind == "launcher":
            noticed = now if launch.process.poll() is not None else None
        elif noticed is None and kind != "pause":
            noticed = launch.first(NOTICED[kind], began)
            before = newest if noticed is not None else before  # what was made until then was no recovery
        # A cable is put back, and a firewall opened, some time after the others went on without.
        if noticed is not None and not mended and now - noticed > (AWAY_SECONDS if kind in ("cut", "ports") else 0.0):
            mend()
            mended = True
        if kind == "launcher" and noticed is not None and not given_again:
            if any(rank_process(host) for host in hosts):
                time.sleep(0.05)
                continue
            before = newest_step(hosts)
            launch.resume(run)
            given_again = True
        if newest > before and (noticed is not None or kind == "pause"):
            break
        time.sleep(0.05)
    if not mended:
        mend()
    ended = time.monotonic()
    lines = [line for log in logs(hosts) for line in log.read_bytes().split(b"\n")]
    starts = [json.loads(line) for line in lines if line.startswith(b'{"kind": "start"')]
    resumed = max(starts, key=lambda record: record["time"], default={}).get("resumed_from_step")
    return {
        "kind": kind,
        "host": victim.name,
        "step": before,
        "noticed_seconds": None if noticed is None else max(0.0, noticed - made),
        "recovery_seconds": ended - made,
        "hung": ended - made > HANG_SECONDS,
        "corrupt_used": torn >= 0 and resumed == torn,
        "ended_ranks": launch.first(NOTICED["kill"], began) is not None,
    }


def steps_of(hosts: list[Host]) -> dict[int, list[dict[str, Any]]]:
    """Every rank's record of each step that lives on, by the logs of all disks as they were left."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for log in logs(hosts):
        for record in read_records(log):
            if record["kind"] == "step":
                steps.setdefault(record["step"], []).append(record)
    return steps


def ledger(steps: dict[int, list[dict[str, Any]]], rows_an_epoch: int, is_divided: bool) -> tuple[int, int]:
    """Examples lost and repeated, over whole epochs. is_divided: every rank takes all rows, through its part."""
    epochs: dict[int, list[int]] = {}
    for records in steps.values():
        assert not is_divided or all(record["rows"] == records[0]["rows"] for record in records)
        for record in records[:1] if is_divided else records:
            epochs.setdefault(record["epoch"], []).extend(record["rows"])
    lost = sum(rows_an_epoch - len(set(rows)) for rows in epochs.values())
    return lost, sum(len(rows) - len(set(rows)) for rows in epochs.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=29.0, help="from fault to fault, on average")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of these (default: all)")
    parser.add_argument("--backend", choices=("ring", "mpi"), default="ring")
    parser.add_argument("--strategy", choices=("synchronous", "sharded", "pipelined"), default="synchronous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="9 faults, a tiny model")
    options = parser.parse_args()
    faults, every = (len(KINDS), 12.0) if options.quick else (options.faults, options.seconds)
    rng = random.Random(options.seed)
    chosen = options.kinds.split(",")
    kinds = [chosen[index % len(chosen)] for index in range(faults)]
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as name, cluster(hosts=3) as machines:
        folder, hosts, away = Path(name), machines[:2], machines[2]
        (folder / "sitecustomize.py").write_text(POISON)
        for host in hosts:
            (host.outside / "mnt").mkdir()
            host.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", f"{host.disk}/mnt"])
        run = hosts[0].disk / "mnt/runs/run"
        if options.quick:
            words = [*tiny.settings(folder, rows=45), "--config", str(tiny.config_file(folder))]
            words += ["train.learning_rate=1e-4"]
            rows, batch = 45, 8
        else:
            # A rate at which an hour of steps neither breaks the model nor makes much of roundings.
            words = ["--config", str(ROOT / "configs/quickstart.yaml"), "train.learning_rate=1e-6"]
            rows, batch = sum(1 for _ in (ROOT / "configs/quickstart/train.jsonl").open()), 32
        # A constant rate and no end: how long it trains is decided when the faults are over.
        words += ["train.schedule=constant", "plan.replan=false", "evaluate.every=1000000", "evaluate.samples=0"]
        words += [f"strategy={options.strategy}"]  # the same steps with and without faults, to compare
        words += ["checkpoint.every=1000000", "checkpoint.max_lost_seconds=1", "run.name=run"]
        options_here = ["--no-preflight", "--backend", options.backend, "--max-restarts", "1000"]
        options_here += ["--silent-seconds", str(SILENT_SECONDS), "--wedged-seconds", str(WEDGED_SECONDS)]
        options_here += ["--env", f"PYTHONPATH={folder}"]
        start = [sys.executable, str(ROOT / "launch"), "--hosts", "host-a,host-b", *options_here, "--"]
        launch = Launch(away, [*start, "train.py", *words, f"run.dir={run.parent}", "train.steps=1000000"])
        began = time.monotonic()
        wait_for(lambda: newest_step(hosts) >= 1)
        warm = time.monotonic() - began
        time.sleep(5)  # until processes are ready for a restart, as they are in a run that goes on for hours
        table_rows: list[dict[str, Any]] = []
        began, first_moment = time.monotonic(), time.time()
        for number, kind in enumerate(kinds, 1):
            turn = began + (number - 1 + rng.uniform(0, 0.5)) * every
            # All train, and no start is under way: a fault of a host that is alone is another one.
            while (ready := all_train(hosts)) and time.monotonic() < turn:
                time.sleep(max(0.0, turn - time.monotonic()))
            found = one_fault(kind, hosts, launch, rng, run) if ready else {**table_rows[-1], "hung": True}
            table_rows.append(found)
            noticed = "not noticed" if found["noticed_seconds"] is None else f"noticed {found['noticed_seconds']:.1f} s"
            print(
                f"{number}/{faults} {kind} on {found['host']} at step {found['step']}: {noticed}, trained on {found['recovery_seconds']:.1f} s",
                flush=True,
            )
            if found["hung"]:
                print("\n".join(line for _, line in launch.lines[-40:]))
                break
        wait_for(lambda: all(rank_process(host) for host in hosts))
        seconds, last_moment = time.monotonic() - began, time.time()
        pid = launch.pid()
        if pid is not None:  # a person ends it
            away.signal(pid, signal.SIGINT)
        launch.process.wait(30)
        an_epoch = -(-rows // batch)
        steps = an_epoch * (newest_step(hosts) // an_epoch + 1)
        finished = away.run([*start, "train.py", "--resume", str(run), f"train.steps={steps}"], timeout=600)
        assert finished.returncode == 0, finished.stderr[-2000:]
        print(f"finished at step {steps}; the same without faults", flush=True)
        lived = steps_of(hosts)
        lost, repeated = ledger(lived, rows, options.strategy != "synchronous")
        useful = {
            step: max(record["step_seconds"] for record in records)
            for step, records in lived.items()
            if first_moment <= records[0]["time"] <= last_moment
        }
        finisher = next(host for host in hosts if (mount(host) / "runs/run/summary.json").exists())
        summary = json.loads((mount(finisher) / "runs/run/summary.json").read_text())
        whole = folder / "whole"
        tiny.train(folder, [*words, f"run.dir={whole}", f"train.steps={steps}"], ranks=2, timeout=3600)
        without = json.loads((whole / "run/summary.json").read_text())
        difference = tiny.difference(whole / "run", mount(finisher) / "runs/run")
        undisturbed = tiny.steps_of(whole / "run")
        in_steps = sum(record["step_seconds"] for record in undisturbed[1:])
        losses = {record["step"]: record["loss"] for record in undisturbed}
        differ = [
            step for step in sorted(losses) if step not in lived or abs(lived[step][0]["loss"] - losses[step]) > 1e-3
        ]
        torn = sum("is damaged" in line for _, line in launch.lines)

    table = Table(
        title=f"{len(table_rows)} faults in {seconds / 60:.1f} minutes, {options.strategy}, {options.backend}"
    )
    for column in ("fault", "times", "noticed, seconds (median, most)", "trained on, seconds (median, most)", "hung"):
        table.add_column(column)
    for kind in KINDS:
        these = [row for row in table_rows if row["kind"] == kind]
        if these:
            noticed = [row["noticed_seconds"] for row in these if row["noticed_seconds"] is not None]
            recovery = [row["recovery_seconds"] for row in these]
            table.add_row(
                kind,
                str(len(these)),
                f"{statistics.median(noticed):.1f}  {max(noticed):.1f}" if noticed else "-",
                f"{statistics.median(recovery):.1f}  {max(recovery):.1f}",
                str(sum(row["hung"] for row in these)),
            )
    Console().print(table)
    print(f"the first start took {warm:.1f} s; the first step whose loss differs: {min(differ, default=None)}")
    survived = [row for row in table_rows if row["kind"] in SURVIVED]
    result = {
        "strategy": options.strategy,
        "faults": len(table_rows),
        "minutes": seconds / 60,
        "hangs": sum(row["hung"] for row in table_rows),
        "undetected": sum(row["noticed_seconds"] is None for row in table_rows if row["kind"] != "pause"),
        "needless_restarts": sum(row["ended_ranks"] for row in table_rows if row["kind"] in ENDURED),
        "lost_examples": lost,
        "repeated_examples": repeated,
        "corrupt_checkpoints_used": sum(row["corrupt_used"] for row in table_rows),
        "damaged_checkpoints_passed_over": torn,
        "goodput": sum(useful.values()) / seconds,
        "goodput_without_faults": in_steps / (undisturbed[-1]["time"] - undisturbed[0]["time"]),
        "recovery_seconds_median": statistics.median(row["recovery_seconds"] for row in survived) if survived else None,
        "steps": steps,
        "steps_whose_loss_differs": len(differ),
        "weights_difference": difference,
        "exact_match_after": summary.get("exact_match_after"),
        "exact_match_without_faults": without.get("exact_match_after"),
    }
    print(json.dumps(result))
    wrong = ("hangs", "undetected", "lost_examples", "repeated_examples", "corrupt_checkpoints_used")
    sys.exit(1 if any(result[name] for name in wrong) else 0)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def all_train(hosts: list[Host]) -> bool:
    """Waits until every host has a rank, and these make steps; whether that was in time."""
    there = wait_for(lambda: all(rank_process(host) for host in hosts))
    reached = newest_step(hosts)
    return there and wait_for(lambda: newest_step(hosts) >= reached + 2)


if __name__ == "__main__":
    main()
