"""Times one training step (forward, backward, update) on synthetic pairs, in whole rows and with shared prompts, in turn.

    python benchmarks/step.py                      a small model, on this machine's default device
    python benchmarks/step.py --quick              less than a minute
    python benchmarks/step.py --hidden 2048 --layers 16 --heads 32 --kv-heads 8 --mlp 8192 --vocabulary 128256 --tied \\
        --dtype bfloat16 --batch-sizes 8 16 32 --lengths 512+512 896+128      a Llama of a billion parameters, on a GPU

Every linear layer of every block has an adapter (--rank); the weights are drawn at random. --ragged draws lengths
between half and all of those given. The last line is JSON: one row for each layout, length and batch size.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

import mlx.core as mx
import numpy as np

from lib.config import load
from lib.config.settings import Config
from lib.data.batch import Batch, collate
from lib.data.dataset import Example
from lib.distributed.world import World
from lib.model import adapters, stream_trial, token_stream
from lib.model import load as load_module
from lib.system import hardware
from lib.training.optimizers import make_optimizer
from lib.training.step import Step


def main() -> int:
    options = parse()
    settings = settings_of(options)
    model = load_module.load(settings.model, options.seed)
    adapters.make_trainable(model, settings.model, options.seed)
    step = Step(model, make_optimizer(settings.train), settings.train, World())
    multiple = options.multiple or token_stream.length_multiple(settings.data)
    layouts = {"whole": False} if stream_trial.cannot_share_prompts(model) else {"whole": False, "shared": True}
    layouts = {name: shared for name, shared in layouts.items() if name in options.layouts}
    print(
        f"{hardware.device_name()}, {options.dtype}, {options.method} of rank {options.rank}, lengths in multiples of {multiple}"
    )
    print(
        f"{'prompt+completion':>18} {'batch':>6} {'layout':>7} {'tokens':>8} {'padding':>8} {'s/step':>8} {'spread':>7} {'pairs/s':>8} {'tokens/s':>9} {'GiB':>6}"
    )
    rows = []
    for lengths in options.lengths:
        prompt, completion = (int(n) for n in lengths.split("+"))
        for batch_size in options.batch_sizes:
            pairs = draw(prompt, completion, batch_size, options)
            batches = {name: collate(pairs, multiple, shared) for name, shared in layouts.items()}
            for row in measure(step, batches, options):
                row = {"prompt": prompt, "completion": completion, "batch_size": batch_size, **row}
                rows.append(row)
                print(
                    f"{lengths:>18} {batch_size:>6} {row['layout']:>7} {row['computed_tokens']:>8} {row['padding']:>8.1%} {row['seconds_median']:>8.4f} "
                    f"{row['seconds_spread']:>7.1%} {row['pairs_per_second']:>8.2f} {row['tokens_per_second']:>9.0f} {row['peak_memory_bytes'] / 2**30:>6.1f}"
                    if "seconds_median" in row
                    else f"{lengths:>18} {batch_size:>6} {row['layout']:>7} {row['error']}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "step", "device": hardware.device_name(), "settings": vars(options), "rows": rows}))
    return 0


def settings_of(options: argparse.Namespace) -> Config:
    return load.load(
        None,
        [
            *("data.train=-", "model.random_init=true", f"model.rank={options.rank}", f"model.method={options.method}"),
            f"model.path={model_folder(options)}",
            f"model.dtype={options.dtype}",
            f"model.gradient_checkpointing={options.checkpoint}",
            f"train.compile={options.compile}",
        ],
    )


def measure(step: Any, batches: dict[str, Batch], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every layout's step, in turn, so that all meet the machine in the same states."""
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    peaks, errors = dict.fromkeys(batches, 0), {}
    for trial in range(options.warmup + options.trials):
        for name, batch in batches.items():
            if name in errors:
                continue
            reference = np.full((len(batch.rows), 2), -10.0, np.float32)
            mx.synchronize()
            started = time.perf_counter()
            try:
                result = step(0, 1e-4, [(batch, reference)])
                mx.synchronize()
            except RuntimeError as error:  # out of memory
                errors[name] = str(error).splitlines()[0][:100]
                continue
            if trial >= options.warmup:
                seconds[name].append(time.perf_counter() - started)
            peaks[name] = max(peaks[name], result.figures["peak_memory_bytes"])
    rows = []
    for name, batch in batches.items():
        row: dict[str, Any] = {
            "layout": name,
            "computed_tokens": batch.computed_tokens,
            "padding": 1 - batch.real_tokens / batch.computed_tokens,
        }
        if name in errors:
            rows.append(row | {"error": errors[name]})
            continue
        median = float(np.median(seconds[name]))
        row |= {
            "seconds_median": median,
            "seconds_spread": float(np.ptp(seconds[name])) / median,
            "peak_memory_bytes": peaks[name],
        }
        rows.append(
            row | {"pairs_per_second": len(batch.rows) / median, "tokens_per_second": batch.real_tokens / median}
        )
    return rows


def draw(prompt: int, completion: int, batch_size: int, options: argparse.Namespace) -> list[Example]:
    random = np.random.default_rng(options.seed)

    def ids(length: int) -> np.ndarray:
        shortest = length // 2 if options.ragged else length
        return random.integers(0, options.vocabulary, random.integers(shortest, length + 1)).astype(np.int32)

    return [Example(row, ids(prompt), (ids(completion), ids(completion))) for row in range(batch_size)]


def model_folder(options: argparse.Namespace) -> Path:
    """A Llama's config.json in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="step-"))
    shape = {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads or options.heads,
        "intermediate_size": options.mlp or 4 * options.hidden,
        "vocab_size": options.vocabulary,
        "tie_word_embeddings": options.tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def parse(description: str | None = __doc__) -> argparse.Namespace:
    return parsed(parser_of(description))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--mlp", type=int, help="width of the MLP; by default 4 x hidden")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--method", default="lora", choices=["lora", "dora", "full"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lengths", nargs="+", default=["128+128", "192+64"], metavar="PROMPT+COMPLETION")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4])
    parser.add_argument("--layouts", nargs="+", default=["whole", "shared"], choices=["whole", "shared"])
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--multiple", type=int, help="pad lengths to this; by default as in training")
    parser.add_argument("--compile", default="null", choices=["null", "true", "false"])
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.quick:
        options.warmup, options.trials = 1, 3
    return options


if __name__ == "__main__":
    sys.exit(main())
