"""A training under a stream of faults, on hosts made of network namespaces (root, Linux), and what they cost.

    python benchmarks/chaos.py --faults 200 --hosts 3            an hour, and a run without faults to compare
    python benchmarks/chaos.py --faults 60 --hosts 3 --busy      while a process that never rests is on each core
    python benchmarks/chaos.py --faults 10 --kinds cut,two --strategy synchronous --tiny
    python benchmarks/chaos.py --quick                           a tiny model, one fault of each kind, ten minutes

`--hosts` machines train, and one more launches them with `--max-restarts`. A fault comes every `--seconds` on average, once
all hosts train. tests/faults.py makes them. Some end ranks, and have to be noticed and survived:

    kill stop       a rank killed, or stopped for good         cut ports     a cable out; a firewall that lets ssh through
    torn            the newest checkpoint torn on all disks    launcher      the launcher killed, the command given again
    two             two hosts at once, each killed, stopped    recovery      a second rank killed while all start again
                    or cut off                                 checkpoint evaluation merge     killed in the middle of one
    moved           a host back under another name, address    memory        a rank killed by the kernel for its memory
    nan-stays       gradients that are NaN whatever one does: the run has to stop with a line that says so, and to lose
                    nothing; its command is given again once the cause is gone

Others may not even end a rank: one stopped for less than the limit (`pause`), a disk full for a while (`full`), a gradient
that is NaN once (`nan`), a time of day that jumps by up to a day (`clock`, a preloaded library: tests/clock.c), a disk of
200 kB/s (`slow-disk`, the kernel's throttle), a link of 1 Mbit/s and 300 ms (`slow-link`, tests/relay.py).

At a run's end the logs of all disks have to show every example exactly once an epoch, and every loss and the weights have
to be those of one process that trained without faults (of independent ranks only the examples: who is away changes what is
merged). Goodput is the seconds of work that lives on (steps, evaluations, merges with the wait for them) over all seconds
from the first step to the last fault's end; checkpoints, steps that are undone and all that a restart takes are no such
seconds. They are those of the mean rank of those that train. A fault's cost is its share of the
other seconds, until all train again. A host is wrongly called dead where a line of the launcher's blames one that no fault
was made on, or any during a fault that should not end a rank. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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

from benchmarks.busy import busy_processes  # noqa: E402

from lib.system.hardware import mlx_device  # noqa: E402
from lib.system.records import read_records  # noqa: E402
from tests import faults, tiny  # noqa: E402
from tests.cluster import Host, cluster  # noqa: E402
from tests.faults import KINDS, STRATEGIES, Launch, Scene  # noqa: E402

HANG_SECONDS = 90.0  # without a new step: given up
LEFT_OUT_STEPS = 8  # that a run takes under `nan-stays`: two updates in each of two starts, each computed twice
WEDGED_SECONDS = 5.0
COMPILING_SECONDS = 60.0  # the same on a GPU, whose kernels are compiled in the first step for half a minute
TRIES = 3  # to make a fault
SLOW_SECONDS = (
    5.0  # of a recovery: what the launcher wrote meanwhile is printed; all lines where a host was wrongly blamed
)
TOLERANCE = 1e-3  # of a loss that roundings explain
ROUNDING = 5e-6  # of a loss: 20 times the most that 100 faults of pipelined ranks gave on a CPU
BLAMES = re.compile(rf"{faults.RESTARTS}(.*)|launch: start .*\(without (.*?)\)")
Steps = dict[int, list[dict[str, Any]]]  # every rank's record of each step that lives on


@dataclass
class Found:
    """What came of one fault; seconds from when it was there."""

    kind: str
    strategy: str
    host: str
    step: int
    noticed_seconds: float | None = None
    recovery_seconds: float = 0.0  # until a step beyond the last one before it
    cost_seconds: float = 0.0  # until all train again, without the work that lives on
    hung: bool = False
    corrupt_used: bool = False
    wrongly_blamed: int = 0  # lines of the launcher's

    @property
    def is_missed(self) -> bool:
        """Whether nobody noticed what had to be."""
        kind = KINDS[self.kind]
        return self.noticed_seconds is None and (kind.noticed is not None or kind.ends_launch)


@dataclass
class Outcome:
    """What came of all faults on one strategy."""

    strategy: str
    found: list[Found]
    first_start_seconds: float
    seconds: float  # from the first step to the end of the last fault
    useful_seconds: float
    steps: int
    lost: int
    repeated: int
    damaged: int  # checkpoints that were passed over
    losses: dict[int, float]  # of every step that lives on
    run: Path  # what is left of it
    differing_steps: int | None = None  # from one process without faults; None: not compared, as the next
    weights_difference: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the result has to be that of one process."""
        return self.strategy in faults.SYNCHRONOUS

    @property
    def is_same(self) -> bool | None:
        """Whether losses and weights are those of a run without faults; None where they need not be."""
        if not self.is_exact:
            return None
        return self.differing_steps == 0 and self.weights_difference is not None and self.weights_difference < TOLERANCE

    def figures(self) -> dict[str, Any]:
        """For the last line."""
        told = {
            name: value for name, value in asdict(self).items() if name not in ("strategy", "found", "losses", "run")
        }
        return {**told, "goodput": self.useful_seconds / self.seconds, "same_as_without_faults": self.is_same}


