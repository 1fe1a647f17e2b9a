"""A model in stages is the whole model: outputs, gradients, files and memory, on real ranks."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from lib.config.settings import Config, DataSettings, ModelSettings, SyncSettings, TrainSettings
from lib.data.batch import MicroBatch, collate
from lib.distributed.links import Links
from lib.distributed.world import World
from lib.evaluate import command, score_file
from lib.model import gradient_checkpointing, pipeline_stage, stream_trial
from lib.model.layout import layout_of
from lib.system.out_of_memory import Limit
from lib.system.terminal import Terminal
from lib.training import pipelined_step
from lib.training.divided_world import InStages, PipelinedWorld, pipelined
from lib.training.reference_model import layout
from lib.training.step import Step, noisy
from tests import rounding, tiny
from tests.ranks import settings as words_of
from tests.ranks import train, two
from tests.test_shard import assert_answers_and_metrics_as_alone, build, gathered
from tests.tiny import model_folder, steps_of

mpi = pytest.mark.mpi(min_size=2)

BLOCKS = 5
CUTS = {2: [(4, 1), (2, 3)], 3: [(1, 3, 1), (2, 1, 2)], 4: [(1, 2, 1, 1), (2, 1, 1, 1)]}
FAMILIES = ("llama", "llama-tied-biased", "qwen2", "qwen3", "gemma3_text", "mistral", "qwen3_moe", "mixtral", "gemma2")
MODEL = {"num_hidden_layers": BLOCKS}
DPO, SFT = TrainSettings(), TrainSettings(loss="sft")


def folder_of(world: World, folder: Path, family: str) -> Path:
    path = folder / family
    if world.rank == 0:
        model_folder(path, model_type=family.partition("-")[0], **MODEL, **tiny.FAMILIES[family])
    world.gather_text("written")
    return path


def cut(world: World, model: nn.Module, blocks: Sequence[int]) -> PipelinedWorld:
    links = Links(world)
    return pipelined(world, blocks, pipeline_stage.cut(model, blocks, world.rank, links), links)


def batches(completions: int) -> list[MicroBatch]:
    """Micro-batches of ragged sizes and lengths, each with its reference."""
    draw = np.random.default_rng(3)
    made = [collate(tiny.examples(count, completions, seed=draw), 4, True) for count in (3, 1, 2, 2)]
    return [(one, draw.normal(-20, 3, (len(one.rows), completions)).astype(np.float32)) for one in made]


def sums_and_gradients(
    model: nn.Module, train: TrainSettings, world: World, made: list[MicroBatch], recomputes: bool = False
) -> tuple[mx.array, dict[str, mx.array]]:
    step = Step(model.train(), optim.SGD(1.0), train, world)
    if isinstance(world, InStages):
        pace = pipelined_step.StagePace([*range(layout_of(model).stage.size, 0, -1)], recomputes, Limit())
        step = pipelined_step.PipelinedStep(model, optim.SGD(1.0), train, world, SyncSettings(), pace)
    gradients, sums = step.forward_backward("a test's step", noisy(made, None, 7, 0), [], None)
    mx.eval(gradients, sums)
    return sums, dict(tree_flatten(gradients or {}))


def assert_equals_whole(
    world: World,
    path: Path,
    cuts: Sequence[int],
    train: TrainSettings = DPO,
    recomputes: bool = False,
    checkpointed: bool = False,
    **changes: Any,
) -> None:
    """The sums and every gradient of a model in stages, where it may begin to checkpoint, against the whole one's."""
    whole, model = build(path, **changes), build(path, **changes)
    together = cut(world, model, cuts)
    if checkpointed:
        gradient_checkpointing.checkpoint_blocks(model)
    made = batches(1 if train.loss == "sft" else 2)
    assert stream_trial.cannot_share_prompts(whole) is stream_trial.cannot_share_prompts(model) is None

    def compute() -> Sequence[rounding.Results]:
        sums, gradients = sums_and_gradients(whole, train, World(), made)
        return [{"sums": sums}, gradients]

    expected, limits = rounding.expected_and_limits(whole, compute, world)
    sums, gradients = sums_and_gradients(model, train, together.workers, made, recomputes)
    summed, sums = together.workers.sum_gradients(tree_unflatten(list(gradients.items())), sums)
    rounding.assert_within([{"sums": sums}, gathered(together, summed)], expected, limits)
    norm = np.sqrt(together.workers.sum_of_all({name: mx.square(g).sum() for name, g in tree_flatten(summed)}).item())
    wanted = np.sqrt(sum(np.square(g).sum() for g in expected[1].values()))
    assert abs(norm - wanted) <= np.sqrt(sum(limit**2 for limit in limits[1].values()))


@mpi
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if i % 2 == 0 else two) for i, family in enumerate(FAMILIES)]
)
@pytest.mark.long("mixtral", "gemma2", "mistral", "qwen3", "qwen2", ranks=2)
@pytest.mark.long("gemma2", "qwen2", ranks=3)
def test_stages_compute_what_the_whole_computes(world, folder, family: str) -> None:
    """One method a family and world, so that all of them meet; DPO and SFT, kept and recomputed, in turn."""
    turn = FAMILIES.index(family) + world.size
    method, path = ("lora", "dora", "full")[turn % 3], folder_of(world, folder, family)
    changes: dict[str, Any] = {"method": method}
    if method == "dora" and family in ("qwen3_moe", "mixtral"):
        changes["keys"] = ("self_attn.q_proj", "self_attn.o_proj")  # mlx-lm has no DoRA of experts
    assert_equals_whole(world, path, CUTS[world.size][turn % 2], (DPO, SFT)[turn % 2], turn % 4 < 2, **changes)


