"""One measurement in a process of its own, so that running out of memory ends this process and no other.

    python benchmarks/probe.py '{"kind": "machine", "seconds": 2}'

benchmarks/calibrate.py asks, in JSON; the last line printed is the answer. What is timed is what training
runs: the same step and model, on rows of random tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib import environment

environment.enter()

import numpy as np

from lib.system import mpi_and_blas  # noqa: E402

# What it measures runs under the settings of training; some are read as MLX comes in.
REQUEST = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from lib.config.settings import Config  # noqa: E402
from lib.data import tokenizer  # noqa: E402
from lib.data.batch import Batch, collate_trained  # noqa: E402
from lib.data.dataset import Example  # noqa: E402
from lib.data.order import prefetch  # noqa: E402
from lib.distributed.world import World  # noqa: E402
from lib.errors import UserError  # noqa: E402
from lib.model import (
    adapters,  # noqa: E402
    load,  # noqa: E402
)
from lib.model.stream_trial import cannot_share_prompts
from lib.model.token_stream import length_multiple  # noqa: E402
from lib.training import (
    divided_world,  # noqa: E402
    losses,  # noqa: E402
)
from lib.training.optimizers import make_optimizer
from lib.training.step import Step  # noqa: E402
from lib.training.unpaired_losses import needs_mismatched  # noqa: E402

Name = TypeVar("Name", int, "tuple[int, int]")  # of a run that is timed

ENOUGH = 0.01  # of the median: its standard error, where measuring stops
LEAST_ROUNDS = 5


def measure(runs: dict[Name, Callable[[], Any]], seconds: float) -> dict[Name, list[float]]:
    """Seconds of each run, taken in turn, so that a slow moment hits all alike.

    Every run is warmed up; rounds go on until the medians are certain to ENOUGH, or the time is up.
    """
    started = time.perf_counter()
    for run in runs.values():
        run()  # loads, compiles
        if time.perf_counter() - started < seconds / 4:
            run()
    times: dict[Name, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    while not _certain(times) and (time.perf_counter() - started < seconds or not all(times.values())):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def _certain(times: dict[Name, list[float]]) -> bool:
    for taken in times.values():
        if len(taken) < LEAST_ROUNDS:
            return False
        low, median, high = np.percentile(taken, [25, 50, 75])
        # Normally distributed: sigma = (high - low) / 1.35, and the median's error is 1.25 sigma / sqrt(n).
        if 1.25 * (high - low) / 1.35 / np.sqrt(len(taken)) > ENOUGH * median:
            return False
    return True


def examples(count: int, request: dict[str, Any], config: Config) -> list[Example]:
    """Random tokens of the lengths that `rows` has, [prompt, completion, ...] each, over and over."""
    rng = np.random.default_rng(config.train.seed)
    vocab_size = tokenizer.vocabulary(config.model).vocab_size or 256

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, vocab_size, length, dtype=np.int32)

    rows = enumerate(itertools.islice(itertools.cycle(request["rows"]), count))
    has_labels = config.record_kind == "unpaired"
    return [
        Example(row, ids(prompt), tuple(map(ids, completions)), label=bool(row % 2) if has_labels else None)
        for row, (prompt, *completions) in rows
    ]


MicroBatch = tuple[Batch, np.ndarray | None]


def step_batches(
    sizes: Sequence[int], request: dict[str, Any], config: Config, model: nn.Module
) -> Generator[list[MicroBatch], None, None]:
    """One step's micro-batches after the other, made ahead in a thread as training makes them."""
    share = config.data.shared_prompts and not cannot_share_prompts(model)
    multiple = length_multiple(config.data)
    parts = [examples(size, request, config) for size in sizes]
    has_reference = losses.needs_reference(config.train)

    mismatched = needs_mismatched(config.train.loss)

    def micro_batch(part: list[Example]) -> MicroBatch:
        batch = collate_trained(part, multiple, share, mismatched)
        return batch, np.zeros((len(part), 2), np.float32) if has_reference else None

    return prefetch((list(map(micro_batch, parts)) for _ in itertools.count()), depth=2)


def trainable_model(config: Config) -> nn.Module:
    """The model as a run trains it."""
    model = load.load(config.model, config.train.seed)
    adapters.make_trainable(model, config.model, config.train.seed)
    divided_world.divided(model, None, World(), keeps_wired=True)
    return model


