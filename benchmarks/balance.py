"""Two real ranks, one slower than the other: does the planned split keep both busy?

    python benchmarks/balance.py               skews 1, 2, 4 and 8, and a rank that is throttled in mid-run
    python benchmarks/balance.py --neighbour   another process takes a random half of either core meanwhile
    python benchmarks/balance.py --falsify     one point of one rank's calibration is wrong by half
    python benchmarks/balance.py --quick       skew 4 alone, fewer steps
    python benchmarks/balance.py --throttle    only the rank that is throttled in mid-run

On Linux with two cores. Each rank has a core of its own; rank 1 gets a part of its core's time: as root with cgroup v1 by a
quota in periods of 10 ms, else by as many busy processes on its core as make the skew. For each skew a curve of a few
micro-batch sizes is measured on each rank, in rounds; then both train, by that curve and by what their first steps correct.
Efficiency is pairs/s from step 20 on over the sum of what the ranks do alone; the ideal is 1. The training stands still every
few seconds, and each rank runs steps alone while the other sleeps: both speeds are then of the same minutes. Then both run
steps at once without a word between them: what is missing there (`contention`) two cores of one chip take from each other, by
its caches, memory and clock, whatever the plan. Two machines do not; `efficiency_of_both` is over that sum.

The neighbour runs without a pause, in bursts of 2 to 20 ms, on one core and then as long on the other, which first is
random; while it is on a core, the rank there has nearly none of it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import numpy as np  # noqa: E402

from lib.errors import UserError  # noqa: E402
from lib.system import mpi_and_blas  # noqa: E402

CGROUP = Path("/sys/fs/cgroup/cpu")
RANK_SHARES, NEIGHBOUR_SHARES = 8192, 262144  # of a contended core; any other process has 1024
BURST_SECONDS = (0.002, 0.02)
SIZES = (1, 2, 4, 8, 16)  # pairs a micro-batch
ALONE_MICRO_BATCHES = 4  # of a step that a rank runs alone
CORRECTED_BY = 20  # the step from which efficiency counts
WINDOWS = 6  # of training, each beside the ranks' speeds alone
LEAST_STEP_SECONDS = 1.0  # beside a neighbour: long beside its bursts, so that a step meets its usual part of them
PERIOD_MICROSECONDS = 10_000
TARGET = 0.98  # efficiency that the plan must promise: a little above what has to be reached
TOKENS, VOCABULARY = 32, 256  # of a prompt and of each completion
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


# ---- The launching side ------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skews", default="1,2,4,8", help="how many times slower rank 1 is, comma-separated")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="about, for each run that is measured")
    parser.add_argument("--neighbour", action="store_true", help="a process that takes a random half of either core")
    parser.add_argument("--falsify", action="store_true", help="one point of a calibration is wrong by half")
    parser.add_argument("--throttle", action="store_true", help="only the rank that is throttled in mid-run")
    parser.add_argument("--quick", action="store_true", help="skew 4 alone, fewer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder that the ranks share
    options = parser.parse_args(arguments)
    if options.quick:
        options.skews, options.seconds = "4", min(options.seconds, 5.0)
    if options.worker:
        work(options)
        return
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise UserError("this benchmark gives each of two ranks a core of its own: it needs Linux and two cores")
    try:
        skews = [float(word) for word in options.skews.split(",")]
    except ValueError:
        skews = [0.0]
    if min(skews) < 1:
        raise UserError(f"--skews {options.skews}: expected numbers of at least 1, e.g. 1,2,4,8")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the control groups go, too
    if options.throttle and (os.geteuid() != 0 or not (CGROUP / "cpu.cfs_quota_us").exists()):
        raise UserError(
            f"--throttle changes a quota in mid-run: it needs root and cgroup v1 ({CGROUP}/cpu.cfs_quota_us)"
        )
    with tempfile.TemporaryDirectory() as name, groups() as joined, neighbour(options, joined):
        write_inputs(Path(name), options.seed)
        mpi_and_blas.prepare()  # mpirun's variables
        environment = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TANDEM_CGROUPS": ",".join(map(str, joined[:2])),
        }
        command = [
            str(mpi_and_blas.mpirun_path()),
            "-n",
            "2",
            "--bind-to",
            "none",
            sys.executable,
            str(Path(__file__)),
            "--worker",
            name,
        ]
        command += [f"--skews={options.skews}", f"--seconds={options.seconds}", f"--seed={options.seed}"]
        command += [f"--{word}" for word in ("throttle", "neighbour", "falsify") if getattr(options, word)]
        process = subprocess.Popen(command, env=environment, cwd=ROOT)
        try:
            status = process.wait()
        finally:
            process.terminate()  # mpirun ends its ranks, if it is not killed outright
            process.wait()
    sys.exit(status)


@contextlib.contextmanager
def groups() -> Iterator[list[Path]]:
    """Control groups: each rank's, preferred over whatever else runs here, and the neighbour's; removed at the end.

    None where this process may not make any.
    """
    if os.geteuid() != 0 or not (CGROUP / "cpu.cfs_quota_us").exists():
        yield []
        return
    made = [CGROUP / f"tandem-balance-{os.getpid()}-{name}" for name in ("0", "1", "neighbour")]
    try:
        for group in made:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.shares").write_text(str(NEIGHBOUR_SHARES if group == made[-1] else RANK_SHARES))
        yield made
    finally:
        for group in made:
            with contextlib.suppress(OSError):  # its last process may be ending still
                time.sleep(0.2)
                group.rmdir()


@contextlib.contextmanager
def neighbour(options: argparse.Namespace, joined: Sequence[Path]) -> Iterator[None]:
    """A process that is now on one core, now on the other, if that is asked for."""
    if not options.neighbour:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(
        target=take_cores,
        args=(options.seed, sorted(os.sched_getaffinity(0))[:2], joined[2] if joined else None),
        daemon=True,
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def take_cores(seed: int, cores: Sequence[int], group: Path | None) -> None:
    """The neighbour's work: bursts in pairs of one length, a core first and then the other."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):  # without root it takes only half of the core that it is on
        os.nice(-20)
    rng = np.random.default_rng(seed)
    while True:
        seconds = rng.uniform(*BURST_SECONDS)
        for core in rng.permutation(list(cores)):
            os.sched_setaffinity(0, {int(core)})
            ends = time.perf_counter() + seconds
            while time.perf_counter() < ends:
                pass


