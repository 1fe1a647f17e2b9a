"""How far apart two results may be that are equal but for rounding: from the arithmetic, not from what one CPU gave.

Summed in whatever order, a sum of n products in floating point is the exact sum of factors that were changed by n u at most,
where u is the unit roundoff (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). So a result may differ from
another computation of it by as much as it moves when every weight is changed by n u: by much where it is ill-conditioned,
hardly at all where it is not. The changes are drawn at random, the largest movement of a few draws is the limit. Roundings have
random signs and so reach about 1/sqrt(n) of it: docs/testing.md has measured parts.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from lib.config import load as config
from lib.distributed.world import World
from lib.model import load as models
from tests import tiny

UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8}
DRAWS = 2
LONGEST = 13  # tokens of a completion that tests.tiny makes

Results = Mapping[str, Any]  # arrays by name


def roundoff(terms: int, dtype: mx.Dtype = mx.float32) -> float:
    """n u: how much rounding may change the factors of a sum of so many products, relatively."""
    return terms * UNIT_ROUNDOFF[dtype]


def longest_sum(model: nn.Module) -> int:
    """The largest dimension of any weight: no product of a layer has longer sums."""
    return max(max(array.shape, default=1) for _, array in tree_flatten(model.parameters()))


def changed(model: nn.Module, seed: int) -> Any:
    """The model's parameters, each changed by a random part of what rounding may do to it."""
    keys, relative = iter(mx.random.split(mx.random.key(seed), 10_000)), roundoff(longest_sum(model))
    arrays = {
        name: (array * (1 + relative * mx.random.uniform(-1, 1, array.shape, key=next(keys)))).astype(array.dtype)
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    }
    return tree_unflatten(list(arrays.items()))


def expected_and_limits(
    model: nn.Module, compute: Callable[[], Sequence[Results]], world: World | None = None
) -> tuple[list[dict[str, np.ndarray]], list[dict[str, float]]]:
    """What `compute` gives of the model, in groups of one kind, and the norm by which each array may be missed.

    A gradient that is nothing but rounding (of a bias before a softmax) does not move: none has a limit below n u of its
    group's largest norm, whose size the terms of its sums have. The ranks of a world draw in turn.
    """

    def computed() -> list[dict[str, np.ndarray]]:
        return [{name: np.array(array, np.float64) for name, array in group.items()} for group in compute()]

    expected, kept, least = computed(), model.parameters(), roundoff(longest_sum(model))
    limits = [dict.fromkeys(group, least * max(map(np.linalg.norm, group.values()))) for group in expected]
    world = world or World()
    for seed in range(world.rank, DRAWS, world.size):
        model.update(changed(model, seed))
        for group, limit, moved in zip(expected, limits, computed(), strict=True):
            for name, array in group.items():
                limit[name] = max(limit[name], float(np.linalg.norm(moved[name] - array)))
        model.update(kept)
    drawn = [json.loads(text) for text in world.gather_text(json.dumps(limits))]
    return expected, [{name: max(own[i][name] for own in drawn) for name in group} for i, group in enumerate(limits)]


def assert_within(
    actual: Sequence[Results], expected: Sequence[Mapping[str, np.ndarray]], limits: Sequence[Mapping[str, float]]
) -> None:
    """Asserts that every array is there, and no farther away than its limit."""
    for found, wanted, limit in zip(actual, expected, limits, strict=True):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert np.linalg.norm(np.array(found[name], np.float64) - array) <= limit[name], name


def changed_run(run: Path) -> Path:
    """A run like this one, from starting weights that are changed by as much as rounding may change them.

    A run that is equal but for rounding ends no farther away than it does. It trains in this process, on one rank.
    """
    return _train_changed(run.parent, run / "config.yaml", [])


def _train_changed(folder: Path, file: Path | None, words: Sequence[str]) -> Path:
    import train as script

    changes = [f"run.dir={folder / '.changed'}", "data.valid=null", "evaluate.samples=0"]  # with a reference of its own
    settings, load = config.load(file, [*words, *changes]), models.load

    def load_changed(*arguments: Any, **options: Any) -> nn.Module:
        model = load(*arguments, **options)
        model.update(changed(model, 0))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "load", load_changed)
        script.train(settings, World(), resume=False, dry_run=False)
    return Path(settings.run.dir) / str(settings.run.name)


class Alone(NamedTuple):
    """A run of one rank, and the same run from weights that are changed as rounding may change them."""

    run: Path
    changed: Path

    @property
    def limit(self) -> float:
        """The relative difference of a parameter that a run may have which is equal but for rounding."""
        return tiny.difference(self.run, self.changed)


def trained_alone(world: World, words: Sequence[str], name: str = "alone") -> Alone:
    """What ranks together are compared with. One rank trains each of the two, at the same time; the others wait."""
    import train as script

    words = [*words, f"run.name={name}"]
    settings = config.load(None, words)
    folder = Path(settings.run.dir)
    alone = Alone(folder / name, folder / ".changed" / name)
    if world.rank == 0:
        script.train(settings, World(), resume=False, dry_run=False)
    if world.rank == world.size - 1:
        _train_changed(folder, None, words)
    deadline = time.monotonic() + 200
    while not all((run / "summary.json").exists() for run in alone) and time.monotonic() < deadline:
        time.sleep(0.01)  # a rank that waits in a collective keeps a core busy, which those that train want
    world.gather_text("trained alone")
    return alone


def assert_equal_runs(run: Path | Alone, others: Sequence[Path], figures: Sequence[str]) -> None:
    """Asserts that runs end with the weights of this one, and have its figures at every step, but for rounding."""
    alone = run if isinstance(run, Alone) else Alone(run, changed_run(run))
    for other in others:
        assert tiny.difference(alone.run, other) <= alone.limit, other
        for key in figures:
            # A divergence is a difference of log-probabilities, and rounds as they do.
            logps = LONGEST * math.log(tiny.LLAMA["vocab_size"]) if key == "kl" else 0.0
            largest = max(logps, *(abs(record[key]) for record in tiny.steps_of(alone.run)))
            limit = tiny.figure_difference(*alone, key) + roundoff(tiny.LLAMA["vocab_size"]) * largest
            assert tiny.figure_difference(alone.run, other, key) <= limit, (other, key)


def limit_of(run: Path) -> float:
    """The relative difference of a parameter (tests.tiny.difference) that a run may have which is equal but for rounding."""
    return Alone(run, changed_run(run)).limit
