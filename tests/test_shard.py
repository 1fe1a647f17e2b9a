"""A model in unequal parts is the whole model: outputs, gradients, files and memory, on real ranks."""

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import quantize_model, save_model

import train as script
from lib.config import load
from lib.config.settings import Config, ModelSettings, TrainSettings
from lib.data.batch import collate
from lib.distributed import world as world_module
from lib.distributed.world import World
from lib.errors import UserError
from lib.evaluate import command, score_file
from lib.model import adapter_files, partition, stream_trial, tensor_parallel, token_stream
from lib.model import load as load_module
from lib.model import logps as logps_module
from lib.system.terminal import Terminal
from lib.training import step as step_module
from lib.training.divided_world import ShardedWorld, sharded
from tests import rounding, tiny
from tests.ranks import settings, train, two
from tests.tiny import model_folder, steps_of

mpi = pytest.mark.mpi(min_size=2)

HEADS = {"hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}
FAMILIES = ("llama", "llama-tied-biased", "qwen2", "qwen3", "qwen3_moe", "ministral3")
WEIGHTS = {2: [(1, 1), (1, 3)], 3: [(1, 1, 2), (5, 2, 3)]}
UNEVEN = {2: (1, 3), 3: (5, 2, 3)}


def build(path: Path, seed: int = 0, **changes: Any) -> nn.Module:
    return tiny.moved(ModelSettings(path=str(path), **{"random_init": True, "rank": 3, **changes}), seed=seed)


def division_of(path: Path, weights: tuple[float, ...], vocabulary: bool = False) -> partition.Division:
    shape = partition.model_shape_of(json.loads((path / "config.json").read_text()))
    return partition.divide(shape, weights, vocabulary)


def divide(
    world: World, path: Path, model: nn.Module, weights: tuple[float, ...], vocabulary: bool = False
) -> ShardedWorld:
    dealt = division_of(path, weights, vocabulary)
    return sharded(world, dealt, *tensor_parallel.shard(model, dealt, world))


def gathered(world: World, tree: Any) -> dict[str, mx.array]:
    with world.gathering(tree) as [(described, arrays)]:
        found = dict(arrays)
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == described
    return found


def folder_of(world: World, folder: Path, family: str) -> Path:
    path = folder / family
    if world.rank == 0:
        model_folder(path, model_type=family.partition("-")[0], **HEADS, **tiny.FAMILIES[family])
    world.gather_text("written")
    return path


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[mx.array, mx.array]:
    """A loss that gives every completion another weight, and the log-probabilities."""
    logps = logps_module.completion_logps(model, inputs)
    return (mx.arange(1.0, 1.0 + logps.size).reshape(logps.shape) * mx.square(logps / 10)).mean(), logps


def gradients_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[mx.array, mx.array, Any]:
    mx.random.seed(7)  # of the dropout
    (loss, logps), gradients = nn.value_and_grad(model, loss_of)(model, inputs)
    mx.eval(loss, logps, gradients)
    return loss, logps, gradients


def assert_equals_whole(
    world: World, path: Path, weights: tuple[float, ...], shares_prompts: bool, **changes: Any
) -> None:
    """Log-probabilities and every gathered gradient of the divided model against those of the whole one."""
    whole, model = build(path, **changes), build(path, **changes)
    together = divide(world, path, model, weights, changes.get("shard_vocabulary", False))
    assert stream_trial.cannot_share_prompts(whole) is None and stream_trial.cannot_share_prompts(model) is None
    inputs = token_stream.arrays_of(collate(tiny.examples(4), 4, shares_prompts).inputs)

    def compute() -> Sequence[rounding.Results]:
        loss, logps, gradients = gradients_of(whole, inputs)
        return [{"loss": loss}, {"logps": logps}, dict(tree_flatten(gradients))]

    expected, limits = rounding.expected_and_limits(whole, compute, world)
    own_loss, own_logps, gradients = gradients_of(model, inputs)
    gradients, sums = together.workers.sum_gradients(gradients, mx.array([own_loss.item(), 1.0]))
    loss, count = sums.tolist()
    assert count == 1.0, "counted once, whatever the ranks"
    found = gathered(together, gradients)
    rounding.assert_within([{"loss": loss}, {"logps": own_logps}, found], expected, limits)
    squares = {name: mx.square(g).sum() for name, g in tree_flatten(gradients)}
    norm = np.sqrt(together.workers.sum_of_all(squares).item())
    wanted = np.sqrt(sum(np.square(g).sum() for g in expected[2].values()))
    assert abs(norm - wanted) <= np.sqrt(sum(limit**2 for limit in limits[2].values()))


@mpi
@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=() if i % 3 == j else (two, pytest.mark.long))  # each family and each method
        for i, family in enumerate(FAMILIES)
        for j, method in enumerate(("lora", "dora", "full"))
    ],
)
@pytest.mark.long("qwen3-lora", "ministral3-full", "llama-lora", ranks=3)
def test_parts_compute_what_the_whole_computes(world, folder, family: str, method: str) -> None:
    path = folder_of(world, folder, family)
    changes: dict[str, Any] = {"method": method}
    if (family, method) == ("qwen3_moe", "dora"):
        changes["keys"] = ("self_attn.q_proj", "self_attn.o_proj")  # mlx-lm has no DoRA of experts
    for i, weights in enumerate(WEIGHTS[world.size]):
        assert_equals_whole(world, path, weights, shares_prompts=i == 1, **changes)


