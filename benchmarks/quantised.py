"""LoRA steps on a quantised base, dequantised as training does it, against packed products and the plain base, in turn.

    python benchmarks/quantised.py                         a small model with 4 bits, on this machine's default device
    python benchmarks/quantised.py --quick                 less than a minute
    python benchmarks/quantised.py --hidden 4096 --layers 32 --heads 32 --kv-heads 8 --mlp 14336 --vocabulary 128256 \\
        --dtype bfloat16 --batch-sizes 8 --lengths 512+512 --bases plain chosen         a Llama of 8 billion, on a GPU

The model, the pairs and the options are those of benchmarks/step.py, prompts shared; --bits, --group-size and --mode
say how the base is quantised. Bases: `plain` is not; `packed` is multiplied by as it is stored, as before; `chosen` is
what training does here. Each has a model of its own in this process: memory is what one step holds beyond the others'.
`first step` is the time from this process's start; with one base it says what a user waits for. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import step as bench
from lib.data.collate import Batch, collate
from lib.distributed.world import World
from lib.model import adapters, load, quantised, token_stream
from lib.model.quantised_products import NEVER, go_by
from lib.system import provenance
from lib.training.step import TrainStep, make_optimizer, make_step

BASES = ("plain", "packed", "chosen")


@dataclass
class Base:
    """A model with its step, and what was measured of them."""

    name: str
    model: nn.Module
    step: TrainStep
    own_bytes: int  # of weights, adapters and optimizer
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    first_step_seconds: float = 0.0  # from the process's start

    def run(self, batch: Batch) -> float:
        """Seconds of a step."""
        go_by(dict.fromkeys(quantised.products_of(self.model), NEVER) if self.name == "packed" else {})
        reference = np.full((len(batch.rows), 2), -10.0, np.float32)
        mx.synchronize()
        began = time.perf_counter()
        result = self.step(0, 10**6, [(batch, reference)])
        mx.synchronize()
        self.peak_bytes = max(self.peak_bytes, result.peak_memory_bytes)
        return time.perf_counter() - began


def main() -> int:
    options = parse()
    bases = [made(name, options) for name in options.bases]
    everything = sum(base.own_bytes for base in bases)
    form = f"{options.bits} bits in groups of {options.group_size}, {options.mode}"
    print(f"{provenance.device_name()}, {options.dtype}, {form}, LoRA of rank {options.rank}")
    rows: list[dict[str, Any]] = []
    for lengths in options.lengths:
        prompt, completion = (int(n) for n in lengths.split("+"))
        for batch_size in options.batch_sizes:
            pairs = bench.draw(prompt, completion, batch_size, options)
            batch = collate(
                pairs, options.multiple or token_stream.length_multiple(bench.settings_of(options).data), True
            )
            for row in measure(bases, batch, everything, options):
                rows.append({"prompt": prompt, "completion": completion, "batch_size": batch_size, **row})
                print(
                    f"{lengths:>12} {batch_size:>4} {row['base']:>7} {row['seconds_median']:>9.4f} s "
                    f"{row['pairs_per_second']:>8.2f} pairs/s {row['against_plain'] or float('nan'):>6.2f} of plain "
                    f"{row['peak_memory_bytes'] / 1e9:>7.2f} GB, first step after {row['first_step_seconds']:.0f} s",
                    flush=True,
                )
    facts = {"benchmark": "quantised", "device": provenance.device_name(), "settings": vars(options)}
    print(json.dumps(facts | {"products": quantised.choices(bases[-1].model), "rows": rows}))
    return 0


def made(name: str, options: argparse.Namespace) -> Base:
    """A base with adapters and its step."""
    settings = bench.settings_of(options)
    before = mx.get_active_memory()
    model = load.load(settings.model, options.seed, lazy=True)
    if name != "plain":
        nn.quantize(model, options.group_size, options.bits, mode=options.mode)
    mx.eval(model.parameters())
    adapters.make_trainable(model, settings.model, options.seed)
    assert token_stream.cannot_share_prompts(model) is None
    step = make_step(model, make_optimizer(settings.train), settings.train, World(), dropout=False)
    mx.eval(model.parameters())
    gc.collect()
    mx.clear_cache()
    return Base(name, model, step, mx.get_active_memory() - before)


def measure(bases: list[Base], batch: Batch, everything: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of every base, in turn, so that all meet the machine in the same states."""
    for trial in range(options.warmup + options.trials):
        for base in bases:
            if trial == 0:
                base.seconds, base.peak_bytes = [], 0
            seconds = base.run(batch)
            base.first_step_seconds = base.first_step_seconds or time.perf_counter() - STARTED
            if trial >= options.warmup:
                base.seconds.append(seconds)
    medians = {base.name: float(np.median(base.seconds)) for base in bases}
    return [
        {
            "base": base.name,
            "seconds_median": medians[base.name],
            "seconds_spread": float(np.ptp(base.seconds)) / medians[base.name],
            "pairs_per_second": len(batch.rows) / medians[base.name],
            "against_plain": medians["plain"] / medians[base.name] if "plain" in medians else None,
            "against_packed": medians["packed"] / medians[base.name] if "packed" in medians else None,
            "peak_memory_bytes": base.peak_bytes - (everything - base.own_bytes),
            "first_step_seconds": base.first_step_seconds,
        }
        for base in bases
    ]


def parse() -> argparse.Namespace:
    parser = bench.parser_of(__doc__)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--mode", default="affine", choices=["affine", "mxfp4", "nvfp4", "mxfp8"])
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES)
    return bench.parsed(parser)


if __name__ == "__main__":
    sys.exit(main())
