"""Random runs on real ranks, from a seed: how they work together, what they train, and how they end.

Every rank plays the same case in its own process. A run may finish, be stopped in the middle and go on in other shares,
stop because nothing is finite, or meet an error on one rank; in each case all ranks must be in step afterwards. Ranks
that are not wait for each other, and the world's deadline ends them with the name of what they waited for.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import train as script
from lib.config import load
from lib.distributed.world import World
from lib.errors import Stopped, UserError
from lib.plan.cluster_plan import ClusterPlan
from lib.plan.pipeline_replan import MovedCut
from lib.system import mpi_and_blas
from lib.training import moved_blocks, objective
from tests import tiny

ENDS = ("finishes", "finishes", "stopped and resumed", "never finite", "broken rows on one rank", "full disk")
HEADS = {"hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}

BLOCKS = 4
FAILED_SECONDS = 90  # of a whole run with a rank that fails
# train.py on a disk that is full as soon as a file has so many bytes. Only from when the run's folder is open: before, Open MPI
# would find no room for the memory that its ranks share.
FULL_DISK = """
import resource, sys
size = int(sys.argv.pop(1))
import train
from lib.training import checkpoint
def open_run(*args, opened=checkpoint.open_run):
    lock = opened(*args)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return lock
checkpoint.open_run = open_run
sys.exit(train.main(sys.argv[1:]))
"""
# train.py on a rank that meets a fault of ours, or is killed, at a call of some function, counted from 1.
BROKEN = """
import os, signal, sys
at = int(sys.argv.pop(1))
import train
from lib.system import mpi_and_blas
PLACE
plain, calls = getattr(place, name), 0
def broken(*arguments, **options):
    global calls
    calls += 1
    if calls == at and is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == at:
        raise ValueError("a fault of ours")
    return plain(*arguments, **options)
