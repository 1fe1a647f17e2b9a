"""CUDA's kernels, compiled by several processes at once before the first step on a machine.

MLX compiles every fused kernel where it is first used, one after another, three seconds each: the fifty of a step took
an H200 more than two minutes. Their code depends on no size. So while the model is evaluated, each part of a
step runs in a process of its own, on a few blocks of such a model, and MLX keeps on the disk what it compiled
(MLX_PTX_CACHE_DIR). What none of them needed is compiled in the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from lib.config.settings import DataSettings, ModelSettings, TrainSettings
from lib.data.batch import Batch, collate_trained
from lib.data.batch_shapes import TraceCost
from lib.data.dataset import Dataset, Example
from lib.distributed.world import World
from lib.errors import UserError
from lib.model import adapters, load
from lib.model.layout import backbone_of, layout_of
from lib.model.quantised import device
from lib.model.stream_trial import stream_ways
from lib.model.token_stream import (
    Replaced,
    Stream,
    StreamInputs,
    arrays_of,
    hidden_states,
    length_multiple,
    scored_states,
)
from lib.system import model_folder
from lib.system.hardware import Device
from lib.training import losses
from lib.training.divided_world import is_compiled
from lib.training.losses import figures_of, loss_and_sums
from lib.training.optimizers import make_optimizer
from lib.training.step import Step, arrays_beside
from lib.training.unpaired_losses import UNPAIRED_LOSSES, needs_mismatched

# A part's process: its name is the argument, and its work comes on the standard input.
START = "from lib.system.mpi_and_blas import prepare; prepare(); from lib.training.cuda_kernels import main; main()"
ROOT = Path(__file__).resolve().parents[2]
BLOCKS, VOCABULARY, HEAD_SIZE = 2, 256, 64  # of the small model
BLOCK_PARTS = 3
BLOCK_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")
RAGGED = 4  # times as long as another row: micro-batches are ragged, as those of a run are
LARGEST_BYTES = 2**32  # of a part's weights: the model itself takes the device's memory meanwhile
LIMIT_SECONDS = 300.0  # of all parts together
POLL_SECONDS = 0.5  # between looks at what they have compiled
# Settings that no kernel's code depends on: sizes, and numbers that are handed to kernels as arrays.
NOT_IN_KERNELS = {
    *("seed", "steps", "epochs", "patience", "global_batch_size", "max_traces", "max_skipped_steps", "compile"),
    *("learning_rate", "final_learning_rate", "schedule", "warmup_steps"),
    *("learning_rate_scaling", "learning_rate_batch_size", "max_completion_length"),
}


@contextlib.contextmanager
def compiled(
    model: ModelSettings,
    train: TrainSettings,
    layout: DataSettings,
    data: object,
    world: World,
    hosts: Sequence[str],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Compiles what a step on this host's GPU needs while the block runs, if no run did that here. data: whose first
    rows have the form of all; nothing is compiled where they stream. The first rank of each of `hosts` compiles."""
    is_first = hosts.index(hosts[world.rank]) == world.rank
    folder = Path(os.environ.get("MLX_PTX_CACHE_DIR", Path(tempfile.gettempdir(), "mlx", mx.__version__, "ptx")))
    if not (device() == "cuda" and is_first and is_compiled(train, world) and isinstance(data, Dataset)):
        yield
        return
    done, parts = folder / f"tandem-{_digest(model, train)}", list[subprocess.Popen[bytes]]()
    publisher: threading.Thread | None = None
    with contextlib.ExitStack() as ending:
        try:
            if not done.exists():
                say("compiling CUDA kernels: about a minute, once for this machine, kind of model and loss")
                path = str(model_folder.resolve(model.path, model.revision).resolve())
                model = model.model_copy(update={"path": path, "revision": None})  # for any folder
                rows = data.examples(range(min(2, len(data))))
                folder.mkdir(parents=True, exist_ok=True)
                made = Path(ending.enter_context(tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True)))
                (made / "work").write_bytes(pickle.dumps((model, train, layout, rows)))
                shared = made / "kernels"  # what a part needs late another one has compiled
                shared.mkdir()
                for name in PARTS:
                    words, silent = [sys.executable, "-c", START, name], subprocess.DEVNULL
                    environment = os.environ | {"MLX_PTX_CACHE_DIR": str(shared)}
                    with (made / "work").open("rb") as work:  # not a pipe: rows may be long, and a full pipe waits
                        process = subprocess.Popen(
                            words, stdin=work, stdout=silent, stderr=silent, cwd=ROOT, env=environment
                        )
                    ending.callback(process.wait)
                    ending.callback(process.kill)
                    parts.append(process)
                publisher = threading.Thread(target=publish_meanwhile, args=(shared, folder, parts), daemon=True)
                publisher.start()
        except OSError as error:
            say(f"CUDA kernels are compiled in the first step: {error}; set MLX_PTX_CACHE_DIR to a folder of yours")
        yield
        if publisher is not None:
            publisher.join(LIMIT_SECONDS)
            with contextlib.suppress(OSError):
                done.touch()


