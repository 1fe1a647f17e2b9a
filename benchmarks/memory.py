"""The memory model (lib/plan/memory.py) against measured peaks of real steps, on this machine.

    python benchmarks/memory.py                                      small models, every method: two minutes on two cores
    python benchmarks/memory.py --quick                              one model
    python benchmarks/memory.py --optimizers                         the same models with every optimizer: three minutes
    python benchmarks/memory.py --models 1B 8B --seed 0              Llama's shapes in bfloat16, for a GPU: two minutes
    python benchmarks/memory.py --models 0.5B 3B 7B                  other lengths, methods and shapes: four minutes

Weights are drawn at random; nothing is downloaded and no tokenizer is needed. A row is a model, a method, lengths and a micro-batch;
`measured` is `mx.get_peak_memory` of the steps after the first one, which is of arrays in use: neither MLX's cache nor the program.
Planned has to lie between 0.95 and 1.15 of it; the exit status says so. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib.system import mpi_and_blas  # noqa: E402

mpi_and_blas.prepare()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from lib.config import load  # noqa: E402
from lib.config.schema import Config, TrainSettings  # noqa: E402
from lib.data.collate import collate  # noqa: E402
from lib.data.dataset import Example  # noqa: E402
from lib.distributed.world import World  # noqa: E402
from lib.model import (
    adapters,  # noqa: E402
    partition,  # noqa: E402
    token_stream,  # noqa: E402
)
from lib.model import load as load_module  # noqa: E402
from lib.plan import (
    memory,  # noqa: E402
    memory_trace,  # noqa: E402
)
from lib.system import (
    hardware,  # noqa: E402
)
from lib.training.optimizers import make_optimizer
from lib.training.step import Step  # noqa: E402

LEAST, MOST = 0.95, 1.15  # of measured


def llama(
    hidden: int, blocks: int, heads: int, kv_heads: int, columns: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """A config.json."""
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": columns,
    }
    common = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    return {**common, **sizes, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, **more}


MODELS = {
    "wide MLP": llama(256, 8, 4, 2, 768, 512),
    "many heads": llama(384, 6, 12, 6, 512, 2048),
    "large head": llama(256, 2, 4, 4, 768, 16384, tie_word_embeddings=True),
    "0.5B": llama(896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),  # Qwen 2.5's widths
    "1B": llama(2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "3B": llama(3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "3B, a key for each query": llama(2560, 32, 32, 32, 6912, 32000),
    "7B": llama(3584, 28, 28, 4, 18944, 152064),  # Qwen 2.5's
    "8B": llama(4096, 32, 32, 8, 14336, 128256),
}
SMALL = ("wide MLP", "many heads", "large head")
OTHERS = ("0.5B", "3B", "3B, a key for each query", "7B")
OPTIMIZERS = get_args(TrainSettings.model_fields["optimizer"].annotation)


@dataclass(frozen=True)
class Case:
    model: str
    method: str = "lora"
    dtype: str = "bfloat16"
    bits: int | None = None
    checkpointing: bool = False
    prompt: int = 512
    completion: int = 512
    pairs: int = 4
    words: tuple[str, ...] = ()  # further settings


def cases_of(name: str) -> list[Case]:
    """What is measured of a model."""
    if name == "8B":
        plain = [Case(name, pairs=2), Case(name, pairs=4, prompt=896, completion=128), Case(name, bits=4, pairs=4)]
        again = [Case(name, checkpointing=True, pairs=8), Case(name, bits=4, checkpointing=True, pairs=8)]
        return [*plain, Case(name, method="dora", pairs=1), *again]
    if name == "1B":
        plain = [Case(name, pairs=8), Case(name, pairs=16), Case(name, pairs=16, prompt=896, completion=128)]
        plain += [Case(name, pairs=1, prompt=n, completion=n) for n in (4096, 8192)]
        others = [Case(name, bits=4, pairs=8), Case(name, method="dora", pairs=4), Case(name, method="full", pairs=2)]
        again = [Case(name, method=m, checkpointing=True, pairs=8) for m in ("lora", "dora", "full")]
        return [*plain, *others, *again, Case(name, bits=4, checkpointing=True, pairs=16)]
    if name in OTHERS:
        rows = [
            Case(name, prompt=n, completion=m, pairs=k) for n, m, k in ((300, 700, 3), (2048, 256, 1), (128, 128, 6))
        ]
        rows += [Case(name, pairs=3, words=("model.rank=64",)), Case(name, pairs=4, words=("model.blocks=8",))]
        rows += [Case(name, prompt=256, completion=384, pairs=5, bits=8)]
        rows += [Case(name, prompt=700, completion=200, pairs=7, checkpointing=True)]
        rows += [Case(name, "dora", bits=4, pairs=k, checkpointing=k > 2) for k in (2, 4)]
        if name in ("0.5B", "3B"):
            rows += [Case(name, "full", pairs=2), Case(name, "full", pairs=4, checkpointing=True)]
            rows += [Case(name, "full", pairs=1, words=("model.blocks=4",))]
        return rows
    kinds: list[dict[str, Any]] = [{"method": "lora"}, {"method": "dora"}, {"method": "full"}, {"bits": 4}]
    kinds = [kind | {"checkpointing": on} for kind in kinds for on in (False, True)]
    # A CPU is slow at what is not float32.
    rows = [Case(name, dtype="float32", prompt=128, completion=128, pairs=1 if "bits" in k else 4, **k) for k in kinds]
    rows += [Case(name, prompt=128, completion=128, checkpointing=on, pairs=1) for on in (False, True)]
    for prompt, completion, pairs in ((448, 64, 1), (64, 256, 2), (32, 32, 8)):
        more = {"dtype": "float32", "prompt": prompt, "completion": completion, "pairs": pairs}
        rows += [Case(name, **more, checkpointing=on) for on in (False, True)]
    return rows


def cases_of_optimizers(name: str) -> list[Case]:
    """Every optimizer: full training of one short pair, where the update is the largest moment, of longer ones, and LoRA."""
    cases = []
    for optimizer in OPTIMIZERS:
        short = Case(
            name, "full", "float32", prompt=32, completion=32, pairs=1, words=(f"train.optimizer={optimizer}",)
        )
        cases += [short, replace(short, prompt=128, completion=128, pairs=4), replace(short, method="lora")]
    return cases


def settings_of(case: Case, folder: str = "-", seed: int = 0) -> Config:
    """The settings of a run of it."""
    words = [f"model.path={folder}", f"model.dtype={case.dtype}", f"model.method={case.method}", f"train.seed={seed}"]
    words += ["data.train=-", "model.random_init=true", f"model.gradient_checkpointing={case.checkpointing}"]
    return load.load(None, [*words, *case.words])


def measured(case: Case, seed: int, steps: int) -> dict[str, Any]:
    """One row: planned and measured bytes."""
    others, row, after = _held_bytes(), _measured(case, seed, steps), _held_bytes()
    if abs(others - after) > 0.01 * row["peak"]:  # what earlier tests of this process held was given back meanwhile
        others, row, after = after, _measured(case, seed, steps), _held_bytes()
    peak = row.pop("peak") - others
    ratio = row["planned_bytes"] / peak
    return {**row, "others_bytes": (others, after), "measured_bytes": peak, "ratio": ratio}


def _held_bytes() -> int:
    """What this process holds of whatever else runs in it."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def _measured(case: Case, seed: int, steps: int) -> dict[str, Any]:
    stored = MODELS[case.model]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(stored))
        settings = settings_of(case, folder, seed)
        model = load_module.load(settings.model, seed)
    if case.bits:
        nn.quantize(model, 64, case.bits)
        mx.eval(model.parameters())
    adapters.make_trainable(model, settings.model, seed)
    assert token_stream.cannot_share_prompts(model) is None
    step = Step(model, make_optimizer(settings.train), settings.train, World())
    rng = np.random.default_rng(seed)

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, stored["vocab_size"], length, dtype=np.int32)

    # The last token of a completion is never an input.
    lengths = case.prompt, case.completion + 1
    pairs = [Example(i, ids(lengths[0]), (ids(lengths[1]), ids(lengths[1]))) for i in range(case.pairs)]
    multiple = token_stream.length_multiple(settings.data)
    batch = collate(pairs, multiple, True)
    reference = np.full((case.pairs, 2), -10.0, np.float32)
    peaks = []
    for index in range(1 + steps):
        peak = step(index, 10, [(batch, reference)]).peak_memory_bytes
        mx.synchronize()
        peaks.append(max(peak, mx.get_peak_memory()))
    planned = planned_bytes(case, stored, multiple)
    return {**asdict(case), "planned_bytes": planned.total, "parts": asdict(planned), "peak": max(peaks[1:])}


