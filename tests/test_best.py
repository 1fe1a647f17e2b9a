"""Which weights a run ends with: the best, the last, or those at which the held-out loss fell no more."""

import errno
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lib.errors import UserError
from lib.training import checkpoint
from lib.training.checkpoint import Progress, checkpoints_in, find, step_of
from lib.training.run_end import worsened
from tests import tiny
from tests.ranks import train
from tests.tiny import records, summary

STEPS, EVERY, PATIENCE = 16, 2, 2
WORDS = [f"train.steps={STEPS}", f"evaluate.every={EVERY}", "train.learning_rate=0.03", "train.schedule=constant"]
EARLY = f"train.patience={PATIENCE}"


def losses(run: Path) -> dict[int, float]:
    """Held-out loss by step, without that before the first step."""
    return {record["step"]: record["loss"] for record in records(run, "evaluation") if record["step"]}


def stop_of(of_steps: dict[int, float], patience: int) -> int:
    """The step at which a run of these held-out losses ends."""
    best, waited = math.inf, 0
    for step, loss in of_steps.items():
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == patience:
            return step
    return max(of_steps)


def same(one: Path, other: Path) -> bool:
    return tiny.bits(one) == tiny.bits(other)


def written(folder: Path) -> list[str]:
    """tiny.settings, whose held-out loss falls and rises again: of three pairs two are learnt, the third is swapped."""
    words, learnt = tiny.settings(folder), tiny.pairs(21)
    swapped = [row | {"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]} for row in learnt]
    tiny.write_jsonl(folder / "valid.jsonl", [*learnt, *learnt, *swapped])
    return words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: `whole` takes all its steps, and `early` has patience."""
    folder = tmp_path_factory.mktemp("best")
    words = [*written(folder), *WORDS, "checkpoint.every=1", "checkpoint.keep=1"]
    tiny.train(folder, [*words, "run.name=whole"])
    tiny.train(folder, [*words, "run.name=early", EARLY, "checkpoint.keep=50"])
    return folder


def test_the_folder_holds_the_weights_of_the_lowest_held_out_loss(folder) -> None:
    run = folder / "runs" / "whole"
    best = min(losses(run), key=lambda step: losses(run)[step])
    assert best < STEPS, "the loss has to rise again"
    assert {step_of(path) for path in checkpoints_in(run / "checkpoints")} == {best, STEPS}
    assert same(run, run / "checkpoints" / f"step-{best:08d}")
    told = summary(run)
    assert told["checkpoint"] == {"which": "best", "step": best, "held_out_loss": losses(run)[best]}
    assert (told["loss"], told["steps"], told["early_end"]) == (losses(run)[best], STEPS, None)
    (end,) = records(run, "end")
    assert (end["final_step"], end["loss"]) == (best, losses(run)[best])


def test_a_run_ends_where_the_held_out_loss_falls_no_more(folder) -> None:
    whole, early = folder / "runs" / "whole", folder / "runs" / "early"
    stop = stop_of(losses(whole), PATIENCE)
    assert stop < STEPS
    assert len(tiny.steps_of(early)) == stop == summary(early)["steps"]
    assert losses(early) == {step: loss for step, loss in losses(whole).items() if step <= stop}
    assert summary(early)["early_end"] == records(early, "end")[0]["reason"]
    assert f"no improvement for {PATIENCE} evaluations (best loss" in summary(early)["early_end"]
    best = min(losses(early), key=lambda step: losses(early)[step])
    assert summary(early)["checkpoint"]["step"] == best


def test_a_resume_keeps_the_count_and_more_patience_goes_on(folder, tmp_path) -> None:
    early = folder / "runs" / "early"
    stop = summary(early)["steps"]
    again = tmp_path / "early"
    shutil.copytree(early, again)
    tiny.undo(again, stop - 2)  # as if the process had been killed between two evaluations
    tiny.train(tmp_path, ["--resume", str(again)])
    assert summary(again)["steps"] == stop and same(early, again)
    before = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert "ended early:" in tiny.train(tmp_path, ["--resume", str(again)]).stdout
    assert {path: path.read_bytes() for path in again.rglob("*") if path.is_file()} == before
    tiny.train(tmp_path, ["--resume", str(again), "train.patience=null"])
    assert summary(again)["steps"] == STEPS and summary(again)["early_end"] is None
    assert same(folder / "runs" / "whole", again)


def test_the_last_weights_are_kept_where_they_are_asked_for_or_the_best_are_damaged(folder, tmp_path) -> None:
    run = tmp_path / "whole"
    shutil.copytree(folder / "runs" / "whole", run)
    best, last = (find(run, which) for which in ("best", "last"))
    (run / "summary.json").unlink()  # as if it was killed before its end
    tiny.train(tmp_path, ["--resume", str(run), "checkpoint.final=last"])
    assert same(run, last) and summary(run)["checkpoint"]["which"] == "last"
    assert summary(run)["loss"] == summary(run)["checkpoint"]["held_out_loss"] == losses(run)[STEPS]
    (best / "adapters.safetensors").write_bytes(b"")
    (run / "summary.json").unlink()
    damaged = tiny.train(tmp_path, ["--resume", str(run), "checkpoint.final=best"])
    assert same(run, last) and "is damaged (adapters.safetensors does not match its hash)" in damaged.stdout
    with pytest.raises(UserError, match=r"--checkpoint best: .* is damaged"):
        find(run, "best")


def test_where_the_best_found_no_room_on_the_disk_the_last_weights_are_taken(folder, tmp_path, monkeypatch) -> None:
    expected = losses(folder / "runs" / "whole")
    best = min(expected, key=lambda step: expected[step])
    write = checkpoint.write_whole

    def full_for_a_while(final: Path, *words: Any) -> None:
        if step_of(final) == best:
            raise OSError(errno.ENOSPC, "No space left on device", str(final))
        write(final, *words)

    monkeypatch.setattr(checkpoint, "write_whole", full_for_a_while)
    words = [*written(tmp_path), *WORDS, "checkpoint.every=1", "checkpoint.keep=1", "run.name=run"]
    shown = tiny.train(tmp_path, words)
    run, last = tmp_path / "runs" / "run", max(expected)
    assert losses(run) == expected and "the last are taken" in shown.stdout
    assert summary(run)["checkpoint"] == {"which": "last", "step": last, "held_out_loss": expected[last]}


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    "words",
    [
        ["strategy=synchronous", "plan.shares=[5,3]", EARLY],
        ["strategy=independent", "independent.pairs_per_round=8", "plan.replan=false", EARLY],
        # The last merge's adapters have the rank of all ranks' together; the best ones have not.
        ["strategy=independent", "independent.pairs_per_round=16", "plan.replan=false", "independent.merge=stack"],
        ["strategy=sharded", "plan.shares=[1,1]", EARLY],
        ["strategy=pipelined", "plan.shares=[1,1]", EARLY],
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
@pytest.mark.long(
    "strategy=pipelined train.patience=2",
    "strategy=independent independent.merge=stack",
    "strategy=sharded train.patience=2",
)
def test_ranks_end_together_with_the_best(words: list[str], world, tmp_path) -> None:
    folder = Path(world.broadcast_text(str(tmp_path)))
    common = world.broadcast_value(written(folder) if world.rank == 0 else [])
    words = [*common, *WORDS, *words, "evaluate.samples=0"]
    run = train(world, folder, words, "run")
    found = dict(enumerate(losses(run).values()))
    if EARLY in words:
        assert summary(run)["steps"] < STEPS and stop_of(found, PATIENCE) == max(found)
    told = summary(run)["checkpoint"]
    assert (told["which"], told["held_out_loss"]) == ("best", min(found.values()))
    assert same(run, find(run, "best")) and step_of(find(run, "best")) == told["step"]
    assert [record["final_step"] for record in records(run, "end", world.rank)] == [told["step"]]


def test_a_run_that_made_the_model_worse_says_what_it_was_and_is(tmp_path) -> None:
    learnt, words = tiny.pairs(21), tiny.settings(tmp_path)
    swapped = [row | {"chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]} for row in learnt]
    tiny.write_jsonl(tmp_path / "valid.jsonl", swapped)
    shown = tiny.train(tmp_path, [*words, *WORDS[1:], "train.steps=4", "run.pages=true", "run.name=run"]).stdout
    of = summary(tmp_path / "runs" / "run")
    text = f"held-out loss was {of['loss_before']:.4f} before it and is {of['loss']:.4f} now"
    assert of["loss"] > of["loss_before"] and shown.count(text) == 1
    assert text in (tmp_path / "runs" / "run" / "report.html").read_text()
    both = ({"exact_match": 0.97, "loss": 0.5}, {"exact_match": 0.825, "loss": 0.4})
    assert "exact_match was 0.9700 before it and is 0.8250" in str(worsened("exact_match", *both))
    assert worsened("loss", *both) is worsened("exact_match", both[0], both[0]) is None


def test_a_run_without_held_out_data_holds_the_last_weights(tmp_path) -> None:
    run = tiny.run(tmp_path, data__valid="null", train__steps=2)
    assert summary(run)["checkpoint"] == {"which": "last", "step": 2, "held_out_loss": None}
    with pytest.raises(UserError, match="has no evaluation"):
        find(run, "best")


def test_only_a_better_figure_counts_as_an_improvement() -> None:
    progress, seen = Progress(data_digest=""), []
    for step, loss in enumerate([None, math.nan, 0.7, 0.7, math.inf, 0.6, 0.65]):
        progress.step = step
        seen.append((progress.is_best({"loss": loss}, "loss"), progress.evaluations_since_best))
    assert seen == [(False, 0), (False, 1), (True, 0), (False, 1), (False, 2), (True, 0), (False, 1)]
    assert (progress.best_step, progress.best_metrics) == (5, {"loss": 0.6})
    assert progress.evaluations_since_best == 1


def test_an_exact_match_that_falls_is_no_best_though_the_loss_falls_too() -> None:
    """The quickstart at 120 steps: the loss fell while the exact match went from 97 to 82 %."""
    evaluations = [(0.53, 0.6), (0.97, 0.2), (0.97, 0.1), (0.82, 0.05)]
    by_exact, by_loss = Progress(data_digest=""), Progress(data_digest="")
    for step, (exact, loss) in enumerate(evaluations):
        for progress, best_by in ((by_exact, "exact_match"), (by_loss, "loss")):
            progress.step = step
            progress.is_best({"loss": loss, "exact_match": exact}, best_by)
    assert by_exact.best_step == 2, "of two equal ones that with the lower loss"
    assert by_loss.best_step == 3


def test_a_checkpoint_is_found_by_name_or_number(folder) -> None:
    run = folder / "runs" / "whole"
    best = summary(run)["checkpoint"]["step"]
    assert [step_of(find(run, which)) for which in ("best", "last", str(best))] == [best, STEPS, best]
    for which, why in (
        ("newest", "--checkpoint newest: give best, last, or a step's number"),
        ("-1", "give best, last"),
        ("7", f"has checkpoints of steps {best}, {STEPS}"),
    ):
        with pytest.raises(UserError, match=why):
            find(run, which)
    with pytest.raises(UserError, match="none is whole"):
        find(folder, "last")
