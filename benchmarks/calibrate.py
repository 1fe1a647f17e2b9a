"""Measures this host for a configuration's model, and keeps what it finds in calibration/HOST.json.

    python benchmarks/calibrate.py --quick                         the quickstart's model, within a minute
    python benchmarks/calibrate.py --config FILE [key=value ...]   another one, thoroughly
    mpirun -n 2 python benchmarks/calibrate.py --config FILE       every rank alone, all together, their links

The batch curve is the time and peak memory of a micro-batch of 1, 2, 4, ... pairs, denser round the fastest,
on rows as long as the data's. Each point is measured in a process of its own, on the step that training
runs: one that runs out of memory is a point lost, and no more. Then all sizes that fit are measured in rounds, each size once a
round; a point's time is the median of its rounds, and what breaks the curve's shape is measured again. A step takes the time of its micro-batches
and, once, `step_overhead_seconds` (clipping, the update). What is younger than --max-age-days and was made
with the same versions is not measured again.

Beside the file: curves.png and curves.html, with every host that the folder knows. --verify compares what the
curves predict with steps that no probe has run. The last line is one JSON object.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lib.config import (
    command_line,  # noqa: E402
    load,  # noqa: E402
)
from lib.config.schema import Config  # noqa: E402
from lib.distributed import heartbeat  # noqa: E402
from lib.errors import UserError  # noqa: E402
from lib.plan import calibration as curves_module  # noqa: E402
from lib.plan import (
    calibration_checks,  # noqa: E402
    calibrator,  # noqa: E402
)
from lib.plan.calibration import (  # noqa: E402
    MEMORY_HEADROOM,
    BatchCurve,
    BatchPoint,
    CurveKey,
    HostCalibration,
    MeasuredProduct,
)
from lib.system import (
    files,  # noqa: E402
    hardware,  # noqa: E402
    mpi_and_blas,  # noqa: E402
)
from lib.system.terminal import Terminal  # noqa: E402

if TYPE_CHECKING:
    from lib.distributed.world import World

PROBE = ROOT / "benchmarks" / "probe.py"
QUICK_SECONDS = 44.0  # of measuring a host; the rest of the minute is for starting, the links and the picture
START_SECONDS = 120.0  # a probe's limit beyond its measuring: imports, loading the model, compiling
USUAL_SECONDS = 15.0  # of a start with compiled kernels
PAST_THE_KNEE = 0.97  # of the best rate: two sizes in a row below it end the climb
GIVE_UP = 2  # points lost in a row
ROUNDS, QUICK_ROUNDS = 7, 5  # of all sizes
LEAST_SHARES, CERTAIN_SHARE = 3, 0.04  # rounds; and the standard error of a share, of a time, that is of use
DEPTHS_SECONDS = 4.0  # of measuring them
TIMES_AGAIN = 2  # that what breaks the curve's shape is measured once more
ROWS = 64  # of the data's, whose lengths are measured with
LAUNCHERS = (
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_WORLD",
    "MLX_IBV",
    "MLX_JACCL",
    "NCCL_",
)


# ---- Probes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Rows to measure with."""

    sequence_length: int  # that stands for them in a curve's key
    rows: list[list[int]]  # tokens of each row's prompt and completions


@dataclass(frozen=True)
class Prober:
    """Starts probes, and ends those that take too long."""

    config: Config
    seconds: float  # of measuring, a point
    deadline: float = math.inf  # time.monotonic()
    products: tuple[MeasuredProduct, ...] = ()  # of this host, which the measured steps go by

    def ask(self, kind: str, seconds: float | None = None, **request: Any) -> dict[str, Any] | str:
        """A probe's answer, or in a few words why there is none.

        Raises:
            UserError: the configuration or the model cannot be used.
        """
        left = self.deadline - time.monotonic()
        seconds = min(seconds or self.seconds, max(0.5, left / 2))
        limit = min(4 * seconds + START_SECONDS, max(5.0, left + 5.0))
        request |= {"kind": kind, "seconds": seconds, "config": self.config.model_dump(mode="json")}
        request["products"] = [product.model_dump(mode="json") for product in self.products]
        # To itself a probe is no rank of the world that this process belongs to.
        own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        command = [sys.executable, str(PROBE), json.dumps(request)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=own, check=False)
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
        if done.returncode < 0:
            return f"killed by signal {-done.returncode}"
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        if done.returncode == 2:
            raise UserError(errors[-1].removeprefix("error: "))
        if done.returncode:
            return errors[-1][:200]
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer


@dataclass
class Measured:
    """What the probes of one curve brought home, by batch size; answers are benchmarks/probe.py's."""

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

    def size_in(self, seconds: float) -> int:
        """The largest size, up to the fastest, with which the least rounds of `outside_blocks` take so long at most."""
        of_one = {size: float(np.median(answer["seconds"]["1"])) for size, answer in self.answers.items()}
        # A round: 1 and 3 micro-batches, through all blocks and through a quarter of them.
        fits = [size for size, once in of_one.items() if LEAST_SHARES * 5 * once <= seconds]
        return min(self.best, max(fits, default=min(of_one)))

    def outside_blocks(self, seconds: dict[str, dict[str, list[float]]]) -> float | None:
        """The share of a micro-batch's time that is no block's: the median of rounds; None where they do not agree.

        seconds: of steps, {number of blocks: {number of micro-batches: [of each round]}}; of two numbers of either kind,
            or empty.
        """
        shares = []
        for times in zip(*(times for by_count in seconds.values() for times in by_count.values()), strict=False):
            of_round = iter(times)
            shares.append(
                _outside({blocks: {count: next(of_round) for count in seconds[blocks]} for blocks in seconds})
            )
        if len(shares) < LEAST_SHARES or np.std(shares, ddof=1) / np.sqrt(len(shares)) > CERTAIN_SHARE:
            return None
        return min(max(float(np.median(shares)), 0.0), 0.9)

    def points(self) -> list[BatchPoint]:
        """tau(b), without what a step costs once: the rounds' median and spread; without rounds, of all steps of a size."""
        points = []
        for size, answer in sorted(self.answers.items()):
            medians = {int(count): float(np.median(times)) for count, times in answer["seconds"].items()}
            seconds = sum(median - self.overhead_seconds for median in medians.values()) / sum(medians)
            of_rounds = self.rounds.get(size)
            if of_rounds:
                seconds = float(np.median(of_rounds)) - self.overhead_seconds
            low, high = np.percentile(of_rounds or answer["seconds"]["1"], [25, 75])
            points.append(
                BatchPoint(
                    batch_size=size,
                    seconds_median=max(seconds, 0.1 * medians[1]),
                    seconds_spread=float(high - low),
                    pairs_per_second=1.0,  # follows from the time
                    peak_memory_bytes=max(1, answer["peak_memory_bytes"]),
                )
            )
        return points


def _outside(seconds: dict[str, dict[str, float]]) -> float:
    """The share of a micro-batch's time that is no block's: by a straight line through few and all blocks."""
    of_micro_batch = {}
    for blocks, by_count in seconds.items():
        (one, once), (more, longer) = sorted((int(count), time) for count, time in by_count.items())
        of_micro_batch[int(blocks)] = (longer - once) / (more - one)
    (few, of_few), (whole, of_whole) = sorted(of_micro_batch.items())
    outside = of_few - few * (of_whole - of_few) / (whole - few)
    return outside / of_whole if of_whole > 0 else 0.0


def ladder(largest: int, growth: int) -> list[int]:
    """1, growth, growth^2, ... and `largest`."""
    sizes = [1]
    while sizes[-1] * growth < largest:
        sizes.append(sizes[-1] * growth)
    return [*sizes, largest]