@mpi
def test_parts_drop_what_the_whole_drops(world, folder) -> None:
    path = folder_of(world, folder, "qwen3_moe")
    assert_equals_whole(world, path, UNEVEN[world.size], shares_prompts=True, dropout=0.3)


@mpi
@pytest.mark.parametrize("logits_bytes", [2**29, 2000], ids=["whole", "in pieces"])
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama-tied-biased", "lora"),
        *(pytest.param(family, "full", marks=two) for family in ("llama-tied-biased", "qwen3")),
    ],
)
@pytest.mark.long("*-whole", "llama-tied-biased-full-in pieces", ranks=2)
def test_a_divided_vocabulary(world, folder, family: str, method: str, logits_bytes: int, monkeypatch) -> None:
    monkeypatch.setattr(logps_module, "LOGITS_BYTES", logits_bytes)
    path = folder_of(world, folder, family)
    assert_equals_whole(world, path, UNEVEN[world.size], shares_prompts=True, method=method, shard_vocabulary=True)
    whole, model = build(path, method=method), build(path, method=method)
    divide(world, path, model, UNEVEN[world.size], vocabulary=True)
    tokens = mx.array([[1, 47, 3, 24], [0, 13, 35, 36]])
    assert mx.allclose(model(tokens), whole(tokens), rtol=1e-4, atol=1e-5)  # as generation sees it


@mpi
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.long(ranks=3)
def test_parts_of_a_quantised_model(world, folder, family: str) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    widths = {"intermediate_size": 256, "moe_intermediate_size": 96}
    path = folder / family
    if world.rank == 0:
        model_folder(path, model_type=family, **(tiny.FAMILIES[family] | sizes | widths))
        model = load_module.load(ModelSettings(path=str(path), random_init=True), 0)
        model, stored = quantize_model(model, json.loads((path / "config.json").read_text()), 32, 4)
        save_model(path, model)
        (path / "config.json").write_text(json.dumps(stored))
    world.gather_text("written")
    for changes in ({"shard_vocabulary": True}, {"method": "dora", "keys": ("self_attn.o_proj", "self_attn.q_proj")}):
        assert_equals_whole(world, path, UNEVEN[world.size], shares_prompts=True, random_init=False, **changes)