def spin() -> None:
    """A process that takes its fair part of a core."""
    while True:
        pass


def write_inputs(folder: Path, seed: int) -> None:
    """A small model's shape, and pairs of random tokens, all of one length."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    rng = np.random.default_rng(seed)

    def ids() -> list[int]:
        return [int(token) for token in rng.integers(2, VOCABULARY, TOKENS)]

    with (folder / "train.jsonl").open("w") as file:
        for _ in range(1024):
            file.write(json.dumps({"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()}) + "\n")


# ---- On each rank ------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Pins this rank, joins its control group, and goes through the measurements with the other one."""
    launch = mpi_and_blas.launch_environment()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[launch.rank]})  # threads that start later inherit it
    mpi_and_blas.prepare()
    import train  # noqa: F401
    from lib.distributed import world as sync  # noqa: F401  what a run needs is loaded at full speed
    from lib.evaluate import held_out_metrics  # noqa: F401  what a run needs is loaded at full speed

    world = sync.start(launch)
    bench = Bench(world, options)
    paths = bench.groups = [Path(path) for path in os.environ["TANDEM_CGROUPS"].split(",") if path]
    if paths:
        (paths[world.rank] / "cgroup.procs").write_text(str(os.getpid()))  # all threads of it
    rows: list[dict[str, Any]] = []
    if not options.throttle:
        for skew in map(float, options.skews.split(",")):
            rows.append(bench.row(skew))
            bench.say(f"skew {skew:g}: " + describe(rows[-1]))
    is_plain = bool(bench.groups) and not options.neighbour and not options.falsify
    throttled = bench.throttled() if options.throttle or ("," in options.skews and is_plain) else None
    bench.throttle(1.0)
    if world.rank == 0:
        show(rows, throttled)
        modes = {"neighbour": options.neighbour, "falsify": options.falsify}
        load = round(os.getloadavg()[0], 2)
        print(json.dumps({"rows": rows, "throttled": throttled, **modes, "seed": options.seed, "load_average": load}))


