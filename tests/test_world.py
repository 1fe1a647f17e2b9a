"""What ranks do together, on real ranks: `mpirun -n 2 python -m pytest` runs these on all of them at once."""

import mlx.core as mx
import numpy as np
import pytest

from lib.config.settings import ModelSettings
from lib.distributed import world as worlds
from lib.distributed.world import World
from lib.errors import AgreedError, Stopped, UserError
from lib.model import load as models
from lib.system import records as run_records
from lib.system.records import PerformanceTracker
from tests import tiny
from tests.ranks import settings, train
from tests.tiny import steps_of

pytestmark = pytest.mark.mpi(min_size=2)


def unequal(world: World) -> list[int]:
    """Shares of 8 pairs that give every rank something."""
    return [9 - world.size, *[1] * (world.size - 1)]


READ = {"data.train": "tokenised training data", "data.valid": "held-out data or questions"}


@pytest.mark.parametrize(("place", "what"), [*READ.items(), ("model.reference", "reference model")])
def test_ranks_with_other_files_than_rank_0_stop_together(world, folder, place: str, what: str) -> None:
    """Else their figures would be mixed, or, where there are more of them, be cut off."""
    words = settings(world, folder)
    if world.rank == 0:
        for name in ("data.train", "data.valid"):
            tiny.write_jsonl(folder / name, tiny.pairs(300, seed=5))
        for seed in (0, 1):
            path = tiny.model_folder(folder / f"model.reference{seed}")
            model = models.load(ModelSettings(path=str(path), random_init=True), seed)
            model.save_weights(str(path / "model.safetensors"))
    world.gather_text("written")
    words += [f"model.reference={folder}/model.reference{int(world.rank == 1 and place == 'model.reference')}"]
    words += [f"{place}={folder}/{place}"] * (world.rank == 1 and place.startswith("data."))
    with pytest.raises(AgreedError, match=f"rank 1 has another {what} than rank 0"):
        train(world, folder, words, "run")


def test_non_finite_updates_are_left_out_and_then_stop_the_run(world, folder) -> None:
    words = [*settings(world, folder), f"plan.shares={unequal(world)}", "train.optimizer=sgd", "train.epochs=9"]
    words += ["train.learning_rate=1e38", "train.max_grad_norm=null", "train.max_skipped_steps=3"]
    with pytest.raises(Stopped, match="3 updates in a row were not finite"):
        train(world, folder, words, "run")
    world.gather_text("stopped")
    skipped = [[r["skipped"] for r in steps_of(folder / "runs" / "run", rank)] for rank in range(world.size)]
    assert skipped == [skipped[0]] * world.size and skipped[0][-3:] == [True] * 3 and not all(skipped[0])


def test_gradients_and_sums_are_added_whatever_the_order_of_names(world, monkeypatch) -> None:
    arrays = {
        name: np.random.default_rng(i).normal(size=shape).astype(np.float32)
        for i, (name, shape) in enumerate([("b", (3, 5)), ("a", (7,)), ("c", (1, 1, 2))])
    }
    names = list(arrays) if world.rank == 0 else list(reversed(arrays))
    tree = {name: mx.array((world.rank + 1) * arrays[name]) for name in names}
    total = sum(range(1, world.size + 1))
    for bucket_bytes in (8, 40, 2**28):  # leaves alone, some together, all together
        monkeypatch.setattr(worlds, "BUCKET_BYTES", bucket_bytes)
        gradients, sums = world.sum_gradients(tree, mx.array([1.0, float(world.rank)]))
        assert sums.tolist() == [world.size, sum(range(world.size))]
        for name, array in arrays.items():
            np.testing.assert_allclose(np.array(gradients[name]), total * array, rtol=1e-6)


def test_broadcast_keeps_every_bit_of_every_type(world) -> None:
    rank0 = {
        "f": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "h": np.array([[1.5], [-2]], np.float16),
        "i": np.array(2**40, np.int64),
        "u": np.arange(5, dtype=np.uint8),
        "t": np.array([True, False]),
    }
    mine = rank0 if world.rank == 0 else {name: np.zeros_like(array) for name, array in reversed(rank0.items())}
    received = world.broadcast({name: mx.array(array) for name, array in mine.items()})
    for name, array in rank0.items():
        assert np.array(received[name]).tobytes() == array.tobytes(), name


def test_text_is_gathered_and_broadcast(world) -> None:
    assert world.gather_text(f"rank {world.rank} ü") == [f"rank {rank} ü" for rank in range(world.size)]
    assert world.broadcast_text("x" * 5000 * (world.rank == 0)) == "x" * 5000


def test_all_ranks_leave_with_the_error_of_one(world) -> None:
    with pytest.raises(AgreedError, match="rank 1: data.jsonl:17 is broken"), world.agreeing("reading"):
        if world.rank == 1:
            raise UserError("data.jsonl:17 is broken")
    with pytest.raises(AgreedError, match="rank 1: UserError"), world.agreeing("an error without a word"):
        if world.rank == 1:
            raise UserError("")
    with pytest.raises(AgreedError, match="No space left"), world.agreeing("writing"):
        if world.rank == 0:
            raise OSError(28, "No space left on device", "checkpoint")
    with world.agreeing("nothing"):
        pass
    with pytest.raises(AgreedError, match="rank 1 has another data than rank 0"):
        world.require_equal("data", "b" if world.rank == 1 else "a")


def test_logs_of_other_disks_come_to_rank_0_and_those_of_the_same_disk_do_not(world, folder, monkeypatch) -> None:
    monkeypatch.setattr(run_records, "PIECE_BYTES", 500)
    apart, name = world.rank == world.size - 1, f"rank-{world.rank:03d}.jsonl"
    disk = folder / ("there" if apart else "here") / "logs"  # the last rank's is another one
    for _ in range(2):  # the second time it is a resumed run's, on copies of the first
        tracker = PerformanceTracker(disk / name, world.rank, f"host-{world.rank}")
        for step in range(8):
            tracker.record("step", step=step, text="ü" * 40)
        tracker.gather(world)
        tracker.record("end")
        tracker.gather(world, everything=True)
        tracker.close()
        world.broadcast_text("written")  # nobody looks before all are done
    here, last = folder / "here" / "logs", world.size - 1
    copies = [path.relative_to(here).as_posix() for path in here.rglob("*.jsonl")]
    assert sorted(copies) == [f"host-{last}/rank-{last:03d}.jsonl", *(f"rank-{r:03d}.jsonl" for r in range(last))]
    own = folder / "there" / "logs" / f"rank-{last:03d}.jsonl"
    assert (here / f"host-{last}" / own.name).read_bytes() == own.read_bytes()
