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
from lib.evaluate.sample import Prompt, Sampler  # noqa: E402
from lib.model import adapters, load  # noqa: E402

MODELS = {
    "small": dense(256, 4, 8, 768, 4096, head_dim=32),
    "1B": dense(2048, 16, 32, 8192, 128256, head_dim=64),
    "8B": dense(4096, 32, 32, 14336, 128256),
}


@dataclass(frozen=True)
class Settings:
    """As lib/evaluate/sample.py takes them."""

    samples: int
    max_tokens: int
    batch_size: int
    top_p: float
    temperature: float = 1.0
    stop: tuple[str, ...] = ()


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
    settings = Settings(
        options.samples, options.tokens, options.batch_size or options.prompts * options.samples, options.top_p
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(stored))
        dtype = "bfloat16" if mx.default_device() == mx.gpu else "float32"
        model = load.load(ModelSettings(path=folder, random_init=True, dtype=dtype), options.seed)
        if options.adapters:
            adapters.make_trainable(model, ModelSettings(path=folder, random_init=True, dtype=dtype), options.seed)
            mx.eval(model.parameters())
        model.eval()
        for lengths in options.lengths:
            ends = list(range(0, stored["vocab_size"], options.ends)) if lengths == "ragged" else []
            ways: dict[str, Callable[[], int]] = {
                "tandem": tandem(model, ends, prompts, settings),
                "mlx-lm": mlx_lm(model, ends, prompts, settings),
            }
            for name in options.ways or ways:
                rows.append({"lengths": lengths, "way": name, **timed(ways[name])})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
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
    add("--ways", nargs="+", default=None, help="only these rows")
    add("--adapters", action="store_true", help="with LoRA of rank 8 on every layer, not merged")
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
    seconds = time.perf_counter() - began
    peak = mx.get_peak_memory() / 1e9
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "first_seconds": first,
        "peak_gb": peak,
    }


def tandem(model: nn.Module, ends: list[int], prompts: list[list[int]], settings: Settings) -> Callable[[], int]:
    sampler = Sampler(model, EndTokens(ends), settings)  # type: ignore[arg-type]
    asked = [Prompt(i, tokens) for i, tokens in enumerate(prompts)]
    return lambda: sum(len(sample.tokens) for sample in sampler.sample(asked, (0,)))


def mlx_lm(model: nn.Module, ends: list[int], prompts: list[list[int]], settings: Settings) -> Callable[[], int]:
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
                response.logprobs[response.token]  # what GRPO needs; evaluated by nobody
            count += len(responses)
        generator.close()
        return count

    return run


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    what = f"{options.model}, {options.prompts} prompts of {options.prompt} tokens x {options.samples} samples of {options.tokens}"
    table = Table(title=f"generated tokens/s: {what}{', adapters' * options.adapters}")
    for column in ("lengths", "way", "tokens/s", "tokens", "seconds", "first time", "peak GB"):
        table.add_column(column, justify="left" if column in ("lengths", "way") else "right")
    for row in rows:
        figures = (
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['first_seconds']:.2f}",
        )
        table.add_row(row["lengths"], row["way"], *figures, f"{row['peak_gb']:.2f}")
    console = Console(width=120)
    console.print(table)


if __name__ == "__main__":
    main()