@mpi
def test_gathered_parts_are_scattered_to_any_division_bit_for_bit(world, folder, monkeypatch) -> None:
    path = folder_of(world, folder, "llama-tied-biased")
    whole, model = (build(path, method="full") for _ in range(2))
    for either in (whole, model):
        either.model.layers[1].mlp.down_proj.weight[:, 3] = -0.0
    first = divide(world, path, model, (1,) * world.size)
    sums, all_sum = list[str](), ShardedWorld.all_sum
    monkeypatch.setattr(world_module, "GATHERED_BYTES", 2**12)  # several sums, some of which join arrays
    noted = lambda self, array, what: sums.append(what) or all_sum(self, array, what)  # noqa: E731
    monkeypatch.setattr(ShardedWorld, "all_sum", noted)
    found = gathered(first, model.trainable_parameters())
    wanted = adapter_files.trainable(whole)
    assert found.keys() == wanted.keys()
    other = build(path, seed=1, method="full")
    second = divide(world, path, other, UNEVEN[world.size])
    other.update(tree_unflatten(list(second.scattered(dict(wanted) if world.rank == 0 else {}))))
    shapes = [[a.shape for a in adapter_files.trainable(either).values()] for either in (other, model)]
    assert shapes[0] != shapes[1]
    for arrays in (found, gathered(second, other.trainable_parameters())):
        for name, array in wanted.items():
            bits = [np.array(mx.view(a, mx.uint32)).tobytes() for a in (arrays[name], array)]
            assert bits[0] == bits[1], name
    assert sums.count("the parts of the model") > 10


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"model_type": "gemma3"}, [1, 1], "type gemma3; it knows llama"),
        ({}, [1, 1, 1], "3 ranks, but the model has only 2 KV heads; use fewer ranks"),
        ({"quantization": {"group_size": 32, "bits": 4}}, [1, 1], "only 32 MLP columns in groups of 32"),
        ({"intermediate_size": None}, [1, 1], "has no intermediate_size"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], weights: list[float], message: str) -> None:
    stored = {key: value for key, value in (tiny.LLAMA | {"head_dim": 32} | changes).items() if value is not None}
    with pytest.raises(UserError, match=message):
        partition.divide(partition.model_shape_of(stored), weights)


@pytest.mark.parametrize(
    ("counts", "weight", "backend", "told", "is_compiled"),
    [
        ((4, 4), 1.0, "nccl", None, True),
        ((4, 4), 1.0, "nccl", False, False),
        ((4, 4), 1.0, "ring", None, False),
        ((4, 4), 1.0, "ring", True, True),
        ((5, 3), 1.0, "mpi", True, False),
        ((4, 4), 1.01, "nccl", None, False),  # of the head's positions one has more
    ],
)
def test_equal_parts_are_compiled_where_nccl_sums_or_where_it_is_told(
    counts: Any, weight: float, backend: str, told: Any, is_compiled: bool, monkeypatch
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    world = sharded(World(size=2, backend=backend), partition.Division(counts, (8, 8), weights=(1.0, weight)))
    assert step_module.is_compiled(TrainSettings(compile=told), world.workers) == is_compiled


@two
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (("model.method=lora", "train.loss=sft"), {"attention_bias": True, "mlp_bias": True}),
        (("model.method=dora", "model.gradient_checkpointing=true", "train.loss=orpo"), {}),
        (("model.method=full", "train.loss=sft", "train.learning_rate=1e-4", "model.shard_vocabulary=true"), {}),
    ],
    ids=("biased", "dora", "full"),
)
@pytest.mark.long("dora", "biased")
def test_equal_parts_compiled_train_to_the_weights_of_the_whole(
    world, folder, words: tuple[str, ...], changes: dict[str, Any], monkeypatch
) -> None:
    common = [*settings(world, folder, shape=HEADS | changes), "train.steps=8", *words, "train.max_grad_norm=0.05"]
    common += ["strategy=sharded", "checkpoint.final=last", "train.compile=true"]
    alone = rounding.trained_alone(world, common)
    passes: list[bool] = []
    make = step_module.is_compiled
    monkeypatch.setattr(step_module, "is_compiled", lambda *args: (passes.append(make(*args)), passes[-1])[1])
    run = train(world, folder, [*common, "plan.shares=[1,1]"], "sharded")
    assert passes and all(passes)
    rounding.assert_equal_runs(alone, [run], ["loss", "grad_norm"])
    first_sent: dict[int, int] = {}  # a pass is traced once, and its bytes are counted at every step
    steps = steps_of(run, world.rank)
    for record in steps:
        assert record["bytes_sent"] == first_sent.setdefault(record["padded_tokens"], record["bytes_sent"]) > 10_000
    assert len(first_sent) < len(steps)


@two
@pytest.mark.long
def test_answers_metrics_and_another_reference_in_parts(world, folder, capsys) -> None:
    parts = ("strategy=sharded", "model.shard_vocabulary=true", f"plan.shares={list(UNEVEN[world.size])}")
    assert_answers_and_metrics_as_alone(world, folder, capsys, *parts)


