"""Ranks together are one rank, whatever divides the work: replicas of unequal shares, divided heads, stages of uneven depth."""

import gc
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import save_model

from lib.config.settings import ModelSettings
from lib.distributed.links import Links
from lib.distributed.world import World
from lib.errors import Stopped, UserError
from lib.model import adapter_files, adapters, partition, pipeline_stage, stream_trial, tensor_parallel
from lib.model import load as models
from lib.system.out_of_memory import MicroBatchLimit
from lib.training import checkpoint, divided_world
from tests import rounding, tiny
from tests.ranks import settings, train, two
from tests.test_groups import records as groups
from tests.tiny import difference, model_folder, rows_of_epochs, steps_of

pytestmark = pytest.mark.mpi(min_size=2)

# A small model that every strategy can divide, and how: by the size of the world.
SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}
WAYS: dict[str, dict[int, list[str]]] = {
    "replicas": {
        2: ["strategy=synchronous", "plan.shares=[6,2]", "plan.micro_batch_sizes=[3,1]"],
        3: ["strategy=synchronous", "plan.shares=[5,2,1]", "plan.micro_batch_sizes=[3,1,1]"],
    },
    "one-idle": {2: ["strategy=synchronous", "plan.shares=[8,0]", "plan.micro_batch_sizes=[4,1]"]},
    "parts": {2: ["strategy=sharded", "plan.shares=[1,3]"], 3: ["strategy=sharded", "plan.shares=[5,2,3]"]},
    "stages": {2: ["strategy=pipelined", "plan.shares=[2,1]"], 3: ["strategy=pipelined", "plan.shares=[1,1,1]"]},
}
ALL, MODEL_DIVIDED = ("replicas", "parts", "stages"), ("parts", "stages")
FULL = ("model.method=full", "train.learning_rate=1e-4")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DPO": (("train.max_grad_norm=0.05",), (*ALL, "one-idle")),
    "SFT of all weights": ((*FULL, "train.loss=sft"), ALL),
    "GRPO": (("train.loss=grpo",), ALL),
    "KTO": (("train.loss=kto", "train.learning_rate=3e-2", "train.seed=4"), ALL),
    "BCO": (("train.loss=bco", "train.learning_rate=1e-2"), ALL),
    "DoRA, ORPO": (("model.method=dora", "train.loss=orpo", "model.gradient_checkpointing=true"), ALL),
    "dropout": (("model.dropout=0.1",), ALL),
    "noise": (("train.loss=[sigmoid,apo_zero,sft]", "train.use_weighting=true", "train.neftune_noise_alpha=5"), ALL),
    "embeddings": (
        ("model.adapt_embeddings=true", "model.rank_pattern={up_proj: 3}", "train.loraplus_lr_ratio=8")
        + ("train.reference_sync_steps=2",),
        ALL,
    ),
    "unlike ranks": ((), (*ALL, "one-idle")),  # limits of rounding; and where a single pair did not fit
    "muon, compiled": ((*FULL, "train.optimizer=muon", "train.compile=true"), ("replicas", "stages")),
}
ON_THREE = ("DPO", "SFT of all weights", "GRPO")
VOCABULARY_DIVIDED = ("SFT of all weights", "GRPO")


def words_of(world: World, folder: Path, **changes: Any) -> list[str]:
    if world.rank == 0:
        tiny.write_jsonl(folder / "groups.jsonl", groups(21))
    return settings(world, folder, "plan.micro_batch_sizes=[3]", shape=SHAPE | changes)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in ON_THREE else two) for case in CASES])
@pytest.mark.long("BCO", "muon, compiled", "DoRA, ORPO")
@pytest.mark.long("DPO", "GRPO", ranks=3)
def test_ranks_train_to_the_weights_of_one(world, folder, monkeypatch, case: str) -> None:
    """21 rows in batches of 8: an epoch's last batch is ragged, and a rank of three may get nothing of it."""
    words, ways = CASES[case]
    common = [*words_of(world, folder), "train.steps=3", "checkpoint.final=last", *words]
    common += [] if case == "DPO" else ["data.valid=null", "evaluate.samples=0"]  # evaluations take half of a short run
    common += [f"data.train={folder}/groups.jsonl"] if case == "GRPO" else []
    alone = rounding.trained_alone(world, common)
    assert case != "KTO" or any(record["kl"] > 0 for record in steps_of(alone.run)), "no baseline but 0 was tried"
    if case == "unlike ranks":
        monkeypatch.setattr(stream_trial, "rounding_tolerance", lambda _: math.nan if world.rank else 0.01)
        monkeypatch.setattr(MicroBatchLimit, "recomputes", world.rank == 1)
        monkeypatch.setattr(divided_world, "compiles", lambda _: world.rank == 0)
    for way in (way for way in ways if world.size in WAYS[way]):
        own = WAYS[way][world.size]
        vocabulary = ["model.shard_vocabulary=true"] * (way == "parts" and case in VOCABULARY_DIVIDED)
        run = train(world, folder, [*common, *own, *vocabulary], way)
        rounding.assert_equal_runs(alone, [run], ["loss", *(["kl"] if case in ("KTO", "GRPO") else ["grad_norm"])])
        if way in MODEL_DIVIDED:
            assert [record["rows"] for record in steps_of(alone.run)] == [record["rows"] for record in steps_of(run)]
            assert steps_of(run, world.rank)[-1]["rows"] == steps_of(run)[-1]["rows"]
        else:
            assert rows_of_epochs(run) == rows_of_epochs(alone.run), "an example was lost or repeated"
        before, after = map(tiny.summary, (alone.run, run))
        assert (after["world_size"], after["pairs"]) == (world.size, before["pairs"])
        assert f"strategy={after['strategy']}" == own[0]