class Bench:
    """The measurements, each a training run of train.py in this process."""

    groups: list[Path]

    def __init__(self, world: Any, options: argparse.Namespace) -> None:
        self.world, self.options, self.folder = world, options, options.worker
        self.runs = self.turns = 0
        self.spinners: list[Any] = []  # processes that slow this rank down, where there are no control groups
        self.rng = np.random.default_rng(options.seed)

    def say(self, text: str) -> None:
        if self.world.rank == 0:
            print(text, flush=True)

    def throttle(self, skew: float) -> None:
        """Rank 1's part of its core from now on."""
        quota = -1 if skew == 1 else round(PERIOD_MICROSECONDS / skew)
        if self.groups and self.world.rank == 0:
            (self.groups[1] / "cpu.cfs_quota_us").write_text(str(quota))
        while self.spinners:
            process = self.spinners.pop()
            process.terminate()
            process.join()
        if not self.groups and self.world.rank == 1:  # they inherit this rank's core
            context = multiprocessing.get_context("spawn")
            self.spinners = [context.Process(target=spin, daemon=True) for _ in range(round(skew) - 1)]
            for process in self.spinners:
                process.start()
        self.world.gather_text("throttled")

    def train(self, world: Any, batch: int, steps: int, *words: str, name: str | None = None) -> list[dict[str, Any]]:
        """A run's step records on this rank."""
        import train as script
        from lib.config import load as settings
        from lib.system.records import read_records

        self.runs += 1
        name = name or f"run-{self.runs}-{self.world.rank if world.size == 1 else 'all'}"
        common = [
            f"model.path={self.folder}/model",
            "model.random_init=true",
            f"data.train={self.folder}/train.jsonl",
        ]
        common += [
            f"run.dir={self.folder}/runs-{self.world.rank if world.size == 1 else 'all'}",
            f"run.name={name}",
            f"plan.calibration_dir={self.folder}/calibration",
        ]
        common += [
            f"train.global_batch_size={batch}",
            f"train.steps={steps}",
            "strategy=synchronous",
            "evaluate.samples=0",
            f"checkpoint.every={steps}",
        ]
        config = settings.load(None, [*common, *words])
        with contextlib.redirect_stdout(io.StringIO()):
            script.train(config, world, resume=False, dry_run=False)
        log = Path(config.run.dir) / name / "logs" / f"rank-{world.rank:03d}.jsonl"
        return [record for record in read_records(log) if record["kind"] in ("start", "step", "plan")]

    def in_turn(self, measure: Any) -> list[Any]:
        """Each rank's measurement while the other sleeps, on all ranks."""
        result = None
        for rank in range(self.world.size):
            self.turns += 1
            done = self.folder / f"turn-{self.turns}"
            if self.world.rank == rank:
                result = measure()
                done.touch()
            while not done.exists():
                time.sleep(0.02)
        return [json.loads(text) for text in self.world.gather_long_text(json.dumps(result))]

    def at_once(self, measure: Any) -> list[Any]:
        """All ranks' measurements while the others measure as well, on all ranks."""
        self.world.gather_text("at once")
        return [json.loads(text) for text in self.world.gather_long_text(json.dumps(measure()))]

    def row(self, skew: float) -> dict[str, Any]:
        """One skew: alone, equal, planned."""
        from lib.plan.calibration import BatchCurve
        from lib.plan.plan import plan_cluster, sufficient_global_batch
        from lib.plan.shares import equal_shares

        self.throttle(skew)
        curves = [BatchCurve.model_validate(curve) for curve in self.in_turn(self.curve)]
        hosts = [f"rank {rank}" for rank in range(2)]
        sync_seconds = self.sync_seconds(curves[0])
        batch = sufficient_global_batch(hosts, curves, 16, sync_seconds, TARGET) or 16 * 64
        believed, falsified = self.falsified(curves, skew)
        self.calibrate(believed)
        plan = plan_cluster(hosts, batch, curves=curves, sync_seconds=sync_seconds)
        while self.options.neighbour and (plan.predicted_step_seconds or 1.0) < LEAST_STEP_SECONDS:
            batch *= 2
            plan = plan_cluster(hosts, batch, curves=curves, sync_seconds=sync_seconds)
        shown = [{p.batch_size: round(p.pairs_per_second, 1) for p in curve.points} for curve in believed]
        self.say(
            f"skew {skew:g}: pairs/s by micro-batch {shown}; sync {sync_seconds:.4f} s, besides "
            f"{max(c.step_overhead_seconds for c in curves):.4f} s; {batch} pairs a step; {falsified}"
        )
        seconds = plan.predicted_step_seconds or 1.0
        records, solo, both = self.beside_alone(curves[self.world.rank].best_point.batch_size, batch, seconds)
        speeds = [
            batch
            / float(np.mean([record["step_seconds"] for record in records["step"] if first < record["step"] <= last]))
            for first, last in pairwise(solo)
        ]
        # What the ranks do alone is measured before and after each window of training together.
        sums = [sum(solo[first]) / 2 + sum(solo[last]) / 2 for first, last in pairwise(solo)]
        efficiencies = [speed / total for speed, total in zip(speeds, sums, strict=True)]
        at_once = [sum(both[first]) / 2 + sum(both[last]) / 2 for first, last in pairwise(both)]
        alone = np.median(list(solo.values()), axis=0)
        equal = equal_shares(batch, 2)
        slower = max(share / speed for share, speed in zip(equal, alone, strict=True))
        equal_speed = pairs_per_second(self.train(self.world, batch, 5, f"plan.shares={equal}"), batch)
        plans = records["plan"]
        return {
            "skew": skew,
            "global_batch_size": batch,
            "falsified": falsified or None,
            "shares": plans[-1]["shares"] if plans else records["start"][0]["plan"]["shares"],
            "shares_at_first": records["start"][0]["plan"]["shares"],
            "planned_again_after": [record["step"] for record in plans],
            "solo_pairs_per_second": [round(float(speed), 2) for speed in alone],
            "solo_sum_pairs_per_second": round(float(alone.sum()), 2),
            "pairs_per_second": round(float(np.median(speeds)), 2),
            "efficiency": round(float(np.median(efficiencies)), 4),
            "efficiency_of_windows": [round(one, 3) for one in efficiencies],
            "contention": round(1 - float(np.median(np.array(at_once) / np.array(sums))), 4),
            "efficiency_of_both": round(float(np.median(np.array(speeds) / np.array(at_once))), 4),
            "predicted_efficiency": round(plan.efficiency or 0.0, 4),
            "equal_split_pairs_per_second": round(equal_speed, 2),
            "equal_split_efficiency": round(equal_speed / float(alone.sum()), 4),
            "ideal_equal_split_efficiency": round(batch / slower / float(alone.sum()), 4),
        }

    def falsified(self, curves: Sequence[Any], skew: float) -> tuple[list[Any], str]:
        """The curves, with one point of one rank's wrong by half, if that is asked for; and which."""
        if not self.options.falsify:
            return list(curves), ""
        rng = np.random.default_rng([self.options.seed, round(100 * skew)])  # both ranks draw the same
        rank, size, factor = int(rng.integers(2)), int(rng.choice(SIZES)), float(rng.choice([0.5, 2.0]))
        points = [
            point.model_copy(
                update={
                    "seconds_median": point.seconds_median * factor,
                    "pairs_per_second": point.pairs_per_second / factor,
                }
            )
            if point.batch_size == size
            else point
            for point in curves[rank].points
        ]
        wrong = [
            curve.model_copy(update={"points": tuple(points)}) if r == rank else curve for r, curve in enumerate(curves)
        ]
        return wrong, f"rank {rank}'s time of {size} pairs is given as {factor:g} times what it is"

    def beside_alone(
        self, best: int, batch: int, step_seconds: float
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[int, list[float]], dict[int, list[float]]]:
        """A run of both ranks, which stands still every few steps for what each does alone, and both at once.

        Returns:
            The run's records by kind; {step: pairs/s of every rank alone after it}, the first after CORRECTED_BY; the
            same of both at once.
        """
        from lib.plan.replan import Schedule

        every = max(2, round(self.options.seconds / WINDOWS / step_seconds))
        steps = CORRECTED_BY + WINDOWS * every
        alone = self.alone(best)
        solo: dict[int, list[float]] = {}
        both: dict[int, list[float]] = {}
        observe = Schedule.observe

        def observed(schedule: Schedule, step: int, tokens: Sequence[float], seconds: Sequence[float]) -> Any:
            new = observe(schedule, step, tokens, seconds)
            if step >= CORRECTED_BY and (step - CORRECTED_BY) % every == 0:
                solo[step] = self.in_turn(lambda: alone(batch, self.options.seconds / WINDOWS / 2))
                both[step] = self.at_once(lambda: alone(batch, self.options.seconds / WINDOWS / 2))
            return new

        Schedule.observe = observed  # type: ignore[method-assign]
        try:
            records = self.train(self.world, batch, steps, "plan.replan_seconds=0")
        finally:
            Schedule.observe = observe  # type: ignore[method-assign]
        kinds = ("start", "step", "plan")
        return {kind: [record for record in records if record["kind"] == kind] for kind in kinds}, solo, both

    def throttled(self) -> dict[str, Any]:
        """A rank that is throttled twofold in mid-run: when a new plan begins, and what it is worth."""
        from lib.plan.calibration import BatchCurve
        from lib.plan.plan import plan_cluster, sufficient_global_batch

        self.throttle(1.0)
        fast = [BatchCurve.model_validate(curve) for curve in self.in_turn(self.curve)]
        self.calibrate(fast)
        sync_seconds = self.sync_seconds(fast[0])
        hosts = ["rank 0", "rank 1"]
        batch = sufficient_global_batch(hosts, fast, 16, sync_seconds, TARGET) or 16 * 64
        before = plan_cluster(hosts, batch, curves=fast, sync_seconds=sync_seconds)
        steps, when = 40, 12
        log = self.folder / "runs-all" / "throttled" / "logs" / "rank-000.jsonl"

        def soon() -> None:
            while not log.exists() or f'"step": {when}' not in log.read_text():
                time.sleep(0.005)
            (self.groups[1] / "cpu.cfs_quota_us").write_text(str(PERIOD_MICROSECONDS // 2))

        if self.world.rank == 0:
            threading.Thread(target=soon, daemon=True).start()
        records = self.train(self.world, batch, steps, "plan.replan_seconds=0", name="throttled")
        self.throttle(2.0)
        slow = [BatchCurve.model_validate(curve) for curve in self.in_turn(self.curve)]
        self.calibrate(slow)
        best = plan_cluster(hosts, batch, curves=slow, sync_seconds=sync_seconds)
        optimum = pairs_per_second(
            self.train(self.world, batch, self.steps(best.predicted_step_seconds or 1.0), "plan.replan=false"),
            batch,
        )
        plans = [record for record in records if record["kind"] == "plan" and record["step"] > when]
        first = plans[0]["first_step"] if plans else steps
        after = pairs_per_second(
            [record for record in records if record["kind"] == "step" and record["step"] >= first], batch
        )
        return {
            "throttled_after_step": when,
            "new_plan_from_step": plans[0]["first_step"] if plans else None,
            "shares_before": before.shares,
            "shares_after": plans[-1]["shares"] if plans else None,
            "best_shares": best.shares,
            "pairs_per_second_before": round(
                pairs_per_second([r for r in records if r["kind"] == "step" and r["step"] <= when], batch), 2
            ),
            "pairs_per_second_between": round(
                pairs_per_second(
                    [r for r in records if r["kind"] == "step" and when + 1 < r["step"] < first],
                    batch,
                    skip=0,
                ),
                2,
            ),
            "pairs_per_second_after": round(after, 2),
            "optimum_pairs_per_second": round(optimum, 2),
            "of_the_optimum": round(after / optimum, 4),
        }

    def steps(self, seconds_each: float) -> int:
        """About `--seconds` of them."""
        return max(5, min(60, round(self.options.seconds / seconds_each) + 2))

    def alone(self, best: int) -> Any:
        """A function that runs this rank's steps by itself for some seconds: (global batch, seconds) ➜ pairs/s."""
        batches, step = self.prepared([best])

        def measure(global_batch_size: int, seconds: float) -> float:
            computes, others = [], []
            began = time.perf_counter()
            while len(computes) < 3 or time.perf_counter() - began < seconds:
                started = time.perf_counter()
                taken = step(0, 1, [batches[best]() for _ in range(ALONE_MICRO_BATCHES)])
                computes.append(taken.compute_seconds[0])
                others.append(time.perf_counter() - started - computes[-1])
            # A whole global batch in micro-batches of that size, and once what a step does besides.
            compute = float(np.mean(computes)) / ALONE_MICRO_BATCHES * global_batch_size / best
            return global_batch_size / (compute + float(np.mean(others)))

        measure(best, 0.0)  # loads and compiles
        return measure

    def prepared(self, sizes: Sequence[int]) -> tuple[dict[int, Any], Any]:
        """{size: a function that collates a micro-batch of it}, and the step that training takes."""
        from lib.config import load as settings
        from lib.data import tokenizer
        from lib.data.batch import collate
        from lib.data.dataset import load_dataset
        from lib.distributed.world import World
        from lib.model import adapter_files, adapters
        from lib.model import load as load_module
        from lib.model.token_stream import cannot_share_prompts, length_multiple
        from lib.training.optimizers import make_optimizer
        from lib.training.step import Step

        words = [
            f"model.path={self.folder}/model",
            "model.random_init=true",
            f"data.train={self.folder}/train.jsonl",
        ]
        config = settings.load(None, words)
        data = load_dataset(config.data.train, config.data, "preference", None, **tokenizer.vocabulary(config.model))
        model = load_module.load(config.model, 0)
        adapters.make_trainable(model, config.model, 0)
        self.gradient_bytes = sum(array.nbytes for array in adapter_files.trainable(model).values())
        step = Step(model, make_optimizer(config.train), config.train, World())
        share, multiple = cannot_share_prompts(model) is None, length_multiple(config.data)

        def collated(size: int) -> Any:
            return collate([data[row] for row in range(size)], multiple, share), np.zeros((size, 2), np.float32)

        return {size: functools.partial(collated, size) for size in sizes}, step

    def curve(self) -> dict[str, Any]:
        """Times of a few micro-batch sizes on this rank, in rounds of all sizes, and of what a step does besides."""
        from lib.plan.calibration import BatchCurve

        batches, step = self.prepared(SIZES)
        computes: dict[int, list[float]] = {size: [] for size in SIZES}
        overheads = []
        for size in SIZES:
            step(0, 1, [batches[size]()])  # loads, compiles
        began = time.perf_counter()
        while min(map(len, computes.values())) < 6 or time.perf_counter() - began < self.options.seconds / 2:
            for size in self.rng.permutation(SIZES).tolist():
                started = time.perf_counter()
                # As many pairs of every size: a short step would meet all or nothing of a neighbour's burst.
                taken = step(0, 1, [batches[size]() for _ in range(max(SIZES) // size)])
                computes[size].append(taken.compute_seconds[0] / (max(SIZES) // size))
                overheads.append(time.perf_counter() - started - taken.compute_seconds[0])
        points = []
        for size, seconds in computes.items():
            rounds = [float(np.mean(part)) for part in np.array_split(seconds, 6)]
            low, median, high = np.percentile(rounds, [25, 50, 75])
            points.append({"batch_size": size, "seconds_median": median, "seconds_spread": high - low})
        besides = {"gradient_bytes": self.gradient_bytes, "step_overhead_seconds": float(np.median(overheads))}
        return BatchCurve.model_validate({"points": points, **besides}).model_dump()

    def sync_seconds(self, curve: Any) -> float:
        """One sum of the gradients over both ranks."""
        import mlx.core as mx

        array = mx.zeros(curve.gradient_bytes // 4)
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            self.world.all_sum(array, "a probe")
            seconds.append(time.perf_counter() - started)
        return max(json.loads(text) for text in self.world.gather_text(json.dumps(float(np.median(seconds)))))

    def calibrate(self, curves: Sequence[Any]) -> None:
        """Puts the curves where train.py looks for them: a file for each rank of this host."""
        from lib.config import load as settings
        from lib.data.batch import padded_lengths
        from lib.model.token_stream import length_multiple
        from lib.plan import calibration as calibration
        from lib.plan.calibration import HostCalibration, Link
        from lib.system import hardware, network

        config = settings.load(None, [f"model.path={self.folder}/model", "model.random_init=true", "data.train=unused"])
        length = int(padded_lengths(np.array([2 * TOKENS - 1]), length_multiple(config.data))[0])
        key = calibration.curve_key(config, self.folder / "model", length)
        name = f"{network.host_name()}-{self.world.rank}"
        curve = curves[self.world.rank].model_copy(update={"key": key, "versions": hardware.versions()})
        seconds = self.sync_seconds(curve)
        link = Link(
            backend="mpi",
            latency_seconds=seconds / 2,
            bandwidth_bytes_per_second=curve.gradient_bytes / (seconds / 2),
        )
        calibration.write_calibration(
            self.folder / "calibration" / f"{name}.json",
            HostCalibration(machine=hardware.identify(name), curves=(curve,), links=(link,)),
        )
        self.world.gather_text("calibrated")


def pairs_per_second(records: Sequence[dict[str, Any]], batch: int, skip: int = 2) -> float:
    """By the median step; the first ones compile and allocate."""
    seconds = [record["step_seconds"] for record in records if record["kind"] == "step"][skip:]
    return batch / float(np.median(seconds)) if seconds else 0.0


# ---- What a person sees ------------------------------------------------------------------------------------


def describe(row: dict[str, Any]) -> str:
    shares = " + ".join(map(str, row["shares"]))
    equal = row["equal_split_efficiency"]
    return f"{shares} pairs, efficiency {row['efficiency']:.3f} ({row['efficiency_of_both']:.3f} of both at once), equal split {equal:.3f}"


def show(rows: Sequence[dict[str, Any]], throttled: dict[str, Any] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(
        width=140, force_terminal=False, highlight=False, markup=False
    )  # mpirun gives its ranks a terminal
    table = Table(title="two ranks, rank 1 slower: pairs/s over the sum of what both do alone; the ideal is 1")
    for column in (
        "skew",
        "alone, pairs/s",
        "global batch",
        "planned shares",
        "planned",
        "of both at once",
        "predicted",
        "equal split",
        "its ideal",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        alone = " + ".join(f"{speed:.1f}" for speed in row["solo_pairs_per_second"])
        shares = " + ".join(map(str, row["shares"]))
        figures = [
            f"{row[key]:.3f}"
            for key in (
                "efficiency",
                "efficiency_of_both",
                "predicted_efficiency",
                "equal_split_efficiency",
                "ideal_equal_split_efficiency",
            )
        ]
        table.add_row(f"{row['skew']:g}:1", alone, str(row["global_batch_size"]), shares, *figures)
    if rows:
        console.print(table)
    if throttled:
        console.print(
            f"throttled twofold after step {throttled['throttled_after_step']}: "
            f"new plan {throttled['shares_after']} from step {throttled['new_plan_from_step']}, "
            f"{throttled['of_the_optimum']:.1%} of the optimum {throttled['best_shares']}"
        )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