def climb(
    probe: Callable[[int, list[int]], dict[str, Any] | str],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    memory_limit_bytes: int | None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Measured:
    """Measures rising sizes, to memory's limit or past the knee, then `rounds` times beside the fastest.

    Args:
        probe: (batch size, numbers of micro-batches) ➜ the probe's answer, or why there is none.
        seconds: of measuring, a point; a step that takes a good part of it is run with 1 micro-batch only.
        out_of_time: asked before each point, from the third on.
    """
    found = Measured()

    def attempt(size: int) -> None:
        slow = bool(found.answers) and 10 * size / found.rate(max(found.answers)) > seconds
        answer = probe(size, [1, 4] if not found.answers else [1] if slow else [1, 2])
        if isinstance(answer, str):
            found.lost[size] = answer
        else:
            found.answers[size] = answer

    def fits(size: int) -> bool:
        """By the straight line through the two largest sizes known: a Mac swaps before it refuses."""
        if memory_limit_bytes is None or not found.answers:
            return True
        known = sorted(found.answers)[-2:]
        peaks = [found.answers[one]["peak_memory_bytes"] for one in known]
        if len(known) > 1:
            slope = (peaks[-1] - peaks[0]) / (known[-1] - known[0])
        else:  # whatever is not weights grows with the pairs
            slope = (peaks[0] - found.answers[known[0]].get("weights_bytes", 0)) / known[0]
        return bool(peaks[-1] + slope * (size - known[-1]) <= (1 - MEMORY_HEADROOM) * memory_limit_bytes)

    lost_in_a_row = slower_in_a_row = 0
    for size in sizes:
        if len(found.answers) > 1 and out_of_time():
            break
        if not fits(size):
            found.lost[size] = "would not fit"
            break
        attempt(size)
        lost_in_a_row = lost_in_a_row + 1 if size in found.lost else 0
        is_slower = size in found.answers and found.rate(size) < PAST_THE_KNEE * found.rate(found.best)
        slower_in_a_row = slower_in_a_row + 1 if is_slower else 0
        if GIVE_UP in (lost_in_a_row, slower_in_a_row):
            break
    for _ in range(rounds if found.answers else 0):
        tried = sorted({*found.answers, *found.lost})
        best = tried.index(found.best)
        for beside in (tried[max(0, best - 1)], tried[min(best + 1, len(tried) - 1)]):
            size = round(math.sqrt(beside * tried[best]))
            if size in tried or (len(found.answers) > 1 and out_of_time()):
                continue
            if fits(size):
                attempt(size)
            else:
                found.lost[size] = "would not fit"
    return found


def remeasure(
    probe: Callable[[list[int]], dict[str, Any] | str],
    found: Measured,
    out_of_time: Callable[[], bool] = lambda: False,
) -> str | None:
    """Measures all sizes in rounds, then again, beside their neighbours, those that break the curve's shape or are unsteady.

    probe: batch sizes ➜ the probe's answer, or why there is none.

    Returns:
        Why there are no rounds; None if there are.
    """
    sizes = sorted(found.answers)
    for _ in range(1 + TIMES_AGAIN):
        answer = probe(sizes)
        if isinstance(answer, str):
            return answer
        for size, seconds in answer["rounds"].items():
            found.rounds.setdefault(int(size), []).extend(seconds)
        points = found.points()
        doubtful = {*calibration_checks.unsteady_points(points), *calibration_checks.off_the_curve(points)}
        if not doubtful or out_of_time():
            break
        known = sorted(found.answers)
        places = {known.index(size) + step for size in doubtful for step in (-1, 0, 1)}
        sizes = [known[place] for place in sorted(places) if 0 <= place < len(known)]
    return None


# ---- One host ----------------------------------------------------------------------------------------------


def shapes_of(config: Config, options: argparse.Namespace) -> list[Shape]:
    """Rows as long as the data's mean and, if there is time, as its longest; or as --length says.

    Raises:
        UserError: the data cannot be read.
    """
    from lib.data import tokenizer as models
    from lib.data.batch_shapes import padded_lengths
    from lib.data.dataset import load_dataset
    from lib.data.mismatched import with_mismatched
    from lib.model.token_stream import length_multiple
    from lib.training.losses import needs_mismatched

    if options.lengths:
        completions = 2 if config.record_kind == "preference" or needs_mismatched(config.train.loss) else 1
        return [Shape(n, [[n + 1 - n // 2, *[n // 2] * completions]]) for n in options.lengths]
    tokenizer, words = models.load_tokenizer_of(config.model), models.vocabulary(config.model)
    data = load_dataset(config.data.train, config.data, config.record_kind, tokenizer, **words)
    if needs_mismatched(config.train.loss):
        data = with_mismatched(data, config.data.max_length)
    pieces = np.diff(data.bounds).reshape(len(data), -1)  # tokens of a prompt and its completions
    padded = padded_lengths(data.lengths, length_multiple(config.data))

    totals = pieces.sum(axis=1)

    def shape(length: float, tokens: float) -> Shape:
        nearest = np.argsort(np.abs(totals - tokens), kind="stable")[:ROWS]
        return Shape(round(length), pieces[nearest].tolist())

    # A step's time goes with the tokens of its rows, and a little with how ragged they are.
    typical = shape(float(padded.mean()), float(totals.mean()))
    longest = shape(float(padded.max()), float(totals.max()))
    is_much_longer = longest.sequence_length > typical.sequence_length
    return [typical, longest] if is_much_longer and not options.quick else [typical]


def measure_host(
    config: Config,
    host: str,
    shapes: Sequence[Shape],
    key: CurveKey,
    options: argparse.Namespace,
    say: Report,
    sharing: int = 1,
) -> tuple[HostCalibration, dict[str, Any]]:
    """Measures what is stale, and writes the host's file.

    Args:
        sharing: ranks that this host's time and memory are for.

    Returns:
        The file's content; `measured` (how many probes), `lost` ({batch size: why}) and `seconds`.

    Raises:
        UserError: the file is damaged, or too few batch sizes could be measured.
    """
    began = time.monotonic()
    deadline = began + QUICK_SECONDS / sharing if options.quick else math.inf
    prober = Prober(config, options.seconds)
    path = options.folder / f"{host}.json"
    versions = hardware.versions()
    identity = hardware.identify(host)
    limit = hardware.memory_limit_bytes()
    if limit and identity.device != "cuda":  # there each rank has a GPU of its own
        limit //= sharing
    known = curves_module.read_calibration(path) if path.exists() else None
    if known is not None and known.machine.device_name != identity.device_name:
        say.line(f"{path.name} is of another machine, {known.machine.device_name}: measured anew")
        known = None

    def is_fresh(one: BatchCurve | HostCalibration | MeasuredProduct | None) -> bool:
        return not options.refresh and one is not None and _is_fresh(one, versions, options.max_age_days)

    curves = {curve.key: curve for curve in known.curves} if known else {}
    wanted = {key.at_length(shape.sequence_length): shape for shape in shapes}
    stale = {
        one: shape
        for one, shape in wanted.items()
        if not is_fresh(curves.get(one))
        or (curves[one].quick and not options.quick)
        or calibration_checks.sound_curve(curves[one])[1]
    }
    rates = {}
    if known and known.gflops and is_fresh(known):
        rates = known.model_dump(include={"gflops", "memory_bytes_per_second", "measured_at", "versions"})

    sizes = ladder(options.largest or max(32, config.train.global_batch_size), 2)
    lost: dict[int, str] = {}
    measured, probe_seconds = 0, 0.0
    products = {one.product: one for one in known.quantised_products} if known else {}
    is_quantised = key.dtype.endswith("-bit")
    wants_products = is_quantised and (bool(stale) or not products or not all(map(is_fresh, products.values())))
    expected = (not rates) + wants_products + len(stale) * (len(sizes) + 2 * options.rounds + 2)
    with say.progress(f"calibrating {host}", expected) as advance:

        def ask(what: str, kind: str, **request: Any) -> dict[str, Any] | str:
            nonlocal measured, probe_seconds
            advance(what)
            asked = time.monotonic()
            answer = prober.ask(kind, **request)
            probe_seconds = time.monotonic() - asked
            measured += isinstance(answer, dict)
            return answer

        if stale and identity.device == "cuda":
            # The first process that needs a kernel compiles it and keeps it on disk: a minute, once.
            first = next(iter(stale.values()))
            ask("compiling kernels", "step", seconds=0.1, batch_size=1, micro_batches=[1], **asdict(first))
            deadline += max(0.0, probe_seconds - USUAL_SECONDS)
        prober = replace(prober, deadline=deadline)
        if wants_products:
            answer = ask("quantised products", "products", seconds=min(30.0, 10 * options.seconds))
            if isinstance(answer, str):
                say.labelled("warning", f"the products with quantised weights could not be measured: {answer}")
            else:
                now = {"measured_at": calibrator.time_now(), "versions": versions}
                found_products = [MeasuredProduct.model_validate({**one, **now}) for one in answer["products"]]
                products |= {one.product: one for one in found_products}
        prober = replace(prober, products=tuple(products.values()))
        for one, shape in stale.items():
            row = asdict(shape)

            def probe(size: int, counts: list[int], row: dict[str, Any] = row) -> dict[str, Any] | str:
                what = f"{row['sequence_length']} tokens, micro-batch of {size}"
                seconds = 2 * prober.seconds if 4 in counts else None  # a small difference of two small times
                return ask(what, "step", seconds=seconds, batch_size=size, micro_batches=counts, **row)

            def out_of_time() -> bool:
                return deadline - time.monotonic() < 4 * probe_seconds  # this point, and three probes after the curve

            found = climb(probe, sizes, options.rounds, prober.seconds, limit, out_of_time)
            lost |= found.lost
            if found.answers:

                def again(sizes: list[int], row: dict[str, Any] = row) -> dict[str, Any] | str:
                    what, seconds = f"{len(sizes)} sizes in rounds", options.seconds * len(sizes)
                    count = QUICK_ROUNDS if options.quick else ROUNDS
                    return ask(what, "rounds", seconds=seconds, sizes=sizes, rounds=count, **row)

                if fault := remeasure(again, found, out_of_time):
                    say.labelled("warning", f"the sizes could not be measured in rounds: {fault}")
            if len(found.answers) < 2:
                why = "; ".join(f"micro-batch of {size}: {reason}" for size, reason in found.lost.items())
                raise UserError(
                    f"{host}: a curve needs 2 batch sizes, and {len(found.answers)} could be measured "
                    f"({why}); try model.gradient_checkpointing=true or a smaller data.max_length"
                )
            speeds = ask("reference, generation", "passes", seconds=1.0, batch_size=found.best, **row)
            if isinstance(speeds, str):
                say.labelled("warning", f"the reference pass and generation could not be measured: {speeds}")
            size = found.size_in(DEPTHS_SECONDS)
            deep = {"seconds": DEPTHS_SECONDS, "batch_size": size, "micro_batches": [1, 3]}
            depths = ask(f"{size} pairs, fewer blocks", "depths", **deep, **row)
            outside, fault = None, depths
            if isinstance(depths, dict):  # empty for a model of which no block can be left out
                outside = found.outside_blocks(depths["seconds"])
                fault = "its rounds were too few, or too different" if outside is None and depths["seconds"] else ""
            if fault:
                say.labelled("warning", f"what is no block's time could not be measured: {fault}")
            curves[one] = BatchCurve(
                points=tuple(found.points()),
                key=one,
                memory_limit_bytes=limit,
                step_overhead_seconds=found.overhead_seconds,
                outside_blocks=outside,
                gradient_bytes=next(iter(found.answers.values()))["gradient_bytes"],
                quick=options.quick,
                measured_at=calibrator.time_now(),
                versions=versions,
                note="; ".join(f"micro-batch of {size}: {reason}" for size, reason in found.lost.items()),
                **(speeds if isinstance(speeds, dict) else {}),
            )
        if not rates:
            answer = ask("matrix multiplication, memory", "machine", seconds=1.0)
            if isinstance(answer, str):
                say.labelled("warning", f"the machine's rates could not be measured: {answer}")
            else:
                rates = {**answer, "measured_at": calibrator.time_now(), "versions": versions}
    kept = {"links": known.links, "ceilings": known.ceilings} if known else {}
    found_here = HostCalibration(
        machine=identity, curves=tuple(curves.values()), quantised_products=tuple(products.values()), **kept, **rates
    )
    curves_module.write_calibration(path, found_here)
    return found_here, {"measured": measured, "lost": lost, "seconds": round(time.monotonic() - began, 1)}


def _is_fresh(
    one: BatchCurve | HostCalibration | MeasuredProduct, versions: Mapping[str, str], max_age_days: float
) -> bool:
    return calibration.is_fresh(one.measured_at, one.versions, versions, max_age_days)


@contextlib.contextmanager
def alone_on_this_machine(folder: Path) -> Iterator[None]:
    """Ranks that share a machine measure one after the other; who waits sleeps, and takes no core."""
    from lib.system.network import host_name

    with (folder / f".{host_name()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- All hosts ---------------------------------------------------------------------------------------------


def measure_together(
    config: Config,
    found: HostCalibration,
    key: CurveKey,
    shape: Shape,
    world: World,
    hosts: Sequence[str],
    backend: str,
    options: argparse.Namespace,
) -> HostCalibration:
    """Adds the links, and how much longer this rank takes while all others work as well."""
    import mlx.core as mx

    from benchmarks.links import measure_links

    links = measure_links(world, hosts, backend, options.quick)
    again = {(link.backend, link.operation, link.peers) for link in links}
    kept = [link for link in found.links if (link.backend, link.operation, link.peers) not in again]
    curve = next(curve for curve in found.curves if curve.key == key)
    best = curve.best_point
    world.all_sum(mx.array(0.0), "all ranks, to start together")
    prober = Prober(config, min(options.seconds, 3.0))
    answer = prober.ask("step", batch_size=best.batch_size, micro_batches=[1], **asdict(shape))
    if isinstance(answer, dict):
        alone = best.seconds_median + curve.step_overhead_seconds
        slowdown = float(np.median(answer["seconds"]["1"])) / alone
        curve = curve.model_copy(update={"slowdown_together": max(1.0, slowdown)})  # less is noise
    curves = tuple(curve if one.key == key else one for one in found.curves)
    return found.model_copy(update={"curves": curves, "links": (*kept, *links)})


def verify(
    config: Config,
    every: Sequence[HostCalibration],
    key: CurveKey,
    shape: Shape,
    world: World,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Runs steps of splits that no probe has run, and compares their time with the curves' prediction."""
    import mlx.core as mx

    from benchmarks.probe import step_batches, trainable_model
    from lib.training.optimizers import make_optimizer
    from lib.training.step import Step

    curves = [next(curve for curve in one.curves if curve.key == key) for one in every]
    peers = tuple(one.machine.host for one in every)
    links = [link for one in every for link in one.links if link.peers == peers]
    sync_seconds = max(k.seconds(curves[0].gradient_bytes or 0) for k in links if k.operation == "all_sum")
    model = trainable_model(config)
    optimizer = make_optimizer(config.train)
    step = Step(model, optimizer, config.train, world)
    rng = np.random.default_rng(options.seed)
    measured = {point.batch_size for curve in curves for point in curve.points}
    rows = []
    for _ in range(6 if options.quick else 12):
        splits = []
        for curve in curves:  # 1 to 4 micro-batches, of sizes between the measured ones where there are any
            most = min(curve.max_batch_size, max(2, config.train.global_batch_size // 2))
            between = sorted({*range(1, most + 1)} - measured) or list(range(1, most + 1))
            splits.append([int(size) for size in rng.choice(between, rng.integers(1, 5))])
        computes = [float(c.seconds(np.array(sizes)).sum()) for c, sizes in zip(curves, splits, strict=True)]
        predicted = max(computes) + max(c.step_overhead_seconds for c in curves) + sync_seconds
        seconds = []
        with contextlib.closing(step_batches(splits[world.rank], asdict(shape), config, model)) as batches:
            step(0, 1, next(batches))
            for _ in range(max(5, min(30, int((0.3 if options.quick else 1.5) / predicted)))):
                began = time.perf_counter()
                step(0, 1, next(batches))
                seconds.append(time.perf_counter() - began)
        taken = np.zeros(world.size, np.float32)
        taken[world.rank] = np.median(seconds)
        actual = float(np.array(world.all_sum(mx.array(taken), "every rank's time of a step")).max())
        rows.append(
            {
                "micro_batch_sizes": splits,
                "predicted_seconds": predicted,
                "measured_seconds": actual,
                "error": predicted / actual - 1,
            }
        )
    return rows


# ---- What a person sees ------------------------------------------------------------------------------------


class Report(Terminal):
    """Rank 0 speaks; the others are silent."""

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """Yields `advance(what comes next)`; a bar on a terminal, nothing elsewhere."""
        shown = (TextColumn(title), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = not self.is_live
        columns = (*shown, TextColumn("{task.description}"))
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as bar:
            task = bar.add_task("", total=total, completed=-1)
            yield lambda what: bar.update(task, advance=1, description=what)

    def host(self, one: HostCalibration, curve: BatchCurve) -> None:
        """The machine, and a row a batch size."""
        rates = f"{one.gflops:,.0f} GFLOP/s, " if one.gflops else ""
        room = f"{(curve.memory_limit_bytes or 0) / 1e9:.1f} GB for MLX"
        chip = f"{one.machine.device_name} ({one.machine.device})"
        self.line(f"{one.machine.host}: {chip}, {rates}{room}, {one.machine.os}")
        rows = []
        for point in curve.points:
            remark = "does not fit" if point.batch_size > curve.max_batch_size else ""
            rows.append(
                [
                    str(point.batch_size),
                    f"{point.seconds_median:.4f} s",
                    f"{point.seconds_spread:.4f} s",
                    f"{point.pairs_per_second:.1f}",
                    f"{(point.peak_memory_bytes or 0) / 1e9:.2f} GB",
                    "fastest" if point == curve.best_point else remark,
                ]
            )
        self.line("")
        columns = ["micro-batch", "step", "spread", "pairs/s", "peak memory", ""]
        self.table(str(curve.key), columns, rows, text_columns=0)
        parts = [f"each step {curve.step_overhead_seconds * 1e3:.1f} ms more"]
        if curve.reference_pairs_per_second and curve.generation_tokens_per_second:
            parts.append(f"reference pass {curve.reference_pairs_per_second:.1f} pairs/s")
            parts.append(f"generation {curve.generation_tokens_per_second:.0f} tokens/s")
        if curve.slowdown_together:
            parts.append(f"{curve.slowdown_together:.2f} times as long while all ranks work")
        self.line(", ".join(parts) + (f"; lost: {curve.note}" if curve.note else ""))
        for remark in calibration_checks.sound_curve(curve)[1]:
            self.labelled(
                "warning",
                f"{one.machine.host}: {remark}; is something else running there? Measure again when it is idle",
            )


def in_short(one: HostCalibration, curve: BatchCurve, folder: Path) -> dict[str, Any]:
    """What a program wants to know of a host."""
    return {
        **one.machine.model_dump(),
        **one.model_dump(include={"gflops", "memory_bytes_per_second"}),
        "optimal_batch_size": curve.best_point.batch_size,
        "max_batch_size": curve.max_batch_size,
        "pairs_per_second": curve.best_point.pairs_per_second,
        **curve.model_dump(exclude={"source", "note"}),
        "links": [link.model_dump(exclude={"transfers"}) for link in one.links],
        "file": str(folder / f"{one.machine.host}.json"),
    }


# ---- The command line --------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's words.

    Raises:
        UserError: an option that does not exist, or a number that cannot be.
    """
    parser = command_line.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    quickstart = str(ROOT / "configs" / "quickstart.yaml")
    add("--config", metavar="FILE", default=quickstart, help="whose model and data (default: the quickstart)")
    add("overrides", nargs="*", metavar="key=value", help="settings that overrule the file")
    add("--quick", action="store_true", help="fewer and shorter measurements: a minute a host at most")
    add("--seconds", type=float, metavar="X", help="of measuring, a point (default: 10, quick 0.4)")
    add("--rounds", type=int, metavar="N", help="of points beside the fastest (default: 3, quick 0)")
    add("--largest", type=int, metavar="N", help="micro-batch (default: the global batch, at least 32)")
    add("--length", metavar="N[,N]", help="tokens of a row, half of them prompt, instead of the data's")
    add("--max-age-days", type=float, metavar="X", default=30.0, help="what is older is measured again")
    add("--refresh", action="store_true", help="measure everything again")
    add("--folder", type=Path, default=curves_module.FOLDER, help="of the hosts' files")
    add("--verify", action="store_true", help="on several ranks: predictions against steps of other splits")
    add("--seed", type=int, default=0, help="of the model's and the rows' random numbers")
    options = parser.parse_intermixed_args(arguments)
    options.seconds = (0.4 if options.quick else 10.0) if options.seconds is None else options.seconds
    options.rounds = (0 if options.quick else 3) if options.rounds is None else options.rounds
    try:
        options.lengths = [int(word) for word in options.length.split(",")] if options.length else []
    except ValueError:
        raise UserError(f"--length {options.length}: expected whole numbers, e.g. 512,1024") from None
    sizes = [*options.lengths, *([] if options.largest is None else [options.largest])]
    if not 0 < options.seconds < math.inf or options.rounds < 0 or min(sizes, default=2) < 2:
        raise UserError("--seconds is above 0, --rounds at least 0, --length and --largest at least 2")
    if not options.max_age_days >= 0:
        raise UserError(
            f"--max-age-days {options.max_age_days:g} is not at least 0; --refresh measures everything again"
        )
    return options


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    options = parse(arguments)
    launch = mpi_and_blas.launch_environment()
    mpi_and_blas.prepare()
    result = calibrate(options, launch)
    if launch.rank == 0:
        Terminal().record(result)
    return 0


def calibrate(options: argparse.Namespace, launch: mpi_and_blas.Launch) -> dict[str, Any]:
    """Measures each rank alone, then all together; shows and draws what is known of all hosts."""
    from benchmarks import curves as pictures
    from lib.distributed import world as sync
    from lib.system import model_folder as models

    say = Report(silent=launch.rank != 0)
    config = load.load(options.config, [*options.overrides, f"train.seed={options.seed}"])
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder {options.folder}: {error.strerror}; give one that can be written") from None
    shapes = shapes_of(config, options)
    folder = models.resolve(config.model.path, config.model.revision)
    key = curves_module.curve_key(config, folder, shapes[0].sequence_length)
    os.environ.pop(heartbeat.ADDRESS, None)  # a rank that is silent while another measures is not at fault
    world = sync.start(launch, timeout_seconds=7200)  # the others measure, one after another, meanwhile
    names = sync.host_names(world)
    host = names[launch.rank]
    if names.count(host) > 1:  # numbered as calibration.own_calibration looks for them
        host = f"{host}-{names[: launch.rank].count(host)}"
    with alone_on_this_machine(options.folder):
        found, account = measure_host(config, host, shapes, key, options, say, launch.local_size)
    every, checked = [found], []
    if launch.size > 1:
        hosts = world.gather_text(host)
        found = measure_together(config, found, key, shapes[0], world, hosts, str(launch.backend), options)
        with world.agreeing("writing the calibration"):
            curves_module.write_calibration(options.folder / f"{host}.json", found)
        texts = world.gather_long_text(found.model_dump_json())
        every = [HostCalibration.model_validate_json(text) for text in texts]
        checked = verify(config, every, key, shapes[0], world, options) if options.verify else []
    if launch.rank > 0:
        return {}

    own = [next(curve for curve in one.curves if curve.key == key) for one in every]
    for one, curve in zip(every, own, strict=True):
        say.host(one, curve)
    for link in every[0].links:
        rate = f"{link.latency_seconds * 1e6:.0f} us + {link.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
        say.line(f"{link.backend} {link.operation} of {', '.join(link.peers)}: {rate}")
    for row in checked:
        times = f"predicted {row['predicted_seconds']:.4f} s, took {row['measured_seconds']:.4f} s"
        say.line(f"micro-batches {row['micro_batch_sizes']}: {times} ({row['error']:+.1%})")
    elsewhere = []
    for path in sorted(options.folder.glob("*.json")):
        if path.stem not in _names(every) and not files.is_litter(path.name):
            try:
                elsewhere.append(curves_module.read_calibration(path))
            except UserError as error:  # another host's, for the picture alone
                say.labelled("warning", str(error))
    published = list(curves_module.read_published().values())
    drawn = pictures.draw([*every, *elsewhere], published, key, options.folder)
    say.line(f"{options.folder / host}.json, {', '.join(map(str, drawn))}")
    if not account["measured"]:
        say.line("all of it was fresh: nothing was measured (--refresh does)")
    result = {**in_short(found, own[0], options.folder), **account, "pictures": [str(path) for path in drawn]}
    if len(every) > 1:
        result["hosts"] = [in_short(*pair, options.folder) for pair in zip(every, own, strict=True)]
    if checked:
        result["splits"] = checked
        result["median_error"] = float(np.median([abs(row["error"]) for row in checked]))
    return result


def _names(every: Sequence[HostCalibration]) -> set[str]:
    return {one.machine.host for one in every}


if __name__ == "__main__":
    sys.exit(main())
