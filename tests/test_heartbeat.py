"""Reports of ranks: the launcher's watcher tells dead, stopped and hanging ranks from working ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lib.distributed.connection import KEY_VARIABLE, new_key
from lib.distributed.heartbeat import WATCHER, Watcher

ROOT = Path(__file__).parents[1]
RANK = """
import sys, time
from lib.distributed import heartbeat
heartbeat.start(int(sys.argv[1]))
heartbeat.report(step=7)
"""


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    key = new_key()
    watcher = Watcher("127.0.0.1", 0, key)
    os.environ[WATCHER], os.environ[KEY_VARIABLE] = "{}:{}".format(*watcher.address), key.decode()
    yield watcher
    watcher.close()
    del os.environ[WATCHER], os.environ[KEY_VARIABLE]


def start(rank: int, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RANK + code, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_ends_is_not_dead_and_a_killed_one_is(watcher: Watcher) -> None:
    ends, killed = start(0, ""), start(1, "time.sleep(600)")
    assert ends.wait(60) == 0
    wait_for(lambda: len(watcher.states) == 2 and not watcher.states[0].is_connected)
    assert watcher.states[0].has_ended
    assert watcher.states[0].report["step"] == 7
    killed.kill()
    killed.wait()
    wait_for(lambda: watcher.dead() == [1])


def test_a_stopped_rank_is_silent_and_a_hanging_one_says_so(watcher: Watcher) -> None:
    hanging = start(0, "with heartbeat.phase('step', 0.1): time.sleep(600)")
    waits = start(1, "with heartbeat.waiting('the sum'): time.sleep(600)")
    wait_for(lambda: watcher.hanging() == [0] and 1 in watcher.states)
    wait_for(lambda: watcher.states[1].report["phase"] == "the sum")
    assert watcher.states[1].report["is_wait"]
    waits.send_signal(signal.SIGSTOP)
    wait_for(lambda: watcher.stopped(5.0) == [1])
    for process in (hanging, waits):
        process.kill()
        process.wait()


def test_a_rank_ends_with_its_launcher(watcher: Watcher) -> None:
    rank = start(0, "time.sleep(600)")
    wait_for(lambda: 0 in watcher.states)
    watcher.close()
    assert rank.wait(60) == 1
    assert rank.stderr is not None
    assert "the launcher is gone" in rank.stderr.read()
