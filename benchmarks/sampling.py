"""Generated tokens/s: our sampler and mlx-lm's batch generator.

    python benchmarks/sampling.py                       64 prompts x 8 samples; the 1B shape on a GPU, a small one on a CPU
    python benchmarks/sampling.py --quick --seed 1      a tenth of it

Weights are random, prompts are of --prompt tokens, answers of --tokens at most, sampled at temperature 1. `even`: no answer ends
before; `ragged`: 1 of --ends tokens of the vocabulary ends an answer, so that lengths fall off as real ones do. Every way
samples once to warm up and then again, which is timed; tokens are those of the answers, without what was drawn behind their
end. mlx-lm's batch generator has the same batch size. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.gpus import dense  # noqa: E402
from lib.config.settings import ModelSettings  # noqa: E402
from lib.evaluate.sampler import GreedySampling, Prompt, Sampler  # noqa: E402
from lib.model import load  # noqa: E402

MODELS = {
    "small": dense(256, 4, 8, 768, 4096, head_dim=32),
    "1B": dense(2048, 16, 32, 8192, 128256, head_dim=64),
    "8B": dense(4096, 32, 32, 14336, 128256),
}


@dataclass(frozen=True)
class EndTokens:
    """A tokenizer of which only the end tokens matter."""

    eos_token_ids: list[int]

    def decode(self, ids: list[int]) -> str:
        return ""


def main() -> None:
    options = parse()
    rng = np.random.default_rng(options.seed)
    stored = MODELS[options.model] | {"rms_norm_eps": 1e-5}
    prompts = rng.integers(0, stored["vocab_size"], (options.prompts, options.prompt)).tolist()
    size = options.batch_size or options.prompts * options.samples
    settings = GreedySampling(options.tokens, options.samples, 1.0, options.top_p, batch_size=size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(stored))
        dtype = "bfloat16" if mx.default_device() == mx.gpu else "float32"
        model = load.load(ModelSettings(path=folder, random_init=True, dtype=dtype), options.seed)
        model.eval()
        for lengths in options.lengths:
            ends = list(range(0, stored["vocab_size"], options.ends)) if lengths == "ragged" else []
            ways: dict[str, Callable[[], int]] = {
                "tandem": tandem(model, ends, prompts, settings),
                "mlx-lm": mlx_lm(model, ends, prompts, settings),
            }
            for name in ways:
                rows.append({"lengths": lengths, "way": name, **timed(ways[name])})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    show(rows, options)
    print(json.dumps({"settings": vars(options), "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, on_gpu = parser.add_argument, mx.default_device() == mx.gpu
    add("--model", choices=MODELS, default="1B" if on_gpu else "small")
    add("--prompts", type=int, default=64)
    add("--samples", type=int, default=8)
    add("--prompt", type=int, default=512 if on_gpu else 64, help="tokens of a prompt")
    add("--tokens", type=int, default=256 if on_gpu else 48, help="most tokens of an answer")
    add("--batch-size", type=int, default=None, help="answers at the same time; by default all")
    add("--ends", type=int, default=128, help="of ragged lengths: 1 of so many tokens ends an answer")
    add("--top-p", type=float, default=1.0)
    add("--lengths", nargs="+", choices=["even", "ragged"], default=["even", "ragged"])
    add("--seed", type=int, default=0)
    add("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.lengths = -(-options.prompts // 8), -(-options.tokens // 2), ["even"]
    return options


def timed(way: Callable[[], int]) -> dict[str, float]:
    began = time.perf_counter()
    way()
    first, began = time.perf_counter() - began, time.perf_counter()
    mx.reset_peak_memory()
    tokens = way()
    seconds, peak = time.perf_counter() - began, mx.get_peak_memory() / 1e9
    rate = {"tokens_per_second": tokens / seconds, "tokens": tokens}
    return {**rate, "seconds": seconds, "first_seconds": first, "peak_gb": peak}


def tandem(model: nn.Module, ends: list[int], prompts: list[list[int]], settings: GreedySampling) -> Callable[[], int]:
    sampler = Sampler(model, EndTokens(ends), settings)  # type: ignore[arg-type]
    asked = [Prompt(i, tokens) for i, tokens in enumerate(prompts)]
    return lambda: sum(len(sample.tokens) for sample in sampler.sample(asked, (0,)))


def mlx_lm(model: nn.Module, ends: list[int], prompts: list[list[int]], settings: GreedySampling) -> Callable[[], int]:
    def run() -> int:
        generator = BatchGenerator(
            model,
            stop_tokens=[[token] for token in ends],
            sampler=make_sampler(temp=settings.temperature, top_p=settings.top_p if settings.top_p < 1 else 0.0),
            completion_batch_size=settings.batch_size,
            prefill_batch_size=min(settings.batch_size, 64),
        )
        generator.insert(
            [prompt for prompt in prompts for _ in range(settings.samples)],
            [settings.max_tokens] * settings.samples * len(prompts),
        )
        count = 0
        while responses := generator.next_generated():
            for response in responses:
                response.logprobs[response.token]  # what GRPO needs
            count += len(responses)
        generator.close()
        return count

    return run


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    what = f"{options.model}, {options.prompts} prompts of {options.prompt} tokens x {options.samples} samples of {options.tokens}"
    table = Table(title=f"generated tokens/s: {what}")
    for column in ("lengths", "way", "tokens/s", "tokens", "seconds", "first time", "peak GB"):
        table.add_column(column, justify="left" if column in ("lengths", "way") else "right")
    for row in rows:
        figures = [f"{row['tokens_per_second']:,.0f}", f"{row['tokens']:,}"]
        figures += [f"{row[name]:.2f}" for name in ("seconds", "first_seconds", "peak_gb")]
        table.add_row(row["lengths"], row["way"], *figures)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
