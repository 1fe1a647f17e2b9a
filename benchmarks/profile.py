"""Where a training step's time goes: each kind of work at the step's own shapes, and what is outside of the device.

    python benchmarks/profile.py                    a small model, on this machine's default device
    python benchmarks/profile.py --quick            less than a minute
    python benchmarks/profile.py --hidden 2048 --layers 16 --heads 32 --kv-heads 8 --mlp 8192 --vocabulary 128256 --tied \\
        --dtype bfloat16 --batch-sizes 16 --lengths 512+512 896+128 --layouts shared      a Llama of a billion parameters

The model, the pairs and the options are those of benchmarks/step.py. Every component runs forward and backward alone, as
often as the step has it, compiled where the step is; launches that follow each other without waiting are timed, so that
a row has the device's time and not the way there. The device's share of a step is timed in the same manner, as what one
more micro-batch and one more update add. `outside` is what a step of the training loop (batches made ahead by a thread,
the step, its record) takes beyond that. On a CPU the thread's work is on the same cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lib.system import mpi_and_blas

mpi_and_blas.prepare()

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from benchmarks import step as bench
from lib.config import schema
from lib.data.collate import Batch, collate
from lib.data.dataset import Example
from lib.data.prefetch import prefetch
from lib.distributed.world import World
from lib.model import adapters, load, logps, lora, token_stream
from lib.system import provenance
from lib.telemetry.run_records import PerformanceTracker
from lib.training.compiled_pass import is_compiled
from lib.training.step import make_optimizer, make_step

MORE = 3  # launches, beside one, whose time is divided

Work = Callable[[], Any]  # ➜ arrays, not evaluated yet


def main() -> int:
    options = bench.parse(__doc__)
    settings = bench.settings_of(options)
    model = load.load(settings.model, options.seed)
    adapters.make_trainable(model, settings.model, options.seed)
    multiple = options.multiple or token_stream.length_multiple(settings.data)
    if (why_not := token_stream.cannot_share_prompts(model)) is not None:
        sys.exit(f"the model's attention cannot be timed alone: {why_not}")
    print(f"{provenance.device_name()}, {options.dtype}, {options.method} of rank {options.rank}")
    profiles = []
    for lengths in options.lengths:
        prompt, completion = (int(n) for n in lengths.split("+"))
        for batch_size in options.batch_sizes:
            pairs = bench.draw(prompt, completion, batch_size, options)
            for layout in options.layouts:
                profile = profile_step(model, settings, pairs, multiple, layout == "shared", options)
                profile = {
                    "prompt": prompt,
                    "completion": completion,
                    "batch_size": batch_size,
                    "layout": layout,
                } | profile
                show(profile)
                profiles.append(profile)
    facts = {"benchmark": "profile", "device": provenance.device_name(), "settings": vars(options)}
    print(json.dumps(facts | {"profiles": profiles}))
    return 0


def profile_step(
    model: nn.Module,
    settings: schema.Config,
    pairs: list[Example],
    multiple: int,
    shared: bool,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The loop's step, the device's part of it, and every component."""
    batch = collate(pairs, multiple, shared)
    compiled = is_compiled(settings.train, World())
    optimizer = make_optimizer(settings.train)
    step = make_step(model, optimizer, settings.train, World(), dropout=False)
    reference = np.full((len(pairs), 2), -10.0, np.float32)
    trials = options.trials

    def steps(micro_batches: int) -> float:
        mx.synchronize()
        started = time.perf_counter()
        step(0, 10**6, [(batch, reference)] * micro_batches)
        mx.synchronize()
        return time.perf_counter() - started

    with training_loop(step, pairs, multiple, shared, reference) as looped:
        for _ in range(max(1, options.warmup)):
            steps(1 + MORE), looped()
        turns = [(steps(1), steps(1 + MORE), looped()) for _ in range(trials)]
    one, several, loop = np.median(turns, axis=0).tolist()
    marginal = (several - one) / MORE
    update = seconds_of(update_work(model, settings), trials, compiled=False)
    model.train()
    rows = []
    for name, works in components(model, batch, options).items():
        rows.append({"component": name, "seconds": sum(n * seconds_of(work, trials, compiled) for n, work in works)})
    rows[1]["seconds"] = max(0.0, rows[1]["seconds"] - rows[0]["seconds"])  # adapted layers, less their frozen products
    rows.append({"component": "update", "seconds": update})
    device = marginal + update
    rest = device - sum(row["seconds"] for row in rows)
    rows.append({"component": "other work on the device", "seconds": rest})
    rows.append({"component": "outside of the device", "seconds": loop - device})
    for row in rows:
        row["share"] = row["seconds"] / loop
    flops = (
        4
        * batch.computed_tokens
        * sum(linear.weight.size for _, linear in linears_of(model.layers[0]))
        * len(model.layers)
    )
    return {
        "tokens": batch.computed_tokens,
        "step_seconds": loop,
        "device_seconds": device,
        "outside_share": (loop - device) / loop,
        "pairs_per_second": len(pairs) / loop,
        "frozen_flops_per_second": flops / max(rows[0]["seconds"], 1e-9),
        "rows": rows,
    }


