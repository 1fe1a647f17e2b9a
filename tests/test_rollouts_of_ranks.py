"""Rounds on two real ranks: they draw what one draws, whatever their shares, and whoever holds the model's blocks."""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lib.config.settings import ModelSettings
from lib.distributed.world import World
from lib.evaluate.sampler import Sample
from lib.model import load as models
from tests import rounding, tiny
from tests.ranks import train
from tests.test_sampler import logps_of
from tests.tiny import read_jsonl as lines

pytestmark = pytest.mark.mpi(min_size=2, max_size=2)


class Alone(NamedTuple):
    """A run of one rank, and the settings that runs of all ranks have with it in common."""

    run: Path
    words: list[str]


def trained_alone(world: World, words: list[str], folder: Path, name: str, *own: str) -> Alone:
    """A run of rank 0; the others wait without taking processor time from it, as in a collective."""
    if world.rank == 0:
        train(World(), folder, [*words, *own], name)
    deadline = time.monotonic() + 100
    while not (folder / "runs" / name / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    world.gather_text("trained alone")
    return Alone(folder / "runs" / name, words)


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A round of one rank."""
    folder = Path(world.broadcast_text(str(tmp_path_factory.mktemp("alone"))))
    words = world.broadcast_value(tiny.rounds(folder) if world.rank == 0 else [])
    return trained_alone(world, words, folder, "alone", "rollouts.rounds=1")


def together(alone: Alone, world: World, folder: Path, *own: str) -> Path:
    """A run of all ranks on the same prompts."""
    return train(world, folder, [*alone.words, f"run.dir={folder / 'runs'}", *own], "together")


def assert_same_files(alone: Alone, run: Path, *rounds: int) -> None:
    for number in rounds:
        for name in ("samples", "scores", "pairs"):
            one, other = (each / f"rounds/{number:04d}/{name}.jsonl" for each in (alone.run, run))
            assert one.read_bytes() == other.read_bytes(), (number, name)


def test_unequal_ranks_draw_what_one_draws(alone: Alone, world, folder) -> None:
    run = together(alone, world, folder, "strategy=synchronous", "plan.shares=[3,1]", "rollouts.rounds=1")
    assert_same_files(alone, run, 1)


@pytest.mark.long
def test_ranks_that_hold_parts_of_the_model_draw_what_one_draws(alone: Alone, world, folder) -> None:
    run = together(alone, world, folder, "strategy=pipelined", "rollouts.rounds=2")
    one, parts = (lines(each / "rounds/0001/samples.jsonl") for each in (alone.run, run))
    same = [first["tokens"] == second["tokens"] for first, second in zip(one, parts, strict=True)]
    assert sum(same) >= len(same) - 1, "a rounding may change a token, though hardly ever"
    assert len(tiny.steps_of(run)) == 4
    if world.rank == 0:
        model = models.load(ModelSettings(path=str(tiny.ROOT / "configs/quickstart/model")), 0)
        prompts = {one["prompt_id"]: one["prompt_ids"] for one in lines(run / "rounds/0001/pairs.jsonl")}
        known = [one for one in parts if one["prompt_id"] in prompts][:8]
        figures = ("tokens", "logps", "finish")
        names = [(one["prompt_id"], one["k"], prompts[one["prompt_id"]]) for one in known]
        samples = [Sample(*name, *(one[key] for key in figures), "") for name, one in zip(names, known, strict=True)]
        assert samples

        def of_model() -> list[rounding.Results]:
            return [{str(i): logps_of(model, sample, 1.5) for i, sample in enumerate(samples)}]

        found = [{str(i): np.array(one.logps) for i, one in enumerate(samples)}]
        rounding.assert_within(found, *rounding.expected_and_limits(model, of_model))