def publish_meanwhile(shared: Path, folder: Path, parts: Sequence[subprocess.Popen[bytes]]) -> None:
    """Copies what parts have compiled to where all look for it, as long as one of them runs."""
    with contextlib.suppress(OSError):
        ended: list[int | None] = [None]
        while None in ended:
            ended = [part.poll() for part in parts]
            is_complete = all(status is not None and status >= 0 for status in ended)  # no signal cut a file short
            for source in shared.rglob("*.cu"):  # MLX writes it last, and looks for the .ptx first
                for file in (source.with_suffix(".txt"), source.with_suffix(".ptx")):
                    _publish(file, folder / file.relative_to(shared), is_complete)
            time.sleep(POLL_SECONDS)


def _publish(file: Path, target: Path, is_complete: bool) -> None:
    """Copies a file that no part has written to lately: two may compile the same kernel, one after the other."""
    written = file.stat().st_mtime
    if target.exists() or not (is_complete or time.time() - written > 2 * POLL_SECONDS):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copyfile(file, target.with_suffix(".copy"))
    if file.stat().st_mtime == written:
        copy.replace(target)


def _digest(model: ModelSettings, train: TrainSettings) -> str:
    """Of what the kernels' code may depend on: rates, sizes and names are none of it."""
    stored = _stored(model)
    kind = [mx.__version__, stored.get("model_type"), stored.get("quantization")]
    names = ("dtype", "method", "gradient_checkpointing", "scale", "dropout", "attention_window")
    kind += [*(getattr(model, name) for name in names), train.model_dump(mode="json", exclude=NOT_IN_KERNELS)]
    return hashlib.sha256(json.dumps(kind, default=str).encode()).hexdigest()[:16]


def _stored(model: ModelSettings) -> dict[str, Any]:
    file = model_folder.resolve(model.path, model.revision) / "config.json"
    return json.loads(file.read_text(encoding="utf-8"))


def small_model(settings: ModelSettings, seed: int) -> nn.Module:
    """A few blocks of such a model, of random weights and few tokens; quantised where it is; UserError if not small."""
    stored = _stored(settings)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_with_few_blocks(stored)), encoding="utf-8")
        drawn = {"path": folder, "random_init": True, "adapter": None, "blocks": None, "revision": None}
        dtype = settings.dtype or str(stored.get("torch_dtype") or stored.get("dtype") or "bfloat16")
        settings = settings.model_copy(update=drawn | {"dtype": dtype})
        model = load.load(settings, seed, lazy=True)
        if isinstance(form := stored.get("quantization"), dict):
            nn.quantize(model, form["group_size"], form["bits"], mode=form.get("mode", "affine"))
        adapters.make_trainable(model, settings, seed)
    if (taken := sum(weights.nbytes for _, weights in tree_flatten(model.parameters()))) > LARGEST_BYTES:
        raise UserError(f"{settings.path}: a few blocks of it take {taken:,} bytes")
    mx.eval(model.parameters())
    return model


def _with_few_blocks(stored: dict[str, Any]) -> dict[str, Any]:
    """A model's config.json, for less of it; models that also see pictures keep their sizes one level down, too."""
    count = max(BLOCKS, stored.get("full_attention_interval") or 0)  # of hybrids every so many blocks attend
    few = {name: count for name in BLOCK_COUNTS if name in stored or name == BLOCK_COUNTS[0]}
    text = stored.get("text_config")
    nested = {"text_config": _with_few_blocks(text)} if isinstance(text, dict) else {}
    return stored | few | {"vocab_size": VOCABULARY} | nested