@dataclass(frozen=True)
class Setup:
    """What is trained, and how it is launched."""

    words: list[str]  # of train.py, but for the strategy
    rows: int
    usual_batch_size: int
    launch: list[str]  # up to --
    folder: Path

    def batch_size(self, strategy: str) -> int:
        """Pairs a step. Sums within each block take three ranks on two cores 0.13 s for a pair: their steps are small."""
        return min(self.usual_batch_size, 8) if strategy == "sharded" else self.usual_batch_size

    def of(self, strategy: str) -> list[str]:
        """The words of train.py; as many of its steps as possible are those of a run without faults."""
        batch_size = self.batch_size(strategy)
        words = [*self.words, f"strategy={strategy}", f"train.global_batch_size={batch_size}"]
        if strategy == "independent":  # its rounds are what a fault may undo
            return [*words, f"independent.pairs_per_round={8 * batch_size}", "checkpoint.every=8"]
        # One takes three ranks that divide a model, on two cores, 60 ms.
        lost = ["checkpoint.seconds=2"]
        return [*words, *lost]


def set_up(folder: Path, machines: Sequence[Host], is_tiny: bool, backend: str, clock: Path) -> Setup:
    """The settings of all runs. A constant rate and no end: how long one trains is decided when the faults are over."""
    disk = machines[0].disk  # the same path on all of them
    if is_tiny:
        rows, batch_size = 45, 8
        words = [*tiny.settings(folder, rows=rows), "--config", str(tiny.config_file(folder))]
        words += ["train.learning_rate=1e-4", "evaluate.every=20"]
        hosts = len(machines) - 1  # each may hold heads of every block, or blocks of its own
        heads = {"num_attention_heads": 2 * hosts, "num_key_value_heads": hosts, "hidden_size": 8 * hosts}
        tiny.model_folder(folder / "model", num_hidden_layers=hosts, **heads)
    else:
        # A rate at which an hour of steps neither breaks the model nor makes much of roundings.
        words = ["--config", str(ROOT / "configs/quickstart.yaml"), "train.learning_rate=1e-6"]
        rows, batch_size = sum(1 for _ in (ROOT / "configs/quickstart/train.jsonl").open()), 32
        few = (ROOT / "configs/quickstart/valid.jsonl").read_text().splitlines(keepends=True)[:16]
        (folder / "few.jsonl").write_text("".join(few))
        words += [f"data.valid={folder}/few.jsonl", "evaluate.every=60", "evaluate.answers=null"]
    words += [
        "train.schedule=constant",
        "train.max_skipped_steps=2",  # a verdict soon: where faults are frequent, five updates are much
        "plan.replan=false",
        "evaluate.samples=0",
        "run.name=run",
        "checkpoint.final=last",
    ]
    words += [f"plan.calibration_dir={disk}/calibration", "run.pages=false"]
    names = ",".join(host.name for host in machines[:-1])
    options = ["--no-preflight", "--backend", backend, "--max-restarts", "100000"]
    wedged_seconds = WEDGED_SECONDS if mlx_device()[0] == "cpu" else COMPILING_SECONDS
    options += ["--silent-seconds", str(faults.SILENT_SECONDS), "--wedged-seconds", str(wedged_seconds)]
    options += ["--env", f"PYTHONPATH={folder}", "--env", f"CHAOS_ORDER={disk}/order"]
    moved = ["env", f"LD_PRELOAD={clock}", f"CLOCK_OFFSET={disk}/clock"]
    launch = [*moved, sys.executable, str(ROOT / "launch"), "--hosts", names, *options]
    return Setup(words, rows, batch_size, launch, folder)