@contextlib.contextmanager
def training_loop(
    step: Any, pairs: list[Example], multiple: int, shared: bool, reference: np.ndarray
) -> Iterator[Callable[[], float]]:
    """Seconds of a step of the training loop, whenever asked: batches are made ahead in a thread, each step is recorded."""

    def batches() -> Iterator[tuple[Batch, np.ndarray]]:
        while True:
            yield collate(pairs, multiple, shared), reference

    rows = [example.row for example in pairs]
    with tempfile.TemporaryDirectory() as folder:
        tracker, upcoming = PerformanceTracker(Path(folder) / "log.jsonl"), prefetch(batches(), 2)

        def once() -> float:
            started = time.perf_counter()
            result = step(0, 10**6, [next(upcoming)])
            tracker.log_batch(1, len(rows), result.seconds, **result.means, **result.measurements(), epoch=0, rows=rows)
            return time.perf_counter() - started

        # A step leaves its update to the device and the next begins: the second of two is as any of many.
        yield lambda: (once(), once())[1]
        upcoming.close()
        tracker.close()


def seconds_of(work: Work, trials: int, compiled: bool) -> float:
    """What one more launch of some work takes the device, where launches need not wait for each other."""
    launch = mx.compile(work) if compiled else work

    def several(count: int) -> float:
        mx.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            mx.async_eval(launch())
        mx.synchronize()
        return time.perf_counter() - started

    several(1)
    return max(0.0, float(np.median([several(1 + MORE) - several(1) for _ in range(trials)])) / MORE)


def components(model: nn.Module, batch: Batch, options: argparse.Namespace) -> dict[str, list[tuple[int, Work]]]:
    """The step's work by kind: how often a step has it, and one of it, forward and backward. The first two overlap."""
    block, layers, tokens = model.layers[0], len(model.layers), batch.computed_tokens
    inputs = token_stream.arrays_of(batch.inputs)
    dtype, heads, kv_heads = getattr(mx, options.dtype), options.heads, options.kv_heads or options.heads
    head_dim, wide = options.hidden // heads, options.mlp or 4 * options.hidden

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    frozen, adapted = [], []
    for group in siblings_of(block):
        x, ys = drawn(tokens, options.hidden if group[0][1].weight.shape[1] == options.hidden else wide), []
        ys = [drawn(tokens, plain.weight.shape[0]) for _, plain in group]
        frozen.append((layers, backward(lambda x, group=group: [plain(x) for _, plain in group], [x], ys)))
        adapted.append((layers, with_parameters([layer for layer, _ in group], x, ys)))
    q, k, v = (
        drawn(tokens, heads, 1, head_dim),
        drawn(tokens, kv_heads, 1, head_dim),
        drawn(tokens, kv_heads, 1, head_dim),
    )
    rows, completions, _ = inputs["mask"].shape
    parts = inputs["prefix_length"], inputs.get("suffix_indices"), inputs.get("suffix_uses")
    stream = token_stream.Stream(inputs["offsets"], rows, completions, *parts)
    scale = head_dim**-0.5
    if parts[0] or parts[1] is not None:
        attention = backward(lambda *qkv: [stream.attend(*qkv, scale=scale, mask=None)], [q, k, v], [q])
    else:
        whole = [x.reshape(rows * completions, -1, x.shape[1], head_dim).swapaxes(1, 2) for x in (q, k, v)]
        attention = backward(lambda *qkv: [token_stream.local_attention(*qkv, None, scale=scale)], whole, [whole[0]])
    swiglu = sys.modules[type(block.mlp).__module__].swiglu  # as make_trainable has put it there
    rope, offsets = block.self_attn.rope, inputs["offsets"]
    hidden, gate = drawn(tokens, options.hidden), drawn(tokens, wide)
    scored = drawn(len(batch.targets), options.hidden)
    return {
        "frozen products": frozen,
        "low-rank products": adapted,
        "attention": [(layers, attention)],
        "norms": [(2 * layers + 1, backward(lambda x: [block.input_layernorm(x)], [hidden], [hidden]))],
        "rotary": [(layers, backward(lambda q, k: [rope(q, offset=offsets), rope(k, offset=offsets)], [q, k], [q, k]))],
        "SwiGLU": [(layers, backward(lambda g, x: [swiglu(g, x)], [gate, gate], [gate]))],
        "head and loss": [
            (
                1,
                backward(
                    lambda h: [logps.token_logps(model, h, inputs["targets"])],
                    [scored],
                    [mx.ones(len(batch.targets))],
                ),
            )
        ],
    }