def blocks(step: Step, batch: Batch, part: int) -> None:
    """Forward and backward through the blocks, in which tokens attend to themselves alone: `stream` has the rest. Of
    their kinds of modules (attention, a recurrence, an MLP) every third runs; the others give what they got."""
    model, attend = step.model, Stream.attend

    def attend_alone(stream: Stream, q: mx.array, k: mx.array, v: mx.array, scale: float, **_: object) -> mx.array:
        if stream.of_scored is not None:
            return stream.of_scored
        stream.mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale)
        return stream.mixed

    def past(x: mx.array, *args: object, **options: object) -> mx.array:
        for stream in (each for each in (*args, *options.values()) if isinstance(each, Stream)):
            stream.mixed = x
        return x

    run = nn.value_and_grad(model, lambda inputs: mx.square(scored_states(model, inputs).astype(mx.float32)).sum())
    with contextlib.ExitStack() as ending:
        ending.callback(setattr, Stream, "attend", attend)
        Stream.attend = attend_alone  # type: ignore[method-assign, assignment]
        children = [(block, *child) for block in model.layers for child in block.children().items()]
        kinds = {name: module for _, name, module in children if isinstance(module, nn.Module) and module.children()}
        for block, name, _ in children:
            if name in kinds and sorted(kinds).index(name) % BLOCK_PARTS != part:
                ending.enter_context(Replaced(block, name, past))
        mx.eval(mx.compile(run, inputs=[model.state, mx.random.state])(arrays_of(batch.inputs)))


def indexing(step: Step, batch: Batch) -> None:
    """What other parts, and greedy answers, take from arrays and add to them late."""
    dtype, places = hidden_states(step.model, arrays_of(batch.inputs)).dtype, mx.zeros((4,), mx.int32)
    mx.eval(mx.take(places, places), mx.take_along_axis(mx.zeros((4,)), places.astype(mx.uint32), axis=-1))
    for each in (mx.zeros((4, 4), dtype), mx.zeros((4, 4))):
        mx.eval(mx.vjp(lambda x: mx.take(x, places, axis=0), [each], [each])[1])


def stream(step: Step, batch: Batch) -> None:
    """Attention's way from a stream of tokens to rectangles and back."""
    inputs = arrays_of(batch.inputs)
    if not (batch.prefix_length or "suffix_indices" in inputs):
        return
    each = mx.zeros((len(batch.tokens), 1, 1, HEAD_SIZE), hidden_states(step.model, inputs).dtype)

    def attended(queries: mx.array, keys: mx.array, values: mx.array, inputs: StreamInputs) -> mx.array:
        return Stream(inputs).attend(queries, keys, values, 1.0, None).square().sum()

    mx.eval(mx.compile(mx.value_and_grad(attended, (0, 1, 2)))(each, each, each, inputs))


def head(step: Step, batch: Batch) -> None:
    """The head's log-probabilities, and back to what the blocks give."""
    place, inputs = backbone_of(step.model), arrays_of(batch.inputs)
    if place is None:
        return

    def of_states(states: mx.array) -> mx.array:
        with Replaced(*place, lambda *_, **__: states.reshape(len(states), 1, -1)):
            squares = [figures.square().sum() for figures in figures_of(step.train, step.model, inputs)]
            return sum(squares, mx.array(0.0))

    of_blocks = hidden_states(step.model, inputs)  # not evaluated: its kernels are those of `blocks`
    states = mx.contiguous(mx.ones(of_blocks.shape, of_blocks.dtype))
    mx.eval(mx.compile(mx.value_and_grad(of_states), inputs=[step.model.state])(states))


def loss(step: Step, batch: Batch) -> None:
    """The loss of log-probabilities."""
    mx.eval(_of_logps(step, batch)[0])


def gradient(step: Step, batch: Batch) -> None:
    """The loss's gradient for log-probabilities."""
    mx.eval(_of_logps(step, batch)[1])