def planned_bytes(case: Case, stored: dict[str, Any], multiple: int) -> memory.StepBytes:
    """By arithmetic."""
    quantised = {"quantization": {"group_size": 64, "bits": case.bits}} if case.bits else {}
    shape = partition.model_shape_of({**stored, **quantised}, case.dtype)
    training = memory_trace.Training.of(settings_of(case), shape.blocks, True)
    seen, scored = case.prompt + case.completion, 2 * (case.completion + 1)
    rows = memory.Rows(case.prompt, seen, case.prompt + 2 * case.completion, scored, length_multiple=multiple)
    return memory.MemoryModel(shape, training, rows).bytes(case.pairs, hardware.mlx_device()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=SMALL)
    parser.add_argument("--optimizers", action="store_true", help="rows of every optimizer instead, in float32")
    parser.add_argument("--quick", action="store_true", help="the first model, in float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2, help="measured ones, after the first")
    options = parser.parse_args()
    names = options.models[: 1 if options.quick else None]
    table = Table(title=f"{hardware.device_name()}, MB")
    for column in ("model", "method", "type", "checkpointing", "lengths", "pairs", "planned", "measured", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "method", "type") else "right")
    rows = []
    cases = cases_of_optimizers if options.optimizers else cases_of
    for case in (case for name in names for case in cases(name)):
        try:
            row = measured(case, options.seed, options.steps)
        except RuntimeError as error:  # out of memory
            rows.append({**asdict(case), "error": str(error).splitlines()[0], "ratio": 0.0})
            print(f"{case}: {error}", file=sys.stderr)
            continue
        rows.append(row)
        kind = " ".join([*([f"{case.bits}-bit"] if case.bits else []), case.method, *case.words])
        kind = kind.replace("train.optimizer=", "")
        figures = [f"{row[name] / 1e6:.1f}" for name in ("planned_bytes", "measured_bytes")]
        lengths = f"{case.prompt}+{case.completion}"
        cells = [case.model, kind, case.dtype, "on" if case.checkpointing else "", lengths, str(case.pairs), *figures]
        table.add_row(*cells, f"{row['ratio']:.3f}")
        print(" ".join(cells), f"{row['ratio']:.3f}", file=sys.stderr, flush=True)
    outside = [row for row in rows if not LEAST <= row["ratio"] <= MOST]
    Console(width=130).print(table)
    verdict = f"{len(rows) - len(outside)} of {len(rows)} rows between {LEAST} and {MOST} of what was measured"
    print(verdict)
    print(json.dumps({"device": hardware.device_name(), "rows": rows, "outside": len(outside)}))
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
