"""Measures this host for a configuration's model, and writes what it finds to calibration/HOST.json.

    python benchmarks/calibrate.py --quick                         the quickstart's model, within a minute
    python benchmarks/calibrate.py --config FILE [key=value ...]   another one, thoroughly
    mpirun -n 2 python benchmarks/calibrate.py --config FILE       every rank alone, all together, their links

The batch curve is the time and peak memory of a micro-batch of 1, 2, 4, ... pairs, on rows as long as the data's. Each
size is first run in a process of its own, on the step that training runs: one that runs out of memory costs a point.
Then all sizes that fit are measured in rounds, each size once a round; what breaks the curve's shape is measured again.
A step takes the time of its micro-batches and, once, `step_overhead_seconds` (clipping, the update). What is younger
than --max-age-days and was made with the same versions is not measured again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import numpy as np
from rich.console import Console
from rich.table import Table

from lib.config import command_line, load
from lib.config.settings import Config
from lib.errors import UserError
from lib.plan import calibration
from lib.plan.calibration import MEMORY_HEADROOM, BatchCurve, BatchPoint, CurveKey, HostCalibration
from lib.system import hardware, mpi_and_blas

PROBE = ROOT / "benchmarks" / "probe.py"
QUICK_SECONDS = 44.0  # of measuring a host; the rest of the minute is for starting, the links and the picture
START_SECONDS = 120.0  # a probe's limit beyond its measuring: imports, loading the model, compiling
PAST_THE_KNEE = 0.97  # of the best rate: two sizes in a row below it end the climb
GIVE_UP = 2  # points lost in a row
ROUNDS, QUICK_ROUNDS = 7, 5  # of all sizes
UNSTEADY = 0.2  # of a point's time, its spread between rounds: beyond it the point is measured again
DIP = 1.3  # pairs/s of smaller and of larger sizes over a point's own: beyond it the point was disturbed
FALLING_TIME = 1.15  # the same for a time that is longer than that of more pairs
ROWS = 64  # of the data's, whose lengths are measured with
LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD", "MLX_IBV", "MLX_JACCL", "NCCL_")

Answer = dict[str, Any] | str  # of a probe; or in a few words why there is none


@dataclass(frozen=True)
class Rows:
    """Rows to measure with."""

    sequence_length: int  # that stands for them in a curve's key
    rows: list[list[int]]  # tokens of each row's prompt and completions


@dataclass
class Prober:
    """Starts probes, and ends those that take too long."""

    config: Config
    seconds: float  # of measuring, a point
    deadline: float = math.inf  # time.monotonic()
    asked: int = 0

    def ask(self, kind: str, seconds: float | None = None, **request: Any) -> Answer:
        """A probe's answer.

        Raises:
            UserError: the configuration or the model cannot be used.
        """
        left = self.deadline - time.monotonic()
        seconds = min(seconds or self.seconds, max(0.5, left / 2))
        limit = min(4 * seconds + START_SECONDS, max(5.0, left + 5.0))
        request |= {"kind": kind, "seconds": seconds, "config": self.config.model_dump(mode="json")}
        # To itself a probe is no rank of the world that this process belongs to.
        variables = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        command = [sys.executable, str(PROBE), json.dumps(request)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=variables, check=False)
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
        if done.returncode < 0:
            return f"killed by signal {-done.returncode}"
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        if done.returncode == 2:
            raise UserError(errors[-1].removeprefix("error: "))
        if done.returncode:
            return errors[-1][:200]
        self.asked += 1
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer


@dataclass
class Measured:
    """What the probes of one curve measured, by batch size; answers are benchmarks/probe.py's."""

    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    rounds: dict[int, list[float]] = field(default_factory=dict)  # a round's seconds of a step with one micro-batch

    def rate(self, size: int) -> float:
        """Pairs/s of steps with one micro-batch."""
        return size / float(np.median(self.answers[size]["seconds"]["1"]))

    @property
    def best(self) -> int:
        return max(self.answers, key=self.rate)

    @property
    def overhead_seconds(self) -> float:
        """What a step costs once: its time with 1 micro-batch, less what each of k - 1 more of them adds.

        From the smallest batch that was run with both numbers: noise is least there, in seconds.
        """
        for _, answer in sorted(self.answers.items()):
            medians = {int(count): float(np.median(times)) for count, times in answer["seconds"].items()}
            if len(medians) > 1:
                most = max(medians)
                once = (most * medians[1] - medians[most]) / (most - 1)
                return min(max(once, 0.0), 0.9 * medians[1])
        return 0.0

    def points(self) -> list[BatchPoint]:
        """tau(b), without what a step costs once: the median and spread of rounds, else of all steps of a size."""
        points = []
        for size, answer in sorted(self.answers.items()):
            times = self.rounds.get(size) or answer["seconds"]["1"]
            low, median, high = np.percentile(times, [25, 50, 75])
            seconds = max(float(median) - self.overhead_seconds, 0.1 * float(median))
            fields = {"batch_size": size, "seconds_median": seconds, "seconds_spread": float(high - low)}
            fields["peak_memory_bytes"] = max(1, answer["peak_memory_bytes"])
            points.append(BatchPoint.model_validate(fields))
        return points

    def fits(self, size: int, limit_bytes: int | None) -> bool:
        """By the straight line through the two largest sizes measured: a Mac swaps before it refuses."""
        if limit_bytes is None or not self.answers:
            return True
        known = sorted(self.answers)[-2:]
        peaks = [self.answers[one]["peak_memory_bytes"] for one in known]
        weights = self.answers[known[0]].get("weights_bytes", 0)
        slope = (peaks[-1] - peaks[0]) / (known[-1] - known[0]) if len(known) > 1 else (peaks[0] - weights) / known[0]
        return bool(peaks[-1] + slope * (size - known[-1]) <= (1 - MEMORY_HEADROOM) * limit_bytes)