def _of_logps(step: Step, batch: Batch) -> tuple[mx.array, mx.array]:
    inputs = arrays_of(batch.inputs)
    figures = inputs["mask"].shape[: 3 if step.train.record_kind == "group" else 2]  # of tokens, or of completions
    reference = mx.full(figures, -10.0) if losses.needs_reference(step.train) else None
    _, labels = arrays_beside(batch, None)
    baseline = mx.array(0.0) if step.train.loss in UNPAIRED_LOSSES else None
    logps, *others = (mx.full(array.shape, -5.0, array.dtype) for array in figures_of(step.train, step.model, inputs))

    def of_logps(logps: mx.array) -> mx.array:
        return loss_and_sums(step.train, (logps, *others), inputs, reference, labels, baseline)[0]

    return mx.compile(mx.value_and_grad(of_logps))(mx.contiguous(logps))


def reference(step: Step, batch: Batch) -> None:
    """Log-probabilities without gradients."""
    step.model.eval()
    run = mx.compile(lambda inputs: figures_of(step.train, step.model, inputs), inputs=[step.model.state])
    mx.eval(run(arrays_of(batch.inputs)))


def update(step: Step, batch: Batch) -> None:
    """From the gradients' sums to new parameters."""
    ones = tree_map(lambda p: mx.ones(p.shape), step.model.trainable_parameters())
    mean, squares = step.update.mean(ones, mx.array(1.0))
    step.update.take(mean, mx.sqrt(step.world.sum_of_all(squares)), step.train.learning_rate)
    mx.eval(step.model.trainable_parameters())


PARTS: dict[str, Callable[[Step, Batch], None]] = {
    **{f"blocks-{part}": functools.partial(blocks, part=part) for part in range(BLOCK_PARTS)},
    **{part.__name__: part for part in (stream, head, loss, gradient, reference, update, indexing)},
}


def compile_part(
    part: str, settings: ModelSettings, train: TrainSettings, layout: DataSettings, examples: Sequence[Example]
) -> None:
    """Runs one of PARTS on a small model and these rows, of which the last becomes longer than another."""
    model = small_model(settings, train.seed)
    rows: list[Example] = []
    for i, row in enumerate(examples):
        times = len(examples) * RAGGED if i == len(examples) - 1 else 1
        of_row = {name: getattr(row, name) for name in ("completions", "learnt", "sampling_logps")}
        longer: dict[str, Any] = {
            n: tuple(array.repeat(times) for array in arrays) for n, arrays in of_row.items() if arrays
        }
        longer["completions"] = tuple(ids % VOCABULARY for ids in longer["completions"])
        rows.append(dataclasses.replace(row, prompt_ids=row.prompt_ids % VOCABULARY, **longer))
    mismatched = needs_mismatched(train.loss)
    model.train()
    batch = collate_trained(rows, length_multiple(layout), layout.shared_prompts, mismatched)
    step = Step(model, make_optimizer(train), train, World())
    for _ in stream_ways(model):  # without the trial of the whole model, which would compile for half of the time
        layout_of(model).ends_early = True
        with contextlib.suppress(Exception):  # a family's own code may raise anything
            PARTS[part](step, batch)
            break


def main() -> None:
    """Compiles the part that the command line names."""
    compile_part(sys.argv[1], *pickle.loads(sys.stdin.buffer.read()))


# Orders of magnitude, by device: FLOP/s in matrix products, seconds to launch a block's kernels, both ways.
FLOPS: dict[Device, float] = {"cpu": 1e11, "metal": 1e13, "cuda": 1.5e14}
LAUNCH_SECONDS: dict[Device, float] = {"cpu": 0.0, "metal": 1e-3, "cuda": 2.2e-3}
TRACE_SECONDS = 0.025


def trace_cost(model: nn.Module) -> TraceCost:
    """What a further shape of micro-batches costs this model on this device, in tokens of forward and backward."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    parameters = sum(array.size * (8 if array.dtype == mx.uint32 else 1) for array in arrays)
    blocks, tokens_per_second = len(getattr(model, "layers", ())) or 1, FLOPS[device()] / (6 * parameters)
    return TraceCost(
        tokens=TRACE_SECONDS * blocks * tokens_per_second,
        least_tokens=LAUNCH_SECONDS[device()] * blocks * tokens_per_second,
    )