# ---- One fault


def one_fault(kind_name: str, strategy: str, scene: Scene) -> Found:
    """Makes a fault, puts it right again when its time is over, and waits until training is beyond where it was."""
    kind, host = KINDS[kind_name], scene.rng.choice(scene.hosts)
    found = Found(kind_name, strategy, host.name, scene.newest_step())
    scene.victims, scene.torn = {host.name}, -1
    began = time.monotonic()
    for attempt in itertools.count(1):
        try:
            undo = kind.bring(scene, host)
            break
        except faults.NotThereError:  # a start that nobody asked for is judged by its line
            if attempt == TRIES or not all_train(scene):
                found.hung = True
                return found
    made = time.monotonic()
    limit = HANG_SECONDS + LEFT_OUT_STEPS * step_seconds(scene) * kind.ends_launch
    noticed: float | None = None if kind.noticed or kind.ends_launch else made
    is_undone = False
    while True:
        newest, now = scene.newest_step(), time.monotonic()
        if now - made > limit:
            found.hung = True
            break
        if noticed is None:
            noticed = when_noticed(kind, scene, began)
            if noticed is not None:
                found.step = newest  # what was made until then was no recovery
                found.noticed_seconds = max(0.0, noticed - made)
        if noticed is not None and not is_undone and now - noticed >= kind.lasts_seconds:
            undo()
            is_undone = True
            if kind.ends_launch:
                scene.wait(lambda: not any(scene.rank(one) for one in scene.hosts), HANG_SECONDS)
                found.step = scene.newest_step()
                scene.launch.resume(scene.run)
                continue
        if noticed is not None and newest > found.step and not found.recovery_seconds:
            found.recovery_seconds = now - made
        if is_undone and found.recovery_seconds:
            break
        time.sleep(0.03)
    if not is_undone:
        undo()
    found.recovery_seconds = found.recovery_seconds or time.monotonic() - made
    found.corrupt_used = scene.torn >= 0 and scene.resumed_step() == scene.torn
    return found


def step_seconds(scene: Scene) -> float:
    """The median of the last steps, of all ranks."""
    records = itertools.chain.from_iterable(steps_of(scene.logs()).values())
    latest = sorted(records, key=lambda record: record["step"])[-5 * len(scene.hosts) :]
    return statistics.median(record["step_seconds"] for record in latest) if latest else 0.0


def when_noticed(kind: faults.Kind, scene: Scene, began: float) -> float | None:
    """When the line came that tells a fault; of one that ends the launch, when that had ended as well."""
    if kind.ends_launch and scene.launch.process.poll() is None:
        return None
    if kind.noticed is None:
        return time.monotonic()
    return scene.launch.first(kind.noticed, began)


def wrongly_blamed(scene: Scene, kind: str | None, since: float) -> list[str]:
    """The lines of the launcher's that blame a host, or leave one out, without a fault of its own."""
    wrong = []
    for at, line in list(scene.launch.lines):
        blamed = BLAMES.search(line)
        if at < since or blamed is None or (kind is not None and KINDS[kind].ends_launch):
            continue
        named = set(re.findall(r"host-[a-z]", line))
        if kind is None or not KINDS[kind].ends_ranks or not named & scene.victims:
            wrong.append(line)
    return wrong


# ---- One run