def climb(
    probe: Callable[[int, list[int]], Answer],
    sizes: Sequence[int],
    seconds: float,
    limit_bytes: int | None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Measured:
    """Measures rising sizes, to memory's limit or past the knee.

    Args:
        probe: (batch size, numbers of micro-batches) ➜ the probe's answer.
        seconds: of measuring, a point; a step that takes a good part of it is run with 1 micro-batch only.
        out_of_time: asked before each point, from the third on.
    """
    found, lost_in_a_row, slower_in_a_row = Measured(), 0, 0
    for size in sizes:
        if len(found.answers) > 1 and out_of_time():
            break
        if not found.fits(size, limit_bytes):
            found.lost[size] = "would not fit"
            break
        slow = bool(found.answers) and 10 * size / found.rate(max(found.answers)) > seconds
        answer = probe(size, [1, 4] if not found.answers else [1] if slow else [1, 2])
        if isinstance(answer, str):
            found.lost[size] = answer
        else:
            found.answers[size] = answer
        lost_in_a_row = lost_in_a_row + 1 if size in found.lost else 0
        is_slower = size in found.answers and found.rate(size) < PAST_THE_KNEE * found.rate(found.best)
        slower_in_a_row = slower_in_a_row + 1 if is_slower else 0
        if GIVE_UP in (lost_in_a_row, slower_in_a_row):
            break
    return found


def doubtful_points(points: Sequence[BatchPoint]) -> dict[int, str]:
    """{batch size: why} of points that were disturbed when they were measured.

    Pairs/s rise, and may fall beyond the knee; they do not fall and rise again. More pairs take no less time. The point
    that is furthest off is taken out first: beside it its neighbours may look wrong as well.
    """
    reasons = {}
    for point in points:
        spread = point.seconds_spread / point.seconds_median
        if spread > UNSTEADY:
            reasons[point.batch_size] = f"times of {point.batch_size} pairs differ by {spread:.0%} between rounds"
    good = [point for point in points if point.batch_size not in reasons]
    while len(good) > 2:
        excess: dict[int, float] = {}
        for index, point in enumerate(good):
            before, after = good[:index], good[index + 1 :]
            if before and after:
                beside = min(max(one.pairs_per_second for one in side) for side in (before, after))
                excess[index] = beside / point.pairs_per_second / DIP
            slower = sum(one.seconds_median > FALLING_TIME * point.seconds_median for one in before)
            slower += sum(point.seconds_median > FALLING_TIME * one.seconds_median for one in after)
            if slower:
                excess[index] = max(excess.get(index, 0.0), float(slower) + 1)
        worst = max(excess, key=lambda index: excess[index])
        if excess[worst] <= 1:
            break
        point = good.pop(worst)
        reasons[point.batch_size] = (
            f"{point.pairs_per_second:.4g} pairs/s at {point.batch_size} pairs break the shape of the curve"
        )
    return reasons


def measure_in_rounds(prober: Prober, found: Measured, count: int, row: dict[str, Any]) -> str | None:
    """All sizes in rounds; then again, beside their neighbours, those that break the curve's shape. Returns a fault."""
    sizes = sorted(found.answers)
    for _ in range(2):
        answer = prober.ask("rounds", seconds=prober.seconds * len(sizes), sizes=sizes, rounds=count, **row)
        if isinstance(answer, str):
            return answer
        for size, seconds in answer["rounds"].items():
            found.rounds.setdefault(int(size), []).extend(seconds)
        doubtful = doubtful_points(found.points())
        if not doubtful or time.monotonic() > prober.deadline:
            break
        known = sorted(found.answers)
        indices = {known.index(size) + step for size in doubtful for step in (-1, 0, 1)}
        sizes = [known[index] for index in sorted(indices) if 0 <= index < len(known)]
    return None


# ---- One host


def rows_of(config: Config, options: argparse.Namespace) -> list[Rows]:
    """Rows as long as the data's mean and, if there is time, as its longest; or as --length says.

    Raises:
        UserError: the data cannot be read.
    """
    from lib.data import tokenizer
    from lib.data.batch_shapes import padded_lengths
    from lib.data.dataset import load_dataset
    from lib.model.token_stream import length_multiple

    if options.lengths:
        completions = 2 if config.record_kind == "preference" else 1
        return [Rows(n, [[n + 1 - n // 2, *[n // 2] * completions]]) for n in options.lengths]
    words = tokenizer.vocabulary(config.model)
    loaded = tokenizer.load_tokenizer_of(config.model)
    data = load_dataset(config.data.train, config.data, config.record_kind, loaded, vocabulary=words)
    pieces = np.diff(data.bounds).reshape(len(data), -1)  # tokens of a prompt and its completions
    padded, totals = padded_lengths(data.lengths, length_multiple(config.data)), pieces.sum(axis=1)

    def rows(length: float, tokens: float) -> Rows:
        nearest = np.argsort(np.abs(totals - tokens), kind="stable")[:ROWS]
        return Rows(round(length), pieces[nearest].tolist())

    typical = rows(float(padded.mean()), float(totals.mean()))
    longest = rows(float(padded.max()), float(totals.max()))
    is_much_longer = longest.sequence_length > typical.sequence_length
    return [typical, longest] if is_much_longer and not options.quick else [typical]


def measure_curve(
    prober: Prober, key: CurveKey, rows: Rows, limit: int | None, options: argparse.Namespace
) -> BatchCurve:
    """One curve, with all that belongs to it.

    Raises:
        UserError: too few batch sizes could be measured.
    """
    row = asdict(rows)

    def probe(size: int, counts: list[int]) -> Answer:
        print(f"{key}: micro-batch of {size}", file=sys.stderr)
        seconds = 2 * prober.seconds if 4 in counts else None  # a small difference of two small times
        return prober.ask("step", seconds=seconds, batch_size=size, micro_batches=counts, **row)

    largest = options.largest or max(32, prober.config.train.global_batch_size)
    sizes = [*(2**n for n in range(largest.bit_length()) if 2**n < largest), largest]
    half = time.monotonic() + (prober.deadline - time.monotonic()) / 2
    found = climb(probe, sizes, prober.seconds, limit, lambda: time.monotonic() > half)
    lost = "; ".join(f"micro-batch of {size}: {reason}" for size, reason in found.lost.items())
    if len(found.answers) < 2:
        raise UserError(
            f"a curve needs 2 batch sizes, and {len(found.answers)} could be measured ({lost}); "
            "try model.gradient_checkpointing=true or a smaller data.max_length"
        )
    if fault := measure_in_rounds(prober, found, QUICK_ROUNDS if options.quick else ROUNDS, row):
        warn(f"the sizes could not be measured in rounds: {fault}")
    return BatchCurve(
        points=tuple(found.points()),
        key=key,
        memory_limit_bytes=limit,
        step_overhead_seconds=found.overhead_seconds,
        gradient_bytes=next(iter(found.answers.values()))["gradient_bytes"],
        quick=options.quick,
        measured_at=calibration.time_now(),
        versions=hardware.versions(),
        note=lost,
    )


def measure_host(
    config: Config, host: str, rows: Sequence[Rows], key: CurveKey, options: argparse.Namespace, sharing: int
) -> tuple[HostCalibration, int]:
    """Measures what is stale, and writes the host's file. Returns its content, and how many probes there were.

    Args:
        sharing: ranks that this host's time and memory are for.

    Raises:
        UserError: the file is damaged, or too few batch sizes could be measured.
    """
    deadline = time.monotonic() + QUICK_SECONDS / sharing if options.quick else math.inf
    prober, path = Prober(config, options.seconds, deadline), options.folder / f"{host}.json"
    versions, identity, limit = hardware.versions(), hardware.identify(host), hardware.memory_limit_bytes()
    if limit and identity.device != "cuda":  # there each rank has a GPU of its own
        limit //= sharing
    stored = calibration.read_calibration(path) if path.exists() else None
    if stored is not None and stored.machine.device_name != identity.device_name:
        warn(f"{path.name} is of another machine, {stored.machine.device_name}: measured anew")
        stored = None

    def is_fresh(one: BatchCurve | HostCalibration | None) -> bool:
        if one is None or options.refresh:
            return False
        return calibration.is_fresh(one.measured_at, one.versions, versions, options.max_age_days)

    curves = {curve.key: curve for curve in stored.curves} if stored else {}
    for some in rows:
        wanted = key.at_length(some.sequence_length)
        curve = curves.get(wanted)
        is_good = curve is not None and (options.quick or not curve.quick) and not doubtful_points(curve.points)
        if not (is_good and is_fresh(curve)):
            curves[wanted] = measure_curve(prober, wanted, some, limit, options)
    rates = {}
    if stored is not None and stored.gflops and is_fresh(stored):
        rates = stored.model_dump(include={"gflops", "memory_bytes_per_second", "measured_at", "versions"})
    elif isinstance(answer := prober.ask("machine", seconds=1.0), str):
        warn(f"the machine's rates could not be measured: {answer}")
    else:
        rates = {**answer, "measured_at": calibration.time_now(), "versions": versions}
    links = stored.links if stored else ()
    found = HostCalibration(machine=identity, curves=tuple(curves.values()), links=links, **rates)
    calibration.write_calibration(path, found)
    return found, prober.asked


@contextlib.contextmanager
def alone_on_this_machine(folder: Path) -> Iterator[None]:
    """Ranks that share a machine measure one after the other; those that wait sleep, and take no core."""
    with (folder / f".{os.uname().nodename}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- All hosts


def measure_together(
    found: HostCalibration, key: CurveKey, rows: Rows, prober: Prober, world: Any, hosts: Sequence[str], quick: bool
) -> HostCalibration:
    """Adds the links, and how much longer this rank takes while all others work as well."""
    import mlx.core as mx

    from benchmarks.links import measure_links

    links = measure_links(world, hosts, world.backend, quick)
    again = {(link.backend, link.operation, link.peers) for link in links}
    before = [link for link in found.links if (link.backend, link.operation, link.peers) not in again]
    curve = next(curve for curve in found.curves if curve.key == key)
    best = curve.best_point
    world.all_sum(mx.array(0.0), "all ranks, to start together")
    answer = prober.ask("step", batch_size=best.batch_size, micro_batches=[1], **asdict(rows))
    if isinstance(answer, dict):
        alone = best.seconds_median + curve.step_overhead_seconds
        slowdown = float(np.median(answer["seconds"]["1"])) / alone
        curve = curve.model_copy(update={"slowdown_together": max(1.0, slowdown)})  # less is noise
    curves = tuple(curve if one.key == key else one for one in found.curves)
    return found.model_copy(update={"curves": curves, "links": (*before, *links)})


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def show(host: HostCalibration, curve: BatchCurve) -> None:
    """The machine, and a row a batch size."""
    table = Table(
        title=f"{host.machine.host}: {host.machine.device_name}, {host.gflops or 0:,.0f} GFLOP/s; {curve.key}"
    )
    for column in ("micro-batch", "step s", "spread s", "pairs/s", "peak GB", ""):
        table.add_column(column, justify="right")
    for point in curve.points:
        remark = "does not fit" if point.batch_size > curve.max_batch_size else ""
        remark = "fastest" if point == curve.best_point else remark
        figures = [f"{point.seconds_median:.4f}", f"{point.seconds_spread:.4f}", f"{point.pairs_per_second:.1f}"]
        table.add_row(str(point.batch_size), *figures, f"{(point.peak_memory_bytes or 0) / 1e9:.2f}", remark)
    Console(width=120).print(table)
    for remark in doubtful_points(curve.points).values():
        warn(f"{host.machine.host}: {remark}; is something else running there? Measure again when it is idle")


def summary(host: HostCalibration, curve: BatchCurve, folder: Path) -> dict[str, Any]:
    """What a program wants to know of a host."""
    return {
        **host.machine.model_dump(),
        **host.model_dump(include={"gflops", "memory_bytes_per_second"}),
        "optimal_batch_size": curve.best_point.batch_size,
        "max_batch_size": curve.max_batch_size,
        "pairs_per_second": curve.best_point.pairs_per_second,
        **curve.model_dump(exclude={"source"}),
        "links": [link.model_dump(exclude={"transfers"}) for link in host.links],
        "file": str(folder / f"{host.machine.host}.json"),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's words.

    Raises:
        UserError: an option that does not exist, or a number that cannot be.
    """
    parser = command_line.Parser(description=__doc__)
    add = parser.add_argument
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    add("--config", metavar="FILE", default=quickstart, help="whose model and data (default: the quickstart)")
    add("overrides", nargs="*", metavar="key=value", help="settings that overrule the file")
    add("--quick", action="store_true", help="fewer and shorter measurements: a minute a host at most")
    add("--seconds", type=float, metavar="X", help="of measuring, a point (default: 10, quick 0.4)")
    add("--largest", type=int, metavar="N", help="micro-batch (default: the global batch, at least 32)")
    add("--length", metavar="N[,N]", help="tokens of a row, half of them prompt, instead of the data's")
    add("--max-age-days", type=float, metavar="X", default=30.0, help="what is older is measured again")
    add("--refresh", action="store_true", help="measure everything again")
    add("--folder", type=Path, help="of the hosts' files (default: plan.calibration_dir)")
    add("--seed", type=int, default=0, help="of the model's and the rows' random numbers")
    options = parser.parse_intermixed_args(arguments)
    options.seconds = (0.4 if options.quick else 10.0) if options.seconds is None else options.seconds
    try:
        options.lengths = [int(word) for word in options.length.split(",")] if options.length else []
    except ValueError:
        raise UserError(f"--length {options.length}: expected whole numbers, e.g. 512,1024") from None
    sizes = [*options.lengths, *([] if options.largest is None else [options.largest])]
    if not 0 < options.seconds < math.inf or min(sizes, default=2) < 2 or not options.max_age_days >= 0:
        raise UserError("--seconds is above 0, --max-age-days at least 0, --length and --largest at least 2")
    return options


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures each rank alone, then all together; shows what is known of all hosts. Returns the status."""
    options = parse(arguments)
    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    from lib.distributed import world as worlds
    from lib.system import hardware, model_folder
    from lib.training.run_inputs import with_compute_type

    config = load.load(options.config, [*options.overrides, f"train.seed={options.seed}"])
    options.folder = options.folder or Path(config.plan.calibration_dir)
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {options.folder}: {error.strerror}; give one that can be written") from None
    rows = rows_of(config, options)
    folder = model_folder.resolve(config.model.path, config.model.revision)
    world = worlds.start(launch, timeout_seconds=7200)  # the others measure, one after another, meanwhile
    config = config.model_copy(update={"model": with_compute_type(config.model, world, print)})
    key = calibration.curve_key(config.model, config.record_kind, folder, rows[0].sequence_length)
    names = worlds.host_names(world)
    host = names[world.rank]
    if names.count(host) > 1:  # numbered as calibration.calibration_path looks for them
        host = f"{host}-{names[: world.rank].count(host)}"
    with alone_on_this_machine(options.folder):
        hardware.choose_threads(None, names.count(names[world.rank]) == 1, config.plan.replan)  # as the run will
        found, probes = measure_host(config, host, rows, key, options, launch.local_size)
    every = [found]
    if world.size > 1:
        hosts, prober = world.gather_text(host, "hosts"), Prober(config, min(options.seconds, 3.0))
        found = measure_together(found, key, rows[0], prober, world, hosts, options.quick)
        with world.agreeing("writing the calibration"):
            calibration.write_calibration(options.folder / f"{host}.json", found)
        texts = world.gather_text(found.model_dump_json(), "calibrations")
        every = [HostCalibration.model_validate_json(text) for text in texts]
    if world.rank > 0:
        return 0
    curves = [next(curve for curve in one.curves if curve.key == key) for one in every]
    for one, curve in zip(every, curves, strict=True):
        show(one, curve)
    for link in every[0].links:
        rate = f"{link.latency_seconds * 1e6:.0f} us + {link.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
        print(f"{link.backend} {link.operation} of {', '.join(link.peers)}: {rate}")
    print(f"{options.folder / host}.json" + " (all of it was fresh; --refresh measures again)" * (not probes))
    result = {**summary(found, curves[0], options.folder), "measured": probes}
    if len(every) > 1:
        result["hosts"] = [summary(*pair, options.folder) for pair in zip(every, curves, strict=True)]
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