setattr(place, name, broken)
sys.exit(mpi_and_blas.status_of(train.main))
"""
FAULTS = {"killed": "import lib.training.step as s; place, name, is_killed = s.TrainStep, '_own_gradients', True"}
IN_STAGES = {
    "forward": "import lib.training.pipelined_step as s; place, name, is_killed = s._Passes, 'forward', False",
    "backward": "import lib.training.pipelined_step as s; place, name, is_killed = s._Passes, 'backward', False",
    "reference": "import lib.training.reference_model as s; place, name, is_killed = s, 'completion_logps', False",
    "killed while it receives": "import lib.distributed.links as s; place, name, is_killed = s.Links, 'wait', True",
}


@dataclass(frozen=True)
class Case:
    """One random run: its settings, how it ends, and on which rank something happens."""

    strategy: str
    words: tuple[str, ...]
    rows: int
    held_out: int
    longest: int
    steps: int
    end: str
    rank: int
    at: int
    resumed_words: tuple[str, ...] = ()
    cuts: tuple[tuple[int, ...], ...] = ()  # to which blocks move, one after the other, where nothing fixes them

    def __str__(self) -> str:
        return f"{self.strategy}, {self.end} (rank {self.rank}, step {self.at}): {' '.join(self.words)}"


def make_case(seed: int, ranks: int, only: str | None = None) -> Case:
    """The run of a seed, for a world of this size. only: the strategy of all runs."""
    rng = random.Random(f"{seed} {ranks}")
    strategy = only or rng.choice(["synchronous", "independent", "independent", "sharded", "pipelined"])
    batch, rows = rng.randint(1, 12), rng.randint(1, 40)
    steps = rng.randint(1, 7)

    def cut() -> tuple[int, ...]:
        ends = [0, *sorted(rng.sample(range(1, BLOCKS), ranks - 1)), BLOCKS]
        return tuple(end - start for start, end in pairwise(ends))

    def shares() -> list[str]:
        if rng.random() < 0.3:
            return [f"plan.replan={rng.choice(['true', 'false'])}"]
        if strategy == "sharded":
            return [f"plan.shares={[rng.randint(1, 5) for _ in range(ranks)]}"]
        if strategy == "pipelined":
            return [f"plan.shares={list(cut())}"] if rng.random() < 0.5 else ["plan.replan_steps=1"]
        cuts = sorted(rng.randint(0, batch) for _ in range(ranks - 1))
        dealt = [end - start for start, end in zip([0, *cuts], [*cuts, batch], strict=True)]
        return [f"plan.shares={dealt}"]

    def sizes() -> list[str]:
        each = [rng.randint(1, 5) for _ in range(1 if strategy in ("sharded", "pipelined") else ranks)]
        return [f"plan.micro_batch_sizes={each}"] if rng.random() < 0.5 else []

    method = rng.choice(["lora", "lora", "dora", "full"])
    words = [f"strategy={strategy}", f"train.global_batch_size={batch}", f"model.method={method}"]
    words += [f"train.loss={rng.choice(['sigmoid', 'sft', 'orpo', 'ipo'])}", f"train.seed={rng.randint(0, 99)}"]
    words += [f"checkpoint.every={rng.randint(1, 4)}", f"evaluate.every={rng.choice(['null', 1, 2, 3])}"]
    words += [f"evaluate.batch_size={rng.randint(1, 5)}", f"data.shared_prompts={rng.choice(['true', 'false'])}"]
    words += [rng.choice(["model.dropout=0.2", "model.gradient_checkpointing=true", "model.attention_window=5"])]
    words += [f"evaluate.samples={rng.choice([0, 1])}", "evaluate.max_tokens=3"]
    words += [f"train.max_grad_norm={rng.choice(['null', 0.1])}"]
    if strategy == "sharded":
        words.append(f"model.shard_vocabulary={rng.choice(['true', 'false'])}")
    else:
        kinds = ["none", "none", "bf16", "int8", *(["topk"] if strategy != "pipelined" else [])]
        words.append(f"sync.compression={rng.choice(kinds)}")
    if strategy == "independent":
        merges = ["average", "outer", "none", *(["stack", "svd"] if method == "lora" else [])]
        words += [f"independent.merge={rng.choice(merges)}"]
        pairs = rng.randint(1, 40)
        words += [f"independent.pairs_per_round={pairs}"] if pairs % 3 else []  # else as often as it costs little
    end, rank = rng.choice(ENDS), rng.randrange(ranks)
    if (strategy, end) == ("pipelined", "never finite"):
        rank = ranks - 1  # which alone has a loss
    return Case(
        strategy=strategy,
        words=(*words, *shares(), *sizes()),
        rows=rows,
        held_out=rng.choice([0, 1, 2, 9]),
        longest=rng.choice([2, 12, 30]),
        steps=steps,
        end=end,
        rank=rank,
        at=rng.randint(1, steps),
        resumed_words=tuple(shares()),
        cuts=tuple(cut() for _ in range(steps)) if strategy == "pipelined" else (),
    )


def play(case: Case, world: World, folder: Path) -> None:
    """One run on all ranks, from `folder`, which is theirs alone; afterwards they are in step.

    Raises:
        AssertionError: it did not end as it had to, or a row was lost or trained twice.
    """
    words = [*_settings(case, world, folder), *case.words]
    if case.end == "stopped and resumed":
        _train(world, [*words, f"train.steps={case.at}", "train.schedule=constant"])
        words += [*case.resumed_words, "train.schedule=constant"]
    if case.end == "broken rows on one rank" and world.rank == case.rank:
        broken = tiny.write_jsonl(folder / "broken.jsonl", ['{"prompt_ids": [3], "chosen_ids": [4'])
        words.append(f"data.train={broken}")
    if case.end == "full disk" and world.rank == 0:
        (folder / "runs/run").mkdir(parents=True)
        (folder / "runs/run/checkpoints").write_text("a file where a folder should be")
    if case.end == "never finite":
        words.append("train.max_skipped_steps=1")
    with pytest.MonkeyPatch.context() as patch:
        if case.end == "never finite" and world.rank == case.rank:
            plain = objective.objective
            patch.setattr(objective, "objective", lambda train, logps, *rest: plain(train, logps * mx.nan, *rest))
        cuts = iter(case.cuts)

        def moved(plan: ClusterPlan, *_: object) -> MovedCut | None:
            blocks = next(cuts, plan.blocks)
            return None if blocks == plan.blocks else MovedCut(blocks, 1.0, 2.0, (1.0,) * world.size)

        patch.setattr(moved_blocks, "moved_cut", moved)
        try:
            _train(world, [*words, f"train.steps={case.steps}"], resume=case.end == "stopped and resumed")
            outcome = "finished"
        except (Stopped, UserError) as error:
            outcome = re.sub(r"rank-\d+\.jsonl", "its log", str(error))
    told = world.gather_long_text(json.dumps([outcome, str(case)]), "the end of a case")
    assert told == told[:1] * world.size, "ranks ended unlike each other, or are out of step"
    known = {"broken rows on one rank": "broken.jsonl", "never finite": "not finite"}
    if case.end == "full disk":  # a warning on the way, an error at the end
        known[case.end] = "finished" if outcome == "finished" else "checkpoint"
    # Apart, a rank may have no row to be wrong about.
    idle = case.end == "never finite" and case.strategy == "independent" and outcome == "finished"
    assert known.get(case.end, "finished") in outcome or idle, f"{case}: {outcome}"
    if outcome == "finished":
        _is_whole(case, folder / "runs/run")
    world.gather_text("looked at")  # nobody goes on, or cleans up, while another still reads


def _train(world: World, words: list[str], resume: bool = False) -> None:
    script.train(load.load(None, [*words, "run.name=run"]), world, resume=resume, dry_run=False)


def _settings(case: Case, world: World, folder: Path) -> list[str]:
    """The same words on every rank; rank 0 writes the files."""
    mine: list[str] = []
    if world.rank == 0:
        mine = tiny.settings(folder, rows=case.rows)
        tiny.model_folder(folder / "model", num_hidden_layers=BLOCKS, **HEADS)
        tiny.write_jsonl(folder / "train.jsonl", _rows(case, case.rows, 0))
        tiny.write_jsonl(folder / "valid.jsonl", _rows(case, case.held_out, 1))
        mine += ["data.valid=null"] * (case.held_out == 0) + ["data.max_length=128"]
    return list(json.loads(world.broadcast_text(json.dumps(mine))))


def _rows(case: Case, count: int, seed: int) -> list[Any]:
    pairs = tiny.pairs(count, seed, longest=case.longest)
    if "train.loss=sft" in case.words:
        return [{"prompt_ids": pair["prompt_ids"], "completion_ids": pair["chosen_ids"]} for pair in pairs]
    return list(pairs)


def _is_whole(case: Case, run: Path) -> None:
    """Every row of every whole epoch was trained once."""
    assert json.loads((run / "summary.json").read_text())["steps"] == case.steps
    batch = next(int(word.partition("=")[2]) for word in case.words if word.startswith("train.global_batch_size="))
    in_epoch = -(-case.rows // batch)
    epochs = tiny.rows_of_epochs(run)
    is_divided = case.strategy in ("sharded", "pipelined")
    ranks = len(list((run / "logs").glob("rank-*.jsonl"))) if is_divided else 1
    for epoch in range(case.steps // in_epoch):
        assert epochs[epoch] == sorted(list(range(case.rows)) * ranks), (str(case), epoch)


def one_rank_fails(seed: int, ranks: int, only: str | None = None) -> str:
    """A run one of whose ranks meets a fault by itself; how it ended, which it has to. only: the strategy.

    Raises:
        subprocess.TimeoutExpired: it did not.
    """
    rng = random.Random(seed)
    strategy = only or rng.choice(["synchronous", "independent", "sharded", "pipelined"])
    fault = rng.choice(["full disk", "full disk", "killed", *(IN_STAGES if strategy == "pipelined" else ())])
    unlucky, limit = rng.randrange(ranks), 1024 * rng.randint(1, 40) if fault == "full disk" else rng.randint(1, 40)
    with tempfile.TemporaryDirectory() as folder:
        words: list[Any] = tiny.settings(Path(folder), rows=60)
        tiny.model_folder(
            Path(folder) / "model", num_hidden_layers=BLOCKS, num_attention_heads=8, num_key_value_heads=4
        )
        words += [f"strategy={strategy}", "train.steps=40", "checkpoint.every=9", "run.name=run"]
        words += ["data.streaming=true"] * (fault == "reference")  # which has a pass in every step
        words += ["--config", str(tiny.config_file(Path(folder)))]
        command = [str(mpi_and_blas.mpirun_path())]
        for rank in range(ranks):
            code = FULL_DISK if fault == "full disk" else BROKEN.replace("PLACE", (FAULTS | IN_STAGES)[fault])
            broken = ["-c", code, str(limit)] if rank == unlucky else [str(tiny.ROOT / "train.py")]
            command += [":"] * (rank > 0) + ["-n", "1", sys.executable, *broken, *map(str, words)]
        done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True, timeout=FAILED_SECONDS)
        errors = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "stopped: ", "ValueError"))]
        assert fault == "full disk" or done.returncode, "a rank was gone, and the run ended well"
        assert done.returncode == 0 or errors or fault.startswith("killed"), done.stderr
        return f"{strategy}, {fault} ({limit}) on rank {unlucky}: status {done.returncode} {errors[:1]}"
