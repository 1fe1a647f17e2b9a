"""Reports of ranks: the launcher's watcher tells dead, stopped and hanging ranks from working ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lib.distributed.connection import KEY_VARIABLE, new_key
from lib.distributed.heartbeat import WATCHER, Watcher
from tests.tiny import ROOT, wait_for

RANK = """
import sys, time
from lib.distributed import heartbeat
heartbeat.start(int(sys.argv[1]))
heartbeat.report(step=7)
"""


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    key = new_key()
    watcher = Watcher("127.0.0.1", 0, key, ["a", "b"])
    os.environ[WATCHER], os.environ[KEY_VARIABLE] = "{}:{}".format(*watcher.address), key.decode()
    yield watcher
    watcher.close()
    del os.environ[WATCHER], os.environ[KEY_VARIABLE]


def start(rank: int, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RANK + code, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_ends_is_no_fault_and_its_facts_stay(watcher: Watcher) -> None:
    assert start(0, "").wait(60) == 0
    wait_for(lambda: 0 in watcher.states and not watcher.states[0].is_connected)
    assert watcher.fact("step") == 7 and watcher.fact("run") is None
    assert watcher.silence(0.0, 0.0) is None


def test_stopped_hanging_late_and_wedged_ranks_are_told_apart(watcher: Watcher) -> None:
    waits = start(0, "with heartbeat.waiting('the sum'): time.sleep(600)")
    wait_for(lambda: 0 in watcher.states and watcher.states[0].report["is_wait"])
    wait_for(lambda: (watcher.silence(60.0, 0.5) or [""])[0] == "wedged")
    works = start(1, "with heartbeat.phase('step', 4.0): time.sleep(600)")
    wait_for(lambda: 1 in watcher.states)
    late = watcher.silence(60.0, 0.5)
    assert late is not None and late.kind == "late" and late.ranks == [1]
    assert "rank 0 on a waits for the sum" in late.text and "rank 1 on b did not come to it" in late.text
    wait_for(lambda: "rank 1 on b hangs in step" in str(watcher.silence(60.0, 0.5)))
    works.send_signal(signal.SIGSTOP)
    wait_for(lambda: "rank 1 on b sent nothing" in str(watcher.silence(5.0, 600.0)))
    for process in (works, waits):
        process.kill()
        process.wait()


def test_a_rank_ends_with_its_launcher(watcher: Watcher) -> None:
    rank = start(0, "time.sleep(600)")
    wait_for(lambda: 0 in watcher.states)
    watcher.close()
    assert rank.wait(60) == 1 and rank.stderr is not None
    assert "the launcher is gone" in rank.stderr.read()