@pytest.mark.long(ranks=3)
def test_a_run_moves_between_strategies_and_one_rank(world, folder) -> None:
    """Rows that stream, weights of every division, optimizer: one checkpoint for all."""
    common = [*words_of(world, folder, mlp_bias=True), "model.method=full", "train.learning_rate=1e-4"]
    common += ["train.schedule=constant", "checkpoint.every=1", "data.valid=null"]
    common += ["data.streaming=true", f"data.cache_dir={folder}/cache"]
    replicas, parts, stages = ([*common, *WAYS[way][world.size]] for way in ALL)
    train(world, folder, [*replicas, "train.steps=2"], "moving")
    train(world, folder, [*parts, "train.steps=3"], "moving", resume=True)
    if world.rank == 0:
        train(World(), folder, [*common, "train.steps=4"], "moving", resume=True)
    world.gather_text("moved")
    train(world, folder, [*stages, "train.steps=5"], "moving", resume=True)
    run = train(world, folder, [*parts, "plan.shares=null", "train.steps=6"], "moving", resume=True)
    straight = rounding.trained_alone(world, [*common, "train.steps=6"])
    assert difference(straight.run, run) <= straight.limit
    assert rows_of_epochs(straight.run) == {0: list(range(21)), 1: list(range(21))}
    assert sorted(r["rows"] for r in steps_of(run)[2:]) == sorted(r["rows"] for r in steps_of(straight.run)[2:])


@two
@pytest.mark.parametrize("way", ALL)
def test_a_stopped_run_has_the_bits_of_one_that_never_stopped(world, folder, way: str) -> None:
    """Of replicas, with what compression left out; of stages, of which the first trains nothing."""
    own = {"replicas": ["sync.compression=topk", "model.dropout=0.1"], "stages": ["model.blocks=1"]}.get(way, [])
    words = [*words_of(world, folder), *WAYS[way][2], *own, "train.schedule=constant", "data.valid=null"]
    straight = train(world, folder, [*words, "train.steps=3"], "straight")
    train(world, folder, [*words, "train.steps=2"], "stopped")
    stopped = train(world, folder, [*words, "train.steps=3"], "stopped", resume=True)
    assert difference(straight, stopped) == 0.0


@pytest.fixture(scope="module")
def large(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored model whose blocks are most of it."""
    path = Path(world.broadcast_text(str(tmp_path_factory.mktemp("large"))))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 64}
    if world.rank == 0:
        model_folder(path, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, **heads)
        save_model(path, models.load(ModelSettings(path=str(path), random_init=True), 0))
    world.gather_text("written")
    return path


@pytest.mark.parametrize("way", MODEL_DIVIDED)
def test_a_rank_reads_and_holds_its_planned_part(world, large: Path, way: str) -> None:
    """Loading piece by piece: never more than 1.2 times what is kept, and that in proportion to the plan within 10 %."""
    model_settings = ModelSettings(path=str(large), rank=4)
    shape = partition.model_shape_of(json.loads((large / "config.json").read_text()))
    weights = {"parts": {2: (1, 3), 3: (5, 2, 3)}, "stages": {2: (6, 2), 3: (2, 4, 2)}}[way][world.size]
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, whole = models.load(model_settings, 0, lazy=True), 0
    adapters.make_trainable(model, model_settings, 0)
    if way == "parts":
        division = partition.divide(shape, weights)
        tensor_parallel.shard(model, division, world)
        planned, whole = partition.rank_bytes(shape, division, world.rank)
    else:
        pipeline_stage.cut(model, weights, world.rank, Links(world))
    held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    assert peak <= 1.2 * held
    own = held - sum(array.nbytes for array in adapter_files.trainable(model).values()) - whole
    if way == "parts":
        # An allocation may be rounded up to whole pages, which counts in arrays as small as these.
        assert own + whole == pytest.approx(planned + whole, rel=0.05)
    told = [int(text) for text in world.gather_text(str(own))]
    assert [size / sum(told) for size in told] == pytest.approx([w / sum(weights) for w in weights], rel=0.1)


@pytest.mark.parametrize("way", MODEL_DIVIDED)
@pytest.mark.long(ranks=3)
def test_ranks_leave_together_when_one_cannot_write_or_nothing_is_finite(world, folder, way: str) -> None:
    common = [*words_of(world, folder), WAYS[way][world.size][0], "data.valid=null"]

    def full(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patched, pytest.raises(UserError, match="No space left"):
        patched.setattr(checkpoint, "_put_in_place", full)  # which rank 0 alone does
        train(world, folder, [*common, "train.steps=1"], "full")
    diverging = ["model.method=full", "train.learning_rate=1e38", "train.max_skipped_steps=2", "train.steps=9"]
    with pytest.raises(Stopped, match="2 updates in a row were not finite"):
        train(world, folder, [*common, *diverging], "diverging")
