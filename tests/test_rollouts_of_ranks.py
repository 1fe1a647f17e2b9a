"""Rounds on two real ranks: they draw what one draws, whatever their shares, and whoever holds the model's blocks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lib.config.settings import ModelSettings
from lib.distributed.world import World
from lib.evaluate.sample import Sample
from lib.model import load as models
from lib.training.checkpoint import MOMENTUM, common_at
from tests import rounding, tiny
from tests.test_rollouts import lines
from tests.test_sampler import logps_of
from tests.test_world import train

pytestmark = pytest.mark.mpi(min_size=2, max_size=2)


class Alone(NamedTuple):
    """A run of one rank, and the settings that runs of all ranks have with it in common."""

    run: Path
    words: list[str]


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Two rounds of one rank, the second drawn ahead: both by the policy before the first."""
    folder = Path(world.broadcast_text(str(tmp_path_factory.mktemp("alone"))))
    words = json.loads(world.broadcast_text(json.dumps(tiny.rounds(folder) if world.rank == 0 else [])))
    run = folder / "runs/alone"
    if world.rank == 0:
        train(World(), folder, [*words, "rollouts.overlap=true", "rollouts.rounds=2"], "alone")
    deadline = time.monotonic() + 100
    while not (run / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # a rank that waits in a collective takes processor time from the one that trains
    world.gather_text("trained alone")
    return Alone(run, words)


def together(alone: Alone, world: World, folder: Path, *own: str) -> Path:
    """A run of all ranks on the same prompts."""
    run = train(world, folder, [*alone.words, f"run.dir={folder / 'runs'}", *own], "together")
    world.gather_text("finished")
    return run


def assert_same_files(alone: Alone, run: Path, *rounds: int) -> None:
    for number in rounds:
        for name in ("samples", "scores", "pairs"):
            one, other = (each / f"rounds/{number:04d}/{name}.jsonl" for each in (alone.run, run))
            assert one.read_bytes() == other.read_bytes(), (number, name)


def test_unequal_ranks_draw_what_one_draws(alone: Alone, world: World, folder: Path) -> None:
    run = together(alone, world, folder, "strategy=synchronous", "plan.shares=[3,1]", "rollouts.rounds=1")
    assert_same_files(alone, run, 1)
    world.gather_text("checked")


@pytest.mark.long
def test_unequal_ranks_draw_ahead_what_one_draws(alone: Alone, world: World, folder: Path) -> None:
    """The first two rounds are of the same weights on any ranks."""
    own = ["strategy=independent", "plan.shares=[3,1]", "rollouts.rounds=2", "rollouts.overlap=true"]
    assert_same_files(alone, together(alone, world, folder, *own), 1, 2)
    world.gather_text("checked")


@pytest.mark.long
def test_ranks_that_hold_parts_of_the_model_draw_what_one_draws(alone: Alone, world: World, folder: Path) -> None:
    run = together(alone, world, folder, "strategy=pipelined", "rollouts.rounds=2", "rollouts.overlap=true")
    one, parts = (lines(each / "rounds/0001/samples.jsonl") for each in (alone.run, run))
    same = [first["tokens"] == second["tokens"] for first, second in zip(one, parts, strict=True)]
    assert sum(same) >= len(same) - 1, "a rounding may change a token, though hardly ever"
    versions = [{one["version"] for one in lines(run / f"rounds/{n:04d}/samples.jsonl")} for n in (1, 2)]
    assert versions == [{0}, {0}] and len(tiny.steps_of(run)) == 4
    if world.rank == 0:
        model = models.load(ModelSettings(path=str(tiny.ROOT / "configs/quickstart/model")), 0)
        prompts = {one["prompt_id"]: one["prompt_ids"] for one in lines(run / "rounds/0001/pairs.jsonl")}
        samples = [
            Sample(
                one["prompt_id"], one["k"], prompts[one["prompt_id"]], one["tokens"], one["logps"], one["finish"], ""
            )
            for one in parts
            if one["prompt_id"] in prompts
        ][:8]
        assert samples
        expected, limits = rounding.expected_and_limits(
            model, lambda: [{str(i): logps_of(model, sample, 1.5) for i, sample in enumerate(samples)}]
        )
        rounding.assert_within([{str(i): np.array(one.logps) for i, one in enumerate(samples)}], expected, limits)
    world.gather_text("checked")


@pytest.mark.long
def test_every_rank_goes_back_to_the_momentum_before_a_round_that_is_undone(
    alone: Alone, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "lib.rollouts.rounds.losses_of"
    monkeypatch.setattr(why, lambda rounds, latest, tolerance: ["it shall"] * (rounds[-1].round == 1))
    own = ["strategy=independent", "plan.shares=[2,2]", "rollouts.rounds=2", "independent.merge=outer"]
    run = together(alone, world, folder, *own)
    for rank in range(world.size):
        kept, undone = (common_at(run / f"checkpoints/step-{step:08d}", MOMENTUM, World()) for step in (2, 4))
        assert kept and all(np.array_equal(undone[name], array) for name, array in kept.items())
    world.gather_text("checked")