def assert_answers_and_metrics_as_alone(
    world: World, folder: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Config, Path]:
    """A run of the quickstart's model in parts against one rank's: its figures, its adapter, what evaluating it says.

    words: how ranks divide the model.

    Returns:
        The settings and the folder of the run in parts.
    """
    common = ["evaluate.answers_limit=4", "evaluate.max_tokens=44", "evaluate.every=null", "train.steps=2"]
    common += ["model.reference=configs/quickstart/model", "train.global_batch_size=8", f"run.dir={folder / 'runs'}"]
    common += [f"data.train={folder / 'others.jsonl'}", f"data.valid={folder / 'few.jsonl'}"]
    if world.rank == 0:
        rows = Path("configs/quickstart/valid.jsonl").read_text().splitlines()
        few = [{**row, "answer": row["chosen"].strip()} for row in map(json.loads, rows[:8])]
        tiny.write_jsonl(folder / "few.jsonl", few)
        tiny.write_jsonl(folder / "others.jsonl", list(map(json.loads, rows[8:16])))
    world.gather_text("written")

    def run(world: World, *more: str) -> Path:
        settings = load.load("configs/quickstart.yaml", [*common, *more])
        script.train(settings, world, resume=False, dry_run=False)
        return Path(settings.run.dir) / str(settings.run.name)

    alone = folder / "runs/alone"
    if world.rank == 0:
        run(World(), "run.name=alone")
    parts = run(world, "run.name=parts", *words)
    summaries = [*map(tiny.summary, (alone, parts))]
    for key in ("exact_match_before", "exact_match_after", "loss", "reward_accuracy", "kl"):
        assert summaries[1][key] == pytest.approx(summaries[0][key], rel=1e-4, abs=5e-4), key  # kl: of roundings
    capsys.readouterr()
    settings = load.load(parts / "config.yaml", [])
    given = {"run": str(parts), "model": None, "data": None, "overrides": []}
    options = argparse.Namespace(**given, per_pair=str(folder / "pairs.jsonl"))
    command.evaluate(score_file.StoredModel(settings, parts), options, world, Terminal(silent=world.rank != 0))
    if world.rank == 0:
        told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert told["loss"] == pytest.approx(summaries[1]["loss"], rel=1e-4)
        assert told["exact_match"] == summaries[1]["exact_match_after"]
        assert len((folder / "pairs.jsonl").read_text().splitlines()) == told["rows"]
        # What the parts saved is an ordinary adapter.
        model, _ = mlx_lm.load("configs/quickstart/model", adapter_path=str(parts))
        mine, _ = mlx_lm.load("configs/quickstart/model", adapter_path=str(alone))
        logits = [m(mx.array([[7, 8, 9, 10]])) for m in (model, mine)]
        assert mx.allclose(*logits, rtol=1e-4, atol=1e-5)
    return settings, parts


@mpi
@pytest.mark.long
def test_a_rank_trains_in_its_planned_memory(world, folder) -> None:
    """The steps' measured peaks, beyond what all ranks keep whole (embedding, head, norms), are as the plan's parts."""
    shape = HEADS | {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768}
    words = settings(world, folder, shape=shape)
    words += ["strategy=sharded", f"plan.shares={list(UNEVEN[world.size])}", "model.method=full", "train.steps=2"]
    words += ["plan.micro_batch_sizes=[1]", "train.global_batch_size=2", "data.valid=null", "evaluate.samples=0"]
    gc.collect()
    mx.clear_cache()
    held = mx.get_active_memory()
    run = train(world, folder, words, "run")
    parts = json.loads((run / "plan.json").read_text())["parts"]
    peaks = [int(t) for t in world.gather_text(str(steps_of(run, world.rank)[-1]["peak_memory_bytes"] - held))]
    beyond = [
        peak - part["whole_bytes"] * (1 + part["training_bytes"] / (part["divided_bytes"] + part["whole_bytes"]))
        for peak, part in zip(peaks, parts, strict=True)
    ]
    for peak, own, part in zip(peaks, beyond, parts, strict=True):
        assert own / sum(beyond) == pytest.approx(part["share"], rel=0.1)
        planned = sum(part[f"{kind}_bytes"] for kind in ("divided", "whole", "training"))
        assert 0.98 * planned <= peak <= planned + part["activation_bytes"], "activations come beside what is kept"
