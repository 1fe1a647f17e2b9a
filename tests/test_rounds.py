"""Rounds without a network: the ledger over random worlds, and train.py on one and several ranks as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.system.records import read_records
from lib.training import round_assignment
from tests import rounding, tiny
from tests.cluster import Host
from tests.tiny import ROOT, difference, steps_of


@settings(max_examples=80)
@given(st.data())
def test_every_pair_is_trained_once_an_epoch_whatever_ranks_do(data: st.DataObject) -> None:
    """Random data sets, batches, rounds, shares and speeds; ranks stop anywhere; checkpoints in between."""
    size, batch = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 12))
    in_epoch = -(-size // batch)
    steps, pairs = data.draw(st.integers(1, 3 * in_epoch)), data.draw(st.integers(1, 2 * size))
    ranks, rng = data.draw(st.integers(1, 4)), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths, step, seen = rng.integers(2, 99, size), 0, []
    while step < steps:
        this = round_assignment.open_round(step, steps, pairs, lengths, 5, batch, 4)
        assert this.first_step == step and this.last_step > step
        held = len(this.rows)
        assert held >= pairs or this.last_step == steps
        assert held - (this.edges[-1] - this.edges[-2]) < pairs, "a round is the fewest batches that hold its pairs"
        pending = np.arange(held)
        while len(pending):
            shares = rng.multinomial(batch, np.ones(ranks) / ranks).tolist()
            if rng.random() < 0.5 and round_assignment.is_tail(this, pending):
                queues = round_assignment.assign_planned(this, pending, shares)
                batches = [{len(queue) for queue in queues}]
                cut = int(rng.integers(1, len(this.edges)))
                end = this.edges[min(int(np.searchsorted(this.edges, pending[0])) + cut, len(this.edges) - 1)]
                done = [sum(chunk.indices[-1] < end for chunk in queue) for queue in queues]
                assert batches
            else:
                queues = round_assignment.assign_by_speed(this, pending, shares, rng.uniform(0.1, 9, ranks).tolist())
                done = [int(rng.integers(0, len(queue) + 1)) for queue in queues]
            dealt = [chunk.indices for queue in queues for chunk in queue]
            assert sorted(np.concatenate(dealt).tolist()) == pending.tolist(), "dealt twice, or not at all"
            for rank, queue in enumerate(queues):
                for chunk in queue:
                    assert 0 < len(chunk.indices) <= shares[rank]
                    assert len({int(this.epochs[place]) for place in chunk.indices}) == 1
            for queue, count in zip(queues, done, strict=True):
                for chunk in queue[:count]:
                    seen += [(int(this.epochs[place]), int(this.rows[place])) for place in chunk.indices]
            pending = round_assignment.left_over(pending, queues, done)
            state = json.loads(json.dumps(round_assignment.to_state(pending, held)))
            assert round_assignment.from_state(**state, size=held).tolist() == pending.tolist()
        step = this.last_step
    assert len(seen) == len(set(seen)), "a pair was trained twice in an epoch"
    whole, rest = divmod(steps, in_epoch)
    for epoch in range(whole):
        assert sorted(row for e, row in seen if e == epoch) == list(range(size))
    assert len([row for e, row in seen if e == whole]) == min(rest * batch, size)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.lists(st.floats(0.1, 10), min_size=5, max_size=5),
    st.integers(1, 3000),
)
def test_dealt_by_speed_all_end_within_a_chunk_of_each_other(shares: list[int], speeds: list[float], size: int) -> None:
    speeds = speeds[: len(shares)]
    this = round_assignment.open_round(0, 10**6, size, np.ones(size, int), 0, size, 1)
    queues = round_assignment.assign_by_speed(this, np.arange(size), shares, speeds)
    ends = [sum(len(c.indices) for c in queue) / speed for queue, speed in zip(queues, speeds, strict=True)]
    longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    assert max(ends) <= size / sum(speeds) + longest * (1 + 1e-9)
    befores = [chunk.before for queue in queues for chunk in queue]
    assert all(queue == sorted(queue, key=lambda c: c.before) for queue in queues) and min(befores) == 0


def test_planned_shares_are_those_of_a_synchronous_step() -> None:
    this = round_assignment.open_round(3, 9, 40, np.arange(21), 0, 8, 1)
    queues = round_assignment.assign_planned(this, np.arange(len(this.rows)), [6, 2])
    batches = np.diff(this.edges).tolist()
    assert batches == [8, 8, 5, 8, 8, 5][: len(batches)] and [len(c.indices) for c in queues[0]][:3] == [6, 6, 4]
    assert [len(c.indices) for c in queues[1]][:3] == [2, 2, 1]
    assert [chunk.before for chunk in queues[0]] == this.edges[:-1].tolist()


# ---- train.py ----------------------------------------------------------------------------------------------------------


def test_one_rank_apart_is_one_rank(tmp_path: Path) -> None:
    """Alone there is nothing to wait for and nothing to merge: the same bits, but for the order within a batch."""
    words = [*tiny.settings(tmp_path), "train.steps=8", "independent.pairs_per_round=20"]
    tiny.train(tmp_path, [*words, "run.name=plain"])
    tiny.train(tmp_path, [*words, "run.name=apart", "strategy=independent"])
    plain, apart = (steps_of(tmp_path / "runs" / name) for name in ("plain", "apart"))
    rounding.assert_equal_runs(tmp_path / "runs" / "plain", [tmp_path / "runs" / "apart"], ["loss"])
    for one, other in zip(plain, apart, strict=True):
        assert sorted(one["rows"]) == sorted(other["rows"]) and one["learning_rate"] == other["learning_rate"]


@pytest.mark.long
def test_hosts_with_disks_of_their_own_keep_their_parts(tmp_path: Path, fresh_hosts: list[Host]) -> None:
    """Killed on all hosts inside a round, and resumed: the bits of a run that nobody stopped, nothing on a shared disk."""
    hosts = fresh_hosts[:2]
    common = [*tiny.settings(tmp_path, rows=45), "strategy=independent", "plan.shares=[5,3]", "train.steps=30"]
    common += ["checkpoint.every=4", f"run.dir={hosts[0].disk}/runs", f"--config={tiny.config_file(tmp_path)}"]

    def start(words: Sequence[str], port: int) -> list[subprocess.Popen[str]]:
        processes = []
        for rank, host in enumerate(hosts):
            ring = json.dumps([[f"{one.address}:{port + place}"] for place, one in enumerate(hosts)])
            (host.outside / "ring.json").write_text(ring)
            variables = {**os.environ, "MLX_HOSTFILE": f"{host.disk}/ring.json", "MLX_RANK": str(rank)}
            processes.append(host.start([sys.executable, str(ROOT / "train.py"), *words], env=variables, cwd=ROOT))
        return processes

    def finished(processes: list[subprocess.Popen[str]]) -> str:
        outputs = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        return outputs[0][0]

    finished(start([*common, "run.name=whole"], 5300))
    processes = start([*common, "run.name=run"], 5310)
    log = hosts[1].outside / "runs" / "run" / "logs" / "rank-001.jsonl"
    saved = hosts[0].outside / "runs" / "run" / "checkpoints"
    while not (log.exists() and len(log.read_bytes().splitlines()) > 12 and any(saved.glob("step-*"))):
        ended = [process.communicate() for process in processes if process.poll() is not None]
        assert not ended, ended
        time.sleep(0.002)
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    told = finished(start(["--resume", f"{hosts[0].disk}/runs/run"], 5320))
    assert "resuming" in told and "after step 0" not in told
    whole, run = (hosts[0].outside / "runs" / name for name in ("whole", "run"))
    assert difference(whole, run) == 0.0
    parts = {path.name.partition("-rank-")[2] for path in (hosts[1].outside / "runs/run/checkpoints/ranks").iterdir()}
    assert parts == {"001.safetensors"}, "each host has its own rank's parts and no other"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["independent.merge=stack", "model.method=full"], ["stack", "model.method=lora", "average or outer"]),
        (["independent.merge=svd", "model.method=dora"], ["svd", "DoRA", "average or outer"]),
        (["independent.merge=mean"], ["independent.merge"]),
        (["independent.pairs_per_round=0"], ["independent.pairs_per_round", "greater than 0"]),
        (["sync.compression=topk", "sync.topk_fraction=0"], ["sync.topk_fraction", "greater than 0"]),
        (["strategy=sharded", "sync.compression=int8"], ["sync.compression", "strategy=sharded", "none"]),
        (["checkpoint.max_lost_seconds=1"], ["checkpoint.max_lost_seconds", "checkpoint.every"]),
        (["sync.topk_fraction=1.5"], ["sync.topk_fraction"]),
        (["sync.compression=zip"], ["sync.compression"]),
        (["independent.outer_momentum=1"], ["independent.outer_momentum", "less than 1"]),
        (["independent.outer_learning_rate=-1"], ["independent.outer_learning_rate"]),
        (["strategy=independant"], ["strategy"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_is_one_clear_line(tmp_path: Path, words: list[str], expected: list[str]) -> None:
    result = tiny.train(tmp_path, [*tiny.settings(tmp_path), "strategy=independent", *words], check=False)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
    assert result.returncode == 2 and len(lines) == 1, result.stderr
    assert all(part in lines[0] for part in expected), lines[0]


def test_rounds_smaller_than_a_batch_are_whole_batches(tmp_path: Path) -> None:
    words = [*tiny.settings(tmp_path), "strategy=independent", "independent.pairs_per_round=1", "train.steps=4"]
    tiny.train(tmp_path, [*words, "run.name=run"])
    records = list(read_records(tmp_path / "runs" / "run" / "logs" / "rank-000.jsonl"))
    assert [sum(r["pairs"]) for r in records if r["kind"] == "merge"] == [8, 8, 5, 8]