def run_strategy(
    strategy: str,
    kinds: list[str],
    options: argparse.Namespace,
    setup: Setup,
    machines: Sequence[Host],
    scene: Scene,
) -> Outcome:
    """A run under these faults, from its start to its last epoch's end."""
    words = setup.of(strategy)
    started = time.monotonic()
    endless = ["train.py", *words, f"run.dir={scene.run.parent}", "train.steps=1000000"]
    scene.launch = Launch(machines[-1], [*setup.launch, "--", *endless])
    if not scene.wait(lambda: scene.newest_step() >= 1, HANG_SECONDS, 0.05):
        sys.exit("\n".join([f"{strategy}: no first step came:", *(line for _, line in scene.launch.lines[-40:])]))
    with busy_processes((os.cpu_count() or 1) if options.busy else 0):
        first_step = time.monotonic()
        time.sleep(5)  # until processes are ready for a restart, as they are in a run that goes on for hours
        found = all_faults(strategy, kinds, options.seconds, scene)
        scene.wait(lambda: all(map(scene.rank, scene.hosts)), HANG_SECONDS, 0.05)
        lasted = time.monotonic() - first_step
        interrupt(scene)
    useful = useful_seconds(strategy, scene.logs())
    an_epoch = -(-setup.rows // setup.batch_size(strategy))
    steps = an_epoch * (scene.newest_step() // an_epoch + 1)
    if strategy == "independent":  # a rank's log counts its own steps
        steps = an_epoch * (max(state["step"] for state in checkpoints(scene)) // an_epoch + 2)
    finish = ["train.py", "--resume", str(scene.run), f"train.steps={steps}"]
    finished = machines[-1].run([*setup.launch, "--", *finish], timeout=900)
    assert finished.returncode == 0, finished.stderr[-3000:]
    print(f"finished at step {steps}", flush=True)
    disk = next(disk for disk in scene.disks if (disk / "runs/run/summary.json").exists())
    kept = setup.folder / strategy
    shutil.copytree(disk / "runs/run", kept)
    lived = steps_of(scene.logs())
    lost, repeated = examples(lived, setup.rows, is_divided=strategy in ("sharded", "pipelined"))
    return Outcome(
        strategy=strategy,
        found=found,
        first_start_seconds=first_step - started,
        seconds=lasted,
        useful_seconds=useful,
        steps=steps,
        lost=lost,
        repeated=repeated,
        damaged=sum("is damaged" in line for _, line in scene.launch.lines),
        losses={step: records[0]["loss"] for step, records in lived.items()},
        run=kept,
    )


def compare(outcomes: Sequence[Outcome], setup: Setup, machine: Host) -> None:
    """Trains as many steps in one process, without faults, and notes what differs.

    It goes on from one strategy's number of steps to the next one's. Where it ends with an error the rest is not compared.
    """
    for outcome in sorted(outcomes, key=lambda one: one.steps):
        if not outcome.is_exact:
            continue
        alone = setup.folder / f"alone-{setup.batch_size(outcome.strategy)}"
        words = ["--resume", str(alone / "run")]
        if not alone.exists():
            words = [*setup.of(outcome.strategy), "strategy=auto", f"run.dir={alone}", f"plan.calibration_dir={alone}"]
        print(f"{outcome.strategy}: the same {outcome.steps} steps in one process", flush=True)
        command = ["env", f"OPENBLAS_NUM_THREADS={os.cpu_count() or 1}", sys.executable, str(ROOT / "train.py")]
        try:
            trained = machine.run([*command, *words, f"train.steps={outcome.steps}"], timeout=5400)
        except subprocess.TimeoutExpired as late:
            print(f"not compared: {late}", flush=True)
            return
        if trained.returncode:
            print(f"not compared: {trained.stderr[-3000:]}", flush=True)
            return
        losses = {record["step"]: record["loss"] for record in tiny.steps_of(alone / "run")}
        outcome.differing_steps = sum(
            step not in losses or step not in outcome.losses or abs(outcome.losses[step] - losses[step]) > TOLERANCE
            for step in range(1, outcome.steps + 1)
        )
        outcome.weights_difference = tiny.difference(alone / "run", outcome.run)
        if not outcome.is_same:
            show_difference(outcome, losses, alone / "run")


def show_difference(outcome: Outcome, losses: dict[int, float], alone: Path) -> None:
    """Prints where a run left that of one process, and keeps both: such a fault may not come again for hours."""
    apart = [
        step
        for step, loss in sorted(outcome.losses.items())
        if not abs(loss - losses.get(step, math.nan)) <= ROUNDING  # NaN, too
    ]
    kept = Path(tempfile.mkdtemp(prefix=f"chaos-{outcome.strategy}-"))
    shutil.copytree(outcome.run, kept / "faults")
    shutil.copytree(alone, kept / "alone")
    print(
        f"{outcome.strategy}: weights differ by {outcome.weights_difference:.2g}; both runs are in {kept}", flush=True
    )
    if not apart:
        print("    no loss shows it: the last steps, or what was saved of them")
        return
    before = [one for one in outcome.found if one.step < apart[0]][-2:]
    faults_before = ", ".join(f"{one.kind} on {one.host} at step {one.step}" for one in before) or "no fault"
    print(f"    losses leave roundings at step {apart[0]}, after {faults_before}", flush=True)


def all_faults(strategy: str, kinds: list[str], seconds: float, scene: Scene) -> list[Found]:
    """Makes all faults of a run, one after the other, and prints what comes of each; none follows one that hangs."""
    found: list[Found] = []
    began = last_end = time.monotonic()
    for number, kind in enumerate(kinds, 1):
        turn = began + (number - 1 + scene.rng.uniform(0, 0.5)) * seconds
        # All train, and no start is under way: a fault of a host that is alone is another one.
        while (ready := all_train(scene)) and time.monotonic() < turn:
            time.sleep(max(0.0, turn - time.monotonic()))
        fault_began = time.monotonic()
        wrong = wrongly_blamed(scene, found[-1].kind if found else None, last_end)
        if ready:
            useful = useful_seconds(strategy, scene.logs())
            found.append(one_fault(kind, strategy, scene))
            wrong += wrongly_blamed(scene, kind, fault_began)
            all_train(scene)
            useful = useful_seconds(strategy, scene.logs()) - useful
            found[-1].cost_seconds = time.monotonic() - fault_began - useful
        else:
            found.append(Found(kind, strategy, "-", scene.newest_step(), hung=True))
        found[-1].wrongly_blamed = len(wrong)
        last_end = time.monotonic()
        show(number, len(kinds), found[-1], wrong)
        if found[-1].recovery_seconds > SLOW_SECONDS or wrong:
            for at, line in [one for one in scene.launch.lines if one[0] >= fault_began]:
                if "launch: " in line or wrong:  # the ranks' own words say why
                    print(f"    {at - fault_began:5.1f} s  {line}", flush=True)
        if found[-1].hung:
            print("\n".join(line for _, line in scene.launch.lines[-40:]))
            break
    return found


def all_train(scene: Scene) -> bool:
    """Waits until every host takes part, and they make steps; whether that was in time."""
    there = scene.wait(lambda: is_complete(scene) and all(map(scene.rank, scene.hosts)), HANG_SECONDS, 0.05)
    reached = scene.newest_step()
    return there and scene.wait(lambda: scene.newest_step() >= reached + 2, HANG_SECONDS, 0.05)


def is_complete(scene: Scene) -> bool:
    """Whether all hosts take part in the newest start. On one that was cut off a rank may live that is none of it."""
    starts = [
        found for _, line in list(scene.launch.lines) if (found := re.search(r"start \d.* on (\d+) of (\d+)", line))
    ]
    return not starts or starts[-1][1] == starts[-1][2]


def interrupt(scene: Scene) -> None:
    """Ends the launch as a person does, by Ctrl-C."""
    pid = scene.launch.pid()
    if pid is not None:
        scene.launch.host.signal(pid, signal.SIGINT)
    scene.launch.process.wait(60)


def steps_of(logs: Sequence[Path]) -> Steps:
    """The steps that live on, by the logs of all disks as they were left."""
    steps: Steps = {}
    for log in logs:
        for record in read_records(log):
            if record["kind"] == "step":
                steps.setdefault(record["step"], []).append(record)
    return steps


def checkpoints(scene: Scene) -> list[dict[str, Any]]:
    """The states of all checkpoints on all disks."""
    found = []
    for disk in scene.disks:
        for path in (disk / "runs/run/checkpoints").glob("step-*/state.json"):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
    return found


def useful_seconds(strategy: str, logs: Sequence[Path]) -> float:
    """Seconds of work that lives on: of the mean rank of each step, or of each start of independent ones.

    Not of the slowest of each: a rank that is ahead waits in its own next step, which then counts twice.
    """
    if strategy == "independent":
        starts: dict[int, dict[Path, float]] = {}  # by disks: a host that has moved has another name
        for log in logs:
            hosts: dict[Path, float] = {}
            for record in read_records(log):
                if record["kind"] == "start":
                    hosts = starts.setdefault(len(record["resumes"]), {})
                hosts[log.parent] = hosts.get(log.parent, 0.0) + work_seconds(record)
        return sum(statistics.fmean(hosts.values()) for hosts in starts.values())
    records = itertools.chain.from_iterable(map(read_records, logs))
    together: dict[tuple[str, int], list[float]] = {}  # of every rank's record of one piece of work
    for record in records:
        if seconds := work_seconds(record):
            together.setdefault((record["kind"], record["step"]), []).append(seconds)
    return sum(map(statistics.fmean, together.values()))


def work_seconds(record: dict[str, Any]) -> float:
    """What a record says of the time that training itself took."""
    names = {"step": ["step_seconds"], "evaluation": ["evaluation_seconds"], "merge": ["seconds", "waited_seconds"]}
    return sum(record[name] for name in names.get(record["kind"], ()))


def examples(steps: Steps, rows_an_epoch: int, is_divided: bool) -> tuple[int, int]:
    """Examples lost and repeated, over whole epochs. is_divided: every rank takes all rows, through its part."""
    epochs: dict[int, list[int]] = {}
    for records in steps.values():
        assert not is_divided or all(record["rows"] == records[0]["rows"] for record in records)
        for record in records[:1] if is_divided else records:
            epochs.setdefault(record["epoch"], []).extend(record["rows"])
    lost = sum(rows_an_epoch - len(set(rows)) for rows in epochs.values())
    for epoch, rows in sorted(epochs.items()):
        if len(rows) != rows_an_epoch or len(set(rows)) != rows_an_epoch:
            print(f"epoch {epoch} of {len(epochs)}: {len(rows)} rows, {len(set(rows))} different, of {rows_an_epoch}")
    return lost, sum(len(rows) - len(set(rows)) for rows in epochs.values())


# ---- What is printed


def show(number: int, count: int, found: Found, wrong: list[str]) -> None:
    noticed = "" if found.noticed_seconds is None else f"noticed {found.noticed_seconds:.1f} s, "
    missed = "NOT NOTICED, " if found.is_missed else ""
    text = f"{found.strategy} {number}/{count} {found.kind} on {found.host} at step {found.step}: "
    went_on = f"trained on {found.recovery_seconds:.1f} s, cost {found.cost_seconds:.1f} s"
    print(f"{text}{missed}{noticed}{went_on}", flush=True)
    for line in wrong:
        print(f"    wrongly: {line}", flush=True)


def show_table(found: list[Found], title: str) -> None:
    """The kinds, with what noticing and going on took, and how much time had no work that lives on: median and most."""
    table = Table(title=title)
    for column in ("fault", "times", "noticed, seconds", "trained on, seconds", "cost, seconds", "hung"):
        table.add_column(column)
    for kind in KINDS:
        these = [one for one in found if one.kind == kind]
        if not these:
            continue
        noticed = [one.noticed_seconds for one in these if one.noticed_seconds is not None]
        all_seconds = noticed, [one.recovery_seconds for one in these], [one.cost_seconds for one in these]
        table.add_row(
            kind,
            str(len(these)),
            *(f"{statistics.median(seconds):.1f}  {max(seconds):.1f}" if seconds else "-" for seconds in all_seconds),
            str(sum(one.hung for one in these)),
        )
    Console(width=110).print(table)


def result_of(outcomes: list[Outcome], options: argparse.Namespace) -> dict[str, Any]:
    """The last line."""
    found = [one for outcome in outcomes for one in outcome.found]
    survived = [one.recovery_seconds for one in found if KINDS[one.kind].ends_ranks]
    return {
        "faults": len(found),
        "hosts": options.hosts,
        "busy": options.busy,
        "strategies": {outcome.strategy: outcome.figures() for outcome in outcomes},
        "minutes": sum(outcome.seconds for outcome in outcomes) / 60,
        "hangs": sum(one.hung for one in found),
        "unnoticed": sum(one.is_missed for one in found),
        "wrongly_blamed": sum(one.wrongly_blamed for one in found),
        "lost_examples": sum(outcome.lost for outcome in outcomes),
        "repeated_examples": sum(outcome.repeated for outcome in outcomes),
        "corrupt_checkpoints_used": sum(one.corrupt_used for one in found),
        "strategies_that_differ": sum(outcome.is_same is False for outcome in outcomes),
        "goodput": sum(one.useful_seconds for one in outcomes) / sum(one.seconds for one in outcomes),
        "recovery_seconds_median": statistics.median(survived) if survived else None,
    }


# ---- The whole


def kinds_of(strategies: Sequence[str], chosen: Sequence[str], count: int, rng: random.Random) -> dict[str, list[str]]:
    """So many faults, as many on each strategy and of each kind as can be, in any order."""
    kinds: dict[str, list[str]] = {strategy: [] for strategy in strategies}
    waiting = itertools.cycle(chosen)
    passed: list[str] = []  # that their strategy does not know: for the next one that does
    for index in range(count):
        strategy = strategies[index * len(strategies) // count]
        kind = next((one for one in passed if strategy in KINDS[one].strategies), None)
        if kind is not None:
            passed.remove(kind)
        while kind is None:
            kind = next(waiting)
            if strategy not in KINDS[kind].strategies:
                passed.append(kind)
                kind = None
        kinds[strategy].append(kind)
    for mine in kinds.values():
        rng.shuffle(mine)
    return {strategy: mine for strategy, mine in kinds.items() if mine}


def parsed() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=3, help="that train; one more launches them")
    parser.add_argument("--seconds", type=float, default=18.0, help="from fault to fault, on average")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of these (default: all)")
    parser.add_argument("--backend", choices=("ring", "mpi"), default="ring")
    parser.add_argument("--strategy", choices=(*STRATEGIES, "all"), default="all", help="all: one run of each")
    parser.add_argument("--busy", action="store_true", help="beside a process on each core that never rests")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead of the quickstart's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model, a fault of each kind")
    options = parser.parse_args()
    options.kinds = options.kinds.split(",")
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown or options.faults < 1 or not 2 <= options.hosts <= 20:
        parser.error(f"unknown kind {', '.join(unknown)}" if unknown else "--faults from 1, --hosts from 2 to 20")
    options.strategies = STRATEGIES if options.strategy == "all" else (options.strategy,)
    if options.quick:
        options.faults, options.seconds, options.tiny = len(options.kinds), 12.0, True
    for kind in [kind for kind in options.kinds if faults.unavailable(kind)]:
        print(f"without {kind}: {faults.unavailable(kind)}", flush=True)
        options.kinds.remove(kind)
    known = [one for one in options.strategies if any(one in KINDS[kind].strategies for kind in options.kinds)]
    if not known:
        parser.error(f"none of these kinds is for {', '.join(options.strategies)}")
    options.strategies = known
    return options


def main() -> None:
    options = parsed()
    rng = random.Random(options.seed)
    kinds = kinds_of(options.strategies, options.kinds, options.faults, rng)
    outcomes = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "sitecustomize.py").write_text(faults.CUSTOMIZE)
        clock = folder / "clock.so"
        source = str(ROOT / "tests/clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(clock), source, "-ldl"], check=True)
        variables = f"LD_PRELOAD={clock} CLOCK_OFFSET={{disk}}/clock"
        machines = stack.enter_context(cluster(hosts=options.hosts + 1, variables=variables))
        hosts = machines[:-1]
        for host in machines:
            faults.set_clock(host, 0.0)
        disks = [host.add_disk("mnt", faults.DISK_BYTES) for host in hosts]
        setup = set_up(folder, machines, options.tiny, options.backend, clock)
        for strategy, mine in kinds.items():
            for disk in disks:
                shutil.rmtree(disk / "runs", ignore_errors=True)
            scene = Scene(hosts, disks, hosts[0].disk / "mnt/runs/run", rng)
            outcomes.append(run_strategy(strategy, mine, options, setup, machines, scene))
            stack.callback(lambda groups: [group.rmdir() for group in groups], scene.memory)
        compare(outcomes, setup, machines[-1])
    found = [one for outcome in outcomes for one in outcome.found]
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    show_table(found, f"{len(found)} faults in {minutes:.1f} minutes, {options.hosts} hosts, {options.backend}")
    result = result_of(outcomes, options)
    print(json.dumps(result))
    wrong = ("hangs", "unnoticed", "wrongly_blamed", "lost_examples", "repeated_examples")
    wrong += ("corrupt_checkpoints_used", "strategies_that_differ")
    sys.exit(1 if any(result[name] for name in wrong) else 0)


if __name__ == "__main__":
    main()
