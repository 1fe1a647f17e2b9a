"""Adapters updated as one array: the weights, states and names of an update array by array."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from numpy.testing import assert_allclose, assert_array_equal

from lib.config.schema import SyncSettings
from lib.data.collate import collate
from lib.distributed.world import World, start
from lib.system import mpi_and_blas
from lib.training import joined_arrays, step
from lib.training.joined_arrays import ELEMENTWISE, JoinedArrays, is_worth_it
from tests.test_step import build, examples, reference_logps

STEPS = 3


def made(folder: Path, *words: str, sync: SyncSettings | None = None) -> tuple[nn.Module, Any, step.TrainStep]:
    model, settings = build(folder, "train.compile=true", "train.learning_rate=0.01", *words)
    optimizer = step.make_optimizer(settings.train)
    return model, optimizer, step.make_step(model, optimizer, settings.train, World(), dropout=False, sync=sync)


def taken(train_step: step.TrainStep, first: int, last: int) -> None:
    for index in range(first, last):
        train_step(index, 10, [(collate(examples(), 8, True), reference_logps(3))])


def held(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
    both = [*tree_flatten(model.trainable_parameters()), *tree_flatten(optimizer.state)]
    return {name: np.array(array) for name, array in both}


@pytest.mark.parametrize("name", [kind.__name__.lower() for kind in ELEMENTWISE])
def test_joined_arrays_are_updated_as_each_by_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"train.optimizer={name}", "train.weight_decay=0"]
    words += ["train.optimizer_options={momentum: 0.9}"] if name == "sgd" else []
    model, optimizer, joined = made(tmp_path, *words)
    assert joined.joined is not None
    taken(joined, 0, STEPS)
    monkeypatch.setattr(step, "is_worth_it", lambda *_: False)
    plain_model, plain_optimizer, plain = made(tmp_path, *words)
    assert plain.joined is None
    before = held(plain_model, plain_optimizer)
    taken(plain, 0, STEPS)
    wanted, found = held(plain_model, plain_optimizer), held(model, optimizer)
    assert list(found) == list(wanted) and any((wanted[name] != before[name]).any() for name in before)
    for name, array in wanted.items():  # the norm is a sum of another order
        assert found[name].shape == array.shape and found[name].dtype == array.dtype
        assert_allclose(found[name], array, rtol=1e-4, atol=1e-6)


def test_what_others_change_meanwhile_counts(tmp_path: Path) -> None:
    model, optimizer, straight = made(tmp_path)
    taken(straight, 0, 2 * STEPS)
    other_model, other_optimizer, stopped = made(tmp_path)
    taken(stopped, 0, STEPS)
    kept = held(other_model, other_optimizer)
    taken(stopped, STEPS, STEPS + 2)  # to be undone
    weights, state = ({name: mx.array(kept[name]) for name, _ in tree_flatten(tree)} for tree in _trees(stopped))
    other_model.update(tree_unflatten(list(weights.items())))
    other_optimizer.state = tree_unflatten(list(state.items()))
    taken(stopped, STEPS, 2 * STEPS)
    for name, array in held(model, optimizer).items():
        assert_array_equal(held(other_model, other_optimizer)[name], array)


def _trees(train_step: step.TrainStep) -> tuple[Any, Any]:
    return train_step.model.trainable_parameters(), train_step.optimizer.state


def test_one_changed_array_of_many_is_seen(tmp_path: Path) -> None:
    model, optimizer, train_step = made(tmp_path)
    taken(train_step, 0, 1)
    joined = train_step.joined
    assert joined is not None
    unchanged = joined.parameters(0.01)
    assert unchanged is joined.whole
    last = joined.names.index(max(joined.names))
    module, key = joined.places[last]
    module[key] = module[key] + 1
    changed = np.flatnonzero(np.array(joined.parameters(0.01)["all"] != unchanged["all"]))
    size = sum(part.size for part in joined.parts)
    assert_array_equal(changed, np.arange(size - joined.parts[last].size, size))


def test_zeros_at_the_end_stay_zeros_and_count_nowhere(tmp_path: Path) -> None:
    _, _, train_step = made(tmp_path, "train.optimizer=lion", "train.weight_decay=0.1")
    taken(train_step, 0, STEPS)
    joined = train_step.joined
    assert joined is not None and joined.whole is not None
    whole, size = joined.whole["all"], sum(part.size for part in joined.parts)
    assert whole.size > size and not whole.reshape(-1)[size:].any()


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    model, optimizer, train_step = made(tmp_path)
    taken(train_step, 0, 1)
    before = held(model, optimizer)
    result = train_step(1, 10, [(collate(examples(), 8, True), np.full((3, 2), np.nan, np.float32))])
    assert result.skipped
    for name, array in held(model, optimizer).items():
        assert_array_equal(array, before[name])


@pytest.mark.parametrize(
    "words",
    [
        ["train.optimizer=muon"],
        ["train.optimizer=adafactor"],
        ["train.optimizer=adamw_8bit"],
        ["train.loraplus_lr_ratio=4"],
        ["train.compile=false"],
    ],
    ids=lambda words: words[0],
)
def test_other_updates_are_array_by_array(words: list[str], tmp_path: Path) -> None:
    assert made(tmp_path, *words)[2].joined is None


def test_compressed_gradients_keep_their_names(tmp_path: Path) -> None:
    assert made(tmp_path, sync=SyncSettings(compression="int8"))[2].joined is None


def test_large_or_narrow_arrays_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, train_step = made(tmp_path)
    assert is_worth_it(model, optimizer)
    size = sum(array.nbytes for _, array in tree_flatten(model.trainable_parameters()))
    monkeypatch.setattr(joined_arrays, "LARGEST_BYTES", size - 1)
    assert not is_worth_it(model, optimizer)
    monkeypatch.setattr(joined_arrays, "LARGEST_BYTES", size)
    assert is_worth_it(model, optimizer)
    assert isinstance(train_step.joined, JoinedArrays)
    module, key = train_step.joined.places[0]
    module[key] = module[key].astype(mx.bfloat16)
    assert not is_worth_it(model, optimizer)


def test_the_arrays_are_joined_once_and_then_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, train_step = made(tmp_path)
    counts: list[int] = []
    join = joined_arrays._joined
    monkeypatch.setattr(joined_arrays, "_joined", lambda arrays: (counts.append(len(arrays)), join(arrays))[1])
    taken(train_step, 0, 1)
    assert counts
    counts.clear()
    taken(train_step, 1, STEPS)
    assert not counts, "gradients are joined in the compiled step"


def test_an_update_that_fails_leaves_nothing_to_go_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, straight = made(tmp_path)
    taken(straight, 0, 3)
    other_model, other_optimizer, failing = made(tmp_path)

    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    for index in range(3):
        looks = index == 1
        before = held(other_model, other_optimizer) if looks else {}
        with monkeypatch.context() as patch:
            patch.setattr(joined_arrays.JoinedArrays, "_parts", fail)
            with pytest.raises(RuntimeError, match="no room"):
                taken(failing, index, index + 1)
        after = held(other_model, other_optimizer) if looks else {}
        for name, array in before.items():
            assert_array_equal(after[name], array)
        taken(failing, index, index + 1)
    found = held(other_model, other_optimizer)
    for name, array in held(model, optimizer).items():
        assert_array_equal(found[name], array)


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize("compiled", [(True, True), (True, False), (False, False)])
def test_ranks_join_together_or_not_at_all(compiled: tuple[bool, bool], tmp_path: Path) -> None:
    world = start(mpi_and_blas.launch_environment(), timeout_seconds=120)
    model, settings = build(tmp_path, f"train.compile={json.dumps(compiled[world.rank])}", "train.learning_rate=0.01")
    own_model, own_optimizer, alone = made(tmp_path / "alone")
    optimizer = step.make_optimizer(settings.train)
    train_step = step.make_step(model, optimizer, settings.train, world, dropout=False)
    assert (train_step.joined is not None) == all(compiled)
    rows, references = examples(), reference_logps(3)
    own = slice(0, 2) if world.rank == 0 else slice(2, 3)
    for index in range(STEPS):
        train_step(index, 10, [(collate(rows[own], 8, True), references[own])])
        alone(index, 10, [(collate(rows, 8, True), references)])
    wanted = held(own_model, own_optimizer)
    for name, array in held(model, optimizer).items():
        assert_allclose(array, wanted[name], rtol=1e-3, atol=1e-5)