def backward(function: Callable[..., list[mx.array]], primals: list[mx.array], cotangents: list[mx.array]) -> Work:
    """A function's values and gradients."""
    mx.eval(primals, cotangents)
    return lambda: mx.vjp(function, primals, cotangents)


def with_parameters(layers: Sequence[nn.Module], x: mx.array, cotangents: list[mx.array]) -> Work:
    """Layers' outputs for one input, and the gradients of it and of what is trained of them."""
    names = [[name for name, _ in tree_flatten(layer.trainable_parameters())] for layer in layers]
    values = [value for layer in layers for _, value in tree_flatten(layer.trainable_parameters())]

    def put(values: Sequence[mx.array]) -> None:
        left = iter(values)
        for layer, own in zip(layers, names, strict=True):
            layer.update(tree_unflatten([(name, next(left)) for name in own]))

    def function(x: mx.array, *values: mx.array) -> list[mx.array]:
        before = [value for layer in layers for _, value in tree_flatten(layer.trainable_parameters())]
        put(values)
        try:
            return [layer(x) for layer in layers]
        finally:
            put(before)

    return backward(function, [x, *values], cotangents)


def linears_of(block: nn.Module) -> list[tuple[nn.Module, nn.Linear]]:
    """A block's linear layers, as they are and without their adapters."""
    leaves = [module for module in block.modules() if isinstance(module, nn.Linear)]
    owners = {id(module["linear"]): module for module in block.modules() if isinstance(module.get("linear"), nn.Linear)}
    return [(owners.get(id(leaf), leaf), leaf) for leaf in leaves]


def siblings_of(block: nn.Module) -> list[list[tuple[nn.Module, nn.Linear]]]:
    """Linear layers by the input that they share."""
    left, groups = {id(layer): (layer, plain) for layer, plain in linears_of(block)}, []
    for parent in block.modules():
        for names in lora.SIBLINGS:
            group = [left.pop(id(parent[name])) for name in names if id(parent.get(name)) in left]
            groups += [group] if group else []
    return groups + [[pair] for pair in left.values()]


def update_work(model: nn.Module, settings: schema.Config) -> Work:
    """The division by the count, the norm and the optimizer's update, of gradients as large as the trained parameters."""
    optimizer = make_optimizer(settings.train)
    parameters = model.trainable_parameters()
    optimizer.init(parameters)
    gradients = tree_unflatten([(n, mx.random.normal(p.shape)) for n, p in tree_flatten(parameters)])
    mx.eval(gradients, optimizer.state)
    state = [optimizer.state]

    def update() -> Any:
        mean = {name: g / 8.0 for name, g in tree_flatten(gradients)}
        norm = mx.sqrt(sum(mx.square(g).sum() for g in mean.values()))
        factor = mx.minimum(1.0 / (norm + 1e-6), 1.0)
        return optimizer.apply_gradients(tree_unflatten([(n, g * factor) for n, g in mean.items()]), parameters)

    return mx.compile(update, inputs=state, outputs=state) if is_compiled(settings.train, World()) else update


def show(profile: dict[str, Any]) -> None:
    print(
        f"\nprompt {profile['prompt']}, completion {profile['completion']}, batch {profile['batch_size']}, {profile['layout']}: "
        f"{profile['tokens']:,} tokens, {profile['step_seconds']:.4f} s a step, {profile['pairs_per_second']:.2f} pairs/s, "
        f"frozen products at {profile['frozen_flops_per_second'] / 1e12:.3g} TFLOP/s"
    )
    for row in profile["rows"]:
        print(f"  {row['component']:<26} {row['seconds'] * 1e3:>10.2f} ms {row['share']:>7.1%}")


if __name__ == "__main__":
    sys.exit(main())