def step(request: dict[str, Any]) -> dict[str, Any]:
    """Steps of several numbers of micro-batches.

    Returns:
        seconds: {number of micro-batches: [...]}; peak_memory_bytes; weights_bytes; gradient_bytes, summed over ranks.
    """
    config = Config.model_validate(request["config"])
    model = trainable_model(config)
    mx.eval(model.parameters())
    weights = mx.get_active_memory()
    optimizer = make_optimizer(config.train)
    take_step = Step(model, optimizer, config.train, World())
    peaks = []

    def run(batches: Generator[list[MicroBatch], None, None]) -> None:
        peaks.append(take_step(0, 1e-4, next(batches)).figures["peak_memory_bytes"])

    with ExitStack() as stack:
        runs = {}
        for count in request["micro_batches"]:
            batches = step_batches([request["batch_size"]] * count, request, config, model)
            runs[count] = partial(run, stack.enter_context(closing(batches)))
        times = measure(runs, request["seconds"])
    gradients = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    bytes_ = {"peak_memory_bytes": max(peaks), "weights_bytes": weights, "gradient_bytes": 4 * gradients}  # as float32
    return {"seconds": times, **bytes_}


def rounds(request: dict[str, Any]) -> dict[str, Any]:
    """Steps of several sizes, all of them in each round, in an order that changes: a slow moment hits every size.

    Returns:
        rounds: {batch size: [a round's median seconds of a step, ...]}; peak_memory_bytes.
    """
    config = Config.model_validate(request["config"])
    model = trainable_model(config)
    take_step = Step(model, make_optimizer(config.train), config.train, World())
    rng = np.random.default_rng(config.train.seed)
    taken: dict[int, list[float]] = {size: [] for size in request["sizes"]}
    each = request["seconds"] / request["rounds"] / len(taken)
    with ExitStack() as stack:
        batches = {size: stack.enter_context(closing(step_batches([size], request, config, model))) for size in taken}
        for size in taken:
            take_step(0, 1e-4, next(batches[size]))  # loads, compiles
        peak = mx.get_peak_memory()
        for _ in range(request["rounds"]):
            for size in rng.permutation(list(taken)).tolist():
                seconds: list[float] = []
                while not seconds or sum(seconds) < each:
                    began = time.perf_counter()
                    take_step(0, 1e-4, next(batches[size]))
                    seconds.append(time.perf_counter() - began)
                # After another size the first step finds the caches cold.
                taken[size].append(float(np.median(seconds[1:] or seconds)))
    return {"rounds": taken, "peak_memory_bytes": peak}


def machine(request: dict[str, Any]) -> dict[str, Any]:
    """Matrix multiplication and copying: {"gflops", "memory_bytes_per_second"}."""
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16  # the fast type there
    seconds = request["seconds"] / 3

    chain = 4  # products in one evaluation, so that starting it weighs little
    flops = 0.0
    for width in (512, 1024, 2048, 4096, 8192):
        work = 2 * width**3 * chain
        if flops and work / flops > seconds / 2:
            break
        a, b = (mx.random.normal((width, width), scale=width**-0.5).astype(dtype) for _ in range(2))
        mx.eval(a, b)

        def multiply(a: mx.array = a, b: mx.array = b) -> None:
            product = a
            for _ in range(chain):
                product = product @ b
            mx.eval(product)

        flops = max(flops, work / float(np.median(measure({0: multiply}, seconds / 2)[0])))

    if mx.default_device() == mx.cpu:  # in place: MLX would measure the system's handing out of new pages
        source = np.ones(2**25, np.float32)
        target = np.empty_like(source)
        copied, size = measure({0: lambda: np.copyto(target, source)}, seconds)[0], source.nbytes
    else:
        array = mx.zeros((2**28,), mx.float32)
        mx.eval(array)
        copied, size = measure({0: lambda: mx.eval(array + 1)}, seconds)[0], array.nbytes
    return {"gflops": flops / 1e9, "memory_bytes_per_second": 2 * size / float(np.median(copied))}


def main() -> int:
    try:
        kinds = {"step": step, "rounds": rounds, "machine": machine}
        answer = kinds[REQUEST["kind"]](REQUEST)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
