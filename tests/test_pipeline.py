"""A model in stages is the whole model: outputs, gradients, files and memory, on real ranks."""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import save_model

import train as script
from lib.config import load, schema
from lib.data.collate import Batch, collate
from lib.data.dataset import Example
from lib.distributed import world as sync
from lib.distributed.links import Links
from lib.distributed.pipeline_schedule import one_forward_one_backward
from lib.distributed.pipelined_world import PipelinedWorld, pipelined
from lib.distributed.world import World
from lib.errors import Stopped, UserError
from lib.evaluate import command
from lib.model import adapter_files, pipeline_stage, token_stream
from lib.model import load as load_module
from lib.system import mpi_and_blas
from lib.system.out_of_memory import Limit
from lib.training import pipelined_step
from lib.training.step import MicroBatch, make_step
from tests import rounding, tiny
from tests.test_shard import build, gathered, train
from tests.tiny import difference, model_folder, steps_of

mpi = pytest.mark.mpi(min_size=2)

BLOCKS = 5
CUTS = {2: [(4, 1), (2, 3)], 3: [(1, 3, 1), (2, 1, 2)]}
LIMITS = {"max_position_embeddings": 64, "rope_theta": 10000.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
SPARSE = {"decoder_sparse_step": 2, "mlp_only_layers": []}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-biased": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**LIMITS, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 4, **LIMITS},
    "gemma3_text": {"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 5, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3]},
    "qwen3_moe": {"head_dim": 4, **MOE, **SPARSE, **LIMITS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
    "gemma2": {"head_dim": 4, "query_pre_attn_scalar": 4},
}
MODEL = {"num_hidden_layers": BLOCKS}
DPO, SFT = schema.TrainSettings(), schema.TrainSettings(loss="sft")


@pytest.fixture(scope="module")
def world() -> World:
    return sync.start(mpi_and_blas.launch_environment(), timeout_seconds=60)


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(world.broadcast_text(str(tmp_path)))


def folder_of(world: World, folder: Path, family: str) -> Path:
    path = folder / family
    if world.rank == 0:
        model_folder(path, model_type=family.partition("-")[0], **MODEL, **FAMILIES[family])
    world.gather_text("written")
    return path


def cut(world: World, model: nn.Module, blocks: Sequence[int]) -> PipelinedWorld:
    links = Links(world)
    return pipelined(world, blocks, pipeline_stage.cut(model, blocks, world.rank, links), links)


def batches(completions: int, shares_prompts: bool = True) -> list[MicroBatch]:
    """Micro-batches of ragged sizes and lengths, each with its reference."""
    draw = np.random.default_rng(3)

    def ids(low: int, high: int) -> np.ndarray:
        return draw.integers(2, 48, draw.integers(low, high)).astype(np.int32)

    def batch(count: int) -> Batch:
        rows = [Example(i, ids(1, 9), tuple(ids(2, 8) for _ in range(completions))) for i in range(count)]
        return collate(rows, 4, shares_prompts)

    made = [batch(count) for count in (3, 1, 2, 2)]
    return [(one, draw.normal(-20, 3, (len(one.rows), completions)).astype(np.float32)) for one in made]


def sums_and_gradients(
    model: nn.Module, train: schema.TrainSettings, world: World, made: list[MicroBatch], recomputes: bool = False
) -> tuple[mx.array, dict[str, mx.array]]:
    mx.random.seed(7)  # of the dropout
    step = make_step(model.train(), optim.SGD(1.0), train, world, dropout=True)
    if getattr(model, "stage", None) is not None:
        step = pipelined_step.pipelined(step, recomputes, Limit())
    gradients, sums = step._forward_backward("a test's step", made, [])
    mx.eval(gradients, sums)
    return sums, dict(tree_flatten(gradients or {}))


def assert_equals_whole(
    world: World,
    path: Path,
    blocks: Sequence[int],
    train: schema.TrainSettings = DPO,
    recomputes: bool = False,
    shares_prompts: bool = True,
    **changes: Any,
) -> None:
    """The sums and every gradient of a model in stages against those of the whole one."""
    whole, _ = build(path, **changes)
    model, _ = build(path, **changes)
    together = cut(world, model, blocks)
    made = batches(1 if train.loss == "sft" else 2, shares_prompts)
    can_share = token_stream.cannot_share_prompts(whole) is None
    assert can_share == (token_stream.cannot_share_prompts(model) is None)
    assert can_share or not shares_prompts

    def compute() -> Sequence[rounding.Results]:
        sums, gradients = sums_and_gradients(whole, train, World(), made)
        return [{"sums": sums}, gradients]

    expected, limits = rounding.expected_and_limits(whole, compute)
    sums, gradients = sums_and_gradients(model, train, together.workers, made, recomputes)
    summed, sums = together.workers.sum_gradients(tree_unflatten(list(gradients.items())), sums)
    rounding.assert_within([{"sums": sums}, gathered(together, summed)], expected, limits)
    squares = {name: mx.square(g).sum() for name, g in tree_flatten(summed)}
    norm = np.sqrt(together.workers.sum_of_all(squares).item())
    wanted = np.sqrt(sum(np.square(g).sum() for g in expected[1].values()))
    assert abs(norm - wanted) <= np.sqrt(sum(limit**2 for limit in limits[1].values()))


@mpi
@pytest.mark.parametrize("method", ["lora", "dora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_what_the_whole_computes(world: World, folder: Path, family: str, method: str) -> None:
    path = folder_of(world, folder, family)
    changes: dict[str, Any] = {"method": method}
    if method == "dora" and family in ("qwen3_moe", "mixtral"):
        changes["keys"] = ("self_attn.q_proj", "self_attn.o_proj")  # mlx-lm has no DoRA of experts
    for i, blocks in enumerate(CUTS[world.size]):
        shares_prompts = i == 1 and family != "gemma2"
        assert_equals_whole(
            world, path, blocks, recomputes=i == 0, shares_prompts=shares_prompts, train=SFT if i else DPO, **changes
        )
    world.gather_text("compared")