@mpi
@pytest.mark.parametrize("recomputes", [False, True], ids=["keeps", "recomputes"])
@pytest.mark.long(ranks=2)
def test_stages_drop_what_the_whole_drops(world, folder, recomputes: bool) -> None:
    path = folder_of(world, folder, "qwen3_moe")
    assert_equals_whole(world, path, CUTS[world.size][0], recomputes=recomputes, dropout=0.3)


@two
@pytest.mark.parametrize(
    "changes",
    [{"blocks": 1}, {"blocks": 4, "method": "full"}, {"method": "full", "gradient_checkpointing": True}],
    ids=["the last block", "all but the first block", "checkpointing"],
)
@pytest.mark.long("checkpointing")
def test_no_gradient_goes_where_nothing_is_trained(world, folder, changes: dict[str, Any]) -> None:
    path = folder_of(world, folder, "llama-tied-biased")
    recomputes = changes.get("method") == "full"
    assert_equals_whole(world, path, CUTS[world.size][recomputes], recomputes=recomputes, **changes)


@two
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.long("qwen3_moe")
def test_stages_of_a_quantised_model(world, folder, family: str) -> None:
    wide = {"moe_intermediate_size": 32, "head_dim": 16}
    if world.rank == 0:
        tiny.stored_model(folder, quantised=True, **{"model_type": family, **MODEL, **tiny.FAMILIES[family], **wide})
    world.gather_text("written")
    assert_equals_whole(world, folder / "stored", CUTS[world.size][0], random_init=False)


@two
@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.long
def test_compressed_activations_are_fewer_bytes_and_train_nearly_the_same(world, folder, kind: str) -> None:
    common = [*words_of(world, folder, shape=MODEL), "strategy=pipelined", "train.steps=2", "data.valid=null"]
    exact = train(world, folder, common, "exact")
    run = train(world, folder, [*common, f"sync.compression={kind}"], kind)
    for before, after in zip(steps_of(exact, world.rank), steps_of(run, world.rank), strict=True):
        assert 0 < abs(after["grad_norm"] / before["grad_norm"] - 1) < 0.1
        assert after["bytes_sent"] < before["bytes_sent"] and not after["skipped"]


@two
@pytest.mark.long
def test_answers_metrics_and_another_reference_in_stages(world, folder, capsys) -> None:
    words = ("strategy=pipelined", "evaluate.batch_size=3")
    settings, stages = assert_answers_and_metrics_as_alone(world, folder, capsys, *words)
    settings = settings.model_copy(update={"train": settings.train.model_copy(update={"loss": "sigmoid"})})
    for kind in ("rewards", "greedy", "samples", "pairs"):
        assert_scored_as_on_one_rank(world, folder, settings, stages, kind)


def by_letters(prompt: Any, completions: Sequence[str], record: dict[str, Any]) -> list[float]:
    """A judge to whom nearly no two answers are alike."""
    return [float(sum(map(ord, text))) for text in completions]


def assert_scored_as_on_one_rank(world: World, folder: Path, settings: Config, run: Path, kind: str) -> None:
    """A file that stages went through, against the same of one rank. Both go on with what is finished."""
    lines = []
    for name, ranks in (("stages", world), (f"alone{world.rank}", World())):
        out = folder / f"{kind}-{name}.jsonl"
        score, pairs = (None, str(out)) if kind == "pairs" else (kind, None)
        options = argparse.Namespace(run=str(run), score=score, out=score and str(out), make_pairs=pairs, data=None)
        judged = settings.evaluate.model_copy(update={"judge": "tests.test_pipeline:by_letters"})
        strategy = "pipelined" if name == "stages" else "synchronous"
        own = settings.model_copy(update={"strategy": strategy, "evaluate": judged})
        command.in_bulk(score_file.StoredModel(own, run), options, ranks, Terminal(silent=True))
        world.gather_text("written")
        lines.append(tiny.read_jsonl(out))
    stages, alone = lines
    assert len(stages) == len(alone) and (len(alone) == 8 or (kind == "pairs" and alone))
    assert kind == "rewards" or stages == alone
    for mine, theirs in zip(stages, alone, strict=True) if kind == "rewards" else ():
        assert mine.keys() == theirs.keys() and "reward_chosen" in mine
        assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-4, abs=1e-4)


def test_a_stream_that_one_stage_cannot_take_goes_through_none(tmp_path, monkeypatch) -> None:
    model, world = tiny.moved(ModelSettings(path=str(model_folder(tmp_path)), random_init=True)), PipelinedWorld(size=2)
    monkeypatch.setattr(World, "gather_text", lambda *_: ["its blocks do not take a stream", ""])
    monkeypatch.setattr(PipelinedWorld, "from_last", lambda _, array, what: array)
    assert not any(layout(model, DataSettings(train="x"), ranks).shares_prompts for ranks in (world, world.workers))
